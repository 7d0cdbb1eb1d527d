"""What a running query deletes of its checkpoint, and what it keeps: manifests, data files, claims and notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as pk
from durable_support import Runs
from engine_support import counted, state, wait_for
from penstock import _native
from penstock.errors import ConfigError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


@pytest.fixture
def runs(cluster: Any, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path)


def numbers_of(runs: Runs, kind: str) -> list[int]:
    """What files of a kind are of, by the first number of their names: batches, of claims their own."""
    return sorted(int(path.name.split("-")[1]) for path in runs.files.glob(f"{kind}-*"))


def epochs_of(files: set[str]) -> set[int]:
    return {int(name.split("-")[2]) for name in files}


def data_files(runs: Runs) -> set[str]:
    return {path.name for path in runs.files.glob("data-*")}


def named_files(runs: Runs) -> set[str]:
    """Data files that some manifest names, of a query that rests."""
    found = [(path.name, path.read_bytes()) for path in runs.files.glob("manifest-*")]
    manifests = json.loads(_native.checkpoint_manifests(found))["manifests"].values()
    return {file["name"] for manifest in manifests for file in manifest["files"]}


def reads(runs: Runs, batches: list[int]) -> None:
    """These batches can be read, each as it was at its end, and those before them cannot."""
    for batch in batches:
        rows = pk.state.read(runs.check, batch=batch).to_pylist()
        assert {row["k"]: (row["n"], row["total"]) for row in rows} == counted(batch + 1), batch
    there = ", ".join(map(str, batches))
    for batch in range(batches[0]):
        with pytest.raises(ConfigError, match=rf"there is no state of batch {batch}, only of {there}$"):
            pk.state.read(runs.check, batch=batch)


def test_so_many_manifests_are_kept_whoever_wrote_them(cluster: Any, runs: Runs) -> None:
    """Two below the last batch that was committed when the newest one began, and nothing of what was before."""
    for workers, batches in ((2, 4), (1, 3)):
        runs.add(batches)
        with pk.Engine(cluster, workers=workers, bits=2, keep=2) as engine:
            runs.run(engine)
            kept = list(range(runs.batches - 4, runs.batches))
            # They are deleted beside the batches.
            wait_for(lambda kept=kept: numbers_of(runs, "manifest") == kept, what="older manifests are gone")
            wait_for(lambda kept=kept: numbers_of(runs, "shown") == kept, what="older notes are gone")
            wait_for(lambda: len(numbers_of(runs, "claim")) == 1, what="older claims are gone")
        reads(runs, kept)
    assert numbers_of(runs, "claim") == [2]
    assert data_files(runs) == named_files(runs)
    assert epochs_of(data_files(runs)) == set(range(7)), "nothing was merged: all of it is state"
    assert state(runs.kept) == counted(7)


def test_files_are_merged_and_what_they_are_made_of_goes_with_its_manifests(cluster: Any, runs: Runs) -> None:
    def over() -> bool:
        """Whether what the first batches wrote is gone, after one more batch."""
        runs.add()
        query.processAllAvailable()
        return not epochs_of(data_files(runs)) & {0, 1}

    def alone() -> bool:
        """Whether there is only what a manifest names or what was merged last; one more batch where there is more.

        While files are merged nothing below them is deleted: that is for the next batch to do.
        """
        kept = runs.batches - 4
        wait_for(lambda: numbers_of(runs, "manifest")[:1] == [kept], what="older manifests are gone")
        if min(epochs_of(data_files(runs) - named_files(runs)), default=kept) >= kept:
            return True
        runs.add()
        query.processAllAvailable()
        return False

    engine = pk.Engine(cluster, workers=2, bits=2, keep=2)
    engine._durable["merge_files"] = 4  # type: ignore[assignment]
    with engine:
        runs.add()
        query = runs.rest(engine)
        try:
            wait_for(over, timeout=120, what="the first files are merged and gone")
            wait_for(alone, timeout=120, what="nothing else is left")
            kept = list(range(runs.batches - 4, runs.batches))
            wait_for(lambda: numbers_of(runs, "manifest") == kept, what="older manifests are gone")
        finally:
            query.stop()
    assert named_files(runs) <= data_files(runs), "what a manifest names is there"
    reads(runs, kept)
    assert state(runs.kept) == counted(runs.batches)
    # What was merged is state like any other.
    runs.add()
    with pk.Engine(cluster, workers=3, bits=3, keep=2) as engine:
        runs.run(engine)
        kept = [*kept[1:], runs.batches - 1]
        wait_for(lambda: numbers_of(runs, "manifest") == kept, what="the oldest manifest is gone")
    assert state(runs.kept) == counted(runs.batches)
    reads(runs, kept)
