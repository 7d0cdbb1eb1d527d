"""Evening out the load of workers unaided, on an engine and in a local run.

Owns: the rules that a user writes, the thread that looks, and the record of what it saw and did. What skew is worth a
move, which bins to split and which to make one again, how many workers are needed, and when, is decided by
`penstock_balance` (crate balance), which hears what each bin got or cost since the last look (`penstock._loads`); the
moves are those of its host, an engine or a local session.

Bins are evened out among the threads of all workers, query by query. The number of workers is that of processes, and
one decision for all queries, which share them, those without bins too: what each keeps busy adds up
(`penstock_balance::Sizer` says what that means). What a query was last seen to keep busy counts until it is measured
again, which is at ends of its batches, in proportion to what comes where that has become less since; a look at which
nothing is new says nothing of the number, nor does one while that number changes.

Invariants: one migration of its own of a query at a time; a query whose generation changed is looked at afresh; nothing
that goes wrong in a look ends the queries, or the looking; what cannot be done for one query holds up no other; the
thread ends with its host. Rows of what has been split or merged since the last look say nothing. Nor does a look at
which some worker did not tell: all that it has done would be missing from it, and be the load of the next one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from penstock._durations import Timeout, parse_timeout
from penstock._loads import Loads
from penstock._migration import parse_tolerance
from penstock._options import whole, yes_or_no
from penstock._parts import Part, Parts
from penstock._sizes import parse_bytes
from penstock.errors import ConfigError, EngineError, PenstockError

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["PAUSE_S", "Autobalance", "Host", "Look", "Looked", "Rules", "see_through"]

log = logging.getLogger(__name__)

#: Verdicts that are kept.
_VERDICTS = 1_000
#: Seconds that moves may hold rows up; that they are waited for while nothing is looked at; and that they may take.
PAUSE_S = 0.05
_SEEN_S = 5.0
_END_S = 600.0
#: The most looks of patience: fewer come in half a day.
_MOST_PATIENCE = 10_000
#: What the balancer says of a bin that should be split.
_SPLITTING = "splitting it does"
#: What loads are measured by.
_MEASURES = ("busy", "rows")
#: The least that a bin may be limited to.
_LEAST_BYTES = 1 << 16
#: Share of its time that a worker is to be busy where the number of workers follows the load.
_BUSY = 0.8
#: Of the time between two looks, what a query that gets nothing may keep workers busy.
_RESTS = 0.05


@dataclass(frozen=True)
class Look:
    """What one look at one query said, and what was done.

    Attributes
    ----------
    query : str
        Its name; empty in a local run.
    at : float
        Seconds since 1970.
    skew : float
        Load of the most loaded worker as a multiple of the mean of all, over the last looks; 1 is even. One that gets
        `r` times what each other one does has ``r * n / (r + n - 1)``: four times is 1.6 of two workers, 2.3 of four.
    expected : float
        The same after the moves.
    moves : int
        Bins that move, or would with ``dry_run``.
    why : str
        In words.
    needed : int or None
        Workers (processes) that all queries together need for the rates that come; None where nothing new was measured.
    splits, merges : int
        Bins that are split and made one again, or would be; `why` tells of the largest that holds too much.
    workers : int or None
        The number of workers to which the engine goes, or would; None while it stays as it is. `why` tells the reason.
    by : str
        What loads were measured by: ``"busy"``, or ``"rows"``, also where no time was measured.
    """

    query: str
    at: float
    skew: float
    expected: float
    moves: int
    why: str
    needed: int | None = None
    splits: int = 0
    merges: int = 0
    workers: int | None = None
    by: str = "rows"


@dataclass(frozen=True)
class Rules:
    """When to act; see ``Engine.autobalance`` and ``LocalSession.autobalance``."""

    every_s: float
    trigger: float
    tolerance: float
    patience: int
    least_rows: int
    most_bytes: int | None
    workers: tuple[int, int] | None
    dry_run: bool
    by: str = "busy"

    @classmethod
    def of(
        cls,
        by: str,
        every: Timeout,
        trigger: float,
        tolerance: float,
        patience: int,
        least_rows: int,
        max_bin_bytes: int | str | None,
        workers: tuple[int, int] | None,
        dry_run: bool,
        counted: str = "workers",
    ) -> Rules:
        """What a user wrote; `counted` is what `workers` is called there.

        Raises
        ------
        ConfigError
            When an option is out of range.
        """
        if by not in _MEASURES:
            raise ConfigError(f"by={by!r} is neither 'busy' (time that bins keep workers busy) nor 'rows'")
        seconds = parse_timeout(every, "every", least_s=0.05)
        if parse_tolerance("tolerance", tolerance) > parse_tolerance("trigger", trigger):
            raise ConfigError(f"tolerance={tolerance!r} is above trigger={trigger!r}: bins would move to no effect")
        counts: dict[str, int] = {}
        for name, value, least, top in (
            ("patience", patience, 1, _MOST_PATIENCE),
            ("least_rows", least_rows, 0, (1 << 32) - 1),
        ):
            count = whole(value, least, top)
            if count is None:
                raise ConfigError(f"{name}={value!r} must be an int from {least} to {top}")
            counts[name] = count
        most_bytes = None if max_bin_bytes is None else parse_bytes(max_bin_bytes, "max_bin_bytes")
        if most_bytes is not None and most_bytes < _LEAST_BYTES:
            raise ConfigError(
                f"max_bin_bytes={max_bin_bytes!r} must be at least {_LEAST_BYTES >> 10} KiB, since each part has tables"
                " of its own; None is for bins of any size"
            )
        if most_bytes is not None and most_bytes >= 1 << 63:
            raise ConfigError(
                f"max_bin_bytes={max_bin_bytes!r} must be below 2**63 bytes; None is for bins of any size"
            )
        span = None
        if workers is not None:
            ends = workers if isinstance(workers, (tuple, list)) and len(workers) == 2 else (None, None)
            fewest, most = map(whole, ends)
            if fewest is None or most is None or not 1 <= fewest <= most <= 1 << 12:
                raise ConfigError(f"{counted}={workers!r} must be (fewest, most), ints from 1 to {1 << 12}")
            span = fewest, most
        yes_or_no(dry_run, "dry_run")
        return cls(
            seconds,
            float(trigger),
            float(tolerance),
            counts["patience"],
            counts["least_rows"],
            most_bytes,
            span,
            dry_run,
            by,
        )


@dataclass(frozen=True)
class Looked:
    """What is known of one query at a look: its bins and parts, none where it keeps no state, and counts since its
    generation began."""

    query: str
    generation: int
    bits: int
    bins: list[Part]
    owners: list[int]
    workers: int
    loads: Loads
    bytes: list[int | None]
    rows: int
    busy_s: float
    offered: float | None
    #: Why nothing can be said of it now, in words: figures of some workers are not there. Empty where all are.
    missing: str = ""


class Host(Protocol):
    """What of an engine, or of a local session, it works with."""

    #: Of each worker.
    threads: int
    #: Why no bin can be split there, in words; None where bins can.
    whole: str | None

    @property
    def workers(self) -> int | None: ...
    def looked(self) -> Iterable[Looked]: ...

    # Both return the handle of moves that have not ended in the time that they are waited for (`see_through`).
    def move(self, query: str, moves: Mapping[Part, int], stopping: Callable[[], bool]) -> Any: ...
    def recut(
        self, query: str, splits: Mapping[Part, int], merges: Sequence[Part], stopping: Callable[[], bool]
    ) -> Any: ...
    def resize(self, workers: int) -> None: ...
    def tell(self, query: str, advised: bool, **facts: Any) -> None: ...
    def failed(self, error: Exception) -> None: ...


class _Watched:
    """One query between two looks."""

    def __init__(self, rules: Rules, first: Looked, load: float | None, at: float) -> None:
        from penstock import _native

        self.balancer = _native.Balancer(
            rules.trigger, rules.tolerance, rules.patience, rules.least_rows, rules.most_bytes, first.bits
        )
        self.last = first
        #: Workers that it keeps busy, as it was last measured, and rows per second that came then.
        self.load, self.offered = load, first.offered
        #: Rows and busy seconds when the time was last told, which is at ends of batches; rows are told all along.
        self.timed = first.rows, first.busy_s
        #: When it was looked at.
        self.at = at

    def measure(self, now: Looked, sizer: _native.Sizer, at: float) -> bool:
        """Whether there is something new to know of what it keeps busy."""
        rows, busy = now.rows - self.timed[0], now.busy_s - self.timed[1]
        seconds, self.at = at - self.at, at
        if now.offered is None:
            return False
        load: float | None = None
        if now.offered == 0.0 and (rows > 0 or busy > _RESTS * seconds):
            # What keeps workers busy has come before: it is not known what that was.
            self.timed = now.rows, now.busy_s
            return False
        if busy > 0.0:
            self.timed = now.rows, now.busy_s
            load = sizer.load(now.offered, max(0, rows), busy)
        elif now.offered == 0.0:
            load = 0.0
        elif self.load is not None and self.offered is not None and now.offered < self.offered:
            # No batch, and less comes than did.
            load = self.load * now.offered / self.offered
        if load is not None:
            self.load, self.offered = load, now.offered
        return load is not None


class Autobalance:
    """A handle on the evening out of loads; a context manager, at whose end it stops looking.

    Attributes
    ----------
    looks : list of Look
        What was seen and done, the latest last; up to 1,000.
    """

    def __init__(
        self,
        engine: Host,
        rules: Rules,
        name: str,
        room: Callable[[int], int] = lambda workers: workers,
        short: Callable[[int], str] = "task slots for {} cannot be had now".format,
    ) -> None:
        self._engine = engine
        #: The number of workers that can be had now on the way to a larger one, and why that cannot be had.
        self._room, self._short = room, short
        self._rules = rules
        self._watched: dict[str, _Watched] = {}
        #: Moves of queries that are under way from an earlier look, with the time until which they may be.
        self._moving: dict[str, tuple[Any, float]] = {}
        #: Whether somebody was told that bins which should be split cannot be; or that a look failed as none should.
        self._told_whole = self._told_failure = False
        least, most = rules.workers or (1, 1 << 12)
        from penstock import _native

        self._sizer = _native.Sizer(least, most, engine.threads, _BUSY, rules.patience)
        self._lock = threading.Lock()
        self._looks: deque[Look] = deque(maxlen=_VERDICTS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock-autobalance-{name}", daemon=True)

    def start(self) -> Autobalance:
        """Begin to look; called by its host."""
        self._thread.start()
        return self

    @property
    def looking(self) -> bool:
        """Whether it still looks."""
        return not self._closing.is_set()

    @property
    def looks(self) -> list[Look]:
        """What it has seen and done so far, oldest first."""
        with self._lock:
            return list(self._looks)

    def stop(self) -> None:
        """Look no more, without waiting for the end of what is under way."""
        self._closing.set()

    def close(self) -> None:
        """Look no more; a migration under way ends after its step, for which it waits some seconds at most.

        Harmless when done twice.
        """
        self.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Autobalance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        acted = sum(1 for look in self.looks if look.moves or look.splits or look.merges or look.workers is not None)
        return f"<Autobalance every {self._rules.every_s:g} s: {len(self.looks)} looks, {acted} with something to do>"

    # In its thread

    def _run(self) -> None:
        while not self._closing.wait(self._rules.every_s):
            try:
                self.look(time.time())
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Say why a look came to nothing."""
        # The query ended meanwhile, a member was lost, the engine closes: the next look sees what is there.
        if self._closing.is_set():
            return
        if not isinstance(error, PenstockError) and not self._told_failure:
            self._told_failure = True
            log.warning("balance failed, and goes on: %s: %s", type(error).__name__, error)
        self._engine.failed(error)

    def look(self, at: float) -> None:
        """One look at all queries."""
        seen = list(self._engine.looked())
        before, self._watched = self._watched, {}
        compared: list[tuple[_Watched, Looked]] = []
        for now in seen:
            known = before.get(now.query)
            if now.missing:
                if known is not None:
                    self._watched[now.query] = known
                self._enter(Look(now.query, at, 1.0, 1.0, 0, now.missing))
                continue
            if known is None or known.last.generation != now.generation:
                known = _Watched(self._rules, now, known.load if known is not None else None, at)
            elif known.last.bins != now.bins:
                # What came for parts before there were any is not known.
                known.last = now
            else:
                compared.append((known, now))
            self._watched[now.query] = known
        size = self._sized(compared, at)
        for known, now in compared:
            # What cannot be done for one query holds up no other, nor the number of workers.
            try:
                self._judge(known, now, at, size)
            except Exception as error:
                self._failed(error)
        workers = size[1]
        if workers is not None and not self._rules.dry_run and not self._closing.is_set():
            self._engine.resize(workers)

    def _judge(self, known: _Watched, now: Looked, at: float, sized: tuple[int | None, int | None, str]) -> None:
        """Say of one query what has come since the last look, and act."""
        needed, workers, size = sized
        if self._is_moving(now.query):
            self._enter(Look(now.query, at, 1.0, 1.0, 0, f"moves are under way{size}", needed, workers=workers))
        elif not now.bins:
            known.last = now
            self._enter(Look(now.query, at, 1.0, 1.0, 0, f"keeps no state{size}", needed, workers=workers))
        else:
            plan = Parts(now.bits, dict(zip(now.bins, now.owners, strict=True)))
            new = now.loads.since(known.last.loads)
            by, loads = new.by(self._rules.by, plan)
            came = sum(new.rows(plan).values())
            of_bins = [loads[part] for part in now.bins]
            verdict = known.balancer.look(now.bins, now.owners, (of_bins, came), now.bytes, now.workers)
            known.last = now
            moves, splits, merges = dict(verdict["moves"]), dict(verdict["splits"]), verdict["merges"]
            why, whole = verdict["why"], self._engine.whole
            if whole is not None:
                if splits or _SPLITTING in why:
                    why = f"{why}; {whole}"
                if splits and not self._told_whole:
                    self._told_whole = True
                    log.warning("balance cannot even a load out: %s", why)
                splits, merges = {}, []
            entry = Look(
                now.query, at, verdict["skew"], verdict["expected"], len(moves), why + size, needed,
                len(splits), len(merges), workers, by,
            )  # fmt: skip
            self._enter(entry, moves, splits, merges)

    def _is_moving(self, query: str) -> bool:
        """Whether what was begun at an earlier look is under way; raises what went wrong with it."""
        if query not in self._moving:
            return False
        handle, until = self._moving[query]
        if handle._wait(0.0):
            del self._moving[query]
            handle.wait(0.0)
            return False
        if time.monotonic() >= until:
            self._moving[query] = handle, math.inf
            handle.cancel()
            raise EngineError(
                f"the moves of {f'query {query}' if query else 'the run'} have not ended in {_END_S:g} s: no further"
                " step begins, and nothing else moves there before they end"
            )
        return True

    def _sized(self, compared: Sequence[tuple[_Watched, Looked]], at: float) -> tuple[int | None, int | None, str]:
        """Workers that are needed, the number to go to now, and what is said of that."""
        new = [known.measure(now, self._sizer, at) for known, now in compared]
        there = self._engine.workers
        told = None
        if there is not None and any(new):
            told = self._sizer.look(there, [known.load for known in self._watched.values()])
        if told is None:
            return None, None, ""
        load, needed, workers, looks = told
        allowed = self._rules.workers
        if allowed is None or workers == there:
            return needed, None, ""
        queries = "the query keeps" if len(self._watched) == 1 else f"{len(self._watched)} queries keep"
        because = f"{queries} {load:.2f} busy, each may be for {_BUSY:.0%}, {allowed[0]} to {allowed[1]} are allowed"
        wanted, workers = workers, self._room(workers)
        if workers == there:
            return needed, None, f"; {there} workers stay, {self._short(wanted)}: {because}"
        way = "" if workers == wanted else f", on the way to {wanted}"
        if looks > 0:
            return needed, None, f"; {looks} looks before {there} workers become {workers}{way}: {because}"
        become = "would become" if self._rules.dry_run else "become"
        return needed, workers, f"; {there} workers {become} {workers}{way}: {because}"

    def _enter(
        self,
        look: Look,
        moves: Mapping[Part, int] = MappingProxyType({}),
        splits: Mapping[Part, int] = MappingProxyType({}),
        merges: Sequence[Part] = (),
    ) -> None:
        """Keep what a look said, and do it."""
        with self._lock:
            self._looks.append(look)
        if not self._rules.dry_run:
            left = None
            if moves:
                left = self._engine.move(look.query, moves, self._closing.is_set)
            if left is None and (splits or merges):
                left = self._engine.recut(look.query, splits, merges, self._closing.is_set)
            if left is not None:
                self._moving[look.query] = left, time.monotonic() + _END_S
        if moves or splits or merges or look.workers is not None:
            self._engine.tell(
                look.query,
                self._rules.dry_run,
                bins=len(moves),
                workers=look.workers,
                skew=look.skew,
                expected=look.expected,
                splits=_named(splits),
                merges=_named(merges),
                reason=look.why,
            )


def _named(parts: Iterable[Part]) -> str | None:
    """Bins and parts as one word: prefixes and their bits."""
    return ",".join(f"{prefix}/{bits}" for prefix, bits in parts) or None


def see_through(handle: Any, stopping: Callable[[], bool]) -> Any:
    """Wait for the end of moves, or of the step under way once nobody looks any more; returns the handle where that
    takes too long to look at nothing meanwhile, as where they wait for the end of a long batch."""
    until, cancelled = time.monotonic() + _SEEN_S, False
    while not handle._wait(0.1):
        if stopping() and not cancelled:
            cancelled = True
            handle.cancel()
        if time.monotonic() >= until:
            return handle
    handle.wait(_END_S)
    return None
