"""Keys and values that Python functions have stored, as columns that people read.

Owns: what is unpickled of a file that nobody vouches for, and how a value is shown. Invariants: without trust only
builtin types and those of the standard library's dates, decimals and collections are made, and nothing of this process
is changed; the text of a value is bounded by the bytes of its pickle (one that refers to its parts again and again has
any length), and what cannot be read is named in its row. What a hostile pickle takes while it is loaded is not bounded.
"""

from __future__ import annotations

import base64
import copyreg
import importlib
import io
import pickle
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID, SafeUUID
from zoneinfo import ZoneInfo

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Values", "most_text"]

#: Characters of text that a value may have: by byte of its pickle, beside these, and at most. Without parts that it
#: refers to often it has up to seven for a byte. A column of a block holds 2 GiB.
_TEXT_BY_BYTE, _TEXT_BESIDE, _TEXT_MOST = 64, 4_096, 1 << 28
#: A number of more bits is told in hexadecimal: its text in decimal may be refused, and takes time by its square.
_LONG_BITS = 14_000
#: Characters of a reason why a value cannot be read.
_REASON = 1_000
#: What a value raises when it is made: it may end nobody but its row.
_RAISED = (Exception, SystemExit, GeneratorExit)


class Values:
    """Keys and values of a Python function as columns."""

    def __init__(self, keys: pa.Schema, state: str | None, unpickle: bool) -> None:
        import pyarrow as pa

        self._load = pickle.loads if unpickle else _load_plain
        self._keys, self._state = keys, None
        # Keys may be called like what stands beside them.
        value, timeout, size, readable, problem = (
            _free(name, keys.names) for name in ("value", "timeout_ms", "bytes", "readable", "problem")
        )
        fields = [field.with_nullable(True).remove_metadata() for field in keys]
        if state is None:
            fields.append(pa.field(value, pa.string()))
        else:
            kept = pa.struct(list(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(state)))))
            self._state = _without_zones(kept)
            fields += [pa.field(value, self._state), pa.field(timeout, pa.int64())]
        fields += [pa.field(size, pa.int64()), pa.field(readable, pa.bool_()), pa.field(problem, pa.string())]
        self.schema = pa.schema(fields)

    def table(self, block: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a block of pickled keys and values."""
        import pyarrow as pa

        rows = [self._row(*pair) for pair in zip(block[0].to_pylist(), block[1].to_pylist(), strict=True)]
        columns = zip(*rows, strict=True) if rows else [()] * len(self.schema)
        return pa.record_batch(
            [pa.array(column, field.type) for column, field in zip(columns, self.schema, strict=True)],
            schema=self.schema,
        )

    def _row(self, name: bytes, body: bytes) -> list[Any]:
        import pyarrow as pa

        problems = []
        key: Sequence[Any] = [None] * len(self._keys)
        try:
            loaded = self._load(name)
            loaded = loaded if isinstance(loaded, tuple) else (loaded,)
            if len(loaded) != len(self._keys):
                raise ValueError(f"it has {len(loaded)} columns")
            _check_text(loaded, len(name))
            for item, kind in zip(loaded, self._keys.types, strict=True):
                pa.scalar(item, kind)
            key = loaded
        except _RAISED as error:
            problems.append(f"the key of bytes {name[:40]!r} cannot be read: {_told(error)}")
        value: list[Any] = [None] if self._state is None else [None, None]
        try:
            state = self._load(body)
            if self._state is None:
                most = most_text(len(body))
                text, whole = _text(state, most)
                value = [_encodable(text if whole else f"{text}...")]
                if not whole:
                    problems.append(_cut(most, len(body)))
            else:
                _check_text(state, len(body))
                fields, timeout = state
                pa.scalar(timeout, pa.int64())
                names = [field.name for field in self._state]
                told = None if fields is None else dict(zip(names, fields, strict=True))
                pa.scalar(told, self._state)
                value = [told, timeout]
        except _RAISED as error:
            problems.append(f"its value cannot be read: {_told(error)}")
        return [*key, *value, len(body), not problems, _encodable("; ".join(problems)) or None]


def _without_zones(kind: pa.DataType) -> pa.DataType:
    """The type of what a function keeps for values of a type: times are readings of its zone's clock."""
    import pyarrow as pa

    is_type = pa.types
    if is_type.is_timestamp(kind):
        return pa.timestamp(kind.unit)
    if is_type.is_struct(kind):
        return pa.struct([field.with_type(_without_zones(field.type)) for field in kind])
    if is_type.is_map(kind):
        parts = (field.with_type(_without_zones(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(*parts, kind.keys_sorted)
    if is_type.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_zones(kind.value_type)))
    return kind


def _encodable(text: str) -> str:
    """A text as a column takes it: names of files may hold what is no character."""
    return text.encode("utf-8", "backslashreplace").decode()


def _told(error: BaseException) -> str:
    told = str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"
    return told if len(told) <= _REASON else f"{told[:_REASON]}..."


def _free(name: str, taken: Iterable[str]) -> str:
    """A name that no column has."""
    taken = set(taken)
    while name in taken:
        name = f"{name}_"
    return name


def most_text(size: int) -> int:
    """Characters of text that a value may have whose pickle has so many bytes."""
    return min(_TEXT_BESIDE + _TEXT_BY_BYTE * size, _TEXT_MOST)


def _cut(most: int, size: int) -> str:
    return f"its text, more than {most:,} characters from {size:,} bytes, is cut: what it shares is told each time"


def _check_text(value: Any, size: int) -> None:
    """Refuse what becomes far more than its pickle: columns have its parts as often as its text, and so have errors."""
    most = most_text(size)
    if not _text(value, most)[1]:
        raise _Refused(
            f"it is more than {most:,} characters as text from {size:,} bytes: what it shares is told each time"
        )


def _text(value: Any, most: int) -> tuple[str, bool]:
    """What ``repr`` says of a value, at most so many characters of it, and whether that is all.

    Numbers of thousands of digits are in hexadecimal. Takes no more time than its text is long, and no stack: builtin
    values may be nested to any depth.

    Examples
    --------
    >>> _text([1, {"a": ()}], 100), _text([[1, 2], 3], 7)
    (("[1, {'a': ()}]", True), ('[[1, 2]', False))
    """
    words: list[str] = []
    left = most
    #: Containers that have begun: what is left of them, how they end, themselves.
    begun: list[tuple[Iterator[tuple[str, Any]], str, Any]] = [(iter([("", value)]), "", None)]
    path: set[int] = set()
    while begun and left >= 0:
        items, end, of = begun[-1]
        for before, item in items:
            shape = _SHAPES.get(type(item))
            if shape is None or not len(item):
                word = _number(item) if type(item) is int else repr(item)
            else:
                word, inner, last = shape(item)
                if id(item) in path:
                    word = f"{word}...{last}"
                else:
                    begun.append((inner, last, item))
                    path.add(id(item))
            words += (before, word)
            left -= len(before) + len(word)
            if left < 0 or begun[-1][2] is not of:
                break
        else:
            begun.pop()
            path.discard(id(of))
            words.append(end)
            left -= len(end)
    return "".join(words)[:most], left >= 0


def _number(number: int) -> str:
    if number.bit_length() <= _LONG_BITS:
        try:
            return repr(number)
        except ValueError:  # where Python was told to refuse fewer digits
            pass
    return hex(number)


def _items(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Items of a container, each with what stands before it."""
    return zip(chain([""], repeat(", ")), values, strict=False)


def _pairs(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    before = ""
    for key, value in pairs:
        yield before, key
        yield ": ", value
        before = ", "


def _counted(counter: Counter[Any]) -> Iterable[tuple[Any, Any]]:
    """The most common first, where they are numbers: to compare others may take any time."""
    pairs = dict.items(counter)
    numbers = {type(count) for _, count in pairs} <= {bool, int, float}
    return sorted(pairs, key=itemgetter(1), reverse=True) if numbers else pairs


def _ordered(value: OrderedDict[Any, Any]) -> tuple[str, Iterator[tuple[str, Any]], str]:
    pairs = OrderedDict.items(value)
    if sys.version_info >= (3, 12):
        return "OrderedDict({", _pairs(pairs), "})"
    return "OrderedDict([", _items(pairs), "])"


#: How a container that is not empty is shown: what its text begins with, its items, what it ends with.
_SHAPES: Mapping[type, Callable[[Any], tuple[str, Iterator[tuple[str, Any]], str]]] = {
    list: lambda of: ("[", _items(of), "]"),
    tuple: lambda of: ("(", _items(of), ",)" if len(of) == 1 else ")"),
    dict: lambda of: ("{", _pairs(of.items()), "}"),
    set: lambda of: ("{", _items(of), "}"),
    frozenset: lambda of: ("frozenset({", _items(of), "})"),
    deque: lambda of: ("deque([", _items(of), "])" if of.maxlen is None else f"], maxlen={of.maxlen})"),
    Counter: lambda of: ("Counter({", _pairs(_counted(of)), "})"),
    OrderedDict: _ordered,
}


class _Refused(pickle.UnpicklingError):
    """A pickle names something that need not be harmless."""


#: What pickles may name without trust: calling any of these with anything runs no code of the pickle's.
_PLAIN = {
    "builtins": {"complex", "frozenset", "getattr", "set"},
    "collections": {"Counter", "OrderedDict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "uuid": {"SafeUUID", "UUID"},
    "zoneinfo": {"ZoneInfo"},
}


def _refuse(of: Any, state: Any) -> None:
    raise _Refused(f"it sets attributes of {of!r}, which is this process's: unpickle=True if you trust who wrote it")


def _sealed(module: str, name: str, make: Callable[..., Any]) -> type:
    """A class that stands in for what the process shares: a pickle can make values by it, and set nothing of it."""
    made = {"__module__": module, "__new__": lambda _, *given: make(*given), "__setstate__": classmethod(_refuse)}
    return type(name, (), made)


@cache
def _stand_in(module: str, name: str) -> type:
    """What a pickle gets for a name of `_PLAIN`."""
    return _sealed(module, name, _MAKE.get(name) or getattr(importlib.import_module(module), name))


def _uuid(*given: Any) -> UUID:
    """`UUID`, as pickles call it: made without anything, its state follows."""
    return UUID(*given) if given else UUID.__new__(UUID)


def _safe_uuid(value: Any) -> Any:
    """What is shown as a member of the enum, which the process shares."""
    told = repr(SafeUUID(value))
    return type("SafeUUID", (), {"__repr__": lambda _: told, "__setstate__": _refuse})()


def _zone_maker(of: Any, name: Any) -> Any:
    """`getattr` as far as time zones are pickled by it: timestamps of rows have one."""
    if of is not _stand_in("zoneinfo", "ZoneInfo") or name != "_unpickle":
        raise _Refused("it is made by builtins.getattr, which runs code: unpickle=True if you trust who wrote it")
    return _sealed("zoneinfo", "ZoneInfo", ZoneInfo._unpickle)  # type: ignore[attr-defined]


_MAKE: Mapping[str, Callable[..., Any]] = {"UUID": _uuid, "SafeUUID": _safe_uuid, "getattr": _zone_maker}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return _stand_in(module, name)
        raise _Refused(f"it is made by {module}.{name}, which runs code: unpickle=True if you trust who wrote it")


def _load_plain(data: bytes) -> Any:
    # What others have loaded by a number of copyreg's is not asked for by name.
    copyreg.clear_extension_cache()
    return _Plain(io.BytesIO(data)).load()
