"""User functions of a dataflow, called once per block.

Owns the loops over items and what an exception of a user function becomes: a `UserFunctionError` that names the step,
the file and line in the user's code, and the item. Errors that penstock itself raised keep their class and get the
place appended.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from types import CoroutineType
from typing import Any, TypeVar

from penstock._coroutines import UNRUN, require_plain, unrun
from penstock._functions.calls import locate, user_error
from penstock._functions.short import short
from penstock.errors import BlockError, ConfigError, PenstockError, UserFunctionError

__all__ = [
    "each_block",
    "each_item",
    "expanded",
    "failed",
    "kept",
    "keys_of",
    "mapped",
    "name_of",
    "observe",
    "refusal",
]

R = TypeVar("R")


def name_of(func: Callable[..., Any]) -> str:
    """A short name of a function, for steps and operators."""
    while isinstance(func, functools.partial):
        func = func.func
    return str(getattr(func, "__name__", type(func).__name__))


def failed(
    step: str, func: Callable[..., Any], error: Exception, item: Any = None, *, known: bool = False
) -> Exception:
    """What to raise, from `error`, where `func` raised it; `item` is what it was called with, when `known`."""
    if isinstance(error, PenstockError):
        if not isinstance(error, UserFunctionError) and "_placed" not in error.__dict__:
            file, line = locate(func, error)
            error.add_detail(f"in {step} ({file}:{line})")
            error.__dict__["_placed"] = True
        return error
    made = user_error(step, func, error)
    if known:
        text = short(item)
        made.add_detail(f"item: {text}")
        made.__dict__["item"] = text
    return made


def _require_function(func: Any, step: str) -> None:
    if not callable(func):
        raise ConfigError(f"{step}: {short(func)} is no function")


def _items(step: str, block: Any, instead: str) -> list[Any]:
    if isinstance(block, list):
        return block
    raise BlockError(f"{step} works on the items of a list and got a {type(block).__name__}: use {instead}")


def each_item(
    step: str,
    func: Callable[..., Any],
    loop: Callable[[Callable[..., Any], Iterator[Any]], R],
    instead: str,
    *,
    ignored: bool = False,
) -> Callable[[Any], R]:
    """A function from block to block: ``loop(func, items)``, with the item named that `func` failed on.

    `ignored`: the loop does nothing with what `func` gives.

    Raises
    ------
    ConfigError
        For a coroutine function; where results are ignored for a generator function as well.
    """
    _require_function(func, step)
    require_plain(func, step, ignored=ignored)

    def call(block: Any) -> R:
        items = _items(step, block, instead)
        rest = iter(items)
        try:
            return loop(func, rest)
        except Exception as error:
            position = len(items) - operator.length_hint(rest) - 1
            known = 0 <= position < len(items)
            made = failed(step, func, error, items[position] if known else None, known=known)
            raise made from _cause(made, error)

    return call


def each_block(step: str, func: Callable[..., R], *, ignored: bool = False) -> Callable[..., R]:
    """`func` itself, with its exceptions turned into the user's error; as `each_item`."""
    _require_function(func, step)
    require_plain(func, step, ignored=ignored)
    refused = UNRUN if ignored else (CoroutineType,)

    def call(*arguments: Any) -> R:
        try:
            result = func(*arguments)
            if result.__class__ in refused:
                _refuse(result)
            return result
        except Exception as error:
            made = failed(step, func, error)
            raise made from _cause(made, error)

    return call


def _refuse(made: Any) -> Any:
    raise TypeError(f"the function {unrun(made)}")


def _true(mark: Any) -> bool:
    if mark.__class__ in UNRUN:
        _refuse(mark)
    return True


# ``for made in [...]`` in a comprehension is an assignment: a call more for each item would cost half of the loop.


def mapped(func: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """What a function gives for each item."""
    return [made if made.__class__ is not CoroutineType else _refuse(made) for item in items for made in [func(item)]]


def expanded(func: Callable[[Any], Iterable[Any]], items: Iterable[Any]) -> list[Any]:
    """All that a function gives for each item."""
    return [made if made.__class__ is not CoroutineType else _refuse(made) for item in items for made in func(item)]


def kept(predicate: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """The items for which a function is true."""
    return [item for item in items for mark in [predicate(item)] if mark and (mark is True or _true(mark))]


def observe(step: str, func: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """A function of (time, block) that shows each item to `func`."""

    def loop(func: Callable[[Any], Any], items: Iterable[Any]) -> None:
        for item in items:
            made = func(item)
            if made is not None and made.__class__ in UNRUN:
                _refuse(made)

    shown = each_item(step, func, loop, "inspect_blocks", ignored=True)
    return lambda time, block: shown(block)


def keys_of(step: str, key: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """A function from block to the keys of its items."""
    return each_item(step, key, mapped, "the name of a column as key")


def refusal(step: str, func: Callable[..., Any]) -> Callable[[Exception], Exception]:
    """What to raise where what `func` gave is refused: a key without a stable hash, or what is no block."""

    def refused(error: Exception) -> Exception:
        made = failed(step, func, error)
        made.__cause__ = _cause(made, error)
        return made

    return refused


def _cause(made: Exception, error: Exception) -> BaseException | None:
    return error.__cause__ if made is error else error
