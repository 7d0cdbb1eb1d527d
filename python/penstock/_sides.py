"""Side outputs: rows that a function puts beside the output of its step, under a name.

Owns the value that a function gives (`side`), which names and columns a step declares, and telling what a function gave
apart. Names are unique in a flow. What becomes of the rows is the affair of `_beside`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from penstock._functions.short import short
from penstock.errors import ConfigError

__all__ = ["Declared", "Side", "apart", "declared_in", "number_of", "parse_sides", "side"]

#: Side outputs of a step, in their order.
Declared: TypeAlias = Sequence[tuple[str, pa.Schema]]


class Side:
    """Rows for a side output; made by `side`.

    Attributes
    ----------
    name : str
        Of the side output.
    rows : object
        What goes there.
    """

    __slots__ = ("name", "rows")

    def __init__(self, name: str, rows: Any) -> None:
        self.name = name
        #: A list as it is now: who gave it may go on with it.
        self.rows = rows.copy() if type(rows) is list else rows

    def __eq__(self, other: object) -> bool:
        if type(other) is not Side:
            return NotImplemented
        return self.name == other.name and bool(self.rows == other.rows)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"side({self.name!r}, {short(self.rows)})"


def side(name: str, rows: Any) -> Side:
    """What a function of a flow gives for a side output of its step, beside or in place of a row.

    Parameters
    ----------
    name : str
        A side output that the step declares with ``sides=``.
    rows : tuple, list of tuples, or Arrow data
        Where the function gives rows: a row, in the order of the side's columns, or a list of them. Where it gives
        batches: a RecordBatch or Table. Where it gives pandas frames: a frame.

    Returns
    -------
    Side
        To be yielded by a function of `Flow.flat_map`, returned by one of `Flow.map_batches` (beside the batch), put
        out by one of `Flow.stateful_map`, or yielded by one of `Flow.apply_in_pandas_with_state`.

    Examples
    --------
    >>> import pyarrow as pa
    >>> import penstock as pk
    >>> def parse(line):
    ...     if line.isdigit():
    ...         yield (int(line),)
    ...     else:
    ...         yield pk.side("bad", (line, "no number"))
    >>> flow = pk.Flow("line string").flat_map(
    ...     parse, "n bigint", rows=True, sides={"bad": "line string, error string"})
    >>> bad = []
    >>> flow.collect(pa.table({"line": ["1", "x"]}), sides={"bad": lambda b: bad.extend(b.to_pylist())}).to_pylist()
    [{'n': 1}]
    >>> bad
    [{'line': 'x', 'error': 'no number'}]
    """
    return Side(name, rows)


def parse_sides(sides: Any, what: str) -> list[tuple[str, pa.Schema]]:
    """The side outputs that a step declares.

    Raises
    ------
    ConfigError
        When it is no dict, or a name is none.
    SchemaError
        When a schema cannot be read.
    """
    from penstock._flow.text import require_name
    from penstock._schema import to_arrow

    if sides is None:
        return []
    if not isinstance(sides, Mapping):
        raise ConfigError(f'{what} sides={sides!r}: give a dict of name to schema, as {{"bad": "line string"}}')
    found = []
    for name, schema in sides.items():
        require_name(name, f"{what} sides:")
        columns = to_arrow(schema, f"{what} sides[{name!r}]")
        if not columns.names:
            raise ConfigError(f"{what} sides[{name!r}] has no columns")
        found.append((name, columns))
    return found


def declared_in(steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The names of side outputs of steps as plans have them, those of bodies included."""
    for step in steps:
        yield from (side["name"] for side in step.get("sides", ()))
        yield from declared_in(step.get("body", ()))


def number_of(declared: Declared, name: Any) -> int:
    """The number of a side output among those of a step.

    Raises
    ------
    TypeError
        When the step does not declare it.
    """
    for number, (known, _) in enumerate(declared):
        if known == name:
            return number
    there = ", ".join(repr(known) for known, _ in declared) or "none"
    raise TypeError(f"the function gave rows for side output {name!r}, which its step does not declare; it has {there}")


def apart(
    made: list[Any], declared: Declared, refuse: Callable[[str, int], BaseException]
) -> tuple[list[Any], list[tuple[int, list[Any]]]]:
    """The rows of what a function of rows gave, and those of each side output, by its number.

    Raises what `refuse` makes of a reason, and of the place in `made`, where the step does not declare a name, or there
    are no rows.
    """
    found: dict[int, list[Any]] = {}
    rows = [one for one in made if type(one) is not Side]
    if len(rows) == len(made):
        return rows, []
    for place, one in enumerate(made):
        if type(one) is not Side:
            continue
        if isinstance(one.rows, tuple):
            more = [tuple(one.rows)]
        elif type(one.rows) is list:
            more = one.rows
        else:
            raise refuse(f"{one!r}: give a tuple (one row) or a list of tuples", place)
        try:
            number = number_of(declared, one.name)
        except TypeError as error:
            raise refuse(str(error), place) from None
        found.setdefault(number, []).extend(more)
    return rows, list(found.items())
