"""Keyed Python state of one bin: live objects in a dict, with an undo journal and a pickled form.

A `BinState` belongs to one bin of one step with state. The step's loop works on its dict directly (`open`); the objects
stay live between calls and are pickled only when the bin moves to another process or into a snapshot. A bin that is
split or merged hands them over as they are (`entries`, `take`), unless an undo would want them back.

Undo. From the first `mark` on, the state of a key is saved when it is first touched after a mark, and `rollback`
puts everything back as it was at the last mark. Immutable states are saved by reference; lists, dicts, sets and the
like are copied type by type; anything else by ``copy.deepcopy``. So the cost is one copy per key and epoch, and none
for keys that the epoch does not touch.

The journal also says which keys an epoch touched. `changes` tells what they are now, key by key, for files: each
state is a pickle of its own, so that one that cannot be read costs no other, and equal keys have equal bytes. `restore`
takes them back, and remembers those that it could not read (`unreadable`) until newer ones of their keys come: a
reader of many epochs asks for them at its end.

A step that raises leaves the bin *tainted* (the step may have changed a mutable state halfway): until `rollback`,
`open` and `encode` refuse. A state that is never marked cannot be rolled back, and stays tainted.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import fractions
import io
import itertools
import math
import pickle
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import cloudpickle

from penstock._functions.short import short
from penstock.errors import StateError

__all__ = [
    "ATOMIC",
    "FORMAT",
    "MISSING",
    "BinState",
    "Uncopied",
    "copy_state",
    "own_key",
    "own_nan",
    "sampled",
    "size_of",
    "uncopied",
]

#: First byte of every chunk of state.
FORMAT: Final = 1
_DATA: Final = 0
_CHUNK_BYTES: Final = 1 << 20
_CONTAINERS: Final[tuple[Any, ...]] = (list, tuple, set, frozenset, deque)


class _Missing:
    """Journal entry of a key that did not exist at the mark."""

    __slots__ = ()


MISSING: Final = _Missing()

#: Types whose values cannot change: a reference is as good as a copy.
ATOMIC: Final = frozenset(
    {
        bool,
        bytes,
        complex,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        decimal.Decimal,
        float,
        fractions.Fraction,
        int,
        range,
        str,
        type(None),
        type(Ellipsis),
        uuid.UUID,
    }
)


class Uncopied(Exception):
    """The state of a key cannot be copied; its cause says why."""

    def __init__(self, key: Any) -> None:
        super().__init__(key)
        self.key = key


def uncopied(step: str, key: tuple[Any, ...], error: BaseException | None) -> StateError:
    """The error of a state that cannot be copied, of its key and of why."""
    shown = short(key[0] if len(key) == 1 else key)
    return StateError(
        f"{step}: the state of key {shown} cannot be copied, as undoing an epoch needs: {type(error).__name__}: {error}"
    )


def copy_state(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """An independent copy of `value`: changes to either are not seen in the other.

    Equal to ``copy.deepcopy`` in what it returns, cheaper for builtin containers.

    Parameters
    ----------
    value
        Any object that ``copy.deepcopy`` takes.
    memo
        Objects already copied, by id: keeps shared and cyclic references.
    """
    kind = type(value)
    if kind in ATOMIC:
        return value
    if memo is None:
        memo = {}
    else:
        known = memo.get(id(value), MISSING)
        if known is not MISSING:
            return known
    if kind is list:
        made: Any = []
        memo[id(value)] = made
        made.extend([item if type(item) in ATOMIC else copy_state(item, memo) for item in value])
        return made
    if kind is dict:
        made = {}
        memo[id(value)] = made
        for key, item in value.items():
            if type(key) not in ATOMIC:
                key = copy_state(key, memo)
            made[key] = item if type(item) in ATOMIC else copy_state(item, memo)
        return made
    if kind is set and ATOMIC.issuperset(map(type, value)):
        made = memo[id(value)] = set(value)
        return made
    if kind is tuple and ATOMIC.issuperset(map(type, value)):
        return value
    if kind is deque:
        made = memo[id(value)] = deque(maxlen=value.maxlen)
        made.extend(item if type(item) in ATOMIC else copy_state(item, memo) for item in value)
        return made
    return copy.deepcopy(value, memo)


class BinState:
    """State of one bin: key -> live object, never None.

    Attributes
    ----------
    states
        The dict; the same object as long as the bin lives.
    journal
        What keys were at the last mark, of those touched since; None before the first mark.
    spent_s
        Seconds that calls of functions have taken for keys of this bin alone since the native side asked last: what it
        tells as the cost of the bin.
    """

    __slots__ = ("_tainted", "_unreadable", "journal", "spent_s", "states")

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}
        self.journal: dict[Any, Any] | None = None
        self.spent_s = 0.0
        self._tainted = False
        #: Bytes of keys whose newest state could not be read, and why.
        self._unreadable: dict[bytes, Exception] = {}

    def open(self) -> dict[Any, Any]:
        """The states, to be worked on; who changes them keeps the journal.

        Raises
        ------
        StateError
            When a step has failed here.
        """
        self._check()
        return self.states

    def taint(self) -> None:
        """A step has failed: a state may have changed halfway."""
        self._tainted = True

    def mark(self) -> None:
        """An epoch begins: `rollback` comes back to here. Forgets the mark before."""
        self._check()
        self.journal = {}

    def rollback(self) -> None:
        """Put every key back as it was at the last mark."""
        journal = self.journal
        if journal is None:
            raise StateError("this state has no mark to go back to: the run keeps no journal")
        states = self.states
        for key, saved in journal.items():
            if saved is MISSING:
                states.pop(key, None)
            else:
                states[key] = saved
        self.journal = {}
        self._tainted = False

    def encode(self, changed: bool = True) -> Iterator[bytes]:
        """The whole state as chunks of about a mebibyte, for `absorb`; the journal stays behind.

        Parameters
        ----------
        changed
            Whether keys that were touched since the mark are among them.

        Raises
        ------
        StateError
            When a step has failed here, or a state does not pickle; it names the key.
        """
        self._check()
        journal: dict[Any, Any] = {} if changed or self.journal is None else self.journal
        keys = iter([key for key in self.states if key not in journal] if journal else list(self.states))
        size = 256
        while chunk := list(itertools.islice(keys, size)):
            body = _dump(self.states, chunk)
            yield bytes((FORMAT, _DATA)) + body
            size = max(1, min(1 << 16, size * _CHUNK_BYTES // max(1, len(body))))

    def changes(self, anew: bool = False) -> Iterator[list[tuple[Any, bytes, bytes | None]]]:
        """What has become of the keys that were touched since the mark, or of all where there was none or with `anew`.

        Yields
        ------
        list of tuple
            About a mebibyte at a time: key, its bytes, the bytes of its state or None where it has none. For `restore`.

        Raises
        ------
        StateError
            When a step has failed here, or a state does not pickle; it names the key.
        """
        self._check()
        states = self.states
        part: list[tuple[Any, bytes, bytes | None]] = []
        size = 0
        for key in list(states if anew or self.journal is None else self.journal):
            state = states.get(key, MISSING)
            body = None if state is MISSING else _dump_one(key, state)
            part.append((key, _dump_key(key), body))
            size += 64 + len(body or b"")
            if size >= _CHUNK_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part

    def restore(self, entries: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Take keys as `changes` gives them; they replace equal keys here, and count as touched. Undone, they stay.

        What cannot be read is left out: see `unreadable`.
        """
        states, journal, unreadable = self.states, self.journal, self._unreadable
        for name, body in entries:
            try:
                key = own_nan(pickle.loads(name))
                state = MISSING if body is None else pickle.loads(body)
            except Exception as error:
                unreadable[name] = error
                continue
            unreadable.pop(name, None)
            if state is MISSING:
                states.pop(key, None)
            else:
                states[key] = state
            if journal is not None:
                journal[key] = state if state is MISSING else copy_state(state)

    def unreadable(self) -> tuple[int, str, str] | None:
        """Of how many keys the newest state given to `restore` could not be read; the first, in short, and why."""
        for name, error in self._unreadable.items():
            return len(self._unreadable), _shown(name), f"{type(error).__name__}: {error}"
        return None

    def require(self) -> None:
        """See that all could be read.

        Raises
        ------
        StateError
            It names the first key, and says how many more there are.
        """
        if (told := self.unreadable()) is not None:
            count, key, why = told
            more = f" and of {count - 1} more keys" if count > 1 else ""
            raise StateError(f"the state of key {key}{more} could not be restored here: {why}")

    def absorb(self, chunk: bytes) -> None:
        """Take the keys of one chunk of `encode`; they replace equal keys here, and do not count as touched.

        Raises
        ------
        StateError
            When the chunk is of another format, or its contents cannot be restored; nothing was taken.
        """
        if len(chunk) < 2 or chunk[0] != FORMAT:
            raise StateError(f"state of format {chunk[0] if chunk else None!r} cannot be read, only format {FORMAT}")
        if chunk[1] != _DATA:
            raise StateError(f"a chunk of state of kind {chunk[1]} belongs to another step")
        try:
            keys, states = pickle.loads(chunk[2:])
            taken = {own_key(key): state for key, state in zip(keys, states, strict=True)}
        except Exception as error:
            raise StateError(f"the state could not be restored here: {type(error).__name__}: {error}") from error
        self.states.update(taken)

    def entries(self) -> list[tuple[Any, Any]] | None:
        """All keys with their live states, for `take` of other bins here; None where those must get copies, since this
        one may be rolled back or has more than states.

        Raises
        ------
        StateError
            When a step has failed here.
        """
        self._check()
        return list(self.states.items()) if self.journal is None else None

    def take(self, entries: Iterable[tuple[Any, Any]]) -> None:
        """Take keys with their states from `entries` of another bin; they do not count as touched."""
        self.states.update(entries)
        self.restore(())  # what else is known of the keys is made anew

    def keys(self) -> int:
        """How many keys have state."""
        return len(self.states)

    def bytes(self) -> int:
        """About how many bytes the state takes: a sample of 16 keys, and one level into containers and attributes."""
        states = self.states
        count = len(states)
        if not count:
            return 0
        some = list(itertools.islice(states.items(), 16))
        mean = sum(size_of(key) + self.weight(state) for key, state in some) / len(some)
        return sys.getsizeof(states) + int(mean * count)

    def weight(self, state: Any) -> int:
        """About how many bytes what is kept of a key takes."""
        return size_of(state)

    def get(self, key: Any, default: Any = None) -> Any:
        """State of `key`, or `default`. The live object: do not change it."""
        return self.states.get(key, default)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All keys with their live states."""
        return iter(self.states.items())

    def __len__(self) -> int:
        return len(self.states)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("BinState is live state and cannot be pickled: use encode() and absorb()")

    def _check(self) -> None:
        if self._tainted:
            raise StateError("the step failed in the middle of a row: roll back before using this state again")


def own_nan(key: Any) -> Any:
    """The key with the NaN that rows bring here: a NaN equals only itself, and another process has another one."""
    if type(key) is tuple:
        return tuple(map(own_nan, key))
    return math.nan if type(key) is float and key != key else key


def own_key(key: Any) -> Any:
    """The key as rows bring it here: with their NaN, and with the one zero, which is 0.0.

    Examples
    --------
    >>> own_key((-0.0, "a"))
    (0.0, 'a')
    """
    return own_nan(_one_zero(key))


def _dump_key(key: Any) -> bytes:
    """The bytes of a key: equal for equal keys of one type, whichever objects they are made of."""
    sink = io.BytesIO()
    pickler = pickle.Pickler(sink, protocol=5)
    pickler.fast = True  # no memo: what is the same object twice is written twice, as what is equal is
    pickler.dump(_one_zero(key))
    return sink.getvalue()


def _one_zero(key: Any) -> Any:
    if type(key) is tuple:
        return tuple(map(_one_zero, key))
    return key + 0.0 if type(key) is float else key


def _dump_one(key: Any, state: Any) -> bytes:
    try:
        # What consists of builtin types needs no way around classes of scripts, and is ten times faster without.
        dump = pickle.dumps if _builtin(state, 4) else cloudpickle.dumps
        body: bytes = dump(state, protocol=5)
        return body
    except Exception as error:
        raise StateError(f"the state of key {key!r} cannot be pickled: {error}") from error


def _builtin(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in ATOMIC:
        return True
    if depth and kind in (list, tuple, set, frozenset):
        return ATOMIC.issuperset(map(type, value)) or all(_builtin(item, depth - 1) for item in value)
    if depth and kind is dict:
        return all(_builtin(item, depth - 1) for pair in value.items() for item in pair)
    return False


def _shown(name: bytes) -> str:
    """A key as messages show it, from its bytes."""
    try:
        return short(pickle.loads(name))
    except Exception:
        return f"of bytes {name[:40]!r}"


def _dump(states: dict[Any, Any], keys: list[Any]) -> bytes:
    try:
        body: bytes = cloudpickle.dumps((keys, [states[key] for key in keys]), protocol=5)
        return body
    except Exception:
        # Find the one that does not pickle, for the message.
        for key in keys:
            try:
                cloudpickle.dumps((key, states[key]), protocol=5)
            except Exception as error:
                raise StateError(f"the state of key {key!r} cannot be pickled: {error}") from error
        raise


def size_of(value: Any) -> int:
    """About what an object takes with its items, or with its attributes and their items. No method of a user's class is
    called for it but ``__sizeof__``; who has one, as arrays and frames do, counts with it what it holds.
    """
    size = sys.getsizeof(value) + _items_size(value)
    kind: Any = type(value)
    if kind.__sizeof__ is object.__sizeof__ and type(fields := getattr(value, "__dict__", None)) is dict:
        size += sampled(fields.values(), len(fields), lambda field: sys.getsizeof(field) + _items_size(field))
    return size


def _items_size(value: Any) -> int:
    """What the items of a builtin container take; of anything else nothing."""
    kind = type(value)
    if issubclass(kind, dict):
        return sampled(itertools.chain.from_iterable(dict.items(value)), 2 * dict.__len__(value), sys.getsizeof)
    for base in _CONTAINERS:
        if issubclass(kind, base):
            return sampled(base.__iter__(value), base.__len__(value), sys.getsizeof)
    return 0


def sampled(values: Iterable[Any], count: int, size: Callable[[Any], int]) -> int:
    """The size of so many values by that of the first 64."""
    sizes = [size(value) for value in itertools.islice(values, 64)]
    return sum(sizes) * count // len(sizes) if sizes else 0
