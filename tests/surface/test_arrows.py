"""Arrows between modules point one way: none imports one that imports it, not even for types or inside a function."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent


def name_of(file: Path) -> str:
    parts = ["penstock", *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, modules: set[str]) -> set[str]:
    """Which of the modules a module names in its imports, wherever they stand."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # A name is a module of its own, or something that the package has.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else str(node.module) for name in names}
    return found & modules


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_circle() -> None:
    files = {name_of(file): file for file in PACKAGE.rglob("*.py")}
    modules = {*files, "penstock._native"}
    graph = {name: imports(file.read_text(), modules) - {name} for name, file in files.items()}
    assert len(graph) > 100 and graph["penstock._flow.running"] >= {"penstock._local", "penstock._flow.base"}
    assert circle(graph) == []


@pytest.mark.parametrize(
    "source",
    [
        "import penstock.b",
        "from penstock import b",
        "from penstock.b import thing",
        "def f():\n    from penstock.b import thing",
        "if TYPE_CHECKING:\n    from penstock.b import Thing",
    ],
)
def test_a_circle_is_seen_wherever_the_import_stands(source: str) -> None:
    modules = {"penstock", "penstock.a", "penstock.b"}
    graph = {"penstock.a": imports(source, modules), "penstock.b": imports("from penstock import a", modules)}
    assert set(circle(graph)) == {"penstock.a", "penstock.b"}
