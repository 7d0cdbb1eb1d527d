"""The engines that are open in this process, whoever still holds a handle on them.

Owns: the list from which `held_slots` counts, `engines` answers, and the end of Python closes what the program forgot.
An engine is on it from the moment it takes slots until it is closed.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING, Any

from penstock.spark._session.guard import require_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.engine import Engine

__all__ = ["add", "engines", "open_engines", "remove"]

#: In the order of their starts.
_OPEN: dict[Engine, None] = {}


def engines(spark: SparkSession) -> list[Engine]:
    """The engines that are open on a Spark context, in the order of their starts.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Any classic session of the context.

    Returns
    -------
    list of Engine
        The engines themselves: one whose handle was lost (a notebook's cell that ran again, an error before the
        assignment) can be closed, and its queries looked at, through what is returned.

    Raises
    ------
    UnsupportedSession
        For a Spark Connect session.

    Examples
    --------
    >>> for engine in pk.spark.engines(spark):  # doctest: +SKIP
    ...     engine.close()
    """
    require_classic(spark, "penstock.spark.engines")
    return open_engines(spark.sparkContext)


def open_engines(sc: Any) -> list[Engine]:
    """The engines of a Spark context that hold slots; none of the parent's in a forked child."""
    here = os.getpid()
    return [one for one in list(_OPEN) if one._holds_slots_of(sc) and one._process == here]


def add(engine: Engine) -> None:
    """An engine is about to take slots; it is closed at the end of Python at the latest."""
    _OPEN[engine] = None
    reference = weakref.ref(engine)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    # Before Python ends its threads.
    atexit.register(close)
    weakref.finalize(engine, atexit.unregister, close)


def remove(engine: Engine) -> None:
    """An engine is closed. Harmless when done twice."""
    _OPEN.pop(engine, None)
