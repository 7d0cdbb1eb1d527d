"""What the benches on Spark share: a session on the benches' cores, and queries that get one batch at a time.

Owns: the session's settings, the files that are input for both sides, and the clock of a batch. Invariant: a batch of
ours and a batch of Spark's own are timed alike: Spark's ``triggerExecution``, from looking for input to the commit.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.cli.common import spark_session
from penstock.errors import EngineError
from penstock_bench import core, machine
from penstock_bench.measure import Tell

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.report._timeline import Epoch

__all__ = [
    "SETTINGS",
    "BatchTimeout",
    "Batches",
    "Sink",
    "Stream",
    "parts",
    "session",
    "spark_versions",
    "told_settings",
    "write_file",
]

#: Residents of most benches; each holds a slot for the engine's life.
WORKERS = 2
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
DEFAULT = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"

#: In which a session is not as Spark is by default, for ours and Spark's own queries alike.
SETTINGS = {
    "spark.driver.memory": "4g",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.pollingDelay": "100ms",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
    "spark.sql.streaming.stopTimeout": "20s",
}

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
_GIVE_UP_S = 600.0
_POLL_S = 0.02


class BatchTimeout(Exception):
    """A batch was not done in time."""


@contextlib.contextmanager
def session(name: str, tell: Tell, *, residents: int = 0) -> Iterator[tuple[SparkSession, Path]]:
    """Start Spark on the CPUs of this thread: a slot for each core, and for so many residents, which sleep mostly."""
    cores = machine.cores()
    # Of functions that travel by name.
    settings = SETTINGS | {"spark.executorEnv.PYTHONPATH": str(core.CHECKOUT / "benches" / "python")}
    tell("starting Spark")
    with spark_session(f"penstock bench {name}", cores + residents, cores, settings) as (spark, folder):
        yield spark, folder


def told_settings(cores: int) -> dict[str, str]:
    """The settings of a session on so many cores that are not Spark's defaults, for the conditions.

    Examples
    --------
    >>> told_settings(2)["spark.sql.shuffle.partitions"]
    '2'
    """
    return {"spark.sql.shuffle.partitions": str(cores)} | SETTINGS


def spark_versions(spark: SparkSession) -> dict[str, str]:
    """Spark's and Java's, for the conditions."""
    import importlib.metadata

    jvm: Any = spark.sparkContext._jvm
    return {
        "spark": spark.version,
        "java": str(jvm.java.lang.System.getProperty("java.version")),
        "pandas": importlib.metadata.version("pandas"),
    }


def parts(durations_ms: Mapping[str, float], epoch: Epoch | None = None) -> dict[str, float]:
    """What a batch took, in seconds: its parts in order, whose sum is Spark's ``triggerExecution``.

    Parameters
    ----------
    durations_ms : mapping
        ``durationMs`` of Spark's progress report.
    epoch : Epoch, optional
        The same batch as our engine saw it. Without it everything in the sink is ``run``.

    Returns
    -------
    dict
        ``trigger`` (finding input, planning, calling us), ``feed`` (rows to the workers), ``run`` (keyed state),
        ``serve`` (results in the sink), ``files`` (state made durable, as far as the sink did not hide that) and
        ``commit`` (Spark's logs).

    Examples
    --------
    >>> parts({"triggerExecution": 500, "walCommit": 50, "commitOffsets": 50, "addBatch": 300})
    {'trigger': 0.1, 'run': 0.3, 'commit': 0.1}
    """
    commit = (durations_ms.get("walCommit", 0) + durations_ms.get("commitOffsets", 0)) / 1e3
    if epoch is None:
        own = {"run": durations_ms["addBatch"] / 1e3}
    else:
        own = {"feed": epoch.feed_s, "run": epoch.run_s, "serve": epoch.serve_s, "files": epoch.files_s}
    trigger = durations_ms["triggerExecution"] / 1e3 - commit - sum(own.values())
    return {"trigger": round(max(0.0, trigger), 6), **own, "commit": commit}


def write_file(path: Path, table: pa.Table) -> Path:
    """Write input so that every core has a part of it to read."""
    import pyarrow.parquet as pq

    pq.write_table(table, path, row_group_size=max(1, table.num_rows // 8), compression="none")
    return path


class Batches:
    """Files of uniform keys, and how often each key has come.

    Parameters
    ----------
    folder : Path
        Where the files go; made here.
    keys : int
        How many there are.
    """

    def __init__(self, folder: Path, keys: int) -> None:
        import numpy as np

        folder.mkdir()
        self._folder = folder
        self._numbers = np.random.default_rng(7)
        self._keys = keys
        self._made = 0
        self.counts = np.zeros(keys, dtype=np.int64)
        self.last: Any = None

    def every_key(self) -> Path:
        """Each key once."""
        import numpy as np

        return self._write(np.arange(self._keys, dtype=np.int64))

    def next(self, rows: int | None = None) -> Path:
        """So many random keys; by default as many as there are keys."""
        return self._write(self._numbers.integers(0, self._keys, rows or self._keys))

    def among(self, dirty: int, rows: int | None = None) -> Path:
        """Rows of so many random keys: each of them once, and more of the same where there are more `rows`."""
        import numpy as np

        chosen = self._numbers.choice(self._keys, dirty, replace=False)
        more = self._numbers.choice(chosen, max(0, (rows or dirty) - dirty))
        return self._write(np.concatenate([chosen, more]).astype(np.int64))

    def again(self) -> None:
        """The last file is given once more."""
        import numpy as np

        self.counts += np.bincount(self.last, minlength=self._keys)

    def check(self, found: pa.Table | None, what: str) -> None:
        """Rows (k, n) are the counts of the keys of the last file.

        Raises
        ------
        EngineError
            When they are not.
        """
        import numpy as np

        changed = np.unique(self.last)
        assert found is not None
        found = found.sort_by("k")
        same = np.array_equal(found["k"].to_numpy(), changed)
        if not same or not np.array_equal(found["n"].to_numpy(), self.counts[changed]):
            raise EngineError(f"{what} are wrong; the figures are void")

    def _write(self, keys: Any) -> Path:
        import numpy as np

        self.counts += np.bincount(keys, minlength=self._keys)
        self.last = keys
        self._made += 1
        return write_file(self._folder / f"{self._made}.parquet", pa.table({"k": pa.array(keys)}))


class Sink:
    """Evaluates each batch once and throws it away; keeps it where that is asked for."""

    def __init__(self) -> None:
        self.keep = False
        self.kept: pa.Table | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        if self.keep:
            from penstock.spark._session.collect import to_table

            self.kept = to_table(frame)
        else:
            frame.write.format("noop").mode("overwrite").save()


class Stream:
    """A streaming query over a folder that is given one file, and so one batch, at a time.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Where it runs.
    folder : Path
        For its input and its checkpoint; made here.
    schema : str
        Of the files, Spark DDL.
    sink : callable
        ``sink(df, batch_id)``, for ``foreachBatch``.
    shape : callable, optional
        From the streaming input to what the sink gets.
    mode : str, default "append"
        Output mode.
    store : str, default DEFAULT
        Class of the state store.
    changelog : bool, default False
        Whether RocksDB writes what a batch has changed instead of its files; Spark's default is not to.
    """

    def __init__(
        self,
        spark: SparkSession,
        folder: Path,
        schema: str,
        sink: Callable[[DataFrame, int], Any],
        shape: Callable[[DataFrame], DataFrame] | None = None,
        mode: str = "append",
        store: str = DEFAULT,
        changelog: bool = False,
    ) -> None:
        self._input = folder / "input"
        self._input.mkdir(parents=True)
        self._given = 0
        self.checkpoint = folder / "checkpoint"
        #: Spark's progress report of the batch that was waited for last.
        self.progress: Mapping[str, Any] = {}

        def start(sink: Callable[[DataFrame, int], Any]) -> Any:
            spark.conf.set(_PROVIDER, store)
            spark.conf.set(_CHANGELOG, str(changelog).lower())
            read = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(self._input))
            shaped = read if shape is None else shape(read)
            writer = shaped.writeStream.queryName(folder.name).outputMode(mode)
            writer = writer.option("checkpointLocation", str(self.checkpoint)).foreachBatch(sink)
            return writer.trigger(processingTime="0 seconds").start()

        self._start = start
        self._sink = sink
        self.query: Any = start(sink)

    def give(self, file: Path, limit: float = _GIVE_UP_S) -> float:
        """Hand over one file and return the seconds that its batch took.

        Raises
        ------
        BatchTimeout
            When it is not done after `limit` seconds; the query goes on with it.
        EngineError
            When the query failed.
        """
        self.offer(file)
        return self.done(limit)

    @property
    def given(self) -> int:
        """The number of the next batch."""
        return self._given

    def waiting(self) -> int:
        """Batches that are not done."""
        last = self.query.lastProgress
        return self._given - 1 - (-1 if last is None else int(last["batchId"]))

    def offer(self, file: Path) -> None:
        """Hand over one file and do not wait for its batch."""
        batch = self._given
        self._given += 1
        hidden = self._input / f".{batch}"
        os.link(file, hidden)
        hidden.rename(self._input / f"part-{batch:05d}.parquet")

    def done(self, limit: float = _GIVE_UP_S, behind: int = 0) -> float:
        """Wait for the batch of the last file, or of that with so many files behind it; see `give`."""
        batch = self._given - 1 - behind
        deadline = time.monotonic() + limit
        while True:
            last = self.query.lastProgress
            if last is not None and (not last["numInputRows"] or last["batchId"] > batch):
                # Of a query that had nothing to do since, it says so from time to time; or of one that has gone on.
                done = (one for one in self.query.recentProgress if one["numInputRows"] and one["batchId"] <= batch)
                last = max(done, key=lambda one: int(one["batchId"]), default=None)
            if last is not None and last["batchId"] == batch:
                self.progress = last
                return float(last["durationMs"]["triggerExecution"]) / 1e3
            if not self.query.isActive:
                raise EngineError(f"the query {self.query.name} ended: {self.query.exception()}")
            if time.monotonic() > deadline:
                raise BatchTimeout(f"{self.query.name}: batch {batch} is not done after {limit:g} s")
            time.sleep(_POLL_S)

    def restart(self, sink: Callable[[DataFrame, int], Any] | None = None) -> None:
        """Start the query again from its checkpoint, with another sink where one is given."""
        self._sink = sink or self._sink
        self.query = self._start(self._sink)

    def skip(self, batches: int) -> None:
        """So many batches have been made of no file."""
        self._given += batches

    def stop(self) -> None:
        """End the query; a batch under way is cancelled."""
        with contextlib.suppress(Exception):
            self.query.stop()
