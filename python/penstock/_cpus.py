"""How many CPUs this code may use.

Never those of the machine: a container, a pinned process and a Spark task have fewer.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["of_process", "of_task_or_process", "quota", "task"]


def of_process() -> int:
    """The CPUs on which this process may run, no more than it has the time of, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = quota()
    return max(1, allowed if limit is None else min(allowed, math.ceil(limit)))


@functools.cache
def quota(root: str = "/") -> float | None:
    """CPUs whose time this process may take: the least that its control group, or one around it, is given.

    None where none is limited, or nothing can be read. Read once; `root` is ``/`` outside tests.
    """
    try:
        groups = Path(root, "proc/self/cgroup").read_text(errors="surrogateescape")
    except OSError:
        return None
    found = []
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        kinds, told, path = rest.partition(":")
        if not told or not (kinds == "" or "cpu" in kinds.split(",")):
            continue
        for folder in dict.fromkeys(("cpu", kinds)) if kinds else ("",):
            mount = Path(root, "sys/fs/cgroup", folder)
            group = mount / path.lstrip("/")
            # Those around it hold as well; a container sees its own group as the mount.
            for around in (group, *group.parents):
                found.append(_limit(around, old=bool(kinds)))
                if around == mount:
                    break
    return min((cpus for cpus in found if cpus is not None), default=None)


def _limit(group: Path, old: bool) -> float | None:
    """The CPUs that a control group, of version 1 or 2, is given; None for all."""
    try:
        if old:
            given, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            given, period = (group / "cpu.max").read_text().split()
        cpus = int(given) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file; "max"
        return None
    return cpus if cpus > 0 else None


def task() -> Any:
    """The context of the Spark task in which this code runs; None elsewhere. Does not import pyspark."""
    module = sys.modules.get("pyspark.taskcontext")
    return None if module is None else module.TaskContext.get()


def of_task_or_process() -> int:
    """The CPUs of the Spark task (``spark.task.cpus``) in which this code runs, else those of the process."""
    context = task()
    cpus = None if context is None else context.cpus()  # None, too, in a context that a test made by hand
    return of_process() if cpus is None else max(1, int(cpus))
