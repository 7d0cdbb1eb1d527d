"""What travels through a pipeline: a run of neighbouring items with what has become of them.

A chunk fills one slot of the native reorder buffers, whatever it holds: none, one or many values. A value that is a
`Failure` stands for an item whose function raised; later steps pass it on, and it is raised where its result would
have come.

Invariants: chunks are numbered without gaps in input order; `origins[i]` is the number of the item that `values[i]`
came from, and None means that they are the items `first`, `first + 1`, ... one to one; `failed` counts the failures
among `values`; an exception has one mark of a step that it came from, also where a function raises one object each
time.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from itertools import islice
from types import MemberDescriptorType, ModuleType, TracebackType
from typing import Any

__all__ = [
    "Chunk",
    "Elsewhere",
    "Failure",
    "Stays",
    "add_note",
    "estimate_bytes",
    "item_of",
    "mark",
    "marked",
    "notes_of",
    "place_of",
    "text_of",
]

#: About so many parts of a value are looked at for an estimate; from so many parts on they are the first ones.
_LOOKS, _MANY = 32, 4096
#: An estimate is no more than this, whatever objects say of themselves.
_MOST = 1 << 56


class Failure:
    """In place of a result: the exception of its function.

    `stays`: it is no exception of a function, but says what cannot leave a worker process. `bare`: the exception cannot
    be restored by calling its class with its arguments, and is without.
    """

    __slots__ = ("bare", "error", "stays")

    def __init__(self, error: BaseException, stays: bool = False, bare: bool = False) -> None:
        self.error, self.stays, self.bare = error, stays, bare

    def __reduce__(self) -> tuple[Any, ...]:
        notes = notes_of(self.error)
        if self.bare:
            state = {name: value for name, value in self.error.__dict__.items() if name != "__notes__"}
            return (_restore_bare, (type(self.error), self.error.args, state, notes))
        return (_restore, (self.error, notes, self.stays))


def _restore(error: BaseException, notes: list[str], stays: bool) -> Failure:
    for note in notes:  # some exceptions say themselves how they pickle, and forget them
        add_note(error, note)
    return Failure(error, stays)


def _restore_bare(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any], notes: list[str]) -> Failure:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return _restore(error, notes, False)


class Elsewhere(Exception):
    """In a worker process, in place of an exception that its parent has kept, with this number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stays(Exception):
    """What was to be done in a worker process has to be done here."""


class Chunk:
    """See the module.

    `count` is how many items it was made of, `final` says that the input ends with it, `spent` is seconds of work,
    `size` about the bytes of the items, `context` the variables of the caller when it was handed to a worker.
    """

    __slots__ = ("context", "count", "failed", "final", "first", "number", "origins", "size", "spent", "values")

    def __init__(self, number: int, first: int, values: list[Any], final: bool = False) -> None:
        self.context: Context | None = None
        self.number = number
        self.first = first
        self.count = len(values)
        self.values = values
        self.origins: Sequence[int] | None = None
        self.failed = 0
        self.final = final
        self.spent = 0.0
        self.size = 0

    @property
    def weight(self) -> int:
        """How many values there are now."""
        return len(self.values)

    def numbers(self) -> Sequence[int]:
        """Number of the item behind each value."""
        return range(self.first, self.first + len(self.values)) if self.origins is None else self.origins


def add_note(error: BaseException, text: str) -> None:
    """`BaseException.add_note`, also where Python does not have it yet; never fails."""
    try:
        notes = error.__dict__.setdefault("__notes__", [])
        if text not in notes:
            notes.append(text)
    except Exception:
        return


def notes_of(error: BaseException) -> list[Any]:
    """Its notes; none where somebody has put something else in their place."""
    try:
        notes = getattr(error, "__notes__", None)
    except Exception:
        notes = None
    return list(notes) if isinstance(notes, list) else []


def text_of(error: object) -> str:
    """What an exception says; never fails.

    Examples
    --------
    >>> class Mute(Exception):
    ...     def __str__(self):
    ...         return self.text
    >>> text_of(ValueError("no")), text_of(Mute())
    ('no', '<Mute that cannot say why>')
    """
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__qualname__} that cannot say why>"


class _Mark(str):
    """A note that says what a step has to do with an exception, and the traceback that it had then."""

    __slots__ = ("step", "traceback")
    step: str
    traceback: TracebackType | None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_made, (str(self), self.step))


def _made(text: str, step: str, traceback: TracebackType | None = None) -> _Mark:
    made = _Mark(text)
    made.step, made.traceback = step, traceback
    return made


def mark(error: BaseException, text: str, step: str) -> None:
    """`add_note` for what holds for this time that a step failed, and not for the next one; see `marked`."""
    add_note(error, _made(text, step, error.__traceback__))


def marked(error: BaseException, text: str, step: str) -> BaseException:
    """The exception with a mark of a step; another one in its place where the step has marked it before.

    A function may raise one object each time. Its first failure has that, the others have copies; where it cannot be
    copied all have it, with the mark of the last one.
    """
    if any(note.__class__ is _Mark and note.step == step for note in notes_of(error)):
        error = _again(error)
    mark(error, text, step)
    return error


def _again(error: BaseException) -> BaseException:
    """A copy without marks."""
    notes = notes_of(error)
    marks = [note for note in notes if note.__class__ is _Mark]
    kept = [note for note in notes if note.__class__ is not _Mark]
    traceback = error.__traceback__
    # Each time that it is raised it gets longer.
    error.__traceback__ = marks[0].traceback
    try:
        made = copy.copy(error)
        same = made is error or made.__class__ is not error.__class__ or not bool(made.args == error.args)
    except Exception:
        same = True
    if same:
        made = error
    else:
        made.__cause__, made.__context__ = error.__cause__, error.__context__
        made.__suppress_context__ = error.__suppress_context__
    made.__dict__["__notes__"] = kept
    made.__traceback__ = traceback
    return made


def item_of(number: int | None) -> int | None:
    """The number of an item as errors have it: None for the end of the input."""
    return None if number is None or number < 0 else number


def place_of(first: int | None, last: int | None = None) -> str:
    """Words for a range of numbers of items; outputs of the end of the input have -1.

    Examples
    --------
    >>> place_of(3), place_of(3, 5)
    ('item 3 of the input', 'items 3 to 5 of the input')
    >>> place_of(3, -1), place_of(-1, -1)
    ('items from 3 to the end of the input', 'the end of the input')
    """
    first, last = item_of(first), item_of(first if last is None else last)
    if first is None:
        return "the end of the input"
    if last is None:
        return f"items from {first} to the end of the input"
    return f"item {first} of the input" if first == last else f"items {first} to {last} of the input"


#: What has parts, and how to see them without calling a method of a user's class.
_PARTS: dict[type, Callable[[Any], Iterator[Any]]] = {
    dict: lambda value: iter(dict.values(value)),
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
}
#: What is not looked into.
_PLAIN = frozenset((int, float, bool, str, bytes, bytearray, complex, type(None), type, ModuleType))


def estimate_bytes(values: Sequence[Any]) -> int:
    """About how much memory values hold: what says so itself exactly, else from a few of them and of their parts."""
    if not values:
        return 0
    picked = values if len(values) <= 8 else [values[i * (len(values) - 1) // 7] for i in range(8)]
    total = sum([_size(value, _LOOKS) for value in picked])
    return min(_MOST, total * len(values) // len(picked))


def _size(value: Any, looks: int) -> int:
    """About the bytes of one value, from so many looks into it."""
    kind = type(value)
    try:
        if kind in _PLAIN:
            return sys.getsizeof(value, 64)
        if kind not in _PARTS and (told := _told(value)) is not None:
            return told
        size = sys.getsizeof(value, 64)
        if looks <= 0:
            return size
        parts, count = _parts(value, kind)
        seen = list(islice(parts, 0, None, max(1, count // looks)) if count < _MANY else islice(parts, looks))
    except Exception:  # it says nothing, or another thread changes it
        return 64
    if not seen:
        return size
    each = (looks - len(seen)) // len(seen)
    within = 0
    for part in seen:
        within += sys.getsizeof(part) if type(part) in _PLAIN else _size(part, each)
    return size + within * count // len(seen)


def _told(value: Any) -> int | None:
    """What it says itself."""
    try:
        size = getattr(value, "nbytes", None)
    except Exception:
        return None
    return size if isinstance(size, int) and size >= 0 else None


def _parts(value: Any, kind: type) -> tuple[Iterator[Any], int]:
    """What a value is made of, and how many that are."""
    base: Any
    if kind in _PARTS:
        return _PARTS[kind](value), len(value)
    for base in _PARTS:
        if issubclass(kind, base):
            return _PARTS[base](value), base.__len__(value)
    if getattr(kind, "__sizeof__", None) is not object.__sizeof__:
        return iter(()), 0  # it says itself
    fields = getattr(value, "__dict__", None)
    found: list[Any] = list(fields.values()) if type(fields) is dict else []
    for base in kind.__mro__:
        if "__slots__" in base.__dict__:
            for member in base.__dict__.values():
                if type(member) is MemberDescriptorType:
                    try:
                        found.append(member.__get__(value, kind))
                    except AttributeError:
                        continue  # not set
    return iter(found), len(found)
