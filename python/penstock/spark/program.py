"""A flow as the members of an engine run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.schema import spark_types
from penstock.spark.partitions import dump_calls

if TYPE_CHECKING:
    from penstock.flow import Flow

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """A flow as members run it.

    Attributes
    ----------
    flow : Flow
        What the user wrote.
    plan : str
        As JSON.
    calls : bytes
        The Python functions, cloudpickled.
    keyed_steps : int
        Steps that hold state.
    ordered : bool
        Whether results depend on the order of the input.
    output : pyarrow.Schema
        Columns of the results.
    """

    flow: Flow
    plan: str
    calls: bytes
    keyed_steps: int
    ordered: bool
    output: pa.Schema

    @classmethod
    def of(cls, flow: Flow) -> Program:
        """Compile a flow; raises what `Flow.output_schema` raises, and SchemaError where Spark lacks a type."""
        from penstock import _native

        plan, calls = flow.to_plan()
        facts = _native.plan_check(plan)
        output = pa.schema(facts["output_schema"])
        # Both ends must be types that Spark has, before anything runs.
        spark_types(output)
        spark_types(flow.input_schema)
        return cls(flow, plan, dump_calls(calls), int(facts["pieces"]) - 1, bool(facts["needs_order"]), output)
