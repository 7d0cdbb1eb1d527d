"""Rows by their places, also of views (`string_view`, `binary_view`), and what rows hold.

pyarrow has no function that takes rows of views. And where what rows show lies apart from them (the buffers of views,
the elements of list views, the values of dictionaries) its ``nbytes`` counts all that is there, for each part of it.
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
    taken = _each(rows, pa.schema(fields)).take(places)
    return _each(taken, schema)


def _each(rows: _Rows, schema: pa.Schema) -> _Rows:
    """Rows with columns of these types: those of others are cast, and no other, which might hold nulls below nulls."""
    pairs = zip(rows.columns, schema.types, strict=True)
    columns = [column if column.type.equals(kind) else column.cast(kind) for column, kind in pairs]
    return type(rows).from_arrays(columns, schema=schema)


def bytes_of(batch: pa.RecordBatch) -> int:
    """The bytes that the rows of a batch hold, about: those of its parts come to those of the whole.

    Where rows show values that lie apart from them (views, list views, dictionaries), each holds what it shows.

    Examples
    --------
    >>> batch = pa.record_batch({"name": pa.array(["a" * 100] * 50, pa.string_view())})
    >>> batch.slice(0, 2).nbytes, bytes_of(batch.slice(0, 2))
    (5032, 232)
    >>> words = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), ["a" * 100, "b" * 1000])
    >>> bytes_of(pa.record_batch({"word": words}))
    216
    """
    return sum(_held(column) if _shows(column.type) else _buffered(column) for column in batch.columns)


def _held(array: pa.Array) -> int:
    sizes = _sizes(array)
    return sizes * len(array) if isinstance(sizes, int) else int(pc.sum(sizes).as_py() or 0)


def _buffered(array: pa.Array) -> int:
    """The bytes of its part of its buffers; where pyarrow cannot tell, of all of them."""
    try:
        return int(array.nbytes)
    except pa.ArrowException:  # of views in unions and runs, in earlier versions
        return int(array.get_total_buffer_size())


def _shows(kind: pa.DataType) -> bool:
    """Whether values of a type show what lies apart from them; of unions and runs nobody looks into the values."""
    if isinstance(kind, pa.BaseExtensionType):
        return _shows(kind.storage_type)
    if pa.types.is_dictionary(kind) or _is_view(kind) or _is_list_view(kind):
        return True
    if not pa.types.is_nested(kind) or pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind):
        return False
    return any(_shows(kind.field(place).type) for place in range(kind.num_fields))


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _sizes(array: pa.Array) -> int | pa.Array:
    """The bytes that each value of an array holds; a number where all hold as many."""
    kind, is_type = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(array.storage)
    if not len(array) or is_type.is_null(kind):
        return 0
    if _is_view(kind):
        # A view is four numbers of 32 bits, of which the first is its length.
        numbers = pa.Array.from_buffers(pa.int32(), 4 * len(array), [None, array.buffers()[1]], offset=4 * array.offset)
        lengths = pc.list_element(pa.FixedSizeListArray.from_arrays(numbers, 4), 0)
        return pc.add(pc.if_else(array.is_valid(), lengths, 0).cast(pa.int64()), 16)
    if is_type.is_dictionary(kind):
        return _sum([int(kind.index_type.bit_width) // 8, _shown(array)])
    if is_type.is_struct(kind):
        return _sum([_sizes(array.field(place)) for place in range(kind.num_fields)])
    if (ends := _ends_of_text(array)) is not None:
        return pc.add(pc.subtract(ends.slice(1), ends.slice(0, len(array))), _width_of_text(kind))
    if is_type.is_fixed_size_list(kind):
        size = kind.list_size
        stops = pc.add(pc.cumulative_sum(pa.repeat(pa.scalar(size, pa.int64()), len(array))), size * array.offset)
        return _between(array.values, pc.subtract(stops, size), stops)
    if _is_list_view(kind):
        starts = pc.if_else(array.is_valid(), array.offsets.cast(pa.int64()), 0)
        stops = pc.add(starts, pc.if_else(array.is_valid(), array.sizes.cast(pa.int64()), 0))
        return pc.add(_between(array.values, starts, stops), 16 if is_type.is_large_list_view(kind) else 8)
    if is_type.is_map(kind) or is_type.is_list(kind) or is_type.is_large_list(kind):
        ends = array.offsets.cast(pa.int64())
        starts, stops = ends.slice(0, len(array)), ends.slice(1)
        parts = [array.keys, array.items] if is_type.is_map(kind) else [array.values]
        held = _sum([_between(part, starts, stops) for part in parts])
        return pc.add(held, 8 if is_type.is_large_list(kind) else 4)
    if is_type.is_nested(kind) or is_type.is_run_end_encoded(kind):
        return _buffered(array) // len(array)
    return int(kind.bit_width + 7) // 8


def _shown(array: pa.DictionaryArray) -> int | pa.Array:
    """What each value of an array shows of its dictionary."""
    values, places = array.dictionary, array.indices
    if array.null_count == len(array):
        return 0
    if len(values) > len(array):
        places = pc.fill_null(places.cast(pa.int64()), pc.min(places).as_py())
        shown = _between(values, places, pc.add(places, 1))
    else:
        each = _sizes(values)
        shown = each if isinstance(each, int) else pc.take(each, places)
    return pc.if_else(array.is_valid(), shown, 0) if array.null_count else shown


def _between(values: pa.Array, starts: pa.Array, stops: pa.Array) -> pa.Array:
    """What values hold from each of these places to another."""
    least, most = pc.min(starts).as_py(), pc.max(stops).as_py()
    values, starts, stops = values.slice(least, most - least), pc.subtract(starts, least), pc.subtract(stops, least)
    each: int | pa.Array
    if (ends := _ends_of_text(values)) is not None:
        each = _width_of_text(values.type)
    else:
        each = _sizes(values)
        if not isinstance(each, int):
            ends, each = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(each)]), 0
    held = pc.multiply(pc.subtract(stops, starts), each)
    return held if ends is None else pc.add(held, pc.subtract(pc.take(ends, stops), pc.take(ends, starts)))


def _ends_of_text(array: pa.Array) -> pa.Array | None:
    """Where texts begin and end in their buffer, without a copy; None of other values."""
    width = _width_of_text(array.type)
    if not width:
        return None
    numbers = pa.int64() if width == 8 else pa.int32()
    if not len(array):
        return pa.array([0], numbers)
    return pa.Array.from_buffers(numbers, len(array) + 1, [None, array.buffers()[1]], offset=array.offset)


def _width_of_text(kind: pa.DataType) -> int:
    """The bytes of an offset of texts; 0 of other values."""
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return 8
    return 4 if pa.types.is_string(kind) or pa.types.is_binary(kind) else 0


def _sum(sizes: list[int | pa.Array]) -> int | pa.Array:
    total: int | pa.Array = 0
    for one in sizes:
        total = total + one if isinstance(total, int) and isinstance(one, int) else pc.add(total, one)
    return total
