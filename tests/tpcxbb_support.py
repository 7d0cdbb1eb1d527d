"""Small TPCx-BB tables, and each output by its definition: no streams, no state, every row with every other."""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TIMEOUT, WINDOW = 10, 25
PARAMS = {
    "session_timeout_s": TIMEOUT,
    "q1_categories": [1, 2],
    "q1_stores": [10, 20],
    "q1_min_count": 1,
    "q2_item": 3,
    "q3_item": 4,
    "q3_views": 3,
    "q3_window_s": WINDOW,
    "q3_categories": [2, 3],
    "q15_store": 10,
    "q15_start_date_sk": 102,
    "q15_end_date_sk": 108,
}
CATEGORIES = {1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3}
PAGES = {1: "order", 2: "dynamic", 3: "review", 4: "dynamic"}
BAGS = ("q1_pairs", "q2_pairs", "q3_views", "q4_carts", "q15_all")
Click = tuple[int, int, int, "int | None", "int | None", "int | None", "int | None"]
Line = tuple[int, int, int, int, int, int]


def some_clicks(rng: random.Random, count: int) -> list[Click]:
    """Gaps that end a session, that just do not, and none; nulls, unknown items and pages."""
    clicks: list[Click] = []
    now, busy = 100 * 86_400 + 86_390, set()
    for seq in range(count):
        gap = rng.choice([0, 0, 1, 2, TIMEOUT - 1, TIMEOUT, TIMEOUT + 1, WINDOW])
        busy = set() if gap else busy
        now += gap
        user = rng.choice([None, 1, 1, 2, 3])
        if user in busy:
            now, busy = now + 1, set()
        busy.add(user)
        item, page = rng.choice([None, 1, 2, 3, 4, 4, 5, 6, 99]), rng.choice([None, 1, 2, 3, 4, 77])
        sale = rng.choice([None, None, seq])
        clicks.append((seq * 3, now // 86_400, now % 86_400, sale, item, page, user))
    return clicks


def some_lines(rng: random.Random, tickets: int, cents: int = 1000) -> list[Line]:
    lines: list[Line] = []
    day = 100
    for ticket in range(tickets):
        day += rng.choice([0, 0, 1])
        store = rng.choice([10, 10, 20, 30])
        for _ in range(rng.randint(1, 5)):
            lines.append((len(lines), day, store, 1000 - ticket, rng.choice([*CATEGORIES, 99]), rng.randrange(cents)))
    return lines


def write(folder: Path, clicks: list[Click], lines: list[Line], params: dict[str, Any] | None = None) -> Path:
    def table(name: str, columns: str, rows: Any, kinds: dict[str, pa.DataType] | None = None) -> None:
        names = columns.split()
        values = list(zip(*rows, strict=True)) or [()] * len(names)
        arrays = [
            pa.array(list(column), (kinds or {}).get(name, pa.int64()))
            for name, column in zip(names, values, strict=True)
        ]
        pq.write_table(pa.table(arrays, names), folder / f"{name}.parquet", row_group_size=7)

    folder.mkdir(exist_ok=True, parents=True)
    table(
        "web_clickstreams",
        "seq wcs_click_date_sk wcs_click_time_sk wcs_sales_sk wcs_item_sk wcs_web_page_sk wcs_user_sk",
        clicks,
    )
    table(
        "store_sales",
        "seq ss_sold_date_sk ss_store_sk ss_ticket_number ss_item_sk ss_net_paid_cents",
        lines,
    )
    table("item", "i_item_sk i_category_id", CATEGORIES.items())
    table("web_page", "wp_web_page_sk wp_type", PAGES.items(), {"wp_type": pa.string()})
    (folder / "params.json").write_text(json.dumps(params or PARAMS))
    return folder


def _sessions(rows: list[tuple[int, int]], timeout: int) -> list[int]:
    """Session of each (user, time): how many of the user's gaps before it are too long."""
    found = []
    for place, (user, _) in enumerate(rows):
        times = [when for who, when in rows[: place + 1] if who == user]
        found.append(sum(late - early > timeout for early, late in pairwise(times)))
    return found


def expected(clicks: list[Click], lines: list[Line], params: dict[str, Any] = PARAMS) -> dict[str, list[Any]]:
    """Every output, bags sorted."""
    out: dict[str, list[Any]] = {}
    sold = [line for line in lines if CATEGORIES.get(line[4]) in params["q1_categories"]]
    sold = [line for line in sold if line[2] in params["q1_stores"]]
    baskets = [{line[4] for line in sold if line[3] == ticket} for ticket in {line[3] for line in sold}]
    pairs = Counter(pair for basket in baskets for pair in combinations(sorted(basket), 2))
    out["q1_pairs"] = sorted((*pair, count) for pair, count in pairs.items())
    often = [row for row in out["q1_pairs"] if row[2] > params["q1_min_count"]]
    out["q1"] = sorted(often, key=lambda row: (-row[2], row[0], row[1]))[:100]

    timeout = params["session_timeout_s"]
    seen = [
        (seq, day * 86_400 + time, sale, item, user)
        for seq, day, time, sale, item, _, user in clicks
        if item is not None and user is not None
    ]
    sessions = _sessions([(user, when) for _, when, _, _, user in seen], timeout)
    out["q2_sessions"] = [(row[0], row[4], row[3], number) for row, number in zip(seen, sessions, strict=True)]
    viewed = [
        {row[2] for row in out["q2_sessions"] if (row[1], row[3]) == one}
        for one in {(row[1], row[3]) for row in out["q2_sessions"]}
    ]
    wanted = params["q2_item"]
    others = Counter(item for basket in viewed if wanted in basket for item in basket - {wanted})
    out["q2_pairs"] = sorted((item, wanted, count) for item, count in others.items())
    out["q2"] = sorted(out["q2_pairs"], key=lambda row: (-row[2], row[0]))[:30]

    out["q3_views"] = []
    for place, (seq, when, sale, item, user) in enumerate(seen):
        if item == params["q3_item"] and sale is not None:
            before = [row for row in seen[:place] if row[4] == user]
            for view in before[max(0, len(before) - params["q3_views"]) :]:
                if view[1] >= when - params["q3_window_s"] and CATEGORIES.get(view[3]) in params["q3_categories"]:
                    out["q3_views"].append((seq, view[0], view[3]))
    counts = Counter(row[2] for row in out["q3_views"])
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:100]
    out["q3"] = [(params["q3_item"], item, count) for item, count in ranked]

    paged = [
        (seq, day * 86_400 + time, PAGES[page], user)
        for seq, day, time, sale, _, page, user in clicks
        if user is not None and page in PAGES and sale is None
    ]
    sessions = _sessions([(user, when) for _, when, _, user in paged], timeout)
    out["q4_carts"] = []
    for one in sorted({(row[3], number) for row, number in zip(paged, sessions, strict=True)}):
        own = [row for row, number in zip(paged, sessions, strict=True) if (row[3], number) == one]
        kinds = [row[2] for row in own if row[2] in ("dynamic", "order")]
        if kinds and kinds[-1] == "dynamic":
            out["q4_carts"].append((*one, len(own), own[-1][0]))
    total, carts = sum(row[2] for row in out["q4_carts"]), len(out["q4_carts"])
    out["q4"] = [(total, carts, total / carts) if carts else (None, 0, None)]

    days: dict[int, Counter[int]] = {}
    for _, day, store, _, item, cents in lines:
        known = item in CATEGORIES and store == params["q15_store"]
        if known and params["q15_start_date_sk"] <= day <= params["q15_end_date_sk"]:
            days.setdefault(CATEGORIES[item], Counter())[day] += cents
    out["q15_all"] = []
    for category, sums in sorted(days.items()):
        if len(sums) > 1:
            n, sx, sy = len(sums), sum(sums.keys()), sum(sums.values())
            sxy, sxx = sum(x * y for x, y in sums.items()), sum(x * x for x in sums)
            mean = Fraction(sx, n)
            slope = sum((x - mean) * y for x, y in sums.items()) / sum((x - mean) ** 2 for x in sums) / 100
            intercept = Fraction(sy, n) / 100 - slope * mean
            out["q15_all"].append((category, n, sx, sy, sxy, sxx, float(slope), float(intercept)))
    out["q15"] = [(row[0], row[6], row[7]) for row in out["q15_all"] if row[6] <= 0]
    return out
