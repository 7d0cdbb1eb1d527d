"""Decisions of a run, from what it has measured so far: how long chunks are, and where functions run.

Pure: it is told what was delivered and when, and answers. Nothing here knows a thread or a clock, so every decision can
be replayed.

A run in mode "auto" starts in the caller's thread. Where an item costs enough for others to help, it tries threads:
they pay when the functions release the interpreter lock or wait. Where they do not pay enough, worker processes are
started while the run goes on, and tried when they are up. These first trials are a `_native.Trial` of one pair each: so
soon there is little to compare with, and a short run should not pay for more. One of the processes that loses by little
goes on for as long again, as others may have disturbed it, and the better half counts: they are hardly slower, so that
costs next to nothing.

What was decided holds for `KEEP` seconds, and twice as long each time that it is confirmed. Then every other mode
challenges the one that is kept, one after the other, in a `Trial` by `RULE`: the mode in use is measured anew, then the
challenger, and so on in pairs. Figures of other minutes decide nothing, since machines have neighbours that come and
go. A costlier way has to be faster by `BETTER`; a simpler one wins unless it is slower by more than `NEAR`. Processes
are started again for that where threads are not nearly ideal. Where the input or who takes results sets the pace, all
modes are alike, and say nothing of the time when there is more to do: a caller who is in functions for less than half
of the time replaces nobody, and starts no processes. A cost that changes fourfold opens the question again, from the
beginning.

Trials of dear items cost what others would have done meanwhile, so that is bounded twice. A period of `LONG` ends as
soon as its results say that the challenger cannot win: `workers` of them at a time, each taking as long as these, are a
speed. And what trials have lost, with the time for which workers had nothing to do at a change of modes, is a
`_native.Allowance` of a `SHARE` of the time, for which the next one waits. So do the starts of processes, on their own
account: what a machine has to spare for one is not known, so all of its time counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock._durations import duration_text

if TYPE_CHECKING:
    from penstock._native import Allowance, Trial

__all__ = ["TARGETS", "Chooser", "Sizer"]

#: Seconds of work in a chunk: what a chunk costs to hand over is small beside it, and it is soon done.
TARGETS = {"inline": 0.001, "threads": 0.001_5, "processes": 0.008}
#: Most items of a chunk.
LARGEST = 4096
#: Seconds per item from which others can help.
WORTH = 8e-6
#: Seconds of work after which threads are tried.
EARLY = 0.004
#: Seconds of work after which, or that must be left for which, processes are started.
STARTING = 0.15
#: Seconds that a period of a trial lasts at least.
TRIAL = {"inline": 0.02, "threads": 0.02, "processes": 0.06}
#: The modes, from the simplest; and in the order in which they challenge the one that is kept.
SIMPLEST = ("inline", "threads", "processes")
CHALLENGERS = ("threads", "inline", "processes")
#: Pairs that a challenger has to win, and with which it has lost.
RULE = (2, 2)
#: By how much the costlier way must be faster than the simpler one.
BETTER = 1.15
#: What of the speed of the costlier way that is kept the simpler one must have to replace it.
NEAR = 0.95
#: What of the best speed so far processes must reach in their first trial, where they do not win it, for it to go on.
CLOSE = 0.7
#: What of the caller's own speed threads must reach to go on while processes start.
HARMLESS = 0.85
#: Seconds over which the speed is measured then.
WINDOW = 0.05
#: Chunks in a row whose cost is unlike the one of the decision, until it is taken anew.
UNLIKE = 8
#: Seconds that a decision holds before others challenge it; twice as long each time that it is confirmed.
KEEP = 5.0
#: Seconds after which a period that cannot win is not finished.
LONG = 0.5
#: By how much it must fall short while not every worker has told a result, and with which one pair is enough.
CLEAR = 1.5
#: What of the time trials may lose beside the best mode, and starts of processes may take.
SHARE = 0.05
#: What of the ideal speed-up is good enough not to look for more.
GOOD = 0.8
#: The share of its time in functions with less than which the caller waits for others.
IDLE = 0.5


class Sizer:
    """How many items the next chunk has."""

    def __init__(self, chunk: int | None, in_flight: int | None, workers: int, most_bytes: int) -> None:
        self._fixed = chunk
        bound = LARGEST
        if in_flight is not None:
            bound = max(1, in_flight // (2 * workers)) if workers > 1 else in_flight
        self._bound = min(bound, LARGEST)
        if chunk is not None and in_flight is not None:
            self._fixed = min(chunk, in_flight)
        self._most_bytes = max(1, most_bytes // (8 * workers))
        #: Costs of the last chunks by mode. The middle one counts: one alone may have been interrupted by others.
        self._seen: dict[str, deque[float]] = {}
        self._bytes = 0.0
        self._last = 0

    def cost(self, mode: str) -> float | None:
        """Seconds of work per item, as of late in this mode."""
        seen = self._seen.get(mode)
        return sorted(seen)[len(seen) // 2] if seen else None

    def saw(self, mode: str, items: int, spent: float) -> None:
        """A chunk was worked on."""
        if items:
            self._seen.setdefault(mode, deque(maxlen=5)).append(spent / items)

    def read(self, items: int, size: int) -> None:
        """A chunk was read."""
        if items:
            self._bytes += (size / items - self._bytes) * 0.5
            self._last = items

    def items(self, mode: str) -> int:
        """How many items the next chunk should have, at least one."""
        if self._fixed is not None:
            return self._fixed
        if not self._seen:
            return 1
        # Soon shorter where items become dear: a chunk of the old length could take long.
        seen = self._seen.get(mode)
        cost = max(sorted(seen)[len(seen) // 2], seen[-1] / 2) if seen else self._other_cost()
        wanted = int(min(TARGETS[mode] / cost, LARGEST)) if cost > 0 else LARGEST
        if self._bytes > 0:
            wanted = min(wanted, int(self._most_bytes / self._bytes))
        return max(1, min(wanted, 2 * self._last or 1, self._bound))

    def _other_cost(self) -> float:
        return max(self.cost(mode) or 0.0 for mode in self._seen)


@dataclass
class _Contest:
    """One mode against the one that is kept. `first`: of the first decisions, a single pair."""

    incumbent: str
    challenger: str
    trial: Trial
    first: bool = False
    #: Of a period that goes on: how fast it was until then, and its seconds.
    reached: float = 0.0
    spent: float = 0.0


@dataclass
class Chooser:
    """Where functions run next. See the module.

    Attributes
    ----------
    workers : int
        How many there can be.
    why : str
        Why the mode is what it is.
    rates : dict of str to float
        Items per second, as measured last, by mode.
    """

    workers: int
    processes: bool = True
    left: int | None = None
    why: str = "the first items are measured"
    rates: dict[str, float] = field(default_factory=dict)
    mode: str = "inline"
    _phase: str = "inline"
    _now: float = 0.0
    _spent: float = 0.0
    #: Whether items cost too little so far.
    _cheap: bool = False
    #: What is measured: since when (None before the first results), items and chunks.
    _since: float | None = None
    _delivered: int = 0
    _chunks: int = 0
    #: Of the period under way: when it began, items and seconds of work of what it has told.
    _began: float | None = None
    _told: tuple[int, float] = (0, 0.0)
    #: Of the last change of the mode: when, and the speed until then; items that were under way.
    _left_at: tuple[float, float] | None = None
    _drained: int = 0
    _contest: _Contest | None = None
    #: The best so far, the last decision, and the modes of the question that is open.
    _kept: str = "inline"
    _decided: str | None = None
    _met: set[str] = field(default_factory=set)
    #: Seconds of the trial of threads, in vain if processes win; speeds since, while these start.
    _vain: float = 0.0
    _windows: deque[float] = field(default_factory=lambda: deque(maxlen=2))
    #: The share of its time for which the caller was in functions, when it was measured last.
    _busy: float = 1.0
    _settled_cost: float = 0.0
    _unlike: int = 0
    _keep: float = KEEP
    _until: float = 0.0
    #: What trials, and starts of processes, have cost; when the last of these was asked for.
    _trials: Allowance = field(init=False)
    _starts: Allowance = field(init=False)
    _asked: float | None = None
    #: Whether worker processes should be started in the background.
    wants_processes: bool = False

    def __post_init__(self) -> None:
        from penstock import _native

        self._trials, self._starts = _native.Allowance(SHARE), _native.Allowance(SHARE)
        if self.workers < 2:
            self._phase, self.why = "settled", "one worker cannot be faster than the caller's thread"

    def delivered(self, now: float, items: int, spent: float, cost: float, counts: bool = True) -> None:
        """A chunk is done: `items` of it, `spent` seconds of work, `cost` per item of late.

        Without `counts` it was handed out in another mode than the present one, and says nothing about this one.
        """
        self._now = now
        self._spent += spent
        if self.left is not None:
            self.left = max(0, self.left - items)
        if not counts:
            self._drained += items
            return
        if self._began is None:
            self._began = now - spent
            if self._left_at is not None:
                # For so long there were workers without work.
                at, rate = self._left_at
                self._lose(self._began - at - (self._drained / rate if rate else 0.0))
        self._told = (self._told[0] + items, self._told[1] + spent)
        self._chunks += 1
        if self._since is None:
            # The first results of several workers come together; they say when it began, not how fast it is.
            if self._chunks >= (1 if self.mode == "inline" else self.workers):
                self._since, self._delivered, self._chunks = now, 0, 0
        else:
            self._delivered += items
        if self._phase == "inline":
            self._look(now, cost)
        elif self._phase == "trial":
            self._judge(now, cost)
        elif self._phase == "waiting":
            self._wait(now, cost)
        elif self.workers > 1:
            self._keep_up(now, cost)

    def processes_ready(self) -> None:
        """The worker processes are up."""
        if not self.wants_processes or self.mode == "processes" or self._phase not in ("waiting", "settled"):
            return
        now = self._now
        if self._asked is not None:
            self._starts.spend(now, now - self._asked)
            self._asked = None
        if self._phase == "settled":
            self._challenge(now, "processes")
            return
        # As fast as the best so far is now: by its pair with the mode in use.
        best, used = self._kept, self.mode
        rate = max(self._windows, default=self.rates[used])
        self.rates[best], self.rates[used] = rate * self.rates[best] / self.rates[used], rate
        self._first(now, "processes", self.rates[best], self._vain)

    def no_processes(self, why: str) -> None:
        """Worker processes cannot be had for these functions."""
        self.processes = self.wants_processes = False
        contest = self._contest
        met = contest is not None and "processes" in (contest.incumbent, contest.challenger)
        if self._phase != "waiting" and self.mode != "processes" and not met:
            return
        self.rates.pop("processes", None)
        threads, inline = self.rates.get("threads", 0.0), self.rates.get("inline", 0.0)
        self._kept = "threads" if threads >= BETTER * inline else "inline"
        self._settle(self._now, self._settled_cost, why)

    @property
    def dear(self) -> bool:
        """Whether a trial is under way in which each item costs so much that none should wait behind another."""
        return self._phase == "trial" and self._settled_cost * self.workers >= LONG

    # What is measured

    def _enter(self, now: float, mode: str) -> None:
        """Measure this mode from here on."""
        if mode == self.mode:
            # Unless it has not even begun: others are under way.
            self._began = None if self._began is None else now
            self._since = None if self._since is None else now
        else:
            self._left_at, self._drained = (now, self.rates.get(self.mode, 0.0)), 0
            self.mode, self._began, self._since = mode, None, None
        self._chunks, self._delivered, self._told = 0, 0, (0, 0.0)

    def _rate(self, now: float) -> None:
        """Note how fast the present mode is, over the time since it began."""
        if self._since is not None and now - self._since > 0 and self._delivered:
            self.rates[self.mode] = self._delivered / (now - self._since)

    def _lose(self, seconds: float) -> None:
        if seconds > 0:
            self._trials.spend(self._now, seconds)

    def _crew(self) -> int:
        """How many work in the present mode."""
        return 1 if self.mode == "inline" else self.workers

    # The first decisions

    def _look(self, now: float, cost: float) -> None:
        self._rate(now)
        if cost < WORTH:
            self._cheap, self.why = True, "items cost too little for others to help"
            self.wants_processes = False
        elif self._cheap:
            # They cost more now: what was measured is of other items.
            self._cheap, self._spent = False, 0.0
            self._enter(now, "inline")
        elif self._spent >= EARLY and "inline" in self.rates and self._began is not None:
            self._settled_cost, self._kept, self._met, self._vain = cost, "inline", {"inline"}, 0.0
            self._first(now, "threads", self.rates["inline"], now - self._began)

    def _first(self, now: float, challenger: str, rate: float, spent: float) -> None:
        """Try a mode, in a single pair with the best so far, which was measured just now."""
        from penstock import _native

        incumbent = self._kept
        trial = _native.Trial(wins=1, losses=1, gain=_gain(incumbent, challenger))
        trial.judge(rate, spent)
        self._contest = _Contest(incumbent, challenger, trial, True)
        self._met.add(challenger)
        self._phase, self.why = "trial", f"{challenger} are tried"
        if challenger == "inline":
            self.why = "threads have become faster: the caller is measured beside them"
        self._enter(now, challenger)

    def _wait(self, now: float, cost: float) -> None:
        if self._since is not None and now - self._since >= WINDOW and self._chunks >= self._crew():
            rate = self._delivered / (now - self._since)
            self._windows.append(rate)
            self._since, self._chunks, self._delivered = now, 0, 0
            if self.mode == "threads" and rate >= GOOD * self.workers * self.rates["inline"]:
                # Their trial was short, and the machine may have been busy; or it was when the caller was measured.
                self.rates["threads"], self._kept = rate, "threads"
                self._first(now, "inline", rate, 0.0)
                return
        self._start_processes(now, cost)

    def _start_processes(self, now: float, cost: float) -> None:
        if self.wants_processes or not self._starts.allows(now):
            return
        if self._spent >= STARTING or (self.left or 0) * cost >= 2 * STARTING:
            self.wants_processes, self._asked = True, now
            self.why = "processes are being started"

    # Trials

    def _challenge(self, now: float, challenger: str) -> None:
        """Measure the mode that is kept anew, and a challenger beside it."""
        from penstock import _native

        incumbent = self._kept
        trial = _native.Trial(wins=RULE[0], losses=RULE[1], gain=_gain(incumbent, challenger))
        self._contest = _Contest(incumbent, challenger, trial)
        self._met.add(challenger)
        self._phase, self.why = "trial", f"{incumbent} and {challenger} are measured side by side"
        self._enter(now, incumbent)

    def _judge(self, now: float, cost: float) -> None:
        contest = self._contest
        assert contest is not None and self._began is not None
        trial = contest.trial
        hopeless = self._hopeless(now, trial)
        least = 1 if self.mode == "inline" else 2 * self.workers
        if self._since is not None and now - self._since >= TRIAL[self.mode] and self._chunks >= least:
            self._rate(now)
            hopeless = None
            # What disturbs a trial makes it slower, never faster.
            rate = self.rates[self.mode] = max(self.rates[self.mode], contest.reached)
            if self._goes_on(now, contest, rate):
                return
        elif hopeless is not None:
            rate = self.rates[self.mode] = hopeless
        else:
            return
        spent = contest.spent + now - self._began
        if self.mode == "inline":
            self._busy = self._told[1] / spent if spent > 0 else 1.0
            if self._busy < IDLE and contest.challenger == "inline":
                self._contest = None
                self._settle(now, cost, "the input, or who takes the results, sets the pace")
                return
        winner: str | None
        if hopeless is not None or trial.is_hopeless(CLEAR * rate):
            winner = trial.give_up(rate, spent)
        else:
            winner = trial.judge(rate, spent)
        if winner is None:
            self._enter(now, contest.challenger if trial.turn() == "challenger" else contest.incumbent)
            return
        self._lose(trial.lost())
        if winner == "challenger":
            self._kept = contest.challenger
        self._vain += spent
        self._contest = None
        self._go_on(now, cost)

    def _hopeless(self, now: float, trial: Trial) -> float | None:
        """The speed of a long period that cannot win by what it has told so far; None while it can."""
        items, spent = self._told
        if self._began is None or now - self._began < LONG or not items or spent <= 0:
            return None
        speed = self._crew() * items / spent
        return speed if trial.is_hopeless(speed * (CLEAR if self._since is None else 1.0)) else None

    def _goes_on(self, now: float, contest: _Contest, rate: float) -> bool:
        """Whether a first trial of processes, which lost by little, goes on for as long again."""
        if not contest.first or contest.challenger != "processes" or contest.reached:
            return False
        if not contest.trial.is_hopeless(rate) or rate < CLOSE * self.rates[contest.incumbent]:
            return False
        assert self._began is not None
        contest.reached, contest.spent = rate, now - self._began
        self.why = "processes lost by little and are tried once more"
        self._enter(now, "processes")
        return True

    def _go_on(self, now: float, cost: float) -> None:
        """The next one challenges the mode that is kept; or that is the decision."""
        kept, rates = self._kept, self.rates
        for challenger in CHALLENGERS:
            if challenger == kept or challenger in self._met:
                continue
            if challenger != "processes":
                self._challenge(now, challenger)
                return
            good = kept == "threads" and rates["threads"] >= GOOD * self.workers * rates["inline"]
            if good or not self.processes:
                continue
            if self._decided is None:
                # A trial is short, and the machine may have been busy: threads go on, and are measured, meanwhile.
                harmless = rates["threads"] >= HARMLESS * rates["inline"]
                self._enter(now, "threads" if harmless else "inline")
                self._phase, self.why = "waiting", "processes may help; there is not enough work yet to start them"
                self._windows.clear()
                self._start_processes(now, cost)
                return
            under_way = self.wants_processes
            self._settle(now, cost)
            self.wants_processes = under_way
            if self._busy >= IDLE and (self.left is None or self.left * cost >= 2 * STARTING):
                self._start_processes(now, cost)
            return
        self._settle(now, cost)

    # Decisions

    def _settle(self, now: float, cost: float, why: str | None = None) -> None:
        """Keep the best so far."""
        kept = self._kept
        self._met.add(kept)
        self.rates = {mode: rate for mode, rate in self.rates.items() if mode in self._met}
        ratios = ", ".join(f"{mode} {rate:,.0f}" for mode, rate in self.rates.items())
        self.why = f"the best of what was measured, in items a second: {ratios}" + (f"; {why}" if why else "")
        self._settled_cost, self._unlike = cost if kept == self.mode else 0.0, 0
        if kept != self._decided:
            self._keep = KEEP
        self._phase, self._contest, self._decided, self._until = "settled", None, kept, now + self._keep
        self.wants_processes = self.wants_processes and kept == "processes"
        self._enter(now, kept)

    def _keep_up(self, now: float, cost: float) -> None:
        """Look whether the decision still holds."""
        # Items take longer where they wait for each other: their cost is that of the mode that stayed.
        self._settled_cost = self._settled_cost or cost
        like = self._settled_cost / 4 <= cost <= self._settled_cost * 4
        self._unlike = 0 if like or not self._settled_cost else self._unlike + 1
        if self._unlike < UNLIKE and now < self._until:
            return
        # Trials of items that cost more now may lose more.
        then = self._price(self._settled_cost)
        if not self._trials.allows(now, self._price(cost) / then if then else 1.0):
            return
        if self._unlike >= UNLIKE:
            self._again(cost)
        else:
            self._keep *= 2
            self._kept, self._met, self._busy = self.mode, {self.mode}, 1.0
            self._go_on(now, cost)

    def _price(self, cost: float) -> float:
        """Seconds that a period takes at most, for items of this cost; none where there is no trial of such items."""
        return max(TRIAL["processes"], 2 * self.workers * cost) if cost >= WORTH else 0.0

    def _again(self, cost: float) -> None:
        self.why = f"the cost of an item changed from {duration_text(self._settled_cost)} to {duration_text(cost)}"
        self._enter(self._now, "inline")
        self._phase, self._decided, self._settled_cost, self._spent = "inline", None, 0.0, 0.0
        self.rates.clear()
        self._unlike = 0


def _gain(incumbent: str, challenger: str) -> float:
    """By how much a challenger must be faster than the one that is kept; below 0, how much slower it may be."""
    simpler = SIMPLEST.index(challenger) < SIMPLEST.index(incumbent)
    return (NEAR if simpler else BETTER) - 1.0
