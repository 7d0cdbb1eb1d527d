"""``penstock cliques``: the cliques of a graph, counted or written to a file."""

from __future__ import annotations

import contextlib
import json as json_text
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import pyarrow as pa
import typer

from penstock._stderr import is_terminal
from penstock.cli.choices import Where
from penstock.cli.common import (
    UsageError,
    check_output,
    number_option,
    peak_bytes,
    spark_session,
    whole_file,
    write_parquet,
)
from penstock.graph._index import Index
from penstock.graph._options import MOST, Options, Progress
from penstock.graph._patterns import RELATION, clique

__all__ = ["EPILOG", "cliques"]

_MOST_WORKERS = 4096

EPILOG = """
**Examples**

`penstock cliques --size 3 --input edges.txt.gz --undirected --count`

`penstock cliques --size 4 --input edges.txt.gz --output cliques.parquet --workers 2 --json`

`penstock cliques --size 4 --input edges.txt --count --host spark --workers 4`
"""


@dataclass
class _Found:
    """What a run gives."""

    count: int
    nodes: int
    edges: int
    admitted_maximum: int | None
    batches_maximum: int | None
    #: When the graph was there, and the most memory until then, where this process has it.
    loaded_at: float
    loaded_peak: int | None


def cliques(
    input: Annotated[
        list[Path], typer.Option(help="Edge list, gzip or plain: two nodes per line. Give it again for more files.")
    ],
    size: Annotated[int, number_option("--size", 2, 16, help="Nodes per clique.")] = 3,
    undirected: Annotated[
        bool,
        typer.Option(
            "--undirected",
            help="Edges have no direction, each set of nodes counts once. Otherwise edges as they stand: every order of"
            " the nodes in which each has an edge to every later one. (`pk.graph.cliques` of Python is undirected"
            " unless it is told `directed=True`.)",
        ),
    ] = False,
    count: Annotated[bool, typer.Option("--count", help="Only count: the default without --output.")] = False,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Parquet file of cliques to write; replaced where there is one."),
    ] = None,
    host: Annotated[Where, typer.Option(help="Where: threads of this process, or tasks of a Spark job.")] = Where.local,
    batches: Annotated[
        int,
        number_option(
            "--batches",
            1,
            MOST,
            help="N: at most so many batches of partial results are open and unfinished at a time, over all workers."
            " The search is depth first: a batch is a range of first edges (pairs of nodes) whose cliques are being"
            " searched, and what lies below them is one list per worker and level whatever N is. So N bounds how many"
            " workers search at once and, with --output, the rows that wait (two batches of 8,192 per N), not"
            " intermediate results, of which there are none. On Spark: per task.",
        ),
    ] = 64,
    batch_size: Annotated[int, number_option("--batch-size", 1, MOST, help="B: first edges per batch.")] = 1024,
    workers: Annotated[
        int, number_option("--workers", 1, _MOST_WORKERS, help="Threads, or tasks of the Spark job at a time.")
    ] = 1,
    text: Annotated[bool, typer.Option("--text", help="Nodes are names, not numbers.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Find the cliques of a graph: 3 nodes for triangles, 4, 5 and so on.

    Self-loops and repeated edges of the input do not count. Memory holds the graph and never its cliques, however many
    there are.
    """
    options = Options(workers, batches, batch_size)
    if count and output is not None:
        raise UsageError(f"--count and --output {output}: choose one; the number of rows is told with --output, too")
    for path in input:
        if not path.is_file():
            problem = "is a folder; name the files in it" if path.is_dir() else "does not exist"
            if path.exists() and not path.is_dir():
                problem = "is a device or a pipe; name a plain file"
            raise UsageError(f"--input {path}: {problem}")
    if output is not None:
        check_output(output, input)
    show = not json and is_terminal()
    begin = time.perf_counter()
    how = {
        "ids": "text" if text else "number",
        "self_loops": "drop",
        "shape": "degree" if undirected else "forward",
    }
    edges = {RELATION: [str(path) for path in input]}
    run = _local if host is Where.local else _spark
    found = run(edges, size, options, output, show, how)
    loaded = found.loaded_at - begin
    seconds = time.perf_counter() - begin
    peak = None if host is Where.spark else peak_bytes()
    facts: dict[str, Any] = {
        "command": "cliques",
        "host": host.value,
        "size": size,
        "undirected": undirected,
        "workers": workers,
        "batches": batches,
        "batch_size": batch_size,
        "nodes": found.nodes,
        "edges": found.edges,
        "count": found.count,
        "seconds": round(seconds, 6),
        "load_seconds": round(loaded, 6),
        "search_seconds": round(seconds - loaded, 6),
        "admitted_maximum": found.admitted_maximum,
        "batches_maximum": found.batches_maximum,
        "peak_memory_bytes": peak,
        "loaded_peak_memory_bytes": found.loaded_peak,
        "output": None if output is None else str(output),
    }
    if json:
        print(json_text.dumps(facts))
        return
    kind, what = "undirected" if undirected else "directed", "clique" if found.count == 1 else "cliques"
    print(
        f"{found.count:,} {kind} {what} of {size} nodes in {_many(found.nodes, 'node')} and"
        f" {_many(found.edges, 'edge')}, {seconds:.2f} s ({loaded:.2f} s to load)"
        + ("" if peak is None else f", {peak / 2**20:,.0f} MiB at most")
        + ("" if output is None else f", written to {output}")
    )


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _local(
    edges: dict[str, Any], size: int, options: Options, output: Path | None, show: bool, how: dict[str, Any]
) -> _Found:
    index = Index(edges, **how)
    loaded = time.perf_counter(), peak_bytes()
    pattern, order = clique(size)
    with _bar(show, "nodes") as progress:
        if output is None:
            done = index.count(pattern, order=order, options=options, progress=progress)
        else:
            with index.match(pattern, order=order, options=options, progress=progress) as matches:
                _write(matches, matches.schema, output)
            found = matches.stats()
            assert found is not None, "all matches were taken"
            done = found
    total = sum(index.edges.values())
    return _Found(done.count, index.nodes, total, done.admitted_maximum, done.batches_maximum, *loaded)


@contextlib.contextmanager
def _bar(show: bool, what: str) -> Iterator[Progress | None]:
    """A bar of the first nodes or the tasks that are behind, on standard error."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda behind, all: bar.update(task, completed=behind, total=all)


def _write(batches: Any, schema: pa.Schema, output: Path) -> int:
    with whole_file(output) as part:
        return write_parquet(batches, schema, part, output)


def _spark(
    edges: dict[str, Any], size: int, options: Options, output: Path | None, show: bool, how: dict[str, Any]
) -> _Found:
    from penstock._schema import conform
    from penstock.spark import graph

    pattern, order = clique(size)
    with spark_session("penstock cliques", options.threads, options.threads) as (spark, folder):
        per_task = Options(1, options.batches, options.batch_size, options.batch_rows)
        job = graph.Job(spark, edges, pattern, order, per_task, **how)
        loaded = time.perf_counter(), None
        with _bar(show, "tasks") as progress:
            if output is None:
                done = job.counted(progress)
                return _Found(done.count, job.nodes, job.edges, done.admitted_maximum, done.batches_maximum, *loaded)
            batches = (conform(batch, job.schema, "cliques") for batch in graph.written(job, folder, progress))
            rows = _write(batches, job.schema, output)
    return _Found(rows, job.nodes, job.edges, None, None, *loaded)
