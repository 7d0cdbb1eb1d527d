"""What the commands share: options, outputs that appear whole or not at all, Spark, reports.

Invariant: whatever ends a command (an error, Ctrl-C), no partial output file and no temporary
file stays behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import typer

from penstock._durations import format_duration, lateness_ms, parse_duration
from penstock._extras import how_to_install
from penstock._flow import Flow
from penstock._local import MOST_WORKERS, LocalMigration, LocalSession, batches
from penstock._migration import MigrationReport
from penstock.cli.choices import Host
from penstock.errors import ConfigError
from penstock.workloads.paths import is_utf_8

#: What a command reads: batches, or those of each source by its name.
Source = Iterator[pa.RecordBatch] | Mapping[str, Iterator[pa.RecordBatch]]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "MOST_BATCH_ROWS",
    "Move",
    "Report",
    "Resize",
    "UsageError",
    "When",
    "bar",
    "check_name_for_spark",
    "check_output",
    "interrupt_later",
    "local_host",
    "number_option",
    "one_line",
    "parquet_writer",
    "parse_move",
    "parse_resizes",
    "peak_bytes",
    "spark_session",
    "whole_file",
    "write_parquet",
    "writing",
]

#: Rows that are read at once; more than memory holds is the whole input.
MOST_BATCH_ROWS = 1_000_000_000

_MOVE = re.compile(r"([0-9]+):([0-9]+)@(.+)")
#: Digits of a number that is looked at: Python makes none of thousands.
_DIGITS = 9


class UsageError(Exception):
    """The command line is wrong; the message names the option, the value and what to do."""


@dataclass(frozen=True)
class When:
    """When something starts.

    Attributes
    ----------
    share : float or None
        Share of the input, 0 to 1, after which it does.
    after_s : float or None
        Seconds of the run after which it does.
    """

    share: float | None
    after_s: float | None

    def due(self, rows: int, total: int, seconds: float) -> bool:
        """Tell whether it is time to start."""
        if self.share is not None:
            return rows >= self.share * total
        return self.after_s is not None and seconds >= self.after_s

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.share is not None else f"{self.after_s:g}s"


@dataclass(frozen=True)
class Move:
    """One ``--migrate`` option.

    Attributes
    ----------
    source, target : int
        Worker numbers.
    when : When
        When it starts.
    """

    source: int
    target: int
    when: When

    def take(self, owners: list[int]) -> list[tuple[int, int]]:
        """The moves of all bins that `source` has, as (bin, worker); `owners` becomes what holds after them."""
        moves = [(number, self.target) for number, owner in enumerate(owners) if owner == self.source]
        for number, worker in moves:
            owners[number] = worker
        return moves

    def __str__(self) -> str:
        return f"{self.source}:{self.target}@{self.when}"


@dataclass(frozen=True)
class Resize:
    """One ``--rescale`` option.

    Attributes
    ----------
    before, after : int
        Numbers of workers.
    when : When
        When it starts.
    """

    before: int
    after: int
    when: When

    def __str__(self) -> str:
        return f"{self.before}:{self.after}@{self.when}"


def peak_bytes() -> int:
    """Most memory that this process ever had resident, as the system saw it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


@dataclass
class Report:
    """What a command did; printed as text or as one JSON object.

    `rows_name` is what people call the rows. `elsewhere`: whether processes beside this one may have done the work, as
    they do on every host but local; then nobody knows the peak of their memory.
    """

    command: str
    host: str
    workers: int
    output: str
    rows: int = 0
    output_rows: int = 0
    late_rows: int = 0
    seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)
    migrations: list[dict[str, Any]] = field(default_factory=list)
    rescales: list[dict[str, Any]] = field(default_factory=list)
    rows_name: str = "rows"
    elsewhere: bool = False

    def to_json(self) -> str:
        """Return the report as one line of JSON."""
        elsewhere = self.elsewhere or self.host != Host.local.value
        return json.dumps(
            {
                "command": self.command,
                **self.more,
                "host": self.host,
                "workers": self.workers,
                "rows": self.rows,
                "seconds": round(self.seconds, 6),
                "rows_per_second": round(self.rows / self.seconds) if self.seconds else 0,
                "output_rows": self.output_rows,
                "late_rows": self.late_rows,
                "migrations": self.migrations,
                **({"rescales": self.rescales} if self.rescales else {}),
                "peak_memory_bytes": None if elsewhere else peak_bytes(),
                "output": self.output,
            }
        )

    def not_started(self, moves: Sequence[Move | Resize]) -> None:
        """Tell that the input ended before these."""
        for move in moves:
            option = "--migrate" if isinstance(move, Move) else "--rescale"
            print(f"penstock: {option} {move} did not start: the input ended before", file=sys.stderr)

    def show(self, as_json: bool) -> None:
        """Print the report, and on stderr what the user should know about late rows."""
        if as_json:
            print(self.to_json())
        else:
            rate = self.rows / self.seconds if self.seconds else 0.0
            print(
                f"{self.rows:,} {self.rows_name} in {self.seconds:.2f} s ({rate:,.0f}/s),"
                f" {self.output_rows:,} rows to {self.output}"
            )
            for move in self.migrations:
                print(
                    f"migration {move['migrate']} ({move['strategy']}): {move['moved']} bins,"
                    f" {move['bytes']:,} bytes, {move['seconds'] * 1e3:.1f} ms in {move['steps']} steps"
                )
            for resize in self.rescales:
                print(
                    f"rescale {resize['rescale']}: {resize['workers']} workers, {resize['bins']} bins,"
                    f" {resize['seconds']:.2f} s"
                )
        if self.late_rows:
            print(
                f"penstock: {self.late_rows} of {self.rows} rows came after their windows had closed, or have no event"
                " time, and are in no result; raise --lateness to the disorder of the input, for example --lateness"
                " 10s, and fill event times in where they are null",
                file=sys.stderr,
            )


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, with the cause of a failed user function."""
    text = " ".join(str(error).split()) or type(error).__name__
    cause = error.__cause__
    if cause is not None and type(error).__name__ == "UserFunctionError":
        reason = " ".join(str(cause).split())
        if reason not in text:
            text += f" ({type(cause).__name__}: {reason})"
    return text


def parse_move(text: str, workers: int) -> Move:
    """Read ``FROM:TO@WHEN``.

    Parameters
    ----------
    text : str
        WHEN is a share of the input (``50%``) or a time since the start (``2s``).
    workers : int
        How many workers there are.

    Returns
    -------
    Move
        What to do when.

    Raises
    ------
    UsageError
        When the text is something else, or names a worker that does not exist.

    Examples
    --------
    >>> print(parse_move("0:1@50%", workers=2))
    0:1@50%
    """
    match = _MOVE.fullmatch(text)
    if match is None:
        raise UsageError(f"--migrate {text!r}: write FROM:TO@WHEN, for example 0:1@50% or 0:1@2s")
    source, target, when = _number(match.group(1)), _number(match.group(2)), match.group(3)
    for worker, told in ((source, match.group(1)), (target, match.group(2))):
        if worker >= workers:
            raise UsageError(
                f"--migrate {text!r}: worker {told} does not exist;"
                f" with --workers {workers} they are 0 to {workers - 1}"
            )
    if source == target:
        raise UsageError(f"--migrate {text!r}: both workers are {source}; name two different ones")
    return Move(source, target, _parse_when(f"--migrate {text!r}", when))


def _number(digits: str) -> int:
    """The number, or one that is greater than any of workers."""
    return int(digits) if len(digits) <= _DIGITS else 10**_DIGITS


def _parse_when(option: str, when: str) -> When:
    """A share of the input, or a time since the start."""
    if when.endswith("%"):
        try:
            share = float(when[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise UsageError(f"{option}: {when!r} is no share of the input; write 0% to 100%")
        return When(share, None)
    try:
        return When(None, parse_duration(when, "time", allow_zero=True) / 1e6)
    except ConfigError as error:
        raise UsageError(f"{option}: {error}; or a share of the input such as 50%") from error


def parse_resizes(texts: Sequence[str], workers: int) -> list[Resize]:
    """Read all ``FROM:TO@WHEN`` of ``--rescale``, in their order.

    Parameters
    ----------
    texts : sequence of str
        WHEN as for `parse_move`; each begins with the number of workers that the one before ends with.
    workers : int
        How many there are at first.

    Raises
    ------
    UsageError
        When a text is something else, or does not begin where the one before ends.

    Examples
    --------
    >>> [str(one) for one in parse_resizes(["2:4@5s", "4:1@50%"], workers=2)]
    ['2:4@5s', '4:1@50%']
    """
    found: list[Resize] = []
    for text in texts:
        match = _MOVE.fullmatch(text)
        if match is None:
            raise UsageError(f"--rescale {text!r}: write FROM:TO@WHEN, for example 2:4@50% or 2:4@5s")
        before, after = _number(match.group(1)), _number(match.group(2))
        there = found[-1].after if found else workers
        if before != there:
            why = f"--rescale {found[-1]}" if found else f"--workers {workers}"
            raise UsageError(f"--rescale {text!r}: there are {there} workers then, after {why}; begin with {there}:")
        if after < 1:
            raise UsageError(f"--rescale {text!r}: at least 1 worker has to stay")
        if after > MOST_WORKERS:
            raise UsageError(f"--rescale {text!r}: there are at most {MOST_WORKERS} workers")
        if before == after:
            raise UsageError(f"--rescale {text!r}: both numbers are {before}; name two different ones")
        found.append(Resize(before, after, _parse_when(f"--rescale {text!r}", match.group(3))))
    return found


def parse_lateness(text: str) -> str:
    """Check ``--lateness`` and return it in one spelling."""
    try:
        return format_duration(1_000 * lateness_ms(text, "--lateness"))
    except ConfigError as error:
        raise UsageError(str(error)) from error


def number_option(option: str, least: int, most: int, *, help: str, kind: type[int] | type[float] = int) -> Any:
    """An option that is a number in a range; the messages of the option parser hide the value.

    Parameters
    ----------
    option : str
        Its name, such as ``--workers``.
    least, most : int
        The range.
    help : str
        What it is; the range is added.
    kind : type
        int or float.

    Returns
    -------
    typer.Option
        For the annotation of a parameter of this type.
    """

    def read(given: Any) -> Any:
        if not isinstance(given, str):
            return given  # a default
        try:
            number: int | float = kind(given)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            whole = "whole " if kind is int else ""
            raise UsageError(f"{option} {given}: must be a {whole}number from {least} to {most}")
        return number

    return typer.Option(option, parser=read, metavar="N", help=f"{help} From {least} to {most}.")


def check_output(output: Path, inputs: Iterable[Path] = (), option: str = "--output") -> None:
    """Refuse an output that cannot be written or is one of the inputs, before any work is done."""
    check_name(output, option)
    if output.is_dir():
        raise UsageError(f"{option} {output}: is a folder; name a file")
    if output.exists() and not output.is_file():
        # A device or a pipe would be replaced by the new file, not written to.
        raise UsageError(f"{option} {output}: is a device or a pipe; name a plain file")
    folder = output.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {output}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {output}: the folder {folder} is not writable")
    if output.exists() and any(path.exists() and output.samefile(path) for path in inputs):
        raise UsageError(f"{option} {output}: is the input; name another file")


def check_name(output: Path, option: str = "--output") -> None:
    """Refuse an output whose name no file can have, as one that is too long."""
    with writing(output, option), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        output.stat()


def check_name_for_spark(path: Path) -> None:
    """Refuse an input that Spark cannot be told of, before it is started."""
    whole = path.absolute()
    if not is_utf_8(whole):
        raise UsageError(
            f"--input {path}: {str(whole)!r} is not UTF-8, in which Spark has names; rename it, or use --host local"
        )


@contextlib.contextmanager
def writing(output: Path, option: str = "--output") -> Iterator[None]:
    """Say of which output it is that something cannot be written: the system names a file that nobody asked for, or
    none."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        raise OSError(f"{option} {output}: cannot be written: {reason}") from error


@contextlib.contextmanager
def whole_file(output: Path, option: str = "--output") -> Iterator[Path]:
    """Give a path to write to, and move it to its place when all went well.

    Parameters
    ----------
    output : Path
        Where the file shall be.
    option : str, default "--output"
        What names it, for errors.

    Yields
    ------
    Path
        A new file in the same folder; gone, if anything goes wrong. A link stays, what it leads to is replaced, and
        the new file has the mode of the one that was there.
    """
    place = output.resolve()
    part: Path | None = None
    try:
        with writing(output, option), interrupt_later():
            handle, name = tempfile.mkstemp(prefix=".penstock.", suffix=".part", dir=place.parent)
            os.close(handle)
            part = Path(name)
        yield part
        with writing(output, option):
            part.chmod(_mode_of(place))
            os.replace(part, place)
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _mode_of(place: Path) -> int:
    """Who may read and write a file that comes here: as of the one that it replaces, else of any that is made."""
    with contextlib.suppress(FileNotFoundError):
        return place.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


@contextlib.contextmanager
def parquet_writer(part: Path, schema: pa.Schema, output: Path) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Write Parquet to `part`, which stands for `output` in errors; yields what takes batches."""
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as closing:

        def close(writer: Any) -> None:
            with writing(output):
                writer.close()

        with writing(output):
            # By its name pyarrow opens a file only where that is UTF-8.
            sink = pa.OSFile(os.fsencode(part), "wb")
        closing.callback(close, sink)
        with writing(output):
            writer = pq.ParquetWriter(sink, schema)
        closing.callback(close, writer)

        def write(batch: pa.RecordBatch) -> None:
            with writing(output):
                writer.write_batch(batch)

        yield write


def write_parquet(results: Iterable[pa.RecordBatch], schema: pa.Schema, part: Path, output: Path) -> int:
    """Write results as they come to `part`, which `whole_file` gives for `output`; how many rows there were."""
    count = 0
    with parquet_writer(part, schema, output) as write:
        for batch in results:
            write(batch)
            count += batch.num_rows
    return count


def local_host(
    flow: Flow,
    source: Source,
    report: Report,
    *,
    total: int,
    progress: bool,
    batch_rows: int,
    moves: Sequence[Move] = (),
    how: Mapping[str, Any] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Run a flow on threads of this process as a stream, with migrations on the way.

    Parameters
    ----------
    flow : Flow
        What to compute.
    source : iterator of pyarrow.RecordBatch, or dict of str to such an iterator
        The input; by the name of the source, where the flow has several.
    report : Report
        Gets the late rows and the migrations.
    total : int
        Rows of the input, for migrations at a share of it and for the progress bar.
    progress : bool
        Show a progress bar.
    batch_rows : int
        Rows per epoch at most.
    moves : sequence of Move
        Migrations to start on the way.
    how : mapping
        Options of `LocalSession.migrate` for them.

    Yields
    ------
    pyarrow.RecordBatch
        Results.
    """

    def late(batch: pa.RecordBatch) -> None:
        report.late_rows += batch.num_rows

    with (
        LocalSession(flow, report.workers, late=late, batch_rows=batch_rows, streaming=True) as session,
        bar(progress, total) as step,
    ):
        fed = _fed(session, flow, source, report, total, moves, how or {}, batch_rows)
        for batch in session.run(fed):
            step(session.rows)
            yield batch


def _fed(
    session: LocalSession,
    flow: Flow,
    source: Source,
    report: Report,
    total: int,
    moves: Sequence[Move],
    how: Mapping[str, Any],
    batch_rows: int,
) -> dict[str, Iterator[pa.RecordBatch]]:
    begin = time.perf_counter()
    waiting = list(moves)
    owners: list[int] = []
    running: list[tuple[Move, LocalMigration]] = []
    #: Each source is read in a thread of its own.
    taking = threading.Lock()

    def start() -> None:
        for move in list(waiting):
            if move.when.due(report.rows, total, time.perf_counter() - begin):
                waiting.remove(move)
                owners[:] = owners or first_step(session.owners())
                running.append((move, session.migrate(moves=move.take(owners), **how)))

    schemas = flow.sources
    given = source if isinstance(source, Mapping) else dict.fromkeys(schemas, source)
    still = set(given)

    def read(name: str) -> Iterator[pa.RecordBatch]:
        for batch in batches(given[name], schemas[name], batch_rows):
            with taking:
                start()
                report.rows += batch.num_rows
            yield batch
        with taking:
            still.remove(name)
            if still:
                return
            start()
        for move, migration in running:
            report.migrations.append(told_of(move, migration.wait()))
        report.not_started(waiting)

    return {name: read(name) for name in given}


def first_step(owners: list[list[int]]) -> list[int]:
    """Owners of the bins in the first keyed step, which all others have, too; none without a keyed step."""
    return list(owners[0]) if owners else []


def told_of(move: Move, done: MigrationReport) -> dict[str, Any]:
    """Return what is worth telling of a finished migration."""
    return {
        "migrate": str(move),
        "strategy": done.strategy,
        "moved": done.bins,
        "bytes": done.bytes,
        "steps": len(done.steps),
        "seconds": (done.steps[-1].ended_ns - done.steps[0].started_ns) / 1e9 if done.steps else 0.0,
    }


@contextlib.contextmanager
def spark_session(
    name: str, slots: int, workers: int, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[SparkSession, Path]]:
    """Start a local Spark session for a command, and leave nothing of it behind.

    Parameters
    ----------
    name : str
        Application name.
    slots : int
        Tasks that run at once.
    workers : int
        Partitions of shuffles.
    settings : mapping of str to str, optional
        More settings of Spark.

    Yields
    ------
    session : pyspark.sql.SparkSession
        Classic.
    folder : Path
        For temporary files; removed at the end.

    Raises
    ------
    UsageError
        When Spark is not installed, or no Java is there for it.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise UsageError(f"--host spark and engine need Spark: {how_to_install('spark')}")
    from penstock.errors import JavaNotFound
    from penstock.spark._session.session import private_session

    chosen = {"spark.sql.shuffle.partitions": str(workers)} | dict(settings or {})
    with tempfile.TemporaryDirectory(prefix="penstock-") as name_of_folder:
        folder = Path(name_of_folder)
        with contextlib.ExitStack() as stack:
            # Started from the main thread, Spark would put a handler of its own for Ctrl-C, and leave it there.
            with interrupt_later(), ThreadPoolExecutor(1) as thread:
                try:
                    entered = thread.submit(stack.enter_context, private_session(folder, name, slots, chosen))
                    session = entered.result()
                except JavaNotFound as error:
                    raise UsageError(str(error)) from error
                ours = stack.pop_all()
            try:
                yield session, folder
            except BaseException:
                with interrupt_later():
                    ours.__exit__(*sys.exc_info())
                raise
            with interrupt_later():
                ours.close()


@contextlib.contextmanager
def interrupt_later() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done: what is half made or half ended, a JVM or a file, would stay behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = False

    def hold(*_: object) -> None:
        nonlocal held
        held = True

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            raise KeyboardInterrupt


@contextlib.contextmanager
def bar(progress: bool, total: int) -> Iterator[Any]:
    """Show a progress bar while the block runs, if asked to; yields what takes the rows that are done."""
    if not progress:
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=total or None)
        yield lambda rows: bar.update(task, completed=rows)
