"""What the tests of the engine share."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from penstock._schema import spark_types, to_ddl
from penstock.spark._engine.record import Recorder
from penstock.spark._session.collect import to_table

# Users get the figures that there are after two seconds. A test that compares them waits for those of all members.
Recorder.refresh.__defaults__ = Recorder.loads.__defaults__ = (60.0,)

#: Counts and sums per key, given out at the end of each epoch for the keys that changed.
COUNTS = pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.count(), total=pk.sum("v"))


def in_three_ways() -> pk.Flow:
    """COUNTS by an aggregate and by functions of Python and of pandas, with the state of each; rows say by which."""

    def number(state: tuple[int, int] | None, k: int, v: int) -> Any:
        n, total = state or (0, 0)
        return (n + 1, total + v), ("python", k, n + 1, total + v)

    def add(key: tuple[int], frames: Any, state: Any) -> Any:
        import pandas as pd

        n, total = state.getOption or (0, 0)
        for frame in frames:
            n, total = n + len(frame), total + int(frame["v"].sum())
        state.update((n, total))
        yield pd.DataFrame({"by": ["pandas"], "k": [key[0]], "n": [n], "total": [total]})

    def native(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.add_column(0, "by", pa.array(["native"] * batch.num_rows))

    made = "by string, k bigint, n bigint, total bigint"
    keyed = pk.Flow("k bigint, v bigint").key_by("k")
    counts = keyed.agg(n=pk.count(), total=pk.sum("v"), emit="update").map_batches(native, made)
    functions = keyed.apply_in_pandas_with_state(add, made, "n bigint, total bigint")
    return counts.union(keyed.stateful_map(number, schema=made), functions)


def by_each(table: pa.Table) -> dict[str, dict[int, tuple[int, int]]]:
    """What each of the `in_three_ways` has counted at the end of a batch."""
    found: dict[str, dict[int, tuple[int, int]]] = {"native": {}, "python": {}, "pandas": {}}
    for row in table.to_pylist():
        counts = found[row["by"]]
        counts[row["k"]] = max(counts.get(row["k"], (0, 0)), (row["n"], row["total"]))
    return found


class NoThreads:
    """As long as it says `none`, the system gives no thread whose name begins like this."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
        self.none, self.asked = True, list[str]()
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if self.none and thread.name.startswith(prefix):
                self.asked.append(thread.name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)


class Kept:
    """A sink that keeps what it gets, by batch."""

    def __init__(self) -> None:
        self.batches: dict[int, pa.Table] = {}

    def __call__(self, df: Any, batch_id: int) -> None:
        self.batches[batch_id] = to_table(df)

    def last(self, key: str = "k") -> dict[Any, dict[str, Any]]:
        """The newest row of each key."""
        return {row[key]: row for _, table in sorted(self.batches.items()) for row in table.to_pylist()}


def bag(*tables: pa.Table) -> Counter[tuple[Any, ...]]:
    """Rows with how often they are there."""
    found: Counter[tuple[Any, ...]] = Counter()
    for table in tables:
        found.update(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return found


def frame(spark: Any, table: pa.Table, pieces: int = 3) -> Any:
    """A DataFrame of a table: a partition for each run of rows, in their order. Spark 3.5 takes no table itself."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for stream in batch.column(0).to_pylist():
                yield from pa.ipc.open_stream(stream)

    table = table.cast(spark_types(table.schema))
    streams = []
    for piece in table.combine_chunks().to_batches(max_chunksize=max(1, -(-table.num_rows // pieces))):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_batch(piece)
        streams.append((sink.getvalue().to_pybytes(),))
    held = spark.createDataFrame(spark.sparkContext.parallelize(streams, pieces), "stream binary")
    return held.mapInArrow(rows, to_ddl(table.schema))


def numbers(spark: Any, batch: int, rows: int = 600, keys: int = 7, partitions: int = 3) -> Any:
    """One batch of (k, v), all different in v."""
    first = batch * rows
    return spark.range(first, first + rows, 1, partitions).selectExpr(f"id % {keys} AS k", "id AS v")


def counted(batches: int, rows: int = 600, keys: int = 7) -> dict[int, tuple[int, int]]:
    """What COUNTS must say after so many batches of `numbers`."""
    values = range(batches * rows)
    return {k: (len(own), sum(own)) for k in range(keys) if (own := [value for value in values if value % keys == k])}


def state(kept: Kept) -> dict[int, tuple[int, int]]:
    return {k: (row["n"], row["total"]) for k, row in kept.last().items()}


def sized(strategy: str, bins: int) -> dict[str, Any]:
    """A strategy as options of `migrate`, with so many bins a step where it takes them."""
    return {"strategy": strategy, **({"batch_size": bins} if strategy in ("batched", "matched") else {})}


def wait_for(condition: Callable[[], Any], timeout: float = 60.0, what: str = "the condition") -> Any:
    """Poll until a condition holds; fails the test when it does not in time."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout:g} s"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def in_thread(work: Callable[[], Any]) -> Iterator[Callable[[float], Any]]:
    """Run something beside the test; call what is given to get its result or exception."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="beside the test", daemon=True)
    thread.start()

    def result(timeout: float = 60.0) -> Any:
        thread.join(timeout)
        assert not thread.is_alive(), f"it still runs after {timeout:g} s"
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    yield result
    thread.join(60)
    assert not thread.is_alive()


def waits_in(thread: int, *functions: str) -> bool:
    """Whether a thread is in a function of one of these names, and sleeps: the kernel says so."""
    frame = sys._current_frames().get(thread)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    native = next(one.native_id for one in threading.enumerate() if one.ident == thread)
    state = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "S" and not names.isdisjoint(functions)


class Gate:
    """A file that functions in other processes look at: closed while it exists."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.path = folder / name
        self.reached = folder / f"{name}.reached"

    def close(self) -> None:
        self.path.touch()

    def open(self) -> None:
        self.path.unlink(missing_ok=True)

    def function(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """A function of batches that waits while the gate is closed."""
        path, reached = str(self.path), str(self.reached)

        def waits(batch: pa.RecordBatch) -> pa.RecordBatch:
            while os.path.exists(path):
                open(reached, "w").close()
                time.sleep(0.02)
            return batch

        return waits

    def loading(self) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """A function of batches that a process cannot load while the gate is closed."""
        path, reached = str(self.path), str(self.reached)

        def load() -> Callable[[pa.RecordBatch], pa.RecordBatch]:
            while os.path.exists(path):
                open(reached, "w").close()
                time.sleep(0.02)
            return lambda batch: batch

        class Heavy:
            def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
                return batch

            def __reduce__(self) -> Any:
                return load, ()

        return Heavy()


class Portions:
    """A function of blocks that takes so many in each process as the test allows, and waits for the next ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.allowed = folder / "portions", 0

    def begin(self) -> None:
        self.folder.mkdir()
        self.allow(0)

    def allow(self, more: int) -> None:
        """Let pass so many more in each."""
        self.allowed += more
        (self.folder / f"allow-{self.allowed:05d}").touch()

    def taken(self) -> bool:
        """Whether somebody has taken what is allowed, and waits."""
        return any(self.folder.glob(f"waits-{self.allowed:05d}-*"))

    def end(self) -> None:
        """Let all pass."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "end").touch()

    def function(self) -> Any:
        folder, count = str(self.folder), [0]

        def takes(batch: pa.RecordBatch) -> pa.RecordBatch:
            if not os.path.exists(folder):
                return batch
            count[0] += 1
            while not os.path.exists(f"{folder}/end"):
                allowed = max(name for name in os.listdir(folder) if name.startswith("allow-")).partition("-")[2]
                if count[0] <= int(allowed):
                    break
                open(f"{folder}/waits-{allowed}-{os.getpid()}", "w").close()
                time.sleep(0.02)
            return batch

        return takes


def refuses(address: str) -> bool:
    """Whether nobody listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 2).close()
    except OSError:
        return True
    return False


def penstock_threads(pid: int) -> list[str]:
    """Names of the native threads of a process that are ours."""
    names = []
    for task in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.append(task.read_text().strip())
    return [name for name in names if name.startswith("penstock")]


def write(spark: Any, folder: Path, number: int, df: Any) -> None:
    """Add one file to a stream's folder, so that files come in order of their numbers."""
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    hidden = folder / f".part-{number:05d}"
    pq.write_table(to_table(df), hidden)
    os.utime(hidden, (1_600_000_000 + number, 1_600_000_000 + number))
    hidden.rename(folder / f"part-{number:05d}.parquet")


def stream(spark: Any, folder: Path, schema: str, function: Any, checkpoint: Path, name: str | None = None) -> Any:
    """Start a query over a folder that takes one file a batch and ends when all were taken."""
    read = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))
    writer = read.writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(function)
    if name is not None:
        writer = writer.queryName(name)
    return writer.trigger(availableNow=True).start()
