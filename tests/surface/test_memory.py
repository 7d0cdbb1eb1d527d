"""Limits and local directories of resident processes, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, StorageError, from_failure
from penstock.spark._tasks import memory
from penstock.spark._tasks.memory import Hints, limit_bytes, local_folders, staging_bytes

MIB = 1 << 20


def test_spark_3_on_a_python_without_distutils_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    import sys
    from types import SimpleNamespace

    from penstock.errors import UnsupportedSession
    from penstock.spark._session.guard import require_classic

    session = type("SparkSession", (), {"__module__": "pyspark.sql.session"})()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for version, python, runs in (("3.5.6", (3, 12, 1), False), ("3.5.6", (3, 11, 7), True), ("4.0.1", (3, 13), True)):
        monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "version_info", python)
        if runs:
            require_classic(session, "it")
            continue
        with pytest.raises(UnsupportedSession, match=r"Spark 3\.5\.6 imports distutils, which Python 3\.12 does not"):
            require_classic(session, "it")


def test_hints_follow_sparks_settings() -> None:
    def of(master: str, **settings: str) -> Hints:
        return Hints.of({f"spark.{name.replace('_', '.')}": value for name, value in settings.items()}.get, master)

    assert of("local[4]", driver_memory="2g", executor_memory="8g").heap == 2 << 30
    assert of("spark://x", executor_memory="8g").overhead is None
    yarn = of("yarn", executor_memory="2g", local_dir="/a,/b")
    assert (yarn.heap, yarn.overhead, yarn.folders) == (2 << 30, 384 * MIB, ("/a", "/b"))
    assert of("k8s://x", executor_memory="8g", executor_memoryOverheadFactor="0.4").overhead == int(0.4 * (8 << 30))
    # In Spark's settings a bare number counts MiB.
    assert of("yarn", executor_memory="8g", executor_memoryOverhead="1000").overhead == 1000 * MIB
    assert of("yarn", executor_memory="1g", executor_minMemoryOverhead="600m").overhead == 600 * MIB
    assert of("yarn", executor_memory="nonsense", executor_memoryOverheadFactor="much").heap == 1 << 30


def test_the_least_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_group_limit", lambda: None)
    assert limit_bytes(Hints(overhead=200 * MIB)) == (200 * MIB, "spark.executor.memoryOverhead")
    monkeypatch.setattr(memory, "_group_limit", lambda: 1200 * MIB)
    limit, name = limit_bytes(Hints(heap=1100 * MIB, overhead=200 * MIB))
    assert (limit, name) == (100 * MIB, "the container's memory limit")
    assert staging_bytes(Hints(heap=1100 * MIB)) == 16 * MIB, "not less"
    assert staging_bytes(Hints(heap=400 * MIB)) == 100 * MIB
    monkeypatch.setattr(memory, "limit_bytes", lambda hints: (1 << 40, "all"))
    assert staging_bytes(Hints()) == 1024 * MIB, "not more"


def test_limits_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    assert memory._group_limit(tmp_path, own) is None
    own.write_text("0::/pods/mine\n")
    (tmp_path / "pods" / "mine").mkdir(parents=True)
    (tmp_path / "pods" / "mine" / "memory.max").write_text("max\n")
    assert memory._group_limit(tmp_path, own) is None
    (tmp_path / "pods" / "memory.max").write_text("1000\n")
    assert memory._group_limit(tmp_path, own) == 1000, "that of a parent holds as well"
    own.write_text("7:cpu,memory:/one\n0::/\n")
    (tmp_path / "memory" / "one").mkdir(parents=True)
    (tmp_path / "memory" / "one" / "memory.limit_in_bytes").write_text("900\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert memory._group_limit(tmp_path, own) == 900


def test_local_directories(tmp_path: Path) -> None:
    assert local_folders(Hints(), {"LOCAL_DIRS": "/yarn/1, /yarn/2"}) == ["/yarn/1", "/yarn/2"]
    assert local_folders(Hints(), {"SPARK_EXECUTOR_DIRS": "/a:/b"}) == ["/a", "/b"]
    assert local_folders(Hints(), {}) == [memory.tempfile.gettempdir()]


def test_failures_of_storage_become_exceptions() -> None:
    error = from_failure({"kind": "storage", "message": "full", "paths": ["/d"], "setting": "spark.local.dir"})
    assert isinstance(error, StorageError) and isinstance(error, OSError)
    assert (error.paths, error.setting) == (["/d"], "spark.local.dir")


@pytest.mark.parametrize(
    "options",
    [
        {"staging_memory": "lots"},
        {"staging_memory": -5},
        {"member_timeout": 0.1},
        {"member_timeout": "1"},
        {"staging_folders": "/a"},
        {"staging_folders": ["a"]},
        {"staging_folders": []},
    ],
)
def test_options_of_the_engine_are_checked_first(options: dict[str, Any]) -> None:
    import penstock as pk

    session = type("SparkSession", (), {"__module__": "pyspark.sql.session"})()
    with pytest.raises(ConfigError, match=next(iter(options))):
        pk.Engine(session, **options)


def test_advice_for_connect_fits_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    from penstock.errors import UnsupportedSession
    from penstock.spark._session.guard import require_classic

    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    for version, advice in (("3.5.6", "from_pandas"), ("4.0.1", r"df\.toArrow"), ("4.3.0.dev1", r"df\.toArrow")):
        monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedSession, match=advice):
            require_classic(session, "it")
