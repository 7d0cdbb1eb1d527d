"""How many CPUs code may use: those of the Spark task around it, else those whose time the process has."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock import _cpus
from penstock.dataflow import _execution as execution
from penstock.graph._options import Options
from penstock.ordered import default_workers


@pytest.fixture(autouse=True)
def without_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run in."""
    monkeypatch.setattr(_cpus, "quota", lambda: None)


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


QUOTAS: dict[str, tuple[dict[str, str], float | None]] = {
    "none": ({}, None),
    "the group itself": ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
    "one around it": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/cpu.max": "100000 50000\n",
        },
        2.0,
    ),
    "a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
    "version 1": (
        {
            "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,cpuacct:/docker/x\n3:cpuset:/x\n0::/x\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        3.0,
    ),
    "version 1, of all": (
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "another mount": ({"proc/self/cgroup": "0::/../y\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0),
    "what nobody knows": (
        {"proc/self/cgroup": "0\n\n0::/a\n", "sys/fs/cgroup/a/cpu.max": "9\n", "sys/fs/cgroup/cpu.max": "1 0\n"},
        None,
    ),
}


@pytest.mark.parametrize("what", QUOTAS)
def test_the_least_quota_of_all_groups_around_holds(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    files, quota = QUOTAS[what]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert _cpus.quota(str(tmp_path)) == quota
    (tmp_path / "proc").rename(tmp_path / "gone") if files else None
    assert _cpus.quota(str(tmp_path)) == quota, "read once"


@pytest.mark.parametrize(("quota", "are"), [(None, 6), (2.0, 2), (2.1, 3), (0.3, 1), (64.0, 6)])
def test_a_process_has_no_more_cpus_than_their_time(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, are: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(_cpus, "quota", lambda: quota)
    assert _cpus.of_process() == default_workers() == execution.default_workers() == are
