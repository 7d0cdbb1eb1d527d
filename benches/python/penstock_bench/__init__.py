"""Benches: ours beside a named peer, on the same input and cores, in one run.

``penstock bench`` is the way in. A result is one case of one bench, a plain dict that becomes one line of JSON:
name, case, unit, ours, peer, ratio, the ranges of both sides, and the conditions. A ratio above 1 always means that
ours is better by that factor. The core is measured by a program of its own (``benches/rust``); what
Python and Spark users call is measured here. The package is part of a checkout, not of the wheel.

What stands where: `catalogue` (which benches there are), `measure` (repeats, turns, the shape of a result),
`command` (the options),
`machine` (cores, CPU, neighbours), `core` (the program), `targets` (what has to be reached), `record` (the results
page), `show` (the table in the terminal); the other modules are one bench each.
"""

from penstock_bench.catalogue import BENCHES, Bench, find
from penstock_bench.measure import Line, Options

__all__ = ["BENCHES", "Bench", "Line", "Options", "find"]
