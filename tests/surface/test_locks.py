"""Handles used by several threads, one of which gets errors: no lock is waited for with the interpreter in hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Threads, switching rarely and switching as often as they can. Errors are what the calls are for.
DRIVER = '''
import sys, threading, tempfile
import pyarrow as pa
from penstock import _native, errors

def beside(one, *others, times=500):
    """Calls one so many times, and the others for as long, each in a thread."""
    found = []
    for interval in (5e-3, 1e-6):
        sys.setswitchinterval(interval)
        over = threading.Event()

        def turn(call, ends):
            while not ends():
                try:
                    call()
                except (errors.PenstockError, ValueError) as error:
                    found.append(type(error).__name__)

        left = iter(range(times))
        threads = [threading.Thread(target=turn, args=(other, over.is_set)) for other in others]
        for thread in threads:
            thread.start()
        turn(one, lambda: next(left, None) is None)
        over.set()
        for thread in threads:
            thread.join()
    print(*sorted(set(found)))

edges = pa.table({"a": pa.array([1], pa.int64()), "b": pa.array([2], pa.int64())}).to_batches()[0]
tri = "tri(a, b, c) :- e(a, b), e(a, c), e(b, c)"
'''

CALLS = {
    "a change that deltas refuse, and their epoch": (
        """
deltas = _native.GraphDeltas(tri, "signed")
beside(lambda: deltas.feed(None, None, [], [("nope", edges, 1)], 1), lambda: deltas.epoch)
""",
        "PatternError",
    ),
    "changes of an epoch that is over, and the epoch": (
        """
deltas = _native.GraphDeltas(tri, "signed")
old = deltas.changes()
deltas.feed(0, None, [], [], 1)
beside(lambda: old.next(), lambda: deltas.epoch)
""",
        "StateError",
    ),
    "a search that is closed": (
        """
builder = _native.GraphBuilder("signed")
builder.relation("e", "keep", "drop")
builder.add("e", edges)
search = _native.GraphSearch(builder.finish("both"), tri, count=True)
search.close()
beside(search.progress, search.close, search.close, times=5000)
""",
        "EngineError",
    ),
    "a builder of a file that is spent": (
        """
folder = tempfile.mkdtemp()
builder = _native.GraphFileBuilder("signed", folder, 1 << 24)
builder.relation("e", "keep")
builder.add("e", edges)
builder.finish("both", folder + "/index")
beside(lambda: builder.relation("e", "keep"), lambda: builder.spilled)
""",
        "EngineError",
    ),
    "an ordered run that is closed": (
        """
step = {"kind": "stateless", "name": "f", "call": lambda worker, given: given}
run = _native.OrderedRun([step], workers=1, in_flight=4, scheduler="qst", queue="shared")
run.close()
beside(run.stats, run.stats)
""",
        "EngineError",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_that_fails_and_one_that_asks_do_not_wait_for_each_other(name: str) -> None:
    work, error = CALLS[name]
    # In a process of its own: what hangs with the interpreter in hand hangs all of it. `run` kills it then.
    ended = subprocess.run([sys.executable, "-c", DRIVER + work], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [error]
