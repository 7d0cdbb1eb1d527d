"""The limit on open files of processes that hold many connections.

Owns: what the driver and residents need. The usual soft limit of 1,024 is that of a process that waits with ``select``;
200 workers exhaust the driver's, and a process that has reached it can tell nobody: it accepts no connection.
"""

from __future__ import annotations

import os
import resource

from penstock._children import allow_descriptors
from penstock.errors import ConfigError

__all__ = ["allow_files", "require_files"]

#: Open files of the driver for each worker: its connection, which three threads use, and that of the thread of its job
#: to the JVM. And for what else an engine opens.
_FILES, _SPARE = 4, 32
#: As many workers as the limit is raised for: nobody asks again when some come later.
_MOST_WORKERS = 4_096


def allow_files() -> None:
    """Raise the limit on open files of this process for all workers that there may be, as far as it goes.

    A resident needs it as the driver does: it has three for each worker beside it, in each query.
    """
    allow_descriptors(_MOST_WORKERS)


def require_files(workers: int, there: int = 0) -> None:
    """Raise the limit on open files of the driver, or refuse workers for which there are too few.

    Parameters
    ----------
    workers : int
        How many there are to be.
    there : int, default 0
        How many of them are there, with their connections.

    Raises
    ------
    ConfigError
        When the hard limit leaves no room for their connections.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    others = len(os.listdir("/dev/fd")) + _SPARE - _FILES * there
    wanted = others + _FILES * workers
    if hard != resource.RLIM_INFINITY and hard < wanted:
        most = (hard - others) // _FILES
        fewer = f"ask for {most} at most, or " if most > 0 else ""
        raise ConfigError(
            f"workers={workers}: their connections need {wanted} open files in the driver, and the hard limit of this"
            f" process is {hard}; {fewer}raise the limit (ulimit -Hn, or LimitNOFILE= of a service)"
        )
    allow_files()
