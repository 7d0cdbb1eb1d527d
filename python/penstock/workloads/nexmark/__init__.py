"""NEXMark queries as flows.

Owns: fourteen outputs of the queries Q1 to Q8 over the people, auctions and bids of an auction site, and readers for a
folder that holds ``person.parquet``, ``auction.parquet``, ``bid.parquet`` and ``params.json``. A source of a flow is
called as its table. Times are milliseconds since 1970, prices are cents, all arithmetic is on integers.

============ ======================================================================================================
query        what, and its columns
============ ======================================================================================================
q1           each bid in another currency, ``price * 89 // 100``: auction, bidder, price, date_time
q2           bids on every 123rd auction: auction, price
q3           people of three states and the auctions of category 10 that they sell, for ever: name, city, state, id
winning_bids the bid that each auction closes with: auction, seller, category, expires, price, bidder
q4           average closing price of a category: category, sum_price, n, avg_price
q4_stream    the same after each closing: expires, auction, category, price, sum_price, n, avg_price
q5_beam      the auctions with most bids per sliding window, all ties: window_start, window_end, auction, num
q5_mega      the same with another window
q6           average of the last ten closing prices of a seller: seller, n, avg_price
q6_stream    the same after each closing: expires, auction, seller, price, n, avg_price
q7_beam      the highest bids per tumbling window, all ties: window_start, window_end, price, auction, bidder, date_time
q7_mega      the same with another window
q8_tumble    people and what they sell in the window in which they came: window_start, window_end, id, name, auction,
             reserve
q8_horizon   the same within a time after they came: id, name, auction, reserve, person_time, auction_time
============ ======================================================================================================

Lengths come from ``params.json``, for example ``{"q5_beam": {"size_ms": 10000, "period_ms": 5000}, "q7_beam":
{"size_ms": 10000}, "q8_horizon": {"horizon_ms": 120000}}``. An auction closes with its highest bid that reaches the
reserve while it is open; of equal ones with the earliest, then that of the lowest bidder. Auctions close at the end of
the input here: q4 and q6 say nothing before it.

Source: the NEXMark paper's queries in the shape that Apache Beam (``_beam``) and Megaphone
(``_mega``) give them. Unlike Megaphone, q5 is global and reports every tie, q6 is by seller, q8 reads people as people.
"""

from __future__ import annotations

from penstock.workloads.nexmark.queries import QUERIES, flow, takes_lateness, takes_params
from penstock.workloads.nexmark.steps import convert_currency
from penstock.workloads.nexmark.tables import disorder_ms, load_params, read, read_spark, rows

__all__ = [
    "QUERIES",
    "convert_currency",
    "disorder_ms",
    "flow",
    "load_params",
    "read",
    "read_spark",
    "rows",
    "takes_lateness",
    "takes_params",
]
