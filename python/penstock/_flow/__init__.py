"""The flow: what to compute, independent of where.

Owns: the immutable builder that users write and the plan (versioned plain data plus Python
callables) that it becomes. Hosts run the plan: `penstock._local` in this process,
`penstock.spark` on a cluster.

| module | owns |
|---|---|
| `builder` | `Flow`, from its input on |
| `base` | what a flow is made of: the plan, equality, pickling, how it shows |
| `graph` | sources, meetings of flows, and how a graph is written as a plan |
| `keyed` | the steps with state per key |
| `stateless` | the steps without: maps, flat maps, bounded parts and loops |
| `meetings` | the steps where flows meet: union and join |
| `running` | from a flow to a run |
| `text` | steps and schemas in words; names of columns, checked |

Invariants: a Flow never changes; every method returns a new one, so a flow may be kept,
branched and pickled. Names of columns are checked where they are written; types are checked
by the native compiler, at `Flow.agg`, `Flow.output_schema`, `Flow.explain` or the first run,
and so is the zone of a window, by the step that uses it.
"""

from __future__ import annotations

from penstock._flow.base import PLAN_VERSION
from penstock._flow.builder import Flow
from penstock._flow.text import to_text

__all__ = ["PLAN_VERSION", "Flow", "to_text"]
