"""Outputs of an epoch as a Spark DataFrame.

Owns: the picklable task that reads one frozen piece, and the DataFrame over all pieces, one partition each. The
pieces stay at their members until the next epoch is asked for, so the DataFrame can be evaluated as often as a
sink wants, and a task that Spark runs again reads the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from penstock._schema import conform, spark_types, to_ddl
from penstock.spark._tasks.place import Secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["DrainTask", "Piece", "outputs"]


@dataclass(frozen=True)
class Piece:
    """One frozen part of an epoch's output: the data port of its member, its number there, its rows."""

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
    which : {"rows", "late"}
        Results, or rows that came too late.
    pieces : tuple of Piece
        By number of the DataFrame's partition.
    schema : pyarrow.Schema
        Columns, in Spark's Arrow types.
    secret : Secret
        Lets the task in.
    silence : float
        Seconds to wait for a member that does not answer.
    """

    query: str
    epoch: int
    which: Literal["rows", "late"]
    pieces: tuple[Piece, ...]
    schema: pa.Schema
    secret: Secret
    silence: float = 60.0

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the pieces whose numbers come in."""
        from penstock import _native

        for batch in batches:
            for index in batch.column(0).to_pylist():
                piece = self.pieces[index]
                secret, limit = self.secret.reveal(), self.silence
                read = _native.Drain(piece.address, secret, self.query, self.epoch, piece.number, self.which, limit)
                for rows in read:
                    if rows.num_rows:
                        yield conform(pa.record_batch(rows), self.schema, "output")


def outputs(
    session: SparkSession,
    query: str,
    epoch: int,
    which: Literal["rows", "late"],
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
        The engine's.
    silence : float
        Seconds to wait for a member that does not answer.

    Returns
    -------
    pyspark.sql.DataFrame
        One partition for each piece; readable until the next epoch of the query begins.

    """
    fixed = tuple(pieces)
    types = spark_types(schema)
    if not fixed:
        return session.createDataFrame([], to_ddl(types))
    task = DrainTask(query, epoch, which, fixed, types, secret, silence)
    return session.range(0, len(fixed), 1, len(fixed)).mapInArrow(task, to_ddl(types))
