"""One query at the members: its generations, its epochs, and what may be asked of it when.

Owns: the state machine of a query, from Spark's batch ids to generations of workers.

Invariants:
- State belongs to one Spark query id. The only batch ids that are served are the next one, and the last completed
  one again, whose outputs are still frozen. Anything else is an error that names both.
- Batches end quiescent. After a failure or an abandoned epoch everything goes back to the end of the last
  completed one (generation + 1), lazily, when the next batch is asked for.
- A lost member means lost state: the query ends with `StateLost` and never gives a wrong number.
- The outputs of an epoch are dropped when the next batch is asked for, which proves that Spark committed it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pyarrow as pa

from penstock.errors import ConfigError, EngineError, PenstockError, SchemaError, StateLost, StorageError
from penstock.report import timeline
from penstock.schema import spark_types
from penstock.spark import drains, feeds
from penstock.spark.batch import _quoted, _select, by_place
from penstock.spark.failures import Failure, raise_root, root
from penstock.spark.hub import Call, Hub, Member
from penstock.spark.migrate import Migration, MoveReport, balanced, moves_to, parse_moves, steps
from penstock.spark.partitions import dump_calls
from penstock.spark.place import Secret
from penstock.spark.record import Recorder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.flow import Flow

__all__ = ["Abandoned", "Program", "Query", "Setup"]

log = logging.getLogger(__name__)

#: How long to wait for the loss of a member to be noticed after something else failed, seconds.
_LOSS_S = 3.0

Check = Callable[[], None]


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
class Program:
    """A flow as members run it.

    Attributes
    ----------
    flow : Flow
        What the user wrote.
    plan : str
        As JSON.
    calls : bytes
        The Python functions, cloudpickled.
    keyed_steps : int
        Steps that hold state.
    ordered : bool
        Whether results depend on the order of the input.
    output : pyarrow.Schema
        Columns of the results.
    """

    flow: Flow
    plan: str
    calls: bytes
    keyed_steps: int
    ordered: bool
    output: pa.Schema

    @classmethod
    def of(cls, flow: Flow) -> Program:
        """Compile a flow; raises what `Flow.output_schema` raises, and SchemaError where Spark lacks a type."""
        from penstock import _native

        plan, calls = flow.to_plan()
        facts = _native.plan_check(plan)
        output = pa.schema(facts["output_schema"])
        # Both ends must be types that Spark has, before anything runs.
        spark_types(output)
        spark_types(flow.input_schema)
        return cls(flow, plan, dump_calls(calls), int(facts["pieces"]) - 1, bool(facts["needs_order"]), output)


@dataclass(frozen=True)
class Setup:
    """What all queries of an engine share."""

    hub: Hub
    secret: Secret
    recorder: Recorder
    #: Waits for a complete set of members and returns them by slot.
    members: Callable[[Check], Sequence[Member]]
    #: The next generation; larger than every one before, over all queries.
    generation: Callable[[], int]
    threads: int
    bits: int
    window: int
    slice_rows: int
    #: Seconds after which a silent member is lost.
    silence: float
    engine: str


class _Status(enum.Enum):
    FRESH = "has not begun"
    RUNNING = "runs"
    BROKEN = "goes back to its last completed epoch at the next batch"
    LOST = "has lost its state"
    FINISHED = "is finished"


@dataclass(frozen=True)
class _Frozen:
    """The outputs of a completed epoch."""

    epoch: int
    rows: tuple[drains.Piece, ...]
    late: tuple[drains.Piece, ...]
    late_rows: int


@dataclass(frozen=True)
class _Pending:
    """A released epoch whose answers were not awaited to their end."""

    epoch: int
    calls: tuple[Call, ...]
    watermark: int | None


class Query:
    """One Spark query with its state at the members.

    Attributes
    ----------
    id : str
        Spark's id of the query; it survives restarts from a checkpoint.
    name : str
        For people.
    completed : int or None
        The last completed epoch.
    late_rows : int
        Rows that came too late, over all epochs.
    """

    def __init__(self, setup: Setup, program: Program, query_id: str, name: str) -> None:
        self.id = query_id
        self.name = name
        self.program = program
        self.completed: int | None = None
        self.late_rows = 0
        self._setup = setup
        self._hub = setup.hub
        #: One batch, restart or finish at a time.
        self._turn = threading.Lock()
        #: Guards what migrations and readers look at.
        self._lock = threading.Lock()
        self._status = _Status.FRESH
        self._members: tuple[Member, ...] = ()
        self._generation = 0
        self._owners: list[list[int]] = []
        self._watermark: int | None = None
        #: The last epoch that was asked for and its processing time, milliseconds: the same when it is repeated.
        self._clock: tuple[int, int] = (-1, 0)
        self._frozen: _Frozen | None = None
        #: Whether the sink has returned for the frozen epoch.
        self._served = True
        self._pending: _Pending | None = None
        self._fed: int | None = None
        self._trouble = ""
        self._handles = 0

    # Looking

    @property
    def status(self) -> str:
        """In words."""
        return self._status.value

    @property
    def workers(self) -> int:
        """Workers of the present generation."""
        return len(self._members) * self._setup.threads

    @property
    def running(self) -> bool:
        """Whether bins can move now."""
        return self._status is _Status.RUNNING

    @property
    def reusable(self) -> bool:
        """Whether its state is gone for good, so that its function may serve another query."""
        return self._status in (_Status.LOST, _Status.FINISHED)

    def owners(self) -> list[list[int]]:
        """Owner of each bin, by keyed step."""
        with self._lock:
            return [list(step) for step in self._owners]

    def __repr__(self) -> str:
        return f"<Query {self.name!r} {self.status}; completed epoch {self.completed}>"

    # Epochs

    def batch(
        self,
        df: DataFrame,
        batch_id: int,
        sink: Callable[[DataFrame, int], Any],
        late: Callable[[DataFrame, int], Any] | None,
        check: Check,
    ) -> None:
        """Run or re-serve one batch."""
        with self._taking_turn(check):
            frozen = self._epoch(df, batch_id, check)
            self._serve(df.sparkSession, frozen, sink, late)

    def finish(self, session: SparkSession, check: Check) -> DataFrame:
        """Run the final epoch, with the watermark at infinity, and return what it gives."""
        with self._taking_turn(check):
            if self._status is _Status.FINISHED:
                assert self._frozen is not None
                return self._frame(session, self._frozen, "rows")
            if self._status is _Status.LOST:
                raise StateLost(f"query {self.name} cannot be finished: {self._trouble}")
            if self._status is _Status.FRESH:
                return self._frame(session, _Frozen(0, (), (), 0), "rows")
            # An epoch that was stopped is no part of it, even if it was completed since: Spark has not committed it.
            if not self._served:
                raise EngineError(
                    f"batch {self.completed} of query {self.name} was computed but its sink did not return; start the"
                    " query again from its checkpoint, so that Spark replays the batch, then finish"
                )
            assert self.completed is not None
            epoch = self.completed + 1
            self._ready(epoch, check)
            frozen = self._run(epoch, (), None, check, finish=True)
            with self._lock:
                self._status = _Status.FINISHED
            return self._frame(session, frozen, "rows")

    def drop(self) -> None:
        """Forget everything at the members; does not wait."""
        for member in self._members:
            if member.lost is None:
                self._hub.call(member, {"do": "drop_query", "query": self.id})

    def hear(self, facts: Mapping[str, Any], attachment: bytes, member: Member) -> None:
        """A member says that the workers of a generation have failed."""
        with self._lock:
            if int(facts.get("generation", -1)) == self._generation and self._status is _Status.RUNNING:
                self._status = _Status.BROKEN
                failure = Failure(member.id, facts.get("error", {}), attachment)
                self._trouble = str(failure)
                log.warning("query %s: %s", self.name, self._trouble)

    def hear_lost(self, member: Member) -> None:
        """A member is gone."""
        with self._lock:
            if member in self._members and self._status is _Status.RUNNING:
                self._status = _Status.BROKEN
                self._trouble = f"{member} is gone: {member.lost}"

    @contextlib.contextmanager
    def _taking_turn(self, check: Check) -> Iterator[None]:
        while not self._turn.acquire(timeout=0.1):
            check()
        try:
            check()
            yield
        finally:
            self._turn.release()

    def _epoch(self, df: DataFrame, batch_id: int, check: Check) -> _Frozen:
        self._settle_past()
        if self._status is _Status.FINISHED:
            raise EngineError(f"query {self.name} ({self.id}) is finished; batch {batch_id} comes too late")
        if self.completed is not None and batch_id == self.completed and self._frozen is not None:
            self._require_members(batch_id)
            log.info("query %s: batch %d again, its outputs are still here", self.name, batch_id)
            return self._frozen
        self._admit(batch_id)
        self._ready(batch_id, check)
        if self.completed is not None:
            # Spark asks for the next batch only after it has committed this one.
            for member in self._members:
                self._hub.call(member, {"do": "close_epoch", "query": self.id, "epoch": self.completed})
            self._frozen = None
        started = time.time()
        clock = time.monotonic()
        receipts = self._feed(df, batch_id, check)
        frozen = self._run(batch_id, receipts, self._watermark_after(receipts), check)
        rows = sum(receipt.rows for receipt in receipts)
        self._setup.recorder.epoch(self.name, batch_id, started, time.monotonic() - clock, rows)
        return frozen

    def _admit(self, batch_id: int) -> None:
        """Refuse any batch id that the state does not belong to."""
        if self._status is _Status.LOST:
            if batch_id == 0:
                with self._lock:
                    self._status = _Status.FRESH
                return
            raise StateLost(
                f"query {self.name} ({self.id}) is at batch {batch_id}, but its state is lost: {self._trouble};"
                " start a new query from batch 0 (a new checkpoint)",
                query=self.id,
                epoch=batch_id,
            )
        if self.completed is None:
            if batch_id == 0 or not self.program.keyed_steps:
                return
            raise StateLost(
                f"Spark query {self.id} ({self.name}) is at batch {batch_id}, but engine {self._setup.engine} holds no"
                f" state of batches 0 to {batch_id - 1} of it: its state died with the engine that ran them; start a"
                " new query from batch 0 (a new checkpoint)",
                query=self.id,
                engine=self._setup.engine,
                epoch=batch_id,
                expected=0,
            )
        if batch_id != self.completed + 1:
            raise EngineError(
                f"Spark query {self.id} ({self.name}) asks for batch {batch_id}, but its state in engine"
                f" {self._setup.engine} is at batch {self.completed}: only {self.completed + 1} can follow",
                query=self.id,
                engine=self._setup.engine,
                epoch=batch_id,
                expected=self.completed + 1,
            )

    def _require_members(self, epoch: int) -> None:
        gone = next((member for member in self._members if member.lost is not None), None)
        if gone is not None:
            self._lose(gone, epoch)

    def _lose(self, member: Member, epoch: int) -> NoReturn:
        """The state that was at a member is gone, and the query with it."""
        reason = f"{member} is gone: {member.lost}"
        with self._lock:
            self._status = _Status.LOST
            self._trouble = reason
        self.drop()
        self._forget()
        raise StateLost(
            f"query {self.name} lost its state in epoch {epoch}: {reason}. Nothing was given out for this epoch;"
            " start a new query from batch 0 (a new checkpoint)",
            query=self.id,
            member=member.id,
            executor=member.executor,
            epoch=epoch,
        )

    def _forget(self) -> None:
        self._members = ()
        self._frozen, self._served, self.completed, self._watermark = None, True, None, None
        self._pending = self._fed = None
        self._clock = (-1, self._clock[1])
        self._setup.recorder.forget(self.name)

    # Generations

    def _ready(self, epoch: int, check: Check) -> None:
        """Have workers that can run an epoch."""
        if any(member.lost is not None for member in self._members):
            if self.program.keyed_steps and self.completed is not None:
                self._require_members(epoch)
            # No epoch was completed, or nothing but the watermark is kept between batches, which the driver has.
            self.drop()
            self._members = ()
            with self._lock:
                self._status = _Status.FRESH
        if self._status is _Status.BROKEN:
            self._roll_back(epoch, check)
        if self._status is _Status.FRESH:
            members = tuple(self._setup.members(check))
            workers = len(members) * self._setup.threads
            owners = [
                [bin_ % workers for bin_ in range(1 << self._setup.bits)] for _ in range(self.program.keyed_steps)
            ]
            self._start(members, owners, epoch, "fresh", check)
        if self._fed is not None:
            for member in self._members:
                self._hub.call(member, {"do": "discard", "query": self.id, "epoch": self._fed})
            self._fed = None

    def _settle_past(self) -> None:
        """Find out what became of an epoch that was released and then abandoned."""
        pending = self._pending
        if pending is None or not all(call.served for call in pending.calls):
            return
        # Nobody waited for it, but it was completed everywhere.
        self._complete(pending.epoch, pending.calls, pending.watermark)
        with self._lock:
            if self._status is _Status.BROKEN and all(member.lost is None for member in self._members):
                self._status = _Status.RUNNING

    def _roll_back(self, epoch: int, check: Check) -> None:
        """End the generation everywhere and begin the next one with the state at the end of the last epoch."""
        log.info("query %s goes back to the end of epoch %s", self.name, self.completed)
        request = {
            "do": "stop_query",
            "query": self.id,
            "generation": self._generation,
            "keep": True,
            "epoch": epoch,
        }
        calls = [self._hub.call(member, request) for member in self._members]
        self._hub.wait(calls, check)
        self._require_members(epoch)
        failures = [call.failure for call in calls if call.failure is not None]
        if failures:
            self._give_up(f"it cannot go back to the end of epoch {self.completed}: {root(failures)}", epoch)
        self._pending = None
        owners = self._next_owners([call.body["inventory"]["ops"] for call in calls], epoch)
        self._start(self._members, owners, epoch, "resident", check)

    def _next_owners(self, inventories: Sequence[Sequence[Sequence[int]]], epoch: int) -> list[list[int]]:
        """Give every bin to a worker of the process that has the state to go on from."""
        threads = self._setup.threads
        result = []
        for op in range(self.program.keyed_steps):
            before = self._owners[op]
            owners = [-1] * (1 << self._setup.bits)
            for process, inventory in enumerate(inventories):
                for bin_ in inventory[op] if op < len(inventory) else ():
                    # A bin cut off on its way between epochs is where it was and perhaps where it goes: equal copies.
                    last = before[bin_]
                    if last // threads == process:
                        owners[bin_] = last
                    elif owners[bin_] < 0:
                        owners[bin_] = process * threads + bin_ % threads
            missing = [bin_ for bin_, owner in enumerate(owners) if owner < 0]
            if missing:
                reason = f"{len(missing)} bins of keyed step {op} are at no member, the first is bin {missing[0]}"
                self._give_up(reason, epoch)
            result.append(owners)
        return result

    def _give_up(self, reason: str, epoch: int) -> NoReturn:
        """The state cannot be used any more."""
        with self._lock:
            self._status = _Status.LOST
            self._trouble = reason
        self.drop()
        self._forget()
        raise StateLost(f"query {self.name} lost its state: {reason}", query=self.id, epoch=epoch)

    def _start(
        self, members: tuple[Member, ...], owners: list[list[int]], epoch: int, resume: str, check: Check
    ) -> None:
        """Begin a generation at all members."""
        with self._lock:
            # Until all have answered: broken, or nothing that could be.
            self._status = _Status.FRESH if resume == "fresh" else _Status.BROKEN
            self._generation = self._setup.generation()
            self._members = members
            self._owners = owners
        peers = [{"id": member.id, "address": member.address} for member in members]
        request = {
            "do": "start",
            "query": self.id,
            "generation": self._generation,
            "plan": json.loads(self.program.plan),
            "members": peers,
            "threads": self._setup.threads,
            "bits": self._setup.bits,
            "owners": owners,
            "epoch": epoch,
            "watermark": self._watermark,
            "resume": resume,
            "journal": True,
            "window": self._setup.window,
            "slice_rows": self._setup.slice_rows,
        }
        calls = [
            self._hub.call(member, {**request, "process": process}, self.program.calls)
            for process, member in enumerate(members)
        ]
        self._answers(calls, epoch, check)
        with self._lock:
            if all(member.lost is None for member in members):
                self._status = _Status.RUNNING
                self._trouble = ""

    def _answers(self, calls: Sequence[Call], epoch: int, check: Check) -> None:
        """Wait for the answers; raise StateLost for a lost member, else the root failure."""
        # One failure ends the epoch everywhere; the others say so soon.
        self._hub.wait(calls, check, until=lambda some: any(call.failure or call.lost for call in some))
        if not all(call.settled for call in calls):
            self._hub.wait(calls, check, timeout=_LOSS_S)
        failures = [call.failure for call in calls if call.failure is not None]
        lost = [call for call in calls if call.lost is not None]
        if not failures and not lost:
            return
        if not lost and all(failure.echo for failure in failures):
            # A peer says that another one is gone; the driver's own connection tells which.
            self._hub.wait_for(lambda: any(m.lost is not None for m in self._members), check, _LOSS_S)
        gone = next((member for member in self._members if member.lost is not None), None)
        if gone is not None and not any(failure.kind == "user_function" for failure in failures):
            if self.program.keyed_steps and self._status is not _Status.FRESH:
                self._lose(gone, epoch)
            raise EngineError(f"{gone} is gone: {gone.lost}", member=gone.id, executor=gone.executor, epoch=epoch)
        raise_root(failures)

    # One epoch

    def _feed(self, df: DataFrame, epoch: int, check: Check) -> tuple[feeds.Receipt, ...]:
        """Bring the rows to the members; the receipts that come back are the commit."""
        flow = self.program.flow
        wanted = _select(flow, df)
        if self.program.ordered and flow.order_by:
            wanted = wanted.sort(*(_quoted(name) for name in flow.order_by))
        seats = tuple(feeds.Seat(member.id, member.executor, member.address) for member in self._members)
        task = feeds.FeedTask(self.id, epoch, flow.input_schema, seats, self._setup.secret, self._setup.silence)
        self._fed = epoch
        try:
            with described(df.sparkSession, f"penstock {self.name}: feed epoch {epoch}"):
                rows = by_place(wanted).mapInArrow(task, feeds.RECEIPTS_DDL).collect()
        except Exception as error:
            # First the reasons that are ours to tell; `check` raises when the query was stopped.
            check()
            text = str(error)
            # A task gives a silent member up on its own; the registry does a little later, and says who it is.
            patience = 1.0 + (self._setup.silence if "penstock.errors.ProtocolError" in text else 0.0)
            self._hub.wait_for(lambda: any(m.lost is not None for m in self._members), check, patience)
            self._require_members(epoch)
            for kind in (SchemaError, StorageError):
                mark = f"penstock.errors.{kind.__name__}:"
                line = next((line for line in text.splitlines() if mark in line), None)
                if line is not None:
                    raise kind(line.partition(mark)[2].strip()) from None
            raise
        receipts = [feeds.Receipt(**row.asDict()) for row in rows]
        receipts.sort(key=lambda receipt: receipt.partition)
        if len({receipt.partition for receipt in receipts}) != len(receipts):
            raise EngineError(f"Spark delivered two attempts of one partition of epoch {epoch}")
        return tuple(receipts)

    def _watermark_after(self, receipts: Sequence[feeds.Receipt]) -> int | None:
        """The watermark at the end of an epoch: it never goes back, and moves only with rows."""
        times = [receipt.max_event_time for receipt in receipts if receipt.max_event_time is not None]
        if not times:
            return self._watermark
        reached = max(times) - self.program.flow.lateness_ms * 1_000
        return reached if self._watermark is None else max(self._watermark, reached)

    def _run(
        self,
        epoch: int,
        receipts: Sequence[feeds.Receipt],
        watermark: int | None,
        check: Check,
        finish: bool = False,
    ) -> _Frozen:
        """Release an epoch and wait until it is complete everywhere."""
        self._require_members(epoch)
        if self._clock[0] != epoch:
            self._clock = (epoch, max(self._clock[1], int(time.time() * 1_000)))
        clock_ms = self._clock[1]
        before, rows_before = 0, {}
        for receipt in receipts:
            rows_before[receipt.partition] = before
            before += receipt.rows
        calls = []
        for member in self._members:
            own = [
                {
                    "partition": receipt.partition,
                    "attempt": receipt.attempt,
                    "rows": receipt.rows,
                    "rows_before": rows_before[receipt.partition],
                }
                for receipt in receipts
                if receipt.member == member.id
            ]
            request = {
                "do": "release",
                "query": self.id,
                "generation": self._generation,
                "epoch": epoch,
                "feeds": own,
                "watermark": watermark,
                "clock_ms": clock_ms,
                "finish": finish,
            }
            calls.append((member, request))
        try:
            sent = [self._hub.call(member, request) for member, request in calls]
            self._pending = _Pending(epoch, tuple(sent), watermark)
            self._answers(sent, epoch, check)
        except BaseException:
            # Whatever it was, the next batch starts from the last completed epoch.
            with self._lock:
                if self._status is _Status.RUNNING:
                    self._status = _Status.BROKEN
            raise
        return self._complete(epoch, sent, watermark)

    def _complete(self, epoch: int, calls: Sequence[Call], watermark: int | None) -> _Frozen:
        rows, late, late_rows = [], [], 0
        for call in calls:
            for piece in call.body["pieces"]:
                if piece["rows"]:
                    rows.append(drains.Piece(call.member.address, piece["piece"], piece["rows"]))
                if piece["late_rows"]:
                    late.append(drains.Piece(call.member.address, piece["piece"], piece["late_rows"]))
                late_rows += piece["late_rows"]
        self._pending = self._fed = None
        self.completed = epoch
        self._watermark = watermark
        self.late_rows += late_rows
        self._served = False
        self._frozen = _Frozen(epoch, tuple(rows), tuple(late), late_rows)
        return self._frozen

    def _serve(
        self,
        session: SparkSession,
        frozen: _Frozen,
        sink: Callable[[DataFrame, int], Any],
        late: Callable[[DataFrame, int], Any] | None,
    ) -> None:
        sink(self._frame(session, frozen, "rows"), frozen.epoch)
        if late is not None:
            late(self._frame(session, frozen, "late"), frozen.epoch)
        elif frozen.late_rows:
            log.warning("query %s: %d late rows in epoch %d", self.name, frozen.late_rows, frozen.epoch)
        self._served = True

    def _frame(self, session: SparkSession, frozen: _Frozen, which: Literal["rows", "late"]) -> DataFrame:
        pieces, schema = (
            (frozen.rows, self.program.output) if which == "rows" else (frozen.late, self.program.flow.input_schema)
        )
        secret, silence = self._setup.secret, self._setup.silence
        return drains.outputs(session, self.id, frozen.epoch, which, pieces, schema, secret, silence)

    # Moving bins

    def migrate(
        self,
        handle: Migration,
        to: Sequence[Any] | None,
        moves: Any,
        strategy: str,
        batch_size: int,
    ) -> None:
        """Start moving bins and enter that into a handle."""
        with self._lock:
            if self._status is not _Status.RUNNING:
                raise EngineError(f"query {self.name} {self.status}: its bins cannot move now")
            bins, workers = 1 << self._setup.bits, self.workers
            if moves is not None:
                if to is not None:
                    raise ConfigError("migrate takes to= or moves=, not both")
                todo = parse_moves(moves, bins, workers)
            elif to is not None:
                todo = moves_to(self._owners, to, workers) if self._owners else []
            else:
                todo = moves_to(self._owners, balanced(self._owners[0], workers), workers) if self._owners else []
            if not self._owners and todo:
                raise ConfigError(f"query {self.name} keeps no state: it has no bins to move")
            todo = [(bin_, worker) for bin_, worker in todo if any(op[bin_] != worker for op in self._owners)]
            plan = steps(self._owners, todo, strategy, batch_size)
            generation, leader = self._generation, self._members[0]
            self._handles += 1
            number = self._handles
        end = handle.begin(MoveReport(self.name, strategy), len(todo))
        if not plan:
            end({"moved": 0, "bytes": 0, "steps": []}, None)
            return
        started = time.time()

        def settled(call: Call) -> None:
            error: Exception | None = None
            if call.lost is not None:
                error = EngineError(f"the migration of query {self.name} was cut off: {call.lost}")
            elif call.failure is not None:
                error = EngineError(f"the migration of query {self.name} was cancelled: {call.failure}")
            else:
                with self._lock:
                    if self._generation == generation:
                        # Those of a cancelled migration that were done.
                        for bin_, worker in itertools.chain(*plan[: len(call.body["steps"])]):
                            for op in self._owners:
                                op[bin_] = worker
                # The leader sees the bytes of its own process only: ask all of them.
                ended = time.time()
                self._setup.recorder.after_refresh(lambda: told(call.body, ended))
                return
            end(None, error)

        def told(answer: Mapping[str, Any], ended: float) -> None:
            moved = {**answer, "bytes": self._setup.recorder.take_moved_bytes(self.name)}
            self._setup.recorder.migration(
                timeline.Migration(
                    started, ended, strategy, int(moved["moved"]), moved["bytes"], len(moved["steps"]), self.name
                )
            )
            end(moved, None)

        request = {
            "do": "migrate",
            "query": self.id,
            "generation": generation,
            "handle": number,
            "steps": plan,
        }
        self._hub.call(leader, request, hook=settled)
        stop = {"do": "cancel_migration", "query": self.id, "generation": generation, "handle": number}

        def cancel() -> None:
            self._hub.call(leader, stop)

        handle.cancellable(cancel)


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
