"""Where the items of a run come from: in which thread an input is read, and how much of it at a time.

What lies in memory is read where it is wanted. Everything else may be silent for any time, or work, and is read in a
thread of its own (`reads="aside"`), so that results which are there come out meanwhile; or, where it is bound to the
caller's thread (`reads="here"`), by the caller, until a millisecond has passed. That cuts the chunks of a source that
is slow. One that is silent is waited for in the middle of a chunk: nobody knows it before, and only the caller, who
waits, could go on with what was read.

Invariants: never more is read than was asked for; what was read is in the buffer it was asked for, or still in the
source, whatever interrupts whom. A source that was interrupted in its own work has ended, with an error that says so.
"""

from __future__ import annotations

import array
import collections
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from penstock._reader import Reader
from penstock.errors import Interrupted
from penstock.ordered._chunk import estimate_bytes

__all__ = ["Source", "open_source"]

#: Seconds of reading after which a chunk is long enough; looked at between two items.
LINGER = 0.001

_CONTAINERS: tuple[Any, ...] = (
    [], (), range(0), "", b"", bytearray(), {}, {}.keys(), {}.values(), {}.items(), set(), frozenset(),
    collections.deque(), array.array("b"),
)  # fmt: skip
#: Types whose iteration neither waits nor calls anybody's code.
_NEAR = (
    {type(each) for each in _CONTAINERS}
    | {type(iter(each)) for each in _CONTAINERS}
    | {type(iter("ä")), type(iter(range(1 << 70))), type(reversed([])), itertools.repeat}
)


class Source(Protocol):
    """The input of a run; only its consumer calls it, and may be interrupted anywhere."""

    @property
    def ended(self) -> bool:
        """Whether all that was read is in a buffer and nothing more will come."""

    @property
    def error(self) -> BaseException | None:
        """What the input raised at its end."""

    @property
    def slow(self) -> bool:
        """Whether whoever fills may wait long."""

    @property
    def threads(self) -> bool:
        """Whether it has a thread."""

    def fill(self, buffer: list[Any], read: int, wanted: int) -> None:
        """Put what there is into a buffer, up to `wanted` in all; `read` items were given before those in it."""

    def wait(self) -> None:
        """Wait until `fill` brings something, or the end."""

    def listen(self, tell: Callable[[], Any]) -> bool:
        """Whether `fill` brings something, or the end; else `tell` is called, from anywhere, when it does."""

    def hush(self) -> None:
        """Nobody listens any more."""

    def close(self) -> None:
        """Read no more."""


class _Here:
    """An input that is read by who asks."""

    threads = False

    def __init__(self, items: Iterator[Any], near: bool) -> None:
        self._items: Iterator[Any] | None = items
        self._near = near
        self._inside = False
        self.ended = self.slow = False
        self.error: BaseException | None = None

    def fill(self, buffer: list[Any], read: int, wanted: int) -> None:
        if self._items is None or self.ended or len(buffer) >= wanted:
            return
        if self._near:
            self._take(buffer, self._items, wanted)
            return
        if self._inside:
            # What was read before comes out first.
            self.error = Interrupted(
                f"the input was interrupted in the middle of its work, behind item {read + len(buffer) - 1}, and an"
                " input that was is not the same any more; read it in a thread of its own (reads='aside')"
                if read + len(buffer)
                else "the input was interrupted before its first item; begin again"
            )
            self.ended = True
            return
        began = time.perf_counter()
        step = 1
        self.slow = False
        while not self.ended and len(buffer) < wanted and not self.slow:
            self._inside = True
            self._take(buffer, self._items, min(wanted, len(buffer) + step))
            self._inside = False
            step *= 2
            self.slow = time.perf_counter() - began > LINGER

    def _take(self, buffer: list[Any], items: Iterator[Any], wanted: int) -> None:
        try:
            buffer.extend(itertools.islice(items, wanted - len(buffer)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            frame = error.__traceback__
            if self._near and frame is not None and frame.tb_next is not None:
                raise  # of a signal handler: what a container raises comes from no code of Python's
            self.error = error
        if len(buffer) < wanted:
            self.ended = True

    def wait(self) -> None:
        return

    def listen(self, tell: Callable[[], Any]) -> bool:
        return True

    def hush(self) -> None:
        return

    def close(self) -> None:
        self._items, self.ended = None, True


class _Aside:
    """An input that is read in a thread of its own."""

    threads, slow = True, False

    def __init__(self, items: Iterator[Any], most_bytes: int) -> None:
        self._reader = Reader(items, _weigh, most_bytes)

    @property
    def ended(self) -> bool:
        reader = self._reader
        return reader.ended and not reader.items

    @property
    def error(self) -> BaseException | None:
        return self._reader.error

    def fill(self, buffer: list[Any], read: int, wanted: int) -> None:
        items = self._reader.items
        # One call, all of it native: an item is there or here.
        buffer.extend(itertools.starmap(items.popleft, itertools.repeat((), min(wanted - len(buffer), len(items)))))
        if len(buffer) < wanted and not self._reader.ended:
            self._reader.allow(read + wanted)

    def wait(self) -> None:
        self._reader.wait()

    def listen(self, tell: Callable[[], Any]) -> bool:
        return self._reader.listen(tell)

    def hush(self) -> None:
        self._reader.hush()

    def close(self) -> None:
        self._reader.close()


def _weigh(item: Any) -> int:
    return estimate_bytes([item])


def open_source(xs: Iterable[Any], reads: str, most_bytes: int) -> Source:
    """The input of a run over an iterable, of which about so many bytes may be read ahead."""
    items = iter(xs)
    numpy = sys.modules.get("numpy")
    near = type(xs) in _NEAR and type(items) in _NEAR
    if type(xs) is itertools.count:
        near = {type(number) for number in xs.__reduce__()[1]} <= {int, float}  # others' own code adds up
    if near or (numpy is not None and type(xs) is numpy.ndarray):
        return _Here(items, True)
    return _Here(items, False) if reads == "here" else _Aside(items, most_bytes)
