"""State in bins of dataflow programs, against a loop over times: whatever moves, on threads and on processes."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _native
from penstock.errors import ConfigError, GraphError, TimeError, UserFunctionError

TIMES = 8
Item = tuple[int, int]


def key_of(item: Any) -> int:
    return int(item[0])


def fold(time: int, records: list[Any], bin: Any) -> Any:
    """Sums per key that depend on the order of times; some come again later, or once more at once."""
    for key, value in sorted(records):
        bin.state[key] = total = (bin.state.get(key, 0) * 7 + value) % 1_000
        if value in (1, 2, 3):
            bin.notify_at(time + value, (key, 10 + value))
        elif value == 4:
            bin.notify_at(time, (key, 9))
        if value == 5:
            del bin.state[key]
        yield key, value, total


def bin_of(key: int, bits: int) -> int:
    [code] = _native.hash_keys([key])
    return code >> (64 - bits)


def expected(items: dict[int, list[Item]], bits: int) -> Counter[Any]:
    """Time after time, bin after bin."""
    bins: dict[int, Any] = {}
    due: dict[tuple[int, int], list[Item]] = defaultdict(list)
    out: Counter[Any] = Counter()

    class Held:
        def __init__(self, bin: int) -> None:
            self.state: dict[int, int] = {}
            self.bin = bin

        def notify_at(self, time: int, record: Item) -> None:
            due[time, self.bin].append(record)

    for item_time, item in ((time, item) for time, all_ in items.items() for item in all_):
        due[item_time, bin_of(item[0], bits)].append(item)
    while due:
        time, bin = min(due)
        for made in fold(time, due.pop((time, bin)), bins.setdefault(bin, Held(bin))):
            out[time, made] += 1
    return out


def program(items: dict[int, list[Item]], commands: dict[int, list[Any]], bits: int, seed: int, ahead: int) -> Any:
    def run(worker: Any) -> Any:
        rng = random.Random(seed + worker.index)
        with worker.dataflow() as scope:
            data, stream = scope.input()
            moves, control = scope.input()
            seen = stream.stateful_unary(key_of, fold, control=control, bits=bits).collect()
        for time in range(TIMES + ahead):
            if time < TIMES:
                moves.advance_to(time)
                mine = [one for at, one in enumerate(commands.get(time, [])) if at % worker.peers == worker.index]
                if mine:
                    moves.send(mine)
            else:
                moves.close()
            if time >= ahead:
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


@settings(max_examples=examples(40), deadline=None)
@given(several, st.integers(0, 3), st.integers(1, 3), st.integers(0, 1 << 30), st.data())
def test_moves_are_seen_by_nobody(items: dict[int, list[Item]], bits: int, workers: int, seed: int, data: Any) -> None:
    worker = st.integers(0, workers - 1)
    # Of a time one map or some moves: commands of several workers at once are in no order.
    command = (
        st.lists(worker, min_size=1 << bits, max_size=1 << bits).map(lambda owners: [owners])
        | st.dictionaries(st.integers(0, (1 << bits) - 1), worker, max_size=3).map(lambda moves: list(moves.items()))
        | st.just([None])
    )
    commands = data.draw(st.dictionaries(st.integers(0, TIMES - 1), command, max_size=4))
    ahead = data.draw(st.integers(0, 3))
    found = pk.execute(program(items, commands, bits, seed, ahead), workers=workers)
    got = Counter((time, made) for seen in found for time, block in seen for made in block)
    assert got == expected(items, bits)


def test_bins_move_between_processes() -> None:
    rng = random.Random(3)
    items = {time: [(rng.randrange(9), rng.randrange(9)) for _ in range(6)] for time in range(TIMES)}
    commands = {1: [[1, 0, 1, 0]], 4: [(0, 0), (2, 0)], 6: [[1, 1, 1, 1]]}
    found = pk.execute(program(items, commands, 2, 1, 1), processes=2)
    got = Counter((time, made) for seen in found for time, block in seen for made in block)
    assert got == expected(items, 2)


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
