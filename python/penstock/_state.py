"""Keyed Python state of one bin: live objects in a dict, with an undo journal and a pickled form.

A `BinState` belongs to one bin of one `stateful_map` step. The native worker that owns the bin calls `apply` once
per (block, bin); the objects stay live between calls and are pickled only when the bin moves to another process or
into a snapshot.

Undo. From the first `mark` on, the state of a key is saved when it is first touched after a mark, and `rollback`
puts everything back as it was at the last mark. Immutable states are saved by reference; lists, dicts, sets and the
like are copied type by type; anything else by ``copy.deepcopy``. So the cost is one copy per key and epoch, and none
for keys that the epoch does not touch.

A step that raises leaves the bin *tainted* (the step may have changed a mutable state halfway): until `rollback`,
`apply` and `encode` refuse. A state that is never marked cannot be rolled back, and stays tainted.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import fractions
import itertools
import math
import pickle
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import cloudpickle

from penstock.errors import StateError

__all__ = ["BinState", "copy_state"]

_FORMAT: Final = 1
_DATA: Final = 0
_FAILED: Final = 1
_CHUNK_BYTES: Final = 1 << 20


class _Missing:
    """Journal entry of a key that did not exist at the mark."""

    __slots__ = ()


_MISSING: Final = _Missing()

#: Types whose values cannot change: a reference is as good as a copy.
_ATOMIC: Final = frozenset(
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
    if kind in _ATOMIC:
        return value
    if memo is None:
        memo = {}
    else:
        known = memo.get(id(value), _MISSING)
        if known is not _MISSING:
            return known
    if kind is list:
        made: Any = []
        memo[id(value)] = made
        made.extend([item if type(item) in _ATOMIC else copy_state(item, memo) for item in value])
        return made
    if kind is dict:
        made = {}
        memo[id(value)] = made
        for key, item in value.items():
            if type(key) not in _ATOMIC:
                key = copy_state(key, memo)
            made[key] = item if type(item) in _ATOMIC else copy_state(item, memo)
        return made
    if kind is set and all(type(item) in _ATOMIC for item in value):
        made = memo[id(value)] = set(value)
        return made
    if kind is tuple and all(type(item) in _ATOMIC for item in value):
        return value
    if kind is deque:
        made = memo[id(value)] = deque(maxlen=value.maxlen)
        made.extend(item if type(item) in _ATOMIC else copy_state(item, memo) for item in value)
        return made
    return copy.deepcopy(value, memo)


class BinState:
    """State of one bin: key -> live object, never None.

    Parameters
    ----------
    step
        ``step(state, *values) -> (state, out)``, see `Flow.stateful_map`.
    failed
        Called with the exception, the key and the values of the row when `step` raises; its result is raised.
    """

    __slots__ = ("_failed", "_journal", "_states", "_step", "_tainted")

    def __init__(
        self,
        step: Callable[..., tuple[Any, Any]],
        failed: Callable[[BaseException, Any, tuple[Any, ...]], BaseException],
    ) -> None:
        self._step = step
        self._failed = failed
        self._states: dict[Any, Any] = {}
        self._journal: dict[Any, Any] | None = None
        self._tainted = False

    def apply(self, keys: Sequence[Any], columns: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Run the step over rows, in order, and return the rows that it puts out.

        Parameters
        ----------
        keys
            Key of each row, hashable.
        columns
            The values that the step takes: one sequence per parameter, each as long as `keys`.
        """
        self._check()
        states, journal, step = self._states, self._journal, self._step
        get = states.get
        out_rows: list[tuple[Any, ...]] = []
        append = out_rows.append
        rows: Any = zip(*columns, strict=True) if columns else itertools.repeat(())
        key: Any = None
        values: tuple[Any, ...] = ()
        try:
            for key, values in zip(keys, rows):  # noqa: B905 - rows may be endless
                state = get(key)
                if journal is not None and key not in journal:
                    if state is None:
                        journal[key] = _MISSING
                    elif type(state) in _ATOMIC:
                        journal[key] = state
                    else:
                        journal[key] = copy_state(state)
                state, out = step(state, *values)
                if state is None:
                    states.pop(key, None)
                else:
                    states[key] = state
                if out is not None:
                    if type(out) is tuple:
                        append(out)
                    elif type(out) is list:
                        out_rows.extend(out)
                    elif isinstance(out, tuple):
                        append(tuple(out))
                    else:
                        raise TypeError(
                            f"the step put out {out!r}; it must be None, a tuple (one row) or a list of tuples"
                        )
        except BaseException as error:
            self._tainted = True
            raise self._failed(error, key, values) from (error if isinstance(error, Exception) else None)
        return out_rows

    def mark(self) -> None:
        """An epoch begins: `rollback` comes back to here. Forgets the mark before."""
        self._check()
        self._journal = {}

    def rollback(self) -> None:
        """Put every key back as it was at the last mark."""
        journal = self._journal
        if journal is None:
            raise StateError("this state has no mark to go back to: the run keeps no journal")
        states = self._states
        for key, saved in journal.items():
            if saved is _MISSING:
                states.pop(key, None)
            else:
                states[key] = saved
        self._journal = {}
        self._tainted = False

    def encode(self) -> Iterator[bytes]:
        """The whole state as chunks of about a mebibyte, for `absorb`; the journal stays behind.

        A state that does not pickle ends the chunks with one that makes `absorb` raise, naming the key: the side
        that takes the bin then reports it.
        """
        try:
            self._check()
            keys = iter(list(self._states))
            size = 256
            while chunk := list(itertools.islice(keys, size)):
                body = _dump(self._states, chunk)
                yield bytes((_FORMAT, _DATA)) + body
                size = max(1, min(1 << 16, size * _CHUNK_BYTES // max(1, len(body))))
        except Exception as error:
            yield bytes((_FORMAT, _FAILED)) + f"{type(error).__name__}: {error}".encode(errors="replace")

    def absorb(self, chunk: bytes) -> None:
        """Take the keys of one chunk of `encode`; they replace equal keys here.

        Raises
        ------
        StateError
            When the chunk is of another format, or its contents cannot be restored; nothing was taken.
        """
        if len(chunk) < 2 or chunk[0] != _FORMAT:
            raise StateError(f"state of format {chunk[0] if chunk else None!r} cannot be read, only format {_FORMAT}")
        if chunk[1] == _FAILED:
            raise StateError(f"the state could not be moved: {chunk[2:].decode(errors='replace')}")
        try:
            keys, states = pickle.loads(chunk[2:])
            taken = {_own_nan(key): state for key, state in zip(keys, states, strict=True)}
        except Exception as error:
            raise StateError(f"the state could not be restored here: {type(error).__name__}: {error}") from error
        journal = self._journal
        if journal is not None:
            for key in taken:
                if key not in journal:
                    journal[key] = copy_state(self._states[key]) if key in self._states else _MISSING
        self._states.update(taken)

    def keys(self) -> int:
        """How many keys have state."""
        return len(self._states)

    def bytes(self) -> int:
        """About how many bytes the state takes: a sample of 16 keys, and one level into containers."""
        states = self._states
        count = len(states)
        if not count:
            return 0
        sampled = list(itertools.islice(states.items(), 16))
        mean = sum(_size(key) + _size(state) for key, state in sampled) / len(sampled)
        return sys.getsizeof(states) + int(mean * count)

    def get(self, key: Any, default: Any = None) -> Any:
        """State of `key`, or `default`. The live object: do not change it."""
        return self._states.get(key, default)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All keys with their live states."""
        return iter(self._states.items())

    def __len__(self) -> int:
        return len(self._states)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("BinState is live state and cannot be pickled: use encode() and absorb()")

    def _check(self) -> None:
        if self._tainted:
            raise StateError("the step failed in the middle of a row: roll back before using this state again")


def _own_nan(key: Any) -> Any:
    """The key with the NaN that rows bring here: a NaN equals only itself, and another process has another one."""
    if type(key) is tuple:
        return tuple(map(_own_nan, key))
    return math.nan if type(key) is float and key != key else key


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


def _size(value: Any) -> int:
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        items: Any = itertools.chain.from_iterable(value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        items = value
    elif hasattr(value, "__dict__"):
        items = vars(value).values()
    else:
        return size
    sampled = list(itertools.islice(items, 64))
    if sampled:
        count = len(value) * (2 if isinstance(value, dict) else 1) if hasattr(value, "__len__") else len(sampled)
        size += sum(sys.getsizeof(item) for item in sampled) * max(count, 1) // len(sampled)
    return size
