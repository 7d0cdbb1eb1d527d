"""Steps and schemas of a flow in words, and the names that users write, checked."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock._aggregates import Aggregate
from penstock._durations import format_duration
from penstock._schema import to_ddl
from penstock._windows import Window
from penstock.errors import ConfigError, SchemaError

__all__ = ["KEYED_OPS", "to_text"]

#: Words of steps that keep state.
KEYED_OPS = ("agg", "aggregate", "distinct", "group_state", "join", "stateful_map", "top")
_LONGEST_NAME = 100


def to_text(schema: pa.Schema) -> str:
    """Write a schema for people, in DDL where Spark has the types.

    Parameters
    ----------
    schema : pyarrow.Schema
        Any schema.

    Returns
    -------
    str
        One line.

    Examples
    --------
    >>> import pyarrow as pa
    >>> to_text(pa.schema({"k": pa.uint8()}))
    'k uint8'
    """
    try:
        return to_ddl(schema).replace("`", "")
    except SchemaError:
        return ", ".join(f"{field.name} {field.type}" for field in schema)


def encode(schema: pa.Schema) -> str:
    """A schema as the text that plans carry."""
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode("ascii")


def names_of(names: str | Sequence[str], what: str) -> tuple[str, ...]:
    """Names of columns as the user gave them: at least one, none twice."""
    try:
        found = (names,) if isinstance(names, str) else tuple(names)
    except TypeError:
        raise ConfigError(f"{what} got {names!r}; name columns by their names") from None
    if not found:
        raise ConfigError(f"{what} names no column")
    seen: set[str] = set()
    for name in found:
        if not isinstance(name, str):
            raise ConfigError(f"{what} got {name!r}; name columns by their names")
        if name in seen:
            raise ConfigError(f"{what} names column {name!r} twice")
        seen.add(name)
    return found


def columns_of(columns: tuple[str, ...], op: str) -> tuple[str, ...]:
    """Names of columns as the arguments of a step, which takes no list of them; else as `names_of`."""
    if len(columns) == 1 and isinstance(columns[0], (list, tuple)) and columns[0]:
        raise ConfigError(f"{op} got {columns[0]!r}; write {op}({', '.join(map(repr, columns[0]))})")
    return names_of(columns, op)


def missing(name: Any, what: str, columns: Sequence[str]) -> SchemaError:
    """The error of a column that is not there."""
    return SchemaError(f"{what}: column {name!r} does not exist here; there are {', '.join(columns)}")


def one_of(value: str, what: str, known: tuple[str, ...]) -> None:
    """Refuses a word that is none of the known."""
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{what}={value!r} is unknown; use {' or '.join(repr(item) for item in known)}")


def operator_names(steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What the state of steps is called, as the compiler has it, with their places."""
    names: dict[str, int] = {}
    unnamed: dict[str, int] = {}
    for at, step in enumerate(steps):
        op = step["op"]
        if op in KEYED_OPS:
            name = step.get("operator")
            if name is None:
                number = unnamed[op] = unnamed.get(op, 0) + 1
                name = op if number == 1 else f"{op}-{number}"
            names[name] = at
    return names


def require_name(name: Any, what: str) -> None:
    """Refuses a name that no step may have; the compiler refuses the same ones."""
    told = f"{what} name={name!r}"
    if not isinstance(name, str):
        raise ConfigError(f"{told}: give a text")
    if not 1 <= len(name) <= _LONGEST_NAME or "/" in name or name.strip() != name or not name.isprintable():
        raise ConfigError(
            f"{told}: a name is 1 to {_LONGEST_NAME} printable characters, without a slash and without blanks around it"
        )


def function_name(f: Callable[..., Any]) -> str:
    """What a function is called for people."""
    return str(getattr(f, "__qualname__", None) or type(f).__name__).rsplit("<locals>.", maxsplit=1)[-1]


def _signed(us: int) -> str:
    return repr(("-" if us < 0 else "") + format_duration(abs(us)))


def _aggregate(agg: dict[str, Any]) -> Aggregate:
    return Aggregate(agg["fn"], *(agg.get(option) for option in ("column", "by", "q", "error")))


def step_text(step: dict[str, Any], calls: Sequence[dict[str, Any]]) -> str:
    """A step for people, as it was written."""
    op = step["op"]
    if op == "key_by":
        return f"key_by({', '.join(step['columns'])})"
    if op == "window":
        every_us, offset_us = step.get("every_us", step["size_us"]), step.get("offset_us", 0)
        return f"window({Window(step['kind'], step['size_us'], every_us, offset_us, step.get('zone'))})"
    if op == "agg":
        items = [f"{a['name']}={_aggregate(a)}" for a in step["aggs"]]
        if "emit" in step:
            items.append(f"emit={step['emit']}")
        if "operator" in step:
            items.append(f"name={step['operator']}")
        return f"agg({', '.join(items)})"
    if op == "distinct":
        named = f", name={step['operator']}" if "operator" in step else ""
        return f"distinct({', '.join(step['columns'])}{named})"
    if op == "top":
        per = step["per"] if step["per"] is None or isinstance(step["per"], str) else ", ".join(step["per"])
        order = "" if step["descending"] else ", descending=False"
        named = f", name={step['operator']}" if "operator" in step else ""
        return f"top({step['n']}, by={step['by']}, per={per}{order}{named})"
    if op == "join":
        left, right = step["left"], step["right"]
        items = [f"on={left!r}" if left == right else f"left_on={left!r}, right_on={right!r}"]
        if "how" in step:
            items.append(f"how={step['how']!r}")
        if "within" in step:
            items.append(f"within=({', '.join(map(_signed, step['within']))})")
        items += [f"{option}={step[option]!r}" for option in ("until", "validate") if option in step]
        if "suffix" in step:
            items.append(f"suffix={step['suffix']!r}")
        if "operator" in step:
            items.append(f"name={step['operator']}")
        return ", ".join(items)
    if op in ("bounded", "iterate"):
        body = " ".join(f".{step_text(inner, calls)}" for inner in step["body"])
        known = ("batches", "batch_size", "memory", "on_failure") if op == "bounded" else ("again",)
        options = "".join(f", {name}={step[name]}" for name in known if name in step)
        return f"{op}({body}{options})"
    call = calls[step["call"]]
    sides = "".join(f", side {name}: {to_text(schema)}" for name, schema in call.get("sides", ()))
    return f"{op}({call['step'].split(' ', 1)[-1]}) -> {to_text(call['schema'])}{sides}"
