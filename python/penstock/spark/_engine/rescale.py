"""Another number of members while queries run, as the engine's protocol carries it out.

Owns: the handles on what users ask for. Who comes and goes when, and which bins follow, is decided by the protocol.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import ConfigError, EngineError, SlotsError
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.hub import plain_interrupts

__all__ = ["Rescale", "Rescales"]


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

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.error: Exception | None = None
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the number of members.

        Parameters
        ----------
        timeout : float, optional
            Seconds; default forever.

        Raises
        ------
        EngineError
            When it was refused, or the engine closed before.
        TimeoutError
            When it still runs after `timeout`.
        """
        with plain_interrupts():
            if not self._over.wait(timeout):
                raise TimeoutError(f"the engine still goes to {self.workers} workers after {timeout:g} s")
        if self.error is not None:
            raise self.error
        return self.workers

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self._over.set()

    def __repr__(self) -> str:
        state = "running" if not self.done else "done" if self.error is None else "failed"
        return f"<Rescale to {self.workers} workers: {state}>"


class Rescales:
    """The rescales of one engine. Any thread may ask.

    Parameters
    ----------
    executor : Executor
        Of the engine; must not have started.
    resized : callable
        Called with the number of members that a rescale has come to.
    """

    def __init__(self, executor: Executor, resized: Callable[[int], None]) -> None:
        self._executor = executor
        self._resized = resized
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Rescale] = {}
        executor.perform(Rescaled=self._rescaled)
        executor.when_broken(self._break)

    def ask(self, workers: int, free: int) -> Rescale:
        """Begin to go to so many members, where so many task slots are free.

        Raises
        ------
        ConfigError
            For less than one.
        SlotsError
            When there are not as many slots.
        EngineError
            When another rescale is under way.
        """
        number, handle = next(self._numbers), Rescale(workers)
        with self._lock:
            self._open[number] = handle
        self._executor.ask({"Rescale": {"handle": number, "workers": workers, "free": free}}, handle)
        if handle.error is not None:
            raise handle.error
        return handle

    def _rescaled(self, facts: Mapping[str, Any]) -> None:
        with self._lock:
            handle = self._open.pop(facts["handle"])
        if "Ok" in facts["outcome"]:
            self._resized(handle.workers)
            handle._end(None)
            return
        error = facts["outcome"]["Err"]
        name = error if isinstance(error, str) else next(iter(error))
        handle._end({"NoSlots": SlotsError, "Refused": ConfigError}.get(name, EngineError)(facts["text"]))

    def _break(self, error: EngineError) -> None:
        with self._lock:
            handles = list(self._open.values())
            self._open.clear()
        for handle in handles:
            handle._end(error)
