"""`pk.state` beside the engine: what a query has written is what its rows give, and no other flow goes on from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as pk
from durable_support import Runs
from engine_support import Kept, bag, counted, numbers, stream, write
from penstock.errors import EngineError, PenstockError, UserFunctionError
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SCHEMA = "k bigint, v bigint"
#: ``PENSTOCK_GOLDEN=1`` replaces them by what the tests write.
KEPT = Path(__file__).parents[1] / "data" / "checkpoint-v1-engine"
#: Spark's whole location of a query, with what it had given out: steps that KEPT has none of.
STEPS = KEPT.with_name("checkpoint-v1-steps")


def sums() -> pk.Flow:
    def summed(state: Any, k: int, v: int) -> Any:  # in here, so that it is pickled by value
        total = (state or 0) + v
        return total, (k, total)

    return pk.Flow(SCHEMA).key_by("k").stateful_map(summed, schema="k bigint, total bigint").key_by("k")


SUMS = sums()
FLOW = SUMS.agg(n=pk.count(), most=pk.max("total"))
VALUES, COUNTS = "stateful_map", "agg"


def check(checkpoint: Path, batch: int | None, batches: int) -> None:
    """Keys and values after so many batches."""
    expected = counted(batches)
    counts = {row["k"]: (row["n"], row["most"]) for row in pk.state.read(checkpoint, COUNTS, batch).to_pylist()}
    assert counts == expected
    values = pk.state.read(checkpoint, VALUES, batch)
    assert {row["k"]: row["value"] for row in values.to_pylist()} == {k: str(sum_) for k, (_, sum_) in expected.items()}
    assert values["readable"].to_pylist() == [True] * len(expected)


def run(cluster: Any, folder: Path, flow: pk.Flow, batches: range, workers: int) -> Any:
    for batch in batches:
        write(cluster, folder / "in", batch, numbers(cluster, batch))
    with pk.Engine(cluster, workers=workers, bits=2) as engine:
        function = engine.foreach_batch(flow, Kept())
        query = stream(cluster, folder / "in", SCHEMA, function, folder / "check")
        try:
            query.awaitTermination(120)
        except Exception:
            assert function.error is not None
        return function.error


def changing(swapped: bool) -> pk.Flow:
    """Two functions, then two aggregates, that are told apart by their names only."""

    def summed(state: Any, k: int, v: int) -> Any:
        return (state or 0) + v, (k, v)

    def greatest(state: Any, k: int, v: int) -> Any:
        return max(state or 0, v), (k, v)

    flow = pk.Flow(SCHEMA)
    maps = [("total", summed), ("most", greatest)]
    for name, step in reversed(maps) if swapped else maps:
        flow = flow.key_by("k").stateful_map(step, schema=SCHEMA, name=name)
    for name in ("groups", "rows") if swapped else ("rows", "groups"):
        flow = flow.key_by("k").agg(n=pk.count(), emit="final", name=name)
    return flow


def test_steps_that_change_places_go_on_from_their_own_state(cluster: Any, tmp_path: Path) -> None:
    place = tmp_path / "check"

    def kept(name: str, column: str) -> dict[int, str]:
        return {row["k"]: str(row[column]) for row in pk.state.read(place, name).to_pylist()}

    def run(engine: pk.Engine, batches: range, swapped: bool) -> None:
        for batch in batches:
            write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
        function = engine.foreach_batch(changing(swapped), Kept())
        stream(cluster, tmp_path / "in", SCHEMA, function, place).awaitTermination(120)
        sums = counted(batches.stop)
        assert kept("total", "value") == {k: str(total) for k, (_, total) in sums.items()}
        assert kept("most", "value") == {k: str((batches.stop * 600 - 1 - k) // 7 * 7 + k) for k in range(7)}

    with pk.Engine(cluster, workers=2, bits=2) as engine:
        run(engine, range(2), False)
        rows = kept("rows", "n")
        assert rows == {k: str(n) for k, (n, _) in counted(2).items()} and kept("groups", "n") == {}
        # Workers that still have the state.
        run(engine, range(2, 3), True)
        groups = {k: str(counted(3)[k][0] - counted(2)[k][0]) for k in range(7)}
        assert kept("rows", "n") == rows and kept("groups", "n") == groups
    with pk.Engine(cluster, workers=1, bits=2) as engine:
        run(engine, range(3, 4), False)
        now = {k: str(counted(2)[k][0] + counted(4)[k][0] - counted(3)[k][0]) for k in range(7)}
        assert kept("rows", "n") == now and kept("groups", "n") == groups
    found = pk.state.operators(place)
    assert found["name"].to_pylist() == ["total", "most", "rows", "groups"]


def test_what_a_query_writes_is_read(cluster: Any, tmp_path: Path) -> None:
    place = tmp_path / "check"
    assert run(cluster, tmp_path, FLOW, range(3), 2) is None
    found = pk.state.manifests(place)
    assert found["batch"].to_pylist()[-1] == 2 and found["problem"].null_count == found.num_rows
    check(place, None, 3)
    for batch in found["batch"].to_pylist():
        check(place, batch, batch + 1)
    if os.environ.get("PENSTOCK_GOLDEN"):
        shutil.rmtree(KEPT, ignore_errors=True)
        shutil.copytree(place / "_penstock", KEPT)
    assert run(cluster, tmp_path, FLOW, range(3, 5), 3) is None
    check(place, None, 5)
    # The same step with another aggregate.
    error = run(cluster, tmp_path, SUMS.agg(n=pk.count(), most=pk.min("total")), range(5, 6), 1)
    assert isinstance(error, PenstockError)
    assert "Int64 -> count, max(Int64) with updates" in str(error) and "count, min(Int64) with updates" in str(error)
    check(place, None, 5)


def test_all_rows_are_one_group_whose_state_is_kept(cluster: Any, tmp_path: Path) -> None:
    """An aggregate without keys: in updates, in `pk.state`, and from one engine to the next of another size."""
    place, kept = tmp_path / "check", Kept()
    flow = pk.Flow(SCHEMA).agg(n=pk.count(), total=pk.sum("v"))
    for batches, workers in ((range(2), 2), (range(2, 4), 1)):
        for batch in batches:
            write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
        with pk.Engine(cluster, workers=workers, bits=2) as engine:
            function = engine.foreach_batch(flow, kept)
            stream(cluster, tmp_path / "in", SCHEMA, function, place).awaitTermination(120)
        sums = counted(batches.stop)
        all_rows = {"n": sum(n for n, _ in sums.values()), "total": sum(total for _, total in sums.values())}
        assert pk.state.read(place, "agg").to_pylist() == [all_rows]
        assert kept.batches[batches.stop - 1].to_pylist() == [all_rows]
    assert pk.state.read(place, "agg", 2).num_rows == 1 and len(kept.batches) == 4


def test_what_spark_has_not_committed_is_not_shown(cluster: Any, tmp_path: Path) -> None:
    """The manifest of a batch is there before Spark's commit: that of the first one is no state of anything yet."""
    for batch in range(2):
        write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
    shown: list[dict[int, tuple[int, int]]] = []
    with pk.Engine(cluster, workers=1, bits=2) as engine:
        function = engine.foreach_batch(SUMS.agg(n=pk.count(), most=pk.max("total")), Kept())

        def call(df: Any, batch_id: int) -> None:
            function(df, batch_id)
            assert list((tmp_path / "check" / "_penstock").glob(f"manifest-{batch_id:020}-*"))
            if batch_id == 0:
                with pytest.raises(EngineError, match=r"has committed no batch of it so far\. Ask again when"):
                    engine.state(function.query_id, COUNTS)
            else:
                table = engine.state(function.query_id, COUNTS)
                shown.append({row["k"]: (row["n"], row["most"]) for row in table.to_pylist()})

        stream(cluster, tmp_path / "in", SCHEMA, call, tmp_path / "check").awaitTermination(120)
    assert shown == [counted(1)]


@pytest.mark.parametrize("step", ["agg", "stateful_map"])
def test_a_key_of_another_type_is_refused_before_the_first_row(cluster: Any, tmp_path: Path, step: str) -> None:
    """By the engine that made the state and by the next; with the type from before either goes on."""
    kept = Kept()

    def flow(kind: str) -> pk.Flow:
        def counting(n: int | None, k: Any, v: int) -> Any:
            return (n or 0) + 1, (k, (n or 0) + 1)

        keyed = pk.Flow(f"k {kind}, v bigint").key_by("k")
        if step == "agg":
            return keyed.agg(n=pk.count())
        return keyed.stateful_map(counting, schema=f"k {kind}, n bigint")

    def run(engine: pk.Engine, kind: str) -> BaseException | None:
        function = engine.foreach_batch(flow(kind), kept)
        read = cluster.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
        writer = read.selectExpr(f"CAST(k AS {kind}) AS k", "v").writeStream.foreachBatch(function)
        writer = writer.option("checkpointLocation", str(tmp_path / "check"))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination(120)
        except Exception:
            assert function.error is not None
        return function.error

    def refused(engine: pk.Engine, batch: int) -> None:
        write(cluster, tmp_path / "in", batch, numbers(cluster, batch))
        for kind, told in (("string", "Utf8"), ("int", "Int32")):
            error = run(engine, kind)
            assert isinstance(error, PenstockError), kind
            assert told in str(error) and "Int64" in str(error), error
        assert sorted(kept.batches) == list(range(batch))

    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    with pk.Engine(cluster, workers=1, bits=2) as engine:
        assert run(engine, "bigint") is None
        refused(engine, 1)
        assert run(engine, "bigint") is None
    with pk.Engine(cluster, workers=1, bits=2) as engine:
        refused(engine, 2)
        assert run(engine, "bigint") is None
    assert {k: row["n"] for k, row in kept.last().items()} == {k: n for k, (n, _) in counted(3).items()}


def steps() -> pk.Flow:
    """A step of each kind that keeps a shape of its own; each row says of which it is."""
    made = "step string, k bigint, n bigint"

    def told(step: str, column: str) -> Any:
        def tell(batch: pa.RecordBatch) -> pa.RecordBatch:
            return pa.record_batch({"step": [step] * batch.num_rows, "k": batch["k"], "n": batch[column]})

        return tell

    def remind(n: int | None, k: int, v: int) -> Any:
        return (n or 0) + 1, None, (v + 70, v)

    def reminded(n: int, time: int, v: int, k: int) -> Any:
        return n, ("timers", k, v)

    def add(key: tuple[int], frames: Any, state: Any) -> Any:
        import pandas as pd

        n = (state.getOption or (0,))[0] + sum(map(len, frames))
        state.update((n,))
        yield pd.DataFrame({"step": ["groups"], "k": [key[0]], "n": [n]})

    class Sum(pk.Aggregator):
        def create(self) -> Any:
            return 0

        def accumulate(self, states: list[Any], groups: Any, rows: Any) -> None:
            for group, value in zip(groups.to_pylist(), rows["v"].to_pylist(), strict=True):
                states[group] += value

        def merge(self, state: Any, other: Any) -> Any:
            return state + other

        def finish(self, states: list[Any]) -> Any:
            return pa.table({"n": states})

    source = pk.Flow(SCHEMA, event_time="v")
    keyed = source.key_by("k")
    # The first 20 of each batch are missing: sessions end there.
    rare = source.map_batches(lambda batch: batch.filter([v % 60 >= 20 for v in batch["v"].to_pylist()]), SCHEMA)
    rare = rare.key_by("k").window(pk.session("15ms"))
    sketched = {"n": pk.approx_count_distinct("v", error=0.3), "middle": pk.approx_quantile("v", 0.5, error=0.1)}
    timed = keyed.stateful_map(remind, schema=made, on_timer=reminded, ttl="1h", name="timers")
    itself = source.map_batches(lambda batch: batch)
    near = source.join(itself, on="k", within=("0ms", "7ms"), suffix="_later", name="near")
    parts = {
        "sessions": (rare.agg(n=pk.count(), name="sessions"), "n"),
        "sums": (keyed.window(pk.tumbling("50ms")).aggregate(Sum(), schema="n bigint", name="sums"), "n"),
        "first": (source.distinct("k", name="first"), "k"),
        "near": (near, "v_later"),
        "sketches": (keyed.agg(**sketched, emit="update", name="sketches"), "n"),
    }
    groups = keyed.apply_in_pandas_with_state(add, made, "n bigint", name="groups")
    return timed.union(groups, *(flow.map_batches(told(step, of), made) for step, (flow, of) in parts.items()))


#: What the test writes in place of the folder that Spark read.
PLACE = "/place-of-input"
NAMES = ["timers", "groups", "sessions", "sums", "first", "near", "sketches"]


def sixties(cluster: Any, folder: Path, batches: range) -> None:
    for batch in batches:
        write(cluster, folder / "in", batch, numbers(cluster, batch, rows=60))


def through_steps(cluster: Any, engine: pk.Engine, folder: Path, kept: Kept) -> Any:
    function = engine.foreach_batch(steps(), kept)
    query = stream(cluster, folder / "in", SCHEMA, function, folder / "check")
    query.awaitTermination(120)
    return query


@pytest.mark.skipif(not os.environ.get("PENSTOCK_GOLDEN"), reason="writes what the next test reads")
def test_steps_of_an_engine_are_written(cluster: Any, tmp_path: Path) -> None:
    kept = Kept()
    with pk.Engine(cluster, workers=2, bits=2) as engine:
        for batch in range(3):
            sixties(cluster, tmp_path, range(batch, batch + 1))
            query = through_steps(cluster, engine, tmp_path, kept)
            if batch == 0:
                engine.split([1, 2], query=query).wait(60)
        engine.finish(query)
    shutil.rmtree(STEPS, ignore_errors=True)
    shutil.copytree(tmp_path / "check", STEPS, ignore=shutil.ignore_patterns(".*.crc"))
    for file in (STEPS / "sources").rglob("[0-9]*"):
        if file.is_file():
            file.write_text(file.read_text().replace(str(tmp_path), PLACE))
    pq.write_table(pa.concat_tables(kept.batches.values()), STEPS / "given-out.parquet")


def test_steps_of_an_engine_of_version_1_are_restored(cluster: Any, tmp_path: Path) -> None:
    """On another number of workers and bins: what comes out then is what had not come out before."""
    # Nothing goes on from the end of a query.
    shutil.copytree(STEPS, tmp_path / "check", ignore=shutil.ignore_patterns("*-finished-*", "given-out*"))
    for file in (tmp_path / "check" / "sources" / "0").iterdir():
        file.write_text(file.read_text().replace(PLACE, str(tmp_path)))
    # Spark looks again at the files of its last batch.
    sixties(cluster, tmp_path, range(5))
    kept = Kept()
    with pk.Engine(cluster, workers=3, bits=3) as engine:
        rest = to_table(engine.finish(through_steps(cluster, engine, tmp_path, kept)))
    assert sorted(kept.batches) == [3, 4]
    epochs = [
        pa.record_batch({"k": [v % 7 for v in vs], "v": list(vs)})
        for vs in (range(60 * b, 60 * b + 60) for b in range(5))
    ]
    whole = pa.Table.from_batches(steps().run(iter(epochs), streaming=True))
    later = bag(*kept.batches.values(), rest)
    assert later + bag(pq.read_table(STEPS / "given-out.parquet")) == bag(whole)
    assert {step for step, _, _ in later} == {*NAMES} - {"first"}, "each key had come before"


def test_a_timer_function_that_raised_is_mended_where_its_bins_went_to(cluster: Any, tmp_path: Path) -> None:
    """Each timer fires once in what is written: after its bin has moved, and after another engine has restored it."""
    runs = Runs(cluster, tmp_path)

    def flow(broken: bool) -> pk.Flow:
        def remind(n: int | None, k: int, v: int) -> Any:
            return (n or 0) + 1, None, (v + 1_300, v)

        def reminded(n: int, time: int, v: int, k: int) -> Any:
            if broken and v % 600 == 350:
                raise ValueError(f"no {v}")
            return n, (k, time)

        keyed = pk.Flow(SCHEMA, event_time="v").key_by("k")
        return keyed.stateful_map(remind, schema="k bigint, at bigint", on_timer=reminded)

    def breaks(engine: pk.Engine) -> None:
        for _ in range(2):
            error = runs.fails(engine, flow(broken=True))
            assert isinstance(error, UserFunctionError)
            assert str(error.__cause__) == f"no {350 + 600 * (runs.batches - 3)}"
        assert runs.batches - 1 not in runs.kept.batches

    # Timers are due from the third batch on.
    runs.add(2)
    with pk.Engine(cluster, workers=2, bits=4) as engine:
        runs.run(engine, flow(broken=True))
        owners = engine.owners(runs.function.query_id)[0]
        target = [1 - owner for owner in owners]
        assert engine.migrate(to=target, query=runs.function.query_id).wait(60).bins == 16
        runs.add()
        breaks(engine)
        runs.run(engine, flow(broken=False))
        assert engine.owners(runs.function.query_id)[0] == target
    runs.add()
    with pk.Engine(cluster, workers=3, bits=5) as engine:
        breaks(engine)
        runs.run(engine, flow(broken=False))
    fired = bag(*runs.kept.batches.values())
    # The watermark is the greatest v, and a timer at it is due.
    assert set(fired.values()) == {1} and sorted(at for _, at in fired) == list(range(1_300, 2_400 - 1))
    assert all(k == (at - 1_300) % 7 for k, at in fired)
