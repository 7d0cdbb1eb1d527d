"""Columns of tasks: as pyarrow makes them, in a process that never loads pandas."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark._tasks import columns

SCHEMA = pa.schema([("small", pa.int32()), ("large", pa.int64()), ("said", pa.string())])
ROWS = st.lists(
    st.fixed_dictionaries(
        {"small": st.none() | st.integers(-(2**31), 2**31 - 1), "large": st.none() | st.integers(-(2**63), 2**63 - 1)},
        optional={"said": st.none() | st.text()},
    ),
    max_size=20,
)


@given(ROWS)
def test_rows_are_as_pyarrow_makes_them(rows: list[dict[str, int | str | None]]) -> None:
    made = columns.rows(rows, SCHEMA)
    made.validate(full=True)
    assert made.equals(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint64()])
@pytest.mark.parametrize("values", [range(0), range(7), [2**31 - 1, 0]])
def test_integers_are_as_pyarrow_makes_them(kind: pa.DataType, values: range | list[int]) -> None:
    made = columns.integers(values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind))
    assert [columns.integer(value, kind) for value in values] == [pa.scalar(value, kind) for value in values]
    with pytest.raises(OverflowError):
        columns.integers([2**64], kind)


@pytest.mark.parametrize("value", [b"", b"said"])
def test_a_binary_value_is_as_pyarrow_makes_it(value: bytes) -> None:
    made = columns.binary(pa.py_buffer(value))
    made.validate(full=True)
    assert made.equals(pa.array([value], pa.binary()))


def test_tasks_do_not_load_pandas() -> None:
    """A worker of Spark waits for it in its first task: what tasks of ours make and compare goes without."""
    program = """
import sys
import pyarrow as pa
from penstock.spark._engine import drains, feeds
from penstock.spark._graph.stream import _packed
from penstock.spark._tasks import apart, columns, partitions
from penstock.spark.batch import places

receipt = {"partition": 0, "attempt": 1, "member": 1, "rows": 9, "hash": -1, "gone": "it has died"}
made = columns.rows([receipt], feeds.RECEIPTS)
assert places(columns.integers([0, -1]), 4).to_pylist() == [0, 3]
x = columns.integers([1, 2])
masks = [pa.Array.from_buffers(pa.bool_(), 2, [None, pa.py_buffer(bits)]) for bits in (b"\\x01", b"\\x02")]
sides = [pa.StructArray.from_arrays([x], names=["x"], mask=mask) for mask in masks]
tagged = pa.RecordBatch.from_arrays(sides, names=["a", "b"])
parted = [(side, rows.to_pylist()) for side, rows in apart.split(tagged, ["a", "b"])]
assert parted == [(0, [{"x": 2}]), (1, [{"x": 1}])]
[packed] = _packed([made])
assert pa.ipc.open_stream(packed.column(0)[0].as_buffer()).read_next_batch().equals(made)
assert pa.repeat(columns.integer(7), 3).to_pylist() == [7, 7, 7]
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
