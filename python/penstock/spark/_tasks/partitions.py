"""A flow inside each partition of a Spark job.

Owns: the picklable function behind `Flow.map_in_arrow`. It carries the plan as text and the
Python functions as cloudpickle bytes, never a native handle; the native side starts in the
Python worker, in the thread that Spark calls, and owns no thread of its own.

Invariant: nothing outlives the partition, so a retried task gives the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._beside import say_dropped
from penstock._functions.inline import drive, needed_times
from penstock._resume import guarded
from penstock._schema import conform, spark_types
from penstock.errors import ConfigError, PlanError
from penstock.spark._tasks import functions
from penstock.spark._tasks.apart import split
from penstock.spark._tasks.heap import settle

if TYPE_CHECKING:
    from penstock._flow.base import FlowBase

__all__ = ["PartitionFunction", "map_in_arrow"]


@dataclass(frozen=True)
class PartitionFunction:
    """A function from batches to batches that runs a whole flow.

    Attributes
    ----------
    plan : str
        The plan as JSON.
    calls : bytes
        The Python functions, cloudpickled.
    inputs : mapping of str to pyarrow.Schema
        What it takes, by source; of several sources each row is a struct, see `penstock.spark.tagged`.
    output_schema : pyarrow.Schema
        What it gives, in Spark's Arrow types.
    times : tuple of str or None
        By source the column of which nulls are told in the log.
    """

    plan: str
    calls: bytes
    inputs: Mapping[str, pa.Schema]
    output_schema: pa.Schema
    times: tuple[str | None, ...] = ()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the flow over the batches of one partition; the watermark is infinite at their end."""
        return guarded(self._run(batches), "the run of a flow over a partition")

    def _run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from penstock import _native

        run = _native.InlineRun(self.plan, load_calls(self.calls))
        for out in drive(run, self._parted(batches), list(self.inputs.values()), self.times):
            yield conform(pa.record_batch(out), self.output_schema, "output")
        settle()

    def _parted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        names = list(self.inputs)
        for batch in batches:
            if not isinstance(batch, pa.RecordBatch):
                raise ConfigError(
                    f"what Flow.map_in_arrow gives got a {type(batch).__name__}, not a pyarrow.RecordBatch: it is for"
                    " DataFrame.mapInArrow"
                )
            yield from [(0, batch)] if len(names) == 1 else split(batch, names)


def map_in_arrow(flow: FlowBase, per_partition: bool = False) -> PartitionFunction:
    """Return a function for ``DataFrame.mapInArrow``; see `Flow.map_in_arrow`.

    Parameters
    ----------
    flow : Flow
        What to compute.
    per_partition : bool, default False
        Allow a keyed flow, whose results then are those of each partition alone.

    Returns
    -------
    PartitionFunction
        To be given to ``df.mapInArrow(f, flow.output_ddl)``. Where the flow has a window or a join in time, rows
        whose event time is null are in no result; each partition logs how many came, as a warning.

    Raises
    ------
    PlanError
        When the flow is keyed and `per_partition` is False.
    """
    if flow.keyed and not per_partition:
        raise PlanError(
            "map_in_arrow runs inside each partition, where a keyed flow sees only some rows of a key; use"
            " penstock.spark.run(flow, df) for results over all partitions, or say per_partition=True"
        )
    say_dropped(flow.sides, "map_in_arrow")
    plan, calls = flow.to_plan()
    output, times = spark_types(flow.output_schema), tuple(needed_times(plan))
    return PartitionFunction(plan, dump_calls(calls), flow.sources, output, times)


def dump_calls(calls: list[dict[str, Any]]) -> bytes:
    """Pickle the Python functions of a plan; see `functions.dump`. An error names the step."""
    try:
        return functions.dump(calls, "a function of the flow")
    except ConfigError:
        for call in calls:
            functions.dump(call["func"], f"{call['step']}: the function")
        raise


def load_calls(pickled: bytes) -> list[dict[str, Any]]:
    """Restore what `dump_calls` pickled, in a Python worker; see `functions.load`."""
    return list(functions.load(pickled, "a function of the flow"))
