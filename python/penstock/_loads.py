"""What the bins of a flow get and cost: what workers count, added up, and shared out to bins and parts.

Owns: the sum over processes, what came between two looks, and the time that a bin keeps workers busy. A worker tells of
each keyed step how many rows each bin got (by sample), how long calls of users' functions took for single bins, how
many rows it made of rows that meet many (pairs of a join, by sample), and how long the step took beside such calls.
That rest is every bin's in proportion to its rows and what was made for them, whichever worker had them and whenever
they came: what a worker spends on each block, however few rows it has, is no property of its bins. So where no function
is called and there is one keyed step, loads by time are those by rows.

Steps without state are not in it: those before a keyed step run where rows come in, not where their bins are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from penstock._parts import Part, Parts

__all__ = ["Loads"]

#: Counts of a step by bin and by part of one, which count among those of their bins.
_COUNTS = ("rows", "met", "spent_ns")


class _Step:
    """Counts of one keyed step; those of a kind that nobody has told are empty."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        #: Time that belongs to no bin alone, and the rows it was for: since the workers began, also of what came since.
        self.rest_ns = int(told.get("rest_ns", 0))
        self.rest_rows = sum(told.get("rows", ())) + sum(told.get("met", ()))
        self.bins: dict[str, list[int]] = {name: list(told.get(name, ())) for name in _COUNTS}
        self.parts: dict[str, Counter[int]] = {
            name: Counter({int(number): count for number, count in told.get(f"part_{name}", {}).items()})
            for name in _COUNTS
        }

    def combined(self, other: _Step, sign: int) -> _Step:
        """Each count with that of another step, or without it: none is below 0."""
        found = _Step({})
        found.rest_ns, found.rest_rows = self.rest_ns, self.rest_rows
        if sign > 0:
            found.rest_ns, found.rest_rows = self.rest_ns + other.rest_ns, self.rest_rows + other.rest_rows
        for name in _COUNTS:
            pairs = zip_longest(self.bins[name], other.bins[name], fillvalue=0)
            found.bins[name] = [max(0, mine + sign * theirs) for mine, theirs in pairs]
            both = Counter(self.parts[name])
            (both.update if sign > 0 else both.subtract)(other.parts[name])
            found.parts[name] = +both
        return found

    def of(self, name: str, plan: Parts) -> dict[Part, int]:
        """A count of each bin and part."""
        bins = self.bins[name]
        return plan.rows([*bins, *[0] * ((1 << plan.bits) - len(bins))], self.parts[name])

    def busy_ns(self, plan: Parts) -> dict[Part, float]:
        """Nanoseconds of each bin and part."""
        weights, met, spent = self.of("rows", plan), self.of("met", plan), self.of("spent_ns", plan)
        each = self.rest_ns / self.rest_rows if self.rest_rows else 0.0
        return {part: spent[part] + each * (weight + met[part]) for part, weight in weights.items()}


class Loads:
    """Counts of all keyed steps, since the workers began or between two looks.

    Parameters
    ----------
    steps : iterable of mapping
        As workers tell them (``StepLoads`` of the crate plan), one for each keyed step.

    Examples
    --------
    >>> told = [{"rows": [10, 30], "rest_ns": 40, "spent_ns": [0, 500]}]
    >>> halves = Parts(1, {(0, 1): 0, (1, 1): 1})
    >>> Loads(told).rows(halves), Loads(told).busy_ns(halves)
    ({(0, 1): 10, (1, 1): 30}, {(0, 1): 10, (1, 1): 530})
    """

    def __init__(self, steps: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps = [_Step(told) for told in steps]

    def with_(self, other: Loads) -> Loads:
        """Those of another process beside these."""
        return self._combined(other, 1)

    def since(self, before: Loads) -> Loads:
        """What has come since these workers told that."""
        return self._combined(before, -1)

    def _combined(self, other: Loads, sign: int) -> Loads:
        found, nothing = Loads(), _Step({})
        pairs = zip_longest(self._steps, other._steps, fillvalue=nothing)
        found._steps = [mine.combined(theirs, sign) for mine, theirs in pairs]
        return found

    def rows(self, plan: Parts) -> dict[Part, int]:
        """Rows that came for each bin and part, of all keyed steps together."""
        return _summed(plan, [step.of("rows", plan) for step in self._steps])

    def busy_ns(self, plan: Parts) -> dict[Part, int]:
        """Nanoseconds that each bin and part kept workers busy, in all keyed steps together."""
        return {part: round(ns) for part, ns in _summed(plan, [step.busy_ns(plan) for step in self._steps]).items()}

    def by(self, measure: str, plan: Parts) -> tuple[str, dict[Part, int]]:
        """Loads by ``"busy"`` (nanoseconds) or ``"rows"``, and which it is: rows where no time was measured."""
        busy = self.busy_ns(plan) if measure == "busy" else {}
        return ("busy", busy) if any(busy.values()) else ("rows", self.rows(plan))


def _summed(plan: Parts, steps: Sequence[Mapping[Part, Any]]) -> dict[Part, Any]:
    return {part: sum(step[part] for step in steps) for part in plan.owner}
