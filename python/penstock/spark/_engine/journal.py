"""What happens in an engine, told twice: as log lines with fields, and as counters.

Owns: the form of the lines, the names of their fields, and which events of the protocol become one. The protocol
decides everything, so what it hears and asks for is what happened: the `Executor` shows each step here. What is
measured in the caller's thread (the time of a batch) is told by `query`.

A line is ``batch committed engine=e query=q generation=4294967297 members=2 batch=3 rows=600``, of the loggers below
``penstock``; each of its fields is an attribute of the `logging.LogRecord`, beside ``event``, its first words.

What is of a query has its generation, the members of that, and its last batch that has begun, where there are any. What
is of a member or of the engine has the number of members that serve: generations and batches are those of queries.

Invariants: what fails here fails for nobody else; no event has values of rows, which exceptions may have.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from penstock.errors import PenstockError, UserFunctionError
from penstock.spark._engine.metrics import Counters

__all__ = ["FIELDS", "Journal", "tell"]

log = logging.getLogger(__name__)

#: Every field of a line; none is an attribute that `logging` itself has.
FIELDS = (
    "event", "engine", "query", "batch", "generation", "members", "member", "resident", "pid", "executor", "rows",
    "seconds", "trigger_seconds", "feed_seconds", "run_seconds", "serve_seconds", "commit_seconds", "claim", "files",
    "bins", "steps", "workers", "skew", "expected", "splits", "merges", "reason", "connections",
)  # fmt: skip

#: Values that stand without quotes.
#: Halves of surrogates, which no file takes, and what turns a line around in a terminal stand between quotes, escaped.
_BARE = re.compile(r"[^\s\"=\\\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
#: Characters of a reason at most.
_LONG = 500
#: Seconds between two looks at the refused connections.
_LOOK_S = 1.0
#: Of the registry's counters; the rest of their names is the reason.
_REFUSED = "refused_"
#: Seconds that a store may take before it is told what is waited for, and at most between two times; also between the
#: first two lines, and at most, of what it refuses again and again.
_SLOW_S = (30.0, 600.0)
#: Facts of errors that are values of rows, and stand in their texts; and what names a key in texts of others.
_OF_ROWS = ("key", "value")
_OF_KEYS = re.compile(r"(the state of key |the sum in column '[^']*' of )(?:.*(?= overflows )|.*)", re.DOTALL)
#: Where texts begin to say why a migration was cut off; and how they say that a state cannot be sent or taken.
_OF_CUTS = re.compile(r"the migration was cut off: (.*)", re.DOTALL)
_OF_STATES = re.compile(r"the state (of key |could not be restored)")
#: Why files are not merged, by a kind of failure whose texts may have values of rows.
_OF_MERGES = {"User": "files are not merged: a function raised", "Data": "files are not merged: their data is refused"}
#: What nobody waits for that a store is asked, by name.
_ASIDE = {
    "deletes": "files that nobody needs cannot be deleted",
    "notes": "a note of what the sink gets cannot be written",
}
#: How far Spark's time of a batch may be behind that of the last one before it is told, milliseconds.
_BEHIND_MS = 60_000
#: What moves bins, or makes others of them; each begins, and is done or fails.
MOVES = ("migration", "split", "merge")

#: What the protocol asks for in a step: what it is, and about what.
Asks = Sequence[tuple[str, Mapping[str, Any]]]


class _Line:
    """Made into text only where somebody reads it."""

    __slots__ = ("facts",)

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts

    def __str__(self) -> str:
        event, *rest = (_shown(value) if name != "event" else str(value) for name, value in self.facts.items())
        names = [name for name in self.facts if name != "event"]
        return " ".join([event, *(f"{name}={value}" for name, value in zip(names, rest, strict=True))])


def tell(to: logging.Logger, level: int, event: str, **facts: Any) -> None:
    """Write a line; fields that are None are left out.

    Examples
    --------
    >>> str(_Line({"event": "batch failed", "query": "my query", "batch": 3}))
    'batch failed query="my query" batch=3'
    """
    if to.isEnabledFor(level):
        told = {"event": event, **{name: value for name, value in facts.items() if value is not None}}
        to.log(level, "%s", _Line(told), extra=told, stacklevel=2)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    if len(text) > _LONG:
        text = f"{text[: _LONG - 3]}..."
    return text if _BARE.fullmatch(text) else json.dumps(text)


class Known(Protocol):
    """A member, as far as lines name it."""

    slot: int
    executor: str
    pid: int


@dataclass
class _Asked:
    """Something that was asked of the store of a query."""

    query: str
    #: What: claim, claims, manifest, read (of the driver), Write, Load, Merge (of a member).
    what: str
    about: Mapping[str, Any]
    #: Who waits for it; None for the driver.
    member: int | None
    #: When it was asked, and when it is told that it is waited for, of `time.monotonic`.
    since: float
    told: float

    def __str__(self) -> str:
        """What is waited for, as people call it: files by their names, as far as these are known."""
        about = self.about
        if self.what == "read":
            return "the list of its files, its claims and manifests"
        if self.what == "claims":
            return "the list of its files"
        if self.what == "claim":
            return f"claim-{about['number']:020} to be written"
        if self.what == "manifest":
            return f"manifest-{about['batch']:020}-... to be written"
        if self.what == "Write":
            return f"data-{about['stamp']['generation']:020}-{about['epoch']:020}-... to be written"
        names = [file["name"] for file in about["files"]]
        if self.what == "Load":
            names.insert(0, f"claim-{about['claim']['number']:020}")
        listed = ", ".join(names if len(names) < 4 else [names[0], "...", names[-1]])
        return f"{listed} to be {'read' if self.what == 'Load' else 'merged'}"


#: Counters that each query has from its first batch on, with the labels behind its name.
_OF_QUERIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    *(("penstock_batches_total", (outcome,)) for outcome in ("committed", "failed", "stopped")),
    *(("penstock_migrations_total", (outcome,)) for outcome in ("done", "failed")),
    ("penstock_rows_total", ()),
    ("penstock_late_rows_total", ()),
    ("penstock_generations_total", ()),
    ("penstock_claims_total", ()),
    ("penstock_manifests_total", ()),
    ("penstock_storage_errors_total", ()),
)


class Journal:
    """Lines and counters of one engine.

    Parameters
    ----------
    engine : str
        Its name.
    name_of : callable
        What people call the query of an id; None for an unknown one.
    known : callable
        The member of an id.
    """

    def __init__(self, engine: str, name_of: Callable[[str], str | None], known: Callable[[int], Known]) -> None:
        self.engine = engine
        self.counters = Counters()
        self._name_of = name_of
        self._known = known
        self._lock = threading.Lock()
        #: By query: its generation and how many members that has.
        self._generations: dict[str, tuple[int, int]] = {}
        #: By query: its last batch that has begun.
        self._batches: dict[str, int] = {}
        #: Members that serve, and their slots.
        self._serving: dict[int, int] = {}
        #: Slot -> how many were lost in whose place nobody has come to it since.
        self._vacant: dict[int, int] = {}
        #: Slot of a member whose executor goes -> the one that is wanted in its place.
        self._instead: dict[int, int] = {}
        #: What stores were asked, by ticket.
        self._asked: dict[int, _Asked] = {}
        #: By query and what a store refuses though nobody waits for it: since when, and when it is told again.
        self._refusing: dict[tuple[str, str], tuple[float, float]] = {}
        #: By query: Spark's time of the batch that was asked for last, milliseconds; those where it went back.
        self._clocks: dict[str, int] = {}
        self._behind: set[str] = set()
        #: By handle of a migration: which of `MOVES` it is, its query, and its bins once they are known.
        self._moving: dict[int, tuple[str, str, int | None]] = {}
        #: Counters of the registry's port as they were added up; none is before the engine has looked at its executors.
        self._refused: dict[str, int] | None = None
        #: By reason: connections not told yet; since when there are some, when the last ones came, when they are told.
        self._refusals: dict[str, tuple[int, float, float, float]] = {}
        self._look = 0.0
        for name in ("penstock_members_lost_total", "penstock_members_replaced_total"):
            self.counters.add(name, value=0.0)
        for outcome in ("done", "failed"):
            self.counters.add("penstock_rescales_total", outcome, value=0.0)

    # Told by queries, in the thread of Spark's call

    def batch_begun(self, query: str, batch: int, side_outputs: Iterable[str] = ()) -> None:
        """Spark has called with a batch for a flow with these side outputs."""
        with self._lock:
            first = query not in self._batches
            self._batches[query] = batch
        name = self._name_of(query) or query
        if first:
            self._begin_counting(name)
        for output in side_outputs:
            self.counters.add("penstock_side_rows_total", name, output, value=0.0)
        self._tell(logging.INFO, "batch begun", query, batch=batch)

    def _begin_counting(self, name: str) -> None:
        """A rate knows of a counter's first step only where its series was there before, at 0."""
        for counter, labels in _OF_QUERIES:
            self.counters.add(counter, name, *labels, value=0.0)

    def beside(self, query: str, late_rows: int, side_rows: Mapping[str, int]) -> None:
        """So many late rows and rows of each side output were beside the output of an epoch that is done."""
        counters, name = self.counters, self._name_of(query) or query
        counters.add("penstock_late_rows_total", name, value=late_rows)
        for output, rows in side_rows.items():
            counters.add("penstock_side_rows_total", name, output, value=rows)

    def late(self, query: str, batch: int, rows: int) -> None:
        """So many rows of a batch were late, and nobody takes them."""
        self._tell(logging.WARNING, "rows late", query, batch=batch, rows=rows)

    def in_memory(self, name: str) -> None:
        """The state of a query, which has had no batch yet, is durable nowhere, though nobody has said so."""
        reason = "no checkpointLocation: its state lives only as long as this engine and its workers"
        tell(log, logging.WARNING, "state in memory", engine=self.engine, query=name, reason=reason)

    def batch_committed(self, query: str, batch: int, rows: int, seconds: float, phases: Mapping[str, float]) -> None:
        """A batch returns to Spark: rows, seconds from call to return, and seconds by phase."""
        counters, name = self.counters, self._name_of(query) or query
        counters.add("penstock_batches_total", name, "committed")
        counters.add("penstock_rows_total", name, value=rows)
        counters.observe("penstock_batch_seconds", name, value=seconds)
        for phase, taken in phases.items():
            counters.add("penstock_batch_phase_seconds_total", name, phase, value=max(0.0, taken))
        counters.set("penstock_last_batch", name, value=batch)
        counters.set("penstock_last_batch_timestamp_seconds", name, value=time.time())
        told: dict[str, Any] = {f"{phase}_seconds": taken for phase, taken in phases.items()}
        self._tell(logging.INFO, "batch committed", query, batch=batch, rows=rows, seconds=seconds, **told)

    def batch_failed(
        self,
        query: str,
        batch: int | None,
        seconds: float,
        reason: BaseException,
        stopped: bool,
        name: str | None = None,
    ) -> None:
        """A batch raises, or nobody waits for it any more; `name` is for a query that has had none before.

        Without one, too, it counts as of none: each start of such a query has another id, and no series ever goes.
        """
        outcome = "stopped" if stopped else "failed"
        self.counters.add("penstock_batches_total", self._name_of(query) or name or "", outcome)
        why = None if stopped else _reason(reason)
        level = logging.INFO if stopped else logging.ERROR
        self._tell(level, f"batch {outcome}", query, name, batch=batch, seconds=seconds, reason=why)

    def forget(self, query: str, name: str) -> None:
        """A query is dropped: its id, and what people called it."""
        with self._lock:
            self.counters.forget(name)
            self._generations.pop(query, None)
            self._batches.pop(query, None)
            for what in _ASIDE:
                self._refusing.pop((query, what), None)
        self._clocks.pop(query, None)
        self._behind.discard(query)

    # Told by the executor, in its thread

    def step(self, event: Mapping[str, Any] | str, effects: Sequence[Mapping[str, Any] | str]) -> None:
        """The protocol has heard something and asks for something."""
        try:
            name, facts = _tagged(event)
            asks = [_tagged(effect) for effect in effects]
            if name in _EVENTS:
                _EVENTS[name](self, facts, asks)
            for name, facts in asks:
                if name in _EFFECTS:
                    _EFFECTS[name](self, facts)
        except Exception:
            log.exception("a step of engine %s could not be told", self.engine)

    def _member_up(self, facts: Mapping[str, Any], asks: Asks) -> None:
        number, slot = facts["member"], facts["slot"]
        why = next((about["why"] for one, about in asks if one == "Dismiss" and about["member"] == number), None)
        if why is not None:
            return self._of_member(logging.INFO, "member sent away", number, reason=why)
        self._serving[number] = slot
        if slot in self._vacant:
            self._replaced(number, self._vacant.pop(slot))
        else:
            self._of_member(logging.INFO, "member joined", number)

    def _replaced(self, number: int, lost: int = 1) -> None:
        """A member is there in the place of lost ones: of several where some did not live until they served."""
        self.counters.add("penstock_members_replaced_total", value=lost)
        self._of_member(logging.INFO, "member replaced", number)

    def _member_lost(self, facts: Mapping[str, Any], asks: Asks) -> None:
        member = self._known(facts["member"])
        self._settle(lambda asked: asked.member == facts["member"])
        self._serving.pop(facts["member"], None)
        if getattr(member, "dismissed", False):
            return self._of_member(logging.INFO, "member left", facts["member"])
        self.counters.add("penstock_members_lost_total")
        self._of_member(logging.WARNING, "member lost", facts["member"], reason=facts["reason"])
        slot = member.slot
        while slot in self._instead:
            slot = self._instead[slot]
        instead = next((number for number, taken in self._serving.items() if taken == slot), None)
        if instead is None:
            self._vacant[slot] = self._vacant.get(slot, 0) + 1
        else:
            self._replaced(instead)

    def _leaving(self, facts: Mapping[str, Any], asks: Asks) -> None:
        self._of_member(logging.INFO, "member leaves", facts["member"], reason="Spark decommissions its executor")
        for one, about in asks:
            if one == "StartResident":
                self._instead[self._known(facts["member"]).slot] = about["slot"]

    def _retired(self, facts: Mapping[str, Any]) -> None:
        """Nobody is wanted in a slot any more: whoever was lost there is missing no longer, and the next is new."""
        slot = facts["slot"]
        self._instead = {one: other for one, other in self._instead.items() if slot not in (one, other)}
        self.counters.add("penstock_members_replaced_total", value=self._vacant.pop(slot, 0))

    def _migrate(self, facts: Mapping[str, Any], asks: Asks) -> None:
        for move in facts["moves"]:
            wish, about = _tagged(move["wish"])
            kind = _tagged(about)[0].lower() if wish == "Recut" else "migration"
            self._moving[move["handle"]] = kind, move["query"], None

    def _rescale(self, facts: Mapping[str, Any], asks: Asks) -> None:
        self._of_engine(logging.INFO, "rescale begun", workers=facts["workers"])

    def _called(self, facts: Mapping[str, Any], asks: Asks) -> None:
        self._clocks[facts["query"]] = facts["clock_ms"]

    def _answered(self, facts: Mapping[str, Any], asks: Asks) -> None:
        with self._lock:
            asked = self._asked.pop(facts["ticket"], None)
        failure = facts["answer"].get("Err")
        if asked is None or asked.member is None or failure is None:
            return
        # Nobody else tells of files that are not merged, but where the workers ended meanwhile.
        if failure["kind"] != "Store" and (asked.what != "Merge" or failure["kind"] in ("Stale", "Echo", "State")):
            return
        self.counters.add("penstock_storage_errors_total", self._name_of(asked.query) or asked.query)
        reason = _OF_MERGES.get(failure["kind"]) or _OF_KEYS.sub(r"\1...", failure["message"])
        self._of_member(logging.WARNING, "storage failed", asked.member, query=asked.query, reason=reason)

    def _stored(self, facts: Mapping[str, Any], asks: Asks) -> None:
        with self._lock:
            asked = self._asked.pop(facts["ticket"], None)
        if asked is None:
            return
        what, query, about = asked.what, asked.query, asked.about
        name = self._name_of(query) or query
        if "Err" in facts["outcome"]:
            self.counters.add("penstock_storage_errors_total", name)
            told = {"batch": about.get("batch"), "claim": about.get("claim", about.get("number"))}
            self._tell(logging.WARNING, "storage failed", query, **told, reason=_of_store(facts["outcome"]["Err"]))
        elif what == "claim" and facts["outcome"]["Ok"] == {"Claimed": False}:
            self._tell(logging.WARNING, "claim refused", query, claim=about["number"])
        elif what == "claim":
            self.counters.add("penstock_claims_total", name)
            self._tell(logging.INFO, "claim made", query, claim=about["number"])
        elif what == "manifest":
            self.counters.add("penstock_manifests_total", name)
            told = {"batch": about["batch"], "claim": about["claim"], "files": len(about["files"])}
            self._tell(logging.INFO, "manifest written", query, **told)

    def _call(self, facts: Mapping[str, Any]) -> None:
        kind, asked = _tagged(facts["request"])
        if kind == "Start" and asked["rank"] == 0:
            query = facts["query"]
            with self._lock:
                self._generations[query] = asked["stamp"]["generation"], len(asked["members"])
            self.counters.add("penstock_generations_total", self._name_of(query) or query)
            workers = len(asked["members"]) * asked["threads"]
            self._tell(logging.INFO, "generation begun", query, batch=asked["epoch"], workers=workers)
        elif kind in ("Write", "Load", "Merge"):
            self._asks(kind, facts, asked, facts["member"])
        elif kind == "Release":
            self._runs_at(facts["query"], asked["epoch"], asked["clock_ms"])

    def _runs_at(self, query: str, batch: int, clock_ms: int) -> None:
        """A batch has a time: that which Spark gave it, or, where Spark's clock went back, that of the last one."""
        spark_ms = self._clocks.get(query, clock_ms)
        if clock_ms - spark_ms <= _BEHIND_MS:
            self._behind.discard(query)
        elif query not in self._behind:
            self._behind.add(query)
            reason = (
                f"Spark's time of the batch is {_date(spark_ms)}, that of the last one was {_date(clock_ms)}, which it"
                " has now, too: until Spark's clock has passed that, nothing that waits for a time goes on (timers,"
                " timeouts, idle_after). Set the driver's clock; if it was ahead then, start with a new checkpoint"
            )
            seconds = (clock_ms - spark_ms) / 1e3
            self._tell(logging.WARNING, "clock behind", query, batch=batch, seconds=seconds, reason=reason)

    def _asks(
        self, what: str, facts: Mapping[str, Any], about: Mapping[str, Any] | None = None, member: int | None = None
    ) -> None:
        now = time.monotonic()
        asked = _Asked(facts["query"], what, about or facts.get(what, {}), member, now, now + _SLOW_S[0])
        with self._lock:
            self._asked[facts["ticket"]] = asked

    def _failed(self, facts: Mapping[str, Any]) -> None:
        """What was asked for a call is moot; merging goes on."""
        self._settle(lambda asked: asked.query == facts["query"] and asked.what != "Merge")

    def _dropped(self, facts: Mapping[str, Any]) -> None:
        self._settle(lambda asked: asked.query == facts["query"])

    def _settle(self, moot: Callable[[_Asked], bool]) -> None:
        """Nobody waits any more for what a store was asked."""
        with self._lock:
            self._asked = {ticket: asked for ticket, asked in self._asked.items() if not moot(asked)}

    def _turn_of(self, facts: Mapping[str, Any]) -> None:
        kind, query, _ = self._moving[facts["handle"]]
        self._moving[facts["handle"]] = kind, query, facts["ranges"]
        self._tell(logging.INFO, f"{kind} begun", query, bins=facts["ranges"])

    def _moved(self, facts: Mapping[str, Any]) -> None:
        kind, query, bins = self._moving.pop(facts["handle"])
        done = facts["outcome"].get("Ok")
        outcome = "failed" if done is None else "done"
        self.counters.add("penstock_migrations_total", self._name_of(query) or query, outcome)
        if done is None:
            self._tell(logging.WARNING, f"{kind} failed", query, bins=bins, reason=_of_move(facts["text"]))
        else:
            self._tell(logging.INFO, f"{kind} done", query, bins=bins, steps=done)

    def _rescaled(self, facts: Mapping[str, Any]) -> None:
        done = facts["outcome"].get("Ok")
        self.counters.add("penstock_rescales_total", "failed" if done is None else "done")
        if done is None:
            self._of_engine(logging.WARNING, "rescale failed", reason=facts["text"])
        else:
            self._of_engine(logging.INFO, "rescale done", workers=done, bins=facts["moved"])

    # Told by the checkpoints, in threads of theirs

    def aside(self, query: str, what: str, error: Exception | None) -> None:
        """How something ended that a store was asked and nobody waits for, of `_ASIDE`.

        Each failure counts. It is told at once, then ever more rarely until it has worked: a store that lets nobody
        delete says so at every batch.
        """
        now, key = time.monotonic(), (query, what)
        with self._lock:
            name = self._name_of(query)
            if error is None or name is None:  # it is dropped
                self._refusing.pop(key, None)
                return
            since, again = self._refusing.get(key, (now, now))
            if now >= again:
                self._refusing[key] = since, now + min(_SLOW_S[1], max(_SLOW_S[0], now - since))
            # One that is dropped now takes its series along.
            self.counters.add("penstock_storage_errors_total", name)
        if now >= again:
            self._tell(logging.WARNING, "storage failed", query, reason=f"{_ASIDE[what]}: {error}")

    # Told by autobalance, in its thread

    def balanced(self, query: str, advised: bool, **facts: Any) -> None:
        """Bins have moved, been split or been made one again, or workers are to come or go; or so it would be."""
        if advised:
            self._tell(logging.INFO, "balance advised", query, **facts)
        else:
            self._tell(logging.INFO, "balanced", query, **facts)

    def unbalanced(self, reason: BaseException) -> None:
        """A look at the loads, or what it asked for, has come to nothing."""
        self._of_engine(logging.INFO, "balance failed", reason=_of_move(_reason(reason)))

    # Told by the engine, and by the hub in its thread

    def waits(self) -> None:
        """Tell what stores have been asked for long and have not answered, ever more rarely."""
        now = time.monotonic()
        with self._lock:
            slow = [asked for asked in self._asked.values() if asked.told <= now]
            for asked in slow:
                asked.told = now + min(_SLOW_S[1], now - asked.since)
        for asked in slow:
            told: dict[str, Any] = {"seconds": now - asked.since, "reason": f"the store does not answer: {asked}"}
            if asked.member is None:
                self._tell(logging.WARNING, "storage waits", asked.query, **told)
            else:
                self._of_member(logging.WARNING, "storage waits", asked.member, query=asked.query, **told)

    def examined(self, probes: int) -> None:
        """Executors have been looked at: so many connections that said nothing were our own."""
        self._refused = {f"{_REFUSED}malformed": probes}

    def refused(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Look at the counters of the registry's port, once a second."""
        now = time.monotonic()
        told = self._refused
        if told is None or now < self._look:
            return
        self._look = now + _LOOK_S
        for name, count in counts().items():
            if not name.startswith(_REFUSED):
                continue
            reason, new = name.removeprefix(_REFUSED), max(0, count - told.get(name, 0))
            told[name] = max(count, told.get(name, 0))
            self.counters.add("penstock_refused_connections_total", reason, value=new)
            untold, since, last, again = self._refusals.get(reason, (0, now, now, now))
            if now - last >= _SLOW_S[1] and not untold:
                since = again = now
            if new:
                untold, last = untold + new, now
            if untold and now >= again:
                self._tell(logging.WARNING, "connection refused", connections=untold, reason=reason)
                untold, again = 0, now + min(_SLOW_S[1], max(_SLOW_S[0], now - since))
            self._refusals[reason] = untold, since, last, again

    # Inside

    def _tell(self, level: int, event: str, query: str | None = None, name: str | None = None, **facts: Any) -> None:
        about: dict[str, Any] = {}
        if query is not None:
            with self._lock:
                generation, members = self._generations.get(query, (None, None))
                batch = self._batches.get(query)
            about = {"generation": generation, "members": members, "batch": batch}
            about = {"query": self._name_of(query) or name or query, **about}
        about |= {name: value for name, value in facts.items() if value is not None}
        tell(log, level, event, engine=self.engine, **about)

    def _of_engine(self, level: int, event: str, **facts: Any) -> None:
        self._tell(level, event, members=len(self._serving), **facts)

    def _of_member(self, level: int, event: str, number: int, **facts: Any) -> None:
        member = self._known(number)
        about: dict[str, Any] = {"member": number, "resident": member.slot, "pid": member.pid}
        self._of_engine(level, event, **about, executor=member.executor, **facts)


def _reason(error: BaseException) -> str:
    """What is told of an exception, without what rows hold: logs go further than the exception, which has all of it.

    Of one of a user's function, whose text may quote anything, that is where it came from.

    Examples
    --------
    >>> text = "map[1] f: ValueError: no 17 (job.py:3)\\n  row: k=17"
    >>> _reason(UserFunctionError(text, step="map[1] f", file="job.py", line=3))
    'UserFunctionError: map[1] f (job.py:3)'
    """
    name = type(error).__name__
    if isinstance(error, UserFunctionError):
        cause = "" if error.__cause__ is None else f": {type(error.__cause__).__name__}"
        where = f" ({error.file}:{error.line})" if error.file else ""
        return f"{name}: {error.step or 'a function'}{cause}{where}"
    text = str(error)
    if isinstance(error, PenstockError):
        text = _OF_KEYS.sub(r"\1...", text)
        for held in (str(error.data.get(fact, "")) for fact in _OF_ROWS):
            text = text.replace(held, "...") if held else text
    return f"{name}: {text}"


def _of_store(failure: Mapping[str, Any]) -> str:
    """A failure of a store in words.

    Examples
    --------
    >>> _of_store({"Unavailable": "/a: no space"}), _of_store({"Damaged": {"name": "data-1", "reason": "is cut"}})
    ('/a: no space', 'data-1 is cut')
    """
    told = failure.get("Unavailable")
    return str(told) if told is not None else "{name} {reason}".format(**failure["Damaged"])


def _of_move(text: str) -> str:
    """Why bins do not move, without what rows hold: what cut it off may have been a user's function, and has a line.

    Examples
    --------
    >>> _of_move("the migration was cut off: map[1] f: ValueError: no 17 (job.py:3)\\n  row: k=17")
    'cut off: its batch broke off'
    >>> _of_move("query q: the migration was cut off: the state of key 17 cannot be pickled")
    'query q: cut off: a state cannot move'
    """

    def told(found: re.Match[str]) -> str:
        return "cut off: a state cannot move" if _OF_STATES.search(found[1]) else "cut off: its batch broke off"

    return _OF_CUTS.sub(told, text)


def _date(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1e3, timezone.utc).isoformat(sep=" ", timespec="seconds")


def _tagged(said: Mapping[str, Any] | str) -> tuple[str, Mapping[str, Any]]:
    if isinstance(said, str):
        return said, {}
    ((name, facts),) = said.items()
    return name, facts


_EVENTS: dict[str, Callable[[Journal, Mapping[str, Any], Asks], None]] = {
    "MemberUp": Journal._member_up,
    "MemberLost": Journal._member_lost,
    "Leaving": Journal._leaving,
    "Migrate": Journal._migrate,
    "Rescale": Journal._rescale,
    "Stored": Journal._stored,
    "Answer": Journal._answered,
    "Batch": Journal._called,
    "Finish": Journal._called,
}
_EFFECTS: dict[str, Callable[[Journal, Mapping[str, Any]], None]] = {
    "RetireResident": Journal._retired,
    "Call": Journal._call,
    "ReadCheckpoint": lambda journal, facts: journal._asks("read", facts),
    "CreateClaim": lambda journal, facts: journal._asks("claim", facts),
    "ReadClaims": lambda journal, facts: journal._asks("claims", facts),
    "WriteManifest": lambda journal, facts: journal._asks("manifest", facts),
    "Fail": Journal._failed,
    "Dropped": Journal._dropped,
    "Moving": Journal._turn_of,
    "Moved": Journal._moved,
    "Rescaled": Journal._rescaled,
}
