"""Another number of members while queries run, as the engine's protocol carries it out.

Owns: the handles on what users ask for (`penstock._rescale`), what they tell, and the number of members for which task
slots are held. Who comes and goes when, and which bins follow, is decided by the protocol.

Invariants: that number is written by the executor's thread alone, in the order of the protocol's steps; nobody waits
for a rescale that waits for him.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock import _rescale
from penstock._rescale import RescaleProgress
from penstock.errors import ConfigError, EngineError, SlotsError
from penstock.report._timeline import Change
from penstock.spark._engine.executor import Event, Executor
from penstock.spark._engine.interrupts import plain_interrupts
from penstock.spark._engine.record import Recorder

__all__ = ["Rescale", "RescaleProgress", "Rescales"]


class Rescale(_rescale.Rescale):
    """A handle on a change of the number of members that is under way; see `penstock._rescale.Rescale`."""

    _waiting = staticmethod(plain_interrupts)

    def __init__(
        self,
        workers: int,
        look: Callable[[_rescale.Rescale], RescaleProgress | None],
        cancel: Callable[[_rescale.Rescale], None],
        outside: Callable[[], None],
        setting: str,
    ) -> None:
        super().__init__(workers, look, cancel)
        self._outside = outside
        #: How many there were, once it has begun.
        self._before = 0
        #: What bounds the task slots.
        self._setting = setting
        #: Who had not come when it was given up.
        self._late = ""

    def _require_outside(self) -> None:
        if not self.done:
            self._outside()


class Rescales:
    """The rescales of one engine. Any thread may ask.

    Parameters
    ----------
    executor : Executor
        Of the engine; must not have started.
    workers : int
        Members that there are to be at first.
    name_of : callable
        What people call the query of an id, where it is known.
    calling : callable
        The id of the query in whose call the thread that asks is, its sink's for example; None for others.
    recorder : Recorder
        Hears of those that have ended.
    missing : callable
        Who has not come, and what is known of why, for people.
    """

    def __init__(
        self,
        executor: Executor,
        workers: int,
        name_of: Callable[[str], str | None],
        calling: Callable[[], str | None],
        recorder: Recorder,
        missing: Callable[[], str],
    ) -> None:
        self._executor = executor
        #: Members that there are, or are to be where these are more.
        self.workers = workers
        self._name_of = name_of
        self._calling = calling
        self._recorder = recorder
        self._missing = missing
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Rescale] = {}
        executor.watch(self._see)
        executor.perform(Rescaled=self._rescaled)
        executor.when_broken(self._break)

    def ask(self, workers: int, free: int, setting: str) -> Rescale:
        """Begin to go to so many members, where so many task slots are free; `setting` bounds them.

        Raises
        ------
        ConfigError
            For less than one.
        SlotsError
            When there are not as many slots.
        EngineError
            When another rescale is under way.
        """
        number, handle = next(self._numbers), Rescale(workers, self._look, self._cancel, self._require_outside, setting)
        with self._lock:
            self._open[number] = handle
        self._executor.ask({"Rescale": {"handle": number, "workers": workers, "free": free}}, handle)
        if handle.error is not None:
            raise handle.error
        return handle

    def _number(self, handle: _rescale.Rescale) -> int | None:
        with self._lock:
            return next((number for number, one in self._open.items() if one is handle), None)

    def _cancel(self, handle: _rescale.Rescale) -> None:
        number = self._number(handle)
        if number is not None:
            self._executor.ask({"CancelRescale": {"handle": number}}, handle)

    def _look(self, handle: _rescale.Rescale) -> RescaleProgress | None:
        number, told = self._number(handle), self._executor.rescaling()
        if told is None or told["handle"] != number:
            return None
        waits = [self._in_words(wait) for wait in told["waits"]]
        if not waits and told["leaving"]:
            waits = ["the end of those that leave"]
        moved = told["moved"]
        return RescaleProgress(
            told["workers"], told["serving"], told["leaving"], moved, moved + told["to_move"], tuple(waits)
        )

    def _require_outside(self) -> None:
        """Refuse a sink that would wait for the end of its own batch."""
        calling, told = self._calling(), self._executor.rescaling()
        if calling is None or told is None:
            return
        # Who has still to come takes part in the query with the batch after.
        if any("Slots" in wait or wait.get("Epoch", {}).get("query") == calling for wait in told["waits"]):
            raise EngineError(
                f"the rescale to {told['workers']} workers is waited for by the sink of query"
                f" {self._name_of(calling) or calling} ({calling}), whose batch has to end before members come or go:"
                " wait when the sink has returned",
                query=calling,
            )

    def _in_words(self, wait: Mapping[str, Any]) -> str:
        ((kind, facts),) = wait.items()
        if kind == "Slots":
            return f"{facts['missing']} task slot{'s' if facts['missing'] > 1 else ''}"
        name = self._name_of(facts["query"]) or facts["query"]
        if kind == "Epoch":
            return f"batch {facts['epoch']} of query {name}"
        return {
            "Generation": f"the workers of query {name} to begin",
            "Moves": f"bins of query {name}",
            "Commit": f"the commit or the next batch of query {name}",
            "Batch": f"the next batch of query {name}",
            "Finish": f"the end of query {name}, which broke off: call finish() again, or engine.drop it",
            "Restart": f"query {name}, whose last batch failed or was not committed: start it again, or engine.drop it",
        }[kind]

    # In the executor's thread

    def _see(self, event: Event, effects: Sequence[Event]) -> None:
        """The protocol has heard of a rescale: the slots of those that are to come are held from now on. Or it gives
        slots up: who is late is known as long as they are there."""
        if not isinstance(event, Mapping) or "Rescale" not in event:
            is_late = isinstance(event, Mapping) and "Timer" in event
            if is_late and any(isinstance(effect, Mapping) and "RetireResident" in effect for effect in effects):
                with self._lock:
                    handles = list(self._open.values())
                for handle in handles:
                    handle._late = self._missing()
            return
        facts = event["Rescale"]
        for effect in effects:
            if isinstance(effect, Mapping) and "Err" in effect.get("Rescaled", {}).get("outcome", {}):
                return
        with self._lock:
            handle = self._open[facts["handle"]]
        handle._before = self.workers
        self.workers = max(self.workers, facts["workers"])

    def _rescaled(self, facts: Mapping[str, Any]) -> None:
        with self._lock:
            handle = self._open.pop(facts["handle"])
        if "Ok" in facts["outcome"]:
            workers = self.workers = facts["outcome"]["Ok"]
            self._recorder.rescaled(
                Change(handle._began, time.time(), "rescale", handle._before, workers, int(facts["moved"]))
            )
            handle._come(workers, facts["moved"])
            return
        error = facts["outcome"]["Err"]
        name = error if isinstance(error, str) else next(iter(error))
        text = facts["text"]
        if name == "SlotsLate":
            text = f"{text} (start_timeout)" + (f": {handle._late}" if handle._late else "")
            self.workers = handle._before
        if name in ("NoSlots", "SlotsLate") and handle._setting:
            # The last part is what people can change.
            text = f"{text}; {handle._setting}"
        kinds = {"NoSlots": SlotsError, "SlotsLate": SlotsError, "Refused": ConfigError}
        handle._end(kinds.get(name, EngineError)(text))

    def _break(self, error: EngineError) -> None:
        with self._lock:
            handles = list(self._open.values())
            self._open.clear()
        for handle in handles:
            handle._end(error)
