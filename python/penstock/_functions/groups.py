"""Functions over the groups of an epoch, with a state and a timeout per key: what a worker keeps and calls.

Owns: `GroupBin`, the state of one bin with the rows of the epoch under way and the timers; `GroupStateCall`, the call
that the native module makes for a `group_state` step. The user's function is one written for Spark's
``applyInPandasWithState``.

Order of an epoch, which is a batch of Spark's and the empty batch that Spark runs after it when the watermark has
moved:

1. each key with rows, once, with all its rows of the epoch in input order and the watermark of the epoch's begin;
2. processing-time timeouts before the epoch's clock, of keys without rows;
3. event-time timeouts before the watermark that the epoch ends with, in order of their times.

A timeout is gone before its call; each call leaves only the timeout that it sets. Timers are an index of the states:
a heap per bin whose entries count while the state says so. They need no journal and are made anew after a move or
an undo.

In a batch job (no clock) every key is called once, nothing times out and no state is kept from one job to another. At
the end of a stream every event-time timeout fires once, with the watermark where it was.

Departures: timers are not post-dated records of S, since they follow the watermark and the clock, which are values
and not times of the dataflow; the clock is the epoch's processing time, fixed by the host and the same when it is
repeated. An epoch stands for Spark's batch and the empty batch behind it, so event-time timeouts do not wait for
the next data.
"""

from __future__ import annotations

import heapq
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

from penstock._functions.columns import UNSERVED, column_of, each_served, groupable, one_zero
from penstock._functions.group_state import (
    EVENT_TIME,
    NO_TIMESTAMP,
    PROCESSING_TIME,
    GroupEpoch,
    GroupState,
    StateShape,
)
from penstock._functions.loop import BrokenOff, behind
from penstock._functions.state import FORMAT, MISSING, BinState, own_nan, sampled, size_of
from penstock._views import rows_at
from penstock.errors import StateError

if TYPE_CHECKING:
    from penstock._functions.frames import Cutter, Joiner

__all__ = ["GroupBin", "GroupStateCall"]

_T = TypeVar("_T")
_ROWS: Final = 2
#: So many timers more than keys are kept at most, beside one a key.
_FEW: Final = 64
#: The watermark at the end of input, microseconds.
_END_US: Final = (1 << 63) - 1


class GroupBin(BinState):
    """State of one bin: key -> ``(state or None, timeout in ms or None)``, the epoch's rows, and timers.

    Attributes
    ----------
    pending
        Rows of the epoch under way: batch, first row, number of rows.
    """

    __slots__ = ("_order", "_timers", "pending")

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[pa.RecordBatch, int, int]] = []
        #: Time, order of setting, key. None when it is to be made anew.
        self._timers: list[tuple[int, int, Any]] | None = []
        self._order = 0

    def weight(self, state: Any) -> int:
        """About how many bytes the values of a state take."""
        values = state[0] or ()
        return sys.getsizeof(state) + sys.getsizeof(values) + sampled(values, len(values), size_of)

    def put(self, key: Any, value: tuple[Any, ...] | None, timeout_ms: int | None) -> None:
        """Set what a call has left of a key."""
        states, journal = self.states, self.journal
        if journal is not None and key not in journal:
            # Entries are never changed in place.
            journal[key] = states.get(key, MISSING)
        if value is None and timeout_ms is None:
            states.pop(key, None)
            return
        states[key] = (value, timeout_ms)
        if timeout_ms is not None and self._timers is not None:
            self._order += 1
            heapq.heappush(self._timers, (timeout_ms, self._order, key))
            if len(self._timers) > 2 * len(states) + _FEW:
                self._timers = None  # most of them are of keys whose timeouts were set anew

    def due(self, limit_ms: int) -> list[tuple[int, Any]]:
        """The timeouts before `limit_ms` with their keys, in their order; each is told once."""
        timers, states = self._timers, self.states
        if timers is None:
            set_ = (entry[1] for entry in states.values())
            timers = [(at, n, key) for n, (key, at) in enumerate(zip(states, set_, strict=True)) if at is not None]
            heapq.heapify(timers)
            self._timers, self._order = timers, len(states)
        found: dict[Any, int] = {}
        while timers and timers[0][0] < limit_ms:
            at, _, key = heapq.heappop(timers)
            entry = states.get(key)
            if entry is not None and entry[1] == at:
                found.setdefault(key, at)
        return [(at, key) for key, at in found.items()]

    def rollback(self) -> None:
        super().rollback()
        self.pending = []
        self._timers = None

    def encode(self, changed: bool = True) -> Iterator[bytes]:
        yield from super().encode(changed)
        for batch, start, rows in self.pending:
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch.slice(start, rows))
            yield bytes((FORMAT, _ROWS)) + sink.getvalue()

    def entries(self) -> list[tuple[Any, Any]] | None:
        return None if self.pending else super().entries()

    def restore(self, entries: Iterable[tuple[bytes, bytes | None]]) -> None:
        self._timers = None
        super().restore(entries)

    def absorb(self, chunk: bytes) -> None:
        if chunk[:2] != bytes((FORMAT, _ROWS)):
            super().absorb(chunk)
            self._timers = None
            return
        try:
            batches = list(pa.ipc.open_stream(chunk[2:]))
        except (pa.ArrowException, OSError) as error:
            raise StateError(f"the rows of a bin could not be restored here: {error}") from error
        self.pending.extend((batch, 0, batch.num_rows) for batch in batches)


class GroupStateCall:
    """A function ``f(key, frames, state)`` as Spark's ``applyInPandasWithState`` takes it.

    Parameters
    ----------
    call
        The entry of a plan's `calls`.
    stopped
        Tells that the host is stopping.
    failed
        Makes the exception to raise of the one that the function raised, the keys' names and the key.
    """

    kind = "groups"

    def __init__(
        self,
        call: dict[str, Any],
        stopped: Callable[[], bool],
        failed: Callable[[Exception, Sequence[str], tuple[Any, ...]], BaseException],
    ) -> None:
        self.step: str = call["step"]
        self.func: Callable[..., Any] = call["func"]
        self.keys: list[str] = list(call["keys"])
        self.schema: pa.Schema = call["schema"]
        self.sides: list[tuple[str, pa.Schema]] = list(call.get("sides", ()))
        self._timezone: str = call["timezone"]
        self._shape = StateShape(call["state"], self._timezone)
        self._timeout: str = call["timeout"]
        self._watermark: bool = call["watermark"]
        self.key_types: list[pa.DataType] = list(call["key_types"])
        self._columns: list[str] = list(call["columns"])
        self._stopped = stopped
        self._failed = failed

    def new_state(self) -> GroupBin:
        """Empty state of one bin."""
        return GroupBin()

    def take(self, bins: Sequence[GroupBin], counts: Sequence[int], handle: Any) -> None:
        """Keep the rows of a block, bin after bin, for the end of the epoch."""
        batch = pa.record_batch(handle)
        start = 0
        for bin, rows in zip(bins, counts, strict=True):
            bin.open()
            bin.pending.append((batch, start, rows))
            start += rows

    def end_epoch(
        self, bins: Sequence[GroupBin], before_us: int | None, after_us: int | None, clock_ms: int | None
    ) -> list[pa.RecordBatch] | tuple[list[pa.RecordBatch], list[tuple[int, pa.RecordBatch]]]:
        """Call the function for the groups of an epoch and its timeouts; see the module for their order.

        Parameters
        ----------
        bins
            All bins of the worker.
        before_us, after_us
            The watermarks that the epoch begins and ends with.
        clock_ms
            Its processing time; None in a batch job.
        """
        from penstock._functions.frames import Joiner

        out = Joiner(self.schema, self._timezone, self.sides)
        ended = after_us == _END_US
        if clock_ms is None:
            epoch = self._epoch(NO_TIMESTAMP, int(time.time() * 1_000))
            self._rows(bins, epoch, out)
        else:
            # Spark's watermark begins at 0.
            before = max(0, before_us // 1_000) if before_us is not None else 0
            after = before if after_us is None or ended else max(before, after_us // 1_000)
            epoch = self._epoch(before, clock_ms)
            self._rows(bins, epoch, out)
            if self._timeout == PROCESSING_TIME:
                self._timeouts(bins, epoch, clock_ms, out)
            elif self._timeout == EVENT_TIME and (ended or after > before):
                self._timeouts(bins, self._epoch(after, clock_ms), _END_US if ended else after, out)
        made = self._joining(bins, out.take)
        return (made, self._joining(bins, out.take_sides)) if self.sides else made

    def refused(self, reason: str) -> BaseException:
        """The error of results that do not fit the declared schema."""
        return self._failed(TypeError(reason), (), ())

    def _epoch(self, watermark_ms: int, clock_ms: int) -> GroupEpoch:
        return GroupEpoch(self._shape, self._timeout, watermark_ms if self._watermark else None, clock_ms)

    def _rows(self, bins: Sequence[GroupBin], epoch: GroupEpoch, out: Joiner) -> None:
        """Step 1."""
        pieces = [(bin, piece) for bin in bins for piece in bin.pending]
        if not pieces:
            return
        import numpy as np

        table = pa.Table.from_batches([batch.slice(start, rows) for _, (batch, start, rows) in pieces])
        for bin, _ in pieces:
            bin.pending = []
        ends = np.cumsum([rows for _, (_, _, rows) in pieces])
        try:
            order, starts, keys, cutter = self._grouped(table)
        except BaseException:
            for bin, _ in pieces:
                bin.taint()
            raise
        del table
        owners = np.searchsorted(ends, order[starts], side="right").tolist()
        bounds = [*starts.tolist(), len(order)]
        for at, (key, tell) in enumerate(keys):
            bin = pieces[owners[at]][0]
            try:
                frame = cutter.cut(bounds[at], bounds[at + 1])
            except UNSERVED as error:
                bin.taint()
                raise self._failed(TypeError(f"it cannot take the rows of a key: {error}"), self.keys, key) from error
            self._call(bin, key, tell, frame, False, epoch, out)
            if out.full:
                self._joining(bins, out.flush)

    def _grouped(self, table: pa.Table) -> tuple[Any, Any, list[tuple[tuple[Any, ...], tuple[Any, ...]]], Cutter]:
        """Rows by group, where the groups start, their keys as they are kept and as they are told, and their frames."""
        from penstock._functions.frames import Cutter, group_rows, scalars

        zone = self._timezone

        def served(work: Callable[[list[str]], _T], names: Sequence[str]) -> _T:
            return each_served(work, table.schema, names, self.refused)

        order, starts = served(lambda names: group_rows(table, names), self.keys)
        heads = served(lambda names: rows_at(table.select(names), order[starts]).combine_chunks(), self.keys)
        kept = served(lambda names: [groupable(heads.column(name)).to_pylist() for name in names], self.keys)
        told = served(lambda names: [scalars(one_zero(heads.column(name)), zone) for name in names], self.keys)
        cutter = served(lambda names: Cutter(rows_at(table.select(names), order), zone), table.schema.names)
        keys = (tuple(map(own_nan, key)) for key in zip(*kept, strict=True))
        return order, starts, list(zip(keys, zip(*told, strict=True), strict=True)), cutter

    def _timeouts(self, bins: Sequence[GroupBin], epoch: GroupEpoch, limit_ms: int, out: Joiner) -> None:
        """Steps 2 and 3."""
        due = [(at, key, bin) for bin in bins for at, key in bin.due(limit_ms)]
        if not due:
            return
        from penstock._functions.frames import nothing, scalars

        due.sort(key=lambda item: item[0])
        columns = zip(*(key for _, key, _ in due), strict=True)
        arrays = [column_of(column, kind) for column, kind in zip(columns, self.key_types, strict=True)]
        shown = zip(*(scalars(array, self._timezone) for array in arrays), strict=True)
        empty = nothing(self._columns)
        for (_, key, bin), tell in zip(due, shown, strict=True):
            self._call(bin, key, tell, empty.copy(), True, epoch, out)
            if out.full:
                self._joining(bins, out.flush)

    def _call(
        self,
        bin: GroupBin,
        key: tuple[Any, ...],
        tell: tuple[Any, ...],
        frame: Any,
        timed_out: bool,
        epoch: GroupEpoch,
        out: Joiner,
    ) -> None:
        began = time.perf_counter()
        entry = bin.states.get(key)
        state = GroupState(epoch, None if entry is None else entry[0], timed_out)
        try:
            result = self.func(tell, iter((frame,)), state)
            if hasattr(result, "columns") and hasattr(result, "iloc"):
                raise TypeError("the function returned a DataFrame; it must yield DataFrames, or return a list of them")
            if result is None:
                raise TypeError("the function returned None; it must yield DataFrames, or return a list of them")
            for made in result:
                out.add(made)
        except BaseException as error:
            bin.taint()
            if not isinstance(error, Exception):
                raise
            failed = self._failed(error, self.keys, key)
            raise failed from behind(failed, error)
        timeout_ms = state._timeout_ms
        if state._updated or state._removed or timeout_ms is not None or (entry is not None and entry[1] is not None):
            bin.put(key, state._value, timeout_ms)
        bin.spent_s += time.perf_counter() - began
        if self._stopped():
            raise BrokenOff

    def _joining(self, bins: Sequence[GroupBin], work: Callable[[], _T]) -> _T:
        """Join frames; which key a value that does not fit came from is not known here."""
        try:
            return work()
        except Exception as error:
            for bin in bins:
                bin.taint()
            failed = self._failed(error, (), ())
            raise failed from behind(failed, error)
