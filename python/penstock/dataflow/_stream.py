"""Building dataflows: streams, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from penstock._bounds import OnFailure, parse_bounds
from penstock.dataflow._bounded import BoundedStats, Failure, Failures, beginner
from penstock.dataflow._functions import (
    each_block,
    each_item,
    expanded,
    kept,
    keys_of,
    mapped,
    name_of,
    observe,
    refusal,
)
from penstock.dataflow._handles import Block, Loop, Probe
from penstock.dataflow._operator import Capability, Time
from penstock.dataflow._stateful import Fold, machine, routed, stateful
from penstock.errors import BlockError, GraphError

if TYPE_CHECKING:
    from penstock import _native
    from penstock._native import DataflowScope

__all__ = ["Block", "Bounded", "Stream", "Time"]

X = TypeVar("X")
Y = TypeVar("Y")
Constructor = Callable[[Capability], Callable[..., Any]]


class Place(Protocol):
    """The scope of a stream: a `penstock.dataflow.Scope`, as far as streams know it."""

    @property
    def _native(self) -> DataflowScope: ...
    @property
    def depth(self) -> int:
        """As `Scope.depth`."""

    @property
    def path(self) -> str:
        """As `Scope.path`."""

    def operator(
        self, inputs: Iterable[Stream[Any]], constructor: Constructor, *, name: str | None = None
    ) -> Stream[Any]:
        """As `Scope.operator`."""

    def nested(self, name: str = "nested") -> Place:
        """As `Scope.nested`."""

    def feedback(self, advance: int = 1) -> tuple[Loop, Stream[Any]]:
        """As `Scope.feedback`."""

    def _opened(self, native: DataflowScope) -> Place: ...


class Stream(Generic[X]):
    """The blocks that one operator sends, on this worker.

    `X` is the type of the items where blocks are lists. Functions of items loop over the list in one call per block;
    for record batches there are the methods that take blocks.
    """

    __slots__ = ("_native", "scope")

    def __init__(self, native: _native.DataflowStream, scope: Place) -> None:
        self._native = native
        #: The scope that it is in.
        self.scope = scope

    def _apply(
        self,
        step: str,
        call: Callable[..., Any],
        *,
        timed: bool = False,
        refused: Callable[[Exception], Exception] | None = None,
    ) -> Stream[Any]:
        return Stream(self._native.apply(step, call, timed, refused), self.scope)

    # Items and blocks

    def map(self, func: Callable[[X], Y]) -> Stream[Y]:
        """Each item through a function.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         words, stream = scope.input()
        ...         seen = stream.map(str.upper).collect()
        ...     words.send(["a", "b"])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, ['A', 'B'])]]
        """
        step = f"map {name_of(func)}"
        return self._apply(step, each_item(step, func, mapped, "map_blocks"))

    def flat_map(self, func: Callable[[X], Iterable[Y]]) -> Stream[Y]:
        """Each item through a function that gives any number of items.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         lines, stream = scope.input()
        ...         seen = stream.flat_map(str.split).collect()
        ...     lines.send(["to be or", "not to be"])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, ['to', 'be', 'or', 'not', 'to', 'be'])]]
        """
        step = f"flat_map {name_of(func)}"
        return self._apply(step, each_item(step, func, expanded, "map_blocks"))

    def filter(self, predicate: Callable[[X], Any]) -> Stream[X]:
        """The items for which a function is true.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         seen = stream.filter(lambda x: x % 2).collect()
        ...     numbers.send([1, 2, 3])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [1, 3])]]
        """
        step = f"filter {name_of(predicate)}"
        return self._apply(step, each_item(step, predicate, kept, "map_blocks"))

    def map_blocks(self, func: Callable[[Any], Any]) -> Stream[Any]:
        """Each block through a function, which gives a list, a record batch, or None for nothing.

        Do not change the block itself: other readers of the stream share it.

        Examples
        --------
        >>> import penstock as pk, pyarrow as pa, pyarrow.compute as pc
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         bids, stream = scope.input()
        ...         seen = stream.map_blocks(lambda batch: batch.filter(pc.field("price") > 10)).collect()
        ...     bids.send(pa.record_batch({"price": [5, 20]}))
        ...     worker.step()
        ...     return [(time, batch.to_pylist()) for time, batch in seen]
        >>> pk.execute(program, workers=1)
        [[(0, [{'price': 20}])]]
        """
        step = f"map_blocks {name_of(func)}"
        return self._apply(step, each_block(step, func), refused=refusal(step, func))

    def inspect(self, func: Callable[[X], Any]) -> Stream[X]:
        """The same items, after a function has seen each.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         stream.inspect(print)
        ...     numbers.send([1, 2])
        >>> pk.execute(program, workers=1)
        1
        2
        [None]
        """
        step = f"inspect {name_of(func)}"
        return self._apply(step, observe(step, func), timed=True)

    def inspect_blocks(self, func: Callable[[Any, Any], Any]) -> Stream[X]:
        """The same blocks, after ``func(time, block)`` has seen each.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         stream.inspect_blocks(lambda time, block: print(time, block))
        ...     numbers.advance_to(3)
        ...     numbers.send([1, 2])
        >>> pk.execute(program, workers=1)
        3 [1, 2]
        [None]
        """
        step = f"inspect_blocks {name_of(func)}"
        return self._apply(step, each_block(step, func, ignored=True), timed=True)

    def collect(self, into: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
        """A list that gets ``(time, block)`` of each block that comes out of this stream on this worker.

        Returned by a program it is complete: results are taken when all dataflows are finished.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         seen = stream.collect()
        ...     numbers.send([1])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [1])]]
        """
        seen: list[tuple[Any, Any]] = [] if into is None else into
        self._apply("collect", lambda time, block: seen.append((time, block)), timed=True)
        return seen

    # Between workers

    def exchange(self, key: str | Iterable[str] | Callable[[X], Any]) -> Stream[X]:
        """The same items, each on the worker that its key names: equal keys meet.

        Parameters
        ----------
        key : callable, str or list of str
            For lists a function from item to key: an int, float, str, bytes, bool, None, date, decimal, UUID, enum,
            or a tuple of these. For record batches the name of a column, or several.

        Notes
        -----
        The worker is the key's 64-bit hash modulo the number of workers; the hash is the same on every worker, in every
        process and release. Record batches are split without the interpreter lock.

        A key in a list and the same one in a column have the same hash where it is an int (one that a column of 64 bits
        can hold), bool, str, bytes, UUID, None, or a date in a ``date32`` column, or a datetime or timedelta in a
        column of microseconds. Floats, decimals, times of day and tuples (beside several columns) have others in a list
        than in columns. Two columns agree where both have ints of any width, text or bytes in any layout, or one
        type; several columns where their types do, but for the layout of text. Dictionaries and runs count as their
        values.

        A key function that raises, or gives a key without a stable hash, is a `UserFunctionError`. One worker alone
        calls the key function of each item and looks at columns as well, so it finds the same mistakes, at the same
        cost.

        When workers join or leave, keys go to other workers from then on, and what operators behind it know of them
        stays where it is: equal keys from before and after do not meet, not even at one time. State by key is for
        workers that stay. That in bins, which move (`stateful_unary` and its like), is refused where workers may join.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         words, stream = scope.input()
        ...         seen = stream.exchange(str.lower).collect()
        ...     words.send(["a", "b", "A"])
        ...     return seen
        >>> first, second = pk.execute(program, workers=2)
        >>> words = lambda seen: {word.lower() for _, block in seen for word in block}
        >>> words(first) & words(second), sorted(words(first) | words(second))
        (set(), ['a', 'b'])
        """
        if isinstance(key, str):
            key = [key]
        if callable(key):
            step = f"exchange {name_of(key)}"
            made = self._native.exchange_keys(step, keys_of(step, key), refusal(step, key))
        else:
            columns = list(key) if isinstance(key, Iterable) else []
            if not columns or not all(isinstance(column, str) for column in columns):
                raise BlockError(f"the key of an exchange is a function or names of columns, got {key!r}")
            made = self._native.exchange_columns(f"exchange {', '.join(columns)}", columns)
        return Stream(made, self.scope)

    def broadcast(self) -> Stream[X]:
        """Every block on every worker.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         news, stream = scope.input()
        ...         seen = stream.broadcast().collect()
        ...     if worker.index == 0:
        ...         news.send(["hello"])
        ...     return seen
        >>> pk.execute(program, workers=2)
        [[(0, ['hello'])], [(0, ['hello'])]]
        """
        return Stream(self._native.broadcast("broadcast"), self.scope)

    # Shape

    def concat(self, other: Stream[X]) -> Stream[X]:
        """The blocks of this and another stream.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         seen = stream.concat(stream.map(lambda x: -x)).collect()
        ...     numbers.send([1])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [1]), (0, [-1])]]
        """
        return Stream(self._native.concat(other._native), self.scope)

    def enter(self, inner: Place) -> Stream[X]:
        """This stream in a scope nested in its own. See `Scope.nested` for an example."""
        return Stream(self._native.enter(inner._native), inner)

    def leave(self, outer: Place) -> Stream[X]:
        """This stream in the scope around its own; its times lose their last coordinate. See `Scope.nested`."""
        return Stream(self._native.leave(outer._native), outer)

    def connect_loop(self, loop: Loop) -> None:
        """Send this stream into a loop of its scope. See `Scope.feedback` for an example.

        Raises
        ------
        GraphError
            When the loop is connected already or is of another scope.
        """
        self._native.connect_loop(loop._native)

    def iterate(
        self, body: Callable[[Stream[Any]], tuple[Stream[Any], Stream[Y]]], *, name: str = "iterate"
    ) -> Stream[Y]:
        """Run a body over and over: ``body(stream) -> (again, out)``, in a scope of its own.

        What is in `again` comes back to the body in the next round; what is in `out` is the result. The round is the
        last coordinate of the times in there.

        Examples
        --------
        Halve until odd:

        >>> import penstock as pk
        >>> def program(worker):
        ...     def body(numbers):
        ...         even = numbers.filter(lambda x: x % 2 == 0).map(lambda x: x // 2)
        ...         return even, numbers.filter(lambda x: x % 2 == 1)
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         seen = stream.iterate(body).collect()
        ...     numbers.send([12, 7])
        ...     return seen
        >>> [x for _, block in pk.execute(program, workers=1)[0] for x in block]
        [7, 3]
        """
        inner = self.scope.nested(name)
        loop, back = inner.feedback()
        again, out = body(self.enter(inner).concat(back))
        again.connect_loop(loop)
        return out.leave(self.scope)

    def bounded(
        self,
        body: Callable[[Stream[Any]], Stream[Y]],
        *,
        batches: int | None = None,
        batch_size: int | None = None,
        memory: int | str | None = None,
        on_failure: OnFailure = "stop",
        expand: Callable[[X], Iterable[Any]] | None = None,
        name: str = "bounded",
    ) -> Bounded[Y]:
        """Run a body on this stream in batches, of which each worker has few in it at a time.

        What is more waits before it, as it came. So a body that makes much of little keeps the memory flat; it may
        exchange, iterate, and have bounded scopes in it. The batch is the last coordinate of the times in there.

        Parameters
        ----------
        body : callable
            ``body(stream) -> stream``, in a scope of its own.
        batches, batch_size : int, optional
            How many batches may be unfinished on a worker, and how many items each has (rows of record batches). What
            is not given is found while running: raised until throughput does not grow any more, lowered while memory is
            short.
        memory : int or str, optional
            Bytes that the process may hold (resident, without pages of files), such as ``"512m"``: what is found while
            running keeps away from it.
        on_failure : {"stop", "skip"}, default "stop"
            What happens when `expand` or its iterator raises: all workers stop with the item named; or what is left of
            that item is dropped and the others go on: `Bounded.failures` has the first 100, `Bounded.failed` counts.
        expand : callable, optional
            From an item of a list to an iterable of items for the body, such as a generator. It is drawn from as there
            is room, however long it is.

        Returns
        -------
        Bounded
            The stream that the body gave, in this scope, with `Bounded.stats`.

        Raises
        ------
        ConfigError
            When a number is not a whole one of at least 1, or too large; when `memory` is given with both numbers,
            which leave nothing to find; when `expand` is a coroutine function.

        Notes
        -----
        A time that is still open at the input gets its first batches at once, the rest when it closes: feed in epochs
        that close. A body that answers only at the end of a time holds its batches until then: put such an operator
        behind the bounded scope. ``stats().holding`` names the batch.

        Examples
        --------
        A million items of which thirty exist at a time:

        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         out = stream.bounded(
        ...             lambda items: items.filter(lambda x: x % 250_000 == 0), expand=range, batches=3, batch_size=10
        ...         )
        ...         seen, probe = out.collect(), out.probe()
        ...     numbers.send([1_000_000])
        ...     numbers.close()
        ...     worker.step_while(lambda: not probe.done())
        ...     return [x for _, block in seen for x in block], out.stats().maximum_items
        >>> pk.execute(program, workers=1)
        [([0, 250000, 500000, 750000], 30)]
        """
        bounds = parse_bounds(batches, batch_size, memory, on_failure)
        failures = Failures()
        begin = None if expand is None else beginner(expand, failures if bounds.on_failure == "skip" else None)
        native, items, gate = self._native.bounded(name, bounds.batches, bounds.batch_size, bounds.memory, begin)
        out = body(Stream(items, self.scope._opened(native)))
        if not isinstance(out, Stream):
            raise GraphError(f"the body of a bounded scope gives back a stream, got {type(out).__name__}")
        return Bounded(out._native.close_bounded(gate, self.scope._native), self.scope, gate, failures)

    def probe(self) -> Probe:
        """A view of this stream's frontier, over all workers. It costs nothing per block. See `Probe`."""
        return Probe(self._native.probe())

    # Logic

    @overload
    def unary(self, constructor: Constructor, *, name: str | None = None) -> Stream[Any]: ...
    @overload
    def unary(self, constructor: None = None, *, name: str | None = None) -> Callable[[Constructor], Stream[Any]]: ...
    def unary(
        self, constructor: Constructor | None = None, *, name: str | None = None
    ) -> Stream[Any] | Callable[[Constructor], Stream[Any]]:
        """An operator with logic of its own: ``constructor(capability) -> logic(input, output, frontiers)``.

        The constructor runs once, with a capability for the least time; the logic runs whenever a block arrives or the
        frontier moves. It reads its `Input`, sends through its `Output` and asks its `Frontiers`. As a decorator it
        turns the constructor into the stream.

        Parameters
        ----------
        constructor : callable
            Called at once. It drops the capability unless the logic sends before it has read anything: until then
            nothing downstream gets past time 0. At a worker that joins a run it is good for nothing, and to send with
            it is a `CapabilityError`: where workers join, logic sends with the capabilities of blocks alone.
        name : str, optional
            Default: the constructor's.

        Notes
        -----
        An exception in the logic stops all workers; it reaches the caller as a `UserFunctionError`.

        Examples
        --------
        Distinct words, each when it is first seen:

        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         words, stream = scope.input()
        ...         @stream.exchange(lambda word: word).unary
        ...         def distinct(capability):
        ...             capability.drop()
        ...             known = set()
        ...             def logic(input, output, frontiers):
        ...                 for capability, words in input:
        ...                     fresh = dict.fromkeys(word for word in words if word not in known)
        ...                     known.update(fresh)
        ...                     output.send(capability, list(fresh))
        ...             return logic
        ...         seen = distinct.collect()
        ...     words.send(["a", "b", "a"])
        ...     words.send(["b"])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, ['a', 'b'])]]
        """
        if constructor is None:
            return lambda constructor: self.unary(constructor, name=name)
        return self.scope.operator([self], constructor, name=name)

    @overload
    def binary(self, other: Stream[Any], constructor: Constructor, *, name: str | None = None) -> Stream[Any]: ...
    @overload
    def binary(
        self, other: Stream[Any], constructor: None = None, *, name: str | None = None
    ) -> Callable[[Constructor], Stream[Any]]: ...
    def binary(
        self, other: Stream[Any], constructor: Constructor | None = None, *, name: str | None = None
    ) -> Stream[Any] | Callable[[Constructor], Stream[Any]]:
        """An operator over two streams: ``constructor(capability) -> logic(left, right, output, frontiers)``.

        As `unary`, also in what its capability is good for where workers join; ``frontiers.frontier(1)`` is that of
        `other`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         (people, left), (bids, right) = scope.input(), scope.input()
        ...         @left.binary(right)
        ...         def join(capability):
        ...             capability.drop()
        ...             names, waiting = {}, {}
        ...             def logic(left, right, output, frontiers):
        ...                 for capability, block in left:
        ...                     names.update(block)
        ...                 for capability, block in right:
        ...                     waiting.setdefault(capability.time, []).extend(block)
        ...                     frontiers.notify_at(capability)
        ...                 for capability in frontiers.notifications():
        ...                     bids = waiting.pop(capability.time)
        ...                     output.send(capability, [(names[who], bid) for who, bid in bids])
        ...             return logic
        ...         seen = join.collect()
        ...     bids.send([(1, 30)])
        ...     people.send([(1, "Ada")])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [('Ada', 30)])]]
        """
        if constructor is None:
            return lambda constructor: self.binary(other, constructor, name=name)
        return self.scope.operator([self, other], constructor, name=name)

    # State in bins that move

    def stateful_unary(
        self,
        key: Callable[[X], Any],
        fold: Fold,
        *,
        control: Stream[Any] | None = None,
        bits: int = 8,
        name: str | None = None,
    ) -> Stream[Any]:
        """Items into the state of their keys, bin by bin, in the order of times; bins move between workers meanwhile.

        Parameters
        ----------
        key : callable
            From an item to its key, as for `exchange`. The top bits of its hash are its bin.
        fold : callable
            ``fold(time, records, bin)``, called when a time is complete: with the items of that time of a bin, those of
            one worker in their order, and then the records that were post-dated to it. `bin.state` is a dict at
            first; `bin.notify_at` post-dates a record. What it returns (an iterable, or None) comes out at that time.
        control : Stream, optional
            Commands, on any worker: ``(bin, worker)``, a list with a worker for each bin, or None. One holds from its
            time on. Of one time there are, on all workers together, moves of different bins or one list alone. Items
            wait until no command at or before their time can come: advance its input, or close it.
            Without it a bin is with the worker of its number modulo the number of workers.
        bits : int, default 8
            Keys are cut into ``2 ** bits`` bins.
        name : str, optional
            Default: the fold's.

        Raises
        ------
        ConfigError
            When `bits` is no int from 0 to 20; where it runs, for a command that names no worker or bin, for two of one
            bin at one time, and for a list beside others. It ends the run.
        GraphError
            In a nested scope, where times have no order.

        Notes
        -----
        Folds see nothing of moves. A bin that leaves for another process is pickled. Cost: a time is a call of `fold`
        per bin that has something; a move waits until all before it has come out.

        Examples
        --------
        Counts that are told three times later, while half of the keys move:

        >>> import penstock as pk
        >>> def count(time, records, bin):
        ...     for record in records:
        ...         if isinstance(record, str):
        ...             bin.state[record] = bin.state.get(record, 0) + 1
        ...             bin.notify_at(time + 3, (record,))
        ...         else:
        ...             yield record[0], bin.state[record[0]]
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         words, stream = scope.input()
        ...         moves, control = scope.input()
        ...         seen = stream.stateful_unary(lambda word: word, count, control=control, bits=1).collect()
        ...     if worker.index == 0:
        ...         words.send(["a", "b", "c", "d"])
        ...         moves.advance_to(2)
        ...         moves.send([(0, 1), (1, 0)])
        ...     moves.close()
        ...     return seen
        >>> sorted((time, found) for seen in pk.execute(program, workers=2) for time, block in seen for found in block)
        [(3, ('a', 1)), (3, ('b', 1)), (3, ('c', 1)), (3, ('d', 1))]
        """
        return Stream(stateful("stateful_unary", [self], [key], [fold], control, bits, name), self.scope)

    def stateful_binary(
        self,
        other: Stream[Any],
        key: Callable[[X], Any],
        other_key: Callable[[Any], Any],
        fold: Fold,
        other_fold: Fold,
        *,
        control: Stream[Any] | None = None,
        bits: int = 8,
        name: str | None = None,
    ) -> Stream[Any]:
        """Two streams into states of one key that lie and move together.

        Parameters
        ----------
        other : Stream
            In the same scope.
        key, other_key : callable
            From an item of each to its key.
        fold, other_fold : callable
            ``fold(time, records, mine, theirs)`` with the bins of both: `fold` for items of this stream, then
            `other_fold` for those of the other one.
        control, bits, name
            As for `stateful_unary`, and what it raises.

        Examples
        --------
        >>> import penstock as pk
        >>> def people(time, records, names, sold):
        ...     for person, name in records:
        ...         names.state[person] = name
        ...         yield from ((name, item) for item in sold.state.get(person, []))
        >>> def sales(time, records, sold, names):
        ...     for person, item in records:
        ...         sold.state.setdefault(person, []).append(item)
        ...         if person in names.state:
        ...             yield names.state[person], item
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         (a, left), (b, right) = scope.input(), scope.input()
        ...         first = lambda pair: pair[0]
        ...         seen = left.stateful_binary(right, first, first, people, sales).collect()
        ...     if worker.index == 0:
        ...         a.send([(1, "Ada")])
        ...         b.send([(2, "lamp"), (1, "book")])
        ...         b.advance_to(1)
        ...         b.send([(1, "pen")])
        ...     return seen
        >>> sorted((time, found) for seen in pk.execute(program, workers=2) for time, block in seen for found in block)
        [(0, ('Ada', 'book')), (1, ('Ada', 'pen'))]
        """
        streams, keys, folds = [self, other], [key, other_key], [fold, other_fold]
        return Stream(stateful("stateful_binary", streams, keys, folds, control, bits, name), self.scope)

    def state_machine(
        self,
        key: Callable[[X], Any],
        fold: Callable[[Any, X, Any], tuple[Any, Iterable[Any] | None]],
        *,
        control: Stream[Any] | None = None,
        bits: int = 8,
        name: str | None = None,
    ) -> Stream[Any]:
        """Each item into the state of its key: ``fold(key, item, state) -> (state, outputs)``.

        A key without a state has None; it is forgotten when the fold returns None. Otherwise as `stateful_unary`.

        Examples
        --------
        >>> import penstock as pk
        >>> def visits(user, page, seen):
        ...     return (None, [(user, seen)]) if page == "bye" else ((seen or 0) + 1, None)
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         clicks, stream = scope.input()
        ...         pages = stream.state_machine(lambda c: c[0], lambda user, c, seen: visits(user, c[1], seen))
        ...         out = pages.collect()
        ...     if worker.index == 0:
        ...         clicks.send([("ann", "/"), ("bob", "/"), ("ann", "/a"), ("ann", "bye")])
        ...     return out
        >>> [found for seen in pk.execute(program, workers=2) for _, block in seen for found in block]
        [('ann', 2)]
        """
        folds = [machine(fold, key)]
        return Stream(stateful("state_machine", [self], [key], folds, control, bits, name), self.scope)

    def distribute(self, key: Callable[[X], Any], *, control: Stream[Any] | None = None, bits: int = 8) -> Stream[X]:
        """The same items, each on the worker that has the bin of its key at its time.

        `control` and `bits` are those of `stateful_unary`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         words, stream = scope.input()
        ...         moves, control = scope.input()
        ...         seen = stream.distribute(lambda word: word, control=control, bits=2).collect()
        ...     if worker.index == 0:
        ...         moves.send([[1, 1, 1, 1]])
        ...         words.send(["a", "b"])
        ...     moves.close()
        ...     return seen
        >>> [sorted(word for _, block in seen for word in block) for seen in pk.execute(program, workers=2)]
        [[], ['a', 'b']]
        """
        return Stream(routed(self, key, control, bits), self.scope)

    def __iter__(self) -> Iterator[X]:
        raise BlockError("a stream is a description, not data: use collect or inspect to see what is in it")

    def __repr__(self) -> str:
        return f"Stream({self.scope.path!r})"


class Bounded(Stream[X]):
    """What comes out of a bounded scope; made by `Stream.bounded`. A stream as any other, with figures."""

    __slots__ = ("_failures", "_gate")

    def __init__(
        self,
        native: _native.DataflowStream,
        scope: Place,
        gate: _native.DataflowGate,
        failures: Failures,
    ) -> None:
        super().__init__(native, scope)
        self._gate = gate
        self._failures = failures

    @property
    def failures(self) -> list[Failure]:
        """The first 100 items whose expansion raised on this worker, where ``on_failure="skip"``. See `Failure`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         out = stream.bounded(lambda items: items, expand=lambda n: [1 // n], on_failure="skip")
        ...         seen = out.collect()
        ...     numbers.send([1, 0])
        ...     numbers.close()
        ...     while worker.step_or_park():
        ...         pass
        ...     return out.failed, [(failure.item, str(failure.error)) for failure in out.failures]
        >>> pk.execute(program, workers=1)
        [(1, [(0, 'integer division or modulo by zero')])]
        """
        return self._failures.kept

    @property
    def failed(self) -> int:
        """How many items those were in all. See `failures`."""
        return self._failures.count

    def stats(self) -> BoundedStats:
        """The figures of the scope on this worker, as of now. See `Stream.bounded` for an example."""
        return BoundedStats(**self._gate.stats())
