"""The engines that are open in this process, whoever still holds a handle on them.

Owns: the list from which `held_slots` counts, `penstock.spark.engines` answers, and the end of Python closes what the
program forgot. An engine is on it from the moment it takes slots until it is closed, by itself where its Spark context
has ended.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any, Protocol

__all__ = ["Handle", "add", "close_orphans", "open_engines", "remove", "serving"]


class Handle(Protocol):
    """An engine, as far as it is to be found, counted and closed."""

    name: str
    _process: int

    @property
    def workers(self) -> int: ...
    @property
    def _orphaned(self) -> bool: ...
    def _serves(self, checkpoint: str, but: Any) -> bool: ...
    def _holds_slots_of(self, sc: Any) -> bool: ...
    def _job_groups(self) -> list[str]: ...
    def close(self) -> None:
        """End it."""


#: In the order of their starts.
_OPEN: dict[Handle, None] = {}


def open_engines(sc: Any) -> list[Handle]:
    """The engines of a Spark context that hold slots; none of the parent's in a forked child."""
    here = os.getpid()
    return [one for one in list(_OPEN) if one._holds_slots_of(sc) and one._process == here]


def serving(checkpoint: str, but: Any) -> str | None:
    """The name of an engine of this process that has a query other than `but` whose state is at a place."""
    here = os.getpid()
    return next((one.name for one in list(_OPEN) if one._process == here and one._serves(checkpoint, but)), None)


def close_orphans() -> None:
    """Close the engines whose Spark context has ended, and wait for that: they have ports and checkpoints."""
    here = os.getpid()
    for one in list(_OPEN):
        if one._process == here and one._orphaned:
            one.close()


def add(engine: Handle) -> None:
    """An engine is about to take slots; it is closed at the end of Python at the latest."""
    _OPEN[engine] = None
    reference = weakref.ref(engine)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    # Before Python ends its threads.
    atexit.register(close)
    # Not at the end of Python, where finalizers may run before `close`.
    weakref.finalize(engine, atexit.unregister, close).atexit = False


def remove(engine: Handle) -> None:
    """An engine is closed. Harmless when done twice."""
    _OPEN.pop(engine, None)
