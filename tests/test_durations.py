"""Durations as people write them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock._durations import format_duration, milliseconds, parse_duration
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "us"),
    [
        ("60s", 60_000_000),
        ("500ms", 500_000),
        ("1m", 60_000_000),
        ("1min", 60_000_000),
        ("2h", 7_200_000_000),
        ("1d", 86_400_000_000),
        ("10us", 10),
        ("10µs", 10),
        ("1m30s", 90_000_000),
        (" 1 m 30 s ", 90_000_000),
        ("1.5s", 1_500_000),
        (timedelta(seconds=1, microseconds=7), 1_000_007),
        (250, 250_000),
    ],
)
def test_reads(value: Any, us: int) -> None:
    assert parse_duration(value) == us


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("60", "no unit"),
        ("1m30", "no unit"),
        ("60 parsecs", "unknown unit 'parsecs'"),
        ("1mo", "unknown unit 'mo'"),
        ("soon", "not a duration"),
        ("", "empty"),
        ("-", "empty"),
        ("0.5us", "whole number of microseconds"),
        ("-5s", "negative"),
        (timedelta(seconds=-1), "negative"),
        ("0s", "zero"),
        (0, "zero"),
        (1.5, "float"),
        (True, "bool"),
        (None, "NoneType"),
        ("999999999999d", "longer than"),
    ],
)
def test_refuses_with_the_name_and_the_value(value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_duration(value, "lateness")
    assert str(caught.value).startswith(f"lateness {value!r}")
    assert isinstance(caught.value, ValueError)


def test_zero_where_it_makes_sense() -> None:
    assert parse_duration("0s", allow_zero=True) == 0
    assert parse_duration(0, allow_zero=True) == 0


def test_milliseconds_refuses_a_remainder() -> None:
    assert milliseconds(3_000) == 3
    with pytest.raises(ConfigError, match="finer than a millisecond"):
        milliseconds(3_001)


@given(st.integers(min_value=0, max_value=2**62))
def test_what_is_written_reads_back(us: int) -> None:
    assert parse_duration(format_duration(us), allow_zero=True) == us


def test_windows() -> None:
    assert pk.tumbling("1m").to_step() == {
        "op": "window",
        "kind": "tumbling",
        "size_us": 60_000_000,
        "every_us": 60_000_000,
    }
    assert pk.sliding("1m", every=1_000).every_us == 1_000_000
    assert str(pk.sliding("90s", every="500ms")) == "sliding 90s every 500ms"
    assert str(pk.sliding("1s", every="2s")) == "sliding 1s every 2s"  # rows of every other second are in no window
    with pytest.raises(ConfigError, match="window size '0s' is zero"):
        pk.tumbling("0s")
    with pytest.raises(ConfigError, match=r"window step \(every\) '5'"):
        pk.sliding("10s", every="5")
