"""Results as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.report._timeline import figure_text
from penstock_bench.machine import NOISY
from penstock_bench.measure import Line
from penstock_bench.targets import judge

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["figure", "names", "ratio", "table"]

#: Conditions that tell cases of one name apart.
_TELLING = ("edges", "sweep")


def table(name: str, lines: list[Line]) -> Table:
    """The results of one bench: green where ours is better or reaches its target, red where it does not."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=name, title_justify="left", title_style="bold")
    made.add_column("case", overflow="fold")
    for title in ("ours", "peer", "unit", "ratio", "target"):
        made.add_column(title, justify="left" if title in ("unit", "target") else "right", no_wrap=True)
    for line, case in zip(lines, names(lines), strict=True):
        judged = judge(line)
        good = all(verdict != "missed" for _, verdict in judged) if judged else (line["ratio"] or 1.0) >= 1
        target = "; ".join(f"{goal.wanted} {verdict}" for goal, verdict in judged)
        made.add_row(
            case,
            figure(line["ours"]),
            figure(line["peer"]),
            line["unit"],
            Text(ratio(line), style="green" if good else "red"),
            target,
        )
    conditions = [line["conditions"] for line in lines]
    foreign, stolen = (
        max((one.get(name) or 0.0 for one in conditions), default=0.0) for name in ("foreign_cpu", "stolen_cpu")
    )
    if any(one.get("noisy", (one.get("foreign_cpu") or 0.0) > NOISY) for one in conditions):
        taken = f" and the host of this machine took up to {stolen:.2f}" if stolen else ""
        made.caption = f"others used up to {foreign:.2f} CPUs meanwhile{taken}: repeat it on a quiet machine"
        made.caption_justify = "left"
    return made


def names(lines: Sequence[Line]) -> list[str]:
    """What the cases are called: those of one name by what tells them apart, too.

    Examples
    --------
    >>> names([{"case": "a", "conditions": {"edges": 1200}}, {"case": "a", "conditions": {"edges": 7}}])
    ['a (edges 1,200)', 'a (edges 7)']
    """
    often = Counter(line["case"] for line in lines)
    made = []
    for at, line in enumerate(lines):
        case = line["case"]
        if often[case] > 1:
            same = [one["conditions"] for one in lines if one["case"] == case]
            # None may lack it, and no two be equal.
            telling = (key for key in _TELLING if len({one.get(key) for one in same} - {None}) == len(same))
            if (key := next(telling, None)) is not None:
                value = line["conditions"][key]
                case += f" ({key} {value if isinstance(value, str) else f'{value:,}'})"
            else:
                case += f" ({1 + sum(one['case'] == line['case'] for one in lines[:at])} of {len(same)})"
        made.append(case)
    return made


def ratio(line: Line) -> str:
    """The ratio of a result, or why it has none.

    Examples
    --------
    >>> ratio({"ratio": 2.0}), ratio({"ratio": None, "conditions": {"no_ratio": "not above rest"}})
    ('2x', 'not above rest')
    """
    return str(line["conditions"]["no_ratio"]) if line["ratio"] is None else f"{figure(line['ratio'])}x"


def figure(value: float) -> str:
    """A figure with three digits that say something.

    Examples
    --------
    >>> [figure(value) for value in (0.01234, 1.2345, 123456.7, 2.0)]
    ['0.0123', '1.23', '123,457', '2']
    """
    return figure_text(value)
