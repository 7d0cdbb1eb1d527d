"""Flows in the calling thread: what a native ``InlineRun`` makes, piece by piece or all of it.

Invariant of both ways: what a batch becomes is taken before the next one is pushed.

Rows without event time, which no window has, have nowhere to go here: they are counted where they come in, and the end
of the input says how many there were. Departure: that is not the count of the step that leaves them out, which the
native part does not tell here. A row whose event time a function of the flow fills in, or takes away, counts as it
came.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._schema import conform

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["all_of", "drive", "needed_times"]

_log = logging.getLogger("penstock")


def needed_times(plan: str) -> list[str | None]:
    """For each source of a plan the column without which its rows are left out: event time, where a window or a join in
    time is behind it.

    Examples
    --------
    >>> import penstock as pk
    >>> clicks = pk.Flow("k bigint, ts timestamp", event_time="ts").key_by("k")
    >>> needed_times(clicks.agg(n=pk.count()).to_plan()[0])
    [None]
    >>> needed_times(clicks.window(pk.tumbling("1s")).agg(n=pk.count()).to_plan()[0])
    ['ts']
    """
    read = json.loads(plan)
    sources: list[dict[str, Any]] = read["sources"]
    #: Of each node the sources whose rows come to it.
    behind: list[set[int]] = [{number} for number in range(len(sources))]
    timed: set[int] = set()
    for step in read["steps"]:
        mine = set().union(*(behind[node] for node in step.get("inputs", [len(behind) - 1])))
        behind.append(mine)
        if step["op"] == "window" or (step["op"] == "join" and (step.get("within") or step.get("until"))):
            timed |= mine
    return [source.get("event_time") if number in timed else None for number, source in enumerate(sources)]


def drive(
    run: _native.InlineRun,
    batches: Iterable[tuple[int, pa.RecordBatch]],
    schemas: Sequence[pa.Schema],
    times: Sequence[str | None] = (),
    what: str = "input",
) -> Iterator[_native.RecordBatch]:
    """Feed batches, each of an input with its schema, and give what they become, as the caller takes it.

    A batch that expands is worked on only as far as its output is taken; the next one is read when it is worked off.
    Of inputs that have one of `times`, rows in which it is null are counted, and told in the log. `what` is what errors
    call the input.
    """
    rows, without = [0] * len(schemas), [0] * len(schemas)
    for number, batch in batches:
        if batch.num_rows:
            fitting = conform(batch, schemas[number], what)
            rows[number] += len(fitting)
            if times and (name := times[number]) is not None:
                without[number] += fitting.column(name).null_count
            yield from run.push(fitting, number)
            yield from _rest(run)
    yield from run.finish()
    yield from _rest(run)
    for number, count in enumerate(without):
        if count:
            _log.warning(
                "%d of %d rows of this partition have no event time (column %r is null): no window and no join in time"
                " has such rows; fill it in, or filter them out before",
                count,
                rows[number],
                times[number],
            )
    if _log.isEnabledFor(logging.INFO) and (scopes := json.loads(run.scopes())):
        _log.info("bounded parts of this partition: %s", scopes)


def all_of(run: _native.InlineRun, made: list[_native.RecordBatch]) -> list[_native.RecordBatch]:
    """`made`, as a push or finish gave it, and the rest of what was pushed."""
    return [*made, *_rest(run)]


def _rest(run: _native.InlineRun) -> Iterator[_native.RecordBatch]:
    while (made := run.pull()) is not None:
        yield from made
