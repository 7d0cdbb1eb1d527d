"""Bringing the members of an engine up.

Owns: the order in which that happens and what is said meanwhile: executors come first, so that residents spread over
them; each is examined with a tiny job; then the residents start, and wait for slots at most `start_timeout` seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import EngineError
from penstock.spark._engine import preflight
from penstock.spark._engine.hub import Hub, Member
from penstock.spark._engine.residents import Residents
from penstock.spark._tasks.slots import executor_count

__all__ = ["Startup"]

#: How long to wait for executors that the configuration promises before residents are placed, seconds.
_EXECUTORS_S = 20.0


class Startup:
    """One start of an engine.

    Parameters
    ----------
    sc : SparkContext
        Of the engine.
    hub : Hub
        Its registry, which is open.
    name : str
        What it is called.
    workers : int
        How many members are to come.
    timeout, began : float
        Seconds that they have, since when (of `time.monotonic`).
    check : callable
        Asked in every wait; raises when the engine was closed.
    """

    def __init__(
        self,
        sc: Any,
        hub: Hub,
        name: str,
        workers: int,
        timeout: float,
        began: float,
        check: Callable[[], None],
    ) -> None:
        self._sc, self._hub = sc, hub
        self._name, self._workers = name, workers
        self._timeout, self._began = timeout, began
        self._deadline = began + timeout
        self._check = check

    def executors(self, promised: int | None) -> None:
        """Wait for the executors that residents are to spread over, and examine them.

        Raises
        ------
        EngineError
            When one cannot serve, or no slot comes free.
        """
        executors = 0 if (self._sc.master or "local").partition("[")[0] == "local" else promised or 1
        if executors:
            self._await_executors(min(executors, self._workers))
        self._examine(executors)

    def members(self, residents: Residents, setting: str) -> None:
        """Wait for the members, and examine them.

        Raises
        ------
        EngineError
            When slots do not come in time (`setting` says how many there are), or an executor cannot serve.
        """
        while not residents.wait(self._check, min(5.0, max(0.1, self._deadline - time.monotonic()))):
            waited = time.monotonic() - self._began
            missing = residents.missing()
            if time.monotonic() >= self._deadline:
                raise EngineError(
                    f"engine {self._name} has {len(residents.members)} of {self._workers} workers after"
                    f" {waited:.0f} s (start_timeout={self._timeout:g}); missing: {missing}. Are there"
                    f" {self._workers + 1} free task slots? ({setting})"
                )
            self._tell(f"{len(residents.members)} of {self._workers} workers after {waited:.0f} s; {missing}")
        preflight.judge([_seen(member) for member in residents.members], self._hub.address)

    def _tell(self, text: str) -> None:
        print(f"penstock {self._name}: {text}", file=sys.stderr, flush=True)

    def _await_executors(self, count: int) -> None:
        """Executors that are on their way come before residents are placed, so that they spread."""
        limit = min(self._deadline, time.monotonic() + _EXECUTORS_S)
        while executor_count(self._sc) < count and time.monotonic() < limit:
            self._hub.wait_for(lambda: False, self._check, 0.1)

    def _examine(self, executors: int) -> None:
        """Look at the executors with a tiny job, in a thread and job group of its own."""
        sc, hub = self._sc, self._hub
        tasks = max(1, min(2 * max(executors, executor_count(sc)), 256))
        look = preflight.probe(hub.address)
        group = f"penstock-{self._name}-preflight-{os.urandom(4).hex()}"
        found: list[Mapping[str, Any]] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                sc.setJobGroup(group, f"penstock {self._name}: preflight", False)
                found.extend(sc.parallelize(range(tasks), tasks).mapPartitions(look).collect())
            except BaseException as error:
                errors.append(error)
            finally:
                hub.wake()

        thread = threading.Thread(target=work, name=f"penstock-preflight-{self._name}", daemon=True)
        thread.start()
        try:
            began = time.monotonic()
            while not hub.wait_for(lambda: not thread.is_alive(), self._check, 5.0):
                if time.monotonic() > self._deadline:
                    raise EngineError(
                        f"no task slot came free within {self._timeout:g} s (start_timeout): the executors"
                        " could not be examined"
                    )
                self._tell(f"waiting for a free task slot for {time.monotonic() - began:.0f} s")
        finally:
            if thread.is_alive():
                with contextlib.suppress(Exception):
                    sc.cancelJobGroup(group)
                thread.join(10)
        if errors:
            raise EngineError(f"the executors could not be examined: {_last_line(errors[0])}") from errors[0]
        preflight.judge(found, hub.address)


def _seen(member: Member) -> dict[str, Any]:
    facts = {key: member.info.get(key) for key in ("penstock", "python", "pyarrow")}
    return {**facts, "host": member.host, "jvm": member.executor.rpartition("/")[2]}


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "MISMATCH" in line]
    return (telling or lines or [type(error).__name__])[0]
