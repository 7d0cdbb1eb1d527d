"""What the tests of durable state share: one query run by one engine after the other, and ways to break it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from engine_support import COUNTS, Kept, numbers, stream, wait_for, write

SCHEMA = "k bigint, v bigint"


class Runs:
    """One Spark query over a folder of files, a file a batch, run by one engine after the other."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.inputs = folder / "in"
        self.kept = Kept()
        self.batches = 0
        self.function: Any = None

    def copy(self, folder: Path) -> Runs:
        """The same Spark query, over the same files, with a checkpoint of its own."""
        shutil.copytree(self.check, folder / "check")
        copy = Runs(self.cluster, folder)
        copy.inputs, copy.batches = self.inputs, self.batches
        return copy

    @property
    def check(self) -> Path:
        """Spark's checkpoint of the query."""
        return self.folder / "check"

    @property
    def files(self) -> Path:
        """Ours in it."""
        return self.check / "_penstock"

    def add(self, batches: int = 1) -> None:
        for _ in range(batches):
            write(self.cluster, self.inputs, self.batches, numbers(self.cluster, self.batches))
            self.batches += 1

    def start(self, engine: pk.Engine, flow: pk.Flow = COUNTS, sink: Any = None, **options: Any) -> Any:
        """Take what is there, a file a batch, then end."""
        self.function = engine.foreach_batch(flow, sink or self.kept, **options)
        return stream(self.cluster, self.inputs, SCHEMA, self.function, self.check)

    def run(self, engine: pk.Engine, flow: pk.Flow = COUNTS, sink: Any = None, **options: Any) -> None:
        self.start(engine, flow, sink, **options).awaitTermination(120)

    def rest(self, engine: pk.Engine, flow: pk.Flow = COUNTS, sink: Any = None, **options: Any) -> Any:
        """Take what is there, then wait for more."""
        self.function = engine.foreach_batch(flow, sink or self.kept, **options)
        read = self.cluster.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.inputs))
        query = read.writeStream.option("checkpointLocation", str(self.check)).foreachBatch(self.function).start()
        query.processAllAvailable()
        return query

    def fails(self, engine: pk.Engine, flow: pk.Flow = COUNTS, sink: Any = None, **options: Any) -> BaseException:
        """The exception that ends it."""
        with pytest.raises(Exception, match=r".*"):
            self.run(engine, flow, sink, **options)
        assert self.function.error is not None
        return self.function.error


def only(folder: Path, pattern: str) -> Path:
    """The one file of a pattern."""
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{pattern}: {[path.name for path in found]}"
    return found[0]


def kill(member: Any) -> None:
    """End the process of a member, and wait until the engine knows."""
    os.kill(member.pid, signal.SIGKILL)
    wait_for(lambda: member.lost is not None, what="the loss is noticed")


def executor_of(pid: int) -> int:
    """The JVM of the executor that a Python worker runs under."""
    while pid > 1:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(b"CoarseGrainedExecutorBackend" in word for word in command):
            return pid
        # The name of a program may have blanks and brackets; what follows it has none.
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise LookupError("it runs under no executor of its own")
