"""What travels through a pipeline: a run of neighbouring items with what has become of them.

A chunk fills one slot of the native reorder buffers, whatever it holds: none, one or many values. A value that is a
`Failure` stands for an item whose function raised; later steps pass it on, and it is raised where its result would
have come.

Invariants: chunks are numbered without gaps in input order; `origins[i]` is the number of the item that `values[i]`
came from, and None means that they are the items `first`, `first + 1`, ... one to one; `failed` counts the failures
among `values`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import Context
from typing import Any

__all__ = ["Chunk", "Failure", "add_note", "estimate_bytes"]


class Failure:
    """In place of a result: the exception of its function."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self.error, list(getattr(self.error, "__notes__", ()))))


def _restore(error: BaseException, notes: list[str]) -> Failure:
    for note in notes:  # some exceptions say themselves how they pickle, and forget them
        add_note(error, note)
    return Failure(error)


class Chunk:
    """See the module.

    `count` is how many items it was made of, `final` says that the input ends with it, `spent` is seconds of work,
    `size` about the bytes of the items, `context` the variables of the caller when it was handed to a worker.
    """

    __slots__ = ("context", "count", "failed", "final", "first", "number", "origins", "size", "spent", "values")

    def __init__(self, number: int, first: int, values: list[Any], final: bool = False) -> None:
        self.context: Context | None = None
        self.number = number
        self.first = first
        self.count = len(values)
        self.values = values
        self.origins: Sequence[int] | None = None
        self.failed = 0
        self.final = final
        self.spent = 0.0
        self.size = 0

    @property
    def weight(self) -> int:
        """How many values there are now."""
        return len(self.values)

    def numbers(self) -> Sequence[int]:
        """Number of the item behind each value."""
        return range(self.first, self.first + len(self.values)) if self.origins is None else self.origins


def add_note(error: BaseException, text: str) -> None:
    """`BaseException.add_note`, also where Python does not have it yet; never fails."""
    try:
        notes = error.__dict__.setdefault("__notes__", [])
        if text not in notes:
            notes.append(text)
    except Exception:
        return


def estimate_bytes(values: Sequence[Any]) -> int:
    """About how much memory values hold: what says so itself exactly, else from a few of them."""
    if not values:
        return 0
    picked = values if len(values) <= 8 else [values[i * (len(values) - 1) // 7] for i in range(8)]
    total = 0
    for value in picked:
        size = getattr(value, "nbytes", None)
        if not isinstance(size, int):
            size = sys.getsizeof(value, 64)
            if isinstance(value, (tuple, list)):
                size += sum(sys.getsizeof(part, 64) for part in value[:8]) * max(1, len(value) // 8)
        total += size
    return total * len(values) // len(picked)
