"""What bins cost: sums over processes, differences between looks, and shares of bins and parts."""

from __future__ import annotations

from typing import Any

from penstock._loads import Loads
from penstock._parts import Parts

WHOLE = Parts(1, {(0, 1): 0, (1, 1): 1})


def step(**counts: Any) -> dict[str, Any]:
    return {"rows": [10, 30], "rest_ns": 80, **counts}


def test_the_rest_is_shared_by_rows_and_what_they_met() -> None:
    assert Loads([step()]).busy_ns(WHOLE) == {(0, 1): 20, (1, 1): 60}
    # A join of which one row meets many: 80 ns for 10 and 30 rows and 40 pairs.
    assert Loads([step(met=[40, 0])]).busy_ns(WHOLE) == {(0, 1): 50, (1, 1): 30}
    assert Loads([step(), step(spent_ns=[7, 0])]).busy_ns(WHOLE) == {(0, 1): 47, (1, 1): 120}
    assert Loads().by("busy", WHOLE) == ("rows", {(0, 1): 0, (1, 1): 0})
    assert Loads([step(rest_ns=0)]).by("busy", WHOLE) == ("rows", {(0, 1): 10, (1, 1): 30})
    assert Loads([step()]).by("busy", WHOLE)[0] == "busy" and Loads([step()]).by("rows", WHOLE)[0] == "rows"


def test_processes_add_up_and_some_have_told_nothing_of_a_kind() -> None:
    one = Loads([step(spent_ns=[5, 0], part_spent_ns={"4": 5})])
    both = Loads().with_(one).with_(Loads([step(rows=[40], rest_ns=0, part_spent_ns={"4": 1})]))
    assert both.rows(WHOLE) == {(0, 1): 50, (1, 1): 30}
    assert both.busy_ns(WHOLE) == {(0, 1): 55, (1, 1): 30}


def test_what_came_since_is_valued_by_what_rows_have_cost_in_all() -> None:
    before = Loads([step()])
    now = Loads([step(rows=[20, 40], rest_ns=120, spent_ns=[0, 9])])
    since = now.since(before)
    assert since.rows(WHOLE) == {(0, 1): 10, (1, 1): 10}
    assert since.busy_ns(WHOLE) == {(0, 1): 20, (1, 1): 29}
    assert before.since(now).rows(WHOLE) == {(0, 1): 0, (1, 1): 0}, "workers that began again"


def test_parts_have_loads_of_their_own() -> None:
    halves = Parts(1, {(0, 1): 0, (2, 2): 0, (3, 2): 1})
    told = step(part_rows={"6": 20, "7": 10}, spent_ns=[3, 400], part_spent_ns={"6": 100, "7": 300}, met=[0, 8])
    assert Loads([told]).rows(halves) == {(0, 1): 10, (2, 2): 20, (3, 2): 10}
    # 80 ns for 48: what was met is of the bin, so half of each part's.
    assert Loads([told]).busy_ns(halves) == {(0, 1): 20, (2, 2): 140, (3, 2): 323}
