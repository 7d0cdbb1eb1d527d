"""Every exception that penstock raises on purpose, but for those of builtin kinds that Python's own protocols want:
`TimeoutError` of ``wait(timeout)``, `EOFError` of a sequencer that is over, and what Spark's ``GroupState`` raises.

One base, `PenstockError`; each child is also a builtin kind, so that code that knows nothing of penstock
still catches it sensibly. Exceptions carry data as attributes, not only prose, and pickle with it (a Spark
task raises them in another process than the one that shows them).

The native module imports this module once and raises these classes; nothing else creates errors for it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "AuthenticationError",
    "BlockError",
    "CapabilityError",
    "ClosedError",
    "ConfigError",
    "CoordinationTimeout",
    "DataflowError",
    "EngineError",
    "ForkError",
    "GraphError",
    "Interrupted",
    "ItemTimeout",
    "ItemsLost",
    "JavaNotFound",
    "KeyNullError",
    "NotPicklable",
    "OrderedError",
    "PatternError",
    "PenstockError",
    "PlanError",
    "ProgramError",
    "ProtocolError",
    "SchemaError",
    "SlotsError",
    "StateError",
    "StateLost",
    "StorageError",
    "ThreadError",
    "TimeError",
    "UnsupportedSession",
    "UserFunctionError",
    "WorkerLost",
    "WorkerStopped",
    "from_failure",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def _restore(cls: type[PenstockError], message: str, data: dict[str, Any], cause: bytes | None) -> PenstockError:
    error = cls(message)
    error.__dict__.update(data)
    if cause is not None:
        try:
            error.__cause__ = pickle.loads(cause)
        except Exception as reason:
            error.add_detail(f"its cause could not be restored here: {reason!r}")
    return error


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose.

    Parameters
    ----------
    message
        What happened, and where possible what to do about it.
    **data
        Facts, readable as attributes (also listed in `data`).
    """

    def __init__(self, message: str = "", **data: Any) -> None:
        super().__init__(message)
        self.__dict__.update(data)

    @property
    def message(self) -> str:
        """The text without the facts."""
        return str(self.args[0]) if self.args else ""

    @property
    def data(self) -> dict[str, Any]:
        """The facts that came with the error, by name."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def add_detail(self, text: str) -> None:
        """Append a line to the message."""
        self.args = (f"{self.message}\n  {text}", *self.args[1:])

    def __reduce__(self) -> tuple[Any, ...]:
        cause: bytes | None = None
        if self.__cause__ is not None:
            try:
                import cloudpickle

                cause = cloudpickle.dumps(self.__cause__)
                pickle.loads(cause)
            except Exception:
                # A cause that does not survive the trip must not hide the error: keep its text.
                text = "".join(_cause_text(self.__cause__))
                cause = pickle.dumps(RuntimeError(text))
        data = {}
        for name, value in self.data.items():
            try:
                pickle.dumps(value)
                data[name] = value
            except Exception:
                data[name] = repr(value)
        notes = getattr(self, "__notes__", None)
        return (_restore, (type(self), self.message, data, cause), {"__notes__": notes} if notes else None)


def _cause_text(cause: BaseException) -> list[str]:
    import traceback

    return traceback.format_exception_only(type(cause), cause)


class SchemaError(PenstockError, ValueError):
    """Data or a declared schema do not fit: a missing column, a type that an operator does not take."""


class PlanError(PenstockError, ValueError):
    """A flow cannot be compiled: an unknown operator, an order of steps that has no meaning."""


class ConfigError(PenstockError, ValueError):
    """An option has a value that is not allowed, or two options contradict each other."""


class KeyNullError(PenstockError, ValueError):
    """A key column holds a null and the flow says `nulls="reject"`.

    Attributes
    ----------
    column : str
        Name of the key column.
    row : int
        Index of the first such row in its block.
    """


class UserFunctionError(PenstockError, RuntimeError):
    """A Python function of the flow raised, or returned something that its step does not take.

    The user's own exception is `__cause__`.

    Attributes
    ----------
    step : str
        The step of the flow, such as ``stateful_map[2] sessions``.
    file, line : str, int
        Where in the user's code: the innermost frame of the function's own file.
    row : dict or None
        Values of the failing row by column name; None when the step takes whole batches.
    key : object
        Key of the failing row, for a step that keeps state; None for others.
    """

    step: str = ""
    file: str = ""
    line: int = 0
    row: Mapping[str, Any] | None = None
    key: Any = None


class StateError(PenstockError, RuntimeError):
    """State cannot be encoded, decoded or used: for example a state that does not pickle."""


class StateLost(PenstockError, RuntimeError):
    """State that the input says must exist is not there: going on would give wrong results."""


class EngineError(PenstockError, RuntimeError):
    """The engine cannot go on: a worker failed, a handle is closed, an internal rule broke."""


class SlotsError(EngineError):
    """The cluster can never offer as many task slots as the engine and its input need."""


class StorageError(PenstockError, OSError):
    """Storage does not do what it should: rows that do not fit in memory cannot be written to a local directory or had
    back, the store of a checkpoint cannot be used, or a file of it is missing, damaged, or of a newer release.

    Attributes
    ----------
    paths : list of str
        The local directories.
    setting : str
        What to change.
    """

    paths: Sequence[str] = ()
    setting: str = ""


class AuthenticationError(PenstockError, ConnectionError):
    """A peer does not know the engine's secret, or does not prove that it does."""


class ProtocolError(PenstockError, ConnectionError):
    """A peer speaks another version, breaks the protocol, or the connection ended in the middle."""


class ForkError(PenstockError, RuntimeError):
    """A handle made before `fork` is used in the child: its threads live in the parent only.

    Attributes
    ----------
    owner, here : int
        The process id that made the handle, and the one that used it.
    """


class DataflowError(EngineError):
    """A worker of the dataflow layer cannot do this, or cannot go on."""


class GraphError(DataflowError):
    """A dataflow that cannot run, or that two workers built differently.

    Attributes
    ----------
    worker, peer : int
        The workers that disagree, where it is about two.
    """


class PatternError(PenstockError, ValueError):
    """A pattern over a graph is wrong, or names a relation that nobody gave.

    Attributes
    ----------
    place : int
        The character of its text that this is about, from 1; 0 where there is none.
    """

    place: int = 0


class WorkerStopped(DataflowError):
    """This worker was stopped because another one failed, or from outside.

    The first cause is `__cause__` where it happened in this process.

    Attributes
    ----------
    worker : int
        The worker that failed first, or that passed the order on.
    """


class WorkerLost(DataflowError, ConnectionError):
    """A process of the run died, or did not come.

    Attributes
    ----------
    process : int
        Its index.
    exitcode : int or None
        How it ended, where that is known: negative is a signal.
    """


class ProgramError(PenstockError, RuntimeError):
    """The program of a worker raised, or returned what cannot leave its process.

    The original exception is `__cause__`.

    Attributes
    ----------
    worker, process : int
        Where.
    """


class TimeError(PenstockError, ValueError):
    """A time of another scope, or one that would go back.

    Attributes
    ----------
    asked, held : int or tuple of int
        The time that was given, and the one to which it is not at or after, where there is one.
    """


class CapabilityError(PenstockError, RuntimeError):
    """A capability that was dropped, or that belongs to another operator."""


class BlockError(PenstockError, TypeError):
    """Something that a stream cannot carry, or that an operator does not take."""


class CoordinationTimeout(PenstockError, TimeoutError):
    """The other workers did not come to a barrier, or pushed nothing into a sequencer, in the time that was given.

    Attributes
    ----------
    round : int
        The round waited for, at a barrier.
    """


class ClosedError(PenstockError, RuntimeError):
    """A handle is used after its end: a closed input, a worker whose program is over."""


class ThreadError(PenstockError, RuntimeError):
    """A handle of a worker is used in another thread than the worker's."""


class Interrupted(PenstockError, RuntimeError):
    """An interrupt (Ctrl-C) broke off what cannot be repeated, so the rest of the results cannot be had."""


class OrderedError(PenstockError, RuntimeError):
    """An ordered iterator cannot go on, or is used where it may not be."""


class ItemTimeout(OrderedError, TimeoutError):
    """A function did not return within `timeout=`.

    Attributes
    ----------
    item, last : int or None
        Number of the first and the last item of the call, counted from 0 along the input: equal unless `chunk=` was
        given. None is the end of the input, where `finish` is called.
    step : str
        The function, such as ``map resize``.
    timeout : float
        Seconds that it had.
    """


class ItemsLost(OrderedError, ConnectionError):
    """The process that worked on some items ended: a function that exits, a crash of native code, a kill.

    Attributes
    ----------
    item, last : int or None
        Numbers of the first and the last of the items, counted from 0 along the input; None where it is its end.
    exitcode : int or None
        How the process ended; negative is a signal.
    step : str
        What it was doing.
    """


class NotPicklable(OrderedError, TypeError):
    """A function, an item, a result or a state cannot go to another process and back.

    Attributes
    ----------
    item : int or None
        Number of the item, counted from 0 along the input, where it is about one.
    """


class UnsupportedSession(PenstockError, TypeError):
    """This kind of Spark session cannot do what was asked; the message names what can."""


class JavaNotFound(PenstockError, RuntimeError):
    """No Java that Spark can use; the message lists what was tried and how to get one."""


#: Class of a failure that a member reports, by its kind; an EngineError where none is named.
_KINDS: dict[str, type[PenstockError]] = {
    "data": SchemaError,
    "null_key": KeyNullError,
    "plan": PlanError,
    "protocol": ProtocolError,
    "schema": SchemaError,
    "state": StateError,
    "state_lost": StateLost,
    "storage": StorageError,
    "unreadable": StateError,
    "user_function": UserFunctionError,
}


def from_failure(failure: Mapping[str, Any], attachment: bytes = b"") -> PenstockError:
    """Make the exception of a request that a member could not serve.

    Parameters
    ----------
    failure : dict
        The ``"error"`` of a reply: ``kind``, ``message`` and further facts, which become attributes.
    attachment : bytes
        The pickled exception, where there is one. It is unpickled, so it must come from an authenticated
        connection.

    Returns
    -------
    PenstockError
        Of the class that belongs to the kind; for a user's function the original `UserFunctionError` with its
        cause.

    Examples
    --------
    >>> error = from_failure({"kind": "stale_generation", "message": "generation 3 is over", "given": 3})
    >>> type(error).__name__, error.kind, error.given
    ('EngineError', 'stale_generation', 3)
    """
    facts = dict(failure)
    message = str(facts.pop("message", ""))
    if attachment:
        try:
            original = pickle.loads(attachment)
        except Exception as reason:
            message += f"\n  the exception itself could not be restored here: {reason!r}"
        else:
            if isinstance(original, PenstockError):
                return original
            error = UserFunctionError(message, **facts)
            error.__cause__ = original if isinstance(original, BaseException) else None
            return error
    kind = _KINDS.get(str(facts.get("kind")), EngineError)
    return kind(message, **{name: value for name, value in facts.items() if name.isidentifier()})
