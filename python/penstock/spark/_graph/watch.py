"""A Spark job that is watched: how many of its tasks are done, and Ctrl-C ends it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["watched"]

T = TypeVar("T")
#: Seconds between two looks.
_LOOK_S = 0.2
#: Seconds that an interrupted job has to end.
_CANCEL_S = 10.0


def watched(
    context: Any, description: str, action: Callable[[], T], total: int, progress: Callable[[int, int], None] | None
) -> T:
    """Run jobs in a thread of their own.

    Parameters
    ----------
    context : pyspark.SparkContext
        Where they run.
    description : str
        What Spark's own views show.
    action : callable
        Starts them and waits.
    total : int
        How many tasks they have.
    progress : callable, optional
        Called now and then with how many tasks are done, and of how many; at last with all.

    Returns
    -------
    object
        What `action` returns; what it raises is raised here. When this thread is interrupted, the jobs are cancelled.
    """
    from pyspark import InheritableThread

    group = f"penstock-{uuid.uuid4().hex}"
    outcome: list[T] = []
    failure: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            context.setJobGroup(group, description, True)
            outcome.append(action())
        except BaseException as error:
            failure.append(error)
        finally:
            ended.set()

    thread = InheritableThread(target=run, daemon=True)
    thread.start()
    tracker = context.statusTracker()
    try:
        while not ended.wait(_LOOK_S):
            if progress is not None:
                progress(min(_done(tracker, group), total), total)
    except BaseException:
        # Perhaps it has yet to submit them.
        deadline = time.monotonic() + _CANCEL_S
        while not ended.is_set() and time.monotonic() < deadline:
            context.cancelJobGroup(group)
            ended.wait(_LOOK_S)
        raise
    thread.join()
    if failure:
        raise failure[0]
    if progress is not None:
        progress(total, total)
    return outcome[0]


def _done(tracker: Any, group: str) -> int:
    stages = [
        tracker.getStageInfo(stage)
        for job in tracker.getJobIdsForGroup(group)
        for stage in getattr(tracker.getJobInfo(job), "stageIds", ())
    ]
    return sum(stage.numCompletedTasks for stage in stages if stage is not None)
