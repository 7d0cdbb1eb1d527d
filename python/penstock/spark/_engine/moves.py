"""The migrations of one query, one after the other.

Owns: their turns. What is wrong in itself is refused at the call; what is to move follows from the owners when the turn
comes, so that "as it was before" or "evenly" means what it says whatever moves in between. A migration that was
cancelled while it waited moves nothing.

Invariants: at most one is under way, each handle is told of its end exactly once, and nothing here waits: ends are
heard in the hub's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from penstock._migration import Wish
from penstock.spark._engine.migrate import Migration, MoveReport

__all__ = ["Begin", "Ended", "Moves"]

#: Told once: the leader's answer, or why there is none.
Ended = Callable[[Mapping[str, Any] | None, Exception | None], None]


class _Turn:
    """One migration from the call to its end."""

    __slots__ = ("cancelled", "end", "started", "stop", "wish")

    def __init__(self, wish: Wish, started: Callable[[int], None], end: Ended) -> None:
        self.wish = wish
        self.started = started
        self.end = end
        self.cancelled = False
        self.stop: Callable[[], None] | None = None


class Begin(Protocol):
    """Begins a migration: calls `started` with the number of bins when it has a plan, and `ended` at its end.

    That may be at once. Returns what cuts it short, or None where nothing is under way; what it raises is its end.
    """

    def __call__(self, wish: Wish, started: Callable[[int], None], ended: Ended) -> Callable[[], None] | None: ...


class Moves:
    """The turns of one query. Any thread may ask.

    Parameters
    ----------
    begin : Begin
        Makes the plan and begins it.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._waiting: deque[_Turn] = deque()
        self._current: _Turn | None = None
        #: Somebody gives turns: whoever ends one meanwhile leaves the next to them, however many end at once.
        self._giving = False

    def add(self, handle: Migration, name: str, wish: Wish) -> None:
        """Enter a migration of the query of this name; it begins now, or when those before it have ended."""
        report = MoveReport(name, wish.strategy)
        turn = _Turn(wish, lambda bins: handle.planned(report, bins), handle.begin(report))
        handle.cancellable(lambda: self._cancel(turn))
        with self._lock:
            self._waiting.append(turn)
        self._give()

    def _give(self) -> None:
        with self._lock:
            if self._giving:
                return
            self._giving = True
        while True:
            with self._lock:
                if self._current is not None or not self._waiting:
                    self._giving = False
                    return
                turn = self._current = self._waiting.popleft()
            self._start(turn)

    def _start(self, turn: _Turn) -> None:
        def ended(answer: Mapping[str, Any] | None, error: Exception | None) -> None:
            turn.end(answer, error)
            with self._lock:
                self._current = None
            self._give()

        try:
            stop = self._begin(turn.wish, turn.started, ended)
        except Exception as error:
            ended(None, error)
            return
        with self._lock:
            turn.stop = stop
            cancelled = turn.cancelled
        if cancelled and stop is not None:
            stop()

    def _cancel(self, turn: _Turn) -> None:
        with self._lock:
            waited = turn in self._waiting
            if waited:
                self._waiting.remove(turn)
            turn.cancelled = True
            stop = turn.stop
        if waited:
            turn.end({"moved": 0, "bytes": 0, "steps": []}, None)
        elif stop is not None:
            stop()
