"""Worker processes: one per worker of a run, started (never forked) when first wanted.

Each child has one socket, over which everything goes. A thread of the pool starts the children and lives as long as
it: the system kills a child when the thread that started it ends (see `_children`), so nothing is left behind even
after `kill -9` of this process.

There are more callers than children: one pickles its request or unpickles its reply while the children work on those
of others.

Invariants: one caller at a time talks to a child, with one request, and the earliest chunk goes first (see `turns`); a
child that is given back owes no reply; one that ended, or whose reply nobody took, is replaced, and what it was working
on is an error that names the items, if there was something; failures never go to a child: what stands for them there
comes back in their places; after `close` no child is left. Where nobody asked for processes (mode "auto"), what does
not travel is not an error: `Stays`, and whoever called does that chunk or part himself.

Departure: state of a key travels with the call, pickled, and only that of the keys in a chunk; so the hybrid queue
serves worker processes, too.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock._children import Child, Watch, how_ended, require_descriptors, require_interpreter
from penstock._functions.short import short
from penstock.errors import ItemsLost, ItemTimeout, NotPicklable, OrderedError
from penstock.ordered import _wire as wire
from penstock.ordered._chunk import Chunk, Elsewhere, Failure, Stays, add_note, item_of, place_of, text_of
from penstock.ordered._keyed import Part
from penstock.ordered._steps import Step
from penstock.ordered._transforms import failure
from penstock.ordered._turns import Turns

__all__ = ["Pool"]

#: Seconds that a child has to come up.
_START = 60.0
#: Seconds that a child has to end by itself once its socket has ended; and one that has nothing to do but to end.
_PATIENCE, _REST = 0.25, 5.0
#: So many children in a row that end before they did anything, and the run ends.
_DEATHS = 5


class _Child(Child):
    """One process, seen from here."""

    def __init__(self) -> None:
        super().__init__("penstock.ordered._child", "main")
        self.up = False
        #: Why it cannot restore the functions, once it has told; then it is gone.
        self._refusal: str | None = None
        self._deadline = time.monotonic() + _START

    def learn(self, code: bytes) -> None:
        """Give it the functions.

        Raises
        ------
        OrderedError
            When it does not take them in time.
        """
        try:
            self.hand_over(lambda: wire.send(self.socket, code, []), self._deadline)
        except TimeoutError as error:
            raise OrderedError(
                f"worker process {self.popen.pid} was started, but did not take its functions within {_START:g} s"
            ) from error

    def hello(self) -> None:
        """Wait until it is up."""
        if self.up:
            return
        if self._refusal is not None:  # it has told another caller, and ended
            raise self._refused()
        self.limit(self._deadline)
        try:
            message = wire.loads(*wire.receive(self.socket))
        except TimeoutError as error:
            raise OrderedError(f"worker process {self.popen.pid} did not come up within {_START:g} s") from error
        if message[0] != "ready":
            self._refusal = message[1]
            raise self._refused()
        self.up = True

    def _refused(self) -> NotPicklable:
        return NotPicklable(
            f"the functions cannot be restored in a worker process: {self._refusal}; import what they need inside"
            " them, or use mode='threads'",
            item=None,
        )

    def hang_up(self) -> None:
        """Let it know that it is not needed any more; what is being sent to it fails."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def dismiss(self) -> int:
        """Kill it if it is not gone yet; how it ended."""
        self.hang_up()
        code = self.end()
        self.socket.close()
        return code


class Pool:
    """The worker processes of one run.

    Parameters
    ----------
    steps : sequence of Step
        What they are to know.
    workers : int
        How many.
    strict : bool, default True
        Whether what does not travel is an error in place of its results; else `apply` and `keyed` raise `Stays`.

    Attributes
    ----------
    stays : str
        What could not travel, once there was something: then others may, but it is not known which.

    Raises
    ------
    NotPicklable
        When a function cannot travel.
    ConfigError
        When this process may not open as many files.
    """

    def __init__(self, steps: Sequence[Step], workers: int, strict: bool = True) -> None:
        require_interpreter()
        require_descriptors(workers, f"workers={workers}")
        #: What goes to each child first, and the classes that it has then; see `_dynamic`.
        self._code, self._known = _pickled(steps)
        self.workers = workers
        self.stays = ""
        self._strict = strict
        self._pid = os.getpid()
        self._children: list[_Child | None] = [None] * workers
        #: The one that is being started, and why none can be: then nobody waits for another one.
        self._starting: _Child | None = None
        self._broken: BaseException | None = None
        self._lock = threading.Lock()
        #: Children that nobody talks to, and callers that wait for one.
        self._turns = Turns(workers)
        self._closed = False
        #: Children that have a request.
        self._busy: set[_Child] = set()
        self._deaths = 0
        #: A function may have left processes behind that hold the socket of the one that it ran in.
        self._watch = Watch("penstock-ordered-watch")
        self._wanted: queue.SimpleQueue[tuple[int, queue.SimpleQueue[_Child | None]] | None] = queue.SimpleQueue()
        self._starter = threading.Thread(target=self._start, name="penstock-ordered-start", daemon=True)
        self._starter.start()
        for worker in range(workers):
            self._ask(worker)

    def _start(self) -> None:
        """Start children as they are asked for: see the module for why one thread does it."""
        while (wanted := self._wanted.get()) is not None:
            worker, reply = wanted
            # Only missing ones: a call may have asked for one that was under way.
            if self._children[worker] is None and not self._broken:
                try:
                    self._begin(worker)
                except BaseException as error:
                    self._broken = error
            reply.put(self._children[worker])

    def _begin(self, worker: int) -> None:
        with self._lock:
            if self._closed:
                return
            child = self._starting = _Child()
        self._watch.add(child)
        try:
            # Without the lock: it may take long, and who closes the pool does not wait for that.
            child.learn(self._code)
        except BaseException:
            self._dismiss(child)
            raise
        finally:
            with self._lock:
                self._starting = None
        with self._lock:
            if not self._closed:
                self._children[worker] = child
                return
        self._dismiss(child)

    def _dismiss(self, child: _Child) -> int:
        self._watch.remove(child)
        return child.dismiss()

    def _ask(self, worker: int) -> queue.SimpleQueue[_Child | None]:
        """Have a child started, if it is missing; gets it, or None."""
        reply: queue.SimpleQueue[_Child | None] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                reply.put(None)
            else:
                self._wanted.put((worker, reply))
        return reply

    def _child(self, worker: int) -> _Child:
        child = None if self._closed else self._children[worker] or self._ask(worker).get()
        if self._closed:
            raise OrderedError("this run was closed")
        if child is None:
            raise self._cannot_start()
        return child

    def _cannot_start(self) -> OrderedError:
        error = OrderedError(f"no worker process can be started: {self._broken}")
        error.__cause__ = self._broken
        return error

    def wait(self) -> None:
        """Wait until all children are up.

        Raises
        ------
        OrderedError
            When one cannot come up, or the pool is closed.
        """
        for worker in range(self.workers):
            child = self._child(worker)
            try:
                child.hello()
            except wire.Ended as error:
                raise OrderedError(f"a worker process {how_ended(child.popen.wait())} when it started") from error

    def there(self, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """What a child has of these, as `_anew.there`; before `begin`.

        Raises
        ------
        OrderedError
            When it does not tell.
        """
        answer = self._exchange(0, wire.dumps(("there", 0, names), []), [], _START)
        if isinstance(answer, (_Late, _Gone, wire.NoFile)):
            raise OrderedError("a worker process did not tell what it has of the modules of the functions")
        told: dict[tuple[str, str], Any] = wire.loads(*answer)[1]
        return told

    def differs(self, steps: Sequence[Step]) -> str:
        """What functions read of modules that is not the same in a child, in words; empty where all is. Before `begin`.

        Raises
        ------
        NotPicklable
            When a child cannot restore the functions.
        OrderedError
            When it does not tell.
        """
        from penstock.ordered._anew import differing, read

        here = read(steps)
        what = differing(here, self.there(list(here)))
        if not what:
            return ""
        return f"processes cannot be used: {what} where its module is imported anew; mode='processes' does not ask"

    def pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [child.popen.pid for child in self._children if child is not None and child.popen.poll() is None]

    def begin(self, number: int, callers: int) -> None:
        """The next chunk to come is this one, by so many threads; nothing is under way.

        Chunks come to each operator without gaps from it on.
        """
        self._turns.begin(number, callers)

    def limit_callers(self, callers: int) -> None:
        """No more threads ask than these: where a process may start no more, fewer come than were told to `begin`."""
        self._turns.limit_callers(callers)

    def split(self, place: int, operator: Any, chunk: Chunk) -> list[Any]:
        """The parts of a chunk, each of which comes to `keyed`."""
        parts: list[Any] = operator.split(chunk)
        self._turns.announce(chunk.number, place, [part.partition for part in parts])
        return parts

    # Calls, in the thread of a worker

    def apply(self, place: int, name: str, chunk: Chunk, timeout: float | None) -> None:
        """Do a stateless operator on a chunk, over there.

        Raises
        ------
        Stays
            Unless strict, when the chunk or what was made of it does not travel; it is as it was.
        """
        number = chunk.number
        try:
            if not all(value.__class__ is Failure for value in chunk.values):
                self._apply(place, name, chunk, timeout)
        finally:
            self._turns.passed(number, place)

    def _apply(self, place: int, name: str, chunk: Chunk, timeout: float | None) -> None:
        reply: tuple[Any, ...] | None
        turn = (chunk.number, place, None)
        try:
            reply = self._whole(place, name, chunk, turn, timeout)
        except _Unrestored as unrestored:
            self._may_stay(unrestored.made)
            if len(chunk.values) > 1:
                self._apart(place, name, chunk, timeout)
                return
            reply = ("failed", Failure(unrestored.made))
        if reply is None:
            return
        if reply[0] == "done":
            _, chunk.values, chunk.origins, chunk.failed, spent = reply
            chunk.spent += spent
            return
        # Of those that went there nothing is known: the error stands for them all.
        values: list[Any] = []
        origins: list[int] = []
        lost = reply[1]
        for value, number in zip(chunk.values, chunk.numbers(), strict=True):
            if value.__class__ is not Failure:
                value, lost = lost, None
            if value is not None:
                values.append(value)
                origins.append(number)
        chunk.values, chunk.origins, chunk.failed = values, origins, len(values)

    def _apart(self, place: int, name: str, chunk: Chunk, timeout: float | None) -> None:
        """Each value of a chunk by itself, of which one cannot be restored, there or here, and so none.

        Functions run again for what had come back with it.
        """
        values: list[Any] = []
        origins: list[int] = []
        failed = 0
        for value, number in zip(chunk.values, chunk.numbers(), strict=True):
            one = Chunk(chunk.number, number, [value])
            if value.__class__ is Failure:
                one.failed = 1
            else:
                self._apply(place, name, one, timeout)
            values.extend(one.values)
            origins.extend(one.numbers())
            failed += one.failed
            chunk.spent += one.spent
        chunk.values, chunk.origins, chunk.failed = values, origins, failed

    def _whole(
        self, place: int, name: str, chunk: Chunk, turn: tuple[int, int, int | None], timeout: float | None
    ) -> tuple[Any, ...] | None:
        """The reply for a chunk; None where all of its values are failures by now."""
        try:
            return self._without_failures(place, name, chunk, turn, timeout)
        except _Unsendable as unsent:
            self._may_stay(unsent.__cause__)
            # Which ones? The others go.
            kept = []
            for value, number in zip(chunk.values, chunk.numbers(), strict=True):
                if value.__class__ is not Failure and (error := _unsendable(value, self._known)) is not None:
                    value = failure(_item_error(value, number, error), number, name)
                    chunk.failed += 1
                kept.append(value)
            chunk.values = kept
            if all(value.__class__ is Failure for value in kept):
                return None
            return self._without_failures(place, name, chunk, turn, timeout)

    def _without_failures(
        self, place: int, name: str, chunk: Chunk, turn: tuple[int, int, int | None], timeout: float | None
    ) -> tuple[Any, ...]:
        values, numbers = chunk.values, chunk.numbers()
        kept: list[Failure] = []
        if chunk.failed:
            values = list(values)
            for position, value in enumerate(values):
                if value.__class__ is Failure:
                    values[position] = Failure(Elsewhere(len(kept)))
                    kept.append(value)
        request = ("apply", place, chunk.first, values, chunk.origins, chunk.failed)
        reply = self._call(request, turn, name, numbers[0], numbers[-1], timeout)
        if reply[0] == "done" and reply[3]:
            values, origins = reply[1], reply[2]
            self._may_have_stayed(values)
            for position, value in enumerate(values):
                if value.__class__ is not Failure:
                    continue
                if value.error.__class__ is Elsewhere:
                    values[position] = kept[value.error.number]
                else:
                    _name(value, chunk.first + position if origins is None else origins[position], name)
        return reply

    def keyed(self, place: int, operator: Any, part: Any, timeout: float | None) -> None:
        """Do a part of a chunk, over there, on states that travel with it.

        Raises
        ------
        Stays
            Unless strict, when the part, its states or what was made of them does not travel; all is as it was.
        """
        try:
            if part.items:
                self._keyed(place, operator, part, timeout)
            operator.settle(part)
        finally:
            self._turns.passed(part.chunk.number, place, part.partition)

    def _keyed(self, place: int, operator: Any, part: Any, timeout: float | None) -> None:
        """The items of a part; what is done at the end of the input is not."""
        name, first, last = operator.name, part.numbers[0], part.numbers[-1]
        try:
            # Each key travels once: copies of a NaN are other keys.
            at = {key: number for number, key in enumerate(dict.fromkeys(part.keys))}
            keys = [at[key] for key in part.keys]
            lent = operator.lend(part)
        except NotPicklable as error:
            self._may_stay(error)
            self._all_of_it(part, failure(error, first, name))
            return
        except Exception as error:  # a key that cannot be compared with another one
            if not self._without(place, operator, part, operator.uncompared(part), timeout):
                self._all_of_it(part, failure(error, first, name))
            return
        request = ("keyed", place, keys, part.items, part.numbers, part.places(), lent)
        turn = (part.chunk.number, place, part.partition)
        try:
            reply = self._call(request, turn, name, first, last, timeout)
        except _Unsendable as unsent:
            self._may_stay(unsent.__cause__)
            if not self._without(place, operator, part, self._unsent(part, name), timeout):
                where = place_of(first, last)
                made = NotPicklable(
                    f"{name}: an item or key among {where} does not pickle: {text_of(unsent.__cause__)}",
                    item=item_of(first),
                )
                self._all_of_it(part, failure(made, first, name))
            return
        except _Unrestored as unrestored:
            self._may_stay(unrestored.made)
            if len(part.items) > 1:
                self._by_halves(place, operator, part, timeout)
            else:
                self._all_of_it(part, Failure(unrestored.made))
            return
        except NotPicklable as error:  # the functions
            self._may_stay(error)
            raise
        if reply[0] == "failed":
            self._may_have_stayed([reply[1]])
            self._all_of_it(part, reply[1])
            return
        _, outs, bodies, part.spent = reply
        self._may_have_stayed([value for out in outs for value in out])
        part.outs = outs
        for out, number in zip(part.outs, part.numbers, strict=True):
            for value in out:
                if value.__class__ is Failure:
                    _name(value, number, name)
        operator.take_back(part, bodies)

    def _all_of_it(self, part: Any, failed: Failure) -> None:
        """Nothing of it was done: the states are as they were, the error stands for all of its items."""
        part.outs = [[failed]] + [[] for _ in part.items[1:]]

    def _may_stay(self, why: object) -> None:
        """This does not travel: an error in its place, or the caller does it."""
        if not self._strict:
            self.stays = self.stays or text_of(why)
            raise Stays

    def _may_have_stayed(self, values: Sequence[Any]) -> None:
        """Something of what a child made does not travel."""
        for value in () if self._strict else values:
            if value.__class__ is Failure and value.stays:
                self._may_stay(value.error)

    def _unsent(self, part: Any, name: str) -> list[Failure | None]:
        """By item, what comes of one that does not pickle, or whose key does not."""
        errors: list[Failure | None] = []
        for key, item, number in zip(part.keys, part.items, part.numbers, strict=True):
            made = None
            for what, value in (("item", item), ("key", key)):
                error = _unsendable(value, self._known) if made is None else None
                if error is not None:
                    made = failure(_item_error(value, number, error, what), number, name)
            errors.append(made)
        return errors

    def _without(
        self, place: int, operator: Any, part: Any, errors: Sequence[Failure | None], timeout: float | None
    ) -> bool:
        """Do a part without the items that have an error; False where there is none."""
        there = [at for at, error in enumerate(errors) if error is None]
        if len(there) == len(part.items):
            return False
        rest = _only(part, there)
        if there:
            self._keyed(place, operator, rest, timeout)
        outs = [[] if error is None else [error] for error in errors]
        for at, out in zip(there, rest.outs, strict=True):
            outs[at] = out
        part.outs, part.spent = outs, rest.spent
        return True

    def _by_halves(self, place: int, operator: Any, part: Any, timeout: float | None) -> None:
        """A part of which one item cannot be restored, there or here, and so none: one half, then the other.

        Functions run again for what had come back with it: the states are those from before.
        """
        outs: list[Any] = []
        spent = 0.0
        middle = len(part.items) // 2
        for these in (range(middle), range(middle, len(part.items))):
            half = _only(part, these)
            self._keyed(place, operator, half, timeout)
            outs += half.outs
            spent += half.spent
        part.outs, part.spent = outs, spent

    def _call(
        self,
        request: tuple[Any, ...],
        turn: tuple[int, int, int | None],
        name: str,
        first: int,
        last: int,
        timeout: float | None,
    ) -> tuple[Any, ...]:
        """One request, when it has its `turn`, and its reply, ``("done", ...)`` or ``("failed", failure)``.

        Raises
        ------
        _Unsendable, _Unrestored
            When one of both does not travel: nothing of it is known.
        """
        buffers: list[Any] = []
        try:
            body = wire.dumps(request, buffers, self._known)
        except Exception as error:
            raise _Unsendable from error
        where = place_of(first, last)
        worker = self._turns.take(*turn)
        try:
            answer = self._exchange(worker, body, buffers, timeout)
        finally:
            self._turns.give(worker, *turn[1:])
        if isinstance(answer, _Late):
            made: OrderedError = ItemTimeout(
                f"{name} did not return within {timeout} s for {where}; its process was ended",
                item=item_of(first),
                last=item_of(last),
                step=name,
                timeout=timeout,
            )
            return ("failed", Failure(made))
        if isinstance(answer, _Gone):
            self._deaths += 1
            how = how_ended(answer.code)
            if self._deaths >= _DEATHS:
                raise OrderedError(
                    f"{self._deaths} worker processes in a row ended in the middle of their work, the last one {how} at"
                    f" {where}, in {name}: the run ends"
                )
            made = ItemsLost(
                f"a worker process {how} while {name} worked on {where}; their results are lost, the process is"
                " replaced",
                item=item_of(first),
                last=item_of(last),
                exitcode=answer.code,
                step=name,
            )
            return ("failed", Failure(made))
        self._deaths = 0
        try:
            if isinstance(answer, wire.NoFile):
                raise answer
            reply: tuple[Any, ...] = wire.loads(*answer)
        except Exception as error:
            made = NotPicklable(
                f"what {name} returned for {where} cannot be restored here: {short(error, 1000)}",
                item=item_of(first),
            )
            made.__cause__ = error
            raise _Unrestored(made) from error
        if reply[0] == "broken":
            made = NotPicklable(
                f"{where} cannot be restored in a worker process, for {name}: {reply[1]}", item=item_of(first)
            )
            raise _Unrestored(made)
        return reply

    def _exchange(self, worker: int, body: bytes, buffers: list[Any], timeout: float | None) -> Any:
        """Send a request to a child and take its reply, as it came; or why there is none.

        One that ended before it was given the request is replaced, and the next one gets it.
        """
        while True:
            child = self._child(worker)
            given = False
            try:
                child.hello()
                if child.popen.poll() is not None:
                    raise wire.Ended("it ended while it had nothing to do")
                child.socket.settimeout(timeout)
                with self._lock:
                    if self._closed:
                        raise OrderedError("this run was closed")
                    self._busy.add(child)
                given = True
                wire.send(child.socket, body, buffers)
                return wire.receive(child.socket)
            except wire.NoFile as error:
                return error
            except TimeoutError:
                self._replace(worker, child)
                return _Late()
            except ConnectionError as error:
                if self._closed:
                    raise OrderedError("this run was closed") from error
                code = self._replace(worker, child)
                if given:
                    return _Gone(code)
                self._deaths += 1
                if self._deaths >= _DEATHS:
                    raise OrderedError(
                        f"{self._deaths} worker processes in a row ended, the last one {how_ended(code)} before it had"
                        " anything to do: the run ends"
                    ) from error
            except OrderedError:
                raise  # it did not come up: the run ends
            except BaseException as error:
                # Its reply may be still to come, for whoever has it next.
                self._replace(worker, child)
                if self._closed and isinstance(error, OSError):
                    raise OrderedError("this run was closed") from error
                raise
            finally:
                self._busy.discard(child)

    def _replace(self, worker: int, child: _Child) -> int:
        code = self._dismiss(child)
        with self._lock:
            self._children[worker] = None
        self._ask(worker)
        return code

    def close(self) -> None:
        """End all children and wait for their ends."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            if self._starting is not None:
                self._starting.hang_up()
            children = [child for child in self._children if child is not None]
            resting = {child for child in children if child.up and child not in self._busy}
        for child in children:
            child.hang_up()
        self._turns.close()
        now = time.monotonic()
        for child in sorted(children, key=resting.__contains__):
            child.end(now + (_REST if child in resting else _PATIENCE))
            self._dismiss(child)
        self._wanted.put(None)
        if threading.current_thread() is not self._starter:
            self._starter.join()
        self._watch.close()


class _Late:
    """Instead of a reply: there was none in time."""


@dataclass
class _Gone:
    """Instead of a reply: the child ended."""

    code: int


class _Unrestored(Exception):
    """A request cannot be restored there, or its reply here; `made` says which."""

    def __init__(self, made: NotPicklable) -> None:
        super().__init__(made)
        self.made = made


class _Unsendable(Exception):
    """A request does not pickle; the reason is the cause."""


def _pickled(steps: Sequence[Step]) -> tuple[bytes, dict[type, str]]:
    from penstock.ordered import _dynamic

    try:
        return _dynamic.dumps_functions(tuple(steps))
    except Exception as error:
        for step in steps:
            try:
                _dynamic.dumps_functions(step)
            except Exception as reason:
                raise NotPicklable(
                    f"{step.name}: the function cannot be sent to worker processes: {text_of(reason)}; make what it"
                    " refers to inside the function, or use mode='threads'",
                    item=None,
                ) from reason
        raise NotPicklable(f"the functions cannot be sent to worker processes: {text_of(error)}", item=None) from error


def _only(part: Part, these: Sequence[int]) -> Part:
    """These items of a part."""
    some: Part = copy.copy(part)
    for name in ("positions", "numbers", "keys", "items"):
        of_all = getattr(part, name)
        setattr(some, name, [of_all[at] for at in these])
    some.outs, some.spent = [], 0.0
    return some


def _unsendable(value: Any, known: Mapping[type, str]) -> Exception | None:
    """Why a value does not pickle; None if it does."""
    try:
        wire.dumps(value, [], known)
    except Exception as error:
        return error
    return None


def _name(value: Failure, number: int, step: str) -> None:
    """Say of a result that could not leave its process to which item it belongs."""
    error = value.error
    if isinstance(error, NotPicklable):
        if error.__dict__.get("item") is None:
            error.__dict__["item"] = item_of(number)
        add_note(error, f"{place_of(number)}, in {step}")


def _item_error(value: Any, number: int, error: BaseException, what: str = "item") -> NotPicklable:
    whose = f"the key of {place_of(number)}" if what == "key" else place_of(number)
    made = NotPicklable(
        f"{whose}, of type {type(value).__qualname__}, does not pickle, so it cannot go to a worker process:"
        f" {text_of(error)}; use mode='threads'",
        item=item_of(number),
    )
    made.__cause__ = error
    return made
