"""The inner loop of `stateful_map`: what happens per row, and nothing else.

Owns one function per number of columns, written out so that a row costs no more than in a loop by hand: look up the
state, call the user's function with plain arguments, put the state back, append what it puts out. Bins come as runs of
rows, so the cost of changing bins is shared by a run. What an undo needs is in a second variant, used only where a bin
keeps a journal.

What the rows of a bin take is added up there (`BinState.spent_s`): the clock is read between chunks anyhow, so a bin
costs an addition a block.

Between chunks of rows the loop asks whether the host is stopping. A chunk lasts about as long as a person does not
notice: it doubles while rows are fast and is a single row while they are slow.
"""

from __future__ import annotations

import functools
import itertools
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from penstock._functions.short import short
from penstock._functions.state import ATOMIC, MISSING, copy_state
from penstock._sides import Side

__all__ = ["RETURNS", "BrokenOff", "returned_more", "row_loop"]

#: What a step returns.
RETURNS: Final = "(state, out)"
_CODE: Final = "<penstock row loop>"

#: A chunk that took longer makes the next one a single row, seconds.
_SLOW_S: Final = 0.02
_MOST_ROWS: Final = 1 << 14

_SOURCE = """
def loop(step, bins, counts, rows, out, failed, stopped, pace):
    append, extend = out.append, out.extend
    {key} = None
    {values}
    chunk, then = pace[0], clock()
    for bin, left in zip(bins, counts):
        began, states = then, bin.open()
        get, forget, journal = states.get, states.pop, bin.journal
        while left > 0:
            try:
                for {target} in islice(rows, chunk if chunk < left else left):
                    {before}
                    if state is None:
                        forget({key}, None)
                    else:
                        states[{key}] = state
                    if type(made) is tuple:
                        append(made)
                    elif made is not None:
                        if type(made) is list:
                            extend(made)
                        else:
                            append(as_row(made))
            except BaseException as error:
                bin.taint()
                raise failed(error, {key}, ({arguments})) from (error if isinstance(error, Exception) else None)
            left -= chunk
            now = clock()
            if now - then > SLOW:
                chunk = 1
            elif chunk < MOST:
                chunk += chunk
            then = now
            if stopped():
                raise BrokenOff
        bin.spent_s += then - began
    pace[0] = chunk
"""

_PLAIN = "state, made = step(get({key}), {arguments})"

_JOURNALED = """old = get({key})
                    if journal is not None and {key} not in journal:
                        journal[{key}] = MISSING if old is None else old if type(old) in ATOMIC else copy_state(old)
                    state, made = step(old, {arguments})"""


class BrokenOff(BaseException):
    """A call was given up because the host is stopping; the user's function did nothing wrong."""


@functools.cache
def row_loop(columns: int, key: int | None, journal: bool, sides: bool = False) -> Callable[..., None]:
    """The loop for a step of some number of columns.

    Parameters
    ----------
    columns
        How many values the step takes.
    key
        Which of them is the key; None when the key comes apart from them, in front.
    journal
        Whether a bin may keep a journal.
    sides
        Whether the step may put out rows of side outputs.

    Returns
    -------
    callable
        ``loop(step, bins, counts, rows, out, failed, stopped, pace)``: `rows` yields a tuple per row, or the key alone
        when that is all there is; `pace` is a list with the rows of a chunk, kept from call to call.
    """
    names = [f"v{place}" for place in range(columns)]
    key_name = "key" if key is None else names[key]
    target = names if key is not None else ["key", *names]
    arguments = "".join(f"{name}, " for name in names)
    words = {"key": key_name, "arguments": arguments}
    source = _SOURCE.format(
        target=", ".join(target),
        values="; ".join(f"{name} = None" for name in names) or "pass",
        before=(_JOURNALED if journal else _PLAIN).format(**words),
        **words,
    )
    scope: dict[str, Any] = {
        # By which its frames are known for no user's.
        "__name__": __name__,
        "ATOMIC": ATOMIC,
        "BrokenOff": BrokenOff,
        "MISSING": MISSING,
        "MOST": _MOST_ROWS,
        "SLOW": _SLOW_S,
        "as_row": _as_row_or_side if sides else _as_row,
        "clock": time.perf_counter,
        "copy_state": copy_state,
        "islice": itertools.islice,
    }
    # Not this file's name: tracebacks would show lines of it.
    exec(compile(source, _CODE, "exec"), scope)
    loop: Callable[..., None] = scope["loop"]
    return loop


def returned_more(error: BaseException) -> bool:
    """Whether an exception of a loop says that the step returned more than two values.

    One that the step raised has frames below that of the loop. The loop looks at no value for it: which one it was is
    not known any more.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = bool(frames) and frames[-1][0].f_code.co_filename == _CODE
    return ours and type(error) is ValueError and str(error).startswith("too many values to unpack")


def _as_row(made: Any) -> tuple[Any, ...]:
    """What a step put out that is neither None nor exactly a tuple or a list."""
    if isinstance(made, tuple):
        return tuple(made)
    raise TypeError(f"the step put out {short(made)}; it must be None, a tuple (one row) or a list of tuples")


def _as_row_or_side(made: Any) -> Any:
    return made if type(made) is Side else _as_row(made)
