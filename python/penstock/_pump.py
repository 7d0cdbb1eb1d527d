"""The loop of one local run: batches go in, results come out, whatever waits for whom and whoever interrupts it.

It runs in the thread that takes results, as `fill` of their iterator (see `_resume`). Each source is read in a thread
of its own, one batch at a time as the workers take them, so that a silent one holds back no finished result and no
other source.

Invariants: a batch is pushed once, and only after what could be taken was; a result is given once; before the error of
a source comes all that was made of the batches before it; the session is closed before the end, or an error, is told.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import add
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa

from penstock._reader import Readers
from penstock._resume import Aside, caught, dropped, in_a_run
from penstock.errors import EngineError, Interrupted

if TYPE_CHECKING:
    from typing_extensions import Self

    from penstock._autobalance import Autobalance
    from penstock._beside import Apart
    from penstock._durations import Timeout
    from penstock._native import Handover
    from penstock._rescale import LocalRescale

__all__ = ["AHEAD", "Fed", "Feed", "LocalResults", "Pump"]

#: Pieces of epochs, or parts of the only one, that may be under way: while there are fewer an epoch goes in, however
#: many it has.
AHEAD = 4


class LateRows(UserWarning):
    """Rows that are in no result, since they came late or have no event time, and that no ``late=`` takes."""


class LocalResults(Iterator[pa.RecordBatch]):
    """The results of a local run, batch by batch. Made by `Flow.run` and `LocalSession.run`.

    After an interrupt (Ctrl-C) it goes on where it was, with every batch once; where it cannot, it raises `Interrupted`
    from then on. Closing it, leaving its ``with`` or dropping it stops the workers.

    Parameters
    ----------
    pump : Pump
        What fills it.
    """

    if TYPE_CHECKING:

        def __next__(self) -> pa.RecordBatch: ...

    else:
        __slots__ = ("__next__", "__weakref__", "_pump", "_results")

    _pump: Pump
    _results: Handover

    def __init__(self, pump: Pump) -> None:
        from penstock import _native

        self._pump = pump
        self._results = _native.Handover(pump.fill, EngineError, Failed)
        self.__next__ = self._results.__next__  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def rescale(self, processes: int) -> LocalRescale:
        """Go to another number of processes while rows pass.

        Parameters
        ----------
        processes : int
            How many, 1 to 256. Those that are new start beside those that are there and join in the middle of an
            epoch; those that go give their state away first. Results do not change.

        Returns
        -------
        LocalRescale
            A handle, as that of ``Engine.rescale``: `LocalRescale.wait` waits for the end, `LocalRescale.progress` says
            what it waits for, `LocalRescale.cancel` goes back, and `LocalRescale.report` has how long each step took
            and the longest pause.

        Raises
        ------
        ConfigError
            For another number, or when the run has no processes: begin it with ``flow.run(..., processes=2)``.
        EngineError
            When another rescale is under way, or the run has ended.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
        >>> with flow.run(pa.table({"k": [1, 1, 2]}), processes=1) as run:
        ...     print(run.rescale(2).wait())
        ...     print(sorted(row["n"] for batch in run for row in batch.to_pylist()))
        2
        [1, 2]
        """
        return self._pump.session().rescale(processes)

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
        """Even the load of the workers out whenever it stays skewed, and let the number of processes follow the load.

        As ``Engine.autobalance``, which tells what happens when, with what a local run has: bins move between threads,
        or between those of its processes; they are split and made one again between threads alone. Between processes a
        bin that alone is too hot for any worker stays whole, and its worker the busiest: `Look.why` says so, and once a
        warning in the log.

        Parameters
        ----------
        by, every, trigger, tolerance, patience, least_rows
            As for ``Engine.autobalance``.
        max_bin_bytes : int, str or None, default "64m"
            State that a bin may hold, where workers are threads; ignored where they are processes, which split none.
        processes : (int, int), optional
            The fewest and the most processes, as for `rescale`, of a run that was begun with ``processes=``. As many as
            are four fifths busy with what comes; a source that always has more is worked off by the most. Where some do
            not come up a warning in the log says why, once, and no more are asked for for ten minutes.
        dry_run : bool, default False
            Tell what would be done and why (`Look.why`), and do nothing.

        Returns
        -------
        Autobalance
            A handle with what was seen and done; close it, or use it as a context manager, to stop. It ends with the
            run, and its thread with it.

        Raises
        ------
        ConfigError
            When an option is out of range, or the run has no processes whose number could change.
        EngineError
            When the run has one already, or has ended.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
        >>> with flow.run(pa.table({"k": [1, 1, 2]}), workers=2) as run, run.autobalance(every="1s") as balance:
        ...     print(sorted(row["n"] for batch in run for row in batch.to_pylist()), balance.looks)
        [1, 2] []
        """
        return self._pump.session().autobalance(
            by=by,
            every=every,
            trigger=trigger,
            tolerance=tolerance,
            patience=patience,
            least_rows=least_rows,
            max_bin_bytes=max_bin_bytes,
            processes=processes,
            dry_run=dry_run,
        )

    def stats(self) -> pa.Table:
        """The present figures of the workers, one row each, of all processes; see `LocalSession.stats`."""
        return self._pump.session(also_ended=True).stats()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a running flow cannot be pickled: ship the flow and start a run where it is needed")

    def close(self) -> None:
        """Stop the run: the source is read no further, and no further batch comes."""
        self._pump.quit()
        self._results.clear()
        self._pump.stop()


class Session(Protocol):
    """What a pump needs of the session that it fills and empties, which is closed at its end."""

    #: Rows in, rows out, and late rows, so far.
    rows: int
    output_rows: int
    late_rows: int
    #: Rows of side outputs of epochs that are complete, by their names, in order.
    side_rows: dict[str, int]
    #: How many batches were fed, once no more are.
    _fed: int | None
    _native: Any
    _beside: Apart
    _streaming: bool

    def explain(self, error: BaseException) -> BaseException:
        """The failure that is behind one of the native side."""

    def rescale(self, processes: int) -> LocalRescale:
        """Go to another number of processes."""

    def autobalance(
        self,
        *,
        by: str,
        every: Timeout,
        trigger: float,
        tolerance: float,
        patience: int,
        least_rows: int,
        max_bin_bytes: int | str | None,
        processes: tuple[int, int] | None,
        dry_run: bool,
    ) -> Autobalance:
        """Even the load of the workers out."""

    def stats(self) -> pa.Table:
        """The present figures of the workers."""

    def close(self) -> None:
        """Stop the threads and drop the state."""


class Failed:
    """In place of a batch: what is raised."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Fed(NamedTuple):
    """A batch on its way in, in pieces, and the number of its source; no batch: the source has ended."""

    pieces: list[pa.RecordBatch] | None
    source: int = 0

    @property
    def rows(self) -> int:
        """Of all pieces."""
        return sum(piece.num_rows for piece in self.pieces or ())


class Feed(NamedTuple):
    """A source: its batches, behind which several sources tell their end; whether they are at hand; their columns."""

    batches: Iterator[Fed]
    prompt: bool
    schema: pa.Schema


class _Fed(NamedTuple):
    """What went in: how much of each source, rows, and what went last, with the number of its source."""

    taken: tuple[int, ...]
    rows: int = 0
    last: Any = None
    source: int = -1

    def behind(self, item: Fed) -> _Fed:
        """With one more."""
        taken = (*self.taken[: item.source], self.taken[item.source] + 1, *self.taken[item.source + 1 :])
        return _Fed(taken, self.rows + item.rows, item, item.source)


class _Out(NamedTuple):
    """What came out last, as number `serial`, of the `item`. Rows so far, late ones by their kinds; the end."""

    serial: int = -1
    batches: tuple[Any, ...] = ()
    item: Any = None
    rows: int = 0
    late: tuple[int, ...] = ()
    error: BaseException | None = None


class Pump:
    """See the module.

    Parameters
    ----------
    start : callable
        Gives the session, which is closed at the end. Called, in another thread, when the first batch is asked for.
    sources : sequence of Feed
        Fitting batches.
    at_end : callable, optional
        Called once the session is closed.
    """

    def __init__(
        self,
        start: Callable[[], Session],
        sources: Sequence[Feed],
        at_end: Callable[[], object] | None = None,
    ) -> None:
        self._opening = Aside(start)
        self._session: Session | None = None
        self._native: Any = None
        self._at_end = at_end
        self._pid = os.getpid()
        self._reader = Readers([feed.batches for feed in sources], [feed.prompt for feed in sources])
        #: Boxes (see `_resume.caught`): a batch on its way in, whether it went; whether the end did; an output.
        self._next: list[Fed] = []
        self._pushed: tuple[Any, list[bool]] = (None, [])
        self._finished: list[bool] = []
        self._taken: list[Any] = []
        #: The source that failed, and its error; which of the pushes behind that went.
        self._failed: tuple[int, BaseException] | None = None
        self._marks: list[bool] = []
        self._schemas = [feed.schema for feed in sources]
        self._fed, self._out = _Fed((0,) * len(sources)), _Out()
        #: Seconds in which the sources were not looked at, since the caller had the batches or rows of other outputs.
        self._away_s = 0.0
        self._left: float | None = None
        #: The output beside the results whose function was called, and the one whose function returned.
        self._telling: Any = None
        self._told: Any = None
        self._error: BaseException | None = None
        self._over = self._quit = self._warned = False
        self._closing: Aside[None] | None = None
        if not _open:
            # Ahead of what the native module does at the end: behind that no thread of its own gets anywhere.
            from penstock import _native  # noqa: F401

            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _open.add(self)

    def fill(self, taken: int) -> list[Any] | None:
        """The next batch, in a list."""
        out = self._out
        if out.serial == taken:
            return list(out.batches)  # it got lost on its way
        self._back()
        if self._native is None and not self._quit:
            self._session = self._opening.wait()
            self._native = self._session._native
        while not (self._over or self._quit):
            try:
                made = self._step(taken)
            except (KeyboardInterrupt, Interrupted):
                raise
            except BaseException as error:
                self._error, self._over = self._why(error), True
                break
            if made:
                self._left = time.monotonic()
                return list(self._out.batches)
        self._count()
        self._shut()
        if self._quit or self._error is None or self._error is self._out.error:
            self._warn()
            return None
        self._out = self._out._replace(serial=taken, batches=(Failed(self._error),), error=self._error)
        return list(self._out.batches)

    def _why(self, error: BaseException) -> BaseException:
        """What is raised for it."""
        why = self._session.explain(error) if self._session else error
        if not isinstance(why, StopIteration):
            return why
        # It would end the iterator as if all had come.
        instead = RuntimeError("a function of this run raised StopIteration")
        instead.__cause__ = why
        return instead

    def _back(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            self._away_s += time.monotonic() - left

    def _warn(self) -> None:
        session = self._session
        if self._quit or self._error or self._warned or session is None:
            return
        rows, takes = session._beside.untaken(self._out.late)
        if not rows:
            return
        self._warned = True
        if session._streaming:
            why = "came when their windows had closed or none could meet them, and are in no result; raise lateness= or"
        else:
            why = "have no event time and are in no result; fill it in or"
        text = f"{rows} of {session.rows} rows {why} take them with {takes}"
        warnings.warn(text, LateRows, stacklevel=3)

    def _count(self) -> None:
        session, out = self._session, self._out
        if session is None:
            return
        session.rows, session.output_rows, session.late_rows = self._fed.rows, out.rows, sum(out.late)
        if session.side_rows:
            session.side_rows = dict(zip(session.side_rows, self._native.side_rows, strict=True))

    def _step(self, taken: int) -> bool:
        """Do what can be done; whether a batch has come out, as number `taken`."""
        if self._taken:
            made = self._take_out(taken)
            self._taken.clear()
            return made
        self._count()
        if self._finished and self._finished[0]:
            caught(self._taken, self._native.take, None)
            if self._taken[0] is None and self._native.done:
                self._over = True
            return False
        caught(self._taken, self._native.take, 0.0)
        if self._taken[0] is not None:
            return False
        self._taken.clear()
        if self._feed():
            return False
        # Nothing to take and nothing to feed yet: whatever comes first ends the wait.
        if not self._reader.listen(self._native.nudge, self._fed.source):
            caught(self._taken, self._native.take, None)
            self._reader.hush()
        return False

    def _take_out(self, taken: int) -> bool:
        item, out = self._taken[0], self._out
        if item is None or item is out.item:
            return False
        kind, handle = item
        batch = pa.record_batch(handle)
        if kind != "beside":
            self._out = _Out(taken, (batch,), item, out.rows + batch.num_rows, out.late, out.error)
            self._count()
            return True
        assert self._session is not None
        beside = self._session._beside
        late = beside.late_rows(batch)
        if self._told is not item:
            if self._telling is item:
                what = "late rows" if any(late) else "rows of side outputs"
                raise Interrupted(
                    f"this run was interrupted while {beside!r:.80} took {batch.num_rows} {what}, and may have taken"
                    " them or not; run again"
                )
            self._telling, self._left = item, time.monotonic()
            beside(batch)
            self._told = item
            self._back()
        before = out.late or (0,) * len(late)
        late = tuple(map(add, before, late))
        self._out = out._replace(item=item, late=late, serial=-1, batches=())
        return False

    def _feed(self) -> bool:
        """Push the next batch, or the end, if it is there; whether there is more to do at once."""
        reader, fed = self._reader, self._fed
        if self._next and self._next[0] is fed.last:
            self._next.clear()
        if not self._next:
            ended = reader.ended
            if self._failed is None:
                self._failed = reader.failed(fed.source)
            if self._failed is not None:
                return self._wind_up(*self._failed)
            items = reader.next(fed.source)
            if items is not None:
                caught(self._next, items.popleft)
            elif ended:
                if self._finished and not self._finished[0]:
                    self._finished.clear()
                self._note_epochs()
                caught(self._finished, self._native.finish)
                return True
            else:
                reader.allow(fed.taken)
                return False
        item = self._next[0]
        if len(fed.taken) > 1:
            # The others go on reading while the workers are not ready for it: they are not silent.
            reader.allow(fed.taken)
        if item.pieces is None:
            self._native.end_source(item.source)  # twice does no harm
            self._fed = fed.behind(item)
            return True
        if self._pushed[0] is not item:
            self._pushed = (item, [])
        pushed = self._pushed[1]
        if not pushed:
            caught(pushed, self._native.push, item.pieces, None, item.source, reader.at_hand, self._away_ms())
        if not pushed[0]:
            pushed.clear()  # the workers wait until outputs are taken
            return True
        self._fed = fed.behind(item)
        return True

    def _wind_up(self, source: int, error: BaseException) -> bool:
        """Behind an error of a source: raise it once all that was pushed is done and taken; until then as `_feed`.

        The workers tell nobody that they rest. So epochs without rows are pushed, at the processing time of the last:
        when as many went in as may be under way, all before them are done, and what came of those can be taken.
        """
        if not isinstance(error, Exception) or not self._fed.rows or sum(self._marks) == AHEAD:
            raise error
        self._note_epochs()
        nothing = pa.RecordBatch.from_pylist([], self._schemas[source])
        caught(self._marks, self._native.push, nothing, 0, source, None, self._away_ms())
        return True

    def _note_epochs(self) -> None:
        """Before epochs that are of no batch."""
        assert self._session is not None
        if self._session._fed is None:
            self._session._fed = int(self._native.next_epoch)

    def _away_ms(self) -> int:
        return int(1_000 * self._away_s)

    def session(self, also_ended: bool = False) -> Session:
        """The session, started if need be.

        Raises
        ------
        EngineError
            When it has ended, unless that is wanted, too, and it began.
        """
        if self._session is not None and also_ended:
            return self._session
        if self._quit or self._over:
            raise EngineError("the run has ended; start another with flow.run()")
        return self._opening.wait()

    def quit(self) -> None:
        """Nothing more comes."""
        self._quit = True

    def stop(self) -> None:
        """End the run; nothing more comes."""
        self._quit = True
        if in_a_run():
            with contextlib.suppress(TimeoutError):
                self._shut(0.0)
        else:
            self._shut()

    def _shut(self, limit_s: float | None = None) -> None:
        if (closing := self._begin_to_shut()) is not None:
            closing.wait(limit_s)

    def _begin_to_shut(self) -> Aside[None] | None:
        if os.getpid() != self._pid:
            return None
        if self._closing is None:
            self._closing = Aside(self.close)
        self._closing.start()
        return self._closing

    def close(self) -> None:
        """End the run, in this thread."""
        self._quit = self._quit or not self._over
        session = self._session
        if session is None and self._opening.begun:
            with contextlib.suppress(BaseException):  # who waits for it hears of it
                session = self._opening.wait()
        if session is not None:
            session.close()
        self._reader.close()
        at_end, self._at_end = self._at_end, None
        if at_end is not None:
            at_end()

    def __del__(self) -> None:
        if not hasattr(self, "_closing") or os.getpid() != self._pid or (self._closing and self._closing.ended):
            return
        if in_a_run():
            # A function of it in which garbage was collected: it would wait for itself.
            with contextlib.suppress(KeyboardInterrupt, TimeoutError):
                self._shut(0.0)
            return
        _behind = dropped(self._begin_to_shut, self._shut)  # held until this has returned

    def end(self, limit_s: float) -> None:
        """End the run; who is in a function of the user's for longer is left there."""
        self._quit = True
        self._shut(limit_s)


#: Runs of this process, which end before the interpreter does: its threads die where they stand then.
_open: weakref.WeakSet[Pump] = weakref.WeakSet()
#: How long functions of the user's may take for that.
_EXIT_S = 5.0


def _end_all() -> None:
    for pump in list(_open):
        with contextlib.suppress(Exception):
            pump.end(_EXIT_S)
