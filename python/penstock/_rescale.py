"""A change of the number of processes while rows pass, as its user sees it: the same on an engine and in a local run.

Owns: the handle, its wait and its line of progress. Who comes and goes when, and which bins follow, others decide.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from penstock._durations import Timeout, parse_timeout
from penstock._options import yes_or_no
from penstock._stderr import say

__all__ = ["LocalRescale", "Rescale", "RescaleProgress", "RescaleReport"]


@dataclass(frozen=True)
class RescaleProgress:
    """How far a rescale is.

    Attributes
    ----------
    workers : int
        Resident processes that there are to be, of a local run processes; after `Rescale.cancel` the number that it
        goes back to.
    members : int
        Those that have come and stay.
    leaving : int
        Those that are to go and are still there.
    moved : int
        Bins that have moved so far, over all queries.
    bins : int
        Bins that move in all, as far as is known: each query tells when members have come.
    waits : tuple of str
        What is waited for: "2 task slots", "the next batch of query X", "process 3 to start"; empty when it has ended.
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

    #: What there are to be more or less of.
    _noun = "workers"
    #: In which a wait is heard by Ctrl-C.
    _waiting: Callable[[], AbstractContextManager[None]] = staticmethod(contextlib.nullcontext)

    def __init__(
        self, workers: int, look: Callable[[Rescale], RescaleProgress | None], cancel: Callable[[Rescale], None]
    ) -> None:
        self.workers = workers
        self.error: Exception | None = None
        self._began = time.time()
        self._look = look
        self._cancel = cancel
        self._over = threading.Event()
        #: The last that was told, and what it came to.
        self._told = RescaleProgress(workers, 0, 0, 0, 0, ())
        self._ended: RescaleProgress | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, however that was."""
        return self._over.is_set()

    @property
    def progress(self) -> RescaleProgress:
        """How far it is; after its end how far it came."""
        told = None if self.done else self._look(self)
        if told is not None:
            self._told = told
        return self._ended or self._told

    def wait(self, timeout: Timeout | None = None, progress: bool = False) -> int:
        """Wait for the end; returns the number of members. Rows pass meanwhile.

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
            When it was refused, or the engine or the run ended before; or when the sink of a query asks, and its own
            batch has to end before.
        WorkerLost
            When a process of a local run did not come up: then it has gone back.
        TimeoutError
            When it still runs after `timeout`; the message says what it waits for.
        """
        yes_or_no(progress, "wait progress")
        seconds = parse_timeout(timeout, optional=True, least_s=0.0)
        self._require_outside()
        began = time.monotonic()
        deadline = None if seconds is None else began + seconds
        shown = 0
        try:
            with self._waiting():
                while not self._over.wait(0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))):
                    self._require_outside()
                    if progress:
                        text = f"{self._line()}: {time.monotonic() - began:.1f} s"
                        say(f"\r{text:<{shown}}", end="")
                        shown = len(text)
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"the rescale still runs after {seconds:g} s: {self._line()}")
        finally:
            if shown:
                say()
        if self.error is not None:
            raise self.error
        return self.progress.members

    def cancel(self) -> None:
        """Go back to the number of members from before; does not wait, harmless after the end.

        Those that have come leave, as by a rescale of its own, and those that were to go and are still there stay; the
        bins follow. Members that have gone stay away (on an engine their task slots are no longer held): then the
        number that is left is what `wait` returns.
        """
        if not self.done:
            self._cancel(self)

    def _require_outside(self) -> None:
        """Raise where what is waited for waits for who asks."""

    def _line(self) -> str:
        """How it stands, for people."""
        now = self.progress
        parts = [f"{now.members} of {now.workers} {self._noun}"]
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
        name = f"<Rescale to {self.workers} {self._noun}:"
        if not self.done:
            return f"{name} {self._line()}>"
        if self.error is not None:
            return f"{name} failed, {self.error}>"
        return f"{name} done, {self.progress.members} serve>"


@dataclass(frozen=True)
class RescaleReport:
    """What a rescale of a local run took; see `LocalRescale.report`.

    Attributes
    ----------
    before, after : int
        Processes.
    started, ended : float
        Seconds since 1970; `ended` is 0 until then.
    start_s, join_s, move_s, leave_s : float
        Seconds until new processes could be dialled (the interpreters start, and import what they need), then until
        their workers took part, until the bins had moved, and until those that go had left. Rows pass all the time.
    bins : int
        Bins that have moved.
    longest_pause_s : float
        The longest that moving held rows up, in seconds: as of `MigrationReport`.
    """

    before: int
    after: int
    started: float
    ended: float = 0.0
    start_s: float = 0.0
    join_s: float = 0.0
    move_s: float = 0.0
    leave_s: float = 0.0
    bins: int = 0
    longest_pause_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (self.ended or time.time()) - self.started


class LocalRescale(Rescale):
    """A handle on a change of the number of processes of a local run; made by `LocalResults.rescale`."""

    _noun = "processes"

    def __init__(
        self,
        workers: int,
        before: int,
        look: Callable[[Rescale], RescaleProgress | None],
        cancel: Callable[[Rescale], None],
    ) -> None:
        super().__init__(workers, look, cancel)
        self._told = RescaleProgress(workers, before, 0, 0, 0, ())
        self._report = RescaleReport(before, before, self._began)
        self._mark = time.monotonic()
        self._cancelled = False
        #: Why it goes back, where nobody asked for it.
        self._failure: Exception | None = None

    @property
    def report(self) -> RescaleReport:
        """What it has taken so far, step by step; after its end all of it."""
        return self._report

    def _step(self, step: str) -> None:
        """A step has ended: what has passed since the one before is its time."""
        now = time.monotonic()
        self._report = replace(self._report, **{step: getattr(self._report, step) + now - self._mark})
        self._mark = now

    def _moved(self, bins: int, longest_pause_s: float) -> None:
        told = self._report
        longest = max(told.longest_pause_s, longest_pause_s)
        self._report = replace(told, bins=told.bins + bins, longest_pause_s=longest)

    def _over_with(self, processes: int, error: Exception | None) -> None:
        self._report = replace(self._report, after=processes, ended=time.time())
        if error is None:
            self._come(processes, self._report.bins)
        else:
            self._end(error)
