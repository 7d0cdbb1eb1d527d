"""Running a program on workers: threads of this process, or of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from penstock import _cpus
from penstock._durations import Timeout, parse_timeout
from penstock._options import whole
from penstock.dataflow._threads import require_program, run_workers
from penstock.dataflow._worker import Worker
from penstock.errors import ConfigError

__all__ = ["default_workers", "execute"]

R = TypeVar("R")

#: Python threads of one process take turns: more of them than this is asked for, not assumed.
_MOST_WORKERS = 8
#: The most that one can ask for: threads of a process, processes, or joiners.
_MOST = 1024


def execute(
    program: Callable[[Worker], R],
    workers: int | None = None,
    *,
    processes: int = 1,
    join: int = 0,
    start_timeout: Timeout = 60.0,
) -> list[R]:
    """Run a program on every worker and return what each returned.

    After its program a worker's inputs are closed and it steps until all dataflows are finished everywhere; only then
    its result is taken.

    Parameters
    ----------
    program : callable
        Called with a `Worker` on each worker. With several processes it and what it returns must pickle (by
        cloudpickle: lambdas and local functions do).
    workers : int, optional
        Threads per process. Default: in a Spark task the task's CPUs; elsewhere the CPUs that this process may use,
        divided among the processes, at most 8.
    processes : int, default 1
        1: threads of this process. More, up to 1024: that many new Python processes with `workers` threads each,
        connected over loopback sockets that only they can use. They end with this call, however it ends.
    join : int, default 0
        So many workers more may join while the program runs, each when a worker calls `Worker.admit`; and any may
        leave. Every worker then calls `Worker.bootstrap` once its dataflows are built. With several processes those who
        are admitted together are the threads of a new one.
    start_timeout : float, str or datetime.timedelta, default 60
        Seconds until all processes must have started and connected.

    Returns
    -------
    list
        Results in the order of the workers, those that joined last. One that came when all dataflows were finished has
        none.

    Raises
    ------
    ProgramError
        When a program raised, from its exception; when its result cannot leave its process.
    UserFunctionError
        When a function or the logic of an operator raised, from its exception.
    WorkerLost
        When a process died; `process` and `exitcode` tell which and how.
    GraphError
        When workers built different dataflows, or one that cannot run.
    ConfigError
        When an argument is out of range; for a program that is a coroutine function, or returns a coroutine, which
        nobody awaits.

    Notes
    -----
    The first failure stops all workers. Ctrl-C does, too; a worker that sits in foreign code (a long sleep) is given
    up after a few seconds.

    Examples
    --------
    >>> import penstock as pk
    >>> pk.execute(lambda worker: worker.index, workers=3)
    [0, 1, 2]
    >>> pk.execute(lambda worker: (worker.index, worker.peers), workers=1, processes=2)
    [(0, 2), (1, 2)]
    """
    if not callable(program):
        raise ConfigError(f"the program must be a function of a worker, got {type(program).__name__}")
    require_program(program)
    processes = _count("processes", processes)
    seconds = parse_timeout(start_timeout, "start_timeout")
    join = _count("join", join, least=0)
    workers = default_workers(processes) if workers is None else _count("workers", workers)
    if processes > 1:
        from penstock.dataflow._processes import run_processes

        return run_processes(program, workers, processes, seconds, join)
    from penstock._mesh import alone

    with alone(workers, joinable=join > 0) as seats:
        return run_workers(seats, program, join)


def _count(name: str, value: Any, least: int = 1) -> int:
    count = whole(value, least, _MOST)
    if count is None:
        raise ConfigError(f"{name} must be an int from {least} to {_MOST}, got {value!r}")
    return count


def default_workers(processes: int = 1) -> int:
    """How many threads a process gets when nobody says so.

    Examples
    --------
    >>> 1 <= default_workers() <= 8
    True
    """
    if _cpus.task() is not None:
        return _cpus.of_task_or_process()
    return max(1, min(_cpus.of_process() // processes, _MOST_WORKERS))
