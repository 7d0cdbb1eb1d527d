"""Graphs: cliques and patterns beside brute force and the published counts, edge files, options, the command line."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_support
import penstock as pk
from conftest import data_folder
from data_support import PUBLISHED, Graph
from examples_support import examples
from penstock import errors
from penstock.cli import main
from penstock.graph._options import Options


@pytest.fixture(scope="session")
def rmat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("numpy")
    path = tmp_path_factory.mktemp("rmat") / "rmat.txt"
    script = data_folder("graphs") / "rmat.py"
    subprocess.run([sys.executable, script, "14", "200000", "42", path], check=True, capture_output=True)
    return path


def edges_of(pairs: list[tuple[Any, Any]], kind: Any = None) -> pa.Table:
    return pa.table({"a": pa.array([a for a, _ in pairs], kind), "b": pa.array([b for _, b in pairs], kind)})


def rows(batches: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for batch in batches for row in batch.to_pylist())


# Counts


def cliques_of(graph: Graph, size: int, directed: bool) -> int:
    straight = graph.directed_threes, graph.directed_fours
    return (straight if directed else (graph.threes, graph.fours))[size - 3]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("directed", [False, True])
def test_counts_are_the_published_ones(
    graphs: Path, figures: Mapping[str, Graph], name: str, size: int, directed: bool
) -> None:
    wanted = cliques_of(figures[name], size, directed)
    path = graphs / f"{name}.txt.gz"
    assert pk.graph.cliques(path, size, directed=directed, count=True, workers=2) == wanted
    if not directed:
        assert pk.graph.cliques(path, size, orientation="degeneracy", count=True) == wanted


def test_counts_of_the_generated_graph(rmat: Path) -> None:
    counts = [pk.graph.cliques(rmat, size, directed=d, count=True) for d in (False, True) for size in (3, 4)]
    assert counts == [175_237, 83_574, 150_786, 61_074]


def test_counts_by_sets_are_the_published_ones() -> None:
    """What those of graphs that are made here are compared with."""
    assert data_support.figures(data_folder("graphs") / "ca-GrQc.txt.gz") == PUBLISHED["ca-GrQc"]


def test_enumeration_gives_as_many_rows_as_the_count_each_a_clique(graphs: Path, figures: Mapping[str, Graph]) -> None:
    path = graphs / "ca-GrQc.txt.gz"
    known = {(row["src"], row["dst"]) for batch in pk.graph.read_edges(path) for row in batch.to_pylist()}
    table = pk.graph.cliques(path, 3, workers=2, batches=3, batch_size=50).to_table()
    found = set(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert len(found) == table.num_rows == figures["ca-GrQc"].threes
    assert all(a < b < c and {(a, b), (a, c), (b, c)} <= known for a, b, c in found)


node = st.integers(-4, 4).map(lambda n: n * 2**40 if n % 2 else n)


@settings(max_examples=examples(60))
@given(pairs=st.lists(st.tuples(node, node), max_size=30), size=st.integers(2, 4), workers=st.integers(1, 3))
def test_cliques_beside_brute_force(pairs: list[tuple[int, int]], size: int, workers: int) -> None:
    straight = {(a, b) for a, b in pairs if a != b}
    nodes = sorted({n for pair in pairs for n in pair})
    both = straight | {(b, a) for a, b in straight}
    sets = [c for c in itertools.combinations(nodes, size) if set(itertools.combinations(c, 2)) <= both]
    lists = [c for c in itertools.permutations(nodes, size) if set(itertools.combinations(c, 2)) <= straight]
    table = edges_of(pairs, pa.int64())
    assert rows(pk.graph.cliques(table, size, workers=workers)) == sets
    assert rows(pk.graph.cliques(table, size, directed=True, workers=workers)) == sorted(lists)
    assert pk.graph.cliques(table, size, directed=True, count=True) == len(lists)


@settings(max_examples=examples(40))
@given(e=st.lists(st.tuples(node, node), max_size=20), f=st.lists(st.tuples(node, node), max_size=20))
def test_patterns_beside_nested_loops(e: list[tuple[int, int]], f: list[tuple[int, int]]) -> None:
    wanted = sorted((a, c) for a, b in set(e) for x, c in set(f) if x == b and (c, a) in set(e))
    relations = {"e": edges_of(e, pa.int64()), "f": edges_of(f, pa.int64())}
    pattern = "p(a, c) :- e(a, b), f(b, c), e(c, a)"
    assert rows(pk.graph.match(pattern, relations)) == wanted
    assert pk.graph.match(pattern, relations, count=True, order=["c", "b", "a"]) == len(wanted)


def test_in_order_gives_the_same_batches_with_any_number_of_threads(graphs: Path, figures: Mapping[str, Graph]) -> None:
    index = pk.graph.Index({"e": graphs / "wiki-Vote.txt.gz"})
    pattern = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"
    tables = []
    for workers in (1, 3):
        options = Options(workers, batch_size=100, in_order=True)
        tables.append(index.match(pattern, options=options).to_table().combine_chunks())
    assert tables[0].num_rows == figures["wiki-Vote"].directed_threes and tables[0].equals(tables[1])


def test_units_add_up_and_cut_heavy_vertices(graphs: Path, figures: Mapping[str, Graph]) -> None:
    index = pk.graph.Index({"e": graphs / "wiki-Vote.txt.gz"}, self_loops="drop")
    text, order = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)", ["a", "b", "c"]
    units = index.units(text, 40, order)
    assert 30 <= len(units) <= 50 and any(unit[1] for unit in units)
    counts = [index.count(text, order=order, unit=unit).count for unit in units]
    assert sum(counts) == figures["wiki-Vote"].directed_threes
    hub = edges_of([(0, n) for n in range(1, 500)] + [(n, n + 1) for n in range(1, 499)])
    index = pk.graph.Index({"e": hub})
    units = index.units(text, 8, order)
    assert len(units) >= 4 and sum(index.count(text, order=order, unit=unit).count for unit in units) == 498
    star = pk.graph.Index({"e": edges_of([(0, n) for n in range(1, 2000)] + [(n, 0) for n in range(1, 2000)])})
    there_and_back = "p(a, b, c) :- e(a, b), e(b, c)"
    units = star.units(there_and_back, 10, ["a", "b", "c"])
    counts = [star.count(there_and_back, order=["a", "b", "c"], unit=unit).count for unit in units]
    # From the hub to each spoke and back, and from each spoke by the hub to each: no unit has much more than a share.
    assert sum(counts) == 1999 + 1999**2 and max(counts) < 1.5 * sum(counts) / 10
    for unit in ((0, 0, 10**6, 0), (5, 0, 1, 0), (0, 2**31, 2, 0), (0, 0, 0, 2**32 - 1)):
        with pytest.raises(ValueError, match=r"is no part of this search: take one that `units` gives"):
            index.count(text, unit=unit)


def test_the_window_is_never_exceeded(graphs: Path, figures: Mapping[str, Graph]) -> None:
    index = pk.graph.Index({"e": graphs / "facebook_combined.txt.gz"}, shape="forward")
    text = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"
    for batches, size in [(1, 1), (1, 7), (2, 100)]:
        options = Options(2, batches=batches, batch_size=size)
        done = index.count(text, order=["a", "b", "c"], options=options)
        assert done.count == figures["facebook_combined"].threes
        assert done.prefixes == figures["facebook_combined"].edges
        # That both of two batches are out at once is for the system's scheduler to say; one of one is certain.
        assert size <= done.admitted_maximum <= batches * size
        assert 1 <= done.batches_maximum <= batches


# Nodes and files


def test_nodes_keep_their_type() -> None:
    text = [("ann", "bob"), ("bob", "cy"), ("ann", "cy"), ("zoë", "zoë")]
    assert rows(pk.graph.cliques(edges_of(text), 3)) == [("ann", "bob", "cy")]
    large = [(2**64 - 1, 2**63), (2**63, 0), (0, 2**64 - 1)]
    found = pk.graph.cliques(edges_of(large, pa.uint64()), 3)
    assert found.schema.types == [pa.uint64()] * 3 and rows(found) == [(0, 2**63, 2**64 - 1)]
    small = edges_of([(-5, 3), (3, 7), (-5, 7)], pa.int16())
    found = pk.graph.cliques(small, 3)
    assert found.schema.types == [pa.int64()] * 3 and rows(found) == [(-5, 3, 7)]
    categories = pa.table({name: pa.array(["x", "y"]).dictionary_encode() for name in "ab"})
    assert pk.graph.match("p(a) :- e(a, a)", {"e": categories}, count=True) == 2
    # As polars gives categories.
    views = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.uint32()), pa.array(["x", "y"], pa.string_view()))
    assert pk.graph.match("p(a) :- e(a, a)", {"e": pa.table({"a": views, "b": views})}, count=True) == 2


def test_empty_graphs_and_isolated_nodes() -> None:
    for empty in (edges_of([], pa.int64()), edges_of([(7, 7)]), edges_of([], pa.string()), []):
        assert pk.graph.cliques(empty, 3, count=True) == 0
        assert pk.graph.cliques(empty, 3, directed=True).to_table().num_rows == 0
        assert pk.graph.match("p(a, b) :- e(a, b), e(b, a)", {"e": empty}, self_loops="drop", count=True) == 0


@pytest.mark.parametrize("empty", [list, lambda: iter(()), lambda: pa.table({"a": [], "b": []})])
def test_what_is_empty_has_any_nodes(empty: Any) -> None:
    text = pa.table({"a": ["x", "y"], "b": ["y", "x"]})
    for first, second in ((text, empty()), (empty(), text)):
        assert pk.graph.match("p(x) :- a(x, y), b(y, x)", {"a": first, "b": second}, count=True) == 0
    deltas = pk.graph.Deltas("back(x, y) :- e(x, y), e(y, x)", ids="text")
    assert deltas.update({"e": empty()}).num_rows == 0
    assert deltas.update({"e": text}, {"e": empty()}).num_rows == 2


def test_batches_that_have_neither_rows_nor_types_do_not_tell_what_nodes_are() -> None:
    nothing = pa.record_batch({"a": pa.nulls(0), "b": pa.nulls(0)})
    many = [2**63, 1]
    for values in (["007", "7"], [7, 8], pa.array(many, pa.uint64())):
        batch = pa.record_batch({"a": values, "b": values})
        found = pk.graph.match("p(x, y) :- e(x, y)", {"e": iter([nothing, nothing, batch, nothing])})
        assert rows(found) == sorted(zip(batch["a"].to_pylist(), batch["b"].to_pylist(), strict=True))
    numbers, text = pa.record_batch({"a": [1], "b": [2]}), pa.record_batch({"a": ["1"], "b": ["2"]})
    for wrong, says in (
        ([pa.record_batch({"a": [1.0], "b": [2.0]})], "column 'a' is double; nodes are integers or text"),
        ([pa.record_batch({"a": [True], "b": [False]})], "column 'a' is bool; nodes are integers or text"),
        ([numbers, text], "has text for nodes in some batches, and nodes are numbers elsewhere"),
        ([text, nothing, numbers], "has numbers for nodes in some batches, and nodes are text elsewhere"),
        ([pa.record_batch({"a": [1]})], "edges need two"),
        ([7], "expected record batches, got int"),
    ):
        with pytest.raises((errors.SchemaError, errors.ConfigError), match=says):
            pk.graph.match("p(x, y) :- e(x, y)", {"e": iter([nothing, *wrong])})


@pytest.mark.parametrize("packed", [False, True])
def test_edge_files(tmp_path: Path, packed: bool) -> None:
    text = b"# SNAP\r\n1\t2\r\n\n2   3\n% more\n1,3,0.5\n18446744073709551615 1"
    path = tmp_path / ("e.txt.gz" if packed else "e.txt")
    path.write_bytes(gzip.compress(text) if packed else text)
    found = [row for batch in pk.graph.read_edges(path) for row in batch.to_pylist()]
    assert [(row["src"], row["dst"]) for row in found] == [(1, 2), (2, 3), (1, 3), (2**64 - 1, 1)]
    assert pk.graph.cliques(str(path), 3, count=True) == 1
    names = tmp_path / "names.txt"
    names.write_text("ann bob\nbob cy\nann cy\n")
    assert pk.graph.cliques([names], 3, ids="text", count=True) == 1


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "e.txt"
    path.write_text("1 2\n# x\n3 four\n")
    with pytest.raises(errors.SchemaError, match=r"e\.txt, line 3: node \"four\" is no number") as caught:
        pk.graph.cliques(path, 3, count=True)
    assert caught.value.line == 3 and caught.value.file == str(path)
    path.write_text("1 2\n3\n")
    with pytest.raises(errors.SchemaError, match='line 2: "3" is one node'):
        pk.graph.cliques(path, 3)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"1 2\n" * 1000)[:-20])
    with pytest.raises(errors.SchemaError, match="damaged gzip"):
        pk.graph.cliques(tmp_path / "cut.gz", 3)
    (tmp_path / "none.gz").write_bytes(b"")
    with pytest.raises(errors.SchemaError, match="damaged gzip file: it has no bytes"):
        pk.graph.cliques(tmp_path / "none.gz", 3)
    with pytest.raises(FileNotFoundError):
        pk.graph.cliques(tmp_path / "none.txt", 3)


def test_an_index_is_a_file_that_others_open(tmp_path: Path, graphs: Path, figures: Mapping[str, Graph]) -> None:
    graph = figures["ca-GrQc"]
    index = pk.graph.Index({"e": graphs / "ca-GrQc.txt.gz"}, self_loops="drop", shape="degeneracy")
    path = tmp_path / "grqc.index"
    index.save(path)
    again = pk.graph.Index.open(path)
    assert (again.nodes, again.edges, again.ids, again.sets) == (graph.nodes, {"e": graph.edges}, "unsigned", True)
    text = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"
    assert again.count(text, order=["a", "b", "c"]).count == graph.threes
    assert rows(again.match(text, order=["a", "b", "c"])) == rows(index.match(text, order=["a", "b", "c"]))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.with_suffix(".damaged").write_bytes(damaged)
    with pytest.raises(errors.StorageError, match="checksum"):
        pk.graph.Index.open(path.with_suffix(".damaged"))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(index)


# What is refused


@pytest.mark.parametrize("shape", ["degree", "degeneracy"])
@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("p(a, b, c) :- e(a, b), e(b, c)", 'nothing joins "a" and "c"'),
        ("p(a, b, c) :- e(a, b), e(b, c), e(c, a)", "in a circle"),
        ("p(a, b) :- e(a, b), e(b, a)", "the other way round"),
        ("p(a) :- e(a, a)", "asks for a self-loop"),
        ("p(a) :- e(a, b)", 'the head leaves out "b"'),
    ],
)
def test_an_undirected_graph_answers_cliques_only(tmp_path: Path, shape: Any, pattern: str, says: str) -> None:
    made = pk.graph.Index({"e": edges_of([(1, 2), (2, 3)])}, shape=shape)
    made.save(tmp_path / "e.graph")
    for index in (made, pk.graph.Index.open(tmp_path / "e.graph")):
        for ask in (index.count, index.match, index.order, lambda text, index=index: index.units(text, 2)):
            with pytest.raises(errors.PatternError, match=f'{says}.*shape="both"'):
                ask(pattern)
        assert index.count("p(b, a) :- e(a, b)").count == 2


EDGE = edges_of([(1, 2)])


@pytest.mark.parametrize(
    ("pattern", "place", "says"),
    [
        ("p(a) :- e(a b)", 13, 'expected "," or "\\)"'),
        ("p(a) :- g(a, b)", 9, 'no relation "g"; there are e'),
        ("p(a) :- e(a, b), e(c, d)", 18, "nothing joins"),
        ("p(z) :- e(a, b)", 3, 'no atom binds "z"'),
        ("p(a, a) :- e(a, b)", 6, "in the head already"),
        ("", 1, "expected the name"),
    ],
)
def test_a_pattern_that_is_none_is_refused_with_its_place(pattern: str, place: int, says: str) -> None:
    with pytest.raises(errors.PatternError, match=says) as caught:
        pk.graph.match(pattern, {"e": EDGE})
    assert caught.value.place == place and pickle.loads(pickle.dumps(caught.value)).place == place


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", 2**31, 10**30, None])
@pytest.mark.parametrize("option", ["batches", "batch_size", "batch_rows", "workers", "size"])
def test_options_out_of_range_are_refused(option: str, wrong: Any) -> None:
    if option == "workers" and wrong is None:
        return
    options = {"size": 3} | {option: wrong}
    with pytest.raises(errors.ConfigError, match=option):
        pk.graph.cliques(EDGE, **options)


def test_repeats_of_an_undirected_graph_are_refused() -> None:
    edges = {"e": edges_of([(1, 2), (2, 3), (2, 1)])}
    for shape in ("degree", "degeneracy"):
        with pytest.raises(errors.SchemaError, match="has the edge 2 -> 1 more than once in the undirected graph"):
            pk.graph.Index(edges, shape=shape, repeated="refuse")  # type: ignore[arg-type]
        with pytest.raises(errors.SchemaError, match='relation "f" has the edge 1 -> 2 more than once'):
            two = {"e": edges_of([(1, 2)]), "f": edges_of([(1, 2)])}
            pk.graph.Index(two, shape=shape, repeated="refuse")  # type: ignore[arg-type]
        assert pk.graph.Index(edges, shape=shape).edges == {"e": 2}  # type: ignore[arg-type]
    assert pk.graph.Index(edges, repeated="refuse").edges == {"e": 3}


def test_a_line_of_sizes_is_no_edge_and_a_missing_node_is_none(tmp_path: Path) -> None:
    path = tmp_path / "e.mtx"
    path.write_text("%%MatrixMarket matrix coordinate pattern general\n% x\n100 90 2\n1 2\n2 3\n")
    assert pk.graph.Index({"e": path}).edges == {"e": 2}
    for text, line in (("src,dst,weight\n1,,5\n", 1), ("1,2,5\n1,,5\n", 2), ("1\t2\n\t3\t4\n", 2)):
        path.write_text(text)
        with pytest.raises(errors.SchemaError, match=f"e.mtx, line {line}: ") as caught:
            pk.graph.Index({"e": path})
        assert (caught.value.file, caught.value.line) == (str(path), line)


def test_what_is_no_edges_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (7, "not int"),
        ([1, 2], "expected record batches, got int"),
        ({"a": [1]}, "not dict"),
        (pa.table({"a": [1]}), "edges need two"),
        (pa.table({"a": [1.5], "b": [2.0]}), "nodes are integers or text"),
        (pa.table({"a": [1], "b": ["x"]}), "bring them to one type"),
        (pa.table({"a": [1, 2], "b": [1, None]}), "column 'b' is null in row 1 of the relation, counted from 0"),
        (
            pa.concat_tables([EDGE, edges_of([(5, 6), (5, None), (None, 6)])]),
            "column 'a' is null in row 3 of",
        ),
        ([pa.record_batch({"a": [1], "b": [2]}), pa.record_batch({"a": ["1"], "b": ["2"]})], "text for nodes in some"),
    ]
    for edges, says in cases:
        with pytest.raises((errors.SchemaError, errors.ConfigError), match=says):
            pk.graph.cliques(edges, 3)
    for columns in ("a", ("a",), ("a", "a"), (0, 1)):
        with pytest.raises(errors.ConfigError, match="must be two names"):
            pk.graph.cliques(EDGE, 3, columns=columns)  # type: ignore[arg-type]
    with pytest.raises(errors.SchemaError, match="no single column 'x'"):
        pk.graph.cliques(EDGE, 3, columns=("a", "x"))
    with pytest.raises(errors.SchemaError, match="another relation numbers"):
        pk.graph.match("p(a) :- e(a, b), f(a, b)", {"e": EDGE, "f": edges_of([("x", "y")])})
    with pytest.raises(errors.SchemaError, match="does not fit"):
        negative = edges_of([(-1, 2)])
        pk.graph.match("p(a) :- e(a, b), f(a, b)", {"e": negative, "f": edges_of([(1, 2)], pa.uint64())})
    with pytest.raises(errors.SchemaError, match="self-loop at -3"):
        pk.graph.match("p(a) :- e(a, b)", {"e": edges_of([(-3, -3)])}, self_loops="refuse")
    with pytest.raises(errors.ConfigError, match="nothing joins"):
        pk.graph.match("p(a) :- e(a, b), e(b, c)", {"e": EDGE}, order=["a", "c", "b"])
    with pytest.raises(errors.ConfigError, match="a name is letters"):
        pk.graph.match("p(a) :- e(a, b)", {"e 1": EDGE})


def test_one_array_is_no_edges() -> None:
    array = pa.array([1, 2])
    for edges in (array, pa.chunked_array([array]), [array], iter([EDGE.to_batches()[0], array])):
        with pytest.raises(errors.SchemaError, match=r"relation 'e': (Int64|Chunked)Array has no rows of two columns"):
            pk.graph.cliques(edges, 3)


def test_options_that_say_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.txt"
    path.write_text("1 2\n")
    for ids in ("bogus", None, 1):
        says = rf"ids={ids!r} must be \"number\" or \"text\""
        with pytest.raises(errors.ConfigError, match=says):
            pk.graph.cliques(EDGE, 3, ids=ids, count=True)
        with pytest.raises(errors.ConfigError, match=says):
            pk.graph.match("p(a) :- e(a, b)", {"e": EDGE}, ids=ids)
        with pytest.raises(errors.ConfigError, match=says):
            pk.graph.Index({"e": EDGE}, ids=ids)
        with pytest.raises(errors.ConfigError, match=says):
            pk.graph.Index.build(tmp_path / "e.graph", {"e": EDGE}, ids=ids)
    for edges in (path, str(path), [path]):
        with pytest.raises(errors.ConfigError, match=r"columns=\('a', 'b'\), but relation 'e' is read from files"):
            pk.graph.cliques(edges, 3, columns=("a", "b"))


def test_an_order_is_a_list_and_parts_are_at_least_one() -> None:
    index, text = pk.graph.Index({"e": EDGE}), "p(a, b) :- e(a, b)"
    for order in ("ab", "ba", 5, [1, 2], {"a", "b"}):
        calls: list[Any] = [
            lambda order=order: index.order(text, order),
            lambda order=order: index.units(text, 2, order),
            lambda order=order: index.count(text, order=order),
            lambda order=order: index.match(text, order=order),
        ]
        for call in calls:
            with pytest.raises(errors.ConfigError, match="must be a list of variables"):
                call()
    assert index.order(text, ("b", "a")) == ["b", "a"]
    for parts in (0, -1, 1.5, True, "2", 2**64):
        with pytest.raises(errors.ConfigError, match="parts="):
            index.units(text, parts)  # type: ignore[arg-type]


def test_a_unit_is_four_numbers() -> None:
    index, text = pk.graph.Index({"e": EDGE}), "p(a, b) :- e(a, b)"
    searches: list[Any] = [index.count, index.match]
    wrong: list[Any] = [(0, 0, 5), "abcd", 5, (0, 0, 1, 0, 0)]
    for unit in (*wrong, *((0, 0, end, 0) for end in (-1, 2**32, 1.5, True, "1"))):
        for search in searches:
            with pytest.raises(errors.ConfigError, match=re.escape(f"unit={unit!r} must be four ints")):
                search(text, unit=unit)
    [unit] = index.units(text, 1)
    # As they come back from JSON, too.
    assert index.count(text, unit=list(unit)).count == index.count(text).count  # type: ignore[arg-type]


def test_what_is_no_text_is_no_pattern() -> None:
    index = pk.graph.Index({"e": EDGE})
    calls: list[Any] = [
        pk.graph.Deltas,
        index.count,
        index.match,
        index.order,
        index.schema,
        lambda pattern: index.units(pattern, 2),
        lambda pattern: pk.graph.match(pattern, {"e": EDGE}),
    ]
    for call in calls:
        for pattern in (5, None, b"p(a) :- e(a, b)"):
            with pytest.raises(errors.ConfigError, match=f"a pattern is text, not {type(pattern).__name__}"):
                call(pattern)
    for atom in (("e", "x"), ("e", "x", "y", "z"), "exy", 5):
        with pytest.raises(errors.PatternError, match="must be three texts: relation, from, to"):
            pk.graph.pattern(["x"], atom)  # type: ignore[arg-type]
    for head in ("x", 5, [5]):
        with pytest.raises(errors.PatternError, match="the head is a list of variables"):
            pk.graph.pattern(head, pk.graph.atom("e", "x", "y"))  # type: ignore[arg-type]


# Running


def searching() -> int:
    """How many threads of searches this process has."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            count += (task / "comm").read_text().startswith("penstock-graph-")
    return count


def until(count: int) -> None:
    """Wait until there are so many."""
    deadline = time.monotonic() + 60
    while (now := searching()) != count:
        assert time.monotonic() < deadline, f"{now} threads"


def test_closing_early_stops_the_threads(graphs: Path) -> None:
    with pk.graph.cliques(graphs / "facebook_combined.txt.gz", 4, workers=2, batch_rows=100) as found:
        assert next(found).num_rows <= 100
        until(2)
    until(0)  # they are joined; the system may list them a moment longer
    assert list(found) == []


def test_progress_is_told(graphs: Path, figures: Mapping[str, Graph]) -> None:
    told: list[tuple[int, int]] = []
    count = pk.graph.cliques(
        graphs / "ca-GrQc.txt.gz", 3, count=True, progress=lambda behind, all: told.append((behind, all))
    )
    assert count == figures["ca-GrQc"].threes and told and told[-1][0] == told[-1][1] > 0


def test_progress_whose_iterator_ends_ends_no_search(graphs: Path) -> None:
    """To whoever iterates, StopIteration is the end of the rows."""
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        pk.graph.cliques(graphs / "ca-GrQc.txt.gz", 3, progress=lambda *_: next(iter([]))).to_table()
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("way", ["memory", "file"])
def test_an_interrupt_is_heard_within_a_batch(tmp_path: Path, way: str) -> None:
    """A builder that was broken off midway makes no index."""
    work = (
        "import signal, sys, pyarrow as pa, pyarrow.compute as pc\n"
        "from penstock import _native, errors\n"
        "folder, way = sys.argv[1:]\n"
        "class Heard(Exception):\n"
        "    pass\n"
        "def alarm(*_):\n"
        "    global inside\n"
        "    if inside:\n"
        "        inside = False\n"
        "        raise Heard\n"
        "def attempt(rows):\n"
        "    global inside\n"
        "    nodes = pc.cast(pa.array(range(rows)), pa.large_string())\n"
        "    batch = pa.record_batch({'a': nodes, 'b': nodes})\n"
        "    builders = {'file': (_native.GraphFileBuilder, folder, 1 << 20), 'memory': (_native.GraphBuilder,)}\n"
        "    new = builders[way][0]('text', *builders[way][1:])\n"
        "    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)\n"
        "    try:\n"
        "        inside = True\n"
        "        new.add('e', batch)\n"
        "        inside = False\n"
        "    except Heard:\n"
        "        pass\n"
        "    finally:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "    try:\n"
        "        new.add('e', batch.slice(0, 1))\n"
        "        return False\n"
        "    except errors.EngineError:\n"
        "        return True\n"
        "inside = False\n"
        "signal.signal(signal.SIGALRM, alarm)\n"
        "print(any(attempt(1000 << at) for at in range(6, 12)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", work, tmp_path, way], check=True, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "True\n"


def test_an_interrupt_ends_a_count() -> None:
    work = (
        "import itertools, pyarrow as pa, penstock as pk\n"
        "pairs = list(itertools.combinations(range(700), 2))\n"
        "edges = pa.table({'a': [a for a, _ in pairs], 'b': [b for _, b in pairs]})\n"
        "index = pk.graph.Index({'e': edges}, shape='degree')\n"
        "pattern = 'p(a, b, c, d, e, f, g, h, i) :- ' + ', '.join(\n"
        "    f'e({a}, {b})' for a, b in itertools.combinations('abcdefghi', 2))\n"
        "told = []\n"
        "def go(behind, of):\n"
        "    told or print('go', flush=True)\n"
        "    told.append(behind)\n"
        "index.count(pattern, progress=go)\n"
    )
    with subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"go\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert b"KeyboardInterrupt" in err


# The command


def _cliques(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["cliques", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_command_counts(graphs: Path, figures: Mapping[str, Graph], capsys: pytest.CaptureFixture[str]) -> None:
    for name, graph in figures.items():
        path = str(graphs / f"{name}.txt.gz")
        for size, directed in [("3", True), ("3", False), ("4", False)]:
            kind = [] if directed else ["--undirected"]
            facts = _cliques(
                capsys, "--size", size, "--input", path, "--count", *kind, "--batches", "2", "--workers", "2"
            )
            assert facts["count"] == cliques_of(graph, int(size), directed)
            assert facts["admitted_maximum"] <= 2 * 1024 and facts["batches_maximum"] <= 2
            assert facts["seconds"] > 0 and facts["peak_memory_bytes"] > 10**7


def test_the_command_writes_rows(
    graphs: Path, figures: Mapping[str, Graph], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.parquet"
    path = str(graphs / "ca-GrQc.txt.gz")
    facts = _cliques(capsys, "--size", "3", "--input", path, "--undirected", "--output", str(out))
    table = pq.read_table(out)
    assert table.column_names == ["a1", "a2", "a3"]
    assert table.num_rows == facts["count"] == figures["ca-GrQc"].threes
    assert os.listdir(tmp_path) == ["out.parquet"]


def test_the_command_refuses_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.txt"
    path.write_text("1 2\n2 x\n")
    good = ["--input", str(path)]
    for wrong, code, says in [
        (["--size", "1"], 2, "--size 1"),
        (["--size", "17"], 2, "--size 17: must be a whole number from 2 to 16"),
        (["--size", "2.5"], 2, "--size 2.5"),
        (["--output", str(path)], 2, "is the input"),
        (["--batches", "0"], 2, "--batches 0: must be a whole number from 1"),
        (["--batches", "-3"], 2, "--batches -3"),
        (["--batches", "1.5"], 2, "--batches 1.5"),
        (["--batch-size", "99999999999999999999"], 2, "--batch-size 9"),
        (["--workers", "many"], 2, "--workers many"),
        (["--host", "engine"], 2, "--host engine: must be one of local, spark"),
        (["--count", "--output", str(tmp_path / "o")], 2, "choose one"),
        (["--output", str(tmp_path / "none" / "o")], 2, "does not exist"),
        (["--input", str(tmp_path / "none")], 2, "does not exist"),
        ([], 1, "e.txt, line 2: node"),
    ]:
        assert main(["cliques", *good, *wrong]) == code, wrong
        captured = capsys.readouterr()
        assert captured.out == "" and says in captured.err and captured.err.count("\n") == 1, captured.err
    assert os.listdir(tmp_path) == ["e.txt"]
