"""``ordered-map``: `penstock.ordered_map` without a setting, beside what people map with in order today.

Functions of 1, 10, 100 µs and 1 ms, of two kinds: a loop in Python, which holds the interpreter lock, and SHA-256 of a
buffer, which releases it. Peers: the builtin ``map``; ``multiprocessing.Pool.imap`` with its chunk tuned by hand,
beforehand; executors of ``concurrent.futures`` with a bounded window, of threads and of processes; joblib's generator.
Each side is timed from the call to the last result, its pools included, on the same function and items; what takes too
long per item gets fewer of them, so figures are rates. Checked: the results, and their order.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from penstock.errors import EngineError
from penstock_bench import machine
from penstock_bench.measure import Emit, Options, Paired, Tell, going, line

__all__ = ["hold", "release", "run"]

NAME = "ordered-map"
_COSTS_US = (1, 10, 100, 1000)
_QUICK_US = (10, 1000)
#: Seconds that the builtin map takes for a case.
_FULL_S, _QUICK_S = 3.0, 0.7
#: How many calls an executor has in hand, per worker. Its callers tune that; more than this changed nothing.
_WINDOW = 8
_CHUNKS = (1, 8, 64, 512)
#: A buffer below this is hashed with the lock held.
_LEAST_BYTES = 2048

Work = Callable[[int], int]


def hold(loops: int, item: int) -> int:
    """Compute for so many turns of a loop, holding the interpreter lock."""
    value = item
    for _ in range(loops):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
    return value


_buffers: dict[int, bytes] = {}


def release(size: int, item: int) -> int:
    """Hash so many bytes, releasing the interpreter lock."""
    held = _buffers.get(size)
    if held is None:
        held = _buffers[size] = bytes(size)
    return int.from_bytes(hashlib.sha256(held).digest()[:4], "little") ^ item


@dataclass(frozen=True)
class Job:
    """A function of one of the kinds, of about the wanted cost; pickles to a few bytes."""

    kind: str
    size: int

    def __call__(self, item: int) -> int:
        return hold(self.size, item) if self.kind == "holding" else release(self.size, item)


@dataclass
class _Side:
    """One way to map, with the number of items that it gets and what it reached."""

    name: str
    map: Callable[[Work, Iterable[int]], Iterable[int]]
    items: int
    rates: list[float]
    more: dict[str, Any]


def run(
    options: Options,
    emit: Emit,
    tell: Tell,
    costs: Iterable[int] | None = None,
    seconds: float | None = None,
) -> None:
    """Run the bench; `costs` and `seconds` of a case are for tests."""
    chosen = tuple(costs or (_QUICK_US if options.quick else _COSTS_US))
    serial_s = seconds or (_QUICK_S if options.quick else _FULL_S)
    cases = [(cost, kind) for cost in chosen for kind in ("holding", "releasing")]
    budget = options.budget(len(cases), quick=24, full=160)
    try:
        _cases(cases, serial_s, budget, options, emit, tell)
    finally:
        _end_loky()


def _end_loky() -> None:
    """End the processes that joblib keeps for later."""
    if "joblib" in sys.modules:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True)


def _cases(
    cases: Iterable[tuple[int, str]], serial_s: float, budget: float, options: Options, emit: Emit, tell: Tell
) -> None:
    workers = machine.cores()
    for cost, kind in cases:
        job, real_us = _calibrated(kind, cost)
        tell(f"{cost} µs, {kind} the lock")
        most = max(8, int(serial_s * 1e6 / real_us))
        expected = list(map(job, range(most)))
        sides = _sides(job, workers, most, serial_s, expected, tell)
        usage = _measure(sides, job, expected, budget, options)
        ours = sides[0]
        for peer in sides[1:]:
            paired = Paired(ours.rates, peer.rates[: len(ours.rates)], *usage)
            conditions = {
                "workers": workers,
                "item_us": round(real_us, 3),
                "items": ours.items,
                "peer_items": peer.items,
                "timed": "from the call to the last result, pools included",
            }
            case = f"{cost} us {kind} the lock vs {peer.name}"
            emit(line(NAME, case, "items/s", "higher", paired, options, conditions | ours.more | peer.more))


def _measure(sides: list[_Side], job: Job, expected: list[int], budget: float, options: Options) -> machine.Usage:
    """Turns of all sides, each time in another order, until the time is spent; returns what the CPUs did meanwhile."""
    begin, longest, meter = time.monotonic(), 0.0, machine.Meter()
    least = 1 if options.quick else 3
    while going(len(sides[0].rates), least, time.monotonic() - begin + longest <= budget, options.left()):
        turn = time.monotonic()
        shift = len(sides[0].rates) % len(sides)
        for side in sides[shift:] + sides[:shift]:
            side.rates.append(_rate(side, job, expected))
        longest = max(longest, time.monotonic() - turn)
    return meter.stop()


def _rate(side: _Side, job: Job, expected: list[int]) -> float:
    begin = time.perf_counter()
    got = list(side.map(job, range(side.items)))
    seconds = time.perf_counter() - begin
    if got != expected[: side.items]:
        raise EngineError(f"{NAME}: {side.name} gave other results than the builtin map; the figures are void")
    return side.items / seconds


def _sides(job: Job, workers: int, most: int, serial_s: float, expected: list[int], tell: Tell) -> list[_Side]:
    chunk = _tuned(job, workers, min(most, max(64, most // 8)))
    window = workers * _WINDOW
    more: dict[str, Any] = {}
    found = [
        _Side("ours", _ours(more), most, [], more),
        _Side("serial map", map, most, [], {}),
        _Side(f"Pool.imap, chunk {chunk} by hand", _pool(workers, chunk), most, [], {"tried": list(_CHUNKS)}),
        _Side(f"thread executor, window {window}", _executor(ThreadPoolExecutor, workers, window), most, [], {}),
        _Side(f"process executor, window {window}", _executor(_processes, workers, window), most, [], {}),
    ]
    if importlib.util.find_spec("joblib") is None:
        tell("joblib is not installed: its cases are left out (pip install joblib)")
    else:
        import joblib

        version = {"versions": {"joblib": joblib.__version__}}
        backend = "loky" if job.kind == "holding" else "threading"
        found.append(_Side(f"joblib generator, {backend}", _joblib(workers, backend), most, [], version))
    for side in found[3:]:
        # A call for each item costs these up to 0.1 ms: they get what they can do in the time of the others.
        trial = min(most, 256)
        begin = time.perf_counter()
        list(side.map(job, range(trial)))
        each = (time.perf_counter() - begin) / trial
        side.items = max(min(most, 8), min(most, int(serial_s / each)))
    return found


def _calibrated(kind: str, cost_us: int) -> tuple[Job, float]:
    """A job of about this cost, and what it really costs in microseconds."""
    size = 64 if kind == "holding" else 1 << 16
    least = 1 if kind == "holding" else _LEAST_BYTES
    for _ in range(4):
        size = max(least, round(size * cost_us / _cost_us(Job(kind, size))))
    job = Job(kind, size)
    return job, _cost_us(job)


def _cost_us(job: Job) -> float:
    """Microseconds of a call in a builtin map, the best of a few."""
    best = float("inf")
    for _ in range(5):
        count, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < 0.004:
            count += len(list(map(job, range(16))))
        best = min(best, spent / count * 1e6)
    return best


def _ours(more: dict[str, Any]) -> Callable[[Work, Iterable[int]], Iterator[int]]:
    import penstock as pk

    def mapped(work: Work, items: Iterable[int]) -> Iterator[int]:
        with pk.ordered_map(work, items) as out:
            yield from out
            stats = out.stats()
            more.update(mode=stats.mode, why=stats.why, chunk_items=stats.chunk_items)

    return mapped


def _pool(workers: int, chunk: int) -> Callable[[Work, Iterable[int]], Iterator[int]]:
    def mapped(work: Work, items: Iterable[int]) -> Iterator[int]:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            yield from pool.imap(work, items, chunk)

    return mapped


def _tuned(job: Job, workers: int, items: int) -> int:
    """The best of some chunks; choosing costs the peer nothing."""
    found: dict[int, float] = {}
    for chunk in _CHUNKS:
        if chunk == 1 or chunk * workers * 4 <= items:
            count = items if chunk > 1 else min(items, 2_000)
            begin = time.perf_counter()
            list(_pool(workers, chunk)(job, range(count)))
            found[chunk] = (time.perf_counter() - begin) / count
    return min(found, key=found.__getitem__)


def _processes(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))


def _executor(
    make: Callable[[int], Executor], workers: int, window: int
) -> Callable[[Work, Iterable[int]], Iterator[int]]:
    def mapped(work: Work, items: Iterable[int]) -> Iterator[int]:
        rest = iter(items)
        with make(workers) as executor:
            begun: collections.deque[Future[int]] = collections.deque(
                executor.submit(work, item) for item in itertools.islice(rest, window)
            )
            while begun:
                yield begun.popleft().result()
                begun.extend(executor.submit(work, item) for item in itertools.islice(rest, 1))

    return mapped


def _joblib(workers: int, backend: str) -> Callable[[Work, Iterable[int]], Iterator[int]]:
    import joblib

    def mapped(work: Work, items: Iterable[int]) -> Iterator[int]:
        parallel = joblib.Parallel(n_jobs=workers, backend=backend, return_as="generator")
        yield from parallel(joblib.delayed(work)(item) for item in items)

    return mapped
