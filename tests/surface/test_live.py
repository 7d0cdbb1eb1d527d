"""The live view: in place on a terminal, plain lines elsewhere, and errors of the snapshot function."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from penstock._live import LiveView, Move, Snapshot, WorkerLoad, bar, figures_text, sparkline


def snapshot(state: str = "planned", epochs: int = 3, move_s: float = 0.25) -> Snapshot:
    return Snapshot(
        title="demo",
        phase="streaming",
        elapsed_s=12.0,
        total_s=60.0,
        rows=123_456,
        rows_per_s=40_000.0,
        epochs=epochs,
        epoch_s=[0.1, 0.2, 0.4],
        workers=[WorkerLoad(0, 192, 1000, 64_000, 30_000.0), WorkerLoad(1, 64, 300, 20_000, 10_000.0)],
        moves=[Move("half to worker 1", "batched", state, 64, 4096, move_s)],  # type: ignore[arg-type]
        slice_p50_s=0.0003,
        slice_p99_s=0.002,
    )


def run_view(console: Console, snapshots: list[Snapshot]) -> None:
    """Show each snapshot at least once, then leave."""
    shown = threading.Event()
    pending = list(snapshots)

    def give() -> Snapshot:
        current = pending.pop(0) if len(pending) > 1 else pending[0]
        if len(pending) == 1:
            shown.set()
        return current

    with LiveView(give, console, plain_every_s=0.0):
        assert shown.wait(60)


def test_plain_lines_when_there_is_no_terminal() -> None:
    output = io.StringIO()
    run_view(
        Console(file=output, force_terminal=False, width=60),
        [snapshot("planned"), snapshot("moving"), snapshot("moving", move_s=2.5), snapshot("done")],
    )
    lines = output.getvalue().splitlines()
    assert "\x1b" not in output.getvalue()
    moves = [line for line in lines if "migration" in line]
    assert moves == [
        "[ 12.0 s] migration half to worker 1, batched: moving",
        "[ 12.0 s] migration half to worker 1, batched: done, 64 bins, 4.1 kB in 250 ms",
    ]
    rest = [line for line in lines if line not in moves]
    assert rest == [
        "[ 12.0 s] streaming",
        f"[ 12.0 s] {figures_text(snapshot())};"
        " worker 0: 192 bins, 1,000 keys, 64 kB; worker 1: 64 bins, 300 keys, 20 kB",
    ]


def test_plain_lines_on_a_terminal_that_cannot_draw() -> None:
    output = io.StringIO()
    run_view(Console(file=output, force_terminal=True, width=60, _environ={"TERM": "dumb"}), [snapshot("planned")])
    assert "[ 12.0 s] streaming" in output.getvalue() and "\x1b" not in output.getvalue()


def test_plain_lines_say_only_what_is_new() -> None:
    """Nothing while nothing happens, no phase twice, and the workers' load only where bins have moved."""
    output = io.StringIO()
    first = snapshot()
    empty = replace(first, phase="starting", epochs=0, epoch_s=[], workers=[], rows=0)
    moved = [replace(first.workers[0], bins=256), replace(first.workers[1], bins=0)]
    run_view(
        Console(file=output, force_terminal=False),
        [
            empty,
            replace(empty, elapsed_s=17.0),
            first,
            replace(first, elapsed_s=18.0),
            replace(first, rows=200_000, elapsed_s=19.0),
            replace(first, rows=300_000, workers=moved, elapsed_s=20.0),
        ],
    )
    assert output.getvalue().splitlines() == [
        "[ 12.0 s] starting",
        "[ 12.0 s] streaming",
        "[ 12.0 s] 123,456 rows, 40,000 rows/s; epoch 3 took 400 ms;"
        " worker 0: 192 bins, 1,000 keys, 64 kB; worker 1: 64 bins, 300 keys, 20 kB",
        "[ 19.0 s] 200,000 rows, 40,000 rows/s; epoch 3 took 400 ms",
        "[ 20.0 s] 300,000 rows, 40,000 rows/s; epoch 3 took 400 ms;"
        " worker 0: 256 bins, 1,000 keys, 64 kB; worker 1: 0 bins, 300 keys, 20 kB",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_is_redrawn_within_its_width(width: int) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, height=30, color_system="truecolor")
    run_view(console, [snapshot("moving"), snapshot("done")])
    text = output.getvalue()
    assert "\x1b[" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"
    plain = Console(file=io.StringIO(), force_terminal=False, width=width, record=True)
    from penstock._live import draw

    plain.print(draw(snapshot("done"), width=width))
    lines = plain.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert any("123,456 rows" in line for line in lines)
    assert any("half to worker 1" in line and "done" in line for line in lines)


@pytest.mark.parametrize("width", [24, 32, 48, 60])
def test_a_narrow_terminal_shows_how_long_of_how_much(width: int) -> None:
    from penstock._live import draw

    plain = Console(file=io.StringIO(), force_terminal=False, width=width, record=True)
    long = Snapshot(title="demo", phase="moving the state about", elapsed_s=12_345.0, total_s=20_000.0)
    plain.print(draw(long, width=width))
    lines = plain.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = "12345 of about 20000 s"
    assert any(text in line for line in lines) or width < len(text) + 5, lines


def test_a_terminal_shows_what_has_begun() -> None:
    from penstock._live import draw

    def text(given: Snapshot) -> str:
        plain = Console(file=io.StringIO(), force_terminal=False, width=100, record=True)
        plain.print(draw(given))
        return plain.export_text()

    assert "half to worker 1" not in text(snapshot("planned")) and "half to worker 1" in text(snapshot("moving"))
    assert "rows" not in text(replace(snapshot("planned", epochs=0), workers=[]))
    assert "12 of about 60 s" in text(snapshot()) and "61 s" in text(replace(snapshot(), elapsed_s=61.0))
    assert "of about" not in text(replace(snapshot(), elapsed_s=61.0))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_rows_per_second_of_two_queries_say_so(width: int) -> None:
    """The same rows count in each of them; the figures behind it stay, on a line of their own where it is narrow."""
    from penstock._live import draw

    assert figures_text(snapshot()) == "123,456 rows, 40,000 rows/s; epoch 3 took 400 ms"
    both = replace(snapshot(), queries=2)
    assert figures_text(both) == "123,456 rows, 40,000 rows/s of 2 queries; epoch 3 took 400 ms"
    plain = Console(file=io.StringIO(), force_terminal=False, width=width, record=True)
    plain.print(draw(both, width=width))
    text = plain.export_text()
    assert "40,000 rows/s of 2 queries" in text and "slice p50 300 µs  p99 2 ms" in text


def test_nothing_yet_is_a_view_too() -> None:
    empty = Snapshot(title="demo", phase="starting Spark", elapsed_s=0.0, total_s=0.0)
    assert figures_text(empty) == ""
    output = io.StringIO()
    run_view(Console(file=output, force_terminal=True, width=80), [empty])
    assert "starting Spark" in output.getvalue()


def test_an_error_of_the_snapshot_function_is_raised_at_the_end() -> None:
    called = threading.Event()

    def broken() -> Snapshot:
        called.set()
        raise KeyError("no such worker")

    with (
        pytest.raises(KeyError, match="no such worker"),
        LiveView(broken, Console(file=io.StringIO(), force_terminal=False)),
    ):
        assert called.wait(60)
    assert not [t for t in threading.enumerate() if t.name == "penstock-live"]


def test_an_error_of_the_run_is_not_hidden() -> None:
    def give() -> Snapshot:
        return snapshot()

    with (
        pytest.raises(ZeroDivisionError),
        LiveView(give, Console(file=io.StringIO(), force_terminal=False)),
    ):
        raise ZeroDivisionError
    assert not [t for t in threading.enumerate() if t.name == "penstock-live"]


def test_sparkline_and_bar() -> None:
    assert sparkline([1, 10, 100], 10) == "▁▅█"
    assert sparkline([5, 5], 10) == "▁▁"
    assert sparkline([0.0, 1.0], 1) == "▁"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
    assert [bar(share, 4) for share in (-1, 0, 0.5, 1, 2)] == ["░░░░", "░░░░", "██░░", "████", "████"]
