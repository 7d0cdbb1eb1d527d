"""Native half of penstock. Import `penstock`, not this module.

Every class is a frozen handle that refuses pickling. Handles with threads, sockets or live state (`LocalRun`,
`InlineRun`, `GraphSearch`, `Nexmark`, `Registry`, `Member`, `Feed`, `Drain`, all of `Dataflow...`) belong to the
process that made them and raise `ForkError` in a forked child; `RecordBatch` and `Schema` are plain data and stay
usable. Long calls release the interpreter lock and serve signals at least every 20 ms. "Arrow data" is any object with
``__arrow_c_array__`` or ``__arrow_c_stream__``: a pyarrow RecordBatch or Table, a polars or pandas frame; it is never
copied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypedDict, final

from typing_extensions import CapsuleType, Self

class _ArrowArray(Protocol):
    def __arrow_c_array__(self, requested_schema: Any | None = None) -> tuple[Any, Any]: ...

class _ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: Any | None = None) -> Any: ...

_ArrowData = _ArrowArray | _ArrowStream

class _PlanPiece(TypedDict, total=False):
    source: int
    operator: int
    inputs: list[Schema]
    output: Schema
    end: tuple[int, int] | None

class _PlanFacts(TypedDict):
    event_time: str | None
    output_schema: Schema
    needs_order: bool
    pieces: list[_PlanPiece]
    late_outputs: list[tuple[str, Schema]]
    side_outputs: list[tuple[str, Schema]]
    beside_schema: Schema
    operators: list[dict[str, Any]]
    explain: str
    dot: str

class _StepReport(TypedDict):
    epoch: int
    step: int
    bins: int
    started_ns: int
    ended_ns: int
    paused_ns: int

class _MigrationReport(TypedDict):
    moved: int
    bytes: int
    steps: list[_StepReport]

def profile() -> str:
    """How it was built, by Cargo.toml's profiles: "release"; "setup", a quick build; "dev", slow."""

def checkpoint_columns(columns: str) -> tuple[Schema, Schema, bool]:
    """By the ``columns`` of an operator: columns of its rows and of its keys, and whether a function keeps its values.

    Raises
    ------
    StateError
        When a newer release wrote them.
    """

def checkpoint_manifests(files: Sequence[tuple[str, bytes]]) -> str:
    """What manifests (name, bytes) say, as JSON.

    Returns
    -------
    str
        ``{"manifests": {name: {...}}, "damaged": {name: reason}, "serving": {batch: name}, "hidden": {batch: name}}``;
        a batch that nothing serves, since a manifest of it is damaged, has none in ``serving`` and that one in
        ``hidden``.
    """

def graph_clique(relation: str, size: int) -> tuple[str, list[str]]:
    """The pattern of cliques, and the order to bind its variables in."""

def graph_pattern(text: str) -> tuple[list[str], list[str]]:
    """Relations and columns of a pattern, which is checked as far as that needs no data.

    Raises
    ------
    PatternError
        With ``place``, a character of the text.
    """

def pause_at_end() -> None:
    """For loops that wait: keep a thread here for good once another one ends the interpreter."""

def is_ending() -> bool:
    """Whether the interpreter ends, and threads that are started now would come to nothing."""

def version() -> str:
    """Version of penstock, as in the package metadata."""

def tokenize(text: bytes | bytearray | _ArrowArray) -> RecordBatch:
    """The words of a text, in order, as one column `word`.

    A word is a maximal run of the bytes ``A-Z a-z``, lower-cased; every other byte separates, also each byte of a
    letter outside ASCII.

    Parameters
    ----------
    text
        The bytes, or an Arrow array of strings or binaries: each value is a text of its own, nulls are empty.

    Raises
    ------
    ValueError
        When the text is longer than 2 GiB.
    TypeError
        When it is neither.

    Notes
    -----
    About a nanosecond per byte; other Python threads run meanwhile.

    Examples
    --------
    >>> import pyarrow as pa
    >>> pa.record_batch(tokenize(b"Don't panic"))["word"].to_pylist()
    ['don', 't', 'panic']
    """

def hash_keys(keys: list[Any]) -> list[int]:
    """The 64-bit hash of each key, as exchanges of lists have it.

    Raises
    ------
    TypeError
        When a key has no stable form.
    """

def hash_columns(batch: _ArrowData, columns: Sequence[str]) -> RecordBatch:
    """The 64-bit hash of each row over `columns`, as one uint64 column `hash`.

    Part of the format: equal on every machine and in every release.

    Raises
    ------
    SchemaError
        When a column does not exist or has a type that cannot be a key.
    """

def plan_check(plan: str) -> _PlanFacts:
    """Compile a plan (JSON, see `Flow.to_plan`) and tell about it.

    Returns
    -------
    dict
        ``output_schema`` (a handle), ``needs_order`` (results depend on input order), ``pieces`` (the parts that its
        exchanges cut it into: the number of the ``source`` or ``operator`` that each begins with, its columns as
        ``inputs`` by side of that operator and ``output``, and as ``end`` the operator and side that rows go to, None
        for the output; those that lead to an operator stand before those that begin with it), ``late_outputs`` (the
        kinds of late rows, by name, with their columns), ``side_outputs`` (by name,
        with their columns), ``beside_schema`` (the columns of both: those of the
        only kind, or a struct for each of several), ``operators`` (the steps that keep state, as
        manifests name them: ``name``, ``kind``, ``types``, ``version``, ``columns``; with a function also the number of
        its ``call``), ``explain`` (text for people) and ``dot`` (the same as a drawing, for Graphviz).

    Raises
    ------
    PlanError, SchemaError
        When it does not compile.
    """

def plan_narrowed(plan: str, late: bool) -> tuple[str, list[Schema]]:
    """Leave out of the sources of a plan the columns that nothing in it reads.

    Parameters
    ----------
    plan : str
        As for `plan_check`.
    late : bool
        Whether somebody takes late rows, which are whole.

    Returns
    -------
    plan : str
        With the same output and state.
    read : list of Schema
        The columns that are left of each source, at least one.

    Raises
    ------
    PlanError, SchemaError
        When it does not compile.
    """

def balanced_owners(owners: Sequence[int], workers: int) -> list[int]:
    """Owners with equal shares, up to one bin, that differ from these in as few bins as possible."""

def evened_owners(owners: Sequence[int], loads: Sequence[int], workers: int, tolerance: float) -> list[int]:
    """Owners by which no worker has more than `tolerance` times the mean load, where bins allow it.

    Raises
    ------
    ConfigError
        When there is not a load for each bin.
    """

class _BalanceVerdict(TypedDict):
    skew: float
    expected: float
    moves: list[tuple[tuple[int, int], int]]
    splits: list[tuple[tuple[int, int], int]]
    merges: list[tuple[int, int]]
    why: str

class Balancer:
    """Says when bins are worth moving, splitting and merging; see the crate `balance`.

    Parameters
    ----------
    trigger, tolerance
        Multiples of the mean load of a worker: above which bins move, and to which.
    patience
        Looks in a row that must show it.
    least_rows
        A look with fewer rows says nothing of loads.
    most_bytes
        Of state that a bin may hold; None for any.
    bits
        Of a bin; parts have more.
    """

    def __new__(
        cls, trigger: float, tolerance: float, patience: int, least_rows: int, most_bytes: int | None, bits: int
    ) -> Balancer: ...
    def look(
        self,
        bins: Sequence[tuple[int, int]],
        owners: Sequence[int],
        loads: tuple[Sequence[int], int],
        bytes: Sequence[int | None],
        workers: int,
    ) -> _BalanceVerdict:
        """Judge the load of each bin and part, (prefix, bits), since the last look, and the bytes that it holds.

        With the loads come the rows that there were in that time. Bytes that are not known are None.

        Raises
        ------
        ConfigError
            When there are not loads and bytes for each bin, or there can be no such bin.
        """

class Sizer:
    """Says how many workers the rates that come need, and when to change their number.

    Parameters
    ----------
    least, most
        Workers.
    threads
        Of each worker.
    busy
        Share of its time that a worker is to be busy.
    patience
        Looks in a row that must ask for more; three times as many for fewer.
    """

    def __new__(cls, least: int, most: int, threads: int, busy: float, patience: int) -> Sizer: ...
    def load(self, offered: float, rows: int, busy_s: float) -> float | None:
        """Workers that one query keeps busy; None while nothing was measured.

        Parameters
        ----------
        offered
            Rows per second that came.
        rows, busy_s
            Rows that were processed, and seconds that threads took for them, summed over threads.
        """
    def look(self, workers: int, loads: list[float | None]) -> tuple[float, int, int, int] | None:
        """Judge the workers that each query keeps busy; None while none was measured.

        Returns
        -------
        (float, int, int, int)
            Workers that are busy, that are needed, to go to, and the looks before that; 0 when it is time.
        """

class Trial:
    """Two variants in alternating periods: which one is faster here and now; see the crate `trial`.

    Parameters
    ----------
    wins, losses
        Pairs that the challenger has to win, and with which it has lost.
    gain
        By how much it must be faster in sum: 0.05 is 5 %. Below 0: by how much it may be slower.
    sweep
        Who wins the first so many pairs, each by the factor, has won at once.

    Raises
    ------
    ConfigError
        When it would decide nothing.
    """

    def __new__(cls, *, wins: int, losses: int, gain: float, sweep: tuple[int, float] | None = None) -> Trial: ...
    def turn(self) -> Literal["incumbent", "challenger"]:
        """Who is served in this period: first the one that stays unless the other proves better."""

    def judge(self, rate: float, spent: float) -> Literal["incumbent", "challenger"] | None:
        """Take in a period of the one whose turn it was; the winner, if that decides.

        Parameters
        ----------
        rate
            How much per time it got done, in any unit.
        spent
            Seconds for which it was served in all, with what was not measured.
        """

    def is_hopeless(self, at_most: float) -> bool:
        """Whether the challenger, in its period, cannot reach what it has to, being at most so fast."""

    def give_up(self, at_most: float, spent: float) -> Literal["incumbent"]:
        """End the trial in a period of a challenger that is hopeless."""

    def lost(self) -> float:
        """Seconds that were lost beside the faster one in the pairs so far."""

class Allowance:
    """What trials may lose, as a share of the time: 0.05 is 5 %; see the crate `trial`.

    Raises
    ------
    ConfigError
        When the share is not above 0.
    """

    def __new__(cls, share: float) -> Allowance: ...
    def spend(self, now: float, lost: float) -> None:
        """A trial has ended and lost so many seconds."""

    def allows(self, now: float, dearer: float = 1.0) -> bool:
        """Whether a trial may begin now that is expected to lose what the last ones did times `dearer`."""

def migration_steps(
    owners: Sequence[int], target: Sequence[int], strategy: str, batch_bins: int
) -> list[list[tuple[int, int]]]:
    """Cut the way from one assignment of bins to workers to another into steps of moves.

    Parameters
    ----------
    owners, target
        Worker of each bin before and after; ``2**k`` entries each.
    strategy
        "all-at-once" (one step), "batched" (`batch_bins` moves a step), "fluid" (one move a step) or "matched" (each
        worker sends to at most one other and receives from at most one, `batch_bins` moves).
    batch_bins
        Moves per step of "batched", and of a pair of "matched", at least 1.

    Returns
    -------
    list of list of (int, int)
        Steps of (bin, worker); the next begins when the one before is complete.

    Raises
    ------
    ConfigError
        For an unknown strategy, steps of no bins, or assignments of different or odd lengths.

    Notes
    -----
    Source: Megaphone, section 3.3.
    """

def exchange_hashes(plan: str, piece: int, batch: _ArrowData) -> RecordBatch:
    """Hash of the key of each row that leaves a piece, as one int64 column `hash` (the bits of the hash).

    Parameters
    ----------
    piece
        Place in ``plan_check(plan)["pieces"]``.
    batch
        Output of that piece.

    Raises
    ------
    ValueError
        When there is no such piece, or its rows leave the flow.
    SchemaError
        When the batch does not have the columns that leave the piece.
    KeyNullError
        When a key is null and the plan rejects that.
    """

def max_event_time(plan: str, batch: _ArrowData, source: int = 0) -> int | None:
    """Greatest event time of a batch of a source, in microseconds since 1970; None without rows or event time.

    Raises
    ------
    ValueError
        When the plan has no source of that number.
    """

# The dataflow layer. Its handles belong to the thread of their worker: any other gets a ThreadError, and after the
# worker's end a ClosedError. What they are for is documented in penstock.dataflow, which wraps them.

_Time = int | tuple[int, ...]

def dataflow_join(
    process: int, doors: Sequence[tuple[int, str]], key: bytes, group: str, timeout: float | None
) -> DataflowSeats | None:
    """Connect a process that joins a run with those of it whose doors are given by process; None when all have left.

    Raises
    ------
    AuthenticationError, ProtocolError, WorkerLost
        When a process has another key, belongs to another run, or does not answer.
    """

def dataflow_alone(threads: int, joinable: bool = False) -> DataflowSeats:
    """Seats for `threads` workers of this process, without others.

    Raises
    ------
    ConfigError
        When `threads` is out of range.
    """

@final
class DataflowListener:
    """A listener for one run of several processes, on loopback unless told otherwise."""

    def __new__(cls, host: str, port: int) -> DataflowListener: ...
    @property
    def address(self) -> str:
        """Where it listens, as ``host:port``."""

    def connect(
        self,
        process: int,
        addresses: Sequence[str],
        key: bytes,
        threads: int,
        group: str,
        timeout: float | None,
        joinable: bool = False,
    ) -> DataflowSeats:
        """Connect with all other processes and prove the key both ways; uses the listener up.

        Raises
        ------
        AuthenticationError, ProtocolError, WorkerLost, ConfigError
            When a process has another key, belongs to another run, does not come, or the arguments do not fit.
        """

    def welcome(self, seats: DataflowSeats, key: bytes, group: str) -> None:
        """Take in processes that join the run of these seats, until those are closed; uses the listener up."""

    def close(self) -> None:
        """Stop listening. Again: nothing."""

@final
class DataflowSeats:
    """The workers' places of one process in a run."""

    @property
    def process(self) -> int:
        """Index of this process."""

    @property
    def processes(self) -> int:
        """How many processes there are."""

    @property
    def threads(self) -> int:
        """Workers of each process."""

    def admit(self) -> tuple[int, int] | None:
        """Wait for the place of one worker more: its seat and its index. None when all dataflows are finished.

        Raises
        ------
        ValueError
            When the seats are for fixed workers.
        WorkerStopped
            When the run has failed.
        """

    def worker(self, thread: int, main: bool) -> DataflowWorker:
        """Make the calling thread the worker on a seat; `main`: it is the thread that hears signals.

        Raises
        ------
        ValueError
            When the seat is taken or does not exist.
        """

    def heard(self, index: int) -> bool:
        """Whether the program of a worker here was told that the run has ended: it unwinds by itself."""

    def stop(self, reason: str) -> None:
        """Stop all workers of the run, here and in the other processes: their next step raises. From any thread."""

    def close(self) -> None:
        """Leave the run, after its workers have ended. Again: nothing."""

@final
class DataflowWorker:
    """One worker, bound to the thread that made it."""

    @property
    def index(self) -> int:
        """Index of this worker among all workers."""

    @property
    def peers(self) -> int:
        """How many workers there were after the last step."""

    def bootstrap(self) -> bool:
        """Take its place, once all dataflows are built: True at a worker that joins a run, which waits for it.

        Raises
        ------
        ClosedError
            When it comes when all dataflows are finished.
        GraphError
            When it built other dataflows than its peers.
        """

    def leave(self) -> None:
        """Leave the run; its dataflows are gone then.

        Raises
        ------
        DataflowError
            When it is the only worker, or workers are fixed.
        """

    def open(self, name: str) -> DataflowScope:
        """Begin a dataflow; `start` ends it."""

    def start(self) -> None:
        """Start the dataflow that was begun.

        Raises
        ------
        GraphError
            When it cannot run, or a worker that has ended built another.
        """

    def barrier(self) -> DataflowBarrier:
        """A rendezvous of all workers."""

    def sequencer(self) -> DataflowSequencer:
        """One order of what all workers push."""

    @property
    def is_congested(self) -> bool:
        """Whether more data waits for other processes than their links should hold."""

    def step(self) -> bool:
        """Do what can be done now. True while a dataflow is unfinished."""

    def step_or_park(self, timeout: float | None = None) -> bool:
        """Park while there is nothing to do, for at most `timeout` seconds, then step."""

    def finish(self) -> None:
        """End the program: close its inputs, tell the other workers, step until all is finished everywhere."""

    def abort(self, exception: BaseException) -> None:
        """Stop this worker and all its peers, because its program raised this exception."""

    def close(self) -> None:
        """Drop the worker and everything that belongs to it. Again: nothing."""

@final
class DataflowBarrier:
    """A rendezvous of all workers."""

    @property
    def round(self) -> int:
        """The last round that this worker has arrived for."""

    def wait(self, timeout: float | None = None) -> int:
        """Arrive and wait for all others; the round that was passed."""

    def advance(self) -> int:
        """Arrive without waiting; the round arrived for."""

    def reached(self, round: int) -> bool:
        """Whether all workers have arrived for a round, as far as the last step has learned."""

    def close(self) -> None:
        """Give it up: this worker counts as arrived for ever. Again: nothing."""

@final
class DataflowSequencer:
    """One order of what all workers push."""

    @property
    def finished(self) -> bool:
        """Whether all workers have closed and everything is read."""

    def push(self, element: Any) -> None:
        """Add an element; it leaves with the worker's next step."""

    def next(self) -> tuple[Any] | None:
        """The next element as a tuple of one, when it is known already; does not step."""

    def wait_next(self, timeout: float | None = None) -> tuple[Any] | None:
        """Wait for the next element; None when all workers have closed and everything is read."""

    def close(self) -> None:
        """End the pushing of this worker; reading goes on. Again: nothing."""

@final
class DataflowScope:
    """A scope of a dataflow that is being built."""

    @property
    def depth(self) -> int:
        """How many coordinates a time has here."""

    @property
    def path(self) -> str:
        """The name of the scope, after those around it."""

    @property
    def peers(self) -> int:
        """How many workers there are."""

    @property
    def joinable(self) -> bool:
        """Whether workers may join and leave the run."""

    @property
    def index(self) -> int:
        """The number of this one."""

    def input(self) -> tuple[DataflowInput, DataflowStream]:
        """A stream that the program feeds, and the handle to feed it."""

    def nested(self, name: str) -> DataflowScope:
        """A scope within this one."""

    def feedback(self, advance: int) -> tuple[DataflowLoop, DataflowStream]:
        """Open a loop whose blocks come back with the innermost coordinate advanced by `advance`."""

    def operator(
        self,
        name: str,
        inputs: Sequence[DataflowStream],
        constructor: Callable[[DataflowPorts, DataflowCapability], Callable[[], None]],
    ) -> DataflowStream:
        """An operator with one output: ``constructor(ports, capability)`` gives its logic."""

@final
class DataflowStream:
    """The blocks that one output sends, on this worker."""

    def apply(
        self,
        name: str,
        call: Callable[..., Any],
        timed: bool,
        refused: Callable[[Exception], Exception] | None = None,
    ) -> DataflowStream:
        """Each block through ``call(block)``; with `timed`, ``call(time, block)`` only looks on. `refused` makes the
        error of what is no block."""

    def concat(self, other: DataflowStream) -> DataflowStream:
        """The blocks of this and another stream."""

    def exchange_keys(
        self, name: str, keys: Callable[[Any], list[Any]], refused: Callable[[Exception], Exception]
    ) -> DataflowStream:
        """Items to the worker that the hash of their key names; `refused` makes the error of a key without one."""

    def exchange_columns(self, name: str, columns: Sequence[str]) -> DataflowStream:
        """Rows to the worker that the hash of these columns names."""

    def exchange_owners(self, name: str) -> DataflowStream:
        """Items that are tuples, each to the worker whose number it begins with."""

    def broadcast(self, name: str) -> DataflowStream:
        """Every block to every worker."""

    def probe(self, wake: DataflowPorts | None = None) -> DataflowProbe:
        """A view of this stream's frontier."""

    def enter(self, inner: DataflowScope) -> DataflowStream:
        """This stream in a scope nested in its own."""

    def leave(self, outer: DataflowScope) -> DataflowStream:
        """This stream in the scope around its own."""

    def bounded(
        self,
        name: str,
        batches: int | None,
        batch_size: int | None,
        memory: int | None,
        begin: Callable[[Any], tuple[Callable[[int], tuple[list[Any], int]], int]] | None,
    ) -> tuple[DataflowScope, DataflowStream, DataflowGate]:
        """Open a bounded scope behind this stream; ``begin(block)`` gives the lazy expansion of a block."""

    def close_bounded(self, gate: DataflowGate, outer: DataflowScope) -> DataflowStream:
        """This stream behind the bounded scope that it closes."""

    def connect_loop(self, feedback: DataflowLoop) -> None:
        """Feed a loop of this scope."""

@final
class CheckpointFiles:
    """Data files of one manifest, oldest first, opened.

    Parameters
    ----------
    files : sequence of (str, int, int, callable)
        Name, length, CRC-32 of all of it, and ``read(offset, length)`` that returns bytes.

    Raises
    ------
    StorageError
        When one is damaged or of a newer release; it names the file. What ``read`` raises goes on as it is.
    """

    def __new__(cls, files: Sequence[tuple[str, int, int, Callable[[int, int], bytes]]]) -> CheckpointFiles: ...
    def segments(self) -> list[tuple[str, str, int, int, bool, int]]:
        """What they hold, in order: file, operator, prefix and length of the range, whether it is a base, bytes."""

    def ranges(self, operator: str) -> list[tuple[int, int]]:
        """The ranges (prefix, length) of an operator: disjoint, and together all of its state.

        Whoever asks is about to read them all: what lies together in a file is read at once then.
        """

    def rows(self, operator: str, columns: str, prefix: int, length: int) -> list[RecordBatch]:
        """Rows of a range of an operator that has these ``columns``; of a function ``key`` and ``value`` as bytes."""

@final
class DataflowGate:
    """The end of a bounded scope, and its figures on this worker."""

    def stats(self) -> dict[str, Any]:
        """The figures of the scope on this worker."""

@final
class DataflowLoop:
    """The open end of a loop."""

@final
class DataflowInput:
    """Feeds a stream."""

    @property
    def time(self) -> Any:
        """The current time; None when it is closed."""

    def send(self, block: Any) -> None:
        """Send a block at the current time."""

    def advance_to(self, time: _Time) -> None:
        """Move to a later time: nothing more comes before it."""

    def close(self) -> None:
        """End the input. Again: nothing."""

@final
class DataflowProbe:
    """A view of a stream's frontier, over all workers."""

    def less_than(self, time: _Time) -> bool:
        """Whether a time before this one may still come."""

    def less_equal(self, time: _Time) -> bool:
        """Whether this time may still come."""

    def done(self) -> bool:
        """Whether nothing more comes."""

    def frontier(self) -> list[_Time]:
        """The least times that may still come."""

@final
class DataflowCapability:
    """The right to send at a time or later."""

    @property
    def time(self) -> Any:
        """The earliest time at which it allows to send; None when it was dropped."""

    def delayed(self, time: _Time) -> DataflowCapability:
        """A further capability, for a time in advance of this one's."""

    def downgrade(self, time: _Time) -> None:
        """Move it to a time in advance of its own."""

    def drop(self) -> None:
        """Give it up. Again: nothing."""

@final
class DataflowPorts:
    """What the logic of one operator reads from, sends to and waits for."""

    def next(self, input: int) -> tuple[DataflowCapability, Any] | None:
        """The next block of an input with its capability; None when there is none now."""

    def send(self, capability: DataflowCapability, block: Any, at: _Time | None = None) -> None:
        """Send a block with a capability, at its time or the later one `at`."""

    def frontier(self, input: int) -> list[_Time]:
        """The least times that may still come at an input."""

    def less_equal(self, input: int, time: _Time) -> bool:
        """Whether this time may still come at an input."""

    def less_than(self, input: int, time: _Time) -> bool:
        """Whether a time before this one may still come at an input."""

    def notify_at(self, capability: DataflowCapability) -> None:
        """Ask for one notification when the capability's time is complete at all inputs; takes the capability."""

    def notification(self) -> DataflowCapability | None:
        """The capability of the earliest time that was asked for and is complete; None when there is none now."""

    def activate(self) -> None:
        """Make the logic run again in the current or the next step."""

@final
class RecordBatch:
    """A batch of rows, handed to Arrow consumers without copying: ``pyarrow.record_batch(handle)``.

    Parameters
    ----------
    data
        Arrow data; a stream of several batches (a table) becomes one batch, which copies.

    Raises
    ------
    TypeError
        When it is no Arrow data, or an array that is no struct.
    SchemaError
        When it cannot be used: null rows, a type that the native side does not know.
    """

    def __new__(cls, data: _ArrowData) -> Self: ...
    @property
    def num_rows(self) -> int:
        """How many rows the batch has."""

    @property
    def num_columns(self) -> int:
        """How many columns the batch has."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the batch keeps alive."""

    @property
    def schema(self) -> Schema:
        """Names and types of the columns."""

    def __len__(self) -> int: ...
    def __arrow_c_schema__(self) -> CapsuleType:
        """The schema as an Arrow C schema capsule."""

    def __arrow_c_array__(self, requested_schema: Any | None = None) -> tuple[CapsuleType, CapsuleType]:
        """The batch as a pair of Arrow C capsules (schema, array); `requested_schema` is only a wish."""

@final
class Schema:
    """Names and types of columns, handed to Arrow consumers: ``pyarrow.schema(handle)``.

    Parameters
    ----------
    data
        Any object with ``__arrow_c_schema__``.
    """

    def __new__(cls, data: Any) -> Self: ...
    @property
    def names(self) -> list[str]:
        """Column names, in order."""

    def __len__(self) -> int: ...
    def __arrow_c_schema__(self) -> CapsuleType:
        """The schema as an Arrow C schema capsule."""

@final
class Nexmark:
    """NEXMark events in arrival order, as record batches.

    Deterministic: an event depends on its number and the rate only, so any slice can be made anywhere. Of each 50
    events one is a person, three are auctions, 46 are bids. Event ``n`` has the time ``base_time_ms`` plus exactly
    ``1000 n / events_per_second`` ms, rounded.

    Parameters
    ----------
    events_per_second
        1 to 10 million.
    base_time_ms
        Time of event 0, ms since 1970; default 2015-07-15 00:00 UTC.
    start, stop, step
        Positions in arrival order, as in `range`: worker ``w`` of ``n`` takes ``start=w, step=n``.
    out_of_order
        Every group of so many events arrives in a fixed scrambled order; 1 keeps the order of time.

    Raises
    ------
    ValueError
        When an argument is out of range.

    Notes
    -----
    About a microsecond per event.
    """

    def __new__(
        cls,
        events_per_second: int = 250,
        base_time_ms: int = 1436918400000,
        *,
        start: int = 0,
        stop: int | None = None,
        step: int = 1,
        out_of_order: int = 1,
    ) -> Self: ...
    @property
    def position(self) -> int:
        """Position of the next event in arrival order."""

    def next_batches(self, n: int, tables: Sequence[str] | None = None) -> dict[str, RecordBatch]:
        """The next `n` events as ``{"person": batch, "auction": batch, "bid": batch}``; fewer at `stop`.

        Parameters
        ----------
        n
            Events, over all tables; at most 100 million.
        tables
            Which tables to make; the events of the others are passed over.

        Returns
        -------
        dict
            person: seq, id, name, email_address, credit_card, city, state, date_time, extra; auction: seq, id,
            item_name, description, initial_bid, reserve, date_time, expires, seller, category, extra; bid: seq,
            auction, bidder, price, channel, url, date_time, extra. Strings, else int64; times in ms since 1970; `seq`
            is the position in arrival order.
        """

@final
class FlowCrew:
    """Workers of this process that join the run of a flow which another process feeds, compute, and leave.

    Parameters
    ----------
    plan, calls, bits
        Those of the `LocalRun` that feeds.
    seats
        Of this process, joined to the run.
    workers
        Threads.

    Raises
    ------
    EngineError
        When nobody can join the run any more.
    """

    def __new__(
        cls, plan: str, calls: Sequence[Mapping[str, Any]], seats: DataflowSeats, workers: int, bits: int
    ) -> Self: ...
    def take(self, timeout: float | None = None) -> tuple[str, int] | None:
        """What a worker tells next: ``("joined" | "left", worker)``; None when `timeout` (seconds) is over.

        Raises
        ------
        UserFunctionError, EngineError
            When a worker has failed.
        """

    def stats(self, patience: float) -> str:
        """What `LocalRun.stats` tells, of these workers; one that is busy for `patience` (s) tells its last."""

    def leave(self) -> None:
        """Ask the workers to leave the run, when their bins have moved away."""

    def close(self) -> None:
        """Ask the workers to end, without waiting for them. Again: nothing."""

@final
class LocalRun:
    """Worker threads of this process that run one flow.

    Each pushed batch, in one piece or several, is one epoch, of one source, at whose end the watermark moves to
    ``max(old, greatest event time - lateness)``, the least over the sources that have not ended.
    With `whole` all of them are one epoch, which ends with the input; its watermark is infinite
    then, and no row is late.

    Parameters
    ----------
    plan, calls
        As `Flow.to_plan` gives them.
    workers
        Threads, 1 to 1024.
    bits
        The state is cut into ``2 ** bits`` bins, at most 20.
    journal
        Keep what a rollback needs (costs a copy of each state touched in an epoch).
    ahead
        Pieces of epochs under way before `push` waits; most epochs have one.
    whole
        All that is pushed is one epoch, without processing time, as in a batch job. Not with `journal`.
    seats
        Of a run that processes join (`FlowCrew`): this one's worker is its first, which feeds them. `workers` is 1.
    wanted
        Numbers of the kinds of rows beside the output that come out, late ones first; others are counted. None: all.

    Raises
    ------
    PlanError, SchemaError
        When the plan does not compile.
    ConfigError
        When an option is out of range.

    Notes
    -----
    A context manager that closes. Methods may be called from several threads at once.
    """

    def __new__(
        cls,
        plan: str,
        calls: Sequence[Mapping[str, Any]],
        workers: int = 1,
        bits: int = 8,
        journal: bool = False,
        ahead: int = 4,
        whole: bool = False,
        seats: DataflowSeats | None = None,
        wanted: list[int] | None = None,
    ) -> Self: ...
    @property
    def members(self) -> list[int]:
        """The workers that take part now, by index; the first is here, and any others compute alone."""

    @property
    def failed(self) -> bool:
        """Whether the run has ended before its time."""

    def go_on(self) -> None:
        """Have workers go on that wait for outputs to be taken: one that waits takes no part in joins and leaves."""

    def push(
        self,
        batch: _ArrowData | list[_ArrowData],
        clock_ms: int | None = None,
        source: int = 0,
        at_hand: Sequence[int] | None = None,
        away_ms: int = 0,
    ) -> bool:
        """Hand one batch of a source, which becomes an epoch, to the workers; waits while `ahead` pieces are under way.

        In a list it is in pieces, which go to the workers one after the other.

        Not silent, for ``idle_after``, are sources of which something is `at_hand`, and none was while nobody looked at
        them: `away_ms` milliseconds, all in all.

        False, and nothing was pushed, when the workers wait themselves until outputs are taken, which only flows that
        expand their input do; and when it would wait for pieces of one batch while outputs of others are there.

        Raises
        ------
        SchemaError
            When the batch does not have the source's columns; nothing was pushed.
        ConfigError
            When there is no such source.
        EngineError
            When the source has ended.
        UserFunctionError, EngineError
            When the run has failed, or is closed.
        """

    def end_source(self, source: int) -> None:
        """No more batches of a source come: the watermark does not wait for it any more.

        Raises
        ------
        ConfigError
            When there is no such source.
        """

    def finish(self, clock_ms: int | None = None) -> bool:
        """End the input: the watermark becomes infinite, every window closes. Does not wait for the results.

        False as for `push`.
        """

    def take(self, timeout: float | None = None) -> tuple[Literal["rows", "beside"], RecordBatch] | None:
        """The next output as ``("rows" | "beside", batch)``; None when `timeout` (seconds) is over or nothing can come.

        Raises
        ------
        UserFunctionError, EngineError
            When the run has failed and everything before was taken.
        """

    def nudge(self) -> None:
        """End the wait of a `take`, or of the next one, which gives None."""

    @property
    def side_rows(self) -> list[int]:
        """Rows of each side output in epochs that are done, whether or not they are kept."""

    @property
    def done(self) -> bool:
        """Whether the input has ended and every result has been taken."""

    def migrate(
        self, steps: Sequence[Sequence[tuple[int, int]]], max_pause: float | None = None, drains: bool = False
    ) -> int:
        """Start moving bins: `steps` is a list of lists of ``(bin, worker)``. Returns a handle for `wait_migration`.

        With `drains` what waited when a step was complete is done before the next.

        Raises
        ------
        ConfigError
            When a bin or worker does not exist; nothing moves.
        """

    def prepare(
        self,
        at_epoch: int,
        moves: Sequence[tuple[int, int]],
        strategy: str,
        batch_bins: int,
        max_pause: float | None = None,
        drains: bool = False,
    ) -> int:
        """Prepare ``(bin, worker)`` moves for an epoch that is not fed yet, in steps that are planned then.

        Raises
        ------
        ConfigError
            When a bin, worker or strategy does not exist, or the epoch has passed; nothing moves.
        """

    def recut(self, splits: Sequence[tuple[tuple[int, int], int]], merges: Sequence[tuple[int, int]]) -> int:
        """Split bins by so many bits and merge others, between two epochs; each is ``(prefix, length)``.

        Returns a handle for `wait_migration`.

        Raises
        ------
        ConfigError
            When there can be no such bin, or rows wait in bins for the end of the input.
        """

    def bin_bytes(self) -> list[list[tuple[int, int, int]]]:
        """Bytes of state of the bins that are in this process, of each keyed step: (prefix, length, bytes)."""

    def bins(self) -> list[list[tuple[int, int, int]]]:
        """All bins of each keyed step: ``(prefix, length, worker)``."""

    @property
    def next_epoch(self) -> int:
        """The epoch that the next batch becomes."""

    def cancel_migration(self, handle: int) -> None:
        """Let a migration end after the step under way; one that has ended is left alone."""

    def wait_migration(self, handle: int, timeout: float | None = None) -> _MigrationReport | None:
        """Wait for a migration: ``{"moved": bins, "bytes": n, "steps": [...]}``; None when `timeout` (s) is over."""

    def stats(self) -> str:
        """Counters of the workers as JSON; latency samples and bin moves since the last call."""

    def close(self) -> None:
        """Stop the threads and drop the state. Harmless when done twice; after it every other method raises."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class Handover:
    """An iterator over the items of the lists that a function gives.

    An interrupt never costs it an item, and nothing that the function raises ends it.

    Parameters
    ----------
    fill
        ``fill(taken)`` gives the next list, or None at the end; `taken` is how many lists have arrived here. A list
        that got lost on its way is asked for again, with the same number.
    refusal
        Class of the error for who uses it while it is being used.
    failure
        An item of this class is not given: its ``error`` is raised.
    """

    def __new__(
        cls,
        fill: Callable[[int], list[Any] | None],
        refusal: type[Exception],
        failure: type[Any] | None = None,
    ) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def clear(self) -> None:
        """Drop what has not been handed out."""

class OrderedRun:
    """One native pipeline over Python objects, for `penstock.ordered`.

    Parameters
    ----------
    operators
        One dict each: ``kind`` ("stateless", "stateful" or "partitioned"), ``name``, ``call(worker, object)``, which
        returns an object; partitioned ones also ``partitions``, ``split(object)``, which returns parts, and
        ``merge(parts)``. Objects say their ``weight``, parts also their ``partition``.
    workers, in_flight
        Threads, and the most objects between push and pull.
    scheduler, queue
        By name.
    """

    def __new__(
        cls, operators: Sequence[Mapping[str, Any]], *, workers: int, in_flight: int, scheduler: str, queue: str
    ) -> Self: ...
    def try_push(self, object: Any, bytes: int) -> bool:
        """Hand an object over; False when there is no room."""

    @property
    def threads(self) -> int:
        """How many threads work for it: fewer than were asked for where no more could be started, none at first."""

    def pull(self, timeout: float | None = None) -> Any | None:
        """The next object in order; None when there is none within `timeout` seconds, or somebody nudged.

        Raises
        ------
        BaseException
            What an operator raised, in the place of its object; nothing comes after it.
        """

    def nudge(self) -> None:
        """End the wait of a `pull`, or of the next one; harmless when closed."""

    def stats(self) -> list[dict[str, Any]]:
        """What each operator has done."""

    def close(self, limit: float | None = None) -> bool:
        """End it and wait for its workers, at most `limit` seconds. Whether all have ended."""

class GraphText:
    """Reads an edge list piece by piece into record batches of two columns, ``src`` and ``dst``."""

    def __new__(cls, place: str, ids: str) -> Self: ...
    def read(self, text: bytes, last: bool = False) -> RecordBatch:
        """The edges of the next piece of the text; `last` says that no other follows.

        Raises
        ------
        SchemaError
            For a line that is no edge, with ``file`` and ``line``.
        """

@final
class GraphBuilder:
    """Collects the edges of relations. `ids`: signed, unsigned or text."""

    def __new__(cls, ids: str) -> Self: ...
    def relation(self, name: str, self_loops: str, repeated: str) -> None:
        """Names a relation; what happens to its self-loops (keep, drop, refuse) and repeated edges (drop, refuse)."""

    def add(self, name: str, edges: _ArrowData) -> None:
        """Adds edges: two columns of int64, uint64 or large_string, as the builder was told, without nulls.

        When that is broken off midway (an interrupt, an error) the builder is spent.
        """

    def finish(self, shape: str) -> GraphIndex:
        """Builds the index; the builder is spent. `shape`: both, forward, degree or degeneracy."""

@final
class GraphFileBuilder:
    """Collects the edges of relations by way of scratch files: memory does not grow with the edges.

    `ids`: signed, unsigned or text; `folder`: where scratch files are; `memory`: bytes.
    """

    def __new__(cls, ids: str, folder: str | Path, memory: int) -> Self: ...
    def relation(self, name: str, self_loops: str) -> None:
        """Names a relation and says what happens to its self-loops (keep, drop, refuse). Repeated edges count once."""

    def add(self, name: str, edges: _ArrowData) -> None:
        """Adds edges: two columns of int64, uint64 or large_string, as the builder was told, without nulls.

        When that is broken off midway (an interrupt, an error) the builder is spent.
        """

    @property
    def spilled(self) -> int:
        """How often edges went to disk."""

    def finish(self, shape: str, path: str | Path) -> None:
        """Writes the index to a file, which appears at once and whole; the builder is spent."""

@final
class GraphDeltas:
    """Changes of edges to changes of the matches of a pattern. `ids`: signed, unsigned or text."""

    def __new__(cls, pattern: str, ids: str) -> Self: ...
    def feed(
        self,
        epoch: int | None,
        source: str | None,
        relations: Sequence[str],
        edges: Iterable[tuple[str, _ArrowData, int | None]],
        rows: int,
    ) -> tuple[GraphChanges, bool]:
        """Feeds an epoch and gives what it changed, and whether it is the one that is held, so only given again.

        Parameters
        ----------
        epoch, source
            Its number, and who counts.
        relations
            That it has edges of.
        edges
            Relation, batch, and how often its edges come (above 0) or go (below); None: its third column, of int64,
            says it. Not asked for an epoch that is held. When it fails, nothing has changed.
        rows
            Per batch of the changes.

        Raises
        ------
        StateLost
            When the number is neither that of the epoch held nor the next, comes from another source, or again for
            other relations.
        StateError
            When `edges` feed the deltas themselves. Other threads wait for each other.
        """

    @property
    def begun(self) -> int:
        """How many epochs have been fed."""

    @property
    def epoch(self) -> int | None:
        """The number of the epoch that is held."""

    def changes(self, rows: int = 8192) -> GraphChanges:
        """What the epoch changed, from the start."""

    @property
    def schema(self) -> Schema:
        """The columns of what has changed."""

@final
class GraphChanges:
    """The matches that an epoch changed: those that went (column ``diff`` -1), then those that came (1)."""

    def next(self) -> RecordBatch | None:
        """The next rows; None at the end.

        Raises
        ------
        StateError
            When another epoch has begun.
        """

@final
class GraphIndex:
    """Relations ready to be searched: memory of this process, or a file that all processes of the host share."""

    @staticmethod
    def open(path: str | Path) -> GraphIndex:
        """Maps a file that `save` wrote."""

    def save(self, path: str | Path) -> None:
        """Writes the index to a file, which appears at once and whole."""

    @property
    def ids(self) -> Literal["signed", "unsigned", "text"]:
        """What nodes are."""

    @property
    def sets(self) -> bool:
        """Whether it is an undirected graph, oriented: matches are sets, whose nodes ascend."""

    @property
    def nodes(self) -> int:
        """How many nodes all relations name."""

    @property
    def relations(self) -> list[tuple[str, int]]:
        """How many edges each relation has, by name."""

    def order(self, pattern: str, order: Sequence[str] | None = None) -> list[str]:
        """The order in which the attributes of a pattern are bound."""

    def units(self, pattern: str, parts: int, order: Sequence[str] | None = None) -> list[tuple[int, int, int, int]]:
        """Cuts the work of a pattern into about `parts` pieces of like size."""

@final
class GraphSearch:
    """Threads that search an index for a pattern: a count, or rows as they are found."""

    def __new__(
        cls,
        index: GraphIndex,
        pattern: str,
        *,
        count: bool,
        order: Sequence[str] | None = None,
        workers: int = 1,
        batches: int = 64,
        batch_size: int = 1024,
        rows: int = 8192,
        in_order: bool = False,
        unit: tuple[int, int, int, int] | None = None,
    ) -> Self: ...
    def count(self, timeout: float | None = None) -> dict[str, int] | None:
        """Waits for the end of a count; None when `timeout` (seconds) is over."""

    def next(self, timeout: float | None = None) -> tuple[RecordBatch | None, dict[str, int] | None]:
        """The next rows, or at the end what a count tells; neither when `timeout` (seconds) is over."""

    def progress(self) -> tuple[int, int]:
        """How many values of the first attribute are behind, and of how many."""

    def close(self) -> None:
        """Stops and joins the threads. Harmless when done twice."""

@final
class InlineRun:
    """One flow, or one piece of a plan, in the calling thread; it starts no thread.

    Parameters
    ----------
    plan, calls
        As `Flow.to_plan` gives them.
    piece
        Place in ``plan_check(plan)["pieces"]``; default the whole plan.

    Notes
    -----
    All input is one epoch. Only the thread that made it may use it.
    """

    def __new__(cls, plan: str, calls: Sequence[Mapping[str, Any]], piece: int | None = None) -> Self: ...
    def push(self, batch: _ArrowData, input: int = 0) -> list[RecordBatch]:
        """Take one batch and return what it makes at once.

        That is all of it, or where the flow expands its input as much as is worth handing on: `pull` gives the rest.
        `input` is the number of the source, or of a piece the side of the operator that it begins with.

        Raises
        ------
        ValueError
            When there is no such input.
        SchemaError
            When the batch does not have the piece's columns.
        UserFunctionError, EngineError
            When a step fails; the run cannot be used after that.
        """

    def pull(self) -> list[RecordBatch] | None:
        """Go on with what was pushed: more of what it makes, or None when that was all. Serves signals meanwhile."""

    def finish(self) -> list[RecordBatch]:
        """End the input and return what was still open, as `push` does."""

    def scopes(self) -> str:
        """The bounded scopes of the flow, as JSON: a list of their statistics."""

class _JoinedEvent(TypedDict):
    event: Literal["joined"]
    member: int
    info: str

class _LostEvent(TypedDict):
    event: Literal["lost"]
    member: int
    reason: str
    calls: list[int]

class _ReplyEvent(TypedDict):
    event: Literal["reply"]
    member: int
    call: int
    body: str
    attachment: bytes

class _MessageEvent(TypedDict):
    event: Literal["message"]
    member: int
    body: str
    attachment: bytes

class _Receipt(TypedDict):
    rows: int
    checksum: int
    max_event_time: int | None
    member: int
    hash: int

@final
class EngineProtocol:
    """What an engine decides: events in, effects out, as JSON text. Nothing waits; one thread steps it.

    Parameters
    ----------
    setup
        Fields of the protocol's `Setup` as JSON; what is left out has its default.

    Raises
    ------
    ValueError
        For other fields, and from `step` for what is no event.

    Notes
    -----
    A panic in `step` reaches Python outside `Exception`; the machine is of no use afterwards.
    """

    def __new__(cls, setup: str) -> Self: ...
    def begin(self) -> str:
        """What to do first."""

    def step(self, event: str) -> str:
        """Take an event; returns what to do, in order. An effect that tells an error has its sentence as ``text``."""

    def facts(self, query: str) -> str | None:
        """How a query stands; None for one that never asked."""

    def rescaling(self) -> str | None:
        """How the rescale under way stands; None when there is none."""

    def bins(self, query: str) -> list[list[tuple[int, int, int]]]:
        """The bins, parts of those that are split among them, by hash: (prefix, bits, worker).

        One list for each keyed step; empty before the first epoch.
        """

def checkpoint_file(kind: Literal["claim", "manifest", "shown"], content: str) -> tuple[str, bytes]:
    """Name and bytes of the file of a claim, manifest or note (`shown`) given as JSON; ValueError for other content."""

def checkpoint_reads(name: str) -> bool:
    """Whether `checkpoint_contents` needs the content of the file of this name: all but data."""

def checkpoint_contents(files: Sequence[tuple[str, int, bytes | None]], held: bool) -> str:
    """What a checkpoint holds (the protocol's `Contents`, as JSON), of names, sizes and contents of its files.

    Files of other names are ignored; what cannot be read is there with the reason. `held` is passed on.
    """

def registry_answers(address: str, claim: int, patience: float) -> bool:
    """Whether the registry of the engine whose claims have the number `claim` (`claim_of`) listens at ``host:port``.

    Waits about `patience` seconds at most. ConfigError where the name of the host does not resolve, ProtocolError where
    this host cannot ask for other reasons: that says nothing of the engine.
    """

def claim_of(secret: bytes) -> int:
    """The number by which an engine of this secret marks its claims on checkpoints; 64 bits."""

def key_of(secret: bytes, role: str, scope: str, always: bool = False) -> bytes:
    """The key that a task carries instead of the secret: speaks in one role, of one thing.

    Parameters
    ----------
    secret
        The engine's 32 bytes, or those of a run.
    role, scope
        "member" and the slot; "feed" or "drain" and "<query> <epoch>"; "mesh" and "", of a secret
        that is for one run alone.
    always
        Whether connections are encrypted that do not leave the host, too.

    Raises
    ------
    ConfigError
        For a secret of another length or of equal bytes.
    ValueError
        For another role.
    """

@final
class Registry:
    """The driver's end of a cluster: who is a member, requests to them, their answers.

    Parameters
    ----------
    host, port
        Where to listen; port 0 takes any.
    secret
        32 random bytes from which the keys of members, feeds and drains are made (`key_of`); they stay here.
    advertise
        Host that members dial; default `host`.
    silence
        Seconds after which a member that is connected and says nothing is lost, at least 0.1; default 60.
    always
        Whether members of this host have to encrypt as well; those of others always do.

    Raises
    ------
    ConfigError
        For a secret of another length or of equal bytes, or when listening on every interface without `advertise`.
    ProtocolError
        When it cannot listen there.

    Notes
    -----
    Whoever does not prove that it has a key is closed and counted, see `metrics`.
    """

    def __new__(
        cls,
        host: str,
        port: int,
        secret: bytes,
        advertise: str | None = None,
        silence: float | None = None,
        always: bool = False,
    ) -> Self: ...
    @property
    def address(self) -> str:
        """What members dial: ``host:port``."""

    def members(self) -> list[tuple[int, str]]:
        """Members that are connected now: (id, what it said about itself as JSON); ids are never used twice."""

    def send(self, member: int, body: str, attachment: bytes | None = None) -> int:
        """Send a request (JSON) and return its call id; the answer comes by `poll`.

        Raises
        ------
        EngineError
            When there is no such member.
        ProtocolError
            When its connection has just broken, or the body is no JSON or too long.
        """

    def poll(self, timeout: float | None = None) -> list[_JoinedEvent | _LostEvent | _ReplyEvent | _MessageEvent]:
        """Wait up to `timeout` seconds for something to happen; return everything that has, in order.

        Returns
        -------
        list of dict
            ``event`` is "joined", "lost" (with the ids of the `calls` that will never be answered), "reply" or
            "message". `info` and `body` are JSON.
        """

    def dismiss(self, member: int, reason: str) -> None:
        """Tell a member to go; its end comes as a lost event.

        Raises
        ------
        EngineError
            When there is no such member.
        """

    def metrics(self) -> dict[str, int]:
        """Counters of the listener: ``accepted``, ``refused`` and the latter by reason."""

    def close(self) -> None:
        """End all connections (members then end themselves). Harmless when done twice."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class Member:
    """The resident end of the registry in a worker process.

    Parameters
    ----------
    registry
        Address of the registry, ``host:port``.
    key
        That of the member of this slot (`key_of`), or the engine's secret.
    info
        JSON object that describes this process; it gains ``address``, the data port.
    silence
        As at the registry: the member says that it lives six times in that.
    staging_bytes
        Bytes of staged rows and frozen results in memory; more goes to files. Default 256 MiB.
    spill_folders
        Directories for these files, used in turn; default the system's temporary one.

    Raises
    ------
    AuthenticationError
        When the key is of another engine, or of another ``slot`` than that of `info`.
    ProtocolError
        When the registry cannot be reached.

    Notes
    -----
    Functions that the driver sends are unpickled here, which is why nobody talks to a member without a key.
    """

    def __new__(
        cls,
        registry: str,
        key: bytes,
        info: str = "{}",
        silence: float | None = None,
        staging_bytes: int | None = None,
        spill_folders: Sequence[str] | None = None,
    ) -> Self: ...
    @property
    def id(self) -> int:
        """The id that the registry gave."""

    @property
    def address(self) -> str:
        """The data port that feeds and drains dial: ``host:port``."""

    def run(self) -> tuple[Literal["stopped", "dismissed", "registry_lost", "interrupted"], str]:
        """Serve until the driver, a signal or a broken connection ends it: ``(how, why)``.

        Raises
        ------
        KeyboardInterrupt
            What the signal's handler raises; the member has ended then.
        EngineError
            When it has run before or was closed.
        """

    def close(self) -> None:
        """End a member that does not run yet. Harmless when done twice."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class Feed:
    """One attempt to bring the rows of one partition to a member. They count once the epoch is released.

    Parameters
    ----------
    address
        Data port of the member, ``host:port``.
    key
        That of the epoch of the query (`key_of`), or the engine's secret.
    query, epoch, partition, attempt
        What the rows are.
    schema
        Their columns: any object with ``__arrow_c_schema__``.
    silence
        Seconds to wait for a member that neither reads nor answers; default 60 (30 for reading).
    hash
        Whether the receipt tells a 64-bit hash (with a sign) of the rows that neither batches nor order change; else 0.
    member
        Who is to answer there; default whoever does.
    source
        Number of the flow's source that the rows are of; an attempt may bring rows of each, by a feed of its own.

    Raises
    ------
    AuthenticationError
        When the key is of another engine, query or epoch.
    EngineError
        When the member refuses: unknown query, an epoch that is over, an attempt that it has already (`kind` tells).
    StorageError
        When the member has no room for more rows, neither in memory nor in its directories.
    ProtocolError
        When the network fails, the member is silent for too long, or another one answers.
    """

    def __new__(
        cls,
        address: str,
        key: bytes,
        query: str,
        epoch: int,
        partition: int,
        attempt: int,
        schema: Any,
        silence: float | None = None,
        hash: bool = False,
        member: int | None = None,
        source: int = 0,
    ) -> Self: ...
    def push(self, batch: _ArrowData) -> None:
        """Send one batch.

        Raises
        ------
        EngineError, SchemaError, ProtocolError
            As on construction; the feed is over then.
        """

    def finish(self) -> _Receipt:
        """Complete the attempt: ``{"rows", "checksum", "max_event_time" (us or None), "member", "hash"}``.

        Raises
        ------
        EngineError, ProtocolError
            Then nothing is staged.
        """

    def close(self) -> None:
        """Give the attempt up; nothing is staged. Harmless after `finish`."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class Drain:
    """The batches of one frozen piece of an epoch, as an iterator; re-readable until the epoch is closed.

    Parameters
    ----------
    address
        Data port of the member, ``host:port``.
    key
        That of the epoch of the query (`key_of`), or the engine's secret.
    query, epoch, piece
        What to read.
    which
        The results ("rows"), or late rows and those of side outputs ("beside").
    silence
        Seconds to wait for a member that does not answer; default 60.
    member
        Who is to answer there; default whoever does.
    source
        Number of the flow's source that the rows are of; an attempt may bring rows of each, by a feed of its own.

    Raises
    ------
    AuthenticationError
        When the key is of another engine, query or epoch.
    EngineError
        When the member refuses: unknown query, an epoch that is not complete or is closed (`kind` tells).
    ProtocolError
        When the network fails, also in the middle: a stream that breaks off never looks complete; when another member
        answers.
    """

    def __new__(
        cls,
        address: str,
        key: bytes,
        query: str,
        epoch: int,
        piece: int,
        which: Literal["rows", "beside"] = "rows",
        silence: float | None = None,
        member: int | None = None,
    ) -> Self: ...
    @property
    def schema(self) -> Schema:
        """Columns of every batch."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> RecordBatch: ...
