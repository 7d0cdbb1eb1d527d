"""Checkpoints that an engine must not go on from, and stores that do not work: one error each, with what to do."""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as pk
from durable_support import Runs, kill, only
from engine_support import COUNTS, Kept, counted, numbers, state, stream, wait_for
from penstock.errors import EngineError, StateError, StateLost, StorageError
from penstock.spark._engine import drains, journal
from penstock.spark._engine.progress import StreamFacts
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[pk.Engine]:
    with pk.Engine(cluster, workers=1, bits=2, name="strict") as engine:
        yield engine


@pytest.fixture
def runs(cluster: Any, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path)


# A checkpoint of three batches, and what happens to it before a fourth


@pytest.fixture(scope="module")
def original(cluster: Any, engine: pk.Engine, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(cluster, tmp_path_factory.mktemp("original"))
    runs.add(3)
    runs.run(engine)
    engine.drop(runs.function.query_id)
    runs.add()
    return runs


def newest(folder: Path, kind: str) -> Path:
    """Of batch 2."""
    return only(folder, f"manifest-{2:020}-*") if kind == "manifest" else only(folder, f"data-*-{2:020}-*")


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def newer(content: bytes) -> bytes:
    return content[:8] + struct.pack("<H", 9) + content[10:]


def flipped(content: bytes) -> bytes:
    return content[:40] + bytes([content[40] ^ 1]) + content[41:]


def no_manifests(folder: Path) -> None:
    for path in folder.glob("manifest-*"):
        path.unlink()


DAMAGES: dict[str, tuple[Callable[[Path], Any], type[EngineError], str]] = {
    "a newer manifest": (
        lambda folder: rewrite(newest(folder, "manifest"), newer),
        StorageError,
        r"manifest-0+2-\S+ has version 9; this release reads up to 1: use the release that wrote it, or a later one$",
    ),
    "a newer claim": (
        lambda folder: rewrite(only(folder, "claim-*"), newer),
        StorageError,
        r"claim-0+\d has version 9; this release reads up to 1: use the release that wrote it, or a later one$",
    ),
    "a newer data file": (
        lambda folder: rewrite(newest(folder, "data"), newer),
        StorageError,
        r"data-\S+ has version 9; this release reads up to \d: use the release that wrote it, or a later one$",
    ),
    "a torn manifest": (
        lambda folder: rewrite(newest(folder, "manifest"), lambda content: content[:-40]),
        StorageError,
        r"manifest-0+2-\S+ has \d+ bytes where it says \d+: put back the file",
    ),
    "a changed manifest": (
        lambda folder: rewrite(newest(folder, "manifest"), flipped),
        StorageError,
        r"manifest-0+2-\S+ has checksum \w+ where it says \w+: put back the file",
    ),
    "a changed data file": (
        lambda folder: rewrite(newest(folder, "data"), flipped),
        StorageError,
        r"data-\S+ has checksum .*: put back the file",
    ),
    "a torn data file": (
        lambda folder: rewrite(newest(folder, "data"), lambda content: content[:-1]),
        StorageError,
        r"data-\S+ .*: put back the file",
    ),
    "no data file": (
        lambda folder: newest(folder, "data").unlink(),
        StorageError,
        r"data-\S+ is not in the checkpoint, of which it is a part: put back the file",
    ),
    "not the last manifest": (
        lambda folder: newest(folder, "manifest").unlink(),
        StateLost,
        r"batch 3 is asked for, but the checkpoint has no state of batch 2; the newest that it has is of batch 1: put "
        r"back the manifest of batch 2, or start a new query from batch 0 \(a new checkpoint\)$",
    ),
    "no manifest": (
        no_manifests,
        StateLost,
        r"batch 3 is asked for, but the checkpoint has no state of batch 2, nor of any other batch: put back the",
    ),
    "nothing": (shutil.rmtree, StateLost, r"no state of batch 2, nor of any other batch: put back the"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_goes_on_when_mended(
    engine: pk.Engine, original: Runs, tmp_path: Path, damage: str
) -> None:
    breaks, kind, text = DAMAGES[damage]
    copy = original.copy(tmp_path)
    breaks(copy.files)
    try:
        error = copy.fails(engine)
        assert type(error) is kind
        assert f"checkpoint {copy.files.as_uri().replace('///', '/')}: " in str(error)
        with pytest.raises(kind, match=text):
            raise error
        assert not copy.kept.batches, "refused before the first row"
        if damage in ("a newer data file", "not the last manifest"):
            for path in original.files.iterdir():
                shutil.copyfile(path, copy.files / path.name)
            copy.run(engine)
            assert state(copy.kept) == counted(4)
    finally:
        engine.drop(copy.function.query_id)


def sums_in_a_class(folder: str) -> Any:
    """A step that keeps every other key's sum in an object of a module that lies in a folder."""

    def prepare(folder: str) -> Any:
        import sys

        # The process may have served an engine before.
        sys.modules.pop("kept_sums", None)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        sys.path_importer_cache.pop(folder, None)

        def step(state: Any, k: int, v: int) -> Any:
            if k % 2:
                total = (state or 0) + v
                return total, (k, total)
            from kept_sums import Sum  # type: ignore[import-not-found]

            total = (state.total if state else 0) + v
            return Sum(total), (k, total)

        return step

    class Step:
        def __init__(self) -> None:
            self.step = prepare(folder)

        def __reduce__(self) -> Any:
            return Step, ()

        def __call__(self, state: Any, k: int, v: int) -> Any:
            return self.step(state, k, v)

    return Step()


def test_state_that_cannot_be_read(engine: pk.Engine, runs: Runs) -> None:
    """Its class is gone: refused before the first row, by operator and key, until it is there again."""
    module = runs.folder / "kept_sums.py"
    module.write_text("class Sum:\n    def __init__(self, total):\n        self.total = total\n")
    step = sums_in_a_class(str(runs.folder))
    flow = pk.Flow("k bigint, v bigint").key_by("k").stateful_map(step, schema="k bigint, total bigint")
    runs.add(2)
    runs.run(engine, flow)
    engine.drop(runs.function.query_id)
    text = module.read_text()
    module.unlink()
    shutil.rmtree(runs.folder / "__pycache__", ignore_errors=True)
    runs.add()
    fed = len(runs.kept.batches)
    error = runs.fails(engine, flow)
    keys = {row["k"] for batch in range(2) for row in to_table(numbers(runs.cluster, batch)).to_pylist()}
    lost = {key for key in keys if key % 2 == 0}
    assert type(error) is StateError and error.operator == "stateful_map" and error.keys == len(lost)
    assert int(error.key) in lost
    assert (
        f"the state of key {error.key} and of {len(lost) - 1} more keys cannot be read (ModuleNotFoundError: "
        in str(error)
    )
    assert "put back what their pickles name and start the query again" in str(error)
    assert len(runs.kept.batches) == fed, "refused before the first row"
    # The reading tools show the others.
    found = pk.state.read(runs.check, unpickle=True).to_pylist()
    assert {row["k"] for row in found} == keys
    assert {row["k"] for row in found if not row["readable"]} == lost
    engine.drop(runs.function.query_id)
    # A stand-in will do.
    module.write_text(text.replace("Sum:", "Sum:  # another one"))
    runs.run(engine, flow)
    totals = dict.fromkeys(keys, 0)
    for batch in range(3):
        for row in to_table(numbers(runs.cluster, batch)).to_pylist():
            totals[row["k"]] = totals.get(row["k"], 0) + row["v"]
    rows = runs.kept.batches[2].to_pylist()
    assert {key: max(row["total"] for row in rows if row["k"] == key) for key in keys} == totals
    values = pk.state.read(runs.check).to_pylist()
    assert {row["k"]: row["value"] for row in values if row["k"] % 2} == {
        key: str(total) for key, total in totals.items() if key % 2
    }


# Whose it is


def test_the_checkpoint_of_another_query(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    place = f"file:{tmp_path}/state"
    one, other = (Runs(cluster, tmp_path / name) for name in ("one", "other"))
    for runs in (one, other):
        runs.folder.mkdir()
        runs.add(2)
    one.run(engine, checkpoint=place)
    # Also in another spelling.
    error = other.fails(engine, checkpoint=f"{tmp_path}/./state/")
    assert f"the state of query {one.function.query_id} is at " in str(error), "the engine knows"
    assert f"give query {other.function.query_id} a checkpoint of its own" in str(error)
    engine.drop(one.function.query_id)
    error = other.fails(engine, checkpoint=place)
    assert type(error) is EngineError and not other.kept.batches
    assert f"holds the state of query {one.function.query_id}, not of {other.function.query_id}: " in str(error)
    assert "give each query a checkpoint= of its own" in str(error)
    engine.drop(other.function.query_id)
    one.add()
    one.run(engine, checkpoint=place)
    assert state(one.kept) == counted(3) and not one.files.exists()


def test_another_flow(engine: pk.Engine, runs: Runs) -> None:
    runs.add(2)
    runs.run(engine)
    engine.drop(runs.function.query_id)
    runs.add()
    error = runs.fails(engine, pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.count(), total=pk.min("v")))
    for named in ("sum(Int64)", "min(Int64)", "Put the step or source back", "name= of its own", "a new checkpoint"):
        assert named in str(error)
    assert sorted(runs.kept.batches) == [0, 1]
    runs.run(engine)
    assert state(runs.kept) == counted(3)


def test_another_flow_of_equal_types(engine: pk.Engine, runs: Runs) -> None:
    """The state of one column is none of another's; whoever says that it is may go on."""
    runs.add(2)
    runs.run(engine)
    engine.drop(runs.function.query_id)
    runs.add()
    rows = pk.Flow("k bigint, v bigint")
    others = (
        (rows.key_by("v").agg(n=pk.count(), total=pk.sum("v")), "of columns v; v"),
        (rows.key_by("k").agg(n=pk.count(), total=pk.sum("k")), "of columns k; k"),
    )
    for other, columns in others:
        error = runs.fails(engine, other)
        assert "of columns k; v," in str(error) and f"{columns}:" in str(error)
        assert 'If these are the same columns under other names, say name="agg" in that step' in str(error)
    assert sorted(runs.kept.batches) == [0, 1]
    runs.run(engine, rows.key_by("k").agg(name="agg", n=pk.count(), total=pk.sum("v")))
    assert state(runs.kept) == counted(3)


def test_two_engines(cluster: Any, engine: pk.Engine, runs: Runs) -> None:
    def fails(df: Any, batch_id: int) -> None:
        raise OSError("not now")

    runs.add(2)
    runs.run(engine)
    runs.add()
    with pk.Engine(cluster, workers=1, bits=2, name="second") as second:
        error = runs.fails(second)
        assert type(error) is EngineError
        assert "end it first, or take over with pk.Engine(..., takeover=True)" in str(error)
    with pk.Engine(cluster, workers=1, bits=2, name="third", takeover=True) as third:
        # It has the claim; its sink fails, so that the first engine is asked for the batch that it expects.
        assert isinstance(runs.fails(third, sink=fails), OSError)
        error = runs.fails(engine)
        assert type(error) is EngineError
        found = re.search(r"claim (\d+) has taken the checkpoint over from claim (\d+): ", str(error))
        assert found is not None and int(found[1]) > int(found[2]), error
        assert "another engine serves the query, which goes on there" in str(error)
        assert sorted(runs.kept.batches) == [0, 1], "the sink of a fenced engine is not called"
        assert "end it first" in str(runs.fails(engine))
        runs.run(third)
        assert state(runs.kept) == counted(3)
    # That engine has ended, so the first may come back.
    runs.add()
    runs.run(engine)
    assert state(runs.kept) == counted(4)


def test_a_checkpoint_that_is_deleted_under_a_running_query(engine: pk.Engine, runs: Runs) -> None:
    def sink(df: Any, batch_id: int) -> None:
        runs.kept(df, batch_id)
        if batch_id == 1:
            runs.files.rename(runs.folder / "deleted")  # members write there

    runs.add(3)
    error = runs.fails(engine, sink=sink)
    assert type(error) is StateLost or type(error) is EngineError
    assert re.search(r"claim \d+ of this engine is gone from the checkpoint", str(error)), error


def test_asynchronous_progress(cluster: Any, engine: pk.Engine, runs: Runs) -> None:
    """Spark itself allows it to few sinks. Also refused to a query that has run without it, by the same function."""
    runs.add(2)
    runs.run(engine)
    runs.add()
    read = cluster.readStream.schema("k bigint, v bigint").option("maxFilesPerTrigger", 1)
    writer = read.parquet(str(runs.inputs)).writeStream.option("checkpointLocation", str(runs.check))
    writer = writer.option("asyncProgressTrackingEnabled", "true").foreachBatch(runs.function)
    with pytest.raises(Exception, match="does not support async progress tracking"):
        writer.start().processAllAvailable()
    query = writer.option("_asyncProgressTrackingOverrideSinkSupportCheck", "true").start()
    try:
        with pytest.raises(Exception, match="asyncProgressTrackingEnabled"):
            query.processAllAvailable()
    finally:
        query.stop()
    error = runs.function.error
    assert type(error) is EngineError and "or keep the state in memory with checkpoint=None" in str(error)
    assert sorted(runs.kept.batches) == [0, 1]


def test_a_spark_that_does_not_tell_where_its_checkpoint_is(
    engine: pk.Engine, runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether state is durable is not left to chance: who starts the query says where. What is guessed is said once."""
    monkeypatch.setattr(StreamFacts, "_execution", lambda facts: None)
    runs.add(2)
    error = runs.fails(engine)
    assert type(error) is EngineError and not runs.kept.batches
    assert "Spark does not tell whether it has a checkpointLocation" in str(error)
    assert "foreach_batch(checkpoint=)" in str(error) and "checkpoint=None" in str(error)
    runs.add(2)
    runs.run(engine, checkpoint=f"file:{runs.folder}/state")
    assert state(runs.kept) == counted(4) and list((runs.folder / "state").glob("manifest-*"))
    guesses = [line for line in caplog.messages if "so it is guessed" in line]
    assert len(guesses) == 2 and all("(py4j is not allowed to look, or this release" in line for line in guesses)
    assert "that a batch has the time of the driver's clock when it comes here" in guesses[0]
    assert "that Spark has committed each batch before it asks for the next" in guesses[1]


def by_the_clock(kind: str) -> pk.Flow:
    """A flow that decides by processing time."""

    def number(n: int | None, k: int, v: int) -> Any:
        return (n or 0) + 1, (k, (n or 0) + 1)

    def add(key: tuple[int], frames: Any, state: Any) -> Any:
        import pandas as pd

        n = (state.getOption or (0,))[0] + sum(map(len, frames))
        state.update((n,))
        state.setTimeoutDuration("1 hour")
        yield pd.DataFrame({"k": [key[0]], "n": [n]})

    keyed = pk.Flow("k bigint, v bigint").key_by("k")
    if kind == "ttl":
        return keyed.stateful_map(number, schema="k bigint, n bigint", ttl="1h", ttl_time="processing")
    return keyed.apply_in_pandas_with_state(add, "k bigint, n bigint", "n bigint", timeoutConf="ProcessingTimeTimeout")


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("ttl", "stateful_map[1] number (ttl_time='processing')"),
        ("timeout", "apply_in_pandas_with_state[1] add (ProcessingTimeTimeout)"),
    ],
)
def test_a_spark_that_does_not_tell_its_time(
    engine: pk.Engine, runs: Runs, monkeypatch: pytest.MonkeyPatch, kind: str, step: str
) -> None:
    """Another engine would run a batch again at another time: durable state does not depend on that guess."""
    monkeypatch.setattr(StreamFacts, "batch_timestamp_ms", lambda facts, batch_id: None)
    runs.add(2)
    error = runs.fails(engine, by_the_clock(kind), checkpoint=f"file:{runs.folder}/state")
    assert type(error) is EngineError and error.epoch == 0 and not runs.kept.batches
    assert "Spark does not tell when it planned batch 0" in str(error) and f"and {step} of its flow" in str(error)
    assert "Go by event time, or keep the state in memory with checkpoint=None" in str(error)
    assert not (runs.folder / "state").exists(), "no claim was made"
    engine.drop(runs.function.query_id)
    runs.run(engine, by_the_clock(kind), checkpoint=None)
    assert {k: row["n"] for k, row in runs.kept.last().items()} == {k: n for k, (n, _) in counted(2).items()}


def test_a_spark_that_tells_its_time_no_more(engine: pk.Engine, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is refused in which it does not; the query goes on where it does again."""
    tells = StreamFacts.batch_timestamp_ms
    runs.add(3)
    with monkeypatch.context() as patch:
        patch.setattr(
            StreamFacts,
            "batch_timestamp_ms",
            lambda facts, batch_id: None if batch_id == 1 else tells(facts, batch_id),
        )
        error = runs.fails(engine, by_the_clock("ttl"))
    assert type(error) is EngineError and error.epoch == 1 and sorted(runs.kept.batches) == [0]
    assert "Where Spark has told it before, start the query again" in str(error)
    runs.run(engine, by_the_clock("ttl"))
    assert {k: row["n"] for k, row in runs.kept.last().items()} == {k: n for k, (n, _) in counted(3).items()}


def test_a_checkpoint_that_was_moved(engine: pk.Engine, runs: Runs) -> None:
    """The same function serves the same query, whose state is elsewhere now."""
    runs.add(2)
    runs.run(engine)
    runs.add()
    runs.check.rename(runs.folder / "moved")
    again = stream(runs.cluster, runs.inputs, "k bigint, v bigint", runs.function, runs.folder / "moved")
    with pytest.raises(Exception, match="drop the query, then start it again"):
        again.awaitTermination(60)
    assert not runs.check.exists()
    engine.drop(runs.function.query_id)
    stream(runs.cluster, runs.inputs, "k bigint, v bigint", runs.function, runs.folder / "moved").awaitTermination(60)
    assert state(runs.kept) == counted(3) and not runs.check.exists()


def other_rows() -> Any:
    """A function of `mapInArrow` that gives other values each time."""

    def other(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os

        for batch in batches:
            values = pa.array([int.from_bytes(os.urandom(4), "little") for _ in range(batch.num_rows)], pa.int64())
            yield pa.record_batch([batch.column(0), values], ["k", "v"])

    return other


def test_a_source_that_is_not_replayable(engine: pk.Engine, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have changed when the batch has to be fed again, and the sink has had the first ones."""
    monkeypatch.setattr(drains, "_LOCAL_ROWS", 0)  # the driver has them when the sink is called

    def sink(df: Any, batch_id: int) -> None:
        if batch_id == 1:
            kill(engine.members()[0])
        runs.kept(df, batch_id)

    def call(df: Any, batch_id: int) -> None:
        runs.function(df.mapInArrow(other_rows(), df.schema) if batch_id == 1 else df, batch_id)

    runs.add(2)
    runs.function = engine.foreach_batch(COUNTS, sink)
    with pytest.raises(Exception, match="not replayable"):
        stream(runs.cluster, runs.inputs, "k bigint, v bigint", call, runs.check).awaitTermination(120)
    error = runs.function.error
    assert type(error) is EngineError
    assert "batch 1 had 600 rows when its sink was called, and now it has 600, or others" in str(error)
    assert "Give the same rows again" in str(error) and "delete" not in str(error)


def test_other_rows_are_noticed_where_nothing_is_durable(
    engine: pk.Engine, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow without keys loses nothing with its workers, so its batch is fed again whatever is kept."""
    monkeypatch.setattr(drains, "_LOCAL_ROWS", 0)

    def sink(df: Any, batch_id: int) -> None:
        if batch_id == 1:
            kill(engine.members()[0])
        runs.kept(df, batch_id)

    def call(df: Any, batch_id: int) -> None:
        runs.function(df.mapInArrow(other_rows(), df.schema) if batch_id == 1 else df, batch_id)

    runs.add(2)
    runs.function = engine.foreach_batch(
        pk.Flow("k bigint, v bigint").map_batches(lambda batch: batch), sink, checkpoint=None
    )
    with pytest.raises(Exception, match="not replayable"):
        stream(runs.cluster, runs.inputs, "k bigint, v bigint", call, runs.check).awaitTermination(120)
    error = runs.function.error
    assert type(error) is EngineError and "batch 1 had 600 rows when its sink was called" in str(error)
    assert sorted(runs.kept.batches) == [0]


def test_another_engine_gets_other_rows_than_the_sink_has_had(engine: pk.Engine, runs: Runs) -> None:
    """An engine that holds nothing of a query is as one that comes after the death of a driver."""

    def sink(df: Any, batch_id: int) -> None:
        runs.kept(df, batch_id)
        if batch_id == 1:
            raise OSError("not now")

    def run(sink: Any) -> Any:
        runs.function = engine.foreach_batch(COUNTS, sink)

        def call(df: Any, batch_id: int) -> None:
            runs.function(df.mapInArrow(other_rows(), df.schema) if batch_id == 1 else df, batch_id)

        return stream(runs.cluster, runs.inputs, "k bigint, v bigint", call, runs.check)

    runs.add(2)
    with pytest.raises(Exception, match="not now"):
        run(sink).awaitTermination(120)
    notes = f"shown-{1:020}-*"
    wait_for(lambda: list(runs.files.glob(notes)), what="the note of what the sink was called with")
    note = only(runs.files, notes)
    engine.drop(runs.function.query_id)
    with pytest.raises(Exception, match="not replayable"):
        run(runs.kept).awaitTermination(120)
    error = runs.function.error
    assert type(error) is EngineError and f"delete {note.name} in the checkpoint" in str(error)
    # Nothing forbids it to whoever knows that it does no harm.
    engine.drop(runs.function.query_id)
    note.unlink()
    run(runs.kept).awaitTermination(120)
    assert sorted(runs.kept.batches) == [0, 1] and len(pk.state.read(runs.check)) == 7


# A store that does not work


def test_a_store_that_cannot_be_reached(engine: pk.Engine, runs: Runs) -> None:
    runs.add()
    error = runs.fails(engine, checkpoint="file:/proc/nowhere/state")
    assert isinstance(error, StorageError) and not runs.kept.batches
    assert "checkpoint file:/proc/nowhere/state: " in str(error)
    assert "failed 5 times" in str(error) and "nothing is lost: mend the store" in str(error)


def test_a_store_that_is_gone_while_a_batch_runs(engine: pk.Engine, runs: Runs) -> None:
    """What was computed is kept: the batch is told again when the store is back."""
    away = runs.folder / "away"

    def sink(df: Any, batch_id: int) -> None:
        runs.kept(df, batch_id)
        if batch_id == 1:
            runs.files.rename(away)
            runs.files.touch()  # no folder can be made there

    runs.add(3)
    error = runs.fails(engine, sink=sink)
    assert isinstance(error, StorageError) and "failed 5 times" in str(error)
    runs.files.unlink()
    away.rename(runs.files)
    runs.run(engine)
    assert state(runs.kept) == counted(3)


def test_members_that_find_another_folder_there(engine: pk.Engine, runs: Runs) -> None:
    """As on executors of several machines whose folder is no shared one."""
    here, there = str(runs.files), str(runs.folder / "disk of another machine")

    def apart(rows: int | None, k: int, v: int) -> Any:
        from penstock import _storage

        folder: Any = _storage._Folder
        if folder.__init__.__name__ != "elsewhere":
            original = folder.__init__

            def elsewhere(self: Any, url: str, path: Path) -> None:
                original(self, url, Path(str(path).replace(here, there)))

            folder.__init__ = elsewhere
        return (rows or 0) + 1, (k, v)

    runs.add()
    flow = pk.Flow("k bigint, v bigint").key_by("k").stateful_map(apart, schema="k bigint, v bigint")
    engine.foreach_batch(flow, Kept(), name="patched")(numbers(runs.cluster, 0), 0)
    error = runs.fails(engine)
    assert isinstance(error, EngineError) and re.search(r"and member \d+ does not see it: ", str(error))
    assert "claim-" in str(error) and "give one that all hosts share" in str(error) and not runs.kept.batches
    assert not list(runs.files.glob("manifest-*"))


def test_a_store_that_one_member_cannot_reach(cluster: Any, runs: Runs) -> None:
    """While it writes, and when it reads: the batch fails with the number of the member, and nothing is lost."""
    flow_schema = "k bigint, v bigint"
    away = runs.folder / "away"

    def patched(pid: int) -> Any:
        away_ = str(away)

        def apart(rows: int | None, k: int, v: int) -> Any:
            from penstock import _storage

            folder: Any = _storage._Folder
            if os.getpid() == pid and folder.read.__name__ != "unreachable":
                reach = {name: getattr(folder, name) for name in ("read", "write")}

                def guard(name: str) -> Any:
                    def unreachable(self: Any, *args: Any, **options: Any) -> Any:
                        if os.path.exists(away_):
                            raise OSError("no route to the store")
                        return reach[name](self, *args, **options)

                    return unreachable

                for name in reach:
                    setattr(folder, name, guard(name))
            return (rows or 0) + 1, (k, v)

        return pk.Flow(flow_schema).key_by("k").stateful_map(apart, schema=flow_schema)

    with pk.Engine(cluster, workers=2, bits=2, name="apart") as engine:
        runs.add()
        victim = engine.members()[1]
        engine.foreach_batch(patched(victim.pid), Kept(), name="patched")(numbers(cluster, 0), 0)
        runs.run(engine)
        runs.add()
        away.touch()
        told = f"member {victim.id}: .*no route to the store.*nothing is lost: mend the store"
        error = runs.fails(engine)
        assert isinstance(error, StorageError) and "writing state failed 5 times" in str(error)
        assert re.search(told, str(error)), error
        # An engine that has nothing has to read it.
        engine.drop(runs.function.query_id)
        error = runs.fails(engine)
        assert isinstance(error, StorageError) and "reading state failed 5 times" in str(error)
        assert re.search(told, str(error)), error
        away.unlink()
        runs.run(engine)
        assert state(runs.kept) == counted(2)


def test_a_store_that_hangs_is_told_of_and_is_no_reason_to_stay(
    runs: Runs, engine: pk.Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe in place of a file: who opens it waits until somebody opens the other end."""
    monkeypatch.setattr(journal, "_SLOW_S", (0.5, 600.0))
    caplog.set_level(logging.WARNING, "penstock")
    runs.add()
    runs.run(engine)
    engine.drop(runs.function.query_id)
    runs.add()
    file = only(runs.files, "data-*")
    whole, pipe = file.rename(runs.folder / "whole"), runs.folder / "pipe"
    os.mkfifo(pipe)
    os.link(pipe, file)

    def told() -> list[logging.LogRecord]:
        lines = [line for line in caplog.records if getattr(line, "event", "") == "storage waits"]
        return [line for line in lines if file.name in str(line.reason)]  # type: ignore[attr-defined]

    query = runs.start(engine)
    line = wait_for(told, what="a line says who waits")[0]
    assert (line.query, line.member, line.pid) == (runs.function.query_id, *member_of(engine))
    # Nobody opens the other end before that.
    query.stop()
    assert not query.isActive and len(runs.kept.batches) == 1
    # Again, and now it answers, if badly: a pipe has no parts.
    query = runs.start(engine)
    wait_for(lambda: len(told()) > 1, what="another line")
    os.replace(whole, file)
    os.close(os.open(pipe, os.O_WRONLY))
    query.awaitTermination(120)
    assert state(runs.kept) == counted(2)


def member_of(engine: pk.Engine) -> tuple[int, int]:
    [member] = engine.members()
    return member.id, member.pid


# Without a stream


def test_batches_by_hand(cluster: Any, engine: pk.Engine, tmp_path: Path) -> None:
    kept, place = Kept(), f"file:{tmp_path}/state"
    function = engine.foreach_batch(COUNTS, kept, checkpoint=place, name="by hand")
    for batch in range(2):
        function(numbers(cluster, batch), batch)
    assert len(list((tmp_path / "state").glob("manifest-*"))) >= 2
    victim = engine.members()[0]
    os.kill(victim.pid, 9)
    function(numbers(cluster, 2), 2)
    assert state(kept) == counted(3)
    # Another function is another query.
    engine.drop("by hand")
    other = engine.foreach_batch(COUNTS, kept, checkpoint=place, name="another")
    with pytest.raises(EngineError, match=r"holds the state of query direct-.* not of direct-"):
        other(numbers(cluster, 0), 0)
