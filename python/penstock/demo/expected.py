"""The demo's output computed once more, independently: Arrow's own aggregation over all input at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.report import Check

__all__ = ["compare", "compare_tables", "expected_bidders", "expected_hot_items", "latest"]


def expected_bidders(bids: pa.Table) -> pa.Table:
    """What every bidder has bid, in order of bidders: rows (bidder, bids, spent, highest, lowest)."""
    found = bids.group_by("bidder").aggregate([([], "count_all"), ("price", "sum"), ("price", "max"), ("price", "min")])
    found = found.select(["bidder", "count_all", "price_sum", "price_max", "price_min"])
    return found.rename_columns(["bidder", "bids", "spent", "highest", "lowest"]).sort_by("bidder")


def latest(updates: pa.Table, key: str, grows: str) -> pa.Table:
    """The last of every key's updates, in order of keys: that in which a column that only grows is greatest."""
    ordered = updates.sort_by([(key, "ascending"), (grows, "descending")]).combine_chunks()
    if ordered.num_rows < 2:
        return ordered
    keys = ordered[key].chunk(0)
    first = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
    return ordered.filter(pa.chunked_array([pa.array([True]), first]))


def expected_hot_items(bids: pa.Table, size_ms: int, every_ms: int) -> Counter[tuple[int, int, int, int]]:
    """For every window the auctions with most bids, all ties: rows (start, end, auction, bids)."""
    latest_start = pc.multiply(pc.divide(bids["date_time"], every_ms), every_ms)
    copies = [
        pa.table({"start": pc.subtract(latest_start, back * every_ms), "auction": bids["auction"]})
        for back in range(size_ms // every_ms)
    ]
    counted = pa.concat_tables(copies).group_by(["start", "auction"]).aggregate([([], "count_all")])
    best = counted.group_by("start").aggregate([("count_all", "max")])
    most = dict(zip(best["start"].to_pylist(), best["count_all_max"].to_pylist(), strict=True))
    top = counted.filter(
        pc.equal(counted["count_all"], pc.cast(pa.array(map(most.get, counted["start"].to_pylist())), pa.int64()))
    )
    columns = (top[name].to_pylist() for name in ("start", "auction", "count_all"))
    return Counter((start, start + size_ms, auction, bids) for start, auction, bids in zip(*columns, strict=True))


def compare(expected: Counter[Any], produced: Counter[Any], what: str) -> Check:
    """Compare two bags of rows."""
    missing, surplus = expected - produced, produced - expected
    detail = f"{expected.total():,} rows, as an independent computation has them"
    if missing or surplus:
        detail = (
            f"{missing.total():,} rows missing or wrong, {surplus.total():,} unexpected or repeated,"
            f" of {expected.total():,}"
        )
        examples = [f"missing {row}" for row in list(missing)[:2]] + [f"unexpected {row}" for row in list(surplus)[:2]]
        detail += ": " + "; ".join(examples)
    return Check(what, not missing and not surplus, detail)


def compare_tables(expected: pa.Table, produced: pa.Table, what: str) -> Check:
    """Compare two tables of one order; rows are looked at one by one only where they differ."""
    same = produced.select(expected.column_names).cast(expected.schema).combine_chunks()
    if same.equals(expected.combine_chunks()):
        return Check(what, True, f"{expected.num_rows:,} rows, as an independent computation has them")
    wanted, found = (Counter(zip(*(c.to_pylist() for c in table.columns), strict=True)) for table in (expected, same))
    return compare(wanted, found, what)
