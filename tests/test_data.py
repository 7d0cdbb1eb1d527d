"""Data sets that are made where the real ones are not there: whole, and their answers are what runs over them give."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import data_support
import penstock as pk
from conftest import data_or_made, real_data
from engine_support import bag
from penstock.workloads import nexmark, tpcxbb, wordcount


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither here nor beside the repository."""
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / "nothing"))
    assert real_data() == tmp_path / "nothing"


def test_nexmark_is_made(
    nowhere: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_support, "EVENTS", 20_000)  # fewer: the whole set takes long
    folder = data_or_made("nexmark", tmp_path_factory)
    assert {path.stem for path in (folder / "expected").iterdir()} == set(nexmark.QUERIES)
    for query in ("q3", "q5_mega", "q6"):
        wanted = pq.read_table(folder / "expected" / f"{query}.parquet")
        flow = nexmark.flow(query, nexmark.load_params(folder))
        read = nexmark.read(flow, folder)
        got = flow.collect(read if len(read) > 1 else next(iter(read.values())))
        assert got.column_names == wanted.column_names and bag(got) == bag(wanted) != Counter()


def test_text_is_made(nowhere: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = data_or_made("text", tmp_path_factory)
    files = sorted(folder.glob("*.txt.gz"))
    wanted = (folder / "expected_wordcount.tsv").read_bytes()
    assert len(files) == 2 and wanted.count(b"\n") > 1_000
    assert wordcount.to_tsv(wordcount.flow().collect(wordcount.read(files))) == wanted


def test_tpcxbb_is_made(nowhere: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = data_or_made("tpcxbb", tmp_path_factory)
    assert {path.stem for path in (folder / "expected").iterdir()} == set(tpcxbb.QUERIES)
    for name in tpcxbb.QUERIES:
        wanted = pq.read_table(folder / "expected" / f"{name}.parquet")
        assert wanted.num_rows > 0, "an answer without rows compares nothing"
        assert wanted.column_names == tpcxbb.narrow(tpcxbb.find(name).schema.empty_table()).column_names


def test_graphs_are_made(nowhere: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = data_or_made("graphs", tmp_path_factory)
    for name in data_support.PUBLISHED:
        path = folder / f"{name}.txt.gz"
        graph = data_support.figures(path)
        assert pk.graph.cliques(path, 4, count=True) == graph.fours > 10_000
        assert pk.graph.cliques(path, 3, directed=True, count=True) == graph.directed_threes > 10_000
