"""Pictures of recorded results, for benches whose result is a curve.

Owns: which benches have one, and how it is drawn. Invariant: a picture shows what the lines beside it say, no more;
equal lines give equal bytes. Needs matplotlib, imported when something is drawn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.report._style import STYLE, frame, svg_text
from penstock_bench.measure import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "can_draw", "draw", "svg"]

# Colours that stay apart for colour-blind readers and in grey.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_FREE = "#777777"


def can_draw(bench: str, lines: Sequence[Line]) -> bool:
    """Whether a bench has a picture, and these lines what it shows: those of an older version may not."""
    needed = _NEEDED.get(bench)
    return bool(lines) and needed is not None and all(needed <= line["conditions"].keys() for line in lines)


def draw(bench: str, lines: Sequence[Line]) -> Figure:
    """The picture of a bench, from its lines.

    Parameters
    ----------
    bench : str
        One of `PICTURES`.
    lines : sequence of dict
        What was recorded of it; such that `can_draw`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 6.4), dpi=110, layout="constrained")
        PICTURES[bench](figure, lines)
        frame(figure.axes)
        return figure


def svg(bench: str, lines: Sequence[Line]) -> str:
    """The picture as SVG, the same for the same lines."""
    return svg_text(draw(bench, lines))


def _sensitivity(figure: Figure, lines: Sequence[Line]) -> None:
    """Time and peak memory over B at N = 4 and over N at a fixed B; one colour per number of threads.

    Times are those of the pairs, as parts of the time beside them, so neighbours on the machine change them little.
    """
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    for color, workers in zip(_COLORS, _distinct(lines, "workers"), strict=False):
        own = [line for line in lines if line["conditions"]["workers"] == workers]
        threads = _threads(workers)
        name = f"{threads}; 1 is {statistics.median(line['peer'] for line in own):,.0f} ms"
        for column, (sweep, knob) in enumerate((("B", "batch_size"), ("N", "batches"))):
            of = sorted((line for line in own if line["conditions"]["sweep"] == sweep), key=_by(knob))
            at = [line["conditions"][knob] for line in of]
            _ranged(panels[0][column], at, of, color, name)
            panels[1][column].plot(at, [line["conditions"]["peak_mib"] for line in of], "o-", color=color, ms=4)
        for line in own:
            facts, time = line["conditions"], 1 / line["conditions"]["paired_ratio"]
            if facts["sweep"] == "adaptive":
                style = {"color": color, "marker": "*", "ms": 12, "ls": "none", "mec": "white", "zorder": 5}
                for column, knob in enumerate(("batch_size", "batches")):
                    panels[0][column].plot(facts[knob], time, label=f"{threads}, bounds found", **style)
                    panels[1][column].plot(facts[knob], facts["peak_mib"], **style)
            elif facts["sweep"] == "none":
                style = {"color": color, "ls": ":", "lw": 1.3}
                for column in (0, 1):
                    panels[0][column].axhline(time, label=f"{threads}, no flow control", **style)
                    panels[1][column].axhline(facts["peak_mib"], **style)
    for row in panels:
        for axes in row:
            axes.set_yscale("log")
            _plain(axes.yaxis)
    panels[1][0].set_xscale("log")
    panels[1][1].set_xscale("log", base=2)
    for axes in panels[1]:
        _plain(axes.xaxis)
    low, high = panels[0][0].get_ylim()
    panels[0][0].set_ylim(min(low, 0.5), max(high, 2.0))
    panels[0][0].set_ylabel("time, 1 is that beside it")
    panels[1][0].set_ylabel("peak memory above the graph, MiB")
    panels[1][0].set_xlabel("B, items per batch and worker (N = 4)")
    panels[1][1].set_xlabel("N, batches per worker (B = 1,000 times the threads)")
    edges = lines[0]["conditions"]["edges"]
    figure.suptitle(
        f"4-cliques, {edges:,} edges: time (beside N = 4, B = 1,000 times the threads) and memory",
        x=0.01,
        ha="left",
    )
    _legend(figure, panels[0][0])


def _memory(figure: Figure, lines: Sequence[Line]) -> None:
    """Peak memory over the size of the graph, within bounds and without; a panel for each size of cliques."""
    lines = [line for line in lines if line["conditions"]["size"] > 1]
    sizes = _distinct(lines, "size")
    panels = figure.subplots(1, max(1, len(sizes)), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=False):
        for color, workers in zip(_COLORS, _distinct(lines, "workers"), strict=False):
            own = [
                line for line in lines if (line["conditions"]["size"], line["conditions"]["workers"]) == (size, workers)
            ]
            name = _threads(workers)
            for kind, style, said in (("fixed", "o-", "N=4, B=1,000"), ("adaptive", "*--", "bounds found")):
                of = sorted((line for line in own if line["conditions"]["bounds"] == kind), key=_by("edges"))
                edges = [line["conditions"]["edges"] for line in of]
                axes.plot(edges, [line["ours"] for line in of], style, color=color, ms=5, label=f"{name}, {said}")
                if kind == "fixed":
                    free = [line["peer"] for line in of]
                    axes.plot(edges, free, "s:", color=color, ms=4, label=f"{name}, no flow control")
            timely = [line for line in own if line["conditions"]["bounds"] == "beside timely"]
            for line in timely:
                axes.plot(
                    line["conditions"]["edges"], line["peer"], "X", color=color, label=f"{name}, timely in rounds"
                )
        axes.set_title(f"{size}-cliques", fontsize=10)
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain(axes.yaxis)
        edges = sorted({line["conditions"]["edges"] for line in lines if line["conditions"]["size"] == size})
        axes.set_xticks(edges, [f"{count:,}" for count in edges])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("edges")
    panels[0].set_ylabel("peak memory above the graph, MiB")
    _legend(figure, panels[-1])
    figure.suptitle("Peak memory over the size of the graph", x=0.01, ha="left")


def _overhead(figure: Figure, lines: Sequence[Line]) -> None:
    """Time within bounds over time without, per number of threads: least, mean, greatest of the pairs."""
    axes = figure.subplots()
    lines = [line for line in lines if line["conditions"]["bounds"] in ("fixed", "adaptive")]
    names = []
    for at, line in enumerate(lines):
        facts = line["conditions"]
        least, mean, most = (facts[f"time_ratio_{word}"] for word in ("min", "mean", "max"))
        color = _COLORS[facts["bounds"] == "adaptive"]
        axes.plot([at, at], [least, most], color=color, lw=6, solid_capstyle="butt", alpha=0.35)
        axes.plot(at, mean, "o", color=color)
        axes.annotate(f"{mean:.2f}", (at, mean), xytext=(9, -3), textcoords="offset points", fontsize=8)
        kind = "bounds found" if facts["bounds"] == "adaptive" else "bounds given"
        names.append(f"{facts['size']}-cliques\n{_threads(facts['workers'])}\n{kind}")
    axes.axhline(1.0, color=_FREE, lw=1)
    axes.axhline(1.2, color=_FREE, lw=1, ls=":")
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time within bounds / time without")
    figure.suptitle("What flow control costs: least, mean and greatest of the pairs", x=0.01, ha="left")


def _migration(figure: Figure, lines: Sequence[Line]) -> None:
    """Latency over time for each strategy, in process and over TCP; the greatest latency over the duration of moves.

    Below, where there are sweeps: the greatest latency over bins, keys and load, over TCP.
    """
    sweeps = [(axis, *found) for axis in ("bins", "keys", "offered") if (found := _sweep(lines, axis))]
    panels = figure.subplots(2 if sweeps else 1, 3, squeeze=False)
    first, second = panels[0], list(panels[1]) if sweeps else []
    strategies = [name for name in _STRATEGIES if any(line["conditions"]["strategy"] == name for line in lines)]
    for axes, transport in zip(first, ("threads", "tcp"), strict=False):
        own = [line["conditions"] for line in _at_half(lines) if line["conditions"]["transport"] == transport]
        # Of the largest state there may be one round, of which most is not at rest.
        most = max((facts["repeats"] for facts in own), default=0)
        own = [facts for facts in own if facts["repeats"] == most]
        if not own:
            axes.set_axis_off()
            continue
        keys = max(facts["keys"] for facts in own)
        bins = max(facts["bins"] for facts in own if facts["keys"] == keys)
        shown = [facts for facts in own if (facts["keys"], facts["bins"]) == (keys, bins)]
        for facts in shown:
            color = _COLORS[strategies.index(facts["strategy"])]
            at, _, greatest = zip(*facts["series"], strict=True)
            axes.plot(at, greatest, color=color, lw=1.3, label=facts["strategy"])
        at, _, greatest = zip(*shown[0]["restart_series"], strict=True)
        axes.plot(at, greatest, color=_FREE, lw=1.3, ls=":", label="stop and restart")
        axes.set_title(
            f"{'in process' if transport == 'threads' else 'over TCP'}: {keys:,} keys, {bins:,} bins", fontsize=10
        )
        axes.set_xlabel("seconds")
    first[0].set_ylabel("greatest latency of 250 ms, ms")
    for line in lines:
        facts = line["conditions"]
        style = {"color": _COLORS[strategies.index(facts["strategy"])], "ls": "none", "ms": 5}
        style["mfc"] = "none" if line["ratio"] is None else style["color"]
        first[2].plot(facts["duration_s"], line["ours"], "os"[facts["transport"] == "tcp"], **style)
        first[2].plot(facts["restart_duration_s"], line["peer"], "x", color=_FREE, ms=5)
    first[2].set_title("moves; dots: in process; hollow: as at rest", fontsize=9)
    first[2].set_xlabel("duration, seconds")
    first[2].set_ylabel("greatest latency, ms")
    first[2].set_xscale("log")
    _plain(first[2].xaxis)
    for axes, (axis, swept, told) in zip(second, sweeps, strict=False):
        for strategy in strategies:
            curve = sorted((line for line in swept if line["conditions"]["strategy"] == strategy), key=_by(axis))
            places = [line["conditions"][axis] for line in curve]
            axes.plot(
                places, [line["ours"] for line in curve], "s-", color=_COLORS[strategies.index(strategy)], ms=4, lw=1
            )
        axes.plot(places, [line["peer"] for line in curve], "x:", color=_FREE, ms=4, lw=1)
        axes.set_title(f"over TCP, {told}", fontsize=10)
        axes.set_xlabel({"bins": "bins", "keys": "keys", "offered": "records, of what there is room for"}[axis])
        if axis != "offered":
            axes.set_xscale("log", base=2)
    for axes in second[len(sweeps) :]:
        axes.set_axis_off()
    if sweeps:
        second[0].set_ylabel("greatest latency, ms")
    for axes in panels.flat:
        axes.set_yscale("log")
        _plain(axes.yaxis)
    figure.suptitle("A quarter of the state moves and comes back, at half load", x=0.01, ha="left")
    _legend(figure, next((axes for axes in first[:2] if axes.lines), first[0]))


def _at_half(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["conditions"]["offered"] == 0.5]


def _sweep(lines: Sequence[Line], axis: str) -> tuple[list[Line], str] | None:
    """Lines over TCP of most values of one condition, the others as they are in most of these, and what these are."""
    of_axis: dict[tuple[Any, ...], list[Line]] = {}
    others = [name for name in ("keys", "bins", "offered") if name != axis]
    for line in lines:
        if line["conditions"]["transport"] == "tcp":
            of_axis.setdefault(tuple(line["conditions"][name] for name in others), []).append(line)
    if not of_axis:
        return None
    fixed, own = max(of_axis.items(), key=lambda found: (len(_distinct(found[1], axis)), found[0]))
    told = dict(zip(others, fixed, strict=True))
    words = [f"{told[name]:,} {name}" for name in ("keys", "bins") if name in told]
    return (own, ", ".join(words)) if len(_distinct(own, axis)) > 2 else None


def _join(figure: Figure, lines: Sequence[Line]) -> None:
    """Latency over time through joins and a leave, calm and saturated; the steps of each join; the size of progress."""
    panels = list(figure.subplots(2, 2).flat)
    courses = [line["conditions"] for line in lines if line["conditions"]["part"] == "course"]
    for axes, load in zip(panels, _LOADS, strict=False):
        for facts in (facts for facts in courses if facts["load"] == load):
            color = _COLORS[facts["transport"] == "tcp"]
            name = f"{_PLACES[facts['transport']]}, {load}"
            panels[3].plot(*zip(*facts["live_counts"], strict=True), color=color, lw=1.3, ls=_LOADS[load], label=name)
            at, median, most = zip(*facts["series"], strict=True)
            axes.plot(at, most, color=color, lw=1.3, label=_PLACES[facts["transport"]])
            axes.plot(at, median, color=color, lw=1, ls=":")
            for kind, moment in facts["events"]:
                axes.axvline(moment, color=color, lw=0.8, ls="--" if kind == "join" else "-.", alpha=0.5)
        axes.set_title(f"{load}: greatest and median (dotted) latency in 100 ms", fontsize=10)
        axes.set_xlabel("seconds")
        axes.set_yscale("log")
        _plain(axes.yaxis)
    panels[0].set_ylabel("latency of a block, ms")
    for row, facts in enumerate(courses):
        left = 0.0
        for step, (name, what) in enumerate(_JOIN_STEPS.items()):
            took = statistics.median(facts[name]) if facts[name] else 0.0
            panels[2].barh(row, took, left=left, color=_COLORS[step], label=what if row == 0 else None)
            left += took
    panels[2].set_yticks(range(len(courses)), [f"{_PLACES[facts['transport']]}\n{facts['load']}" for facts in courses])
    panels[2].set_xlabel("ms from the wish to the first record, median of the joins")
    panels[2].legend(fontsize=8, ncols=len(_JOIN_STEPS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    panels[3].set_title("counts that progress keeps", fontsize=10)
    panels[3].set_xlabel("seconds")
    panels[3].set_yscale("log")
    _plain(panels[3].yaxis)
    panels[3].set_ylim(bottom=1)
    panels[3].legend(fontsize=7)
    figure.suptitle("Workers join (dashed) and leave (dots and dashes) while records come", x=0.01, ha="left")
    _legend(figure, next((axes for axes in panels if axes.lines), panels[0]))


def _nexmark(figure: Figure, lines: Sequence[Line]) -> None:
    """Events per second of both sides, and how many times faster ours is, for each query; native, then from Python."""
    panels = figure.subplots(2, 2, sharex="col", sharey="row", width_ratios=(1, 2))
    native = [line for line in lines if line["conditions"]["beside"] == "timely"]
    python = [line for line in lines if line["conditions"]["beside"] != "timely"]
    for column, (title, own, target) in enumerate((("native", native, 1.5), ("from Python", python, 10.0))):
        rates, ratios = panels[0][column], panels[1][column]
        queries = list(dict.fromkeys(line["conditions"]["query"] for line in own))
        sides = list(dict.fromkeys((line["conditions"]["beside"], line["conditions"]["workers"]) for line in own))
        for side, (peer, workers) in enumerate(sides):
            color, shift = _COLORS[side % len(_COLORS)], (side + 1) / (len(sides) + 1) - 0.5
            of = [
                line for line in own if (line["conditions"]["beside"], line["conditions"]["workers"]) == (peer, workers)
            ]
            at = [queries.index(line["conditions"]["query"]) + shift for line in of]
            style = {"color": color, "ls": "none", "ms": 5}
            name = f"{peer}, {_threads(workers)}"
            rates.vlines(at, [line["peer"] for line in of], [line["ours"] for line in of], color=color, lw=1, alpha=0.5)
            rates.plot(at, [line["ours"] for line in of], "o", label=f"ours beside {name}", **style)
            rates.plot(at, [line["peer"] for line in of], "x", label=name, **style)
            ranges = [line["conditions"]["paired_ratio_range"] for line in of]
            ratios.vlines(at, *zip(*ranges, strict=True), color=color, lw=4, alpha=0.35)
            ratios.plot(at, [line["conditions"]["paired_ratio"] for line in of], "o", **style)
        ratios.axhline(1.0, color=_FREE, lw=1)
        ratios.axhline(target, color=_FREE, lw=1, ls=":")
        ratios.set_xticks(range(len(queries)), [query.split("_")[0] for query in queries])
        for edge in range(1, len(queries)):
            for axes in (rates, ratios):
                axes.axvline(edge - 0.5, color=_FREE, lw=0.4, alpha=0.5)
        rates.set_title(title, fontsize=10)
        if sides:
            rates.legend(fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.07), frameon=False)
    for row in panels:
        row[0].set_yscale("log")
        for axes in row:
            _decades(axes.yaxis)
    panels[0][0].set_ylabel("M events/s; dots: ours")
    panels[1][0].set_ylabel("ours / peer; dotted: wanted")
    figure.suptitle("NEXMark: ours beside each peer, median and range of the pairs", x=0.01, ha="left")


_PLACES = {"threads": "in process", "tcp": "over TCP"}
_LOADS = {"calm": "-", "saturated": "--"}
_JOIN_STEPS = {
    "admitted_ms": "dialled, admitted",
    "built_ms": "built",
    "bootstrap_ms": "bootstrapped",
    "first_record_ms": "first record",
}

_STRATEGIES = ("all-at-once", "batched", "fluid", "matched")

#: The benches that have a picture.
PICTURES: dict[str, Callable[[Any, Sequence[Line]], None]] = {
    "faucet-overhead": _overhead,
    "faucet-memory": _memory,
    "faucet-sensitivity": _sensitivity,
    "migration": _migration,
    "join": _join,
    "nexmark": _nexmark,
}

#: Conditions that every line of theirs has.
_NEEDED = {
    "faucet-overhead": {"bounds", "size", "workers"},
    "faucet-memory": {"bounds", "size", "workers", "edges"},
    "faucet-sensitivity": {"sweep", "workers", "peak_mib", "edges"},
    "migration": {
        "strategy",
        "transport",
        "keys",
        "bins",
        "offered",
        "duration_s",
        "restart_duration_s",
        "series",
        "restart_series",
    },
    "join": {"part"},
    "nexmark": {"query", "beside", "workers"},
}


def _by(knob: str) -> Callable[[Line], Any]:
    return lambda line: line["conditions"][knob]


def _distinct(lines: Sequence[Line], condition: str) -> list[Any]:
    return sorted({line["conditions"][condition] for line in lines})


def _threads(workers: int) -> str:
    return f"{workers} thread{'s' if workers > 1 else ''}"


def _ranged(axes: Any, at: Sequence[float], lines: Sequence[Line], color: str, name: str) -> None:
    """Times as parts of those beside them: the middle of the pairs, and their range."""
    middle = [1 / line["conditions"]["paired_ratio"] for line in lines]
    ranges = [line["conditions"]["paired_ratio_range"] for line in lines]
    below = [max(0.0, value - 1 / most) for value, (_, most) in zip(middle, ranges, strict=True)]
    above = [max(0.0, 1 / least - value) for value, (least, _) in zip(middle, ranges, strict=True)]
    axes.errorbar(at, middle, yerr=(below, above), fmt="o-", color=color, ms=4, capsize=2, lw=1.4, label=name)


def _legend(figure: Figure, axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=3, frameon=False, fontsize=8)


def _plain(axis: Any) -> None:
    """Numbers of a logarithmic axis as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    if axis.axis_name == "y":
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
    axis.set_minor_formatter(NullFormatter())


def _decades(axis: Any) -> None:
    """The same of an axis over many powers of ten, which alone have numbers."""
    from matplotlib.ticker import LogLocator

    _plain(axis)
    axis.set_major_locator(LogLocator(base=10, numticks=20))
