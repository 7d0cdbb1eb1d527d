"""The page of operations: what it must name, it names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import penstock as pk
from penstock.spark._engine import journal
from penstock.spark._engine.metrics import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text()


def rows(section: str) -> dict[str, str]:
    """The rows of a table by what stands in their first column."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            first, _, rest = line[2:].partition(" | ")
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", first), rest)
    return found


def test_every_metric_is_on_the_page_with_its_labels() -> None:
    told = rows("Metrics")
    assert set(told) == set(FAMILIES)
    for name, family in FAMILIES.items():
        assert tuple(re.findall(r"`([a-z]+)`", told[name].partition(" | ")[0])) == family.labels, name


@pytest.mark.parametrize("name", [name for name in pk.errors.__all__ if name != "from_failure"])
def test_every_error_is_on_the_page(name: str) -> None:
    assert issubclass(getattr(pk.errors, name), pk.PenstockError)
    assert name in rows("Errors")


def test_every_error_on_the_page_is_there() -> None:
    assert set(rows("Errors")) <= set(pk.errors.__all__)


def test_every_event_is_on_the_page() -> None:
    source = inspect.getsource(journal)
    events = set(re.findall(r'(?:logging\.[A-Z]+|level), "([a-z ]+)"', source)) | {"start waits"}
    events |= {f"batch {end}" for end in ("stopped", "failed")}
    events |= {f"{kind} {end}" for kind in journal.MOVES for end in ("begun", "done", "failed")}
    # What follows another event is told beside it.
    assert set(rows("Log lines")) == events - {"member replaced"}
    assert "`member replaced`" in rows("Log lines")["member lost"]


def test_the_readme_links_the_page() -> None:
    assert "(docs/operations.md)" in (ROOT / "README.md").read_text()
