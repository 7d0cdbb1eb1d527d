"""Steps where flows meet: their rows as one, or in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._flow.base import FlowBase, restore
from penstock._flow.graph import Meeting, sources_of
from penstock._flow.text import names_of, to_text
from penstock.errors import ConfigError, PlanError, SchemaError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Meetings"]


class Meetings(FlowBase):
    """The methods of a flow that take others."""

    __slots__ = ()

    def union(self, *others: FlowBase) -> Self:
        """Put the rows of other flows to those of this one.

        Parameters
        ----------
        *others : Flow
            At least one, with columns of the same names and types in the same order.

        Returns
        -------
        Flow
            With the same columns. A row that is in two of the flows is there twice. Event time
            and window columns stay where all of the flows have them.

        Raises
        ------
        SchemaError
            When the columns are not the same.
        PlanError
            Directly after `key_by` or `window`, or when two different sources have one name.
        ConfigError
            When nothing is given, or something that is no flow.

        Notes
        -----
        Flows made from one another share what they have in common: its functions run once.
        There are no cycles, since a flow only knows flows that were there before it.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> web, shop = pk.Flow("item string", name="web"), pk.Flow("item string", name="shop")
        >>> counts = web.union(shop).key_by("item").agg(n=pk.count())
        >>> counts.collect({"web": pa.table({"item": ["a"]}), "shop": pa.table({"item": ["a"]})}).to_pylist()
        [{'item': 'a', 'n': 2}]
        """
        if not others:
            raise ConfigError("union() names no other flow")
        self._whole("union", *others)
        for other in others:
            if other._columns != self._columns:
                mine, theirs = ", ".join(self._columns), ", ".join(other._columns)
                raise SchemaError(f"union: one flow has columns {mine}, another {theirs}; map_batches makes them alike")
        flows: tuple[FlowBase, ...] = (self, *others)
        times = {flow._event_time for flow in flows}
        return self._meeting({"op": "union"}, others, self._event_time if len(times) == 1 else None)

    def join(
        self,
        other: FlowBase,
        on: str | Sequence[str] | None = None,
        *,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
    ) -> Self:
        """Pair the rows of this flow with those of another that have the same key (inner join).

        Parameters
        ----------
        other : Flow
            The right side, of other sources.
        on : str or sequence of str, optional
            Columns of both flows that must be equal.
        left_on, right_on : str or sequence of str, optional
            In place of `on`, where the columns have different names: those of this flow, and as
            many of the other one.

        Returns
        -------
        Flow
            The columns of this flow, then those of the other one without the columns of `on`.

        Raises
        ------
        SchemaError
            When a column does not exist, compared columns have different types, or a column is
            of a type that is not kept in state (dictionaries).
        PlanError
            When both sides have rows of one source (a self-join), two different sources have one
            name, both sides have another column of one name, or a side gives updates.
        ConfigError
            When the columns to compare are named twice or not at all.

        Notes
        -----
        Rows come out as soon as both are there, whichever was first; a null equals nothing. What
        has come is kept **for ever** on both sides, so memory grows with the input. Both sides are
        routed by one hash of the key and move together. All pairs of one block of input are held
        until they are handed on: keys that are frequent on both sides take memory for that.

        The result has no event time: a pair has two.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> people = pk.Flow("person bigint, city string", name="people")
        >>> sales = pk.Flow("seller bigint, item string", name="sales")
        >>> found = people.join(sales, left_on="person", right_on="seller")
        >>> rows = {"people": pa.table({"person": [1, 2], "city": ["Ulm", "Bonn"]}),
        ...         "sales": pa.table({"seller": [2], "item": ["lamp"]})}
        >>> found.collect(rows).to_pylist()
        [{'person': 2, 'city': 'Bonn', 'seller': 2, 'item': 'lamp'}]
        """
        self._whole("join", other)
        if (on is None) == (left_on is None and right_on is None) or (left_on is None) != (right_on is None):
            raise ConfigError("join: name the columns to compare with on=, or with left_on= and right_on=")
        left = names_of(left_on if on is None else on, "join left_on" if on is None else "join on")  # type: ignore[arg-type]
        right = names_of(right_on if on is None else on, "join right_on" if on is None else "join on")  # type: ignore[arg-type]
        if len(left) != len(right):
            raise ConfigError(f"join: left_on names {len(left)} columns, right_on {len(right)}; name as many")
        self._require(left, "join, left side")
        other._require(right, "join, right side")
        same = {one for one, two in zip(left, right, strict=True) if one == two}
        for name in other._columns:
            if name in self._columns and name not in same:
                raise PlanError(
                    f"join: both sides have a column {name!r} that is not compared with itself; rename it on one side"
                    " with map_batches"
                )
        return self._meeting({"op": "join", "left": list(left), "right": list(right)}, (other,), None)

    def _whole(self, op: str, *others: FlowBase) -> None:
        """Refuses what is no flow of whole rows."""
        for flow in (self, *others):
            if not isinstance(flow, FlowBase):
                raise ConfigError(f"{op}({flow!r:.80}): give flows")
            flow._stateless_only(op)
            if flow._keys is not None or flow._window is not None:
                waiting = "key_by" if flow._window is None else "window"
                raise PlanError(
                    f"{op} of a flow that ends in {waiting}: it takes whole rows; put {op} before {waiting}"
                )

    def _meeting(self, step: dict[str, Any], others: Sequence[FlowBase], event_time: str | None) -> Self:
        state: dict[str, Any] = {
            "_head": Meeting(step, (self, *others)),
            "_event_time": event_time,
            "_steps": (),
            "_calls": (),
            "_scope": None,
            "_columns": (),
            "_keys": None,
            "_window": None,
            "_shape": None,
        }
        made = restore(type(self), state)
        named: dict[str, pa.Schema] = {}
        for source in sources_of(made):
            if source.name in named:
                one, two = to_text(named[source.name]), to_text(source.schema)
                raise PlanError(
                    f"{step['op']}: two sources are named {source.name!r} ({one}; {two}); give each a name of its own:"
                    " Flow(schema, name='...')"
                )
            named[source.name] = source.schema
        # The compiler has the types; its errors come here and not at the first run.
        shape = made.output_schema
        return restore(type(self), state | {"_columns": tuple(shape.names), "_shape": shape})
