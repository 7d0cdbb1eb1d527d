"""Side outputs beside a Spark query when a member is killed and a batch is replayed: none is lost, none comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from durable_support import SCHEMA, Runs, kill
from engine_support import Kept, bag, numbers, wait_for
from metrics_support import of, read
from penstock._schema import conform
from penstock.errors import ConfigError, UserFunctionError
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[pk.Engine]:
    with pk.Engine(cluster, workers=2, bits=4, name="sides", metrics="127.0.0.1:0") as engine:
        yield engine


def flow() -> pk.Flow:
    def sift(k: int, v: int) -> Any:
        yield pk.side("odd", (k, v)) if v % 2 else (k, v)

    def number(seen: int | None, k: int, v: int) -> Any:
        seen = (seen or 0) + 1
        return seen, [(k, v), pk.side("tenths", (k, seen))] if seen % 10 == 0 else (k, v)

    return (
        pk.Flow(SCHEMA)
        .flat_map(sift, SCHEMA, rows=True, sides={"odd": SCHEMA})
        .key_by("k")
        .stateful_map(number, schema=SCHEMA, at_end=lambda seen, k: pk.side("ends", (k, seen)), sides=SIDES)
    )


SIDES = {"tenths": "k bigint, seen bigint", "ends": "k bigint, seen bigint"}


def oracle(spark: Any, batches: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the local host gives for the same batches, each an epoch."""
    made: dict[str, list[Any]] = {"odd": [], "tenths": [], "ends": [], "rows": []}
    tables = [to_table(numbers(spark, batch)) for batch in range(batches)]
    whole = [conform(table.combine_chunks().to_batches()[0], flow().input_schema) for table in tables]
    takers = {name: made[name].append for name in ("odd", "tenths", "ends")}
    made["rows"] = list(flow().run(whole, sides=takers, streaming=True))
    return made, takers


@pytest.mark.parametrize("where", ["sink", "side"])
def test_a_member_is_killed_and_the_batch_replayed(cluster: Any, engine: pk.Engine, tmp_path: Path, where: str) -> None:
    import pyarrow as pa

    wait_for(lambda: len(engine.members()) == 2, what="all members")
    runs = Runs(cluster, tmp_path)
    odd, tenths, ends, killed = Kept(), Kept(), Kept(), []

    def killing(place: str, then: Any) -> Any:
        def take(df: Any, batch_id: int) -> None:
            if place == where and batch_id == 1 and not killed:
                killed.append(engine.members()[1])
                kill(killed[0])
            then(df, batch_id)

        return take

    runs.add(3)
    sides = {"odd": killing("side", odd), "tenths": tenths}
    runs.run(engine, flow(), killing("sink", runs.kept), sides=sides, name=where)
    assert killed and sorted(runs.kept.batches) == [0, 1, 2]
    made, _ = oracle(cluster, 3)
    rows = {name: pa.Table.from_batches(batches) for name, batches in made.items() if batches}
    assert bag(*runs.kept.batches.values()) == bag(rows["rows"])
    assert sorted(odd.batches) == sorted(tenths.batches) == [0, 1, 2]
    assert bag(*odd.batches.values()) == bag(rows["odd"])
    # Which rows are a key's tenths depends on their order; how many there are does not.
    assert bag(*tenths.batches.values()) == bag(rows["tenths"])
    assert engine.metrics_address is not None
    counts = read(engine.metrics_address)
    for name in ("odd", "tenths"):
        told = of(counts, "penstock_side_rows_total", query=where, output=name)
        assert told == [rows[name].num_rows], "one that was replayed counts once"
    assert of(counts, "penstock_side_rows_total", query=where, output="ends") == [0.0]
    last = to_table(engine.finish(where, sides={"ends": ends}))
    assert last.num_rows == 0
    assert bag(*ends.batches.values()) == bag(rows["ends"])
    counts = read(engine.metrics_address)
    assert of(counts, "penstock_side_rows_total", query=where, output="ends") == [rows["ends"].num_rows]


def test_what_is_refused(cluster: Any, engine: pk.Engine) -> None:
    with pytest.raises(ConfigError, match=r"'even'.*there are 'odd', 'tenths', 'ends'"):
        engine.foreach_batch(flow(), Kept(), sides={"even": print})

    def wrong(k: int, v: int) -> Any:
        yield pk.side("odd", ("text", v))

    function = engine.foreach_batch(
        pk.Flow(SCHEMA).flat_map(wrong, SCHEMA, rows=True, sides={"odd": SCHEMA}), Kept(), name="wrong"
    )
    with pytest.raises(UserFunctionError, match='side output "odd"'):
        function(numbers(cluster, 0), 0)
    untaken = engine.foreach_batch(flow(), kept := Kept(), name="untaken")
    untaken(numbers(cluster, 0), 0)
    assert kept.batches[0].num_rows


def test_side_outputs_behind_windows_without_late_rows(cluster: Any, engine: pk.Engine) -> None:
    """Members are fed only what is read, so late rows, which nobody takes, have fewer columns there."""

    def sift(start: Any, end: Any, k: int, n: int) -> Any:
        yield pk.side("seven", (k, n)) if k == 7 else (k, n)

    windows = (
        pk.Flow("k bigint, note string, ts timestamp", event_time="ts", lateness="1s")
        .key_by("k")
        .window(pk.tumbling("10s"))
        .agg(n=pk.count())
        .flat_map(sift, "k bigint, n bigint", rows=True, sides={"seven": "k bigint, n bigint"})
    )
    kept, sevens = Kept(), Kept()
    function = engine.foreach_batch(windows, kept, sides={"seven": sevens}, name="windows", checkpoint=None)
    for batch, second in enumerate((5, 100, 6)):
        rows = cluster.range(6, 8).selectExpr("id AS k", "'note' AS note", f"timestamp_seconds({second}) AS ts")
        function(rows, batch)
    assert [table.to_pylist() for _, table in sorted(kept.batches.items())] == [[], [{"k": 6, "n": 1}], []]
    assert sevens.batches[1].to_pylist() == [{"k": 7, "n": 1}]
    last = to_table(engine.finish("windows", sides={"seven": sevens}))
    assert last.to_pylist() == [{"k": 6, "n": 1}]
