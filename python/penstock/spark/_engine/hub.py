"""The driver's registry and the one thread that listens to it.

Owns: the members that are connected now, the calls that wait for an answer, and the listeners that hear of
members coming and going. A member is dead when its connection ends; its id is never used again, so a
replacement cannot be mistaken for it.

Invariants: every call is settled exactly once, by an answer, by the loss of its member or by closing. Listeners
run in the hub's thread, outside its lock, and do not wait for calls.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError
from penstock.spark._engine.interrupts import plain_interrupts
from penstock.spark._tasks.failures import Failure
from penstock.spark._tasks.place import Secret

__all__ = ["Call", "Hub", "Member"]

log = logging.getLogger(__name__)

#: How long the thread sleeps at most between two looks at the world, seconds.
_TURN_S = 0.1
#: How often waits ask whether they still have a reason to wait, seconds.
CHECK_S = 0.1


@dataclass(eq=False)
class Member:
    """A resident process that is, or was, connected.

    Attributes
    ----------
    id : int
        Given by the registry, never reused.
    slot : int
        Which resident of the engine it is; a replacement has the same slot.
    executor, address : str
        Its executor and its data port.
    pid : int
        Process id of the Python worker.
    info : mapping
        Everything that it told; nothing any more once it is gone.
    lost : str or None
        Why it is gone.
    dismissed : bool
        Whether the driver told it to go.
    joined : float
        When it came, of `time.monotonic`.
    """

    id: int
    slot: int
    executor: str
    address: str
    pid: int
    info: Mapping[str, Any]
    lost: str | None = None
    dismissed: bool = False
    process: Mapping[str, Any] = field(default_factory=dict)
    joined: float = field(default_factory=time.monotonic)

    @property
    def hung(self) -> bool:
        """Whether it was given up because it was silent: its process may still be there."""
        return self.lost is not None and self.lost.startswith("connected but silent")

    @property
    def host(self) -> str:
        """Name of its machine."""
        return self.executor.partition("/")[0]

    def __str__(self) -> str:
        jvm = self.executor.rpartition("/")[2]
        return f"member {self.id} (resident {self.slot}, process {self.pid}, executor {self.host} JVM {jvm})"


class Call:
    """One request to one member."""

    __slots__ = ("attachment", "body", "hook", "id", "lost", "member", "settled", "what")

    def __init__(self, member: Member, what: str, hook: Callable[[Call], None] | None = None) -> None:
        self.member = member
        self.what = what
        self.hook = hook
        self.id: int | None = None
        self.settled = False
        self.lost: str | None = None
        self.body: Mapping[str, Any] = {}
        self.attachment = b""

    @property
    def failure(self) -> Failure | None:
        """Why the member could not serve it; None while open, after success and after a loss."""
        error = self.body.get("error")
        if error is None:
            return None
        facts = error if isinstance(error, Mapping) else {"kind": "internal", "message": str(error)}
        return Failure(self.member.id, facts, self.attachment)


class Hub:
    """A bound registry with its thread.

    Parameters
    ----------
    host, port, advertise
        As for the native registry.
    secret : Secret
        Of the engine.
    name : str
        Names the thread.
    silence : float, optional
        Seconds after which a member that is connected and says nothing is lost; default 60.

    Raises
    ------
    ConfigError, ProtocolError
        When it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        advertise: str | None,
        secret: Secret,
        name: str,
        silence: float | None = None,
    ) -> None:
        from penstock import _native

        self._registry = _native.Registry(host, port, secret.reveal(), advertise, silence, secret.always)
        self.address: str = self._registry.address
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}
        #: All that ever joined; ids are never used again.
        self._known: dict[int, Member] = {}
        self._calls: dict[int, Call] = {}
        #: Answers that came before their call was entered.
        self._early: dict[int, Mapping[str, Any]] = {}
        self._closing = False
        self._joined: list[Callable[[Member], None]] = []
        self._lost: list[Callable[[Member], None]] = []
        self._messages: list[Callable[[Member, Mapping[str, Any], bytes], None]] = []
        self._turns: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name=f"penstock-hub-{name}", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def listen(
        self,
        joined: Callable[[Member], None] | None = None,
        lost: Callable[[Member], None] | None = None,
        message: Callable[[Member, Mapping[str, Any], bytes], None] | None = None,
        turn: Callable[[], None] | None = None,
    ) -> None:
        """Add listeners; only before `start`."""
        self._joined += [joined] if joined is not None else []
        self._lost += [lost] if lost is not None else []
        self._messages += [message] if message is not None else []
        self._turns += [turn] if turn is not None else []

    # Members

    def members(self) -> list[Member]:
        """Members that are connected and were not told to go, by id."""
        with self._changed:
            return [member for _, member in sorted(self._members.items()) if not member.dismissed]

    def known(self, number: int) -> Member:
        """The member of an id, also one that is gone."""
        with self._changed:
            return self._known[number]

    @property
    def closing(self) -> bool:
        """Whether it ends."""
        return self._closing

    def connected(self) -> list[Member]:
        """All connections of members, those on their way out included."""
        with self._changed:
            return list(self._members.values())

    def dismiss(self, member: Member, reason: str) -> None:
        """Tell a member to go."""
        with self._changed:
            member.dismissed = True
            self._changed.notify_all()
        with contextlib.suppress(PenstockError):
            self._registry.dismiss(member.id, reason)

    # Calls

    def call(
        self,
        member: Member,
        request: Mapping[str, Any],
        attachment: bytes = b"",
        hook: Callable[[Call], None] | None = None,
    ) -> Call:
        """Send a request; never waits for the answer, and never raises for a member that is gone.

        `hook` is called once when the call is settled, outside the lock, in whatever thread settles it.
        """
        call = Call(member, _what(request), hook)
        try:
            number = self._registry.send(member.id, json.dumps(request), attachment or None)
        except PenstockError as error:
            self._settle([call], lost=member.lost or str(error))
            return call
        with self._changed:
            call.id = number
            early = self._early.pop(number, None)
            gone = member.lost or ("the engine is closing" if self._closing else None)
            if early is None and gone is None:
                self._calls[number] = call
                return call
        self._settle([call], early, gone)
        return call

    def wait(
        self,
        calls: Iterable[Call],
        check: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Wait until all calls are settled.

        Parameters
        ----------
        calls : iterable of Call
            What to wait for.
        check : callable, optional
            Called every 100 ms and at the timeout, outside the lock; what it raises ends the wait.
        timeout : float, optional
            Seconds.

        Returns
        -------
        bool
            Whether all calls are settled.
        """
        waiting = list(calls)
        return self.wait_for(lambda: all(call.settled for call in waiting), check, timeout)

    def wait_for(
        self, predicate: Callable[[], bool], check: Callable[[], None] | None = None, timeout: float | None = None
    ) -> bool:
        """Wait until a predicate over members and calls holds; see `wait`."""
        now = time.monotonic()
        deadline = None if timeout is None else now + timeout
        due = now + CHECK_S
        with plain_interrupts():
            while True:
                with self._changed:
                    if predicate():
                        return True
                    if deadline is not None and time.monotonic() >= deadline:
                        return False
                    until = due if deadline is None else min(due, deadline)
                    self._changed.wait(max(0.0, until - time.monotonic()))
                    if predicate():
                        return True
                # Whatever members answer wakes who waits, and a check may ask the JVM.
                if time.monotonic() >= until:
                    if check is not None:
                        check()
                    due = time.monotonic() + CHECK_S

    def wake(self) -> None:
        """Let all waits look at the world again."""
        with self._changed:
            self._changed.notify_all()

    def metrics(self) -> dict[str, int]:
        """Counters of the registry's port."""
        return dict(self._registry.metrics())

    def close(self) -> None:
        """End all connections and the thread; settles every open call."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._registry.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(10)
        with self._changed:
            calls = list(self._calls.values())
            self._calls.clear()
            self._members.clear()
        self._settle(calls, lost="the engine was closed")

    # The thread

    def _run(self) -> None:
        while not self._closing:
            try:
                events = self._registry.poll(_TURN_S)
            except PenstockError as error:
                if not self._closing:
                    log.error("the registry failed: %s", error)
                return
            for event in events:
                try:
                    self._event(event)
                except Exception:
                    log.exception("an event of the registry could not be used")
            for turn in self._turns:
                try:
                    turn()
                except Exception:
                    log.exception("a periodic task of the engine failed")

    def _event(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "reply":
            answer = {"body": json.loads(event["body"]), "attachment": bytes(event["attachment"])}
            with self._changed:
                call = self._calls.pop(event["call"], None)
                if call is None:
                    self._early[event["call"]] = answer
            if call is not None:
                self._settle([call], answer)
        elif kind == "joined":
            member = _member(event["member"], json.loads(event["info"]))
            with self._changed:
                self._members[member.id] = self._known[member.id] = member
            for listener in self._joined:
                listener(member)
            self.wake()
        elif kind == "lost":
            self._gone(event)
        elif kind == "message":
            with self._changed:
                sender = self._members.get(event["member"])
            if sender is not None:
                for hear in self._messages:
                    hear(sender, json.loads(event["body"]), bytes(event["attachment"]))

    def _gone(self, event: Mapping[str, Any]) -> None:
        with self._changed:
            member = self._members.pop(event["member"], None)
            if member is None:
                return
            member.lost = str(event["reason"])
            numbers = [number for number, call in self._calls.items() if call.member is member]
            calls = [self._calls.pop(number) for number in numbers]
        self._settle(calls, lost=member.lost)
        for listener in self._lost:
            listener(member)
        # An id may be asked about for as long as the engine lives, which may replace thousands of members.
        member.info, member.process = {}, {}
        self.wake()

    def _settle(self, calls: list[Call], answer: Mapping[str, Any] | None = None, lost: str | None = None) -> None:
        with self._changed:
            for call in calls:
                if answer is not None:
                    call.body, call.attachment = answer["body"], answer["attachment"]
                else:
                    call.lost = lost
                call.settled = True
            self._changed.notify_all()
        for call in calls:
            if call.hook is not None:
                call.hook(call)


def _what(request: Mapping[str, Any]) -> str:
    """The name of what is asked."""
    asked = request.get("do") or request["ask"]
    return asked if isinstance(asked, str) else next(iter(asked))


def _member(number: int, info: Mapping[str, Any]) -> Member:
    return Member(
        id=number,
        slot=int(info["slot"]),
        executor=str(info["executor"]),
        address=str(info["address"]),
        pid=int(info["pid"]),
        info=info,
    )
