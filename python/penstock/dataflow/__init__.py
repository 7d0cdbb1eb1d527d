"""Dataflows by hand: timely's level, in Python.

A program is run by several workers: threads of this process, or of several (`execute`). Each builds the same
dataflow, feeds its part of the input, and steps. Streams carry *blocks*, a list of Python objects or a pyarrow
RecordBatch, at logical times; every worker knows which times may still come where (*frontiers*), so whoever waits for
the end of a time sees it as soon as it is certain, over all workers.

Times are ints from 0 at the root of a dataflow. A nested scope appends a coordinate: times there are tuples, outermost
first, and partially ordered: ``(0, 5)`` and ``(1, 0)`` are neither before nor after each other.

Examples
--------
Counting words on two workers:

>>> from collections import Counter
>>> import penstock as pk
>>> def program(worker):
...     counts = Counter()
...     with worker.dataflow("words") as scope:
...         lines, stream = scope.input()
...         words = stream.flat_map(str.split).exchange(lambda word: word)
...         probe = words.inspect_blocks(lambda time, words: counts.update(words)).probe()
...     lines.send(["the quick brown fox", "the end"] if worker.index == 0 else [])
...     lines.advance_to(1)
...     worker.step_while(lambda: probe.less_than(1))
...     return counts
>>> first, second = pk.execute(program, workers=2)
>>> (first + second)["the"], sorted(first.keys() & second.keys())
(2, [])

Notes
-----
Python code of the workers of one process takes turns on the interpreter lock; native work (exchanges of record batches,
progress, waiting) does not hold it. Programs that compute in Python scale with ``processes``.
"""

from __future__ import annotations

from penstock.dataflow._bounded import BoundedStats, Failure
from penstock.dataflow._coordination import Barrier, Sequencer
from penstock.dataflow._execution import execute
from penstock.dataflow._handles import Block, InputHandle, Loop, Probe
from penstock.dataflow._operator import Capability, Frontiers, Input, Output
from penstock.dataflow._scope import Scope
from penstock.dataflow._stateful import Bin
from penstock.dataflow._stream import Bounded, Stream, Time
from penstock.dataflow._threads import run_here, run_workers
from penstock.dataflow._worker import Worker

__all__ = [
    "Barrier",
    "Bin",
    "Block",
    "Bounded",
    "BoundedStats",
    "Capability",
    "Failure",
    "Frontiers",
    "Input",
    "InputHandle",
    "Loop",
    "Output",
    "Probe",
    "Scope",
    "Sequencer",
    "Stream",
    "Time",
    "Worker",
    "execute",
    "run_here",
    "run_workers",
]
