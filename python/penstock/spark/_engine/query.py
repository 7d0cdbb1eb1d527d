"""One query at the members, as Spark and the user call it.

Owns: the calls of one query, which take turns, and the part of them that runs in the thread of the caller: feeding a
batch and handing its results to the sink, both of which need Spark's thread. What happens when, and what becomes of it
after a failure, is decided by the engine's protocol (`executor`); who waits for a call here does the work that it
asks for until it lets the call return or raise.

Invariant: `Query.program` is what the protocol goes by. It becomes another one in the executor's thread, with the step
that takes that and before the effects of the next: members that begin on the state here, for whichever reason, never
get a flow that the protocol has not heard of yet, or has refused.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from penstock._beside import Kinds, of_kind, require
from penstock._coroutines import require_done
from penstock._migration import Cut, Wish, moves_to
from penstock._parts import Bins, Parts, names_parts, parse_depth
from penstock._storage import Storage, shown
from penstock.errors import (
    AuthenticationError,
    ConfigError,
    EngineError,
    PenstockError,
    ProtocolError,
    SchemaError,
    StateLost,
    StorageError,
)
from penstock.report._timeline import Epoch
from penstock.spark._engine import drains, feeds, handles
from penstock.spark._engine.cutoff import ending_at_loss
from penstock.spark._engine.executor import Event, Executor
from penstock.spark._engine.hub import Hub
from penstock.spark._engine.interrupts import plain_interrupts
from penstock.spark._engine.journal import Journal
from penstock.spark._engine.moves import Moves
from penstock.spark._engine.program import Program
from penstock.spark._engine.record import Recorder
from penstock.spark._engine.residents import Residents
from penstock.spark._engine.stream import Stream
from penstock.spark._tasks.failures import Failure
from penstock.spark._tasks.place import Secret
from penstock.spark.sources import by_place, fed

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Abandoned", "Check", "Query", "Setup", "called", "described"]

log = logging.getLogger(__name__)

#: How long a dropped query's threads are waited for, seconds: a function of the user's may hold one.
_END_S = 10.0
#: Rows of so many batches before the last one are known.
_FED = 8
#: How often a look at state begins again when the files that it reads have gone.
_LOOKS = 3
#: How Spark names what tasks raise that cannot reach or read a member. Other libraries have errors of these names, too.
_ECHOES = tuple(f"penstock.errors.{kind.__name__}:" for kind in (ProtocolError, AuthenticationError))
#: Why Spark does not tell something, and what is taken for it.
_UNTOLD = "(py4j is not allowed to look, or this release of Spark has it elsewhere)"
_GUESSED_TIME = (
    "that a batch has the time of the driver's clock when it comes here: what a function is told of it"
    " (getCurrentProcessingTimeMs) is another time where an engine after this one runs the batch again"
)
_GUESSED_COMMITS = (
    "that Spark has committed each batch before it asks for the next: leave asyncProgressTrackingEnabled off"
)
#: How many workers there are when bins move is known by the protocol alone.
_MOST_WORKERS = 1 << 31

Check = Callable[[], None]
#: Takes late rows: all of them, or those of the kinds that it names.
Late = Callable[["DataFrame", int], Any] | Mapping[str, Callable[["DataFrame", int], Any]]
#: Takes rows of side outputs, by their names.
Sides = Mapping[str, Callable[["DataFrame", int], Any]]


class Abandoned(PenstockError):
    """The Spark query was stopped while an epoch ran; the epoch will be replayed when it starts again.

    Spark tells a stopped query from a failed one by text: a Python exception counts as an interruption when it
    names py4j's error and Java's, which Spark 3.5 wants at the begin of the next line after a colon. It must be short,
    because Spark's search recurses once per character.
    """

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"the query was stopped during epoch {epoch}. py4j.protocol.Py4JJavaError: An error occurred while"
            " calling foreachBatch.\n: java.lang.InterruptedException"
        )


@dataclass(frozen=True)
class Setup:
    """What all queries of an engine share."""

    hub: Hub
    executor: Executor
    residents: Residents
    moves: Moves
    recorder: Recorder
    journal: Journal
    secret: Secret
    bits: int
    #: Seconds after which a silent member is lost.
    silence: float
    engine: str


@dataclass
class _Waiting:
    """A call that somebody waits for."""

    #: Work for who waits, and at last how it ended: the effects of the protocol.
    inbox: deque[tuple[str, Mapping[str, Any]]] = field(default_factory=deque)
    #: What went wrong at members and in Spark, until the protocol says what becomes of it.
    failures: list[Failure] = field(default_factory=list)
    raised: BaseException | None = None
    #: The engine cannot go on.
    broken: BaseException | None = None
    over: bool = False


@dataclass
class _Measured:
    """What an epoch took, over all attempts."""

    started: float = 0.0
    rows: int = 0
    #: How often the batch was fed.
    feeds: int = 0
    feed_s: float = 0.0
    #: When the last piece of work here ended. What passes from there to the next is the members': they wait for state,
    #: compute, or go back behind the death of one.
    worked: float = 0.0
    run_s: float = 0.0
    serve_s: float = 0.0
    #: When the sink returned, and how long that had to be made durable.
    served: float = 0.0
    files_s: float = 0.0
    #: Late rows, and those of side outputs by their names.
    beside: tuple[int, Mapping[str, int]] = (0, {})


class Query:
    """One Spark query with its state at the members.

    Attributes
    ----------
    id : str
        Spark's id of the query; it survives restarts from a checkpoint.
    name : str
        For people.
    program : Program
        What it runs.
    storage : Storage or None
        Where its state is durable.
    """

    def __init__(
        self, setup: Setup, program: Program, query_id: str, name: str, stream: Stream, storage: Storage | None
    ) -> None:
        self.id = query_id
        self.name = name
        self.program = program
        self.storage = storage
        self._stream = stream
        self._setup = setup
        self._hub = setup.hub
        self._executor = setup.executor
        #: One call at a time, and the thread whose it is.
        self._turn = threading.RLock()
        self._caller: int | None = None
        #: The batch that the call is of, if it is of one.
        self._called: int | None = None
        #: The last batch that returned: in which run of the Spark query, its number, and what it ran.
        self._last: tuple[object, int, Program, weakref.ref[DataFrame]] | None = None
        #: Rows of the last batches that were fed, by number.
        self._fed_rows: dict[int, int] = {}
        self._waiting: _Waiting | None = None
        #: Numbers the programs that the protocol is asked to go by, and the number of `program`; 0 until one is taken.
        self._numbers = itertools.count(1)
        self._functions = 0
        self._shortcut = feeds.Shortcut()
        self._places = feeds.Places()
        #: What its final epoch gave, of one that ran here.
        self._rest: tuple[int, tuple[drains.Piece, ...], tuple[drains.Piece, ...]] | None = None
        #: Whether what went beside the end is in the counters.
        self._rest_counts = False
        self._dropped: Mapping[str, Any] | None = None
        self._over = False
        #: What of the Spark query is guessed, as far as that was said.
        self._guesses: set[str] = set()

    # Looking

    @property
    def status(self) -> str:
        """In words."""
        return str(self._facts("status", "has not begun"))

    @property
    def checkpoint(self) -> str | None:
        """Where its state is durable, as it was given, with credentials in it too; None where it is not."""
        return None if self.storage is None else self.storage.url

    @property
    def completed(self) -> int | None:
        """The last completed epoch."""
        epoch = self._facts("epoch", None)
        return None if epoch is None else int(epoch)

    @property
    def late_rows(self) -> int:
        """Rows that came too late, over all epochs."""
        return int(self._facts("late_rows", 0))

    def fed(self, batch_id: int) -> int | None:
        """Rows of a batch, however often it was fed; None of one that is long gone, or was fed by another engine."""
        return self._fed_rows.get(batch_id)

    @property
    def workers(self) -> int:
        """Workers of the present generation."""
        return int(self._facts("workers", 0))

    @property
    def leaving(self) -> list[int]:
        """Those of them whose members are to go: they give their bins away, and get none."""
        return list(self._facts("leaving", ()))

    @property
    def calls_here(self) -> bool:
        """Whether the calling thread is in a call of this query."""
        return self._caller == threading.get_ident()

    def require_outside(self, at_epoch: int | None) -> None:
        """Refuse a sink that would wait for what is prepared for a batch behind its own.

        Raises
        ------
        EngineError
            When the calling thread is in a call of this query with an earlier batch.
        """
        called = self._called
        if at_epoch is not None and self.calls_here and called is not None and called < at_epoch:
            raise EngineError(
                f"the migration at epoch {at_epoch} is waited for by the sink of query {self.called}, whose"
                f" batch {called} has to end before it begins: wait when the sink has returned",
                query=self.id,
                epoch=called,
            )

    @property
    def running(self) -> bool:
        """Whether bins can move now."""
        return bool(self._facts("running", False))

    @property
    def reusable(self) -> bool:
        """Whether its state is gone for good, so that its function may serve another query."""
        return bool(self._facts("lost", False) or self._facts("finished", False))

    @property
    def over(self) -> bool:
        """Whether it was dropped."""
        return self._over

    @property
    def finished(self) -> bool:
        """Whether its final epoch has run."""
        return bool(self._facts("finished", False))

    @property
    def gave_rest(self) -> bool:
        """Whether its final epoch gave rows here, which somebody may still read at the members."""
        return self._rest is not None and any(self._rest[1:])

    @property
    def called(self) -> str:
        """Its name for people, and its id where that is another word."""
        return called(self.name, self.id)

    def _facts(self, name: str, otherwise: Any) -> Any:
        facts = self._executor.facts(self.id)
        return otherwise if facts is None else facts[name]

    def bins(self) -> list[list[tuple[int, int, int]]]:
        """All bins, parts of those that are split among them, by keyed step: (prefix, bits, worker)."""
        return self._executor.bins(self.id)

    def parts(self) -> Parts | None:
        """The bins of the first keyed step; None of a query without state."""
        told = self.bins()
        return Parts(self._setup.bits, {(prefix, bits): worker for prefix, bits, worker in told[0]}) if told else None

    def owners(self) -> list[list[int]]:
        """Owner of each bin, by keyed step; -1 of one that is split."""
        found: list[list[int]] = []
        for step in self.bins():
            owners = [-1] * (1 << self._setup.bits)
            for prefix, bits, worker in step:
                if bits == self._setup.bits:
                    owners[prefix] = worker
            found.append(owners)
        return found

    def __repr__(self) -> str:
        return f"<Query {self.name!r} {self.status}; completed epoch {self.completed}>"

    # Calls

    def batch(
        self,
        df: DataFrame,
        batch_id: int,
        program: Program,
        sink: Callable[[DataFrame, int], Any],
        late: Late | None,
        sides: Sides | None,
        check: Check,
        run: tuple[str, str | None] = ("", None),
        follows: bool = False,
    ) -> None:
        """Run or re-serve one batch, with the functions of a program that fits the state.

        `run` tells the runs of the Spark query apart: in none of them is a batch of two flows. `follows` says that the
        batch before has returned in this run, so that Spark's time of this one is of this run too: one that is replayed
        has the time of another.
        """
        with self._taking_turn(check):
            self._refuse_second(program, run, batch_id, df)
            clock = time.monotonic()
            measured = _Measured(time.time(), worked=clock)
            clock_ms, planned_ms = self._stream.clock_ms(batch_id)
            committed, guessed = self._stream.committed_before(batch_id)
            self._require_told(program, batch_id, planned_ms is not None, not guessed)
            self._called = batch_id
            journal = self._setup.journal
            journal.batch_begun(self.id, batch_id, program.kinds.sides)

            def feed(facts: Mapping[str, Any]) -> Event:
                return self._feed(df, facts, measured)

            def serve(facts: Mapping[str, Any]) -> Event:
                return self._serve(df.sparkSession, facts, sink, (late, sides), measured)

            asked = {
                "query": self.id,
                "epoch": batch_id,
                "clock_ms": clock_ms,
                "planned_ms": planned_ms,
                "committed": committed,
            }
            trigger_s = measured.started - clock_ms / 1e3 if follows else 0.0
            try:
                self._call({"Batch": asked}, {"Feed": feed, "Sink": serve}, check, program)
                self._stream.returned(batch_id)
                if not measured.feeds:
                    measured.rows = self._fed_rows.get(batch_id, 0)  # it was fed before, and is served again
                self._last = run, batch_id, program, weakref.ref(df)
                seconds = time.monotonic() - clock
                phases = {
                    "trigger": max(0.0, trigger_s),
                    "feed": measured.feed_s,
                    "run": measured.run_s,
                    "serve": measured.serve_s,
                    "commit": max(0.0, seconds - measured.feed_s - measured.run_s - measured.serve_s),
                }
                if measured.feeds:
                    self._shortcut.ran(measured.run_s)
                journal.beside(self.id, *measured.beside)
                journal.batch_committed(self.id, batch_id, measured.rows, seconds, phases)
            finally:
                if measured.served:
                    measured.files_s = time.monotonic() - measured.served
                if measured.feeds and measured.served:
                    seconds = measured.feed_s + measured.run_s + measured.serve_s + measured.files_s
                    self._setup.recorder.epoch(
                        Epoch(
                            batch_id,
                            measured.started,
                            seconds,
                            measured.rows,
                            self.name,
                            feed_s=measured.feed_s,
                            run_s=measured.run_s,
                            serve_s=measured.serve_s,
                            files_s=measured.files_s,
                        )
                    )

    def finish(self, session: SparkSession, check: Check, sides: Sides | None = None) -> DataFrame:
        """Run the final epoch, with the watermark at infinity, and return what it gives beside what `sides` take."""
        require(None, sides, self.program.kinds, "(DataFrame, batch id)", "df, batch_id")
        counts: list[tuple[int, Mapping[str, int]]] = []
        with self._taking_turn(check):

            def keep(facts: Mapping[str, Any]) -> Event:
                pieces = facts["pieces"]
                beside = self._pieces(pieces, _beside_rows)
                self._rest = (facts["epoch"], self._pieces(pieces, _output_rows), beside)
                counts[:] = [self._beside(pieces)]
                return _ended("Sunk", facts)

            committed = None if self.storage is None else self._stream.committed()
            asked = {"query": self.id, "clock_ms": int(time.time() * 1_000), "committed": committed}
            self._call({"Finish": asked}, {"Sink": keep}, check, self.program)
            # Of the attempt that stands, and once: what is given once more counts no more.
            if counts and not self._rest_counts:
                self._rest_counts = True
                self._setup.journal.beside(self.id, *counts[0])
            if self._rest is None and self.finished:
                raise EngineError(
                    f"query {self.called} was finished by an engine before this one: what came out went to"
                    " who called finish() there, and is not kept; to have it again delete the file"
                    " manifest-...-finished-... of its checkpoint, start the query again, and call finish()",
                    query=self.id,
                )
            # Of one that has had no batch nothing comes.
            epoch, rows, beside = self._rest or (0, (), ())
            if sides:
                _hand_on(None, sides, self._frame(session, epoch, beside, "beside"), self.program.kinds, epoch)
            return self._frame(session, epoch, rows, "rows")

    def state(self, operator: str | None) -> pa.Table:
        """Keys and values of an operator at the last batch that Spark has committed."""
        from penstock.state import read_folder

        if self.storage is None:
            raise ConfigError(
                f"query {self.called} keeps its state in memory only, where it cannot be looked at: start it"
                " with a checkpointLocation, or give foreach_batch(checkpoint=)"
            )
        for left in range(_LOOKS, -1, -1):
            committed = self._stream.committed()
            if committed is None:
                # The checkpoint may have that of a batch under way.
                raise EngineError(
                    f"query {self.called} has no state to show: Spark has committed no batch of it so far."
                    " Ask again when the first one has ended (query.processAllAvailable() waits for that)",
                    query=self.id,
                )
            try:
                return read_folder(self.storage, operator, committed)
            except StorageError:
                # Files go while others come; those of the batch that is committed by now are there.
                if not left:
                    raise
        raise AssertionError("the last look returns or raises")

    def wish(self, to: Any, moves: Any, cut: Cut) -> Any:
        """What is to move, as the engine's protocol has it; checked as far as it can be without the owners.

        Raises
        ------
        ConfigError
            When a bin or worker does not exist.
        """
        bits = self._setup.bits
        if to is None and moves is not None and names_parts(moves):
            pairs = Parts(bits, {}).pairs(moves, _MOST_WORKERS)
            return {"Moves": [[list(part), worker] for part, worker in pairs]}
        wish = Wish.of(to, moves, cut, 1 << bits, _MOST_WORKERS)
        told: Any = "Even"
        if wish.moves is not None:
            told = {"Moves": [[[bin_, bits], worker] for bin_, worker in wish.moves]}
        elif wish.to is not None:
            # From nowhere every bin moves; which of them are there already is known when the turn comes.
            nowhere = [[-1] * (1 << bits)] * len(self.program.operators)
            told = {"To": [worker for _, worker in moves_to(nowhere, wish.to, _MOST_WORKERS)] if nowhere else []}
        return told

    def split(self, bins: Bins, by: int) -> Any:
        """What is to be split, as the engine's protocol has it.

        Raises
        ------
        ConfigError
            When there can be no such bin, or no such parts.
        """
        chosen = Parts(self._setup.bits, {}).parse(bins, "split")
        return {"Recut": {"Split": {"ranges": [list(part) for part in chosen], "by": parse_depth(by)}}}

    def merge(self, bins: Bins) -> Any:
        """What is to be one again, as the engine's protocol has it.

        Raises
        ------
        ConfigError
            When there can be no such bin.
        """
        chosen = Parts(self._setup.bits, {}).parse(bins, "merge")
        return {"Recut": {"Merge": {"ranges": [list(part) for part in chosen]}}}

    def end(self, check: Check) -> None:
        """Forget everything, here and at the members; waits for their threads for a while, when it is `over`.

        Raises
        ------
        EngineError
            When a batch runs.
        """
        busy = EngineError(f"a batch of query {self.called} runs: stop it, then drop it", query=self.id)
        if self.calls_here:
            raise busy
        try:
            if not self._turn.acquire(blocking=False):
                raise busy
            # One of before that was interrupted may have its end by now.
            self._dropped = None
            self._executor.ask({"Drop": {"query": self.id}})
            if self._dropped is not None and "Err" in self._dropped["outcome"]:
                self._dropped = None
                raise busy
            self._over = True
        finally:
            if self._turn._is_owned():  # type: ignore[attr-defined]
                self._turn.release()
        if not self._hub.wait_for(lambda: self._dropped is not None, check, _END_S):
            log.warning("query %s was dropped, but a thread of it still runs a function of yours", self.name)

    # What the protocol says, in the executor's thread

    def tell(self, effect: str, facts: Mapping[str, Any]) -> None:
        """Work for who waits for a call, or its end."""
        if effect == "Dropped":
            self._dropped = facts
        elif self._waiting is not None:
            self._waiting.inbox.append((effect, facts))
        self._hub.wake()

    def hear(self, failure: Failure) -> None:
        """A failure at a member, whose facts the protocol does not know."""
        if self._waiting is not None:
            self._waiting.failures.append(failure)

    def fail(self, error: EngineError) -> None:
        """The engine cannot go on."""
        if self._waiting is not None:
            self._waiting.broken = error
            self._waiting.inbox.append(("Broken", {}))
        self._hub.wake()

    # Inside

    @contextlib.contextmanager
    def _taking_turn(self, check: Check) -> Iterator[None]:
        if self.calls_here:
            raise EngineError(
                f"query {self.called} is asked for something by the sink of its own batch, which would wait"
                " for itself: ask when the sink has returned",
                query=self.id,
            )
        try:
            with plain_interrupts():
                while not self._turn.acquire(timeout=0.1):
                    check()
            self._caller = threading.get_ident()
            check()
            if self._over:
                raise EngineError(f"query {self.called} was dropped; start it again", query=self.id)
            yield
        finally:
            # Ctrl-C may come between the lock's taking it and what it returns: it knows alone.
            if self._turn._is_owned():  # type: ignore[attr-defined]
                self._caller = self._called = None
                self._turn.release()

    def _call(
        self,
        asked: Event,
        work: Mapping[str, Callable[[Mapping[str, Any]], Event]],
        check: Check,
        program: Program | None = None,
    ) -> None:
        """Ask the protocol, and do the work that it wants done here until it lets the call return or raise."""
        waiting = self._waiting = _Waiting()
        before = self._functions, self.program
        try:
            if program is not None:
                self._open(program)
            self._executor.post(asked)
            while not waiting.over:
                self._hub.wait_for(lambda: bool(waiting.inbox), check)
                effect, facts = waiting.inbox.popleft()
                if effect not in work:
                    waiting.over = True
                    self._end(effect, facts, waiting, before)
                    return
                # What became of an earlier attempt is not why the call ends.
                waiting.raised = None
                try:
                    ended = work[effect](facts)
                except Exception as error:
                    check()  # one that was stopped has not failed
                    waiting.raised = error
                    ended = _ended("Fed" if effect == "Feed" else "Sunk", facts, error)
                self._executor.post(ended)
        except BaseException:
            if not waiting.over:
                self._abandon()
            raise
        finally:
            self._waiting = None

    def _refuse_second(self, program: Program, run: tuple[str, str | None], batch_id: int, df: DataFrame) -> None:
        """Spark gives a run each batch once: who comes with it again, and with another flow, shares the query."""
        if self._last is None or self._last[:2] != (run, batch_id):
            return
        other, fed = self._last[2:]
        if run[1] is not None and fed() is not df:
            raise EngineError(
                f"batch {batch_id} of query {self.called} was given a second time, with another DataFrame,"
                " and its results stand: an engine takes a batch once, so give it all rows at once (a union, or a flow"
                " of several sources and pk.spark.tagged)",
                query=self.id,
                epoch=batch_id,
            )
        if program is not other and not program.same_functions(other):
            raise EngineError(
                f"batch {batch_id} of query {self.called} was given to another flow in this run, and a Spark"
                " query has the state of one flow: start a query for each of them",
                query=self.id,
                epoch=batch_id,
            )

    def _require_told(self, program: Program, batch_id: int, timed: bool, logged: bool) -> None:
        """Say once what is guessed: `timed` and `logged` are false where Spark does not tell its time or its commits.

        Another engine that runs a batch again takes another time: durable state that depends on it is refused.
        """
        if self.storage is None or self._stream.by_hand or (timed and logged):
            return
        if not timed and program.clocked:
            raise EngineError(
                f"query {self.called}: Spark does not tell when it planned batch {batch_id} {_UNTOLD}, and"
                f" {', '.join(program.clocked)} of its flow goes by that time: by another clock an engine after this"
                " one would decide otherwise when it runs the batch again, so the state cannot be durable. Go by event"
                " time, or keep the state in memory with checkpoint=None. Where Spark has told it before, start the"
                " query again",
                query=self.id,
                epoch=batch_id,
            )
        guesses = {_GUESSED_TIME} if not timed else set()
        guesses |= {_GUESSED_COMMITS} if not logged else set()
        for guess in sorted(guesses - self._guesses):
            log.warning("query %s: Spark does not tell %s, so it is guessed %s", self.name, _UNTOLD, guess)
        self._guesses |= guesses

    def _open(self, program: Program) -> None:
        number = self._functions
        if number == 0 or not (program is self.program or program.same_functions(self.program)):
            if number:
                log.info("query %s: its functions have changed, new workers go on from its state", self.name)
            number = next(self._numbers)
        opened = {
            "plan": {"operators": list(program.operators), "sources": list(program.flow.sources)},
            "lateness_us": list(program.lateness_us),
            "idle_after_ms": list(program.idle_after_ms),
            "durable": self.storage is not None,
            "functions": number,
            "columns": _columns(program.read),
            "output": _columns({"rows": program.output, "late": program.beside}),
        }

        def take(effects: Sequence[Event]) -> None:
            # What does not fit the state is refused by the next call; until that is over, workers go on as before.
            if self._facts("functions", None) == number:
                self._functions, self.program = number, program

        self._executor.post({"Open": {"query": self.id, "program": opened}}, first=take)

    def _abandon(self) -> None:
        """Nobody waits for the call any more."""
        with contextlib.suppress(EngineError):  # the engine has failed, and every call with it
            self._executor.ask({"Stop": {"query": self.id}})

    def _end(self, effect: str, facts: Mapping[str, Any], waiting: _Waiting, before: tuple[int, Program]) -> None:
        """The call returns, or raises what became of it."""
        if effect == "Complete":
            return
        if effect == "Broken":
            assert waiting.broken is not None
            raise waiting.broken
        error, text = facts["error"], facts["text"]
        kind = error if isinstance(error, str) else next(iter(error))
        told = {} if isinstance(error, str) else error[kind]
        about: dict[str, Any] = {"query": self.id, "engine": self._setup.engine}
        where = f"query {self.called} of engine {self._setup.engine}: "
        if kind == "Abandoned":
            raise Abandoned(told["epoch"])
        if kind == "Feed" and waiting.raised is not None:
            raise _reason(waiting.raised) from waiting.raised.__cause__
        if kind == "Sink" and waiting.raised is not None:
            raise waiting.raised
        if kind == "Member":
            failure = next((one for one in waiting.failures if one.facts.get("message", "") == told["message"]), None)
            raised = EngineError(where + text, **about) if failure is None else failure.exception()
            raise raised from raised.__cause__
        if kind == "StateLost":
            self._setup.recorder.forget(self.name)
            if told["member"] is not None:
                member = self._hub.known(told["member"])
                about |= {"member": member.id, "executor": member.executor}
            raise StateLost(where + text, **about, epoch=told["epoch"])
        if self.storage is not None:
            where = f"{where}checkpoint {shown(self.storage.url)}: "
        if kind == "NoManifest":
            raise StateLost(where + text, **about, epoch=told["asked"])
        if kind in ("Store", "Damaged"):
            raise StorageError(where + text)
        if kind == "OtherPlan":
            # One that was taken since nothing was held here does not fit the checkpoint: no member has it.
            self._functions, self.program = before
        if kind == "Held" and self.storage is not None:
            other = handles.serving(self.storage.url, self)
            if other is not None:
                text += f". Engine {other} of this process has a query there: close it (pk.spark.engines gives it)"
        if kind == "OutOfOrder":
            about |= {"epoch": told["asked"], "expected": told["at"] + 1}
        if kind == "NoMembers":
            text += f"; missing: {self._setup.residents.missing()}"
        raise EngineError(where + text, **about)

    # In the thread of who waits

    def _feed(self, df: DataFrame, facts: Mapping[str, Any], measured: _Measured) -> Event:
        """Bring the rows of a batch to the members; the receipts that come back are the commit."""
        clock = time.monotonic()
        measured.feeds += 1
        measured.run_s += clock - measured.worked
        try:
            return self._bring(df, facts, measured)
        finally:
            measured.worked = time.monotonic()
            measured.feed_s += measured.worked - clock

    def _bring(self, df: DataFrame, facts: Mapping[str, Any], measured: _Measured) -> Event:
        flow, epoch = self.program.flow, facts["epoch"]
        wanted = fed(flow, df, self.program.ordered, self.program.read)
        members = [self._hub.known(one) for one in facts["members"]]
        seats = tuple(feeds.FeedTarget(member.id, member.executor, member.address) for member in members)
        key, silence = self._setup.secret.feed(self.id, epoch), self._setup.silence
        places = self._places.of(seats, self.program.ordered)
        task = feeds.FeedTask(self.id, epoch, self.program.read, seats, key, silence, places)
        with described(df.sparkSession, f"penstock {self.name}: feed epoch {epoch}"):
            receipts = self._fed(by_place(wanted), task, again=measured.feeds > 1)
        for receipt in receipts:
            if receipt.gone is not None:
                raise ProtocolError(receipt.gone)
        for receipt in receipts:
            told = {
                "source": receipt.source,
                "partition": receipt.partition,
                "attempt": receipt.attempt,
                "member": receipt.member,
                "rows": receipt.rows,
                "max_event_time": receipt.max_event_time,
                "hash": receipt.hash % (1 << 64),
            }
            self._executor.post({"Receipt": {"ticket": facts["ticket"], "receipt": told}})
        measured.rows = sum(receipt.rows for receipt in receipts)
        kept = {batch: rows for batch, rows in self._fed_rows.items() if epoch - _FED <= batch < epoch}
        self._fed_rows = {**kept, epoch: measured.rows}
        return _ended("Fed", facts)

    def _fed(self, rows: DataFrame, task: feeds.FeedTask, again: bool) -> list[feeds.Receipt]:
        """The receipts of rows that tasks have brought to the members, or the driver where they are few.

        What is fed again goes by the tasks: whatever went wrong, less of it stands here then. So does what a member
        would not take from the driver: Spark tries its tasks again, and counts no rows of this attempt.
        """
        found: list[feeds.Receipt] | None = None
        if self._shortcut.open and not again:
            few = feeds.first(rows)
            if few is None:
                self._shortcut.missed()
            else:
                try:
                    found = []
                    for at, piece in enumerate(self._shortcut.pieces(few, len(task.seats))):
                        seat = task.seats[(task.epoch + at) % len(task.seats)]
                        staged = task.stage(piece, at, self._shortcut.attempt(), seat)
                        found += [feeds.Receipt(**row) for row in staged]
                except (ProtocolError, AuthenticationError) as error:
                    log.info("query %s: tasks feed batch %d: %s", self.name, task.epoch, error)
                    found = None
        if found is None:
            # Functions of the user's get blocks as Spark was told to make them.
            narrow = () if self.program.bound else self.program.read.values()
            with feeds.larger_batches(rows.sparkSession, narrow):
                given = rows.mapInArrow(task, drains.struct_type(feeds.RECEIPTS_DDL)).collect()
            found = [feeds.Receipt(**row.asDict()) for row in given]
            self._places.came(found, task.seats)
        self._shortcut.came(found)
        return found

    def _serve(
        self,
        session: SparkSession,
        facts: Mapping[str, Any],
        sink: Callable[[DataFrame, int], Any],
        beside: tuple[Late | None, Sides | None],
        measured: _Measured,
    ) -> Event:
        """Hand the results of an epoch on."""
        clock, epoch, pieces = time.monotonic(), facts["epoch"], facts["pieces"]
        measured.run_s += clock - measured.worked
        results = self._pieces(pieces, _output_rows)
        read = () if drains.are_few(results) else {piece.member for piece in results}
        try:
            with ending_at_loss(session, self._hub, read):
                require_done(sink(self._frame(session, epoch, results, "rows"), epoch), "sink")
            late, sides = beside
            late_rows, _ = measured.beside = self._beside(pieces)
            if late is not None or sides:
                frame = self._frame(session, epoch, self._pieces(pieces, _beside_rows), "beside")
                _hand_on(late, sides or {}, frame, self.program.kinds, epoch)
            if late is None and late_rows:
                self._setup.journal.late(self.id, epoch, late_rows)
        finally:
            measured.served = measured.worked = time.monotonic()
            measured.serve_s += measured.served - clock
        return _ended("Sunk", facts)

    def _beside(self, pieces: Sequence[Mapping[str, Any]]) -> tuple[int, Mapping[str, int]]:
        """How many late rows there are, and rows of each side output."""
        names = enumerate(self.program.kinds.sides)
        sides = {name: sum(piece["side_rows"][number] for piece in pieces) for number, name in names}
        return sum(piece["late_rows"] for piece in pieces), sides

    def _pieces(
        self, pieces: Sequence[Mapping[str, Any]], count: Callable[[Mapping[str, Any]], int]
    ) -> tuple[drains.Piece, ...]:
        counted = ((piece, count(piece)) for piece in pieces)
        return tuple(
            drains.Piece(piece["member"], self._hub.known(piece["member"]).address, piece["number"], rows)
            for piece, rows in counted
            if rows
        )

    def _frame(
        self, session: SparkSession, epoch: int, pieces: tuple[drains.Piece, ...], which: Literal["rows", "beside"]
    ) -> DataFrame:
        schema = self.program.output if which == "rows" else self.program.beside
        secret, silence = self._setup.secret, self._setup.silence
        return drains.outputs(session, self.id, epoch, which, pieces, schema, secret, silence)


def _hand_on(late: Late | None, sides: Sides, df: DataFrame, kinds: Kinds, epoch: int) -> None:
    """Give rows beside the results to who takes those of their kind; of several kinds each is a struct column."""
    names = [*kinds.late, *kinds.sides]
    # By number: Spark does not tell names apart that differ in case.
    parted = df if len(names) < 2 else df.toDF(*(f"kind{number}" for number in range(len(names))))

    def those_of(number: int) -> DataFrame:
        if len(names) < 2:
            return parted
        return parted.where(f"kind{number} IS NOT NULL").select(f"kind{number}.*")

    if isinstance(late, Mapping):
        for number, name in enumerate(kinds.late):
            if name in late:
                require_done(late[name](those_of(number), epoch), of_kind("late", late, name))
    elif late is not None:
        every, *others = map(those_of, range(len(kinds.late))) if kinds.late else (df.limit(0),)
        for other in others:
            every = every.union(other)
        require_done(late(every, epoch), "late")
    for number, name in enumerate(kinds.sides, len(kinds.late)):
        if name in sides:
            require_done(sides[name](those_of(number), epoch), of_kind("sides", sides, name))


def _output_rows(piece: Mapping[str, Any]) -> int:
    return int(piece["rows"])


def _beside_rows(piece: Mapping[str, Any]) -> int:
    return int(piece["late_rows"] + sum(piece["side_rows"]))


def _columns(sources: Mapping[str, pa.Schema]) -> str:
    """Names and types of columns by what they are of: only rows of equal ones can be compared, or served again."""
    told = {name: ", ".join(f"{field.name} {field.type}" for field in schema) for name, schema in sources.items()}
    return "; ".join(told.values() if len(told) == 1 else (f"{name}: {columns}" for name, columns in told.items()))


def _ended(event: str, facts: Mapping[str, Any], error: Exception | None = None) -> Event:
    """How some work ended, for the protocol."""
    outcome: Any = {"Ok": None} if error is None else {"Err": {"kind": _kind(event, error), "message": str(error)}}
    return {event: {"ticket": facts["ticket"], "outcome": outcome}}


def _kind(event: str, error: BaseException) -> str:
    """What the protocol is to make of an exception of Spark's or of the sink's.

    What could not be reached or read at a member may be an echo of its loss, whoever raises it.
    """
    seen: BaseException | None = error
    known: set[int] = set()
    while seen is not None and id(seen) not in known:  # an exception may be raised from itself
        if isinstance(seen, (ProtocolError, AuthenticationError)) or any(name in str(seen) for name in _ECHOES):
            return "Echo"
        known.add(id(seen))
        seen = seen.__cause__ or seen.__context__
    if event == "Sunk":
        return "User"
    # Where the driver feeds it raises itself what a task's failure tells in words.
    return "Data" if isinstance(error, SchemaError) or _reason(error) is not error else "Internal"


def _reason(error: BaseException) -> BaseException:
    """penstock's own reason in what Spark raised for a feed, where there is one."""
    text = str(error)
    for kind in (SchemaError, StorageError):
        mark = f"penstock.errors.{kind.__name__}:"
        line = next((line for line in text.splitlines() if mark in line), None)
        if line is not None:
            return kind(line.partition(mark)[2].strip())
    return error


def called(name: str, query_id: str) -> str:
    """What people call a query, and its id where that is another word."""
    return name if name == query_id else f"{name} ({query_id})"


@contextlib.contextmanager
def described(session: SparkSession, text: str) -> Iterator[None]:
    """Describe the jobs of this thread; never a job group, which is what stops a query's jobs."""
    sc = session.sparkContext
    key = "spark.job.description"
    before = sc.getLocalProperty(key)
    sc.setLocalProperty(key, text)
    try:
        yield
    finally:
        # The context may have ended meanwhile.
        with contextlib.suppress(Exception):
            sc.setLocalProperty(key, before)  # type: ignore[arg-type]
