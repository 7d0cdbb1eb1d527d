"""Steps with state: how a chunk is split by key, what is done to its parts, and how they become one chunk again.

`Table` owns the states of one partition (a stateful step has one partition and one key). The same loop,
`run_part`, serves all modes: in this process on live states, in a worker process on states that came with the call.

Invariants: only one thread at a time works on a table (the runtime runs one part of a partition at a time); a step
that raises leaves its key the state from before; a chunk that `merge` returns has its values in the order of the
items that they came from, whatever order its parts were done in; outputs of `finish` follow, in the order in which
keys first appeared; a `KeyedFlow` touches its flow in one thread of its own, and gives nothing of a state that an error
has broken.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from types import CoroutineType
from typing import Any

from penstock._coroutines import unawaited
from penstock._functions.short import short
from penstock.errors import NotPicklable, OrderedError
from penstock.ordered._chunk import Chunk, Failure, place_of, text_of
from penstock.ordered._steps import Step
from penstock.ordered._transforms import failure, misfit, refuse_coroutines, wrong

__all__ = ["Keyed", "Packed", "Part", "Table", "run_part"]

#: The key of a stateful step.
_ALL = ("all items",)


class Packed:
    """A state as it came back from a worker process."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body

    def __reduce__(self) -> tuple[Any, ...]:
        return (Packed, (self.body,))


class Table:
    """States by key, each with the place where its key first appeared (number of the chunk, position in it)."""

    __slots__ = ("states",)

    def __init__(self) -> None:
        self.states: dict[Any, tuple[Any, Any]] = {}


class Part:
    """The items of a chunk that belong to one partition. `outs[i]` is the list of outputs of `items[i]`."""

    __slots__ = ("around", "chunk", "finished", "items", "keys", "numbers", "outs", "partition", "positions", "spent")

    def __init__(self, chunk: Chunk, partition: int) -> None:
        self.chunk = chunk
        self.partition = partition
        self.positions: list[int] = []
        self.numbers: list[int] = []
        self.keys: list[Any] = []
        self.items: list[Any] = []
        self.outs: list[Any] = []
        #: What `finish` made: (place of the key, outputs).
        self.finished: list[tuple[tuple[int, int], list[Any]]] = []
        #: Within what `finish` is called, key by key.
        self.around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self.spent = 0.0

    def places(self) -> list[tuple[int, int]]:
        """Where each item stands in the whole run."""
        number = self.chunk.number
        return [(number, position) for position in self.positions]

    @property
    def weight(self) -> int:
        """How many values there are now."""
        return sum(map(len, self.outs)) if self.outs else len(self.items)


def run_part(
    keyed: Keyed,
    states: dict[Any, tuple[Any, Any]],
    keys: Sequence[Any],
    items: Sequence[Any],
    numbers: Sequence[int],
    places: Sequence[tuple[int, int]],
) -> list[list[Any]]:
    """Do the items one after the other on `states`; the outputs of each. A new key has the place of its item."""
    outs: list[list[Any]] = []
    for key, item, number, here in zip(keys, items, numbers, places, strict=True):
        out: list[Any] = []
        outs.append(out)
        _run_item(keyed, states, key, item, number, here, out)
    if CoroutineType in map(type, chain.from_iterable(outs)):
        for out, number in zip(outs, numbers, strict=True):
            refuse_coroutines(out, [number] * len(out), keyed.name)
    return outs


def _run_item(
    keyed: Keyed,
    states: dict[Any, tuple[Any, Any]],
    key: Any,
    item: Any,
    number: int,
    here: tuple[int, int],
    out: list[Any],
) -> bool:
    """Do one item, whose outputs go to the end of `out`; whether all went well."""
    name = keyed.name
    try:
        held = states.get(key)
        if held is None:
            state, place = keyed.fresh(), here
        else:
            state, place = held
            if state.__class__ is Packed:
                state = pickle.loads(state.body)
                # What is changed in place stays, also where the step raises then: as where nothing is packed.
                states[key] = (state, place)
        made = keyed.call(state, item)
        if made.__class__ is not tuple or len(made) != 2:
            raise misfit(name, "(state, outputs)", made, number)
        state, outputs = made
        if outputs is not None:
            if not hasattr(outputs, "__iter__"):
                raise misfit(name, "outputs that are an iterable or None", outputs, number)
            out.extend(outputs if keyed.own is None else map(keyed.own, outputs))
        if state is None and keyed.forgets:
            states.pop(key, None)
        else:
            states[key] = (state, place)
        return True
    except BaseException as error:
        out.append(failure(error, number, name))
        return False


class Keyed:
    """A partitioned or stateful step at work."""

    threads = False

    def __init__(self, step: Step) -> None:
        assert step.call is not None
        self.name = step.name
        self.call: Callable[[Any, Any], Any] = step.call
        self.forgets = step.kind == "partitioned"
        self.partitions: int = step.option("partitions") if self.forgets else 1
        self.key: Callable[[Any], Any] | None = step.option("key") if self.forgets else None
        self._initial = step.option("initial")
        self._finish: Callable[..., Iterable[Any] | None] | None = step.option("finish")
        self.tables = [Table() for _ in range(self.partitions)]
        #: Takes an output as it is, where outputs are rows that become batches later.
        self.own: Callable[[Any], Any] | None = None

    @property
    def finishes(self) -> bool:
        """Whether the end of the input has outputs."""
        return self._finish is not None

    def fresh(self) -> Any:
        """The state of a new key."""
        if not callable(self._initial):
            return copy.deepcopy(self._initial)
        made = self._initial()
        if made.__class__ is CoroutineType:
            raise wrong(f"initial of {self.name}", unawaited(made))
        return made

    # A chunk and its parts

    def split(self, chunk: Chunk) -> list[Part]:
        """The parts of a chunk, in order of partition; one part, perhaps of nothing, at least.

        Failures, and items whose key cannot be had, stay in the chunk.
        """
        parts: dict[int, Part] = {}
        numbers = chunk.numbers()
        for position, value in enumerate(chunk.values):
            if value.__class__ is Failure:
                continue
            if self.key is None:
                key, partition = _ALL, 0
            else:
                try:
                    key = self.key(value)
                    if key.__class__ is CoroutineType:
                        raise wrong(f"the key of {self.name}", unawaited(key), numbers[position])
                    partition = hash(key) % self.partitions
                except BaseException as error:
                    chunk.values[position] = failure(error, numbers[position], f"the key of {self.name}")
                    chunk.failed += 1
                    continue
            part = parts.get(partition)
            if part is None:
                part = parts[partition] = Part(chunk, partition)
            part.positions.append(position)
            part.numbers.append(numbers[position])
            part.keys.append(key)
            part.items.append(value)
        if chunk.final and self._finish is not None:
            for partition in range(self.partitions):
                if partition not in parts:
                    parts[partition] = Part(chunk, partition)
        if not parts:
            return [Part(chunk, 0)]
        return [parts[partition] for partition in sorted(parts)]

    def operate(self, part: Part) -> None:
        """Do a part on the states of its partition, in this process."""
        table = self.tables[part.partition]
        part.outs = run_part(self, table.states, part.keys, part.items, part.numbers, part.places())
        self.settle(part)

    def settle(self, part: Part) -> None:
        """At the end of the input, finish."""
        states = self.tables[part.partition].states
        if part.chunk.final and self._finish is not None:
            if not self.forgets and not states:
                with part.around():
                    states[_ALL] = (self.fresh(), (0, 0))  # a stateful step has its state without any item
            for key, (state, place) in states.items():
                with part.around():
                    part.finished.append((place, self._finished(key, state)))
            states.clear()

    def _finished(self, key: Any, state: Any) -> list[Any]:
        assert self._finish is not None
        out: list[Any] = []
        try:
            if state.__class__ is Packed:
                state = pickle.loads(state.body)
            made = self._finish(key, state) if self.forgets else self._finish(state)
            if made is not None:
                if not hasattr(made, "__iter__"):
                    raise misfit(f"finish of {self.name}", "an iterable or None", made)
                out.extend(made if self.own is None else map(self.own, made))
                refuse_coroutines(out, [None] * len(out), f"finish of {self.name}")
        except BaseException as error:
            out.append(failure(error, None, f"finish of {self.name}"))
        return out

    def merge(self, parts: Sequence[Part]) -> Chunk:
        """The chunk of which these are the parts, with the outputs in the places of the items."""
        chunk = parts[0].chunk
        places: list[list[Any] | None] = [None] * len(chunk.values)
        for part in parts:
            for position, out in zip(part.positions, part.outs, strict=True):
                places[position] = out
            chunk.spent += part.spent
        values: list[Any] = []
        origins: list[int] = []
        for number, value, place in zip(chunk.numbers(), chunk.values, places, strict=True):
            if place is None:
                values.append(value)
                origins.append(number)
            elif place:
                values += place
                origins += [number] * len(place)
        for _, out in sorted((done for part in parts for done in part.finished), key=lambda done: done[0]):
            values += out
            origins += [-1] * len(out)
        chunk.values, chunk.origins = values, origins
        chunk.failed = sum(value.__class__ is Failure for value in values)
        return chunk

    def __call__(self, chunk: Chunk) -> None:
        """The whole chunk here and now: item by item, on the same tables, without parts."""
        if chunk.final:
            parts = self.split(chunk)
            for part in parts:
                self.operate(part)
            self.merge(parts)
            return
        values: list[Any] = []
        origins: list[int] = []
        failed, states = 0, self.tables[0].states
        key: Any = _ALL
        for place, (number, value) in enumerate(zip(chunk.numbers(), chunk.values, strict=True)):
            if value.__class__ is Failure:
                values.append(value)
                failed += 1
            else:
                try:
                    if self.key is not None:
                        key = self.key(value)
                        if key.__class__ is CoroutineType:
                            raise wrong(f"the key of {self.name}", unawaited(key), number)
                        states = self.tables[hash(key) % self.partitions].states
                except BaseException as error:
                    values.append(failure(error, number, f"the key of {self.name}"))
                    failed += 1
                else:
                    failed += not _run_item(self, states, key, value, number, (chunk.number, place), values)
            if len(values) > len(origins):
                origins.extend([number] * (len(values) - len(origins)))
        failed += refuse_coroutines(values, origins, self.name)
        chunk.values, chunk.origins, chunk.failed = values, origins, failed

    # States on their way to a worker process and back

    def uncompared(self, part: Part) -> list[Failure | None]:
        """By item, what comes of a key that cannot be compared with those before it or with those of states."""
        states, before = self.tables[part.partition].states, set[Any]()
        errors: list[Failure | None] = []
        for key, number in zip(part.keys, part.numbers, strict=True):
            made = None
            try:
                states.get(key)
                before.add(key)
            except Exception as error:
                made = failure(error, number, self.name)
            errors.append(made)
        return errors

    def lend(self, part: Part) -> list[tuple[Any, bytes | None]]:
        """The states that a part needs, pickled, by key; None for a key that has none.

        Raises
        ------
        NotPicklable
            When a key or state does not pickle.
        """
        from penstock.ordered._wire import dumps

        states = self.tables[part.partition].states
        lent: list[tuple[Any, bytes | None]] = []
        for key in dict.fromkeys(part.keys):
            held = states.get(key)
            if held is None:
                lent.append((key, None))
                continue
            state, place = held
            if state.__class__ is not Packed:
                try:
                    state = Packed(dumps(state))
                except Exception as error:
                    raise NotPicklable(
                        f"{self.name}: the state of key {short(key)} does not pickle, so it cannot go to a worker"
                        f" process: {text_of(error)}",
                        item=None,
                    ) from error
                states[key] = (state, place)
            lent.append((key, state.body))
        return lent

    def take_back(self, part: Part, returned: Sequence[tuple[bytes, Any] | None]) -> None:
        """What has become of the states that were lent, in the same order, and their places where they are new.

        The end of the input is for `settle`.
        """
        states = self.tables[part.partition].states
        for key, back in zip(dict.fromkeys(part.keys), returned, strict=True):
            if back is None:
                states.pop(key, None)
            else:
                body, place = back
                states[key] = (Packed(body), states[key][1] if place is None else place)


class KeyedFlow:
    """A flow with keys: one run, in a thread of its own that is not the runtime's, fed in order."""

    name: str
    partitions = 1
    finishes = True

    def __init__(self, step: Step) -> None:
        from penstock._schema import conform

        flow = step.option("flow")
        self.name = step.name
        self._plan, self._calls = flow.to_plan()
        self._schema = flow.input_schema
        self._conform = conform
        self._aside: Any = None
        self._run: Any = None
        #: What it failed with, and where: its state is lost since.
        self._lost: tuple[BaseException, str] | None = None
        #: The thread of the flow while it is in a call.
        self.busy: int | None = None

    @property
    def threads(self) -> bool:
        """Whether there is a thread."""
        return self._aside is not None

    def __call__(self, chunk: Chunk) -> None:
        from penstock.ordered._transforms import expand

        pairs = zip(chunk.numbers(), chunk.values, strict=True)
        numbers = iter([number for number, value in pairs if value.__class__ is not Failure])
        expand(chunk, lambda batch: self._do(self._push, batch, next(numbers)), self.name)
        if chunk.final:
            try:
                made = self._do(self._finish)
            except BaseException as error:
                made = [failure(error, None, self.name)]
                chunk.failed += 1
            chunk.values += made
            assert isinstance(chunk.origins, list)
            chunk.origins += [-1] * len(made)
            self.close()

    def _do(self, work: Callable[..., list[Any]], *args: Any) -> list[Any]:
        if self._aside is None:
            from concurrent.futures import ThreadPoolExecutor

            self._aside = ThreadPoolExecutor(1, "penstock-ordered-flow")
        made: list[Any] = self._aside.submit(self._busily, work, *args).result()
        return made

    def _busily(self, work: Callable[..., list[Any]], *args: Any) -> list[Any]:
        self.busy = threading.get_ident()
        try:
            return work(*args)
        finally:
            self.busy = None

    def _push(self, batch: Any, number: int) -> list[Any]:
        from penstock.ordered._transforms import need_batch

        need_batch(batch, self.name)
        fitting = self._conform(batch, self._schema)
        return self._all_of(number, lambda run: run.push(fitting))

    def _finish(self) -> list[Any]:
        return self._all_of(-1, lambda run: run.finish())

    def _all_of(self, number: int, work: Callable[[Any], list[Any]]) -> list[Any]:
        """What the run makes of an item; it cannot go on where that fails."""
        import pyarrow as pa

        from penstock._functions.inline import all_of

        if self._lost is not None:
            error, place = self._lost
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise OrderedError(
                f"{self.name}: its state was lost when {place} failed ({why}); run the pipeline again"
            ) from error
        run = self._made()
        try:
            return [pa.record_batch(out) for out in all_of(run, work(run))]
        except BaseException as error:
            self._lost = (error, place_of(number))
            raise

    def _made(self) -> Any:
        if self._run is None:
            from penstock import _native

            self._run = _native.InlineRun(self._plan, self._calls)
        return self._run

    def abandon(self) -> None:
        """Leave a call alone that does not come back: its thread ends behind it."""
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.shutdown(wait=False)

    def close(self) -> None:
        """End the thread."""
        aside, self._aside = self._aside, None
        if aside is not None:
            # The run belongs to that thread, which also frees it. It has ended when the interpreter ends.
            with contextlib.suppress(RuntimeError):
                aside.submit(self.__dict__.__setitem__, "_run", None)
            aside.shutdown(wait=True)
