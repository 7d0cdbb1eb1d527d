"""Kafka into the engine into PostgreSQL and Delta, state on disk and in S3, and processes are killed: tables are right.

A scenario feeds a topic of seeded bids in many batches. Seeded too are the batches in which something happens and the
moments in them: kill -9 of a member, of a feed task's Python worker, of an executor, of the driver, and two rescales.
At the end the tables are compared with what follows from the events alone: their final counts and sums, and of each
batch those of the keys in it, by the offsets that Spark's own log gives it. One line a scenario says what was done.

They run in target/real/env (`make test-real`), where Spark is of the release that the connectors exist for.
PENSTOCK_SEED chooses other moments. Where a scenario fails its logs stay in target/test-real.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_support import PARTS, ROOT, alive, command_of, descendants, dialled, kafka, postgres, s3, until

import penstock as pk

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the client of Kafka's
]

SEED = int(os.environ.get("PENSTOCK_SEED", "13"))
PARTITIONS = 4
KEYS = 5_000
#: Events of a batch, and batches of a scenario at least.
ROWS, BATCHES = 8_000, 26
#: Seconds that one scenario may take after its parts are up.
PATIENCE_S = 420.0
#: Of the store that speaks S3, for who reads its environment.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "real", "AWS_SECRET_ACCESS_KEY": "real"}
FAILED = ROOT / "target" / "test-real"


def events(seed: int) -> list[list[tuple[int, int]]]:
    """(auction, price) by partition, in the order of their offsets; few auctions have most bids."""
    chance = random.Random(seed)
    found: list[list[tuple[int, int]]] = [[] for _ in range(PARTITIONS)]
    for _ in range(ROWS * BATCHES):
        auction = min(chance.randrange(KEYS), chance.randrange(KEYS))
        found[chance.randrange(PARTITIONS)].append((auction, chance.randrange(1, 1_000_000)))
    return found


def oracle(bids: list[list[tuple[int, int]]], ends: list[dict[int, int]]) -> list[dict[int, tuple[int, int]]]:
    """Of each batch the counts and sums of the keys in it, with all before, by the offsets where it ended."""
    state: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    found, at = [], [0] * len(bids)
    for end in ends:
        touched = set()
        for partition, offset in end.items():
            for auction, price in bids[partition][at[partition] : offset]:
                n, total = state[auction]
                state[auction] = n + 1, total + price
                touched.add(auction)
            at[partition] = offset
        found.append({auction: state[auction] for auction in touched})
    return found


def final(batches: list[dict[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """Of each key what the last batch with it says."""
    found: dict[int, tuple[int, int]] = {}
    for batch in batches:
        found |= batch
    return found


def offsets(checkpoint: Path, topic: str) -> list[dict[int, int]]:
    """Where each committed batch ended, from Spark's log."""
    found = []
    while (checkpoint / "commits" / str(len(found))).exists():
        lines = (checkpoint / "offsets" / str(len(found))).read_text().splitlines()
        found.append({int(name): int(end) for name, end in json.loads(lines[2])[topic].items()})
    return found


class Feeder(threading.Thread):
    """Sends the events: a third at once, the others while the query runs."""

    def __init__(self, broker: str, topic: str, bids: list[list[tuple[int, int]]]) -> None:
        super().__init__(daemon=True)
        self.broker, self.topic, self.bids = broker, topic, bids
        self.error: BaseException | None = None
        self.sent = 0
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            self.send()
        except BaseException as error:
            self.error = error

    def send(self) -> None:
        from kafka import KafkaProducer

        producer = KafkaProducer(bootstrap_servers=self.broker, acks="all", linger_ms=20, batch_size=1 << 18)
        longest = max(map(len, self.bids))
        step = longest // 40
        for first in range(0, longest, step):
            for partition, own in enumerate(self.bids):
                for auction, price in own[first : first + step]:
                    producer.send(self.topic, f"{auction},{price}".encode(), partition=partition)
                    self.sent += 1
            producer.flush()
            if first > longest // 3:
                self.stop.wait(0.5)  # rows come while the query runs; nothing waits for this
            if self.stop.is_set():
                break
        producer.close()


class Driver:
    """The process of job.py, and what it has told."""

    def __init__(self, options: dict[str, Any], folder: Path) -> None:
        self.log = folder / "driver.log"
        self.told: list[dict[str, Any]] = []
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        job = [sys.executable, str(Path(__file__).with_name("job.py")), json.dumps(options)]
        with open(self.log, "ab") as log:
            self.popen = subprocess.Popen(
                job,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=environment,
                cwd=folder,
            )
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with contextlib.suppress(ValueError):
                self.told.append(json.loads(line))

    def find(self, what: str) -> dict[str, Any] | None:
        return next((told for told in reversed(self.told) if told["told"] == what), None)

    def wait(self, what: str, timeout: float = 120.0) -> dict[str, Any]:
        def found() -> Any:
            told = self.find(what)
            if told is None and what != "ended":
                assert self.find("ended") is None, f"the query has ended: {self.find('ended')}"
                assert self.popen.poll() is None, f"the driver has ended with {self.popen.returncode}, see {self.log}"
            return told

        return dict(until(found, f"the driver says {what!r}", timeout))

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    @property
    def members(self) -> list[tuple[int, int]]:
        """(pid, port) of those that serve and are there."""
        told = self.find("members") or {"members": []}
        return [(pid, int(address.rpartition(":")[2])) for pid, address in told["members"] if alive(pid)]

    def executors(self) -> list[int]:
        return [pid for pid in sorted(descendants(self.popen.pid)) if "CoarseGrainedExecutorBackend" in command_of(pid)]

    def feeder(self) -> int | None:
        """A Python worker that sends rows to a member now."""
        members = dict(self.members)
        ports = set(members.values())
        for pid in descendants(self.popen.pid) - set(members):
            if "pyspark" in command_of(pid) and "java" not in command_of(pid) and dialled(pid) & ports:
                return pid
        return None

    def kill(self) -> list[int]:
        """All at once: Python, its JVM. The executors and members are left to notice; their pids."""
        started = self.wait("started")
        rest = descendants(self.popen.pid)
        os.kill(started["jvm"], signal.SIGKILL)
        self.popen.kill()
        self.popen.wait()
        return sorted(rest - {started["jvm"]})

    def end(self) -> None:
        """Whatever it still has goes with it."""
        rest = descendants(self.popen.pid)
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(20)
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started = self.find("started")
        if started is not None:
            import pyspark

            shutil.rmtree(Path(pyspark.__file__).parent / "work" / started["app"], ignore_errors=True)


class Scenario:
    """One query from its first to its last batch, and what happens to it."""

    def __init__(self, name: str, folder: Path, broker: str, sink: dict[str, Any], state: str | None = None) -> None:
        self.name, self.folder, self.broker = name, folder, broker
        self.topic = f"bids-{name}"
        self.seed = SEED
        self.chance = random.Random(f"{SEED} {name}")
        self.bids = events(SEED)
        self.checkpoint = folder / "checkpoint"
        self.done: list[str] = []
        self.options = {
            "folder": str(folder),
            "jars": str(PARTS / "spark-4.0"),
            "kafka": broker,
            "topic": self.topic,
            "rows": ROWS,
            "workers": 2,
            "checkpoint": str(self.checkpoint),
            "state": state,
            **sink,
        }
        self.workers = 2
        self.driver: Driver | None = None

    @property
    def committed(self) -> int:
        """Batches."""
        names = [path.name for path in (self.checkpoint / "commits").glob("[0-9]*")]
        return max(map(int, names), default=-1) + 1

    def start(self) -> Driver:
        driver = Driver({**self.options, "workers": self.workers}, self.folder)
        self.driver = driver
        driver.wait("started")
        until(lambda: len(driver.members) >= self.workers, "all members", 120)
        return driver

    def run(self, actions: list[str]) -> None:
        from kafka.admin import KafkaAdminClient, NewTopic

        began = time.monotonic()
        admin = KafkaAdminClient(bootstrap_servers=self.broker)
        admin.create_topics([NewTopic(self.topic, PARTITIONS, 1)])
        admin.close()
        feeder = Feeder(self.broker, self.topic, self.bids)
        feeder.start()
        try:
            self.start()
            gap = (BATCHES - 4) // max(1, len(actions))
            for number, action in enumerate(actions):
                batch = 2 + number * gap + self.chance.randrange(gap)
                self.reach(batch, began)
                time.sleep(self.chance.uniform(0.0, 0.8))  # the moment in the batch, by the seed
                getattr(self, action.partition(" ")[0])(*action.split()[1:])
            feeder.join(PATIENCE_S)
            assert not feeder.is_alive() and feeder.error is None, f"the feeder: {feeder.error}"
            assert self.driver is not None
            self.driver.say("finish")
            self.driver.wait("finished", PATIENCE_S)
            assert self.driver.popen.wait(60) == 0
        finally:
            feeder.stop.set()
            if self.driver is not None:
                self.driver.end()
        self.seconds = time.monotonic() - began

    def reach(self, batch: int, began: float) -> None:
        def there() -> bool:
            assert self.driver is not None
            assert self.driver.find("ended") is None, f"the query has ended: {self.driver.find('ended')}"
            assert time.monotonic() - began < PATIENCE_S, f"{self.committed} batches after {PATIENCE_S:g} s"
            return self.committed >= batch

        until(there, f"batch {batch}", PATIENCE_S, 0.02)

    def note(self, what: str) -> None:
        self.done.append(f"{what} after batch {self.committed - 1}")

    # What happens

    def member(self) -> None:
        assert self.driver is not None
        driver = self.driver
        found = until(lambda: driver.members, "a member")
        pid, _ = self.chance.choice(found)
        os.kill(pid, signal.SIGKILL)
        self.note(f"member {pid}")
        until(lambda: not alive(pid), "its end")
        until(lambda: len(driver.members) == self.workers, "a member in its place", 120)

    def feed(self) -> None:
        assert self.driver is not None
        pid = until(self.driver.feeder, "a feed task", 60, 0.002)
        os.kill(pid, signal.SIGKILL)
        self.note(f"feed worker {pid}")

    def executor(self) -> None:
        assert self.driver is not None
        driver = self.driver
        pid = self.chance.choice(driver.executors())
        os.kill(pid, signal.SIGKILL)
        self.note(f"executor {pid}")
        until(lambda: not alive(pid), "its end")
        until(lambda: len(driver.executors()) == 2, "an executor in its place", 120)
        until(lambda: len(driver.members) == self.workers, "members in their place", 120)

    def restart(self) -> None:
        assert self.driver is not None
        before = self.committed
        rest = self.driver.kill()
        self.note(f"driver {self.driver.popen.pid}")
        try:
            until(lambda: not any(map(alive, rest)), "executors and members have ended by themselves", 90)
        finally:
            for pid in filter(alive, rest):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.driver.end()
        self.start()
        self.reach(before + 1, time.monotonic())

    def rescale(self, workers: str) -> None:
        assert self.driver is not None
        driver = self.driver
        driver.told = [told for told in driver.told if told["told"] != "rescaled"]
        driver.say(f"rescale {workers}")
        told = driver.wait("rescaled", 150)
        assert told.get("workers") == int(workers), told
        self.workers = int(workers)
        self.note(f"rescaled to {workers}")

    # What came out

    def expected(self) -> list[dict[int, tuple[int, int]]]:
        ends = offsets(self.checkpoint, self.topic)
        assert ends and ends[-1] == {number: len(own) for number, own in enumerate(self.bids)}, "all events were taken"
        return oracle(self.bids, ends)

    def kept(self) -> dict[int, tuple[int, int]]:
        """The state in the checkpoint, as another process reads it."""
        table = pk.state.read(self.options["state"] or str(self.checkpoint))
        return {row["auction"]: (row["n"], row["total"]) for row in table.to_pylist()}

    def tell(self, equal: bool, rows: int, batches: int) -> None:
        print(
            f"\n{self.name}: seed {self.seed}, {batches} batches of {sum(map(len, self.bids))} events,"
            f" {rows} rows in the table, {'EQUAL to the oracle' if equal else 'NOT EQUAL'}, {self.seconds:.0f} s;"
            f" kill -9 and rescale: {', '.join(self.done) or 'none'}",
            flush=True,
        )


# Parts


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not (PARTS / "broker").is_dir():
        pytest.skip("no target/real/broker: scripts/real_parts.py gets it (`make test-real`)")
    with kafka(tmp_path_factory.mktemp("kafka") / "broker") as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Of a scenario; what fails leaves its logs in target/test-real."""
    failed = request.session.testsfailed
    yield tmp_path
    if request.session.testsfailed > failed:
        place = FAILED / request.node.name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tmp_path, place, ignore=shutil.ignore_patterns("local", "data", "*.parquet", "*.crc"))
        print(f"logs: {place}")


@contextlib.contextmanager
def bids_table(folder: Path) -> Iterator[dict[str, Any]]:
    import tempfile

    import pg8000.native

    # Another user may own it, so it is not below folders that only we may enter.
    place = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    place.chmod(0o755)
    try:
        with postgres(place / "server") as server:
            with pg8000.native.Connection(**server) as base:
                base.run("CREATE TABLE bids (auction bigint PRIMARY KEY, n bigint, total bigint, batch bigint)")
                base.run("CREATE TABLE batches (batch bigint PRIMARY KEY, rows bigint)")
            yield server
    finally:
        with contextlib.suppress(OSError):
            shutil.copy(place / "server" / "postgres.log", folder)
        shutil.rmtree(place, ignore_errors=True)


def compare_postgres(scenario: Scenario, server: dict[str, Any]) -> None:
    import pg8000.native

    with pg8000.native.Connection(**server) as base:
        got = {auction: (n, int(total)) for auction, n, total in base.run("SELECT auction, n, total FROM bids")}
        batches = dict(base.run("SELECT batch, rows FROM batches"))
    expected = scenario.expected()
    rows = {number: len(batch) for number, batch in enumerate(expected) if batch}
    scenario.tell(got == final(expected) and batches == rows, len(got), len(expected))
    assert got == final(expected)
    assert batches == rows
    assert scenario.kept() == final(expected)


def compare_delta(scenario: Scenario, table: Path) -> None:
    """By Delta's log itself: what was added and not removed."""
    import pyarrow.parquet as pq

    files: set[str] = set()
    for entry in sorted((table / "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                files.add(action["add"]["path"])
            elif "remove" in action:
                files.discard(action["remove"]["path"])
    got: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    count = 0
    for name in files:
        for row in pq.read_table(table / name, partitioning=None).to_pylist():
            got[row["batch"]][row["auction"]] = row["n"], row["total"]
            count += 1
    expected = scenario.expected()
    wanted = {number: batch for number, batch in enumerate(expected) if batch}
    equal = dict(got) == wanted and count == sum(map(len, wanted.values()))
    scenario.tell(equal, count, len(expected))
    assert sorted(got) == sorted(wanted)
    assert [number for number in wanted if got[number] != wanted[number]] == []
    assert count == sum(map(len, wanted.values())), "rows that are there twice"
    assert scenario.kept() == final(expected)


ALL = ["member", "rescale 3", "feed", "restart", "executor", "rescale 2", "member"]


def test_kafka_to_postgres(broker: str, folder: Path) -> None:
    with bids_table(folder) as server:
        scenario = Scenario("postgres", folder, broker, {"sink": "postgres", "postgres": server})
        scenario.run(actions(scenario))
        compare_postgres(scenario, server)


def test_kafka_to_delta(broker: str, folder: Path) -> None:
    table = folder / "table"
    scenario = Scenario("delta", folder, broker, {"sink": "delta", "delta": str(table)})
    scenario.run(actions(scenario))
    compare_delta(scenario, table)


def test_state_in_s3(broker: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with s3(folder / "s3") as store, bids_table(folder) as server:
        state = f"s3a://state/bids/_penstock?endpoint_override={store}&scheme=http&region=us-east-1"
        scenario = Scenario("s3", folder, broker, {"sink": "postgres", "postgres": server}, state)
        scenario.run(actions(scenario))
        compare_postgres(scenario, server)


def actions(scenario: Scenario) -> list[str]:
    """All that happens, in an order that the seed gives; PENSTOCK_ACTIONS names others, separated by commas."""
    given = os.environ.get("PENSTOCK_ACTIONS")
    if given is not None:
        return [action for action in given.split(",") if action]
    order = list(ALL)
    kills = [index for index, action in enumerate(order) if not action.startswith("rescale")]
    shuffled = [order[index] for index in kills]
    scenario.chance.shuffle(shuffled)
    for index, action in zip(kills, shuffled, strict=True):
        order[index] = action
    return order
