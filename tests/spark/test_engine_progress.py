"""What Spark tells of a running query beside its Python interface: on real streams, running, idle and ended."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from engine_support import COUNTS, numbers, wait_for, write
from penstock.spark._engine import feeds
from penstock.spark._engine.progress import StreamFacts

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]

SCHEMA = "k bigint, v bigint"


def started(spark: Any, folder: Path, function: Any, **options: str) -> Any:
    read = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder))
    return read.writeStream.foreachBatch(function).options(**options).start()


def test_a_stream_that_runs_rests_and_has_ended(spark: Any, tmp_path: Path) -> None:
    check = tmp_path / "check"
    seen: list[tuple[Any, ...]] = []
    failed: list[BaseException] = []

    def look(df: Any, batch_id: int) -> None:
        try:
            facts = StreamFacts(df.sparkSession, df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId"))
            df.count()  # what nobody reads has not come
            clock = facts.batch_timestamp_ms(batch_id)
            seen.append((batch_id, facts.committed(), clock, facts.checkpoint_root(), facts.temporary()))
        except BaseException as error:
            failed.append(error)

    for batch in range(3):
        write(spark, tmp_path / "in", batch, numbers(spark, batch))
    query = started(spark, tmp_path / "in", look, checkpointLocation=str(check))
    # A session of its own, as the engine has another than the batch.
    facts = StreamFacts(spark.newSession(), query.id)
    try:
        query.processAllAvailable()
        assert not failed and [one[0] for one in seen] == [0, 1, 2]
        # While a batch runs, the one before is committed and itself is not.
        assert [one[1] for one in seen] == [None, 0, 1]
        # Idle: Spark has committed the last one.
        assert facts.committed() == 2 and facts.active() is True
        before = facts.offered()
        assert before is not None and before > 0.0, "rows came before the last batch"
        wait_for(lambda: 0.0 < (facts.offered() or 0.0) < before, what="fewer come, the longer none do")
        for batch_id, _, clock, root, temporary in seen:
            logged = json.loads((check / "offsets" / str(batch_id)).read_text().splitlines()[1])
            assert clock == logged["batchTimestampMs"] == facts.batch_timestamp_ms(batch_id)
            assert root == facts.checkpoint_root() == check.as_uri().replace("file:///", "file:/")
            assert temporary is False
        assert facts.batch_timestamp_ms(3) is None
        assert facts.asynchronous() is False and facts.temporary() is False
        told = [source["description"] for source in query.lastProgress["sources"]]
        assert list(facts.sources() or ()) == told and len(told) == 1 and str(tmp_path / "in") in told[0]
    finally:
        query.stop()
    wait_for(lambda: facts.active() is False, what="it has ended")
    assert facts.committed() == 2 and facts.checkpoint_root() is not None and facts.asynchronous() is False
    assert facts.offered() == 0.0, "nothing comes any more"
    # Who asks for the first time knows nothing.
    late = StreamFacts(spark, query.id)
    assert [late.active(), late.committed(), late.batch_timestamp_ms(0), late.temporary()] == [False, None, None, None]
    # Another run of the same query, and its own batches.
    write(spark, tmp_path / "in", 3, numbers(spark, 3))
    again = started(spark, tmp_path / "in", lambda df, batch_id: None, checkpointLocation=str(check))
    try:
        again.processAllAvailable()
        assert again.id == query.id and facts.committed() == 3 and facts.active() is True
    finally:
        again.stop()


def test_a_temporary_checkpoint_and_asynchronous_progress(spark: Any, tmp_path: Path) -> None:
    write(spark, tmp_path / "in", 0, numbers(spark, 0))
    query = started(spark, tmp_path / "in", lambda df, batch_id: None)
    facts = StreamFacts(spark, query.id)
    query.processAllAvailable()
    assert facts.temporary() is True and "/temporary-" in str(facts.checkpoint_root())
    assert facts.committed() == 0
    query.stop()
    # The checkpoint is gone, and the log with it: not known, and no exception.
    wait_for(lambda: facts.committed() is None, what="its checkpoint is gone")
    assert facts.batch_timestamp_ms(7) is None and facts.temporary() is True

    rows = spark.readStream.format("rate").option("rowsPerSecond", 1).load()
    options = {"asyncProgressTrackingEnabled": "true", "checkpointLocation": str(tmp_path / "check")}
    beside = rows.writeStream.format("noop").options(**options).start()
    told = StreamFacts(spark, beside.id)
    try:
        assert told.asynchronous() is True
    finally:
        beside.stop()


def test_nothing_raises_for_what_is_not_there(spark: Any) -> None:
    for query_id in (str(uuid.uuid4()), "direct-0a", ""):
        facts = StreamFacts(spark, query_id)
        assert facts.committed() is None and facts.batch_timestamp_ms(0) is None
        assert facts.checkpoint_root() is None and facts.temporary() is None
        assert facts.asynchronous() is None and facts.sources() is None

    class Gone:
        """A session whose JVM is not there."""

        @property
        def sparkContext(self) -> Any:
            raise OSError("connection refused")

    assert StreamFacts(Gone(), str(uuid.uuid4())).committed() is None


def test_rows_that_are_read_twice_are_offered_once(spark: Any, tmp_path: Path) -> None:
    """A burst behind small batches: its begin is read for the driver, and all of it by tasks."""
    rows = 50_000
    with pk.Engine(spark, workers=1) as engine:
        for batch in range(3):
            write(spark, tmp_path / "in", batch, numbers(spark, batch, 10))
        function = engine.foreach_batch(COUNTS, lambda df, batch_id: None, name="burst")
        query = started(spark, tmp_path / "in", function, checkpointLocation=str(tmp_path / "check"))
        try:
            query.processAllAvailable()
            write(spark, tmp_path / "in", 3, numbers(spark, 0, rows))
            query.processAllAvailable()
            assert engine._commits is not None
            facts, found = engine._commits.facts(query.id), engine.queries["burst"]
            last = [told for told in query.recentProgress if told["numInputRows"]][-1]
            # Spark reads whole blocks of a file.
            assert last["batchId"] == 3 and rows < last["numInputRows"] < rows + 16_385 + 8_192
            assert [found.fed(batch) for batch in range(5)] == [10, 10, 10, rows, None]
            most = last["inputRowsPerSecond"] * rows / last["numInputRows"]
            assert 0.0 < (facts.offered(found.fed) or 0.0) <= most * 1.000_001
            assert 0.0 < (facts.offered(lambda batch: 10) or 0.0) <= most * 10 / rows * 1.000_001
        finally:
            query.stop()


def test_few_rows_are_in_their_order_whichever_partition_came_first(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*values: int) -> pa.RecordBatch:
        texts = [{"text": str(value)} for value in values]
        return pa.record_batch({"s": texts, "k": list(values), "place": pa.array(values, pa.int64())})

    monkeypatch.setattr(feeds, "to_batches", lambda df: [rows(7, 8), rows(1, 2, 3), rows(1 << 33)])
    found = pa.Table.from_batches(feeds.first(spark.range(1)) or [])
    assert found.column("k").to_pylist() == [1, 2, 3, 7, 8, 1 << 33] and found.column_names == ["s", "k"]
    assert [row["s"]["text"] for row in found.to_pylist()] == ["1", "2", "3", "7", "8", str(1 << 33)]
    monkeypatch.undo()
    [first, *_] = [batch.column(0).to_pylist() for batch in feeds.first(spark.range(0, 1_000, 1, 7)) or []]
    assert first == list(range(len(first)))
    assert feeds.first(spark.range(0)) == [] and feeds.first(spark.range(0, 20_000, 1, 2)) is None
