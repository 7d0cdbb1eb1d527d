"""Values that pyarrow changes without a word: numbers that may have a fraction, for types that have whole ones; truth
values for types that have numbers; numbers that a type of floats does not have; numbers for types that have times, and
times for those that have numbers; times with a zone for types without, or the other way around; times of day for dates;
text for lists; and arrays of times. Also those of which it ends the process.

Used wherever values of Python become Arrow: rows of `penstock.ordered`, and rows that steps of a flow put out.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial
from itertools import chain
from math import inf, isinf
from numbers import Integral, Number, Real
from operator import attrgetter
from struct import pack
from typing import Any, Final, TypeAlias

import pyarrow as pa

__all__ = ["FRACTION", "first_cut", "is_array", "look_into"]

#: What goes on behind "which" about the first of some values that a type would change; None where it changes none.
_Look: TypeAlias = Callable[[Collection[Any]], "str | None"]
#: The values of one kind within a nested value.
_Part: TypeAlias = Callable[[Any], Iterable[Any]]

_TIME: Final = "has a time of numpy's for a number"
_RAW: Final = (
    "has an array of numpy's times, of which only the numbers would be taken: give a list of datetimes, dates or"
    " timedeltas"
)
_MASK: Final = "has a masked array, whose mask would be lost: give a list, as by .tolist()"
_NO_ENTRY: Final = "has a map with None in place of an entry: entries are (key, value)"
#: What is wrong with a number.
FRACTION: Final = "has a number that may have a fraction, or True or False for a number"
_NO_ZONE: Final = (
    "has no zone: give one, such as datetime(..., tzinfo=timezone.utc), or declare the column timestamp_ntz"
)
_ZONE: Final = (
    "has a zone, which a timestamp_ntz has not: give it without, as by .replace(tzinfo=None), or declare the column"
    " timestamp"
)
_TIME_ZONE: Final = "has a zone, which a time of day has not: give it without, as by .replace(tzinfo=None)"
_DAY: Final = "has a time of day, which a date has not: give the date, as by .date(), or declare the column timestamp"
_TEXT: Final = "has text for a list, whose characters would be taken: give a list, as [text]"
_BEYOND: Final = "has a number beyond what its type of floats has, which would become infinite"
_UNSIGNED: Final = "has an unsigned number of numpy's that a float does not have exactly: give float(number)"
#: Unsigned numbers that floats have exactly; of greater ones pyarrow makes what their bits say with a sign.
_EXACT: Final = 1 << 53
#: How `struct` packs floats of these widths.
_CODES: Final = {16: "e", 32: "f"}
_NO_TIME: Final = "has NaT, which is none: give None"
_FINER: Final = "has a time with parts of the unit of its type, {}: round it, or declare a finer type"


@lru_cache(64)
def _known(kind: pa.DataType) -> _Look | None:
    return look_into(kind)


def first_cut(kind: pa.DataType, values: list[Any]) -> tuple[int, str] | None:
    """The place of the first value that a column of a type would change, and what goes on behind "which" about it.

    Examples
    --------
    >>> first_cut(pa.list_(pa.int64()), [[1], None, [2, 0.5]])[0], first_cut(pa.list_(pa.float64()), [[0.5]])
    (2, None)
    >>> first_cut(pa.list_(pa.float64()), [[0.5], [True]])[0]
    1
    >>> first_cut(pa.date32(), [datetime.date(2026, 1, 1), 20454])
    (1, 'has a number for a date: give a datetime.date')
    """
    try:
        look = _known(kind)
    except TypeError:  # a type of a user's may have no hash
        look = look_into(kind)
    if look is None or look(values) is None:
        return None
    told = ((place, look([value])) for place, value in enumerate(values))
    return next((place, reason) for place, reason in told if reason is not None)


def look_into(kind: pa.DataType) -> _Look | None:
    """What finds values that pyarrow changes without a word where it makes this type of them, and says what they have.

    None for a type where it changes none.
    """
    is_type = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return look_into(kind.storage_type)
    if is_type.is_integer(kind):
        return _fractions
    if is_type.is_temporal(kind):
        return _times(kind)
    if is_type.is_floating(kind):
        return partial(_floats, kind.bit_width)
    if is_type.is_dictionary(kind) or is_type.is_run_end_encoded(kind):
        return look_into(kind.value_type)
    if is_type.is_map(kind):
        parts: list[tuple[_Part, pa.DataType]] = [
            (partial(_of_map, place), inner) for place, inner in enumerate((kind.key_type, kind.item_type))
        ]
        # pyarrow ends the process at an entry that is None.
        looks = [(part, look) for part, inner in parts if (look := look_into(inner)) is not None]
        return partial(_entries, looks)
    elif is_type.is_struct(kind):
        parts = [(partial(_of_struct, place, field.name), field.type) for place, field in enumerate(kind)]
        looks = [(part, look) for part, inner in parts if (look := look_into(inner)) is not None]
        return partial(_fields, [field.name for field in kind], looks)
    elif hasattr(kind, "value_type"):
        look = look_into(kind.value_type)
        return partial(_of_list, [] if look is None else [(iter, look)])
    else:
        return None
    looks = [(part, look) for part, inner in parts if (look := look_into(inner)) is not None]
    return partial(_inside, looks) if looks else None


def _fractions(values: Collection[Any]) -> str | None:
    kinds = set(map(type, values))
    if any(map(_is_time, kinds)):
        return _TIME
    return FRACTION if any(map(_may_be_cut, kinds)) else None


def _may_be_cut(kind: type) -> bool:
    # Of an array without dimensions pyarrow takes the number and drops its fraction.
    return (issubclass(kind, Number) and not issubclass(kind, Integral)) or _is_truth(kind) or is_array(kind)


def _floats(width: int, values: Collection[Any]) -> str | None:
    kinds = set(map(type, values))
    if any(map(_is_time, kinds)):
        return _TIME
    if any(map(_is_truth, kinds)):
        return FRACTION
    of_numpy = {kind.__name__: kind for kind in kinds if kind.__module__ == "numpy"}
    unsigned = [of_numpy[name] for name in ("uint64", "ulonglong") if name in of_numpy]
    if unsigned and any(type(one) in unsigned and int(one) > _EXACT for one in values):
        return _UNSIGNED
    longest: Any = of_numpy.get("longdouble", of_numpy.get("float128"))
    if longest is not None and any(isinf(float(one)) and abs(one) < inf for one in values if type(one) is longest):
        return _BEYOND
    code = _CODES.get(width)
    if code is None or kinds <= {of_numpy.get("float16"), of_numpy.get(f"float{width}")}:
        return None
    numbers = values if kinds <= {float, int} else [one for one in values if isinstance(one, Real)]
    try:
        pack(f"<{len(numbers)}{code}", *map(float, numbers))
    except OverflowError:  # a finite number, of which the nearest one is not
        return _BEYOND
    return None


def _is_time(kind: type) -> bool:
    return kind.__module__ == "numpy" and kind.__name__ in ("datetime64", "timedelta64")


def _is_truth(kind: type) -> bool:
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def _times(kind: pa.DataType) -> _Look:
    """What looks for values that are none of this type of times."""
    is_type = pa.types
    wanted = "an interval: give a datetime.timedelta"
    if is_type.is_timestamp(kind):
        wanted = "a timestamp: give a datetime"
    elif is_type.is_date(kind):
        wanted = "a date: give a datetime.date"
    elif is_type.is_time(kind):
        wanted = "a time: give a datetime.time"
    number = f"has a number for {wanted}"
    timed = is_type.is_timestamp(kind)
    dated = timed or is_type.is_date(kind)
    of_day = is_type.is_time(kind)
    day = is_type.is_date(kind)
    zoned = is_type.is_timestamp(kind) and kind.tz is not None
    naive = is_type.is_timestamp(kind) and kind.tz is None
    unit = getattr(kind, "unit", "")
    least = 0 if is_type.is_date(kind) else {"s": 1_000_000, "ms": 1_000}.get(unit, 0)

    def look(values: Collection[Any]) -> str | None:
        kinds = set(map(type, values))
        if any(_is_number(one) or is_array(one) for one in kinds):
            return number
        if any(issubclass(one, str) for one in kinds):
            return f"has text for {wanted}"
        if timed and any(issubclass(one, datetime.date) and not issubclass(one, datetime.datetime) for one in kinds):
            return f"has a date for {wanted}"
        if least and any(_microseconds(one) % least for one in values):
            return _FINER.format(unit)
        if (
            unit != "ns"
            and (finer := _finer(kinds))
            and any(finer[type(one)](one) for one in values if type(one) in finer)
        ):
            return _FINER.format(unit) if unit else _DAY
        if of_day and any(getattr(one, "tzinfo", None) is not None for one in values):
            return _TIME_ZONE
        stamps = dated and [each for each in kinds if issubclass(each, datetime.datetime)]
        if not stamps:
            return None
        if any(each.__name__ == "NaTType" for each in stamps):
            return _NO_TIME
        found = values if kinds == {datetime.datetime} else [one for one in values if type(one) in stamps]
        if day and any(one.hour or one.minute or one.second or one.microsecond for one in found):
            return _DAY
        if zoned and any(one.tzinfo is None for one in found):
            return _NO_ZONE
        if naive and any(one.tzinfo is not None for one in found):
            return _ZONE
        return None

    return look


def _finer(kinds: Collection[type]) -> dict[type, Callable[[Any], int]]:
    """Of types whose values have nanoseconds, such as those of pandas, what tells how many beside the microseconds."""
    names = [(kind, "nanoseconds" if issubclass(kind, datetime.timedelta) else "nanosecond") for kind in kinds]
    return {kind: attrgetter(name) for kind, name in names if kind.__name__ != "NaTType" and hasattr(kind, name)}


def _microseconds(value: Any) -> int:
    return getattr(value, "microsecond", 0) if not isinstance(value, datetime.timedelta) else value.microseconds


def _is_number(kind: type) -> bool:
    # A timedelta64 of numpy counts as an integer there.
    return _is_truth(kind) or (issubclass(kind, Number) and kind.__name__ != "timedelta64")


def _of_list(looks: list[tuple[_Part, _Look]], values: Collection[Any]) -> str | None:
    if any(issubclass(kind, str) for kind in set(map(type, values))):
        return _TEXT
    return _inside(looks, values) if looks else None


def _inside(looks: list[tuple[_Part, _Look]], values: Collection[Any]) -> str | None:
    there = [value for value in values if hasattr(value, "__iter__")]  # what is not is a null
    if any(map(is_array, set(map(type, there)))):
        arrays = [value for value in there if is_array(type(value))]
        if any(value.dtype.kind in "mM" for value in arrays):
            return _RAW
        if any(hasattr(value, "mask") for value in arrays):
            return _MASK
    for part, look in looks:
        if (reason := look(list(chain.from_iterable(map(part, there))))) is not None:
            return reason
    return None


def is_array(kind: type) -> bool:
    """Whether it is numpy's array, or made of that; numpy is not imported for it."""
    return kind.__module__ != "builtins" and any(
        base.__module__ == "numpy" and base.__name__ == "ndarray" for base in kind.__mro__
    )


def _entries(looks: list[tuple[_Part, _Look]], values: Collection[Any]) -> str | None:
    entries = (value for value in values if hasattr(value, "__iter__") and not isinstance(value, dict))
    if any(entry is None for value in entries for entry in value):
        return _NO_ENTRY
    return _inside(looks, values) if looks else None


def _of_map(place: int, value: Any) -> Iterable[Any]:
    entries = value.items() if isinstance(value, dict) else value
    of_dict = ("key", "value")[place]
    return (entry[of_dict] if isinstance(entry, dict) else entry[place] for entry in entries)


def _fields(names: Sequence[str], looks: list[tuple[_Part, _Look]], values: Collection[Any]) -> str | None:
    """A field that the type has not would be lost, as by a slip in its name; one that is left out is a null."""
    # pyarrow takes names as bytes as well.
    known = frozenset[Any](names) | {name.encode() for name in names}
    for value in values:
        if isinstance(value, tuple) or not hasattr(value, "__iter__"):
            continue
        try:
            given = value if isinstance(value, dict) else dict(value)
        except (TypeError, ValueError):  # told by what makes a column of it
            continue
        if not given.keys() <= known:
            other = next(name for name in given if name not in known)
            has = ", ".join(names) or "none"
            return f"has a struct with the field {other!r}, which its type has not: it has {has}"
    return _inside(looks, values) if looks else None


def _of_struct(place: int, name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, tuple):
        return (value[place],)
    fields = value if isinstance(value, dict) else dict(value)
    return (fields.get(name, fields.get(name.encode())),)
