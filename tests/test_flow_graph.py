"""Flows of several sources: how they are built and written, what is refused, and what comes out."""

from __future__ import annotations

import base64
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from time import sleep
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import wait_for
from penstock import _native
from penstock.errors import ConfigError, EngineError, PlanError, SchemaError


def left(**options: Any) -> pk.Flow:
    return pk.Flow("k bigint, v bigint", name="left", **options)


def right(**options: Any) -> pk.Flow:
    return pk.Flow("k bigint, w string", name="right", **options)


def rows(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def more(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def plan_of(flow: pk.Flow) -> tuple[list[str], list[tuple[str, list[int] | None]], list[str]]:
    text, calls = flow.to_plan()
    plan = json.loads(text)
    steps = [(step["op"], step.get("inputs")) for step in plan["steps"]]
    return [source["name"] for source in plan["sources"]], steps, [call["step"] for call in calls]


def test_a_join_is_written_as_a_graph() -> None:
    flow = left().map_batches(same).join(right().map_batches(more), on="k").key_by("w").agg(n=pk.count())
    assert plan_of(flow) == (
        ["left", "right"],
        [("map_batches", [0]), ("map_batches", [1]), ("join", [2, 3]), ("key_by", None), ("agg", None)],
        ["map_batches[0] same", "map_batches[1] more"],
    )
    assert flow.sources == {"left": left().input_schema, "right": right().input_schema}
    assert flow.keyed and not flow.needs_order and flow.event_time is None
    assert flow.output_schema.names == ["w", "n"]
    with pytest.raises(PlanError, match=r"several sources \(left, right\), and this takes a flow of one"):
        _ = flow.input_schema


def test_what_flows_share_is_written_once() -> None:
    base = left().map_batches(same)
    flow = base.map_batches(more).union(base, base.map_batches(more))
    sources, steps, calls = plan_of(flow)
    assert sources == ["left"]
    assert steps == [("map_batches", None), ("map_batches", None), ("map_batches", [1]), ("union", [2, 1, 3])]
    assert calls == ["map_batches[0] same", "map_batches[1] more", "map_batches[2] more"]
    table = pa.table({"k": [1, 2], "v": [3, 4]})
    assert rows(flow.collect(table, 2)) == Counter({(1, 3): 3, (2, 4): 3})
    # Two flows that look alike are two sources.
    with pytest.raises(PlanError, match=r"union: two sources are named 'left' .* give each a name of its own"):
        left().union(left())


def test_functions_in_bodies_keep_their_numbers() -> None:
    def part(flow: pk.Flow) -> pk.Flow:
        return flow.map_batches(same).map_batches(more)

    flow = left().map_batches(more).join(right().bounded(part, batches=2, batch_size=10), on="k")
    text, calls = flow.to_plan()
    steps = json.loads(text)["steps"]
    assert [step["op"] for step in steps] == ["map_batches", "bounded", "join"]
    assert [inner["call"] for inner in steps[1]["body"]] == [1, 2]
    assert [call["step"] for call in calls] == [
        "map_batches[0] more",
        "bounded[1].map_batches[0] same",
        "bounded[1].map_batches[1] more",
    ]
    shape = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(steps[1]["body"][0]["schema"])))
    assert shape == right().input_schema


def test_flows_of_several_sources_show_pickle_and_compare() -> None:
    flow = left().join(right(lateness="0s"), on="k").map_batches(same)
    assert repr(flow) == (
        "Flow(k bigint, v bigint, name='left')\n  .join(\n    Flow(k bigint, w string, name='right'),\n"
        "    on=['k'])\n  .map_batches(same) -> k bigint, v bigint, w string"
    )
    assert "right" in flow._repr_html_() and "join" in flow._repr_html_()
    copy = pickle.loads(pickle.dumps(flow))
    assert copy == flow and hash(copy) == hash(flow) and copy.to_plan()[0] == flow.to_plan()[0]
    assert flow != left().map_batches(same).join(right(), on="k") and flow != left()
    base = left().map_batches(same)
    shared = pickle.loads(pickle.dumps(base.union(base.map_batches(more))))
    assert plan_of(shared)[0] == ["left"], "it is still one source"
    text = flow.explain()
    assert "source left: k bigint" in text and "step 0 (join): pairs with k = k" in text
    drawing = [line.strip(" ;") for line in flow.explain(format="dot").splitlines()]
    assert [line.partition(" [")[0] for line in drawing if " -> " in line] == [
        "source0 -> stage0",
        "source1 -> stage0",
        "stage0 -> stage1",
        "stage1 -> output",
    ]
    assert drawing[0] == "digraph flow {" and drawing[-1] == "}"
    with pytest.raises(ConfigError, match="format='svg' is none of text, dot"):
        flow.explain("svg")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_join_meets_whatever_comes_first(workers: int, streaming: bool) -> None:
    rng = random.Random(workers)
    ones = [(rng.choice([None, *range(20)]), rng.randrange(5)) for _ in range(300)]
    twos = [(rng.choice([None, *range(30)]), f"w{rng.randrange(4)}") for _ in range(200)]
    wanted = Counter((k, v, w) for k, v in ones for j, w in twos if k is not None and k == j)

    def batches(rows: list[tuple[Any, Any]], names: list[str], kind: pa.DataType) -> Iterator[pa.Table]:
        for at in range(0, len(rows), 37):
            keys, values = zip(*rows[at : at + 37], strict=True)
            yield pa.table([pa.array(keys, pa.int64()), pa.array(values, kind)], names=names)

    source = {"right": batches(twos, ["k", "w"], pa.string()), "left": batches(ones, ["k", "v"], pa.int64())}
    got = left().join(right(), on="k").collect(source, workers, streaming=streaming)
    assert rows(got) == wanted


def test_keys_of_other_names_and_types() -> None:
    one = pk.Flow("a string, b decimal(10,2), x bigint", name="one")
    two = pk.Flow("c string, d decimal(10,2), y bigint", name="two")
    flow = one.join(two, left_on=["a", "b"], right_on=["c", "d"])
    assert flow.columns == ("a", "b", "x", "c", "d", "y")
    money = pa.decimal128(10, 2)
    first = pa.table({"a": ["p", "q", None], "b": pa.array([1, 2, 3], money), "x": [1, 2, 3]})
    second = pa.table({"c": ["q", "p", None], "d": pa.array([2, 9, 3], money), "y": [7, 8, 9]})
    got = flow.collect({"one": first, "two": second}, 2).to_pylist()
    assert [(row["a"], row["x"], row["y"]) for row in got] == [("q", 2, 7)]


def test_the_watermark_is_the_least_of_the_sources() -> None:
    def bids(name: str) -> pk.Flow:
        return pk.Flow("k bigint, ts bigint", event_time="ts", name=name)

    flow = bids("a").union(bids("b")).key_by("k").window(pk.tumbling("10ms")).agg(n=pk.count())
    given: list[tuple[str, int]] = []

    def source(name: str, times: list[int]) -> Iterator[pa.Table]:
        for time in times:
            given.append((name, time))
            yield pa.table({"k": [0], "ts": [time]})

    late: list[pa.RecordBatch] = []
    # b lags behind by far; nothing of it is late, since a's window waits for it.
    sources = {"a": source("a", [1, 15, 95]), "b": source("b", [2, 3, 4])}
    got = flow.collect(sources, 2, streaming=True, late=late.append)
    counts = dict(zip(got["window_start"].to_pylist(), got["n"].to_pylist(), strict=True))
    assert counts == {0: 4, 10: 1, 90: 1} and not late
    # Alone, a would have closed it: what comes behind is late.
    alone = bids("a").key_by("k").window(pk.tumbling("10ms")).agg(n=pk.count())
    alone.collect(source("a", [1, 15, 2]), 1, streaming=True, late=late.append)
    assert [batch.to_pydict() for batch in late] == [{"k": [0], "ts": [2]}]


def test_a_source_that_has_ended_is_not_waited_for() -> None:
    def bids(name: str) -> pk.Flow:
        return pk.Flow("k bigint, ts bigint", event_time="ts", name=name)

    flow = bids("a").union(bids("b")).key_by("k").window(pk.tumbling("10ms")).agg(n=pk.count())
    closed: list[int] = []

    def long() -> Iterator[pa.Table]:
        for time in range(0, 400, 5):
            if time == 395:
                wait_for(lambda: closed, what="windows close while the long one still comes")
            yield pa.table({"k": [0], "ts": [time]})

    short = iter([pa.table({"k": [0], "ts": [3]})])
    for batch in flow.run({"a": long(), "b": short}, streaming=True):
        closed.extend(batch.column("window_start").to_pylist())
    assert closed == list(range(0, 400, 10))


def test_while_the_caller_pauses_no_source_is_silent() -> None:
    def live(name: str, first: int) -> tuple[pk.Flow, Iterator[pa.Table]]:
        flow = pk.Flow("k bigint, ts bigint", event_time="ts", name=name, idle_after="4s")
        return flow, (pa.table({"k": [7], "ts": [first + 10 * batch]}) for batch in range(12))

    # What comes of a is ahead of b: where b is not waited for, all of it is late.
    (a, ahead), (b, behind) = live("a", 1_000), live("b", 0)
    flow = a.union(b).key_by("k").window(pk.tumbling("10ms")).agg(n=pk.count())
    late: list[Any] = []
    starts = []
    with flow.run({"a": ahead, "b": behind}, streaming=True, batch_rows=1, late=late.append) as run:
        for batch in run:
            starts += batch.column("window_start").to_pylist()
            if len(starts) == 3:
                sleep(4.2)
    assert late == [] and starts == [*range(0, 120, 10), *range(1_000, 1_120, 10)]


def test_a_silent_source_is_not_waited_for() -> None:
    def late(idle_after: str | None, at_hand: Sequence[int] = (), away_ms: int = 0) -> list[Any]:
        """What is late where b comes again after two seconds in which only a came, or was taken."""
        a = pk.Flow("k bigint, ts bigint", event_time="ts", name="a")
        b = pk.Flow("k bigint, ts bigint", event_time="ts", name="b", idle_after=idle_after)
        plan, calls = a.union(b).key_by("k").window(pk.tumbling("10ms")).agg(n=pk.count()).to_plan(True)
        told: list[Any] = []
        with _native.LocalRun(plan, calls, workers=2) as run:
            for source, time, clock_ms in [(0, 1, 0), (1, 2, 500), (0, 95, 1_000), (0, 96, 1_500), (1, 5, 2_500)]:
                batch = pa.record_batch({"k": [7], "ts": [time]})
                assert run.push(batch, clock_ms, source, list(at_hand), away_ms if clock_ms > 500 else 0)
            with pytest.raises(ConfigError, match="source 2 is not there"):
                run.push(batch, 2_500, 1, [2])
            run.finish(3_000)
            while (taken := run.take()) is not None:
                if taken[0] == "beside":
                    told.extend(pa.record_batch(taken[1])["ts"].to_pylist())
        return told

    assert late(None) == [] and late("2s") == [] and late("1s") == [5]
    assert late("1s", at_hand=[1]) == [], "something of b was there all the time, and was not taken"
    assert late("1s", away_ms=500) == [], "nobody looked for half a second"
    with pytest.raises(ConfigError, match="idle_after '1s' needs event_time"):
        pk.Flow("k bigint", idle_after="1s")
    with pytest.raises(ConfigError, match="idle_after 3 has no unit"):
        pk.Flow("k bigint, ts bigint", event_time="ts", idle_after=3)  # type: ignore[arg-type]
    flow = pk.Flow("k bigint, ts bigint", event_time="ts", idle_after="90s")
    assert "idle_after='90s'" in repr(flow) and json.loads(flow.to_plan()[0])["sources"][0]["idle_after_ms"] == 90_000
    assert pickle.loads(pickle.dumps(flow)) == flow != pk.Flow("k bigint, ts bigint", event_time="ts")


def test_nothing_is_pushed_behind_the_end_of_a_source() -> None:
    plan, calls = left().join(right(), on="k").to_plan(True)
    with _native.LocalRun(plan, calls) as run:
        rows = pa.record_batch({"k": pa.array([1], pa.int64()), "w": ["x"]})
        assert run.push(rows, 0, 1)
        run.end_source(1)
        run.end_source(1)
        with pytest.raises(EngineError, match="source 'right' has ended: nothing more of it can be pushed"):
            run.push(rows, 0, 1)
        with pytest.raises(ConfigError, match="source 2 is not there"):
            run.push(rows, 0, 2)


def test_sources_at_hand_take_turns() -> None:
    """So a run beside a stream is the same each time."""
    flow = pk.Flow("n bigint", name="a").union(pk.Flow("n bigint", name="b"))
    tables = {"a": pa.table({"n": list(range(5))}), "b": [pa.table({"n": [10, 11]}), pa.table({"n": [12]})]}
    got = [batch["n"].to_pylist() for batch in flow.run(tables, 2, batch_rows=1, streaming=True)]
    assert got == [[0], [10], [1], [11], [2], [12], [3], [4]]


def test_flows_of_many_meetings() -> None:
    flow = base = left()
    for _ in range(520):
        flow = flow.union(base)
    assert len(plan_of(flow)[1]) == 520 and flow == flow and flow != base
    assert repr(flow).count("Flow(") == 521 and flow._repr_html_().count("<b>source</b>") == 521
    assert flow.explain().count("source left") == 521, "unions of unions are one"
    copy = pickle.loads(pickle.dumps(flow))
    assert copy == flow and len(copy.sources) == 1


def test_what_is_shared_is_shown_once() -> None:
    flow = left().union(pk.Flow("k bigint, v bigint", name="other"))
    for _ in range(30):
        flow = flow.union(flow)
    text = repr(flow)
    assert text.count("name='left'") == 1 and "(union #30, as above)" in text, text
    assert flow._repr_html_().count("union #1, as above") == 1
    assert len(flow.explain().splitlines()) < 200
    assert flow.explain("dot").count(" -> ") < 200


def test_unions_keep_event_time_where_all_have_it() -> None:
    timed = pk.Flow("k bigint, ts bigint", event_time="ts", name="a")
    plain = pk.Flow("k bigint, ts bigint", name="b")
    assert timed.union(pk.Flow("k bigint, ts bigint", event_time="ts", name="c")).event_time == "ts"
    with pytest.raises(PlanError, match="needs event time"):
        timed.union(plain).window(pk.tumbling("1s"))
    assert timed.union(pk.Flow("k bigint, ts bigint", event_time="k", name="c")).event_time is None


def test_what_does_not_meet_is_refused() -> None:
    cases: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "names no other flow", lambda: left().union()),
        (ConfigError, "union\\(3\\): give flows", lambda: left().union(3)),  # type: ignore[arg-type]
        (SchemaError, "columns k, v, another k, w", lambda: left().union(right())),
        (
            SchemaError,
            "first has \\(k bigint, v bigint\\), another one \\(k bigint, v string\\)",
            lambda: left().union(pk.Flow("k bigint, v string", name="r")),
        ),
        (PlanError, "ends in key_by", lambda: left().key_by("k").union(right())),
        (PlanError, "ends in key_by", lambda: left().join(right().key_by("k"), on="k")),
        (ConfigError, "name the columns to compare", lambda: left().join(right())),
        (ConfigError, "name the columns to compare", lambda: left().join(right(), on="k", left_on="k", right_on="k")),
        (ConfigError, "name the columns to compare", lambda: left().join(right(), left_on="k")),
        (ConfigError, "left_on names 2 columns", lambda: left().join(right(), left_on=["k", "v"], right_on="k")),
        (SchemaError, "join, left side: column 'x'", lambda: left().join(right(), on="x")),
        (SchemaError, "join, right side: column 'v'", lambda: left().join(right(), on="v")),
        (
            SchemaError,
            "columns of different types are never equal: 'a' has type bigint, 'b' has string",
            lambda: pk.Flow("a bigint", name="a").join(pk.Flow("b string", name="b"), left_on="a", right_on="b"),
        ),
        (
            SchemaError,  # they differ in what Spark's words do not tell
            "'a' has type List\\((?P<one>.*)\\), 'a' has List\\((?!(?P=one)\\))",
            lambda: pk.Flow(pa.schema({"a": pa.list_(pa.int64())}), name="a").join(
                pk.Flow(pa.schema({"a": pa.list_(pa.field("item", pa.int64(), False))}), name="b"), on="a"
            ),
        ),
        (PlanError, "both sides have a column 'v'", lambda: left().join(pk.Flow("k bigint, v int", name="r"), on="k")),
        (PlanError, "two sources are named 'right'", lambda: right().join(pk.Flow("k bigint", name="right"), on="k")),
        (
            PlanError,
            "replaces earlier values",
            lambda: left().key_by("k").agg(n=pk.count(), emit="update").join(right(), on="k"),
        ),
        (PlanError, "join inside bounded", lambda: left().bounded(lambda part: part.join(right(), on="k"))),
        (PlanError, "union inside iterate", lambda: left().iterate(lambda part: part.union(right()), again="x")),
        (ConfigError, "give the source a name", lambda: pk.Flow("k bigint", name="")),
    ]
    for kind, says, build in cases:
        with pytest.raises(kind, match=says):
            build()


def test_a_source_meets_itself() -> None:
    base = left()
    renamed = base.map_batches(lambda batch: batch.rename_columns(["k", "w"]), "k bigint, w bigint")
    table = pa.table({"k": [1, 1, 2], "v": [3, 4, 5]})
    pairs = Counter({(1, 3, 3): 1, (1, 3, 4): 1, (1, 4, 3): 1, (1, 4, 4): 1, (2, 5, 5): 1})
    for streaming in (False, True):
        assert rows(base.join(renamed, on="k").collect(table, 2, streaming=streaming)) == pairs
    assert rows(base.join(base, on="k", how="semi").collect(table)) == Counter({(1, 3): 1, (1, 4): 1, (2, 5): 1})
    assert base.join(base, on="k", how="anti").collect(table).num_rows == 0


def test_sources_are_given_by_name() -> None:
    flow = left().join(right(), on="k")
    table = pa.table({"k": [1], "v": [2]})
    for given, says in [
        (table, "the flow has the sources left, right: give a dict of name to data"),
        ({"left": table}, "source 'right' is missing; the flow has left, right"),
        ({"left": table, "right": table, "up": table}, "no source 'up'; it has left, right"),
    ]:
        with pytest.raises(ConfigError, match=says):
            flow.run(given)
    with pytest.raises(SchemaError, match="w"):
        flow.collect({"left": table, "right": table})
    assert left().collect({"left": table}).to_pylist() == [{"k": 1, "v": 2}]


def test_inside_a_partition_rows_are_structs_by_source() -> None:
    flow = left().map_batches(same).join(right(), on="k")
    one, two = {"k": 1, "v": 2}, {"k": 1, "w": "x", "more": 3}
    inside = flow.map_in_arrow(per_partition=True)
    for rows in (
        [pa.RecordBatch.from_pylist([{"left": one, "right": None}, {"right": two}, {"left": one}])],
        [
            pa.record_batch({"right": [two], "left": pa.nulls(1, pa.struct({"k": pa.int64(), "v": pa.int64()}))}),
            pa.RecordBatch.from_pylist([{"left": one, "right": None}, {"right": two}]).slice(0, 1),
        ],
    ):
        assert next(row for batch in inside(iter(rows)) for row in batch.to_pylist()) == {"k": 1, "v": 2, "w": "x"}
    assert list(inside(iter([pa.RecordBatch.from_pylist([{"left": one, "right": two}]).slice(0, 0)]))) == []
    for rows, says in [
        ([{"left": one, "right": two}], "row 0 of a batch has left and right set; .* exactly one of left, right"),
        (
            [{"left": one, "right": None}, {"left": None, "right": None}, {"left": None, "right": two}],
            "row 1 .* none of the",
        ),
        ([{"left": one}], "no struct column 'right', which is a source"),
        (
            [{"left": one, "right": {"k": 1}}, {"left": None, "right": {"k": 1}}],
            "row 0 of a batch has left and right set",
        ),
        ([{"right": {"k": 1}, "left": None}, {"left": one}], "input has no column 'w'; it has k"),
    ]:
        with pytest.raises(SchemaError, match=says):
            list(inside(iter([pa.RecordBatch.from_pylist(rows)])))


def test_pairs_of_long_rows_come_in_small_blocks() -> None:
    """Bounded in bytes, too: a long text is in each pair of its row."""
    flow = pk.Flow("k bigint, text string", name="a").join(pk.Flow("k bigint, n bigint", name="b"), on="k")
    rows = {
        "a": pa.table({"k": [1], "text": ["x" * (1 << 20)]}),
        "b": pa.table({"k": [1] * 40, "n": list(range(40))}),
    }
    blocks = list(flow.run(rows))
    assert sorted(n for block in blocks for n in block["n"].to_pylist()) == list(range(40))
    assert max(block.nbytes for block in blocks) < 8 << 20
