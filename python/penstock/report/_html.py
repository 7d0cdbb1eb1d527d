"""A timeline as one HTML page that needs no other file: no script, no font, no request.

The picture is drawn by ``penstock.report._plot`` and put in as SVG; without matplotlib, or with one that fails, the
page has the tables only and says so. All text is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import TypeVar

from penstock._durations import duration_text
from penstock._extras import how_to_install
from penstock._functions.short import short
from penstock.errors import ConfigError
from penstock.report._timeline import Check, Timeline, heaviest, joined, per_worker, size_text

__all__ = ["no_picture", "page", "save_page"]

_Item = TypeVar("_Item")

_ROWS = 1_000
"""Rows of a table of what happened; of more it has those that took longest."""

_WHILE = {
    "resting": "with nothing else running",
    "migrating": "while a migration ran",
    "changing": "while workers came or went",
}

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 2rem auto; padding: 0 1.25rem; max-width: 72rem; color: #222; background: #fff;
       font: 15px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.when { color: #666; margin: 0 0 1.25rem; }
.lead { font-size: 1.15rem; margin: 0 0 1rem; }
.verdict { border-left: .4rem solid; padding: .6rem .9rem; margin: .4rem 0; background: #f6f6f6; }
.verdict b { margin-right: .5rem; } .passed { border-color: #009e73; } .failed { border-color: #d55e00; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.tile { border: 1px solid #ddd; border-radius: .4rem; padding: .55rem .9rem; min-width: 8.5rem; }
.tile span { display: block; color: #666; font-size: .8rem; } .tile b { font-size: 1.2rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #eee; }
th { color: #666; font-weight: 500; } th.t, td.t { text-align: left; }
svg { width: 100%; height: auto; } summary { cursor: pointer; color: #555; }
"""


def page(timeline: Timeline) -> str:
    """The page as text.

    Parameters
    ----------
    timeline
        What to show; what was checked stands at the top, passed or not.
    """
    return _page(timeline)[0]


def save_page(timeline: Timeline, path: str | Path) -> str | None:
    """Write the page to a file; returns why it has no picture, where it has none."""
    text, why = _page(timeline)
    Path(path).write_text(text, encoding="utf-8")
    return why


def no_picture(error: Exception) -> str:
    """Say why nothing can be drawn."""
    if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
        return f"matplotlib is not installed ({how_to_install('report')})"
    return f"matplotlib fails here: {type(error).__name__}: {' '.join(str(error).split())}"


def _page(timeline: Timeline) -> tuple[str, str | None]:
    """The page, and why it has no picture."""
    if not isinstance(timeline, Timeline):
        raise ConfigError(f"a page is made of a Timeline, such as engine.timeline(), not of {short(timeline)}")
    picture, why = _picture(timeline)
    begin, end = timeline.span
    title = escape(timeline.title or "penstock run")
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begin)) if end > begin else ""
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f'<p class="when">{when}{f", {duration_text(end - begin)}" if when else ""}</p>',
        _lead(timeline),
        *map(_verdict, timeline.checks),
        _tiles(timeline),
        picture,
        _latency(timeline),
        _migrations(timeline),
        _changes(timeline),
        _workers(timeline),
        _epochs(timeline),
        _conditions(timeline),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part), why


def _lead(timeline: Timeline) -> str:
    """The one sentence that matters: what moved, and what the rows that passed meanwhile felt of it."""
    query = heaviest(timeline)
    moves = [move for move in timeline.migrations if move.query == query and move.bytes]
    found = timeline.epoch_seconds(query)
    if not moves or not found["resting"] or not found["migrating"]:
        return ""
    resting, migrating = (duration_text(median(found[name])) for name in ("resting", "migrating"))
    parts = [e for e in timeline.epochs if e.query == query and e.spark_s > 0]
    whole = sum(e.whole_s for e in parts)
    spark = f" Spark's own work is {sum(e.spark_s for e in parts) / whole:.0%} of that." if parts else ""
    size = size_text(max(move.bytes for move in moves))
    more = escape(spark + _survived(timeline))
    return (
        f'<p class="lead">{len(moves)} times up to {size} of keyed state moved to another worker while rows passed:'
        f" a batch took {migrating} in the median while state moved, and {resting} while it rested.{more}</p>"
    )


def _survived(timeline: Timeline) -> str:
    """What it cost that workers died, came and went."""
    lost = [change for change in timeline.changes if change.kind == "lost"]
    found = [hit.whole_s for change in lost if (hit := timeline.hit(change)) is not None]
    text = f" Workers that died: {len(lost)}" if lost else ""
    text += f"; the batch that was hit took {duration_text(max(found))}." if found else "." if lost else ""
    sizes = [f"from {c.before} to {c.after}" for c in timeline.changes if c.kind == "rescale"]
    return text + (f" The number of workers went {', then '.join(sizes)}." if sizes else "")


def _verdict(check: Check) -> str:
    state, word = ("passed", "holds") if check.passed else ("failed", "FAILS")
    return f'<div class="verdict {state}"><b>{escape(check.what)}: {word}.</b>{escape(check.detail)}</div>'


def _tiles(timeline: Timeline) -> str:
    begin, end = timeline.span
    queries = len({epoch.query for epoch in timeline.epochs})
    of = f" of {queries} queries" if queries > 1 else ""
    tiles = [(f"input rows{of}", f"{timeline.rows:,}")]
    if end > begin:
        tiles.append((f"rows per second{of}", f"{timeline.rows / (end - begin):,.0f}"))
    tiles += [("epochs", f"{len(timeline.epochs):,}"), ("migrations", f"{len(joined(timeline.migrations))}")]
    moved = sum(m.bytes for m in timeline.migrations)
    tiles.append(("state moved", size_text(moved)))
    if lost := sum(change.kind == "lost" for change in timeline.changes):
        tiles.append(("workers lost", f"{lost}"))
    if rescales := sum(change.kind == "rescale" for change in timeline.changes):
        tiles.append(("rescales", f"{rescales}"))
    return '<div class="tiles">{}</div>'.format(
        "".join(f'<div class="tile"><span>{escape(k)}</span><b>{escape(v)}</b></div>' for k, v in tiles)
    )


def _picture(timeline: Timeline) -> tuple[str, str | None]:
    try:
        from penstock.report._plot import latency_svg

        svg = latency_svg(timeline)
    except Exception as error:  # a backend that is set and is none, a package that does not fit another
        why = no_picture(error)
        return f"<p>No picture: {escape(why)}.</p>", why
    return f"<h2>Latency, load and migrations</h2>\n{svg}", None


def _latency(timeline: Timeline) -> str:
    shares = (0.5, 0.9, 0.99, 0.999, 1.0)
    rows = []
    for name, values in timeline.latency_ns(shares).items():
        if values:
            rows.append([f"slices {_WHILE[name]}", *(duration_text(v / 1e9) for v in values)])
    for query in sorted({e.query for e in timeline.epochs}):
        seconds = sorted(e.whole_s for e in timeline.epochs if e.query == query)
        picked = [seconds[min(int(share * len(seconds)), len(seconds) - 1)] for share in shares]
        rows.append([f"epochs of {query}" if query else "epochs", *map(duration_text, picked)])
    return _table("Latency", ["", "p50", "p90", "p99", "p99.9", "max"], rows)


def _longest(items: Sequence[_Item], seconds: Callable[[_Item], float]) -> tuple[list[_Item], str]:
    """The items that a table has, in their order, and words that say which if it does not have all."""
    if len(items) <= _ROWS:
        return list(items), ""
    kept = sorted(sorted(range(len(items)), key=lambda index: -seconds(items[index]))[:_ROWS])
    return [items[index] for index in kept], f", the {_ROWS:,} longest of {len(items):,}"


def _migrations(timeline: Timeline) -> str:
    begin = timeline.span[0]
    shown, of_many = _longest(timeline.migrations, lambda m: m.ended - m.started)
    rows = [
        [
            m.strategy,
            m.query,
            f"{m.started - begin:.2f} s",
            duration_text(m.ended - m.started),
            f"{m.bins:,}",
            size_text(m.bytes),
            f"{m.steps:,}",
        ]
        for m in shown
    ]
    return _table(f"Migrations{of_many}", ["strategy", "query", "at", "took", "bins", "bytes", "steps"], rows, text=2)


def _changes(timeline: Timeline) -> str:
    begin = timeline.span[0]
    rows = []
    shown, of_many = _longest(timeline.changes, lambda c: c.ended - c.started)
    for change in shown:
        hit = timeline.hit(change)
        lost = change.kind == "lost"
        rows.append(
            [
                "a worker was lost and replaced" if lost else f"from {change.before} to {change.after} workers",
                f"{change.started - begin:.2f} s",
                duration_text(change.ended - change.started),
                "" if lost else f"{change.bins:,}",
                "" if hit is None else duration_text(hit.whole_s),
            ]
        )
    header = ["", "at", "took", "bins", "longest batch meanwhile"]
    return _table(f"Workers that came and went{of_many}", header, rows)


def _workers(timeline: Timeline) -> str:
    rows = []
    for worker, samples in per_worker(timeline.workers).items():
        last = samples[-1]
        rows.append(
            [
                f"worker {worker}",
                f"{last.rows:,}",
                f"{min(s.bins for s in samples):,} to {max(s.bins for s in samples):,}",
                f"{last.bins:,}",
                f"{last.keys:,}",
                size_text(last.state_bytes),
            ]
        )
    header = ["", "rows", "bins held", "bins at the end", "keys at the end", "state at the end"]
    return _table("Workers", header, rows)


def _epochs(timeline: Timeline) -> str:
    begin = timeline.span[0]
    shown, of_many = _longest(timeline.epochs, lambda e: e.whole_s)
    rows = [
        [e.query, f"{e.epoch}", f"{e.started - begin:.2f} s", duration_text(e.whole_s), f"{e.rows:,}"]
        for e in sorted(shown, key=lambda e: e.started)
    ]
    table = _table("", ["query", "epoch", "at", "took", "rows"], rows)
    told = f"<details><summary>{len(rows):,} epochs</summary>{table}</details>"
    return f"<h2>Epochs{of_many}</h2>{told}" if rows else ""


def _conditions(timeline: Timeline) -> str:
    rows = [[name, value] for name, value in timeline.conditions.items()]
    return _table("Conditions", ["", ""], rows, text=2)


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """A table whose first ``text`` columns are text and the others figures; nothing when it has no row."""
    lines = [_row("td", row, text) for row in rows]
    if not lines:
        return ""
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    head = _row("th", header, text) if any(header) else ""
    return f'{heading}<div class="scroll"><table>{head}{"".join(lines)}</table></div>'


def _row(tag: str, cells: Sequence[str], text: int) -> str:
    kinds = (' class="t"' if index < text else "" for index in range(len(cells)))
    return "<tr>{}</tr>".format(
        "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    )
