"""Which Spark sessions serve which host.

Owns: telling a classic session from a Spark Connect one and refusing the latter by name,
before anything has started. Recognises both without importing pyspark.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from penstock.errors import ConfigError, UnsupportedSession

__all__ = ["require_classic", "require_flow", "require_session"]


def _spark() -> str:
    """The release of Spark that is imported."""
    return str(getattr(sys.modules.get("pyspark"), "__version__", "4"))


def _works_there() -> str:
    """What serves a Connect session of the installed Spark: toArrow exists since 4.0."""
    old = _spark().partition(".")[0] in ("2", "3")
    rows = "pyarrow.Table.from_pandas(df.toPandas())" if old else "df.toArrow()"
    return (
        "on Connect, df.mapInArrow(flow.map_in_arrow(), flow.output_ddl) works inside partitions, and"
        f" flow.run({rows}) works in this process; else create the session without .remote(...)"
    )


def require_classic(thing: Any, what: str) -> None:
    """Refuse anything that does not belong to a classic Spark session.

    Parameters
    ----------
    thing : SparkSession or DataFrame
        What the user gave.
    what : str
        What the user called; the message begins with it.

    Raises
    ------
    UnsupportedSession
        For a Spark Connect session or DataFrame (the message says what works there), for anything that is neither,
        for those of a context that was stopped, and where this Spark does not run on this Python.

    Examples
    --------
    >>> require_classic(None, "penstock.spark.run")
    Traceback (most recent call last):
    ...
    penstock.errors.UnsupportedSession: penstock.spark.run needs a Spark DataFrame or session, not a NoneType
    """
    modules = [kind.__module__ for kind in type(thing).__mro__]
    if any(module.startswith("pyspark.sql.connect") for module in modules):
        raise UnsupportedSession(f"{what} does not run on a Spark Connect session yet; {_works_there()}")
    if not any(module.startswith("pyspark.sql") for module in modules):
        kind = type(thing)
        local = kind.__module__.partition(".")[0] in ("pandas", "pyarrow", "polars")
        told = f"{kind.__module__.partition('.')[0]}.{kind.__name__}" if local else f"{kind.__name__}"
        instead = ": spark.createDataFrame makes one of it, or flow.run(...) runs it in this process" if local else ""
        raise UnsupportedSession(f"{what} needs a Spark DataFrame or session, not a {told}{instead}")
    if _spark().startswith("3.") and sys.version_info >= (3, 12) and importlib.util.find_spec("distutils") is None:
        raise UnsupportedSession(
            f"{what}: Spark {_spark()} imports distutils, which Python {sys.version_info[0]}.{sys.version_info[1]} does"
            " not have: use Python 3.11 or Spark 4, or pip install setuptools here and on the executors"
        )
    # By its class: what a DataFrame or Column does not have, it takes for a column.
    session = thing.sparkSession if hasattr(type(thing), "sparkSession") else thing
    context = session.sparkContext if hasattr(type(session), "sparkContext") else None
    if context is not None and context._jsc is None:
        raise UnsupportedSession(
            f"{what}: the Spark context of this {type(thing).__name__} was stopped; make it from the present session,"
            " which SparkSession.builder.getOrCreate() gives"
        )


def require_session(thing: Any, what: str) -> None:
    """Refuse anything that is no classic Spark session, a DataFrame of one too.

    Raises
    ------
    UnsupportedSession
        As `require_classic`.
    """
    require_classic(thing, what)
    if not any(kind.__name__ == "SparkSession" for kind in type(thing).__mro__):
        instead = ": give its sparkSession" if hasattr(type(thing), "sparkSession") else ""
        raise UnsupportedSession(f"{what} needs a Spark session, not a {type(thing).__name__}{instead}")


def require_flow(thing: Any, what: str) -> None:
    """Refuse anything that is no flow.

    Raises
    ------
    ConfigError
        Naming what was given instead.

    Examples
    --------
    >>> require_flow(None, "penstock.spark.run")
    Traceback (most recent call last):
    ...
    penstock.errors.ConfigError: penstock.spark.run needs a penstock.Flow, not a NoneType
    """
    from penstock._flow import Flow

    if not isinstance(thing, Flow):
        raise ConfigError(f"{what} needs a penstock.Flow, not a {type(thing).__name__}")
