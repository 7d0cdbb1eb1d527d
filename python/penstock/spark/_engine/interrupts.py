"""Ctrl-C at a prompt, in a notebook or in ``awaitTermination``: it ends what the main thread does, and no worker.

PySpark's handler cancels all jobs of its context, the residents' too, and so would cost all state in memory; within a
call of the JVM it fails, and cancels nothing. While an engine is open, and where that handler is in place, ours cancels
what Spark's would but for the jobs of engines, by way of another thread, which has a connection of its own.

Not here: a handler that raises KeyboardInterrupt within a call of the JVM, as notebooks have one while a cell runs.
py4j closes the connections of all threads then, and repeats their calls: what must not happen twice is not left to it
(`residents`).

Invariants: a handler of the user's is never replaced; once no engine is open ours does what the one before it did, and
it is put back where the last engine is closed in the main thread.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from penstock.spark._engine import handles

__all__ = ["plain_interrupts", "release", "spare"]

log = logging.getLogger(__name__)

#: Seconds that Spark has to cancel jobs before the interrupt is raised.
_CANCEL_S = 5.0


class _Spares:
    """The handler, in place of Spark's `before`."""

    def __init__(self, sc: Any, before: Callable[[int, FrameType | None], Any]) -> None:
        self._sc, self.before = sc, before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not handles.open_engines(self._sc):
            self.before(number, frame)
            return
        thread = threading.Thread(target=self._cancel, name="penstock-interrupt", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("jobs of Spark that run are not cancelled: %s", error)
        else:
            thread.join(_CANCEL_S)
        _leave_call(frame)
        raise KeyboardInterrupt

    def _cancel(self) -> None:
        """Cancel all jobs that run but those of engines."""
        try:
            tracker = self._sc.statusTracker()
            # In this order: what a resident begins after the first look is not in it.
            running = set(tracker.getActiveJobsIds())
            groups = [group for one in handles.open_engines(self._sc) for group in one._job_groups()]
            ours = {job for group in groups for job in tracker.getJobIdsForGroup(group)}
            for job in running - ours:
                self._sc._jsc.sc().cancelJob(job)
        except Exception as error:  # py4j's own, or the context is gone
            log.warning("an interrupt did not cancel the jobs of Spark: %s", error)


def spare(sc: Any) -> None:
    """Have Ctrl-C spare the jobs of engines, where Spark's handler is in place and this is the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not _is_sparks(before):
        return
    assert callable(before)
    signal.signal(signal.SIGINT, _Spares(sc, before))


def release() -> None:
    """An engine is closed: without another one Spark's handler is put back."""
    here = signal.getsignal(signal.SIGINT)
    if (
        isinstance(here, _Spares)
        and not handles.open_engines(here._sc)
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGINT, here.before)


@contextlib.contextmanager
def plain_interrupts() -> Iterator[None]:
    """Let Ctrl-C end a wait and nothing else, where Spark's handler or ours is in place.

    Spark's own cancels all jobs of the context, the residents' too, and so would cost all state; ours those of others.
    """
    before = signal.getsignal(signal.SIGINT)
    plain = isinstance(before, _Spares) or _is_sparks(before)
    if threading.current_thread() is not threading.main_thread() or not plain:
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_call(frame: FrameType | None) -> None:
    """Close the connection of a call of the JVM that is under way: else py4j closes those of all threads."""
    while frame is not None:
        connection = frame.f_locals.get("self")
        if frame.f_code.co_name == "send_command" and hasattr(connection, "shutdown_socket"):
            connection.close()  # type: ignore[union-attr]
        frame = frame.f_back


def _is_sparks(handler: Any) -> bool:
    name = f"{getattr(handler, '__module__', '')}.{getattr(handler, '__qualname__', '')}"
    return name.startswith(("pyspark.context.SparkContext.", "pyspark.core.context.SparkContext."))
