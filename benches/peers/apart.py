"""What the Python programs of this folder share: the talk with the bench, and the answer to a query.

A program reads a line of JSON that says what to run, then runs it once for each further line and answers each with a
line of JSON: seconds, rows and a checksum that does not depend on the order of rows (that of
``benches/rust/src/nexmark/events.rs``). Needs nothing but Python, as each program has an environment of its own.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["COLUMNS", "TEXTS", "Answer", "answer", "serve"]

#: Number and checksum of rows.
Answer = tuple[int, int]

#: Columns of each table of NEXMark; those of `TEXTS` are text, the others integers.
COLUMNS = {
    "person": ["id", "name", "city", "state", "date_time"],
    "auction": ["id", "seller", "category", "reserve", "date_time", "expires"],
    "bid": ["auction", "bidder", "price", "date_time"],
}
TEXTS = ("name", "city", "state")
_MASK = (1 << 64) - 1


def answer(rows: Iterable[tuple[Any, ...]]) -> Answer:
    """Number and checksum of rows."""
    count, total = 0, 0
    for row in rows:
        value = 0x1234_5678
        for cell in row:
            if isinstance(cell, str):
                word = 7
                for byte in cell.encode():
                    word = (word * 31 + byte) & _MASK
            elif isinstance(cell, float):
                word = int.from_bytes(struct.pack("<d", cell), "little")
            else:
                word = cell & _MASK
            value = ((value ^ word) * 0x9E37_79B9_7F4A_7C15) & _MASK
            value ^= value >> 29
        count, total = count + 1, (total + value) & _MASK
    return count, total


def serve(prepare: Callable[[dict[str, Any]], Callable[[], tuple[float, Answer]]]) -> None:
    """Answer until the input ends: `prepare` takes what to run, what it returns runs it once."""
    # What a library prints must not stand among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    once = prepare(json.loads(sys.stdin.readline()))
    for _ in sys.stdin:
        seconds, (rows, total) = once()
        print(json.dumps({"seconds": seconds, "rows": rows, "sum": total}), file=answers, flush=True)
