"""What a step puts out, as it is when it is put out: rows are collected for a block before they become columns, and
what a list, a dict or a bytearray holds by then may be another thing.

Owns which columns have values that can change (nested ones, and those whose values may be buffers), what copies such a
value, and `Made`, a list of rows that knows where each came from.

Invariant: a copy becomes what the value itself would have become. What pyarrow takes beside lists, tuples, dicts and
the like becomes a pyarrow scalar at once. What fits no column stays as it is, for the error about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from penstock._sides import Declared, Side, apart
from penstock._wholes import first_cut

__all__ = ["Made", "Origin", "Owner", "Refuse", "call_of", "flattened", "owner", "parted"]

_Own: TypeAlias = Callable[[Any], Any]

#: What holds text and bytes and cannot change.
_FIXED: Final = frozenset({str, bytes, type(None)})
_BUFFERS: Final = frozenset({bytearray, memoryview})
#: What pyarrow takes for a list, and another list is as good as.
_LISTS: Final = frozenset({list, deque, set, type({}.values())})
#: Types whose values may be buffers.
_TEXTS: Final = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
#: Columns of rows that take no buffers, so what they take cannot change.
_STRICT: Final = frozenset({pa.string(), pa.large_string(), pa.binary(), pa.large_binary()})


class Origin(NamedTuple):
    """What a row came from."""

    #: The function that put it out.
    func: Callable[..., Any]
    key: tuple[Any, ...] = ()
    #: The row that it was called for.
    row: dict[str, Any] | None = None
    #: What is told in place of key and row.
    note: str | None = None


class Made(list[Any]):
    """Rows that a step puts out, and of each, by its place, where it came from."""

    __slots__ = ("whence",)

    whence: Callable[[int], Origin | None]


#: Makes the exception of rows that do not fit: the reason, and the rows and the place of one where that is known.
Refuse: TypeAlias = Callable[..., BaseException]


def parted(rows: Made, sides: Declared, refuse: Refuse) -> tuple[Made, list[tuple[int, Made]]]:
    """The rows of a step, and those of each of its side outputs, by its number; see `apart`."""
    main, beside = apart(rows, sides, lambda reason, place: refuse(reason, rows, place))
    if len(main) == len(rows):
        return rows, []
    made = [(number, _within(rows, found, sides[number][0])) for number, found in beside]
    return _within(rows, main, None), made


def _within(all_of: Made, some: list[Any], side: str | None) -> Made:
    """Rows of the step, or of one side, that are some of what it put out."""
    made = Made(some)

    def whence(place: int) -> Origin | None:
        for number, one in enumerate(all_of):
            if type(one) is not Side:
                place -= side is None
            elif one.name == side:
                place -= len(one.rows) if type(one.rows) is list else 1
            if place < 0:
                return all_of.whence(number)
        return None

    made.whence = whence
    return made


class Owner:
    """Takes what a function puts out as it is.

    Parameters
    ----------
    schema
        Of the rows.
    sides
        Of rows of side outputs.

    Attributes
    ----------
    row
        Takes a tuple.
    plain
        Whether nothing can change, in side outputs neither.
    """

    __slots__ = ("_sides", "plain", "row")

    def __init__(self, schema: pa.Schema, sides: Declared = ()) -> None:
        row = _row_owner(schema)
        self.row: _Own = row or _unchanged
        self._sides = {name: own for name, columns in sides if (own := _row_owner(columns)) is not None}
        self.plain = row is None and not self._sides

    def one(self, made: Any) -> Any:
        """A row, or rows for a side output. What is neither stays."""
        if isinstance(made, tuple):
            return self.row(made)
        if type(made) is Side and isinstance(made.name, str) and (own := self._sides.get(made.name)) is not None:
            rows = made.rows
            if type(rows) is list:
                return Side(made.name, [own(row) if isinstance(row, tuple) else row for row in rows])
            return Side(made.name, own(rows) if isinstance(rows, tuple) else rows)
        return made

    def each(self, made: Iterable[Any]) -> Iterable[Any]:
        """As `one`, of each."""
        return made if self.plain else map(self.one, made)


def _unchanged(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row


def _row_owner(schema: pa.Schema) -> _Own | None:
    found = [(place, own) for place, kind in enumerate(schema.types) if (own := owner(kind)) and kind not in _STRICT]
    if not found:
        return None
    width = len(schema)
    if len(found) == 1:
        at, only = found[0]
        after = at + 1

        def own_one(row: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*row[:at], only(row[at]), *row[after:]) if len(row) == width else row

        return own_one

    def own_several(row: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(row) != width:
            return row
        values = list(row)
        for place, own in found:
            values[place] = own(values[place])
        return tuple(values)

    return own_several


def owner(kind: pa.DataType) -> _Own | None:
    """What makes of a value for this type one that stays as it is; None where no value can change.

    Examples
    --------
    >>> own = owner(pa.list_(pa.list_(pa.int64())))
    >>> inner = [1]
    >>> mine = own([inner, None])
    >>> inner.append(2)
    >>> mine, owner(pa.int64())
    ([[1], None], None)
    """
    is_type = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return owner(kind.storage_type)
    if is_type.is_dictionary(kind) or is_type.is_run_end_encoded(kind):
        return owner(kind.value_type)
    if is_type.is_map(kind):
        return _map_owner(kind)
    if is_type.is_struct(kind):
        return _struct_owner(kind)
    if hasattr(kind, "value_type"):
        return _list_owner(kind)
    return _bytes if any(is_one(kind) for is_one in _TEXTS) else None


def _bytes(value: Any) -> Any:
    return bytes(value) if type(value) in _BUFFERS else value


def _all_of(own: _Own | None, values: Iterable[Any]) -> list[Any]:
    """A list of these values, each of its own."""
    made = list(values)
    if own is None or (own is _bytes and _FIXED.issuperset(map(type, made))):
        return made
    return list(map(own, made))


def _list_owner(kind: Any) -> _Own:
    inner = owner(kind.value_type)

    def own(value: Any) -> Any:
        of = type(value)
        if of in _LISTS or isinstance(value, list):
            return _all_of(inner, value)
        if of in _FIXED or (inner is None and of is tuple):
            return value
        if isinstance(value, tuple):
            return tuple(_all_of(inner, value))
        if of.__module__ == "numpy" and of.__name__ == "ndarray" and not value.dtype.hasobject:
            return value.copy()
        return _converted(kind, value)

    return own


def _struct_owner(kind: Any) -> _Own:
    owns = {field.name: found for field in kind if (found := owner(field.type)) is not None}
    nested = {name: found for name, found in owns.items() if found is not _bytes}
    at = [(place, found) for place, field in enumerate(kind) if (found := owner(field.type)) is not None]
    width = kind.num_fields

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            made = dict(value)
            if owns:
                mine = nested if _BUFFERS.isdisjoint(map(type, made.values())) else owns
                for name, turn in mine.items():
                    if name in made:
                        made[name] = turn(made[name])
            return made
        if value is None or not (isinstance(value, tuple) and len(value) == width):
            return _converted(kind, value)
        if not at:
            return value
        values = list(value)
        for place, turn in at:
            values[place] = turn(values[place])
        return tuple(values)

    return own


def _map_owner(kind: Any) -> _Own:
    keys, items = owner(kind.key_type), owner(kind.item_type)

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            made = dict(value)  # what is a key of it cannot change
            return made if items is None else dict(zip(made, _all_of(items, made.values()), strict=True))
        if isinstance(value, list) and all(type(pair) is tuple and len(pair) == 2 for pair in value):
            first, second = (_all_of(turn, [pair[at] for pair in value]) for at, turn in enumerate((keys, items)))
            return list(zip(first, second, strict=True))
        return _converted(kind, value)

    return own


def _converted(kind: pa.DataType, value: Any) -> Any:
    """What else pyarrow takes, as it has it; what it does not take, as it is."""
    if value is None:
        return None
    try:
        if first_cut(kind, [value]) is None:
            made = pa.array([value], kind)[0]
            return made if made.is_valid else None
    except Exception:
        pass  # told where rows become columns
    return value


def flattened(outcomes: Sequence[Any]) -> Made:
    """The rows of what calls put out: of each call None, a row or a list of rows."""
    made = Made()
    append, extend = made.append, made.extend
    for one in outcomes:
        if type(one) is list:
            extend(one)
        elif one is not None:
            append(one)
    return made


def call_of(outcomes: Sequence[Any], place: int) -> int:
    """Which of these calls put out the row at a place of `flattened`."""
    for number, one in enumerate(outcomes):
        place -= len(one) if type(one) is list else one is not None
        if place < 0:
            return number
    raise IndexError(place)
