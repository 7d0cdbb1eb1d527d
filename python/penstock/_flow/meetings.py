"""Steps where flows meet: their rows as one, or in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._durations import Duration, parse_duration, plain_duration
from penstock._flow.base import FlowBase, restore
from penstock._flow.graph import Meeting, sources_of
from penstock._flow.text import names_of, one_of, to_text
from penstock._windows import Window
from penstock.errors import ConfigError, PlanError, SchemaError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Meetings"]

_HOWS = ("inner", "left", "right", "full", "semi", "anti")


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

        Rows that come to a step on several ways have no order among each other: a `stateful_map`
        behind them sees those of one way in their order, and between those of another in any.

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
        return self._meeting({"op": "union"}, flows, self._event_time if len(times) == 1 else None)

    def join(
        self,
        other: FlowBase,
        on: str | Sequence[str] | None = None,
        *,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        how: str = "inner",
        within: Duration | tuple[Duration, Duration] | None = None,
        until: str | None = None,
        validate: str | None = None,
        suffix: str | None = None,
        name: str | None = None,
    ) -> Self:
        """Pair the rows of this flow with those of another that have the same key.

        Parameters
        ----------
        other : Flow
            The right side.
        on : str or sequence of str, optional
            Columns of both flows that must be equal.
        left_on, right_on : str or sequence of str, optional
            In place of `on`, where the columns have different names: those of this flow, and as
            many of the other one.
        how : {"inner", "left", "right", "full", "semi", "anti"}, default "inner"
            What comes out: pairs; and rows of this flow, of the other one or of both that meet
            none, with nulls for the other side; or only rows of this flow, each once, that meet
            any ("semi") or none ("anti").
        within : duration, or pair of durations, optional
            How much later than that of this flow's row the event time of the other's row may be,
            at least and at most: ``("-5s", "10s")``. One duration is both ways: ``"10s"`` is
            ``("-10s", "10s")``. Both ends count; times in nanoseconds are rounded down to microseconds, here and in
            `until`. Without it rows meet whatever their times.
        until : str, optional
            In place of `within`: the column of this flow, of a type of event time, up to which its row
            meets rows of the other one, from its own event time on and without that time itself. Where
            it is null there is no end.
        validate : {"1:m"}, optional
            Says that a row of the other flow meets at most one of this flow, which is checked, and lets
            rows of the other flow go when they have met theirs. Not with `within`, "semi" and "anti".
        suffix : str, optional
            What is put behind the name of a column of the other flow that this one has, too, such as
            ``"_right"``. Without it such a column is refused.
        name : str, optional
            What its state is called in checkpoints, by default ``join``, ``join-2``, ...

        Returns
        -------
        Flow
            The columns of this flow, then those of the other one without the columns of `on`, with `suffix`
            where a name is taken; for "semi" and "anti" those of this flow.

        Raises
        ------
        SchemaError
            When a column does not exist, compared columns have different types, or a column is
            of a type that is not kept in state (dictionaries).
        PlanError
            When two different sources have one name, both sides have another column of one name
            and there is no `suffix`, or a name with it is taken, too, a side gives updates, `within` or
            `until` is given and a side has no event time, both are given, `validate` does not go with
            the rest, or another step has the name.
        ConfigError
            When the columns to compare are named twice or not at all, `how` or `validate` is unknown,
            `within` is no interval or ends before it begins, or the suffix or name is none.

        Notes
        -----
        Pairs come out as soon as both rows are there, whichever was first; a null equals nothing.
        Both sides are routed by one hash of the key and move together.

        Without `within` what has come is kept **for ever** on both sides (for "semi" and "anti"
        one row of the other flow per key, and rows of this flow until they meet one), so memory
        grows with the input. That a row meets none is then known at the end of the input, and
        there such rows come out: of a stream that never ends, never. Give `within` there.

        With `within` a row goes when the watermark says that it can meet none any more, and if it
        has met none and is of a side that gives such rows, it comes out then. Rows behind the
        watermark, and rows without event time, are late and meet none.

        With `until` a row of this flow goes when the watermark reaches that time, one of the other flow
        when the watermark has passed it: of auctions and bids the open auctions are kept. With
        `validate` two rows of this flow that one of the other could meet are a `SchemaError` of the run, which
        names their key.

        A source may meet itself. The result has no event time: a pair has two.

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
        >>> people.join(sales, left_on="person", right_on="seller", how="anti").collect(rows).to_pylist()
        [{'person': 1, 'city': 'Ulm'}]

        >>> sold = pk.Flow("lot bigint, at bigint, closes bigint", event_time="at", name="sold")
        >>> bids = pk.Flow("lot bigint, price bigint, ts bigint", event_time="ts", name="bids")
        >>> found = sold.join(bids, on="lot", until="closes", validate="1:m")
        >>> found.collect({"sold": pa.table({"lot": [1], "at": [10], "closes": [20]}),
        ...                "bids": pa.table({"lot": [1, 1], "price": [5, 7], "ts": [19, 20]})}).to_pylist()
        [{'lot': 1, 'at': 10, 'closes': 20, 'price': 5, 'ts': 19}]
        """
        step = self._compared("join", other, on, left_on, right_on, how, validate, suffix, name)
        if until is not None:
            if not isinstance(until, str):
                raise ConfigError(f"join until={until!r}: name a column of this flow")
            self._require((until,), "join until")
            step["until"] = until
        if within is not None:
            step["within"] = list(_interval(within))
        return self._meeting(step, (self, other), None)

    def window_join(
        self,
        other: FlowBase,
        on: str | Sequence[str] | None = None,
        *,
        window: Window,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        how: str = "inner",
        validate: str | None = None,
        suffix: str | None = None,
        name: str | None = None,
    ) -> Self:
        """Pair the rows of this flow with those of another that have the same key and are in the same window.

        Parameters
        ----------
        other : Flow
            The right side.
        on, left_on, right_on : str or sequence of str, optional
            Columns that must be equal, as for `join`.
        window : Window
            See `penstock.tumbling` and `penstock.sliding`. Both flows have event time of one type.
        how : {"inner", "left", "right", "full", "semi", "anti"}, default "inner"
            As for `join`. Rows that meet none come out when their window closes.
        validate : {"1:m"}, optional
            As for `join`: of this flow there is at most one row of a key in a window.
        suffix : str, optional
            As for `join`.
        name : str, optional
            What its state is called in checkpoints.

        Returns
        -------
        Flow
            window_start and window_end, then the columns of `join`. A row of sliding windows meets
            others once in each window that both are in.

        Raises
        ------
        SchemaError, PlanError, ConfigError
            As `join`; and when a side has no event time.

        Notes
        -----
        Pairs come out as soon as both rows are there. Rows are kept until their window closes;
        those that come later are late.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> shown = pk.Flow("ad bigint, ts bigint", event_time="ts", name="shown")
        >>> clicks = pk.Flow("ad bigint, at bigint", event_time="at", name="clicks")
        >>> found = shown.window_join(clicks, on="ad", window=pk.tumbling("10ms"))
        >>> found.collect({"shown": pa.table({"ad": [1, 1], "ts": [3, 13]}),
        ...                "clicks": pa.table({"ad": [1], "at": [9]})}).to_pylist()
        [{'window_start': 0, 'window_end': 10, 'ad': 1, 'ts': 3, 'at': 9}]
        """
        step = self._compared("window_join", other, on, left_on, right_on, how, validate, suffix, name)
        if not isinstance(window, Window):
            raise ConfigError(f"window_join window={window!r}: make it with penstock.tumbling or penstock.sliding")
        for flow in (self, other):
            if flow._event_time is None:
                raise PlanError(
                    f"window_join({window}) needs event time on both sides: write Flow(schema, event_time='ts') with"
                    " the column that has it; a join gives none"
                )
        sides = [flow._with(window.to_step(), flow._columns, window=window) for flow in (self, other)]
        return self._meeting(step | {"windowed": True}, sides, None)

    def _compared(
        self,
        what: str,
        other: FlowBase,
        on: str | Sequence[str] | None,
        left_on: str | Sequence[str] | None,
        right_on: str | Sequence[str] | None,
        how: str,
        validate: str | None,
        suffix: str | None,
        name: str | None,
    ) -> dict[str, Any]:
        """The step of a join of these columns, without an interval."""
        self._whole(what, other)
        if (on is None) == (left_on is None and right_on is None) or (left_on is None) != (right_on is None):
            raise ConfigError(f"{what}: name the columns to compare with on=, or with left_on= and right_on=")
        named = on is not None
        left = names_of(on if named else left_on, f"{what} on" if named else f"{what} left_on")  # type: ignore[arg-type]
        right = names_of(on if named else right_on, f"{what} on" if named else f"{what} right_on")  # type: ignore[arg-type]
        if len(left) != len(right):
            raise ConfigError(f"{what}: left_on names {len(left)} columns, right_on {len(right)}; name as many")
        self._require(left, f"{what}, left side")
        other._require(right, f"{what}, right side")
        one_of(how, f"{what} how", _HOWS)
        if validate is not None:
            one_of(validate, f"{what} validate", ("1:m",))
        if suffix is not None and (not isinstance(suffix, str) or not suffix):
            raise ConfigError(f'{what} suffix={suffix!r}: give a text that is not empty, such as "_right"')
        same = {one for one, two in zip(left, right, strict=True) if one == two}
        theirs = () if how in ("semi", "anti") else tuple(one for one in other._columns if one not in same)
        mine, others = frozenset(self._columns), frozenset(theirs)
        for column in theirs:
            if column not in mine:
                continue
            if suffix is None:
                raise PlanError(
                    f"{what}: both sides have a column {column!r} that is not compared with itself; write"
                    f' suffix="_right", and that of the other flow comes out as {column + "_right"!r}'
                )
            if column + suffix in mine or column + suffix in others:
                raise PlanError(
                    f"{what} suffix={suffix!r}: column {column!r} of the other flow would be {column + suffix!r}, and"
                    " there is a column of that name; give another suffix"
                )
        told = self._named("join", what, name)
        return {
            "op": "join",
            "left": list(left),
            "right": list(right),
            **({} if how == "inner" else {"how": how}),
            **({} if validate is None else {"validate": validate}),
            **({} if suffix is None else {"suffix": suffix}),
            **told,
        }

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

    def _meeting(self, step: dict[str, Any], inputs: Sequence[FlowBase], event_time: str | None) -> Self:
        state: dict[str, Any] = {
            "_head": Meeting(step, tuple(inputs)),
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


def _interval(within: Any) -> tuple[int, int]:
    """The least and the greatest difference of times, in microseconds."""
    within = plain_duration(within, "join within")
    if isinstance(within, (str, timedelta)):
        most = parse_duration(within, "join within", allow_zero=True)
        return -most, most
    if not isinstance(within, (tuple, list)) or len(within) != 2:
        raise ConfigError(
            f'join within={within!r}: give a duration, as "10s", or the least and the greatest one, as ("-5s", "10s")'
        )
    lower, upper = (
        _signed(end, f"join within, {what} end,") for end, what in zip(within, ("lower", "upper"), strict=True)
    )
    if lower > upper:
        raise ConfigError(
            f"join within={within!r} ends before it begins: nothing would meet; give the earlier end first"
        )
    return lower, upper


def _signed(value: Any, name: str) -> int:
    value = plain_duration(value, name)
    if isinstance(value, timedelta) and value < timedelta(0):
        return -parse_duration(-value, name)
    if isinstance(value, str) and value.lstrip().startswith("-"):
        return -parse_duration(value.lstrip()[1:], name, allow_zero=True)
    return parse_duration(value, name, allow_zero=True)
