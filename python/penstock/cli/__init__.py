"""The command line: ``penstock nexmark``, ``penstock wordcount`` and their neighbours.

Owns: the program's entry and its exit codes. Exit code 0: done; 1: the run failed; 2: the command line is wrong;
130: interrupted. An error is one line that names the bad value and what to do; ``--debug`` shows the traceback
instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default those of the process.

    Returns
    -------
    int
        0, 1, 2 or 130.

    Examples
    --------
    >>> main(["nexmark", "--query", "q9", "--input", "x", "--output", "y"])
    2
    """
    try:
        # Imported here, since that takes a second or two, and Ctrl-C is no error then either.
        from penstock.cli._program import run

        return run(arguments)
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return 130
