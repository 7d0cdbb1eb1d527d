"""Parquet files of a workload's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError

__all__ = ["open_table", "read_batches", "reading"]


def open_table(folder: str | Path, name: str) -> Any:
    """Open the file of a table: a ``pyarrow.parquet.ParquetFile``.

    Raises
    ------
    ConfigError
        When it is not there or is not Parquet.
    """
    import pyarrow.parquet as pq

    path = Path(folder) / f"{name}.parquet"
    try:
        # By its name pyarrow opens a file only where that is UTF-8.
        return pq.ParquetFile(pa.OSFile(os.fsencode(path)))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}; --input is the folder that holds it"
        ) from error
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error


def read_batches(
    file: Any, path: str | Path, columns: Sequence[str], batch_rows: int = 65_536
) -> Iterator[pa.RecordBatch]:
    """Stream columns of an open file.

    Raises
    ------
    ConfigError
        Naming `path`, when something of it cannot be read.
    """
    batches = file.iter_batches(batch_size=batch_rows, columns=columns)
    while True:
        with reading(path):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Say of which file what cannot be read is."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{path} is damaged or cannot be read: {error}") from error
