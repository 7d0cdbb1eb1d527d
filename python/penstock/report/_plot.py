"""Draw a timeline: what each batch of its heaviest query took and for what, with the migrations marked, and the workers
that came and went; the latency of slices on a log axis and the load of the workers below.

Needs matplotlib (``pip install penstock[report]``), imported when something is drawn. Figures are made
without pyplot, so drawing works in any thread and beside any other use of matplotlib.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._durations import duration_text
from penstock.report._style import STYLE, TEXT, encode, frame
from penstock.report._timeline import (
    Change,
    Epoch,
    Timeline,
    WorkerSample,
    heaviest,
    joined,
    per_worker,
    size_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "latency_png", "latency_svg", "save_png"]

# Colours that stay apart for colour-blind readers and in grey.
_P50, _P99, _MAX, _EPOCH = "#0072B2", "#D55E00", "#9a9a9a", "#444444"
_WORKERS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#999999")
_STRATEGIES = {"all-at-once": "#CC79A7", "batched": "#009E73", "fluid": "#56B4E9"}
_OTHER = "#999999"
_CHANGES = {"lost": "#222222", "rescale": "#0072B2"}
_PARTS: tuple[tuple[str, str, Callable[[Epoch], float]], ...] = (
    ("Spark: finding input, plans, logs", "#bdbdbd", lambda e: e.spark_s),
    ("feed: rows to the workers", "#56B4E9", lambda e: e.feed_s),
    ("run: keyed state", "#D55E00", lambda e: e.run_s),
    ("serve: results in the sink", "#009E73", lambda e: e.serve_s),
    ("files: state made durable", "#E69F00", lambda e: e.files_s),
)

_RATE_S = 1.0
"""Seconds over which rows per second are taken."""
_GAP_S = 1.5
"""Lines are not drawn across a longer time without a slice."""
_SILENT_S = 0.75
"""A worker of which nothing is heard for longer, while others are heard, holds nothing: it has died or gone."""


def draw(timeline: Timeline, *, window_s: float = 0.25) -> Figure:
    """The figure of a timeline; see the module text.

    Parameters
    ----------
    timeline
        What to draw. Panels for which it has no measurement stay empty and say so.
    window_s
        Width in seconds of the windows over which p50, p99 and max are taken.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        begin, end = timeline.span
        query = heaviest(timeline)
        measured = [e for e in timeline.epochs if e.query == query and (e.feed_s or e.run_s or e.serve_s)]
        ratios = ((2.4,) if measured else ()) + (2.4 if measured else 3.2, 1.2, 1.2)
        figure = Figure(figsize=(12, 9.2 if measured else 7.6), dpi=130, layout="constrained")
        panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
        latency, rows, state = panels[-3:]
        if measured:
            _parts(panels[0], measured, begin)
        _latency(latency, timeline, begin, window_s)
        samples = {w: list(s) for w, s in per_worker(list(timeline.workers)).items()}
        _rows(rows, samples, begin)
        _state(state, samples, begin)
        frame(panels)
        for axes in panels:
            _spans(axes, _marks(timeline), begin)
        state.set_xlim(0, max(end - begin, 1e-3))
        state.set_xlabel("seconds since the start")
        _labels(panels[0], _marks(timeline), begin, end)
        figure.align_ylabels()
        if timeline.title:
            figure.suptitle(timeline.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        return figure


def latency_png(timeline: Timeline, *, window_s: float = 0.25) -> bytes:
    """The picture as PNG bytes."""
    return encode(draw(timeline, window_s=window_s), "png")


def latency_svg(timeline: Timeline, *, window_s: float = 0.25) -> str:
    """The picture as an ``<svg>`` element to put into a page: no XML header, text as text."""
    text = encode(draw(timeline, window_s=window_s), "svg").decode()
    return text[text.index("<svg") :]


def save_png(timeline: Timeline, path: str | Path, *, window_s: float = 0.25) -> None:
    """Write the picture to a file."""
    Path(path).write_bytes(latency_png(timeline, window_s=window_s))


def _parts(axes: Any, epochs: list[Epoch], begin: float) -> None:
    """A bar for each batch, as wide as it took and as high: what Spark did, most of it before ours, and our parts."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylabel(f"a batch of {epochs[0].query}" if epochs[0].query else "a batch")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration_text(seconds) if seconds else "0"))
    width = [max(e.whole_s, 1e-3) for e in epochs]
    left: list[float] = []
    for e, wide in zip(epochs, width, strict=True):
        # What Spark did is before ours but for its commit, which may be the longer part: bars do not overlap.
        before = left[-1] + width[len(left) - 1] if left else 0.0
        start = e.started - begin
        left.append(min(max(start - e.spark_s, before), max(start, before)) if wide else start)
    bottom = [0.0] * len(epochs)
    for label, color, part in _PARTS:
        height = [part(e) for e in epochs]
        axes.bar(left, height, width, bottom, align="edge", color=color, linewidth=0, alpha=0.9, label=label)
        bottom = [low + more for low, more in zip(bottom, height, strict=True)]
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=5, frameon=False, fontsize=8, borderpad=0)


def _latency(axes: Any, timeline: Timeline, begin: float, window_s: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.set_ylabel("latency")
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: duration_text(ms / 1e3)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    windows = timeline.windows(window_s)
    if windows:
        width = window_s * 1000
        for label, color, weight in (("max", _MAX, 0.9), ("p99", _P99, 1.2), ("p50", _P50, 1.4)):
            times: list[float] = []
            values: list[float] = []
            for window in windows:
                at = window.started + window.seconds / 2 - begin
                if times and at - times[-1] > _GAP_S:
                    times.append(at)
                    values.append(float("nan"))
                times.append(at)
                values.append(getattr(window, f"{label}_ns") / 1e6)
            axes.plot(
                times,
                values,
                color=color,
                linewidth=weight,
                marker=".",
                markersize=2.5 * weight,
                label=f"{label} of slices per {width:.0f} ms",
            )
    queries = sorted({e.query for e in timeline.epochs})
    for query, marker in zip(queries, ".x+1234", strict=False):
        own = [e for e in timeline.epochs if e.query == query]
        axes.plot(
            [e.ended - begin for e in own],
            [max(e.seconds, 1e-6) * 1e3 for e in own],
            linestyle="none",
            marker=marker,
            markersize=4,
            color=_EPOCH,
            alpha=0.7,
            label=f"epoch of {query}" if query else "epoch",
        )
    if windows or queries:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=5, frameon=False, fontsize=8, borderpad=0)
    else:
        _nothing(axes, "no epoch was measured")


def _rows(axes: Any, samples: dict[int, list[WorkerSample]], begin: float) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_ylabel("rows/s")
    times = sorted(s.at for own in samples.values() for s in own)
    if len(times) < 2 or times[-1] - times[0] < _RATE_S:
        _nothing(axes, "no load was sampled")
        return
    # Workers are sampled at different moments: rates are taken between the points of one grid.
    grid = [times[0] + index * _RATE_S for index in range(int((times[-1] - times[0]) / _RATE_S) + 1)]
    rates = []
    for own in samples.values():
        rows = [_rows_at(own, at) for at in grid]
        rates.append([max(0.0, (after - before) / _RATE_S) for before, after in pairwise(rows)])
    _stack(axes, [at + _RATE_S / 2 - begin for at in grid[:-1]], rates, list(samples))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _count_text(value)))


def _rows_at(samples: list[WorkerSample], at: float) -> float:
    """Rows of a worker at a moment, on the line between its samples; before the first as then."""
    index = bisect_left(samples, at, key=lambda sample: sample.at)
    if index == 0:
        return float(samples[0].rows)  # a timeline may begin in the middle of a run, and workers at different moments
    if index == len(samples):
        return float(samples[-1].rows)
    left, right = samples[index - 1], samples[index]
    return left.rows + (right.rows - left.rows) * (at - left.at) / (right.at - left.at)


def _count_text(value: float) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k" if value >= 1e3 else f"{value:g}"


def _state(axes: Any, samples: dict[int, list[WorkerSample]], begin: float) -> None:
    from matplotlib.ticker import FuncFormatter

    times, columns = _aligned(samples, lambda s: float(s.state_bytes))
    axes.set_ylabel("keyed state")
    if not times:
        _nothing(axes, "no state was sampled")
        return
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    _stack(axes, [t - begin for t in times], columns, list(samples), step="post")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.98), ncols=8, frameon=False, fontsize=8, borderpad=0)


def _stack(axes: Any, x: list[float], columns: list[list[float]], workers: list[int], step: str | None = None) -> None:
    from matplotlib.ticker import MaxNLocator

    colors = [_WORKERS[w % len(_WORKERS)] for w in workers]
    axes.stackplot(
        x,
        *columns,
        colors=colors,
        alpha=0.85,
        labels=[f"worker {w}" for w in workers],
        linewidth=0,
        step=step,
    )
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_ylim(bottom=0)


def _aligned(samples: dict[int, list[WorkerSample]], value: Any) -> tuple[list[float], list[list[float]]]:
    """One common time axis, and per worker its values there: the latest sample at or before each time."""
    times = sorted({s.at for own in samples.values() for s in own})
    columns = []
    for own in samples.values():
        column, position = [], -1
        for at in times:
            while position + 1 < len(own) and own[position + 1].at <= at:
                position += 1
            heard = position >= 0 and at - own[position].at <= _SILENT_S
            column.append(value(own[position]) if heard else 0.0)
        columns.append(column)
    return times, columns


@dataclass(frozen=True, slots=True)
class _Mark:
    """Something that happened, as it is marked and named."""

    started: float
    ended: float
    color: str
    text: str


def _marks(timeline: Timeline) -> list[_Mark]:
    """Migrations and changes of the workers, in order."""
    marks = []
    for move in joined(timeline.migrations):
        steps = f", {move.steps} steps" if move.steps > 1 else ""
        text = f"{move.strategy}\n{move.bins} bins, {size_text(move.bytes)}\n{duration_text(move.ended - move.started)}"
        marks.append(_Mark(move.started, move.ended, _STRATEGIES.get(move.strategy, _OTHER), text + steps))
    for change in timeline.changes:
        color = _CHANGES.get(change.kind, _OTHER)
        marks.append(_Mark(change.started, change.ended, color, _change_text(change, timeline.hit(change))))
    return sorted(marks, key=lambda mark: mark.started)


def _change_text(change: Change, hit: Epoch | None) -> str:
    took = duration_text(change.ended - change.started)
    if change.kind == "rescale":
        return f"{change.before} → {change.after} workers\n{change.bins} bins\n{took}"
    lines = ["a worker died", f"replaced in {took}"]
    if hit is not None:
        lines.append(f"batch hit: {duration_text(hit.whole_s)}")
    return "\n".join(lines)


def _spans(axes: Any, marks: list[_Mark], begin: float) -> None:
    for mark in marks:
        left, right = mark.started - begin, mark.ended - begin
        axes.axvspan(left, right, color=mark.color, alpha=0.18, linewidth=0, zorder=0)
        axes.axvline(left, color=mark.color, linewidth=0.8, alpha=0.9, zorder=1)
        axes.axvline(right, color=mark.color, linewidth=0.8, alpha=0.9, zorder=1)


def _labels(axes: Any, marks: list[_Mark], begin: float, end: float) -> None:
    """Name each mark above the panel; labels that would overlap go onto further lines."""
    total = max(end - begin, 1e-3)
    lanes: list[float] = []
    for mark in marks:
        center = min(max(((mark.started + mark.ended) / 2 - begin) / total, 0.0), 1.0)
        half = max(len(line) for line in mark.text.splitlines()) * 0.0031 + 0.005
        spot = min(max(center, half), 1 - half)
        lane = next((i for i, edge in enumerate(lanes) if spot - half > edge), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
        lanes[lane] = spot + half
        axes.annotate(
            mark.text,
            xy=(center, 1.0),
            xytext=(spot, 1.02 + lane * 0.2),
            xycoords="axes fraction",
            ha="center",
            va="bottom",
            fontsize=7.5,
            linespacing=1.15,
            color=TEXT,
            bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": mark.color, "linewidth": 0.9},
            annotation_clip=False,
        )


def _nothing(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#888888")
