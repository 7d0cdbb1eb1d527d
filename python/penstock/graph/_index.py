"""Relations ready to be searched, many times and by many processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from penstock._sizes import parse_bytes
from penstock.errors import ConfigError, StorageError
from penstock.graph._edges import Edges, Ids, paths_of, sources
from penstock.graph._matches import Counted, Matches
from penstock.graph._options import Options, Progress, Unit, counted, pattern_text, piece, variables

__all__ = ["Index", "Shape", "Unit"]

#: Which directions an index has, or how an undirected graph is oriented.
Shape = Literal["both", "forward", "degree", "degeneracy"]

_ARROW = {"signed": pa.int64(), "unsigned": pa.uint64(), "text": pa.large_string()}


class Index:
    """Relations over one set of nodes, as sorted lists of neighbours.

    Parameters
    ----------
    relations : mapping of str to edges
        Each relation's edges: a path or paths of edge lists, Arrow data (a table, a frame), or record batches.
    columns : pair of str, optional
        Names of the columns where edges begin and end; default the first two. Not for files, which have no names.
    ids : {"number", "text"}, default "number"
        What nodes in files are; Arrow data says it by its types.
    self_loops : {"keep", "drop", "refuse"}, default "keep"
        What happens to edges from a node to itself.
    repeated : {"drop", "refuse"}, default "drop"
        What happens to edges that come more than once in a relation; where `shape` makes one undirected graph, in
        either direction and in any relation.
    shape : {"both", "forward", "degree", "degeneracy"}, default "both"
        Both directions serve any pattern; ``"forward"`` is enough for directed cliques, and half the size. The others
        take the edges of all relations as one undirected graph, oriented that way: each clique matches once. They
        answer cliques only, with all variables in the head; any other pattern is a `PatternError`.

    Raises
    ------
    SchemaError, ConfigError, OSError
        For what is no edge; the message names the relation, or file and line.

    Notes
    -----
    Memory: 4 bytes per edge and direction and 8 per node and direction, 8 or the text per node; while it is built about
    24 bytes per edge more. Nodes and their names are shared by all relations.

    Examples
    --------
    >>> import pyarrow as pa
    >>> index = Index({"e": pa.table({"src": ["a", "b", "b"], "dst": ["b", "a", "b"]})})
    >>> index.nodes, index.edges
    (2, {'e': 3})
    >>> index.count("p(x, y) :- e(x, y), e(y, x)").count
    3
    """

    def __init__(
        self,
        relations: Mapping[str, Edges],
        *,
        columns: Sequence[str] | None = None,
        ids: Literal["number", "text"] = "number",
        self_loops: Literal["keep", "drop", "refuse"] = "keep",
        repeated: Literal["drop", "refuse"] = "drop",
        shape: Shape = "both",
    ) -> None:
        from penstock import _native

        _check(relations, shape)
        kind, opened = sources(relations, columns, ids)
        builder = _native.GraphBuilder(kind)
        for source in opened:
            builder.relation(source.name, self_loops, repeated)
            for batch in source.cast(kind):
                builder.add(source.name, batch)
        self._handle = builder.finish(shape)

    @classmethod
    def build(
        cls,
        path: str | os.PathLike[str],
        relations: Mapping[str, Edges],
        *,
        columns: Sequence[str] | None = None,
        ids: Literal["number", "text"] = "number",
        self_loops: Literal["keep", "drop", "refuse"] = "keep",
        shape: Shape = "both",
        memory: int | str = 128 << 20,
    ) -> Index:
        """Build an index file of edges that need not fit in memory, and map it.

        Parameters
        ----------
        path : path
            The file; it appears whole or not at all. What was there is replaced, but for what edges are read from.
        relations, columns, ids, self_loops, shape
            As for `Index`. Repeated edges count once.
        memory : int or str, default 128 MiB
            About how many bytes are taken while it is built, at least 1 MiB; or a size such as "1g". What is more goes
            to files without a name in the folder of `path`: about four times the edges.

        Raises
        ------
        SchemaError, ConfigError, OSError
            As for `Index`.
        StorageError
            When the folder cannot be written to, or is full.

        Examples
        --------
        >>> import tempfile
        >>> import pyarrow as pa
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Index.build(f"{folder}/e.graph", {"e": pa.table({"src": [1, 2], "dst": [2, 1]})})
        <penstock.graph.Index 2 nodes, edges e: 2>
        """
        from penstock import _native

        _check(relations, shape)
        budget = parse_bytes(memory, "memory")
        if not 1 << 20 <= budget <= 1 << 50:
            raise ConfigError(f"memory={memory!r} must be {1 << 20} to {1 << 50} bytes")
        kind, opened = sources(relations, columns, ids)
        file = Path(path)
        for name, edges in relations.items():
            if any(os.path.exists(one) and file.exists() and file.samefile(one) for one in paths_of(edges) or ()):
                raise ConfigError(f"path {path}: edges of relation {name!r} are read from it; name another file")
        builder = _native.GraphFileBuilder(kind, file.absolute().parent, budget)
        for source in opened:
            builder.relation(source.name, self_loops)
        for source in opened:
            for batch in source.cast(kind):
                builder.add(source.name, batch)
        builder.finish(shape, file)
        return cls.open(file)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Index:
        """Map a file that `build` or `save` wrote: its pages are shared by all processes of the host that do.

        Parameters
        ----------
        path : path
            The file. It must not be written to while it is open.

        Raises
        ------
        StorageError
            When it is no index of this release, or damaged.
        """
        from penstock import _native

        if os.path.isdir(path):
            raise StorageError(f"{os.fspath(path)}: is a folder; name the file that Index.build or save wrote")
        made = cls.__new__(cls)
        made._handle = _native.GraphIndex.open(Path(path))
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a file, which appears whole or not at all.

        Raises
        ------
        StorageError
            When it cannot be written.
        SchemaError
            For more than 4,096 relations. After this and after an interrupt nothing comes to `path`.
        """
        self._handle.save(Path(path))

    @property
    def ids(self) -> Ids:
        """What nodes are: "signed" (int64), "unsigned" (uint64) or "text"."""
        kind: Ids = self._handle.ids
        return kind

    @property
    def sets(self) -> bool:
        """Whether matches are sets of nodes, whose columns ascend: those of an undirected graph."""
        return bool(self._handle.sets)

    @property
    def nodes(self) -> int:
        """How many nodes the relations name."""
        return int(self._handle.nodes)

    @property
    def edges(self) -> dict[str, int]:
        """How many distinct edges each relation has."""
        return dict(self._handle.relations)

    def order(self, pattern: str, order: Sequence[str] | None = None) -> list[str]:
        """Tell in which order a search binds the variables of a pattern: the cheapest by statistics, unless given.

        Raises
        ------
        PatternError, ConfigError
            For a pattern or an order that cannot be used.
        """
        return list(self._handle.order(pattern_text(pattern), variables(order)))

    def schema(self, pattern: str) -> pa.Schema:
        """Tell the columns of the matches."""
        from penstock import _native

        _, columns = _native.graph_pattern(pattern_text(pattern))
        return pa.schema([pa.field(name, _ARROW[self.ids], nullable=False) for name in columns])

    def units(self, pattern: str, parts: int, order: Sequence[str] | None = None) -> list[Unit]:
        """Cut the work of a pattern into about `parts` pieces of like size; heavy vertices are cut, too.

        Raises
        ------
        PatternError, ConfigError
            For a pattern or an order that cannot be used, and for `parts` below 1.
        """
        return list(self._handle.units(pattern_text(pattern), counted("parts", parts), variables(order)))

    def match(
        self,
        pattern: str,
        *,
        order: Sequence[str] | None = None,
        options: Options | None = None,
        unit: Unit | None = None,
        progress: Progress | None = None,
    ) -> Matches:
        """Enumerate the matches of a pattern.

        Parameters
        ----------
        pattern : str
            Such as ``"tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"``.
        order : sequence of str, optional
            The order to bind its variables in.
        options : Options, optional
            Threads, window, size of batches.
        unit : tuple of int, optional
            Only this piece of the work, one of `units`.
        progress : callable, optional
            Called now and then with how many values of the first attribute are behind, and of how many.

        Returns
        -------
        Matches
            An iterator over record batches.

        Raises
        ------
        PatternError, ConfigError
            For a pattern, an order or a unit that cannot be used.
        """
        return Matches(self._search(pattern, False, order, options, unit), self.schema(pattern), progress)

    def count(
        self,
        pattern: str,
        *,
        order: Sequence[str] | None = None,
        options: Options | None = None,
        unit: Unit | None = None,
        progress: Progress | None = None,
    ) -> Counted:
        """Count the matches of a pattern: all but its last variable are enumerated, the last is counted by its lists.

        Parameters and errors are those of `match`.
        """
        search = self._search(pattern, True, order, options, unit)
        try:
            while True:
                done = search.count(0.2 if progress else None)
                if progress is not None:
                    progress(*search.progress())
                if done is not None:
                    return Counted(**done)
        finally:
            search.close()

    def _search(
        self,
        pattern: str,
        count: bool,
        order: Sequence[str] | None,
        options: Options | None,
        unit: Unit | None,
    ) -> Any:
        from penstock import _native

        text, bound = pattern_text(pattern), variables(order)
        how = Options() if options is None else options
        if not isinstance(how, Options):
            raise ConfigError(f"options={options!r} must be penstock.graph.Options(workers=..., batches=..., ...)")
        return _native.GraphSearch(
            self._handle,
            text,
            count=count,
            order=bound,
            workers=how.threads,
            batches=how.batches,
            batch_size=how.batch_size,
            rows=how.batch_rows,
            in_order=how.in_order,
            unit=piece(unit),
        )

    def __repr__(self) -> str:
        edges = ", ".join(f"{name}: {count:,}" for name, count in self.edges.items())
        return f"<penstock.graph.Index {self.nodes:,} nodes, edges {edges or 'none'}>"


def _check(relations: object, shape: object) -> None:
    if not isinstance(relations, Mapping):
        raise ConfigError(f"relations are a dict of name to edges, not {type(relations).__name__}")
    if shape not in ("both", "forward", "degree", "degeneracy"):
        raise ConfigError(f'shape={shape!r} must be "both", "forward", "degree" or "degeneracy"')
