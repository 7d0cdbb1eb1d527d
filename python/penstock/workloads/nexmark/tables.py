"""The tables of an auction site in a folder: Parquet files, and ``params.json`` with the lengths of windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock._flow import Flow
from penstock._resume import guarded
from penstock._schema import conform
from penstock.errors import SchemaError
from penstock.workloads.params import read_params
from penstock.workloads.parquet import open_table, read_batches
from penstock.workloads.paths import for_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DATE_TIME = pa.schema([pa.field("date_time", pa.int64())])

__all__ = ["disorder_ms", "load_params", "read", "read_spark", "rows"]


def load_params(folder: str | Path) -> dict[str, Any]:
    """Read ``params.json`` of a folder.

    Parameters
    ----------
    folder : str or Path
        Where the data is.

    Returns
    -------
    dict
        By query name.

    Raises
    ------
    ConfigError
        When the file is not there or is not a JSON object.
    """
    return read_params(folder, "the window lengths", "by query name")


def disorder_ms(folder: str | Path, tables: Sequence[str] = ("bid",)) -> int:
    """Measure how far rows of a folder are out of order: the least lateness at which none comes late.

    Parameters
    ----------
    folder : str or Path
        Holds the tables.
    tables : sequence of str, default ("bid",)
        Which, each by itself.

    Returns
    -------
    int
        Greatest distance of a row behind the latest row before it, milliseconds; 0 for sorted files. Reads one column
        of each.
    """
    return max((_disorder_of(folder, table) for table in tables), default=0)


def _disorder_of(folder: str | Path, table: str) -> int:
    latest, furthest = None, 0
    file = open_table(folder, table)
    _require(file, ["date_time"], folder, table)
    for batch in _stream(file, _path(folder, table), ["date_time"], 65_536):
        times = conform(batch, _DATE_TIME, str(_path(folder, table))).column(0).drop_null()
        if not len(times):
            continue
        before = pc.cumulative_max(times, start=latest)
        furthest = max(furthest, pc.max(pc.subtract(before, times)).as_py())
        latest = before[-1]
    return furthest


def rows(query_flow: Flow, folder: str | Path) -> int:
    """Return how many rows of a folder a flow takes, from the files' footers."""
    return sum(int(open_table(folder, table).metadata.num_rows) for table in query_flow.sources)


def read(query_flow: Flow, folder: str | Path, batch_rows: int = 65_536) -> dict[str, Iterator[pa.RecordBatch]]:
    """Stream the tables of a folder that a flow takes, only the columns that it takes.

    Parameters
    ----------
    query_flow : Flow
        Made by `flow`.
    folder : str or Path
        Holds a Parquet file for each source of the flow.
    batch_rows : int, default 65_536
        Most rows per batch.

    Returns
    -------
    dict of str to iterator of pyarrow.RecordBatch
        By the name of the source, each in the order of the file.

    Raises
    ------
    ConfigError
        When a file is not there or is not Parquet.
    SchemaError
        When it lacks a column, or has one of another type.
    """
    found: dict[str, Iterator[pa.RecordBatch]] = {}
    for table, schema in query_flow.sources.items():
        file = open_table(folder, table)
        _require(file, schema.names, folder, table)
        # A type that does not fit is told of the file that has it, before any row.
        there = pa.schema([file.schema_arrow.field(name) for name in schema.names])
        conform(pa.RecordBatch.from_pylist([], schema=there), schema, str(_path(folder, table)))
        found[table] = guarded(
            _stream(file, _path(folder, table), schema.names, batch_rows), f"the reading of {folder}"
        )
    return found


def read_spark(query_flow: Flow, folder: str | Path, spark: SparkSession) -> dict[str, DataFrame]:
    """Return the tables of a folder that a flow takes as Spark DataFrames, only the columns that it takes.

    Parameters
    ----------
    query_flow : Flow
        Made by `flow`.
    folder : str or Path
        Holds a Parquet file for each source of the flow.
    spark : pyspark.sql.SparkSession
        A session.

    Returns
    -------
    dict of str to pyspark.sql.DataFrame
        By the name of the source, lazy.

    Raises
    ------
    ConfigError
        When a file is not there or is not Parquet.
    """
    found = {}
    for table, schema in query_flow.sources.items():
        open_table(folder, table).close()
        found[table] = spark.read.parquet(for_spark(_path(folder, table))).select(*schema.names)
    return found


def _require(file: Any, columns: list[str], folder: str | Path, table: str = "bid") -> None:
    have = file.schema_arrow.names
    for name in columns:
        if name not in have:
            raise SchemaError(f"{_path(folder, table)} has no column {name!r}; it has {', '.join(have)}")


def _path(folder: str | Path, table: str) -> Path:
    return Path(folder) / f"{table}.parquet"


def _stream(file: Any, path: Path, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    with file:
        yield from read_batches(file, path, columns, batch_rows)
