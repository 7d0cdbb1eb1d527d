"""Where a Spark task runs: which executor a Python worker belongs to, and the key that it carries there.

Owns: the name of an executor as its Python workers can tell it. Spark gives Python tasks no executor id, but
all Python workers of an executor are grandchildren of its JVM (JVM, daemon, worker), so host, process namespace
and process id of the JVM name it.
"""

from __future__ import annotations

import os
import socket
import subprocess
from typing import Any, NoReturn

from penstock.errors import ConfigError

__all__ = ["Key", "Secret", "executor_name", "process_namespace"]


class _Hidden:
    """Bytes that show themselves to nobody by accident: not in a repr, a message or a traceback."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """The bytes."""
        return self._value

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("secrets are compared by the handshake only")

    __hash__ = None  # type: ignore[assignment]


class Secret(_Hidden):
    """What all keys of an engine, or of a gang, are made of. Stays in the driver: it does not pickle.

    Parameters
    ----------
    value : bytes
        256 bits.
    always : bool
        Whether its keys are for connections that are encrypted also within a host.
    """

    __slots__ = ("always",)

    def __init__(self, value: bytes, always: bool = False) -> None:
        super().__init__(value)
        self.always = always

    @classmethod
    def random(cls, tls: str = "auto") -> Secret:
        """256 fresh random bits; `tls` as of an engine.

        Raises
        ------
        ConfigError
            When `tls` is neither "auto" nor "always".
        """
        if tls not in ("auto", "always"):
            raise ConfigError(f'tls={tls!r} must be "auto" (encrypt what leaves a host) or "always"')
        return cls(os.urandom(32), tls == "always")

    def claim(self) -> int:
        """The number by which its engine marks claims on checkpoints; by it its registry is known."""
        from penstock import _native

        return _native.claim_of(self.reveal())

    def member(self, slot: int) -> Key:
        """Of the resident of a slot: lets it join, and tells it whom to let in."""
        return self._key("member", str(slot))

    def feed(self, query: str, epoch: int) -> Key:
        """Of the tasks that feed an epoch of a query."""
        return self._key("feed", f"{query} {epoch}")

    def drain(self, query: str, epoch: int) -> Key:
        """Of the tasks that read what came out of an epoch."""
        return self._key("drain", f"{query} {epoch}")

    def mesh(self) -> Key:
        """Of the processes of a run that has this secret."""
        return self._key("mesh", "")

    def _key(self, role: str, scope: str) -> Key:
        from penstock import _native

        return Key(_native.key_of(self._value, role, scope, self.always))

    def __reduce__(self) -> NoReturn:
        raise TypeError("the secret stays in the driver: a task carries a Key")


class Key(_Hidden):
    """What a task proves itself with: made of a secret for one role and purpose, from which no other can be made.

    Pickles, inside a closure that Spark carries.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Key, (self._value,))


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
