"""Batches of tagged DataFrames in a task: their names, and the rows of each source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import SchemaError
from penstock.spark._tasks.columns import integer

__all__ = ["renamed", "split"]


def renamed(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Batches whose columns may have lost their names, see `sources.by_place`: those come first."""
    for batch in batches:
        yield batch.rename_columns([*names, *batch.schema.names[len(names) :]])


def split(batch: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Take a batch of a tagged DataFrame apart.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        With a struct column for each name; others are ignored.
    names : sequence of str
        The sources, in their order.

    Yields
    ------
    number : int
        Of the source.
    rows : pyarrow.RecordBatch
        Its rows in their order, at least one. Without a copy where all of the batch are of one source.

    Raises
    ------
    SchemaError
        When a source is missing, or a row is of none or of several.

    Examples
    --------
    >>> import pyarrow as pa
    >>> batch = pa.record_batch({"a": [{"x": 1}, None], "b": [None, {"y": 2}]})
    >>> [(number, rows.to_pylist()) for number, rows in split(batch, ["a", "b"])]
    [(0, [{'x': 1}]), (1, [{'y': 2}])]
    """
    if not batch.num_rows:
        return
    columns = []
    for name in names:
        place = batch.schema.get_field_index(name)
        if place < 0 or not pa.types.is_struct(batch.schema.field(place).type):
            raise SchemaError(f"the batch has no struct column {name!r}, which is a source; it has {batch.schema}")
        columns.append(batch.column(place))
    there = [len(column) - column.null_count for column in columns]
    if sum(there) == max(there) == batch.num_rows:
        whole = next(number for number, count in enumerate(there) if count)
        yield whole, _rows(columns[whole])
        return
    marks = [column.is_valid() for column in columns]
    counts = reduce(pc.add, (mark.cast(pa.int32()) for mark in marks))
    wrong = pc.indices_nonzero(pc.not_equal(counts, integer(1, pa.int32())))
    if len(wrong):
        row = wrong[0].as_py()
        found = [name for name, mark in zip(names, marks, strict=True) if mark[row].as_py()]
        raise SchemaError(
            f"row {row} of a batch has {' and '.join(found) if found else 'none of the sources'} set; a row of a tagged"
            f" DataFrame is of exactly one of {', '.join(names)}"
        )
    for number, (column, mark) in enumerate(zip(columns, marks, strict=True)):
        if there[number]:
            yield number, _rows(column.filter(mark))


def _rows(column: pa.StructArray) -> pa.RecordBatch:
    """The rows of structs of which none is null."""
    return pa.RecordBatch.from_arrays(column.flatten(), schema=pa.schema(list(column.type)))
