"""Resident tasks and the driver's view of them, against a registry and processes of their own, without a JVM."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

import penstock as pk
from engine_support import NoThreads, refuses, wait_for
from penstock.errors import EngineError
from penstock.spark._engine import handles, residents
from penstock.spark._engine.calls import Calls
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.hub import CHECK_S, Hub, Member
from penstock.spark._engine.query import Query
from penstock.spark._engine.residents import Residents
from penstock.spark._engine.startup import apart
from penstock.spark._tasks.place import Secret

pytest.importorskip("pyspark")

#: What a Python worker of Spark does with an attempt of a task, as far as the task can tell.
ATTEMPT = """
import pickle, sys
from pyspark import TaskContext
task = pickle.load(sys.stdin.buffer)
TaskContext._getOrCreate()._attemptNumber = int(sys.argv[1])
for line in task(iter([0])):
    print("returned", line, flush=True)
"""

#: An attempt that does not wait to be killed returns within milliseconds once it has been sent away, seconds.
LONG = 3.0


class Job:
    """A job of one task: attempts in processes. The first that returns ends the others, as Spark does it."""

    def __init__(self, task: Callable[..., Any], group: str) -> None:
        self.group, self.pickled = group, cloudpickle.dumps(task)
        self.attempts: list[subprocess.Popen[bytes]] = []
        self.over = threading.Event()
        self.said: list[str] = []
        self.error = ""

    def attempt(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ATTEMPT, str(len(self.attempts))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.attempts.append(process)
        assert process.stdin is not None
        process.stdin.write(self.pickled)
        process.stdin.close()
        threading.Thread(target=self._wait, args=(process,), daemon=True).start()
        return process

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.read().decode()
        if process.wait() == 0 and not self.over.is_set():
            self.said = said.splitlines()
            self.end()

    def end(self, error: str = "") -> None:
        self.error = self.error or error
        self.over.set()
        for attempt in self.attempts:
            with contextlib.suppress(ProcessLookupError):
                attempt.kill()


class JobFailed(Exception):
    """As py4j raises what the JVM has raised."""

    java_exception = None


class Rows:
    """An RDD of a single job; also its side in the JVM, Spark's future of the job, and what that gives."""

    def __init__(self, context: Context, task: Callable[..., Any]) -> None:
        from pyspark.serializers import AutoBatchedSerializer, CPickleSerializer

        self._context, self._task = context, task
        self._jrdd = self
        self._jrdd_deserializer = AutoBatchedSerializer(CPickleSerializer())

    def collectAsync(self) -> Rows:
        self._job = Job(self._task, self._context.group.name)
        self._context.jobs.append(self._job)
        self._job.attempt()
        return self

    def cancel(self, interrupt: bool) -> None:
        self._job.end("cancelled")

    def get(self, at: int | None = None) -> Any:
        if at is not None:
            return bytearray(pickle.dumps(self._job.said))
        while not self._job.over.wait(0.02):
            if self._context.breaks:
                self._context.breaks -= 1
                raise ConnectionError("Answer from Java side is empty")
        if self._job.error:
            raise JobFailed(self._job.error)
        return self

    def size(self) -> int:
        return 1


class Context:
    """As much of a SparkContext as residents use."""

    master = "spark://test:7077"
    _jsc = object()

    def __init__(self, **settings: str) -> None:
        self.settings = settings
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.group = threading.local()
        #: How often the connection of who waits is yet to break, and that of who submits.
        self.breaks = self.forgets = 0

    def getConf(self) -> Any:
        return self.settings

    def setJobGroup(self, group: str, description: str, interrupt: bool) -> None:
        self.group.name = group

    def getLocalProperty(self, name: str) -> str | None:
        assert name == "spark.jobGroup.id"
        if self.forgets:
            self.forgets -= 1
            return None
        return str(self.group.name)

    def cancelJobGroup(self, group: str) -> None:
        self.cancelled.append(group)
        for job in self.jobs:
            if job.group == group:
                job.end("cancelled")

    def parallelize(self, numbers: list[int], pieces: int) -> Context:
        return self

    def mapPartitions(self, task: Callable[..., Any]) -> Rows:
        return Rows(self, task)

    def stop(self) -> None:
        for job in self.jobs:
            job.end("stopped")
            for attempt in job.attempts:
                attempt.wait(30)


class Engine:
    """One resident with its registry, and everybody who ever joined."""

    def __init__(self, context: Context, workers: int = 1) -> None:
        secret = Secret.random()
        self.context = context
        self.hub = Hub("127.0.0.1", 0, None, secret, "residents", 20.0)
        self.joined: list[Member] = []
        self.executor = Executor("residents", {"workers": workers})
        self.residents = Residents(context, self.hub, self.executor, secret, "residents", 20.0, 1 << 20)
        self.hub.listen(joined=self.joined.append, lost=self._lost)
        self.hub.start()
        self.executor.start()
        wait_for(lambda: self.residents.complete, what="the first attempt")

    def _lost(self, member: Member) -> None:
        self.executor.post({"MemberLost": {"member": member.id, "reason": str(member.lost)}})

    @property
    def serving(self) -> Member:
        [member] = self.residents.members
        return member


@pytest.fixture
def engine() -> Iterator[Engine]:
    context = Context()
    engine = Engine(context)
    try:
        yield engine
    finally:
        try:
            engine.residents.close()
        finally:
            engine.executor.close()
            engine.hub.close()
            context.stop()


@pytest.mark.parametrize(
    ("members", "refused"),
    [
        ({"a/1/7": "127.0.0.1:5", "b/1/7": "10.0.0.2:5"}, ["a (JVM 7)"]),
        ({"a/1/7": "[::1]:5", "b/1/8": "127.0.1.1:6"}, ["a (JVM 7)", "b (JVM 8)"]),
        ({"a/1/7": "127.0.0.1:5", "a/1/8": "127.0.0.1:6"}, []),
        ({"a/1/7": "10.0.0.1:5", "b/1/8": "[fe80::1%2]:6"}, []),
    ],
)
def test_data_ports_that_other_machines_cannot_reach_are_refused(members: dict[str, str], refused: list[str]) -> None:
    """As where the name of the driver is a loopback address on its own machine."""
    there = [Member(slot, slot, executor, address, 9, {}) for slot, (executor, address) in enumerate(members.items())]
    findings = apart(there, "driver:9")
    assert [one.executor for one in findings] == refused
    assert all("cannot reach" in one.what and "spark.driver.host" in one.fix for one in findings)


@pytest.fixture
def few_files() -> Iterator[None]:
    """Processes that begin now have the soft limit on open files that is usual."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of other processes are told by Linux")
def test_a_resident_raises_its_limit_on_open_files(few_files: None, engine: Engine) -> None:
    """Each query takes three for each worker beside it."""
    soft, hard = resource.prlimit(engine.serving.pid, resource.RLIMIT_NOFILE)
    assert soft == hard or soft > 3 * 4_096


def spare(engine: Engine) -> subprocess.Popen[bytes]:
    """A second attempt that has been told that it is one."""
    [job] = engine.context.jobs
    process = job.attempt()
    wait_for(lambda: len(engine.joined) == 2, what="the second attempt")
    wait_for(lambda: engine.joined[1].lost is not None, what="the dismissal of the second attempt")
    return process


def test_who_is_told_that_a_rescale_is_done_finds_all_members(engine: Engine) -> None:
    seen = list[int]()
    engine.executor.perform(Rescaled=lambda facts: seen.append(len(engine.residents.members)))
    engine.executor.ask({"Rescale": {"handle": 1, "workers": 2, "free": 1}})
    wait_for(lambda: seen, what="the rescale is done")
    assert seen == [2]


def test_a_moment_without_threads_costs_time_and_no_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = NoThreads(monkeypatch, "penstock-resident")
    engine.executor.ask({"Rescale": {"handle": 1, "workers": 2, "free": 1}})
    wait_for(lambda: len(threads.asked) >= 2, what="the second time that it is asked")
    assert len(engine.residents.members) == 1
    threads.none = False
    wait_for(lambda: len(engine.residents.members) == 2, what="the second resident")
    assert "waits for a thread, penstock-resident-residents-1: the system gives no more" in caplog.text


def test_an_engine_closes_with_a_resident_that_got_no_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = NoThreads(monkeypatch, "penstock-resident")
    engine.executor.ask({"Rescale": {"handle": 1, "workers": 2, "free": 1}})
    assert threads.asked
    engine.residents.begin_to_close()
    engine.executor.close()
    engine.residents.close()
    assert engine.executor.closed


def test_jobs_that_wait_for_a_slot_are_cancelled_before_anybody_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = Context()
    monkeypatch.setattr(Job, "attempt", lambda self: None)  # no slot is free
    hub = Hub("127.0.0.1", 0, None, Secret.random(), "waits", 20.0)
    executor = Executor("waits", {"workers": 3})
    residents = Residents(context, hub, executor, Secret.random(), "waits", 20.0, 1 << 20)
    hub.start()
    executor.start()
    wait_for(lambda: len(context.jobs) == 3, what="the jobs")
    joined: list[int] = []
    monkeypatch.setattr(residents, "_join", lambda seat, timeout: joined.append(len(context.cancelled)))
    residents.begin_to_close()
    executor.close()
    residents.close()
    hub.close()
    assert joined[0] == 3, "all at once"


def test_a_resident_comes_though_the_connection_to_spark_broke_before_its_job(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt within a call of the JVM costs all threads theirs."""
    left = [None]

    def conf() -> Any:
        if left:
            left.pop()
            raise ConnectionError("Answer from Java side is empty")
        return {}

    monkeypatch.setattr(engine.context, "getConf", conf)
    engine.executor.ask({"Rescale": {"handle": 1, "workers": 2, "free": 1}})
    wait_for(lambda: len(engine.residents.members) == 2, what="the second resident")
    assert left == []


def test_a_second_attempt_waits_to_be_killed_and_the_first_serves_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark takes the return of either attempt for the end of the task and kills the other one."""
    # On a busy machine a process may take longer to end; whoever closes an engine then cancels its job.
    monkeypatch.setattr(residents, "_RETURN_S", 30.0)
    first, [job] = engine.serving, engine.context.jobs
    process = spare(engine)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(LONG)
    assert engine.serving is first and first.lost is None
    assert not job.over.is_set() and engine.context.cancelled == []
    engine.residents.close()
    assert job.said == ["returned dismissed: the engine is closing"]
    assert process.wait(30) == -signal.SIGKILL


def test_a_job_outlives_the_connections_of_who_waits_for_it(engine: Engine) -> None:
    first, [job] = engine.serving, engine.context.jobs
    engine.context.breaks = 3
    wait_for(lambda: not engine.context.breaks, what="the last connection that breaks")
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.lost is not None, what="the loss of the first attempt")
    assert engine.context.jobs == [job] and engine.context.cancelled == []
    # Its end is heard of as before.
    job.end("its process has gone")
    wait_for(lambda: engine.residents.complete, what="the replacement")
    assert len(engine.context.jobs) == 2


def test_a_job_that_may_run_twice_is_ended_and_submitted_again() -> None:
    context = Context()
    context.forgets = 1
    engine = Engine(context)
    try:
        first, second = context.jobs
        assert first.error == "cancelled" and context.cancelled == [first.group]
        assert second.group != first.group and not second.over.is_set()
    finally:
        engine.residents.close()
        engine.executor.close()
        engine.hub.close()
        context.stop()


@pytest.mark.parametrize("retired", [False, True])
def test_a_job_of_a_slot_that_was_given_up_meanwhile_is_ended(engine: Engine, retired: bool) -> None:
    """Who gave it up has cancelled its group before there was a job of it."""

    class Jobs:
        cancelled = False

        def collectAsync(self) -> Jobs:
            if retired:
                seat.retired.set()
            return self

        def cancel(self, interrupt: bool) -> None:
            self.cancelled = True

    seat = copy.copy(engine.residents._seats[0])
    seat.retired, seat.group = threading.Event(), "another"
    assert engine.residents._submit(seat, Jobs()).cancelled == retired


def test_a_second_attempt_that_does_not_fit_does_not_end_the_first(engine: Engine) -> None:
    """It is on an executor with another release, and would be sent away were it alone."""
    first, [job] = engine.serving, engine.context.jobs
    engine.residents.examine(lambda member: "penstock 0.0.9, the driver has 0.1.0")
    process = spare(engine)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(LONG)
    assert engine.serving is first and first.lost is None and not job.over.is_set()
    # Nor does it keep the place when the first one dies.
    engine.residents.examine(lambda member: None)
    os.kill(first.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    wait_for(lambda: engine.residents.complete, what="the replacement")
    assert engine.context.cancelled == [job.group] and engine.serving.id > engine.joined[1].id


def test_when_the_first_attempt_dies_the_second_does_not_keep_the_place(engine: Engine) -> None:
    """Spark starts no third attempt beside one that runs, so the driver ends the job and submits it again."""
    first, [job] = engine.serving, engine.context.jobs
    process = spare(engine)
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.lost is not None, what="the loss of the first attempt")
    assert process.wait(30) == -signal.SIGKILL
    assert engine.context.cancelled == [job.group]
    wait_for(lambda: engine.residents.complete, what="the replacement")
    assert engine.serving.id > engine.joined[1].id
    assert len({job.group for job in engine.context.jobs}) == 2, "cancelling one job must not hit the next"


def test_a_member_that_was_told_to_go_and_does_not_is_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process is still busy with a function of a user's: Spark would have no slot for others as long as that is."""
    monkeypatch.setattr(engine.residents, "_silence", 0.2)
    first, [job] = engine.serving, engine.context.jobs
    # The process as it is when its function never ends: it is there, and takes nothing from the job.
    monkeypatch.setattr(Job, "_wait", lambda job, process: None)
    monkeypatch.setattr(sys.modules[__name__], "ATTEMPT", ATTEMPT + "import time\ntime.sleep(3600)\n")
    job.end("its process has gone")
    wait_for(lambda: first.lost is not None and engine.residents.complete, what="the replacement, which hangs")
    hung, going = engine.context.jobs[-1], engine.serving
    # The protocol has not asked for it, and wants the slot served: another member may join before the line is written.
    engine.residents._retire({"slot": 0})
    wait_for(lambda: hung.over.is_set(), what="the end of its job")
    assert engine.context.cancelled == [hung.group]
    [line] = [vars(record) for record in caplog.records if getattr(record, "event", "") == "member cancelled"]
    assert line["reason"] == "it was told to go 0.2 s ago, and still holds its task slot"
    assert (line["resident"], line["member"]) == (0, going.id)


def test_a_member_that_goes_when_it_is_told_is_not_cancelled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.residents, "_silence", 30.0)
    [job] = engine.context.jobs
    engine.residents._retire({"slot": 0})
    wait_for(lambda: job.over.is_set(), what="the end of its job")
    assert job.said == ["returned dismissed: it is not needed any more"]
    assert engine.context.cancelled == []


def test_a_second_attempt_that_loads_goes_with_the_one_that_serves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once one of the two returns their job has ended: neither is waited for, or cancelled."""
    monkeypatch.setattr(engine.residents, "_silence", 30.0)
    monkeypatch.setattr(engine.residents, "_prepare", lambda member, then: None)
    [job] = engine.context.jobs
    job.attempt()
    wait_for(lambda: len(engine.joined) == 2, what="the second attempt, which loads")
    engine.residents._retire({"slot": 0})
    assert all(member.dismissed for member in engine.joined)
    wait_for(lambda: job.over.is_set(), what="the end of its job")
    assert engine.context.cancelled == []


def test_who_loads_for_a_slot_that_is_given_up_does_not_serve_the_next_resident_of_that_number(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job was cancelled, and the bins that it got by then were lost with it."""
    loads: list[tuple[Member, Callable[[], None]]] = []
    monkeypatch.setattr(engine.residents, "_prepare", lambda member, then: loads.append((member, then)))
    monkeypatch.setattr(engine.context, "cancelJobGroup", lambda group: None)  # it takes its time
    engine.executor.ask({"Rescale": {"handle": 1, "workers": 2, "free": 1}})
    wait_for(lambda: loads, what="the second resident loads")
    engine.residents._retire({"slot": 1})
    engine.residents._start({"slot": 1})
    wait_for(lambda: len(loads) == 2, what="the next one loads")
    (first, there), (second, comes) = loads
    there()
    comes()
    wait_for(lambda: engine.residents.complete, what="it is there")
    assert engine.residents.members[1] is second and first.dismissed


def test_who_comes_of_a_job_that_is_over_serves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task began just as the job was cancelled."""
    first, [job], attempt = engine.serving, engine.context.jobs, Job.attempt
    monkeypatch.setattr(Job, "attempt", lambda self: None)  # no slot is free
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.lost is not None, what="the loss of the first")
    job.end("cancelled")
    wait_for(lambda: len(engine.context.jobs) == 2, what="the next job")
    late = attempt(job)
    wait_for(lambda: len(engine.joined) == 2, what="one of the job before")
    assert late.wait(30) == 0, "it holds no task slot"
    assert not engine.residents.complete
    attempt(engine.context.jobs[1])
    wait_for(lambda: engine.residents.complete, what="the replacement")
    assert engine.serving is engine.joined[2] and engine.context.cancelled == []


def test_who_waits_beside_one_that_was_sent_away_as_it_came_does_not_wait_for_ever(engine: Engine) -> None:
    """The protocol took it for the member of the slot, and nobody else did."""
    first, [job] = engine.serving, engine.context.jobs
    process = spare(engine)
    engine.residents._seats[0].member = None
    os.kill(first.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    wait_for(lambda: engine.residents.complete, what="the replacement")
    assert engine.context.cancelled == [job.group] and engine.serving.id > engine.joined[1].id


def test_a_second_attempt_that_cannot_join_does_not_end_the_first(engine: Engine) -> None:
    """Nor does one that comes while the registry cannot be reached."""
    first, [job] = engine.serving, engine.context.jobs
    task = cloudpickle.loads(job.pickled)
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen([sys.executable, "-c", ATTEMPT, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdin is not None
        process.stdin.write(cloudpickle.dumps(type(task)(**{**vars(task), "registry": "127.0.0.1:1"})))
        process.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * LONG)
    assert engine.serving is first


def test_a_first_attempt_that_cannot_join_says_why(engine: Engine) -> None:
    [job] = engine.context.jobs
    task = cloudpickle.loads(job.pickled)
    [line] = list(type(task)(**{**vars(task), "registry": "127.0.0.1:1"})(iter([0])))
    assert line.startswith("could not join: connect to 127.0.0.1:1: ")


def test_the_slots_that_speculation_takes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    threshold = "spark.speculation.task.duration.threshold"
    for settings, warned in (
        ({}, 0),
        ({"spark.speculation": "true"}, 0),
        ({"spark.speculation": "true", threshold: "1s"}, 1),
    ):
        caplog.clear()
        context = Context(**settings)
        hub = Hub("127.0.0.1", 0, None, Secret.random(), "speculative", 20.0)
        try:
            with caplog.at_level(logging.WARNING, "penstock.spark._engine.residents"):
                executor = Executor("speculative", {})
                Residents(context, hub, executor, Secret.random(), "speculative").warn()
            told = [record.getMessage() for record in caplog.records if record.name == residents.__name__]
            assert [threshold in text for text in told] == [True] * warned
        finally:
            hub.close()


def ended(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """The lines that tell of jobs that have ended."""
    return [vars(record) for record in caplog.records if getattr(record, "event", "") == "resident ended"]


@pytest.mark.parametrize("steady", [0.0, 3_600.0])
def test_a_job_that_ends_is_told_with_its_reason(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, steady: float
) -> None:
    """However long it ran."""
    monkeypatch.setattr(residents, "_STEADY_S", steady)
    first, [job] = engine.serving, engine.context.jobs
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.lost is not None, what="the loss of the first")
    job.end("its process has gone")
    wait_for(lambda: len(engine.context.jobs) == 2 and engine.residents.complete, what="the replacement")
    [line] = ended(caplog)
    assert (line["levelname"], line["engine"], line["resident"], line["members"]) == ("WARNING", "residents", 0, 0)
    assert line["reason"] == "its process has gone"


def test_looking_for_a_better_place_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All processes of this test have one executor; while Spark has another one, a second member is sent away."""
    there = 1
    monkeypatch.setattr(residents, "executor_count", lambda sc: there)
    context = Context()
    engine = Engine(context, workers=2)

    def jobs_of(slot: int) -> list[Job]:
        return [job for job in context.jobs if f"-residents-{slot}-" in job.group]

    try:
        caplog.set_level(logging.WARNING)
        for _ in range(2):
            there, before = 2, len(jobs_of(1))
            os.kill(engine.residents.members[1].pid, signal.SIGKILL)
            wait_for(lambda: not engine.residents.complete, what="the loss of a member")
            jobs_of(1)[-1].attempt()
            # Submitted again after the shortest pause.
            wait_for(lambda least=before + 1: len(jobs_of(1)) >= least, what="other places")
            there = 1
            wait_for(lambda: engine.residents.complete, what="a place that is good enough")
        assert ended(caplog) == []
    finally:
        engine.residents.close()
        engine.executor.close()
        engine.hub.close()
        context.stop()


def test_a_member_that_does_not_fit_is_sent_away_until_one_does(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Executors that come later may have another release, and no start is there to look at them."""
    first = engine.serving
    judged: list[int] = []

    def judge(member: Member) -> str | None:
        judged.append(member.id)
        return "penstock 0.0.9, the driver has 0.1.0" if len(judged) == 1 else None

    engine.residents.examine(judge)
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.lost is not None, what="the loss of the first")
    engine.context.jobs[0].end("its process has gone")
    wait_for(lambda: len(judged) == 2 and engine.residents.complete, what="one that fits")
    assert engine.serving.id == judged[1]
    wait_for(lambda: engine.joined[1].lost is not None, what="the end of the other")
    [line] = [record for record in caplog.records if getattr(record, "event", "") == "member sent away"]
    assert line.levelname == "ERROR" and line.member == judged[0] and "0.0.9" in line.reason  # type: ignore[attr-defined]
    assert line.members == 0, "nobody serves meanwhile"  # type: ignore[attr-defined]


def test_who_is_there_and_loads_functions_is_not_told_as_one_that_has_no_slot(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    loaded: list[Callable[[], None]] = []
    monkeypatch.setattr(engine.residents, "_prepare", lambda member, then: loaded.append(then))
    monkeypatch.setattr(engine.residents, "_loads", lambda member: ["bids", "words"])
    engine.executor.ask({"Rescale": {"handle": 1, "workers": 2, "free": 1}})
    wait_for(lambda: loaded, what="the second resident loads")
    member = engine.joined[-1]
    monkeypatch.setattr(engine.residents._seats[1], "since", 1.0)  # its job was submitted long ago
    who = re.escape(f"process {member.pid} on {member.host}")
    told = rf"resident 1 \({who} is there, and has been loading the functions of bids, words for \d+ s\)"
    assert re.fullmatch(told, engine.residents.missing())
    [line] = [vars(record) for record in caplog.records if getattr(record, "event", "") == "member loads"]
    assert (line["resident"], line["member"], line["reason"]) == (1, member.id, "the functions of bids, words")
    loaded[0]()
    wait_for(lambda: engine.residents.complete, what="it is there")
    assert engine.residents.missing() == ""


def test_a_member_loads_functions_until_it_has_all() -> None:
    hooks: list[Any] = []
    hub: Any = SimpleNamespace(
        call=lambda member, asked, functions, hook: hooks.append(hook), listen=lambda **listeners: None
    )
    programs: Any = {"a": SimpleNamespace(plan="{}", calls=b""), "b": SimpleNamespace(plan="{}", calls=b"")}
    executor: Any = SimpleNamespace(perform=lambda **acts: None)
    nobody: Any = None
    calls = Calls(hub, executor, nobody, lambda: programs, nobody, nobody, 8, 1)
    member, there = Member(1, 0, "host/1/7", "127.0.0.1:5", 9, {}), list[Member]()
    assert calls.loading(member) == []
    calls.prepare(member, lambda: there.append(member))
    assert calls.loading(member) == ["a", "b"]
    hooks[0](None)
    assert calls.loading(member) == ["b"] and not there
    hooks[1](None)
    assert calls.loading(member) == [] and there == [member]


def test_a_wait_asks_whether_it_has_a_reason_no_more_often_for_members_that_answer(engine: Engine) -> None:
    """A check may ask the JVM, several times."""
    asked, looks, over = [time.monotonic()], itertools.count(), threading.Event()

    def wake() -> None:
        while not over.wait(0.001):
            engine.hub.wake()

    wakes = threading.Thread(target=wake)
    wakes.start()
    try:
        engine.hub.wait_for(lambda: next(looks) > 20 and len(asked) > 3, lambda: asked.append(time.monotonic()))
    finally:
        over.set()
        wakes.join()
    assert min(later - earlier for earlier, later in itertools.pairwise(asked)) >= CHECK_S
    # Nor does one go unasked that is asked for again and again.
    del asked[:]
    assert not engine.hub.wait_for(lambda: False, lambda: asked.append(0.0), CHECK_S / 4)
    assert len(asked) == 1


class Whole(Context):
    """As much of a SparkContext as a whole engine uses: one that has stopped has no `_jsc`."""

    master = "local[4]"

    def __init__(self, serves: bool) -> None:
        super().__init__(**{"spark.driver.host": "127.0.0.1"})
        tracker = SimpleNamespace(getExecutorInfos=list)
        self._jsc: Any = SimpleNamespace(sc=lambda: SimpleNamespace(statusTracker=lambda: tracker))
        self.serves = serves

    def getConf(self) -> Any:
        return SimpleNamespace(get=self.settings.get, getAll=self.settings.items)

    def mapPartitions(self, task: Callable[..., Any]) -> Any:
        if not isinstance(task, residents.ResidentTask):
            return SimpleNamespace(collect=lambda: list(task(iter([0]))))
        return Rows(self, task if self.serves else list)

    def end(self) -> None:
        self._jsc = None
        self.stop()

    def session(self) -> Any:
        return type("SparkSession", (), {"__module__": "pyspark.sql.session", "sparkContext": self})()


def threads_of(engine: pk.Engine) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("penstock") and engine.name in one.name]


def test_an_engine_ends_with_its_context(caplog: pytest.LogCaptureFixture) -> None:
    """What it left behind had its ports, its checkpoints and its slots for ever, and nobody could find it."""
    context = Whole(serves=True)
    engine = pk.Engine(context.session(), 1, name="orphan", metrics="127.0.0.1:0").start()
    [member], metrics = engine.members(), str(engine.metrics_address)
    assert engine in handles.open_engines(context) and not refuses(metrics)
    context.end()
    with pytest.raises(EngineError, match=r"^the Spark context of engine orphan was stopped: make a new engine on the"):
        engine.stats()
    wait_for(lambda: repr(engine).startswith("<penstock.Engine 'orphan': closed"), what="it closes itself")
    wait_for(lambda: not threads_of(engine), what="the end of its threads")
    assert engine not in handles._OPEN and refuses(metrics) and member.lost is not None
    assert "engine orphan closes: its Spark context was stopped" in caplog.messages
    with pytest.raises(EngineError, match="was stopped"):
        engine.rescale(2)


def test_a_start_ends_with_the_context_and_does_not_wait_for_slots() -> None:
    context = Whole(serves=False)
    engine = pk.Engine(context.session(), 1, name="unborn", start_timeout=120.0)
    ends = threading.Thread(target=lambda: (wait_for(lambda: context.jobs, what="the resident's job"), context.end()))
    ends.start()
    with pytest.raises(EngineError, match="the Spark context of engine unborn was stopped"):
        engine.start()
    ends.join(60)
    # The thread that closed it is the last to go.
    wait_for(lambda: not threads_of(engine), what="the end of its threads")
    assert engine not in handles._OPEN


def test_an_engine_that_starts_closes_those_whose_context_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may not have seen it yet, and have the port that it wants."""
    context, second = Whole(serves=True), Whole(serves=True)
    with monkeypatch.context() as patch:
        patch.setattr(pk.Engine, "_watch_context", lambda engine: None)
        first = pk.Engine(context.session(), 1, name="cell", metrics="127.0.0.1:0").start()
    context.end()
    assert threads_of(first)
    with pk.Engine(second.session(), 1, name="cell", metrics=first._scrape.address) as engine:  # type: ignore[union-attr]
        assert handles.open_engines(second) == [engine] and first not in handles._OPEN
    second.stop()
    wait_for(lambda: not threads_of(first), what="the end of its threads")


def test_a_query_whose_drop_was_interrupted_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that hangs at a member holds `drop` up for some seconds, in which Ctrl-C came."""
    context = Whole(serves=True)
    program, stream = SimpleNamespace(sources={}), SimpleNamespace()

    def interrupted(*wait: Any) -> Any:
        raise KeyboardInterrupt

    def started(engine: pk.Engine) -> Query:
        assert engine._setup is not None
        return engine._queries.of(engine._setup, program, "q", "people's", stream, None)  # type: ignore[arg-type]

    with pk.Engine(context.session(), 1, name="drops") as engine:
        first = started(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine._hub, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.drop("people's")
        assert len(engine._queries) == 0
        again = started(engine)
        assert again is not first
        with again._taking_turn(lambda: None):
            pass
        engine.drop("people's")
    context.stop()
