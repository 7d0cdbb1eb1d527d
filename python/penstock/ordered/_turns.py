"""Who gets the next free worker process.

More callers than processes wait, each with a part of a chunk (all of it, where an operator takes chunks whole). A
caller asks some time after its part was taken from a queue (it waits for the interpreter, it pickles), so who asks
first need not have the earliest chunk. Chunks come to an operator in the order of their numbers, so a caller waits
until all parts of earlier ones have asked there, or do not need a process. Who knows the parts of a chunk announces
them, before any of them can ask; one that was not announced is one part.

Not waited for are parts behind another one of their partition that has a process or waits for one: they come with that
one. Nor is anybody waited for when all callers are here: then nobody is left who could come. (That happens where a
queue takes partitions as it finds them, or lets go of one between two of its parts while chunks have many.)

Invariants: of those who may go the one with the earliest chunk goes first; at an operator numbers go without gaps, so
each part of them has to ask or to be passed; nobody waits once it is closed.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Turns"]

#: Who waits: (number of the chunk, order of asking, where to tell the process).
_Who: TypeAlias = tuple[int, int, "queue.SimpleQueue[int]"]
#: The only part of a chunk that goes whole.
_WHOLE = 0


@dataclass
class _Operator:
    """What has come to one operator."""

    #: The first chunk of which a part has not asked yet; of it and those behind it, the parts that have not.
    next: int
    missing: dict[int, set[int]] = field(default_factory=dict)
    #: Partitions of which a part has asked and is not done.
    busy: set[int] = field(default_factory=set)
    waiting: list[_Who] = field(default_factory=list)

    def came(self, number: int, partition: int) -> None:
        """A part has asked, or was passed."""
        if number < self.next:
            return
        self.missing.setdefault(number, {_WHOLE}).discard(partition)
        while self.missing.get(self.next) == set():
            del self.missing[self.next]
            self.next += 1

    def turn(self) -> int:
        """The first chunk that may need a process and has not asked for it: those behind it wait."""
        at = self.next
        while (missing := self.missing.get(at)) is not None and missing <= self.busy:
            at += 1
        return at


class Turns:
    """Free processes by number, and who waits for one.

    Parameters
    ----------
    workers : int
        Processes, all free at first.
    """

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._workers = workers
        #: The one used last goes first: it is awake.
        self._free = list(range(workers - 1, -1, -1))
        self._operators: dict[int, _Operator] = {}
        self._first = 0
        self._callers = 0
        self._asked = 0
        self._closed = False

    def begin(self, number: int, callers: int) -> None:
        """The next chunk to come is this one, and so many threads may ask at a time; nothing is under way."""
        with self._lock:
            self._first, self._callers = number, callers
            self._operators.clear()

    def limit_callers(self, callers: int) -> None:
        """No more threads ask at a time than these."""
        with self._lock:
            self._callers = min(self._callers, callers)
            self._grant()

    def announce(self, number: int, operator: int, partitions: Iterable[int]) -> None:
        """These are the parts of a chunk at an operator that takes it by partition."""
        with self._lock:
            self._at(operator).missing[number] = set(partitions)

    def take(self, number: int, operator: int, partition: int | None = None) -> int:
        """Wait for a process for a part, or for a whole chunk; -1 once it is closed."""
        told: queue.SimpleQueue[int] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                return -1
            self._asked += 1
            at = self._at(operator)
            heapq.heappush(at.waiting, (number, self._asked, told))
            if partition is not None:
                at.busy.add(partition)
            at.came(number, _WHOLE if partition is None else partition)
            self._grant()
        return told.get()

    def passed(self, number: int, operator: int, partition: int | None = None) -> None:
        """A part, or a whole chunk, is through with this operator, whether it took a process there or not."""
        with self._lock:
            self._at(operator).came(number, _WHOLE if partition is None else partition)
            self._grant()

    def give(self, worker: int, operator: int, partition: int | None = None) -> None:
        """A process is free again; the part that had it is done."""
        with self._lock:
            self._free.append(worker)
            if partition is not None:
                self._at(operator).busy.discard(partition)
            self._grant()

    def close(self) -> None:
        """Nobody gets one any more."""
        with self._lock:
            self._closed = True
            for operator in self._operators.values():
                for _, _, told in operator.waiting:
                    told.put(-1)
                operator.waiting.clear()

    def _at(self, operator: int) -> _Operator:
        found = self._operators.get(operator)
        if found is None:
            found = self._operators[operator] = _Operator(self._first)
        return found

    def _grant(self) -> None:
        while self._free:
            first = [operator for operator in self._operators.values() if operator.waiting]
            may = [operator for operator in first if operator.waiting[0][0] <= operator.turn()]
            if not may:
                here = sum(len(operator.waiting) for operator in first) + self._workers - len(self._free)
                if not first or here < self._callers:
                    return
                may = first
            _, _, told = heapq.heappop(min(may, key=lambda operator: operator.waiting[0]).waiting)
            told.put(self._free.pop())
