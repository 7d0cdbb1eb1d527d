"""``penstock events``: a folder that ``penstock nexmark`` takes, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import _native
from penstock.cli import main
from penstock.workloads import nexmark


def test_what_is_made_is_what_the_generator_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "auctions"
    assert main(["events", "--output", str(folder), "--events", "250001", "--out-of-order", "50"]) == 0
    assert "250,001 events" in capsys.readouterr().out
    made = _native.Nexmark(10_000, stop=250_001, out_of_order=50).next_batches(250_001)
    assert set(made) == {"person", "auction", "bid"}
    for name, batch in made.items():
        assert pq.read_table(folder / f"{name}.parquet") == pa.table(pa.record_batch(batch))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["auctions"]


def test_every_query_runs_on_it(tmp_path: Path) -> None:
    folder = tmp_path / "auctions"
    folder.mkdir()  # an empty one is as good as none
    assert main(["events", "--output", str(folder), "--events", "20000"]) == 0
    lengths = json.loads((folder / "params.json").read_text())
    for query in nexmark.QUERIES:
        nexmark.flow(query, lengths)
        out = tmp_path / f"{query}.parquet"
        assert main(["nexmark", "--query", query, "--input", str(folder), "--output", str(out)]) == 0
        assert pq.read_metadata(out).num_rows > 0, query


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--events", "0"], "--events 0: must be a whole number from 1 to"),
        (["--rate", "fast"], "--rate fast: must be a whole number from 1 to"),
        (["--output", "{here}/file"], "is a file; name a folder"),
        (["--output", "{here}/full"], "the folder is not empty"),
        (["--output", "{here}/none/deep"], "does not exist; make it first"),
    ],
)
def test_what_cannot_be_made_is_said_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    given = [option.format(here=tmp_path) for option in ["--output", "{here}/new", *options]]
    assert main(["events", *given]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_nothing_stays_of_one_that_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(pq.ParquetWriter):  # type: ignore[misc]
        def write_batch(self, *args: object, **options: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(pq, "ParquetWriter", Breaks)
    assert main(["events", "--output", str(tmp_path / "auctions")]) == 130
    assert list(tmp_path.iterdir()) == []
    there = tmp_path / "there"
    there.mkdir()
    assert main(["events", "--output", str(there)]) == 130
    assert list(tmp_path.iterdir()) == [there] and list(there.iterdir()) == []


def test_the_folder_that_is_there_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell stands in it, a disk is mounted there, and who may come in has been told."""
    folder = tmp_path / "auctions"
    folder.mkdir()
    folder.chmod(0o2750)
    monkeypatch.chdir(folder)
    before = folder.stat()
    assert main(["events", "--output", ".", "--events", "50"]) == 0
    assert sorted(os.listdir(".")) == ["auction.parquet", "bid.parquet", "params.json", "person.parquet"]
    assert (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)
    assert list(tmp_path.iterdir()) == [folder]


def test_nothing_stays_of_what_cannot_be_put_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace = os.replace

    def full(source: Any, place: Any) -> None:
        if str(source).endswith("params.json"):
            raise OSError(errno.EIO, "broken")
        replace(source, place)

    monkeypatch.setattr(os, "replace", full)
    assert main(["events", "--output", str(tmp_path), "--events", "50"]) == 1
    assert f"--output {tmp_path}: cannot be written: {os.strerror(errno.EIO)}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    write_text = Path.write_text

    def beside(path: Path, *given: Any, **more: Any) -> int:
        (tmp_path / "bid.parquet").touch()  # somebody else's
        return write_text(path, *given, **more)

    monkeypatch.setattr(Path, "write_text", beside)
    assert main(["events", "--output", str(tmp_path), "--events", "50"]) == 1
    assert os.strerror(errno.ENOTEMPTY) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "bid.parquet"] and (tmp_path / "bid.parquet").stat().st_size == 0


def test_nothing_stays_where_ctrl_c_comes_as_it_begins_or_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdtemp, rmtree = tempfile.mkdtemp, shutil.rmtree

    def made(*given: Any, **more: Any) -> str:
        folder = mkdtemp(*given, **more)
        signal.raise_signal(signal.SIGINT)
        return folder

    def removed(*given: Any, **more: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        rmtree(*given, **more)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    monkeypatch.setattr(shutil, "rmtree", removed)
    assert main(["events", "--output", str(tmp_path / "auctions"), "--events", "50"]) == 130
    assert list(tmp_path.iterdir()) == []
