"""Rows by their places, also of views (`string_view`, `binary_view`), for which pyarrow has no such function."""

from __future__ import annotations

from typing import Any, TypeVar

import pyarrow as pa

__all__ = ["plain", "rows_at"]

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
