"""The core's benches: the program ``penstock-bench`` of this checkout.

Owns: finding the program, building it where it is missing or older than its sources, and running it. Invariant: the
program never outlives the call that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError, EngineError
from penstock_bench.measure import Emit, Options, Tell

__all__ = ["CHECKOUT", "program", "run"]

#: The checkout that this package lies in.
CHECKOUT = Path(__file__).resolve().parents[3]
#: Variable of the environment: another profile of Cargo.toml to build the program with. Its results name it.
PROFILE = "PENSTOCK_BENCH_PROFILE"

NAME = "penstock-bench.exe" if os.name == "nt" else "penstock-bench"


def program(tell: Tell) -> Path:
    """Return the program, built where that is needed.

    Raises
    ------
    ConfigError
        When the program must be built and there is no cargo.
    EngineError
        When it does not build.
    """
    target = Path(os.environ.get("CARGO_TARGET_DIR") or CHECKOUT / "target")
    profile = os.environ.get(PROFILE) or "release"
    built = target / profile / NAME
    if built.is_file() and built.stat().st_mtime >= max(map(_modified, _sources())):
        return built
    cargo = shutil.which("cargo") or shutil.which(str(Path.home() / ".cargo" / "bin" / "cargo"))
    if cargo is None:
        raise ConfigError(
            f"{built} is missing or out of date and cargo is not on PATH; get Rust from https://rustup.rs"
        )
    tell(f"building {built}: the first time about ten minutes on two cores, later only what has changed")
    command = [cargo, "build", "--profile", profile, "--locked", "-p", "penstock-benches", "--bin", "penstock-bench"]
    environment = dict(os.environ) | {"CARGO_TARGET_DIR": str(target)}
    # Our output is for results, and cargo speaks on standard error.
    child = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=subprocess.DEVNULL)
    if (status := _wait(child)) != 0:
        raise EngineError(f"penstock-bench did not build (exit status {status}): {' '.join(command)} in {CHECKOUT}")
    built.touch()  # cargo leaves the time when only a comment has changed
    return built


def run(name: str, options: Options, emit: Emit, tell: Tell, environment: Mapping[str, str] | None = None) -> None:
    """Run one bench of the core, with more in its environment, and hand on its lines as they come.

    Raises
    ------
    ConfigError, EngineError
        As for `program`, or when the bench fails.
    """
    command = [str(program(tell)), name]
    if options.quick:
        command.append("--quick")
    if options.seconds is not None:
        command += ["--seconds", repr(options.seconds)]
    given = dict(os.environ) | dict(environment or {})
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=given)
    try:
        assert child.stdout is not None
        for text in child.stdout:
            emit(json.loads(text))
    except BaseException:
        _end(child)
        raise
    finally:
        if child.stdout is not None:
            child.stdout.close()
    if (status := _wait(child)) != 0:
        raise EngineError(f"penstock-bench {name} failed with exit status {status}")


def _wait(child: subprocess.Popen[str] | subprocess.Popen[bytes]) -> int:
    try:
        return child.wait()
    except BaseException:
        _end(child)
        raise


def _end(child: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _sources() -> list[Path]:
    """What the program is made of."""
    found = [CHECKOUT / "Cargo.toml", CHECKOUT / "Cargo.lock"]
    for folder in (CHECKOUT / "rust", CHECKOUT / "benches" / "rust"):
        found += [path for path in folder.rglob("*") if path.suffix == ".rs" or path.name == "Cargo.toml"]
    return found


def _modified(path: Path) -> float:
    return path.stat().st_mtime
