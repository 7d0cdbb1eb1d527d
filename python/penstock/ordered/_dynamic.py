"""Classes that no import finds, such as those of ``__main__``, on their way to a worker process and back.

cloudpickle sends such a class as it stands, and where there is one already, it sets each attribute to the copy that
came. So a reply would undo what the caller has done to a class meanwhile, and a request what the functions have kept in
it. Here a class comes once: later ones are looked up by the number that cloudpickle tracks them by, and left as they
are.

Classes that came with the functions are on both sides, which hold them, so only their numbers travel, whatever is in
them by then. Others go whole each time, as do those of states, which outlive processes: one that was replaced has none,
and one that has them looks only at the number. Where cloudpickle does not track classes as it does today, all is left
to it.
"""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle.cloudpickle

from penstock import _pickles
from penstock.ordered._brought import brought

__all__ = ["dumps", "dumps_functions"]

_NUMBERS: Any = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", None)
_CLASSES: Any = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", None)

_lock = threading.RLock()
#: Classes that were made here of what came, and have no attributes yet.
_bare: weakref.WeakSet[type] = weakref.WeakSet()


def _known(number: str) -> type:
    found: type | None = _CLASSES.get(number)
    if found is None:
        raise LookupError(f"class {number}, which came with the functions, is not here any more")
    return found


def _made(number: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    with _lock:
        found: type | None = _CLASSES.get(number)
        if found is None:
            found = make(*args)
            _bare.add(found)
        return found


def _brought(number: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    made = _made(number, make, args)
    brought[made] = number
    return made


def _filled(made: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    fill, attributes = state
    # Another thread may have met it on its way here, too: who is first fills it, and nobody sees a part of it.
    with _lock:
        if made in _bare:
            fill(made, attributes)
            _bare.discard(made)


class _Pickler(_pickles.Pickler):
    """Classes that the other side has go by number, others whole."""

    def __init__(self, file: io.BytesIO, known: Mapping[type, str]) -> None:
        super().__init__(file, 5)
        self._known = known

    def reducer_override(self, thing: Any) -> Any:
        if not issubclass(type(thing), type):
            return super().reducer_override(thing)
        if (number := self._known.get(thing)) is not None:
            return (_known, (number,))
        reduced = super().reducer_override(thing)
        whole = type(reduced) is tuple and len(reduced) == 6 and reduced[5] is not None
        if not whole or _NUMBERS is None or _CLASSES is None or (number := _NUMBERS.get(thing)) is None:
            return reduced
        make, args, state, *items, fill = reduced
        return (self._maker(thing, number), (number, make, args), (fill, state), *items, _filled)

    def _maker(self, met: type, number: str) -> Callable[..., type]:
        return _made


class _FunctionsPickler(_Pickler):
    """Notes the classes that come along, on both sides."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, {})
        self.met: dict[type, str] = {}

    def _maker(self, met: type, number: str) -> Callable[..., type]:
        self.met[met] = number
        return _brought


def dumps(value: Any, known: Mapping[type, str]) -> bytes:
    """Pickle by value what cannot be imported elsewhere, but for classes that the other side has."""
    with io.BytesIO() as file:
        _Pickler(file, known).dump(value)
        return file.getvalue()


def dumps_functions(value: Any) -> tuple[bytes, dict[type, str]]:
    """Pickle what is the first to come to a process, which has no classes yet; those that it has then, by number."""
    with io.BytesIO() as file:
        pickler = _FunctionsPickler(file)
        pickler.dump(value)
        return file.getvalue(), pickler.met
