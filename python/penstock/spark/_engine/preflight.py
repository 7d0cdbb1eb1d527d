"""A look at the executors that are there before anything depends on them.

Owns: a tiny job whose function travels by value, so that it runs where penstock is missing, and the table of what
is wrong with what to do about it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import EngineError

__all__ = ["Finding", "examine", "judge", "probe", "table"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong on one executor, and how to mend it."""

    executor: str
    what: str
    fix: str


def probe(registry: str) -> Callable[[Any], Any]:
    """Make the function that a task of the job runs; `registry` is the address that it must reach.

    The function stands alone: it is pickled by value and imports nothing that may be missing.
    """

    def look(numbers: Any) -> Any:
        import os
        import platform
        import socket
        import time

        for _ in numbers:
            pass
        found: dict[str, Any] = {"host": socket.gethostname(), "python": platform.python_version()}
        try:
            with open(f"/proc/{os.getppid()}/stat") as file:
                found["jvm"] = file.read().rpartition(")")[2].split()[1]
        except OSError:
            found["jvm"] = str(os.getppid())
        try:
            import pyarrow

            found["pyarrow"] = pyarrow.__version__
        except Exception as error:
            found["pyarrow_error"] = repr(error)
        try:
            from penstock import _native

            found["penstock"] = _native.version()
        except Exception as error:
            found["penstock_error"] = repr(error)
        host, _, port = registry.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5).close()
        except OSError as error:
            found["registry_error"] = str(error)
        # So that another executor takes the next task.
        time.sleep(0.1)
        return iter([found])

    return look


def examine(found: Mapping[str, Any], here: Mapping[str, str], registry: str) -> list[Finding]:
    """What is wrong on one executor, by what its task saw.

    Examples
    --------
    >>> here = {"penstock": "0.1.0", "python": "3.11.2", "pyarrow": "21.0.0"}
    >>> [f.what for f in examine({**here, "penstock": "0.0.9", "host": "a", "jvm": "7"}, here, "driver:1")]
    ['penstock 0.0.9, the driver has 0.1.0']
    """
    executor = f"{found.get('host', '?')} (JVM {found.get('jvm', '?')})"
    result = []

    def add(what: str, fix: str) -> None:
        result.append(Finding(executor, what, fix))

    ship = (
        "in local mode set PYSPARK_PYTHON to the driver's interpreter (penstock.spark.ensure_java() does, where you"
        " have set none); else put it into the image, or ship a packed environment (venv-pack, --archives): --py-files"
        " cannot carry it"
    )
    if "penstock_error" in found:
        add(f"penstock cannot be imported: {found['penstock_error']}", ship)
    elif found.get("penstock") != here["penstock"]:
        add(f"penstock {found.get('penstock')}, the driver has {here['penstock']}", "install one version everywhere")
    if "pyarrow_error" in found:
        add(f"pyarrow cannot be imported: {found['pyarrow_error']}", ship)
    elif _major(found.get("pyarrow", "")) != _major(here["pyarrow"]):
        add(f"pyarrow {found.get('pyarrow')}, the driver has {here['pyarrow']}", "install one major version everywhere")
    if found.get("python", "").split(".")[:2] != here["python"].split(".")[:2]:
        add(f"Python {found.get('python')}, the driver has {here['python']}", "set PYSPARK_PYTHON to the same version")
    if "registry_error" in found:
        add(
            f"cannot reach the driver at {registry}: {found['registry_error']}",
            "open that port (Engine(registry_port=...)) and set spark.driver.host to an address that executors reach",
        )
    return result


def versions() -> dict[str, str]:
    """The driver's own versions."""
    import pyarrow as pa

    from penstock import _native

    return {"penstock": _native.version(), "python": platform.python_version(), "pyarrow": pa.__version__}


def judge(found: Sequence[Mapping[str, Any]], registry: str) -> None:
    """Refuse executors that cannot serve.

    Raises
    ------
    EngineError
        With one table of everything that is wrong.
    """
    here = versions()
    findings: list[Finding] = []
    for entry in found:
        findings += [finding for finding in examine(entry, here, registry) if finding not in findings]
    if findings:
        raise EngineError(f"executors cannot serve this engine\n{table(findings)}", findings=findings)


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, one line each.

    Examples
    --------
    >>> print(table([Finding("a (JVM 7)", "no penstock", "install it")]))
    executor   what         fix
    a (JVM 7)  no penstock  install it
    """
    rows = [("executor", "what", "fix"), *((f.executor, f.what, f.fix) for f in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows)


def _major(version: str) -> str:
    return version.partition(".")[0]
