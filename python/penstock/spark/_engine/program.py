"""A flow as the members of an engine run it, and what another one may take over from it.

Owns: which edits of a flow may go on from the state of the flow before. Functions may change and be renamed, and with
them the columns that they are given; what the state was made under (steps, keys, types, the declared schema of states)
may not.

Two sets of functions are the same when they are the same bytes, pickled, and the source files behind functions that are
pickled by name are the same. The bytes of an unchanged function may differ from one pickle to the next, which costs a
generation; those of a changed function do not agree, so an old one is never kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._beside import Kinds, require
from penstock._flow.graph import sources_of
from penstock._flow.text import encode
from penstock._functions.group_state import PROCESSING_TIME
from penstock._schema import spark_types
from penstock.errors import PlanError
from penstock.spark._tasks import functions
from penstock.spark._tasks.partitions import dump_calls

if TYPE_CHECKING:
    from penstock._flow import Flow

__all__ = ["Program"]

#: Steps whose ``name`` in the plan is only shown.
_NAMED = ("stateful_map", "group_state", "aggregate")
#: What of a call its states depend on.
_BINDING = ("kind", "keys", "state", "timeout", "kept")


@dataclass(frozen=True)
class Program:
    """A flow as members run it.

    Attributes
    ----------
    flow : Flow
        What the user wrote.
    plan : str
        As JSON; its sources have the columns that are read.
    whole : str
        The plan whose sources have all columns, which says what may be edited.
    read : mapping of str to pyarrow.Schema
        The columns that are read of each source.
    calls : bytes
        The Python functions, cloudpickled.
    sources : mapping
        Marks of the source files of the modules that `calls` refer to by name, see `functions.sources`.
    bound : tuple
        For each function what its states depend on.
    operators : tuple of mapping
        Steps that hold state, as manifests name them: name, kind, types of keys and values, version, columns.
    ordered : bool
        Whether results depend on the order of the input.
    output : pyarrow.Schema
        Columns of the results.
    beside : pyarrow.Schema
        Columns of late rows and of side outputs: of several kinds each is a struct column.
    lateness_us : tuple of int or None
        How far the watermark of each source stays behind, microseconds; None for one without event time.
    idle_after_ms : tuple of int or None
        For each source how long it may have no rows before the watermark goes on without it, milliseconds; empty where
        all are waited for.
    kinds : Kinds
        The kinds of late rows, and then those of side outputs, in the order of the columns of `beside`.
    clocked : tuple of str
        What of it goes by processing time, in words: steps, and sources that may be idle.
    """

    flow: Flow
    plan: str
    whole: str
    read: Mapping[str, pa.Schema]
    calls: bytes
    sources: Mapping[str, str]
    bound: tuple[tuple[Any, ...], ...]
    operators: tuple[Mapping[str, Any], ...]
    ordered: bool
    output: pa.Schema
    beside: pa.Schema
    lateness_us: tuple[int | None, ...]
    idle_after_ms: tuple[int | None, ...] = ()
    kinds: Kinds = field(default_factory=lambda: Kinds({}, {}))
    clocked: tuple[str, ...] = ()

    @classmethod
    def of(cls, flow: Flow, late: Any = None, sides: Any = None) -> Program:
        """Compile a flow; raises what `Flow.output_schema` raises, and SchemaError where Spark lacks a type.

        `late` takes late rows: a function, all of them, which then must be alike: a PlanError where they are not; or a
        dict of functions by kind: a ConfigError where it names none. `sides` takes rows of side outputs: a dict of
        functions by name, likewise.
        """
        from penstock import _native

        whole, calls = flow.to_plan(streaming=True)
        facts = _native.plan_check(whole)
        output = pa.schema(facts["output_schema"])
        # Both ends must be types that Spark has, before anything runs.
        spark_types(output)
        for schema in flow.sources.values():
            spark_types(schema)
        kinds = Kinds.of(facts)
        require(late, sides, kinds, "(DataFrame, batch id)", "df, batch_id")
        for columns in kinds.sides.values():
            spark_types(columns)
        if callable(late) and len({tuple(zip(one.names, one.types, strict=True)) for one in kinds.late.values()}) > 1:
            told = "; ".join(f"{name}: {', '.join(one.names)}" for name, one in kinds.late.items())
            raise PlanError(
                f"late rows of this flow have different columns ({told}), and a function takes rows of one kind: give"
                " late= a dict with a function for each, or leave it out, and they are counted"
            )
        plan, read = _native.plan_narrowed(whole, late is not None)
        # What members have beside the output has the columns that they read.
        narrowed = _native.plan_check(plan)
        pickled = dump_calls(calls)
        # One source alone is never gone on without.
        idle = {source.name: source.idle_after_ms for source in sources_of(flow)} if len(flow.sources) > 1 else {}
        return cls(
            flow,
            plan,
            whole,
            dict(zip(flow.sources, map(pa.schema, read), strict=True)),
            pickled,
            functions.sources(pickled),
            tuple(tuple(call.get(key) for key in _BINDING) for call in calls),
            tuple(_operator(told, calls) for told in facts["operators"]),
            bool(facts["needs_order"]),
            output,
            pa.schema(narrowed["beside_schema"]),
            tuple(None if source.event_time is None else source.lateness_ms * 1_000 for source in sources_of(flow)),
            tuple(idle.values()),
            Kinds.of(narrowed),
            tuple(_clocked(calls, idle)),
        )

    def same_functions(self, other: Program) -> bool:
        """Whether members that run the other one need not be told; False also where that cannot be known."""
        return self.plan == other.plan and self.calls == other.calls

    def misfit(self, other: Program) -> str | None:
        """Why this one cannot go on from the state in memory of another one; None when it can.

        Of durable state the operators tell what fits, which is decided by the protocol.
        """
        now, before = (", ".join(program.flow.sources) for program in (self, other))
        if now != before:
            return f"its sources are {now}, in this order, those of the flow before were {before}"
        for name, schema in self.flow.sources.items():
            was = other.flow.sources[name]
            for one in schema:
                if one.name in was.names and was.field(one.name).type != one.type:
                    before = was.field(one.name).type
                    return f"column {one.name!r} of source {name!r} is {one.type}, and was {before}"
        mine, theirs = _steps(self.whole), _steps(other.whole)
        if mine != theirs:
            pairs = zip(mine[1:], theirs[1:], strict=False)
            differing = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
            if differing is not None:
                return f"its step {differing} ({mine[differing + 1].get('op')}) is not that of the flow before"
            return (
                "its columns or options are not those of the flow before"
                if mine[0] != theirs[0]
                else "it has other steps"
            )
        for at, (one, two) in enumerate(zip(self.bound, other.bound, strict=True)):
            for key, now, before in zip(_BINDING, one, two, strict=True):
                if now != before:
                    return f"{key} of its function {at} was {before}, and is {now}"
        return None


def _operator(told: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A step that holds state as manifests name it: what only its function declares is added."""
    facts = dict(told)
    at = facts.pop("call", None)
    if at is None:
        return facts
    state, timeout = calls[at].get("state"), calls[at].get("timeout")
    if state is None:
        return facts | {"types": f"{facts['types']} -> {calls[at].get('kept', 'values of a function')}"}
    types = ", ".join(str(kind) for kind in state.types)
    columns = json.loads(facts["columns"]) | {"state": encode(state)}
    return facts | {"types": f"{facts['types']} -> ({types}), {timeout}", "columns": json.dumps(columns)}


def _clocked(calls: Sequence[Mapping[str, Any]], idle: Mapping[str, int | None]) -> Iterator[str]:
    """What goes by processing time, in words."""
    for call in calls:
        if call.get("ttl_us") is not None and call["ttl_time"] == "processing":
            yield f"{call['step']} (ttl_time='processing')"
        if call.get("timeout") == PROCESSING_TIME:
            yield f"{call['step']} ({PROCESSING_TIME})"
    yield from (f"source {name} (idle_after)" for name, after_ms in idle.items() if after_ms is not None)


def _steps(plan: str) -> list[dict[str, Any]]:
    """Source and steps of a plan, without what is only shown."""
    read = json.loads(plan)
    steps = [
        {key: value for key, value in step.items() if key != "name" or step.get("op") not in _NAMED}
        for step in read.pop("steps")
    ]
    return [read, *steps]
