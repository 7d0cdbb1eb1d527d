"""Event-time windows.

Owns: the description of a window, nothing of its execution. Windows are half open,
``[start, start + size)``, and aligned to 1970-01-01 00:00 UTC; a sliding window starts at
every multiple of ``every``. Only windows that hold at least one row exist. Where ``every`` is
longer than the size there are gaps, and rows in them are in no window: in no result, nor late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock._durations import Duration, format_duration, parse_duration

__all__ = ["Window", "sliding", "tumbling"]


@dataclass(frozen=True)
class Window:
    """How event time is cut; made by `tumbling` or `sliding`.

    Attributes
    ----------
    kind : {"tumbling", "sliding"}
        Which maker made it.
    size_us : int
        Length of every window in microseconds.
    every_us : int
        Distance between the starts of two windows in microseconds.
    """

    kind: str
    size_us: int
    every_us: int

    def to_step(self) -> dict[str, Any]:
        """Return the step of the plan that this window stands for.

        Examples
        --------
        >>> tumbling("1s").to_step()["size_us"]
        1000000
        """
        return {"op": "window", "kind": self.kind, "size_us": self.size_us, "every_us": self.every_us}

    def __str__(self) -> str:
        if self.kind == "tumbling":
            return f"tumbling {format_duration(self.size_us)}"
        return f"sliding {format_duration(self.size_us)} every {format_duration(self.every_us)}"


def tumbling(size: Duration) -> Window:
    """Windows that follow each other without overlap.

    Parameters
    ----------
    size : str or datetime.timedelta
        Length, such as ``"60s"``.

    Returns
    -------
    Window
        To be given to `Flow.window`.

    Raises
    ------
    ConfigError
        When the size is not a duration or is zero.

    Examples
    --------
    >>> print(tumbling("60s"))
    tumbling 1m
    """
    size_us = parse_duration(size, "window size")
    return Window("tumbling", size_us, size_us)


def sliding(size: Duration, every: Duration) -> Window:
    """Windows that start at every multiple of `every` and may overlap or lie apart.

    Parameters
    ----------
    size : str or datetime.timedelta
        Length of each window.
    every : str or datetime.timedelta
        Distance between two starts. A row belongs to ``size / every`` windows (rounded
        up), which is what each row costs. Longer than `size`, it leaves gaps: rows in them
        are in no window.

    Returns
    -------
    Window
        To be given to `Flow.window`.

    Raises
    ------
    ConfigError
        When one of the two is not a duration or is zero.

    Examples
    --------
    >>> print(sliding("60s", every="1s"))
    sliding 1m every 1s
    >>> print(sliding("1s", every="60s"))  # the first second of each minute
    sliding 1s every 1m
    """
    size_us = parse_duration(size, "window size")
    every_us = parse_duration(every, "window step (every)")
    return Window("sliding", size_us, every_us)
