"""The demo's input: bids in Parquet files, one whole file at a time, at a steady rate.

First one bid of every bidder, as fast as they can be written, so that the keyed state has its size before anything is
measured; then, when told to go on, bids of random bidders at the rate.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

__all__ = ["FILES_PER_SECOND", "SCHEMA", "Feeder"]

SCHEMA = "auction bigint, bidder bigint, price bigint, date_time bigint"
"""Columns of the files; date_time is milliseconds since 1970."""

FILES_PER_SECOND = 4
_LOAD_FILES = 4
_EVENTS_PER_BID = 50 / 46


@dataclass(slots=True)
class Feeder:
    """Writes bids into a folder at a steady rate, one whole file at a time, until told to stop.

    ``loaded`` counts the bids of the first files, one of every bidder, ``rows`` those behind them.
    """

    folder: Path
    rate: int
    bidders: int
    rows: int = 0
    loaded: int = 0
    error: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _going_on: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="penstock-demo-feeder", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Write bids at the rate, from now on or when those of every bidder are written."""
        self._going_on.set()

    def stop(self) -> None:
        self._stop.set()
        self._going_on.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._load()
            self._going_on.wait()
            self._feed()
        except BaseException as error:  # handed to the job, which ends the run with it
            self.error = error

    def _load(self) -> None:
        # At a generator's rate of as many bids a second, all of them bid within about a second, which has passed: it is
        # somewhat more, since of the events that each file takes some are left over.
        source = self._source(self.bidders, time.time() - 1.1)
        for index in range(_LOAD_FILES):
            first, end = (self.bidders * part // _LOAD_FILES for part in (index, index + 1))
            if self._stop.is_set() or first == end:
                return
            table = _bids(source, end - first, pa.array(range(first, end), pa.int64()))
            self._write(f"bids-0-{index:05}.parquet", table)
            self.loaded += table.num_rows

    def _feed(self) -> None:
        per_file = max(1, self.rate // FILES_PER_SECOND)
        source = self._source(per_file * FILES_PER_SECOND, time.time())
        started = time.monotonic()
        for index in itertools.count():
            if self._stop.wait(max(0.0, started + index / FILES_PER_SECOND - time.monotonic())):
                return
            drawn = pc.floor(pc.multiply(pc.random(per_file, initializer=index), self.bidders))
            table = _bids(source, per_file, drawn.cast(pa.int64()))
            self._write(f"bids-1-{index:05}.parquet", table)
            self.rows += table.num_rows

    def _source(self, bids_per_second: int, at: float) -> Any:
        from penstock import _native

        return _native.Nexmark(max(1, round(bids_per_second * _EVENTS_PER_BID)), int(at * 1000))

    def _write(self, name: str, table: pa.Table) -> None:
        # Spark's file source ignores names that begin with a dot, so it sees whole files only.
        hidden = self.folder / f".{name}"
        pq.write_table(table, hidden)
        hidden.rename(self.folder / name)


def _bids(source: Any, count: int, bidders: pa.Array) -> pa.Table:
    """The next bids of a generator, made by these bidders instead of its few."""
    pieces: list[pa.RecordBatch] = []
    left = count
    while left > 0:
        # Of 50 events 46 are bids.
        piece = pa.record_batch(source.next_batches(max(50, round(left * _EVENTS_PER_BID)), ["bid"])["bid"])
        pieces.append(piece.slice(0, left))
        left -= pieces[-1].num_rows
    bids = pa.Table.from_batches(pieces)
    names = [column.split()[0] for column in SCHEMA.split(", ")]
    return pa.table({name: bidders if name == "bidder" else bids[name] for name in names})
