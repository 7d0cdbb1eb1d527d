"""What the type checker is to see; checked by test_types.py, never run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.state import GroupState
from typing_extensions import assert_type

import penstock as pk
from penstock.graph import Matches
from penstock.ordered import OrderedIterator
from penstock.spark.state import StatefulStream


def ordered_iterators() -> None:
    lengths = pk.ordered_map(len, ["a", "bc"])
    assert_type(lengths, OrderedIterator[int])
    assert_type(next(lengths), int)
    assert_type([str(length) for length in lengths], list[str])
    with pk.ordered_map(str.split, ["a b"]) as words:
        assert_type(words, OrderedIterator[list[str]])
    pk.ordered_map(len, [1, 2])  # type: ignore[arg-type]


def graphs(path: Path, df: DataFrame) -> None:
    assert_type(pk.graph.cliques(path, 3), Matches)
    assert_type(pk.graph.cliques("edges.txt", 3, count=True, workers=2), int)
    assert_type(pk.graph.cliques(df, 3, orientation="degeneracy"), DataFrame)
    assert_type(pk.graph.cliques(df, 3, count=True), int)
    assert_type(pk.graph.match("p(x, y) :- e(x, y)", {"e": path}, order=["x", "y"]), Matches)
    assert_type(pk.graph.match("p(x, y) :- e(x, y)", {"e": df}), DataFrame)
    assert_type(pk.graph.match("p(x, y) :- e(x, y)", {"e": df}, count=True), int)


def names_that_are_not_there(flow: pk.Flow) -> None:
    pk.summ("x")  # type: ignore[attr-defined]
    pk.spark.nope  # type: ignore[attr-defined]  # noqa: B018
    assert_type(pk.__version__, str)
    keyed = flow.key_by("user")
    assert_type(keyed.agg(n=pk.count(), name="totals", emit="final"), pk.Flow)
    assert_type(keyed.agg(name=pk.count()), pk.Flow)
    keyed.agg(n="count")  # type: ignore[call-overload]


def visits(key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    yield from frames


def groups(spark: SparkSession, df: DataFrame) -> None:
    made = pk.spark.apply_in_pandas_with_state(df, "user", visits, "user string", "n bigint")
    assert_type(made, DataFrame | StatefulStream)
    pk.spark.apply_in_pandas_with_state(df, "user", len, "user string", "n bigint")  # type: ignore[arg-type]
    flow = pk.Flow("user string").key_by("user").apply_in_pandas_with_state(visits, "user string", "n bigint")
    assert_type(flow, pk.Flow)


def handles(engine: pk.Engine, flow: pk.Flow) -> None:
    with flow.start() as session:
        assert_type(session.migrate(to=[0]).wait("1 minute").bins, int)
        assert_type(session.owners(), list[list[int]])
    assert_type(engine.owners(), list[list[int]])
    assert_type(engine.rebalance().wait(60, progress=True).bins, int)
