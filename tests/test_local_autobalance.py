"""Loads of local runs evened out unaided, between threads and between processes; the rules are those of engines."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import wait_for
from penstock import _native
from penstock._autobalance import Autobalance, Rules
from penstock._local import LocalSession
from penstock._local_balance import Balanced
from penstock._rescale import LocalRescale
from penstock.errors import ConfigError, EngineError, WorkerLost

COUNTS = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")


def hashes(keys: Sequence[int]) -> list[int]:
    hashed = _native.hash_columns(pa.record_batch({"k": pa.array(keys, pa.int64())}), ["k"])
    found: list[int] = pa.record_batch(hashed).column(0).to_pylist()
    return found


def batch(rows: Mapping[int, int]) -> pa.RecordBatch:
    """One with so many rows of each key."""
    return pa.record_batch({"k": pa.array([key for key, count in rows.items() for _ in range(count)], pa.int64())})


def rules(**changed: Any) -> Rules:
    plain: dict[str, Any] = {
        "by": "busy",
        "every": 1.0,
        "trigger": 1.3,
        "tolerance": 1.09,
        "patience": 3,
        "least_rows": 10,
        "max_bin_bytes": "64m",
        "workers": None,
        "dry_run": False,
    }
    return Rules.of(**{**plain, **changed})


def balancing() -> list[str]:
    """Threads that look."""
    return [one.name for one in threading.enumerate() if one.name.startswith("penstock-autobalance")]


class Driven:
    """A session on two threads whose load the test says, with a look at it after each epoch."""

    def __init__(self, session: LocalSession, **changed: Any) -> None:
        self.session = session
        self.host = Balanced(session)
        self.balance = Autobalance(self.host, rules(**changed), "test")
        self.came: Counter[int] = Counter()
        self.epochs = 0

    def epoch(self, rows: Mapping[int, int]) -> Iterator[pa.RecordBatch]:
        """To be fed: one of so many rows of each key."""
        yield batch(rows)
        self.came.update(rows)
        self.epochs += 1
        wait_for(lambda: min(self.session.stats().column("epochs").to_pylist()) >= self.epochs, what="the epoch ends")
        self.balance.look(float(self.epochs))

    def workers(self, keys: Iterable[int]) -> dict[int, int]:
        """The worker of each key."""
        owners = {(row["prefix"], row["bits"]): row["worker"] for row in self.session.bins().to_pylist()}
        keys, found = list(keys), {}
        for key, value in zip(keys, hashes(keys), strict=True):
            [found[key]] = [worker for (prefix, bits), worker in owners.items() if value >> (64 - bits) == prefix]
        return found

    def skew(self, load: Mapping[int, float]) -> float:
        """What the busier worker has as a multiple of the mean, by the load of each key: 1.09 is 1.2 : 1."""
        sums = [0.0, 0.0]
        for key, worker in self.workers(load).items():
            sums[worker] += load[key]
        return max(sums) * 2 / sum(sums)

    def acts(self) -> list[int]:
        """The epochs after which something was done."""
        return [int(one.at) for one in self.balance.looks if one.moves or one.splits or one.merges]


def ran(flow: pk.Flow, feed: Callable[[Driven], Iterator[pa.RecordBatch]], bits: int = 6, **changed: Any) -> Driven:
    """What became of a session that was fed so; counts are those of the rows that came."""
    with LocalSession(flow, 2, bits=bits, streaming=True) as session:
        driven = Driven(session, **changed)
        made = [row for out in session.run(feed(driven)) for row in out.to_pylist()]
    last = {row["k"]: row["n"] for row in made}
    assert last == driven.came
    return driven


def test_a_step_of_four_to_one_is_evened_out_in_three_epochs_and_stays_so() -> None:
    seen: list[tuple[int, float]] = []

    def feed(driven: Driven) -> Iterator[pa.RecordBatch]:
        even = dict.fromkeys(range(512), 8)
        hot = {key for key, worker in driven.workers(even).items() if worker == 0}
        stepped = {key: 32 if key in hot else 8 for key in even}
        for _ in range(8):
            yield from driven.epoch(even)
        assert driven.acts() == [] and driven.skew(stepped) > 1.55, "four to one, and nothing has moved before"
        for _ in range(20):
            yield from driven.epoch(stepped)
            seen.append((driven.epochs, driven.skew(stepped)))

    driven = ran(COUNTS, feed)
    # Three epochs must show it, some of whose means have what was before in them.
    assert len(driven.acts()) == 1 and 11 <= driven.acts()[0] <= 13, driven.acts()
    # Evened out to 1.2 : 1, but for what one row in eight tells of all.
    assert all(skew <= 1.12 for epoch, skew in seen if epoch >= 13), seen
    assert driven.balance.looks[-1].why == "even"


def test_moves_behind_a_hot_key_that_wanders_rest_between_and_end_where_it_stays() -> None:
    def feed(driven: Driven) -> Iterator[pa.RecordBatch]:
        even = dict.fromkeys(range(512), 8)
        yield from driven.epoch(even)
        hot, rows = 0, even
        for place in range(4):
            of = driven.workers(even)
            # Always one of the worker that did not have the last.
            hot = next(key for key in even if of[key] != of[hot]) if place else hot
            rows = {**even, hot: 2_700}
            for _ in range(6):
                yield from driven.epoch(rows)
        began = driven.epochs
        while driven.epochs < max(began, *driven.acts()) + 10:
            yield from driven.epoch(rows)
            assert driven.epochs < began + 30, f"it still moves: {driven.balance.looks[-30:]}"
        assert driven.balance.looks[-1].why == "even" and driven.skew(rows) <= 1.4

    driven = ran(COUNTS, feed, tolerance=1.1, patience=2)
    acts = driven.acts()
    assert acts, "it was followed"
    assert all(after - before >= 4 for before, after in pairwise(acts)), f"rest lies between: {acts}"
    assert len(acts) <= 5, f"once for each place, and once more: {acts}"


@pytest.mark.parametrize("by", ["busy", "rows"])
def test_a_key_that_costs_ten_times_what_others_do_counts_as_that(by: str) -> None:
    skews: list[float] = []
    took: dict[int, list[float]] = {}

    def dear(total: int | None, k: int) -> tuple[int, tuple[int, int]]:
        began = time.perf_counter()
        time.sleep(0.16 if k == 0 else 0.016)
        took.setdefault(k, []).append(time.perf_counter() - began)
        total = (total or 0) + 1
        return total, (k, total)

    def feed(driven: Driven) -> Iterator[pa.RecordBatch]:
        # As many keys on each worker, by rows even.
        of = driven.workers(range(200))
        there = [key for key in of if of[key] == of[0]][:10] + [key for key in of if of[key] != of[0]][:10]
        costs = {key: 10.0 if key == 0 else 1.0 for key in there}
        assert 1.3 <= driven.skew(costs) <= 1.32, "19 to 10"
        # Where the machine stands still within a sleep, a key looks dear for some epochs, and is put right behind them.
        for epoch in range(1, 61):
            yield from driven.epoch(dict.fromkeys(there, 1))
            # What a wake-up takes is added to all of them, and on a busy machine is nearly as much as what they sleep.
            skews.append(driven.skew({key: median(times) for key, times in took.items()}))
            if epoch >= 12 and (by == "rows" or (skews[-1] <= 1.09 and driven.balance.looks[-1].why == "even")):
                break
        busy = {row["bin"]: row["busy_s"] for row in driven.session.loads().to_pylist()}
        # It slept that long at least.
        assert busy[hashes([0])[0] >> 56] >= driven.epochs * 0.16

    flow = pk.Flow("k bigint").key_by("k").stateful_map(dear, schema="k bigint, n bigint")
    # Below the trigger nothing moves: it is nearer than what is looked for.
    driven = ran(flow, feed, bits=8, by=by, trigger=1.07, tolerance=1.05)
    assert {look.by for look in driven.balance.looks} == {by}
    if by == "rows":
        assert driven.acts() == [], "by rows it is even"
    else:
        assert driven.acts(), driven.balance.looks
        assert skews[-1] <= 1.09, "1.2 : 1 at most"


def test_a_dry_run_tells_and_changes_nothing() -> None:
    def feed(driven: Driven) -> Iterator[pa.RecordBatch]:
        before = driven.session.owners()
        of = driven.workers(range(512))
        for _ in range(8):
            yield from driven.epoch({key: 32 if worker == 0 else 8 for key, worker in of.items()})
        assert driven.session.owners() == before and driven.session.moves().num_rows == 0

    driven = ran(COUNTS, feed, dry_run=True)
    first = driven.balance.looks[driven.acts()[0] - 2]
    assert (first.why, first.query) == ("skewed", "") and first.moves > 0
    assert first.skew == pytest.approx(1.6, abs=0.1) and first.expected <= 1.09


def test_one_bin_is_divided_between_the_threads() -> None:
    def feed(driven: Driven) -> Iterator[pa.RecordBatch]:
        even = dict.fromkeys(range(512), 8)
        while driven.epochs < 30 and not any(look.moves for look in driven.balance.looks):
            yield from driven.epoch(even)
        assert driven.skew(even) <= 1.3

    driven = ran(COUNTS, feed, bits=0, patience=1)
    assert any(look.splits for look in driven.balance.looks) and any(look.moves for look in driven.balance.looks)


def test_a_flow_whose_bins_cannot_be_split_is_asked_once() -> None:
    class Whole(pk.Aggregator):
        def create(self) -> Any:
            return 0

        def accumulate(self, states: list[Any], groups: pa.Int64Array, rows: pa.RecordBatch) -> Any:
            return [state + groups.to_pylist().count(at) for at, state in enumerate(states)]

        def merge(self, state: Any, other: Any) -> Any:
            return state + other

        def finish(self, states: list[Any]) -> Any:
            return pa.record_batch({"n": pa.array(states, pa.int64())})

    flow = pk.Flow("k bigint").key_by("k").aggregate(Whole(), schema="n bigint", columns=["k"])
    with LocalSession(flow, 2, bits=0) as session:
        host = Balanced(session)
        balance = Autobalance(host, rules(patience=1), "test")

        def feed() -> Iterator[pa.RecordBatch]:
            balance.look(0.0)
            for look in range(1, 4):
                yield batch(dict.fromkeys(range(512), 8))
                done = 4_000 * look
                wait_for(lambda: sum(session.loads().column("rows").to_pylist()) >= done, what="rows come")  # noqa: B023
                balance.look(float(look))
                assert host.whole is not None, "asked once"

        assert sum(row["n"] for out in session.run(feed()) for row in out.to_pylist()) == 3 * 4_096
    assert host.whole is not None and [look.splits for look in balance.looks] == [1, 0, 0]
    assert balance.looks[-1].why.endswith("; bins in which rows wait for the end of the input are not split")


def skewed(workers: int, by: int = 4) -> dict[int, int]:
    """Keys of which those that the first worker of so many has at first get so many times the rows."""
    keys = range(512)
    return {key: 8 * by if (value >> 56) % workers == 0 else 8 for key, value in zip(keys, hashes(keys), strict=True)}


def fed(rows: Mapping[int, int], done: threading.Event, came: Counter[int]) -> Iterator[Any]:
    """The same again and again, until it is done or nobody would wait any longer."""
    until = time.monotonic() + 90
    while not done.is_set() and time.monotonic() < until:
        came.update(rows)
        yield batch(rows)


def test_a_run_is_evened_out_by_its_own_thread_which_ends_with_it() -> None:
    done, came = threading.Event(), Counter[int]()
    with COUNTS.run(fed(skewed(2), done, came), workers=2, streaming=True) as run:
        balance = run.autobalance(every="50ms", tolerance=1.09)
        with pytest.raises(EngineError, match="balanced already"):
            run.autobalance()
        last: dict[int, int] = {}
        for out in run:
            last.update(zip(out.column("k").to_pylist(), out.column("n").to_pylist(), strict=True))
            looks = balance.looks
            moved = [at for at, look in enumerate(looks) if look.moves]
            if moved and len(looks) > moved[0] + 4:
                done.set()
    assert last == came
    looks = balance.looks
    [acted] = [look for look in looks if look.moves]
    assert acted.skew == pytest.approx(1.6, abs=0.1) and acted.expected <= 1.09 and acted.why == "skewed"
    # In the first decision there can be, and never again.
    before = [look.why for look in looks[: looks.index(acted)] if "rows" not in look.why]
    assert before == ["skewed, 2 looks before anything moves", "skewed, 1 looks before anything moves"]
    # Behind the last batch there are none to judge.
    last_said = [look for look in looks if "rows" not in look.why][-1]
    assert last_said.why == "even" and last_said.skew <= 1.15
    assert not balance.looking and balancing() == []
    with pytest.raises(EngineError, match="ended"):
        run.autobalance()


def test_a_run_that_is_left_leaves_no_thread() -> None:
    done = threading.Event()
    run = COUNTS.run(fed(skewed(2), done, Counter()), workers=2, streaming=True)
    run.autobalance(every="50ms")
    next(run)
    assert balancing() == ["penstock-autobalance-local"]
    del run
    wait_for(lambda: balancing() == [], what="the thread ends with the run")
    session = LocalSession(COUNTS, 2)
    session.autobalance(every="50ms")
    del session
    wait_for(lambda: balancing() == [], what="the thread ends with a session that nobody closes")


def test_processes_are_evened_out_and_their_number_follows_the_load() -> None:
    done, came = threading.Event(), Counter[int]()
    rows = {key: count // 8 for key, count in skewed(2, 1).items()}
    last: dict[int, int] = {}
    with SLOW.run(fed(rows, done, came), streaming=True, processes=1) as run:
        balance = run.autobalance(every="200ms", patience=1, least_rows=10, processes=(1, 2))
        for out in run:
            last.update(zip(out.column("k").to_pylist(), out.column("n").to_pylist(), strict=True))
            if len(set(run.stats().column("pid").to_pylist())) == 3:
                done.set()
    assert last == came
    grown, *after = [look for look in balance.looks if look.workers is not None]
    assert (grown.workers, grown.needed) == (2, 2) and "1 workers become 2: the query keeps" in grown.why
    # Where this thread gives nothing for long, the run rests, and needs one.
    assert [look.workers for look in after] == ([1, 2] * len(after))[: len(after)], balance.looks


def test_a_bin_that_is_split_between_two_looks_holds_up_no_moves() -> None:
    """Each split began all looks anew: while some followed each other for their size, nothing was evened out."""
    balancer = _native.Balancer(1.5, 1.2, 2, 1, None, 2)
    whole = [(prefix, 2) for prefix in range(4)]
    first = balancer.look(whole, [0, 0, 1, 1], ([40, 40, 10, 10], 100), [None] * 4, 2)
    assert first["why"] == "skewed, 1 looks before anything moves"
    parts = [*whole[:3], (6, 3), (7, 3)]
    then = balancer.look(parts, [0, 0, 1, 1, 1], ([40, 40, 10, 5, 5], 100), [None] * 5, 2)
    assert then["why"] == "skewed" and [to for _, to in then["moves"]] == [1]


class Rescaling:
    """Of a session what a look needs while there is no state, with processes of which no more come up."""

    def __init__(self, processes: int) -> None:
        self.workers, self._last, self._crew = 1, None, self
        self._native = self
        self.is_rescaling, self.processes = False, list(range(processes))
        self.asked: list[LocalRescale] = []

    def bins(self) -> list[Any]:
        return []

    def _told(self) -> dict[str, Any]:
        return {}

    def rescale(self, workers: int) -> LocalRescale:
        if workers > 100:
            raise ConfigError(f"processes={workers}: too many open files")
        self.asked.append(LocalRescale(workers, len(self.processes), lambda _: None, lambda _: None))
        return self.asked[-1]


def test_processes_that_do_not_come_up_are_told_of_once_and_not_asked_for_again_soon(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody heard of it, and the same was asked for at each look."""
    session = Rescaling(2)
    host = Balanced(session)
    assert host.room(3) == 3
    host.resize(3)
    assert host.workers is None, "it is under way"
    assert list(host.looked()) == [] and not caplog.records
    session.asked[0]._over_with(2, WorkerLost("process 3 ended with exit code 1", process=3, exitcode=1))
    assert host.workers == 2
    host.looked()
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.name == "penstock._local_balance"
    told = "balance cannot go from 2 processes to 3: WorkerLost: process 3 ended with exit code 1"
    assert record.getMessage() == told
    assert [host.room(workers) for workers in (1, 2, 3, 8)] == [1, 2, 2, 2]
    # Some time later, once more; the same is not told twice.
    monkeypatch.setattr("penstock._local_balance._AGAIN_S", 0.0)
    for error in (WorkerLost("process 3 ended with exit code 1", process=3, exitcode=1), None):
        host._short = 0.0
        assert host.room(3) == 3
        host.resize(3)
        session.asked[-1]._over_with(2, error)
        host.looked()
    assert len(caplog.records) == 1 and host.room(3) == 3
    # What is refused at once, too; and fewer are no reason to ask for no more.
    monkeypatch.setattr("penstock._local_balance._AGAIN_S", 600.0)
    host.resize(1)
    session.asked[-1]._over_with(2, EngineError("they stay"))
    host.looked()
    assert host.room(3) == 3
    with pytest.raises(ConfigError, match="open files"):
        host.resize(101)
    assert host.room(3) == 2
    assert [record.getMessage()[:40] for record in caplog.records[1:]] == [
        "balance cannot go from 2 processes to 1:",
        "balance cannot go from 2 processes to 10",
    ]


def _slow(total: int | None, k: int) -> tuple[int, tuple[int, int]]:
    time.sleep(0.0002)
    total = (total or 0) + 1
    return total, (k, total)


SLOW = pk.Flow("k bigint").key_by("k").stateful_map(_slow, schema="k bigint, n bigint")


def test_a_bin_that_somebody_has_split_meanwhile_does_not_end_the_splitting() -> None:
    with LocalSession(COUNTS, 2, bits=4, streaming=True) as session:
        host = Balanced(session)
        session.split(3).wait(60)
        with pytest.raises(ConfigError, match="is split already"):
            host.recut("", {(3, 4): 1}, [], lambda: False)
        session.merge(3).wait(60)
        with pytest.raises(ConfigError, match="is not split"):
            host.recut("", {}, [(3, 4)], lambda: False)
        assert host.whole is None
        assert host.recut("", {(3, 4): 1}, [], lambda: False) is None and session.bins().num_rows == 17
        assert host.recut("", {}, [(3, 4)], lambda: True) is None and session.bins().num_rows == 17, "nobody looks"


def test_processes_that_are_busy_all_the_time_are_never_too_many() -> None:
    """Their figures come between calls: it said that the run keeps 0.00 busy."""

    def dear(total: int | None, k: int) -> tuple[int, tuple[int, int]]:
        time.sleep(0.001)
        total = (total or 0) + 1
        return total, (k, total)

    def source() -> Iterator[pa.RecordBatch]:
        for _ in range(3):
            yield batch(dict.fromkeys(range(4_000), 1))

    flow = pk.Flow("k bigint").key_by("k").stateful_map(dear, schema="k bigint, n bigint")
    with flow.run(source(), streaming=True, processes=2) as run:
        # Behind the last batch they are idle, until the run has ended: it takes ninety looks to say so.
        balance = run.autobalance(every="100ms", patience=30, least_rows=10, processes=(1, 2), dry_run=True)
        assert sum(out.num_rows for out in run) == 12_000
    assert [look for look in balance.looks if look.workers == 1] == []
    assert any("have not come" in look.why or "no batch has ended" in look.why for look in balance.looks)


def test_a_process_that_tells_nothing_at_one_look_is_not_taken_for_one_that_did_all_its_work_at_the_next() -> None:
    with LocalSession(SLOW, 1, streaming=True, processes=2) as session:
        crew = session._crew
        assert crew is not None
        answers, withheld, latest = crew.stats, list[Any](), list[Any]()

        def stats() -> Any:
            figures, moves = answers()
            if withheld:
                figures[-1] = withheld[0]
            else:
                latest[:] = figures[-1:]
            return figures, moves

        def done(batches: int) -> bool:
            rows = sum(worker["rows"] for figures in answers()[0] for worker in figures["workers"])
            ended = min(worker["epochs"] for worker in json.loads(session._native.stats())["workers"])
            return rows == 2_000 * batches and ended >= batches

        crew.stats = stats  # type: ignore[method-assign]
        # Time is that of the clock: who was put aside for a while was busy as well, but not for nine tenths of all.
        balance = Autobalance(Balanced(session), rules(patience=1, trigger=1.8, least_rows=10), "test")

        def source() -> Iterator[pa.RecordBatch]:
            for look in range(12):
                if look == 5:
                    withheld.extend(latest)  # what the last look had
                elif look == 7:
                    withheld.clear()
                yield batch(dict.fromkeys(range(2_000), 1))
                wait_for(lambda: done(look + 1), what="all of it is done")  # noqa: B023
                balance.look(float(look))

        assert sum(out.num_rows for out in session.run(source())) == 24_000
    looks = balance.looks
    silent = [look.at for look in looks if look.why.endswith(" of 2 workers have not come")]
    assert {5.0, 6.0} <= set(silent), looks
    assert any(look.by == "busy" and look.at > 6.0 for look in looks), looks
    assert not any(look.moves for look in looks), looks


def _uneven(total: int | None, k: int) -> tuple[int, tuple[int, int]]:
    # What a wake-up takes is added to both, and is more on a busy machine.
    time.sleep(0.01 if k < 0 else 0.001)
    total = (total or 0) + 1
    return total, (k, total)


def test_a_bin_that_is_too_hot_for_any_process_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """It was to be split at each look, which was dropped without a word."""
    hot = [key for key, value in zip(range(5_000), hashes(range(5_000)), strict=True) if value >> 56 == 7]
    done, came, last = threading.Event(), Counter[int](), dict[int, int]()
    with COUNTS.run(fed(dict.fromkeys(hot, 8), done, came), streaming=True, processes=2) as run:
        balance = run.autobalance(by="rows", every="50ms", patience=1, least_rows=10)
        for out in run:
            last.update(zip(out.column("k").to_pylist(), out.column("n").to_pylist(), strict=True))
            if sum("bin 7 alone" in look.why for look in balance.looks) >= 3:
                done.set()
    assert last == came
    told = [look for look in balance.looks if "bin 7 alone" in look.why]
    says = "splitting it does; a run on processes splits no bins: they move whole"
    assert len(told) >= 3 and all(look.why.endswith(says) and look.splits == 0 for look in told), told
    [record] = [one for one in caplog.records if one.name == "penstock._autobalance"]
    assert record.levelname == "WARNING" and record.getMessage().endswith(says), "once"


def test_moves_that_are_refused_hold_up_no_rescale() -> None:
    def source() -> Iterator[pa.RecordBatch]:
        yield batch({1: 10})
        with pytest.raises(EngineError, match="worker 99, which has left"):
            crew.even_out([[(0, 99)]], 0.05)
        # As where a worker leaves between the question and the move.
        assert crew._native is not None
        crew._evening = crew._native.migrate([[(0, 99)]], 0.05)
        assert session.rescale(2).wait(60) == 2
        yield batch({1: 10})

    with SLOW.start(processes=1, streaming=True) as session:
        assert session._crew is not None
        crew = session._crew
        assert sum(out.num_rows for out in session.run(source())) == 20


def test_bins_move_between_processes_by_what_they_cost() -> None:
    # Keys below 0 cost ten times as much, and are all in that half of the hash that one process has at first.
    dear = [key for key, value in zip(range(-100, 0), hashes(list(range(-100, 0))), strict=True) if value >> 63 == 0][
        :30
    ]
    cost = {key: 10.0 if key < 0 else 1.0 for key in [*dear, *range(60)]}
    done, came, last, skews = threading.Event(), Counter[int](), dict[int, int](), list[float]()
    flow = pk.Flow("k bigint").key_by("k").stateful_map(_uneven, schema="k bigint, n bigint")
    with LocalSession(flow, 1, streaming=True, processes=2) as session:
        driven = Driven(session)
        [first, second] = sorted(session.owners()[0][:: 1 << 7])
        balance = session.autobalance(every="500ms", trigger=1.2, patience=2, tolerance=1.05, least_rows=10)
        for out in session.run(fed(dict.fromkeys(cost, 1), done, came)):
            last.update(zip(out.column("k").to_pylist(), out.column("n").to_pylist(), strict=True))
            moved = [at for at, look in enumerate(balance.looks) if look.moves]
            if moved and not done.is_set():
                of = driven.workers(cost)
                sums = [sum(cost[key] for key in cost if of[key] == worker) for worker in (first, second)]
                skews.append(max(sums) * 2 / sum(sums))
                # Where a process stood still during the first looks, later ones put right what came of it.
                if skews[-1] <= 1.25 or len(balance.looks) > moved[0] + 60:
                    done.set()
    assert last == came
    acted = [look for look in balance.looks if look.moves]
    assert acted[0].skew > 1.2 and acted[0].by == "busy", balance.looks
    assert skews[-1] <= 1.25, balance.looks


def test_what_cannot_be_is_refused_as_by_an_engine() -> None:
    with COUNTS.run(pa.table({"k": [1]}), workers=2) as run:
        for wrong, says in [
            ({"every": 0}, "0"),
            ({"by": "bins"}, "neither 'busy'"),
            ({"tolerance": 2.0}, "above trigger"),
            ({"trigger": 0.5, "tolerance": 0.5}, "at least 1"),
            ({"patience": 0}, "patience=0 must be an int from 1 to 10000"),
            ({"patience": 1 << 31}, "from 1 to 10000"),
            ({"least_rows": -1}, "least_rows=-1"),
            ({"max_bin_bytes": "1k"}, "at least 64 KiB"),
            ({"max_bin_bytes": "99999999t"}, r"'99999999t' must be below 2\*\*63"),
            ({"max_bin_bytes": 1 << 64}, r"below 2\*\*63"),
            ({"processes": (4, 2)}, r"processes=\(4, 2\) must be"),
            ({"processes": 4}, "processes=4 must be"),
            ({"processes": (1, 2)}, "begin it with processes="),
        ]:
            with pytest.raises(ConfigError, match=says):
                run.autobalance(**wrong)  # type: ignore[arg-type]
        assert balancing() == []
    with COUNTS.run(pa.table({"k": [1]}), processes=1) as run, pytest.raises(ConfigError, match="from 1 to 256"):
        run.autobalance(processes=(1, 300))
