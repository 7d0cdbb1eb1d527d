"""The demo's input: bids in Parquet files, one whole file at a time, at a steady rate."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["FILES_PER_SECOND", "SCHEMA", "Feeder"]

SCHEMA = "auction bigint, date_time bigint"
"""Columns of the files; date_time is milliseconds since 1970."""

FILES_PER_SECOND = 4
_EVENTS_PER_BID = 50 / 46


@dataclass(slots=True)
class Feeder:
    """Writes bids into a folder at a steady rate, one whole file at a time, until told to stop."""

    folder: Path
    rate: int
    rows: int = 0
    error: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="penstock-demo-feeder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._feed()
        except BaseException as error:  # handed to the job, which ends the run with it
            self.error = error

    def _feed(self) -> None:
        from penstock import _native

        per_file = round(self.rate * _EVENTS_PER_BID / FILES_PER_SECOND)
        source = _native.Nexmark(per_file * FILES_PER_SECOND, int(time.time() * 1000))
        started = time.monotonic()
        for index in itertools.count():
            if self._stop.wait(max(0.0, started + index / FILES_PER_SECOND - time.monotonic())):
                return
            bids = pa.record_batch(source.next_batches(per_file, ["bid"])["bid"])
            table = pa.Table.from_batches([bids]).select(["auction", "date_time"])
            # Spark's file source ignores names that begin with a dot, so it sees whole files only.
            hidden = self.folder / f".bids-{index:05}.parquet"
            pq.write_table(table, hidden)
            hidden.rename(self.folder / f"bids-{index:05}.parquet")
            self.rows += table.num_rows
