"""Rows beside the output, by their kinds: who takes which, and rows of several kinds in one batch.

A flow has a kind of late rows for each source that is windowed or joined in time, under the name of the source; where
that does not tell kinds apart (the same source with other columns at another step, or several sources in one stream)
under that of the step's state. And it has a kind for each side output, under its name. The native part gives rows of
several kinds as batches with a struct column for each, late ones first, of which each row has one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock._coroutines import require_called, require_done, require_plain
from penstock._views import rows_at
from penstock.errors import ConfigError

__all__ = ["Apart", "Kinds", "hand", "of_kind", "require", "say_dropped"]

log = logging.getLogger(__name__)

#: Takes rows of one kind.
Taker = Callable[[pa.RecordBatch], Any]


@dataclass(frozen=True)
class Kinds:
    """The kinds of rows beside the output of a flow, with their columns.

    Attributes
    ----------
    late : dict of str to pyarrow.Schema
        Of late rows.
    sides : dict of str to pyarrow.Schema
        Of side outputs.
    """

    late: dict[str, pa.Schema]
    sides: dict[str, pa.Schema]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Kinds:
        """Those that the compiler tells of."""
        late, sides = (
            {name: pa.schema(schema) for name, schema in facts[what]} for what in ("late_outputs", "side_outputs")
        )
        return cls(late, sides)

    def wanted(self, sides: Mapping[str, Any] | None) -> list[int]:
        """The numbers of the kinds that a run is to keep: late rows, and the side outputs that somebody takes."""
        taken = [len(self.late) + number for number, name in enumerate(self.sides) if name in (sides or {})]
        return [*range(len(self.late)), *taken]


def require(late: Any, sides: Any, kinds: Kinds, takes: str, names: str) -> None:
    """Refuses what takes no late rows, or no side outputs, of these kinds; `names` is `takes` as Python has it.

    Raises
    ------
    ConfigError
        It names the kinds that there are, or the coroutine function.
    """
    if callable(late):
        require_plain(late, "late", takes=names, ignored=True)
        require_called(late, "late", names)
    elif late is not None:
        none = "none: no step of it has late rows"
        _require(
            late, "late", list(kinds.late), f"a function of {takes}, or a dict of kind to function", none, takes, names
        )
    if sides is not None:
        none = "none: no step of it declares sides="
        _require(sides, "sides", list(kinds.sides), "a dict of name to function", none, takes, names)


def say_dropped(sides: Mapping[str, Any], what: str) -> None:
    """Say which side outputs of a flow nobody can take."""
    if sides:
        log.warning(
            "side outputs of this flow are dropped: %s. %s gives one DataFrame; run the flow in one process, beside a"
            " streaming query of an engine, or have the function give these rows in its main output",
            ", ".join(map(repr, sides)),
            what,
        )


def of_kind(what: str, given: Any, name: str) -> str:
    """What messages call the function that takes rows of a kind."""
    return f"{what}={{{name!r}: ...}}" if isinstance(given, Mapping) else what


def _require(given: Any, what: str, kinds: Sequence[str], wanted: str, none: str, takes: str, names: str) -> None:
    known = ", ".join(map(repr, kinds)) or none
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what}={given!r} must be {wanted}: {known}")
    for name, sink in given.items():
        if name not in kinds:
            such = "late rows" if what == "late" else "side output"
            raise ConfigError(f"{what}={{{name!r}: ...}}: this flow has no such {such}; there are {known}")
        if not callable(sink):
            raise ConfigError(f"{what}={{{name!r}: {sink!r}}}: it must be a function of {takes}")
        require_plain(sink, of_kind(what, given, name), takes=names, ignored=True)
        require_called(sink, of_kind(what, given, name), names)


def hand(taker: Taker, rows: pa.RecordBatch, name: str) -> None:
    """Call a function of the user's with rows; `name` is what messages call it.

    Raises
    ------
    RuntimeError
        When it raises StopIteration, which would end the iterator of results as if it were complete (as PEP 479).
    ConfigError
        When it gives a coroutine or a generator.
    """
    try:
        given = taker(rows)
    except StopIteration as error:
        raise RuntimeError(
            f"{name}: the function raised StopIteration, as next(...) of an iterator at its end does; give next() a"
            " default"
        ) from error
    require_done(given, name)


class Apart:
    """Gives rows beside the output to who takes those of their kind.

    Parameters
    ----------
    late
        A function of a batch, or one for each of some kinds; None: nobody takes late rows.
    sides
        A function for each of some side outputs.
    kinds
        All kinds.
    """

    def __init__(
        self, late: Taker | Mapping[str, Taker] | None, sides: Mapping[str, Taker] | None, kinds: Kinds
    ) -> None:
        self._late = late
        self._sides = sides or {}
        of_late = [late.get(name) if isinstance(late, Mapping) else late for name in kinds.late]
        self._takers = [*of_late, *(self._sides.get(name) for name in kinds.sides)]
        self._names = [*(of_kind("late", late, name) for name in kinds.late)]
        self._names += (of_kind("sides", self._sides, name) for name in kinds.sides)
        self._lates = list(kinds.late)

    def __call__(self, batch: pa.RecordBatch) -> None:
        """Hand a batch of the native part on."""
        for kind, rows in self._parts(batch):
            taker = self._takers[kind]
            if taker is not None:
                hand(taker, rows, self._names[kind])

    def late_rows(self, batch: pa.RecordBatch) -> tuple[int, ...]:
        """How many of its rows are late ones of each kind."""
        if len(self._takers) < 2:
            return (batch.num_rows,) if self._lates else ()
        return tuple(len(column) - column.null_count for column in batch.columns[: len(self._lates)])

    def untaken(self, late: Sequence[int]) -> tuple[int, str]:
        """How many late rows nobody takes, of so many of each kind; and what would take them, as it is written."""
        of_late = zip(self._lates, late, self._takers, strict=False)
        left = {name: rows for name, rows, taker in of_late if rows and taker is None}
        kinds = "" if self._late is None else f"{{{', '.join(f'{name!r}: ...' for name in left)}}}"
        return sum(left.values()), f"late={kinds}"

    def _parts(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        """The kinds that are in a batch, and the rows of each."""
        if len(self._takers) < 2:
            return [(0, batch)]
        parts = []
        for kind, column in enumerate(batch.columns):
            if column.null_count < len(column):
                fields = [column.type.field(number) for number in range(column.type.num_fields)]
                rows = pa.RecordBatch.from_arrays(column.flatten(), schema=pa.schema(fields))
                there = pc.indices_nonzero(column.is_valid())
                parts.append((kind, rows_at(rows, there) if column.null_count else rows))
        return parts

    def __repr__(self) -> str:
        return repr(self._late if not self._sides else self._sides)
