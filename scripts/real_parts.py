"""Get what `make test-real` runs against: a Kafka broker, Spark of the release that has the connectors, and their jars.

Usage: ``.venv/bin/python scripts/real_parts.py`` (after `make setup`). Everything comes from PyPI and Maven Central, in
pinned versions, and goes below ``target/real``: ``env`` (a virtual environment of requirements/real.txt that sees the
package of this checkout), ``broker`` and ``spark-4.0`` (jars, each with its checksum in tests/real/parts). What is
there already is left alone. PostgreSQL is Debian's package, which this does not install: tests that want it say so.

``--lock`` writes the checksums of what Maven gives instead of comparing them, after a version was changed.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PARTS = ROOT / "tests" / "real" / "parts"
REQUIREMENTS = ROOT / "requirements" / "real.txt"
TARGET = ROOT / "target" / "real"

#: Seconds that one download may take.
PATIENCE = 900


def main() -> int:
    parser = argparse.ArgumentParser(description="Get what `make test-real` runs against.")
    parser.add_argument("--lock", action="store_true", help="write checksums instead of comparing them")
    lock = parser.parse_args().lock
    environment()
    for pom in sorted(PARTS.glob("*.xml")):
        jars(pom, lock)
    return 0


def environment() -> None:
    """``target/real/env``: the packages of requirements/real.txt, and the package of this checkout by a path file."""
    env, stamp = TARGET / "env", TARGET / "env" / ".requirements"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"{env.relative_to(ROOT)}: the packages of {REQUIREMENTS.relative_to(ROOT)}, 500 MB, most of it Spark")
    uv, python = ROOT / ".venv" / "bin" / "uv", str(env / "bin" / "python")
    if uv.exists():
        run([str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(env)])
        run([str(uv), "pip", "install", "--quiet", "--python", python, "-r", str(REQUIREMENTS)])
    else:
        say("    without uv, which make setup could not install: pip takes some minutes")
        run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(env)])
        run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-r", str(REQUIREMENTS)])
    [packages] = env.glob("lib/python*/site-packages")
    (packages / "penstock-checkout.pth").write_text(f"{ROOT / 'python'}\n")
    stamp.write_text(wanted)


def jars(pom: Path, lock: bool) -> None:
    """``target/real/<name of the pom>``: the jars that it names, each of which must have its checksum."""
    folder, sums = TARGET / pom.stem, pom.with_suffix(".sha256")
    if lock or found(folder) != sums.read_text():
        if shutil.which("mvn") is None:
            fail("no mvn on PATH, which gets jars from Maven Central. On Debian or Ubuntu: apt-get install maven")
        say(f"{folder.relative_to(ROOT)}: the jars of {pom.relative_to(ROOT)}")
        shutil.rmtree(folder, ignore_errors=True)
        copy = ["dependency:copy-dependencies", f"-DoutputDirectory={folder}", "-DincludeScope=runtime"]
        run(["mvn", "--quiet", "--batch-mode", "--file", str(pom), *copy])
    if lock:
        sums.write_text(found(folder))
    here, wanted = set(found(folder).splitlines()), set(sums.read_text().splitlines())
    if here != wanted:
        shutil.rmtree(folder)
        fail(
            f"what came for {pom.relative_to(ROOT)} is not what {sums.name} says (after a change of versions: --lock):",
            *(f"  came    {line}" for line in sorted(here - wanted)),
            *(f"  missing {line}" for line in sorted(wanted - here)),
        )


def found(folder: Path) -> str:
    """As sha256sum writes it."""
    lines = [f"{hashlib.sha256(jar.read_bytes()).hexdigest()}  {jar.name}\n" for jar in sorted(folder.glob("*.jar"))]
    return "".join(lines)


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        fail(f"it took more than {PATIENCE} s: {' '.join(command)}")
    if done.returncode != 0:
        fail(f"exit status {done.returncode}: {' '.join(command)}", (done.stdout + done.stderr).strip())


def say(line: str) -> None:
    print(f"real parts: {line}", flush=True)


def fail(*lines: str) -> NoReturn:
    for line in lines:
        print(f"real parts: {line}", file=sys.stderr, flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
