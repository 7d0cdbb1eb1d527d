"""A view of a run while it runs: rows per second, epoch latency, load per worker, migrations, workers that come and go.

The view asks a function for a `Snapshot` a few times a second and draws it. On a terminal it redraws in place what has
begun. Anywhere else (a pipe, a log, continuous integration) it prints a plain line where something is new: at each new
phase, for each move that ends (and that begins, if it takes long), and every few seconds the figures if they have
changed, with the workers' load only where bins have moved. The function runs in the view's own thread; when it raises,
the view keeps what it showed last and raises the error when it is left.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock._durations import duration_text
from penstock.report._timeline import size_text

__all__ = ["LiveView", "Move", "Snapshot", "WorkerLoad"]

_REDRAWS_PER_SECOND = 4
#: Seconds after which a move under way is told in a plain line.
_LONG_S = 2.0
_BLOCKS = "▁▂▃▄▅▆▇█"
#: A further line of figures, below the first of them.
_BELOW = "\n" + 7 * " "


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker holds and does at this moment."""

    worker: int
    bins: int
    keys: int
    state_bytes: int
    rows_per_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """A migration as the view shows it, or a change of the workers. ``what`` says in words what moves where.

    ``kind`` is what it is called; ``strategy`` may be empty, and bins and bytes 0 where none moved.
    """

    what: str
    strategy: str
    state: Literal["planned", "moving", "done"]
    bins: int = 0
    bytes: int = 0
    seconds: float = 0.0
    kind: str = "migration"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a run.

    ``epoch_s`` holds the latencies of the latest epochs in seconds, oldest first; ``total_s`` is an estimate. A row
    counts in each of the ``queries`` that read it.
    """

    title: str
    phase: str
    elapsed_s: float
    total_s: float
    rows: int = 0
    rows_per_s: float = 0.0
    epochs: int = 0
    epoch_s: Sequence[float] = ()
    workers: Sequence[WorkerLoad] = ()
    moves: Sequence[Move] = ()
    slice_p50_s: float | None = None
    slice_p99_s: float | None = None
    queries: int = 1


@dataclass(slots=True)
class LiveView:
    """Context manager that shows snapshots until it is left, the last one included.

    Parameters
    ----------
    snapshot
        Gives the current snapshot; called from one thread at a time, and once more at the end.
    console
        Where to draw; standard output by default. ``console.is_terminal`` decides between the two forms.
    plain_every_s
        Seconds between plain lines with figures when it is no terminal.
    """

    snapshot: Callable[[], Snapshot]
    console: Console = field(default_factory=Console)
    plain_every_s: float = 5.0
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _live: Live | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _told: dict[tuple[int, str], str] = field(default_factory=dict, init=False)
    _phase: str = field(default="", init=False)
    _figures: str = field(default="", init=False)
    _bins: list[int] = field(default_factory=list, init=False)

    def __enter__(self) -> LiveView:
        # On a dumb one nothing can be drawn over.
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._thread = threading.Thread(target=self._loop, name="penstock-live", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._error is None and kind is None:
                self._show(figures=True)
        finally:
            if self._live is not None:
                self._live.stop()
        if self._error is not None and kind is None:
            raise self._error

    def _loop(self) -> None:
        interval = 1 / _REDRAWS_PER_SECOND
        due = 0.0
        while not self._stop.is_set():
            try:
                now = time.monotonic()
                self._show(figures=now >= due)
                if now >= due:
                    due = now + self.plain_every_s
            except BaseException as error:  # shown when the view is left; the run itself goes on
                self._error = error
                return
            self._stop.wait(interval)

    def _show(self, *, figures: bool) -> None:
        current = self.snapshot()
        if self._live is not None:
            self._live.update(draw(current, width=self.console.width), refresh=True)
            return
        if current.phase != self._phase:
            self._phase = current.phase
            self._print(current, current.phase)
        for index, move in enumerate(current.moves):
            told = self._told.get((index, move.what), "planned")
            if move.state != told and (move.state == "done" or move.seconds >= _LONG_S):
                self._told[(index, move.what)] = move.state
                self._print(current, _move_text(move))
        if figures:
            self._tell(current)

    def _tell(self, current: Snapshot) -> None:
        text = figures_text(current)
        if text == self._figures:
            return
        self._figures = text
        bins = [worker.bins for worker in current.workers]
        if bins != self._bins:
            self._bins = bins
            text = "; ".join([text, *map(_load_text, current.workers)])
        self._print(current, text)

    def _print(self, current: Snapshot, text: str) -> None:
        line = f"[{current.elapsed_s:5.1f} s] {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def figures_text(snapshot: Snapshot) -> str:
    """The figures of a run in one plain line; empty before its first epoch."""
    if not snapshot.epochs:
        return ""
    parts = [f"{snapshot.rows:,} rows, {snapshot.rows_per_s:,.0f} rows/s{_of(snapshot)}"]
    if snapshot.epoch_s:
        parts.append(f"epoch {snapshot.epochs} took {duration_text(snapshot.epoch_s[-1])}")
    return "; ".join(parts)


def _of(snapshot: Snapshot) -> str:
    return f" of {snapshot.queries} queries" if snapshot.queries > 1 else ""


def _load_text(load: WorkerLoad) -> str:
    return f"worker {load.worker}: {load.bins} bins, {load.keys:,} keys, {size_text(load.state_bytes)}"


def draw(snapshot: Snapshot, width: int = 100) -> RenderableType:
    """The view of one snapshot, for a terminal of ``width`` columns."""
    parts: list[RenderableType] = [_progress(snapshot, width - 4)]
    if snapshot.epochs:
        parts.append(_rates(snapshot, width - 4))
    if snapshot.workers:
        parts += [Text(), _workers(snapshot, width - 4)]
    if moves := [move for move in snapshot.moves if move.state != "planned"]:
        parts += [Text(), _moves(moves)]
    return Panel(Group(*parts), title=f"[bold]{snapshot.title}[/]", title_align="left", border_style="blue")


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as bars on a log scale from the least to the greatest of them."""
    shown = [max(v, 1e-9) for v in values[-width:]] if width > 0 else []
    if not shown:
        return ""
    low, high = math.log(min(shown)), math.log(max(shown))
    scale = (len(_BLOCKS) - 1) / (high - low) if high - low > 1e-9 else 0.0
    return "".join(_BLOCKS[round((math.log(v) - low) * scale)] for v in shown)


def bar(share: float, width: int) -> str:
    """A bar that fills ``share`` of ``width`` cells."""
    cells = round(min(max(share, 0.0), 1.0) * width)
    return "█" * cells + "░" * (width - cells)


def _progress(snapshot: Snapshot, width: int) -> Text:
    share = snapshot.elapsed_s / snapshot.total_s if snapshot.total_s > 0 else 0.0
    ends = f" {snapshot.elapsed_s:.0f}"
    # An estimate that has passed is none.
    ends += f" of about {snapshot.total_s:.0f} s" if share < 1 else " s"
    text = Text(no_wrap=True, overflow="ellipsis")
    # Where it is narrow the bar goes first, then the end of the phase; the figures stay.
    phase = max(0, min(24, width - 1 - len(ends)))
    text.append(f"{snapshot.phase:<{phase}.{phase}} ", style="bold")
    text.append(bar(share, max(0, width - phase - 1 - len(ends))), style="blue")
    text.append(ends)
    return text


def _rates(snapshot: Snapshot, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{snapshot.rows:>12,} rows  {snapshot.rows_per_s:>9,.0f} rows/s{_of(snapshot)}")
    if snapshot.slice_p50_s is not None and snapshot.slice_p99_s is not None:
        # As wide as durations get, so that the line does not come and go with them.
        fits = text.cell_len + len("   slice p50 1,234 s  p99 1,234 s") <= width
        text.append(f"{'   ' if fits else _BELOW}slice p50 ")
        text.append(duration_text(snapshot.slice_p50_s), style="cyan")
        text.append("  p99 ")
        text.append(duration_text(snapshot.slice_p99_s), style="cyan")
    if snapshot.epoch_s:
        text.append(f"\n{'epoch ' + str(snapshot.epochs):>12} took ")
        text.append(f"{duration_text(snapshot.epoch_s[-1]):>7}  ", style="cyan")
        text.append(sparkline(snapshot.epoch_s, width - 28), style="cyan")
    return text


def _workers(snapshot: Snapshot, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("worker", justify="right")
    table.add_column("bins held", no_wrap=True)
    for name, least in (("bins", 4), ("keys", 9), ("state", 7), ("rows/s", 8)):
        table.add_column(name, justify="right", no_wrap=True, min_width=least)
    bins = sum(w.bins for w in snapshot.workers) or 1
    for load in snapshot.workers:
        table.add_row(
            str(load.worker),
            Text(bar(load.bins / bins, max(8, min(40, width - 48))), style="yellow"),
            f"{load.bins:,}",
            f"{load.keys:,}",
            size_text(load.state_bytes),
            f"{load.rows_per_s:,.0f}",
        )
    return table


def _moves(moves: Sequence[Move]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("move", "strategy"):
        table.add_column(name, no_wrap=True)
    for name, least in (("bins", 3), ("bytes", 6), ("took", 6)):
        table.add_column(name, justify="right", no_wrap=True, min_width=least)
    table.add_column("")
    styles = {"moving": "bold magenta", "done": "green"}
    for move in moves:
        done = move.state == "done"
        table.add_row(
            move.what if move.kind == "migration" else f"{move.kind} {move.what}",
            move.strategy,
            f"{move.bins:,}" if done and move.bins else "",
            size_text(move.bytes) if done and move.bytes else "",
            duration_text(move.seconds),
            move.state,
            style=styles[move.state],
        )
    return table


def _move_text(move: Move) -> str:
    what = ", ".join(part for part in (f"{move.kind} {move.what}", move.strategy) if part)
    if move.state != "done":
        return f"{what}: {move.state}"
    moved = [f"{move.bins} bins"] if move.bins else []
    moved += [size_text(move.bytes)] if move.bytes else []
    return f"{what}: done, {', '.join(moved)}{' in' if moved else 'after'} {duration_text(move.seconds)}"
