"""Loads evened out unaided: the rules with a pretended engine, and a skewed query on a local cluster."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import COUNTS, Kept, counted, frame, numbers, state, wait_for
from penstock import _native
from penstock._autobalance import Autobalance, Looked, Rules, see_through
from penstock._loads import Loads
from penstock._parts import Parts
from penstock.errors import ConfigError, EngineError, PenstockError, SlotsError
from penstock.spark._engine.autobalance import Balanced
from penstock.spark._engine.record import Recorder


class Pretended:
    """Two workers with four bins; what comes for each is set by the test."""

    def __init__(self) -> None:
        self.bins = [(bin_, 2) for bin_ in range(4)]
        self.owners = [0, 0, 1, 1]
        self.loads = [0, 0, 0, 0]
        self.bytes: list[int | None] = [0, 0, 0, 0]
        self.rows = 0
        self.busy_s = 0.0
        self.offered: float | None = None
        self.generation = 1
        self.sizes: list[int] = []
        self.recuts: list[tuple[dict[tuple[int, int], int], list[tuple[int, int]]]] = []
        self.fails = False
        self.threads = 1
        self.whole: str | None = None
        #: Nanoseconds that each bin has kept workers busy, where that is measured.
        self.busy_ns: list[int] = []
        #: Processes that the engine says it has; the query's workers are their threads.
        self.workers: int | None = 2
        self.told: list[dict[str, Any]] = []

    def come(self, *rows: int) -> None:
        self.loads = [before + more for before, more in zip(self.loads, rows, strict=True)]
        self.rows += sum(rows)

    def looked(self) -> Iterator[Looked]:
        if self.fails:
            raise EngineError("a member was lost")
        yield Looked(
            "q",
            self.generation,
            2,
            list(self.bins),
            list(self.owners),
            2,
            self.counted(),
            list(self.bytes),
            self.rows,
            self.busy_s,
            self.offered,
        )

    def counted(self) -> Loads:
        rows = [0] * 4
        for (prefix, bits), came in zip(self.bins, self.loads, strict=True):
            rows[prefix >> (bits - 2)] += came
        parts = {
            1 << bits | prefix: came for (prefix, bits), came in zip(self.bins, self.loads, strict=True) if bits > 2
        }
        return Loads([{"rows": rows, "part_rows": parts, "spent_ns": list(self.busy_ns)}])

    def move(self, query: str, moves: Mapping[tuple[int, int], int], stopping: Callable[[], bool]) -> None:
        assert query == "q" and not stopping()
        for part, worker in moves.items():
            self.owners[self.bins.index(part)] = worker

    def recut(
        self,
        query: str,
        splits: Mapping[tuple[int, int], int],
        merges: Sequence[tuple[int, int]],
        stopping: Callable[[], bool],
    ) -> None:
        assert query == "q" and not stopping()
        self.recuts.append((dict(splits), list(merges)))
        for (prefix, bits), by in splits.items():
            at = self.bins.index((prefix, bits))
            self.bins[at : at + 1] = [(prefix << by | low, bits + by) for low in range(1 << by)]
            self.owners[at : at + 1] = [self.owners[at]] * (1 << by)
            self.loads[at : at + 1] = [self.loads[at] >> by] * (1 << by)
            self.bytes[at : at + 1] = [(self.bytes[at] or 0) >> by] * (1 << by)
        for prefix, bits in merges:
            within = [at for at, one in enumerate(self.bins) if one[0] >> (one[1] - bits) == prefix]
            self.loads[within[0] : within[-1] + 1] = [sum(self.loads[at] for at in within)]
            self.bytes[within[0] : within[-1] + 1] = [sum(self.bytes[at] or 0 for at in within)]
            del self.bins[within[0] + 1 : within[-1] + 1], self.owners[within[0] + 1 : within[-1] + 1]
            self.bins[within[0]] = (prefix, bits)

    def resize(self, workers: int) -> None:
        self.sizes.append(workers)

    def tell(self, query: str, advised: bool, **facts: Any) -> None:
        assert query == "q"
        self.told.append({"advised": advised, **{name: fact for name, fact in facts.items() if fact is not None}})

    def failed(self, error: PenstockError) -> None:
        self.told.append({"reason": str(error)})


class Several:
    """Queries of one engine, each of which gets 100 rows a look and is busy with them for as long as it says."""

    threads = 1
    whole = None

    def __init__(self, workers: int, stateless: Iterable[str] = (), **queries: tuple[float, float]) -> None:
        """Of each query the rows per second that come, and those that a worker does in a busy second."""
        self.stateless = set(stateless)
        self.workers: int | None = workers
        self.queries = queries
        self.of = {name: Pretended() for name in queries}
        self.sizes: list[int] = []

    def come(self) -> None:
        for name, (offered, rate) in self.queries.items():
            one = self.of[name]
            one.come(25, 25, 25, 25)
            one.offered = offered
            one.busy_s += 100 / rate

    def looked(self) -> Iterator[Looked]:
        for name, one in self.of.items():
            bare: dict[str, Any] = {"bins": [], "owners": [], "bytes": [], "loads": Loads()}
            bare = bare if name in self.stateless else {}
            yield from (replace(looked, query=name, **bare) for looked in one.looked())

    def move(self, query: str, moves: Mapping[tuple[int, int], int], stopping: Callable[[], bool]) -> None:
        raise AssertionError(f"{query} is even")

    recut = move  # type: ignore[assignment]

    def resize(self, workers: int) -> None:
        self.sizes.append(workers)
        self.workers = workers

    def tell(self, query: str, advised: bool, **facts: Any) -> None:
        assert query in self.of

    def failed(self, error: PenstockError) -> None:
        raise error


def rules(**changed: Any) -> Rules:
    plain: dict[str, Any] = {
        "every_s": 1.0,
        "trigger": 1.5,
        "tolerance": 1.2,
        "patience": 2,
        "least_rows": 10,
        "most_bytes": 64 << 20,
        "workers": None,
        "dry_run": False,
    }
    return Rules(**{**plain, **changed})


def test_bins_move_when_skew_stands_and_a_new_generation_is_looked_at_afresh() -> None:
    engine = Pretended()
    balance = Autobalance(engine, rules(), "t")
    for look in range(3):
        balance.look(float(look))
        engine.come(40, 40, 10, 10)
    assert [one.why for one in balance.looks] == ["skewed, 1 looks before anything moves", "skewed"]
    assert balance.looks[-1].moves == 1 and balance.looks[-1].skew == pytest.approx(1.6)
    assert sorted(engine.owners) == [0, 1, 1, 1]
    assert repr(balance) == "<Autobalance every 1 s: 2 looks, 1 with something to do>"
    engine.generation, engine.loads = 2, [0, 0, 0, 0]
    balance.look(3.0)
    assert len(balance.looks) == 2, "counts that began again are no load"
    engine.fails = True
    with pytest.raises(EngineError):
        balance.look(4.0)


@pytest.mark.parametrize(("by", "owners"), [("busy", [0, 1, 1, 1]), ("rows", [0, 0, 1, 1])])
def test_bins_move_by_what_they_cost_where_that_is_asked_for(by: str, owners: list[int]) -> None:
    engine = Pretended()
    engine.busy_ns = [0] * 4
    balance = Autobalance(engine, rules(by=by), "t")
    for look in range(3):
        balance.look(float(look))
        engine.come(25, 25, 25, 25)
        engine.busy_ns = [before + more for before, more in zip(engine.busy_ns, (40, 40, 10, 10), strict=True)]
    assert sorted(engine.owners) == owners and {look.by for look in balance.looks} == {by}
    # A look with few rows says nothing, whatever they took.
    balance.look(3.0)
    engine.come(1, 1, 1, 1)
    engine.busy_ns[0] += 10**9
    balance.look(4.0)
    assert balance.looks[-1].why == "too few rows to judge"


def test_a_dry_run_tells_and_does_nothing() -> None:
    engine = Pretended()
    engine.offered = 1_000.0
    balance = Autobalance(engine, rules(dry_run=True, workers=(1, 8)), "t")
    for look in range(3):
        balance.look(float(look))
        engine.come(40, 40, 10, 10)
        engine.busy_s += 1.0
    assert engine.owners == [0, 0, 1, 1] and engine.sizes == []
    waits, acts = balance.looks
    # 100 rows a busy second, 1,000 offered, four fifths busy: 12.5 workers; 8 are allowed.
    because = "the query keeps 10.00 busy, each may be for 80%, 1 to 8 are allowed"
    assert (waits.needed, waits.workers, waits.moves) == (8, None, 0)
    assert waits.why == f"skewed, 1 looks before anything moves; 1 looks before 2 workers become 8: {because}"
    assert (acts.needed, acts.workers, acts.moves) == (8, 8, 1)
    assert acts.why == f"skewed; 2 workers would become 8: {because}"
    told = {"bins": 1, "workers": 8, "skew": pytest.approx(1.6), "expected": pytest.approx(1.2), "reason": acts.why}
    assert engine.told == [{"advised": True, **told}]


def test_a_hot_bin_is_split_moved_and_merged_when_it_has_cooled() -> None:
    engine, dry = Pretended(), Pretended()
    balance, told = Autobalance(engine, rules(), "t"), Autobalance(dry, rules(dry_run=True), "dry")
    for look in range(3):
        for one, at in ((balance, engine), (told, dry)):
            one.look(float(look))
            if look < 2:
                at.come(90, 4, 3, 3)
    assert engine.recuts == [({(0, 2): 2}, [])] and engine.bins == [
        *((low, 4) for low in range(4)),
        (1, 2),
        (2, 2),
        (3, 2),
    ]
    assert dry.recuts == [] and [(one["advised"], one["splits"]) for one in dry.told] == [(True, "0/2")]
    assert [(one["advised"], one["splits"]) for one in engine.told] == [(False, "0/2")]
    assert (
        [(one.splits, one.merges) for one in balance.looks]
        == [(0, 0), (1, 0)]
        == [(one.splits, one.merges) for one in told.looks]
    )
    # The look after it compares nothing; then its parts move like bins.
    for look in range(3, 7):
        engine.come(22, 23, 22, 23, 4, 3, 3)
        balance.look(float(look))
    assert balance.looks[-1].why == "even" and {0, 1} == set(engine.owners[:4])
    for look in range(7, 15):
        assert len(engine.recuts) == 1
        engine.come(1, 0, 1, 0, 30, 30, 30)
        balance.look(float(look))
    assert engine.recuts[1:] == [({}, [(0, 2)])] and len(engine.bins) == 4
    assert engine.told[-1]["merges"] == "0/2"


def test_a_bin_more_than_there_are_workers_for_is_split() -> None:
    """Three busy ones on two workers stayed 4 : 2 for ever, with a reason that was not true."""
    engine, dry = Pretended(), Pretended()
    balance = Autobalance(engine, rules(trigger=1.3, tolerance=1.1), "t")
    told = Autobalance(dry, rules(trigger=1.3, tolerance=1.1, dry_run=True), "dry")
    for look in range(3):
        for one, at in ((balance, engine), (told, dry)):
            one.look(float(look))
            if look < 2:
                at.come(40, 40, 40, 0)
    said = "bin 1 fills worker 0 up: moving bins does not help, splitting it does"
    assert balance.looks[-1].why == told.looks[-1].why == said
    assert engine.recuts == [({(1, 2): 2}, [])] and told.looks[-1].splits == 1
    for look in range(3, 8):
        engine.come(40, *[10] * 4, 40, 0)
        balance.look(float(look))
    assert balance.looks[-1].why == "even" and len(engine.recuts) == 1, balance.looks


def test_a_bin_that_holds_too_much_is_split_and_says_why() -> None:
    engine, dry = Pretended(), Pretended()
    balance, told = Autobalance(engine, rules(), "t"), Autobalance(dry, rules(dry_run=True), "dry")
    for look in range(4):
        for one, at in ((balance, engine), (told, dry)):
            if look == 1:
                at.bytes[3], at.bytes[1] = 210 << 20, 65 << 20
            one.look(float(look))
    held = "bin 3 holds 210 MiB, limit 64 MiB"
    # Rows are too few to judge loads by; four limits are split at a look, and parts are looked at afresh.
    assert [one.why for one in balance.looks] == [
        f"too few rows to judge; {held}: 1 looks before it is split, and 1 more",
        f"too few rows to judge; {held}: 4 parts, and 1 more",
    ]
    assert engine.recuts == [({(3, 2): 2}, [])] and dry.recuts == []
    assert [one["splits"] for one in dry.told] == ["3/2", "1/2"] and f"{held}: 4 parts" in dry.told[0]["reason"]
    balance.look(4.0)
    assert engine.recuts[1:] == [({(1, 2): 1}, [])]
    assert [one.splits for one in told.looks] == [0, 1, 1]
    # What nobody tells the size of stays.
    engine.bytes = [None] * len(engine.bytes)
    for look in range(5, 20):
        balance.look(float(look))
        engine.come(*[5] * len(engine.bins))
    assert len(engine.recuts) == 2


def test_the_number_of_workers_follows_what_is_offered() -> None:
    engine = Pretended()
    engine.offered = 250.0
    balance = Autobalance(engine, rules(workers=(1, 8)), "t")
    for look in range(4):
        balance.look(float(look))
        engine.come(25, 25, 25, 25)
        engine.busy_s += 1.0
    assert engine.sizes == [4], "250 rows/s at 100 a busy second and 0.8"
    assert [one.workers for one in balance.looks] == [None, 4, None]
    assert balance.looks[1].why.startswith("even; 2 workers become 4: the query keeps 2.50 busy")
    # While workers come nothing is asked for.
    engine.workers = None
    for look in range(4, 14):
        engine.come(25, 25, 25, 25)
        engine.busy_s += 1.0
        balance.look(float(look))
    assert engine.sizes == [4] and balance.looks[-1].needed is None
    engine.workers = 4
    for look in range(14, 30):
        balance.look(float(look))
    assert engine.sizes == [4], "between two batches nothing is new"
    for look in range(30, 36):
        assert engine.sizes == [4]
        engine.offered -= 40.0
        balance.look(float(look))
    assert engine.sizes == [4, 3], "the longer nothing comes, the less it is"
    engine.workers, engine.offered = 3, 0.0
    for look in range(36, 42):
        assert engine.sizes == [4, 3]
        balance.look(float(look))
    assert engine.sizes == [4, 3, 1], "a query that has ended gets nothing"


class Two:
    """Queries a and b of one engine, of which a is skewed; both have more to do than there are workers for."""

    threads, whole = 1, None

    def __init__(self) -> None:
        self.workers = 2
        self.looks = 0
        self.sizes: list[int] = []
        self.failures: list[str] = []
        self.left: Any = None

    def looked(self) -> Iterator[Looked]:
        self.looks += 1
        for query in "ab":
            rows = [1_000 * self.looks * (bin_ % 2 == 0 or query == "b") for bin_ in range(4)]
            bins, owners = [(bin_, 2) for bin_ in range(4)], [bin_ % 2 for bin_ in range(4)]
            loads = Loads([{"rows": rows}])
            yield Looked(query, 1, 2, bins, owners, 2, loads, [1] * 4, sum(rows), self.looks * 5.0, 8_000.0)

    def move(self, query: str, moves: Mapping[tuple[int, int], int], stopping: Callable[[], bool]) -> Any:
        assert query == "a"
        if self.left is None:
            raise RuntimeError("query a does not run")
        return see_through(self.left, stopping)

    def recut(self, *_: Any) -> None:
        raise AssertionError

    def resize(self, workers: int) -> None:
        self.sizes.append(self.looks)

    def tell(self, query: str, advised: bool, **facts: Any) -> None:
        pass

    def failed(self, error: Exception) -> None:
        self.failures.append(f"{type(error).__name__}: {error}")


def test_moves_of_one_query_that_are_refused_hold_up_no_other_and_no_resize(caplog: pytest.LogCaptureFixture) -> None:
    engine = Two()
    balance = Autobalance(engine, rules(by="rows", patience=3, workers=(1, 8)), "t")
    for look in range(30):
        balance.look(float(look))
    assert engine.failures and set(engine.failures) == {"RuntimeError: query a does not run"}
    assert [sum(look.query == query for look in balance.looks) for query in "ab"] == [29, 29]
    assert engine.sizes == list(range(4, 31, 3)), "as soon as it stood for three looks, each time"
    [record] = [one for one in caplog.records if one.name == "penstock._autobalance"]
    assert record.levelname == "WARNING" and "query a does not run" in record.getMessage(), "once"


class Clock:
    """Stands still but where somebody waits, or the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Endless:
    """Moves that do not end before somebody says so."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.cancels, self.ended = clock, 0, False

    def _wait(self, seconds: float) -> bool:
        self.clock.now += 0.0 if self.ended else seconds
        return self.ended

    def cancel(self) -> None:
        self.cancels += 1

    def wait(self, timeout: float) -> None:
        assert self.ended


def test_moves_that_do_not_end_are_told_of_and_hold_up_no_other_query_and_no_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for them for ever, and posted a cancel ten times a second."""
    monkeypatch.setattr("penstock._autobalance._SEEN_S", 0.1)
    monkeypatch.setattr("penstock._autobalance._END_S", 0.5)
    clock = Clock()
    monkeypatch.setattr("penstock._autobalance.time", clock)
    engine, moves = Two(), Endless(clock)
    engine.left = moves
    balance = Autobalance(engine, rules(by="rows", patience=1), "t")
    for look in range(5):
        balance.look(float(look))
    of_a, of_b = ([look.why for look in balance.looks if look.query == query] for query in "ab")
    assert of_a == ["skewed", *["moves are under way"] * 3] and of_b == ["even"] * 4
    assert (engine.failures, moves.cancels) == ([], 0)
    clock.now += 0.5
    balance.look(5.0)
    balance.look(6.0)
    [told] = engine.failures
    assert told.startswith("EngineError: the moves of query a have not ended in 0.5 s") and moves.cancels == 1
    moves.ended = True
    balance.look(7.0)
    assert [look.why for look in balance.looks if look.query == "a"][-1] != "moves are under way"
    # Nobody looks any more: one cancel, and no long wait.
    moves, began = Endless(clock), clock.now
    assert see_through(moves, lambda: True) is moves
    assert moves.cancels == 1 and clock.now < began + 1


def test_workers_that_leave_get_nothing_back() -> None:
    """They looked idle when they had given their bins away, and got half of them again."""
    engine = Asked()
    engine.query.leaving = [1]
    balance = Autobalance(Balanced(engine), rules(patience=1, least_rows=1_000), "t")
    for look in range(10):
        engine.looks += 1
        balance.look(float(look))
    assert {look.why for look in balance.looks} == {"1 of 2 workers leave, and give their bins away first"}


def test_workers_that_are_busy_while_nothing_comes_are_not_too_many() -> None:
    """It said that the query keeps 0.00 busy, and took workers away."""
    engine = Pretended()
    engine.offered = 0.0
    balance = Autobalance(engine, rules(patience=1, workers=(1, 8)), "t")
    for look in range(10):
        balance.look(float(look))
        engine.busy_s += 1.0
    assert engine.sizes == [] and all(look.needed is None for look in balance.looks)
    # What a question costs is no work.
    for look in range(10, 14):
        balance.look(float(look))
        engine.busy_s += 0.001
    assert engine.sizes == [1]


def test_it_goes_to_as_many_workers_as_there_are_slots_for() -> None:
    """It asked for all or nothing, got nothing, and asked again for ever."""

    class Bounded(Pretended):
        def room(self, workers: int) -> int:
            return min(workers, 4)

        def resize(self, workers: int) -> None:
            if workers > 4:
                raise SlotsError("there are slots for 4")
            super().resize(workers)
            self.workers = workers

    engine = Bounded()
    engine.offered = 1_000.0
    balance = Autobalance(engine, rules(workers=(1, 16)), "t", engine.room)
    for look in range(12):
        balance.look(float(look))
        engine.come(25, 25, 25, 25)
        engine.busy_s += 1.0
    because = "the query keeps 10.00 busy, each may be for 80%, 1 to 16 are allowed"
    assert engine.sizes == [4] and [one["workers"] for one in engine.told] == [4]
    told = [look.why for look in balance.looks]
    assert told[0] == f"even; 1 looks before 2 workers become 4, on the way to 13: {because}"
    assert told[1] == f"even; 2 workers become 4, on the way to 13: {because}"
    assert told[-1] == f"even; 4 workers stay, task slots for 13 cannot be had now: {because}"
    assert balance.looks[-1].needed == 13


def test_what_is_asked_of_an_engine_is_what_its_slots_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("penstock.spark._engine.autobalance.time", clock)
    now, asked = 0.0, []

    def rescale(workers: int) -> Any:
        asked.append(SimpleNamespace(workers=workers, error=None))
        return asked[-1]

    def on(master: str, **settings: str) -> tuple[Any, Balanced]:
        conf = SimpleNamespace(getAll=settings.items, get=settings.get)
        sc = SimpleNamespace(master=master, getConf=lambda: conf)
        engine = SimpleNamespace(threads=1, workers=2, rescale=rescale, _spark=SimpleNamespace(sparkContext=sc))
        return engine, Balanced(engine)

    _, bounded = on("local[3]")
    # Nobody holds a slot here, and one is for the queries' tasks.
    assert [bounded.room(workers) for workers in (1, 3, 4, 8)] == [1, 3, 4, 4]
    assert on("local[1]")[1].room(8) == 2
    engine, unbounded = on("k8s://x", **{"spark.dynamicAllocation.enabled": "true"})
    assert unbounded.room(8) == 3
    unbounded.resize(3)
    assert unbounded.room(8) == 3, "it is under way"
    # It came; the next one does not, within the time that a start may take.
    engine.workers = 3
    assert unbounded.room(8) == 4
    unbounded.resize(4)
    asked[-1].error = SlotsError("too late")
    assert (unbounded.room(8), unbounded.room(2)) == (3, 2)
    now = 599.0
    assert unbounded.room(8) == 3
    now = 601.0
    assert unbounded.room(8) == 4
    assert [one.workers for one in asked] == [3, 4]
    # Where several did not come, though a setting allows them, one may.
    engine, bounded = on("local[9]")
    bounded.resize(bounded.room(6))
    asked[-1].error = SlotsError("too late")
    assert bounded.room(6) == 3
    engine.workers = 5
    assert bounded.room(8) == 5


def test_workers_of_several_threads_are_counted_as_processes() -> None:
    engine = Pretended()
    engine.threads, engine.workers, engine.offered = 2, 1, 240.0
    balance = Autobalance(engine, rules(workers=(1, 8)), "t")

    def look(looks: int) -> None:
        for at in range(looks):
            engine.come(25, 25, 25, 25)
            engine.busy_s += 1.0
            balance.look(float(at))

    look(3)
    assert engine.sizes == [2], "three threads, so two processes"
    engine.workers = 2
    look(20)
    assert engine.sizes == [2] and balance.looks[-1].needed == 2, "which is what there is"
    engine.workers = 4
    look(6)
    assert engine.sizes == [2, 2], "four processes for the work of three threads are too many"


@pytest.mark.parametrize(
    ("workers", "queries", "sizes", "needed"),
    [
        pytest.param(4, {"a": (20.0, 100.0), "b": (300.0, 100.0)}, [], 4, id="one has too many, the other just enough"),
        pytest.param(2, {"a": (160.0, 100.0), "b": (160.0, 100.0)}, [3], 3, id="each has enough, both have not"),
        pytest.param(4, dict.fromkeys("abcde", (8.0, 100.0)), [1], 1, id="five small ones share a worker"),
        pytest.param(4, {"a": (20.0, 100.0), "b": (math.nan, 100.0)}, [], 1, id="what is not known may need all"),
    ],
)
def test_what_all_queries_need_is_decided_once(
    workers: int, queries: dict[str, tuple[float, float]], sizes: list[int], needed: int
) -> None:
    engine = Several(workers, **queries)
    balance = Autobalance(engine, rules(workers=(1, 8)), "t")
    for look in range(30):
        balance.look(float(look))
        engine.come()
    assert engine.sizes == sizes
    assert balance.looks[-1].needed == needed


@pytest.mark.parametrize(
    ("workers", "beside", "sizes"),
    [
        pytest.param(2, {"keyed": (8.0, 100.0)}, [4], id="too few"),
        pytest.param(4, {"keyed": (8.0, 100.0)}, [], id="enough"),
        pytest.param(2, {}, [4], id="alone"),
    ],
)
def test_queries_without_state_count_for_the_number_of_workers(
    workers: int, beside: dict[str, tuple[float, float]], sizes: list[int]
) -> None:
    """It went down while one of them had all workers busy."""
    engine = Several(workers, ["plain"], plain=(320.0, 100.0), **beside)
    balance = Autobalance(engine, rules(workers=(1, 8)), "t")
    for look in range(30):
        balance.look(float(look))
        engine.come()
    assert engine.sizes == sizes
    looks = [look for look in balance.looks if look.query == "plain"]
    if sizes:
        assert looks[0].why.startswith("keeps no state; 1 looks before 2 workers become 4: ")
    assert (looks[-1].why, looks[-1].needed, looks[-1].skew) == ("keeps no state", 4, 1.0)


def test_a_query_without_state_is_looked_at() -> None:
    row = {"query": "plain", "generation": 3, "rows": 100, "busy_s": 2.0}
    told = SimpleNamespace(generation=3, loads=Loads(), bytes_of=None, workers=2)
    recorder = SimpleNamespace(loads=lambda query: told, refresh=lambda: None, latest=lambda: [row])
    queries = [
        SimpleNamespace(
            id=name, name=name, running=name == "plain", workers=2, leaving=[], parts=lambda: None, fed=None
        )
        for name in ("plain", "over")
    ]
    engine = SimpleNamespace(
        threads=1,
        _recorder=recorder,
        _commits=SimpleNamespace(facts=lambda query: SimpleNamespace(offered=lambda fed: 40.0)),
        _queries=SimpleNamespace(all=lambda: queries),
    )
    [looked] = Balanced(engine).looked()
    assert (looked.query, looked.bins, looked.owners, looked.bytes) == ("plain", [], [], [])
    assert (looked.rows, looked.busy_s, looked.offered, looked.missing) == (100, 2.0, 40.0, "")
    told.workers = 1
    assert next(iter(Balanced(engine).looked())).missing == "figures of 1 of 2 workers have not come"


class Asked:
    """An engine with two workers, whose members tell of eight bins; some do not at some looks."""

    def __init__(self) -> None:
        self.looks = 0
        self.silent: dict[int, list[int]] = {}
        hub = SimpleNamespace(
            listen=lambda **_: None, members=lambda: [0, 1], call=self.call, wait=lambda *_, **__: None
        )
        parts = Parts(3, {(bin_, 3): bin_ % 2 for bin_ in range(8)})
        query = SimpleNamespace(id="q", name="q", running=True, workers=2, leaving=[], parts=lambda: parts, fed=None)
        self.query, self.threads, self.workers = query, 1, 2
        self._require_open = lambda: None
        self._recorder = Recorder(hub, "asked", {"q": "q"}.get)  # type: ignore[arg-type]
        self._commits = SimpleNamespace(facts=lambda query: SimpleNamespace(offered=lambda fed: None))
        self._queries = SimpleNamespace(all=lambda: [query], find=lambda name: query)
        self._executor = SimpleNamespace(rescaling=lambda: None)

    def call(self, member: int, asked: Mapping[str, Any], hook: Any) -> Any:
        figures = {
            "generation": 1,
            "group": {"workers": [{"worker": member}]},
            "loads": {
                "steps": [
                    {
                        "rows": [500 * self.looks] * 8,
                        "spent_ns": [100_000_000 * self.looks * (bin_ % 2 == member) for bin_ in range(8)],
                    }
                ],
                "bytes": [[(bin_, 3, 1) for bin_ in range(8) if bin_ % 2 == member]],
            },
        }
        # Its control loop may be busy, too.
        busy: dict[str, Any] = {"queries": {"q": {"busy": True}} if self.looks % 2 else {}}
        body = busy if member in self.silent.get(self.looks, ()) else {"queries": {"q": figures}}
        return SimpleNamespace(lost=None, failure=None, body=body)


def test_a_member_that_does_not_tell_at_one_look_is_not_taken_for_one_that_did_all_its_work_at_the_next() -> None:
    engine = Asked()
    engine.silent = {100: [1], 101: [0], 102: [0, 1], 110: [1]}
    balance = Autobalance(Balanced(engine), rules(patience=3, least_rows=1_000), "t")
    for look in range(130):
        engine.looks += 1
        balance.look(float(look))
    looks = balance.looks
    assert not any(look.moves or look.splits for look in looks), looks
    assert max(look.skew for look in looks) < 1.1
    told = [look.why for look in looks if look.why != "even"]
    assert told == [f"figures of {count} of 2 workers have not come" for count in (1, 1, 2, 1)]
    with pytest.raises(EngineError, match=r"rebalance\(by='busy'\).* 1 of 2 workers have not come; ask again"):
        engine.silent[engine.looks] = [0]
        pk.Engine.rebalance(engine, by="busy")  # type: ignore[arg-type]


def test_busy_time_told_at_the_end_of_a_batch_is_that_of_all_its_rows() -> None:
    engine = Pretended()
    engine.offered = 250.0
    balance = Autobalance(engine, rules(workers=(1, 8)), "t")
    balance.look(0.0)
    for batch in range(2):
        for look in range(4):
            engine.come(25, 25, 25, 25)
            engine.busy_s += 4.0 * (look == 3)
            balance.look(1.0 + 4 * batch + look)
    assert [one.needed for one in balance.looks] == 2 * [None, None, None, 4]
    assert engine.sizes == [4], "two batches in a row asked for more"


def workers_of(engine: pk.Engine, keys: Iterable[int]) -> dict[int, int]:
    """The worker of each key."""
    owners = {(row["prefix"], row["bits"]): row["worker"] for row in engine.bins().to_pylist()}
    keys = list(keys)
    hashed = _native.hash_columns(pa.record_batch({"k": pa.array(keys, pa.int64())}), ["k"])
    found = {}
    for key, value in zip(keys, pa.record_batch(hashed).column(0).to_pylist(), strict=True):
        [found[key]] = [worker for (prefix, bits), worker in owners.items() if value >> (64 - bits) == prefix]
    return found


def skew(engine: pk.Engine, rows: Mapping[int, int]) -> float:
    """The load of the busiest of two workers as a multiple of their mean, by the rows that truly come for each key."""
    loads = [0, 0]
    for key, worker in workers_of(engine, rows).items():
        loads[worker] += rows[key]
    return max(loads) * 2 / sum(loads)


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_a_skewed_query_is_evened_out_while_it_runs(cluster: Any, tmp_path: Path) -> None:
    with pk.Engine(cluster, workers=2, name="balanced") as engine:
        kept = Kept()
        function = engine.foreach_batch(COUNTS, kept, checkpoint=None)
        function(numbers(cluster, 0, 50_000, 1_000), 0)
        engine.migrate(to=[0] * 224 + [1] * 32).wait(60)
        even = dict.fromkeys(range(1_000), 50)
        assert skew(engine, even) > 1.6, "four to one and more"
        # Counts are by sample, one row in eight, and the bins that move are those with the most of it: where rows are
        # few, they have less than they seem to. Here a bin has some 25 of the sample at each look.
        with engine.autobalance(every="100ms", patience=3, least_rows=10_000) as balance:
            with pytest.raises(EngineError, match="balanced already"):
                engine.autobalance()
            batches = 0

            def moved() -> bool:
                nonlocal batches
                batches += 1
                function(numbers(cluster, batches, 50_000, 1_000), batches)
                looks = balance.looks
                moves = next((at for at, look in enumerate(looks) if look.moves), len(looks))
                return any(look.why == "even" for look in looks[moves:])

            wait_for(moved, timeout=120, what="bins move unaided, and all is even")
        assert not balance.looking
        [acted] = [look for look in balance.looks if look.moves]
        assert acted.skew > 1.5 and acted.expected <= 1.2 and acted.why == "skewed"
        assert skew(engine, even) <= 1.3
        assert state(kept) == counted(batches + 1, 50_000, 1_000)
        for wrong, says in [
            ({"every": 0}, "0"),
            ({"by": "bins"}, "neither 'busy'"),
            ({"tolerance": 2.0}, "above trigger"),
            ({"trigger": 0.5, "tolerance": 0.5}, "at least 1"),
            ({"patience": 0}, "patience=0"),
            ({"workers": (4, 2)}, "workers="),
            ({"workers": 4}, "workers=4 must be"),
        ]:
            with pytest.raises(ConfigError, match=says):
                engine.autobalance(**wrong)


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_keys_that_cost_more_than_others_are_evened_out_by_the_time_they_take(cluster: Any) -> None:
    def step(total: int | None, k: int, v: int) -> tuple[int, tuple[int, int]]:
        # What a wake-up takes is added to both, and is more on a busy machine.
        time.sleep(0.05 if k < 0 else 0.005)
        total = (total or 0) + 1
        return total, (k, total)

    flow = pk.Flow("k bigint, v bigint").key_by("k").stateful_map(step, schema="k bigint, n bigint")
    with pk.Engine(cluster, workers=2, name="dear") as engine:
        kept, batches = Kept(), 0
        function = engine.foreach_batch(flow, kept, checkpoint=None)

        def run(keys: Iterable[int]) -> None:
            nonlocal batches
            table = pa.table({"k": pa.array(keys, pa.int64()), "v": pa.array([1] * len(list(keys)), pa.int64())})
            function(frame(cluster, table), batches)
            batches += 1

        run(range(-20, 0))
        of = workers_of(engine, range(-200, 60))
        # Those that cost ten times as much are all of one worker; by rows it has twice what the other one has at most.
        cost = {key: 10 if key < 0 else 1 for key in of if key >= 0 or of[key] == 0}
        cost = {key: cost[key] for key in [*[key for key in cost if key < 0][:30], *range(60)]}
        assert skew(engine, cost) > 1.6
        with engine.autobalance(every="1h", patience=2, trigger=1.2, tolerance=1.05, least_rows=10) as balance:

            def is_even() -> bool:
                run(list(cost))
                # Not by the clock: within a batch one worker may have told of its rows, and the other not.
                balance.look(float(batches))
                # Short sleeps take longer than they say, the more so beside others: later looks put that right.
                return any(look.moves for look in balance.looks) and skew(engine, cost) <= 1.25

            wait_for(is_even, timeout=120, what="bins move by what they cost")
        acted = next(look for look in balance.looks if look.moves)
        assert acted.by == "busy" and acted.skew > 1.2
        told = engine.loads()
        assert told.column("busy_s").to_pylist() != [0.0] * 256
        busy = {(row["bin"], row["bits"]): row["busy_s"] for row in told.to_pylist()}
        assert sum(busy.values()) >= 0.02 * 30 * 2
        assert engine.rebalance(by="busy", tolerance=1.0).wait(60).bins >= 0


class Driven:
    """A query on two workers whose load the test says, a look at it after each batch."""

    def __init__(self, cluster: Any, engine: pk.Engine) -> None:
        self.cluster, self.engine, self.kept = cluster, engine, Kept()
        self.function = engine.foreach_batch(COUNTS, self.kept, checkpoint=None)
        self.balance = Autobalance(Balanced(engine), rules(trigger=1.3, tolerance=1.1), engine.name)
        self.came: Counter[int] = Counter()
        self.batches = 0

    def batch(self, rows: Mapping[int, int]) -> None:
        """One with so many rows of each key."""
        keys = [key for key, count in rows.items() for _ in range(count)]
        table = pa.table({"k": pa.array(keys, pa.int64()), "v": pa.array([1] * len(keys), pa.int64())})
        self.function(frame(self.cluster, table), self.batches)
        self.came.update(rows)
        self.balance.look(float(self.batches))
        self.batches += 1

    def acts(self) -> list[int]:
        """The batches after which something was done."""
        return [int(one.at) for one in self.balance.looks if one.moves or one.splits or one.merges]

    def settles(self, rows: Mapping[int, int]) -> None:
        """Under a load that stands nothing moves any more, soon."""
        began = self.batches
        while self.batches < max(began, *self.acts()) + 10:
            self.batch(rows)
            assert self.batches < began + 30, f"it still moves: {self.balance.looks[-30:]}"
        assert self.balance.looks[-1].why == "even" and skew(self.engine, rows) <= 1.4
        assert state_of(self.kept) == self.came


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_ramp_is_followed_and_moves_end_with_it(cluster: Any) -> None:
    with pk.Engine(cluster, workers=2, name="ramp", bits=6) as engine:
        driven = Driven(cluster, engine)
        rows = dict.fromkeys(range(512), 8)
        driven.batch(rows)
        climbing = [key for key, worker in workers_of(engine, rows).items() if worker == 1]
        for step in range(16):
            rows |= dict.fromkeys(climbing, 8 + 4 * step)
            driven.batch(rows)
        assert driven.acts(), "it was followed"
        driven.settles(rows)
        acts = driven.acts()
        assert all(after - before >= 4 for before, after in pairwise(acts)), f"rest lies between: {acts}"
        assert len(acts) <= 3, acts


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_moves_behind_a_hot_key_that_wanders_end_where_it_stays(cluster: Any) -> None:
    with pk.Engine(cluster, workers=2, name="wanders", bits=6) as engine:
        driven = Driven(cluster, engine)
        even = dict.fromkeys(range(512), 8)
        driven.batch(even)
        hot = 0
        for place in range(4):
            # Always one of the worker that did not have the last.
            of = workers_of(engine, even)
            hot = next(key for key in even if of[key] != of[hot]) if place else hot
            rows = {**even, hot: 2_700}
            for _ in range(6):
                driven.batch(rows)
        assert driven.acts(), "it was followed"
        driven.settles(rows)
        acts = driven.acts()
        assert all(after - before >= 4 for before, after in pairwise(acts)), f"rest lies between: {acts}"
        assert len(acts) <= 5, f"once for each place, and once more: {acts}"


class Offered(Balanced):
    """What comes is what the test says; what was done of it, and how long that took, is measured."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.offered = 0.0
        self.sizes: list[int] = []

    def look_at(self, found: Any) -> Looked:
        return replace(super().look_at(found), offered=self.offered)

    def resize(self, workers: int) -> None:
        self.sizes.append(workers)
        super().resize(workers)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_worker_comes_by_day_and_goes_by_night(cluster: Any) -> None:
    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(batch.num_rows / 500)  # what a worker does in a second
        return batch

    flow = pk.Flow("k bigint, v bigint").map_batches(slow, schema="k bigint, v bigint").key_by("k").agg(n=pk.count())
    with pk.Engine(cluster, workers=1, name="day and night", bits=4) as engine:
        kept, batches = Kept(), 0
        function = engine.foreach_batch(flow, kept, checkpoint=None)
        host = Offered(engine)
        balance = Autobalance(host, rules(patience=1, workers=(1, 2)), engine.name)

        def batch() -> None:
            nonlocal batches
            function(numbers(cluster, batches, 60), batches)
            balance.look(float(batches))
            batches += 1

        def there(workers: int) -> bool:
            batch()
            return host.workers == workers and len(engine.members()) == workers

        for _ in range(2):
            # One worker does 500 rows a second at most, and more than 50 on any machine.
            for offered, workers in ((5_000.0, 2), (10.0, 1)):
                host.offered = offered
                wait_for(lambda: there(workers), what=f"{workers} workers")  # noqa: B023
                sizes = list(host.sizes)
                for _ in range(8):
                    batch()
                assert host.sizes == sizes, "under a load that stands their number does, too"
        assert host.sizes == [2, 1, 2, 1]
        assert state_of(kept) == {key: len(range(key, batches * 60, 7)) for key in range(7)}


def state_of(kept: Kept) -> dict[int, int]:
    return {key: row["n"] for key, row in kept.last().items()}


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_one_bin_is_divided_among_the_workers_unaided(cluster: Any) -> None:
    """Nobody has to know how many bins it takes."""
    with pk.Engine(cluster, workers=2, name="divided", bits=0) as engine:
        kept, batches = Kept(), 0
        function = engine.foreach_batch(COUNTS, kept, checkpoint=None)

        def evened() -> bool:
            nonlocal batches
            function(numbers(cluster, batches, 5_000, 1_000), batches)
            batches += 1
            workers = engine.bins().column("worker").to_pylist()
            return len(workers) == 4 and workers.count(0) == 2

        assert not evened()
        with engine.autobalance(every="100ms", patience=1, least_rows=100) as balance:
            wait_for(evened, what="the bin is split, and half of it moves")
            assert any(look.splits for look in balance.looks) and any(look.moves for look in balance.looks)
        assert engine.owners() == [[-1]]
        assert state(kept) == counted(batches, 5_000, 1_000)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(180)
def test_a_query_that_cannot_keep_up_gets_another_worker(cluster: Any, tmp_path: Path) -> None:
    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(batch.num_rows / 500)  # what a worker does in a second
        return batch

    kept = Kept()
    with pk.Engine(cluster, workers=1, name="sized", slice_rows=50) as engine:
        flow = pk.Flow("value long").map_batches(slow, schema="value long").key_by("value").agg(n=pk.count())
        source = cluster.readStream.format("rate").option("rowsPerSecond", 600).option("numPartitions", 2).load()
        writer = source.select("value").writeStream.foreachBatch(engine.foreach_batch(flow, kept))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            with engine.autobalance(every="200ms", patience=1, workers=(1, 2)) as balance:
                wait_for(lambda: len(engine.members()) == 2, what="a second worker comes unaided", timeout=120)
                assert any(look.needed == 2 for look in balance.looks)
                # Before the load changes nothing asks for a third, or for less.
                known = query.lastProgress["batchId"]
                wait_for(lambda: query.lastProgress["batchId"] >= known + 2, what="batches go on", timeout=120)
                assert len(engine.members()) == 2
        finally:
            query.stop()
    rows = kept.last("value")
    assert sorted(rows) == list(range(len(rows))) and all(row["n"] == 1 for row in rows.values())
