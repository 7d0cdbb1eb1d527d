"""``penstock tpcxbb``: TPCx-BB queries over ordered streams of clicks and sales."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Optional

import pyarrow as pa
import typer

from penstock._stderr import is_terminal
from penstock.cli.choices import Mode, Queue, Scheduler, Where
from penstock.cli.common import (
    MOST_BATCH_ROWS,
    Report,
    UsageError,
    bar,
    check_name_for_spark,
    check_output,
    number_option,
    spark_session,
    whole_file,
    write_parquet,
)
from penstock.errors import ConfigError, SchemaError
from penstock.workloads import tpcxbb as workload
from penstock.workloads.tpcxbb.tables import CLICKS, ITEM, PAGE, SALES

__all__ = ["EPILOG", "tpcxbb"]

_BATCH_ROWS = 8192
#: No machine has more, and each is a thread or a process.
_MOST_WORKERS = 256

EPILOG = """
**Queries**

`q1_pairs`, `q1`: items sold on one ticket, and the 100 pairs sold together most often: item_sk_1, item_sk_2, cnt.

`q2_sessions`: clicks on items with the session of their user: seq, wcs_user_sk, wcs_item_sk, session.

`q2_pairs`, `q2`: items viewed in a session with one, and the 30 viewed most often: item_sk_1, item_sk_2, cnt.

`q3_views`: the last views before each purchase of an item: purchase_seq, view_seq, lastviewed_item.

`q3`: the 100 items viewed most often before it: purchased_item, lastviewed_item, cnt.

`q4_carts`: sessions that end with an abandoned cart: wcs_user_sk, session, pages, last_seq.

`q4`: how many there are and how long: pages, sessions, avg_pages.

`q15_all`: a line through the daily sales of each category: cat, n, sx, sy, sxy, sxx, slope, intercept.

`q15`: the categories that do not grow: cat, slope, intercept.

q1, q2_sessions, q2, q3 and q15 are written in their order, the others as a bag. The queries need params.json,
web_clickstreams.parquet or store_sales.parquet, and most of them item.parquet or web_page.parquet;
`docs/tpcxbb.md` has their columns and an example of params.json.

**Examples**

`penstock tpcxbb --query q2_sessions --input DIR --output out.parquet`

`penstock tpcxbb --query q1 --input DIR --output out.parquet --workers 2 --mode processes --json`

`penstock tpcxbb --query q4 --input DIR --output out.parquet --workers 2 --queue partitioned --scheduler et`

`penstock tpcxbb --query q3 --input DIR --output out.parquet --host spark --workers 2`
"""


def tpcxbb(
    query: Annotated[str, typer.Option(help=f"Which output: {', '.join(workload.QUERIES)}.")],
    input: Annotated[Path, typer.Option(help="Folder with params.json and the tables, one Parquet file each.")],
    output: Annotated[Path, typer.Option(help="Parquet file to write; replaced when all went well.")],
    host: Annotated[Where, typer.Option(help="Where: this process, or one task of a Spark job.")] = Where.local,
    workers: Annotated[int, number_option("--workers", 1, _MOST_WORKERS, help="Workers of the pipeline.")] = 1,
    queue: Annotated[
        Queue,
        typer.Option(
            help="How rows wait for the worker of their key: in the order of their arrival (hybrid), or a queue for"
            " each partition of keys by itself."
        ),
    ] = Queue.hybrid,
    scheduler: Annotated[
        Scheduler,
        typer.Option(
            help="Which operator a free worker serves: the earliest with room behind it (qst), the latest with work"
            " (lip), the one with most work (et), the slowest (ct), or what measures best (adaptive)."
        ),
    ] = Scheduler.adaptive,
    mode: Annotated[
        Mode,
        typer.Option(help="Where the steps run: as measured while running (auto), in the caller, threads, processes."),
    ] = Mode.auto,
    batch_rows: Annotated[
        Optional[int],  # noqa: UP045 -- typer reads it at run time, also on Python 3.10
        number_option(
            "--batch-rows",
            1,
            MOST_BATCH_ROWS,
            help=f"Rows of the stream that are read at once. Default {_BATCH_ROWS}. Host local.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Run a TPCx-BB query as an ordered pipeline over a stream of clicks or sales, and write its result as Parquet.

    The result is that of one pass over the rows in the order of their seq: the same for every host, any number of
    workers, each queue, each scheduler and each mode.
    """
    try:
        asked = workload.find(query)
    except ConfigError as error:
        raise UsageError(f"--query: {error}") from error
    if batch_rows is not None and host is not Where.local:
        raise UsageError("--batch-rows does not go with --host spark: Spark gives a task its rows; use --host local")
    batch_rows = _BATCH_ROWS if batch_rows is None else batch_rows
    if not input.is_dir():
        raise UsageError(f"--input {input}: is no folder; name the folder that holds params.json and the tables")
    if host is Where.spark:
        check_name_for_spark(input)
    tables = (CLICKS, SALES, ITEM, PAGE)
    check_output(output, [input / "params.json", *(input / f"{table.name}.parquet" for table in tables)])
    # Auto may choose processes.
    elsewhere = mode in (Mode.auto, Mode.processes)
    report = Report("tpcxbb", host.value, workers, str(output), elsewhere=elsewhere)
    how = {"mode": mode.value, "scheduler": scheduler.value, "queue": queue.value}
    report.more = {"query": query, **how}
    try:
        report.rows = workload.check(asked, input)
    except (ConfigError, SchemaError) as error:
        error.add_detail("(docs/tpcxbb.md describes the tables and params.json)")
        raise
    begin = time.perf_counter()
    with whole_file(output) as part:
        if host is Where.local:
            with bar(not json and is_terminal(), report.rows) as step:
                results = workload.run_local(asked, input, workers=workers, batch_rows=batch_rows, step=step, **how)
                with contextlib.closing(results):
                    report.output_rows = _write(results, asked.schema, part, output)
        else:
            with spark_session(f"penstock tpcxbb {query}", workers, workers) as (spark, _):
                table = workload.run_spark(asked, input, spark, workers=workers, **how)
            report.output_rows = _write(table.to_batches(), table.schema, part, output)
    report.seconds = time.perf_counter() - begin
    report.show(json)


def _write(results: Iterable[pa.RecordBatch], schema: pa.Schema, part: Path, output: Path) -> int:
    """Write as it comes; sums that may be wide are few, and wait for all of them to tell their type."""
    if any(pa.types.is_decimal(kind) for kind in schema.types):
        table = workload.narrow(pa.Table.from_batches(results, schema))
        results, schema = table.to_batches(), table.schema
    return write_parquet(results, schema, part, output)
