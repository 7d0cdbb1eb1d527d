"""Write THIRD-PARTY-NOTICES: the licences of the crates that are linked into the native module. Its wheel carries it.

Of those that offer several Apache-2.0 is taken, whose text is in LICENSE; what they say in a NOTICE stands here.

Usage: ``python scripts/notices.py [--check]``. With ``--check`` nothing is written, and the exit status is 1 where the
page is not that of Cargo.lock. Needs cargo. Crates that only run while others are built (procedural macros, build
scripts) are in no wheel and on no page.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "THIRD-PARTY-NOTICES"
#: Those that wheels are made for.
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "x86_64-apple-darwin", "aarch64-apple-darwin")
TEXTS = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
TAKEN = "Apache-2.0"
RULE = "=" * 100


def linked() -> list[dict[str, str]]:
    """Name, version, licence and manifest of each crate that is linked into the module on some platform."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for platform in PLATFORMS:
        command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", platform]
        told = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        packages = {package["id"]: package for package in told["packages"]}
        nodes = {node["id"]: node for node in told["resolve"]["nodes"]}
        (root,) = (package["id"] for package in told["packages"] if package["name"] == "penstock-native")
        seen, waiting = {root}, [root]
        while waiting:
            for needed in nodes[waiting.pop()]["deps"]:
                package = packages[needed["pkg"]]
                runs = any(kind["kind"] is None for kind in needed["dep_kinds"])
                macro = any("proc-macro" in target["kind"] for target in package["targets"])
                if runs and not macro and package["id"] not in seen:
                    seen.add(package["id"])
                    waiting.append(package["id"])
        for package in map(packages.__getitem__, seen):
            if package["source"] is not None:  # ours have none
                found[package["name"], package["version"]] = package
    return [found[key] for key in sorted(found)]


def page() -> str:
    """The page: which crates, and then each text once, behind the names of those that it is of."""
    crates = linked()
    owners: dict[str, list[str]] = defaultdict(list)
    for crate in crates:
        name = f"{crate['name']} {crate['version']}"
        folder = Path(crate["manifest_path"]).parent
        texts = sorted(path for path in folder.iterdir() if path.is_file() and TEXTS.match(path.name))
        if TAKEN in re.split(r"\s+OR\s+|/", crate["license"]):
            texts = [path for path in texts if path.name.upper().startswith("NOTICE")]
        elif not texts:
            raise SystemExit(f"{name} has no text of its licence, {crate['license']}: add it here by hand")
        for path in texts:
            text = "\n".join(line.rstrip() for line in path.read_text("utf-8", "replace").strip().splitlines())
            if text and name not in owners[text]:
                owners[text].append(name)
    lines = [
        "The native module of penstock is linked from these crates of crates.io, each under its own licence.",
        f"Of those that offer several {TAKEN} is taken, whose text is in LICENSE.",
        "Made by scripts/notices.py from Cargo.lock; not edited by hand.",
        "",
        *(f"{crate['name']} {crate['version']}: {crate['license']}" for crate in crates),
    ]
    for text, names in sorted(owners.items(), key=lambda item: item[1]):
        lines += ["", RULE, f"Of {', '.join(names)}:", "", text]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    made = page()
    if arguments == ["--check"]:
        if not PAGE.exists() or PAGE.read_text("utf-8") != made:
            print(f"{PAGE.name} is not that of Cargo.lock: run python scripts/notices.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(made, "utf-8")
    print(f"{PAGE.name}: {len(made) / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
