"""List views as lists and lists as list views, wherever they stand in a value.

pyarrow calls such a cast safe and gives arrays that are not valid, which are read beyond their end.

Invariant: the values stay as they are, whatever the views show: parts of one another, in any order, of a slice.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["as_lists", "relaid"]


def as_lists(kind: pa.DataType, coded: bool = True) -> pa.DataType:
    """The type with lists in place of list views, and without `coded` with values in place of dictionaries of them.

    Examples
    --------
    >>> as_lists(pa.struct({"a": pa.list_view(pa.list_view(pa.int64()))}))
    StructType(struct<a: list<item: list<item: int64>>>)
    """
    is_type = pa.types

    def inner(field: pa.Field) -> pa.Field:
        return field.with_type(as_lists(field.type, coded))

    if is_type.is_struct(kind):
        return pa.struct(list(map(inner, kind)))
    if is_type.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field), kind.keys_sorted)
    if is_type.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size)
    if is_type.is_list_view(kind) or is_type.is_list(kind):
        return pa.list_(inner(kind.value_field))
    if is_type.is_large_list_view(kind) or is_type.is_large_list(kind):
        return pa.large_list(inner(kind.value_field))
    return kind.value_type if is_type.is_dictionary(kind) and not coded else kind


def relaid(array: pa.Array, want: pa.DataType) -> pa.Array:
    """The same values as another type, which differs in what are lists and what are list views.

    Examples
    --------
    >>> views = pa.array([[1, 2], None, [3]], pa.list_view(pa.int64()))
    >>> relaid(views.slice(1), pa.list_(pa.int64())).to_pylist()
    [None, [3]]
    """
    kind, is_type = array.type, pa.types
    if kind.equals(want):
        return array
    mask = array.is_null()
    if is_type.is_struct(kind):
        parts = [relaid(array.field(place), field.type) for place, field in enumerate(want)]
        return pa.StructArray.from_arrays(parts, fields=list(want), mask=mask)
    if is_type.is_fixed_size_list(kind):
        if kind.list_size == 0:  # of which pyarrow divides by the size
            return pa.array([[] if there else None for there in array.is_valid().to_pylist()], want)
        values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return pa.FixedSizeListArray.from_arrays(relaid(values, want.value_type), type=want, mask=mask)
    if is_type.is_map(kind):
        offsets = pc.add(array.offsets, 0)  # with a mask only those of a whole array serve
        keys, items = (pa.ListArray.from_arrays(offsets, part, mask=mask) for part in (array.keys, array.items))
        ends = _ends(keys)
        parts = [relaid(keys.flatten(), want.key_type), relaid(items.flatten(), want.item_type)]
        return pa.MapArray.from_arrays(ends.cast(pa.int32()), *parts, type=want, mask=mask)
    values, ends = relaid(array.flatten(), want.value_type), _ends(array)
    if is_type.is_list(want) or is_type.is_large_list(want):
        made, index = (pa.ListArray, pa.int32()) if is_type.is_list(want) else (pa.LargeListArray, pa.int64())
        return made.from_arrays(ends.cast(index), values, type=want, mask=mask)
    starts, sizes = ends.slice(0, len(array)), pc.subtract(ends.slice(1), ends.slice(0, len(array)))
    made, index = (pa.ListViewArray, pa.int32()) if is_type.is_list_view(want) else (pa.LargeListViewArray, pa.int64())
    return made.from_arrays(starts.cast(index), sizes.cast(index), values, type=want, mask=mask)


def _ends(lists: pa.Array) -> pa.Array:
    """Where the elements of each begin and end once those of all are in one line."""
    sizes = pc.fill_null(pc.list_value_length(lists).cast(pa.int64()), 0)
    return pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(sizes)])
