"""What a function gives as rows.

Invariant: what is let through here is a batch or a table for the native part as well, whose own error would not name
the step.
"""

from __future__ import annotations

from types import CoroutineType
from typing import Any

import pyarrow as pa

from penstock._coroutines import unawaited
from penstock._functions.short import short

__all__ = ["rows_of"]


def rows_of(made: Any, told: str) -> Any:
    """What a function gave, as a RecordBatch, a Table or an array of structs.

    Parameters
    ----------
    made
        Any object.
    told
        How a message about it begins.

    Raises
    ------
    TypeError
        When it holds no rows with named columns.
    ValueError
        When some of its rows are null, or it has nulls where its own schema says that there are none.

    Examples
    --------
    >>> rows_of(pa.array([1]), "the function gave")
    Traceback (most recent call last):
    ...
    TypeError: the function gave an array of int64, not a pyarrow RecordBatch or Table
    """
    if isinstance(made, (pa.RecordBatch, pa.Table)):
        return _keeping(made, told)
    if hasattr(made, "__arrow_c_array__"):
        made = pa.array(made)
    elif hasattr(made, "__arrow_c_stream__"):
        made = pa.chunked_array(made)
    elif type(made) is CoroutineType:
        raise TypeError(f"the function {unawaited(made)}")
    else:
        more = "; a batch without rows is batch.slice(0, 0)" if made is None else ""
        raise TypeError(f"{told} {short(made)}, not a pyarrow RecordBatch or Table{more}")
    if not pa.types.is_struct(made.type):
        raise TypeError(f"{told} an array of {made.type}, not a pyarrow RecordBatch or Table")
    if made.null_count:
        raise ValueError(
            f"{told} an array of {len(made)} structs, of which {made.null_count} are null: a row cannot be null; leave"
            " it out"
        )
    if isinstance(made, pa.Array):
        made = pa.RecordBatch.from_struct_array(made)
    else:
        made = pa.Table.from_arrays(made.flatten(), schema=pa.schema(list(made.type)))
    return _keeping(made, told)


def _keeping(made: Any, told: str) -> Any:
    """Rows that keep what their schema says of nulls."""
    for field, column in zip(made.schema, made.columns, strict=True):
        if not field.nullable and column.null_count:
            raise ValueError(f"{told} nulls in column {field.name!r}, which its own schema calls NOT NULL")
    return made
