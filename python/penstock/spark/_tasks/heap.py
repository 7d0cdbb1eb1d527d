"""The garbage collector in Spark's Python workers.

Spark's daemon has each Python worker collect all garbage after every task, which walks through all that was ever
imported: 25 to 50 ms of CPU with pandas and pyarrow, as much as a task of ours takes for 100,000 rows. What a process
has loaded by its first task stays until it ends, so it is taken out of the collector's sight.

Owns: that it is done once in a process. Invariant: nothing that a task makes is hidden from the collector, but for the
task that is first.
"""

from __future__ import annotations

import gc
import os

__all__ = ["settle"]

_settled: int | None = None


def settle() -> None:
    """Hide what is loaded from the garbage collector, once in a process; call it when a task has imported all it needs.

    Garbage goes before, so that none is kept. What is hidden is freed as ever when nobody refers to it; only a circle
    of such objects would stay. Cost: one collection.
    """
    global _settled
    # A process that was forked from one that has settled has more, or other modules, than that.
    if _settled != os.getpid():
        _settled = os.getpid()
        gc.collect()
        gc.freeze()
