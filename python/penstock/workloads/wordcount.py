"""Word count over text files, compressed or not.

Owns: the flow from chunks of text to counts, the streaming reader that cuts files between
words, and the output format. A word is a maximal run of the bytes ``A-Z a-z``, lower-cased;
every other byte separates.

Invariant: no chunk ends inside a word, so every chunk may be split by itself, on any worker.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import pyarrow as pa
import pyarrow.compute as pc

from penstock import _aggregates as aggregates
from penstock._flow import Flow
from penstock._resume import guarded
from penstock.errors import ConfigError
from penstock.workloads.paths import for_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["check", "chunks", "flow", "read", "read_spark", "split", "to_tsv"]

_SEPARATOR = re.compile(rb"[^A-Za-z]")
_CHUNK_BYTES = 1 << 18


def flow() -> Flow:
    """Return the flow from chunks of text to words and counts.

    Returns
    -------
    Flow
        From ``chunk binary`` to ``word string, count bigint``; one row per word at the end.

    Examples
    --------
    >>> flow().columns
    ('word', 'count')
    """
    return (
        Flow("chunk binary")
        .map_batches(split, schema="word string")
        .key_by("word")
        .agg(count=aggregates.count(), emit="final")
    )


def split(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Split chunks of text into words.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        With a column ``chunk`` of binary; no word spans two rows.

    Returns
    -------
    pyarrow.RecordBatch
        One column, ``word``; one row per word.

    Examples
    --------
    >>> import pyarrow as pa
    >>> split(pa.record_batch({"chunk": [b"Don't go"]})).to_pydict()
    {'word': ['don', 't', 'go']}
    """
    from penstock import _native

    return pa.record_batch(_native.tokenize(batch.column("chunk")))


def check(path: str | Path) -> None:
    """Refuse a file that cannot be opened, or that is named ``.gz`` and is no gzip.

    Raises
    ------
    ConfigError
        It names the file.
    """
    with _reading(path):
        _open(path).close()


def chunks(paths: Iterable[str | Path], chunk_bytes: int = _CHUNK_BYTES) -> Iterator[bytes]:
    """Stream the text of files in chunks that end between words.

    Parameters
    ----------
    paths : iterable of str or Path
        Text files; those that begin like gzip are decompressed while they are read, and those named ``.gz`` must.
    chunk_bytes : int, default 262_144
        Size of a chunk; larger only where a single word is.

    Returns
    -------
    iterator of bytes
        The text of one file after the other; a file's end is a separator.

    Raises
    ------
    ConfigError
        When a file cannot be read or its compression is damaged.

    Examples
    --------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "t.txt")
    ...     _ = open(path, "wb").write(b"to be or not")
    ...     list(chunks([path], chunk_bytes=5))
    [b'to ', b'be or ', b'not']
    """
    return guarded(_chunks(paths, chunk_bytes), "the reading of text")


def _chunks(paths: Iterable[str | Path], chunk_bytes: int) -> Iterator[bytes]:
    for path in paths:
        with _reading(path), _open(path) as file:
            yield from _cut(file, chunk_bytes)


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Say of which file what cannot be read is."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is damaged: {error}; fetch it again") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def read(paths: Sequence[str | Path], chunk_bytes: int = _CHUNK_BYTES) -> Iterator[pa.RecordBatch]:
    """Stream files as input batches of `flow`, one chunk each.

    Parameters
    ----------
    paths : sequence of str or Path
        As for `chunks`.
    chunk_bytes : int, default 262_144
        As for `chunks`.

    Returns
    -------
    iterator of pyarrow.RecordBatch
        One row and one column, ``chunk``.
    """
    read = (pa.record_batch({"chunk": pa.array([chunk], pa.binary())}) for chunk in _chunks(paths, chunk_bytes))
    return guarded(read, "the reading of text")


def read_spark(paths: Sequence[str | Path], spark: SparkSession) -> DataFrame:
    """Return the lines of files as a Spark DataFrame for `flow`.

    Parameters
    ----------
    paths : sequence of str or Path
        Text files; Spark decompresses those named ``.gz``.
    spark : pyspark.sql.SparkSession
        A session.

    Returns
    -------
    pyspark.sql.DataFrame
        One column, ``chunk``; a row per line, so no word spans two rows.
    """
    for path in paths:
        check(path)
    lines = spark.read.text([for_spark(path) for path in paths])
    return lines.selectExpr("CAST(value AS binary) AS chunk")


def to_tsv(counts: pa.Table) -> bytes:
    """Write counts as ``word TAB count`` lines, sorted bytewise by word.

    Parameters
    ----------
    counts : pyarrow.Table
        Columns ``word`` and ``count``.

    Returns
    -------
    bytes
        One line per row, each ended by a newline.

    Examples
    --------
    >>> import pyarrow as pa
    >>> to_tsv(pa.table({"word": ["b", "a"], "count": [1, 2]}))
    b'a\\t2\\nb\\t1\\n'
    """
    ordered = counts.sort_by("word")
    number = ordered.column("count").cast(pa.string())
    lines = pc.binary_join_element_wise(ordered.column("word").cast(pa.string()), number, "\t")
    return "".join(f"{line}\n" for line in lines.to_pylist()).encode("ascii")


def _open(path: str | Path) -> IO[bytes]:
    with open(path, "rb") as file:
        begin = file.read(2)
    zipped = begin == b"\x1f\x8b"
    if not zipped and os.fspath(path).endswith(".gz"):
        found = f"it begins with {begin!r}" if begin else "it has no bytes"
        raise gzip.BadGzipFile(f"not a gzipped file, {found}")
    return cast(IO[bytes], gzip.open(path, "rb") if zipped else open(path, "rb"))


def _cut(file: IO[bytes], chunk_bytes: int) -> Iterator[bytes]:
    rest: list[bytes] = []
    while block := file.read(chunk_bytes):
        end = len(block)
        while end and _SEPARATOR.match(block, end - 1) is None:
            end -= 1
        if end:
            yield b"".join((*rest, block[:end]))
            rest = []
        if end < len(block):
            rest.append(block[end:])
    if rest:
        yield b"".join(rest)
