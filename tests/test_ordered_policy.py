"""Decisions of ordered runs in virtual time: where functions run, how long chunks are, how much may be ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import ConfigError
from penstock.ordered._policy import KEEP, LARGEST, SHARE, TARGETS, Chooser, Sizer

Speed = float | Callable[[float], float]


def simulate(
    cost: float,
    speedups: dict[str, Speed],
    seconds: float = 3.0,
    workers: int = 2,
    left: int | None = None,
    boot: float | None = 0.1,
    chooser: Chooser | None = None,
    within: Counter[str] | None = None,
) -> tuple[Chooser, list[str]]:
    """Run a function of this cost; `speedups` says what each mode makes of it, `boot` when processes are up.

    A speed-up may be a function of the seconds that have been spent in its mode, which are added to `within`.
    """
    chooser = chooser or Chooser(workers, left=left)
    sizer = Sizer(None, None, workers, 1 << 30)
    # The clock goes on where it was for a chooser that is used again.
    now, asked, modes = chooser._now, None, []
    within = Counter() if within is None else within
    end = now + seconds
    while now < end:
        mode = chooser.mode
        if not modes or modes[-1] != mode:
            modes.append(mode)
        items = sizer.items(mode)
        sizer.read(items, items)
        speed = speedups[mode] if mode != "inline" else speedups.get(mode, 1.0)
        took = items * cost / (speed(within[mode]) if callable(speed) else speed)
        now += took
        within[mode] += took
        sizer.saw(mode, items, items * cost)
        chooser.delivered(now, items, items * cost, sizer.cost(mode) or 0.0)
        if not chooser.wants_processes:
            asked = None
        elif boot is not None and mode != "processes":
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


def test_others_challenge_the_best_now_and_then_and_processes_stay_up_meanwhile() -> None:
    chooser, modes = simulate(1e-3, {"threads": 0.95, "processes": 1.9}, seconds=30.0)
    round_ = ["threads", "processes", "inline", "processes"]
    assert modes == ["inline", "threads", "processes", *round_, *round_]
    assert chooser.wants_processes


def test_what_challenges_inline_or_threads_is_measured_beside_them() -> None:
    chooser, modes = simulate(1e-3, {"threads": 1.9}, seconds=30.0, boot=None)
    assert modes == ["inline", "threads"] + ["inline", "threads"] * 2 and not chooser.wants_processes
    chooser, modes = simulate(1e-3, {"threads": 0.5, "processes": 0.6}, seconds=16.0)
    assert modes[-5:] == ["inline", "threads", "inline", "processes", "inline"] and not chooser.wants_processes


def neighbour(chooser: Chooser, until: float, busy: float, quiet: float) -> Speed:
    """A speed-up that is another one until so many seconds of the run, for which somebody else is busy."""
    return lambda _: busy if chooser._now < until else quiet


@pytest.mark.parametrize("until", [0.6, 2.0, 4.0])
def test_rates_of_other_minutes_decide_nothing(until: float) -> None:
    # A neighbour takes half of the machine at first: what was measured then is half of what it is later.
    chooser, within = Chooser(2), Counter[str]()
    speeds = {
        "inline": neighbour(chooser, until, 0.5, 1.0),
        "threads": neighbour(chooser, until, 0.48, 0.95),
        "processes": neighbour(chooser, until, 0.75, 1.9),
    }
    simulate(1e-3, speeds, seconds=40.0, chooser=chooser, within=within)
    assert chooser.mode == "processes" and within["processes"] > 38.0, (chooser.why, within)
    assert chooser.rates == pytest.approx({"inline": 1000, "threads": 950, "processes": 1900}, rel=0.05)


@pytest.mark.parametrize("until", [0.01, 0.02])
def test_threads_that_a_quieter_machine_made_look_good_are_found_out(until: float) -> None:
    chooser = Chooser(2)
    speeds = {"inline": neighbour(chooser, until, 0.5, 1.0), "threads": 0.95, "processes": 1.9}
    _, modes = simulate(1e-3, speeds, seconds=3.0, chooser=chooser)
    assert modes == ["inline", "threads"] and "processes" not in chooser.rates, chooser.why
    _, modes = simulate(1e-3, speeds, seconds=20.0, chooser=chooser)
    assert modes[:2] == ["threads", "inline"] and chooser.mode == "processes", chooser.why


@pytest.mark.parametrize("threads", [0.95, 1.2])
def test_processes_that_lost_on_a_busy_machine_challenge_later(threads: float) -> None:
    chooser = Chooser(2)
    speeds: dict[str, Speed] = {"threads": threads, "processes": neighbour(chooser, 2.0, 0.5, 1.9)}
    simulate(1e-3, speeds, seconds=3.0, chooser=chooser)
    assert chooser.mode == ("inline" if threads < 1 else "threads") and not chooser.wants_processes
    _, modes = simulate(1e-3, speeds, seconds=20.0, chooser=chooser)
    assert chooser.mode == "processes" and modes[-1] == "processes", chooser.why


def test_threads_that_do_harm_later_are_left() -> None:
    chooser = Chooser(2, processes=False)
    speeds: dict[str, Speed] = {"threads": neighbour(chooser, 3.0, 1.9, 0.5)}
    simulate(1e-3, speeds, seconds=30.0, chooser=chooser)
    assert chooser.mode == "inline"


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_machine_that_changes_its_speed_changes_no_mode(factor: float) -> None:
    chooser, within = Chooser(2), Counter[str]()
    speeds: dict[str, Speed] = {
        mode: neighbour(chooser, 3.0, speed, speed * factor)
        for mode, speed in {"inline": 1.0, "threads": 0.95, "processes": 1.9}.items()
    }
    simulate(1e-3, speeds, seconds=40.0, chooser=chooser, within=within)
    assert chooser.mode == "processes" and within["processes"] > 38.0, chooser.why


def test_a_period_that_was_disturbed_does_not_change_the_mode() -> None:
    chooser, disturbed = Chooser(2), [0.0, 0.0]

    def kept(_: float) -> float:
        # The first period of each round.
        if "side by side" in chooser.why and disturbed[0] < 0.05:
            disturbed[0] += 0.008
            return 0.5
        disturbed[1] += 1
        return 1.9

    _, modes = simulate(1e-3, {"threads": 0.95, "processes": kept}, seconds=12.0, chooser=chooser)
    assert disturbed[0] >= 0.05 and chooser.mode == "processes"
    assert modes.count("threads") > 2, "more than one pair"


def test_where_the_input_sets_the_pace_nobody_replaces_threads() -> None:
    chooser, _ = simulate(1e-3, {"threads": 1.9}, seconds=2.0)
    now, inline = chooser._now, 0
    for _ in range(10_000):
        # The input gives an item in 10 ms: any mode is as fast.
        now += 0.01
        inline += chooser.mode == "inline"
        chooser.delivered(now, 1, 1e-3, 1e-3)
        assert not chooser.wants_processes
    assert chooser.mode == "threads" and "sets the pace" in chooser.why and 0 < inline < 50


def test_starts_of_processes_take_a_small_share_of_the_time() -> None:
    chooser, starting, last = Chooser(2), [], [0.0]

    def inline(_: float) -> float:
        if chooser.wants_processes:
            starting.append(chooser._now - last[0])
        last[0] = chooser._now
        return 1.0

    simulate(1e-2, {"inline": inline, "threads": 0.5, "processes": 0.6}, seconds=400.0, boot=4.0, chooser=chooser)
    # The first one, and one more may fall into the time.
    assert 2 * 4.0 < sum(starting) <= SHARE * 400.0 + 2 * 4.0, sum(starting)


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
    assert modes == ["threads", "inline", "threads"] and not chooser.wants_processes and "best" in chooser.why


def test_threads_on_a_machine_that_is_quiet_now_are_measured_beside_the_caller() -> None:
    # The neighbour was there for both first trials, and left while processes start.
    chooser = Chooser(2, left=100_000)
    speeds = {"inline": neighbour(chooser, 0.1, 0.5, 1.0), "threads": neighbour(chooser, 0.1, 0.48, 0.95)}
    _, modes = simulate(1e-4, speeds, seconds=1.0, boot=None, chooser=chooser)
    assert chooser.wants_processes and modes[:3] == ["inline", "threads", "inline"], chooser.why
    assert chooser.rates["inline"] == pytest.approx(1e4, rel=0.05)


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
    assert modes == ["processes", "inline", "threads", "processes"], chooser.why
    assert chooser.mode == "processes"


def test_cheap_items_never_leave_the_caller() -> None:
    chooser, modes = simulate(1e-6, {}, seconds=0.5)
    assert modes == ["inline"] and "too little" in chooser.why


def test_what_was_measured_of_cheap_items_says_nothing_of_dear_ones() -> None:
    speeds: dict[str, Speed] = {"threads": 0.95, "processes": 1.9}
    chooser, modes = simulate(1e-6, speeds, seconds=2.0)
    assert modes == ["inline"]
    _, modes = simulate(1e-3, speeds, seconds=2.0, chooser=chooser)
    assert modes == ["inline", "threads", "processes"], chooser.why


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


@dataclass
class Crew:
    """Workers beside each other in virtual time, each with one item at hand.

    A mode that makes all of them `speedup` times as fast as one has each take `workers / speedup` times the cost.
    """

    workers: int
    speedup: dict[str, float]
    chooser: Chooser = field(init=False)
    within: Counter[str] = field(default_factory=Counter)
    #: Seconds of each stay in threads.
    trials: list[float] = field(default_factory=list)
    #: Items, and what all of the time would have given in the best mode.
    items: int = 0
    ideal: float = 0.0

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.workers)

    def run(self, cost: float, seconds: float) -> None:
        chooser, workers = self.chooser, self.workers
        now = begin = chooser._now
        while now - begin < seconds:
            mode, began = chooser.mode, now
            if mode == "inline":
                now += cost
                self.items += 1
                chooser.delivered(now, 1, cost, cost)
            else:
                took = cost * workers / self.speedup[mode]
                # What was begun before a change is finished behind it, and does not count.
                ends = [now + took] * workers
                while ends:
                    now = ends.pop(0)
                    self.items += 1
                    chooser.delivered(now, 1, took, took, chooser.mode == mode)
                    if chooser.wants_processes and mode != "processes":
                        chooser.processes_ready()
                    if chooser.mode == mode and now - begin < seconds:
                        ends.append(now + took)
            self.within[mode] += now - began
            self.ideal += (now - began) * max(1.0, *self.speedup.values()) / cost
            if mode == "threads":
                self.trials.append(now - began)
            if chooser.wants_processes and mode == "inline":
                chooser.processes_ready()


@pytest.mark.parametrize(("cost", "workers"), [(10.0, 8), (1.0, 8), (10.0, 2), (0.2, 4)])
def test_trials_of_dear_items_cost_a_small_share_of_the_time(cost: float, workers: int) -> None:
    seconds = 4_000 * cost
    crew = Crew(workers, {"threads": 1.0, "processes": 0.95 * workers})
    crew.run(cost, seconds)
    trials = crew.trials
    assert crew.chooser.mode == "processes" and len(trials) >= 2, crew.chooser.why
    # The first one is no loss beside the caller's own thread; of those that follow each ends at its first results.
    assert trials[0] <= 2 * workers * cost + cost and max(trials[1:]) <= (workers + 1) * cost
    assert sum(trials[1:]) <= 0.06 * seconds
    assert crew.within["processes"] >= 0.9 * seconds


@pytest.mark.parametrize("cost", [10.0, 0.2, 0.01])
@pytest.mark.parametrize(
    "speedup",
    [
        {"threads": 1.0, "processes": 7.6},
        {"threads": 7.6, "processes": 7.6},
        {"threads": 0.3, "processes": 0.3},
        {"threads": 4.0, "processes": 4.4},
        {"threads": 1.1, "processes": 1.2},
    ],
)
def test_what_trials_lose_is_a_share_of_the_time(cost: float, speedup: dict[str, float]) -> None:
    crew = Crew(8, speedup)
    crew.run(cost, 200 * cost + 1.0)
    used = speedup.get(crew.chooser.mode, 1.0)
    for seconds in [200 * cost + KEEP, 2_000 * cost, 20_000 * cost]:
        items, ideal, began = crew.items, crew.ideal, crew.chooser._now
        crew.run(cost, seconds)
        # Beside the mode that is kept, which may be a simpler one that is nearly as fast.
        most = (crew.ideal - ideal) * used / max(1.0, *speedup.values())
        lost = 1 - (crew.items - items) / most
        # One round more than is paid for may fall into the time: each ends with its first results.
        one = 3 * (8 + 2) * cost / (crew.chooser._now - began)
        assert lost <= SHARE + one, (lost, crew.chooser.why)


def test_dear_items_that_gain_in_threads_stay_there() -> None:
    crew = Crew(8, {"threads": 7.5})
    crew.run(10.0, 4_000.0)
    assert crew.chooser.mode == "threads" and not crew.chooser.wants_processes
    assert crew.within["threads"] > (1 - SHARE) * 4_000, crew.within


def test_costs_that_go_up_and_down_open_the_question_no_more_often_than_trials_are_paid() -> None:
    crew, lost = Crew(8, {"threads": 1.0, "processes": 7.6}), 0.0
    for cost in [10.0, 45.0] * 6:
        before = crew.within["threads"]
        crew.run(cost, 100 * cost)
        lost += (crew.within["threads"] - before) / (100 * cost)
    assert lost / 12 < 0.25, lost


def test_native_trials_speak_in_seconds_and_refuse_what_decides_nothing() -> None:
    trial = _native.Trial(wins=2, losses=2, gain=0.1, sweep=(1, 2.0))
    assert trial.turn() == "incumbent" and not trial.is_hopeless(0.0)
    assert trial.judge(10.0, 1.5) is None and trial.turn() == "challenger"
    assert trial.is_hopeless(10.9) and not trial.is_hopeless(11.1)
    assert trial.judge(20.0, 1.0) == "challenger" and trial.lost() == pytest.approx(0.75)
    trial = _native.Trial(wins=1, losses=1, gain=0.1)
    trial.judge(10.0, 1.0)
    assert trial.give_up(2.5, 2.0) == "incumbent" and trial.lost() == pytest.approx(1.5)
    allowance = _native.Allowance(0.05)
    allowance.spend(100.0, 7.0)
    assert not allowance.allows(239.0) and allowance.allows(240.0) and not allowance.allows(240.0, 1.1)
    for share in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"a share of {share}".replace(".0", "").replace("nan", "NaN")):
            _native.Allowance(share)
    for options in ({"wins": 0}, {"losses": 0}, {"gain": -1.0}, {"gain": float("inf")}):
        with pytest.raises(ConfigError, match="decides nothing"):
            _native.Trial(**{"wins": 1, "losses": 1, "gain": 0.0} | options)
