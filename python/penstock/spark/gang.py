"""Gangs: Spark tasks that run at the same time and work together as workers of one dataflow.

Owns: running a program as a barrier stage, one worker per task, and what a failure of one of them becomes. The tasks
listen, tell each other their addresses through Spark, and connect; every connection proves a key that was made for
this gang and travels in the closure only.

Invariants: nothing outlives a task (its sockets and threads end with it, however it ends), so Python workers that
Spark reuses are clean. The task that fails first is the one whose error the job shows: the others hold theirs back for
a moment.

Departure: a gang is a barrier stage, while resident workers are single-task jobs: a gang wants its failures
coupled. Its result stands behind a shuffle, since Spark refuses `limit` and `show` inside a barrier stage; Spark
runs a failing gang up to four times.
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._coroutines import require_plain
from penstock._durations import Timeout, parse_timeout
from penstock._functions.calls import user_error
from penstock._options import whole
from penstock._schema import conform, spark_types, to_arrow, to_ddl
from penstock.errors import ConfigError, PenstockError, SchemaError, UserFunctionError, WorkerLost, WorkerStopped
from penstock.spark._session.guard import require_classic
from penstock.spark._tasks import functions
from penstock.spark._tasks.apart import renamed
from penstock.spark._tasks.place import Key, Secret
from penstock.spark._tasks.slots import capacity, held_slots, require_gang
from penstock.spark.sources import by_place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock._mesh import Listener, Seats
    from penstock.dataflow import Worker

__all__ = ["GangTask", "gang"]

#: Seconds that a task whose peer has failed waits for Spark to end it, so that the peer's error is the one to show.
_HOLD_BACK_S = 5.0

#: The program in messages.
_WHAT = "the program of the gang"

Program = Callable[["Worker", pa.RecordBatchReader], Any]


def gang(
    df: DataFrame, program: Program, tasks: int, schema: Any, *, timeout: Timeout = 60.0, tls: str = "auto"
) -> DataFrame:
    """Run a program on Spark tasks that work together.

    The DataFrame is spread evenly over `tasks` tasks, which all run at the same time (a barrier stage). Each is one
    worker: it can build dataflows with the others, meet them at a barrier, and agree with them on an order.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        The input, of a classic session.
    program : callable
        ``program(worker, batches)``: a `penstock.dataflow.Worker`, and a ``pyarrow.RecordBatchReader``: an iterator
        over this task's rows as record batches, which come as they are asked for; it knows its ``schema`` also without
        rows. The program yields or returns record batches (or tables) of `schema`; None is no rows. It is
        cloudpickled: lambdas and functions of a notebook are fine.
    tasks : int
        How many tasks; each needs a slot of the cluster.
    schema : str, StructType or pyarrow.Schema
        Columns of the result.
    timeout : float, str or datetime.timedelta, default 60
        Seconds that the tasks have for connecting, once all of them run.
    tls : {"auto", "always"}, default "auto"
        Which of their connections are encrypted: those that leave a host, or all.

    Returns
    -------
    pyspark.sql.DataFrame
        Lazy: every action on it runs the gang, so keep what is used twice (``.cache()``). The order of its rows is not
        defined.

    Raises
    ------
    UnsupportedSession
        For a Spark Connect session.
    ConfigError
        When an argument is out of range, `df` is a streaming DataFrame, the program is a coroutine function or cannot
        be pickled, or this Spark has no barrier stages for Arrow functions (before 3.5, or with dynamic allocation).
    SchemaError
        When `schema` is not one, or Spark has no type for a column.
    SlotsError
        When the cluster can never run that many tasks at once; the message names the setting.

    Notes
    -----
    When a program raises, the job fails with a `UserFunctionError` that names the task and the user's file and line,
    and the other tasks are stopped in whatever they wait for; so they are when a task dies. Before it gives up, Spark
    runs the whole gang again (``spark.stage.maxConsecutiveAttempts``, 4 runs by default), so effects outside must be
    repeatable.

    Cost: one shuffle of the input and one of the result, which keeps what follows, such as ``limit``, apart from the
    barrier stage. Connecting takes two threads and a socket per pair of tasks.

    Examples
    --------
    Numbering rows without gaps: every task needs to know how many rows the tasks before it have.

    >>> import pyarrow as pa
    >>> import penstock as pk
    >>> def number(worker, batches):
    ...     table = batches.read_all()
    ...     log = worker.sequencer()
    ...     log.push((worker.index, table.num_rows))
    ...     counts = dict(log.wait_next() for _ in range(worker.peers))
    ...     start = sum(counts[index] for index in range(worker.index))
    ...     yield table.append_column("n", pa.array(range(start, start + table.num_rows), pa.int64()))
    >>> numbered = gang(spark.range(1000), number, tasks=2, schema="id bigint, n bigint")  # doctest: +SKIP
    >>> sorted(row.n for row in numbered.collect()) == list(range(1000))  # doctest: +SKIP
    True
    """
    require_classic(df, "penstock.spark.gang")
    if not callable(program):
        raise ConfigError(
            f"gang needs a function of a worker and an iterator of batches, not a {type(program).__name__}"
        )
    require_plain(program, "the program", takes="worker, batches")
    number = whole(tasks, 1)
    if number is None:
        raise ConfigError(f"tasks={tasks!r} must be an int of at least 1")
    seconds = parse_timeout(timeout)
    secret = Secret.random(tls)
    if df.isStreaming:
        raise ConfigError(
            "gang takes a batch DataFrame, this one is streaming; inside foreachBatch each batch is one that it takes"
        )
    output = spark_types(to_arrow(schema))
    takes = spark_types(to_arrow(df.schema, "the DataFrame")) if df.columns else _no_columns()
    _require_barrier(df)
    sc = df.sparkSession.sparkContext
    require_gang(capacity(sc), number, held_slots(sc))
    pickled = functions.dump(program, _WHAT)
    task = GangTask(pickled, number, takes, output, secret.mesh(), uuid.uuid4().hex, seconds)
    from pyspark.sql.functions import count, lit

    # Spark gives nothing for a repartition of what it knows to be empty, and each task runs all the same here; it does
    # not look through an observation.
    seen = by_place(df).observe(f"penstock gang {uuid.uuid4().hex}", count(lit(1)).alias("rows"))
    spread = seen.repartition(number)
    return spread.mapInArrow(task, to_ddl(output), barrier=True).repartition(number)


def _no_columns() -> pa.Schema:
    raise SchemaError("the DataFrame has no columns, and batches without columns have no rows")


def _require_barrier(df: DataFrame) -> None:
    """Refuse what Spark would refuse later, or never start."""
    import pyspark

    if df.sparkSession.sparkContext.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        raise ConfigError(
            "gang runs as a barrier stage, and Spark has none with dynamic allocation: set"
            " spark.dynamicAllocation.enabled=false for this application"
        )
    if "barrier" not in inspect.signature(df.mapInArrow).parameters:
        raise ConfigError(
            f"gang needs Spark 3.5 or later, where mapInArrow knows barrier stages; this is {pyspark.__version__}"
        )


@dataclass(frozen=True)
class GangTask:
    """What each task of a gang runs: a function for ``mapInArrow``.

    Attributes
    ----------
    program : bytes
        The user's function, cloudpickled.
    tasks : int
        How many tasks there are.
    takes, gives : pyarrow.Schema
        Columns of the input and of the result.
    key : Key
        Lets the tasks of this gang in with each other, and nobody else.
    run : str
        Name of the gang; attempts of it are told apart as well.
    timeout : float
        Seconds for connecting.
    """

    program: bytes
    tasks: int
    takes: pa.Schema
    gives: pa.Schema
    key: Key
    run: str
    timeout: float

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the program over the rows of one task."""
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        index = context.partitionId()
        rows = (conform(batch, self.takes) for batch in renamed(batches, self.takes.names))
        try:
            yield from self._run(context, index, pa.RecordBatchReader.from_batches(self.takes, rows))
        except (WorkerStopped, WorkerLost) as echo:
            # Another task has failed, and its error is the one to show. Spark ends this task as soon as it knows.
            time.sleep(_HOLD_BACK_S)
            echo.add_detail(f"in task {index} of the gang")
            raise
        # What the program did not read must not stay in the pipe: this process is to serve other tasks.
        for _ in rows:
            pass

    def _run(self, context: Any, index: int, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        from penstock.dataflow._threads import seated

        seats = self._connect(context, index)
        try:
            program: Program = functions.load(self.program, _WHAT)
            with seated(seats, 0) as worker:
                try:
                    yield from self._fitting(program(worker, rows))
                except (WorkerStopped, WorkerLost):
                    raise
                except UserFunctionError as error:
                    # Of an operator's function: it names step, file and line already.
                    error.add_detail(f"in task {index} of the gang")
                    error.__dict__["task"] = index
                    raise
                except Exception as error:
                    raise _failed(index, program, error) from error
        finally:
            seats.close()

    def _connect(self, context: Any, index: int) -> Seats:
        infos = context.getTaskInfos()
        if len(infos) != self.tasks:
            raise PenstockError(f"Spark runs {len(infos)} tasks for a gang of {self.tasks}")
        listener, address = _listen(_host(infos[index].address))
        try:
            told = [str(one) for one in context.allGather(f"{context.taskAttemptId()} {address}")]
            addresses = [one.partition(" ")[2] for one in told]
            # A task of an attempt that Spark has given up must not get into a later one: the first task names it.
            group = f"{self.run}/{told[0].partition(' ')[0]}"
            return listener.connect(index, addresses, self.key.reveal(), group=group, timeout=self.timeout)
        finally:
            listener.close()

    def _fitting(self, results: Any) -> Iterator[pa.RecordBatch]:
        """Whatever the program gave, as batches of the declared schema."""
        if results is None:
            return
        if isinstance(results, (pa.RecordBatch, pa.Table)):
            results = (results,)
        for result in results:
            if isinstance(result, pa.Table):
                parts: Iterable[pa.RecordBatch] = result.to_batches()
            elif isinstance(result, pa.RecordBatch):
                parts = (result,)
            else:
                raise TypeError(f"the program gave a {type(result).__name__}, not a pyarrow RecordBatch or Table")
            for part in parts:
                if part.num_rows:
                    yield conform(part, self.gives, "the result")


def _failed(index: int, program: Program, error: Exception) -> UserFunctionError:
    made = user_error(f"task {index} of the gang", program, error)
    made.__dict__["task"] = index
    return made


def _host(address: str) -> str:
    """The host of ``host:port``, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]") or address


def _listen(host: str) -> tuple[Listener, str]:
    """A listener where the executor is reached, and the address to tell."""
    from penstock import _mesh

    try:
        listener = _mesh.listen(host)
    except PenstockError:
        # Behind address translation the advertised host is not one of this machine.
        listener = _mesh.listen("::" if ":" in host else "0.0.0.0")
    port = listener.address.rpartition(":")[2]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
