"""What `make test-real` says of a part that is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "real" / "real_support.py"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`real_support` on a machine that has nothing."""
    spec = importlib.util.spec_from_file_location("parts_of_real", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("PENSTOCK_REAL_WITHOUT", raising=False)
    return module


@pytest.mark.parametrize(
    ("part", "ask", "what"),
    [("postgresql", "postgres_programs", "apt-get install postgresql"), ("java", "java", "Java")],
)
def test_a_part_that_is_not_there_fails_unless_it_is_left_out(
    parts: Any, monkeypatch: pytest.MonkeyPatch, part: str, ask: str, what: str
) -> None:
    for without in ("", "s3,other"):
        monkeypatch.setenv("PENSTOCK_REAL_WITHOUT", without)
        with pytest.raises(pytest.fail.Exception, match=f"{what}.*; PENSTOCK_REAL_WITHOUT={part} leaves out"):
            getattr(parts, ask)()
    monkeypatch.setenv("PENSTOCK_REAL_WITHOUT", f"s3,{part}")
    with pytest.raises(pytest.skip.Exception, match=f"without {part}: no "):
        getattr(parts, ask)()
