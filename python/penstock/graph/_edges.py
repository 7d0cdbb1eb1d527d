"""Edges from wherever they are: files, Arrow data, batches as they come.

Owns: reading edge lists and telling what nodes are called. Nodes are numbers (int64, or uint64 where a relation has it)
or text; all relations of an index agree. Files are read as a stream, gzip or plain: memory never holds a whole one.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock._resume import guarded
from penstock._schema import decoded
from penstock.errors import ConfigError, SchemaError
from penstock.graph._options import node_ids

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from typing_extensions import TypeIs

__all__ = [
    "Edges",
    "Ids",
    "Source",
    "check_columns",
    "edge_columns",
    "is_spark",
    "node_kind",
    "paths_of",
    "read_edges",
    "sources",
]


class ArrowStream(Protocol):
    """Tables, readers and frames: what has ``__arrow_c_stream__``."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


class ArrowArray(Protocol):
    """Record batches: what has ``__arrow_c_array__``."""

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any: ...


#: What relations may be given as in this process: paths of edge lists, Arrow data, record batches.
Edges: TypeAlias = str | Path | ArrowStream | ArrowArray | Sequence[str] | Sequence[Path] | Iterable[ArrowArray]
Ids: TypeAlias = Literal["signed", "unsigned", "text"]
T = TypeVar("T")

_CHUNK_BYTES = 1 << 20
_PIECE_ROWS = 1 << 20
_TYPES = {"signed": pa.int64(), "unsigned": pa.uint64(), "text": pa.large_string()}


def read_edges(path: str | os.PathLike[str], ids: Literal["number", "text"] = "number") -> Iterator[pa.RecordBatch]:
    """Read an edge list: one edge per line, two nodes separated by tabs, blanks or a comma.

    Parameters
    ----------
    path : path
        The file; gzip when it ends in ``.gz``. Empty lines and lines that begin with ``#`` or ``%`` say nothing,
        further columns are read over, and so is the line of sizes of a Matrix Market file, which begins with
        ``%%MatrixMarket``.
    ids : {"number", "text"}, default "number"
        What nodes are: numbers of up to 64 bits, or any text without blanks and commas.

    Returns
    -------
    iterator of pyarrow.RecordBatch
        Columns ``src`` and ``dst``: uint64, or large_string.

    Raises
    ------
    SchemaError
        For a line that is no edge (one that lacks a node beside a tab or comma, too), with ``file`` and ``line``, and
        for a damaged gzip file.
    OSError
        When the file cannot be read, as soon as the first batch is asked for.
    ConfigError
        For other `ids`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
    ...     _ = file.write("# a comment\\n1\\t2\\n2 3\\n")
    ...     file.flush()
    ...     [row for batch in read_edges(file.name) for row in batch.to_pylist()]
    [{'src': 1, 'dst': 2}, {'src': 2, 'dst': 3}]
    """
    node_ids(ids)
    return guarded(_read_edges(path, ids), f"the reading of {path}")


def _read_edges(path: str | os.PathLike[str], ids: Literal["number", "text"]) -> Iterator[pa.RecordBatch]:
    from penstock import _native

    name = os.fspath(path)
    # Which errors name it by; what is not UTF-8 is escaped there.
    shown = name.encode(errors="backslashreplace").decode()
    reader = _native.GraphText(shown, "text" if ids == "text" else "unsigned")
    opened: Any = gzip.open(name, "rb") if name.endswith(".gz") else open(name, "rb")  # noqa: SIM115
    with opened as file:
        if name.endswith(".gz") and os.fstat(file.fileno()).st_size == 0:
            raise SchemaError(f"{name}: damaged gzip file: it has no bytes; fetch it again", file=name)
        while True:
            try:
                chunk = file.read(_CHUNK_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise SchemaError(f"{name}: damaged gzip file: {error}; fetch it again", file=name) from error
            batch = pa.record_batch(reader.read(chunk, not chunk))
            if batch.num_rows:
                yield batch
            if not chunk:
                return


@dataclass(frozen=True)
class Source:
    """The edges of one relation.

    Attributes
    ----------
    name : str
        As patterns call it.
    ids : {"signed", "unsigned", "text"}, optional
        What its own columns ask for; None where there is nothing that tells.
    batches : iterable of pyarrow.RecordBatch
        Read once; two columns each, and perhaps more, which are no nodes.
    """

    name: str
    ids: Ids | None
    batches: Iterable[pa.RecordBatch]

    def cast(self, ids: Ids) -> Iterator[pa.RecordBatch]:
        """Give the batches with nodes of that kind in the first two columns, and the others as they are.

        Large ones are given in pieces, so that an interrupt is heard in between.

        Raises
        ------
        SchemaError
            When a value does not fit or is null, or there are names among numbers.
        """
        if self.ids is not None and (ids == "text") != (self.ids == "text"):
            raise SchemaError(
                f"relation {self.name!r} has {'text' if self.ids == 'text' else 'numbers'} for nodes, another relation"
                f" {'text' if ids == 'text' else 'numbers'}; bring them to one type"
            )
        before = 0
        for batch in self.batches:
            told = _told(self.name, [batch.schema.field(at) for at in (0, 1)])
            if told is not None and (told == "text") != (ids == "text"):
                some, others = ("text", "numbers") if told == "text" else ("numbers", "text")
                raise SchemaError(
                    f"relation {self.name!r} has {some} for nodes in some batches, and nodes are {others} elsewhere;"
                    " bring them to one type"
                )
            for first in range(0, batch.num_rows, _PIECE_ROWS):
                yield self._cast(batch.slice(first, _PIECE_ROWS), ids, before + first)
            before += batch.num_rows

    def _cast(self, batch: pa.RecordBatch, ids: Ids, before: int) -> pa.RecordBatch:
        """A piece with so many rows before it."""
        columns = batch.columns
        for at in (0, 1):
            try:
                columns[at] = pc.cast(decoded(columns[at]), _TYPES[ids])
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise SchemaError(f"relation {self.name!r}: a node does not fit {_TYPES[ids]}: {error}") from error
            if columns[at].null_count:
                row = before + pc.index(columns[at].is_null(), True).as_py()
                raise SchemaError(
                    f"relation {self.name!r}: column {batch.schema.names[at]!r} is null in row {row} of the relation,"
                    " counted from 0: an edge has two nodes; filter such rows out"
                )
        return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def sources(
    relations: Mapping[str, Edges], columns: Sequence[str] | None, ids: Literal["number", "text"]
) -> tuple[Ids, list[Source]]:
    """Open every relation and tell what nodes are.

    Parameters
    ----------
    relations : mapping of str to edges
        Each a path, a list of paths, Arrow data, or an iterable of record batches.
    columns : pair of str, optional
        Names of the columns that hold the ends of edges; default the first two. Files have no names.
    ids : {"number", "text"}
        What nodes in files are.

    Returns
    -------
    ids : {"signed", "unsigned", "text"}
        That all can have.
    sources : list of Source
        In the order of the mapping.

    Raises
    ------
    SchemaError, ConfigError
        When something is no edges, or has no such columns.
    """
    check_columns(columns)
    node_ids(ids)
    opened = [_open(name, edges, columns, ids) for name, edges in relations.items()]
    kinds = {source.ids for source in opened if source.ids is not None}
    chosen: Ids = "text" if kinds == {"text"} else "unsigned" if "unsigned" in kinds else "signed"
    return chosen, opened


def _open(name: str, edges: Edges, columns: Sequence[str] | None, ids: Literal["number", "text"]) -> Source:
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"relation {name!r}: a name is letters, digits and underscores, as a pattern writes it")
    paths = paths_of(edges)
    if paths is not None:
        if columns is not None:
            raise ConfigError(
                f"columns={columns!r}, but relation {name!r} is read from files, whose columns have no names: edges are"
                " the first two; leave columns= out"
            )
        kind: Ids = "text" if ids == "text" else "unsigned"
        return Source(name, kind, (batch for path in paths for batch in read_edges(path, ids)))
    if hasattr(edges, "__arrow_c_stream__"):
        reader = _rows(name, edges, pa.RecordBatchReader.from_stream)
        return Source(name, _told(name, _two(name, reader.schema, columns)), _picked(name, reader, columns))
    if hasattr(edges, "__arrow_c_array__"):
        edges = [_rows(name, edges, pa.record_batch)]
    if not isinstance(edges, Iterable) or isinstance(edges, (str, bytes, Mapping)):
        raise ConfigError(
            f"relation {name!r}: edges are Arrow data (a table, a frame), record batches, paths or a Spark DataFrame,"
            f" not {type(edges).__name__}"
        )
    iterator: Iterator[Any] = iter(edges)
    for given in iterator:
        if not hasattr(given, "__arrow_c_array__"):
            raise ConfigError(
                f"relation {name!r}: expected record batches, got {type(given).__name__}; give a pyarrow table of two"
                " columns, a frame, or the path of a file"
            )
        first = _rows(name, given, pa.record_batch)
        told = _told(name, _two(name, first.schema, columns))
        if told is not None or first.num_rows:  # else the next one tells
            return Source(name, told, _picked(name, _chain(name, first, iterator), columns))
    return Source(name, None, ())


def _rows(name: str, data: Any, read: Callable[[Any], T]) -> T:
    """Read Arrow data, which may be one array, where edges need rows of two columns."""
    try:
        return read(data)
    except (pa.ArrowInvalid, TypeError) as error:
        raise SchemaError(
            f"relation {name!r}: {type(data).__name__} has no rows of two columns, where edges begin and end: {error}"
        ) from error


def _told(name: str, fields: Sequence[pa.Field]) -> Ids | None:
    """What the nodes are; None of columns without a type, which have no node."""
    return None if all(pa.types.is_null(field.type) for field in fields) else node_kind(name, fields)


def paths_of(edges: Edges) -> list[str] | None:
    """The files that edges are read from; None where they are no paths."""
    if isinstance(edges, (str, Path)):
        return [os.fspath(edges)]
    if isinstance(edges, (list, tuple)) and edges and all(isinstance(path, (str, Path)) for path in edges):
        return [os.fspath(path) for path in edges]
    return None


def _chain(name: str, first: pa.RecordBatch, rest: Iterator[Any]) -> Iterator[pa.RecordBatch]:
    yield first
    for batch in rest:
        yield _rows(name, batch, pa.record_batch)


def is_spark(edges: object) -> TypeIs[DataFrame]:
    """Whether edges are a Spark DataFrame; imports nothing of Spark."""
    return any(kind.__module__.startswith("pyspark.sql") for kind in type(edges).__mro__)


def check_columns(columns: object) -> None:
    """Refuse what is not None or two different names."""
    two = isinstance(columns, (list, tuple)) and len(columns) == 2 and columns[0] != columns[1]
    if columns is not None and not (two and all(isinstance(name, str) for name in columns)):  # type: ignore[attr-defined]
        raise ConfigError(f"columns={columns!r} must be two names: where edges begin and where they end")


def edge_columns(name: str, names: Sequence[str], columns: Sequence[str] | None) -> tuple[int, int]:
    """Tell the places of the columns where edges begin and end.

    Raises
    ------
    SchemaError
        When there are no two columns, or not exactly one of each name that was given.
    """
    if columns is None:
        if len(names) < 2:
            raise SchemaError(
                f"relation {name!r} has {len(names)} column(s), {', '.join(names) or 'none'}: edges need two"
            )
        return 0, 1
    for column in columns:
        if list(names).count(column) != 1:
            raise SchemaError(f"relation {name!r} has no single column {column!r}; it has {', '.join(names) or 'none'}")
    return list(names).index(columns[0]), list(names).index(columns[1])


def node_kind(name: str, fields: Iterable[pa.Field]) -> Ids:
    """Tell what the nodes of two columns are.

    Raises
    ------
    SchemaError
        When they can be none, naming the column.
    """
    kinds: set[Ids] = set()
    for field in fields:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            kinds.add("text")
        elif pa.types.is_uint64(kind):
            kinds.add("unsigned")
        elif pa.types.is_integer(kind) or pa.types.is_null(kind):
            kinds.add("signed")
        else:
            raise SchemaError(f"relation {name!r}: column {field.name!r} is {kind}; nodes are integers or text")
    if len(kinds) == 1:
        return kinds.pop()
    if "text" in kinds:
        raise SchemaError(f"relation {name!r}: one of its columns is text and the other is not; bring them to one type")
    return "unsigned"


def _two(name: str, schema: pa.Schema, columns: Sequence[str] | None) -> list[pa.Field]:
    return [schema.field(at) for at in edge_columns(name, schema.names, columns)]


def _picked(name: str, batches: Iterable[pa.RecordBatch], columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        places = edge_columns(name, batch.schema.names, columns)
        pair = [batch.column(place) for place in places]
        yield pa.RecordBatch.from_arrays(pair, names=[batch.schema.names[place] for place in places])
