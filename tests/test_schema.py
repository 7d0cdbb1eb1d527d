"""Schemas: Spark DDL, StructType and pyarrow in, pyarrow inside."""

from __future__ import annotations

import re
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._schema import conform, parse_ddl, spark_types, to_arrow, to_ddl
from penstock.errors import SchemaError

INSTANT = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("ddl", "kind"),
    [
        ("boolean", pa.bool_()),
        ("tinyint", pa.int8()),
        ("smallint", pa.int16()),
        ("INT", pa.int32()),
        ("integer", pa.int32()),
        ("bigint", pa.int64()),
        ("long", pa.int64()),
        ("float", pa.float32()),
        ("double", pa.float64()),
        ("decimal", pa.decimal128(10, 0)),
        ("decimal(5)", pa.decimal128(5, 0)),
        ("decimal(38, 18)", pa.decimal128(38, 18)),
        ("string", pa.string()),
        ("varchar(10)", pa.string()),
        ("binary", pa.binary()),
        ("date", pa.date32()),
        ("timestamp", INSTANT),
        ("timestamp_ltz", INSTANT),
        ("timestamp_ntz", pa.timestamp("us")),
        ("interval day to second", pa.duration("us")),
        ("void", pa.null()),
        ("array<int>", pa.list_(pa.field("element", pa.int32()))),
        ("map<string,array<bigint>>", pa.map_(pa.string(), pa.list_(pa.field("element", pa.int64())))),
        (
            "struct<a:int,b:string not null>",
            pa.struct([("a", pa.int32()), pa.field("b", pa.string(), False)]),
        ),
        ("struct<a int, b date>", pa.struct([("a", pa.int32()), ("b", pa.date32())])),
    ],
)
def test_ddl_types(ddl: str, kind: pa.DataType) -> None:
    assert parse_ddl(f"x {ddl}").field("x").type == kind
    assert parse_ddl(f"x: {ddl}, y int").names == ["x", "y"]
    # What can be read can be written, and means the same to Spark.
    assert parse_ddl(to_ddl(parse_ddl(f"x {ddl}"))).field("x").type == kind


def test_ddl_decorations() -> None:
    schema = parse_ddl("`odd ``name` bigint NOT NULL COMMENT 'its, a key', b string NULL,\n c date comment 'x'")
    assert schema.names == ["odd `name", "b", "c"]
    assert [field.nullable for field in schema] == [False, True, True]


@pytest.mark.parametrize(
    ("ddl", "says"),
    [
        ("a bigit", "column 'a' has the unknown type 'bigit'; did you mean 'bigint'"),
        ("a int64", "did you mean 'bigint'"),
        ("a variant", "column 'a' has the unknown type 'variant'; the types are boolean"),
        ("a array<Int32>", "did you mean 'int'"),
        ("a float64", "did you mean 'double'"),
        ("a str", "did you mean 'string'"),
        ("a datetime", "did you mean 'timestamp'"),
        ("a blob", "the types are boolean"),
        ("a", "column 'a' has no type"),
        ("a, b int", "column 'a' has no type"),
        ("a int b int", "expected a comma before 'b'"),
        ("a int,", "a column name is missing"),
        ("", "a column name is missing"),
        ("a decimal(40,2)", "out of range"),
        ("a decimal(4,5)", "out of range"),
        ("a decimal(x)", "expected a number"),
        ("a array<int", "expected '>'"),
        ("a interval month", "only intervals of days to seconds"),
        ("a int not nil", "expected NOT NULL"),
        ("a int; b int", "something unreadable at '; b int'"),
        ("a int, a string", "names column 'a' twice"),
    ],
)
def test_ddl_errors_name_the_place(ddl: str, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        to_arrow(ddl)
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_struct_type() -> None:
    types = pytest.importorskip("pyspark.sql.types")
    struct = types.StructType(
        [
            types.StructField("k", types.LongType(), False),
            types.StructField("ts", types.TimestampType()),
            types.StructField("wall", types.TimestampNTZType()),
            types.StructField("price", types.DecimalType(12, 2)),
            types.StructField("tags", types.ArrayType(types.StringType(), False)),
            types.StructField("m", types.MapType(types.StringType(), types.DoubleType())),
            types.StructField("s", types.StructType([types.StructField("a", types.ByteType())])),
            types.StructField("span", types.DayTimeIntervalType()),
        ]
    )
    schema = to_arrow(struct)
    assert schema.field("k") == pa.field("k", pa.int64(), False)
    assert schema.field("ts").type == INSTANT
    assert schema.field("wall").type == pa.timestamp("us")
    assert schema.field("price").type == pa.decimal128(12, 2)
    assert not schema.field("tags").type.value_field.nullable
    assert schema.field("m").type.item_type == pa.float64()
    assert schema.field("s").type == pa.struct([("a", pa.int8())])
    assert schema.field("span").type == pa.duration("us")
    with pytest.raises(SchemaError, match="column 'y'"):
        to_arrow(types.StructType([types.StructField("y", types.YearMonthIntervalType())]))
    if hasattr(types.StringType, "isUTF8BinaryCollation"):  # Spark 4 has them
        collated = types.StructType([types.StructField("k", types.StringType("UTF8_LCASE"))])
        with pytest.raises(SchemaError, match="'k' is text with a collation"):
            to_arrow(collated)


def test_reading_a_schema_does_not_import_pyspark() -> None:
    code = (
        "import sys, pyarrow as pa, penstock as pk; pk.Flow('a int'); pk.Flow(pa.schema({'a': pa.int8()}));"
        "assert not any(name.split('.')[0] == 'pyspark' for name in sys.modules), 'pyspark was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_objects() -> None:
    schema = pa.schema({"a": pa.int64()})

    class Exports:
        def __arrow_c_schema__(self) -> Any:
            return schema.__arrow_c_schema__()

    assert to_arrow(schema) is schema
    assert to_arrow(Exports()) == schema
    for wrong, kind in ((3, "int"), (pa.int64(), "DataType"), (schema.field("a"), "Field")):
        with pytest.raises(SchemaError, match=f"is a {kind}; give Spark DDL"):
            to_arrow(wrong)
    with pytest.raises(SchemaError, match="no columns"):
        to_arrow(pa.schema([]))


SIMPLE = ["boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary", "date"]
SIMPLE += ["timestamp", "timestamp_ntz", "void"]
TYPES = st.recursive(
    st.sampled_from(SIMPLE)
    | st.tuples(st.integers(1, 38), st.integers(0, 38))
    .filter(lambda p: p[1] <= p[0])
    .map(lambda p: f"decimal({p[0]},{p[1]})"),
    lambda inner: (
        inner.map(lambda t: f"array<{t}>")
        | inner.map(lambda t: f"map<string,{t}>")
        | st.lists(inner, min_size=1, max_size=3).map(
            lambda ts: "struct<" + ",".join(f"`f {i}`:{t}" for i, t in enumerate(ts)) + ">"
        )
    ),
    max_leaves=6,
)


@given(st.lists(TYPES, min_size=1, max_size=4))
def test_ddl_round_trip(types: list[str]) -> None:
    schema = parse_ddl(", ".join(f"c{i} {t}" for i, t in enumerate(types)))
    assert parse_ddl(to_ddl(schema)) == schema


def test_to_ddl_refuses_what_spark_lacks() -> None:
    with pytest.raises(SchemaError, match="column 'u' is uint64, for which Spark has no type"):
        to_ddl(pa.schema({"u": pa.uint64()}))


def test_an_instant_is_one_whatever_the_session_calls_timestamp() -> None:
    assert to_ddl(pa.schema({"t": INSTANT, "n": pa.timestamp("us")})) == "`t` timestamp_ltz, `n` timestamp_ntz"


def test_what_is_written_as_ddl_can_be_read() -> None:
    fields: list[tuple[pa.DataType, str, pa.DataType]] = [
        (pa.struct([]), "struct<>", pa.struct([])),
        (pa.list_(pa.struct([])), "array<struct<>>", pa.list_(pa.field("element", pa.struct([])))),
        # A whole number of hundreds, and of what is far behind the point: Spark has neither scale.
        (pa.decimal128(5, -2), "decimal(7,0)", pa.decimal128(7, 0)),
        (pa.decimal128(2, 5), "decimal(5,5)", pa.decimal128(5, 5)),
    ]
    for kind, text, back in fields:
        schema = pa.schema([pa.field("", kind), pa.field("`", kind, nullable=False)])
        assert to_ddl(schema) == f"`` {text}, ```` {text} NOT NULL"
        assert parse_ddl(to_ddl(schema)) == pa.schema([pa.field("", back), pa.field("`", back, nullable=False)])
    hundreds = pa.record_batch({"d": pa.array([Decimal(12300), None], pa.decimal128(5, -2))})
    assert conform(hundreds, spark_types(hundreds.schema)).to_pydict() == {"d": [Decimal(12300), None]}
    for wide in (pa.decimal128(38, -1), pa.decimal256(30, 39), pa.decimal256(39, 0)):
        with pytest.raises(SchemaError, match=re.escape(f"column 'd' is {wide}, for which Spark has no type")):
            to_ddl(pa.schema({"d": wide}))


def test_spark_types() -> None:
    schema = pa.schema({"a": pa.large_string(), "t": pa.timestamp("ns", tz="Asia/Tokyo"), "n": pa.timestamp("ms")})
    assert spark_types(schema) == pa.schema({"a": pa.string(), "t": INSTANT, "n": pa.timestamp("us")})


def test_an_extension_type_is_to_spark_what_it_is_stored_as() -> None:
    own = pa.schema({"u": pa.uuid(), "f": pa.fixed_shape_tensor(pa.float32(), [2])})
    assert to_ddl(own) == "`u` binary, `f` array<float>"
    floats = pa.FixedSizeListArray.from_arrays(pa.array([0.5, 1.5, 2.5, 3.5], pa.float32()), 2)
    uuids = pa.array([b"a" * 16, None], pa.uuid())
    batch = pa.record_batch([uuids, pa.ExtensionArray.from_storage(own.field("f").type, floats)], schema=own)
    there = conform(batch, spark_types(own))
    assert there.schema == spark_types(own)
    assert there.to_pydict() == {"u": [b"a" * 16, None], "f": [[0.5, 1.5], [2.5, 3.5]]}
    assert conform(there, own).equals(batch) and conform(there, own).schema == own
    with pytest.raises(SchemaError, match="cannot become"):
        conform(pa.record_batch({"u": [b"short"]}), pa.schema({"u": pa.uuid()}))
    with pytest.raises(SchemaError, match="column 'u' is string, expected"):
        conform(pa.record_batch({"u": ["a" * 16]}), pa.schema({"u": pa.uuid()}))
    with pytest.raises(SchemaError, match="column 'u' is uint8, for which Spark has no type"):
        to_ddl(pa.schema({"u": pa.opaque(pa.uint8(), "type", "vendor")}))


def test_conform_takes_columns_by_name_and_shares_them() -> None:
    batch = pa.record_batch({"x": [1, 2], "y": ["a", "b"], "z": [True, False]})
    fitted = conform(batch, parse_ddl("y string, x bigint"))
    assert fitted.schema.names == ["y", "x"]
    assert fitted.column("x").buffers()[1].address == batch.column("x").buffers()[1].address
    assert conform(fitted, fitted.schema) is fitted


def test_what_lists_call_their_elements_does_not_matter() -> None:
    ddl = "a array<bigint>, b array<array<int>>, m map<string, array<int>>, s struct<x: array<string>>"
    values: dict[str, Any] = {"a": [[1]], "b": [[[1], []]], "m": [[("k", [1])]], "s": [{"x": ["v"]}]}
    odd_map = pa.map_(pa.field("k", pa.string(), False), pa.field("v", pa.list_(pa.int32())))
    kinds = {"a": pa.list_(pa.int64()), "b": pa.list_(pa.list_(pa.int32())), "m": odd_map}
    own = pa.schema({**kinds, "s": pa.struct({"x": pa.list_(pa.string())})})
    declared = to_arrow(ddl)
    assert to_arrow(own).equals(declared, check_metadata=True) and not own.equals(declared, check_metadata=True)
    batch = pa.RecordBatch.from_pydict(values, schema=own)
    fitted = conform(batch, declared)
    assert fitted.schema.equals(declared, check_metadata=True) and fitted.to_pydict() == values
    fixed = pa.schema({"f": pa.list_(pa.int8(), 2), "l": pa.large_list(pa.int8()), "v": pa.list_view(pa.int8())})
    assert [str(kind) for kind in to_arrow(fixed).types] == [
        "fixed_size_list<element: int8>[2]",
        "large_list<element: int8>",
        "list_view<element: int8>",
    ]


def test_conform_keeps_every_value() -> None:
    def one(column: pa.Array, ddl: str) -> list[Any]:
        return list(conform(pa.record_batch({"a": column}), parse_ddl(f"a {ddl}")).column(0).to_pylist())

    assert one(pa.array([1, None], pa.int8()), "bigint") == [1, None]
    assert one(pa.array([7], pa.int64()), "int") == [7]
    assert one(pa.array(["x"]).dictionary_encode(), "string") == ["x"]
    assert one(pa.array(["x"], pa.string_view()), "string") == ["x"]
    assert one(pa.nulls(2), "string") == [None, None]
    assert one(pa.array([0.5, None, float("inf")]), "float") == [0.5, None, float("inf")]
    # As Spark stores it.
    assert one(pa.array([0.1]), "float") == pa.array([0.1], pa.float32()).to_pylist()
    assert one(pa.array([[0.5, float("inf")]]), "array<float>") == [[0.5, float("inf")]]
    assert str(one(pa.array([float("nan"), 0.5]).dictionary_encode(), "float")) == "[nan, 0.5]"
    assert one(pa.array([[1, None], None], pa.list_(pa.int8())), "array<bigint>") == [[1, None], None]
    assert one(pa.array([{"b": 1, "a": ["x"]}]), "struct<a: array<string>, b: bigint>") == [{"a": ["x"], "b": 1}]
    tokyo = pa.array([1_000_000], pa.timestamp("us", tz="Asia/Tokyo"))
    assert one(tokyo, "timestamp")[0].timestamp() == 1.0
    for column, ddl, says in [
        (pa.array([2**40]), "int", "without loss"),
        (pa.array([1], pa.timestamp("ns")), "timestamp_ntz", "without loss"),
        (pa.array(["1"]), "bigint", "is string, expected int64; cast it before"),
        (pa.array([1], pa.timestamp("us")), "timestamp", "cast it before"),
        (pa.array([1.5]), "bigint", "cast it before"),
        (pa.array([1, None]), "bigint NOT NULL", "a null in column 'a'"),
        (pa.array([1e300, None]).dictionary_encode(), "float", "without loss"),
        (pa.array([["1"]]), "array<bigint>", "is list<item: string>, expected list<element: int64>; cast it before"),
        (pa.array([[1e300]]), "array<float>", "without loss"),
        (pa.array([{"b": {"c": -1e300}}]), "struct<b: struct<c: float>>", "without loss"),
        (pa.array([[1]], pa.list_(pa.timestamp("us"))), "array<timestamp>", "cast it before"),
        (pa.array([{"b": 1}]), "struct<b: string>", "cast it before"),
        (pa.array([{"b": 1}]), "struct<b: bigint, c: string>", "cast it before"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())), "map<string, string>", "cast it before"),
    ]:
        with pytest.raises(SchemaError, match="'a'") as caught:
            one(column, ddl)
        assert says in str(caught.value)


def test_reading_a_schema_takes_one_look_at_each_column(monkeypatch: pytest.MonkeyPatch) -> None:
    class Text(str):
        """A text that counts what is cut from it."""

        cut = 0

        def __getitem__(self, at: Any) -> str:
            piece = str.__getitem__(self, at)
            Text.cut += len(piece)
            return piece

    ddl = Text(", ".join(f"column_{n} bigint" for n in range(300)))
    assert len(parse_ddl(ddl)) == 300 and Text.cut <= 2 * len(ddl)
    calls: list[str] = []
    schema = pa.schema([(f"c{n}", pa.int64()) for n in range(300)])
    sys.setprofile(lambda frame, event, what: calls.append(what.__name__) if event == "c_call" else None)
    try:
        to_arrow(schema)
    finally:
        sys.setprofile(None)
    assert calls.count("count") < 10, "not one look at all of them for each"
    with pytest.raises(SchemaError, match="schema names column 'a' twice"):
        to_arrow(pa.schema([("b", pa.int64()), ("a", pa.int8()), ("b", pa.int8()), ("a", pa.int8())]))


WORDS = pa.dictionary(pa.int8(), pa.string())
TEXTS = pa.array(["a", "b", None, "a"])


def fitted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    made = conform(pa.record_batch({"a": column}), pa.schema({"a": kind}))
    made.validate(full=True)
    assert made.schema.field("a").type.equals(kind)
    return made.column(0)


@pytest.mark.parametrize(
    "column",
    [
        TEXTS,
        TEXTS.cast(pa.large_string()),
        TEXTS.cast(pa.string_view()),
        TEXTS.dictionary_encode(),
        TEXTS.dictionary_encode().slice(1),
        pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.uint32()), pa.array(["x", "y"], pa.large_string())),
        pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.uint32()), pa.array(["x", "y"], pa.string_view())),
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["x", None])),
        pa.array([str(n) for n in range(200)]).dictionary_encode().slice(190),
        pa.array([], pa.string()),
        pa.nulls(2),
    ],
    ids=lambda column: str(column.type),
)
def test_conform_takes_any_dictionary_or_none(column: pa.Array) -> None:
    for kind in (WORDS, pa.dictionary(pa.int64(), pa.string(), ordered=True), pa.string()):
        assert fitted(column, kind).to_pylist() == column.to_pylist()
    if column.type != pa.dictionary(pa.uint32(), pa.string_view()):  # which pyarrow does not decode within lists
        listed = pa.ListArray.from_arrays(pa.array([0, len(column)], pa.int32()), pa.concat_arrays([column]))
        assert fitted(listed, pa.list_(WORDS)).to_pylist() == [column.to_pylist()]


def test_conform_keeps_a_dictionary_whose_indices_fit() -> None:
    coded = TEXTS.dictionary_encode()
    assert fitted(coded, WORDS).dictionary.buffers()[2].address == coded.dictionary.buffers()[2].address


def test_conform_refuses_what_a_dictionary_does_not_hold() -> None:
    numbers = pa.dictionary(pa.int8(), pa.int32())
    many = pa.array([str(n) for n in range(200)])
    for column, kind, says in [
        (
            many,
            WORDS,
            "it has 200 different values in one batch, more than int8 numbers; give the schema wider indices",
        ),
        (many.dictionary_encode(), WORDS, "it has 200 different values in one batch, more than int8 numbers"),
        (pa.array([1, 2**40]), numbers, "without loss"),
        (pa.array([1, 2**40]).dictionary_encode(), numbers, "without loss"),
        (pa.array([1e300] * 2).dictionary_encode(), pa.dictionary(pa.int8(), pa.float32()), "without loss"),
        (pa.array([1]), WORDS, "is int64, expected dictionary"),
        (TEXTS.dictionary_encode(), numbers, "cast it before"),
    ]:
        with pytest.raises(SchemaError, match="'a'") as caught:
            fitted(column, kind)
        assert says in str(caught.value)


VIEWED = pa.list_view(pa.int64())
NUMBERS = pa.array([3, 1, 2, None])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1, 2], None, [], [3]], VIEWED),
        pa.array([[1, 2], None, [], [3]], VIEWED).slice(1),
        pa.array([[1], None], pa.large_list_view(pa.int64())),
        # In any order, with parts in common, and with parts that nobody shows.
        pa.ListViewArray.from_arrays(pa.array([2, 0, 1], pa.int32()), pa.array([1, 2, 3], pa.int32()), NUMBERS),
        pa.ListViewArray.from_arrays(
            pa.array([2, 0, 1], pa.int32()),
            pa.array([1, 2, 2], pa.int32()),
            NUMBERS,
            mask=pa.array([False, True, False]),
        ).slice(1),
        pa.array([[1], None, [2, 3]]).slice(1),
        pa.array([], VIEWED),
        pa.nulls(2),
    ],
    ids=lambda column: str(column.type),
)
def test_conform_takes_list_views_for_lists_and_lists_for_list_views(column: pa.Array) -> None:
    for element in (pa.int64(), pa.int16()):
        for kind in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view):
            assert fitted(column, kind(element)).to_pylist() == column.to_pylist()


@pytest.mark.parametrize(
    ("views", "lists", "values"),
    [
        (pa.list_view(pa.string_view()), pa.list_(pa.string()), [["a"], None, ["b" * 30, None]]),
        (pa.list_(pa.list_view(pa.int64())), pa.list_(pa.list_(pa.int32())), [[[1], None], None, [[2, 3], []]]),
        (pa.list_(VIEWED, 2), pa.list_(pa.list_(pa.int64()), 2), [[[1], None], None, [[2, 3], []]]),
        (pa.struct({"x": VIEWED}), pa.struct({"x": pa.list_(pa.int64())}), [{"x": [1]}, None, {"x": None}]),
        (pa.map_(pa.string(), VIEWED), pa.map_(pa.string(), pa.list_(pa.int64())), [[("a", [1])], None, [("b", None)]]),
        (
            pa.list_view(pa.struct({"x": VIEWED})),
            pa.list_(pa.struct({"x": pa.list_(pa.int64())})),
            [[{"x": [1]}], None, [None, {"x": []}]],
        ),
    ],
)
def test_conform_takes_list_views_wherever_they_stand(views: pa.DataType, lists: pa.DataType, values: Any) -> None:
    for have, want in ((views, lists), (lists, views)):
        column = pa.array(values, have)
        assert fitted(column, want).to_pylist() == values
        assert fitted(column.slice(1), want).to_pylist() == values[1:]


def test_conform_looks_into_list_views() -> None:
    for column, kind, says in [
        (pa.array([[2**40]], VIEWED), pa.list_(pa.int16()), "without loss"),
        (pa.array([["1"]], pa.list_view(pa.string())), pa.list_(pa.int64()), "cast it before"),
        (pa.array([[1e300]], pa.list_view(pa.float64())), pa.list_(pa.float32()), "without loss"),
        (pa.array([[None]], VIEWED), pa.list_(pa.field("e", pa.int64(), False)), "a null in its elements"),
    ]:
        with pytest.raises(SchemaError, match="'a'") as caught:
            fitted(column, kind)
        assert says in str(caught.value)
    assert to_ddl(pa.schema({"a": VIEWED})) == "`a` array<bigint>"


@pytest.mark.parametrize(
    ("have", "want", "value", "says"),
    [
        ("struct<x int>", "struct<x int, y int>", {"x": 1}, "is struct<x: int32>, expected struct<x: int32, y: int32>"),
        ("struct<x string>", "struct<x int>", {"x": "1"}, "is struct<x: string>, expected struct<x: int32>"),
        ("array<string>", "array<int>", ["1"], "expected list<element: int32>"),
        ("map<string, string>", "map<string, int>", [("a", "1")], "expected map<string, int32>"),
        ("array<timestamp>", "array<timestamp_ntz>", [], "expected list<element: timestamp"),
        ("array<struct<x int>>", "array<struct<x int NOT NULL>>", [{"x": None}], "null"),
    ],
)
def test_conform_looks_into_nested_columns(have: str, want: str, value: Any, says: str) -> None:
    batch = pa.record_batch([pa.array([value], parse_ddl(f"a {have}").field(0).type)], ["a"])
    with pytest.raises(SchemaError, match="column 'a'") as caught:
        conform(batch, parse_ddl(f"a {want}"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "place"),
    [
        (lambda inner: pa.list_(inner), [[1], [2, 3]], [[1], [None]], "elements"),
        (lambda inner: pa.map_(pa.string(), inner), [[("a", 1)], []], [[("a", 1), ("b", None)]], "values"),
        (lambda inner: pa.list_(pa.list_(inner)), [[[1], None]], [[[None]]], "elements: elements"),
        (lambda inner: pa.struct([("f", pa.list_(inner))]), [{"f": [1]}], [{"f": [None]}], "field 'f': elements"),
    ],
)
def test_conform_finds_nulls_where_there_must_be_none(kind: Any, good: list[Any], bad: list[Any], place: str) -> None:
    have, want = (kind(pa.field("element", pa.int64(), nullable)) for nullable in (True, False))
    for values in (good, [*good, None], [None]):
        # Also of a part of a batch.
        batch = pa.record_batch([pa.array([bad[0], *values], have)], ["a"]).slice(1)
        assert conform(batch, pa.schema({"a": want})).column(0).to_pylist() == values
    for values in (bad, [None, *bad]):
        with pytest.raises(SchemaError, match=f"a null in its {place}, which"):
            conform(pa.record_batch([pa.array(values, have)], ["a"]), pa.schema({"a": want}))
        # pyarrow makes such arrays, too.
        wrong = pa.record_batch([pa.array(values, want), pa.array(range(len(values)))], ["a", "b"])
        for schema in (wrong.schema, pa.schema([wrong.schema.field("b"), wrong.schema.field("a")])):
            with pytest.raises(SchemaError, match=f"a null in its {place}, which"):
                conform(wrong, schema)


def test_conform_finds_nulls_in_columns_of_the_same_type() -> None:
    views = pa.list_view(pa.field("element", pa.int64(), nullable=False))
    inner = pa.struct([pa.field("f", pa.int64(), nullable=False)])
    for column, field, says in [
        (pa.array([1, None]), pa.field("a", pa.int64(), nullable=False), "has a null in column 'a'"),
        (pa.array([[None]], views), pa.field("a", views), "has a null in its elements"),
        (pa.array([None, {"f": None}], inner), pa.field("a", inner), "has a null in its field 'f'"),
    ]:
        schema = pa.schema([field])
        with pytest.raises(SchemaError, match=says):
            conform(pa.RecordBatch.from_arrays([column], schema=schema), schema)


def test_conform_names_missing_and_doubled_columns() -> None:
    with pytest.raises(SchemaError, match="input has no column 'b'; it has a"):
        conform(pa.record_batch({"a": [1]}), parse_ddl("b bigint"))
    doubled = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(SchemaError, match="2 columns named 'a'"):
        conform(doubled, parse_ddl("a bigint"))


def test_lists_of_no_elements_are_cast() -> None:
    """pyarrow divides by their size."""
    lists = pa.array([[], None], pa.list_(pa.int32(), 0))
    want = pa.schema({"x": pa.list_(pa.field("element", pa.int64(), False), 0)})
    assert conform(pa.record_batch({"x": lists}), want)["x"].to_pylist() == [[], None]


def test_a_null_struct_holds_no_null_that_must_not_be() -> None:
    """As Spark gives it, beside a field that has to be cast: below a null there is one."""
    inner = pa.struct([pa.field("id", pa.int64(), False)])

    def batch(mask: list[bool]) -> pa.RecordBatch:
        part = pa.StructArray.from_arrays([pa.array([7, None])], fields=list(inner), mask=pa.array(mask))
        times = pa.array([1, 2], pa.timestamp("us", "Europe/Berlin"))
        return pa.record_batch({"e": pa.StructArray.from_arrays([part, times], names=["p", "at"])})

    schema = to_arrow("e struct<p: struct<id: bigint NOT NULL>, at: timestamp>", "schema")
    fitting = conform(batch([False, True]), schema)
    fitting.validate(full=True)
    assert fitting.schema == schema and [row["p"] for row in fitting["e"].to_pylist()] == [{"id": 7}, None]
    with pytest.raises(SchemaError, match="field 'id', which its schema calls NOT NULL: row 1"):
        conform(batch([False, False]), schema)
