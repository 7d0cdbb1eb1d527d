"""The inner loop of `stateful_map`: what happens per row, and nothing else.

Owns one function per number of columns, written out so that a row costs no more than in a loop by hand: look up the
state, call the user's function with plain arguments, put the state back, append what it puts out. Bins come as runs of
rows, so the cost of changing bins is shared by a run. What an undo needs is in a second variant, used only where a bin
keeps a journal; so is taking as they are values that can change (`owned`).

A row that does not fit is told with the one that it came from. Mostly each call puts out one row, and only where that
changes the loop marks which call it is: by what the iterator of the rows has left, so that rows are not counted.

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

__all__ = ["MOST_ROWS", "NOTHING", "RETURNS", "SLOW_S", "BrokenOff", "behind", "is_of_copy", "misreturned", "row_loop"]

#: What a step returns.
RETURNS: Final = "(state, out)"
#: About one that returns nothing.
NOTHING: Final = (
    "the function returned None; it must return (state, out): None as the state forgets the key, None as out is no row"
)
_CODE: Final = "<penstock row loop>"

#: A chunk that took longer makes the next one a single row, seconds.
SLOW_S: Final = 0.02
MOST_ROWS: Final = 1 << 14

_SOURCE = """
def loop(step, bins, counts, rows, out, failed, stopped, pace, own, marks, left_of):
    append, extend, take, each = out.append, out.extend, own.one, own.each
    start, call = marks.starts.append, marks.calls.append
    total, uneven = left_of(), False
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
                        if uneven:
                            uneven = False
                            start(len(out))
                            call(total - left_of() - 1)
                        append({row})
                    elif made is None:
                        uneven = True
                    elif type(made) is list:
                        if uneven or len(made) != 1:
                            uneven = True
                            start(len(out))
                            call(left_of() - total)
                        extend({rows})
                    else:
                        start(len(out))
                        call(left_of() - total)
                        uneven = True
                        append({other})
            except BaseException as error:
                bin.taint()
                raised = failed(error, {key}, ({arguments}))
                raise raised from behind(raised, error)
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

#: What is appended: as it is, or of its own.
_TAKEN: Final = {"row": "made", "rows": "made", "other": "as_row(made)"}
_OWNED: Final = {"row": "take(made)", "rows": "each(made)", "other": "take(as_row(made))"}

_PLAIN = "state, made = step(get({key}), {arguments})"

_JOURNALED = """old = get({key})
                    if journal is not None and {key} not in journal:
                        journal[{key}] = MISSING if old is None else old if type(old) in ATOMIC else copy_state(old)
                    state, made = step(old, {arguments})"""


class BrokenOff(BaseException):
    """A call was given up because the host is stopping; the user's function did nothing wrong."""


def behind(made: BaseException, error: BaseException) -> BaseException | None:
    """The cause of an exception that is made of `error`, or is that one: then it keeps its own."""
    return error.__cause__ if made is error else error


@functools.cache
def row_loop(
    columns: int, key: int | None, journal: bool, sides: bool = False, owned: bool = False
) -> Callable[..., None]:
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
    owned
        Whether what it puts out has values that can change later.

    Returns
    -------
    callable
        ``loop(step, bins, counts, rows, out, failed, stopped, pace, own, marks, left_of)``: `rows` yields a tuple per
        row, or the key alone when that is all there is; `pace` is a list with the rows of a chunk, kept from call to
        call; `own` is the `Owner`, `marks` the `Marks` of `out`; `left_of` tells how many rows are left.
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
        **(_OWNED if owned else _TAKEN),
    )
    scope: dict[str, Any] = {
        # By which its frames are known for no user's.
        "__name__": __name__,
        "ATOMIC": ATOMIC,
        "BrokenOff": BrokenOff,
        "MISSING": MISSING,
        "MOST": MOST_ROWS,
        "SLOW": SLOW_S,
        "behind": behind,
        "as_row": _as_row_or_side if sides else _as_row,
        "clock": time.perf_counter,
        "copy_state": copy_state,
        "islice": itertools.islice,
    }
    # Not this file's name: tracebacks would show lines of it.
    exec(compile(source, _CODE, "exec"), scope)
    loop: Callable[..., None] = scope["loop"]
    return loop


def misreturned(error: BaseException) -> str | None:
    """What is wrong with what the step returned, where an exception of a loop says so; None for one that it raised.

    One that the step raised has frames below that of the loop. The loop looks at no value for it: which one it was is
    known by the text alone.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or frames[-1][0].f_code.co_filename != _CODE:
        return None
    text = str(error)
    if type(error) is ValueError and text.startswith("too many values to unpack"):
        return (
            f"the function returned more than {RETURNS}: return these two; for a third, what is called later, give"
            " on_timer=, and the flow an event_time="
        )
    if type(error) is not TypeError or not text.startswith("cannot unpack non-iterable "):
        return None
    kind = text.removeprefix("cannot unpack non-iterable ").removesuffix(" object")
    if kind == "NoneType":
        return NOTHING
    if kind == "coroutine":
        return "the function returned a coroutine, which nobody awaits: run it inside, as by asyncio.run"
    return f"the function returned a value of type {kind}; it must return {RETURNS}"


def is_of_copy(error: BaseException) -> bool:
    """Whether an exception of a loop came of the copy of a state, not of the step: known by the frame below the loop's,
    so that no row costs more."""
    codes = [frame.f_code for frame, _ in itertools.islice(traceback.walk_tb(error.__traceback__), 2)]
    return len(codes) == 2 and codes[0].co_filename == _CODE and codes[1] is copy_state.__code__


def _as_row(made: Any) -> tuple[Any, ...]:
    """What a step put out that is neither None nor exactly a tuple or a list."""
    if isinstance(made, tuple):
        return tuple(made)
    raise TypeError(f"the step put out {short(made)}; it must be None, a tuple (one row) or a list of tuples")


def _as_row_or_side(made: Any) -> Any:
    return made if type(made) is Side else _as_row(made)
