"""The rows of a Spark DataFrame as Arrow, on every Spark release that is served."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from penstock._schema import to_arrow

__all__ = ["to_batches", "to_table"]


def to_batches(df: Any) -> list[pa.RecordBatch]:
    """Collect a DataFrame as Arrow batches, in the order of its rows; without rows there is none.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Of a classic session.

    Returns
    -------
    list of pyarrow.RecordBatch
        As a function for ``mapInArrow`` would get them: timestamps name the session's time zone.
    """
    return list(df._collect_as_arrow())


def to_table(df: Any) -> pa.Table:
    """Collect a DataFrame as an Arrow table.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Of a classic session.

    Returns
    -------
    pyarrow.Table
        All rows, in Spark's Arrow types: timestamps are in UTC.

    Notes
    -----
    Spark 4 has ``DataFrame.toArrow``; Spark 3.5 collects Arrow batches too, but shows them only as pandas, which
    loses types and nulls.

    Examples
    --------
    >>> to_table(spark.range(3)).column("id").to_pylist()  # doctest: +SKIP
    [0, 1, 2]
    """
    if hasattr(df, "toArrow"):
        return df.toArrow()
    # The batches name the session's time zone; the instants are the same. Without rows there is no batch.
    schema = to_arrow(df.schema, "the DataFrame")
    tables = [pa.Table.from_batches([batch]).cast(schema) for batch in to_batches(df)]
    return pa.concat_tables(tables) if tables else schema.empty_table()
