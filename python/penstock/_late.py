"""Late rows by where they come from: who takes which, and rows of several kinds in one batch.

A flow has a kind of late rows for each source that is windowed or joined in time, under the name of the source; where
that does not tell kinds apart (the same source with other columns at another step, or several sources in one stream)
under that of the step's state. The native part gives rows of several kinds as batches with a struct column for each,
of which each row has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from penstock.errors import ConfigError

__all__ = ["Apart", "kinds", "require"]

_S = TypeVar("_S", bound=Callable[..., Any])


def kinds(facts: Mapping[str, Any]) -> dict[str, pa.Schema]:
    """The kinds of late rows that the compiler tells of, with their columns."""
    return {name: pa.schema(schema) for name, schema in facts["late_outputs"]}


def require(late: Any, names: Sequence[str], takes: str) -> None:
    """Refuses what takes no late rows, of these kinds.

    Raises
    ------
    ConfigError
        It names the kinds that there are.
    """
    if late is None or callable(late):
        return
    known = ", ".join(map(repr, names)) or "none: no step of it has late rows"
    if not isinstance(late, Mapping):
        raise ConfigError(f"late={late!r} must be a function of {takes}, or a dict of kind to function: {known}")
    for name, sink in late.items():
        if name not in names:
            raise ConfigError(f"late={{{name!r}: ...}}: this flow has no such late rows; there are {known}")
        if not callable(sink):
            raise ConfigError(f"late={{{name!r}: {sink!r}}}: it must be a function of {takes}")


class Apart:
    """Gives late rows to who takes those of their kind.

    Parameters
    ----------
    late
        A function of a batch, or one for each of some kinds.
    names
        All kinds.
    """

    def __init__(
        self,
        late: Callable[[pa.RecordBatch], Any] | Mapping[str, Callable[[pa.RecordBatch], Any]],
        names: Sequence[str],
    ) -> None:
        self._late = late
        self._names = names

    def __call__(self, batch: pa.RecordBatch) -> None:
        """Hand a batch of the native part on."""
        at = 0
        if len(self._names) > 1:
            at = next(at for at, column in enumerate(batch.columns) if column.null_count < len(column))
            struct = batch.column(at)
            fields = [struct.type.field(number) for number in range(struct.type.num_fields)]
            batch = pa.RecordBatch.from_arrays(struct.flatten(), schema=pa.schema(fields))
        sink = self._late.get(self._names[at]) if isinstance(self._late, Mapping) else self._late
        if sink is not None:
            sink(batch)

    def __repr__(self) -> str:
        return repr(self._late)
