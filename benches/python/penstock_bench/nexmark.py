"""``nexmark``: the flows of `penstock.workloads.nexmark` beside timely, and from Python beside four systems.

The program ``penstock-bench --nexmark`` runs flows and timely on events that are made here: the plan as the flow gives
it, with twins in Rust of the functions that it maps blocks with (``benches/rust/src/nexmark/calls.rs``), so that both
sides are native. Epochs are a second of event time, 10,000 events, on both sides. From Python the same flows run with
their own functions, in this process, beside peers that each have a process of their own (``benches/peers``):

- bytewax, one worker on both sides, events in memory, as Arrow blocks and as tuples, made before the clock starts;
- Pathway and PyFlink, all cores on both sides, both from the same CSV files to rows; ours and Pathway read the columns
  of the flow, Flink those that its planner takes;
- Spark Structured Streaming, all cores on both sides, both from the same Parquet files to rows.

What a peer does before it reads is not measured: starting processes, JVMs and sessions, imports, Flink's planning and
its cluster for a job, Spark's query until its batch starts. Pathway's building of the graph is. What is left of fixed
costs in a run is told in a full bench: ``floor_s`` and ``peer_floor_s`` are the seconds of the same query on 1,000
events, and the figures hold them. They are of all events, of which a query reads some (``rows_read``). Peers that read
files give their rows to a sink that drops them; ours are left in memory. Spark writes its logs and the state of q3 and
q8 to its checkpoint within the batch (``peer_durable``), which it cannot do without; ours keeps nothing: a query of
ours that is durable too is measured by ``foreach-batch-count``. The rows of both sides are equal or there is no figure;
a peer that reads files tells its answer in its first run, which does not count.

Left out: q6, which has no twin and from Python makes a pandas frame for each seller, so that it takes longer than all
others together; on Spark q4, since its aggregates do not follow a join that keeps all, and q5 and q7, since it ranks
no windows with their ties; from Python q5 with sixty windows, as bytewax takes seconds for each second of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import csv

from penstock import Flow, _native
from penstock._extras import how_to_install
from penstock.errors import EngineError
from penstock.workloads import nexmark
from penstock_bench import apart, core, machine, streams
from penstock_bench.apart import Answer, answer
from penstock_bench.measure import Emit, Line, Options, Paired, Tell, compare, line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["run"]

NAME = "nexmark"
#: Of q6 there is no twin: its last step is a function of pandas.
QUERIES = ("q1", "q2", "q3", "q4", "q5_mega", "q7_beam", "q8_tumble")
FROM_PYTHON = ("q1", "q2", "q3", "q4", "q5_beam", "q7_beam", "q8_tumble")
#: Lengths of windows in ms: of the nexmark of Megaphone, of Beam.
PARAMS = {
    "q5_beam": {"size_ms": 10_000, "period_ms": 5_000},
    "q5_mega": {"size_ms": 60_000, "period_ms": 1_000},
    "q7_beam": {"size_ms": 10_000},
    "q8_tumble": {"size_ms": 10_000},
}
#: Of the runs whose time is the fixed cost of one; how many such runs.
FLOOR_EVENTS, _FLOORS = 1_000, 3
#: Beside timely; those above two where there is a core for each, and time.
WORKERS, WIDE = (1, 2), (4, 8, 16)
EVENTS, EVENTS_PER_SECOND, EPOCH_MS = 2_000_000, 10_000, 1_000
#: Events of the peers from Python: bytewax takes seconds for these, the others have costs of a job to spread.
PYTHON_EVENTS, FILE_EVENTS = 200_000, 1_000_000
_BITS = 8
_QUICK_S, _FULL_S = 30.0, 300.0
#: Shares of the budget.
_SHARES = {"core": 0.3, "bytewax": 0.15, "pathway": 0.2, "pyflink": 0.2, "spark": 0.15}
#: Those that read files, by part.
_FROM_FILES = {"pathway": apart.PATHWAY, "pyflink": apart.PYFLINK}
#: What starting a peer that has a JVM or compiles takes at least.
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
    parts: Sequence[str] = tuple(_SHARES),
    queries: Sequence[str] | None = None,
) -> None:
    """Run the bench; `events`, `parts` and `queries` are for tests."""
    quick = options.quick
    whole = options.budget(1, quick=_QUICK_S, full=_FULL_S)
    budgets = {part: whole * share for part, share in _SHARES.items()}
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        folder = Path(place)

        def made(full: int) -> dict[str, pa.Table]:
            return _write(folder, events or (full // 4 if quick else full))

        if "core" in parts:
            made(EVENTS)
            part = dataclasses.replace(options, seconds=budgets["core"])
            _beside_timely(folder, queries or QUERIES, part, emit, tell)
        asked = queries or FROM_PYTHON
        if "bytewax" in parts and (found := apart.find(apart.BYTEWAX, tell)) is not None:
            tables = made(PYTHON_EVENTS)
            _beside_bytewax(found, folder, tables, asked, budgets["bytewax"], options, emit)
        tables = made(PYTHON_EVENTS if quick else FILE_EVENTS)
        for name, peer in _FROM_FILES.items():
            if name in parts and (found := apart.find(peer, tell)) is not None:
                _beside_files(found, folder, tables, asked, budgets[name], options, emit, tell)
        if "spark" in parts and _may_start_spark(options, tell):
            _beside_spark(tables, asked, budgets["spark"], options, emit, tell)


def _write(folder: Path, events: int) -> dict[str, pa.Table]:
    """Make events, and an Arrow file for each table."""
    tables = _made(events)
    for name, table in tables.items():
        with pa.ipc.new_file(folder / f"{name}.arrow", table.schema) as file:
            file.write_table(table)
    return tables


def _made(events: int) -> dict[str, pa.Table]:
    source = _native.Nexmark(EVENTS_PER_SECOND, stop=events)
    blocks: dict[str, list[pa.RecordBatch]] = {table: [] for table in _COLUMNS}
    while source.position < events:
        for table, block in source.next_batches(1 << 18).items():
            blocks[table].append(pa.record_batch(block))
    return {table: pa.Table.from_batches(found).select(_COLUMNS[table]) for table, found in blocks.items()}


def _beside_timely(folder: Path, queries: Sequence[str], options: Options, emit: Emit, tell: Tell) -> None:
    wide = [] if options.quick else [workers for workers in WIDE if workers <= machine.cores()]
    told = {"folder": str(folder), "epoch_ms": EPOCH_MS, "workers": [*WORKERS, *wide], "bits": _BITS}
    told |= {"quick": options.quick, "seconds": options.seconds, "queries": [_query(name) for name in queries]}

    def named(line: Line) -> None:
        workers, query = line["case"].split()[:2]
        emit(line | {"conditions": _named(query, "timely", int(workers[1:])) | line["conditions"]})

    core.ask("--nexmark", told, named, tell)


def _named(query: str, peer: str, workers: int) -> dict[str, Any]:
    """The conditions that the picture reads."""
    return {"query": query, "beside": peer, "workers": workers}


def _query(name: str) -> dict[str, Any]:
    plan, calls = nexmark.flow(name, PARAMS).to_plan()
    told = {"name": name, "plan": plan, "columns": _columns(name), "calls": [_twin(call) for call in calls]}
    return told | PARAMS.get(name, {})


def _columns(query: str) -> dict[str, list[str]]:
    """What a flow reads of each table."""
    return {source: list(schema.names) for source, schema in nexmark.flow(query, PARAMS).sources.items()}


def _twin(call: Mapping[str, Any]) -> dict[str, Any]:
    """A function of the flow as the program knows it: by its name and what it closes over."""
    function = call["func"]
    columns = inspect.getclosurevars(function).nonlocals.get("columns", {})
    pairs = columns.items() if isinstance(columns, Mapping) else zip(columns, columns, strict=True)
    return {"name": function.__name__, "columns": list(pairs)}


def _case(
    query: str,
    peer: str,
    workers: int,
    events: int,
    budget: float,
    ours: Callable[[], tuple[float, Answer]],
    theirs: Callable[[], tuple[float, Answer]],
    options: Options,
    versions: Mapping[str, str],
    emit: Emit,
    facts: Mapping[str, Any],
) -> None:
    """Compare seconds and answers; the figures are of all events, of which a query reads some tables."""
    case = f"python w{workers} {query} vs {peer}"
    found: set[Answer] = set()

    def rate(measured: tuple[float, Answer]) -> float:
        found.add(measured[1])
        return events / measured[0] / 1e6

    paired: Paired = compare(budget, lambda: rate(ours()), lambda: rate(theirs()), left=options.left)
    if len(found) != 1:
        raise EngineError(f"{NAME}: {case}: the two sides give different rows ({found}); the figures are void")
    conditions = _named(query, peer, workers) | {"events": events, "rows_out": found.pop()[0]} | dict(facts)
    emit(line(NAME, case, "M events/s", "higher", paired, options, conditions | {"versions": dict(versions)}))


def _read(query: str, tables: Mapping[str, pa.Table]) -> dict[str, Any]:
    return {"rows_read": sum(tables[name].num_rows for name in nexmark.flow(query, PARAMS).sources)}


def _floors(ours: Callable[[], tuple[float, Answer]], theirs: Callable[[], tuple[float, Answer]]) -> dict[str, Any]:
    """What both sides take for next to nothing, after a first run of each."""
    found = {}
    for name, side in (("floor_s", ours), ("peer_floor_s", theirs)):
        side()
        found[name] = round(statistics.median(side()[0] for _ in range(_FLOORS)), 4)
    return found


#: Gives a flow its blocks, by the name of the source.
Blocks = Callable[[Flow], Mapping[str, Iterable[pa.RecordBatch]]]


def _ours(blocks: Blocks, query: str, workers: int) -> Callable[[], tuple[float, Answer]]:
    """The flow from Python, on blocks that are made while the clock runs."""
    flow = nexmark.flow(query, PARAMS)

    def once() -> tuple[float, Answer]:
        begin = time.perf_counter()
        inputs = blocks(flow)
        out = list(flow.run(inputs if len(inputs) > 1 else next(iter(inputs.values())), workers=workers))
        return time.perf_counter() - begin, answer(out)

    return once


def _in_memory(tables: Mapping[str, pa.Table]) -> Blocks:
    return lambda flow: {name: tables[name].select(of.names).to_batches(65_536) for name, of in flow.sources.items()}


def _from_csv(folder: Path, header: bool) -> Blocks:
    """Whole files, which pyarrow reads on all cores."""

    def read(table: str, names: Sequence[str]) -> list[pa.RecordBatch]:
        every = csv.ReadOptions(column_names=_COLUMNS[table], skip_rows=int(header))
        kept = csv.ConvertOptions(include_columns=list(names))
        rows = csv.read_csv(folder / f"{table}.csv", every, convert_options=kept)
        blocks: list[pa.RecordBatch] = rows.to_batches(65_536)
        return blocks

    return lambda flow: {name: read(name, of.names) for name, of in flow.sources.items()}


def _beside_bytewax(
    found: apart.Found,
    folder: Path,
    tables: Mapping[str, pa.Table],
    queries: Sequence[str],
    budget: float,
    options: Options,
    emit: Emit,
) -> None:
    events = sum(table.num_rows for table in tables.values())
    versions = {"bytewax": found.version}
    for query in queries:
        with apart.side(found, folder, query, PARAMS.get(query, {})) as peer:
            ours = _ours(_in_memory(tables), query, 1)
            facts = _read(query, tables)
            _case(query, "bytewax", 1, events, budget / len(queries), ours, peer, options, versions, emit, facts)


def _beside_files(
    found: apart.Found,
    folder: Path,
    tables: Mapping[str, pa.Table],
    queries: Sequence[str],
    budget: float,
    options: Options,
    emit: Emit,
    tell: Tell,
) -> None:
    """Pathway or PyFlink."""
    events = sum(table.num_rows for table in tables.values())
    # Pathway wants the names of columns, of which ``id`` is its own; Flink takes no line but rows.
    header = found.peer is apart.PATHWAY
    small = folder / "floor"
    small.mkdir(exist_ok=True)
    for place, written in ((folder, tables), (small, _made(FLOOR_EVENTS))):
        for name, table in written.items():
            own = ["number" if column == "id" else column for column in table.column_names]
            csv.write_csv(table.rename_columns(own), place / f"{name}.csv", csv.WriteOptions(include_header=header))
    name, workers = found.peer.name, machine.cores()
    versions = {found.peer.package: found.version}
    for query in queries:
        if options.left() < _STARTING_S:
            tell(f"{query} and what follows beside {name}: no time was left for it in a quick run")
            return
        told, facts = PARAMS.get(query, {}) | {"workers": workers, "columns": _columns(query)}, _read(query, tables)
        if not options.quick:
            with apart.side(found, small, query, told) as peer:
                facts |= _floors(_ours(_from_csv(small, header), query, workers), peer)
        with apart.side(found, folder, query, told) as peer:
            ours = _ours(_from_csv(folder, header), query, workers)
            _case(query, name, workers, events, budget / len(queries), ours, peer, options, versions, emit, facts)


def _may_start_spark(options: Options, tell: Tell) -> bool:
    if importlib.util.find_spec("pyspark") is None:
        tell(f"without Spark: {how_to_install('spark')}")
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
    with streams.session(NAME, tell) as (spark, place):
        small = place / "floor"
        small.mkdir()
        for folder, written in ((place, tables), (small, _made(FLOOR_EVENTS))):
            for name, table in written.items():
                (folder / name).mkdir()
                os.link(streams.write_file(folder / f"{name}.parquet", table), folder / name / "part.parquet")
        versions = streams.spark_versions(spark)
        workers = machine.cores()
        for query in chosen:
            ours = _ours(lambda flow: nexmark.read(flow, place), query, workers)
            peer, each = _on_spark(spark, place, query), budget / max(1, len(chosen))
            facts = _read(query, tables) | {"durable": False, "peer_durable": True}
            if not options.quick:
                facts |= _floors(
                    _ours(lambda flow: nexmark.read(flow, small), query, workers), _on_spark(spark, small, query)
                )
            _case(
                query, "Spark Structured Streaming", workers, events, each, ours, peer, options, versions, emit, facts
            )


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
