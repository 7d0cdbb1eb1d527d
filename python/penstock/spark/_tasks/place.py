"""Where a Spark task runs: which executor a Python worker belongs to, and the engine's secret on its way there.

Owns: the name of an executor as its Python workers can tell it. Spark gives Python tasks no executor id, but
all Python workers of an executor are grandchildren of its JVM (JVM, daemon, worker), so host, process namespace
and process id of the JVM name it.
"""

from __future__ import annotations

import os
import socket
import subprocess
from typing import Any, NoReturn

__all__ = ["Secret", "executor_name", "process_namespace"]


class Secret:
    """Bytes that show themselves to nobody by accident: not in a repr, a message or a traceback.

    Pickles only inside a closure that Spark carries; a secret of another length is refused by who uses it.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def random(cls) -> Secret:
        """256 fresh random bits."""
        return cls(os.urandom(32))

    def reveal(self) -> bytes:
        """The bytes."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("secrets are compared by the handshake only")

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Secret, (self._value,))


def executor_name() -> str:
    """Name of the executor that this Python worker belongs to: equal for all workers of one executor.

    Returns
    -------
    str
        ``host/namespace/pid of the JVM``.
    """
    return f"{socket.gethostname()}/{process_namespace()}/{_parent(os.getppid())}"


def process_namespace() -> str:
    """Name of the process namespace: containers of one host may reuse process ids."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "-"


def _parent(pid: int) -> int:
    """Process id of a process's parent; the process itself where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name in brackets may hold anything; the fields after the last bracket are plain.
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        done = subprocess.run(
            ["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, timeout=5, check=True
        )
        return int(done.stdout.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return pid
