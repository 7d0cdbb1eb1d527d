"""Looking for executors that Spark wants to go, against as much of Spark as is asked."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine_support import wait_for
from penstock.errors import EngineError
from penstock.spark._engine import decommission
from penstock.spark._engine.decommission import Decommissions
from penstock.spark._engine.hub import Member


class Spark:
    """Stands for a SparkContext and all that is reached through it: its status store, its scheduler."""

    def __init__(self, setting: str | None = "true") -> None:
        self.setting = setting
        self._jsc: Any = self
        #: Executor by task, and those that are to go.
        self.tasks: dict[int, str] = {}
        self.going: set[str] = set()
        self.asked: list[str] = []

    def getConf(self) -> Any:
        return {} if self.setting is None else {"spark.decommission.enabled": self.setting}

    def sc(self) -> Spark:
        return self

    statusStore = taskScheduler = sc

    def taskList(self, stage: int, attempt: int, most: int) -> Any:
        assert (stage, attempt) == (4, 0) and most > 0
        found = [Task(number, place) for number, place in self.tasks.items()]

        class Seq:
            size = staticmethod(lambda: len(found))
            apply = staticmethod(lambda at: found[at])

        return Seq

    def getExecutorDecommissionState(self, place: str) -> Any:
        self.asked.append(place)

        class Option:
            isDefined = staticmethod(lambda: place in self.going)

        return Option


class Task:
    def __init__(self, number: int, place: str) -> None:
        self.taskId = lambda: number
        self.executorId = lambda: place


class Protocol:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.broken = False

    def post(self, event: Any) -> None:
        if self.broken:
            raise EngineError("the engine has failed")
        self.told.append(event)


def member(number: int, task: int | None) -> Member:
    info = {"task": None if task is None else [4, task]}
    return Member(id=number, slot=number, executor=f"host/1/{number}", address="", pid=1, info=info)


def leaving(*numbers: int) -> list[Any]:
    return [{"Leaving": {"member": number}} for number in numbers]


def test_each_member_of_an_executor_that_goes_is_told_of_once() -> None:
    spark, protocol = Spark(), Protocol()
    members = [member(1, 11), member(2, 12), member(3, 13), member(4, None)]
    looks = Decommissions(spark, "looks", protocol, lambda: members)  # type: ignore[arg-type]
    spark.tasks = {11: "0", 12: "1", 99: "1"}
    looks.look()
    assert protocol.told == [] and sorted(spark.asked) == ["0", "1"], "Spark has not told of task 13 yet"
    spark.tasks[13] = "1"
    spark.going = {"1"}
    spark.asked.clear()
    looks.look()
    assert protocol.told == leaving(2, 3) and sorted(spark.asked) == ["0", "1"], "one look for each executor"
    looks.look()
    assert protocol.told == leaving(2, 3)
    # Whoever comes there before Spark knows is told of too, and nobody else asked about again.
    members[:] = [member(1, 11), member(5, 15)]
    spark.tasks[15] = "1"
    looks.look()
    assert protocol.told == leaving(2, 3, 5)
    # What could not be told is told again.
    spark.going = {"0"}
    protocol.broken = True
    with pytest.raises(EngineError):
        looks.look()
    protocol.broken = False
    looks.look()
    assert protocol.told == leaving(2, 3, 5, 1)


def alive() -> bool:
    return any(thread.name == "penstock-decommission-looks" for thread in threading.enumerate())


@pytest.mark.parametrize("setting", [None, "false"])
def test_nothing_is_looked_at_where_spark_asks_no_executor_to_go(setting: str | None) -> None:
    looks = Decommissions(Spark(setting), "looks", Protocol(), list)  # type: ignore[arg-type]
    looks.start()
    assert not alive()
    looks.close()


def test_the_thread_outlives_errors_and_ends_with_the_context_or_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decommission, "_LOOK_S", 0.01)
    spark, protocol, failures = Spark("TRUE"), Protocol(), [RuntimeError("the JVM is busy")]

    def members() -> list[Member]:
        if failures:
            raise failures.pop()
        return [member(1, 11)]

    looks = Decommissions(spark, "looks", protocol, members)  # type: ignore[arg-type]
    looks.start()
    spark.tasks, spark.going = {11: "0"}, {"0"}
    wait_for(lambda: protocol.told == leaving(1), what="the look after the failure")
    spark._jsc = None
    wait_for(lambda: not alive(), what="the end of the thread")
    spark._jsc = spark
    again = Decommissions(spark, "looks", protocol, members)  # type: ignore[arg-type]
    again.start()
    assert alive()
    again.close()
    assert not alive()
