"""More and fewer members while batches come: right results, bins that follow, slots that are given back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import penstock as pk
from engine_support import COUNTS, Kept, counted, numbers, state, wait_for
from penstock.errors import ConfigError, EngineError, SlotsError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def wide(sessions: Any) -> Any:
    """A classic session on six threads of this machine."""
    return sessions.get("local[6]")


def jobs(spark: Any) -> int:
    return len(spark.sparkContext.statusTracker().getActiveJobsIds())


def test_one_two_four_two_one_while_batches_come(wide: Any) -> None:
    kept = Kept()
    with pk.Engine(wide, workers=1, name="elastic", bits=4) as engine:
        function = engine.foreach_batch(COUNTS, kept, name="elastic")
        batches = 0

        def run() -> None:
            nonlocal batches
            function(numbers(wide, batches), batches)
            batches += 1

        run()
        for workers in (2, 4, 2, 1):
            resize = engine.rescale(workers)
            if workers > 1:
                wait_for(lambda least=workers: len(engine.members()) >= least, what="they have come")
            with pytest.raises(EngineError, match="just now"):
                engine.rescale(workers + 1)
            # With the next batch they take part, and bins move; leavers go with the one after it.
            for _ in range(10):
                run()
                if resize.done:
                    break
            assert resize.wait(60) == workers
            wait_for(lambda wanted=workers: len(engine.members()) == wanted, what="who leaves has gone")
            wait_for(lambda wanted=workers: jobs(wide) == wanted, what="its task slot is free")
            shares = Counter(engine.owners("elastic")[0])
            assert sorted(shares) == list(range(workers)) and set(shares.values()) == {16 // workers}
            assert engine.workers == workers
            assert state(kept) == counted(batches)
        run()
        assert state(kept) == counted(batches)
        assert sum(n for n, _ in state(kept).values()) == 600 * batches


def test_what_is_refused_changes_nothing(wide: Any) -> None:
    with pk.Engine(wide, workers=2, name="steady", bits=4) as engine:
        members = engine.members()
        for wrong in (0, -1, "two", True, 2.0):
            with pytest.raises(ConfigError, match="rescale"):
                engine.rescale(wrong)  # type: ignore[arg-type]
        with pytest.raises(SlotsError, match="2 task slots are held and 3 more are free"):
            engine.rescale(6)
        assert engine.members() == members and engine.workers == 2
        # Without a query nobody is waited for.
        assert engine.rescale(3).wait(60) == 3
        assert len(engine.members()) == 3
        assert engine.rescale(1).wait(60) == 1
        wait_for(lambda: jobs(wide) == 1, what="the slots are free")
    with pytest.raises(EngineError, match="closed"):
        engine.rescale(2)
