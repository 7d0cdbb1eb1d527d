"""Durations as people write them."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock._autobalance import Rules
from penstock._durations import (
    duration_text,
    format_duration,
    lateness_ms,
    milliseconds,
    parse_duration,
    parse_timeout,
)
from penstock._migration import Cut, parse_tolerance
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
        ("10 seconds", 10_000_000),
        ("1 hour 30 minutes", 5_400_000_000),
        ("1 Minute", 60_000_000),
        ("2w", 1_209_600_000_000),
        (timedelta(seconds=1, microseconds=7), 1_000_007),
    ],
)
def test_reads(value: Any, us: int) -> None:
    assert parse_duration(value) == us


def test_durations_are_exact_whatever_decimals_the_caller_keeps() -> None:
    with decimal.localcontext(prec=2, traps=[decimal.Inexact, decimal.Rounded]):
        assert parse_duration("86399s") == 86_399_000_000
        assert parse_duration("1.000001s") == 1_000_001
        assert repr(pk.tumbling("1h1m1s")) == repr(pk.tumbling(timedelta(seconds=3_661)))
        with pytest.raises(ConfigError, match="not a whole number of microseconds"):
            parse_duration("0.12345us")


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
        (pd.Timedelta(1_500, "ns"), "whole number of microseconds"),
        ("-5s", "negative"),
        (timedelta(seconds=-1), "negative"),
        ("0s", "zero"),
        (0, 'no unit; write "0s", "0ms" or a timedelta'),
        (5000, 'no unit; write "5000s", "5000ms" or a timedelta'),
        (1.5, 'no unit; write "1.5s"'),
        ("5M", "unknown unit 'M'"),
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


def test_timedeltas_of_pandas_are_read_to_the_microsecond() -> None:
    assert parse_duration(pd.Timedelta("1 day 1500us")) == 86_400_001_500
    with pytest.raises(ConfigError, match=r"linger .*whole number of microseconds"):
        parse_timeout(pd.Timedelta(1_500, "ns"), "linger")


def test_lateness_is_of_whole_milliseconds_that_event_time_can_hold() -> None:
    assert (lateness_ms("0s"), lateness_ms(timedelta(seconds=2))) == (0, 2_000)
    most = 2**63 // 4_000
    assert lateness_ms(f"{most}ms") == most
    assert pk.Flow("k bigint", event_time="k", lateness=f"{most}ms").output_schema.names == ["k"]
    with pytest.raises(ConfigError, match=rf"^lateness '{most + 1}ms' is longer than .*: at most {most} ms$"):
        lateness_ms(f"{most + 1}ms")


def test_zero_where_it_makes_sense() -> None:
    assert parse_duration("0s", allow_zero=True) == 0
    assert parse_duration(timedelta(), allow_zero=True) == 0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(3, 3.0), (0.25, 0.25), ("250 ms", 0.25), ("1m30s", 90.0), (timedelta(minutes=2), 120.0)],
)
def test_timeouts_are_durations_or_seconds(value: Any, seconds: float | None) -> None:
    assert parse_timeout(value) == parse_timeout(value, optional=True) == seconds


def test_no_timeout_is_one_only_where_it_may_be() -> None:
    assert parse_timeout(None, optional=True) is None
    with pytest.raises(ConfigError, match=r"every=None must be at least 0\.05 s"):
        Rules.of("busy", None, 1.5, 1.2, 3, 1_000, None, None, False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="start_timeout=None must be above 0 s"):
        pk.execute(lambda worker: None, workers=1, processes=2, start_timeout=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 0, -1, float("nan"), float("inf"), True, b"1s", timedelta(), "0s"])
def test_timeouts_are_refused_with_the_name_and_the_value(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be above 0 s: a number of seconds, text such as") as caught:
        parse_timeout(value, "linger")
    assert str(caught.value).startswith(f"linger={value!r}")


def test_timedeltas_of_numpy_are_read_as_such() -> None:
    """numpy registers them as numbers, which they are not."""
    for value, us in [
        (np.timedelta64(500, "ms"), 500_000),
        (np.timedelta64(2, "W"), 14 * 86_400_000_000),
        (np.timedelta64(1_500_000, "ns"), 1_500),
        (np.array(3, "m8[s]"), 3_000_000),
    ]:
        assert (parse_duration(value), parse_timeout(value)) == (us, us / 1e6), value
    for value, says in [
        (np.timedelta64(1_500, "ns"), "not a whole number of microseconds"),
        (np.timedelta64(5), "no length of time"),
        (np.timedelta64(1, "M"), "no length of time"),
        (np.timedelta64("NaT"), "no length of time"),
        (np.timedelta64(10**15, "s"), "no length of time"),
        (np.array([1, 2], "m8[s]"), "array"),
    ]:
        for parse in (parse_duration, parse_timeout):
            with pytest.raises(ConfigError, match=says):
                parse(value, "every")
    with pytest.raises(ConfigError, match=r'every np\.int64\(60\) has no unit; write "60s", "60ms"'):
        parse_duration(np.int64(60), "every")
    for value in (np.timedelta64(2, "s"), 10**400):
        with pytest.raises(ConfigError, match=r"tolerance=.* must be a multiple of the mean load"):
            parse_tolerance("tolerance", value)


@pytest.mark.parametrize("value", [10**400, "9" * 400 + "s"], ids=["int", "text"])
def test_what_no_float_holds_is_refused_as_any_other_number(value: Any) -> None:
    counts = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    for name, ask in {
        "every": lambda: Rules.of("busy", value, 1.5, 1.2, 3, 1_000, None, None, False),
        "max_pause": lambda: Cut.of("fluid", None, value),
        "linger": lambda: parse_timeout(value, "linger"),
    }.items():
        with pytest.raises(ConfigError, match=f"{name}="):
            ask()
    with counts.start(2) as session:
        moves = session.migrate(to=[1] * 256)
        with pytest.raises(ConfigError, match="timeout="):
            moves.wait(timeout=value)


def test_timeouts_have_bounds() -> None:
    assert parse_timeout("0s", least_s=0.0) == parse_timeout(0, least_s=0.0) == 0.0
    with pytest.raises(ConfigError, match=r"at least 0\.5 s and at most 60 s"):
        parse_timeout("61s", least_s=0.5, most_s=60.0)
    with pytest.raises(ConfigError, match=r"timeout=1e\+21 must be above 0 s and at most 9.22337e\+09 s"):
        parse_timeout(1e21)
    with pytest.raises(ConfigError, match="timeout '1' has no unit"):
        parse_timeout("1")


#: Where users say how long: each argument, as a call with it.
DURATIONS: dict[str, Callable[[Any], Any]] = {
    "lateness": lambda value: pk.Flow("k bigint, ts timestamp", event_time="ts", lateness=value),
    "window size": pk.tumbling,
    "window step (every)": lambda value: pk.sliding("1m", every=value),
}
TIMEOUTS: dict[str, Callable[[Any], Any]] = {
    "timeout": lambda value: pk.ordered_map(abs, [], timeout=value),
    "start_timeout": lambda value: pk.execute(lambda worker: None, workers=1, start_timeout=value),
}


@pytest.mark.parametrize("name", DURATIONS)
def test_a_number_is_no_duration(name: str) -> None:
    DURATIONS[name]("10 seconds")
    DURATIONS[name](timedelta(seconds=10))
    for number in (10, 10.0):
        with pytest.raises(ConfigError, match="has no unit; write") as caught:
            DURATIONS[name](number)
        assert str(caught.value).startswith(f"{name} {number!r}")


@pytest.mark.parametrize("name", TIMEOUTS)
def test_a_number_is_a_timeout_in_seconds(name: str) -> None:
    for value in (10, 10.0, "10 seconds", timedelta(seconds=10)):
        TIMEOUTS[name](value)
    with pytest.raises(ConfigError, match=f"{name}=-1 must be above 0 s"):
        TIMEOUTS[name](-1)


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
    assert pk.sliding("1m", every="1s").every_us == 1_000_000
    assert str(pk.sliding("90s", every="500ms")) == "sliding 90s every 500ms"
    assert str(pk.sliding("1s", every="2s")) == "sliding 1s every 2s, gaps of 1s"
    with pytest.raises(ConfigError, match="window size '0s' is zero"):
        pk.tumbling("0s")
    with pytest.raises(ConfigError, match=r"window step \(every\) '5'"):
        pk.sliding("10s", every="5")


def test_what_was_measured_is_shown_in_three_digits_and_never_with_an_exponent() -> None:
    assert [duration_text(s) for s in (0.0, 2e-7, 8.4e-4)] == ["0 µs", "0.2 µs", "840 µs"]
    assert [duration_text(s) for s in (0.012, 3.21)] == ["12 ms", "3.21 s"]
    # Also where three digits round up.
    assert [duration_text(s) for s in (9.999e-4, 0.9999, 999.4, 999.6, 1234.5)] == [
        "1 ms",
        "1 s",
        "999 s",
        "1,000 s",
        "1,234 s",
    ]
