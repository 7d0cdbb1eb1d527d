"""What the queries do with blocks of rows: functions from batch to batch, and of the closed auctions of a key.

Prices are cents, all arithmetic is on integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

__all__ = [
    "average",
    "convert_currency",
    "last_of_ten",
    "last_ten",
    "named",
    "select_auctions",
    "select_category",
    "select_people",
    "so_far",
    "valid",
]

Batches = Callable[[pa.RecordBatch], pa.RecordBatch]


def convert_currency(bids: pa.RecordBatch) -> pa.RecordBatch:
    """Multiply prices by 89 / 100, rounding down (q1).

    Parameters
    ----------
    bids : pyarrow.RecordBatch
        With a column ``price`` of bigint.

    Returns
    -------
    pyarrow.RecordBatch
        The same columns.

    Examples
    --------
    >>> import pyarrow as pa
    >>> convert_currency(pa.record_batch({"price": [100, 101, -1]})).to_pydict()
    {'price': [89, 89, -1]}
    """
    place = bids.schema.get_field_index("price")
    price = _rounded_down(pc.multiply_checked(bids.column(place), 89), pa.scalar(100, pa.int64()))
    return bids.set_column(place, bids.schema.field(place), price)


def _rounded_down(number: pa.Array, by: pa.Array | pa.Scalar) -> pa.Array:
    """The quotient with something above 0: Arrow's own goes towards zero."""
    quotient = pc.divide(number, by)
    below = pc.less(number, pc.multiply(quotient, by))
    return pc.subtract(quotient, below.cast(pa.int64()))


def select_auctions(bids: pa.RecordBatch) -> pa.RecordBatch:
    """Keep bids on auctions whose number is a multiple of 123 (q2).

    Parameters
    ----------
    bids : pyarrow.RecordBatch
        With a column ``auction`` of bigint.

    Returns
    -------
    pyarrow.RecordBatch
        The same columns.

    Examples
    --------
    >>> import pyarrow as pa
    >>> select_auctions(pa.record_batch({"auction": [122, 123, 246]})).num_rows
    2
    """
    auction = bids.column("auction")
    return bids.filter(pc.equal(auction, pc.multiply(pc.divide(auction, 123), 123)))


def select_people(people: pa.RecordBatch) -> pa.RecordBatch:
    """Keep people of Oregon, Idaho and California, and call their id seller (q3).

    Parameters
    ----------
    people : pyarrow.RecordBatch
        With the columns id, name, city and state.

    Returns
    -------
    pyarrow.RecordBatch
        With the columns seller, name, city and state.

    Examples
    --------
    >>> import pyarrow as pa
    >>> rows = pa.record_batch({"id": [1, 2], "name": ["a", "b"], "city": ["c", "d"], "state": ["OR", "AZ"]})
    >>> select_people(rows).to_pylist()
    [{'seller': 1, 'name': 'a', 'city': 'c', 'state': 'OR'}]
    """
    found = people.filter(pc.is_in(people.column("state"), pa.array(["OR", "ID", "CA"])))
    return found.rename_columns(["seller", "name", "city", "state"])


def select_category(auctions: pa.RecordBatch) -> pa.RecordBatch:
    """Keep auctions of category 10 (q3).

    Parameters
    ----------
    auctions : pyarrow.RecordBatch
        With the columns id, seller and category.

    Returns
    -------
    pyarrow.RecordBatch
        With the columns id and seller.

    Examples
    --------
    >>> import pyarrow as pa
    >>> select_category(pa.record_batch({"id": [1, 2], "seller": [3, 4], "category": [10, 11]})).to_pylist()
    [{'id': 1, 'seller': 3}]
    """
    return auctions.filter(pc.equal(auctions.column("category"), 10)).select(["id", "seller"])


def named(**columns: str) -> Batches:
    """A function that gives columns in this order, by new names.

    Parameters
    ----------
    **columns : str
        Names of the columns as they are, by what they are to be called.

    Returns
    -------
    callable
        From a batch to a batch.

    Examples
    --------
    >>> import pyarrow as pa
    >>> named(auction="id")(pa.record_batch({"x": [0], "id": [1]})).to_pylist()
    [{'auction': 1}]
    """

    def named(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(list(columns.values())).rename_columns(list(columns))

    return named


def valid(*columns: str) -> Batches:
    """A function that keeps bids that reach the reserve of their auction, and these columns of them (closed auctions).

    Parameters
    ----------
    *columns : str
        Columns that are given on.

    Returns
    -------
    callable
        From a batch of bids, each with its auction, which was open, to a batch.

    Examples
    --------
    >>> import pyarrow as pa
    >>> rows = [{"auction": 7, "price": 5, "reserve": 5}, {"auction": 7, "price": 4, "reserve": 5}]
    >>> valid("auction", "price")(pa.RecordBatch.from_pylist(rows)).to_pylist()
    [{'auction': 7, 'price': 5}]
    """

    def valid(pairs: pa.RecordBatch) -> pa.RecordBatch:
        return pairs.select(columns).filter(pc.greater_equal(pairs.column("price"), pairs.column("reserve")))

    return valid


def average(sums: pa.RecordBatch) -> pa.RecordBatch:
    """Add the mean price, rounding down (q4).

    Parameters
    ----------
    sums : pyarrow.RecordBatch
        With the columns sum_price and n.

    Returns
    -------
    pyarrow.RecordBatch
        With a column avg_price more.

    Examples
    --------
    >>> import pyarrow as pa
    >>> average(pa.record_batch({"sum_price": [7, -7], "n": [2, 2]})).column("avg_price").to_pylist()
    [3, -4]
    """
    return sums.append_column("avg_price", _rounded_down(sums.column("sum_price"), sums.column("n")))


def so_far(key: tuple[int], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Running sum, number and mean of prices in the order in which auctions close (q4_stream).

    Parameters
    ----------
    key : tuple of int
        The category.
    frames : iterator of pandas.DataFrame
        All its closed auctions: expires, auction, category, price.
    state : GroupState
        Not used: they come once.

    Yields
    ------
    pandas.DataFrame
        The same rows with sum_price, n and avg_price.
    """
    rows = _in_order(frames)
    rows["sum_price"] = _running(rows.price)
    rows["n"] = range(1, len(rows) + 1)
    rows["avg_price"] = rows.sum_price // rows.n
    yield rows


def last_ten(key: tuple[int], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Number and mean of the last ten prices in the order in which auctions close (q6_stream).

    Parameters
    ----------
    key : tuple of int
        The seller.
    frames : iterator of pandas.DataFrame
        All its closed auctions: expires, auction, seller, price.
    state : GroupState
        Not used: they come once.

    Yields
    ------
    pandas.DataFrame
        The same rows with n and avg_price.
    """
    rows = _in_order(frames)
    rows["n"] = [min(at, 10) for at in range(1, len(rows) + 1)]
    prices = rows.price.tolist()
    rows["avg_price"] = [sum(prices[at - n : at]) // n for at, n in enumerate(rows.n.tolist(), start=1)]
    yield rows


def last_of_ten(key: tuple[int], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """The last row of `last_ten`, without the auction (q6).

    Parameters
    ----------
    key, frames, state
        As there.

    Yields
    ------
    pandas.DataFrame
        One row of seller, n and avg_price.
    """
    for rows in last_ten(key, frames, state):
        yield rows.tail(1)[["seller", "n", "avg_price"]]


def _running(prices: pd.Series) -> list[int]:
    """Sums so far; as in an aggregate it is an error that one leaves 64 bits."""
    sums: list[int] = list(itertools.accumulate(prices.tolist()))
    if wide := [number for number in sums if not -(2**63) <= number < 2**63]:
        raise OverflowError(f"a sum of prices is {wide[0]}, which bigint cannot hold")
    return sums


def _in_order(frames: Iterator[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat(frames).sort_values(["expires", "auction"], ignore_index=True)
