"""Reading iterators, each in a thread of its own, so that nobody who waits for something else waits for it.

A source may be silent for as long as it likes; what was read is there to be taken meanwhile. The thread reads no item
that it was not allowed to. Contexts (`contextvars`) are those of who made the reader.

Invariants: items are in `items` in their order, and `ended` is set behind the last one; one consumer takes them, from
the left; the thread holds neither the consumer nor anything of his. The interpreter does not end while a source reads
that comes back soon: a thread that asks for its lock after that is ended where it stands, and C++ that has no way out
(a Parquet reader) takes the process along.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import contextvars
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from penstock._resume import pause_at_end

__all__ = ["Reader", "Readers"]

#: Seconds that a source has to come back from its last item when it is not needed any more.
_PATIENCE = 0.1
#: Seconds between two looks at pending signals.
_TICK = 0.02
#: Seconds that sources have to come back when the interpreter ends.
_LAST_S = 1.0
#: Those whose threads run.
_running: set[Reader] = set()


class Reader:
    """See the module.

    Parameters
    ----------
    source : iterator
        Only its thread touches it from now on.
    weigh : callable, optional
        About how many bytes an item has; one in sixteen is weighed.
    most_bytes : int, optional
        It reads no further while about so many were not taken.

    Attributes
    ----------
    items : deque
        Read and not taken.
    ended : bool
        Whether all is read that ever will be.
    error : BaseException or None
        What the source raised at its end.
    """

    def __init__(
        self, source: Iterator[Any], weigh: Callable[[Any], int] | None = None, most_bytes: int | None = None
    ) -> None:
        self._source: Iterator[Any] | None = source
        self._weigh, self._most = weigh, most_bytes
        self._context = contextvars.copy_context()
        self._claim, self._gate = _thread.allocate_lock(), _thread.allocate_lock()
        self._gate.acquire()
        self._orders: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._allowed = 0
        self._closed = False
        self._reading = False
        #: Called when there is something new; only the consumer changes it, so no call is lost.
        self._tell: Callable[[], Any] | None = None
        self.items: deque[Any] = deque()
        self.error: BaseException | None = None
        self.ended = False

    # For the consumer: each may be interrupted anywhere, and called again.

    def allow(self, total: int) -> None:
        """Let it read up to so many items, counted from the first."""
        if total > self._allowed:
            self._allowed = total
        if not self._claim.locked():
            _thread.start_new_thread(self._run, ())
        elif not self._reading and not self.ended:
            self._orders.put(None)

    def wait(self) -> None:
        """Wait until there is something to take, or the end."""
        while not (self.listen(self._ring) or self._closed):
            pause_at_end()
            # A signal that comes just before the wait does not end it: handlers get their turn now and then.
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=_TICK)

    def _ring(self) -> None:
        if self._bell.empty():
            self._bell.put(None)

    def listen(self, tell: Callable[[], Any]) -> bool:
        """Whether there is something to take, or the end; else `tell` is called when there is, in the other thread."""
        self._tell = tell
        if self.items or self.ended:
            self._tell = None
            return True
        return False

    def hush(self) -> None:
        """Nobody listens any more."""
        self._tell = None

    def stop(self) -> None:
        """Have it read no more; it is not waited for."""
        self._closed = True
        self._allowed = -1
        self._orders.put(None)

    def close(self) -> None:
        """Read no more, and end a `wait`. A source that is silent is left to its thread, which ends with what comes
        next."""
        self.stop()
        self._ring()
        if self._claim.acquire(False):  # it never began
            self._source, self.ended = None, True
        elif self._gate.acquire(timeout=_PATIENCE):
            self._gate.release()

    # The thread

    def _run(self) -> None:
        if not self._claim.acquire(False):
            return  # an interrupt hid from the consumer that it is there
        _running.add(self)
        try:
            self._context.run(self._read)
        except BaseException as error:
            self.error = error
        self._source = None
        self.ended = True
        _running.discard(self)
        self._gate.release()
        tell = self._tell
        if tell is not None:
            tell()

    def _read(self) -> None:
        source, items, append = self._source, self.items, self.items.append
        assert source is not None
        read = 0
        weigh, most, size = self._weigh, self._most, 0

        def held() -> bool:
            return most is not None and size * len(items) > most

        while not self._closed:
            room = self._allowed - read
            if room <= 0 or held():
                self._reading = False
                # Who takes what there is, or lets more be read, says so behind it.
                if self._allowed <= read or held():
                    self._orders.get()
                continue
            self._reading = True
            before, full = read, False
            for item in islice(source, room):
                append(item)
                read += 1
                if weigh is not None and read & 15 == 1:
                    size = weigh(item)
                tell = self._tell
                if tell is not None:
                    tell()
                if self._closed:
                    return
                if most is not None and size * len(items) > most:
                    full = True
                    break
            if not full and read - before < room:
                return


class Readers:
    """Several iterators, which take turns: one that has nothing yet is passed over.

    Parameters
    ----------
    sources : sequence of iterators
        Only their threads touch them from now on.
    prompt : sequence of bool
        Of each, whether what it has is at hand: its turn is waited for, so that among such ones the order is always the
        same.
    """

    def __init__(self, sources: Sequence[Iterator[Any]], prompt: Sequence[bool]) -> None:
        self._readers = [Reader(source) for source in sources]
        self._prompt = tuple(prompt)

    def _turn(self, last: int) -> tuple[Reader, ...]:
        """Who may give the next item, or has failed, behind one of the reader `last`: in this order, those that can."""
        count = len(self._readers)
        waited: list[Reader] = []
        for number in (at % count for at in range(last + 1, last + 1 + count)):
            reader = self._readers[number]
            if reader.ended and not reader.items and reader.error is None:
                continue
            waited.append(reader)
            if self._prompt[number]:
                break
        return tuple(waited)

    def failed(self, last: int) -> tuple[int, BaseException] | None:
        """The source whose turn it is behind an item of the reader `last`, and what it raised, once it ended so."""
        for reader in self._turn(last):
            over = reader.ended  # before its items are looked at: they come before its end
            if reader.items:
                return None
            if over and reader.error is not None:
                return self._readers.index(reader), reader.error
        return None

    def next(self, last: int) -> deque[Any] | None:
        """The items of which the first is next, behind one of the reader `last`; None when there is none yet."""
        return next((reader.items for reader in self._turn(last) if reader.items), None)

    @property
    def at_hand(self) -> list[int]:
        """Which of them have an item that was not taken."""
        return [number for number, reader in enumerate(self._readers) if reader.items]

    @property
    def ended(self) -> bool:
        """Whether all is read that ever will be, and taken."""
        return all(reader.ended and not reader.items for reader in self._readers)

    def allow(self, taken: Sequence[int]) -> None:
        """Let each read one more than was taken of it."""
        for reader, count in zip(self._readers, taken, strict=True):
            reader.allow(count + 1)

    def listen(self, tell: Callable[[], Any], last: int) -> bool:
        """Whether there is something to take, an error or the end; else `tell` is called when there is."""
        waited = self._turn(last)
        ready = [reader.listen(tell) for reader in waited]
        return not waited or any(ready)

    def hush(self) -> None:
        """Nobody listens any more."""
        for reader in self._readers:
            reader.hush()

    def close(self) -> None:
        """Read no more; see `Reader.close`."""
        for reader in self._readers:
            reader.stop()
        for reader in self._readers:
            reader.close()


@atexit.register
def _end_all() -> None:
    """Let what reads come back, before nobody can any more."""
    until = time.monotonic() + _LAST_S
    for reader in (running := list(_running)):
        reader.stop()
    for reader in running:
        if reader._gate.acquire(timeout=max(0.0, until - time.monotonic())):
            reader._gate.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)
