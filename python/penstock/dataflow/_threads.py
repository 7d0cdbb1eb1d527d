"""The workers of one process: a thread each, or the calling thread.

Invariants: control comes back to the caller only when every worker has ended, on success, on an error and on Ctrl-C;
the error that the caller sees is the first cause, never what the other workers saw of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from penstock._coroutines import require_done, require_plain
from penstock.dataflow._worker import Worker
from penstock.errors import ClosedError, ConfigError, PenstockError, ProgramError, WorkerLost, WorkerStopped

if TYPE_CHECKING:
    from penstock._mesh import Seats

__all__ = ["Failure", "collect_outcomes", "first_cause", "require_program", "run_here", "run_workers", "seated"]

R = TypeVar("R")

#: Seconds that a stopped worker has to notice it in a step or a park, before its thread gets an exception.
_GRACE = 0.5
#: Seconds after which a thread that sits in foreign code is left behind; it is a daemon and cannot send any more.
_PATIENCE = 3.0
#: Seconds between two looks at pending signals.
_TICK = 0.05


class Failure:
    """How the program of a worker failed."""

    def __init__(self, worker: int | None, process: int, error: BaseException) -> None:
        #: None for a process as a whole whose workers are not known.
        self.worker = worker
        self.process = process
        self.error = error

    @property
    def rank(self) -> int:
        """0 for a first cause, more for what others saw of one."""
        return 2 if isinstance(self.error, WorkerStopped) else 1 if isinstance(self.error, WorkerLost) else 0

    def exception(self) -> PenstockError:
        """What the caller gets: penstock's errors as they are, others as the cause of a `ProgramError`."""
        error = self.error
        if isinstance(error, PenstockError):
            error.__dict__.setdefault("worker", self.worker)
            return error
        name = type(error).__qualname__
        text = str(error)
        whose = f"process {self.process}" if self.worker is None else f"worker {self.worker}"
        message = f"the program of {whose} raised {name}" + (f": {text}" if text else "")
        made = ProgramError(message, worker=self.worker, process=self.process)
        made.__cause__ = error
        return made


def run_workers(seats: Seats, program: Callable[[Worker], R], join: int = 0) -> list[R]:
    """Run a program on the workers of this process, a thread each; results in their order.

    Up to `join` more may join while it runs, on seats that were made for that.

    For hosts that connect processes themselves; `execute` does it all.

    Raises
    ------
    ConfigError
        For a program whose result nobody would await.
    ProgramError, UserFunctionError, GraphError, WorkerLost, WorkerStopped
        As `execute`; the last one when the first cause is in another process.

    Examples
    --------
    >>> from penstock import _mesh
    >>> with _mesh.alone(2) as seats:
    ...     run_workers(seats, lambda worker: worker.index)
    [0, 1]
    """
    require_program(program)
    return settle(list(collect_outcomes(seats, program, join).values()))


def run_here(seats: Seats, program: Callable[[Worker], R]) -> R:
    """Run a program on the only worker of this process, in the calling thread.

    Raises
    ------
    ConfigError
        When the seats are for several threads; for a program whose result nobody would await.
    ProgramError, UserFunctionError, GraphError, WorkerLost, WorkerStopped
        As `run_workers`.

    Examples
    --------
    >>> from penstock import _mesh
    >>> with _mesh.alone(1) as seats:
    ...     run_here(seats, lambda worker: worker.peers)
    1
    """
    require_program(program)
    if seats.threads != 1:
        raise ConfigError(f"the calling thread is one worker, the seats are for {seats.threads}")
    try:
        return _drive(seats, 0, program, main=threading.current_thread() is threading.main_thread())
    except Exception as error:
        made = Failure(seats.process, seats.process, error).exception()
        raise made from (made.__cause__ if made is error else error)


def require_program(program: Callable[..., Any]) -> None:
    """Refuse a program that gives coroutines.

    Raises
    ------
    ConfigError
        For a coroutine function; what returns a coroutine all the same is found when it has.
    """
    require_plain(program, "the program", takes="worker")


def settle(outcomes: list[R | Failure]) -> list[R]:
    """The results, or the first cause raised."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if failures:
        raise first_cause(failures)
    return [outcome for outcome in outcomes if not isinstance(outcome, Failure)]


def first_cause(failures: list[Failure]) -> PenstockError:
    """The error that made the others fail."""
    return min(failures, key=lambda failure: failure.rank).exception()


class _Door:
    """Counts who may still join, and has the thread that waits for the workers start them."""

    def __init__(self, join: int, events: queue.SimpleQueue[int]) -> None:
        self._join = join
        self._asked = 0
        self._events = events
        self._lock = threading.Lock()

    def ask(self, count: int) -> None:
        with self._lock:
            if self._asked + count > self._join:
                left = self._join - self._asked
                raise ConfigError(f"{count} more workers may not join: execute(..., join={self._join}) leaves {left}")
            self._asked += count
        self._events.put(count)


def collect_outcomes(
    seats: Seats,
    program: Callable[[Worker], R],
    join: int = 0,
    *,
    ask: Callable[[int], None] | None = None,
    joining: int = 0,
) -> dict[int, R | Failure]:
    """What the program did on each worker of this process, by index. Ctrl-C stops them all, then it is raised here.

    Parameters
    ----------
    join : int
        So many threads more may come.
    ask : callable, optional
        Lets so many workers join, in place of threads of this process.
    joining : int
        So many workers of this process join a run that has begun.
    """
    outcomes: dict[int, Any] = {}
    #: 0: a worker has ended; more: so many are to join.
    events: queue.SimpleQueue[int] = queue.SimpleQueue()
    first = seats.process * seats.threads
    if ask is None and join:
        ask = _Door(join, events).ask
    # Ctrl-C may end `start()` after the thread has begun: the threads say who runs, and after the end none begins.
    entry = threading.Lock()
    begun: dict[int, threading.Thread] = {}
    over = False

    def work(seat: int, index: int, *, late: bool = False) -> None:
        entered: list[Worker] = []
        with entry:
            if over:
                return
            begun[index] = threading.current_thread()

        def run(worker: Worker) -> R:
            entered.append(worker)
            worker._admit = ask
            return program(worker)

        try:
            outcomes[index] = _drive(seats, seat, run, main=False)
        except BaseException as error:
            # Who comes when all is finished has nothing to tell.
            if not (late and isinstance(error, ClosedError) and entered and not entered[0]._joined):
                outcomes[index] = Failure(index, seats.process, error)
                if late:
                    # Others may wait for it to take part.
                    seats.stop(f"worker {index}, which was to join, has failed: {error}")

    def found(seat: int) -> None:
        try:
            work(seat, first + seat)
        finally:
            events.put(0)

    def follow() -> None:
        try:
            # The failure of a run is that of a worker.
            with contextlib.suppress(WorkerStopped, PenstockError):
                place = seats.admit()
                if place is not None:
                    work(*place, late=True)
        finally:
            events.put(0)

    def thread(target: Callable[..., None], *args: int) -> threading.Thread:
        name = f"penstock-worker-{first + len(threads)}"
        return threading.Thread(target=target, args=args, name=name, daemon=True)

    threads: list[threading.Thread] = []
    try:
        for seat in range(seats.threads):
            threads.append(thread(found, seat))
            threads[-1].start()
        running = len(threads)
        for _ in range(joining):
            threads.append(thread(follow))
            threads[-1].start()
            running += 1
        while running:
            try:
                # A signal that comes just before the wait does not end it: handlers get their turn now and then.
                count = events.get(timeout=_TICK)
            except queue.Empty:
                continue
            running += count if count else -1
            for _ in range(count):
                threads.append(thread(follow))
                threads[-1].start()
    except BaseException:
        seats.stop("interrupted")
        with entry:
            over = True
        _leave(seats, begun)
        raise
    for ended in threads:
        ended.join()
    return {index: outcomes[index] for index in sorted(outcomes)}


@contextlib.contextmanager
def seated(seats: Seats, thread: int = 0, *, main: bool | None = None) -> Iterator[Worker]:
    """Make the calling thread the worker on a seat; at the end its dataflows are run to theirs.

    For hosts whose program is no function, such as a generator. An exception stops all workers of the run, and is
    raised as it is.

    Examples
    --------
    >>> from penstock import _mesh
    >>> with _mesh.alone(1) as seats, seated(seats) as worker:
    ...     worker.peers
    1
    """
    if main is None:
        main = threading.current_thread() is threading.main_thread()
    native = seats._native.worker(thread, main)
    try:
        try:
            yield Worker(native)
            native.finish()
        except BaseException as error:
            native.abort(error)
            raise
    finally:
        native.close()


def _drive(seats: Seats, thread: int, program: Callable[[Worker], R], *, main: bool) -> R:
    with seated(seats, thread, main=main) as worker:
        made = program(worker)
        require_done(made, "the program", kept=True)
        return made


def _leave(seats: Seats, begun: dict[int, threading.Thread]) -> None:
    """Wait for stopped workers; wake those in Python code by an exception, leave those in foreign code.

    A program that was told unwinds by itself: a second exception would cut its ``finally`` short.
    """
    asked = False
    begin = time.monotonic()
    while any(thread.is_alive() for thread in begun.values()):
        passed = time.monotonic() - begin
        if passed > _PATIENCE:
            return
        if passed > _GRACE and not asked:
            asked = True
            for index, thread in begun.items():
                if thread.is_alive() and thread.ident is not None and not seats.heard(index):
                    ident = ctypes.c_ulong(thread.ident)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(WorkerStopped))
        for thread in begun.values():
            thread.join(0.02)
