"""The main job as a user runs it: it ends well, and an interrupt at any phase leaves nothing behind."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.report import Timeline
from penstock.report._plot import draw

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left processes in /proc"),
]


def marked(mark: str) -> list[str]:
    """Command lines of live processes whose environment carries the mark."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
        except OSError:
            continue
    return found


@contextmanager
def started(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The demo in a process of its own, with a home, a temporary and a working folder of its own."""
    mark = f"PENSTOCK_TEST_MARK={uuid.uuid4()}"
    for name in ("tmp", "cwd"):
        (folder / name).mkdir()
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "demo", "--plain", "--output", str(folder / "out"), *options],
        env=dict(os.environ) | {name: value, "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"},
        cwd=folder / "cwd",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        assert process.stdout is not None
        process.stdout.close()


def nothing_left(folder: Path, mark: str) -> None:
    """No process within a moment (the kernel takes one to end them), no file in the folders it could use."""
    deadline = time.monotonic() + 60
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    for name in ("tmp", "cwd"):
        assert [path.name for path in (folder / name).iterdir()] == []


def test_the_demo_moves_state_and_its_output_is_right(tmp_path: Path) -> None:
    with started(tmp_path, "--seconds", "10", "--rate", "2000", "--bidders", "20000") as (process, mark):
        output, _ = process.communicate(timeout=380)
    assert process.returncode == 0, output
    lines = output.splitlines()
    done = [line.split("] ")[1].split(" ")[0] for line in lines if ": done" in line]
    assert done == ["migration", "migration", "kill", "rescale", "rescale"]
    for what in (
        "hot items",
        "what bidders bid",
        "each update once",
        "moves without a restart",
        "a killed worker costs no query",
        "more and fewer workers while it runs",
    ):
        assert any(line.startswith(f"{what}: holds.") for line in lines), output
    nothing_left(tmp_path, mark)

    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "timeline.json", "timeline.png"]
    timeline = Timeline.from_json((out / "timeline.json").read_text())
    assert [m.strategy for m in sorted(timeline.migrations, key=lambda m: m.started)] == (
        ["all-at-once"] * 2 + ["batched"] * 2
    )
    assert {m.bins for m in timeline.migrations} == {128}
    assert {w.worker for w in timeline.workers} == {0, 1, 2}
    changes = sorted(timeline.changes, key=lambda c: c.started)
    assert [(c.kind, c.before, c.after) for c in changes] == [("lost", 2, 2), ("rescale", 2, 3), ("rescale", 3, 2)]
    assert all(0 < c.ended - c.started < 60 for c in changes) and all(c.bins for c in changes[1:])
    assert timeline.hit(changes[0]) is not None
    assert timeline.slices
    whole = [e for e in timeline.epochs if e.rows]
    assert whole and all(min(e.feed_s, e.run_s, e.serve_s, e.files_s) > 0 for e in whole)
    assert all(abs(e.feed_s + e.run_s + e.serve_s + e.files_s - e.seconds) < 1e-6 for e in whole)
    assert sum(e.spark_s > 0 for e in whole) > len(whole) / 2
    page = (out / "report.html").read_text()
    assert "FAILS" not in page
    # Bins that move between two batches are felt by none of them, and the page says so by leaving that out.
    felt = bool(timeline.epoch_seconds("bidders")["migrating"])
    lead = (
        "of keyed state moved to another worker while rows passed",
        "Workers that died: 1",
        "went from 2 to 3, then from 3 to 2",
    )
    assert "<svg" in page and all((words in page) is felt for words in lead)
    width, height = struct.unpack(">II", (out / "timeline.png").read_bytes()[16:24])
    assert width > height > 500
    # The picture is drawn of this timeline: what was done is named above it, and marked in each panel.
    figure = draw(timeline)
    named = [text.get_text().splitlines()[0] for text in figure.axes[0].texts]
    moved = {"all-at-once", "batched"}
    assert moved <= set(named), "of both queries, which are one mark where they were moved together"
    assert [name for name in named if name not in moved] == ["a worker died", "2 → 3 workers", "3 → 2 workers"]
    begin = timeline.span[0]
    for panel in figure.axes:
        marked_at = {line.get_xdata()[0] for line in panel.lines}
        assert {change.started - begin for change in changes} <= marked_at
        assert {change.ended - begin for change in changes} <= marked_at


@pytest.mark.fault
# A migration may be over within one redraw, so its first line says that it moves or that it is done.
@pytest.mark.parametrize(
    "phase",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("starting Spark", "starting the workers")),
        "migration ",
    ],
)
def test_an_interrupt_leaves_nothing(tmp_path: Path, phase: str) -> None:
    with started(tmp_path, "--seconds", "15", "--rate", "2000", "--bidders", "20000") as (process, mark):
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if phase in line:
                break
        else:
            pytest.fail(f"ended before {phase!r}: {''.join(seen)}")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert "nothing is left running" in rest
    nothing_left(tmp_path, mark)
    assert not (tmp_path / "out").exists()
