"""State in bins of dataflow programs, against a loop over times: whatever moves, on threads and on processes."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _native
from penstock.dataflow import _stateful
from penstock.errors import ConfigError, GraphError, TimeError, UserFunctionError

TIMES = 8
Item = tuple[int, int]


def key_of(item: Any) -> int:
    return int(item[0])


def folding(factor: int) -> Any:
    def fold(time: int, records: list[Any], mine: Any, *others: Any) -> Any:
        """Sums per key that depend on the order of times, and on the sums of the other input; some come again later, or
        once more at once, some of them there."""
        for key, value in sorted(records):
            there = sum(other.state.get(key, 0) for other in others)
            mine.state[key] = total = (mine.state.get(key, 0) * factor + there + value) % 1_000
            if value in (1, 2, 3):
                mine.notify_at(time + value, (key, 10 + value))
            elif value == 4:
                mine.notify_at(time, (key, 9))
            elif value >= 6:
                for other in others:
                    other.notify_at(time + value - 6, (key, 0))
            if value == 5:
                del mine.state[key]
            yield factor, key, value, total

    return fold


#: Of one input, and of two.
FOLDS = [[folding(7)], [folding(7), folding(11)]]
Sides = list[dict[int, list[Item]]]


def bin_of(key: int, bits: int) -> int:
    [code] = _native.hash_keys([key])
    return code >> (64 - bits)


def expected(sides: Sides, bits: int) -> Counter[Any]:
    """Time after time, bin after bin, input after input."""
    folds = FOLDS[len(sides) - 1]
    bins: dict[int, list[Any]] = {}
    due: dict[tuple[int, int], list[list[Item]]] = defaultdict(lambda: [[] for _ in sides])
    out: Counter[Any] = Counter()

    class Held:
        def __init__(self, bin: int, side: int) -> None:
            self.state: dict[int, int] = {}
            self.place = (bin, side)

        def notify_at(self, time: int, record: Item) -> None:
            bin, side = self.place
            due[time, bin][side].append(record)

    for side, items in enumerate(sides):
        for time, item in ((time, item) for time, all_ in items.items() for item in all_):
            due[time, bin_of(item[0], bits)][side].append(item)
    while due:
        time, bin = min(due)
        held = bins.setdefault(bin, [Held(bin, side) for side in range(len(sides))])
        for side, fold in enumerate(folds):
            # What the fold before has left for this one at once is given to it.
            records, due[time, bin][side] = due[time, bin][side], []
            if records:
                out.update((time, made) for made in fold(time, records, held[side], *held[:side], *held[side + 1 :]))
        if not any(due[time, bin]):
            del due[time, bin]
    return out


def program(sides: Sides, commands: dict[int, list[Any]], bits: int, seed: int, ahead: int) -> Any:
    def run(worker: Any) -> Any:
        rng = random.Random(seed + worker.index)
        folds = FOLDS[len(sides) - 1]
        with worker.dataflow() as scope:
            inputs, streams = zip(*(scope.input() for _ in sides), strict=True)
            moves, control = scope.input()
            options = {"control": control, "bits": bits}
            made = (
                streams[0].stateful_unary(key_of, *folds, **options)
                if len(sides) == 1
                else streams[0].stateful_binary(streams[1], key_of, key_of, *folds, **options)
            )
            seen = made.collect()
        for time in range(TIMES + ahead):
            if time < TIMES:
                moves.advance_to(time)
                mine = [one for at, one in enumerate(commands.get(time, [])) if at % worker.peers == worker.index]
                if mine:
                    moves.send(mine)
            else:
                moves.close()
            if time >= ahead:
                for data, items in zip(inputs, sides, strict=True):
                    data.advance_to(time - ahead)
                    all_ = items.get(time - ahead, [])
                    data.send([item for at, item in enumerate(all_) if at % worker.peers == worker.index])
                    for _ in range(rng.randrange(3)):
                        worker.step()
        moves.close()
        return seen

    return run


several = st.dictionaries(
    st.integers(0, TIMES - 1), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8)), max_size=6), max_size=TIMES
)


@pytest.mark.parametrize("inputs", [1, 2])
@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 1 << 30), st.data())
def test_moves_are_seen_by_nobody(inputs: int, bits: int, workers: int, seed: int, data: Any) -> None:
    sides = [data.draw(several) for _ in range(inputs)]
    worker = st.integers(0, workers - 1)
    # Of a time one map or some moves.
    command = (
        st.lists(worker, min_size=1 << bits, max_size=1 << bits).map(lambda owners: [owners])
        | st.dictionaries(st.integers(0, (1 << bits) - 1), worker, max_size=3).map(lambda moves: list(moves.items()))
        | st.just([None])
    )
    commands = data.draw(st.dictionaries(st.integers(0, TIMES - 1), command, max_size=4))
    ahead = data.draw(st.integers(0, 3))
    found = pk.execute(program(sides, commands, bits, seed, ahead), workers=workers)
    got = Counter((time, made) for seen in found for time, block in seen for made in block)
    assert got == expected(sides, bits)


@pytest.mark.parametrize("inputs", [1, 2])
def test_bins_move_between_processes(inputs: int) -> None:
    rng = random.Random(3)
    sides = [
        {time: [(rng.randrange(9), rng.randrange(9)) for _ in range(6)] for time in range(TIMES)} for _ in range(inputs)
    ]
    commands = {1: [[1, 0, 1, 0]], 4: [(0, 0), (2, 0)], 6: [[1, 1, 1, 1]]}
    found = pk.execute(program(sides, commands, 2, 1, 1), processes=2)
    got = Counter((time, made) for seen in found for time, block in seen for made in block)
    assert got == expected(sides, 2)


def test_items_are_where_their_bin_is() -> None:
    """From the time of a command on, on every worker; before it nowhere else."""

    def run(worker: Any) -> Any:
        with worker.dataflow() as scope:
            data, stream = scope.input()
            moves, control = scope.input()
            seen = stream.distribute(key_of, control=control, bits=2).collect()
            kept = stream.stateful_unary(
                key_of, lambda time, records, bin: [(one, worker.index) for one in records], control=control, bits=2
            ).collect()
        for time, command in ((0, None), (1, [0, 0, 0, 0]), (2, (3, 1)), (3, [1, 1, 1, 1])):
            data.advance_to(time)
            data.send([(key, 0) for key in range(worker.index, 20, worker.peers)])
            if worker.index == 0:
                moves.advance_to(time)
                moves.send([command])
        moves.close()
        return seen, kept

    owners = {0: [0, 1, 0, 1], 1: [0] * 4, 2: [0, 0, 0, 1], 3: [1] * 4}
    for index, (seen, kept) in enumerate(pk.execute(run, workers=2)):
        for time, owner in owners.items():
            mine = sorted(key for key in range(20) if owner[bin_of(key, 2)] == index)
            assert sorted(key for at, block in seen if at == time for key, _ in block) == mine
            assert sorted(item[0] for at, block in kept if at == time for item, _ in block) == mine


def routed_by(commands: list[Any]) -> Any:
    """Counts by key on two workers, each of which gives commands of its own at time 1, before items at time 2."""

    def run(worker: Any) -> Any:
        with worker.dataflow() as scope:
            data, stream = scope.input()
            moves, control = scope.input()
            made = stream.state_machine(
                key_of, lambda key, item, n: ((n or 0) + 1, [(key, (n or 0) + 1)]), control=control, bits=1
            )
            seen = made.collect()
        moves.advance_to(1)
        moves.send(commands[worker.index])
        moves.close()
        data.advance_to(2)
        data.send([(key, 0) for key in range(8)])
        return seen

    return pk.execute(run, workers=2)


def test_commands_of_several_workers_at_one_time_hold_together() -> None:
    found = routed_by([[(0, 1)], [None, (1, 0)]])
    for index, bin in ((0, 1), (1, 0)):
        keys = [key for key in range(8) if bin_of(key, 1) == bin]
        assert Counter(item for _, block in found[index] for item in block) == {(k, n): 1 for k in keys for n in (1, 2)}


@pytest.mark.parametrize(
    ("commands", "says"),
    [
        (
            [[(1, 0), (0, 1)], [(0, 0)]],
            r"bin 0 is moved twice at time 1: \(0, 1\) of worker 0, and \(0, 0\) of worker 1; give one command",
        ),
        ([[(1, 0)], [(1, 0)]], r"bin 1 is moved twice at time 1: \(1, 0\) of worker 0, and \(1, 0\) of worker 1"),
        ([[(1, 0), None, (1, 1)], []], r"bin 1 is moved twice at time 1: .* of worker 0, and \(1, 1\) of worker 0"),
        (
            [[(0, 1)], [[0, 0]]],
            r"a map of all bins is not alone at time 1: \[0, 0\] of worker 1, and \(0, 1\) of worker 0; give the",
        ),
        (
            [[[1, 1]], [[1, 1]]],
            r"a map of all bins is not alone at time 1: \[1, 1\] of worker 0, and \[1, 1\] of worker 1",
        ),
    ],
)
def test_commands_of_one_time_whose_meaning_depends_on_their_order_are_refused(commands: list[Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"state_machine.*: {says}"):
        routed_by(commands)


def test_bins_are_refused_where_workers_come_and_go() -> None:
    def run(worker: Any, how: str) -> None:
        with worker.dataflow() as scope:
            _, stream = scope.input()
            if how == "distribute":
                stream.distribute(key_of)
            elif how == "machine":
                stream.state_machine(key_of, lambda key, item, n: (n, []))
            else:
                stream.stateful_unary(key_of, nothing)

    for how in ("distribute", "machine", "unary"):
        with pytest.raises(GraphError, match=r"bins belong to workers that stay.*execute without join="):
            pk.execute(lambda worker, how=how: run(worker, how), workers=1, join=1)


def test_owners_are_those_of_a_map_for_each_time() -> None:
    rng = random.Random(5)
    owners = _stateful._Owners([0, 1, 2, 3])
    maps = [(0, [0, 1, 2, 3])]
    least = time = 0
    for _ in range(2_000):
        match rng.randrange(8):
            case 0:
                time += rng.randrange(1, 4)
                commands = [(0, rng.choice([None, (rng.randrange(4), rng.randrange(4)), rng.sample(range(4), 4)]))]
                changes = _stateful._changes(owners.newest, commands, 4, "step", time)
                owners.add(time, changes)
                after = list(maps[-1][1])
                for bin, old, new in changes:
                    assert after[bin] == old != new
                    after[bin] = new
                maps.append((time, after))
            case 1:
                least = min(rng.randrange(least, least + 3), time)
                owners.forget(least)
            case _:
                asked = rng.randrange(least, time + 2)
                assert owners.at(asked) == next(found for since, found in reversed(maps) if since <= asked)
    assert owners.newest == maps[-1][1] and len(maps) > 100
    owners.forget(time)
    assert owners.at(time) == owners.newest and not owners._changes


def test_moves_that_are_given_ahead_cost_what_they_move() -> None:
    def run(worker: Any) -> int:
        with worker.dataflow() as scope:
            data, stream = scope.input()
            moves, control = scope.input()
            probe = stream.stateful_unary(key_of, nothing, control=control, bits=12).probe()
        tracemalloc.start()
        for time in range(1, 301):
            moves.advance_to(time)
            moves.send([(time, 0)])
        moves.advance_to(301)
        for _ in range(5):
            worker.step()
        data.advance_to(301)
        worker.step_while(lambda: probe.less_than(301))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    [most] = pk.execute(run, workers=1)
    assert most < 2_000_000


def test_what_is_due_is_indexed_once_a_bin() -> None:
    def fold(time: int, records: list[Any], mine: Any) -> None:
        if "far" not in mine.state:
            mine.state["far"] = True
            mine.notify_at(10_000, "far")
        mine.notify_at(time + 1, "again")

    state = _stateful._State("step", [fold], {})
    for time in range(500):
        state._came[time] = [(0, 0, bin, "item") for bin in range(3)]
        state._apply(time)
        assert state._least() == time + 1 and len(state._due) <= 9, state._due


def test_what_is_due_far_ahead_is_indexed_once_however_often_something_is_nearer() -> None:
    def fold(time: int, records: list[Any], mine: Any) -> None:
        if "far" not in mine.state:
            mine.state["far"] = True
            mine.notify_at(10_000, "far")
        if "item" in records:
            mine.notify_at(time + 1, "near")

    state = _stateful._State("step", [fold], {})
    for time in range(0, 500, 2):
        state._came[time] = [(0, 0, bin, "item") for bin in range(3)]
        state._apply(time)
        assert state._least() == time + 1
        state._apply(time + 1)
        assert state._least() == 10_000 and len(state._due) <= 6, state._due


def test_a_migration_of_idle_sources_completes() -> None:
    def run(worker: Any) -> Any:
        with worker.dataflow() as scope:
            data, stream = scope.input()
            moves, control = scope.input()
            made = stream.state_machine(
                key_of, lambda key, item, n: ((n or 0) + 1, [(n or 0) + 1]), control=control, bits=1
            )
            seen, probe = made.collect(), made.probe()
        if worker.index == 0:
            data.send([(1, 0)] * 3)
        for time, owners in enumerate(([0, 0], [1, 1], [0, 0]), 1):
            data.advance_to(time)
            moves.advance_to(time)
            if worker.index == 1:
                moves.send([owners])
        data.advance_to(9)
        moves.advance_to(9)
        worker.step_while(lambda: probe.less_than(9))
        if worker.index == 1:
            data.send([(1, 0)])
        moves.close()
        return seen

    found = [(time, n) for seen in pk.execute(run, workers=2) for time, block in seen for n in block]
    assert sorted(found) == [(0, 1), (0, 2), (0, 3), (9, 4)]


def test_a_fold_post_dates_nothing_to_the_past_of_the_other_input() -> None:
    def early(time: int, records: list[Any], mine: Any, theirs: Any) -> None:
        theirs.notify_at(time - 1, "too late")

    def run(worker: Any) -> None:
        with worker.dataflow() as scope:
            (left, lefts), (right, rights) = scope.input(), scope.input()
            lefts.stateful_binary(rights, key_of, key_of, early, nothing)
        # The other input has been called for this bin at 3 last.
        right.advance_to(3)
        right.send([(1, 2)])
        left.advance_to(5)
        left.send([(1, 2)])

    with pytest.raises(TimeError, match="cannot be post-dated from time 5 to 4"):
        pk.execute(run, workers=1)


def build(make: Any) -> Any:
    def run(worker: Any) -> Any:
        with worker.dataflow() as scope:
            data, stream = scope.input()
            moves, control = scope.input()
            made = make(scope, stream, control)
            seen = made.collect()
        data.send([(1, 2)])
        moves.send([(0, 0)])
        moves.close()
        return seen

    return pk.execute(run, workers=1)


def nothing(*_: Any) -> None:
    return None


def later(time: int, records: list[Any], bin: Any) -> None:
    bin.notify_at(time - 1, "too late")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda scope, s, c: s.stateful_unary(key_of, nothing, bits=21),
            ConfigError,
            "bits=21 must be an int from 0 to 20",
        ),
        (lambda scope, s, c: s.distribute(key_of, bits="3"), ConfigError, "bits='3' must be an int"),
        (
            lambda scope, s, c: s.enter(scope.nested()).stateful_unary(key_of, nothing).leave(scope),
            GraphError,
            "its times are partly ordered; put it at the root",
        ),
        (
            lambda scope, s, c: s.stateful_unary(key_of, nothing, control=c.map(lambda _: (4, 0)), bits=2),
            ConfigError,
            "there is no bin 4, only 0 to 3",
        ),
        (
            lambda scope, s, c: s.stateful_unary(key_of, nothing, control=c.map(lambda _: (0, 1)), bits=2),
            ConfigError,
            "there is no worker 1, only 0 to 0",
        ),
        (
            lambda scope, s, c: s.stateful_unary(key_of, nothing, control=c.map(lambda _: [0]), bits=2),
            ConfigError,
            "a map of 1 workers for 4 bins",
        ),
        (
            lambda scope, s, c: s.stateful_unary(key_of, nothing, control=c.map(lambda _: "x"), bits=2),
            ConfigError,
            "'x' is no command",
        ),
        (lambda scope, s, c: s.stateful_unary(lambda item: 1 / 0, nothing), UserFunctionError, "ZeroDivisionError"),
        (lambda scope, s, c: s.stateful_unary(lambda item: object(), nothing), UserFunctionError, "TypeError"),
        (
            lambda scope, s, c: s.stateful_unary(key_of, lambda *_: 1 / 0),
            UserFunctionError,
            "ZeroDivisionError.*test_dataflow_stateful",
        ),
        (lambda scope, s, c: s.stateful_unary(key_of, later), TimeError, "cannot be post-dated from time 0 to -1"),
    ],
)
def test_what_makes_no_sense_is_told(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build(make)


def test_a_record_is_not_post_dated_beyond_the_last_time() -> None:
    bin = _stateful.Bin()
    bin.notify_at(2**64 - 1, "last")
    with pytest.raises(TimeError, match="18446744073709551616, which is beyond the last one"):
        bin.notify_at(2**64, "later")
    with pytest.raises(TimeError, match="to -1, which is not at or after it"):
        bin.notify_at(-1, "before")
    assert bin._least() == 2**64 - 1
