"""The migrations that users ask for, as the engine's protocol carries them out.

Owns: their numbers, and the way from what the protocol tells of one to the user's handle. When the turn of one comes,
what it then moves and in which steps is decided by the protocol; what is wrong whatever moves before is told at once.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock._migration import Cut
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.report import _timeline as timeline
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.hub import Call
from penstock.spark._engine.migrate import Migration, MoveReport
from penstock.spark._engine.record import Recorder
from penstock.spark._tasks.failures import Failure

__all__ = ["Moves"]


@dataclass
class _Move:
    """One migration of one query."""

    handle: Migration
    report: MoveReport
    end: Callable[[Mapping[str, Any] | None, Exception | None], None]
    refused: PenstockError | None = None
    #: Whether its turn has come.
    begun: bool = False


#: How the protocol refuses the moves of a query because of another one's.
_OTHER = "nothing moves: "
#: And those to a worker that the query does not have.
_NO_WORKER = re.compile(r"there is no worker (\d+): ")
#: Until when a query whose workers do not run has none.
_UNTIL = {
    "has not begun": "when its first batch is done",
    "goes back to its last completed epoch at the next batch": "when that batch is done",
}


@dataclass(frozen=True)
class _Asked:
    """Migrations that are asked for in one call, by number."""

    moves: Mapping[int, _Move]


class Moves:
    """The migrations of one engine. Any thread may ask.

    Parameters
    ----------
    executor : Executor
        Of the engine; must not have started.
    recorder : Recorder
        Hears of those that have ended, and knows the bytes.
    workers : callable, optional
        How many workers the engine is to have, those that are being replaced among them.
    """

    def __init__(self, executor: Executor, recorder: Recorder, workers: Callable[[], int] = lambda: 0) -> None:
        self._executor = executor
        self._recorder = recorder
        self._workers = workers
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, _Move] = {}
        executor.perform(Moving=self._moving, Moved=self._moved)
        executor.when_broken(self._break)

    def ask(self, handle: Migration, wishes: Sequence[tuple[str, str, Any]], cut: Cut, at_epoch: int | None) -> None:
        """Enter a migration of one or several queries into a handle: all of them are taken up, or none.

        Parameters
        ----------
        handle : Migration
            Follows it.
        wishes : list of (query, name, wish)
            The query's id, what people call it, and what moves, as the protocol has it: ``"Even"``,
            ``{"To": workers}``, ``{"Moves": [[[bin, bits], worker], ...]}``.
        cut : Cut
            In which steps.
        at_epoch : int, optional
            The epoch that it is prepared for.

        Raises
        ------
        ConfigError
            When a bin or worker does not exist, or the epoch has passed.
        EngineError
            When a query does not run.
        """
        moves: dict[int, _Move] = {}
        asked: list[dict[str, Any]] = []
        for query, name, wish in wishes:
            report = MoveReport(name, cut.strategy)
            number = next(self._numbers)
            moves[number] = _Move(handle, report, handle.begin(report))
            asked.append({"query": query, "handle": number, "wish": wish})
        with self._lock:
            self._open.update(moves)
        self._executor.ask({"Migrate": {"moves": asked, "at_epoch": at_epoch, **cut.told()}}, _Asked(moves))
        refused = [move.refused for move in moves.values() if move.refused is not None]
        if refused:
            # The others say which one it was.
            raise next((error for error in refused if _OTHER not in str(error)), refused[0])
        for number in moves:
            handle.cancellable(partial(self._executor.post, {"CancelMigration": {"handle": number}}))

    # In the executor's thread

    def _moving(self, facts: Mapping[str, Any]) -> None:
        with self._lock:
            move = self._open[facts["handle"]]
        move.begun = True
        move.handle.planned(move.report, int(facts["ranges"]))

    def _moved(self, facts: Mapping[str, Any]) -> None:
        with self._lock:
            move = self._open.pop(facts["handle"])
        done, cause = facts["outcome"].get("Ok"), self._executor.cause
        if done == 0:
            move.end({}, None)
        elif done is not None:
            # The leader sees the bytes of its own process only: ask all members.
            told, over = cause.body["report"], time.time()
            self._recorder.after_refresh(lambda: self._report(move, told, over))
        elif isinstance(cause, _Asked) and cause.moves.get(facts["handle"]) is move:
            # Nothing has begun: whoever asks is told.
            refused = ConfigError if "Refused" in facts["outcome"]["Err"] else EngineError
            move.refused = refused(self._about(move, facts))
            move.end(None, move.refused)
        else:
            error = EngineError(self._about(move, facts))
            failure = cause.failure if isinstance(cause, Call) else cause
            error.__cause__ = failure.exception() if isinstance(failure, Failure) else None
            if not move.begun:
                return move.end(None, error)
            # What has moved until then is no other's.
            self._recorder.after_refresh(lambda: self._cut_off(move, error))

    def _about(self, move: _Move, facts: Mapping[str, Any]) -> str:
        """What is said of a migration that did not take place, or not to its end, and what to do."""
        text, error = str(facts["text"]).removeprefix("the query "), facts["outcome"]["Err"]
        unknown = _NO_WORKER.search(text)
        if "NotRunning" in error and error["NotRunning"] in _UNTIL:
            text += f"; ask again {_UNTIL[error['NotRunning']]}"
        elif "CutOff" in error:
            text += "; engine.owners() says where its bins are"
        elif unknown is not None and int(unknown[1]) < self._workers():
            text += (
                "; one that takes the place of another serves it from its next batch on: ask again when that is done"
            )
        return f"query {move.report.query}: {text}"

    def _report(self, move: _Move, told: Mapping[str, Any], over: float) -> None:
        report = move.report
        moved = {**told, "bytes": self._recorder.take_moved_bytes(report.query)}
        steps = len(told["steps"])
        self._recorder.migration(
            timeline.Migration(
                report.started, over, report.strategy, int(told["moved"]), moved["bytes"], steps, report.query
            )
        )
        move.end(moved, None)

    def _cut_off(self, move: _Move, error: EngineError) -> None:
        move.report.bytes = self._recorder.take_moved_bytes(move.report.query)
        move.end(None, error)

    def _break(self, error: EngineError) -> None:
        with self._lock:
            moves = list(self._open.values())
            self._open.clear()
        for move in moves:
            move.end(None, error)
