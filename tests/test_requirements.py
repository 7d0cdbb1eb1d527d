"""The lowest releases that the package allows are those that are tested."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]


def test_lower_bounds_are_what_is_pinned_as_lowest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in extras if extra != "dev" for one in extras[extra])]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in wanted)  # type: ignore[union-attr]
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "requirements" / "lowest.txt").read_text(), re.MULTILINE))
    for name, bound in bounds.items():
        assert (pins[name] + ".").startswith(bound + ".") and not pins[name][len(bound) :].strip(".0"), name
