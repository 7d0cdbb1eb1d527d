"""Moving bins while a flow runs: what is to move, in which steps, and what is told of it.

Owns: the checks of what a user asks for, the balanced target, the plan, and the report; the same for `LocalSession`
and ``penstock.Engine``. The moves themselves are made by the workers. All keyed steps of a flow move together: where a
bin moves, it does in each of them.

Source: Megaphone (VLDB 2019), section 4.3: all-at-once, fluid and batched; section 4.4: matched, and a gap that drains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from penstock._durations import Timeout, parse_timeout
from penstock._options import whole, yes_or_no
from penstock._stderr import say
from penstock.errors import ConfigError

__all__ = [
    "STRATEGIES",
    "Cut",
    "Migration",
    "MigrationReport",
    "MigrationStep",
    "Move",
    "Wish",
    "balanced",
    "evened",
    "flat_target",
    "follow",
    "moves_to",
    "parse_by",
    "parse_epoch",
    "parse_moves",
    "parse_target",
    "parse_tolerance",
    "steps",
]

#: Names of the strategies.
STRATEGIES = ("batched", "all-at-once", "fluid", "matched")

#: Of any flow.
_MOST_BINS = 1 << 20
_MOST_EPOCHS = 1 << 63
#: 30 days: what the engine's protocol counts in milliseconds of 32 bits.
_LONGEST_PAUSE_S = 30 * 86_400.0

Move = tuple[int, int]


@dataclass(frozen=True)
class MigrationStep:
    """Bins that moved at one time.

    Attributes
    ----------
    step : int
        Its number, from 0.
    bins : int
        How many bins it moved.
    started_ns, ended_ns : int
        Nanoseconds since 1970.
    paused_ns : int
        How long it held up the rows of its bins, watermarks and ends of epochs at most: from the end of all rows before
        it to its own.
    epoch : int
        The epoch in which it took effect.
    query : str
        The query of an engine whose bins they are; empty on the local host.
    """

    step: int
    bins: int
    started_ns: int
    ended_ns: int
    paused_ns: int = 0
    query: str = ""
    epoch: int = 0


@dataclass(frozen=True)
class MigrationReport:
    """What a migration has done.

    Attributes
    ----------
    strategy : str
        As asked for.
    started, ended : float
        Seconds since 1970: its turn, before that the call; `ended` is 0 until then.
    bins : int
        Bins that have moved.
    bytes : int
        Bytes of state that went between processes.
    steps : tuple of MigrationStep
        One after the other.
    queries : tuple of str
        Names of the queries of an engine; empty on the local host.
    """

    strategy: str
    started: float
    ended: float = 0.0
    bins: int = 0
    bytes: int = 0
    steps: tuple[MigrationStep, ...] = ()
    queries: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (self.ended or time.time()) - self.started

    @property
    def longest_pause_s(self) -> float:
        """The longest that any step held rows up, in seconds."""
        return max((step.paused_ns for step in self.steps), default=0) / 1e9


@runtime_checkable
class Migration(Protocol):
    """A handle on moves that are under way; what `LocalSession.migrate` and ``Engine.migrate`` give."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""

    @property
    def report(self) -> MigrationReport:
        """What it has done so far."""

    def wait(self, timeout: Timeout | None = None, progress: bool = False) -> MigrationReport:
        """Wait for the end.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds, or a duration; default without limit.
        progress : bool, default False
            Show a line on stderr while waiting.

        Raises
        ------
        EngineError
            When it failed, or the workers have ended.
        TimeoutError
            When it still runs then; it goes on.
        """

    def cancel(self) -> None:
        """Begin no further step; the one under way is completed, and `wait` tells what was done."""


def follow(ended: Callable[[float], bool], timeout: Timeout | None, progress: bool, bins: Callable[[], int]) -> None:
    """Wait as `Migration.wait` does.

    Parameters
    ----------
    ended : callable
        Waits for so many seconds at most, and says whether it has ended.
    timeout, progress
        As for `Migration.wait`.
    bins : callable
        How many are to move, for the line.

    Raises
    ------
    TimeoutError
        When it still runs then.
    """
    yes_or_no(progress, "wait progress")
    began = time.monotonic()
    seconds = parse_timeout(timeout, optional=True, least_s=0.0)
    deadline = None if seconds is None else began + seconds
    shown = False
    try:
        while not ended(0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the migration still runs after {seconds:g} s")
            if progress:
                shown = True
                text = f"\rmoving {bins()} bins: {time.monotonic() - began:.1f} s"
                say(text, end="")
    finally:
        if shown:
            say()


@dataclass(frozen=True)
class Cut:
    """How a migration is cut into steps.

    Attributes
    ----------
    strategy : {"batched", "all-at-once", "fluid", "matched"}
        Steps of `batch_size` bins; one step; one bin a step; steps in which each worker sends `batch_size` bins to at
        most one other and receives from at most one.
    batch_size : int
        For "batched" and "matched".
    max_pause_s : float, optional
        Steps are taken together as long as none holds rows up for longer than so many seconds.
    drains : bool
        Before each step but the first what waited when the one before was complete is worked off.
    """

    strategy: str
    batch_size: int
    max_pause_s: float | None
    drains: bool = False

    @classmethod
    def of(cls, strategy: str, batch_size: int | None, max_pause: Timeout | None = None, gap: str | None = None) -> Cut:
        """What a user wrote.

        Raises
        ------
        ConfigError
            For another strategy or gap, a size below 1, a pause below a millisecond, or either for "all-at-once".

        Examples
        --------
        >>> Cut.of("batched", None, None).batch_size, Cut.of("matched", None, "50ms")
        (16, Cut(strategy='matched', batch_size=1, max_pause_s=0.05, drains=False))
        """
        if strategy not in STRATEGIES:
            raise ConfigError(f"strategy {strategy!r} is none of {', '.join(STRATEGIES)}")
        seconds = None
        if max_pause is not None:
            seconds = parse_timeout(max_pause, "max_pause", least_s=0.001, most_s=_LONGEST_PAUSE_S)
        if seconds is not None and strategy == "all-at-once":
            raise ConfigError("strategy 'all-at-once' is one step, whatever max_pause says: choose another one")
        if gap is not None and gap != "drain":
            raise ConfigError(f"gap={gap!r} is neither 'drain' nor None")
        if gap is not None and strategy == "all-at-once":
            raise ConfigError("strategy 'all-at-once' is one step, so there is no gap: choose another one")
        size = (1 if seconds is not None else 16) if batch_size is None else whole(batch_size, 1)
        if size is None:
            raise ConfigError(f"batch_size={batch_size!r} must be an int of at least 1")
        if batch_size is not None and strategy in ("fluid", "all-at-once"):
            is_what = "a step of strategy 'fluid' is of one bin"
            if strategy == "all-at-once":
                is_what = "the step of strategy 'all-at-once' is all bins"
            raise ConfigError(
                f"batch_size={batch_size!r} has no effect: {is_what}; use 'batched' or 'matched', or leave it out"
            )
        return cls(strategy, min(size, _MOST_BINS), seconds, gap is not None)

    def told(self) -> dict[str, Any]:
        """As the engine's protocol has it."""
        sized = {"batched": "Batched", "matched": "Matched"}.get(self.strategy)
        plain = {"fluid": "Fluid", "all-at-once": "AllAtOnce"}.get(self.strategy)
        pause = None if self.max_pause_s is None else max(1, round(self.max_pause_s * 1000))
        strategy = {sized: {"size": self.batch_size}} if sized else plain
        return {"strategy": strategy, "max_pause_ms": pause, "drains": self.drains}


@dataclass(frozen=True)
class Wish:
    """What somebody asked to move.

    Attributes
    ----------
    to : sequence, optional
        The worker of each bin afterwards.
    moves : list of (bin, worker), optional
        Only these bins. With neither, bins are spread evenly.
    cut : Cut
        In which steps.
    """

    to: tuple[Any, ...] | None
    moves: tuple[Any, ...] | None
    cut: Cut

    @classmethod
    def of(
        cls,
        to: Sequence[int] | None,
        moves: Mapping[int, int] | Iterable[Move] | None,
        cut: Cut,
        bins: int,
        workers: int,
    ) -> Wish:
        """What a user wrote, checked as far as it can be without the owners.

        Raises
        ------
        ConfigError
            When a bin or worker does not exist, or both `to` and `moves` are given.
        """
        if to is not None and moves is not None:
            raise ConfigError("migrate takes to= or moves=, not both")
        chosen = None if moves is None else tuple(parse_moves(moves, bins, workers))
        return cls(None if to is None else parse_target(to), chosen, cut)

    def plan(
        self, owners: Sequence[Sequence[int]], workers: int, bins: int, name: str, doubtful: Collection[int] = ()
    ) -> list[Move]:
        """The moves from these owners, by keyed step. Doubtful bins may be elsewhere by then: they are in it anyhow.

        Raises
        ------
        ConfigError
            When a bin or worker does not exist, whoever owns what.
        """
        known: Sequence[Sequence[int]] = owners
        if doubtful:
            known = [[-1 if bin_ in doubtful else worker for bin_, worker in enumerate(op)] for op in owners]
        if self.moves is not None:
            todo = parse_moves(self.moves, bins, workers)
        elif self.to is not None:
            todo = moves_to(known, self.to, workers) if owners else []
        else:
            todo = moves_to(known, balanced(owners[0], workers), workers) if owners else []
        if not owners and todo:
            raise ConfigError(f"{name} keeps no state: it has no bins to move")
        return [(bin_, worker) for bin_, worker in todo if any(op[bin_] != worker for op in known)]


def steps(owners: Sequence[Sequence[int]], moves: Sequence[Move], cut: Cut) -> list[list[Move]]:
    """Cut moves into steps; a step's bins move at one time, the next step waits for them.

    Parameters
    ----------
    owners : list of list of int
        Worker of each bin now, by keyed step.
    moves : sequence of (bin, worker)
        Bins differ, and each is elsewhere in some keyed step, or may be.
    cut : Cut
        How.

    Examples
    --------
    >>> steps([[0, 0, 1, 0]], [(0, 1), (1, 1), (2, 0)], Cut.of("batched", 2, None))
    [[(0, 1), (1, 1)], [(2, 0)]]
    >>> steps([[0, 0, 1, 0]], [(0, 1), (1, 1), (2, 0)], Cut.of("matched", 1, None))
    [[(0, 1), (2, 0)], [(1, 1)]]
    """
    from penstock import _native

    if not moves:
        return []
    before, after = list(owners[0]), list(owners[0])
    for bin_, worker in moves:
        before[bin_] = next((step[bin_] for step in owners if step[bin_] != worker), worker + 1)
        after[bin_] = worker
    return _native.migration_steps(before, after, cut.strategy, cut.batch_size)


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
        bin_, worker = map(whole, pair) if len(pair) == 2 else (None, None)
        if bin_ is None or worker is None:
            raise ConfigError(f"a move is (bin, worker), two ints, not {pair!r}")
        if not 0 <= bin_ < bins:
            raise ConfigError(f"there is no bin {bin_}: there are bins 0 to {bins - 1}")
        if not 0 <= worker < workers:
            raise ConfigError(f"there is no worker {worker}: there are workers 0 to {workers - 1}")
        if bin_ in found:
            raise ConfigError(f"bin {bin_} is to move twice")
        found[bin_] = worker
    return sorted(found.items())


def parse_epoch(at_epoch: int | None) -> int | None:
    """The epoch that a migration is prepared for.

    Raises
    ------
    ConfigError
        When it is no int from 0 to 2**63.
    """
    epoch = whole(at_epoch, 0, _MOST_EPOCHS)
    if at_epoch is not None and epoch is None:
        raise ConfigError(f"at_epoch={at_epoch!r} must be the number of an epoch to come, an int from 0 to 2**63")
    return epoch


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


def flat_target(target: Iterable[Any], steps: int) -> list[Any]:
    """One list of owners, where there may be one for each of so many keyed steps.

    Raises
    ------
    ConfigError
        When it is no list, or those of the steps differ.

    Examples
    --------
    >>> flat_target([[0, 1], [0, 1]], 2)
    [0, 1]
    """
    wanted = list(parse_target(target))
    if wanted and len(wanted) == steps and all(isinstance(step, Sequence) for step in wanted):
        first = wanted[0]
        if any(list(step) != list(first) for step in wanted):
            raise ConfigError("all keyed steps of a flow move together: give one list of owners")
        return list(first)
    return wanted


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
    wanted = flat_target(target, len(owners))
    if len(wanted) != bins:
        raise ConfigError(f"to= has {len(wanted)} owners; there are {bins} bins")
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
    from penstock import _native

    return _native.balanced_owners(owners, workers)


def evened(owners: Sequence[int], loads: Sequence[int], workers: int, tolerance: float) -> list[int]:
    """Owners by which no worker has more than `tolerance` times the mean load, where bins allow it; few bins move.

    Raises
    ------
    ConfigError
        When there is not a load for each bin, or the tolerance is below 1.

    Examples
    --------
    >>> evened([0, 0, 0, 1], [50, 30, 20, 10], 2, 1.2)
    [1, 0, 0, 1]
    """
    from penstock import _native

    return _native.evened_owners(owners, loads, workers, parse_tolerance("tolerance", tolerance))


def parse_tolerance(name: str, value: float) -> float:
    """A multiple of the mean load.

    Raises
    ------
    ConfigError
        When it is no number of at least 1.
    """
    found = math.nan
    # An int may be larger than any float; what numpy registers as a number need not be one.
    with suppress(OverflowError, TypeError, ValueError):
        found = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 1.0 <= found < math.inf:
        raise ConfigError(f"{name}={value!r} must be a multiple of the mean load, at least 1: 1.2 allows a fifth more")
    return found


def parse_by(by: str) -> str:
    """What shares are measured by.

    Raises
    ------
    ConfigError
        When it is none of them.
    """
    if by not in ("bins", "rows", "busy"):
        raise ConfigError(
            f"by={by!r} is none of 'bins' (equal numbers), 'rows' (equal numbers of rows) and 'busy' (equal time that"
            " they keep workers busy)"
        )
    return by
