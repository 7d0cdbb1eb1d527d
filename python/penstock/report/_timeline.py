"""What happened in a run, and when: epochs, slice latencies, migrations, workers that came and went, and load of each.

Plain data. Times are seconds since 1970 as float, latencies integer nanoseconds. A timeline grows
by appending and may be filled from several threads; readers take copies. ``to_json`` and
``from_json`` keep it in a file, from which the report can be made again.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import reduce
from itertools import accumulate
from math import isfinite
from typing import Any, TypeVar

from penstock._functions.short import short

__all__ = ["Change", "Epoch", "Migration", "Slice", "Timeline", "Window", "WorkerSample"]

FORMAT = 1
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of one query: a Spark batch, or a block of a local source.

    ``seconds`` passed until its outputs were complete or, where they are served to a sink, until that had them:
    ``feed_s`` bringing its rows to the workers, ``run_s`` computing, ``serve_s`` in the sink, ``files_s`` waiting
    behind that until its state was durable. An epoch that the death of a worker has hit is fed again: each part is of
    all its attempts, and going back to the state before counts as computing. ``spark_s`` are seconds of the batch that
    Spark spent before and after: finding input, planning, its logs. What was not measured is 0.
    """

    epoch: int
    started: float
    seconds: float
    rows: int
    query: str = ""
    feed_s: float = 0.0
    run_s: float = 0.0
    serve_s: float = 0.0
    files_s: float = 0.0
    spark_s: float = 0.0

    @property
    def ended(self) -> float:
        """When its outputs were complete, or served."""
        return self.started + self.seconds

    @property
    def whole_s(self) -> float:
        """What who waits for the batch waits: Spark's share included."""
        return self.seconds + self.spark_s


@dataclass(frozen=True, slots=True)
class Slice:
    """One bounded block of input: from its release until every worker had finished it."""

    ended: float
    latency_ns: int
    rows: int


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration: its strategy, and how many bins and encoded bytes it moved in how many steps."""

    started: float
    ended: float
    strategy: str
    bins: int
    bytes: int
    steps: int
    query: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """Workers that came or went: ``kind`` is "lost" or "rescale".

    Of a loss from the moment at which a worker process was found dead or silent until its place was taken, so `before`
    and `after` are equal. Of a rescale from when it was asked for until there were `after` workers, with the bins that
    moved.
    """

    started: float
    ended: float
    kind: str
    before: int
    after: int
    bins: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """What one worker held at one moment; ``rows`` counts from the start of the run.

    ``staged_bytes`` and ``disk_bytes`` are those of its whole process: rows that wait, in memory and in files.
    """

    at: float
    worker: int
    bins: int
    keys: int
    state_bytes: int
    rows: int
    query: str = ""
    staged_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Latency of the rows whose slices ended within one window of time."""

    started: float
    seconds: float
    rows: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    migrating: bool


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was verified at the end of a run: what, whether it holds, and the figures."""

    what: str
    passed: bool
    detail: str


@dataclass(slots=True)
class Timeline:
    """The measurements of one run.

    Attributes
    ----------
    title
        What was run, for headings.
    epochs, slices, migrations, workers, changes
        The measurements, each in the order in which it was appended.
    conditions
        Under what they were made: versions, cores, rates; shown in the report as they are.
    checks
        What was verified at the end.
    """

    title: str = ""
    epochs: list[Epoch] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    migrations: list[Migration] = field(default_factory=list)
    workers: list[WorkerSample] = field(default_factory=list)
    conditions: dict[str, str] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def span(self) -> tuple[float, float]:
        """First and last moment of anything measured; (0, 0) when nothing was."""
        starts = [e.started for e in self.epochs] + [m.started for m in self.migrations]
        starts += [s.ended - s.latency_ns / 1e9 for s in self.slices] + [w.at for w in self.workers]
        starts += [c.started for c in self.changes]
        ends = [e.ended for e in self.epochs] + [m.ended for m in self.migrations]
        ends += [s.ended for s in self.slices] + [w.at for w in self.workers] + [c.ended for c in self.changes]
        return (min(starts), max(ends)) if starts else (0.0, 0.0)

    @property
    def rows(self) -> int:
        """Input rows of all epochs."""
        return sum(epoch.rows for epoch in self.epochs)

    def since(self, begin: float) -> Timeline:
        """The part of the run from a moment on: what began before it is left out."""
        return Timeline(
            title=self.title,
            epochs=[epoch for epoch in self.epochs if epoch.started >= begin],
            slices=[piece for piece in self.slices if piece.ended - piece.latency_ns / 1e9 >= begin],
            migrations=[move for move in self.migrations if move.started >= begin],
            workers=[sample for sample in self.workers if sample.at >= begin],
            conditions=dict(self.conditions),
            changes=[change for change in self.changes if change.started >= begin],
            checks=list(self.checks),
        )

    def windows(self, seconds: float = 0.25) -> list[Window]:
        """Latency quantiles over consecutive windows of time; windows without a slice are left out.

        Quantiles are over rows: a slice of 1,000 rows weighs as much as 1,000 slices of one. A window
        counts as migrating when it overlaps a migration. Cost: sorts the slices once.
        """
        if not self.slices:
            return []
        start, migrating = self.span[0], _Spans(self.migrations)
        grouped: dict[int, list[Slice]] = {}
        for piece in list(self.slices):
            grouped.setdefault(int((piece.ended - start) / seconds), []).append(piece)
        result = []
        for index, pieces in sorted(grouped.items()):
            begin = start + index * seconds
            p50, p99 = quantiles(((s.latency_ns, s.rows) for s in pieces), (0.5, 0.99))
            result.append(
                Window(
                    started=begin,
                    seconds=seconds,
                    rows=sum(s.rows for s in pieces),
                    p50_ns=p50,
                    p99_ns=p99,
                    max_ns=max(s.latency_ns for s in pieces),
                    migrating=migrating.meet(begin, begin + seconds),
                )
            )
        return result

    def latency_ns(self, at: Sequence[float] = (0.5, 0.99, 0.999, 1.0)) -> dict[str, list[int]]:
        """Row-weighted latency quantiles of slices ``"resting"``, ``"migrating"`` and ``"changing"``.

        A slice is changing when workers came or went between its release and its end, else migrating when any
        migration ran. A list is empty when there is no such slice.
        """
        groups: dict[str, list[tuple[int, int]]] = {"resting": [], "migrating": [], "changing": []}
        meanwhile = self._meanwhile()
        for piece in list(self.slices):
            groups[meanwhile(piece.ended - piece.latency_ns / 1e9, piece.ended)].append((piece.latency_ns, piece.rows))
        return {name: quantiles(pieces, at) if pieces else [] for name, pieces in groups.items()}

    def epoch_seconds(self, query: str) -> dict[str, list[float]]:
        """Seconds of a query's epochs, Spark's share included, grouped as by `latency_ns`; each in order."""
        groups: dict[str, list[float]] = {"resting": [], "migrating": [], "changing": []}
        meanwhile = self._meanwhile()
        for epoch in self.epochs:
            if epoch.query == query:
                groups[meanwhile(epoch.started, epoch.ended)].append(epoch.whole_s)
        return groups

    def hit(self, change: Change) -> Epoch | None:
        """The longest epoch of any query that ran while workers came or went, Spark's share included."""
        found = [e for e in self.epochs if e.started < change.ended and change.started < e.ended]
        return max(found, key=lambda e: e.whole_s, default=None)

    def _meanwhile(self) -> Callable[[float, float], str]:
        """What went on between two moments, as `latency_ns` names it."""
        changing, migrating = _Spans(self.changes), _Spans(self.migrations)

        def what(begin: float, end: float) -> str:
            if changing.meet(begin, end):
                return "changing"
            return "migrating" if migrating.meet(begin, end) else "resting"

        return what

    def to_json(self) -> str:
        """The timeline as one JSON document, with a format version."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read back what ``to_json`` wrote.

        Raises
        ------
        ValueError
            When the text is not a timeline, or one of another format version, or of more than ten years. It names the
            field.
        """
        try:
            document = json.loads(text)
            version = document.pop("format")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("not a timeline: no JSON object with a format version") from error
        if type(version) is not int or version != FORMAT:
            raise ValueError(f"timeline of format {short(version)}; this release reads {FORMAT}")
        # Those of earlier releases have neither.
        document = {"changes": [], "checks": []} | document
        try:
            found = cls(
                title=_of_type(document, "title", str, "text"),
                epochs=_items(Epoch, document, "epochs"),
                slices=_items(Slice, document, "slices"),
                migrations=_items(Migration, document, "migrations"),
                workers=_items(WorkerSample, document, "workers"),
                conditions=_conditions(document),
                changes=_items(Change, document, "changes"),
                checks=_items(Check, document, "checks"),
            )
        except ValueError as error:
            raise ValueError(f"not a timeline: {error}") from error
        begin, end = found.span
        if end - begin > _LONGEST_S:
            told = f"from {round(begin)} to {round(end)}, in seconds since 1970, it is over ten years"
            raise ValueError(f"not a timeline: {told}; one of these moments is wrong")
        return found


_Item = TypeVar("_Item")
#: Of an integer of a timeline; larger ones have no place in a picture.
_MOST = 1 << 63
#: The end of the year 9999: of later moments no date can be told.
_LAST = 253_402_300_799
#: Ten years: a longer run has a moment that is wrong.
_LONGEST_S = 10 * 366 * 86_400.0
#: Fields that are moments; other floats are seconds that something took.
_MOMENTS = ("started", "ended", "at")
_SHOWN = {"int": "int of 64 bits", "float": "a finite number", "str": "text", "bool": "true or false"}


def _of_type(document: Mapping[str, Any], name: str, kind: type[_Item], told: str) -> _Item:
    if name not in document:
        raise ValueError(f"{name!r} is missing")
    value = document[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name!r} is {short(value)}, not {told}")
    if isinstance(value, str) and not _encodes(value):
        raise ValueError(f"{name!r} is {short(value)}, which UTF-8 cannot hold")
    return value


def _conditions(document: Mapping[str, Any]) -> dict[str, str]:
    found = {name: str(value) for name, value in _of_type(document, "conditions", dict, "an object").items()}
    for name, value in found.items():
        if not _encodes(name + value):
            raise ValueError(f"'conditions' has {short(name)}: {short(value)}, which UTF-8 cannot hold")
    return found


def _encodes(text: str) -> bool:
    """Whether a text can be written: in JSON there may be halves of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _items(kind: type[_Item], document: Mapping[str, Any], name: str) -> list[_Item]:
    """Measurements of one kind, refused where a value is not what the kind says."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    needed = [field.name for field in known.values() if field.default is MISSING]
    found = _of_type(document, name, list, "a list")
    for at, item in enumerate(found):
        if not isinstance(item, dict):
            raise ValueError(f"{name}[{at}] is {short(item)}, not an object")
        for key in (*item, *needed):
            what = f"{key} of a {kind.__name__}"
            if key not in known:
                raise ValueError(f"{what} is unknown ({name}[{at}])")
            if key not in item:
                raise ValueError(f"{what} is missing ({name}[{at}])")
            wanted = str(known[key].type)
            if not _good(item[key], wanted):
                raise ValueError(f"{what} is {short(item[key])}, not {_SHOWN[wanted]} ({name}[{at}])")
            if why := _unfit(key, item[key], wanted):
                raise ValueError(f"{what} is {short(item[key])}, {why} ({name}[{at}])")
    return [kind(**item) for item in found]


def _good(value: Any, wanted: str) -> bool:
    """Whether a value of JSON is of a type by its name; of a number also whether it is one that can be drawn."""
    if wanted in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, (int, float) if wanted == "float" else int):
            return False
        return isfinite(value) if isinstance(value, float) else abs(value) < _MOST
    return isinstance(value, {"str": str, "bool": bool}[wanted])


def _unfit(key: str, value: Any, wanted: str) -> str:
    """Why a value of the right type can be none of a run; empty where it can."""
    if wanted == "str":
        return "" if _encodes(value) else "which UTF-8 cannot hold"
    if wanted != "float":
        return ""
    if key in _MOMENTS:
        return "" if 0 <= value <= _LAST else "not seconds since 1970 until the year 9999"
    return "" if abs(value) <= _LONGEST_S else "over ten years"


class _Spans:
    """When something went on; sorted once, so that a question costs a search and not a look at all of them."""

    def __init__(self, of: Iterable[Migration | Change]) -> None:
        ordered = sorted((one.started, one.ended) for one in of)
        self._starts = [started for started, _ in ordered]
        #: The last end of those up to each.
        self._ends = list(accumulate((ended for _, ended in ordered), max))

    def meet(self, begin: float, end: float) -> bool:
        """Whether any of them began before `end` and ended behind `begin`."""
        before = bisect_left(self._starts, end)
        return before > 0 and begin < self._ends[before - 1]


def quantiles(weighted: Iterable[tuple[int, int]], at: Sequence[float]) -> list[int]:
    """Quantiles of (value, weight) pairs: the least value with at least that share of weight at or below.

    A weight below 1 counts as 1, so empty slices are seen too. Raises ``ValueError`` when there is nothing.
    """
    pairs = sorted(weighted)
    if not pairs:
        raise ValueError("quantiles of nothing")
    cumulative: list[int] = []
    total = 0
    for _, weight in pairs:
        total += max(1, weight)
        cumulative.append(total)
    return [pairs[min(bisect_left(cumulative, share * total), len(pairs) - 1)][0] for share in at]


def per_worker(samples: Iterable[WorkerSample]) -> Mapping[int, list[WorkerSample]]:
    """Samples by worker, each list in time order, queries added up at equal moments.

    Of two samples of a query at one moment the later counts. The rows of a query that is not told of at one moment,
    since its workers begin again, are those told before.
    """
    summed: dict[tuple[int, float], dict[str, WorkerSample]] = {}
    for sample in samples:
        summed.setdefault((sample.worker, sample.at), {})[sample.query] = sample
    result: dict[int, list[WorkerSample]] = {}
    rows: dict[tuple[int, str], int] = {}
    for (worker, _), own in sorted(summed.items()):
        rows |= {(worker, query): sample.rows for query, sample in own.items()}
        total = sum(count for (one, _), count in rows.items() if one == worker)
        result.setdefault(worker, []).append(replace(reduce(_add, own.values()), rows=total))
    return result


def thinned(samples: Sequence[WorkerSample]) -> list[WorkerSample]:
    """About half of some samples, in order of time, the first of each worker and query among them.

    What stays lies evenly in time. Queries of a worker that are told of at one moment stay, or go, together.
    """
    if not samples:
        return []
    counts = Counter((sample.worker, sample.query) for sample in samples)
    begin, end = min(sample.at for sample in samples), max(sample.at for sample in samples)
    # Twice as wide as what lies between two samples of who told most.
    width = 2 * (end - begin) / max(counts.values()) or 1.0
    firsts: dict[tuple[int, str, int], float] = {}
    for sample in samples:
        firsts.setdefault((sample.worker, sample.query, int((sample.at - begin) / width)), sample.at)
    moments = {(worker, at) for (worker, _, _), at in firsts.items()}
    return [sample for sample in samples if (sample.worker, sample.at) in moments]


def joined(migrations: Iterable[Migration]) -> list[Migration]:
    """Migrations of one strategy and several queries that belong together, as one each.

    They do when they overlap, or one begins within half a second of the end of another query's. Bins and bytes add
    up, steps are those of the one with most, and the queries are named one after the other.
    """
    result: list[Migration] = []
    for move in sorted(migrations, key=lambda m: m.started):
        last = result[-1] if result else None
        slack = 0.5 if last is not None and move.query not in last.query.split(", ") else 0.0
        if last is None or last.strategy != move.strategy or move.started > last.ended + slack:
            result.append(move)
            continue
        result[-1] = Migration(
            started=last.started,
            ended=max(last.ended, move.ended),
            strategy=move.strategy,
            bins=last.bins + move.bins,
            bytes=last.bytes + move.bytes,
            steps=max(last.steps, move.steps),
            query=", ".join(name for name in (last.query, move.query) if name),
        )
    return result


def _add(left: WorkerSample, right: WorkerSample) -> WorkerSample:
    return WorkerSample(
        at=left.at,
        worker=left.worker,
        bins=left.bins + right.bins,
        keys=left.keys + right.keys,
        state_bytes=left.state_bytes + right.state_bytes,
        rows=left.rows + right.rows,
        # Of the process, and so the same for all its queries.
        staged_bytes=max(left.staged_bytes, right.staged_bytes),
        disk_bytes=max(left.disk_bytes, right.disk_bytes),
    )


def heaviest(timeline: Timeline) -> str:
    """The query of which most bytes have moved, or most epochs ran where none have; of equals the first by name."""
    weights: dict[str, tuple[int, int]] = {}
    for query in sorted({epoch.query for epoch in timeline.epochs}):
        moved = sum(move.bytes for move in timeline.migrations if move.query == query)
        weights[query] = (moved, sum(epoch.query == query for epoch in timeline.epochs))
    return max(weights, key=lambda query: weights[query], default="")


def size_text(size: float) -> str:
    """A byte count as people read it: ``3.4 MB``."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{figure_text(size)} GB"


def figure_text(value: float) -> str:
    """A number in three digits, or all of those before the point: ``3.14``, ``12,300``."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
