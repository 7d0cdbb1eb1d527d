"""``cliques``: cliques in memory beside a loop and a dataflow, and as Spark jobs beside Spark SQL and GraphFrames.

Two parts. The program ``penstock-bench`` measures the search itself, see ``benches/rust/src/cliques.rs``. On Spark one
job of ours, from the DataFrame of edges to the rows or the count, stands beside the self-joins of Spark SQL: the same
DataFrame, the same answer, the same cores. GraphFrames counts triangles, where its artifact can be had; where it
cannot, the reason is told. A peer that is not done in time is cancelled and recorded as such; the ratio is then a lower
bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.cli.common import spark_session
from penstock.errors import ConfigError, EngineError
from penstock_bench import core, machine, streams
from penstock_bench.measure import Emit, Options, Paired, Tell, compare, line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["run"]

NAME = "cliques"
#: Shared graphs, where they are.
FILES = ("ca-GrQc", "wiki-Vote", "facebook_combined")
#: Maven coordinates, or a jar, of GraphFrames.
GRAPHFRAMES = "PENSTOCK_GRAPHFRAMES"
_COORDINATES = "io.graphframes:graphframes-spark4_2.13:0.10.0"
#: Share of the budget that ``penstock-bench`` gets, and what both parts get by default.
_CORE_SHARE, _QUICK_S, _FULL_S = 0.5, 12.0, 260.0
#: Seconds after which a peer's job is cancelled.
_LIMIT_S, _QUICK_LIMIT_S = 30.0, 12.0
#: What starting Spark takes at least.
_STARTING_S = 8.0
#: Edges of the small graph that warms up all sides.
_WARM = (8, 1_000)


def run(options: Options, emit: Emit, tell: Tell, draws: int | None = None) -> None:
    """Run the bench; `draws` is for tests, of the part on Spark: one small graph."""
    whole = options.budget(1, quick=_QUICK_S, full=_FULL_S)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        files = _unpacked(Path(folder), tell) if draws is None and not options.quick else {}
        if draws is None:
            part = dataclasses.replace(options, seconds=whole * _CORE_SHARE)
            try:
                core.run(NAME, part, emit, tell, {"PENSTOCK_BENCH_GRAPHS": folder} if files else {})
            except ConfigError as error:
                tell(f"without the part in memory: {error}")
        if draws is None and options.left() < _STARTING_S:
            tell("no time was left for Spark in a quick run")
            return
        graphs = _graphs(options, files, draws)
        with _session(options, tell) as (spark, place, frames):
            _beside_spark(spark, place, frames, graphs, whole * (1 - _CORE_SHARE), options, emit, tell)


def _unpacked(folder: Path, tell: Tell) -> dict[str, Path]:
    """The shared graphs as plain text in `folder`; none where they are not there, which is told."""
    root = os.environ.get("PENSTOCK_DATA")
    base = Path(root) if root else core.CHECKOUT.parent / "shared" / "data"
    found = {}
    for name in FILES:
        packed = base / "graphs" / f"{name}.txt.gz"
        if not packed.is_file():
            tell(f"without {name}: there is no {packed}; PENSTOCK_DATA names the folder that holds graphs/")
            continue
        found[name] = folder / f"{name}.txt"
        with gzip.open(packed) as source, found[name].open("wb") as target:
            shutil.copyfileobj(source, target)
    return found


def _graphs(options: Options, files: dict[str, Path], draws: int | None) -> dict[str, tuple[pa.Table, tuple[int, ...]]]:
    """Edges by name, and the sizes of cliques to look for in them."""
    if draws is not None:
        return {"R-MAT 2^8": (_rmat(8, draws), (3, 4))}
    if options.quick:
        return {"R-MAT 2^14": (_rmat(14, 200_000), (3,))}
    graphs: dict[str, tuple[pa.Table, tuple[int, ...]]] = {"R-MAT 2^14": (_rmat(14, 200_000), (3, 4))}
    for name in ("wiki-Vote", "facebook_combined"):
        if name in files:
            graphs[name] = (_read(files[name]), (3, 4))
    graphs["uniform 100,000 nodes"] = (_uniform(100_000, 1_000_000), (3,))
    graphs["R-MAT 2^16"] = (_rmat(16, 900_000, (0.54, 0.19, 0.19)), (3,))
    return graphs


def _table(begin: Any, end: Any) -> pa.Table:
    import numpy as np

    return pa.table({"src": begin.astype(np.int64), "dst": end.astype(np.int64)})


def _read(path: Path) -> pa.Table:
    import numpy as np

    edges = np.loadtxt(path, dtype=np.int64, ndmin=2)
    return _table(edges[:, 0], edges[:, 1])


def _uniform(nodes: int, edges: int) -> pa.Table:
    import numpy as np

    ends = np.random.default_rng(7).integers(0, nodes, (2, edges))
    return _table(ends[0], ends[1])


def _rmat(scale: int, draws: int, odds: tuple[float, float, float] = (0.45, 0.22, 0.22), seed: int = 42) -> pa.Table:
    """R-MAT, counter based: the twin of ``rmat`` in ``benches/rust/src/graphs.rs``.

    Examples
    --------
    >>> _rmat(8, 3).to_pylist()[0]
    {'src': 245, 'dst': 0}
    """
    import numpy as np

    a, b, c = odds
    first = np.arange(draws, dtype=np.uint64) * np.uint64(scale) + np.uint64(1)
    begin, end = np.zeros(draws, np.uint64), np.zeros(draws, np.uint64)
    for level in range(scale):
        z = np.uint64(seed) + np.uint64(0x9E37_79B9_7F4A_7C15) * (first + np.uint64(level))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        at = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        low = ((at >= a) & (at < a + b)) | (at >= a + b + c)
        begin = begin * np.uint64(2) + (at >= a + b)
        end = end * np.uint64(2) + low
    mask, factor = np.uint64((1 << scale) - 1), np.uint64(0x9E37_79B1)
    begin, end = (begin * factor) & mask, (end * factor) & mask
    return _table(begin[begin != end], end[begin != end])


def _beside_spark(
    spark: SparkSession,
    folder: Path,
    frames: bool,
    graphs: dict[str, tuple[pa.Table, tuple[int, ...]]],
    budget: float,
    options: Options,
    emit: Emit,
    tell: Tell,
) -> None:
    import penstock as pk

    limit = _QUICK_LIMIT_S if options.quick else _LIMIT_S
    conditions = {"versions": streams.spark_versions(spark), "peer_limit_s": limit}
    warm = _edges(spark, folder / "warm.parquet", _rmat(*_WARM))
    tell("warming up")
    for size in sorted({size for _, sizes in graphs.values() for size in sizes}):
        _rows(pk.graph.cliques(warm, size, directed=True))
        _rows(_joined(warm, size))
    asked = [(name, table, size) for name, (table, sizes) in graphs.items() for size in sizes]
    kinds = 1 if options.quick else 2
    each = budget / (len(asked) * kinds + (len(graphs) if frames else 0))
    read = {name: _edges(spark, folder / f"{at}.parquet", graphs[name][0]) for at, name in enumerate(graphs)}
    for name, table, size in asked:
        frame = read[name]
        found = pk.graph.cliques(frame, size, directed=True, count=True)
        about = conditions | {"edges": table.num_rows, "cliques": found, "peer": "distinct, then self-joins"}

        def rows(frame: DataFrame = frame, size: int = size) -> float:
            return _timed(lambda: _rows(pk.graph.cliques(frame, size, directed=True)))

        def compared(frame: DataFrame = frame, size: int = size) -> None:
            # While it is measured the rows of both sides leave without being looked at.
            if _total(_joined(frame, size), size) != _total(pk.graph.cliques(frame, size, directed=True), size):
                raise EngineError(f"{NAME}: {size} nodes: the two sides find other cliques; the figures are void")

        def count(frame: DataFrame = frame, size: int = size, found: int = found) -> float:
            return _timed(lambda: _same(pk.graph.cliques(frame, size, directed=True, count=True), found))

        def joined(frame: DataFrame = frame, size: int = size) -> None:
            _rows(_joined(frame, size))

        def counted(frame: DataFrame = frame, size: int = size, found: int = found) -> None:
            _same(_joined(frame, size).count(), found)

        sides: list[tuple[str, Callable[[], float], Callable[[], None]]] = [("count", count, counted)]
        if not options.quick:
            if _within(spark, 2 * limit, compared) is None:
                about |= {"rows_compared": False}  # the peer takes too long
            sides.append(("rows", rows, joined))
        for what, ours, peer in sides:
            case = f"Spark job {what} size={size} {name} vs Spark SQL self-joins"
            if not _case(spark, case, each, limit, ours, peer, options, about, emit, tell):
                tell(f"nothing more of cliques of {size} in {name}: the peer was not done in {limit:.0f} s")
                break
    if frames:
        for name, frame in read.items():
            _beside_graphframes(spark, name, frame, each, limit, options, conditions, emit, tell)


def _beside_graphframes(
    spark: SparkSession,
    name: str,
    frame: DataFrame,
    budget: float,
    limit: float,
    options: Options,
    conditions: dict[str, Any],
    emit: Emit,
    tell: Tell,
) -> None:
    """Triangles of the undirected graph; its answer is a count per vertex, of which a triangle has three."""
    import penstock as pk

    found = pk.graph.cliques(frame, 3, count=True)

    def ours() -> float:
        return _timed(lambda: _same(pk.graph.cliques(frame, 3, count=True), found))

    def peer() -> None:
        from pyspark.sql import DataFrame

        jvm: Any = spark.sparkContext._jvm
        vertices = frame.selectExpr("src as id").union(frame.selectExpr("dst as id")).distinct()
        graph = jvm.org.graphframes.GraphFrame.apply(vertices._jdf, frame._jdf)
        counted = DataFrame(graph.triangleCount().run(), spark).selectExpr("sum(count) div 3").first()
        _same(counted[0] or 0 if counted else 0, found)

    case = f"Spark job count size=3 {name} vs GraphFrames triangleCount"
    about = conditions | {"cliques": found, "graphframes": os.environ.get(GRAPHFRAMES, _COORDINATES)}
    _case(spark, case, budget, limit, ours, peer, options, about, emit, tell)


def _case(
    spark: SparkSession,
    case: str,
    budget: float,
    limit: float,
    ours: Callable[[], float],
    peer: Callable[[], None],
    options: Options,
    conditions: dict[str, Any],
    emit: Emit,
    tell: Tell,
) -> bool:
    """Both sides in turn; a peer that is not done after `limit` seconds is cancelled, and bounds the ratio.

    Returns whether the peer was done in time.
    """
    late: list[float] = []

    def theirs() -> float:
        taken = _within(spark, limit, peer)
        if taken is None:
            late.append(limit)
            raise _Late
        return taken

    tell(f"measuring: {case}")
    try:
        paired = compare(budget, ours, theirs, least=1, left=options.left)
    except _Late:
        meter = machine.Meter()
        paired = Paired([ours()], late, *meter.stop())
        case += f" (not done in {limit:.0f} s)"
        conditions = conditions | {"peer_unfinished": True, "ratio_is": "a lower bound"}
    emit(line(NAME, case, "s", "lower", paired, options, conditions))
    return not late


class _Late(Exception):
    """A peer was cancelled."""


def _within(spark: SparkSession, limit: float, work: Callable[[], None]) -> float | None:
    """Run `work` in a job group of its own: its seconds, or None when it was cancelled after `limit`."""
    from pyspark import InheritableThread

    context = spark.sparkContext
    group = f"penstock-{uuid.uuid4().hex}"
    outcome: list[float | BaseException] = []

    def body() -> None:
        try:
            context.setJobGroup(group, "penstock bench: a peer", True)
            outcome.append(_timed(work))
        except BaseException as error:
            outcome.append(error)

    thread = InheritableThread(target=body, daemon=True)
    thread.start()
    cancelled = False
    try:
        thread.join(limit)
        while thread.is_alive():
            # Again and again: between two jobs of one query there is nothing to cancel.
            cancelled = True
            context.cancelJobGroup(group)
            thread.join(0.5)
    except BaseException:
        context.cancelJobGroup(group)
        raise
    if cancelled:
        return None
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _rows(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _total(frame: DataFrame, size: int) -> Any:
    """What two frames with the same cliques agree in."""
    nodes = "abcd"[:size]
    if set(frame.columns) != set(nodes):
        frame = frame.toDF(*nodes)
    return frame.selectExpr("count(*)", f"sum(hash({', '.join(nodes)}))").first()


def _same(counted: int, found: int) -> None:
    if counted != found:
        raise EngineError(f"{NAME}: {counted} cliques on one side, {found} on the other; the figures are void")


def _joined(edges: DataFrame, size: int) -> DataFrame:
    """Directed cliques of three or four nodes by self-joins: nodes ``a`` to ``d``."""
    distinct = edges.where("src <> dst").distinct()

    def edge(begin: str, end: str) -> DataFrame:
        return distinct.selectExpr(f"src as {begin}", f"dst as {end}")

    triangles = edge("a", "b").join(edge("b", "c"), "b").join(edge("a", "c"), ["a", "c"])
    if size == 3:
        return triangles
    return triangles.join(edge("a", "d"), "a").join(edge("b", "d"), ["b", "d"]).join(edge("c", "d"), ["c", "d"])


def _edges(spark: SparkSession, path: Path, table: pa.Table) -> DataFrame:
    return spark.read.schema("src bigint, dst bigint").parquet(str(streams.write_file(path, table)))


@contextlib.contextmanager
def _session(options: Options, tell: Tell) -> Iterator[tuple[SparkSession, Path, bool]]:
    """Start Spark on the CPUs of this thread, with GraphFrames where it can be had; the last tells whether it was."""
    with contextlib.ExitStack() as stack:
        started = _with_graphframes(stack, options, tell)
        if started is None:
            tell("starting Spark")
            started = stack.enter_context(_spark({}))
            yield *started, False
        else:
            yield *started, True


def _spark(more: dict[str, str]) -> contextlib.AbstractContextManager[tuple[SparkSession, Path]]:
    cores = machine.cores()
    return spark_session(f"penstock bench {NAME}", cores, cores, {"spark.driver.memory": "4g"} | more)


def _with_graphframes(stack: contextlib.ExitStack, options: Options, tell: Tell) -> tuple[SparkSession, Path] | None:
    """Start Spark with GraphFrames; None, and the reason is told, where it cannot be had."""
    named = os.environ.get(GRAPHFRAMES)
    if options.quick and named is None:
        tell(f"GraphFrames is not measured: left out of a quick run unless {GRAPHFRAMES} names its jar")
        return None
    place = named or _COORDINATES
    tell(f"starting Spark with GraphFrames, {place}")
    try:
        return stack.enter_context(_spark({"spark.jars" if place.endswith(".jar") else "spark.jars.packages": place}))
    except Exception as error:  # a peer that cannot be had ends no bench
        reason = " ".join(str(error).split())[:200]
        tell(
            f"GraphFrames is not measured: Spark did not start with {place} ({reason}); {GRAPHFRAMES} may name its jar"
        )
        return None
