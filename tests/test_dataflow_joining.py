"""Threads and processes join a running program, with capabilities, and leave it."""

from __future__ import annotations

import os
import re
import threading
from typing import Any

import pytest

import penstock as pk
from penstock.dataflow import Worker
from penstock.errors import (
    CapabilityError,
    ClosedError,
    ConfigError,
    DataflowError,
    GraphError,
    ProgramError,
    WorkerLost,
)

#: Two workers: threads, or processes that tell each other all they tell over TCP.
_SHAPES = pytest.mark.parametrize(
    "shape", [{"workers": 2}, {"workers": 1, "processes": 2}], ids=["threads", "processes"]
)


def _numbers(worker: Worker) -> tuple[Any, Any, list[Any]]:
    with worker.dataflow("numbers") as scope:
        numbers, stream = scope.input()
        routed = stream.exchange(lambda number: number)
        return numbers, routed.probe(), routed.collect()


def _items(seen: list[Any]) -> list[Any]:
    return [item for _, block in seen for item in block]


@_SHAPES
def test_a_worker_joins_after_five_of_ten_numbers(shape: dict[str, int]) -> None:
    def program(worker: Worker) -> tuple[bool, Any, list[Any]]:
        numbers, _, seen = _numbers(worker)
        joined = worker.bootstrap()
        began = numbers.time
        if worker.index == 0:
            for number in range(10):
                if number == 6:
                    worker.admit()
                    while worker.peers < 3:
                        worker.step_or_park()
                numbers.send([number])
                worker.step()
                if number != 5:
                    numbers.advance_to(number + 1)
        return joined, began, seen

    results = pk.execute(program, **shape, join=1)
    assert [(joined, began) for joined, began, _ in results] == [(False, 0), (False, 0), (True, 5)]
    got = [_items(seen) for _, _, seen in results]
    assert sorted(n for items in got for n in items) == list(range(10))
    assert got[2] and all(n > 5 for n in got[2]), "nothing comes before it has its place"
    # From 6 on there are three to go to: every number has the place that its key gives among three.
    places = {n: worker for worker, items in enumerate(got) for n in items}
    fixed = pk.execute(_all_numbers, workers=3)
    assert {n: w for n, w in places.items() if n > 5} == {n: w for w, items in enumerate(fixed) for n in items if n > 5}


def _all_numbers(worker: Worker) -> list[Any]:
    numbers, _, seen = _numbers(worker)
    if worker.index == 0:
        numbers.send(list(range(10)))
    numbers.close()
    while worker.step_or_park():
        pass
    return _items(seen)


def test_the_first_worker_leaves_in_the_middle_of_an_epoch_and_nothing_is_lost() -> None:
    def program(worker: Worker) -> list[Any]:
        numbers, probe, seen = _numbers(worker)
        worker.bootstrap()
        numbers.advance_to(3)
        if worker.index == 0:
            numbers.send(list(range(30)))
            worker.leave()
            with pytest.raises(pk.errors.ClosedError):
                numbers.send([99])
            return seen
        while worker.peers == 3:
            worker.step_or_park()
        if worker.index == 1:
            numbers.send(list(range(30, 60)))
        numbers.advance_to(4)
        while probe.less_than(4):
            worker.step_or_park()
        return seen

    got = [_items(seen) for seen in pk.execute(program, workers=3, join=1)]
    assert sorted(n for items in got for n in items) == list(range(60))
    assert all(n < 30 for n in got[0])


@_SHAPES
def test_workers_come_and_go_while_words_are_counted(shape: dict[str, int]) -> None:
    """Counts of each epoch are sums over all workers; joins and leaves change where, and not how many."""

    def program(worker: Worker) -> list[Any]:
        with worker.dataflow("words") as scope:
            lines, stream = scope.input()
            words = stream.flat_map(str.split).exchange(lambda word: word)
            probe, seen = words.probe(), words.collect()
        worker.bootstrap()
        for epoch in range(lines.time, 12):
            lines.send([f"epoch{epoch} word{epoch % 3}"])
            if worker.index == 1 and epoch in (2, 4, 6):
                before = worker.peers
                worker.admit()
                while worker.peers == before:
                    worker.step_or_park()
            lines.advance_to(epoch + 1)
            while probe.less_than(epoch):
                worker.step_or_park()
            if worker.index in (0, 2) and epoch == 8 + worker.index // 2:
                worker.leave()
                break
        return seen

    results = pk.execute(program, **shape, join=3)
    assert len(results) == 5
    got = [item for seen in results for item in _items(seen)]
    for epoch in range(12):
        fed = got.count(f"epoch{epoch}")
        assert 2 <= fed <= 5, (epoch, fed)
    assert sum(item.startswith("word") for item in got) == sum(item.startswith("epoch") for item in got)


def test_what_cannot_be_is_refused_by_its_name() -> None:
    for options, text in [
        ({"join": -1}, "join must be an int from 0 to 1024, got -1"),
        ({"join": True}, "join must be an int from 0 to 1024, got True"),
        ({"workers": 2**70}, "workers must be an int from 1 to 1024, got 1180591620717411303424"),
        ({"processes": 2**70}, "processes must be an int from 1 to 1024, got 1180591620717411303424"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(text)):
            pk.execute(lambda worker: None, **({"workers": 1} | options))

    def program(worker: Worker) -> list[str]:
        numbers, _, _ = _numbers(worker)
        told = []
        for call in (worker.step, worker.leave):
            with pytest.raises(DataflowError) as refused:
                call()
            told.append(str(refused.value))
        assert worker.bootstrap() is False
        with pytest.raises(DataflowError) as refused:
            worker.leave()
        told.append(str(refused.value))
        for count in (0, 2):
            with pytest.raises(ConfigError) as excess:
                worker.admit(count)
            told.append(str(excess.value))
        numbers.close()
        return told

    assert pk.execute(program, workers=1, join=1) == [
        [
            "worker 0: call bootstrap() once all dataflows are built, and before anything is sent or stepped: "
            "others may join here",
            "worker 0: it does not take part now, so it cannot leave",
            "worker 0: it is the only one and cannot leave; end its inputs instead, or let another one join first",
            "count must be an int of at least 1, got 0",
            "2 more workers may not join: execute(..., join=1) leaves 1",
        ]
    ]

    def fixed(worker: Worker) -> bool:
        with pytest.raises(DataflowError, match=r"workers of this run are fixed; call execute\(\.\.\., join=1\)"):
            worker.leave()
        with pytest.raises(ConfigError, match="1 more workers may not join"):
            worker.admit()
        return worker.bootstrap()

    assert pk.execute(fixed, workers=2) == [False, False]


@_SHAPES
def test_of_two_that_leave_at_the_same_time_one_stays_and_goes_on(shape: dict[str, int]) -> None:
    def program(worker: Worker) -> tuple[str, list[Any]]:
        numbers, _, seen = _numbers(worker)
        worker.bootstrap()
        try:
            worker.leave()
        except DataflowError as error:
            numbers.send([worker.index])
            numbers.close()
            while worker.step_or_park():
                pass
            return str(error), _items(seen)
        return "left", _items(seen)

    (stays, alone), (gone, left) = sorted(
        enumerate(pk.execute(program, **shape, join=1)), key=lambda one: one[1][0] == "left"
    )
    assert left == ("left", [])
    assert alone == (
        f"worker {stays}: it is the only one and cannot leave; end its inputs instead, or let another one join first",
        [stays],
    )
    assert gone == 1 - stays


_THREE = pytest.mark.parametrize(
    "three", [{"workers": 3}, {"workers": 1, "processes": 3}], ids=["threads", "processes"]
)


@_THREE
def test_two_that_leave_at_the_same_time_do_not_wait_for_each_other(three: dict[str, int]) -> None:
    """The sum of each waits for the input of the other one, whose program does nothing but leave."""

    def program(worker: Worker) -> tuple[int, list[Any]]:
        with worker.dataflow("sums") as scope:
            numbers, stream = scope.input()

            @stream.unary
            def sums(capability: Any) -> Any:
                capability.drop()
                totals: dict[Any, int] = {}

                def logic(input: Any, output: Any, frontiers: Any) -> None:
                    for capability, block in input:
                        totals[capability.time] = totals.get(capability.time, 0) + sum(block)
                        frontiers.notify_at(capability)
                    for capability in frontiers.notifications():
                        output.send(capability, [totals.pop(capability.time)])

                return logic

            seen = sums.collect()
        barrier = worker.barrier()
        worker.bootstrap()
        numbers.send([1, worker.index])
        worker.step()
        barrier.wait()
        barrier.close()
        if worker.index < 2:
            worker.leave()
        numbers.close()
        while worker.step_or_park():
            pass
        return worker.peers, _items(seen)

    results = pk.execute(program, **three, join=1)
    assert [items for _, items in results] == [[1], [2], [3]]
    assert results[2][0] == 1, "the others have left"


def test_a_joiner_that_builds_another_graph_is_told_which() -> None:
    tried = threading.Event()

    def program(worker: Worker) -> None:
        if worker.index == 1:
            with worker.dataflow("numbers") as scope:
                scope.input()
            try:
                worker.bootstrap()
            finally:
                tried.set()
        _numbers(worker)
        worker.bootstrap()
        worker.admit()
        # The others go on: they hear nothing of it.
        while not tried.is_set():
            worker.step_or_park(0.01)

    with pytest.raises(GraphError, match="worker 1 built another graph than worker 0"):
        pk.execute(program, workers=1, join=1)


def test_a_joiner_that_fails_ends_the_run() -> None:
    def program(worker: Worker) -> None:
        numbers, _, _ = _numbers(worker)
        if worker.bootstrap():
            raise ValueError("enough")
        worker.admit()
        # Its input is open, so it ends with the run only.
        while worker.step_or_park():
            pass
        numbers.close()

    with pytest.raises(ProgramError, match="worker 1 raised ValueError: enough") as failed:
        pk.execute(program, workers=1, join=1)
    assert failed.value.worker == 1


def test_two_workers_join_in_a_process_of_their_own_and_the_first_process_leaves() -> None:
    def program(worker: Worker) -> tuple[int, int, list[Any]]:
        numbers, probe, seen = _numbers(worker)
        joined = worker.bootstrap()
        numbers.send([worker.index])
        if worker.index == 1:
            with pytest.raises(ConfigError, match=re.escape("3 more workers may not join: execute(..., join=2)")):
                worker.admit(3)
            worker.admit(2)
        while worker.peers < 4 and not joined:
            worker.step_or_park()
        if worker.index == 0:
            worker.leave()
            return os.getpid(), 0, seen
        numbers.send([worker.index + 10])
        numbers.advance_to(1)
        while probe.less_than(1):
            worker.step_or_park()
        return os.getpid(), worker.peers, seen

    results = pk.execute(program, workers=1, processes=2, join=2)
    processes = [process for process, _, _ in results]
    assert processes[2] == processes[3] and len(set(processes)) == 3 and os.getpid() not in processes
    assert results[0][1] == 0 and all(peers >= 3 for _, peers, _ in results[1:])
    assert sorted(n for _, _, seen in results for n in _items(seen)) == [0, 1, 2, 3, 11, 12, 13]


def test_a_process_that_dies_while_it_joins_is_named() -> None:
    def program(worker: Worker) -> None:
        numbers, _, _ = _numbers(worker)
        if worker.index == 2:
            os._exit(7)
        worker.bootstrap()
        if worker.index == 0:
            worker.admit()
        while worker.step_or_park():
            pass
        numbers.close()

    with pytest.raises(WorkerLost, match=re.escape("process 2 (which joined)")) as lost:
        pk.execute(program, workers=1, processes=2, join=1)
    assert (lost.value.process, lost.value.exitcode) == (2, 7)


def test_an_error_of_a_joiner_in_another_process_is_raised() -> None:
    def program(worker: Worker) -> None:
        numbers, _, _ = _numbers(worker)
        if worker.bootstrap():
            raise ValueError("enough")
        if worker.index == 0:
            worker.admit()
        while worker.step_or_park():
            pass
        numbers.close()

    with pytest.raises(ProgramError, match="worker 2 raised ValueError: enough") as failed:
        pk.execute(program, workers=1, processes=2, join=1)
    assert failed.value.worker == 2


@_SHAPES
def test_what_its_peer_had_closed_takes_nothing_of_a_joiner(shape: dict[str, int]) -> None:
    def program(worker: Worker) -> Any:
        with worker.dataflow("numbers") as scope:
            numbers, _ = scope.input()
        log, barrier = worker.sequencer(), worker.barrier()
        if worker.index == 2:
            worker.bootstrap()
            uses = [lambda: log.push("x"), lambda: numbers.send([1]), lambda: numbers.advance_to(9)]
            uses += [barrier.wait, barrier.advance, lambda: barrier.reached(1), lambda: barrier.round]
            for use in uses:
                with pytest.raises(ClosedError, match="takes nothing"):
                    use()
            with pytest.raises(ClosedError, match="it has no time"):
                _ = numbers.time
            return True
        worker.bootstrap()
        if worker.index == 0:
            for handle in (log, numbers, barrier):
                handle.close()
            worker.step()
            worker.admit()
        while worker.peers < 3:
            worker.step_or_park()
        return False

    assert pk.execute(program, **shape, join=1) == [False, False, True]


def test_what_its_peer_had_closed_stays_closed_at_a_joiner_that_others_leave_to() -> None:
    """What a leaver holds goes to who leads then, also where that has nothing of the kind: it is nobody's."""

    def program(worker: Worker) -> Any:
        with worker.dataflow("numbers") as scope:
            numbers, stream = scope.input()
            probe = stream.probe()
        barrier = worker.barrier()
        worker.bootstrap()
        if worker.index == 0:
            numbers.close()
            barrier.close()
            worker.step()
            worker.admit()
            while worker.peers < 3:
                worker.step_or_park()
            return worker.leave()
        if worker.index == 1:
            numbers.advance_to(5)
            while worker.peers < 3:
                worker.step_or_park()
            while worker.peers > 2:
                worker.step_or_park()
            return worker.leave()

        def closed() -> None:
            for use in (lambda: numbers.send([1]), lambda: numbers.time, lambda: barrier.round):
                with pytest.raises(ClosedError):
                    use()

        closed()
        while worker.peers > 1:
            worker.step_or_park()
        while not probe.done():
            closed()
            worker.step_or_park()
        return True

    assert pk.execute(program, workers=2, join=1)[2] is True


@pytest.mark.parametrize(
    ("use", "says"),
    [
        ("send", 'operator "last" cannot send with what a constructor gets at a worker that joins'),
        ("delayed", 'operator "last" cannot send with what a constructor gets at a worker that joins'),
        ("notify_at", "notify_at cannot be called with what a constructor gets at a worker that joins"),
    ],
)
def test_what_a_constructor_of_a_joiner_gets_is_refused_as_such(use: str, says: str) -> None:
    """It was called a capability of another operator."""

    def program(worker: Worker) -> Any:
        told: list[str] = []
        joins = worker.index == 1
        with worker.dataflow() as scope:
            numbers, stream = scope.input()

            @stream.unary
            def last(first: Any) -> Any:
                first = first.delayed(3) if use == "delayed" else first

                def logic(input: Any, output: Any, frontiers: Any) -> None:
                    for capability, block in input:
                        if not joins:
                            continue
                        # What pytest.raises keeps would hold the capability of the block until it is collected.
                        try:
                            frontiers.notify_at(first) if use == "notify_at" else output.send(first, block)
                        except CapabilityError as error:
                            told.append(str(error))
                        output.send(capability, block)
                    if frontiers.done():
                        first.drop()

                return logic

            seen = last.collect()
        if not worker.bootstrap():
            worker.admit()
            while worker.peers < 2:
                worker.step_or_park()
        numbers.send([worker.index])
        numbers.close()
        return told, seen

    [(nothing, _), ([told], seen)] = pk.execute(program, workers=1, join=1)
    assert nothing == [] and _items(seen) == [1]
    assert says in told and told.endswith("which is good for nothing: take the capabilities of blocks")


@_SHAPES
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "worker [12] raised ValueError: enough"),
        ("send", r"send before bootstrap\(\), at a worker that joins"),
    ],
)
def test_a_joiner_that_fails_before_it_has_a_place_is_waited_for_by_nobody(
    shape: dict[str, int], how: str, says: str
) -> None:
    def program(worker: Worker) -> None:
        numbers, _, _ = _numbers(worker)
        founders = shape["workers"] * shape.get("processes", 1)
        if worker.index == founders and how == "raise":
            raise ValueError("enough")
        numbers.send([1])
        worker.bootstrap()
        if worker.index == 0:
            worker.admit()
        while worker.peers == founders:
            worker.step_or_park()

    with pytest.raises((ProgramError, DataflowError), match=says):
        pk.execute(program, **shape, join=1)


def test_a_barrier_tells_how_many_there_are() -> None:
    def program(worker: Worker) -> int:
        barrier = worker.barrier()
        if not worker.bootstrap():
            worker.admit()
            while worker.peers < 2:
                # Its own arrival is enough as long as it is alone.
                barrier.wait()
        return worker.peers

    assert pk.execute(program, workers=1, join=1) == [2, 2]


@_SHAPES
def test_a_log_that_all_close_at_once_is_read_to_its_end_by_a_joiner(shape: dict[str, int]) -> None:
    """All inputs close before the joiner has learnt what stands in the log."""

    def program(worker: Worker) -> list[str]:
        log = worker.sequencer()
        worker.bootstrap()
        if worker.index == 0:
            worker.admit()
        while worker.peers < 3:
            worker.step_or_park()
        if worker.index == 0:
            log.push("x")
        log.close()
        return list(log)

    for _ in range(10):
        assert pk.execute(program, **shape, join=1) == [["x"]] * 3


def test_a_log_that_was_over_is_over_for_who_joins() -> None:
    def program(worker: Worker) -> list[int]:
        log, other = worker.sequencer(), worker.sequencer()
        if not worker.bootstrap():
            log.push(worker.index)
        log.close()
        read = list(log)
        if worker.index == 0:
            worker.admit()
        while worker.peers < 3:
            worker.step_or_park()
        other.close()
        assert list(other) == []
        return read

    assert pk.execute(program, workers=2, join=1) == [[0, 1], [0, 1], []]


def test_a_parked_worker_looks_at_the_clock_while_somebody_joins() -> None:
    """Else nobody withdraws a joiner that is late."""
    looked = threading.Event()

    def program(worker: Worker) -> int:
        looks = 0
        with worker.dataflow("d") as scope:
            numbers, stream = scope.input()
            stream.probe()
        if worker.index == 1:
            assert looked.wait(60), "the lead has not come back from its park"
        worker.bootstrap()
        if worker.index == 0:
            worker.admit()
            while worker.peers < 2:
                worker.step_or_park()
                looks += 1
                if looks == 5:
                    looked.set()
        numbers.close()
        return looks

    assert pk.execute(program, workers=1, join=1)[0] >= 5
