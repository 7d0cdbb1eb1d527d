"""Ordered runs in threads and processes: the serial twin again, then everything that can go wrong."""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import dataclasses
import decimal
import enum
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _children, errors, ordered
from penstock.ordered import _driver
from penstock.ordered import _processes as processes
from penstock.ordered import _wire as wire
from penstock.ordered._chunk import Chunk, Failure, estimate_bytes
from penstock.ordered._driver import _open
from penstock.ordered._operators import compile_steps
from penstock.ordered._parallel import Parallel
from penstock.ordered._pipeline import check_options
from penstock.ordered._policy import Chooser
from penstock.ordered._turns import Turns
from test_ordered import STEPS, Boom, batches_of, outcomes, risky, serial, sums

sys.path.insert(0, str(Path(__file__).parent / "surface"))
from forked import in_child


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


def children(of: int | None = None) -> set[int]:
    """Process ids of the children of a process."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == (of or os.getpid()) and fields[0] != "Z":
                    found.add(int(entry.name))
    return found


def native_threads() -> list[str]:
    """Names of the threads of native runs."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("penstock-o")]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    # An exception that a test of another module caught may hold a run that was never closed, until it is collected.
    gc.collect()
    before = children()
    yield
    gc.collect()
    try:
        eventually(lambda: children() <= before and not native_threads())
    except AssertionError:
        raise AssertionError(f"processes {children() - before} and threads {native_threads()} are left") from None
    finally:
        for driver in list(_open):  # a test that failed holds on to its run
            driver.close(2.0)


@settings(max_examples=examples(40))
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=150),
    st.sampled_from([None, 1, 3, 50]),
    st.sampled_from([None, 1, 10]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from(["adaptive", "qst", "lip", "et", "ct"]),
    st.sampled_from(["hybrid", "partitioned"]),
)
def test_threads_equal_the_serial_twin(
    kinds: list[str], xs: list[int], chunk: int | None, in_flight: int | None, workers: int, scheduler: str, queue: str
) -> None:
    pipeline = ordered.Pipeline([STEPS[kind]() for kind in kinds], scheduler=scheduler, queue=queue)
    results = pipeline.run(iter(xs), mode="threads", chunk=chunk, in_flight=in_flight, workers=workers)
    assert outcomes(results) == serial(kinds, xs)


@pytest.mark.parametrize("scheduler", ["adaptive", "qst", "lip", "et", "ct"])
def test_processes_equal_the_serial_twin(scheduler: str) -> None:
    kinds = ["map", "flat_map", "partitioned", "filter", "stateful", "map"]
    xs = [(i * 7919) % 1000 for i in range(400)]
    for queue in ("hybrid", "partitioned"):
        pipeline = ordered.Pipeline([STEPS[kind]() for kind in kinds], scheduler=scheduler, queue=queue)
        results = pipeline.run(iter(xs), mode="processes", workers=2, chunk=30)
        assert outcomes(results) == serial(kinds, xs)


def slow(x: int) -> int:
    """Waits now and then, so that results come in another order than items."""
    if x % 3 == 0:
        time.sleep(0.002)
    return x


def test_waiting_functions_overlap_in_threads_and_keep_order() -> None:
    four = threading.Barrier(4)  # who is alone breaks it
    assert list(pk.ordered_map(lambda x: (four.wait(60), x)[1], range(16), workers=8, mode="threads")) == list(
        range(16)
    )
    assert list(pk.ordered_map(slow, range(300), workers=4, mode="threads", chunk=2)) == list(range(300))


def test_the_state_of_a_key_sees_its_items_in_order_while_other_keys_work() -> None:
    inside: dict[int, int] = {}
    most = 0

    def step(last: int, x: int) -> tuple[int, list[int]]:
        nonlocal most
        key = x % 4
        inside[key] = inside.get(key, 0) + 1
        most = max(most, sum(inside.values()))
        assert inside[key] == 1, "two workers on one key"
        assert x > last
        if x == 0:
            eventually(lambda: most > 1)  # the first waits for one of another key
        time.sleep(0.001)
        inside[key] -= 1
        return x, [x]

    keyed = ordered.partitioned(step, key=lambda x: x % 4, initial=-1, partitions=16)
    assert list(ordered.Pipeline([keyed]).run(range(200), workers=4, mode="threads", chunk=5)) == list(range(200))
    assert most > 1


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_run_ahead_is_bounded_in_items(mode: str) -> None:
    read = 0

    def source() -> Iterator[int]:
        nonlocal read
        for x in range(200):
            read += 1
            yield x

    results = pk.ordered_map(abs, source(), workers=2, in_flight=7, mode=mode)
    assert read == 0
    for taken, x in enumerate(results):
        assert x == taken and read - taken <= 7
    assert read == 200


def test_run_ahead_is_bounded_in_bytes() -> None:
    read = 0

    def source() -> Iterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield bytes(1 << 20)

    results = pk.ordered_map(len, source(), workers=2, in_flight_bytes=4 << 20, mode="threads", chunk=1)
    for taken, _ in enumerate(results):
        assert read - taken <= 6


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_errors_come_at_their_places_with_a_note(mode: str) -> None:
    results = pk.ordered_map(risky, range(12), mode=mode, workers=2, chunk=4)
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(Boom) as caught:
        next(results)
    assert caught.value.args == (3,)
    notes = "\n".join(caught.value.__notes__)
    assert "item 3 of the input, in map risky" in notes
    if mode == "processes":
        assert "raise Boom(x)" in notes  # the traceback over there
    rest = outcomes(results)
    assert rest[:3] == [8, 10, 12] and rest[6] == (Boom, "10") and len(rest) == 8
    assert results.stats().errors == 2


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_an_input_that_raises_is_heard_after_all_results(mode: str) -> None:
    def source() -> Iterator[int]:
        yield from range(25)
        raise Boom("input")

    results = pk.ordered_map(slow, source(), mode=mode, workers=3, chunk=2)
    assert [next(results) for _ in range(25)] == list(range(25))
    with pytest.raises(Boom, match="input"):
        next(results)
    assert list(results) == []


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_closing_early_stops_everything(mode: str) -> None:
    others, read = children(), 0

    def source() -> Iterator[int]:
        nonlocal read
        while True:
            read += 1
            yield read

    with pk.ordered_map(slow, source(), mode=mode, workers=2) as results:
        assert next(results) == 1
        assert results.stats().mode == mode and results.stats().workers == 2
        # A thread names itself, and may not have run yet when another one has the first result.
        eventually(lambda: bool(children() - others) if mode == "processes" else len(native_threads()) == 2)
    before = read
    assert list(results) == [] and read == before
    if mode == "processes":
        assert children() <= others
    # The same without a close: the last reference is enough.
    results = pk.ordered_map(slow, source(), mode=mode, workers=2)
    assert next(results) == before + 1
    del results


def leave(x: int) -> int:
    if x == 5:
        os._exit(3)
    return x


def test_what_functions_print_in_a_process_is_there_with_their_results(script: Script) -> None:
    process = script("""
        import os, signal, sys, penstock as pk
        os.environ.pop("PYTHONUNBUFFERED", None)
        def say(x):
            print("item", x)
            print("item", x, "too", file=sys.stderr)
            return os.getpid()
        sys.stderr.reconfigure(line_buffering=False)
        results = pk.ordered_map(say, range(3), mode="processes", workers=1, chunk=3)
        pid = next(results)
        os.kill(pid, signal.SIGKILL)
        results.close()
        """)
    out, err = process.communicate(timeout=100)
    assert out.split("\n") == ["item 0", "item 1", "item 2", ""]
    assert err.split("\n") == ["item 0 too", "item 1 too", "item 2 too", ""]


class Late:
    """Output that takes a while once `path` is there, and writes to it then."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def flush(self) -> None:
        if self.path.exists():
            time.sleep(3 * processes._PATIENCE)
            self.path.write_text("all of it")


def write_late(path: str) -> str:
    sys.stdout = cast(Any, Late(path))
    return path


def test_a_process_at_rest_has_time_to_end(tmp_path: Path) -> None:
    path = tmp_path / "late"
    results = pk.ordered_map(write_late, [str(path)], mode="processes", workers=1)
    assert next(results) == str(path)
    path.touch()
    results.close()
    assert path.read_text() == "all of it"


def hang_there(path: str) -> None:
    Path(path).touch()
    time.sleep(100)


def test_a_process_that_is_at_work_does_not_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_REST", 90.0)
    path = tmp_path / "there"
    pool = processes.Pool((ordered.map(hang_there),), 1)
    pool.begin(0, 1)
    raised: list[BaseException] = []

    def apply() -> None:
        try:
            pool.apply(0, "map hang_there", Chunk(0, 0, [str(path)]), None)
        except errors.OrderedError as error:
            raised.append(error)

    caller = threading.Thread(target=apply)
    caller.start()
    eventually(path.exists)
    started = time.monotonic()
    pool.close()
    caller.join(60)
    assert time.monotonic() - started < 60 and [str(error) for error in raised] == ["this run was closed"]


def test_a_function_that_ends_its_process_is_an_error_that_names_the_items() -> None:
    results = pk.ordered_map(leave, range(10), mode="processes", workers=2, chunk=3)
    found: list[Any] = []
    while True:
        try:
            found.append(next(results))
        except StopIteration:
            break
        except errors.ItemsLost as error:
            assert (error.item, error.last, error.exitcode, error.step) == (3, 5, 3, "map leave")
            found.append("lost")
    assert found == [0, 1, 2, "lost", 6, 7, 8, 9]


def test_a_function_that_ends_every_process_ends_the_run() -> None:
    results = outcomes(pk.ordered_map(lambda x: os._exit(4), range(100), mode="processes", workers=2, chunk=1))
    assert len(results) < 20 and results[-1][0] is errors.OrderedError and "in a row" in results[-1][1]


def test_a_killed_process_leaves_the_states_as_they_were() -> None:
    def step(total: int, x: int) -> tuple[int, list[int]]:
        if x == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return total + x, [total + x]

    keyed = ordered.partitioned(step, key=lambda x: x % 2, initial=0)
    results = outcomes(ordered.Pipeline([keyed]).run(range(8), mode="processes", workers=2, chunk=1))
    assert results[:4] == [0, 1, 2, 4] and results[4][0] is errors.ItemsLost and results[5:] == [9, 8, 16]


def test_an_item_that_takes_too_long_is_named_and_left_behind() -> None:
    def hang(x: int) -> int:
        if x == 3:
            time.sleep(60)
        return x

    run = pk.ordered_map(hang, range(6), workers=2, timeout=5)
    results = outcomes(run)
    assert (run.stats().mode, run.stats().why) == ("processes", "with timeout=, since only a process can be ended")
    assert results[:3] == [0, 1, 2] and results[3][0] is errors.ItemTimeout and results[4:] == [4, 5]
    assert "item 3 of the input" in results[3][1]


def test_a_thread_that_hangs_ends_the_run() -> None:
    def hang(x: int) -> int:
        while x == 3:
            pass
        return x

    results = outcomes(pk.ordered_map(hang, range(6), workers=2, timeout=6, mode="threads"))
    assert results[:3] == [0, 1, 2] and results[3][0] is errors.ItemTimeout and len(results) == 4


def test_what_does_not_pickle_is_said() -> None:
    lock = threading.Lock()

    def locked(x: int) -> int:
        with lock:
            return x

    with pytest.raises(errors.NotPicklable, match=r"map .*locked: the function cannot be sent"):
        next(pk.ordered_map(locked, range(3), mode="processes"))
    assert list(pk.ordered_map(locked, range(3), workers=2)) == [0, 1, 2]
    made = outcomes(
        pk.ordered_map(lambda x: threading.Lock() if x == 1 else x, range(3), mode="processes", workers=2, chunk=3)
    )
    assert made[0] == 0 and made[1][0] is errors.NotPicklable and made[2] == 2
    items: list[Any] = [1, lock, 3]
    sent = outcomes(pk.ordered_map(str, items, mode="processes", workers=2, chunk=3))
    assert sent[0] == "1" and sent[1][0] is errors.NotPicklable and sent[2] == "3"
    kept = ordered.stateful(lambda state, x: (threading.Lock(), [x]))
    states = outcomes(ordered.Pipeline([kept]).run([1, 2], mode="processes", workers=2, chunk=1))
    assert [kind for kind, _ in states] == [errors.NotPicklable] * 2


class Rude:
    """Pickles, and cannot be restored."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rude, ())


def _rude() -> None:
    raise ValueError("never again")


def test_what_cannot_be_restored_costs_nobody_else_its_result() -> None:
    modes: dict[str, Any] = {"mode": "processes", "workers": 2, "chunk": 4}
    made = outcomes(pk.ordered_map(lambda x: Rude() if x == 2 else x, range(6), **modes))
    assert made[:2] == [0, 1] and made[3:] == [3, 4, 5]
    assert made[2][0] is errors.NotPicklable and "item 2 of the input" in made[2][1]
    sent = outcomes(pk.ordered_map(str, [0, 1, Rude(), 3, 4, 5], **modes))
    assert sent[:2] == ["0", "1"] and sent[3:] == ["3", "4", "5"]
    assert sent[2][0] is errors.NotPicklable and "item 2 of the input" in sent[2][1]
    # Values that have an origin: of each item the results before the one.
    twice = ordered.Pipeline([ordered.flat_map(lambda x: [x, x]), ordered.map(lambda x: Rude() if x == 1 else x)])
    many = outcomes(twice.run(range(3), **modes))
    assert [one for one in many if isinstance(one, int)] == [0, 0, 2, 2] and many[2][0] is errors.NotPicklable


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_functions_find_the_context_variables_of_who_takes_results(mode: Any) -> None:
    def third(x: int) -> tuple[str, int]:
        number.set(number.get() + 1)
        return str(decimal.Decimal(1) / 3), number.get()

    def third_of(x: int) -> str:
        return str(decimal.Decimal(x) / 3)

    def keyed(x: int) -> str:
        made.add(third_of(x))
        return third_of(x)

    made: set[str] = set()
    number = contextvars.ContextVar("number", default=0)
    with decimal.localcontext(prec=4):
        number.set(6)
        items = list(pk.ordered_map(third, range(9), mode=mode, workers=2, chunk=1))
        key = ordered.partitioned(lambda _, x: (None, [third_of(x)]), key=keyed)
        keys = list(ordered.Pipeline([key]).run([1, 2, 1], mode=mode, workers=2, chunk=1))
    assert {text for text, _ in items} == {"0.3333"}
    assert mode == "inline" or {seen for _, seen in items} == {7}, "a copy for each call"
    assert keys == ["0.3333", "0.6667", "0.3333"] and made == {"0.3333", "0.6667"}


class Picky(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.lock = threading.Lock()


def picky(x: int) -> int:
    raise Picky(x, 2)


def test_an_exception_that_does_not_pickle_keeps_its_text() -> None:
    with pytest.raises(errors.UserFunctionError, match="map picky raised Picky, which does not pickle") as caught:
        next(pk.ordered_map(picky, [7], mode="processes", workers=2))
    assert any("Picky: 7" in note for note in caught.value.__notes__)


class Mute(Exception):
    """Neither pickles nor has a text."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Stuck:
    """Raises a mute exception where it is pickled; has no text either."""

    def __reduce__(self) -> Any:
        raise Mute

    __repr__ = Mute.__str__


class Stuck2(Stuck):
    """Raises one where it is restored."""

    def __reduce__(self) -> Any:
        return (stuck, ())


def stuck() -> None:
    raise Mute


def mutely(x: Any) -> Any:
    if x == 1:
        raise Mute
    return {2: Stuck, 3: Stuck2}.get(x, lambda: x)() if isinstance(x, int) else x


def test_exceptions_without_a_text_cost_nobody_else_its_result() -> None:
    items = [0, 1, 2, 3, 4, Stuck(), Stuck2(), 5]
    results = outcomes(pk.ordered_map(mutely, items, mode="processes", workers=1, chunk=8))
    assert [value for value in results if isinstance(value, int)] == [0, 4, 5]
    kinds = [value[0] for value in results if isinstance(value, tuple)]
    assert kinds == [errors.UserFunctionError, *[errors.NotPicklable] * 4]
    assert all("Mute" in value[1] for value in results if isinstance(value, tuple))
    state = ordered.partitioned(lambda state, x: (Stuck() if x == 1 else x, [x]), key=lambda x: x)
    kept = outcomes(ordered.Pipeline([state]).run([0, 1], mode="processes", workers=1, chunk=1))
    assert kept[0] == 0 and "the state of key 1 does not pickle" in kept[1][1]


def test_what_ends_a_worker_process_unforeseen_is_printed() -> None:
    code = """
        from penstock.ordered import _child
        _child._serve = lambda sock: 1 / 0
        _child.main(None)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


def double(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"a": pa.array(batch.column("a").to_numpy() * 2)})


def test_batches_and_arrays_travel_through_shared_memory() -> None:
    batches = [pa.record_batch({"a": np.arange(n) + n}) for n in (0, 10, 200_000, 5, 300_000)]
    pipeline = ordered.Pipeline([ordered.map_batches(double, same_length=True)])
    made = list(pipeline.run(batches, mode="processes", workers=2))
    assert made == [double(batch) for batch in batches]
    arrays = [np.arange(n) for n in (3, 100_000)]
    for got, array in zip(pk.ordered_map(lambda a: a + 1, arrays, mode="processes", workers=2), arrays, strict=True):
        assert (got == array + 1).all()
        got[0] = 5  # it is the caller's own


def test_types_that_users_register_travel_with_their_batches() -> None:
    class Degrees(pa.ExtensionType):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(pa.int64(), "tests.degrees")

        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage: pa.DataType, body: bytes) -> Any:
            return cls()

    kind = Degrees()
    pa.register_extension_type(kind)
    try:
        column = pa.ExtensionArray.from_storage(kind, pa.array([1, None, 3]))
        flat = pa.record_batch({"a": column})
        nested = pa.record_batch({"a": pa.ListArray.from_arrays([0, 1, 3], column), "b": [1, 2]})
        own = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"], pa.binary(16)))
        batches = [flat, nested, pa.record_batch({"a": own})]
        results = pk.ordered_map(lambda batch: (batch, str(batch.schema)), batches, mode="processes", workers=1)
        assert list(results) == [(batch, str(batch.schema)) for batch in batches]
        kinds = [wire.dumps(batch, []).count(b"_load_batch") for batch in batches]
        assert kinds == [0, 0, 1], "every process has the types of Arrow itself"
    finally:
        pa.unregister_extension_type("tests.degrees")


def test_keyed_columns_are_the_same_in_every_mode() -> None:
    rows = [("abcde"[i * i % 5], i) for i in range(200)]
    step = ordered.partitioned(
        sums, key="k", initial=0, schema="k string, sum bigint", finish=lambda key, state: [(key, -state)]
    )
    pipeline = ordered.Pipeline([step])
    inline = list(pipeline.run(batches_of(rows, 7), mode="inline"))
    for mode in ("threads", "processes"):
        assert list(pipeline.run(batches_of(rows, 7), mode=mode, workers=2, chunk=3)) == inline


def test_flows_run_on_workers() -> None:
    batches = batches_of([("abc"[v % 3], v) for v in range(60)], 5)
    counts = pk.Flow("k string, v bigint").key_by("k").agg(n=pk.sum("v"), emit="final")
    kept = pk.Flow("k string, v bigint").map_batches(lambda b: b, schema="k string, v bigint")
    pipeline = ordered.Pipeline([ordered.flow(kept), ordered.flow(counts)])
    found = [row for b in pipeline.run(batches, mode="threads", workers=3) for row in b.to_pylist()]
    assert found == [row for b in pipeline.run(batches, mode="inline") for row in b.to_pylist()]


def test_a_fork_while_it_runs_is_refused_there_and_harmless_here() -> None:
    for mode in ("threads", "processes"):
        results = pk.ordered_map(slow, range(200), mode=mode, workers=2, chunk=1)
        assert next(results) == 0

        def child(results: ordered.OrderedIterator = results, mode: str = mode) -> None:
            with pytest.raises(errors.ForkError, match="forked child"):
                next(results)
            # Logs may show it.
            assert repr(results).startswith(f"<ordered iterator: {mode}, ")
            assert [step.name for step in results.stats().steps] == ["map slow"]
            results.close()

        in_child(child)
        assert list(results) == list(range(1, 200))


def test_a_forked_child_can_run_its_own() -> None:
    def child() -> None:
        assert list(pk.ordered_map(slow, range(50), mode="threads", workers=2)) == list(range(50))
        assert list(pk.ordered_map(slow, range(50), mode="processes", workers=2)) == list(range(50))

    assert list(pk.ordered_map(slow, range(50), mode="threads", workers=2)) == list(range(50))
    in_child(child)


Script = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def script() -> Iterator[Script]:
    """Starts a script in a process of its own, which ends with the test, and after a minute in any case."""
    with contextlib.ExitStack() as ends:

        def start(text: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            ends.enter_context(process)
            ends.callback(process.kill)
            # Who waits for its output reads the end then.
            limit = threading.Timer(60, process.kill)
            limit.start()
            ends.callback(limit.cancel)
            return process

        yield start


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_ctrl_c_reaches_a_caller_who_waits_and_the_run_can_go_on(mode: str, script: Script, tmp_path: Path) -> None:
    process = script(f"""
        import itertools, os, time, penstock as pk
        def f(x):
            while x == 20 and not os.path.exists({str(tmp_path / "go")!r}):
                time.sleep(0.01)
            return x
        results = pk.ordered_map(f, range(100), mode={mode!r}, workers=2, chunk=1)
        got = [next(results) for _ in range(20)]
        try:
            print("waiting", flush=True)
            got.append(next(results))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        open({str(tmp_path / "go")!r}, "w").close()
        got += results
        print(got == list(range(100)), flush=True)
        """)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted\nTrue\n", err


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_the_interpreter_ends_with_an_open_iterator(mode: str, script: Script) -> None:
    process = script(f"""
        import itertools, time, penstock as pk
        results = pk.ordered_map(lambda x: time.sleep(0.01) or x, itertools.count(), mode={mode!r}, workers=2)
        print(next(results), next(results))
        """)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "0 1\n", "")


def test_the_end_of_the_interpreter_with_a_keyed_flow_is_quiet(script: Script) -> None:
    process = script("""
        import itertools, pyarrow as pa, penstock as pk
        from penstock import ordered
        def step(n, k):
            return (n or 0) + 1, (k, n or 0)
        flow = pk.Flow("k bigint").key_by("k").stateful_map(step, schema="k bigint, n bigint")
        results = pk.Pipeline([ordered.flow(flow)]).run(itertools.repeat(pa.record_batch({"k": [1]})), mode="inline")
        print(next(results).to_pylist())
        """)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "[{'k': 1, 'n': 0}]\n", "")


@pytest.mark.parametrize("how", ["close", "collect"])
def test_a_run_that_is_ended_from_its_own_function_ends(how: str, script: Script) -> None:
    """In a process of its own: what hangs would hang for good."""
    process = script(f"""
        import gc, threading, time, penstock as pk
        held = []
        gone = threading.Event()
        def work(x):
            time.sleep(0.005)
            if {how!r} == "close" and x == 20:
                held[0].close()
            elif {how!r} == "collect" and gone.is_set():
                gc.collect()
            return x
        results = pk.ordered_map(work, range(10_000), mode="threads", workers=2, chunk=1)
        held.append(results)
        if {how!r} == "close":
            try:
                list(results)
            except Exception as error:
                print(type(error).__name__)
        else:
            next(results)
            held.append(held)
            del results, held
            gone.set()
        def threads():
            names = []
            import os
            for task in os.listdir("/proc/self/task"):
                try:
                    names.append(open("/proc/self/task/" + task + "/comm").read())
                except OSError:
                    pass
            return [name for name in names if name.startswith("penstock-o")]
        deadline = time.monotonic() + 40
        while threads() and time.monotonic() < deadline:
            time.sleep(0.05)
        print("ended", not threads())
        """)
    out, err = process.communicate(timeout=60)
    assert out.splitlines()[-1:] == ["ended True"], (out, err)


def test_children_end_with_a_killed_parent(script: Script) -> None:
    process = script("""
        import time, penstock as pk
        def busy(x):
            while x:
                pass
            return x
        results = pk.ordered_map(busy, range(100), mode="processes", workers=2, chunk=1)
        print(next(results), flush=True)
        next(results)
        """)
    assert process.stdout is not None and process.stdout.readline() == "0\n"
    eventually(lambda: len(children(process.pid)) == 2)
    found = children(process.pid)
    process.kill()
    process.communicate()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found))


class Slow:
    """An item that lets others go before it while it is pickled, where they can."""

    def __init__(self, x: int, folder: Path) -> None:
        self.x, self.folder = x, folder

    def __reduce__(self) -> Any:
        # Two that do not hold both processes meanwhile never get there: hence the limit.
        deadline = time.monotonic() + 1
        while self.x == 0 and len(list(self.folder.glob("began-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return Slow, (self.x, self.folder)


def hold(item: Slow) -> int:
    (item.folder / f"began-{item.x}").touch()
    while item.x and not (item.folder / "go").exists():
        time.sleep(0.01)
    return item.x


@pytest.mark.parametrize(
    "step",
    [
        ordered.map(hold),
        ordered.partitioned(lambda state, item: (state, [hold(item)]), key=lambda item: item.x),
    ],
    ids=["map", "partitioned"],
)
def test_an_earlier_chunk_gets_a_process_before_later_ones(tmp_path: Path, step: ordered.Step) -> None:
    items = [Slow(x, tmp_path) for x in range(6)]
    with ordered.Pipeline([step]).run(items, mode="processes", workers=2, chunk=1) as results:
        first: list[int] = []
        caller = threading.Thread(target=lambda: first.append(next(results)), daemon=True)
        caller.start()
        caller.join(60)
        try:
            assert first == [0]
        finally:
            (tmp_path / "go").touch()
            caller.join()
        assert list(results) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("queue", ["hybrid", "partitioned"])
def test_items_of_one_key_get_a_process_before_later_ones_of_others(tmp_path: Path, queue: str) -> None:
    def held(state: None, x: int) -> tuple[None, list[int]]:
        while x >= 3 and not (tmp_path / "go").exists():
            time.sleep(0.01)
        return state, [x]

    # The queue lets go of the first key between two of its items, which are behind those of all others then.
    steps = [ordered.partitioned(held, key=lambda x: max(x, 2))]
    pipeline = ordered.Pipeline(steps, queue=queue)
    with pipeline.run(range(12), mode="processes", workers=2, chunk=1) as results:
        first: list[int] = []
        caller = threading.Thread(target=lambda: first.extend(itertools.islice(results, 3)), daemon=True)
        caller.start()
        caller.join(60)
        try:
            assert first == [0, 1, 2]
        finally:
            (tmp_path / "go").touch()
            caller.join()
        assert list(results) == list(range(3, 12))


@pytest.mark.parametrize("queue", ["hybrid", "partitioned"])
def test_keys_of_one_chunk_get_a_process_before_those_of_later_chunks(tmp_path: Path, queue: str) -> None:
    """A queue that goes from partition to partition had both processes in later chunks while the first waited."""

    def held(state: None, x: int) -> tuple[None, list[int]]:
        while x >= 16 and not (tmp_path / "go").exists():
            time.sleep(0.01)
        return state, [x]

    pipeline = ordered.Pipeline([ordered.partitioned(held, key=lambda x: x % 16)], queue=queue)
    with pipeline.run(range(160), mode="processes", workers=2, chunk=8) as results:
        first: list[int] = []
        caller = threading.Thread(target=lambda: first.extend(itertools.islice(results, 16)), daemon=True)
        caller.start()
        caller.join(60)
        try:
            assert first == list(range(16))
        finally:
            (tmp_path / "go").touch()
            caller.join()
        assert list(results) == list(range(16, 160))


def test_turns_go_by_number_whoever_asks_first() -> None:
    turns = Turns(2)
    turns.begin(5, callers=5)
    told: SimpleQueue[tuple[int, int]] = SimpleQueue()
    threads = [threading.Thread(target=lambda n=n: told.put((n, turns.take(n, 0)))) for n in (9, 7, 6, 8)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        eventually(lambda number=number: turns._asked == number)
    assert told.empty()  # 5 has not asked
    turns.passed(5, 0)
    got = [told.get(timeout=60) for _ in range(2)]
    assert sorted(number for number, _ in got) == [6, 7] and told.empty()
    turns.give(got[0][1], 0)
    assert told.get(timeout=60)[0] == 8
    turns.close()
    assert turns.take(3, 0) == -1 and told.get(timeout=60) == (9, -1)
    for thread in threads:
        thread.join()


def test_turns_wait_for_no_more_callers_than_there_are() -> None:
    turns = Turns(1)
    turns.begin(5, callers=32)
    told: SimpleQueue[tuple[int, int]] = SimpleQueue()
    threads = [threading.Thread(target=lambda n=n: told.put((n, turns.take(n, 0)))) for n in (7, 6)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        eventually(lambda number=number: turns._asked == number)
    assert told.empty()  # of 32 one may bring 5
    turns.limit_callers(2)
    assert told.get(timeout=60) == (6, 0)
    turns.close()
    assert told.get(timeout=60) == (7, -1)
    for thread in threads:
        thread.join()


class Asking:
    """Threads that ask for turns at one operator, each with a part ``(number, partition)``."""

    def __init__(self, workers: int, callers: int, *parts: list[int]) -> None:
        self.turns = Turns(workers)
        self.turns.begin(0, callers)
        for number, partitions in enumerate(parts):
            self.turns.announce(number, 0, partitions)
        self.had: dict[tuple[int, int], int] = {}
        self.threads: list[threading.Thread] = []
        self.done_with = 0

    def ask(self, number: int, partition: int) -> None:
        """Begin to wait."""
        thread = threading.Thread(target=self._take, args=(number, partition))
        self.threads.append(thread)
        thread.start()
        eventually(lambda: self._asked() == len(self.threads))

    def _asked(self) -> int:
        with self.turns._lock:
            return self.turns._asked

    def _take(self, number: int, partition: int) -> None:
        self.had[number, partition] = self.turns.take(number, 0, partition)

    def done(self, number: int, partition: int) -> None:
        """Give it back."""
        self.done_with += 1
        self.turns.give(self.had.pop((number, partition)), 0, partition)

    def has(self, *parts: tuple[int, int]) -> None:
        """These have a process, and no others."""
        waiting = len(self.threads) - self.done_with - len(parts)
        assert sum(len(operator.waiting) for operator in self.turns._operators.values()) == waiting
        eventually(lambda: self.had.keys() == set(parts))

    def close(self) -> None:
        self.turns.close()
        for thread in self.threads:
            thread.join()


def test_a_part_waits_for_all_parts_of_earlier_chunks() -> None:
    asking = Asking(2, 9, [1, 2], [3], [4])
    asking.ask(2, 4)
    asking.ask(1, 3)
    asking.ask(0, 1)
    asking.has((0, 1))  # (0, 2) has not asked, and the other process is its
    asking.ask(0, 2)
    asking.has((0, 1), (0, 2))
    asking.done(0, 1)
    asking.has((0, 2), (1, 3))
    asking.close()


def test_a_part_does_not_wait_for_one_that_is_behind_another_of_its_partition() -> None:
    asking = Asking(2, 9, [1], [1], [2], [3])
    asking.ask(0, 1)
    asking.ask(2, 2)
    asking.has((0, 1), (2, 2))
    asking.ask(3, 3)
    asking.done(0, 1)
    asking.has((2, 2))  # the process is free for (1, 1)
    asking.ask(1, 1)
    asking.has((2, 2), (1, 1))
    asking.close()


def test_nobody_is_waited_for_who_cannot_come() -> None:
    asking = Asking(2, 3, [1], [2], [3], [4])
    asking.ask(2, 3)
    asking.ask(3, 4)
    asking.has()
    asking.ask(1, 2)  # all callers are here, so (0, 1) has none
    asking.has((1, 2), (2, 3))
    asking.close()


def burn(x: int) -> int:
    total = 0
    for i in range(6000):
        total += i
    return total


def test_auto_measures_what_holds_the_lock_and_what_waits() -> None:
    results = pk.ordered_map(burn, range(4000), workers=2)
    assert sum(1 for _ in results) == 4000
    stats = results.stats()
    assert {"inline", "threads"} <= stats.rates.keys(), stats
    # On a busy machine a trial may come out otherwise; it never stays alone.
    with pk.ordered_map(lambda x: time.sleep(0.001) or x, itertools.count(), workers=4) as results:
        for x in range(60_000):
            assert next(results) == x
            stats = results.stats()
            if stats.mode != "inline" and stats.rates.get("threads", 0) > 0:
                break
    assert stats.mode != "inline" and stats.rates["threads"] > 0, stats


def test_auto_stays_in_the_callers_thread_for_cheap_items() -> None:
    def stays() -> bool:
        results = pk.ordered_map(abs, range(50_000), workers=4)
        assert sum(results) == sum(range(50_000))
        return results.stats().mode == "inline" and "too little" in results.stats().why

    # A pause of the machine looks like work: one round in ten has none in its first chunks.
    assert any(stays() for _ in range(10))


def test_auto_keeps_state_across_its_modes() -> None:
    def step(total: int, x: int) -> tuple[int, list[int]]:
        for _ in range(2000):
            pass
        return total + x, [total + x]

    xs = list(range(3000))
    keyed = ordered.partitioned(step, key=lambda x: x % 7, initial=0, finish=lambda key, state: [(key, state)])
    pipeline = ordered.Pipeline([keyed])
    assert list(pipeline.run(xs, workers=2)) == list(pipeline.run(xs, mode="inline"))


class Sent(Chooser):
    """Goes to worker processes at once, for as long as it may."""

    def __post_init__(self) -> None:
        self.mode, self._phase = "processes" if self.processes else "threads", "settled"
        self.rates = {"inline": 1.0, "threads": 2.0, "processes": 3.0}

    def delivered(self, *told: Any) -> None:
        """Nothing is measured."""


@dataclasses.dataclass
class Locked:
    """Does not pickle from some number on."""

    number: int
    lock: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.lock is not None:
            raise TypeError("it has a lock")
        return (Locked, (self.number,))


def locked_from(first: int, number: int) -> Locked:
    return Locked(number, threading.Lock() if number >= first else None)


class Odd(Exception):
    """Cannot be restored by its class and its arguments, as of many libraries."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")
        self.number = number


class Shut(Exception):
    """Does not leave its process at all."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.lock = threading.Lock()


def refuse_some(x: int) -> int:
    if x % 10 == 9:
        raise Odd(x, "nine")
    if x % 10 == 8 and x > 40:
        raise Shut(x)
    return x


def count_in_lock(state: Any, x: int) -> tuple[Any, list[Any]]:
    state = Locked(0) if state is None else state
    return locked_from(3, state.number + 1), [(x, state.number)]


def known(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        return (value[0], str(value[1]).splitlines()[0])
    return value.number if isinstance(value, Locked) else value


STAYING = {
    "items": ([ordered.map(lambda item: item.number + 1)], [locked_from(30, x) for x in range(80)]),
    "items that cannot be restored": ([ordered.map(lambda x: 1)], [Rude() if x == 30 else x for x in range(80)]),
    "results": ([ordered.map(functools.partial(locked_from, 30))], range(80)),
    "results that cannot be restored": ([ordered.map(lambda x: Rude() if x == 30 else x)], range(40)),
    "values between steps": (
        [
            ordered.map(functools.partial(locked_from, 30)),
            ordered.partitioned(
                lambda n, item: (n + 1, [(item.number, n)]), key=lambda item: item.number % 5, initial=0
            ),
        ],
        range(80),
    ),
    "keyed items": (
        [ordered.partitioned(lambda n, item: (n + 1, [(item.number, n)]), key=lambda item: item.number % 5, initial=0)],
        [locked_from(30, x) for x in range(80)],
    ),
    "states": ([ordered.partitioned(count_in_lock, key=lambda x: x % 5)], range(80)),
    "results of keyed steps": (
        [ordered.partitioned(lambda n, x: (n + 1, [locked_from(30, x), n]), key=lambda x: x % 5, initial=0)],
        range(80),
    ),
    "states and their end": (
        [ordered.partitioned(count_in_lock, key=lambda x: x % 5, finish=lambda key, state: [(key, state.number)])],
        range(80),
    ),
    "exceptions": ([ordered.map(refuse_some)], range(80)),
}


@pytest.mark.parametrize("what", STAYING)
def test_what_does_not_travel_is_done_here_where_nobody_asked_for_processes(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an error in place of its result, or of many; a serial run has none."""
    steps, items = STAYING[what]
    pipeline = ordered.Pipeline(steps)
    serial = [known(value) for value in outcomes(pipeline.run(items, mode="inline"))]
    monkeypatch.setattr(_driver, "Chooser", Sent)
    run = pipeline.run(items, workers=2, chunk=4)
    got = [known(value) for value in outcomes(run)]
    stats = run.stats()
    if "cannot be restored" in what and "results" in what:
        assert [type(value) for value in got] == [type(value) for value in serial]
    else:
        assert got == serial
    assert (stats.mode, "not all of it can go to processes" in stats.why) == ("threads", True), stats


def test_an_exception_whose_class_takes_other_arguments_travels() -> None:
    """It came back as another one, and so what caught it before caught it no longer."""
    made = outcomes(pk.ordered_map(refuse_some, range(20), mode="processes", workers=2, chunk=4))
    assert [value for value in made if isinstance(value, int)] == [x for x in range(20) if x % 10 != 9]
    assert [value[0] for value in made if isinstance(value, tuple)] == [Odd] * 2
    run = pk.ordered_map(refuse_some, [9], mode="processes", workers=2)
    with pytest.raises(Odd, match="9: nine") as caught:
        next(run)
    assert caught.value.number == 9 and any("In worker process" in note for note in caught.value.__notes__)


READS = """
import json
from settings import LIMITS
import settings

FACTOR = 1
NAMES = {{"a": [1], "b": [2]}}
def helper(x):
    return x
class Config:
    size = 3
CACHE = object()

def f(x):
    return helper(x) * FACTOR + len(NAMES) + Config.size + settings.DEEP + sum(LIMITS) + inner(x)
def inner(x):
    return [y for y in range(settings.INNER)]
def g(x):
    return CACHE, json.dumps(x)
"""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("lib.FACTOR = 2", "lib.FACTOR has another value"),
        ("lib.NAMES['b'].append(3)", "lib.NAMES has another value"),
        ("lib.helper = abs", "lib.helper has another value"),
        ("lib.helper = lambda x: 2 * x", "lib.helper has another value"),
        ("lib.Config.size = 4", "lib.Config.size has another value"),
        ("settings.DEEP = 5", "settings.DEEP has another value"),
        ("lib.LIMITS.add(9)", "LIMITS has another value"),
        ("settings.INNER = 5", "settings.INNER has another value"),
        ("del sys.path[0]", "lib.FACTOR is missing"),
        ("lib.UNREAD = 5; lib.NAMES = dict(reversed(lib.NAMES.items()))", ""),
        ("import builtins; builtins.display = print", ""),  # as notebooks do
    ],
)
def test_what_modules_have_that_are_imported_anew_is_compared(
    change: str, named: str, tmp_path: Path, script: Script
) -> None:
    (tmp_path / "lib.py").write_text(READS.format())
    (tmp_path / "settings.py").write_text("DEEP = 1\nINNER = 2\nLIMITS = {4, 5, 6}\n")
    process = script(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import lib, settings
        from penstock import ordered
        from penstock.ordered._pools import Starting
        calls = [lib.f, lib.g, lambda x: lib.f(x), __import__("functools").partial(lib.f)]
        {change}
        for call in calls:
            starting = Starting([ordered.map(call)], 1, [])
            starting.begin()
            starting._work.wait()
            print(starting.ready, starting.why)
            starting.close()
        """)
    out, err = process.communicate(timeout=120)
    told = out.splitlines()
    assert len(told) == 4, err
    if not named:
        assert [line.split()[0] for line in told] == ["True"] * 4, out
    elif "missing" in named:
        assert all(line.startswith("False processes cannot be used: ") for line in told), out
    else:
        assert told[1].startswith("True"), out
        assert all(named in told[at] and told[at].startswith("False") for at in (0, 2, 3)), out


def test_stats_are_told_while_the_run_ends() -> None:
    for _ in range(20):
        results = pk.ordered_map(slow, range(8), workers=2, mode="threads", chunk=1)
        wrong: list[BaseException] = []
        over = threading.Event()

        def look(results: Any = results, over: Any = over, wrong: Any = wrong) -> None:
            while not over.is_set():
                try:
                    results.stats()
                except BaseException as error:
                    wrong.append(error)

        looking = threading.Thread(target=look)
        looking.start()
        assert len(list(results)) == 8
        over.set()
        looking.join()
        assert wrong == []


def test_what_a_function_keeps_per_thread_lasts_as_long_as_the_thread() -> None:
    mine = threading.local()
    made: list[int] = []

    def f(x: int) -> int:
        if not hasattr(mine, "session"):
            mine.session = threading.get_ident()
            made.append(x)
        assert mine.session == threading.get_ident()
        return x

    assert list(pk.ordered_map(f, range(500), mode="threads", workers=3, chunk=1)) == list(range(500))
    assert len(made) <= 3


def test_a_module_that_a_child_cannot_import_leaves_auto_in_threads(tmp_path: Path, script: Script) -> None:
    (tmp_path / "gone.py").write_text("def burn(x):\n    for _ in range(5000):\n        pass\n    return x\n")
    process = script(f"""
        import sys, penstock as pk
        sys.path.insert(0, {str(tmp_path)!r})
        import gone
        sys.path.pop(0)
        results = pk.ordered_map(gone.burn, range(6000), workers=2)
        assert list(results) == list(range(6000))
        assert results.stats().errors == 0 and results.stats().mode != "processes", results.stats()
        forced = pk.ordered_map(gone.burn, range(10), workers=2, mode="processes")
        try:
            next(forced)
        except pk.errors.NotPicklable as error:
            print("cannot be restored in a worker process" in str(error), "gone" in str(error))
        """)
    out, err = process.communicate(timeout=60)
    assert out == "True True\n", err


def test_a_child_that_cannot_restore_the_functions_says_so_to_every_caller(tmp_path: Path, script: Script) -> None:
    (tmp_path / "gone.py").write_text("def burn(x):\n    return x\n")
    process = script(f"""
        import sys, penstock as pk
        from penstock import ordered
        from penstock.ordered._chunk import Chunk
        from penstock.ordered._processes import Pool
        sys.path.insert(0, {str(tmp_path)!r})
        import gone
        sys.path.pop(0)
        pool = Pool([ordered.map(gone.burn)], 1)
        for first in range(3):
            chunk = Chunk(0, first, [first])
            try:
                pool.apply(0, "burn", chunk, None)
            except pk.errors.NotPicklable as error:
                print("cannot be restored in a worker process" in str(error))
            else:
                print(chunk.values[0].error)
        pool.close()
        """)
    out, err = process.communicate(timeout=60)
    assert out == "True\n" * 3, err


@pytest.mark.parametrize("workers", [683, 684, 1024])
def test_as_many_workers_as_pass_the_check_can_be_had(workers: int) -> None:
    options = check_options(workers, None, None, "processes", None, None)
    operators = compile_steps([ordered.map(abs)])
    # The pool itself would start so many processes; the run only hands work to it.
    run = Parallel(operators, options, cast(Any, object()))
    run.close()
    with pytest.raises(errors.ConfigError, match="1024"):
        check_options(1025, None, None, "processes", None, None)


def test_a_function_of_keys_may_look_at_its_run() -> None:
    runs: list[Any] = []

    def key(item: int) -> int:
        if runs:
            assert [step.name for step in runs[0].stats().steps] == ["partitioned add"]
        return item % 2

    def add(total: int, item: int) -> tuple[int, list[int]]:
        return total + item, [total + item]

    runs.append(
        ordered.Pipeline([ordered.partitioned(add, key=key, initial=0)]).run(range(200), mode="threads", workers=2)
    )
    wanted = [sum(range(item % 2, item + 1, 2)) for item in range(200)]
    assert list(runs[0]) == wanted


def test_items_that_fail_keep_no_run_from_processes() -> None:
    with contextlib.closing(pk.ordered_map(risky, range(8), workers=2)) as results:
        driver = results._driver
        chunk = Chunk(0, 0, [Failure(Boom())] * 2)
        chunk.failed = 2
        driver._prepare(chunk)
        assert driver._starting is None and driver._chooser.processes
        chunk = Chunk(1, 2, [Failure(Boom()), 5])
        chunk.failed = 1
        driver._prepare(chunk)
        assert driver._starting is not None
        starting = driver._starting
        eventually(lambda: starting.ready or bool(starting.why))
        assert not starting.why


# Who ends a run beside its taker, what breaks a wait, and what an error holds


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_a_close_in_another_thread_ends_the_iteration(mode: str) -> None:
    more: SimpleQueue[int] = SimpleQueue()
    taken: list[int] = []

    def source() -> Iterator[int]:
        yield 1
        while True:
            yield more.get()

    def take() -> None:
        for value in results:
            taken.append(value)

    results = pk.ordered_map(abs, source(), mode=mode, workers=2)
    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    eventually(lambda: taken == [1])
    results.close()
    taker.join(30)
    assert not taker.is_alive()
    more.put(7)  # the thread of the input goes


class Alarm(Exception):
    """Raised by the handler of a signal."""


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_what_the_handler_of_a_signal_raises_loses_nothing(mode: str) -> None:
    come = threading.Event()

    def handler(*_: Any) -> None:
        come.set()
        raise Alarm

    def wait(x: int) -> int:
        assert x != 2 or mode == "processes" or come.wait(60)
        return x

    before = signal.signal(signal.SIGALRM, handler)
    found: list[Any] = []
    try:
        results = pk.ordered_map(slow if mode == "processes" else wait, range(30), mode=mode, workers=2, chunk=1)
        with results:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            while len(found) < 31:
                try:
                    found.append(next(results))
                except Alarm:
                    found.append(Alarm)
            assert list(results) == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    found.remove(Alarm)
    assert found == list(range(30))


@pytest.mark.parametrize("kind", [Alarm, RuntimeError])
@pytest.mark.parametrize("step", [ordered.map(abs), ordered.filter(abs)])
def test_what_the_handler_of_a_signal_raises_between_calls_loses_nothing(step: ordered.Step, kind: Any) -> None:
    """In a run in the caller's thread whose function is no code of Python: no signal is seen in it."""
    raised = 0

    def handler(_: int, frame: FrameType | None) -> None:
        nonlocal raised
        # Not in the lines of this test, nor where Python forgets it, or an object is asked for its size.
        own = frame is not None and frame.f_globals.get("__package__") == ordered.__name__
        if own and frame is not None and frame.f_code.co_name not in ("__del__", "_size"):
            raised += 1
            raise kind

    before, heard = signal.signal(signal.SIGALRM, handler), 0
    pipeline = ordered.Pipeline([step])
    try:
        for _ in range(50):
            found = 1
            with pipeline.run(list(range(1, 100_001)), mode="inline", chunk=1_000) as results:
                signal.setitimer(signal.ITIMER_REAL, 0.001, 0.002)
                while found < 100_001:
                    try:
                        assert next(results) == found
                        found += 1
                    except kind:
                        heard += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert list(results) == []
            if raised:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard == raised > 0


def test_numbers_of_users_that_count_give_what_came_before_their_error() -> None:
    class Number:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

        def __add__(self, other: int) -> Number:
            if self.value == 4:
                raise OverflowError("beyond")
            return Number(self.value + other)

    counted: Any = itertools.count(Number(0))  # type: ignore[call-overload]
    with ordered.Pipeline([ordered.map(lambda number: number.value)]).run(counted, mode="inline", chunk=100) as results:
        assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
        assert outcomes(results)[-1] == (OverflowError, "beyond")


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_the_error_of_an_item_holds_no_other_one(mode: str) -> None:
    class Held:
        def __init__(self, number: int) -> None:
            self.number = number

    alive: weakref.WeakSet[Held] = weakref.WeakSet()

    def made(number: int) -> Held:
        held = Held(number)
        alive.add(held)
        return held

    def call(item: Held) -> Held:
        if item.number % 50 == 7:
            raise Boom(item.number)
        return made(item.number)

    caught: list[Boom] = []
    with pk.ordered_map(call, map(made, range(1_000)), mode=mode, workers=2, chunk=100) as results:
        while True:
            try:
                next(results)
            except StopIteration:
                break
            except Boom as error:
                caught.append(error)
    del results
    gc.collect()
    assert [error.args[0] for error in caught] == list(range(7, 1_000, 50))
    assert sorted(held.number for held in alive) == list(range(7, 1_000, 50)), "each has its own item"


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_items_that_grow_are_not_read_far_ahead(mode: str) -> None:
    read = taken = most = 0

    def source() -> Iterator[bytes]:
        nonlocal read
        yield from itertools.repeat(b"", 20_000)
        for _ in range(400):
            read += 1
            yield bytes(1 << 17)

    with pk.ordered_map(len, source(), mode=mode, workers=2, in_flight_bytes=4 << 20) as results:
        for size in results:
            taken += size > 0
            most = max(most, read - taken)
    # Those of a chunk come out together.
    assert read == 400 and most < 100, "32 of them are 4 MiB"


def test_auto_with_a_timeout_compares_what_modules_have_and_does_here_what_does_not_travel(
    tmp_path: Path, script: Script
) -> None:
    (tmp_path / "lib.py").write_text("SCALE = 1\ndef f(x):\n    return x * SCALE\n")
    process = script(f"""
        import sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        import lib
        import penstock as pk
        def told(x):
            return type(x).__name__
        lib.SCALE = 10
        with pk.ordered_map(lib.f, range(4), workers=2, timeout=60) as results:
            print(list(results), results.stats().mode, results.stats().why)
        with pk.ordered_map(told, [1, threading.Lock(), 3], workers=2, timeout=60) as results:
            print(list(results), results.stats().mode)
        """)
    out, err = process.communicate(timeout=120)
    assert out.splitlines() == [
        "[0, 10, 20, 30] threads processes cannot be used: lib.SCALE has another value where its module is imported"
        " anew; mode='processes' does not ask",
        "['int', 'lock', 'int'] processes",
    ], err


def test_auto_with_a_timeout_does_here_what_a_child_cannot_restore_and_ends_while_one_starts(
    tmp_path: Path, script: Script
) -> None:
    (tmp_path / "slowly.py").write_text(
        "import os, time\n"
        "started = os.environ.get('STARTED')\n"
        "if started:\n"
        "    open(started, 'w').close()\n"
        "    time.sleep(120)\n"
        "def f(x):\n"
        "    return x\n"
    )
    process = script(f"""
        import os, sys, threading, time, types
        import penstock as pk
        only = types.ModuleType("only_here")
        sys.modules["only_here"] = only
        exec("def f(x): return x + 1", only.__dict__)
        with pk.ordered_map(only.f, range(5), workers=2, timeout=60) as results:
            print(list(results), results.stats().mode)
        sys.path.insert(0, {str(tmp_path)!r})
        import slowly
        os.environ["STARTED"] = started = {str(tmp_path / "started")!r}
        results = pk.ordered_map(slowly.f, range(5), workers=1, timeout=60)
        taker = threading.Thread(target=lambda: list(results), daemon=True)
        taker.start()
        while not os.path.exists(started):
            time.sleep(0.01)
        results.close()
        taker.join()
        print("ended")
        """)
    out, err = process.communicate(timeout=60)
    assert out.splitlines() == ["[1, 2, 3, 4, 5] threads", "ended"], err


class Celsius(pa.ExtensionType):  # type: ignore[misc]
    """A type of a user's."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "penstock.test.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Celsius:
        return cls()


def test_slices_of_batches_with_types_of_users_travel_without_the_rest() -> None:
    whole = pa.record_batch({"v": pa.ExtensionArray.from_storage(Celsius(), pa.array(range(100_000), pa.int64()))})
    slices = [whole.slice(at, 10) for at in range(0, 100, 10)]
    body = wire.dumps(slices, [])
    assert len(body) < 50_000
    made = wire.loads(body)
    assert [one.equals(other) for one, other in zip(made, slices, strict=True)] == [True] * 10
    assert [one.schema.field(0).type for one in made] == [Celsius()] * 10


def test_a_length_that_cannot_be_had_is_none() -> None:
    class Lazy(list[int]):
        def __len__(self) -> int:
            raise NotImplementedError

    assert list(pk.ordered_map(abs, Lazy([-1, 2]))) == [1, 2]


# Processes that a function leaves behind, and what else ends in the middle


def leave_a_shell(item: tuple[int, str]) -> int:
    number, path = item
    if number == 3:
        os.system(f"sleep 60 & echo $! > {path}")
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def leave_a_fork(item: tuple[int, str]) -> int:
    number, path = item
    if number == 3:
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
        Path(path).write_text(str(forked))
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("leave_one", [leave_a_shell, leave_a_fork])
def test_a_killed_process_is_noticed_while_one_that_it_left_behind_runs(leave_one: Any, tmp_path: Path) -> None:
    path = tmp_path / "left"
    started = time.monotonic()
    items = [(number, str(path)) for number in range(6)]
    try:
        results = outcomes(pk.ordered_map(leave_one, items, mode="processes", workers=2, chunk=1))
    finally:
        os.kill(int(path.read_text()), signal.SIGKILL)
    assert time.monotonic() - started < 40
    assert results[:3] == [0, 1, 2] and results[3][0] is errors.ItemsLost and results[4:] == [4, 5]


def kill(pid: int) -> None:
    """Kill a worker process, and wait until that was noticed."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.001)
        raise AssertionError(f"process {pid} is left")


IDLE: dict[str, Callable[[], ordered.Step]] = {
    "map": lambda: ordered.map(lambda x: (x, os.getpid())),
    "partitioned": lambda: ordered.partitioned(
        lambda total, x: (total + x, [(total + x, os.getpid())]), key=lambda x: 0, initial=0
    ),
}


@pytest.mark.parametrize("step", IDLE)
def test_a_process_that_ends_while_it_has_nothing_to_do_takes_no_items_along(step: str) -> None:
    results = ordered.Pipeline([IDLE[step]()]).run(range(5), mode="processes", workers=1, chunk=1, in_flight=1)
    first = next(results)
    kill(first[1])
    rest = list(results)
    assert [value for value, _ in [first, *rest]] == ([0, 1, 2, 3, 4] if step == "map" else [0, 1, 3, 6, 10])
    assert len({pid for _, pid in rest}) == 1 and rest[0][1] != first[1]


def test_a_process_that_ends_before_it_is_up_takes_no_items_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_children, "_BOOT", "import signal; signal.pause()")
    pool = processes.Pool((ordered.map(abs),), 1)
    try:
        child = pool._ask(0).get(timeout=60)
        monkeypatch.undo()
        assert child is not None
        kill(child.popen.pid)
        pool.begin(0, 1)
        chunk = Chunk(0, 0, [-2])
        pool.apply(0, "map abs", chunk, None)
        assert chunk.values == [2]
    finally:
        pool.close()
    monkeypatch.setattr(_children, "_BOOT", "raise SystemExit(5)")
    results = outcomes(pk.ordered_map(abs, range(3), mode="processes", workers=1))
    assert [kind for kind, _ in results] == [errors.OrderedError]
    assert "5 worker processes in a row ended, the last one" in results[0][1]
    assert "before it had anything to do: the run ends" in results[0][1]


def test_a_child_whose_reply_was_not_taken_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = processes.Pool((ordered.map(abs),), 1)
    try:
        pool.wait()
        pool.begin(0, 1)
        before = pool.pids()
        with monkeypatch.context() as patch:
            patch.setattr(processes.wire, "receive", lambda sock: (_ for _ in ()).throw(MemoryError("no room")))
            with pytest.raises(MemoryError):
                pool.apply(0, "map abs", Chunk(0, 0, [-1]), None)
        chunk = Chunk(1, 1, [-2])
        pool.apply(0, "map abs", chunk, None)
        assert chunk.values == [2] and pool.pids() and pool.pids() != before
    finally:
        pool.close()


SAME = Boom("always the same")


def always_same(x: int) -> int:
    raise SAME


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_one_exception_that_is_raised_again_names_each_item(mode: Any) -> None:
    results = pk.ordered_map(always_same, range(300), mode=mode, workers=2)
    raised = []
    for number in range(300):
        with pytest.raises(Boom, match="always the same") as caught:
            next(results)
        notes = [note for note in caught.value.__notes__ if note.startswith("item ")]
        assert notes == [f"item {number} of the input, in map always_same"]
        depth, at = 0, caught.value.__traceback__
        while at is not None:
            depth, at = depth + 1, at.tb_next
        assert depth < 20
        raised.append(caught.value)
    assert len({id(error) for error in raised}) == 300


class Single(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)


def test_one_exception_that_cannot_be_copied_has_the_mark_of_the_last_item() -> None:
    single = Single(1, 2)
    single.add_note("the user's own")

    def fail(xs: list[int]) -> list[int]:
        raise single

    results = ordered.Pipeline([ordered.map_batches(fail)]).run(range(6), mode="inline", chunk=2)
    for number in (0, 2, 4):
        with pytest.raises(Single) as caught:
            next(results)
        assert caught.value is single and single.__notes__ == [
            "the user's own",
            f"item {number} of the input, in map_batches fail",
            f"the call was for items {number} to {number + 1} of the input",
        ]


class Registered:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_reducers_that_users_register_serve_beside_pyarrow() -> None:
    lock = threading.Lock()
    copyreg.pickle(type(lock), lambda _: (threading.Lock, ()))  # type: ignore[arg-type, return-value]
    copyreg.pickle(Registered, lambda found: (Registered, ("reduced",)))  # type: ignore[arg-type, return-value]
    try:
        assert "pyarrow" in sys.modules
        assert wire.loads(wire.dumps(Registered(5))).value == "reduced"
        assert wire.loads(wire.dumps([lock]))[0].acquire()
        batch = pa.record_batch({"a": [1, 2]})
        assert wire.loads(wire.dumps(batch)) == batch
    finally:
        for kind in (type(lock), Registered):
            del copyreg.dispatch_table[kind]


class Lying:
    """Cannot tell its size."""

    @property
    def nbytes(self) -> int:
        raise ValueError("it was closed")

    def __sizeof__(self) -> int:
        raise ValueError("no size")


class Boasting:
    nbytes = 1 << 200


@dataclasses.dataclass(slots=True)
class Slotted:
    number: int
    body: bytes


class Plain:
    def __init__(self, body: Any) -> None:
        self.parts = [("body", body)]


def test_an_item_that_cannot_tell_its_size_passes() -> None:
    items: list[Any] = [Lying(), Boasting(), [Lying()], -5]
    for mode in ("inline", "threads"):
        got = list(pk.ordered_map(lambda x: type(x).__name__, items, mode=mode, workers=2))
        assert got == ["Lying", "Boasting", "list", "int"]


@pytest.mark.parametrize(
    "item",
    [
        lambda body: {"body": body},
        lambda body: dict.fromkeys(range(40), 0) | {"last": body},
        lambda body: [{"id": 1, "parts": [body]}],
        lambda body: Slotted(1, body),
        lambda body: Plain(body),
        lambda body: {"array": np.frombuffer(body, np.uint8)},
        lambda body: (1, deque([body])),
    ],
)
def test_estimates_look_into_what_holds_the_bytes(item: Any) -> None:
    values = [item(bytes(1 << 20)) for _ in range(20)]
    for some in (values, values[:1]):
        assert 0.95 < estimate_bytes(some) / (len(some) << 20) < 1.6
    loop: list[Any] = [1]
    loop.append(loop)
    assert 0 < estimate_bytes([loop]) < 1 << 20
    # However many there are, few are looked at.
    assert estimate_bytes([[0] * 1_000_000]) > 8_000_000


def counted(state: int | None, item: Any) -> tuple[int, list[Any]]:
    made = (state or 0) + 1
    return made, [threading.Lock() if item == "lock" else made]


def test_an_item_of_a_keyed_step_that_does_not_pickle_costs_its_neighbours_nothing() -> None:
    step = ordered.partitioned(counted, key=lambda x: 0, partitions=1, finish=lambda key, state: [("all", state)])
    run: dict[str, Any] = {"mode": "processes", "workers": 2, "chunk": 4}
    sent = outcomes(ordered.Pipeline([step]).run([1, 2, (x for x in ()), 3], **run))
    assert sent[:2] == [1, 2] and sent[3:] == [3, ("all", 3)]
    assert sent[2][0] is errors.NotPicklable and "item 2 of the input, of type generator" in sent[2][1]
    alone = outcomes(ordered.Pipeline([step]).run([(x for x in ())], **run))
    assert alone[0][0] is errors.NotPicklable and alone[1:] == []
    by_key = ordered.partitioned(counted, key=lambda x: threading.Lock() if x == 2 else 0, partitions=1)
    keys = outcomes(ordered.Pipeline([by_key]).run([1, 2, 3], **run))
    assert keys[0] == 1 and keys[2] == 2 and "the key of item 1 of the input, of type lock" in keys[1][1]
    # And a result.
    results = ordered.Pipeline([step]).run([1, "lock", 3], **run)
    assert next(results) == 1
    with pytest.raises(errors.NotPicklable, match="a result of type lock") as caught:
        next(results)
    assert caught.value.item == 1
    assert caught.value.__notes__ == ["item 1 of the input, in partitioned counted"]
    assert list(results) == [3, ("all", 3)]


class NoReturn:
    """Pickles, and cannot be restored."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def returned(state: int | None, item: Any) -> tuple[int, list[Any]]:
    made = (state or 0) + 1
    return made, [NoReturn() if item == "back" else (item, made)]


@pytest.mark.parametrize("bad", [NoReturn(), "back"], ids=["item", "result"])
def test_what_cannot_be_restored_costs_its_neighbours_in_a_keyed_step_nothing(bad: Any) -> None:
    ends: list[Any] = []
    step = ordered.partitioned(
        returned, key=lambda x: x if x in (1, 2) else 3, partitions=1, finish=lambda key, state: ends.append(key)
    )
    found = outcomes(ordered.Pipeline([step]).run([1, 2, bad, 1, 2, 1, 2], mode="processes", workers=2, chunk=5))
    assert found[:2] + found[3:] == [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3)]
    assert found[2][0] is errors.NotPicklable and "item 2 of the input" in found[2][1]
    assert ends[:2] == [1, 2] and len(ends) == len(set(ends)), "each key ends once"


class Strange:
    """A key with the hash of the others of its kind, which some cannot be compared with."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Strange)
        if 3 in (self.number, other.number):
            raise ValueError("strange")
        return self.number == other.number


@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize("mode", ["inline", "threads", "processes", "auto"])
def test_a_key_that_cannot_be_compared_is_an_error_of_its_item(mode: str, chunk: int) -> None:
    step = ordered.partitioned(returned, key=Strange, partitions=2)
    found = outcomes(ordered.Pipeline([step]).run([1, 2, 3, 1, 2], mode=mode, workers=2, chunk=chunk))
    assert found == [(1, 1), (2, 1), (ValueError, "strange"), (1, 2), (2, 2)]


def test_functions_that_no_child_can_restore_end_the_run() -> None:
    class Here:
        def __reduce__(self) -> Any:
            return int, ("no number",)

        def __call__(self, state: Any, item: int) -> tuple[int, list[int]]:
            return 0, [item]

    for step in (ordered.map(Here()), ordered.partitioned(Here(), key=lambda x: x)):  # type: ignore[arg-type]
        run = ordered.Pipeline([step]).run(itertools.count(), mode="processes", workers=2, chunk=2)
        with pytest.raises(errors.NotPicklable, match="the functions cannot be restored in a worker process"):
            next(run)
        assert list(run) == []


def of_no_notes(item: int) -> int:
    if item == 5:
        error = ValueError("five")
        error.__notes__ = None  # type: ignore[attr-defined]
        raise error
    return item


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_an_exception_whose_notes_are_no_list_costs_its_neighbours_nothing(mode: str) -> None:
    found = outcomes(ordered.Pipeline([ordered.map(of_no_notes)]).run(range(8), mode=mode, workers=2, chunk=2))
    assert found == [0, 1, 2, 3, 4, (ValueError, "five"), 6, 7]


def test_failures_stay_here_while_the_rest_goes_to_a_process() -> None:
    def key(x: int) -> int:
        if x % 3 == 1:
            raise Picky(x, 2)
        return 0

    keyed = ordered.partitioned(lambda _, x: (None, [x, x + 100]), key=key)
    for behind in ([ordered.map(lambda x: x + 1)], [ordered.flat_map(lambda x: [x, x])], [ordered.filter(bool)]):
        pipeline = ordered.Pipeline([keyed, *behind, ordered.map_batches(lambda xs: [-x for x in xs])])
        found = [outcomes(pipeline.run(range(9), mode=mode, workers=2, chunk=4)) for mode in ("inline", "processes")]
        assert found[0] == found[1] and (Picky, "4") in found[1]

    # Nothing but failures: no process has to look at them.
    def fail(x: int) -> int:
        raise Picky(x, 2)

    nothing = ordered.Pipeline([ordered.partitioned(lambda _, x: (None, [x]), key=fail), ordered.map(leave)])
    assert outcomes(nothing.run([5], mode="processes", workers=1)) == [(Picky, "5")]
    # One that is lost takes none along.
    lost = ordered.Pipeline([keyed, ordered.map(lambda x: os._exit(3))])
    kinds = [kind for kind, _ in outcomes(lost.run(range(3), mode="processes", workers=1, chunk=3))]
    assert kinds == [errors.ItemsLost, Picky]


def test_errors_at_the_end_of_the_input_say_so() -> None:
    total = ordered.stateful(lambda state, x: ((state or 0) + x, []), finish=lambda state: [state, threading.Lock])

    def end(x: Any) -> Any:
        os._exit(3)

    results = ordered.Pipeline([total, ordered.map(end)]).run([1, 2], mode="processes", workers=1, chunk=1)
    with pytest.raises(errors.ItemsLost, match="worked on the end of the input; their results") as lost:
        next(results)
    assert (lost.value.item, lost.value.last) == (None, None)
    made = ordered.Pipeline([total, ordered.map(lambda x: threading.Lock())]).run([1], mode="processes", workers=1)
    with pytest.raises(errors.NotPicklable, match="a result of type lock") as unsent:
        next(made)
    assert unsent.value.item is None and unsent.value.__notes__[0].startswith("the end of the input, in map")
    made.close()
    late = ordered.Pipeline([total, ordered.map(lambda x: time.sleep(60))])
    slow_end = late.run([1], mode="processes", workers=1, timeout=4)
    with pytest.raises(errors.ItemTimeout, match=r"within 4\.0 s for the end of the input; its process") as timed:
        next(slow_end)
    assert (timed.value.item, timed.value.last) == (None, None)


def full(n: int) -> np.ndarray[Any, Any]:
    return np.full(100_000, float(n))


def take_all_files() -> list[int]:
    """Open files until no more may be."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    return held


STEPS_OF_LARGE_RESULTS: dict[str, Callable[[], ordered.Step]] = {
    "map": lambda: ordered.map(full),
    "stateful": lambda: ordered.stateful(lambda state, n: (state, [full(n)]), initial=0),
}


@pytest.mark.parametrize("step", STEPS_OF_LARGE_RESULTS)
def test_a_large_result_for_which_no_file_may_be_opened_is_an_error_in_its_place(step: str) -> None:
    def child() -> None:
        line = ordered.Pipeline([STEPS_OF_LARGE_RESULTS[step]()])
        results = line.run(range(6), mode="processes", workers=1, chunk=1, in_flight=1)
        assert next(results)[0] == 0.0
        held = take_all_files()
        with pytest.raises(errors.NotPicklable, match="no file may be opened for a large message") as caught:
            next(results)
        assert caught.value.item == 1
        for file in held:
            os.close(file)
        assert [array[0] for array in results] == [2.0, 3.0, 4.0, 5.0]

    in_child(child)


def without_files(item: Any) -> Any:
    """Gives back large results, and takes nothing large any more."""
    take_all_files()
    return item, full(7), b"b" * 300_000


def test_a_process_that_may_open_no_file_gives_large_results_and_says_what_it_cannot_take() -> None:
    first, second, third = outcomes(
        pk.ordered_map(without_files, [1, full(1), 2], mode="processes", workers=1, chunk=1)
    )
    for (item, array, text), number in ((first, 1), (third, 2)):
        assert item == number and array[99_999] == 7.0 and len(text) == 300_000
    assert second[0] is errors.NotPicklable and "item 1 of the input cannot be restored in a worker" in second[1]
    assert "no file may be opened for a large message" in second[1]


# Classes that no import finds


def test_classes_that_come_back_from_processes_are_as_the_caller_has_them() -> None:
    class Base:
        table: dict[str, int] = {}  # noqa: RUF012

    class Color(enum.Enum):
        RED = 1

    class Point(Base):
        count = 0
        held: Any = None

        def who(self) -> str:
            return "as written"

    def make(x: int) -> tuple[Any, ...]:
        if x == 7:
            os._exit(3)
        Point.count -= 1
        Point.held = threading.Lock()  # does not pickle, and need not
        return Point(), Color.RED, Point.who

    table = Base.table
    Point.who = lambda self: "patched"  # type: ignore[method-assign]
    seen = []
    for outcome in each(pk.ordered_map(make, range(40), mode="processes", workers=2, chunk=2)):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, errors.ItemsLost)
            continue
        Point.count += 1
        point, color, _ = outcome
        assert type(point) is Point and color is Color.RED
        seen.append(point.who())
    assert (Point.count, Point.held, set(seen), Base.table is table) == (38, None, {"patched"}, True)
    assert len(seen) == 38


def each(results: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            yield next(results)
        except StopIteration:
            return
        except Exception as error:
            yield error


def test_what_functions_keep_in_a_class_that_items_bring_lasts() -> None:
    class Item:
        seen = 0

    def count(item: Any) -> tuple[Any, int]:
        type(item).seen += 1
        return item, type(item).seen

    items = [Item() for _ in range(20)]
    found = list(pk.ordered_map(count, items, mode="processes", workers=1, chunk=2))
    assert [seen for _, seen in found] == list(range(1, 21))
    assert Item.seen == 0 and {type(item) for item, _ in found} == {Item}
    # States, too.
    step = ordered.stateful(lambda state, x: (state, [(state, x)]), initial=Item)
    for number, (state, _) in enumerate(ordered.Pipeline([step]).run(range(6), mode="processes", workers=1, chunk=1)):
        assert type(state) is Item and Item.seen == number
        Item.seen += 1


def made_there(x: int) -> Any:
    """An object of a class that its process makes the first time."""
    module: Any = sys.modules[__name__]
    if not hasattr(module, "MADE"):
        module.MADE = type("Made", (), {"__module__": "__main__", "number": os.getpid()})
    module.MADE.last = x
    made = module.MADE()
    made.x = x
    return made


def test_a_class_that_a_process_made_comes_once() -> None:
    results = pk.ordered_map(made_there, range(20), mode="processes", workers=1, chunk=1)
    first = next(results)
    kind = type(first)
    assert kind.number == kind().number != os.getpid()
    kind.last = "mine"
    assert {type(made) for made in results} == {kind} and kind.last == "mine"
    # And goes to others, and back.
    back = list(pk.ordered_map(lambda made: (made, type(made).last), [first] * 8, mode="processes", workers=2, chunk=1))
    assert {type(made) for made, _ in back} == {kind} and {last for _, last in back} == {"mine"}


def test_classes_travel_as_cloudpickle_sends_them_where_it_does_not_track_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.ordered import _dynamic

    class Point:
        count = 0

    made = wire.dumps(Point(), None, {Point: "1"})
    with pytest.raises(LookupError, match="class 1, which came with the functions, is not here any more"):
        wire.loads(made)
    known = wire.loads(wire.dumps(Point()))
    Point.count = 5
    sent = wire.dumps(Point())
    Point.count = 6
    assert type(known) is type(wire.loads(sent)) is Point and Point.count == 6
    monkeypatch.setattr(_dynamic, "_NUMBERS", None)
    sent = wire.dumps(Point())
    assert type(wire.loads(sent)) is Point and b"_dynamic" not in sent


def test_a_class_whose_first_message_broke_is_whole_with_the_next() -> None:
    class Point:
        count: Any

    message = textwrap.dedent("""
        import sys, penstock.ordered._wire as wire
        rude, good = map(bytes.fromhex, sys.argv[1:])
        try:
            wire.loads(rude)
        except ValueError as error:
            print(error)
        print(type(wire.loads(good)).count)
        """)
    bodies = []
    for count in (Rude(), 7):
        Point.count = count
        bodies.append(wire.dumps(Point()))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{message}", *(body.hex() for body in bodies)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "never again\n7\n", done.stderr[-2000:]
