"""Functions that give coroutines, which nobody here awaits, or generators where nobody takes what they yield: refused
where they are given, or at the first one. So are those that cannot be called with what they would be given."""

from __future__ import annotations

import functools
import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from penstock.errors import ConfigError

__all__ = ["UNRUN", "require_called", "require_done", "require_plain", "unawaited", "unrun"]

_YIELDS = "give a function without yield"

#: What functions return of whose body nothing has run yet.
UNRUN = (CoroutineType, GeneratorType, AsyncGeneratorType)


def require_plain(f: Any, what: str, how: str = "", takes: str = "x", *, ignored: bool = False) -> None:
    """Refuse a function whose results nobody would await; `takes` and `how` tell what to give instead.

    `ignored`: nobody looks at its results either, so that a generator would not run.

    Raises
    ------
    ConfigError
        For a coroutine or async generator function, also as a partial, a method or an object that is called; where
        results are ignored for a generator function as well.
    """
    inner = f
    while isinstance(inner, functools.partial):
        inner = inner.func
    called = inspect.getattr_static(type(inner), "__call__", None)
    name = str(getattr(inner, "__qualname__", type(inner).__qualname__)).rpartition("<locals>.")[2]
    if ignored:
        for kind, found in (
            ("an async generator", inspect.isasyncgenfunction),
            ("a generator", inspect.isgeneratorfunction),
        ):
            if any(map(found, (inner, called))):
                raise ConfigError(f"{what}: {name} is {kind} function, and nobody runs what it returns; {_YIELDS}")
    if any(map(inspect.isasyncgenfunction, (inner, called))):
        raise ConfigError(
            f"{what}: {name} is an async generator function, and nobody awaits its items; give a plain generator, or a"
            " function that collects them inside, by asyncio.run"
        )
    if any(map(inspect.iscoroutinefunction, (inner, called))):
        raise ConfigError(
            f"{what}: {name} is a coroutine function, and nobody awaits what it returns; give a function that runs it,"
            f" such as lambda {takes}: asyncio.run({name}({takes})){how}"
        )


def require_called(f: Any, what: str, takes: str) -> None:
    """Refuse a function that cannot be called with as many arguments as `takes` names, as far as Python tells.

    Raises
    ------
    ConfigError
        It names the function and what it would be called with.

    Examples
    --------
    >>> require_called(lambda df: None, "sink", "df, batch_id")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.errors.ConfigError: sink: <lambda>(df) cannot be called with (df, batch_id): too many positional ...
    """
    try:
        # A decorator's own: what it wraps may be called with other arguments.
        signature = inspect.signature(f, follow_wrapped=False)
    except (ValueError, TypeError):
        return
    names = takes.split(", ")
    try:
        signature.bind(*names)
    except TypeError as error:
        name = str(getattr(f, "__qualname__", type(f).__qualname__)).rpartition("<locals>.")[2]
        raise ConfigError(
            f"{what}: {name}{signature} cannot be called with ({takes}): {error}; give a function of these"
        ) from None


def require_done(made: Any, what: str, *, kept: bool = False) -> None:
    """Refuse what a function returned that has not run. `kept`: somebody gets it, who may run a generator.

    Raises
    ------
    ConfigError
        For a coroutine, which is closed, or a generator.
    """
    if made.__class__ is CoroutineType or (made.__class__ in UNRUN and not kept):
        raise ConfigError(f"{what} {unrun(made)}")


def unawaited(made: CoroutineType[Any, Any, Any]) -> str:
    """What is wrong with a function that returned this, such as a lambda around a coroutine function; closes it."""
    made.close()
    return f"returned a coroutine ({made.__qualname__}), which nobody awaits: run it inside, as by asyncio.run"


def unrun(made: Any) -> str:
    """What is wrong with a function that returned this, one of `UNRUN`, where nobody takes what it yields."""
    if made.__class__ is CoroutineType:
        return unawaited(made)
    kind = "a generator" if made.__class__ is GeneratorType else "an async generator"
    return f"returned {kind} ({made.__qualname__}), which nobody runs: {_YIELDS}"
