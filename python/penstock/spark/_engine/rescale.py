"""Another number of members while queries run, as the engine's protocol carries it out.

Owns: the handles on what users ask for, and what they tell. Who comes and goes when, and which bins follow, is decided
by the protocol.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock._durations import Timeout, parse_timeout
from penstock.errors import ConfigError, EngineError, SlotsError
from penstock.report._timeline import Change
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.hub import plain_interrupts
from penstock.spark._engine.record import Recorder

__all__ = ["Rescale", "RescaleProgress", "Rescales"]


@dataclass(frozen=True)
class RescaleProgress:
    """How far a rescale is.

    Attributes
    ----------
    workers : int
        Resident processes that there are to be; after `Rescale.cancel` the number that it goes back to.
    members : int
        Those that have come and stay.
    leaving : int
        Those that are to go and are still there.
    moved : int
        Bins that have moved so far, over all queries.
    bins : int
        Bins that move in all, as far as is known: each query tells when members have come.
    waits : tuple of str
        What is waited for: "2 task slots", "the next batch of query X"; empty when it has ended.
    """

    workers: int
    members: int
    leaving: int
    moved: int
    bins: int
    waits: tuple[str, ...]


class Rescale:
    """A handle on a change of the number of members that is under way.

    Attributes
    ----------
    workers : int
        How many were asked for.
    done : bool
        Whether it has ended, well or not.
    error : Exception or None
        Why it did not finish.
    """

    def __init__(
        self,
        workers: int,
        look: Callable[[Rescale], RescaleProgress | None],
        cancel: Callable[[Rescale], None],
        before: int = 0,
        setting: str = "",
    ) -> None:
        self.workers = workers
        self.error: Exception | None = None
        self._before = before
        #: What bounds the task slots.
        self._setting = setting
        self._began = time.time()
        self._look = look
        self._cancel = cancel
        self._over = threading.Event()
        #: The last that was told, and what it came to.
        self._told = RescaleProgress(workers, 0, 0, 0, 0, ())
        self._ended: RescaleProgress | None = None

    @property
    def done(self) -> bool:
        return self._over.is_set()

    @property
    def progress(self) -> RescaleProgress:
        """How far it is; after its end how far it came."""
        told = None if self.done else self._look(self)
        if told is not None:
            self._told = told
        return self._ended or self._told

    def wait(self, timeout: Timeout | None = None, progress: bool = False) -> int:
        """Wait for the end; returns the number of members.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds, or a duration; default without limit.
        progress : bool, default False
            Show a line on stderr while waiting.

        Returns
        -------
        int
            How many there are: as asked for, or what `cancel` went back to.

        Raises
        ------
        EngineError
            When it was refused, or the engine closed before.
        TimeoutError
            When it still runs after `timeout`; the message says what it waits for.
        """
        seconds = parse_timeout(timeout, least_s=0.0)
        began = time.monotonic()
        deadline = None if seconds is None else began + seconds
        shown = 0
        try:
            with plain_interrupts():
                while not self._over.wait(0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))):
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"the rescale still runs after {seconds:g} s: {self._line()}")
                    if progress:
                        text = f"{self._line()}: {time.monotonic() - began:.1f} s"
                        print(f"\r{text:<{shown}}", end="", file=sys.stderr, flush=True)
                        shown = len(text)
        finally:
            if shown:
                print(file=sys.stderr, flush=True)
        if self.error is not None:
            raise self.error
        return self.progress.members

    def cancel(self) -> None:
        """Go back to the number of members from before; does not wait, harmless after the end.

        Those that have come leave, as by a rescale of its own, and those that were to go and are still there stay; the
        bins follow. Members that have gone stay away, since their task slots are no longer held: then the number that
        is left is what `wait` returns.
        """
        if not self.done:
            self._cancel(self)

    def _line(self) -> str:
        """How it stands, for people."""
        now = self.progress
        parts = [f"{now.members} of {now.workers} workers"]
        if now.leaving:
            parts.append(f"{now.leaving} leaving")
        if now.bins:
            parts.append(f"{now.moved} of {now.bins} bins")
        if now.waits:
            parts.append(f"waits for {' and '.join(now.waits)}")
        return ", ".join(parts)

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self._over.set()

    def _come(self, workers: int, moved: int) -> None:
        self._ended = RescaleProgress(workers, workers, 0, moved, moved, ())
        self._over.set()

    def __repr__(self) -> str:
        if not self.done:
            return f"<Rescale to {self.workers} workers: {self._line()}>"
        if self.error is not None:
            return f"<Rescale to {self.workers} workers: failed, {self.error}>"
        return f"<Rescale to {self.workers} workers: done, {self.progress.members} serve>"


class Rescales:
    """The rescales of one engine. Any thread may ask.

    Parameters
    ----------
    executor : Executor
        Of the engine; must not have started.
    resized : callable
        Called with the number of members that a rescale has come to.
    name_of : callable
        What people call the query of an id, where it is known.
    recorder : Recorder
        Hears of those that have ended.
    """

    def __init__(
        self,
        executor: Executor,
        resized: Callable[[int], None],
        name_of: Callable[[str], str | None],
        recorder: Recorder,
    ) -> None:
        self._executor = executor
        self._resized = resized
        self._name_of = name_of
        self._recorder = recorder
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Rescale] = {}
        executor.perform(Rescaled=self._rescaled)
        executor.when_broken(self._break)

    def ask(self, workers: int, before: int, free: int, setting: str) -> Rescale:
        """Begin to go to so many members from so many, where so many task slots are free; `setting` bounds them.

        Raises
        ------
        ConfigError
            For less than one.
        SlotsError
            When there are not as many slots.
        EngineError
            When another rescale is under way.
        """
        number, handle = next(self._numbers), Rescale(workers, self._look, self._cancel, before, setting)
        with self._lock:
            self._open[number] = handle
        self._executor.ask({"Rescale": {"handle": number, "workers": workers, "free": free}}, handle)
        if handle.error is not None:
            raise handle.error
        return handle

    def _number(self, handle: Rescale) -> int | None:
        with self._lock:
            return next((number for number, one in self._open.items() if one is handle), None)

    def _cancel(self, handle: Rescale) -> None:
        number = self._number(handle)
        if number is not None:
            self._executor.ask({"CancelRescale": {"handle": number}}, handle)

    def _look(self, handle: Rescale) -> RescaleProgress | None:
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
        }[kind]

    def _rescaled(self, facts: Mapping[str, Any]) -> None:
        with self._lock:
            handle = self._open.pop(facts["handle"])
        if "Ok" in facts["outcome"]:
            workers = facts["outcome"]["Ok"]
            self._resized(workers)
            self._recorder.rescaled(
                Change(handle._began, time.time(), "rescale", handle._before, workers, int(facts["moved"]))
            )
            handle._come(workers, facts["moved"])
            return
        error = facts["outcome"]["Err"]
        name = error if isinstance(error, str) else next(iter(error))
        text = facts["text"]
        if name in ("NoSlots", "SlotsLate") and handle._setting:
            # The last part is what people can change.
            text = f"{text}{' (start_timeout)' if name == 'SlotsLate' else ''}; {handle._setting}"
        if name == "SlotsLate":
            self._resized(handle._before)
        kinds = {"NoSlots": SlotsError, "SlotsLate": SlotsError, "Refused": ConfigError}
        handle._end(kinds.get(name, EngineError)(text))

    def _break(self, error: EngineError) -> None:
        with self._lock:
            handles = list(self._open.values())
            self._open.clear()
        for handle in handles:
            handle._end(error)
