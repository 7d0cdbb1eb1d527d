"""Telling the engine's protocol that Spark wants a member's executor to go.

Owns: the thread that looks, while ``spark.decommission.enabled`` lets Spark ask executors to go. Such an executor waits
for its tasks, and a resident is one that does not end: until it is told to, it blocks the executor, up to the day that
somebody kills it.

Invariants: each member is told of once, and only when the protocol knows it. Spark gives Python tasks no executor id:
members tell which task they are, and Spark's status store which executor has it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from penstock.errors import EngineError
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.hub import Member

__all__ = ["Decommissions"]

log = logging.getLogger(__name__)

#: Seconds between two looks.
_LOOK_S = 1.0
#: Attempts of the one task of a resident's stage that are looked at.
_ATTEMPTS = 1_000


class Decommissions:
    """The executors of one engine that are to go.

    Parameters
    ----------
    sc : pyspark.SparkContext
        Whose executors they are.
    name : str
        The engine's; names the thread.
    executor : Executor
        Of the engine.
    members : callable
        Those that the protocol knows and that are alive.
    """

    def __init__(self, sc: Any, name: str, executor: Executor, members: Callable[[], Iterable[Member]]) -> None:
        self._sc = sc
        self._name = name
        self._executor = executor
        self._members = members
        self._places: dict[int, str] = {}
        self._told: set[int] = set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on, where Spark may ask executors to go."""
        if self._sc.getConf().get("spark.decommission.enabled", "false").lower() == "true":
            name = f"penstock-decommission-{self._name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def look(self) -> None:
        """Look once: two calls to the JVM for each executor with members."""
        members = list(self._members())
        alive = {member.id for member in members}
        self._places = {one: place for one, place in self._places.items() if one in alive}
        self._told &= alive
        going: dict[str, bool] = {}
        for member in members:
            place = self._place(member)
            if place is None or member.id in self._told:
                continue
            if place not in going:
                going[place] = self._goes(place)
            if going[place]:
                self._executor.post({"Leaving": {"member": member.id}})
                self._told.add(member.id)

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            if self._sc._jsc is None:
                return
            try:
                self.look()
            except EngineError as error:
                log.debug("that an executor goes is told to nobody: %s", error)
                return
            except Exception as error:
                log.debug("executors that go could not be looked for: %s", error)

    def _place(self, member: Member) -> str | None:
        """Spark's id of a member's executor; None where Spark does not tell, or not yet."""
        task = member.info.get("task")
        if member.id not in self._places and task is not None:
            stage, number = task
            # A stage that reads no shuffle is attempted once.
            found = self._sc._jsc.sc().statusStore().taskList(stage, 0, _ATTEMPTS)
            for at in range(found.size()):
                one = found.apply(at)
                if one.taskId() == number:
                    self._places[member.id] = str(one.executorId())
        return self._places.get(member.id)

    def _goes(self, place: str) -> bool:
        return bool(self._sc._jsc.sc().taskScheduler().getExecutorDecommissionState(place).isDefined())
