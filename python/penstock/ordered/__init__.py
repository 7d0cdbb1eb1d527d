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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.ordered._iterator import OrderedIterator
    from penstock.ordered._options import OperatorStats, Stats
    from penstock.ordered._pipeline import Pipeline, default_workers, ordered_map
    from penstock.ordered._steps import (
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
    "OperatorStats",
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

#: A worker process needs none of these: they load when somebody asks.
_HOMES = {"OrderedIterator": "_iterator", "OperatorStats": "_options", "Stats": "_options"} | dict.fromkeys(
    ("Pipeline", "default_workers", "ordered_map"), "_pipeline"
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'penstock.ordered' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"penstock.ordered.{_HOMES.get(name, '_steps')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
