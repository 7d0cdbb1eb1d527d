"""An engine as its autobalance (`penstock._autobalance`) sees it.

Owns: what is known of the queries at a look, and how moves are asked for: by the calls that users have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock._autobalance import PAUSE_S, Looked, see_through
from penstock._parts import Part, Parts
from penstock.errors import SlotsError
from penstock.spark._tasks.slots import free_slots

__all__ = ["Balanced"]

#: How long a number of workers is not asked for again for which task slots did not come, seconds.
_AGAIN_S = 600.0


class Balanced:
    """An engine as its autobalance sees it; its type is not named here, since it makes these."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.threads: int = engine.threads
        #: The last rescale that was asked for here.
        self._asked: Any = None
        #: A number for which task slots did not come, and until when it is not asked for, of `time.monotonic`.
        self._late = (0, 0.0)
        self.whole: str | None = None

    @property
    def workers(self) -> int | None:
        """Processes that there are; None while their number changes."""
        return None if self._engine._executor.rescaling() is not None else int(self._engine.workers)

    def look_at(self, found: Any) -> Looked:
        """What is known of one query now; asks all members."""
        recorder, commits = self._engine._recorder, self._engine._commits
        assert recorder is not None and commits is not None
        told = recorder.loads(found.id)
        recorder.refresh()
        latest = [row for row in recorder.latest() if row["query"] == found.name]
        now = [row for row in latest if row["generation"] == told.generation]
        plan = found.parts() or Parts(0, {})
        bins = sorted(plan.owner)
        workers, leaving = max(1, found.workers), found.leaving
        missing = ""
        if leaving:
            missing = f"{len(leaving)} of {workers} workers leave, and give their bins away first"
        elif told.workers < workers:
            missing = f"figures of {workers - told.workers} of {workers} workers have not come"
        return Looked(
            found.name,
            told.generation,
            plan.bits,
            bins,
            [plan.owner[part] for part in bins],
            workers,
            told.loads,
            [told.bytes_of(part) for part in bins],
            sum(row["rows"] for row in now),
            sum(row["busy_s"] for row in now),
            commits.facts(found.id).offered(found.fed),
            missing,
        )

    def looked(self) -> list[Looked]:
        """What is known of each running query, also of those without state: they keep the workers busy, too."""
        return [self.look_at(found) for found in self._engine._queries.all() if found.running]

    def move(self, query: str, moves: Mapping[Part, int], stopping: Callable[[], bool]) -> Any:
        """Move bins, and wait for the end; returns the handle where that takes long."""
        handle = self._engine.migrate(moves=moves, strategy="matched", max_pause=PAUSE_S, query=query)
        return see_through(handle, stopping)

    def recut(
        self, query: str, splits: Mapping[Part, int], merges: Sequence[Part], stopping: Callable[[], bool]
    ) -> Any:
        """Split bins by so many bits, make others one again, and wait for the end; returns the handle of one that takes
        long, behind which no other is begun.

        One after the other: rows wait while one is copied.
        """
        engine, left = self._engine, None
        asks = [partial(engine.split, part, by, query=query) for part, by in splits.items()]
        for ask in [*asks, *(partial(engine.merge, part, query=query) for part in merges)]:
            if left is None and not stopping():
                left = see_through(ask(), stopping)
        return left

    def room(self, workers: int) -> int:
        """The number to ask for on the way to so many workers: those that there are where it cannot be more.

        Of a rescale for which some slots do not come nothing stays, so where that may be it is one more at a time.
        """
        there = int(self._engine.workers)
        if workers <= there:
            return workers
        if self._asked is not None and isinstance(self._asked.error, SlotsError):
            self._late, self._asked = (self._asked.workers, time.monotonic() + _AGAIN_S), None
        free, _ = free_slots(self._engine._spark.sparkContext, workers - there)
        if free is not None:
            workers = min(workers, there + free)
        late, until = self._late
        is_late = time.monotonic() < until
        if free is None or is_late:
            workers = min(workers, there + 1)
        return there if is_late and workers >= late else workers

    def resize(self, workers: int) -> None:
        """Ask for another number of workers."""
        self._asked = self._engine.rescale(workers)

    def tell(self, query: str, advised: bool, **facts: Any) -> None:
        """Enter in the log what was done for a query, or what would be."""
        self._engine._journal.balanced(self._engine._queries.find(query).id, advised, **facts)

    def failed(self, error: Exception) -> None:
        """Enter in the log why a look came to nothing."""
        self._engine._journal.unbalanced(error)
