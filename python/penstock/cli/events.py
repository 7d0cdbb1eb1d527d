"""``penstock events``: make a folder of NEXMark events, for ``penstock nexmark``."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from penstock._stderr import is_terminal
from penstock.cli.common import UsageError, bar, number_option, writing

__all__ = ["EPILOG", "events"]

#: Events that are made at once: some tens of megabytes.
_PIECE = 100_000
_MOST_EVENTS = 1_000_000_000

#: Lengths of windows, as docs/nexmark.md names them.
_LENGTHS = {
    "q5_beam": {"size_ms": 10_000, "period_ms": 5_000},
    "q5_mega": {"size_ms": 60_000, "period_ms": 1_000},
    "q7_beam": {"size_ms": 10_000},
    "q7_mega": {"size_ms": 60_000},
    "q8_tumble": {"size_ms": 10_000},
    "q8_horizon": {"horizon_ms": 120_000},
}

EPILOG = """
**Examples**

`penstock events --output auctions`

`penstock events --output auctions --events 10000000 --out-of-order 50`

`penstock nexmark --query q4 --input auctions --output q4.parquet --workers 2`
"""


def events(
    output: Annotated[Path, typer.Option(help="Folder to make; it must not be there, or be empty.")],
    count: Annotated[
        int,
        number_option("--events", 1, _MOST_EVENTS, help="Of 50, one is a person, three are auctions, 46 are bids."),
    ] = 1_000_000,
    rate: Annotated[int, number_option("--rate", 1, 10_000_000, help="Events per second of event time.")] = 10_000,
    out_of_order: Annotated[
        int,
        number_option(
            "--out-of-order", 1, 1_000_000, help="Every group of so many events comes in a scrambled order; 1 for none."
        ),
    ] = 1,
) -> None:
    """Make the events of an auction site: the tables that `penstock nexmark` reads.

    The same arguments give the same events. A million are some 100 MB and take a few seconds.
    """
    _check(output)
    began = time.perf_counter()
    folder = output.resolve()
    with writing(output):
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        with writing(output):
            with bar(is_terminal(), count) as step:
                rows = _write(made, count, rate, out_of_order, step)
            (made / "params.json").write_text(json.dumps(_LENGTHS, indent=2) + "\n", encoding="utf-8")
            umask = os.umask(0)
            os.umask(umask)
            made.chmod(0o777 & ~umask)
            os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    told = ", ".join(f"{number:,} of {name}" for name, number in rows.items())
    print(f"{count:,} events in {time.perf_counter() - began:.1f} s to {output}: {told}")


def _check(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output}: is a file; name a folder")
    if output.is_dir() and any(output.iterdir()):
        raise UsageError(f"--output {output}: the folder is not empty; name another one, or remove what is there")
    parent = output.resolve().parent
    if not parent.is_dir():
        raise UsageError(f"--output {output}: the folder {parent} does not exist; make it first")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"--output {output}: the folder {parent} is not writable")


def _write(folder: Path, count: int, rate: int, out_of_order: int, step: Callable[[int], Any]) -> dict[str, int]:
    """The tables, a piece of each at a time; how many rows each has."""
    import pyarrow.parquet as pq

    from penstock import _native

    source = _native.Nexmark(rate, stop=count, out_of_order=out_of_order)
    rows: dict[str, int] = {}
    writers: dict[str, pq.ParquetWriter] = {}
    try:
        while source.position < count:
            for name, made in source.next_batches(_PIECE).items():
                batch = pa.record_batch(made)
                if name not in writers:
                    writers[name] = pq.ParquetWriter(folder / f"{name}.parquet", batch.schema)
                writers[name].write_batch(batch)
                rows[name] = rows.get(name, 0) + batch.num_rows
            step(min(source.position, count))
    finally:
        for writer in writers.values():
            writer.close()
    return rows
