"""What rows hold, beside a count in plain Python, and the blocks that sources are cut into by it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _local as local
from penstock import _views
from penstock._views import bytes_of

WORDS = pa.dictionary(pa.int8(), pa.string())
KINDS = [
    WORDS,
    pa.dictionary(pa.int32(), pa.int64()),
    pa.string_view(),
    pa.binary_view(),
    pa.list_view(pa.int64()),
    pa.list_view(pa.string()),
    pa.large_list_view(pa.string_view()),
    pa.list_view(pa.list_view(pa.int32())),
    pa.list_(pa.string_view()),
    pa.large_list(WORDS),
    pa.list_(pa.list_(pa.string_view(), 2)),
    pa.struct({"a": pa.list_view(pa.string()), "b": pa.int64()}),
    pa.list_view(pa.struct({"a": pa.string(), "b": pa.int16()})),
    pa.map_(pa.string(), pa.string_view()),
]


def held(value: Any, kind: pa.DataType) -> int:
    """As `bytes_of`, of one value."""
    is_type = pa.types
    if is_type.is_dictionary(kind):
        return kind.index_type.bit_width // 8 + (0 if value is None else held(value, kind.value_type))
    if is_type.is_struct(kind):
        return sum(held(None if value is None else value[field.name], field.type) for field in kind)
    if is_type.is_fixed_size_list(kind):
        return sum(held(one, kind.value_type) for one in (value or [None] * kind.list_size))
    if is_type.is_map(kind):
        return 4 + sum(held(key, kind.key_type) + held(item, kind.item_type) for key, item in value or [])
    if is_type.is_nested(kind):
        large = is_type.is_large_list(kind) or is_type.is_large_list_view(kind)
        width = (8 if large else 4) * (2 if "view" in str(kind).split("<")[0] else 1)
        return width + sum(held(one, kind.value_type) for one in value or [])
    if is_type.is_integer(kind):
        return int(kind.bit_width) // 8
    text = value.encode() if isinstance(value, str) else value or b""
    return len(text) + (16 if is_type.is_string_view(kind) or is_type.is_binary_view(kind) else 4)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    is_type = pa.types
    made: st.SearchStrategy[Any]
    if is_type.is_dictionary(kind):
        return values(kind.value_type)
    if is_type.is_struct(kind):
        made = st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    elif is_type.is_fixed_size_list(kind):
        made = st.lists(values(kind.value_type), min_size=kind.list_size, max_size=kind.list_size)
    elif is_type.is_map(kind):
        made = st.lists(st.tuples(st.text(max_size=3), values(kind.item_type)), max_size=3)
    elif is_type.is_nested(kind):
        made = st.lists(values(kind.value_type), max_size=3)
    elif is_type.is_integer(kind):
        made = st.integers(-9, 9)
    else:
        made = (
            st.text(max_size=20) if is_type.is_string_view(kind) or is_type.is_string(kind) else st.binary(max_size=9)
        )
    return st.none() | made


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_what_rows_hold_is_what_they_show(kind: pa.DataType, data: st.DataObject) -> None:
    column = data.draw(st.lists(values(kind), max_size=8))
    start = data.draw(st.integers(0, len(column)))
    stop = data.draw(st.integers(start, len(column)))
    batch = pa.record_batch({"a": pa.array(column, kind)}).slice(start, stop - start)
    assert bytes_of(batch) == sum(held(value, kind) for value in column[start:stop])


def test_what_lies_apart_from_the_rows_counts_as_they_show_it() -> None:
    words = pa.array(["a" * 100, "b" * 1_000, "c"])
    coded = pa.record_batch({"a": pa.DictionaryArray.from_arrays(pa.array([1, None, 0, 1], pa.int32()), words)})
    assert bytes_of(coded) == 4 * 4 + (4 + 1_000) + (4 + 100) + (4 + 1_000)
    assert bytes_of(coded.slice(1, 2)) == 2 * 4 + (4 + 100)
    none = pa.DictionaryArray.from_arrays(pa.nulls(3, pa.int32()), pa.array([], pa.string()))
    assert bytes_of(pa.record_batch({"a": none})) == 3 * 4
    shared = pa.ListViewArray.from_arrays(pa.array([1, 0], pa.int32()), pa.array([1, 3], pa.int32()), words)
    assert bytes_of(pa.record_batch({"a": shared})) == 2 * 8 + (4 + 1_000) + (4 + 100 + 4 + 1_000 + 4 + 1)


VIEWS = pa.array(["a" * 50, "b" * 50], pa.string_view())


@pytest.mark.parametrize(
    "column",
    [
        pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [VIEWS]),
        pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [VIEWS]),
        pa.RunEndEncodedArray.from_arrays([1, 2], VIEWS),
    ],
    ids=["sparse", "dense", "runs"],
)
def test_of_unions_and_runs_it_is_what_pyarrow_says(column: pa.Array) -> None:
    assert bytes_of(pa.record_batch({"a": column})) == _views._buffered(column)
    table = pa.table({"k": [1, 2], "unused": column})
    assert pk.Flow("k bigint").map_batches(lambda batch: batch).collect(table)["k"].to_pylist() == [1, 2]
    held_by_list = pa.record_batch({"a": pa.ListViewArray.from_arrays([0, 1], [1, 1], column), "b": VIEWS})
    assert bytes_of(held_by_list.slice(0, 1)) > 66, "about what lies in it"


LARGE = pa.array([f"{n:04}" + "x" * 96 for n in range(200)])  # 20,000 bytes
CODED = pa.DictionaryArray.from_arrays(pa.array([n % 10 for n in range(40)], pa.int32()), LARGE)
LISTED = pa.ListViewArray.from_arrays(pa.array([0] * 40, pa.int32()), pa.array([1] * 40, pa.int32()), LARGE)


@pytest.mark.parametrize(("column", "kind"), [(CODED, "string"), (CODED, CODED.type), (LISTED, "array<string>")])
def test_what_rows_do_not_show_cuts_no_batch(monkeypatch: pytest.MonkeyPatch, column: pa.Array, kind: Any) -> None:
    monkeypatch.setattr(local, "_BLOCK_BYTES", 10_000)
    table = pa.table({"a": column})
    schema = pa.schema({"a": kind}) if isinstance(kind, pa.DataType) else pk.Flow(f"a {kind}").input_schema
    assert [batch.num_rows for batch in local.batches(table, schema, 1_000)] == [40]
    monkeypatch.setattr(local, "_BLOCK_BYTES", 1_200)
    assert [batch.num_rows for batch in local.batches(table, schema, 1_000)] == [10] * 4


def test_the_layout_of_texts_makes_no_row_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BLOCK_BYTES", 10_000)
    flow = pk.Flow("a string, ts bigint", event_time="ts").key_by("a").window(pk.tumbling("10ms")).agg(n=pk.count())
    times = [n * 37 % 1_000 for n in range(40)]
    late: list[pa.RecordBatch] = []
    for column in (CODED.dictionary_decode(), CODED):
        made = flow.collect(pa.table({"a": column, "ts": times}), streaming=True, late=late.append)
        assert sum(made["n"].to_pylist()) == 40 and not late


def test_a_batch_of_what_its_rows_share_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BLOCK_BYTES", 10_000)
    sizes: list[int] = []
    monkeypatch.setattr(local, "bytes_of", lambda batch: (sizes.append(batch.num_rows), _views.bytes_of(batch))[1])
    batch = pa.record_batch({"a": pa.UnionArray.from_sparse(pa.array([0] * 40, pa.int8()), [CODED])})
    assert batch.nbytes > 20_000, "whose values pyarrow counts for each piece"
    assert [piece.num_rows for piece in local.batches(batch, batch.schema, 1_000)] == [40]
    assert sizes == [40, 20, 20]


def test_only_columns_that_the_flow_reads_cut_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BLOCK_BYTES", 10_000)
    odd = pa.array([[("a", "x" * 100)]] * 200, pa.map_(pa.string(), pa.string_view()))
    table = pa.table({"unused": LARGE, "odd": odd, "k": range(200)})
    wanted = pa.schema({"k": pa.int32()})
    assert [batch.num_rows for batch in local.batches(table, wanted, 1_000)] == [200]
    mapped = pk.Flow("odd map<string, string>").map_batches(lambda batch: batch)
    assert mapped.collect(table)["odd"].to_pylist() == odd.to_pylist()
    twice = pa.Table.from_arrays([table["k"], table["k"]], names=["k", "k"])
    for source, says in ((twice, "2 columns named 'k'"), (table.select(["odd", "unused"]), "it has odd, unused")):
        with pytest.raises(pk.errors.SchemaError, match=says):
            list(local.batches(source, wanted, 1_000))
