"""The workloads: expected outputs as bags, on any number of workers, in any bounded disorder."""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_support
import penstock as pk
from conftest import data_folder
from engine_support import sized
from examples_support import examples
from penstock.cli import main
from penstock.errors import ConfigError, SchemaError
from penstock.workloads import nexmark, wordcount
from penstock.workloads.nexmark import steps

STRATEGIES = ("all-at-once", "batched", "fluid", "matched")
#: Queries without a key: there is nothing to move.
WITHOUT_STATE = ("q1", "q2")
DISORDER_MS = 3_000


def bag(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def expected(folder: Path, query: str) -> pa.Table:
    return pq.read_table(folder / "expected" / f"{query}.parquet")


def shuffled(table: pa.Table, disorder_ms: int, seed: int) -> pa.Table:
    """Rows in the order of event time plus a random delay below the bound."""
    delays = np.random.default_rng(seed).integers(disorder_ms, size=len(table))
    order = np.argsort(table.column("date_time").to_numpy() + delays, kind="stable")
    assert (np.diff(order) < 0).any()
    return table.take(order)


def moving(
    source: pa.Table, batch_rows: int, session: Any, rng: random.Random, workers: int
) -> Iterator[pa.RecordBatch]:
    """The batches of a table; every other one begins a migration of some bins to anybody, by each strategy in turn."""
    began: list[Any] = []
    strategies = rng.sample(STRATEGIES, len(STRATEGIES))
    for number, batch in enumerate(source.to_batches(max_chunksize=batch_rows)):
        if number % 2:
            bins = rng.sample(range(256), rng.randrange(1, 256))
            moves = {bin_: rng.randrange(workers) for bin_ in bins}
            strategy = strategies[len(began) % len(strategies)]
            began.append(session.migrate(moves=moves, **sized(strategy, rng.randrange(1, 32))))
        yield batch
    assert len(began) >= len(STRATEGIES)
    assert sum(migration.wait(timeout=60).bins for migration in began) > 0


def in_disorder(tables: Mapping[str, Sequence[str]], data: Path, disorder_ms: int, seed: int) -> dict[str, pa.Table]:
    """Columns of tables, each out of order within a bound."""

    def table(name: str, columns: Sequence[str]) -> pa.Table:
        rows = pq.read_table(data / f"{name}.parquet", columns=list({*columns, "date_time"}))
        return shuffled(rows, disorder_ms, seed).select(list(dict.fromkeys(columns)))

    return {name: table(name, columns) for name, columns in tables.items()}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("query", nexmark.QUERIES)
def test_expected_output_of_the_command(nexmark_data: Path, tmp_path: Path, query: str, workers: int) -> None:
    output, folder = tmp_path / "out.parquet", nexmark_data
    if workers > 1:
        # Out of order, over the ends of many batches: the command measures by how much.
        folder = tmp_path
        (folder / "params.json").write_bytes((nexmark_data / "params.json").read_bytes())
        flow = nexmark.flow(query, nexmark.load_params(folder))
        columns = {name: [*schema.names, "date_time"] for name, schema in flow.sources.items()}
        for name, rows in in_disorder(columns, nexmark_data, DISORDER_MS, workers).items():
            pq.write_table(rows, folder / f"{name}.parquet")
    given = ["nexmark", "--query", query, "--input", str(folder), "--output", str(output)]
    assert main([*given, "--workers", str(workers), "--batch-rows", "1000"]) == 0
    got, wanted = pq.read_table(output), expected(nexmark_data, query)
    assert got.column_names == wanted.column_names
    assert bag(got) == bag(wanted)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("query", nexmark.QUERIES)
def test_expected_output_in_any_order_while_state_moves(nexmark_data: Path, query: str, workers: int) -> None:
    flow = nexmark.flow(query, nexmark.load_params(nexmark_data), lateness=f"{DISORDER_MS}ms")
    rng = random.Random(f"{query} on {workers}")
    # What has no event time may come in any order.
    disorder_ms = 400_000 if query in ("q1", "q2", "q3") else DISORDER_MS
    taken = {name: schema.names for name, schema in flow.sources.items()}
    source: dict[str, Any] = in_disorder(taken, nexmark_data, disorder_ms, rng.randrange(1_000))
    with flow.start(
        workers=workers,
        streaming=rng.random() < 0.5,
        late=lambda batch: pytest.fail(f"{batch.num_rows} late rows"),
    ) as session:
        if workers > 1 and query not in WITHOUT_STATE:
            name = "auction" if "auction" in source else "bid"
            source[name] = moving(source[name], len(source[name]) // 12, session, rng, workers)
        got = pa.Table.from_batches(session.run(source if len(source) > 1 else next(iter(source.values()))))
    wanted = expected(nexmark_data, query)
    assert got.column_names == wanted.column_names
    assert bag(got) == bag(wanted)


def test_the_outputs_that_are_computed_here_are_the_expected_ones() -> None:
    """What runs over events that are made here are compared with: see `data_support`."""
    folder = data_folder("nexmark")
    outputs = data_support.nexmark_outputs(folder, nexmark.load_params(folder))
    assert set(outputs) == set(nexmark.QUERIES)
    for query, rows in outputs.items():
        wanted = expected(folder, query)
        assert data_support.NEXMARK[query].split() == wanted.column_names
        assert Counter(rows) == bag(wanted), query


BIDS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(-3, 20), st.integers(-2_000, 9_000)), max_size=60
)


@settings(max_examples=examples(30), deadline=None)
@given(bids=BIDS, workers=st.integers(1, 3), batch_rows=st.integers(1, 20))
def test_windowed_queries_against_plain_python(
    bids: list[tuple[int, int, int, int]], workers: int, batch_rows: int
) -> None:
    params = {"q5_beam": {"size_ms": 2_000, "period_ms": 700}, "q7_beam": {"size_ms": 2_000}}
    counts: dict[int, Counter[int]] = {}
    best: dict[int, list[tuple[int, ...]]] = {}
    for auction, bidder, price, time in bids:
        start = time // 700 * 700
        while start + 2_000 > time:
            counts.setdefault(start, Counter())[auction] += 1
            start -= 700
        best.setdefault(time // 2_000 * 2_000, []).append((price, auction, bidder, time))
    hot = Counter(
        (start, start + 2_000, auction, count)
        for start, window in counts.items()
        for auction, count in window.items()
        if count == max(window.values())
    )
    high = Counter(
        (start, start + 2_000, *bid) for start, window in best.items() for bid in window if bid[0] == max(window)[0]
    )
    names = ("auction", "bidder", "price", "date_time")
    table = pa.table({name: pa.array([bid[i] for bid in bids], pa.int64()) for i, name in enumerate(names)})
    for query, wanted in (("q5_beam", hot), ("q7_beam", high)):
        flow = nexmark.flow(query, params, lateness="1h")
        assert bag(flow.collect(table, workers, batch_rows=batch_rows)) == wanted


def test_prices_round_down() -> None:
    prices = [0, 1, 99, 100, 101, -1, -99, -100, 2**40]
    means = steps.average(pa.record_batch({"sum_price": prices, "n": [3] * len(prices)})).column("avg_price")
    assert means.to_pylist() == [price // 3 for price in prices]
    batch = nexmark.convert_currency(pa.record_batch({"price": prices}))
    assert batch.column("price").to_pylist() == [price * 89 // 100 for price in prices]


def test_a_sum_that_does_not_fit_is_an_error() -> None:
    frame = pa.table({"expires": [1, 2], "auction": [1, 2], "category": [3, 3], "price": [2**62, 2**62]}).to_pandas()
    with pytest.raises(OverflowError, match="9223372036854775808"):
        list(steps.so_far((3,), iter([frame]), None))
    [rows] = steps.last_ten((3,), iter([frame]), None)
    assert rows.avg_price.tolist() == [2**62, 2**62]


def test_params_are_read_and_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        nexmark.load_params(tmp_path)
    (tmp_path / "params.json").write_text("[")
    with pytest.raises(ConfigError, match="is not JSON"):
        nexmark.load_params(tmp_path)
    (tmp_path / "params.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        nexmark.load_params(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps({"q5_beam": {"size_ms": 0, "period_ms": 1}, "q7_beam": 3}))
    params = nexmark.load_params(tmp_path)
    with pytest.raises(ConfigError, match=r"q5_beam\.size_ms is 0"):
        nexmark.flow("q5_beam", params)
    with pytest.raises(ConfigError, match=r"size_ms is 1000000000000000000; expected milliseconds, an int of 1 to"):
        nexmark.flow("q7_beam", {"q7_beam": {"size_ms": 10**18}})
    with pytest.raises(ConfigError, match="says nothing about q7_beam"):
        nexmark.flow("q7_beam", params)
    with pytest.raises(ConfigError, match="'q9' is unknown; the queries are q1, q2"):
        nexmark.flow("q9", params)


def test_input_is_checked(tmp_path: Path) -> None:
    flow = nexmark.flow("q1", {})
    with pytest.raises(ConfigError, match=r"cannot read .*bid\.parquet"):
        nexmark.read(flow, tmp_path)
    (tmp_path / "bid.parquet").write_bytes(b"no parquet, only text")
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        nexmark.read(flow, tmp_path)
    pq.write_table(pa.table({"auction": [1]}), tmp_path / "bid.parquet")
    with pytest.raises(SchemaError, match="has no column 'bidder'; it has auction"):
        nexmark.read(flow, tmp_path)
    assert nexmark.rows(flow, tmp_path) == 1
    columns = {name: [1] for name in ("auction", "bidder", "date_time")}
    pq.write_table(pa.table(columns | {"price": ["dear"]}), tmp_path / "bid.parquet")
    with pytest.raises(SchemaError, match=r"bid\.parquet column 'price' is string, expected int64; cast it before"):
        nexmark.read(flow, tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bid.parquet"
    numbers = pa.array(np.random.default_rng(0).integers(2**60, size=50_000))
    pq.write_table(pa.table(dict.fromkeys(("auction", "bidder", "price", "date_time"), numbers)), path)
    content = bytearray(path.read_bytes())
    # The footer is whole.
    content[1_000:-10_000] = bytes(len(content) - 11_000)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bid\.parquet is damaged or cannot be read: "):
        nexmark.disorder_ms(tmp_path)
    with pytest.raises(ConfigError, match=r"bid\.parquet is damaged or cannot be read: "):
        list(nexmark.read(nexmark.flow("q1", {}), tmp_path)["bid"])
    pq.write_table(pa.table({"date_time": pa.array([5], pa.timestamp("ms"))}), path)
    with pytest.raises(SchemaError, match="date_time"):
        nexmark.disorder_ms(tmp_path)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_word_counts(text_data: Path, workers: int) -> None:
    flow = wordcount.flow()
    files = sorted(text_data.glob("*.txt.gz"))
    counts = flow.collect(wordcount.read(files), workers)
    assert wordcount.to_tsv(counts) == (text_data / "expected_wordcount.tsv").read_bytes()


def plain_words(text: bytes) -> Counter[str]:
    words: Counter[str] = Counter()
    word = ""
    for byte in text + b" ":
        letter = chr(byte).lower() if byte < 128 and chr(byte).isalpha() else ""
        if not letter and word:
            words[word] += 1
        word = word + letter if letter else ""
    return words


@settings(deadline=None)
@given(texts=st.lists(st.text(alphabet="abZ \n'é1\u0212a", max_size=40), max_size=3), chunk=st.integers(1, 7))
def test_chunks_never_cut_a_word(texts: list[str], chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("texts")
    raw = [text.encode() for text in texts]
    files = []
    for number, text in enumerate(raw):
        files.append(folder / f"{number}.txt")
        files[-1].write_bytes(gzip.compress(text) if number % 2 else text)
    pieces = list(wordcount.chunks(files, chunk))
    assert b"".join(pieces) == b"".join(raw)
    assert sum((plain_words(piece) for piece in pieces), Counter()) == sum(
        (plain_words(text) for text in raw), Counter()
    )
    batches = list(wordcount.read(files, chunk))
    words = Counter(word for batch in batches for word in wordcount.split(batch).column("word").to_pylist())
    assert words == sum((plain_words(text) for text in raw), Counter())


def test_damaged_text_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"word " * 1000)
    (tmp_path / "cut.gz").write_bytes(whole[:-12])
    with pytest.raises(ConfigError, match=r"cut\.gz is damaged"):
        list(wordcount.chunks([tmp_path / "cut.gz"]))
    (tmp_path / "bad.gz").write_bytes(whole[:15] + b"\xff\xff\xff" + whole[18:])
    with pytest.raises(ConfigError, match=r"bad\.gz is damaged"):
        list(wordcount.chunks([tmp_path / "bad.gz"]))
    with pytest.raises(ConfigError, match="cannot read"):
        list(wordcount.chunks([tmp_path / "none.txt"]))


def test_what_is_named_as_gzip_and_is_none_is_refused(tmp_path: Path) -> None:
    for name, text, found in (("plain.gz", b"two words", "b'tw'"), ("empty.gz", b"", "it has no bytes")):
        (tmp_path / name).write_bytes(text)
        said = rf"{name} is damaged: not a gzipped file, .*{found}; fetch it again"
        with pytest.raises(ConfigError, match=said):
            list(wordcount.read([str(tmp_path / name)]))
        with pytest.raises(ConfigError, match=said):
            wordcount.read_spark([tmp_path / name], None)  # type: ignore[arg-type]
    (tmp_path / "zipped.txt").write_bytes(gzip.compress(b"two words"))
    assert list(wordcount.chunks([tmp_path / "zipped.txt"])) == [b"two ", b"words"]


def test_flows_explain_themselves() -> None:
    flow = nexmark.flow("q5_beam", {"q5_beam": {"size_ms": 10_000, "period_ms": 5_000}})
    assert isinstance(flow, pk.Flow)
    assert "auction" in flow.explain()
    assert flow.output_schema.names == ["window_start", "window_end", "auction", "num"]
    assert set(flow.output_schema.types) == {pa.int64()}


def test_disorder_is_the_least_lateness_at_which_nothing_is_late(tmp_path: Path) -> None:
    def measured(times: list[int | None]) -> int:
        pq.write_table(pa.table({"date_time": pa.array(times, pa.int64())}), tmp_path / "bid.parquet", row_group_size=2)
        return nexmark.disorder_ms(tmp_path)

    assert measured([]) == 0
    assert measured([3, 3, 4, 9]) == 0
    assert measured([5, 9, None, 2, 8, 20, 19]) == 7
    assert measured([10, 0, -4, 11]) == 14


def test_lines_of_code_are_as_told() -> None:
    """Those of docs/nexmark.md: of a query and of what it uses in its package."""
    package = Path(nexmark.__file__).parent
    counted: dict[str, tuple[int, set[str]]] = {}
    for module in ("queries.py", "steps.py"):
        source = (package / module).read_text()
        for part in ast.parse(source).body:
            if isinstance(part, ast.FunctionDef):
                counted[part.name] = _lines(part, source.splitlines()), _names(part)

    def total(name: str, seen: set[str]) -> int:
        if name in seen or name not in counted:
            return 0
        seen.add(name)
        lines, names = counted[name]
        return lines + sum(total(other, seen) for other in names)

    text = (Path(__file__).parent.parent / "docs" / "nexmark.md").read_text()
    told = dict(re.findall(r"^\| (q\d\w*) \| (\d+) \|", text, re.MULTILINE))
    assert len(told) == 8 and set(told) <= set(nexmark.QUERIES)
    # Of q5 and q7 one function has both windows.
    found = {name: total(name.removesuffix("_beam"), set()) for name in told}
    assert found == {name: int(lines) for name, lines in told.items()}


def _lines(function: ast.FunctionDef, source: list[str]) -> int:
    skipped: set[int] = set()
    for part in ast.walk(function):
        quiet = isinstance(part, (ast.Import, ast.ImportFrom))
        if isinstance(part, ast.FunctionDef) and ast.get_docstring(part) is not None:
            part, quiet = part.body[0], True
        if quiet and isinstance(part, ast.stmt):
            skipped.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    own = range(function.lineno, (function.end_lineno or 0) + 1)
    text = (source[at - 1].strip() for at in own if at not in skipped)
    return sum(bool(line) and not line.startswith("#") for line in text)


def _names(function: ast.FunctionDef) -> set[str]:
    parts = list(ast.walk(function))
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }
