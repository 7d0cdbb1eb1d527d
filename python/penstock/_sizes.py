"""Sizes in bytes as people write them.

Owns: the one reading of ``"256m"`` and ``268_435_456`` that every argument of the package shares. Units are those of
Spark: powers of 1024.
"""

from __future__ import annotations

import re

from penstock._options import whole
from penstock.errors import ConfigError

__all__ = ["parse_bytes"]

_UNITS = {"": 1, **{unit: 1 << 10 * power for power, unit in enumerate("kmgt", 1)}}


def parse_bytes(value: object, label: str, bare: int = 1) -> int:
    """Read a size.

    Parameters
    ----------
    value : int or str
        Bytes, or a number with a unit as Spark takes them: b, k, m, g or t, powers of 1024, with or without a b.
    label : str
        Names the option in messages.
    bare : int, default 1
        Bytes that a number without a unit stands for, in a str.

    Raises
    ------
    ConfigError
        For anything else, and below 0.

    Examples
    --------
    >>> parse_bytes("256m", "staging_memory"), parse_bytes(1_000, "staging_memory")
    (268435456, 1000)
    >>> parse_bytes("half", "staging_memory")
    Traceback (most recent call last):
    ...
    penstock.errors.ConfigError: staging_memory='half' must be a number of bytes, or a size such as "256m" or "2g"
    """
    number = whole(value, 0)
    if number is not None:
        return number
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+)\s*([kmgt]?)i?(b?)", value.strip().lower())
        if found is not None:
            digits, unit, byte = found.groups()
            return int(digits) * (bare if not unit and not byte else _UNITS[unit])
    raise ConfigError(f'{label}={value!r} must be a number of bytes, or a size such as "256m" or "2g"')
