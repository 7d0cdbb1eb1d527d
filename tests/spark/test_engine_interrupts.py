"""Processes with their own main thread and Spark: Ctrl-C outside of waits of ours, a cell of a notebook run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from engine_support import Kept, counted, in_thread, numbers, state, wait_for
from pyspark.sql import SparkSession
import penstock as pk

COUNTS = pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.count(), total=pk.sum("v"))
builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").config("spark.log.level", "OFF").getOrCreate()
context = spark.sparkContext
sparks = signal.getsignal(signal.SIGINT)


def interrupted(waits, when):
    inside = threading.Event()

    def strike():
        inside.wait()
        wait_for(when)
        os.kill(os.getpid(), signal.SIGINT)

    with in_thread(strike):
        try:
            inside.set()
            waits()
        except KeyboardInterrupt:
            return
    raise AssertionError("no interrupt came")


with pk.Engine(spark, workers=2, bits=4) as engine:
    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept, name="counts", checkpoint=None)
    function(numbers(spark, 0), 0)
    members = engine.members()

    # At a prompt, while a job of the user's runs: that one is cancelled.
    began = Path(sys.argv[2])

    def long(_):
        began.touch()
        time.sleep(120)

    ended = []

    def job():
        try:
            context.parallelize([0], 1).foreach(long)
        except Exception as error:
            ended.append(str(error))

    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    interrupted(lambda: time.sleep(60), began.exists)
    thread.join(60)
    assert ended and "cancelled" in ended[0], ended
    assert engine.members() == members
    function(numbers(spark, 1), 1)
    assert state(kept) == counted(2)

    # In a wait of Spark's.
    query = spark.readStream.format("rate").option("rowsPerSecond", 10).load().writeStream.format("noop").start()
    interrupted(query.awaitTermination, lambda: query.lastProgress is not None)
    query.stop()
    assert engine.members() == members
    function(numbers(spark, 2), 2)
    assert state(kept) == counted(3)
    with pk.Engine(spark, workers=1, name="second"):
        pass
    assert signal.getsignal(signal.SIGINT) is not sparks
assert signal.getsignal(signal.SIGINT) is sparks, "put back with the last engine"
signal.signal(signal.SIGINT, signal.default_int_handler)
with pk.Engine(spark, workers=1, name="third"):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "that of a user stays"
print("all is as it was")
"""


#: As a notebook has it while a cell runs: the handler raises, and py4j closes the connections of all threads.
WITHIN = """
import os, signal, sys, threading, time

sys.path.insert(0, sys.argv[1])
from engine_support import Kept, counted, in_thread, numbers, state, wait_for
from pyspark.sql import SparkSession
import penstock as pk

COUNTS = pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.count(), total=pk.sum("v"))
builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").config("spark.log.level", "OFF").getOrCreate()
context = spark.sparkContext
sleep = context._jvm.java.lang.Thread.sleep
main = threading.main_thread().ident
signal.signal(signal.SIGINT, signal.default_int_handler)


def within():
    frame = sys._current_frames()[main]
    while frame is not None and frame.f_code.co_name != "send_command":
        frame = frame.f_back
    return frame is not None


def interrupted(call):
    over = threading.Event()

    def strike():
        # py4j reaches the connections that are in use by way of one that is not.
        context.getLocalProperty("any")
        wait_for(within)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(60)

    with in_thread(strike):
        try:
            call()
        except KeyboardInterrupt:
            return
        finally:
            over.set()
    raise AssertionError("no interrupt came")


def jobs():
    return sorted(context.statusTracker().getActiveJobsIds())


with pk.Engine(spark, workers=2, bits=4) as engine:
    kept = Kept()
    function = engine.foreach_batch(COUNTS, kept, name="counts", checkpoint=None)
    function(numbers(spark, 0), 0)
    wait_for(lambda: len(jobs()) == 2, what="the end of the batch's jobs")
    members, groups, running = engine.members(), engine._job_groups(), jobs()
    for batch in range(1, 3):
        interrupted(lambda: sleep(60_000))
        time.sleep(2)  # what is submitted once more runs by then
        assert jobs() == running, f"jobs {running} are {jobs()} after interrupt {batch}"
        assert engine.members() == members and engine._job_groups() == groups
        function(numbers(spark, batch), batch)
        assert state(kept) == counted(batch + 1)
        wait_for(lambda: jobs() == running, what="the end of the batch's jobs")

    # The end of a job is heard of as before, and why.
    os.kill(members[0].pid, signal.SIGKILL)
    wait_for(lambda: len(engine.members()) == 2 and members[0] not in engine.members(), what="the replacement")
    last = engine._residents._seats[members[0].slot].last
    assert last and "Exception thrown by job" not in last, last
    wait_for(lambda: len(jobs()) == 2, what="one job for each worker")
    assert jobs()[0] in running and jobs()[1] not in running
wait_for(lambda: not jobs(), what="the end of all jobs")
print("all is as it was")
"""


#: Twice the same cell of a notebook, which stops Spark and leaves its engine as it is.
CELLS = """
import itertools, os, socket, sys, threading
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from engine_support import Kept, counted, numbers, state, stream, wait_for, write
from pyspark.sql import SparkSession
import penstock as pk

COUNTS = pk.Flow("k bigint, v bigint").key_by("k").agg(n=pk.count(), total=pk.sum("v"))
folder, kept, engines = Path(sys.argv[2]), Kept(), []
folder.mkdir()


def is_free(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


# Below those that the system gives to others meanwhile.
port, page = itertools.islice(filter(is_free, range(20_000 + os.getpid() % 10_000, 32_000)), 2)
address = f"127.0.0.1:{page}"
for cell in range(2):
    builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.host", "127.0.0.1").config("spark.log.level", "OFF").getOrCreate()
    assert pk.spark.engines(spark) == []
    engine = pk.Engine(spark, workers=2, bits=4, name="cell", metrics=address, registry_port=port).start()
    engines.append(engine)
    assert (engine.metrics_address, engine._hub.address) == (address, f"127.0.0.1:{port}")
    assert pk.spark.engines(spark) == [engine]
    write(spark, folder / "in", cell, numbers(spark, cell))
    function = engine.foreach_batch(COUNTS, kept)
    query = stream(spark, folder / "in", "k bigint, v bigint", function, folder / "checkpoint")
    query.awaitTermination()
    assert state(kept) == counted(cell + 1)
    if cell == 1:
        # One that is still open is named where it is in the way.
        try:
            with pk.Engine(spark, workers=1, bits=4, name="third") as third:
                again = third.foreach_batch(COUNTS, kept)
                write(spark, folder / "in", 2, numbers(spark, 2))
                stream(spark, folder / "in", "k bigint, v bigint", again, folder / "checkpoint").awaitTermination()
        except Exception as error:
            assert "Engine cell of this process has a query there: close it (pk.spark.engines" in str(error), error
        else:
            raise AssertionError("two engines served one checkpoint")
    frame = spark.range(1).selectExpr("id AS k", "id AS v")
    spark.stop()
    for call in (
        engine.stats,
        lambda: engine.rescale(3),
        lambda: pk.Engine(spark, name="late"),
        lambda: pk.spark.run(COUNTS, frame),
        lambda: pk.spark.engines(spark),
    ):
        try:
            call()
        except (pk.errors.EngineError, pk.errors.UnsupportedSession) as error:
            assert "the Spark context of " in str(error) and "getOrCreate() gives" in str(error), error
        else:
            raise AssertionError("nobody said that the context was stopped")
for engine in engines:
    engine.close()  # waits for the end that is under way
    assert ": closed," in repr(engine), engine
# The one that has closed the last engine may be in its last instructions.
wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("penstock")], what="no thread")
print("all is as it was")
"""


def test_a_cell_that_stops_spark_runs_again_on_one_checkpoint_and_the_same_ports(tmp_path: Path) -> None:
    run(CELLS, tmp_path)


def test_an_interrupt_costs_no_worker(tmp_path: Path) -> None:
    run(PROGRAM, tmp_path)


def test_an_interrupt_within_a_call_of_the_jvm_starts_no_job_again(tmp_path: Path) -> None:
    run(WITHIN, tmp_path)


def run(text: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    ran = subprocess.run(
        [sys.executable, str(program), str(Path(__file__).parents[1]), str(tmp_path / "began")],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
    )
    assert ran.returncode == 0 and "all is as it was" in ran.stdout, ran.stderr[-4_000:]
