"""Flat maps, bounded parts and loops of flows, on the local host and inside partitions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as pk


def up_to(n: int) -> Iterator[tuple[int]]:
    return ((i,) for i in range(n))


def table(**columns: list[Any]) -> pa.Table:
    return pa.table(columns)


def column(rows: pa.Table, name: str = "i") -> list[Any]:
    return rows.column(name).to_pylist()


def halves(batch: pa.RecordBatch) -> pa.RecordBatch:
    half = pc.divide(batch["n"], 2)
    return pa.record_batch({"n": half, "again": pc.greater(half, 0)})


# What comes out


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=st.lists(st.integers(0, 6), max_size=30),
    batches=st.none() | st.integers(1, 4),
    batch_size=st.none() | st.integers(1, 5),
    rows_of_a_batch=st.integers(1, 40),
    workers=st.integers(1, 2),
)
def test_bounds_change_nothing(
    values: list[int], batches: int | None, batch_size: int | None, rows_of_a_batch: int, workers: int
) -> None:
    def twice(part: pk.Flow) -> pk.Flow:
        plus = part.map_batches(lambda batch: pa.record_batch({"n": pc.add(batch["n"], 1)}))
        once = plus.flat_map(up_to, "i bigint", rows=True)
        return once.bounded(lambda inner: inner.flat_map(up_to, "i bigint", rows=True), batches=1)

    flow = pk.Flow("n bigint").bounded(twice, batches=batches, batch_size=batch_size)
    given = table(n=pa.array(values, pa.int64()))
    expected = [j for n in values for i in range(n + 1) for j in range(i)]
    got = column(flow.collect(given, workers, batch_rows=rows_of_a_batch))
    assert (got if workers == 1 else sorted(got)) == (expected if workers == 1 else sorted(expected))
    pieces = flow.map_in_arrow()(given.to_batches(max_chunksize=rows_of_a_batch))
    assert [value for piece in pieces for value in piece.column("i").to_pylist()] == expected


def test_a_batch_may_become_any_number_of_batches() -> None:
    def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch | pa.Table]:
        yield batch.slice(0, 0)
        yield from (batch.slice(at, 1) for at in range(batch.num_rows))
        yield pa.table({"n": range(3000)})

    flow = pk.Flow("n bigint").flat_map(slices)
    assert column(flow.collect(table(n=[7, 8])), "n") == [7, 8, *range(3000)]
    assert column(pk.Flow("n bigint").flat_map(lambda batch: []).collect(table(n=[7])), "n") == []


def test_keyed_steps_stand_behind() -> None:
    flow = pk.Flow("n bigint").flat_map(up_to, "i bigint", rows=True)
    counted = flow.key_by("i").agg(n=pk.count(), emit="final")
    for workers in (1, 2):
        rows = counted.collect(table(n=[3, 2, 3]), workers).to_pylist()
        assert sorted((row["i"], row["n"]) for row in rows) == [(0, 3), (1, 3), (2, 2)]

    def number(state: int | None, i: int) -> tuple[int, tuple[int, int]]:
        seen = (state or 0) + 1
        return seen, (i, seen)

    order = flow.key_by("i").stateful_map(number, schema="i bigint, nth bigint")
    again = order.flat_map(lambda i, nth: [(i * 10 + nth,)] * 2, "i bigint", rows=True)
    got = column(again.collect(table(n=[2, 2]), 2))
    assert sorted(got) == [1, 1, 2, 2, 11, 11, 12, 12]


def test_ten_levels() -> None:
    def nested(part: pk.Flow, levels: int) -> pk.Flow:
        part = part.flat_map(lambda n: [(n,), (n + 1,)], rows=True)
        return part if levels == 1 else part.bounded(lambda inner: nested(inner, levels - 1), batches=1, batch_size=2)

    flow = pk.Flow("n bigint").bounded(lambda part: nested(part, 10), batches=1, batch_size=1)
    got = column(flow.collect(table(n=[0])), "n")
    assert sorted(got) == sorted(sum(bits) for bits in itertools.product((0, 1), repeat=10))


# Loops


def test_rows_go_around_until_they_leave() -> None:
    flow = pk.Flow("n bigint").iterate(lambda part: part.map_batches(halves, "n bigint, again boolean"))
    values = [1000, 1, 0, 17]
    for workers in (1, 2):
        assert column(flow.collect(table(n=values), workers), "n") == [0] * 4
    assert [row for batch in flow.map_in_arrow()(table(n=values).to_batches()) for row in batch["n"].to_pylist()] == [
        0
    ] * 4


@pytest.mark.parametrize("bounds", [{}, {"batches": 1, "batch_size": 1}, {"batches": 3, "batch_size": 2}])
def test_a_loop_that_branches(bounds: dict[str, int]) -> None:
    def leaves(depth: int, label: str) -> Iterator[tuple[int, str, bool | None]]:
        """A tree of depth 4, one node at a time: what is finished leaves, the rest goes around."""
        if depth == 4:
            yield depth, label, None
            return
        yield depth, label, False
        for branch in "ab":
            yield depth + 1, label + branch, True

    def body(part: pk.Flow) -> pk.Flow:
        return part.flat_map(leaves, "depth bigint, label string, again boolean", rows=True)

    flow = pk.Flow("depth bigint, label string").bounded(lambda part: part.iterate(body), **bounds)
    expected = sorted("".join(label) for depth in range(5) for label in itertools.product("ab", repeat=depth))
    for workers in (1, 2):
        assert sorted(column(flow.collect(table(depth=[0], label=[""]), workers), "label")) == expected


def test_a_bounded_part_and_a_loop_in_a_loop() -> None:

    def with_left(batch: pa.RecordBatch) -> pa.RecordBatch:
        half = pc.divide(batch["n"], 2)
        return pa.record_batch({"n": half, "left": batch["left"], "again": pc.greater(half, 0)})

    def outer(part: pk.Flow) -> pk.Flow:
        inner = part.iterate(lambda p: p.map_batches(with_left, "n bigint, left bigint, again boolean"))
        return inner.bounded(
            lambda p: p.flat_map(
                lambda n, left: [(n + 9, left - 1, left > 1)], "n bigint, left bigint, more boolean", rows=True
            ),
            batches=1,
            batch_size=1,
        )

    flow = pk.Flow("n bigint, left bigint").iterate(outer, again="more")
    got = flow.collect(table(n=[5, 6], left=[3, 7])).to_pylist()
    assert got == [{"n": 9, "left": 0}] * 2
