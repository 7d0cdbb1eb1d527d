"""Set up the working environment: ``.venv`` with the pinned packages and the built package.

Usage: ``python scripts/setup.py`` (or ``make setup``). Needs Python 3.11 or later, Rust and a C
linker; everything else comes from the package registries. Four steps, each skipped when what it
depends on has not changed since it last succeeded:

1. the virtual environment            depends on the Python that runs this file
2. the packages of requirements/      depends on that file's content
3. the native module, release build   depends on the Rust sources, manifests and compiler
4. the core's benches, release build  depends on the same, and on those of the benches

A step leaves a stamp in ``.venv/.setup`` that holds a digest of what it depends on, so an
interrupted step is simply done again. Only the standard library is used here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMPS = VENV / ".setup"
REQUIREMENTS = ROOT / "requirements" / "dev.txt"
OLDEST_PYTHON = (3, 11)


def main() -> int:
    started = time.monotonic()
    if sys.version_info < OLDEST_PYTHON:
        fail(
            f"Python {sys.version.split()[0]} runs this; the pinned development packages need "
            f"{dotted(OLDEST_PYTHON)} or later.",
            "Name another one: make setup PYTHON=python3.12",
        )
    rust = find_rust()
    find_linker()
    lock = only_one()
    done = [
        step(
            "1/4 virtual environment .venv",
            "venv",
            f"{sys.version_info[:2]}",
            venv_works,
            make_venv,
        ),
        step(
            "2/4 pinned packages (the first time about 500 MB and some minutes, most of it Spark)",
            "packages",
            digest([REQUIREMENTS]),
            lambda: PYTHON.exists(),
            install_packages,
        ),
        step(
            "3/4 penstock's native module, release build (the first time some minutes)",
            "native",
            digest(native_sources(), salt=rust),
            native_present,
            build_native,
        ),
        step(
            "4/4 the program penstock-bench, release build (a minute)",
            "benches",
            digest(bench_sources(), salt=rust),
            lambda: bench_program().exists(),
            build_benches,
        ),
    ]
    if any(done):
        run([str(BIN / "penstock"), "--help"], "start .venv/bin/penstock", quiet=True)
        say(f"ready in {time.monotonic() - started:.0f} s: .venv/bin/penstock")
    else:
        say(f"up to date ({time.monotonic() - started:.1f} s): .venv/bin/penstock")
    os.close(lock)
    return 0


def step(title: str, name: str, wanted: str, intact: Callable[[], bool], make: Callable[[], None]) -> bool:
    """Do a step unless its stamp says that it is done and its result is still there."""
    stamp = STAMPS / name
    if stamp.exists() and stamp.read_text() == wanted and intact():
        return False
    say(title)
    started = time.monotonic()
    stamp.unlink(missing_ok=True)
    make()
    STAMPS.mkdir(parents=True, exist_ok=True)
    stamp.write_text(wanted)
    say(f"    done in {time.monotonic() - started:.0f} s")
    return True


# -- step 1 ---------------------------------------------------------------------------------------


def venv_works() -> bool:
    """The environment's Python starts, is of this version, and has pip."""
    probe = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    try:
        return subprocess.run([PYTHON, "-c", probe], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make_venv() -> None:
    if venv_works():
        return
    say(f"    from {sys.executable} (Python {sys.version.split()[0]})")
    first = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if first.returncode == 0:
        return
    # Debian ships Python without ensurepip; an existing pip can fill an environment that has none.
    bare = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)]
    pip = [sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "--quiet", "pip"]
    for command in (bare, pip):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            fail(
                "this Python cannot make a virtual environment:",
                (first.stdout + first.stderr).strip(),
                "On Debian or Ubuntu: apt-get install python3-venv",
            )


# -- step 2 ---------------------------------------------------------------------------------------


def install_packages() -> None:
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install"]
    run(
        [*pip, "--quiet", "--progress-bar", "off", "-r", str(REQUIREMENTS)],
        "install the pinned packages",
    )


# -- step 3 ---------------------------------------------------------------------------------------


def native_sources() -> Iterable[Path]:
    yield from (ROOT / "Cargo.toml", ROOT / "Cargo.lock", ROOT / "pyproject.toml", REQUIREMENTS)
    for path in (ROOT / "rust").rglob("*"):
        if path.suffix == ".rs" or path.name == "Cargo.toml":
            yield path


def native_present() -> bool:
    built = any(path.suffix in (".so", ".pyd") for path in (ROOT / "python" / "penstock").glob("_native.*"))
    return built and any((BIN / name).exists() for name in ("penstock", "penstock.exe"))


def build_native() -> None:
    environment = dict(os.environ) | {"VIRTUAL_ENV": str(VENV), "PYO3_PYTHON": str(PYTHON)}
    environment.pop("CONDA_PREFIX", None)
    environment["PIP_QUIET"] = environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    run(
        [str(PYTHON), "-m", "maturin", "develop", "--release", "--locked"],
        "build the native module",
        env=environment,
    )


# -- step 4 ---------------------------------------------------------------------------------------


def bench_sources() -> Iterable[Path]:
    yield from (ROOT / "Cargo.toml", ROOT / "Cargo.lock")
    for folder in ("rust", "benches/rust"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".rs" or path.name == "Cargo.toml":
                yield path


def bench_program() -> Path:
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    return target / "release" / ("penstock-bench.exe" if os.name == "nt" else "penstock-bench")


def build_benches() -> None:
    # Libraries that the native module was built from serve here too, where both use the same parts of them.
    what = ["-p", "penstock-benches", "--bin", "penstock-bench"]
    environment = dict(os.environ) | {"PYO3_PYTHON": str(PYTHON)}
    run(["cargo", "build", "--quiet", "--release", "--locked", *what], "build penstock-bench", env=environment)
    bench_program().touch()  # `penstock bench` builds it again where a source is newer


# -- what has to be there -------------------------------------------------------------------------


def find_rust() -> str:
    """The compiler's version line; adds rustup's directory to PATH when only that has it."""
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo") / "bin"
    if shutil.which("cargo") is None and (home / "cargo").exists():
        os.environ["PATH"] = f"{home}{os.pathsep}{os.environ['PATH']}"
    manifest = (ROOT / "Cargo.toml").read_text()
    oldest = re.search(r'^rust-version = "(\d+)\.(\d+)', manifest, re.MULTILINE)
    assert oldest, "Cargo.toml names the oldest Rust"
    wanted = (int(oldest.group(1)), int(oldest.group(2)))
    how = "Get it from https://rustup.rs, or your system's packages, then run this again."
    if shutil.which("cargo") is None or shutil.which("rustc") is None:
        fail(f"no Rust toolchain: cargo and rustc ({dotted(wanted)} or later) are not on PATH.", how)
    answer = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"rustc (\d+)\.(\d+)", answer.stdout)
    if version is None:
        fail("rustc does not tell its version:", (answer.stdout + answer.stderr).strip(), how)
    if (int(version.group(1)), int(version.group(2))) < wanted:
        fail(f"{answer.stdout.strip()} is too old, {dotted(wanted)} or later is needed.", "rustup update")
    return answer.stdout.strip()


def find_linker() -> None:
    if os.name != "nt" and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        fail(
            "no C linker (cc, gcc or clang), which Rust needs.",
            "On Debian or Ubuntu: apt-get install gcc libc6-dev. On macOS: xcode-select --install",
        )


# -- helpers --------------------------------------------------------------------------------------


def only_one() -> int:
    """Wait until no other set-up of this checkout runs; the lock ends when the returned descriptor is closed."""
    (ROOT / "target").mkdir(exist_ok=True)
    lock = os.open(ROOT / "target" / ".setup.lock", os.O_RDWR | os.O_CREAT, 0o644)
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another set-up of this checkout")
            fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def digest(paths: Iterable[Path], salt: str = "") -> str:
    total = hashlib.sha256(salt.encode())
    for path in sorted(paths):
        total.update(f"{path.relative_to(ROOT)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def run(command: list[str], purpose: str, *, env: dict[str, str] | None = None, quiet: bool = False) -> None:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=quiet, text=True, check=False)
    if done.returncode != 0:
        fail(
            f"could not {purpose} (exit status {done.returncode}): {' '.join(command)}",
            *([(done.stdout + done.stderr).strip()] if quiet else []),
        )


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def fail(*lines: str) -> NoReturn:
    for line in lines:
        print(f"setup: {line}", file=sys.stderr, flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        fail("interrupted; run it again to go on where it stopped")
