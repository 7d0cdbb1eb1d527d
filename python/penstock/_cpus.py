"""How many CPUs this code may use.

Never those of the machine: a container, a pinned process and a Spark task have fewer.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["of_process", "of_task_or_process", "task"]


def of_process() -> int:
    """The CPUs on which this process may run, at least one."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def task() -> Any:
    """The context of the Spark task in which this code runs; None elsewhere. Does not import pyspark."""
    module = sys.modules.get("pyspark.taskcontext")
    return None if module is None else module.TaskContext.get()


def of_task_or_process() -> int:
    """The CPUs of the Spark task (``spark.task.cpus``) in which this code runs, else those of the process."""
    context = task()
    cpus = None if context is None else context.cpus()  # None, too, in a context that a test made by hand
    return of_process() if cpus is None else max(1, int(cpus))
