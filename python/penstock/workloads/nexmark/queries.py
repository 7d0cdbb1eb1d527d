"""The queries of NEXMark as flows: one function for each.

Source: see the package. What a query needs of ``params.json`` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from penstock import _aggregates as aggregates
from penstock import _windows as windows
from penstock._durations import Duration
from penstock._flow import Flow
from penstock.errors import ConfigError
from penstock.workloads.nexmark import steps

__all__ = ["QUERIES", "flow", "takes_lateness", "takes_params"]


def q1() -> Flow:
    """Each bid in another currency."""
    bids = Flow("auction bigint, bidder bigint, price bigint, date_time bigint", name="bid")
    return bids.map_batches(steps.convert_currency)


def q2() -> Flow:
    """Bids on every 123rd auction."""
    return Flow("auction bigint, price bigint", name="bid").map_batches(steps.select_auctions)


def q3() -> Flow:
    """People of three states and what they sell in one category."""
    people = Flow("id bigint, name string, city string, state string", name="person")
    auctions = Flow("id bigint, seller bigint, category bigint", name="auction")
    return (
        people.map_batches(steps.select_people, "seller bigint, name string, city string, state string")
        .join(auctions.map_batches(steps.select_category, "id bigint, seller bigint"), on="seller", validate="1:m")
        .map_batches(steps.named(name="name", city="city", state="state", id="id"), _LOCAL)
    )


_LOCAL = "name string, city string, state string, id bigint"


def valid_bids(lateness: Duration, *columns: str) -> Flow:
    """These columns of bids that may win and of their auctions; of q4 and q6."""
    times: dict[str, Any] = {"event_time": "date_time", "lateness": lateness}
    asked = [name for name in ("seller", "category") if name in columns]
    auctions = Flow(_bigints("id", *asked, "reserve", "date_time", "expires"), name="auction", **times)
    bidder = ["bidder"] if "bidder" in columns else []
    bids = Flow(_bigints("auction", *bidder, "price", "date_time"), name="bid", **times)
    return auctions.join(
        bids, left_on="id", right_on="auction", until="expires", validate="1:m", suffix="_bid"
    ).map_batches(steps.valid(*columns), _bigints(*columns))


def winning_bids(lateness: Duration) -> Flow:
    """The bid that each auction closes with."""
    columns = ("auction", "seller", "category", "expires", "price", "date_time_bid", "bidder")
    best = valid_bids(lateness, *columns).top(1, by="price", per="auction")
    first = best.top(1, by="date_time_bid", descending=False, per="auction")
    lowest = first.top(1, by="bidder", descending=False, per="auction")
    # A bidder may have bid the same twice at once.
    return lowest.distinct("auction", "seller", "category", "expires", "price", "bidder")


def closed(lateness: Duration, by: str) -> Flow:
    """Auctions that have closed with a bid; of q4 and q6."""
    bids = valid_bids(lateness, "auction", by, "expires", "price").key_by("expires", "auction", by)
    return bids.agg(price=aggregates.max("price"), emit="final")


def q4(lateness: Duration) -> Flow:
    """Average price at which auctions of a category close."""
    # An auction has one category.
    best = {"price": aggregates.max("price"), "category": aggregates.max("category")}
    bids = valid_bids(lateness, "auction", "category", "price")
    auctions = bids.key_by("auction").agg(emit="final", **best)
    sums = {"sum_price": aggregates.sum("price"), "n": aggregates.count()}
    categories = auctions.key_by("category").agg(emit="final", **sums)
    return categories.map_batches(steps.average, "category bigint, sum_price bigint, n bigint, avg_price bigint")


def q4_stream(lateness: Duration) -> Flow:
    """The same after each closing."""
    columns = _bigints("expires", "auction", "category", "price", "sum_price", "n", "avg_price")
    return (
        closed(lateness, "category")
        .key_by("category")
        .apply_in_pandas_with_state(steps.so_far, columns, "unused boolean")
    )


def q5(lateness: Duration, size: timedelta, period: timedelta) -> Flow:
    """The auctions with most bids in each sliding window, all ties."""
    bids = Flow("auction bigint, date_time bigint", event_time="date_time", lateness=lateness, name="bid")
    counts = bids.key_by("auction").window(windows.sliding(size, every=period)).agg(num=aggregates.count())
    return counts.top(1, by="num", per="window")


def q6(lateness: Duration) -> Flow:
    """Average of the last ten prices at which auctions of a seller closed."""
    columns = _bigints("seller", "n", "avg_price")
    return (
        closed(lateness, "seller")
        .key_by("seller")
        .apply_in_pandas_with_state(steps.last_of_ten, columns, "unused boolean")
    )


def q6_stream(lateness: Duration) -> Flow:
    """The same after each closing."""
    columns = _bigints("expires", "auction", "seller", "price", "n", "avg_price")
    return (
        closed(lateness, "seller")
        .key_by("seller")
        .apply_in_pandas_with_state(steps.last_ten, columns, "unused boolean")
    )


def q7(lateness: Duration, size: timedelta) -> Flow:
    """The highest bids of each window, all ties."""
    columns = "price bigint, auction bigint, bidder bigint, date_time bigint"
    bids = Flow(columns, event_time="date_time", lateness=lateness, name="bid")
    return bids.window(windows.tumbling(size)).top(1, by="price", per="window")


def q8(lateness: Duration) -> tuple[Flow, Flow]:
    """People, and what is sold by the id of who sells it; each with the time at which it came."""
    options: dict[str, Any] = {"event_time": "date_time", "lateness": lateness}
    people = Flow("id bigint, name string, date_time bigint", name="person", **options)
    auctions = Flow("id bigint, seller bigint, reserve bigint, date_time bigint", name="auction", **options)
    columns = {"id": "seller", "auction": "id", "reserve": "reserve", "date_time": "date_time"}
    return people, auctions.map_batches(steps.named(**columns), _bigints(*columns))


def q8_tumble(lateness: Duration, size: timedelta) -> Flow:
    """People who sell something in the window in which they came."""
    people, sold = q8(lateness)
    names = ("window_start", "window_end", "id", "name", "auction", "reserve")
    met = people.window_join(sold, on="id", window=windows.tumbling(size), validate="1:m", suffix="_sold")
    return met.map_batches(
        steps.named(**{name: name for name in names}),
        "window_start bigint, window_end bigint, id bigint, name string, auction bigint, reserve bigint",
    )


def q8_horizon(lateness: Duration, horizon: timedelta) -> Flow:
    """People who sell something within a time after they came."""
    people, sold = q8(lateness)
    names = {name: name for name in ("id", "name", "auction", "reserve")}
    soon = ("0s", horizon - timedelta(milliseconds=1))
    return people.join(sold, on="id", within=soon, suffix="_sold").map_batches(
        steps.named(**names, person_time="date_time", auction_time="date_time_sold"),
        "id bigint, name string, auction bigint, reserve bigint, person_time bigint, auction_time bigint",
    )


def _bigints(*names: str) -> str:
    return ", ".join(f"{name} bigint" for name in names)


_PLAIN: dict[str, Callable[[], Flow]] = {
    "q1": q1,
    "q2": q2,
    "q3": q3,
}
_TIMED: dict[str, Callable[..., Flow]] = {
    "winning_bids": winning_bids,
    "q4": q4,
    "q4_stream": q4_stream,
    "q6": q6,
    "q6_stream": q6_stream,
    "q5_beam": q5,
    "q5_mega": q5,
    "q7_beam": q7,
    "q7_mega": q7,
    "q8_tumble": q8_tumble,
    "q8_horizon": q8_horizon,
}
#: What queries with parameters take of ``params.json``.
_PARAMS = {
    "q5_beam": ("size_ms", "period_ms"),
    "q5_mega": ("size_ms", "period_ms"),
    "q7_beam": ("size_ms",),
    "q7_mega": ("size_ms",),
    "q8_tumble": ("size_ms",),
    "q8_horizon": ("horizon_ms",),
}
#: Some 100,000 years: what a timedelta of milliseconds holds, and more than a time can be away from 1970.
_LONGEST_MS = 3_000_000_000_000_000
#: Names of the queries.
QUERIES = tuple(sorted([*_PLAIN, *_TIMED]))


def takes_params(query: str) -> bool:
    """Whether a query needs something of ``params.json``.

    Parameters
    ----------
    query : str
        One of `QUERIES`.

    Returns
    -------
    bool
        False for one that does not exist.

    Examples
    --------
    >>> takes_params("q1"), takes_params("q5_beam")
    (False, True)
    """
    return query in _PARAMS


def takes_lateness(query: str) -> bool:
    """Whether a query goes by event time, so that rows may come too late for it.

    Parameters
    ----------
    query : str
        One of `QUERIES`.

    Returns
    -------
    bool
        False for one that does not exist.

    Examples
    --------
    >>> takes_lateness("q3"), takes_lateness("q4")
    (False, True)
    """
    return query in _TIMED


def flow(query: str, params: Mapping[str, Any], lateness: Duration = "0s") -> Flow:
    """Return the flow of a query.

    Parameters
    ----------
    query : str
        One of `QUERIES`.
    params : mapping
        The content of ``params.json``; only queries of `takes_params` need it.
    lateness : str or datetime.timedelta, default "0s"
        How far rows may be out of order in event time.

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
    if query in _PLAIN:
        return _PLAIN[query]()
    if query not in _TIMED:
        raise ConfigError(f"query {query!r} is unknown; the queries are {', '.join(QUERIES)}")
    given = _given(query, params) if takes_params(query) else []
    return _TIMED[query](lateness, *(timedelta(milliseconds=value) for value in given))


def _given(query: str, params: Mapping[str, Any]) -> list[int]:
    sizes = params.get(query)
    if not isinstance(sizes, Mapping):
        raise ConfigError(f"params.json says nothing about {query}; add its lengths in milliseconds")
    for name in _PARAMS[query]:
        value = sizes.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LONGEST_MS:
            expected = f"milliseconds, an int of 1 to {_LONGEST_MS}"
            raise ConfigError(f"params.json: {query}.{name} is {value!r}; expected {expected}")
    return [sizes[name] for name in _PARAMS[query]]
