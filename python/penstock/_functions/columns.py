"""Columns of rows for functions: keys that pyarrow can group, and the error of a column that it cannot serve.

The plan check says what may be a key; here each such type is brought to one whose values pyarrow compares. The values
of a key are those of that column, of which `column_of` makes the first one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock._views import plain

__all__ = ["UNSERVED", "column_of", "each_served", "groupable", "one_zero"]

_T = TypeVar("_T")
#: What pyarrow and Python raise for types and values that they do not have.
UNSERVED: Final = (pa.ArrowException, OverflowError, ValueError)
_OUT: Final = "cast the column before the step, or filter such values out"


def groupable(column: Any) -> Any:
    """A key column (an array; without a dictionary also a chunked one) as pyarrow groups it: values that are one key
    are equal, all NaN and the two zeros among them.

    Examples
    --------
    >>> groupable(pa.array([-0.0], pa.float16())).to_pylist(), groupable(pa.array([b"a" * 16], pa.uuid())).type
    ([0.0], FixedSizeBinaryType(fixed_size_binary[16]))
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return groupable(column.cast(kind.storage_type))
    if pa.types.is_dictionary(kind):
        if plain(kind.value_type) is not kind.value_type:
            column = column.cast(pa.dictionary(kind.index_type, plain(kind.value_type)))
        return groupable(column.dictionary_decode())
    if plain(kind) is not kind:
        return column.cast(plain(kind))
    if pa.types.is_decimal(kind) and kind.bit_width < 128:
        return column.cast(pa.decimal128(kind.precision, kind.scale))
    if kind == pa.float16():
        column = column.cast(pa.float32())
    if pa.types.is_floating(column.type):
        return pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), one_zero(column))
    return column


def one_zero(column: Any) -> Any:
    """A key column of its own type in which floats have the one zero of keys, which is 0.0.

    Examples
    --------
    >>> one_zero(column_of([-0.0, 1.5], pa.float16())).to_pylist(), one_zero(pa.array(["a"])).to_pylist()
    ([0.0, 1.5], ['a'])
    """
    if column.type == pa.float16():  # which pyarrow does not add
        return one_zero(column.cast(pa.float32())).cast(pa.float16())
    return pc.add(column, pa.scalar(0.0, column.type)) if pa.types.is_floating(column.type) else column


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The column of this type of what `groupable` has as Python values.

    Examples
    --------
    >>> [str(column_of(values, kind).type) for values, kind in (([1.5], pa.float16()), ([b"a" * 16], pa.uuid()))]
    ['halffloat', 'extension<arrow.uuid>']
    """
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, column_of(values, kind.storage_type))
    if kind == pa.float16():
        return pa.array(values, pa.float32()).cast(kind)
    return pa.array(values, kind)


def each_served(
    work: Callable[[list[str]], _T], schema: pa.Schema, names: Sequence[str], refuse: Callable[[str], BaseException]
) -> _T:
    """What `work` makes of these columns of a schema.

    Raises
    ------
    BaseException
        Of `refuse`, which gets the reason: which column it is that pyarrow, pandas or Python cannot serve, and why.
    """
    try:
        return work(list(names))
    except UNSERVED as error:
        for name in names:
            try:
                work([name])
            except UNSERVED as its:
                kind = schema.field(name).type
                raise refuse(f"it cannot take column {name!r} ({kind}): {its}; {_OUT}") from its
        raise refuse(f"it cannot take its columns: {error}; {_OUT}") from error
