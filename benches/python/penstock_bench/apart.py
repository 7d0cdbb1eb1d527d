"""Peers in Python that have environments of their own: where they are, a process of one, and what both sides answer.

A peer is a program of ``benches/peers`` and a package that it needs. `PEERS` names folders of virtual environments; the
first that has the package runs the program. The process runs one query on the files of a folder, once for each call,
and ends with the block that started it. An answer is a number of rows and a checksum of them that their order does not
change.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock_bench import core
from penstock_bench.measure import Tell

__all__ = ["BYTEWAX", "PATHWAY", "PEERS", "PYFLINK", "Answer", "Found", "Peer", "answer", "find", "side"]

#: Folders of virtual environments, one for each of the requirements that peers name, as in ``PATH``.
PEERS = "PENSTOCK_PEERS"


@dataclass(frozen=True)
class Peer:
    """A peer: its name and package, its program, the file of pinned packages that it needs, whether it needs Java."""

    name: str
    package: str
    program: str
    requirements: str
    java: bool = False


BYTEWAX = Peer("bytewax", "bytewax", "on_bytewax.py", "requirements/peers.txt")
PATHWAY = Peer("Pathway", "pathway", "on_pathway.py", "requirements/peers-pathway.txt")
PYFLINK = Peer("PyFlink", "apache-flink", "on_flink.py", "requirements/peers-flink.txt", java=True)


@dataclass(frozen=True)
class Found:
    """A peer that can run: its Python, and the release of its package there."""

    peer: Peer
    python: str
    version: str


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


def find(peer: Peer, tell: Tell) -> Found | None:
    """Where a peer can run; where it cannot, says in one line what to do, and returns None."""
    missing = f"without {peer.name}: "
    how = f"make an environment of {peer.requirements} and let {PEERS} name its folder"
    if peer.java and _java() is None:
        tell(f"{missing}it needs Java 17: put java on PATH or let JAVA_HOME name it")
        return None
    pythons = [sys.executable]
    if (folders := os.environ.get(PEERS)) is not None:
        pythons = []
        for folder in filter(None, folders.split(os.pathsep)):
            found = shutil.which("python", path=str(Path(folder) / ("Scripts" if os.name == "nt" else "bin")))
            if found is None:
                tell(f"{missing}{PEERS} names {folder}, which is no virtual environment; {how}")
                return None
            pythons.append(found)
    for python in pythons:
        if (version := _version(python, peer.package)) is not None:
            return Found(peer, python, version)
    tell(missing + how)
    return None


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")


def _version(python: str, package: str) -> str | None:
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    told = subprocess.run([python, "-c", ask, package], capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else None


@contextlib.contextmanager
def side(
    found: Found, folder: Path, query: str, more: Mapping[str, Any]
) -> Iterator[Callable[[], tuple[float, Answer]]]:
    """A process that gives, each time it is asked, the seconds and the answer of one run of `query`."""
    program = str(core.CHECKOUT / "benches" / "peers" / found.peer.program)
    with core.side([found.python, program], {"folder": str(folder), "query": query} | dict(more)) as ask:

        def once() -> tuple[float, Answer]:
            told = ask()
            return told["seconds"], (told["rows"], told["sum"])

        yield once
