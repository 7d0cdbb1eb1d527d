"""The processes of a flow: workers of a local run that join it, compute, and leave it again.

The parent runs the first worker, which alone is fed and takes all results; it has no share of the keys as long as
there are others. Those are threads of child processes. A child dials all processes that are there over loopback TCP
(`_mesh`: each proves the secret of the run), asks at its door for as many places as it has threads, and builds the same
plan; its workers join the running dataflow in the middle of an epoch, by the protocol of ``rust/members``. So there is
one way in: the run begins with the parent alone, and the processes that it is asked for join it like any later one.

State moves as between threads: by control of the first worker, in the migration of `LocalSession.migrate`. Its owners
are the numbers of workers, which are never used again. To grow: processes start one after the other, each when the one
before can be dialled; when all their workers take part, bins are spread evenly over all, with as few moves as that
takes. To shrink: the bins of those that go (the youngest) move to the others first; then they are told to leave, and
end.

Each child has a socket to its parent (`_children`). Down go the job (plan, functions by cloudpickle, secret), "leave"
and "stop"; up come the address of its door, the workers that have joined, and how it ended.

One thread of the parent starts all children, since a child dies with the thread that started it, and does one rescale
after the other.

Invariants: bins are only asked to move to workers that have joined, and workers are only asked to leave when they have
none; a child that fails before its workers have joined fails its rescale, and the run goes on; one that fails later
ends the run with one error, which is the child's own; when a run is closed no child is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock._children import Child, Pipe, how_ended, require_interpreter
from penstock._durations import Timeout, parse_timeout
from penstock.errors import ConfigError, EngineError, PenstockError, WorkerLost

if TYPE_CHECKING:
    from penstock._native import LocalRun

__all__ = ["MOST_PROCESSES", "Crew", "LocalRescale", "check_processes", "child", "spread"]

#: More processes than this on one machine are a mistake.
MOST_PROCESSES = 256
#: Seconds that a process has until its workers take part.
_START = 120.0
#: Seconds that the run waits for the cause when it has failed.
_GRACE = 5.0
#: Seconds between asking a child to end and killing it.
_PATIENCE = 2.0
#: Seconds between two looks: at children that have ended; at bins that move.
_LOOK, _MOVING = 0.25, 0.01
#: Bins that move at once.
_STEP = 16


def check_processes(count: Any, what: str) -> None:
    """Refuse what is no number of processes.

    Raises
    ------
    ConfigError
        With `what` as the name of the option or call.

    Examples
    --------
    >>> check_processes(2, "processes=2")
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_PROCESSES:
        raise ConfigError(f"{what}: the number of processes is an int from 1 to {MOST_PROCESSES}")


def spread(owners: Sequence[int], workers: Sequence[int]) -> list[tuple[int, int]]:
    """The fewest moves after which these workers, and no others, have equal shares of the bins.

    Examples
    --------
    >>> spread([0, 0, 0, 0], [1, 2])
    [(0, 1), (1, 1), (2, 2), (3, 2)]
    >>> spread([1, 1, 2, 2], [2])
    [(0, 2), (1, 2)]
    >>> spread([1, 2, 1], [1, 2])
    []
    """
    least, more = divmod(len(owners), len(workers))
    has = Counter(owners)
    # Who has the most keeps one more.
    order = sorted(workers, key=lambda worker: (-has[worker], worker))
    room = {worker: least + (place < more) for place, worker in enumerate(order)}
    homeless = []
    for number, worker in enumerate(owners):
        if room.get(worker, 0):
            room[worker] -= 1
        else:
            homeless.append(number)
    free = [worker for worker in sorted(room) for _ in range(room[worker])]
    return list(zip(homeless, free, strict=True))


@dataclass(frozen=True)
class _Job:
    """What a child is to do."""

    process: int
    doors: tuple[tuple[int, str], ...]
    threads: int
    bits: int
    secret: bytes
    group: str
    program: bytes

    def __repr__(self) -> str:
        return f"_Job(process={self.process})"  # never the secret


class LocalRescale:
    """A handle on a change of the number of processes that is under way; made by `LocalResults.rescale`.

    Attributes
    ----------
    processes : int
        How many were asked for.
    error : Exception or None
        Why it did not finish.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.error: Exception | None = None
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait(self, timeout: Timeout | None = None) -> int:
        """Wait until the processes are there or gone, and the state is where it belongs; rows pass meanwhile.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds, or a duration; default without limit.

        Returns
        -------
        int
            How many processes there are.

        Raises
        ------
        WorkerLost
            When a process did not come up; those that were there go on.
        EngineError
            When the run has ended.
        TimeoutError
            When the time is up first; the rescale goes on.
        """
        seconds = parse_timeout(timeout, least_s=0.0)
        deadline = None if seconds is None else time.monotonic() + seconds
        # In pieces, so that Ctrl-C is heard.
        while not self._over.wait(0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the rescale to {self.processes} processes still runs after {seconds:g} s")
        if self.error is not None:
            raise self.error
        return self.processes

    def _end(self, error: Exception | None = None) -> None:
        self.error = error
        self._over.set()

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "running"
        return f"<LocalRescale to {self.processes}: {state}>"


class _Member(Child):
    """One process, as the parent sees it."""

    def __init__(self, process: int, threads: int) -> None:
        super().__init__(__name__, "child")
        self.process = process
        self.pipe = Pipe(self.socket)
        self.threads = threads
        self.began = time.monotonic()
        #: Where it takes in processes that join.
        self.door: str | None = None
        #: Workers that have joined.
        self.workers: list[int] = []
        self.leaves = self.gone = False
        #: How it failed.
        self.error: Exception | None = None

    @property
    def has_joined(self) -> bool:
        return len(self.workers) == self.threads

    def loss(self) -> WorkerLost:
        """The error of one that ended without saying why."""
        code = self.end(time.monotonic() + _PATIENCE)
        when = "" if self.has_joined else " before its workers had joined"
        return WorkerLost(f"process {self.process} {how_ended(code)}{when}", process=self.process, exitcode=code)


class Crew:
    """The processes of one run. See the module.

    Parameters
    ----------
    plan, calls
        As `Flow.to_plan` gives them.
    threads : int
        Workers of each process.
    bits : int
        The state is cut into ``2 ** bits`` bins.

    Raises
    ------
    ConfigError
        When a function cannot be sent to another process.
    """

    def __init__(self, plan: str, calls: Sequence[Any], threads: int, bits: int) -> None:
        import cloudpickle

        from penstock import _mesh

        require_interpreter()
        try:
            program = cloudpickle.dumps((plan, calls))
        except Exception as error:
            raise ConfigError(
                f"a function of the flow cannot be sent to other processes: {error}; make what it refers to inside it,"
                " where it runs, or leave processes= out"
            ) from error
        secret, group = secrets.token_bytes(32), secrets.token_hex(8)
        listener = _mesh.listen()
        self.seats = listener.connect(0, [listener.address], secret, 1, group=group, joinable=True)
        door = _mesh.listen()
        door.welcome(self.seats, secret, group=group)
        self._door = door.address
        self._job = _Job(0, (), threads, bits, secret, group, program)
        self._native: LocalRun | None = None
        self._members: list[_Member] = []
        self._next = 1
        self._asked: deque[LocalRescale] = deque()
        #: The rescale under way, those that come or go for it, and the migration once bins move.
        self._now: LocalRescale | None = None
        self._coming: list[_Member] = []
        self._going: list[_Member] = []
        self._migration: int | None = None
        self._moved = False
        self._closing = False
        self._cause: Exception | None = None
        self._failed = threading.Event()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="penstock-crew", daemon=True)

    def start(self, native: LocalRun, processes: int) -> None:
        """Have so many processes join the run, and wait for them."""
        self._native = native
        self._thread.start()
        self.rescale(processes).wait()

    def rescale(self, processes: int) -> LocalRescale:
        """Ask for another number of processes."""
        handle = LocalRescale(processes)
        self._asked.append(handle)
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if not self._thread.is_alive():
            self._end_all()
        return handle

    @property
    def processes(self) -> list[int]:
        """The process ids of those that are there, by age."""
        return [member.popen.pid for member in self._members if not member.gone]

    def explain(self, error: BaseException) -> BaseException:
        """The failure of a process, where that is why the run failed."""
        if isinstance(error, EngineError) and self._thread.is_alive():
            self._failed.wait(_GRACE)
        return self._cause or error

    def close(self) -> None:
        """End all processes."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread.ident is not None:
            self._thread.join()
        self.seats.close()
        self._wake.close()
        self._woken.close()

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._look()
                try:
                    self._step()
                except Exception as error:
                    self._finish(error)
        finally:
            self._end_children()
            self._end_all()

    def _look(self) -> None:
        """Wait for something, and take what children tell."""
        there = [member for member in self._members if not member.gone]
        moves = self._migration is not None or (bool(self._coming) and all(m.has_joined for m in self._coming))
        sockets: list[Any] = [self._woken, *(member.socket for member in there)]
        ready, _, _ = select.select(sockets, [], [], _MOVING if moves else _LOOK)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 10)
        for member in there:
            # A process that it started may hold its socket open: then that never ends.
            ended = member.popen.poll() is not None
            open_ = member.pipe.fill() if member.socket in ready else not ended
            for kind, value in member.pipe.messages():
                self._hear(member, kind, value)
            if not open_:
                self._lose(member)

    def _hear(self, member: _Member, kind: str, value: Any) -> None:
        if kind == "door":
            member.door = value
        elif kind == "joined":
            member.workers.append(value)
        elif kind == "failed":
            member.error = _restored(value, member.process)
        else:
            member.gone = True  # it has left

    def _lose(self, member: _Member) -> None:
        if member.gone:
            return
        member.gone = True
        error = member.error or member.loss()
        member.end(time.monotonic() + _PATIENCE)
        member.socket.close()
        if not member.workers and self._cause is None:
            # Nothing counted on it yet.
            if member in self._coming:
                self._finish(error)
            return
        # Others tell only that they were stopped, and may do so before the one that knows why.
        if self._cause is None or (type(self._cause) is EngineError and type(error) is not EngineError):
            self._cause = error
        if type(error) is not EngineError or all(member.gone for member in self._members):
            self._failed.set()
            self._finish(self._cause)

    def _step(self) -> None:
        """Go on with the rescale."""
        assert self._native is not None
        if self._now is None:
            if not self._asked:
                return
            self._now = self._asked.popleft()
            there = [member for member in self._members if not member.gone]
            self._going = there[self._now.processes :]
            self._moved, self._left = False, self._now.processes - len(there)
        if self._cause is not None:
            raise EngineError(f"the run has failed: {self._cause}") from self._cause
        if not self._come():
            return
        if not self._moved:
            self._moved = self._move()
            if not self._moved:
                return
        for member in self._going:
            if not member.leaves:
                member.leaves = True
                member.pipe.send(("leave", None))
        if all(member.gone for member in self._going):
            for member in self._going:
                member.end(time.monotonic() + _PATIENCE)
                member.socket.close()
            self._members = [member for member in self._members if member not in self._going]
            self._finish()

    def _come(self) -> bool:
        """Start what is missing; whether all are there."""
        assert self._now is not None
        assert self._native is not None
        there = [member for member in self._members if not member.gone]
        if self._left > 0 and all(member.door is not None for member in there):
            doors = tuple((member.process, member.door) for member in there if member.door is not None)
            member = _Member(self._next, self._job.threads)
            self._next += 1
            self._left -= 1
            self._members.append(member)
            self._coming.append(member)
            job = replace(self._job, process=member.process, doors=((0, self._door), *doors))
            try:
                member.hand_over(lambda: member.pipe.send(job), time.monotonic() + _START)
            except TimeoutError:
                raise self._late(member) from None
        for member in self._coming:
            if not member.has_joined and time.monotonic() > member.began + _START:
                raise self._late(member)
        if self._left > 0 or not all(member.has_joined for member in self._coming):
            return False
        return {worker for member in self._coming for worker in member.workers} <= set(self._native.members)

    def _late(self, member: _Member) -> WorkerLost:
        what = f"process {member.process} did not join within {_START:g} s"
        return WorkerLost(what, process=member.process, exitcode=member.popen.poll())

    def _move(self) -> bool:
        """Bring the bins to those that stay; whether that is done."""
        assert self._native is not None
        if self._migration is None:
            owners = json.loads(self._native.stats())["owners"]
            stay = [member for member in self._members if not member.gone and member not in self._going]
            todo = spread(owners[0], [w for member in stay for w in member.workers]) if owners else []
            if not todo:
                return True
            steps = [todo[at : at + _STEP] for at in range(0, len(todo), _STEP)]
            self._migration = self._native.migrate(steps)
        if self._native.wait_migration(self._migration, 0.0) is None:
            return False
        self._migration = None
        return True

    def _finish(self, error: Exception | None = None) -> None:
        """End the rescale under way; what came for one that failed, and has no place, goes."""
        now, self._now = self._now, None
        for member in self._coming if error is not None else []:
            if not member.workers:
                member.gone = True
                member.end(time.monotonic())
        self._members = [member for member in self._members if not member.gone or member in self._going]
        self._coming, self._going, self._migration = [], [], None
        if now is not None:
            now._end(error)

    def _end_all(self) -> None:
        """No rescale comes to its end any more."""
        asked = [*([self._now] if self._now is not None else []), *self._asked]
        self._now = None
        self._asked.clear()
        for handle in asked:
            handle._end(EngineError("the run has ended, so its processes do not change any more"))

    def _end_children(self) -> None:
        for member in self._members:
            member.limit(time.monotonic() + 0.1)
            with contextlib.suppress(OSError):
                member.pipe.send(("stop", None))
        deadline = time.monotonic() + _PATIENCE
        for member in self._members:
            member.end(deadline)
            member.socket.close()


def _restored(body: bytes, process: int) -> Exception:
    """The failure of a child."""
    try:
        error, text = pickle.loads(body)
    except Exception as reason:
        return EngineError(f"process {process} has failed, and its error cannot be restored here: {reason!r}")
    if hasattr(error, "add_note"):
        error.add_note(f"In process {process}:\n{text}")
    return error if isinstance(error, Exception) else EngineError(f"process {process} has failed: {error!r}")


# In the child


def child(control: socket.socket) -> None:
    """The main function of a child: see the module."""
    pipe = Pipe(control)
    try:
        job: _Job = pipe.receive()
        told = _take_part(pipe, job)
        _flush()
        pipe.send(told)
    except (EOFError, ConnectionError):
        os._exit(1)


def _take_part(pipe: Pipe, job: _Job) -> tuple[str, Any]:
    from penstock import _mesh, _native

    try:
        plan, calls = pickle.loads(job.program)
        door = _mesh.listen()
        seats = _mesh.join(job.process, job.doors, job.secret, group=job.group)
        if seats is None:
            raise EOFError
        door.welcome(seats, job.secret, group=job.group)
        pipe.send(("door", door.address))
        crew = _native.FlowCrew(plan, calls, seats._native, job.threads, job.bits)
        threading.Thread(target=_obey, args=(pipe, crew), name="penstock-watch", daemon=True).start()
        left = 0
        while left < job.threads:
            told = crew.take(None)
            if told is not None and told[0] == "joined":
                pipe.send(told)
            elif told is not None:
                left += 1
        # In order: the others would take a connection that just ends for a crash.
        crew.close()
        seats.close()
        return ("left", None)
    except (EOFError, ConnectionError) as error:
        if isinstance(error, PenstockError):
            return ("failed", _packed(error))
        raise
    except Exception as error:
        return ("failed", _packed(error))


def _obey(pipe: Pipe, crew: Any) -> None:
    """Do what the parent asks for, and end with it."""
    while True:
        try:
            kind, _ = pipe.receive()
        except (EOFError, OSError):
            kind = "stop"
        if kind == "stop":
            _flush()
            os._exit(0)
        crew.leave()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _packed(error: Exception) -> bytes:
    """A failure in the form that goes to the parent."""
    import cloudpickle

    cause = error.__cause__ or error
    text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    try:
        return bytes(cloudpickle.dumps((error, text)))
    except Exception:
        return pickle.dumps((EngineError(f"{type(error).__name__}: {error}"), text))
