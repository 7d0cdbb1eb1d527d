"""Decisions of ordered runs in virtual time: where functions run, how long chunks are, how much may be ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ordered._policy import LARGEST, TARGETS, Chooser, Sizer

Speed = float | Callable[[float], float]


def simulate(
    cost: float,
    speedups: dict[str, Speed],
    seconds: float = 3.0,
    workers: int = 2,
    left: int | None = None,
    boot: float | None = 0.1,
    chooser: Chooser | None = None,
) -> tuple[Chooser, list[str]]:
    """Run a function of this cost; `speedups` says what each mode makes of it, `boot` when processes are up.

    A speed-up may be a function of the seconds that have been spent in its mode.
    """
    chooser = chooser or Chooser(workers, left=left)
    sizer = Sizer(None, None, workers, 1 << 30)
    now, asked, modes = 0.0, None, []
    within = Counter[str]()
    while now < seconds:
        mode = chooser.mode
        if not modes or modes[-1] != mode:
            modes.append(mode)
        items = sizer.items(mode)
        sizer.read(items, items)
        speed = speedups[mode] if mode != "inline" else 1.0
        took = items * cost / (speed(within[mode]) if callable(speed) else speed)
        now += took
        within[mode] += took
        sizer.saw(mode, items, items * cost)
        chooser.delivered(now, items, items * cost, sizer.cost(mode) or 0.0)
        if chooser.wants_processes and boot is not None and mode != "processes":
            asked = now if asked is None else asked
            if now - asked >= boot:
                chooser.processes_ready()
    return chooser, modes


@pytest.mark.parametrize("cost", [1e-5, 1e-4, 1e-3, 0.02])
def test_what_holds_the_lock_goes_to_processes(cost: float) -> None:
    chooser, modes = simulate(cost, {"threads": 0.95, "processes": 1.9})
    assert modes == ["inline", "threads", "processes"], chooser.why
    assert chooser.rates["processes"] == pytest.approx(1.9 / cost, rel=0.2)


@pytest.mark.parametrize("cost", [1e-5, 1e-4, 1e-3, 0.05])
def test_what_releases_the_lock_stays_in_threads(cost: float) -> None:
    chooser, modes = simulate(cost, {"threads": 1.9, "processes": 1.9})
    assert modes == ["inline", "threads"] and not chooser.wants_processes


def test_threads_are_tried_again_now_and_then_and_processes_stay_up_meanwhile() -> None:
    chooser, modes = simulate(1e-3, {"threads": 0.95, "processes": 1.9}, seconds=30.0)
    assert modes == ["inline", "threads"] + ["processes", "threads"] * 2 + ["processes"]
    assert chooser.wants_processes


def test_what_was_under_way_in_another_mode_does_not_count() -> None:
    chooser, _ = simulate(1e-3, {"threads": 1.9}, seconds=0.2)
    rates = dict(chooser.rates)
    for _ in range(50):
        chooser.delivered(0.2, 100, 10.0, 1.0, counts=False)
    assert chooser.rates == rates and chooser.mode == "threads"


def test_threads_that_do_harm_are_left_while_processes_start() -> None:
    assert simulate(1e-4, {"threads": 0.5, "processes": 1.9})[1] == ["inline", "threads", "inline", "processes"]


def test_a_trial_on_a_busy_machine_is_corrected_while_processes_start() -> None:
    chooser, _ = simulate(1e-4, {"threads": 1.0}, seconds=0.06, boot=None, left=100_000)
    assert chooser.wants_processes
    chooser, modes = simulate(1e-4, {"threads": 1.9}, seconds=0.2, boot=None, chooser=chooser)
    assert modes == ["threads"] and not chooser.wants_processes and "best" in chooser.why


def test_the_simpler_way_wins_where_the_other_is_hardly_faster() -> None:
    chooser, modes = simulate(1e-4, {"threads": 1.05, "processes": 1.1})
    assert modes[-1] == "inline" and chooser.mode == "inline" and not chooser.wants_processes
    chooser, _ = simulate(1e-4, {"threads": 1.4, "processes": 1.5})
    assert chooser.mode == "threads"


def starting_slowly(early: float, late: float, until: float = 0.09) -> tuple[Speed, list[float]]:
    """A speed-up that is another one for its first seconds; gets the times at which somebody asked for it."""
    asked: list[float] = []

    def speed(spent: float) -> float:
        asked.append(spent)
        return early if spent < until else late

    return speed, asked


@pytest.mark.parametrize("cost", [1e-4, 1e-3])
@pytest.mark.parametrize("early", [0.75, 0.9, 1.1])
def test_a_trial_of_processes_that_loses_by_little_is_repeated(cost: float, early: float) -> None:
    speed, _ = starting_slowly(early, 1.9)
    chooser, modes = simulate(cost, {"threads": 0.95, "processes": speed})
    assert modes == ["inline", "threads", "processes"] and chooser.mode == "processes", chooser.why
    assert chooser.rates["processes"] > 1.15 / cost


@pytest.mark.parametrize(("early", "trials"), [(0.5, 1), (0.75, 2), (1.1, 2)])
def test_a_trial_is_repeated_once_and_not_where_it_loses_by_much(early: float, trials: int) -> None:
    speed, asked = starting_slowly(early, early)
    chooser, modes = simulate(1e-4, {"threads": 0.95, "processes": speed}, seconds=1.0)
    assert modes[-2:] == ["processes", "inline"] and not chooser.wants_processes
    # Each trial ends with the first chunk behind its 60 ms, and begins with the results that say when it began.
    assert 0.06 * trials < asked[-1] < (0.06 + 0.05) * trials


def test_the_better_one_of_two_trials_counts() -> None:
    speed, _ = starting_slowly(1.12, 0.5)
    chooser, _ = simulate(1e-4, {"threads": 0.95, "processes": speed}, seconds=1.0)
    assert chooser.mode == "inline" and chooser.rates["processes"] == pytest.approx(1.12e4, rel=0.05)


def test_a_trial_after_a_change_of_cost_may_be_repeated_again() -> None:
    chooser = Chooser(2)
    speeds: dict[str, Speed] = {
        "threads": 0.95,
        "processes": lambda spent: 0.9 if chooser.why == "processes are tried" else 1.9,
    }
    _, modes = simulate(1e-4, speeds, chooser=chooser)
    assert modes[-1] == "processes"
    _, modes = simulate(1e-2, speeds, seconds=4.0, chooser=chooser)
    assert modes == ["processes", "inline", "threads", "processes"] and chooser.mode == "processes"


def test_cheap_items_never_leave_the_caller() -> None:
    chooser, modes = simulate(1e-6, {}, seconds=0.5)
    assert modes == ["inline"] and "too little" in chooser.why


def test_one_worker_never_leaves_the_caller() -> None:
    assert simulate(1e-3, {}, workers=1)[1] == ["inline"]


def test_a_short_input_is_not_worth_processes() -> None:
    chooser, modes = simulate(1e-4, {"threads": 0.95, "processes": 1.9}, seconds=0.1, left=1000)
    assert not chooser.wants_processes and "processes" not in modes


def test_a_long_input_starts_processes_at_once() -> None:
    chooser, modes = simulate(1e-4, {"threads": 0.95, "processes": 1.9}, seconds=0.05, left=100_000, boot=None)
    assert chooser.wants_processes and modes == ["inline", "threads"]


def test_processes_that_cannot_be_had_leave_the_best_of_the_rest() -> None:
    chooser, modes = simulate(1e-4, {"threads": 1.3}, seconds=0.5, boot=None)
    assert chooser.wants_processes and modes == ["inline", "threads"]
    chooser.no_processes("a lambda holds a lock")
    assert chooser.mode == "threads" and "holds a lock" in chooser.why and not chooser.wants_processes
    _, modes = simulate(1e-4, {"threads": 1.3}, seconds=0.5, chooser=chooser)
    assert modes == ["threads"]


def test_a_cost_that_changes_opens_the_question_again() -> None:
    chooser, _ = simulate(1e-4, {"threads": 1.9})
    assert chooser.mode == "threads"
    chooser, modes = simulate(1e-6, {"threads": 0.5}, seconds=0.5, chooser=chooser)
    assert modes == ["threads", "inline"]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [(2e-5, 4e-7, "from 20 µs to 0.4 µs"), (1e-2, 0.1, "from 10 ms to 100 ms"), (100.0, 450.0, "from 100 s to 450 s")],
)
def test_costs_are_told_as_people_read_them(before: float, after: float, says: str) -> None:
    chooser = Chooser(8)
    chooser._settled_cost = before
    chooser._again(after)
    assert chooser.why == f"the cost of an item changed {says}"


@given(
    st.one_of(st.none(), st.integers(1, 10_000)),
    st.one_of(st.none(), st.integers(1, 10_000)),
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1 << 24)), max_size=30),
)
def test_chunks_keep_their_bounds(
    chunk: int | None, in_flight: int | None, workers: int, seen: list[tuple[float, int]]
) -> None:
    sizer = Sizer(chunk, in_flight, workers, 1 << 26)
    for spent, size in seen:
        items = sizer.items("threads")
        assert 1 <= items <= (chunk or LARGEST)
        if in_flight is not None:
            assert items <= in_flight
        sizer.read(items, size)
        sizer.saw("threads", items, spent)


def test_chunks_grow_to_their_target_and_one_dear_item_is_a_chunk() -> None:
    for mode, target in TARGETS.items():
        sizer = Sizer(None, None, 2, 1 << 30)
        assert sizer.items(mode) == 1
        for _ in range(30):
            items = sizer.items(mode)
            sizer.read(items, items)
            sizer.saw(mode, items, items * 1e-5)
        assert sizer.items(mode) * 1e-5 == pytest.approx(target, rel=0.2)
        for _ in range(10):
            sizer.saw(mode, 1, 0.1)
        assert sizer.items(mode) == 1


def test_one_interrupted_chunk_is_not_taken_for_dear_items() -> None:
    sizer = Sizer(None, None, 2, 1 << 30)
    for spent in (1e-6, 1e-6, 1e-6, 0.1, 1e-6):
        sizer.saw("inline", 1, spent)
    assert sizer.cost("inline") == 1e-6


def test_large_items_make_short_chunks() -> None:
    sizer = Sizer(None, None, 2, 64 << 20)
    for _ in range(20):
        items = sizer.items("threads")
        sizer.read(items, items << 20)
        sizer.saw("threads", items, items * 1e-6)
    assert sizer.items("threads") <= 4


def crew(
    cost: float, workers: int, seconds: float, speedup: dict[str, float], chooser: Chooser | None = None
) -> tuple[Chooser, dict[str, float], list[float]]:
    """Workers beside each other in virtual time: seconds by mode, and how long each trial took.

    A mode that makes all of them `speedup` times as fast as one has each take `workers / speedup` times the cost.
    """
    chooser = chooser or Chooser(workers)
    within, trials = Counter[str](), list[float]()
    # The clock goes on where it was for a chooser that is used again.
    now = begin = chooser._decided
    while now - begin < seconds:
        mode, began = chooser.mode, now
        if mode == "inline":
            now += cost
            chooser.delivered(now, 1, cost, cost)
        else:
            took = cost * workers / speedup[mode]
            # Each has one at hand; what was begun before a change is finished behind it, and does not count.
            ends = [now + took] * workers
            while ends:
                now = ends.pop(0)
                chooser.delivered(now, 1, took, took, chooser.mode == mode)
                if chooser.wants_processes and mode != "processes":
                    chooser.processes_ready()
                if chooser.mode == mode and now - begin < seconds:
                    ends.append(now + took)
        within[mode] += now - began
        if mode == "threads":
            trials.append(now - began)
        if chooser.wants_processes and mode == "inline":
            chooser.processes_ready()
    return chooser, dict(within), trials


@pytest.mark.parametrize(("cost", "workers"), [(10.0, 8), (1.0, 8), (10.0, 2), (0.2, 4)])
def test_trials_of_dear_items_cost_a_small_share_of_the_time(cost: float, workers: int) -> None:
    seconds = 4_000 * cost
    chooser, within, trials = crew(cost, workers, seconds, {"threads": 1.0, "processes": 0.95 * workers})
    assert chooser.mode == "processes" and len(trials) >= 2, chooser.why
    # The first one is no loss beside the caller's own thread; of those that follow each ends at its first results.
    assert trials[0] <= 2 * workers * cost + cost and max(trials[1:]) <= (workers + 1) * cost
    assert sum(trials[1:]) <= 0.06 * seconds
    assert within["processes"] >= 0.9 * seconds


def test_dear_items_that_gain_in_threads_stay_there() -> None:
    chooser, within, trials = crew(10.0, 8, 4_000.0, {"threads": 7.5})
    assert chooser.mode == "threads" and len(trials) == 1 and within["threads"] > 3_900


def test_costs_that_go_up_and_down_open_the_question_no_more_often_than_trials_are_paid() -> None:
    chooser, lost = Chooser(8), 0.0
    for cost in [10.0, 45.0] * 6:
        chooser, within, _ = crew(cost, 8, 100 * cost, {"threads": 1.0, "processes": 7.6}, chooser)
        lost += within.get("threads", 0.0) / (100 * cost)
    assert lost / 12 < 0.25, lost
