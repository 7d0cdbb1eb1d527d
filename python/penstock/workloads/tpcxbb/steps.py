"""What the queries do to one row at a time: the steps of their pipelines.

Owns: sessions, baskets, carts, views before a purchase, counts, fits. A step is a picklable callable of parameters
only; everything that it remembers is the state that it is handed and hands back.

Invariant: a step of a key sees the rows of that key in the order of the stream, and says nothing that depends on rows
of other keys; so any parallel run of a pipeline gives what one serial pass gives.

Source: TPCx-BB Q1 to Q4 and Q15, after gpu-bdb's reading of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "Baskets",
    "CartTotal",
    "Carts",
    "Clicks",
    "Count",
    "CountPairs",
    "Fit",
    "Lines",
    "Others",
    "Ranked",
    "Sessions",
    "Sold",
    "Views",
    "pairs",
]

Row = tuple[Any, ...]


def _rows(batch: pa.RecordBatch, *columns: str) -> Iterator[Row]:
    return zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def _one_of(column: pa.Array, values: Iterable[int]) -> pa.Array:
    return pc.is_in(column, value_set=pa.array(sorted(values), pa.int64()))


@dataclass(frozen=True)
class Clicks:
    """From a batch of clicks to the rows (seq, user, time, value...) that have a user and all of `needed`.

    `without` names a column that must be null instead.
    """

    needed: tuple[str, ...]
    more: tuple[str, ...] = ()
    without: str | None = None

    def __call__(self, batch: pa.RecordBatch) -> list[Row]:
        keep = pc.is_valid(batch.column("wcs_user_sk"))
        for name in self.needed:
            keep = pc.and_(keep, pc.is_valid(batch.column(name)))
        if self.without is not None:
            keep = pc.and_(keep, pc.is_null(batch.column(self.without)))
        kept = batch.filter(keep)
        columns = ("seq", "wcs_user_sk", "wcs_click_date_sk", "wcs_click_time_sk", *self.needed, *self.more)
        return [(seq, user, day * 86_400 + time, *rest) for seq, user, day, time, *rest in _rows(kept, *columns)]


@dataclass(frozen=True)
class Sessions:
    """Number the sessions of a user (q2_sessions): (seq, user, time, item) to (seq, user, item, session)."""

    timeout_s: int

    def __call__(self, state: tuple[int, int] | None, row: Row) -> tuple[tuple[int, int], list[Row]]:
        seq, user, time, item = row
        session = 0
        if state is not None:
            last, session = state
            session += time - last > self.timeout_s
        return (time, session), [(seq, user, item, session)]


@dataclass(frozen=True)
class Baskets:
    """Gather the distinct items of each session of a user; give out those that hold `item` when they end (q2)."""

    timeout_s: int
    item: int

    def __call__(
        self, state: tuple[int, frozenset[int]] | None, row: Row
    ) -> tuple[tuple[int, frozenset[int]], list[frozenset[int]]]:
        _, _, time, item = row
        if state is None:
            return (time, frozenset((item,))), []
        last, items = state
        if time - last > self.timeout_s:
            return (time, frozenset((item,))), self.finish(0, state)
        return (time, items if item in items else items | {item}), []

    def finish(self, user: Any, state: tuple[int, frozenset[int]] | None) -> list[frozenset[int]]:
        """Give out the session that the end of the input ends."""
        return [] if state is None or self.item not in state[1] else [state[1]]


@dataclass(frozen=True)
class Others:
    """The items of a basket but one, ascending (q2)."""

    item: int

    def __call__(self, basket: frozenset[int]) -> list[int]:
        return sorted(basket - {self.item})


@dataclass(frozen=True)
class Views:
    """At each purchase of an item give out what its user looked at before (q3).

    From (seq, user, time, item, sale) to (purchase_seq, view_seq, item), in the order of both. The state is the
    user's last `most` clicks.
    """

    item: int
    most: int
    window_s: int
    among: frozenset[int]

    def __call__(self, state: tuple[Row, ...] | None, row: Row) -> tuple[tuple[Row, ...], list[Row]]:
        seq, _, time, item, sale = row
        seen = state or ()
        out: list[Row] = []
        if item == self.item and sale is not None:
            since = time - self.window_s
            out = [(seq, view, what) for view, when, what in seen if when >= since and what in self.among]
        return ((*seen, (seq, time, item))[-self.most :] if self.most else ()), out


@dataclass(frozen=True)
class Typed:
    """Join (seq, user, time, page) with the types of pages; a page that is unknown drops its row (q4)."""

    types: dict[int, str]

    def __call__(self, row: Row) -> list[Row]:
        seq, user, time, page = row
        kind = self.types.get(page)
        return [] if kind is None else [(seq, user, time, kind)]


@dataclass(frozen=True)
class Carts:
    """Give out a user's abandoned sessions as they end (q4): (user, session, pages, last_seq).

    The state is (time of the last click, session, clicks in it, last seq, whether the last click on a page of type
    dynamic or order was dynamic).
    """

    timeout_s: int

    def __call__(self, state: tuple[int, int, int, int, bool] | None, row: Row) -> tuple[Row, list[Row]]:
        seq, user, time, kind = row
        out: list[Row] = []
        session, pages, dynamic = 0, 0, False
        if state is not None:
            last, session, pages, _, dynamic = state
            if time - last > self.timeout_s:
                out = self.finish(user, state)
                session, pages, dynamic = session + 1, 0, False
        if kind in ("dynamic", "order"):
            dynamic = kind == "dynamic"
        return (time, session, pages + 1, seq, dynamic), out

    def finish(self, user: int, state: tuple[int, int, int, int, bool] | None) -> list[Row]:
        """Give out the session that the end of the input ends."""
        if state is None or not state[4]:
            return []
        _, session, pages, seq, _ = state
        return [(user, session, pages, seq)]


class CartTotal:
    """Sum the abandoned carts up (q4): one row (pages, sessions, avg_pages); without carts only the 0 is known."""

    def __call__(self, state: tuple[int, int] | None, cart: Row) -> tuple[tuple[int, int], list[Row]]:
        pages, sessions = state or (0, 0)
        return (pages + cart[2], sessions + 1), []

    def finish(self, state: tuple[int, int] | None) -> list[Row]:
        """Give out the row."""
        pages, sessions = state or (0, 0)
        return [(pages, sessions, pages / sessions) if sessions else (None, 0, None)]


@dataclass(frozen=True)
class Lines:
    """From a batch of sales to the rows (ticket, item) of some stores and items (q1)."""

    stores: frozenset[int]
    items: frozenset[int]

    def __call__(self, batch: pa.RecordBatch) -> list[Row]:
        keep = pc.and_(
            _one_of(batch.column("ss_store_sk"), self.stores), _one_of(batch.column("ss_item_sk"), self.items)
        )
        return list(_rows(batch.filter(keep), "ss_ticket_number", "ss_item_sk"))


class Tickets:
    """Gather the adjacent lines of a ticket; give out its distinct items, ascending, when the next one begins (q1)."""

    def __call__(
        self, state: tuple[int, tuple[int, ...]] | None, row: Row
    ) -> tuple[tuple[int, tuple[int, ...]], list[Row]]:
        ticket, item = row
        if state is None:
            return (ticket, (item,)), []
        if state[0] != ticket:
            return (ticket, (item,)), self.finish(state)
        return (ticket, (*state[1], item)), []

    def finish(self, state: tuple[int, tuple[int, ...]] | None) -> list[Row]:
        """Give out the ticket that the end of the input ends."""
        return [] if state is None else [tuple(sorted(set(state[1])))]


def pairs(items: Row) -> list[Row]:
    """All pairs of ascending items.

    Examples
    --------
    >>> pairs((1, 2, 5))
    [(1, 2), (1, 5), (2, 5)]
    """
    return list(itertools.combinations(items, 2))


class CountPairs:
    """Count the second items of a first one (q1); at the end (item_sk_1, item_sk_2, cnt)."""

    def __call__(self, state: dict[int, int] | None, pair: Row) -> tuple[dict[int, int], list[Row]]:
        counts = {} if state is None else state
        counts[pair[1]] = counts.get(pair[1], 0) + 1
        return counts, []

    def finish(self, first: int, counts: dict[int, int]) -> list[Row]:
        """Give out what was counted."""
        return [(first, second, count) for second, count in counts.items()]


@dataclass(frozen=True)
class Count:
    """Count items (q2, q3); at the end a row of the item, `fixed` and the count, in the places that `order` tells."""

    fixed: int
    order: tuple[int, int, int]

    def __call__(self, state: int | None, item: Any) -> tuple[int, list[Row]]:
        return (state or 0) + 1, []

    def finish(self, item: int, count: int) -> list[Row]:
        """Give out what was counted."""
        values = (item, self.fixed, count)
        return [tuple(values[place] for place in self.order)]


@dataclass(frozen=True)
class Ranked:
    """Keep the first rows of an order and give them out at the end.

    Attributes
    ----------
    by : tuple of int
        Places of the columns that order, the most important first; negative, ``-1 - place``, descends.
    limit : int or None
        How many; None for all.
    above : tuple of int, int or None
        Only rows whose column at the first is greater than the second.
    """

    by: tuple[int, ...]
    limit: int | None = None
    above: tuple[int, int] | None = None

    def __call__(self, state: list[Row] | None, row: Row) -> tuple[list[Row], list[Row]]:
        kept = [] if state is None else state
        if self.above is None or row[self.above[0]] > self.above[1]:
            kept.append(row)
            if self.limit is not None and len(kept) >= 4 * self.limit + 64:
                kept = self._first(kept)
        return kept, []

    def finish(self, state: list[Row] | None) -> list[Row]:
        """Give out the rows in their order."""
        return self._first(state or [])

    def _first(self, rows: list[Row]) -> list[Row]:
        def order(row: Row) -> tuple[Any, ...]:
            return tuple(row[place] if place >= 0 else -row[-1 - place] for place in self.by)

        return sorted(rows, key=order)[: self.limit]


@dataclass(frozen=True)
class Sold:
    """From a batch of sales to the rows (category, day, cents) of a store and some days (q15)."""

    store: int
    start: int
    end: int
    categories: dict[int, int]

    def __call__(self, batch: pa.RecordBatch) -> list[Row]:
        day = batch.column("ss_sold_date_sk")
        keep = pc.and_(
            pc.equal(batch.column("ss_store_sk"), self.store),
            pc.and_(pc.greater_equal(day, self.start), pc.less_equal(day, self.end)),
        )
        sold = _rows(batch.filter(keep), "ss_item_sk", "ss_sold_date_sk", "ss_net_paid_cents")
        find = self.categories.get
        return [(category, day, cents) for item, day, cents in sold if (category := find(item)) is not None]


class Fit:
    """Sum the days of a category, and at the end fit a line through them by least squares (q15).

    The sums and the fit are exact, whatever their size; only what is given out is rounded, once.
    """

    def __call__(self, state: dict[int, int] | None, row: Row) -> tuple[dict[int, int], list[Row]]:
        days = {} if state is None else state
        days[row[1]] = days.get(row[1], 0) + row[2]
        return days, []

    def finish(self, category: int, days: dict[int, int]) -> list[Row]:
        """Give out (cat, n, sx, sy, sxy, sxx, slope, intercept); nothing for fewer than two days."""
        n = len(days)
        if n < 2:
            return []
        sx, sy = sum(days), sum(days.values())
        sxy, sxx = sum(x * y for x, y in days.items()), sum(x * x for x in days)
        # Not 0: the days are distinct and at least two.
        below = (n * sxx - sx * sx) * 100
        slope, intercept = Fraction(n * sxy - sx * sy, below), Fraction(sxx * sy - sx * sxy, below)
        return [(category, n, sx, sy, sxy, sxx, float(slope), float(intercept))]


def falling(row: Row) -> bool:
    """Whether a category does not grow (q15).

    Examples
    --------
    >>> falling((1, 2, 3, 4, 5, 6, -0.5, 9.0)), falling((1, 2, 3, 4, 5, 6, 0.0, 9.0))
    (True, True)
    """
    return bool(row[6] <= 0)


def line_of(row: Row) -> Row:
    """(cat, slope, intercept) of a fit (q15).

    Examples
    --------
    >>> line_of((1, 2, 3, 4, 5, 6, -0.5, 9.0))
    (1, -0.5, 9.0)
    """
    return (row[0], row[6], row[7])
