"""Worker processes: one per worker of a run, started (never forked) when first wanted.

Each child has one socket, a private pair, over which everything goes; its end is the end of the other side. A thread
of the pool starts the children and lives as long as it: the system kills a child when the thread that started it
ends, so nothing is left behind even after `kill -9` of this process.

There are more callers than children: one pickles its request or unpickles its reply while the children work on those
of others.

Invariants: one caller at a time talks to a child, with one request; a child that ended is replaced, and what it was
working on is an error that names the items; after `close` no child is left.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, ItemsLost, ItemTimeout, NotPicklable, OrderedError
from penstock.ordered import wire
from penstock.ordered.chunk import Chunk, Failure, add_note
from penstock.ordered.steps import Step
from penstock.ordered.transforms import failure

__all__ = ["Pool"]

#: Seconds that a child has to come up.
_START = 60.0
#: Seconds that a child has to end by itself once its socket has ended.
_PATIENCE = 0.25
#: So many children in a row that end before they did anything, and the run ends.
_DEATHS = 5

#: Reads the parent's module path, which may be the only way to this package, then goes on in `child.main`.
_BOOT = """
import pickle, socket, struct, sys
sock = socket.socket(fileno=int(sys.argv[1]))
def read(count):
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            sys.exit(1)
        data += part
    return data
sys.path[:] = pickle.loads(read(struct.unpack("<Q", read(8))[0]))
from penstock.ordered.child import main
main(sock, int(sys.argv[2]))
"""


class _Child:
    """One process, seen from here."""

    def __init__(self, code: bytes) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.up = False
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C of the terminal is the parent's, who ends the children in order.
                start_new_session=True,
            )
        path = pickle.dumps(list(sys.path), 5)
        with contextlib.suppress(ConnectionError):  # it is gone: noticed by who calls it
            ours.sendall(struct.pack("<Q", len(path)) + path)
            wire.send(ours, code, [])

    def readable(self) -> bool:
        """Whether it has something to say, or is gone."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def hello(self) -> None:
        """Wait until it is up."""
        if self.up:
            return
        self.socket.settimeout(_START)
        try:
            message = wire.loads(*wire.receive(self.socket))
        except TimeoutError as error:
            raise OrderedError(f"a worker process did not start within {_START:.0f} s") from error
        if message[0] != "ready":
            raise NotPicklable(
                f"the functions cannot be restored in a worker process: {message[1]}; import what they need inside"
                " them, or use mode='threads'",
                item=None,
            )
        self.up = True

    def end(self) -> int | None:
        """Kill it if it is not gone yet; how it ended."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.popen.kill()
        code = self.popen.wait()
        self.socket.close()
        return code


class Pool:
    """The worker processes of one run.

    Parameters
    ----------
    steps : sequence of Step
        What they are to know.
    workers : int
        How many.

    Raises
    ------
    NotPicklable
        When a function cannot travel.
    """

    def __init__(self, steps: Sequence[Step], workers: int) -> None:
        if not sys.executable:
            raise ConfigError("this interpreter does not know its executable, so it cannot start others")
        self._code = _pickled(steps)
        self.workers = workers
        self._pid = os.getpid()
        self._children: list[_Child | None] = [None] * workers
        self._lock = threading.Lock()
        #: Children that nobody talks to, the one used last first: it is awake.
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        self._closed = False
        self._deaths = 0
        self._wanted: queue.SimpleQueue[tuple[int, queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._starter = threading.Thread(target=self._start, name="penstock-ordered-start", daemon=True)
        self._starter.start()
        for worker in range(workers):
            self._wanted.put((worker, queue.SimpleQueue()))
            self._free.put(worker)

    def _start(self) -> None:
        """Start children as they are asked for: see the module for why one thread does it."""
        while (wanted := self._wanted.get()) is not None:
            worker, reply = wanted
            child: _Child | None = None
            try:
                with self._lock:
                    # Only missing ones: a call may have asked for one that was under way.
                    if not self._closed and self._children[worker] is None:
                        self._children[worker] = _Child(self._code)
                    child = self._children[worker]
                reply.put(child)
            except BaseException as error:
                reply.put(error)

    def _child(self, worker: int) -> _Child:
        child = self._children[worker]
        if child is None:
            reply: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._wanted.put((worker, reply))
            found = reply.get(timeout=_START)
            if isinstance(found, BaseException):
                raise OrderedError(f"no worker process can be started: {found}") from found
            child = found
        if child is None or self._closed:
            raise OrderedError("this run was closed")
        return child

    def ready(self) -> bool:
        """Whether all children are up.

        Raises
        ------
        OrderedError
            When one cannot come up.
        """
        for child in self._children:
            if child is None or not (child.up or child.readable()):
                return False
            try:
                child.hello()
            except wire.Ended as error:
                raise OrderedError(f"a worker process {_how(child.popen.wait())} when it started") from error
        return True

    def pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [child.popen.pid for child in self._children if child is not None and child.popen.poll() is None]

    # Calls, in the thread of a worker

    def apply(self, place: int, name: str, chunk: Chunk, timeout: float | None) -> None:
        """Do a stateless operator on a chunk, over there."""
        numbers = chunk.numbers()
        if not chunk.values:
            return
        try:
            request = ("apply", place, chunk.first, chunk.values, chunk.origins, chunk.failed)
            reply = self._call(request, name, numbers[0], numbers[-1], timeout)
        except wire.Ended:
            raise
        except _Unsendable:
            # Which ones? The others go.
            kept = []
            for value, number in zip(chunk.values, numbers, strict=True):
                try:
                    wire.dumps(value)
                except Exception as error:
                    value = failure(_item_error(value, number, error), number, name)
                    chunk.failed += 1
                kept.append(value)
            chunk.values = kept
            request = ("apply", place, chunk.first, chunk.values, chunk.origins, chunk.failed)
            reply = self._call(request, name, numbers[0], numbers[-1], timeout)
        if reply[0] == "done":
            _, chunk.values, chunk.origins, chunk.failed, spent = reply
            chunk.spent += spent
            if chunk.failed:
                for value, number in zip(chunk.values, chunk.numbers(), strict=True):
                    if value.__class__ is Failure and isinstance(value.error, NotPicklable):
                        if value.error.__dict__.get("item") is None:
                            value.error.__dict__["item"] = number
                        add_note(value.error, f"item {number} of the input, in {name}")
        else:
            chunk.values, chunk.origins, chunk.failed = [reply[1]], [numbers[0]], 1

    def keyed(self, place: int, operator: Any, part: Any, timeout: float | None) -> None:
        """Do a part of a chunk, over there, on states that travel with it."""
        name = operator.name
        if part.items:
            first, last = part.numbers[0], part.numbers[-1]
            try:
                lent = operator.lend(part)
                request = ("keyed", place, part.keys, part.items, part.numbers, part.places(), lent)
                reply = self._call(request, name, first, last, timeout)
            except _Unsendable as unsent:
                made = NotPicklable(
                    f"{name}: an item or key among items {first} to {last} does not pickle: {unsent.__cause__}",
                    item=first,
                )
                reply = ("failed", failure(made, first, name))
            except NotPicklable as error:
                reply = ("failed", failure(error, first, name))
            if reply[0] == "done":
                _, part.outs, bodies, part.spent = reply
                operator.take_back(part, bodies)
                return
            # Nothing of it was done: the states are as they were, the error stands for all of its items.
            part.outs = [[reply[1]]] + [[] for _ in part.items[1:]]
        operator.settle(part)

    def _call(
        self, request: tuple[Any, ...], name: str, first: int, last: int, timeout: float | None
    ) -> tuple[Any, ...]:
        """One request and its reply, ``("done", ...)`` or ``("failed", failure)``."""
        buffers: list[Any] = []
        try:
            body = wire.dumps(request, buffers)
        except Exception as error:
            raise _Unsendable from error
        where = f"item {first}" if first == last else f"items {first} to {last}"
        worker = self._free.get()
        try:
            answer = self._exchange(worker, body, buffers, timeout)
        finally:
            self._free.put(worker)
        if isinstance(answer, _Late):
            made: OrderedError = ItemTimeout(
                f"{name} did not return within {timeout} s for {where} of the input; its process was ended",
                item=first,
                last=last,
                step=name,
                timeout=timeout,
            )
            return ("failed", Failure(made))
        if isinstance(answer, _Gone):
            self._deaths += 1
            how = _how(answer.code)
            if self._deaths >= _DEATHS:
                raise OrderedError(
                    f"{self._deaths} worker processes in a row ended in the middle of their work, the last one {how} at"
                    f" {where} of the input, in {name}: the run ends"
                )
            made = ItemsLost(
                f"a worker process {how} while {name} worked on {where} of the input; their results are lost, the"
                " process is replaced",
                item=first,
                last=last,
                exitcode=answer.code,
                step=name,
            )
            return ("failed", Failure(made))
        self._deaths = 0
        try:
            reply: tuple[Any, ...] = wire.loads(*answer)
        except Exception as error:
            made = NotPicklable(
                f"what {name} returned for {where} of the input cannot be restored here: {error!r}", item=first
            )
            made.__cause__ = error
            return ("failed", Failure(made))
        if reply[0] == "broken":
            made = NotPicklable(
                f"{where} of the input cannot be restored in a worker process, for {name}: {reply[1]}", item=first
            )
            return ("failed", Failure(made))
        return reply

    def _exchange(self, worker: int, body: bytes, buffers: list[Any], timeout: float | None) -> Any:
        """Send a request to a child and take its reply, as it came; or why there is none."""
        child = self._child(worker)
        try:
            child.hello()
            child.socket.settimeout(timeout)
            wire.send(child.socket, body, buffers)
            return wire.receive(child.socket)
        except TimeoutError:
            self._replace(worker, child)
            return _Late()
        except ConnectionError as error:
            if self._closed:
                raise OrderedError("this run was closed") from error
            return _Gone(self._replace(worker, child))

    def _replace(self, worker: int, child: _Child) -> int | None:
        code = child.end()
        with self._lock:
            self._children[worker] = None
        if not self._closed:
            self._wanted.put((worker, queue.SimpleQueue()))
        return code

    def close(self) -> None:
        """End all children and wait for their ends."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            children = [child for child in self._children if child is not None]
        for child in children:
            with contextlib.suppress(OSError):
                child.socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _PATIENCE
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.popen.wait(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.end()
        self._wanted.put(None)
        if threading.current_thread() is not self._starter:
            self._starter.join()


class _Late:
    """Instead of a reply: there was none in time."""


@dataclass
class _Gone:
    """Instead of a reply: the child ended."""

    code: int | None


class _Unsendable(Exception):
    """A request does not pickle; the reason is the cause."""


def _pickled(steps: Sequence[Step]) -> bytes:
    import cloudpickle

    def body(value: Any) -> bytes:
        return bytes(cloudpickle.dumps(value, 5))

    try:
        return body(tuple(steps))
    except Exception as error:
        for step in steps:
            try:
                body(step)
            except Exception as reason:
                raise NotPicklable(
                    f"{step.name}: the function cannot be sent to worker processes: {reason}; make what it refers to"
                    " inside the function, or use mode='threads'",
                    item=None,
                ) from reason
        raise NotPicklable(f"the functions cannot be sent to worker processes: {error}", item=None) from error


def _item_error(value: Any, number: int, error: BaseException) -> NotPicklable:
    made = NotPicklable(
        f"item {number} of the input, of type {type(value).__qualname__}, does not pickle, so it cannot go to a worker"
        f" process: {error}; use mode='threads'",
        item=number,
    )
    made.__cause__ = error
    return made


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"
