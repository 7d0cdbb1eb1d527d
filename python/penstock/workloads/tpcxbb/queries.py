"""The queries: what each reads, asks of the parameters, computes and gives out.

Owns: the table of queries and their pipelines. A pipeline takes record batches of one stream in the order of ``seq``
and gives out rows; `pack` makes record batches of them.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock import ordered
from penstock._resume import guarded
from penstock.errors import ConfigError, SchemaError
from penstock.workloads.tpcxbb import steps
from penstock.workloads.tpcxbb.tables import CLICKS, ITEM, PAGE, SALES, Params, Table, dimension, load_params

__all__ = ["QUERIES", "Query", "find", "narrow", "pack", "pipeline"]

#: Whole numbers that may be larger than 64 bits.
_WIDE = pa.decimal128(38, 0)
_ROWS = 65_536

_CLICK = ("seq", "wcs_user_sk", "wcs_click_date_sk", "wcs_click_time_sk")


@dataclass(frozen=True)
class Query:
    """One output of the workload.

    Attributes
    ----------
    name, what : str
        What the command line calls it; what it says, in one line.
    stream : Table
        `CLICKS` or `SALES`.
    columns : tuple of str
        Those of the stream that it reads, ``seq`` among them.
    schema : pyarrow.Schema
        Of what it gives out.
    in_order : bool
        Whether the order of the rows is part of the result.
    build : callable
        From the parameters and the input folder to the operators.
    """

    name: str
    what: str
    stream: Table
    columns: tuple[str, ...]
    schema: pa.Schema
    in_order: bool
    build: Callable[[Params, Path], list[Any]]


def _second(pair: tuple[int, ...]) -> int:
    return pair[1]


def _first(row: tuple[Any, ...]) -> Any:
    return row[0]


def _last(row: tuple[Any, ...]) -> Any:
    return row[-1]


def _same(item: Any) -> Any:
    return item


def _by_user(step: Any, finish: bool = True) -> Any:
    return ordered.partitioned(step, key=_second, initial=None, finish=step.finish if finish else None)


def _at_end(step: Any) -> Any:
    return ordered.stateful(step, initial=None, finish=step.finish)


def _counted(fixed: int, order: tuple[int, int, int], key: Callable[[Any], Any] = _same) -> Any:
    count = steps.Count(fixed, order)
    return ordered.partitioned(count, key=key, initial=None, finish=count.finish)


def _q1_pairs(params: Params, folder: Path) -> list[Any]:
    stores, wanted = params.numbers("q1_stores"), params.numbers("q1_categories")
    items = frozenset(item for item, category in dimension(ITEM, folder).items() if category in wanted)
    count = steps.CountPairs()
    return [
        ordered.flat_map(steps.Lines(stores, items)),
        _at_end(steps.Tickets()),
        ordered.flat_map(steps.pairs),
        ordered.partitioned(count, key=_first, initial=None, finish=count.finish),
    ]


def _q1(params: Params, folder: Path) -> list[Any]:
    least = params.number("q1_min_count")
    return [*_q1_pairs(params, folder), _at_end(steps.Ranked(by=(-3, 0, 1), limit=100, above=(2, least)))]


def _q2_sessions(params: Params, folder: Path) -> list[Any]:
    timeout_s = params.number("session_timeout_s", 0)
    return [ordered.flat_map(steps.Clicks(("wcs_item_sk",))), _by_user(steps.Sessions(timeout_s), finish=False)]


def _q2_pairs(params: Params, folder: Path) -> list[Any]:
    timeout_s, item = params.number("session_timeout_s", 0), params.number("q2_item")
    return [
        ordered.flat_map(steps.Clicks(("wcs_item_sk",))),
        _by_user(steps.Baskets(timeout_s, item)),
        ordered.flat_map(steps.Others(item)),
        _counted(item, order=(0, 1, 2)),
    ]


def _q2(params: Params, folder: Path) -> list[Any]:
    return [*_q2_pairs(params, folder), _at_end(steps.Ranked(by=(-3, 0), limit=30))]


def _q3_views(params: Params, folder: Path) -> list[Any]:
    wanted = params.numbers("q3_categories")
    among = frozenset(item for item, category in dimension(ITEM, folder).items() if category in wanted)
    views = steps.Views(params.number("q3_item"), params.number("q3_views", 0), params.number("q3_window_s", 0), among)
    return [ordered.flat_map(steps.Clicks(("wcs_item_sk",), ("wcs_sales_sk",))), _by_user(views, finish=False)]


def _q3(params: Params, folder: Path) -> list[Any]:
    return [
        *_q3_views(params, folder),
        ordered.map(_last),
        _counted(params.number("q3_item"), order=(1, 0, 2)),
        _at_end(steps.Ranked(by=(-3, 1), limit=100)),
    ]


def _q4_carts(params: Params, folder: Path) -> list[Any]:
    return [
        ordered.flat_map(steps.Clicks(("wcs_web_page_sk",), without="wcs_sales_sk")),
        ordered.flat_map(steps.Typed(dimension(PAGE, folder))),
        _by_user(steps.Carts(params.number("session_timeout_s", 0))),
    ]


def _q4(params: Params, folder: Path) -> list[Any]:
    return [*_q4_carts(params, folder), _at_end(steps.CartTotal())]


def _q15_all(params: Params, folder: Path) -> list[Any]:
    store = params.number("q15_store")
    start, end = params.number("q15_start_date_sk"), params.number("q15_end_date_sk")
    fit = steps.Fit()
    return [
        ordered.flat_map(steps.Sold(store, start, end, dimension(ITEM, folder))),
        ordered.partitioned(fit, key=_first, initial=None, finish=fit.finish),
        _at_end(steps.Ranked(by=(0,))),
    ]


def _q15(params: Params, folder: Path) -> list[Any]:
    return [*_q15_all(params, folder), ordered.filter(steps.falling), ordered.map(steps.line_of)]


def _schema(text: str) -> pa.Schema:
    kinds = {"i": pa.int64(), "f": pa.float64(), "w": _WIDE}
    parts = (word.partition(":") for word in text.split())
    # Capital letters may be null.
    return pa.schema([pa.field(name, kinds[kind.lower()], nullable=kind.isupper()) for name, _, kind in parts])


_LINES = ("seq", "ss_store_sk", "ss_ticket_number", "ss_item_sk")
_SOLD = ("seq", "ss_sold_date_sk", "ss_store_sk", "ss_item_sk", "ss_net_paid_cents")
_PAIRS = _schema("item_sk_1:i item_sk_2:i cnt:i")
_SEEN = (*_CLICK, "wcs_item_sk")
_BOUGHT = (*_CLICK, "wcs_item_sk", "wcs_sales_sk")
_PAGES = (*_CLICK, "wcs_web_page_sk", "wcs_sales_sk")

#: By name, in the order of the workload.
QUERIES: Mapping[str, Query] = {
    query.name: query
    for query in (
        Query("q1_pairs", "pairs of items sold on one ticket", SALES, _LINES, _PAIRS, False, _q1_pairs),
        Query("q1", "the 100 pairs sold together most often", SALES, _LINES, _PAIRS, True, _q1),
        Query(
            "q2_sessions",
            "clicks on items with the session of their user",
            CLICKS,
            _SEEN,
            _schema("seq:i wcs_user_sk:i wcs_item_sk:i session:i"),
            True,
            _q2_sessions,
        ),
        Query("q2_pairs", "items viewed in a session with one item", CLICKS, _SEEN, _PAIRS, False, _q2_pairs),
        Query("q2", "the 30 of them viewed most often", CLICKS, _SEEN, _PAIRS, True, _q2),
        Query(
            "q3_views",
            "the last views before each purchase of one item",
            CLICKS,
            _BOUGHT,
            _schema("purchase_seq:i view_seq:i lastviewed_item:i"),
            False,
            _q3_views,
        ),
        Query(
            "q3",
            "the 100 items viewed most often before it",
            CLICKS,
            _BOUGHT,
            _schema("purchased_item:i lastviewed_item:i cnt:i"),
            True,
            _q3,
        ),
        Query(
            "q4_carts",
            "sessions that end with an abandoned cart",
            CLICKS,
            _PAGES,
            _schema("wcs_user_sk:i session:i pages:i last_seq:i"),
            False,
            _q4_carts,
        ),
        Query(
            "q4",
            "how many pages they have on average",
            CLICKS,
            _PAGES,
            _schema("pages:I sessions:i avg_pages:F"),
            True,
            _q4,
        ),
        Query(
            "q15_all",
            "a line through the daily sales of each category",
            SALES,
            _SOLD,
            _schema("cat:i n:i sx:w sy:w sxy:w sxx:w slope:f intercept:f"),
            False,
            _q15_all,
        ),
        Query(
            "q15",
            "the categories that do not grow",
            SALES,
            _SOLD,
            _schema("cat:i slope:f intercept:f"),
            True,
            _q15,
        ),
    )
}


def find(name: str) -> Query:
    """Return the query of a name.

    Raises
    ------
    ConfigError
        When there is none; the message lists all.

    Examples
    --------
    >>> find("q2").stream.name
    'web_clickstreams'
    """
    if name not in QUERIES:
        close = difflib.get_close_matches(name, QUERIES, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"query {name!r} is unknown{hint}; the queries are {', '.join(QUERIES)}")
    return QUERIES[name]


def pipeline(query: Query, folder: str | Path, scheduler: str = "adaptive", queue: str = "hybrid") -> Any:
    """Return the pipeline of a query, from record batches of its stream to rows.

    Parameters
    ----------
    query : Query
        From `find`.
    folder : str or Path
        Holds ``params.json`` and the small tables that the query joins with.
    scheduler, queue : str
        As for `penstock.Pipeline`.

    Returns
    -------
    penstock.Pipeline
        Picklable.

    Raises
    ------
    ConfigError, SchemaError
        When a parameter or a small table is missing or does not fit.
    """
    return ordered.Pipeline(query.build(load_params(folder), Path(folder)), scheduler=scheduler, queue=queue)


def pack(rows: Iterable[tuple[Any, ...]], schema: pa.Schema, most: int = _ROWS) -> Iterator[pa.RecordBatch]:
    """Make record batches of rows, lazily.

    Raises
    ------
    SchemaError
        When a value does not fit its column.
    """
    return guarded(_pack(iter(rows), schema, most), "the packing of rows")


def _pack(rest: Iterator[tuple[Any, ...]], schema: pa.Schema, most: int) -> Iterator[pa.RecordBatch]:
    while part := list(itertools.islice(rest, most)):
        columns = zip(*part, strict=True)
        arrays = [_array(values, field) for values, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: tuple[Any, ...], field: pa.Field) -> pa.Array:
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, OverflowError) as error:
        worst = max((value for value in values if value is not None), key=abs)
        raise SchemaError(f"output column {field.name!r} holds {worst}, which does not fit {field.type}") from error


def narrow(table: pa.Table) -> pa.Table:
    """Bring the wide sums of q15_all to bigint, unless one of them is too large for it.

    Examples
    --------
    >>> import decimal
    >>> wide = pa.table({"sx": pa.array([decimal.Decimal(7)], pa.decimal128(38, 0))})
    >>> narrow(wide).schema.field("sx").type
    DataType(int64)
    """
    wide = [place for place, kind in enumerate(table.schema.types) if kind.equals(_WIDE)]
    try:
        for place in wide:
            field = table.schema.field(place).with_type(pa.int64())
            table = table.set_column(place, field, table.column(place).cast(pa.int64()))
    except pa.ArrowInvalid:
        return table
    return table
