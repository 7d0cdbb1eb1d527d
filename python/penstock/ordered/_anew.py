"""What functions find elsewhere than here: globals of modules that a worker process imports anew.

A function that can be imported travels by its name. Over there its module is as it was written: what the program has
set in it since (a setting, an entry of a registry, a replaced function) is not there, and the function gives other
results without a word. So before a run goes to processes that nobody asked for, what its functions read of such modules
is compared: here by `read`, there by `there`, as outlines.

Looked at: globals by the names in the code of the functions, attributes of modules and classes among them, and the same
of functions that these call by name, as far as they belong to the user. Not looked at: what objects hold, what is found
by `getattr` or through modules of installed packages.

Invariants: nothing of the user's is called; an outline is plain data that pickles and compares by value.
"""

from __future__ import annotations

import importlib
import io
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.ordered._steps import Step

__all__ = ["differing", "read", "there"]

#: Functions looked into, and values of one outline.
_MOST_FUNCTIONS, _MOST_VALUES = 1_000, 10_000
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib") if sysconfig.get_path(name)}
)


def read(steps: Sequence[Step]) -> dict[tuple[str, str], Any]:
    """Outlines of what the functions of steps read of modules that are imported anew, by module and name."""
    found: dict[tuple[str, str], Any] = {}
    waiting = _met(steps)
    # Of packages that are installed only those that the steps call themselves.
    own = {_package(call.__module__) for call in (_called(step.call) for step in steps) if _by_name(call)}
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if _by_name(thing) and not _is_users(thing.__module__, own):
            continue
        if isinstance(thing, type):
            waiting += [part for part in vars(thing).values() if isinstance(part, FunctionType)]
            continue
        names = set(_names(thing.__code__)) - {"__builtins__"}
        for name in sorted(names & thing.__globals__.keys()):
            value = thing.__globals__[name]
            if isinstance(value, ModuleType):
                if _is_users(value.__name__, own):
                    for inner in sorted(names & vars(value).keys()):
                        _note(value.__name__, inner, vars(value)[inner], names, own, found, waiting)
            elif _by_name(thing) or _by_name(value):
                _note(thing.__module__, name, value, names, own, found, waiting, here=_by_name(thing))
    return found


def there(names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """The outlines in this process, of those that are there."""
    found = {}
    for module, path in names:
        try:
            value: Any = importlib.import_module(module)
            for name in path.split("."):
                value = getattr(value, name)
        except Exception:  # it is told as missing
            continue
        found[module, path] = outline(value)
    return found


def differing(here: dict[tuple[str, str], Any], elsewhere: dict[tuple[str, str], Any]) -> str:
    """What is not the same, in words; empty where all is."""
    for place, value in here.items():
        if place not in elsewhere:
            return f"{'.'.join(place)} is missing"
        if value != elsewhere[place]:
            return f"{'.'.join(place)} has another value"
    return ""


def outline(value: Any) -> Any:
    """A value as far as it can be compared: scalars in containers, by name what has one, else the type."""
    left = _MOST_VALUES

    def told(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        kind = type(value)
        if kind in _SCALARS:
            return repr(value) if kind is float or kind is complex else (kind.__name__, value)
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, ModuleType):
            return value.__name__
        if kind in (list, tuple, dict, set, frozenset) and depth < 20:
            parts = list(value.items() if kind is dict else value)  # others may change it meanwhile
            if len(parts) > left:
                return (kind.__name__, len(parts))
            inner = [told(part, depth + 1) for part in parts]
            # Hashes of texts, and the order of entries, are another process's own.
            return [kind.__name__, *(inner if kind in (list, tuple) else sorted(inner, key=repr))]
        return f"{kind.__module__}.{kind.__qualname__}"

    return told(value, 0)


def _met(value: Any) -> list[Any]:
    """Functions and classes that come along where a value is pickled."""
    from penstock import _pickles

    met: list[Any] = []

    class Meeting(_pickles.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, (FunctionType, type)):
                met.append(thing)
            return super().reducer_override(thing)

    Meeting(io.BytesIO(), 5).dump(value)
    return met


def _note(
    module: str,
    path: str,
    value: Any,
    names: set[str],
    own: set[str],
    found: dict[tuple[str, str], Any],
    waiting: list[Any],
    here: bool = True,
) -> None:
    """Look at what is called so in a module; not `here`: it travels along, what it calls does not."""
    users = isinstance(value, (FunctionType, type)) and _is_users(value.__module__, own)
    if users:
        waiting.append(value)
    if users and isinstance(value, type) and _by_name(value):
        for inner in sorted(names & vars(value).keys()):
            found[value.__module__, f"{value.__qualname__}.{inner}"] = outline(vars(value)[inner])
    if here:
        found[module, path] = outline(value)


def _called(call: Any) -> Any:
    """The function, or class, behind what is called."""
    while isinstance(call, partial):
        call = call.func
    call = getattr(call, "__func__", call)
    return call if isinstance(call, (FunctionType, type)) else type(call)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _by_name(thing: Any) -> bool:
    """Whether a function or class travels by its name."""
    if not isinstance(thing, (FunctionType, type)) or thing.__module__ in (None, "__main__"):
        return False
    value: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        value = getattr(value, "__dict__", {}).get(name)
    return value is thing


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_users(module: str, own: set[str]) -> bool:
    if _package(module) == "penstock":
        return False
    if _package(module) in own:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not file.startswith(_INSTALLED)
