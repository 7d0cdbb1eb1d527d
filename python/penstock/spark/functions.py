"""Functions of the user on their way to Spark's Python workers and there.

Owns: the two ways in which that fails, in words. ``what`` names the function in them: "the function of ordered".
"""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError

__all__ = ["dump", "load"]


def dump(value: Any, what: str) -> bytes:
    """Pickle functions, those of ``__main__`` and lambdas by value.

    Raises
    ------
    ConfigError
        When they refer to something that does not pickle.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to Spark's Python workers: {error}; make what it refers to inside it, where it runs"
        ) from error


def load(pickled: bytes, what: str) -> Any:
    """Restore what `dump` pickled, in a Python worker.

    Raises
    ------
    ConfigError
        When it comes from a module that the worker cannot import.
    """
    import cloudpickle

    try:
        return cloudpickle.loads(pickled)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} comes from the module {error.name!r}, which Spark's Python workers cannot import; ship it with"
            f" spark.sparkContext.addPyFile, install it on the executors, or call"
            f" cloudpickle.register_pickle_by_value({error.name}) before"
        ) from error
