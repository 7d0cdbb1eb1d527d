"""Who gets the next free worker process.

More callers than processes wait, each with a chunk. A caller asks some time after its chunk was taken from a queue (it
waits for the interpreter, it pickles), so who asks first need not have the earlier chunk. Where chunks come to an
operator in the order of their numbers, a caller therefore waits until all earlier ones had their turn there, also those
that have not asked yet.

Invariants: of those who may go the one with the earliest chunk goes first; at an operator in turn, numbers go without
gaps, so each of them has to go or to be passed; nobody waits once it is closed.
"""

from __future__ import annotations

import heapq
import queue
import threading

__all__ = ["Turns"]


class Turns:
    """Free processes by number, and who waits for one.

    Parameters
    ----------
    workers : int
        Processes, all free at first.
    """

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        #: The one used last goes first: it is awake.
        self._free = list(range(workers - 1, -1, -1))
        #: Who may go: (number of the chunk, order of asking, where to tell the process).
        self._ready: list[tuple[int, int, queue.SimpleQueue[int]]] = []
        #: By operator, the number whose turn it is, who asked before its turn, and who was passed before its turn.
        self._next: dict[int, int] = {}
        self._early: dict[int, dict[int, tuple[int, int, queue.SimpleQueue[int]]]] = {}
        self._passed: dict[int, set[int]] = {}
        self._first = 0
        self._asked = 0
        self._closed = False

    def begin(self, number: int) -> None:
        """The next chunk to come is this one; nothing is under way."""
        with self._lock:
            self._first = number
            self._next.clear()
            self._early.clear()
            self._passed.clear()

    def take(self, number: int, operator: int | None = None) -> int:
        """Wait for a process; -1 once it is closed. With `operator` in its turn there."""
        told: queue.SimpleQueue[int] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                return -1
            self._asked += 1
            who = (number, self._asked, told)
            if operator is None or number <= self._next.setdefault(operator, self._first):
                heapq.heappush(self._ready, who)
            else:
                self._early.setdefault(operator, {})[number] = who
            if operator is not None:
                self._pass(number, operator)
            self._grant()
        return told.get()

    def passed(self, number: int, operator: int) -> None:
        """A chunk is through with this operator, whether it took a process there or not."""
        with self._lock:
            self._pass(number, operator)
            self._grant()

    def give(self, worker: int) -> None:
        """A process is free again."""
        with self._lock:
            self._free.append(worker)
            self._grant()

    def close(self) -> None:
        """Nobody gets one any more."""
        with self._lock:
            self._closed = True
            for early in self._early.values():
                self._ready += early.values()
            for _, _, told in self._ready:
                told.put(-1)
            self._ready, self._early = [], {}

    def _pass(self, number: int, operator: int) -> None:
        """The turn goes on behind `number`, once it is there: whoever asked by then waits before those behind it."""
        at = self._next.setdefault(operator, self._first)
        passed, early = self._passed.setdefault(operator, set()), self._early.setdefault(operator, {})
        if number >= at:
            passed.add(number)
        while at in passed:
            passed.remove(at)
            if at in early:
                heapq.heappush(self._ready, early.pop(at))
            at += 1
        self._next[operator] = at

    def _grant(self) -> None:
        while self._free and self._ready:
            _, _, told = heapq.heappop(self._ready)
            told.put(self._free.pop())
