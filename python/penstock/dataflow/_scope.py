"""Building dataflows: scopes, in which streams are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from penstock._options import whole
from penstock.dataflow._functions import name_of
from penstock.dataflow._handles import LAST, InputHandle, Loop
from penstock.dataflow._operator import wrap
from penstock.dataflow._stream import Constructor, Stream
from penstock.errors import ConfigError, GraphError

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["Scope"]

X = TypeVar("X")


class Scope:
    """Where streams are made; from `Worker.dataflow` or `Scope.nested`. Open until its dataflow starts."""

    __slots__ = ("_native",)

    def __init__(self, native: _native.DataflowScope) -> None:
        self._native = native

    @property
    def depth(self) -> int:
        """How many coordinates a time has here: 1 at the root, where it is an int.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         return scope.depth, scope.nested("loop").nested("inner").depth
        >>> pk.execute(program, workers=1)
        [(1, 3)]
        """
        return self._native.depth

    @property
    def path(self) -> str:
        """Its name, after those of the scopes around it.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow("words") as scope:
        ...         return scope.nested("loop").path
        >>> pk.execute(program, workers=1)
        ['words/loop']
        """
        return self._native.path

    def input(self) -> tuple[InputHandle[Any], Stream[Any]]:
        """A stream that the program feeds, and the handle to feed it.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         seen = stream.collect()
        ...     with numbers:
        ...         numbers.send([worker.index])
        ...     return seen
        >>> pk.execute(program, workers=2)
        [[(0, [0])], [(0, [1])]]
        """
        handle, stream = self._native.input()
        return InputHandle(handle), Stream(stream, self)

    def source(self, constructor: Constructor, *, name: str | None = None) -> Stream[Any]:
        """A stream that logic of its own produces: ``constructor(capability) -> logic(output)``.

        The logic runs once when the dataflow starts, and again where it has called `Output.activate`; it sends with the
        capability and drops it when it is done. For what the program has at hand, `input` is simpler. A worker that
        joins a run cannot send with it: use `input` where workers join.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         def start(capability):
        ...             left = [2, 1]
        ...             def logic(output):
        ...                 output.send(capability, [left.pop()])
        ...                 if left:
        ...                     output.activate()
        ...                 else:
        ...                     capability.drop()
        ...             return logic
        ...         seen = scope.source(start).collect()
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [1]), (0, [2])]]
        """
        return self.operator([], constructor, name=name or f"source {name_of(constructor)}")

    def operator(
        self, inputs: Iterable[Stream[Any]], constructor: Constructor, *, name: str | None = None
    ) -> Stream[Any]:
        """An operator over any number of streams: ``constructor(capability) -> logic(*inputs, output, frontiers)``.

        Without streams it is a source, whose logic is called with `output` alone.

        What the constructor gets at a worker that joins a run is good for nothing: logic sends with the capabilities of
        blocks there. `Stream.unary` and `Stream.binary` are this for one and two; see there.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         handles, streams = zip(*(scope.input() for _ in range(3)))
        ...         def tag(capability):
        ...             capability.drop()
        ...             def logic(*ports):
        ...                 *inputs, output, frontiers = ports
        ...                 for index, input in enumerate(inputs):
        ...                     for capability, block in input:
        ...                         output.send(capability, [(index, item) for item in block])
        ...             return logic
        ...         seen = scope.operator(streams, tag).collect()
        ...     for handle in handles:
        ...         handle.send(["x"])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [(0, 'x')]), (0, [(1, 'x')]), (0, [(2, 'x')])]]
        """
        streams = list(inputs)
        name = name or name_of(constructor)
        made = self._native.operator(
            name, [stream._native for stream in streams], wrap(name, constructor, len(streams))
        )
        return Stream(made, self)

    def _opened(self, native: _native.DataflowScope) -> Scope:
        """The scope that a stream of this one has opened."""
        return Scope(native)

    def nested(self, name: str = "nested") -> Scope:
        """A scope within this one: its times have one more coordinate.

        Streams cross its border with `Stream.enter` and `Stream.leave`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         inner = scope.nested("inner")
        ...         inside = stream.enter(inner)
        ...         within, outside = inside.collect(), inside.leave(scope).collect()
        ...     numbers.advance_to(4)
        ...     numbers.send([1])
        ...     return within, outside
        >>> pk.execute(program, workers=1)
        [([((4, 0), [1])], [(4, [1])])]
        """
        return Scope(self._native.nested(name))

    def feedback(self, advance: int = 1) -> tuple[Loop, Stream[Any]]:
        """Open a loop: what `Stream.connect_loop` sends into it comes out of the stream at a later time.

        Parameters
        ----------
        advance : int, default 1
            What is added to the innermost coordinate on each way round; at least 1, or the dataflow is refused.

        Raises
        ------
        ConfigError
            When `advance` is not a whole number from 0 to 2**64 - 1.

        Notes
        -----
        A block that would come out at a time beyond 2**64 - 1 is a `TimeError`, which stops the workers.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         loop, again = scope.feedback()
        ...         seen = again.collect()
        ...         stream.concat(again).map(lambda x: x - 1).filter(lambda x: x > 0).connect_loop(loop)
        ...     numbers.send([3])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(1, [2]), (2, [1])]]
        """
        by = whole(advance, 0, LAST)
        if by is None:
            raise ConfigError(f"feedback advances times by an int from 1 to 2**64 - 1, got {advance!r}")
        loop, stream = self._native.feedback(by)
        return Loop(loop), Stream(stream, self)

    def concat(self, streams: Iterable[Stream[X]]) -> Stream[X]:
        """The blocks of several streams of this scope.

        Raises
        ------
        GraphError
            When there is none.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         (one, first), (two, second) = scope.input(), scope.input()
        ...         seen = scope.concat([first, second]).collect()
        ...     one.send(["a"])
        ...     two.send(["b"])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, ['a']), (0, ['b'])]]
        """
        several = list(streams)
        if not several:
            raise GraphError("concat got no stream: give it at least one of this scope")
        first, *others = several
        for other in others:
            first = first.concat(other)
        return first

    def __repr__(self) -> str:
        return f"Scope({self.path!r})"
