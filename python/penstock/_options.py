"""What options are: one of two, or a whole number.

Owns: the one check for each of them, and the message for those that are one of two.
"""

from __future__ import annotations

from operator import index
from typing import Any

from penstock.errors import ConfigError

__all__ = ["whole", "yes_or_no"]


def whole(value: Any, least: int | None = None, most: int | None = None) -> int | None:
    """An int, one of numpy's too, as Python's own; None for anything else, True and False among it, or beyond bounds.

    Examples
    --------
    >>> whole(3), whole(True), whole(3.0), whole(3, 1, 2)
    (3, None, None, None)
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        return None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        return None
    return number


def yes_or_no(value: object, name: str) -> bool:
    """Return what a user wrote for an option that is True or False.

    Raises
    ------
    ConfigError
        For anything else: a text such as "no" would count as True, and so would a number or a list.

    Examples
    --------
    >>> yes_or_no("no", "dry_run")
    Traceback (most recent call last):
    ...
    penstock.errors.ConfigError: dry_run='no' must be True or False
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")
    return value
