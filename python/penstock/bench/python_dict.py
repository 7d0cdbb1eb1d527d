"""``python-state``: a running mean per key by a Python function, beside a dict in a loop.

Both sides call the same function once per row, take the same Arrow batches and give Arrow batches back. The loop is
what one writes by hand: ``to_pylist``, a dict, ``zip``, ``pa.array``. Checked outside the measured part: the same rows.
The functions below the line serve a bench on Spark as well: the same mean as written for ``applyInPandasWithState``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.bench.measure import Emit, Options, Tell, compare, line
from penstock.flow import Flow

__all__ = ["batches", "dict_loop", "flow", "mean", "mean_in_pandas", "run", "stateful_map"]

INPUT = pa.schema([("k", pa.int64()), ("v", pa.float64())])
OUTPUT = pa.schema([("k", pa.int64()), ("mean", pa.float64())])
#: For ``applyInPandasWithState``.
OUTPUT_DDL, STATE_DDL = "k bigint, mean double", "n bigint, total double"
_BATCH_ROWS = 65_536


def mean(state: tuple[int, float] | None, k: int, v: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """The user's function of both sides."""
    n, total = state or (0, 0.0)
    n += 1
    total += v
    return (n, total), (k, total / n)


def batches(keys: int, rows: int, batch_rows: int = _BATCH_ROWS) -> list[pa.RecordBatch]:
    """Rows with uniform keys; the same for the same arguments."""
    import numpy as np

    rng = np.random.default_rng(7)
    columns = [pa.array(rng.integers(0, keys, rows)), pa.array(rng.random(rows))]
    made: list[pa.RecordBatch] = pa.Table.from_arrays(columns, schema=INPUT).to_batches(max_chunksize=batch_rows)
    return made


def dict_loop(source: Sequence[pa.RecordBatch], states: dict[int, Any] | None = None) -> Iterator[pa.RecordBatch]:
    """The peer; `states` keeps the keys from call to call."""
    states = {} if states is None else states
    for batch in source:
        rows: list[tuple[int, float]] = []
        get, append = states.get, rows.append
        for k, v in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            state, row = mean(get(k), k, v)
            states[k] = state
            append(row)
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, OUTPUT.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=OUTPUT)


def flow() -> Flow:
    """The same as a flow."""
    return Flow(INPUT).key_by("k").stateful_map(mean, schema=OUTPUT)


def stateful_map(source: Sequence[pa.RecordBatch], workers: int = 1) -> Iterator[pa.RecordBatch]:
    """Ours."""
    return flow().run(iter(source), workers=workers)


def run(options: Options, emit: Emit, tell: Tell) -> None:
    """Measure; a case is a number of keys."""
    cases = [200_000] if options.quick else [10_000, 200_000, 1_000_000]
    budget = options.budget(len(cases), quick=30, full=120)
    rows = 400_000 if options.quick else 2_000_000
    for keys in cases:
        tell(f"{keys:,} keys")
        source = batches(keys, rows)
        ours, peer = (pa.Table.from_batches(side(source)) for side in (stateful_map, dict_loop))
        if not _ordered(ours).equals(_ordered(peer)):
            raise AssertionError("the two sides do not give the same rows")
        del ours, peer
        paired = compare(
            budget, functools.partial(_rate, stateful_map, source), functools.partial(_rate, dict_loop, source)
        )
        conditions = {"keys": keys, "rows": rows, "batch_rows": _BATCH_ROWS, "workers": 1, "journal": False}
        emit(line("python-state", f"w1 keys={keys} vs dict loop", "rows/s", "higher", paired, options, conditions))


def _rate(side: Any, source: Sequence[pa.RecordBatch]) -> float:
    begin = time.perf_counter()
    rows: int = sum(batch.num_rows for batch in side(source))
    return rows / (time.perf_counter() - begin)


def _ordered(table: pa.Table) -> pa.Table:
    return table.combine_chunks().sort_by([("k", "ascending"), ("mean", "ascending")])


def mean_in_pandas(key: Any, frames: Any, state: Any) -> Any:
    """The mean after each batch, written for Spark's ``applyInPandasWithState``; takes `OUTPUT_DDL` and `STATE_DDL`."""
    import pandas as pd  # type: ignore[import-untyped]

    n, total = state.getOption or (0, 0.0)
    for frame in frames:
        n += len(frame)
        total += float(frame["v"].sum())
    state.update((n, total))
    yield pd.DataFrame({"k": [key[0]], "mean": [total / n]})
