"""The loop of one run: what is read, handed out to workers and given to the caller.

It runs in the thread that takes results, as `fill` of their iterator. Each turn it decides: read more input, hand a
chunk over, take a finished one, or wait. So nothing is read further ahead than the bounds allow, and without anybody
who takes results nothing moves but what was handed out.

An interrupt may land between any two instructions here, and whoever goes on gets every result once, in order. So the
state is two tuples, each changed by one store: `_desk`, what was read, and `_out`, what was given. Between the two a
chunk is in a box (see `_resume.caught`) or with the workers. What an interrupt can break, and what then is done:

- a chunk of steps without state in the caller's thread is worked on again, from its first item;
- one of steps with state is not known to be done or not: `Interrupted`, from then on;
- an input that is read here, in its own work, is not the same any more: what it gave before, then `Interrupted`;
- measurements begin anew; starting and ending workers is left to a thread, and waited for again.

Invariants: results leave in the order of the input; what was read and not yet given out is at most `in_flight` items; a
change of mode happens only when nothing is under way; after `close` no thread or process of the run is left but that of
an input that is silent.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import os
import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

from penstock._resume import Aside, caught, dropped, in_a_run
from penstock.errors import EngineError, ForkError, Interrupted, NotPicklable, OrderedError, PenstockError
from penstock.ordered._chunk import Chunk, Failure, estimate_bytes
from penstock.ordered._operators import Operator, Stateless, compile_steps, finishes, serial
from penstock.ordered._options import OperatorStats, Options, Stats
from penstock.ordered._policy import Chooser, Sizer
from penstock.ordered._pools import Starting
from penstock.ordered._source import open_source
from penstock.ordered._steps import Step

__all__ = ["Driver"]


class Engine(Protocol):
    """Who works on chunks beside the caller's thread. `push`, `nudge` and what `pull` calls are native."""

    push: Any
    nudge: Any

    def pull(self, box: list[Any], wait: bool) -> None:
        """Put the next finished chunk into the box, or None; with `wait`, a nudge or a limit may end the wait."""

    def stats(self) -> list[dict[str, Any]]:
        """Counts per operator."""

    def close(self, limit: float | None = None) -> None:
        """End all work, whatever is under way, in about `limit` seconds."""


class _Mark(NamedTuple):
    """How far a run is, from its start."""

    chunks: int = 0
    items: int = 0
    bytes: int = 0


class _Desk(NamedTuple):
    """What was read.

    `mark` is behind the chunk that is on its way, if there is one; `pushed`, `tried` and `done` are boxes of its own:
    that it was handed over, that work on it began, and what became of it. `buffer` is for the next one. `over`: there
    is none. `last`: items of the one read last.
    """

    mark: _Mark
    chunk: Chunk | None
    size: int
    pushed: list[bool]
    tried: list[bool]
    done: list[Chunk]
    buffer: list[Any]
    over: bool
    last: int


class _Out(NamedTuple):
    """What was given: the values given last as number `serial`, and all of them counted; what was raised at the end."""

    serial: int
    values: list[Any]
    mark: _Mark
    given: int
    errors: int
    ended_by: BaseException | None = None


#: How often a chunk is tried here before what is raised beside its functions is taken for the run's own.
_TRIES = 3
#: Seconds that functions under way have when the interpreter ends.
_AT_EXIT = 2.0

#: Runs with threads or processes, to be ended before the interpreter is.
_open: weakref.WeakSet[Driver] = weakref.WeakSet()


def _close_all() -> None:
    for driver in list(_open):
        with contextlib.suppress(Exception):
            driver.close(_AT_EXIT)


def _let_go(values: list[Any]) -> None:
    """Have errors of items hold no other item and no result: the frames that called the function, ours, which have
    returned, are behind it in its traceback."""
    seen: set[int] = set()
    for value in values:
        traceback = value.error.__traceback__ if value.__class__ is Failure else None
        frame = None if traceback is None else traceback.tb_frame
        while frame is not None and id(frame) not in seen and frame.f_globals.get("__package__") == __package__:
            seen.add(id(frame))
            behind = frame.f_back
            with contextlib.suppress(RuntimeError):  # it has not: it gives them
                frame.clear()
            frame = behind


class Driver:
    """The loop of one run. See the module."""

    def __init__(self, xs: Iterable[Any], steps: tuple[Step, ...], options: Options) -> None:
        self.steps, self.options = steps, options
        self._source = open_source(xs, options.reads, options.in_flight_bytes // (4 * options.workers))
        self._operators: list[Operator] = compile_steps(steps)
        self._finishes = finishes(self._operators)
        self._repeats = all(isinstance(operator, Stateless) for operator in self._operators)
        try:
            left = len(xs)  # type: ignore[arg-type]
        except Exception:  # what has no length says so in any way, or says it wrongly: it is an estimate
            left = None
        self._left: int | None = left
        self._window = options.in_flight if options.in_flight is not None else 1 << 62
        self._auto = options.mode == "auto"
        #: Why nothing goes to worker processes any more, where nobody asked for them.
        self._stays = ""
        self._measure()
        self._mode = "inline" if self._auto else options.mode
        self._why = "asked for"
        if self._auto and options.timeout is not None:
            self._auto, self._mode = False, "processes"
            self._why = "with timeout=, since only a process can be ended"
        self._engine: Engine | None = None
        self._pool: Any = None
        self._starting: Starting | None = None
        self._pid = os.getpid()
        self._desk = _Desk(_Mark(), None, 0, [], [], [], [], False, 0)
        self._out = _Out(-1, [], _Mark(), 0, 0)
        #: Finished chunks on their way from the workers: one at most, or None for none.
        self._pulled: list[Chunk | None] = []
        #: What broke the run; whether there is nothing more to give, and whether the user wants nothing more.
        self._error: BaseException | None = None
        self._over = self._quit = self._closed = False
        #: What a thread does for the loop.
        self._aside: Aside[None] | None = None
        self._closing: Aside[None] | None = None

    def _measure(self) -> None:
        """Begin to measure."""
        options = self.options
        workers = options.workers
        self._sizer = Sizer(options.chunk, options.in_flight, workers, options.in_flight_bytes)
        self._chooser = Chooser(workers, processes=not self._stays, left=self._left)
        self._measuring = False

    # The loop

    def fill(self, taken: int) -> list[Any] | None:
        """The next results; see `_native.Handover`. An error among them that is not an item's is the last."""
        if os.getpid() != self._pid:
            self._forked()
        out = self._out
        if out.serial == taken and out.values and not self._quit:
            return out.values  # they got lost on their way
        while not (self._over or self._quit):
            if self._measuring:
                self._measure()
            chunk = self._advance()
            if chunk is None:
                self._over = True
                break
            if self._quit:
                break  # by a function of this chunk, or by another thread: what was made is not given any more
            out = self._give(chunk, taken)
            self._learn(chunk)
            chunk.values = []
            if out.values:
                if chunk.failed:
                    del chunk, out  # this frame, too, is behind a function that was called here
                    _let_go(self._out.values)
                return self._out.values
        self._shut()
        error = self._error or self._source.error
        told = error is self._out.ended_by and not isinstance(error, Interrupted)  # which is told from then on
        if self._quit or error is None or told:
            return None
        self._out = self._out._replace(serial=taken, values=[Failure(error)], ended_by=error)
        return self._out.values

    def _advance(self) -> Chunk | None:
        """The next finished chunk; None at the end."""
        while True:
            if self._aside is not None:
                self._await()
            if self._error is not None or self._quit or self._over:
                return None
            desk, out = self._desk, self._out
            if self._pulled:
                chunk = self._pulled[0]
                if chunk is not None and chunk.number == out.mark.chunks:
                    return chunk
                self._pulled.clear()
                continue
            if desk.chunk is not None and desk.chunk.number < out.mark.chunks:
                desk = self._desk = desk._replace(chunk=None)  # worked on here, and given
            under_way = desk.mark.chunks - out.mark.chunks
            wanted = self._chooser.mode if self._auto else self._mode
            if under_way == 0 and (wanted != self._mode or (self._engine is None and wanted != "inline")):
                self._aside = Aside(lambda mode=wanted: self._switch(mode))  # type: ignore[misc]
                continue
            engine = self._engine
            if engine is None:
                if desk.chunk is None and not self._cut(True):
                    return None
                self._work()
                if self._desk.done:
                    return self._desk.done[0]
                continue
            if desk.chunk is not None:
                self._push(engine)
                continue
            self._bring(engine, wanted != self._mode, under_way)
            if self._desk.over and under_way == 0 and not self._pulled and self._desk.chunk is None:
                return None

    def _bring(self, engine: Engine, changing: bool, under_way: int) -> None:
        """Cut a chunk, take a finished one, or wait until something can be done."""
        source = self._source
        if under_way and (changing or source.slow or under_way >= 2 * self.options.workers):
            self._pull(engine, False)
            if self._error is not None or (self._pulled and self._pulled[0] is not None):
                return
            self._pulled.clear()
        room = not changing and self._room()
        if room and self._cut(False):
            return
        room = room and not self._desk.over
        if under_way == 0:
            if room:
                source.wait()
            return
        if room and source.listen(engine.nudge):
            return
        self._pull(engine, True)
        source.hush()

    def _room(self) -> bool:
        desk, out = self._desk, self._out
        most = self.options.workers * (1 if self._auto and self._chooser.dear else 4)
        if desk.over or desk.mark.chunks - out.mark.chunks >= most:
            return False
        ahead = desk.mark.items - out.mark.items
        wanted = self._sizer.items(self._mode)
        in_bytes = desk.mark.bytes - out.mark.bytes < self.options.in_flight_bytes
        return ahead == 0 or (ahead + wanted <= self._window and in_bytes)

    def _cut(self, wait: bool) -> bool:
        """Put the next chunk of the input on the desk, if it is there yet; whether it is. With `wait`, wait for it."""
        while True:
            desk, source = self._desk, self._source
            if desk.over or self._quit or self._over:
                return False
            buffer = desk.buffer
            source.fill(buffer, desk.mark.items, self._sizer.items(self._mode))
            over = source.ended
            final = over and source.error is None and self._finishes
            if buffer or final:
                break
            if over:
                self._desk = desk._replace(over=True)
                return False
            if not wait:
                return False
            source.wait()
        # What came before an error goes first. Nothing is finished by one: the input never ended.
        chunk = Chunk(desk.mark.chunks, desk.mark.items, buffer, final)
        size = chunk.size = (
            estimate_bytes(buffer) if self._engine is not None else estimate_bytes(buffer[:1]) * len(buffer)
        )
        mark = _Mark(chunk.number + 1, chunk.first + len(buffer), desk.mark.bytes + size)
        self._desk = _Desk(mark, chunk, size, [], [], [], [], over, len(buffer))
        self._sizer.read(len(buffer), size)
        return True

    def _work(self) -> None:
        """Do the chunk on the desk here and now."""
        desk = self._desk
        chunk = desk.chunk
        assert chunk is not None
        if desk.done:
            return
        if desk.tried and not self._repeats:
            items = f"items {chunk.first} to {chunk.first + chunk.count - 1}" if chunk.count else "its end"
            raise Interrupted(
                f"this run was interrupted in the middle of {items} of the input, in steps with state: what the states"
                f" have seen of them is not known, so the results from item {chunk.first} on are lost; run again, or"
                " use mode='threads', where an interrupt reaches no step"
            )
        desk.tried.append(True)
        work = Chunk(chunk.number, chunk.first, chunk.values, chunk.final)
        work.size = chunk.size
        started = time.perf_counter()
        try:
            serial(self._operators, work)
        except Exception as error:
            if not isinstance(error, PenstockError) and len(desk.tried) < _TRIES:
                raise  # of a signal handler: who goes on has it done again
            self._error = error
            return
        work.spent = time.perf_counter() - started
        desk.done.append(work)

    def _push(self, engine: Engine) -> None:
        """Hand the chunk on the desk over."""
        desk = self._desk
        if not desk.pushed:
            assert desk.chunk is not None
            desk.chunk.context = contextvars.copy_context()
            caught(desk.pushed, engine.push, desk.chunk, desk.size)
        if not desk.pushed[0]:
            desk.pushed.clear()
            if desk.mark.chunks - self._out.mark.chunks > 1:
                self._pull(engine, True)
            else:
                self._error = OrderedError("the runtime refused a chunk within its bounds")
            return
        self._desk = desk._replace(chunk=None)

    def _pull(self, engine: Engine, wait: bool) -> None:
        try:
            engine.pull(self._pulled, wait)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not isinstance(error, PenstockError) and self._goes_on(engine):
                raise  # of a signal handler: who goes on waits again
            self._error = error

    def _goes_on(self, engine: Engine) -> bool:
        """Whether the workers are there: what broke them would have ended them."""
        try:
            if not self._pulled:
                engine.pull(self._pulled, False)
        except PenstockError:
            return False
        return True

    def _give(self, chunk: Chunk, taken: int) -> _Out:
        """Note a chunk as given, as number `taken`."""
        _, _, (chunks, items, size), given, errors, _ = self._out
        mark = _Mark(chunks + 1, items + chunk.count, size + chunk.size)
        self._out = out = _Out(taken, chunk.values, mark, given + len(chunk.values), errors + chunk.failed)
        return out

    def _learn(self, chunk: Chunk) -> None:
        """Measure, and have processes started where they are wanted."""
        items = chunk.count
        self._measuring = True
        self._sizer.saw(self._mode, items, chunk.spent)
        if self._auto and items:
            if self._left is not None:
                self._left = max(0, self._left - items)
            cost = self._sizer.cost(self._mode) or 0.0
            # What was under way when the mode changed says nothing about the next one.
            counts = self._chooser.mode == self._mode
            if self._pool is not None and self._pool.stays and not self._stays:
                # Done here it takes one of the threads that feed the processes, and others may have to be, too.
                self._stays = f"not all of it can go to processes: {self._pool.stays}"
                self._chooser.no_processes(self._stays)
            self._chooser.delivered(time.perf_counter(), items, chunk.spent, cost, counts)
            if self._chooser.wants_processes:
                self._prepare(chunk)
            elif self._mode != "processes" and (self._pool is not None or self._starting is not None):
                self._aside = Aside(self._end_pool)
        self._measuring = False

    # Modes

    def _prepare(self, chunk: Chunk) -> None:
        """Start worker processes in the background, or see whether they are up."""
        if self._mode == "processes" or self._chooser.mode == "processes":
            return
        starting = self._starting
        if starting is None:
            results = [value for value in chunk.values if type(value) is not Failure]
            if chunk.failed and not results:
                return  # another chunk has some to try
            self._starting = starting = Starting(self.steps, self.options.workers, results[:16])
        starting.begin()
        if starting.why:
            self._chooser.no_processes(starting.why)
        elif starting.ready:
            self._pool = starting.pool
            self._chooser.processes_ready()

    def _await(self) -> None:
        """Wait for what a thread does."""
        aside = self._aside
        assert aside is not None
        try:
            aside.wait()
        except BaseException as error:
            if error is not aside.error:
                raise  # of a signal handler: who goes on waits again
            self._error = error
        self._aside = None

    def _end_pool(self) -> None:
        pool, starting = self._pool, self._starting
        self._pool = self._starting = None
        if starting is not None:
            starting.close()
        if pool is not None and (starting is None or pool is not starting.pool):
            pool.close()

    def _switch(self, mode: str) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()
        self._mode = mode
        if mode == "inline" or self._quit:
            return
        from penstock.ordered._parallel import Parallel

        if not _open:
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _open.add(self)
        if mode == "processes" and self._pool is None:
            from penstock.ordered._processes import Pool

            asked, why = self.options.mode != "auto", ""
            try:
                self._pool = Pool(self.steps, self.options.workers, strict=asked)
                if self._quit or self._over:
                    return
                # Where modes are tried that was asked before.
                why = "" if asked or self._auto else self._pool.differs(self.steps)
            except NotPicklable as error:
                if asked:
                    raise
                why = "the functions do not pickle, so they cannot go to processes"
                why = why if self._pool is None else f"processes cannot be used: {error}"
            if why:
                self._end_pool()
                self._mode, self._why = "threads", why
        pool = self._pool if self._mode == "processes" else None
        engine = Parallel(self._operators, self.options, pool)
        if pool is not None:
            pool.begin(self._out.mark.chunks, engine.threads)
        self._engine = engine

    def _forked(self) -> None:
        held = self._source.threads or any(operator.threads for operator in self._operators)
        if self._engine is None and self._starting is None and not held:
            self._pid = os.getpid()  # nothing that a fork leaves behind
            return
        raise ForkError(
            f"this iterator was started in process {self._pid} and is used in its forked child {os.getpid()}, where its"
            " threads do not exist: make a new one there",
            owner=self._pid,
            here=os.getpid(),
        )

    def quit(self) -> None:
        """No further result comes."""
        self._quit = True

    def stop(self) -> None:
        """End the run; no further result comes."""
        self._quit = True
        self._shut(wait=not in_a_run())

    def _shut(self, wait: bool = True) -> None:
        """Close, whoever interrupts that."""
        if self._closed or os.getpid() != self._pid:
            return
        if self._closing is None:
            if self._repeats and self._engine is None and self._starting is None and not self._source.threads:
                self.close()
                return
            self._closing = Aside(self.close)
        if wait:
            self._closing.wait()
        else:
            self._closing.start()

    def close(self, limit: float | None = None) -> None:
        """End the run, in this thread. Functions under way in threads end, or have `limit`."""
        self._over = True
        if self._closed or os.getpid() != self._pid:
            return
        if self._aside is not None and self._aside.begun:
            if (pool := self._pool) is not None:
                pool.close()  # what is begun may wait for one of its processes to come up
            with contextlib.suppress(BaseException):  # who waits for it hears of it
                self._aside.wait()
        self._source.close()
        engine, self._engine = self._engine, None
        try:
            self._end_pool()
        finally:
            if engine is not None:
                engine.close(limit)
            for operator in self._operators:
                if hasattr(operator, "close"):
                    operator.close()
            _open.discard(self)
        self._out = self._out._replace(values=[])  # errors of items may hold this
        self._closed = True

    def __del__(self) -> None:
        if hasattr(self, "_closing") and in_a_run():
            # A function of it in which garbage was collected: it would wait for itself.
            self._shut(wait=False)
            return
        if hasattr(self, "_closing") and not self._closed and os.getpid() == self._pid:
            _behind = dropped(partial(self._shut, wait=False), self._shut)  # held until this has returned

    def stats(self) -> Stats:
        """See `Stats`."""
        engine, desk, out = self._engine, self._desk, self._out
        told: list[dict[str, Any]] = [{"name": operator.name} for operator in self._operators]
        if engine is not None:
            # Who takes results has just closed it, or it is that of another process.
            with contextlib.suppress(EngineError, ForkError):
                told = engine.stats()
        return Stats(
            mode=self._mode,
            why=self._chooser.why if self._auto else self._why,
            items_in=desk.mark.items,
            values_out=out.given,
            chunks=out.mark.chunks,
            errors=out.errors,
            workers=1 if self._mode == "inline" else self.options.workers,
            chunk_items=desk.last,
            in_flight=desk.mark.items - out.mark.items,
            rates=dict(self._chooser.rates),
            steps=tuple(OperatorStats(**facts) for facts in told),
        )
