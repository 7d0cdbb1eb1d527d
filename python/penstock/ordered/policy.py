"""Decisions of a run, from what it has measured so far: how long chunks are, and where functions run.

Pure: it is told what was delivered and when, and answers. Nothing here knows a thread or a clock, so every decision can
be replayed.

A run in mode "auto" starts in the caller's thread. Where an item costs enough for others to help, it tries threads:
they pay when the functions release the interpreter lock or wait. Where they do not pay enough, worker processes are
started while the run goes on, and tried when they are up. Each trial does real work, whose results count; the best of
what was measured stays, the simpler one when they are close. A cost that changes fourfold opens the question again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["TARGETS", "Chooser", "Sizer"]

#: Seconds of work in a chunk: what a chunk costs to hand over is small beside it, and it is soon done.
TARGETS = {"inline": 0.001, "threads": 0.001_5, "processes": 0.004}
#: Most items of a chunk.
LARGEST = 4096
#: Seconds per item from which others can help.
WORTH = 8e-6
#: Seconds of work after which threads are tried.
EARLY = 0.002
#: Seconds of work after which, or that must be left for which, processes are started.
STARTING = 0.15
#: Seconds that a trial lasts at least.
TRIAL = {"threads": 0.03, "processes": 0.06}
#: By how much the costlier way must be faster than the simpler one.
BETTER = 1.15
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
        self._cost: dict[str, float] = {}
        self._bytes = 0.0
        self._last = 0

    def cost(self, mode: str) -> float | None:
        """Seconds of work per item, as last seen in this mode."""
        return self._cost.get(mode)

    def saw(self, mode: str, items: int, spent: float) -> None:
        """A chunk was worked on."""
        if items:
            cost = spent / items
            held = self._cost.get(mode)
            self._cost[mode] = cost if held is None else held + (cost - held) * (0.5 if cost > held else 0.25)

    def read(self, items: int, size: int) -> None:
        """A chunk was read."""
        if items:
            self._bytes += (size / items - self._bytes) * 0.5
            self._last = items

    def items(self, mode: str) -> int:
        """How many items the next chunk should have, at least one."""
        if self._fixed is not None:
            return self._fixed
        cost = self._cost.get(mode) or max(self._cost.values(), default=0.0)
        if not self._cost:
            return 1
        wanted = int(TARGETS[mode] / cost) if cost > 0 else LARGEST
        if self._bytes > 0:
            wanted = min(wanted, int(self._most_bytes / self._bytes))
        return max(1, min(wanted, 2 * self._last or 1, self._bound))


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
    #: Whether worker processes should be started in the background.
    wants_processes: bool = False

    def __post_init__(self) -> None:
        if self.workers < 2:
            self._phase, self.why = "settled", "one worker cannot be faster than the caller's thread"

    def delivered(self, now: float, items: int, spent: float, cost: float) -> None:
        """A chunk of the present mode is done: `items` of it, `spent` seconds of work, `cost` per item of late."""
        self._items += items
        self._spent += spent
        if self.left is not None:
            self.left = max(0, self.left - items)
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
            self._rate(now)
            self._start_processes(cost)
        elif self._settled_cost and not self._settled_cost / 4 <= cost <= self._settled_cost * 4 and self.workers > 1:
            self._again(cost)

    def processes_ready(self) -> None:
        """The worker processes are up."""
        if self._phase == "waiting" and self.wants_processes:
            self._try("processes")

    def no_processes(self, why: str) -> None:
        """Worker processes cannot be had for these functions."""
        self.processes = self.wants_processes = False
        if self._phase == "waiting" or self.mode == "processes":
            self.rates.pop("processes", None)
            self._settle(self._settled_cost, why)

    def _rate(self, now: float) -> None:
        """Note how fast the present mode is, over the time since it began."""
        if self._since is not None and now - self._since > 0 and self._delivered:
            self.rates[self.mode] = self._delivered / (now - self._since)

    def _try(self, mode: str) -> None:
        self.mode, self._phase, self.why = mode, "trial", f"{mode} are tried"
        self._since, self._chunks, self._delivered = None, 0, 0

    def _look(self, now: float, cost: float) -> None:
        self._rate(now)
        if cost < WORTH:
            self.why = "items cost too little for others to help"
        elif self._spent >= EARLY and "inline" in self.rates:
            self._settled_cost = cost
            self._try("threads")

    def _judge(self, now: float, cost: float) -> None:
        if self._since is None or now - self._since < TRIAL[self.mode] or self._chunks < 2 * self.workers:
            return
        self._rate(now)
        ideal = self.workers * self.rates["inline"]
        if self.mode == "threads" and self.rates["threads"] < GOOD * ideal and self.processes:
            faster = self.rates["threads"] >= BETTER * self.rates["inline"]
            self.mode = "threads" if faster else "inline"
            self._phase, self._since, self._chunks, self._delivered = "waiting", None, 0, 0
            self.why = "processes may help; there is not enough work yet to start them"
            self._start_processes(cost)
        else:
            self._settle(cost)

    def _start_processes(self, cost: float) -> None:
        if not self.wants_processes and (self._spent >= STARTING or (self.left or 0) * cost >= 2 * STARTING):
            self.wants_processes = True
            self.why = "processes are being started"

    def _settle(self, cost: float, why: str | None = None) -> None:
        best = "inline"
        for mode in ("threads", "processes"):
            if self.rates.get(mode, 0.0) >= BETTER * self.rates.get(best, 0.0):
                best = mode
        ratios = ", ".join(f"{mode} {rate:,.0f}" for mode, rate in self.rates.items())
        self.why = f"the best of what was measured, in items a second: {ratios}" + (f"; {why}" if why else "")
        self.mode, self._phase, self._settled_cost = best, "settled", cost
        self._since, self._chunks, self._delivered = None, 0, 0
        self.wants_processes = self.wants_processes and best == "processes"

    def _again(self, cost: float) -> None:
        self.why = f"the cost of an item changed from {self._settled_cost:.2g} to {cost:.2g} s"
        self.mode, self._phase, self._settled_cost = "inline", "inline", 0.0
        self._spent, self._since, self._chunks, self._delivered = 0.0, None, 0, 0
        self.rates.clear()
        self.wants_processes = False
