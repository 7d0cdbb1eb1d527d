"""Steps with state per key: keys and windows, and the steps that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import pyarrow as pa

from penstock._aggregates import Aggregate, count
from penstock._coroutines import require_plain
from penstock._durations import Duration, parse_duration
from penstock._flow.base import FlowBase, side_step
from penstock._flow.text import columns_of, encode, function_name, missing, names_of, one_of
from penstock._options import whole, yes_or_no
from penstock._schema import to_arrow
from penstock._windows import Window
from penstock.errors import ConfigError, PlanError, SchemaError

if TYPE_CHECKING:
    from typing_extensions import Never, Self

    from penstock._aggregator import Aggregator
    from penstock._functions.group_state import GroupFunction

__all__ = ["KeyedSteps"]

_MOST_RANKS = 1 << 31


class KeyedSteps(FlowBase):
    """The methods of a flow that keep state."""

    __slots__ = ()

    def key_by(self, *columns: str, nulls: str = "group") -> Self:
        """Say which columns the next keyed step groups by.

        Parameters
        ----------
        *columns : str
            At least one column.
        nulls : {"group", "reject"}, default "group"
            Whether null is a key like any other, or an error.

        Returns
        -------
        Flow
            To be followed by `window`, `agg`, `aggregate`, `stateful_map` or `apply_in_pandas_with_state`.

        Raises
        ------
        SchemaError
            When a column does not exist here.
        ConfigError
            When no column is given, one is given twice, or `nulls` is neither of the two.

        Notes
        -----
        Rows travel to the worker that owns their key: one exchange. In a column of floats -0.0
        is the key 0.0, and every NaN is one key.

        Examples
        --------
        >>> import penstock as pk
        >>> pk.Flow("k bigint, v bigint").key_by("k").agg(total=pk.sum("v")).columns
        ('k', 'total')
        """
        self._stateless_only("key_by")
        names = columns_of(columns, "key_by")
        self._require(names, "key_by")
        one_of(nulls, "key_by nulls", ("group", "reject"))
        if self._keys is not None:
            raise PlanError(
                f"key_by({', '.join(names)}) follows key_by({', '.join(self._keys)}) directly;"
                " name all key columns in one key_by"
            )
        if self._window is not None:
            raise PlanError("key_by comes before window: write .key_by(...).window(...).agg(...)")
        return self._with(
            {"op": "key_by", "columns": list(names), "nulls": nulls},
            self._columns,
            keys=names,
            shape=self._shape,
        )

    def window(self, window: Window) -> Self:
        """Cut event time for the next `agg`, `distinct` or `top`.

        Parameters
        ----------
        window : Window
            Made by `penstock.tumbling`, `penstock.sliding` or `penstock.session`.

        Returns
        -------
        Flow
            To be followed by `agg`, `aggregate`, `distinct` or `top`.

        Raises
        ------
        ConfigError
            When the argument is no window.
        PlanError
            When the flow has no `event_time`, or a window is already waiting to be used.

        Examples
        --------
        >>> import penstock as pk
        >>> flow = pk.Flow("k bigint, ts timestamp", event_time="ts")
        >>> flow.key_by("k").window(pk.tumbling("1m")).agg(n=pk.count()).columns
        ('window_start', 'window_end', 'k', 'n')
        """
        self._stateless_only("window")
        if not isinstance(window, Window):
            raise ConfigError(f"window({window!r}): make it with penstock.tumbling, sliding or session")
        if self._window is not None:
            raise PlanError(f"window({window}) follows window({self._window}) directly; keep one of them")
        self._time(f"window({window})")
        return self._with(window.to_step(), self._columns, keys=self._keys, window=window, shape=self._shape)

    # An aggregate may be called `name`, and has its place among the others then: so it is no parameter.
    @overload
    def agg(self, *unnamed: Never, emit: str | None = None, name: str | None, **aggregates: Aggregate) -> Self: ...
    @overload
    def agg(self, *unnamed: Never, emit: str | None = None, **aggregates: Aggregate) -> Self: ...

    def agg(self, *unnamed: Never, emit: str | None = None, **aggregates: Aggregate | str | None) -> Self:
        """Aggregate per key, per key and window, or all rows.

        Without a `key_by` before, all rows are of one group, or those of each window are. As of any group there is a
        row of it where it has rows, so an input without rows gives none.

        Parameters
        ----------
        emit : {"final", "update"}, optional
            When rows come out of an aggregate without a window. ``"final"``: one row per
            key, when the input ends. ``"update"``: at the end of every epoch, one row with
            the current values of each key that changed in it. Default: "final" where the
            input ends; "update" where it does not, which is beside a Spark query and in
            local runs with ``streaming=True``. With a window there is only "final": a row
            per key and window, when the window closes.
        **aggregates : Aggregate
            Output column = what it holds, such as ``n=pk.count()``; at most 255. With a text, ``name="totals"``
            is no column: it names the step and its state, see Notes.

        Returns
        -------
        Flow
            Columns: window_start and window_end where there is a window, the keys, the
            aggregates. Window bounds have the type of the event-time column.

        Raises
        ------
        SchemaError
            When a column does not exist here or has a type that its aggregate does not take, or an output name is
            taken.
        PlanError
            For "update" with a window.
        ConfigError
            When no aggregate is given, or too many, one has no name, or one is not made by penstock.

        Notes
        -----
        Memory: a few words per key (and open window) and aggregate. Rows without a key all go to one worker.

        The name of a step with state is that of its state in a checkpoint, and stands in
        `explain` and errors: 1 to 100 printable characters without a slash, of no other step.
        A query that is started again goes on from each state by its name, wherever the step
        stands then. Steps without one are ``agg``, ``agg-2`` and so on, in their order, and go
        on with the same columns only; who gives a step that name goes on from the state that
        it had without.

        An input that ends is one epoch, so "update" gives a row per key there, too. An `agg`
        or `top` behind it takes final values only: beside a Spark query such a flow says
        ``emit="final"``, and its rows come with `Engine.finish`.

        Examples
        --------
        >>> import penstock as pk
        >>> pk.Flow("word string").key_by("word").agg(count=pk.count()).columns
        ('word', 'count')
        >>> pk.Flow("word string").agg(count=pk.count(), words=pk.count_distinct("word")).columns
        ('count', 'words')
        """
        self._stateless_only("agg")
        if unnamed:
            raise ConfigError(
                f"agg({', '.join(map(str, unnamed))}) names no output column; write for example"
                " .agg(n=penstock.count())"
            )
        name = None if isinstance(aggregates.get("name"), Aggregate) else aggregates.pop("name", None)
        named = self._named("agg", "agg", cast("str | None", name))
        if isinstance(emit, Aggregate):
            raise ConfigError(
                f"agg(emit={emit}): no column of agg can be called 'emit', which says when its rows come out; give it"
                " another name"
            )
        if not aggregates:
            raise ConfigError("agg() names no aggregate; write for example .agg(n=penstock.count())")
        if len(aggregates) > 255:
            raise ConfigError(f"agg takes at most 255 aggregates, not {len(aggregates)}; write two, and join them")
        if emit is not None:
            one_of(emit, "agg emit", ("final", "update"))
        if emit == "update" and self._window is not None:
            raise PlanError(
                f"agg(emit='update') with window({self._window}): its rows come when a window closes; leave emit out"
            )
        head = (("window_start", "window_end") if self._window is not None else ()) + (self._keys or ())
        items = []
        for column, aggregate in aggregates.items():
            if not isinstance(aggregate, Aggregate):
                given: Any = aggregate
                if getattr(given, "__module__", None) == Aggregate.__module__:
                    called = f"penstock.{given.__name__}({'' if given is count else '...'})"
                    raise ConfigError(f"agg({column}={given.__name__}) got a function; call it: {column}={called}")
                raise ConfigError(
                    f"agg({column}={aggregate!r}) is no aggregate; use penstock.count, sum, min, max, mean and the like"
                )
            self._require([one for one in (aggregate.column, aggregate.by) if one], f"agg {column}={aggregate}")
            if aggregate.fn in ("first", "last") and self._event_time is None:
                raise PlanError(
                    f"agg {column}={aggregate} needs event time: write Flow(schema, event_time='ts'), or name the"
                    f" column that decides: penstock.{'min' if aggregate.fn == 'first' else 'max'}_by(..., by='column')"
                )
            if column in head:
                raise SchemaError(f"agg {column}={aggregate} takes the name of the output column {column!r}; rename it")
            items.append(aggregate.to_plan(column))
        step: dict[str, Any] = {"op": "agg", "aggs": items, **named}
        # Where it is left open the host decides: see `to_plan`.
        if emit is not None or self._window is not None:
            step["emit"] = "final" if emit is None else emit
        flow = self._with(step, (*head, *aggregates))
        flow._check()  # the types that they take
        return flow

    def aggregate(
        self,
        aggregator: Aggregator,
        *,
        schema: Any,
        columns: Sequence[str] | None = None,
        emit: str | None = None,
        name: str | None = None,
    ) -> Self:
        """Aggregate per key, per key and window, or all rows, with functions of your own over blocks of rows.

        Without a `key_by` before, all rows are of one group, or those of each window are, as in `agg`.

        Parameters
        ----------
        aggregator : Aggregator
            What makes, fills, merges and finishes states: a `penstock.Aggregator`, or anything with its methods.
        schema : str, pyarrow.Schema or pyspark StructType
            Columns that its `finish` gives.
        columns : sequence of str, optional
            Columns that its `accumulate` sees; default all, in order.
        emit : {"final", "update"}, optional
            When rows come out without a window, as in `agg`.
        name : str, optional
            What the step is called in `explain`, errors and statistics; default the name of the class. One that
            is given is also that of its state, as in `agg`.

        Returns
        -------
        Flow
            Columns: window_start and window_end where there is a window, the keys, those of `schema`.

        Raises
        ------
        SchemaError
            When a column does not exist here, a name is taken, or `schema` cannot be read.
        PlanError
            For "update" with a window.
        ConfigError
            When a method is missing.

        Notes
        -----
        Python is called once for each block and worker, for the rows of all keys in it, and once for some
        thousand states that come out. Per key and block there is a call of `merge` and about a microsecond.
        A row of sliding windows is accumulated in each of its windows. Sessions that a later row makes one are
        merged, the earlier first.

        States are live Python objects, as those of `stateful_map`: pickled when they move to another process or
        into a checkpoint. When a method raises, the run stops with `UserFunctionError`, and an engine goes back to
        where the batch began.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import pyarrow.compute as pc
        >>> import penstock as pk
        >>> class Longest(pk.Aggregator):
        ...     def create(self):
        ...         return ""
        ...     def accumulate(self, states, groups, rows):
        ...         for group, word in zip(groups.to_pylist(), rows["word"].to_pylist()):
        ...             states[group] = self.merge(states[group], word)
        ...     def merge(self, state, other):
        ...         return max(state, other, key=lambda word: (len(word), word))
        ...     def finish(self, states):
        ...         return pa.table({"longest": states})
        >>> words = pa.table({"k": [1, 1, 2], "word": ["a", "abc", "xy"]})
        >>> flow = pk.Flow(words.schema).key_by("k").aggregate(Longest(), schema="longest string", columns=["word"])
        >>> sorted(flow.collect(words).to_pylist(), key=lambda row: row["k"])
        [{'k': 1, 'longest': 'abc'}, {'k': 2, 'longest': 'xy'}]
        """
        self._stateless_only("aggregate")
        if isinstance(aggregator, type):
            called = aggregator.__name__
            raise ConfigError(f"aggregate({called}) got a class; give an object of it: aggregate({called}(), ...)")
        methods = {"create": "", "accumulate": "states, groups, rows", "merge": "state, other", "finish": "states"}
        for method, given in methods.items():
            if not callable(getattr(aggregator, method, None)):
                raise ConfigError(
                    f"aggregate({aggregator!r}): it has no method {method!r}; give an object, such as one of a class"
                    " that is made from penstock.Aggregator"
                )
            require_plain(getattr(aggregator, method), f"aggregate {method}", takes=given)
        if emit is not None:
            one_of(emit, "aggregate emit", ("final", "update"))
        if emit == "update" and self._window is not None:
            raise PlanError(
                f"aggregate(emit='update') with window({self._window}): its rows come when a window closes; leave emit"
                " out"
            )
        takes = self._columns if columns is None else names_of(columns, "aggregate columns")
        self._require(takes, "aggregate columns")
        made = to_arrow(schema, "aggregate schema")
        keys = self._keys or ()
        kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in self._key_types(keys)]
        head = list(zip(keys, kinds, strict=True))
        time_type, windows = None, ""
        if self._window is not None:
            time_type = self._key_types([self._time("aggregate")])[0]
            head = [("window_start", time_type), ("window_end", time_type), *head]
            # Bounds of windows stand in the state as the column counts, in microseconds unless it says otherwise.
            unit = time_type.unit if pa.types.is_timestamp(time_type) else "ms"
            windows = f" in window({self._window})" + ("" if unit == "us" else f"; windows in {unit}")
        heads = dict(head)
        taken = [column for column in made.names if column in heads]
        if taken:
            raise SchemaError(f"aggregate schema: column {taken[0]!r} is that of a key or a window; rename it")
        if not made.names:
            raise SchemaError("aggregate schema: it has no column")
        shape = pa.schema([*head, *made])
        named = self._named("aggregate", "aggregate", name)
        label = name or type(aggregator).__name__
        kept = "partial results of a function"
        call = {
            "kind": "aggregate",
            "step": self._label("aggregate", label),
            "func": aggregator,
            "columns": list(takes),
            "keys": list(keys),
            "key_types": kinds,
            "schema": shape,
            "time_type": time_type,
            "sessions": self._window is not None and self._window.kind == "session",
            "kept": kept + windows,
        }
        plan_step: dict[str, Any] = {
            "op": "aggregate",
            "call": len(self._calls),
            "schema": encode(shape),
            "name": label,
            **named,
        }
        if emit is not None or self._window is not None:
            plan_step["emit"] = "final" if emit is None else emit
        return self._with(plan_step, tuple(shape.names), call=call)

    def distinct(self, *columns: str, name: str | None = None) -> Self:
        """Give each combination of values of some columns once.

        Parameters
        ----------
        *columns : str
            The columns; default all.
        name : str, optional
            Of the step and its state, as in `agg`.

        Returns
        -------
        Flow
            With these columns alone: of other columns rows of equal values may differ, and which of them
            came first would depend on the host. With a `window` directly before, window_start and
            window_end in front of them.

        Raises
        ------
        SchemaError
            When a column does not exist here.
        ConfigError
            When one is given twice.
        PlanError
            Behind a `key_by`.

        Notes
        -----
        Null is a value like any other, -0.0 is 0.0, and all NaNs are one value.

        Without a window a row comes out when its values first come, and each combination is kept for ever: state only
        grows, by some 10 to 30 bytes for each and what its values are long. With a window each combination comes out
        once per window, when it closes, and the state is that of open windows.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> pages = pa.table({"user": ["ann", "bob", "ann"], "page": ["/", "/", "/"]})
        >>> pk.Flow(pages.schema).distinct("page").collect(pages).to_pylist()
        [{'page': '/'}]
        """
        self._stateless_only("distinct")
        if self._keys is not None:
            raise PlanError(f"distinct names its columns itself; leave key_by({', '.join(self._keys)}) out")
        self._no_sessions("distinct")
        names = columns_of(columns, "distinct") if columns else self._columns
        self._require(names, "distinct")
        named = self._named("distinct", "distinct", name)
        head = ("window_start", "window_end") if self._window is not None else ()
        taken = [column for column in names if column in head]
        if taken:
            raise SchemaError(f"distinct behind a window gives window bounds; rename the column {taken[0]!r}")
        return self._with({"op": "distinct", "columns": list(names), **named}, (*head, *names))

    def top(
        self,
        n: int,
        by: str,
        per: str | Sequence[str] | None = None,
        descending: bool = True,
        *,
        name: str | None = None,
    ) -> Self:
        """Keep the rows with the `n` greatest values, ties included.

        Parameters
        ----------
        n : int
            How many ranks; a row is kept when fewer than `n` rows of its group are greater,
            so equal values stay or go together and more than `n` rows may come out.
        by : str
            The column that decides.
        per : str or sequence of str, optional
            The groups: ``"window"`` (one group per window), column names, or None for one
            group over everything.
        descending : bool, default True
            False keeps the least values.
        name : str, optional
            Of the step and its state, as in `agg`.

        Returns
        -------
        Flow
            The same columns; with a `window` directly before, window_start and window_end
            in front of them.

        Raises
        ------
        SchemaError
            When a column does not exist here.
        ConfigError
            When `n` is not an int from 1 to 2**31.
        PlanError
            For ``per="window"`` where no window is.

        Notes
        -----
        Rows travel to the worker that owns their group: one exchange. Memory: the rows kept
        per open group.

        Examples
        --------
        >>> import penstock as pk
        >>> bids = pk.Flow("auction bigint, price bigint, ts timestamp", event_time="ts")
        >>> bids.window(pk.tumbling("10s")).top(1, by="price", per="window").columns
        ('window_start', 'window_end', 'auction', 'price', 'ts')
        """
        self._stateless_only("top")
        ranks = whole(n, 1, _MOST_RANKS)
        if ranks is None:
            raise ConfigError(f"top({n!r}): the number of ranks must be an int from 1 to {_MOST_RANKS}")
        yes_or_no(descending, "top descending")
        self._no_sessions("top")
        self._require([by], "top by")
        columns = self._columns
        if self._window is not None:
            columns = ("window_start", "window_end", *columns)
        group: str | list[str] | None
        if per is None:
            group = None
        elif per == "window":
            if "window_start" not in columns:
                raise PlanError("top(per='window') needs a window before it: write .window(...) or group by columns")
            group = "window"
        else:
            group = list(names_of(per, "top per"))
            unknown = [name for name in group if name not in columns]
            if unknown:
                raise missing(unknown[0], "top per", columns)
        if self._keys is not None:
            raise PlanError(f"top does not use key_by({', '.join(self._keys)}); name the groups with per=")
        named = self._named("top", "top", name)
        step = {"op": "top", "n": ranks, "by": by, "descending": descending, "per": group, **named}
        shape = self._shape if self._window is None else None
        return self._with(step, columns, shape=shape)

    def stateful_map(
        self,
        step: Callable[..., Any],
        *,
        schema: Any,
        columns: Sequence[str] | None = None,
        on_timer: Callable[..., Any] | None = None,
        ttl: Duration | None = None,
        ttl_time: str = "event",
        at_end: Callable[..., Any] | None = None,
        name: str | None = None,
        sides: Mapping[str, Any] | None = None,
    ) -> Self:
        """Run a Python function per row with a state of its own per key.

        Parameters
        ----------
        step : callable
            ``step(state, *values) -> (state, out)``. `state` is None for a new key; a
            returned state of None forgets the key. `values` are those of `columns`. `out`
            is None (no row), a tuple (one row) or a list of tuples, in the order of
            `schema`, taken as it is then. Rows of one key come in input order.
        schema : str, pyarrow.Schema or pyspark StructType
            Columns that `step` puts out.
        columns : sequence of str, optional
            Columns that `step` receives; default all, in order.
        on_timer : callable, optional
            ``on_timer(state, time, value, *key) -> (state, out)``, called when the watermark has passed
            a time for which `step` has set a timer. Both may return a third value, `later`: None, a
            timer ``(time, value)`` or a list of them, for this key. Times are milliseconds since 1970 or
            datetimes (UTC where they name no zone); `on_timer` sees them as event time has them.
        ttl : str or datetime.timedelta, optional
            How long after its last row or timer a state is forgotten.
        ttl_time : {"event", "processing"}, default "event"
            By which time: that of rows, or that of the host. See Notes.
        at_end : callable, optional
            ``at_end(state, *key) -> out``, called for each key that has a state when the input has ended and
            all timers have fired. The key is forgotten then.
        name : str, optional
            What the step is called in `explain`, errors and statistics; default the name of
            the function. One that is given is also that of its state, as in `agg`.
        sides : dict of str to schema, optional
            Side outputs: for each its name, which no other of the flow has, and its columns. `out` of all three
            functions may be ``penstock.side(name, row)`` then, or a list that has such. See `penstock.side`, and `run`
            for who takes them.

        Returns
        -------
        Flow
            With the columns of `schema`.

        Raises
        ------
        SchemaError
            When a column does not exist here or a schema cannot be read.
        PlanError
            Without a `key_by` before, with a window, or with `on_timer` or a `ttl` in event time where the
            flow has no `event_time`.
        ConfigError
            When a function is not callable, `ttl` is no duration, `ttl_time` is unknown, or a side output has no name
            of its own.

        Notes
        -----
        Timestamps come as datetimes in UTC (of another zone where the type names one; without one of a
        `timestamp_ntz`), on every host and whatever the zone of its session is. What is put out for a
        `timestamp` needs a zone, any one, and for a `timestamp_ntz` has none; a number is no time.

        The state is a live Python object; it is pickled only when its bin moves to another
        process or into a snapshot. A list, dict or array that is put out and changed later, as a state
        may be, is in its row as it was then: it is copied, which costs a tenth to a half of a microsecond and more
        where it is long or deep. When `step` raises, the run stops with
        `UserFunctionError` and the state of that key is unchanged.

        Rows of a key come in input order where only maps lie between the source and this
        step. Behind another keyed step, rows that it puts out for different keys of its own
        come in no defined order: write a step there that does not depend on it.

        `on_timer` and `at_end` get the key as `key_by` tells keys apart, so 0.0 for a float of -0.0, whichever came
        first; `step` gets the values of its row.

        *Timers* are called at the end of the epoch whose watermark is behind them, so after its rows, for a key
        in the order of their times. They may set more, but none before themselves. One for a time that has
        passed is called at the end of this epoch. At the end of input all are called, until none is left: a
        timer that sets itself again for ever never lets a run end. A key may have timers and no state.

        *States expire.* In event time a row that is `ttl` or more behind the last one of its key finds no state,
        whatever the epochs, and the state goes when the watermark says that no row can find it any more. A row
        without event time renews nothing. In processing time all rows of an epoch have one time, which the host
        gives it and which is the same when it is repeated or undone: the state is gone in the first epoch that is
        `ttl` or more behind the last one with a row or timer of the key. Rows wait there for the end of their
        epoch. A batch job has no such time: nothing waits for it there, and nothing expires. Timers of a key stay
        when its state expires. At the end of input no more states expire in event time; in processing time one that
        is `ttl` old then has expired as in any epoch, and `at_end` does not hear of it.

        All of it is state: it moves, is undone, and is in checkpoints, with what was forgotten. Neither costs a
        flow without it anything; with it a row costs one or two microseconds more, and a timer about ten.

        Examples
        --------
        >>> import penstock as pk
        >>> def running(total, k, v):
        ...     total = (total or 0) + v
        ...     return total, (k, total)
        >>> keyed = pk.Flow("k bigint, v bigint").key_by("k")
        >>> flow = keyed.stateful_map(running, schema="k bigint, total bigint")
        >>> flow.columns
        ('k', 'total')

        Orders that nobody pays within ten milliseconds:

        >>> import pyarrow as pa
        >>> def order(paid, k, ts, pays):
        ...     return (True, None) if pays else (False, None, (ts + 10, "due"))
        >>> def due(paid, time, value, k):
        ...     return None, None if paid else (k, time)
        >>> orders = pk.Flow("k bigint, ts bigint, pays boolean", event_time="ts").key_by("k")
        >>> unpaid = orders.stateful_map(order, schema="k bigint, due bigint", on_timer=due)
        >>> rows = pa.table({"k": [1, 2, 1], "ts": [0, 5, 7], "pays": [False, False, True]})
        >>> unpaid.collect(rows).to_pylist()
        [{'k': 2, 'due': 15}]
        """
        self._stateless_only("stateful_map")
        if not callable(step):
            raise ConfigError(f"stateful_map({step!r}): the step must be a function step(state, *values)")
        require_plain(step, "stateful_map", takes="state, *values", ignored=True)
        if self._keys is None:
            raise PlanError("stateful_map needs keys: write .key_by('column').stateful_map(...)")
        if self._window is not None:
            raise PlanError("stateful_map takes no window; keep what it needs in the state, or use agg")
        takes = self._columns if columns is None else names_of(columns, "stateful_map columns")
        self._require(takes, "stateful_map columns")
        shape = to_arrow(schema, "stateful_map schema")
        named = self._named("stateful_map", "stateful_map", name)
        label = name or function_name(step)
        call = {
            "kind": "stateful",
            "step": self._label("stateful_map", label),
            "func": step,
            "columns": list(takes),
            "keys": list(self._keys),
            "key_types": self._key_types(self._keys),
            "schema": shape,
        }
        timed = on_timer is not None or ttl is not None or at_end is not None
        one_of(ttl_time, "stateful_map ttl_time", ("event", "processing"))
        if timed:
            call |= self._timed(on_timer, ttl, ttl_time, at_end)
        beside = side_step(sides, "stateful_map", call)
        plan_step = {
            "op": "stateful_map",
            "call": len(self._calls),
            **({"ends": True} if timed else {}),
            "columns": list(self._keys),
            "schema": encode(shape),
            "name": label,
            **named,
            **beside,
        }
        return self._with(plan_step, tuple(shape.names), call=call, shape=shape)

    def apply_in_pandas_with_state(
        self,
        func: GroupFunction,
        outputStructType: Any,
        stateStructType: Any,
        outputMode: str = "update",
        timeoutConf: str = "NoTimeout",
        *,
        timezone: str = "UTC",
        name: str | None = None,
        sides: Mapping[str, Any] | None = None,
    ) -> Self:
        """Run a function written for Spark's ``applyInPandasWithState`` on the groups of each epoch.

        Parameters
        ----------
        func : callable
            ``func(key, frames, state)``: the key as a tuple, an iterator of pandas DataFrames with
            the rows of the key in this epoch (all columns), and a `penstock.GroupState`.
            It yields DataFrames with the columns of `outputStructType`.
        outputStructType : str, pyarrow.Schema or pyspark StructType
            Columns that `func` yields: by name, or by position where no name is text.
        stateStructType : str, pyarrow.Schema or pyspark StructType
            The state, a tuple.
        outputMode : {"update", "append"}, default "update"
            Taken for Spark's sake; rows come out once in either mode.
        timeoutConf : {"NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"}, default "NoTimeout"
            What a key may wait for when it gets no rows.
        timezone : str, default "UTC"
            Zone in whose local time frames show timestamps.
        name : str, optional
            What the step is called in `explain`, errors and statistics; default the name of
            the function. One that is given is also that of its state, as in `agg`.
        sides : dict of str to schema, optional
            Side outputs, as of `stateful_map`: `func` may yield ``penstock.side(name, frame)`` then.

        Returns
        -------
        Flow
            With the columns of `outputStructType`.

        Raises
        ------
        ConfigError
            When `func` is not callable, a mode or timeout is unknown, or a side output has no name of its own.
        PlanError
            Without a `key_by` before, with a window, or with event-time timeouts and no
            `event_time`.
        SchemaError
            When a schema cannot be read.

        Notes
        -----
        Each key with rows is called once per epoch, then the keys whose timeouts are due, with
        ``state.hasTimedOut`` and one frame without rows. A timeout is gone when its call begins.
        An epoch is a batch of Spark's together with the empty batch that Spark runs after it when
        the watermark has moved: event-time timeouts before the new watermark come out with the
        epoch that moved it. With event-time timeouts, rows at or before the watermark are late.
        In a batch job each key is called once and nothing times out.

        Cost: a call of `func` and some 20 microseconds per key, epoch and frame; what `func`
        does with pandas usually takes longer. `stateful_map` needs no frames.

        Examples
        --------
        >>> import pandas as pd
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> def count(key, frames, state):
        ...     seen = sum(map(len, frames)) + (state.get[0] if state.exists else 0)
        ...     state.update((seen,))
        ...     yield pd.DataFrame({"word": [key[0]], "seen": [seen]})
        >>> keyed = pk.Flow("word string").key_by("word")
        >>> flow = keyed.apply_in_pandas_with_state(count, "word string, seen bigint", "seen bigint")
        >>> flow.collect(pa.table({"word": ["a", "a"]})).to_pylist()
        [{'word': 'a', 'seen': 2}]
        """
        return self._group_state(
            func, outputStructType, stateStructType, outputMode, timeoutConf, timezone, name, sides, streaming=True
        )

    def _timed(self, on_timer: Any, ttl: Duration | None, ttl_time: str, at_end: Any) -> dict[str, Any]:
        """What a call has more, of a function with timers, states that expire, or an end."""
        for what, given, takes in (
            ("on_timer", on_timer, "state, time, value, *key"),
            ("at_end", at_end, "state, *key"),
        ):
            if given is not None and not callable(given):
                raise ConfigError(f"stateful_map {what}={given!r}: give a function")
            require_plain(given, f"stateful_map {what}", takes=takes, ignored=True)
        ttl_us = None if ttl is None else parse_duration(ttl, "stateful_map ttl")
        if on_timer is not None:
            self._time("stateful_map on_timer")
        if ttl is not None and ttl_time == "event":
            self._time("stateful_map ttl", "; or say ttl_time='processing'")
        event_time = None if self._event_time is None else self._whole_rows()._check()["event_time"]
        time_type = None if event_time is None else self._key_types([event_time])[0]
        kept = "values of a function, timed" + (" by processing time" if ttl and ttl_time == "processing" else "")
        return {
            "kind": "timed",
            "on_timer": on_timer,
            "at_end": at_end,
            "ttl_us": ttl_us,
            "ttl_time": ttl_time,
            "event_time": event_time,
            "time_type": time_type,
            "kept": kept,
        }

    def _no_sessions(self, op: str) -> None:
        if self._window is not None and self._window.kind == "session":
            raise PlanError(
                f"{op} behind window({self._window}): sessions are of keys, and only agg and aggregate take them; write"
                " .key_by(...).window(penstock.session(...)).agg(...)"
            )

    def _key_types(self, keys: Sequence[str]) -> list[pa.DataType]:
        source = self._shape if self._shape is not None else self._whole_rows().output_schema
        return [source.field(key).type for key in keys]

    def _group_state(
        self,
        func: Callable[..., Any],
        outputStructType: Any,
        stateStructType: Any,
        outputMode: str,
        timeoutConf: str,
        timezone: str,
        name: str | None,
        sides: Mapping[str, Any] | None = None,
        *,
        streaming: bool,
    ) -> Self:
        """The step of `apply_in_pandas_with_state`; a flow that is only for batch jobs needs no event time."""
        from penstock._functions.group_state import EVENT_TIME, require_timeout

        what = "apply_in_pandas_with_state"
        self._stateless_only(what)
        if not callable(func):
            raise ConfigError(f"{what}({func!r}): give a function func(key, frames, state)")
        require_plain(func, what, takes="key, frames, state")
        if not isinstance(outputMode, str):
            raise ConfigError(f"{what} outputMode={outputMode!r} is unknown; use 'update' or 'append'")
        one_of(outputMode.lower(), f"{what} outputMode", ("update", "append"))
        require_timeout(timeoutConf)
        if self._keys is None:
            raise PlanError(f"{what} needs keys: write .key_by('column').{what}(...)")
        if self._window is not None:
            raise PlanError(f"{what} takes no window; keep what it needs in the state, or use agg")
        if streaming and timeoutConf == EVENT_TIME and self._event_time is None:
            raise PlanError(
                f"{what} with EventTimeTimeout needs event time: write Flow(schema, event_time='ts', lateness='10s')"
            )
        try:
            pa.scalar(0, pa.timestamp("us", timezone)).as_py()
        except Exception as error:
            raise ConfigError(f"{what} timezone={timezone!r} is no time zone: {error}") from error
        shape = to_arrow(outputStructType, "outputStructType")
        named = self._named("group_state", what, name)
        label = name or function_name(func)
        call = {
            "kind": "groups",
            "step": self._label(what, label),
            "func": func,
            "keys": list(self._keys),
            "key_types": self._key_types(self._keys),
            "columns": list(self._columns),
            "schema": shape,
            "state": to_arrow(stateStructType, "stateStructType"),
            "timeout": timeoutConf,
            "watermark": self._event_time is not None,
            "timezone": timezone,
        }
        beside = side_step(sides, what, call)
        plan_step = {
            "op": "group_state",
            "call": len(self._calls),
            "columns": list(self._keys),
            "schema": encode(shape),
            "name": label,
            "event_time": timeoutConf == EVENT_TIME and self._event_time is not None,
            **named,
            **beside,
        }
        return self._with(plan_step, tuple(shape.names), call=call, shape=shape)
