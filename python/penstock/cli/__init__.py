"""The command line: ``penstock nexmark``, ``penstock wordcount`` and their neighbours.

Owns: the program's entry and its exit codes. Exit code 0: done; 1: the run failed; 2: the command line is wrong;
130: interrupted; 143 and 129: ended by SIGTERM and SIGHUP, which leave as little behind. An error is one line that
names the bad value and what to do; ``--debug`` shows the traceback instead.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

__all__ = ["main"]

#: What ends a program that does not say otherwise; here it is like Ctrl-C.
_ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default those of the process.

    Returns
    -------
    int
        0, 1, 2, 130, or 128 and the number of the signal that ended it.

    Examples
    --------
    >>> main(["nexmark", "--query", "q9", "--input", "x", "--output", "y"])
    2
    """
    with _ended_like_interrupted() as ended:
        try:
            # Imported here, since that takes a second or two, and Ctrl-C is no error then either.
            from penstock.cli._program import run

            return run(arguments)
        except KeyboardInterrupt:
            # CPython ends itself by SIGINT where text that it ran was interrupted last, such as that of a dataclass.
            exec("")
            by = signal.Signals(ended[0]).name if ended else ""
            with contextlib.suppress(OSError):  # of a terminal that is gone
                print(f"penstock: ended by {by}" if ended else "penstock: interrupted", file=sys.stderr)
            return 128 + (ended[0] if ended else signal.SIGINT)


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[list[int]]:
    """Pass what ends a program on to who handles Ctrl-C; yields the signals that came."""
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        # Ctrl-C may be held back just now.
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    # Where a signal is ignored, as under nohup, it stays so.
    ours = [one for one in _ENDS if signal.getsignal(one) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    before = [(one, signal.signal(one, end)) for one in ours]
    try:
        yield came
    finally:
        for one, handler in before:
            signal.signal(one, handler)
