"""``keyed-count-python``: count per key through `Flow.run` beside the same plan run from Rust.

The Rust side is a process of its own (``benches/rust/src/side.rs``) that makes the same blocks and waits for its turn:
a run is everything from the start of the worker threads to the last row of output, on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import EngineError
from penstock_bench import core
from penstock_bench.measure import Emit, Options, Paired, Tell, compare, line

if TYPE_CHECKING:
    from penstock._flow import Flow

__all__ = ["run"]

NAME = "keyed-count-python"
BLOCK_ROWS = (1_024, 8_192, 65_536)
WORKERS = (1, 2)
KEYS, ROWS = 1 << 20, 1 << 22
_BITS = 8
_MASK = (1 << 64) - 1


def run(options: Options, emit: Emit, tell: Tell, keys: int = KEYS, rows: int = ROWS) -> None:
    """Run the bench; `keys` and `rows` are for tests."""
    import penstock as pk

    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
    column = _numbers(rows, keys)
    budget = options.budget(len(BLOCK_ROWS) * len(WORKERS), quick=30, full=60)
    program = core.program(tell)
    plan, _ = flow.to_plan()
    for block_rows in BLOCK_ROWS:
        blocks = pa.table([column], ["k"]).to_batches(block_rows)
        for workers in WORKERS:
            told = {"plan": plan, "workers": workers, "bits": _BITS, "keys": keys}
            told |= {"block_rows": blocks[0].num_rows, "blocks": len(blocks)}
            with core.side([str(program), "--side"], told) as peer:
                paired = _compare(flow, blocks, workers, peer, budget, options)
            case = f"w{workers} rows={block_rows} keys={keys} vs the same from Rust"
            emit(line(NAME, case, "M rows/s", "higher", paired, options, {"input_rows": rows, "bins": 1 << _BITS}))


def _compare(
    flow: Flow,
    blocks: list[pa.RecordBatch],
    workers: int,
    side: Callable[[], dict[str, Any]],
    budget: float,
    options: Options,
) -> Paired:
    rows: int = sum(block.num_rows for block in blocks)
    found: set[tuple[int, int]] = set()

    def ours() -> float:
        begin = time.perf_counter()
        out = list(flow.run(blocks, workers=workers, batch_rows=blocks[0].num_rows))
        seconds = time.perf_counter() - begin
        found.add((sum(batch.num_rows for batch in out), _weighted(out)))
        return rows / seconds / 1e6

    def peer() -> float:
        answer = side()
        found.add((answer["rows"], answer["weighted"]))
        return rows / float(answer["seconds"]) / 1e6

    paired = compare(budget, ours, peer, left=options.left)
    if len(found) != 1:
        raise EngineError(f"{NAME}: the counts from Python and from Rust differ; the figures are void")
    return paired


def _numbers(rows: int, keys: int) -> pa.Array:
    """What ``Numbers(7)`` of the Rust side gives, reduced to `keys`, a power of two: splitmix64 on whole columns."""
    golden, first, second = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB

    def constant(value: int) -> pa.Scalar:
        return pa.scalar(value & _MASK, pa.uint64())

    steps = pa.array(range(1, rows + 1), pa.uint64())
    z = pc.add(pc.multiply(steps, constant(golden)), constant(7))
    for shift, factor in ((30, first), (27, second)):
        z = pc.multiply(pc.bit_wise_xor(z, pc.shift_right(z, constant(shift))), constant(factor))
    z = pc.bit_wise_xor(z, pc.shift_right(z, constant(31)))
    return pc.bit_wise_and(z, constant(keys - 1)).cast(pa.int64())


def _weighted(batches: list[pa.RecordBatch]) -> int:
    """The sum over all rows of key times count."""
    total = 0
    for batch in batches:
        total += pc.sum(pc.multiply(batch.column(0), batch.column(1))).as_py() or 0
    return total
