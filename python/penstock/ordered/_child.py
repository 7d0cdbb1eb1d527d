"""A worker process: it does what comes over its socket and ends with it.

Imports little, so that it is up soon: what the functions need they bring along. The first message holds the steps;
each of the others asks for one operator on one chunk or part. Nothing is kept between two requests but the functions.

Invariants: every request has one reply, in order; an exception of a function is a result, never the end; failures of
before stay with the parent, and have an `Elsewhere` here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from typing import Any

from penstock._functions.short import short
from penstock.errors import NotPicklable, UserFunctionError
from penstock.ordered import _wire as wire
from penstock.ordered._brought import brought
from penstock.ordered._chunk import Chunk, Elsewhere, Failure, add_note, mark, notes_of, text_of
from penstock.ordered._keyed import Packed, run_part
from penstock.ordered._operators import compile_steps

__all__ = ["main"]


def main(sock: socket.socket) -> None:
    """Serve the parent until the socket ends."""
    code = 1
    try:
        _serve(sock)
    except (wire.Ended, ConnectionError):
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _serve(sock: socket.socket) -> None:
    body, buffers = wire.receive(sock)
    try:
        operators: list[Any] = compile_steps(wire.loads(body, buffers))
    except BaseException as error:
        _reply(sock, ("broken", f"{type(error).__qualname__}: {text_of(error)}"))
        return
    _reply(sock, ("ready",))
    while True:
        try:
            body, buffers = wire.receive(sock)
        except wire.NoFile as error:
            _reply(sock, ("broken", str(error)))
            continue
        try:
            kind, place, *rest = wire.loads(body, buffers)
        except BaseException as error:
            _reply(sock, ("broken", f"{type(error).__qualname__}: {text_of(error)}"))
            continue
        del body, buffers
        if kind == "there":
            from penstock.ordered import _anew

            _reply(sock, ("done", _anew.there(*rest)))
            continue
        reply = (_apply if kind == "apply" else _keyed)(operators[place], *rest)
        del rest
        _reply(sock, reply)


def _reply(sock: socket.socket, reply: tuple[Any, ...]) -> None:
    buffers: list[Any] = []
    try:
        body = wire.dumps(reply, buffers, brought)
    except Exception:
        buffers = []
        body = wire.dumps(_sendable(reply), buffers, brought)
    _flush()  # whose items are done may end this process
    wire.send(sock, body, buffers)


def _apply(operator: Any, first: int, values: list[Any], origins: Any, failed: int) -> tuple[Any, ...]:
    chunk = Chunk(0, first, values)
    chunk.origins, chunk.failed = origins, failed
    started = time.perf_counter()
    try:
        operator(chunk)
    except KeyboardInterrupt as error:
        return ("failed", _portable(Failure(error), operator.name))
    spent = time.perf_counter() - started
    if chunk.failed:
        for value in chunk.values:
            if value.__class__ is Failure and value.error.__class__ is not Elsewhere:
                _portable(value, operator.name)
    return ("done", chunk.values, chunk.origins, chunk.failed, spent)


def _keyed(
    operator: Any,
    places_of_keys: list[int],
    items: list[Any],
    numbers: list[int],
    places: list[tuple[int, int]],
    lent: list[tuple[Any, bytes | None]],
) -> tuple[Any, ...]:
    started = time.perf_counter()
    keys = [lent[at][0] for at in places_of_keys]
    states: dict[Any, tuple[Any, Any]] = {key: (Packed(body), None) for key, body in lent if body is not None}
    try:
        outs = run_part(operator, states, keys, items, numbers, places)
        bodies = [_packed(operator.name, key, states) for key, _ in lent]
    except (NotPicklable, KeyboardInterrupt) as error:
        return ("failed", _portable(Failure(error, stays=isinstance(error, NotPicklable)), operator.name))
    for out in outs:
        for value in out:
            if value.__class__ is Failure:
                _portable(value, operator.name)
    return ("done", outs, bodies, time.perf_counter() - started)


def _packed(name: str, key: Any, states: dict[Any, tuple[Any, Any]]) -> tuple[bytes, Any] | None:
    held = states.get(key)
    if held is None:
        return None
    state, place = held
    if isinstance(state, Packed):
        return state.body, place  # untouched
    try:
        return wire.dumps(state), place
    except Exception as error:
        raise NotPicklable(
            f"{name}: the state of key {short(key)} does not pickle, so it cannot leave the worker process:"
            f" {text_of(error)}",
            item=None,
        ) from error


def _portable(failed: Failure, step: str) -> Failure:
    """The failure, its exception in a form that travels, with the traceback of this process as a note."""
    error = failed.error
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    try:
        wire.loads(wire.dumps(Failure(error), None, brought))
    except Exception as reason:
        try:
            # Many call their base with a text, and cannot be called with that themselves.
            wire.loads(wire.dumps(Failure(error, bare=True), None, brought))
            failed.bare = True
        except Exception:
            made = UserFunctionError(
                f"{step} raised {type(error).__qualname__}, which does not pickle ({text_of(reason)}), so it cannot"
                f" leave the worker process; give it a __reduce__, or use mode='threads': {text_of(error)}",
                step=step,
            )
            for note in notes_of(error):
                add_note(made, note)
            failed.error, failed.stays, error = made, True, made
    mark(error, f"In worker process {os.getpid()}:\n{text}", step)
    return failed


def _sendable(reply: tuple[Any, ...]) -> tuple[Any, ...]:
    """A reply whose values that do not pickle are failures that say so."""
    if reply[0] != "done":
        return ("broken", "the reply does not pickle")
    if len(reply) == 5:
        _, values, origins, failed, spent = reply
        kept, bad = _checked(values)
        return ("done", kept, origins, failed + bad, spent)
    _, outs, bodies, spent = reply
    return ("done", [_checked(out)[0] for out in outs], bodies, spent)


def _checked(values: list[Any]) -> tuple[list[Any], int]:
    kept, bad = [], 0
    for value in values:
        try:
            wire.dumps(value, None, brought)
        except Exception as error:
            made = NotPicklable(
                f"a result of type {type(value).__qualname__} does not pickle, so it cannot leave the worker process:"
                f" {text_of(error)}; return something that does, or use mode='threads'",
                item=None,
            )
            value = Failure(made, stays=True)
            bad += 1
        kept.append(value)
    return kept, bad
