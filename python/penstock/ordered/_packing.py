"""Rows into record batches: for `steps.batches`, `steps.partitioned` and `penstock.spark.ordered`.

Invariants: a row keeps the values that it was given, in the columns that they were given for, or is told to be none,
whichever rows stand beside it; what is wrong with one row costs no other one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import pyarrow as pa

from penstock._functions.owned import Owner, buffers_apart
from penstock._functions.short import short
from penstock._schema import conform
from penstock._wholes import FRACTION, look_into
from penstock.errors import SchemaError

__all__ = ["Misfit", "Packer", "row_owner"]


class Misfit(Exception):
    """A row is none of the schema; the text goes on behind what names the row."""


class Packer:
    """Makes batches of rows, which are tuples, lists or dicts.

    Parameters
    ----------
    schema : pyarrow.Schema
        What the batches have.
    wanted : str
        What rows may be, for the text about one that is neither.

    Examples
    --------
    >>> packer = Packer(pa.schema({"n": pa.int64()}))
    >>> for place, made in packer.pack([(1,), {"n": 2}, (0.5,), (3,)]):
    ...     print(place, made if isinstance(made, Misfit) else made.to_pydict())
    0 {'n': [1, 2]}
    2 has 0.5 in column 'n', expected int64
    3 {'n': [3]}
    """

    def __init__(self, schema: pa.Schema, wanted: str = "a tuple or a dict") -> None:
        self._schema, self._wanted = schema, wanted
        self._names: list[str] = schema.names
        self._columns = [(field.name, field.type, field.nullable, look_into(field.type)) for field in schema]
        self._nested = any(pa.types.is_nested(kind) for kind in schema.types)

    def pack(self, rows: Sequence[Any]) -> Iterator[tuple[int, pa.RecordBatch | Misfit]]:
        """Batches of all rows in their order, and what is wrong in place of each row that is none; with the place of
        their first row.

        Rows that do not make a batch are halved, so that the good ones keep together.
        """
        spans = [(0, len(rows))] if rows else []
        while spans:
            start, end = spans.pop()
            made: pa.RecordBatch | Misfit
            try:
                made = self._batch(rows[start:end])
            except Misfit as misfit:
                if end - start > 1:
                    middle = (start + end) // 2
                    spans += [(middle, end), (start, middle)]
                    continue
                made = misfit
            yield start, made

    def _batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        """All rows; the text of the error is right where there is one."""
        arrays = []
        for values, (name, kind, nullable, look) in zip(self._values(rows), self._columns, strict=True):
            try:
                # First: there are values of maps at which pyarrow ends the process.
                cut = None if look is None else look(values)
                array = pa.array(values, kind) if cut is None else None
            except Exception as error:
                raise Misfit(f"has {short(values[0])} in column {name!r}, expected {kind}") from error
            if cut is not None:
                more = "" if cut is FRACTION else f"; it {cut}"
                raise Misfit(f"has {short(values[0])} in column {name!r}, expected {kind}{more}")
            assert array is not None
            if array.null_count and not nullable:
                raise Misfit(f"has a null in column {name!r}, which is NOT NULL")
            arrays.append(array)
        try:
            batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
            return conform(batch, self._schema, "") if self._nested else batch
        except SchemaError as error:
            raise Misfit(f"has a null inside: {str(error).strip()}") from error
        except Exception as error:  # more bytes than one array has
            raise Misfit(f"does not fit into one batch: {error}") from error

    def _values(self, rows: Sequence[Any]) -> Iterable[Sequence[Any]]:
        """The values of each column."""
        names, width = self._names, len(self._names)
        kinds = set(map(type, rows))
        if kinds == {dict} and set(map(len, rows)) == {width}:
            with contextlib.suppress(KeyError):
                return [tuple(map(itemgetter(name), rows)) for name in names]
        if not all(issubclass(kind, (tuple, list, dict)) for kind in kinds):
            raise Misfit(f"is {short(rows[0])}, expected {self._wanted}")
        if any(issubclass(kind, dict) for kind in kinds):
            for found in {tuple(row) for row in rows if isinstance(row, dict)}:
                if set(found) != set(names):
                    raise Misfit(f"has the columns {', '.join(map(str, found))}; expected {', '.join(names)}")
            rows = [tuple([row[name] for name in names]) if isinstance(row, dict) else row for row in rows]
        for found_width in set(map(len, rows)):
            if found_width != width:
                raise Misfit(f"has {found_width} values, expected {width} ({', '.join(names)})")
        return zip(*rows, strict=True)


def row_owner(schema: pa.Schema) -> Callable[[Any], Any]:
    """What takes a row as it is, whatever becomes of what it is made of.

    Examples
    --------
    >>> take = row_owner(pa.schema({"k": pa.int64(), "seen": pa.list_(pa.int64())}))
    >>> seen = [1]
    >>> rows = [take((1, seen)), take({"k": 1, "seen": seen})]
    >>> seen.append(2)
    >>> rows
    [(1, [1]), {'k': 1, 'seen': [1]}]
    """
    own = Owner(schema)
    owns = {name: turn for name, turn in zip(schema.names, own.columns, strict=True) if turn is not None}

    def take(row: Any) -> Any:
        if isinstance(row, dict):
            made = dict(zip(row, buffers_apart(row.values()), strict=True))
            for name, turn in owns.items():
                if name in made:
                    made[name] = turn(made[name])
            return made
        if isinstance(row, (tuple, list)):
            made_row = tuple(buffers_apart(row))
            return made_row if own.plain else own.one(made_row)
        return row

    return take
