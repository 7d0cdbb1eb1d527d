"""Event-time windows.

Owns: the description of a window, nothing of its execution. Windows are half open,
``[start, start + size)``, and, but for sessions, aligned to 1970-01-01 00:00 UTC, or as much later as an
offset says; a sliding window starts at every multiple of ``every``. In a time zone they are whole days of
its clocks. Only windows that hold at least one row exist. Where ``every`` is longer than the size there are
gaps, and rows in them are in no window: in no result, nor late. `Flow.explain` names the gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock._durations import Duration, format_duration, parse_duration
from penstock.errors import ConfigError

__all__ = ["Window", "session", "sliding", "tumbling"]

_DAY_US = 86_400_000_000


@dataclass(frozen=True)
class Window:
    """How event time is cut; made by `tumbling`, `sliding` or `session`.

    Attributes
    ----------
    kind : {"tumbling", "sliding", "session"}
        Which maker made it.
    size_us : int
        Length of every window in microseconds; of sessions the gap that ends one.
    every_us : int
        Distance between the starts of two windows in microseconds.
    offset_us : int
        How much later than at multiples of that distance they start, in microseconds.
    zone : str or None
        The time zone whose days they are.
    """

    kind: str
    size_us: int
    every_us: int
    offset_us: int = 0
    zone: str | None = None

    def to_step(self) -> dict[str, Any]:
        """Return the step of the plan that this window stands for.

        Examples
        --------
        >>> tumbling("1s").to_step()["size_us"]
        1000000
        """
        if self.kind == "session":
            return {"op": "window", "kind": self.kind, "size_us": self.size_us}
        step: dict[str, Any] = {"op": "window", "kind": self.kind, "size_us": self.size_us, "every_us": self.every_us}
        if self.offset_us:
            step["offset_us"] = self.offset_us
        if self.zone is not None:
            step["zone"] = self.zone
        return step

    def __str__(self) -> str:
        every = "" if self.kind in ("tumbling", "session") else f" every {format_duration(self.every_us)}"
        if self.every_us > self.size_us:
            every += f", gaps of {format_duration(self.every_us - self.size_us)}"
        offset = f" from {format_duration(self.offset_us)}" if self.offset_us else ""
        zone = f" in {self.zone}" if self.zone is not None else ""
        return f"{self.kind} {format_duration(self.size_us)}{every}{offset}{zone}"


def tumbling(size: Duration, *, offset: Duration | None = None, zone: str | None = None) -> Window:
    """Windows that follow each other without overlap.

    Parameters
    ----------
    size : str or datetime.timedelta
        Length, such as ``"60s"``.
    offset : str or datetime.timedelta, optional
        How much later they start than at multiples of the size since 1970-01-01 00:00, such as
        ``"15m"`` for hours from a quarter past. Less than the size.
    zone : str, optional
        A time zone by its IANA name, such as ``"Europe/Berlin"``. Windows are then whole days by its
        clocks, from midnight (plus `offset`) to midnight: 23 or 25 hours long where clocks change. The size is a
        number of days; days are counted from 1970-01-01, a Thursday, so ``tumbling("7d", offset="4d",
        zone=...)`` are weeks from Monday. The zones' rules are built in, and equal on all hosts.

    Returns
    -------
    Window
        To be given to `Flow.window`.

    Raises
    ------
    ConfigError
        When the size is not a duration or is zero, the offset is not less than it, or with a zone the size is no
        number of days. An unknown zone is a `PlanError` of the step that uses the window.

    Notes
    -----
    Spark's ``window`` has ``startTime`` for `offset` and no zones.

    Examples
    --------
    >>> print(tumbling("60s"))
    tumbling 1m
    >>> print(tumbling("1d", offset="6h", zone="Europe/Berlin"))
    tumbling 1d from 6h in Europe/Berlin
    """
    size_us = parse_duration(size, "window size")
    return _placed("tumbling", size_us, size_us, offset, zone)


def sliding(size: Duration, every: Duration, *, offset: Duration | None = None, zone: str | None = None) -> Window:
    """Windows that start at every multiple of `every` and may overlap or lie apart.

    Parameters
    ----------
    size : str or datetime.timedelta
        Length of each window.
    every : str or datetime.timedelta
        Distance between two starts. A row belongs to ``size / every`` windows (rounded
        up), which is what each row costs. Longer than `size`, it leaves gaps: rows in them are in no window, so in
        no result, and nobody is told of them, for they are not late. (Spark refuses that.) `Flow.explain` and
        ``print(flow)`` name the gaps, as of a size and a step that were swapped.
    offset : str or datetime.timedelta, optional
        How much later they start than at multiples of `every`; less than `every`.
    zone : str, optional
        As of `tumbling`: both `size` and `every` are numbers of days then.

    Returns
    -------
    Window
        To be given to `Flow.window`.

    Raises
    ------
    ConfigError
        When one of them is not a duration or is zero, the offset is not less than `every`, or with a zone one
        of the two is no number of days.

    Examples
    --------
    >>> print(sliding("60s", every="1s"))
    sliding 1m every 1s
    >>> print(sliding("1s", every="60s"))  # the first second of each minute
    sliding 1s every 1m, gaps of 59s
    """
    size_us = parse_duration(size, "window size")
    every_us = parse_duration(every, "window step (every)")
    return _placed("sliding", size_us, every_us, offset, zone)


def session(gap: Duration) -> Window:
    """Windows of each key that last as long as its rows follow each other closely.

    Parameters
    ----------
    gap : str or datetime.timedelta
        Rows of a key are in one session if no more than this is between each and the next.

    Returns
    -------
    Window
        To be given to `Flow.window`, behind `Flow.key_by` and before `Flow.agg`. A session is from its first row
        to the gap after its last one, and closes when the watermark has passed that.

    Raises
    ------
    ConfigError
        When the gap is not a duration or is zero.

    Notes
    -----
    Sessions are those of Spark's ``session_window``, and so in whole microseconds: times in nanoseconds
    are rounded down. A row is late when the watermark has reached the gap after its time, whatever
    session it might have joined. Memory: the aggregates per open session, and some 150 bytes beside them.

    Examples
    --------
    >>> print(session("30m"))
    session 30m
    """
    size_us = parse_duration(gap, "session gap")
    return Window("session", size_us, size_us)


def _placed(kind: str, size_us: int, every_us: int, offset: Duration | None, zone: str | None) -> Window:
    offset_us = 0 if offset is None else parse_duration(offset, "window offset", allow_zero=True)
    if offset_us >= every_us:
        distance = "size" if kind == "tumbling" else "step (every)"
        raise ConfigError(
            f"window offset={offset!r} is not less than the window {distance}, {format_duration(every_us)}; windows"
            f" that start {format_duration(offset_us % every_us)} later are the same ones"
        )
    if zone is not None:
        if not isinstance(zone, str) or not zone:
            raise ConfigError(f"window zone={zone!r}: give the name of a time zone, such as 'Europe/Berlin'")
        for what, us in (("size", size_us), ("step (every)", every_us)):
            if us % _DAY_US:
                raise ConfigError(
                    f"window {what} {format_duration(us)} with zone={zone!r}: windows in a time zone are whole days;"
                    " give a number of days, or leave the zone out"
                )
    return Window(kind, size_us, every_us, offset_us, zone)
