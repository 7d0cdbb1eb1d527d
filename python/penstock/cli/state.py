"""``penstock state``: what a checkpoint holds, shown or written to a file."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from penstock.cli.common import UsageError, check_output, number_option, whole_file, writing
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

__all__ = ["EPILOG", "Format", "state"]

EPILOG = """
**Examples**

`penstock state /data/checkpoint`

`penstock state s3://bucket/checkpoint --operator agg --limit 100`

`penstock state /data/checkpoint --batch 41 --format parquet --output state.parquet`

The checkpoint is read only, also while its query runs. `docs/checkpoint-format.md` describes its files.
"""

#: Rows that a table shows of an operator.
_SHOWN = 20
#: Spark counts batches in 64 bits.
_MOST_BATCH = 2**63 - 1
_MOST_ROWS = 1_000_000_000_000
#: Characters of a line where there is no terminal that would wrap it.
_WIDEST = 10_000


class Format(str, Enum):
    """What comes out."""

    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


def state(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint location of a streaming query, or the folder given as checkpoint= (FOLDER/. for that"
            " alone); a path or URL.",
            show_default=False,
        ),
    ],
    operator: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Only this operator: its name, or its kind where one has it. Default all."),
    ] = None,
    batch: Annotated[
        Optional[int],  # noqa: UP045
        number_option("--batch", 0, _MOST_BATCH, help="State at the end of this batch. Default the newest."),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        number_option(
            "--limit",
            1,
            _MOST_ROWS,
            help=f"At most so many rows of an operator. Default {_SHOWN} in a table, else all.",
        ),
    ] = None,
    format: Annotated[
        Format,
        typer.Option(help="table: manifests, operators and rows for people. Others: the rows of one operator."),
    ] = Format.table,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="File to write csv, json (one object a line) or parquet to. Default standard output."),
    ] = None,
    unpickle: Annotated[
        bool,
        typer.Option(
            "--unpickle",
            help="Make values of Python functions by whatever code their pickles name: only if you trust who wrote the"
            " checkpoint. Without, values of builtin types are shown, others by their size.",
        ),
    ] = False,
) -> None:
    """Show what a checkpoint holds: batches that can be restored, operators with their sizes, keys and values.

    Values are what a step would say if its input ended now: aggregates by key, with the window where there is one; the
    rows of a top, and those that a join keeps; the state of a Python function.
    """
    if format is Format.table:
        if output is not None:
            raise UsageError(f"--output {output}: a table is for people; add --format csv, json or parquet")
        with _named_wrongly():
            _show(checkpoint, operator, batch, limit or _SHOWN, unpickle)
        return
    if output is not None:
        check_output(output)
    elif format is Format.parquet:
        raise UsageError("--format parquet needs --output FILE")
    from penstock import state as reading

    with _named_wrongly():
        table = reading.read(checkpoint, operator, batch, limit=limit, unpickle=unpickle)
    if output is None:
        if sys.stdout is not None:  # it may have been closed before we began
            _write(table, format, sys.stdout.buffer)
        return
    with whole_file(output) as part, writing(output), open(part, "wb") as sink:
        _write(table, format, sink)
    print(f"wrote {table.num_rows:,} rows to {output}")


@contextlib.contextmanager
def _named_wrongly() -> Iterator[None]:
    """A checkpoint, an operator or a batch that is not there is one that the command line named wrongly."""
    try:
        yield
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise  # a store that cannot be reached
        raise UsageError(str(error)) from error


def _write(table: pa.Table, format: Format, sink: Any) -> None:
    if format is Format.parquet:
        from pyarrow import parquet

        parquet.write_table(table, sink)
    elif format is Format.csv:
        from pyarrow import csv

        csv.write_csv(_flat(table), sink)
    else:
        for block in table.to_batches():
            for row in _rows(block):
                sink.write(_dumps(row, ensure_ascii=False).encode() + b"\n")


def _flat(table: pa.Table) -> pa.Table:
    """What a cell of CSV cannot hold, as JSON has it: what is nested as its text, bytes in hexadecimal, a time that
    Python has none for as a number."""
    import pyarrow as pa
    from pyarrow import types

    def told(value: Any) -> str | None:
        return value if value is None or isinstance(value, str) else _json(value)

    for at, field in enumerate(table.schema):
        kind = field.type
        if types.is_nested(kind):
            texts = [None if one is None else _dumps(one) for one in _values(table[at])]
        elif _is_binary(kind) or types.is_string_view(kind):
            texts = [told(one) for one in table[at].to_pylist()]
        elif (types.is_timestamp(kind) or types.is_date(kind)) and _is_beyond(table[at]):
            usual = table[at].cast(pa.string()).to_pylist()
            pairs = zip(_values(table[at]), usual, strict=True)
            texts = [str(one) if isinstance(one, int) else text for one, text in pairs]
        else:
            continue
        table = table.set_column(at, field.name, pa.array(texts, pa.string()))
    return table


def _is_beyond(times: pa.ChunkedArray) -> bool:
    """Whether Python has no time for some of them."""
    import pyarrow.compute as pc

    try:
        pc.min_max(times).as_py()
    except (OverflowError, ValueError):
        return True
    return False


def _is_binary(kind: pa.DataType) -> bool:
    from pyarrow import types

    return any(
        test(kind)
        for test in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    )


def _rows(block: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """Rows as Python has them; a time that Python has none for is a number of its unit."""
    columns = [_values(column) for column in block.columns]
    return (dict(zip(block.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def _values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError):
        return [_value(one) for one in column]


def _value(scalar: pa.Scalar) -> Any:
    import pyarrow as pa

    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(one) for name, one in scalar.items()}
        if isinstance(scalar, pa.MapScalar):
            return [(_value(one[0]), _value(one[1])) for one in scalar.values]
        if isinstance(scalar, pa.ListScalar):  # of any kind
            return [_value(one) for one in scalar.values]
        if not hasattr(scalar, "value"):
            raise
        # That of a dictionary or of an extension type is another scalar.
        return _value(scalar.value) if isinstance(scalar.value, pa.Scalar) else scalar.value


def _dumps(value: Any, ensure_ascii: bool = True) -> str:
    try:
        return json.dumps(value, default=_json, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=_json, ensure_ascii=ensure_ascii)


def _finite(value: Any) -> Any:
    """The value with the floats that JSON has no numbers for as text, as Spark writes them."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def _json(value: Any) -> str:
    if isinstance(value, (datetime.date, datetime.time)):  # datetimes are dates
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _show(checkpoint: str, operator: str | None, batch: int | None, limit: int, unpickle: bool) -> None:
    from rich.console import Console

    from penstock import state as reading

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDEST
    tables = [("Manifests", _of_manifests(reading.manifests(checkpoint)))]
    try:
        operators = reading.operators(checkpoint, batch)
        tables.append(("Operators", operators))
        for name in operators["name"].to_pylist() if operator is None else [operator]:
            rows = reading.read(checkpoint, name, batch, limit=limit + 1, unpickle=unpickle)
            more = f", the first {limit}" if rows.num_rows > limit else ""
            tables.append((f"{name}{more}", rows.slice(0, limit)))
    except ConfigError:
        tables = []  # there is no such batch or operator
        raise
    finally:
        # Of a damaged checkpoint what can be read.
        for title, rows in tables:
            _table(console, title, rows)


def _of_manifests(rows: pa.Table) -> pa.Table:
    """What people look for, without what no manifest has."""
    rows = rows.drop_columns(["name", "generation", "plan"])
    rows = rows.rename_columns(["late" if name == "late_rows" else name for name in rows.column_names])
    return rows.drop_columns([name for name in ("finished", "watermark", "problem") if not any(rows[name].to_pylist())])


def _table(console: Console, title: str, rows: pa.Table) -> None:
    """A table, or where its words do not fit beside each other the columns of each row below each other."""
    import pyarrow as pa
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    columns = [(field.name, _values(column)) for field, column in zip(rows.schema, rows.columns, strict=True)]
    texts = [[name, *map(_cell, values)] for name, values in columns]

    def fits(length: Callable[[str], int]) -> bool:
        return sum(max(map(length, column)) + 3 for column in texts) < console.width

    def longest_word(text: str) -> int:
        return max(map(cell_len, text.split()), default=0)

    if not fits(cell_len):
        texts = [_without_date(name, values) or column for (name, values), column in zip(columns, texts, strict=True)]
    # Text, since what is in brackets is markup otherwise. A title of the table's own is as wide as that at most.
    console.print(Text(title, style="table.title"))
    if not fits(longest_word):
        for cells in list(zip(*texts, strict=True))[1:]:
            block = Table.grid("", "", padding=(0, 2))
            for (name, *_), cell in zip(texts, cells, strict=True):
                block.add_row(Text(name.replace("\n", " "), style="table.header"), Text(cell, overflow="fold"))
            console.print(block)
            console.print()
        return
    shown = Table()
    for field, column in zip(rows.schema, texts, strict=True):
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
        # Only columns of several words become narrower.
        whole = all(len(text.split()) < 2 for text in column)
        shown.add_column(Text(column[0]), justify="right" if number else "left", overflow="fold", no_wrap=whole)
    for cells in list(zip(*texts, strict=True))[1:]:
        shown.add_row(*map(Text, cells))
    console.print(shown)


def _without_date(name: str, values: Sequence[Any]) -> list[str] | None:
    """A column of times of one day: the day beside its name, and the times; None for others."""
    times = [value for value in values if value is not None]
    if not times or not all(isinstance(time, datetime.datetime) for time in times):
        return None
    days = {time.strftime("%Y-%m-%d %Z").strip() for time in times}
    if len(days) > 1:
        return None
    shown = ("" if time is None else _cell(time.replace(tzinfo=None)).partition(" ")[2] for time in values)
    return [f"{name}\n{days.pop()}", *shown]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ", timespec="milliseconds" if value.microsecond else "seconds")
    return str(value)
