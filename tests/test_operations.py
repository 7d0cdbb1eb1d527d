"""The page of operations: what it must name, it names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import penstock as pk
from penstock.spark._engine.hub import Hub
from penstock.spark._engine.journal import FIELDS, MOVES
from penstock.spark._engine.metrics import FAMILIES
from penstock.spark._tasks.place import Secret

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text()
#: What writes a line: in its arguments a level stands before the event.
TELLS = {"tell", "_tell", "_of_engine", "_of_member"}
#: Events that are put together, ``{}`` for what is known only then.
MADE = {
    "batch {}": {"batch stopped", "batch failed"},
    **{f"{{}} {end}": {f"{kind} {end}" for kind in MOVES} for end in ("begun", "done", "failed")},
}


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


def modules() -> Iterator[ast.Module]:
    """All modules of the package."""
    for path in sorted(Path(pk.__file__).parent.rglob("*.py")):
        yield ast.parse(path.read_text())


def told(module: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Each call that writes a line, and the event of that; not those that pass on what they were given."""
    for call in ast.walk(module):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", getattr(call.func, "id", "")) not in TELLS:
            continue
        for level, event in pairwise(call.args):
            if not re.fullmatch(r"logging\.[A-Z]+|level", ast.unparse(level)):
                continue
            if isinstance(event, ast.Constant):
                yield call, str(event.value)
            elif isinstance(event, ast.JoinedStr):
                yield call, "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in event.values)


def test_every_event_is_on_the_page() -> None:
    found = {event for module in modules() for _, event in told(module)}
    assert {event for event in found if "{" in event} == set(MADE)
    events = (found - set(MADE)).union(*MADE.values())
    assert {"batch begun", "member cancelled", "start waits"} <= events
    # What follows another event is told beside it.
    assert set(rows("Log lines")) == events - {"member replaced"}
    assert "`member replaced`" in rows("Log lines")["member lost"]


def test_every_field_is_written_somewhere() -> None:
    written = {"event", *(f"{phase}_seconds" for phase in ("trigger", "feed", "run", "serve", "commit"))}
    for module in modules():
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        if any(getattr(call.func, "attr", getattr(call.func, "id", "")) in TELLS for call in calls):
            written |= {str(keyword.arg) for call in calls for keyword in call.keywords}
            dicts = [node for node in ast.walk(module) if isinstance(node, ast.Dict)]
            written |= {key.value for one in dicts for key in one.keys if isinstance(key, ast.Constant)}
    assert len(set(FIELDS)) == len(FIELDS) and set(FIELDS) <= written


def test_reasons_of_refusals_are_those_that_can_be() -> None:
    """Generations are of members alone."""
    secret = Secret.random()
    hub = Hub("127.0.0.1", 0, None, secret, "reasons", 20.0)
    try:
        counted = {name.removeprefix("refused_") for name in hub.metrics() if name.startswith("refused_")}
    finally:
        hub.close()
    page = rows("Metrics")["penstock_refused_connections_total"].rpartition("port: ")[2].partition(" (")[0]
    assert set(page.split(", ")) == counted - {"stale"}
    assert page in FAMILIES["penstock_refused_connections_total"].help


def test_the_readme_links_the_page() -> None:
    assert "(docs/operations.md)" in (ROOT / "README.md").read_text()
