"""Aggregates of a keyed flow.

Owns: the description of one output column of `Flow.agg`, nothing of its execution. The
native part keeps one flat state per key and aggregate; integers stay integers (a sum that
leaves 64 bits is an error, never a wrap), and nulls do not count except in ``count()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError

__all__ = ["Aggregate", "count", "max", "mean", "min", "sum"]


@dataclass(frozen=True)
class Aggregate:
    """One aggregate; made by `count`, `sum`, `min`, `max` or `mean`.

    Attributes
    ----------
    fn : str
        Name of the function in the plan.
    column : str or None
        The column that it reads; None counts rows.
    """

    fn: str
    column: str | None = None

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
        entry: dict[str, Any] = {"name": name, "fn": self.fn}
        if self.column is not None:
            entry["column"] = self.column
        return entry

    def __str__(self) -> str:
        return f"{self.fn}({self.column or ''})"


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
        bigint for integers, double for floating point.

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


def _column(column: str, fn: str) -> str:
    if not isinstance(column, str) or not column:
        raise ConfigError(f"{fn}({column!r}): give the name of a column, for example {fn}('price')")
    return column
