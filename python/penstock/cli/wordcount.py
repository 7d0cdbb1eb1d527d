"""``penstock wordcount``: count the words of text files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Optional

import pyarrow as pa
import typer

from penstock._flow import Flow
from penstock._local import MOST_WORKERS
from penstock._stderr import is_terminal
from penstock.cli.choices import Host
from penstock.cli.common import (
    Report,
    UsageError,
    check_name_for_spark,
    check_output,
    local_host,
    number_option,
    spark_session,
    whole_file,
    writing,
)
from penstock.cli.engine import engine_host
from penstock.workloads import wordcount as workload

__all__ = ["EPILOG", "wordcount"]

#: Chunks of text per epoch of the engine host, a few megabytes.
_CHUNKS_PER_EPOCH = 16
#: Names at whose end Spark decompresses, beside ``.gz``.
_SPARK_UNZIPS = {".bz2", ".deflate", ".lz4", ".snappy", ".zst", ".zstd"}

EPILOG = """
**Examples**

`penstock wordcount --input book.txt.gz --output counts.tsv`

`penstock wordcount --input a.txt.gz b.txt.gz --output counts.tsv --workers 2 --json`

`penstock wordcount --input book.txt.gz --output counts.tsv --host spark --workers 2`
"""


def wordcount(
    input: Annotated[
        list[Path],
        typer.Option(help="Text file, gzip or plain. More files may follow, or give the option again."),
    ],
    output: Annotated[Path, typer.Option(help="File to write: word TAB count, sorted bytewise.")],
    more: Annotated[Optional[list[Path]], typer.Argument(metavar="[FILE]...", help="More files.")] = None,  # noqa: UP045
    host: Annotated[
        Host, typer.Option(help="Where: this process, a Spark batch job, or resident beside a Spark stream.")
    ] = Host.local,
    workers: Annotated[
        int, number_option("--workers", 1, MOST_WORKERS, help="Workers, each with its share of the words.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Count the words of text files.

    A word is a run of the letters A-Z and a-z, lower-cased; everything else separates. Files are read as a
    stream: memory holds the distinct words, never a whole file.
    """
    files = [*input, *(more or [])]
    for path in files:
        if not path.is_file():
            problem = "is a folder; name the files in it" if path.is_dir() else "does not exist"
            if path.exists() and not path.is_dir():
                problem = "is a device or a pipe; name a plain file"
            raise UsageError(f"--input {path}: {problem}")
    check_output(output, files)
    for path in files:
        workload.check(path)
    if host is Host.spark:
        _check_spark(files)
    flow = workload.flow()
    report = Report("wordcount", host.value, workers, str(output), rows_name="words")
    report.more = {"files": len(files)}
    begin = time.perf_counter()
    with whole_file(output) as part:
        if host is Host.local:
            results = local_host(
                flow,
                workload.read(files),
                report,
                total=0,
                progress=not json and is_terminal(),
                batch_rows=1,
            )
        elif host is Host.spark:
            results = _spark(flow, files, report)
        else:
            results = engine_host(flow, workload.read(files), report, file_rows=_CHUNKS_PER_EPOCH)
        counts = pa.Table.from_batches(results, schema=flow.output_schema)
        text = workload.to_tsv(counts)
        with writing(output):
            part.write_bytes(text)
    report.rows = sum(counts.column("count").to_pylist())
    report.output_rows = counts.num_rows
    report.seconds = time.perf_counter() - begin
    report.show(json)


def _check_spark(files: list[Path]) -> None:
    """Refuse files that Spark, which goes by names, would read otherwise than the other hosts."""
    for path in files:
        check_name_for_spark(path)
        name = path.name
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        problem = None
        if zipped and path.suffix != ".gz":
            problem = "it is gzip and not named so, and Spark goes by the name"
        elif path.suffix in _SPARK_UNZIPS:
            problem = f"Spark would decompress a file named {path.suffix}; the other hosts read it as it is"
        elif name.startswith(("_", ".")):
            problem = "Spark reads no file whose name begins with _ or ."
        elif ":" in name:
            problem = "Spark reads no file whose name has a colon"
        if problem is not None:
            raise UsageError(f"--input {path}: {problem}; rename it, or use --host local or engine")


def _spark(flow: Flow, files: list[Path], report: Report) -> Iterator[pa.RecordBatch]:
    from penstock._schema import conform
    from penstock.spark._session.collect import to_table
    from penstock.spark.batch import run

    with spark_session("penstock wordcount", report.workers, report.workers) as (spark, _):
        table = to_table(run(flow, workload.read_spark(files, spark)))
    for batch in table.to_batches():
        yield conform(batch, flow.output_schema, "output")
