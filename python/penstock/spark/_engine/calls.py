"""What members are asked for the engine's protocol, and what they answer.

Owns: the frames. A request goes as it is, with the name of its query; the start of a generation takes along what the
members need to run it, the reading of state what they need to make it. An answer becomes an event under the ticket of
its request. A member that is lost answers nothing: that it is gone is an event of its own.

One that has come loads the programs that run before the protocol hears of it: the functions of the user bring modules
along, which take a new process half a second where no batch waits for it, and as much of a batch otherwise.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.spark._engine.executor import Executor
from penstock.spark._engine.hub import Call, Hub, Member
from penstock.spark._engine.program import Program
from penstock.spark._tasks.failures import Failure

__all__ = ["Calls"]


class Calls:
    """The calls of one engine.

    Parameters
    ----------
    hub : Hub
        Whose members are asked; must not have started.
    executor : Executor
        Of the engine; must not have started.
    program : callable
        The program that a query runs.
    programs : callable
        Those of all queries that are served, by their ids.
    checkpoint : callable
        Where the state of a query is durable; None where it is not.
    heard : callable
        Told of every failure of a member about a query: the protocol knows its kind and text only.
    window, slice_rows : int
        For the members' workers.
    """

    def __init__(
        self,
        hub: Hub,
        executor: Executor,
        program: Callable[[str], Program],
        programs: Callable[[], Mapping[str, Program]],
        checkpoint: Callable[[str], str | None],
        heard: Callable[[str, Failure], None],
        window: int,
        slice_rows: int,
    ) -> None:
        self._hub = hub
        self._executor = executor
        self._program = program
        self._programs = programs
        self._checkpoint = checkpoint
        self._heard = heard
        self._pace = {"window": window, "slice_rows": slice_rows}
        #: Whose functions a member has still to load before it is there, by its id.
        self._loading: dict[int, list[str]] = {}
        executor.perform(Call=self._send)
        hub.listen(lost=self._lost, message=self._hear)

    def prepare(self, member: Member, then: Callable[[], None]) -> None:
        """Let a member load what the queries run, for their next start; `then` is called when it has, or is gone.

        What cannot be loaded is told by that start.
        """
        programs = self._programs()
        if not programs:
            then()
            return
        settled = itertools.count(1)
        loading = self._loading[member.id] = list(programs)

        def take(query: str, call: Call) -> None:
            loading.remove(query)
            if next(settled) == len(programs):
                del self._loading[member.id]
                then()

        for query, program in programs.items():
            asked = {"do": "load", "query": query, "plan": json.loads(program.plan)}
            self._hub.call(member, asked, program.calls, functools.partial(take, query))

    def loading(self, member: Member) -> list[str]:
        """The queries whose functions a member has still to load before it is there, by their ids."""
        return list(self._loading.get(member.id, ()))

    def _send(self, facts: Mapping[str, Any]) -> None:
        ticket, query, request = facts["ticket"], facts["query"], facts["request"]
        member = self._hub.known(facts["member"])
        body: dict[str, Any] = {"query": query, "ask": request}
        what, asked = (request, {}) if isinstance(request, str) else next(iter(request.items()))
        attachment = b""
        if what in ("Start", "Load"):
            program = self._program(query)
            body["plan"] = json.loads(program.plan)
            attachment = program.calls
        if what in ("Start", "Load", "Merge") and (checkpoint := self._checkpoint(query)) is not None:
            body["checkpoint"] = checkpoint
        if what == "Start":
            peers = [self._hub.known(one) for one in asked["members"]]
            body["peers"] = [{"id": peer.id, "address": peer.address} for peer in peers]
            body |= self._pace
        self._hub.call(member, body, attachment, lambda call: self._answered(ticket, query, call))

    def _answered(self, ticket: int, query: str, call: Call) -> None:
        if call.failure is not None:
            self._heard(query, call.failure)
            answer = {"Err": _told(call.failure)}
        elif call.lost is None:
            answer = {"Ok": call.body["answer"]}
        elif call.member.lost is None and not self._hub.closing:
            # It could not be sent; if the connection has broken, the loss of the member follows.
            answer = {"Err": {"kind": "Internal", "message": f"{call.member} cannot be asked: {call.lost}"}}
        else:
            return
        self._executor.post({"Answer": {"ticket": ticket, "answer": answer}}, call)

    # In the hub's thread

    def _lost(self, member: Member) -> None:
        where = str(member).partition(" (")[2].rstrip(")")
        self._executor.post({"MemberLost": {"member": member.id, "reason": f"{member.lost} ({where})"}})

    def _hear(self, member: Member, body: Mapping[str, Any], attachment: bytes) -> None:
        if body.get("event") == "failed":
            failure = Failure(member.id, body.get("error", {}), attachment)
            self._heard(str(body["query"]), failure)
            told = {"query": body["query"], "stamp": body["stamp"], "failure": _told(failure)}
            self._executor.post({"GroupFailed": told}, failure)


def _told(failure: Failure) -> dict[str, str]:
    """A failure in the words of the protocol."""
    return {"kind": failure.why, "message": str(failure.facts.get("message", ""))}
