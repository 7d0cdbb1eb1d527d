"""DataFrames as the sources of a flow: by name, or several of them as one.

Owns: the shape of a *tagged* DataFrame, making one, and checking one against a flow; `_tasks.apart` takes batches of
one apart. A tagged DataFrame has one struct column for each source, called as that; in each row exactly one of them is
not null, and holds the row of its source. So one DataFrame, and one streaming query, feeds all sources of a flow: what
Spark makes a batch of is one epoch of all of them.

Invariants: columns and struct fields are told apart by their whole names, as flows do, though Spark takes names that
differ in case for one (``spark.sql.caseSensitive``): such are chosen by place. A row is of one source, or the batch
fails and names the row. What a flow does not read of a source is left
out before rows leave the JVM; that it is there, and its type, is checked all the same.

A tag beside the structs would say nothing that they do not say. Spark writes a null as it writes a value, into every
column, so a row costs what the columns of all sources together take, and a flow that names few columns is cheap: out of
two tables of four and five columns 72 bytes and 1.7 us a row through ``mapInArrow``, each table by itself 39 bytes and
0.9 us; with a tag beside the structs 2.1 us, flat columns with a tag 76 bytes and 1.5 us (two busy cores, best of
five).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._flow.graph import sources_of
from penstock._schema import conform, to_arrow
from penstock.errors import ConfigError, SchemaError
from penstock.spark._session.guard import require_classic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from penstock._flow import Flow

__all__ = ["by_place", "fed", "frames", "ordered_by", "packed", "quoted", "tagged"]


def tagged(**sources: DataFrame) -> DataFrame:
    """Put several DataFrames together to one that feeds all sources of a flow.

    Parameters
    ----------
    **sources : pyspark.sql.DataFrame
        By the name of the source; batch or streaming, all alike, of one classic session.

    Returns
    -------
    pyspark.sql.DataFrame
        A struct column for each source, called as that; in each row one of them is not null and holds the row of its
        source. Streaming where they are: start one query on it, with ``foreachBatch`` of an engine.

    Raises
    ------
    ConfigError
        When nothing is given, or some are streaming and some are not.
    SchemaError
        When a DataFrame has two columns of one name, or none.
    UnsupportedSession
        For anything that is no DataFrame of a classic session.

    Notes
    -----
    Cost: a union; nothing is shuffled. A row takes what a null in every column of the other sources takes beside its
    own values, on its way out of the JVM only. Columns that the flow does not ask for are not read.

    A DataFrame of this shape that was made in another way serves as well.

    Examples
    --------
    >>> people = spark.createDataFrame([(1, "Ulm")], "id bigint, city string")  # doctest: +SKIP
    >>> sales = spark.createDataFrame([(1, "lamp")], "seller bigint, item string")  # doctest: +SKIP
    >>> tagged(people=people, sales=sales).columns  # doctest: +SKIP
    ['people', 'sales']
    """
    if not sources:
        raise ConfigError("penstock.spark.tagged() names no source; write tagged(people=df1, sales=df2)")
    for name, frame in sources.items():
        require_classic(frame, f"penstock.spark.tagged(source {name!r})")
        if not hasattr(frame, "columns"):
            raise ConfigError(f"source {name!r} is a {type(frame).__name__}, not a DataFrame")
        twice = next((column for column in frame.columns if frame.columns.count(column) > 1), None)
        if twice is not None:
            raise SchemaError(f"source {name!r} has more than one column {twice!r}; rename one of them")
        if not frame.columns:
            raise SchemaError(f"source {name!r} has no columns")
    live = [name for name, frame in sources.items() if frame.isStreaming]
    if live and len(live) < len(sources):
        still = next(name for name in sources if name not in live)
        raise ConfigError(
            f"source {live[0]!r} is streaming and source {still!r} is not: Spark makes no union of both; give all of"
            " one kind"
        )
    from pyspark.sql import functions as F

    shapes = {name: frame.schema for name, frame in sources.items()}
    made = []
    for name, frame in sources.items():
        plain = _numbered(frame)
        own = F.struct(*(plain[mark].alias(column) for mark, column in zip(plain.columns, frame.columns, strict=True)))
        made.append(
            plain.select(
                *((own if one == name else F.lit(None).cast(shape)).alias(one) for one, shape in shapes.items())
            )
        )
    return reduce(lambda all_of, one: all_of.union(one), made)


def frames(flow: Flow, given: Any, what: str, read: Mapping[str, pa.Schema]) -> list[DataFrame]:
    """What each source of a flow is fed, with the columns that are read and no others.

    Parameters
    ----------
    flow : Flow
        Whose sources they are.
    given : DataFrame, or mapping of str to DataFrame
        The rows of the only source, a tagged DataFrame, or DataFrames by the name of their source.
    what : str
        What the caller is called; errors begin with it.
    read : mapping of str to pyarrow.Schema
        Of each source the columns that are read; it must have the others, too.

    Returns
    -------
    list of pyspark.sql.DataFrame
        By the number of the source. What a tagged one gives fails where a row is not of one source.

    Raises
    ------
    ConfigError, SchemaError
        When a source is missing or unknown, or lacks a column.
    UnsupportedSession
        For anything that is no DataFrame of a classic session.
    """
    schemas = flow.sources
    names = ", ".join(schemas)
    if isinstance(given, Mapping):
        for name, frame in given.items():
            if name not in schemas:
                raise ConfigError(f"the flow has no source {name!r}; it has {names}")
            require_classic(frame, f"{what}, source {name!r},")
        for name in schemas:
            if name not in given:
                raise ConfigError(f"source {name!r} is missing; the flow has {names}")
        return [_plain(given[name], schema, read[name], f"source {name!r}") for name, schema in schemas.items()]
    require_classic(given, what)
    if len(schemas) == 1:
        return [_plain(given, schema, read[name], "the DataFrame") for name, schema in schemas.items()]
    structs = _structs(given, schemas, read)
    return [_only(structs, number, read) for number in range(len(schemas))]


def fed(flow: Flow, df: DataFrame, ordered: bool, read: Mapping[str, pa.Schema]) -> DataFrame:
    """The rows that an engine is fed of a batch: columns of the only source, or a struct for each, in their order.

    Parameters
    ----------
    flow : Flow
        Whose sources they are.
    df : pyspark.sql.DataFrame
        The batch.
    ordered : bool
        Whether results depend on the order of rows; then they are sorted by ``order_by`` of their sources, if any.
    read : mapping of str to pyarrow.Schema
        As of `frames`; columns of ``order_by`` are among them.

    Raises
    ------
    SchemaError
        When a source or a column is missing.
    """
    from pyspark.sql import functions as F

    schemas = flow.sources
    order = [(source.name, source.order_by) for source in sources_of(flow)] if ordered else []
    if len(schemas) == 1:
        [(name, schema)] = schemas.items()
        return ordered_by(_plain(df, schema, read[name], "the DataFrame"), [name for _, by in order for name in by])
    wanted = _structs(df, schemas, read)
    if not any(by for _, by in order):
        return wanted
    columns = [wanted[mark] for mark in wanted.columns]
    kinds = [field.dataType for field in wanted.schema.fields]
    which = F.coalesce(*(F.when(column.isNotNull(), n) for n, column in enumerate(columns)))
    places = {name: place for place, name in enumerate(schemas)}
    return wanted.sort(
        which, *(_field(columns[places[name]], kinds[places[name]], one) for name, by in order for one in by)
    )


def ordered_by(df: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows sorted by columns; as they are by none."""
    if not columns:
        return df
    plain = _numbered(df)
    return plain.sort(*(plain.columns[df.columns.index(name)] for name in columns)).toDF(*df.columns)


def packed(sides: Sequence[Sequence[DataFrame]], helpers: Sequence[str]) -> DataFrame:
    """Rows of several kinds as one DataFrame, in the shape of a tagged one.

    Parameters
    ----------
    sides : sequence of sequence of DataFrame
        Those of a kind have the same columns, of which the last are `helpers`.
    helpers : sequence of str
        Columns that all have.

    Returns
    -------
    pyspark.sql.DataFrame
        Columns ``s0``, ``s1`` and so on, whose fields are called ``c0``, ``c1`` and so on; then the helpers.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    shapes, made = [], []
    for side in sides:
        own = side[0].schema.fields[: len(side[0].columns) - len(helpers)]
        shapes.append(StructType([type(field)(f"c{at}", field.dataType) for at, field in enumerate(own)]))
    for number, side in enumerate(sides):
        names = shapes[number].names
        for frame in side:
            plain = frame.toDF(*names, *helpers)
            structs = [
                (F.struct(*names) if at == number else F.lit(None).cast(shape)).alias(f"s{at}")
                for at, shape in enumerate(shapes)
            ]
            made.append(plain.select(*structs, *helpers))
    return reduce(lambda all_of, one: all_of.union(one), made)


def by_place(df: DataFrame) -> DataFrame:
    """The DataFrame as ``mapInArrow`` can take it: Spark does not find names with dots and backquotes there, nor those
    that differ in case only."""
    if not alike(df.columns) and not any("." in name or "`" in name for name in df.columns):
        return df
    return _numbered(df)


def alike(names: Sequence[str]) -> bool:
    """Whether Spark takes some of the names for the same one."""
    return len({name.casefold() for name in names}) < len(names)


def _numbered(df: DataFrame) -> DataFrame:
    """The columns under names of their places."""
    return df.toDF(*(f"c{place}" for place in range(len(df.columns))))


def _field(column: Column, kind: Any, name: str) -> Column:
    """A field of a struct column of that type."""
    if not alike(kind.names):
        return column.getField(name)
    # Structs become one another by place.
    places = type(kind)([type(field)(f"c{at}", field.dataType, field.nullable) for at, field in enumerate(kind.fields)])
    return column.cast(places).getField(f"c{kind.names.index(name)}")


def quoted(name: str) -> str:
    """A name as Spark takes it for that of one column."""
    return "`" + name.replace("`", "``") + "`"


def _plain(df: DataFrame, schema: pa.Schema, read: pa.Schema, what: str) -> DataFrame:
    """The columns that are read of one that has all columns of a schema."""
    from pyspark.sql.types import StructType

    for name in schema.names:
        if df.columns.count(name) != 1:
            problem = "has no column" if name not in df.columns else "has more than one column"
            raise SchemaError(f"{what} {problem} {name!r}; it has {', '.join(df.columns) or 'no columns'}")
    # An empty batch of their types meets every check that the rows will meet, before a job starts.
    have = to_arrow(StructType([df.schema[name] for name in schema.names]), what)
    conform(pa.RecordBatch.from_pylist([], schema=have), schema, what)
    if df.columns == read.names:
        return df
    if not alike(df.columns):
        return df.select(*map(quoted, read.names))
    plain = _numbered(df)
    return plain.select(*(plain.columns[df.columns.index(name)] for name in read.names)).toDF(*read.names)


def _structs(df: DataFrame, schemas: Mapping[str, pa.Schema], read: Mapping[str, pa.Schema]) -> DataFrame:
    """The struct columns of the sources, in their order and named by their places, with the columns that are read."""
    from pyspark.sql.types import StructType

    names = ", ".join(schemas)
    kinds = {field.name: field.dataType for field in df.schema.fields}
    have = ", ".join(df.columns) or "no columns"
    advice = "penstock.spark.tagged({}) makes one".format(", ".join(f"{name}=..." for name in schemas))
    if not any(name in kinds for name in schemas):
        raise SchemaError(
            f"the flow has the sources {names}, and this DataFrame has none of them: it has {have}. It needs a tagged"
            f" DataFrame, with a struct column for each source: {advice}"
        )
    for name in df.columns:
        if name not in schemas:
            raise SchemaError(f"the tagged DataFrame has a column {name!r}, which is no source of the flow ({names})")
        if df.columns.count(name) > 1:
            raise SchemaError(f"the tagged DataFrame has more than one column {name!r}; rename one of them")
    chosen = []
    plain = _numbered(df)
    for number, (name, schema) in enumerate(schemas.items()):
        kind = kinds.get(name)
        if kind is None:
            raise SchemaError(f"source {name!r} is missing in the tagged DataFrame, which has {have}; {advice}")
        if not isinstance(kind, StructType):
            raise SchemaError(
                f"column {name!r} of the tagged DataFrame is {kind.simpleString()}, not a struct of that source's"
                f" columns; {advice}"
            )
        for column in schema.names:
            if column not in kind.names:
                raise SchemaError(f"source {name!r} has no column {column!r}; it has {', '.join(kind.names)}")
        own = to_arrow(kind, f"source {name!r}")
        conform(pa.RecordBatch.from_pylist([], schema=own), _nullable(schema), f"source {name!r}")
        own_column = plain[plain.columns[df.columns.index(name)]]
        chosen.append(_pruned(own_column, kind, read[name].names).alias(f"c{number}"))
    return plain.select(*chosen)


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def _pruned(column: Column, kind: Any, wanted: Sequence[str]) -> Column:
    from pyspark.sql import functions as F

    if list(kind.names) == list(wanted):
        return column
    return F.when(column.isNotNull(), F.struct(*(_field(column, kind, name).alias(name) for name in wanted)))


def _only(structs: DataFrame, number: int, read: Mapping[str, pa.Schema]) -> DataFrame:
    """The rows of one source, without those of a tagged union's others; a row that is not of one source is an error.

    Spark drops branches of a union that can have none.
    """
    from pyspark.sql import functions as F

    names = list(read)
    mine, kind = structs[f"c{number}"], structs.schema.fields[number].dataType
    others = [structs[f"c{at}"].isNull() for at in range(len(names)) if at != number]
    alone = reduce(lambda all_of, one: all_of & one, others)
    wrong = "penstock.errors.SchemaError: a row has {} set; a row of a tagged DataFrame is of exactly one of {}"
    several = F.raise_error(F.lit(wrong.format(f"{names[number]} and another source", ", ".join(names))))
    none = F.raise_error(F.lit(wrong.format("none of the sources", ", ".join(names))))
    keep = F.when(mine.isNotNull() & alone, True).when(mine.isNotNull(), several.cast("boolean"))
    if number == 0:
        keep = keep.when(alone, none.cast("boolean"))
    columns = read[names[number]].names
    picked = (_field(mine, kind, name).alias(name) for name in columns)
    return structs.where(keep.otherwise(False)).select(*picked)
