"""Numbers of numpy are numbers wherever a user gives one: in notebooks they come of lengths, sums and ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as pk
from penstock import ordered

TWO = np.int64(2)
ROWS = pa.table({"k": [1, 2, 1], "v": [5, 6, 7]})


def counted() -> Any:
    return pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.count())


def test_flows_take_them() -> None:
    assert sorted(counted().collect(ROWS, workers=TWO, batch_rows=np.uint16(2)).column("n").to_pylist()) == [1, 2]
    flow = pk.Flow("k bigint, v bigint").top(np.int32(1), by="v")
    assert flow.collect(ROWS).to_pylist() == [{"k": 1, "v": 7}]
    part = pk.Flow("k bigint, v bigint").bounded(
        lambda part: part.map_batches(lambda b: b), batches=TWO, batch_size=np.int8(100)
    )
    assert part.collect(ROWS).num_rows == 3
    assert (
        pk.Flow("k bigint, v bigint")
        .bounded(lambda part: part.map_batches(lambda b: b), memory=np.int64(1 << 26))
        .collect(ROWS)
        .num_rows
        == 3
    )
    share = pk.approx_quantile("v", np.float32(0.5), error=np.float64(0.01))
    assert pk.Flow("k bigint, v bigint").key_by("k").agg(m=share).collect(ROWS).num_rows == 2


def test_ordered_runs_take_them() -> None:
    assert list(pk.ordered_map(abs, [-1, 2], workers=TWO, chunk=np.int64(1), timeout=np.int64(60))) == [1, 2]
    step = ordered.partitioned(lambda n, item: (n + 1, [n]), key=abs, initial=0, partitions=TWO)
    assert list(ordered.Pipeline([step]).run([1, 1, 2])) == [0, 1, 0]


def test_graphs_take_them(tmp_path: Path) -> None:
    edges = pa.table({"src": [1, 1, 2], "dst": [2, 3, 3]})
    assert pk.graph.cliques(edges, np.int64(3), count=True, workers=TWO, batches=np.int16(4)) == 1
    text = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"
    deltas = pk.graph.Deltas(text)
    assert sum(batch.num_rows for batch in deltas.stream({"e": edges}, epoch=np.int64(0), batch_rows=TWO)) == 1
    built = pk.graph.Index.build(tmp_path / "index", {"e": edges}, memory=np.int64(1 << 24))
    assert sum(1 for _ in built.units(text, np.int64(1))) == 1


def test_dataflows_take_them() -> None:
    def program(worker: Any) -> Counter[Any]:
        seen: Counter[Any] = Counter()
        with worker.dataflow("words") as scope:
            words, stream = scope.input()
            moves, control = scope.input()
            routed = stream.distribute(lambda word: word, control=control, bits=np.int64(1))
            routed.inspect_blocks(lambda time, block: seen.update(block))
        words.send(["a", "b"] if worker.index == 0 else [])
        moves.send([(np.int64(0), np.int64(1))] if worker.index == 0 else [])
        return seen

    assert sum(pk.execute(program, workers=TWO), Counter()) == Counter("ab")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: counted().collect(ROWS, workers=np.bool_(True)),
        lambda: counted().collect(ROWS, workers=np.float64(2)),
        lambda: counted().collect(ROWS, workers=np.array([1, 2])),
        lambda: pk.Flow("k bigint").top(np.int64(0), by="k"),
        lambda: pk.graph.cliques(pa.table({"src": [1], "dst": [2]}), np.int64(1)),
        lambda: pk.execute(lambda worker: None, workers=np.int64(0)),
        lambda: ordered.partitioned(lambda n, item: (n, []), key=abs, initial=0, partitions=np.int64(-1)),
        lambda: pk.tumbling(TWO),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused_as_any_number(wrong: Callable[[], object]) -> None:
    with pytest.raises(pk.errors.ConfigError):
        wrong()


def test_seconds_are_seconds() -> None:
    from penstock._durations import parse_timeout

    seconds = (np.int64(3), np.float32(3), 3, timedelta(seconds=3), "3s")
    assert [parse_timeout(each) for each in seconds] == [3.0] * 5
