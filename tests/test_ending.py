"""The end of the interpreter while daemon threads use what is native: it ends, and nothing aborts the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent

import pytest

import penstock as pk

#: What a daemon thread does while the main thread ends.
CONSUMERS = {
    "a silent source": """
        def live():
            yield 1
            yield from iter(queue.Queue().get, None)
        def consume():
            for _ in pk.ordered_map(abs, live()):
                began.set()
        """,
    "functions in threads": """
        def consume():
            for _ in pk.ordered_map(lambda x: sum(range(500)), itertools.count(), mode="threads", workers=2):
                began.set()
        """,
    "a flow without functions": """
        def consume():
            block = pa.table({"n": range(1000)})
            flow = pk.Flow("n bigint").key_by("n").agg(c=pk.count())
            for _ in flow.run(itertools.repeat(block), streaming=True, workers=2):
                began.set()
        """,
    "a flow with a function": """
        def consume():
            block = pa.table({"n": range(1000)})
            flow = pk.Flow("n bigint").map_batches(lambda b: (sum(range(20_000)), b)[1]).key_by("n").agg(c=pk.count())
            for _ in flow.run(itertools.repeat(block), streaming=True, workers=2):
                began.set()
        """,
    "a dataflow": """
        def program(worker):
            with worker.dataflow("d") as scope:
                ones, stream = scope.input()
                stream.map(lambda x: (began.set(), sum(range(500)))[1]).exchange(lambda x: x).collect([])
            for time in itertools.count(1):
                ones.send([1] * 10)
                ones.advance_to(time)
                worker.step()
        def consume():
            pk.execute(program, workers=3)
        """,
}


@pytest.mark.parametrize("which", CONSUMERS)
def test_a_daemon_thread_that_consumes_does_not_abort_the_process(which: str) -> None:
    head = """
        import itertools, queue, threading
        import penstock as pk, pyarrow as pa
        began = threading.Event()
        """
    tail = """
        threading.Thread(target=consume, daemon=True).start()
        assert began.wait(60)
        print("the end")
        """
    text = "".join(dedent(part) for part in (head, CONSUMERS[which], tail))
    # Where the interpreter stands then is chance.
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr[-2000:]
        assert "Fatal Python error" not in done.stderr and "panicked" not in done.stderr


@pytest.mark.parametrize("run", ["flow.run(itertools.repeat(block), streaming=True, workers=2)", "ordered()"])
def test_what_is_registered_for_the_end_may_still_close_a_run(run: str) -> None:
    """It runs last where it was registered before the package came."""
    text = f"""
        import atexit
        held = []
        atexit.register(lambda: [one.close() for one in held] and print("closed"))
        import itertools
        import penstock as pk, pyarrow as pa
        block = pa.table({{"n": range(10)}})
        flow = pk.Flow("n bigint").map_batches(lambda b: b)
        def ordered():
            return pk.ordered_map(abs, itertools.count(), mode="threads", workers=2)
        held.append({run})
        next(iter(held[0]))
        """
    done = subprocess.run([sys.executable, "-c", dedent(text)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr[-2000:]


@pytest.mark.parametrize("earlier", ["", "weakref.finalize(Engine, print, 'ended')"])
def test_an_engine_that_is_open_at_the_end_is_closed(earlier: str) -> None:
    """Also where no finalizer was made before it: those of all objects run when the first one asked for that."""
    path = Path(pk.__file__).parent / "spark" / "_engine" / "handles.py"
    text = f"""
        import os, runpy, weakref
        # Alone: what else a package imports may have made finalizers.
        handles = runpy.run_path({str(path)!r})
        class Engine:
            def close(self):
                handles["remove"](self)
                print("closed")
        {earlier}
        handles["add"](Engine())
        gone = Engine()
        handles["add"](gone)
        handles["remove"](gone)
        del gone
        print("the end")
        """
    done = subprocess.run([sys.executable, "-c", dedent(text)], capture_output=True, text=True, timeout=100)
    said = ["the end", "closed", *(["ended"] if earlier else [])]
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr[-2000:]


@pytest.mark.parametrize("run", ["flow.run(block)", "pk.ordered_map(slow, [1], mode='threads', workers=2)"])
def test_who_ends_waits_some_seconds_for_a_function_that_goes_on(run: str) -> None:
    """The rest of what it took; the run was held until then, or dropped by the interpreter."""
    text = f"""
        import threading
        import penstock as pk, pyarrow as pa
        began, held = threading.Event(), threading.Event()
        def slow(batch):
            began.set()
            held.wait(80)
            return batch
        block = pa.table({{"n": range(10)}})
        flow = pk.Flow("n bigint").map_batches(slow)
        results = iter({run})
        threading.Thread(target=next, args=(results,), daemon=True).start()
        assert began.wait(60)
        print("the end")
        """
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", dedent(text)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr[-2000:]
    assert time.monotonic() - begun < 60


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent() -> None:
    text = """
        import itertools, os, sys, threading, time
        import penstock as pk
        began = threading.Event()
        def slow(x):
            began.set()
            time.sleep(30)
        threading.Thread(target=lambda: list(pk.ordered_map(slow, [1], mode="inline")), daemon=True).start()
        assert began.wait(60)
        took = []
        # Half of what a function that is under way may take; who waits for it takes more each time.
        while not took or took[-1] >= 1.0 and len(took) < 5:
            before = time.monotonic()
            if os.fork() == 0:
                sys.exit(0)
            assert os.wait()[1] == 0
            took.append(time.monotonic() - before)
        print(took[-1] < 1.0, flush=True)
        os._exit(0)
        """
    done = subprocess.run([sys.executable, "-c", dedent(text)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


def test_close_in_another_thread_waits_for_the_functions() -> None:
    """What they use may be closed behind it."""
    inside, both, go = [0], threading.Semaphore(0), threading.Event()
    lock = threading.Lock()

    def function(x: int) -> int:
        with lock:
            inside[0] += 1
        both.release()
        go.wait()
        with lock:
            inside[0] -= 1
        return x

    results = pk.ordered_map(function, range(10), mode="threads", workers=2, chunk=1)
    puller = threading.Thread(target=lambda: next(results, None), daemon=True)
    puller.start()
    assert both.acquire(timeout=60) and both.acquire(timeout=60)
    closer = threading.Thread(target=results.close, daemon=True)
    closer.start()
    closer.join(0.5)
    assert closer.is_alive(), "two functions run"
    go.set()
    closer.join(60)
    assert not closer.is_alive() and inside == [0]
