"""Options that are True or False take nothing else: a text such as "no" would count as True."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from penstock import ordered
from penstock.errors import ConfigError
from penstock.graph import cliques, match

EDGES = pa.table({"src": [1, 2], "dst": [2, 3]})
FLOW = pk.Flow("k bigint, v bigint")

CALLS: dict[str, Callable[[Any], Any]] = {
    "top descending": lambda value: FLOW.top(1, by="v", descending=value),
    "flat_map rows": lambda value: FLOW.flat_map(lambda row: [row], rows=value),
    "map_in_arrow per_partition": lambda value: FLOW.map_in_arrow(per_partition=value),
    "map_batches same_length": lambda value: ordered.map_batches(list, same_length=value),
    "partitioned batches": lambda value: ordered.partitioned(lambda state, rows: (state, rows), key="k", batches=value),
    "ordered rows": lambda value: pk.spark.ordered(lambda row: row, "k bigint", rows=value),
    "unpickle": lambda value: pk.state.read("/nowhere", unpickle=value),
    "directed": lambda value: cliques(EDGES, 3, directed=value),
    "count": lambda value: cliques(EDGES, 3, count=value),
    "progress": lambda value: FLOW.map_batches(list).run(EDGES, progress=value),
    "in_order": lambda value: match("e(x, y) :- e(x, y)", {"e": EDGES}, in_order=value),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", ["no", 0, None, []])
def test_only_true_and_false_are_taken(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        CALLS[name](value)
    assert str(caught.value) == f"{name}={value!r} must be True or False"


def test_of_autobalance_too() -> None:
    counts = FLOW.key_by("k").agg(n=pk.count())
    with counts.run(pa.table({"k": [1], "v": [1]}), workers=2) as run, pytest.raises(ConfigError) as caught:
        run.autobalance(dry_run="no")  # type: ignore[arg-type]
    assert str(caught.value) == "dry_run='no' must be True or False"


def test_of_local_runs_too() -> None:
    for progress in ("no", 0, None):
        with pytest.raises(ConfigError, match=f"^progress={progress!r} must be True or False$"):
            FLOW.run_into(print, EDGES, progress=progress)
        with FLOW.key_by("k").agg(n=pk.count()).start(2) as session:
            migration = session.migrate(to=[1] * 256)
            with pytest.raises(ConfigError, match=f"^wait progress={progress!r} must be True or False$"):
                migration.wait(progress=progress)  # type: ignore[arg-type]
