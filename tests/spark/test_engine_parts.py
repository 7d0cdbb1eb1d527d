"""What the engine is made of, without Spark: slots, plans of moves, failures, preflight, secrets."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock._migration import Wish, balanced, moves_to, parse_moves, steps
from penstock.errors import ConfigError, EngineError, KeyNullError, SlotsError, UserFunctionError
from penstock.spark._engine.migrate import Migration, MoveReport
from penstock.spark._engine.moves import Moves
from penstock.spark._engine.preflight import examine, table
from penstock.spark._engine.query import Query
from penstock.spark._tasks.failures import Failure, raise_root, root
from penstock.spark._tasks.place import Secret
from penstock.spark._tasks.slots import from_settings, require_slots


@pytest.mark.parametrize(
    ("master", "conf", "slots"),
    [
        ("local", {}, 1),
        ("local[3,2]", {}, 3),
        ("local[*]", {}, 7),
        ("local[8]", {"spark.task.cpus": "4"}, 2),
        ("local-cluster[2,2,1024]", {}, 4),
        ("yarn", {}, 2),
        ("yarn", {"spark.executor.instances": "4", "spark.executor.cores": "3"}, 12),
        ("k8s://x", {"spark.dynamicAllocation.enabled": "true"}, None),
        ("k8s://x", {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "2"}, 2),
        ("spark://x:7077", {}, None),
        ("spark://x:7077", {"spark.cores.max": "2"}, 2),
    ],
)
def test_capacity(master: str, conf: dict[str, str], slots: int | None) -> None:
    assert from_settings(master, conf, lambda: 7).slots == slots


@pytest.mark.parametrize(
    ("master", "conf", "named"),
    [
        ("local[2]", {}, r"local\[3\]"),
        ("yarn", {"spark.executor.instances": "2"}, "spark.executor.instances=2 with spark.executor.cores=1"),
        (
            "yarn",
            {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "1"},
            "Raise spark.dynamicAllocation.maxExecutors",
        ),
    ],
)
def test_too_few_slots_name_the_setting(master: str, conf: dict[str, str], named: str) -> None:
    with pytest.raises(SlotsError, match=named) as caught:
        require_slots(from_settings(master, conf), 2)
    assert caught.value.needed == 3
    require_slots(from_settings(master, {**conf, "spark.executor.cores": "4"}), 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=64), st.integers(1, 5))
def test_balanced_owners_differ_by_one_and_move_little(owners: list[int], workers: int) -> None:
    owners = [owner % workers for owner in owners]
    target = balanced(owners, workers)
    share = Counter(dict.fromkeys(range(workers), 0))
    share.update(target)
    assert max(share.values()) - min(share.values()) <= 1
    have = Counter(owners)
    least = sum(max(0, have[w] - share[w]) for w in range(workers))
    assert sum(a != b for a, b in zip(owners, target, strict=True)) == least


def test_half_a_million_bins_are_balanced_at_once() -> None:
    """Linear: it runs while a query is locked."""
    began = time.process_time()
    target = balanced([0] * (1 << 19), 4)
    assert Counter(target) == dict.fromkeys(range(4), 1 << 17)
    assert time.process_time() - began < 5.0, "quadratic: minutes"


@given(st.integers(0, 6), st.data(), st.sampled_from(["batched", "all-at-once", "fluid"]), st.integers(1, 70))
def test_steps_move_each_bin_once_to_its_target(bits: int, data: st.DataObject, strategy: str, size: int) -> None:
    workers = st.lists(st.integers(0, 3), min_size=1 << bits, max_size=1 << bits)
    owners, target = [data.draw(workers), data.draw(workers)], data.draw(workers)
    moves = moves_to(owners, target, 4)
    found = steps(owners, moves, strategy, size)
    after = [list(step) for step in owners]
    for step in found:
        assert 0 < len(step) <= {"batched": size, "all-at-once": len(moves), "fluid": 1}[strategy]
        for bin_, worker in step:
            assert any(op[bin_] != worker for op in after)
            for op in after:
                op[bin_] = worker
    assert after == [target, target]
    assert sum(len(step) for step in found) == len(moves)


def test_rows_are_fed_again_only_after_the_earlier_ones_are_discarded() -> None:
    """They come over other connections than the discard, which would take them along."""
    calls: list[tuple[str, dict[str, Any], list[str]]] = []

    class Members:
        members = ("a", "b")

        def ready(self, *_: Any) -> None:
            pass

        def answers(self, sent: Any, epoch: int, check: Any) -> None:
            for call in sent:
                call[2].append("answered")

    class Calls:
        def call(self, member: str, request: dict[str, Any]) -> Any:
            calls.append((member, request, []))
            return calls[-1]

    query = Query.__new__(Query)
    vars(query).update(_generations=Members(), _hub=Calls(), id="q", completed=6, _watermark=None, _fed=7)
    query._ready(7, lambda: None)
    discard = {"do": "discard", "query": "q", "epoch": 7}
    assert calls == [("a", discard, ["answered"]), ("b", discard, ["answered"])]
    query._ready(7, lambda: None)
    assert len(calls) == 2, "nothing was fed since"


def test_moves_that_make_no_sense_are_refused() -> None:
    for moves in ({4: 0}, {0: 2}, {-1: 0}, [(0, 1), (0, 0)], [(0,)], {"0": 1}, {True: 1}):
        with pytest.raises(ConfigError):
            parse_moves(moves, 4, 2)  # type: ignore[arg-type]
    for target in ([0], [0, 0, 0], [0, 2]):
        with pytest.raises(ConfigError):
            moves_to([[0, 1]], target, 2)
    with pytest.raises(ConfigError, match="strategy"):
        steps([[0, 0]], [(0, 1)], "hasty", 1)
    with pytest.raises(ConfigError, match="batch_size"):
        steps([[0, 0]], [(0, 1)], "batched", 0)


def test_a_migration_ends_when_all_its_queries_have() -> None:
    handle = Migration()
    first = handle.begin(MoveReport("a", "fluid"))
    second = handle.begin(MoveReport("b", "fluid"))
    handle.seal()
    first({"moved": 3, "bytes": 10, "steps": [{"step": 0, "bins": 3, "started_ns": 1, "ended_ns": 2}]}, None)
    assert not handle.done
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.05)
    second(None, EngineError("cancelled"))
    assert handle.done
    with pytest.raises(EngineError, match="cancelled"):
        handle.wait()
    assert handle.report.bins == 3 and handle.report.queries == ("a", "b")


class Bins:
    """Owners that follow the plans that are made, each when the test says so."""

    def __init__(self, owners: list[int]) -> None:
        self.owners = owners
        self.broken = False
        self.open: list[Any] = []
        self.stopped = 0
        self.moves = Moves(self.begin)

    def ask(self, to: list[int] | None = None) -> Migration:
        handle = Migration()
        self.moves.add(handle, "q", Wish(None if to is None else tuple(to), None, "all-at-once", 1))
        handle.seal()
        return handle

    def begin(self, wish: Wish, started: Any, ended: Any) -> Any:
        if self.broken:
            raise EngineError("its bins cannot move now")
        (plan,) = wish.plan([self.owners], 2, len(self.owners), "q") or ([],)
        started(len(plan))
        if not plan:
            ended({"moved": 0}, None)
            return None

        def end() -> None:
            for bin_, worker in plan:
                self.owners[bin_] = worker
            ended({"moved": len(plan)}, None)

        def stop() -> None:
            self.stopped += 1

        self.open.append(end)
        return stop


def test_migrations_take_turns_and_plan_when_theirs_comes() -> None:
    bins = Bins([0, 0, 1, 1])
    there, back, even = bins.ask([1, 1, 1, 1]), bins.ask([0, 0, 1, 1]), bins.ask()
    assert len(bins.open) == 1 and not there.done and not back.done
    bins.open.pop()()
    assert there.wait(1).bins == 2 and not back.done, "as it was before is a move now"
    bins.open.pop()()
    assert back.wait(1).bins == 2
    assert even.wait(1).bins == 0 and bins.owners == [0, 0, 1, 1]
    assert back.reports[0].started >= there.reports[0].ended > 0


def test_a_migration_that_waits_can_be_cancelled() -> None:
    bins = Bins([0, 0])
    first, second, third = bins.ask([1, 1]), bins.ask([0, 1]), bins.ask([0, 0])
    second.cancel()
    assert second.wait(1).bins == 0 and bins.stopped == 0 and not first.done
    first.cancel()
    assert bins.stopped == 1
    bins.open.pop()()
    bins.open.pop()()
    assert first.wait(1).bins == 2 == third.wait(1).bins and bins.owners == [0, 0]


def test_many_migrations_may_end_at_once() -> None:
    bins = Bins([0, 0])
    first, rest = bins.ask([1, 1]), [bins.ask([1, 1]) for _ in range(5_000)]
    bins.broken = True
    bins.open.pop()()
    assert first.wait(1).bins == 2
    for handle in rest:
        with pytest.raises(EngineError, match="cannot move now"):
            handle.wait(1)


def test_the_root_failure_is_raised_with_the_users_exception() -> None:
    cause = ZeroDivisionError("division by zero")
    error = UserFunctionError("map_batches[0] f: boom", step="map_batches[0] f", file="a.py", line=3)
    error.__cause__ = cause
    import cloudpickle

    own = Failure(2, {"kind": "user_function", "message": "boom", "step": "map_batches[0] f"}, cloudpickle.dumps(error))
    echo = Failure(1, {"kind": "operator", "message": "worker 1 failed"})
    assert root([echo, own]) is own
    with pytest.raises(UserFunctionError) as caught:
        raise_root([echo, own])
    assert caught.value.line == 3
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(UserFunctionError, match="boom"):
        raise_root([Failure(2, {"kind": "user_function", "message": "boom"}, b"no pickle")])
    with pytest.raises(KeyNullError) as null:
        raise_root([Failure(2, {"kind": "null_key", "message": "null", "column": "k", "row": 4})])
    assert (null.value.column, null.value.row) == ("k", 4)
    with pytest.raises(EngineError, match="strange"):
        raise_root([Failure(2, {"kind": "never heard of", "message": "strange"})])


def test_preflight_names_everything_that_is_wrong() -> None:
    here = {"penstock": "0.1.0", "python": "3.11.2", "pyarrow": "21.0.0"}
    good = {**here, "host": "a", "jvm": "7"}
    assert examine(good, here, "d:1") == []
    assert examine({**good, "pyarrow": "21.3.0", "python": "3.11.9"}, here, "d:1") == []
    bad = {"host": "b", "jvm": "8", "python": "3.10.1", "penstock_error": "no module", "registry_error": "refused"}
    bad["pyarrow"] = "14.0.0"
    text = table(examine(bad, here, "d:1"))
    for word in ("penstock cannot", "venv-pack", "pyarrow 14.0.0", "Python 3.10.1", "spark.driver.host", "b (JVM 8)"):
        assert word in text


def test_a_secret_shows_itself_to_nobody() -> None:
    secret = Secret.random()
    assert secret.reveal().hex() not in repr(secret) + str(secret) + f"{secret!r:>40}"
    assert pickle.loads(pickle.dumps(secret)).reveal() == secret.reveal()
    with pytest.raises(TypeError):
        assert secret == secret


def test_slots_of_other_engines_count() -> None:
    four = from_settings("local[4]", {})
    require_slots(four, 1, {"first": 2})
    with pytest.raises(SlotsError, match=r"engine first holds 2.*5; local\[4\] allows 4.*close the other") as caught:
        require_slots(four, 2, {"first": 2})
    assert caught.value.needed == 5


def test_a_function_that_does_not_pickle_is_named() -> None:
    lock = threading.Lock()
    flow = pk.Flow("k bigint").map_batches(lambda batch: batch)
    flow = flow.map_batches(lambda batch: batch if lock else None)
    with pytest.raises(ConfigError, match=r"map_batches\[1\] <lambda>: the function cannot be sent.*lock"):
        flow.map_in_arrow()
