"""Paths of files as Spark takes them."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["for_spark"]


def for_spark(path: str | Path) -> str:
    """The path of one file, with what Spark would take for a pattern escaped.

    Examples
    --------
    >>> for_spark("/data/run[1]/bid.parquet")
    '/data/run\\\\[1\\\\]/bid.parquet'
    """
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", str(Path(path).absolute()))
