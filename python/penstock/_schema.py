"""Schemas: Spark DDL, StructType and pyarrow in, pyarrow inside.

Owns: reading whatever a user calls a schema into a ``pyarrow.Schema``, writing one back as
Spark DDL, and conforming a batch to a schema without losing a value.

Invariants: pyspark is never imported here. A StructType is read through the JSON that it
gives of itself. Spark's ``timestamp`` is an instant and becomes ``timestamp[us, tz=UTC]``;
``timestamp_ntz`` is a wall clock reading and becomes ``timestamp[us]``. Nullability is kept.
"""

from __future__ import annotations

import copyreg
import difflib
import re
from collections import Counter
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from penstock._layouts import as_lists, relaid
from penstock._views import plain
from penstock.errors import SchemaError

__all__ = ["conform", "in_utc", "parse_ddl", "spark_types", "to_arrow", "to_ddl"]

_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "bool": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
    "null": pa.null(),
}
_DECIMALS = ("decimal", "dec", "numeric")
#: What these are called elsewhere, where the nearest name would be another type.
_CALLED = {
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
    "utf8": "string",
    "str": "string",
    "text": "string",
    "bytes": "binary",
    "date32": "date",
    "datetime": "timestamp",
}
_NAMES = [*_SIMPLE, "decimal(10,2)", "array<...>", "map<...>", "struct<...>", "varchar(n)"]
_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)*`)|('(?:[^'\\]|\\.)*')|([A-Za-z0-9_]+)|([<>(),:]))")


def to_arrow(schema: Any, name: str = "schema") -> pa.Schema:
    """Read a schema in any of the forms that penstock accepts.

    Parameters
    ----------
    schema : str, pyarrow.Schema, pyspark StructType, or object with ``__arrow_c_schema__``
        Spark DDL such as ``"auction bigint, price bigint, ts timestamp"``, a pyarrow schema,
        a Spark StructType, or anything that exports an Arrow schema (a polars or DuckDB
        schema, a record batch handle).
    name : str, default "schema"
        What the caller calls the value; error messages begin with it.

    Returns
    -------
    pyarrow.Schema
        The columns; at least one, names distinct. What lists call their elements, which Arrow leaves to everybody, is
        what Spark calls them, ``element``.

    Raises
    ------
    SchemaError
        When the text is not DDL, a type is unknown, a name appears twice, no column is
        there, or the object is none of the above.

    Examples
    --------
    >>> to_arrow("auction bigint, ts timestamp").names
    ['auction', 'ts']
    """
    if isinstance(schema, pa.Schema):
        found = schema
    elif isinstance(schema, str):
        found = parse_ddl(schema, name)
    elif _is_struct_type(schema):
        found = pa.schema(_json_fields(schema.jsonValue()["fields"], name))
    elif hasattr(schema, "__arrow_c_schema__") and not isinstance(schema, (pa.DataType, pa.Field)):
        found = pa.schema(schema)
    else:
        raise SchemaError(
            f"{name} is a {type(schema).__name__}; give Spark DDL such as 'auction bigint, ts timestamp',"
            " a StructType or a pyarrow schema"
        )
    if not found.names:
        raise SchemaError(f"{name} has no columns")
    twice = [column for column, times in Counter(found.names).items() if times > 1]
    if twice:
        raise SchemaError(f"{name} names column {min(twice)!r} twice; rename one of them")
    usual = pa.schema([_plain(field) for field in found], found.metadata)
    return found if found.equals(usual, check_metadata=True) else usual


def _plain(field: pa.Field, name: str | None = None) -> pa.Field:
    """The field, under this name, with the usual names inside of lists and maps."""
    kind, is_type = field.type, pa.types
    if is_type.is_list(kind):
        kind = pa.list_(_plain(kind.value_field, "element"))
    elif is_type.is_large_list(kind):
        kind = pa.large_list(_plain(kind.value_field, "element"))
    elif is_type.is_fixed_size_list(kind):
        kind = pa.list_(_plain(kind.value_field, "element"), kind.list_size)
    elif is_type.is_list_view(kind):
        kind = pa.list_view(_plain(kind.value_field, "element"))
    elif is_type.is_large_list_view(kind):
        kind = pa.large_list_view(_plain(kind.value_field, "element"))
    elif is_type.is_map(kind):
        kind = pa.map_(_plain(kind.key_field, "key"), _plain(kind.item_field, "value"), kind.keys_sorted)
    elif is_type.is_struct(kind):
        kind = pa.struct([_plain(inner) for inner in kind])
    return field.with_type(kind).with_name(field.name if name is None else name)


def parse_ddl(text: str, name: str = "schema") -> pa.Schema:
    """Read Spark DDL.

    Parameters
    ----------
    text : str
        Columns parted by commas: ``name type [NOT NULL] [COMMENT '...']``, with an optional
        colon between name and type and backquotes around odd names.
    name : str, default "schema"
        What the caller calls the text; error messages begin with it.

    Returns
    -------
    pyarrow.Schema
        One field per column.

    Raises
    ------
    SchemaError
        When the text is not DDL; the message names the column and the nearest known type.

    Examples
    --------
    >>> schema = parse_ddl("k bigint NOT NULL, price decimal(10,2), tags array<string>")
    >>> schema.field("price").type
    Decimal128Type(decimal128(10, 2))
    """
    return pa.schema(_Ddl(text, name).columns())


def to_ddl(schema: pa.Schema) -> str:
    """Write a schema as Spark DDL that means the same in every session.

    Parameters
    ----------
    schema : pyarrow.Schema
        What a flow gives out.

    Returns
    -------
    str
        Text for the ``schema`` argument of ``DataFrame.mapInArrow``.

    Raises
    ------
    SchemaError
        When Spark has no type for a column (an unsigned integer, for example).

    Examples
    --------
    >>> import pyarrow as pa
    >>> to_ddl(pa.schema({"word": pa.string(), "count": pa.int64()}))
    '`word` string, `count` bigint'
    """
    return ", ".join(_ddl_field(field.with_type(_stored(field.type)), " ") for field in schema)


def spark_types(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the units and layouts that Spark reads from Arrow.

    Parameters
    ----------
    schema : pyarrow.Schema
        What a flow gives out.

    Returns
    -------
    pyarrow.Schema
        The same columns with timestamps in microseconds, plain strings and binaries.

    Raises
    ------
    SchemaError
        When Spark has no type for a column.

    Examples
    --------
    >>> import pyarrow as pa
    >>> spark_types(pa.schema({"ts": pa.timestamp("ms", tz="Europe/Berlin")})).field("ts").type
    TimestampType(timestamp[us, tz=UTC])
    """
    return parse_ddl(to_ddl(schema))


def conform(batch: pa.RecordBatch, schema: pa.Schema, what: str = "input") -> pa.RecordBatch:
    """Bring a batch to a schema: columns by name, types without loss.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Any columns; those that the schema does not name are left out.
    schema : pyarrow.Schema
        The columns that must come out, in this order.
    what : str, default "input"
        What the batch is; error messages begin with it.

    Returns
    -------
    pyarrow.RecordBatch
        The same rows. Columns that already fit are shared, not copied.

    Raises
    ------
    SchemaError
        When a column is missing, appears twice, or its type cannot become the wanted one
        without changing values.

    Notes
    -----
    Cost: one pass over a column whose type differs. Of others nothing per row, but that the nulls inside of nested ones
    are counted where there must be none.
    Accepted: any change of width or unit that keeps every value (checked), dictionaries with any indices or none and
    views in place of one another, another time zone of an instant. Refused: text to number, an instant to a
    wall clock reading, and the like. What is nested goes by the same rules; a struct that lacks a field is refused.
    A column, but nothing nested, may be of an extension type in place of what that is stored as, or the other way
    round.
    Doubles become floats as in Spark: the nearest one, refused where that is infinite.

    Examples
    --------
    >>> import pyarrow as pa
    >>> small = pa.record_batch({"b": pa.array([1, 2], pa.int32()), "a": ["x", "y"]})
    >>> conform(small, pa.schema({"b": pa.int64()})).schema.field("b").type
    DataType(int64)
    """
    if batch.schema.equals(schema):
        for place in _strict_columns(schema):
            _refuse_nulls(batch.column(place), schema.field(place), what)
        # What lists call their elements may differ, which others than pyarrow look at.
        same = batch.schema.equals(schema, check_metadata=True)
        return batch if same else pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    columns = []
    for field in schema:
        places = batch.schema.get_all_field_indices(field.name)
        if not places:
            raise SchemaError(
                f"{what} has no column {field.name!r}; it has {', '.join(batch.schema.names) or 'no columns'}"
            )
        if len(places) > 1:
            raise SchemaError(f"{what} has {len(places)} columns named {field.name!r}; rename one of them")
        fitting = _cast(batch.column(places[0]), field, what)
        _refuse_nulls(fitting, field, what)
        columns.append(fitting)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def in_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with its instants in UTC, also those that are nested: Spark's batches name the session's zone.

    Examples
    --------
    >>> import pyarrow as pa
    >>> in_utc(pa.record_batch({"ts": pa.array([0], pa.timestamp("us", "GMT+8"))})).schema.field("ts").type
    TimestampType(timestamp[us, tz=UTC])
    """
    fields = [field.with_type(_utc(field.type)).with_nullable(True) for field in batch.schema]
    if all(one.type.equals(other.type) for one, other in zip(fields, batch.schema, strict=True)):
        return batch
    return conform(batch, pa.schema(fields))


def _utc(kind: pa.DataType) -> pa.DataType:
    is_type = pa.types
    if is_type.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, "UTC")
    if is_type.is_struct(kind):
        return pa.struct([field.with_type(_utc(field.type)) for field in kind])
    if is_type.is_map(kind):
        parts = (field.with_type(_utc(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(*parts, kind.keys_sorted)
    if is_type.is_list(kind):
        return pa.list_(kind.value_field.with_type(_utc(kind.value_type)))
    if is_type.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_utc(kind.value_type)))
    return kind


#: Columns of schemas that were asked for lately, by the identity of the schema, which stays while it is here.
_STRICT: dict[int, tuple[pa.Schema, list[int]]] = {}


def _strict_columns(schema: pa.Schema) -> list[int]:
    """Which columns must have no nulls, or none inside: found once, for it takes longer than to compare schemas."""
    known = _STRICT.get(id(schema))
    if known is None:
        if len(_STRICT) >= 256:
            _STRICT.clear()
        places = [place for place, field in enumerate(schema) if not field.nullable or _has_not_null(field.type)]
        known = _STRICT[id(schema)] = (schema, places)
    return known[1]


def _refuse_nulls(column: pa.Array, field: pa.Field, what: str) -> None:
    """Where its schema says that there are none: pyarrow makes such columns, and a cast does not look either."""
    if not field.nullable and column.null_count:
        row = pc.index(column.is_null(), pa.scalar(True)).as_py()
        raise SchemaError(
            f"{what} has a null in column {field.name!r}, which its schema calls NOT NULL: row {row} of a batch"
        )
    if pa.types.is_nested(field.type) and (inside := _null_inside(column)) is not None:
        row = next(row for row in range(len(column)) if _null_inside(column.slice(row, 1)) is not None)
        raise SchemaError(
            f"{what} column {field.name!r} has a null in its {inside}, which its schema calls NOT NULL: row {row} of a"
            " batch"
        )


def _loose(kind: pa.DataType) -> pa.DataType:
    """The type with nulls anywhere, but for keys of maps; of lists, not of list views."""

    def inner(field: pa.Field) -> pa.Field:
        return field.with_type(_loose(field.type)).with_nullable(True)

    is_type = pa.types
    if is_type.is_struct(kind):
        return pa.struct(list(map(inner, kind)))
    if is_type.is_map(kind):
        key = kind.key_field.with_type(_loose(kind.key_type))
        return pa.map_(key, inner(kind.item_field), kind.keys_sorted)
    if is_type.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size)
    if is_type.is_list(kind):
        return pa.list_(inner(kind.value_field))
    return pa.large_list(inner(kind.value_field)) if is_type.is_large_list(kind) else kind


def _cast(column: pa.Array, field: pa.Field, what: str) -> pa.Array:
    have, want = column.type, field.type
    if have.equals(want):
        return column
    if isinstance(have, pa.BaseExtensionType) is not isinstance(want, pa.BaseExtensionType):
        bare = column.storage if isinstance(have, pa.BaseExtensionType) else column
        made = _cast(bare, field.with_type(_stored(want)), what)
        return made if made.type.equals(want) else pa.ExtensionArray.from_storage(want, made)
    if not _family_fits(have, want):
        zones = pa.types.is_timestamp(have) and pa.types.is_timestamp(want) and (have.tz is None) != (want.tz is None)
        # In DDL the shorter name is the one of times with a zone.
        other = "" if not zones else "timestamp_ntz" if have.tz is None else "timestamp"
        also = f", or write {other} in the flow's schema: one is a time with a zone, the other without" if zones else ""
        raise SchemaError(f"{what} column {field.name!r} is {have}, expected {want}; cast it before{also}")
    bare = column
    try:
        if (coded := _coded(column, want)) is not None:
            return coded
        bare = relaid(decoded(column), as_lists(_decoded_type(have)))
        if bare.offset and (pa.types.is_large_string(bare.type) or pa.types.is_large_binary(bare.type)):
            # A cast to narrower offsets goes by where values stand in the whole column.
            bare = pa.concat_arrays([bare, bare.slice(0, 0)])
        inner = _decoded_type(want)
        # A cast takes the null below a null for one, and says that there must be none.
        made = pc.cast(bare, _loose(as_lists(inner, coded=False)), safe=True)
        if not made.type.equals(_loose(as_lists(inner))):
            made = pc.cast(made, _loose(as_lists(inner)), safe=True)
        made = relaid(made, inner)
        made = _encoded(made, want) if pa.types.is_dictionary(want) else made
    except pa.ArrowCapacityError as error:
        raise SchemaError(
            f"{what} column {field.name!r} has {bare.nbytes:,} bytes in one batch, more than {want} holds; give it in"
            " smaller batches"
        ) from error
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowIndexError) as error:
        raise SchemaError(f"{what} column {field.name!r} cannot become {want} without loss: {error}") from error
    except pa.ArrowNotImplementedError as error:
        raise SchemaError(f"{what} column {field.name!r} is {have}, expected {want}; cast it before") from error
    if _infinities(made) > _infinities(bare):
        raise SchemaError(
            f"{what} column {field.name!r} cannot become {want} without loss: it has numbers beyond those of {want};"
            " cast it before"
        )
    return made


def _stored(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _decoded_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def decoded(column: pa.Array) -> pa.Array:
    """A column without a dictionary."""
    if not pa.types.is_dictionary(column.type):
        return column
    values = column.dictionary
    if plain(values.type) is values.type:
        return column.dictionary_decode()
    # pyarrow takes no views by their places.
    taken = pa.DictionaryArray.from_arrays(column.indices, values.cast(plain(values.type))).dictionary_decode()
    return taken.cast(values.type)


def _coded(column: pa.Array, want: pa.DataType) -> pa.Array | None:
    """A column with a dictionary under indices of another width, where they are all that differs and fit."""
    if not (pa.types.is_dictionary(column.type) and pa.types.is_dictionary(want)):
        return None
    if not column.type.value_type.equals(want.value_type) or column.dictionary.null_count:
        return None
    try:
        indices = column.indices.cast(want.index_type)
    except pa.ArrowInvalid:  # as many as fit may be in use
        return None
    return pa.DictionaryArray.from_arrays(indices, column.dictionary, ordered=want.ordered)


def _encoded(column: pa.Array, want: pa.DataType) -> pa.Array:
    """A column as one with a dictionary."""
    coded = column.dictionary_encode()
    try:
        indices = coded.indices.cast(want.index_type)
    except pa.ArrowInvalid:
        raise pa.ArrowInvalid(
            f"it has {len(coded.dictionary)} different values in one batch, more than {want.index_type} numbers; give"
            " the schema wider indices"
        ) from None
    return pa.DictionaryArray.from_arrays(indices, coded.dictionary, ordered=want.ordered)


def _infinities(column: pa.Array) -> int:
    """Of floats, nested ones included: a cast to narrower ones that is called safe makes some."""
    if pa.types.is_floating(_decoded_type(column.type)):
        column = decoded(column)
        return int(pc.sum(pc.is_inf(column)).as_py() or 0)
    return sum(_infinities(part) for _, _, part in _parts(column))


def _family_fits(have: pa.DataType, want: pa.DataType) -> bool:
    if pa.types.is_dictionary(have) or pa.types.is_dictionary(want):
        return _family_fits(_decoded_type(have), _decoded_type(want))
    if pa.types.is_null(have):
        return True
    if pa.types.is_timestamp(have) and pa.types.is_timestamp(want):
        return (have.tz is None) == (want.tz is None)
    family = _family(want)
    if _family(have) != family:
        return False
    if family == "struct":
        return all(
            len(have.get_all_field_indices(inner.name)) == 1 and _family_fits(have.field(inner.name).type, inner.type)
            for inner in want
        )
    if family == "map":
        return _family_fits(have.key_type, want.key_type) and _family_fits(have.item_type, want.item_type)
    return family != "list" or _family_fits(have.value_type, want.value_type)


def _parts(column: pa.Array) -> list[tuple[str, pa.Field, pa.Array]]:
    """What a nested column consists of, a level below: what it is, its field and its values. Of others nothing."""
    kind = column.type
    if pa.types.is_struct(kind):
        return [(f"field {inner.name!r}", inner, part) for inner, part in zip(kind, column.flatten(), strict=True)]
    if pa.types.is_map(kind):
        keys, values = (pa.ListArray.from_arrays(column.offsets, of).flatten() for of in (column.keys, column.items))
        return [("keys", kind.key_field, keys), ("values", kind.item_field, values)]
    if _family(kind) == "list":
        return [("elements", kind.value_field, column.flatten())]
    return []


def _has_not_null(kind: pa.DataType) -> bool:
    """Whether something in values of a type must not be null. The keys of every map are such."""
    inside = [kind.field(place) for place in range(kind.num_fields)]
    return any(not field.nullable or _has_not_null(field.type) for field in inside)


def _null_inside(column: pa.Array) -> str | None:
    """What of a nested column is null and must not be."""
    if not _has_not_null(column.type):
        return None
    # A struct that is null has no fields.
    before = column.null_count if pa.types.is_struct(column.type) else 0
    for name, field, part in _parts(column):
        if not field.nullable and part.null_count > before:
            return name
        inside = _null_inside(part)
        if inside is not None:
            return f"{name}: {inside}"
    return None


def _family(kind: pa.DataType) -> str:
    is_type = pa.types
    if is_type.is_integer(kind):
        return "integer"
    if is_type.is_floating(kind):
        return "floating"
    if is_type.is_decimal(kind):
        return "decimal"
    if is_type.is_string(kind) or is_type.is_large_string(kind) or is_type.is_string_view(kind):
        return "text"
    if (
        is_type.is_binary(kind)
        or is_type.is_large_binary(kind)
        or is_type.is_binary_view(kind)
        or is_type.is_fixed_size_binary(kind)
    ):
        return "binary"
    if is_type.is_date(kind):
        return "date"
    if is_type.is_duration(kind):
        return "duration"
    if is_type.is_list(kind) or is_type.is_large_list(kind) or is_type.is_fixed_size_list(kind):
        return "list"
    if is_type.is_list_view(kind) or is_type.is_large_list_view(kind):
        return "list"
    if is_type.is_map(kind):
        return "map"
    if is_type.is_struct(kind):
        return "struct"
    return str(kind)


def _is_struct_type(schema: Any) -> bool:
    kind = type(schema)
    return (
        kind.__name__ == "StructType"
        and kind.__module__.split(".")[0] == "pyspark"
        and callable(getattr(schema, "jsonValue", None))
    )


def _json_fields(fields: list[dict[str, Any]], name: str) -> list[pa.Field]:
    for field in fields:
        if "__COLLATIONS" in (field.get("metadata") or {}):
            raise SchemaError(
                f"{name} column {field['name']!r} is text with a collation, and texts are equal by their bytes here:"
                " cast it before, for example CAST(... AS STRING COLLATE UTF8_BINARY)"
            )
    return [
        pa.field(field["name"], _json_type(field["type"], field["name"], name), bool(field.get("nullable", True)))
        for field in fields
    ]


def _json_type(value: Any, column: str, name: str) -> pa.DataType:
    if isinstance(value, str):
        try:
            return _Ddl(value, name).only_type(column)
        except SchemaError:
            # Nobody has written it: Spark has types that are none here.
            raise _no_type(value, column, name) from None
    kind = value.get("type")
    if kind == "array":
        element = _json_type(value["elementType"], column, name)
        return pa.list_(pa.field("element", element, bool(value["containsNull"])))
    if kind == "map":
        key = _json_type(value["keyType"], column, name)
        item = _json_type(value["valueType"], column, name)
        return pa.map_(pa.field("key", key, False), pa.field("value", item, bool(value["valueContainsNull"])))
    if kind == "struct":
        return pa.struct(_json_fields(value["fields"], name))
    raise _no_type(kind, column, name)


def _no_type(kind: Any, column: str, name: str) -> SchemaError:
    return SchemaError(
        f"{name} column {column!r} has the type {kind!r}, which Arrow cannot hold as it is used here; cast it before,"
        " or leave it out"
    )


def _ddl_field(field: pa.Field, separator: str) -> str:
    quoted = field.name.replace("`", "``")
    null = "" if field.nullable else " NOT NULL"
    return f"`{quoted}`{separator}{_ddl_type(field)}{null}"


def _ddl_type(field: pa.Field) -> str:
    kind, is_type = field.type, pa.types
    for test, text in _DDL_OF:
        if test(kind):
            return text
    if is_type.is_timestamp(kind):
        # What ``timestamp`` alone means to Spark, ``spark.sql.timestampType`` says.
        return "timestamp_ntz" if kind.tz is None else "timestamp_ltz"
    if is_type.is_decimal(kind):
        # Of Spark's, with at most as many digits behind the point as in all and at least none: the narrowest for it.
        scale = max(kind.scale, 0)
        precision = max(kind.precision - min(kind.scale, 0), scale)
        if precision <= 38:
            return f"decimal({precision},{scale})"
    if is_type.is_dictionary(kind):
        return _ddl_type(pa.field(field.name, kind.value_type))
    if is_type.is_map(kind):
        return f"map<{_ddl_type(kind.key_field)},{_ddl_type(kind.item_field)}>"
    if _family(kind) == "list":
        return f"array<{_ddl_type(kind.value_field)}>"
    if is_type.is_struct(kind):
        return f"struct<{','.join(_ddl_field(inner, ':') for inner in kind)}>"
    raise SchemaError(f"column {field.name!r} is {kind}, for which Spark has no type; cast it in a map_batches")


_DDL_OF = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "tinyint"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_int32, "int"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (lambda kind: _family(kind) == "text", "string"),
    (lambda kind: _family(kind) == "binary", "binary"),
    (pa.types.is_date, "date"),
    (pa.types.is_duration, "interval day to second"),
    (pa.types.is_null, "void"),
)


class _Ddl:
    """One pass over the words of a DDL text."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.words: list[tuple[str, int]] = []
        self.at = 0
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                rest = text[position:].strip()
                raise SchemaError(f"{name} {text!r} has something unreadable at {rest[:20]!r}; {_ddl_hint()}")
            self.words.append((match.group(0).strip(), match.start()))
            position = match.end()

    def peek(self) -> str:
        return self.words[self.at][0] if self.at < len(self.words) else ""

    def take(self) -> str:
        word = self.peek()
        self.at += 1
        return word

    def fail(self, what: str) -> NoReturn:
        raise SchemaError(f"{self.name} {self.text!r}: {what}; {_ddl_hint()}")

    def columns(self) -> list[pa.Field]:
        fields = []
        while True:
            fields.append(self.column())
            if not self.peek():
                return fields
            if self.peek() != ",":
                self.fail(f"expected a comma before {self.peek()!r} (after column {fields[-1].name!r})")
            self.take()

    def column(self) -> pa.Field:
        column = self.identifier()
        if self.peek() == ":":
            self.take()
        kind = self.type(column)
        nullable = True
        if self.peek().lower() == "not":
            self.take()
            if self.take().lower() != "null":
                self.fail(f"expected NOT NULL in column {column!r}")
            nullable = False
        elif self.peek().lower() == "null":
            self.take()
        if self.peek().lower() == "comment":
            self.take()
            if not self.take().startswith("'"):
                self.fail(f"expected a quoted text after COMMENT in column {column!r}")
        return pa.field(column, kind, nullable)

    def identifier(self) -> str:
        word = self.take()
        if word.startswith("`"):
            return word[1:-1].replace("``", "`")
        if not word or not re.fullmatch(r"[A-Za-z0-9_]+", word):
            self.fail(f"expected a column name instead of {word!r}" if word else "a column name is missing")
        return word

    def only_type(self, column: str) -> pa.DataType:
        kind = self.type(column)
        if self.peek():
            self.fail(f"unexpected {self.peek()!r} after the type of column {column!r}")
        return kind

    def type(self, column: str) -> pa.DataType:
        word = self.take()
        kind = word.lower()
        if not word or word in (",", ">", "(", ")", ":", "<"):
            self.fail(f"column {column!r} has no type")
        if kind in _SIMPLE:
            return _SIMPLE[kind]
        if kind in _DECIMALS:
            precision, scale = self.numbers(column, [10, 0])
            if not 1 <= precision <= 38 or not 0 <= scale <= precision:
                self.fail(f"column {column!r}: decimal({precision},{scale}) is out of range (precision 1..38)")
            return pa.decimal128(precision, scale)
        if kind in ("varchar", "char", "character"):
            self.numbers(column, [0])
            return pa.string()
        if kind == "interval":
            return self.interval(column)
        if kind == "array":
            self.expect("<", column)
            element = self.type(column)
            self.expect(">", column)
            return pa.list_(pa.field("element", element))
        if kind == "map":
            self.expect("<", column)
            key = self.type(column)
            self.expect(",", column)
            item = self.type(column)
            self.expect(">", column)
            return pa.map_(key, item)
        if kind == "struct":
            self.expect("<", column)
            fields = [] if self.peek() == ">" else [self.column()]
            while fields and self.peek() == ",":
                self.take()
                fields.append(self.column())
            self.expect(">", column)
            return pa.struct(fields)
        typed = [name for name in difflib.get_close_matches(kind, _NAMES) if abs(len(name) - len(kind)) <= 2]
        near = [_CALLED[kind]] if kind in _CALLED else typed
        advice = f"did you mean {near[0]!r}?" if near else f"the types are {', '.join(_NAMES)}"
        raise SchemaError(f"{self.name} column {column!r} has the unknown type {word!r}; {advice}")

    def numbers(self, column: str, defaults: list[int]) -> list[int]:
        if self.peek() != "(":
            return defaults
        self.take()
        values = []
        while True:
            word = self.take()
            if not word.isdigit():
                self.fail(f"column {column!r}: expected a number instead of {word!r}")
            values.append(int(word))
            if self.peek() != ",":
                break
            self.take()
        self.expect(")", column)
        if len(values) > len(defaults):
            self.fail(f"column {column!r}: too many numbers in the brackets")
        return values + defaults[len(values) :]

    def interval(self, column: str) -> pa.DataType:
        units = [self.take().lower()]
        if self.peek().lower() == "to":
            self.take()
            units.append(self.take().lower())
        if not set(units) <= {"day", "hour", "minute", "second"}:
            self.fail(f"column {column!r}: only intervals of days to seconds have an Arrow type here")
        return pa.duration("us")

    def expect(self, word: str, column: str) -> None:
        found: str | None = self.take()
        if found != word:
            self.fail(f"column {column!r}: expected {word!r} instead of {found!r}")


def _ddl_hint() -> str:
    return "write 'name type, name type', for example 'auction bigint, ts timestamp'"


def _fixed_list(kind: Any) -> Any:
    return pa.list_, (kind.value_field, kind.list_size)


def _map(kind: Any) -> Any:
    return pa.map_, (kind.key_field, kind.item_field, kind.keys_sorted)


# Of two types pyarrow pickles less than they are: what elements are called and whether they may be null, and whether
# keys are sorted. The functions of a flow travel with schemas, which are compared with those of its plan.
copyreg.pickle(pa.FixedSizeListType, _fixed_list)
copyreg.pickle(pa.MapType, _map)
