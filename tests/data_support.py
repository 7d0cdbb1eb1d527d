"""Data sets for tests, made where the real ones are not there, and what must come out of them.

Each has the files of the real one. NEXMark's events are the same ones, which the package makes; the others are like
theirs and smaller. What is expected is computed from the rows by its definition: whole tables, no streams and no state.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

import tpcxbb_support

Rows = list[tuple[Any, ...]]

# NEXMark

EVENTS = 100_000
LENGTHS = {
    "q5_beam": {"size_ms": 10_000, "period_ms": 5_000},
    "q5_mega": {"size_ms": 60_000, "period_ms": 1_000},
    "q7_beam": {"size_ms": 10_000},
    "q7_mega": {"size_ms": 60_000},
    "q8_tumble": {"size_ms": 10_000},
    "q8_horizon": {"horizon_ms": 120_000},
}
#: Columns of the outputs, as the package describes them.
NEXMARK = {
    "q1": "auction bidder price date_time",
    "q2": "auction price",
    "q3": "name city state id",
    "winning_bids": "auction seller category expires price bidder",
    "q4": "category sum_price n avg_price",
    "q4_stream": "expires auction category price sum_price n avg_price",
    "q5_beam": "window_start window_end auction num",
    "q5_mega": "window_start window_end auction num",
    "q6": "seller n avg_price",
    "q6_stream": "expires auction seller price n avg_price",
    "q7_beam": "window_start window_end price auction bidder date_time",
    "q7_mega": "window_start window_end price auction bidder date_time",
    "q8_tumble": "window_start window_end id name auction reserve",
    "q8_horizon": "id name auction reserve person_time auction_time",
}


def make_nexmark(folder: Path) -> None:
    from penstock import _native

    for name, batch in _native.Nexmark().next_batches(EVENTS).items():
        pq.write_table(pa.table(pa.record_batch(batch)), folder / f"{name}.parquet")
    (folder / "params.json").write_text(json.dumps(LENGTHS))
    write_expected(folder, NEXMARK, nexmark_outputs(folder, LENGTHS))


def events(folder: Path, table: str) -> list[Any]:
    """The rows of a table, without the columns that no query asks for."""
    columns = [name for name in pq.read_schema(folder / f"{table}.parquet").names if name not in ("extra", "url")]
    rows = pq.read_table(folder / f"{table}.parquet", columns=columns).to_pylist()
    return [SimpleNamespace(**row) for row in rows]


def nexmark_outputs(folder: Path, lengths: Mapping[str, Mapping[str, int]]) -> dict[str, Rows]:
    """Every output of the tables of a folder, in any order."""
    people, auctions, bids = (events(folder, table) for table in ("person", "auction", "bid"))
    by_id = {person.id: person for person in people}
    out: dict[str, Rows] = {}
    out["q1"] = [(bid.auction, bid.bidder, bid.price * 89 // 100, bid.date_time) for bid in bids]
    out["q2"] = [(bid.auction, bid.price) for bid in bids if bid.auction % 123 == 0]
    sellers = [(by_id[auction.seller], auction) for auction in auctions if auction.seller in by_id]
    out["q3"] = [
        (person.name, person.city, person.state, auction.id)
        for person, auction in sellers
        if auction.category == 10 and person.state in ("OR", "ID", "CA")
    ]
    out |= closing_outputs(auctions, bids)
    for query in ("q5_beam", "q5_mega"):
        out[query] = hot_items(bids, lengths[query]["size_ms"], lengths[query]["period_ms"])
    for query in ("q7_beam", "q7_mega"):
        out[query] = highest_bids(bids, lengths[query]["size_ms"])
    size, horizon = lengths["q8_tumble"]["size_ms"], lengths["q8_horizon"]["horizon_ms"]
    out["q8_tumble"] = [
        (start, start + size, person.id, person.name, auction.id, auction.reserve)
        for person, auction in sellers
        if (start := person.date_time // size * size) == auction.date_time // size * size
    ]
    out["q8_horizon"] = [
        (person.id, person.name, auction.id, auction.reserve, person.date_time, auction.date_time)
        for person, auction in sellers
        if person.date_time <= auction.date_time < person.date_time + horizon
    ]
    return out


def closing_outputs(auctions: list[Any], bids: list[Any]) -> dict[str, Rows]:
    """Those that go by the bid that an auction closes with."""
    offers = defaultdict(list)
    for bid in bids:
        offers[bid.auction].append(bid)
    closed = []
    for auction in auctions:
        valid = [
            bid
            for bid in offers[auction.id]
            if bid.price >= auction.reserve and auction.date_time <= bid.date_time < auction.expires
        ]
        if valid:
            closed.append((auction, min(valid, key=lambda bid: (-bid.price, bid.date_time, bid.bidder))))
    closed.sort(key=lambda pair: (pair[0].expires, pair[0].id))
    out: dict[str, Rows] = {name: [] for name in ("winning_bids", "q4", "q4_stream", "q6", "q6_stream")}
    in_category, of_seller = defaultdict(list), defaultdict(list)
    for auction, best in closed:
        out["winning_bids"].append(
            (auction.id, auction.seller, auction.category, auction.expires, best.price, best.bidder)
        )
        all_ = in_category[auction.category]
        all_.append(best.price)
        told = sum(all_), len(all_), sum(all_) // len(all_)
        out["q4_stream"].append((auction.expires, auction.id, auction.category, best.price, *told))
        of_seller[auction.seller].append(best.price)
        last = of_seller[auction.seller][-10:]
        out["q6_stream"].append(
            (auction.expires, auction.id, auction.seller, best.price, len(last), sum(last) // len(last))
        )
    out["q4"] = [(category, sum(all_), len(all_), sum(all_) // len(all_)) for category, all_ in in_category.items()]
    out["q6"] = [
        (seller, len(last), sum(last) // len(last)) for seller, all_ in of_seller.items() if (last := all_[-10:])
    ]
    return out


def hot_items(bids: list[Any], size: int, period: int) -> Rows:
    """The auctions with most bids in each window, all ties. The size is a multiple of the period."""
    assert size % period == 0
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for (slot, auction), number in Counter((bid.date_time // period, bid.auction) for bid in bids).items():
        # All bids of a period are in the same windows.
        for start in range((slot + 1) * period - size, slot * period + 1, period):
            counts[start][auction] += number
    most = {start: max(all_.values()) for start, all_ in counts.items()}
    return [
        (start, start + size, auction, number)
        for start, all_ in counts.items()
        for auction, number in all_.items()
        if number == most[start]
    ]


def highest_bids(bids: list[Any], size: int) -> Rows:
    """The highest bids of each window, all ties."""
    windows = defaultdict(list)
    for bid in bids:
        windows[bid.date_time // size * size].append(bid)
    highest = {start: max(bid.price for bid in own) for start, own in windows.items()}
    return [
        (start, start + size, bid.price, bid.auction, bid.bidder, bid.date_time)
        for start, own in windows.items()
        for bid in own
        if bid.price == highest[start]
    ]


def write_expected(folder: Path, columns: Mapping[str, str], outputs: Mapping[str, Rows]) -> None:
    (folder / "expected").mkdir()
    for name, rows in outputs.items():
        names = columns[name].split()
        values = zip(*rows, strict=True) if rows else ((),) * len(names)
        table = pa.table([pa.array(list(column)) for column in values], names)
        pq.write_table(table, folder / "expected" / f"{name}.parquet")


# Text

WORDS = re.compile(rb"[A-Za-z]+")


def make_text(folder: Path) -> None:
    """Two books of random words, with what stands between words, and letters that are none of A to Z."""
    rng = random.Random(1399)
    letters = "etaoinshrdlu" * 3 + "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(rng.choices(letters, k=rng.randrange(1, 11))) for _ in range(4_000)]
    between = [" "] * 12 + [", ", ".\n", "\r\n", "--", "\u2019", "'", " 1866 ", "é", "\n\n"]
    counts: Counter[str] = Counter()
    for name in ("first", "second"):
        words = (known[int(len(known) * rng.random() ** 3)] for _ in range(120_000))
        cased = (word if rng.random() < 0.9 else word.capitalize() for word in words)
        # A book ends behind a letter of no word.
        text = "".join(word + rng.choice(between) for word in cased).encode() + b"."
        counts.update(word.decode().lower() for word in WORDS.findall(text))
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(text, 1))
    lines = (f"{word}\t{count}\n" for word, count in sorted(counts.items()))
    (folder / "expected_wordcount.tsv").write_text("".join(lines), newline="")


# TPCx-BB

#: Columns of the outputs.
TPCXBB = {
    "q1_pairs": "item_sk_1 item_sk_2 cnt",
    "q1": "item_sk_1 item_sk_2 cnt",
    "q2_sessions": "seq wcs_user_sk wcs_item_sk session",
    "q2_pairs": "item_sk_1 item_sk_2 cnt",
    "q2": "item_sk_1 item_sk_2 cnt",
    "q3_views": "purchase_seq view_seq lastviewed_item",
    "q3": "purchased_item lastviewed_item cnt",
    "q4_carts": "wcs_user_sk session pages last_seq",
    "q4": "pages sessions avg_pages",
    "q15_all": "cat n sx sy sxy sxx slope intercept",
    "q15": "cat slope intercept",
}


def make_tpcxbb(folder: Path) -> None:
    rng = random.Random(20011)
    clicks, lines = tpcxbb_support.some_clicks(rng, 600), tpcxbb_support.some_lines(rng, 200)
    tpcxbb_support.write(folder, clicks, lines)
    write_expected(folder, TPCXBB, tpcxbb_support.expected(clicks, lines))


# Graphs


class Graph(NamedTuple):
    """Figures of a graph. Cliques are of 3 and 4 vertices, undirected, then in the join of directed edges."""

    nodes: int
    lines: int
    #: Each once, without direction and loops.
    edges: int
    threes: int
    fours: int
    directed_threes: int
    directed_fours: int


#: Published by SNAP, or counted by two methods.
PUBLISHED = {
    "facebook_combined": Graph(4_039, 88_234, 88_234, 1_612_010, 30_004_668, 1_612_010, 30_004_668),
    "wiki-Vote": Graph(7_115, 103_689, 100_762, 608_389, 2_077_903, 746_557, 3_660_704),
    "ca-GrQc": Graph(5_242, 28_980, 14_484, 48_260, 329_297, 289_560, 7_903_128),
}


def make_graphs(folder: Path) -> None:
    """Graphs of the kinds of the published ones: friends, votes for few, and authors of papers."""
    rng = random.Random(285_730)
    circles = [range(first, first + 60) for first in range(0, 600, 60)]
    friends = {pair for circle in circles for pair in itertools.combinations(circle, 2) if rng.random() < 0.7}
    friends |= {(a, b) for a, b in zip(range(599), rng.sample(range(600), 599), strict=True) if a < b}
    write_edges(folder / "facebook_combined.txt.gz", sorted(friends))

    def someone() -> int:
        return int(3_000 * rng.random() ** 3)

    votes = {(someone(), someone()) for _ in range(30_000)}
    write_edges(folder / "wiki-Vote.txt.gz", sorted((a, b) for a, b in votes if a != b))
    papers = [rng.sample(range(1_500), rng.randrange(2, 10)) for _ in range(900)]
    authors = sorted({pair for paper in papers for pair in itertools.permutations(paper, 2)})
    alone = [(a, a) for a, _ in authors[:: len(authors) // 12]]
    write_edges(folder / "ca-GrQc.txt.gz", [*authors, *alone])


def write_edges(path: Path, edges: Iterable[tuple[int, int]]) -> None:
    path.write_bytes(gzip.compress("".join(f"{a}\t{b}\n" for a, b in edges).encode(), 1))


def read_edges(path: Path) -> Iterator[tuple[int, int]]:
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        a, b = line.split()
        yield int(a), int(b)


def figures(path: Path) -> Graph:
    """The figures of a graph by sets of neighbours."""
    lines = list(read_edges(path))
    directed = {(a, b) for a, b in lines if a != b}
    edges = {(min(pair), max(pair)) for pair in directed}
    nodes = {node for pair in lines for node in pair}
    return Graph(len(nodes), len(lines), len(edges), *cliques(edges), *cliques(directed))


def cliques(edges: set[tuple[int, int]]) -> tuple[int, int]:
    """How many (a, b, c) and (a, b, c, d) have an edge from each to all behind it."""
    after: dict[int, set[int]] = defaultdict(set)
    for a, b in edges:
        after[a].add(b)
    threes = fours = 0
    for a, b in edges:
        both = after[a] & after[b]
        threes += len(both)
        fours += sum(len(both & after[c]) for c in both if c in after)
    return threes, fours


#: What makes each data set in an empty folder.
MAKERS: dict[str, Callable[[Path], None]] = {
    "nexmark": make_nexmark,
    "text": make_text,
    "tpcxbb": make_tpcxbb,
    "graphs": make_graphs,
}
