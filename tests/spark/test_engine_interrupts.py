"""Ctrl-C outside of waits of ours, at a prompt and in a wait of Spark's, in a process with its own main thread."""

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
    def strike():
        wait_for(when)
        os.kill(os.getpid(), signal.SIGINT)

    with in_thread(strike):
        try:
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


def test_an_interrupt_costs_no_worker(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, str(program), str(Path(__file__).parents[1]), str(tmp_path / "began")],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
    )
    assert ran.returncode == 0 and "all is as it was" in ran.stdout, ran.stderr[-4_000:]
