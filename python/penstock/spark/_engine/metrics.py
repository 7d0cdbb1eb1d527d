"""Figures of an engine in the text format of Prometheus.

Owns: which metrics there are (`FAMILIES`, all of them), and the format (version 0.0.4): one block per metric, with its
help, its kind and its samples. What the figures are is told by the `journal` (what happened) and the `record` (what
workers hold).

Invariants: every sample belongs to a family here and has exactly its labels, so the page of operations can name all of
them; names end with their unit, and counters with ``_total``. Counters never go down while their labels are there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["CONTENT_TYPE", "FAMILIES", "Counters", "Family", "Sample", "page"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Family:
    """One metric: its kind, labels beside ``engine``, what it tells, and the bounds of a histogram."""

    kind: str
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()


#: Seconds of a batch: a hundredth to some minutes.
_BATCH_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

FAMILIES: dict[str, Family] = {
    "penstock_engine_info": Family("gauge", ("version",), "1 while the engine is open."),
    "penstock_workers": Family("gauge", (), "Resident processes that are wanted."),
    "penstock_members": Family("gauge", (), "Resident processes that serve."),
    "penstock_members_lost_total": Family("counter", (), "Resident processes that died or were silent for too long."),
    "penstock_members_replaced_total": Family(
        "counter", (), "Lost resident processes whose place another one took, or is not wanted any more."
    ),
    "penstock_rescales_total": Family("counter", ("outcome",), "Rescales that have ended: done or failed."),
    "penstock_refused_connections_total": Family(
        "counter",
        ("reason",),
        "Connections that the driver refused: secret, malformed, slow, crowded, exhausted, role, plain (without TLS).",
    ),
    "penstock_batches_total": Family(
        "counter", ("query", "outcome"), "Calls of Spark with a batch: committed, failed or stopped."
    ),
    "penstock_rows_total": Family("counter", ("query",), "Input rows of batches that have returned to Spark."),
    "penstock_late_rows_total": Family("counter", ("query",), "Rows of them that came too late."),
    "penstock_side_rows_total": Family("counter", ("query", "output"), "Rows of side outputs."),
    "penstock_batch_seconds": Family(
        "histogram", ("query",), "Time of a batch from Spark's call to its return.", _BATCH_S
    ),
    "penstock_batch_phase_seconds_total": Family(
        "counter",
        ("query", "phase"),
        "Time of batches by phase: trigger (Spark's own, before the call), feed, run, serve, commit.",
    ),
    "penstock_last_batch": Family("gauge", ("query",), "Number of the last batch that has returned to Spark."),
    "penstock_last_batch_timestamp_seconds": Family("gauge", ("query",), "When that was, seconds since 1970."),
    "penstock_generations_total": Family("counter", ("query",), "Times that the workers of a query began."),
    "penstock_migrations_total": Family(
        "counter", ("query", "outcome"), "Migrations that were asked for and have ended: done or failed."
    ),
    "penstock_claims_total": Family("counter", ("query",), "Claims of checkpoints that were made."),
    "penstock_manifests_total": Family("counter", ("query",), "Manifests that were written."),
    "penstock_storage_errors_total": Family(
        "counter", ("query",), "Times that the store of a checkpoint did not do what the driver or a worker asked."
    ),
    "penstock_state_bytes": Family("gauge", ("query", "worker"), "State that a worker holds."),
    "penstock_keys": Family("gauge", ("query", "worker"), "Keys with state at a worker."),
    "penstock_bins": Family("gauge", ("query", "worker"), "Bins of the first keyed step at a worker."),
    "penstock_worker_rows_total": Family(
        "counter", ("query", "worker"), "Rows that a worker has taken, those of batches that ran again included."
    ),
    "penstock_member_memory_bytes": Family("gauge", ("resident",), "Resident set of a resident process."),
    "penstock_staged_bytes": Family(
        "gauge", ("resident",), "Rows that wait for their batch, and results for the sink, in memory."
    ),
    "penstock_staged_disk_bytes": Family("gauge", ("resident",), "The same in files."),
    "penstock_member_refused_connections_total": Family(
        "counter", ("resident", "member"), "Connections that a resident process refused."
    ),
}


@dataclass(frozen=True)
class Sample:
    """One value: of which metric, its labels in their order, the value."""

    name: str
    labels: Mapping[str, str]
    value: float


class Counters:
    """What only ever grows, or is as it was last said; any thread may tell or read.

    Nothing here waits: the lock is held for a few operations on dicts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        #: Counts by upper bound, the last without one, and the sum.
        self._histograms: dict[tuple[str, tuple[str, ...]], tuple[list[int], list[float]]] = {}

    def add(self, name: str, *labels: str, value: float = 1.0) -> None:
        """Let a counter grow."""
        assert len(labels) == len(FAMILIES[name].labels) and value >= 0.0, (name, labels, value)
        with self._lock:
            self._values[name, labels] = self._values.get((name, labels), 0.0) + value

    def set(self, name: str, *labels: str, value: float) -> None:
        """Say what a gauge is."""
        assert len(labels) == len(FAMILIES[name].labels), (name, labels)
        with self._lock:
            self._values[name, labels] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Enter a value into a histogram."""
        bounds = FAMILIES[name].bounds
        with self._lock:
            counts, total = self._histograms.setdefault((name, labels), ([0] * (len(bounds) + 1), [0.0]))
            counts[next((at for at, bound in enumerate(bounds) if value <= bound), len(bounds))] += 1
            total[0] += value

    def forget(self, query: str) -> None:
        """A query is dropped: its series end."""
        with self._lock:
            for table in (self._values, self._histograms):
                for name, labels in list(table):
                    if (query,) == labels[:1] and FAMILIES[name].labels[:1] == ("query",):
                        del table[name, labels]

    def samples(self) -> list[Sample]:
        """All that was told; those of a histogram as Prometheus has them."""
        with self._lock:
            values = sorted(self._values.items())
            histograms = [(key, list(counts), total[0]) for key, (counts, total) in sorted(self._histograms.items())]
        found = [Sample(name, _labelled(name, labels), value) for (name, labels), value in values]
        for (name, labels), counts, total in histograms:
            own, under = _labelled(name, labels), 0
            for bound, count in zip((*FAMILIES[name].bounds, math.inf), counts, strict=True):
                under += count
                found.append(Sample(f"{name}_bucket", {**own, "le": _number(bound)}, under))
            found += [Sample(f"{name}_sum", own, total), Sample(f"{name}_count", own, under)]
        return found


def page(engine: str, samples: Iterable[Sample]) -> str:
    """The text of one scrape, of one engine.

    Examples
    --------
    >>> print(page('a "b"', [Sample("penstock_workers", {}, 2)]), end="")
    # HELP penstock_workers Resident processes that are wanted.
    # TYPE penstock_workers gauge
    penstock_workers{engine="a \\"b\\""} 2
    """
    blocks: dict[str, list[Sample]] = {}
    for sample in samples:
        blocks.setdefault(_family(sample.name), []).append(sample)
    lines = []
    for name, family in FAMILIES.items():
        if name in blocks:
            lines += [f"# HELP {name} {_help(family.help)}", f"# TYPE {name} {family.kind}"]
            for sample in blocks[name]:
                told = {"engine": engine, **sample.labels}
                inside = ",".join(f'{label}="{_escape(value)}"' for label, value in told.items())
                lines.append(f"{sample.name}{{{inside}}} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines)


def _labelled(name: str, labels: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(FAMILIES[name].labels, labels, strict=True))


def _family(name: str) -> str:
    if name in FAMILIES:
        return name
    base = name.rpartition("_")[0]
    assert FAMILIES[base].kind == "histogram", name
    return base


def _escape(value: str) -> str:
    """A label's value: names come from users and may hold anything, lone surrogates too, which UTF-8 has not."""
    plain = value.encode("utf-8", "replace").decode("utf-8")
    return plain.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if value in (math.inf, -math.inf):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
