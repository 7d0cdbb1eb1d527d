"""What `make setup` says while it waits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


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
