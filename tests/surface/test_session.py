"""A private Spark session leaves no process, port or file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

_PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from penstock.spark._session.session import private_session
folder = Path(sys.argv[1])
for round in range(2):
    with private_session(folder, "test", slots=1, settings={"spark.sql.shuffle.partitions": "3"}) as spark:
        assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
        assert len(spark.range(4).mapInArrow(lambda batches: batches, "id long").collect()) == 4
        try:
            with private_session(folder, "second", slots=1):
                raise AssertionError("a second session beside the first")
        except RuntimeError as error:
            assert "already" in str(error)
        print("jvm", spark._jvm.java.lang.ProcessHandle.current().pid(), flush=True)
print("children", subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "comm="], capture_output=True, text=True)
      .stdout.split())
"""


def test_two_sessions_one_after_the_other_leave_nothing(tmp_path: Path) -> None:
    home = tmp_path / "cwd"
    home.mkdir()
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder)],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("jvm")]
    assert len(set(pids)) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "children ['ps']" in done.stdout
    assert list(home.iterdir()) == []


def test_a_failing_start_shows_sparks_words(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from penstock.spark._session.session import private_session\n"
        "with private_session(Path(sys.argv[1]), 't', 1, {'spark.driver.memory': '1kk'}): pass"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert "1kk" in done.stderr
