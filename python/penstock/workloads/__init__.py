"""Workloads: flows and pipelines over well-known data, used by the command line, tests and benchmarks.

Each module holds the computation of its workload and readers for its input; nothing here is special
to the command line.
"""

from __future__ import annotations

__all__ = ["nexmark", "tpcxbb", "wordcount"]
