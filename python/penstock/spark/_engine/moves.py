"""The migrations that users ask for, as the engine's protocol carries them out.

Owns: their numbers, and the way from what the protocol tells of one to the user's handle. When the turn of one comes,
what it then moves and in which steps is decided by the protocol; what is wrong whatever moves before is told at once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    #: Whether the protocol has taken it up.
    taken: bool = False
    refused: PenstockError | None = None


class Moves:
    """The migrations of one engine. Any thread may ask.

    Parameters
    ----------
    executor : Executor
        Of the engine; must not have started.
    recorder : Recorder
        Hears of those that have ended, and knows the bytes.
    """

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        self._executor = executor
        self._recorder = recorder
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, _Move] = {}
        executor.perform(Moving=self._moving, Moved=self._moved)
        executor.when_broken(self._break)

    def ask(self, query: str, name: str, handle: Migration, wish: Any, cut: Cut) -> None:
        """Enter a migration of a query into a handle.

        Parameters
        ----------
        query, name : str
            Its id, and what people call it.
        handle : Migration
            Follows it.
        wish : str or dict
            As the protocol has it: ``"Even"``, ``{"To": workers}``, ``{"Moves": [[[bin, bits], worker], ...]}``.
        cut : Cut
            In which steps.

        Raises
        ------
        ConfigError
            When a bin or worker does not exist.
        EngineError
            When the query does not run.
        """
        number = next(self._numbers)
        report = MoveReport(name, cut.strategy)
        move = _Move(handle, report, handle.begin(report))
        with self._lock:
            self._open[number] = move
        asked = {"query": query, "handle": number, "wish": wish, **cut.told()}
        self._executor.ask({"Migrate": asked}, move)
        move.taken = True
        if move.refused is not None:
            raise move.refused
        handle.cancellable(lambda: self._executor.post({"CancelMigration": {"handle": number}}))

    # In the executor's thread

    def _moving(self, facts: Mapping[str, Any]) -> None:
        with self._lock:
            move = self._open[facts["handle"]]
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
        elif cause is move:
            # Nothing has begun: whoever asks is told.
            refused = ConfigError if "Refused" in facts["outcome"]["Err"] else EngineError
            move.refused = refused(_about(move, facts["text"]))
            move.end(None, move.refused)
        else:
            error = EngineError(_about(move, facts["text"]))
            failure = cause.failure if isinstance(cause, Call) else cause
            error.__cause__ = failure.exception() if isinstance(failure, Failure) else None
            move.end(None, error)

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

    def _break(self, error: EngineError) -> None:
        with self._lock:
            moves = list(self._open.values())
            self._open.clear()
        for move in moves:
            move.end(None, error)


def _about(move: _Move, text: str) -> str:
    return f"query {move.report.query}: {text.removeprefix('the query ')}"
