"""Which edits of a flow go on from the state of the flow before, and which functions count as the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import cloudpickle
import pyarrow.compute as pc
import pytest

import penstock as pk

pytest.importorskip("pyspark")

from penstock.errors import EngineError
from penstock.spark._engine.program import Program
from penstock.spark._engine.queries import Queries
from penstock.spark._engine.stream import Stream

SCHEMA = "k bigint, v bigint"


def counting(factor: int) -> Any:
    def count(state: Any, k: int, v: int) -> Any:
        return (state or 0) + factor, (k, (state or 0) + factor)

    return count


def keyed(step: Any, **options: Any) -> Program:
    return Program.of(pk.Flow(SCHEMA).key_by("k").stateful_map(step, schema="k bigint, n bigint", **options))


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's, and one that uses it."""
    (tmp_path / "penstock_test_helper.py").write_text("def twice(batch):\n    return batch\n")
    (tmp_path / "penstock_test_user.py").write_text(
        "from penstock_test_helper import twice\ndef f(b): return twice(b)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "penstock_test_helper.py"
    for name in ("penstock_test_helper", "penstock_test_user"):
        sys.modules.pop(name, None)


def test_a_program_tells_of_each_source() -> None:
    timed = pk.Flow("k bigint, t timestamp", event_time="t", lateness="2s", name="timed")
    plain = pk.Flow("k bigint, v bigint", name="plain")
    windows = timed.map_batches(counting, "k bigint, t timestamp, more bigint").key_by("k").window(pk.tumbling("1s"))
    program = Program.of(windows.agg(n=pk.count()).join(plain, on="k"), late=print)
    assert program.lateness_us == (2_000_000, None)
    assert program.beside.names == ["k", "t", "more"], "as they are behind the function"
    silent = pk.Flow("k bigint, at timestamp", event_time="at", idle_after="1s", name="silent")
    assert Program.of(timed.join(silent, on="k")).idle_after_ms == (None, 1_000)
    assert Program.of(silent).idle_after_ms == (), "nothing else moves the watermark"
    turned = Program.of(plain.join(timed, on="k"))
    misfit = turned.misfit(Program.of(timed.join(plain, on="k")))
    assert misfit == "its sources are plain, timed, in this order, those of the flow before were timed, plain"


def test_a_program_tells_what_goes_by_processing_time() -> None:
    def group(key: Any, frames: Any, state: Any) -> Any:
        yield from frames

    assert keyed(counting(1), ttl="1h", ttl_time="processing").clocked == (
        "stateful_map[1] count (ttl_time='processing')",
    )
    timed = pk.Flow("k bigint, v bigint, t timestamp", event_time="t", name="timed").key_by("k")
    by_event = timed.stateful_map(lambda *_: None, schema="k bigint", ttl="1h", on_timer=lambda *_: None)
    assert keyed(counting(1)).clocked == Program.of(by_event).clocked == ()
    for timeout, steps in [
        ("ProcessingTimeTimeout", ("apply_in_pandas_with_state[1] group (ProcessingTimeTimeout)",)),
        ("EventTimeTimeout", ()),
        ("NoTimeout", ()),
    ]:
        groups = timed.apply_in_pandas_with_state(group, "k bigint", "n bigint", timeoutConf=timeout)
        assert Program.of(groups).clocked == steps
    silent = pk.Flow("k bigint, at timestamp", event_time="at", idle_after="1s", name="silent")
    plain = pk.Flow("k bigint, t timestamp", event_time="t", name="plain")
    assert Program.of(plain.join(silent, on="k")).clocked == ("source silent (idle_after)",)
    assert Program.of(silent.key_by("k").agg(n=pk.count())).clocked == (), "nothing else moves the watermark"


def test_members_are_fed_what_is_read() -> None:
    flow = pk.Flow("k bigint, t timestamp, v bigint", event_time="t").key_by("k").window(pk.tumbling("1s"))
    alone, late = Program.of(flow.agg(n=pk.count())), Program.of(flow.agg(n=pk.count()), late=print)
    assert [one.read["input"].names for one in (alone, late)] == [["k", "t"], ["k", "t", "v"]]
    assert not alone.same_functions(late), "members that take other columns are told"
    assert late.misfit(alone) is None, "taking late rows is no edit of the flow"
    assert (alone.beside.names, late.beside.names) == (["k", "t"], ["k", "t", "v"]), "what members have of late rows"

    def sift(start: Any, end: Any, k: int, n: int) -> Any:
        yield pk.side("odd", (k, n)) if n % 2 else (k, n)

    sifted = flow.agg(n=pk.count()).flat_map(sift, "k bigint, n bigint", rows=True, sides={"odd": "k bigint, n bigint"})
    beside = Program.of(sifted, sides={"odd": print}).beside
    assert [(field.name, [one.name for one in field.type]) for field in beside] == [
        ("input", ["k", "t"]),
        ("odd", ["k", "n"]),
    ]


def test_a_key_of_another_type_is_refused_by_its_name() -> None:
    def counts(key: str) -> Program:
        return Program.of(pk.Flow(f"k {key}, v bigint", name="rows").key_by("k").agg(n=pk.count()))

    before, after = counts("bigint"), counts("string")
    assert after.misfit(before) == "column 'k' of source 'rows' is string, and was int64"
    # Where state is durable operators decide, which say the types of their keys.
    assert [one.operators[0]["types"] for one in (before, after)] == [
        "Int64 -> count with updates",
        "Utf8 -> count with updates",
    ]


def test_operators_say_what_their_state_is_made_of() -> None:
    flow = pk.Flow("k bigint, v bigint, t timestamp", event_time="t").key_by("k")
    windowed = flow.window(pk.sliding("10s", "5s")).agg(n=pk.count(), best=pk.max("v"))
    [told] = Program.of(windowed).operators
    assert told["types"] == "Int64 -> count, max(Int64) in windows of 10 s every 5 s"
    renamed = flow.window(pk.sliding("10s", "5s")).agg(m=pk.count(), most=pk.max("v"))
    [other] = Program.of(renamed).operators
    assert other["types"] == told["types"] and other["columns"] != told["columns"]
    for changed in (
        flow.window(pk.sliding("10s", "2s")).agg(n=pk.count(), best=pk.max("v")),
        flow.window(pk.sliding("10s", "5s")).agg(n=pk.count(), best=pk.min("v")),
        flow.agg(n=pk.count(), best=pk.max("v")),
    ):
        assert Program.of(changed).operators[0]["types"] != told["types"]
    [told] = keyed(counting(1)).operators
    assert told["types"] == "Int64 -> values of a function" and set(told) == set(other)
    grouped = flow.apply_in_pandas_with_state(
        lambda key, frames, state: [], "k bigint", "n int, who string", "update", "NoTimeout"
    )
    [told] = Program.of(grouped).operators
    assert told["types"] == "Int64 -> (int32, string), NoTimeout"


def test_unnamed_operators_say_which_columns_make_their_state() -> None:
    rows = pk.Flow("k bigint, p bigint, v double, w double, t timestamp, u timestamp", event_time="t", name="rows")
    others = pk.Flow("key bigint, x bigint", name="others")

    def reads(flow: Any) -> list[str | None]:
        return [one["reads"] for one in Program.of(flow).operators]

    keyed = rows.key_by("k")
    assert reads(keyed.agg(n=pk.count(), total=pk.sum("v"), best=pk.max_by("v", by="w"))) == ["k; v, v, w"]
    assert reads(keyed.window(pk.tumbling("1s")).agg(total=pk.sum("w"))) == ["k; w; time t"]
    assert reads(rows.top(2, by="v", per="k")) == ["k; k, p, v, w, t, u"]
    assert reads(rows.join(others, left_on="k", right_on="key")) == ["k = key; k, p, v, w, t, u, key, x"]
    assert reads(keyed.agg(name="totals", n=pk.count())) == [None], "what has a name may be of other columns"


def test_edited_functions_go_on_and_are_not_the_same() -> None:
    before = keyed(counting(1))
    assert keyed(counting(1)).misfit(before) is None
    edited = keyed(counting(100))
    assert edited.misfit(before) is None and not edited.same_functions(before)
    renamed = keyed(lambda state, k, v: (state, (k, v)), columns=["k", "v"])
    assert renamed.misfit(before) is None and not renamed.same_functions(before)
    other = keyed(lambda state, v: (state, (v, v)), columns=["v"])
    assert other.misfit(before) is None and not other.same_functions(before), "the values that it takes"
    flow = pk.Flow(SCHEMA).key_by("k").agg(n=pk.count())
    assert Program.of(flow).same_functions(Program.of(flow)), "no functions"


def test_what_the_state_was_made_under_may_not_change() -> None:
    before = keyed(counting(1))
    other = Program.of(pk.Flow(SCHEMA).key_by("v").stateful_map(counting(1), schema="k bigint, n bigint"))
    assert "its step 0 (key_by)" in str(other.misfit(before))
    longer = Program.of(before.flow.map_batches(lambda batch: batch))
    assert longer.misfit(before) == "it has other steps"
    late = Program.of(pk.Flow("k bigint, ts timestamp", event_time="ts"))
    plain = Program.of(pk.Flow("k bigint, ts timestamp"))
    assert "its columns or options" in str(plain.misfit(late))

    def group(state: str, timeout: str = "NoTimeout") -> Program:
        flow = pk.Flow(SCHEMA).key_by("k")
        step = flow.apply_in_pandas_with_state(lambda key, frames, state: [], "k bigint", state, "update", timeout)
        return Program.of(step)

    assert group("n bigint").misfit(group("n bigint")) is None
    assert "state of its function 0 was n: int64, and is n: string" in str(group("n string").misfit(group("n bigint")))
    changed = group("n bigint", "ProcessingTimeTimeout").misfit(group("n bigint"))
    assert changed == "timeout of its function 0 was NoTimeout, and is ProcessingTimeTimeout"


@pytest.mark.parametrize("way", ["itself", "through another", "in a function"])
def test_a_module_that_workers_have_imported(helper: Path, way: str) -> None:
    """Its functions travel by name: what the workers have of it stays as it was, so an edit is refused."""
    module = importlib.import_module("penstock_test_helper")
    user = importlib.import_module("penstock_test_user")

    def inside(batch: Any) -> Any:
        import penstock_test_helper

        return penstock_test_helper.twice(batch)

    def program() -> Program:
        function = {"itself": module.twice, "through another": user.f, "in a function": inside}[way]
        return Program.of(pk.Flow(SCHEMA).map_batches(function))

    before, another = program(), Program.of(pk.Flow(SCHEMA).map_batches(lambda batch: batch))
    assert set(before.sources) <= {"penstock_test_helper", "penstock_test_user"}, "the user's modules only"
    helper.write_text("def twice(batch):\n    return batch.slice(0, 0)\n")
    importlib.reload(module)
    # Whichever query comes with it, and whatever came between: what was imported stays.
    queries, setup = Queries("e"), MagicMock()
    for number, one in enumerate([before, before, another]):
        queries.of(setup, one, f"q{number}", f"name {number}", Stream(None), None)
    with pytest.raises(EngineError, match=r"module penstock_test_helper, which Spark query q3 \(name 3\) uses, has ch"):
        queries.of(setup, program(), "q3", "name 3", Stream(None), None)
    with pytest.raises(EngineError, match=r"register_pickle_by_value\(penstock_test_helper\) before, or start a new"):
        queries.of(setup, program(), "q0", "name 0", Stream(None), None)
    queries.of(setup, before, "q4", "name 4", Stream(None), None)


def test_modules_of_packages_are_not_the_users() -> None:
    from penstock._schema import to_arrow

    def uses(batch: Any) -> Any:
        return pc.sum(batch["v"]), to_arrow

    assert Program.of(pk.Flow(SCHEMA).map_batches(uses)).sources == {}


def test_a_module_pickled_by_value_may_change(helper: Path) -> None:
    module: Any = importlib.import_module("penstock_test_helper")
    cloudpickle.register_pickle_by_value(module)
    try:
        before = Program.of(pk.Flow(SCHEMA).map_batches(module.twice))
        helper.write_text("def twice(batch):\n    return batch.slice(0, 0)\n")
        importlib.reload(module)
        after = Program.of(pk.Flow(SCHEMA).map_batches(module.twice))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert after.misfit(before) is None and not after.same_functions(before)
