"""What the engine is made of, without Spark: slots, plans of moves, failures, preflight, secrets."""

from __future__ import annotations

import contextlib
import heapq
import json
import pickle
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from engine_support import COUNTS
from penstock._autobalance import Rules
from penstock._migration import STRATEGIES, Cut, balanced, moves_to, parse_epoch, parse_moves, steps
from penstock._parts import Parts, names_parts, parse_depth
from penstock.errors import (
    ConfigError,
    EngineError,
    KeyNullError,
    SlotsError,
    UnsupportedSession,
    UserFunctionError,
)
from penstock.spark._engine import feeds, query
from penstock.spark._engine.batch_function import OWN_CHECKPOINT, BatchFunction
from penstock.spark._engine.calls import Calls
from penstock.spark._engine.drains import DrainTask, Piece
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.feeds import FeedTarget, FeedTask, Places, Receipt, lives
from penstock.spark._engine.hub import Call, Member
from penstock.spark._engine.interrupts import plain_interrupts, spare
from penstock.spark._engine.migrate import Migration, MoveReport
from penstock.spark._engine.moves import Moves
from penstock.spark._engine.preflight import examine, table
from penstock.spark._engine.program import Program
from penstock.spark._engine.queries import Queries
from penstock.spark._engine.query import Query, called
from penstock.spark._engine.query import _kind as kind_of
from penstock.spark._engine.residents import ResidentTask, require_lasting
from penstock.spark._engine.stream import Stream
from penstock.spark._tasks.failures import Failure
from penstock.spark._tasks.place import Key, Secret
from penstock.spark._tasks.slots import executor_count, from_settings, require_slots
from penstock.spark.gang import GangTask


@pytest.fixture
def handler() -> Iterator[None]:
    """Puts the handler of Ctrl-C back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_wait_leaves_a_handler_of_the_users_in_place(handler: None) -> None:
    struck: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: struck.append(number))
    try:
        with plain_interrupts():
            signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pytest.fail("the handler was set aside")
    assert struck == [signal.SIGINT]


@pytest.mark.parametrize("ours", [False, True])
def test_a_wait_takes_the_handler_of_spark_away(handler: None, ours: bool) -> None:
    def of_spark(number: int, frame: Any) -> None:
        raise AssertionError("it cancels all jobs")

    of_spark.__module__, of_spark.__qualname__ = "pyspark.core.context", "SparkContext._do_init.<locals>.signal_handler"
    signal.signal(signal.SIGINT, of_spark)
    if ours:
        spare(None)
    before = signal.getsignal(signal.SIGINT)
    assert (before is of_spark) != ours
    with pytest.raises(KeyboardInterrupt), plain_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def of_one(turn: Any) -> Any:
    """As much of a query as its turn is about."""
    return SimpleNamespace(calls_here=False, called="q", id="q", _turn=turn, _caller=None, _called=None, _over=False)


def is_free(turn: Any) -> bool:
    """Whether another thread could have it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: turn.acquire(blocking=False) and turn.release() is None).result()


def test_ctrl_c_ends_the_wait_for_the_turn_of_a_query_and_no_job(handler: None) -> None:
    """As in `finish` while a batch runs: its jobs were cancelled."""

    def of_spark(number: int, frame: Any) -> None:
        raise AssertionError("it cancels all jobs")

    of_spark.__module__, of_spark.__qualname__ = "pyspark.core.context", "SparkContext._do_init.<locals>.signal_handler"
    signal.signal(signal.SIGINT, of_spark)
    one, runs, ends = of_one(threading.RLock()), threading.Event(), threading.Event()

    def batch() -> None:
        with Query._taking_turn(one, lambda: None):
            runs.set()
            assert ends.wait(30)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(batch)
        assert runs.wait(30)
        waits = Query._taking_turn(one, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), waits:
            pytest.fail("two have the turn")
        assert not is_free(one._turn) and one._caller is not None, "a batch runs"
        assert signal.getsignal(signal.SIGINT) is of_spark
        ends.set()
        other.result(30)
    assert is_free(one._turn) and one._caller is None


class Struck:
    """A turn that is taken as Ctrl-C comes: nobody is told that it is."""

    def __init__(self) -> None:
        self.turn = threading.RLock()

    def acquire(self, timeout: float) -> bool:
        self.turn.acquire(timeout=timeout)
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.turn, name)


def test_the_turn_is_given_back_where_ctrl_c_comes_as_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    one = of_one(Struck())
    with pytest.raises(KeyboardInterrupt), Query._taking_turn(one, lambda: None):
        pytest.fail("it has begun")
    assert is_free(one._turn.turn)

    @contextlib.contextmanager
    def struck() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(query, "plain_interrupts", struck)
    one = of_one(threading.RLock())
    with pytest.raises(KeyboardInterrupt), Query._taking_turn(one, lambda: None):
        pytest.fail("it has begun")
    assert is_free(one._turn)


def test_executors_are_counted_by_one_call_of_the_jvm() -> None:
    class Infos(Sequence[Any]):
        """An array of the JVM's, which is asked for its length, and for each element."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, at: Any) -> Any:
            raise AssertionError("an element is read")

    tracker = SimpleNamespace(getExecutorInfos=Infos)
    context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(statusTracker=lambda: tracker)))
    assert executor_count(context) == 3


class Naive(Places):
    """Walks all seats for each executor."""

    def of(self, seats: Sequence[FeedTarget], ordered: bool = False) -> dict[int, int]:
        found: dict[int, int] = {}
        for executor, rows in self._rows.items():
            loads = [(0, at, seat.member) for at, seat in enumerate(seats) if seat.executor == executor]
            if len(loads) < 2:
                continue
            heapq.heapify(loads)
            for partition, count in sorted(rows.items(), key=lambda one: (0 if ordered else -one[1], one[0])):
                load, at, member = loads[0]
                found[partition] = member
                heapq.heapreplace(loads, (load + count, at, member))
        return found


#: Executors of the members.
executors = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(executors, executors, st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=20), st.booleans())
def test_partitions_go_to_the_members_of_their_executors(
    before: list[str], after: list[str], sizes: list[tuple[int, int]], ordered: bool
) -> None:
    there = [FeedTarget(member, executor, "") for member, executor in enumerate(before)]
    receipts = [
        Receipt(partition, 0, member % len(before), rows, None, 0) for partition, (member, rows) in enumerate(sizes)
    ]
    now = [FeedTarget(10 + member, executor, "") for member, executor in enumerate(after)]
    found = []
    for places in (Places(), Naive()):
        places.came(receipts, there)
        found += [places.of(now, ordered), places.of(now, ordered)]
    assert found == [found[0]] * 4


def test_seats_are_looked_at_once_for_all_executors() -> None:
    looks = 0

    class Seats(list[FeedTarget]):
        def __iter__(self) -> Iterator[FeedTarget]:
            nonlocal looks
            looks += len(self)
            return super().__iter__()

    seats = Seats(FeedTarget(member, str(member), "") for member in range(100))
    places = Places()
    places.came([Receipt(member, 0, member, 1, None, 0) for member in range(100)], list(seats))
    looks = 0
    assert places.of(seats) == {} and looks == 100


def test_an_engine_takes_a_session_and_nothing_of_one() -> None:
    kinds = {"__module__": "pyspark.sql.classic.dataframe", "sparkSession": None}
    for make in (pk.Engine, pk.spark.engines):
        with pytest.raises(UnsupportedSession, match=r"needs a Spark session, not a DataFrame: give its sparkSession$"):
            make(type("DataFrame", (), kinds)())
        with pytest.raises(UnsupportedSession, match=r"needs a Spark session, not a Column$"):
            make(type("Column", (), {"__module__": "pyspark.sql.column"})())
    context: Any = SimpleNamespace(_jsc=object())
    session = type("SparkSession", (), {"__module__": "pyspark.sql.session", "sparkContext": context})()
    made = pk.Engine(session, name="made")
    assert repr(made)
    # One that was stopped says so, and not that it is None of something.
    context._jsc = None
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.dataframe", "sparkSession": session})()
    said = r"the Spark context of this {} was stopped; make it from the present session, which SparkSession\.builder\."
    for call in (pk.Engine, pk.spark.engines):
        with pytest.raises(UnsupportedSession, match=said.format("SparkSession")):
            call(session)
    with pytest.raises(UnsupportedSession, match=said.format("DataFrame")):
        pk.spark.run(COUNTS, frame)
    with pytest.raises(EngineError, match="the Spark context of engine made was stopped: make a new engine on the"):
        made.start()


@pytest.mark.parametrize("moves", [5, 1.5, object()])
def test_moves_that_are_no_moves_are_refused(moves: Any) -> None:
    assert not names_parts(moves)
    for read in (lambda: parse_moves(moves, 4, 2), lambda: Parts(2, {}).pairs(moves, 2)):
        with pytest.raises(ConfigError, match=r"^moves=.* must be a dict of bin to worker, or \(bin, worker\) pairs$"):
            read()


def test_numbers_of_numpy_are_numbers() -> None:
    """They were refused with a message that showed two ints; to JSON they do not go as they are."""
    one, two = np.int64(1), np.int32(2)
    found: list[Any] = [
        parse_moves({one: two}, 4, 3),
        moves_to([[0, 0, 1]], np.array([1, 1, 0]), 2),  # type: ignore[arg-type]
        Parts(2, {}).pairs([(one, two), ((np.uint8(2), np.int64(3)), 0)], 3),
        Parts(2, {}).parse((two, np.int64(3)), "split"),
        Parts(2, {}).parse(np.arange(2), "split"),  # type: ignore[arg-type]
        [parse_depth(two), parse_epoch(two), Cut.of("batched", two, None).batch_size],
        Rules.of("busy", 1.0, 1.5, 1.2, two, np.int64(7), None, (one, two), False).workers,
    ]
    assert json.loads(json.dumps(found)) == [
        [[1, 2]],
        [[0, 1], [1, 1], [2, 0]],
        [[[1, 2], 2], [[2, 3], 0]],
        [[2, 3]],
        [[0, 2], [1, 2]],
        [2, 2, 2],
        [1, 2],
    ]
    session = type("SparkSession", (), {"__module__": "pyspark.sql.session"})()
    engine = pk.Engine(session, two, threads=one, bits=two)  # type: ignore[arg-type]
    assert [type(count) for count in (engine.workers, engine.threads, engine.bits)] == [int] * 3
    for wrong in (np.True_, np.float64(1.0), np.array([1])):
        for refused in (
            lambda wrong=wrong: parse_moves([(0, wrong)], 4, 2),
            lambda wrong=wrong: Parts(2, {}).pairs({0: wrong}, 2),
            lambda wrong=wrong: parse_depth(wrong),
            lambda wrong=wrong: parse_epoch(wrong),
            lambda wrong=wrong: pk.Engine(session, wrong),
            lambda wrong=wrong: pk.Engine.rescale(SimpleNamespace(_require_open=lambda: None), wrong),
        ):
            with pytest.raises(ConfigError):
                refused()


def test_a_checkpoint_in_a_store_that_nothing_here_reads_says_what_to_do() -> None:
    function = BatchFunction(None, None, print, None, None, None, OWN_CHECKPOINT)  # type: ignore[arg-type]
    facts: Any = SimpleNamespace(
        temporary=lambda: False,
        checkpoint_root=lambda: "wasbs://some@where.net/check",
        hadoop=lambda name: None,
        asynchronous=lambda: False,
    )
    said = (
        r"^query counts \(0815\): its state cannot be kept in its checkpointLocation: 'wasbs://some@where.net/check/\S+':"
        r" there is no store 'wasbs' here, .*; say where with foreach_batch\(checkpoint=\), .* with checkpoint=None$"
    )
    with pytest.raises(EngineError, match=said) as caught:
        function._storage(Stream(facts), "0815", "counts")
    assert caught.value.query == "0815"


def test_a_checkpoint_that_is_no_text_is_named_without_its_credentials() -> None:
    engine: Any = SimpleNamespace(_state="open")
    place: Any = Path("s3://KEY:SECRET@bucket/x")
    with pytest.raises(ConfigError, match="must be a path or URL") as refused:
        pk.Engine.foreach_batch(engine, COUNTS, print, checkpoint=place)
    assert "'s3:/...@bucket/x'" in str(refused.value) and "SECRET" not in str(refused.value)


def test_other_credentials_are_another_life_of_a_query() -> None:
    queries = Queries("e")
    setup: Any = SimpleNamespace(hub=None, executor=None)
    program: Any = SimpleNamespace(misfit=lambda other: None, sources={})

    def of(query: str, url: str) -> Any:
        storage: Any = SimpleNamespace(url=url)
        return queries.of(setup, program, query, query, Stream(None), storage)

    first = of("q", "s3://ONE:SECRET@bucket/x")
    assert of("q", "s3://ONE:SECRET@bucket/x") is first
    # What the workers have would be used on, also where it has been taken back since.
    with pytest.raises(EngineError, match=r"is at s3://\.\.\.@bucket/x by other credentials in engine e: drop the"):
        of("q", "s3://OTHER:SECRET@bucket/x")
    with pytest.raises(EngineError, match=r"is at s3://\.\.\.@bucket/x in engine e, not at s3://\.\.\.@bucket/y: drop"):
        of("q", "s3://OTHER:SECRET@bucket/y")
    with pytest.raises(EngineError, match=r"is at s3://\.\.\.@bucket/x: give query other a checkpoint of its own"):
        of("other", "s3://ONE:SECRET@bucket/x")


def test_a_batch_is_not_told_to_have_failed_by_what_an_earlier_attempt_raised() -> None:
    """Fed again, and served; then a worker goes before its state is written."""
    text = "the sink has returned for epoch 0, but"
    lost = {"error": {"Sink": {"epoch": 0, "returned": True}}, "text": text}
    answers = {"Batch": [("Feed", {"ticket": 1}), ("Feed", {"ticket": 2}), ("Sink", {"ticket": 3}), ("Fail", lost)]}

    def post(event: Any) -> None:
        left = answers["Batch"]
        query.tell(*left.pop(0))

    hub = SimpleNamespace(wait_for=lambda ready, check: ready(), wake=lambda: None)
    setup: Any = SimpleNamespace(hub=hub, executor=SimpleNamespace(post=post), engine="e")
    program: Any = SimpleNamespace()
    query = Query(setup, program, "q", "q", Stream(None), None)

    def feed(facts: Any) -> Any:
        if facts["ticket"] == 1:
            raise ConnectionError("member 1: connection refused")
        return "Fed"

    with pytest.raises(EngineError, match=f"^query q of engine e: {text}$"):
        query._call("Batch", {"Feed": feed, "Sink": lambda facts: "Sunk"}, lambda: None)


def test_what_goes_beside_the_end_counts_once_however_often_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker goes before its files are written, or a part of the results is gone when they are asked for again."""
    counted: list[Any] = []
    kinds: Any = SimpleNamespace(sides={"bad": None})
    setup: Any = SimpleNamespace(hub=SimpleNamespace(known=lambda member: SimpleNamespace(address="a:1")))
    setup.journal = SimpleNamespace(beside=lambda *told: counted.append(told))
    setup.executor = SimpleNamespace(facts=lambda query: {"finished": True})
    query = Query(setup, SimpleNamespace(kinds=kinds), "q", "q", Stream(None), None)  # type: ignore[arg-type]
    piece = {"member": 1, "number": 0, "rows": 3, "late_rows": 2, "side_rows": [5]}

    def call(asked: Any, work: Any, check: Any, program: Any) -> None:
        for ticket in (1, 2):
            work["Sink"]({"ticket": ticket, "epoch": 7, "pieces": [piece]})

    monkeypatch.setattr(query, "_call", call)
    monkeypatch.setattr(query, "_frame", lambda *of: "rows")
    monkeypatch.setattr("penstock.spark._engine.query.require", lambda *of: None)
    for _ in range(2):
        assert query.finish(None, lambda: None) == "rows"  # type: ignore[arg-type,comparison-overlap]
    assert counted == [("q", 2, {"bad": 5})]


@pytest.mark.parametrize(
    ("master", "conf", "slots"),
    [
        ("local", {}, 1),
        ("local[3,2]", {}, 3),
        ("local[*]", {}, 7),
        ("local[8]", {"spark.task.cpus": "4"}, 2),
        ("local-cluster[2,2,1024]", {}, 4),
        ("yarn", {}, 2),
        ("yarn", {"spark.executor.instances": "4", "spark.executor.cores": "3"}, 12),
        ("k8s://x", {"spark.dynamicAllocation.enabled": "true"}, None),
        ("k8s://x", {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "2"}, 2),
        ("spark://x:7077", {}, None),
        ("spark://x:7077", {"spark.cores.max": "2"}, 2),
    ],
)
def test_capacity(master: str, conf: dict[str, str], slots: int | None) -> None:
    assert from_settings(master, conf, lambda: 7).slots == slots


@pytest.mark.parametrize(
    ("master", "conf", "named"),
    [
        ("local[2]", {}, r"local\[3\]"),
        ("local", {}, r"local\[3\]"),
        ("local[4]", {"spark.task.cpus": "2"}, r"local\[4\] allows 2\. Start Spark with local\[6\]"),
        ("local-cluster[1,2,1024]", {"spark.task.cpus": "2"}, r"such as local-cluster\[3,2,1024\]"),
        ("spark://x:7077", {"spark.cores.max": "4", "spark.task.cpus": "2"}, "Raise spark.cores.max to 6 or more"),
        ("yarn", {"spark.executor.instances": "2"}, "spark.executor.instances=2 with spark.executor.cores=1"),
        (
            "yarn",
            {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "1"},
            "Raise spark.dynamicAllocation.maxExecutors",
        ),
    ],
)
def test_too_few_slots_name_the_setting(master: str, conf: dict[str, str], named: str) -> None:
    with pytest.raises(SlotsError, match=named) as caught:
        require_slots(from_settings(master, conf), 2)
    assert caught.value.needed == 3
    require_slots(from_settings(master, {**conf, "spark.executor.cores": "4"}), 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=64), st.integers(1, 5))
def test_balanced_owners_differ_by_one_and_move_little(owners: list[int], workers: int) -> None:
    owners = [owner % workers for owner in owners]
    target = balanced(owners, workers)
    share = Counter(dict.fromkeys(range(workers), 0))
    share.update(target)
    assert max(share.values()) - min(share.values()) <= 1
    have = Counter(owners)
    least = sum(max(0, have[w] - share[w]) for w in range(workers))
    assert sum(a != b for a, b in zip(owners, target, strict=True)) == least


def test_half_a_million_bins_are_balanced_at_once() -> None:
    """Linear, or it would take hours: it runs while a query is locked."""
    target = balanced([0] * (1 << 19), 4)
    assert Counter(target) == dict.fromkeys(range(4), 1 << 17)


@given(st.integers(0, 6), st.data(), st.sampled_from(STRATEGIES), st.integers(1, 70))
def test_steps_move_each_bin_once_to_its_target(bits: int, data: st.DataObject, strategy: str, size: int) -> None:
    workers = st.lists(st.integers(0, 3), min_size=1 << bits, max_size=1 << bits)
    owners, target = [data.draw(workers), data.draw(workers)], data.draw(workers)
    moves = moves_to(owners, target, 4)
    found = steps(owners, moves, Cut.of(strategy, size if strategy in ("batched", "matched") else None, None))
    after = [list(step) for step in owners]
    for step in found:
        assert 0 < len(step) <= {"batched": size, "all-at-once": len(moves), "fluid": 1, "matched": 4 * size}[strategy]
        for bin_, worker in step:
            assert any(op[bin_] != worker for op in after)
            for op in after:
                op[bin_] = worker
    assert after == [target, target]
    assert sum(len(step) for step in found) == len(moves)


def test_moves_that_make_no_sense_are_refused() -> None:
    for moves in ({4: 0}, {0: 2}, {-1: 0}, [(0, 1), (0, 0)], [(0,)], {"0": 1}, {True: 1}):
        with pytest.raises(ConfigError):
            parse_moves(moves, 4, 2)  # type: ignore[arg-type]
    for target in ([0], [0, 0, 0], [0, 2]):
        with pytest.raises(ConfigError):
            moves_to([[0, 1]], target, 2)
    for gap, told in [("drian", "gap='drian' is neither 'drain' nor None"), (True, "gap=True")]:
        with pytest.raises(ConfigError, match=told):
            Cut.of("fluid", None, None, gap)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'all-at-once' is one step, so there is no gap"):
        Cut.of("all-at-once", None, None, "drain")
    for strategy, size, pause, told in [
        ("hasty", 1, None, "strategy 'hasty' is none of batched, all-at-once, fluid, matched"),
        ("batched", 0, None, "batch_size=0 must be an int of at least 1"),
        ("matched", True, None, "batch_size=True"),
        ("fluid", 64, None, "batch_size=64 has no effect: a step of strategy 'fluid' is of one bin; use 'batched'"),
        ("all-at-once", 64, None, "batch_size=64 has no effect: the step of strategy 'all-at-once' is all bins"),
        ("fluid", None, 0, "0"),
        ("fluid", None, "soon", "soon"),
        ("all-at-once", None, "50ms", "is one step, whatever max_pause says"),
    ]:
        with pytest.raises(ConfigError, match=told):
            Cut.of(strategy, size, pause)  # type: ignore[arg-type]
    told = Cut.of("batched", None, "0.25s", "drain").told()
    assert told == {"strategy": {"Batched": {"size": 1}}, "max_pause_ms": 250, "drains": True}
    told = Cut.of("all-at-once", None, None).told()
    assert told == {"strategy": "AllAtOnce", "max_pause_ms": None, "drains": False}


def test_a_migration_ends_when_all_its_queries_have() -> None:
    handle = Migration()
    first = handle.begin(MoveReport("a", "fluid"))
    second = handle.begin(MoveReport("b", "fluid"))
    handle.seal()
    first({"moved": 3, "bytes": 10, "steps": [{"step": 0, "bins": 3, "started_ns": 1, "ended_ns": 2}]}, None)
    assert not handle.done
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.05)
    second(None, EngineError("cancelled"))
    assert handle.done
    with pytest.raises(EngineError, match="cancelled"):
        handle.wait()
    assert handle.report.bins == 3 and handle.report.queries == ("a", "b")


class Told:
    """An executor whose machine is a test's."""

    def __init__(self) -> None:
        self.acts: dict[str, Any] = {}
        self.events: list[Any] = []
        self.cause: Any = None
        self.answer: Any = None

    def perform(self, **acts: Any) -> None:
        self.acts.update(acts)

    def when_broken(self, tell: Any) -> None:
        self.acts["broken"] = tell

    def post(self, event: Any) -> None:
        self.events.append(event)

    def ask(self, event: Any, cause: Any) -> None:
        self.events.append(event)
        self.cause = cause
        if self.answer is not None:
            for move in event["Migrate"]["moves"]:
                self.acts["Moved"]({"handle": move["handle"], **self.answer})
        self.cause = None


class Figures:
    """A recorder that knows bytes."""

    def __init__(self) -> None:
        self.migrations: list[Any] = []
        self.moved = 0

    def after_refresh(self, then: Any) -> None:
        then()

    def take_moved_bytes(self, query: str) -> int:
        taken, self.moved = self.moved, 0
        return taken

    def migration(self, migration: Any) -> None:
        self.migrations.append(migration)


def test_what_the_protocol_tells_of_a_migration_reaches_its_handle() -> None:
    told, figures = Told(), Figures()
    moves = Moves(told, figures, lambda: 2)  # type: ignore[arg-type]

    def ask() -> Migration:
        handle = Migration()
        moves.ask(handle, [("id", "q", "Even")], Cut.of("batched", 16, None), None)
        handle.seal()
        return handle

    first, second, third = ask(), ask(), ask()
    assert [event["Migrate"]["moves"][0]["handle"] for event in told.events] == [1, 2, 3]
    told.acts["Moving"]({"handle": 1, "ranges": 5})
    step = {"step": 0, "bins": 5, "started_ns": 1, "ended_ns": 2}
    told.cause = SimpleNamespace(body={"report": {"moved": 5, "bytes": 7, "steps": [step]}})
    figures.moved = 70
    told.acts["Moved"]({"handle": 1, "outcome": {"Ok": 1}})
    report = first.wait(1)
    assert (report.bins, report.bytes, len(report.steps)) == (5, 70, 1) and not second.done
    assert figures.migrations[0].bins == 5
    second.cancel()
    assert told.events[-1] == {"CancelMigration": {"handle": 2}}
    told.acts["Moved"]({"handle": 2, "outcome": {"Ok": 0}})
    assert second.wait(1).bins == 0
    # One that is cut off has moved what it has, and the next one has not.
    told.acts["Moving"]({"handle": 3, "ranges": 5})
    figures.moved = 100
    told.cause = Failure(2, {"kind": "user_function", "message": "boom"}, cloudpickle.dumps(UserFunctionError("boom")))
    told.acts["Moved"]({"handle": 3, "outcome": {"Err": {"CutOff": "boom"}}, "text": "the migration was cut off: boom"})
    with pytest.raises(
        EngineError, match=r"query q: the migration was cut off: boom; .* says where its bins are"
    ) as caught:
        third.wait(1)
    assert isinstance(caught.value.__cause__, UserFunctionError)
    assert third.report.bytes == 100 and figures.moved == 0
    # One whose turn has not come takes nothing from the one that is under way.
    waiting, figures.moved = ask(), 30
    told.acts["Moved"]({"handle": 4, "outcome": {"Err": {"CutOff": "boom"}}, "text": "the migration was cut off: boom"})
    assert waiting.done and waiting.report.bytes == 0 and figures.moved == 30
    broken = "goes back to its last completed epoch at the next batch"
    for answer, text, kind, wanted in (
        ({"Refused": "no"}, "no", ConfigError, "no"),
        ({"NotRunning": "is finished"}, "the query is finished: none", EngineError, "is finished: none"),
        ({"NotRunning": broken}, "the query goes back: none", EngineError, "none; ask again when that batch is done"),
        # One that has died is being replaced.
        (
            {"Refused": ""},
            "there is no worker 1: 0 to 0",
            ConfigError,
            "0 to 0; one that .* its next batch on: ask again",
        ),
        ({"Refused": ""}, "there is no worker 2: 0 to 0", ConfigError, "there is no worker 2: 0 to 0"),
    ):
        told.answer = {"outcome": {"Err": answer}, "text": text}
        with pytest.raises(kind, match=f"^query q: .*{wanted}") as refused:
            ask()
        assert ("ask again" in str(refused.value)) == ("ask again" in wanted)
    told.answer = None
    last = ask()
    told.acts["broken"](EngineError("the engine has failed"))
    with pytest.raises(EngineError, match="the engine has failed"):
        last.wait(1)


def test_the_executor_steps_the_protocol_and_ends() -> None:
    executor = Executor("parts", {"workers": 1})
    seen: list[Any] = []
    executor.perform(StartResident=seen.append, Dismiss=lambda facts: seen.append(executor.cause))
    executor.start()
    up = {"slot": 7, "member": 1, "executor": "x", "executors": 1}
    executor.ask({"MemberUp": up}, "the cause")
    assert seen == [{"slot": 0}, "the cause"]
    assert executor.facts("q") is None and executor.bins("q") == []
    executor.perform(RetireResident=seen.append)
    executor.close()
    executor.close()
    assert seen[2:] == [{"slot": 0}]
    with pytest.raises(EngineError, match="closed"):
        executor.ask("Close")
    with pytest.raises(ValueError, match="no setup"):
        Executor("parts", {"worker": 1})


class Members:
    """A hub whose members do at once what they are asked, but to stop, which waits until they are let go."""

    def __init__(self) -> None:
        self.closing = False
        #: The plans with which members have begun.
        self.begun: list[Any] = []
        self.stopping: list[tuple[Call, Callable[[Call], None]]] = []
        self._changed = threading.Condition()

    def known(self, member: int) -> Member:
        return Member(member, member - 1, f"executor {member}", f"host:{member}", 1, {})

    def listen(self, **hears: Any) -> None:
        pass

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], check: Callable[[], None]) -> None:
        with self._changed:
            while not ready():
                check()
                self._changed.wait(0.1)

    def call(self, member: Member, body: Any, attachment: bytes, then: Callable[[Call], None]) -> None:
        ask = body["ask"]
        what = ask if isinstance(ask, str) else next(iter(ask))
        call = Call(member, what)
        if what == "Stop":
            self.stopping.append((call, then))
            return
        if what == "Start":
            self.begun.append(body["plan"])
        call.body = {"answer": {"Released": {"pieces": []}} if what == "Release" else "Done"}
        then(call)

    def let_go(self, inventory: Any) -> None:
        for call, then in self.stopping:
            call.body = {"answer": {"Inventory": inventory}}
            then(call)
        self.stopping.clear()


@pytest.mark.parametrize("interrupted", [False, True])
def test_members_that_come_begin_with_the_flow_that_the_protocol_has_taken(interrupted: bool) -> None:
    """They come just when the query is started again with a flow that does not fit, whose batch waits for them."""
    flow = pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.max("v"))
    first, other = Program.of(COUNTS), Program.of(flow)
    members: Any = Members()
    executor = Executor("parts", {"workers": 1, "bits": 2})
    setup: Any = SimpleNamespace(hub=members, executor=executor, engine="e")
    query = Query(setup, first, "q", "q", Stream(None), None)
    Calls(members, executor, lambda _: query.program, dict, lambda _: None, lambda _, failure: None, 8, 1024)
    for effect in ("Feed", "Sink", "Complete", "Fail"):
        executor.perform(**{effect: partial(query.tell, effect)})
    for effect in ("StartResident", "RetireResident", "WatchCommit", "Rescaled"):
        executor.perform(**{effect: lambda facts: None})

    def see(event: Any, effects: Any) -> None:
        """Those that are there have stopped when the batch waits, or is waited for no more."""
        if ("Stop" if interrupted else "Batch") in event and members.stopping:
            ranges = [(prefix, bits) for prefix, bits, _ in query.bins()[0]]
            members.let_go({operator["name"]: ranges for operator in first.operators})

    def come(slot: int) -> None:
        told = {"slot": slot, "member": slot + 1, "executor": f"executor {slot}", "executors": 2}
        executor.ask({"MemberUp": told})

    def run(epoch: int, program: Program, check: Callable[[], None]) -> None:
        def ended(event: str, facts: Any) -> Any:
            return {event: {"ticket": facts["ticket"], "outcome": {"Ok": None}}}

        asked = {"query": "q", "epoch": epoch, "clock_ms": 0, "planned_ms": None, "committed": None}
        work = {"Feed": partial(ended, "Fed"), "Sink": partial(ended, "Sunk")}
        query._call({"Batch": asked}, work, check, program)

    def interrupt() -> None:
        if interrupted:
            raise KeyboardInterrupt

    executor.watch(see)
    executor.start()
    try:
        come(0)
        run(0, first, lambda: None)
        executor.ask({"Rescale": {"handle": 1, "workers": 2, "free": 1}})
        come(1)
        executor.ask({"Committed": {"query": "q", "epoch": 0}})
        assert len(members.begun) == len(members.stopping) == 1
        with pytest.raises((EngineError, KeyboardInterrupt), match=None if interrupted else "cannot be taken over"):
            run(1, other, interrupt)
        executor.ask({"Timer": {"ticket": 1 << 40}})  # what was asked for until now is done
        assert members.begun == [json.loads(first.plan)] * 3
        assert query.program is first
        # It goes on with the members that have begun.
        run(1, Program.of(COUNTS), lambda: None)
        assert query.completed == 1 and len(members.begun) == 3
    finally:
        executor.close()


def test_a_protocol_that_fails_tells_all_that_wait(caplog: pytest.LogCaptureFixture) -> None:
    executor = Executor("broken", {"workers": 1})
    told: list[EngineError] = []
    executor.perform(StartResident=lambda facts: None)
    executor.when_broken(told.append)
    executor.start()
    with pytest.raises(EngineError, match="the engine has failed"):
        executor.ask({"NoSuchEvent": {}})
    assert len(told) == 1
    with pytest.raises(EngineError, match="the engine has failed"):
        executor.post("Close")
    executor.close()


def test_a_failure_of_a_member_becomes_the_users_exception() -> None:
    cause = ZeroDivisionError("division by zero")
    error = UserFunctionError("map_batches[0] f: boom", step="map_batches[0] f", file="a.py", line=3)
    error.__cause__ = cause
    facts = {"kind": "user_function", "message": "boom", "step": "map_batches[0] f", "why": "User"}
    own = Failure(2, facts, cloudpickle.dumps(error))
    assert (own.why, "why" in own.facts, Failure(2, {}).why) == ("User", False, "Internal")
    found = own.exception()
    assert isinstance(found, UserFunctionError) and found.line == 3
    assert isinstance(found.__cause__, ZeroDivisionError)
    text = Failure(2, {"kind": "user_function", "message": "boom"}, b"no pickle").exception()
    assert isinstance(text, UserFunctionError) and "boom" in str(text)
    null = Failure(2, {"kind": "null_key", "message": "null", "column": "k", "row": 4}).exception()
    assert isinstance(null, KeyNullError) and (null.column, null.row) == ("k", 4)
    strange = Failure(2, {"kind": "never heard of", "message": "strange"}).exception()
    assert isinstance(strange, EngineError) and "strange" in str(strange)


def test_an_echo_of_a_loss_is_known_by_penstocks_own_errors() -> None:
    """A sink that fails otherwise fails at once, though other libraries have errors of these names."""

    class ProtocolError(Exception):
        """As urllib3 has one."""

    def raised(error: Exception, cause: Exception | None = None) -> Exception:
        error.__cause__ = cause
        return error

    ours = pk.errors.ProtocolError("member 1 is gone")
    text = "An exception was thrown from the Python worker:\npenstock.errors.ProtocolError: member 1 is gone"
    for error in (ours, raised(OSError("no"), ours), RuntimeError(text), pk.errors.AuthenticationError("no key")):
        assert kind_of("Sunk", error) == kind_of("Fed", error) == "Echo"
    theirs = ProtocolError("Connection aborted.")
    for error in (theirs, raised(OSError("no"), theirs), RuntimeError(f"urllib3.exceptions.ProtocolError: {theirs}")):
        assert kind_of("Sunk", error) == "User" and kind_of("Fed", error) == "Internal"


def test_preflight_names_everything_that_is_wrong() -> None:
    here = {"penstock": "0.1.0", "python": "3.11.2", "pyarrow": "21.0.0"}
    good = {**here, "host": "a", "jvm": "7"}
    assert examine(good, here, "d:1") == []
    assert examine({**good, "pyarrow": "21.3.0", "python": "3.11.9"}, here, "d:1") == []
    bad = {"host": "b", "jvm": "8", "python": "3.10.1", "penstock_error": "no module", "registry_error": "refused"}
    bad["pyarrow"] = "14.0.0"
    text = table(examine(bad, here, "d:1"))
    for word in ("penstock cannot", "venv-pack", "pyarrow 14.0.0", "Python 3.10.1", "spark.driver.host", "b (JVM 8)"):
        assert word in text


def test_a_secret_shows_itself_to_nobody_and_stays_in_the_driver() -> None:
    secret = Secret.random()
    key = secret.feed("q", 7)
    for hidden in (secret, key):
        assert hidden.reveal().hex() not in repr(hidden) + str(hidden) + f"{hidden!r:>40}"
        with pytest.raises(TypeError):
            assert hidden == hidden
    assert pickle.loads(pickle.dumps(key)).reveal() == key.reveal()
    with pytest.raises(TypeError, match="stays in the driver"):
        pickle.dumps(secret)


def test_tasks_carry_keys_of_their_own_from_which_the_secret_does_not_follow() -> None:
    secret = Secret.random()
    schema = pa.schema([("k", pa.int64())])
    piece = Piece(1, "127.0.0.1:1", 0, 1)
    carried = [
        ResidentTask("127.0.0.1:1", secret.member(3), "engine", 3, "job"),
        FeedTask("q", 7, {"input": schema}, (), secret.feed("q", 7)),
        DrainTask("q", 7, "rows", (piece,), schema, secret.drain("q", 7)),
        GangTask(b"", 1, schema, schema, secret.mesh(), "run", 1.0),
    ]
    keys: list[Key] = [task.key for task in carried]  # type: ignore[attr-defined]
    for task in carried:
        assert secret.reveal() not in pickle.dumps(task)
    assert len({key.reveal() for key in keys}) == len(keys)
    others = (secret.member(4), secret.feed("q", 8), secret.feed("p", 7), secret.drain("q", 8))
    assert not {key.reveal() for key in keys} & {key.reveal() for key in others}


def test_a_feed_whose_member_is_gone_reads_its_rows_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark ends a Python process that has not, and the batch that is fed again would wait for a new one."""
    from pyspark import TaskContext

    with socket.create_server(("127.0.0.1", 0)) as nobody:
        gone = FeedTarget(4, "elsewhere", f"127.0.0.1:{nobody.getsockname()[1]}")
    schema = pa.schema([("k", pa.int64())])
    task = FeedTask("q", 7, {"input": schema}, (gone,), Secret.random().feed("q", 7))
    monkeypatch.setattr(TaskContext, "_taskContext", None)  # which the next line sets, for good if nobody undoes it
    context = TaskContext()
    context._partitionId, context._taskAttemptId = 2, 9
    read: list[int] = []

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            read.append(number)
            yield pa.record_batch({"k": [number]}, schema)
        read.append(-1)

    [told] = [row for batch in task(rows()) for row in batch.to_pylist()]
    assert read == [0, 1, 2, -1]
    assert (told["member"], told["partition"], told["attempt"], told["rows"]) == (4, 2, 9, 0)
    assert "member 4 at " in told["gone"]


def test_a_member_whose_connections_are_still_accepted_is_gone_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a killed process had open is closed one by one, the port perhaps last."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        assert lives(address, 0.05), "it says nothing to who says nothing"
        port.accept()[0].close()
        told: list[bool] = []
        monkeypatch.setattr(feeds, "_DIAL_S", 60.0)
        asks = threading.Thread(target=lambda: told.append(lives(address, 240.0)))
        asks.start()
        accepted, _ = port.accept()
        assert not told
        accepted.close()
        asks.join(60)
    assert told == [False] and not lives(address, 60.0)


@pytest.mark.parametrize(
    ("idle", "ends", "refused"),
    [("60", "true", True), ("010s", "true", True), ("0", "true", False), (None, "true", False), ("60", None, False)],
)
def test_a_spark_that_ends_silent_processes_is_refused(idle: str | None, ends: str | None, refused: bool) -> None:
    """It killed each worker again and again, whatever that was doing."""
    told = {"spark.python.worker.idleTimeoutSeconds": idle, "spark.python.worker.killOnIdleTimeout": ends}
    conf = {name: value for name, value in told.items() if value is not None}
    if not refused:
        return require_lasting(conf.get)
    with pytest.raises(ConfigError, match=rf"idleTimeoutSeconds={idle}: .*; set spark.python.worker.killOnIdleTimeout"):
        require_lasting(conf.get)


def test_slots_of_other_engines_count() -> None:
    four = from_settings("local[4]", {})
    require_slots(four, 1, {"first": 2})
    with pytest.raises(SlotsError, match=r"engine first holds 2.*5; local\[4\] allows 4.*close the other") as caught:
        require_slots(four, 2, {"first": 2})
    assert caught.value.needed == 5


def test_a_function_that_does_not_pickle_is_named() -> None:
    lock = threading.Lock()
    flow = pk.Flow("k bigint").map_batches(lambda batch: batch)
    flow = flow.map_batches(lambda batch: batch if lock else None)
    with pytest.raises(ConfigError, match=r"map_batches\[1\] <lambda>: the function cannot be sent.*lock"):
        flow.map_in_arrow()


def test_frames_of_this_process_are_told_where_they_go() -> None:
    for frame, kind in ((pd.DataFrame({"a": [1]}), "pandas.DataFrame"), (pa.table({"a": [1]}), "pyarrow.Table")):
        with pytest.raises(UnsupportedSession, match=rf"not a {kind}: spark.createDataFrame .*, or flow.run\(...\)"):
            pk.spark.run(COUNTS, frame)


def test_a_query_is_called_by_its_name_and_its_id_where_they_differ() -> None:
    assert (called("clicks", "0815"), called("0815", "0815")) == ("clicks (0815)", "0815")
