"""Aggregates of a keyed flow.

Owns: the description of one output column of `Flow.agg`, nothing of its execution. The
native part keeps one flat state per key and aggregate; integers stay integers (a sum that
leaves 64 bits, or of decimals 38 digits, is an error, never a wrap; of decimals also where it leaves 128 bits on its
way, 1.7e38, as its rows happen to come), and nulls do not count except in ``count()``.

Equal rows give equal values on every host and any number of workers: nothing depends on the order in which
rows come, but the last bits of float sums, means, variances and deviations. Where Spark SQL has the function,
values are Spark's; where not, the function says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from penstock.errors import ConfigError

__all__ = [
    "Aggregate",
    "approx_count_distinct",
    "approx_quantile",
    "count",
    "count_distinct",
    "first",
    "last",
    "max",
    "max_by",
    "mean",
    "min",
    "min_by",
    "stddev",
    "stddev_pop",
    "sum",
    "var_pop",
    "variance",
]


@dataclass(frozen=True)
class Aggregate:
    """One aggregate; made by `count`, `sum`, `max_by` and the like.

    Attributes
    ----------
    fn : str
        Name of the function in the plan.
    column : str or None
        The column that it reads; None counts rows.
    by : str or None
        The column by which a value is found.
    q : float or None
        The share of values at or below a quantile.
    error : float or None
        How far off an approximate value may be.
    """

    fn: str
    column: str | None = None
    by: str | None = None
    q: float | None = None
    error: float | None = None

    def to_plan(self, name: str) -> dict[str, Any]:
        """Return the entry of the plan's ``aggs`` list.

        Parameters
        ----------
        name : str
            The output column.

        Examples
        --------
        >>> sum("price").to_plan("total")
        {'name': 'total', 'fn': 'sum', 'column': 'price'}
        """
        options = {"column": self.column, "by": self.by, "q": self.q, "error": self.error}
        known = {option: value for option, value in options.items() if value is not None}
        return {"name": name, "fn": self.fn, **known}

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by is not None else ""
        q = f", {self.q}" if self.q is not None else ""
        error = f", error={self.error}" if self.error is not None else ""
        return f"{self.fn}({self.column or ''}{by}{q}{error})"


def count(column: str | None = None) -> Aggregate:
    """Count rows, or the values of a column that are not null.

    Parameters
    ----------
    column : str, optional
        The column whose values count; without it every row counts.

    Returns
    -------
    Aggregate
        A bigint column, never null.

    Examples
    --------
    >>> print(count())
    count()
    """
    return Aggregate("count", None if column is None else _column(column, "count"))


def sum(column: str) -> Aggregate:
    """Add up a column; null when a group has no value.

    Parameters
    ----------
    column : str
        A numeric column.

    Returns
    -------
    Aggregate
        bigint for integers (uint64 where they have no sign), double for floating point, decimal(38, s) for
        decimals of scale s. A sum that these cannot hold ends the run with `SchemaError`.

    Examples
    --------
    >>> print(sum("price"))
    sum(price)
    """
    return Aggregate("sum", _column(column, "sum"))


def min(column: str) -> Aggregate:
    """Keep the least value of a column; null when a group has no value.

    Parameters
    ----------
    column : str
        A column whose values have an order.

    Returns
    -------
    Aggregate
        A column of the same type.

    Examples
    --------
    >>> print(min("price"))
    min(price)
    """
    return Aggregate("min", _column(column, "min"))


def max(column: str) -> Aggregate:
    """Keep the greatest value of a column; null when a group has no value.

    Parameters
    ----------
    column : str
        A column whose values have an order.

    Returns
    -------
    Aggregate
        A column of the same type.

    Examples
    --------
    >>> print(max("price"))
    max(price)
    """
    return Aggregate("max", _column(column, "max"))


def mean(column: str) -> Aggregate:
    """Average a column; null when a group has no value.

    Parameters
    ----------
    column : str
        A numeric column.

    Returns
    -------
    Aggregate
        A double column.

    Examples
    --------
    >>> print(mean("price"))
    mean(price)
    """
    return Aggregate("mean", _column(column, "mean"))


def min_by(column: str, by: str) -> Aggregate:
    """Keep the value of a column in the row where another one is least.

    Parameters
    ----------
    column : str
        What is kept; it may be null there.
    by : str
        A column whose values have an order. Rows where it is null do not count. NaN is above
        all numbers, and -0.0 is 0.0.

    Returns
    -------
    Aggregate
        A column of the type of `column`; null when no row counts. Of several rows with the
        least value of `by` that with the least value of `column`, a null before all others: Spark
        takes any of them.

    Examples
    --------
    >>> print(min_by("auction", by="price"))
    min_by(auction by price)
    """
    return Aggregate("min_by", _column(column, "min_by"), _by(by, "min_by"))


def max_by(column: str, by: str) -> Aggregate:
    """Keep the value of a column in the row where another one is greatest.

    Parameters
    ----------
    column : str
        What is kept; it may be null there.
    by : str
        As of `min_by`.

    Returns
    -------
    Aggregate
        As of `min_by`; of several rows with the greatest value of `by` that with the greatest
        value of `column`, a null after all others.

    Examples
    --------
    >>> print(max_by("auction", by="price"))
    max_by(auction by price)
    """
    return Aggregate("max_by", _column(column, "max_by"), _by(by, "max_by"))


def first(column: str) -> Aggregate:
    """Keep the value of a column at the least event time.

    Parameters
    ----------
    column : str
        What is kept; it may be null there.

    Returns
    -------
    Aggregate
        ``min_by(column, by=<the event-time column>)``: of several rows of one time the least value. Spark's
        ``first`` goes by the order in which rows come instead.

    Examples
    --------
    >>> print(first("price"))
    first(price)
    """
    return Aggregate("first", _column(column, "first"))


def last(column: str) -> Aggregate:
    """Keep the value of a column at the greatest event time.

    Parameters
    ----------
    column : str
        What is kept; it may be null there.

    Returns
    -------
    Aggregate
        ``max_by(column, by=<the event-time column>)``: of several rows of one time the greatest value.
        Spark's ``last`` goes by the order in which rows come instead.

    Examples
    --------
    >>> print(last("price"))
    last(price)
    """
    return Aggregate("last", _column(column, "last"))


def variance(column: str) -> Aggregate:
    """Variance of a sample, which divides by one less than the values; Spark's ``var_samp``.

    Parameters
    ----------
    column : str
        A numeric column. Decimals count as the nearest double.

    Returns
    -------
    Aggregate
        A double column; null for fewer than two values, NaN where a value is NaN or infinite.

    Examples
    --------
    >>> print(variance("price"))
    variance(price)
    """
    return Aggregate("variance", _column(column, "variance"))


def var_pop(column: str) -> Aggregate:
    """Variance of all there is, which divides by the values; Spark's ``var_pop``.

    Parameters
    ----------
    column : str
        As of `variance`.

    Returns
    -------
    Aggregate
        A double column; null for no value, 0 for one.

    Examples
    --------
    >>> print(var_pop("price"))
    var_pop(price)
    """
    return Aggregate("var_pop", _column(column, "var_pop"))


def stddev(column: str) -> Aggregate:
    """Square root of `variance`; Spark's ``stddev`` and ``stddev_samp``.

    Parameters
    ----------
    column : str
        As of `variance`.

    Returns
    -------
    Aggregate
        As of `variance`.

    Examples
    --------
    >>> print(stddev("price"))
    stddev(price)
    """
    return Aggregate("stddev", _column(column, "stddev"))


def stddev_pop(column: str) -> Aggregate:
    """Square root of `var_pop`; Spark's ``stddev_pop``.

    Parameters
    ----------
    column : str
        As of `variance`.

    Returns
    -------
    Aggregate
        As of `var_pop`.

    Examples
    --------
    >>> print(stddev_pop("price"))
    stddev_pop(price)
    """
    return Aggregate("stddev_pop", _column(column, "stddev_pop"))


def count_distinct(column: str) -> Aggregate:
    """Count the distinct values of a column that are not null, exactly.

    Parameters
    ----------
    column : str
        A column of any type but unions and maps. -0.0 is 0.0, and all NaNs are one value.

    Returns
    -------
    Aggregate
        A bigint column, never null.

    Notes
    -----
    Each key (and open window) keeps its values: about 15 bytes each and what they are long. Where
    state is durable or moves, all values of a key that an epoch touched are written again. For keys with
    very many values take `approx_count_distinct`, or `Flow.distinct` and a count behind it, which
    writes only what is new.

    Examples
    --------
    >>> print(count_distinct("bidder"))
    count_distinct(bidder)
    """
    return Aggregate("count_distinct", _column(column, "count_distinct"))


def approx_count_distinct(column: str, *, error: float = 0.02) -> Aggregate:
    """Count the distinct values of a column that are not null, about.

    Parameters
    ----------
    column : str
        As of `count_distinct`.
    error : float, default 0.02
        The greatest standard error, relative to the count: two of three counts are off by less, and one of
        twenty by more than twice as much. From 0.0021 to 1.

    Returns
    -------
    Aggregate
        A bigint column, never null. It depends on the values alone, not on their order; Spark's
        function has another hash and other corrections, so its counts differ within the errors.

    Notes
    -----
    HyperLogLog, estimated as Ertl (2017). At most 4 KiB for each key (and open window) with an error of
    0.02, four times as much for half of it; less while there are few values.

    Examples
    --------
    >>> print(approx_count_distinct("bidder", error=0.05))
    approx_count_distinct(bidder, error=0.05)
    """
    error = _number(error, "approx_count_distinct error", 0.0021, 1, "such as 0.02")
    return Aggregate("approx_count_distinct", _column(column, "approx_count_distinct"), error=error)


def approx_quantile(column: str, q: float, *, error: float = 0.01) -> Aggregate:
    """Find the least value with a share `q` of all values at or below it, about.

    Parameters
    ----------
    column : str
        A numeric column. Decimals count as the nearest double. NaN is above all numbers.
    q : float
        The share, from 0 (the least value) to 1 (the greatest); 0.5 is the median.
    error : float, default 0.01
        How far off the value is at most, relative to itself: always, not mostly. From 0.00001 to 1. Numbers
        nearer to 0 than 2.3e-308 count as 0.

    Returns
    -------
    Aggregate
        A double column; null for no value. It depends on the values alone, not on their order. Spark's
        ``percentile_approx`` bounds the error of the share instead, and gives a value of the column.

    Notes
    -----
    A histogram like DDSketch's (Masson et al., 2019). For each key (and open window) 12 bytes for each bucket
    that has values; a power of two has ``0.5 / error`` buckets, so values from a cent to a million take at
    most 21 KiB with an error of 0.01.

    Examples
    --------
    >>> print(approx_quantile("price", 0.99))
    approx_quantile(price, 0.99, error=0.01)
    """
    q = _number(q, "approx_quantile q", 0, 1, "a share such as 0.5")
    error = _number(error, "approx_quantile error", 0.00001, 1, "such as 0.01")
    return Aggregate("approx_quantile", _column(column, "approx_quantile"), q=q, error=error)


def _by(by: str, fn: str) -> str:
    if not isinstance(by, str) or not by:
        raise ConfigError(f"{fn}(by={by!r}): give the name of a column, for example {fn}('auction', by='price')")
    return by


def _number(value: float, what: str, least: float, most: float, such: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value <= most:
        raise ConfigError(f"{what}={value!r}: give a number from {least} to {most}, {such}")
    return float(value)


def _column(column: str, fn: str) -> str:
    if not isinstance(column, str) or not column:
        raise ConfigError(f"{fn}({column!r}): give the name of a column, for example {fn}('price')")
    return column
