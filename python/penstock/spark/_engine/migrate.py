"""The handle on the migrations of an engine's queries.

Owns: following the moves of one or several queries to their ends. Whose turn it is and what then moves is decided by
the engine's protocol; the form of what a user asks for is `penstock._migration`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock._durations import Timeout
from penstock._migration import MigrationReport, MigrationStep, follow
from penstock.errors import EngineError, PenstockError
from penstock.spark._engine.interrupts import plain_interrupts

__all__ = ["Migration", "MoveReport"]


@dataclass
class MoveReport:
    """What the migration of one query did.

    Attributes
    ----------
    query : str
        Its name.
    strategy : str
        As asked for.
    started, ended : float
        Seconds since 1970: its turn, before that the call; `ended` is 0 until then.
    bins, bytes : int
        Bins moved, and bytes of state that went between processes, over all members.
    steps : tuple of MigrationStep
        One after the other.
    error : str
        Why it did not finish, or empty.
    """

    query: str
    strategy: str
    started: float = 0.0
    ended: float = 0.0
    bins: int = 0
    bytes: int = 0
    steps: tuple[MigrationStep, ...] = ()
    error: str = ""


class Migration:
    """A handle on moves that are under way.

    Attributes
    ----------
    done : bool
        Whether it has ended, well or not.
    error : Exception or None
        Why it did not finish: a failure or restart of the query cancels it.
    reports : list of MoveReport
        One for each query.
    """

    def __init__(self, outside: Callable[[str], None] = lambda query: None) -> None:
        #: Refuses a sink of a query, by its name, that would wait for itself.
        self._outside = outside
        self._changed = threading.Condition()
        self._open = 0
        self._planned = 0
        self._sealed = False
        self._cancels: list[Callable[[], None]] = []
        self.error: Exception | None = None
        self.reports: list[MoveReport] = []

    # For the engine

    def begin(self, report: MoveReport) -> Callable[[Mapping[str, Any] | None, Exception | None], None]:
        """Enter the moves of one query; returns what to call at their end."""
        with self._changed:
            self._open += 1
            self.reports.append(report)
        report.started = time.time()

        def end(answer: Mapping[str, Any] | None, error: Exception | None) -> None:
            with self._changed:
                report.ended = time.time()
                if answer is not None:
                    report.bins = int(answer.get("moved", 0))
                    report.bytes = int(answer.get("bytes", 0))
                    report.steps = tuple(MigrationStep(**step, query=report.query) for step in answer.get("steps", []))
                if error is not None:
                    report.error = str(error)
                    self.error = self.error or error
                self._open -= 1
                self._changed.notify_all()

        return end

    def planned(self, report: MoveReport, bins: int) -> None:
        """Their turn has come, and so many bins move."""
        with self._changed:
            self._planned += bins
            report.started = time.time()

    def cancellable(self, cancel: Callable[[], None]) -> None:
        """Enter what ends the moves of one query."""
        with self._changed:
            self._cancels.append(cancel)

    def seal(self) -> None:
        """All queries have been entered."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    # For the user

    @property
    def done(self) -> bool:
        return self._wait(0)

    @property
    def report(self) -> MigrationReport:
        """What was done so far, of all queries together."""
        with self._changed:
            reports = list(self.reports)
        return MigrationReport(
            strategy=reports[0].strategy if reports else "",
            started=min((report.started for report in reports), default=0.0),
            ended=max((report.ended for report in reports), default=0.0) if self.done else 0.0,
            bins=sum(report.bins for report in reports),
            bytes=sum(report.bytes for report in reports),
            steps=tuple(step for report in reports for step in report.steps),
            queries=tuple(report.query for report in reports),
        )

    def wait(self, timeout: Timeout | None = None, progress: bool = False) -> MigrationReport:
        """Wait for the end.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds, or a duration; default without limit.
        progress : bool, default False
            Show a line on stderr while waiting.

        Returns
        -------
        MigrationReport
            `report`.

        Raises
        ------
        EngineError
            When it failed, or a failure or restart of the query cut it off; the state is where the query says it is
            (`Engine.owners`). Or when the sink of a query asks whose own batch has to end before it begins
            (``at_epoch``). After `cancel` it does not: the report tells what was done.
        TimeoutError
            When it still runs after `timeout`.
        """
        with self._changed:
            waits = [report.query for report in self.reports if not report.ended]
        for query in waits:
            self._outside(query)
        with plain_interrupts():
            follow(self._wait, timeout, progress, lambda: self._planned)
        if self.error is not None:
            if isinstance(self.error, PenstockError):
                raise self.error
            raise EngineError(f"the migration failed: {self.error}") from self.error
        return self.report

    def cancel(self) -> None:
        """Issue no further step; the one under way is completed, and `wait` returns what was done.

        Every bin is with one worker then. Does not wait itself. Harmless after the end.
        """
        with self._changed:
            cancels = list(self._cancels)
        for cancel in cancels:
            cancel()

    def _wait(self, seconds: float) -> bool:
        """Wait for so long at most; says whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._sealed and self._open == 0, max(0.0, seconds))

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "running"
        return f"<Migration {state}: {self._planned} bins, {len(self.reports)} queries>"
