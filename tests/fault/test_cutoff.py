"""A sink whose rows have died with their member ends at the first failed task; every other one is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from engine_support import wait_for
from penstock.errors import ProtocolError
from penstock.spark._engine.cutoff import ending_at_loss

pytestmark = [pytest.mark.spark, pytest.mark.fault, pytest.mark.timeout(120)]


class Members:
    """Of a hub what the cut-off asks: members 1 and 2, of which one may be lost."""

    def __init__(self, lost: str | None) -> None:
        self.lost = lost

    def known(self, member: int) -> Any:
        return SimpleNamespace(lost=self.lost if member == 2 else None)

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        wait_for(predicate, what="something happens")

    def wake(self) -> None:
        pass


def failing(folder: Path, again: bool) -> Any:
    """The first attempt at partition 0 fails; the next ones wait for a file, or pass."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 0:
            assert context.attemptNumber() > 0, "as the test has it"
            deadline = time.monotonic() + 60
            while again and not (folder / "go").exists():
                assert time.monotonic() < deadline, "it was not cancelled"
                time.sleep(0.01)
        yield from batches

    return fail


def test_what_reads_from_a_dead_member_is_cancelled(cluster: Any, tmp_path: Path) -> None:
    hub: Any = Members("its connection ended")
    rows = cluster.range(0, 10, 1, 2).mapInArrow(failing(tmp_path, again=True), "id bigint")
    try:
        with (
            pytest.raises(ProtocolError, match="is gone: its connection ended"),
            ending_at_loss(cluster, hub, {1, 2}),
        ):
            rows.count()
    finally:
        (tmp_path / "go").touch()
    assert not cluster.sparkContext.getJobTags()


@pytest.mark.parametrize(("lost", "members"), [(None, {1, 2}), ("it left", {1}), ("it left", set())])
def test_a_task_that_fails_for_another_reason_runs_again(
    cluster: Any, tmp_path: Path, lost: str | None, members: set[int]
) -> None:
    hub: Any = Members(lost)
    with ending_at_loss(cluster, hub, members):
        assert cluster.range(0, 10, 1, 2).mapInArrow(failing(tmp_path, again=False), "id bigint").count() == 10


def test_a_sink_that_has_read_its_rows_goes_on(cluster: Any) -> None:
    hub: Any = Members("it left")
    with ending_at_loss(cluster, hub, {2}):
        assert cluster.range(0, 10, 1, 2).count() == 10
    with pytest.raises(ZeroDivisionError), ending_at_loss(cluster, hub, {2}):
        raise ZeroDivisionError
