"""``penstock bench``: the command's options; what it does is in `penstock_bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.common import UsageError
from penstock.errors import ConfigError
from penstock_bench import machine
from penstock_bench.catalogue import BENCHES, find
from penstock_bench.measure import Emit, Line, Options

__all__ = ["run"]

_MOST_S = 86_400.0
#: Columns of a table that goes into a file or a pipe.
_WIDTH = 120


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; what is wrong is raised, for `penstock.cli.main` to tell."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(bench)
    result = app(list(arguments), prog_name="penstock bench", standalone_mode=False)
    return result if isinstance(result, int) else 0


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Which bench; without it they are listed.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer or smaller cases: ends within 50 s.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Larger cases, too, of a bench that has any.")] = False,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Time for the whole bench; at least three repeats are made.")
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"CPUs to use, {machine.CORES} by default; from 4 on some have more workers."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of a table.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the benches.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Run all benches (about an hour and a half).")] = False,
    recorded: Annotated[
        Path | None,
        typer.Option("--record", metavar="FOLDER", help="Keep the results there and renew its page, README.md."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --all: measure what this commit and build have recorded already, too.")
    ] = False,
    fewer: Annotated[
        bool, typer.Option("--fewer", help="With --record: also where recorded cases are missing from this run.")
    ] = False,
) -> None:
    """Measure penstock beside its peers on this machine.

    Both sides do the same work on the same input and cores, in turn; but for the pause of `rescale`, where one
    runs after the other. A ratio above 1 means that ours is better by that factor, for times as for rates. Peers that
    are not installed are left out, each with a line that says so; `requirements/peers*.txt` say how to get those that
    need an environment of their own.
    """
    if seconds is not None and not 0 < seconds <= _MOST_S:
        raise UsageError(f"--seconds {seconds:g}: a number above 0, at most {_MOST_S:g}")
    if cores is not None and not 1 <= cores <= machine.cores():
        raise UsageError(f"--cores {cores}: from 1 to {machine.cores()}, which this process may use")
    if again and not every:
        raise UsageError("--again goes with --all; one bench that is named is always measured")
    if name is not None and every:
        raise UsageError(f"{name!r} and --all: name one bench, or run all")
    if name is None and not every and not listed:
        given = {"--record": recorded is not None, "--quick": quick, "--full": full, "--seconds": seconds is not None}
        given |= {"--cores": cores is not None, "--fewer": fewer}
        if any(given.values()):
            said = " and ".join(option for option, is_given in given.items() if is_given)
            raise UsageError(f"{said}: of which bench? Give its name, or --all; without both they are listed")
    if fewer and recorded is None:
        raise UsageError("--fewer goes with --record")
    if recorded is not None:
        if recorded.exists() and not recorded.is_dir():
            raise UsageError(f"--record {recorded}: is no folder; name one")
        if not recorded.resolve().parent.is_dir():
            raise UsageError(
                f"--record {recorded}: the folder {recorded.resolve().parent} does not exist; make it first"
            )
    if full and (quick or every):
        raise UsageError("--full goes with one bench that is named, without --quick")
    if every and cores is not None:
        raise UsageError("--cores goes with one bench that is named")
    options = Options(quick, seconds, full, cores or machine.CORES)
    if every:
        _all(recorded, options, again, fewer, as_json)
    elif listed or name is None:
        _list(as_json)
    else:
        _one(name, options, recorded, fewer, as_json)


def _list(as_json: bool) -> None:
    if as_json:
        for bench in BENCHES:
            print(json.dumps({"name": bench.name, "kind": bench.kind, "summary": bench.summary}))
        return
    width = max(len(bench.name) for bench in BENCHES)
    for bench in BENCHES:
        print(f"{bench.name:{width}}  {bench.summary}")


def _one(name: str, options: Options, recorded: Path | None, fewer: bool, as_json: bool) -> None:
    from penstock_bench import record, runner

    try:
        chosen = find(name)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    if recorded is not None:
        record.check(recorded, name, quick=options.quick)
    lines: list[Line] = []
    if chosen.kind != "core":
        _warn_of_dev_build()
    try:
        runner.run(chosen, options, _emit(lines, as_json), _tell)
    finally:
        if not as_json:
            _show(name, lines)
    if recorded is not None:
        recorded.mkdir(exist_ok=True)
        record.write(recorded, name, lines, fewer=fewer)


def _all(recorded: Path | None, options: Options, again: bool, fewer: bool, as_json: bool) -> None:
    from penstock_bench import record, runner

    if recorded is None:
        raise UsageError("--all needs --record FOLDER, where the results are kept and an interrupted run goes on")
    for bench in BENCHES:
        record.check(recorded, bench.name, quick=options.quick)
    lines: list[Line] = []
    _warn_of_dev_build()
    recorded.mkdir(exist_ok=True)
    failed = runner.run_all(recorded, options, again, _emit(lines, as_json), _tell, fewer=fewer)
    if not as_json:
        for bench in BENCHES:
            _show(bench.name, [line for line in lines if line["name"] == bench.name])
    _tell(f"the page is {recorded / 'README.md'}")
    if failed:
        _tell(f"failed: {', '.join(failed)}; run it again to go on with them")
        raise typer.Exit(1)


def _emit(lines: list[Line], as_json: bool) -> Emit:
    def emit(line: Line) -> None:
        lines.append(line)
        if as_json:
            print(json.dumps(line), flush=True)
        else:
            from penstock_bench.show import ratio

            _tell(f"{line['case']}: {ratio(line)}")

    return emit


def _show(name: str, lines: list[Line]) -> None:
    if lines:
        from rich.console import Console

        from penstock_bench.show import table

        console = Console()
        if not console.is_terminal:
            console.width = _WIDTH
        console.print(table(name, lines))


def _tell(text: str) -> None:
    print(f"penstock bench: {text}", file=sys.stderr, flush=True)


def _warn_of_dev_build() -> None:
    from penstock import _native

    if _native.profile() == "dev":
        _tell("the native module is a development build: its figures say nothing; run make setup")
