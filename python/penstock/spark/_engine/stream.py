"""A Spark query as the engine asks about it: what is committed, what time a batch has, where its checkpoint is.

Owns: what counts where Spark does not tell. Batches that are called by hand, without a stream, count as committed when
they have returned, and have the time of their first call.

Invariant: a batch that is computed again has the time that it had: of a stream that time is durable at Spark. Where
Spark does not tell it this engine alone knows it. Whoever asks is told what is a guess, and keeps to what does not
depend on it (`query`).
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from penstock._storage import below, open_storage, with_settings
from penstock.errors import ConfigError
from penstock.spark._engine.progress import StreamFacts

__all__ = ["Stream"]


class Stream:
    """Facts of one query.

    Parameters
    ----------
    facts : StreamFacts or None
        Of the Spark query; None for batches that are called by hand.
    """

    def __init__(self, facts: StreamFacts | None) -> None:
        self._facts = facts
        #: The last batch that was asked for and its processing time, milliseconds.
        self._clock: tuple[int, int] = (-1, 0)
        #: The last batch that returned.
        self._returned: int | None = None

    @property
    def by_hand(self) -> bool:
        """Whether its batches come without a Spark query, which goes on in no other engine."""
        return self._facts is None

    def checkpoint(self) -> str | None:
        """Where Spark keeps the query's progress; None where that goes with the query, or there is none.

        Raises
        ------
        LookupError
            When Spark does not tell.
        """
        if self._facts is None:
            return None
        temporary = self._facts.temporary()
        if temporary:
            return None
        root = self._facts.checkpoint_root()
        if temporary is None or root is None:
            raise LookupError("Spark does not tell whether it has a checkpointLocation")
        return root

    def folder(self, root: str, name: str) -> str:
        """URL of a folder in a checkpoint, with what Spark's settings say of its store."""
        assert self._facts is not None
        return with_settings(below(root, name), self._facts.hadoop)

    @property
    def asynchronous(self) -> bool:
        """Whether Spark is known to ask for batches before those before them are committed."""
        return self._facts is not None and self._facts.asynchronous() is True

    def clock_ms(self, batch_id: int) -> tuple[int, int | None]:
        """Processing time of a batch, milliseconds since 1970, and the same where Spark has told it."""
        told = None if self._facts is None else self._facts.batch_timestamp_ms(batch_id)
        if told is not None:
            return told, told
        if self._clock[0] != batch_id:
            self._clock = (batch_id, int(time.time() * 1_000))
        return self._clock[1], None

    def returned(self, batch_id: int) -> None:
        """A batch has returned to Spark."""
        self._returned = batch_id

    def committed_before(self, batch_id: int) -> tuple[int | None, bool]:
        """The last batch in Spark's commit log when it asks for a batch, None for none; and whether that is a guess."""
        if batch_id == 0:
            return None, False
        if self._facts is None:
            return batch_id - 1, False
        told = self._facts.committed()
        asynchronous = self._facts.asynchronous() if told is None else None
        # Without asynchronous progress Spark asks for the next batch only after it has committed this one.
        if told is None and not asynchronous:
            return batch_id - 1, asynchronous is None
        return told, False

    def committed(self) -> int | None:
        """The last batch in Spark's commit log, also of a query that has ended; None where it has none."""
        if self._facts is None:
            return self._returned
        told = self._facts.committed()
        if told is not None:
            return told
        root: Any = self._facts.checkpoint_root()
        if root is not None:
            # Spark may keep it where nothing here can look.
            with suppress(OSError, ConfigError):
                names = [name for name, _ in open_storage(self.folder(root, "commits")).list()]
                return max((int(name) for name in names if name.isdecimal() and name.isascii()), default=None)
        return self._returned
