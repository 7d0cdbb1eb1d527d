"""Options of the commands with a few fixed values, as their help and completion show them."""

from __future__ import annotations

import enum

__all__ = ["Host", "Mode", "Queue", "Scheduler", "Strategy", "Where"]


class Host(str, enum.Enum):
    """Where a command runs."""

    local = "local"
    spark = "spark"
    engine = "engine"


class Where(str, enum.Enum):
    """Where a command runs that has no engine."""

    local = "local"
    spark = "spark"


class Strategy(str, enum.Enum):
    """How many bins a migration moves at once."""

    all_at_once = "all-at-once"
    batched = "batched"
    fluid = "fluid"
    matched = "matched"


class Gap(str, enum.Enum):
    """What happens between two steps of a migration."""

    drain = "drain"


class Queue(str, enum.Enum):
    """How rows wait for the worker of their key."""

    hybrid = "hybrid"
    partitioned = "partitioned"


class Scheduler(str, enum.Enum):
    """Which operator a free worker serves next."""

    adaptive = "adaptive"
    qst = "qst"
    lip = "lip"
    et = "et"
    ct = "ct"


class Mode(str, enum.Enum):
    """Where the steps run."""

    auto = "auto"
    inline = "inline"
    threads = "threads"
    processes = "processes"
