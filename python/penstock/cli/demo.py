"""``penstock demo``: the command's options; what it does is in `penstock.demo`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from penstock._extras import how_to_install
from penstock.cli.common import UsageError, number_option

__all__ = ["demo"]


def demo(
    seconds: Annotated[
        float,
        number_option(
            "--seconds",
            5,
            3600,
            kind=float,
            help="Least time for which bids are generated: it goes on until all moves are done. Start and check take"
            " about 40 s more.",
        ),
    ] = 20.0,
    rate: Annotated[int, number_option("--rate", 100, 1_000_000, help="Bids per second.")] = 20_000,
    bidders: Annotated[
        int,
        number_option("--bidders", 100, 10_000_000, help="Keys of the larger state; half a million are about 64 MB."),
    ] = 1_000_000,
    bits: Annotated[int, number_option("--bits", 2, 16, help="2**BITS bins hold the keyed state.")] = 8,
    output: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for report.html, timeline.png and timeline.json.")
    ] = Path("out"),
    plain: Annotated[bool, typer.Option(help="Plain lines instead of the live view.")] = False,
) -> None:
    """Run streaming queries that move their keyed state, lose a worker, grow and shrink while they run.

    Spark Structured Streaming over NEXMark bids computes hot items, and what each of a million bidders has bid,
    against two resident worker processes. Half of the keyed state moves to the other worker and back; a worker is
    killed and replaced; a third one comes and goes. At the end the output is compared with an independent computation.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise UsageError(f"the demo needs Spark: {how_to_install('spark')}")
    # It is made at the end: who stops the demo finds nothing.
    place = output.resolve()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not there.is_dir():
        raise UsageError(f"--output {output}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK):
        raise UsageError(f"--output {output}: the folder {there} is not writable")
    from penstock.demo import DemoConfig, main
    from penstock.demo.job import FILES
    from penstock.errors import JavaNotFound
    from penstock.spark._session.java import ensure_java

    for path in (place / name for name in FILES):
        if place.is_dir() and (not path.resolve().parent.is_dir() or (path.exists() and not path.is_file())):
            raise UsageError(f"--output {output}: {path} is no plain file; remove it, or name another folder")
    try:
        ensure_java()
    except JavaNotFound as error:
        raise UsageError(str(error)) from error
    config = DemoConfig(seconds=seconds, rate=rate, bidders=bidders, bits=bits, output=output)
    raise typer.Exit(main(config, plain=plain))
