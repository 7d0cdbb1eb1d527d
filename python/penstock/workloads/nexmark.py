"""NEXMark queries as flows.

Owns: the queries q1, q2, q5 and q7 over the bids of an auction site, q3 over its people and
auctions, and readers for a folder that holds ``bid.parquet``, ``person.parquet``, ``auction.parquet``
and ``params.json``. A source of a flow is called as its table. Times are milliseconds since 1970,
prices are cents, all arithmetic is on integers.

======== ============================================================ =====================
query    what                                                         columns
======== ============================================================ =====================
q1       each bid in another currency, ``price * 89 // 100``          auction, bidder, price,
                                                                      date_time
q2       bids on every 123rd auction                                  auction, price
q3       people of three states and the auctions of category 10 that  name, city, state, id
         they sell, for ever
q5_beam  the auctions with most bids per sliding window, all ties     window_start,
q5_mega  the same with another window                                 window_end, auction, num
q7_beam  the highest bids per tumbling window, all ties               window_start,
q7_mega  the same with another window                                 window_end, price,
                                                                      auction, bidder,
                                                                      date_time
======== ============================================================ =====================

Window lengths come from ``params.json``, for example
``{"q5_beam": {"size_ms": 10000, "period_ms": 5000}, "q7_beam": {"size_ms": 10000}}``.

Source: the NEXMark paper's queries in the shape that Apache Beam (``_beam``) and Megaphone
(``_mega``) give them. Unlike Megaphone, q5 is global and reports every tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock import _aggregates as aggregates
from penstock import _windows as windows
from penstock._durations import Duration
from penstock._flow import Flow
from penstock._resume import guarded
from penstock.errors import ConfigError, SchemaError
from penstock.workloads.params import read_params
from penstock.workloads.parquet import open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["QUERIES", "disorder_ms", "flow", "load_params", "read", "read_spark", "rows"]

#: Names of the queries.
QUERIES = ("q1", "q2", "q3", "q5_beam", "q5_mega", "q7_beam", "q7_mega")

_WINDOW_PARAMS = {"q5": ("size_ms", "period_ms"), "q7": ("size_ms",)}


def flow(query: str, params: Mapping[str, Any], lateness: Duration = "0s") -> Flow:
    """Return the flow of a query.

    Parameters
    ----------
    query : str
        One of `QUERIES`.
    params : mapping
        The content of ``params.json``; q1, q2 and q3 need nothing of it.
    lateness : str or datetime.timedelta, default "0s"
        How far bids may be out of order in event time.

    Returns
    -------
    Flow
        From columns of the tables to the query's columns.

    Raises
    ------
    ConfigError
        When the query is unknown, or `params` lacks a window of it.

    Examples
    --------
    >>> flow("q5_beam", {"q5_beam": {"size_ms": 10000, "period_ms": 5000}}).columns
    ('window_start', 'window_end', 'auction', 'num')
    """
    if query == "q1":
        bids = "auction bigint, bidder bigint, price bigint, date_time bigint"
        return Flow(bids, name="bid").map_batches(convert_currency)
    if query == "q2":
        return Flow("auction bigint, price bigint", name="bid").map_batches(select_auctions)
    if query == "q3":
        people = Flow("id bigint, name string, city string, state string", name="person")
        auctions = Flow("id bigint, seller bigint, category bigint", name="auction")
        return (
            people.map_batches(select_people, "seller bigint, name string, city string, state string")
            .join(auctions.map_batches(select_category, "id bigint, seller bigint"), on="seller")
            .map_batches(without_seller, "name string, city string, state string, id bigint")
        )
    if query not in QUERIES:
        raise ConfigError(f"query {query!r} is unknown; the queries are {', '.join(QUERIES)}")
    sizes = _window_params(query, params)
    if query.startswith("q5"):
        return (
            Flow("auction bigint, date_time bigint", event_time="date_time", lateness=lateness, name="bid")
            .key_by("auction")
            .window(windows.sliding(sizes["size"], every=sizes["period"]))
            .agg(num=aggregates.count())
            .top(1, by="num", per="window")
        )
    bids = "price bigint, auction bigint, bidder bigint, date_time bigint"
    return (
        Flow(bids, event_time="date_time", lateness=lateness, name="bid")
        .window(windows.tumbling(sizes["size"]))
        .top(1, by="price", per="window")
    )


def convert_currency(bids: pa.RecordBatch) -> pa.RecordBatch:
    """Multiply prices by 89 / 100, rounding down (q1).

    Parameters
    ----------
    bids : pyarrow.RecordBatch
        With a column ``price`` of bigint.

    Returns
    -------
    pyarrow.RecordBatch
        The same columns.

    Examples
    --------
    >>> import pyarrow as pa
    >>> convert_currency(pa.record_batch({"price": [100, 101, -1]})).to_pydict()
    {'price': [89, 89, -1]}
    """
    place = bids.schema.get_field_index("price")
    scaled = pc.multiply_checked(bids.column(place), 89)
    quotient = pc.divide(scaled, 100)
    # Arrow divides towards zero; the query rounds down.
    below = pc.less(scaled, pc.multiply(quotient, 100))
    price = pc.subtract(quotient, below.cast(pa.int64()))
    return bids.set_column(place, bids.schema.field(place), price)


def select_auctions(bids: pa.RecordBatch) -> pa.RecordBatch:
    """Keep bids on auctions whose number is a multiple of 123 (q2).

    Parameters
    ----------
    bids : pyarrow.RecordBatch
        With a column ``auction`` of bigint.

    Returns
    -------
    pyarrow.RecordBatch
        The same columns.

    Examples
    --------
    >>> import pyarrow as pa
    >>> select_auctions(pa.record_batch({"auction": [122, 123, 246]})).num_rows
    2
    """
    auction = bids.column("auction")
    return bids.filter(pc.equal(auction, pc.multiply(pc.divide(auction, 123), 123)))


def select_people(people: pa.RecordBatch) -> pa.RecordBatch:
    """Keep people of Oregon, Idaho and California, and call their id seller (q3).

    Parameters
    ----------
    people : pyarrow.RecordBatch
        With the columns id, name, city and state.

    Returns
    -------
    pyarrow.RecordBatch
        With the columns seller, name, city and state.

    Examples
    --------
    >>> import pyarrow as pa
    >>> rows = pa.record_batch({"id": [1, 2], "name": ["a", "b"], "city": ["c", "d"], "state": ["OR", "AZ"]})
    >>> select_people(rows).to_pylist()
    [{'seller': 1, 'name': 'a', 'city': 'c', 'state': 'OR'}]
    """
    found = people.filter(pc.is_in(people.column("state"), pa.array(["OR", "ID", "CA"])))
    return found.rename_columns(["seller", "name", "city", "state"])


def select_category(auctions: pa.RecordBatch) -> pa.RecordBatch:
    """Keep auctions of category 10 (q3).

    Parameters
    ----------
    auctions : pyarrow.RecordBatch
        With the columns id, seller and category.

    Returns
    -------
    pyarrow.RecordBatch
        With the columns id and seller.

    Examples
    --------
    >>> import pyarrow as pa
    >>> select_category(pa.record_batch({"id": [1, 2], "seller": [3, 4], "category": [10, 11]})).to_pylist()
    [{'id': 1, 'seller': 3}]
    """
    return auctions.filter(pc.equal(auctions.column("category"), 10)).select(["id", "seller"])


def without_seller(pairs: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out the column ``seller`` (q3).

    Parameters
    ----------
    pairs : pyarrow.RecordBatch
        With that column.

    Returns
    -------
    pyarrow.RecordBatch
        The others.

    Examples
    --------
    >>> import pyarrow as pa
    >>> without_seller(pa.record_batch({"seller": [1], "id": [2]})).to_pylist()
    [{'id': 2}]
    """
    return pairs.select([name for name in pairs.schema.names if name != "seller"])


def load_params(folder: str | Path) -> dict[str, Any]:
    """Read ``params.json`` of a folder.

    Parameters
    ----------
    folder : str or Path
        Where the data is.

    Returns
    -------
    dict
        By query name.

    Raises
    ------
    ConfigError
        When the file is not there or is not a JSON object.
    """
    return read_params(folder, "the window lengths", "by query name")


def disorder_ms(folder: str | Path) -> int:
    """Measure how far the bids of a folder are out of order: the least lateness at which none comes late.

    Parameters
    ----------
    folder : str or Path
        Holds ``bid.parquet``.

    Returns
    -------
    int
        Greatest distance of a bid behind the latest bid before it, milliseconds; 0 for a sorted file. Reads one column.
    """
    latest, furthest = None, 0
    file = open_table(folder, "bid")
    _require(file, ["date_time"], folder)
    for batch in _stream(file, ["date_time"], 65_536):
        times = batch.column(0).drop_null()
        if not len(times):
            continue
        before = pc.cumulative_max(times, start=latest)
        furthest = max(furthest, pc.max(pc.subtract(before, times)).as_py())
        latest = before[-1]
    return furthest


def rows(query_flow: Flow, folder: str | Path) -> int:
    """Return how many rows of a folder a flow takes, from the files' footers."""
    return sum(int(open_table(folder, table).metadata.num_rows) for table in query_flow.sources)


def read(query_flow: Flow, folder: str | Path, batch_rows: int = 65_536) -> dict[str, Iterator[pa.RecordBatch]]:
    """Stream the tables of a folder that a flow takes, only the columns that it takes.

    Parameters
    ----------
    query_flow : Flow
        Made by `flow`.
    folder : str or Path
        Holds a Parquet file for each source of the flow.
    batch_rows : int, default 65_536
        Most rows per batch.

    Returns
    -------
    dict of str to iterator of pyarrow.RecordBatch
        By the name of the source, each in the order of the file.

    Raises
    ------
    ConfigError
        When a file is not there or is not Parquet.
    SchemaError
        When it lacks a column.
    """
    found = {}
    for table, schema in query_flow.sources.items():
        file = open_table(folder, table)
        _require(file, schema.names, folder, table)
        found[table] = guarded(_stream(file, schema.names, batch_rows), f"the reading of {folder}")
    return found


def read_spark(query_flow: Flow, folder: str | Path, spark: SparkSession) -> DataFrame:
    """Return the bids of a folder as a Spark DataFrame, only the columns that a flow takes.

    Parameters
    ----------
    query_flow : Flow
        Made by `flow`.
    folder : str or Path
        Holds ``bid.parquet``.
    spark : pyspark.sql.SparkSession
        A session.

    Returns
    -------
    pyspark.sql.DataFrame
        Lazy.
    """
    open_table(folder, "bid").close()
    frame = spark.read.parquet(str(Path(folder).absolute() / "bid.parquet"))
    return frame.select(*query_flow.input_schema.names)


def _window_params(query: str, params: Mapping[str, Any]) -> dict[str, timedelta]:
    sizes = params.get(query)
    if not isinstance(sizes, Mapping):
        raise ConfigError(f"params.json says nothing about {query}; add its window lengths in milliseconds")
    found = {}
    for name in _WINDOW_PARAMS[query[:2]]:
        value = sizes.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"params.json: {query}.{name} is {value!r}; expected milliseconds, an int of at least 1")
        found[name.removesuffix("_ms")] = timedelta(milliseconds=value)
    return found


def _require(file: Any, columns: list[str], folder: str | Path, table: str = "bid") -> None:
    have = file.schema_arrow.names
    for name in columns:
        if name not in have:
            raise SchemaError(f"{Path(folder) / f'{table}.parquet'} has no column {name!r}; it has {', '.join(have)}")


def _stream(file: Any, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    with file:
        yield from file.iter_batches(batch_size=batch_rows, columns=columns)
