"""Schemas: Spark DDL, StructType and pyarrow in, pyarrow inside."""

from __future__ import annotations

import subprocess
import sys
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


def test_spark_types() -> None:
    schema = pa.schema({"a": pa.large_string(), "t": pa.timestamp("ns", tz="Asia/Tokyo"), "n": pa.timestamp("ms")})
    assert spark_types(schema) == pa.schema({"a": pa.string(), "t": INSTANT, "n": pa.timestamp("us")})


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
