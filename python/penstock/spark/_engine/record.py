"""What an engine has measured: the latest figures of every worker, and its timeline.

Owns: asking the members for figures a few times a second, and keeping what they tell within bounded memory. All
times are seconds since 1970; the members' clocks are taken as they are. Samples of workers, which are made all the
time, lie further apart the older they are, so that they reach back to the beginning like what comes now and then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from sys import intern
from typing import Any, NamedTuple

from penstock import _loads
from penstock._figures import ENGINE_MOVES
from penstock._parts import Part
from penstock.report._timeline import Change, Epoch, Migration, Slice, Timeline, WorkerSample, thinned
from penstock.spark._engine.hub import Call, Hub, Member
from penstock.spark._engine.metrics import Sample

__all__ = ["Loads", "Recorder"]

#: How often the members are asked, seconds.
PERIOD_S = 0.25
#: Entries kept of each kind; the oldest go first, of samples every second one.
_EPOCHS, _SLICES, _MIGRATIONS, _SAMPLES, _MOVES = 100_000, 500_000, 10_000, 200_000, 200_000


class Loads(NamedTuple):
    """What the bins of a query got and hold; see `Recorder.loads`."""

    #: Of the workers that told; -1 where none did.
    generation: int
    #: What they got and cost.
    loads: _loads.Loads
    #: Bytes of state of each bin and part as it was a moment ago, by keyed step. Of one that is on its way, what the
    #: larger of its two workers said.
    bytes: list[dict[Part, int]]
    #: How many workers told.
    workers: int = 0

    def bytes_of(self, part: Part) -> int | None:
        """Bytes of a bin in all keyed steps; None unless they are known of each."""
        sizes = [step.get(part) for step in self.bytes]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None


class Recorder:
    """Collects figures.

    Parameters
    ----------
    hub : Hub
        Whose members are asked; must not have started.
    title : str
        Of the timeline.
    name_of : callable
        From a query's name at the members to the name to show; None for an unknown query.
    """

    def __init__(self, hub: Hub, title: str, name_of: Callable[[str], str | None]) -> None:
        self._hub = hub
        self._title = title
        self._name_of = name_of
        self._lock = threading.Lock()
        self._asked: dict[int, Call] = {}
        self._next = 0.0
        self._epochs: deque[Epoch] = deque(maxlen=_EPOCHS)
        self._slices: deque[Slice] = deque(maxlen=_SLICES)
        self._migrations: deque[Migration] = deque(maxlen=_MIGRATIONS)
        self._samples: list[WorkerSample] = []
        #: Values in the order of `ENGINE_MOVES`: there may be many, and a dict takes three times as much.
        self._moves: deque[tuple[Any, ...]] = deque(maxlen=_MOVES)
        self._changes: deque[Change] = deque(maxlen=_MIGRATIONS)
        #: query -> bytes of state that its bins took between processes, not yet told of.
        self._moved: dict[str, int] = {}
        #: (query, worker) -> the latest figures, of workers that are gone too: one of that number may come again, and
        #: counts on.
        self._latest: dict[tuple[str, int], dict[str, Any]] = {}
        #: Member -> those of them that it told of last.
        self._told: dict[int, set[tuple[str, int]]] = {}
        #: Those of them whose member has died, or runs the query no more.
        self._ended: set[tuple[str, int]] = set()
        #: (query, worker) -> generation, and rows and late rows of the generations before it.
        self._earlier: dict[tuple[str, int], tuple[int, int, int]] = {}
        hub.listen(turn=self._turn, lost=self._lost)

    # Told by the engine

    def epoch(self, epoch: Epoch) -> None:
        """Enter a completed epoch."""
        self._epochs.append(epoch)

    def migration(self, migration: Migration) -> None:
        """Enter a completed migration."""
        self._migrations.append(migration)

    def change(self, change: Change) -> None:
        """Enter that workers were lost and replaced."""
        self._changes.append(change)

    def rescaled(self, change: Change) -> None:
        """Enter a rescale that has ended: what moved counts for no migration, and those that went cannot tell of it."""
        self._changes.append(change)

        def forget() -> None:
            with self._lock:
                self._moved.clear()

        self.after_refresh(forget)

    def forget(self, query: str) -> None:
        """A query's workers are gone; what was measured stays in the timeline."""
        with self._lock:
            for key in [key for key in self._latest if key[0] == query]:
                self._unsay(key, self._latest.pop(key)["member"])
            for key in [key for key in self._earlier if key[0] == query]:
                del self._earlier[key]
            self._ended = {key for key in self._ended if key[0] != query}

    # Read by users

    def refresh(self, timeout: float = 2.0) -> None:
        """Ask all members now and wait for their answers."""
        calls = [self._ask(member) for member in self._hub.members()]
        self._hub.wait(calls, timeout=timeout)

    def loads(self, query: str, timeout: float = 2.0) -> Loads:
        """What each bin of a query got since its generation began, and what it holds.

        Parameters
        ----------
        query : str
            As the members call it.
        timeout : float
            Seconds; members that do not answer by then do not count.

        Returns
        -------
        Loads
            Of the members of the newest generation. A sum without some of them says nothing of what came since another
            one: `Loads.workers` tells of how many it is.
        """
        asked = {"do": "stats", "query": query, "loads": True}
        calls = [self._hub.call(member, asked, hook=partial(self._take, of=query)) for member in self._hub.members()]
        self._hub.wait(calls, timeout=timeout)
        generation, workers = -1, 0
        loads = _loads.Loads()
        sizes: list[dict[Part, int]] = []
        for call in calls:
            told = {} if call.lost is not None or call.failure is not None else call.body.get("queries", {})
            figures = told.get(query, {})
            if "loads" not in figures or int(figures["generation"]) < generation:
                continue
            if int(figures["generation"]) > generation:
                generation, workers, loads = int(figures["generation"]), 0, _loads.Loads()
                sizes.clear()
            workers += len(figures["group"]["workers"])
            loads = loads.with_(_loads.Loads(figures["loads"]["steps"]))
            told_bytes = figures["loads"]["bytes"]
            sizes += [{} for _ in range(len(told_bytes) - len(sizes))]
            for known, step in zip(sizes, told_bytes, strict=False):
                for prefix, bits, size in step:
                    known[prefix, bits] = max(size, known.get((prefix, bits), 0))
        return Loads(generation, loads, sizes, workers)

    def after_refresh(self, then: Callable[[], None]) -> None:
        """Ask all members now, and call `then` in the hub's thread when they have answered or are gone."""
        members = self._hub.members()
        left = len(members)

        def take(call: Call) -> None:
            nonlocal left
            self._take(call)
            left -= 1
            if left == 0:
                then()

        for member in members:
            self._hub.call(member, {"do": "stats"}, hook=take)
        if not members:
            then()

    def take_moved_bytes(self, query: str) -> int:
        """Bytes of state that bins of a query took between processes since the last call; moves come one at a time."""
        with self._lock:
            return self._moved.pop(query, 0)

    def latest(self) -> list[dict[str, Any]]:
        """The latest figures of every worker of every query that is there, of its newest generation."""
        with self._lock:
            entries = sorted(self._latest.items())
            newest: dict[str, int] = {}
            for (query, _), entry in entries:
                newest[query] = max(entry["generation"], newest.get(query, 0))
            there = [entry for key, entry in entries if key not in self._ended]
            return [dict(entry) for entry in there if entry["generation"] == newest[entry["query"]]]

    def samples(self) -> list[Sample]:
        """The latest figures for a scrape: nobody is asked for them."""
        rows = self.latest()
        found: list[Sample] = []
        for row in rows:
            own = {"query": row["query"], "worker": str(row["worker"])}
            found += [Sample(f"penstock_{name}", own, row[name]) for name in ("state_bytes", "keys", "bins")]
            found.append(Sample("penstock_worker_rows_total", own, row["rows"]))
        # Whether a query has workers there or not. Of two in one slot the first serves, the other is a second attempt.
        serving = {member.slot: member for member in reversed(self._hub.members()) if member.process}
        for resident, member in sorted(serving.items()):
            process, own = member.process, {"resident": str(resident)}
            staging = process.get("staging") or {}
            for name, labels, value in (
                ("penstock_member_memory_bytes", own, process.get("rss_bytes")),
                ("penstock_staged_bytes", own, staging.get("memory_bytes")),
                ("penstock_staged_disk_bytes", own, staging.get("disk_bytes")),
                (
                    "penstock_member_refused_connections_total",
                    {**own, "member": str(member.id)},
                    process.get("refused_connections"),
                ),
            ):
                if value is not None:
                    found.append(Sample(name, labels, value))
        return found

    def moves(self) -> list[dict[str, Any]]:
        """The log of moved bins."""
        return [dict(zip(ENGINE_MOVES.names, move, strict=True)) for move in list(self._moves)]

    def timeline(self, conditions: Mapping[str, str]) -> Timeline:
        """A copy of everything measured."""
        with self._lock:
            samples = list(self._samples)
        return Timeline(
            self._title,
            list(self._epochs),
            list(self._slices),
            list(self._migrations),
            samples,
            dict(conditions),
            list(self._changes),
        )

    # Asking

    def _turn(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PERIOD_S
        for member in self._hub.members():
            asked = self._asked.get(member.id)
            if asked is None or asked.settled:
                self._asked[member.id] = self._ask(member)
        connected = {member.id for member in self._hub.connected()}
        for number in [number for number in self._asked if number not in connected]:
            del self._asked[number]

    def _ask(self, member: Member) -> Call:
        return self._hub.call(member, {"do": "stats"}, hook=self._take)

    def _take(self, call: Call, of: str | None = None) -> None:
        """Enter what a member has answered: of one query, or of all that it runs."""
        if call.lost is not None or call.failure is not None:
            return
        call.member.process = call.body.get("process", {})
        at = time.time()
        running: set[tuple[str, int]] = set()
        #: Queries that tell nothing at the moment: their workers are as they were.
        busy: set[str] = set()
        for key, figures in call.body.get("queries", {}).items():
            name = self._name_of(key)
            if name is None:
                continue
            if "busy" in figures:
                busy.add(name)
                continue
            # A generation may have ended since the last time, or have come and gone; or what it told came too late.
            told = [*figures.get("ended", ()), *([figures] if "group" in figures else ())]
            if "group" in figures and call.member.lost is None:
                running |= {(name, int(worker["worker"])) for worker in figures["group"]["workers"]}
            shown: dict[int, WorkerSample] = {}
            for one in told:
                shown |= self._group(call.member, name, int(one["generation"]), one["group"], at)
            # Of a worker with an earlier life in one answer the timeline has what it is now: it is one worker.
            self._enter(shown.values())
        meant = None if of is None else self._name_of(of)
        with self._lock:
            told_before = self._told.get(call.member.id, ())
            before = [worker for worker in told_before if of is None or worker[0] == meant]
            self._ended.update(worker for worker in before if worker not in running and worker[0] not in busy)

    def _enter(self, samples: Iterable[WorkerSample]) -> None:
        with self._lock:
            self._samples += samples
            if len(self._samples) >= _SAMPLES:
                older, newer = self._samples[: _SAMPLES // 2], self._samples[_SAMPLES // 2 :]
                # Of workers that told once each there is no second one to leave out.
                self._samples = thinned(older)[-_SAMPLES * 3 // 8 :] + newer

    def _lost(self, member: Member) -> None:
        with self._lock:
            self._ended.update(self._told.get(member.id, ()))

    def _unsay(self, key: tuple[str, int], member: int) -> None:
        """A member is not the one any more that told of a worker last; with the lock."""
        told = self._told[member]
        told.discard(key)
        if not told:
            del self._told[member]

    def _group(
        self, member: Member, query: str, generation: int, group: Mapping[str, Any], at: float
    ) -> dict[int, WorkerSample]:
        """Enter what a generation tells; returns the samples of its workers, which are for the caller to keep."""
        found: dict[int, WorkerSample] = {}
        with self._lock:
            for worker in group["workers"]:
                sample = self._worker(member, query, generation, worker, at)
                if sample is not None:
                    found[sample.worker] = sample
            for sample in group["slices"]:
                self._slices.append(Slice(sample["ended_ns"] / 1e9, sample["latency_ns"], sample["rows"]))
            for move in group["moves"]:
                known = {"query": query, "at": int(move["at_ns"]), **move, "what": intern(move["what"])}
                self._moves.append(tuple(known[name] for name in ENGINE_MOVES.names))
                self._moved[query] = self._moved.get(query, 0) + int(move["bytes"])
        return found

    def _worker(
        self, member: Member, query: str, generation: int, worker: Mapping[str, Any], at: float
    ) -> WorkerSample | None:
        key = (query, int(worker["worker"]))
        before = self._latest.get(key)
        known, rows, late = self._earlier.get(key, (generation, 0, 0))
        if generation < known:
            return None  # an answer that was long under way: what it tells is over
        if before is not None and known != generation:
            rows, late = before["rows"], before["late_rows"]
        self._earlier[key] = (generation, rows, late)
        self._ended.discard(key)
        bins = list(worker["bins"])
        staging: Mapping[str, Any] = member.process.get("staging") or {}
        load = WorkerSample(
            at,
            key[1],
            bins[0] if bins else 0,
            int(worker["keys"]),
            int(worker["state_bytes"]),
            rows + int(worker["rows"]),
            query,
            int(staging.get("memory_bytes", 0)),
            int(staging.get("disk_bytes", 0)),
        )
        if before is None or before["member"] != member.id:
            if before is not None:
                self._unsay(key, before["member"])
            self._told.setdefault(member.id, set()).add(key)
        self._latest[key] = {
            "query": query,
            "worker": load.worker,
            "bins": load.bins,
            "bins_by_step": bins,
            "keys": load.keys,
            "state_bytes": load.state_bytes,
            "rows": load.rows,
            "late_rows": late + int(worker["late_rows"]),
            "epochs": int(worker["epochs"]),
            "busy_s": int(worker.get("busy_ns", 0)) / 1e9,
            "scopes": list(worker.get("scopes", ())),
            "generation": generation,
            "member": member.id,
            "resident": member.slot,
            "executor": member.executor,
            "pid": member.pid,
            "rss_bytes": member.process.get("rss_bytes"),
            "staging_memory_bytes": staging.get("budget_bytes"),
            "staged_bytes": load.staged_bytes,
            "staged_peak_bytes": staging.get("memory_peak_bytes"),
            "disk_bytes": load.disk_bytes,
            "spilled_bytes": staging.get("spilled_bytes"),
            "refused_connections": member.process.get("refused_connections"),
            "at": at,
        }
        return load
