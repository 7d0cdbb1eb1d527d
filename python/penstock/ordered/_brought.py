"""In a worker process: the classes that came with its functions, by number. Its parent has them; see `_dynamic`."""

from __future__ import annotations

__all__ = ["brought"]

brought: dict[type, str] = {}
