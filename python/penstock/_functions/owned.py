"""What a step puts out, as it is when it is put out: rows are collected for a block before they become columns, and
what a list, a dict or a bytearray holds by then may be another thing.

Owns which columns have values that can change (nested ones, and those whose values may be buffers), what copies such a
value, and `Made`, a list of rows that knows where each came from (`Marks`).

Invariant: a copy becomes what the value itself would have become. What pyarrow takes beside lists, tuples, dicts and
the like becomes a pyarrow scalar at once. What fits no column stays as it is, for the error about it.
"""

from __future__ import annotations

import bisect
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

import pyarrow as pa

from penstock._sides import Declared, Side, apart
from penstock._wholes import first_cut, is_array

__all__ = ["Made", "Marks", "Origin", "Owner", "Refuse", "buffers_apart", "of_numpy", "owner", "parted"]

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
_STRICT: Final = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


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


def _unchanged(row: Any) -> Any:
    return row


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
    one
        Takes a row, or rows for a side output; what is neither stays.
    columns
        What takes a value of a column; None where it cannot change.
    plain
        Whether nothing can change, in side outputs neither.
    """

    __slots__ = ("_row", "_sides", "columns", "one", "plain")

    def __init__(self, schema: pa.Schema, sides: Declared = ()) -> None:
        self.columns = owns = _of_columns(schema)
        self._row = _row_owner(owns)
        self._sides = {name: _row_owner(found) for name, columns in sides if any(found := _of_columns(columns))}
        self.plain = not any(owns) and not self._sides
        self.one: _Own = _row_owner(owns, self._other)

    def each(self, made: Iterable[Any]) -> Iterable[Any]:
        """As `one`, of each."""
        return made if self.plain else map(self.one, made)

    def _other(self, made: Any) -> Any:
        """What is not exactly a tuple of as many values as there are columns."""
        if isinstance(made, tuple):
            return self._row(tuple(made))
        if type(made) is not Side or not isinstance(made.name, str) or (own := self._sides.get(made.name)) is None:
            return made
        rows = made.rows
        if type(rows) is list:
            return Side(made.name, [own(tuple(row)) if isinstance(row, tuple) else row for row in rows])
        return Side(made.name, own(tuple(rows)) if isinstance(rows, tuple) else rows)


def _of_columns(schema: pa.Schema) -> list[_Own | None]:
    return [None if kind in _STRICT else owner(kind) for kind in schema.types]


def _row_owner(owns: Sequence[_Own | None], other: _Own = _unchanged) -> _Own:
    """What takes a tuple of as many values, written out; `other` takes what is none."""
    names = [f"v{place}" for place in range(len(owns))]
    values = [name if own is None else f"own_{name}({name})" for name, own in zip(names, owns, strict=True)]
    source = f"""
def take(row):
    if type(row) is not tuple or len(row) != {len(owns)}:
        return other(row)
    {", ".join(names)}, = row
    return {", ".join(values)},
"""
    scope: dict[str, Any] = {"other": other} | {f"own_{name}": own for name, own in zip(names, owns, strict=True)}
    if any(owns):
        exec(compile(source, "<penstock rows>", "exec"), scope)
        return cast(_Own, scope["take"])
    return lambda row: row if type(row) is tuple else other(row)


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


def buffers_apart(values: Collection[Any]) -> Collection[Any]:
    """These values, with bytes in place of buffers."""
    return values if _BUFFERS.isdisjoint(map(type, values)) else list(map(_bytes, values))


def _all_of(own: _Own | None, values: Iterable[Any]) -> list[Any]:
    """A list of these values, each of its own."""
    made = list(values)
    if own is None or (own is _bytes and _FIXED.issuperset(map(type, made))):
        return made
    return list(map(own, made))


def _list_owner(kind: Any) -> _Own:
    inner = owner(kind.value_type)
    nested = inner is not None and inner is not _bytes

    def own(value: Any) -> Any:
        if type(value) is list:
            if nested:
                return [inner(one) for one in value]  # type: ignore[misc]
            return value[:] if inner is None or _FIXED.issuperset(map(type, value)) else list(map(inner, value))
        of = type(value)
        if of in _FIXED or (inner is None and of is tuple):
            return value
        if of in _LISTS or isinstance(value, list):
            return _all_of(inner, value)
        if isinstance(value, tuple):
            return tuple(_all_of(inner, value))
        if is_array(of) and not value.dtype.hasobject:
            return of_numpy(kind, value)
        return _converted(kind, value)

    return own


def of_numpy(kind: Any, value: Any) -> Any:
    """An array of numpy's as a list of this type takes it: of times pyarrow would take the bare numbers, whatever their
    unit, and great ones without a sign would become negative floats."""
    numpy = sys.modules["numpy"]
    if hasattr(value, "mask"):
        made = of_numpy(kind, numpy.asarray(value.data))
        return [None if is_masked else one for one, is_masked in zip(made, numpy.ma.getmaskarray(value), strict=True)]
    value = numpy.asarray(value)  # of a subclass, too
    if value.dtype.kind in "mM":
        try:
            if pa.types.is_temporal(kind.value_type):
                return list(pa.array(value).cast(kind.value_type))
        except pa.ArrowException:
            pass
        return value.copy()  # told where rows become columns
    if value.dtype.kind == "u" and pa.types.is_floating(kind.value_type):
        return value.astype("f8")
    return value.copy()


def _struct_owner(kind: Any) -> _Own:
    at = [(place, found) for place, field in enumerate(kind) if (found := owner(field.type)) is not None]
    texts = [kind[place].name for place, found in at if found is _bytes]
    nested = [(kind[place].name, found) for place, found in at if found is not _bytes]
    width = kind.num_fields

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            made = value.copy() if type(value) is dict else dict(value)
            get = made.get
            for name in texts:
                if type(found := get(name)) in _BUFFERS:
                    made[name] = bytes(found)  # type: ignore[arg-type]
            for name, turn in nested:
                if (found := get(name)) is not None:
                    made[name] = turn(found)
            return made
        if value is None or not (isinstance(value, tuple) and len(value) == width):
            return _converted(kind, value)
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


class Marks:
    """Which of the calls of a function put out which row, where most put out one: what differs from that is marked.

    Attributes
    ----------
    starts
        Places of rows from which on a mark holds.
    calls
        The call that put out the row there, from which on each put out one; inverted (``~call``) where that call alone
        put out all rows up to the next mark.

    Examples
    --------
    >>> marks = Marks()
    >>> marks.starts += [1, 3]  # the second call put out two rows, the third none, and those behind it one each
    >>> marks.calls += [~1, 3]
    >>> [marks.call_of(place) for place in range(5)]
    [0, 1, 1, 3, 4]
    """

    __slots__ = ("calls", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.calls: list[int] = []

    def call_of(self, place: int) -> int:
        """The call that put out the row at a place."""
        at = bisect.bisect_right(self.starts, place) - 1
        if at < 0:
            return place
        call = self.calls[at]
        return ~call if call < 0 else call + place - self.starts[at]
