"""Draw a timeline: what each batch of its heaviest query took and for what, with the migrations marked, and the workers
that came and went; the latency of slices on a log axis and the load of the workers below.

Needs matplotlib (the extra ``report``), imported when something is drawn. Figures are made
without pyplot, so drawing works in any thread and beside any other use of matplotlib.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
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

__all__ = ["draw", "latency_png", "latency_svg"]

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

_PATH, _FINER = re.compile(r'<path [^>]*d="[^"]*"'), re.compile(r"(\.\d\d)\d+")

_RATE_S = 1.0
"""Seconds over which rows per second are taken."""
_GAP_S = 1.5
"""Lines are not drawn across a longer time without a slice."""
_SILENT_S = 0.75
"""A worker of which nothing is heard for longer, while others are heard, holds nothing: it has died or gone. Where its
samples lie further apart it may be silent for three times as long as is usual there."""
_POINTS = 1_000
"""Moments that a panel shows at most: more of them would lie within a pixel."""
_SINGLE = 100
"""Marks of a kind that are drawn one by one; more are bands of their colour."""
_LANES = 5
"""Lines of labels above the picture; what finds no place there has none."""
_LANE_PT = 34
"""Height of such a line, in points."""


def draw(timeline: Timeline, *, window_s: float = 0.25) -> Figure:
    """The figure of a timeline; see the module text.

    Parameters
    ----------
    timeline
        What to draw. Panels for which it has no measurement stay empty and say so.
    window_s
        Width in seconds of the windows over which p50, p99 and max are taken; wider in a long run.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        begin, end = timeline.span
        # What lies within one step of a long run cannot be told apart.
        step_s = max((end - begin) / _POINTS, 1e-6)
        marks = _marks(timeline)
        labels = _placed(marks, begin, end)
        query = heaviest(timeline)
        measured = [e for e in timeline.epochs if e.query == query and (e.feed_s or e.run_s or e.serve_s)]
        ratios = ((2.4,) if measured else ()) + (2.4 if measured else 3.2, 1.2, 1.2)
        # Many labels make the picture higher, not its panels lower.
        more = max(0, max((label.lane for label in labels), default=0) - 1) * _LANE_PT / 72
        figure = Figure(figsize=(12, (9.2 if measured else 7.6) + more), dpi=130, layout="constrained")
        panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
        latency, rows, state = panels[-3:]
        if measured:
            _parts(panels[0], measured, begin, step_s)
        _latency(latency, timeline, begin, max(window_s, step_s), step_s)
        samples = {w: list(s) for w, s in per_worker(list(timeline.workers)).items()}
        _rows(rows, samples, begin, len({sample.query for sample in timeline.workers}))
        _state(state, samples, begin)
        frame(panels)
        for axes in panels:
            _spans(axes, marks, begin, end)
        state.set_xlim(0, max(end - begin, 1e-3))
        state.set_xlabel("seconds since the start")
        _labels(panels[0], labels, len(marks) - len(labels))
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
    # A hundredth of a point is finer than a pixel, and the rest of the figures is half of a page.
    return _PATH.sub(lambda path: _FINER.sub(r"\1", path[0]), text[text.index("<svg") :])


def _longest(epochs: list[Epoch], begin: float, step_s: float) -> tuple[list[Epoch], str]:
    """Epochs that can be told apart: of too many the longest of each step, and words for a legend that say so."""
    if len(epochs) <= _POINTS:
        return epochs, ""
    found: dict[int, Epoch] = {}
    for e in epochs:
        step = int((e.started - begin) / step_s)
        if step not in found or e.whole_s > found[step].whole_s:
            found[step] = e
    return list(found.values()), f"longest per {duration_text(step_s)}"


def _parts(axes: Any, measured: list[Epoch], begin: float, step_s: float) -> None:
    """A bar for each batch, as wide as it took and as high: what Spark did, most of it before ours, and our parts."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    epochs, of_many = _longest(measured, begin, step_s)
    name = f"a batch of {epochs[0].query}" if epochs[0].query else "a batch"
    axes.set_ylabel(f"{name},\n{of_many}" if of_many else name)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration_text(seconds) if seconds else "0"))
    width = [max(e.whole_s, step_s if of_many else 1e-3) for e in epochs]
    left: list[float] = []
    for e, wide in zip(epochs, width, strict=True):
        # What Spark did is before ours but for its commit, which may be the longer part: bars do not overlap.
        before = left[-1] + width[len(left) - 1] if left else 0.0
        start = e.started - begin
        left.append(min(max(start - e.spark_s, before), max(start, before)) if wide else start)
    # One shape of each part, with nothing between the bars: single bars narrower than a pixel may not be seen.
    edges = [edge for begins, wide in zip(left, width, strict=True) for edge in (begins, begins + wide)]
    axes.stackplot(
        edges,
        *([height for e in epochs for height in (part(e), 0.0)] for _, _, part in _PARTS),
        colors=[color for _, color, _ in _PARTS],
        labels=[label for label, _, _ in _PARTS],
        linewidth=0,
        alpha=0.9,
        step="post",
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=5, frameon=False, fontsize=8, borderpad=0)


def _latency(axes: Any, timeline: Timeline, begin: float, window_s: float, step_s: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.set_ylabel("latency")
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: duration_text(ms / 1e3)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    windows = timeline.windows(window_s)
    if windows:
        gap_s = max(_GAP_S, 3 * window_s)
        for label, color, weight in (("max", _MAX, 0.9), ("p99", _P99, 1.2), ("p50", _P50, 1.4)):
            times: list[float] = []
            values: list[float] = []
            for window in windows:
                at = window.started + window.seconds / 2 - begin
                if times and at - times[-1] > gap_s:
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
                label=f"{label} of slices per {duration_text(window_s)}",
            )
    queries = sorted({e.query for e in timeline.epochs})
    for query, marker in zip(queries, cycle(".x+1234")):
        own, of_many = _longest([e for e in timeline.epochs if e.query == query], begin, step_s)
        name = f"epoch of {query}" if query else "epoch"
        axes.plot(
            [e.ended - begin for e in own],
            [max(e.seconds, 1e-6) * 1e3 for e in own],
            linestyle="none",
            marker=marker,
            markersize=4,
            color=_EPOCH,
            alpha=0.7,
            label=f"{name}, {of_many}" if of_many else name,
        )
    if windows or queries:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=5, frameon=False, fontsize=8, borderpad=0)
    else:
        _nothing(axes, "no epoch was measured")


def _rows(axes: Any, samples: dict[int, list[WorkerSample]], begin: float, queries: int) -> None:
    from matplotlib.ticker import FuncFormatter

    # A row that two queries read counts twice.
    axes.set_ylabel(f"rows/s\nof {queries} queries" if queries > 1 else "rows/s")
    times = sorted(s.at for own in samples.values() for s in own)
    if len(times) < 2 or times[-1] - times[0] < _RATE_S:
        _nothing(axes, "no load was sampled")
        return
    # Workers are sampled at different moments: rates are taken between the points of one grid.
    step_s = max(_RATE_S, (times[-1] - times[0]) / _POINTS)
    grid = [times[0] + index * step_s for index in range(int((times[-1] - times[0]) / step_s) + 1)]
    rates = []
    for own in samples.values():
        rows = [_rows_at(own, at) for at in grid]
        rates.append([max(0.0, (after - before) / step_s) for before, after in pairwise(rows)])
    _stack(axes, [at + step_s / 2 - begin for at in grid[:-1]], rates, list(samples))
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
    if len(times) > _POINTS:
        step_s = (times[-1] - times[0]) / _POINTS
        times = [times[0] + index * step_s for index in range(_POINTS + 1)]
    columns = []
    for own in samples.values():
        column, position = [], -1
        for at in times:
            while position + 1 < len(own) and own[position + 1].at <= at:
                position += 1
            heard = position >= 0 and at - own[position].at <= _silent_s(own, position)
            column.append(value(own[position]) if heard else 0.0)
        columns.append(column)
    return times, columns


def _silent_s(own: Sequence[WorkerSample], position: int) -> float:
    """How long a worker may be silent behind a sample: those of a long run are thinned, and lie further apart."""
    near = own[max(0, position - 4) : position + 6]
    gaps = sorted(after.at - before.at for before, after in pairwise(near))
    # A single one may be that in which it was gone.
    usual = gaps[(len(gaps) - 1) // 2] if len(gaps) > 1 else 0.0
    return max(_SILENT_S, 3 * usual)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Something that happened, as it is marked and named."""

    started: float
    ended: float
    color: str
    text: str
    move: bool
    """Whether it is a migration, of which there may be very many."""


@dataclass(frozen=True, slots=True)
class _Label:
    """Where the name of a mark stands, in parts of the panel's width and in lines above it."""

    mark: _Mark
    spot: float
    lane: int


def _marks(timeline: Timeline) -> list[_Mark]:
    """Migrations and changes of the workers, in order."""
    marks = []
    for move in joined(timeline.migrations):
        steps = f", {move.steps} steps" if move.steps > 1 else ""
        text = f"{move.strategy}\n{move.bins} bins, {size_text(move.bytes)}\n{duration_text(move.ended - move.started)}"
        marks.append(_Mark(move.started, move.ended, _STRATEGIES.get(move.strategy, _OTHER), text + steps, True))
    for change in timeline.changes:
        color = _CHANGES.get(change.kind, _OTHER)
        hit = timeline.hit(change) if change.kind != "rescale" else None
        marks.append(_Mark(change.started, change.ended, color, _change_text(change, hit), False))
    return sorted(marks, key=lambda mark: mark.started)


def _change_text(change: Change, hit: Epoch | None) -> str:
    took = duration_text(change.ended - change.started)
    if change.kind == "rescale":
        return f"{change.before} → {change.after} workers\n{change.bins} bins\n{took}"
    lines = ["a worker died", f"replaced in {took}"]
    if hit is not None:
        lines.append(f"batch hit: {duration_text(hit.whole_s)}")
    return "\n".join(lines)


def _spans(axes: Any, marks: list[_Mark], begin: float, end: float) -> None:
    for move in (True, False):
        own = [mark for mark in marks if mark.move is move]
        crowded = len(own) > _SINGLE
        for mark in _bands(own, (end - begin) / (3 * _SINGLE)) if crowded else own:
            left, right = mark.started - begin, mark.ended - begin
            axes.axvspan(left, right, color=mark.color, alpha=0.18, linewidth=0, zorder=0)
            # The edges of many would hide what is shown.
            for edge in () if crowded else (left, right):
                axes.axvline(edge, color=mark.color, linewidth=0.8, alpha=0.9, zorder=1)


def _bands(marks: list[_Mark], least_s: float) -> list[_Mark]:
    """Marks wide enough to be seen; those of one colour that then meet are one."""
    found: list[_Mark] = []
    last: dict[str, int] = {}
    for mark in marks:
        wide = replace(mark, ended=max(mark.ended, mark.started + least_s))
        at = last.get(mark.color)
        if at is None or found[at].ended < wide.started:
            last[mark.color] = len(found)
            found.append(wide)
        else:
            found[at] = replace(found[at], ended=max(found[at].ended, wide.ended))
    return found


def _placed(marks: list[_Mark], begin: float, end: float) -> list[_Label]:
    """The labels above the panel: those that would overlap go onto further lines, while there are some."""
    total = max(end - begin, 1e-3)
    lanes: list[list[tuple[float, float]]] = [[] for _ in range(_LANES)]
    found = []
    # Workers that came or went are named in any case: there are few of them.
    for mark in sorted(marks, key=lambda mark: mark.move):
        center = min(max(((mark.started + mark.ended) / 2 - begin) / total, 0.0), 1.0)
        half = max(len(line) for line in mark.text.splitlines()) * 0.0031 + 0.005
        spot = min(max(center, half), 1 - half)
        left, right = spot - half, spot + half
        for index, lane in enumerate(lanes):
            if all(right < taken or left > until for taken, until in lane):
                lane.append((left, right))
                found.append(_Label(mark, spot, index))
                break
    return sorted(found, key=lambda label: label.mark.started)


def _labels(axes: Any, labels: list[_Label], left_out: int) -> None:
    """Name the marks above the panel."""
    for label in labels:
        axes.annotate(
            label.mark.text,
            xy=(0, 1.0),
            xytext=(label.spot, 6 + label.lane * _LANE_PT),
            xycoords="axes fraction",
            textcoords=("axes fraction", "offset points"),
            ha="center",
            va="bottom",
            fontsize=7.5,
            linespacing=1.15,
            color=TEXT,
            bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": label.mark.color, "linewidth": 0.9},
            annotation_clip=False,
        )
    if left_out:
        axes.annotate(
            f"and {left_out:,} more without a label",
            xy=(1.0, 1.0),
            xytext=(0, 6 + (max(label.lane for label in labels) + 1) * _LANE_PT),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7.5,
            color=TEXT,
            annotation_clip=False,
        )


def _nothing(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#888888")
