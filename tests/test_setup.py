"""What `make setup` says while it waits."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomllib


def script(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_script", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return script("setup")


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


def test_a_checkout_that_was_copied_or_moved_is_set_up_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its environment has the paths of where it was: it would run the code of the other checkout."""
    link = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "penstock.pth"
    link.parent.mkdir(parents=True)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    assert setup.belongs_here(), "nothing is installed yet"
    for place, here in ((tmp_path, True), (tmp_path / "before", False)):
        link.write_text(f"{place / 'python'}\n")
        assert setup.belongs_here() is here
    assert not setup.venv_works()


def test_a_program_of_tests_that_hangs_is_told_with_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rust = script("test_rust")
    monkeypatch.setattr(rust, "LIMIT_S", 0.5)
    hangs = tmp_path / "hangs"
    hangs.write_text(
        f"#!{sys.executable}\nprint('test one has been running', flush=True)\nimport time\ntime.sleep(600)\n"
    )
    hangs.chmod(0o755)
    outcome = rust.run(rust.Program("a/tests.rs", str(hangs), tmp_path))
    assert outcome.status == 124 and outcome.seconds < 60
    assert rust.tell(rust.Program("a/tests.rs", str(hangs), tmp_path), outcome) == 0
    said = capsys.readouterr().out
    assert "test one has been running" in said and "has not ended after 0 s" in said and "FAILED" in said
