"""Going on after an interrupt: what lets an iterator lose nothing, wherever Ctrl-C lands.

Python runs signal handlers between two instructions of a function of the main thread. A generator in which that happens
is dead, and looks like one that has ended. So iterators of this package are objects whose state outlives an interrupt:
`penstock._native.Handover` hands results out, and asks an object for more by a method (``fill``) that may be broken off
anywhere and is simply called again. Such a method keeps to three rules.

- What it takes away from somebody it takes by `caught`, so that it is either still there or already kept.
- What belongs together it changes by one store of a tuple; what was left to tidy up is told by comparing.
- What is long and happens seldom (starting, closing) it leaves to an `Aside`, a thread, where no handler runs.

Where what was interrupted is not ours to repeat (a user's function with a state, a user's generator), the iterator
remembers that, and from then on raises `Interrupted`.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, starmap
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.errors import Interrupted, ThreadError

if TYPE_CHECKING:
    from penstock._native import Handover

__all__ = ["Aside", "Given", "Guarded", "Passed", "caught", "dropped", "guarded", "pause_at_end"]

T = TypeVar("T")


def caught(box: list[Any], call: Callable[..., Any], *args: Any) -> None:
    """Append what a native function returns to a list: no interrupt comes between the two."""
    box.extend(starmap(call, (args,)))


def pause_at_end() -> None:
    """For loops that wait: keeps a thread here for good once another one ends the interpreter."""
    if (native := _native()) is not None:
        native.pause_at_end()


def _is_ending() -> bool:
    native = _native()
    return sys.is_finalizing() or (native is not None and native.is_ending())


def _native() -> Any:
    """Not imported: Python imports nothing any more at its end. None where there is no run yet."""
    return (sys.modules or {}).get("penstock._native")


class Aside(Generic[T]):
    """Work in a thread of its own, which no interrupt reaches; whoever waits may be interrupted, and wait again."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._claim, self._gate = _thread.allocate_lock(), _thread.allocate_lock()
        self._gate.acquire()
        self._made: list[T] = []
        self._error: BaseException | None = None
        self.ended = False

    def start(self) -> None:
        """Begin, unless that was done."""
        if not self._claim.locked():
            if _is_ending():
                self._run()  # a new thread would not run any more, or be refused, or held up
                return
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # refused as soon as the functions of atexit are called, from Python 3.12 on
                self._run()

    @property
    def error(self) -> BaseException | None:
        """What the work raised."""
        return self._error

    @property
    def begun(self) -> bool:
        """Whether the work has begun."""
        return self._claim.locked()

    def _run(self) -> None:
        if not self._claim.acquire(False):
            return  # an interrupt hid from the one who started that it had
        try:
            assert self._work is not None
            self._made.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._work = None
            self.ended = True
            self._gate.release()

    def wait(self, limit_s: float | None = None) -> T:
        """What the work returned, or raised; `TimeoutError` where it goes on for longer than a limit."""
        self.start()
        limit = None if limit_s is None else time.monotonic() + limit_s
        while not self.ended:
            pause_at_end()
            if self._gate.acquire(timeout=0.1):
                self._gate.release()
            elif limit is not None and time.monotonic() >= limit:
                raise TimeoutError(f"it takes longer than {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return self._made[0]


class _Behind:
    """Who holds it has not returned."""

    __slots__ = ("__weakref__",)


def dropped(begin: Callable[[], object], wait: Callable[[], object]) -> _Behind:
    """For ``__del__``: begin what ends a run, and wait for it, unless there is an interrupt: then it ends by itself. At
    the end of the interpreter that was waited for.

    What is raised in ``__del__`` is printed and forgotten. So an interrupt is raised once more, as soon as nobody holds
    what this returns: a local variable of ``__del__``.
    """
    behind, heard, begun = _Behind(), False, False
    while not begun:
        try:
            begin()
            begun = True
        except KeyboardInterrupt:
            heard = True
    try:
        if not (heard or _is_ending()):
            wait()
    except KeyboardInterrupt:
        heard = True
    if heard:
        _interrupt_after(behind)
    return behind


def _interrupt_after(behind: _Behind) -> None:
    gate = _thread.allocate_lock()
    gate.acquire()
    # No code of Python runs between its end and the caller's next step: an interrupt would come to that code.
    release: Any = gate.__exit__
    end = weakref.ref(behind, release)

    def interrupt() -> None:
        if gate.acquire() and end() is None:
            # To the thread, so that what it waits for ends as well.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with contextlib.suppress(RuntimeError):  # at the end of the interpreter
        _thread.start_new_thread(interrupt, ())


def in_a_run() -> bool:
    """Whether this thread may be a run's own, in a function of the user's: who ends that run does not wait here."""
    thread = threading.current_thread()
    return isinstance(thread, threading._DummyThread) or thread.name.startswith("penstock")


class Given:
    """Fills from a native function that gives one thing after the other, then None.

    Parameters
    ----------
    take : callable
        Native: what it returns is kept whatever interrupts whom.
    make : callable
        What is handed out for it.
    """

    def __init__(self, take: Callable[[], Any], make: Callable[[Any], Any]) -> None:
        self._take, self._make = take, make
        self._box: list[Any] = []
        #: What was given as which number, and the box that it came from.
        self._out: tuple[int, list[Any], Any] = (-1, [], None)

    def fill(self, taken: int) -> list[Any] | None:
        """The next one, in a list."""
        serial, made, box = self._out
        if serial == taken:
            return made  # it got lost on its way
        if self._box is box or self._box == [None]:
            self._box = []
        if not self._box:
            caught(self._box, self._take)
        if self._box[0] is None:
            return None
        made = [self._make(self._box[0])]
        self._out = (taken, made, self._box)
        return made


class Passed:
    """Passes on what a native function gives, until it gives None, and holds nothing of what it has passed on.

    For what somebody else waits to be let go of, such as capabilities: `Given` holds the last one until the next.

    Parameters
    ----------
    take : callable
        Native: what it returns is kept whatever interrupts whom.
    make : callable
        What is handed out for it.
    """

    __slots__ = ("_box", "_made", "_make", "_take")

    def __init__(self, take: Callable[[], Any], make: Callable[[Any], Any]) -> None:
        self._take, self._make = take, make
        self._box: list[Any] = []
        self._made: list[Any] = []

    def _fill(self) -> list[Any] | None:
        """A list with the next one, which `list.pop` hands out: no interrupt comes between the two."""
        if not self._made:
            if not self._box:
                caught(self._box, self._take)
            if self._box[0] is None:
                self._box.clear()
                return None
            self._made.append(self._make(self._box[0]))
        self._box.clear()
        return self._made

    def __iter__(self) -> Iterator[Any]:
        return map(list.pop, iter(self._fill, None))


class _Guarded:
    """Fills from an iterator that an interrupt may kill."""

    def __init__(self, items: Iterator[Any], what: str) -> None:
        self._items, self._what = items, what
        self._given: tuple[int, list[Any]] = (-1, [])
        self._box: list[Any] = []
        self._inside = self._closed = False

    def close(self) -> None:
        """Close the iterator, where it can be closed: no further item comes."""
        self._closed = True
        if hasattr(self._items, "close"):
            self._items.close()

    def fill(self, taken: int) -> list[Any] | None:
        """The next item, once."""
        if self._closed:
            return None
        serial, given = self._given
        if serial == taken:
            return given
        if self._box is given:  # it has arrived
            self._box = []
        if not self._box:
            if self._inside:
                raise Interrupted(
                    f"{self._what} was interrupted in the middle of its work, so what it would give now is not what was"
                    " asked for; begin again"
                )
            self._inside = True
            try:
                self._box.extend(islice(self._items, 1))
            except Exception:
                self._inside = False  # the iterator's own: it says itself how it goes on
                raise
            if not self._box:
                self._inside = False
                return None
        self._inside = False
        self._given = (taken, self._box)
        return self._box


class Guarded(Generic[T]):
    """See `guarded`."""

    # As `OrderedIterator`: a method in Python would lose the item that it has in its hand when an interrupt comes.
    if TYPE_CHECKING:

        def __next__(self) -> T: ...

    else:
        __slots__ = ("__next__", "_inner", "_results")

    _inner: _Guarded
    _results: Handover

    def __init__(self, items: Iterable[T], what: str) -> None:
        from penstock import _native

        self._inner = _Guarded(iter(items), what)
        self._results = _native.Handover(self._inner.fill, ThreadError)
        self.__next__ = self._results.__next__  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[T]:
        return self._results

    def close(self) -> None:
        """Close the iterator inside, where it can be closed: no further item comes."""
        self._inner.close()


def guarded(items: Iterable[T], what: str) -> Guarded[T]:
    """An iterator that an interrupt never ends silently: it goes on, or raises `Interrupted` from then on."""
    return Guarded(items, what)
