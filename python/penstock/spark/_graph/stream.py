"""The rows of a DataFrame at the driver, piece by piece.

Tasks pack their rows into pieces of about a mebibyte, which Spark keeps on the executors' disks and hands out a few
at a time. So the driver, its JVM included, holds some pieces, whatever the number of rows and however few partitions
they come from.

Departure: edges come to one place, which sorts them by runs on disk: a distributed sort would still end in one
file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.spark._tasks.columns import binary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["described", "pieces"]

#: Bytes and rows after which a piece is complete.
_PIECE_BYTES = 1 << 20
_PIECE_ROWS = 1 << 16
#: Pieces that come to the driver at a time.
_AT_A_TIME = 16


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pack batches into rows of one binary column; a function for ``mapInArrow``."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if (
            sum(batch.num_rows for batch in waiting) >= _PIECE_ROWS
            or sum(batch.nbytes for batch in waiting) >= _PIECE_BYTES
        ):
            yield _row(waiting)
            waiting = []
    if waiting:
        yield _row(waiting)


def _row(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return pa.record_batch({"piece": binary(sink.getvalue())})


def pieces(frame: DataFrame, description: str) -> Iterator[pa.RecordBatch]:
    """Give the rows of a DataFrame as record batches, in no order.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        Of a classic session. Computed once.
    description : str
        What Spark shows as the description of the jobs.
    """
    from pyspark import StorageLevel

    with described(frame, description):
        packed = frame.mapInArrow(_packed, "piece binary").persist(StorageLevel.DISK_ONLY)
        try:
            count = packed.count()
            if count <= _AT_A_TIME:
                rows = iter(packed.collect())
            else:
                rows = packed.repartition(-(-count // _AT_A_TIME)).toLocalIterator()
            for row in rows:
                with pa.ipc.open_stream(pa.py_buffer(row[0])) as reader:
                    yield from reader
        finally:
            packed.unpersist()


@contextlib.contextmanager
def described(frame: Any, description: str) -> Iterator[None]:
    """Let the jobs of this thread have that description."""
    context = frame.sparkSession.sparkContext
    before = context.getLocalProperty("spark.job.description")
    context.setJobDescription(description)
    try:
        yield
    finally:
        context.setLocalProperty("spark.job.description", before)
