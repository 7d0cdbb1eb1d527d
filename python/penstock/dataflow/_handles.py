"""What a program holds of a running dataflow: inputs, probes, the open ends of loops."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union

from penstock.dataflow._operator import Time
from penstock.errors import ClosedError

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["LAST", "Block", "InputHandle", "Loop", "Probe"]

#: The last coordinate of a time.
LAST = 2**64 - 1

#: What a stream carries: a list of objects, or a pyarrow.RecordBatch.
Block = Union["list[Any]", Any]

X = TypeVar("X")


class InputHandle(Generic[X]):
    """Feeds a stream; made by `Scope.input`.

    It holds the right to send at its current time, which nothing downstream can pass. Each worker feeds its own part.
    It is closed by `close`, at the end of a ``with`` block, when the last reference goes, and when the program ends.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.DataflowInput) -> None:
        self._native = native

    @property
    def time(self) -> Any:
        """The current time.

        Raises
        ------
        ClosedError
            When it is closed.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...     numbers.advance_to(3)
        ...     return numbers.time
        >>> pk.execute(program, workers=1)
        [3]
        """
        time = self._native.time
        if time is None:
            raise ClosedError("this input is closed: it has no time any more")
        return time

    def send(self, block: Block) -> None:
        """Send a block at the current time. It moves at the worker's next step.

        Parameters
        ----------
        block : list or pyarrow.RecordBatch
            A list is copied (its references, not its objects); a batch is shared. An empty block is no message.

        Raises
        ------
        ClosedError
            When the input is closed.
        BlockError
            When it is neither.
        SchemaError
            For Arrow data that cannot be a batch: a stream of what is no columns, text that is not UTF-8.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         seen = stream.collect()
        ...     numbers.send([1, 2])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [1, 2])]]
        """
        self._native.send(block)

    def advance_to(self, time: Time) -> None:
        """Move to a later time: nothing more comes before it.

        Raises
        ------
        TimeError
            When `time` is not at or after the current one, or not a time of this scope; nothing changes.
        ClosedError
            When the input is closed.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         probe = stream.probe()
        ...     numbers.advance_to(2)
        ...     worker.step_while(lambda: probe.less_than(2))
        ...     return probe.frontier()
        >>> pk.execute(program, workers=2)
        [[2], [2]]
        """
        self._native.advance_to(time)

    def close(self) -> None:
        """End the input. Closing it again does nothing.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...     numbers.close()
        ...     numbers.send([1])
        >>> try:
        ...     pk.execute(program, workers=1)
        ... except pk.errors.ClosedError as error:
        ...     print(error.message.splitlines()[0])
        send on an input that is closed: nothing can come after its end
        """
        self._native.close()

    def __enter__(self) -> InputHandle[X]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        time = self._native.time
        return "InputHandle(closed)" if time is None else f"InputHandle(time={time})"


class Probe:
    """A view of a stream's frontier, over all workers; made by `Stream.probe`.

    Examples
    --------
    >>> import penstock as pk
    >>> def program(worker):
    ...     with worker.dataflow() as scope:
    ...         numbers, stream = scope.input()
    ...         probe = stream.probe()
    ...     numbers.advance_to(5)
    ...     worker.step_while(lambda: probe.less_than(5))
    ...     return probe.less_than(5), probe.less_equal(5), probe.done(), probe.frontier()
    >>> pk.execute(program, workers=1)
    [(False, True, False, [5])]
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.DataflowProbe) -> None:
        self._native = native

    def less_than(self, time: Time) -> bool:
        """Whether a time before `time` may still come out of the stream.

        Raises
        ------
        TimeError
            When `time` is not a time of the stream's scope.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         probe = scope.input()[1].probe()
        ...     try:
        ...         probe.less_than((1, 0))
        ...     except pk.errors.TimeError as error:
        ...         return error.message
        >>> pk.execute(program, workers=1)
        ['(1, 0) is not a time of this scope, which is an int from 0 to 2**64 - 1']
        """
        return self._native.less_than(time)

    def less_equal(self, time: Time) -> bool:
        """Whether `time` may still come out of the stream. See `Probe` for an example.

        Raises
        ------
        TimeError
            When `time` is not a time of the stream's scope.
        """
        return self._native.less_equal(time)

    def done(self) -> bool:
        """Whether nothing more comes.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         probe = stream.probe()
        ...     before = probe.done()
        ...     numbers.close()
        ...     worker.step_while(lambda: not probe.done())
        ...     return before, probe.done()
        >>> pk.execute(program, workers=2)
        [(False, True), (False, True)]
        """
        return self._native.done()

    def frontier(self) -> list[Time]:
        """The least times that may still come; empty when nothing more comes. See `Probe` for an example."""
        return self._native.frontier()

    def __repr__(self) -> str:
        return f"Probe({self.frontier()})"


class Loop:
    """The open end of a loop, from `Scope.feedback`: `Stream.connect_loop` closes it."""

    __slots__ = ("_native",)

    def __init__(self, native: _native.DataflowLoop) -> None:
        self._native = native
