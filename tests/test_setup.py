"""What `make setup` says while it waits."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomllib


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "scripts" / "setup.py"
    spec = importlib.util.spec_from_file_location("setup_script", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told(setup: ModuleType, capsys: pytest.CaptureFixture[str], progress: Any) -> str:
    progress.tell()
    return capsys.readouterr().out.rsplit("  ", 1)[1].strip()


def test_it_says_which_packages_are_left(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup.Progress("install the pinned packages")
    assert told(setup, capsys, progress) == "install the pinned packages"
    for line in ("Resolved 60 packages in 1.33s", "Downloading pyspark (434.9MiB)", "Downloading numpy (16.1MiB)"):
        progress.hear(line)
    progress.hear(" Downloaded numpy")
    assert told(setup, capsys, progress) == "1 of 2 large packages fetched, left pyspark (434.9MiB)"
    progress.hear(" Downloaded pyspark")
    progress.hear("Prepared 60 packages in 20.1s")
    assert told(setup, capsys, progress) == "all packages fetched, now installed"
    assert progress.spoken == ["Resolved 60 packages in 1.33s"]


def test_it_says_how_many_crates_are_left(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup.Progress("build the native module")
    progress.hear("   Compiling penstock-plan v0.1.0")
    progress.hear("    Building [=====>      ] 97/172: arrow-array, penstock-dataflow")
    assert told(setup, capsys, progress) == "97 of 172 crates built, now arrow-array, penstock-dataflow"


def test_a_release_build_stays_as_long_as_it_is_up_to_date(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`make run` behind `make release` built it again as a setup build."""
    monkeypatch.setattr(setup, "STAMPS", tmp_path)
    monkeypatch.setattr("sys.argv", ["setup.py"])
    assert setup.arguments().profile is None and setup.usual_profile("c0ffee") == "setup"
    for stamp, profile in (("release c0ffee", "release"), ("release older", "setup"), ("setup c0ffee", "setup")):
        (tmp_path / "native").write_text(stamp)
        assert setup.usual_profile("c0ffee") == profile


def test_our_builds_are_locked_and_those_of_a_source_distribution_are_not() -> None:
    """It has fewer members than Cargo.lock knows of, so pip could not build it."""
    root = Path(__file__).resolve().parents[1]
    assert "locked" not in tomllib.loads((root / "pyproject.toml").read_text())["tool"]["maturin"]
    files = [root / "Makefile", root / "scripts" / "setup.py", *(root / ".github" / "workflows").glob("*.yml")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    builds = [line for line in lines if re.search(r"maturin\W+(build|develop)\b", line)]
    assert len(builds) == 4 and all("--locked" in line for line in builds), builds
