"""The flow builder: immutable, checked where it is written, and the plan it becomes."""

from __future__ import annotations

import base64
import copy
import doctest
import importlib
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock as pk
from penstock._flow import builder
from penstock._functions.inline import needed_times
from penstock._functions.state import BinState
from penstock.errors import ConfigError, PlanError, SchemaError, StateError, UserFunctionError

BIDS = "auction bigint, price bigint, ts timestamp"


def bids(**options: Any) -> pk.Flow:
    return pk.Flow(BIDS, event_time="ts", **options)


def running(total: int | None, k: int, v: int) -> tuple[int, tuple[int, int]]:
    total = (total or 0) + v
    return total, (k, total)


def schema_of(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def test_plan_of_a_windowed_flow() -> None:
    flow = (
        bids(lateness="5s", order_by="ts")
        .key_by("auction", nulls="reject")
        .window(pk.sliding("60s", every="1s"))
        .agg(n=pk.count(), total=pk.sum("price"))
        .top(2, by="n", per="window")
    )
    text, calls = flow.to_plan()
    plan = json.loads(text)
    (source,) = plan.pop("sources")
    assert schema_of(source.pop("schema")) == flow.input_schema
    assert source == {"name": "input", "event_time": "ts", "lateness_ms": 5000, "order_by": ["ts"]}
    assert plan == {
        "version": 2,
        "steps": [
            {"op": "key_by", "columns": ["auction"], "nulls": "reject"},
            {"op": "window", "kind": "sliding", "size_us": 60_000_000, "every_us": 1_000_000},
            {
                "op": "agg",
                "emit": "final",
                "aggs": [{"name": "n", "fn": "count"}, {"name": "total", "fn": "sum", "column": "price"}],
            },
            {"op": "top", "n": 2, "by": "n", "descending": True, "per": "window"},
        ],
    }
    assert calls == []
    assert flow.columns == ("window_start", "window_end", "auction", "n", "total")


def test_plan_of_python_steps() -> None:
    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    flow = (
        pk.Flow("k bigint, v bigint, note string")
        .map_batches(double, schema="k bigint, v bigint")
        .key_by("k")
        .stateful_map(running, schema="k bigint, total bigint", columns=["k", "v"], name="sums")
    )
    text, calls = flow.to_plan()
    first, key, last = json.loads(text)["steps"]
    assert (first["op"], first["call"], schema_of(first["schema"]).names) == ("map_batches", 0, ["k", "v"])
    assert key["nulls"] == "group"
    # Keys travel in the plan; what the function receives is its call's business.
    assert (last["op"], last["call"], last["columns"], last["name"]) == ("stateful_map", 1, ["k"], "sums")
    assert calls[1]["columns"] == ["k", "v"]
    assert [(call["kind"], call["func"]) for call in calls] == [("map", double), ("stateful", running)]
    assert calls[0]["step"] == "map_batches[0] double"
    assert calls[1]["step"] == "stateful_map[2] sums"
    assert (calls[1]["keys"], calls[1]["columns"]) == (["k"], ["k", "v"])


def test_names_of_steps_with_state() -> None:
    keyed = bids().key_by("auction")
    flow = keyed.agg(n=pk.count(), emit="final", name="per auction").top(2, by="n", name="best")
    assert [step.get("operator") for step in json.loads(flow.to_plan()[0])["steps"]] == [None, "per auction", "best"]
    assert "name=per auction" in repr(flow) and "name=best" in repr(flow)
    assert "state of per auction: accumulators" in flow.explain() and "state of best: " in flow.explain()
    assert flow != keyed.agg(n=pk.count(), emit="final").top(2, by="n")
    assert pickle.loads(pickle.dumps(flow)) == flow
    plain = keyed.agg(n=pk.count(), emit="final")
    assert "operator" not in flow.key_by("n").stateful_map(running, schema="k bigint").to_plan()[0].split("best")[1]
    # A column may be called so.
    assert keyed.agg(n=pk.count(), name=pk.max("price"), m=pk.count()).columns == ("auction", "n", "name", "m")
    for name in ("", "a/b", "a\nb", " a", "x" * 101):
        with pytest.raises(ConfigError, match=r"agg name="):
            keyed.agg(n=pk.count(), name=name)
    with pytest.raises(ConfigError, match="give a text"):
        keyed.agg(n=pk.count(), name=3)  # type: ignore[arg-type]
    # Words of other steps are names like others.
    assert operators(keyed.stateful_map(running, schema="k bigint", name="agg")) == ["agg"]
    assert operators(keyed.agg(n=pk.count(), emit="final", name="join").top(1, by="n", name="agg-2")) == [
        "join",
        "agg-2",
    ]
    with pytest.raises(PlanError, match=r"top: its state would be called 'best', as that of step 2 \(top\) is"):
        flow.top(1, by="n", name="best")
    with pytest.raises(PlanError, match=r"agg: its state would be called 'agg', as that of step 1 \(agg\) is"):
        keyed.agg(n=pk.count(), emit="final", name="agg").key_by("n").agg(m=pk.count())
    # Names of steps that had none: to go on from their state, in any place.
    second = keyed.agg(n=pk.count(), emit="final", name="agg-2").key_by("n").agg(m=pk.count(), name="agg")
    assert operators(second) == ["agg-2", "agg"]
    assert operators(plain.key_by("n").agg(m=pk.count())) == ["agg", "agg-2"]


def operators(flow: pk.Flow) -> list[str]:
    return [step["name"] for step in flow._check()["operators"]]


def test_emit_defaults() -> None:
    def emit(flow: pk.Flow, streaming: bool = False) -> str | None:
        return json.loads(flow.to_plan(streaming)[0])["steps"][-1].get("emit")

    keyed = bids().key_by("auction")
    assert emit(keyed.agg(n=pk.count())) is None, "the end of input"
    assert emit(keyed.agg(n=pk.count()), streaming=True) == "update"
    assert "all keys at the end, on a stream changed keys each epoch" in keyed.agg(n=pk.count()).explain()
    for streaming in (False, True):
        assert emit(keyed.window(pk.tumbling("1s")).agg(n=pk.count()), streaming) == "final"
        for mode in ("final", "update"):
            assert emit(keyed.agg(n=pk.count(), emit=mode), streaming) == mode


def test_a_flow_never_changes() -> None:
    base = bids()
    before = base.to_plan()
    one = base.key_by("auction").agg(n=pk.count())
    two = base.key_by("auction").agg(m=pk.max("price"))
    assert base.to_plan() == before
    assert one.columns == ("auction", "n") and two.columns == ("auction", "m")
    with pytest.raises(AttributeError, match="never changes"):
        base._columns = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        base.extra = 1  # type: ignore[attr-defined]
    one.to_plan()[1].append({"kind": "map"})
    assert one.to_plan()[1] == []


def test_equality_and_pickling() -> None:
    def build() -> pk.Flow:
        return pk.Flow("k bigint, v bigint").key_by("k").stateful_map(running, schema="k bigint, total bigint")

    assert build() == build() and hash(build()) == hash(build())
    assert build() != build().map_batches(pk.count)
    few = [pk.Flow("k int, v int").key_by("k").stateful_map(running, schema="k int", columns=[c]) for c in ("k", "v")]
    assert few[0] != few[1]
    assert build() != "flow"
    assert pickle.loads(pickle.dumps(build())) == build()
    shipped = cloudpickle.loads(cloudpickle.dumps(pk.Flow("k bigint").map_batches(lambda batch: batch)))
    assert shipped.to_plan()[0] == pk.Flow("k bigint").map_batches(lambda batch: batch).to_plan()[0]


class Compared(str):
    """A name that counts how often it is compared."""

    seen = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.seen += 1
        return str.__eq__(self, other)


def test_names_of_columns_are_looked_up_not_searched_for() -> None:
    schema = pa.schema([(f"c{n}", pa.int64()) for n in range(1_000)])
    Compared.seen = 0
    names = [Compared(f"c{n}") for n in range(1_000)]
    assert pk.Flow(schema, order_by=names).key_by(*names).agg(n=pk.count()).columns == (*schema.names, "n")
    assert Compared.seen < 10_000, "a look at all of them for each would be a million"
    with pytest.raises(ConfigError, match="'c7' twice"):
        pk.Flow(schema).key_by(*schema.names, "c7")
    with pytest.raises(SchemaError, match="column 'other' does not exist"):
        pk.Flow(schema).key_by(*schema.names, "other")


Build = Callable[[], Any]


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: pk.Flow(BIDS, event_time="tz"), SchemaError, "event_time: column 'tz' does not exist here"),
        (lambda: pk.Flow(BIDS, lateness="5s"), ConfigError, "needs event_time"),
        (lambda: bids(lateness="5"), ConfigError, "lateness '5' has no unit"),
        (lambda: bids(lateness="1us"), ConfigError, "finer than a millisecond"),
        (lambda: bids(lateness="50000000d"), ConfigError, "lateness '50000000d' is longer than event time can hold"),
        (lambda: bids(order_by=["seq"]), SchemaError, "order_by: column 'seq'"),
        (
            lambda: pk.Flow("a bigint, ts string", event_time="ts"),
            SchemaError,
            "column 'ts' has type string, event time needs a timestamp",
        ),
        (lambda: bids().key_by(), ConfigError, "key_by names no column"),
        (
            lambda: bids().key_by("auktion"),
            SchemaError,
            "'auktion' does not exist here; there are auction, price, ts",
        ),
        (lambda: bids().key_by("auction", "auction"), ConfigError, "'auction' twice"),
        (
            lambda: bids().key_by(["auction", "price"]),  # type: ignore[arg-type]
            ConfigError,
            r"key_by got \['auction', 'price'\]; write key_by\('auction', 'price'\)$",
        ),
        (lambda: bids().distinct(["price"]), ConfigError, r"write distinct\('price'\)$"),  # type: ignore[arg-type]
        (lambda: bids().key_by([]), ConfigError, r"key_by got \[\]; name columns by their names"),  # type: ignore[arg-type]
        (lambda: bids().key_by("auction", nulls="skip"), ConfigError, "nulls='skip' is unknown"),
        (lambda: bids().key_by("auction").key_by("price"), PlanError, "all key columns in one key_by"),
        (lambda: bids().window(pk.tumbling("1s")).key_by("price"), PlanError, "key_by comes before window"),
        (lambda: bids().window("60s"), ConfigError, "make it with penstock.tumbling"),
        (lambda: pk.Flow(BIDS).window(pk.tumbling("1s")), PlanError, "needs event time"),
        (lambda: bids().key_by("auction").agg(), ConfigError, "names no aggregate"),
        (
            lambda: bids().key_by("auction").agg(emit=pk.sum("price")),  # type: ignore[arg-type]
            ConfigError,
            r"^agg\(emit=sum\(price\)\): no column of agg can be called 'emit', .*; give it another name$",
        ),
        (
            lambda: bids().key_by("auction").agg(n=pk.count(), emit=["final"]),  # type: ignore[arg-type]
            ConfigError,
            r"emit=\['final'\] is unknown",
        ),
        (lambda: bids().explain([]), ConfigError, r"format=\[\] is none of text, dot"),  # type: ignore[arg-type]
        (lambda: bids().key_by("auction").agg(n=3), ConfigError, r"agg\(n=3\) is no aggregate"),
        (
            lambda: bids().key_by("auction").agg(n=pk.count),  # type: ignore[arg-type]
            ConfigError,
            r"^agg\(n=count\) got a function; call it: n=penstock\.count\(\)$",
        ),
        (
            lambda: bids().key_by("auction").agg(n=pk.max_by),  # type: ignore[arg-type]
            ConfigError,
            r"call it: n=penstock\.max_by\(\.\.\.\)$",
        ),
        (
            lambda: bids().key_by("auction").agg(pk.count()),  # type: ignore[arg-type]
            ConfigError,
            r"^agg\(count\(\)\) names no output column; write for example \.agg\(n=penstock\.count\(\)\)$",
        ),
        (
            lambda: pk.Flow("a bigint, s string").key_by("a").agg(n=pk.sum("s")),
            SchemaError,
            "column 's' has type string, a sum or mean needs",
        ),
        (
            lambda: bids().key_by("auction").agg(n=pk.sum("cost")),
            SchemaError,
            r"agg n=sum\(cost\): column 'cost'",
        ),
        (lambda: bids().key_by("auction").agg(auction=pk.count()), SchemaError, "output column 'auction'"),
        (lambda: bids().key_by("auction").agg(n=pk.count(), emit="late"), ConfigError, "emit='late'"),
        (
            lambda: bids().key_by("auction").window(pk.tumbling("1s")).agg(n=pk.count(), emit="update"),
            PlanError,
            "leave emit out",
        ),
        (lambda: pk.sum(""), ConfigError, "give the name of a column"),
        (lambda: bids().top(0, by="price"), ConfigError, r"top\(0\)"),
        (lambda: bids().top(1, by="cost"), SchemaError, "top by: column 'cost'"),
        (lambda: bids().top(1, by="price", per="window"), PlanError, "needs a window"),
        (lambda: bids().top(1, by="price", per=["x"]), SchemaError, "top per: column 'x'"),
        (lambda: bids().key_by("auction").top(1, by="price"), PlanError, "name the groups with per="),
        (lambda: bids().stateful_map(running, schema="a int"), PlanError, "stateful_map needs keys"),
        (
            lambda: bids().agg(**{f"n{number}": pk.count() for number in range(256)}),
            ConfigError,
            "at most 255 aggregates, not 256",
        ),
        (lambda: bids().key_by("auction").stateful_map(3, schema="a int"), ConfigError, "must be a function"),
        (
            lambda: bids().key_by("auction").stateful_map(running, schema="a itn"),
            SchemaError,
            "stateful_map schema column 'a' has the unknown type 'itn'; did you mean 'int'",
        ),
        (
            lambda: bids().key_by("auction").window(pk.tumbling("1s")).stateful_map(running, schema="a int"),
            PlanError,
            "takes no window",
        ),
        (lambda: bids().map_batches("f"), ConfigError, "function from batch to batch"),
        (lambda: bids().key_by("auction").map_batches(len), PlanError, "directly after key_by"),
        (lambda: bids().key_by("auction").to_plan(), PlanError, r"ends in key_by\(auction\)"),
        (lambda: bids().window(pk.tumbling("1s")).to_plan(), PlanError, r"ends in window\(tumbling 1s\)"),
        (lambda: bids().key_by("auction").agg(n=pk.count()).map_in_arrow(), PlanError, "penstock.spark.run"),
    ],
)
def test_mistakes_are_refused_where_they_are_written(build: Build, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build()


@pytest.mark.parametrize(
    ("name", "says"),
    [("filter", "pc.greater"), ("groupBy", ".key_by('column')"), ("withColumn", "append_column"), ("show", "collect")],
)
def test_methods_of_dataframes_are_told_as_they_are_called_here(name: str, says: str) -> None:
    assert not hasattr(bids(), name)
    with pytest.raises(AttributeError) as caught:
        getattr(bids(), name)
    told = str(caught.value)
    assert told.startswith(f"'Flow' object has no attribute {name!r}: ") and says in told
    assert copy.deepcopy(bids()) == copy.copy(bids()) == bids()
    with pytest.raises(AttributeError, match=r"^'Flow' object has no attribute 'nothing'$"):
        getattr(bids(), "nothing")  # noqa: B009


@pytest.mark.parametrize(
    "code",
    [
        "map_batches(lambda b: b.filter(pc.greater(b['price'], 100)))",
        "map_batches(lambda b: b.select(['a']), schema='a bigint')",
        "map_batches(lambda b: b.select(['a', 'b']), schema='a bigint, b string')",
        "map_batches(lambda b: b.append_column('twice', pc.add(b['a'], b['a'])), schema='a bigint, twice bigint')",
    ],
)
def test_the_code_in_these_hints_runs(code: str) -> None:
    assert any(code in hint for hint in builder._INSTEAD.values())
    columns = {"a": [1, 2], "b": ["x", "y"], "price": [100, 101]}
    table = pa.table(columns if "append" not in code else {"a": [1, 2]})
    flow = eval(f"flow.{code}", {"flow": pk.Flow(table.schema), "pc": pc})
    assert flow.collect(table).num_rows == (1 if "filter" in code else 2)


def test_text_and_html() -> None:
    flow = bids(lateness="5s").map_batches(lambda batch: batch).key_by("auction").agg(n=pk.count())
    assert repr(flow).splitlines() == [
        "Flow(auction bigint, price bigint, ts timestamp_ltz, event_time='ts', lateness='5s')",
        "  .map_batches(<lambda>) -> auction bigint, price bigint, ts timestamp_ltz",
        "  .key_by(auction)",
        "  .agg(n=count())",
    ]
    page = flow._repr_html_()
    assert "&lt;lambda&gt;" in page and "<lambda>" not in page
    assert page.count("&darr;") == 3


def test_importing_starts_nothing() -> None:
    code = (
        "import sys, threading; import penstock as pk; import penstock._local, penstock.cli;"
        "assert threading.active_count() == 1;"
        "assert 'pyspark' not in sys.modules and 'penstock._native' not in sys.modules, 'imported too early'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_exports() -> None:
    for name in pk.__all__:
        assert getattr(pk, name) is not None
    assert set(pk.__all__) <= set(dir(pk))
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        pk.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"'penstock' has no attribute 'avg'; use mean$"):
        pk.avg  # noqa: B018


MODULES = (
    "penstock",
    "penstock._aggregates",
    "penstock._durations",
    "penstock._flow",
    "penstock._flow.base",
    "penstock._flow.builder",
    "penstock._flow.keyed",
    "penstock._flow.meetings",
    "penstock._flow.running",
    "penstock._flow.stateless",
    "penstock._flow.text",
    "penstock._aggregator",
    "penstock._local",
    "penstock._pump",
    "penstock._extras",
    "penstock._functions.columns",
    "penstock._schema",
    "penstock.graph",
    "penstock.handles",
    "penstock.spark",
    "penstock.spark.batch",
    "penstock.spark.state",
    "penstock.spark._session.guard",
    "penstock.spark._tasks.partitions",
    "penstock._windows",
    "penstock.workloads.nexmark",
    "penstock.workloads.paths",
    "penstock.workloads.wordcount",
    "penstock.cli",
    "penstock.cli.common",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_examples_of_the_methods_of_flows_run() -> None:
    """They say that they are of the class, so no module has them."""
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for kind in pk.Flow.__mro__[:-1]:
        for name, thing in vars(kind).items():
            method = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
            if callable(method):
                for test in finder.find(method, name, module=False, globs={}):
                    runner.run(test)
    assert runner.summarize().attempted > 100 and not runner.failures


@pytest.mark.parametrize("name", MODULES)
def test_public_things_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for public in module.__all__:
        thing = getattr(module, public)
        if getattr(thing, "__module__", "").startswith("penstock") and callable(thing):
            assert inspect.getdoc(thing), f"{name}.{public} has no docstring"
            if inspect.isclass(thing):
                for member, value in vars(thing).items():
                    if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                        assert inspect.getdoc(value), f"{name}.{public}.{member} has no docstring"


def test_lists_come_and_go_whatever_their_elements_are_called() -> None:
    rows = pa.table({"k": [1, 2], "tags": [["a"], ["b", "c"]]})
    tagged = pk.Flow("k bigint, tags array<string>")
    assert tagged.collect(rows).to_pylist() == rows.to_pylist()

    def nested(batch: pa.RecordBatch) -> pa.RecordBatch:
        lists = [[tags] for tags in batch["tags"].to_pylist()]
        return pa.record_batch({"m": pa.array(lists), "s": [{"x": one} for one in lists]})

    shape = "m array<array<string>>, s struct<x: array<array<string>>>"
    for flow in (tagged.map_batches(nested, shape), tagged.flat_map(lambda batch: [nested(batch)], shape)):
        assert flow.collect(rows)["s"].to_pylist() == [{"x": [["a"]]}, {"x": [["b", "c"]]}]

    class Values(pk.Aggregator):
        def create(self) -> list[int]:
            return []

        def accumulate(self, states: list[Any], groups: pa.Int64Array, rows: pa.RecordBatch) -> None:
            for group, value in zip(groups.to_pylist(), rows["k"].to_pylist(), strict=True):
                states[group].append(value)

        def merge(self, state: list[int], other: list[int]) -> list[int]:
            return state + other

        def finish(self, states: list[Any]) -> pa.Table:
            return pa.table({"values": states})

    values = tagged.key_by("k").aggregate(Values(), schema="values array<bigint>")
    assert sorted(row["values"] for row in values.collect(rows).to_pylist()) == [[1], [2]]
    both = tagged.union(pk.Flow(rows.schema, name="own")).key_by("tags").agg(n=pk.count())
    assert both.collect({"input": rows, "own": rows})["n"].to_pylist() == [2, 2]
    with pytest.raises(pk.errors.UserFunctionError, match=r"declared is array<struct"):
        other = pa.array([[{"a": 1, "c": 2}]])
        shape = "l array<struct<a: bigint, b: bigint>>"
        tagged.map_batches(lambda batch: pa.record_batch({"l": other}), shape).collect(rows.slice(1))


def test_what_functions_give_has_no_null_inside_where_its_type_has_none() -> None:
    kind = pa.list_(pa.field("element", pa.int64(), nullable=False))
    shape, rows = pa.schema({"l": kind}), pa.table({"k": [1]})
    wrong = pa.record_batch([pa.array([[1, None]], kind)], schema=shape)
    flow = pk.Flow("k bigint")
    with pytest.raises(pk.errors.UserFunctionError, match='column "l" has a null inside, where its type is NOT NULL'):
        flow.map_batches(lambda batch: wrong, shape).collect(rows)
    with pytest.raises(pk.errors.UserFunctionError, match="None inside, where its type is NOT NULL"):
        flow.key_by("k").stateful_map(lambda state, k: (None, ([None],)), schema=shape).collect(rows)
    right = flow.key_by("k").stateful_map(lambda state, k: (None, [(None,), ([k],)]), schema=shape)
    assert right.collect(rows)["l"].to_pylist() == [None, [1]]


def test_odd_arguments_are_refused_where_they_stand() -> None:
    for n in (0, 2**31 + 1, 2**70, True, 1.0):
        with pytest.raises(ConfigError, match="from 1 to 2147483648"):
            bids().top(n, by="price")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="top per got 5"):
        bids().top(1, by="price", per=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="order_by got 5"):
        bids(order_by=5)
    assert bids().top(2**31, by="price", per={"auction"}).columns  # type: ignore[arg-type]


def test_keys_that_python_does_not_tell_apart_are_refused() -> None:
    kinds = [pa.timestamp("us", "Europe/Berlin"), pa.timestamp("s", "America/New_York")]
    for kind in [*kinds, pa.time64("ns")]:
        keyed = pk.Flow(pa.schema([("k", kind)])).key_by("k")
        needs = "cast it to timestamp in UTC" if kind in kinds else "cast it to time64"
        for flow in (
            keyed.stateful_map(running, schema="n bigint"),
            keyed.apply_in_pandas_with_state(running, "n bigint", "n bigint", "update", "NoTimeout"),
        ):
            with pytest.raises(SchemaError, match=f"column 'k'.*{needs}|{needs}.*column 'k'"):
                flow.explain()
        keyed.agg(n=pk.count()).explain()
    for zone in ("UTC", "+02:00"):
        pk.Flow(pa.schema([("k", pa.timestamp("us", zone))])).key_by("k").stateful_map(
            running, schema="n int"
        ).explain()


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("zeros", [(-0.0, 0.0), (0.0, -0.0), (-0.0, -0.0)], ids=str)
@pytest.mark.parametrize("keys", [("k",), ("k", "a")], ids=",".join)
def test_functions_get_one_zero_as_a_key_whichever_came_first(
    keys: tuple[str, ...], zeros: tuple[float, float], kind: pa.DataType
) -> None:
    schema = pa.schema([("k", kind), ("a", pa.int64()), ("ts", pa.int64())])
    rows = pa.table({"k": pa.array(zeros, kind), "a": [1, 1], "ts": [0, 1]}, schema)
    flow = pk.Flow(schema, event_time="ts").key_by(*keys)
    told: list[str] = []
    given: list[str] = []

    def step(state: Any, k: float, a: int, ts: int) -> Any:
        given.append(str(k))
        return (state or 0) + 1, None, (5, None) if ts else None

    def plain_step(state: Any, k: float, a: int, ts: int) -> Any:
        given.append(str(k))
        if state:
            raise ValueError("twice")
        return 1, None

    def on_timer(state: Any, time: int, value: None, k: float, *a: int) -> Any:
        told.append(str(k))
        return state, None

    def at_end(state: Any, k: float, *a: int) -> Any:
        told.append(str(k))
        assert state == 2

    def group(key: Any, frames: Any, state: Any) -> Any:
        told.append(str(key[0]))
        assert type(key[0]) is kind.to_pandas_dtype()
        given.extend(map(str, next(frames)["k"]))
        return ()

    flow.stateful_map(step, schema="n bigint", on_timer=on_timer, at_end=at_end).collect(rows)
    flow.apply_in_pandas_with_state(group, "n bigint", "n bigint", "update", "NoTimeout").collect(rows)
    assert told == ["0.0"] * 3
    with pytest.raises(UserFunctionError, match=f"k={zeros[1]}") as failed:
        flow.stateful_map(plain_step, schema="n bigint").collect(rows)
    assert str(failed.value.key if len(keys) == 1 else failed.value.key[0]) == "0.0"
    assert given == [str(zero) for zero in zeros] * 3, "rows are as they are"


def test_state_written_before_has_one_zero() -> None:
    bin = BinState()
    bin.states.update({-0.0: 1, (-0.0, "a"): 2})
    absorbed, restored = BinState(), BinState()
    for chunk in bin.encode():
        absorbed.absorb(chunk)
    for part in bin.changes():
        restored.restore((name, body) for _, name, body in part)
    for read in (absorbed, restored):
        assert list(map(str, read.states)) == ["0.0", "(0.0, 'a')"]


def test_states_are_handed_over_as_they_are_where_nothing_is_undone() -> None:
    bin, other = BinState(), BinState()
    state: list[int] = [1]
    bin.states["a"] = state
    entries = bin.entries()
    assert entries is not None
    other.take(entries)
    assert other.states == {"a": [1]} and other.states["a"] is state
    bin.mark()
    assert bin.entries() is None, "an undo must not find what the other one made of them"
    bin.taint()
    with pytest.raises(StateError, match="failed in the middle of a row"):
        bin.entries()


def test_values_that_python_does_not_hold_are_told_with_their_column() -> None:
    rows = pa.table({"k": [1], "ts": pa.array([253_402_300_800_000_000], pa.timestamp("us"))})
    flow = pk.Flow(rows.schema)
    for step in (
        flow.key_by("k").stateful_map(running, schema="n bigint"),
        flow.flat_map(lambda k, ts: [(k,)], schema="n bigint", rows=True),
    ):
        with pytest.raises(SchemaError, match=r"column \"ts\" of type .* has a value that Python's types do not hold"):
            step.collect(rows)


WRONG: dict[str, tuple[Any, str]] = {
    "array": (pa.array([1]), "an array of int64, not a pyarrow RecordBatch or Table"),
    "chunks": (pa.chunked_array([[1]]), "an array of int64, not a pyarrow RecordBatch or Table"),
    "null rows": (pa.array([{"k": 1}, None]), "an array of 2 structs, of which 1 are null: a row cannot be null"),
    "null rows in chunks": (pa.chunked_array([[{"k": 1}], [None]]), "of 2 structs, of which 1 are null"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_are_no_rows_are_refused_by_step_and_line(name: str) -> None:
    wrong, says = WRONG[name]
    rows = pa.table({"k": [1]})
    flow, sides = pk.Flow("k bigint"), {"x": "k bigint"}
    for made, gave in (
        (flow.map_batches(lambda batch: wrong), "returned"),
        (flow.map_batches(lambda batch: wrong, sides=sides), "returned"),
        (flow.map_batches(lambda batch: (batch, pk.side("x", wrong)), sides=sides), "returned for side 'x'"),
        (flow.flat_map(lambda batch: [wrong]), "gave"),
        (flow.flat_map(lambda batch: [batch, pk.side("x", wrong)], sides=sides), "gave for side 'x'"),
    ):
        with pytest.raises(pk.errors.UserFunctionError, match=f"the function {gave} .*{says}") as caught:
            made.collect(rows, sides={"x": lambda batch: None} if made.sides else None)
        error = caught.value
        assert error.file == __file__ and error.line > 0
        assert error.step in ("map_batches[0] <lambda>", "flat_map[0] <lambda>")


def test_structs_and_streams_are_rows() -> None:
    structs = pa.array([{"k": 0}, {"k": 1}, {"k": 2}]).slice(1)
    table = pa.table({"k": [1, 2]})
    flow = pk.Flow("k bigint")
    for right in (structs, pa.chunked_array([structs]), table, table.to_batches()[0]):
        assert flow.map_batches(lambda batch, given=right: given).collect(pa.table({"k": [5]})) == table
        assert flow.flat_map(lambda batch, given=right: [given]).collect(pa.table({"k": [5]})) == table
    reader = flow.map_batches(lambda batch: pa.RecordBatchReader.from_batches(table.schema, table.to_batches()))
    assert reader.collect(pa.table({"k": [5]})) == table


def test_partitions_tell_how_many_rows_have_no_event_time(caplog: pytest.LogCaptureFixture) -> None:
    clicks = pk.Flow("k bigint, ts bigint", event_time="ts", name="clicks")
    rows = pa.table({"k": [1, 2, 3], "ts": pa.array([1, None, None], pa.int64())}).to_batches(max_chunksize=2)
    windowed = clicks.map_batches(lambda batch: batch).key_by("k").window(pk.tumbling("1s")).agg(n=pk.count())
    made = windowed.map_in_arrow(per_partition=True)
    assert sum(batch.num_rows for batch in made(iter(rows))) == 1
    [record] = caplog.records
    assert (record.name, record.levelname) == ("penstock", "WARNING")
    assert record.getMessage().startswith("2 of 3 rows of this partition have no event time (column 'ts' is null): ")
    caplog.clear()
    # Nothing is left out, or nothing is null.
    plain = clicks.key_by("k").agg(n=pk.count()).map_in_arrow(per_partition=True)
    assert sum(batch.num_rows for batch in plain(iter(rows))) == 3
    assert sum(batch.num_rows for batch in made(iter([rows[0].slice(0, 1)]))) == 1
    assert not caplog.records


def test_event_time_is_needed_by_windows_and_joins_in_time() -> None:
    left = pk.Flow("k bigint, ts bigint, end bigint", event_time="ts", name="left")
    right = pk.Flow("k bigint, at bigint", event_time="at", name="right")
    counted = right.key_by("k").agg(n=pk.count())
    windows = pk.tumbling("1s")
    for flow, expected in (
        (left.join(right, on="k"), [None, None]),
        (left.join(right, on="k", within="1s"), ["ts", "at"]),
        (left.join(right, on="k", until="end"), ["ts", "at"]),
        (left.window_join(right, on="k", window=windows), ["ts", "at"]),
        (left.window(windows).top(1, by="k", per="window"), ["ts"]),
        (left.union(left.map_batches(lambda b: b)).key_by("k").window(windows).agg(n=pk.count()), ["ts"]),
        (left.key_by("k").window(windows).agg(m=pk.count()).join(counted, on="k"), ["ts", None]),
        (left.key_by("k").stateful_map(lambda *row: (None, None), schema="k bigint", ttl="1s"), [None]),
        (pk.Flow("k bigint"), [None]),
    ):
        plan, _ = flow.to_plan()
        assert needed_times(plan) == needed_times(pk._native.plan_narrowed(plan, late=False)[0]) == expected, flow


def test_results_of_long_texts_come_in_several_blocks() -> None:
    text = "x" * (24 << 20)
    rows = pa.table({"k": [1, 2, 3, 4], "t": [text] * 4, "ts": [0, 0, 0, 0]})
    flow = pk.Flow(rows.schema, event_time="ts")
    for step in (
        flow.key_by("k").agg(t=pk.last("t")),
        flow.key_by("t", "k").agg(n=pk.count()),
        flow.window(pk.tumbling("1s")).top(4, by="k", per="window"),
    ):
        blocks = list(step.run(rows, workers=1))
        assert sum(block.num_rows for block in blocks) == 4
        assert max(block.nbytes for block in blocks) < 100 << 20, [block.num_rows for block in blocks]
