"""The results page: what was measured, kept as lines of JSON and shown as Markdown.

Owns: a folder with one file of lines for each bench, a picture beside it where it has one, and ``README.md`` made
from them. Invariant: page and pictures say nothing that is not in the lines; losses stand beside wins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock_bench.catalogue import BENCHES
from penstock_bench.machine import NOISY
from penstock_bench.measure import ONE_AFTER_THE_OTHER, Line
from penstock_bench.pictures import PICTURES, can_draw, svg
from penstock_bench.show import figure, ratio
from penstock_bench.targets import TARGETS, judge

__all__ = ["check", "page", "read", "write", "write_page"]

#: Cases that a message names.
_MOST_NAMED = 5
#: In the names of cases what another run may find otherwise: they are the same cases.
_FOUND = re.compile(r"chunk \d+ by hand|best fixed N=\d+ B=\d+|timely [\d.]+")

#: Conditions that the page tells once for a bench, or in columns.
_TOLD = {
    *("versions", "cores", "cpu", "profile", "quick", "repeats", "better", "ratio_of", "paired_ratio"),
    *(
        "paired_ratio_range",
        "own_cpu",
        "foreign_cpu",
        "stolen_cpu",
        "pairs_again",
        "noisy",
        "no_ratio",
        "load",
        "commit",
        "pinned",
        "budget_s",
        "at",
    ),
    # Curves, for the picture, and what a case is called.
    *("series", "restart_series", "moves", "query", "beside"),
}

_HEAD = """\
# Results

Made by `penstock bench NAME --record benches/results` from the `.jsonl` files beside this page; not edited by hand. A
section is one run of one bench: it names its machine, commit and time, which differ between sections.
Each line is ours beside a peer, in one run, on the same input and cores, both sides in turn, or one after the other
where that is said. *Ours* and *peer* are medians with their least and greatest value. A *ratio* above 1 means that ours
is better by that factor, for times as for rates; it is the quotient of the medians, and the range beside it is that of
the single pairs. Where ours cannot be told from what there is anyway, there is no ratio but a word on why.
"""


def read(folder: Path, bench: str) -> list[Line]:
    """The recorded results of a bench; empty when there are none.

    Raises
    ------
    ConfigError
        When the file is damaged.
    """
    path = folder / f"{bench}.jsonl"
    if not path.is_file():
        return []
    try:
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        if not all(isinstance(line["conditions"], dict) and _has_ratio(line) for line in lines):
            raise ValueError
        return [_as_known_today(line) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not hold results of a bench; delete it") from error


def _has_ratio(line: Line) -> bool:
    """Whether a line has a ratio, or says why not."""
    return bool(line["conditions"]["no_ratio"] if line["ratio"] is None else line["ratio"] > 0)


#: Until then the peer was held up by how it was measured: bench, a word of the case, and how.
_CORRECTED = "2026-11-26T03:53:49"
_HELD_UP = (
    ("reorder", "oneTBB", "the peer allocated its tokens: to be measured anew"),
    ("cliques", "Spark SQL", "the peer's first, cold turn counted: to be measured anew"),
)


def _as_known_today(line: Line) -> Line:
    """A line of an older version of its bench, told as what it is.

    What idle workers use was read when they had ended, and was 0 for that.
    The two sides of `rescale` have always run one after the other, and made no pairs.
    A peer that was held up by how it was measured has no ratio.
    """
    for bench, word, how in _HELD_UP:
        if line["name"] == bench and word in line["case"] and line["conditions"].get("at", "") < _CORRECTED:
            told = {"no_ratio": how, "paired_ratio": None, "paired_ratio_range": None}
            return line | {"ratio": None, "conditions": line["conditions"] | told}
    if line["name"] == "empty-epoch" and line["conditions"].get("idle_cpu_percent") == 0:
        return line | {"conditions": {k: v for k, v in line["conditions"].items() if k != "idle_cpu_percent"}}
    if line["name"] == "rescale" and "vs Spark" in line["case"]:
        told = {"sides": ONE_AFTER_THE_OTHER, "paired_ratio": None, "paired_ratio_range": None}
        return line | {"conditions": line["conditions"] | told}
    return line


def write(folder: Path, bench: str, lines: Iterable[Line], *, fewer: bool = False) -> None:
    """Record the results of a bench in place of older ones, and renew the page and its picture, if it has one.

    Without matplotlib, or from lines that lack what it shows, there is no picture.

    Parameters
    ----------
    folder : Path
        Where the record is.
    bench : str
        Whose results these are.
    lines : iterable of Line
        All of a run.
    fewer : bool, default False
        Record them although cases that are recorded are not among them.

    Raises
    ------
    ConfigError
        As `check`, when these are of a quick run; and where recorded cases would be lost. Then the lines are kept in
        a file beside the record.
    """
    lines = list(lines)
    check(folder, bench, quick=any(line["conditions"].get("quick") for line in lines))
    path, beside = folder / f"{bench}.jsonl", folder / f"{bench}.jsonl.fewer"
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    if not fewer and (lost := _lost(read(folder, bench), lines)):
        _replace(beside, text)
        said = "; ".join(lost[:_MOST_NAMED]) + (f"; and {len(lost) - _MOST_NAMED} more" if lost[_MOST_NAMED:] else "")
        raise ConfigError(
            f"{path} holds cases that this run has not ({said}): it stays as it was, and the run is in {beside.name};"
            " measure with the same budget and peers, or record it all the same with --fewer"
        )
    _replace(path, text)
    beside.unlink(missing_ok=True)
    if bench in PICTURES:
        picture = folder / f"{bench}.svg"
        if can_draw(bench, lines) and importlib.util.find_spec("matplotlib") is not None:
            _replace(picture, svg(bench, lines))
        else:
            picture.unlink(missing_ok=True)
    write_page(folder)


def _lost(old: Iterable[Line], new: Iterable[Line]) -> list[str]:
    """Names of the recorded cases that a run has not; of those of a quick run none is missed."""
    left = Counter(_FOUND.sub("", line["case"]) for line in new)
    lost = []
    for line in old:
        case = _FOUND.sub("", line["case"])
        if left[case]:
            left[case] -= 1
        elif not line["conditions"].get("quick"):
            lost.append(line["case"])
    return lost


def check(folder: Path, bench: str, *, quick: bool) -> None:
    """Say whether results of a bench may be recorded, before they are measured.

    Raises
    ------
    ConfigError
        When a quick run, of small sizes, would replace a whole one.
    """
    if quick and any(not line["conditions"].get("quick") for line in read(folder, bench)):
        raise ConfigError(
            f"{folder / bench}.jsonl holds a whole run, which a quick one does not replace: record it in another"
            " folder, or leave --quick out"
        )


def write_page(folder: Path) -> None:
    """Make the page again from what is recorded."""
    pictures = {bench for bench in PICTURES if (folder / f"{bench}.svg").is_file()}
    _replace(folder / "README.md", page({bench.name: read(folder, bench.name) for bench in BENCHES}, pictures))


def page(results: dict[str, list[Line]], pictures: Collection[str] = ()) -> str:
    """The page as Markdown, benches in the order of the catalogue; `pictures`: those with one beside it."""
    parts = [_HEAD, _targets({bench: lines for bench, lines in results.items() if lines})]
    missing = [bench.name for bench in BENCHES if not results.get(bench.name)]
    for bench in BENCHES:
        if bench.name in missing:
            continue
        lines = results[bench.name]
        parts.append(f"## {bench.name}\n\n{bench.summary[0].upper()}{bench.summary[1:]}.\n")
        if bench.name in pictures:
            parts.append(f"![{bench.summary}]({bench.name}.svg)\n")
        parts.append(_bench(lines))
    if missing:
        parts.append(f"Not recorded here: {', '.join(missing)}.\n")
    return "\n".join(parts)


def _targets(results: dict[str, list[Line]]) -> str:
    lines = [line for lines in results.values() for line in lines]
    rows = []
    for target in TARGETS:
        if target.bench and target.bench not in results:
            continue
        covered = [line for line in lines if target.covers(line)]
        verdict = target.verdict(covered)
        values = [value for line in covered if (value := target.value(line)) is not None]
        reached = _spread(values, target.unit.split(" ")[0]) if values else ""
        noisy = " (noisy)" if verdict != "not measured" and any(map(_is_noisy, covered)) else ""
        rows.append([target.what, target.bench or "no bench yet", target.wanted, reached, f"**{verdict}**{noisy}"])
    return f"## Targets\n\n{_table(['target', 'bench', 'wanted', 'found', ''], rows, 'llrrl')}"


def _bench(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        conditions = line["conditions"]
        judged = judge(line)
        paired = conditions.get("paired_ratio_range")
        rows.append(
            [
                line["case"],
                line["unit"],
                _with_range(line["ours"], line["ours_range"]),
                _with_range(line["peer"], line["peer_range"]),
                f"**{ratio(line)}**" + (f" ({_spread(paired, 'x')})" if paired else ""),
                f"{conditions.get('repeats', '')}",
                "; ".join(f"{goal.wanted}: {verdict}" for goal, verdict in judged),
            ]
        )
    header = ["case", "unit", "ours", "peer", "ratio (pairs)", "repeats", "target"]
    text = [_table(header, rows, "llrrrrl"), _conditions(lines)]
    return "\n".join(text)


def _conditions(lines: Sequence[Line]) -> str:
    every = [line["conditions"] for line in lines]
    first = every[0]
    versions: dict[str, str] = {}
    for conditions in every:
        versions |= conditions.get("versions", {})
    foreign, stolen = _most(every, "foreign_cpu"), _most(every, "stolen_cpu")
    again = sum(conditions.get("pairs_again") or 0 for conditions in every)
    noisy = any(map(_is_noisy, lines))
    told = [
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"{first.get('cores')} cores of {first.get('cpu') or 'an unknown CPU'}",
        f"{first.get('profile')} build{' of commit ' + str(first['commit']) if first.get('commit') else ''}",
        f"{first.get('at', '')}",
        ("CPUs of others: not measured" if foreign is None else f"others used at most {foreign:.2f} CPUs")
        + (" (**noisy**)" if noisy else ""),
        f"the host took at most {stolen:.2f} CPUs" if stolen is not None and (stolen or again) else "",
        f"{again} pairs measured again for that" if again else "",
    ]
    if first.get("quick"):
        told.append("**quick run: small sizes**")
    text = f"Conditions: {'; '.join(part for part in told if part)}.\n"
    common = {key: value for key, value in first.items() if all(key in c and c[key] == value for c in every)}
    shared = {key: value for key, value in common.items() if key not in _TOLD}
    if shared:
        text += f"\nAll cases: {_pairs(shared)}.\n"
    for line in lines:
        own = {k: v for k, v in line["conditions"].items() if k not in _TOLD and k not in shared}
        if own:
            text += f"\n- {line['case']}: {_pairs(own)}"
    return text + ("\n" if not text.endswith("\n") else "")


def _is_noisy(line: Line) -> bool:
    """Whether others used the CPUs meanwhile; lines of an older version do not say it themselves."""
    conditions = line["conditions"]
    return bool(conditions.get("noisy", (conditions.get("foreign_cpu") or 0.0) > NOISY))


def _most(every: Sequence[dict[str, Any]], name: str) -> float | None:
    """The greatest of a condition; None where no line has it: it was not measured."""
    return max((value for conditions in every if (value := conditions.get(name)) is not None), default=None)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
    )


def _with_range(value: float, span: Sequence[float]) -> str:
    return f"{figure(value)} ({_spread(span)})"


def _spread(values: Sequence[float], unit: str = "") -> str:
    low, high = figure(min(values)), figure(max(values))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], sides: str) -> str:
    lines = [header, ["---:" if side == "r" else "---" for side in sides], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n" for cells in lines)


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
