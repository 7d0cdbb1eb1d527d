"""The commands on the Spark hosts, each in a process of its own: same results, nothing left behind."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cli import main
from penstock.workloads import nexmark
from tpcxbb_support import expected, some_clicks, write

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The program in a session of its own, its temporary files below `folder`."""
    pytest.importorskip("pyspark")
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
        start_new_session=True,
    )


def living(session: int) -> list[str]:
    """Processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append((entry / "comm").read_text().strip() if (entry / "comm").exists() else entry.name)
    return found


def nothing_left(folder: Path, session: int) -> None:
    deadline = time.monotonic() + 60
    while names := living(session):
        assert time.monotonic() < deadline, names
        time.sleep(0.05)
    assert list((folder / "tmp").glob("penstock*")) == []


def bag(path: Path) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in pq.read_table(path).to_pylist())


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    count = 40_000
    columns = {
        "auction": [number * number % 97 for number in range(count)],
        "bidder": [number % 11 for number in range(count)],
        "price": [number * 7919 % 1000 for number in range(count)],
        "date_time": [1_000_000 + 3 * number for number in range(count)],
    }
    pq.write_table(pa.table(columns), folder / "bid.parquet")
    people = {
        "id": list(range(2_000)),
        "name": [f"name {number % 300}" for number in range(2_000)],
        "city": ["Boise", "Portland", "Phoenix"] * 666 + ["Kent"] * 2,
        "state": ["ID", "OR", "AZ", "WA", "CA"] * 400,
    }
    auctions = {
        "id": list(range(6_000)),
        "seller": [number * 7919 % 2_500 for number in range(6_000)],
        "category": [10 + number % 4 for number in range(6_000)],
    }
    pq.write_table(pa.table(people), folder / "person.parquet")
    pq.write_table(pa.table(auctions), folder / "auction.parquet")
    (folder / "params.json").write_text('{"q5_mega": {"size_ms": 6000, "period_ms": 1000}}')
    return folder


@pytest.mark.long  # that bins move while members come and go is in every run
def test_nexmark_resident_with_migrations(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local, engine = tmp_path / "local.parquet", tmp_path / "engine.parquet"
    given = ["nexmark", "--query", "q5_mega", "--input", str(site), "--workers", "2", "--json"]
    assert main([*given, "--output", str(local)]) == 0
    capsys.readouterr()
    moves = ["--migrate", "0:1@30%", "--migrate", "1:0@60%", "--gap", "drain"]
    program = start(tmp_path, *given, "--output", str(engine), "--host", "engine", *moves)
    out, errors = program.communicate()
    assert program.returncode == 0, errors
    facts = json.loads(out)
    assert facts["host"] == "engine" and facts["rows"] == 40_000 and facts["late_rows"] == 0
    assert [move["migrate"] for move in facts["migrations"]] == ["0:1@30%", "1:0@60%"]
    assert all(move["moved"] > 0 and move["bytes"] > 0 for move in facts["migrations"])
    assert bag(engine) == bag(local)
    nothing_left(tmp_path, program.pid)


@pytest.mark.parametrize(
    ("query", "rows", "size"), [pytest.param("q5_mega", 40_000, 500, marks=pytest.mark.long), ("q3", 8_000, 1_600)]
)
def test_nexmark_resident_with_rescales(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], query: str, rows: int, size: int
) -> None:
    local, engine = tmp_path / "local.parquet", tmp_path / "engine.parquet"
    given = ["nexmark", "--query", query, "--input", str(site), "--batch-rows", str(size), "--json"]
    assert main([*given, "--output", str(local)]) == 0
    capsys.readouterr()
    # The time of the first has come with the second batch, and not before it: the input is not looked at. The last one
    # starts when all input has been taken, and needs no further batch.
    resizes = ["--rescale", "1:3@1ms", "--rescale", "3:1@60%", "--rescale", "1:2@100%", "--rescale", "2:1@1h"]
    program = start(tmp_path, *given, "--output", str(engine), "--host", "engine", *resizes)
    out, errors = program.communicate()
    assert program.returncode == 0, errors
    facts = json.loads(out)
    assert facts["rows"] == rows and facts["late_rows"] == 0
    told = [(one["rescale"], one["workers"]) for one in facts["rescales"]]
    assert told == [("1:3@0.001s", 3), ("3:1@60%", 1), ("1:2@100%", 2)]
    assert all(one["bins"] > 0 for one in facts["rescales"])
    assert "--rescale 2:1@3600s did not start: the input ended before" in errors
    assert bag(engine) == bag(local)
    nothing_left(tmp_path, program.pid)


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2", "4"])
@pytest.mark.parametrize("host", ["spark", "engine"])
@pytest.mark.parametrize("query", nexmark.QUERIES)
def test_every_query_of_nexmark(nexmark_data: Path, tmp_path: Path, query: str, host: str, workers: str) -> None:
    output = tmp_path / "out.parquet"
    given = ["nexmark", "--query", query, "--input", str(nexmark_data), "--output", str(output), "--workers", workers]
    if host == "engine" and workers != "1" and query not in ("q1", "q2"):
        given += ["--migrate", "0:1@30%", "--migrate", "1:0@60%", "--strategy", "matched", "--gap", "drain"]
    program = start(tmp_path, *given, "--host", host, "--json")
    out, errors = program.communicate()
    assert (program.returncode, errors) == (0, "")
    assert json.loads(out)["peak_memory_bytes"] is None, "the work is done elsewhere"
    wanted = nexmark_data / "expected" / f"{query}.parquet"
    assert pq.read_schema(output).names == pq.read_schema(wanted).names
    assert bag(output) == bag(wanted)
    nothing_left(tmp_path, program.pid)


@pytest.mark.long
def test_wordcount_as_a_batch_job(tmp_path: Path) -> None:
    book, output = tmp_path / "book.txt.gz", tmp_path / "counts.tsv"
    book.write_bytes(gzip.compress(("Don't stop.\r\nÉtude\n\nstop" * 1000).encode()))
    program = start(tmp_path, "wordcount", "--input", str(book), "--output", str(output), "--host", "spark")
    out, errors = program.communicate()
    assert program.returncode == 0, errors
    assert out.startswith("4,001 words in ") and errors == ""
    assert output.read_bytes() == b"don\t1\nstop\t1001\nstopdon\t999\nt\t1000\ntude\t1000\n"
    nothing_left(tmp_path, program.pid)


@pytest.mark.parametrize("to_group", [False, pytest.param(True, marks=pytest.mark.long)], ids=["process", "terminal"])
def test_interrupt_leaves_nothing(site: Path, tmp_path: Path, to_group: bool) -> None:
    """Ctrl-C while Spark starts or runs: exit code 130, one line, no process and no file."""
    output = tmp_path / "out.parquet"
    given = ["nexmark", "--query", "q5_mega", "--input", str(site), "--output", str(output), "--workers", "2"]
    program = start(tmp_path, *given, "--host", "spark")
    deadline = time.monotonic() + 200
    while "java" not in living(program.pid):
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    if to_group:
        os.killpg(program.pid, signal.SIGINT)
    else:
        program.send_signal(signal.SIGINT)
    out, errors = program.communicate()
    assert (program.returncode, out, errors) == (130, "", "penstock: interrupted\n")
    nothing_left(tmp_path, program.pid)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site", "tmp"]


@pytest.mark.long
def test_tpcxbb_in_one_task(tmp_path: Path) -> None:
    rng = random.Random(4)
    clicks = some_clicks(rng, 300)
    shop = write(tmp_path / "shop", random.Random(1).sample(clicks, len(clicks)), [])
    output = tmp_path / "out.parquet"
    given = ["tpcxbb", "--query", "q2_sessions", "--input", str(shop), "--output", str(output), "--workers", "2"]
    program = start(tmp_path, *given, "--host", "spark", "--mode", "processes", "--queue", "partitioned", "--json")
    out, errors = program.communicate()
    assert program.returncode == 0, errors
    assert errors == "" and json.loads(out)["rows"] == 300
    rows = [tuple(row.values()) for row in pq.read_table(output).to_pylist()]
    assert rows == expected(clicks, [])["q2_sessions"]
    nothing_left(tmp_path, program.pid)


FAILS = """
import sys
from penstock.cli import _program, common
from penstock.errors import KeyNullError

def refuse(batches):
    raise KeyNullError("key column 'k' holds a null")
    yield

def work(kind):
    with common.spark_session("fails", 1, 1) as (spark, folder):
        if kind == "task":
            spark.range(1).mapInArrow(refuse, "id bigint").collect()
        spark.read.parquet(str(folder / "nowhere"))

_program.app = lambda given, **options: work(given[0])
print([_program.run([kind]) for kind in ("task", "plan")])
"""


def test_what_spark_raises_is_told_when_its_jvm_has_ended(tmp_path: Path) -> None:
    """Its errors ask there for their text: a traceback of that was all that came."""
    pytest.importorskip("pyspark")
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "[1, 1]\n"), done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("penstock: key column 'k' holds a null")
    assert second.startswith("penstock: [PATH_NOT_FOUND] Path does not exist: file:/") and "nowhere" in second


def test_an_empty_input_is_an_empty_result_on_every_host(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    given = ["wordcount", "--input", str(tmp_path / "empty.txt"), "--output", str(tmp_path / "counts.tsv")]
    for host in ("local", "engine"):
        (tmp_path / "counts.tsv").unlink(missing_ok=True)
        done = start(tmp_path, *given, "--host", host)
        out, err = done.communicate(timeout=240)
        assert done.returncode == 0, (host, out, err)
        assert (tmp_path / "counts.tsv").read_bytes() == b""
