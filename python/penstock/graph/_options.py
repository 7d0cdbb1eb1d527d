"""Options that every search has, checked once; and what patterns, orders and kinds of nodes are given as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock import _cpus
from penstock._options import whole, yes_or_no
from penstock.errors import ConfigError

__all__ = ["MOST", "Options", "Progress", "Unit", "counted", "node_ids", "pattern_text", "piece", "variables"]

#: Gets how many values of the first attribute are behind, and how many there are.
Progress = Callable[[int, int], None]

#: Greatest number of an option.
MOST = 2**31 - 1

#: A piece of the work: place of the first prefix, and of the one after the last.
Unit = tuple[int, int, int, int]


def counted(name: str, value: object, most: int = MOST) -> int:
    """Return a number of at least 1, or refuse it by its name.

    Raises
    ------
    ConfigError
        For 0, negative and fractional numbers, and what is too large or no number.

    Examples
    --------
    >>> counted("batches", 0)
    Traceback (most recent call last):
    ...
    penstock.errors.ConfigError: batches=0 must be an int of 1 to 2147483647
    """
    count = whole(value, 1, most)
    if count is None:
        raise ConfigError(f"{name}={value!r} must be an int of 1 to {most}")
    return count


def pattern_text(pattern: object) -> str:
    """Return a pattern that is text, or refuse it.

    Raises
    ------
    ConfigError
        For what is no text.
    """
    if not isinstance(pattern, str):
        raise ConfigError(
            f"a pattern is text, not {type(pattern).__name__}; penstock.graph.pattern writes it from parts"
        )
    return pattern


def variables(order: object) -> list[str] | None:
    """Return an order of variables as a list; None stays None.

    Raises
    ------
    ConfigError
        For a text, and for what is no list of names.
    """
    if order is None:
        return None
    if isinstance(order, str) or not isinstance(order, Sequence) or not all(isinstance(name, str) for name in order):
        raise ConfigError(f"order={order!r} must be a list of variables")
    return list(order)


def piece(unit: object) -> Unit | None:
    """Return a unit of four numbers; None stays None.

    Raises
    ------
    ConfigError
        For what is no tuple or list of four numbers.
    """
    if unit is None:
        return None
    match [whole(part, 0, 2**32 - 1) for part in unit] if isinstance(unit, (tuple, list)) else ():
        case [int(root), int(place), int(end), int(cut)]:
            return root, place, end, cut
    raise ConfigError(f"unit={unit!r} must be four ints, as `units` gives them")


def node_ids(ids: object) -> None:
    """Refuse what is no kind of nodes in files.

    Raises
    ------
    ConfigError
        For anything but the two.
    """
    if ids not in ("number", "text"):
        raise ConfigError(f'ids={ids!r} must be "number" or "text"')


@dataclass(frozen=True)
class Options:
    """How a search of an `Index` is run.

    Attributes
    ----------
    workers : int or None
        Threads; None: as many as the Spark task in which this runs, else this process, may use CPUs.
    batches : int
        Units of work that may be admitted and unfinished at a time.
    batch_size : int
        Prefixes (values of the first two attributes) per unit.
    batch_rows : int
        Rows per batch of the result.
    in_order : bool
        Whether rows come in the order of one thread.

    Raises
    ------
    ConfigError
        For a number that is none, or out of bounds.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from penstock import graph
    >>> index = graph.Index({"e": pa.table({"src": [1, 2], "dst": [2, 1]})})
    >>> index.count("back(x, y) :- e(x, y), e(y, x)", options=graph.Options(workers=2)).count
    2
    """

    workers: int | None = None
    batches: int = 64
    batch_size: int = 1024
    batch_rows: int = 8192
    in_order: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None:
            counted("workers", self.workers, 4096)
        counted("batches", self.batches)
        counted("batch_size", self.batch_size)
        counted("batch_rows", self.batch_rows, 1 << 24)
        yes_or_no(self.in_order, "in_order")

    @property
    def threads(self) -> int:
        """How many threads that are."""
        if self.workers is not None:
            return self.workers
        return _cpus.of_task_or_process()
