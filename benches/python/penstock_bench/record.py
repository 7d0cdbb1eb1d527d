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
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock_bench.catalogue import BENCHES
from penstock_bench.machine import NOISY
from penstock_bench.measure import ONE_AFTER_THE_OTHER, PAIRS, Line
from penstock_bench.pictures import PICTURES, can_draw, svg
from penstock_bench.show import figure, names, ratio
from penstock_bench.targets import TARGETS, judge

__all__ = ["CHANGED", "OTHER_MODULE", "check", "page", "read", "write", "write_page"]

#: Behind a commit whose files are others by now, and behind one from which the native module was not built.
CHANGED, OTHER_MODULE = "-changed", "-other-module"
#: Cases that a message names.
_MOST_NAMED = 5
#: Lines of one run follow each other within this time.
_APART = timedelta(hours=1)
#: In the names of cases what another run may find otherwise: they are the same cases.
_FOUND = re.compile(
    r"chunk \d+ by hand|best fixed N=\d+ B=\d+|timely [\d.]+|(?<=spreading )\(\w+\)|(?<=one at a time )\(\w+\)"
    r"| \(no batch done in \d+ s\)"
)

#: Conditions that the page tells once for a bench, or in columns.
_TOLD = {
    *("versions", "cores", "cpu", "profile", "quick", "repeats", "better", "ratio_of", "paired_ratio", "note"),
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
        "full",
        "at",
    ),
    # Curves, for the picture, and what a case is called.
    *("series", "restart_series", "moves", "query", "beside"),
}

_HEAD = """\
# Results

Made by `penstock bench NAME --record benches/results` from the `.jsonl` files beside this page; not edited by hand. A
section is one run of one bench, or says which of its lines are of which run; a run names its machine, commit and time.
Of a commit "with changes" some files were others than it holds.
Each line is ours beside a peer, in one run, on the same input and cores, both sides in turn, or one after the other
where that is said. *Ours* and *peer* are medians with their least and greatest value. A *ratio* above 1 means that ours
is better by that factor, for times as for rates; it is the quotient of the medians, or the median of the pairs where
that is said, and the range beside it is that of the single pairs. Where ours cannot be told from what there is anyway,
or the peer was held up by how it was measured, there is no ratio but a word on why. A number in brackets is a note
below the table.
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


class _Flaw(NamedTuple):
    """What is known today of lines of an older version of their bench."""

    bench: str
    #: Regular expression that is searched in the name of the case.
    cases: str
    #: A condition that lines have since it was mended, or the time when it was.
    lacks: str
    why: str
    #: Whether the ratio stands, with `why` as a note beside it; else the peer was held up by how it was measured.
    stands: bool = False

    def has(self, line: Line) -> bool:
        if self.bench != line["name"] or not re.search(self.cases, line["case"]):
            return False
        conditions = line["conditions"]
        return conditions.get("at", "") < self.lacks if self.lacks[0].isdigit() else self.lacks not in conditions


_FLAWS = (
    _Flaw(
        "reorder",
        "oneTBB",
        "tokens_a_thread",
        "the peer had two tokens a thread, untuned: to be measured anew",
    ),
    _Flaw(
        "cliques",
        "Spark SQL",
        "2026-11-26T03:53:49",
        "the peer's first, cold turn counted: to be measured anew",
    ),
    _Flaw(
        "keyed-count",
        r"^w([2-9]|\d\d+) .* changes vs",
        "peer_epochs_under_way",
        "the peer had one epoch under way, ours three: to be measured anew",
    ),
    _Flaw(
        "join",
        "from the wish",
        "until",
        "the peer's time ends later than ours: to be measured anew",
    ),
    _Flaw(
        "nexmark",
        "^python .* vs Spark",
        "peer_durable",
        "Spark's logs and state are durable, nothing of ours is, and the figures hold the fixed costs of a batch, which"
        " are a part of what q1 and q2 take: to be measured anew, with those told apart",
        stands=True,
    ),
    _Flaw(
        "nexmark",
        "^python .* vs (PyFlink|Pathway)",
        "peer_floor_s",
        "the figures hold the fixed costs of a run, which are not told apart: to be measured anew",
        stands=True,
    ),
    _Flaw(
        "faucet-memory",
        "timely .* fed in rounds",
        "2026-11-27T04:53:45",
        "the peer's figure holds the harness's own list of the edges, 8 bytes an edge, 7.1 MiB in all, and each side is"
        " one process: to be measured anew",
        stands=True,
    ),
    _Flaw(
        "foreach-batch-count",
        "RocksDB$",
        "peer_changelog",
        "RocksDB as it is by default, without changelog checkpoints: with them it would write what a batch has changed,"
        " as ours does; beside those it is not recorded here",
        stands=True,
    ),
)


def _as_known_today(line: Line) -> Line:
    """A line of an older version of its bench, told as what it is.

    What idle workers use was read when they had ended, and was 0 for that.
    The two sides of `rescale` have always run one after the other, and made no pairs.
    The loop that is written by hand in `cliques` has always run on one core.
    Instructions are of several lengths of blocks, a pair for each: the pairs judge them, not medians over the lengths.
    A peer that was held up by how it was measured has no ratio; what else is wrong is a note.
    """
    told: dict[str, Any] = {}
    conditions, found = line["conditions"], line["ratio"]
    for flaw in _FLAWS:
        if flaw.has(line):
            if flaw.stands:
                told["note"] = flaw.why
            else:
                found, told = None, told | {"no_ratio": flaw.why, "paired_ratio": None, "paired_ratio_range": None}
    if line["name"] == "nexmark" and line["case"].startswith("python ") and "vs Spark" in line["case"]:
        told = {"durable": False, "peer_durable": True} | told
    if line["name"] == "rescale" and "vs Spark" in line["case"]:
        told |= {"sides": ONE_AFTER_THE_OTHER, "paired_ratio": None, "paired_ratio_range": None}
    if line["name"] == "cliques" and line["case"].endswith("vs hand loop"):
        told["peer_workers"] = 1
    if line["name"] == "join" and "instructions" in line["case"] and conditions.get("ratio_of") == "medians":
        found, told = conditions["paired_ratio"], told | {"ratio_of": PAIRS, "repeats": 1}
    left_out = line["name"] == "empty-epoch" and conditions.get("idle_cpu_percent") == 0
    kept = {key: value for key, value in conditions.items() if not (left_out and key == "idle_cpu_percent")}
    return line | {"ratio": found, "conditions": kept | told}


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
        doubts = ""
        if verdict != "not measured":
            doubts += " (noisy)" if any(map(_is_noisy, covered)) else ""
            doubts += " (see the notes)" if any("note" in line["conditions"] for line in covered) else ""
        rows.append([target.what, target.bench or "no bench yet", target.wanted, reached, f"**{verdict}**{doubts}"])
    return f"## Targets\n\n{_table(['target', 'bench', 'wanted', 'found', ''], rows, 'llrrl')}"


def _bench(lines: Sequence[Line]) -> str:
    runs = _runs(lines)
    notes = list(dict.fromkeys(line["conditions"]["note"] for line in lines if "note" in line["conditions"]))
    rows = []
    for at, (line, name) in enumerate(zip(lines, names(lines), strict=True)):
        conditions = line["conditions"]
        judged = judge(line)
        paired = conditions.get("paired_ratio_range")
        note = f" [{notes.index(conditions['note']) + 1}]" if "note" in conditions else ""
        rows.append(
            [
                name,
                *([f"{next(number for number, run in enumerate(runs, 1) if at in run)}"] if runs[1:] else []),
                line["unit"],
                _with_range(line["ours"], line["ours_range"]),
                _with_range(line["peer"], line["peer_range"]),
                f"**{ratio(line)}**{note}" + (f" ({_spread(paired, 'x')})" if paired else ""),
                f"{conditions.get('repeats', '')}",
                "; ".join(f"{goal.wanted}: {verdict}" for goal, verdict in judged),
            ]
        )
    header = ["case", *(["run"] if runs[1:] else []), "unit", "ours", "peer", "ratio (pairs)", "repeats", "target"]
    text = [_table(header, rows, "lrlrrrrl" if runs[1:] else "llrrrrl")]
    text += [f"[{number}] {note[0].upper()}{note[1:]}.\n" for number, note in enumerate(notes, 1)]
    for number, run in enumerate(runs, 1):
        title = f"Run {number}, {len(run)} cases" if runs[1:] else "Conditions"
        text.append(f"{title}: {_conditions([lines[at] for at in run])}.\n")
    return "\n".join([*text, *_own(lines)])


def _runs(lines: Sequence[Line]) -> list[list[int]]:
    """Which lines are of which run: those of one commit, build and machine that follow each other."""
    alike: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        about = {name: line["conditions"].get(name) for name in ("commit", "profile", "cpu", "cores", "pinned")}
        alike.setdefault(json.dumps(about), []).append(at)
    runs: list[list[int]] = []
    for found in alike.values():
        last: datetime | None = None
        runs.append([])
        for at in sorted(found, key=lambda at: str(lines[at]["conditions"].get("at", ""))):
            told = lines[at]["conditions"].get("at")
            time = datetime.fromisoformat(told) if told else None
            if time and last and time - last > _APART:
                runs.append([])
            runs[-1].append(at)
            last = time
    return sorted(map(sorted, runs))


def _conditions(lines: Sequence[Line]) -> str:
    """What all lines of one run were measured on."""
    every = [line["conditions"] for line in lines]
    first = min(every, key=lambda conditions: str(conditions.get("at", "")))
    versions: dict[str, dict[str, None]] = {}
    for conditions in every:
        for name, version in conditions.get("versions", {}).items():
            versions.setdefault(name, {})[version] = None
    foreign, stolen = _most(every, "foreign_cpu"), _most(every, "stolen_cpu")
    again = sum(conditions.get("pairs_again") or 0 for conditions in every)
    noisy = any(map(_is_noisy, lines))
    told = [
        ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items()),
        f"{first.get('cores')} cores of {first.get('cpu') or 'an unknown CPU'}{_pinned(first)}",
        f"{first.get('profile')} build{_commit(first.get('commit'))}",
        f"{first.get('at', '')}",
        ("CPUs of others: not measured" if foreign is None else f"others used at most {foreign:.2f} CPUs")
        + (" (**noisy**)" if noisy else ""),
        f"the host took at most {stolen:.2f} CPUs" if stolen is not None and (stolen or again) else "",
        f"{again} pairs measured again for that" if again else "",
    ]
    if first.get("quick"):
        told.append("**quick run: small sizes**")
    return "; ".join(part for part in told if part)


def _pinned(conditions: dict[str, Any]) -> str:
    """Said only where both sides may have been on other cores than those, or nobody knows."""
    if "pinned" not in conditions:
        return " (whether pinned to them is not recorded)"
    return "" if conditions["pinned"] else " (not pinned)"


def _commit(commit: str | None) -> str:
    if not commit:
        return ""
    bare = commit.removesuffix(OTHER_MODULE).removesuffix(CHANGED)
    told = f" of commit {bare}" + (" **with changes**" if CHANGED in commit else "")
    return told + (", the native module **of other code**" if commit.endswith(OTHER_MODULE) else "")


def _own(lines: Sequence[Line]) -> list[str]:
    """The other conditions: what all lines share, then what each has of its own."""
    every = [line["conditions"] for line in lines]
    common = {key: value for key, value in every[0].items() if all(key in c and c[key] == value for c in every)}
    shared = {key: value for key, value in common.items() if key not in _TOLD}
    text = [f"All cases: {_pairs(shared)}.\n"] if shared else []
    each = []
    for line, name in zip(lines, names(lines), strict=True):
        own = {k: v for k, v in line["conditions"].items() if k not in _TOLD and k not in shared}
        if line["conditions"].get("ratio_of") == PAIRS:
            own["ratio"] = "the median of the pairs"
        if own:
            each.append(f"- {name}: {_pairs(own)}\n")
    return [*text, "".join(each)] if each else text


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
