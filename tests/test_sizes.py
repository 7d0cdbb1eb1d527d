"""Sizes as people write them."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from penstock import _sizes
from penstock._sizes import parse_bytes
from penstock.errors import ConfigError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [(0, 0), ("0", 0), ("64", 64), ("1k", 1 << 10), ("2 MB", 2 * MIB), ("3g", 3 << 30), ("1TiB", 1 << 40), ("7b", 7)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize("bad", ["", "m", "-1", "1.5g", "1x", -1, 2.5, None, True, b"1m"])
def test_bad_sizes_are_named(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"staging_memory=.* must be a number of bytes"):
        parse_bytes(bad, "staging_memory")


def test_examples_run() -> None:
    assert doctest.testmod(_sizes).failed == 0
