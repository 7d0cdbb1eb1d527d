"""What `finish` gives when those who hold it die: it is the end of a durable query, and is asked for again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from durable_support import SCHEMA, Runs, kill
from engine_support import bag, numbers, wait_for, write
from penstock.spark._engine import drains
from penstock.spark._session.collect import to_table

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(240)]

#: More than the driver takes to itself.
KEYS = 20_000


def test_all_members_between_two_calls(cluster: Any, tmp_path: Path) -> None:
    assert KEYS > drains._LOCAL_ROWS
    runs = Runs(cluster, tmp_path)
    for batch in range(2):
        write(cluster, runs.inputs, batch, numbers(cluster, batch, KEYS, KEYS))
    flow = pk.Flow(SCHEMA).key_by("k").agg(n=pk.count(), total=pk.sum("v"), emit="final")
    expected = {(k, 2, 2 * k + KEYS): 1 for k in range(KEYS)}
    with pk.Engine(cluster, workers=2, bits=4, name="finished") as engine:
        runs.run(engine, flow)
        query = runs.function.query_id
        assert bag(to_table(engine.finish(query))) == expected
        for member in engine.members():
            kill(member)
        wait_for(lambda: len(engine.members()) == 2, what="others have their places")
        assert bag(to_table(engine.finish(query))) == expected
