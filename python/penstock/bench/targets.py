"""What has to be reached, and by which case it is judged.

Owns: the one table of targets. A target names a bench and a pattern of cases, and the least ratio that every matching
case must reach; one without a bench is stated so that nobody forgets it. Invariant: what is not measured, or may not
be claimed yet, never counts as met.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.bench.measure import Line

__all__ = ["TARGETS", "Target", "Verdict", "judge", "target_of"]

Verdict = Literal["met", "missed", "not claimed", "not measured"]


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes
    ----------
    what : str
        In words.
    least : float
        Ratio that is needed.
    bench : str or None
        Which bench measures it; None where none does yet.
    cases : str
        Regular expression that is searched in the name of the case.
    claim : str
        Why a ratio that is reached is not claimed yet; empty where it is.
    """

    what: str
    least: float
    bench: str | None = None
    cases: str = ""
    claim: str = ""

    def covers(self, line: Line) -> bool:
        """Whether this result counts for the target."""
        return self.bench == line["name"] and re.search(self.cases, line["case"]) is not None

    def verdict(self, lines: Iterable[Line]) -> Verdict:
        """Judge the target by results; every one that it covers has to reach it."""
        ratios = [line["ratio"] for line in lines if self.covers(line)]
        if not ratios:
            return "not measured"
        if self.claim:
            return "not claimed"
        return "met" if min(ratios) >= self.least else "missed"


_SNAPSHOTS = "without durable snapshots, which the peer writes and ours does not have yet"

TARGETS: tuple[Target, ...] = (
    Target("keyed count, 2^20 keys, beside timely with a fast hash", 2.0, "keyed-count", r"2\^20\b.*fast"),
    Target("keyed count, 2^20 keys, beside timely with SipHash", 5.0, "keyed-count", r"2\^20\b.*[Ss]ip"),
    Target("the same from Python, blocks of 8,192 rows and more", 0.9, "keyed-count-python", r"rows=(8192|65536)\b"),
    Target("frontier move, 4,096 live times", 200.0, "frontier", r"live=4096\b"),
    Target("frontier move, 1 live time", 1.0, "frontier", r"live=1\b"),
    Target("ChangeBatch, 16,384 updates, 16 times", 3.0, "change-batch", r"updates=16384\b.*times=16\b"),
    Target("ChangeBatch, 16,384 updates, all times distinct", 2.0, "change-batch", r"updates=16384\b.*times=distinct"),
    Target("ChangeBatch, small sizes", 1.0, "change-batch", r"updates=\d{1,3}\b"),
    Target("empty epoch at w2, spinning: at most 1.2 times timely's time", 1 / 1.2, "empty-epoch", r"w2\b.*spin"),
    Target("empty epoch at w2, parked: at most 25 µs", 1.0, "empty-epoch", r"w2\b.*park.*25"),
    Target("idle workers: below 2 % of a CPU", 1.0, "empty-epoch", r"idle"),
    Target("barrier at w2, spinning: at most 1.2 times timely's time", 1 / 1.2, "barrier", r"w2\b.*spin"),
    Target("keyed count at w2 beside one CPU hog: share of the own quiet rate", 0.45, "noisy-neighbour", r"quiet"),
    Target("2^8 to 2^12 bins beside no bins", 0.95, "bins-overhead", r"bins=2\^(8|10|12)\b"),
    Target("2^16 bins beside no bins", 0.8, "bins-overhead", r"bins=2\^16\b"),
    Target(
        "keyed count in foreachBatch, 1 M keys, beside groupBy.count with RocksDB",
        10.0,
        "foreach-batch-count",
        r"keys=1000000\b.*RocksDB",
        _SNAPSHOTS,
    ),
    Target(
        "keyed count in foreachBatch, 1 M keys, beside groupBy.count with the default store",
        6.0,
        "foreach-batch-count",
        r"keys=1000000\b.*default",
        _SNAPSHOTS,
    ),
    Target("Python state per record, beside a dict loop", 1.0, "foreach-batch-python-state", r"dict"),
    Target(
        "Python state per record in foreachBatch, beside Spark's",
        50.0,
        "foreach-batch-python-state",
        r"vs (apply|transform)",
    ),
    Target("a flow in mapInArrow, beside the identity", 0.9, "map-in-arrow"),
    Target("Python state per record, beside bytewax", 7.0),
    Target("extra latency of a migration: fluid, batched, all-at-once", 1.0),
    Target("rescale from 1 to 2 workers while saturated: throughput afterwards", 1.7),
    Target("NEXMark Q3, Q4, Q5, Q8 in process, beside timely", 1.5),
    Target("NEXMark from Python, beside the best of Spark, PyFlink, bytewax, Pathway", 10.0),
    Target("ordered map, from 100 µs an item, 2 cores, beside serial", 1.8),
    Target("3- and 4-cliques, beside Spark SQL and GraphFrames", 10.0),
)


def target_of(line: Line) -> Target | None:
    """The target that a result counts for."""
    return next((target for target in TARGETS if target.covers(line)), None)


def judge(line: Line) -> tuple[Target, Verdict] | None:
    """Judge one result by its target; None where it has none."""
    target = target_of(line)
    return None if target is None else (target, target.verdict([line]))
