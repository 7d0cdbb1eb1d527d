"""Order with parallelism: functions over a stream of items, with the results in the order of the input.

`ordered_map` is ``map`` with several workers; a `Pipeline` is several steps, some with state per key. Ordering, queues
and schedulers are native (crate `penstock-ordered`); functions run in the caller's thread, in native threads or in
worker processes, as measured or as asked.

Importing this starts nothing.

Examples
--------
>>> import penstock as pk
>>> from penstock import ordered
>>> list(pk.ordered_map(str.upper, "abc"))
['A', 'B', 'C']
"""

from __future__ import annotations

from penstock.ordered.iterator import OrderedIterator, Stats
from penstock.ordered.pipeline import Pipeline, default_workers, ordered_map
from penstock.ordered.steps import (
    Step,
    batches,
    filter,
    flat_map,
    flow,
    map,
    map_batches,
    partitioned,
    rows,
    stateful,
)

__all__ = [
    "OrderedIterator",
    "Pipeline",
    "Stats",
    "Step",
    "batches",
    "default_workers",
    "filter",
    "flat_map",
    "flow",
    "map",
    "map_batches",
    "ordered_map",
    "partitioned",
    "rows",
    "stateful",
]
