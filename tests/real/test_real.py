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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_support import (
    PARTS,
    ROOT,
    alive,
    command_of,
    connections,
    descendants,
    kafka,
    lacking,
    postgres,
    s3,
    sockets,
    until,
)

import penstock as pk
from penstock._storage import below, open_storage, with_settings

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the client of Kafka's
]

SEED = int(os.environ.get("PENSTOCK_SEED", "13"))
PARTITIONS = 4
KEYS = 5_000
#: Bids of a record, records of a batch at most, batches of a scenario at least and at most, and how many of them wait
#: in the topic. Batches that are half full have more rows, too, than come by way of the driver: there are feed tasks.
BIDS, RECORDS, LEAST, MOST, AHEAD = 8, 3_000, 26, 80, 4
#: Seconds that one scenario may take after its parts are up.
PATIENCE_S = 420.0
#: Of the store that speaks S3, for who reads its environment.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "real", "AWS_SECRET_ACCESS_KEY": "real"}
FAILED = ROOT / "target" / "test-real"


#: (auction, price) of each bid of a record.
Record = list[tuple[int, int]]


def oracle(bids: list[list[Record]], ends: list[dict[int, int]]) -> list[dict[int, tuple[int, int]]]:
    """Of each batch the counts and sums of the keys in it, with all before, by the offsets where it ended."""
    state: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    found, at = [], [0] * len(bids)
    for end in ends:
        touched = set()
        for partition, offset in end.items():
            for auction, price in (bid for record in bids[partition][at[partition] : offset] for bid in record):
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


def committed(checkpoint: str) -> int:
    """Batches in Spark's log."""
    names = [name for name, _ in open_storage(below(checkpoint, "commits")).list() if name.isdigit()]
    return max(map(int, names), default=-1) + 1


def offsets(checkpoint: str, topic: str) -> list[dict[int, int]]:
    """Where each committed batch ended, from Spark's log."""
    log, found = open_storage(below(checkpoint, "offsets")), []
    for batch in range(committed(checkpoint)):
        lines = log.read(str(batch)).decode().splitlines()
        found.append({int(name): int(end) for name, end in json.loads(lines[2])[topic].items()})
    return found


class Feeder(threading.Thread):
    """Sends seeded bids while the query runs: always a few batches ahead of it, until enough has happened."""

    def __init__(self, broker: str, topic: str, batches: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self.broker, self.topic, self.batches = broker, topic, batches
        #: By partition, in the order of their offsets; few auctions have most bids.
        self.bids: list[list[Record]] = [[] for _ in range(PARTITIONS)]
        self.error: BaseException | None = None
        self.enough, self.stop = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self.send()
        except BaseException as error:
            self.error = error

    def send(self) -> None:
        from kafka import KafkaProducer

        chance = random.Random(SEED)
        producer = KafkaProducer(bootstrap_servers=self.broker, acks="all", linger_ms=20, batch_size=1 << 18)
        for number in range(MOST):
            if number >= LEAST and self.enough.is_set():
                break
            while number > self.batches() + AHEAD:
                if self.stop.wait(0.2):
                    return
            for _ in range(RECORDS):
                record = [
                    (min(chance.randrange(KEYS), chance.randrange(KEYS)), chance.randrange(1, 1_000_000))
                    for _ in range(BIDS)
                ]
                partition = chance.randrange(PARTITIONS)
                self.bids[partition].append(record)
                text = ";".join(f"{auction},{price}" for auction, price in record)
                producer.send(self.topic, text.encode(), partition=partition)
            producer.flush()
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
        return dict(self.until(lambda: self.find(what), f"the driver says {what!r}", timeout))

    def until(self, condition: Callable[[], Any], what: str, timeout: float = 120.0, pause: float = 0.05) -> Any:
        """As `until`; the end of the query or the driver is an error at once."""

        def going() -> Any:
            if found := condition():
                return found
            assert self.find("ended") is None, f"{what}: the query has ended: {self.find('ended')}"
            code = self.popen.poll()
            assert code is None, f"{what}: the driver has ended with {code}, see {self.log.name}"
            return None

        return until(going, what, timeout, pause)

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
        connected = connections(set(members.values()))
        for pid in descendants(self.popen.pid) - set(members) if connected else ():
            words = command_of(pid)
            if "pyspark.daemon" in words and "java" not in words and sockets(pid) & connected:
                return pid
        return None

    def kill_feeder(self) -> int | None:
        """Kills a Python worker that sends rows to a member, if one begins to in the next second.

        A feed is connected for some hundredths of a second. Members that stand still let it wait; a batch beyond
        its feed waits, too, so they go on before the next try.
        """
        members = [pid for pid, _ in self.members]
        for pid in members:
            os.kill(pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                if pid := self.feeder():
                    os.kill(pid, signal.SIGKILL)
                    return pid
                time.sleep(0.01)
            return None
        finally:
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

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

            # What executors say is kept beside what the driver says.
            work = Path(pyspark.__file__).parent / "work" / started["app"]
            with contextlib.suppress(OSError):
                shutil.move(work, self.log.with_name(f"executors-{started['app']}"))


class Scenario:
    """One query from its first to its last batch, and what happens to it."""

    def __init__(self, name: str, folder: Path, broker: str, sink: dict[str, Any], **options: Any) -> None:
        self.name, self.folder, self.broker = name, folder, broker
        self.topic = f"bids-{name}"
        self.seed = SEED
        self.chance = random.Random(f"{SEED} {name}")
        checkpoint = options.get("checkpoint", str(folder / "checkpoint"))
        #: The same for who has no settings of Hadoop's.
        self.look = with_settings(checkpoint, lambda name: options.get("conf", {}).get(f"spark.hadoop.{name}"))
        #: Seconds between looks at Spark's log.
        self.pause = 0.02 if self.look == checkpoint else 0.3
        self.done: list[str] = []
        self.options = {
            "folder": str(folder),
            "jars": [str(PARTS / "spark-4.0")],
            "kafka": broker,
            "topic": self.topic,
            "records": RECORDS,
            "workers": 2,
            "checkpoint": checkpoint,
            **sink,
            **options,
        }
        self.workers = 2
        self.driver: Driver | None = None

    @property
    def committed(self) -> int:
        """Batches."""
        return committed(self.look)

    def start(self) -> Driver:
        driver = Driver({**self.options, "workers": self.workers}, self.folder)
        self.driver = driver
        driver.wait("started")
        driver.until(lambda: len(driver.members) >= self.workers, "all members")
        return driver

    def run(self, actions: list[str]) -> None:
        from kafka.admin import KafkaAdminClient, NewTopic

        began = time.monotonic()
        admin = KafkaAdminClient(bootstrap_servers=self.broker)
        admin.create_topics([NewTopic(self.topic, PARTITIONS, 1)])
        admin.close()
        feeder = Feeder(self.broker, self.topic, lambda: self.committed)
        self.bids = feeder.bids
        feeder.start()
        try:
            self.start()
            gap = (LEAST - 4) // max(1, len(actions))
            for number, action in enumerate(actions):
                batch = 2 + number * gap + self.chance.randrange(gap)
                self.reach(batch, began)
                time.sleep(self.chance.uniform(0.0, 0.8))  # the moment in the batch, by the seed
                getattr(self, action.partition(" ")[0])(*action.split()[1:])
            feeder.enough.set()
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
        assert self.driver is not None
        left = PATIENCE_S - (time.monotonic() - began)
        self.driver.until(lambda: self.committed >= batch, f"batch {batch}", left, self.pause)

    def note(self, what: str) -> None:
        self.done.append(f"{what} after batch {self.committed - 1}")

    # What happens

    def member(self) -> None:
        assert self.driver is not None
        driver = self.driver
        found = driver.until(lambda: driver.members, "a member")
        pid, _ = self.chance.choice(found)
        os.kill(pid, signal.SIGKILL)
        self.note(f"member {pid}")
        until(lambda: not alive(pid), "its end")
        driver.until(lambda: len(driver.members) == self.workers, "a member in its place")

    def feed(self) -> None:
        assert self.driver is not None
        pid = self.driver.until(self.driver.kill_feeder, "a feed task", 60, self.chance.uniform(0.1, 0.4))
        self.note(f"feed worker {pid}")

    def executor(self) -> None:
        assert self.driver is not None
        driver = self.driver
        pid = self.chance.choice(driver.executors())
        os.kill(pid, signal.SIGKILL)
        self.note(f"executor {pid}")
        until(lambda: not alive(pid), "its end")
        driver.until(lambda: len(driver.executors()) == 2, "an executor in its place")
        driver.until(lambda: len(driver.members) == self.workers, "members in their place")

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
        ends = offsets(self.look, self.topic)
        assert ends and ends[-1] == {number: len(own) for number, own in enumerate(self.bids)}, "all events were taken"
        return oracle(self.bids, ends)

    def kept(self) -> dict[int, tuple[int, int]]:
        """The state in the checkpoint, as another process reads it."""
        table = pk.state.read(self.options.get("state", self.look))
        return {row["auction"]: (row["n"], row["total"]) for row in table.to_pylist()}

    def tell(self, equal: bool, rows: int, batches: int) -> None:
        print(
            f"\n{self.name}: seed {self.seed}, {batches} batches of {BIDS * sum(map(len, self.bids))} events,"
            f" {rows} rows in the table, {'EQUAL to the oracle' if equal else 'NOT EQUAL'}, {self.seconds:.0f} s;"
            f" kill -9 and rescale: {', '.join(self.done) or 'none'}",
            flush=True,
        )


# Parts


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not (PARTS / "broker").is_dir():
        lacking("kafka", "no target/real/broker: scripts/real_parts.py gets it (`make test-real`)")
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
        scenario = Scenario("postgres", folder, broker, {"sink": "postgres", "postgres": server}, tls="always")
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
        scenario = Scenario("s3-state", folder, broker, {"sink": "postgres", "postgres": server}, state=state)
        scenario.run(actions(scenario))
        compare_postgres(scenario, server)


def test_checkpoint_in_s3(broker: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own, by Hadoop's client; the state is beside it, where Hadoop's settings say."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with s3(folder / "s3") as store, bids_table(folder) as server:
        settings = {"endpoint": f"http://{store}", "endpoint.region": "us-east-1", "path.style.access": "true"}
        conf = {f"spark.hadoop.fs.s3a.{name}": value for name, value in settings.items()}
        place = "s3a://state/bids/check"
        sink = {"sink": "postgres", "postgres": server}
        jars = [str(PARTS / name) for name in ("spark-4.0", "s3a")]
        scenario = Scenario("s3-checkpoint", folder, broker, sink, checkpoint=place, conf=conf, jars=jars)
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
