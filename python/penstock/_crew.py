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
end. To go back, when a rescale is cancelled or a child of it fails: those that were to go and were not told stay, those
that came go.

Each child has a socket to its parent (`_children`). Down go the job (plan, functions by cloudpickle, secret), "leave",
"stats" and "stop"; up come the address of its door, the workers that have joined, their figures ("stale" where a worker
is in a call and has told before), and how it ended.

One thread of the parent starts all children, since a child dies with the thread that started it, and does the rescale;
there is one at a time.

Invariants: bins are only asked to move to workers that have joined, and workers are only asked to leave when they have
none (or have not joined: then they leave when they have); a child that fails before its workers have joined fails its
rescale, and the run goes on as before; one that fails later ends the run with one error, which is the child's own,
unless its workers had left: whether they had the dataflow knows, not what the child could still tell; when a run is
closed, or nobody has it any more, no child is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock._children import Child, Pipe, allow_descriptors, how_ended, require_descriptors, require_interpreter
from penstock._loads import Loads
from penstock._options import whole
from penstock._rescale import LocalRescale, Rescale, RescaleProgress
from penstock.errors import ConfigError, EngineError, PenstockError, WorkerLost

if TYPE_CHECKING:
    from penstock._native import LocalRun

__all__ = ["MOST_PROCESSES", "Crew", "checked_processes", "child", "spread"]

#: More processes than this on one machine are a mistake.
MOST_PROCESSES = 256
#: Workers of a run that processes join and leave (`penstock_members`).
_MOST_MEMBERS = 4_096
#: Seconds that a process has until its workers take part.
_START = 120.0
#: Seconds that the run waits for the cause when it has failed.
_GRACE = 5.0
#: Seconds that figures are waited for: by a process of its workers, and by the parent of processes.
_BUSY, _ANSWER = 0.2, 1.0
#: Seconds between asking a child to end and killing it.
_PATIENCE = 2.0
#: Seconds between two looks: at children that have ended; at bins that move.
_LOOK, _MOVING = 0.25, 0.01
#: Bins that move at once.
_STEP = 16


def checked_processes(value: Any, what: str, threads: int = 1) -> int:
    """A number of processes of so many threads that a user wrote.

    Raises
    ------
    ConfigError
        With `what` as the name of the option or call.

    Examples
    --------
    >>> checked_processes(2, "processes=2")
    2
    """
    count = whole(value, 1, MOST_PROCESSES)
    if count is None:
        raise ConfigError(f"{what}: the number of processes is an int from 1 to {MOST_PROCESSES}")
    # The worker that feeds and takes is one as well.
    if 1 + count * threads > _MOST_MEMBERS:
        raise ConfigError(
            f"{what} of {threads} threads: a run has at most {_MOST_MEMBERS - 1} workers, these are {count * threads}"
        )
    return count


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
        #: How it failed, as it told, and how it ended where it did not tell that it left.
        self.error: Exception | None = None
        self.ended: Exception | None = None
        #: How often it was asked for figures and told some, and the last of them.
        self.asked = self.told = 0
        self.figures: dict[str, Any] = {}
        #: When that was, of `time.monotonic`.
        self.heard = self.began

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
        from penstock import _mesh, _pickles

        require_interpreter()
        allow_descriptors(0)
        try:
            program = _pickles.dumps((plan, calls))
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
        #: The rescale that was asked for and has not begun, and the one under way: one of both at most.
        self._asked: LocalRescale | None = None
        self._now: LocalRescale | None = None
        #: Those that come or go for it, how many are to be started, and the moves under way with their handle.
        self._coming: list[_Member] = []
        self._going: list[_Member] = []
        self._left = 0
        self._todo: list[tuple[int, int]] = []
        self._migration: int | None = None
        #: Moves that even out loads, between two rescales.
        self._evening: int | None = None
        self._moved = self._goes_back = False
        #: Whether it ends, and by itself: nobody is there to close it.
        self._closing = self._abandoned = False
        self._process = os.getpid()
        #: Whether the run ends: what fails from now on fails because of that.
        self.ending = False
        #: Whether the thread has ended all rescales, and looks at none any more.
        self._over = False
        #: Why the run failed; how those ended, by process, of which nobody had heard that they had joined.
        self._cause: Exception | None = None
        self._early: dict[int, Exception] = {}
        self._failed = threading.Event()
        #: Guards what other threads ask for, and what children have told: moves for the log, and the loads of all that
        #: have left, added up.
        self._changed = threading.Condition()
        self._moves: list[dict[str, Any]] = []
        self._loads = Loads()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="penstock-crew", daemon=True)

    def start(self, native: LocalRun, processes: int) -> None:
        """Have so many processes join the run, and wait for them."""
        self._native = native
        self._thread.start()
        self.rescale(processes).wait()

    def rescale(self, processes: int) -> LocalRescale:
        """Ask for another number of processes.

        Raises
        ------
        EngineError
            When a rescale is under way, or the run has ended.
        ConfigError
            When this process may not open as many files.
        """
        if (more := processes - len(self.processes)) > 0:
            require_descriptors(more, f"processes={processes}")
        with self._changed:
            # A forked child has no thread.
            if self._over or not self._thread.is_alive():
                raise _over()
            under_way = self._now or self._asked
            if under_way is not None:
                raise EngineError(f"rescale({processes}): the run goes to {under_way.workers} processes just now")
            handle = LocalRescale(processes, len(self.processes), self._look_at, self._cancel)
            self._asked = handle
        self._ring()
        return handle

    @property
    def is_rescaling(self) -> bool:
        """Whether the number of processes changes, or is about to."""
        return self._now is not None or self._asked is not None

    def even_out(self, steps: Sequence[Sequence[tuple[int, int]]], max_pause_s: float) -> int:
        """Move bins between workers that are there; returns the handle of the native side. A rescale waits for the end.

        Raises
        ------
        EngineError
            When a rescale is under way, since it moves bins itself, or a worker has left.
        """
        assert self._native is not None
        with self._changed:
            if self.is_rescaling:
                raise EngineError("bins move with the rescale that is under way")
            there = {worker for member in self._members if not member.gone for worker in member.workers}
            if gone := {worker for step in steps for _, worker in step} - there:
                raise EngineError(f"bins were to move to worker {min(gone)}, which has left")
            self._evening = self._native.migrate(steps, max_pause_s)
            return self._evening

    def _cancel(self, handle: Rescale) -> None:
        assert isinstance(handle, LocalRescale)
        handle._cancelled = True
        self._ring()

    def _look_at(self, handle: Rescale) -> RescaleProgress | None:
        """How the rescale under way stands."""
        native = self._native
        if handle is not self._now or native is None:
            return None
        coming, going, todo = list(self._coming), list(self._going), list(self._todo)
        there = [member for member in self._members if not member.gone]
        come = sum(member.has_joined and member not in going for member in there)
        leaving = sum(member in going for member in there)
        before = handle.report.bins
        moved = 0
        if self._migration is not None:
            try:
                owner = {prefix: worker for prefix, _, worker in native.bins()[0]}
            except EngineError:
                return None  # it is closed
            moved = sum(owner[number] == worker for number, worker in todo)
        waits = [f"process {member.process} to {_next(member)}" for member in coming if not member.has_joined]
        if not waits:
            waits = ["bins to move"] if not self._moved else [f"process {member.process} to leave" for member in going]
        workers = len(there) - leaving if self._goes_back else handle.workers
        return RescaleProgress(workers, come, leaving, before + moved, before + len(todo), tuple(waits))

    def stats(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What all processes tell: figures as of `LocalRun.stats` with their `Loads`, and moves since the last call.

        Of those that have left there are only the loads, first, added up. One that does not answer, since a function of
        the user holds the interpreter, is as it was when it last did. ``told_s`` of a worker is when it did, of
        `time.monotonic`, or earlier where that is not known.
        """
        asked = []
        for member in list(self._members):
            if not member.has_joined or member.gone or member.ended is not None:
                continue
            if member.asked == member.told:
                member.asked += 1
                try:
                    member.pipe.send(("stats", None))
                except OSError:
                    continue  # it has ended
            asked.append((member, member.asked))
        with self._changed:
            self._changed.wait_for(lambda: all(one.gone or one.told >= number for one, number in asked), _ANSWER)
            gone: dict[str, Any] = {"workers": [], "loads": self._loads}
            figures = [gone, *(one.figures for one, _ in asked if one.figures)]
            moves, self._moves = self._moves, []
        return figures, moves

    @property
    def processes(self) -> list[int]:
        """The process ids of those that are there, by age."""
        return [member.popen.pid for member in self._members if not member.gone]

    def explain(self, error: BaseException) -> BaseException:
        """The failure of a process, where that is why the run failed."""
        if not isinstance(error, EngineError):
            return error
        early = next((why for process, why in self._early.items() if f"process {process} " in f"{error} "), None)
        if early is None and self._thread.is_alive():
            self._failed.wait(_GRACE)
        return self._cause or early or error

    def close(self) -> None:
        """End all processes."""
        self._closing = True
        self._ring()
        if self._thread.ident is not None:
            self._thread.join()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self.seats.close()
        self._wake.close()
        self._woken.close()

    def abandon(self) -> None:
        """End all processes, and the run, without waiting for it: for a run that nobody closes any more.

        In a forked child it is the parent's, and goes on there.
        """
        if os.getpid() == self._process:
            self.ending = self._abandoned = self._closing = True
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._look()
                try:
                    self._step()
                except Exception as error:
                    self._fail(error)
        finally:
            if self._abandoned and self._native is not None:
                with contextlib.suppress(Exception):  # there is nobody to tell
                    self._native.close()
            self._end_children()
            self._end_all()
            if self._abandoned:
                self._close_sockets()

    def _look(self) -> None:
        """Wait for something, and take what children tell."""
        there = [member for member in self._members if not member.gone and member.ended is None]
        # What a child has sent before its end is there by now.
        ended = [member for member in there if member.popen.poll() is not None]
        with selectors.PollSelector() as waits:
            for sock in (self._woken, *(member.socket for member in there)):
                waits.register(sock, selectors.EVENT_READ)
            moving = self._now is not None or self._asked is not None
            ready = {key.fileobj for key, _ in waits.select(0.0 if ended else _MOVING if moving else _LOOK)}
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 10)
        for member in there:
            # A process that it started may hold its socket open: then that never ends.
            open_ = member.pipe.fill() if member.socket in ready else member not in ended
            for kind, value in member.pipe.messages():
                self._hear(member, kind, value)
            if not open_ and not member.gone:
                self._lose(member)
        for member in self._members:
            if member.ended is not None and not member.gone:
                self._settle(member, member.ended)

    def _hear(self, member: _Member, kind: str, value: Any) -> None:
        if kind == "door":
            member.door = value
        elif kind == "joined":
            member.workers.append(value)
        elif kind == "failed":
            member.error = _restored(value, member.process)
        else:
            told = json.loads(value)
            with self._changed:
                self._moves += told.pop("moves")
                told["loads"] = Loads(told["loads"])
                now, before = time.monotonic(), {}
                if kind == "stale":
                    before = {worker["worker"]: worker for worker in member.figures.get("workers", ())}
                for worker in told["workers"]:
                    worker["pid"] = member.popen.pid
                    last = before.get(worker["worker"])
                    # One that told something, if not now, did so after the answer before.
                    is_same = last is not None and last["busy_ns"] == worker["busy_ns"]
                    worker["told_s"] = last["told_s"] if last and is_same else member.heard if last else now
                member.figures, member.heard = told, now
                member.told += 1
                self._changed.notify_all()
            if kind == "left":
                self._leave(member)

    def _leave(self, member: _Member) -> None:
        """Its workers have left; of what they were told last only the loads count on."""
        with self._changed:
            member.gone, told, member.figures = True, member.figures, {}
            if told:
                self._loads = self._loads.with_(told["loads"])
            self._changed.notify_all()

    def _lose(self, member: _Member) -> None:
        """It has ended, and not told that it left."""
        member.ended = member.error or member.loss()
        member.end(time.monotonic() + _PATIENCE)
        member.socket.close()

    def _settle(self, member: _Member, error: Exception) -> None:
        """What the end of a child is to the run. Of one that was told to leave that may be known later."""
        native = self._native
        if member.leaves and member.error is None and self._cause is None and native is not None:
            try:
                there = set(native.members)
            except EngineError:
                there = set()  # the run is closed
            if there.isdisjoint(member.workers):
                # Should its connections be missed yet, this is why.
                self._early[member.process] = error
                self._leave(member)
                return
            if not native.failed:
                return
        with self._changed:
            member.gone = True
            self._changed.notify_all()
        if not member.workers and self._cause is None:
            # Nothing counted on it yet, or it died before it could tell that something did: then the run ends.
            self._early[member.process] = error
            if member in self._coming:
                self._fail(error)
            return
        # Others tell only that they were stopped, and may do so before the one that knows why.
        if self._cause is None or (type(self._cause) is EngineError and type(error) is not EngineError):
            self._cause = error
        if type(error) is not EngineError or all(member.gone for member in self._members):
            self._failed.set()
            self._fail(self._cause)

    def _has_ended(self, migration: int) -> bool:
        """Whether what `even_out` began has ended."""
        assert self._native is not None
        try:
            return self._native.wait_migration(migration, 0.0) is not None
        except EngineError:
            return True  # it was refused: who asked is told

    def _step(self) -> None:
        """Go on with the rescale."""
        native = self._native
        assert native is not None
        if self._now is None:
            if self._evening is not None and not self._has_ended(self._evening):
                return
            with self._changed:
                self._evening = None
                self._now, self._asked = self._asked, None
            if self._now is None:
                return
            there = [member for member in self._members if not member.gone]
            self._going = there[self._now.workers :]
            self._moved, self._goes_back, self._left = False, False, self._now.workers - len(there)
        if self._cause is not None:
            raise EngineError(f"the run has failed: {self._cause}") from self._cause
        # A worker that waits for its outputs to be taken would let nobody in.
        native.go_on()
        if self._now._cancelled and not self._goes_back:
            self._go_back()
        for member in (*self._coming, *self._going):
            if self._is_late(member):
                raise self._late(member)
        if not self._goes_back and not self._come():
            return
        if not self._moved:
            self._moved = self._move()
            if not self._moved:
                return
            self._now._step("move_s")
        for member in self._going:
            if not member.leaves and not member.gone:
                member.leaves = True
                with contextlib.suppress(OSError):  # how it ended is heard of
                    member.pipe.send(("leave", None))
        if all(member.gone for member in self._going):
            if self._going:
                self._now._step("leave_s")
            self._finish()

    def _come(self) -> bool:
        """Start what is missing; whether all are there."""
        assert self._now is not None
        assert self._native is not None
        there = [member for member in self._members if not member.gone]
        can_be_dialled = all(member.door is not None for member in there)
        if self._left > 0 and can_be_dialled:
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
            return False
        if self._coming and can_be_dialled and self._now.report.start_s == 0.0:
            self._now._step("start_s")
        if self._left > 0 or not all(member.has_joined for member in self._coming):
            return False
        if not {worker for member in self._coming for worker in member.workers} <= set(self._native.members):
            return False
        if self._coming and self._now.report.join_s == 0.0:
            self._now._step("join_s")
        return True

    def _is_late(self, member: _Member) -> bool:
        """Whether it should have joined by now, and nothing counts on it, as far as is known."""
        return not member.gone and not member.workers and time.monotonic() > member.began + _START

    def _late(self, member: _Member) -> WorkerLost:
        what = f"process {member.process} did not join within {_START:g} s"
        return WorkerLost(what, process=member.process, exitcode=member.popen.poll())

    def _go_back(self) -> None:
        """Those that came go, and those that were to go stay, if they were not told yet."""
        assert self._native is not None
        self._goes_back, self._moved, self._left = True, False, 0
        told = [member for member in self._going if member.leaves]
        self._going = [*told, *(member for member in self._coming if not member.gone)]
        self._coming = []
        if self._migration is not None:
            self._native.cancel_migration(self._migration)

    def _move(self) -> bool:
        """Bring the bins to those that stay; whether that is done."""
        assert self._native is not None
        assert self._now is not None
        if self._migration is None:
            stay = [member for member in self._members if not member.gone and member not in self._going]
            workers = [worker for member in stay for worker in member.workers]
            bins = self._native.bins()
            owners = [worker for _, _, worker in bins[0]] if bins else []
            self._todo = spread(owners, workers or [0])
            if not self._todo:
                return True
            steps = [self._todo[at : at + _STEP] for at in range(0, len(self._todo), _STEP)]
            self._migration = self._native.migrate(steps)
        told = self._native.wait_migration(self._migration, 0.0)
        if told is None:
            return False
        self._migration, self._todo = None, []
        self._now._moved(told["moved"], max((step["paused_ns"] for step in told["steps"]), default=0) / 1e9)
        # It may have ended before it could be cut off: what is to move now follows from where bins are.
        return False

    def _fail(self, error: Exception) -> None:
        """End the rescale under way with an error: once it has gone back, where the run goes on."""
        now = self._now
        if now is None:
            return
        now._failure = now._failure or (_over() if self.ending else error)
        for member in (*self._coming, *self._going):
            if self._is_late(member):
                with self._changed:
                    member.gone = True
                member.end()
        goes_on = self._cause is None and not self.ending and not self._closing and now.report.before > 0
        if not goes_on or (self._goes_back and not isinstance(error, WorkerLost)):
            self._finish()
        elif not self._goes_back:
            self._go_back()

    def _finish(self) -> None:
        """The rescale under way has ended."""
        for member in self._members:
            if member.gone:
                member.end(time.monotonic() + _PATIENCE)
                member.socket.close()
        with self._changed:
            now, self._now = self._now, None
            self._members = [member for member in self._members if not member.gone]
        self._coming, self._going, self._todo, self._migration = [], [], [], None
        if now is not None:
            now._over_with(len(self._members), now._failure)

    def _end_all(self) -> None:
        """No rescale comes to its end any more."""
        with self._changed:
            asked = [handle for handle in (self._now, self._asked) if handle is not None]
            self._now = self._asked = None
            self._over = True
        for handle in asked:
            handle._over_with(0, _over())

    def _end_children(self) -> None:
        for member in self._members:
            with contextlib.suppress(OSError):  # it has gone
                member.limit(time.monotonic() + 0.1)
                member.pipe.send(("stop", None))
        deadline = time.monotonic() + _PATIENCE
        for member in self._members:
            member.end(deadline)
            member.socket.close()


def _over() -> EngineError:
    return EngineError("the run has ended, so its processes do not change any more")


def _next(member: _Member) -> str:
    """What a process that comes does next."""
    return "start" if member.door is None else "join"


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

    allow_descriptors(MOST_PROCESSES)  # of those that come later nobody tells it
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
        figures = crew.stats(0.0)
        # In order: the others would take a connection that just ends for a crash.
        crew.close()
        seats.close()
        return ("left", figures)
    except (EOFError, ConnectionError) as error:
        if isinstance(error, PenstockError):
            return ("failed", _packed(error))
        raise
    except BaseException as error:  # also of a function of the user's: the parent hears of it as it would of a thread
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
        with contextlib.suppress(EngineError, OSError):  # it has left, and told its last
            if kind == "leave":
                crew.leave()
            else:
                began = time.monotonic()
                told = crew.stats(_BUSY)
                # Workers that come to it do so before the time is over.
                pipe.send(("stats" if time.monotonic() - began < _BUSY else "stale", told))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _packed(error: BaseException) -> bytes:
    """A failure in the form that goes to the parent."""
    import cloudpickle

    cause = error.__cause__ or error
    text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            return bytes(cloudpickle.dumps((error, text)))
    return pickle.dumps((EngineError(f"{type(error).__name__}: {error}"), text))
