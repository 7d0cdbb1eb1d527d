"""Values of the user in messages."""

from __future__ import annotations

from typing import Any

__all__ = ["short"]


def short(value: Any, most: int = 80) -> str:
    """A value as ``repr`` has it, cut to `most` characters; never fails.

    Examples
    --------
    >>> short("a" * 30, most=10), short([1])
    ("'aaaaaa...", '[1]')
    """
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= most else text[: most - 3] + "..."
