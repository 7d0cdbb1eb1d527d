"""Interrupts at chosen instructions of the package, and in storms."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import penstock as pk
from penstock.errors import Interrupted

PACKAGE = str(Path(pk.__file__).parent)
#: One instruction of so many is tried at most; with ``--long`` (see conftest.py) each.
THINNED = 3


class Interrupts:
    """Raises KeyboardInterrupt before instruction number `at` of the package, and then after about `every` again."""

    def __init__(self, at: int, every: int = 0) -> None:
        self.left, self.every = at, every
        self.fired = 0
        self.chance = random.Random(at)
        self.places: list[str] = []

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        gc.disable()  # what it would end here has nothing to do with it
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            gc.enable()

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            if self.left == 0:
                # Not evenly: what takes more than a fixed number of steps would never be done.
                self.left = self.chance.randrange(2 * self.every) if self.every else -1
                self.fired += 1
                self.places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
                raise KeyboardInterrupt
            self.left -= 1
        return self._step


#: In place of the results that cannot be had any more.
TORN = "torn"


def taken(results: Iterable[Any], interrupts: Interrupts) -> list[Any]:
    """All results by somebody who goes on after interrupts; errors by text; `TORN` for `Interrupted`, said twice."""
    it = iter(results)
    got: list[Any] = []
    while True:
        try:
            with interrupts.armed():
                item = next(it)
        except StopIteration:
            return got
        except KeyboardInterrupt:
            continue
        except Interrupted:
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    next(it)
                except Interrupted:
                    return [*got, TORN]
            raise AssertionError(f"it went on after Interrupted: {interrupts.places}") from None
        except Exception as error:
            got.append(str(error))
        else:
            got.append(item)


def at_every_instruction(
    run: Callable[[], Any], expected: list[Any], torn: bool = False, stride: int = 1, show: Any = lambda item: item
) -> set[int]:
    """Run once for each instruction, with an interrupt before it; how many results there were before something tore.

    `stride` leaves some out where there are many, `THINNED` where there are few; with ``--long`` nothing is left out.
    """
    at, tore, stride = 0, set(), 1 if THINNED == 1 else max(stride, THINNED)
    while True:
        interrupts = Interrupts(at)
        results = run()
        got = [item if item is TORN else show(item) for item in taken(results, interrupts)]
        close = getattr(results, "close", None)
        if close is not None:
            close()
        if got and got[-1] is TORN:
            assert torn and got[:-1] == expected[: len(got) - 1], (at, interrupts.places, got)
            tore.add(len(got) - 1)
        else:
            assert got == expected, (at, interrupts.places, got)
        if not interrupts.fired:
            return tore
        at += stride


#: For the start of a script: `storm` strikes for a second, `calm` waits for the end of it. Only what `collected` takes
#: is struck: a loop around a ``try`` is outside of it for some instructions, in which it could not go on.
STORM = """
import os, signal, sys, threading, time
import penstock as pk
over, armed = threading.Event(), []
def strike():
    for _ in range(400):
        time.sleep(0.0025)
        os.kill(os.getpid(), signal.SIGINT)
    over.set()
def struck(number, frame):
    if armed:
        armed.clear()
        raise KeyboardInterrupt
def storm():
    signal.signal(signal.SIGINT, struck)
    threading.Thread(target=strike, daemon=True).start()
def calm():
    over.wait()
def collected(it, most):
    # A native iterator fills a list in a native call: no item is lost in this function.
    box = []
    while len(box) < most:
        before = len(box)
        try:
            armed.append(True)
            box.extend(it)
            armed.clear()
            if len(box) == before:
                break
        except KeyboardInterrupt:
            pass
    return box
"""
