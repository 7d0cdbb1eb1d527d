"""Changes of matches: beside recomputation, given again, a batch at a time, and what is refused."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _native, errors

TRIANGLE = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"

node = st.integers(-4, 4).map(lambda n: n * 2**40 if n % 2 else n)


def edges_of(pairs: Any, kind: Any = None) -> pa.Table:
    pairs = list(pairs)
    return pa.table({"a": pa.array([a for a, _ in pairs], kind), "b": pa.array([b for _, b in pairs], kind)})


def rows(batches: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for batch in batches for row in batch.to_pylist())


@settings(max_examples=examples(30))
@given(
    epochs=st.lists(
        st.tuples(st.sets(st.tuples(node, node), max_size=8), st.sets(st.tuples(node, node), max_size=5)), max_size=6
    )
)
def test_deltas_beside_recomputation(epochs: list[tuple[set[Any], set[Any]]]) -> None:
    text = "p(a, b, c) :- e(a, b), e(b, c), e(c, a)"
    deltas = pk.graph.Deltas(text)
    edges: set[tuple[int, int]] = set()
    before: set[tuple[Any, ...]] = set()
    for added, removed in epochs:
        edges = (edges | (added - removed)) - (removed - added)
        table = deltas.update({"e": edges_of(sorted(added), pa.int64())}, {"e": edges_of(sorted(removed), pa.int64())})
        after = set(rows(pk.graph.match(text, {"e": edges_of(sorted(edges), pa.int64())}, workers=1)))
        wanted = [(*row, -1) for row in before - after] + [(*row, 1) for row in after - before]
        assert sorted(tuple(row.values()) for row in table.to_pylist()) == sorted(wanted)
        before = after


def test_deltas_refuse_and_stay_as_they_were() -> None:
    deltas = pk.graph.Deltas("back(x, y) :- e(x, y), e(y, x)", ids="text")
    with pytest.raises(errors.PatternError, match='no relation "f"'):
        deltas.update({"e": edges_of([("a", "b")]), "f": edges_of([("a", "b")])})
    with pytest.raises(errors.SchemaError, match="numbers for nodes"):
        deltas.update({"e": edges_of([(1, 2)])})
    with pytest.raises(errors.SchemaError, match="null in row 0"):
        deltas.update({"e": edges_of([(None, "b")], pa.string())})
    with pytest.raises(errors.SchemaError, match="column 'b' is null in row 3 of the relation, counted from 0"):
        parts = [edges_of(pairs, pa.string()) for pairs in ([("a", "b")] * 2, [("a", "b"), ("b", None)])]
        deltas.update({"e": pa.concat_tables(parts)}, {"e": parts[0]})
    assert deltas.update({"e": edges_of([("b", "a")])}).num_rows == 0
    assert deltas.update({"e": edges_of([("a", "b")] * 2)}).num_rows == 2
    assert deltas.update({"e": edges_of([("a", "b")])}).num_rows == 0
    with pytest.raises(errors.ConfigError, match="diff"):
        pk.graph.Deltas("p(diff) :- e(diff, x)")


def test_a_column_that_says_what_goes_is_not_passed_over() -> None:
    deltas = pk.graph.Deltas("tri(a, b, c) :- e(a, b), e(a, c), e(b, c)")
    edges = pa.table({"src": [9], "dst": [9], "diff": [-1]})
    for each in (edges, edges.to_batches()[0], edges.to_pandas()):
        with pytest.raises(errors.SchemaError, match=r"relation 'e' has a column 'diff'.*removed="):
            deltas.update({"e": each})

    class Frame:
        """As polars has it: names by a method; and one that names nothing."""

        columns: Any = ("src", "dst", "diff")
        schema = type("Schema", (), {"names": lambda self: ["src", "dst", "diff"]})()

        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return edges.__arrow_c_stream__(requested_schema)

    with pytest.raises(errors.SchemaError, match="has a column 'diff'"):
        deltas.update({"e": Frame()})
    assert deltas.update({"e": edges.select(["src", "diff"])}).num_rows == 0, "one of two is where edges end"
    unnamed = Frame()
    unnamed.columns, unnamed.schema = 5, None
    assert deltas.update({"e": unnamed}).num_rows == 2, "of who names nothing nothing is known"


def test_a_first_batch_without_rows_or_types_lets_no_other_nodes_in() -> None:
    nothing = pa.record_batch({"a": pa.nulls(0), "b": pa.nulls(0)})
    deltas = pk.graph.Deltas("p(x, y) :- e(x, y)")
    for values, says in ((["007", "7"], "has text for nodes"), ([1.0], "is double"), ([True], "is bool")):
        batch = pa.record_batch({"a": values, "b": values})
        with pytest.raises(errors.SchemaError, match=says):
            deltas.update({"e": iter([nothing, batch])})
    assert deltas.update({"e": iter([nothing, pa.record_batch({"a": [1], "b": [2]})])}).num_rows == 1
    named = pk.graph.Deltas("p(x, y) :- e(x, y)", ids="text")
    assert named.update({"e": iter([nothing, pa.record_batch({"a": ["007"], "b": ["7"]})])}).num_rows == 1


def test_an_epoch_is_given_again_until_the_next_is_fed() -> None:
    deltas = pk.graph.Deltas(TRIANGLE)
    clique = edges_of(itertools.combinations(range(6), 2))
    first = deltas.update({"e": clique}, epoch=0)
    assert first.num_rows == 20 and deltas.epoch == 0
    again = deltas.stream(epoch=0, batch_rows=7)
    assert again.replayed and [batch.num_rows for batch in again] == [7, 7, 6]
    # Neither what is given with it nor a reader who gave up midway makes a difference.
    next(deltas.stream({"e": edges_of([(7, 8)])}, epoch=0, batch_rows=1))
    assert deltas.update({"e": 5}, epoch=0).equals(first)
    gone = deltas.stream(removed={"e": edges_of([(0, 1)])}, epoch=1, batch_rows=1)
    assert not gone.replayed and next(gone).to_pylist() == [{"a": 0, "b": 1, "c": 2, "diff": -1}]
    late = deltas.stream(epoch=1, batch_rows=1)
    assert late.to_table().num_rows == 4
    assert deltas.update({"e": edges_of([(0, 1)])}, epoch=2).column("diff").to_pylist() == [1] * 4
    with pytest.raises(errors.StateError, match="epoch that is over"):
        next(gone)


def test_an_epoch_that_cannot_be_is_refused() -> None:
    edge = {"e": edges_of([(1, 2)])}
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")
    with pytest.raises(
        errors.StateLost, match="epoch 3 is the first that these deltas see: the edges of epochs 0 to 2 are"
    ):
        deltas.update(edge, epoch=3)
    assert deltas.update(edge, epoch=0).num_rows == 1
    with pytest.raises(errors.StateLost, match="epoch 2 after 0"):
        deltas.update(edge, epoch=2)
    assert deltas.update(edge, epoch=1).num_rows == 0
    with pytest.raises(errors.StateLost, match="epoch 0 has been: the last was 1"):
        deltas.update(edge, epoch=0)
    # An epoch that could not be read has not been.
    with pytest.raises(errors.SchemaError):
        deltas.update({"e": pa.table({"a": [1.5], "b": [2]})}, epoch=2)
    assert deltas.update({"e": edges_of([(2, 3)])}, epoch=2).num_rows == 1
    # One without a number ends it.
    assert deltas.update().num_rows == 0 and deltas.epoch is None
    with pytest.raises(errors.StateLost, match="epoch 2 has been"):
        deltas.update(edge, epoch=2)
    for wrong in (-1, 1.5, True, "3", 2**63):
        with pytest.raises(errors.ConfigError, match="epoch="):
            deltas.update(edge, epoch=wrong)  # type: ignore[arg-type]
    loaded = pk.graph.Deltas("p(a, b) :- e(a, b)")
    loaded.update(edge)
    assert loaded.update({"e": edges_of([(2, 3)])}, epoch=7).num_rows == 1
    two = pk.graph.Deltas("p(a, b) :- e(a, b), f(b, a)")
    two.update(edge, epoch=0)
    with pytest.raises(errors.StateLost, match="fed for e, and comes again for e, f"):
        two.update({"e": edges_of([(1, 2)]), "f": edges_of([(2, 1)])}, epoch=0)


def test_numbers_come_from_one_source() -> None:
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")
    first = deltas.update({"e": edges_of([(1, 2)])}, epoch=0, source="query A")
    told = "epoch 0 comes from query B, but the epochs before came from query A"
    for epoch in (0, 1):
        with pytest.raises(errors.StateLost, match=told.replace("0", str(epoch))):
            deltas.update({"e": edges_of([(3, 4)])}, epoch=epoch, source="query B")
    with pytest.raises(errors.StateLost, match=r"comes from a caller that names no source, but .* came from query A"):
        deltas.update({"e": edges_of([(3, 4)])}, epoch=0)
    assert deltas.epochs == 1
    # To look at what is held takes no source; its own gets it again, and goes on.
    assert deltas.update(epoch=0).equals(first)
    again = deltas.stream({"e": edges_of([(1, 2)])}, epoch=0, source="query A")
    assert again.replayed and again.to_table().equals(first)
    assert rows([*deltas.stream({"e": edges_of([(3, 4)])}, epoch=1, source="query A")]) == [(3, 4, 1)]
    for source, epoch in ((5, 2), ("query A", None)):
        with pytest.raises(errors.ConfigError, match="source="):
            deltas.update(epoch=epoch, source=source)  # type: ignore[arg-type]


def test_threads_that_feed_wait_for_each_other() -> None:
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")
    halfway, on = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def slowly() -> Iterator[pa.RecordBatch]:
        yield edges_of([(1, 1)]).to_batches()[0]
        halfway.set()
        assert on.wait(60)
        yield edges_of([(2, 2)]).to_batches()[0]

    def feed(name: str, edges: Any) -> None:
        found[name] = rows([*deltas.stream({"e": edges})]), deltas.epochs

    slow = threading.Thread(target=feed, args=("slow", slowly()))
    quick = threading.Thread(target=feed, args=("quick", edges_of([(3, 3)])))
    slow.start()
    try:
        assert halfway.wait(60)
        quick.start()
        quick.join(0.3)
        assert quick.is_alive() and deltas.epochs == 0
    finally:
        on.set()
        slow.join(60)
    quick.join(60)
    assert found["quick"] == ([(3, 3, 1)], 2)
    assert rows([*deltas.changes()]) == [(3, 3, 1)]
    assert deltas.update(removed={"e": edges_of([(n, n) for n in (1, 2, 3)])}).num_rows == 3


def test_edges_that_feed_what_they_are_for_are_refused() -> None:
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")

    def edges() -> Iterator[pa.RecordBatch]:
        yield edges_of([(1, 2)]).to_batches()[0]
        deltas.update({"e": edges_of([(3, 4)])})

    with pytest.raises(errors.StateError, match="the edges that they get feed them again"):
        deltas.update({"e": edges()})
    assert rows([*deltas.stream({"e": edges_of([(5, 6)])})]) == [(5, 6, 1)]


def test_a_relation_that_the_pattern_lacks_uses_up_no_number() -> None:
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b)")
    for empty in (edges_of([], pa.int64()), []):
        for wrong in ({"f": empty}, {"e": edges_of([(1, 2)]), "f": empty}):
            with pytest.raises(errors.PatternError, match='no relation "f"; there are e'):
                deltas.update(wrong, epoch=0)
            with pytest.raises(errors.PatternError, match='no relation "f"; there are e'):
                deltas.update(removed=wrong, epoch=0)
    assert deltas.epoch is None and deltas.epochs == 0
    assert deltas.update({"e": edges_of([(1, 2)])}, epoch=0).num_rows == 1


def test_what_an_epoch_changed_is_read_again_without_a_number() -> None:
    deltas = pk.graph.Deltas(TRIANGLE)
    assert deltas.changes().to_table().num_rows == 0 == deltas.epochs
    first = deltas.update({"e": edges_of(itertools.combinations(range(5), 2))})
    again = deltas.changes(batch_rows=4)
    assert again.replayed and [batch.num_rows for batch in again] == [4, 4, 2]
    assert deltas.changes().to_table().equals(first) and deltas.epochs == 1 and deltas.epoch is None
    old = deltas.changes()
    deltas.update()
    with pytest.raises(errors.StateError, match="epoch that is over"):
        next(old)
    with pytest.raises(errors.ConfigError, match="batch_rows=0"):
        deltas.changes(0)


def test_what_is_no_dict_of_relations_is_refused() -> None:
    deltas = pk.graph.Deltas("p(a, b) :- e(a, b), f(b, a)")
    with pytest.raises(errors.ConfigError, match="a dict of name to edges"):
        deltas.update(edges_of([(1, 2)]))
    with pytest.raises(errors.ConfigError, match="the pattern has e, f; name the one"):
        deltas.foreach_batch(print)
    with pytest.raises(errors.ConfigError, match="relation='g' is none of the pattern"):
        deltas.foreach_batch(print, "g")
    with pytest.raises(errors.ConfigError, match=r"sink=5 must be a function of \(Changes, batch id\)"):
        deltas.foreach_batch(5, "e")  # type: ignore[arg-type]

    with pytest.raises(errors.ConfigError, match=r"has 'b', which says as diff= what becomes of an edge"):
        deltas.foreach_batch(print, "e", columns=("a", "b"), diff="b")
    with pytest.raises(errors.ConfigError, match="diff=2 must be the name of a column"):
        deltas.foreach_batch(print, "e", diff=2)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="must be two names"):
        deltas.foreach_batch(print, "e", columns=("a",))

    async def sends(changes: pk.graph.Changes, batch_id: int) -> None:
        raise AssertionError("nobody awaits it")

    with pytest.raises(errors.ConfigError, match=r"^sink: sends is a coroutine function, and nobody awaits"):
        deltas.foreach_batch(sends, "e")

    def yields(changes: pk.graph.Changes, batch_id: int) -> Iterator[None]:
        yield

    with pytest.raises(errors.ConfigError, match=r"^sink: yields is a generator function, and nobody runs"):
        deltas.foreach_batch(yields, "e")


def test_two_interrupts_leave_no_half_epoch() -> None:
    """Of the feeding, and of what tidies up behind it: an epoch has been fed as a whole, and can be read, or not."""
    work = (
        "import random, signal, time, pyarrow as pa, penstock as pk\n"
        "random.seed(3)\n"
        "left = broken = unread = 0\n"
        "def interrupt(*_):\n"
        "    global left\n"
        "    if left:\n"
        "        left -= 1\n"
        "        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 0.2 * takes))\n"
        "        raise KeyboardInterrupt\n"
        "deltas = pk.graph.Deltas('p(a, b) :- e(a, b)')\n"
        "def edges(at):\n"
        "    for half in range(2):\n"
        "        yield pa.record_batch({'a': pa.array([at]), 'b': pa.array([half])})\n"
        "deltas.update({'e': edges(-1)}), deltas.changes().to_table()\n"
        "begin = time.perf_counter()\n"
        "deltas.update({'e': edges(0)})\n"
        "takes, end = time.perf_counter() - begin, begin + 60\n"
        "signal.signal(signal.SIGALRM, interrupt)\n"
        "at = 0\n"
        "while at < 1000 or not (broken and unread) and time.perf_counter() < end:\n"
        "    at += 1\n"
        "    before, rows = deltas.epochs, None\n"
        "    try:\n"
        "        try:\n"
        "            try:\n"
        "                left = 2\n"
        "                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2 * takes))\n"
        "                rows = deltas.update({'e': edges(at)})\n"
        "            finally:\n"
        "                left = 0\n"
        "        except KeyboardInterrupt:\n"
        "            left = 0\n"
        "    except KeyboardInterrupt:\n"
        "        left = 0\n"
        "    fed = deltas.epochs - before\n"
        "    assert fed in ((0, 1) if rows is None else (1,))\n"
        "    broken += not fed\n"
        "    unread += fed and rows is None\n"
        "    if fed:\n"
        "        rows = [(row['a'], row['b']) for row in deltas.changes().to_table().to_pylist()]\n"
        "        assert sorted(rows) == [(at, 0), (at, 1)], rows\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "print(broken > 0, unread > 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "True True\n"), ended.stderr


@pytest.mark.parametrize("stage", ["note", "begin"])
def test_an_interrupt_is_heard_while_an_epoch_is_fed(stage: str) -> None:
    """Of one batch that is noted, or of what was noted and is made an epoch: nothing has changed then."""
    work = (
        "import signal, sys, numpy as np, pyarrow as pa\n"
        "from penstock import _native\n"
        "class Heard(Exception):\n"
        "    pass\n"
        "def alarm(_, frame):\n"
        "    global stage\n"
        "    if stage == sys.argv[1] and frame.f_code is feed.__code__:\n"
        "        stage = None\n"
        "        raise Heard\n"
        "def edges(rows):\n"
        "    global stage\n"
        "    random = np.random.default_rng(rows)\n"
        "    stage = 'note'\n"
        "    yield 'e', pa.record_batch({end: random.integers(0, rows, rows) for end in 'ab'}), 1\n"
        "    stage = 'begin'\n"
        "def feed(edges):\n"
        "    return deltas.feed(None, None, ['e'], edges, 8)[0]\n"
        "def attempt(rows):\n"
        "    global deltas, stage\n"
        "    deltas = _native.GraphDeltas('p(a, b) :- e(a, b)', 'signed')\n"
        "    feed([('e', pa.record_batch({'a': [-1], 'b': [-2]}), 1)])\n"
        "    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)\n"
        "    try:\n"
        "        feed(edges(rows))\n"
        "        stage = None\n"
        "    except Heard:\n"
        "        pass\n"
        "    finally:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "    if deltas.begun > 1:\n"
        "        return False\n"
        "    assert pa.record_batch(deltas.changes().next()).to_pylist() == [{'a': -1, 'b': -2, 'diff': 1}]\n"
        "    changes = feed([('e', pa.record_batch({'a': [-1, -3], 'b': [-2, -4]}), 1)])\n"
        "    assert pa.record_batch(changes.next()).to_pylist() == [{'a': -3, 'b': -4, 'diff': 1}]\n"
        "    assert changes.next() is None and deltas.begun == 2\n"
        "    return True\n"
        "stage = None\n"
        "signal.signal(signal.SIGALRM, alarm)\n"
        "print(any(attempt(1000 << at) for at in range(6, 12)))\n"
    )
    done = subprocess.run([sys.executable, "-c", work, stage], check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_who_asks_for_epochs_waits_for_no_batch() -> None:
    import numpy as np

    random = np.random.default_rng(5)
    deltas = _native.GraphDeltas("p(a, b) :- e(a, b)", "signed")
    feeder = threading.get_ident()
    over = threading.Event()
    answers: list[int] = []

    def feed(edges: Any) -> None:
        deltas.feed(None, None, ["e"], edges, 8)

    def is_feeding() -> bool:
        """Below Python code, so neither before it nor behind it."""
        return sys._current_frames()[feeder].f_code is feed.__code__

    def ask() -> None:
        while not over.wait(0.001):  # leaves the interpreter to the feeder
            if is_feeding():
                begun = deltas.begun
                if is_feeding():
                    answers.append(begun)

    asks = threading.Thread(target=ask)
    asks.start()
    try:
        for at in range(6, 12):
            rows = 1000 << at
            batch = pa.record_batch({end: random.integers(0, rows, rows) for end in "ab"})
            answers.clear()
            feed(iter([("e", batch, 1)]))
            if len(answers) > 20:
                return
    finally:
        over.set()
        asks.join(60)
    raise AssertionError(f"{len(answers)} answers while two million edges are fed")


def test_an_interrupt_ends_a_wait_for_changes_and_loses_none() -> None:
    work = (
        "import itertools, pyarrow as pa, penstock as pk\n"
        "pairs = list(itertools.combinations(range(400), 2))\n"
        "edges = pa.table({'a': [a for a, _ in pairs], 'b': [b for _, b in pairs]})\n"
        "text, _ = pk.graph._patterns.clique(6)\n"
        "deltas = pk.graph.Deltas(text)\n"
        "changes = deltas.stream({'e': edges}, epoch=0, batch_rows=1 << 24)\n"
        "try:\n"
        "    print('go', flush=True)\n"
        "    for _ in changes:  # more than anybody waits for\n"
        "        pass\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped', deltas.stream(epoch=0, batch_rows=10).__next__().num_rows, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"go\n"
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
    assert out == b"stopped 10\n" and child.returncode == 0
