"""How many CPUs code may use: those of the Spark task around it, else those of the process."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock import _cpus
from penstock.dataflow import _execution as execution
from penstock.graph._options import Options
from penstock.ordered import default_workers


def in_task(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    """Make Spark's context of the task this one."""
    module = ModuleType("pyspark.taskcontext")
    module.TaskContext = SimpleNamespace(get=lambda: context)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark.taskcontext", module)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say where a process may run")
def test_a_process_has_the_cpus_on_which_it_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    in_task(monkeypatch, None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 9})
    assert _cpus.of_process() == _cpus.of_task_or_process() == default_workers() == 3
    assert (execution.default_workers(), execution.default_workers(processes=3)) == (3, 1)
    assert execution.default_workers(processes=4) == 1


def test_a_context_that_knows_of_no_cpus_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    in_task(monkeypatch, SimpleNamespace(cpus=lambda: None))
    assert _cpus.of_task_or_process() == _cpus.of_process()


def test_without_an_affinity_it_has_those_of_the_machine_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert _cpus.of_process() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert _cpus.of_process() == 1


@pytest.mark.parametrize(("says", "are"), [(7, 7), (0, 1)])
def test_a_task_has_the_cpus_that_spark_gives_it(monkeypatch: pytest.MonkeyPatch, says: int, are: int) -> None:
    in_task(monkeypatch, SimpleNamespace(cpus=lambda: says))
    assert _cpus.of_task_or_process() == default_workers() == execution.default_workers(processes=2) == are
    assert (Options().threads, Options(workers=3).threads) == (are, 3)
