"""One query at the members: its epochs, and which batch of Spark's may be asked of it when.

Owns: the way of a batch, from Spark's id and rows to outputs that a sink reads. Who computes it, and what becomes of
that after a failure, is in `generation`.

Invariants:
- State belongs to one Spark query id. The only batch ids that are served are the next one, and the last completed
  one again, whose outputs are still frozen. Anything else is an error that names both.
- Batches end quiescent. After a failure or an abandoned epoch everything goes back to the end of the last
  completed one (generation + 1), lazily, when the next batch is asked for.
- A lost member ends the query only with state. Without any, the epoch runs again on a replacement, and so does one
  whose outputs went with the member before Spark had committed it.
- The outputs of an epoch are dropped when the next batch is asked for, which proves that Spark committed it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.errors import EngineError, PenstockError, SchemaError, StateLost, StorageError
from penstock.report._timeline import Epoch
from penstock.spark._engine import drains, feeds
from penstock.spark._engine.generation import Check, Generations, Setup, Shorthanded, Status
from penstock.spark._engine.hub import Call, Member
from penstock.spark._engine.migrate import Migration
from penstock.spark._engine.program import Program
from penstock.spark.batch import _quoted, _select, by_place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Abandoned", "Query", "described"]

log = logging.getLogger(__name__)
T = TypeVar("T")

#: How often an epoch is begun before the loss of members, one after the other, is taken for its own doing.
_TRIES = 3
#: How long a dropped query's threads are waited for, seconds: a function of the user's may hold one.
_END_S = 10.0


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
class _Frozen:
    """The outputs of a completed epoch."""

    epoch: int
    rows: tuple[drains.Piece, ...]
    late: tuple[drains.Piece, ...]
    late_rows: int
    #: The watermark that it began with.
    watermark: int | None = None


@dataclass(frozen=True)
class _Pending:
    """A released epoch whose answers were not awaited to their end."""

    generation: int
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
        self._generations = Generations(setup, program, query_id, name, self._forget, self._keeps)
        self._watermark: int | None = None
        #: The last epoch that was asked for and its processing time, milliseconds: the same when it is repeated.
        self._clock: tuple[int, int] = (-1, 0)
        self._frozen: _Frozen | None = None
        #: Whether the sink has returned for the frozen epoch.
        self._served = True
        self._pending: _Pending | None = None
        self._fed: int | None = None
        #: It was dropped.
        self._over = False

    # Looking

    @property
    def status(self) -> str:
        """In words."""
        return self._generations.status.value

    @property
    def workers(self) -> int:
        """Workers of the present generation."""
        return self._generations.workers

    @property
    def running(self) -> bool:
        """Whether bins can move now."""
        return self._generations.status is Status.RUNNING

    @property
    def reusable(self) -> bool:
        """Whether its state is gone for good, so that its function may serve another query."""
        return self._generations.status in (Status.LOST, Status.FINISHED)

    @property
    def finished(self) -> bool:
        """Whether its final epoch has run."""
        return self._generations.status is Status.FINISHED

    def owners(self) -> list[list[int]]:
        """Owner of each bin, by keyed step."""
        return self._generations.owners()

    # Its generations

    def migrate(self, handle: Migration, to: Sequence[Any] | None, moves: Any, strategy: str, batch_size: int) -> None:
        """Move bins when their turn comes, and enter that into a handle."""
        self._generations.migrate(handle, to, moves, strategy, batch_size)

    def end(self, check: Check) -> None:
        """Forget everything, here and at the members; waits for their threads for a while.

        Raises
        ------
        EngineError
            When a batch runs.
        """
        if not self._turn.acquire(blocking=False):
            raise EngineError(f"a batch of query {self.name} ({self.id}) runs: stop it, then drop it", query=self.id)
        try:
            self._over = True
            calls = self._generations.give_back()
            self._forget()
        finally:
            self._turn.release()
        if not self._hub.wait(calls, check, _END_S):
            log.warning("query %s was dropped, but a thread of it still runs a function of yours", self.name)

    def hear(self, facts: Mapping[str, Any], attachment: bytes, member: Member) -> None:
        """A member says that the workers of a generation have failed."""
        self._generations.hear(facts, attachment, member)

    def hear_lost(self, member: Member) -> None:
        """A member is gone."""
        self._generations.hear_lost(member)

    def __repr__(self) -> str:
        return f"<Query {self.name!r} {self.status}; completed epoch {self.completed}>"

    # Epochs

    def batch(
        self,
        df: DataFrame,
        batch_id: int,
        program: Program,
        sink: Callable[[DataFrame, int], Any],
        late: Callable[[DataFrame, int], Any] | None,
        check: Check,
    ) -> None:
        """Run or re-serve one batch, with the functions of a program that fits the state."""
        with self._taking_turn(check):
            self._adopt(program)
            frozen, measured = self._epoch(df, batch_id, check)
            clock = time.monotonic()
            try:
                self._serve(df.sparkSession, frozen, sink, late)
            finally:
                if measured is not None:
                    serve = time.monotonic() - clock
                    self._setup.recorder.epoch(replace(measured, seconds=measured.seconds + serve, serve_s=serve))

    def finish(self, session: SparkSession, check: Check) -> DataFrame:
        """Run the final epoch, with the watermark at infinity, and return what it gives."""
        with self._taking_turn(check):
            status = self._generations.status
            if status is Status.FINISHED:
                assert self._frozen is not None
                return self._frame(session, self._frozen, "rows")
            if status is Status.LOST:
                raise StateLost(f"query {self.name} cannot be finished: {self._generations.trouble}")
            if status is Status.FRESH:
                return self._frame(session, _Frozen(0, (), (), 0), "rows")
            # An epoch that was stopped is no part of it, even if it was completed since: Spark has not committed it.
            if not self._served:
                raise EngineError(
                    f"batch {self.completed} of query {self.name} was computed but its sink did not return; start the"
                    " query again from its checkpoint, so that Spark replays the batch, then finish"
                )
            assert self.completed is not None
            epoch = self.completed + 1
            frozen = self._persist(epoch, check, lambda: self._run(epoch, (), None, check, finish=True))
            self._generations.finish()
            return self._frame(session, frozen, "rows")

    @contextlib.contextmanager
    def _taking_turn(self, check: Check) -> Iterator[None]:
        while not self._turn.acquire(timeout=0.1):
            check()
        try:
            check()
            if self._over:
                raise EngineError(f"query {self.name} ({self.id}) was dropped; start it again", query=self.id)
            yield
        finally:
            self._turn.release()

    def _adopt(self, program: Program) -> None:
        """Go on with the functions of a program: edited ones need workers that have them."""
        if program is self.program or program.same_functions(self.program):
            return
        log.info("query %s: its functions have changed, new workers go on from its state", self.name)
        self.program = program
        # An epoch that nobody was given is computed again by the new functions.
        self._pending = None
        self._generations.adopt(program)

    def _epoch(self, df: DataFrame, batch_id: int, check: Check) -> tuple[_Frozen, Epoch | None]:
        """The outputs of a batch, and what it took to compute them; None where they were still here."""
        self._settle_past()
        if self._generations.status is Status.FINISHED:
            raise EngineError(f"query {self.name} ({self.id}) is finished; batch {batch_id} comes too late")
        if self.completed is not None and batch_id == self.completed and self._frozen is not None:
            try:
                self._generations.require_members(batch_id)
                log.info("query %s: batch %d again, its outputs are still here", self.name, batch_id)
                return self._frozen, None
            except Shorthanded as gone:
                log.info("query %s: batch %d again, its outputs are gone: %s", self.name, batch_id, gone)
                self.completed = batch_id - 1 if batch_id > 0 else None
                self.late_rows -= self._frozen.late_rows
                self._watermark = self._frozen.watermark
                self._frozen, self._served = None, True
        self._admit(batch_id)
        return self._persist(batch_id, check, lambda: self._compute(df, batch_id, check))

    def _persist(self, epoch: int, check: Check, work: Callable[[], T]) -> T:
        """Run an epoch; again, when it is shorthanded."""
        tries = 1
        while True:
            try:
                self._ready(epoch, check)
                return work()
            except Shorthanded as gone:
                if tries == _TRIES:
                    raise EngineError(
                        f"epoch {epoch} of query {self.name} was begun {tries} times, and each time a member was lost;"
                        f" at last {gone}",
                        **gone.data,
                    ) from gone
                log.warning("query %s: %s; nothing is lost, epoch %d begins again", self.name, gone, epoch)
                tries += 1

    def _compute(self, df: DataFrame, epoch: int, check: Check) -> tuple[_Frozen, Epoch]:
        """Feed and run an epoch; its outputs, and what they took."""
        if self.completed is not None:
            # Spark asks for the next batch only after it has committed this one.
            for member in self._generations.members:
                self._hub.call(member, {"do": "close_epoch", "query": self.id, "epoch": self.completed})
            self._frozen = None
        started = time.time()
        clock = time.monotonic()
        receipts = self._feed(df, epoch, check)
        fed = time.monotonic()
        frozen = self._run(epoch, receipts, self._watermark_after(receipts), check)
        rows = sum(receipt.rows for receipt in receipts)
        ended = time.monotonic()
        return frozen, Epoch(epoch, started, ended - clock, rows, self.name, feed_s=fed - clock, run_s=ended - fed)

    def _keeps(self) -> bool:
        """Whether the members hold what a batch would not make again."""
        return bool(self.program.keyed_steps) and self.completed is not None

    def _admit(self, batch_id: int) -> None:
        """Refuse any batch id that the state does not belong to."""
        if self._generations.status is Status.LOST:
            if batch_id == 0:
                self._generations.become(Status.FRESH)
                return
            raise StateLost(
                f"query {self.name} ({self.id}) is at batch {batch_id}, but its state is lost:"
                f" {self._generations.trouble}; start a new query from batch 0 (a new checkpoint)",
                query=self.id,
                epoch=batch_id,
            )
        if self.completed is None:
            if batch_id == 0 or not self.program.keyed_steps:
                return
            raise StateLost(
                f"Spark query {self.id} ({self.name}) is at batch {batch_id}, but engine {self._setup.engine} holds no"
                f" state of batches 0 to {batch_id - 1} of it: it died with the engine that ran them, or was dropped;"
                " start a new query from batch 0 (a new checkpoint)",
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

    def _forget(self) -> None:
        """The state is gone, and with it what was reached with it."""
        self._frozen, self._served, self.completed, self._watermark = None, True, None, None
        self._pending = self._fed = None
        self._clock = (-1, self._clock[1])
        self._setup.recorder.forget(self.name)

    def _ready(self, epoch: int, check: Check) -> None:
        """Have workers that can run an epoch, and nothing of an earlier attempt at it."""
        self._generations.ready(epoch, self.completed, self._watermark, check)
        if self._fed is not None:
            request = {"do": "discard", "query": self.id, "epoch": self._fed}
            # The rows come over other connections: any that came before the discard would be lost with the old ones.
            self._generations.answers(
                [self._hub.call(member, request) for member in self._generations.members], epoch, check
            )
            self._fed = None

    def _settle_past(self) -> None:
        """Find out what became of an epoch that was released and then abandoned."""
        pending = self._pending
        if pending is None or pending.generation != self._generations.number:
            return
        if not all(call.served for call in pending.calls):
            return
        # Nobody waited for it, but it was completed everywhere.
        self._complete(pending.epoch, pending.calls, pending.watermark)
        self._generations.succeeded()

    # One epoch

    def _feed(self, df: DataFrame, epoch: int, check: Check) -> tuple[feeds.Receipt, ...]:
        """Bring the rows to the members; the receipts that come back are the commit."""
        flow = self.program.flow
        wanted = _select(flow, df)
        if self.program.ordered and flow.order_by:
            wanted = wanted.sort(*(_quoted(name) for name in flow.order_by))
        seats = tuple(feeds.Seat(member.id, member.executor, member.address) for member in self._generations.members)
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
            self._generations.await_loss(patience, check)
            self._generations.require_members(epoch)
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
        self._generations.require_members(epoch)
        if self._clock[0] != epoch:
            self._clock = (epoch, max(self._clock[1], int(time.time() * 1_000)))
        clock_ms = self._clock[1]
        before, rows_before = 0, {}
        for receipt in receipts:
            rows_before[receipt.partition] = before
            before += receipt.rows
        calls = []
        for member in self._generations.members:
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
                "generation": self._generations.number,
                "epoch": epoch,
                "feeds": own,
                "watermark": watermark,
                "clock_ms": clock_ms,
                "finish": finish,
            }
            calls.append((member, request))
        try:
            sent = [self._hub.call(member, request) for member, request in calls]
            self._pending = _Pending(self._generations.number, epoch, tuple(sent), watermark)
            self._generations.answers(sent, epoch, check)
        except BaseException:
            # Whatever it was, the next batch starts from the last completed epoch.
            self._generations.failed()
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
        before, self._watermark = self._watermark, watermark
        self.late_rows += late_rows
        self._served = False
        self._frozen = _Frozen(epoch, tuple(rows), tuple(late), late_rows, before)
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
        # It is answered from the frozen outputs from now on and never undone: what is kept for that may go.
        for member in self._generations.members:
            self._hub.call(member, {"do": "settle_epoch", "query": self.id, "epoch": frozen.epoch})

    def _frame(self, session: SparkSession, frozen: _Frozen, which: Literal["rows", "late"]) -> DataFrame:
        pieces, schema = (
            (frozen.rows, self.program.output) if which == "rows" else (frozen.late, self.program.flow.input_schema)
        )
        secret, silence = self._setup.secret, self._setup.silence
        return drains.outputs(session, self.id, frozen.epoch, which, pieces, schema, secret, silence)


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
