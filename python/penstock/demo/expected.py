"""The demo's output computed once more, independently: Arrow's own aggregation over all input at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.report.html import Check

__all__ = ["compare", "expected_counts", "expected_hot_items"]


def expected_counts(bids: pa.Table) -> dict[int, int]:
    """Bids per auction, by Arrow's own aggregation over all input at once."""
    counted = bids.group_by("auction").aggregate([([], "count_all")])
    return dict(zip(counted["auction"].to_pylist(), counted["count_all"].to_pylist(), strict=True))


def expected_hot_items(bids: pa.Table, size_ms: int, every_ms: int) -> Counter[tuple[int, int, int, int]]:
    """For every window the auctions with most bids, all ties: rows (start, end, auction, bids)."""
    latest = pc.multiply(pc.divide(bids["date_time"], every_ms), every_ms)
    copies = [
        pa.table({"start": pc.subtract(latest, back * every_ms), "auction": bids["auction"]})
        for back in range(size_ms // every_ms)
    ]
    counted = pa.concat_tables(copies).group_by(["start", "auction"]).aggregate([([], "count_all")])
    best = counted.group_by("start").aggregate([("count_all", "max")])
    most = dict(zip(best["start"].to_pylist(), best["count_all_max"].to_pylist(), strict=True))
    columns = (counted[name].to_pylist() for name in ("start", "auction", "count_all"))
    return Counter(
        (start, start + size_ms, auction, bids)
        for start, auction, bids in zip(*columns, strict=True)
        if bids == most[start]
    )


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
