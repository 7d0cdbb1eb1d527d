"""Chunks through the native pipeline: its workers call the operators, here or in worker processes.

Invariants: an operator does not raise for what a user's function did: that is a `Failure` among the values, and what
does come out of an operator as an exception ends the run; no more functions of the user's run at a time than there are
workers, although the pipeline may have more threads (the runtime would do without any if it had one, and callers of
worker processes pickle while others wait), and beside worker processes no more than that in this one; a thread that is
in a function of the user's has a `_Hand`, by which `timeout` is kept; in threads a function finds the context variables
that the caller had when the chunk was handed over, in a copy for each call, so what it sets is seen by nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock._resume import caught
from penstock.errors import ItemTimeout
from penstock.ordered._chunk import Chunk, Stays, item_of, place_of
from penstock.ordered._keyed import Keyed, KeyedFlow, Part
from penstock.ordered._operators import Operator, Stateless
from penstock.ordered._transforms import Stopped

if TYPE_CHECKING:
    from penstock.ordered._options import Options
    from penstock.ordered._processes import Pool

__all__ = ["MOST_WORKERS", "Parallel"]

#: The most threads of a native run, and so the most workers.
MOST_WORKERS = 1024
#: Chunks under way for each worker, at most.
_CHUNKS = 4
#: Seconds that threads have to end once they were interrupted.
_PATIENCE = 1.0


@dataclass
class _Hand:
    """What a thread is doing: since when, for which chunk and items (-1 is the end of the input), and in what.

    `own`: this process does it in every mode.
    """

    since: float
    number: int
    first: int
    last: int
    name: str
    own: bool


def _in_context(chunk: Chunk, call: Callable[..., Any], argument: Any) -> Any:
    """Call it with the context variables of who handed the chunk over."""
    if chunk.context is None:
        return call(argument)
    # Threads cannot share one, and parts of a chunk go to several. A copy takes the same time whatever is in it.
    return chunk.context.copy().run(call, argument)


def _as_it_is(worker: int, chunk: Chunk) -> Chunk:
    return chunk


class Parallel:
    """See `driver.Engine`.

    Parameters
    ----------
    operators : sequence of Operator
        What to do; their states live on after this.
    options : Options
        Of the run.
    pool : Pool or None
        Worker processes, for mode "processes".
    """

    def __init__(self, operators: Sequence[Operator], options: Options, pool: Pool | None) -> None:
        from penstock import _native

        self._options, self._pool = options, pool
        self._operators = operators
        #: By thread.
        self._hands: dict[int, _Hand | None] = {}
        self._lost = False
        #: What a thread holds while it is in a function of the user's, and asks for no other lock meanwhile.
        self._turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if options.workers == 1:
            self._turn = threading.Lock()
        elif pool is not None:
            self._turn = threading.Semaphore(options.workers)
        #: How many call operators.
        self.threads = options.workers + (1 if pool is None and options.workers == 1 else 0)
        if pool is not None:
            # Where parts wait for their turn there is one left to bring the part that is missing, unless chunks under
            # way have many parts.
            keyed = any(isinstance(operator, Keyed) and operator.forgets for operator in operators)
            more = (_CHUNKS - 1) * options.workers if keyed else max(1, options.workers // 2)
            self.threads += min(more, MOST_WORKERS - options.workers)
        specs = [self._spec(place, operator) for place, operator in enumerate(operators)]
        # Chunks are cut by keys where the operator before is done. Before the first that is the thread of the caller,
        # which holds the entry meanwhile: no function of users runs there, who may look at the run, or interrupt it.
        self._before = [{"kind": "stateless", "name": "to the keys", "call": _as_it_is}]
        self._before = self._before if specs[0]["kind"] == "partitioned" else []
        self._run = _native.OrderedRun(
            [*self._before, *specs],
            workers=self.threads,
            in_flight=_CHUNKS * options.workers,
            scheduler=options.scheduler,
            # Parts wait for a process in the order of their chunks, in which that of partitions does not give them.
            queue=options.queue if pool is None else "hybrid",
        )
        #: Hand a chunk of about so many bytes over, whether there is room; and end the wait of `pull`.
        self.push, self.nudge = self._run.try_push, self._run.nudge
        #: Whether the pool knows how many threads there are.
        self._counted = pool is None

    def _spec(self, place: int, operator: Operator) -> dict[str, Any]:
        if not isinstance(operator, Keyed):
            kind = "stateless" if isinstance(operator, Stateless) else "stateful"
            return {"kind": kind, "name": operator.name, "call": self._whole(place, operator)}
        part, pool = self._part(place, operator), self._pool
        found = operator.split if pool is None else functools.partial(pool.split, place, operator)
        name = f"the key of {operator.name}"

        def split(chunk: Chunk) -> list[Part]:
            if operator.key is None:
                parts: list[Part] = found(chunk)
                return parts
            with self._working(chunk, chunk.numbers(), name, own=True):
                parts = _in_context(chunk, found, chunk)
            return parts

        if operator.forgets:
            return {
                "kind": "partitioned",
                "name": operator.name,
                "partitions": operator.partitions,
                "split": split,
                "call": part,
                "merge": operator.merge,
            }

        def call(worker: int, chunk: Chunk) -> Chunk:
            return operator.merge([part(worker, one) for one in split(chunk)])

        return {"kind": "stateful", "name": operator.name, "call": call}

    def _whole(self, place: int, operator: Operator) -> Callable[[int, Chunk], Chunk]:
        """Do a whole chunk."""
        pool, timeout, name = self._pool, self._options.timeout, operator.name
        own = isinstance(operator, KeyedFlow)

        def here(worker: int, chunk: Chunk) -> Chunk:
            with self._working(chunk, chunk.numbers(), name, operator.finishes, own) as started:
                _in_context(chunk, operator, chunk)
                chunk.spent += time.perf_counter() - started
            return chunk

        def there(worker: int, chunk: Chunk) -> Chunk:
            assert pool is not None
            try:
                pool.apply(place, name, chunk, timeout)
            except Stays:
                return here(worker, chunk)
            return chunk

        return there if pool is not None and isinstance(operator, Stateless) else here

    def _part(self, place: int, operator: Keyed) -> Callable[[int, Part], Part]:
        """Do a part of a chunk."""
        pool, timeout, name = self._pool, self._options.timeout, operator.name

        def here(worker: int, part: Part) -> Part:
            with self._working(part.chunk, part.numbers, name, operator.finishes) as started:
                _in_context(part.chunk, operator.operate, part)
                part.spent = time.perf_counter() - started
            return part

        def there(worker: int, part: Part) -> Part:
            assert pool is not None
            around, part.around = (
                part.around,
                functools.partial(self._working, part.chunk, (), f"finish of {name}", own=True),
            )
            try:
                pool.keyed(place, operator, part, timeout)
            except Stays:
                part.around = around
                return here(worker, part)
            return part

        return here if pool is None else there

    @contextlib.contextmanager
    def _working(
        self, chunk: Chunk, numbers: Sequence[int], name: str, finishes: bool = False, own: bool = False
    ) -> Iterator[float]:
        """This thread is in a function of the user's, for these items; gives when it began."""
        first, last = (numbers[0], numbers[-1]) if numbers else (-1, -1)
        if finishes and chunk.final:
            last = -1
        thread = threading.get_ident()
        with self._turn:
            started = time.perf_counter()
            self._hands[thread] = _Hand(started, chunk.number, first, last, name, own)
            try:
                yield started
            finally:
                self._hands[thread] = None

    def pull(self, box: list[Any], wait: bool) -> None:
        """Put the next finished chunk into the box, or None: with `wait` after a nudge, or a part of the timeout."""
        if not self._counted and (threads := self._run.threads):
            # Started with the first chunk; fewer than were asked for where the system allows no more.
            if threads < self.threads:
                assert self._pool is not None
                self._pool.limit_callers(threads)
            self._counted = True
        timeout = self._options.timeout
        if not wait or timeout is None:
            caught(box, self._run.pull, None if wait else 0.0)
            return
        caught(box, self._run.pull, min(0.05, timeout / 4))
        if box[0] is None:
            # What is next in order holds all others up: it is the one to name.
            hands = [hand for hand in list(self._hands.values()) if hand is not None]
            oldest = min(hands, key=lambda hand: hand.number, default=None)
            if oldest is not None and time.perf_counter() - oldest.since > timeout:
                self._lost = True
                where = place_of(oldest.first, oldest.last)
                advice = "use mode='processes' to go on behind it"
                if oldest.own:
                    advice = "it is called in this process in every mode"
                raise ItemTimeout(
                    f"{oldest.name} did not return within {timeout} s for {where}; its thread cannot be ended,"
                    f" so the run is: {advice}",
                    item=item_of(oldest.first),
                    last=item_of(oldest.last),
                    step=oldest.name,
                    timeout=timeout,
                )

    def stats(self) -> list[dict[str, Any]]:
        """Counts per operator."""
        return self._run.stats()[len(self._before) :]

    def close(self, limit: float | None = None) -> None:
        """End all work: what is under way is waited for, at most `limit` seconds; then it is interrupted."""
        if self._run.close(0.0 if self._lost else limit):
            return
        flows = [operator for operator in self._operators if isinstance(operator, KeyedFlow)]
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            threads = [thread for thread, hand in list(self._hands.items()) if hand is not None]
            threads += [flow.busy for flow in flows if flow.busy is not None]
            for thread in threads:
                # It ends what runs Python; what waits outside of it is left behind.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))
            if self._run.close(0.02):
                return
        for flow in flows:
            flow.abandon()
