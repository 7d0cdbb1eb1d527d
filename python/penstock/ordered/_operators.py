"""From steps to operators: what the runtime runs.

Neighbouring stateless steps become one operator, so that a chunk changes hands (and crosses to a worker process) once
for all of them. A partitioned step over columns is a plain one between a step that makes rows and one that makes
batches again.

Invariant: `serial` of the operators, one after the other on every chunk in order, is what any parallel run must equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from penstock.ordered._chunk import Chunk
from penstock.ordered._keyed import Keyed, KeyedFlow
from penstock.ordered._steps import Step
from penstock.ordered._transforms import Batches, ByKey, Rows, Transform, make_transform, need_batch

__all__ = ["Operator", "Stateless", "compile_steps", "finishes", "serial"]


class Stateless:
    """A run of stateless steps."""

    partitions = 0
    finishes = threads = False

    def __init__(self) -> None:
        self.names: list[str] = []
        self.transforms: list[Transform] = []

    @property
    def name(self) -> str:
        """All their names."""
        return " + ".join(self.names)

    def __call__(self, chunk: Chunk) -> None:
        for transform in self.transforms:
            transform(chunk)


Operator: TypeAlias = Stateless | Keyed | KeyedFlow


class _OfGroup:
    """A step function for ``(key, rows)``."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, state: Any, item: tuple[Any, Any]) -> Any:
        return self.call(state, item[1])


def _key_of_group() -> Callable[[tuple[Any, Any]], Any]:
    """The key of ``(key, rows)``, where all NaN are one: each row, and each worker process, makes another one."""
    from penstock._functions.state import own_nan

    def key_of(item: tuple[Any, Any]) -> Any:
        key = item[0]
        kind = key.__class__
        return own_nan(key) if kind is float or (kind is tuple and float in map(type, key)) else key

    return key_of


def compile_steps(steps: Sequence[Step]) -> list[Operator]:
    """The operators of a pipeline."""
    operators: list[Operator] = []

    def stateless(name: str | None, transform: Transform) -> None:
        if not operators or not isinstance(operators[-1], Stateless):
            operators.append(Stateless())
        last = operators[-1]
        assert isinstance(last, Stateless)
        last.transforms.append(transform)
        if name is not None:
            last.names.append(name)

    for step in steps:
        if step.kind == "stateful":
            operators.append(Keyed(step))
        elif step.kind == "partitioned":
            key, schema = step.option("key"), step.option("schema")
            if callable(key):
                operators.append(Keyed(step))
            else:
                single = isinstance(key, str)
                names: tuple[str, ...] = (key,) if single else key
                if step.option("batches"):
                    stateless(f"split of {step.name}", ByKey(names, single, step.name))
                else:
                    columns = step.option("columns")
                    stateless(f"rows of {step.name}", _KeyedRows(columns, names, single, step.name))
                options = dict(step.options) | {"key": _key_of_group()}
                step = dataclasses.replace(step, call=_OfGroup(step.call), options=tuple(options.items()))
                operators.append(Keyed(step))
            if schema is not None:
                _rows_of(operators[-1], schema)
                stateless(f"batches of {step.name}", Batches(schema, step.name, by_item=True))
        elif step.kind == "flow" and step.option("keyed"):
            operators.append(KeyedFlow(step))
        else:
            if step.kind == "batches" and operators:
                _rows_of(operators[-1], step.option("schema"))
            stateless(step.name, make_transform(step))
    return operators


def _rows_of(operator: Operator, schema: Any) -> None:
    """Have a step with state take its outputs, rows of a schema, as they are: they may be made of the state."""
    if isinstance(operator, Keyed):
        from penstock.ordered._packing import row_owner

        operator.own = row_owner(schema)


class _KeyedRows(Rows):
    """Record batches in, ``(key, row)`` out."""

    def __init__(self, columns: Sequence[str] | None, keys: Sequence[str], single: bool, name: str) -> None:
        super().__init__(columns or (), name)
        self.keys, self.single = Rows(keys, name), single

    def _tuples(self, batch: Any) -> Any:
        need_batch(batch, self.name, self.keys.columns)
        keys = self.keys._tuples(batch)
        return zip([key[0] for key in keys] if self.single else keys, super()._tuples(batch), strict=True)


def finishes(operators: Sequence[Operator]) -> bool:
    """Whether the end of the input has outputs of its own."""
    return any(operator.finishes for operator in operators)


def serial(operators: Sequence[Operator], chunk: Chunk) -> None:
    """Do a chunk here and now."""
    for operator in operators:
        operator(chunk)
