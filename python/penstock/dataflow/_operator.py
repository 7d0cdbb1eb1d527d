"""Operators with logic of their own: what `Stream.unary` and `Stream.binary` hand to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union

from penstock._coroutines import UNRUN, unrun
from penstock._functions.loop import behind
from penstock._resume import Passed
from penstock.dataflow._functions import failed
from penstock.errors import CapabilityError

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["Capability", "Frontiers", "Input", "Output", "wrap"]

#: A logical time: an int at the root, a tuple of ints, outermost first, in a nested scope.
Time = Union[int, "tuple[int, ...]"]

X = TypeVar("X")


class Capability:
    """The right to send at a time or later.

    As long as it is held nothing downstream can pass its time. It is released by `drop`, by leaving a ``with`` block,
    and when the last reference to it goes.

    Examples
    --------
    >>> import penstock as pk
    >>> def program(worker):
    ...     with worker.dataflow() as scope:
    ...         numbers, stream = scope.input()
    ...         @stream.unary
    ...         def later(capability):
    ...             capability.drop()  # this operator sends with those of its blocks only
    ...             def logic(input, output, frontiers):
    ...                 for capability, block in input:
    ...                     with capability.delayed(capability.time + 10) as later:
    ...                         output.send(later, block)
    ...             return logic
    ...         seen = later.collect()
    ...     numbers.send([1, 2])
    ...     return seen
    >>> pk.execute(program, workers=1)
    [[(10, [1, 2])]]
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.DataflowCapability) -> None:
        self._native = native

    @property
    def time(self) -> Any:
        """The earliest time at which it allows to send.

        Raises
        ------
        CapabilityError
            When it was dropped.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     times = []
        ...     with worker.dataflow() as scope:
        ...         def start(capability):
        ...             times.append(capability.time)
        ...             return lambda output: None
        ...         scope.source(start)
        ...     return times
        >>> pk.execute(program, workers=1)
        [[0]]
        """
        time = self._native.time
        if time is None:
            raise CapabilityError("this capability was dropped: whoever wants to send later keeps it")
        return time

    def delayed(self, time: Time) -> Capability:
        """A further capability, for a time at or after this one's.

        Raises
        ------
        TimeError
            When `time` is not at or after it, or not a time of this scope; nothing changes.
        CapabilityError
            When this one was dropped.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         def start(capability):
        ...             held = [capability.delayed(7)]
        ...             capability.drop()
        ...             def logic(output):
        ...                 while held:
        ...                     output.send(held.pop(), ["seven"])
        ...             return logic
        ...         seen = scope.source(start).collect()
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(7, ['seven'])]]
        """
        return Capability(self._native.delayed(time))

    def downgrade(self, time: Time) -> None:
        """Move it to a time at or after its own.

        Raises
        ------
        TimeError, CapabilityError
            As `delayed`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         def start(capability):
        ...             capability.downgrade(3)
        ...             try:
        ...                 capability.downgrade(2)
        ...             except pk.errors.TimeError as error:
        ...                 print(error.message)
        ...             return lambda output: None
        ...         scope.source(start)
        >>> pk.execute(program, workers=1)
        a capability at time 3 cannot go to 2, which is not at or after it
        [None]
        """
        self._native.downgrade(time)

    def drop(self) -> None:
        """Give it up. Dropping it again does nothing.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         def start(capability):
        ...             capability.drop()
        ...             capability.drop()
        ...             return lambda output: None
        ...         probe = scope.source(start).probe()
        ...     worker.step_while(lambda: not probe.done())
        ...     return probe.done()
        >>> pk.execute(program, workers=1)
        [True]
        """
        self._native.drop()

    def __enter__(self) -> Capability:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def __repr__(self) -> str:
        time = self._native.time
        return "Capability(dropped)" if time is None else f"Capability({time})"


class Input(Generic[X]):
    """The blocks that wait at one input of an operator.

    Iterating it takes them: each comes as ``(capability, block)``, and the block counts as read. Keep the capability
    to send at its time later; otherwise letting go of it releases it. What is left unread stays for the next run. An
    interrupt that the operator catches costs it no block: iterating again goes on with the next one.

    Examples
    --------
    See `Stream.unary`.
    """

    __slots__ = ("_blocks",)

    def __init__(self, ports: _native.DataflowPorts, index: int) -> None:
        self._blocks = Passed(partial(ports.next, index), _with_capability)

    def __iter__(self) -> Iterator[tuple[Capability, list[X]]]:
        return iter(self._blocks)


def _with_capability(found: tuple[_native.DataflowCapability, Any]) -> tuple[Capability, Any]:
    return Capability(found[0]), found[1]


class Output:
    """Where an operator sends."""

    __slots__ = ("_ports",)

    def __init__(self, ports: _native.DataflowPorts) -> None:
        self._ports = ports

    def send(self, capability: Capability, block: Any, at: Time | None = None) -> None:
        """Send one block: one message, one progress update.

        Parameters
        ----------
        capability : Capability
            Of this operator; it stays held.
        block : list or pyarrow.RecordBatch
            A list is copied (its references, not its objects). An empty block is no message.
        at : time, optional
            A later time than the capability's, to send at.

        Raises
        ------
        CapabilityError
            When the capability was dropped or is of another operator.
        TimeError
            When `at` is not at or after the capability's time.
        BlockError
            When the block is neither a list nor Arrow data.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         def start(capability):
        ...             held = [capability]
        ...             def logic(output):
        ...                 while held:
        ...                     with held.pop() as capability:
        ...                         output.send(capability, [1, 2])
        ...                         output.send(capability, [3], at=5)
        ...             return logic
        ...         seen = scope.source(start).collect()
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [1, 2]), (5, [3])]]
        """
        self._ports.send(capability._native, block, at)

    def activate(self) -> None:
        """Make this operator run again, also when nothing comes: for logic with more to do than one step should take.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         @stream.unary
        ...         def countdown(capability):
        ...             left = [3]
        ...             def logic(input, output, frontiers):
        ...                 if left[0]:
        ...                     output.send(capability, [left[0]])
        ...                     left[0] -= 1
        ...                     output.activate()
        ...                 else:
        ...                     capability.drop()
        ...             return logic
        ...         seen = countdown.collect()
        ...     numbers.close()
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [3]), (0, [2]), (0, [1])]]
        """
        self._ports.activate()


class Frontiers:
    """What may still come at the inputs of an operator, and notifications when a time is complete.

    A time is complete when nothing at or before it can come at any input, on any worker.

    Examples
    --------
    A sum per time, sent once it is complete:

    >>> import penstock as pk
    >>> def program(worker):
    ...     with worker.dataflow() as scope:
    ...         numbers, stream = scope.input()
    ...         @stream.exchange(lambda number: 0).unary
    ...         def sums(capability):
    ...             capability.drop()
    ...             totals = {}
    ...             def logic(input, output, frontiers):
    ...                 for capability, block in input:
    ...                     totals[capability.time] = totals.get(capability.time, 0) + sum(block)
    ...                     frontiers.notify_at(capability)
    ...                 for capability in frontiers.notifications():
    ...                     output.send(capability, [totals.pop(capability.time)])
    ...             return logic
    ...         seen = sums.collect()
    ...     for time in range(3):
    ...         numbers.advance_to(time)
    ...         numbers.send([time, 10])
    ...     return seen
    >>> [seen for seen in pk.execute(program, workers=2) if seen]
    [[(0, [20]), (1, [22]), (2, [24])]]
    """

    __slots__ = ("_complete", "_ports")

    def __init__(self, ports: _native.DataflowPorts) -> None:
        self._ports = ports
        self._complete = Passed(ports.notification, Capability)

    def frontier(self, input: int = 0) -> list[Time]:
        """The least times that may still come at an input; empty when it is finished.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     moves = []
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         @stream.unary
        ...         def watch(capability):
        ...             capability.drop()
        ...             return lambda input, output, frontiers: moves.append(frontiers.frontier())
        ...     numbers.advance_to(4)
        ...     worker.step()
        ...     numbers.close()
        ...     worker.step()
        ...     return moves[-2:]
        >>> pk.execute(program, workers=1)
        [[[4], []]]
        """
        return self._ports.frontier(input)

    def less_equal(self, time: Time, input: int = 0) -> bool:
        """Whether `time` may still come at an input.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         @stream.unary
        ...         def watch(capability):
        ...             def logic(input, output, frontiers):
        ...                 if frontiers.frontier() == [4]:
        ...                     print(frontiers.less_equal(3), frontiers.less_equal(4), frontiers.less_than(4))
        ...             capability.drop()
        ...             return logic
        ...     numbers.advance_to(4)
        ...     worker.step()
        >>> pk.execute(program, workers=1)
        False True False
        [None]
        """
        return self._ports.less_equal(input, time)

    def less_than(self, time: Time, input: int = 0) -> bool:
        """Whether a time before `time` may still come at an input. For an example see `less_equal`.

        Examples
        --------
        >>> Frontiers.less_than.__name__
        'less_than'
        """
        return self._ports.less_than(input, time)

    def done(self, input: int = 0) -> bool:
        """Whether nothing more comes at an input.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         @stream.unary
        ...         def last(capability):
        ...             def logic(input, output, frontiers):
        ...                 for _, block in input:
        ...                     pass
        ...                 if frontiers.done() and capability:
        ...                     output.send(capability, ["the end"])
        ...                     capability.drop()
        ...             return logic
        ...         seen = last.collect()
        ...     numbers.close()
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, ['the end'])]]
        """
        return not self._ports.frontier(input)

    def notify_at(self, capability: Capability) -> None:
        """Ask for one notification when the capability's time is complete at all inputs.

        Takes the capability: it comes back with the notification. Asking several times for one time gives one
        notification; asking again after it gives another.

        Raises
        ------
        CapabilityError
            When the capability was dropped.

        Examples
        --------
        See `Frontiers`.
        """
        self._ports.notify_at(capability._native)

    def notifications(self) -> Iterator[Capability]:
        """The capabilities of the times that are complete and were asked for, the earliest first.

        Never early, each exactly once; what the loop does not take stays for the next run. An interrupt that the
        operator catches costs it none.

        Examples
        --------
        See `Frontiers`.
        """
        return iter(self._complete)


def wrap(
    step: str, constructor: Callable[[Capability], Callable[..., Any]], inputs: int
) -> Callable[[_native.DataflowPorts, _native.DataflowCapability], Callable[[], None]]:
    """The native form of a constructor: ports and capability to a logic without arguments."""

    def construct(ports: _native.DataflowPorts, capability: _native.DataflowCapability) -> Callable[[], None]:
        arguments: tuple[Any, ...] = (*(Input[Any](ports, index) for index in range(inputs)), Output(ports))
        if inputs:
            arguments = (*arguments, Frontiers(ports))
        try:
            logic = constructor(Capability(capability))
            if not callable(logic):
                raise TypeError(f"the constructor returned {type(logic).__name__}, not the logic to run")
        except Exception as error:
            made = failed(step, constructor, error)
            raise made from behind(made, error)

        def run() -> None:
            try:
                given = logic(*arguments)
                if given is not None and given.__class__ in UNRUN:
                    raise TypeError(f"the logic {unrun(given)}")
            except Exception as error:
                made = failed(step, logic, error)
                raise made from behind(made, error)

        return run

    return construct
