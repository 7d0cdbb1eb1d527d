"""What people ask of a graph: cliques and patterns, of Arrow data or of Spark DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, overload

from penstock._options import whole, yes_or_no
from penstock.errors import ConfigError, PatternError
from penstock.graph._edges import Edges, is_spark
from penstock.graph._index import Index
from penstock.graph._matches import Matches
from penstock.graph._options import Options, Progress, node_ids, pattern_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from typing_extensions import Unpack

__all__ = ["atom", "clique", "cliques", "match", "pattern"]


class _SearchOptions(TypedDict, total=False):
    columns: Sequence[str] | None
    ids: Literal["number", "text"]
    workers: int | None
    batches: int
    batch_size: int
    batch_rows: int
    in_order: bool
    progress: Progress | None


class _CliqueOptions(_SearchOptions, total=False):
    directed: bool
    orientation: Literal["degree", "degeneracy"]


class _MatchOptions(_SearchOptions, total=False):
    order: Sequence[str] | None
    self_loops: Literal["keep", "drop", "refuse"]


#: What a relation of cliques is called.
RELATION = "e"


def atom(relation: str, begin: str, end: str) -> tuple[str, str, str]:
    """Say that `relation` has an edge from one variable to another; for `pattern`."""
    return (relation, begin, end)


def pattern(head: Sequence[str], *atoms: tuple[str, str, str], name: str = "match") -> str:
    """Write a pattern from its parts.

    Parameters
    ----------
    head : sequence of str
        The variables that become columns.
    *atoms : tuple of str
        ``(relation, from, to)``, see `atom`.
    name : str, default "match"
        What the result is called.

    Returns
    -------
    str
        The pattern as text, checked.

    Raises
    ------
    PatternError
        When it is none: a variable that nothing binds, parts that nothing joins, an atom without its three texts.

    Examples
    --------
    >>> pattern(["x", "z"], atom("knows", "x", "y"), atom("knows", "y", "z"))
    'match(x, z) :- knows(x, y), knows(y, z)'
    """
    from penstock import _native

    if isinstance(head, str) or not isinstance(head, Sequence) or not all(isinstance(name, str) for name in head):
        raise PatternError(f"the head is a list of variables, not {head!r}")
    for part in atoms:
        if not isinstance(part, (tuple, list)) or len(part) != 3:
            raise PatternError(f"atom {part!r} must be three texts: relation, from, to; penstock.graph.atom makes it")
    body = ", ".join(f"{relation}({begin}, {end})" for relation, begin, end in atoms)
    text = f"{name}({', '.join(head)}) :- {body}"
    _native.graph_pattern(text)
    return text


def clique(size: int) -> tuple[str, list[str]]:
    """Return the pattern of cliques of `size` nodes over the relation ``e``, and the order to bind it in.

    Raises
    ------
    ConfigError
        When the size is no int of 2 to 16.
    """
    from penstock import _native

    nodes = whole(size, 2, 16)
    if nodes is None:
        raise ConfigError(f"size={size!r} must be an int of 2 to 16: the nodes of a clique")
    text, order = _native.graph_clique(RELATION, nodes)
    return text, list(order)


@overload
def cliques(edges: Edges | DataFrame, size: int, *, count: Literal[True], **options: Unpack[_CliqueOptions]) -> int: ...
@overload
def cliques(
    edges: DataFrame, size: int, *, count: Literal[False] = ..., **options: Unpack[_CliqueOptions]
) -> DataFrame: ...
@overload
def cliques(edges: Edges, size: int, *, count: Literal[False] = ..., **options: Unpack[_CliqueOptions]) -> Matches: ...
def cliques(
    edges: Edges | DataFrame,
    size: int,
    *,
    directed: bool = False,
    count: bool = False,
    columns: Sequence[str] | None = None,
    ids: Literal["number", "text"] = "number",
    orientation: Literal["degree", "degeneracy"] = "degree",
    workers: int | None = None,
    batches: int = 64,
    batch_size: int = 1024,
    batch_rows: int = 8192,
    in_order: bool = False,
    progress: Progress | None = None,
) -> Matches | DataFrame | int:
    """Find the cliques of a graph: sets of nodes with an edge between any two.

    Parameters
    ----------
    edges : edges or Spark DataFrame
        A path or paths of edge lists, Arrow data, record batches, or a DataFrame of a classic session.
    size : int
        Nodes per clique, 2 to 16.
    directed : bool, default False
        False: edges have no direction, and each set of nodes is one row, its nodes ascending. True: edges as they
        stand, a row for every order of the nodes in which each has an edge to every later one (the join of the Faucet
        paper). Self-loops and repeated edges never count.
    count : bool, default False
        Return how many there are. All nodes but the last are enumerated; the last are counted by the length of the
        intersection that holds them.
    columns : pair of str, optional
        Names of the columns where edges begin and end; default the first two. Not for files, which have no names.
    ids : {"number", "text"}, default "number"
        What nodes in files are. The columns of a table or DataFrame say it by their types.
    orientation : {"degree", "degeneracy"}, default "degree"
        How an undirected graph is cut to each edge once.
    workers : int, optional
        Threads, default the CPUs of this process; with a DataFrame threads per task, default 1.
    batches, batch_size : int, default 64 and 1024
        At most `batches` units of `batch_size` pairs of nodes are admitted and unfinished at a time.
    batch_rows : int, default 8192
        Rows per batch of the result.
    in_order : bool, default False
        Rows in the order of one thread. Otherwise as they are found.
    progress : callable, optional
        Called now and then with how many first nodes are behind, and of how many.

    Returns
    -------
    Matches, DataFrame or int
        Columns ``a1`` to ``ak`` with the type of the nodes; an iterator over record batches, or a lazy DataFrame. With
        ``count=True`` an int.

    Raises
    ------
    SchemaError, ConfigError, OSError
        For what is no edge, an option out of range, an unreadable file.

    Notes
    -----
    Time: within a constant of the bound on the number of results (worst-case optimal); memory: the index, and one
    list of candidates per thread and node of the clique.

    Examples
    --------
    >>> import pyarrow as pa
    >>> square = pa.table({"src": [1, 2, 3, 4, 1], "dst": [2, 3, 4, 1, 3]})
    >>> [batch.to_pylist() for batch in cliques(square, 3, workers=1)]
    [[{'a1': 1, 'a2': 2, 'a3': 3}, {'a1': 1, 'a2': 3, 'a3': 4}]]
    >>> cliques(square, 3, directed=True, count=True)
    1
    """
    if orientation not in ("degree", "degeneracy"):
        raise ConfigError(f'orientation={orientation!r} must be "degree" or "degeneracy"')
    yes_or_no(directed, "directed")
    yes_or_no(count, "count")
    node_ids(ids)
    text, order = clique(size)
    options = Options(workers, batches, batch_size, batch_rows, in_order)
    shape: Literal["forward", "degree", "degeneracy"] = "forward" if directed else orientation
    if is_spark(edges):
        from penstock.spark import graph

        _check_typed(ids)
        return graph.match(text, {RELATION: edges}, shape, order, columns, "drop", options, count, progress)
    index = Index({RELATION: edges}, columns=columns, ids=ids, self_loops="drop", shape=shape)
    if count:
        return index.count(text, order=order, options=options, progress=progress).count
    return index.match(text, order=order, options=options, progress=progress)


@overload
def match(
    pattern: str,
    relations: Mapping[str, Edges] | Mapping[str, DataFrame],
    *,
    count: Literal[True],
    **options: Unpack[_MatchOptions],
) -> int: ...
@overload
def match(
    pattern: str,
    relations: Mapping[str, DataFrame],
    *,
    count: Literal[False] = ...,
    **options: Unpack[_MatchOptions],
) -> DataFrame: ...
@overload
def match(
    pattern: str, relations: Mapping[str, Edges], *, count: Literal[False] = ..., **options: Unpack[_MatchOptions]
) -> Matches: ...
def match(
    pattern: str,
    relations: Mapping[str, Edges] | Mapping[str, DataFrame],
    *,
    count: bool = False,
    order: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    ids: Literal["number", "text"] = "number",
    self_loops: Literal["keep", "drop", "refuse"] = "keep",
    workers: int | None = None,
    batches: int = 64,
    batch_size: int = 1024,
    batch_rows: int = 8192,
    in_order: bool = False,
    progress: Progress | None = None,
) -> Matches | DataFrame | int:
    """Find what matches a pattern of binary relations.

    Parameters
    ----------
    pattern : str
        ``name(columns) :- relation(x, y), ...``, such as ``"tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"``; `pattern`
        writes it from parts. One row per match: variables that the head leaves out are bound all the same.
    relations : mapping of str to edges or Spark DataFrame
        What the names stand for; all local or all DataFrames. Repeated edges count once.
    count : bool, default False
        Return how many matches there are.
    order : sequence of str, optional
        The order to bind variables in; default the cheapest by statistics of the relations.
    columns, ids, workers, batches, batch_size, batch_rows, in_order, progress
        As for `cliques`.
    self_loops : {"keep", "drop", "refuse"}, default "keep"
        What happens to edges from a node to itself.

    Returns
    -------
    Matches, DataFrame or int
        As for `cliques`, with a column per variable of the head.

    Raises
    ------
    PatternError
        With ``place``: the text is no pattern, names a relation that is not there, or falls apart.
    SchemaError, ConfigError, OSError
        As for `cliques`.

    Examples
    --------
    >>> import pyarrow as pa
    >>> likes = pa.table({"who": ["ann", "bob"], "whom": ["bob", "ann"]})
    >>> match("pair(x, y) :- likes(x, y), likes(y, x)", {"likes": likes}, workers=1).to_table().to_pylist()
    [{'x': 'ann', 'y': 'bob'}, {'x': 'bob', 'y': 'ann'}]
    """
    from penstock import _native

    yes_or_no(count, "count")
    node_ids(ids)
    _native.graph_pattern(pattern_text(pattern))
    if not isinstance(relations, Mapping):
        raise ConfigError(f"relations are a dict of name to edges, not {type(relations).__name__}")
    options = Options(workers, batches, batch_size, batch_rows, in_order)
    frames = {name: edges for name, edges in relations.items() if is_spark(edges)}
    if frames:
        from penstock.spark import graph

        if len(frames) < len(relations):
            raise ConfigError(
                f"relations {', '.join(frames)} are DataFrames and the others are not; give all as one kind"
            )
        _check_typed(ids)
        return graph.match(pattern, frames, "both", order, columns, self_loops, options, count, progress)
    local = {name: edges for name, edges in relations.items() if not is_spark(edges)}
    index = Index(local, columns=columns, ids=ids, self_loops=self_loops)
    if count:
        return index.count(pattern, order=order, options=options, progress=progress).count
    return index.match(pattern, order=order, options=options, progress=progress)


def _check_typed(ids: str) -> None:
    """Refuse to be told what nodes of DataFrames are."""
    if ids != "number":
        raise ConfigError(f"ids={ids!r} says what nodes in files are, and DataFrames have types; leave it out")
