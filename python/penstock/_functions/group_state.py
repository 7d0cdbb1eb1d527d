"""The state of one key as a function written for Spark's ``applyInPandasWithState`` sees it.

Owns: `GroupState` with Spark's surface and rules, the shape that states are held to, and what an epoch tells all its
groups. It imports neither pyspark nor pandas: the same object serves a Spark task, a resident member and a thread.

Departures from ``pyspark.sql.streaming.state``: `GroupState.setTimeoutDuration` also takes text (as in Scala); a state
that does not fit its schema is an error where Spark stores null; a call that sets no timeout always leaves none (Spark
forgets that where the function changes nothing else).
"""

from __future__ import annotations

import datetime
import decimal
import numbers
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from penstock._durations import milliseconds, parse_duration
from penstock._functions.short import short
from penstock._functions.state import copy_state
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

__all__ = ["NO_TIMESTAMP", "TIMEOUTS", "GroupEpoch", "GroupFunction", "GroupState", "StateShape"]

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

    __slots__ = ("_epoch", "_removed", "_timed_out", "_timeout_ms", "_updated", "_value")

    def __init__(self, epoch: GroupEpoch, value: tuple[Any, ...] | None, timed_out: bool = False) -> None:
        self._epoch = epoch
        self._value = value
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
        if self._value is None:
            raise ValueError("the state does not exist: ask state.exists, or use state.getOption")
        return self._epoch.shape.shown(self._value)

    @property
    def getOption(self) -> tuple[Any, ...] | None:
        """The state, or None."""
        return None if self._value is None else self._epoch.shape.shown(self._value)

    @property
    def hasTimedOut(self) -> bool:
        """Whether the function is called because the key has timed out."""
        return self._timed_out

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Set the state.

        Raises
        ------
        TypeError
            When the value is None, or does not fit the schema of the state.
        """
        if newValue is None:
            raise TypeError("state.update(None): a state is a tuple; use state.remove() to have none")
        self._value = self._epoch.shape.checked(newValue)
        self._updated = True
        self._removed = False

    def remove(self) -> None:
        """Have no state."""
        self._value = None
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
        return f"GroupState({self._value if self._value is not None else '<undefined>'})"


class StateShape:
    """What a state must look like.

    Parameters
    ----------
    schema
        Names and types of the values of the tuple.

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

    __slots__ = ("_checks", "_deep", "schema")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._checks: tuple[Callable[[Any], Any], ...] = tuple(_check_of(field) for field in schema)
        #: Places of values that could be changed in place.
        self._deep = tuple(place for place, field in enumerate(schema) if pa.types.is_nested(field.type))

    def checked(self, value: Any) -> tuple[Any, ...]:
        """The state as it is kept: Python values of the schema's types, that nobody else can change.

        Raises
        ------
        TypeError
            When it does not fit.
        """
        try:
            given = tuple(value)
        except TypeError:
            raise TypeError(f"the state must be a tuple of {len(self._checks)} values, not {value!r}") from None
        if isinstance(value, str) or len(given) != len(self._checks):
            names = ", ".join(self.schema.names)
            raise TypeError(f"the state must be a tuple of {len(self._checks)} values ({names}), not {value!r}")
        return tuple([None if item is None else check(item) for check, item in zip(self._checks, given, strict=True)])

    def shown(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """The state as the function gets it: changing it does not change what is kept."""
        if not self._deep:
            return value
        return tuple([copy_state(item) if place in self._deep else item for place, item in enumerate(value)])

    def __reduce__(self) -> tuple[Any, ...]:
        return (StateShape, (self.schema,))


def _check_of(field: pa.Field) -> Callable[[Any], Any]:
    """Turns a value that is not None into what the field keeps, or raises TypeError."""
    kind = field.type

    def refuse(value: Any) -> TypeError:
        return TypeError(f"the state's field {field.name!r} ({kind}) cannot hold {value!r}")

    def plain(value: Any) -> Any:
        """What Spark does to NumPy and pandas values."""
        for method in ("to_pytimedelta", "to_pydatetime"):
            if hasattr(value, method):
                return getattr(value, method)()
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return value.tolist()
        return value

    if pa.types.is_integer(kind):
        signed = pa.types.is_signed_integer(kind)
        bits = kind.bit_width - 1 if signed else kind.bit_width
        least, most = (-(1 << bits) if signed else 0), (1 << bits) - 1

        def integer(value: Any) -> Any:
            if type(value) is not int:
                value = plain(value)
                if type(value) is not int:
                    raise refuse(value)
            if not least <= value <= most:
                raise refuse(value)
            return value

        return integer

    exact: tuple[type, ...]
    if pa.types.is_floating(kind):

        def number(value: Any) -> Any:
            if type(value) is float:
                return value
            value = plain(value)
            if type(value) not in (float, int):
                raise refuse(value)
            return float(value)

        return number
    if pa.types.is_boolean(kind):
        exact = (bool,)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        exact = (str,)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        exact = (bytes, bytearray)
    elif pa.types.is_timestamp(kind):
        exact = (datetime.datetime,)
    elif pa.types.is_date(kind):
        exact = (datetime.date,)
    elif pa.types.is_duration(kind):
        exact = (datetime.timedelta,)
    elif pa.types.is_decimal(kind):
        exact = (decimal.Decimal,)
    else:
        holds_struct = "struct" in str(kind)

        def nested(value: Any) -> Any:
            value = plain(value)
            if not holds_struct:  # structs may be Rows, tuples or dicts: kept as they are
                try:
                    pa.array([value], kind)
                except (pa.ArrowException, TypeError, ValueError, OverflowError):
                    raise refuse(value) from None
            return copy_state(value)

        return nested

    def simple(value: Any) -> Any:
        value = value if type(value) in exact else plain(value)
        if not isinstance(value, exact):
            raise refuse(value)
        return value

    return simple


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
