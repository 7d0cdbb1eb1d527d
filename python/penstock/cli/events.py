"""``penstock events``: make a folder of NEXMark events, for ``penstock nexmark``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from penstock._stderr import is_terminal
from penstock.cli.common import UsageError, bar, check_name, interrupt_later, number_option, parquet_writer, writing

__all__ = ["EPILOG", "events"]

#: Events that are made at once: some tens of megabytes.
_PIECE = 100_000
_MOST_EVENTS = 1_000_000_000

_PARAMS = "params.json"
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
    with _whole_folder(output) as made:
        with bar(is_terminal(), count) as step:
            rows = _write(made, output, count, rate, out_of_order, step)
        with writing(output):
            (made / _PARAMS).write_text(json.dumps(_LENGTHS, indent=2) + "\n", encoding="utf-8")
    told = ", ".join(f"{number:,} of {name}" for name, number in rows.items())
    print(f"{count:,} events in {time.perf_counter() - began:.1f} s to {output}: {told}")


def _check(output: Path) -> None:
    check_name(output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output}: is a file; name a folder")
    if output.is_dir() and any(output.iterdir()):
        raise UsageError(f"--output {output}: the folder is not empty; name another one, or remove what is there")
    place = output.resolve()
    if not place.is_dir() and not place.parent.is_dir():
        raise UsageError(f"--output {output}: the folder {place.parent} does not exist; make it first")
    written = place if place.is_dir() else place.parent
    if not os.access(written, os.W_OK):
        raise UsageError(f"--output {output}: the folder {written} is not writable")


@contextlib.contextmanager
def _whole_folder(output: Path) -> Iterator[Path]:
    """Give a folder to write to, and put it in its place when all went well.

    An empty folder that is there stays the one that it is, since somebody may stand in it, or a disk be mounted there:
    what was made goes into it.
    """
    place = output.resolve()
    there = place.is_dir()
    made: Path | None = None
    try:
        with writing(output), interrupt_later():
            inside = place if there else place.parent
            made = Path(tempfile.mkdtemp(prefix=".penstock.", suffix=".part", dir=inside))
        yield made
        with writing(output), interrupt_later():
            if there:
                _move_out(made, place)
            else:
                umask = os.umask(0)
                os.umask(umask)
                made.chmod(0o777 & ~umask)
                os.replace(made, place)
    finally:
        with interrupt_later():
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)


def _move_out(made: Path, place: Path) -> None:
    """Move what was made into the folder around it; nothing of it stays there where that fails."""
    if len(os.listdir(place)) > 1:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    moved: list[Path] = []
    try:
        # What tells that all is there comes last.
        for path in sorted(made.iterdir(), key=lambda path: path.name == _PARAMS):
            os.replace(path, place / path.name)
            moved.append(place / path.name)
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _write(
    folder: Path, output: Path, count: int, rate: int, out_of_order: int, step: Callable[[int], Any]
) -> dict[str, int]:
    """The tables, a piece of each at a time; how many rows each has."""
    from penstock import _native

    source = _native.Nexmark(rate, stop=count, out_of_order=out_of_order)
    rows: dict[str, int] = {}
    writers: dict[str, Callable[[pa.RecordBatch], None]] = {}
    with contextlib.ExitStack() as closing:
        while source.position < count:
            for name, made in source.next_batches(_PIECE).items():
                batch = pa.record_batch(made)
                if name not in writers:
                    opened = parquet_writer(folder / f"{name}.parquet", batch.schema, output)
                    writers[name] = closing.enter_context(opened)
                writers[name](batch)
                rows[name] = rows.get(name, 0) + batch.num_rows
            step(min(source.position, count))
    return rows
