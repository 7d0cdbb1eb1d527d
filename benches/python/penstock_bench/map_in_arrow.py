"""``map-in-arrow``: a flow, and an ordered map, inside ``mapInArrow`` beside the identity: what the helpers cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.errors import EngineError
from penstock_bench import streams
from penstock_bench.measure import Emit, Options, Tell, compare, line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["run"]

NAME = "map-in-arrow"
SCHEMA = "a bigint, b bigint, s string"
FULL, QUICK = 5_000_000, 1_000_000


def run(options: Options, emit: Emit, tell: Tell, rows: int | None = None) -> None:
    """Run the bench; `rows` is for tests."""
    import penstock as pk

    count = rows or (QUICK if options.quick else FULL)
    budget = options.budget(2, quick=15, full=100)
    with streams.session(NAME, tell) as (spark, folder):
        frame = spark.read.schema(SCHEMA).parquet(str(_write(folder / "rows.parquet", count)))
        flow = pk.Flow(SCHEMA).map_batches(_same)
        in_order = pk.spark.ordered(_same, SCHEMA)
        peer = frame.mapInArrow(_identity, SCHEMA)
        sides = {
            "flow of one map": frame.mapInArrow(flow.map_in_arrow(), flow.output_ddl),
            "ordered identity": frame.mapInArrow(in_order, in_order.ddl),
        }
        for name, ours in sides.items():
            tell(f"measuring: {name}")
            paired = compare(budget, _rate(ours, count), _rate(peer, count), left=options.left)
            totals = [_total(each) for each in (ours, peer, frame)]
            if totals.count(totals[0]) != 3:
                raise EngineError(f"{NAME}: the rows of the {name} are not those of the input; the figures are void")
            conditions = {"versions": streams.spark_versions(spark), "columns": SCHEMA, "source": "Parquet to noop"}
            case = f"rows={count} {name} vs identity in mapInArrow"
            emit(line(NAME, case, "M rows/s", "higher", paired, options, conditions))


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def _identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _rate(frame: DataFrame, rows: int) -> Callable[[], float]:
    def once() -> float:
        begin = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        return rows / (time.perf_counter() - begin) / 1e6

    return once


def _total(frame: DataFrame) -> Any:
    """What two frames with the same rows agree in."""
    return frame.selectExpr("count(*)", "sum(a)", "sum(b)", "sum(hash(a, b, s))").first()


def _write(path: Path, rows: int) -> Path:
    import numpy as np

    numbers = np.random.default_rng(7)
    table = pa.table(
        {
            "a": numbers.integers(0, 1 << 40, rows),
            "b": np.arange(rows, dtype=np.int64),
            "s": pa.array(np.char.zfill(numbers.integers(0, 1 << 40, rows).astype("U"), 20)),
        }
    )
    return streams.write_file(path, table)
