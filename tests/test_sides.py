"""Side outputs beside an oracle in plain Python, on threads and processes of this machine, and what is refused."""

import functools
import json
import re
from collections import Counter

import pyarrow as pa
import pytest

import penstock as pk
from penstock.errors import ConfigError, SchemaError, UserFunctionError

LINES = [str(n) if n % 3 else f"bad {n}" for n in range(2_000)]
BAD = {"bad": "line string, error string"}


def parse(line):
    if line.isdigit():
        yield (int(line) % 7, int(line))
    else:
        yield pk.side("bad", (line, "no number"))


def parse_batch(batch):
    good = [line for line in batch["line"].to_pylist() if line.isdigit()]
    bad = [line for line in batch["line"].to_pylist() if not line.isdigit()]
    numbers = [int(line) for line in good]
    rows = pa.record_batch({"k": pa.array([n % 7 for n in numbers], pa.int64()), "n": pa.array(numbers, pa.int64())})
    errors = pa.record_batch({"line": pa.array(bad, pa.string()), "error": pa.array(["no number"] * len(bad))})
    return rows, pk.side("bad", errors)


def lazily(batch):
    rows, bad = parse_batch(batch)
    yield bad
    yield rows


def alarm(seen, k, n):
    seen = (seen or 0) + 1
    out = [(k, n)]
    if n % 10 == 0:
        out.append(pk.side("alarms", (k, n, seen)))
    if seen == 3:
        return seen, pk.side("thirds", [(k,)])
    return seen, out


def lines():
    return pk.Flow("line string")


def parsed(how):
    if how == "rows":
        return lines().flat_map(parse, "k bigint, n bigint", rows=True, sides=BAD)
    if how == "batches":
        return lines().flat_map(lazily, "k bigint, n bigint", sides=BAD)
    if how == "map":
        return lines().map_batches(parse_batch, "k bigint, n bigint", sides=BAD)
    return lines().bounded(
        lambda part: part.flat_map(parse, "k bigint, n bigint", rows=True, sides=BAD), batches=2, batch_size=64
    )


def alarmed(flow):
    sides = {"alarms": "k bigint, n bigint, seen bigint", "thirds": "k bigint"}
    return flow.key_by("k").stateful_map(alarm, schema="k bigint, n bigint", sides=sides)


def expected():
    seen, rows, sides = Counter(), [], {"bad": [], "alarms": [], "thirds": []}
    for line in LINES:
        if not line.isdigit():
            sides["bad"].append((line, "no number"))
            continue
        n = int(line)
        k = n % 7
        seen[k] += 1
        if seen[k] == 3:
            sides["thirds"].append((k,))
            continue
        rows.append((k, n))
        if n % 10 == 0:
            sides["alarms"].append((k, n, seen[k]))
    return sorted(rows), {name: sorted(rows) for name, rows in sides.items()}


class Takers:
    """Lists by the name of the side."""

    def __init__(self, *names):
        self.rows = {name: [] for name in names}

    def dict(self):
        return {name: self._taker(rows) for name, rows in self.rows.items()}

    def _taker(self, rows):
        return lambda batch: rows.extend(tuple(row.values()) for row in batch.to_pylist())

    def sorted(self):
        return {name: sorted(rows) for name, rows in self.rows.items()}


def table():
    return pa.table({"line": LINES})


@pytest.mark.parametrize("how", ["rows", "batches", "map", "bounded"])
@pytest.mark.parametrize("options", [{}, {"workers": 3}, {"workers": 2, "streaming": True, "batch_rows": 300}])
def test_rows_and_sides_are_those_of_the_oracle(how, options):
    takers = Takers("bad", "alarms", "thirds")
    options = {"batch_rows": 128} | options
    flow = alarmed(parsed(how))
    made = flow.collect(table(), sides=takers.dict(), **options)
    rows, sides = expected()
    assert sorted(tuple(row.values()) for row in made.to_pylist()) == rows
    assert takers.sorted() == sides


@pytest.mark.parametrize("how", ["rows", "map"])
def test_processes(how):
    takers = Takers("bad", "alarms", "thirds")
    with alarmed(parsed(how)).run(table(), processes=2, sides=takers.dict(), batch_rows=128) as run:
        made = [tuple(row.values()) for batch in run for row in batch.to_pylist()]
    rows, sides = expected()
    assert sorted(made) == rows
    assert takers.sorted() == sides


def test_without_state():
    takers = Takers("bad")
    made = parsed("rows").collect(table(), sides=takers.dict())
    assert made.num_rows == sum(line.isdigit() for line in LINES)
    assert takers.sorted()["bad"] == expected()[1]["bad"]


def test_what_nobody_takes_is_counted():
    _, sides = expected()
    counts = {name: len(rows) for name, rows in sides.items()}
    takers = Takers("alarms")
    summary = alarmed(parsed("rows")).run_into(lambda batch: None, table(), sides=takers.dict())
    assert summary.side_rows == counts
    assert summary.late_rows == 0
    assert takers.sorted()["alarms"] == sides["alarms"]
    with alarmed(parsed("map")).start(workers=2) as session:
        list(session.run(table()))
        assert session.side_rows == counts


def test_sides_of_loops():
    def halve(batch):
        n = [n // 2 for n in batch["n"].to_pylist()]
        odd = pa.record_batch({"odd": pa.array([one for one in n if one % 2], pa.int64())})
        again = pa.array([one > 1 for one in n])
        return pa.record_batch({"n": pa.array(n, pa.int64()), "again": again}), pk.side("odd", odd)

    flow = pk.Flow("n bigint").iterate(
        lambda round: round.map_batches(halve, "n bigint, again boolean", sides={"odd": "odd bigint"})
    )
    takers = Takers("odd")
    flow.collect(pa.table({"n": [100, 37, 8]}), sides=takers.dict())
    odd = []
    for n in (100, 37, 8):
        while True:
            n //= 2
            odd += [(n,)] * (n % 2)
            if n <= 1:
                break
    assert takers.sorted()["odd"] == sorted(odd)


def test_timers_and_the_end():
    def step(state, k, ts):
        return (state or 0) + 1, None, (ts + 10, "due")

    def on_timer(state, time, value, k):
        return state, [pk.side("timers", (k, time)), (k, state)]

    def at_end(state, k):
        return pk.side("ends", (k, state))

    flow = (
        pk.Flow("k bigint, ts bigint", event_time="ts")
        .key_by("k")
        .stateful_map(
            step,
            schema="k bigint, n bigint",
            on_timer=on_timer,
            at_end=at_end,
            sides={"timers": "k bigint, at bigint", "ends": "k bigint, n bigint"},
        )
    )
    takers = Takers("timers", "ends")
    rows = pa.table({"k": [1, 2, 1], "ts": [0, 5, 30]})
    made = flow.collect(rows, sides=takers.dict(), streaming=True, batch_rows=1)
    assert sorted(tuple(row.values()) for row in made.to_pylist()) == [(1, 2), (1, 2), (2, 1)]
    assert takers.sorted() == {"timers": [(1, 10), (1, 40), (2, 15)], "ends": [(1, 2), (2, 1)]}


def test_frames():
    import pandas as pd

    def count(key, frames, state):
        seen = sum(map(len, frames)) + (state.get[0] if state.exists else 0)
        state.update((seen,))
        if seen % 2:
            yield pk.side("odd", pd.DataFrame({"k": [key[0]], "seen": [seen]}))
        yield pd.DataFrame({"k": [key[0]], "n": [seen]})

    flow = (
        pk.Flow("k bigint")
        .key_by("k")
        .apply_in_pandas_with_state(count, "k bigint, n bigint", "seen bigint", sides={"odd": "k bigint, seen bigint"})
    )
    takers = Takers("odd")
    made = flow.collect(pa.table({"k": [1, 1, 2, 3, 3, 3]}), sides=takers.dict())
    assert sorted(made["n"].to_pylist()) == [1, 2, 3]
    assert takers.sorted()["odd"] == [(2, 1), (3, 3)]


def test_beside_late_rows():
    def split(k, ts):
        yield (k, ts)
        if k == 2:
            yield pk.side("input", (k,))

    flow = (
        pk.Flow("k bigint, ts bigint", event_time="ts")
        .flat_map(split, "k bigint, ts bigint", rows=True, sides={"input": "k bigint"})
        .key_by("k")
        .window(pk.tumbling("10ms"))
        .agg(n=pk.count())
    )
    late, takers = [], Takers("input")
    rows = pa.table({"k": [1, 2, 2, 1], "ts": [5, 50, 3, 60]})
    made = flow.collect(
        rows, late=lambda batch: late.extend(batch.to_pylist()), sides=takers.dict(), streaming=True, batch_rows=1
    )
    assert made.num_rows == 3
    assert late == [{"k": 2, "ts": 3}]
    assert takers.rows["input"] == [(2,), (2,)]


def test_bad_names_and_schemas():
    flow = parsed("rows")
    with pytest.raises(ConfigError, match=r"'bad' already \(there are 'bad'\)"):
        flow.map_batches(lambda b: b, sides=BAD)
    with pytest.raises(ConfigError, match="name to schema"):
        lines().map_batches(lambda b: b, sides=["bad"])
    for name in ("", "a/b", 3):
        with pytest.raises(ConfigError, match="name="):
            lines().map_batches(lambda b: b, sides={name: "x bigint"})
    with pytest.raises(SchemaError):
        lines().map_batches(lambda b: b, sides={"bad": "x nonsense"})
    with pytest.raises(ConfigError, match="'bad'"):
        other = pk.Flow("line string", name="other").map_batches(parse_batch, "k bigint, n bigint", sides=BAD)
        flow.union(other)
    with pytest.raises(ConfigError, match=r"worse.*no such side output; there are 'bad'"):
        flow.run(table(), sides={"worse": print})
    with pytest.raises(ConfigError, match="must be a function"):
        flow.run(table(), sides={"bad": 3})
    with pytest.raises(ConfigError, match="none: no step"):
        lines().run(table(), sides={"bad": print})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (pk.side("worse", ("a", "b")), "'worse'.*it has 'bad'"),
        (pk.side("bad", ("a",)), 'side output "bad"'),
        (pk.side("bad", (1, 2)), 'side output "bad"'),
        (pk.side("bad", "text"), "a tuple"),
    ],
)
def test_bad_rows_are_errors_of_the_function(given, message):
    def step(state, line):
        return None, given

    flows = [
        lines().flat_map(lambda line: [given], "n bigint", rows=True, sides=BAD),
        lines().key_by("line").stateful_map(step, schema="n bigint", sides=BAD),
    ]
    for flow in flows:
        with pytest.raises(UserFunctionError, match=message):
            flow.collect(pa.table({"line": ["x"]}))


def test_bad_batches_are_errors_of_the_function():
    batch = pa.record_batch({"n": [1]})
    for given, message in ((pk.side("worse", batch), "'worse'"), (pk.side("bad", batch), 'side output "bad"')):
        for flow in (
            lines().map_batches(lambda b, given=given: (b, given), sides=BAD),
            lines().flat_map(lambda b, given=given: [given], sides=BAD),
        ):
            with pytest.raises(UserFunctionError, match=message):
                flow.collect(pa.table({"line": ["x"]}))


def test_plans_say_them():
    flow = alarmed(parsed("bounded"))
    plan, _ = flow.to_plan()
    assert pk._native.plan_check(plan)["explain"] == flow.explain()
    assert [side["name"] for side in json.loads(plan)["steps"][0]["body"][0]["sides"]] == ["bad"]
    assert list(flow.sides) == ["bad", "alarms", "thirds"]
    assert flow.sides["bad"].names == ["line", "error"]
    assert "side bad: line string, error string" in flow.explain()
    assert "side thirds: k bigint" in flow.explain()
    assert "side alarms" in flow.explain("dot")
    assert "side bad: line string" in repr(flow)
    assert flow == alarmed(parsed("bounded"))
    assert lines().map_batches(parse_batch, sides=BAD) != lines().map_batches(parse_batch, sides={"bad": "x bigint"})
    plain, _ = lines().map_batches(parse_batch).to_plan()
    assert "sides" not in plain


def test_partitions_drop_them_and_say_so(caplog):
    function = parsed("rows").map_in_arrow()
    assert "side outputs of this flow are dropped: 'bad'. map_in_arrow gives one DataFrame" in caplog.text
    made = list(function(iter(table().to_batches())))
    assert sum(batch.num_rows for batch in made) == sum(line.isdigit() for line in LINES)


async def sends(*given):
    raise AssertionError("nobody awaits it")


LATE = (
    pk.Flow("k bigint, ts bigint", event_time="ts")
    .flat_map(lambda k, ts: [(k, ts), pk.side("seen", (k,))], "k bigint, ts bigint", rows=True, sides={"seen": "k int"})
    .key_by("k")
    .window(pk.tumbling("10ms"))
    .agg(n=pk.count())
)
TIMES = pa.table({"k": [1, 2, 2], "ts": [5, 50, 3]})


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"late": sends}, "late"),
        ({"late": {"input": functools.partial(sends, 1)}}, "late={'input': ...}"),
        ({"sides": {"seen": sends}}, "sides={'seen': ...}"),
    ],
)
def test_coroutine_functions_are_refused_where_they_are_given(options, what):
    text = f"{what}: sends is a coroutine function, and nobody awaits what it returns; give a function that runs it"
    for start in (LATE.start, functools.partial(LATE.run, TIMES), functools.partial(LATE.run_into, print, TIMES)):
        with pytest.raises(ConfigError, match=re.escape(text)):
            start(**options)


@pytest.mark.parametrize("what", ["late", "late={'input': ...}", "sides={'seen': ...}"])
@pytest.mark.usefixtures("all_awaited")
def test_a_coroutine_that_is_returned_all_the_same_ends_the_run(what):
    def taker(batch):
        return sends(batch)

    options = {"late": taker} if what == "late" else {what.partition("=")[0]: {what.split("'")[1]: taker}}
    with pytest.raises(ConfigError, match=re.escape(f"{what} returned a coroutine (sends), which nobody awaits")):
        LATE.collect(TIMES, streaming=True, batch_rows=1, **options)


@pytest.mark.parametrize("options", [{}, {"processes": 1}], ids=["threads", "processes"])
@pytest.mark.parametrize("what", ["late", "late={'input': ...}", "sides={'seen': ...}"])
def test_a_sink_that_raises_stop_iteration_ends_no_run_as_if_it_were_complete(what, options):
    left = iter([1])

    def taker(batch):
        next(left)

    # Two late rows, and three of the side output.
    given = [TIMES.slice(row, 1) for row in (0, 1, 2, 2)]
    takers = {"late": taker} if what == "late" else {what.partition("=")[0]: {what.split("'")[1]: taker}}
    for run in (LATE.collect, functools.partial(LATE.run_into, lambda batch: None)):
        with pytest.raises(RuntimeError, match=f"^{re.escape(what)}: the function raised StopIteration") as caught:
            run(given, streaming=True, **takers, **options)
        assert isinstance(caught.value.__cause__, StopIteration)
        left = iter([1])
    left = iter([])
    with pytest.raises(RuntimeError, match=r"^sink: the function raised StopIteration"):
        LATE.run_into(taker, given, streaming=True, late=lambda batch: None, **options)


def test_rows_of_several_sides_may_hold_views():
    # Below a null struct there are nulls, wherever it says that there are none.
    views = pa.schema({"k": pa.string_view(), "n": pa.int64(), "v": pa.struct([pa.field("id", pa.int64(), False)])})
    flow = pk.Flow(views).flat_map(
        lambda k, n, v: [pk.side("even" if n % 2 == 0 else "odd", (k, n, v))],
        views,
        rows=True,
        sides={"even": views, "odd": views},
    )
    columns = [
        pa.array(["a", "bb", "ccc"], pa.string_view()),
        pa.array([1, 2, 3]),
        pa.array([{"id": 1}] * 3, views[2].type),
    ]
    given = pa.record_batch(columns, schema=views)
    taken = {"even": [], "odd": []}
    flow.collect(
        given, sides={name: lambda batch, name=name: taken[name].extend(batch["k"].to_pylist()) for name in taken}
    )
    assert taken == {"even": ["bb"], "odd": ["a", "ccc"]}


@pytest.mark.usefixtures("all_awaited")
def test_a_sink_that_nobody_awaits_is_refused():
    with pytest.raises(
        ConfigError, match=r"^sink: sends is a coroutine .* lambda batch: asyncio.run\(sends\(batch\)\)"
    ):
        lines().run_into(sends, table())
    with pytest.raises(ConfigError, match=r"^sink returned a coroutine \(sends\), which nobody awaits: run it inside"):
        lines().run_into(lambda batch: sends(batch), table())
