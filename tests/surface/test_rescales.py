"""Rescales of an engine without Spark: the number of members, and who may wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.errors import EngineError, SlotsError
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.hub import Hub
from penstock.spark._engine.record import Recorder
from penstock.spark._engine.rescale import Rescales
from penstock.spark._tasks.place import Secret


@pytest.fixture
def made() -> Any:
    """Makes the rescales of an engine with one member, to which no other comes."""
    executors = []

    def missing() -> str:
        return "resident 1 (last one: refused)"

    def make(start_ms: int, calling: Any = lambda: None) -> tuple[Executor, Rescales]:
        executor = Executor("rescales", {"workers": 1, "start_ms": start_ms})
        executor.perform(StartResident=lambda facts: None, RetireResident=lambda facts: None)
        hub = Hub("127.0.0.1", 0, None, Secret.random("auto"), "rescales")
        rescales = Rescales(executor, 1, {"q": "query"}.get, calling, Recorder(hub, "rescales", {}.get), missing)
        executor.start()
        executor.ask({"MemberUp": {"slot": 0, "member": 1, "executor": "only", "executors": 1}})
        executors.append((executor, hub))
        return executor, rescales

    yield make
    for executor, hub in executors:
        executor.close()
        hub.close()


def test_slots_that_come_too_late_are_not_held_whatever_the_order_of_threads(made: Any) -> None:
    executor, rescales = made(0)
    held = []
    executor.watch(lambda event, effects: held.append(rescales.workers))
    told = r"3\): 2 of 3 workers have not come in 0 s \(start_timeout\): resident 1 \(last one: refused\); few$"
    with pytest.raises(SlotsError, match=told):
        rescales.ask(3, 5, "few").wait(60)
    assert 3 in held and rescales.workers == 1
    # What is refused has changed nothing.
    with pytest.raises(SlotsError):
        rescales.ask(9, 2, "")
    assert rescales.workers == 1


def test_a_call_of_a_query_does_not_wait_for_members_that_come_with_its_next_batch(made: Any) -> None:
    sink = threading.get_ident()
    _, rescales = made(60_000, lambda: "q" if threading.get_ident() == sink else None)
    handle = rescales.ask(2, 5, "")
    assert rescales.workers == 2
    with pytest.raises(EngineError, match=r"waited for by the sink of query query \(q\).* when the sink has returned"):
        handle.wait()
    handle.cancel()
    assert handle.wait() == 1 and rescales.workers == 1
