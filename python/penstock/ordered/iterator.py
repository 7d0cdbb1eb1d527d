"""The iterator that `ordered_map` and `Pipeline.run` return, and the loop behind it.

The loop runs in the thread that takes results. At the end of each chunk of results it decides: read more input, take a
finished chunk, or wait. So the input is consumed in the caller's thread, lazily, and never further ahead than the
bounds allow; without anybody who takes results nothing moves but what was handed out.

Invariants: results leave in the order of the input; what was read and not yet given out is at most `in_flight` items;
a change of mode happens only when nothing is under way; after `close` no thread or process of the run is left.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ForkError, NotPicklable, OrderedError
from penstock.ordered.chunk import Chunk, Outcomes, Raised, estimate_bytes
from penstock.ordered.operators import Operator, compile_steps, finishes, serial
from penstock.ordered.policy import Chooser, Sizer
from penstock.ordered.steps import Step

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Driver", "Options", "OrderedIterator", "Stats"]


@dataclass(frozen=True)
class Options:
    """What a run was asked for, checked."""

    workers: int
    in_flight: int | None
    in_flight_bytes: int
    mode: str
    chunk: int | None
    timeout: float | None
    scheduler: str = "adaptive"
    queue: str = "hybrid"


@dataclass(frozen=True)
class Stats:
    """What a run has done so far.

    Attributes
    ----------
    mode : str
        Where functions run now: "inline", "threads" or "processes".
    why : str
        Why there.
    items_in, values_out : int
        Items read from the input; results and errors given out by finished chunks.
    chunks, errors : int
        Chunks finished; exceptions among the results.
    workers : int
        How many work in the present mode; 1 inline.
    chunk_items : int
        Items of the chunk read last.
    in_flight : int
        Items read whose results have not been given out.
    rates : dict of str to float
        Items per second by mode, where "auto" has measured.
    steps : tuple of dict
        Per operator its name, and what the runtime counts: queues, items, time, workers, selectivity.
    """

    mode: str
    why: str
    items_in: int = 0
    values_out: int = 0
    chunks: int = 0
    errors: int = 0
    workers: int = 1
    chunk_items: int = 0
    in_flight: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    steps: tuple[dict[str, Any], ...] = ()


class Engine(Protocol):
    """Who works on chunks beside the caller's thread."""

    def push(self, chunk: Chunk, size: int) -> bool:
        """Hand a chunk of about `size` bytes over; False when there is no room."""

    def pull(self, wait: bool) -> Chunk | None:
        """The next finished chunk; None when there is none yet. With `wait`, only a signal ends the wait early."""

    def stats(self) -> tuple[dict[str, Any], ...]:
        """Counts per operator."""

    def close(self, limit: float | None = None) -> None:
        """End all work, whatever is under way, in about `limit` seconds."""


#: Seconds that functions under way have when the interpreter ends.
_AT_EXIT = 2.0

#: Runs with threads or processes, to be ended before the interpreter is.
_open: weakref.WeakSet[Driver] = weakref.WeakSet()


def _close_all() -> None:
    for driver in list(_open):
        driver.close(_AT_EXIT)


class Driver:
    """The loop of one run: an iterator over iterables of results. It does not raise: what it gives may."""

    def __init__(self, xs: Iterable[Any], steps: tuple[Step, ...], options: Options) -> None:
        self.steps, self.options = steps, options
        self._input: Iterator[Any] | None = iter(xs)
        self._operators: list[Operator] = compile_steps(steps)
        self._finishes = finishes(self._operators)
        workers = options.workers
        self._sizer = Sizer(options.chunk, options.in_flight, workers, options.in_flight_bytes)
        self._window = options.in_flight if options.in_flight is not None else 1 << 62
        self._auto = options.mode == "auto"
        try:
            left = len(xs)  # type: ignore[arg-type]
        except TypeError:
            left = None
        self._chooser = Chooser(workers, left=left)
        self._mode = "inline" if self._auto else options.mode
        self._why = "asked for"
        if self._auto and options.timeout is not None:
            self._auto, self._mode = False, "processes"
            self._why = "with timeout=, since only a process can be ended"
        self._engine: Engine | None = None
        self._pool: Any = None
        self._pid = os.getpid()
        self._busy = self._ended = self._exhausted = self._waiting = False
        self._error: BaseException | None = None
        self._number = self._item = 0
        self._chunks_out = self._items_out = self._values_out = self._errors = self._last = 0
        self._bytes = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        #: The results that are being given out: `close` takes back what is left of them.
        self._given: list[Any] = []

    def __iter__(self) -> Iterator[Iterable[Any]]:
        return self

    def __next__(self) -> Iterable[Any]:
        if self._busy:
            return Raised(OrderedError("this iterator is being used: by another thread, or by its own function"))
        self._busy = True
        try:
            return self._outputs()
        except StopIteration:
            raise
        except BaseException as error:
            # Ctrl-C while waiting leaves the run as it is. In the middle of the user's code what it was doing is lost.
            if not isinstance(error, ForkError) and not (self._waiting and isinstance(error, KeyboardInterrupt)):
                self.close()
            return Raised(error)
        finally:
            self._busy = self._waiting = False

    # The loop

    def _outputs(self) -> Iterable[Any]:
        if os.getpid() != self._pid:
            self._forked()
        while not self._ended:
            chunk = self._advance()
            if chunk is None:
                error, self._error = self._error, None
                self.close()
                if error is not None:
                    raise error
                break
            self._count(chunk)
            if chunk.values:
                self._given = chunk.values
                return Outcomes(chunk.values) if chunk.failed else chunk.values
        raise StopIteration

    def _advance(self) -> Chunk | None:
        """The next finished chunk; None at the end."""
        while True:
            under_way = self._number - self._chunks_out
            wanted = self._chooser.mode if self._auto else self._mode
            if under_way == 0 and (wanted != self._mode or (self._engine is None and wanted != "inline")):
                self._switch(wanted)
                wanted = self._mode
            if self._engine is None:
                chunk = self._read()
                if chunk is not None:
                    started = time.perf_counter()
                    serial(self._operators, chunk)
                    chunk.spent = time.perf_counter() - started
                return chunk
            engine = self._engine
            changing = wanted != self._mode
            if under_way and (changing or under_way >= 2 * self.options.workers):
                done = engine.pull(False)
                if done is not None:
                    return done
            if not changing and self._room():
                chunk = self._read()
                if chunk is not None:
                    if not engine.push(chunk, self._sizes[chunk.number][1]):
                        raise OrderedError("the runtime refused a chunk within its bounds")
                    continue
                under_way = self._number - self._chunks_out
            if not under_way:
                return None
            self._waiting = True
            done = engine.pull(True)
            self._waiting = False
            if done is not None:
                return done

    def _room(self) -> bool:
        if self._exhausted or self._number - self._chunks_out >= 4 * self.options.workers:
            return False
        ahead = self._item - self._items_out
        return ahead == 0 or (ahead + self._sizer.items(self._mode) <= self._window and self._bytes < self._most())

    def _most(self) -> int:
        return self.options.in_flight_bytes

    def _read(self) -> Chunk | None:
        """The next chunk of the input; None when there is nothing more to do."""
        if self._exhausted:
            return None
        assert self._input is not None
        wanted = self._sizer.items(self._mode)
        values: list[Any] = []
        try:
            values.extend(itertools.islice(self._input, wanted))
            self._exhausted = len(values) < wanted
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # What came before it goes first. Nothing is finished: the input never ended.
            self._exhausted, self._error = True, error
        final = self._exhausted and self._error is None and self._finishes
        if self._exhausted:
            self._input = None
        if not values and not final:
            return None
        chunk = Chunk(self._number, self._item, values, final)
        size = estimate_bytes(values) if self._engine is not None else estimate_bytes(values[:1]) * len(values)
        self._sizes[self._number] = (len(values), size)
        self._number += 1
        self._item += len(values)
        self._bytes += size
        self._last = len(values)
        self._sizer.read(len(values), size)
        return chunk

    def _count(self, chunk: Chunk) -> None:
        items, size = self._sizes.pop(chunk.number)
        self._chunks_out += 1
        self._items_out += items
        self._bytes -= size
        self._values_out += len(chunk.values)
        self._errors += chunk.failed
        self._sizer.saw(self._mode, items, chunk.spent)
        if self._auto and items:
            cost = self._sizer.cost(self._mode) or 0.0
            # What was under way when the mode changed says nothing about the next one.
            counts = self._chooser.mode == self._mode
            self._chooser.delivered(time.perf_counter(), items, chunk.spent, cost, counts)
            if self._chooser.wants_processes:
                self._prepare(chunk)
            elif self._pool is not None and self._mode != "processes":
                pool, self._pool = self._pool, None
                pool.close()

    # Modes

    def _prepare(self, chunk: Chunk) -> None:
        """Start worker processes in the background, or see whether they are up."""
        if self._pool is None:
            self._pool, why = _start_pool(self, chunk)
            if self._pool is None:
                self._chooser.no_processes(why)
                return
        if self._mode == "processes" or self._chooser.mode == "processes":
            return
        try:
            if self._pool.ready():
                self._chooser.processes_ready()
        except OrderedError as error:
            pool, self._pool = self._pool, None
            pool.close()
            self._chooser.no_processes(f"processes cannot be used: {error}")

    def _switch(self, mode: str) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()
        self._mode = mode
        if mode == "inline":
            return
        from penstock.ordered.parallel import Parallel

        if not _open:
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _open.add(self)
        if mode == "processes" and self._pool is None:
            from penstock.ordered.processes import Pool

            try:
                self._pool = Pool(self.steps, self.options.workers)
            except NotPicklable:
                if self.options.mode != "auto":
                    raise
                self._mode = "threads"
                self._why = "the functions do not pickle, so they cannot go to processes"
        pool = self._pool if self._mode == "processes" else None
        self._engine = Parallel(self._operators, self.options, pool)

    def _forked(self) -> None:
        if self._engine is None and self._pool is None:
            self._pid = os.getpid()  # nothing that a fork leaves behind
            return
        raise ForkError(
            f"this iterator was started in process {self._pid} and is used in its forked child {os.getpid()}, where its"
            " threads do not exist: make a new one there",
            owner=self._pid,
            here=os.getpid(),
        )

    def stop(self) -> None:
        """End the run, and what was about to be given out with it."""
        given = self._given
        self.close()
        given.clear()

    def close(self, limit: float | None = None) -> None:
        """End the run; what has not been given out is dropped. Functions under way in threads end, or have `limit`."""
        self._ended = self._exhausted = True
        self._input = None
        self._given = []
        pool, self._pool = self._pool, None
        engine, self._engine = self._engine, None
        if os.getpid() != self._pid:
            return
        try:
            if pool is not None:
                pool.close()
        finally:
            if engine is not None:
                engine.close(limit)
            for operator in self._operators:
                if hasattr(operator, "close"):
                    operator.close()
            _open.discard(self)

    def __del__(self) -> None:
        if hasattr(self, "_operators"):
            self.close()

    def stats(self) -> Stats:
        """See `Stats`."""
        engine = self._engine
        names: tuple[dict[str, Any], ...] = tuple({"name": operator.name} for operator in self._operators)
        return Stats(
            mode=self._mode,
            why=self._chooser.why if self._auto else self._why,
            items_in=self._item,
            values_out=self._values_out,
            chunks=self._chunks_out,
            errors=self._errors,
            workers=1 if self._mode == "inline" else self.options.workers,
            chunk_items=self._last,
            in_flight=self._item - self._items_out,
            rates=dict(self._chooser.rates),
            steps=names if engine is None else engine.stats(),
        )


def _start_pool(driver: Driver, chunk: Chunk) -> tuple[Any, str]:
    """Worker processes for a run in mode "auto", or why there can be none."""
    from penstock.ordered.processes import Pool
    from penstock.ordered.wire import dumps

    if chunk.failed:
        return None, "a result is an exception"
    try:
        import pickle

        pickle.loads(dumps(chunk.values[:16]))
        return Pool(driver.steps, driver.options.workers), ""
    except Exception as error:
        return None, f"processes cannot be used: {error}"


class OrderedIterator:
    """Results in the order of the input. Made by `ordered_map` and `Pipeline.run`.

    An iterator and a context manager. An exception of a function is raised where its result would have come; the next
    call goes on with the item behind it. Close it (or leave the ``with``) to stop early.

    Examples
    --------
    >>> import penstock as pk
    >>> with pk.ordered_map(abs, [-1, 2, -3]) as results:
    ...     next(results)
    1
    """

    # A loop takes results from a C iterator over the lists that the driver gives, and so does `next` of this object: a
    # method in Python would cost each item twice as much as the loop around it.
    if TYPE_CHECKING:

        def __next__(self) -> Any: ...

    else:
        __slots__ = ("__next__", "__weakref__", "_driver", "_results")

    _driver: Driver
    _results: Iterator[Any]

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._results = itertools.chain.from_iterable(driver)
        self.__next__ = self._results.__next__  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[Any]:
        return self._results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the run: its threads and processes end, no further input is read, no further result comes.

        Examples
        --------
        >>> import itertools, penstock as pk
        >>> results = pk.ordered_map(abs, itertools.count())
        >>> results.close()
        >>> list(results)
        []
        """
        self._driver.stop()

    @property
    def stats(self) -> Stats:
        """What the run has done so far, and how it does it.

        Examples
        --------
        >>> import penstock as pk
        >>> results = pk.ordered_map(abs, range(3), mode="inline")
        >>> list(results), results.stats.items_in, results.stats.mode
        ([0, 1, 2], 3, 'inline')
        """
        return self._driver.stats()

    def __reduce__(self) -> Any:
        raise TypeError("a running ordered iterator cannot be pickled: ship the function or the Pipeline")

    def __repr__(self) -> str:
        stats = self.stats
        return f"<ordered iterator: {stats.mode}, {stats.items_in} items read, {stats.in_flight} in flight>"
