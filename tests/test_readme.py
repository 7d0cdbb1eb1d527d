"""Every Python example of the README runs as it stands, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.spark
def test_the_examples_run(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(BLOCKS) >= 5
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"spark": spark, "folder": str(tmp_path)}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md block {number}", "exec"), namespace)


def test_every_make_target_it_names_exists() -> None:
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"`?make ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
