"""Many small pandas frames from one block, and one block from many small frames, at little cost for each.

Owns: grouping rows by key, cutting a table into one frame per group, and joining the frames that a function puts out,
each as it is when it is put out (`Held`). A frame cut by pandas' own means costs 20 to 60 us, one built from a dict
more, one copied 10 to 20; here the block is converted once and a group's frame is a slice of its internal blocks, and
of a frame that comes only these are copied. Where pandas looks inside otherwise than expected, the obvious way is taken
instead; `naive` names it, and tests compare the two.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock._extras import how_to_install
from penstock._functions.columns import groupable
from penstock._functions.owned import of_numpy
from penstock._functions.state import ATOMIC
from penstock._layouts import as_lists, relaid
from penstock._sides import Declared, Side, number_of
from penstock._views import rows_at
from penstock._wholes import first_cut, is_array
from penstock.errors import ConfigError

try:
    import numpy as np
    import pandas as pd  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "pandas"):
        raise
    raise ConfigError(
        f"apply_in_pandas_with_state needs {error.name}, which is not installed here: {how_to_install('spark')}"
    ) from error

__all__ = ["Cutter", "Held", "Joiner", "group_rows", "held", "joined", "nothing", "scalars"]

_TO_PANDAS: Final = {"date_as_object": True, "coerce_temporal_nanoseconds": True, "ignore_metadata": True}
#: Types of values in a frame that cannot change.
_FIXED: Final = ATOMIC | {pd.Timestamp, pd.Timedelta, type(pd.NaT), type(pd.NA), np.bool_, np.float64, np.int64}
#: What another list is as good as.
_LISTS: Final[tuple[Any, ...]] = (list, set, deque, type({}.values()))
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
        part, size = _codes(groupable(table.column(name)))
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


def _to_pandas(table: pa.Table, timezone: str) -> pd.DataFrame:
    nested = [place for place, field in enumerate(table.schema) if pa.types.is_nested(field.type)]
    plain = table
    for place in nested:
        # One that takes its place, so that the frame has all columns in order.
        plain = plain.set_column(place, table.schema.names[place], pa.nulls(table.num_rows))
    frame = plain.to_pandas(**_TO_PANDAS)
    for place in nested:
        column = table.column(place)
        # Integers beside nulls stay integers there, as in Spark.
        series = column.to_pandas(maps_as_pydicts="strict", integer_object_nulls=True, **_TO_PANDAS)
        show = _shower(column.type, timezone)
        frame.isetitem(place, series if show is None else pd.Series([show(v) for v in series], dtype=object))
    # Users may write into their frames, and a column that came without a copy is read-only.
    return frame.copy() if len(frame.columns) and not all(_writable(frame)) else frame


def _is_whole(kind: pa.DataType) -> bool:
    """Whether a column of this type is of another one in pandas where it has a null."""
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _filled(table: pa.Table) -> tuple[pa.Table, Any]:
    """A table without null integers and booleans, those in nested columns aside; and how many rows before each row, and
    in all, have such a null. None where none has."""
    rows: Any = None
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if column.null_count and _is_whole(column.type):
            nulls = column.is_null().to_numpy()
            rows = nulls if rows is None else rows | nulls
            filled = pc.fill_null(column, False if pa.types.is_boolean(column.type) else 0)
            table = table.set_column(place, name, filled)
    return table, None if rows is None else np.concatenate(([0], np.cumsum(rows)))


def _has_null_integers(array: pa.Array) -> bool:
    """Whether an integer or boolean is null, at any depth."""
    kind = array.type
    if _is_whole(kind):
        return bool(array.null_count)
    if pa.types.is_struct(kind):
        return any(map(_has_null_integers, array.flatten()))
    if pa.types.is_map(kind):
        return _has_null_integers(array.keys) or _has_null_integers(array.items)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _has_null_integers(array.flatten())
    return False


_Turn = Callable[[Any], Any]


def _nested(
    kind: pa.DataType, turn: Callable[[pa.DataType], _Turn | None], lists: _Turn, named: bool = False
) -> _Turn | None:
    """Turns the leaves of nested values; None where no leaf is to be turned. `lists` makes what a list becomes; with
    `named` structs by place become structs by name."""
    if pa.types.is_struct(kind):
        turns = {field.name: one for field in kind if (one := _nested(field.type, turn, lists, named)) is not None}
        names = [field.name for field in kind]

        def struct(value: Any) -> Any:
            if _absent(value):
                return None
            known = value if isinstance(value, dict) else dict(zip(names, value, strict=False))
            return {name: turns[name](v) if name in turns else v for name, v in known.items()}

        return struct if turns or named else None
    if pa.types.is_map(kind):
        keys, items = (_nested(part, turn, lists, named) for part in (kind.key_type, kind.item_type))

        def pairs(value: Any) -> Any:
            if _absent(value):
                return None
            known = map(_entry, value.items() if isinstance(value, dict) else value)
            made = [(keys(k) if keys else k, items(v) if items else v) for k, v in known]
            return made if named else dict(made)

        # At an entry that is none pyarrow ends the process.
        return pairs if keys or items or named else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _nested(kind.value_type, turn, lists, named)
        return None if inner is None else lambda value: None if _absent(value) else lists([inner(v) for v in value])
    return turn(kind)


def _entry(entry: Any) -> Any:
    """Key and value of an entry of a map, in the two forms that pyarrow takes."""
    if isinstance(entry, dict):
        return entry["key"], entry["value"]
    if isinstance(entry, (tuple, list)) and len(entry) == 2:
        return entry
    raise TypeError(f"a map has {entry!r} in place of an entry, which is (key, value)")


def _objects(values: list[Any]) -> Any:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def _shower(kind: pa.DataType, timezone: str) -> _Turn | None:
    """Timestamps in values of nested columns as Spark shows them; None where there are none."""

    def turn(leaf: pa.DataType) -> _Turn | None:
        if not pa.types.is_timestamp(leaf):
            return None
        if leaf.tz is None:
            return lambda value: None if value is None else pd.Timestamp(value)

        def show(value: Any) -> Any:
            if value is None:
                return None
            stamp = pd.Timestamp(value)
            return (stamp if stamp.tz is not None else stamp.tz_localize("UTC")).tz_convert(timezone).tz_localize(None)

        return show

    return _nested(kind, turn, _objects)


def _own_unit(leaf: Any) -> _Turn:
    unit = "D" if pa.types.is_date(leaf) else leaf.unit

    def take(value: Any) -> Any:
        if value is None or value is pd.NaT:
            return None
        # pyarrow wants them in its unit; pandas has nanoseconds, which Spark cuts as well.
        if isinstance(value, (np.datetime64, np.timedelta64)):
            return value.astype(f"{value.dtype.char}8[{unit}]").item()
        return value

    return take


def _taker(kind: pa.DataType, timezone: str) -> _Turn | None:
    """The way back: timestamps without a zone are of that zone, and structs may be rows, as those of a state are. Times
    within come one by one: of an array of numpy's only the numbers would be taken."""
    nested = pa.types.is_nested(kind)

    def turn(leaf: pa.DataType) -> _Turn | None:
        if not pa.types.is_timestamp(leaf) or leaf.tz is None:
            return _own_unit(leaf) if nested and pa.types.is_temporal(leaf) else None

        def take(value: Any) -> Any:
            if value is None or value is pd.NaT:
                return None
            stamp = pd.Timestamp(value)
            # As Spark does: an hour that is twice or never is shifted, not refused.
            zoned = stamp.tz is not None
            return stamp if zoned else stamp.tz_localize(timezone, ambiguous=False, nonexistent="shift_forward")

        return take

    return _nested(kind, turn, list, named=True)


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
        # A slice of list views pandas shows as nulls.
        table = _localized(_in_lists(table), timezone)
        # Spark converts each group alone: a column is float in those groups only that hold a null.
        whole, self._nulls = _filled(table)
        alone = any(_has_null_integers(chunk) for column in whole.columns for chunk in column.chunks)
        self._table, self._timezone = table, timezone
        self._frame = _to_pandas(whole, timezone) if not alone else None
        self._fast = None if naive or self._frame is None else _slicer(self._frame)
        self._indexes: dict[int, pd.RangeIndex] = {}

    def cut(self, start: int, stop: int) -> pd.DataFrame:
        """The frame of the rows ``start .. stop - 1``, with an index from 0."""
        if self._frame is None or (self._nulls is not None and self._nulls[start] != self._nulls[stop]):
            return _to_pandas(self._table.slice(start, stop - start), self._timezone)
        if self._fast is not None:
            count = stop - start
            index = self._indexes.get(count)
            if index is None:
                index = self._indexes[count] = pd.RangeIndex(count)
            return self._fast(start, stop, index)
        return self._frame.iloc[start:stop].reset_index(drop=True)


def _in_lists(table: pa.Table) -> pa.Table:
    """The same rows with lists in place of list views."""
    kinds = [as_lists(kind) for kind in table.schema.types]
    if kinds == table.schema.types:
        return table
    columns = [
        column if column.type == kind else pa.chunked_array([relaid(chunk, kind) for chunk in column.chunks], kind)
        for column, kind in zip(table.columns, kinds, strict=True)
    ]
    return pa.table(columns, names=table.column_names)


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
    if column.null_count and len(column) > 1:
        # Null alone, as each group is converted alone: a null number is NaN then, a null text None, and the others of
        # the column are what they are without one.
        there = column.is_valid()
        valid = rows_at(pa.table({name: column}), pc.indices_nonzero(there))[name]
        null = scalars(column.slice(pc.index(there, False).as_py(), 1), timezone)[0]
        others = iter(scalars(valid, timezone))
        return [next(others) if is_there else null for is_there in there.to_pylist()]
    series = _localized(pa.table({name: column}), timezone).to_pandas(**_TO_PANDAS)[name]
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
    sides
        Side outputs, to which the function may give frames, too.
    """

    def __init__(self, schema: pa.Schema, timezone: str, sides: Declared = ()) -> None:
        self._schema = schema
        self._columns = len(schema)
        self._timezone = timezone
        self._declared = sides
        self._sides = [Joiner(columns, timezone) for _, columns in sides]
        self._frames: list[Held | pa.RecordBatch] = []
        self._rows = 0
        self._made: list[pa.RecordBatch] = []

    def add(self, frame: Any) -> None:
        """Take one frame, as it is now.

        Raises
        ------
        TypeError
            When it is no frame, has another number of columns, or is of a side output that is not declared.
        """
        if type(frame) is Side:
            self._sides[number_of(self._declared, frame.name)].add(frame.rows)
            return
        if not isinstance(frame, pd.DataFrame):
            raise TypeError(f"the function yielded a {type(frame).__name__}; it must yield pandas DataFrames")
        taken = held(frame)
        names, rows = taken.sign[0], taken.rows
        if len(names) != self._columns and (names or rows):
            raise TypeError(
                f"the function yielded a frame of {len(names)} columns ({', '.join(map(str, names))}); its schema has"
                f" {self._columns} ({', '.join(self._schema.names)})"
            )
        if rows:
            self._frames.append(taken if rows < _JOIN_ROWS else self._joined([taken])[0])
            self._rows += rows

    @property
    def full(self) -> bool:
        """Whether it is time to `flush`."""
        return self._rows >= _JOIN_ROWS or any(side.full for side in self._sides)

    def flush(self) -> None:
        """Join what was taken so far."""
        frames, self._frames, self._rows = self._frames, [], 0
        for kind, run in itertools.groupby(frames, type):
            some: list[Any] = list(run)
            self._made += self._joined(some) if kind is Held else some
        for side in self._sides:
            side.flush()

    def _joined(self, frames: list[Held]) -> list[pa.RecordBatch]:
        groups = [(self._batch(names, columns), places) for names, columns, places in joined(frames)]
        return [groups[0][0]] if len(groups) == 1 else list(_in_order(groups, frames))

    def take_sides(self) -> list[tuple[int, pa.RecordBatch]]:
        """What went to side outputs, by their numbers."""
        return [(number, batch) for number, side in enumerate(self._sides) for batch in side.take()]

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
        kind = as_lists(field.type)
        try:
            if pa.types.is_timestamp(kind) and kind.tz is not None:
                series = pd.Series(values)
                if getattr(series.dtype, "kind", "") == "M" and getattr(series.dtype, "tz", None) is None:
                    # As Spark does: an hour that is twice or never is shifted, not refused.
                    values = series.dt.tz_localize(self._timezone, ambiguous=False, nonexistent="shift_forward")
            elif (take := _taker(kind, self._timezone)) is not None:
                values = [None if _absent(v) else take(v) for v in values]
            elif pa.types.is_nested(kind) and hasattr(kind, "value_type"):
                values = [_of_numpy(kind, v) if is_array(type(v)) else v for v in values]
            try:
                array = pa.array(values, kind, from_pandas=True)
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                array = pa.array(values, from_pandas=True)
                # Pandas has nanoseconds, as of a mean of times; Spark cuts them as well.
                array = array.cast(kind, safe=not _is_coarser(kind, array.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise TypeError(f"column {field.name!r} ({kind}) cannot hold what the function yielded: {error}") from error
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if array.null_count and not field.nullable:
            raise TypeError(f"column {field.name!r} is NOT NULL, and the function yielded a null")
        return relaid(array, field.type)


def _of_numpy(kind: pa.DataType, value: Any) -> Any:
    """An array for a list whose values are no times: what pyarrow takes, or what says the same to it."""
    if value.dtype.kind in "mM":
        if (found := first_cut(kind, [value])) is not None:
            raise TypeError(f"it {found[1]}")
        return value
    return of_numpy(kind, value) if value.dtype.kind == "u" or hasattr(value, "mask") else value


def _absent(value: Any) -> bool:
    return value is None or value is pd.NaT or value is pd.NA or (isinstance(value, float) and value != value)


def _is_coarser(kind: pa.DataType, than: pa.DataType) -> bool:
    """Whether two types of time are of one sort, and differ in that one has larger units."""
    for sort in (pa.types.is_timestamp, pa.types.is_duration):
        if sort(kind) and sort(than):
            return ["s", "ms", "us", "ns"].index(kind.unit) < ["s", "ms", "us", "ns"].index(than.unit)
    return False


def _in_order(
    groups: Sequence[tuple[pa.RecordBatch, Sequence[int]]], frames: Sequence[Held]
) -> Iterator[pa.RecordBatch]:
    """The rows of frames that were joined in several groups, cut so that they stand in the order of the frames."""
    batch_of: list[Any] = [None] * len(frames)
    for batch, places in groups:
        for place in places:
            batch_of[place] = batch
    taken = {id(batch): 0 for batch, _ in groups}
    # Whoever joins frames has the batches: their ids stay theirs.
    for _, run in itertools.groupby(range(len(frames)), lambda place: id(batch_of[place])):
        places = list(run)
        batch, rows = batch_of[places[0]], sum(frames[place].rows for place in places)
        start = taken[id(batch)]
        taken[id(batch)] = start + rows
        yield batch.slice(start, rows)


class Held(NamedTuple):
    """What a frame held when it was taken."""

    #: Names of its columns; of each block of values its type, and as bytes which columns they are. Frames join where it
    #: is equal.
    sign: tuple[tuple[Any, ...], tuple[tuple[Any, bytes], ...]]
    blocks: list[Any]
    rows: int


def held(frame: pd.DataFrame, naive: bool = False) -> Held:
    """Copies of what a frame holds: it may be filled again, or changed, before it is joined. Of one with many rows the
    objects stay those of the frame, for who uses them at once: to look through all of them costs as much as that."""
    if not naive:
        try:
            manager: Any = frame._mgr
            names, index = manager.axes
            rows = len(index)
            kinds, blocks = [], []
            for block in manager.blocks:
                values = block.values
                kinds.append((values.dtype, block.mgr_locs.as_array.tobytes()))
                blocks.append(_copied(values, rows))
            return Held((tuple(names.tolist()), tuple(kinds)), blocks, rows)
        except Exception:
            pass  # pandas looks inside otherwise than expected
    arrays = [frame.iloc[:, place].array for place in range(frame.shape[1])]
    kinds = [(array.dtype, np.intp(place).tobytes()) for place, array in enumerate(arrays)]
    arrays = [array.to_numpy() if isinstance(array, pd.arrays.NumpyExtensionArray) else array for array in arrays]
    blocks = [_copied(array, len(frame)) for array in arrays]
    return Held((tuple(frame.columns), tuple(kinds)), blocks, len(frame))


def _copied(values: Any, rows: int) -> Any:
    """An array that stays as it is, also where a list or the like in it changes."""
    if type(values) is not np.ndarray or not values.dtype.hasobject:
        return values.copy()
    if rows >= _JOIN_ROWS:
        return values
    if values.size == 1:  # as most frames have it
        value = values.item()
        if type(value) in _FIXED:
            return values.copy()
        cells = [value]
    else:
        cells = values.ravel().tolist()
        if _FIXED.issuperset(map(type, cells)):
            return values.copy()
    made = np.empty(len(cells), object)
    for place, value in enumerate(cells):
        made[place] = _cell(value)
    return made.reshape(values.shape)


def _cell(value: Any) -> Any:
    """A value of a column as it is now; a list in place of what pyarrow takes for one."""
    kind = type(value)
    if kind in _FIXED:
        return value
    if isinstance(value, dict):
        return {name: _cell(item) for name, item in value.items()}
    if isinstance(value, _LISTS):
        items = list(value)
        return items if ATOMIC.issuperset(map(type, items)) else list(map(_cell, items))
    if isinstance(value, tuple):
        return tuple(map(_cell, value))
    if kind is np.ndarray and value.ndim and value.dtype == object:
        return _copied(value, 0)
    if isinstance(value, (np.ndarray, pd.Series, pd.Index, pd.api.extensions.ExtensionArray)):
        return value.copy()
    return bytes(value) if kind in (bytearray, memoryview) else value


def joined(frames: Sequence[Held]) -> list[tuple[tuple[Any, ...], list[Any], list[int]]]:
    """Frames of equal columns joined: names, the values of each column, and which of the frames they are.

    Frames that differ in names or types come apart, in order of first appearance.
    """
    groups: dict[Any, list[int]] = {}
    for number, frame in enumerate(frames):
        groups.setdefault(frame.sign, []).append(number)
    found = []
    for (names, kinds), numbers in groups.items():
        columns: list[Any] = [None] * len(names)
        for place, (_, locations) in enumerate(kinds):
            parts = [frames[number].blocks[place] for number in numbers]
            for location, column in zip(np.frombuffer(locations, np.intp), _concatenated(parts), strict=True):
                columns[location] = column
        found.append((names, columns, numbers))
    return found


def _concatenated(parts: Sequence[Any]) -> list[Any]:
    """The columns of blocks of one kind, one block behind the other."""
    first, kind = parts[0], type(parts[0])
    if len(parts) == 1:
        return [first] if first.ndim == 1 else [first[row] for row in range(len(first))]
    if first.ndim == 1:
        if kind is np.ndarray:
            return [np.concatenate(parts)]
        return [kind._concat_same_type(parts)]
    rows = range(len(first))
    try:
        # Of times several columns are in one array.
        whole = np.concatenate(parts, axis=1) if kind is np.ndarray else kind._concat_same_type(parts, axis=1)
        return [whole[row] for row in rows]
    except Exception:  # pandas looks inside otherwise than expected
        return [pd.concat([pd.Series(part[row]) for part in parts], ignore_index=True).array for row in rows]
