"""Paths of files as Spark takes them."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import ConfigError

__all__ = ["for_spark", "is_utf_8"]


def is_utf_8(path: str | Path) -> bool:
    """Whether the bytes of a path are UTF-8, as Spark's names are.

    Examples
    --------
    >>> is_utf_8("/data/prénom"), is_utf_8("/data/pr\\udce9nom")
    (True, False)
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def for_spark(path: str | Path) -> str:
    """The path of one file, with what Spark would take for a pattern escaped.

    Examples
    --------
    >>> for_spark("/data/run[1]/bid.parquet")
    '/data/run\\\\[1\\\\]/bid.parquet'

    Raises
    ------
    ConfigError
        For a path that is not UTF-8.
    """
    whole = str(Path(path).absolute())
    if not is_utf_8(whole):
        raise ConfigError(f"{whole!r}: the path is not UTF-8, in which Spark has names; rename it")
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", whole)
