"""The workers of one query at the members: one generation of them after the other, and where its bins are.

Owns: which members serve the query, under which generation, and who owns each bin; beginning a generation, ending it
everywhere with the state at the end of the last completed epoch, and moving bins while one runs.

Invariants:
- A generation is one life of the worker threads of a query; its number is larger than every one before, so what an
  earlier one says late is told apart.
- A new generation starts from the bins that the members report, each bin once, or from none at all.
- A lost member means lost state: the query ends with `StateLost` and never gives a wrong number. Where no state is kept
  yet, or none ever, nothing is lost: the epoch is `Shorthanded` and runs again with a replacement.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock._migration import Wish
from penstock.errors import EngineError, StateLost
from penstock.report import _timeline as timeline
from penstock.spark._engine.hub import Call, Hub, Member
from penstock.spark._engine.migrate import Migration
from penstock.spark._engine.moves import Ended, Moves
from penstock.spark._engine.program import Program
from penstock.spark._engine.record import Recorder
from penstock.spark._tasks.failures import Failure, raise_root, root
from penstock.spark._tasks.place import Secret

__all__ = ["Check", "Generations", "Setup", "Shorthanded", "Status"]

log = logging.getLogger(__name__)

#: How long to wait for the loss of a member to be noticed after something else failed, seconds.
_LOSS_S = 3.0

Check = Callable[[], None]


class Shorthanded(EngineError):
    """The workers of an epoch are gone, and nothing with them that its rows would not make again."""


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


class Status(enum.Enum):
    """What may be asked of a query."""

    FRESH = "has not begun"
    RUNNING = "runs"
    BROKEN = "goes back to its last completed epoch at the next batch"
    LOST = "has lost its state"
    FINISHED = "is finished"


class Generations:
    """The generations of one query.

    Attributes
    ----------
    status : Status
        What may be asked of it.
    trouble : str
        Why it does not run.
    members : tuple of Member
        Who serves the present generation.
    number : int
        Of the present generation.

    Parameters
    ----------
    forget : callable
        Called when the state is gone: what the caller remembers of it is to go, too.
    keeps : callable
        Whether members hold what the rows of an epoch would not make again.
    """

    def __init__(
        self,
        setup: Setup,
        program: Program,
        query_id: str,
        name: str,
        forget: Callable[[], None],
        keeps: Callable[[], bool],
    ) -> None:
        self.status = Status.FRESH
        self.trouble = ""
        self.members: tuple[Member, ...] = ()
        self.number = 0
        self._setup = setup
        self._hub = setup.hub
        self._program = program
        self._id = query_id
        self._name = name
        self._forget = forget
        self._keeps = keeps
        #: Guards what migrations and readers look at.
        self._lock = threading.Lock()
        self._owners: list[list[int]] = []
        self._handles = 0
        self._moves = Moves(self._move)

    # Looking

    @property
    def workers(self) -> int:
        """Workers of the present generation."""
        return len(self.members) * self._setup.threads

    def owners(self) -> list[list[int]]:
        """Owner of each bin, by keyed step."""
        with self._lock:
            return [list(step) for step in self._owners]

    def any_lost(self) -> bool:
        """Whether a member is gone."""
        return any(member.lost is not None for member in self.members)

    def await_loss(self, patience: float, check: Check) -> None:
        """Wait for the registry to notice that a member is gone, at most so many seconds."""
        self._hub.wait_for(self.any_lost, check, patience)

    # What has happened

    def become(self, status: Status) -> None:
        """The caller knows better."""
        with self._lock:
            self.status = status

    def adopt(self, program: Program) -> None:
        """The functions have changed: the next epoch needs workers that have them."""
        self._program = program
        with self._lock:
            if self.status is Status.RUNNING:
                self.status = Status.BROKEN
                self.trouble = "its functions have changed"

    def failed(self) -> None:
        """An epoch did not come to its end: the next one needs another generation."""
        with self._lock:
            if self.status is Status.RUNNING:
                self.status = Status.BROKEN

    def succeeded(self) -> None:
        """An epoch came to its end after all."""
        with self._lock:
            if self.status is Status.BROKEN and not self.any_lost():
                self.status = Status.RUNNING

    def hear(self, facts: Mapping[str, Any], attachment: bytes, member: Member) -> None:
        """A member says that the workers of a generation have failed."""
        with self._lock:
            if int(facts.get("generation", -1)) == self.number and self.status is Status.RUNNING:
                self.status = Status.BROKEN
                failure = Failure(member.id, facts.get("error", {}), attachment)
                self.trouble = str(failure)
                log.warning("query %s: %s", self._name, self.trouble)

    def hear_lost(self, member: Member) -> None:
        """A member is gone."""
        with self._lock:
            if member in self.members and self.status is Status.RUNNING:
                self.status = Status.BROKEN
                self.trouble = f"{member} is gone: {member.lost}"

    # Ends

    def drop(self) -> list[Call]:
        """Forget everything at the members; does not wait."""
        request = {"do": "drop_query", "query": self._id}
        return [self._hub.call(member, request) for member in self.members if member.lost is None]

    def give_back(self) -> list[Call]:
        """The query is dropped: no generation follows, and nothing moves any more."""
        calls = self.drop()
        with self._lock:
            self.status = Status.LOST
            self.trouble = "it was dropped"
            self.members = ()
        return calls

    def finish(self) -> None:
        """The final epoch is over: workers, their connections and the state end, what came out stays; does not wait."""
        self.become(Status.FINISHED)
        for member in self.members:
            request = {"do": "stop_query", "query": self._id, "generation": self.number, "keep": False}
            self._hub.call(member, request)

    def require_members(self, epoch: int) -> None:
        """Refuse to go on without one of them.

        Raises
        ------
        StateLost
            When a member is gone; the query has lost its state then.
        Shorthanded
            When it held none.
        """
        gone = next((member for member in self.members if member.lost is not None), None)
        if gone is not None:
            self._lose(gone, epoch)

    def _lose(self, member: Member, epoch: int) -> NoReturn:
        """The state that was at a member is gone, and the query with it."""
        reason = f"{member} is gone: {member.lost}"
        if not self._keeps():
            raise Shorthanded(reason, query=self._id, member=member.id, executor=member.executor, epoch=epoch)
        self._end(reason)
        raise StateLost(
            f"query {self._name} lost its state in epoch {epoch}: {reason}. Nothing was given out for this epoch;"
            " start a new query from batch 0 (a new checkpoint)",
            query=self._id,
            member=member.id,
            executor=member.executor,
            epoch=epoch,
        )

    def _give_up(self, reason: str, epoch: int) -> NoReturn:
        """The state cannot be used any more."""
        if not self._keeps():
            self._renew()
            raise Shorthanded(reason, query=self._id, epoch=epoch)
        self._end(reason)
        raise StateLost(f"query {self._name} lost its state: {reason}", query=self._id, epoch=epoch)

    def _end(self, reason: str) -> None:
        with self._lock:
            self.status = Status.LOST
            self.trouble = reason
        self.drop()
        self.members = ()
        self._forget()

    def _renew(self) -> None:
        """Nothing is kept: the next epoch begins with new workers."""
        self.drop()
        self.members = ()
        with self._lock:
            self.status = Status.FRESH

    # Beginnings

    def ready(self, epoch: int, completed: int | None, watermark: int | None, check: Check) -> None:
        """Have workers that can run an epoch, with the state and the watermark at the end of the last completed one."""
        if self.any_lost():
            if self._keeps():
                self.require_members(epoch)
            # No epoch was completed, or nothing but the watermark is kept between batches, which the driver has.
            self._renew()
        if self.status is Status.BROKEN:
            self._roll_back(epoch, completed, watermark, check)
        if self.status is Status.FRESH:
            members = tuple(self._setup.members(check))
            workers = len(members) * self._setup.threads
            owners = [
                [bin_ % workers for bin_ in range(1 << self._setup.bits)] for _ in range(self._program.keyed_steps)
            ]
            self._start(members, owners, epoch, watermark, "fresh", check)

    def _roll_back(self, epoch: int, completed: int | None, watermark: int | None, check: Check) -> None:
        """End the generation everywhere and begin the next one with the state at the end of the last epoch."""
        log.info("query %s goes back to the end of epoch %s", self._name, completed)
        request = {
            "do": "stop_query",
            "query": self._id,
            "generation": self.number,
            "keep": True,
            "epoch": epoch,
        }
        calls = [self._hub.call(member, request) for member in self.members]
        self._hub.wait(calls, check)
        self.require_members(epoch)
        failures = [call.failure for call in calls if call.failure is not None]
        if failures:
            self._give_up(f"it cannot go back to the end of epoch {completed}: {root(failures)}", epoch)
        owners = self._next_owners([call.body["inventory"]["ops"] for call in calls], epoch)
        self._start(self.members, owners, epoch, watermark, "resident", check)

    def _next_owners(self, inventories: Sequence[Sequence[Sequence[int]]], epoch: int) -> list[list[int]]:
        """Give every bin to a worker of the process that has the state to go on from."""
        threads = self._setup.threads
        result = []
        for op in range(self._program.keyed_steps):
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

    def _start(
        self,
        members: tuple[Member, ...],
        owners: list[list[int]],
        epoch: int,
        watermark: int | None,
        resume: str,
        check: Check,
    ) -> None:
        """Begin a generation at all members."""
        with self._lock:
            # Until all have answered: broken, or nothing that could be.
            self.status = Status.FRESH if resume == "fresh" else Status.BROKEN
            self.number = self._setup.generation()
            self.members = members
            self._owners = owners
        peers = [{"id": member.id, "address": member.address} for member in members]
        request = {
            "do": "start",
            "query": self._id,
            "generation": self.number,
            "plan": json.loads(self._program.plan),
            "members": peers,
            "threads": self._setup.threads,
            "bits": self._setup.bits,
            "owners": owners,
            "epoch": epoch,
            "watermark": watermark,
            "resume": resume,
            "journal": True,
            "window": self._setup.window,
            "slice_rows": self._setup.slice_rows,
        }
        calls = [
            self._hub.call(member, {**request, "process": process}, self._program.calls)
            for process, member in enumerate(members)
        ]
        self.answers(calls, epoch, check)
        with self._lock:
            if not self.any_lost():
                self.status = Status.RUNNING
                self.trouble = ""

    def answers(self, calls: Sequence[Call], epoch: int, check: Check) -> None:
        """Wait for the answers; raise what `require_members` raises for a lost member, else the root failure."""
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
            self.await_loss(_LOSS_S, check)
        gone = next((member for member in self.members if member.lost is not None), None)
        if gone is not None and not any(failure.kind == "user_function" for failure in failures):
            self._lose(gone, epoch)
        raise_root(failures)

    # Moving bins

    def migrate(
        self,
        handle: Migration,
        to: Sequence[Any] | None,
        moves: Any,
        strategy: str,
        batch_size: int,
    ) -> None:
        """Move bins when the migrations before this one have ended, and enter that into a handle."""
        with self._lock:
            self._require_running()
            owners, workers = [list(step) for step in self._owners], self.workers
        bins = 1 << self._setup.bits
        wish = Wish.of(to, moves, strategy, batch_size, bins, workers)
        # What is wrong whatever moves before is told to the caller, not to the handle.
        wish.plan(owners, workers, bins, f"query {self._name}")
        self._moves.add(handle, self._name, wish)

    def _require_running(self) -> None:
        if self.status is not Status.RUNNING:
            raise EngineError(f"query {self._name} {self.status.value}: its bins cannot move now")

    def _move(self, wish: Wish, started: Callable[[int], None], ended: Ended) -> Callable[[], None] | None:
        """The turn of a migration has come."""
        with self._lock:
            self._require_running()
            # Until this one has ended nothing else moves them.
            owners = [list(step) for step in self._owners]
            workers, generation, leader = self.workers, self.number, self.members[0]
            self._handles += 1
            number = self._handles
        plan = wish.plan(owners, workers, 1 << self._setup.bits, f"query {self._name}")
        started(sum(map(len, plan)))
        if not plan:
            ended({"moved": 0, "bytes": 0, "steps": []}, None)
            return None
        began = time.time()

        def settled(call: Call) -> None:
            error: Exception | None = None
            if call.lost is not None:
                error = EngineError(f"the migration of query {self._name} was cut off: {call.lost}")
            elif call.failure is not None:
                error = EngineError(f"the migration of query {self._name} was cancelled: {call.failure}")
                error.__cause__ = call.failure.exception()
            else:
                with self._lock:
                    if self.number == generation:
                        # Those of a cancelled migration that were done.
                        for bin_, worker in itertools.chain(*plan[: len(call.body["steps"])]):
                            for op in self._owners:
                                op[bin_] = worker
                # The leader sees the bytes of its own process only: ask all of them.
                over = time.time()
                self._setup.recorder.after_refresh(lambda: told(call.body, over))
                return
            ended(None, error)

        def told(answer: Mapping[str, Any], over: float) -> None:
            moved = {**answer, "bytes": self._setup.recorder.take_moved_bytes(self._name)}
            self._setup.recorder.migration(
                timeline.Migration(
                    began, over, wish.strategy, int(moved["moved"]), moved["bytes"], len(moved["steps"]), self._name
                )
            )
            ended(moved, None)

        request = {
            "do": "migrate",
            "query": self._id,
            "generation": generation,
            "handle": number,
            "steps": plan,
        }
        self._hub.call(leader, request, hook=settled)
        stop = {"do": "cancel_migration", "query": self._id, "generation": generation, "handle": number}

        def cancel() -> None:
            self._hub.call(leader, stop)

        return cancel
