"""The program: its commands, its exit codes and the shape of its errors; see `penstock.cli`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from penstock.cli import bench, cliques, demo, events, nexmark, report, state, tpcxbb, wordcount
from penstock.cli.common import UsageError, one_line
from penstock.errors import ConfigError, PenstockError

__all__ = ["run"]

#: What the option parser says of a value that is none of an option's, over its releases.
_CHOICE = re.compile(r"Invalid value for '([^']+)': (?:Value error, )?'(.*)' is not one of (.*?)\.?$", re.DOTALL)

#: What errors of the library name an argument of its functions by, and the option that is the same here.
_OPTIONS = {'ids="text"': "--text"}

app = typer.Typer(
    name="penstock",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="bench", context_settings=bench.SETTINGS)(bench.bench)
app.command(name="cliques", epilog=cliques.EPILOG)(cliques.cliques)
app.command(name="demo")(demo.demo)
app.command(name="events", epilog=events.EPILOG)(events.events)
app.command(name="nexmark", epilog=nexmark.EPILOG)(nexmark.nexmark)
app.command(name="report")(report.report)
app.command(name="state", epilog=state.EPILOG)(state.state)
app.command(name="tpcxbb", epilog=tpcxbb.EPILOG)(tpcxbb.tpcxbb)
app.command(name="wordcount", epilog=wordcount.EPILOG)(wordcount.wordcount)


def _show_version(asked: bool) -> None:
    if asked:
        from penstock import _native

        print(f"penstock {_native.version()}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Dataflow with keyed state that moves while it runs: workloads to try it on.

    A workload runs in this process (`--host local`) or as a Spark batch job (`--host spark`), nexmark and
    wordcount also resident beside a Spark stream (`--host engine`), with the same results.
    """
    # `run` reads --debug, which it must know before anything is parsed; --version has its callback.
    del debug, version


def run(arguments: Sequence[str] | None) -> int:
    """See `penstock.cli.main`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    # Anywhere on the line is fine: people add it to the end of what failed.
    given = [word for word in given if word != "--debug"]
    _log(debug)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name or a value that the terminal's encoding lacks is escaped, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        # It is closed: Spark's start writes there, and what is opened next would stand in its place.
        while (last := os.open(os.devnull, os.O_RDWR)) < 2:
            pass
        if last > 2:
            os.close(last)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    try:
        _refuse_empty(given)
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")  # Spark warns of a JVM that Ctrl-C has ended, and the like
            result = app(given, prog_name="penstock", standalone_mode=False)
        if result == 130:  # newer parsers turn Ctrl-C into this exit code themselves
            raise KeyboardInterrupt
        # What does not get out is an error of ours, not of the interpreter's end.
        if sys.stdout is not None:  # it may have been closed before we began
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        # The reader of our output is gone; say nothing.
        _let_go()
        return 1
    except Exception as error:
        if debug and type(error).__name__ != "NoArgsIsHelpError":
            traceback.print_exc()
        error = _from_spark(error)
        if isinstance(error, OSError):
            try:
                if sys.stdout is not None:
                    sys.stdout.flush()
            except OSError:
                _let_go()
        if isinstance(error, UsageError):
            return _fail(str(error), 2)
        if isinstance(error, (PenstockError, OSError, TimeoutError)):
            # A file that an option leads to, and that is not there, is one that was named wrongly.
            misnamed = isinstance(error, ConfigError) and isinstance(error.__cause__, FileNotFoundError)
            return _fail(one_line(error), 2 if misnamed else 1)
        if type(error).__name__ == "Abort":
            raise KeyboardInterrupt from error
        # What the option parser raises has no common base over typer's releases.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _usage(error)
        return _fail(f"{one_line(error)} (this is not expected; --debug shows where)", 1)


def _refuse_empty(given: Sequence[str]) -> None:
    """Refuse empty words, such as of a variable that is not set: as a path they would mean the folder we are in."""
    for before, word in zip(["", *given], given, strict=False):
        option, told, value = word.partition("=")
        if word == "":
            option = before if before.startswith("-") else "an argument"
        elif not (option.startswith("--") and told and value == ""):
            continue
        raise UsageError(f"{option} is empty; give a value, or leave it out")


def _from_spark(error: Exception) -> Exception:
    """penstock's own error in what Spark raised for a failed job or query; else the error itself."""
    if "pyspark" not in sys.modules:
        return error
    from penstock.spark._tasks.failures import cause_of

    found = cause_of(error)
    if found is None or found is error:
        return error
    # Spark's text, which it was found in, is no reason of it.
    found.__cause__ = None
    return found


def _let_go() -> None:
    """Keep the interpreter from saying at its end that something cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _log(debug: bool) -> None:
    """Send logs to standard error when they are asked for, and nowhere otherwise.

    Libraries log the traceback of every call that Ctrl-C or an error cuts short; what matters of it, `run` says.
    """
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    elif not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())


def _usage(error: Exception) -> int:
    message = str(error.format_message())  # type: ignore[attr-defined]
    if choice := _CHOICE.match(message):
        option, given, choices = choice.groups()
        return _fail(f"{option} {given}: must be one of {choices.replace(chr(39), '')}", 2)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        return 2
    command = getattr(getattr(error, "ctx", None), "command_path", "penstock")
    return _fail(f"{' '.join(message.split())} (see {command} --help)", 2)


def _fail(message: str, code: int) -> int:
    for argument, option in _OPTIONS.items():
        message = message.replace(argument, option)
    # Of a name that is not UTF-8 the bytes are escaped, whatever standard error does with them.
    print(f"penstock: {message}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    return code
