"""The engine when things break: killed members and tasks, hostile bytes on every port."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import COUNTS, Gate, Kept, bag, counted, in_thread, numbers, state, stream, wait_for, write
from penstock.errors import AuthenticationError, EngineError, StateLost
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(180)]

SCHEMA = "k bigint, v bigint"


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[pk.Engine]:
    with pk.Engine(cluster, workers=2, name="fault") as engine:
        yield engine


def complete(engine: pk.Engine) -> bool:
    return len(engine.members()) == 2


def test_a_member_killed_between_batches(cluster: Any, engine: pk.Engine) -> None:
    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept, name="between")
    function(numbers(cluster, 0), 0)
    victim = engine.members()[0]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(StateLost, match=f"member {victim.id} ") as caught:
        function(numbers(cluster, 1), 1)
    assert (caught.value.member, caught.value.executor, caught.value.epoch) == (victim.id, victim.executor, 1)
    assert sorted(kept.batches) == [0], "no row of a batch without state"
    with pytest.raises(StateLost, match="new checkpoint"):
        function(numbers(cluster, 1), 1)
    wait_for(lambda: complete(engine), what="a replacement")
    assert victim.id not in {member.id for member in engine.members()}
    with pytest.raises(StateLost):
        engine.finish("between")
    after = Kept()
    fresh = engine.foreach_batch(COUNTS, after, name="afterwards")
    for batch in range(2):
        fresh(numbers(cluster, batch), batch)
    assert state(after) == counted(2)


def test_a_member_killed_in_an_epoch(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    wait_for(lambda: complete(engine), what="all members")
    gate = Gate(tmp_path)
    kept, other = Kept(), Kept()
    flow = pk.Flow(SCHEMA).map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    write(cluster, tmp_path / "in", 0, numbers(cluster, 0))
    write(cluster, tmp_path / "in", 1, numbers(cluster, 1))

    def sink(df: Any, batch_id: int) -> None:
        kept(df, batch_id)
        gate.close()

    function = engine.foreach_batch(flow, sink, checkpoint=None)
    query = stream(cluster, tmp_path / "in", SCHEMA, function, tmp_path / "check")
    wait_for(gate.reached.exists, what="the epoch is under way")
    victim = engine.members()[1]
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: victim.lost is not None, what="the loss is noticed")
    # What is lost is known when the other member has ended its workers: it may hold what the dead one owned.
    gate.open()
    with pytest.raises(Exception, match="state at the beginning of batch 1 is lost"):
        query.awaitTermination(60)
    assert isinstance(function.error, StateLost) and function.error.member == victim.id
    assert sorted(kept.batches) == [0]
    # The same stream goes on only with the state that is gone; a new one from batch 0 works.
    with pytest.raises(Exception, match="state at the beginning of batch 1 is lost"):
        stream(cluster, tmp_path / "in", SCHEMA, function, tmp_path / "check").awaitTermination(60)
    again = engine.foreach_batch(COUNTS, other)
    stream(cluster, tmp_path / "in", SCHEMA, again, tmp_path / "check2").awaitTermination(120)
    assert again.error is None
    assert state(other) == counted(2)


PLAIN = pk.Flow(SCHEMA).map_batches(lambda batch: batch)


def rows_of(kept: Kept, batch: int) -> list[int]:
    return sorted(kept.batches[batch]["v"].to_pylist())


@pytest.mark.parametrize("flow", [PLAIN, COUNTS], ids=["keyless", "keyed, first epoch"])
def test_a_member_killed_while_it_is_fed_and_nothing_was_lost(
    cluster: Any, engine: pk.Engine, tmp_path: Path, flow: pk.Flow
) -> None:
    """The batch is fed again, to the replacement, and what is told of it is from its beginning to its end."""
    wait_for(lambda: complete(engine), what="all members")
    gate = Gate(tmp_path)
    kept = Kept()
    served: dict[int, float] = {}

    def sink(df: Any, batch_id: int) -> None:
        kept(df, batch_id)
        served[batch_id] = time.time()

    function = engine.foreach_batch(flow, sink)
    first = 0
    if flow is PLAIN:
        function(numbers(cluster, 0), 0)
        first = 1
    gate.close()
    waits = gate.function()

    def held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from map(waits, batches)

    df = numbers(cluster, first)
    with in_thread(lambda: function(df.mapInArrow(held, df.schema), first)) as result:
        try:
            wait_for(gate.reached.exists, what="a task feeds")
            victim = engine.members()[0]
            os.kill(victim.pid, signal.SIGKILL)
            wait_for(lambda: victim.lost is not None, what="the loss is noticed")
        finally:
            gate.open()
        result(120)
    assert victim.id not in {member.id for member in engine.members()}
    hit = max((epoch for epoch in engine.timeline().epochs if epoch.epoch == first), key=lambda epoch: epoch.started)
    assert hit.ended > served[first] - 0.01  # two clocks
    assert hit.feed_s + hit.run_s + hit.serve_s + hit.files_s == pytest.approx(hit.seconds)
    if flow is COUNTS:
        assert state(kept) == counted(1)
        return
    function(numbers(cluster, 2), 2)
    assert [rows_of(kept, batch) for batch in range(3)] == [list(range(b * 600, b * 600 + 600)) for b in range(3)]


def test_outputs_that_went_with_a_member_are_made_again(cluster: Any, engine: pk.Engine) -> None:
    """Without state a batch that Spark has not committed is computed from its rows."""
    wait_for(lambda: complete(engine), what="all members")
    kept = Kept()

    def fails(df: Any, batch_id: int) -> None:
        if batch_id == 1 and not kept.batches.get(1):
            kept(df, batch_id)
            raise OSError("the disk is full")
        kept(df, batch_id)

    function = engine.foreach_batch(PLAIN, fails, name="made again")
    function(numbers(cluster, 0), 0)
    with pytest.raises(OSError, match="full"):
        function(numbers(cluster, 1), 1)
    victim = engine.members()[1]
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: victim.lost is not None, what="the loss is noticed")
    for batch in (1, 2):
        function(numbers(cluster, batch), batch)
    assert [rows_of(kept, batch) for batch in range(3)] == [list(range(b * 600, b * 600 + 600)) for b in range(3)]


def test_a_killed_drain_task_is_tried_again(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    marks = str(tmp_path)
    kept: dict[int, pa.Table] = {}

    def dies_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import signal

        from pyspark import TaskContext

        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            Path(marks, f"died-{context.partitionId()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def sink(df: Any, batch_id: int) -> None:
        kept[batch_id] = to_table(df.mapInArrow(dies_once, df.schema))
        assert bag(to_table(df)) == bag(kept[batch_id])

    wait_for(lambda: complete(engine), what="all members")
    function = engine.foreach_batch(COUNTS, sink, name="drained")
    function(numbers(cluster, 0), 0)
    assert len(list(tmp_path.glob("died-*"))) >= 1
    assert {row["k"]: (row["n"], row["total"]) for row in kept[0].to_pylist()} == counted(1)


def test_a_killed_feed_task_counts_once(cluster: Any, engine: pk.Engine) -> None:
    def dies_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import signal

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0 and context.partitionId() == 1:
            time.sleep(0.2)  # the rows before are on their way to the member
            os.kill(os.getpid(), signal.SIGKILL)

    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept, name="fed")
    for batch in range(2):
        df = numbers(cluster, batch)
        function(df.mapInArrow(dies_once, df.schema), batch)
    assert state(kept) == counted(2)


def test_hostile_bytes_on_every_port(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    from penstock import _native

    wait_for(lambda: complete(engine), what="all members")
    gate = Gate(tmp_path)
    flow = pk.Flow(SCHEMA).map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    kept = Kept()
    function = engine.foreach_batch(flow, kept, name="besieged")
    function(numbers(cluster, 0), 0)
    gate.close()
    members = engine.members()
    with in_thread(lambda: function(numbers(cluster, 1), 1)) as result:
        wait_for(gate.reached.exists, what="the epoch is under way")
        addresses = [engine._hub.address] + [member.address for member in members]
        garbage = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), struct.pack(">Q", 1 << 62) * 8, b"\x80\x04K\x01."]
        for address in addresses:
            for noise in garbage:
                send(address, noise)
        for member in members:
            with pytest.raises(AuthenticationError):
                _native.Feed(member.address, os.urandom(32), function.query_id, 1, 0, 1, flow.input_schema)
            with pytest.raises(AuthenticationError):
                _native.Drain(member.address, os.urandom(32), function.query_id, 0, 0)
        with pytest.raises(AuthenticationError):
            _native.Member(engine._hub.address, os.urandom(32), "{}")
        gate.open()
        result()
    assert state(kept) == counted(2)
    assert engine.members() == members
    # Who is refused is counted behind the end of its connection.
    wait_for(lambda: engine._hub.metrics()["refused"] >= 4, what="the registry counts them")

    def refused() -> list[int]:
        told = [entry for entry in engine.stats().to_pylist() if entry["query"] == "besieged"]
        return [entry["refused_connections"] for entry in told]

    wait_for(lambda: len(refused()) == 2 and min(refused()) >= 4, what="both members tell of theirs")


def test_a_failed_query_does_not_touch_another(cluster: Any, engine: pk.Engine) -> None:
    """A panic-like failure of one query: the member and the other query go on."""

    def breaks(batch: pa.RecordBatch) -> Any:
        raise MemoryError("too much")

    bad = engine.foreach_batch(pk.Flow(SCHEMA).map_batches(breaks).key_by("k").agg(n=pk.count()), Kept(), name="breaks")
    kept = Kept()
    good = engine.foreach_batch(COUNTS, kept, name="goes on")
    good(numbers(cluster, 0), 0)
    with pytest.raises(Exception, match="too much"):
        bad(numbers(cluster, 0), 0)
    good(numbers(cluster, 1), 1)
    assert state(kept) == counted(2)
    with pytest.raises(EngineError, match="cannot move now"):
        engine.migrate(to=[0] * 256, query="breaks")


def send(address: str, noise: bytes) -> None:
    """Write bytes to a port and read what comes until it closes, or for a moment."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.settimeout(0.3)
        try:
            if noise:
                connection.sendall(noise)
            while connection.recv(4096):
                pass
        except OSError:
            pass
