"""Set up the working environment: ``.venv`` with the pinned packages and the built package.

Usage: ``python scripts/setup.py`` (or ``make setup``). Needs Python 3.11 to 3.14, Rust and a C
linker; everything else comes from the package registries. Three steps, each skipped when what it
depends on has not changed since it last succeeded:

1. the virtual environment        depends on the Python that runs this file
2. the packages of requirements/  depends on that file's content; by uv, by pip where uv cannot be had
3. the native module              depends on the Rust sources, manifests, compiler and profile

The packages are fetched while the native module is compiled: one waits for the network and for one
core, the other rarely has work for all cores. Of the packages only maturin has to be there before.
A step leaves a stamp in ``.venv/.setup`` that holds a digest of what it depends on, so an
interrupted step is simply done again. Only the standard library is used here.

The native module is built with the profile ``setup`` of Cargo.toml, which takes a fraction of the
time of a release build and is close to it where it counts. ``--profile release`` builds that one,
which is what `make bench` measures. Without a profile a release build stays as long as it is up to
date.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMPS = VENV / ".setup"
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--progress-bar", "off"]
REQUIREMENTS = ROOT / "requirements" / "dev.txt"
UV = "uv==0.13.9"
STEPS = 3
#: What the pinned packages have wheels for: behind the newest numpy and pandas would be compiled, or fail to be.
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 14)
PROGRESS_SECONDS = 10.0


def main() -> int:
    started = time.monotonic()
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        fail(
            f"Python {sys.version.split()[0]} runs this; the pinned development packages need "
            f"{dotted(OLDEST_PYTHON)} to {dotted(NEWEST_PYTHON)}.",
            "Name another one: make setup PYTHON=python3.12",
        )
    asked = arguments().profile
    rust = find_rust()
    find_linker()
    lock = only_one()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sources = digest(native_sources(), salt=rust)
    profile = asked or usual_profile(sources)
    native = f"{profile} {sources}"
    venv = Step(1, "virtual environment .venv", "venv", f"{sys.version_info[:2]}", venv_works, make_venv)
    pinned = digest([REQUIREMENTS])
    packages = Step(2, "pinned packages, 500 MB, most of it Spark", "packages", pinned, PYTHON.exists, install_packages)
    module = Step(3, f"native module, profile {profile}", "native", native, native_present, lambda: maturin(profile))
    done = [venv.run()]
    if packages.due() and module.due():
        with Beside(packages.run):
            compile_native(profile)
    done += [packages.run(), module.run()]
    if any(done):
        run([str(BIN / "penstock"), "--help"], "start .venv/bin/penstock", quiet=True)
        say(f"ready in {time.monotonic() - started:.0f} s: .venv/bin/penstock")
    else:
        say(f"up to date ({time.monotonic() - started:.1f} s): .venv/bin/penstock")
    os.close(lock)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Set up .venv with the pinned packages and the built package.")
    parser.add_argument(
        "--profile",
        choices=("setup", "release"),
        help="how the native module is built (default: setup, or release where that one is there and up to date)",
    )
    return parser.parse_args()


class Step(NamedTuple):
    """One part of the set-up: done unless its stamp says so and its result is still there."""

    number: int
    title: str
    name: str
    wanted: str  # what the stamp says when it is done
    intact: Callable[[], bool]
    make: Callable[[], None]

    def due(self) -> bool:
        stamp = STAMPS / self.name
        return not (stamp.exists() and stamp.read_text() == self.wanted and self.intact())

    def run(self) -> bool:
        """Whether there was anything to do."""
        if not self.due():
            return False
        stamp = STAMPS / self.name
        say(f"{self.number}/{STEPS} {self.title}")
        started = time.monotonic()
        stamp.unlink(missing_ok=True)
        self.make()
        STAMPS.mkdir(parents=True, exist_ok=True)
        stamp.write_text(self.wanted)
        say(f"    {self.number}/{STEPS} done in {time.monotonic() - started:.0f} s")
        return True


# -- step 1 ---------------------------------------------------------------------------------------


def belongs_here() -> bool:
    """What is installed is this checkout's: in one that was copied or moved it is that of where it came from."""
    links = VENV.glob("lib/python*/site-packages/penstock.pth")
    return all(Path(link.read_text(encoding="utf-8").strip()) == ROOT / "python" for link in links)


def venv_works() -> bool:
    """The environment is of this checkout; its Python starts, is of this version, and has pip."""
    if not belongs_here():
        return False
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
    """With uv, which downloads and unpacks side by side; pip does the same, only slower."""
    uv = [str(BIN / "uv"), "pip", "install", "--python", str(PYTHON), "-r", str(REQUIREMENTS)]
    if pip(UV):
        watched(uv, "install the pinned packages", dict(os.environ), beside=True)
    else:
        say(f"    without {UV}, which could not be installed: pip takes some minutes")
        watched([*PIP, "-r", str(REQUIREMENTS)], "install the pinned packages", dict(os.environ), beside=True)


def pip(*pinned: str) -> bool:
    """Whether pip could install these few."""
    return subprocess.run([*PIP, *pinned], capture_output=True, check=False).returncode == 0


# -- step 3 ---------------------------------------------------------------------------------------


def native_sources() -> Iterable[Path]:
    yield from (ROOT / "Cargo.toml", ROOT / "Cargo.lock", ROOT / "pyproject.toml", REQUIREMENTS)
    for path in (ROOT / "rust").rglob("*"):
        if path.suffix == ".rs" or path.name == "Cargo.toml":
            yield path


def usual_profile(sources: str) -> str:
    """The profile when none is asked for: a release build of these sources is as good as any, and took minutes."""
    stamp = STAMPS / "native"
    return "release" if stamp.exists() and stamp.read_text() == f"release {sources}" else "setup"


def native_present() -> bool:
    built = any(path.suffix in (".so", ".pyd") for path in (ROOT / "python" / "penstock").glob("_native.*"))
    return built and any((BIN / name).exists() for name in ("penstock", "penstock.exe"))


def compile_native(profile: str) -> None:
    """The longest part of the step, which needs no package but maturin; where that cannot be had, the step says why."""
    pinned = re.search(r"^maturin==\S+", REQUIREMENTS.read_text(), re.MULTILINE)
    if pinned and pip(pinned.group()):
        say(f"3/{STEPS} beside it: native module, profile {profile}")
        maturin(profile, "--skip-install")


def maturin(profile: str, *options: str) -> None:
    environment = dict(os.environ) | {"VIRTUAL_ENV": str(VENV), "PYO3_PYTHON": str(PYTHON)}
    environment.pop("CONDA_PREFIX", None)
    environment["PIP_QUIET"] = environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    command = [str(PYTHON), "-m", "maturin", "develop", "--profile", profile, "--locked", *options]
    watched(command, "build the native module", environment)


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
    try:
        (ROOT / "target").mkdir(exist_ok=True)
        lock = os.open(ROOT / "target" / ".setup.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        fail(
            f"this checkout cannot be written: {error.strerror}: {error.filename}",
            "Everything is built in .venv and target of the checkout: use a copy that is yours, on a disk with space.",
        )
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


def watched(command: list[str], purpose: str, environment: dict[str, str], beside: bool = False) -> None:
    """Run what takes long. A terminal shows its own progress; elsewhere, and of what runs beside something else, a line
    every few seconds says what it does and what is left.
    """
    terminal = sys.stderr.isatty() and not beside
    if not terminal:
        environment |= {"CARGO_TERM_PROGRESS_WHEN": "always", "CARGO_TERM_PROGRESS_WIDTH": "120"}
    output = None if terminal else subprocess.PIPE
    with Child(command, env=environment, stdout=output, stderr=None if terminal else subprocess.STDOUT) as child:
        progress = Progress(purpose)
        reader = threading.Thread(target=progress.read, args=(child,), daemon=True)
        if not terminal:
            reader.start()
        while child.poll() is None:
            try:
                child.wait(PROGRESS_SECONDS)
            except subprocess.TimeoutExpired:
                if not terminal:
                    progress.tell()
        if not terminal:
            reader.join()
    if child.stopped:
        raise SystemExit(1)  # for a reason that was told
    if child.returncode != 0:
        fail(f"could not {purpose} (exit status {child.returncode}): {' '.join(command)}", *progress.spoken[-200:])


class Child(subprocess.Popen):  # type: ignore[type-arg]  # Popen[bytes] stops Python 3.8 before it is told
    """A command in a process group of its own, which goes with it: what it started ends, too, when it is stopped."""

    running: ClassVar[set[Child]] = set()
    ending: ClassVar[bool] = False

    def __init__(self, command: list[str], **options: Any) -> None:
        if Child.ending:
            raise SystemExit(1)  # for a reason that was told
        if os.name != "nt":
            options["process_group"] = 0
        self.stopped = False
        super().__init__(command, cwd=ROOT, **options)
        self.running.add(self)

    def stop(self) -> None:
        self.stopped = True
        if os.name == "nt":
            self.terminate()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    @classmethod
    def stop_all(cls) -> None:
        cls.ending = True
        for child in list(cls.running):
            child.stop()

    def __exit__(self, kind: type[BaseException] | None, *about: Any) -> None:
        if kind is not None:
            self.stop()
        self.wait()
        self.running.discard(self)
        super().__exit__(kind, *about)


class Beside:
    """Work that another thread does while the body of a `with` runs. When either fails, the other is stopped."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            self.work()
        except BaseException as failure:
            self.failure = failure
            Child.stop_all()

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                Child.stop_all()
            self.thread.join()
        except BaseException:
            Child.stop_all()
            self.thread.join()
            raise
        if self.failure is not None and kind in (None, SystemExit):
            raise self.failure


class Progress:
    """What a long command says: the state of a bar is told now and then, the rest is kept for when it fails."""

    BAR = re.compile(r"Building \[[=> ]*\] (\d+)/(\d+): (.*)")
    FETCH = re.compile(r"^ *Download(ing|ed) (\S+)(?: \((.*)\))?$")

    def __init__(self, purpose: str) -> None:
        self.started = time.monotonic()
        self.bar = purpose
        self.spoken: list[str] = []
        #: Large packages that come, with their sizes, and how many have come.
        self.coming: dict[str, str] = {}
        self.came = 0

    def read(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        pending = b""
        while piece := child.stdout.read1(65536):  # type: ignore[attr-defined]
            *lines, pending = re.split(rb"[\r\n]", pending + piece)
            for line in lines:
                self.hear(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line.decode(errors="replace")).rstrip())

    def hear(self, line: str) -> None:
        if bar := self.BAR.search(line):
            done, of, now = bar.groups()
            self.bar = f"{done} of {of} crates built, now {now}"
        elif fetch := self.FETCH.match(line):
            what, name, size = fetch.groups()
            if what == "ing":
                self.coming[name] = size or "of unknown size"
            elif self.coming.pop(name, None):
                self.came += 1
            left = ", ".join(f"{one} ({size})" for one, size in self.coming.items())
            self.bar = f"{self.came} of {self.came + len(self.coming)} large packages fetched, left {left or 'none'}"
        elif line.startswith("Prepared "):
            self.bar = "all packages fetched, now installed"
        elif line:
            self.spoken.append(line)

    def tell(self) -> None:
        seconds = time.monotonic() - self.started
        say(f"    {seconds:3.0f} s  {self.bar}")


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
