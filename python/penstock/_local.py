"""The local host: a flow on threads of this process.

Owns: reading any Arrow source, progress on screen, and migrations asked for from Python.
The loop that feeds and takes is `_pump`; the threads, the epochs and the state are the
native module's. The input is one epoch, or with ``streaming`` each batch of it is one.

Invariants: at most a bounded number of batches is in flight (the native side blocks the
feeder); leaving a run early and an exception end the worker threads before control comes
back to the caller; after Ctrl-C the caller may go on.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._durations import Timeout, parse_timeout
from penstock._pump import LateRows, LocalResults, Pump
from penstock._schema import conform
from penstock.errors import ConfigError, EngineError, SchemaError

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock._flow import Flow

__all__ = [
    "LateRows",
    "LocalResults",
    "LocalSession",
    "Migration",
    "RunSummary",
    "batches",
    "migration_steps",
    "run",
    "run_into",
]

#: Receives late rows.
LateSink = Callable[[pa.RecordBatch], Any]
#: Receives results: a function, or an object with ``write_batch`` (a ParquetWriter).
BatchSink = Callable[[pa.RecordBatch], Any] | Any


@dataclass(frozen=True)
class RunSummary:
    """What one run did.

    Attributes
    ----------
    rows : int
        Input rows.
    output_rows : int
        Rows handed to the sink.
    late_rows : int
        Input rows that came after all their windows had closed, or have no event time.
    seconds : float
        Wall time from the first row read to the last row handed over.
    scopes : tuple of dict
        Bounded parts and flat maps at the end of the run; see `LocalSession.scopes`.
    """

    rows: int
    output_rows: int
    late_rows: int
    seconds: float
    scopes: tuple[dict[str, Any], ...] = ()

    @property
    def rows_per_second(self) -> float:
        """Input rows per second of wall time."""
        return self.rows / self.seconds if self.seconds else 0.0


class Migration:
    """A migration under way; made by `LocalSession.migrate`.

    Parameters
    ----------
    session : LocalSession
        Where it runs.
    handle : int
        What the native side calls it.
    bins : int
        How many bins it moves.
    """

    def __init__(self, session: LocalSession, handle: int, bins: int) -> None:
        self._session = session
        self._handle = handle
        #: How many bins move.
        self.bins = bins
        self._report: dict[str, Any] | None = None

    def wait(self, timeout: Timeout | None = None) -> dict[str, Any]:
        """Wait until every bin is at its new worker.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds; default without limit.

        Returns
        -------
        dict
            ``moved`` (bins), ``bytes`` (of state) and ``steps`` (a list with the start and
            end of each step in nanoseconds).

        Raises
        ------
        TimeoutError
            When the time is up first; the migration goes on.
        EngineError
            When the workers have ended.
        """
        if self._report is None:
            report = self._session._native.wait_migration(self._handle, parse_timeout(timeout, least_s=0.0))
            if report is None:
                raise TimeoutError(f"the migration of {self.bins} bins is not complete after {timeout!r}")
            self._report = json.loads(report) if isinstance(report, (str, bytes)) else dict(report)
        return self._report


class LocalSession:
    """Worker threads of this process that run one flow once.

    Parameters
    ----------
    flow : Flow
        What to compute.
    workers : int, default 1
        Threads; each owns a share of the bins.
    late : callable, optional
        Receives batches of late rows in the thread that iterates `run`.
    batch_rows : int, default 65_536
        Larger input batches are cut.
    streaming : bool, default False
        Each batch is an epoch; by default the whole input is one. See `Flow.run`.
    bits : int, default 8
        The state is cut into ``2 ** bits`` bins, the units of migration.

    Raises
    ------
    PlanError, SchemaError
        When the flow is not complete or does not compile.
    ConfigError
        When an option is out of range.

    Notes
    -----
    A context manager; leaving it stops the threads. It refuses use in a forked child with
    `ForkError`.

    Examples
    --------
    >>> import pyarrow as pa
    >>> import penstock as pk
    >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    >>> with LocalSession(flow, workers=2) as session:
    ...     def source():
    ...         yield pa.table({"k": [1, 2]})
    ...         session.migrate(0, 1)
    ...         yield pa.table({"k": [2]})
    ...     table = pa.Table.from_batches(session.run(source()))
    >>> sorted(table.to_pydict().items())[1]
    ('n', [1, 2])
    """

    def __init__(
        self,
        flow: Flow,
        workers: int = 1,
        *,
        late: LateSink | None = None,
        batch_rows: int = 65_536,
        bits: int = 8,
        streaming: bool = False,
    ) -> None:
        _at_least_one(workers, "workers")
        _at_least_one(batch_rows, "batch_rows")
        if isinstance(bits, bool) or not isinstance(bits, int) or not 0 <= bits <= 20:
            raise ConfigError(f"bits={bits!r} must be an int from 0 to 20: the state is cut into 2 ** bits bins")
        _yes_or_no(streaming, "streaming")
        if late is not None and not callable(late):
            raise ConfigError(f"late={late!r} must be a function that takes a batch")
        from penstock import _native

        self.workers = workers
        #: Input rows handed to the workers so far.
        self.rows = 0
        #: Output rows given back so far.
        self.output_rows = 0
        #: Late rows seen so far.
        self.late_rows = 0
        self._flow = flow
        self._late = late
        self._batch_rows = batch_rows
        self._streaming = streaming
        self._used = False
        # What the workers told last, once they have ended.
        self._scopes: list[dict[str, Any]] | None = None
        # Who owns each bin when all migrations asked for are complete; at first they are dealt out in turn.
        self._owners = [number % workers for number in range(1 << bits)] if flow.keyed else []
        plan, calls = flow.to_plan(streaming)
        self._native = _native.LocalRun(plan, calls, workers=workers, bits=bits, whole=not streaming)

    def run(self, source: Any) -> LocalResults:
        """Feed a source and give results back as they become final.

        Parameters
        ----------
        source : Arrow data
            As for `Flow.run`.

        Returns
        -------
        LocalResults
            An iterator of ``pyarrow.RecordBatch``. Ends after the source has ended and every
            window has closed. Closing it early stops the workers.

        Raises
        ------
        EngineError
            When the session has already run: the end of input closes its state.
        """
        if self._used:
            raise EngineError("this session has already run to the end of its input; start another with flow.start()")
        self._used = True
        read = batches(source, self._flow.input_schema, self._batch_rows)
        return LocalResults(Pump(lambda: self, read))

    def migrate(self, source: int, target: int, strategy: str = "batched", batch_bins: int = 16) -> Migration:
        """Move the state of one worker to another while the flow runs.

        Parameters
        ----------
        source, target : int
            Worker numbers, from 0.
        strategy : {"batched", "fluid", "all-at-once"}, default "batched"
            How many bins move in one step: `batch_bins`, one, or all.
        batch_bins : int, default 16
            Bins per step of "batched".

        Returns
        -------
        Migration
            Its `wait` tells when the last bin has arrived; the flow need not be fed for it.

        Raises
        ------
        ConfigError
            When a worker does not exist, both are the same or the strategy is unknown.

        Notes
        -----
        Results do not change. Between threads a bin moves as a pointer.
        """
        for worker in (source, target):
            if isinstance(worker, bool) or not isinstance(worker, int) or not 0 <= worker < self.workers:
                raise ConfigError(f"worker {worker!r} does not exist; the workers are 0 to {self.workers - 1}")
        if source == target:
            raise ConfigError(f"worker {source} is both the source and the target of the migration")
        steps = migration_steps(self._owners, source, target, strategy, batch_bins)
        handle = int(self._native.migrate(steps))
        for step in steps:
            for number, worker in step:
                self._owners[number] = worker
        return Migration(self, handle, sum(len(step) for step in steps))

    def stats(self) -> dict[str, Any]:
        """Return what the workers count: bins, keys, state bytes, rows, owners of bins."""
        return dict(json.loads(self._native.stats()))

    def scopes(self) -> list[dict[str, Any]]:
        """Return the figures of the bounded parts and flat maps, over all workers.

        Returns
        -------
        list of dict
            One per bounded scope and worker, in the order of the flow: ``worker``, ``step``;
            ``batches`` (N) and ``batch_size`` (B), as they are now; ``phase``: ``fixed``,
            ``growing``, ``settled`` or ``short`` (of memory); ``raises`` and ``shrinks``; ``rate``
            in rows per second; ``admitted`` batches and ``admitted_rows``; ``unfinished``,
            ``unfinished_rows`` and the most there were of both, ``maximum`` and ``maximum_rows``;
            ``buffered``: inputs that wait before the scope; ``failed`` inputs and the first
            ``failures``; ``holding``: the time of the batch that is unfinished for longest.

        Notes
        -----
        As of up to 20 ms ago. After the session is closed, as of its end.
        """
        told = self._scopes if self._scopes is not None else self.stats()["workers"]
        return [{"worker": worker["worker"], **scope} for worker in told for scope in worker["scopes"]]

    def close(self) -> None:
        """Stop the threads and drop the state; harmless when done twice."""
        if self._scopes is None:
            with contextlib.suppress(EngineError):
                self._scopes = self.stats()["workers"]
        self._native.close()

    def __enter__(self) -> LocalSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run(
    flow: Flow,
    source: Any,
    workers: int = 1,
    *,
    late: LateSink | None = None,
    progress: bool = False,
    batch_rows: int = 65_536,
    streaming: bool = False,
) -> LocalResults:
    """Run a flow in this process; see `Flow.run`.

    The flow and the options are checked here, before the first batch is asked for; the
    threads start with the first batch.
    """
    _check(flow, workers, batch_rows, streaming)
    return LocalResults(_Run(flow, source, workers, late, progress, batch_rows, streaming).pump())


def _check(flow: Flow, workers: int, batch_rows: int, streaming: bool) -> None:
    _at_least_one(workers, "workers")
    _at_least_one(batch_rows, "batch_rows")
    _yes_or_no(streaming, "streaming")
    flow._check(streaming)  # compiles the flow, so that mistakes show at the call


class _Run:
    """One run of a flow, with its bar on the screen if that is wanted; `session` once it has begun."""

    def __init__(
        self,
        flow: Flow,
        source: Any,
        workers: int,
        late: LateSink | None,
        progress: bool,
        batch_rows: int,
        streaming: bool,
    ) -> None:
        self._wanted = (flow, workers, late, batch_rows, streaming)
        self._source = source
        self._batches = batches(source, flow.input_schema, batch_rows)
        self._bar = _progress() if progress else None
        self.session: LocalSession | None = None

    def pump(self) -> Pump:
        if self._bar is None:
            return Pump(self._start, self._batches)
        return Pump(self._start, self._watched(self._bar), self._bar.stop)

    def _start(self) -> LocalSession:
        if self._bar is not None:
            self._bar.start()
        flow, workers, late, batch_rows, streaming = self._wanted
        self.session = LocalSession(flow, workers, late=late, batch_rows=batch_rows, streaming=streaming)
        return self.session

    def _watched(self, bar: Progress) -> Iterator[pa.RecordBatch]:
        # In the thread that reads: no interrupt reaches the locks of the bar there.
        task = bar.add_task("rows", total=_rows_of(self._source), out=0)
        for batch in self._batches:
            out = 0 if self.session is None else self.session.output_rows
            bar.update(task, advance=batch.num_rows, out=out)
            yield batch


def run_into(
    flow: Flow,
    sink: BatchSink,
    source: Any,
    workers: int = 1,
    *,
    late: LateSink | None = None,
    progress: bool = False,
    batch_rows: int = 65_536,
    streaming: bool = False,
) -> RunSummary:
    """Run a flow in this process and hand each batch to a sink; see `Flow.run_into`."""
    write = getattr(sink, "write_batch", sink)
    if not callable(write):
        raise ConfigError(f"sink {sink!r} is neither a function nor an object with write_batch")
    _check(flow, workers, batch_rows, streaming)
    output_rows = 0
    late_sink: LateSink = _nobody if late is None else late
    begin = time.perf_counter()
    run = _Run(flow, source, workers, late_sink, progress, batch_rows, streaming)
    with LocalResults(run.pump()) as results:
        for batch in results:
            write(batch)
            output_rows += batch.num_rows
    session = run.session
    assert session is not None
    seconds = time.perf_counter() - begin
    return RunSummary(session.rows, output_rows, session.late_rows, seconds, tuple(session.scopes()))


def _nobody(batch: pa.RecordBatch) -> None:
    """The late rows are in the summary."""


def batches(source: Any, schema: pa.Schema, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Read any Arrow source as batches of one schema and a bounded size.

    Parameters
    ----------
    source : Arrow data
        An object with ``__arrow_c_stream__`` or ``__arrow_c_array__``, a pyarrow dataset,
        or an iterable of such objects.
    schema : pyarrow.Schema
        What the batches must have; see `penstock._schema.conform`.
    batch_rows : int
        Larger batches are cut without copying.

    Returns
    -------
    iterator of pyarrow.RecordBatch
        Without empty batches.

    Raises
    ------
    SchemaError
        When the source is not Arrow data or a batch does not fit the schema.

    Examples
    --------
    >>> import pyarrow as pa
    >>> table = pa.table({"k": [1, 2, 3]})
    >>> [batch.num_rows for batch in batches(table, table.schema, 2)]
    [2, 1]
    """
    for batch in _read(source, nested=False):
        fitting = conform(batch, schema)
        for start in range(0, fitting.num_rows, batch_rows):
            yield fitting.slice(start, batch_rows)


def migration_steps(
    owners: list[int], source: int, target: int, strategy: str, batch_bins: int = 16
) -> list[list[tuple[int, int]]]:
    """Plan the move of all bins of one worker to another.

    Parameters
    ----------
    owners : list of int
        Worker that owns each bin now.
    source, target : int
        Worker numbers.
    strategy : {"batched", "fluid", "all-at-once"}
        How many bins move in one step.
    batch_bins : int, default 16
        Bins per step of "batched".

    Returns
    -------
    list of list of (int, int)
        Steps of (bin, worker); the next step begins when the one before is complete.

    Raises
    ------
    ConfigError
        When the strategy is unknown or `batch_bins` is not positive.

    Examples
    --------
    >>> migration_steps([0, 1, 0, 0], 0, 1, "batched", batch_bins=2)
    [[(0, 1), (2, 1)], [(3, 1)]]
    """
    from penstock import _native

    _at_least_one(batch_bins, "batch_bins")
    wanted = [target if owner == source else owner for owner in owners]
    return _native.migration_steps(owners, wanted, strategy, batch_bins)


def _read(source: Any, nested: bool) -> Iterator[pa.RecordBatch]:
    if isinstance(source, pa.RecordBatch):
        yield source
    elif hasattr(source, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(source)
    elif hasattr(source, "__arrow_c_array__"):
        yield pa.record_batch(source)
    elif hasattr(source, "to_batches"):
        yield from source.to_batches()
    elif not nested and isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
        for item in source:
            yield from _read(item, nested=True)
    else:
        what = "the source gives a" if nested else "the source is a"
        raise SchemaError(
            f"{what} {type(source).__name__}, not Arrow data; give a pyarrow table, reader or batches,"
            " or any object with __arrow_c_stream__"
        )


def _rows_of(source: Any) -> int | None:
    """How many rows a source has; None where only reading it would tell."""
    if isinstance(source, (list, tuple)):
        counts = [_rows_of(item) for item in source]
        return None if None in counts else sum(count for count in counts if count is not None)
    rows = getattr(source, "num_rows", None)
    if isinstance(rows, int):
        return rows
    if getattr(getattr(source, "format", None), "default_extname", None) in ("parquet", "feather", "arrow"):
        return int(source.count_rows())  # a dataset that has it in its footers
    return len(source) if hasattr(source, "__arrow_c_stream__") and isinstance(source, Sized) else None


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("out {task.fields[out]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _at_least_one(value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an int of at least 1")


def _yes_or_no(value: bool, name: str) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")
