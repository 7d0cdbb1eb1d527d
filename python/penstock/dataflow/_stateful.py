"""State in bins that move between workers while items flow (Megaphone), for programs in Python.

Owns: `Bin`, and what `Stream.stateful_unary`, `Stream.stateful_binary`, `Stream.state_machine` and `Stream.distribute`
are made of. Keys whose hashes have the same top bits are one bin. An operator *F* routes items by the owner of their
bin at their time and begins what moves; an operator *S* behind an exchange has the bins of its worker and applies times
in their order. F and S of a worker share its bins, so what leaves is taken without a word between them.

Control is a stream of commands, whose time is that from which they hold: ``(bin, worker)`` moves one, a list of as many
workers as there are bins places all, None does nothing. Those of one time, of all workers, are a batch: moves of
different bins, or a list alone, so that what they mean does not depend on their order. F routes the items of a time
when no command at or before it can come any more; until then it keeps them. When no time before a command's can come
out of S any more, anywhere, it takes the bins that leave from its worker's and sends them at that time, with what is
post-dated in them. It holds the command's capability until then, so no S applies anything at or after that time before
the bins are there.

Invariants: a bin is with one worker at a time, that of the configuration of that time. Nothing of the time of a move or
later reaches the worker that it leaves. S applies a time when nothing at or before it can come, of items or of bins.

Departures: of times in a nested scope none is before the other, so these steps are for the root. F sends items and bins
on one edge; it is safe, since both are complete when the edge is, and costs that a bin waits for items of its time.
Commands have no sequence numbers: all of a time are a batch. A batch that means nothing ends the run with an error that
names the commands, where the native F leaves the routing as it was and tells its host: control is a stream here, and
nobody would hear of it.

Source: Megaphone (Hoffmann et al., VLDB 2019), sections 3 and 4.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from penstock._functions.loop import behind
from penstock._options import whole
from penstock.dataflow._functions import failed, keys_of, name_of, refusal
from penstock.dataflow._handles import LAST, Probe
from penstock.dataflow._operator import Capability, Frontiers, Input, Output, wrap
from penstock.errors import ConfigError, GraphError, TimeError

if TYPE_CHECKING:
    from penstock import _native

__all__ = ["Bin", "Fold", "machine", "routed", "stateful"]

#: In place of the side of an item: a bin that moves.
_MOVED = -1
_MOST_BITS = 20

Fold = Callable[..., "Iterable[Any] | None"]


class Bin:
    """The state of the keys of one bin, and records that are post-dated in it.

    Attributes
    ----------
    state
        A dict at first; to be changed or replaced. It is pickled when the bin moves to another process.

    Examples
    --------
    See `Stream.stateful_unary`.
    """

    __slots__ = ("_count", "_due", "_now", "state")

    def __init__(self) -> None:
        self.state: Any = {}
        self._due: list[tuple[int, int, Any]] = []
        self._count = 0
        self._now = 0

    def notify_at(self, time: int, record: Any) -> None:
        """Give a record to the fold again, at a time that is not before the present one. It moves with the bin.

        Raises
        ------
        TimeError
            When the time is over, or is none: an int up to 2**64 - 1.

        Examples
        --------
        See `Stream.stateful_unary`.
        """
        due = whole(time, self._now, LAST)
        if due is None:
            why = "not at or after it" if whole(time, LAST) is None else "beyond the last one, 2**64 - 1"
            raise TimeError(f"a record cannot be post-dated from time {self._now} to {time!r}, which is {why}")
        self._count += 1
        heapq.heappush(self._due, (due, self._count, record))

    def _least(self) -> int | None:
        return self._due[0][0] if self._due else None

    def _take(self, time: int) -> list[Any]:
        found = []
        while self._due and self._due[0][0] <= time:
            found.append(heapq.heappop(self._due)[2])
        return found

    def __getstate__(self) -> tuple[Any, ...]:
        return self.state, self._due, self._count, self._now

    def __setstate__(self, told: tuple[Any, ...]) -> None:
        self.state, self._due, self._count, self._now = told


#: Bins that change their owner, in their order: (bin, from, to).
_Changes = list[tuple[int, int, int]]


def _changes(owners: Sequence[int], commands: Iterable[tuple[int, Any]], peers: int, step: str, time: int) -> _Changes:
    """What the commands of one time, each with the worker that gave it, change of the owners of the bins.

    Raises
    ------
    ConfigError
        For no command, one that names no worker or bin, two of one bin, and a list of all workers beside others.
    """
    made: dict[int, int] = {}
    acting = [(giver, command) for giver, command in commands if command is not None]
    moved: dict[int, tuple[int, Any]] = {}

    def told(giver: int, command: Any) -> str:
        return f"{command!r:.80} of worker {giver}"

    def worker(value: Any) -> int:
        index = whole(value, 0, peers - 1)
        if index is None:
            raise ConfigError(f"{step}: there is no worker {value!r}, only 0 to {peers - 1}")
        return index

    for at, (giver, command) in enumerate(acting):
        if isinstance(command, list):
            if len(command) != len(owners):
                raise ConfigError(f"{step}: a map of {len(command)} workers for {len(owners)} bins; name one for each")
            if len(acting) > 1:
                raise ConfigError(
                    f"{step}: a map of all bins is not alone at time {time}: {told(giver, command)}, and"
                    f" {told(*acting[0 if at else 1])}; give the others another time"
                )
            made = dict(enumerate(map(worker, command)))
        elif isinstance(command, tuple) and len(command) == 2:
            named, to = command
            bin = whole(named, 0, len(owners) - 1)
            if bin is None:
                raise ConfigError(f"{step}: there is no bin {named!r}, only 0 to {len(owners) - 1}")
            if bin in moved:
                raise ConfigError(
                    f"{step}: bin {bin} is moved twice at time {time}: {told(*moved[bin])}, and {told(giver, command)};"
                    " give one command for a bin at a time"
                )
            moved[bin] = (giver, command)
            made[bin] = worker(to)
        else:
            raise ConfigError(f"{step}: {command!r:.80} is no command: give (bin, worker), a list of workers, or None")
    return [(bin, owners[bin], new) for bin, new in sorted(made.items()) if owners[bin] != new]


class _Owners:
    """The owner of each bin, from when on.

    What is ahead is kept as changes, so that thousands of moves that are given in advance cost what they change, and a
    map is walked along them to the time that is asked for: forward mostly, as data comes.
    """

    def __init__(self, owners: list[int]) -> None:
        #: After all changes.
        self.newest = owners
        self._found = list(owners)
        #: How many of the changes are in what was found last.
        self._done = 0
        self._changes: deque[tuple[int, _Changes]] = deque()

    def add(self, time: int, changes: _Changes) -> None:
        """Changes from a time on that is later than those of all before."""
        for bin, _, new in changes:
            self.newest[bin] = new
        if changes:
            self._changes.append((time, changes))

    def at(self, time: int) -> list[int]:
        """The owners at a time; until the next call."""
        while self._done < len(self._changes) and self._changes[self._done][0] <= time:
            for bin, _, new in self._changes[self._done][1]:
                self._found[bin] = new
            self._done += 1
        while self._done and self._changes[self._done - 1][0] > time:
            self._done -= 1
            for bin, old, _ in self._changes[self._done][1]:
                self._found[bin] = old
        return self._found

    def forget(self, time: int) -> None:
        """Nobody asks for earlier times any more."""
        while self._changes and self._changes[0][0] <= time:
            _, changes = self._changes.popleft()
            if self._done:
                self._done -= 1
                continue
            for bin, _, new in changes:
                self._found[bin] = new


class _Router:
    """F on one worker."""

    def __init__(
        self,
        step: str,
        sides: int,
        keys: Sequence[Callable[[Any], Any]],
        bits: int,
        place: tuple[int, int],
        bins: dict[int, Any] | None,
    ) -> None:
        self._step = step
        self._sides = sides
        self._keys = [keys_of(step, key) for key in keys]
        self._refused = [refusal(step, key) for key in keys]
        self._bits = bits
        self._index, self._peers = place
        self._bins = bins
        #: This operator, and what S has finished, which wakes it; made behind this.
        self.ports: _native.DataflowPorts | None = None
        self.probe: Probe | None = None
        self._owners = _Owners([bin % self._peers for bin in range(1 << bits)])
        #: With the numbers of the workers that gave them.
        self._commands: dict[int, tuple[Capability, list[tuple[int, Any]]]] = {}
        self._moves: list[tuple[int, Capability, list[tuple[int, int]]]] = []
        #: What waits for the owners of its time, and those times as a heap.
        self._items: dict[int, list[tuple[Capability, int, list[Any]]]] = {}
        self._times: list[int] = []

    def start(self, capability: Capability) -> Callable[..., None]:
        """The constructor of F."""
        capability.drop()
        return self.run

    def run(self, *ports: Any) -> None:
        """The logic of F."""
        *inputs, output, frontiers = ports
        control = len(inputs) - 1 if len(inputs) > self._sides else None
        if control is not None:
            for capability, block in inputs[control]:
                self._commands.setdefault(capability.time, (capability, []))[1].extend(block)
            self._compile(frontiers, control)
        for side in range(self._sides):
            for capability, block in inputs[side]:
                if control is None:
                    output.send(capability, self._route(capability.time, side, block))
                    continue
                time = capability.time
                if time not in self._items:
                    self._items[time] = []
                    heapq.heappush(self._times, time)
                self._items[time].append((capability, side, block))
        while self._times and control is not None and not frontiers.less_equal(self._times[0], control):
            for capability, side, block in self._items.pop(heapq.heappop(self._times)):
                output.send(capability, self._route(capability.time, side, block))
        self._move(output)
        lowest = [time for side in range(self._sides) for time in frontiers.frontier(side)]
        self._owners.forget(min(lowest + self._times[:1], default=LAST))

    def _compile(self, frontiers: Frontiers, control: int) -> None:
        for time in sorted(self._commands):
            if frontiers.less_equal(time, control):
                return
            capability, commands = self._commands.pop(time)
            # In an order that is the same on all workers, so that all say the same of what makes no sense.
            commands.sort(key=lambda command: command[0])
            changes = _changes(self._owners.newest, commands, self._peers, self._step, time)
            self._owners.add(time, changes)
            leaving = [(bin, new) for bin, old, new in changes if old == self._index]
            if leaving and self._bins is not None:
                self._moves.append((time, capability, leaving))
            else:
                capability.drop()

    def _route(self, time: int, side: int, block: Any) -> list[tuple[int, int, int, Any]]:
        from penstock import _native

        keys = self._keys[side](block)
        try:
            hashes = _native.hash_keys(keys)
        except Exception as error:
            made = self._refused[side](error)
            raise made from made.__cause__
        owners = self._owners.at(time)
        shift = 64 - self._bits
        bins = [code >> shift for code in hashes] if self._bits else [0] * len(hashes)
        return [(owners[bin], side, bin, item) for bin, item in zip(bins, block, strict=True)]

    def _move(self, output: Output) -> None:
        while self._moves:
            time, capability, leaving = self._moves[0]
            assert self.probe is not None and self._bins is not None
            if self.probe.less_than(time):
                return
            for bin, to in leaving:
                if bin in self._bins:
                    # Each by itself: all together may be more than a process takes at once.
                    output.send(capability, [(to, _MOVED, bin, self._bins.pop(bin))])
            capability.drop()
            del self._moves[0]


class _State:
    """S on one worker."""

    def __init__(self, step: str, folds: Sequence[Fold], bins: dict[int, list[Bin]]) -> None:
        self._step = step
        self._folds = folds
        self._bins = bins
        self._came: dict[int, list[tuple[int, int, int, Any]]] = {}
        #: When something post-dated is due first, by bin, and the same in order; entries that do not agree are old.
        self._first: dict[int, int] = {}
        self._due: list[tuple[int, int]] = []
        #: What is in that order: once each, however often something else is due first.
        self._listed: set[tuple[int, int]] = set()

    def start(self, capability: Capability) -> Callable[..., None]:
        """The constructor of S."""
        capability.drop()
        return self.run

    def run(self, input: Input[Any], output: Output, frontiers: Frontiers) -> None:
        """The logic of S."""
        for capability, block in input:
            time = capability.time
            if time not in self._came:
                self._came[time] = []
                frontiers.notify_at(capability)
            self._came[time].extend(block)
        for capability in frontiers.notifications():
            made = self._apply(capability.time)
            if made:
                output.send(capability, made)
            # The least capability is enough: with it the next is asked for.
            least = self._least()
            if least is not None:
                frontiers.notify_at(capability.delayed(least))

    def _apply(self, time: int) -> list[Any]:
        sides = len(self._folds)
        records: dict[int, list[list[Any]]] = {}
        for _, side, number, item in self._came.pop(time, ()):
            if side == _MOVED:
                if number in self._bins:
                    raise GraphError(f"{self._step}: bin {number} came to a worker that has it")
                self._bins[number] = item
                self._index(number)
            else:
                records.setdefault(number, [[] for _ in range(sides)])[side].append(item)
        for number in records:
            self._bins.setdefault(number, [Bin() for _ in range(sides)])
        out: list[Any] = []
        while records or ((least := self._least()) is not None and least <= time):
            number = next(iter(records)) if records else self._due[0][1]
            came = records.pop(number, None)
            bin = self._bins[number]
            for one in bin:
                one._now = time
            for side, fold in enumerate(self._folds):
                mine = [*(came[side] if came else ()), *bin[side]._take(time)]
                if not mine:
                    continue
                others = bin[:side] + bin[side + 1 :]
                try:
                    made = fold(time, mine, bin[side], *others)
                    out.extend(() if made is None else made)
                except Exception as error:
                    raised = failed(self._step, fold, error)
                    raise raised from behind(raised, error)
            self._index(number)
        return out

    def _index(self, bin: int) -> None:
        least = min((at for at in map(Bin._least, self._bins[bin]) if at is not None), default=None)
        if least is None:
            self._first.pop(bin, None)
        else:
            self._first[bin] = least
            if (least, bin) not in self._listed:
                self._listed.add((least, bin))
                heapq.heappush(self._due, (least, bin))

    def _least(self) -> int | None:
        """When the next is due of bins that are here."""
        while self._due:
            at, bin = self._due[0]
            if bin in self._bins and self._first.get(bin) == at:
                return at
            self._listed.remove(heapq.heappop(self._due))
            if bin not in self._bins:
                self._first.pop(bin, None)  # it has left, with what was due
        return None


def stateful(
    what: str,
    streams: Sequence[Any],
    keys: Sequence[Callable[[Any], Any]],
    folds: Sequence[Fold],
    control: Any,
    bits: int,
    name: str | None,
) -> _native.DataflowStream:
    """F and S, for one stream or two."""
    step = f"{what} {name or name_of(folds[0])}"
    bins: dict[int, list[Bin]] = {}
    router, parts = _routing(step, streams, keys, control, bits, bins)
    state = _State(step, folds, bins)
    made = parts.scope.operator([parts], state.start, name=step)
    router.probe = Probe(made._native.probe(None if control is None else router.ports))
    native: _native.DataflowStream = made._native
    return native


def routed(stream: Any, key: Callable[[Any], Any], control: Any, bits: int) -> _native.DataflowStream:
    """F alone: items at the owner of their bin."""
    _, parts = _routing(f"distribute {name_of(key)}", [stream], [key], control, bits, None)
    native: _native.DataflowStream = parts.map_blocks(lambda block: [item for _, _, _, item in block])._native
    return native


def machine(fold: Callable[[Any, Any, Any], Any], key: Callable[[Any], Any]) -> Fold:
    """A fold of `stateful` that has a state per key."""

    def run(time: int, records: list[Any], bin: Bin) -> list[Any]:
        states = bin.state
        out: list[Any] = []
        for item in records:
            name = key(item)
            state, made = fold(name, item, states.get(name))
            if state is None:
                states.pop(name, None)
            else:
                states[name] = state
            out.extend(() if made is None else made)
        return out

    run.__wrapped__ = fold  # type: ignore[attr-defined]
    run.__name__ = name_of(fold)
    return run


def _routing(
    step: str,
    streams: Sequence[Any],
    keys: Sequence[Callable[[Any], Any]],
    control: Any,
    bits: int,
    bins: dict[int, Any] | None,
) -> tuple[_Router, Any]:
    scope = streams[0].scope
    depth = whole(bits, 0, _MOST_BITS)
    if depth is None:
        raise ConfigError(
            f"{step}: bits={bits!r} must be an int from 0 to {_MOST_BITS}: keys are cut into 2 ** bits bins"
        )
    if scope.depth != 1:
        raise GraphError(
            f"{step} in scope {scope.path}: its times are partly ordered; put it at the root of the dataflow"
        )
    native = scope._native
    if native.joinable:
        raise GraphError(
            f"{step}: bins belong to workers that stay, and this run lets them join and leave; execute without join="
        )
    router = _Router(step, len(streams), keys, depth, (native.index, native.peers), bins)
    index = native.index
    told = None if control is None else control.map_blocks(lambda block: [(index, command) for command in block])
    inputs = [*streams, *([] if told is None else [told.broadcast()])]
    logic = wrap(step, router.start, len(inputs))

    def construct(ports: _native.DataflowPorts, capability: _native.DataflowCapability) -> Callable[[], None]:
        router.ports = ports
        return logic(ports, capability)

    made = native.operator(step, [stream._native for stream in inputs], construct)
    return router, type(streams[0])(made.exchange_owners(f"{step}, exchange"), scope)
