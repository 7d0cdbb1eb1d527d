"""Python processes that work for this one: starting them, and what always holds for them.

They are started, not forked: a fork of a process with threads may hang. Each gets one end of a private pair of
sockets and, first, the module path of its parent, which may be the only way to this package. Nothing of a job is on a
command line or in the environment.

Invariants: a child dies with the thread that started it (where the system can tell it, on Linux), and else with its
socket, whose end is the end of the other side; Ctrl-C of the terminal is the parent's, who ends its children in order;
a child that does not come up costs its parent no more than the time it was given; many children do not fail for a soft
limit on open files; what a child starts does not have its socket, unless it forks.

A child imports this, too, so what only a parent needs is imported where it is used.

Departure: children are started, not forked; the parent supervises and is no worker.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from penstock.errors import ConfigError

__all__ = [
    "Child",
    "Pipe",
    "Watch",
    "allow_descriptors",
    "enter",
    "how_ended",
    "require_descriptors",
    "require_interpreter",
]

#: Open files of a parent for each child, at most: its socket, the one that tells its end, and the memory of messages or
#: its connections. And what starting one takes.
_FILES, _SPARE = 5, 32
#: Seconds between two looks at children whose ends the system does not tell.
_LOOK = 0.1

#: Reads the module path of the parent and goes on in `enter`, which that makes it find.
_BOOT = """
import pickle, socket, struct, sys
sock = socket.socket(fileno=int(sys.argv[1]))
sock.set_inheritable(False)
def read(count):
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            sys.exit(1)
        data += part
    return data
sys.path[:] = pickle.loads(read(struct.unpack("<Q", read(8))[0]))
from penstock._children import enter
enter(sock, *sys.argv[2:])
"""


def require_interpreter() -> None:
    """Refuse to start children where nobody knows how.

    Raises
    ------
    ConfigError
        In an interpreter that does not know its executable.
    """
    if not sys.executable:
        raise ConfigError("this interpreter does not know its executable, so it cannot start others")


def require_descriptors(children: int, what: str) -> None:
    """Raise the limit on open files as far as so many children need it, or refuse them.

    Raises
    ------
    ConfigError
        When the hard limit leaves no room for their sockets, with `what` as what asks for them.
    """
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    there = len(os.listdir("/dev/fd")) + _SPARE
    if hard != resource.RLIM_INFINITY and hard < there + children:
        raise ConfigError(
            f"{what}: {children} worker processes need {there + children} open files, and the hard limit of this"
            f" process is {hard}; ask for {max(1, hard - there)} at most, or raise the limit (ulimit -Hn, or"
            " LimitNOFILE= of a service)"
        )
    allow_descriptors(children)


def allow_descriptors(others: int) -> None:
    """Raise the limit on open files for so many children, or processes that this one talks to, as far as it goes."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + _SPARE + _FILES * others
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(hard, wanted), hard))


class Pipe:
    """Pickled messages over a socket."""

    def __init__(self, control: socket.socket) -> None:
        self.socket = control
        self._held = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        body = pickle.dumps(message, 5)
        with self._sending:
            self.socket.sendall(struct.pack("<Q", len(body)) + body)

    def receive(self) -> Any:
        """The next message; EOFError at the end."""
        while (message := self._next()) is None:
            if not self.fill():
                raise EOFError
        return message[0]

    def fill(self) -> bool:
        """Read what is there, waiting for something; False at the end."""
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionError:
            return False
        self._held += data
        return bool(data)

    def messages(self) -> list[Any]:
        """All messages that are complete."""
        found = []
        while (message := self._next()) is not None:
            found.append(message[0])
        return found

    def _next(self) -> tuple[Any] | None:
        if len(self._held) < 8:
            return None
        end = 8 + struct.unpack_from("<Q", self._held)[0]
        if len(self._held) < end:
            return None
        message = pickle.loads(bytes(self._held[8:end]))
        del self._held[:end]
        return (message,)


def _flags() -> list[str]:
    """What this interpreter was told (-O, -W, -X and others), as multiprocessing hands it on."""
    import subprocess

    found = getattr(subprocess, "_args_from_interpreter_flags", None)
    return [] if found is None else list(found())


class Child:
    """A process that calls ``module.entry(socket)``.

    Attributes
    ----------
    popen : subprocess.Popen
        The process.
    socket : socket.socket
        This end of the pair.
    """

    def __init__(self, module: str, entry: str) -> None:
        import subprocess

        self.socket, theirs = socket.socketpair()
        try:
            with theirs:
                self.popen = subprocess.Popen(
                    [sys.executable, *_flags(), "-c", _BOOT, str(theirs.fileno()), str(os.getpid()), module, entry],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # Ctrl-C of the terminal is the parent's, who ends the children in order.
                    start_new_session=True,
                )
        except BaseException:
            self.socket.close()
            raise

    def hand_over(self, send: Callable[[], None], deadline: float) -> None:
        """Give it the module path, and what `send` sends then over the socket.

        A child that is gone is no error: its end says so to who talks to it.

        Raises
        ------
        TimeoutError
            When it has not taken that by `deadline` (of `time.monotonic`). It still runs.
        """
        path = pickle.dumps(list(sys.path), 5)
        self.limit(deadline)
        try:
            self.socket.sendall(struct.pack("<Q", len(path)) + path)
            self.limit(deadline)
            send()
        except ConnectionError:
            return
        finally:
            with contextlib.suppress(OSError):  # closed by another thread
                self.socket.settimeout(None)

    def limit(self, deadline: float) -> None:
        """Make what is done next with the socket end by `deadline` (of `time.monotonic`)."""
        self.socket.settimeout(max(0.001, deadline - time.monotonic()))

    def end(self, deadline: float = 0.0) -> int:
        """Wait for the process until `deadline` (of `time.monotonic`), then kill it; how it ended."""
        import subprocess

        try:
            return self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()


class Watch:
    """Hangs up on children that have ended, in a thread: a process that one has forked may hold its socket open.

    What a child has sent before its end can be read as before, then the socket ends; what is being sent to it fails.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        #: What the system tells the end by; None where it does not, or no more files may be open.
        self._children: dict[Child, int | None] = {}
        self._closed = False
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, child: Child) -> None:
        """Watch a child that nobody has waited for yet."""
        handle = None
        with contextlib.suppress(AttributeError, OSError):
            handle = os.pidfd_open(child.popen.pid)
        with self._lock:
            self._children[child] = handle
        self._tell()

    def remove(self, child: Child) -> None:
        """Watch it no longer: its socket may be closed then."""
        with self._lock:
            self._forget(child)
        self._tell()

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._tell()
        self._thread.join()
        with self._lock:
            for child in list(self._children):
                self._forget(child)
            self._woken.close()
            self._wake.close()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):  # full, so it is told; or closed
            self._wake.send(b"\0")

    def _forget(self, child: Child) -> None:
        handle = self._children.pop(child, None)
        if handle is not None:
            os.close(handle)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                waits = select.poll()
                waits.register(self._woken, select.POLLIN)
                for handle in self._children.values():
                    if handle is not None:
                        waits.register(handle, select.POLLIN)
                blind = None in self._children.values()
            ready = {found for found, _ in waits.poll(_LOOK * 1000 if blind else None)}
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            with self._lock:
                looks = [child for child, handle in self._children.items() if handle is None or handle in ready]
                for child in looks:
                    if child.popen.poll() is not None:
                        with contextlib.suppress(OSError):
                            child.socket.shutdown(socket.SHUT_RDWR)
                        self._forget(child)


def how_ended(code: int) -> str:
    """What an exit code says, in words.

    Examples
    --------
    >>> how_ended(3), how_ended(-9), how_ended(-99)
    ('ended with exit code 3', 'was killed by SIGKILL', 'was killed by signal 99')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # one without a name, such as a real-time signal
        return f"was killed by signal {-code}"


def enter(sock: socket.socket, parent: str, module: str, entry: str) -> None:
    """In the child: become one that dies with `parent`, and do what it was started for."""
    _die_with_parent()
    if os.getppid() != int(parent):
        os._exit(1)  # it died before the system was asked to tell
    getattr(import_module(module), entry)(sock)


def _die_with_parent() -> None:
    """Ask the system to kill this process when the thread that started it ends, where it can."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
