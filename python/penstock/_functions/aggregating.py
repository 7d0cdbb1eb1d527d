"""Aggregates that users write, over blocks of rows: what a worker keeps and calls.

Owns: `AggregateBin`, the states of the keys of one bin, by window; `AggregateCall`, the call that the native module
makes for an `aggregate` step: once per block with the rows of its bins, and once at the end of each epoch.

A block is grouped by key and window without a look at single rows. The user's object fills new states with it in one
call, and each of those is merged into the one that the key has. So a state is touched when all of the block has been
accumulated: an `accumulate` that raises has changed nothing. One of the other methods that raises leaves the bins
tainted until they are rolled back, see `BinState`.

In sessions each row comes with the bounds of the one that it would be alone. Those of a block that overlap or touch are
one before they are accumulated, and what comes of them is merged with the sessions of the key that it meets.

At the end of an epoch windows come out whose end its watermark has reached (sessions: passed), and are forgotten;
without windows the keys that the epoch touched ("update"), or all at the end of input ("final").

Invariants: a window is named by its bounds as the event-time column counts. When a window is due follows from the
states; the heap is an index of them, made anew after a move, an undo or a restore, and of no more than about twice as
many windows as there are. Keys that an epoch has touched move with their bin until it ends.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import operator
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc

from penstock._functions.columns import column_of, each_served, groupable
from penstock._functions.loop import BrokenOff, behind
from penstock._functions.short import short
from penstock._functions.state import (
    FORMAT,
    MISSING,
    BinState,
    Uncopied,
    copy_state,
    own_nan,
    sampled,
    size_of,
    uncopied,
)
from penstock._views import rows_at

__all__ = ["AggregateBin", "AggregateCall"]

_TOUCHED: Final = 3
#: The watermark at the end of input, microseconds.
_END_US: Final = (1 << 63) - 1
#: States that are finished at once.
_FINISH: Final = 8_192
_WINDOW: Final = ("window_start", "window_end")
#: So many windows that are no more are not worth looking through their index.
_FEW: Final = 64

#: Bounds of a window, as the event-time column counts; empty without windows.
Window = tuple[int, ...]
_START, _END = operator.itemgetter(0), operator.itemgetter(1)


class AggregateBin(BinState):
    """States of one bin: key, a tuple -> window -> state.

    Attributes
    ----------
    touched
        Keys with rows in the epoch under way, in their order.
    """

    __slots__ = ("_ends", "_gone", "_order", "touched")

    def __init__(self) -> None:
        super().__init__()
        self.touched: dict[Any, None] = {}
        #: End of a window, order, its key, the window; None when it is to be made anew. One that its key has no more
        #: (sessions that have become one) does not count.
        self._ends: list[tuple[int, int, Any, Window]] | None = []
        #: How many there do not count.
        self._gone = 0
        self._order = 0

    def keep(self, key: Any) -> None:
        """Note what a key is, before it is touched.

        Raises
        ------
        Uncopied
            When one of its states cannot be copied.
        """
        if self.journal is not None and key not in self.journal:
            windows = self.states.get(key, MISSING)
            try:
                self.journal[key] = windows if windows is MISSING else copy_state(windows)
            except Exception as error:
                raise Uncopied(key) from error

    def weight(self, state: Any) -> int:
        """About how many bytes the states of a key's windows take."""
        return sys.getsizeof(state) + sampled(state.values(), len(state), size_of)

    def open_window(self, window: Window, key: Any, gone: int) -> None:
        """Index a window that a key has from now on, in place of so many others."""
        ends = self._ends
        if ends is None:
            return
        self._order += 1
        heapq.heappush(ends, (window[1], self._order, key, window))
        self._gone += gone
        if self._gone > len(ends) // 2 + _FEW:
            # A session that grows with each block would leave them there for as long as its gap.
            ends[:] = [item for item in ends if item[3] in self.states.get(item[2], ())]
            heapq.heapify(ends)
            self._gone = 0

    def closed(self, reached: Callable[[int], bool]) -> Iterator[tuple[Any, Window]]:
        """Keys and their windows that are over, in the order of their ends; who takes one forgets it."""
        if self._ends is None:
            ends = ((window, key) for key, windows in self.states.items() for window in windows)
            self._ends = [(window[1], number, key, window) for number, (window, key) in enumerate(ends)]
            heapq.heapify(self._ends)
            self._order, self._gone = len(self._ends), 0
        while self._ends and reached(self._ends[0][0]):
            _, _, key, window = heapq.heappop(self._ends)
            if window in self.states.get(key, ()):
                yield key, window
            else:
                self._gone -= 1

    def rollback(self) -> None:
        super().rollback()
        self.touched = {}
        self._ends = None

    def encode(self, changed: bool = True) -> Iterator[bytes]:
        yield from super().encode(changed)
        if self.touched:
            yield bytes((FORMAT, _TOUCHED)) + cloudpickle.dumps(list(self.touched), protocol=5)

    def entries(self) -> list[tuple[Any, Any]] | None:
        return None if self.touched else super().entries()

    def restore(self, entries: Iterable[tuple[bytes, bytes | None]]) -> None:
        super().restore(entries)
        self._ends = None

    def absorb(self, chunk: bytes) -> None:
        if chunk[:2] == bytes((FORMAT, _TOUCHED)):
            self.touched.update(dict.fromkeys(map(own_nan, pickle.loads(chunk[2:]))))
            return
        super().absorb(chunk)
        self._ends = None


class AggregateCall:
    """A user's `Aggregator`.

    Parameters
    ----------
    call
        The entry of a plan's `calls`.
    stopped
        Tells that the host is stopping.
    failed
        Makes the exception to raise of one that a method raised: that method, the exception, None, the key, its names.
    refuse
        Makes the exception of results that do not fit.
    """

    kind = "groups"

    def __init__(
        self,
        call: dict[str, Any],
        stopped: Callable[[], bool],
        failed: Callable[..., BaseException],
        refuse: Callable[[str], BaseException],
    ) -> None:
        self.step: str = call["step"]
        self.schema: pa.Schema = call["schema"]
        self.key_types: list[pa.DataType] = list(call["key_types"])
        self._user = call["func"]
        self._keys: list[str] = list(call["keys"])
        self._columns: list[str] = list(call["columns"])
        self._time_type: pa.DataType | None = call["time_type"]
        #: Columns that `finish` makes, behind the bounds of the window and the keys.
        bounds = 0 if self._time_type is None else len(_WINDOW)
        self._made = len(self.schema) - bounds - len(self._keys)
        self._updates: bool = call.get("emit") == "update"
        #: The event time is cut into sessions.
        self._sessions: bool = call.get("sessions", False)
        self._stopped = stopped
        self._failed = failed
        self._refuse = refuse

    def new_state(self) -> AggregateBin:
        """Empty state of one bin."""
        return AggregateBin()

    def refused(self, reason: str) -> BaseException:
        """The error of results that do not fit the declared schema."""
        return self._refuse(reason)

    def take(self, bins: Sequence[AggregateBin], counts: Sequence[int], handle: Any) -> None:
        """Add the rows of a block, bin after bin."""
        batch = pa.record_batch(handle)
        for bin in bins:
            bin.open()
        rows, groups, heads = self._grouped(batch, counts)
        user = self._user
        try:
            made = [user.create() for _ in range(len(heads[0]))]
        except Exception as error:
            failed = self._failed(user.create, error)
            raise failed from behind(failed, error)
        try:
            given = user.accumulate(made, groups, rows)
            if given is not None:
                made = given
            if not isinstance(made, list) or len(made) != len(heads[0]):
                raise TypeError(
                    f"accumulate returned {short(made)}; it must be None or a list of {len(heads[0])} states"
                )
        except Exception as error:
            failed = self._failed(user.accumulate, error)
            raise failed from behind(failed, error)
        places, windows, *columns = heads
        #: The sessions of the key at hand, ascending: heads of a key stand together.
        at, sessions = None, list[Window]()
        for new, place, window, *values in zip(made, places, windows, *columns, strict=True):
            bin, key = bins[place], own_nan(tuple(values))
            self._keep(bins, bin, key)
            mine = bin.states.setdefault(key, {})
            if self._sessions:
                if at != (place, key):
                    at, sessions = (place, key), sorted(mine)
                # They are apart, so their ends ascend as well.
                first = bisect.bisect_left(sessions, window[0], key=_END)
                last = bisect.bisect_right(sessions, window[1], key=_START)
                met = sessions[first:last]
            else:
                met = [window] if window in mine else []
            try:
                for other in met:
                    window = (min(window[0], other[0]), max(window[1], other[1])) if window else window
                states = [*(mine.pop(other) for other in met), new]
                mine[window] = functools.reduce(user.merge, states)
            except BaseException as error:
                for each in bins:
                    each.taint()
                if not isinstance(error, Exception):
                    raise
                failed = self._failed(user.merge, error, None, key, self._keys)
                raise failed from behind(failed, error)
            if self._sessions:
                sessions[first:last] = [window]
            if window and window not in met:
                bin.open_window(window, key, len(met))
            if self._updates:
                bin.touched[key] = None
        if self._stopped():
            raise BrokenOff

    def end_epoch(
        self, bins: Sequence[AggregateBin], before_us: int | None, after_us: int | None, clock_ms: int | None
    ) -> list[pa.RecordBatch]:
        """What comes out; see the module."""
        ended = after_us == _END_US and before_us != _END_US
        found: list[tuple[tuple[Any, ...], Window, Any]] = []
        out: list[pa.RecordBatch] = []
        for bin in bins:
            bin.open()
            for item in self._due(bins, bin, after_us, ended):
                found.append(item)
                if len(found) == _FINISH:
                    out += self._finished(bins, found)
                    found = []
            bin.touched = {}
        if found:
            out += self._finished(bins, found)
        return out

    def _keep(self, bins: Sequence[AggregateBin], bin: AggregateBin, key: tuple[Any, ...]) -> None:
        """Note what a key of one of the bins is, before it is touched."""
        try:
            bin.keep(key)
        except Uncopied as error:
            for each in bins:
                each.taint()
            raise uncopied(self.step, key, error.__cause__) from error.__cause__

    def _due(
        self, bins: Sequence[AggregateBin], bin: AggregateBin, after_us: int | None, ended: bool
    ) -> Iterator[tuple[tuple[Any, ...], Window, Any]]:
        if self._time_type is None:
            keys = bin.touched if self._updates else bin.states if ended else ()
            yield from ((key, (), bin.states[key][()]) for key in keys)
            return
        if after_us is None:
            return

        # A row at the very end of a session would still be of it.
        last = after_us - 1 if self._sessions else after_us

        def reached(end: int) -> bool:
            return self._us(end) <= last

        for key, window in bin.closed(reached):
            self._keep(bins, bin, key)
            windows = bin.states[key]
            state = windows.pop(window)
            if not windows:
                del bin.states[key]
            yield key, window, state

    def _finished(
        self, bins: Sequence[AggregateBin], found: list[tuple[tuple[Any, ...], Window, Any]]
    ) -> list[pa.RecordBatch]:
        if self._stopped():
            raise BrokenOff
        try:
            made = self._user.finish([state for _, _, state in found])
            if not (hasattr(made, "__arrow_c_array__") or hasattr(made, "__arrow_c_stream__")):
                raise TypeError(f"finish returned {short(made)}, not a pyarrow RecordBatch or Table")
            table = pa.table(made)
            declared = self.schema.names[len(self.schema) - self._made :]
            if table.column_names != declared and sorted(table.column_names) != sorted(declared):
                raise TypeError(f"finish returned the columns {table.column_names}; declared are {declared}")
            if len(table) != len(found):
                raise ValueError(f"finish returned {len(table)} rows for {len(found)} states; it returns one for each")
        except Exception as error:
            for bin in bins:
                bin.taint()
            failed = self._failed(self._user.finish, error)
            raise failed from behind(failed, error)
        columns: dict[str, Any] = {}
        if self._time_type is not None:
            for at, name in enumerate(_WINDOW):
                bounds = pa.array([window[at] for _, window, _ in found], pa.int64())
                columns[name] = bounds.cast(self._time_type)
        for name, kind, values in zip(
            self._keys, self.key_types, zip(*(key for key, _, _ in found), strict=True), strict=True
        ):
            columns[name] = column_of(values, kind)
        for name in table.column_names:
            columns[name] = table.column(name)
        # Not of one piece: of texts there may be more than one column holds.
        made_of: list[pa.RecordBatch] = pa.table(columns).to_batches()
        return made_of

    def _grouped(
        self, batch: pa.RecordBatch, counts: Sequence[int]
    ) -> tuple[pa.RecordBatch, pa.Array, list[list[Any]]]:
        """Rows by bin, key and window; the group of each; and per group its bin, window and key columns."""
        bounds = list(_WINDOW) if self._time_type is not None else []
        table: dict[str, Any] = {
            "bin": pa.array(itertools.chain.from_iterable([at] * n for at, n in enumerate(counts)))
        }
        columns = [batch.column(name).cast(pa.int64()) for name in bounds]
        columns += self._served(lambda names: [groupable(batch.column(name)) for name in names], batch, self._keys)
        table |= {str(number): column for number, column in enumerate(columns)}
        table["row"] = pa.array(range(batch.num_rows), pa.int64())
        by = [name for name in table if name != "row" and not (self._sessions and name in ("0", "1"))]
        found = pa.table(table).group_by(by, use_threads=False).aggregate([("row", "list")])
        lists = found.column("row_list").combine_chunks()
        if isinstance(lists, pa.ChunkedArray):
            lists = lists.chunk(0)
        if self._sessions:
            return self._cut(batch, pa.table(table), found, lists, [name for name in by if name not in ("0", "1")])
        rows = self._rows(batch, lists.flatten())
        places, *heads = (found.column(name) for name in by)
        windows: list[Any] = [()] * len(found)
        if bounds:
            windows = list(zip(heads[0].to_pylist(), heads[1].to_pylist(), strict=True))
        keys = self._values(batch, heads[len(bounds) :])
        return rows, pc.list_parent_indices(lists), [places.to_pylist(), windows, *keys]

    def _cut(
        self, batch: pa.RecordBatch, table: pa.Table, found: pa.Table, lists: pa.ListArray, by: list[str]
    ) -> tuple[pa.RecordBatch, pa.Array, list[list[Any]]]:
        """As `_grouped`, of rows by bin and key: by the sessions that those of a key make."""
        row = lists.flatten()
        of = pa.table({"key": pc.list_parent_indices(lists), "row": row})
        for name, column in (("start", "0"), ("end", "1")):
            of = of.append_column(name, pc.take(table.column(column), row))
        of = of.sort_by([("key", "ascending"), ("start", "ascending")])
        key, start, end = (of.column(name).combine_chunks() for name in ("key", "start", "end"))
        # All ends are as far from their starts, so the one before is the latest of its session.
        apart = pc.or_(pc.not_equal(key[1:], key[:-1]), pc.greater(start[1:], end[:-1]))
        first = pa.concat_arrays([pa.array([True] * min(1, len(key))), apart])
        last = pa.concat_arrays([apart, pa.array([True] * min(1, len(key)))])
        number = pc.subtract(pc.cumulative_sum(first.cast(pa.int64())), 1)
        of = of.append_column("number", number).sort_by([("number", "ascending"), ("row", "ascending")])
        places, *heads = (found.column(name).take(key.filter(first)) for name in by)
        windows = list(zip(start.filter(first).to_pylist(), end.filter(last).to_pylist(), strict=True))
        rows = self._rows(batch, of.column("row").combine_chunks())
        return rows, of.column("number").combine_chunks(), [places.to_pylist(), windows, *self._values(batch, heads)]

    def _served(self, work: Callable[[list[str]], Any], batch: pa.RecordBatch, names: Sequence[str]) -> Any:
        """What is made of columns of a block; see `each_served`."""
        return each_served(work, batch.schema, names, self._refuse)

    def _rows(self, batch: pa.RecordBatch, places: Any) -> pa.RecordBatch:
        """The rows at these places, with the columns that the user's object gets."""
        rows: pa.RecordBatch = self._served(lambda names: rows_at(batch.select(names), places), batch, self._columns)
        return rows

    def _values(self, batch: pa.RecordBatch, heads: Sequence[Any]) -> list[list[Any]]:
        """Key columns of groups as Python has them."""
        by_name = dict(zip(self._keys, heads, strict=True))
        values: list[list[Any]] = self._served(
            lambda names: [by_name[name].to_pylist() for name in names], batch, self._keys
        )
        return values

    def _us(self, bound: int) -> int:
        kind = self._time_type
        unit = kind.unit if kind is not None and pa.types.is_timestamp(kind) else "ms"
        return bound // 1_000 if unit == "ns" else bound * {"s": 1_000_000, "ms": 1_000, "us": 1}[unit]
