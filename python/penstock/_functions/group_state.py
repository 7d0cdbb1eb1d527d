"""The state of one key as a function written for Spark's ``applyInPandasWithState`` sees it.

Owns: `GroupState` with Spark's surface and rules, the shape that states are held to, and what an epoch tells all its
groups. It imports neither pyspark nor pandas: the same object serves a Spark task, a resident member and a thread.

A state is kept as Spark keeps it: decimals with the scale of their type, rounded half up; floats of 32 bits as narrow
as that; of a datetime its date where the type is one; structs by their fields. The call that has set it sees what it
gave.

Departures from ``pyspark.sql.streaming.state``: `GroupState.setTimeoutDuration` also takes text (as in Scala); a state
that does not fit its schema is an error where Spark stores null, or an integer that has wrapped around; whole numbers
fit a float; a call that sets no timeout always leaves none (Spark forgets that where the function changes nothing
else).
"""

from __future__ import annotations

import datetime
import decimal
import math
import numbers
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from penstock._durations import milliseconds, parse_duration
from penstock._functions.short import short
from penstock._functions.state import ATOMIC, copy_state
from penstock.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

__all__ = ["NO_TIMESTAMP", "TIMEOUTS", "GroupEpoch", "GroupFunction", "GroupState", "StateRow", "StateShape"]

#: A function as Spark's applyInPandasWithState takes it: of a key, its frames, and its state. That is a `GroupState`
#: here, and may be annotated as Spark's own.
GroupFunction: TypeAlias = "Callable[[Any, Iterator[pd.DataFrame], Any], Iterable[pd.DataFrame]]"

#: Spark's word for no time at all.
NO_TIMESTAMP: Final = -1
NO_TIMEOUT: Final = "NoTimeout"
PROCESSING_TIME: Final = "ProcessingTimeTimeout"
EVENT_TIME: Final = "EventTimeTimeout"
#: Values of `timeoutConf`.
TIMEOUTS: Final = (NO_TIMEOUT, PROCESSING_TIME, EVENT_TIME)


@dataclass(frozen=True, slots=True)
class GroupEpoch:
    """What is equal for all groups of one epoch.

    Attributes
    ----------
    shape
        Schema of the state.
    timeout
        One of `TIMEOUTS`.
    watermark_ms
        Milliseconds since 1970; `NO_TIMESTAMP` in a batch job, None where the input has no watermark.
    clock_ms
        Processing time, milliseconds since 1970.
    """

    shape: StateShape
    timeout: str
    watermark_ms: int | None
    clock_ms: int


class GroupState:
    """State of one key during one call of the user's function; the surface of Spark's class of that name.

    Functions get it from `Flow.apply_in_pandas_with_state`, and make none.

    Examples
    --------
    >>> import pandas as pd
    >>> import penstock as pk
    >>> def count(key, frames, state):
    ...     seen = sum(map(len, frames)) + (state.get[0] if state.exists else 0)
    ...     state.update((seen,))
    ...     state.setTimeoutDuration("10 seconds")
    ...     yield pd.DataFrame({"user": [key[0]], "seen": [seen]})
    >>> users = pk.Flow("user string").key_by("user").apply_in_pandas_with_state(
    ...     count, "user string, seen bigint", "seen bigint", "update", "ProcessingTimeTimeout"
    ... )
    >>> users.collect(pa.table({"user": ["ann", "ann"]})).to_pylist()
    [{'user': 'ann', 'seen': 2}]
    """

    NO_TIMESTAMP: int = NO_TIMESTAMP

    __slots__ = ("_epoch", "_given", "_removed", "_timed_out", "_timeout_ms", "_updated", "_value")

    def __init__(self, epoch: GroupEpoch, value: tuple[Any, ...] | None, timed_out: bool = False) -> None:
        self._epoch = epoch
        self._value = value
        #: What this call has set, as it gave it.
        self._given: tuple[Any, ...] | None = None
        self._timed_out = timed_out
        self._timeout_ms: int | None = None
        self._updated = False
        self._removed = False

    @property
    def exists(self) -> bool:
        """Whether there is a state."""
        return self._value is not None

    @property
    def get(self) -> tuple[Any, ...]:
        """The state.

        Raises
        ------
        ValueError
            When there is none.
        """
        found = self.getOption
        if found is None:
            raise ValueError("the state does not exist: ask state.exists, or use state.getOption")
        return found

    @property
    def getOption(self) -> tuple[Any, ...] | None:
        """The state, or None."""
        if self._given is not None:
            return self._epoch.shape.copied(self._given)
        return None if self._value is None else self._epoch.shape.shown(self._value)

    @property
    def hasTimedOut(self) -> bool:
        """Whether the function is called because the key has timed out."""
        return self._timed_out

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Set the state.

        Later calls see it as its schema says: a ``decimal(10,2)`` has two digits behind the point. This one sees what
        it gave.

        Raises
        ------
        TypeError
            When the value is None, or does not fit the schema of the state.
        """
        if newValue is None:
            raise TypeError("state.update(None): a state is a tuple; use state.remove() to have none")
        self._given, self._value = self._epoch.shape.taken(newValue)
        self._updated = True
        self._removed = False

    def remove(self) -> None:
        """Have no state."""
        self._value = self._given = None
        self._updated = False
        self._removed = True

    def setTimeoutDuration(self, durationMs: int | str) -> None:
        """Have the function called when no data comes for so long: milliseconds, or text such as ``"10 seconds"``.

        Raises
        ------
        RuntimeError
            When `timeoutConf` is not ProcessingTimeTimeout.
        TypeError
            When it is neither a number nor text.
        ValueError
            When the duration is not positive, not finite, or text that is no duration.
        """
        if self._epoch.timeout != PROCESSING_TIME:
            raise RuntimeError(f"setTimeoutDuration needs timeoutConf={PROCESSING_TIME!r}, not {self._epoch.timeout!r}")
        name = "setTimeoutDuration"
        duration = _duration_ms(durationMs) if isinstance(durationMs, str) else _whole_ms(durationMs, name)
        if duration <= 0:
            raise ValueError(f"{name}({durationMs!r}): the duration must be positive, of 1 ms at least")
        self._timeout_ms = self._epoch.clock_ms + duration

    def setTimeoutTimestamp(self, timestampMs: int | datetime.datetime) -> None:
        """Have the function called when the watermark passes a time: milliseconds since 1970, or a datetime.

        Raises
        ------
        RuntimeError
            When `timeoutConf` is not EventTimeTimeout.
        TypeError
            When it is neither a number nor a datetime.
        ValueError
            When the time is not positive, not finite, or before the watermark.
        """
        epoch = self._epoch
        if epoch.timeout != EVENT_TIME:
            raise RuntimeError(f"setTimeoutTimestamp needs timeoutConf={EVENT_TIME!r}, not {epoch.timeout!r}")
        if isinstance(timestampMs, datetime.datetime) and timestampMs == timestampMs:  # unlike pandas' NaT
            # Whole microseconds first: float seconds would lose some.
            whole = timestampMs.replace(microsecond=0).timestamp()
            at_ms = int(whole) * 1_000 + timestampMs.microsecond // 1_000
        else:
            at_ms = _whole_ms(timestampMs, "setTimeoutTimestamp", " or a datetime")
        if at_ms <= 0:
            raise ValueError(f"setTimeoutTimestamp({timestampMs!r}): the time must be positive")
        watermark = epoch.watermark_ms
        if watermark is not None and watermark != NO_TIMESTAMP and at_ms < watermark:
            raise ValueError(f"setTimeoutTimestamp({at_ms}) is before the watermark {watermark}")
        self._timeout_ms = at_ms

    def getCurrentWatermarkMs(self) -> int:
        """The watermark of this batch, in milliseconds since 1970.

        Raises
        ------
        RuntimeError
            When the input has no watermark.
        """
        if self._epoch.watermark_ms is None:
            raise RuntimeError("there is no watermark: use withWatermark before applyInPandasWithState")
        return self._epoch.watermark_ms

    def getCurrentProcessingTimeMs(self) -> int:
        """The time of this batch, in milliseconds since 1970; the same when the batch is repeated."""
        return self._epoch.clock_ms

    def __repr__(self) -> str:
        return f"GroupState({self.get if self.exists else '<undefined>'})"


class StateRow(tuple[Any, ...]):
    """A struct in a state as a function gets it: by place, by name or by attribute, as Spark's ``Row``.

    Examples
    --------
    >>> row = StateRow(("x", "y"), (1, "a"))
    >>> row, row[0], row["y"], row.y, row.asDict()
    (Row(x=1, y='a'), 1, 'a', 'a', {'x': 1, 'y': 'a'})
    """

    __fields__: tuple[str, ...]

    def __new__(cls, names: Sequence[str], values: Iterable[Any]) -> StateRow:
        made = super().__new__(cls, values)
        made.__fields__ = tuple(names)
        return made

    def asDict(self, recursive: bool = False) -> dict[str, Any]:
        """The values by their names; with `recursive` those of structs inside as well."""

        def told(value: Any) -> Any:
            if isinstance(value, StateRow):
                return value.asDict(True)
            if isinstance(value, list):
                return list(map(told, value))
            return {name: told(item) for name, item in value.items()} if isinstance(value, dict) else value

        values = map(told, self) if recursive else self
        return dict(zip(self.__fields__, values, strict=True))

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.__fields__:
            raise KeyError(key)
        return super().__getitem__(self.__fields__.index(key))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.__fields__:
            there = ", ".join(self.__fields__)
            raise AttributeError(f"the struct has no field {name!r}; it has {there}", name=name, obj=self)
        return super().__getitem__(self.__fields__.index(name))

    def __contains__(self, item: Any) -> bool:
        return item in self.__fields__

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value!r}' for name, value in zip(self.__fields__, self, strict=True))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (StateRow, (self.__fields__, tuple(self)))


class StateShape:
    """What a state must look like.

    Parameters
    ----------
    schema
        Names and types of the values of the tuple.
    timezone
        Zone of times without one: what an instant is shown as, and kept as.

    Examples
    --------
    >>> shape = StateShape(pa.schema([("n", pa.int32()), ("mean", pa.float64())]))
    >>> shape.checked((1, 2))
    (1, 2.0)
    >>> shape.checked((1 << 40, 2.0))
    Traceback (most recent call last):
    ...
    TypeError: the state's field 'n' (int32) cannot hold 1099511627776
    """

    __slots__ = ("_deep", "_keeps", "schema", "timezone")

    def __init__(self, schema: pa.Schema, timezone: str = "UTC") -> None:
        self.schema, self.timezone = schema, timezone
        self._keeps = tuple(_keeping(kind, timezone) for kind in schema.types)
        #: What values that could be changed in place are shown as.
        self._deep = {place: _showing(kind) for place, kind in enumerate(schema.types) if pa.types.is_nested(kind)}

    def checked(self, value: Any) -> tuple[Any, ...]:
        """The state as it is kept: Python values of the schema's types, that nobody else can change.

        Raises
        ------
        TypeError
            When it does not fit.
        """
        return self.taken(value)[1]

    def taken(self, value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The state as the function gave it, and as it is kept.

        Raises
        ------
        TypeError
            When it does not fit.
        """
        try:
            given = tuple(value)
        except TypeError:
            raise TypeError(f"the state must be a tuple of {len(self._keeps)} values, not {value!r}") from None
        if isinstance(value, str) or len(given) != len(self._keeps):
            names = ", ".join(self.schema.names)
            raise TypeError(f"the state must be a tuple of {len(self._keeps)} values ({names}), not {value!r}")
        given = tuple(map(_plain, given))
        kept = []
        for place, (item, keep) in enumerate(zip(given, self._keeps, strict=True)):
            try:
                kept.append(None if item is None else keep(item))
            except _Misfit as error:
                field = self.schema.field(place)
                inside = "" if error.value is item else f": {error.value!r} is no {error.kind}"
                raise TypeError(
                    f"the state's field {field.name!r} ({field.type}) cannot hold {item!r}{inside}"
                ) from None
        return self.copied(given), tuple(kept)

    def shown(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """The state as the function gets it: changing it does not change what is kept."""
        if not self._deep:
            return value
        return tuple([self._deep[place](item) if place in self._deep else item for place, item in enumerate(value)])

    def copied(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same values, of which nothing can be changed by changing these."""
        if not self._deep:
            return value
        return tuple([copy_state(item) if place in self._deep else item for place, item in enumerate(value)])

    def __reduce__(self) -> tuple[Any, ...]:
        return (StateShape, (self.schema, self.timezone))


class _Misfit(Exception):
    """A value, or a part of it, that a type cannot hold."""

    def __init__(self, value: Any, kind: pa.DataType) -> None:
        super().__init__(value, kind)
        self.value, self.kind = value, kind


_Turn: TypeAlias = Callable[[Any], Any]


def _plain(value: Any) -> Any:
    """What Spark does to NumPy and pandas values."""
    kind = type(value)
    if kind in ATOMIC:
        return value
    for method in ("to_pytimedelta", "to_pydatetime"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value.tolist() if kind.__module__ == "numpy" and hasattr(value, "tolist") else value


def _keeping(kind: pa.DataType, timezone: str) -> _Turn:
    """Turns a value that is not None into what a state keeps of it, or raises `_Misfit`."""
    is_type = pa.types
    if is_type.is_integer(kind):
        return _integers(kind)
    if is_type.is_floating(kind):
        return _floats(kind)
    if is_type.is_decimal(kind):
        return _decimals(kind)
    if is_type.is_boolean(kind):
        return _exactly(kind, bool)
    if is_type.is_string(kind) or is_type.is_large_string(kind):
        return _exactly(kind, str)
    if is_type.is_binary(kind) or is_type.is_large_binary(kind):
        return _exactly(kind, bytes, bytearray, turn=bytes)
    if is_type.is_duration(kind):
        return _exactly(kind, datetime.timedelta)
    if is_type.is_date(kind):
        return _exactly(kind, datetime.date, turn=lambda at: at.date() if isinstance(at, datetime.datetime) else at)
    if is_type.is_timestamp(kind):
        return _exactly(kind, datetime.datetime, turn=_walls(kind, timezone))
    if is_type.is_struct(kind):
        return _structs(kind, timezone)
    if is_type.is_map(kind):
        return _maps(kind, timezone)
    if is_type.is_list(kind) or is_type.is_large_list(kind):
        return _lists(kind, timezone)

    def other(value: Any) -> Any:
        value = _plain(value)
        try:
            pa.array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise _Misfit(value, kind) from None
        return copy_state(value)

    return other


def _integers(kind: pa.DataType) -> _Turn:
    signed = pa.types.is_signed_integer(kind)
    bits = kind.bit_width - 1 if signed else kind.bit_width
    least, most = (-(1 << bits) if signed else 0), (1 << bits) - 1

    def integer(value: Any) -> Any:
        if type(value) is not int:
            value = _plain(value)
        if type(value) is not int or not least <= value <= most:
            raise _Misfit(value, kind)
        return value

    return integer


def _floats(kind: pa.DataType) -> _Turn:
    narrow = struct.Struct("f") if kind.bit_width == 32 else None

    def number(value: Any) -> Any:
        if type(value) is not float:
            value = _plain(value)
            if type(value) not in (float, int):
                raise _Misfit(value, kind)
            try:
                value = float(value)
            except OverflowError:
                raise _Misfit(value, kind) from None
        if narrow is None:
            return value
        try:
            return narrow.unpack(narrow.pack(value))[0]
        except OverflowError:
            return math.copysign(math.inf, value)

    return number


def _decimals(kind: pa.DataType) -> _Turn:
    # More digits than the type has are an invalid operation of this context.
    context = decimal.Context(
        prec=kind.precision,
        rounding=decimal.ROUND_HALF_UP,
        Emin=decimal.MIN_EMIN,
        Emax=decimal.MAX_EMAX,
        traps=[decimal.InvalidOperation],
    )
    unit = decimal.Decimal((0, (1,), -kind.scale))

    def exact(value: Any) -> Any:
        if not isinstance(value, decimal.Decimal) or not value.is_finite():
            raise _Misfit(value, kind)
        try:
            made = value.quantize(unit, context=context)
        except decimal.InvalidOperation:
            raise _Misfit(value, kind) from None
        return made if made else made.copy_abs()  # Java has no zero with a sign

    return exact


def _exactly(kind: pa.DataType, *classes: type, turn: _Turn | None = None) -> _Turn:
    """Takes values of these classes that equal themselves: pandas has a time that is none."""

    def simple(value: Any) -> Any:
        if type(value) not in classes:
            value = _plain(value)
        if not isinstance(value, classes) or value != value:
            raise _Misfit(value, kind)
        return value if turn is None else turn(value)

    return simple


def _walls(kind: pa.DataType, timezone: str) -> _Turn:
    """Times without a zone: of an instant the clock of the session says it, of a wall clock's its own."""
    instant = pa.timestamp("us", timezone)

    def wall(value: datetime.datetime) -> datetime.datetime:
        if value.tzinfo is None:
            return value
        shown: datetime.datetime = value if kind.tz is None else pa.scalar(value, instant).as_py()
        return shown.replace(tzinfo=None)

    return wall


def _structs(kind: pa.DataType, timezone: str) -> _Turn:
    """Fields of dicts and of objects go by name, and missing ones are null; those of tuples and rows go by place."""
    names = [field.name for field in kind]
    keeps = [_keeping(field.type, timezone) for field in kind]
    if len(set(names)) < len(names):
        raise SchemaError(f"the state has a struct with two fields of one name, {kind}; rename one of them")

    def fields(value: Any) -> Any:
        if isinstance(value, dict):
            items = [value.get(name) for name in names]
        elif isinstance(value, (tuple, list)):
            items = list(value)
        else:
            own = getattr(value, "__dict__", None)
            if own is None:
                raise _Misfit(value, kind)
            items = [own.get(name) for name in names]
        if len(items) != len(names):
            raise _Misfit(value, kind)
        kept = [None if item is None else keep(item) for keep, item in zip(keeps, items, strict=True)]
        return dict(zip(names, kept, strict=True))

    return fields


def _maps(kind: pa.DataType, timezone: str) -> _Turn:
    keep_key, keep_item = _keeping(kind.key_type, timezone), _keeping(kind.item_type, timezone)

    def pairs(value: Any) -> Any:
        if not isinstance(value, Mapping) or None in value:
            raise _Misfit(value, kind)
        return {keep_key(key): None if item is None else keep_item(item) for key, item in value.items()}

    return pairs


def _lists(kind: pa.DataType, timezone: str) -> _Turn:
    keep = _keeping(kind.value_type, timezone)

    def items(value: Any) -> Any:
        if type(value) is not list:
            value = _plain(value)
            if not isinstance(value, (list, tuple)):
                raise _Misfit(value, kind)
        return [None if item is None else keep(item) for item in value]

    return items


def _showing(kind: pa.DataType) -> _Turn:
    """What a kept value of a nested type is shown as: structs as rows, all else as it is, and nothing that is kept."""
    is_type = pa.types
    if is_type.is_struct(kind):
        names = [field.name for field in kind]
        parts = [_showing(field.type) for field in kind]

        def row(value: Any) -> Any:
            # One of a checkpoint may have been kept as it was given.
            if type(value) is not dict or list(value) != names:
                return copy_state(value)
            return StateRow(names, [show(item) for show, item in zip(parts, value.values(), strict=True)])

        return row
    if is_type.is_map(kind):
        show_key, show_item = _showing(kind.key_type), _showing(kind.item_type)

        def pairs(value: Any) -> Any:
            if type(value) is not dict:
                return copy_state(value)
            return {show_key(key): show_item(item) for key, item in value.items()}

        return pairs
    if is_type.is_list(kind) or is_type.is_large_list(kind):
        show = _showing(kind.value_type)
        if not pa.types.is_nested(kind.value_type):
            return copy_state
        return lambda value: [show(item) for item in value] if type(value) is list else copy_state(value)
    return copy_state


def _duration_ms(text: str) -> int:
    """Read ``"10 seconds"`` or, as Spark has it, too, ``"interval 1 hour 30 minutes"``."""
    name = "setTimeoutDuration"
    return milliseconds(parse_duration(text.strip().removeprefix("interval "), name, allow_zero=True), name)


def _whole_ms(value: Any, name: str, other: str = ', or text such as "10 seconds"') -> int:
    """Milliseconds that a function gives, without a fraction: of any number type, as NumPy has several."""
    # NumPy's durations are integers of units of their own.
    is_duration = getattr(getattr(value, "dtype", None), "kind", "") == "m"
    is_number = isinstance(value, (numbers.Real, decimal.Decimal)) and not isinstance(value, bool)
    if is_duration or not is_number:
        raise TypeError(f"{name}({short(value)}): give a number of milliseconds{other}")
    try:
        return int(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name}({short(value)}): the number of milliseconds must be finite") from None


def require_timeout(timeout: str) -> None:
    """Refuse a word that is no `timeoutConf`."""
    if timeout not in TIMEOUTS:
        raise ConfigError(f"timeoutConf={timeout!r} is unknown; use {', '.join(map(repr, TIMEOUTS))}")
