"""How the benches measure, and the shape of a result.

Owns: budgets, turns, repeats, medians. Invariants: both sides run in turn and neither is always first, or the line says
that one ran after the other and has no ratios of pairs; a ratio above 1 means that ours is better by that factor;
`ours` and `peer` are medians and `ratio` is their quotient, or the median of the pairs where ``ratio_of`` of the
conditions says so, or None where ``no_ratio`` says why (migrations that are not above rest); a pair from which the
machine's host took CPU is repeated while there is time, and a line that has one is marked. The twin of
``benches/rust/src/harness.rs``.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_bench import machine

__all__ = [
    "LEAST",
    "ONE_AFTER_THE_OTHER",
    "PAIRS",
    "Better",
    "Emit",
    "Line",
    "Options",
    "Paired",
    "Tell",
    "compare",
    "going",
    "line",
    "versions",
]

#: One result, ready for JSON.
Line = dict[str, Any]
Better = Literal["lower", "higher"]
#: Takes each result as soon as it is there.
Emit = Callable[[Line], None]
#: Takes lines on how it goes.
Tell = Callable[[str], None]

LEAST, MOST = 3, 201
#: Condition `sides` of lines whose sides did not run in turn.
ONE_AFTER_THE_OTHER = "one after the other"
#: Condition `ratio_of` of lines whose pairs are of different work, so that medians over them are not comparable.
PAIRS = "pairs"
#: When a quick bench has to come to its end, seconds after it began.
QUICK_S = 38.0


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes
    ----------
    quick : bool
        Fewer or smaller cases, so that the bench ends within 50 s.
    seconds : float or None
        Budget of the whole bench; None leaves it to the bench.
    full : bool
        Larger cases, too.
    cores : int
        CPUs that it may use.
    """

    quick: bool = False
    seconds: float | None = None
    full: bool = False
    cores: int = machine.CORES
    begun: float = field(default_factory=time.monotonic, compare=False)

    def left(self) -> float:
        """Return the seconds until a quick bench has to come to its end; no limit otherwise."""
        return self.begun + QUICK_S - time.monotonic() if self.quick else float("inf")

    def budget(self, cases: int, *, quick: float, full: float) -> float:
        """Return the seconds for one of `cases` cases, given what the whole takes by default."""
        whole = self.seconds if self.seconds is not None else (quick if self.quick else full)
        return whole / max(1, cases)


@dataclass
class Paired:
    """The figures of both sides, one of each per repeat, and what the CPUs did meanwhile.

    `again` pairs were set aside because the host took CPU from them, and measured again.
    """

    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    own_cpu: float | None = None
    foreign_cpu: float | None = None
    stolen_cpu: float | None = None
    again: int = 0
    #: Whether pairs from which the host took CPU are among the figures: there was no time for enough others.
    disturbed: bool = False

    @property
    def noisy(self) -> bool:
        """Whether these figures are doubtful."""
        taken = self.disturbed if self.again else (self.stolen_cpu or 0.0) > machine.NOISY
        return taken or (self.foreign_cpu or 0.0) > machine.NOISY


def compare(
    budget: float,
    ours: Callable[[], float],
    peer: Callable[[], float],
    *,
    warm: int = 1,
    least: int = LEAST,
    left: Callable[[], float] = Options().left,
) -> Paired:
    """Run both sides in turn until the budget is spent.

    Parameters
    ----------
    budget : float
        Seconds, the turns that do not count included.
    ours, peer : callable
        Each does one repeat and returns its figure.
    warm : int, default 1
        Turns that do not count.
    least : int, default 3
        Turns that count even when the budget is spent.
    left : callable, optional
        Seconds until all has to end; then one turn is enough.

    Returns
    -------
    Paired
        Equally many figures of both, of pairs from which the host took nothing; where the budget does not last for
        `least` of these, others with them.
    """
    begin = time.monotonic()
    for _ in range(warm):
        ours()
        peer()
    meter = machine.Meter()
    quiet: list[tuple[float, float]] = []
    disturbed: list[tuple[float, float]] = []
    longest = 0.0
    while True:
        turns = len(quiet) + len(disturbed)
        within = time.monotonic() - begin + longest <= budget
        if not going(len(quiet) if within and left() > 0 and turns else turns, least, within, left()):
            break
        turn, taken = time.monotonic(), machine.stolen()
        if turns % 2 == 0:
            mine = ours()
            pair = mine, peer()
        else:
            other = peer()
            pair = ours(), other
        took = time.monotonic() - turn
        longest = max(longest, took)
        (disturbed if _taken_since(taken) > machine.NOISY * took else quiet).append(pair)
    usage = meter.stop()
    used = quiet + disturbed[: max(0, least - len(quiet))]
    return Paired(
        [pair[0] for pair in used],
        [pair[1] for pair in used],
        *usage,
        again=len(disturbed),
        disturbed=len(used) > len(quiet),
    )


def _taken_since(before: float | None) -> float:
    after = machine.stolen()
    return 0.0 if before is None or after is None else after - before


def going(done: int, least: int, within: bool, left: float) -> bool:
    """Whether another turn is made: at least one, more while there is time.

    Examples
    --------
    >>> [going(0, 3, False, -1), going(1, 3, True, -1), going(1, 3, False, 9), going(3, 3, True, 9)]
    [True, False, True, True]
    """
    return done == 0 or (left > 0 and done < MOST and (done < least or within))


def line(
    name: str,
    case: str,
    unit: str,
    better: Better,
    paired: Paired,
    options: Options,
    conditions: Mapping[str, Any],
    *,
    in_turn: bool = True,
) -> Line:
    """Make a result.

    Parameters
    ----------
    name, case, unit : str
        The bench; the parameters and the peer; of `ours` and `peer`.
    better : {"lower", "higher"}
        Times or rates.
    paired : Paired
        The figures.
    options : Options
        What was asked for.
    conditions : mapping
        What else one must know to repeat or judge the figure; ``versions`` are merged with ours.
    in_turn : bool, default True
        False where all repeats of one side came before those of the other, so that they make no pairs.

    Examples
    --------
    >>> made = line("b", "c vs d", "s", "lower", Paired([1.0], [2.0]), Options(), {})
    >>> made["ours"], made["peer"], made["ratio"]
    (1.0, 2.0, 2.0)
    """
    from penstock import _native

    pairs = [_ratio(better, ours, peer) for ours, peer in zip(paired.ours, paired.peer, strict=True)]
    ours, peer = statistics.median(paired.ours), statistics.median(paired.peer)
    own = dict(conditions) if in_turn else {"sides": ONE_AFTER_THE_OTHER, **conditions}
    return {
        "name": name,
        "case": case,
        "unit": unit,
        "ours": ours,
        "peer": peer,
        "ratio": _ratio(better, ours, peer),
        "ours_range": _range(paired.ours),
        "peer_range": _range(paired.peer),
        "conditions": {
            "versions": versions() | dict(own.pop("versions", {})),
            "cores": machine.cores(),
            "cpu": machine.cpu(),
            "profile": _native.profile(),
            "quick": options.quick,
            "repeats": len(paired.ours),
            "better": better,
            "ratio_of": "medians",
            "paired_ratio": statistics.median(pairs) if in_turn else None,
            "paired_ratio_range": _range(pairs) if in_turn else None,
            "own_cpu": paired.own_cpu,
            "foreign_cpu": paired.foreign_cpu,
            "stolen_cpu": paired.stolen_cpu,
            "pairs_again": paired.again,
            "noisy": paired.noisy,
            "load": machine.load(),
        }
        | own,
    }


def versions() -> dict[str, str]:
    """What runs here: penstock, Python, pyarrow."""
    import pyarrow as pa

    from penstock import _native

    return {"penstock": _native.version(), "python": platform.python_version(), "pyarrow": pa.__version__}


def _ratio(better: Better, ours: float, peer: float) -> float:
    return peer / ours if better == "lower" else ours / peer


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]
