"""Values that pyarrow changes without a word: numbers that may have a fraction, for types that have whole ones, and
truth values for types that have numbers.

Used wherever values of Python become Arrow: rows of `penstock.ordered`, and what is nested in rows that steps of a flow
put out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import chain
from numbers import Integral, Number
from typing import Any, TypeAlias

import pyarrow as pa

__all__ = ["first_cut", "look_into"]

#: Whether values of a type are among these that it would change.
_Look: TypeAlias = Callable[[Iterable[Any]], bool]
#: The values of one kind within a nested value.
_Part: TypeAlias = Callable[[Any], Iterable[Any]]


@lru_cache(64)
def _known(kind: pa.DataType) -> _Look | None:
    return look_into(kind)


def first_cut(kind: pa.DataType, values: list[Any]) -> int | None:
    """The place of the first value that a column of a type would change.

    Examples
    --------
    >>> first_cut(pa.list_(pa.int64()), [[1], None, [2, 0.5]]), first_cut(pa.list_(pa.float64()), [[0.5]])
    (2, None)
    >>> first_cut(pa.list_(pa.float64()), [[0.5], [True]])
    1
    """
    look = _known(kind)
    if look is None or not look(values):
        return None
    return next(place for place, value in enumerate(values) if look([value]))


def look_into(kind: pa.DataType) -> _Look | None:
    """What finds values that pyarrow changes without a word where it makes this type of them.

    None for a type where it changes none.
    """
    is_type = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return look_into(kind.storage_type)
    if is_type.is_integer(kind) or is_type.is_temporal(kind):
        return _has_fractions
    if is_type.is_floating(kind):
        return _has_truths
    if is_type.is_dictionary(kind) or is_type.is_run_end_encoded(kind):
        return look_into(kind.value_type)
    if is_type.is_map(kind):
        parts: list[tuple[_Part, pa.DataType]] = [
            (partial(_of_map, place), inner) for place, inner in enumerate((kind.key_type, kind.item_type))
        ]
    elif is_type.is_struct(kind):
        parts = [(partial(_of_struct, place, field.name), field.type) for place, field in enumerate(kind)]
    elif hasattr(kind, "value_type"):
        parts = [(iter, kind.value_type)]
    else:
        return None
    looks = [(part, look) for part, inner in parts if (look := look_into(inner)) is not None]
    return partial(_has_fractions_inside, looks) if looks else None


def _has_fractions(values: Iterable[Any]) -> bool:
    kinds = set(map(type, values))
    return any((issubclass(kind, Number) and not issubclass(kind, Integral)) or _is_truth(kind) for kind in kinds)


def _has_truths(values: Iterable[Any]) -> bool:
    return any(map(_is_truth, set(map(type, values))))


def _is_truth(kind: type) -> bool:
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def _has_fractions_inside(looks: list[tuple[_Part, _Look]], values: Iterable[Any]) -> bool:
    there = [value for value in values if hasattr(value, "__iter__")]  # what is not is a null
    return any(look(chain.from_iterable(map(part, there))) for part, look in looks)


def _of_map(place: int, value: Any) -> Iterable[Any]:
    return (entry[place] for entry in (value.items() if isinstance(value, dict) else value))


def _of_struct(place: int, name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, tuple):
        return (value[place],)
    return ((value if isinstance(value, dict) else dict(value)).get(name),)
