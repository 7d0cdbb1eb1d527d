"""Members that are connected and do nothing: stopped processes, in every place where somebody waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import COUNTS, Gate, Kept, counted, in_thread, numbers, state, wait_for
from penstock.errors import StateLost
from penstock.spark._engine import drains

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(240)]

SCHEMA = "k bigint, v bigint"


def complete(engine: pk.Engine) -> bool:
    return len(engine.members()) == 2


@pytest.fixture(scope="module")
def impatient(cluster: Any) -> Iterator[pk.Engine]:
    """Gives silent members up soon. Ends what a test has stopped, whatever happens."""
    stopped: list[int] = []
    with pk.Engine(cluster, workers=2, name="impatient", member_timeout=12.0) as engine:
        engine.stopped = stopped  # type: ignore[attr-defined]
        yield engine
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def stop(engine: Any, member: Any) -> None:
    engine.stopped.append(member.pid)
    os.kill(member.pid, signal.SIGSTOP)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_stopped_member_is_noticed_named_and_replaced(cluster: Any, impatient: Any, tmp_path: Path) -> None:
    """Connected but hung: between batches, within an epoch, and while rows are fed to it."""
    engine, kept = impatient, Kept()
    function = engine.foreach_batch(COUNTS, kept, name="idle")
    function(numbers(cluster, 0), 0)
    victim = engine.members()[0]
    stop(engine, victim)
    # Nobody asks anything of it: it is noticed all the same.
    wait_for(lambda: victim.lost is not None, what="the loss")
    assert victim.hung and "member_timeout" in victim.lost
    with pytest.raises(StateLost, match=rf"member {victim.id} .*connected but silent") as caught:
        function(numbers(cluster, 1), 1)
    assert caught.value.member == victim.id
    # Spark kills what is stopped, and the slot is used again.
    wait_for(lambda: complete(engine), what="a replacement")
    wait_for(lambda: gone(victim.pid), what="the end of the stopped process")
    assert engine._residents.missing() == ""

    gate = Gate(tmp_path)
    flow = pk.Flow(SCHEMA).map_batches(gate.function()).key_by("k").agg(n=pk.count(), total=pk.sum("v"))
    function = engine.foreach_batch(flow, Kept(), name="within")
    function(numbers(cluster, 0), 0)
    gate.close()
    with in_thread(lambda: function(numbers(cluster, 1), 1)) as result:
        wait_for(gate.reached.exists, what="the epoch is under way")
        victim = engine.members()[1]
        stop(engine, victim)
        gate.open()
        with pytest.raises(StateLost, match=rf"member {victim.id} .*connected but silent"):
            result()
    wait_for(lambda: complete(engine), what="a replacement")

    def stops(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            Path(str(tmp_path), "feeding").touch()
            while not Path(str(tmp_path), "stopped").exists():
                time.sleep(0.02)
            yield batch

    function = engine.foreach_batch(COUNTS, Kept(), name="fed while stopped")
    function(numbers(cluster, 0), 0)
    victim = engine.members()[0]
    df = numbers(cluster, 1)
    with in_thread(lambda: function(df.mapInArrow(stops, df.schema), 1)) as result:
        wait_for((tmp_path / "feeding").exists, what="rows are on their way")
        stop(engine, victim)
        (tmp_path / "stopped").touch()
        with pytest.raises(StateLost, match=rf"member {victim.id} .*connected but silent"):
            result(60)
    wait_for(lambda: complete(engine), what="a replacement")
    after = Kept()
    fresh = engine.foreach_batch(COUNTS, after, name="after it")
    for batch in range(2):
        fresh(numbers(cluster, batch), batch)
    assert state(after) == counted(2)


def test_results_of_a_stopped_member_hold_nobody(cluster: Any, impatient: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink that read from it is called again, with what the others have computed from the same rows."""
    engine, kept, seen = impatient, Kept(), 0
    monkeypatch.setattr(drains, "_LOCAL_ROWS", 0)  # those are with the driver when the sink is called

    def sink(df: Any, batch_id: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            stop(engine, engine.members()[1])
        kept(df, batch_id)

    function = engine.foreach_batch(COUNTS, sink, name="read while stopped")
    function(numbers(cluster, 0), 0)
    assert seen == 2
    assert state(kept) == counted(1)
    wait_for(lambda: complete(engine), what="a replacement")


def test_a_member_that_hangs_while_it_leaves_gives_its_slot_back(cluster: Any, impatient: Any) -> None:
    """It does not read that it may go: Spark ends it."""
    engine = impatient
    for name in list(engine.queries):
        engine.drop(name)
    jobs = len(cluster.sparkContext.statusTracker().getActiveJobsIds())
    victim = engine.members()[1]
    stop(engine, victim)
    engine.rescale(1).wait(60)
    wait_for(lambda: gone(victim.pid), what="the end of the stopped process")
    wait_for(
        lambda: len(cluster.sparkContext.statusTracker().getActiveJobsIds()) == jobs - 1, what="the end of its job"
    )
    engine.rescale(2).wait(60)
    assert complete(engine)
