"""What went wrong at a member, before the driver raises it.

Owns: the failure of one request (JSON with kind, message and facts, plus an attachment) and the choice of the root
cause when one failure made several members fail. `penstock.errors.from_failure` makes the exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import PenstockError, from_failure

__all__ = ["Failure", "raise_root", "root"]

#: Kinds that only repeat what another member says in full.
_ECHOES = ("peer_lost", "aborted", "stopped", "not_running", "operator")


class Failure(Exception):
    """A request that a member could not serve.

    Attributes
    ----------
    member : int
        Who says so.
    kind : str
        Machine-readable, such as ``user_function`` or ``stale_generation``.
    facts : mapping
        What else is known: ``message``, ``step``, ``file``, ``line``, ...
    attachment : bytes
        The pickled exception, where there is one. It comes from an authenticated member.
    """

    def __init__(self, member: int, facts: Mapping[str, Any], attachment: bytes = b"") -> None:
        self.member = member
        self.kind = str(facts.get("kind", "internal"))
        self.facts = facts
        self.attachment = attachment
        super().__init__(f"{self.kind}: {facts.get('message', '')}")

    @property
    def echo(self) -> bool:
        """Whether another member's failure caused this one."""
        return self.kind in _ECHOES

    def exception(self) -> PenstockError:
        """The exception to raise; its cause is the user's exception where there is one."""
        return from_failure(self.facts, self.attachment)


def root(failures: Iterable[Failure]) -> Failure:
    """The failure that made the others happen: the first that does not only repeat another one.

    Examples
    --------
    >>> lost = Failure(1, {"kind": "peer_lost", "message": "process 1 is gone"})
    >>> root([lost, Failure(2, {"kind": "user_function", "message": "division by zero"})]).member
    2
    """
    found = list(failures)
    user = [failure for failure in found if failure.kind == "user_function"]
    own = [failure for failure in found if not failure.echo]
    return (user or own or found)[0]


def raise_root(failures: Iterable[Failure]) -> None:
    """Raise the exception of the root failure, with the user's exception as its cause."""
    error = root(failures).exception()
    raise error from error.__cause__
