"""What a run of ordered work is asked for, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["OperatorStats", "Options", "Stats"]


@dataclass(frozen=True)
class Options:
    """What a run was asked for, checked."""

    workers: int
    in_flight: int | None
    in_flight_bytes: int
    mode: str
    chunk: int | None
    timeout: float | None
    scheduler: str = "adaptive"
    queue: str = "hybrid"
    reads: str = "aside"


@dataclass(frozen=True)
class OperatorStats:
    """What one operator of a run has done; all but the name is counted beside the caller's thread only.

    Attributes
    ----------
    name : str
        Its steps.
    chunks_in, chunks_out, values_in, values_out : int
        What it has taken and given.
    busy_s : float
        Seconds that workers spent in it.
    waiting, workers : int
        Chunks that wait before it, and workers in it, now.
    selectivity : float or None
        Values out per value in, a moving average.
    scheduler : str
        Which one the run uses now.
    """

    name: str
    chunks_in: int = 0
    chunks_out: int = 0
    values_in: int = 0
    values_out: int = 0
    busy_s: float = 0.0
    waiting: int = 0
    workers: int = 0
    selectivity: float | None = None
    scheduler: str = ""


@dataclass(frozen=True)
class Stats:
    """What a run has done so far.

    Attributes
    ----------
    mode : str
        Where functions run now: "inline", "threads" or "processes".
    why : str
        Why there.
    items_in, values_out : int
        Items read from the input; results and errors given out by finished chunks.
    chunks, errors : int
        Chunks finished; exceptions among the results.
    workers : int
        How many work in the present mode; 1 inline.
    chunk_items : int
        Items of the chunk read last.
    in_flight : int
        Items read whose results have not been given out.
    rates : dict of str to float
        Items per second by mode, where "auto" has measured.
    steps : tuple of OperatorStats
        What each operator has done.
    """

    mode: str
    why: str
    items_in: int = 0
    values_out: int = 0
    chunks: int = 0
    errors: int = 0
    workers: int = 1
    chunk_items: int = 0
    in_flight: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    steps: tuple[OperatorStats, ...] = ()
