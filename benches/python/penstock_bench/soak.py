"""``make soak``: a query for an hour on two executors, while members are killed and the engine is rescaled.

A count per key of rows that come all the time, with durable state. Once a period something happens to it, in turn: a
member is killed (SIGKILL), a rescale from two members to three or back, now and then an executor with all on it. Every
batch is compared with what it has to be. Meanwhile memory, descriptors and threads of all processes and the files of
the checkpoint and of Spark's local folder are noted; at the end they are drawn (``soak.svg``), kept (``soak.json``),
and have to be flat: the last quarter of the run is held beside the second one.

Owns: the run, what is sampled, and what flat means (`LIMITS`). Ends by itself, with status 1 where a batch was wrong,
the query has ended, something was not done in time, a curve rises, or samples are missing. Invariant: what was noted is
kept and drawn however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LIMITS", "Action", "Run", "Sample", "draw", "judge", "main"]

#: Keys, and rows of a batch; a batch begins each second.
KEYS, ROWS = 50_000, 20_000
TRIGGER_S = 1.0
#: Seconds between samples, and from one to the next at most: that, or an eighth of the run.
SAMPLE_S, GAP_S = 2.0, 30.0
#: What happens, one after the other, a period apart.
CYCLE = ("member", "rescale", "member", "rescale", "member", "rescale", "executor", "rescale")
#: Seconds in which what was asked for is done.
PATIENCE_S = 120.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What was there at one moment, `at` seconds after the start; sizes in bytes."""

    at: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Action:
    """What was done, when, and how long it took until all was well again."""

    at: float
    what: str
    seconds: float


@dataclass
class Run:
    """All that was noted."""

    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    batches: int = 0
    rows: int = 0
    conditions: dict[str, Any] = field(default_factory=dict)
    #: The first batch that was not what it had to be.
    wrong: str | None = None
    #: Samples that could not be taken: when, and why.
    missed: list[tuple[float, str]] = field(default_factory=list)

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        """What was kept."""
        told = json.loads(text)
        told["samples"] = [Sample(**one) for one in told["samples"]]
        told["actions"] = [Action(**one) for one in told["actions"]]
        told["missed"] = [(at, why) for at, why in told.get("missed", [])]
        return cls(**told)


@dataclass(frozen=True)
class Limit:
    """How much higher a curve may be in the last quarter than in the second one.

    Attributes
    ----------
    more : float
        In its own unit.
    share : float
        And as a part of what it was.
    of : str
        ``"median"``; or ``"max"``, for what goes up and down by nature.
    """

    more: float
    share: float = 0.0
    of: str = "median"

    def value(self, figures: Sequence[float]) -> float:
        """What of a quarter counts."""
        return max(figures) if self.of == "max" else statistics.median(figures)


#: What must not rise. The driver's Python keeps a timeline, which is bounded, yet not within an hour.
LIMITS: Mapping[str, Limit] = {
    "driver memory": Limit(24 * _MIB, 0.05),
    "driver descriptors": Limit(8),
    "driver threads": Limit(4),
    "driver JVM heap": Limit(24 * _MIB, 0.1),
    "driver JVM descriptors": Limit(16),
    "driver JVM threads": Limit(16),
    "executors memory": Limit(128 * _MIB, 0.1),
    "executors descriptors": Limit(48),
    "executors threads": Limit(24),
    "member memory": Limit(24 * _MIB, 0.1),
    "member descriptors": Limit(8),
    "member threads": Limit(4),
    "checkpoint files": Limit(24, of="max"),
    "checkpoint bytes": Limit(4 * _MIB, 0.1, of="max"),
    "local files": Limit(64, 0.1),
}


def judge(run: Run) -> list[str]:
    """What is wrong and what is not flat, a line each; too few samples are one, too, and those that are missing.

    Examples
    --------
    >>> judge(Run())
    ['there are 0 samples: nothing can be said of them']
    """
    found = [] if run.wrong is None else [run.wrong]
    if run.missed:
        at, why = run.missed[0]
        found.append(f"{len(run.missed)} samples could not be taken, the first after {at:.0f} s: {why}")
    if len(run.samples) < 16:
        return [*found, f"there are {len(run.samples)} samples: nothing can be said of them"]
    times = [0.0, *(sample.at for sample in run.samples), run.seconds]
    gap, since = max((after - before, before) for before, after in pairwise(times))
    if gap > max(GAP_S, run.seconds / 8):
        found.append(f"there is no sample for {gap:.0f} s, from {since:.0f} s on")
    for name, limit in LIMITS.items():
        quarters: tuple[list[float], list[float]] = [], []
        for sample in run.samples:
            part = sample.at / run.seconds if run.seconds else 0.0
            if name in sample.figures and (0.25 <= part < 0.5 or part >= 0.75):
                quarters[part >= 0.5].append(sample.figures[name])
        if not all(quarters):
            found.append(f"{name} was not noted in both quarters")
            continue
        before, after = map(limit.value, quarters)
        most = before * (1 + limit.share) + limit.more
        if after > most:
            found.append(f"{name} rises: {_text(name, before)} to {_text(name, after)}, at most {_text(name, most)}")
    return found


def _text(name: str, value: float) -> str:
    return f"{value / _MIB:,.1f} MiB" if _in_bytes(name) else f"{value:,.0f}"


def _in_bytes(name: str) -> bool:
    return name.endswith(("memory", "heap", "bytes"))


# The picture

_PANELS = (
    ("MiB", ("driver memory", "driver JVM heap", "executors memory", "member memory")),
    ("descriptors", ("driver descriptors", "driver JVM descriptors", "executors descriptors", "member descriptors")),
    ("threads", ("driver threads", "driver JVM threads", "executors threads", "member threads")),
    ("files", ("checkpoint files", "local files")),
    ("MiB", ("checkpoint bytes",)),
)
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def draw(run: Run) -> Figure:
    """All curves over minutes, with what was done."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from penstock.report._style import STYLE, frame

    with rc_context(STYLE):
        figure = Figure(figsize=(11, 10), dpi=100, layout="constrained")
        panels = figure.subplots(len(_PANELS), 1, sharex=True)
        for axes, (unit, names) in zip(panels, _PANELS, strict=True):
            for name, color in zip(names, _COLORS, strict=False):
                points = [(one.at / 60, one.figures[name]) for one in run.samples if name in one.figures]
                scale = _MIB if _in_bytes(name) else 1
                label = f"{name} (flat)" if name in LIMITS else name
                axes.plot([at for at, _ in points], [y / scale for _, y in points], color=color, lw=1, label=label)
            for action in run.actions:
                style = {"member": "#D55E00", "executor": "#A00000"}.get(action.what, "#0072B2")
                axes.axvline(action.at / 60, color=style, lw=0.5, alpha=0.5)
            axes.set_ylabel(unit)
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        panels[-1].set_xlabel("minutes; red: a member or an executor is killed, blue: rescale")
        wrong = judge(run)
        verdict = "flat" if not wrong else "; ".join(wrong)
        figure.suptitle(
            f"{run.seconds / 60:.0f} minutes, {run.batches:,} batches, {run.rows:,} rows, {len(run.actions)} times"
            f" something happened: {verdict}",
            x=0.01,
            ha="left",
            wrap=True,
        )
        frame(panels)
        return figure


# What is sampled


def _processes() -> dict[int, tuple[int, str]]:
    """Of each process its parent and command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = int(stat[1]), command
    return found


def _below(root: int, processes: Mapping[int, tuple[int, str]]) -> set[int]:
    """All that a process has started, and what these have."""
    found: set[int] = set()
    more = {root}
    while more:
        found |= more
        more = {pid for pid, (parent, _) in processes.items() if parent in more} - found
    return found - {root}


def _of(pid: int) -> tuple[float, float, float]:
    """Resident bytes, descriptors and threads of a process."""
    told = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return (
        float(told["VmRSS"].split()[0]) * 1024,
        float(len(os.listdir(f"/proc/{pid}/fd"))),
        float(told["Threads"]),
    )


def _sum(pids: Sequence[int]) -> tuple[float, float, float] | None:
    all_ = []
    for pid in pids:
        with contextlib.suppress(OSError, KeyError):  # it went since
            all_.append(_of(pid))
    return (sum(one[0] for one in all_), sum(one[1] for one in all_), sum(one[2] for one in all_)) if all_ else None


def _files(folder: Path) -> tuple[int, int]:
    """Files below a folder, and their bytes."""
    count = size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(place, name)).st_size
                count += 1
    return count, size


class _Sampler(threading.Thread):
    """Notes figures until it is ended."""

    def __init__(
        self, run: Run, began: float, checkpoint: Path, local: Path, members: Callable[[], list[int]], jvm: Any
    ):
        super().__init__(daemon=True)
        self.run_, self.began, self.checkpoint, self.local = run, began, checkpoint, local
        self.members, self.jvm = members, jvm
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            at = round(time.monotonic() - self.began, 2)
            try:
                self.run_.samples.append(Sample(at, self.figures()))
            except Exception as error:  # the next one may be had; `judge` tells
                self.run_.missed.append((at, f"{type(error).__name__}: {error}"))

    def figures(self) -> dict[str, float]:
        """Of all processes and folders now. Of members, which come and go, the mean of those that are there."""
        processes = _processes()
        below = _below(os.getpid(), processes)
        java = [pid for pid in below if "org.apache.spark.deploy.SparkSubmit" in processes[pid][1]]
        executors = [pid for pid in below if "CoarseGrainedExecutorBackend" in processes[pid][1]]
        members = [pid for pid in self.members() if pid in processes]
        found: dict[str, float] = {}
        groups = (("driver", [os.getpid()]), ("driver JVM", java), ("executors", executors), ("member", members))
        for name, pids in groups:
            told = _sum(pids)
            if told is None or (name == "executors" and len(pids) != 2):
                continue  # one is on its way back
            of = len(pids) if name == "member" else 1
            for what, value in zip(("memory", "descriptors", "threads"), told, strict=True):
                found[f"{name} {what}"] = value / of
        if len(self.run_.samples) % 8 == 0:
            # What is left when all that can go has gone.
            runtime = self.jvm.java.lang.Runtime.getRuntime()
            self.jvm.java.lang.System.gc()
            found["driver JVM heap"] = float(runtime.totalMemory() - runtime.freeMemory())
        found["checkpoint files"], found["checkpoint bytes"] = map(float, _files(self.checkpoint / "_penstock"))
        found["local files"] = float(_files(self.local)[0])
        return found


# The run


class _Failed(Exception):
    """The run cannot go on; the message says why."""


class _Check:
    """The sink: each batch has to say of its keys how often they have come."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, frame: Any, batch_id: int) -> None:
        import numpy as np

        from penstock.spark._session.collect import to_table

        table = to_table(frame)
        keys, counts = table["k"].to_numpy(), table["n"].to_numpy()
        begin, end = batch_id * ROWS, (batch_id + 1) * ROWS
        order = np.argsort(keys)
        touched = np.unique(np.arange(begin, end) % KEYS)
        # Values below `end` that have this rest.
        expected = (end - touched + KEYS - 1) // KEYS
        if not np.array_equal(keys[order], touched) or not np.array_equal(counts[order], expected):
            self.run.wrong = self.run.wrong or f"batch {batch_id} is wrong: {table.num_rows} rows"
        self.run.batches += 1
        self.run.rows += ROWS


@contextlib.contextmanager
def _session(folder: Path) -> Iterator[Any]:
    """Two executors, JVMs of their own, with three slots each."""
    from pyspark.sql import SparkSession

    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.executor.memory": "768m",
        "spark.driver.extraJavaOptions": quick,
        "spark.executor.extraJavaOptions": quick,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(folder / "local"),
        # Executors are killed for as long as it lasts.
        "spark.deploy.maxExecutorRetries": "-1",
        "spark.task.maxFailures": "8",
        "spark.log.level": "ERROR",
    }
    # Of executors, which are processes of their own.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder
    builder = builder.master("local-cluster[2,3,1024]").appName("penstock soak")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        work = _work_folder(spark.sparkContext.applicationId)
        spark.stop()
        shutil.rmtree(work, ignore_errors=True)


def _work_folder(application: str) -> Path:
    """Where the workers of ``local-cluster`` keep what executors say."""
    import pyspark

    return Path(pyspark.__file__).parent / "work" / application


def _is_past(moment: float) -> bool:
    return time.monotonic() >= moment


class _Soak:
    """One run."""

    def __init__(self, minutes: float, period: float, seed: int, tell: Callable[[str], None]) -> None:
        self.minutes, self.period, self.tell = minutes, period, tell
        self.chance = random.Random(seed)
        self.run = Run(conditions={"period_s": period, "seed": seed, "keys": KEYS, "batch_rows": ROWS})
        self.workers = 2

    def go(self) -> Run:
        """Do it.

        Raises
        ------
        _Failed
            When it cannot go on; `run` has what was noted until then, whatever is raised.
        """
        import penstock as pk

        with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name, _session(Path(name)) as spark:
            folder = Path(name)
            with pk.Engine(spark, workers=self.workers, bits=6, name="soak") as engine:
                flow: Any = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
                source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS)
                rows = source.option("numPartitions", 2).load().selectExpr(f"value % {KEYS} AS k")
                writer = rows.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
                writer = writer.trigger(processingTime=f"{TRIGGER_S:g} seconds")
                query = writer.foreachBatch(engine.foreach_batch(flow, _Check(self.run))).start()
                began = time.monotonic()

                def members() -> list[int]:
                    return [member.pid for member in engine.members() if member.lost is None]

                sampler = _Sampler(
                    self.run, began, folder / "checkpoint", folder / "local", members, spark.sparkContext._jvm
                )
                sampler.start()
                try:
                    self._act(engine, query, members, began)
                    self._look(query)
                finally:
                    self.run.seconds = time.monotonic() - began
                    sampler.ended.set()
                    sampler.join(30)
                    query.stop()
        return self.run

    def _act(self, engine: Any, query: Any, members: Callable[[], list[int]], began: float) -> None:
        end = began + 60 * self.minutes
        self._until(lambda: self.run.batches >= 3 and len(members()) == self.workers, "the first batches", query)
        number = 0
        while (due := began + (number + 1) * self.period) < end - min(self.period, 20.0):
            self._until(partial(_is_past, due), "", query, due - time.monotonic() + 5)
            time.sleep(self.chance.uniform(0, TRIGGER_S))  # the moment in the batch, by the seed
            what, clock = CYCLE[number % len(CYCLE)], time.monotonic()
            getattr(self, f"_{what}")(engine, query, members)
            self._until(partial(self._has_batch, self.run.batches), f"a batch after {what}", query)
            took = time.monotonic() - clock
            self.run.actions.append(Action(round(clock - began, 2), what, round(took, 2)))
            self.tell(
                f"{(clock - began) / 60:.1f} min: {what}, well again after {took:.1f} s; {self.run.batches:,} batches"
            )
            number += 1
        self._until(partial(_is_past, end), "", query, 2 * self.period + 60)

    def _has_batch(self, number: int) -> bool:
        return self.run.batches > number

    def _look(self, query: Any) -> None:
        """Whether all is right so far."""
        if self.run.wrong is not None:
            raise _Failed(self.run.wrong)
        if not query.isActive:
            raise _Failed(f"the query has ended: {query.exception()}")

    def _until(self, condition: Callable[[], bool], what: str, query: Any, patience: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            self._look(query)
            if time.monotonic() > deadline:
                raise _Failed(f"{what}: not within {patience:.0f} s")
            time.sleep(0.05)

    # What happens

    def _member(self, engine: Any, query: Any, members: Callable[[], list[int]]) -> None:
        pid = self.chance.choice(members())
        os.kill(pid, signal.SIGKILL)
        self._until(lambda: pid not in members() and len(members()) == self.workers, "a new member", query)

    def _executor(self, engine: Any, query: Any, members: Callable[[], list[int]]) -> None:
        def executors() -> list[int]:
            processes = _processes()
            below = sorted(_below(os.getpid(), processes))
            return [pid for pid in below if "CoarseGrainedExecutorBackend" in processes[pid][1]]

        pid = self.chance.choice(executors())
        os.kill(pid, signal.SIGKILL)
        self._until(lambda: pid not in executors() and len(executors()) == 2, "a new executor", query)
        self._until(lambda: len(members()) == self.workers, "members on it", query)

    def _rescale(self, engine: Any, query: Any, members: Callable[[], list[int]]) -> None:
        self.workers = 5 - self.workers
        engine.rescale(self.workers).wait(PATIENCE_S)
        self._until(lambda: len(members()) == self.workers, f"{self.workers} members", query)


@contextlib.contextmanager
def _journal(path: Path) -> Iterator[None]:
    """While this lasts, what penstock logs goes to a file, and nowhere else."""
    ours, lines = logging.getLogger("penstock"), logging.FileHandler(path, mode="w")
    lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = ours.level, ours.propagate
    ours.setLevel(logging.INFO)
    ours.propagate = False
    ours.addHandler(lines)
    try:
        yield
    finally:
        ours.removeHandler(lines)
        lines.close()
        ours.setLevel(before[0])
        ours.propagate = before[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 where all is right and flat."""
    parser = argparse.ArgumentParser(prog="make soak", description="A query for an hour, while processes are killed.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--period", type=float, default=60.0, metavar="S", help="seconds between what happens (60)")
    parser.add_argument("--seed", type=int, default=13, help="of moments and of who is killed (13)")
    parser.add_argument(
        "--out", type=Path, default=Path("target/soak"), help="where soak.json, soak.svg and soak.log go"
    )
    given = parser.parse_args(arguments)
    if not 0 < given.minutes <= 24 * 60 or not 5 <= given.period <= 3600:
        parser.error("--minutes: above 0, at most 1440; --period: 5 to 3600")

    def tell(text: str) -> None:
        print(f"soak: {text}", flush=True)

    # What dies is told in the log, a warning each time: that goes to a file.
    logging.basicConfig(level=logging.ERROR)
    given.out.mkdir(parents=True, exist_ok=True)
    soak = _Soak(given.minutes, given.period, given.seed, tell)
    failure: list[str] = []
    try:
        with _journal(given.out / "soak.log"):
            soak.go()
    except _Failed as error:
        failure.append(str(error))
    except (Exception, KeyboardInterrupt) as error:
        # Something was not done in time, or Spark or the engine says no: what an hour has given is kept all the same.
        traceback.print_exc()
        failure.append(f"{type(error).__name__}: {error}".splitlines()[0])
    run = soak.run
    (given.out / "soak.json").write_text(run.to_json())
    if importable():
        from penstock.report._style import encode

        figure = draw(run)
        (given.out / "soak.svg").write_bytes(encode(figure, "svg"))
        (given.out / "soak.png").write_bytes(encode(figure, "png"))
    # A wrong batch ends the run, unless it is the last one.
    wrong = list(dict.fromkeys([*failure, *judge(run)]))
    tell(f"{run.seconds / 60:.1f} min, {run.batches:,} batches, {run.rows:,} rows, {len(run.actions)} actions")
    for line in wrong:
        tell(line)
    tell(f"{'NOT FLAT' if wrong else 'flat'}; {given.out}")
    return 1 if wrong else 0


def importable() -> bool:
    """Whether pictures can be drawn here."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


if __name__ == "__main__":
    sys.exit(main())
