"""What bounds a part of a computation, as `Flow.bounded` and `penstock.dataflow.Stream.bounded` take it.

Owns: the options that both have, under one name, with one meaning and one message each. N batches of B inputs may be
in the part and unfinished; what is not given is found while running.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock._options import whole
from penstock._sizes import parse_bytes
from penstock.errors import ConfigError

__all__ = ["Bounds", "OnFailure", "parse_bounds"]

#: When the iterator of an expansion raises: stop everything, or leave out what is left of that input and go on.
OnFailure = Literal["stop", "skip"]

#: What the native part can count: batches, and inputs of all of them.
_MOST_BATCHES = 1 << 32
_MOST_INPUTS = 1 << 48


@dataclass(frozen=True)
class Bounds:
    """Checked bounds.

    Attributes
    ----------
    batches, batch_size : int or None
        N and B; None is found while running.
    memory : int or None
        Bytes that the process may hold, for what is found while running.
    on_failure : {"stop", "skip"}
        See `OnFailure`.
    """

    batches: int | None
    batch_size: int | None
    memory: int | None
    on_failure: OnFailure


def parse_bounds(
    batches: int | None, batch_size: int | None, memory: int | str | None, on_failure: OnFailure
) -> Bounds:
    """Check what a user wrote.

    Raises
    ------
    ConfigError
        When a number is not a whole one of at least 1, or too large; when `memory` is given with both numbers, which
        leave nothing to find; for another word.

    Examples
    --------
    >>> parse_bounds(4, None, "512m", "skip")
    Bounds(batches=4, batch_size=None, memory=536870912, on_failure='skip')
    """
    batches = _count("batches", batches, _MOST_BATCHES)
    batch_size = _count("batch_size", batch_size, _MOST_INPUTS)
    if batches is not None and batch_size is not None:
        if batches * batch_size > _MOST_INPUTS:
            raise ConfigError(
                f"bounded batches={batches} of batch_size={batch_size} are more than can be counted:"
                f" at most {_MOST_INPUTS} in all"
            )
        if memory is not None:
            raise ConfigError(
                f"bounded memory={memory!r} steers numbers that are found while running: leave batches or batch_size"
                " out, or memory"
            )
    budget = None if memory is None else parse_bytes(memory, "bounded memory")
    if budget is not None and not 1 <= budget < 1 << 63:
        raise ConfigError(f"bounded memory={memory!r} must be from 1 byte to less than 2**63")
    if on_failure not in ("stop", "skip"):
        raise ConfigError(f"bounded on_failure={on_failure!r} is unknown; use 'stop' or 'skip'")
    return Bounds(batches, batch_size, budget, on_failure)


def _count(name: str, value: Any, most: int) -> int | None:
    count = None if value is None else whole(value, 1, most)
    if value is not None and count is None:
        raise ConfigError(f"bounded {name}={value!r} must be a whole number from 1 to {most}")
    return count
