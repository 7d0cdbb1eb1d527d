"""Times of dataflows, and capabilities for them: order, scopes, and every kind of misuse."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import penstock as pk
from penstock import errors
from penstock.dataflow import Capability, Worker

# Times


def test_times_of_nested_scopes_are_tuples_of_their_depth() -> None:
    def program(worker: Worker) -> list[Any]:
        collected = []
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            scopes, entered = [scope], [stream]
            for depth in range(2, 8):
                scopes.append(scopes[-1].nested(f"depth {depth}"))
                entered.append(entered[-1].enter(scopes[-1]))
                assert scopes[-1].depth == depth
                collected.append(entered[-1].collect())
            back = entered[-1]
            for outer in reversed(scopes[:-1]):
                back = back.leave(outer)
            out = back.collect()
        handle.advance_to(3)
        handle.send(["x"])
        return [*collected, out]

    (seen,) = pk.execute(program, workers=1)
    assert [blocks[0][0] for blocks in seen] == [(3,) + (0,) * zeros for zeros in range(1, 7)] + [3]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_coordinates_come_back_whatever_the_depth(depth: int) -> None:
    """Each depth with zeros at any place: inside, those at the end of a time are not kept."""

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            for _ in range(depth - 1):
                scope = scope.nested()
            inputs = {time: scope.input()[0] for time in itertools.product(range(2), repeat=depth)}
        for time, handle in inputs.items():
            asked = time if depth > 1 else time[0]
            handle.advance_to(asked)
            assert handle.time == asked

    pk.execute(program, workers=1)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_time_of_another_scope_is_rejected_by_name(depth: int) -> None:
    wrong: list[Any] = [-1, 2**64, 1.5, "1", None, (), (1,) * (depth + 1), (1,) * max(depth - 1, 1), (-1,) * depth]
    wrong += [1] if depth > 1 else [(1,)]

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            for _ in range(depth - 1):
                scope = scope.nested()
            handle, stream = scope.input()
            probe = stream.probe()
        before = handle.time
        for asked in wrong:
            for call in (handle.advance_to, probe.less_than, probe.less_equal):
                with pytest.raises(errors.TimeError, match="is not a time of this scope") as caught:
                    call(asked)
                assert caught.value.asked == asked and caught.value.depth == depth
        assert handle.time == before

    pk.execute(program, workers=1)


def test_times_of_a_product_are_not_ordered_by_their_first_coordinate() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.nested().input()
            probe = stream.probe()
        handle.advance_to((0, 5))
        with pytest.raises(errors.TimeError, match=r"an input at time \(0, 5\) cannot go to \(1, 0\)") as caught:
            handle.advance_to((1, 0))
        assert (caught.value.held, caught.value.asked) == ((0, 5), (1, 0))
        worker.step()
        assert probe.less_equal((0, 5)) and probe.less_equal((1, 5)) and not probe.less_equal((1, 0))

    pk.execute(program, workers=1)


def test_inputs_go_forward_and_end() -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, _ = scope.input()
        handle.advance_to(3)
        handle.advance_to(3)
        with pytest.raises(errors.TimeError, match="an input at time 3 cannot go to 2"):
            handle.advance_to(2)
        assert handle.time == 3
        with handle:
            handle.send([1])
        for call in (lambda: handle.send([1]), lambda: handle.advance_to(4), lambda: handle.time):
            with pytest.raises(errors.ClosedError, match="closed"):
                call()
        handle.close()

    pk.execute(program, workers=1)


def test_what_runs_while_an_error_is_made_may_use_what_it_is_about() -> None:
    """A signal handler, or the end of an object that the collector has found."""

    def meanwhile(act: Callable[[], object], error: type[Exception], call: Callable[[], object]) -> None:
        made: list[object] = []

        def see(frame: Any, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code is errors.PenstockError.__init__.__code__:
                sys.setprofile(None)
                made.append(act())

        sys.setprofile(see)
        try:
            with pytest.raises(error):
                call()
        finally:
            sys.setprofile(None)
        assert len(made) == 1

    def program(worker: Worker) -> None:
        def construct(capability: Capability) -> Any:
            capability.downgrade(5)
            meanwhile(capability.drop, errors.TimeError, lambda: capability.delayed(0))
            return lambda input, output, frontiers: None

        with worker.dataflow() as scope:
            handle, stream = scope.input()
            handle.advance_to(3)
            stream.unary(construct)
        meanwhile(lambda: handle.advance_to(5), errors.TimeError, lambda: handle.advance_to(2))
        assert handle.time == 5
        meanwhile(handle.close, errors.TimeError, lambda: handle.advance_to(2))
        meanwhile(handle.close, errors.ClosedError, lambda: handle.send([1]))

    pk.execute(program, workers=1)


# Capabilities


def _with_logic(logic: Any, *, workers: int = 1) -> Any:
    """Runs `logic(capability, input, output, frontiers)` once per run of an operator that got one block at time 2."""

    def program(worker: Worker) -> Any:
        with worker.dataflow() as scope:
            handle, stream = scope.input()

            @stream.unary(name="under test")
            def operator(capability: Any) -> Any:
                return lambda input, output, frontiers: logic(capability, input, output, frontiers)

            seen = operator.collect()
        handle.advance_to(2)
        handle.send(["x"])
        handle.close()
        return seen

    return pk.execute(program, workers=workers)


def test_capabilities_only_move_forward() -> None:
    def logic(capability: Any, input: Any, output: Any, frontiers: Any) -> None:
        for held, _ in input:
            assert held.time == 2
            for call in (held.delayed, held.downgrade, lambda time, held=held: output.send(held, ["y"], at=time)):
                with pytest.raises(errors.TimeError, match="a capability at time 2 cannot go to 1"):
                    call(1)
            assert held.time == 2
            output.send(held, ["now"])
            output.send(held, ["later"], at=5)
            held.downgrade(4)
            assert repr(held) == "Capability(4)"
            with pytest.raises(errors.TimeError):
                output.send(held, ["late"], at=3)
            output.send(held, ["moved"])
        capability.drop()

    assert _with_logic(logic) == [[(2, ["now"]), (5, ["later"]), (4, ["moved"])]]


def test_a_dropped_capability_sends_nothing() -> None:
    def logic(capability: Any, input: Any, output: Any, frontiers: Any) -> None:
        capability.drop()
        for held, _ in input:
            held.drop()
            for call in (
                lambda held: output.send(held, ["y"]),
                lambda held: held.delayed(9),
                lambda held: held.downgrade(9),
                lambda held: held.time,
                frontiers.notify_at,
            ):
                with pytest.raises(errors.CapabilityError, match="was dropped"):
                    call(held)

    assert _with_logic(logic) == [[]]


def test_a_capability_of_another_operator_is_refused() -> None:
    def program(worker: Worker) -> Any:
        stolen: list[Any] = []
        with worker.dataflow() as scope:
            _handle, stream = scope.input()

            @stream.unary
            def thief(capability: Any) -> Any:
                stolen.append(capability)
                return lambda input, output, frontiers: None

            @stream.unary
            def user(capability: Any) -> Any:
                def logic(input: Any, output: Any, frontiers: Any) -> None:
                    if not stolen:
                        return
                    with pytest.raises(errors.CapabilityError, match='"user" cannot send with a capability of another'):
                        output.send(stolen[0], ["x"])
                    with pytest.raises(errors.CapabilityError, match="notify_at takes a capability of this operator"):
                        frontiers.notify_at(stolen[0])
                    assert stolen[0].time == 0
                    stolen.clear()
                    capability.drop()

                return logic

        worker.step()
        return not stolen

    assert pk.execute(program, workers=1) == [True]


def test_a_notification_for_a_capability_of_another_scope_is_refused_and_it_stays() -> None:
    def program(worker: Worker) -> Any:
        held: list[Any] = []
        seen: list[Any] = []
        with worker.dataflow() as scope:
            _handle, stream = scope.input()

            @stream.unary
            def keeper(capability: Any) -> Any:
                held.append(capability)
                return lambda input, output, frontiers: None

            @stream.enter(scope.nested()).unary
            def asker(capability: Any) -> Any:
                capability.drop()

                def logic(input: Any, output: Any, frontiers: Any) -> None:
                    if held and not seen:
                        with pytest.raises(errors.CapabilityError, match="another scope"):
                            frontiers.notify_at(held[0])
                        seen.append(held.pop().time)

                return logic

            asker.probe()
        _handle.advance_to(1)
        worker.step()
        return seen

    assert pk.execute(program, workers=1) == [[0]]


def test_a_number_whose_conversion_uses_the_handle_is_a_time() -> None:
    class Late:
        def __init__(self, look: Any) -> None:
            self.look = look

        def __index__(self) -> int:
            assert self.look() == 0
            return 5

    def program(worker: Worker) -> Any:
        with worker.dataflow() as scope:
            handle, _stream = scope.input()

            def start(capability: Any) -> Any:
                for move in (capability.delayed, capability.downgrade):
                    move(Late(lambda: capability.time))
                assert capability.time == 5
                return lambda output: capability.drop()

            scope.source(start)
        handle.advance_to(Late(lambda: handle.time))
        return handle.time

    assert pk.execute(program, workers=1) == [5]


def test_a_held_capability_holds_the_frontier_and_letting_go_releases_it() -> None:
    def program(worker: Worker) -> Any:
        held: list[Any] = []
        with worker.dataflow() as scope:
            handle, stream = scope.input()

            @stream.unary
            def keep(capability: Any) -> Any:
                held.append(capability.delayed(3))
                capability.drop()
                return lambda input, output, frontiers: [None for _ in input]

            probe = keep.probe()
        handle.close()
        for _ in range(5):
            worker.step()
        assert probe.frontier() == [3]
        # The last reference goes in another thread: as good as here.
        other = threading.Thread(target=held.clear)
        other.start()
        other.join()
        worker.step_while(lambda: not probe.done())
        return probe.frontier()

    assert pk.execute(program, workers=1) == [[]]


def test_misuse_in_logic_that_nobody_catches_keeps_its_class_and_names_the_place() -> None:
    def logic(capability: Any, input: Any, output: Any, frontiers: Any) -> None:
        capability.delayed(1).downgrade(0)

    with pytest.raises(errors.TimeError, match=r"cannot go to 0.*\n  in under test \(.*test_dataflow_times\.py:\d+\)"):
        _with_logic(logic, workers=2)


def test_notifications_that_are_left_are_given_in_the_next_run() -> None:
    """No frontier moves for them any more."""

    def one_at_a_time(worker: Any) -> list[int]:
        told: list[int] = []

        def start(capability: Any) -> Any:
            capability.drop()

            def run(input: Any, output: Any, frontiers: Any) -> None:
                for held, _ in input:
                    frontiers.notify_at(held)
                for held in frontiers.notifications():
                    told.append(held.time)
                    break

            return run

        with worker.dataflow() as scope:
            data, stream = scope.input()
            scope.operator([stream], start, name="slow")
        for time in range(3):
            data.advance_to(time)
            data.send([time])
        return told

    assert pk.execute(one_at_a_time, workers=1) == [[0, 1, 2]]


@pytest.mark.parametrize(("start", "advance", "last"), [(2**64 - 3, 1, 2**64 - 1), (0, 2**63, 2**63)])
def test_what_goes_round_a_loop_beyond_the_last_time_is_an_error(start: int, advance: int, last: int) -> None:
    seen: list[Any] = []

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            loop, again = scope.feedback(advance)
            again.collect(seen)
            stream.concat(again).map(lambda x: x - 1).filter(lambda x: x > 0).connect_loop(loop)
        numbers.advance_to(start)
        numbers.send([9])

    with pytest.raises(errors.TimeError, match=f"round a loop at time {last} .* beyond the last time there is"):
        pk.execute(program, workers=1)
    assert seen[-1][0] == last
