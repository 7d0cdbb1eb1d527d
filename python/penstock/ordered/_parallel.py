"""Chunks through the native pipeline: its workers call the operators, here or in worker processes.

Invariants: an operator does not raise for what a user's function did: that is a `Failure` among the values, and what
does come out of an operator as an exception ends the run; no more functions of the user's run at a time than there are
workers, although the pipeline may have more threads (the runtime would do without any if it had one, and callers of
worker processes pickle while others wait); in threads a function finds the context variables that the caller had when
the chunk was handed over, in a copy for each call, so what it sets is seen by nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock._resume import caught
from penstock.errors import ItemTimeout
from penstock.ordered._chunk import Chunk
from penstock.ordered._keyed import Keyed, Part
from penstock.ordered._operators import Operator, Stateless

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


class _Stopped(KeyboardInterrupt):
    """Raised in a thread that does not come back: the one exception that no step takes for a result."""


@dataclass
class _Hand:
    """What a worker is doing."""

    thread: int
    since: float
    number: int
    first: int
    last: int
    name: str


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
        self._hands: dict[int, _Hand | None] = {}
        self._lost = False
        self._alone = threading.Lock() if options.workers == 1 else contextlib.nullcontext()
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
            queue=options.queue,
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

        def split(chunk: Chunk) -> list[Part]:
            # Keys are made by a function, too.
            parts: list[Part] = _in_context(chunk, found, chunk)
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

        def here(worker: int, chunk: Chunk) -> Chunk:
            numbers = chunk.numbers() or (chunk.first,)
            with self._alone:
                started = time.perf_counter()
                self._hands[worker] = _Hand(threading.get_ident(), started, chunk.number, numbers[0], numbers[-1], name)
                try:
                    _in_context(chunk, operator, chunk)
                finally:
                    self._hands[worker] = None
                chunk.spent += time.perf_counter() - started
            return chunk

        def there(worker: int, chunk: Chunk) -> Chunk:
            assert pool is not None
            pool.apply(place, name, chunk, timeout)
            return chunk

        return there if pool is not None and isinstance(operator, Stateless) else here

    def _part(self, place: int, operator: Keyed) -> Callable[[int, Part], Part]:
        """Do a part of a chunk."""
        pool, timeout, name = self._pool, self._options.timeout, operator.name

        def here(worker: int, part: Part) -> Part:
            numbers = part.numbers or [part.chunk.first]
            with self._alone:
                started, thread = time.perf_counter(), threading.get_ident()
                self._hands[worker] = _Hand(thread, started, part.chunk.number, numbers[0], numbers[-1], name)
                try:
                    _in_context(part.chunk, operator.operate, part)
                finally:
                    self._hands[worker] = None
                part.spent = time.perf_counter() - started
            return part

        def there(worker: int, part: Part) -> Part:
            assert pool is not None
            pool.keyed(place, operator, part, timeout)
            return part

        return here if pool is None else there

    def pull(self, box: list[Any], wait: bool) -> None:
        """Put the next finished chunk into the box, or None: with `wait` after a nudge, or a part of the timeout."""
        if not self._counted and (threads := self._run.threads):
            # Started with the first chunk; fewer than were asked for where the system allows no more.
            if threads < self.threads:
                assert self._pool is not None
                self._pool.limit_callers(threads)
            self._counted = True
        timeout = self._options.timeout
        if not wait or timeout is None or self._pool is not None:
            caught(box, self._run.pull, None if wait else 0.0)
            return
        caught(box, self._run.pull, min(0.05, timeout / 4))
        if box[0] is None:
            # What is next in order holds all others up: it is the one to name.
            hands = [hand for hand in self._hands.values() if hand is not None]
            oldest = min(hands, key=lambda hand: hand.number, default=None)
            if oldest is not None and time.perf_counter() - oldest.since > timeout:
                self._lost = True
                where = f"item {oldest.first}"
                if oldest.last != oldest.first:
                    where = f"items {oldest.first} to {oldest.last}"
                raise ItemTimeout(
                    f"{oldest.name} did not return within {timeout} s for {where} of the input; its thread cannot be"
                    " ended, so the run is: use mode='processes' to go on behind it",
                    item=oldest.first,
                    last=oldest.last,
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
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            for hand in list(self._hands.values()):
                if hand is not None:
                    # It ends what runs Python; what waits outside of it is left behind.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(hand.thread), ctypes.py_object(_Stopped))
            if self._run.close(0.02):
                return
