"""Worker processes that are started while a run goes on without them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock._resume import Aside
from penstock.ordered._chunk import text_of
from penstock.ordered._steps import Step

if TYPE_CHECKING:
    from penstock.ordered._processes import Pool

__all__ = ["Starting"]


class Starting:
    """A pool on its way, in a thread of its own.

    Parameters
    ----------
    steps, workers
        As for `processes.Pool`.
    values : sequence
        Results, which have to pickle.

    Attributes
    ----------
    pool : Pool or None
        Once `ready`.
    ready : bool
        Whether all its processes are up.
    why : str
        Why there will be none.
    """

    def __init__(self, steps: Sequence[Step], workers: int, values: Sequence[Any]) -> None:
        self._wanted = (steps, workers, values)
        self._lock = threading.Lock()
        self._closed = False
        self._work = Aside(self._start)
        self.pool: Pool | None = None
        self.ready = False
        self.why = ""

    def begin(self) -> None:
        """Start them, unless that was done."""
        self._work.start()

    def _start(self) -> None:
        from penstock.ordered._processes import Pool
        from penstock.ordered._wire import dumps

        steps, workers, values = self._wanted
        try:
            pickle.loads(dumps(values))
            with self._lock:
                if self._closed:
                    return
                self.pool = Pool(steps, workers, strict=False)
            self.pool.wait()
            self.why = self.pool.differs(steps)
            if self.why:
                self.pool.close()
                return
            self.ready = True
        except Exception as error:
            self.why = f"processes cannot be used: {text_of(error)}"

    def close(self) -> None:
        """End them, however far they are."""
        with self._lock:
            self._closed = True
        if self.pool is not None:
            self.pool.close()
