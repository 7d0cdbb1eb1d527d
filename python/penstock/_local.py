"""The local host: a flow on threads of this process.

Owns: reading any Arrow source, progress on screen, and migrations asked for from Python.
The loop that feeds and takes is `_pump`; the threads, the epochs and the state are the
native module's. The input is one epoch, or with ``streaming`` each batch of it is one, in
pieces where it is large.

Invariants: at most a bounded number of batches is in flight (the native side blocks the
feeder); leaving a run early and an exception end the worker threads before control comes
back to the caller; after Ctrl-C the caller may go on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._autobalance import PAUSE_S, Autobalance, Rules
from penstock._beside import Apart, Kinds, hand, require
from penstock._coroutines import require_plain
from penstock._crew import Crew, checked_processes
from penstock._durations import Timeout
from penstock._figures import (
    LOCAL_MOVES,
    LOCAL_WORKERS,
    ScopeStats,
    bins_table,
    loads_table,
    scope_stats,
    to_table,
)
from penstock._loads import Loads
from penstock._local_balance import Balanced
from penstock._migration import (
    Cut,
    MigrationReport,
    MigrationStep,
    Wish,
    evened,
    follow,
    parse_by,
    parse_epoch,
    parse_tolerance,
    steps,
)
from penstock._options import whole, yes_or_no
from penstock._parts import Bins, Part, Parts, names_parts
from penstock._pump import AHEAD, Fed, Feed, LateRows, LocalResults, Pump
from penstock._rescale import LocalRescale
from penstock._resume import caught
from penstock._schema import conform
from penstock._views import bytes_of
from penstock.errors import ConfigError, EngineError, SchemaError

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock._flow.base import FlowBase

__all__ = [
    "LateRows",
    "LocalMigration",
    "LocalResults",
    "LocalSession",
    "RunSummary",
    "batches",
    "feeds",
    "run",
    "run_into",
]

#: Entries of the log of moved bins that are kept; the oldest go first.
_MOST_MOVES = 200_000
#: Threads of a run.
MOST_WORKERS = 1024
#: Rows of a batch, as Arrow counts them.
_MOST_ROWS = 2**63 - 1
#: Rows of a block.
_BLOCK_ROWS = 65_536
#: Bytes of a block, about: no message between workers may have more than four times as many.
_BLOCK_BYTES = 64 << 20

#: Receives late rows, or those of the kinds that it names.
LateSink = Callable[[pa.RecordBatch], Any] | Mapping[str, Callable[[pa.RecordBatch], Any]]
#: Receives results: a function, or an object with ``write_batch`` (a ParquetWriter).
BatchSink = Callable[[pa.RecordBatch], Any] | Any
#: Receives rows of side outputs, by their names.
SideSinks = Mapping[str, Callable[[pa.RecordBatch], Any]]


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
    scopes : tuple of ScopeStats
        Bounded parts and flat maps at the end of the run; see `LocalSession.scopes`.
    side_rows : dict of str to int
        Rows of each side output, whether or not somebody took them.
    """

    rows: int
    output_rows: int
    late_rows: int
    seconds: float
    scopes: tuple[ScopeStats, ...] = ()
    side_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows_per_second(self) -> float:
        """Input rows per second of wall time."""
        return self.rows / self.seconds if self.seconds else 0.0


#: In place of the worker of a bin that is split.
_SPLIT = 2**32 - 1


class LocalMigration:
    """Moves that are under way in a session; made by `LocalSession.migrate`. A `penstock._migration.Migration`.

    Parameters
    ----------
    session : LocalSession
        Where it runs.
    strategy : str
        As asked for.
    bins : int
        How many bins are to move.
    handles : list of int, optional
        What the native side calls it; without one it was not asked for yet, or in vain.
    """

    def __init__(self, session: LocalSession, strategy: str, bins: int, handles: Sequence[int] = ()) -> None:
        self._session = session
        self._handles = list(handles)
        self._bins = bins
        self._report = MigrationReport(strategy, time.time())
        self._ended = False
        #: Why it did not finish, or None.
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._wait(0.0)

    @property
    def report(self) -> MigrationReport:
        """What it has done, once it is done."""
        self._wait(0.0)
        return self._report

    def wait(self, timeout: Timeout | None = None, progress: bool = False) -> MigrationReport:
        """Wait until every bin is at its new worker; the flow need not be fed for it.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds, or a duration; default without limit.
        progress : bool, default False
            Show a line on stderr while waiting.

        Returns
        -------
        MigrationReport
            `report`.

        Raises
        ------
        EngineError
            When it was refused, or the workers have ended.
        TimeoutError
            When the time is up first; the migration goes on.
        """
        follow(self._wait, timeout, progress, lambda: self._bins)
        if self.error is not None:
            raise self.error
        return self._report

    def cancel(self) -> None:
        """Begin no further step; the one under way is completed, and `wait` tells what was done."""
        if not self.done:
            # Where it leaves the bins is known when it has ended; also where an interrupt comes behind the call.
            self._session._owners = None
            self._session._native.cancel_migration(self._handles[0])
            self._session._owners = None  # another thread may have asked meanwhile

    def _wait(self, seconds: float) -> bool:
        if self._ended or not self._handles:
            return True
        try:
            told = self._session._native.wait_migration(self._handles[0], seconds)
        except EngineError as error:
            if self._session._closed and "LocalRun" in str(error):
                error = EngineError("the session ended before this migration did: nothing moves any more")
            self.error, self._ended = error, True
            return True
        if told is None:
            return False
        steps = tuple(MigrationStep(**step) for step in told["steps"])
        # From its turn on, by the workers' clock.
        started, ended = (steps[0].started_ns / 1e9, steps[-1].ended_ns / 1e9) if steps else (time.time(),) * 2
        self._report = MigrationReport(self._report.strategy, started, ended, told["moved"], told["bytes"], steps)
        self._ended = True
        return True

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self._ended else "running"
        return f"<Migration {state}: {self._bins} bins>"


class LocalSession:
    """Worker threads of this process that run one flow once.

    Parameters
    ----------
    flow : Flow
        What to compute.
    workers : int, default 1
        Threads; each owns a share of the bins.
    late : callable, or dict of name to callable, optional
        Receives batches of late rows in the thread that iterates `run`; see `Flow.run`.
    sides : dict of name to callable, optional
        Receives batches of side outputs likewise.
    batch_rows : int, optional
        Larger input batches are cut, with `streaming` into several epochs. See `Flow.run`.
    streaming : bool, default False
        Each batch is an epoch; by default the whole input is one. See `Flow.run`.
    bits : int, default 8
        The state is cut into ``2 ** bits`` bins, the units of migration.
    processes : int, optional
        Run in so many processes of `workers` threads each; see `Flow.run`.

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
    ...         session.migrate(to=[1] * 256)
    ...         yield pa.table({"k": [2]})
    ...     table = pa.Table.from_batches(session.run(source()))
    >>> sorted(table.to_pydict().items())[1]
    ('n', [1, 2])
    """

    def __init__(
        self,
        flow: FlowBase,
        workers: int = 1,
        *,
        late: LateSink | None = None,
        sides: SideSinks | None = None,
        batch_rows: int | None = None,
        bits: int = 8,
        streaming: bool = False,
        processes: int | None = None,
    ) -> None:
        workers = _at_least_one(workers, "workers", MOST_WORKERS)
        if batch_rows is not None:
            batch_rows = _at_least_one(batch_rows, "batch_rows", _MOST_ROWS)
        if processes is not None:
            processes = checked_processes(processes, f"processes={processes!r}", workers)
        if whole(bits, 0, 20) is None:
            raise ConfigError(f"bits={bits!r} must be an int from 0 to 20: the state is cut into 2 ** bits bins")
        yes_or_no(streaming, "streaming")
        from penstock import _native

        kinds = Kinds.of(flow._check(streaming))
        require(late, sides, kinds, "a batch", "batch")

        self.workers = workers
        #: Input rows handed to the workers so far.
        self.rows = 0
        #: Output rows given back so far.
        self.output_rows = 0
        #: Late rows seen so far.
        self.late_rows = 0
        #: Rows of each side output in epochs that are complete, whether or not somebody takes them.
        self.side_rows = dict.fromkeys(kinds.sides, 0)
        #: How many batches were fed, once no more are.
        self._fed: int | None = None
        self._flow = flow
        self._beside = Apart(late, sides, kinds)
        self._batch_rows = batch_rows
        self._streaming = streaming
        self._bits = bits
        self._used = self._closed = False
        # What the workers told last, once they have ended.
        self._last: dict[str, Any] | None = None
        self._moves: deque[dict[str, Any]] = deque(maxlen=_MOST_MOVES)
        plan, calls = flow.to_plan(streaming)
        options: Any = {"bits": bits, "whole": not streaming, "wanted": kinds.wanted(sides), "ahead": AHEAD}
        #: The processes, where the workers are in some.
        self._crew: Crew | None = None
        if processes is None:
            self._native = _native.LocalRun(plan, calls, workers=workers, **options)
        else:
            self._crew = Crew(plan, calls, workers, bits)
            # Its thread would keep it; at exit of the interpreter it ends with that.
            weakref.finalize(self, self._crew.abandon).atexit = False
            try:
                self._native = _native.LocalRun(plan, calls, seats=self._crew.seats._native, **options)
                self._crew.start(self._native, processes)
            except BaseException:
                if hasattr(self, "_native"):
                    self._native.close()
                self._crew.close()
                raise
        self._moving = threading.RLock()
        self._autobalance: Autobalance | None = None
        # Who owns each bin when all migrations asked for are complete; None where that is to be asked.
        self._owners: list[list[int]] | None = None
        self._begun: list[LocalMigration] = []
        # The same, as long as bins are split.
        self._cut: Parts | None = None
        # Those that wait for an epoch, or have waited while others were under way, with their bins.
        self._prepared: list[tuple[LocalMigration, frozenset[int]]] = []
        #: Migrations that run or wait for their turn, with their bins: one that is cancelled leaves them as they are.
        self._moved: list[tuple[LocalMigration, frozenset[int]]] = []

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
        self._require_open()
        read = feeds(self._flow, source, self._batch_rows, self._streaming)
        self._used = True
        return LocalResults(Pump(lambda: self, read))

    def migrate(
        self,
        to: Sequence[int] | None = None,
        moves: Mapping[int, int] | Iterable[tuple[int, int]] | None = None,
        *,
        strategy: str = "batched",
        batch_size: int | None = None,
        max_pause: Timeout | None = None,
        gap: str | None = None,
        at_epoch: int | None = None,
    ) -> LocalMigration:
        """Move bins to other workers while the flow runs.

        Parameters
        ----------
        to : list of int, optional
            The worker of each bin afterwards.
        moves : dict of bin to worker, or list of (bin, worker), optional
            Only these bins; ``(prefix, bits)`` names a part of one that is split. With neither, bins are spread evenly.
        strategy : {"batched", "all-at-once", "fluid", "matched"}, default "batched"
            Many bins at once make a short migration with a long pause, few bins a long one with short pauses. With
            "matched" each worker sends to at most one other at a time and receives from at most one.
        batch_size : int, optional
            Bins of a step, for "batched", of a pair of workers for "matched"; of no effect and so refused for the
            others. Default 16, with `max_pause` 1.
        max_pause : float, str or datetime.timedelta, optional
            Seconds, or a duration such as "50ms", that no step may hold rows up for longer, where a single bin allows
            it: the number of bins that move at once is chosen from what the steps before have cost. Where a single one
            holds them up for longer (while slow functions run), steps are at most half as long again.
        gap : {"drain"}, optional
            What waited when a step was complete is worked off before the next one, so no row waits for two of them:
            all batches that were fed by then, whatever comes later. Where more always wait, a step takes at least one
            batch; where none do, there is no gap. By default the next step follows at once.
        at_epoch : int, optional
            Prepared ahead: the first step takes effect before any row of that epoch, the `epoch`-th batch of a
            streaming session, whatever moves then. Migrations for one epoch take effect together and name
            different bins. By default it begins when those asked for before have ended.

        Returns
        -------
        LocalMigration
            A handle; its `wait` waits for the end.

        Raises
        ------
        ConfigError
            When a bin, worker, strategy or gap does not exist, the epoch has passed, or the whole input is one.
        EngineError
            When the workers have ended.

        Notes
        -----
        Results do not change. Migrations take turns; what a second one has to move follows from where the first one
        leaves the bins. Between threads a bin moves as a pointer.
        """
        self._require_threads("migrate")
        self._require_open()
        bins = 1 << self._bits
        cut = Cut.of(strategy, batch_size, max_pause, gap)
        epoch = parse_epoch(at_epoch)
        if epoch is not None and not self._streaming:
            raise ConfigError(f"at_epoch={epoch}: the whole input is one epoch; start the session with streaming=True")
        if isinstance(moves, Iterator):
            moves = list(moves)
        with self._moving:
            owners, doubtful = self._planned()
            if self._cut is not None:
                return self._migrate_parts(to, moves, cut, epoch, len(owners), doubtful)
            if owners and to is None and moves is not None and names_parts(moves):
                # All are whole, and named as parts are.
                named = self._parts().moves(None, moves, self.workers)
                moves = [(prefix, worker) for (prefix, _), worker in named]
            wish = Wish.of(to, moves, cut, bins, self.workers)
            if epoch is not None:
                # What moves until then is not known.
                todo = wish.plan(owners, self.workers, bins, "this flow", range(bins))
                return self._prepare(epoch, todo, cut)
            todo = wish.plan(owners, self.workers, bins, "this flow", doubtful)
            planned = steps(owners, todo, cut)
            with self._planning():
                migration = self._move(planned, cut, todo)
                for number, worker in todo:
                    for op in owners:
                        op[number] = worker
        return migration

    def _prepare(self, epoch: int, moves: list[tuple[int, int]], cut: Cut) -> LocalMigration:
        """Have bins move ahead of an epoch."""
        migration = LocalMigration(self, cut.strategy, len(moves))
        self._prepared.append((migration, frozenset(number for number, _ in moves)))
        order = epoch, moves, cut.strategy, cut.batch_size, cut.max_pause_s, cut.drains
        return self._begin(migration, self._native.prepare, *order)

    def _move(
        self, planned: Sequence[Sequence[tuple[int, int]]], cut: Cut, moves: Sequence[tuple[int, int]]
    ) -> LocalMigration:
        """Have bins move in these steps; remembers them until it has ended: cancelled, it leaves them anywhere."""
        migration = LocalMigration(self, cut.strategy, len(moves))
        moved = [(one, moving) for one, moving in self._moved if not one.done]
        self._moved = [*moved, (migration, frozenset(number for number, _ in moves))]
        return self._begin(migration, self._native.migrate, planned, cut.max_pause_s, cut.drains)

    def _begin(self, migration: LocalMigration, call: Callable[..., int], *order: Any) -> LocalMigration:
        """Ask the native side for a migration, which is remembered whatever interrupts that."""
        self._begun = [*(begun for begun in self._begun if not begun.done), migration]
        caught(migration._handles, call, *order)
        return migration

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """While something is asked for and where the bins will be is noted: an interrupt between leaves that to be
        asked; what is refused changes nothing."""
        try:
            yield
        except ConfigError:
            raise
        except BaseException:
            self._owners = None
            raise

    def _migrate_parts(
        self, to: Any, moves: Any, cut: Cut, epoch: int | None, ops: int, doubtful: frozenset[int]
    ) -> LocalMigration:
        """As `migrate`, where bins are split: what is said of a bin is said of all its parts."""
        assert self._cut is not None
        todo = self._cut.moves(to, moves, self.workers, ops)
        name = self._cut.number
        if epoch is not None:
            return self._prepare(epoch, [(name(part), worker) for part, worker in todo], cut)
        todo = [(part, worker) for part, worker in todo if self._is_to_move(part, worker, doubtful)]
        planned = self._cut.steps(todo, cut)
        with self._planning():
            migration = self._move(planned, cut, [(name(part), worker) for part, worker in todo])
            self._cut.owner.update(todo)
        return migration

    def _is_to_move(self, part: Part, worker: int, doubtful: frozenset[int]) -> bool:
        """Whether a part may have to move, so that a worker has it."""
        assert self._cut is not None
        prefix, bits = part
        whole = prefix >> (bits - self._bits)  # which may have been under way as it was split
        return bool(doubtful & {self._cut.number(part), whole}) or self._cut.owner[part] != worker

    def split(self, bins: Bins, by: int = 1) -> LocalMigration:
        """Cut bins into ``2 ** by`` parts each, by the next bits of the hashes of their keys, while the flow runs.

        A part moves like a bin: `migrate` takes it as ``(prefix, bits)``. Results do not change.

        Parameters
        ----------
        bins : int or (prefix, bits), or a list of them
            Which: a bin by its number, or a part of one by its prefix and the bits of that.
        by : int, default 1
            How many bits. A part has 20 bits at most.

        Returns
        -------
        LocalMigration
            A handle. It takes effect between two batches of a stream, when the migrations asked for before have ended.

        Raises
        ------
        ConfigError
            When there is no such bin, it is split already, or its parts would be too fine; or when rows wait in the
            bins of the flow for the end of an input that is one epoch.
        EngineError
            When the workers have ended.

        Notes
        -----
        A worker that has a part of a bin counts into tables of their own instead of small ones that lie together, so
        split what is large or hot. Cost: a copy of the state of the bin, at one time, on one worker.
        """
        self._require_threads("split")
        self._require_open()
        with self._moving:
            plan = self._parts().copy()
            chosen = plan.split(bins, by)
            with self._planning():
                migration = self._recut([(part, by) for part in chosen], [])
                self._cut = plan
            return migration

    def _recut(self, splits: list[tuple[Part, int]], merges: list[Part]) -> LocalMigration:
        migration = LocalMigration(self, "all-at-once", len(splits) + len(merges))
        return self._begin(migration, self._native.recut, splits, merges)

    def merge(self, bins: Bins) -> LocalMigration:
        """Make all parts of a bin, or of a part, one again.

        Parameters
        ----------
        bins : int or (prefix, bits), or a list of them
            What they are to be.

        Returns
        -------
        LocalMigration
            A handle, as of `split`. Parts on several workers first come together on the one that has most of them.

        Raises
        ------
        ConfigError
            When there is no such bin, or it is not split.
        EngineError
            When the workers have ended.
        """
        self._require_threads("merge")
        self._require_open()
        with self._moving:
            parts = self._parts()
            plan = parts.copy()
            chosen, moves = plan.merge(bins)
            owners, doubtful = self._planned()
            todo = [(part, to) for part, to in moves if self._is_to_move(part, to, doubtful)]
            with self._planning():
                if todo:
                    cut = Cut.of("matched", None, PAUSE_S)
                    self._move(parts.steps(todo, cut), cut, [(parts.number(part), to) for part, to in todo])
                migration = self._recut([], chosen)
                self._cut = plan if plan.is_split else None
                if self._cut is None:
                    for op in owners:
                        op[:] = plan.owners()
            return migration

    def bins(self) -> pa.Table:
        """All bins as they are now, parts among them.

        Returns
        -------
        pyarrow.Table
            op (keyed step, from 0), prefix, bits (of the prefix), worker, state_bytes (in memory, as of `stats`; null
            where the bin is in another process). After the session is closed, as of its end.
        """
        told = self._last or self._told_bins()
        sizes = [{(prefix, bits): size for prefix, bits, size in step} for step in told["bin_bytes"]]
        return bins_table(told["bins"], sizes)

    def _told_bins(self) -> dict[str, Any]:
        """What `bins` shows."""
        self._require_open()
        return {"bins": self._native.bins(), "bin_bytes": self._native.bin_bytes()}

    def _parts(self) -> Parts:
        """The bins once all that was asked for is done."""
        owners, _ = self._planned()
        if not owners:
            raise ConfigError("this flow keeps no state: it has no bins")
        return self._cut or Parts(self._bits, {(number, self._bits): worker for number, worker in enumerate(owners[0])})

    @property
    def epoch(self) -> int:
        """The epoch that the next batch of a streaming session becomes: the number of batches that have been fed.

        That number it stays when the session has ended.
        """
        return int(self._native.next_epoch) if self._fed is None else self._fed

    def rebalance(
        self,
        *,
        by: str = "bins",
        tolerance: float = 1.2,
        strategy: str = "batched",
        batch_size: int | None = None,
        max_pause: Timeout | None = None,
        gap: str | None = None,
    ) -> LocalMigration:
        """Spread the bins evenly over the workers, moving as few as possible.

        Parameters
        ----------
        by : {"bins", "rows", "busy"}, default "bins"
            Equal numbers of bins; equal numbers of rows, as they came since the workers began; or equal time that they
            have kept workers busy since then (`loads`).
        tolerance : float, default 1.2
            By rows or time: what a worker may have, as a multiple of the mean. Fewer bins move the larger it is.
        strategy, batch_size, max_pause, gap
            As for `migrate`.

        Returns
        -------
        LocalMigration
            A handle, as of `migrate`.

        Raises
        ------
        ConfigError
            When an option is out of range.
        EngineError
            When the workers have ended.
        """
        tolerance = parse_tolerance("tolerance", tolerance)
        options: Any = {"strategy": strategy, "batch_size": batch_size, "max_pause": max_pause, "gap": gap}
        self._require_open()
        told = self._told()
        if parse_by(by) == "bins" or not told["owners"]:
            return self.migrate(**options)
        with self._moving:
            plan = self._parts()
            _, loads = told["loads"].by(by, plan)
            owner = sorted(plan.owner.items())
            of_bins = [loads[part] for part, _ in owner]
            target = evened([worker for _, worker in owner], of_bins, self.workers, tolerance)
            if not plan.is_split:
                return self.migrate(to=target, **options)
            moves: Any = [(part, to) for (part, _), to in zip(owner, target, strict=True)]
            return self.migrate(moves=moves, **options)

    def loads(self) -> pa.Table:
        """What each bin gets.

        Returns
        -------
        pyarrow.Table
            bin (its prefix), bits (of the prefix: more where it is part of a bin that is split), worker (its owner),
            rows (that came for it since the session began, of all keyed steps; one in eight is counted, for eight;
            rows of a bin that was split later count as spread evenly over its parts), busy_s (seconds that it kept
            workers busy in keyed steps: calls of your functions for its keys, as they were measured, and of the rest of
            each step's time its share by rows and by pairs of a join).
        """
        told = self._told()
        now = self._native.bins() if self._last is None else told["bins"]
        if now and len(now[0]) > 1 << self._bits:
            parts = Parts(self._bits, {(prefix, bits): worker for prefix, bits, worker in now[0]})
        else:
            owners = enumerate(told["owners"][0] if told["owners"] else [])
            parts = Parts(self._bits, {(number, self._bits): worker for number, worker in owners})
        return loads_table(parts, told["loads"])

    def owners(self) -> list[list[int]]:
        """The worker of each bin now, one list for each keyed step of the flow; -1 of a bin that is split (`bins`)."""
        return [[-1 if worker == _SPLIT else worker for worker in step] for step in self._told()["owners"]]

    def _planned(self) -> tuple[list[list[int]], frozenset[int]]:
        """The worker of each bin once all that was asked for is done, and the bins that may be elsewhere."""
        owners = self._owners  # who cancels a migration forgets them at any time
        if owners is None or (self._prepared and all(migration.done for migration in self._begun)):
            waiting = [migration for migration, _ in self._prepared if not migration.done]
            for migration in self._begun:
                if migration not in waiting:
                    follow(migration._wait, None, False, lambda: 0)
            owners, told = self.owners(), self._native.bins()
            split = bool(told) and len(told[0]) > 1 << self._bits
            owner = {(prefix, bits): worker for prefix, bits, worker in told[0]} if split else {}
            self._cut = Parts(self._bits, owner) if split else None
            self._prepared = [one for one in self._prepared if one[0] in waiting]
            self._owners = owners  # the last: then all of it is known
        moved = [bins for migration, bins in self._moved if not migration.done]
        ahead = [bins for migration, bins in self._prepared if migration._handles]
        return owners, frozenset(itertools.chain(*ahead, *moved))

    def stats(self) -> pa.Table:
        """The present figures of the workers, one row each.

        Returns
        -------
        pyarrow.Table
            worker, bins (of the first keyed step), bins_by_step, keys, state_bytes, rows (of input that this worker
            has fed, or with processes was dealt), late_rows, epochs (completed while it was there), busy_s (seconds
            that it was not parked), pid (of its process).

        Notes
        -----
        As of up to 20 ms ago. After the session is closed, as of its end. With processes the first worker is the one
        that feeds and takes, where late rows are counted; the others are asked, and of one that does not answer for a
        second, since a function of yours runs, the figures are those of its last answer.
        """
        rows = [
            {
                **worker,
                "bins": next(iter(worker["bins"]), 0),
                "bins_by_step": worker["bins"],
                "busy_s": worker["busy_ns"] / 1e9,
            }
            for worker in self._told()["workers"]
        ]
        return to_table(rows, LOCAL_WORKERS)

    def moves(self) -> pa.Table:
        """The log of moved bins, of which the oldest entries go first.

        Returns
        -------
        pyarrow.Table
            op (the keyed step, from 0), worker, bin (its number; of a part ``2 ** bits + prefix`` with the bits of that
            prefix: the part (13, 4) is 29), what (prepare, state, pending, installed), bytes (of state in the message),
            at (nanoseconds, UTC), routed_rows (by this worker until then).
        """
        self._told()
        return to_table(self._moves, LOCAL_MOVES)

    def scopes(self) -> list[ScopeStats]:
        """The figures of the bounded parts and flat maps, on each worker, in the order of the flow."""
        return scope_stats(self._told()["workers"])

    def _told(self) -> dict[str, Any]:
        """What the workers tell now, or told last, once they have ended."""
        if self._last is not None:
            return self._last
        self._require_open()
        told: dict[str, Any] = json.loads(self._native.stats())
        told["loads"] = Loads(told["loads"])
        for worker in told["workers"]:
            worker["pid"] = os.getpid()
        if self._crew is not None:
            figures, moves = self._crew.stats()
            told["moves"] = sorted((*told["moves"], *moves), key=itemgetter("at_ns"))
            for other in figures:
                told["workers"] += other["workers"]
                told["loads"] = told["loads"].with_(other["loads"])
            told["workers"].sort(key=itemgetter("worker"))
        self._moves.extend({**move, "at": int(move["at_ns"])} for move in told["moves"])
        return told

    def rescale(self, processes: int) -> LocalRescale:
        """Go to another number of processes while rows pass; see `LocalResults.rescale`."""
        count = checked_processes(processes, f"rescale({processes!r})", self.workers)
        if self._crew is None:
            raise ConfigError(
                f"rescale({count}): the workers of this run are threads of one process; begin it with processes="
            )
        self._require_open()
        return self._crew.rescale(count)

    def autobalance(
        self,
        *,
        by: str = "busy",
        every: Timeout = "5s",
        trigger: float = 1.5,
        tolerance: float = 1.2,
        patience: int = 3,
        least_rows: int = 1_000,
        max_bin_bytes: int | str | None = "64m",
        processes: tuple[int, int] | None = None,
        dry_run: bool = False,
    ) -> Autobalance:
        """Even the load of the workers out whenever it stays skewed; see `LocalResults.autobalance`."""
        rules = Rules.of(
            by, every, trigger, tolerance, patience, least_rows, max_bin_bytes, processes, dry_run, "processes"
        )
        if processes is not None and self._crew is None:
            raise ConfigError(
                f"processes={processes!r}: the workers of this run are threads of one process; begin it with processes="
            )
        if processes is not None:
            checked_processes(processes[1], f"processes={processes!r}", self.workers)
        with self._moving:
            self._require_open()
            if self._autobalance is not None and self._autobalance.looking:
                raise EngineError("the run is balanced already: close that handle first")
            host = Balanced(self)
            self._autobalance = Autobalance(host, rules, "local", host.room, "{} did not come up".format)
            # A session that nobody closes is let go of as before.
            weakref.finalize(self, self._autobalance.stop)
            return self._autobalance.start()

    def _even_out(self, moves: Sequence[tuple[int, int]], max_pause_s: float) -> LocalMigration:
        """Move bins between workers of processes, by their numbers there; for `Balanced`."""
        assert self._crew is not None
        cut = Cut.of("matched", None, max_pause_s)
        handle = self._crew.even_out(steps(self._told()["owners"], moves, cut), max_pause_s)
        return LocalMigration(self, cut.strategy, len(moves), [handle])

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("this session has ended; start another with flow.start()")

    def _require_threads(self, what: str) -> None:
        if self._crew is not None:
            raise ConfigError(f"{what}: where workers are processes, bins move with them; use rescale")

    def explain(self, error: BaseException) -> BaseException:
        """The failure that is behind one of the native side: that of a process, where there is one."""
        if self._closed and isinstance(error, EngineError) and "LocalRun" in str(error):
            return EngineError("this session was closed while it ran; start another with flow.start()")
        return error if self._crew is None else self._crew.explain(error)

    def close(self) -> None:
        """Stop the workers and drop the state; harmless when done twice."""
        # Each also where an interrupt ends the one before.
        if self._autobalance is not None:
            self._autobalance.stop()
        try:
            if self._last is None:
                with contextlib.suppress(EngineError):
                    self._last = self._told() | self._told_bins()
        finally:
            self._closed = True
            if self._crew is not None:
                self._crew.ending = True
            try:
                self._native.close()
            finally:
                try:
                    if self._crew is not None:
                        self._crew.close()
                finally:
                    if self._autobalance is not None:
                        self._autobalance.close()

    def __enter__(self) -> LocalSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run(
    flow: FlowBase,
    source: Any,
    workers: int = 1,
    *,
    late: LateSink | None = None,
    sides: SideSinks | None = None,
    progress: bool = False,
    batch_rows: int | None = None,
    streaming: bool = False,
    processes: int | None = None,
) -> LocalResults:
    """Run a flow in this process; see `Flow.run`.

    The flow and the options are checked here, before the first batch is asked for; the
    threads start with the first batch.
    """
    _check(flow, workers, late, sides, progress, batch_rows, streaming, processes)
    return LocalResults(_Run(flow, source, workers, late, sides, progress, batch_rows, streaming, processes).pump())


def _check(
    flow: FlowBase,
    workers: int,
    late: LateSink | None,
    sides: SideSinks | None,
    progress: bool,
    batch_rows: int | None,
    streaming: bool,
    processes: int | None,
) -> Kinds:
    _at_least_one(workers, "workers", MOST_WORKERS)
    if batch_rows is not None:
        _at_least_one(batch_rows, "batch_rows", _MOST_ROWS)
    yes_or_no(streaming, "streaming")
    yes_or_no(progress, "progress")
    if processes is not None:
        checked_processes(processes, f"processes={processes!r}", workers)
    # Compiles the flow, so that mistakes show at the call.
    kinds = Kinds.of(flow._check(streaming))
    require(late, sides, kinds, "a batch", "batch")
    return kinds


class _Run:
    """One run of a flow, with its bar on the screen if that is wanted; `session` once it has begun."""

    def __init__(
        self,
        flow: FlowBase,
        source: Any,
        workers: int,
        late: LateSink | None,
        sides: SideSinks | None,
        progress: bool,
        batch_rows: int | None,
        streaming: bool,
        processes: int | None,
    ) -> None:
        self._wanted = (flow, workers, late, sides, batch_rows, streaming, processes)
        self._source = source
        self._batches = feeds(flow, source, batch_rows, streaming)
        self._bar = _progress() if progress else None
        self.session: LocalSession | None = None

    def pump(self) -> Pump:
        if self._bar is None:
            return Pump(self._start, self._batches)
        return Pump(self._start, self._watched(self._bar), self._bar.stop)

    def _start(self) -> LocalSession:
        if self._bar is not None:
            self._bar.start()
        flow, workers, late, sides, batch_rows, streaming, processes = self._wanted
        self.session = LocalSession(
            flow, workers, late=late, sides=sides, batch_rows=batch_rows, streaming=streaming, processes=processes
        )
        return self.session

    def _watched(self, bar: Progress) -> list[Feed]:
        task = bar.add_task("rows", total=_rows_of(self._source), out=0)

        def watched(batches: Iterator[Fed]) -> Iterator[Fed]:
            # In the thread that reads: no interrupt reaches the locks of the bar there.
            for fed in batches:
                out = 0 if self.session is None else self.session.output_rows
                bar.update(task, advance=fed.rows, out=out)
                yield fed

        return [feed._replace(batches=watched(feed.batches)) for feed in self._batches]


def run_into(
    flow: FlowBase,
    sink: BatchSink,
    source: Any,
    workers: int = 1,
    *,
    late: LateSink | None = None,
    sides: SideSinks | None = None,
    progress: bool = False,
    batch_rows: int | None = None,
    streaming: bool = False,
    processes: int | None = None,
) -> RunSummary:
    """Run a flow in this process and hand each batch to a sink; see `Flow.run_into`."""
    write = getattr(sink, "write_batch", sink)
    if not callable(write):
        raise ConfigError(f"sink {sink!r} is neither a function nor an object with write_batch")
    require_plain(write, "sink", takes="batch", ignored=True)
    kinds = _check(flow, workers, late, sides, progress, batch_rows, streaming, processes)
    output_rows = 0
    late_sink: LateSink = _nobody
    if late is not None:
        late_sink = late if callable(late) else dict.fromkeys(kinds.late, _nobody) | dict(late)
    begin = time.perf_counter()
    run = _Run(flow, source, workers, late_sink, sides, progress, batch_rows, streaming, processes)
    with LocalResults(run.pump()) as results:
        for batch in results:
            hand(write, batch, "sink")
            output_rows += batch.num_rows
    session = run.session
    assert session is not None
    seconds = time.perf_counter() - begin
    scopes = tuple(session.scopes())
    return RunSummary(session.rows, output_rows, session.late_rows, seconds, scopes, dict(session.side_rows))


def _nobody(batch: pa.RecordBatch) -> None:
    """The late rows are in the summary."""


def batches(source: Any, schema: pa.Schema, batch_rows: int, name: str | None = None) -> Iterator[pa.RecordBatch]:
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
    name : str, optional
        Of the source, for errors: where there are several.

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
    for batch in _read(source, name, nested=False):
        yield from _cut(batch, schema, batch_rows, name)


def _called(name: str | None, otherwise: str) -> str:
    return otherwise if name is None else f"source {name!r}"


def _cut(batch: pa.RecordBatch, schema: pa.Schema, rows: int, name: str | None) -> Iterator[pa.RecordBatch]:
    """A batch in fitting pieces of at most so many rows, and of a block's bytes; none of one without rows."""
    # Before what may take as much again, and after what may make more of it.
    narrow = _narrowed(batch, schema)
    grows = not narrow.schema.equals(schema)
    for piece in _of_a_block(narrow):
        made = conform(piece, schema, _called(name, "input"))
        for fitting in _of_a_block(made) if grows else (made,):
            for start in range(0, fitting.num_rows, rows):
                yield fitting.slice(start, rows)


def _narrowed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a batch that a schema names: what others hold is nobody's affair."""
    if batch.schema.equals(schema):
        return batch
    places = list(map(batch.schema.get_field_index, schema.names))
    # What is missing, or there twice, is told by who looks for it.
    return batch if -1 in places else batch.select(places)


def _of_a_block(batch: pa.RecordBatch, held: int | None = None) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of at most a block's bytes, or of one row: rows may be of any size, wherever they stand.

    Where most of it is shared by its rows, and so by pieces of it, it stays whole.
    """
    held = bytes_of(batch) if held is None else held
    if batch.num_rows < 2 or held <= _BLOCK_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    pieces = [batch.slice(0, half), batch.slice(half)]
    sizes = list(map(bytes_of, pieces))
    if sum(sizes) > 1.5 * held:
        yield batch
        return
    for piece, size in zip(pieces, sizes, strict=True):
        yield from _of_a_block(piece, size)


def feeds(flow: FlowBase, source: Any, batch_rows: int | None, streaming: bool) -> list[Feed]:
    """Read what a flow is fed: the batches of each of its sources, and where each of several ends.

    In a stream each is an epoch. It is one of the source, whole, or with `batch_rows` as it is cut.

    Parameters
    ----------
    flow : Flow
        What is fed.
    source : Arrow data, or dict of str to Arrow data
        What `batches` reads; by the name of the source, where the flow has several.
    batch_rows : int or None
        Larger batches are cut without copying.
    streaming : bool
        Whether the source is a stream.

    Returns
    -------
    list of Feed
        By the numbers of the sources; without empty batches. A source whose data is in memory or in files is prompt.

    Raises
    ------
    ConfigError
        When a source is missing, or there is one that the flow does not have (at once).
    SchemaError
        As `batches`.
    """
    schemas = flow.sources
    names = ", ".join(schemas)
    if not isinstance(source, Mapping):
        if len(schemas) > 1:
            raise ConfigError(f"the flow has the sources {names}: give a dict of name to data")
        source = dict.fromkeys(schemas, source)
    for name in source:
        if name not in schemas:
            raise ConfigError(
                f"the flow has no source {name!r}; it has {names}. A dict is of sources: for columns give pa.table(...)"
            )
    for name in schemas:
        if name not in source:
            raise ConfigError(f"source {name!r} is missing; the flow has {names}")
    several = len(schemas) > 1

    def feed(number: int, name: str, schema: pa.Schema) -> Iterator[Fed]:
        called = name if several else None
        if streaming and batch_rows is None:
            for batch in _read(source[name], called, nested=False):
                if pieces := list(_cut(batch, schema, _BLOCK_ROWS, called)):
                    yield Fed(pieces, number)
        else:
            for piece in batches(source[name], schema, batch_rows or _BLOCK_ROWS, called):
                yield Fed([piece], number)
        if several:
            yield Fed(None, number)

    return [
        Feed(feed(number, name, schema), _is_at_hand(source[name]), schema)
        for number, (name, schema) in enumerate(schemas.items())
    ]


def _is_at_hand(source: Any) -> bool:
    """Whether a source cannot be silent: what it has is in memory or in files."""
    if isinstance(source, (list, tuple)):
        return all(_is_at_hand(item) for item in source)
    known = isinstance(getattr(source, "num_rows", None), int) or hasattr(source, "count_rows")
    # A frame; a reader has no length.
    return known or (hasattr(source, "__arrow_c_stream__") and isinstance(source, Sized))


def _read(source: Any, name: str | None, nested: bool) -> Iterator[pa.RecordBatch]:
    if isinstance(source, pa.RecordBatch):
        yield source
    elif hasattr(source, "__arrow_c_stream__"):
        reader = _imported(pa.RecordBatchReader.from_stream, source, name)
        none = True
        for batch in reader:
            none = False
            yield batch
        if none:
            # Nothing to compute, but its columns are to fit.
            yield pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in reader.schema.types], reader.schema.names)
    elif hasattr(source, "__arrow_c_array__"):
        yield _imported(pa.record_batch, source, name)
    elif hasattr(source, "to_batches"):
        yield from source.to_batches()
    elif not nested and isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
        for item in source:
            yield from _read(item, name, nested=True)
    else:
        what, verb = _called(name, "the source"), "gives" if nested else "is"
        raise SchemaError(f"{what} {verb} a {type(source).__name__}, not Arrow data; {_instead(source)}")


def _instead(source: Any) -> str:
    """What to give in place of a source that is not Arrow data."""
    if isinstance(source, (str, bytes, os.PathLike)):
        return "of a file give what reads it, such as pyarrow.dataset.dataset(path) or pyarrow.parquet.read_table(path)"
    if isinstance(source, Mapping):
        return "of a list of dicts give pyarrow.Table.from_pylist(rows)"
    if isinstance(source, (list, tuple)):
        return "of rows give pyarrow.Table.from_pylist(rows), a list of dicts"
    return "give a pyarrow table, reader or batches, or any object with __arrow_c_stream__"


def _imported(take: Callable[[Any], Any], source: Any, name: str | None) -> Any:
    try:
        return take(source)
    except pa.ArrowException as error:
        what = _called(name, "the source")
        raise SchemaError(f"{what}, a {type(source).__name__}, is no table in Arrow: {error}") from error


def _rows_of(source: Any) -> int | None:
    """How many rows a source has; None where only reading it would tell."""
    if isinstance(source, Mapping):
        return _rows_of(list(source.values()))
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


def _at_least_one(value: int, name: str, most: int) -> int:
    count = whole(value, 1, most)
    if count is None:
        span = name == "workers" and isinstance(value, (tuple, list))
        hint = "; a range is for run.autobalance(processes=(1, 4))" if span else ""
        raise ConfigError(f"{name}={value!r} must be an int from 1 to {most}{hint}")
    return count
