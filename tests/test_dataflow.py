"""The dataflow layer on threads: results do not depend on the number of workers, and its surface."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _native, errors
from penstock.dataflow import Worker


def _words(seen: list[tuple[Any, list[Any]]]) -> list[Any]:
    return [item for _, block in seen for item in block]


@settings(max_examples=examples(25))
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


@settings(max_examples=examples(40))
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
        with pytest.raises(errors.BlockError, match=r"or a pyarrow\.RecordBatch: .* an array of Int64"):
            handle.send(pa.array([1]))  # type: ignore[arg-type]
        return seen

    (seen,) = pk.execute(program, workers=1)
    assert [block for _, block in seen[:2]] == [[1], [3, 4]]
    assert seen[2][1].to_pylist() == [{"k": 1}] and len(seen) == 3


# Loops


@settings(max_examples=examples(15))
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


def test_rows_that_go_around_unchanged_hold_nothing_of_the_rounds_before() -> None:
    rounds, rows = 300, 10_000
    held: list[int] = []

    def body(batch: pa.RecordBatch) -> pa.RecordBatch:
        held.append(pa.total_allocated_bytes())
        return pa.record_batch({"n": batch["n"], "round": pc.add(batch["round"], 1)})

    def program(worker: Worker) -> list[Any]:
        def turn(blocks: Any) -> Any:
            made = blocks.map_blocks(body)
            again = made.map_blocks(lambda batch: batch if batch["round"][0].as_py() < rounds else [])
            return again, made.map_blocks(lambda batch: batch if batch["round"][0].as_py() == rounds else [])

        with worker.dataflow() as scope:
            handle, stream = scope.input()
            seen = stream.iterate(turn).collect()
        handle.send(pa.record_batch({"n": range(rows), "round": [0] * rows}))
        return seen

    [[(_, batch)]] = pk.execute(program, workers=1)
    assert batch["n"].to_pylist() == list(range(rows)) and batch["round"][0].as_py() == rounds
    assert max(held) - held[0] < 30 * 8 * rows, "each round holds the one before"
