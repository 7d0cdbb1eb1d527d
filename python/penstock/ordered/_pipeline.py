"""`ordered_map` and `Pipeline`: what users call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from penstock import _cpus
from penstock._durations import Timeout, parse_timeout
from penstock._options import whole
from penstock._sizes import parse_bytes
from penstock.errors import ConfigError
from penstock.ordered._driver import Driver
from penstock.ordered._iterator import OrderedIterator
from penstock.ordered._operators import compile_steps
from penstock.ordered._options import Options
from penstock.ordered._parallel import MOST_WORKERS
from penstock.ordered._steps import Step, map

__all__ = ["MODES", "QUEUES", "SCHEDULERS", "Pipeline", "check_options", "default_workers", "ordered_map"]

A = TypeVar("A")
B = TypeVar("B")

MODES = ("auto", "inline", "threads", "processes")
SCHEDULERS = ("adaptive", "qst", "lip", "et", "ct")
QUEUES = ("hybrid", "partitioned")
READS = ("aside", "here")

#: The longest timeout of an item: what a socket can wait for, in milliseconds that fit into an int.
MOST_SECONDS = 2_000_000.0

#: Bytes that may be read ahead of the results.
IN_FLIGHT_BYTES = 256 << 20


def default_workers() -> int:
    """The CPUs that this code may use: those of the Spark task it runs in, else those of the process.

    Examples
    --------
    >>> default_workers() >= 1
    True
    """
    return _cpus.of_task_or_process()


def _number(value: Any, name: str, what: str, most: int) -> int:
    number = whole(value, 1, most)
    if number is None:
        raise ConfigError(f"{name} must be {what} from 1 to {most}, got {value!r}")
    return number


def _one_of(value: Any, name: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return str(value)


def check_options(
    workers: int | None,
    in_flight: int | None,
    in_flight_bytes: int | str | None,
    mode: str,
    chunk: int | None,
    timeout: Timeout | None,
    scheduler: str = "adaptive",
    queue: str = "hybrid",
    reads: str = "aside",
) -> Options:
    """What a run is asked for, with what nobody says; also for hosts that run it later and elsewhere.

    Raises
    ------
    ConfigError
        When an argument is not allowed.
    """
    count = default_workers() if workers is None else _number(workers, "workers", "a number of workers", MOST_WORKERS)
    ahead = None if in_flight is None else _number(in_flight, "in_flight", "a number of items", 1 << 40)
    most = IN_FLIGHT_BYTES
    if in_flight_bytes is not None:
        most = parse_bytes(in_flight_bytes, "in_flight_bytes")
        if not 1 <= most <= 1 << 60:
            raise ConfigError(f"in_flight_bytes must be from 1 to {1 << 60} bytes, got {in_flight_bytes!r}")
    size = None if chunk is None else _number(chunk, "chunk", "a number of items", 1 << 24)
    _one_of(mode, "mode", MODES)
    _one_of(reads, "reads", READS)
    seconds = parse_timeout(timeout, optional=True, most_s=MOST_SECONDS)
    if seconds is not None:
        if mode == "inline":
            raise ConfigError(
                "timeout= needs mode 'processes', 'threads' or 'auto': inline the function cannot be left"
            )
        size = size or 1  # the error is to name the item
    return Options(count, ahead, most, mode, size, seconds, scheduler, queue, reads)


def ordered_map(
    f: Callable[[A], B],
    xs: Iterable[A],
    *,
    workers: int | None = None,
    in_flight: int | None = None,
    in_flight_bytes: int | str | None = None,
    mode: str = "auto",
    chunk: int | None = None,
    timeout: Timeout | None = None,
    reads: str = "aside",
) -> OrderedIterator[B]:
    """``map(f, xs)`` with several workers: the same results in the same order, as an iterator.

    Parameters
    ----------
    f : callable
        ``f(item) -> result``.
    xs : iterable
        Consumed lazily, as results are taken.
    workers : int, optional
        How many; default the CPUs of the Spark task in which this runs, else those that the process may use.
    in_flight : int, optional
        At most so many items are read ahead of the results that were taken; default four chunks per worker, where a
        chunk is a few milliseconds of work at most.
    in_flight_bytes : int or str, default 256 MiB
        About how many bytes of items may be read ahead.
    mode : {"auto", "inline", "threads", "processes"}
        Where `f` runs. "auto" measures while it runs: in the caller's thread where items are cheap, in threads where
        `f` releases the interpreter lock or waits, else in worker processes. These it uses only where what `f` reads by
        name of modules (settings, registries) is there what it is here, and leaves them as soon as an item, a state or
        a result does not pickle: what was on its way there is worked on here, where `f` may be called again for items
        whose results could not come back.
    chunk : int, optional
        Items per hand-over; default as many as make a few milliseconds of work, one for dear items.
    timeout : float, str or datetime.timedelta, optional
        Seconds for one item (for one chunk, where `chunk` is given). Makes "auto" use processes, which can be ended.
        What a `Pipeline` calls in this process in every mode (functions of keys, flows with keys, and `finish` behind
        worker processes) has as long, and ends the run when it takes longer, as in threads.
    reads : {"aside", "here"}
        In which thread `xs` is read. "aside" is one of its own, so that finished results come out while `xs` is silent
        (what lies in memory, such as a list, is read where it is wanted). "here" is the one that takes results, for
        what is bound to its thread, such as a cursor of sqlite3. While `xs` is silent that thread waits for it: no
        result comes, and what was read since the last one lies in its chunk until `xs` goes on or ends, however long
        that takes. With ``mode="inline", chunk=1`` each result comes before the next item is read. An interrupt in the
        middle of `xs` ends the run: the results of what it gave come, then `Interrupted`.

    Returns
    -------
    OrderedIterator
        With `close`, `stats`, and usable in a ``with``.

    Raises
    ------
    ConfigError
        When an argument is not allowed.

    Notes
    -----
    An exception of `f` is raised where its result would have come, with a note that names the item and the function;
    the next call goes on behind it. An exception of `xs` comes after all results before it and ends the iterator.

    `ItemTimeout` takes the place of an item that took too long: in a worker process, which is replaced; in threads,
    which cannot be ended, it also ends the iterator. `ItemsLost` takes the place of the items on which a worker process
    died. With ``mode="processes"`` `NotPicklable` takes that of an item or a result that cannot travel, and
    `UserFunctionError` that of an exception that cannot.

    In threads `f` finds the context variables of who takes the results (the precision of `decimal`, for one) in a
    copy; they do not reach worker processes.
    In worker processes `f` works on copies: it cannot change what the caller sees. A function that can be imported is
    imported anew there, and finds its module as it was written, without what the program has set in it since. Scripts
    whose functions live in ``__main__`` need no guard: the children do not import it.

    Live inputs: no item waits for others to fill its chunk, and no result for the next item, unless they are read here
    (``reads="here"``).

    After an interrupt (Ctrl-C) the iterator goes on where it was, with every result once and in order. In the caller's
    thread ("inline") `f` is called again for the items that it was working on: one chunk, about a millisecond. Steps of
    a `Pipeline` that keep state cannot be called again there: the iterator then raises `Interrupted` from then on.

    Cost: below 8 µs per item it stays in the caller's thread, where a chunk costs about 5 µs and an item 0.1 µs more
    than ``map``.

    Examples
    --------
    >>> import penstock as pk
    >>> list(pk.ordered_map(lambda x: x * x, range(5), workers=2))
    [0, 1, 4, 9, 16]
    """
    if not callable(f):
        raise ConfigError(f"ordered_map({f!r}, ...): the first argument must be a function")
    options = check_options(workers, in_flight, in_flight_bytes, mode, chunk, timeout, reads=reads)
    return OrderedIterator(Driver(xs, (map(f),), options))


class Pipeline:
    """Steps that run at the same time, each on what the one before it gives, with the order of the input kept.

    Parameters
    ----------
    steps : sequence of Step
        From `penstock.ordered`: `map`, `flat_map`, `filter`, `map_batches`, `partitioned`, `stateful`, `flow`,
        `rows`, `batches`.
    scheduler : {"adaptive", "qst", "lip", "et", "ct"}
        Which operator a free worker turns to; "adaptive" picks among the others by what it measures.
    queue : {"hybrid", "partitioned"}
        How keyed work waits. (A queue shared by all keys breaks the order within a key, so there is none.) For worker
        processes it waits in the order of the input with either.

    Notes
    -----
    Values and order are those of a serial run: one item after the other through all steps, for every scheduler,
    queue, mode and number of workers. A pipeline is a value: it pickles with cloudpickle, holds no thread, and can run
    any number of times, each with states of its own.

    Examples
    --------
    >>> from penstock import ordered
    >>> def number(seen, word):
    ...     return seen + 1, [f"{word}{seen}"]
    >>> pipeline = ordered.Pipeline([
    ...     ordered.flat_map(str.split),
    ...     ordered.filter(str.isalpha),
    ...     ordered.partitioned(number, key=lambda word: word, initial=0),
    ... ])
    >>> list(pipeline.run(["a b 1", "b a"]))
    ['a0', 'b0', 'b1', 'a1']
    """

    __slots__ = ("_queue", "_scheduler", "_steps")

    def __init__(self, steps: Sequence[Step], *, scheduler: str = "adaptive", queue: str = "hybrid") -> None:
        if not isinstance(steps, Iterable):
            raise ConfigError(f"Pipeline({steps!r:.80}): give a list of steps from penstock.ordered")
        found = tuple(steps)
        for position, step in enumerate(found):
            if not isinstance(step, Step):
                raise ConfigError(
                    f"step {position} of the pipeline is {step!r:.80}: it must come from penstock.ordered, such as"
                    " ordered.map(f)"
                )
        if not found:
            raise ConfigError("a pipeline needs at least one step")
        self._steps = found
        self._scheduler = _one_of(scheduler, "scheduler", SCHEDULERS)
        if queue == "shared":
            raise ConfigError(
                "queue='shared' breaks the order within a key: two workers may take neighbouring items of a key and"
                " then race for its state; use 'hybrid' or 'partitioned'"
            )
        self._queue = _one_of(queue, "queue", QUEUES)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order. See `Pipeline`."""
        return self._steps

    @property
    def scheduler(self) -> str:
        """Which scheduler a run uses. See `Pipeline`."""
        return self._scheduler

    @property
    def queue(self) -> str:
        """Which queues a run uses. See `Pipeline`."""
        return self._queue

    def run(
        self,
        xs: Iterable[Any],
        *,
        workers: int | None = None,
        in_flight: int | None = None,
        in_flight_bytes: int | str | None = None,
        mode: str = "auto",
        chunk: int | None = None,
        timeout: Timeout | None = None,
        reads: str = "aside",
    ) -> OrderedIterator[Any]:
        """Run over an input; parameters as for `penstock.ordered_map`.

        Returns
        -------
        OrderedIterator
            The outputs of the last step.

        Raises
        ------
        ConfigError
            When an argument is not allowed.

        Examples
        --------
        >>> from penstock import ordered
        >>> pipeline = ordered.Pipeline([ordered.map(abs), ordered.filter(lambda x: x > 1)])
        >>> list(pipeline.run([-1, -2, 3], workers=2, in_flight=8))
        [2, 3]
        """
        options = check_options(
            workers, in_flight, in_flight_bytes, mode, chunk, timeout, self._scheduler, self._queue, reads
        )
        return OrderedIterator(Driver(xs, self._steps, options))

    def explain(self) -> str:
        """The operators that run, one a line: neighbouring stateless steps are one.

        Examples
        --------
        >>> from penstock import ordered
        >>> print(ordered.Pipeline([ordered.map(abs), ordered.filter(bool)]).explain())
        0 stateless: map abs + filter bool
        """
        lines = []
        for place, operator in enumerate(compile_steps(self._steps)):
            kind = "stateless" if not operator.partitions else "stateful" if operator.partitions == 1 else "partitioned"
            lines.append(f"{place} {kind}: {operator.name}")
        return "\n".join(lines)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pipeline):
            return NotImplemented
        return (self._steps, self._scheduler, self._queue) == (other._steps, other._scheduler, other._queue)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self._steps, self._scheduler, self._queue))

    def __repr__(self) -> str:
        names = ", ".join(step.name for step in self._steps)
        return f"Pipeline([{names}], scheduler={self._scheduler!r}, queue={self._queue!r})"


def _restore(steps: tuple[Step, ...], scheduler: str, queue: str) -> Pipeline:
    return Pipeline(steps, scheduler=scheduler, queue=queue)
