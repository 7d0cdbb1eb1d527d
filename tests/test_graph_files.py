"""Index files: built of edges that need not fit in memory, and shared by the executors of a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from penstock import errors
from penstock.spark._graph import hosted
from penstock.spark._graph.hosted import meeting_place, opened

TRIANGLE = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"


def rows(batches: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for batch in batches for row in batch.to_pylist())


# Building


@pytest.mark.parametrize("shape", ["both", "forward", "degree", "degeneracy"])
def test_a_file_is_what_memory_makes(tmp_path: Path, graphs: Path, shape: Any) -> None:
    edges = {"e": graphs / "wiki-Vote.txt.gz"}
    small = pk.graph.Index(edges, self_loops="drop", shape=shape)
    large = pk.graph.Index.build(tmp_path / "e.graph", edges, self_loops="drop", shape=shape, memory=1 << 20)
    assert (large.nodes, large.edges, large.ids, large.sets) == (small.nodes, small.edges, small.ids, small.sets)
    order = ["a", "b", "c"]
    assert large.count(TRIANGLE, order=order).count == small.count(TRIANGLE, order=order).count
    assert large.units(TRIANGLE, 9, order) == small.units(TRIANGLE, 9, order)
    assert os.listdir(tmp_path) == ["e.graph"]


def test_names_and_several_relations(tmp_path: Path) -> None:
    def batches(shift: int) -> Iterator[pa.RecordBatch]:
        for first in range(0, 20_000, 1000):
            begin = [f"n{node * 7919 % 5003}" for node in range(first, first + 1000)]
            end = [f"n{(node * 104_729 + shift) % 5003}" for node in range(first, first + 1000)]
            yield pa.record_batch({"a": begin, "b": end})

    index = pk.graph.Index.build(tmp_path / "g", {"e": batches(1), "f": batches(3)}, memory=1 << 20)
    pattern = "p(x, y, z) :- e(x, y), f(y, z)"
    assert index.ids == "text" and index.nodes == 5003
    wanted = pk.graph.match(pattern, {"e": batches(1), "f": batches(3)})
    assert rows(index.match(pattern)) == rows(wanted)


def test_what_is_wrong_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "e.graph"
    good = pa.table({"a": [1], "b": [2]})
    for edges, options, says in [
        (pa.table({"a": [1, None], "b": [1, 2]}), {}, "null in row 1 of the relation"),
        (pa.table({"a": [1.5], "b": [2]}), {}, "nodes are integers or text"),
        (pa.table({"a": [3], "b": [3]}), {"self_loops": "refuse"}, "self-loop at 3"),
        (good, {"memory": 1000}, "memory=1000"),
        (good, {"memory": 1.5e9}, "memory="),
        (good, {"shape": "round"}, "shape='round'"),
    ]:
        with pytest.raises((errors.SchemaError, errors.ConfigError), match=says):
            pk.graph.Index.build(path, {"e": edges}, **options)  # type: ignore[arg-type]
    with pytest.raises(errors.StorageError):
        pk.graph.Index.build(tmp_path / "none" / "e.graph", {"e": good})
    assert os.listdir(tmp_path) == []


def test_a_file_does_not_replace_the_edges_that_it_is_made_of(tmp_path: Path) -> None:
    edges = tmp_path / "e.txt"
    edges.write_text("1 2\n2 3\n")
    (tmp_path / "link").symlink_to(edges)
    for path, given in ((edges, str(edges)), (tmp_path / "link", edges), (edges, [str(edges)])):
        with pytest.raises(errors.ConfigError, match="relation 'e' are read from it; name another file"):
            pk.graph.Index.build(path, {"e": given})  # type: ignore[dict-item]
        assert edges.read_text() == "1 2\n2 3\n"
    for _ in range(2):
        assert pk.graph.Index.build(tmp_path / "e.graph", {"e": edges}).nodes == 3
    with pytest.raises(errors.StorageError, match=r"is a folder; name the file that Index\.build"):
        pk.graph.Index.open(tmp_path)


def test_more_relations_than_a_file_has_are_refused(tmp_path: Path) -> None:
    edges = pa.table({"a": [1], "b": [2]})
    relations = {f"r{number}": edges for number in range(4098)}
    says = "4098 relations for one index file: there may be at most 4096"
    index = pk.graph.Index(relations, shape="forward")
    with pytest.raises(errors.SchemaError, match=says):
        index.save(tmp_path / "g")
    with pytest.raises(errors.SchemaError, match=says):
        pk.graph.Index.build(tmp_path / "g", relations)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("work", ["save", "build"])
def test_nothing_comes_after_an_interrupt(tmp_path: Path, work: str) -> None:
    """Long names make a large file of few edges. The interrupt comes when its first byte is there."""
    script = (
        "import os, sys, time, pyarrow as pa, penstock as pk\n"
        "folder, work = sys.argv[1:]\n"
        "path = folder + '/e.graph'\n"
        "small = pk.graph.Index({'e': pa.table({'a': [1], 'b': [2]})})\n"
        "edges = {'e': pa.table({'a': [chr(97 + at) * (4 << 20) for at in range(26)], 'b': ['b'] * 26})}\n"
        "index = pk.graph.Index(edges) if work == 'save' else None\n"
        "try:\n"
        "    print('go', flush=True)\n"
        "    index.save(path) if index else pk.graph.Index.build(path, edges, memory=8 << 30)\n"
        "    print('no interrupt')\n"
        "except KeyboardInterrupt:\n"
        "    left = os.listdir(folder)\n"
        "    small.save(path)\n"
        "    time.sleep(0.3)\n"
        "    print(*left, '|', *os.listdir(folder), pk.graph.Index.open(path).nodes)\n"
    )
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        command = [sys.executable, "-c", script, str(folder), work]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stderr is not None
            assert child.stdout.readline() == b"go\n"
            while child.poll() is None and not any(".part" in name for name in os.listdir(folder)):
                time.sleep(0.001)
            child.send_signal(signal.SIGINT)
            child.wait(timeout=120)
            # Not communicate: it leaves what was read ahead with the first line.
            out, err = child.stdout.read(), child.stderr.read()
        if b"no interrupt" not in out:  # else this process stood still for as long as the file takes
            break
    assert (out.split(), child.returncode) == ([b"|", b"e.graph", b"2"], 0), err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory of a process, as Linux tells it")
def test_memory_does_not_grow_with_the_edges(tmp_path: Path) -> None:
    """In processes of their own: many edges of the same nodes take about the memory that few take."""
    work = (
        "import resource, sys\n"
        "import numpy as np, pyarrow as pa, penstock as pk\n"
        "def batches(count):\n"
        "    random = np.random.default_rng(1)\n"
        "    for _ in range(count):\n"
        "        yield pa.record_batch({end: random.integers(0, 20_000, 10_000) for end in 'ab'})\n"
        "index = pk.graph.Index.build(sys.argv[1], {'e': batches(int(sys.argv[2]))}, memory=2 << 20)\n"
        "index.units('p(a, b, c) :- e(a, b), e(b, c)', 16)\n"
        "print(index.edges['e'], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )

    def run(count: int) -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", work, tmp_path / f"{count}.graph", str(count)], check=True, capture_output=True
        )
        edges, peak = done.stdout.split()
        return int(edges), int(peak) << 10

    few, small = run(10)
    many, large = run(100)
    assert many > 8 * few
    # Held in memory an edge is 16 bytes, and 8 to 40 more while it is sorted.
    assert large - small < 16 * (many - few), (small, large)


# One copy per host


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "host").mkdir()
    return tmp_path / "host"


def executor(host: Path, name: str, content: bytes = b"whole") -> Path:
    folder = host / name
    folder.mkdir()
    (folder / "g").write_bytes(content)
    return folder / "g"


def read(path: Path) -> bytes:
    """Open a file as an index is opened: damage is an error."""
    content = path.read_bytes()
    if content != b"whole":
        raise errors.StorageError(f"{path} is damaged")
    return content


def test_executors_of_a_host_have_one_file(host: Path) -> None:
    owns = [executor(host, f"executor-{number}") for number in range(3)]
    place = meeting_place(str(host))
    assert place is not None and place.parent == host and place.stat().st_mode & 0o077 == 0
    for own in [*owns, *owns]:
        assert opened(own, "digest", place, read) == b"whole"
    assert len({own.stat().st_ino for own in owns}) == 1
    # The first executor ends, another one comes, and the last of them takes the file along.
    owns[0].unlink()
    late = executor(host, "executor-3")
    assert opened(late, "digest", place, read) == b"whole"
    assert opened(owns[1], "digest", place, read) == b"whole"
    assert owns[1].stat().st_ino == late.stat().st_ino
    for own in [*owns[1:], late]:
        own.unlink()
    other = executor(host, "executor-4")
    assert opened(other, "another", place, read) == b"whole"
    assert sorted(os.listdir(place)) == [".lock", "another.graph"]


def test_two_executors_that_find_a_link_to_nowhere_have_one_file(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One left it when it ended. Both see that; the first takes its place before the second does."""
    first, second = executor(host, "executor-1"), executor(host, "executor-2")
    place = meeting_place(str(host))
    assert place is not None
    (place / "digest.graph").symlink_to(host / "gone")
    taken = hosted._taken

    def late(target: Path, own: Path, open: Any) -> Any:
        try:
            return taken(target, own, open)
        except FileNotFoundError:
            if own == second:
                assert opened(first, "digest", place, read) == b"whole"
            raise

    monkeypatch.setattr(hosted, "_taken", late)
    assert opened(second, "digest", place, read) == b"whole"
    assert os.readlink(place / "digest.graph") == str(first) and second.samefile(first)


def test_a_file_that_is_not_whole_is_never_taken(host: Path) -> None:
    half, whole = executor(host, "executor-0", b"who"), executor(host, "executor-1")
    wrong = executor(host, "executor-2", b"wrong")
    place = meeting_place(str(host))
    assert place is not None
    for bad in (half, wrong, host):
        (place / "digest.graph").unlink(missing_ok=True)
        (place / "digest.graph").symlink_to(bad)
        assert opened(whole, "digest", place, read) == b"whole" and whole.stat().st_nlink == 1
        assert os.readlink(place / "digest.graph") == str(whole)
    with pytest.raises(errors.StorageError, match="damaged"):
        opened(half, "half", place, read)


def test_a_meeting_place_of_somebody_else_is_not_used(host: Path) -> None:
    inside = host / "spark-1" / "executor-2" / "blockmgr-3" / "0f"
    inside.mkdir(parents=True)
    place = meeting_place(str(inside))
    assert place is not None and place.parent == host
    place.chmod(0o777)
    assert meeting_place(str(inside)) != place
    own = executor(host, "executor-0")
    assert opened(own, "digest", None, read) == b"whole"
