"""Outputs of an epoch as a Spark DataFrame.

Owns: the picklable task that reads one frozen piece, and the DataFrame over all pieces, one partition each. The
pieces stay at their members until the next epoch is asked for, so the DataFrame can be evaluated as often as a
sink wants, and a task that Spark runs again reads the same rows.

Few rows come through the driver instead, as a local relation: a stage of Python tasks costs a batch a tenth of a second
whatever it holds. A member that does not give them to the driver is asked by tasks, which Spark runs again. Invariant:
what the driver holds of an epoch is bounded, in rows and in bytes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyspark
from pyspark.sql.types import _parse_datatype_string

from penstock._schema import conform, spark_types, to_ddl
from penstock.errors import AuthenticationError, ProtocolError
from penstock.spark._engine.feeds import lives
from penstock.spark._tasks.heap import settle
from penstock.spark._tasks.place import Key, Secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["DrainTask", "Piece", "are_few", "outputs", "struct_type"]

log = logging.getLogger(__name__)

#: Rows and bytes of an epoch that go through the driver at most. Spark makes rows of them one by one in one thread,
#: which is slower than tasks that share the work from about 30,000 rows on.
_LOCAL_ROWS, _LOCAL_BYTES = 16_384, 4 << 20
#: Whether Spark makes DataFrames of Arrow tables: 3.5 does not.
_TAKES_ARROW = int(pyspark.__version__.partition(".")[0]) >= 4


@dataclass(frozen=True)
class Piece:
    """One frozen part of an epoch's output: its member, the data port of that, its number there, its rows."""

    member: int
    address: str
    number: int
    rows: int


@dataclass(frozen=True)
class DrainTask:
    """A function for ``mapInArrow`` over piece numbers that yields the rows of these pieces.

    Attributes
    ----------
    query : str
        Name of the query at the members.
    epoch : int
        Which epoch.
    which : {"rows", "beside"}
        Results, or late rows and those of side outputs.
    pieces : tuple of Piece
        By number of the DataFrame's partition.
    schema : pyarrow.Schema
        Columns, in Spark's Arrow types.
    key : Key
        Lets the task in.
    silence : float
        Seconds to wait for a member that does not answer.
    """

    query: str
    epoch: int
    which: Literal["rows", "beside"]
    pieces: tuple[Piece, ...]
    schema: pa.Schema
    key: Key
    silence: float = 60.0

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the pieces whose numbers come in."""
        for batch in batches:
            for index in batch.column(0).to_pylist():
                yield from self.rows(self.pieces[index])
        settle()

    def rows(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Read one piece.

        Raises
        ------
        ProtocolError
            When its member cannot be read, another one answers, or it has not as many rows as it said.
        """
        from penstock import _native

        read = _native.Drain(
            piece.address,
            self.key.reveal(),
            self.query,
            self.epoch,
            piece.number,
            self.which,
            self.silence,
            piece.member,
        )
        count = 0
        for rows in read:
            count += rows.num_rows
            if rows.num_rows:
                yield conform(pa.record_batch(rows), self.schema, "output")
        if count != piece.rows:
            raise ProtocolError(
                f"member {piece.member} gave {count} rows of piece {piece.number} of epoch {self.epoch}, it had"
                f" {piece.rows}"
            )


def outputs(
    session: SparkSession,
    query: str,
    epoch: int,
    which: Literal["rows", "beside"],
    pieces: Iterable[Piece],
    schema: pa.Schema,
    secret: Secret,
    silence: float = 60.0,
) -> DataFrame:
    """Make the DataFrame of an epoch's output.

    Parameters
    ----------
    session : SparkSession
        Whose DataFrame it becomes.
    query, epoch, which
        What to read.
    pieces : iterable of Piece
        Where it is; pieces without rows need not be named.
    schema : pyarrow.Schema
        Columns as the flow gives them.
    secret : Secret
        The engine's, from which the key of these reads is made.
    silence : float
        Seconds to wait for a member that does not answer.

    Returns
    -------
    pyspark.sql.DataFrame
        One partition for each piece, or a local relation where there are few rows; readable until the next epoch of the
        query begins.

    Raises
    ------
    ProtocolError
        When a member that has some of few rows has gone.
    """
    fixed = tuple(pieces)
    types = spark_types(schema)
    task = DrainTask(query, epoch, which, fixed, types, secret.drain(query, epoch), silence)
    few = _few(task) if _TAKES_ARROW and _is_cut(session) else None
    if few is not None:
        # Spark takes no column of structs without a chunk.
        return session.createDataFrame(few if few.num_rows else types.empty_table(), struct_type(to_ddl(types)))
    if not fixed:
        # Spark knows then that it is empty; 3.5 starts Python tasks for no row else.
        return session.createDataFrame([], to_ddl(types)).limit(0)
    return session.range(0, len(fixed), 1, len(fixed)).mapInArrow(task, struct_type(to_ddl(types)))


def _is_cut(session: SparkSession) -> bool:
    """Whether Spark bounds the rows of an Arrow batch: it makes no DataFrame of a table where it does not."""
    return int(session.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") or 0) > 0


def are_few(pieces: Iterable[Piece]) -> bool:
    """Whether these rows go through the driver, unless they are large."""
    return sum(piece.rows for piece in pieces) <= _LOCAL_ROWS


@functools.lru_cache(maxsize=64)
def struct_type(ddl: str) -> Any:
    """Spark's schema of a DDL text, which the JVM reads."""
    # What `StructType.fromDDL` is, which Spark 3.5 does not have.
    return _parse_datatype_string(ddl)


def _few(task: DrainTask) -> pa.Table | None:
    """The rows of an epoch, where they are few and their members give them."""
    if not are_few(task.pieces):
        return None
    found, size = [], 0
    for piece in task.pieces:
        try:
            for batch in task.rows(piece):
                size += batch.nbytes
                if size > _LOCAL_BYTES:
                    return None
                found.append(batch)
        except (ProtocolError, AuthenticationError) as error:
            if not lives(piece.address, task.silence):
                raise  # nor would tasks, one after the other
            log.info("query %s: tasks read batch %d: %s", task.query, task.epoch, error)
            return None
    return pa.Table.from_batches(found, task.schema)
