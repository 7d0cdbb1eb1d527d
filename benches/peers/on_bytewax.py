"""NEXMark and a running mean on bytewax, in a process of its own, for `penstock bench nexmark` and `python-state`.

Told, as ``apart.py`` has it, a query, a folder of Arrow files with the rows, and the lengths of windows. Rows are
tuples that are made before the clock starts; one worker, as Python's lock allows no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import bytewax.operators as op
import bytewax.operators.windowing as win
import pyarrow as pa
from apart import COLUMNS, Answer, answer, serve
from bytewax.dataflow import Dataflow
from bytewax.testing import TestingSink, TestingSource, run_main

BATCH = 1_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
#: Of NEXMark, and of `python-state`.
_COLUMNS = COLUMNS | {"rows": ["k", "v"]}


def _read(folder: Path, table: str) -> list[tuple[Any, ...]]:
    with pa.memory_map(str(folder / f"{table}.arrow")) as file:
        rows = pa.ipc.open_file(file).read_all().select(_COLUMNS[table])
    return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def _instant(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)


def _in_order(flow: Dataflow, *tables: list[tuple[Any, ...]], time_at: tuple[int, ...]) -> Any:
    """Tables as one stream in the order of time: pairs of the number of a table and its row."""
    rows = [
        (row[at], number, row) for number, (table, at) in enumerate(zip(tables, time_at, strict=True)) for row in table
    ]
    rows.sort(key=lambda row: row[0])
    return op.input("events", flow, TestingSource([row[1:] for row in rows], BATCH))


def q1(flow: Dataflow, tables: Callable[[str], list[Any]], _: dict[str, int]) -> Any:
    bids = op.input("bids", flow, TestingSource(tables("bid"), BATCH))
    return op.map("price", bids, lambda bid: (bid[0], bid[1], bid[2] * 89 // 100, bid[3]))


def q2(flow: Dataflow, tables: Callable[[str], list[Any]], _: dict[str, int]) -> Any:
    bids = op.input("bids", flow, TestingSource(tables("bid"), BATCH))
    some = op.filter("123", bids, lambda bid: bid[0] % 123 == 0)
    return op.map("two", some, lambda bid: (bid[0], bid[2]))


def q3(flow: Dataflow, tables: Callable[[str], list[Any]], _: dict[str, int]) -> Any:
    events = _in_order(flow, tables("person"), tables("auction"), time_at=(4, 4))
    wanted = op.filter("wanted", events, lambda e: e[1][2] == 10 if e[0] else e[1][3] in ("OR", "ID", "CA"))
    keyed = op.key_on("seller", wanted, lambda e: str(e[1][1 if e[0] else 0]))

    def join(state: Any, event: Any) -> Any:
        person, sold = state or (None, [])
        number, row = event
        if number == 0:
            return (row, sold), [(row[1], row[2], row[3], auction) for auction in sold]
        sold.append(row[0])
        return (person, sold), [] if person is None else [(person[1], person[2], person[3], row[0])]

    return op.key_rm("rows", op.stateful_flat_map("join", keyed, join))


def q4(flow: Dataflow, tables: Callable[[str], list[Any]], _: dict[str, int]) -> Any:
    events = _in_order(flow, tables("auction"), tables("bid"), time_at=(4, 3))
    keyed = op.key_on("auction", events, lambda e: str(e[1][0]))

    def valid(auction: Any, bid: Any) -> bool:
        return bool(bid[2] >= auction[3] and auction[4] <= bid[3] < auction[5])

    def join(state: Any, event: Any) -> Any:
        auction, early = state or (None, [])
        number, row = event
        if number == 0:
            return (row, []), [(row[2], bid[2]) for bid in early if valid(row, bid)]
        if auction is None:
            early.append(row)
            return (auction, early), []
        return (auction, early), [(auction[2], row[2])] if valid(auction, row) else []

    best = op.reduce_final("best", op.stateful_flat_map("join", keyed, join), lambda a, b: a if a[1] >= b[1] else b)
    by_category = op.map("category", best, lambda pair: (str(pair[1][0]), pair[1][1]))
    sums = op.fold_final("sum", by_category, lambda: (0, 0), lambda s, price: (s[0] + price, s[1] + 1))
    return op.map("mean", sums, lambda pair: (int(pair[0]), pair[1][0], pair[1][1], pair[1][0] // pair[1][1]))


def _clock(at: int) -> win.EventClock[Any, Any]:
    # Time as the events tell it; that of the system does not count.
    now = datetime.now(timezone.utc)
    return win.EventClock(lambda row: _instant(row[at]), timedelta(0), now_getter=lambda: now)


def q5(flow: Dataflow, tables: Callable[[str], list[Any]], told: dict[str, int]) -> Any:
    size, every = (timedelta(milliseconds=told[name]) for name in ("size_ms", "period_ms"))
    bids = op.input("bids", flow, TestingSource(tables("bid"), BATCH))
    windower = win.SlidingWindower(size, every, _EPOCH)
    counts = win.count_window("counts", bids, _clock(3), windower, lambda bid: str(bid[0])).down
    by_window = op.map("window", counts, lambda out: (str(out[1][0]), (int(out[0]), out[1][1])))
    most = op.fold_final("most", by_window, list, _most)
    period, length = told["period_ms"], told["size_ms"]

    def rows(out: Any) -> list[tuple[int, ...]]:
        start = int(out[0]) * period
        return [(start, start + length, auction, n) for auction, n in out[1]]

    return op.flat_map("rows", most, rows)


def _most(best: list[Any], row: Any) -> list[Any]:
    if not best or row[1] > best[0][1]:
        return [row]
    return [*best, row] if row[1] == best[0][1] else best


def q7(flow: Dataflow, tables: Callable[[str], list[Any]], told: dict[str, int]) -> Any:
    length = told["size_ms"]
    bids = op.input("bids", flow, TestingSource(tables("bid"), BATCH))
    keyed = op.key_on("all", bids, lambda bid: "")

    def best(found: list[Any], bid: Any) -> list[Any]:
        if not found or bid[2] > found[0][2]:
            return [bid]
        return [*found, bid] if bid[2] == found[0][2] else found

    windower = win.TumblingWindower(timedelta(milliseconds=length), _EPOCH)
    down = win.fold_window("best", keyed, _clock(3), windower, list, best, lambda a, b: a + b).down

    def rows(out: Any) -> list[tuple[int, ...]]:
        start = out[1][0] * length
        return [(start, start + length, bid[2], bid[0], bid[1], bid[3]) for bid in out[1][1]]

    return op.flat_map("rows", down, rows)


def q8(flow: Dataflow, tables: Callable[[str], list[Any]], told: dict[str, int]) -> Any:
    length = told["size_ms"]
    events = _in_order(flow, tables("person"), tables("auction"), time_at=(4, 4))
    keyed = op.key_on("seller", events, lambda e: str(e[1][1 if e[0] else 0]))
    now = datetime.now(timezone.utc)
    clock = win.EventClock(lambda e: _instant(e[1][4]), timedelta(0), now_getter=lambda: now)
    windower = win.TumblingWindower(timedelta(milliseconds=length), _EPOCH)
    down = win.collect_window("both", keyed, clock, windower).down

    def rows(out: Any) -> list[tuple[Any, ...]]:
        start = out[1][0] * length
        people = [row for number, row in out[1][1] if number == 0]
        sold = [row for number, row in out[1][1] if number == 1]
        return [(start, start + length, p[0], p[1], a[0], a[3]) for p in people for a in sold]

    return op.flat_map("rows", down, rows)


def mean(flow: Dataflow, tables: Callable[[str], list[Any]], _: dict[str, int]) -> Any:
    """`running_mean` of ``penstock_bench/python_dict.py`` in the shape that bytewax calls."""
    rows = op.input("rows", flow, TestingSource(tables("rows"), BATCH))
    keyed = op.key_on("k", rows, lambda row: str(row[0]))

    def running(state: Any, row: tuple[int, int]) -> Any:
        n, total = state if state is not None else (0, 0)
        n += 1
        total += row[1]
        return (n, total), (row[0], n, total / n)

    return op.key_rm("means", op.stateful_map("mean", keyed, running))


QUERIES = {"mean": mean, "q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5, "q7": q7, "q8": q8}


def prepare(told: dict[str, Any]) -> Callable[[], tuple[float, Answer]]:
    folder, query = Path(told["folder"]), QUERIES[told["query"].split("_")[0]]
    read: dict[str, list[Any]] = {}

    def tables(table: str) -> list[Any]:
        if table not in read:
            read[table] = _read(folder, table)
        return read[table]

    query(Dataflow("warm"), tables, told)

    def once() -> tuple[float, Answer]:
        flow, out = Dataflow("nexmark"), []
        op.output("out", query(flow, tables, told), TestingSink(out))
        begin = time.perf_counter()
        run_main(flow)
        return time.perf_counter() - begin, answer(out)

    return once


if __name__ == "__main__":
    serve(prepare)
