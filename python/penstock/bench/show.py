"""Results as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.bench.measure import Line
from penstock.bench.targets import judge

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["figure", "table"]

_NOISY = 0.05


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
        good = all(verdict != "missed" for _, verdict in judged) if judged else line["ratio"] >= 1
        target = "; ".join(f"{goal.wanted} {verdict}" for goal, verdict in judged)
        made.add_row(
            line["case"],
            figure(line["ours"]),
            figure(line["peer"]),
            line["unit"],
            Text(f"{figure(line['ratio'])}x", style="green" if good else "red"),
            target,
        )
    noisy = max((line["conditions"].get("foreign_cpu") or 0.0 for line in lines), default=0.0)
    if noisy > _NOISY:
        made.caption = f"others used up to {noisy:.2f} CPUs meanwhile: repeat it on a quiet machine"
        made.caption_justify = "left"
    return made


def figure(value: float) -> str:
    """A figure with three digits that say something.

    Examples
    --------
    >>> [figure(value) for value in (0.01234, 1.2345, 123456.7, 2.0)]
    ['0.0123', '1.23', '123,457', '2']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
