"""Runs benches: one in this process, or all of them, each in a process of its own.

Owns: pinning, what is added to every result (commit, time, CPUs), and the order and resumption of a run of all.
Invariant: whatever ends a run, no process that it started stays behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from penstock import _native
from penstock._extras import how_to_install
from penstock.cli.common import interrupt_later
from penstock.errors import ConfigError, EngineError
from penstock_bench import core, machine, record
from penstock_bench.catalogue import BENCHES, Bench
from penstock_bench.measure import Emit, Line, Options, Tell

__all__ = ["run", "run_all"]

#: What a result has, in the order in which people read it, beside the conditions.
_KEYS = ("name", "case", "unit", "ours", "peer", "ratio", "ours_range", "peer_range")
#: Seconds after which a bench of a run of all is given up, and how many more for each second of a budget that is asked
#: for: some hold theirs for a part of what they do.
LIMIT_S, LIMIT_PER_S = 900.0, 3.0
#: Seconds that it has to end what it has started, when it is interrupted.
ENDING_S = 40.0


def run(bench: Bench, options: Options, emit: Emit, tell: Tell) -> None:
    """Run one bench; each result goes to `emit` as soon as it is there.

    Parameters
    ----------
    bench : Bench
        Which.
    options : Options
        How long.
    emit : callable
        Takes results.
    tell : callable
        Takes lines on how it goes.

    Raises
    ------
    ConfigError
        When it cannot run here: no cargo, no Spark.
    EngineError
        When it fails.
    """
    if bench.kind == "spark" and importlib.util.find_spec("pyspark") is None:
        raise ConfigError(f"{bench.name} needs Spark: {how_to_install('spark')}")
    with machine.pinned(options.cores) as cpus:
        about = _about() | {"pinned": cpus}
        if bench.kind != "core" and about["commit"] is not None and not _module_is_of_this_code():
            tell("the native module was built from other code than that of this checkout: make release, then again")
            about["commit"] += record.OTHER_MODULE

        def with_more(line: Line) -> None:
            conditions = line["conditions"] | about | {"budget_s": options.seconds, "at": _now()}
            conditions |= {"full": True} if options.full else {}
            emit({key: line[key] for key in _KEYS} | {"conditions": conditions})

        if bench.kind == "core":
            core.run(bench.name, options, with_more, tell)
        else:
            if (profile := _native.profile()) != "release":
                tell(f"the native module is a build of profile {profile}; figures to keep: make release, then again")
            importlib.import_module(bench.module).run(options, with_more, tell)


def run_all(folder: Path, options: Options, again: bool, emit: Emit, tell: Tell, *, fewer: bool = False) -> list[str]:
    """Run every bench and record it; what an earlier run has recorded of this commit, build and budget is kept.

    Of a commit with changes nothing is: they may be others by now. Where no budget is given each bench has the one that
    its record was made with.

    Parameters
    ----------
    folder : Path
        Where the results are; see `record`.
    options : Options
        How long.
    again : bool
        Measure what is recorded already, too.
    emit, tell : callable
        As for `run`; `emit` gets kept results too.
    fewer : bool, default False
        Record runs in which recorded cases are missing, too.

    Returns
    -------
    list of str
        Names of the benches that failed; why was told.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError(f"a run of all benches needs Spark: {how_to_install('spark')}")
    with _interrupted_by_all():
        return _run_all(folder, options, again, emit, tell, fewer)


def _run_all(folder: Path, asked: Options, again: bool, emit: Emit, tell: Tell, fewer: bool) -> list[str]:
    core.program(tell)
    commit = _about()["commit"]
    failed = []
    for number, bench in enumerate(BENCHES, 1):
        kept = record.read(folder, bench.name)
        options = _as_recorded(asked, kept)
        title = f"{number}/{len(BENCHES)} {bench.name}"
        if not again and kept and all(_same(line, commit, options) for line in kept):
            tell(f"{title}: recorded already")
        else:
            tell(title)
            try:
                kept = _in_child(bench, options)
                record.write(folder, bench.name, kept, fewer=fewer)
            except (ConfigError, EngineError) as error:
                tell(str(error))
                failed.append(bench.name)
                continue
        for line in kept:
            emit(line)
    return failed


def _as_recorded(options: Options, lines: list[Line]) -> Options:
    """With the larger cases and the greatest budget of the recorded lines, where none was asked for: a shorter run does
    not replace them. Where some had the usual budget of their bench, which may be more, that stays."""
    conditions = [line["conditions"] for line in lines if not line["conditions"].get("quick")]
    if options.quick or not conditions:
        return options
    options = dataclasses.replace(options, full=any(one.get("full") for one in conditions))
    budgets = [one.get("budget_s") for one in conditions]
    if options.seconds is not None or None in budgets:
        return options
    return dataclasses.replace(options, seconds=max(budgets))


def _in_child(bench: Bench, options: Options) -> list[Line]:
    command = [sys.executable, "-m", "penstock.cli", "bench", bench.name, "--json"]
    if options.quick:
        command.append("--quick")
    if options.full:
        command.append("--full")
    if options.seconds is not None:
        command += ["--seconds", repr(options.seconds)]
    limit = LIMIT_S + LIMIT_PER_S * (options.seconds or 0.0)
    child = None
    try:
        # In a session of its own, so that Ctrl-C comes through us, and once.
        with interrupt_later():  # or it would be started and known to nobody
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        out, _ = child.communicate(timeout=limit)
    except BaseException as error:
        if child is not None:
            _end(child)
        if isinstance(error, subprocess.TimeoutExpired):
            raise EngineError(f"{bench.name} did not end within {limit:g} s and is not recorded") from None
        raise
    if child.returncode != 0:
        raise EngineError(f"{bench.name} failed with exit status {child.returncode} and is not recorded")
    return [json.loads(text) for text in out.splitlines()]


def _end(child: subprocess.Popen[str]) -> None:
    """Interrupt a bench and give it time to end what it has started; then, or at the next interrupt, end them all."""
    child.send_signal(signal.SIGINT)
    try:
        child.communicate(timeout=ENDING_S)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


@contextlib.contextmanager
def _interrupted_by_all() -> Iterator[None]:
    """Let what asks this process to end do what Ctrl-C does: the children are in sessions of their own.

    A handler that is there stays: the command's does the same, and tells which signal it was.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        # As Ctrl-C, also where it is held back; where nobody hears that, as in the background of a shell, at once.
        if callable(handler := signal.getsignal(signal.SIGINT)):
            handler(number, frame)
        else:
            raise KeyboardInterrupt

    with contextlib.ExitStack() as restore:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                restore.callback(signal.signal, number, signal.signal(number, interrupt))
        yield


def _same(line: Line, commit: str | None, options: Options) -> bool:
    """Whether a recorded line is what a run would measure now: same code, built the same way, for the same time."""
    if commit is None or commit.endswith(record.CHANGED):
        return False  # one of another module is never that of now
    conditions = line["conditions"]
    # Lines of the core's program, which Spark's benches may have too, name its compiler.
    profile = core.profile() if "rustc" in conditions.get("versions", {}) else _native.profile()
    now = {"commit": commit, "profile": profile, "quick": options.quick, "budget_s": options.seconds}
    return all(conditions.get(name) == value for name, value in now.items()) and options.full == ("full" in conditions)


def _about() -> dict[str, Any]:
    """The commit that is measured; None where git does not tell."""
    git = ["git", "-C", str(core.CHECKOUT)]
    told = subprocess.run(
        [*git, "describe", "--always", "--abbrev=12", "--exclude=*"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benches/results"],
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode != 0 or changed.returncode != 0:
        return {"commit": None}
    return {"commit": told.stdout.strip() + (record.CHANGED if changed.stdout.strip() else "")}


def _module_is_of_this_code() -> bool:
    """Whether the set-up of this checkout has built the native module from the sources that are there now."""
    setup = runpy.run_path(str(core.CHECKOUT / "scripts" / "setup.py"), run_name="setup")
    stamp = setup["STAMPS"] / "native"
    try:
        sources = setup["digest"](setup["native_sources"](), salt=setup["find_rust"]())
    except SystemExit:  # there is no compiler to have built it
        return False
    return bool(stamp.is_file() and stamp.read_text() == f"{_native.profile()} {sources}")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
