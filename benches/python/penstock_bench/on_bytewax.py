"""bytewax as a peer: a Python that has it, a process of ``benches/peers/on_bytewax.py``, and what both sides answer.

The process runs a query of that program on the Arrow files of a folder, once for each call, and ends with the block
that started it. An answer is a number of rows and a checksum of them that their order does not change.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from penstock_bench import core
from penstock_bench.measure import Tell

__all__ = ["PEERS", "Answer", "answer", "python", "side", "version"]

#: Folder of a virtual environment of ``requirements/peers.txt``.
PEERS = "PENSTOCK_PEERS"
_PACKAGE = "bytewax"

#: Number and checksum of rows.
Answer = tuple[int, int]


def answer(batches: Sequence[pa.RecordBatch]) -> Answer:
    """What ``benches/rust/src/nexmark/events.rs`` makes of rows, on whole columns."""
    import numpy as np

    count, total = 0, 0
    with np.errstate(over="ignore"):
        for batch in batches:
            rows = np.full(batch.num_rows, 0x1234_5678, dtype=np.uint64)
            for column in batch.columns:
                if pa.types.is_floating(column.type):
                    words = column.to_numpy(zero_copy_only=False).view(np.uint64)
                elif pa.types.is_integer(column.type):
                    words = column.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
                else:
                    words = np.array([_word(text) for text in column.to_pylist()], dtype=np.uint64)
                rows = (rows ^ words) * np.uint64(0x9E37_79B9_7F4A_7C15)
                rows ^= rows >> np.uint64(29)
            count, total = count + batch.num_rows, (total + int(rows.sum(dtype=np.uint64))) % (1 << 64)
    return count, total


def _word(text: str) -> int:
    word = 7
    for byte in text.encode():
        word = (word * 31 + byte) % (1 << 64)
    return word


def python(tell: Tell) -> str | None:
    """The Python that has bytewax; without one, says what to do."""
    if (folder := os.environ.get(PEERS)) is not None:
        found = shutil.which("python", path=str(Path(folder) / ("Scripts" if os.name == "nt" else "bin")))
        if found is None:
            tell(f"without bytewax: {PEERS}={folder} is no virtual environment; see requirements/peers.txt")
        return found
    if importlib.util.find_spec("bytewax") is not None:
        return sys.executable
    tell(f"without bytewax: make an environment of requirements/peers.txt and let {PEERS} name its folder")
    return None


def version() -> str:
    """The release that ``requirements/peers.txt`` names."""
    for text in (core.CHECKOUT / "requirements" / "peers.txt").read_text().splitlines():
        name, _, number = text.partition("==")
        if name == _PACKAGE:
            return number
    return "unknown"


@contextlib.contextmanager
def side(
    python: str, folder: Path, query: str, params: Mapping[str, int]
) -> Iterator[Callable[[], tuple[float, Answer]]]:
    """A process that gives, each time it is asked, the seconds and the answer of one run of `query`."""
    program = str(core.CHECKOUT / "benches" / "peers" / "on_bytewax.py")
    with core.side([python, program], {"folder": str(folder), "query": query} | dict(params)) as ask:

        def once() -> tuple[float, Answer]:
            told = ask()
            return told["seconds"], (told["rows"], told["sum"])

        yield once
