"""A worker: one thread with its copy of every dataflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock._durations import Timeout, parse_timeout
from penstock._options import whole
from penstock.dataflow._coordination import Barrier, Sequencer
from penstock.dataflow._scope import Scope
from penstock.errors import ConfigError, DataflowError

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["Worker"]


class Worker:
    """What a program of `penstock.execute` gets: builds dataflows and steps them.

    It belongs to its thread: any other gets a `ThreadError`.
    """

    __slots__ = ("_admit", "_joined", "_native")

    def __init__(self, native: _native.DataflowWorker) -> None:
        self._native = native
        #: Lets so many join: whoever runs the workers sets it.
        self._admit: Callable[[int], None] | None = None
        self._joined = False

    @property
    def index(self) -> int:
        """Index of this worker among all workers, over all processes.

        Examples
        --------
        >>> import penstock as pk
        >>> pk.execute(lambda worker: (worker.index, worker.peers), workers=2)
        [(0, 2), (1, 2)]
        """
        return self._native.index

    @property
    def peers(self) -> int:
        """How many workers there are. For an example see `index`.

        Where workers join and leave this changes with steps: it is how many take part now.
        """
        return self._native.peers

    def bootstrap(self) -> bool:
        """Take its place among workers that join and leave: once all dataflows are built, before anything is sent.

        False at those that the run began with, for which nothing happens, and where workers are fixed. A worker that
        joins waits until it has all progress and gets data, and then stands, at each of its inputs, at the time of one
        of its peers: True. An input, barrier or sequencer that this peer had closed by then is closed here, too. The
        capabilities that its constructors of operators have got are good for nothing: logic sends with those of blocks.
        It has none of the state of other workers, though keys go to it: see `Stream.exchange`.

        Raises
        ------
        GraphError
            When it built other dataflows than its peers. They hear nothing of it.
        ClosedError
            When it comes when all dataflows are finished.
        DataflowError
            When it called this later than a minute after it was let in, and others did not wait.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...     joined = worker.bootstrap()
        ...     if not joined:
        ...         worker.admit()
        ...     while worker.peers < 2:
        ...         worker.step_or_park()
        ...     return joined
        >>> pk.execute(program, workers=1, join=1)
        [False, True]
        """
        joined = self._native.bootstrap()
        self._joined = True
        return joined

    def admit(self, count: int = 1) -> None:
        """Let workers join the run, of those that ``execute(..., join=)`` allows.

        Returns at once. Each runs the same program in a thread of its own, of a new process in a run of several, and is
        counted in `peers` when it takes part. From then on keys go to other workers than before, and state that
        operators keep of them does not go with them: see `Stream.exchange`. For an example see `bootstrap`.

        Raises
        ------
        ConfigError
            When more would join than allowed, or `count` is below 1.
        """
        more = whole(count, 1)
        if more is None:
            raise ConfigError(f"count must be an int of at least 1, got {count!r}")
        if self._admit is None:
            raise ConfigError(f"{count} more workers may not join: call execute(..., join={count}) or more")
        self._admit(more)

    def leave(self) -> None:
        """Leave the run: work off what has come, give up the inputs, and say goodbye. The others go on.

        State that stays in operators goes with this worker. Returns when it has left, or when all dataflows are
        finished. It blocks for as long as an operator of this worker holds a capability: one that waits for a time
        (`Frontiers.notify_at`) until the others have ended that time, and the initial one of an operator that keeps it
        to the end of its input until the end of the run.

        Raises
        ------
        DataflowError
            When it is the only worker, also when the others leave at the same time, or workers are fixed: nothing
            changes, and the program may go on.
        UserFunctionError, WorkerStopped, GraphError
            As `step`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...     worker.bootstrap()
        ...     if worker.index == 0:
        ...         worker.leave()
        ...     while worker.peers > 1:
        ...         worker.step_or_park()
        ...     return worker.peers
        >>> pk.execute(program, workers=2, join=1)[1]
        1
        """
        self._native.leave()

    @contextmanager
    def dataflow(self, name: str = "dataflow") -> Iterator[Scope]:
        """Build a dataflow; it starts at the end of the ``with`` block.

        All workers build the same dataflows in the same order. Those that do not are stopped with a `GraphError` that
        names the workers and the dataflow.

        Raises
        ------
        GraphError
            At the end of the block when the graph cannot run: a loop that is open or does not advance, streams of
            different scopes.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow("echo") as scope:
        ...         numbers, stream = scope.input()
        ...         seen = stream.collect()
        ...     numbers.send([1])
        ...     return seen
        >>> pk.execute(program, workers=1)
        [[(0, [1])]]
        """
        scope = Scope(self._native.open(name))
        try:
            yield scope
        except BaseException as error:
            # The others may have built theirs: without this one they would wait for ever.
            self._native.abort(error)
            raise
        self._native.start()

    def barrier(self) -> Barrier:
        """Make a rendezvous of all workers: see `Barrier`. All workers make it at the same place of their program.

        Examples
        --------
        >>> import penstock as pk
        >>> pk.execute(lambda worker: worker.barrier().wait(), workers=2)
        [1, 1]
        """
        return Barrier(self._native.barrier())

    def sequencer(self) -> Sequencer[Any]:
        """Make a log that all workers share: see `Sequencer`. All workers make it at the same place of their program.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     log = worker.sequencer()
        ...     if worker.index == 1:
        ...         log.push("hello")
        ...     return log.wait_next()
        >>> pk.execute(program, workers=2)
        ['hello', 'hello']
        """
        return Sequencer(self._native.sequencer())

    @property
    def is_congested(self) -> bool:
        """Whether more data is on its way to another process than the links should hold.

        Sending is never refused; a program that feeds faster than its peers take steps until this is over.

        Examples
        --------
        >>> import penstock as pk
        >>> pk.execute(lambda worker: worker.is_congested, workers=1)
        [False]
        """
        return self._native.is_congested

    def step(self) -> bool:
        """Do what can be done now, without waiting. True while a dataflow is unfinished.

        The interpreter lock is held only while Python logic runs.

        Raises
        ------
        UserFunctionError
            When logic of this worker raised: all workers stop.
        WorkerStopped, WorkerLost, GraphError
            When the workers were stopped otherwise; then every step raises the same.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...     before = worker.step()
        ...     numbers.close()
        ...     return before, worker.step()
        >>> pk.execute(program, workers=1)
        [(True, False)]
        """
        return self._native.step()

    def step_or_park(self, timeout: Timeout | None = None) -> bool:
        """Wait without using CPU until there is something to do, then step. True while a dataflow is unfinished.

        Parameters
        ----------
        timeout : float, str or datetime.timedelta, optional
            Seconds to wait at most; default without limit.

        Raises
        ------
        KeyboardInterrupt
            On Ctrl-C, where this is the main thread; elsewhere `execute` stops the worker: `WorkerStopped`.
        UserFunctionError, WorkerStopped, WorkerLost, GraphError
            As `step`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         probe = stream.probe()
        ...     numbers.close()
        ...     while worker.step_or_park():
        ...         pass
        ...     return probe.done()
        >>> pk.execute(program, workers=2)
        [True, True]
        """
        return self._native.step_or_park(parse_timeout(timeout, optional=True, least_s=0.0))

    def step_while(self, condition: Callable[[], Any]) -> None:
        """Step, parking when idle, as long as a condition holds. The usual one is that a probe has not passed a time.

        Raises
        ------
        DataflowError
            When all dataflows are finished and it still holds: nothing could change it.
        UserFunctionError, WorkerStopped, WorkerLost, GraphError
            As `step`.

        Examples
        --------
        >>> import penstock as pk
        >>> def program(worker):
        ...     with worker.dataflow() as scope:
        ...         numbers, stream = scope.input()
        ...         probe = stream.probe()
        ...     numbers.advance_to(1)
        ...     worker.step_while(lambda: probe.less_than(1))
        ...     return probe.frontier()
        >>> pk.execute(program, workers=2)
        [[1], [1]]
        """
        alive = True
        while condition():
            if not alive:
                raise DataflowError("all dataflows are finished and the condition of step_while still holds")
            alive = self._native.step_or_park(None)

    def __repr__(self) -> str:
        return f"Worker({self.index} of {self.peers})"
