"""What went wrong at a member or in a task, before the driver raises it.

Owns: the failure of one request (JSON with kind, message and facts, plus an attachment; `penstock.errors.from_failure`
makes the exception), and finding penstock's error in what Spark raises for a failed job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock import errors
from penstock.errors import EngineError, PenstockError, WorkerLost, from_failure

__all__ = ["Failure", "cause_of"]


class Failure(Exception):
    """A request that a member could not serve.

    Attributes
    ----------
    member : int
        Who says so.
    kind : str
        Machine-readable, such as ``user_function`` or ``stale_generation``.
    why : str
        What the engine's protocol makes of it: User, Data, Echo, Stale, State, Store, Damaged or Internal.
    facts : mapping
        What else is known: ``message``, ``step``, ``file``, ``line``, ...
    attachment : bytes
        The pickled exception, where there is one. It comes from an authenticated member.
    """

    def __init__(self, member: int, facts: Mapping[str, Any], attachment: bytes = b"") -> None:
        self.member = member
        self.kind = str(facts.get("kind", "internal"))
        self.why = str(facts.get("why", "Internal"))
        self.facts = {name: fact for name, fact in facts.items() if name != "why"}
        self.attachment = attachment
        super().__init__(f"{self.kind}: {facts.get('message', '')}")

    def exception(self) -> PenstockError:
        """The exception to raise; its cause is the user's exception where there is one."""
        return from_failure(self.facts, self.attachment)


#: An error of penstock's at the end of a Python traceback, up to what Spark writes behind it. Where Spark hides the
#: traceback it stands behind what Spark says.
_RAISED = re.compile(
    r"(?:^|from the Python worker: )penstock\.errors\.(\w+): (.*?)(?=\n *SQLSTATE:|\n\s*\n|\n\tat |\Z)",
    re.MULTILINE | re.DOTALL,
)
_TASK = re.compile(r"\btask (\d+) of the gang\b")
_PLACE = re.compile(r"\(([^()\n]+):(\d+)\)$", re.MULTILINE)
#: A task whose interpreter is another one than the driver's.
_ABSENT = re.compile(r"^ModuleNotFoundError: No module named '(penstock(?:\.[\w.]+)?)'", re.MULTILINE)
_DIED = re.compile(r"because barrier task \w+\(\d+, (\d+)\) finished unsuccessfully\.\s*(?:[\w.]+: )?([^\n]*)")


def cause_of(error: BaseException) -> PenstockError | None:
    """penstock's own error in what Spark raised for a failed job.

    Spark hands a task's exception to the driver as text. This finds it there and makes the exception again, so that a
    program can tell what happened without reading.

    Parameters
    ----------
    error : Exception
        What an action on a DataFrame raised.

    Returns
    -------
    PenstockError or None
        Of the class that the task raised, with ``task``, ``file`` and ``line`` where the text names them; a
        `WorkerLost` for a task of a gang whose process died; an `EngineError` where tasks cannot import penstock; its
        cause is `error`. None when it is not about penstock, such as for what a sink raises.

    Examples
    --------
    >>> try:
    ...     pk.spark.gang(df, program, tasks=2, schema="n bigint").collect()  # doctest: +SKIP
    ... except Exception as error:
    ...     raise pk.spark.cause_of(error) or error
    """
    if isinstance(error, PenstockError):
        return error
    try:
        text = str(error)
    except Exception:  # one of a JVM that has ended, which is asked there for its text
        return None
    raised = [(name, message) for name, message in _RAISED.findall(text) if name in errors.__all__]
    made: PenstockError | None = None
    if raised:
        first = next((one for one in raised if one[0] not in ("WorkerStopped", "WorkerLost")), raised[0])
        made = getattr(errors, first[0])(first[1].rstrip(), **_facts(first[1]))
    elif absent := _ABSENT.search(text):
        made = EngineError(
            f"Spark's tasks run a Python that cannot import {absent.group(1)}: in local mode call"
            " penstock.spark.ensure_java() before the first session, or set PYSPARK_PYTHON to the driver's interpreter;"
            " on a cluster put penstock into the image, or ship a packed environment (venv-pack, --archives)"
        )
    elif died := _DIED.search(text):
        task = int(died.group(1))
        made = WorkerLost(f"task {task} of the gang died: {died.group(2)}", process=task, task=task)
    if made is not None:
        made.__cause__ = error
    return made


def outliving(error: Exception) -> Exception:
    """An error of a session as it can be told when that has ended: Spark's ask the JVM for their text."""
    found = cause_of(error)
    if found is error:
        return error
    if found is not None:
        # Spark's text, which it was found in, is no reason of it.
        found.__cause__ = None
        return found.with_traceback(error.__traceback__)
    if not type(error).__module__.startswith(("pyspark.", "py4j.")):
        return error
    try:
        text = str(error)
    except Exception:  # the JVM has ended before
        text = f"{type(error).__name__}, and Spark's JVM has ended"
    return RuntimeError(text).with_traceback(error.__traceback__)


def _facts(message: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if task := _TASK.search(message):
        facts["task"] = int(task.group(1))
    if place := _PLACE.search(message):
        facts |= {"file": place.group(1), "line": int(place.group(2))}
    return facts
