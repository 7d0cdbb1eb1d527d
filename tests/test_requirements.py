"""Pinned releases: the lowest that are allowed are those that are tested; what is fuzzed is locked."""

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


def test_the_crates_that_are_fuzzed_are_locked_with_what_they_depend_on() -> None:
    """The fuzz targets are a workspace of their own: its lock file does not follow the other by itself."""
    locked = tomllib.loads((ROOT / "fuzz" / "Cargo.lock").read_text())["package"]
    found = {one["name"]: {of.split()[0] for of in one.get("dependencies", ())} for one in locked}
    for manifest in (ROOT / "rust").glob("*/Cargo.toml"):
        told = tomllib.loads(manifest.read_text())
        if (name := told["package"]["name"]) in found:
            assert found[name] == told["dependencies"].keys(), f"{name}: cargo update --workspace in fuzz/"
