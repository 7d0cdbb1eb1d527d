"""Inputs that are slow, and then silent: what is finished comes out, and nothing is read that need not be."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from penstock import ordered
from penstock.errors import Interrupted


class Live:
    """An input that gives what it is told, when it is told, and is silent between."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.read = 0
        self.waits = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.waits.set()
            item = self.told.get()
            if item is None:
                return
            self.read += 1
            yield item

    def give(self, *items: Any) -> None:
        for item in items:
            self.told.put(item)

    def end(self) -> None:
        self.told.put(None)


@pytest.fixture
def live() -> Iterator[Live]:
    source = Live()
    yield source
    source.end()


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What a function returns in that time, in a thread that is not waited for longer."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert made, f"nothing came within {seconds} s although it is finished"
    return made[0]


@pytest.mark.parametrize("mode", ["auto", "inline", "threads", "processes"])
def test_results_come_while_the_input_is_silent(mode: str, live: Live) -> None:
    with pk.ordered_map(abs, live, mode=mode, workers=2, chunk=100) as results:
        for number in (1, 2, 7):
            live.give(*range(number))
            assert [within(30, lambda: next(results)) for _ in range(number)] == list(range(number))
        live.end()
        assert within(30, lambda: list(results)) == []


def test_items_that_come_while_others_are_worked_on_are_begun(live: Live) -> None:
    begun = {x: threading.Event() for x in range(2)}

    def meet(x: int) -> int:
        begun[x].set()
        assert begun[1 - x].wait(30), "the other one never began"
        return x

    with pk.ordered_map(meet, live, mode="threads", workers=2) as results:
        live.give(0)
        got: list[int] = []
        caller = threading.Thread(target=lambda: got.append(next(results)))
        caller.start()
        assert begun[0].wait(30)
        live.give(1)
        caller.join(30)
        assert got == [0] and within(30, lambda: next(results)) == 1


def test_a_live_input_is_read_no_further_than_the_bound(live: Live) -> None:
    live.give(*range(50))
    with pk.ordered_map(abs, live, mode="threads", workers=2, in_flight=5) as results:
        assert live.read == 0
        for taken in range(50):
            assert next(results) == taken
            assert live.read <= taken + 6


def test_a_step_with_an_end_hears_of_it_when_the_input_says_so(live: Live) -> None:
    step = ordered.stateful(lambda n, x: (n + x, [x]), initial=0, finish=lambda n: [("sum", n)])
    with ordered.Pipeline([step]).run(live, mode="inline") as results:
        live.give(1, 2)
        assert [within(30, lambda: next(results)) for _ in range(2)] == [1, 2]
        live.end()
        assert within(30, lambda: list(results)) == [("sum", 3)]


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_ctrl_c_reaches_a_caller_who_waits_for_a_silent_input(mode: str, live: Live) -> None:
    with pk.ordered_map(abs, live, mode=mode, workers=2) as results:
        live.give(-1)
        assert next(results) == 1

        ready = threading.Event()

        def strike() -> None:
            ready.wait()
            live.waits.clear()
            live.waits.wait(0.2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=strike)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            ready.set()
            next(results)
        thread.join()
        live.give(-2)
        assert next(results) == 2


def test_an_input_that_is_bound_to_the_callers_thread_is_read_there() -> None:
    readers: set[int] = set()

    def source() -> Iterator[int]:
        for x in range(20):
            readers.add(threading.get_ident())
            yield x

    for mode in ("inline", "threads"):
        assert list(pk.ordered_map(abs, source(), mode=mode, workers=2, reads="here")) == list(range(20))
    assert readers == {threading.get_ident()}


def test_a_slow_input_read_by_the_caller_is_cut_by_time() -> None:
    lengths: list[int] = []

    def source() -> Iterator[int]:
        for x in range(20):
            time.sleep(0.003)
            yield x

    results = pk.ordered_map(abs, source(), mode="inline", reads="here", chunk=1000)
    for _ in range(20):
        next(results)
        lengths.append(results.stats().chunk_items)
    assert max(lengths) <= 4


def test_an_input_read_by_the_caller_gives_each_result_at_once_where_a_chunk_is_one_item() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for x in range(5):
            assert taken == list(range(x)), "what came before has been taken"
            yield x

    for result in pk.ordered_map(abs, source(), mode="inline", reads="here", chunk=1):
        taken.append(result)
    assert taken == list(range(5))


@pytest.mark.parametrize("chunk", [1, 100])
@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_what_the_callers_input_gave_before_an_interrupt_comes_out_and_then_that_it_broke(
    mode: str, chunk: int
) -> None:
    silent = threading.Event()

    def source() -> Iterator[int]:
        yield -1
        yield -2
        silent.set()
        while True:
            time.sleep(0.01)

    def strike() -> None:
        assert silent.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    got: list[int] = []
    with pk.ordered_map(abs, source(), mode=mode, workers=2, reads="here", chunk=chunk) as results:
        with pytest.raises(KeyboardInterrupt):
            got.extend(results)
        with pytest.raises(Interrupted, match=r"the input was interrupted .* behind item 1"):
            got.extend(results)
        assert got == [1, 2]
        with pytest.raises(Interrupted, match="behind item 1"):
            next(results)
    thread.join()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_local_run_gives_results_while_its_source_is_silent(workers: int, live: Live) -> None:
    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")
    with flow.run(live, workers, streaming=True) as results:
        for number in (1, 2, 3):
            live.give(pa.record_batch({"k": [7]}))
            assert within(30, lambda: next(results)).to_pylist() == [{"k": 7, "n": number}]
            assert live.read == number
        live.end()
        assert within(30, lambda: list(results)) == []


def test_a_silent_source_holds_no_other_back(live: Live) -> None:
    flow = pk.Flow("n bigint", name="a").union(pk.Flow("n bigint", name="b"))
    other = Live()
    with flow.run({"a": live, "b": other}, streaming=True) as results:
        for n in range(5):
            other.give(pa.table({"n": [n]}))
            assert within(30, lambda: next(results))["n"].to_pylist() == [n]
        live.give(pa.table({"n": [-1]}))
        assert within(30, lambda: next(results))["n"].to_pylist() == [-1]
        assert live.read == 1, "one batch at a time"
        other.end()
        live.end()
        assert within(30, lambda: list(results)) == []


def test_a_source_that_fails_ends_the_run_while_another_is_silent(live: Live) -> None:
    flow = pk.Flow("n bigint", name="a").union(pk.Flow("n bigint", name="b"))

    taken = threading.Event()

    def broken() -> Iterator[pa.Table]:
        yield pa.table({"n": [1]})
        assert taken.wait(30)
        raise OSError("the disk is gone")

    with flow.run({"a": live, "b": broken()}, streaming=True) as results:
        assert within(30, lambda: next(results))["n"].to_pylist() == [1]
        taken.set()
        with pytest.raises(OSError, match="the disk is gone"):
            raise within(30, lambda: caught(results))


def test_ctrl_c_reaches_a_caller_who_waits_for_what_came_before_an_error_of_the_source() -> None:
    ready, failed, gate = threading.Event(), threading.Event(), threading.Event()

    def broken() -> Iterator[pa.Table]:
        yield from (pa.table({"n": [n]}) for n in range(6))
        failed.set()
        raise OSError("the disk is gone")

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch["n"].to_pylist() < [2] or gate.wait(60)
        return batch

    def strike() -> None:
        assert ready.wait(60) and failed.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    found: list[int] = []
    with pk.Flow("n bigint").map_batches(slow).run(broken(), streaming=True) as results:
        for _ in range(2):
            found += next(results)["n"].to_pylist()
        with pytest.raises(KeyboardInterrupt):
            ready.set()
            next(results)
        assert not gate.is_set()
        gate.set()
        thread.join()
        with pytest.raises(OSError, match="the disk is gone"):
            for batch in results:
                found += batch["n"].to_pylist()
    assert found == list(range(6))


def caught(results: Iterator[Any]) -> BaseException:
    try:
        next(results)
    except OSError as error:
        return error
    raise AssertionError("it went on")
