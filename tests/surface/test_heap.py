"""`penstock.spark._tasks.heap`: the garbage collector looks once at what a process has loaded."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, os, weakref

from penstock.spark._tasks.heap import settle

class Node:
    pass

def circle():
    one = Node()
    one.self = one
    return weakref.ref(one)

gc.disable()
garbage, kept = circle(), Node()
settle()
hidden = gc.get_freeze_count()
assert garbage() is None, "garbage goes before the rest is hidden"
assert hidden > 1_000 and len(gc.get_objects()) < hidden / 10, (hidden, len(gc.get_objects()))
ref = weakref.ref(kept)
del kept
assert ref() is None, "what nobody refers to is freed"
later = circle()
settle()
assert gc.get_freeze_count() <= hidden and later() is not None, "once"
gc.collect()
assert later() is None, "what came later is collected as ever"
before = gc.get_freeze_count()
import xmlrpc.server
settle()
assert gc.get_freeze_count() > before + 1_000, "what is loaded later is hidden then"
child = os.fork()
if child == 0:
    more = [[] for _ in range(5_000)]
    settle()
    os._exit(0 if gc.get_freeze_count() > hidden else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a child has modules of its own"
"""


def test_what_is_loaded_is_hidden_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
