"""What users write to aggregate in a way of their own: `Aggregator`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Aggregator"]


class Aggregator(ABC):
    """Four methods that aggregate rows by key, of `Flow.aggregate`.

    A state is any Python object that can be pickled, such as a number, a list or an Arrow array. It stands for some
    rows of one key (and window).

    Notes
    -----
    What comes out must not depend on how rows are cut into blocks: filling a new state with rows and merging it into
    another gives what filling one with all of them gives. Then equal rows give equal results on every host and any
    number of workers.

    The methods may be called on several threads at once, each with states of its own; keep nothing in the object.

    Examples
    --------
    >>> import pyarrow as pa
    >>> import penstock as pk
    >>> class Range(pk.Aggregator):
    ...     def create(self):
    ...         return None
    ...     def accumulate(self, states, groups, rows):
    ...         found = pa.table({"group": groups, "v": rows["v"]}).group_by("group").aggregate([("v", "min_max")])
    ...         for group, ends in zip(found["group"].to_pylist(), found["v_min_max"].to_pylist()):
    ...             states[group] = ends["min"], ends["max"]
    ...     def merge(self, state, other):
    ...         return min(state[0], other[0]), max(state[1], other[1])
    ...     def finish(self, states):
    ...         return pa.table({"range": [high - low for low, high in states]})
    >>> rows = pa.table({"k": ["a", "b", "a"], "v": [3, 5, 10]})
    >>> flow = pk.Flow(rows.schema).key_by("k").aggregate(Range(), schema="range bigint")
    >>> sorted(row["range"] for row in flow.collect(rows).to_pylist())
    [0, 7]
    """

    @abstractmethod
    def create(self) -> Any:
        """Make the state of no rows."""

    @abstractmethod
    def accumulate(self, states: list[Any], groups: pa.Int64Array, rows: pa.RecordBatch) -> list[Any] | None:
        """Fill new states with the rows of a block.

        Parameters
        ----------
        states : list
            One per key (and window) that has rows here, as `create` makes them. To be changed, or replaced in the list.
        groups : pyarrow.Int64Array
            For each row the place of its state in the list: ascending, each at least once.
        rows : pyarrow.RecordBatch
            The rows, those of one state behind each other in their order.

        Returns
        -------
        list or None
            The states; None where those in the list are meant.
        """

    @abstractmethod
    def merge(self, state: Any, other: Any) -> Any:
        """Return the state of the rows of both; the first stands for earlier rows. Both may be changed for it."""

    @abstractmethod
    def finish(self, states: list[Any]) -> pa.RecordBatch | pa.Table:
        """Return one row per state, in their order, with the declared columns. The states must stay as they are."""
