"""What a flow is made of: its source, its steps and the functions that they call.

Owns the state of a `Flow`, the plan that it becomes, what can be asked of it, equality, pickling and how it shows.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from penstock._durations import format_duration
from penstock._flow.graph import Meeting, Source, Written, shared, sources_of
from penstock._flow.text import KEYED_OPS, encode, missing, operator_names, require_name, step_text, to_text
from penstock._schema import to_ddl
from penstock._sides import declared_in, parse_sides
from penstock._windows import Window
from penstock.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PLAN_VERSION", "FlowBase"]

F = TypeVar("F", bound="FlowBase")

#: More names than these are looked up in a set of the columns.
_MANY = 8
#: Version of the plan format that this release writes.
PLAN_VERSION = 2


class Around:
    """What a flow that is given to a body stands in; bodies give back a flow with the same one."""

    def __init__(self, what: str, path: str) -> None:
        #: The step: ``bounded`` or ``iterate``.
        self.what = what
        #: Its place in the flow, as labels of steps begin.
        self.path = path


class FlowBase:
    """The state of a flow, and what can be asked of it."""

    __slots__ = (
        "_calls",
        "_columns",
        "_event_time",
        "_head",
        "_keys",
        "_scope",
        "_shape",
        "_steps",
        "_window",
    )

    #: What the steps stand behind: a source, or where other flows meet.
    _head: Source | Meeting
    _columns: tuple[str, ...]
    #: The event-time column that was declared, where all sources have it; rows here may have lost it, see `_time`.
    _event_time: str | None
    #: Steps as they stand in the plan of a line; schemas are base64 text.
    _steps: tuple[dict[str, Any], ...]
    #: What each call number of these steps stands for, as the native part takes it.
    _calls: tuple[dict[str, Any], ...]
    #: The key columns of a key_by that no keyed step has used yet.
    _keys: tuple[str, ...] | None
    #: The window that no keyed step has used yet.
    _window: Window | None
    #: Schema of the rows here where Python knows it without the compiler.
    _shape: pa.Schema | None
    #: The bounded part or loop whose body this is.
    _scope: Around | None

    # Looking

    @property
    def input_schema(self) -> pa.Schema:
        """Columns of the input (pyarrow.Schema).

        Raises
        ------
        PlanError
            When the flow has several sources; see `sources`.
        """
        return self._source().schema

    @property
    def sources(self) -> dict[str, pa.Schema]:
        """The columns of each source, by its name."""
        return {source.name: source.schema for source in sources_of(self)}

    @property
    def sides(self) -> dict[str, pa.Schema]:
        """The columns of each side output, by its name; see `penstock.side`."""
        return {name: pa.schema(schema) for name, schema in self._whole_rows()._check()["side_outputs"]}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that come out of the last step."""
        return self._columns

    @property
    def event_time(self) -> str | None:
        """The event-time column of the input, where there is one; of several inputs, where all have the same."""
        return self._event_time

    @property
    def lateness_ms(self) -> int:
        """How far a row may lag behind the greatest event time, in milliseconds; the most of several sources."""
        return max(source.lateness_ms for source in sources_of(self))

    @property
    def order_by(self) -> tuple[str, ...]:
        """Columns that fix the order of the input; empty where none were named.

        Raises
        ------
        PlanError
            When the flow has several sources.
        """
        return self._source().order_by

    @property
    def keyed(self) -> bool:
        """Whether a step keeps state per key or group (and so needs all rows of it)."""
        return any(step["op"] in KEYED_OPS for step in Written(self).steps)

    @property
    def output_schema(self) -> pa.Schema:
        """Columns that come out (pyarrow.Schema), as the native compiler types them.

        Raises
        ------
        PlanError
            When the flow ends in a key_by or window that nothing uses, or a step does not
            fit its input.
        SchemaError
            When a column has a type that its step does not take.
        """
        return pa.schema(self._check()["output_schema"])

    @property
    def output_ddl(self) -> str:
        """The output columns as Spark DDL, for the `schema` argument of ``mapInArrow``."""
        return to_ddl(self.output_schema)

    @property
    def needs_order(self) -> bool:
        """Whether results depend on the order of the input within a key."""
        return bool(self._check()["needs_order"])

    def explain(self, format: str = "text") -> str:
        """Describe the plan: steps, exchanges, state and schemas.

        Parameters
        ----------
        format : {"text", "dot"}, default "text"
            One line for each, or a drawing in the language of Graphviz: sources, steps, operators with what they keep,
            and the ways of rows, bold where they are exchanged between workers. ``dot -Tsvg`` draws it, as does
            ``graphviz.Source(...)`` in a notebook.

        Returns
        -------
        str
            For people; its form may change between releases.

        Raises
        ------
        PlanError
            When the flow is not complete.
        ConfigError
            For another format.

        Examples
        --------
        >>> import penstock as pk
        >>> flow = pk.Flow("word string").key_by("word").agg(n=pk.count())
        >>> "word" in flow.explain()
        True
        >>> "source0 -> stage0" in flow.explain("dot")
        True
        """
        facts = self._check()
        forms = {"text": str(facts["explain"]), "dot": str(facts["dot"])}
        if not isinstance(format, str) or format not in forms:
            raise ConfigError(f"format={format!r} is none of {', '.join(forms)}")
        return forms[format]

    def to_plan(self, streaming: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Return the plan that hosts run.

        Parameters
        ----------
        streaming : bool, default False
            For a host whose input does not end: an `agg` without a window that does not say
            when it speaks gives updates, else final values.

        Returns
        -------
        plan : str
            JSON, versioned; schemas in it are Arrow IPC bytes in base64.
        calls : list of dict
            The Python functions by call number, as the native part takes them.

        Raises
        ------
        PlanError
            When the flow ends in a key_by or window that nothing uses.

        Examples
        --------
        >>> import json
        >>> import penstock as pk
        >>> plan, calls = pk.Flow("k bigint").key_by("k").agg(n=pk.count()).to_plan()
        >>> [step["op"] for step in json.loads(plan)["steps"]], calls
        (['key_by', 'agg'], [])
        """
        if self._window is not None:
            more = ".agg(...) or .top(...)" if self._keys is None else ".agg(...) or .aggregate(...)"
            raise PlanError(f"the flow ends in window({self._window}) that no step uses; add {more}")
        if self._keys is not None:
            raise PlanError(
                f"the flow ends in key_by({', '.join(self._keys)}) that no step uses;"
                " add .agg(...), .stateful_map(...) or .apply_in_pandas_with_state(...)"
            )
        written = Written(self)
        speaks = ("agg", "aggregate")
        steps = [{"emit": "update"} | step if streaming and step["op"] in speaks else step for step in written.steps]
        for step in steps:
            if step["op"] == "aggregate":
                written.calls[step["call"]] = written.calls[step["call"]] | {"emit": step.get("emit", "final")}
        # An input that ends is one epoch, without a clock: nothing is to wait for one there.
        written.calls = [call | {"clock": streaming} if call["kind"] == "timed" else call for call in written.calls]
        plan = {"version": PLAN_VERSION, "sources": [_source(one) for one in written.sources], "steps": steps}
        return json.dumps(plan, separators=(",", ":")), written.calls

    # Showing

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        numbers = shared(self)
        lines: list[str] = []
        told: set[int] = set()
        # What is still to be written, from the end: a flow or a text, and how far it is set in.
        left: list[tuple[FlowBase | str, str]] = [(self, "")]
        while left:
            what, margin = left.pop()
            if what == ",":
                lines[-1] += ","
                continue
            if isinstance(what, str):
                lines.append(margin + what)
                continue
            head = what._head
            left.extend((f"  .{step_text(step, what._calls)}", margin) for step in reversed(what._steps))
            if isinstance(head, Source):
                left.append((f"Flow({to_text(head.schema)}{_options(head)})", margin))
            elif id(head) in told:
                left.append((f"({_meets(head.step)} #{numbers[id(head)]}, as above)", margin))
            else:
                told.add(id(head))
                number = f"  # {numbers[id(head)]}" if id(head) in numbers else ""
                end = f"    {step_text(head.step, ())})" if head.step["op"] == "join" else "  )"
                left.append((end + number, margin))
                first, *others = head.inputs
                for other in reversed(others):
                    left.extend([(",", ""), (other, f"{margin}    ")])
                left.extend([(f"  .{_meets(head.step)}(", margin), (first, margin)])
        return lines

    def _repr_html_(self) -> str:
        style = "border:1px solid #8888;border-radius:4px;padding:2px 8px;display:inline-block"
        arrow = "<div style='padding-left:1em'>&darr;</div>"

        def box(text: str) -> str:
            return f"<div style='{style}'>{text}</div>"

        numbers = shared(self)
        parts: list[str] = []
        told: set[int] = set()
        left: list[FlowBase | str] = [self]
        while left:
            what = left.pop()
            if isinstance(what, str):
                parts.append(what)
                continue
            head = what._head
            left.append("</div>")
            left.extend(arrow + box(html.escape(step_text(step, what._calls))) for step in reversed(what._steps))
            if isinstance(head, Source):
                left.append(box(f"<b>source</b> {html.escape(to_text(head.schema) + _options(head))}"))
            else:
                text = _meets(head.step) + (f" {step_text(head.step, ())}" if head.step["op"] == "join" else "")
                text += f" #{numbers[id(head)]}" if id(head) in numbers else ""
                if id(head) in told:
                    left.append(box(html.escape(f"{text}, as above")))
                else:
                    told.add(id(head))
                    left.append("</div>" + arrow + box(html.escape(text)))
                    left.extend(reversed(head.inputs))
                    left.append("<div style='display:flex;gap:1em;align-items:flex-end'>")
            left.append("<div>")
        return "".join(parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlowBase):
            return NotImplemented
        mine, theirs = Written(self), Written(other)
        return (
            [_source(one) for one in mine.sources] == [_source(one) for one in theirs.sources]
            and mine.steps == theirs.steps
            and list(map(_functions, mine.calls)) == list(map(_functions, theirs.calls))
        )

    def __hash__(self) -> int:
        return hash((self._event_time, len(self._steps), self._columns))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FlowBase.__slots__ and not hasattr(self, name):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"a Flow never changes ({name}); its methods return a new Flow")

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._head, Source):
            return (restore, (type(self), self._state()))
        # One flow behind the other: a long chain of meetings is not nested as deep.
        lines: dict[int, int] = {}
        meetings: dict[int, int] = {}
        parts: list[tuple[Any, ...]] = []
        left: list[FlowBase] = [self]
        while left:
            line = left[-1]
            head = line._head
            inputs = () if isinstance(head, Source) else head.inputs
            before = [one for one in inputs if id(one) not in lines]
            if before:
                left.extend(reversed(before))
                continue
            left.pop()
            if id(line) in lines:
                continue
            lines[id(line)] = len(parts)
            if isinstance(head, Source):
                parts.append((type(line), line._state(), None))
            else:
                number = meetings.setdefault(id(head), len(meetings))
                meeting = (number, head.step, tuple(lines[id(one)] for one in inputs))
                parts.append((type(line), line._state() | {"_head": None}, meeting))
        return (_rebuild, (parts,))

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FlowBase.__slots__}

    # Inside

    def _check(self, streaming: bool = False) -> dict[str, Any]:
        from penstock import _native

        plan, _ = self.to_plan(streaming)
        return dict(_native.plan_check(plan))

    def _time(self, what: str, more: str = "") -> str:
        """The event-time column of the rows here, for who needs it."""
        if self._event_time is None:
            raise PlanError(
                f"{what} needs event time: write Flow(schema, event_time='ts') with the column that says when a row"
                f" happened{more}"
            )
        if self._whole_rows()._check()["event_time"] is None:
            raise PlanError(
                f"{what} needs event time, and {self._event_time!r} is not in its rows any more: a step before it took"
                f" it away{more}"
            )
        return self._event_time

    def _whole_rows(self) -> Self:
        """The flow without the key_by and the window that it ends in."""
        waiting = (self._keys is not None) + (self._window is not None)
        steps = self._steps[: len(self._steps) - waiting]
        return restore(type(self), self._state() | {"_steps": steps, "_keys": None, "_window": None})

    def _label(self, op: str, name: str) -> str:
        """What a step that comes next is called in errors and statistics."""
        path = "" if self._scope is None else self._scope.path
        return f"{path}{op}[{len(self._steps)}] {name}"

    def _named(self, op: str, what: str, name: str | None) -> dict[str, str]:
        """What the plan says of the name of a step with state that comes next: no other step has it."""
        told = {} if name is None else {"operator": name}
        if name is not None:
            require_name(name, what)
        steps = Written(self).steps
        before = operator_names(steps)
        if len(operator_names([*steps, {"op": op, **told}])) == len(before):
            new = name or next(iter(operator_names([{"op": op}])))
            at = before.get(new)
            taken = "another step" if at is None else f"step {at} ({steps[at]['op']})"
            raise PlanError(
                f"{what}: its state would be called {new!r}, as that of {taken} is; give each a name= of its own"
            )
        return told

    def _stateless_only(self, op: str) -> None:
        if self._scope is not None:
            raise PlanError(
                f"{op} inside {self._scope.what}: a body has steps without state only (map_batches, flat_map, bounded,"
                f" iterate), because its batches are finished one after the other; put {op} behind {self._scope.what}"
            )

    def _no_keys(self, op: str) -> None:
        if self._keys is not None or self._window is not None:
            waiting = "key_by" if self._window is None else "window"
            raise PlanError(f"{op} directly after {waiting}: the function sees no keys; put it before {waiting}")

    def _require(self, names: Sequence[str], what: str) -> None:
        there = frozenset(self._columns) if len(names) > _MANY else self._columns
        for name in names:
            if name not in there:
                raise missing(name, what, self._columns)

    def _source(self) -> Source:
        """The only source."""
        first, *others = sources_of(self)
        if others:
            names = ", ".join(source.name for source in (first, *others))
            raise PlanError(
                f"this flow has several sources ({names}), and this takes a flow of one; flow.sources has the columns"
                " of each"
            )
        return first

    def _with(
        self,
        step: dict[str, Any],
        columns: tuple[str, ...],
        *,
        keys: tuple[str, ...] | None = None,
        window: Window | None = None,
        shape: pa.Schema | None = None,
        call: dict[str, Any] | None = None,
        calls: tuple[dict[str, Any], ...] | None = None,
    ) -> Self:
        """The flow with one more step; `call` is its function, `calls` are all of them where its body brought some."""
        if names := list(declared_in([step])):
            taken = list(declared_in(Written(self).steps))
            again = next((name for at, name in enumerate(names) if name in taken or name in names[:at]), None)
            if again is not None:
                there = ", ".join(map(repr, taken or names))
                raise ConfigError(
                    f"{step['op']} sides: a side output of this flow is called {again!r} already (there are {there});"
                    " give each a name of its own"
                )
        if calls is None:
            calls = self._calls if call is None else (*self._calls, call)
        flow = restore(
            type(self),
            {
                "_head": self._head,
                "_event_time": self._event_time,
                "_steps": (*self._steps, step),
                "_calls": calls,
                "_scope": self._scope,
                "_columns": columns,
                "_keys": keys,
                "_window": window,
                "_shape": shape,
            },
        )
        if self._window is not None and self._window.zone is not None:
            flow._check()  # whether there is such a zone
        return flow


def side_step(sides: Mapping[str, Any] | None, what: str, call: dict[str, Any]) -> dict[str, Any]:
    """What a plan says of the side outputs of a step; they are noted in its call, too."""
    declared = parse_sides(sides, what)
    if not declared:
        return {}
    call["sides"] = declared
    return {"sides": [{"name": name, "schema": encode(schema)} for name, schema in declared]}


def _functions(call: dict[str, Any]) -> tuple[Any, ...]:
    """What two calls have in common that are the same."""
    same = ("func", "on_timer", "at_end", "ttl_us", "ttl_time", "columns", "state", "timeout", "timezone")
    return tuple(call.get(what) for what in same)


def _meets(step: dict[str, Any]) -> str:
    """What a step of several inputs was written as."""
    return "window_join" if step.get("windowed") else str(step["op"])


def _source(source: Source) -> dict[str, Any]:
    """A source as it stands in the plan."""
    plan: dict[str, Any] = {
        "name": source.name,
        "schema": encode(source.schema),
        "lateness_ms": source.lateness_ms,
    }
    if source.event_time is not None:
        plan["event_time"] = source.event_time
    if source.order_by:
        plan["order_by"] = list(source.order_by)
    if source.idle_after_ms is not None:
        plan["idle_after_ms"] = source.idle_after_ms
    return plan


def _options(source: Source) -> str:
    options = "" if source.name == "input" else f", name={source.name!r}"
    if source.event_time is not None:
        lateness = format_duration(source.lateness_ms * 1_000)
        options += f", event_time={source.event_time!r}, lateness={lateness!r}"
    if source.order_by:
        options += f", order_by={list(source.order_by)!r}"
    if source.idle_after_ms is not None:
        options += f", idle_after={format_duration(source.idle_after_ms * 1_000)!r}"
    return options


def restore(kind: type[F], state: dict[str, Any]) -> F:
    """A flow that is in this state."""
    flow = object.__new__(kind)
    for name, value in state.items():
        object.__setattr__(flow, name, value)
    return flow


def _rebuild(parts: Sequence[tuple[Any, ...]]) -> FlowBase:
    """The last of flows of which each is made of those before it."""
    lines: list[FlowBase] = []
    meetings: dict[int, Meeting] = {}
    for kind, state, meeting in parts:
        if meeting is not None:
            number, step, inputs = meeting
            if number not in meetings:
                meetings[number] = Meeting(step, tuple(lines[one] for one in inputs))
            state = state | {"_head": meetings[number]}
        lines.append(restore(kind, state))
    return lines[-1]
