"""Results as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.report._timeline import figure_text
from penstock_bench.machine import NOISY
from penstock_bench.measure import Line
from penstock_bench.targets import judge

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["figure", "ratio", "table"]


def table(name: str, lines: list[Line]) -> Table:
    """The results of one bench: green where ours is better or reaches its target, red where it does not."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=name, title_justify="left", title_style="bold")
    made.add_column("case", overflow="fold")
    for title in ("ours", "peer", "unit", "ratio", "target"):
        made.add_column(title, justify="left" if title in ("unit", "target") else "right", no_wrap=True)
    for line in lines:
        judged = judge(line)
        good = all(verdict != "missed" for _, verdict in judged) if judged else (line["ratio"] or 1.0) >= 1
        target = "; ".join(f"{goal.wanted} {verdict}" for goal, verdict in judged)
        made.add_row(
            line["case"],
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
