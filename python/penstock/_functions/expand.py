"""Flat maps of a flow: the user's iterators, drawn from on demand.

Owns the wrapping of a function that gives an iterable per input, and the loops that draw from it. Invariant: never
more is drawn than was asked for, and an iterator that raises is given up; what it gave before stays.

A draw lasts about as long as a person does not notice: then it gives what there is, be it nothing, and asks between
its inputs and rows whether the host is stopping. As in `loop` the clock is read the less often the faster they are.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import CoroutineType
from typing import Any

import pyarrow as pa

from penstock._coroutines import unawaited
from penstock._functions.loop import MOST_ROWS, SLOW_S, BrokenOff, behind
from penstock._functions.owned import Made, Origin, Owner, parted
from penstock._functions.rows import rows_of
from penstock._functions.short import short
from penstock._sides import Declared, Side, number_of
from penstock.errors import UserFunctionError

__all__ = ["BatchExpansion", "FlatMapCall", "RowExpansion"]

_log = logging.getLogger("penstock")
#: Failures of one call that are logged, where they are skipped; statistics count all.
_LOGGED = 10
#: Makes the error of a failure: what was raised, the row (where an input is one), the input as text, rows given before.
_Fail = Callable[[Exception, dict[str, Any] | None, str, int], UserFunctionError]
#: What was made, inputs that are left, the failure of one (its text, the rows that it had given, the error), and what
#: goes to side outputs, by their numbers.
_Drawn = tuple[list[Any], int, tuple[str | None, int, BaseException] | None, list[tuple[int, Any]]]


class FlatMapCall:
    """A function from a row or a batch to an iterable of rows or batches."""

    kind = "flat"

    def __init__(
        self,
        step: str,
        func: Callable[..., Any],
        columns: Sequence[str],
        schema: Any,
        rows: bool,
        user_error: Callable[..., UserFunctionError],
        misfit: Callable[..., UserFunctionError],
        declare: Callable[..., str],
        sides: Declared = (),
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sides = list(sides)
        self.step = step
        self.func = func
        self.columns = list(columns)
        self.schema = schema
        self.rows = rows
        self._user_error = user_error
        self._misfit = misfit
        self._declare = declare
        self._stopped = stopped
        self._pace = [1]
        self._own = Owner(schema, self.sides) if rows else None
        self._logged = 0

    def begin(self, data: Any, rows: int, skip: bool) -> RowExpansion | BatchExpansion:
        """Begin to expand a block: a list of columns, or a batch; `skip` says whether failures are left out."""
        fail = self._skipped if skip else self._failed
        if self._own is not None:
            part = self._apart if self.sides else _none_apart
            how = self._own, self._stopped, self._pace
            return RowExpansion(self.func, self.columns, data, rows, fail, part, *how)
        return BatchExpansion(self.func, pa.record_batch(data), fail, self.sides, self._stopped)

    def _apart(self, made: Made) -> tuple[Made, list[tuple[int, Made]]]:
        return parted(made, self.sides, self.refused)

    def refused(self, reason: str, rows: Made | None = None, place: int | None = None) -> UserFunctionError:
        """The error of rows that do not fit the declared schema."""
        return self._misfit(self.step, self.func, reason, rows, place)

    def refused_columns(self, reason: str, given: Any = None) -> UserFunctionError:
        """The error of a batch that does not have the declared schema, but another one."""
        return self._misfit(self.step, self.func, reason + self._declare("flat_map", given, self.schema))

    def _failed(self, error: Exception, row: dict[str, Any] | None, text: str, drawn: int) -> UserFunctionError:
        note = f"\n  input: {text}\n  rows that it had given before: {drawn}"
        return self._user_error(self.step, self.func, error, row, note=note)

    def _skipped(self, error: Exception, row: dict[str, Any] | None, text: str, drawn: int) -> UserFunctionError:
        failed = self._failed(error, row, text, drawn)
        self._logged += 1
        if self._logged <= _LOGGED:
            _log.warning("an input is left out: %s", failed)
        return failed


class RowExpansion:
    """The rows of a block, each through a function that gives tuples."""

    def __init__(
        self,
        func: Callable[..., Any],
        columns: Sequence[str],
        data: Sequence[Sequence[Any]],
        rows: int,
        fail: _Fail,
        part: Callable[[Made], tuple[Made, list[tuple[int, Made]]]],
        own: Owner,
        stopped: Callable[[], bool],
        pace: list[int],
    ) -> None:
        self._part = part
        self._own = own
        self._stopped = stopped
        #: How many inputs and rows come between two looks at the clock, kept from block to block.
        self._pace = pace
        self._func = func
        self._columns = columns
        self._data = data
        self._rows = rows
        self._inputs: Iterator[tuple[Any, ...]] = zip(*data, strict=True) if data else iter([()] * rows)
        #: Inputs that are left, one that has begun included.
        self.left = rows
        self._input: tuple[Any, ...] = ()
        self._live: Iterator[Any] | None = None
        self._drawn = 0
        self._fail = fail

    def draw(self, room: int) -> _Drawn:
        """Up to `room` tuples, those of side outputs included.

        Raises
        ------
        BrokenOff
            When the host is stopping.
        """
        made = Made()
        starts: list[int] = []
        first = self._rows - self.left
        failure = self._drawn_up_to(room, made, starts.append)
        made.whence = partial(self._whence, first, starts)
        rows, beside = self._part(made)
        return rows, self.left, failure, beside

    def _whence(self, first: int, starts: list[int], place: int) -> Origin:
        at = first + bisect.bisect_right(starts, place) - 1
        row = {name: values[at] for name, values in zip(self._columns, self._data, strict=True)}
        return Origin(self._func, row=row, note=f"\n  input: {short(row, most=200)}")

    def _drawn_up_to(
        self, room: int, made: Made, begin: Callable[[int], None]
    ) -> tuple[str | None, int, BaseException] | None:
        """Fill `made`; `begin` is told where in it each input begins."""
        own = None if self._own.plain else self._own
        began = then = time.perf_counter()
        due = pace = self._pace[0]
        if self._live is not None:
            begin(0)
        while self.left and len(made) < room:
            before = len(made)
            wanted = room - before
            if wanted > due:  # min would be a call per input
                wanted = due
            try:
                if self._live is None:
                    begin(before)
                    self._input, self._drawn = next(self._inputs), 0
                    self._live = _iterator(self._func(*self._input), "an iterable of rows (tuples)")
                given = islice(self._live, wanted)
                made.extend(given if own is None else own.each(given))
            except Exception as error:
                drawn = self._drawn + len(made) - before
                row = dict(zip(self._columns, self._input, strict=True))
                self._end()
                text = short(row, most=200)
                failed = self._fail(error, row, text, drawn)
                failed.__cause__ = behind(failed, error)
                return text, drawn, failed
            except BaseException as error:  # Ctrl-C, SystemExit: nobody's input is at fault
                self._end()
                return None, 0, error
            fresh = len(made) - before
            self._drawn += fresh
            if fresh < wanted:
                self._end()
            due -= fresh + 1
            if due > 0:
                continue
            now = time.perf_counter()
            if self._stopped():
                raise BrokenOff
            if now - then > SLOW_S:
                pace = 1
            elif pace < MOST_ROWS:
                pace += pace
            due, then, self._pace[0] = pace, now, pace
            if now - began > SLOW_S:
                break
        return None

    def _end(self) -> None:
        self._live = None
        self.left -= 1


class BatchExpansion:
    """One batch through a function that gives batches."""

    def __init__(
        self,
        func: Callable[..., Any],
        batch: pa.RecordBatch,
        fail: _Fail,
        sides: Declared = (),
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sides = sides
        self._stopped = stopped
        self._func = func
        self._batch: pa.RecordBatch | None = batch
        self._first = batch.slice(0, 1)
        self._rows = batch.num_rows
        #: 1 until all has come.
        self.left = 1
        self._live: Iterator[Any] | None = None
        self._drawn = 0
        self._fail = fail

    def draw(self, room: int) -> _Drawn:
        """The next batch, of any length, in a list, or for a side output; nothing when that was all, or when none that
        has rows has come for a while.

        Raises
        ------
        BrokenOff
            When the host is stopping.
        """
        del room
        began = time.perf_counter()
        try:
            if self._live is None:
                batch, self._batch = self._batch, None
                self._live = _iterator(self._func(batch), "an iterable of batches")
            for given in self._live:
                if type(given) is Side:
                    made = rows_of(given.rows, f"the function gave for side {given.name!r}")
                else:
                    made = rows_of(given, "the function gave")
                if len(made):
                    number = number_of(self._sides, given.name) if type(given) is Side else None
                    self._drawn += len(made)
                    return ([made], self.left, None, []) if number is None else ([], self.left, None, [(number, made)])
                if self._stopped():
                    break
                if time.perf_counter() - began > SLOW_S:
                    return [], self.left, None, []
        except Exception as error:
            self.left, self._live = 0, None
            text = f"a batch of {self._rows} rows, of which the first is {short(self._first.to_pylist()[0], most=200)}"
            # What functions of a row raise that get a batch.
            mistaken = isinstance(error, (TypeError, AttributeError))
            hint = "; the function gets whole batches: say rows=True for a call per row" if mistaken else ""
            failed = self._fail(error, None, text + hint, self._drawn)
            failed.__cause__ = behind(failed, error)
            return [], 0, (text, self._drawn, failed), []
        except BaseException as error:
            self.left, self._live = 0, None
            return [], 0, (None, 0, error), []
        self.left, self._live = 0, None
        if self._stopped():
            raise BrokenOff
        return [], 0, None, []


def _none_apart(made: Made) -> tuple[Made, list[tuple[int, Made]]]:
    return made, []


def _iterator(made: Any, wanted: str) -> Iterator[Any]:
    # A batch or a tuple is iterable as well, by columns and by values: not what is meant.
    if isinstance(made, (pa.RecordBatch, pa.Table, tuple, str, bytes, dict)):
        raise TypeError(f"the function returned {short(made)}, not {wanted}: yield it, or return a list of it")
    if type(made) is CoroutineType:
        raise TypeError(f"the function {unawaited(made)}")
    try:
        return iter(made)
    except TypeError:
        more = ": return an empty list where there are none" if made is None else ""
        raise TypeError(f"the function returned {short(made)}, not {wanted}{more}") from None
