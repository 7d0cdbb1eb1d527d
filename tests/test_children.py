"""Processes that are started to help: what happens when one of them hangs where it starts."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from penstock import _children, errors, ordered
from penstock.ordered import _processes as processes
from penstock.ordered import _wire as wire
from penstock.ordered._steps import Step

#: More than a socket holds.
BALLAST = bytes(8 << 20)


def heavy() -> tuple[Step, ...]:
    """Steps whose functions do not fit into a socket."""
    ballast = BALLAST
    return (ordered.map(lambda x: x + len(ballast)),)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that read nothing and do not end by themselves while their parent lives."""
    monkeypatch.setattr(_children, "_BOOT", "import sys, socket, select\nselect.select([], [], [], 600)")
    monkeypatch.setattr(wire, "BODY", 1 << 30)  # functions go through the socket, however large


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START", 0.3)


def within(seconds: float, function: Any) -> BaseException | None:
    """Call a function in a thread that may hang for ever; what it raised."""
    raised: list[BaseException | None] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert raised, f"it has not ended after {seconds} s"
    return raised[0]


def gone(child: _children.Child) -> bool:
    return child.popen.returncode is not None and not Path(f"/proc/{child.popen.pid}").exists()


def test_a_child_that_takes_nothing_is_an_error_in_time(hanging: None) -> None:
    child = _children.Child("nobody", "nothing")
    error = within(60, lambda: child.hand_over(lambda: child.socket.sendall(BALLAST), time.monotonic() + 0.2))
    assert isinstance(error, TimeoutError) and child.popen.poll() is None
    child.end()
    child.socket.close()
    assert gone(child)


def test_a_child_that_is_gone_is_left_to_who_talks_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_children, "_BOOT", "raise SystemExit(5)")
    child = _children.Child("nobody", "nothing")
    child.hand_over(lambda: child.socket.sendall(BALLAST), time.monotonic() + 60)
    assert _children.how_ended(child.end(time.monotonic() + 60)) == "ended with exit code 5"
    assert child.socket.gettimeout() is None
    child.socket.close()


def test_a_child_whose_parent_is_gone_already_ends() -> None:
    code = "from penstock._children import enter\nenter(None, '-1', 'builtins', 'print')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_worker_that_hangs_before_it_takes_its_functions_ends_the_run(hanging: None, impatient: None) -> None:
    results = ordered.Pipeline(heavy()).run(range(10), mode="processes", workers=2)
    error = within(60, lambda: next(results))
    assert isinstance(error, errors.OrderedError), error
    assert "no worker process can be started" in str(error) and "did not take its functions within 0.3 s" in str(error)
    assert within(60, results.close) is None


def test_a_worker_that_hangs_before_it_is_up_ends_the_run(hanging: None, impatient: None) -> None:
    results = pk.ordered_map(abs, range(10), mode="processes", workers=2)
    error = within(60, lambda: next(results))
    assert isinstance(error, errors.OrderedError) and "did not come up within 0.3 s" in str(error)
    assert within(60, results.close) is None


def test_a_worker_that_cannot_be_started_at_all_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    results = pk.ordered_map(abs, range(10), mode="processes", workers=2)
    error = within(60, lambda: next(results))
    assert isinstance(error, errors.OrderedError) and isinstance(error.__cause__, FileNotFoundError)
    assert "no worker process can be started" in str(error) and "no-python" in str(error)
    monkeypatch.setattr(sys, "executable", "")
    refused = within(60, lambda: next(pk.ordered_map(abs, range(10), mode="processes", workers=2)))
    assert isinstance(refused, errors.ConfigError) and "does not know its executable" in str(refused)


@pytest.mark.parametrize("steps", [(ordered.map(abs),), heavy()], ids=["light", "heavy"])
def test_who_waits_for_hanging_workers_is_told(hanging: None, impatient: None, steps: Any) -> None:
    pool = processes.Pool(steps, 2)
    assert isinstance(within(60, pool.wait), errors.OrderedError)
    assert within(60, pool.close) is None and pool.pids() == []


def test_a_pool_is_closed_while_a_worker_hangs_in_its_start(hanging: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START", 600.0)
    handing = threading.Event()
    monkeypatch.setattr(processes.wire, "send", lambda *message: handing.set() or send(*message))
    pool = processes.Pool(heavy(), 2)
    assert handing.wait(60)
    child = pool._starting
    assert within(60, pool.close) is None
    assert child is not None and gone(child)


send = wire.send


# Open files


def script(text: str) -> str:
    """What a script prints that may change the limits of its process."""
    head = "import os, resource, penstock as pk\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(text)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_more_workers_than_files_may_be_open_are_refused() -> None:
    out = script("""
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            list(pk.ordered_map(abs, range(10), workers=80, mode="processes"))
        except pk.errors.ConfigError as error:
            print(error)
        print(list(pk.ordered_map(abs, range(3), workers=80)))
        """)
    refused = (
        r"workers=80: 80 worker processes need 1\d\d open files, and the hard limit of this process is 64; ask for"
    )
    assert re.match(refused, out) and out.endswith("[0, 1, 2]\n"), out


def test_a_soft_limit_on_open_files_is_raised_as_far_as_workers_need() -> None:
    out = script("""
        there = len(os.listdir("/dev/fd"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (there + 2, hard))
        print(list(pk.ordered_map(abs, range(6), workers=3, mode="processes", chunk=1)))
        soft, now = resource.getrlimit(resource.RLIMIT_NOFILE)
        print(there + 2 < soft < there + 64, now == hard)
        """)
    assert out == "[0, 1, 2, 3, 4, 5]\nTrue True\n"


def test_results_that_are_kept_hold_no_file_open_and_let_go_of_their_memory() -> None:
    out = script("""
        import gc, numpy as np
        def mapped():
            return sum("memfd:penstock-ordered" in line for line in open("/proc/self/maps"))
        results = pk.ordered_map(np.ones, [10_000 + n for n in range(100)], workers=1, mode="processes", chunk=1)
        kept = [next(results)]
        there = len(os.listdir("/dev/fd"))
        kept += results
        print(len(os.listdir("/dev/fd")) <= there, len(kept), mapped())
        kept[7][0] = 5  # it is the caller's own
        print(sum(map(len, kept)), sum(array.sum() for array in kept))
        del results, kept
        gc.collect()
        print(mapped())
        """)
    assert out == "True 100 100\n1004950 1004954.0\n0\n"


def test_more_results_may_be_kept_than_a_process_has_mappings() -> None:
    out = script("""
        import gc, numpy as np
        from penstock.ordered import _wire
        _wire._MOST_MAPPED = 20
        def mapped():
            return sum("memfd:penstock-ordered" in line for line in open("/proc/self/maps"))
        kept = list(pk.ordered_map(np.ones, [10_000 + n for n in range(50)], workers=1, mode="processes", chunk=1))
        print(len(kept), mapped())
        for array in kept:
            array[0] = 5
        print(sum(map(len, kept)), sum(array.sum() for array in kept))
        del kept, array
        gc.collect()
        print(mapped(), len(_wire._held))
        """)
    assert out == "50 20\n501225 501425.0\n0 0\n"


@pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="so many files may not be open here"
)
def test_processes_serve_who_has_very_many_files_open() -> None:
    out = script("""
        import pyarrow as pa
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        print(list(pk.ordered_map(abs, range(3), workers=1, mode="processes")))
        flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
        print(flow.collect(pa.table({"k": [1, 1]}), processes=1).to_pylist())
        """)
    assert out == "[0, 1, 2]\n[{'k': 1, 'n': 2}]\n"


# Children that end while a process of theirs holds their socket


@pytest.mark.parametrize("told", [True, False], ids=["told", "looked"])
def test_a_watch_hangs_up_on_who_has_ended_and_what_came_before_is_read(
    told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not told:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    code = """
        import os, socket, sys, time
        sock = socket.socket(fileno=int(sys.argv[1]))
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
        open({path!r}, "w").write(str(forked))
        sock.sendall(b"the last words")
        os._exit(7)
        """
    path = tmp_path / "forked"
    monkeypatch.setattr(_children, "_BOOT", textwrap.dedent(code).format(path=str(path)))
    watch = _children.Watch("watch")
    child = _children.Child("nobody", "nothing")
    try:
        watch.add(child)
        child.socket.settimeout(30)
        words = b""
        while part := child.socket.recv(5):
            words += part
        assert words == b"the last words"
        assert child.end() == 7
    finally:
        watch.remove(child)
        watch.close()
        watch.close()
        child.end()
        child.socket.close()
        with contextlib.suppress(OSError):
            os.kill(int(path.read_text()), signal.SIGKILL)
    assert not watch._thread.is_alive() and not watch._children


def sockets_that_are_handed_on(_: int) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def test_what_a_child_starts_does_not_have_its_socket() -> None:
    assert list(pk.ordered_map(sockets_that_are_handed_on, [1], mode="processes", workers=1)) == [[]]


# What the interpreter was told


@pytest.mark.parametrize(
    "told",
    [["-O"], ["-OO", "-B", "-X", "utf8", "-W", "error::FutureWarning"], ["-I"], ["-E", "-s", "-S", "-P"]],
    ids="".join,
)
def test_a_child_has_what_its_parent_was_told(told: list[str], tmp_path: Path) -> None:
    """Its functions, too: those of a module are compiled over there."""
    (tmp_path / "asserting.py").write_text(
        "import sys\n"
        "def look(x):\n"
        "    assert x is None\n"
        "def told(x):\n"
        "    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if name.islower() and name[0] != '_'}\n"
        "    del flags['count'], flags['index']\n"
        "    return flags, sys._xoptions, [w for w in sys.warnoptions if w == 'error::FutureWarning']\n"
    )
    code = f"""
import sys
sys.path[:] = {[str(tmp_path), *sys.path]!r}
import penstock as pk, asserting
there = [next(pk.ordered_map(asserting.told, [1], mode=mode, workers=1)) for mode in ("inline", "processes")]
print(there[0] == there[1] or there)
try:
    print(next(pk.ordered_map(asserting.look, [1], mode="processes", workers=1)))
except AssertionError:
    print("asserted")
"""
    done = subprocess.run([sys.executable, *told, "-c", code], capture_output=True, text=True, timeout=100)
    looked = "None" if told[0].startswith("-O") else "asserted"
    assert done.stdout == f"True\n{looked}\n", done.stdout + done.stderr[-2000:]
