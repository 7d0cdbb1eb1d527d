"""The core's benches: the program ``penstock-bench`` of this checkout.

Owns: finding the program, building it where it is missing or older than its sources, and running it. Invariant: the
program never outlives the call that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.cli.common import interrupt_later
from penstock.errors import ConfigError, EngineError
from penstock_bench.measure import Emit, Options, Tell

__all__ = ["CHECKOUT", "ask", "profile", "program", "run", "side"]

#: The checkout that this package lies in.
CHECKOUT = Path(__file__).resolve().parents[3]
#: Variable of the environment: another profile of Cargo.toml to build the program with. Its results name it.
PROFILE = "PENSTOCK_BENCH_PROFILE"

NAME = "penstock-bench.exe" if os.name == "nt" else "penstock-bench"


def profile() -> str:
    """The profile that the program is built with."""
    return os.environ.get(PROFILE) or "release"


def program(tell: Tell) -> Path:
    """Return the program, built where that is needed.

    Raises
    ------
    ConfigError
        When the program must be built and there is no cargo.
    EngineError
        When it does not build.
    """
    # One that is relative is so to where cargo runs.
    target = CHECKOUT / (os.environ.get("CARGO_TARGET_DIR") or "target")
    built = target / ("debug" if profile() == "dev" else profile()) / NAME
    if built.is_file() and built.stat().st_mtime >= max(map(_modified, _sources())):
        return built
    cargo = shutil.which("cargo") or shutil.which(str(Path.home() / ".cargo" / "bin" / "cargo"))
    if cargo is None:
        raise ConfigError(
            f"{built} is missing or out of date and cargo is not on PATH; get Rust from https://rustup.rs"
        )
    tell(f"building {built}: the first time about ten minutes on two cores, later only what has changed")
    command = [cargo, "build", "--profile", profile(), "--locked", "-p", "penstock-benches", "--bin", "penstock-bench"]
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
    _lines(command, emit, dict(os.environ) | dict(environment or {}))


def ask(mode: str, told: Mapping[str, Any], emit: Emit, tell: Tell) -> None:
    """Run the program in a mode that is told in one line of JSON what to measure, and hand on its lines as they come.

    Raises
    ------
    ConfigError, EngineError
        As for `run`.
    """
    _lines([str(program(tell)), mode], emit, dict(os.environ), f"{json.dumps(told)}\n")


@contextlib.contextmanager
def side(command: list[str], told: dict[str, Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Start a process that a line of JSON tells what to run; gives a function that has it run once and answer.

    Raises
    ------
    EngineError
        When it ends before it has answered.
    """
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    sink, source = child.stdin, child.stdout

    def ask(line: str) -> dict[str, Any]:
        # One that has ended does not read; why is said below.
        with contextlib.suppress(BrokenPipeError):
            sink.write(f"{line}\n")
            sink.flush()
        answer = source.readline()
        if not answer:
            raise EngineError(f"{' '.join(command)} ended with exit status {child.wait()}")
        return dict(json.loads(answer))

    try:
        sink.write(f"{json.dumps(told)}\n")
        yield lambda: ask("run")
    finally:
        with contextlib.suppress(BrokenPipeError):
            sink.close()
        source.close()
        try:
            child.wait(10)
        except BaseException:
            child.kill()
            child.wait()
            raise


def _lines(command: list[str], emit: Emit, environment: Mapping[str, str], told: str | None = None) -> None:
    source = None if told is None else subprocess.PIPE
    child = None
    try:
        with interrupt_later():  # or it would be started and known to nobody
            child = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, text=True, env=environment)
        assert child.stdout is not None
        if child.stdin is not None and told is not None:
            with contextlib.suppress(BrokenPipeError), child.stdin as sink:
                sink.write(told)
        for text in child.stdout:
            emit(json.loads(text))
    except BaseException:
        if child is not None:
            _end(child)
        raise
    finally:
        if child is not None and child.stdout is not None:
            child.stdout.close()
    if (status := _wait(child)) != 0:
        raise EngineError(f"{' '.join(command[:2])} failed with exit status {status}")


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
