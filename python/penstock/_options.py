"""Options that are one of two.

Owns: the one check and the one message for them.
"""

from __future__ import annotations

from penstock.errors import ConfigError

__all__ = ["yes_or_no"]


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
