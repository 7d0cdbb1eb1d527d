"""Columns that a task makes of a few numbers and texts of its own.

pyarrow imports pandas as soon as it is to make an array or a scalar of Python values, to see whether they are a Series:
0.7 s of CPU, more than the rest of what a Python worker of Spark loads for us. The first task of each worker would wait
for that, though neither we nor Spark need pandas there.

Invariant: nothing here has pyarrow import pandas; what is made is what pyarrow would make.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

__all__ = ["binary", "integer", "integers", "rows"]

_CODES = {pa.int32(): "i", pa.int64(): "q", pa.uint64(): "Q"}
_INT64 = pa.int64()


def integers(values: Iterable[int], kind: pa.DataType = _INT64) -> pa.Array:
    """An array of int32, int64 or uint64. Raises OverflowError for what is none; some 20 ns a value."""
    numbers = array(_CODES[kind], values)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)], 0)


def integer(value: int, kind: pa.DataType = _INT64) -> pa.Scalar:
    """One such number, for pyarrow's functions: what they are given as an int becomes a scalar by way of pandas."""
    return integers([value], kind)[0]


def binary(value: pa.Buffer) -> pa.Array:
    """An array of one binary value, of less than 2 GiB, which it refers to."""
    return pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(array("i", [0, value.size])), value], 0)


def rows(given: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """``pa.RecordBatch.from_pylist`` for a few rows of integers and texts; what a row lacks is null."""
    columns = [_column([row.get(field.name) for row in given], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    there = sum(1 << place for place, value in enumerate(values) if value is not None)
    bits = pa.py_buffer(there.to_bytes(-(-len(values) // 8), "little"))
    if kind in _CODES:
        numbers = array(_CODES[kind], (0 if value is None else value for value in values))
        return pa.Array.from_buffers(kind, len(values), [bits, pa.py_buffer(numbers)])
    texts = [b"" if value is None else value.encode() for value in values]
    ends = array("i", accumulate(map(len, texts), initial=0))
    return pa.Array.from_buffers(kind, len(values), [bits, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
