"""``nexmark``: the flows of `penstock.workloads.nexmark` beside timely, and from Python beside bytewax and Spark.

Three parts. The program ``penstock-bench --nexmark`` runs flows and timely on events that are made here: the plan as
the flow gives it, with twins in Rust of the functions that it maps blocks with
(``benches/rust/src/nexmark/calls.rs``), so that both sides are native. Epochs are a second of event time, 10,000
events, on both sides. From Python the same flows, with their own functions, run in this process beside bytewax in one
of its own (``benches/peers/on_bytewax.py``), one worker each, events in memory; and beside Spark Structured
Streaming on all cores, both from Parquet files to rows. A query that a peer cannot express is left out. The rows of
both sides are equal or there is no figure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock import _native
from penstock.errors import EngineError
from penstock.workloads import nexmark
from penstock_bench import core, machine, on_bytewax, streams
from penstock_bench.measure import Emit, Options, Paired, Tell, compare, line
from penstock_bench.on_bytewax import Answer, answer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["run"]

NAME = "nexmark"
#: Of q6 there is no twin: its last step is a function of pandas.
QUERIES = ("q1", "q2", "q3", "q4", "q5_mega", "q7_beam", "q8_tumble")
#: From Python; bytewax takes seconds for each second of q5's sixty windows.
FROM_PYTHON = ("q1", "q2", "q3", "q4", "q5_beam", "q7_beam", "q8_tumble")
#: Lengths of windows in ms: of the nexmark of Megaphone, of Beam.
PARAMS = {
    "q5_beam": {"size_ms": 10_000, "period_ms": 5_000},
    "q5_mega": {"size_ms": 60_000, "period_ms": 1_000},
    "q7_beam": {"size_ms": 10_000},
    "q8_tumble": {"size_ms": 10_000},
}
WORKERS = (1, 2)
EVENTS, EVENTS_PER_SECOND, EPOCH_MS = 2_000_000, 10_000, 1_000
#: Events of the peers from Python: some of them take seconds for these.
PYTHON_EVENTS = 200_000
_BITS = 8
_QUICK_S, _FULL_S = 30.0, 180.0
#: Shares of the budget.
_CORE, _BYTEWAX, _SPARK = 0.5, 0.25, 0.25
#: What starting Spark takes at least.
_STARTING_S = 10.0
_COLUMNS = {
    "person": ["id", "name", "city", "state", "date_time"],
    "auction": ["id", "seller", "category", "reserve", "date_time", "expires"],
    "bid": ["auction", "bidder", "price", "date_time"],
}


def run(
    options: Options,
    emit: Emit,
    tell: Tell,
    events: int | None = None,
    parts: Sequence[str] = ("core", "bytewax", "spark"),
    queries: Sequence[str] | None = None,
) -> None:
    """Run the bench; `events`, `parts` and `queries` are for tests."""
    quick = options.quick
    whole = options.budget(1, quick=_QUICK_S, full=_FULL_S)
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        folder = Path(place)
        if "core" in parts:
            _write(folder, events or (EVENTS // 4 if quick else EVENTS))
            part = dataclasses.replace(options, seconds=whole * _CORE)
            _beside_timely(folder, queries or QUERIES, part, emit, tell)
        tables = _write(folder, events or (PYTHON_EVENTS // 4 if quick else PYTHON_EVENTS))
        asked = queries or FROM_PYTHON
        if "bytewax" in parts:
            _beside_bytewax(folder, tables, asked, whole * _BYTEWAX, options, emit, tell)
        if "spark" in parts and _may_start_spark(options, tell):
            _beside_spark(tables, asked, whole * _SPARK, options, emit, tell)


def _write(folder: Path, events: int) -> dict[str, pa.Table]:
    """Make events, and an Arrow file for each table."""
    source = _native.Nexmark(EVENTS_PER_SECOND, stop=events)
    blocks: dict[str, list[pa.RecordBatch]] = {table: [] for table in _COLUMNS}
    while source.position < events:
        for table, block in source.next_batches(1 << 18).items():
            blocks[table].append(pa.record_batch(block))
    tables = {table: pa.Table.from_batches(found).select(_COLUMNS[table]) for table, found in blocks.items()}
    for name, table in tables.items():
        with pa.ipc.new_file(folder / f"{name}.arrow", table.schema) as file:
            file.write_table(table)
    return tables


def _beside_timely(folder: Path, queries: Sequence[str], options: Options, emit: Emit, tell: Tell) -> None:
    told = {"folder": str(folder), "epoch_ms": EPOCH_MS, "workers": list(WORKERS), "bits": _BITS}
    told |= {"quick": options.quick, "seconds": options.seconds, "queries": [_query(name) for name in queries]}
    core.ask("--nexmark", told, emit, tell)


def _query(name: str) -> dict[str, Any]:
    flow = nexmark.flow(name, PARAMS)
    plan, calls = flow.to_plan()
    columns = {source: schema.names for source, schema in flow.sources.items()}
    told = {"name": name, "plan": plan, "columns": columns, "calls": [_twin(call) for call in calls]}
    return told | PARAMS.get(name, {})


def _twin(call: Mapping[str, Any]) -> dict[str, Any]:
    """A function of the flow as the program knows it: by its name and what it closes over."""
    function = call["func"]
    columns = inspect.getclosurevars(function).nonlocals.get("columns", {})
    pairs = columns.items() if isinstance(columns, Mapping) else zip(columns, columns, strict=True)
    return {"name": function.__name__, "columns": list(pairs)}


def _case(
    case: str,
    events: int,
    budget: float,
    ours: Callable[[], tuple[float, Answer]],
    peer: Callable[[], tuple[float, Answer]],
    options: Options,
    versions: Mapping[str, str],
    emit: Emit,
) -> None:
    """Compare seconds and answers; the figures are of all events, of which a query reads some tables."""
    found: set[Answer] = set()

    def rate(measured: tuple[float, Answer]) -> float:
        found.add(measured[1])
        return events / measured[0] / 1e6

    paired: Paired = compare(budget, lambda: rate(ours()), lambda: rate(peer()), left=options.left)
    if len(found) != 1:
        raise EngineError(f"{NAME}: {case}: the two sides give different rows ({found}); the figures are void")
    conditions = {"events": events, "rows_out": found.pop()[0], "versions": dict(versions)}
    emit(line(NAME, case, "M events/s", "higher", paired, options, conditions))


def _ours(tables: Mapping[str, pa.Table] | Path, query: str, workers: int) -> Callable[[], tuple[float, Answer]]:
    """The flow from Python, on tables in memory or on files of a folder."""
    flow = nexmark.flow(query, PARAMS)

    def blocks() -> Mapping[str, Iterable[pa.RecordBatch]]:
        if isinstance(tables, Path):
            return nexmark.read(flow, tables)
        return {name: tables[name].select(schema.names).to_batches(65_536) for name, schema in flow.sources.items()}

    def once() -> tuple[float, Answer]:
        begin = time.perf_counter()
        inputs = blocks()
        out = list(flow.run(inputs if len(inputs) > 1 else next(iter(inputs.values())), workers=workers))
        return time.perf_counter() - begin, answer(out)

    return once


def _beside_bytewax(
    folder: Path,
    tables: Mapping[str, pa.Table],
    queries: Sequence[str],
    budget: float,
    options: Options,
    emit: Emit,
    tell: Tell,
) -> None:
    python = on_bytewax.python(tell)
    if python is None:
        return
    events = sum(table.num_rows for table in tables.values())
    for query in queries:
        with on_bytewax.side(python, folder, query, PARAMS.get(query, {})) as peer:
            case = f"python w1 {query} vs bytewax"
            versions = {"bytewax": on_bytewax.version()}
            ours = _ours(tables, query, 1)
            _case(case, events, budget / len(queries), ours, peer, options, versions, emit)


def _may_start_spark(options: Options, tell: Tell) -> bool:
    if importlib.util.find_spec("pyspark") is None:
        tell("without Spark: pip install 'penstock[spark]'")
        return False
    if options.left() < _STARTING_S:
        tell("no time was left for Spark in a quick run")
        return False
    return True


def _spark_q1(tables: Mapping[str, DataFrame]) -> DataFrame:
    # Prices are not negative.
    return tables["bid"].selectExpr("auction", "bidder", "price * 89 div 100 AS price", "date_time")


def _spark_q2(tables: Mapping[str, DataFrame]) -> DataFrame:
    return tables["bid"].where("auction % 123 = 0").select("auction", "price")


def _spark_q3(tables: Mapping[str, DataFrame]) -> DataFrame:
    people = tables["person"].where("state IN ('OR', 'ID', 'CA')").withColumnRenamed("id", "seller")
    sold = tables["auction"].where("category = 10").select("id", "seller")
    return people.join(sold, "seller").select("name", "city", "state", "id")


def _spark_q8(tables: Mapping[str, DataFrame]) -> DataFrame:
    size = PARAMS["q8_tumble"]["size_ms"]
    window = f"date_time div {size} * {size} AS window_start"
    people = tables["person"].selectExpr("id", "name", window)
    sold = tables["auction"].selectExpr("seller AS id", "id AS auction", "reserve", window)
    joined = people.join(sold, ["id", "window_start"])
    bounds = ["window_start", f"window_start + {size} AS window_end"]
    return joined.selectExpr(*bounds, "id", "name", "auction", "reserve")


#: What Structured Streaming expresses without functions of the user: it ranks no windows with their ties, and its
#: aggregates do not follow a join that keeps all.
_ON_SPARK = {"q1": _spark_q1, "q2": _spark_q2, "q3": _spark_q3, "q8_tumble": _spark_q8}


def _beside_spark(
    tables: Mapping[str, pa.Table], queries: Sequence[str], budget: float, options: Options, emit: Emit, tell: Tell
) -> None:
    chosen = [query for query in queries if query in _ON_SPARK]
    events = sum(table.num_rows for table in tables.values())
    with streams.session(NAME, tell, residents=False) as (spark, place):
        for name, table in tables.items():
            (place / name).mkdir()
            os.link(streams.write_file(place / f"{name}.parquet", table), place / name / "part.parquet")
        versions = streams.spark_versions(spark)
        workers = machine.cores()
        for query in chosen:
            case = f"python w{workers} {query} vs Spark Structured Streaming"
            ours, peer = _ours(place, query, workers), _on_spark(spark, place, query)
            _case(case, events, budget / max(1, len(chosen)), ours, peer, options, versions, emit)


def _on_spark(spark: SparkSession, place: Path, query: str) -> Callable[[], tuple[float, Answer]]:
    """One batch of all events, and the seconds of its trigger. The first run tells the answer for all."""
    from penstock.spark._session.collect import to_table

    sources = nexmark.flow(query, PARAMS).sources
    answers: list[Answer] = []

    def sink(frame: DataFrame, _: int) -> None:
        if answers:
            frame.write.format("noop").mode("overwrite").save()
        else:
            answers.append(answer(to_table(frame).to_batches()))

    def once() -> tuple[float, Answer]:
        read = {name: spark.read.parquet(str(place / name)).schema for name in sources}
        inputs = {name: spark.readStream.schema(schema).parquet(str(place / name)) for name, schema in read.items()}
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=place) as checkpoint:
            writer = _ON_SPARK[query](inputs).writeStream.option("checkpointLocation", checkpoint)
            running = writer.foreachBatch(sink).trigger(availableNow=True).start()
            try:
                running.awaitTermination()
                seconds = sum(one["durationMs"]["triggerExecution"] for one in running.recentProgress) / 1e3
            finally:
                with contextlib.suppress(Exception):
                    running.stop()
        return float(seconds), answers[0]

    return once
