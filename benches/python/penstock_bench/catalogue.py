"""Which benches there are.

Owns: the table of names. Adding one is a line here, and its module (or its entry in ``benches/rust/src/main.rs``).
Importing this imports no bench.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError

__all__ = ["BENCHES", "Bench", "find"]


@dataclass(frozen=True)
class Bench:
    """One bench.

    Attributes
    ----------
    name : str
        What the command line calls it.
    kind : {"core", "python", "spark"}
        Measured by the program ``penstock-bench``, in this process, or in a Spark session that this process starts.
    summary : str
        What is measured beside what, in one line.
    module : str
        Where its ``run(options, emit, tell)`` is; empty for the core.
    """

    name: str
    kind: Literal["core", "python", "spark"]
    summary: str
    module: str = ""


BENCHES: tuple[Bench, ...] = (
    Bench("keyed-count", "core", "count per key, 2^10 to 2^24 keys, w1 and w2, beside timely (fast hash, SipHash)"),
    Bench("frontier", "core", "a frontier moves by one among many live times, beside timely's MutableAntichain"),
    Bench("change-batch", "core", "updates one by one and a drain, beside timely's ChangeBatch"),
    Bench("empty-epoch", "core", "an epoch without data, w1 and w2, beside timely"),
    Bench("barrier", "core", "a round of the barrier, beside timely's"),
    Bench("sequencer", "core", "an item through the sequencer, beside timely's"),
    Bench("reorder", "core", "items leave in order without a lock, beside a lock, a flag, oneTBB, rayon, no order"),
    Bench("queues", "core", "items of skewed partitions through the hybrid queue, beside partitioned and shared"),
    Bench("noisy-neighbour", "core", "count per key at w2 beside one CPU hog, beside timely and the own quiet rate"),
    Bench("schedulers", "core", "schedulers, queues and buffers of ordered pipelines, claim by claim; beside a loop"),
    Bench(
        "bins-overhead", "core", "count per key with 2^4 to 2^20 bins, 2^10 and 2^20 keys, beside no bins and timely"
    ),
    Bench("bins-latency", "core", "latency of a count at rest with 2^4 to 2^20 bins, beside timely with one map"),
    Bench("migration", "core", "latency while a quarter of the state moves, by strategy, beside stop and restart"),
    Bench("hot-first", "core", "how long rows wait for hot bins that move: asked for, beside the order of the control"),
    Bench("join", "core", "the cost of being joinable; latency through two joins and a leave, threads and TCP"),
    Bench("faucet-overhead", "core", "cliques as a dataflow, bounded, w1 and w2, beside no flow control"),
    Bench("faucet-memory", "core", "peak memory of the same over the size of the graph, beside no flow control"),
    Bench("faucet-sensitivity", "core", "time and peak memory of the same over N and B, beside N=4, B=1000 per thread"),
    Bench(
        "nexmark",
        "python",
        "flows of NEXMark in process beside timely; from Python beside bytewax, Pathway, PyFlink and Spark",
        "penstock_bench.nexmark",
    ),
    Bench(
        "keyed-count-python",
        "python",
        "count per key from Python, blocks of 1,024 to 65,536 rows, beside the same from Rust",
        "penstock_bench.keyed_count_python",
    ),
    Bench(
        "python-state",
        "python",
        "running mean per key by a Python function, beside a dict in a loop and bytewax",
        "penstock_bench.python_dict",
    ),
    Bench(
        "ordered-map",
        "python",
        "functions of 1 µs to 1 ms in order, beside map, Pool.imap, executors and joblib",
        "penstock_bench.ordered_map",
    ),
    Bench(
        "foreach-batch-count",
        "spark",
        "count per key in foreachBatch, beside Spark's groupBy.count with both stores, and beside passing rows on",
        "penstock_bench.foreach_batch_count",
    ),
    Bench(
        "foreach-batch-python-state",
        "spark",
        "running mean per key in Python, beside applyInPandasWithState, transformWithStateInPandas and a dict",
        "penstock_bench.python_state",
    ),
    Bench(
        "snapshot",
        "spark",
        "count per key, durable, 1 in 100 keys or all changed, beside state in memory; changes beside full ones",
        "penstock_bench.snapshot",
    ),
    Bench(
        "recovery",
        "spark",
        "a worker killed while it counts per key, beside a batch; restarts from checkpoints, beside Spark's RocksDB",
        "penstock_bench.recovery",
    ),
    Bench(
        "rescale",
        "spark",
        "to twice the workers while saturated: pause, rate after, beside Spark: stop, offline repartition, restart",
        "penstock_bench.rescale",
    ),
    Bench(
        "cliques",
        "spark",
        "3- and 4-cliques, beside a hand-written loop and timely GenericJoin; as Spark jobs beside SQL and GraphFrames",
        "penstock_bench.cliques",
    ),
    Bench(
        "map-in-arrow",
        "spark",
        "a flow and an ordered map inside mapInArrow, beside the identity function",
        "penstock_bench.map_in_arrow",
    ),
)


def find(name: str) -> Bench:
    """Return the bench of a name.

    Raises
    ------
    ConfigError
        When there is none; the message lists all.

    Examples
    --------
    >>> find("frontier").kind
    'core'
    """
    for bench in BENCHES:
        if bench.name == name:
            return bench
    names = [bench.name for bench in BENCHES]
    close = difflib.get_close_matches(name, names, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(f"{name!r} is no bench{hint}; there are {', '.join(names)}")
