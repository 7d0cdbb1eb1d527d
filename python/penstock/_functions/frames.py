"""Many small pandas frames from one block, and one block from many small frames, at little cost for each.

Owns: grouping rows by key, cutting a table into one frame per group, and joining the frames that a function puts out.
A frame cut by pandas' own means costs 20 to 60 us, one built from a dict more; here the block is converted once and a
group's frame is a slice of its internal blocks. Where pandas looks inside otherwise than expected, the obvious way is
taken instead; `naive` names it, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Cutter", "Joiner", "group_rows", "joined", "nothing", "scalars"]

_TO_PANDAS: Final = {"date_as_object": True, "coerce_temporal_nanoseconds": True, "ignore_metadata": True}
#: Frames are joined when they have so many rows: many living frames are what makes the garbage collector slow.
_JOIN_ROWS: Final = 2_048
#: Rows of a batch that goes on.
_BATCH_ROWS: Final = 65_536


def group_rows(table: pa.Table, keys: Sequence[str]) -> tuple[Any, Any]:
    """Order the rows of a table by group.

    Parameters
    ----------
    table
        At least one row.
    keys
        Columns; null is a key, all NaN are one key and so are the two zeros.

    Returns
    -------
    order, starts : numpy.ndarray
        Row numbers, group after group, in their order within a group; and where in `order` each group starts.
    """
    codes: Any = None
    for name in keys:
        column = table.column(name)
        if pa.types.is_floating(column.type):
            zero = pa.scalar(0.0, column.type)
            column = pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), pc.add(column, zero))
        part, size = _codes(column)
        if codes is None:
            codes = part
        else:
            codes, _ = _codes(pa.array(codes * size + part))
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    changes = np.empty(len(ordered), bool)
    changes[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=changes[1:])
    return order, np.flatnonzero(changes)


def _codes(column: Any) -> tuple[Any, int]:
    """A number per distinct value, in order of appearance, and how many there are."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # older pyarrow keeps one chunk
            column = column.chunk(0)
    encoded = column.dictionary_encode("encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), max(1, len(encoded.dictionary))


def _localized(table: pa.Table, timezone: str) -> pa.Table:
    """Timestamps as Spark shows them to pandas: local time of the session, without a zone."""
    for place, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            column = table.column(place).cast(pa.timestamp(field.type.unit, timezone))
            table = table.set_column(place, field.name, pc.local_timestamp(column))
    return table


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    frame = table.to_pandas(maps_as_pydicts="strict", **_TO_PANDAS)
    # Users may write into their frames, and a column that came without a copy is read-only.
    return frame.copy() if len(frame.columns) and not all(_writable(frame)) else frame


def _writable(frame: pd.DataFrame) -> Iterable[bool]:
    for name in range(frame.shape[1]):
        values = frame.iloc[:, name].to_numpy(copy=False)
        yield bool(values.flags.writeable) or values.dtype == object


class Cutter:
    """Frames of the groups of a table whose rows lie group after group.

    Parameters
    ----------
    table
        The rows.
    timezone
        Zone in whose local time timestamps are shown.
    naive
        Take the obvious way.
    """

    def __init__(self, table: pa.Table, timezone: str, naive: bool = False) -> None:
        table = _localized(table, timezone)
        # Spark converts each group alone: a column is float in those groups only that hold a null.
        self._alone = any(
            column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type))
            for column in table.columns
        )
        self._table = table
        self._frame = _to_pandas(table) if not self._alone else None
        self._fast = None if naive or self._frame is None else _slicer(self._frame)
        self._indexes: dict[int, pd.RangeIndex] = {}

    def cut(self, start: int, stop: int) -> pd.DataFrame:
        """The frame of the rows ``start .. stop - 1``, with an index from 0."""
        if self._fast is not None:
            count = stop - start
            index = self._indexes.get(count)
            if index is None:
                index = self._indexes[count] = pd.RangeIndex(count)
            return self._fast(start, stop, index)
        if self._frame is not None:
            return self._frame.iloc[start:stop].reset_index(drop=True)
        return _to_pandas(self._table.slice(start, stop - start))


def nothing(columns: Sequence[str]) -> pd.DataFrame:
    """The frame of a key that has timed out: columns without rows."""
    return pd.DataFrame(columns=list(columns))


def _slicer(frame: pd.DataFrame) -> Callable[[int, int, pd.RangeIndex], pd.DataFrame] | None:
    """A function that cuts frames out of the manager of `frame`, when this pandas has what it needs."""
    try:
        manager = frame._mgr
        from_manager: Any = pd.DataFrame._from_mgr

        def cut(start: int, stop: int, index: pd.RangeIndex) -> pd.DataFrame:
            part = manager.get_slice(slice(start, stop), axis=1)
            part.axes[1] = index
            made: pd.DataFrame = from_manager(part, part.axes)
            return made

        stop = min(2, len(frame))
        tried = cut(0, stop, pd.RangeIndex(stop))
        pd.testing.assert_frame_equal(tried, frame.iloc[:stop].reset_index(drop=True))
    except Exception:
        return None
    return cut


def scalars(column: Any, timezone: str) -> list[Any]:
    """The values of a key column as Spark shows them in the key: NumPy scalars, timestamps, or objects."""
    name = "key"
    table = _localized(pa.table({name: column}), timezone)
    if column.null_count:
        # One by one, as each group is converted alone.
        return [None if v is None else scalars(pa.array([v], column.type), timezone)[0] for v in column.to_pylist()]
    series = table.to_pandas(**_TO_PANDAS)[name]
    values = series.to_numpy()
    return list(series) if values.dtype.kind in "OMm" else list(values)


class Joiner:
    """Joins the frames that a function puts out into batches.

    Parameters
    ----------
    schema
        Columns of the batches.
    timezone
        Zone of timestamps without one.
    """

    def __init__(self, schema: pa.Schema, timezone: str) -> None:
        self._schema = schema
        self._timezone = timezone
        self._frames: list[pd.DataFrame] = []
        self._rows = 0
        self._made: list[pa.RecordBatch] = []

    def add(self, frame: Any) -> None:
        """Take one frame.

        Raises
        ------
        TypeError
            When it is no frame, or has another number of columns.
        """
        if not isinstance(frame, pd.DataFrame):
            raise TypeError(f"the function yielded a {type(frame).__name__}; it must yield pandas DataFrames")
        rows, columns = frame.shape
        if columns != len(self._schema) and (columns or rows):
            names = ", ".join(map(str, frame.columns))
            raise TypeError(
                f"the function yielded a frame of {columns} columns ({names}); its schema has {len(self._schema)}"
                f" ({', '.join(self._schema.names)})"
            )
        if rows:
            self._frames.append(frame)
            self._rows += rows

    @property
    def full(self) -> bool:
        """Whether it is time to `flush`."""
        return self._rows >= _JOIN_ROWS

    def flush(self) -> None:
        """Join what was taken so far."""
        frames, self._frames, self._rows = self._frames, [], 0
        for names, columns in joined(frames):
            self._made.append(self._batch(names, columns))

    def take(self) -> list[pa.RecordBatch]:
        """Everything that was taken, in batches of some size."""
        self.flush()
        made, self._made = self._made, []
        whole = pa.Table.from_batches(made, self._schema).combine_chunks()
        batches: list[pa.RecordBatch] = whole.to_batches(max_chunksize=_BATCH_ROWS)
        return batches

    def _batch(self, names: tuple[Any, ...], columns: list[Any]) -> pa.RecordBatch:
        if any(isinstance(name, str) for name in names):
            missing = [name for name in self._schema.names if name not in names]
            if missing:
                there = ", ".join(map(str, names))
                raise TypeError(f"the function yielded a frame without the column {missing[0]!r}; it has {there}")
            columns = [columns[names.index(name)] for name in self._schema.names]
        arrays = [self._array(values, field) for values, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(self, values: Any, field: pa.Field) -> pa.Array:
        kind = field.type
        try:
            if pa.types.is_timestamp(kind) and kind.tz is not None:
                series = pd.Series(values)
                if getattr(series.dtype, "kind", "") == "M" and getattr(series.dtype, "tz", None) is None:
                    # As Spark does: an hour that is twice or never is shifted, not refused.
                    values = series.dt.tz_localize(self._timezone, ambiguous=False, nonexistent="shift_forward")
            try:
                array = pa.array(values, kind, from_pandas=True)
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                array = pa.array(values, from_pandas=True).cast(kind)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise TypeError(f"column {field.name!r} ({kind}) cannot hold what the function yielded: {error}") from error
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if array.null_count and not field.nullable:
            raise TypeError(f"column {field.name!r} is NOT NULL, and the function yielded a null")
        return array


def joined(frames: Sequence[pd.DataFrame], naive: bool = False) -> list[tuple[tuple[Any, ...], list[Any]]]:
    """Frames of equal columns joined: names, and the values of each column.

    Frames that differ in names or types come apart, in order of first appearance.
    """
    if not frames:
        return []
    if not naive:
        try:
            return _joined(frames)
        except Exception:
            pass  # pandas looks inside otherwise than expected
    groups: dict[Any, list[pd.DataFrame]] = {}
    for frame in frames:
        groups.setdefault((tuple(frame.columns), tuple(map(str, frame.dtypes))), []).append(frame)
    found = []
    for (names, _), several in groups.items():
        whole = pd.concat(several, ignore_index=True)
        found.append((names, [whole.iloc[:, place].array for place in range(len(names))]))
    return found


def _joined(frames: Sequence[pd.DataFrame]) -> list[tuple[tuple[Any, ...], list[Any]]]:
    groups: dict[Any, list[Any]] = {}
    for frame in frames:
        manager: Any = frame._mgr
        blocks = manager.blocks
        sign = (
            tuple(manager.axes[0].tolist()),
            tuple([(block.values.dtype, block.mgr_locs.as_array.tobytes()) for block in blocks]),
        )
        same = groups.get(sign)
        if same is None:
            groups[sign] = [blocks]
        else:
            same.append(blocks)
    found = []
    for (names, _), several in groups.items():
        columns: list[Any] = [None] * len(names)
        for place, block in enumerate(several[0]):
            parts = [blocks[place].values for blocks in several]
            locations = block.mgr_locs.as_array.tolist()
            if isinstance(parts[0], np.ndarray):
                values = np.concatenate(parts, axis=1)
                for row, location in enumerate(locations):
                    columns[location] = values[row]
            elif parts[0].ndim == 1:
                columns[locations[0]] = type(parts[0])._concat_same_type(parts)
            else:  # times: several columns in one array
                whole = type(parts[0])._concat_same_type(parts, axis=1)
                for row, location in enumerate(locations):
                    columns[location] = whole[row]
        found.append((names, columns))
    return found
