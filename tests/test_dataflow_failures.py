"""Dataflow programs that fail or wait: the first cause, and an end of every wait."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from penstock import _mesh, errors
from penstock.dataflow import Worker, _threads

# Failures


def test_a_program_that_raises_stops_all_others_and_is_the_cause() -> None:
    stopped: list[BaseException] = []

    def program(worker: Worker) -> None:
        try:
            with worker.dataflow() as scope:
                _handle, stream = scope.input()
                probe = stream.probe()
            if worker.index == 1:
                raise KeyError("enough")
            worker.step_while(lambda: not probe.done())
        except errors.WorkerStopped as error:
            stopped.append(error)
            raise

    with pytest.raises(errors.ProgramError, match="the program of worker 1 raised KeyError") as caught:
        pk.execute(program, workers=3)
    assert caught.value.worker == 1 and caught.value.process == 0
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(stopped) == 2
    assert all(error.worker == 1 and isinstance(error.__cause__, KeyError) for error in stopped)  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["map", "filter", "flat_map", "inspect", "logic", "constructor", "build"])
def test_user_code_that_raises_stops_all_and_reaches_the_caller(where: str) -> None:
    def bad(*_: Any) -> Any:
        raise ValueError("bad luck")

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            if where in ("map", "filter", "flat_map", "inspect"):
                getattr(stream, where)(bad)
            elif where == "logic":
                stream.unary(lambda capability: bad)
            elif where == "constructor" and worker.index == 1:
                stream.unary(bad)
            elif where == "build" and worker.index == 1:
                bad()
            probe = stream.probe()
        if worker.index == 1:
            handle.send([1])
        worker.step_while(lambda: not probe.done())

    with pytest.raises((errors.UserFunctionError, errors.ProgramError), match="bad luck") as caught:
        pk.execute(program, workers=2)
    assert isinstance(caught.value.__cause__, ValueError)
    if where in ("map", "filter", "flat_map", "inspect"):
        assert caught.value.step == f"{where} bad" and "item: 1" in str(caught.value)


def test_a_constructor_whose_error_is_caught_leaves_no_graph_that_could_start() -> None:
    """Its operator read nothing, and the run did not end."""

    def bad(capability: Any) -> Any:
        raise ValueError("bad luck")

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            with pytest.raises(errors.UserFunctionError, match="bad luck"):
                stream.unary(bad)
        numbers.send([1])

    with pytest.raises(errors.GraphError, match='operator "bad" was never built'):
        pk.execute(program, workers=1)


async def fetched(*_: Any) -> int:
    return 1


STEPS = ["map", "filter", "flat_map", "map_blocks", "inspect", "inspect_blocks", "exchange"]


@pytest.mark.parametrize("where", STEPS)
def test_a_coroutine_function_is_refused_where_it_is_given(where: str) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            _, stream = scope.input()
            getattr(stream, where)(fetched)

    with pytest.raises(errors.ConfigError, match=f"{where} fetched: fetched is a coroutine function"):
        pk.execute(program, workers=1)


@pytest.mark.parametrize("where", STEPS)
def test_what_is_no_function_is_refused_where_it_is_given(where: str) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            _, stream = scope.input()
            getattr(stream, where)(None)

    says = "is a function or names of columns, got None" if where == "exchange" else f"{where}.*: None is no function"
    with pytest.raises((errors.ConfigError, errors.BlockError), match=says):
        pk.execute(program, workers=1)


@pytest.mark.parametrize("where", STEPS)
@pytest.mark.usefixtures("all_awaited")
def test_a_coroutine_that_is_returned_all_the_same_is_an_error_that_names_the_item(where: str) -> None:
    def some(*given: Any) -> Any:
        if given[-1] not in (20, [10, 20, 30]):
            return ()
        return [fetched()] if where == "flat_map" else fetched()

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            getattr(stream, where)(some)
        numbers.send([10, 20, 30])

    with pytest.raises(errors.UserFunctionError, match=r"the function returned a coroutine \(fetched\)") as caught:
        pk.execute(program, workers=2)
    assert "blocks" in where or "item: 20" in str(caught.value)


async def served(worker: Worker) -> int:
    return worker.index


@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_that_is_a_coroutine_function_is_refused(processes: int) -> None:
    for program in (served, functools.partial(served)):
        with pytest.raises(errors.ConfigError, match=r"the program: served is a coroutine function.*lambda worker: "):
            pk.execute(program, workers=1, processes=processes)
    with _mesh.alone(1) as seats:
        with pytest.raises(errors.ConfigError, match="the program: served is a coroutine function"):
            pk.dataflow.run_workers(seats, served)
        with pytest.raises(errors.ConfigError, match="the program: served is a coroutine function"):
            pk.dataflow.run_here(seats, served)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.usefixtures("all_awaited")
def test_a_program_that_returns_a_coroutine_all_the_same_is_an_error(processes: int) -> None:
    with pytest.raises(errors.ConfigError, match=r"the program returned a coroutine \(served\), which nobody awaits"):
        pk.execute(lambda worker: served(worker) if worker.index else 0, workers=2, processes=processes)
    with (
        _mesh.alone(1) as seats,
        pytest.raises(errors.ConfigError, match=r"the program returned a coroutine \(served\)"),
    ):
        pk.dataflow.run_here(seats, lambda worker: served(worker))


@pytest.mark.usefixtures("all_awaited")
def test_a_logic_that_is_a_coroutine_function_is_an_error() -> None:
    """It did nothing with what came."""

    async def logic(*_: Any) -> None: ...

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            stream.unary(lambda capability: logic, name="waits")
        numbers.send([1])

    with pytest.raises(errors.UserFunctionError, match=r"waits.* returned a coroutine \(.*logic\), which nobody"):
        pk.execute(program, workers=1)


def test_a_barrier_is_not_closed_by_logic_while_its_worker_waits_at_it() -> None:
    """It stayed open, and nobody said so."""

    def program(worker: Worker) -> list[str]:
        told: list[str] = []
        barrier = worker.barrier()

        def close(item: int) -> None:
            try:
                barrier.close()
            except errors.DataflowError as error:
                told.append(error.message)

        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            stream.inspect(close)
        if worker.index == 0:
            numbers.send([1])
            barrier.wait()
            barrier.close()
            barrier.close()
        else:
            barrier.wait()
            assert told == []
            numbers.send([2])  # nobody waits any more
        return told

    assert pk.execute(program, workers=2) == [
        ["a barrier cannot be closed while its worker waits at it: close it after that"],
        [],
    ]


def test_logic_that_uses_a_log_when_its_program_has_ended_is_told_so() -> None:
    """It was told to make a new one."""

    def program(worker: Worker) -> None:
        log, barrier = worker.sequencer(), worker.barrier()

        def late(item: int) -> None:
            for use in (lambda: log.push(item), lambda: log.finished, barrier.advance):
                with pytest.raises(errors.ClosedError, match="takes nothing any more: its program has ended"):
                    use()
            raise ValueError("all refused")

        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            stream.inspect(late)
        numbers.send([1])

    with pytest.raises(errors.UserFunctionError, match="ValueError: all refused"):
        pk.execute(program, workers=1)


def yielding(*_: Any) -> Iterator[int]:
    yield 1


async def async_yielding(*_: Any) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("where", ["inspect", "inspect_blocks"])
@pytest.mark.parametrize(
    ("func", "kind"), [(yielding, "a generator"), (async_yielding, "an async generator")], ids=["plain", "async"]
)
def test_a_generator_that_nobody_would_run_is_refused(where: str, func: Any, kind: str) -> None:
    """It was called for each item, and did nothing."""

    def program(given: Any) -> Any:
        def run(worker: Worker) -> None:
            with worker.dataflow() as scope:
                numbers, stream = scope.input()
                getattr(stream, where)(given)
            numbers.send([10])

        return run

    with pytest.raises(errors.ConfigError, match=f"{where} {func.__name__}: {func.__name__} is {kind} function"):
        pk.execute(program(func), workers=1)
    with pytest.raises(errors.UserFunctionError, match=rf"the function returned {kind} \({func.__name__}\), which"):
        pk.execute(program(lambda *given: func(*given)), workers=1)


def test_a_filter_by_a_generator_is_an_error_that_names_the_item() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            stream.filter(yielding)
        numbers.send([10])

    with pytest.raises(errors.UserFunctionError, match=r"filter yielding: .* a generator \(yielding\)") as caught:
        pk.execute(program, workers=1)
    assert "item: 10" in str(caught.value)


@pytest.mark.parametrize(("logic", "kind"), [(yielding, "a generator"), (async_yielding, "an async generator")])
def test_a_logic_that_is_a_generator_function_is_an_error(logic: Any, kind: str) -> None:
    """It read nothing, and the run did not end."""

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            stream.unary(lambda capability: logic, name="waits")
        numbers.send([1])

    with pytest.raises(errors.UserFunctionError, match=rf"waits: .*the logic returned {kind} \({logic.__name__}\)"):
        pk.execute(program, workers=1)


@pytest.mark.parametrize(("made", "kind"), [(7, "int"), ((x for x in [1]), "generator"), ("ab", "str")])
def test_what_is_no_block_is_named_with_its_step_and_place(made: Any, kind: str) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            stream.map_blocks(lambda block: made)
        numbers.send([1])

    with pytest.raises(errors.BlockError, match=f"RecordBatch, got {kind}") as caught:
        pk.execute(program, workers=1)
    assert "in map_blocks <lambda> (" in str(caught.value) and f"{__file__}:" in str(caught.value)


class _Liar:
    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        raise OSError("no such buffer")


@pytest.mark.parametrize(
    ("made", "error", "says"),
    [
        (pa.array([1]), errors.BlockError, "a block is a list .*: expected a record batch .*, got an array of Int64"),
        (pa.chunked_array([[1]]), errors.SchemaError, "this Arrow data cannot be used"),
        (_Liar(), errors.UserFunctionError, "map_blocks <lambda>: OSError: no such buffer"),
    ],
)
def test_arrow_data_that_is_no_batch_is_named_with_its_step_and_place(
    made: Any, error: type[Exception], says: str
) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            stream.map_blocks(lambda block: made)
        numbers.send([1])

    with pytest.raises(error, match=says) as caught:
        pk.execute(program, workers=1)
    assert "map_blocks <lambda>" in str(caught.value) and f"({__file__}:" in str(caught.value)


def test_waiting_for_what_cannot_come_is_an_error() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            scope.input()[0].close()
        worker.step_while(lambda: True)

    with pytest.raises(errors.DataflowError, match="all dataflows are finished"):
        pk.execute(program, workers=2)


@pytest.mark.parametrize(
    "arguments",
    [{"workers": 0}, {"workers": -1}, {"workers": 1.5}, {"workers": True}, {"processes": 0}, {"workers": 5000}],
)
def test_absurd_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        pk.execute(lambda worker: None, **arguments)


def test_the_program_must_be_a_function() -> None:
    with pytest.raises(errors.ConfigError, match="function of a worker"):
        pk.execute(3)  # type: ignore[arg-type]


# Waiting


def test_parking_uses_no_cpu_and_releases_the_interpreter_lock() -> None:
    counted = [0]

    def program(worker: Worker) -> float:
        with worker.dataflow() as scope:
            _handle, _stream = scope.input()
        worker.step()
        used = time.thread_time()
        begin = time.monotonic()
        # The other thread may get no turn in the first of these.
        for _ in range(100):
            end = time.monotonic() + 0.4
            while (left := end - time.monotonic()) > 0:
                worker.step_or_park(left)
            if counted[0] > 1000:
                break
        return (time.thread_time() - used) / ((time.monotonic() - begin) / 0.4)

    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1

    other = threading.Thread(target=count)
    other.start()
    try:
        used = pk.execute(program, workers=2)
    finally:
        done.set()
        other.join()
    assert max(used) < 0.1
    assert counted[0] > 1000


def test_a_stop_from_outside_ends_every_wait() -> None:
    for wait in ("park", "barrier", "sequencer"):
        with _mesh.alone(2) as seats:
            ready = threading.Barrier(3)

            def program(worker: Worker, wait: str = wait, ready: threading.Barrier = ready) -> None:
                with worker.dataflow() as scope:
                    _handle, _stream = scope.input()
                barrier, log = worker.barrier(), worker.sequencer()
                ready.wait()
                if wait == "park" or worker.index == 1:
                    while True:
                        worker.step_or_park()
                elif wait == "barrier":
                    barrier.wait()
                else:
                    log.wait_next()

            outcome: list[BaseException] = []

            def run(seats: Any = seats, program: Any = program, outcome: Any = outcome) -> None:
                try:
                    pk.dataflow.run_workers(seats, program)
                except errors.WorkerStopped as error:
                    outcome.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            ready.wait()
            seats.stop("closing time")
            thread.join(60)
            assert not thread.is_alive() and "closing time" in str(outcome[0])


def test_an_interrupt_while_threads_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    left: list[int] = []
    both = threading.Barrier(3)

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "penstock-worker-1":
            both.wait(60)
            raise KeyboardInterrupt

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            _, stream = scope.input()
            probe = stream.probe()
        try:
            both.wait(60)
            worker.step_while(lambda: not probe.done())
        finally:
            until = time.monotonic() + (0.3 if worker.index == 1 else 0)
            while time.monotonic() < until:
                pass
            left.append(worker.index)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(_threads, "_PATIENCE", 60.0)
    with pytest.raises(KeyboardInterrupt):
        pk.execute(program, workers=3)
    assert sorted(left) == [0, 1]
