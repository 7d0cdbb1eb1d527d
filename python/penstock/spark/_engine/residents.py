"""Resident members: long-running Spark tasks, and the driver's threads that keep them running.

Owns: one single-task job for each slot that the engine's protocol wants served, submitted from a plain thread with its
own job group and no inherited properties, so that nothing that stops a query stops a resident; and resubmission with
growing pauses when a job ends. Which member serves a slot, and which is sent away, is decided by the protocol.

Invariants: a slot has one thread at most, which runs one job after the other until the slot is retired. A job is
submitted once: its thread waits for Spark's future of it, and asks again where py4j has lost the answer, since a
KeyboardInterrupt within a call of the JVM costs all threads their connections. Closing ends every job and thread.

Spark ends all attempts of a task once one of them returns. So an attempt that Spark started beside one that serves
(speculation) does not return: it keeps its slot and does nothing until Spark kills it. When the one that serves is
lost, the driver ends the whole job, spare attempts too, and submits it again.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError
from penstock.report._timeline import Change
from penstock.spark._engine.executor import Event, Executor
from penstock.spark._engine.hub import Hub, Member
from penstock.spark._engine.journal import tell
from penstock.spark._tasks.files import allow_files
from penstock.spark._tasks.memory import Hints, local_folders, staging_bytes
from penstock.spark._tasks.place import Key, Secret, executor_name
from penstock.spark._tasks.slots import executor_count

__all__ = ["ResidentTask", "Residents", "require_lasting"]

log = logging.getLogger(__name__)

#: Pauses before a resident job is submitted again, seconds: from the first, doubling, up to the second.
_PAUSE_S = (0.1, 10.0)
#: A resident that served for so long begins with the short pause again, seconds.
_STEADY_S = 30.0
#: How long closing waits for members to end by themselves before their jobs are cancelled, seconds.
_GRACE_S = 5.0
#: How long the task of a member that has ended may take to return before its job is cancelled, seconds.
_RETURN_S = 0.5
#: A member that is dismissed with a reason that begins so belongs to a second attempt of a task.
_SPARE = "another attempt serves"
#: What members are told that are sent away.
_REASONS = {
    "Spare": _SPARE,
    "Crowded": "its executor has a member, another one has none",
    "Unneeded": "it is not needed any more",
}
#: The setting with which Spark starts second attempts of jobs of a single task.
_THRESHOLD = "spark.speculation.task.duration.threshold"
#: The settings with which Spark ends Python processes that it hears nothing of.
_IDLE, _ENDS_IDLE = "spark.python.worker.idleTimeoutSeconds", "spark.python.worker.killOnIdleTimeout"
#: How often an attempt that waits to be killed looks whether somebody is left to do it, seconds.
_ORPHAN_S = 1.0
#: The property of a thread of the JVM that has the job group.
_GROUP = "spark.jobGroup.id"
#: How often in a row the end of a job is asked for in vain before it is given up, and seconds between two times.
_ASKS, _ASK_S = 20, 0.1


@dataclass(frozen=True)
class ResidentTask:
    """The function of a resident job: joins the registry and serves until it is told to end.

    Attributes
    ----------
    registry : str
        Address of the driver's registry.
    key : Key
        Lets it in, and tells it whom to let in.
    engine : str
        Name of the engine.
    slot : int
        Which resident this is.
    job : str
        The group of its job: one of a job that is over serves no slot.
    silence : float
        Seconds after which the driver gives a silent member up; it says that it lives six times in that.
    staging_memory : int or None
        Bytes of waiting rows and results in memory; None for a share of the limit on this process.
    hints : Hints
        What the driver knows of the executor's memory.
    staging_folders : tuple of str
        Where rows go that do not fit; empty for the executor's local directories.
    """

    registry: str
    key: Key
    engine: str
    slot: int
    job: str
    silence: float = 60.0
    staging_memory: int | None = None
    hints: Hints = field(default_factory=Hints)
    staging_folders: tuple[str, ...] = ()

    def __call__(self, numbers: Iterable[int]) -> Iterator[str]:
        """Serve; yields one line that says why it ended."""
        import pyarrow as pa

        from penstock import _native

        before = _thread_count()
        allow_files()
        budget = staging_bytes(self.hints) if self.staging_memory is None else self.staging_memory
        info = {
            "slot": self.slot,
            "job": self.job,
            "engine": self.engine,
            "executor": executor_name(),
            "task": _task(),
            "pid": os.getpid(),
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            "penstock": _native.version(),
        }
        folders = list(self.staging_folders) or local_folders(self.hints)
        member, refusal = self._join(info, budget, folders)
        if member is None:
            # The engine may be gone: no reason for Spark to retry or to complain. It is told by what comes out.
            _read(numbers)
            yield f"could not join: {refusal}"
            return
        how, why = member.run()
        if how == "dismissed" and why.startswith(_SPARE):
            _until_killed()
        elif _thread_count() <= before:
            _read(numbers)
        yield f"{how}: {why}" if why else how

    def _join(self, info: dict[str, Any], budget: int, folders: list[str]) -> tuple[Any, str]:
        """A native member, or None and why there is none."""
        from penstock import _native
        from penstock.errors import PenstockError

        parent = os.getppid()
        while True:
            try:
                about = json.dumps(info)
                # The key has no name here: a trace may print what has one.
                return _native.Member(self.registry, self.key.reveal(), about, self.silence, budget, folders), ""
            except PenstockError as error:
                # An attempt before this one may serve, and a result of this one would end it.
                if _attempt() == 0 or os.getppid() != parent:
                    return None, str(error)
            time.sleep(_ORPHAN_S)


def require_lasting(setting: Callable[[str, str], str | None]) -> None:
    """Refuse a Spark that ends Python processes which have said nothing for a while: every resident is one.

    Raises
    ------
    ConfigError
        Naming both settings.

    Examples
    --------
    >>> require_lasting({"spark.python.worker.killOnIdleTimeout": "true"}.get)  # there is no such time
    """
    idle = setting(_IDLE, "0") or "0"
    if (setting(_ENDS_IDLE, "false") or "").lower() == "true" and idle.strip().lstrip("0")[:1].isdigit():
        raise ConfigError(
            f"{_ENDS_IDLE}=true with {_IDLE}={idle}: Spark would end each worker of an engine, and with it the state in"
            f" its memory, whenever that time has passed; set {_ENDS_IDLE}=false"
        )


def _attempt() -> int:
    """How many attempts of this task Spark has started before, dead ones and live ones."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else int(context.attemptNumber())


def _task() -> tuple[int, int] | None:
    """Stage and number of this task, as Spark's status store has them."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None or context.stageId() is None:
        return None
    return context.stageId(), context.taskAttemptId()


def _until_killed() -> None:
    """Wait for Spark to kill this process, or for the end of the one that would do it."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_ORPHAN_S)


def _thread_count() -> int:
    """Threads of this process, those of native code included; 0 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _read(numbers: Iterable[int]) -> None:
    """Read the input of this task to its end: a Python process that has is used by Spark for other tasks.

    One that has not ends with its task. So does one with threads that have come since: a thread stuck in a user's
    function must not outlive it, and would take time from the tasks after it.
    """
    for _ in numbers:
        pass


@dataclass(eq=False)
class _Resident:
    """One resident as the driver sees it."""

    slot: int
    #: Job group of its present job: each job has one of its own, so that cancelling one cannot hit the next.
    group: str = ""
    thread: threading.Thread | None = None
    #: The one that serves, or served last.
    member: Member | None = None
    #: When one that served was lost, seconds since 1970; 0 since somebody serves again.
    lost: float = 0.0
    #: Nobody wants it any more.
    retired: threading.Event = field(default_factory=threading.Event)
    #: Attempts of the present job that wait to be killed.
    spares: int = 0
    #: How often a member was sent away to find a better executor.
    tries: int = 0
    #: Why the last job ended, and when the present one was submitted (of `time.monotonic`).
    last: str = ""
    since: float = 0.0


class Residents:
    """The residents of one engine.

    Parameters
    ----------
    sc : pyspark.SparkContext
        Where their jobs run.
    hub : Hub
        Where they register; must not have started.
    executor : Executor
        Says which slots are served, and by whom; must not have started.
    secret : Secret
        The engine's.
    name : str
        The engine's.
    silence, staging_memory, staging_folders
        For the members, see `ResidentTask`.
    changed : callable, optional
        Hears of members that were lost, when somebody else serves.
    prepare : callable, optional
        ``prepare(member, then)``: lets a member that has come make ready, then calls `then`: from then on it is there.
    loads : callable, optional
        What people call the queries whose functions such a member has still to load.
    """

    def __init__(
        self,
        sc: Any,
        hub: Hub,
        executor: Executor,
        secret: Secret,
        name: str,
        silence: float = 60.0,
        staging_memory: int | None = None,
        staging_folders: tuple[str, ...] = (),
        changed: Callable[[Change], None] = lambda change: None,
        prepare: Callable[[Member, Callable[[], None]], None] = lambda member, then: then(),
        loads: Callable[[Member], Sequence[str]] = lambda member: (),
    ) -> None:
        self._sc = sc
        self._silence = silence
        self._staging = (staging_memory, staging_folders)
        self._hub = hub
        self._executor = executor
        self._changed = changed
        self._prepare = prepare
        self._loads = loads
        self._secret = secret
        self._name = name
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._seats: dict[int, _Resident] = {}
        #: Retired seats of slots that have another by now, whose jobs have not ended.
        self._former: list[_Resident] = []
        self._judge: Callable[[Member], str | None] = lambda member: None
        hub.listen(joined=self._on_joined, lost=self._on_lost)
        executor.perform(StartResident=self._start, RetireResident=self._retire, Dismiss=self._dismiss)

    def warn(self) -> None:
        """Name what Spark does with tasks that run for long."""
        conf = self._sc.getConf()
        if conf.get("spark.speculation", "false") == "true" and conf.get(_THRESHOLD, None) is not None:
            log.warning(
                "spark.speculation with %s: Spark starts a second attempt of each resident of engine %s, which does"
                " nothing and holds a task slot as long as the engine is open",
                _THRESHOLD,
                self._name,
            )

    def examine(self, judge: Callable[[Member], str | None]) -> None:
        """Send members away that come from now on and cannot serve; `judge` says why not."""
        self._judge = judge

    def groups(self) -> list[str]:
        """Job groups of all that serve or still end. Without the lock: who was interrupted may hold it."""
        return [seat.group for seat in (*self._seats.values(), *self._former) if seat.group]

    def _all(self) -> list[_Resident]:
        with self._lock:
            return [seat for _, seat in sorted(self._seats.items()) if not seat.retired.is_set()]

    @property
    def complete(self) -> bool:
        """Whether every slot has a member; False before any is wanted."""
        seats = self._all()
        return bool(seats) and all(self._alive(seat) for seat in seats)

    @property
    def members(self) -> list[Member]:
        """The accepted members that are alive, by slot."""
        return [seat.member for seat in self._all() if seat.member is not None and self._alive(seat)]

    def missing(self) -> str:
        """What is missing, for people; empty when nothing is."""
        there = {member.slot: member for member in self._hub.members()}
        parts = []
        for seat in self._all():
            if not self._alive(seat):
                member = there.get(seat.slot)
                came = "" if member is None else _coming(member, self._loads(member))
                parts.append(f"resident {seat.slot}{_why(seat, came)}")
        return ", ".join(parts)

    def wait(self, check: Callable[[], None] | None, timeout: float) -> bool:
        """Wait until every slot has a member; see `Hub.wait_for`."""
        return self._hub.wait_for(lambda: self.complete, check, timeout)

    def begin_to_close(self) -> None:
        """From now on nobody comes, and who goes is waited for in `close`: no thread begins."""
        self._closing.set()

    def close(self) -> None:
        """End all members and jobs; waits until they have ended."""
        self.begin_to_close()
        with self._lock:
            seats = [*self._seats.values(), *self._former]
        for seat in seats:
            seat.retired.set()
        for member in self._hub.connected():
            self._hub.dismiss(member, "the engine is closing")
        for seat in seats:
            if seat.member is None or seat.member.lost is not None:
                # Nobody hears that it may go: its job waits for a task slot.
                self._cancel(seat.group)
        self._hub.wait_for(lambda: not self._hub.connected(), timeout=_GRACE_S)
        # Members that have ended give their tasks back within moments; whatever else there is gets cancelled.
        for seat in seats:
            self._join(seat, _RETURN_S)
        deadline = time.monotonic() + 2 * _GRACE_S
        while any(seat.thread is not None and seat.thread.is_alive() for seat in seats):
            for seat in seats:
                if seat.thread is not None and seat.thread.is_alive():
                    with contextlib.suppress(Exception):
                        self._sc.cancelJobGroup(seat.group)
                    self._join(seat, 0.5)
            if time.monotonic() > deadline:
                log.warning("a resident job of engine %s did not end", self._name)
                return

    def _join(self, seat: _Resident, timeout: float) -> None:
        if seat.thread is not None and seat.thread.is_alive() and seat.thread is not threading.current_thread():
            seat.thread.join(timeout)

    def _alive(self, seat: _Resident) -> bool:
        return seat.member is not None and seat.member.lost is None and not seat.member.dismissed

    # In a seat's thread

    def _reside(self, seat: _Resident) -> None:
        pause = _PAUSE_S[0]
        while not seat.retired.is_set():
            began = time.monotonic()
            tries = seat.tries
            seat.last = self._serve(seat)
            if seat.retired.is_set() or self._sc._jsc is None:
                return
            elsewhere = seat.tries > tries  # sent to look for a better place
            if not elsewhere:
                self._tell(logging.WARNING, "resident ended", seat.slot, None, reason=seat.last)
            if elsewhere or time.monotonic() - began > _STEADY_S:
                pause = _PAUSE_S[0]
            self._hub.wake()
            seat.retired.wait(pause)
            pause = min(2 * pause, _PAUSE_S[1])

    def _task(self, seat: _Resident) -> ResidentTask:
        hints = Hints.of(self._sc.getConf().get, self._sc.master or "local")
        memory, folders = self._staging
        return ResidentTask(
            self._hub.address,
            self._secret.member(seat.slot),
            self._name,
            seat.slot,
            seat.group,
            self._silence,
            memory,
            hints,
            folders,
        )

    def _serve(self, seat: _Resident) -> str:
        """Run one resident job to its end; says why it ended."""
        seat.since = time.monotonic()
        group = f"penstock-{self._name}-{seat.slot}-{os.urandom(4).hex()}"
        with self._lock:
            seat.spares, seat.group = 0, group
        try:
            task = self._task(seat)
            rows = self._sc.parallelize([seat.slot], 1).mapPartitions(task)
            return ", ".join(self._outcome(rows, self._submit(seat, rows._jrdd))) or "no reason"
        except Exception as error:
            if not _is_answer(error):
                # What was submitted may run, and nobody waits for it any more.
                self._cancel(seat.group)
            return _short(error)

    def _submit(self, seat: _Resident, jobs: Any) -> Any:
        """Submit one job, and do not wait; Spark's future of it.

        py4j repeats a call whose connection breaks, by way of another one, and takes another one where it has been
        closed meanwhile. That is another thread of the JVM, without the job group of this one: a job may run twice
        then, or could not be cancelled, and has only just begun.
        """
        # This thread is the engine's own: its properties touch no query. A job takes a copy of them along.
        self._sc.setJobGroup(seat.group, f"penstock {self._name}: resident {seat.slot}", False)
        future = jobs.collectAsync()
        if seat.retired.is_set():
            # Who retired it may have cancelled the jobs of its group before there was this one.
            future.cancel(True)
        if self._sc.getLocalProperty(_GROUP) != seat.group:
            future.cancel(True)
            raise ConnectionError("the connection to Spark broke while its job was submitted")
        return future

    def _outcome(self, rows: Any, future: Any) -> list[str]:
        """Wait for the end of a job; what its task said."""
        asks = 0
        while True:
            began = time.monotonic()
            try:
                return _lines(rows, future.get())
            except Exception as error:
                asks = 1 if time.monotonic() - began > 1.0 else asks + 1
                if _is_answer(error) or asks == _ASKS or self._sc._jsc is None:
                    raise
                log.debug("the end of a resident job of engine %s is asked for again: %s", self._name, error)
            time.sleep(_ASK_S)

    # In the hub's thread

    def _on_joined(self, member: Member) -> None:
        if self._closing.is_set():
            self._hub.dismiss(member, "the engine is closing")
            return
        with self._lock:
            seat = self._seats.get(member.slot)
        # One of another release tells no job, and is for the judge.
        if seat is None or seat.retired.is_set() or member.info.get("job", seat.group) != seat.group:
            # Its job was cancelled as its task began.
            self._hub.dismiss(member, _REASONS["Unneeded"])
            return
        unfit = self._judge(member)
        if unfit is not None:
            self._tell(logging.ERROR, "member sent away", member.slot, member, reason=unfit)
            self._hub.dismiss(member, _SPARE if self._is_beside(member) else unfit)
            return
        try:
            executors = executor_count(self._sc)
        except Exception:
            executors = 0
        told = {"slot": member.slot, "member": member.id, "executor": member.executor, "executors": executors}

        def come() -> None:
            if member.dismissed:
                return
            self._executor.post({"MemberUp": told}, first=lambda effects: self._seated(member, effects))

        self._prepare(member, come)
        if loads := self._loads(member):
            self._tell(logging.INFO, "member loads", member.slot, member, reason=f"the functions of {', '.join(loads)}")

    def _is_beside(self, member: Member) -> bool:
        """Whether a member belongs to a second attempt, whose return would end the one that serves."""
        if all(other is member or other.slot != member.slot for other in self._hub.members()):
            return False
        with self._lock:
            seat = self._seats.get(member.slot)
            if seat is not None:
                seat.spares += 1
        return True

    def _on_lost(self, member: Member) -> None:
        if self._closing.is_set():
            return
        with self._lock:
            seat = next((one for one in (*self._seats.values(), *self._former) if one.member is member), None)
        if seat is None:
            return
        if not member.dismissed:
            seat.lost = time.time()
        elif member.hung and seat.retired.is_set():
            # It does not read that it may go.
            self._cancel_aside(seat, seat.group)

    # In the executor's thread

    def _start(self, facts: Mapping[str, Any]) -> None:
        """Keep a resident running in a slot."""
        with self._lock:
            seat = self._seats.get(facts["slot"])
            if seat is None or seat.retired.is_set():
                living = [*self._former, *([] if seat is None else [seat])]
                self._former = [one for one in living if one.thread is not None and one.thread.is_alive()]
                seat = self._seats[facts["slot"]] = _Resident(facts["slot"])
        if self._closing.is_set():
            return
        if seat.thread is None:
            name = f"penstock-resident-{self._name}-{seat.slot}"
            seat.thread = threading.Thread(target=self._reside, args=(seat,), name=name, daemon=True)
            self._executor.begin(seat.thread)
            return
        gone, seat.member = seat.member, None
        with self._lock:
            spares, group = seat.spares, seat.group
        if spares or (gone is not None and gone.hung):
            # Its process, or one that waits beside it, still holds a task slot, and Spark starts no other while it
            # does. Spark kills it, however it hangs, and the job is submitted again.
            self._cancel_aside(seat, group)

    def _cancel_aside(self, seat: _Resident, group: str) -> None:
        name = f"penstock-cancel-{self._name}-{seat.slot}"
        self._executor.begin(threading.Thread(target=self._cancel, args=(group,), name=name, daemon=True))

    def _retire(self, facts: Mapping[str, Any]) -> None:
        """End the resident of a slot, and run none."""
        with self._lock:
            seat = self._seats[facts["slot"]]
        seat.retired.set()
        member = seat.member
        # Also who still loads functions, and those beside: the slot may be another's soon.
        for one in self._hub.members():
            if one.slot == seat.slot:
                self._hub.dismiss(one, _REASONS["Unneeded"])
        if self._closing.is_set():
            return
        if member is None or member.lost is not None or seat.spares:
            # Nobody serves it yet, and its job waits for a task slot; or who serves or waits beside hears of nothing.
            self._cancel_aside(seat, seat.group)
            return
        name = f"penstock-end-{self._name}-{seat.slot}"
        self._executor.begin(threading.Thread(target=self._expect_end, args=(seat,), name=name, daemon=True))

    def _expect_end(self, seat: _Resident) -> None:
        """Cancel the job of a member that was told to go and has not: a function that hangs keeps its process."""
        self._join(seat, self._silence)
        if seat.thread is None or not seat.thread.is_alive() or self._closing.is_set():
            return
        reason = f"it was told to go {self._silence:g} s ago, and still holds its task slot"
        self._tell(logging.WARNING, "member cancelled", seat.slot, seat.member, reason=reason)
        self._cancel(seat.group)

    def _dismiss(self, facts: Mapping[str, Any]) -> None:
        """Send a member away."""
        member, why = self._hub.known(facts["member"]), facts["why"]
        with self._lock:
            seat = self._seats.get(member.slot)
        if seat is not None and not member.dismissed:  # else it may be of the resident before, and goes
            seat.spares += why == "Spare"
            seat.tries += why == "Crowded"
        self._hub.dismiss(member, _REASONS[why])

    def _seated(self, member: Member, effects: Sequence[Event]) -> None:
        """The protocol has heard of a member, and may send it away."""
        away = [one["Dismiss"]["member"] for one in effects if isinstance(one, Mapping) and "Dismiss" in one]
        if member.dismissed or member.id in away:
            return
        with self._lock:
            seat = self._seats[member.slot]
        if seat.lost:
            there = len(self._all())
            self._changed(Change(seat.lost, time.time(), "lost", there, there))
        seat.member, seat.lost = member, 0.0
        self._hub.wake()

    def _cancel(self, group: str) -> None:
        with contextlib.suppress(Exception):
            self._sc.cancelJobGroup(group)

    def _tell(self, level: int, event: str, slot: int, member: Member | None, **facts: Any) -> None:
        """A line of a resident, with how many serve; and of the member that it is, where it is one."""
        about: dict[str, Any] = {"members": len(self.members), "resident": slot}
        if member is not None:
            about |= {"member": member.id, "pid": member.pid, "executor": member.executor}
        tell(log, level, event, engine=self._name, **about, **facts)


def _coming(member: Member, loads: Sequence[str]) -> str:
    """What a member does that has come and is not there yet."""
    there = f"process {member.pid} on {member.host} is there"
    waited = time.monotonic() - member.joined
    return f"{there}, and has been loading the functions of {', '.join(loads)} for {waited:.0f} s" if loads else there


def _why(seat: _Resident, came: str) -> str:
    """What is known of who is missing: that it came, or for how long Spark had no slot; and why the last one ended."""
    waited = time.monotonic() - seat.since if seat.since else 0.0
    parts = [came] if came else [f"no task slot for {waited:.0f} s"] if waited >= 1.0 else []
    parts += [f"last one: {seat.last}"] if seat.last else []
    return f" ({', '.join(parts)})" if parts else ""


def _is_answer(error: BaseException) -> bool:
    """Whether the JVM has raised it: all else that py4j raises is of the way there."""
    return hasattr(error, "java_exception")


def _lines(rows: Any, found: Any) -> list[str]:
    """What the task of an RDD has yielded, as its `collect` reads it: `found` has the batches that Python has written.

    Each element is asked for by its number: a call that may be repeated, unlike those of an iterator.
    """
    batches = [bytes(found.get(at)) for at in range(found.size())]
    stream = io.BytesIO(b"".join(len(batch).to_bytes(4, "big") + batch for batch in batches))
    return list(rows._jrdd_deserializer.load_stream(stream))


def _short(error: BaseException) -> str:
    r"""The telling line of an exception, which Spark wraps in pages of traces.

    Examples
    --------
    >>> text = "An error occurred while calling z:o.collect.\n: org.SparkException: Job aborted: Lost task 0 (a host): "
    >>> _short(Exception(text + "org.PythonWorkerException: the process was terminated\n\tat org.Runner"))
    'the process was terminated'
    >>> future = "calling o7.get.\n: java.ExecutionException: Exception thrown by job\n\tat org.Future.get\nCaused by: "
    >>> _short(Exception(future + "org.SparkException: Job 3 cancelled part of cancelled job group one"))
    'Job 3 cancelled part of cancelled job group one'
    """
    try:
        text = str(error)
    except Exception:  # one of the JVM is asked there for its text
        text = ""
    # A future wraps once more what its job has met.
    text = text.partition("Exception thrown by job")[2].partition("Caused by: ")[2] or text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line and not line.startswith(("at ", "File "))]
    # Without one of Python's, what a task has met stands behind all that wraps it.
    java = [line.rpartition("Exception: ")[2] for line in lines if "Exception: " in line]
    text = telling[-1] if telling else (java or lines or [type(error).__name__])[0]
    return text if len(text) <= 300 else text[:297] + "..."
