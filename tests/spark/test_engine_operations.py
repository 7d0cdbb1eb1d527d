"""What operators of an engine see: metrics, log lines, what a start waits for; and checkpoints that come back."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from durable_support import Runs
from engine_support import Kept, counted, in_thread, refuses, state, wait_for, write
from metrics_support import Samples, of, read
from penstock.errors import ConfigError, EngineError, StateLost
from penstock.spark._engine import startup
from penstock.spark._engine.journal import FIELDS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture
def runs(cluster: Any, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path)


def values(samples: Samples, name: str, label: str) -> set[str]:
    """What a label of a metric is."""
    return {dict(own)[label] for one, own in samples if one == name}


#: Metrics of workers and of their processes, and what tells the one from the other.
PER_WORKER = {
    "worker": ("penstock_state_bytes", "penstock_keys", "penstock_bins", "penstock_worker_rows_total"),
    "resident": (
        "penstock_member_memory_bytes",
        "penstock_staged_bytes",
        "penstock_staged_disk_bytes",
        "penstock_member_refused_connections_total",
    ),
}


def test_a_scrape_of_a_run_with_a_death_a_migration_and_a_rescale(
    cluster: Any, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    killed = False

    def sink(df: Any, batch_id: int) -> None:
        nonlocal killed
        runs.kept(df, batch_id)
        if batch_id == 1 and not killed:
            killed = True
            os.kill(engine.members()[0].pid, signal.SIGKILL)
            assert read(str(address)), "a scrape in the middle of a batch"

    runs.add(4)
    with pk.Engine(cluster, workers=2, bits=4, name='e "1"', metrics="127.0.0.1:0") as engine:
        address = engine.metrics_address
        assert address is not None and address.startswith("127.0.0.1:")
        assert of(read(address), "penstock_members") == [2.0]
        for metric in PER_WORKER["resident"]:
            wait_for(lambda metric=metric: values(read(str(address)), metric, "resident") == {"0", "1"}, what=metric)
        with pytest.raises(OSError, match=r".*"):
            socket_garbage(address)
        query = runs.rest(engine, sink=sink)
        # It may be grouped anew just then, with the member that took the place of the one that died.
        engine.migrate(to=[0] * 16).wait(60)
        engine.rescale(3).wait(60)
        wait_for(lambda: of(read(str(address)), "penstock_members_replaced_total") == [1.0])
        wait_for(lambda: sum(of(read(str(address)), "penstock_keys")) == 7.0, what="figures of all workers")
        wait_for(lambda: sum(of(read(str(address)), "penstock_bins")) == 16.0, what="figures of the last generation")
        found = read(address)
        name = str(query.id)
        assert all(dict(labels)["engine"] == 'e "1"' for _, labels in found)
        assert of(found, "penstock_batches_total", query=name, outcome="committed") == [4.0]
        assert of(found, "penstock_rows_total", query=name) == [4 * 600.0]
        # A rate knows of the first one only where there was a 0 before.
        for counter in ("batches", "migrations"):
            assert of(found, f"penstock_{counter}_total", query=name, outcome="failed") == [0.0]
        assert of(found, "penstock_rescales_total", outcome="failed") == of(found, "penstock_storage_errors_total")
        assert of(found, "penstock_last_batch", query=name) == [3.0]
        assert 0 <= time.time() - of(found, "penstock_last_batch_timestamp_seconds")[0] < 120
        assert of(found, "penstock_batch_seconds_count", query=name) == [4.0]
        phases = {
            dict(labels)["phase"]: value
            for (one, labels), value in found.items()
            if one.endswith("phase_seconds_total")
        }
        assert set(phases) == {"trigger", "feed", "run", "serve", "commit"} and all(
            value > 0 for value in phases.values()
        )
        whole = of(found, "penstock_batch_seconds_sum", query=name)[0]
        assert sum(value for phase, value in phases.items() if phase != "trigger") == pytest.approx(whole)
        assert sum(of(found, "penstock_state_bytes", query=name)) > 0
        assert sum(of(found, "penstock_bins", query=name)) == 16
        assert of(found, "penstock_members_lost_total") == [1.0]
        assert of(found, "penstock_migrations_total", outcome="done") == [1.0]
        assert of(found, "penstock_rescales_total", outcome="done") == [1.0]
        assert of(found, "penstock_manifests_total") == [4.0] and of(found, "penstock_claims_total") == [1.0]
        assert of(found, "penstock_generations_total")[0] >= 2
        assert all(value > 0 for value in of(found, "penstock_member_memory_bytes"))
        engine.rescale(1).wait(60)
        wait_for(
            lambda: of(read(str(address)), "penstock_bins", query=name) == [16.0], what="the figures of one worker"
        )
        found = read(address)
        for label, metrics in PER_WORKER.items():
            for metric in metrics:
                assert values(found, metric, label) == {"0"}, metric
        assert of(found, "penstock_keys") == [7.0] and of(found, "penstock_worker_rows_total")[0] > 0
        assert engine.stats().column("pid").to_pylist() == [member.pid for member in engine.members()]
        query.stop()
        engine.drop(query)
        found = read(address)
        assert not [one for one in found if dict(one[1]).get("query") == name], "series end with their query"
        assert values(found, "penstock_member_memory_bytes", "resident") == {"0"}, "those of residents do not"
    assert engine.metrics_address is None and refuses(address)
    assert state(runs.kept) == counted(4)
    lines = [record for record in caplog.records if hasattr(record, "event")]
    events = [record.event for record in lines]
    for wanted in (
        "member joined", "batch begun", "claim made", "generation begun", "manifest written", "batch committed",
        "member lost", "member replaced", "migration begun", "migration done", "rescale begun", "rescale done",
    ):  # fmt: skip
        assert wanted in events, wanted
    assert events.count("batch committed") == 4 and "batch failed" not in events
    done = next(record for record in lines if record.event == "batch committed")
    assert (done.query, done.batch, done.rows, done.members) == (name, 0, 600, 2) and done.generation > 0
    assert done.getMessage().startswith(f'batch committed engine="e \\"1\\"" query={name} generation=')
    lost = next(record for record in lines if record.event == "member lost")
    assert lost.levelno == logging.WARNING and lost.pid > 0 and lost.resident in (0, 1)
    assert {field for record in lines for field in vars(record) if field in FIELDS} <= set(FIELDS)


def socket_garbage(address: str) -> None:
    """Bytes that are no request must cost nothing but their connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as one:
        one.sendall(b"\x00\xff\r\n\r\n")
        assert b"400" in one.recv(1_000)
        raise ConnectionResetError


def test_who_has_no_secret_is_counted_and_told(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    with pk.Engine(cluster, workers=1, metrics="127.0.0.1:0") as engine:
        assert engine._hub is not None
        host, _, port = engine._hub.address.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as one:
            one.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        address = str(engine.metrics_address)
        wait_for(lambda: of(read(address), "penstock_refused_connections_total", reason="malformed") == [1.0])
    [line] = [record for record in caplog.records if getattr(record, "event", "") == "connection refused"]
    assert line.reason == "malformed" and line.connections == 1


def test_late_rows_that_nobody_takes_and_state_that_is_nowhere_durable_are_told(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for batch, ms in enumerate((60_000, 1_000)):
        write(cluster, tmp_path / "in", batch, cluster.range(3).selectExpr("id AS k", f"{ms}L AS ts"))
    flow = pk.Flow("k bigint, ts bigint", event_time="ts", lateness="1s").key_by("k").window(pk.tumbling("5s"))
    with pk.Engine(cluster, workers=1, bits=4, name="e") as engine:
        function = engine.foreach_batch(flow.agg(n=pk.count()), Kept(), name="q")
        read = cluster.readStream.schema("k bigint, ts bigint").option("maxFilesPerTrigger", 1)
        writer = read.parquet(str(tmp_path / "in")).writeStream.foreachBatch(function)
        writer.trigger(availableNow=True).start().awaitTermination(120)
    lines = [vars(record) for record in caplog.records if record.levelno == logging.WARNING]
    told = {line["event"]: line for line in lines if line.get("event") in ("rows late", "state in memory")}
    assert len(told) == 2 and {(line["engine"], line["query"]) for line in told.values()} == {("e", "q")}
    late = told["rows late"]
    assert (late["batch"], late["rows"], late["members"]) == (1, 3, 1) and late["generation"] > 0
    assert told["state in memory"]["reason"].startswith("no checkpointLocation: ")


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing(cluster: Any) -> None:
    with pk.Engine(cluster, workers=1, metrics="127.0.0.1:0") as engine:
        other = pk.Engine(cluster, workers=1, metrics=engine.metrics_address)
        with pytest.raises(ConfigError, match=r"cannot listen at 127\.0\.0\.1"):
            other.start()
        assert other.metrics_address is None and pk.spark.engines(cluster) == [engine]


def test_a_start_that_waits_for_slots_says_what_for(
    cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Four slots, of which tasks of another job hold three."""
    caplog.set_level(logging.INFO, "penstock")
    monkeypatch.setattr(startup, "_TELL_S", (0.2, 1.0))
    tell = startup.Startup._tell

    def told_then_over(self: startup.Startup, what: str, members: int = 0) -> None:
        """The limit comes when it was said what this test waits for, not before and not long after."""
        due = self._next
        tell(self, what, members)
        if self._next != due and "no task slot for" in what:
            self._deadline = 0.0

    monkeypatch.setattr(startup.Startup, "_tell", told_then_over)
    gate, began = tmp_path / "gate", tmp_path / "began"
    gate.touch()
    path, mark = str(gate), str(began)

    def hold(numbers: Any) -> Any:
        open(f"{mark}-{next(iter(numbers))}", "w").close()
        while os.path.exists(path):
            time.sleep(0.02)
        return iter([0])

    def busy() -> None:
        cluster.sparkContext.parallelize(range(3), 3).mapPartitions(hold).collect()

    with in_thread(busy):
        try:
            wait_for(lambda: len(list(tmp_path.glob("began-*"))) == 3, what="the other job runs")
            with pytest.raises(EngineError) as failed:
                pk.Engine(cluster, workers=3, name="waits", start_timeout=150).start()
        finally:
            gate.unlink()
    told = str(failed.value)
    assert "start_timeout=150" in told and "tasks run on 2 executors, local-cluster[2,2,1024]" in told
    assert "Stop what else runs, offer more task slots" in told
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("penstock waits: waits for ")]
    assert said, "nothing was said"
    assert any("of 3 workers: resident" in line and "no task slot for" in line for line in said), said
    assert all(" since " in line and "gives up in" in line for line in said)
    lines = [vars(record) for record in caplog.records if getattr(record, "event", "") == "start waits"]
    assert len(lines) == len(said) and {line["workers"] for line in lines} == {3}
    assert {line["members"] for line in lines} <= {0, 1, 2}, "some have no slot"


def test_a_checkpoint_comes_back_from_a_copy(cluster: Any, runs: Runs, tmp_path: Path) -> None:
    """As docs/operations.md has it: the whole checkpoint of a query that has stopped, in one piece."""
    runs.add(2)
    with pk.Engine(cluster, workers=2, bits=4) as engine:
        runs.run(engine)
    shutil.copytree(runs.check, tmp_path / "backup")
    before = pk.state.read(str(tmp_path / "backup"))
    runs.add(2)
    with pk.Engine(cluster, workers=1, bits=4) as engine:
        runs.run(engine)
    assert state(runs.kept) == counted(4)
    shutil.rmtree(runs.check)
    shutil.copytree(tmp_path / "backup", runs.check)
    assert pk.state.read(str(runs.check)).sort_by("k").equals(before.sort_by("k"))
    runs.kept.batches = {batch: table for batch, table in runs.kept.batches.items() if batch < 2}
    with pk.Engine(cluster, workers=2, bits=4) as engine:
        runs.run(engine)
    assert sorted(runs.kept.batches) == [0, 1, 2, 3] and state(runs.kept) == counted(4)


def test_an_engine_does_not_go_on_from_before_a_copy_came_back(cluster: Any, runs: Runs, tmp_path: Path) -> None:
    """Another one has done its batches anew meanwhile, under a claim of the same number."""
    runs.add(2)
    with pk.Engine(cluster, workers=1, bits=2) as engine:
        runs.run(engine)
    shutil.copytree(runs.check, tmp_path / "backup")
    runs.add(2)
    with pk.Engine(cluster, workers=1, bits=2) as first:
        runs.run(first)
        runs.check.rename(tmp_path / "from then on")  # manifests are deleted there
        shutil.copytree(tmp_path / "backup", runs.check)
        with pk.Engine(cluster, workers=1, bits=2) as second:
            runs.run(second)
            runs.add()
            error = runs.fails(first)
            assert isinstance(error, EngineError) and "another engine has made claim 2" in str(error)
            assert "put back from a copy" in str(error)
        runs.run(first)
    assert sorted(runs.kept.batches) == [0, 1, 2, 3, 4] and state(runs.kept) == counted(5)


def test_half_a_copy_is_refused(cluster: Any, runs: Runs, tmp_path: Path) -> None:
    """Spark's commits of today over the state of yesterday: never a wrong number."""
    runs.add(2)
    with pk.Engine(cluster, workers=1, bits=4) as engine:
        runs.run(engine)
    shutil.copytree(runs.files, tmp_path / "backup")
    runs.add(2)
    with pk.Engine(cluster, workers=1, bits=4) as engine:
        runs.run(engine)
    shutil.rmtree(runs.files)
    shutil.copytree(tmp_path / "backup", runs.files)
    runs.add()
    with pk.Engine(cluster, workers=1, bits=4) as engine:
        error = runs.fails(engine)
    assert isinstance(error, StateLost) and "batch" in str(error)


def test_members_are_replaced_one_by_one_while_a_query_runs(cluster: Any, runs: Runs) -> None:
    """As docs/operations.md has it: one more comes, the oldest are ended, one more goes."""
    runs.add()
    with pk.Engine(cluster, workers=1, bits=4) as engine:
        query = runs.rest(engine)
        [old] = engine.members()
        engine.rescale(2).wait(60)
        os.kill(old.pid, signal.SIGTERM)
        wait_for(lambda: old.lost is not None and len(engine.members()) == 2, what="its replacement")
        engine.rescale(1).wait(60)
        assert [member.id for member in engine.members()] != [old.id]
        runs.add()
        query.processAllAvailable()
        query.stop()
        assert state(runs.kept) == counted(2)
