"""Meeting points and shared order: what `Worker.barrier` and `Worker.sequencer` give."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock._durations import Timeout, parse_timeout
from penstock._options import whole
from penstock._resume import Given
from penstock.dataflow._handles import LAST
from penstock.errors import ConfigError, ThreadError

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["Barrier", "Sequencer"]

X = TypeVar("X")
D = TypeVar("D")


class Barrier:
    """A rendezvous of all workers, to be passed any number of times; made by `Worker.barrier`.

    Whoever waits steps its worker, so all its dataflows go on meanwhile. A barrier that is closed, or whose program has
    ended, counts as arrived for ever; when a worker fails, all waits end with its error.

    Examples
    --------
    >>> import penstock as pk
    >>> def program(worker):
    ...     with worker.barrier() as barrier:
    ...         return [barrier.wait() for _ in range(3)]
    >>> pk.execute(program, workers=2)
    [[1, 2, 3], [1, 2, 3]]

    Notes
    -----
    One round is one progress message from each worker to each other.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.DataflowBarrier) -> None:
        self._native = native

    def wait(self, timeout: Timeout | None = None) -> int:
        """Arrive, and wait until all other workers have arrived.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds; default without limit.

        Returns
        -------
        int
            The round that was passed: 1, 2, 3...

        Raises
        ------
        CoordinationTimeout
            When the time is over. This worker stays arrived: waiting again goes on with the same round.
        KeyboardInterrupt, UserFunctionError, WorkerStopped, WorkerLost, GraphError
            As `Worker.step_or_park`.
        ClosedError
            When the barrier is closed.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     barrier = worker.barrier()
        ...     late = worker.sequencer()
        ...     if worker.index == 0:
        ...         try:
        ...             barrier.wait(timeout=0.01)
        ...         except pk.errors.CoordinationTimeout as error:
        ...             late.push(f"round {error.round}")
        ...     print(late.wait_next()) if worker.index == 1 else None
        ...     return barrier.wait()
        >>> pk.execute(program, workers=2)
        round 1
        [1, 1]
        """
        return self._native.wait(parse_timeout(timeout, optional=True, least_s=0.0))

    def advance(self) -> int:
        """Arrive without waiting, and return the round arrived for.

        Raises
        ------
        ClosedError
            When the barrier is closed, also where a worker that joins has it from one that had closed its own.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     barrier = worker.barrier()
        ...     round = barrier.advance()
        ...     worker.step_while(lambda: not barrier.reached(round))
        ...     return round
        >>> pk.execute(program, workers=2)
        [1, 1]
        """
        return self._native.advance()

    def reached(self, round: int) -> bool:
        """Whether all workers have arrived for a round, as far as the last step has learned. See `advance`.

        Raises
        ------
        ConfigError
            When `round` is not a whole number from 0 to 2**64 - 1.
        ClosedError
            As `advance`.
        """
        asked = whole(round, 0, LAST)
        if asked is None:
            raise ConfigError(f"a round is an int from 0 to 2**64 - 1, as wait() and advance() give it, got {round!r}")
        return self._native.reached(asked)

    @property
    def round(self) -> int:
        """The last round that this worker has arrived for.

        Raises
        ------
        ClosedError
            As `advance`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     barrier = worker.barrier()
        ...     barrier.wait()
        ...     return barrier.round
        >>> pk.execute(program, workers=2)
        [1, 1]
        """
        return self._native.round

    def close(self) -> None:
        """Give it up: this worker counts as arrived for ever. Closing it again does nothing.

        Raises
        ------
        DataflowError
            In the logic of an operator, while its worker waits at this barrier.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     barrier = worker.barrier()
        ...     if worker.index == 1:
        ...         barrier.close()
        ...         return None
        ...     return [barrier.wait() for _ in range(2)]
        >>> pk.execute(program, workers=2)
        [[1, 2], None]
        """
        self._native.close()

    def __enter__(self) -> Barrier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sequencer(Generic[X]):
    """A log that every worker appends to and every worker reads in the same order; made by `Worker.sequencer`.

    The order is by counters, never by clocks: what a worker pushed comes in its order, and what is pushed after
    something was read comes after it. Elements are pickled by cloudpickle, so functions may be pushed. A worker that
    does not step holds everyone back; one that has closed its sequencer does not. The logic of operators may push, also
    while its worker waits for the next element, until its program has ended. An element whose unpickling raises is a
    `BlockError` that says whose it is; it counts as read, so a read or a loop after that goes on behind it. An
    interrupt leaves it the next one.

    Examples
    --------
    >>> import penstock as pk
    >>> def program(worker):
    ...     with worker.sequencer() as log:
    ...         log.push(f"from {worker.index}")
    ...         log.close()
    ...         return list(log)
    >>> first, second = pk.execute(program, workers=2)
    >>> first == second, sorted(first)
    (True, ['from 0', 'from 1'])
    """

    __slots__ = ("_elements", "_native")

    def __init__(self, native: _native.DataflowSequencer) -> None:
        from penstock import _native

        self._native = native
        # One for all loops: the next loop gets what an interrupt has kept from the one before.
        self._elements = _native.Handover(Given(native.wait_next, itemgetter(0)).fill, ThreadError)

    def push(self, element: X) -> None:
        """Append an element. It leaves with the next step of the worker.

        Raises
        ------
        BlockError
            When it cannot be pickled.
        ClosedError
            After `close`, and in the logic of an operator when the program has ended. At a worker that leaves
            (`Worker.leave`) once nothing can come for it any more and its operators have read what has: in logic that
            waits for a time which others have yet to end; what was pushed before is sent.
            At a worker that joined when its peer had closed its own; what it pushed before `Worker.bootstrap` stops the
            run then.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     log = worker.sequencer()
        ...     log.push("z")
        ...     log.push("a")
        ...     return log.wait_next(), log.wait_next()
        >>> pk.execute(program, workers=1)
        [('z', 'a')]
        """
        self._native.push(element)

    def next(self, default: D | None = None) -> X | D | None:
        """The next element when it is known already, else `default`. Does not step.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     log = worker.sequencer()
        ...     log.push("a")
        ...     before = log.next("nothing")
        ...     worker.step()
        ...     worker.step()
        ...     return before, log.next("nothing")
        >>> pk.execute(program, workers=1)
        [('nothing', 'a')]
        """
        found = self._native.next()
        return default if found is None else found[0]

    def wait_next(self, timeout: Timeout | None = None) -> X:
        """Step until there is a next element, and return it.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds; default without limit.

        Raises
        ------
        EOFError
            When all workers have closed and everything is read.
        BlockError
            When the element cannot be unpickled; it counts as read.
        CoordinationTimeout
            When nothing came in time.
        KeyboardInterrupt, UserFunctionError, WorkerStopped, WorkerLost, GraphError
            As `Worker.step_or_park`.

        Examples
        --------
        See `push`.
        """
        found = self._native.wait_next(parse_timeout(timeout, optional=True, least_s=0.0))
        if found is None:
            raise EOFError("all workers have closed this sequencer and everything is read")
        element: X = found[0]
        return element

    @property
    def finished(self) -> bool:
        """Whether all workers have closed and everything is read.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     log = worker.sequencer()
        ...     before = log.finished
        ...     log.close()
        ...     return before, list(log), log.finished
        >>> pk.execute(program, workers=2)
        [(False, [], True), (False, [], True)]
        """
        return self._native.finished

    def close(self) -> None:
        """End the pushing of this worker; reading goes on. Closing it again does nothing. See `Sequencer`."""
        self._native.close()

    def __iter__(self) -> Iterator[X]:
        """The elements as they come, until all workers have closed. An interrupt loses none, wherever it lands."""
        return self._elements

    def __enter__(self) -> Sequencer[X]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
