"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings


def examples(usual: int) -> int:
    """What a usual run takes, and in proportion where the profile asks for more than the usual 100."""
    return max(1, usual * settings().max_examples // 100)
