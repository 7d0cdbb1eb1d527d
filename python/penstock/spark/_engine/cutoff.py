"""Ends the jobs of a sink that cannot read its rows any more: the member that holds them has died.

Spark runs a failed task again, ``spark.task.maxFailures`` times in all, and each attempt at rows of a dead member fails
after its Python process has started: seconds of CPU, before the batch can be fed again. So once a member is lost and a
task of the sink's jobs has failed, what the sink has running is cancelled. A sink that has read its rows goes on.

Invariant: only jobs that the thread of the sink started, while it ran, are cancelled.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from penstock.errors import ProtocolError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from penstock.spark._engine.hub import Hub

__all__ = ["ending_at_loss"]

log = logging.getLogger(__name__)

#: Seconds between two looks at the jobs, once a member is lost.
_LOOK_S = 0.1


@contextlib.contextmanager
def ending_at_loss(session: SparkSession, hub: Hub, members: Collection[int]) -> Iterator[None]:
    """Run a sink that reads from these members.

    Raises
    ------
    ProtocolError
        In place of what the sink raised, when its jobs were cancelled; names the member.
    """
    if not members:
        yield
        return
    sc, over, gone = session.sparkContext, threading.Event(), []
    tag = f"penstock-{uuid.uuid4()}"  # another one when the sink is called again: its jobs of before have failed

    def lost() -> list[str]:
        return [f"{member} is gone: {member.lost}" for member in map(hub.known, members) if member.lost is not None]

    def watch() -> None:
        hub.wait_for(lambda: over.is_set() or bool(lost()))
        # Spark's context may end meanwhile.
        with contextlib.suppress(Exception):
            while not over.wait(_LOOK_S):
                if _has_failed(sc, tag):
                    gone.extend(lost())
                    sc.cancelJobsWithTag(tag)
                    return

    watcher = threading.Thread(target=watch, name="penstock-cutoff", daemon=True)
    sc.addJobTag(tag)
    try:
        watcher.start()
    except RuntimeError as error:
        log.debug("a sink is not watched: %s", error)  # it fails all the same, when Spark has tried often enough
    try:
        yield
    except Exception as error:
        if gone:
            raise ProtocolError("; ".join(gone)) from error
        raise
    finally:
        over.set()
        hub.wake()
        if watcher.is_alive():
            watcher.join()
        with contextlib.suppress(Exception):  # the context may have ended meanwhile
            sc.removeJobTag(tag)


def _has_failed(sc: SparkContext, tag: str) -> bool:
    """Whether a task of a job with this tag has failed and may run again."""
    tracker = sc.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in sc._jsc.sc().statusTracker().getJobIdsForTag(tag)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return any(stage is not None and stage.numFailedTasks > 0 for stage in stages)
