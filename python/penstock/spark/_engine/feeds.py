"""Feeding an epoch: a Spark task that brings the rows of its partition to a member.

Owns: the picklable task, its receipt, the choice of the member, and that few rows go by way of the driver. A task sends
to a member of its own executor where there is one, so rows do not cross the network. What a task yields is its
receipts, one for each source that its partition has rows of; the receipts that the driver collects are the commit: rows
of an attempt whose receipt Spark did not deliver never count. All of a task go to one member, each source on a
connection of its own.

What runs ahead of the first key runs where the rows are, so members should get equally many, while partitions differ
and some have none, as those of a Parquet file that has fewer row groups than the cluster has slots. How many rows come
is known behind the batch: each partition goes where it would have had to go in the batch before (`Places`).

A task whose member has died does not raise: it reads its rows to their end and yields one that says so. Spark would
end the whole job, and with it the Python processes of its tasks; so does a process by itself that has not read all of
its input. Each takes a second of CPU to come back, just when the batch is to be fed again.

Few rows come to the driver, which sends them to one member, or where that would have much to do a stretch to each: a
stage of Python tasks costs a batch 55 ms whatever it holds (two busy cores). How many come is known of the batch before
only, so Spark reads no more of each partition than the bound (`first`), and who gets more than that has the batch fed
by tasks, which read it from its begin. To keep what was read would cost each small batch 20 ms. Invariant: what the
driver holds of a batch is bounded, in rows and by ``spark.driver.maxResultSize``.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock._schema import conform
from penstock._sizes import parse_bytes
from penstock.errors import AuthenticationError, ProtocolError
from penstock.spark._session.collect import to_batches
from penstock.spark._tasks import columns
from penstock.spark._tasks.apart import renamed, split
from penstock.spark._tasks.heap import settle
from penstock.spark._tasks.place import Key, executor_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock import _native

__all__ = [
    "RECEIPTS",
    "RECEIPTS_DDL",
    "FeedTarget",
    "FeedTask",
    "Places",
    "Receipt",
    "Shortcut",
    "first",
    "larger_batches",
    "lives",
]

#: Rows and bytes of a batch after which the next one comes by way of the driver, and the rows that it may have then.
_FEW_ROWS, _FEW_BYTES, _MOST_ROWS = 8_192, 1 << 20, 16_384
#: Rows of an Arrow batch for a feed at most, and bytes: a multiple of the caches costs more than it saves.
_BATCH_ROWS, _BATCH_BYTES = 65_536, 2 << 20
_BATCH_CONF = "spark.sql.execution.arrow.maxRecordsPerBatch"
#: Bytes of an Arrow batch, where Spark has that setting. Unless it says no limit, Spark adds up all columns after every
#: row: more than half of what its tasks do to bring a narrow row to Python.
_BYTES_CONF, _NO_LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch", str((1 << 31) - 1)
#: By session of the JVM: how many feeds want larger batches now, how many rows they have, and what its settings are
#: without them.
_CHANGED: dict[int, tuple[int, int, dict[str, str]]] = {}
_CHANGING = threading.Lock()
#: Seconds that one member may work on a batch that comes by way of the driver, before others get parts of the next one.
_ALONE_S = 0.05
#: How many small batches one that was too large is behind at most, before the driver is tried again.
_LONGEST = 64

#: How long a member has to accept a connection that tells whether it lives, and to end it if it does not, seconds; the
#: latter at most a share of what it is patient with who says nothing, and no end after twice that tells of its death.
_DIAL_S, _SHARE = 2.0, 4
#: Column by which rows at the driver are put in order.
_PLACE = "__penstock_place"
#: Columns that a feed task yields: one row for each source that the partition holds rows of.
RECEIPTS_DDL = (
    "partition int, attempt bigint, member bigint, rows bigint, max_event_time bigint, checksum bigint, hash bigint,"
    " gone string, source int, bytes bigint"
)
RECEIPTS = pa.schema(
    [
        ("partition", pa.int32()),
        ("attempt", pa.int64()),
        ("member", pa.int64()),
        ("rows", pa.int64()),
        ("max_event_time", pa.int64()),
        ("checksum", pa.int64()),
        ("hash", pa.int64()),
        ("gone", pa.string()),
        ("source", pa.int32()),
        ("bytes", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Receipt:
    """What a member has staged of one source in one partition.

    Attributes
    ----------
    partition, attempt : int
        Spark's numbers; the attempt is unique in the application.
    member : int
        Who has the rows.
    rows : int
        How many.
    max_event_time : int or None
        Microseconds since 1970.
    checksum : int
        CRC-32 of the Arrow stream, checked by the member.
    hash : int
        Sum of the hashes of the rows, modulo 2^64 and with a sign, as Spark has it.
    gone : str or None
        Why nothing is staged: the member has died.
    source : int
        Number of the source.
    bytes : int
        Of the rows in memory.
    """

    partition: int
    attempt: int
    member: int
    rows: int
    max_event_time: int | None
    checksum: int
    hash: int = 0
    gone: str | None = None
    source: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class FeedTarget:
    """A member as tasks see it: its id, its executor and its data port."""

    member: int
    executor: str
    address: str


@dataclass(frozen=True)
class FeedTask:
    """A function for ``mapInArrow`` that stages the rows of its partition and yields receipts.

    Attributes
    ----------
    query : str
        Name of the query at the members.
    epoch : int
        Which epoch the rows belong to.
    sources : mapping of str to pyarrow.Schema
        Columns of each source; of several sources the rows come as structs, see `penstock.spark.sources`.
    seats : tuple of FeedTarget
        The members, in process order.
    key : Key
        Lets the task in.
    silence : float
        Seconds to wait for a member that neither reads nor answers.
    places : mapping of int to int
        The member for a partition; for one that is not here, or whose member is not near, any that is near.
    """

    query: str
    epoch: int
    sources: Mapping[str, pa.Schema]
    seats: tuple[FeedTarget, ...]
    key: Key
    silence: float = 60.0
    places: Mapping[int, int] = field(default_factory=dict)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage all batches; yields one row for each source that there are rows of."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "a feed runs inside a Spark task"
        partition, attempt = context.partitionId(), context.taskAttemptId()
        given = iter(batches)
        rows = self.stage(given, partition, attempt, self._seat(partition))
        for _ in given:
            pass
        settle()
        if rows:
            yield columns.rows(rows, RECEIPTS)

    def stage(
        self, batches: Iterable[pa.RecordBatch], partition: int, attempt: int, seat: FeedTarget
    ) -> list[dict[str, Any]]:
        """Stage batches at a member; what becomes receipts, one for each source that there are rows of."""
        schemas = list(self.sources.values())
        names = [f"source {name!r}" if len(schemas) > 1 else "input" for name in self.sources]
        open_: dict[int, _native.Feed] = {}
        sizes: dict[int, int] = {}
        receipts: list[dict[str, Any]] = []
        try:
            for source, batch in self._parted(batches):
                if source not in open_:
                    open_[source] = self._connect(seat, partition, attempt, source, schemas[source])
                fitting = conform(batch, schemas[source], names[source])
                sizes[source] = sizes.get(source, 0) + fitting.nbytes
                open_[source].push(fitting)
            receipts.extend(
                {"source": source, "bytes": sizes[source], **feed.finish()} for source, feed in sorted(open_.items())
            )
        except (ProtocolError, AuthenticationError) as error:
            # The driver reads this text: the first line has to name the member.
            text = f"member {seat.member} at {seat.address}: {error}"
            if isinstance(error, AuthenticationError) or lives(seat.address, self.silence):
                raise ProtocolError(text) from error
            nothing = {"source": 0, "rows": 0, "max_event_time": None, "checksum": 0, "hash": 0, "bytes": 0}
            receipts = [{"member": seat.member, "gone": text, **nothing}]
        finally:
            for feed in open_.values():
                feed.close()
        return [{"partition": partition, "attempt": attempt, **receipt} for receipt in receipts]

    def _parted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        names = list(self.sources)
        if len(names) == 1:
            [schema] = self.sources.values()
            for batch in renamed(batches, schema.names):
                if batch.num_rows:
                    yield 0, batch
            return
        for batch in renamed(batches, names):
            if batch.num_rows:
                yield from split(batch, names)

    def _seat(self, partition: int) -> FeedTarget:
        here = executor_name()
        near = [seat for seat in self.seats if seat.executor == here] or list(self.seats)
        placed = [seat for seat in near if seat.member == self.places.get(partition)]
        return placed[0] if placed else near[partition % len(near)]

    def _connect(self, seat: FeedTarget, partition: int, attempt: int, source: int, schema: pa.Schema) -> _native.Feed:
        from penstock import _native

        return _native.Feed(
            seat.address,
            self.key.reveal(),
            self.query,
            self.epoch,
            partition,
            attempt,
            schema,
            self.silence,
            True,  # what is fed again is compared with what the sink was given
            seat.member,
            source,
        )


class Places:
    """Which member gets which partition, so that those of an executor get about equally many rows.

    Sizes are those of the batch before, the executor of a partition is that of the member that had it then. Partitions
    go to the member with the least, the largest ones first: the most that one gets is at most 4/3 of the least possible
    (Graham 1969). Those of a flow that needs order go in their order, in which they are worked off, so that successive
    ones are at different members.

    Examples
    --------
    >>> places, seats = Places(), [FeedTarget(member, "0", "") for member in (4, 5)]
    >>> places.came([Receipt(partition, 0, 4, 100, None, 0) for partition in (0, 2, 4, 6)], seats)
    >>> places.of(seats)
    {0: 4, 2: 5, 4: 4, 6: 5}
    >>> places.came([Receipt(partition, 0, 4, rows, None, 0) for partition, rows in enumerate((3, 1, 4))], seats)
    >>> places.of(seats), places.of(seats, ordered=True)
    ({2: 4, 0: 5, 1: 5}, {0: 4, 1: 5, 2: 5})
    """

    def __init__(self) -> None:
        #: Executor -> partition -> rows of the batch before.
        self._rows: dict[str, dict[int, int]] = {}

    def came(self, receipts: Sequence[Receipt], seats: Sequence[FeedTarget]) -> None:
        """A batch was fed by tasks."""
        if any(one.gone is not None for one in receipts):
            return  # and will be fed again
        executors = {seat.member: seat.executor for seat in seats}
        self._rows = {}
        for one in receipts:
            rows = self._rows.setdefault(executors[one.member], {})
            rows[one.partition] = rows.get(one.partition, 0) + one.rows

    def of(self, seats: Sequence[FeedTarget], ordered: bool = False) -> dict[int, int]:
        """The member for each partition that the batch before had; none where an executor has one member alone."""
        found: dict[int, int] = {}
        there: dict[str, list[tuple[int, int, int]]] = {}
        for at, seat in enumerate(seats):
            there.setdefault(seat.executor, []).append((0, at, seat.member))
        for executor, rows in self._rows.items():
            loads = there.get(executor, [])
            if len(loads) < 2:
                continue
            heapq.heapify(loads)
            for partition, count in sorted(rows.items(), key=lambda one: (0 if ordered else -one[1], one[0])):
                load, at, member = loads[0]
                found[partition] = member
                heapq.heapreplace(loads, (load + count, at, member))
        return found


class Shortcut:
    """Whether the next batch of a query comes by way of the driver: the last ones tell. And to how many members."""

    def __init__(self) -> None:
        #: Members that had the last batch, how long they worked, and how long on the quickest one: what any takes.
        self._had, self._ran_s, self._least_s = 1, 0.0, math.inf
        #: Small batches to see before.
        self._left = 1
        self._again = 1
        #: Attempts of the driver have numbers that no task of Spark's has.
        self._attempts = 1 << 62

    @property
    def open(self) -> bool:
        """Whether it does."""
        return self._left == 0

    def attempt(self) -> int:
        """A number of its own for what the driver sends."""
        self._attempts += 1
        return self._attempts

    def pieces(self, rows: Sequence[pa.RecordBatch], members: int) -> list[list[pa.RecordBatch]]:
        """The rows for each of some members, in their order: a stretch for each, or all for one."""
        count = sum(batch.num_rows for batch in rows)
        many = members if (self._ran_s - self._least_s) * self._had > _ALONE_S else 1
        size = max(1, -(-count // many))
        table = pa.Table.from_batches(rows) if rows else None
        if many == 1 or table is None:
            return [list(rows)]
        return [table.slice(at, size).to_batches() for at in range(0, count, size)]

    def ran(self, seconds: float) -> None:
        """The members have worked on a batch for so long."""
        self._ran_s, self._least_s = seconds, min(seconds, self._least_s)

    def came(self, receipts: Sequence[Receipt]) -> None:
        """A batch has come."""
        self._had = max(1, len({one.member for one in receipts}))
        small = sum(one.rows for one in receipts) <= _FEW_ROWS and sum(one.bytes for one in receipts) <= _FEW_BYTES
        self._left = max(0, self._left - 1) if small else max(1, self._left)

    def missed(self) -> None:
        """What came by way of the driver was too much, and has to be fed again: the more often, the longer it waits."""
        self._left = self._again = min(2 * self._again, _LONGEST)


def first(df: DataFrame) -> list[pa.RecordBatch] | None:
    """All rows of a DataFrame, in their order, where they are few; None where they are not.

    Of each partition Spark reads no more than that many.
    """
    from pyspark.sql import functions as F

    # A limit takes partitions as they come.
    placed = df.select("*", F.monotonically_increasing_id().alias(_PLACE))
    try:
        found = to_batches(placed.limit(_MOST_ROWS + 1))
    except Exception as error:
        if "maxResultSize" in str(error):
            return None
        raise
    if sum(batch.num_rows for batch in found) > _MOST_ROWS:
        return None
    return _in_place(found)


def _in_place(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Batches in the order of their last column, and without it."""
    if not batches:
        return []
    table = pa.Table.from_batches(batches)
    last = table.num_columns - 1
    order = pc.sort_indices(table.column(last))
    rows = table.remove_column(last)
    if not order.equals(pa.array(range(len(order)), order.type)):
        rows = rows.combine_chunks().take(order)
    made: list[pa.RecordBatch] = rows.combine_chunks().to_batches()
    return made


@contextlib.contextmanager
def larger_batches(session: SparkSession, schemas: Iterable[pa.Schema]) -> Iterator[None]:
    """While this lasts, what the session sends to Python comes in larger Arrow batches, where its rows are narrow.

    Neither does Spark look at the bytes of a batch then, unless its limit is so low that such a batch could reach it.

    Parameters
    ----------
    session : pyspark.sql.SparkSession
        Whose jobs; in ``foreachBatch`` it is the query's own.
    schemas : iterable of pyarrow.Schema
        What is sent: a row of all together.
    """
    rows = _batch_rows(schemas)
    # One session may be used by several threads, and by handles that are not the same.
    whose = int(session._jsparkSession.hashCode())
    with _CHANGING:
        users, most, had = _CHANGED.get(whose, (0, 0, {}))
        if users == 0:
            most, had = rows, _enlarge(session, rows)
        elif rows < most and had:
            # Too many for the rows of this one: those before it go without what their tasks have not got yet.
            _restore(session, had)
            most, had = 0, {}
        _CHANGED[whose] = users + 1, most, had
    try:
        yield
    finally:
        with _CHANGING:
            users, most, had = _CHANGED.pop(whose)
            if users > 1:
                _CHANGED[whose] = users - 1, most, had
            else:
                _restore(session, had)


def _restore(session: SparkSession, had: Mapping[str, str]) -> None:
    # The session may have ended meanwhile.
    with contextlib.suppress(Exception):
        for name, value in had.items():
            session.conf.set(name, value)


def _enlarge(session: SparkSession, rows: int) -> dict[str, str]:
    """Allow batches of so many rows; what the settings were that have changed."""
    before = _setting(session, _BATCH_CONF)
    if before is None or not 0 < int(before) <= rows:  # 0 or less is without limit
        return {}
    had, wanted = {_BATCH_CONF: before}, {_BATCH_CONF: str(rows)}
    most = _setting(session, _BYTES_CONF)
    # So many rows of them never come near it.
    if most is not None and parse_bytes(most, _BYTES_CONF) >= 2 * _BATCH_BYTES:
        had[_BYTES_CONF], wanted[_BYTES_CONF] = most, _NO_LIMIT
    try:
        for name, value in wanted.items():
            session.conf.set(name, value)
    except BaseException:
        with contextlib.suppress(Exception):
            for name, value in had.items():
                session.conf.set(name, value)
        raise
    return had


def _setting(session: SparkSession, name: str) -> str | None:
    """A setting of Spark's; None where this Spark has none of that name."""
    try:
        return session.conf.get(name)
    except Exception:
        return None


def _batch_rows(schemas: Iterable[pa.Schema]) -> int:
    """Rows of an Arrow batch; 0 where a row may be of any size."""
    types = [field.type for schema in schemas for field in schema]
    if not types or not all(pa.types.is_primitive(one) or pa.types.is_decimal(one) for one in types):
        return 0
    return min(_BATCH_ROWS, _BATCH_BYTES * 8 // sum(int(one.bit_width) + 1 for one in types))


def lives(address: str, silence: float) -> bool:
    """Whether a member is there. It says nothing to who says nothing, until it ends, or its patience does.

    The system accepts connections for a process that was killed until it has closed what that had open, and ends them
    with that. A member that lives counts one more connection that it refused: it answers nobody without a key. It ends
    such a connection itself after `silence` seconds at the latest (``member_timeout``).
    """
    host, _, port = address.rpartition(":")
    wait_s = min(_DIAL_S, silence / _SHARE)
    began = time.monotonic()
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_DIAL_S)
    except OSError:
        return False
    with connection:
        connection.settimeout(wait_s)
        try:
            said = bool(connection.recv(1))
        except TimeoutError:
            return True
        except OSError:
            said = False
    # Who did not come to look for so long may see the end of its patience: another try tells more than this one.
    return said or time.monotonic() - began > 2 * wait_s
