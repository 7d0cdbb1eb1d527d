"""Bins that are split, as a session plans with them: which parts there are, and whose each will be.

Owns: the checks of what a user asks to split, to merge and to move, by ranges of the hash. A range is
``(prefix, bits)``: all hashes that begin with these bits. What happens is decided by the workers, in the order in which
it was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock._migration import Cut, balanced, flat_target
from penstock._options import whole
from penstock.errors import ConfigError

__all__ = ["Bins", "Part", "Parts", "names_parts", "parse_depth"]

Part = tuple[int, int]
#: A bin, a part of one, or several.
Bins = int | Part | Iterable[int | Part]

#: The most bits of a prefix.
_MOST = 20


class Parts:
    """All bins of a flow with their owners, when all that was asked for is done.

    Parameters
    ----------
    bits : int
        Of a bin that is whole.
    owner : dict of (prefix, bits) to int
        The worker of each; together they hold every hash once.
    """

    def __init__(self, bits: int, owner: Mapping[Part, int]) -> None:
        self.bits = bits
        self.owner = dict(owner)

    def copy(self) -> Parts:
        """Another one that is equal."""
        return Parts(self.bits, self.owner)

    @property
    def is_split(self) -> bool:
        """Whether any bin is."""
        return len(self.owner) > 1 << self.bits

    def owners(self) -> list[int]:
        """The worker of each bin, by number, when none is split."""
        return [self.owner[number, self.bits] for number in range(1 << self.bits)]

    def number(self, part: Part) -> int:
        """How the workers name it."""
        prefix, bits = part
        return prefix if bits == self.bits else 1 << bits | prefix

    def within(self, coarse: Part) -> list[Part]:
        """The parts of a bin or part that is split, by hash; itself where it is whole."""
        prefix, bits = coarse
        above = ((prefix >> up, bits - up) in self.owner for up in range(1, bits - self.bits + 1))
        if not self.owner or any(above):
            return []  # part of one that is whole
        found: list[Part] = []
        looks = [coarse]
        while looks:
            prefix, bits = one = looks.pop()
            if one in self.owner:
                found.append(one)
            else:
                looks += [(prefix << 1 | 1, bits + 1), (prefix << 1, bits + 1)]
        return found

    def parse(self, bins: Bins, what: str) -> list[Part]:
        """The bins that a user names.

        Raises
        ------
        ConfigError
            When there can be no such bin, or one is named twice.
        """
        try:
            listed: list[Any] = [bins] if self._part(bins) is not None else list(bins)  # type: ignore[arg-type]
        except TypeError:
            listed = [bins]
        found: dict[Part, None] = {}
        for named in listed:
            part = self._part(named)
            if part is None:
                raise ConfigError(f"{what}: a bin is its number, or (prefix, bits) of a part, not {named!r}")
            prefix, bits = part
            if not self.bits <= bits <= _MOST or not 0 <= prefix < 1 << bits:
                raise ConfigError(
                    f"{what}: there can be no bin {named!r}: bins have {self.bits} bits, their parts up to {_MOST}, and"
                    f" prefixes of n bits are below 2 ** n"
                )
            if part in found:
                raise ConfigError(f"{what}: bin {named!r} is named twice")
            found[part] = None
        if not found:
            raise ConfigError(f"{what}: no bin is named")
        return list(found)

    def _part(self, named: Any) -> Part | None:
        """A bin by its number, or a part by its prefix and the bits of that; None for anything else."""
        pair = named if isinstance(named, tuple) and len(named) == 2 else (named, self.bits)
        prefix, bits = map(whole, pair)
        return None if prefix is None or bits is None else (prefix, bits)

    def split(self, bins: Bins, by: int) -> list[Part]:
        """Split these; returns them.

        Raises
        ------
        ConfigError
            When that cannot be.
        """
        by = parse_depth(by)
        chosen = self.parse(bins, "split")
        for part in chosen:
            prefix, bits = part
            if part not in self.owner:
                why = "is split already" if self.within(part) else "is not there: what it would be part of is whole"
                raise ConfigError(f"split: bin {part} {why}")
            if bits + by > _MOST:
                raise ConfigError(f"split: bin {part} by {by} bits: parts have {_MOST} bits at most")
        for prefix, bits in chosen:
            worker = self.owner.pop((prefix, bits))
            self.owner.update(((prefix << by | low, bits + by), worker) for low in range(1 << by))
        return chosen

    def merge(self, bins: Bins) -> tuple[list[Part], list[tuple[Part, int]]]:
        """Merge all parts of these; returns them, and where their parts have to be before.

        Raises
        ------
        ConfigError
            When that cannot be.
        """
        chosen = self.parse(bins, "merge")
        moves: list[tuple[Part, int]] = []
        for one in chosen:
            parts = self.within(one)
            if one in self.owner or not parts:
                why = "is not split" if one in self.owner else "is not there, or was named as part of another one"
                raise ConfigError(f"merge: bin {one} {why}")
            workers = [self.owner[part] for part in parts]
            has = Counter(workers)
            home = max(sorted(has), key=has.__getitem__)
            moves += [(part, home) for part in parts]
            for part in parts:
                del self.owner[part]
            self.owner[one] = home
        return chosen, moves

    def moves(self, to: Any, moves: Any, workers: int, steps: int = 1) -> list[tuple[Part, int]]:
        """What moves where, in a flow of so many keyed steps: what is said of a bin that is split is said of all its
        parts.

        Raises
        ------
        ConfigError
            When there is no such bin or worker, or a part is named twice.
        """
        if to is not None and moves is not None:
            raise ConfigError("migrate takes to= or moves=, not both")
        if moves is None and to is None:
            parts = sorted(self.owner)
            return list(zip(parts, balanced([self.owner[part] for part in parts], workers), strict=True))
        pairs = moves
        if to is not None:
            pairs = list(enumerate(flat_target(to, steps)))
            if len(pairs) != 1 << self.bits:
                raise ConfigError(f"to= has {len(pairs)} owners; there are {1 << self.bits} bins")
        found: dict[Part, int] = {}
        for named, worker in self.pairs(pairs, workers):
            parts = self.within(named)
            if not parts:
                raise ConfigError(f"bin {named} is not there: what it would be part of is whole")
            for part in parts:
                if part in found:
                    raise ConfigError(f"bin {part} is to move twice")
                found[part] = worker
        return sorted(found.items())

    def pairs(self, moves: Any, workers: int) -> list[tuple[Part, int]]:
        """The bins and parts that a user moves, and where to, whether or not they are there now.

        Raises
        ------
        ConfigError
            When there can be no such bin, or is no such worker.
        """
        found: list[tuple[Part, int]] = []
        try:
            pairs = list(moves.items()) if isinstance(moves, Mapping) else [tuple(move) for move in moves]
        except TypeError:
            raise ConfigError(f"moves={moves!r} must be a dict of bin to worker, or (bin, worker) pairs") from None
        for pair in pairs:
            if len(pair) != 2:
                raise ConfigError(f"a move is (bin, worker), not {pair!r}")
            named, worker = pair
            # One of a list, which names one bin whatever it is.
            (part,) = self.parse([named], "moves")
            to = whole(worker, 0, workers - 1)
            if to is None:
                raise ConfigError(f"there is no worker {worker!r}: there are workers 0 to {workers - 1}")
            found.append((part, to))
        return found

    def rows(self, loads: Sequence[int], part_loads: Mapping[int, int]) -> dict[Part, int]:
        """How many rows have come for each.

        Parameters
        ----------
        loads : sequence of int
            Rows by whole bin, those of its parts among them.
        part_loads : mapping of int to int
            Rows of what was a part when they came, by number: as it is now, finer or coarser.

        Notes
        -----
        Rows of a coarser range count as spread evenly over it. Cost: parts times ranges of the same bin.

        Examples
        --------
        >>> halves = Parts(1, {(0, 1): 0, (2, 2): 0, (3, 2): 1})
        >>> halves.rows([5, 100], {0b110: 60, 0b111: 20})  # 20 came before it was split
        {(0, 1): 5, (2, 2): 70, (3, 2): 30}
        """
        if not part_loads and not self.is_split:
            return {(number, self.bits): rows for number, rows in enumerate(loads)}
        came: dict[int, dict[Part, float]] = {
            number: {(number, self.bits): float(rows)} for number, rows in enumerate(loads)
        }
        for number, rows in part_loads.items():
            bits = number.bit_length() - 1
            prefix = number & ~(1 << bits)
            within = came[prefix >> (bits - self.bits)]
            within[prefix, bits] = float(rows)
            within[prefix >> (bits - self.bits), self.bits] -= rows
        of_bins = {part: came.get(part[0] >> (part[1] - self.bits), {}) for part in self.owner}
        return {part: round(sum(_share(part, *one) for one in ranges.items())) for part, ranges in of_bins.items()}

    def steps(self, moves: Sequence[tuple[Part, int]], cut: Cut) -> list[list[tuple[int, int]]]:
        """Cut moves into steps, by the numbers of their bins."""
        from penstock import _native

        if not moves:
            return []
        length = 1 << (len(moves) - 1).bit_length()
        before = [self.owner[part] if self.owner[part] != to else to + 1 for part, to in moves]
        after = [to for _, to in moves]
        fill = [0] * (length - len(moves))
        planned = _native.migration_steps(before + fill, after + fill, cut.strategy, cut.batch_size)
        return [[(self.number(moves[at][0]), worker) for at, worker in step] for step in planned]


def parse_depth(by: int) -> int:
    """The bits by which parts are longer than what is split.

    Raises
    ------
    ConfigError
        When parts cannot be so.
    """
    depth = whole(by, 1, _MOST)
    if depth is None:
        raise ConfigError(f"split: by={by!r} must be an int from 1 to {_MOST}: a bin becomes 2 ** by parts")
    return depth


def names_parts(moves: Any) -> bool:
    """Whether any of these moves, a mapping or a list, names a bin by its prefix and the bits of that."""
    if not isinstance(moves, Iterable):
        return False  # as who reads them says
    named = moves if isinstance(moves, Mapping) else [pair[0] for pair in moves if isinstance(pair, Sequence) and pair]
    return any(isinstance(one, tuple) for one in named)


def _share(part: Part, of: Part, rows: float) -> float:
    """How many of the rows of a range fall into a part."""
    finer = part[1] - of[1]
    if finer >= 0:
        return rows / (1 << finer) if part[0] >> finer == of[0] else 0.0
    return rows if of[0] >> -finer == part[0] else 0.0
