"""How all pictures of penstock look, and how they become bytes.

Owns: fonts, common colours, the frame of a panel. Invariant: equal figures give equal bytes. Needs matplotlib, imported
only when something is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GRID", "STYLE", "TEXT", "encode", "frame", "svg_text"]

TEXT, GRID = "#222222", "#e4e4e4"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": TEXT,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
    # Names of users' may hold dollars.
    "text.parse_math": False,
}


def frame(panels: Iterable[Any]) -> None:
    """Give panels a grid behind what they show, and no border above and at the right."""
    for axes in panels:
        axes.grid(True, color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def encode(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The bytes of a figure, without the time at which they were made."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(STYLE):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, facecolor="white", metadata=metadata)
    return buffer.getvalue()


def svg_text(figure: Figure) -> str:
    """A figure as SVG; without the blanks with which matplotlib ends path data."""
    return "".join(f"{text.rstrip()}\n" for text in encode(figure, "svg").decode().splitlines())
