"""Whoever catches Ctrl-C and goes on gets every result once and in order, or is told: wherever it lands."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import interrupt_support
import penstock as pk
import penstock.spark
from interrupt_support import STORM, Interrupts, at_every_instruction, taken
from penstock import ordered
from penstock._durations import format_duration
from penstock._local import LocalSession
from penstock._mesh import alone
from penstock.dataflow import Worker, run_here
from penstock.ordered._driver import _open
from penstock.workloads import nexmark, tpcxbb, wordcount
from tpcxbb_support import write as tpcxbb_tables


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    yield
    for driver in list(_open):
        driver.close(2.0)


def twice(x: int) -> int:
    return x * 2


def fails_at_two(x: int) -> int:
    if x == 2:
        raise ValueError("two")
    return x * 2


def summed(total: int, x: int) -> tuple[int, list[int]]:
    return total + x, [total + x]


def odd(x: int) -> int:
    return x % 2


def generated(count: int) -> Iterator[int]:
    yield from range(count)


TWICE = [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: pk.ordered_map(twice, range(5), mode="inline", chunk=2), TWICE),
        (lambda: pk.ordered_map(twice, generated(5), mode="inline", chunk=2), TWICE),
        (lambda: pk.ordered_map(twice, range(5), workers=2, chunk=2), TWICE),
        (lambda: pk.ordered_map(fails_at_two, range(5), mode="inline", chunk=2), [0, 2, "two", 6, 8]),
        (
            lambda: ordered.Pipeline([ordered.flat_map(range), ordered.filter(bool), ordered.map_batches(list)]).run(
                range(4), mode="inline", chunk=2
            ),
            [1, 1, 2],
        ),
        (lambda: pk.ordered_map(twice, range(5), mode="threads", workers=2, chunk=2), TWICE),
        (lambda: pk.ordered_map(twice, generated(5), mode="threads", workers=2, chunk=2), TWICE),
        (
            lambda: ordered.Pipeline([ordered.stateful(summed, initial=0, finish=lambda n: [n])]).run(
                range(5), mode="threads", workers=2, chunk=2
            ),
            [0, 1, 3, 6, 10, 10],
        ),
        (
            lambda: ordered.Pipeline([ordered.partitioned(summed, key=odd, initial=0)]).run(
                range(5), mode="threads", workers=2, chunk=2
            ),
            [0, 1, 2, 4, 6],
        ),
    ],
    ids=[
        "inline",
        "inline-live",
        "auto",
        "errors",
        "pipeline",
        "threads",
        "threads-live",
        "threads-state",
        "threads-key",
    ],
)
def test_an_interrupt_at_any_instruction_costs_nothing(
    run: Callable[[], Any], expected: list[Any], request: pytest.FixtureRequest
) -> None:
    # Runs with threads go another way each time, and take longer: a part of the instructions each time is all of them.
    at_every_instruction(run, expected, stride=5 if "threads" in request.node.name else 1)


@pytest.mark.parametrize(
    "run",
    [
        lambda: ordered.Pipeline([ordered.stateful(summed, initial=0)]).run(range(4), mode="inline", chunk=2),
        lambda: pk.ordered_map(abs, itertools.accumulate(generated(4)), mode="inline", chunk=2, reads="here"),
    ],
    ids=["state", "input"],
)
def test_what_cannot_be_repeated_is_said_from_then_on(run: Callable[[], Any]) -> None:
    assert at_every_instruction(run, [0, 1, 3, 6], torn=True)


def test_a_long_search_strikes_before_each_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[str] = []

    class Formatted:
        """One result; what is interrupted before it is done once more."""

        def __init__(self) -> None:
            struck.append("")

        def __iter__(self) -> Iterator[str]:
            return self

        def __next__(self) -> str:
            if struck[-1]:
                raise StopIteration
            struck[-1] = format_duration(90_000_000)
            return struck[-1]

    def tried(thinned: int, stride: int) -> int:
        monkeypatch.setattr(interrupt_support, "THINNED", thinned)
        struck.clear()
        at_every_instruction(Formatted, ["90s"], stride=stride)
        return len(struck)

    every = tried(1, 1)
    assert every > 50 and tried(1, 17) == every
    assert tried(3, 1) <= every // 3 + 2 and tried(3, 17) <= every // 17 + 2


def test_an_input_that_raised_is_heard_whatever_interrupts_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("the input")

    at_every_instruction(lambda: pk.ordered_map(twice, source(), mode="inline"), [2, "the input"])


@pytest.mark.parametrize("every", [1000, 300])
def test_processes_outlive_interrupts(every: int) -> None:
    interrupts = Interrupts(5, every)
    results = pk.ordered_map(twice, generated(60), mode="processes", workers=2, chunk=3)
    assert taken(results, interrupts) == [2 * x for x in range(60)]
    assert interrupts.fired > 5


def survives(script: str) -> None:
    """Run a script in the middle of a storm, which says at the end that all is there."""
    done = subprocess.run(
        [sys.executable, "-c", STORM + textwrap.dedent(script)], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "True\n", done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("mode", ["auto", "inline", "threads", "processes"])
@pytest.mark.parametrize("source", ["range(3000)", "(x for x in range(3000))"], ids=["list", "live"])
def test_a_storm_of_signals_costs_nothing(mode: str, source: str) -> None:
    survives(f"""
        def busy(x):
            for _ in range(2000):
                pass
            return x
        results = iter(pk.ordered_map(busy, {source}, mode={mode!r}, workers=2))
        got = []
        try:
            storm()
            got = collected(results, 3000)
        finally:
            calm()
        print(got == list(range(3000)), flush=True)
        os._exit(0)
        """)


# Local runs, graphs, readers

PAIRS = [{"k": [1, 2]}, {"k": [2]}, {"k": [3, 1]}]


def blocks() -> Iterator[pa.RecordBatch]:
    for columns in PAIRS:
        yield pa.record_batch(columns)


def rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in batch.to_pylist()]


def counting() -> pk.Flow:
    return pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")


def doubling() -> pk.Flow:
    return pk.Flow("k bigint").map_batches(lambda batch: pa.record_batch({"k": pc.multiply(batch.column(0), 2)}))


@pytest.mark.parametrize("make", [counting, doubling], ids=["keyed", "stateless"])
def test_a_local_run_outlives_an_interrupt_at_any_instruction(make: Callable[[], pk.Flow]) -> None:
    flow = make()
    expected = [rows(batch) for batch in flow.run(blocks(), streaming=True)]
    assert len(expected) == 3
    at_every_instruction(lambda: flow.run(blocks(), streaming=True), expected, stride=7, show=rows)


ASKS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    # Whether a bin is split before, and what is asked of a session whose bins 0 to 3 are at the workers 0, 1, 0, 1.
    "moves": (False, lambda session: session.migrate(to=[1, 0, 1, 0])),
    "moves of parts": (True, lambda session: session.migrate(to=[1, 0, 1, 0])),
    "moves ahead": (False, lambda session: session.migrate(to=[1, 0, 1, 0], at_epoch=1)),
    "a split": (False, lambda session: session.split(1)),
    "a merge": (True, lambda session: session.merge(1)),
    "a merge of parts that are apart": (True, lambda session: session.merge(1)),
}


@pytest.mark.parametrize("name", ASKS)
def test_what_is_asked_of_a_session_is_known_wherever_an_interrupt_comes(name: str) -> None:
    """It was ordered and not noted: what was asked for next then moved nothing, or the wrong bins."""
    splits, ask = ASKS[name]
    at, struck = 0, True
    while struck:
        with LocalSession(counting(), 2, bits=2, streaming=True) as session:
            if splits:
                session.split(1).wait(10)
            session.migrate(to=[0, 1, 0, 1]).wait(10)
            if "apart" in name:
                session.migrate(moves={(3, 3): 0}).wait(10)
            interrupts = Interrupts(at)
            with contextlib.suppress(KeyboardInterrupt), interrupts.armed():
                ask(session)
            for _ in range(2):
                session._native.push(pa.record_batch({"k": [1]}))
                assert session._native.take(10.0) is not None
            session.migrate(to=[1, 1, 0, 0]).wait(10)
            assert {(row["prefix"] >> (row["bits"] - 2), row["worker"]) for row in session.bins().to_pylist()} == {
                (0, 1), (1, 1), (2, 0), (3, 0)
            }, (at, interrupts.places)  # fmt: skip
            # What it is done to is there.
            whole = session.bins().num_rows == 4
            (session.split(1) if whole else session.merge(1)).wait(10)
            assert (session.bins().num_rows == 4) is not whole, (at, interrupts.places)
        struck, at = bool(interrupts.fired), at + (1 if interrupt_support.THINNED == 1 else 11)


class Cancelling:
    """The native side of a session that is interrupted as it has cancelled a migration."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def cancel_migration(self, handle: int) -> None:
        self._native.cancel_migration(handle)
        raise KeyboardInterrupt


def test_a_migration_that_is_cancelled_is_known_where_an_interrupt_comes_behind_it() -> None:
    with LocalSession(counting(), 2, bits=9, streaming=True) as session:
        before = session.owners()[0]
        there = [1 - worker for worker in before]
        native, session._native = session._native, Cancelling(session._native)  # type: ignore[assignment]
        # On a busy machine all may have moved before it is cancelled.
        for _ in range(50):
            cut = session.migrate(to=there, strategy="fluid")
            with contextlib.suppress(KeyboardInterrupt):
                cut.cancel()
            moved = cut.wait(10).bins
            assert session.migrate(to=there).wait(10).bins == len(there) - moved
            assert session.owners() == [there]
            if moved < len(there):
                break
            session.migrate(to=before).wait(10)
        session._native = native
    assert moved < len(there)


def test_late_rows_are_taken_once_or_it_is_said() -> None:
    flow = pk.Flow("k bigint, ts bigint", event_time="ts").key_by("k").window(pk.tumbling("1s")).agg(n=pk.count())
    source = [pa.record_batch({"k": [1], "ts": [ts]}) for ts in (5_000, 100, 6_000)]
    late: list[pa.RecordBatch] = []

    def run() -> Any:
        late.clear()
        return flow.run(iter(source), streaming=True, late=late.append)

    expected = [rows(batch) for batch in run()]
    assert len(late) == 1

    class Checked:
        """The run, which looks at the late rows at its end."""

        def __init__(self) -> None:
            self.results = run()

        def __iter__(self) -> Any:
            return iter(self.results)

        def close(self) -> None:
            self.results.close()
            assert len(late) <= 1

    at_every_instruction(Checked, expected, torn=True, stride=7, show=rows)


EDGES = pa.table({"a": [1, 1, 2, 2, 3], "b": [2, 3, 3, 4, 4]})


def test_matches_outlive_an_interrupt_at_any_instruction() -> None:
    def run() -> Any:
        return pk.graph.cliques(EDGES, 3, batch_rows=1)

    with run() as found:
        expected = [rows(batch) for batch in found]
    assert expected == [[(1, 2, 3)], [(2, 3, 4)]]
    at_every_instruction(run, expected, show=rows)


def test_changes_outlive_an_interrupt_at_any_instruction() -> None:
    def run() -> Any:
        deltas = pk.graph.Deltas("tri(a, b, c) :- e(a, b), e(a, c), e(b, c)")
        return deltas.stream({"e": EDGES}, batch_rows=1)

    expected = [rows(batch) for batch in run()]
    assert len(expected) == 2
    at_every_instruction(run, expected, show=rows)


def test_readers_outlive_an_interrupt_or_say_that_they_did_not(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("1 2\n2 3\n")
    (tmp_path / "text.txt").write_text("to be or not")
    edges = [rows(batch) for batch in pk.graph.read_edges(tmp_path / "edges.txt")]
    at_every_instruction(lambda: pk.graph.read_edges(tmp_path / "edges.txt"), edges, torn=True, show=rows)
    words = [b"to ", b"be or ", b"not"]
    text = [tmp_path / "text.txt"]
    at_every_instruction(lambda: wordcount.chunks(text, chunk_bytes=5), words, torn=True)
    at_every_instruction(
        lambda: wordcount.read(text, chunk_bytes=5), [[(word,)] for word in words], torn=True, show=rows
    )
    pq.write_table(pa.table({"auction": [1, 2, 3]}), tmp_path / "bid.parquet")
    flow = pk.Flow("auction bigint", name="bid").map_batches(lambda batch: batch)
    at_every_instruction(
        lambda: nexmark.read(flow, tmp_path, batch_rows=2)["bid"], [[(1,), (2,)], [(3,)]], torn=True, show=rows
    )


def test_tpcxbb_outlives_an_interrupt_or_says_that_it_did_not(tmp_path: Path) -> None:
    clicks = [(seq, 100, seq, None, 1 + seq % 3, 1, seq % 2) for seq in range(4)]
    folder = tpcxbb_tables(tmp_path, clicks, [])
    query = tpcxbb.find("q2_sessions")

    def read() -> Any:
        return tpcxbb.read(query.stream, query.columns, folder, batch_rows=2)

    stream = list(read())
    assert len(stream) == 2
    at_every_instruction(read, [rows(batch) for batch in stream], torn=True, stride=7, show=rows)
    at_every_instruction(
        lambda: tpcxbb.in_order(iter(stream), "clicks"), [rows(batch) for batch in stream], torn=True, show=rows
    )
    expected = [rows(batch) for batch in tpcxbb.run_local(query, folder, mode="inline")]
    assert sum(map(len, expected)) == 4
    at_every_instruction(
        lambda: tpcxbb.run_local(query, folder, mode="inline"), expected, torn=True, stride=17, show=rows
    )
    numbers = pa.schema({"n": pa.int64()})
    at_every_instruction(
        lambda: tpcxbb.pack(iter([(1,), (2,), (3,)]), numbers, 2), [[(1,), (2,)], [(3,)]], torn=True, show=rows
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some land where the run is freed
def test_functions_for_spark_outlive_an_interrupt_or_say_that_they_did_not() -> None:
    whole = doubling().map_in_arrow()
    twice_rows = pk.spark.ordered(lambda row: (row["k"] * 2,), "k bigint", rows=True, workers=1, mode="inline")
    expected = [rows(batch) for batch in whole(blocks())]
    assert len(expected) == 3
    at_every_instruction(lambda: whole(blocks()), expected, torn=True, stride=7, show=rows)
    at_every_instruction(
        lambda: twice_rows(blocks()), [list(itertools.chain(*expected))], torn=True, stride=7, show=rows
    )
    each = pk.spark.ordered_partitions(twice, workers=1, mode="inline", chunk=2)
    at_every_instruction(lambda: each(range(5)), TWICE, torn=True, stride=7)


# Programs of workers


def in_this_thread(program: Callable[[Worker], Any]) -> Any:
    with alone(1) as seats:
        return run_here(seats, program)


def test_a_loop_over_a_sequencer_that_begins_again_gets_what_an_interrupt_kept() -> None:
    def program(worker: Worker, interrupts: Interrupts) -> list[int]:
        got: list[int] = []
        with worker.sequencer() as log:
            for x in range(4):
                log.push(x)
            log.close()
            while not log.finished or len(got) < 4:
                with contextlib.suppress(KeyboardInterrupt), interrupts.armed():
                    got.extend(log)
        return got

    for at in itertools.count():
        interrupts = Interrupts(at)
        assert in_this_thread(lambda worker, interrupts=interrupts: program(worker, interrupts)) == [0, 1, 2, 3], at
        if not interrupts.fired:
            break


def all_of(iterable: Any, interrupts: Interrupts) -> list[Any]:
    """What there is now, by somebody who catches interrupts and goes on."""
    got: list[Any] = []
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            with interrupts.armed():
                got.extend(iterable())
            return got


def test_an_operator_that_catches_interrupts_gets_each_block_and_notification_once() -> None:
    def program(worker: Worker, interrupts: Interrupts) -> tuple[list[Any], list[int]]:
        blocks: list[Any] = []
        complete: list[int] = []
        with worker.dataflow() as scope:
            numbers, stream = scope.input()

            def keep(capability: Any) -> Any:
                capability.drop()

                def logic(input: Any, output: Any, frontiers: Any) -> None:
                    for capability, block in all_of(lambda: input, interrupts):
                        blocks.append((capability.time, block))
                        frontiers.notify_at(capability)
                    complete.extend(c.time for c in all_of(frontiers.notifications, interrupts))

                return logic

            stream.unary(keep)
        for time in range(3):
            numbers.advance_to(time)
            numbers.send([time])
        numbers.close()
        return blocks, complete

    for at in itertools.count():
        interrupts = Interrupts(at)
        blocks, complete = in_this_thread(lambda worker, interrupts=interrupts: program(worker, interrupts))
        assert (blocks, complete) == ([(0, [0]), (1, [1]), (2, [2])], [0, 1, 2]), (at, interrupts.places)
        if not interrupts.fired:
            break


def test_an_input_holds_no_capability_of_a_block_that_it_gave() -> None:
    def program(worker: Worker) -> list[bool]:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()

            def first(capability: Any) -> Any:
                capability.drop()

                def logic(input: Any, output: Any, frontiers: Any) -> None:
                    for _ in input:
                        output.activate()
                        break

                return logic

            probe = stream.unary(first).probe()
        numbers.send([1])
        numbers.advance_to(1)
        worker.step_while(lambda: probe.less_than(1))
        return True

    assert in_this_thread(program)


def test_a_storm_of_signals_costs_a_local_run_nothing() -> None:
    survives("""
        import pyarrow as pa
        def source():
            for number in range(400):
                time.sleep(0.001)
                yield pa.record_batch({"k": [number]})
        flow = pk.Flow("k bigint").map_batches(lambda batch: batch)
        results = iter(flow.run(source(), workers=2, streaming=True))
        got = []
        try:
            storm()
            got = collected(results, 400)
        finally:
            calm()
        print([batch.column(0)[0].as_py() for batch in got] == list(range(400)), flush=True)
        os._exit(0)
        """)


DROPPED = """
import os, signal, threading, time
import pyarrow as pa
import penstock as pk
from penstock._pump import Pump
from penstock.ordered._driver import Driver

def told(text):
    print(text, flush=True)

heard = 0

def handler(number, frame):
    global heard
    heard += 1
    told("heard")
    if heard > 1 and frame.f_code.co_filename == "<string>":
        told("ours again")
        os._exit(0)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, handler)
held = threading.Event()

def pause():
    for _ in range(400):
        time.sleep(0.05)  # one that begins just behind a signal is not ended by it

def slow(x):
    told("in")
    held.wait(50)  # longer than the test, and no interrupt reaches it
    return x

def struck(close):
    def closes(self, *limit):
        os.kill(os.getpid(), signal.SIGINT)  # who waits for this
        close(self, *limit)
    return closes

for cls in (Pump, Driver):
    cls.close = struck(cls.close)

table = pa.table({"k": [1]})
flow = pk.Flow(table.schema).map_batches(slow)

def collect():
    try:
        flow.collect(table)
    except KeyboardInterrupt:
        told("ours again")
        os._exit(0)

def loop():
    for batch in flow.run(table):
        pass

def ordered():
    for item in pk.ordered_map(slow, [1], workers=1, mode="threads"):
        pass

def left():
    results = flow.run(table)
    try:
        next(results)
    except KeyboardInterrupt:
        pass
    del results
    pause()

try:
    FORM()
except KeyboardInterrupt:
    pass
pause()
"""


@pytest.mark.parametrize("form", ["collect", "loop", "ordered", "left"])
def test_an_interrupt_ends_the_wait_for_a_run_that_is_dropped(form: str) -> None:
    """It was swallowed there, as was every further one, until a function of the user's returned."""
    command = [sys.executable, "-c", DROPPED.replace("FORM", form)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = threading.Timer(15, child.kill)
    try:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "in\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "heard\n"
        limit.start()
        # communicate() would not have what readline() has read ahead.
        told, wrong = child.stdout.read(), child.stderr.read()
    finally:
        limit.cancel()
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()
    # Where it ends the wait of __del__ it is raised once more, in who let go of the run.
    heard = 1 if form == "collect" else 2
    assert (told, wrong) == (heard * "heard\n" + "ours again\n", "")
