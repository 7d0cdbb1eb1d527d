"""User functions of a flow, as the native workers call them.

Owns the wrapping: what a function receives, what it may return, and how its exception becomes a
`UserFunctionError` that names the step, the user's file and line, and the failing row. The native module makes one
call object per entry of a plan's `calls` and knows nothing else of Python.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Final

import pyarrow as pa

from penstock._coroutines import UNRUN, unrun
from penstock._functions.aggregating import AggregateCall
from penstock._functions.expand import FlatMapCall
from penstock._functions.groups import GroupStateCall
from penstock._functions.loop import RETURNS, BrokenOff, behind, is_of_copy, misreturned, row_loop
from penstock._functions.owned import Made, Marks, Origin, Owner, parted
from penstock._functions.rows import rows_of
from penstock._functions.short import short
from penstock._functions.state import BinState, uncopied
from penstock._functions.timed import TimedCall
from penstock._schema import to_arrow, to_ddl
from penstock._sides import Declared, Side, number_of
from penstock.errors import SchemaError, UserFunctionError

__all__ = ["BrokenOff", "MapCall", "StatefulCall", "bind", "locate"]


#: Types that are made without more, by their names, and what makes them where that is called otherwise.
_PLAIN: Final = {
    "null": "null",
    "bool": "bool_",
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    **{name: name for size in (8, 16, 32, 64) for name in (f"int{size}", f"uint{size}")},
    **{f"{size}{name}": f"{size}{name}" for size in ("", "large_") for name in ("string", "binary")},
    **{name: name for name in ("string_view", "binary_view", "date32", "date64")},
}


def _never() -> bool:
    return False


def bind(
    call: dict[str, Any], stopped: Callable[[], bool] = _never
) -> MapCall | FlatMapCall | StatefulCall | TimedCall | GroupStateCall | AggregateCall:
    """The wrapper of one entry of a plan's `calls`; `stopped` tells it that the host is stopping."""
    if call["kind"] == "map":
        return MapCall(call["step"], call["func"], call.get("schema"), call.get("sides", ()))
    if call["kind"] == "flat":
        return FlatMapCall(
            call["step"],
            call["func"],
            call["columns"],
            call["schema"],
            call["rows"],
            user_error,
            misfit,
            declare,
            call.get("sides", ()),
            stopped,
        )
    if call["kind"] == "stateful":
        return StatefulCall(
            call["step"],
            call["func"],
            call["keys"],
            call["columns"],
            call["schema"],
            stopped,
            call["key_types"],
            call.get("sides", ()),
        )
    if call["kind"] == "timed":
        return TimedCall(
            call,
            stopped,
            lambda func, *failure: user_error(call["step"], func, *failure),
            functools.partial(misfit, call["step"], call["func"], keys=call["keys"]),
        )
    if call["kind"] == "aggregate":
        return AggregateCall(
            call,
            stopped,
            lambda func, *failure: user_error(call["step"], func, *failure),
            lambda reason: misfit(call["step"], call["func"].finish, reason),
        )
    if call["kind"] == "groups":
        step, func = call["step"], call["func"]

        def failed(error: Exception, keys: Sequence[str], key: tuple[Any, ...]) -> UserFunctionError:
            return user_error(step, func, error, None, key, keys)

        return GroupStateCall(call, stopped, failed)
    raise ValueError(f"unknown kind of call {call['kind']!r}")


class MapCall:
    """A function from batch to batch."""

    kind = "map"

    def __init__(self, step: str, func: Callable[[pa.RecordBatch], Any], schema: Any, sides: Declared = ()) -> None:
        self.step = step
        self.func = func
        self.schema = schema
        self.sides = list(sides)

    def __call__(self, handle: Any) -> Any:
        """The batch that comes back; of a step with side outputs also what goes there, by their numbers."""
        try:
            result = self.func(pa.record_batch(handle))
            if self.sides:
                return self._parted(result)
            return rows_of(result, "the function returned")
        except Exception as error:
            made = user_error(self.step, self.func, error)
            raise made from behind(made, error)

    def _parted(self, result: Any) -> tuple[Any, list[tuple[int, Any]]]:
        batches: list[Any] = []
        beside: list[tuple[int, Any]] = []
        for made in result if type(result) in (tuple, list) else (result,):
            batch = made.rows if type(made) is Side else made
            if not (hasattr(batch, "__arrow_c_array__") or hasattr(batch, "__arrow_c_stream__")):
                raise TypeError(
                    f"the function returned {short(made)}; it must be a pyarrow RecordBatch or Table, or a tuple of one"
                    " and of sides"
                )
            if type(made) is Side:
                rows = rows_of(batch, f"the function returned for side {made.name!r}")
                beside.append((number_of(self.sides, made.name), rows))
            else:
                batches.append(rows_of(batch, "the function returned"))
        if len(batches) > 1:
            raise TypeError(f"the function returned {len(batches)} batches; it must be one, and sides")
        return batches[0] if batches else self.schema.empty_table().combine_chunks(), beside

    def refused(self, reason: str, given: Any = None) -> UserFunctionError:
        """The error of a result that does not have the declared schema, but another one."""
        return misfit(self.step, self.func, reason + declare("map_batches", given, self.schema))


class StatefulCall:
    """A function ``f(state, *values) -> (state, out)``."""

    kind = "stateful"

    def __init__(
        self,
        step: str,
        func: Callable[..., Any],
        keys: Sequence[str],
        columns: Sequence[str],
        schema: Any,
        stopped: Callable[[], bool] = _never,
        key_types: Sequence[pa.DataType] = (),
        sides: Declared = (),
    ) -> None:
        self.sides = list(sides)
        self.step = step
        self.func = func
        self.keys = list(keys)
        self.key_types = list(key_types)
        self.columns = list(columns)
        self.schema = schema
        self._stopped = stopped
        self._seen = False
        #: Which value is the key. A float is none: of the two zeros the step gets its own, and the key is 0.0.
        alone = len(self.keys) == 1 and self.keys[0] in self.columns
        floating = any(map(pa.types.is_floating, self.key_types))
        self._key = self.columns.index(self.keys[0]) if alone and not floating else None
        self._pace = [1]
        self._own = Owner(schema, self.sides)

    def new_state(self) -> BinState:
        """Empty state of one bin."""
        return BinState()

    def apply(
        self, bins: Sequence[BinState], counts: Sequence[int], keys: Sequence[Any], columns: Sequence[Sequence[Any]]
    ) -> Made | tuple[Made, list[tuple[int, Made]]]:
        """Run the step over the rows of a block, bin after bin, and return the rows that it puts out; of a step with
        side outputs also those for them, by their numbers.

        Parameters
        ----------
        bins
            The bins that have rows.
        counts
            How many rows each of them has, one bin behind the other.
        keys
            Key of each row, hashable.
        columns
            The values that the step takes: one sequence per parameter, each as long as `keys`.

        Raises
        ------
        UserFunctionError
            When the step raises; the bin of that row is tainted.
        StateError
            When a state cannot be copied, as undoing needs; the bin is tainted, too.
        BrokenOff
            When the host is stopping.
        """
        given = columns if self._key is not None else (keys, *columns)
        first: Any = iter(given[0])
        rows = zip(first, *given[1:], strict=True) if len(given) > 1 else first
        journal = any(bin.journal is not None for bin in bins)
        out, marks = Made(), Marks()
        loop = row_loop(len(columns), self._key, journal, bool(self.sides), not self._own.plain)
        how = self._failed, self._stopped, self._pace, self._own
        # A look at each would cost too much: what gives generators gives no pairs.
        step = self.func if self._seen else self._looked_at
        self._seen = True
        loop(step, bins, counts, rows, out, *how, marks, first.__length_hint__)
        out.whence = functools.partial(self._whence, keys, columns, marks)
        return parted(out, self.sides, self.refused) if self.sides else out

    def _looked_at(self, *given: Any) -> Any:
        made = self.func(*given)
        if type(made) in UNRUN:
            raise TypeError(f"the function {unrun(made)}")
        return made

    def _whence(self, keys: Sequence[Any], columns: Sequence[Sequence[Any]], marks: Marks, place: int) -> Origin:
        at = marks.call_of(place)
        row = dict(zip(self.columns, (column[at] for column in columns), strict=True))
        return Origin(self.func, self._parts(keys[at]), row)

    def _parts(self, key: Any) -> tuple[Any, ...]:
        return (key,) if len(self.keys) == 1 else tuple(key)

    def refused(self, reason: str, rows: Made | None = None, place: int | None = None) -> UserFunctionError:
        """The error of rows that do not fit the declared schema."""
        return misfit(self.step, self.func, reason, rows, place, keys=self.keys)

    def _failed(self, error: BaseException, key: Any, values: tuple[Any, ...]) -> BaseException:
        if not isinstance(error, Exception):
            return error  # KeyboardInterrupt, SystemExit: not the function's fault
        if is_of_copy(error):
            return uncopied(self.step, self._parts(key), error)
        if (told := misreturned(error)) is not None:
            error = TypeError(told)
        row = dict(zip(self.columns, values, strict=False))
        return user_error(self.step, self.func, error, row, self._parts(key), self.keys)


def misfit(
    step: str,
    func: Callable[..., Any],
    reason: str,
    rows: Any = None,
    place: int | None = None,
    *,
    keys: Sequence[str] = (),
) -> UserFunctionError:
    """The error of results that do not have the declared schema; names where the function is defined, and what the row
    at that place came from where that is known.
    """
    whence = None if place is None else getattr(rows, "whence", None)
    origin = None if whence is None else whence(place)
    if origin is None:
        origin = Origin(func)
    file, line = locate(origin.func, None)
    return UserFunctionError(
        f"{step}: {reason} ({file}:{line})" + _input(origin.row, origin.key, keys, origin.note),
        step=step,
        file=file,
        line=line,
        row=origin.row,
        key=origin.key[0] if len(origin.key) == 1 else origin.key or None,
    )


def declare(method: str, given: Any, declared: Any) -> str:
    """What helps whoever gives batches of other columns than a step declares, as a handle on their schema."""
    if given is None:
        return ""
    found = pa.schema(given)
    if found.names == declared.names and found.types == declared.types:
        return ""
    index = [name for name in found.names if name.startswith("__index_level_") and name not in declared.names]
    if index:
        return f"; {index[0]!r} is the index of a pandas DataFrame: give frame.reset_index(drop=True)"
    columns = _as_written(found)
    if columns is None or len(columns) > 300:
        columns = "'...'"
    return f"; declare what it gives: .{method}(f, schema={columns})"


def _as_written(schema: pa.Schema) -> str | None:
    """What is written for a schema in Python: DDL where that says the same, else what makes it; None for some types."""
    try:
        ddl = to_ddl(schema)
    except SchemaError:
        ddl = ""
    for text in (ddl.replace("`", ""), ddl):
        try:
            read = to_arrow(text)
        except SchemaError:
            continue
        if read.names == schema.names and read.types == schema.types:
            return repr(text)
    kinds = list(map(_made_by, schema.types))
    if None in kinds:
        return None
    fields = ", ".join(f"({name!r}, {kind})" for name, kind in zip(schema.names, kinds, strict=True))
    return f"pa.schema([{fields}])"


def _made_by(kind: pa.DataType) -> str | None:
    """The call that makes a type without types inside, but for those of dictionaries."""
    if pa.types.is_dictionary(kind):
        inner = _made_by(kind.index_type), _made_by(kind.value_type)
        text = None if None in inner else f"pa.dictionary({inner[0]}, {inner[1]})"
    elif pa.types.is_timestamp(kind):
        text = f"pa.timestamp({kind.unit!r})" if kind.tz is None else f"pa.timestamp({kind.unit!r}, {kind.tz!r})"
    elif pa.types.is_duration(kind):
        text = f"pa.duration({kind.unit!r})"
    elif pa.types.is_decimal(kind):
        text = f"pa.decimal{kind.bit_width}({kind.precision}, {kind.scale})"
    else:
        maker = _PLAIN.get(str(kind).partition("[")[0])
        text = None if maker is None or getattr(pa, maker)() != kind else f"pa.{maker}()"
    return text


def _input(row: dict[str, Any] | None, key: tuple[Any, ...], keys: Sequence[str], note: str | None) -> str:
    """What a call was for."""
    if note is not None:
        return note
    shown = dict(zip(keys, key, strict=False)) | (row or {})
    return "\n  row: " + ", ".join(f"{name}={short(value)}" for name, value in shown.items()) if shown else ""


def user_error(
    step: str,
    func: Callable[..., Any],
    error: Exception,
    row: dict[str, Any] | None = None,
    key: tuple[Any, ...] = (),
    keys: Sequence[str] = (),
    note: str | None = None,
    returns: str = RETURNS,
) -> UserFunctionError:
    """The `UserFunctionError` of an exception that `func` raised; the caller raises it from what is `behind` it.

    `note` tells about the input in place of the row; `returns` is what a step returns.
    """
    if isinstance(error, UserFunctionError):
        return error
    file, line = locate(func, error)
    message = f"{step}: {type(error).__name__}: {_text(error)} ({file}:{line})"
    message += _input(row, key, keys, note)
    if note is None and row is not None and not _frames(func, error):
        message += f"\n  the step is called as step(state, *values) and returns {returns}"
    return UserFunctionError(
        message, step=step, file=file, line=line, row=row, key=key[0] if len(key) == 1 else key or None
    )


def locate(func: Callable[..., Any], error: BaseException | None) -> tuple[str, int]:
    """File and line in the user's code: of the innermost frame in the function's file, else of its definition."""
    frames = [] if error is None else _frames(func, error)
    if frames:
        return frames[-1].filename, frames[-1].lineno or 0
    code = _code(func)
    if code is not None:
        return code.co_filename, code.co_firstlineno
    # No Python code (a builtin): the innermost frame that is not ours, when there is one.
    ours = __name__.rpartition(".")[0]
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__ if error else None))):
        if not frame.f_globals.get("__name__", "").startswith(ours):
            return frame.f_code.co_filename, line
    return f"<{getattr(func, '__qualname__', type(func).__name__)}>", 0


def _frames(func: Callable[..., Any], error: BaseException) -> list[traceback.FrameSummary]:
    code = _code(func)
    if code is None:
        return []
    return [
        traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == code.co_filename
    ]


def _code(func: Any) -> CodeType | None:
    """Code of a function, a method, a partial, or an object with `__call__`."""
    while isinstance(func, functools.partial):
        func = func.func
    func = inspect.unwrap(func) if hasattr(func, "__wrapped__") else func
    for candidate in (func, inspect.getattr_static(type(func), "__call__", None)):
        code = getattr(getattr(candidate, "__func__", candidate), "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"
