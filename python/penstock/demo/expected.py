"""The demo's output computed once more, independently: Arrow's own aggregation over all input at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.report import Check

__all__ = ["check_updates", "compare", "compare_tables", "expected_bidders", "expected_hot_items", "latest"]


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


def check_updates(received: Mapping[int, pa.Table], key: str, grows: str, what: str) -> Check:
    """Check that no batch gives a key twice, and that a column that only grows does so from batch to batch of each key.

    `latest` keeps one row of each key, so it does not see an update that is repeated, in its batch or in a later one.
    Cost: sorts all updates once.
    """
    tables = [
        table.select([key, grows]).append_column("batch", pa.array([batch] * table.num_rows, pa.int64()))
        for batch, table in sorted(received.items())
    ]
    rows = sum(table.num_rows for table in tables)
    if rows < 2:
        return Check(what, True, f"{rows:,} updates of {len(tables):,} batches")
    ordered = pa.concat_tables(tables).sort_by([(key, "ascending"), ("batch", "ascending"), (grows, "ascending")])
    before, after = ordered.slice(0, rows - 1), ordered.slice(1)
    same = pc.equal(before[key], after[key])
    twice = pc.and_(same, pc.equal(before["batch"], after["batch"]))
    stale = pc.and_(pc.and_(same, pc.invert(twice)), pc.less_equal(after[grows], before[grows]))
    found = []
    for wrong, said in ((twice, "stand twice in one batch"), (stale, f"have no more {grows} than the update before")):
        if count := pc.sum(wrong).as_py() or 0:
            first = after.filter(wrong).slice(0, 1).to_pylist()[0]
            found.append(f"{count:,} {said}, as {first}")
    detail = f"{rows:,} updates of {len(tables):,} batches" + "".join(f"; {text}" for text in found)
    return Check(what, not found, detail)


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
