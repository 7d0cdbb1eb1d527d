"""What stateless steps do to a chunk.

Each transform changes the values of a chunk in place of a whole run of items with as few Python operations per item
as there can be: `list.extend` over `map` is the loop. It keeps what came before an exception, and the `map` object
goes on behind it, so nobody is called twice.

Invariant: after `apply`, the chunk's values, origins and count of failures are as if each item had been handled alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from types import CoroutineType
from typing import Any

from penstock._coroutines import unawaited
from penstock.errors import ConfigError, UserFunctionError
from penstock.ordered._chunk import Chunk, Failure, add_note, item_of, mark, marked, place_of
from penstock.ordered._steps import Step

__all__ = ["Stopped", "Transform", "failure", "make_transform", "misfit", "refuse_coroutines", "wrong"]

Transform = Callable[[Chunk], None]


class Stopped(KeyboardInterrupt):
    """Raised in a thread that does not come back: the one exception that no step takes for a result."""


def failure(error: BaseException, item: int | None, step: str) -> Failure:
    """What stands in place of a result; Ctrl-C is not a result and goes on its way."""
    if _interrupts(error):
        raise error
    if isinstance(error, StopIteration):
        # Raised where results are taken it would be their end.
        told = wrong(step, "raised StopIteration", item)
        told.__cause__ = error
        add_note(told, "an iterator ended inside the function: give next() a default")
        error = told
    where = "at the end of the input" if item is None or item < 0 else f"item {item} of the input"
    return Failure(marked(error, f"{where}, in {step}", step))


def _interrupts(error: BaseException) -> bool:
    """Whether this is Ctrl-C, which comes to the main thread, or ends a thread; elsewhere a function raised it."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    return isinstance(error, Stopped) or threading.get_ident() == threading.main_thread().ident


def wrong(step: str, message: str, item: int | None = None) -> UserFunctionError:
    """The error of a function that returned what its step does not take."""
    return UserFunctionError(f"{step} {message}", step=step, item=item)


def misfit(step: str, wanted: str, made: Any, item: int | None = None) -> UserFunctionError:
    """The error of a function that returned this, and not what is `wanted`."""
    if type(made) is CoroutineType:
        return wrong(step, unawaited(made), item)
    return wrong(step, f"must return {wanted}, got {made!r:.80}", item)


def _passing(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`f` for values among which are failures."""
    return lambda value: value if value.__class__ is Failure else f(value)


def _call_each(f: Callable[[Any], Any], chunk: Chunk, step: str) -> list[Any]:
    """The result of `f` for each value, a failure where it raised; counts them."""
    values = chunk.values
    out: list[Any] = []
    wanted = len(values)
    calls = map(_passing(f) if chunk.failed else f, values)
    while len(out) < wanted:
        try:
            out.extend(calls)
            if len(out) == wanted:
                break
            error: BaseException = wrong(step, "raised StopIteration")
            add_note(error, "an iterator ended inside the function: give next() a default")
        except BaseException as raised:
            if _interrupts(raised) or len(out) == wanted:
                raise  # not of a function of these
            error = raised
        out.append(failure(error, chunk.numbers()[len(out)], step))
        chunk.failed += 1
    chunk.failed += refuse_coroutines(out, chunk.numbers(), step)
    return out


def refuse_coroutines(out: list[Any], numbers: Iterable[int | None], step: str) -> int:
    """Put failures in place of what nobody would await; how many. `numbers` are those of the items behind each."""
    if CoroutineType not in map(type, out):
        return 0
    refused = 0
    for place, (number, value) in enumerate(zip(numbers, out, strict=True)):
        if type(value) is CoroutineType:
            out[place] = failure(wrong(step, unawaited(value), number), number, step)
            refused += 1
    return refused


class Map:
    """See `steps.map`."""

    def __init__(self, step: Step) -> None:
        assert step.call is not None
        self.f, self.name = step.call, step.name

    def __call__(self, chunk: Chunk) -> None:
        chunk.values = _call_each(self.f, chunk, self.name)


class Filter(Map):
    """See `steps.filter`."""

    def __call__(self, chunk: Chunk) -> None:
        marks = _call_each(self.f, chunk, self.name)
        numbers = chunk.numbers()
        keep: list[Any]
        try:
            # Each once, and here: for `compress` StopIteration of one would be the end. `bool(mark)` takes longer.
            keep = [True if mark else False for mark in marks]  # noqa: SIM210
        except KeyboardInterrupt:
            raise
        except BaseException:  # a truth value that cannot be had, such as that of an array
            failed = sum(mark.__class__ is Failure for mark in marks)
            keep = marks = [_truth(self.name, mark, number) for mark, number in zip(marks, numbers, strict=True)]
            chunk.failed = sum(mark.__class__ is Failure for mark in marks)
            if chunk.failed == failed:
                raise  # all can be had: it is a signal handler's
        if chunk.failed:
            pairs = zip(marks, chunk.values, strict=True)
            chunk.values = [mark if mark.__class__ is Failure else value for mark, value in pairs]
        chunk.values = list(compress(chunk.values, keep))
        chunk.origins = list(compress(numbers, keep))


def _truth(step: str, mark: Any, number: int) -> Any:
    if mark.__class__ is Failure:
        return mark
    try:
        return bool(mark)
    except BaseException as error:
        return failure(error, number, step)


class FlatMap(Map):
    """See `steps.flat_map`."""

    def __call__(self, chunk: Chunk) -> None:
        expand(chunk, self._outputs, self.name)
        chunk.failed += refuse_coroutines(chunk.values, chunk.numbers(), self.name)

    def _outputs(self, value: Any) -> Iterable[Any]:
        made = self.f(value)
        if made is None:
            return ()
        try:
            found: Iterable[Any] = iter(made)
            return found
        except TypeError:
            raise misfit(self.name, "an iterable or None", made) from None


def expand(chunk: Chunk, outputs: Callable[[Any], Iterable[Any]], step: str) -> None:
    """Replace each value by the outputs that it has; what came before an exception stays."""
    out: list[Any] = []
    origins: list[int] = []
    failed = 0
    for number, value in zip(chunk.numbers(), chunk.values, strict=True):
        if value.__class__ is Failure:
            out.append(value)
            failed += 1
        else:
            try:
                out.extend(outputs(value))
            except BaseException as error:
                out.append(failure(error, number, step))
                failed += 1
        origins.extend([number] * (len(out) - len(origins)))
    chunk.values, chunk.origins, chunk.failed = out, origins, failed


def is_batch(value: Any) -> bool:
    """Whether this is a record batch; pyarrow is asked only where it is loaded."""
    arrow = sys.modules.get("pyarrow")
    return arrow is not None and isinstance(value, arrow.RecordBatch)


class MapBatches(Map):
    """See `steps.map_batches`."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.same = step.option("same_length")

    def __call__(self, chunk: Chunk) -> None:
        values = chunk.values
        if any(is_batch(value) for value in values):
            expand(chunk, self._batches, self.name)
            return
        numbers = chunk.numbers()
        out: list[Any] = []
        origins: list[int] = []
        start = 0
        while start < len(values):
            if values[start].__class__ is Failure:
                out.append(values[start])
                origins.append(numbers[start])
                start += 1
                continue
            end = start
            while end < len(values) and values[end].__class__ is not Failure:
                end += 1
            try:
                made = self._list(values[start:end], numbers[start])
            except BaseException as error:
                failed = failure(error, numbers[start], self.name)
                mark(failed.error, f"the call was for {place_of(numbers[start], numbers[end - 1])}", self.name)
                made = [failed]
                chunk.failed += 1
            out += made
            origins += numbers[start : start + len(made)]
            start = end
        chunk.values, chunk.origins = out, origins
        chunk.failed += refuse_coroutines(out, origins, self.name)

    def _list(self, values: list[Any], item: int) -> list[Any]:
        made = self.f(values)
        if isinstance(made, (str, bytes, dict)) or not hasattr(made, "__len__") or not hasattr(made, "__iter__"):
            raise misfit(self.name, f"a sequence of {len(values)} results", made, item)
        if len(made) != len(values):
            raise wrong(self.name, f"must return {len(values)} results, one per item, got {len(made)}", item)
        return list(made)

    def _batches(self, batch: Any) -> Iterable[Any]:
        if not is_batch(batch):
            raise wrong(self.name, f"received record batches and {type(batch).__qualname__}: it takes one kind")
        made = arrow_batches(self.f(batch), self.name)
        if self.same and sum(part.num_rows for part in made) != batch.num_rows:
            got = sum(part.num_rows for part in made)
            raise wrong(self.name, f"must return as many rows as it is given, {batch.num_rows}, got {got}")
        return made


def arrow_batches(made: Any, step: str) -> list[Any]:
    """Record batches in whatever form a function gave them."""
    import pyarrow as pa

    if made is None:
        return []
    if isinstance(made, pa.RecordBatch):
        return [made]
    if isinstance(made, pa.Table):
        return list(made.to_batches())
    if hasattr(made, "__arrow_c_array__"):
        return [pa.record_batch(made)]
    if hasattr(made, "__iter__") and not isinstance(made, (str, bytes, dict)):
        parts = list(made)
        if all(isinstance(part, pa.RecordBatch) for part in parts):
            return parts
        made = next(part for part in parts if not isinstance(part, pa.RecordBatch))
    raise misfit(step, "a RecordBatch, a Table or an iterable of RecordBatches", made)


class Rows:
    """See `steps.rows`."""

    def __init__(self, columns: Sequence[str], name: str = "rows") -> None:
        self.columns, self.name = tuple(columns), name

    def __call__(self, chunk: Chunk) -> None:
        expand(chunk, self._tuples, self.name)

    def _tuples(self, batch: Any) -> Iterable[Any]:
        need_batch(batch, self.name)
        names = self.columns or tuple(batch.schema.names)
        columns = [column_of(batch, name, self.name).to_pylist() for name in names]
        return zip(*columns, strict=True) if columns else ()


class ByKey:
    """Record batches in; per batch and key, as keys first appear, ``(key, rows of that key)``."""

    def __init__(self, columns: Sequence[str], single: bool, name: str) -> None:
        self.columns, self.single, self.name = tuple(columns), single, name

    def __call__(self, chunk: Chunk) -> None:
        expand(chunk, self._groups, self.name)

    def _groups(self, batch: Any) -> Iterable[Any]:
        from penstock._functions.state import own_nan

        need_batch(batch, self.name, self.columns)
        lists = [column_of(batch, name, self.name).to_pylist() for name in self.columns]
        keys = lists[0] if self.single else list(zip(*lists, strict=True))
        if any(float in set(map(type, values)) for values in lists):
            keys = list(map(own_nan, keys))
        places: dict[Any, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        if len(places) == 1:
            return [(next(iter(places)), batch)]
        from penstock._views import rows_at

        return [(key, rows_at(batch, found)) for key, found in places.items()]


def need_batch(batch: Any, step: str, keys: Sequence[str] = ()) -> None:
    """UserFunctionError unless this is a record batch; `keys`: the columns for which it has to be one."""
    if not is_batch(batch):
        made = f"needs items that are record batches, got {type(batch).__qualname__}"
        if keys:
            made += f": key={keys[0]!r} names a column; of other items give a function, key=lambda item: ..."
        raise wrong(step, made)


def column_of(batch: Any, name: str, step: str) -> Any:
    """A column by name; ConfigError naming those that there are."""
    if batch.schema.names.count(name) != 1:
        raise ConfigError(f"{step}: no column {name!r} (or more than one); there are {', '.join(batch.schema.names)}")
    return batch.column(name)


class Batches:
    """See `steps.batches`; with `by_item` the rows of different items stay in different batches."""

    def __init__(self, schema: Any, name: str = "batches", by_item: bool = False) -> None:
        from penstock.ordered._packing import Misfit, Packer

        self.name, self.by_item = name, by_item
        self._packer, self._misfit = Packer(schema), Misfit

    def __call__(self, chunk: Chunk) -> None:
        out: list[Any] = []
        origins: list[int] = []
        rows: list[Any] = []
        numbers: list[int] = []

        def flush() -> None:
            for place, made in self._packer.pack(rows):
                number = numbers[place]
                if isinstance(made, self._misfit):
                    error = wrong(self.name, f"needs rows that fit its schema; one {made}", item_of(number))
                    error.__cause__ = made.__cause__
                    made = failure(error, number, self.name)
                    chunk.failed += 1
                out.append(made)
                origins.append(number)
            rows.clear()
            numbers.clear()

        for number, value in zip(chunk.numbers(), chunk.values, strict=True):
            if value.__class__ is Failure:
                flush()
                out.append(value)
                origins.append(number)
                continue
            if self.by_item and numbers and number != numbers[0]:
                flush()
            rows.append(value)
            numbers.append(number)
        flush()
        chunk.values, chunk.origins = out, origins


class StatelessFlow:
    """A flow without keys: each thread has a run of its own."""

    def __init__(self, step: Step) -> None:
        from penstock._schema import conform

        self.name = step.name
        flow = step.option("flow")
        self._plan, self._calls = flow.to_plan()
        self._schema = flow.input_schema
        self._conform = conform
        self._mine = threading.local()

    def __call__(self, chunk: Chunk) -> None:
        expand(chunk, self._push, self.name)

    def _push(self, batch: Any) -> Iterable[Any]:
        import pyarrow as pa

        from penstock._functions.inline import all_of

        need_batch(batch, self.name)
        run = getattr(self._mine, "run", None)
        if run is None:
            from penstock import _native

            run = self._mine.run = _native.InlineRun(self._plan, self._calls)
        try:
            made = all_of(run, run.push(self._conform(batch, self._schema)))
        except BaseException:
            self._mine.run = None  # a run that failed cannot go on
            raise
        return [pa.record_batch(out) for out in made]


def make_transform(step: Step) -> Transform:
    """What does a stateless step."""
    if step.kind == "rows":
        return Rows(step.option("columns"))
    if step.kind == "batches":
        return Batches(step.option("schema"))
    if step.kind == "flow":
        return StatelessFlow(step)
    return {"map": Map, "filter": Filter, "flat_map": FlatMap, "map_batches": MapBatches}[step.kind](step)
