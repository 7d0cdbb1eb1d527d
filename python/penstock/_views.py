"""Rows by their places, and what rows hold, also of views (`string_view`, `binary_view`).

pyarrow has no function that does either for views.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["bytes_of", "plain", "rows_at"]

_Rows = TypeVar("_Rows", pa.RecordBatch, pa.Table)


def plain(kind: pa.DataType) -> pa.DataType:
    """The type that holds the same without views; views within lists and structs stay."""
    if kind == pa.string_view():
        return pa.large_string()
    return pa.large_binary() if kind == pa.binary_view() else kind


def rows_at(rows: _Rows, places: Any) -> _Rows:
    """The rows at these places, in their order.

    Examples
    --------
    >>> table = pa.table({"name": pa.array(["a", "b"], pa.string_view())})
    >>> rows_at(table, pa.array([1, 1, 0]))["name"].to_pylist()
    ['b', 'b', 'a']
    """
    schema = rows.schema
    if not any(plain(kind) is not kind for kind in schema.types):
        return rows.take(places)
    fields = [field.with_type(plain(field.type)) for field in schema]
    return rows.cast(pa.schema(fields)).take(places).cast(schema)


def bytes_of(batch: pa.RecordBatch) -> int:
    """The bytes that the rows of a batch hold.

    A part of a column of views has all its buffers, for which ``nbytes`` counts them each time; here it has what its
    rows show of them.

    Examples
    --------
    >>> batch = pa.record_batch({"name": pa.array(["a" * 100] * 50, pa.string_view())})
    >>> batch.slice(0, 2).nbytes, bytes_of(batch.slice(0, 2))
    (5032, 232)
    """
    return sum(map(_bytes_of, batch.columns))


def _bytes_of(array: pa.Array) -> int:
    kind = array.type
    if plain(kind) is not kind:
        # A view is four numbers of 32 bits, of which the first is its length.
        numbers = pa.Array.from_buffers(pa.int32(), 4 * len(array), [None, array.buffers()[1]], offset=4 * array.offset)
        lengths = pc.list_element(pa.FixedSizeListArray.from_arrays(numbers, 4), 0)
        return 16 * len(array) + (pc.sum(lengths.filter(array.is_valid())).as_py() or 0)
    if not _has_views(kind):
        return int(array.nbytes)
    offsets = 0 if pa.types.is_struct(kind) else 8 * len(array)
    parts = array.flatten()
    return offsets + sum(map(_bytes_of, parts if isinstance(parts, list) else [parts]))


def _has_views(kind: pa.DataType) -> bool:
    return plain(kind) is not kind or any(_has_views(kind.field(at).type) for at in range(kind.num_fields))
