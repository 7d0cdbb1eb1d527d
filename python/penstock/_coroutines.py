"""Functions that give coroutines, which nobody here awaits: refused where they are given, or at the first one."""

from __future__ import annotations

import functools
import inspect
from types import CoroutineType
from typing import Any

from penstock.errors import ConfigError

__all__ = ["require_done", "require_plain", "unawaited"]


def require_plain(f: Any, what: str, how: str = "", takes: str = "x") -> None:
    """Refuse a function whose results nobody would await; `takes` and `how` tell what to give instead.

    Raises
    ------
    ConfigError
        For a coroutine function, also as a partial, a method or an object that is called.
    """
    inner = f
    while isinstance(inner, functools.partial):
        inner = inner.func
    called = inspect.getattr_static(type(inner), "__call__", None)
    if any(inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found) for found in (inner, called)):
        name = str(getattr(inner, "__qualname__", type(inner).__qualname__)).rpartition("<locals>.")[2]
        raise ConfigError(
            f"{what}: {name} is a coroutine function, and nobody awaits what it returns; give a function that runs it,"
            f" such as lambda {takes}: asyncio.run({name}({takes})){how}"
        )


def require_done(made: Any, what: str) -> None:
    """Refuse what a function returned that has not run; closes it.

    Raises
    ------
    ConfigError
        For a coroutine.
    """
    if made.__class__ is CoroutineType:
        raise ConfigError(f"{what} {unawaited(made)}")


def unawaited(made: CoroutineType[Any, Any, Any]) -> str:
    """What is wrong with a function that returned this, such as a lambda around a coroutine function; closes it."""
    made.close()
    return f"returned a coroutine ({made.__qualname__}), which nobody awaits: run it inside, as by asyncio.run"
