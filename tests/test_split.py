"""Bins that are split and merged while a flow runs: what comes out is what comes without, whatever moves in between."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as pk
from engine_support import wait_for
from penstock._local import LocalSession
from penstock._parts import Parts
from penstock.errors import ConfigError, EngineError

SCHEMA = "ts bigint, k bigint, v bigint"


def running(total: int | None, ts: int, k: int, v: int) -> tuple[int, tuple[int, int]]:
    total = ((total or 0) * 3 + v) % 1_000_003
    return total, (k, total)


def later(state: int | None, ts: int, k: int, v: int) -> Any:
    state = (state or 0) + v
    return state, None, (ts + 25, state)


def on_timer(state: int | None, time: int, value: int, k: int) -> Any:
    return state, (k, time * 1_000 + value)


class Longest(pk.Aggregator):
    """A user's aggregate, whose rows wait for the end of their epoch."""

    def create(self) -> Any:
        return [0]

    def accumulate(self, states: list[Any], groups: pa.Int64Array, rows: pa.RecordBatch) -> None:
        for group, value in zip(groups.to_pylist(), rows["v"].to_pylist(), strict=True):
            states[group][0] = states[group][0] * 7 % 100_003 + value

    def merge(self, state: Any, other: Any) -> Any:
        return [state[0] + other[0]]

    def finish(self, states: list[Any]) -> Any:
        return pa.record_batch({"n": pa.array([state[0] for state in states], pa.int64())})


def flows() -> dict[str, pk.Flow]:
    timed = pk.Flow(SCHEMA, event_time="ts", lateness="50ms")
    return {
        "counts": pk.Flow(SCHEMA).key_by("k").agg(n=pk.count(), total=pk.sum("v"), emit="update"),
        "windows": timed.key_by("k").window(pk.sliding("20ms", "10ms")).agg(n=pk.count()),
        "sessions": timed.key_by("k").window(pk.session("3ms")).agg(n=pk.count(), top=pk.max("v")),
        "states": pk.Flow(SCHEMA).key_by("k").stateful_map(running, schema="k bigint, total bigint"),
        "timers": timed.key_by("k").stateful_map(later, schema="k bigint, at bigint", on_timer=on_timer),
        "aggregates": pk.Flow(SCHEMA).key_by("k").aggregate(Longest(), schema="n bigint", columns=["v"], emit="update"),
        "distinct": pk.Flow(SCHEMA).distinct("k", "v"),
    }


def batches(seed: int, count: int) -> list[pa.RecordBatch]:
    dice = random.Random(seed)
    made = []
    for number in range(count):
        rows = dice.randrange(1, 300)
        # One key has half of all rows.
        keys = [7 if dice.random() < 0.5 else dice.randrange(200) for _ in range(rows)]
        times = [number * 10 + dice.randrange(15) for _ in range(rows)]
        columns = [times, keys, [dice.randrange(9) for _ in range(rows)]]
        made.append(
            pa.record_batch(columns, names=["ts", "k", "v"]).cast(
                pa.schema([(n, pa.int64()) for n in ("ts", "k", "v")])
            )
        )
    return made


def ran(found: Any) -> list[Any]:
    return sorted(tuple(row.values()) for batch in found for row in batch.to_pylist())


def deed(session: Any, dice: random.Random, workers: int) -> str:
    """Something that is done to the bins of a session."""
    told = session.bins().to_pylist()
    present = [(row["prefix"], row["bits"]) for row in told if row["op"] == 0]
    some = sorted(set(dice.choices(present, k=6)))
    kind = dice.choice(["split", "split", "move", "merge", "ahead"])
    try:
        if kind == "split":
            session.split(some, by=dice.randrange(1, 4))
        elif kind == "merge":
            prefix, bits = dice.choice([one for one in present if one[1] > 3] or some)
            session.merge(prefix >> (bits - 3))
        else:
            epoch = session.epoch + 2 if kind == "ahead" else None
            moves = {part: dice.randrange(workers) for part in some}
            session.migrate(moves=moves, strategy="matched", at_epoch=epoch)
    except ConfigError:
        # What is there now may be gone when its turn comes.
        return ""
    return kind


@pytest.mark.parametrize("name", list(flows()))
@pytest.mark.parametrize("workers", [1, 3])
def test_results_do_not_change(name: str, workers: int) -> None:
    source, done = batches(workers, 25), []
    with LocalSession(flows()[name], bits=3, streaming=True) as session:
        wanted = ran(session.run(iter(source)))
    dice = random.Random(name)
    with LocalSession(flows()[name], workers, bits=3, streaming=True) as session:

        def feed() -> Iterator[pa.RecordBatch]:
            for batch in source:
                yield batch
                done.append(deed(session, dice, workers))

        found = ran(session.run(feed()))
    assert found == wanted
    assert "split" in done and len(set(done) - {""}) > 1, done


def test_from_256_bins_to_4096_and_back() -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
    source = [pa.table({"k": [(row * row + number) % 5_000 for row in range(4_000)]}) for number in range(9)]
    wanted = ran(flow.run(iter(source)))
    with flow.start(workers=2) as session:
        bins: list[int] = []

        def feed() -> Iterator[pa.Table]:
            for number, table in enumerate(source):
                yield table
                if number == 2:
                    assert session.split(range(256), by=4).wait(60).bins == 256
                    bins.append(session.bins().num_rows)
                    assert session.owners() == [[-1] * 256]
                if number == 4:
                    hot = {(prefix, 12): 0 for prefix in range(0, 4096, 16)}
                    moved = session.migrate(moves=hot, strategy="all-at-once").wait(60)
                    assert moved.bins == 128, "the others are there"
                    assert session.rebalance().wait(60).bins == 128
                if number == 6:
                    session.merge(range(256)).wait(60)
                    bins.append(session.bins().num_rows)
                    assert -1 not in session.owners()[0]
                    there = sum(owner != 1 for owner in session.owners()[0])
                    assert session.migrate(to=[1] * 256).wait(60).bins == there

        found = ran(session.run(feed()))
        assert bins == [4096, 256]
    assert found == wanted


@pytest.mark.parametrize("name", ["counts", "states"])
def test_what_parts_hold_is_what_their_bin_held(name: str) -> None:
    source = [pa.table({name: range(n * 20_000, (n + 1) * 20_000) for name in ("ts", "k", "v")}) for n in range(3)]
    with LocalSession(flows()[name], 2, bits=1, streaming=True) as session:

        def sizes() -> list[Any]:
            """Of bins that their workers have not told of yet None."""
            return session.bins().column("state_bytes").to_pylist()

        def told() -> list[int]:
            wait_for(lambda: None not in sizes(), what="all workers have told")
            found = sizes()
            assert sum(found) == sum(session.stats().column("state_bytes").to_pylist())
            return found

        def feed() -> Iterator[pa.Table]:
            yield from source[:2]
            wait_for(lambda: sum(session.stats().column("keys").to_pylist()) == 40_000, what="all keys are there")
            whole = told()
            # A key, what is kept of it, and room in the table: 16 to 400 bytes.
            assert len(whole) == 2 and all(16 * 20_000 < size < 400 * 20_000 for size in whole)
            session.split([0, 1], by=2).wait(60)
            wait_for(lambda: len(sizes()) == 8, what="the parts are told of")
            parts = told()
            assert sum(whole) / 2.5 < sum(parts) < sum(whole) * 2.5
            assert max(parts) < 2 * min(parts)
            yield source[2]

        for _ in session.run(feed()):
            pass


def test_one_hot_bin_alone() -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")
    with LocalSession(flow, 2, bits=2) as session:
        hot = 1
        for bits in (2, 8, 14):
            last = session.split((hot, bits), by=6)
            hot = hot << 6 | 5
        last.wait(60)
        table = session.bins()
        assert table.num_rows == 3 + 63 + 63 + 64
        assert set(table.column("bits").to_pylist()) == {2, 8, 14, 20}
        assert sum(2.0**-bits for bits in table.column("bits").to_pylist()) == 1.0
        session.migrate(moves={(hot >> 6, 14): 0, 0: 1}).wait(60)
        at = {(row["prefix"], row["bits"]): row["worker"] for row in session.bins().to_pylist()}
        assert {at[hot >> 6 << 6 | low, 20] for low in range(64)} == {0} and at[0, 2] == 1
        session.merge(1).wait(60)
        assert session.bins().num_rows == 4


def test_parts_that_are_merged_come_together_a_few_at_a_time() -> None:
    """They moved in one step, however many: rows waited for all of them."""
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")
    begun: list[Any] = []
    with LocalSession(flow, 2, bits=4, streaming=True) as session:

        def source() -> Iterator[pa.Table]:
            yield pa.table({"k": range(2_000)})
            session.split(range(16)).wait(60)
            session.migrate(moves={(part, 5): part % 2 for part in range(32)}).wait(60)
            begin = session._begin

            def watched(*args: Any) -> Any:
                begun.append(begin(*args))
                return begun[-1]

            session._begin = watched  # type: ignore[method-assign]
            session.merge(range(16)).wait(60)
            yield pa.table({"k": range(2_000)})

        last = {row["k"]: row["n"] for out in session.run(source()) for row in out.to_pylist()}
        together, merged = (one.report for one in begun)
    assert last == dict.fromkeys(range(2_000), 2)
    assert (together.strategy, together.bins, merged.bins) == ("matched", 16, 16)
    # One at first, and then as many more as hold nothing up for long.
    assert len(together.steps) > 2 and together.steps[0].bins == 1


def test_rows_are_evened_out_over_parts() -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")
    table = pa.table({"k": range(4_000)})
    # One bin, which is all at worker 0.
    with LocalSession(flow, 2, bits=0, streaming=True) as session:
        said: list[Any] = []

        def feed() -> Iterator[pa.Table]:
            yield table
            session.split(0, by=4).wait(60)
            session.split((3, 4), by=2).wait(60)
            before = session.loads()
            assert before.schema.names == ["bin", "bits", "worker", "rows", "busy_s"]
            assert before.column("bits").to_pylist() == [4] * 3 + [6] * 4 + [4] * 12
            assert set(before.column("worker").to_pylist()) == {0}
            yield table
            yield table
            wait_for(lambda: sum(session.loads().column("rows").to_pylist()) > 11_900, what="all rows are routed")
            said.append(session.rebalance(by="rows", tolerance=1.1).wait(60).bins)
            said.append(session.loads().to_pylist())
            session.merge(0).wait(60)
            said.append(session.loads().to_pylist())

        ran(session.run(feed()))
    moved, evened, merged = said
    assert 7 <= moved <= 10
    total = sum(row["rows"] for row in evened)
    assert max(sum(row["rows"] for row in evened if row["worker"] == worker) for worker in range(2)) <= 1.1 * total / 2
    # Counted by samples.
    parts = [row["rows"] * 16 / total for row in evened if row["bits"] == 4]
    assert min(parts) > 0.6 and max(parts) < 1.5, parts
    assert [(row["bin"], row["bits"]) for row in merged] == [(0, 0)]
    assert abs(merged[0]["rows"] - total) <= 20, "those of the parts are those of the bin"


ANSWERS: dict[str, tuple[dict[str, Any], int | str]] = {
    "bins": ({"moves": {1: 0, 2: 1}}, 2),
    "pairs": ({"moves": [[1, 0], (2, 1)]}, 2),
    "rows of an array": ({"moves": np.array([[1, 0]])}, 1),
    "by prefix": ({"moves": {(1, 3): 0}}, 1),
    "owners": ({"to": [1] * 8}, 4),
    "an array of owners": ({"to": np.array([1] * 8)}, 4),
    "for each keyed step": ({"to": [[1] * 8]}, 4),
    "three numbers": ({"moves": {(0, 1, 2): 1}}, "ConfigError"),
    "a list of bins": ({"moves": [([2, 3], 1)]}, "ConfigError"),
    "one number": ({"moves": [(1,)]}, "ConfigError"),
    "numbers": ({"moves": [1, 2]}, "ConfigError"),
    "a number": ({"moves": 5}, "ConfigError"),
    "a text": ({"moves": "ab"}, "ConfigError"),
    "no worker": ({"moves": {1: 2}}, "ConfigError"),
    "no bin": ({"moves": {8: 1}}, "ConfigError"),
    "twice": ({"moves": [(1, 0), (1, 1)]}, "ConfigError"),
    "no list of owners": ({"to": 5}, "ConfigError"),
    "too few owners": ({"to": [0] * 7}, "ConfigError"),
    "steps that differ": ({"to": [[1] * 8, [0] * 8]}, "ConfigError"),
    "both": ({"to": [0] * 8, "moves": {}}, "ConfigError"),
    "nothing": ({"moves": []}, 0),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_migrate_answers_alike_whether_or_not_a_bin_is_split(name: str) -> None:
    asked, answer = ANSWERS[name]
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    for splits in (False, True):
        with LocalSession(flow, 2, bits=3) as session:
            if splits:
                session.split(5).wait(60)
                # Its parts are as one bin that stays where it is.
                session.migrate(moves={5: 1}).wait(60)
            try:
                found: int | str = session.migrate(**asked).wait(60).bins
            except Exception as error:
                found = type(error).__name__
            assert found == answer, (name, splits)


def test_what_cannot_be_split_or_merged() -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    with LocalSession(flow, 2, bits=4) as session:
        session.split([3, 4], by=2).wait(60)
        for act, says in [
            (lambda: session.split(16), "there can be no bin 16"),
            (lambda: session.split(-1), "there can be no bin -1"),
            (lambda: session.split((1, 3)), "there can be no bin"),
            (lambda: session.split((1, 21)), "there can be no bin"),
            (lambda: session.split("3"), "a bin is its number"),
            (lambda: session.split([True]), "a bin is its number"),
            (lambda: session.split([]), "no bin is named"),
            (lambda: session.split([5, (5, 4)]), "named twice"),
            (lambda: session.split(3), "is split already"),
            (lambda: session.split((0, 6)), "what it would be part of is whole"),
            (lambda: session.split(5, by=0), "by=0"),
            (lambda: session.split(5, by=17), "20 bits at most"),
            (lambda: session.merge(5), "is not split"),
            (lambda: session.merge((3 << 2, 6)), "is not split"),
            (lambda: session.merge((3 << 3, 7)), "is not there"),
            (lambda: session.merge([3, (6, 5)]), "was named as part of another one"),
            (lambda: session.migrate(moves={(3, 7): 0}), "what it would be part of is whole"),
            (lambda: session.migrate(moves={3: 0, (12, 6): 1}), "is to move twice"),
            (lambda: session.migrate(moves={3: 2}), "there is no worker 2"),
            (lambda: session.migrate(to=[0]), "there are 16 bins"),
        ]:
            with pytest.raises(ConfigError, match=says):
                act()
        assert session.bins().num_rows == 14 + 8, "nothing of it was done"
    timers = pk.Flow("k bigint, v bigint").key_by("k").aggregate(Longest(), schema="n bigint", columns=["v"])
    for streaming in (False, True):
        with LocalSession(timers, bits=4, streaming=streaming) as session:
            if streaming:
                session.split(3).wait(60)
            else:
                with pytest.raises(ConfigError, match="rows wait in the bins of this flow"):
                    session.split(3)
    with pk.Flow("k bigint").start() as stateless, pytest.raises(ConfigError, match="keeps no state"):
        stateless.split(0)


def test_what_is_refused_is_told_by_the_name_that_it_was_given() -> None:
    """It was a number that workers have for it: "bin 29 of 4 bins"."""
    with LocalSession(pk.Flow("k bigint").key_by("k").agg(n=pk.count()), 2, bits=2, streaming=True) as session:
        session.split(3, 2).wait(60)
        ahead = session.migrate(moves={(13, 4): 0}, at_epoch=2)
        assert 2**4 + 13 in session.moves().column("bin").to_pylist(), "as its docstring says"
        session.merge(3).wait(60)
        assert sum(out.num_rows for out in session.run(pa.table({"k": [1]}) for _ in range(4))) > 0
        with pytest.raises(EngineError, match=r"part \(13, 4\) is no part any more: what it was part of is whole"):
            ahead.wait(60)


class Locked(Longest):
    def create(self) -> Any:
        return [0, threading.Lock()]


def numbered(state: Any, ts: int, k: int, v: int) -> Any:
    state = state or (number for number in itertools.count(1))
    return state, (k, next(state))


def rung(state: Any, ts: int, k: int, v: int) -> Any:
    state = state or itertools.count(1)
    held: Any = next(state), (value for value in [ts])
    return state, None, (ts + 25, held)


def ring(state: Any, time: int, value: Any, k: int) -> Any:
    return state, (k, value[0] * 1_000 + next(value[1]))


UNPICKLED = {
    "states": pk.Flow(SCHEMA).key_by("k").stateful_map(numbered, schema="k bigint, n bigint"),
    "timers": pk.Flow(SCHEMA, event_time="ts", lateness="50ms")
    .key_by("k")
    .stateful_map(rung, schema="k bigint, n bigint", on_timer=ring),
    "aggregates": pk.Flow(SCHEMA).key_by("k").aggregate(Locked(), schema="n bigint", columns=["v"], emit="update"),
}


@pytest.mark.parametrize("name", list(UNPICKLED))
def test_states_need_not_pickle_to_be_split_and_merged(name: str) -> None:
    """They stay in their process. A split that somebody else asked for, as `autobalance` does, ended the run."""
    flow, source = UNPICKLED[name], batches(5, 12)
    with LocalSession(flow, 2, bits=2, streaming=True) as session:

        def feed() -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(source):
                if number == 3:
                    session.split([0, 1, 2, 3], by=3).wait(60)
                    moves = {(part, 5): part % 2 for part in range(32)}
                    session.migrate(moves=moves).wait(60)
                if number == 8:
                    session.merge(range(4)).wait(60)
                yield batch

        found = ran(session.run(feed()))
    with LocalSession(flow, 1, bits=2, streaming=True) as plain:
        assert found == ran(plain.run(source))


def test_parts_are_planned_as_the_workers_do_it() -> None:
    parts = Parts(2, {(number, 2): number % 2 for number in range(4)})
    assert parts.split([1], 2) == [(1, 2)] and parts.within((1, 2)) == [(4 + low, 4) for low in range(4)]
    assert [parts.number(part) for part in [(3, 2), (5, 4)]] == [3, 0b1_0101]
    parts.owner[5, 4] = 0
    chosen, moves = parts.copy().merge((1, 2))
    assert chosen == [(1, 2)] and moves == [((4 + low, 4), 1) for low in range(4)]
    assert parts.moves([0, 1, 0, 0], None, 2)[:2] == [((0, 2), 0), ((2, 2), 0)]


def test_plans_of_many_bins_cost_what_they_name() -> None:
    """Each bin was looked for among all, where any was split: seconds of 8,192 bins."""
    bits, began = 13, time.process_time()
    parts = Parts(bits, {(number, bits): 0 for number in range(1 << bits)})
    assert len(parts.split([5], 1)) == 1 and parts.within((5, bits)) == [(10, bits + 1), (11, bits + 1)]
    moves = parts.moves([1] * (1 << bits), None, 2)
    assert len(moves) == (1 << bits) + 1 and {worker for _, worker in moves} == {1}
    assert len(parts.split([number for number in range(1 << bits) if number != 5], 1)) == (1 << bits) - 1
    assert parts.merge(range(1 << bits))[0] == [(number, bits) for number in range(1 << bits)]
    assert not parts.is_split
    assert time.process_time() - began < 1.5
