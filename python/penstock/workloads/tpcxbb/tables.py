"""The tables of TPCx-BB: what they must look like, and reading them in stream order.

Owns: names and types of the columns, ``params.json``, the readers of both hosts. A stream (clicks, sales) comes as
record batches in ascending order of ``seq``; the small tables (items, pages) come whole, as dicts.

Invariants: nothing that a query computes from is taken on trust. A column that is missing, of another kind, or null
where the workload knows no nulls is refused by name, and so are a ``seq`` that comes twice, since the answer is defined
by one order, and a ticket whose lines are not adjacent in it. A file that is not in that order is sorted first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock._resume import guarded
from penstock._schema import conform
from penstock.errors import ConfigError, SchemaError
from penstock.workloads.params import read_params
from penstock.workloads.parquet import open_table, read_batches, reading
from penstock.workloads.paths import for_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "CLICKS",
    "ITEM",
    "PAGE",
    "SALES",
    "Params",
    "Table",
    "check_together",
    "dimension",
    "in_order",
    "load_params",
    "read",
    "read_spark",
    "rows",
]

#: Rows that are looked at at once.
_PIECE = 65_536


@dataclass(frozen=True)
class Table:
    """One table of the input folder.

    Attributes
    ----------
    name : str
        Of its file, without ``.parquet``.
    schema : pyarrow.Schema
        All columns that a query may ask for; those that cannot be null say so.
    together : str or None
        The column of which equal values stand in adjacent rows of the stream.
    """

    name: str
    schema: pa.Schema
    together: str | None = None

    def select(self, columns: Iterable[str]) -> pa.Schema:
        """Return the schema of some of its columns."""
        return pa.schema([self.schema.field(column) for column in columns])


def _columns(required: str, nullable: str = "") -> pa.Schema:
    fields = [pa.field(name, pa.int64(), nullable=False) for name in required.split()]
    return pa.schema(fields + [pa.field(name, pa.int64()) for name in nullable.split()])


#: Clicks of a web shop, in the order of time.
CLICKS = Table(
    "web_clickstreams",
    _columns("seq wcs_click_date_sk wcs_click_time_sk", "wcs_sales_sk wcs_item_sk wcs_web_page_sk wcs_user_sk"),
)
#: Lines of the tickets of stores; those of one ticket are adjacent.
SALES = Table(
    "store_sales",
    _columns("seq ss_sold_date_sk ss_store_sk ss_ticket_number ss_item_sk ss_net_paid_cents"),
    together="ss_ticket_number",
)
#: Category of an item.
ITEM = Table("item", _columns("i_item_sk i_category_id"))
#: Type of a web page.
PAGE = Table("web_page", _columns("wp_web_page_sk").append(pa.field("wp_type", pa.string(), nullable=False)))


class Params:
    """``params.json``, read on demand so that a query asks only for what it needs.

    Parameters
    ----------
    values : mapping
        The content of the file.

    Examples
    --------
    >>> Params({"q2_item": 7}).number("q2_item")
    7
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, name: str, least: int | None = None) -> int:
        """Return a whole number, at least `least`."""
        value = self._find(name)
        if not _whole(value) or (least is not None and value < least):
            wanted = "a whole number" if least is None else f"a whole number of at least {least}"
            raise ConfigError(f"params.json: {name} is {value!r}; expected {wanted}")
        return int(value)

    def numbers(self, name: str) -> frozenset[int]:
        """Return a list of whole numbers as a set."""
        value = self._find(name)
        if not isinstance(value, list) or not all(_whole(one) for one in value):
            raise ConfigError(f"params.json: {name} is {value!r}; expected a list of whole numbers")
        return frozenset(value)

    def _find(self, name: str) -> Any:
        if name not in self._values:
            raise ConfigError(f"params.json says nothing about {name}; add it")
        return self._values[name]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def load_params(folder: str | Path) -> Params:
    """Read ``params.json`` of a folder.

    Raises
    ------
    ConfigError
        When the file is not there or is not a JSON object.
    """
    return Params(read_params(folder, "the queries' parameters", "of parameters by name"))


def require(table: Table, columns: Iterable[str], folder: str | Path) -> None:
    """Refuse a file that lacks a column, or has it in another kind; see `read`."""
    with open_table(folder, table.name) as file:
        _require(file, table.select(columns), table, folder)


def check_together(table: Table, folder: str | Path) -> None:
    """Refuse a stream in which equal values of `Table.together` stand apart; memory holds one of each run of them.

    Raises
    ------
    SchemaError
        Naming such a value; also as `read`.
    """
    column = table.together
    assert column is not None
    begins: list[pa.Array] = []
    last: int | None = None
    for batch in read(table, ["seq", column], folder, _PIECE):
        values = batch.column(column)
        before = pa.concat_arrays([pa.array([last], pa.int64()), values[:-1]])
        begins.append(values.filter(pc.fill_null(pc.not_equal(values, before), True)))
        last = values[-1].as_py()
    runs = pa.chunked_array(begins, pa.int64())
    if pc.count_distinct(runs).as_py() == len(runs):
        return
    found = runs.value_counts()
    twice = found.field("values")[pc.index(pc.greater(found.field("counts"), 1), True).as_py()]
    raise SchemaError(
        f"{table.name}.parquet: the rows of {column} {twice} are not adjacent in the order of seq; number them so that"
        " they are"
    )


def rows(table: Table, folder: str | Path) -> int:
    """Return how many rows a table holds, from the file's footer."""
    with open_table(folder, table.name) as file:
        return int(file.metadata.num_rows)


def read(table: Table, columns: Iterable[str], folder: str | Path, batch_rows: int = 8_192) -> Iterator[pa.RecordBatch]:
    """Stream columns of a table in ascending order of ``seq``.

    Parameters
    ----------
    table : Table
        `CLICKS` or `SALES`.
    columns : iterable of str
        Which; ``seq`` among them.
    folder : str or Path
        Holds the table's file.
    batch_rows : int, default 8_192
        Most rows per batch.

    Returns
    -------
    iterator of pyarrow.RecordBatch
        In the types of `Table.schema`.

    Raises
    ------
    ConfigError
        When the file is not there or is not Parquet.
    SchemaError
        When it lacks a column, or while reading, when a column does not fit or a ``seq`` comes twice.

    Notes
    -----
    A file whose rows stand in the order of ``seq`` is streamed; another one is read whole and sorted.
    """
    wanted = table.select(columns)
    file = open_table(folder, table.name)
    _require(file, wanted, table, folder)
    name, path = f"{table.name}.parquet", Path(folder) / f"{table.name}.parquet"
    if _sorted(file, path):
        batches = read_batches(file, path, wanted.names, batch_rows)
    else:
        with reading(path):
            whole = file.read(columns=wanted.names)
        batches = iter(whole.sort_by("seq").to_batches(max_chunksize=batch_rows))
    return in_order((conform(batch, wanted, name) for batch in batches), name)


def in_order(batches: Iterable[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
    """Pass batches on whose column ``seq`` ascends strictly, through all of them.

    Raises
    ------
    SchemaError
        Naming the two numbers that stand in the wrong order, or the one that stands there twice.

    Examples
    --------
    >>> batch = pa.record_batch({"seq": [1, 2, 2]})
    >>> list(in_order([batch], "clicks"))
    Traceback (most recent call last):
    ...
    penstock.errors.SchemaError: clicks has seq 2 twice; seq is the order of the stream, number its rows one by one
    """
    return guarded(_in_order(batches, name), f"the reading of {name}")


def _in_order(batches: Iterable[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
    last: int | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        seq = batch.column("seq")
        before = pa.concat_arrays([pa.array([seq[0].as_py() - 1 if last is None else last], pa.int64()), seq[:-1]])
        wrong = pc.index(pc.less_equal(seq, before), True).as_py()
        if wrong >= 0:
            this, other = seq[wrong].as_py(), before[wrong].as_py()
            if this == other:
                raise SchemaError(
                    f"{name} has seq {this} twice; seq is the order of the stream, number its rows one by one"
                )
            raise SchemaError(f"{name} has seq {this} after {other}; sort it by seq, which is the order of the stream")
        last = seq[-1].as_py()
        yield batch


def read_spark(table: Table, columns: Iterable[str], folder: str | Path, spark: SparkSession) -> DataFrame:
    """Return columns of a table as a Spark DataFrame of one partition in ascending order of ``seq``.

    Raises
    ------
    ConfigError, SchemaError
        As `read`, as far as the file's footer tells.
    """
    names = list(columns)
    require(table, names, folder)
    frame = spark.read.parquet(for_spark(Path(folder) / f"{table.name}.parquet")).select(*names)
    # Spark reads a file in pieces, in any order: only a sort of what came together in one partition is an order.
    return frame.repartition(1).sortWithinPartitions("seq")


def dimension(table: Table, folder: str | Path) -> dict[int, Any]:
    """Read a small table whole, as a dict from its first column to its second.

    Raises
    ------
    ConfigError, SchemaError
        As `read`; also when a key comes twice.
    """
    with open_table(folder, table.name) as file:
        _require(file, table.schema, table, folder)
        name = f"{table.name}.parquet"
        found: dict[int, Any] = {}
        for raw in read_batches(file, Path(folder) / name, table.schema.names):
            batch = conform(raw, table.schema, name)
            for key, value in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                if key in found:
                    raise SchemaError(f"{name} has {table.schema.names[0]} {key} twice; one row is needed for each")
                found[key] = value
        return found


def _require(file: Any, wanted: pa.Schema, table: Table, folder: str | Path) -> None:
    have = file.schema_arrow
    path = Path(folder) / f"{table.name}.parquet"
    for name in wanted.names:
        if name not in have.names:
            raise SchemaError(f"{path} has no column {name!r}; it has {', '.join(have.names)}")
    # What fits by its type fits an empty batch of it; the values are looked at where they are read.
    picked = pa.schema([have.field(name) for name in wanted.names])
    conform(pa.RecordBatch.from_arrays([pa.array([], kind) for kind in picked.types], schema=picked), wanted, str(path))


def _sorted(file: Any, path: Path) -> bool:
    last: int | None = None
    for batch in read_batches(file, path, ["seq"]):
        seq = conform(batch, _columns("seq"), path.name).column(0)
        if len(seq) == 0:
            continue
        if last is not None and seq[0].as_py() < last:
            return False
        if pc.any(pc.less(seq[1:], seq[:-1])).as_py():
            return False
        last = seq[-1].as_py()
    return True
