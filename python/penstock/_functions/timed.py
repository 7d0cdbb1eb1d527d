"""A function per row with a state per key, timers, states that expire, and a call at the end of input.

Owns: `TimedBin`, the state of one bin with its timers; `TimedCall`, the call that the native module makes for a
`stateful_map` that says more than its step: once per block and once at the end of each epoch.

Order of an epoch:

1. rows in input order, each as it comes; where states expire by processing time at the end of the epoch, whose clock is
   not known before, behind the states that are expired by it. In a run without a clock nothing waits for one;
2. timers before the watermark that the epoch ends with: of a key in the order of their times, of equal times in that in
   which they were set; a call may set more, at its own time or later, and those before the watermark follow at once;
3. states that are expired by that watermark are dropped;
4. at the end of input, when all timers have fired, each key that has a state is told so, once, and forgotten.

Expiry. A state is as old as its last row or timer. *In event time* a row (or timer) whose time is `ttl` or more behind
that finds no state, whatever the epochs; the watermark only says when nobody can ask for it any more, and then it goes.
A row without event time renews nothing, and a state that has only had such is as old as the watermark that its epoch
ends with. *In processing time* an epoch has one clock, fixed by the host and the
same when it is repeated or undone; a state is gone in the first epoch whose clock is `ttl` or more behind that of its
last one. A batch job has no clock: nothing expires by processing time there.

Invariants: what is due is in `states` alone, entry by entry; heaps are an index of it, whose items count while the
entry says so, made anew after a move, an undo or a restore, and where most of them count no more. A key that is dropped
is in the journal like one that is changed, so files have a tombstone for it.
"""

from __future__ import annotations

import bisect
import datetime
import functools
import heapq
import math
import operator
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import cloudpickle
import pyarrow as pa

from penstock._coroutines import UNRUN, unrun
from penstock._functions.loop import NOTHING, RETURNS, BrokenOff, behind
from penstock._functions.owned import Made, Marks, Origin, Owner, Refuse, parted
from penstock._functions.short import short
from penstock._functions.state import (
    FORMAT,
    MISSING,
    BinState,
    Uncopied,
    copy_state,
    own_key,
    sampled,
    size_of,
    uncopied,
)
from penstock._options import whole
from penstock._sides import Side
from penstock.errors import SchemaError

__all__ = ["TimedBin", "TimedCall"]

_WAITING: Final = 2
#: So many items of an index that count no more are not worth making it anew.
_FEW: Final = 64
#: The watermark at the end of input, microseconds.
_END_US: Final = (1 << 63) - 1
#: Times beyond are none, as in the native part.
_LIMIT_US: Final = _END_US // 4
#: Times beyond are none in nanoseconds.
_NS_US: Final = _END_US // 1_000
_EPOCH: Final = datetime.datetime(1970, 1, 1)
_EPOCH_UTC: Final = _EPOCH.replace(tzinfo=datetime.timezone.utc)
_TICK: Final = datetime.timedelta(microseconds=1)
_DAY: Final = datetime.timedelta(days=1)

#: State or None, when it was last used or None, and timers: a heap of time, number and value, which changes in place.
Entry = tuple[Any, "int | None", list[tuple[int, int, Any]]]


def to_us(value: Any) -> int:
    """An event time as Python has it (milliseconds since 1970, or a datetime, of UTC unless it names a zone), in us."""
    if isinstance(value, datetime.datetime) and value == value:  # unlike pandas' NaT
        epoch = _EPOCH if value.tzinfo is None else _EPOCH_UTC
        return (value - epoch) // _TICK
    milliseconds = whole(value)
    if milliseconds is None:
        raise TypeError(f"{short(value)} is no time: give milliseconds since 1970, or a datetime")
    return milliseconds * 1_000


class TimedBin(BinState):
    """State of one bin: key -> `Entry`, and rows that wait for the end of the epoch.

    Attributes
    ----------
    waiting
        Keys of rows, and their values by column.
    """

    __slots__ = ("_expiring", "_order", "_queued", "_timers", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[list[Any], list[list[Any]]]] = []
        self._index()

    def _index(self) -> None:
        #: Time of a key's earliest timer, order, key; None when it is to be made anew.
        self._timers: list[tuple[int, int, Any]] | None = None if self.states else []
        #: When a state may be over, order, key: an item counts that has the time of `_queued`, not after the true one.
        self._expiring: list[tuple[float, int, Any]] | None = None if self.states else []
        self._queued: dict[Any, float] = {}
        self._order = len(self.states)

    def keep(self, key: Any, entry: Entry | None) -> None:
        """Note what a key is, before it is touched.

        Raises
        ------
        Uncopied
            When its state, or what its timers hold, cannot be copied.
        """
        if self.journal is not None and key not in self.journal:
            if entry is None:
                self.journal[key] = MISSING
                return
            state, used, timers = entry
            known: dict[int, Any] = {}  # what state and timers share they share in the copy
            try:
                copies = [(at, n, copy_state(value, known)) for at, n, value in timers]
                self.journal[key] = copy_state(state, known), used, copies
            except Exception as error:
                raise Uncopied(key) from error

    def put(
        self, key: Any, state: Any, used: int | None, timers: list[tuple[int, int, Any]], ttl_us: int | None
    ) -> None:
        """Set what a call has left of a key that was noted."""
        if state is None:
            self._queued.pop(key, None)
            if not timers:
                self.states.pop(key, None)
                return
        self.states[key] = (state, None if state is None else used, timers)
        if ttl_us is not None and state is not None and self._expiring is not None:
            self._queue(key, used, ttl_us)

    def set_timers(self, timers: list[tuple[int, int, Any]], new: list[tuple[int, Any]]) -> None:
        """Put more to the timers of a key."""
        self._made()
        for at_us, value in new:
            self._order += 1
            heapq.heappush(timers, (at_us, self._order, value))

    def next_timer(self, key: Any) -> None:
        """Index the earliest timer of a key, after they have changed."""
        entry = self.states.get(key)
        if entry is not None and entry[2]:
            timers = self._made()
            self._order += 1
            heapq.heappush(timers, (entry[2][0][0], self._order, key))
            if len(timers) > 2 * len(self.states) + _FEW:
                # A timer that one before it has fired stands there for each of these. In place, of
                # the earliest ones alone.
                heads = ((entry[2][0][0], key) for key, entry in self.states.items() if entry[2])
                timers[:] = [(at, number, key) for number, (at, key) in enumerate(heads)]
                heapq.heapify(timers)

    def due(self, limit_us: int) -> Any | None:
        """The key of the earliest timer, in a tuple, where that is before `limit_us`."""
        timers = self._made()
        while timers and timers[0][0] < limit_us:
            at, _, key = heapq.heappop(timers)
            entry = self.states.get(key)
            if entry is not None and entry[2] and entry[2][0][0] == at:
                return (key,)
        return None

    def _made(self) -> list[tuple[int, int, Any]]:
        """The index of timers."""
        if self._timers is None:
            with_timers = [(key, entry[2]) for key, entry in self.states.items() if entry[2]]
            self._timers = [(timers[0][0], number, key) for number, (key, timers) in enumerate(with_timers)]
            heapq.heapify(self._timers)
            # Of equal times of a key the one that was set first is first, whatever bin it comes from.
            numbers = (number for _, timers in with_timers for _, number, _ in timers)
            self._order = max(self._order, len(with_timers), *numbers, 0)
        return self._timers

    def expire(self, limit_us: int, ttl_us: int) -> None:
        """Drop states that are over at `limit_us`. Of those of which nothing is known the time begins there."""
        states = self.states
        expiring = self._expiring
        if expiring is None:
            expiring = self._expiring = []
            self._queued = {}
            for key, (state, used, _) in states.items():
                if state is not None:
                    self._queue(key, used, ttl_us)
        while expiring and expiring[0][0] <= limit_us:
            at, _, key = heapq.heappop(expiring)
            if self._queued.get(key) != at:
                continue
            del self._queued[key]
            entry = states.get(key)
            if entry is None or entry[0] is None:
                continue
            state, used, timers = entry
            if used is not None and used + ttl_us > limit_us:
                self._queue(key, used, ttl_us)
                continue
            self.keep(key, entry)
            if used is None:
                self.put(key, state, limit_us, timers, ttl_us)
            else:
                self.put(key, None, None, timers, ttl_us)

    def _queue(self, key: Any, used: int | None, ttl_us: int) -> None:
        assert self._expiring is not None
        at = -math.inf if used is None else used + ttl_us
        if at < self._queued.get(key, math.inf):
            self._order += 1
            self._queued[key] = at
            heapq.heappush(self._expiring, (at, self._order, key))
            if len(self._expiring) > 2 * len(self._queued) + _FEW:
                # Most are of states that were forgotten. In place: who takes from it goes on with it.
                self._expiring[:] = [(at, number, key) for number, (key, at) in enumerate(self._queued.items())]
                heapq.heapify(self._expiring)

    def rollback(self) -> None:
        super().rollback()
        self.waiting = []
        self._index()

    def encode(self, changed: bool = True) -> Iterator[bytes]:
        yield from super().encode(changed)
        for rows in self.waiting:
            yield bytes((FORMAT, _WAITING)) + cloudpickle.dumps(rows, protocol=5)

    def entries(self) -> list[tuple[Any, Any]] | None:
        return None if self.waiting else super().entries()

    def restore(self, entries: Iterable[tuple[bytes, bytes | None]]) -> None:
        super().restore(entries)
        self._index()

    def absorb(self, chunk: bytes) -> None:
        if chunk[:2] == bytes((FORMAT, _WAITING)):
            keys, values = pickle.loads(chunk[2:])
            self.waiting.append(([own_key(key) for key in keys], values))
            return
        super().absorb(chunk)
        self._index()

    def weight(self, state: Any) -> int:
        """About how many bytes a state takes with what its timers hold."""
        held, _, timers = state
        return sys.getsizeof(state) + size_of(held) + sampled(timers, len(timers), lambda one: size_of(one[2]))

    def bytes(self) -> int:
        """About how many bytes state and rows that wait take: of each part of the rows a sample."""
        return super().bytes() + sum(_list_bytes(column) for keys, values in self.waiting for column in (keys, *values))


class _Out(Made):
    """Rows that come out, and the calls that put some out, which are numbered in runs of one function.

    Attributes
    ----------
    marks
        By which a row is told its call, as a number in its run.
    runs
        The first row of a run, the function, the keys of its calls, and of one over rows their columns.
    ahead
        How far places are ahead of numbers of calls where the last mark holds for calls of one row each, else None.
    """

    __slots__ = ("ahead", "marks", "runs")

    def __init__(self) -> None:
        super().__init__()
        self.marks = Marks()
        self.runs: list[tuple[int, Callable[..., Any], Sequence[Any], Sequence[Sequence[Any]] | None]] = []
        self.ahead: int | None = None

    def begin(
        self, func: Callable[..., Any], keys: Sequence[Any], columns: Sequence[Sequence[Any]] | None = None
    ) -> None:
        """A run of calls of a function; keys may come later."""
        self.runs.append((len(self), func, keys, columns))
        self.ahead = None

    def mark(self, call: int) -> None:
        """A call of the run puts out what comes next; inverted it alone, up to the next mark."""
        start = len(self)
        self.marks.starts.append(start)
        self.marks.calls.append(call)
        self.ahead = start - call if call >= 0 else None


def _list_bytes(values: list[Any]) -> int:
    sampled = values[:16]
    return sys.getsizeof(values) + sum(map(sys.getsizeof, sampled)) * len(values) // max(1, len(sampled))


class TimedCall:
    """Functions ``step(state, *values)``, ``on_timer(state, time, value, *key)`` and ``at_end(state, *key)``.

    Parameters
    ----------
    call
        The entry of a plan's `calls`.
    stopped
        Tells that the host is stopping.
    failed
        Makes the exception to raise of one that a function raised: that function, the exception, the row, the key's
        names and the key, None, and what the step returns.
    refuse
        Makes the exception of rows that do not fit.
    """

    kind = "stateful"

    def __init__(
        self,
        call: dict[str, Any],
        stopped: Callable[[], bool],
        failed: Callable[..., BaseException],
        refuse: Refuse,
    ) -> None:
        self.step: str = call["step"]
        self.func: Callable[..., Any] = call["func"]
        self.keys: list[str] = list(call["keys"])
        self.key_types: list[pa.DataType] = list(call["key_types"])
        self.schema: pa.Schema = call["schema"]
        self.sides: list[tuple[str, pa.Schema]] = list(call.get("sides", ()))
        self._on_timer: Callable[..., Any] | None = call["on_timer"]
        self._at_end: Callable[..., Any] | None = call["at_end"]
        self._ttl_us: int | None = call["ttl_us"]
        self._by_clock: bool = call["ttl_us"] is not None and call["ttl_time"] == "processing"
        #: Rows wait for the clock of their epoch. Where the host has none, as for an input that is one epoch, all would
        #: wait until the end, and for nothing.
        self._waits = self._by_clock and bool(call.get("clock", True))
        self._names: list[str] = list(call["columns"])
        #: What travels: the columns of the step, and behind them event time where states are as old as their rows.
        timed = call["ttl_us"] is not None and not self._by_clock
        self.columns = [*self._names, *([call["event_time"]] if timed else [])]
        self._timed = timed
        self._time_type: pa.DataType | None = call["time_type"]
        #: Between which times there are timers: those that can be told.
        self._least_us, self._most_us = -_LIMIT_US, _LIMIT_US
        if self._time_type is not None and not pa.types.is_integer(self._time_type):
            # A day less, for zones.
            self._least_us, self._most_us = to_us(datetime.datetime.min + _DAY), to_us(datetime.datetime.max - _DAY)
        #: What the functions that set timers return.
        self._returns = RETURNS if self._on_timer is None else f"{RETURNS} or (state, out, later)"
        self._stopped = stopped
        self._failed = failed
        self._refuse = refuse
        self._own = Owner(self.schema, self.sides)

    def new_state(self) -> TimedBin:
        """Empty state of one bin."""
        return TimedBin()

    def refused(self, reason: str, rows: Made | None = None, place: int | None = None) -> BaseException:
        """The error of rows that do not fit the declared schema."""
        return self._refuse(reason, rows, place)

    def apply(
        self, bins: Sequence[TimedBin], counts: Sequence[int], keys: Sequence[Any], columns: Sequence[Sequence[Any]]
    ) -> Made | tuple[Made, list[tuple[int, Made]]]:
        """Run the step over the rows of a block, or have them wait; see `StatefulCall.apply`."""
        out = _Out()
        start = 0
        for bin, count in zip(bins, counts, strict=True):
            bin.open()
            end = start + count
            mine, values = list(keys[start:end]), [list(column[start:end]) for column in columns]
            start = end
            if self._waits:
                bin.waiting.append((mine, values))
            else:
                began = time.perf_counter()
                try:
                    self._rows(bin, mine, values, None, out)
                except Uncopied as error:
                    raise self._uncopied(bin, error) from error.__cause__
                bin.spent_s += time.perf_counter() - began
        return self._parted(out)

    def end_epoch(
        self, bins: Sequence[TimedBin], before_us: int | None, after_us: int | None, clock_ms: int | None
    ) -> Made | tuple[Made, list[tuple[int, Made]]]:
        """Timers, states that expire, and the end; see the module for their order."""
        out = _Out()
        ended = after_us == _END_US and before_us != _END_US
        clock_us = None if clock_ms is None else clock_ms * 1_000
        for bin in bins:
            began = time.perf_counter()
            bin.open()
            try:
                self._end(bin, after_us, ended, clock_us, out)
            except Uncopied as error:
                raise self._uncopied(bin, error) from error.__cause__
            bin.spent_s += time.perf_counter() - began
        return self._parted(out)

    def _end(self, bin: TimedBin, after_us: int | None, ended: bool, clock_us: int | None, out: _Out) -> None:
        """The end of an epoch in one bin."""
        if self._ttl_us is not None and self._by_clock:
            if clock_us is not None:
                bin.expire(clock_us, self._ttl_us)
            waiting, bin.waiting = bin.waiting, []
            for keys, values in waiting:
                self._rows(bin, keys, values, clock_us, out)
        if self._on_timer is not None and after_us is not None:
            self._timers(bin, after_us, clock_us, out)
        if self._ttl_us is not None and not self._by_clock and after_us is not None and after_us != _END_US:
            bin.expire(after_us, self._ttl_us)
        if ended and self._at_end is not None:
            self._ends(bin, out)

    def _parted(self, out: _Out) -> Made | tuple[Made, list[tuple[int, Made]]]:
        out.whence = functools.partial(self._whence, out.marks, out.runs)
        return parted(out, self.sides, self._refuse) if self.sides else out

    def _whence(self, marks: Marks, runs: list[Any], place: int) -> Origin:
        _, func, keys, columns = runs[bisect.bisect_right(runs, place, key=operator.itemgetter(0)) - 1]
        at = marks.call_of(place)
        row = None if columns is None else dict(zip(self._names, (column[at] for column in columns), strict=True))
        return Origin(func, tuple(self._parts(keys[at])), row)

    def _rows(self, bin: TimedBin, keys: list[Any], columns: list[list[Any]], now_us: int | None, out: _Out) -> None:
        times = columns[-1] if self._timed else None
        columns = columns[:-1] if self._timed else columns
        rows = zip(*columns, strict=True) if columns else (() for _ in keys)
        step, stopped = self.func, self._stopped
        out.begin(step, keys, columns)
        for at, (key, values) in enumerate(zip(keys, rows, strict=True)):
            if times is not None:
                now_us = None if times[at] is None else self._event_us(bin, times[at], key, values)
                if now_us is not None and abs(now_us) > _LIMIT_US:
                    now_us = None  # as for the watermark: a state that had been used then would never be over
            self._call(bin, key, now_us, step, values, None, out, at)
            if stopped():
                raise BrokenOff

    def _event_us(self, bin: TimedBin, value: Any, key: Any, values: tuple[Any, ...]) -> int:
        """When a row is."""
        try:
            return to_us(value)
        except TypeError:
            # The least of nanoseconds is pandas' NaT.
            bin.taint()  # rows before it may have changed states
            row = dict(zip(self.keys, self._parts(key), strict=True)) | dict(zip(self._names, values, strict=True))
            shown = ", ".join(f"{name}={short(each)}" for name, each in row.items())
            raise SchemaError(
                f"{self.step}: event time {short(value)} in column {self.columns[-1]!r} is out of range: Python has no"
                f" such time\n  row: {shown}"
            ) from None

    def _timers(self, bin: TimedBin, limit_us: int, clock_us: int | None, out: _Out) -> None:
        assert self._on_timer is not None
        keys: list[Any] = []
        out.begin(self._on_timer, keys)
        while (found := bin.due(limit_us)) is not None:
            key = found[0]
            keys.append(key)
            state, used, timers = bin.states[key]
            bin.keep(key, bin.states[key])
            at_us, _, value = heapq.heappop(timers)
            bin.put(key, state, used, timers, self._ttl_us)
            time = self._time(at_us)
            now_us = clock_us if self._by_clock else at_us
            self._call(bin, key, now_us, self._on_timer, (time, value, *self._parts(key)), at_us, out, len(keys) - 1)
            bin.next_timer(key)
            if self._stopped():
                raise BrokenOff

    def _ends(self, bin: TimedBin, out: _Out) -> None:
        at_end = self._at_end
        assert at_end is not None
        ended = list(bin.states.items())
        out.begin(at_end, [key for key, _ in ended])
        for at, (key, entry) in enumerate(ended):
            bin.keep(key, entry)
            if entry[0] is not None:
                try:
                    self._take(at_end(entry[0], *self._parts(key)), out, at)
                except BaseException as error:
                    made = self._fault(bin, at_end, error, None, key)
                    raise made from behind(made, error)
            bin.put(key, None, None, [], None)
            if self._stopped():
                raise BrokenOff

    def _call(
        self,
        bin: TimedBin,
        key: Any,
        now_us: int | None,
        func: Callable[..., Any],
        arguments: tuple[Any, ...],
        least_us: int | None,
        out: _Out,
        call: int,
    ) -> None:
        """A call for a key, by its number: of a row, or of a timer at `least_us`, which sets none before that."""
        entry = bin.states.get(key)
        bin.keep(key, entry)
        state, used, timers = (None, None, []) if entry is None else entry
        ttl_us = self._ttl_us
        if ttl_us is not None and used is not None and now_us is not None and now_us - used >= ttl_us:
            state = used = None
        try:
            result = func(state, *arguments)
            if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
                raise TypeError(self._misreturned(result))
            new: list[tuple[int, Any]] = []
            if len(result) == 3:
                new = self._later(result[2], least_us)
            self._take(result[1], out, call)
        except BaseException as error:
            row = dict(zip(self._names, arguments, strict=True)) if least_us is None else None
            made = self._fault(bin, func, error, row, key)
            raise made from behind(made, error)
        state = result[0]
        if used is None or (now_us is not None and now_us > used):
            used = now_us
        if new:
            bin.set_timers(timers, new)
        bin.put(key, state, used if ttl_us is not None else None, timers, ttl_us)
        if new:
            bin.next_timer(key)

    def _later(self, later: Any, least_us: int | None) -> list[tuple[int, Any]]:
        """Timers as a function gives them."""
        if later is None:
            return []
        if self._on_timer is None:
            raise TypeError(f"the function sets {short(later)} for later, and the step has no on_timer")
        found = []
        # What else can be looked through, such as the keys of a dict, is no list of timers.
        for item in later if isinstance(later, list) else [later]:
            if not isinstance(item, tuple) or len(item) != 2:
                raise TypeError(f"{short(item)} is no timer: give (time, value), or a list of them")
            at_us = to_us(item[0])
            if not self._least_us <= at_us <= self._most_us:
                raise ValueError(f"the time {short(item[0])} of a timer is out of range")
            if least_us is not None and at_us < least_us:
                # Event time may show less of a time than there is: what `on_timer` was told is the timer's own time.
                if at_us < to_us(self._time(least_us)):
                    raise ValueError(f"a timer at {self._time(least_us)} set one before, at {short(item[0])}")
                at_us = least_us
            found.append((at_us, item[1]))
        return found

    def _misreturned(self, result: Any) -> str:
        if type(result) in UNRUN:
            return f"the function {unrun(result)}"
        return NOTHING if result is None else f"the function returned {short(result)}; it must be {self._returns}"

    def _take(self, made: Any, out: _Out, call: int) -> None:
        """Take what a call puts out, which has this number in its run."""
        if made is None:
            return
        own = self._own
        if type(made) is list:
            out.mark(~call if len(made) != 1 else call)
            out.extend(own.each(made))
            return
        if len(out) - call != out.ahead:
            out.mark(call)
        if type(made) is tuple:
            out.append(made if own.plain else own.one(made))
        elif isinstance(made, tuple):
            out.append(own.one(tuple(made)))
        elif self.sides and type(made) is Side:
            out.append(own.one(made))
        else:
            raise TypeError(f"the step put out {short(made)}; it must be None, a tuple (one row) or a list of tuples")

    def _time(self, at_us: int) -> Any:
        """A time as rows have it."""
        kind = self._time_type
        if kind is None or pa.types.is_integer(kind):
            return at_us // 1_000
        if kind.unit == "ns" and abs(at_us) < _NS_US:
            return pa.scalar(at_us * 1_000, kind).as_py()
        return pa.scalar(at_us, pa.timestamp("us", kind.tz)).as_py()

    def _parts(self, key: Any) -> tuple[Any, ...]:
        return (key,) if len(self.keys) == 1 else key

    def _fault(
        self, bin: TimedBin, func: Callable[..., Any], error: BaseException, row: dict[str, Any] | None, key: Any
    ) -> BaseException:
        bin.taint()
        if not isinstance(error, Exception):
            return error
        return self._failed(func, error, row, self._parts(key), self.keys, None, self._returns)

    def _uncopied(self, bin: TimedBin, error: Uncopied) -> BaseException:
        bin.taint()
        return uncopied(self.step, self._parts(error.key), error.__cause__)
