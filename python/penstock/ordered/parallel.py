"""Chunks through the native pipeline: its workers call the operators, here or in worker processes.

Invariant: an operator never raises for what a user's function did: that is a `Failure` among the values. What does come
out of it as an exception ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import OrderedError
from penstock.ordered.chunk import Chunk
from penstock.ordered.keyed import Keyed, Part
from penstock.ordered.operators import Operator, Stateless

if TYPE_CHECKING:
    from penstock.ordered.iterator import Options
    from penstock.ordered.processes import Pool

__all__ = ["Parallel"]


class Parallel:
    """See `iterator.Engine`.

    Parameters
    ----------
    operators : sequence of Operator
        What to do; their states live on after this.
    options : Options
        Of the run.
    pool : Pool or None
        Worker processes, for mode "processes".
    """

    def __init__(self, operators: Sequence[Operator], options: Options, pool: Pool | None) -> None:
        from penstock import _native

        if not hasattr(_native, "OrderedRun"):
            raise OrderedError("this build of penstock has no ordered runtime: use mode='inline'")
        self._options, self._pool = options, pool
        self._run = _native.OrderedRun(
            [self._spec(place, operator) for place, operator in enumerate(operators)],
            workers=options.workers,
            in_flight=4 * options.workers + 4,
            scheduler=options.scheduler,
            queue=options.queue,
        )

    def _spec(self, place: int, operator: Operator) -> dict[str, Any]:
        if isinstance(operator, Keyed):
            split: Callable[..., Any] = operator.split
            operate = self._keyed(place, operator)
            return {
                "kind": "partitioned" if operator.forgets else "stateful",
                "name": operator.name,
                "partitions": operator.partitions,
                "split": split,
                "call": operate,
                "merge": operator.merge,
            }
        kind = "stateless" if isinstance(operator, Stateless) else "stateful"
        return {"kind": kind, "name": operator.name, "call": self._whole(place, operator)}

    def _whole(self, place: int, operator: Operator) -> Callable[[int, Chunk], Chunk]:
        """Do a whole chunk."""
        pool, timeout = self._pool, self._options.timeout

        def here(worker: int, chunk: Chunk) -> Chunk:
            started = time.perf_counter()
            operator(chunk)
            chunk.spent += time.perf_counter() - started
            return chunk

        def there(worker: int, chunk: Chunk) -> Chunk:
            assert pool is not None
            pool.apply(worker, place, operator.name, chunk, timeout)
            return chunk

        return there if pool is not None and isinstance(operator, Stateless) else here

    def _keyed(self, place: int, operator: Keyed) -> Callable[[int, Part], Part]:
        """Do a part of a chunk."""
        pool, timeout = self._pool, self._options.timeout

        def here(worker: int, part: Part) -> Part:
            started = time.perf_counter()
            operator.operate(part)
            part.spent = time.perf_counter() - started
            return part

        def there(worker: int, part: Part) -> Part:
            assert pool is not None
            pool.keyed(worker, place, operator, part, timeout)
            return part

        return here if pool is None else there

    def push(self, chunk: Chunk) -> bool:
        """Hand a chunk over; False when there is no room."""
        return bool(self._run.try_push(chunk))

    def pull(self, wait: bool) -> Chunk | None:
        """The next finished chunk."""
        found: Chunk | None = self._run.pull(None if wait else 0.0)
        return found

    def stats(self) -> tuple[dict[str, Any], ...]:
        """Counts per operator."""
        return tuple(self._run.stats())

    def close(self) -> None:
        """End all work."""
        self._run.close()
