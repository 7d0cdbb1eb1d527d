"""ARCHITECTURE.md names what is there: its tree and the answers to its questions."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def tree() -> set[Path]:
    """What the tree names: a folder or file, or several with commas; two spaces deeper is inside the one above."""
    block = PAGE.partition("## Tree\n\n```\n")[2].partition("```")[0]
    above = [ROOT]
    found = set()
    for line in block.splitlines():
        depth, odd = divmod(len(line) - len(line.lstrip()), 2)
        if odd or depth > 2:
            continue  # more words on the line above
        names = [name.rstrip("/") for name in re.split(r"\s{2,}", line.strip())[0].split(", ")]
        paths = [above[depth] / name for name in names]
        above[depth + 1 :] = [paths[0]]
        found |= {path if path.exists() else path.with_suffix(".py") for path in paths}
    return found


def test_what_the_tree_names_is_there() -> None:
    assert not [path for path in tree() if not path.exists()]


def test_the_tree_names_every_crate_and_package() -> None:
    folders = [*(ROOT / "rust").iterdir(), *(ROOT / "benches").iterdir(), *(ROOT / "python" / "penstock").iterdir()]
    present = {path for path in folders if path.is_dir() and path.name != "__pycache__"}
    assert present <= tree()


def test_crates_that_skip_a_kind_of_tests_have_none_of_it() -> None:
    """Each of the two is a build of the crate, with whatever it links."""
    skips = {"test": re.compile(r"^ *#\[(cfg\(test\)|test)\]", re.M), "doctest": re.compile(r"^ *//[/!] ```", re.M)}
    found = []
    for manifest in [*ROOT.glob("rust/*/Cargo.toml"), ROOT / "benches" / "rust" / "Cargo.toml"]:
        library = manifest.read_text(encoding="utf-8").partition("[lib]\n")[2].partition("\n[")[0]
        sources = {path: path.read_text(encoding="utf-8") for path in manifest.parent.glob("src/**/*.rs")}
        for kind, written in skips.items():
            if f"{kind} = false" in library.splitlines():
                found += [f"{kind}: {path}" for path, text in sources.items() if written.search(text)]
    assert not found


def test_the_answers_name_files() -> None:
    table = PAGE.partition("## Ten questions\n")[2].partition("\n## ")[0]
    answers = re.findall(r"^\| .*\? \| `([^`]+)`", table, re.MULTILINE)
    assert len(answers) == 10
    assert not [answer for answer in answers if not (ROOT / answer).is_file()]
