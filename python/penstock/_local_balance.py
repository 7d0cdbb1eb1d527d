"""A local run as its autobalance (`penstock._autobalance`) sees it.

Owns: what is known of the run at a look, and how moves are asked for: by the calls that users have, and where workers
are processes by their crew. There the workers with bins are numbered by age for who decides, and have their own numbers
again when bins move.

Where workers are processes, one that is in a call of a function tells nothing until that returns: what it does would be
missing from a look, and be too much in a later one. So a look says something, of all that came since the last one that
did, only when each worker has told of about that time; and when an epoch has ended, for within a long one a worker may
wait for what another one has of it.

Invariants: it keeps no run alive; while the number of processes changes it says nothing, and what is said afterwards is
of another generation. That no rows come is said only of a run that rests: one whose workers are in calls takes none.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock._autobalance import PAUSE_S, Looked, see_through
from penstock._parts import Part
from penstock.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from penstock._crew import Crew
    from penstock._rescale import LocalRescale

__all__ = ["Balanced"]

log = logging.getLogger(__name__)

#: How long no more processes are asked for after some did not come up, seconds.
_AGAIN_S = 600.0
#: Share of the time between two looks of which a worker may not have told, beside what an answer is under way.
_MISSING, _LAG_S = 0.25, 0.05


class Balanced:
    """See the module; the type of the session is not named here, since it makes these."""

    def __init__(self, session: Any) -> None:
        self._session = weakref.ref(session)
        self.whole = None if session._crew is None else "a run on processes splits no bins: they move whole"
        self.threads: int = session.workers
        #: Workers with bins, by which their numbers here go, and how often they have changed.
        self._members: list[int] = []
        self._generation = 0
        #: Rows and busy seconds of each worker that there was; and when the last look was that was of use, and the rows
        #: that had come.
        self._done: dict[tuple[int, int], tuple[int, float]] = {}
        self._before: tuple[float, int] | None = None
        #: When each worker of processes had told by then, and when that was.
        self._told: tuple[dict[int, float], float] = {}, 0.0
        #: Epochs that had ended then.
        self._ended = 0
        #: The last rescale that was asked for here; until when no more processes are, of `time.monotonic`; and what was
        #: told of the last one that failed.
        self._asked: LocalRescale | None = None
        self._short = 0.0
        self._told_failure = ""

    def _open(self) -> Any:
        session = self._session()
        if session is None or session._last is not None:
            raise EngineError("the run has ended")
        return session

    @property
    def workers(self) -> int | None:
        """Processes that there are; None while their number changes, or where there are none."""
        crew: Crew | None = self._open()._crew
        return None if crew is None or self._is_rescaling(crew) else len(crew.processes)

    def _is_rescaling(self, crew: Crew) -> bool:
        # One that has ended tells so a little later.
        return crew.is_rescaling or (self._asked is not None and not self._asked.done)

    def looked(self) -> list[Looked]:
        """What is known of the run, where it keeps state."""
        session = self._open()
        crew: Crew | None = session._crew
        if crew is not None and self._is_rescaling(crew):
            return []
        self._hear()
        told = session._told()
        native = session._native
        bins = native.bins()
        if not bins:
            return []
        owner = {(prefix, bits): worker for prefix, bits, worker in bins[0]}
        members = list(range(session.workers))
        if crew is not None:
            members = sorted(native.members)
            # The first one feeds and takes.
            members = members[1:] or members
        if not set(owner.values()) <= set(members):
            return []  # some are on their way
        if members != self._members:
            self._members, self._generation = members, self._generation + 1
        # Of processes that of the worker that feeds: it is there from the beginning, and an epoch ends for all at once.
        ended = min((worker["epochs"] for worker in told["workers"] if worker["pid"] == os.getpid()), default=0)
        rests = ended >= session.epoch
        missing = ""
        if crew is not None and session._streaming and not rests and ended == self._ended:
            missing = "no batch has ended since the last verdict"
        elif crew is not None:
            missing = self._silent(told["workers"], members)
        if not missing:
            self._ended = ended
        rows, busy_s, offered = self._measured(told["workers"], crew is not None, not missing, rests)
        sizes = [{(prefix, bits): size for prefix, bits, size in step} for step in native.bin_bytes()]
        known = sizes if crew is None else []
        parts = sorted(owner)
        return [
            Looked(
                "",
                self._generation,
                session._bits,
                parts,
                [members.index(owner[part]) for part in parts],
                len(members),
                told["loads"],
                [sum(step.get(part, 0) for step in known) if known else None for part in parts],
                rows,
                busy_s,
                offered,
                missing,
            )
        ]

    def _silent(self, workers: Sequence[Mapping[str, Any]], members: Sequence[int]) -> str:
        """Why a look says nothing: some of these workers have told of much less time than has passed since the last
        one that did, or of much more."""
        now = time.monotonic()
        told = {worker["worker"]: worker["told_s"] for worker in workers if "told_s" in worker}
        before, since = self._told
        silent = len(set(members) - set(told))
        for worker in set(members) & set(told):
            of = told[worker] - before.get(worker, told[worker] - (now - since))
            silent += abs(of - (now - since)) > _MISSING * (now - since) + _LAG_S
        if silent:
            return f"figures of {silent} of {len(members)} workers have not come"
        self._told = told, now
        return ""

    def _measured(
        self, workers: Sequence[Mapping[str, Any]], processes: bool, useful: bool, rests: bool
    ) -> tuple[int, float, float | None]:
        """Rows that have come, seconds that workers with bins were busy, and rows a second since the last look that was
        of use; None where that is not known, as where rows may wait that no worker takes."""
        for worker in workers:
            own = worker["pid"] == os.getpid()
            busy = 0.0 if processes and own else worker["busy_ns"] / 1e9
            self._done[worker["pid"], worker["worker"]] = worker["rows"], busy
        rows = sum(rows for rows, _ in self._done.values())
        before, now, offered = self._before, time.monotonic(), None
        if useful:
            self._before = now, rows
        if before is not None and now > before[0] and (rows > before[1] or rests):
            offered = (rows - before[1]) / (now - before[0])
        return rows, sum(busy for _, busy in self._done.values()), offered

    def move(self, query: str, moves: Mapping[Part, int], stopping: Callable[[], bool]) -> Any:
        """Move bins, and wait for the end; returns the handle where that takes long."""
        session = self._open()
        if session._crew is not None:
            to = [(prefix, self._members[worker]) for (prefix, _), worker in moves.items()]
            return see_through(session._even_out(to, PAUSE_S), stopping)
        named = {self._named(part): worker for part, worker in moves.items()}
        return see_through(session.migrate(moves=named, strategy="matched", max_pause=PAUSE_S), stopping)

    def recut(
        self, query: str, splits: Mapping[Part, int], merges: Sequence[Part], stopping: Callable[[], bool]
    ) -> Any:
        """Split bins by so many bits, make others one again, and wait for the end; no more where the flow allows none.
        Returns the handle of one that takes long, behind which no other is begun.

        One after the other: rows wait while one is copied.
        """
        session, left = self._open(), None
        for part, by in [*splits.items(), *((part, 0) for part in merges)]:
            if left is not None or stopping():
                break
            with session._moving:
                # Somebody may have split or merged it since the look: that is refused, and says nothing of the flow.
                plan = session._parts().copy()
                _ = plan.split(part, by) if by else plan.merge(part)
                try:
                    handle = session.split(part, by) if by else session.merge(part)
                except ConfigError:
                    self.whole = "bins in which rows wait for the end of the input are not split"
                    raise
            left = see_through(handle, stopping)
        return left

    def _named(self, part: Part) -> Any:
        """A bin or part as `LocalSession.migrate` takes it."""
        return part[0] if part[1] == self._open()._bits else part

    def _hear(self) -> None:
        """What became of the rescale that was asked for."""
        asked, self._asked = self._asked, None
        if asked is not None and asked.error is not None:
            self._failed_to(asked.workers, asked.report.before, asked.error)

    def _failed_to(self, workers: int, there: int, error: Exception) -> None:
        """Tell of a number of processes that cannot be had, once; where they are more, none are asked for for now."""
        if workers > there:
            self._short = time.monotonic() + _AGAIN_S
        told = f"{type(error).__name__}: {error}"
        if told != self._told_failure:
            self._told_failure = told
            log.warning("balance cannot go from %d processes to %d: %s", there, workers, told)

    def room(self, workers: int) -> int:
        """The number to ask for on the way to so many processes: those that there are while no more come up."""
        there = self.workers
        return workers if there is None or time.monotonic() >= self._short else min(workers, there)

    def resize(self, workers: int) -> None:
        """Ask for another number of processes."""
        session = self._open()
        try:
            self._asked = session.rescale(workers)
        except ConfigError as error:
            self._failed_to(workers, len(session._crew.processes), error)
            raise

    def tell(self, query: str, advised: bool, **facts: Any) -> None:
        """Enter in the log what was done, or what would be."""
        told = " ".join(f"{name}={fact}" for name, fact in facts.items() if fact is not None)
        log.info("balance advised %s" if advised else "balanced %s", told)

    def failed(self, error: Exception) -> None:
        """Enter in the log why a look came to nothing."""
        log.info("balance failed: %s: %s", type(error).__name__, error)
