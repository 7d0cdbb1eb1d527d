"""Graphs of dataflows that workers build: agreement, refusals, and whose thread may touch them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import penstock as pk
from penstock import _mesh, errors
from penstock.dataflow import Worker, run_here

# Threads and forks


def test_handles_belong_to_the_thread_of_their_worker() -> None:
    def program(worker: Worker) -> list[str]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            probe, seen = stream.probe(), []
            source = scope.source(lambda capability: seen.append(capability) or (lambda output: None))
        calls = [worker.step, worker.step_or_park, lambda: handle.send([1]), lambda: handle.time, probe.done]
        calls += [lambda: seen[0].time, lambda: source.collect(), worker.barrier, lambda: worker.dataflow().__enter__()]
        said = []

        def elsewhere() -> None:
            for call in calls:
                try:
                    call()
                except errors.ThreadError as error:
                    said.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(said) == len(calls) and all("belongs to the thread of its worker" in text for text in said)
        seen.clear()
        worker.step()
        return said

    pk.execute(program, workers=1)


def test_handles_outlive_their_worker_harmlessly() -> None:
    kept: list[Any] = []

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            kept.extend([worker, handle, stream, stream.probe()])

    with _mesh.alone(1) as seats:
        run_here(seats, program)
        worker, handle, stream, probe = kept
        for call in (worker.step, lambda: handle.send([1]), stream.probe, probe.done, handle.close):
            with pytest.raises(errors.ClosedError, match="has ended"):
                call()
    kept.clear()


# Graphs


def test_a_dataflow_that_only_one_worker_builds_is_named_and_nobody_waits_for_ever() -> None:
    for extra in (0, 1, 2):

        def program(worker: Worker, extra: int = extra) -> None:
            with worker.dataflow("common") as scope:
                _handle, _ = scope.input()
            if worker.index == extra:
                with worker.dataflow("extra") as scope:
                    _, stream = scope.input()
                    probe = stream.probe()
                worker.step_while(lambda: not probe.done())

        with pytest.raises(errors.GraphError, match='"extra" is missing there') as caught:
            pk.execute(program, workers=3)
        assert caught.value.worker == extra and caught.value.peer != extra


@pytest.mark.parametrize("kind", ["name", "operator", "order"])
def test_workers_that_build_other_graphs_are_named(kind: str) -> None:
    def program(worker: Worker) -> None:
        odd = worker.index == 1
        names = ["a", "b"]
        if kind == "order" and odd:
            names.reverse()
        for name in names:
            with worker.dataflow(f"other {name}" if kind == "name" and odd else name) as scope:
                handle, stream = scope.input()
                if kind == "operator" and odd:
                    stream.map(str)
                stream.map(str)
                probe = stream.exchange(lambda x: x).probe()
            handle.advance_to(1)
            worker.step_while(lambda probe=probe: probe.less_than(1))

    with pytest.raises(errors.GraphError) as caught:
        pk.execute(program, workers=2)
    assert {caught.value.worker, caught.value.peer} == {0, 1}


def test_graphs_that_cannot_run_are_refused_where_they_are_built() -> None:
    def open_loop(scope: Any) -> None:
        scope.feedback()

    def standing_loop(scope: Any) -> None:
        loop, back = scope.feedback(0)
        back.connect_loop(loop)

    def twice(scope: Any) -> None:
        loop, back = scope.feedback()
        back.connect_loop(loop)
        back.connect_loop(loop)

    def strangers(scope: Any) -> None:
        _, stream = scope.input()
        stream.concat(stream.enter(scope.nested()))

    def siblings(scope: Any) -> None:
        _, stream = scope.input()
        one, two = scope.nested("one"), scope.nested("two")
        stream.enter(one).concat(stream.enter(two))

    def too_deep(scope: Any) -> None:
        _, stream = scope.input()
        stream.enter(scope.nested().nested())

    def nothing(scope: Any) -> None:
        scope.concat([])

    for build, why in (
        (open_loop, "feedback was called and connect_loop was not"),
        (
            standing_loop,
            "at one time: feedback -> connect_loop -> feedback; give its feedback an advance of at least 1",
        ),
        (twice, "connected already"),
        (strangers, "of different scopes"),
        (siblings, "reads a stream of scope"),
        (too_deep, "of different scopes"),
        (nothing, "concat got no stream"),
    ):

        def program(worker: Worker, build: Any = build) -> None:
            with worker.dataflow("wrong") as scope:
                build(scope)
            raise AssertionError("it was not refused")

        with pytest.raises(errors.GraphError, match=why):
            pk.execute(program, workers=2)


@pytest.mark.parametrize("number", [-1, 2**64, 2**70, 1.5, True, None])
def test_what_is_no_advance_or_round_is_refused_by_name(number: Any) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope, pytest.raises(errors.ConfigError, match=f"an int from 1 .* got {number!r}"):
            scope.feedback(number)
        with worker.barrier() as barrier, pytest.raises(errors.ConfigError, match=f"a round is .* got {number!r}"):
            barrier.reached(number)

    pk.execute(program, workers=1)


def test_a_dataflow_cannot_be_added_to_later_nor_begun_inside_another() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            _handle, stream = scope.input()
        for call in (scope.input, stream.probe, lambda: stream.map(str), lambda: scope.nested()):
            with pytest.raises(errors.GraphError, match="is built"):
                call()

    pk.execute(program, workers=1)

    def nested(worker: Worker) -> None:
        with worker.dataflow("outer"), worker.dataflow("inner"):
            pass

    with pytest.raises(errors.GraphError, match='"inner" begins inside another'):
        pk.execute(nested, workers=1)


def test_a_step_inside_logic_is_refused() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.inspect(lambda _: worker.step())
        handle.send([1])

    with pytest.raises(errors.DataflowError, match=r"step\(\) inside the logic of an operator"):
        pk.execute(program, workers=1)
