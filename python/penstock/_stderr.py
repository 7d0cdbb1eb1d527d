"""Standard error as something that is told aside: it may be closed, or a pipe whose reader is gone, and nobody's work
ends by that."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["is_terminal", "say"]


def say(text: str = "", end: str = "\n") -> None:
    """Write a text where somebody may read it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """Whether somebody looks on."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False
