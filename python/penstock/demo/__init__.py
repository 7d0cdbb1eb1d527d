"""The demonstration: streaming queries that move their keyed state, lose a worker, grow and shrink while they run.

Bids of the NEXMark auction site are generated at a steady rate into Parquet files. Two Spark Structured
Streaming queries read them through `foreachBatch` into an `Engine` of two resident worker processes: *hot
items* (the auctions with most bids per sliding window) and *bidders* (what each of a million has bid). While they
run, half of the keyed state of both moves to the other worker and back, all-at-once and then batched; a worker is
killed with SIGKILL, and both queries go on from their durable state by themselves; and the engine goes from two
workers to three and back.

At the end the output is compared with an independent computation over the same files: no row may be missing,
wrong or repeated. The run leaves ``report.html``, ``timeline.png`` and ``timeline.json``, and nothing else:
all other files lie in one temporary folder that is removed, and every process that was started has ended.

The work runs in a thread of its own and looks at one event whenever it waits; an interrupt (Ctrl-C, SIGTERM)
only sets that event. So every interrupt, at whatever moment, takes the one orderly way out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from rich.console import Console

from penstock._live import LiveView
from penstock.demo.job import DemoConfig, Interrupted, Job, Outcome

__all__ = ["DemoConfig", "Interrupted", "Outcome", "main", "run"]


def main(config: DemoConfig, *, plain: bool = False) -> int:
    """Run the demonstration, show it, and say how it ended.

    Returns
    -------
    int
        Exit status: 0 when the output is right, 1 when it is not, 130 after an interrupt that comes before the report
        is written. A run that fails raises.
    """
    console = Console(force_terminal=False if plain else None)
    stop = threading.Event()
    interrupts = _catch_interrupts(stop, console)
    try:
        outcome = run(config, console=console, stop=stop)
    except Interrupted:
        console.print("stopped: nothing is left running, no report was written")
        return 130
    finally:
        interrupts.close()
    for check in outcome.checks:
        state, style = ("holds", "green") if check.passed else ("FAILS", "bold red")
        console.print(
            f"{check.what}: {state}. {check.detail}", style=style, markup=False, highlight=False, soft_wrap=True
        )
    for path in outcome.files:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if outcome.no_picture is not None:
        console.print(f"no picture: {outcome.no_picture}", markup=False, highlight=False, soft_wrap=True)
    return 0 if outcome.passed else 1


def run(config: DemoConfig, *, console: Console | None = None, stop: threading.Event | None = None) -> Outcome:
    """Run the demonstration and return its outcome; shows it on ``console`` where one is given.

    Raises
    ------
    Interrupted
        When ``stop`` was set before the end. Everything has been ended and removed.
    """
    job = Job(config, stop or threading.Event())
    work = threading.Thread(target=job.run, name="penstock-demo")
    work.start()
    with LiveView(job.snapshot, console) if console is not None else contextlib.nullcontext():
        while work.is_alive():
            if job.stop.is_set():
                job.interrupt()
            work.join(0.1)
    if job.error is not None:
        raise job.error
    assert job.outcome is not None, "the job ends with an outcome or an error"
    return job.outcome


def _catch_interrupts(stop: threading.Event, console: Console) -> contextlib.ExitStack:
    """Turn SIGINT and SIGTERM into the event until the returned stack is closed."""
    restore = contextlib.ExitStack()
    if threading.current_thread() is not threading.main_thread():
        return restore

    def interrupted(number: int, frame: object) -> None:
        is_first = not stop.is_set()
        stop.set()
        if is_first and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone, and that may be why
                os.write(sys.stderr.fileno(), b"\nstopping: ending the queries, the workers and Spark ...\n")

    # Of the command's SIGTERM its own handler hears, which tells ours of SIGINT.
    others = [signal.SIGTERM] if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else []
    for number in (signal.SIGINT, *others):
        restore.callback(signal.signal, number, signal.signal(number, interrupted))
    return restore
