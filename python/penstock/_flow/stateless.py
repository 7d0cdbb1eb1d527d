"""Steps without state: maps, flat maps, bounded parts and loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._bounds import OnFailure, parse_bounds
from penstock._coroutines import require_plain
from penstock._flow.base import Around, FlowBase, restore, side_step
from penstock._flow.graph import Source
from penstock._flow.text import encode, function_name, to_text
from penstock._options import yes_or_no
from penstock._schema import to_arrow
from penstock.errors import ConfigError, PlanError, SchemaError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StatelessSteps"]


class StatelessSteps(FlowBase):
    """The methods of a flow that keep nothing."""

    __slots__ = ()

    def map_batches(
        self, f: Callable[[pa.RecordBatch], Any], schema: Any = None, *, sides: Mapping[str, Any] | None = None
    ) -> Self:
        """Run a function over whole batches, with no state.

        Parameters
        ----------
        f : callable
            ``f(batch) -> batch``: from a ``pyarrow.RecordBatch`` to a RecordBatch or Table
            with the columns of `schema`; any number of rows.
        schema : str, pyarrow.Schema or pyspark StructType, optional
            Columns that `f` gives back; default those that it receives.
        sides : dict of str to schema, optional
            Side outputs: for each its name, which no other of the flow has, and its columns. `f` may
            return a tuple then: a batch, or none, and ``penstock.side(name, batch)`` for each.
            See `penstock.side`, and `run` for who takes them.

        Returns
        -------
        Flow
            With the columns of `schema`.

        Raises
        ------
        ConfigError
            When `f` is not callable, or a side output has no name of its own.
        SchemaError
            When a schema cannot be read.
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
        require_plain(f, "map_batches", takes="batch")
        self._no_keys("map_batches")
        shape = to_arrow(schema, "map_batches schema") if schema is not None else self._here()
        call = {
            "kind": "map",
            "step": self._label("map_batches", function_name(f)),
            "func": f,
            "schema": shape,
        }
        beside = side_step(sides, "map_batches", call)
        step = {"op": "map_batches", "call": len(self._calls), "schema": encode(shape), **beside}
        return self._with(step, tuple(shape.names), call=call, shape=shape)

    def flat_map(
        self,
        f: Callable[..., Any],
        schema: Any = None,
        *,
        rows: bool = False,
        name: str | None = None,
        sides: Mapping[str, Any] | None = None,
    ) -> Self:
        """Expand batches, or rows, lazily: a function that gives an iterable of any length per input.

        Parameters
        ----------
        f : callable
            ``f(batch) -> iterable of batches``: from a ``pyarrow.RecordBatch`` to RecordBatches or
            Tables with the columns of `schema`. With ``rows=True`` ``f(*values) -> iterable of
            tuples``: from the values of a row, one per column, to rows in the order of `schema`.
            A generator function is the natural form.
        schema : str, pyarrow.Schema or pyspark StructType, optional
            Columns that `f` gives; default those that it receives.
        rows : bool, default False
            Whether an input is a row.
        name : str, optional
            What the step is called in `explain`, errors and statistics; default the name of
            the function.
        sides : dict of str to schema, optional
            Side outputs: for each its name, which no other of the flow has, and its columns. The iterable may
            give ``penstock.side(name, row)`` then, or with batches ``penstock.side(name, batch)``.
            See `penstock.side`, and `run` for who takes them.

        Returns
        -------
        Flow
            With the columns of `schema`.

        Raises
        ------
        ConfigError
            When `f` is not callable, or a side output has no name of its own.
        SchemaError
            When a schema cannot be read.
        PlanError
            Directly after `key_by` or `window`.

        Notes
        -----
        Iterators are drawn from only as what they gave before is worked off, at most about a
        thousand rows at a time, and rest in between: one input may give more rows than fit into
        memory. How much is under way follows from the `bounded` part that the step stands in;
        outside of one, bounds are found while running. Where a consumer pulls (`map_in_arrow`,
        ``penstock.spark.run``), nothing is drawn that it does not take.

        Rows come and go as those of `stateful_map`: timestamps are datetimes in UTC on every host and whatever
        the zone of its session is, those for a `timestamp` need a zone, and what is given is taken as it is
        then, whatever becomes of a list or dict in it.

        When an iterator raises, what it gave before stays, and `UserFunctionError` names the
        input; see `bounded` for going on. How rows are cut into batches is the host's
        business. Cost with ``rows=True``: about a microsecond per row in and out; one call into
        Python per draw.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> def words(text):
        ...     for word in text.split():
        ...         yield (word,)
        >>> flow = pk.Flow("text string").flat_map(words, "word string", rows=True)
        >>> flow.collect(pa.table({"text": ["a rose is", "a rose"]})).column("word").to_pylist()
        ['a', 'rose', 'is', 'a', 'rose']
        """
        if not callable(f):
            raise ConfigError(f"flat_map({f!r}): give a function from {'a row' if rows else 'a batch'} to an iterable")
        yes_or_no(rows, "flat_map rows")
        require_plain(f, "flat_map", takes="*values" if rows else "batch")
        self._no_keys("flat_map")
        shape = to_arrow(schema, "flat_map schema") if schema is not None else self._here()
        label = name or function_name(f)
        call = {
            "kind": "flat",
            "step": self._label("flat_map", label),
            "func": f,
            "columns": list(self._columns),
            "schema": shape,
            "rows": rows,
        }
        beside = side_step(sides, "flat_map", call)
        step = {"op": "flat_map", "call": len(self._calls), "schema": encode(shape), "rows": rows, **beside}
        return self._with(step, tuple(shape.names), call=call, shape=shape)

    def bounded(
        self,
        body: Callable[[Self], Self],
        *,
        batches: int | None = None,
        batch_size: int | None = None,
        memory: int | str | None = None,
        on_failure: OnFailure = "stop",
    ) -> Self:
        """Hold at most so many rows in a part of the flow; the rest waits before it, not expanded.

        Parameters
        ----------
        body : callable
            ``body(flow) -> flow`` builds the part from steps without state: `map_batches`,
            `flat_map`, `iterate` and `bounded`, nested as you like.
        batches : int, optional
            How many batches may be in the part and unfinished (N).
        batch_size : int, optional
            Rows of a batch (B). What is not given is found while running: raised as long as
            that gains throughput, lowered when memory is short.
        memory : int or str, optional
            Bytes that the process may hold, such as ``"512m"``: what is found while running
            keeps away from it.
        on_failure : {"stop", "skip"}, default "stop"
            What happens when the iterator of a `flat_map` in the part raises: the flow stops
            with `UserFunctionError`; or what is left of that input is dropped, a warning is
            logged, the statistics count it, and the others go on. Other steps always stop.

        Returns
        -------
        Flow
            With the columns of the part.

        Raises
        ------
        ConfigError
            When a number is not a whole one of at least 1, or too large; when `memory` is given
            with both numbers, which leave nothing to find.
        PlanError
            When the body uses a keyed step, or returns another flow than the one it was given with
            steps added. A part without steps hands its rows on.

        Notes
        -----
        A batch is finished when nothing of it can come out of the part any more: the next one is
        admitted then, however long the way is and however often rows go around. So it holds in
        loops, where a queue of limited length would lock up. At most N x B rows per worker are
        admitted and unfinished. Each `flat_map` in the part has a window of that size of its own,
        behind the one before it, so k of them hold k x N x B rows, not the product of what they
        make. Rows that have left the part are not bounded by it.

        Statistics (`LocalSession.scopes`, ``Engine.scopes``) tell N, B, the most batches
        that were unfinished, and the batch that holds the window shut.

        The order of rows does not change, unless the body has a loop.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> def up_to(n):
        ...     return ((i,) for i in range(n))
        >>> def multiples(batch):
        ...     return batch.filter([i % 25_000 == 0 for i in batch["i"].to_pylist()])
        >>> flow = pk.Flow("n bigint").bounded(
        ...     lambda part: part.flat_map(up_to, "i bigint", rows=True).map_batches(multiples),
        ...     batches=2, batch_size=500)
        >>> flow.collect(pa.table({"n": [50_000, 30_000]})).column("i").to_pylist()
        [0, 25000, 0, 25000]
        """
        bounds = parse_bounds(batches, batch_size, memory, on_failure)
        made = self._body("bounded", body)
        step: dict[str, Any] = {"op": "bounded", "on_failure": bounds.on_failure, "body": list(made._steps)}
        given = {"batches": bounds.batches, "batch_size": bounds.batch_size, "memory": bounds.memory}
        step |= {key: value for key, value in given.items() if value is not None}
        return self._with(step, made._columns, shape=made._shape, calls=made._calls)

    def iterate(self, body: Callable[[Self], Self], again: str = "again") -> Self:
        """Send rows through a part of the flow again and again, until each of them leaves.

        Parameters
        ----------
        body : callable
            ``body(flow) -> flow`` builds one round from steps without state. What it gives has
            the columns that it receives and one more, a boolean: whether the row goes around
            again. Where that is false or null the row leaves the loop. A round may drop rows and
            make several of one: some may leave while others go around.
        again : str, default "again"
            Name of that column; it is not kept.

        Returns
        -------
        Flow
            With the columns that enter.

        Raises
        ------
        SchemaError
            When the body gives other columns.
        PlanError
            When the body uses a keyed step, or does not return the flow it was given with steps
            added.

        Notes
        -----
        The loop is over when no row is in it any more; one whose rows never leave does not end,
        Ctrl-C ends it, and inside `bounded` the statistics say which batch it holds. Rounds of a
        batch of rows run one after the other: a loop that makes many rows of one holds a round
        of them, of all rows that are in it at once; `bounded` around the loop limits these. Rows
        leave in no defined order.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import pyarrow.compute as pc
        >>> import penstock as pk
        >>> def halve(batch):
        ...     n = pc.divide(batch["n"], 2)
        ...     steps = pc.add(batch["steps"], 1)
        ...     return pa.record_batch({"n": n, "steps": steps, "again": pc.greater(n, 0)})
        >>> flow = pk.Flow("n bigint, steps bigint").iterate(
        ...     lambda round: round.map_batches(halve, "n bigint, steps bigint, again boolean"))
        >>> rows = flow.collect(pa.table({"n": [1000, 1, 64], "steps": [0, 0, 0]}))
        >>> sorted(rows.column("steps").to_pylist())
        [1, 7, 10]
        """
        if not isinstance(again, str) or not again:
            raise ConfigError(f"iterate again={again!r} must be the name of a column")
        if again in self._columns:
            raise SchemaError(
                f"iterate again={again!r} takes the name of a column that goes around; rename one of them"
            )
        made = self._body("iterate", body)
        wanted = pa.schema([*made._source().schema, pa.field(again, pa.bool_())])
        found = made._here()
        if found.names != wanted.names or found.types != wanted.types:
            raise SchemaError(
                f"iterate: the body must give {to_text(wanted)}, where {again!r} says whether a row goes around again;"
                f" it gives {to_text(found)}"
            )
        step = {"op": "iterate", "again": again, "body": list(made._steps)}
        return self._with(step, self._columns, shape=made._source().schema, calls=made._calls)

    def _here(self) -> pa.Schema:
        """Schema of the rows here."""
        return self._shape if self._shape is not None else self.output_schema

    def _body(self, op: str, body: Callable[[Self], Self]) -> Self:
        """What a body makes of the rows here."""
        if not callable(body):
            raise ConfigError(f"{op}({body!r}): give a function that takes a flow and returns it with steps added")
        self._no_keys(op)
        shape = self._here()
        path = "" if self._scope is None else self._scope.path
        around = Around(op, f"{path}{op}[{len(self._steps)}].")
        empty = {
            "_head": Source("rows", shape),
            "_shape": shape,
            "_columns": tuple(shape.names),
            "_calls": self._calls,
            "_scope": around,
        }
        source = {"_event_time": None, "_steps": (), "_keys": None, "_window": None}
        made = body(restore(type(self), empty | source))
        if not isinstance(made, FlowBase) or made._scope is not around:
            shown = "another flow" if isinstance(made, FlowBase) else repr(made)
            raise PlanError(
                f"{op}: the body must return the flow that it is given, with steps added; it returned {shown}"
            )
        return made
