"""From a flow to a run: the hosts, by their short names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._flow.base import FlowBase
from penstock._options import yes_or_no

if TYPE_CHECKING:
    from penstock._local import BatchSink, LateSink, LocalResults, LocalSession, RunSummary, SideSinks
    from penstock.spark._tasks.partitions import PartitionFunction

__all__ = ["Running"]


class Running(FlowBase):
    """The methods of a flow that run it."""

    __slots__ = ()

    def run(
        self,
        source: Any,
        workers: int = 1,
        *,
        late: LateSink | None = None,
        sides: SideSinks | None = None,
        progress: bool = False,
        batch_rows: int | None = None,
        streaming: bool = False,
        processes: int | None = None,
    ) -> LocalResults:
        """Run in this process, without Spark.

        Parameters
        ----------
        source : Arrow data
            A RecordBatchReader, Table or RecordBatch; a polars or pandas frame, a DuckDB
            result or anything else with ``__arrow_c_stream__``; or an iterable of batches. A flow
            of several sources takes a dict from the name of each to its data. Each is read in a
            thread of its own: tables and files in turn, a batch of each, while a source that has
            nothing yet holds no other back.
        workers : int, default 1
            Threads; each owns a share of the keys. With `processes`, of each of them.
        late : callable, or dict of name to callable, optional
            Called with a ``pyarrow.RecordBatch`` of rows that are in no window, or meet no row of
            a join, because they are late or have no event time, in this thread. A warning tells how many
            there were that nobody takes. In a dict a function for those of each source, by its name; where a source has
            late rows of different columns, or a step takes several sources as one stream, by the name
            of the step's state instead, and the side of a join: ``"join left"``. The error of a wrong name has all.
            Each has the columns that came to its step; before a `top`, `aggregate` or `window_join` in windows also
            window_start and window_end, of the last window that it would have been in.
        sides : dict of name to callable, optional
            Called with a ``pyarrow.RecordBatch`` of rows of that side output (see `penstock.side`), in this thread,
            when their epoch is complete; in a flow with a `flat_map` as they come. Rows of side outputs that nobody
            takes are counted (`RunSummary`, `LocalSession.side_rows`) and dropped.
        progress : bool, default False
            Show a progress bar on stderr.
        batch_rows : int, optional
            Larger input batches are cut, and so are those whose rows hold more than 64 MiB in the columns of the flow.
            With `streaming` each piece is an epoch then, at whose end the watermark moves, so what is late and which
            updates come depends on it; by default each batch is one epoch, which goes to the workers in pieces of at
            most 65,536 rows and 64 MiB. Of an input that ends nothing depends on it; the default is 65,536.
        streaming : bool, default False
            Take the source for a stream without an end: each batch of it is an epoch of its
            own, of whatever size, as Spark's batches are beside a query (of a table, each chunk is a batch; one without
            rows is none). Windows close as the watermark passes
            them, rows behind it are late, aggregates give updates, and state is what is still
            open. By default the whole input is one epoch, as in a batch job: windows and
            aggregates come when it ends, and nothing depends on where batches are cut.
        processes : int, optional
            Run in so many processes of this machine, 1 to 256, which this one feeds over loopback
            TCP and whose results it takes; `LocalResults.rescale` changes how many while rows pass.
            Functions travel by cloudpickle. For functions that hold the interpreter lock, which
            threads do not speed up.

        Returns
        -------
        LocalResults
            An iterator of ``pyarrow.RecordBatch``: results as they become final. Closing it
            early (leaving the loop) stops the workers. It gives them once, as iterators do: a second
            ``list(results)`` is empty.

        Raises
        ------
        PlanError, SchemaError
            When the flow is not complete or does not fit the source (before the first
            batch).
        UserFunctionError
            When a function of the flow raises.
        ConfigError
            When an option is out of range, or a source is missing or unknown.

        Notes
        -----
        With `streaming` the watermark is the least of what the sources with event time have
        reached; one that has ended is not waited for.

        The source is read as results are taken, with a bounded number of batches in flight, in a
        thread of its own: while it is silent, results come out. A batch of a stream is held until its epoch is
        complete, and so is what comes of it; `batch_rows` limits that. After Ctrl-C the iterator goes on
        where it was. Before the error of a source come the results of all batches that were fed, as far as they are
        final without what would have followed.

        A function of `late` or `sides` that raises ends the run with its error; `StopIteration`, which would look like
        the end of the results, becomes a `RuntimeError`.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> words = pa.table({"word": ["a", "b", "a"]})
        >>> flow = pk.Flow("word string").key_by("word").agg(n=pk.count())
        >>> sorted((r["word"], r["n"]) for batch in flow.run(words) for r in batch.to_pylist())
        [('a', 2), ('b', 1)]

        On two processes, and on three while it runs:

        >>> with flow.run(words, processes=2) as run:
        ...     handle = run.rescale(3)
        ...     rows = sorted((r["word"], r["n"]) for batch in run for r in batch.to_pylist())
        >>> rows
        [('a', 2), ('b', 1)]
        """
        from penstock._local import run

        return run(
            self,
            source,
            workers,
            late=late,
            sides=sides,
            progress=progress,
            batch_rows=batch_rows,
            streaming=streaming,
            processes=processes,
        )

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
        >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
        >>> flow.collect(pa.table({"k": [1, 1, 1]})).to_pylist()
        [{'k': 1, 'n': 3}]
        """
        with self.run(source, workers, **options) as results:
            return pa.Table.from_batches(results, schema=self.output_schema)

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
            Rows in, out, late and of side outputs, and seconds.

        Raises
        ------
        ConfigError
            When the sink is neither of the two, or gives a coroutine, which nobody awaits; so for `late` and `sides`.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> got = []
        >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
        >>> flow.run_into(got.append, pa.table({"k": [1, 2]})).output_rows
        2
        """
        from penstock._local import run_into

        return run_into(self, sink, source, workers, **options)

    def start(
        self,
        workers: int = 1,
        *,
        late: LateSink | None = None,
        sides: SideSinks | None = None,
        batch_rows: int | None = None,
        streaming: bool = False,
        processes: int | None = None,
        bits: int = 8,
    ) -> LocalSession:
        """Start workers in this process and keep hold of them.

        Parameters
        ----------
        workers : int, default 1
            Threads.
        late : callable, or dict of name to callable, optional
            As for `run`.
        sides : dict of name to callable, optional
            As for `run`.
        batch_rows : int, optional
            As for `run`.
        streaming : bool, default False
            As for `run`.
        processes : int, optional
            As for `run`.
        bits : int, default 8
            The state is cut into ``2 ** bits`` bins, the units of migration.

        Returns
        -------
        LocalSession
            A context manager with `run`, `stats`, and what moves, splits and evens out bins while it runs.

        Examples
        --------
        >>> import pyarrow as pa
        >>> import penstock as pk
        >>> flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
        >>> with flow.start(workers=2) as session:
        ...     rows = [row for batch in session.run(pa.table({"k": [7, 7]})) for row in batch.to_pylist()]
        >>> rows
        [{'k': 7, 'n': 2}]
        """
        from penstock._local import LocalSession

        return LocalSession(
            self,
            workers,
            late=late,
            sides=sides,
            batch_rows=batch_rows,
            streaming=streaming,
            processes=processes,
            bits=bits,
        )

    def map_in_arrow(self, *, per_partition: bool = False) -> PartitionFunction:
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

        With Spark: ``df.mapInArrow(flow.map_in_arrow(), flow.output_ddl)``. For a flow of several sources `df` is what
        `penstock.spark.tagged` makes of theirs.
        """
        from penstock.spark._tasks.partitions import map_in_arrow

        return map_in_arrow(self, yes_or_no(per_partition, "map_in_arrow per_partition"))
