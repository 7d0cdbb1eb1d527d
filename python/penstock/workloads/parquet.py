"""Parquet files of a workload's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError

__all__ = ["open_table"]


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
        return pq.ParquetFile(path)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}; --input is the folder that holds it"
        ) from error
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error
