"""``penstock nexmark``: NEXMark queries over a folder of tables."""

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
from penstock.cli.choices import Gap, Host, Strategy
from penstock.cli.common import (
    MOST_BATCH_ROWS,
    Report,
    UsageError,
    check_name_for_spark,
    check_output,
    local_host,
    number_option,
    parse_lateness,
    parse_move,
    parse_resizes,
    spark_session,
    whole_file,
    write_parquet,
)
from penstock.cli.engine import EPOCHS, engine_host
from penstock.workloads import nexmark as workload

__all__ = ["EPILOG", "nexmark"]

_BATCH_ROWS = 8192

EPILOG = """
**Queries**

`q1`: each bid in another currency: auction, bidder, price, date_time.

`q2`: bids on every 123rd auction: auction, price.

`q3`: people of three states and the auctions of category 10 that they sell: name, city, state, id.

`winning_bids`: the bid that each auction closes with: auction, seller, category, expires, price, bidder.

`q4`: average closing price of a category: category, sum_price, n, avg_price. `q4_stream`: the same after each closing.

`q5_beam`, `q5_mega`: the auctions with most bids per sliding window, all ties: window_start, window_end, auction, num.

`q6`: average of the last ten closing prices of a seller: seller, n, avg_price. `q6_stream`: after each closing.

`q7_beam`, `q7_mega`: the highest bids per window, all ties: window_start, window_end, price, auction, bidder,
date_time.

`q8_tumble`: people and what they sell in the window in which they came: window_start, window_end, id, name, auction,
reserve. `q8_horizon`: the same within a time after they came: id, name, auction, reserve, person_time, auction_time.

`_beam` and `_mega` differ in the lengths that params.json has for them.

**Examples**

`penstock nexmark --query q5_beam --input DIR --output out.parquet`

`penstock nexmark --query q7_mega --input DIR --output out.parquet --workers 2 --migrate 0:1@50% --json`

`penstock nexmark --query q3 --input DIR --output out.parquet --workers 2 --host engine --rescale 2:3@50%`

`penstock nexmark --query q5_mega --input LIVE --output out.parquet --lateness 10s`

`penstock nexmark --query q5_beam --input DIR --output out.parquet --host spark --workers 2`
"""


def nexmark(
    query: Annotated[str, typer.Option(help=f"Which query: {', '.join(workload.QUERIES)}.")],
    input: Annotated[
        Path,
        typer.Option(
            help="Folder with bid.parquet, auction.parquet and person.parquet, as the query needs, and params.json;"
            " `penstock events` makes one."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Parquet file to write; replaced when all went well.")],
    host: Annotated[
        Host, typer.Option(help="Where: this process, a Spark batch job, or resident beside a Spark stream.")
    ] = Host.local,
    workers: Annotated[
        int, number_option("--workers", 1, MOST_WORKERS, help="Workers, each with its share of the state.")
    ] = 1,
    lateness: Annotated[
        str,
        typer.Option(
            help="How far rows may be out of order in event time, such as 10s. The watermark is the"
            " greatest event time less this; later rows are counted and left out. 'auto' measures the files first, so"
            " that none is late. Batch jobs (--host spark) need none."
        ),
    ] = "auto",
    migrate: Annotated[
        Optional[list[str]],  # noqa: UP045 -- typer reads it at run time, also on Python 3.10
        typer.Option(
            metavar="FROM:TO@WHEN",
            help="Move the state of worker FROM to worker TO while the query runs. WHEN is a share of the"
            " input (50%) or a time since the start (2s). May be given more than once. Hosts local and engine.",
        ),
    ] = None,
    rescale: Annotated[
        Optional[list[str]],  # noqa: UP045 -- typer reads it at run time, also on Python 3.10
        typer.Option(
            metavar="FROM:TO@WHEN",
            help="Go from FROM to TO workers while the query runs, WHEN as for --migrate: 2:4@5s. May be given more"
            " than once, each from where the one before ends. Host engine.",
        ),
    ] = None,
    strategy: Annotated[
        Optional[Strategy],  # noqa: UP045 -- typer reads it at run time, also on Python 3.10
        typer.Option(
            help="How many bins --migrate moves at once: all, 16, one, or 16 of each pair of workers. Default batched."
        ),
    ] = None,
    gap: Annotated[
        Optional[Gap],  # noqa: UP045 -- typer reads it at run time, also on Python 3.10
        typer.Option(help="drain: between two steps of --migrate the rows that waited for the first go through."),
    ] = None,
    batch_rows: Annotated[
        Optional[int],  # noqa: UP045 -- typer reads it at run time, also on Python 3.10
        number_option(
            "--batch-rows",
            1,
            MOST_BATCH_ROWS,
            help="Input rows per epoch, at whose end the watermark moves; with --host engine at least an eighth of the"
            f" input. Default {_BATCH_ROWS}. Hosts local and engine.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Run a NEXMark query over an auction site and write its result as Parquet.

    The result is a bag of rows that depends on event time alone: the same for every host, any number of
    workers, any arrival order within --lateness, and with migrations on the way.
    """
    if query not in workload.QUERIES:
        raise UsageError(f"--query {query!r} is unknown; the queries are {', '.join(workload.QUERIES)}")
    if batch_rows is not None and host is Host.spark:
        raise UsageError("--batch-rows does not go with --host spark: a batch job has one epoch; use local or engine")
    batch_rows = _BATCH_ROWS if batch_rows is None else batch_rows
    late = None if lateness == "auto" else parse_lateness(lateness)
    if not input.is_dir():
        raise UsageError(f"--input {input}: is no folder; name the folder that holds the tables and params.json")
    if host is Host.spark:
        check_name_for_spark(input)
    check_output(output, [input / name for name in ("params.json", "person.parquet", "auction.parquet", "bid.parquet")])
    moves = [parse_move(text, workers) for text in migrate or []]
    if moves and host is Host.spark:
        raise UsageError(
            "--migrate does not go with --host spark: a batch job has no resident state; use local or engine"
        )
    told = strategy or gap
    strategy = strategy or Strategy.batched
    how = {"strategy": strategy.value, "gap": gap and gap.value}
    if gap is not None and strategy is Strategy.all_at_once:
        raise UsageError(f"--gap {gap.value} does not go with --strategy {strategy.value}: one step has no gap")
    if told and not moves:
        raise UsageError("--strategy and --gap say how --migrate moves state: give --migrate FROM:TO@WHEN as well")
    resizes = parse_resizes(rescale or [], workers)
    if resizes and host is not Host.engine:
        raise UsageError(
            f"--rescale does not go with --host {host.value}: only resident workers come and go; use --host engine"
        )
    if moves and resizes:
        raise UsageError("--migrate and --rescale: a rescale moves bins itself; give one of them")
    params = workload.load_params(input) if workload.takes_params(query) else {}
    flow = workload.flow(query, params, late or "0s")
    if moves and not flow.keyed:
        raise UsageError(f"--migrate does not go with --query {query}: it has no keyed step, whose state could move")
    if late is None and workload.takes_lateness(query) and host is not Host.spark:
        flow = workload.flow(query, params, f"{workload.disorder_ms(input, list(flow.sources))}ms")
    report = Report("nexmark", host.value, workers, str(output), more={"query": query})
    total = workload.rows(flow, input)
    begin = time.perf_counter()
    with whole_file(output) as part:
        if host is Host.local:
            results = local_host(
                flow,
                workload.read(flow, input, batch_rows),
                report,
                total=total,
                moves=moves,
                how=how,
                progress=not json and is_terminal(),
                batch_rows=batch_rows,
            )
        elif host is Host.spark:
            results = _spark(flow, input, report, total)
        else:
            results = engine_host(
                flow,
                workload.read(flow, input, batch_rows),
                report,
                file_rows=max(batch_rows, -(-total // EPOCHS)),
                moves=moves,
                how=how,
                resizes=resizes,
            )
        report.output_rows = write_parquet(results, flow.output_schema, part, output)
    report.seconds = time.perf_counter() - begin
    report.show(json)


def _spark(flow: Flow, folder: Path, report: Report, total: int) -> Iterator[pa.RecordBatch]:
    from penstock._schema import conform
    from penstock.spark._session.collect import to_table
    from penstock.spark.batch import run

    name = f"penstock nexmark {report.more['query']}"
    with spark_session(name, report.workers, report.workers) as (spark, _):
        table = to_table(run(flow, workload.read_spark(flow, folder, spark)))
    report.rows = total
    for batch in table.to_batches():
        yield conform(batch, flow.output_schema, "output")
