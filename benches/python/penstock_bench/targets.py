"""What has to be reached, and by which case it is judged.

Owns: the one table of targets. A target names a bench and a pattern of cases, and what every matching case must reach:
mostly a ratio, sometimes our own figure or a condition beside it. One without a bench is stated so that nobody forgets
it. Invariant: what is not measured never counts as met, and a quick run, of small sizes, measures nothing that counts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.report._timeline import figure_text
from penstock_bench.measure import Line

__all__ = ["TARGETS", "Target", "Verdict", "judge"]

Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes
    ----------
    what : str
        In words.
    limit : float
        What is needed: at least, or at most where `most` says so.
    bench : str or None
        Which bench measures it; None where none does yet.
    cases : str
        Regular expression that is searched in the name of the case.
    of : str
        ``"ratio"``, ``"ours"``, or the name of a condition.
    most : bool
        Whether less is better.
    beside : tuple of str
        Peers of which each has to be in a case; those that were not there to be measured may be the best.
    """

    what: str
    limit: float
    bench: str | None = None
    cases: str = ""
    of: str = "ratio"
    most: bool = False
    beside: tuple[str, ...] = ()

    def covers(self, line: Line) -> bool:
        """Whether this result counts for the target."""
        return self.bench == line["name"] and re.search(self.cases, line["case"]) is not None

    def value(self, line: Line) -> float | None:
        """What of the result is judged; None where it was not measured."""
        found = line.get(self.of) if self.of in ("ratio", "ours") else line["conditions"].get(self.of)
        return None if found is None else float(found)

    def reached(self, line: Line) -> bool | None:
        """Whether one result is good enough; None where it says nothing."""
        value = self.value(line)
        if value is None or line["conditions"].get("quick"):
            return None
        return value <= self.limit if self.most else value >= self.limit

    def verdict(self, lines: Iterable[Line]) -> Verdict:
        """Judge the target by results; every one that it covers has to reach it, and none of its peers may lack."""
        judged = [
            (line["case"], good) for line in lines if self.covers(line) and (good := self.reached(line)) is not None
        ]
        if not all(good for _, good in judged):
            return "missed"
        there = all(any(f" vs {peer}" in case for case, _ in judged) for peer in self.beside)
        return "met" if judged and there else "not measured"

    @property
    def unit(self) -> str:
        """What stands behind the limit: ``x`` for ratios."""
        return {"ratio": "x", "ours": ""}.get(self.of, f" {self.of.replace('_', ' ')}")

    @property
    def wanted(self) -> str:
        """The limit as text.

        Examples
        --------
        >>> Target("w", 2.0).wanted, Target("w", 25.0, of="ours", most=True).wanted
        ('>= 2x', '<= 25')
        """
        return f"{'<=' if self.most else '>='} {figure_text(self.limit)}{self.unit}"


TARGETS: tuple[Target, ...] = (
    Target("keyed count, 2^20 keys, beside timely with a fast hash", 2.0, "keyed-count", r"2\^20 vs.*fast"),
    Target("the same, giving the changes of each epoch", 2.0, "keyed-count", r"2\^20 changes vs.*fast"),
    Target("keyed count, 2^20 keys, beside timely with SipHash", 5.0, "keyed-count", r"2\^20\b.*[Ss]ip"),
    Target("the same from Python, blocks of 8,192 rows and more", 0.9, "keyed-count-python", r"rows=(8192|65536)\b"),
    Target(
        "frontier move in order (oldest of 4,096 live times goes)", 200.0, "frontier", r"^live=4096 (in order )?vs "
    ),
    Target("frontier move in order, 1 live time", 1.0, "frontier", r"^live=1 (in order )?vs "),
    Target("ChangeBatch, 16,384 updates, 16 times", 3.0, "change-batch", r"n=16384 times=16\b"),
    Target("ChangeBatch, 16,384 updates, all times distinct", 2.0, "change-batch", r"n=16384 times=distinct"),
    Target("ChangeBatch, small sizes", 1.0, "change-batch", r"n=\d{1,3}\b"),
    Target("empty epoch at w2, spinning: at most 1.2 times timely's time", 1 / 1.2, "empty-epoch", r"w2 spinning"),
    Target("empty epoch at w2, parked: at most 25 µs", 25.0, "empty-epoch", r"w2 step_or_park", of="ours", most=True),
    Target("idle workers: below 2 % of a CPU", 2.0, "empty-epoch", r"step_or_park", of="idle_cpu_percent", most=True),
    Target("barrier at w2, waiting: at most 1.2 times timely's time", 1 / 1.2, "barrier", r"w2 waiting"),
    Target("barrier at w2, parked: at most 25 µs", 25_000.0, "barrier", r"w2 parked", of="ours", most=True),
    Target(
        "keyed count at w2 beside one CPU hog: share of the quiet rate", 0.45, "noisy-neighbour", r"kept", of="ours"
    ),
    Target("order kept, 100 ns an item one by one, beside no order", 0.8, "reorder", r"=100 ns batch=1 .*=2 vs unord"),
    Target("order kept, 100 ns an item in slots of 64, beside no order", 0.95, "reorder", r"=100 ns batch=64 .*unord"),
    Target("order kept, 100 ns an item one by one, beside oneTBB", 3.0, "reorder", r"=100 ns batch=1 .*=2 vs oneTBB"),
    Target("order kept, 1 µs an item one by one, beside oneTBB", 1.3, "reorder", r"=1 µs batch=1 .*=2 vs oneTBB"),
    Target("partitions under skew, hybrid queue beside the cores' bound", 0.9, "queues", r"10 µs .*hybrid vs bound"),
    Target("the same: partitions out of order", 0.0, "queues", r"hybrid", of="ours_violations", most=True),
    Target("2^8 to 2^12 bins beside no bins", 0.95, "bins-overhead", r"=2\^20 bins=2\^(8|9|10|11|12) vs one"),
    Target("2^16 bins beside no bins", 0.8, "bins-overhead", r"=2\^20 bins=2\^16 vs one"),
    Target("2^8 bins, 2^20 keys, beside timely with a fast hash", 2.0, "bins-overhead", r"=2\^20 bins=2\^8 vs timely"),
    Target("2^8 bins, 2^10 keys, beside timely with a fast hash", 1.0, "bins-overhead", r"=2\^10 bins=2\^8 vs timely"),
    Target(
        "keyed count in foreachBatch, 1 M keys, beside groupBy.count with RocksDB as it is by default",
        10.0,
        "foreach-batch-count",
        r"keys=1000000\b.*RocksDB$",
    ),
    Target(
        "keyed count in foreachBatch, 1 M keys, beside groupBy.count with the default store",
        6.0,
        "foreach-batch-count",
        r"keys=1000000\b.*default",
    ),
    Target(
        "the same beside passing the rows on, 1 and 4 M rows",
        0.9,
        "foreach-batch-count",
        r"keys=1000000 rows=[14]000000 .*identity",
    ),
    Target(
        "the same with 1,000 rows: seconds more than passing them on",
        0.1,
        "foreach-batch-count",
        r"keys=1000000 rows=1000 .*identity",
        of="added_s",
        most=True,
    ),
    Target(
        "durable state, 1 in 100 of 1 M keys changed: share of the batch that waits for files",
        0.1,
        "snapshot",
        r"keys=1000000 dirty=10000 ",
        of="files_share",
        most=True,
    ),
    Target(
        "Python state per record, 200 k and 1 M keys, beside a dict loop",
        1.0,
        "python-state",
        r"keys=(2|10)00000 vs dict",
    ),
    Target(
        "Python state per record in foreachBatch, beside Spark's",
        50.0,
        "foreach-batch-python-state",
        r"keys=(200000|1000000)\b.*vs (apply|transform)",
    ),
    Target("bounded cliques beside no flow control: time", 1 / 1.2, "faucet-overhead", r"N=2-8"),
    Target("the same, bounds found while running", 1 / 1.2, "faucet-overhead", r"adaptive vs no"),
    Target("bounds found while running, beside the best fixed ones: time", 0.95, "faucet-overhead", r"vs best fixed"),
    Target("bounded 4-cliques on the largest graph: peak memory", 10.0, "faucet-memory", r"4-cliques.*2\^17.*no flow"),
    Target(
        "the same: share of the memory without flow control",
        0.03,
        "faucet-memory",
        r"4-cliques.*2\^17.*no flow",
        of="memory_share",
        most=True,
    ),
    Target(
        "the same: at no more time than without flow control", 1.0, "faucet-memory", r"4-.*2\^17.*no", of="time_ratio"
    ),
    Target(
        "1 input that becomes 10^8 items: peak memory in MiB",
        16.0,
        "faucet-memory",
        r"1 input of 1",
        of="ours",
        most=True,
    ),
    Target("a flow in mapInArrow, beside the identity", 0.9, "map-in-arrow", r"\bflow\b"),
    Target("an ordered map in mapInArrow, beside the identity", 0.9, "map-in-arrow", r"\bordered\b"),
    Target("ordered pipeline that measures itself, never below a serial loop", 0.9, "schedulers", r"vs serial loop"),
    Target("adaptive scheduler, beside the best fixed one", 0.95, "schedulers", r"adaptive vs best fixed"),
    Target("ordered map, never below the builtin map", 0.9, "ordered-map", r"vs serial"),
    Target("ordered map, from 100 µs an item, 2 cores, beside serial", 1.8, "ordered-map", r"^100+ us .*vs serial"),
    Target("Python state per record, beside bytewax", 7.0, "python-state", r"vs bytewax"),
    Target(
        "extra latency of a migration (fluid, batched; all-at-once in process) of what is allowed, if rest is less",
        1.0,
        "migration",
        r"(fluid|batched|^threads .*all-at-once) vs",
        of="of_allowed",
        most=True,
    ),
    Target("workers that may join, instructions beside fixed ones", 0.97, "join", r"steady epochs of .* instructions"),
    Target("joinable w2, empty epoch, spinning: at most 1.2 times timely's time", 1 / 1.2, "join", r"epoch, spin"),
    Target("from the wish to the first record of a joiner (calm), ms", 50.0, "join", r"calm", of="ours", most=True),
    Target(
        "a worker killed, 1 M keys: seconds above twice the median batch",
        2.0,
        "recovery",
        r"kill.*=1000000\b",
        of="beyond_s",
        most=True,
    ),
    Target(
        "a new driver, 1 M keys: seconds from claim to ready",
        2.0,
        "recovery",
        r"restart.*=1000000\b",
        of="ready_s",
        most=True,
    ),
    Target(
        "the same until the first batch is done, beside Spark with RocksDB", 3.0, "recovery", r"restart.*=1000000\b"
    ),
    Target(
        "rescale to twice the workers, saturated with 20 µs of work a record: throughput afterwards",
        1.7,
        "rescale",
        r"rate.*=1000000\b",
    ),
    Target(
        "the same: pause in seconds, 1 M keys, median of the runs",
        0.1,
        "rescale",
        r"pause.*keys=1000000\b",
        of="ours",
        most=True,
    ),
    Target("NEXMark Q3, Q4, Q5, Q8 in process, beside timely", 1.5, "nexmark", r"q[3458]\S* vs timely"),
    Target(
        "NEXMark from Python, beside the best of Spark, PyFlink, bytewax, Pathway",
        10.0,
        "nexmark",
        r"^python .* vs ",
        beside=("Spark", "PyFlink", "bytewax", "Pathway"),
    ),
    Target(
        "rows of 3- and 4-cliques, w1: at most 1.38 times a hand-written loop", 1 / 1.38, "cliques", r"w1 rows.*loop"
    ),
    Target("rows of 4-cliques, w2: 1.8 times w1", 1.8, "cliques", r"w2 rows size=4.*itself"),
    Target("rows of 3- and 4-cliques, beside timely GenericJoin", 2.0, "cliques", r"w\d rows.*timely"),
    Target("counts of 3- and 4-cliques, beside timely GenericJoin", 2.0, "cliques", r"w\d count.*timely"),
    Target(
        "memory above the graph, rows of 4-cliques, beside timely without flow control",
        1 / 0.03,
        "cliques",
        r"w1 memory.*size=4.*2\^17.*without",
    ),
    Target("the same: at no more time", 1.0, "cliques", r"w1 memory.*size=4.*2\^17.*without", of="time_ratio"),
    Target("3- and 4-cliques as a Spark job, beside Spark SQL self-joins", 10.0, "cliques", r"Spark job.*SQL"),
    Target("triangles as a Spark job, beside GraphFrames", 10.0, "cliques", r"Spark job.*GraphFrames"),
)


def judge(line: Line) -> list[tuple[Target, Verdict]]:
    """Judge one result by the targets that it counts for; whether their other peers were there is not asked."""
    alone = [dataclasses.replace(target, beside=()) for target in TARGETS if target.covers(line)]
    return [(target, target.verdict([line])) for target in alone]
