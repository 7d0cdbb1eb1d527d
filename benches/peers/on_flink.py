"""NEXMark on PyFlink, in SQL, in a process of its own, for `penstock bench nexmark`; see ``apart.py`` for its talk.

Streaming mode, over CSV files without a header, in the order of event time, one for each table. A run's seconds are
Flink's own, the net run time of the job: the start of Python, of the JVM and of a cluster for the job are left out, and
the planning of the query. Results go to Flink's black hole, but for those of the first run, which come as a frame and
tell the answer for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from apart import COLUMNS, TEXTS, Answer, answer, serve

_EPOCH = datetime(1970, 1, 1)
_WINDOW = "TABLE({kind}(TABLE {table}, DESCRIPTOR(ts), {lengths}))"


def _tumble(table: str, told: dict[str, int]) -> str:
    return _WINDOW.format(kind="TUMBLE", table=table, lengths=_interval(told["size_ms"]))


def _interval(ms: int) -> str:
    return f"INTERVAL '{ms // 1000}.{ms % 1000:03}' SECOND(9, 3)"


def q1(_: dict[str, int]) -> str:
    return "SELECT auction, bidder, price * 89 / 100 AS price, date_time FROM bid"


def q2(_: dict[str, int]) -> str:
    return "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0"


def q3(_: dict[str, int]) -> str:
    return """
        SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON a.seller = p.id
        WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')"""


def q4(_: dict[str, int]) -> str:
    return """
        SELECT category, SUM(price) AS sum_price, COUNT(*) AS n, SUM(price) / COUNT(*) AS avg_price FROM (
          SELECT a.id, a.category, MAX(b.price) AS price FROM auction a JOIN bid b ON a.id = b.auction
          WHERE b.price >= a.reserve AND b.date_time >= a.date_time AND b.date_time < a.expires
          GROUP BY a.id, a.category)
        GROUP BY category"""


def q5(told: dict[str, int]) -> str:
    lengths = f"{_interval(told['period_ms'])}, {_interval(told['size_ms'])}"
    counts = f"""
        SELECT window_start, window_end, auction, COUNT(*) AS num
        FROM {_WINDOW.format(kind="HOP", table="bid", lengths=lengths)} GROUP BY window_start, window_end, auction"""
    return f"""
        SELECT c.window_start, c.window_end, c.auction, c.num FROM ({counts}) c JOIN (
          SELECT window_start, window_end, MAX(num) AS num FROM ({counts}) GROUP BY window_start, window_end) m
        ON c.window_start = m.window_start AND c.window_end = m.window_end AND c.num = m.num"""


def q7(told: dict[str, int]) -> str:
    bids = _tumble("bid", told)
    return f"""
        SELECT b.window_start, b.window_end, b.price, b.auction, b.bidder, b.date_time
        FROM (SELECT * FROM {bids}) b JOIN (
          SELECT window_start, window_end, MAX(price) AS price FROM {bids} GROUP BY window_start, window_end) m
        ON b.window_start = m.window_start AND b.window_end = m.window_end AND b.price = m.price"""


def q8(told: dict[str, int]) -> str:
    return f"""
        SELECT p.window_start, p.window_end, p.id, p.name, a.id AS auction, a.reserve
        FROM (SELECT * FROM {_tumble("person", told)}) p JOIN (SELECT * FROM {_tumble("auction", told)}) a
        ON p.window_start = a.window_start AND p.window_end = a.window_end AND p.id = a.seller"""


QUERIES = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5, "q7": q7, "q8": q8}


def prepare(told: dict[str, Any]) -> Callable[[], tuple[float, Answer]]:
    from pyflink.table import EnvironmentSettings, TableDescriptor, TableEnvironment

    flink = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    for name, value in {"parallelism.default": str(told["workers"]), "table.local-time-zone": "UTC"}.items():
        flink.get_config().set(name, value)
    for table, names in COLUMNS.items():
        columns = ", ".join(f"`{name}` {'STRING' if name in TEXTS else 'BIGINT'}" for name in names)
        flink.execute_sql(
            f"CREATE TABLE {table} ({columns}, ts AS TO_TIMESTAMP_LTZ(date_time, 3), WATERMARK FOR ts AS ts) WITH ("
            f"'connector' = 'filesystem', 'path' = '{(Path(told['folder']) / table).as_uri()}.csv', 'format' = 'csv')"
        )
    sql = QUERIES[told["query"].split("_")[0]](told)
    answers: list[Answer] = []

    def once() -> tuple[float, Answer]:
        query = flink.sql_query(sql)
        if not answers:
            # Rows that were taken back are not in the frame.
            begin, frame = time.perf_counter(), query.to_pandas()
            answers.append(answer(tuple(map(_cell, row)) for row in frame.itertuples(index=False, name=None)))
            return time.perf_counter() - begin, answers[0]
        result = query.execute_insert(TableDescriptor.for_connector("blackhole").build())
        result.wait()
        runtime = result.get_job_client().get_job_execution_result().result().get_net_runtime()
        return runtime / 1e3, answers[0]

    return once


def _cell(value: Any) -> Any:
    return round((value - _EPOCH).total_seconds() * 1e3) if isinstance(value, datetime) else value


if __name__ == "__main__":
    serve(prepare)
