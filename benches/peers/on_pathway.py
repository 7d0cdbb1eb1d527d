"""NEXMark on Pathway, in a process of its own, for `penstock bench nexmark`; see ``apart.py`` for what it is told.

Tables are CSV files with a header, of which the columns of the flow are read, as ours reads them; in static mode: one
time, so that each row comes out once. The clock runs from
the building of the graph to the end of ``pw.run``, import and start of the process left out; results go to
``pw.io.null``, but for those of the first run, which are taken row by row and tell the answer for all. Threads are
those of ``PATHWAY_THREADS``. Windows are arithmetic on event time, which is what ``windowby`` does with a Python
function for each row.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apart import TEXTS, Answer, answer, serve

#: What a column is called in the files: a row of Pathway has an ``id`` of its own.
_OWN = {"id": "number"}


def q1(read: Callable[[str], Any], _: dict[str, int]) -> Any:
    bid = read("bid")
    return bid.select(bid.auction, bid.bidder, price=bid.price * 89 // 100, date_time=bid.date_time)


def q2(read: Callable[[str], Any], _: dict[str, int]) -> Any:
    bid = read("bid")
    return bid.filter(bid.auction % 123 == 0)[["auction", "price"]]


def q3(read: Callable[[str], Any], _: dict[str, int]) -> Any:
    person, auction = read("person"), read("auction")
    people = person.filter((person.state == "OR") | (person.state == "ID") | (person.state == "CA"))
    sold = auction.filter(auction.category == 10)
    joined = people.join(sold, people.number == sold.seller)
    return joined.select(people.name, people.city, people.state, sold.number)


def q4(read: Callable[[str], Any], _: dict[str, int]) -> Any:
    import pathway as pw

    auction, bid = read("auction"), read("bid")
    pairs = auction.join(bid, auction.number == bid.auction).select(
        auction.number,
        auction.category,
        auction.reserve,
        auction.expires,
        bid.price,
        begin=auction.date_time,
        at=bid.date_time,
    )
    valid = pairs.filter((pairs.price >= pairs.reserve) & (pairs.begin <= pairs.at) & (pairs.at < pairs.expires))
    best = valid.groupby(valid.number, valid.category).reduce(valid.category, price=pw.reducers.max(valid.price))
    sums = best.groupby(best.category).reduce(best.category, total=pw.reducers.sum(best.price), n=pw.reducers.count())
    return sums.select(sums.category, sums.total, sums.n, mean=sums.total // sums.n)


def q5(read: Callable[[str], Any], told: dict[str, int]) -> Any:
    import pathway as pw

    size, period = told["size_ms"], told["period_ms"]
    bid = read("bid")
    first = bid.date_time // period * period
    copies = [bid.select(bid.auction, start=first - shift) for shift in range(0, size, period)]
    bids = pw.Table.concat_reindex(*copies)
    counts = bids.groupby(bids.start, bids.auction).reduce(bids.start, bids.auction, num=pw.reducers.count())
    most = counts.groupby(counts.start).reduce(counts.start, num=pw.reducers.max(counts.num))
    met = counts.join(most, counts.start == most.start, counts.num == most.num)
    return met.select(counts.start, end=counts.start + size, auction=counts.auction, num=counts.num)


def q7(read: Callable[[str], Any], told: dict[str, int]) -> Any:
    import pathway as pw

    size = told["size_ms"]
    bid = read("bid")
    bids = bid.with_columns(start=bid.date_time // size * size)
    best = bids.groupby(bids.start).reduce(bids.start, price=pw.reducers.max(bids.price))
    met = bids.join(best, bids.start == best.start, bids.price == best.price)
    return met.select(
        bids.start, end=bids.start + size, price=bids.price, auction=bids.auction, bidder=bids.bidder, at=bids.date_time
    )


def q8(read: Callable[[str], Any], told: dict[str, int]) -> Any:
    size = told["size_ms"]
    person, auction = read("person"), read("auction")
    people = person.select(person.number, person.name, start=person.date_time // size * size)
    sold = auction.select(auction.seller, auction.number, auction.reserve, start=auction.date_time // size * size)
    met = people.join(sold, people.number == sold.seller, people.start == sold.start)
    return met.select(
        people.start,
        end=people.start + size,
        number=people.number,
        name=people.name,
        auction=sold.number,
        reserve=sold.reserve,
    )


QUERIES = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5, "q7": q7, "q8": q8}


def read(told: dict[str, Any], table: str) -> Any:
    """A table, in the columns that it is told of."""
    import pathway as pw

    columns = told["columns"][table]
    schema = pw.schema_from_types(**{_OWN.get(name, name): str if name in TEXTS else int for name in columns})
    return pw.io.csv.read(Path(told["folder"]) / f"{table}.csv", schema=schema, mode="static")


def prepare(told: dict[str, Any]) -> Callable[[], tuple[float, Answer]]:
    os.environ["PATHWAY_THREADS"] = str(told["workers"])
    logging.disable(logging.WARNING)
    import pathway as pw

    query = QUERIES[told["query"].split("_")[0]]
    answers: list[Answer] = []

    def once() -> tuple[float, Answer]:
        pw.internals.parse_graph.G.clear()
        rows: list[tuple[Any, ...]] = []
        begin = time.perf_counter()
        table = query(functools.partial(read, told), told)
        if answers:
            pw.io.null.write(table)
        else:
            pw.io.subscribe(table, lambda key, row, time, is_addition: rows.append((is_addition, *row.values())))
        pw.run(monitoring_level=pw.MonitoringLevel.NONE)
        seconds = time.perf_counter() - begin
        if not answers:
            assert all(row[0] for row in rows)
            answers.append(answer(row[1:] for row in rows))
        return seconds, answers[0]

    return once


if __name__ == "__main__":
    serve(prepare)
