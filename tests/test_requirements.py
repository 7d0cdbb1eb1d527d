"""What is said in several places is the same in all: pinned releases, Pythons, platforms, addresses."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

from penstock._extras import EXTRAS, how_to_install

ROOT = Path(__file__).resolve().parents[1]


def test_lower_bounds_are_what_is_pinned_as_lowest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in wanted)  # type: ignore[union-attr]
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "requirements" / "lowest.txt").read_text(), re.MULTILINE))
    for name, bound in bounds.items():
        assert (pins[name] + ".").startswith(bound + ".") and not pins[name][len(bound) :].strip(".0"), name


def test_advice_on_what_to_install_has_the_bounds_of_the_extras() -> None:
    """And names packages: the penstock of PyPI is another project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: list(packages) for name, packages in EXTRAS.items()} == extras
    assert how_to_install("java") == f"pip install '{extras['java'][0]}'"
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert not [path for path in sources if re.search(r"pip install '?penstock\b(?!-)", path.read_text())]


def test_the_crates_that_are_fuzzed_are_locked_with_what_they_depend_on() -> None:
    """The fuzz targets are a workspace of their own: its lock file does not follow the other by itself."""
    locked = tomllib.loads((ROOT / "fuzz" / "Cargo.lock").read_text())["package"]
    found = {one["name"]: {of.split()[0] for of in one.get("dependencies", ())} for one in locked}
    for manifest in (ROOT / "rust").glob("*/Cargo.toml"):
        told = tomllib.loads(manifest.read_text())
        if (name := told["package"]["name"]) in found:
            assert found[name] == told["dependencies"].keys(), f"{name}: cargo update --workspace in fuzz/"


def test_the_pythons_that_are_served_are_the_same_everywhere() -> None:
    """The oldest is a floor of the wheel, and of what checks the code; the newest is what the pinned packages know."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    served = re.findall(r"Python :: (3\.\d+)", "\n".join(told["project"]["classifiers"]))
    assert served == [f"3.{minor}" for minor in range(int(served[0][2:]), int(served[-1][2:]) + 1)]
    oldest, newest = served[0], served[-1]
    assert told["project"]["requires-python"] == f">={oldest}" and told["tool"]["mypy"]["python_version"] == oldest
    binding = tomllib.loads((ROOT / "rust" / "python" / "Cargo.toml").read_text())
    assert binding["dependencies"]["pyo3"]["features"] == [f"abi3-py{oldest.replace('.', '')}"]

    setup = (ROOT / "scripts" / "setup.py").read_text()
    for name, version in (("OLDEST_PYTHON", oldest), ("NEWEST_PYTHON", newest)):
        assert f"\n{name} = ({version.replace('.', ', ')})\n" in setup, name
    makefile = (ROOT / "Makefile").read_text()
    assert f"({oldest.replace('.', ', ')}) <= sys.version_info[:2] <= ({newest.replace('.', ', ')})" in makefile
    assert f"for p in python3 {' '.join(f'python{one}' for one in reversed(served))};" in makefile
    for name in ("test", "wheels"):
        found = re.findall(r"^ +python: (\[.*\])$", (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(), re.M)
        assert found == [f'["{oldest}", "{newest}"]'], name
    for place in ("README.md", "CONTRIBUTING.md", "Makefile", "scripts/setup.py"):
        ranges = set(re.findall(r"Python (3\.\d+ (?:to 3\.\d+|or later|on))", (ROOT / place).read_text()))
        assert ranges == {f"{oldest} to {newest}"}, place


def test_every_wheel_that_is_built_is_used() -> None:
    text = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    build, use = re.search(r"^  build:$.*?(?=^  \w+:$)", text, re.M | re.S), re.search(r"^  use:$.*", text, re.M | re.S)
    assert build and use
    built, used = (re.findall(r"- \{ name: ([\w-]+),", part.group()) for part in (build, use))
    assert built == used and f"name: [{', '.join(built)}]" in use.group()


def test_what_miri_leaves_out_is_there() -> None:
    """A test that goes to another crate is left out where it was."""
    commands = re.findall(
        r"-p penstock-(\w+) (--lib|--test all) --([^#]*?)(?=\n +env:)",
        (ROOT / ".github" / "workflows" / "model.yml").read_text(),
    )
    skipped = [
        (crate, "src" if kind == "--lib" else "tests", name)
        for crate, kind, words in commands
        for name in re.findall(r"--skip (\w+)", words)
    ]
    assert ("dataflow", "src", "any_flipped") in skipped
    for crate, folder, name in skipped:
        sources = (ROOT / "rust" / crate / folder).rglob("*.rs")
        assert any(re.search(rf"fn {name}", source.read_text()) for source in sources), (crate, folder, name)


def test_the_addresses_are_those_of_the_repository() -> None:
    repository = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["repository"]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Repository"] == repository
    for name in ("Documentation", "Changelog"):
        kind, branch, *path = urls[name].removeprefix(f"{repository}/").split("/")
        assert kind in ("tree", "blob") and branch == "main" and ROOT.joinpath(*path).exists(), name


def test_what_is_published_names_no_path_of_a_machine() -> None:
    """A compiler's complaint about a peer stood in results with the folder of the checkout."""
    published = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.*"), *(ROOT / "benches" / "results").rglob("*.*")]
    assert len(published) > 20
    for path in published:
        found = re.search(rb"(?<![\w.])/(work|root|home|Users)/[\w./-]*", path.read_bytes())
        assert found is None, f"{path.relative_to(ROOT)}: {found.group().decode()}"
