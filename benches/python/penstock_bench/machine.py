"""What a figure was taken on: cores, CPU, load, and how much of them others used, or the host took, meanwhile.

Owns: pinning, and reading ``/proc``; elsewhere these are None. The twin of ``benches/rust/src/machine.rs``, which
says the same of the core's benches; this one also counts the processes that this one has started, such as Spark's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock import _cpus

__all__ = ["CORES", "NOISY", "Meter", "Usage", "cores", "cpu", "load", "pinned", "stolen", "worst"]

#: How many cores the benches are pinned to, where the system has that many.
CORES = 2

#: A figure is doubtful when others used more CPUs than this, or the machine's host took more.
NOISY = 0.05

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@contextlib.contextmanager
def pinned(count: int = CORES) -> Iterator[list[int]]:
    """Keep this thread, and what it starts, on the first few CPUs that it may use.

    Parameters
    ----------
    count : int, default 2
        How many CPUs at most.

    Yields
    ------
    list of int
        The CPUs; empty where the system cannot pin.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield []
        return
    before = os.sched_getaffinity(0)
    chosen = sorted(before)[:count]
    os.sched_setaffinity(0, chosen)
    try:
        yield chosen
    finally:
        os.sched_setaffinity(0, before)


def cores() -> int:
    """How many CPUs this thread may use."""
    return _cpus.of_process()


def cpu() -> str | None:
    """The name of the CPU, where the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None


def load() -> float | None:
    """The load average of the last minute, where the system tells."""
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


class Usage(NamedTuple):
    """CPU time as a number of busy CPUs; None where the system does not tell, or the time was too short to say.

    Attributes
    ----------
    own : float or None
        Of this process and everything that it has started.
    foreign : float or None
        What others used of the CPUs that this thread may use.
    stolen : float or None
        What the host of this machine gave to other machines while work waited here. It comes in bursts.
    """

    own: float | None = None
    foreign: float | None = None
    stolen: float | None = None


def worst(*usages: Usage) -> Usage:
    """The greatest of each figure, of sides that were metered for themselves.

    Examples
    --------
    >>> worst(Usage(1.0, 0.2), Usage(0.5, 0.3, 0.1))
    Usage(own=1.0, foreign=0.3, stolen=0.1)
    """
    return Usage(*(max((one for one in each if one is not None), default=None) for each in zip(*usages, strict=True)))


class Meter:
    """CPU time between two moments."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._clocks = _clocks()
        self._own = _tree_seconds()

    def stop(self) -> Usage:
        """Return what was used since the beginning."""
        wall = time.monotonic() - self._begin
        clocks, own = _clocks(), _tree_seconds()
        if wall < 0.1 or self._own is None or own is None:
            return Usage()
        used = max(0.0, own - self._own) / wall
        if self._clocks is None or clocks is None:
            return Usage(round(used, 3))
        busy, lost = (max(0.0, after - before) / wall for before, after in zip(self._clocks, clocks, strict=True))
        return Usage(round(used, 3), round(max(0.0, busy - used), 3), round(lost, 3))


def stolen() -> float | None:
    """Seconds that the machine's host has taken from the CPUs of this thread so far, where the system tells."""
    clocks = _clocks()
    return None if clocks is None else clocks[1]


def _clocks() -> tuple[float, float] | None:
    """Seconds for which the CPUs of this thread worked here, and for which the host had taken them."""
    try:
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = (_PROC / "stat").read_text().splitlines()
    except (OSError, AttributeError):
        return None
    busy = taken = 0
    for line in lines:
        name, *fields = line.split()
        if name in allowed:
            # user, nice, system, idle, iowait, irq, softirq, steal
            busy += sum(int(fields[at]) for at in (0, 1, 2, 5, 6) if at < len(fields))
            taken += sum(int(field) for field in fields[7:8])
    return busy / _TICKS, taken / _TICKS


def _tree_seconds() -> float | None:
    """Seconds of CPU of this process, its descendants, and the ended children that they have waited for."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        fields = text.rpartition(")")[2].split()
        number = int(path.parent.name)
        parents[number] = int(fields[1])
        used[number] = sum(int(field) for field in fields[11:15])
    here = os.getpid()
    if here not in used:
        return None
    children: dict[int, list[int]] = {}
    for number, parent in parents.items():
        children.setdefault(parent, []).append(number)
    total, waiting = 0, [here]
    while waiting:
        number = waiting.pop()
        total += used[number]
        waiting += children.get(number, [])
    return total / _TICKS
