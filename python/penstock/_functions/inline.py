"""Flows in the calling thread: what a native ``InlineRun`` makes, piece by piece or all of it.

Invariant of both ways: what a batch becomes is taken before the next one is pushed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock._schema import conform

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["all_of", "drive"]

_log = logging.getLogger("penstock")


def drive(
    run: _native.InlineRun, batches: Iterable[tuple[int, pa.RecordBatch]], schemas: Sequence[pa.Schema]
) -> Iterator[_native.RecordBatch]:
    """Feed batches, each of an input with its schema, and give what they become, as the caller takes it.

    A batch that expands is worked on only as far as its output is taken; the next one is read when it is worked off.
    """
    for number, batch in batches:
        if batch.num_rows:
            yield from run.push(conform(batch, schemas[number]), number)
            yield from _rest(run)
    yield from run.finish()
    yield from _rest(run)
    if _log.isEnabledFor(logging.INFO) and (scopes := json.loads(run.scopes())):
        _log.info("bounded parts of this partition: %s", scopes)


def all_of(run: _native.InlineRun, made: list[_native.RecordBatch]) -> list[_native.RecordBatch]:
    """`made`, as a push or finish gave it, and the rest of what was pushed."""
    return [*made, *_rest(run)]


def _rest(run: _native.InlineRun) -> Iterator[_native.RecordBatch]:
    while (made := run.pull()) is not None:
        yield from made
