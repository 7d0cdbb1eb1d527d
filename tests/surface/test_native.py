"""The native module from outside: stubs, handles, Arrow data, tokenizer, generator, fork."""

from __future__ import annotations

import ast
import gzip
import inspect
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import in_child
from hypothesis import given
from hypothesis import strategies as st

import penstock
from conftest import data_folder
from penstock import _native, errors

STUB = Path(penstock.__file__).with_name("_native.pyi")


# The stub


def _stub() -> dict[str, Any]:
    """Functions by name, and classes as (bases, members by name)."""
    found: dict[str, Any] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            members = {member.name: member for member in node.body if isinstance(member, ast.FunctionDef)}
            found[node.name] = (node, members)
    return found


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


def _stub_parameters(node: ast.FunctionDef) -> list[tuple[str, str]]:
    """(name, default) of each parameter but the receiver."""
    arguments = node.args
    positional = arguments.posonlyargs + arguments.args
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = list(zip(positional, defaults, strict=True)) + list(
        zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    )
    shown = [(argument.arg, ast.unparse(default) if default else "") for argument, default in pairs]
    return [pair for pair in shown if pair[0] not in ("self", "cls")]


def _built_parameters(thing: Any) -> list[tuple[str, str]]:
    signature = inspect.signature(thing)
    return [
        (p.name, "" if p.default is p.empty else repr(p.default))
        for p in signature.parameters.values()
        if p.name not in ("self", "$self", "cls")
    ]


def test_the_stub_names_everything_and_nothing_more() -> None:
    built = {name for name in vars(_native) if not name.startswith("_")}
    assert set(_stub()) == built


def test_functions_have_the_signatures_of_the_stub() -> None:
    for name, node in _stub().items():
        if isinstance(node, ast.FunctionDef):
            assert _stub_parameters(node) == _built_parameters(getattr(_native, name)), name


#: Dunders that every class has or that the stub format does not list.
_HIDDEN = {"__repr__", "__reduce__", "__doc__", "__module__", "__new__", "__getattribute__"}


def test_classes_have_the_members_of_the_stub() -> None:
    for name, found in _stub().items():
        if isinstance(found, ast.FunctionDef):
            continue
        _, members = found
        built = getattr(_native, name)
        own = {member for member in vars(built) if member not in _HIDDEN}
        assert {member for member in members if member != "__new__"} == own, name
        if "__new__" in members:
            assert _stub_parameters(members["__new__"]) == _built_parameters(built), name
        else:
            with pytest.raises(TypeError):
                built()
        for member, node in members.items():
            attribute = getattr(built, member)
            if _is_property(node):
                assert not callable(attribute), f"{name}.{member}"
            elif not member.startswith("__"):
                assert _stub_parameters(node) == _built_parameters(attribute), f"{name}.{member}"


def test_the_stub_documents_everything() -> None:
    for name, found in _stub().items():
        node, members = (found, {}) if isinstance(found, ast.FunctionDef) else found
        assert ast.get_docstring(node), name
        for member, inner in members.items():
            if not member.startswith("__"):
                assert ast.get_docstring(inner), f"{name}.{member}"
                assert getattr(getattr(_native, name), member).__doc__, f"{name}.{member}: no docstring in the module"


# Handles


def _batch() -> pa.RecordBatch:
    return pa.record_batch(
        {
            "i": pa.array([1, None, 3], pa.int64()),
            "s": pa.array(["a", "bb", None]),
            "l": pa.array([[1], [], None], pa.list_(pa.int32())),
            "d": pa.array(["x", "y", "x"]).dictionary_encode(),
            "t": pa.array([1, 2, 3], pa.timestamp("us", "UTC")),
        }
    )


def _handles() -> list[Any]:
    generator = _native.Nexmark()
    batch = _native.tokenize(b"a b")
    return [generator, batch, batch.schema]


@pytest.mark.parametrize("handle", _handles(), ids=lambda handle: type(handle).__name__)
def test_handles_are_frozen_and_refuse_pickling(handle: Any) -> None:
    name = type(handle).__name__
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=f"{name} is a handle and cannot be pickled"):
            pickle.dumps(handle, protocol)
    with pytest.raises(AttributeError):
        handle.new_attribute = 1
    with pytest.raises(TypeError):
        type("Derived", (type(handle),), {})


# Arrow data


def _through(batch: Any) -> pa.RecordBatch:
    return pa.record_batch(_native.RecordBatch(batch))


def _addresses(batch: pa.RecordBatch) -> list[int | None]:
    return [None if buffer is None else buffer.address for column in batch.columns for buffer in column.buffers()]


def test_batches_come_back_equal_and_without_copying() -> None:
    batch = _batch()
    back = _through(batch)
    assert back.equals(batch, check_metadata=True)
    assert _addresses(back) == _addresses(batch)


def test_slices_come_back_equal_and_without_copying() -> None:
    batch = pa.record_batch({"i": pa.array(range(1000)), "s": pa.array([str(i) for i in range(1000)])})
    part = batch.slice(700, 100)
    back = _through(part)
    assert back.equals(part)
    first, last = batch["i"].buffers()[1].address, batch["i"].buffers()[1].address + 8 * 1000
    inside = back["i"].buffers()[1].address
    assert inside is not None and first <= inside < last, "the values were copied"


@pytest.mark.parametrize(
    "batch",
    [
        pa.record_batch({"x": pa.array([], pa.int64())}),
        pa.record_batch([], schema=pa.schema([])),
        pa.record_batch({"n": pa.nulls(3)}),
        pa.record_batch({"b": pa.array([True, None, False])}).slice(1, 2),
        pa.record_batch({"f": pa.array([b"ab", None], pa.binary(2))}),
        pa.record_batch({"m": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8()))}),
        pa.record_batch({"v": pa.array(["a", "long enough to leave the view"], pa.string_view())}),
        pa.record_batch({"c": pa.array([1, 2])}).replace_schema_metadata({"who": "me"}),
    ],
    ids=lambda batch: str(batch.schema).replace("\n", " ")[:30],
)
def test_odd_batches_come_back_equal(batch: pa.RecordBatch) -> None:
    assert _through(batch).equals(batch, check_metadata=True)
    assert _native.RecordBatch(batch).num_rows == batch.num_rows
    assert pa.schema(_native.Schema(batch.schema)).equals(batch.schema, check_metadata=True)


def test_data_outlives_its_producer() -> None:
    handle = _native.RecordBatch(pa.record_batch({"x": list(range(10_000))}))
    first, second = pa.record_batch(handle), pa.record_batch(handle)
    del handle
    assert first["x"].to_pylist() == second["x"].to_pylist() == list(range(10_000))


def test_a_batch_that_goes_to_and_fro_is_let_go_of() -> None:
    """Each handle holds the batch that it was made of: one release within the other took more than the stack."""
    batch = pa.record_batch({"k": [1, 2], "s": ["a", "b"]})
    last = batch["s"]
    for _ in range(50_000):
        batch = pa.record_batch(_native.RecordBatch(batch))
    assert batch["s"].equals(last)
    del batch


def test_streams_become_one_batch() -> None:
    table = pa.table({"x": pa.chunked_array([[1, 2], [3], []], pa.int64())})
    assert _through(table)["x"].to_pylist() == [1, 2, 3]
    assert _through(table.slice(0, 0)).schema == table.schema
    one = pa.record_batch({"x": [1, 2]})
    assert _addresses(_through(pa.table(one))) == _addresses(one)


def test_what_is_no_arrow_data_is_refused() -> None:
    for wrong in (1, None, {"x": [1]}, pa.array([1, 2]), pa.schema([])):
        with pytest.raises(TypeError):
            _native.RecordBatch(wrong)
    with pytest.raises(errors.SchemaError, match="null rows"):
        _native.RecordBatch(pa.StructArray.from_arrays([pa.array([1, 2])], ["x"], mask=pa.array([True, False])))


def test_a_lying_producer_is_refused() -> None:
    class Swapped:
        def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
            return tuple(reversed(_batch().__arrow_c_array__()))

    class Spent:
        def __init__(self) -> None:
            self.capsules = _batch().__arrow_c_array__()

        def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
            return self.capsules

    class Short:
        def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
            return (1,)

    with pytest.raises((ValueError, TypeError)):
        _native.RecordBatch(Swapped())
    with pytest.raises((ValueError, TypeError, IndexError)):
        _native.RecordBatch(Short())
    spent = Spent()
    _native.RecordBatch(spent)
    with pytest.raises(errors.SchemaError, match="consumed"):
        _native.RecordBatch(spent)


def test_text_that_is_no_utf8_is_refused_by_its_row() -> None:
    for kind, offset in ((pa.string(), "i"), (pa.large_string(), "q")):
        buffers = [
            None,
            pa.py_buffer(struct.pack(f"<4{offset}", 0, 2, 4, 6)),
            pa.py_buffer("äé".encode() + b"\xff\xfe"),
        ]
        bad = pa.record_batch({"s": pa.Array.from_buffers(kind, 3, buffers)})
        with pytest.raises(errors.SchemaError, match='column "s" holds text in row 2 that is not UTF-8'):
            _native.RecordBatch(bad)
        assert _through(bad.slice(0, 2))["s"].to_pylist() == ["ä", "é"]
        # A character cut in two by the rows' bounds.
        cut = [None, pa.py_buffer(struct.pack(f"<3{offset}", 0, 1, 2)), pa.py_buffer("ä".encode())]
        with pytest.raises(errors.SchemaError, match="row 0"):
            _native.RecordBatch(pa.record_batch({"s": pa.Array.from_buffers(kind, 2, cut)}))


def test_text_within_other_types_is_looked_at_too() -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(struct.pack("<3i", 0, 1, 2)), pa.py_buffer(b"a\xff")]
    )
    numbers = pa.array([0, 1, 0], pa.int32())
    columns = [
        pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), bad),
        pa.LargeListArray.from_arrays(pa.array([0, 1, 2], pa.int64()), bad),
        pa.FixedSizeListArray.from_arrays(bad, 1),
        pa.StructArray.from_arrays([bad], names=["within"]),
        pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array([1, 2]), bad),
        pa.DictionaryArray.from_arrays(numbers, bad),
        bad.cast(pa.binary()).cast(pa.binary_view()).view(pa.string_view()),
        pa.ListViewArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([1, 1], pa.int32()), bad),
        pa.LargeListViewArray.from_arrays(pa.array([1, 0], pa.int64()), pa.array([1, 1], pa.int64()), bad),
        pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [bad]),
    ]
    for column in columns:
        with pytest.raises(errors.SchemaError, match=r'column "s" holds text.* that is not UTF-8: read it as binary'):
            _native.RecordBatch(pa.record_batch({"s": column}))
    # What is not of the part says nothing of it.
    for column in [*columns[:5], columns[7]]:
        assert len(_through(pa.record_batch({"s": column.slice(0, 1)}))) == 1


# Tokenizer


def _words(text: bytes) -> list[str]:
    return [word.decode().lower() for word in re.findall(rb"[A-Za-z]+", text)]


@given(st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode)))
def test_words_equal_the_regex(text: bytes) -> None:
    assert pa.record_batch(_native.tokenize(text))["word"].to_pylist() == _words(text)


@given(st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=8), st.integers(0, 3))
def test_words_of_a_column_end_with_each_value(texts: list[str | None], skip: int) -> None:
    expected = [word for text in texts[skip:] if text is not None for word in _words(text.encode())]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
        values: Any = texts if "string" in str(kind) else [t and t.encode() for t in texts]
        column = pa.array(values, kind).slice(skip)
        assert pa.record_batch(_native.tokenize(column))["word"].to_pylist() == expected


def test_tokenize_refuses_what_is_no_text() -> None:
    for wrong in (1, "text", pa.array([1])):
        with pytest.raises(TypeError):
            _native.tokenize(wrong)


def test_words_of_the_books(text_data: Path) -> None:
    text = b"".join(gzip.decompress(file.read_bytes()) for file in sorted(text_data.glob("*.txt.gz")))
    counts = pa.record_batch(_native.tokenize(text))["word"].value_counts()
    found = {entry["values"]: entry["counts"] for entry in counts.to_pylist()}
    lines = (text_data / "expected_wordcount.tsv").read_text().splitlines()
    assert found == {word: int(count) for word, count in (line.split("\t") for line in lines)}


# NEXMark


def _tables(generator: Any, count: int) -> dict[str, pa.Table]:
    return {name: pa.table(pa.record_batch(b)) for name, b in generator.next_batches(count).items()}


def test_nexmark_equals_the_reference_tables() -> None:
    folder = data_folder("nexmark")
    made = _tables(_native.Nexmark(), 100_000)
    assert set(made) == {"person", "auction", "bid"}
    for name, table in made.items():
        expected = pq.read_table(folder / f"{name}.parquet")
        assert table.schema.equals(expected.schema), name
        assert table.equals(expected.combine_chunks()), name


def test_nexmark_can_be_cut_anywhere() -> None:
    whole = _tables(_native.Nexmark(), 140_000)
    parts = [_tables(_native.Nexmark(start=at, stop=at + 70_000), 1 << 20) for at in (0, 70_000)]
    strided = [_tables(_native.Nexmark(start=at, stop=140_000, step=3), 1 << 20) for at in range(3)]
    for name, table in whole.items():
        assert pa.concat_tables([part[name] for part in parts]).equals(table)
        assert pa.concat_tables([part[name] for part in strided]).sort_by("seq").equals(table)
    generator = _native.Nexmark()
    small = pa.concat_tables([_tables(generator, 7)["bid"] for _ in range(100)])
    assert small.equals(whole["bid"].slice(0, small.num_rows)) and generator.position == 700


def test_nexmark_times_are_exact_beyond_the_range_of_floats() -> None:
    # 2**24 milliseconds and events are far behind; the crate alone would round to multiples of 2**14 ms here.
    start, rate, base = 250 * 3600 * 24 * 3650, 250, 1436918400000
    bids = _tables(_native.Nexmark(rate, base, start=start), 5000)["bid"]
    seq, times = bids["seq"].to_pylist(), bids["date_time"].to_pylist()
    assert times == [base + 4 * s for s in seq]
    auctions = _tables(_native.Nexmark(rate, base, start=start), 5000)["auction"].to_pylist()
    # In flight 100 auctions: an auction stays open for up to twice the time of about 1666 events.
    assert all(0 < a["expires"] - a["date_time"] <= 2 * 1667 * 4 + 1 for a in auctions)
    assert len({a["expires"] - a["date_time"] for a in auctions}) > 200


@pytest.mark.parametrize("rate", [1, 3, 7, 49, 50, 250, 999, 9973, 10_000, 9_999_999, 10_000_000])
def test_nexmark_times_round_as_documented(rate: int) -> None:
    start = 12_345_678_901
    bids = _tables(_native.Nexmark(rate, 0, start=start), 500)["bid"]
    expected = [(2000 * s + rate) // (2 * rate) for s in bids["seq"].to_pylist()]
    assert bids["date_time"].to_pylist() == expected


def test_nexmark_disorder_is_a_permutation_within_groups() -> None:
    inorder = _tables(_native.Nexmark(), 10_000)
    shuffled = _tables(_native.Nexmark(out_of_order=100), 10_000)
    for name, table in inorder.items():
        other = shuffled[name]
        moved = other["date_time"].to_pylist() != table["date_time"].to_pylist()
        assert moved == (name != "person"), "the two persons of a hundred events keep their places"
        order = [(column, "ascending") for column in table.column_names if column != "seq"]
        assert table.drop_columns("seq").sort_by(order).equals(other.drop_columns("seq").sort_by(order))
        lag = [
            abs(at - 4 * seq - 1436918400000)
            for at, seq in zip(*(other[c].to_pylist() for c in ("date_time", "seq")), strict=True)
        ]
        assert max(lag) < 100 * 4


@pytest.mark.parametrize("group", [947, 953, 953 * 2, 1_000_000, 947 * 953])
def test_nexmark_disorder_takes_no_event_twice(group: int) -> None:
    """Of sizes that have a factor with the order, and of a last group that the end cuts short."""
    inorder, shuffled = (_tables(_native.Nexmark(stop=1_000, out_of_order=each), 1_000) for each in (1, group))
    for name, table in inorder.items():
        order = [(column, "ascending") for column in table.column_names if column != "seq"]
        assert table.drop_columns("seq").sort_by(order).equals(shuffled[name].drop_columns("seq").sort_by(order))
    whole = _native.Nexmark(stop=947 * 953, out_of_order=group).next_batches(947 * 953, ["person"])["person"]
    ids = pa.table(pa.record_batch(whole))["id"]
    assert len(ids.unique()) == len(ids)


def test_a_nexmark_event_does_not_depend_on_the_way_to_it() -> None:
    """Forward, and to and fro, over the end of what the generator counts through at once, 65,500 events."""
    inorder, scrambled = (
        _tables(_native.Nexmark(start=65_000, stop=66_000, out_of_order=group), 1_000) for group in (1, 1_000)
    )
    for name, table in inorder.items():
        order = [(column, "ascending") for column in table.column_names if column != "seq"]
        assert table["date_time"].to_pylist() != scrambled[name]["date_time"].to_pylist()
        assert scrambled[name].drop_columns("seq").sort_by(order).equals(table.drop_columns("seq").sort_by(order))


def test_nexmark_makes_only_what_is_asked_for() -> None:
    made = _tables(_native.Nexmark(), 5000)
    only = _tables(_native.Nexmark(), 5000)
    some = {n: pa.table(pa.record_batch(b)) for n, b in _native.Nexmark().next_batches(5000, ["bid"]).items()}
    assert set(some) == {"bid"} and some["bid"].equals(made["bid"]) and only.keys() == made.keys()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"events_per_second": 0}, "events_per_second"),
        ({"events_per_second": 10_000_001}, "events_per_second"),
        ({"step": 0}, "step"),
        ({"out_of_order": 0}, "out_of_order"),
        ({"start": 2**60}, "start"),
        ({"base_time_ms": 2**62}, "base_time_ms"),
    ],
)
def test_nexmark_refuses_what_is_out_of_range(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _native.Nexmark(**arguments)


def test_nexmark_refuses_unknown_tables_and_absurd_sizes() -> None:
    generator = _native.Nexmark()
    with pytest.raises(ValueError, match="person, auction and bid"):
        generator.next_batches(1, ["bids"])
    with pytest.raises(ValueError, match="at most 10000000 events"):
        generator.next_batches(1 << 40)
    with pytest.raises(OverflowError):
        generator.next_batches(-1)
    assert generator.position == 0


# Processes


def test_importing_starts_nothing() -> None:
    # pyarrow and numpy start threads of their own; ours must add none, and no socket either.
    script = """
import os, sys
import pyarrow
count = lambda: (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
before = count()
import penstock._native
assert count() == before, (before, count())
assert "pyspark" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_handles_in_a_forked_child() -> None:
    generator, batch = _native.Nexmark(), _native.tokenize(b"plain data")

    def work() -> None:
        with pytest.raises(errors.ForkError) as caught:
            generator.next_batches(1)
        assert caught.value.owner == os.getppid() and caught.value.here == os.getpid()
        assert pa.record_batch(batch)["word"].to_pylist() == ["plain", "data"]
        assert _native.Nexmark().next_batches(50)["bid"].num_rows == 46

    in_child(work)
    assert generator.next_batches(50)["bid"].num_rows == 46
