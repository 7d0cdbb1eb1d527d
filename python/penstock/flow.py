"""The flow: what to compute, independent of where.

Owns: the immutable builder that users write and the plan (versioned plain data plus Python
callables) that it becomes. Hosts run the plan: `penstock.local` in this process,
`penstock.spark` on a cluster.

Invariants: a Flow never changes; every method returns a new one, so a flow may be kept,
branched and pickled. Names of columns are checked where they are written; types are checked
by the native compiler, at `Flow.output_schema`, `Flow.explain` or the first run.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.aggregates import Aggregate
from penstock.durations import Duration, format_duration, milliseconds, parse_duration
from penstock.errors import ConfigError, PlanError, SchemaError
from penstock.schema import to_arrow, to_ddl
from penstock.windows import Window

if TYPE_CHECKING:
    from penstock.local import BatchSink, LateSink, LocalSession, RunSummary
    from penstock.spark.partitions import PartitionFunction

__all__ = ["PLAN_VERSION", "Flow"]

#: Version of the plan format that this release writes.
PLAN_VERSION = 1

_KEYED_OPS = ("agg", "group_state", "stateful_map", "top")
_MOST_RANKS = 1 << 31


class Flow:
    """A description of a computation over batches of rows.

    Parameters
    ----------
    schema : str, pyarrow.Schema or pyspark StructType
        Columns of the input: Spark DDL such as ``"auction bigint, ts timestamp"``, or a
        schema object.
    event_time : str, optional
        Column that says when a row happened: a timestamp of any unit, or a bigint that
        counts milliseconds since 1970. Needed by `window`.
    lateness : str, int or datetime.timedelta, default "0s"
        How far behind the greatest event time a row may still come, in whole
        milliseconds. The watermark is the greatest event time seen minus this. A row whose
        windows have all closed is late: it goes to the late output and a counter, never
        silently away.
    order_by : str or sequence of str, optional
        Columns that fix the order of the input where the host may change it (Spark may
        replan partitions). Only `stateful_map` cares about order.

    Raises
    ------
    SchemaError
        When the schema cannot be read or a named column is not in it.
    ConfigError
        When a duration is not one.

    Notes
    -----
    Every method returns a new Flow in time linear in the number of steps and touches no
    data. The same flow gives the same rows on every host and any number of workers.

    Examples
    --------
    >>> import penstock as pk
    >>> flow = (pk.Flow("auction bigint, price bigint, ts timestamp", event_time="ts", lateness="5s")
    ...           .key_by("auction").window(pk.sliding("60s", every="1s")).agg(n=pk.count())
    ...           .top(1, by="n", per="window"))
    >>> flow.columns
    ('window_start', 'window_end', 'auction', 'n')
    """

    __slots__ = (
        "_calls",
        "_columns",
        "_event_time",
        "_keys",
        "_lateness_ms",
        "_order_by",
        "_schema",
        "_shape",
        "_steps",
        "_window",
    )

    def __init__(
        self,
        schema: Any,
        event_time: str | None = None,
        lateness: Duration = "0s",
        order_by: str | Sequence[str] | None = None,
    ) -> None:
        self._schema: pa.Schema = to_arrow(schema)
        self._columns: tuple[str, ...] = tuple(self._schema.names)
        self._event_time = event_time
        self._lateness_ms = milliseconds(parse_duration(lateness, "lateness", allow_zero=True), "lateness")
        self._order_by = _names(order_by, "order_by") if order_by is not None else ()
        #: Steps as they stand in the plan; schemas are base64 text.
        self._steps: tuple[dict[str, Any], ...] = ()
        #: What each call number stands for, as the native part takes it.
        self._calls: tuple[dict[str, Any], ...] = ()
        #: The key columns of a key_by that no keyed step has used yet.
        self._keys: tuple[str, ...] | None = None
        #: The window that no keyed step has used yet.
        self._window: Window | None = None
        #: Schema of the rows here where Python knows it without the compiler.
        self._shape: pa.Schema | None = self._schema
        if event_time is not None:
            self._require([event_time], "event_time")
        elif self._lateness_ms:
            raise ConfigError(f"lateness {lateness!r} needs event_time: name the column that says when a row happened")
        self._require(self._order_by, "order_by")

    # Building

    def key_by(self, *columns: str, nulls: str = "group") -> Flow:
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
            To be followed by `window`, `agg`, `stateful_map` or `top`.

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
        names = _names(columns, "key_by")
        self._require(names, "key_by")
        _one_of(nulls, "key_by nulls", ("group", "reject"))
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

    def window(self, window: Window) -> Flow:
        """Cut event time for the next `agg` or `top`.

        Parameters
        ----------
        window : Window
            Made by `penstock.tumbling` or `penstock.sliding`.

        Returns
        -------
        Flow
            To be followed by `agg` or `top`.

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
        if not isinstance(window, Window):
            raise ConfigError(f"window({window!r}): make it with penstock.tumbling or penstock.sliding")
        if self._event_time is None:
            raise PlanError(
                f"window({window}) needs event time: write Flow(schema, event_time='ts') with the column that"
                " says when a row happened"
            )
        if self._window is not None:
            raise PlanError(f"window({window}) follows window({self._window}) directly; keep one of them")
        return self._with(window.to_step(), self._columns, keys=self._keys, window=window, shape=self._shape)

    def agg(self, *, emit: str | None = None, **aggregates: Aggregate) -> Flow:
        """Aggregate per key, or per key and window.

        Parameters
        ----------
        emit : {"final", "update"}, optional
            When rows come out. ``"final"``: once, when the window closes or the input
            ends. ``"update"``: at the end of every epoch, one row with the current values
            of each key that changed in it. Default: "final" with a window, else "update".
        **aggregates : Aggregate
            Output column = what it holds, such as ``n=pk.count()``.

        Returns
        -------
        Flow
            Columns: window_start and window_end where there is a window, the keys, the
            aggregates. Window bounds have the type of the event-time column.

        Raises
        ------
        SchemaError
            When a column does not exist here, or an output name is taken.
        PlanError
            Without a `key_by` before.
        ConfigError
            When no aggregate is given, or one is not made by penstock.

        Notes
        -----
        Memory: a few words per key (and open window) and aggregate.

        Examples
        --------
        >>> import penstock as pk
        >>> pk.Flow("word string").key_by("word").agg(count=pk.count(), emit="final").columns
        ('word', 'count')
        """
        if self._keys is None:
            raise PlanError("agg needs keys: write .key_by('column').agg(...)")
        if not aggregates:
            raise ConfigError("agg() names no aggregate; write for example .agg(n=penstock.count())")
        mode = emit if emit is not None else ("final" if self._window is not None else "update")
        _one_of(mode, "agg emit", ("final", "update"))
        head = (("window_start", "window_end") if self._window is not None else ()) + self._keys
        for name, aggregate in aggregates.items():
            if not isinstance(aggregate, Aggregate):
                raise ConfigError(
                    f"agg({name}={aggregate!r}) is no aggregate; use penstock.count, sum, min, max or mean"
                )
            if aggregate.column is not None:
                self._require([aggregate.column], f"agg {name}={aggregate}")
            if name in head:
                raise SchemaError(f"agg {name}={aggregate} takes the name of the output column {name!r}; rename it")
        step = {"op": "agg", "emit": mode, "aggs": [item.to_plan(name) for name, item in aggregates.items()]}
        return self._with(step, (*head, *aggregates))

    def top(self, n: int, by: str, per: str | Sequence[str] | None = None, descending: bool = True) -> Flow:
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
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MOST_RANKS:
            raise ConfigError(f"top({n!r}): the number of ranks must be an int from 1 to {_MOST_RANKS}")
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
            group = list(_names(per, "top per"))
            missing = [name for name in group if name not in columns]
            if missing:
                raise _missing(missing[0], "top per", columns)
        if self._keys is not None:
            raise PlanError(f"top does not use key_by({', '.join(self._keys)}); name the groups with per=")
        step = {"op": "top", "n": n, "by": by, "descending": bool(descending), "per": group}
        shape = self._shape if self._window is None else None
        return self._with(step, columns, shape=shape)

    def stateful_map(
        self,
        step: Callable[..., Any],
        *,
        schema: Any,
        columns: Sequence[str] | None = None,
        name: str | None = None,
    ) -> Flow:
        """Run a Python function per row with a state of its own per key.

        Parameters
        ----------
        step : callable
            ``step(state, *values) -> (state, out)``. `state` is None for a new key; a
            returned state of None forgets the key. `values` are those of `columns`. `out`
            is None (no row), a tuple (one row) or a list of tuples, in the order of
            `schema`. Rows of one key come in input order.
        schema : str, pyarrow.Schema or pyspark StructType
            Columns that `step` puts out.
        columns : sequence of str, optional
            Columns that `step` receives; default all, in order.
        name : str, optional
            What the step is called in `explain`, errors and statistics; default the name of
            the function.

        Returns
        -------
        Flow
            With the columns of `schema`.

        Raises
        ------
        SchemaError
            When a column does not exist here or `schema` cannot be read.
        PlanError
            Without a `key_by` before, or with a window.
        ConfigError
            When `step` is not callable.

        Notes
        -----
        The state is a live Python object; it is pickled only when its bin moves to another
        process or into a snapshot. When `step` raises, the run stops with
        `UserFunctionError` and the state of that key is unchanged.

        Rows of a key come in input order where only maps lie between the source and this
        step. Behind another keyed step, rows that it puts out for different keys of its own
        come in no defined order: write a step there that does not depend on it.

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
        """
        if not callable(step):
            raise ConfigError(f"stateful_map({step!r}): the step must be a function step(state, *values)")
        if self._keys is None:
            raise PlanError("stateful_map needs keys: write .key_by('column').stateful_map(...)")
        if self._window is not None:
            raise PlanError("stateful_map takes no window; keep what it needs in the state, or use agg")
        takes = self._columns if columns is None else _names(columns, "stateful_map columns")
        self._require(takes, "stateful_map columns")
        shape = to_arrow(schema, "stateful_map schema")
        label = name or _function_name(step)
        call = {
            "kind": "stateful",
            "step": f"stateful_map[{len(self._steps)}] {label}",
            "func": step,
            "columns": list(takes),
            "keys": list(self._keys),
            "schema": shape,
        }
        plan_step = {
            "op": "stateful_map",
            "call": len(self._calls),
            "columns": list(self._keys),
            "schema": _encode(shape),
            "name": label,
        }
        return self._with(plan_step, tuple(shape.names), call=call, shape=shape)

    def apply_in_pandas_with_state(
        self,
        func: Callable[..., Any],
        outputStructType: Any,
        stateStructType: Any,
        outputMode: str = "update",
        timeoutConf: str = "NoTimeout",
        *,
        timezone: str = "UTC",
        name: str | None = None,
    ) -> Flow:
        """Run a function written for Spark's ``applyInPandasWithState`` on the groups of each epoch.

        Parameters
        ----------
        func : callable
            ``func(key, frames, state)``: the key as a tuple, an iterator of pandas DataFrames with
            the rows of the key in this epoch (all columns), and a `penstock.group_state.GroupState`.
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
            the function.

        Returns
        -------
        Flow
            With the columns of `outputStructType`.

        Raises
        ------
        ConfigError
            When `func` is not callable, or a mode or timeout is unknown.
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
            func, outputStructType, stateStructType, outputMode, timeoutConf, timezone, name, streaming=True
        )

    def _group_state(
        self,
        func: Callable[..., Any],
        outputStructType: Any,
        stateStructType: Any,
        outputMode: str,
        timeoutConf: str,
        timezone: str,
        name: str | None,
        *,
        streaming: bool,
    ) -> Flow:
        """The step of `apply_in_pandas_with_state`; a flow that is only for batch jobs needs no event time."""
        from penstock.group_state import EVENT_TIME, require_timeout

        what = "apply_in_pandas_with_state"
        if not callable(func):
            raise ConfigError(f"{what}({func!r}): give a function func(key, frames, state)")
        if not isinstance(outputMode, str):
            raise ConfigError(f"{what} outputMode={outputMode!r} is unknown; use 'update' or 'append'")
        _one_of(outputMode.lower(), f"{what} outputMode", ("update", "append"))
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
        source = self._shape if self._shape is not None else self._before_keys().output_schema
        label = name or _function_name(func)
        call = {
            "kind": "groups",
            "step": f"{what}[{len(self._steps)}] {label}",
            "func": func,
            "keys": list(self._keys),
            "key_types": [source.field(key).type for key in self._keys],
            "columns": list(self._columns),
            "schema": shape,
            "state": to_arrow(stateStructType, "stateStructType"),
            "timeout": timeoutConf,
            "watermark": self._event_time is not None,
            "timezone": timezone,
        }
        plan_step = {
            "op": "group_state",
            "call": len(self._calls),
            "columns": list(self._keys),
            "schema": _encode(shape),
            "name": label,
            "event_time": timeoutConf == EVENT_TIME and self._event_time is not None,
        }
        return self._with(plan_step, tuple(shape.names), call=call, shape=shape)

    def map_batches(self, f: Callable[[pa.RecordBatch], Any], schema: Any = None) -> Flow:
        """Run a function over whole batches, with no state.

        Parameters
        ----------
        f : callable
            ``f(batch) -> batch``: from a ``pyarrow.RecordBatch`` to a RecordBatch or Table
            with the columns of `schema`; any number of rows.
        schema : str, pyarrow.Schema or pyspark StructType, optional
            Columns that `f` gives back; default those that it receives.

        Returns
        -------
        Flow
            With the columns of `schema`.

        Raises
        ------
        ConfigError
            When `f` is not callable.
        SchemaError
            When `schema` cannot be read.
        PlanError
            Directly after `key_by` or `window`: map first.

        Notes
        -----
        How rows are cut into batches is the host's business: `f` must treat each row by
        itself. Cost: one call into Python per batch.

        Examples
        --------
        >>> import pyarrow.compute as pc
        >>> import penstock as pk
        >>> flow = pk.Flow("price bigint").map_batches(lambda b: b.filter(pc.greater(b["price"], 100)))
        >>> flow.columns
        ('price',)
        """
        if not callable(f):
            raise ConfigError(f"map_batches({f!r}): give a function from batch to batch")
        if self._keys is not None or self._window is not None:
            waiting = "key_by" if self._window is None else "window"
            raise PlanError(f"map_batches directly after {waiting}: the function sees no keys; put it before {waiting}")
        if schema is not None:
            shape = to_arrow(schema, "map_batches schema")
        else:
            shape = self._shape if self._shape is not None else self.output_schema
        call = {
            "kind": "map",
            "step": f"map_batches[{len(self._steps)}] {_function_name(f)}",
            "func": f,
            "schema": shape,
        }
        step = {"op": "map_batches", "call": len(self._calls), "schema": _encode(shape)}
        return self._with(step, tuple(shape.names), call=call, shape=shape)

    # Looking

    @property
    def input_schema(self) -> pa.Schema:
        """Columns of the input (pyarrow.Schema)."""
        return self._schema

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that come out of the last step."""
        return self._columns

    @property
    def event_time(self) -> str | None:
        """The event-time column of the input, where there is one."""
        return self._event_time

    @property
    def lateness_ms(self) -> int:
        """How far a row may lag behind the greatest event time, in milliseconds."""
        return self._lateness_ms

    @property
    def order_by(self) -> tuple[str, ...]:
        """Columns that fix the order of the input; empty where none were named."""
        return self._order_by

    @property
    def keyed(self) -> bool:
        """Whether a step keeps state per key or group (and so needs all rows of it)."""
        return any(step["op"] in _KEYED_OPS for step in self._steps)

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

    def explain(self) -> str:
        """Describe the plan: steps, exchanges and schemas, one line each.

        Returns
        -------
        str
            Text for people; its form may change between releases.

        Raises
        ------
        PlanError
            When the flow is not complete.

        Examples
        --------
        >>> import penstock as pk
        >>> "word" in pk.Flow("word string").key_by("word").agg(n=pk.count()).explain()
        True
        """
        return str(self._check()["explain"])

    def to_plan(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the plan that hosts run.

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
            raise PlanError(f"the flow ends in window({self._window}) that no step uses; add .agg(...) or .top(...)")
        if self._keys is not None:
            raise PlanError(
                f"the flow ends in key_by({', '.join(self._keys)}) that no step uses;"
                " add .agg(...), .stateful_map(...) or .apply_in_pandas_with_state(...)"
            )
        source: dict[str, Any] = {"schema": _encode(self._schema), "lateness_ms": self._lateness_ms}
        if self._event_time is not None:
            source["event_time"] = self._event_time
        if self._order_by:
            source["order_by"] = list(self._order_by)
        plan = {"version": PLAN_VERSION, "source": source, "steps": list(self._steps)}
        return json.dumps(plan, separators=(",", ":")), [dict(call) for call in self._calls]

    # Running

    def run(
        self,
        source: Any,
        workers: int = 1,
        *,
        late: LateSink | None = None,
        progress: bool = False,
        batch_rows: int = 65_536,
    ) -> Iterator[pa.RecordBatch]:
        """Run in this process, without Spark.

        Parameters
        ----------
        source : Arrow data
            A RecordBatchReader, Table or RecordBatch; a polars or pandas frame, a DuckDB
            result or anything else with ``__arrow_c_stream__``; or an iterable of batches.
        workers : int, default 1
            Threads; each owns a share of the keys.
        late : callable, optional
            Called with a ``pyarrow.RecordBatch`` of late rows, in this thread. Without it a
            warning tells how many there were.
        progress : bool, default False
            Show a progress bar on stderr.
        batch_rows : int, default 65_536
            Larger input batches are cut; each piece is one epoch, at whose end the
            watermark moves.

        Returns
        -------
        iterator of pyarrow.RecordBatch
            Results as they become final. Closing it early (leaving the loop) stops the
            workers.

        Raises
        ------
        PlanError, SchemaError
            When the flow is not complete or does not fit the source (before the first
            batch).
        UserFunctionError
            When a function of the flow raises.
        ConfigError
            When an option is out of range.

        Notes
        -----
        The source is read as results are taken, with a bounded number of epochs in flight.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> words = pa.table({"word": ["a", "b", "a"]})
        >>> flow = pk.Flow("word string").key_by("word").agg(n=pk.count(), emit="final")
        >>> sorted((r["word"], r["n"]) for batch in flow.run(words) for r in batch.to_pylist())
        [('a', 2), ('b', 1)]
        """
        from penstock.local import run

        return run(self, source, workers, late=late, progress=progress, batch_rows=batch_rows)

    def collect(self, source: Any, workers: int = 1, **options: Any) -> pa.Table:
        """Run in this process and return all rows as one table.

        Parameters
        ----------
        source : Arrow data
            As for `run`.
        workers : int, default 1
            Threads.
        **options
            The other arguments of `run`.

        Returns
        -------
        pyarrow.Table
            Every output row; the columns of `output_schema`.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
        >>> flow.collect(pa.table({"k": [1, 1, 1]})).to_pylist()
        [{'k': 1, 'n': 3}]
        """
        return pa.Table.from_batches(self.run(source, workers, **options), schema=self.output_schema)

    def run_into(self, sink: BatchSink, source: Any, workers: int = 1, **options: Any) -> RunSummary:
        """Run in this process and hand every output batch to a sink.

        Parameters
        ----------
        sink : callable, or object with ``write_batch``
            Called with each ``pyarrow.RecordBatch`` in this thread; a
            ``pyarrow.parquet.ParquetWriter`` or an IPC writer serves as it is.
        source : Arrow data
            As for `run`.
        workers : int, default 1
            Threads.
        **options
            The other arguments of `run`.

        Returns
        -------
        RunSummary
            Rows in, out and late, and seconds.

        Raises
        ------
        ConfigError
            When the sink is neither of the two.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> got = []
        >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
        >>> flow.run_into(got.append, pa.table({"k": [1, 2]})).output_rows
        2
        """
        from penstock.local import run_into

        return run_into(self, sink, source, workers, **options)

    def start(self, workers: int = 1, *, late: LateSink | None = None, batch_rows: int = 65_536) -> LocalSession:
        """Start workers in this process and keep hold of them.

        Parameters
        ----------
        workers : int, default 1
            Threads.
        late : callable, optional
            As for `run`.
        batch_rows : int, default 65_536
            As for `run`.

        Returns
        -------
        LocalSession
            A context manager with `run`, `migrate` and `stats`.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
        >>> with flow.start(workers=2) as session:
        ...     rows = [row for batch in session.run(pa.table({"k": [7, 7]})) for row in batch.to_pylist()]
        >>> rows
        [{'k': 7, 'n': 2}]
        """
        from penstock.local import LocalSession

        return LocalSession(self, workers, late=late, batch_rows=batch_rows)

    def map_in_arrow(self, per_partition: bool = False) -> PartitionFunction:
        """Return a function for ``DataFrame.mapInArrow`` that runs the flow inside each partition.

        Parameters
        ----------
        per_partition : bool, default False
            A keyed flow sees only the keys of one partition; say True when that is meant.
            For results over all partitions use ``penstock.spark.run(flow, df)``.

        Returns
        -------
        PartitionFunction
            A picklable function from an iterator of batches to an iterator of batches.

        Raises
        ------
        PlanError
            When the flow is keyed and `per_partition` is False.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> f = pk.Flow("k bigint").map_batches(lambda b: b.slice(0, 1)).map_in_arrow()
        >>> [b.num_rows for b in f(iter([pa.record_batch({"k": [1, 2]})]))]
        [1]

        With Spark: ``df.mapInArrow(flow.map_in_arrow(), flow.output_ddl)``.
        """
        from penstock.spark.partitions import map_in_arrow

        return map_in_arrow(self, per_partition)

    # Showing

    def __repr__(self) -> str:
        lines = [f"Flow({to_text(self._schema)}{self._source_options()})"]
        lines.extend(f"  .{_step_text(step, self._calls)}" for step in self._steps)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        boxes = [f"<b>source</b> {html.escape(to_text(self._schema) + self._source_options())}"]
        boxes.extend(html.escape(_step_text(step, self._calls)) for step in self._steps)
        style = "border:1px solid #8888;border-radius:4px;padding:2px 8px;display:inline-block"
        arrow = "<div style='padding-left:1em'>&darr;</div>"
        return "<div>" + arrow.join(f"<div style='{style}'>{box}</div>" for box in boxes) + "</div>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Flow):
            return NotImplemented
        return (
            self._schema.equals(other._schema)
            and self._event_time == other._event_time
            and self._lateness_ms == other._lateness_ms
            and self._order_by == other._order_by
            and self._steps == other._steps
            and [call["func"] for call in self._calls] == [call["func"] for call in other._calls]
        )

    def __hash__(self) -> int:
        return hash((tuple(self._schema.names), self._event_time, self._lateness_ms, len(self._steps), self._columns))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__slots__ and not hasattr(self, name):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"a Flow never changes ({name}); its methods return a new Flow")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, ({name: getattr(self, name) for name in self.__slots__},))

    # Inside

    def _check(self) -> dict[str, Any]:
        from penstock import _native

        plan, _ = self.to_plan()
        return dict(_native.plan_check(plan))

    def _before_keys(self) -> Flow:
        """The flow without the key_by that it ends in."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return _restore(state | {"_steps": self._steps[:-1], "_keys": None})

    def _require(self, names: Sequence[str], what: str) -> None:
        for name in names:
            if name not in self._columns:
                raise _missing(name, what, self._columns)

    def _source_options(self) -> str:
        options = ""
        if self._event_time is not None:
            options += f", event_time={self._event_time!r}, lateness={format_duration(self._lateness_ms * 1_000)!r}"
        if self._order_by:
            options += f", order_by={list(self._order_by)!r}"
        return options

    def _with(
        self,
        step: dict[str, Any],
        columns: tuple[str, ...],
        *,
        keys: tuple[str, ...] | None = None,
        window: Window | None = None,
        shape: pa.Schema | None = None,
        call: dict[str, Any] | None = None,
    ) -> Flow:
        return _restore(
            {
                "_schema": self._schema,
                "_event_time": self._event_time,
                "_lateness_ms": self._lateness_ms,
                "_order_by": self._order_by,
                "_steps": (*self._steps, step),
                "_calls": self._calls if call is None else (*self._calls, call),
                "_columns": columns,
                "_keys": keys,
                "_window": window,
                "_shape": shape,
            }
        )


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


def _restore(state: dict[str, Any]) -> Flow:
    flow = object.__new__(Flow)
    for name, value in state.items():
        object.__setattr__(flow, name, value)
    return flow


def _encode(schema: pa.Schema) -> str:
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode("ascii")


def _names(names: str | Sequence[str], what: str) -> tuple[str, ...]:
    try:
        found = (names,) if isinstance(names, str) else tuple(names)
    except TypeError:
        raise ConfigError(f"{what} got {names!r}; name columns by their names") from None
    if not found:
        raise ConfigError(f"{what} names no column")
    for name in found:
        if not isinstance(name, str):
            raise ConfigError(f"{what} got {name!r}; name columns by their names")
        if found.count(name) > 1:
            raise ConfigError(f"{what} names column {name!r} twice")
    return found


def _missing(name: Any, what: str, columns: Sequence[str]) -> SchemaError:
    return SchemaError(f"{what}: column {name!r} does not exist here; there are {', '.join(columns)}")


def _one_of(value: str, what: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{what}={value!r} is unknown; use {' or '.join(repr(item) for item in known)}")


def _function_name(f: Callable[..., Any]) -> str:
    return str(getattr(f, "__qualname__", None) or type(f).__name__).rsplit("<locals>.", maxsplit=1)[-1]


def _step_text(step: dict[str, Any], calls: Sequence[dict[str, Any]]) -> str:
    op = step["op"]
    if op == "key_by":
        return f"key_by({', '.join(step['columns'])})"
    if op == "window":
        return f"window({Window(step['kind'], step['size_us'], step['every_us'])})"
    if op == "agg":
        items = (f"{a['name']}={Aggregate(a['fn'], a.get('column'))}" for a in step["aggs"])
        return f"agg({', '.join(items)}, emit={step['emit']})"
    if op == "top":
        per = step["per"] if step["per"] is None or isinstance(step["per"], str) else ", ".join(step["per"])
        order = "" if step["descending"] else ", descending=False"
        return f"top({step['n']}, by={step['by']}, per={per}{order})"
    call = calls[step["call"]]
    return f"{op}({call['step'].split(' ', 1)[-1]}) -> {to_text(call['schema'])}"
