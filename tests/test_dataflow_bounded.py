"""Bounded scopes from Python: the same results within any bounds, laziness, failures, and what is refused."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import errors
from penstock.dataflow import Bounded, BoundedStats, Stream, Worker


def _items(seen: list[tuple[Any, Any]]) -> list[Any]:
    return [item for _, block in seen for item in (block if isinstance(block, list) else block.to_pylist())]


async def _fetched(item: Any) -> list[Any]:
    return [item]


async def _streamed(item: Any) -> AsyncIterator[Any]:
    yield item


@pytest.mark.parametrize("on_failure", ["stop", "skip"])
@pytest.mark.usefixtures("all_awaited")
def test_an_expansion_that_gives_a_coroutine_is_a_fault_of_the_step(on_failure: Any) -> None:
    def program(worker: Worker, expand: Any) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            stream.bounded(lambda items: items, expand=expand, on_failure=on_failure)
        numbers.send([1, 2])

    with pytest.raises(errors.ConfigError, match="bounded _fetched: _fetched is a coroutine function"):
        pk.execute(lambda worker: program(worker, _fetched), workers=1)
    with pytest.raises(errors.UserFunctionError, match=r"the function returned a coroutine \(_fetched\)") as caught:
        pk.execute(lambda worker: program(worker, lambda item: _fetched(item)), workers=1)
    assert "item: 1" in str(caught.value)
    with pytest.raises(errors.ConfigError, match="bounded _streamed: _streamed is an async generator function"):
        pk.execute(lambda worker: program(worker, _streamed), workers=1)
    with pytest.raises(errors.UserFunctionError, match=r"the function returned an async generator \(_streamed\)"):
        pk.execute(lambda worker: program(worker, lambda item: _streamed(item)), workers=1)


def _halve(stream: Stream[int]) -> Stream[int]:
    """Halve until odd, in a loop that crosses workers."""

    def body(numbers: Stream[int]) -> tuple[Stream[int], Stream[int]]:
        numbers = numbers.exchange(lambda x: x)
        even = numbers.filter(lambda x: x > 0 and x % 2 == 0).map(lambda x: x // 2)
        return even, numbers.filter(lambda x: x == 0 or x % 2 == 1)

    return stream.iterate(body)


@settings(max_examples=examples(20))
@given(
    many=st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=3),
    bounds=st.sampled_from([(None, None), (1, 1), (2, 3), (4, None), (None, 50)]),
    workers=st.integers(1, 3),
)
def test_results_and_times_are_those_without_bounds(
    many: list[list[int]], bounds: tuple[int | None, int | None], workers: int
) -> None:
    def program(worker: Worker) -> list[tuple[Any, Any]]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            out = stream.bounded(
                lambda items: _halve(items.map(lambda x: x + 1)), expand=range, batches=bounds[0], batch_size=bounds[1]
            )
            seen = out.collect()
            probe = out.probe()
        for epoch, block in enumerate(many):
            handle.advance_to(epoch)
            handle.send(block)
        handle.close()
        worker.step_while(lambda: not probe.done())
        stats = out.stats()
        assert bounds[0] is None or stats.maximum <= bounds[0]
        assert (stats.unfinished, stats.buffered, stats.holding) == (0, 0, None)
        assert stats.phase == ("fixed" if None not in bounds else stats.phase)
        return seen

    def odd(x: int) -> int:
        return odd(x // 2) if x and x % 2 == 0 else x

    expected = sorted(
        (epoch, odd(x + 1)) for epoch, block in enumerate(many) for _ in range(workers) for n in block for x in range(n)
    )
    seen = [pair for pairs in pk.execute(program, workers=workers) for pair in pairs]
    assert sorted((time, item) for time, block in seen for item in block) == expected


def test_a_generator_is_drawn_from_only_as_there_is_room() -> None:
    def program(worker: Worker) -> tuple[int, int, int]:
        drawn = done = most = 0

        def endless(start: int) -> Iterator[int]:
            nonlocal drawn, most
            for x in range(start):
                drawn += 1
                most = max(most, drawn - done)
                yield x

        def finish(x: int) -> None:
            nonlocal done
            done += 1

        with worker.dataflow() as scope:
            handle, stream = scope.input()
            out = stream.bounded(lambda items: items.inspect(finish), expand=endless, batches=2, batch_size=7)
            probe = out.probe()
        handle.send([20_000, 3])
        handle.close()
        worker.step_while(lambda: not probe.done())
        return drawn, done, most

    drawn, done, most = pk.execute(program, workers=1)[0]
    assert (drawn, done) == (20_003, 20_003)
    assert most <= 14


def test_record_batches_go_in_slices_and_nested_scopes_hold_each_other() -> None:
    def program(worker: Worker) -> tuple[list[Any], list[Any], dict[str, Any]]:
        times: list[Any] = []

        def inner(rows: Stream[Any]) -> Stream[Any]:
            return rows.inspect_blocks(lambda time, block: times.append((time, block.num_rows)))

        with worker.dataflow() as scope:
            handle, stream = scope.input()
            out = stream.bounded(
                lambda rows: rows.bounded(inner, batches=1, batch_size=3, name="inner"), batches=1, batch_size=4
            )
            seen = out.collect()
            probe = out.probe()
        handle.advance_to(5)
        handle.send(pa.record_batch({"x": list(range(10))}))
        handle.close()
        worker.step_while(lambda: not probe.done())
        return _items(seen), times, out.stats()

    rows, times, stats = pk.execute(program, workers=1)[0]
    assert [row["x"] for row in rows] == list(range(10))
    assert times == [((5, 0, 0), 3), ((5, 0, 1), 1), ((5, 1, 0), 3), ((5, 1, 1), 1), ((5, 2, 0), 2)]
    assert (stats.admitted, stats.admitted_items, stats.maximum_items) == (3, 10, 4)


def _three(x: int) -> Iterator[int]:
    yield x
    if x == 2:
        raise RuntimeError("no more of two")
    yield 10 * x


@pytest.mark.parametrize("workers", [1, 2])
def test_an_iterator_that_raises_is_named_and_stops_all_or_nothing(workers: int) -> None:
    def program(worker: Worker, on_failure: Any) -> tuple[list[int], list[Any]]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            out = stream.bounded(lambda items: items, expand=_three, batches=1, batch_size=2, on_failure=on_failure)
            seen: list[int] = []
            probe = out.inspect(seen.append).probe()
        if worker.index == 0:
            handle.send([1, 2, 3])
        handle.close()
        worker.step_while(lambda: not probe.done())
        return seen, [(failure.item, failure.drawn, str(failure.error)) for failure in out.failures]

    items, failures = pk.execute(lambda worker: program(worker, "skip"), workers=workers)[0]
    assert (items, failures) == ([1, 10, 2, 3, 30], [(2, 1, "no more of two")])
    with pytest.raises(errors.UserFunctionError, match="no more of two") as caught:
        pk.execute(lambda worker: program(worker, "stop"), workers=workers)
    assert "item: 2" in str(caught.value)
    assert "bounded _three" in str(caught.value)


def test_what_is_kept_of_failures_has_an_end_and_holds_nothing_that_was_drawn() -> None:
    class Large:
        """An item of which there is to be no more than there is room for."""

    def expand(n: int) -> Iterator[Large]:
        large = [Large() for _ in range(8)]
        yield from large
        try:
            raise KeyError(n)
        except KeyError as error:
            raise RuntimeError(f"no more of {n}") from error

    def program(worker: Worker) -> Bounded[Large]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            out = stream.bounded(lambda items: items, expand=expand, batches=2, batch_size=8, on_failure="skip")
            probe = out.probe()
        handle.send(list(range(300)))
        handle.close()
        worker.step_while(lambda: not probe.done())
        return out

    out = pk.execute(program, workers=1)[0]
    assert out.failed == 300 and [failure.item for failure in out.failures] == list(range(100))
    assert str(out.failures[7].error) == "no more of 7" and isinstance(out.failures[7].error.__cause__, KeyError)
    line = expand.__code__.co_firstlineno + 6
    assert out.failures[7].where == f"{__file__}:{line}"
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, Large)]


@pytest.mark.parametrize("name", ["batches", "batch_size", "memory"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "half", 2**64])
def test_bounds_that_are_no_counts_are_refused(name: str, value: Any) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            _, stream = scope.input()
            with pytest.raises(errors.ConfigError, match=f"bounded {name}={value!r} must be"):
                stream.bounded(lambda items: items, **{name: value})

    pk.execute(program, workers=1)


def _adapting(worker: Worker, memory: int, many: int) -> tuple[int, int, BoundedStats, BoundedStats]:
    """Feed a scope with this budget until a period was judged, or its bounds have been at their least for a while."""
    with worker.dataflow() as scope:
        handle, stream = scope.input()
        out = stream.bounded(lambda items: items, expand=range, memory=memory)
        counts: list[int] = []
        probe = out.inspect_blocks(lambda _, block: counts.append(len(block))).probe()
    first = out.stats()
    sent = least = 0
    deadline = time.monotonic() + 60
    while least < 2_000:
        assert time.monotonic() < deadline, out.stats()
        stats = out.stats()
        if stats.rate is not None:
            break
        least += (stats.batches, stats.batch_size) == (2, 64)
        if stats.buffered < 2:
            sent += 1
            handle.advance_to(sent)
            handle.send([many])
        worker.step()
    stats = out.stats()
    handle.close()
    worker.step_while(lambda: not probe.done())
    return sum(counts), sent * many, first, stats


def test_memory_over_its_budget_shrinks_the_bounds() -> None:
    passed, sent, first, stats = pk.execute(lambda worker: _adapting(worker, 1, 500), workers=1)[0]
    assert passed == sent
    assert (first.batches, first.batch_size, first.phase) == (4, 1024, "growing")
    assert (stats.batches, stats.batch_size, stats.phase) == (2, 64, "short")
    assert stats.shrinks == 5, "1,024 items halve four times, four batches once; less would not work"


def test_memory_within_its_budget_leaves_the_bounds_to_throughput() -> None:
    passed, sent, _, stats = pk.execute(lambda worker: _adapting(worker, 2**50, 100_000), workers=1)[0]
    assert passed == sent
    assert stats.shrinks == 0 and stats.phase in ("growing", "settled") and stats.rate > 0
    assert stats.batches >= 4 and stats.batch_size >= 1024


def test_other_misuse_is_refused() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            _, stream = scope.input()
            with pytest.raises(errors.ConfigError, match="more than can be counted"):
                stream.bounded(lambda items: items, batches=2**30, batch_size=2**30)
            with pytest.raises(errors.ConfigError, match="leave batches or batch_size out"):
                stream.bounded(lambda items: items, batches=1, batch_size=1, memory=1)
            with pytest.raises(errors.ConfigError, match="'never'"):
                stream.bounded(lambda items: items, on_failure="never")  # type: ignore[arg-type]

    pk.execute(program, workers=1)

    def build(body: Any) -> Any:
        def program(worker: Worker) -> None:
            with worker.dataflow() as scope:
                scope.input()[1].bounded(body, batches=1, batch_size=1)

        return program

    with pytest.raises(errors.GraphError, match="a loop in it needs a scope of its own"):
        pk.execute(build(lambda items: items.scope.feedback()[1]), workers=1)
    with pytest.raises(errors.GraphError, match="gives back a stream, got int"):
        pk.execute(build(lambda items: 4), workers=1)


def test_a_body_that_never_answers_is_named_and_can_be_given_up() -> None:
    def program(worker: Worker) -> dict[str, Any]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()

            def hold(items: Stream[int]) -> Stream[Any]:
                @items.unary
                def never(capability: Any) -> Any:
                    capability.drop()
                    held: list[Any] = []

                    def logic(input: Any, output: Any, frontiers: Any) -> None:
                        held.extend(capability for capability, _ in input)

                    return logic

                return never

            out = stream.bounded(hold, batches=2, batch_size=10)
        handle.advance_to(6)
        handle.send(list(range(50)))
        handle.close()
        for _ in range(50):
            worker.step()
        raise LookupError(out.stats().holding, out.stats().buffered)

    with pytest.raises(errors.ProgramError) as caught:
        pk.execute(program, workers=1)
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.__cause__.args == ("(6, 0)", 30)


_HOLDS = """
import os
import time
import penstock as pk
from penstock.dataflow import _threads
from penstock.dataflow._threads import _GRACE

_threads._PATIENCE = 60.0

def say(text):
    return os.write(1, (text + chr(10)).encode())

def program(worker):
    with worker.dataflow() as scope:
        handle, stream = scope.input()

        def hold(items):
            @items.unary
            def never(capability):
                capability.drop()
                held = []
                return lambda input, output, frontiers: held.extend(capability for capability, _ in input)
            return never

        out = stream.bounded(hold, batches=2, batch_size=10, name="slow")
        probe = out.probe()
    handle.advance_to(6)
    handle.send(list(range(50)))
    handle.close()
    told = []

    def going():
        if not told and out.stats().unfinished == 2:
            told.append(say("holds"))
        return not probe.done()

    try:
        worker.step_while(going)
    finally:
        stats = out.stats()
        until = time.monotonic() + 1.5 * _GRACE  # what unwinds is not interrupted again
        while time.monotonic() < until:
            time.sleep(0.01)
        say(f"{worker.index} {stats.holding} {stats.buffered}")

try:
    pk.execute(program, workers=WORKERS)
except KeyboardInterrupt:
    say("interrupted")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_a_body_that_never_answers_and_the_figures_say_which_batch_holds(workers: int) -> None:
    script = _HOLDS.replace("WORKERS", str(workers))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as child:
        assert child.stdout is not None
        for _ in range(workers):
            assert child.stdout.readline() == "holds\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    told = out.splitlines()
    assert sorted(told[:-1]) == [f"{worker} (6, 0) 30" for worker in range(workers)], err
    assert (told[-1], child.returncode) == ("interrupted", 0)
