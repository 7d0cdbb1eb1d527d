"""``python-state``: a running mean per key by a Python function, beside a dict in a loop and bytewax.

Both sides call the same function once per row. The loop takes the same Arrow batches and gives Arrow batches back, and
is what one writes by hand: ``to_pylist``, a dict, ``zip``, ``pa.array``. bytewax (``stateful_map``, a process of its
own) has its rows as tuples before the clock starts, and gives tuples. Checked outside the measured part: the same rows.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from penstock.errors import EngineError
from penstock_bench import apart
from penstock_bench.measure import Emit, Options, Tell, compare, line

__all__ = ["INPUT", "OUTPUT", "beside_bytewax", "beside_dict", "newest", "run", "running_mean"]

NAME = "python-state"
#: Spark DDL of what goes in and comes out.
INPUT, OUTPUT = "k bigint, v bigint", "k bigint, n bigint, mean double"
#: Rows by keys.
FULL = {10_000: 2_000_000, 200_000: 2_000_000, 1_000_000: 5_000_000}
QUICK = {200_000: 400_000}
#: Keys and rows beside bytewax.
BESIDE_BYTEWAX, BESIDE_BYTEWAX_QUICK = (200_000, 1_000_000), (200_000, 100_000)
_BLOCK_ROWS = 65_536


def running_mean(state: tuple[int, int] | None, k: int, v: int) -> tuple[tuple[int, int], tuple[int, int, float]]:
    """The user's function of both sides: state and row to state and row."""
    n, total = state if state is not None else (0, 0)
    n += 1
    total += v
    return (n, total), (k, n, total / n)


def run(options: Options, emit: Emit, tell: Tell) -> None:
    """Run the bench: a case is a number of keys."""
    cases = QUICK if options.quick else FULL
    budget = options.budget(len(cases) + 1, quick=25, full=80)
    for keys, rows in cases.items():
        tell(f"{keys:,} keys")
        beside_dict(NAME, keys, rows, budget, options, emit)
    if (found := apart.find(apart.BYTEWAX, tell)) is not None:
        keys, rows = BESIDE_BYTEWAX_QUICK if options.quick else BESIDE_BYTEWAX
        tell(f"{keys:,} keys, beside bytewax")
        beside_bytewax(found, keys, rows, budget, options, emit)


def beside_dict(name: str, keys: int, rows: int, budget: float, options: Options, emit: Emit) -> None:
    """Run one case of the bench `name`, from empty state to the last row.

    Raises
    ------
    EngineError
        When the two sides do not give the same rows.
    """
    import penstock as pk

    blocks = _blocks(keys, rows)
    flow = pk.Flow(INPUT).key_by("k").stateful_map(running_mean, schema=OUTPUT)
    schema = flow.output_schema

    def ours() -> pa.Table:
        return pa.Table.from_batches(list(flow.run(blocks, workers=1)), schema)

    def peer() -> pa.Table:
        return pa.Table.from_batches(list(_loop(blocks, schema)), schema)

    if not _ordered(ours()).equals(_ordered(peer())):
        raise EngineError(f"{name}: the means differ from those of a dict; the figures are void")
    paired = compare(budget, _rate(ours, rows), _rate(peer, rows), warm=0, left=options.left)
    conditions = {"rows": rows, "block_rows": _BLOCK_ROWS, "journal": False}
    case = f"stateful_map in this process, w1 keys={keys} vs dict loop with the same function"
    emit(line(name, case, "rows/s", "higher", paired, options, conditions))


def beside_bytewax(peer: apart.Found, keys: int, rows: int, budget: float, options: Options, emit: Emit) -> None:
    """Run the case beside bytewax, of the environment of `peer`, from empty state to the last row.

    Raises
    ------
    EngineError
        When the two sides do not give the same rows.
    """
    import penstock as pk

    blocks = _blocks(keys, rows)
    flow = pk.Flow(INPUT).key_by("k").stateful_map(running_mean, schema=OUTPUT)
    found: set[apart.Answer] = set()

    def ours() -> float:
        begin = time.perf_counter()
        out = list(flow.run(blocks, workers=1))
        seconds = time.perf_counter() - begin
        found.add(apart.answer(out))
        return rows / seconds

    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        table = pa.Table.from_batches(blocks)
        with pa.ipc.new_file(Path(place) / "rows.arrow", table.schema) as file:
            file.write_table(table)
        with apart.side(peer, Path(place), "mean", {}) as ask:

            def other() -> float:
                seconds, told = ask()
                found.add(told)
                return rows / seconds

            paired = compare(budget, ours, other, left=options.left)
    if len(found) != 1:
        raise EngineError(f"{NAME}: bytewax gives other rows ({found}); the figures are void")
    conditions = {"rows": rows, "block_rows": _BLOCK_ROWS, "versions": {"bytewax": peer.version}}
    case = f"stateful_map in this process, w1 keys={keys} vs bytewax"
    emit(line(NAME, case, "rows/s", "higher", paired, options, conditions))


def _loop(blocks: list[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    states: dict[int, tuple[int, int]] = {}
    get = states.get
    for block in blocks:
        rows: list[tuple[int, int, float]] = []
        append = rows.append
        for k, v in zip(block.column(0).to_pylist(), block.column(1).to_pylist(), strict=True):
            states[k], row = running_mean(get(k), k, v)
            append(row)
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _blocks(keys: int, rows: int) -> list[pa.RecordBatch]:
    numbers = random.Random(7)
    table = pa.table(
        {"k": numbers.choices(range(keys), k=rows), "v": numbers.choices(range(1000), k=rows)},
        pa.schema([("k", pa.int64()), ("v", pa.int64())]),
    )
    return list(table.to_batches(_BLOCK_ROWS))


def _rate(work: Callable[[], pa.Table], rows: int) -> Callable[[], float]:
    def once() -> float:
        begin = time.perf_counter()
        made = work()
        seconds = time.perf_counter() - begin
        assert made.num_rows == rows
        return rows / seconds

    return once


def _ordered(table: pa.Table) -> pa.Table:
    return table.combine_chunks().sort_by([("k", "ascending"), ("n", "ascending")])


def newest(table: pa.Table) -> dict[int, tuple[int, float]]:
    """The newest count and mean of each key, whatever the order of its rows was."""
    last: dict[int, tuple[int, float]] = {}
    for k, n, mean in zip(*(table[name].to_pylist() for name in ("k", "n", "mean")), strict=True):
        last[k] = max(last.get(k, (0, 0.0)), (n, mean))
    return last
