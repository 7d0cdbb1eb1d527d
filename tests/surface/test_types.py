"""The types of the public functions, as the type checker of a user sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_types_are_those_that_users_see() -> None:
    pytest.importorskip("mypy")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--warn-unused-ignores"]
    told = subprocess.run([*command, "tests/surface/typed.py"], cwd=root, capture_output=True, text=True, timeout=280)
    assert told.returncode == 0, told.stdout + told.stderr
