"""Moving bins while a query runs: what to move, in which steps, and a handle on it.

Owns: the checks of what a user asks for, the balanced target, and `Migration`, which follows the moves of one or
several queries; whose turn it is, `moves` knows. The moves themselves are made by the workers, at a slice of the epoch
that runs, or between epochs.

Source: Megaphone (VLDB 2019), section 4.3: all-at-once, fluid and batched.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock._durations import Timeout, parse_timeout
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.spark._engine.hub import plain_interrupts

__all__ = ["STRATEGIES", "Migration", "MoveReport", "balanced", "moves_to", "parse_moves", "parse_target", "steps"]

#: Names of the strategies.
STRATEGIES = ("batched", "all-at-once", "fluid")

Move = tuple[int, int]


def steps(owners: Sequence[Sequence[int]], moves: Sequence[Move], strategy: str, batch_size: int) -> list[list[Move]]:
    """Cut moves into steps; a step's bins move at one time, the next step waits for them.

    Parameters
    ----------
    owners : list of list of int
        Worker of each bin now, by keyed step.
    moves : sequence of (bin, worker)
        Bins differ, and each is elsewhere in some keyed step.
    strategy : {"batched", "all-at-once", "fluid"}
        Steps of `batch_size` bins, one step, or one bin a step.
    batch_size : int
        Only for "batched".

    Raises
    ------
    ConfigError
        For another strategy, or a size below 1.

    Examples
    --------
    >>> steps([[0, 0, 1, 0]], [(0, 1), (1, 1), (2, 0)], "batched", 2)
    [[(0, 1), (1, 1)], [(2, 0)]]
    """
    from penstock import _native

    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r} must be an int of at least 1")
    if not moves:
        return []
    before, after = list(owners[0]), list(owners[0])
    for bin_, worker in moves:
        before[bin_] = next(step[bin_] for step in owners if step[bin_] != worker)
        after[bin_] = worker
    return _native.migration_steps(before, after, strategy, batch_size)


def parse_moves(moves: Mapping[int, int] | Iterable[Move], bins: int, workers: int) -> list[Move]:
    """Check the moves that a user wrote.

    Raises
    ------
    ConfigError
        When a bin or worker does not exist, or a bin is named twice.

    Examples
    --------
    >>> parse_moves({3: 1, 0: 1}, 4, 2)
    [(0, 1), (3, 1)]
    """
    try:
        pairs = list(moves.items()) if isinstance(moves, Mapping) else [tuple(move) for move in moves]
    except TypeError:
        raise ConfigError(f"moves={moves!r} must be a dict of bin to worker, or (bin, worker) pairs") from None
    found: dict[int, int] = {}
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, int) and not isinstance(part, bool) for part in pair):
            raise ConfigError(f"a move is (bin, worker), two ints, not {pair!r}")
        bin_, worker = pair
        if not 0 <= bin_ < bins:
            raise ConfigError(f"there is no bin {bin_}: the query has bins 0 to {bins - 1}")
        if not 0 <= worker < workers:
            raise ConfigError(f"there is no worker {worker}: the query has workers 0 to {workers - 1}")
        if bin_ in found:
            raise ConfigError(f"bin {bin_} is to move twice")
        found[bin_] = worker
    return sorted(found.items())


def parse_target(to: Iterable[Any]) -> tuple[Any, ...]:
    """A copy of the target owners that a user wrote.

    Raises
    ------
    ConfigError
        When it is no list.
    """
    try:
        return tuple(to)
    except TypeError:
        raise ConfigError(f"to={to!r} must be a list of workers, one for each bin") from None


def moves_to(owners: Sequence[Sequence[int]], target: Sequence[int], workers: int) -> list[Move]:
    """The moves from the present owners (per keyed step) to a target owner for each bin.

    Raises
    ------
    ConfigError
        When the target does not name one worker for each bin.

    Examples
    --------
    >>> moves_to([[0, 1, 0]], [0, 0, 1], 2)
    [(1, 0), (2, 1)]
    """
    bins = len(owners[0]) if owners else 0
    wanted = list(target)
    if len(wanted) == len(owners) and wanted and all(isinstance(step, Sequence) for step in wanted):
        first: Any = wanted[0]
        if any(list(step) != list(first) for step in wanted):  # type: ignore[call-overload]
            raise ConfigError("all keyed steps of a query move together: give one list of owners")
        wanted = list(first)
    if len(wanted) != bins:
        raise ConfigError(f"to= has {len(wanted)} owners; the query has {bins} bins")
    moves = parse_moves(enumerate(wanted), bins, workers)
    return [(bin_, worker) for bin_, worker in moves if any(step[bin_] != worker for step in owners)]


def balanced(owners: Sequence[int], workers: int) -> list[int]:
    """Owners with equal shares, up to one bin, that differ from the present ones in as few bins as possible.

    Examples
    --------
    >>> balanced([0, 0, 0, 0], 2)
    [0, 0, 1, 1]
    >>> balanced([0, 1, 1, 0], 2)
    [0, 1, 1, 0]
    """
    held: list[list[int]] = [[] for _ in range(workers)]
    for bin_, owner in enumerate(owners):
        held[owner].append(bin_)
    # Workers with many bins get the shares that are one larger.
    share, rest = divmod(len(owners), workers)
    ranked = sorted(range(workers), key=lambda worker: -len(held[worker]))
    quota = {worker: share + (place < rest) for place, worker in enumerate(ranked)}
    result = list(owners)
    spare = iter([bin_ for worker in ranked for bin_ in held[worker][quota[worker] :]])
    for worker in range(workers):
        for bin_ in itertools.islice(spare, max(0, quota[worker] - len(held[worker]))):
            result[bin_] = worker
    return result


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
    steps : list of dict
        ``step``, ``bins``, ``started_ns``, ``ended_ns`` (nanoseconds since 1970) of each step.
    error : str
        Why it did not finish, or empty.
    """

    query: str
    strategy: str
    started: float = 0.0
    ended: float = 0.0
    bins: int = 0
    bytes: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
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

    def __init__(self) -> None:
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
                    report.steps = [dict(step) for step in answer.get("steps", [])]
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
    def report(self) -> dict[str, Any]:
        """The figures of all queries together: strategy, started, ended, bins (alias moved), bytes, steps."""
        with self._changed:
            reports = list(self.reports)
        return {
            "strategy": reports[0].strategy if reports else "",
            "started": min((report.started for report in reports), default=0.0),
            "ended": max((report.ended for report in reports), default=0.0),
            "seconds": max((r.ended for r in reports), default=0.0) - min((r.started for r in reports), default=0.0),
            "moved": sum(report.bins for report in reports),
            "bins": sum(report.bins for report in reports),
            "bytes": sum(report.bytes for report in reports),
            "steps": [{"query": report.query, **step} for report in reports for step in report.steps],
            "queries": [report.query for report in reports],
        }

    def wait(self, timeout: Timeout | None = None, progress: bool = False) -> dict[str, Any]:
        """Wait for the end.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds; default forever.
        progress : bool, default False
            Show a line on stderr while waiting.

        Returns
        -------
        dict
            `report`.

        Raises
        ------
        EngineError
            When it was cancelled or failed; the state is where the query says it is (`Engine.owners`).
        TimeoutError
            When it still runs after `timeout`.
        """
        began = time.monotonic()
        seconds = parse_timeout(timeout, least_s=0.0)
        deadline = None if seconds is None else began + seconds
        shown = False
        try:
            with plain_interrupts():
                while not self._wait(0.1 if deadline is None else min(0.1, deadline - time.monotonic())):
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError(f"the migration still runs after {seconds:g} s")
                    if progress:
                        shown = True
                        text = f"\rmoving {self._planned} bins: {time.monotonic() - began:.1f} s"
                        print(text, end="", file=sys.stderr, flush=True)
        finally:
            if shown:
                print(file=sys.stderr, flush=True)
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
