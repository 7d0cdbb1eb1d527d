"""The dataflow layer on threads: results, times, notifications, and every kind of misuse."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from datetime import date, datetime, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from penstock import _mesh, _native, errors
from penstock.dataflow import Worker, run_here


def _words(seen: list[tuple[Any, list[Any]]]) -> list[Any]:
    return [item for _, block in seen for item in block]


# Results do not depend on the number of workers


@settings(max_examples=25)
@given(
    lines=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.sampled_from(["a", "b", "c", "dd", "é"]), max_size=5)), max_size=12
    ),
    workers=st.integers(1, 4),
)
def test_word_counts_per_time_equal_a_counter(lines: list[tuple[int, list[str]]], workers: int) -> None:
    lines.sort(key=lambda line: line[0])

    def program(worker: Worker) -> list[tuple[Any, list[Any]]]:
        with worker.dataflow("words") as scope:
            handle, stream = scope.input()

            @stream.flat_map(str.split).exchange(lambda word: word).unary
            def count(capability: Any) -> Any:
                capability.drop()
                counts: dict[int, Counter[str]] = defaultdict(Counter)

                def logic(input: Any, output: Any, frontiers: Any) -> None:
                    for capability, words in input:
                        counts[capability.time].update(words)
                        frontiers.notify_at(capability)
                    for capability in frontiers.notifications():
                        output.send(capability, sorted(counts.pop(capability.time).items()))

                return logic

            seen = count.collect()
        for number, (epoch, words) in enumerate(lines):
            handle.advance_to(epoch)
            if number % worker.peers == worker.index:
                handle.send([" ".join(words)])
            worker.step()
        return seen

    expected: dict[tuple[int, str], int] = Counter((epoch, word) for epoch, words in lines for word in words)
    got: Counter[tuple[int, str]] = Counter()
    times = []
    for seen in pk.execute(program, workers=workers):
        own = [epoch for epoch, _ in seen]
        assert own == sorted(set(own)), "each time once, in order"
        times.append(own)
        for epoch, pairs in seen:
            for word, count in pairs:
                assert (epoch, word) not in got, "one worker per word"
                got[epoch, word] = count
    assert got == expected


_TIMES = st.tuples(st.integers(0, 3), st.integers(0, 3))


@settings(max_examples=40)
@given(requests=st.lists(_TIMES, min_size=1, max_size=10), passes=st.lists(_TIMES, max_size=6))
def test_notifications_come_once_in_order_and_never_early(
    requests: list[tuple[int, int]], passes: list[tuple[int, int]]
) -> None:
    """Against the obvious twin: a time is delivered once no element of the frontier is at or before it."""

    def program(worker: Worker) -> list[tuple[list[Any], list[Any]]]:
        runs: list[tuple[list[Any], list[Any]]] = []
        with worker.dataflow() as scope:
            inner = scope.nested()
            handle, stream = inner.input()

            @stream.unary
            def watch(capability: Any) -> Any:
                for asked in requests:
                    held = [capability.delayed(asked)]
                    pending.append(held)
                capability.drop()

                def logic(input: Any, output: Any, frontiers: Any) -> None:
                    for held in pending:
                        while held:
                            frontiers.notify_at(held.pop())
                    for _ in input:
                        pass
                    runs.append((frontiers.frontier(), [held.time for held in frontiers.notifications()]))

                return logic

        worker.step()
        for to in passes:
            if all(now <= then for now, then in zip(handle.time, to, strict=True)):
                handle.advance_to(to)
                worker.step()
        handle.close()
        worker.step()
        return runs

    pending: list[list[Any]] = []
    (runs,) = pk.execute(program, workers=1)
    due = set(requests)
    for frontier, delivered in runs:
        complete = {t for t in due if not any(f[0] <= t[0] and f[1] <= t[1] for f in frontier)}
        assert delivered == sorted(complete)
        due -= complete
    assert not due


def test_record_batches_go_where_their_rows_hash_without_a_copy_of_whole_ones() -> None:
    batch = pa.record_batch({"k": pa.array(range(100)), "v": pa.array([str(n) for n in range(100)])})

    def program(worker: Worker) -> list[Any]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            by_column, by_two = stream.exchange("k").collect(), stream.exchange(["k", "v"]).collect()
            listed = stream.map_blocks(lambda batch: batch["k"].to_pylist()).exchange(lambda k: k).collect()
        if worker.index == 0:
            handle.send(batch)
        worker.step_while(lambda: False)
        return [by_column, by_two, listed]

    results = pk.execute(program, workers=3)
    keys = [[k for _, block in by_column for k in block["k"].to_pylist()] for by_column, _, _ in results]
    assert sorted(k for part in keys for k in part) == list(range(100))
    assert sorted(k for _, two, _ in results for _, b in two for k in b["k"].to_pylist()) == list(range(100))
    # A key in a list goes where the same key in an Arrow column goes.
    assert keys == [_words(listed) for _, _, listed in results]


def test_blocks_of_other_kinds_become_lists_or_are_refused() -> None:
    def program(worker: Worker) -> list[Any]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            seen = stream.collect()
        mine = [1]
        handle.send(mine)
        mine.append(2)  # the program's list is its own
        handle.send((3, 4))
        handle.send([])
        handle.send(pa.table({"k": [1]}))
        for wrong in ("text", 7, {"k": 1}, iter([1])):
            with pytest.raises(errors.BlockError, match=r"a list of objects or a pyarrow\.RecordBatch, got"):
                handle.send(wrong)
        return seen

    (seen,) = pk.execute(program, workers=1)
    assert [block for _, block in seen[:2]] == [[1], [3, 4]]
    assert seen[2][1].to_pylist() == [{"k": 1}] and len(seen) == 3


# Keys


@settings(max_examples=30)
@given(number=st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)))
def test_equal_keys_meet(number: Any) -> None:
    exact = Fraction(number)
    forms = [number, exact, (number,)[0]]
    if exact.denominator == 1:
        forms += [int(exact), Decimal(int(exact))]
    if isinstance(number, float):
        forms.append(Decimal(number))
    assert len(set(forms)) == 1, "they are one key of a dict"
    assert len(set(_worker_of(forms))) == 1
    assert len(set(_worker_of([("x", form) for form in forms]))) == 1


def _worker_of(keys: list[Any], peers: int = 7) -> list[int]:
    def program(worker: Worker) -> list[Any]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            seen = stream.exchange(lambda pair: pair[1]).collect()
        if worker.index == 0:
            handle.send(list(enumerate(keys)))
        return seen

    homes = {}
    for worker, seen in enumerate(pk.execute(program, workers=peers)):
        homes.update({index: worker for index, _ in _words(seen)})
    return [homes[index] for index in range(len(keys))]


def test_the_worker_of_a_key_is_part_of_the_format() -> None:
    keys = [0, 1, -1, 2**63, 2**64 - 1, 10**30, "a", "é", "", b"a", None, 1.5, ("a", 1), (), date(2026, 1, 1)]
    keys += [datetime(2026, 1, 1, tzinfo=timezone.utc), Decimal("0.1"), frozenset({"a", "b"})]
    golden = _worker_of(keys)
    assert golden == GOLDEN
    same = [True, 1, 1.0, Decimal(1)]
    assert len(set(_worker_of(same))) == 1
    assert _worker_of(["\ud800"]) == _worker_of(["\ud800"])


GOLDEN = [2, 2, 0, 6, 0, 6, 4, 6, 0, 4, 2, 3, 4, 2, 5, 6, 3, 0]


def test_a_key_function_that_raises_names_step_file_line_and_item() -> None:
    def key(item: int) -> float:
        return 1 / item  # the line

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.exchange(key)
        handle.send([1, 2, 0, 4])
        worker.step_while(lambda: True)

    with pytest.raises(errors.UserFunctionError, match=r"exchange key: ZeroDivisionError.*\n  item: 0") as caught:
        pk.execute(program, workers=2)
    assert caught.value.file == __file__
    assert caught.value.line == key.__code__.co_firstlineno + 1
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class _Unstable:
    pass


@pytest.mark.parametrize("key", [_Unstable(), [1], {"a": 1}, (1, _Unstable())])
def test_a_key_without_a_stable_hash_is_refused(key: Any) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.exchange(lambda item: key)
        handle.send([1])

    with pytest.raises(errors.UserFunctionError, match="has no hash that is the same in every process"):
        pk.execute(program, workers=2)


def test_a_missing_column_and_a_key_of_the_wrong_kind_are_named() -> None:
    def program(key: Any, block: Any) -> Any:
        def run(worker: Worker) -> None:
            with worker.dataflow() as scope:
                handle, stream = scope.input()
                stream.exchange(key)
            handle.send(block)

        return run

    with pytest.raises(errors.SchemaError, match=r'"x".*\["k"\]'):
        pk.execute(program("x", pa.record_batch({"k": [1]})), workers=2)
    with pytest.raises(errors.BlockError, match="got a list"):
        pk.execute(program("x", [1]), workers=2)
    with pytest.raises(errors.BlockError, match="RecordBatch: the key of such a block is the name of a column"):
        pk.execute(program(str, pa.record_batch({"k": [1]})), workers=2)
    with pytest.raises(errors.ProgramError, match="a function or names of columns"):
        try:
            pk.execute(program([3], [1]), workers=1)
        except errors.BlockError as error:
            raise errors.ProgramError(error.message) from error


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

    with pytest.raises(errors.TimeError, match=r"cannot go to 0.*\n  in under test \(.*test_dataflow\.py:\d+\)"):
        _with_logic(logic, workers=2)


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

    for build in (open_loop, standing_loop, twice, strangers, siblings, too_deep):

        def program(worker: Worker, build: Any = build) -> None:
            with worker.dataflow("wrong") as scope:
                build(scope)
            raise AssertionError("it was not refused")

        with pytest.raises(errors.GraphError):
            pk.execute(program, workers=2)


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
    def program(worker: Worker) -> float:
        with worker.dataflow() as scope:
            _handle, _stream = scope.input()
        worker.step()
        used = time.thread_time()
        end = time.monotonic() + 0.4
        while (left := end - time.monotonic()) > 0:
            worker.step_or_park(left)
        return time.thread_time() - used

    counted = [0]
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
            thread.join(20)
            assert not thread.is_alive() and "closing time" in str(outcome[0])


# Loops


@settings(max_examples=15)
@given(numbers=st.lists(st.integers(1, 60), min_size=1, max_size=20), workers=st.integers(1, 3))
def test_a_loop_across_workers_counts_the_steps_of_each_number(numbers: list[int], workers: int) -> None:
    def steps(number: int) -> int:
        count = 0
        while number != 1:
            number, count = (number // 2 if number % 2 == 0 else 3 * number + 1), count + 1
        return count

    def body(stream: Any) -> Any:
        moved = stream.exchange(lambda pair: pair[1])
        again = moved.filter(lambda pair: pair[1] != 1).map(
            lambda pair: (pair[0], pair[1] // 2 if pair[1] % 2 == 0 else 3 * pair[1] + 1)
        )

        @moved.filter(lambda pair: pair[1] == 1).unary(name="rounds")
        def rounds(capability: Any) -> Any:
            capability.drop()

            def logic(input: Any, output: Any, frontiers: Any) -> None:
                for capability, block in input:
                    output.send(capability, [(number, capability.time[1]) for number, _ in block])

            return logic

        return again, rounds

    def program(worker: Worker) -> Any:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            seen = stream.map(lambda number: (number, number)).iterate(body).collect()
        handle.send(numbers[worker.index :: worker.peers])
        return seen

    found = sorted(pair for seen in pk.execute(program, workers=workers) for pair in _words(seen))
    assert found == sorted((number, steps(number)) for number in numbers)


# The surface


@pytest.mark.parametrize("name", [name for name in vars(_native) if name.startswith("Dataflow")])
def test_native_handles_cannot_be_made_or_pickled(name: str) -> None:
    kind = getattr(_native, name)
    with pytest.raises(TypeError):
        type("Derived", (kind,), {})
    if name != "DataflowListener":
        with pytest.raises(TypeError):
            kind()


def test_errors_of_this_layer_pickle_with_their_facts() -> None:
    import pickle

    for name in ("WorkerLost", "WorkerStopped", "GraphError", "TimeError", "ProgramError", "CoordinationTimeout"):
        made = getattr(errors, name)("message", worker=3)
        made.__cause__ = ValueError("why")
        copy = pickle.loads(pickle.dumps(made))
        assert type(copy) is type(made) and copy.worker == 3 and isinstance(copy.__cause__, ValueError)
