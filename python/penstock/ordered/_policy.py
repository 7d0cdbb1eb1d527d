"""Decisions of a run, from what it has measured so far: how long chunks are, and where functions run.

Pure: it is told what was delivered and when, and answers. Nothing here knows a thread or a clock, so every decision can
be replayed.

A run in mode "auto" starts in the caller's thread. Where an item costs enough for others to help, it tries threads:
they pay when the functions release the interpreter lock or wait. Where they do not pay enough, worker processes are
started while the run goes on, and tried when they are up. A trial of them that loses by little is repeated at once, as
others may have disturbed it, and the better one counts: they are hardly slower, so that costs next to nothing. Each
trial does real work, whose results count; the best of what was measured stays, the simpler one when they are close. A
cost that changes fourfold opens the question again; threads, the cheapest to try, are tried again now and then.

Trials of dear items cost what others would have done meanwhile, so that is bounded twice. A trial of `LONG` ends as
soon as its results say that it cannot win: `workers` of them at a time, each taking as long as these, are a speed. And
what a trial has lost beside the best mode is at most a `SHARE` of the time until the question may be opened again.

Trials in Rust are pairs of alternating periods (crate `penstock-trial`). Not here: three modes are compared, one of
which has to be started first, and to go from one to another means to wait for what is in flight. What both have in
common, the bound on what trials lose, is shorter than a class of the native module would be.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from penstock._durations import duration_text

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
#: Seconds that a trial lasts at least.
TRIAL = {"threads": 0.02, "processes": 0.06}
#: By how much the costlier way must be faster than the simpler one.
BETTER = 1.15
#: What of the best speed so far processes must reach in a trial that does not win to be tried once more.
CLOSE = 0.7
#: What of the caller's own speed threads must reach to go on while processes start.
HARMLESS = 0.85
#: Seconds over which their speed is measured then.
WINDOW = 0.05
#: Chunks in a row whose cost is unlike the one of the decision, until it is taken anew.
UNLIKE = 8
#: Seconds that a decision holds before threads are tried again; twice as long each time.
KEEP = 5.0
#: Seconds after which a trial that cannot win is not finished.
LONG = 0.5
#: By how much it must fall short while not every worker has told a result.
CLEAR = 1.5
#: What of the time trials may lose beside the best mode.
SHARE = 0.05
#: What of the ideal speed-up is good enough not to look for more.
GOOD = 0.8


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
class Chooser:
    """Where functions run next. See the module.

    Attributes
    ----------
    workers : int
        How many there can be.
    why : str
        Why the mode is what it is.
    rates : dict of str to float
        Items per second, as measured, by mode.
    """

    workers: int
    processes: bool = True
    left: int | None = None
    why: str = "the first items are measured"
    rates: dict[str, float] = field(default_factory=dict)
    mode: str = "inline"
    _phase: str = "inline"
    _spent: float = 0.0
    _items: int = 0
    _since: float | None = None
    _delivered: int = 0
    _chunks: int = 0
    _settled_cost: float = 0.0
    _unlike: int = 0
    _keep: float = KEEP
    _until: float = 0.0
    _repeated: bool = False
    #: Of the trial under way: when it began, items and seconds of work of what it has told.
    _began: float | None = None
    _told: tuple[int, float] = (0, 0.0)
    #: Seconds of the trials since the last decision, by mode; what they have lost; when that was decided.
    _tried: dict[str, float] = field(default_factory=dict)
    _owed: float = 0.0
    _decided: float = 0.0
    #: Whether worker processes should be started in the background.
    wants_processes: bool = False

    def __post_init__(self) -> None:
        if self.workers < 2:
            self._phase, self.why = "settled", "one worker cannot be faster than the caller's thread"

    def delivered(self, now: float, items: int, spent: float, cost: float, counts: bool = True) -> None:
        """A chunk is done: `items` of it, `spent` seconds of work, `cost` per item of late.

        Without `counts` it was handed out in another mode than the present one, and says nothing about this one.
        """
        self._items += items
        self._spent += spent
        if self.left is not None:
            self.left = max(0, self.left - items)
        if not counts:
            return
        if self._began is None:
            self._began = now - spent
        self._told = (self._told[0] + items, self._told[1] + spent)
        if self._since is None:
            self._chunks += 1
            # The first results of several workers come together; they say when it began, not how fast it is.
            if self._chunks >= (1 if self.mode == "inline" else self.workers):
                self._since, self._delivered, self._chunks = now, 0, 0
        else:
            self._delivered += items
            self._chunks += 1
        if self._phase == "inline":
            self._look(now, cost)
        elif self._phase == "trial":
            self._judge(now, cost)
        elif self._phase == "waiting":
            self._wait(now, cost)
        elif self.workers > 1:
            self._keep_up(now, cost)

    def _wait(self, now: float, cost: float) -> None:
        if self.mode == "threads" and self._since is not None and now - self._since >= WINDOW:
            before = self.rates["threads"]
            self._rate(now)
            self.rates["threads"] = max(before, self.rates["threads"])
            self._since, self._delivered = now, 0
            if self.rates["threads"] >= GOOD * self.workers * self.rates["inline"]:
                self._settle(now, cost)
                return
        self._start_processes(cost)

    def _keep_up(self, now: float, cost: float) -> None:
        """Look whether the decision still holds."""
        # Items take longer where they wait for each other: their cost is that of the mode that stayed.
        self._settled_cost = self._settled_cost or cost
        like = self._settled_cost / 4 <= cost <= self._settled_cost * 4
        self._unlike = 0 if like or not self._settled_cost else self._unlike + 1
        # Trials of items that cost more, or less, now lose as much more or less.
        owed = self._owed * (cost / self._settled_cost if self._settled_cost else 1.0)
        if self._unlike >= UNLIKE and not 0 <= now - self._decided < owed:
            self._again(cost)
        elif now >= self._until and self.mode != "threads":
            self._keep *= 2
            self._try("threads")

    def processes_ready(self) -> None:
        """The worker processes are up."""
        if self._phase == "waiting" and self.wants_processes:
            self._repeated = False
            self._try("processes")

    def no_processes(self, why: str) -> None:
        """Worker processes cannot be had for these functions."""
        self.processes = self.wants_processes = False
        if self._phase == "waiting" or self.mode == "processes":
            self.rates.pop("processes", None)
            self._settle(None, self._settled_cost, why)

    def _rate(self, now: float) -> None:
        """Note how fast the present mode is, over the time since it began."""
        if self._since is not None and now - self._since > 0 and self._delivered:
            self.rates[self.mode] = self._delivered / (now - self._since)

    def _try(self, mode: str) -> None:
        self.mode, self._phase, self.why = mode, "trial", f"{mode} are tried"
        self._since, self._chunks, self._delivered = None, 0, 0
        self._began, self._told = None, (0, 0.0)

    @property
    def dear(self) -> bool:
        """Whether a trial is under way in which each item costs so much that none should wait behind another."""
        return self._phase == "trial" and self._settled_cost * self.workers >= LONG

    def _hopeless(self, now: float) -> float | None:
        """The speed of a long trial that cannot win by what it has told so far; None while it can."""
        items, spent = self._told
        if self._began is None or now - self._began < LONG or not items or spent <= 0:
            return None
        speed = self.workers * items / spent
        if self.mode == "threads":
            needed = max(BETTER * self.rates["inline"], self.rates.get("processes", 0.0) / BETTER)
        else:
            needed = BETTER * max(self.rates["inline"], self.rates.get("threads", 0.0) / BETTER)
        return speed if speed * (CLEAR if self._since is None else 1.0) < needed else None

    def _look(self, now: float, cost: float) -> None:
        self._rate(now)
        if cost < WORTH:
            self.why = "items cost too little for others to help"
        elif self._spent >= EARLY and "inline" in self.rates:
            self._settled_cost = cost
            self._try("threads")

    def _judge(self, now: float, cost: float) -> None:
        early = self._hopeless(now)
        over = self._since is not None and now - self._since >= TRIAL[self.mode] and self._chunks >= 2 * self.workers
        if not over and early is None:
            return
        before = self.rates.get("processes", 0.0)
        if over or early is None:
            self._rate(now)
        else:
            self.rates[self.mode] = early
        if self._began is not None:
            self._tried[self.mode] = self._tried.get(self.mode, 0.0) + now - self._began
        if self.mode == "processes":
            # What disturbs a trial makes it slower, never faster.
            rate = self.rates["processes"] = max(before, self.rates.get("processes", 0.0))
            best = self._best()
            if not self._repeated and best != "processes" and rate >= CLOSE * self.rates[best]:
                self._repeated = True
                self._try("processes")
                self.why = "processes lost by little and are tried once more"
                return
        ideal = self.workers * self.rates["inline"]
        known = "processes" in self.rates
        if self.mode == "threads" and self.rates["threads"] < GOOD * ideal and self.processes and not known:
            # A trial is short, and the machine may have been busy: they go on, and are measured, while others start.
            harmless = self.rates["threads"] >= HARMLESS * self.rates["inline"]
            self.mode = "threads" if harmless else "inline"
            self._phase, self._since, self._chunks, self._delivered = "waiting", None, 0, 0
            self.why = "processes may help; there is not enough work yet to start them"
            self._start_processes(cost)
        else:
            self._settle(now, cost)

    def _start_processes(self, cost: float) -> None:
        if not self.wants_processes and (self._spent >= STARTING or (self.left or 0) * cost >= 2 * STARTING):
            self.wants_processes = True
            self.why = "processes are being started"

    def _best(self) -> str:
        """The mode that what was measured speaks for."""
        best = "inline"
        for mode in ("threads", "processes"):
            if self.rates.get(mode, 0.0) >= BETTER * self.rates.get(best, 0.0):
                best = mode
        return best

    def _settle(self, now: float | None, cost: float, why: str | None = None) -> None:
        best = self._best()
        ratios = ", ".join(f"{mode} {rate:,.0f}" for mode, rate in self.rates.items())
        self.why = f"the best of what was measured, in items a second: {ratios}" + (f"; {why}" if why else "")
        self._settled_cost, self._unlike = cost if best == self.mode else 0.0, 0
        self.mode, self._phase = best, "settled"
        lost = (
            spent * (1 - self.rates[mode] / self.rates[best])
            for mode, spent in self._tried.items()
            if mode in self.rates
        )
        self._owed = sum(max(0.0, seconds) for seconds in lost) / SHARE if best in self.rates else 0.0
        self._tried.clear()
        self._decided = 0.0 if now is None else now
        self._until = math.inf if now is None else now + max(self._keep, self._owed)
        self._since, self._chunks, self._delivered = None, 0, 0
        self.wants_processes = self.wants_processes and best == "processes"

    def _again(self, cost: float) -> None:
        self.why = f"the cost of an item changed from {duration_text(self._settled_cost)} to {duration_text(cost)}"
        self.mode, self._phase, self._settled_cost = "inline", "inline", 0.0
        self._spent, self._since, self._chunks, self._delivered = 0.0, None, 0, 0
        self.rates.clear()
        self._unlike = 0
        self.wants_processes = False
