"""Workers in processes of their own: starting them, telling them who they are, and ending them.

Each child has one socket to its parent (see `_children`): over it come the job (with the secret of the run, which is
nowhere else) and the addresses of all, and back go the child's address and the outcomes of its workers. A child whose
parent is gone ends at once, a parent whose child is gone names it.

A child whose worker admits others asks the parent, which starts a process for them; that one dials all that are there.
Processes are started one after the other, each when the one before can be dialled.

Invariant: when `run_processes` returns or raises, no child is left.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from penstock import _pickles
from penstock._children import Child, Pipe, allow_descriptors, how_ended, require_descriptors, require_interpreter
from penstock.dataflow._threads import Failure, collect_outcomes, first_cause
from penstock.errors import ConfigError, PenstockError, ProgramError, WorkerLost

if TYPE_CHECKING:
    from penstock._mesh import Seats
    from penstock.dataflow._worker import Worker

__all__ = ["child", "run_processes"]

R = TypeVar("R")

#: Seconds that the others have to end by themselves after the first failure.
_GRACE = 5.0
#: Seconds between asking a child to end and killing it.
_PATIENCE = 2.0

#: Seconds between two looks at whether a child still runs.
_LOOK = 0.5


@dataclass(frozen=True)
class _Job:
    """What a child is to do."""

    process: int
    processes: int
    threads: int
    secret: bytes
    group: str
    program: bytes
    start_timeout: float
    #: So many workers more may join.
    join: int = 0
    #: Of a process that joins: where it dials, by process.
    doors: tuple[tuple[int, str], ...] | None = None

    def __repr__(self) -> str:
        return f"_Job(process={self.process})"  # never the secret


class _Child(Child):
    """One process of a run, as its parent sees it."""

    def __init__(self, process: int, threads: int, *, joins: bool = False) -> None:
        super().__init__(__name__, "child")
        self.process = process
        #: Of one that joins unknown: the run decides.
        self.workers = range(0) if joins else range(process * threads, (process + 1) * threads)
        self.address: str | None = None
        #: Where it takes in processes that join.
        self.door: str | None = None
        self.outcomes: list[Any] | None = None
        self.gone = False
        self.pipe = Pipe(self.socket)

    def start(self, job: _Job, deadline: float) -> None:
        """Hand over the job.

        Raises
        ------
        WorkerLost
            When it has not taken the job by `deadline`.
        """
        try:
            self.hand_over(lambda: self.pipe.send(job), deadline)
        except TimeoutError:
            raise _late(self) from None

    def loss(self) -> WorkerLost:
        """The error of a child that ended, or closed its socket, without its outcomes."""
        code = self.end(time.monotonic() + _PATIENCE)
        who = "which joined"
        if self.workers:
            first, last = self.workers[0], self.workers[-1]
            who = f"worker {first}" if first == last else f"workers {first} to {last}"
        when = "before it was connected" if self.address is None else "before its program did"
        what = f"process {self.process} ({who}) {how_ended(code)} {when}"
        return WorkerLost(what, process=self.process, exitcode=code)

    def failure(self, error: BaseException) -> Failure:
        """What is wrong with the process, not with one of its workers."""
        return Failure(self.workers[0] if self.workers else None, self.process, error)


class _Joins:
    """Starts processes for workers that join, as long as more may come."""

    def __init__(self, join: int, job: _Job, children: list[_Child]) -> None:
        self._left = join
        self._join = join
        self._job = job
        self._children = children
        #: So many workers of a process that is to start.
        self._waiting: list[int] = []

    def ask(self, count: int) -> str | None:
        """Start a process with so many workers, soon; why not, if not."""
        if count > self._left:
            return f"{count} more workers may not join: execute(..., join={self._join}) leaves {self._left}"
        self._left -= count
        self._waiting.append(count)
        return None

    def start(self) -> _Child | None:
        """The next process, if one is wanted and all before it can be dialled, or are gone."""
        there = [child for child in self._children if child.outcomes is None and not child.gone]
        if not self._waiting or not there or any(child.door is None for child in there):
            return None
        count = self._waiting.pop(0)
        doors = tuple((child.process, child.door) for child in there if child.door is not None)
        allow_descriptors(1)
        child = _Child(len(self._children), count, joins=True)
        self._children.append(child)
        job = replace(self._job, process=child.process, threads=count, doors=doors)
        child.start(job, time.monotonic() + self._job.start_timeout)
        return child


def run_processes(
    program: Callable[[Worker], R], threads: int, processes: int, start_timeout: float, join: int = 0
) -> list[R]:
    """Run a program on `threads` workers in each of `processes` new processes; `join` may come. See `execute`."""
    require_interpreter()
    require_descriptors(processes, f"processes={processes}")
    try:
        code = _pickles.dumps(program)
    except Exception as error:
        raise ProgramError(f"the program cannot be sent to other processes: {error}") from error
    secret, group = secrets.token_bytes(32), secrets.token_hex(8)
    children: list[_Child] = []
    job = _Job(0, processes, threads, secret, group, code, start_timeout, join)
    start = time.monotonic() + start_timeout
    try:
        for process in range(processes):
            child = _Child(process, threads)
            children.append(child)
            child.start(replace(job, process=process), start)
        failures = _supervise(children, start, _Joins(join, job, children))
    except BaseException:
        _tell(children, ("stop", "the program that started this run was interrupted"))
        raise
    finally:
        deadline = time.monotonic() + _PATIENCE
        for child in children:
            with contextlib.suppress(OSError):
                child.pipe.socket.shutdown(socket.SHUT_WR)
        for child in children:
            child.end(deadline)
            child.pipe.socket.close()
    if failures:
        raise first_cause(failures)
    return [value for child in children for value in child.outcomes or []]


def _tell(children: list[_Child], message: Any) -> None:
    """Send a message to every child that takes it soon; one that does not is killed in the end."""
    for child in children:
        child.pipe.socket.settimeout(_PATIENCE / len(children))
        with contextlib.suppress(OSError):
            child.pipe.send(message)
        child.pipe.socket.settimeout(None)


def _supervise(children: list[_Child], start: float, joins: _Joins) -> list[Failure]:
    """Take the children's messages until all have told their outcomes or are gone; what failed."""
    failures: list[Failure] = []
    founders = list(children)
    connected = False
    give_up: float | None = None
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.pipe.socket, selectors.EVENT_READ, child)
        while any(child.outcomes is None and not child.gone for child in children):
            limit = start if not connected else give_up
            if give_up is not None:
                limit = give_up
            left = _LOOK if limit is None else min(_LOOK, max(0.0, limit - time.monotonic()))
            # What a child has sent before its end is there by now.
            ended = [child for child in children if not child.gone and child.popen.poll() is not None]
            ready = [key.data for key, _ in selector.select(0.0 if ended else left)]
            # A process that it started may hold its socket open: then that never ends.
            silent = [child for child in ended if child not in ready]
            for child in ready + silent:
                if child in silent or not child.pipe.fill():
                    child.gone = True
                    selector.unregister(child.pipe.socket)
                    if child.outcomes is None:
                        failures.append(child.failure(child.loss()))
                    continue
                for kind, value in child.pipe.messages():
                    if kind == "address":
                        child.address, child.door = value
                    elif kind == "admit":
                        with contextlib.suppress(OSError):
                            child.pipe.send(("answer", joins.ask(value)))
                    else:
                        child.outcomes = [_restored(child, outcome) for outcome in value]
                        failures += [outcome for outcome in child.outcomes if isinstance(outcome, Failure)]
            if failures and give_up is None:
                give_up = time.monotonic() + _GRACE
                _tell(children, ("stop", str(first_cause(failures).message).partition("\n")[0]))
            if not connected and not failures and all(child.address is not None for child in founders):
                connected = True
                _tell(founders, ("connect", [child.address for child in founders]))
            if connected and not failures:
                try:
                    joined = joins.start()
                except WorkerLost as error:
                    failures.append(children[-1].failure(error))
                    joined = None
                if joined is not None:
                    selector.register(joined.pipe.socket, selectors.EVENT_READ, joined)
            if give_up is None and connected:
                limit = None  # all have come, the last one just now
            if limit is not None and time.monotonic() >= limit:
                if give_up is None:
                    failures += [child.failure(_late(child)) for child in children if child.address is None]
                break
    return failures


def _late(child: _Child) -> WorkerLost:
    return WorkerLost(f"process {child.process} did not start in time", process=child.process, exitcode=None)


def _restored(child: _Child, outcome: tuple[str, int | None, bytes]) -> Any:
    """The result or the failure of one worker."""
    kind, worker, body = outcome
    try:
        value = pickle.loads(body)
    except Exception as error:
        made = ProgramError(
            f"the {kind} of worker {worker} cannot be restored here: {error!r}", worker=worker, process=child.process
        )
        made.__cause__ = error
        return Failure(worker, child.process, made)
    if kind == "result":
        return value
    if hasattr(value, "add_note") and getattr(value, "traceback", None):
        value.add_note(f"On worker {worker}:\n{value.traceback}")
    return Failure(worker, child.process, value)


# In the child


def child(control: socket.socket) -> None:
    """The main function of a child: see the module."""
    pipe = Pipe(control)
    try:
        job: _Job = pipe.receive()
        outcomes = _serve(pipe, job)
        pipe.send(("outcomes", outcomes))
    except (EOFError, ConnectionError):
        os._exit(1)


def _serve(pipe: Pipe, job: _Job) -> list[tuple[str, int | None, bytes]]:
    try:
        program = pickle.loads(job.program)
        seats = _connected(pipe, job)
    except Exception as error:
        if isinstance(error, EOFError):
            raise
        return [_packed(job, Failure(None if job.doors else job.process * job.threads, job.process, error))]
    if seats is None:
        return []
    parent = _Parent(pipe)
    parent.watch(seats)
    ask = parent.ask if job.join else None
    outcomes = collect_outcomes(seats, program, ask=ask, joining=job.threads if job.doors else 0)
    # Leave in order: the others may have something to finish, and would take a connection that just ends for a crash.
    seats.close()
    packed = [_packed(job, outcome, worker) for worker, outcome in outcomes.items()]
    # Before the parent knows: it ends this process as soon as it does.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return packed


def _connected(pipe: Pipe, job: _Job) -> Seats | None:
    """The places of this process in the run; none of one that joins when all have left."""
    from penstock import _mesh

    allow_descriptors(job.processes + job.join)
    door = _mesh.listen() if job.join else None
    if job.doors is not None:
        joined = _mesh.join(job.process, job.doors, job.secret, group=job.group, timeout=job.start_timeout)
        if joined is not None and door is not None:
            door.welcome(joined, job.secret, group=job.group)
            pipe.send(("address", ("", door.address)))
        return joined
    listener = _mesh.listen()
    pipe.send(("address", (listener.address, None if door is None else door.address)))
    kind, addresses = pipe.receive()
    if kind != "connect":
        raise EOFError
    seats = listener.connect(
        job.process,
        addresses,
        job.secret,
        job.threads,
        group=job.group,
        timeout=job.start_timeout,
        joinable=job.join > 0,
    )
    if door is not None:
        door.welcome(seats, job.secret, group=job.group)
    return seats


class _Parent:
    """What a child hears of its parent, and asks of it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def watch(self, seats: Seats) -> None:
        """Obey the parent, and end with it, in a thread of its own."""

        def watch() -> None:
            while True:
                try:
                    kind, value = self._pipe.receive()
                    if kind == "answer":
                        self._answers.put(value)
                    else:
                        seats.stop(value)
                except PenstockError:
                    continue
                except (EOFError, OSError):
                    # The parent has what it wanted, or is gone.
                    os._exit(1)

        threading.Thread(target=watch, name="penstock-watch", daemon=True).start()

    def ask(self, count: int) -> None:
        """Let so many workers join, in a process of their own."""
        with self._asking:
            self._pipe.send(("admit", count))
            refusal = self._answers.get()
        if refusal is not None:
            raise ConfigError(refusal)


def _packed(job: _Job, outcome: Any, worker: int | None = 0) -> tuple[str, int | None, bytes]:
    """An outcome in the form that goes to the parent."""
    if not isinstance(outcome, Failure):
        try:
            return ("result", worker, cloudpickle.dumps(outcome))
        except Exception as error:
            made = ProgramError(
                f"the result of worker {worker} cannot be sent to the caller: {error}",
                worker=worker,
                process=job.process,
            )
            made.__cause__ = error
            outcome = Failure(worker, job.process, made)
    failed = outcome.exception()
    cause = failed.__cause__ or failed
    failed.__dict__["traceback"] = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    return ("failure", outcome.worker, cloudpickle.dumps(failed))
