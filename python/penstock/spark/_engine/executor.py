"""What the engine's protocol decides, carried out.

Owns: the queue of events, the timers, and the one thread that steps the machine (`_native.EngineProtocol`) and does
what it asks for. What an effect means is known by whoever registers for it: `residents` (who serves), `calls` (what
members are asked), `queries` (Spark's calls), `moves` (migrations).

Invariants: only this thread steps the machine. Effects are done in their order, each at most once, and nothing of that
waits, for a member, for Spark or for storage: how it ended comes back as an event. When the machine breaks, all that
waits for it is told. A thread that the system does not give at the moment begins when it does.
"""

from __future__ import annotations

import heapq
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import EngineError

__all__ = ["Event", "Executor"]

log = logging.getLogger(__name__)

#: Seconds until the system is asked again for a thread that it has not given.
_AGAIN_S = 0.25

#: Tagged by its name: ``{"Timer": {"ticket": 3}}``, or the name alone.
Event = Mapping[str, Any] | str


@dataclass
class _Posted:
    event: Event
    #: The same as the machine reads it.
    text: str
    #: What it comes from, for those who want to know more than the protocol does.
    cause: Any
    #: Called when its effects have been done.
    then: Callable[[], None] | None
    #: Called with its effects before they are: whoever waits for one of them finds what this has changed.
    first: Callable[[Sequence[Event]], None] | None = None


class Executor:
    """Steps the protocol of one engine.

    Parameters
    ----------
    name : str
        Names the thread.
    setup : mapping
        Of the protocol, see `_native.EngineProtocol`.
    """

    def __init__(self, name: str, setup: Mapping[str, Any]) -> None:
        from penstock import _native

        self._name = name
        self._protocol = _native.EngineProtocol(json.dumps(setup))
        self._acts: dict[str, Callable[[Mapping[str, Any]], None]] = {"Timer": self._set_timer}
        self._changed = threading.Condition()
        self._posted: deque[_Posted] = deque()
        self._timers: list[tuple[float, int]] = []
        #: What the system has given no thread yet, and when it is asked again.
        self._unstarted: deque[threading.Thread] = deque()
        self._again = 0.0
        self._closing = False
        self._broken: EngineError | None = None
        self._when_broken: list[Callable[[EngineError], None]] = []
        self._watches: list[Callable[[Event, Sequence[Event]], None]] = []
        self._thread = threading.Thread(target=self._run, name=f"penstock-engine-{name}", daemon=True)
        #: Of the event whose effects are being done.
        self.cause: Any = None

    def perform(self, **acts: Callable[[Mapping[str, Any]], None]) -> None:
        """Register who does which effects; only before `start`."""
        self._acts.update(acts)

    def when_broken(self, tell: Callable[[EngineError], None]) -> None:
        """Register who is told when the machine has failed; only before `start`."""
        self._when_broken.append(tell)

    def watch(self, see: Callable[[Event, Sequence[Event]], None]) -> None:
        """Register who sees each step, its event and effects, before these are done; must not raise."""
        self._watches.append(see)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def post(
        self,
        event: Event,
        cause: Any = None,
        then: Callable[[], None] | None = None,
        first: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        """Let the machine hear something; does not wait. `first` is called in the executor's thread with the effects
        before they are done, `then` behind them.

        Raises
        ------
        EngineError
            When the machine has failed.
        TypeError
            For an event that is no plain data.
        """
        # Here, where who posts hears of it. Texts of users may hold what UTF-8 cannot.
        text = json.dumps(event, ensure_ascii=False).encode("utf-8", "replace").decode()
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._posted.append(_Posted(event, text, cause, then, first))
            self._changed.notify_all()

    def ask(self, event: Event, cause: Any = None) -> None:
        """Let the machine hear something, and wait until what it asks for at once has been done.

        Raises
        ------
        EngineError
            When the machine has failed, or is not stepped any more.
        """
        done = threading.Event()
        self.post(event, cause, done.set)
        while not done.wait(0.5):
            if not self._thread.is_alive():
                raise self._broken or EngineError("the engine is closed")

    def begin(self, thread: threading.Thread) -> None:
        """Start a thread, now or as soon as the system gives one; does not wait.

        What has not begun when the engine is closed never does. Until then the thread is not alive, and must not be
        joined.
        """
        if not self._given(thread):
            log.warning("engine %s waits for a thread, %s: the system gives no more", self._name, thread.name)
            with self._changed:
                self._unstarted.append(thread)
                self._again = time.monotonic() + _AGAIN_S
                self._changed.notify_all()

    def _given(self, thread: threading.Thread) -> bool:
        try:
            thread.start()
        except RuntimeError:
            return False
        return True

    def facts(self, query: str) -> dict[str, Any] | None:
        """How a query stands; None for one that never asked."""
        told = self._protocol.facts(query)
        return None if told is None else json.loads(told)

    def rescaling(self) -> dict[str, Any] | None:
        """How the rescale under way stands; None when there is none."""
        told = self._protocol.rescaling()
        return None if told is None else json.loads(told)

    def bins(self, query: str) -> list[list[tuple[int, int, int]]]:
        """The bins of a query and the parts of those that are split, by keyed step: (prefix, bits, worker)."""
        return self._protocol.bins(query)

    @property
    def closed(self) -> bool:
        """Whether nothing is heard any more."""
        return self._closing

    def close(self) -> None:
        """Let the machine close, and end the thread when what it asks for has been done."""
        if not self._thread.is_alive():
            return
        try:
            self.ask("Close")
        except EngineError as error:
            log.debug("the machine had failed before it was closed: %s", error)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(10)

    # The thread

    def _run(self) -> None:
        try:
            self._do("Begin", self._protocol.begin())
            while (posted := self._next()) is not None:
                self.cause = posted.cause
                self._do(posted.event, self._protocol.step(posted.text), posted.first)
                self.cause = None
                if posted.then is not None:
                    posted.then()
        except BaseException as error:
            # Also a panic, which is no Exception: nothing can be asked of the machine any more.
            log.critical("the protocol of the engine has failed", exc_info=True)
            self._break(error)

    def _next(self) -> _Posted | None:
        with self._changed:
            while True:
                now = time.monotonic()
                if self._timers and self._timers[0][0] <= now:
                    _, ticket = heapq.heappop(self._timers)
                    event = {"Timer": {"ticket": ticket}}
                    return _Posted(event, json.dumps(event), None, None)
                if self._posted:
                    return self._posted.popleft()
                if self._closing:
                    return None
                if self._unstarted and self._again <= now:
                    while self._unstarted and self._given(self._unstarted[0]):
                        self._unstarted.popleft()
                    self._again = now + _AGAIN_S
                due = [*(at for at, _ in self._timers[:1]), *([self._again] if self._unstarted else [])]
                self._changed.wait(max(0.0, min(due) - now) if due else None)

    def _do(self, event: Event, told: str, first: Callable[[Sequence[Event]], None] | None = None) -> None:
        effects = json.loads(told)
        for see in self._watches:
            see(event, effects)
        if first is not None:
            first(effects)
        for effect in effects:
            ((name, facts),) = effect.items() if isinstance(effect, Mapping) else ((effect, {}),)
            log.debug("%s %s", name, facts)
            self._acts[name](facts)

    def _set_timer(self, facts: Mapping[str, Any]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + facts["after_ms"] / 1_000, facts["ticket"]))

    def _break(self, error: BaseException) -> None:
        broken = EngineError(f"the engine has failed, close it: {error!r}")
        broken.__cause__ = error
        with self._changed:
            self._broken = broken
            self._posted.clear()
        for tell in self._when_broken:
            tell(broken)
