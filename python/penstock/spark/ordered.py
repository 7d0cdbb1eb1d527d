"""Order with parallelism inside Spark tasks: `penstock.ordered_map` and `penstock.Pipeline` over partitions.

Owns: the picklable functions for ``df.mapInArrow`` and ``rdd.mapPartitions``. They carry the user's function as
cloudpickle bytes; the workers start in the task, as many as it has CPUs, and end with it: when its rows are through,
when Spark closes the output early (a ``limit``, a speculative copy that lost) and when it kills the Python worker.

Invariants: results leave a task in the order of its rows, which are taken only as far ahead as the bound on items in
flight allows; an error names the row or batch at which it happened, after everything before that has left; nothing
outlives the partition, so that a Python worker that Spark reuses is as new.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock import _cpus
from penstock._coroutines import require_plain
from penstock._durations import Timeout
from penstock._functions.calls import user_error
from penstock._functions.short import short
from penstock._options import yes_or_no
from penstock._resume import guarded
from penstock._schema import conform, in_utc, spark_types, to_arrow, to_ddl
from penstock.errors import ConfigError, PenstockError, SchemaError
from penstock.spark._tasks import functions

__all__ = ["OrderedFunction", "OrderedPartitions", "ordered", "ordered_partitions"]

#: Rows of a batch that is made of rows, and how long the first of them waits for others, seconds.
_PACK_ROWS, _PACK_S = 4_096, 0.1


def ordered(
    f: Any,
    schema: Any = None,
    *,
    rows: bool = False,
    workers: int | None = None,
    in_flight: int | None = None,
    mode: str = "auto",
    chunk: int | None = None,
    timeout: Timeout | None = None,
) -> OrderedFunction:
    """Return a function for ``DataFrame.mapInArrow`` that runs `f` on the CPUs of the task and keeps the order.

    Parameters
    ----------
    f : callable or Pipeline
        A function from a ``pyarrow.RecordBatch`` to one of any length; with `rows`, from a row (a dict by column) to a
        row (a dict, or a tuple in the order of `schema`). Or a `penstock.Pipeline` over either, which gives batches
        or rows.
    schema : str, pyarrow.Schema or StructType, optional
        What comes out. Needed where rows do; batches without it go to Spark as they are.
    rows : bool, default False
        Hand over rows, not batches.
    workers : int, optional
        Default the CPUs of the task (``spark.task.cpus``).
    in_flight : int, optional
        Most items (batches or rows) that are taken ahead of what has left.
    mode : {"auto", "inline", "threads", "processes"}
        Where `f` runs; by default as measured while running.
    chunk : int, optional
        Items that a worker takes at once; measured by default.
    timeout : float, str or datetime.timedelta, optional
        Seconds for one item; beyond it the task fails and names the item.

    Returns
    -------
    OrderedFunction
        For ``df.mapInArrow(f, f.ddl)``.

    Raises
    ------
    ConfigError
        When `f` is neither, cannot be pickled, or an option has a value that is not allowed.
    SchemaError
        When `schema` is none, or missing where rows come out.

    Notes
    -----
    A row has its timestamps as datetimes in UTC, as on other hosts, whatever zone the session has; what it gives for
    one has a zone, too.

    Order is that of the rows within each partition; where a whole stream has one order, bring it into one partition
    and sort that: ``df.repartition(1).sortWithinPartitions("seq")``. A pipeline keeps its state for one partition.

    Examples
    --------
    >>> import pyarrow as pa
    >>> twice = ordered(lambda row: (row["id"] * 2,), "id bigint", rows=True, workers=1, mode="inline")
    >>> [batch.to_pydict() for batch in twice([pa.record_batch({"id": [1, 2]})])]
    [{'id': [2, 4]}]
    >>> df.mapInArrow(twice, twice.ddl)  # doctest: +SKIP
    """
    yes_or_no(rows, "ordered rows")
    run = _Run.of("ordered", f, workers, in_flight, mode, chunk, timeout)
    if schema is None and rows:
        raise SchemaError("ordered needs the schema of the rows that come out, for example schema='id bigint'")
    gives = None if schema is None else spark_types(to_arrow(schema))
    return OrderedFunction(run, gives, rows)


def ordered_partitions(
    f: Any,
    *,
    workers: int | None = None,
    in_flight: int | None = None,
    mode: str = "auto",
    chunk: int | None = None,
    timeout: Timeout | None = None,
) -> OrderedPartitions:
    """Return a function for ``RDD.mapPartitions`` that runs `f` on the CPUs of the task and keeps the order.

    Parameters
    ----------
    f : callable or Pipeline
        From an element to an element, or a `penstock.Pipeline` over elements.
    workers, in_flight, mode, chunk, timeout
        As for `ordered`.

    Returns
    -------
    OrderedPartitions
        For ``rdd.mapPartitions(f)``.

    Raises
    ------
    ConfigError
        As `ordered`.

    Examples
    --------
    >>> list(ordered_partitions(abs, workers=1, mode="inline")([-1, 2]))
    [1, 2]
    >>> rdd.mapPartitions(ordered_partitions(abs))  # doctest: +SKIP
    """
    return OrderedPartitions(_Run.of("ordered_partitions", f, workers, in_flight, mode, chunk, timeout))


@dataclass(frozen=True)
class _Run:
    """What to run and how, as it travels to the tasks."""

    what: str
    pickled: bytes
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        what: str,
        f: Any,
        workers: int | None,
        in_flight: int | None,
        mode: str,
        chunk: int | None,
        timeout: Timeout | None,
    ) -> _Run:
        if not _is_pipeline(f) and not callable(f):
            raise ConfigError(f"{what} needs a function or a penstock.Pipeline, not a {type(f).__name__}")
        if not _is_pipeline(f):
            require_plain(f, what)
        from penstock.ordered._pipeline import check_options

        # At the call, not in the task; there they are asked for again, and the workers are those of the task.
        check_options(workers, in_flight, None, mode, chunk, timeout)
        options = {"workers": workers, "in_flight": in_flight, "mode": mode, "chunk": chunk, "timeout": timeout}
        options["reads"] = "here"  # a task's rows come from its own thread, and end
        return cls(what, functions.dump(f, f"the function of {what}"), options)

    def results(self, items: Iterable[Any], unit: str) -> Iterator[Any]:
        """What comes out for `items`, in order; an error of the user's code names the item."""
        f = functions.load(self.pickled, f"the function of {self.what}")
        given = _Given(items)
        number = 0
        with contextlib.closing(_start(f, given, self.options)) as out:
            while True:
                try:
                    result = next(out)
                except StopIteration:
                    return
                except Exception as error:
                    if error is given.error or isinstance(error, PenstockError):
                        raise
                    where = self.what if _is_pipeline(f) else f"{self.what}, {unit} {number}"
                    raise user_error(where + _partition(), f, error) from error
                yield result
                number += 1


class _Given:
    """The input, remembering its own error: that one is not the user function's."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


@dataclass(frozen=True)
class OrderedPartitions:
    """A function from elements to elements; see `ordered_partitions`."""

    run: _Run

    def __call__(self, elements: Iterable[Any]) -> Iterator[Any]:
        """Run over the elements of one partition."""
        return guarded(self.run.results(elements, "element"), "the run of ordered_partitions")


@dataclass(frozen=True)
class OrderedFunction:
    """A function from batches to batches; see `ordered`.

    Attributes
    ----------
    run : object
        What to run.
    schema : pyarrow.Schema or None
        What comes out, in Spark's Arrow types.
    rows : bool
        Whether the function sees rows.
    """

    run: _Run
    schema: pa.Schema | None
    rows: bool

    @property
    def ddl(self) -> str:
        """The schema as ``mapInArrow`` takes it.

        Raises
        ------
        SchemaError
            When none was given.
        """
        if self.schema is None:
            raise SchemaError("ordered was given no schema; say schema='...', or give mapInArrow one")
        return to_ddl(self.schema)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run over the batches of one partition."""
        return guarded(self._results(batches), "the run of ordered")

    def _results(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        unit = "row" if self.rows else "batch"
        items: Iterable[Any] = batches
        if self.rows:
            items = _dicts(batches, self.run.what)
        rows = _Rows(self.schema, f"{self.run.what}, result")
        with contextlib.closing(self.run.results(items, unit)) as results:  # type: ignore[type-var]
            try:
                for number, result in enumerate(results):
                    if isinstance(result, (pa.RecordBatch, pa.Table)):
                        yield from rows.flush()
                        parts = result.to_batches() if isinstance(result, pa.Table) else [result]
                        for part in parts:
                            yield part if self.schema is None else self._fit(part, number)
                    else:
                        yield from rows.add(result, number)
            except Exception:
                yield from rows.flush()  # an earlier row that is refused goes before
                raise
        yield from rows.flush()

    def _fit(self, batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
        assert self.schema is not None
        return conform(batch, self.schema, f"{self.run.what}, result {number}{_partition()}:")


class _Rows:
    """Makes batches of rows, and names the row that is none."""

    def __init__(self, schema: pa.Schema | None, what: str) -> None:
        from penstock.ordered._packing import Packer

        self.what = what
        self._packer = None if schema is None else Packer(schema, "a RecordBatch, or a row as a tuple or a dict")
        self._held: list[Any] = []
        self._first = 0
        self._since = 0.0

    def add(self, row: Any, number: int) -> Iterator[pa.RecordBatch]:
        """Take the row of a result; gives a batch when enough have come."""
        if self._packer is None:
            raise self._refused(number, f"is {short(row)}, not a pyarrow RecordBatch; rows need a schema")
        if not self._held:
            self._first, self._since = number, time.monotonic()
        self._held.append(row)
        if len(self._held) >= _PACK_ROWS or time.monotonic() - self._since > _PACK_S:
            yield from self.flush()

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Give what is held; before a row that is refused, those before it."""
        held, self._held = self._held, []
        if self._packer is not None:
            for place, made in self._packer.pack(held):
                if not isinstance(made, pa.RecordBatch):
                    raise self._refused(self._first + place, str(made)) from made.__cause__
                yield made

    def _refused(self, number: int, what: str) -> SchemaError:
        return SchemaError(f"{self.what} {number}{_partition()} {what}")


def _dicts(batches: Iterable[pa.RecordBatch], what: str) -> Iterator[dict[str, Any]]:
    """The rows of batches by column, their instants in UTC; SchemaError where a dict would lose a column."""
    for batch in batches:
        names = batch.schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SchemaError(
                f"{what} with rows=True: the input has {names.count(twice)} columns named {twice!r}; rename one of them"
            )
        yield from in_utc(batch).to_pylist()


def _start(f: Any, items: Iterable[Any], options: dict[str, Any]) -> Any:
    if _is_pipeline(f):
        return f.run(items, **options)
    from penstock.ordered import ordered_map

    return ordered_map(f, items, **options)


def _is_pipeline(f: Any) -> bool:
    from penstock.ordered import Pipeline

    return isinstance(f, Pipeline)


def _partition() -> str:
    context = _cpus.task()
    return "" if context is None else f" of partition {context.partitionId()}"
