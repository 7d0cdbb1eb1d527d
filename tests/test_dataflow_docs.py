"""The examples in the documentation of the dataflow layer run, and every public method has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import penstock.dataflow

MODULES = ["penstock._keys", "penstock._mesh", "penstock.dataflow"] + [
    f"penstock.dataflow.{module.name}" for module in pkgutil.iter_modules(penstock.dataflow.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0


def _public(module: ModuleType) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing):
            found += [
                (f"{name}.{member}", value) for member, value in vars(thing).items() if not member.startswith("_")
            ]
        elif inspect.isfunction(thing):
            found.append((name, thing))
    return [(name, thing) for name, thing in found if callable(thing) or isinstance(thing, property)]


def test_every_public_method_is_documented_with_an_example() -> None:
    for name, thing in _public(penstock.dataflow):
        text = inspect.getdoc(thing) or ""
        assert ">>>" in text or "See `" in text or "for an example" in text.lower() or "see there" in text, name
