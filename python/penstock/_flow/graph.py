"""The graph that a flow is, and how it is written as a plan.

A flow holds its head (a source, or a meeting of other flows) and the steps behind it. So it only ever knows flows that
were there before it, and there is no way to make a cycle. What two flows have in common, because one was made from the
other or both from a third, is one part of the graph: heads and steps are themselves, however alike others look.

Invariant: sources stand in the order in which they are reached from the left, steps behind those whose rows they take;
the plan of a line has its steps and functions in the order in which they were written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

__all__ = ["Line", "Meeting", "Source", "Written", "shared", "sources_of"]


@dataclass(frozen=True, eq=False)
class Source:
    """Where rows come from."""

    name: str
    schema: pa.Schema
    event_time: str | None = None
    lateness_ms: int = 0
    order_by: tuple[str, ...] = ()
    idle_after_ms: int | None = None


class Line(Protocol):
    """A flow, as the graph sees it."""

    @property
    def _head(self) -> Source | Meeting: ...
    @property
    def _steps(self) -> tuple[dict[str, Any], ...]: ...
    @property
    def _calls(self) -> tuple[dict[str, Any], ...]: ...


@dataclass(frozen=True, eq=False)
class Meeting:
    """A step of several inputs, as it stands in the plan, and its inputs."""

    step: dict[str, Any]
    inputs: tuple[Any, ...]


def sources_of(line: Line) -> list[Source]:
    """The sources of a flow, each once."""
    found: dict[int, Source] = {}
    seen: set[int] = set()
    left: list[Line] = [line]
    while left:
        head = left.pop()._head
        if isinstance(head, Source):
            found.setdefault(id(head), head)
        elif id(head) not in seen:
            seen.add(id(head))
            left.extend(reversed(head.inputs))
    return list(found.values())


def shared(line: Line) -> dict[int, int]:
    """The meetings of a flow whose rows go more than one way, by their identity: a number for each, from 1."""
    ways: dict[int, int] = {}
    left: list[Line] = [line]
    while left:
        head = left.pop()._head
        if isinstance(head, Meeting):
            ways[id(head)] = ways.get(id(head), 0) + 1
            if ways[id(head)] == 1:
                left.extend(reversed(head.inputs))
    several = (head for head, count in ways.items() if count > 1)
    return {head: number for number, head in enumerate(several, 1)}


class Written:
    """A flow as a plan has it.

    Parameters
    ----------
    line : Flow
        What is written.

    Attributes
    ----------
    sources : list of Source
        The first nodes.
    steps : list of dict
        The nodes behind them. Those that do not take the rows of the node before them say whose, as ``inputs``.
    calls : list of dict
        The functions, by number.
    """

    def __init__(self, line: Line) -> None:
        self.sources = sources_of(line)
        self.steps: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self._nodes = {id(source): number for number, source in enumerate(self.sources)}
        self._numbers: dict[int, int] = {}
        #: The last node of each flow.
        ends: dict[int, int] = {}
        left: list[Line] = [line]
        while left:
            last = left[-1]
            head = last._head
            at = self._nodes.get(id(head))
            if at is None:
                assert isinstance(head, Meeting)
                before = [one for one in head.inputs if id(one) not in ends]
                if before:
                    left.extend(reversed(before))
                    continue
                at = self._add(head, head.step, [ends[id(one)] for one in head.inputs], ())
            ends[id(last)] = self._behind(last, at)
            left.pop()

    def _behind(self, line: Line, at: int) -> int:
        """The steps of a flow behind a node; its last node."""
        for step in line._steps:
            known = self._nodes.get(id(step))
            at = self._add(step, step, [at], line._calls) if known is None else known
        return at

    def _add(self, what: object, step: dict[str, Any], inputs: list[int], calls: Sequence[dict[str, Any]]) -> int:
        number = len(self.sources) + len(self.steps)
        made = self._renumbered(step, calls)
        self.steps.append(made if inputs == [number - 1] else made | {"inputs": inputs})
        self._nodes[id(what)] = number
        return number

    def _renumbered(self, step: dict[str, Any], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        made = dict(step)
        if "call" in step:
            made["call"] = self._call(calls[step["call"]])
        if "body" in step:
            made["body"] = [self._renumbered(inner, calls) for inner in step["body"]]
        return made

    def _call(self, call: dict[str, Any]) -> int:
        number = self._numbers.setdefault(id(call), len(self.calls))
        if number == len(self.calls):
            # Its label names the step by its place in its own flow.
            label = re.sub(r"\[\d+\]", f"[{len(self.steps)}]", call["step"], count=1)
            self.calls.append(call | {"step": label})
        return number
