"""The garbage collector in Spark's Python workers.

Spark's daemon has each Python worker collect all garbage after every task, which walks through all that was ever
imported: 25 to 50 ms of CPU with pandas and pyarrow, as much as a task of ours takes for 100,000 rows. What a process
has loaded stays until it ends, so it is taken out of the collector's sight. Its first task need not load all: a later
one may be the first to have pandas.

Owns: that it is done when a process has loaded more than before. Invariant: nothing that a task makes is hidden from
the collector, but for the tasks that load something.
"""

from __future__ import annotations

import gc
import os
import sys

__all__ = ["settle"]

#: The process, and how many modules it had.
_settled: tuple[int, int] | None = None


def settle() -> None:
    """Hide what is loaded from the garbage collector; call it when a task has imported all it needs.

    Garbage goes before, so that none is kept. What is hidden is freed as ever when nobody refers to it; only a circle
    of such objects would stay. Cost: one collection when modules have come since, else nothing.
    """
    global _settled
    # A process that was forked from one that has settled has more, or other modules, than that.
    now = os.getpid(), len(sys.modules)
    if _settled != now:
        _settled = now
        gc.collect()
        gc.freeze()
