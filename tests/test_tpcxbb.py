"""TPCx-BB as ordered pipelines: the expected outputs, small tables against definitions, and bad input."""

from __future__ import annotations

import doctest
import importlib
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples_support import examples
from penstock.errors import ConfigError, SchemaError
from penstock.workloads import tpcxbb
from penstock.workloads.tpcxbb import tables
from penstock.workloads.tpcxbb.tables import CLICKS, ITEM, PAGE, SALES
from tpcxbb_support import BAGS, PARAMS, expected, some_clicks, some_lines, write


def result(name: str, folder: Path, batch_rows: int = 8_192, **how: Any) -> pa.Table:
    query = tpcxbb.find(name)
    batches = tpcxbb.run_local(query, folder, batch_rows=batch_rows, **how)
    return tpcxbb.narrow(pa.Table.from_batches(batches, query.schema))


def rows_of(table: pa.Table, name: str) -> list[tuple[Any, ...]]:
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return sorted(rows) if name in BAGS else rows


@pytest.mark.parametrize("name", tpcxbb.QUERIES)
@pytest.mark.parametrize(("workers", "mode"), [(1, "inline"), (2, "threads")])
def test_expected_output(tpcxbb_data: Path, name: str, workers: int, mode: str) -> None:
    wanted = pq.read_table(tpcxbb_data / "expected" / f"{name}.parquet")
    got = result(name, tpcxbb_data, workers=workers, mode=mode)
    assert got.column_names == wanted.column_names
    if pa.float64() in got.schema.types:
        for mine, theirs in zip(rows_of(got, name), rows_of(wanted, name), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)
    else:
        assert rows_of(got, name) == rows_of(wanted, name)


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32), clicks=st.integers(0, 60), tickets=st.integers(0, 30), batch_rows=st.integers(1, 20))
def test_small_tables_against_the_definitions(
    seed: int, clicks: int, tickets: int, batch_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    clickstream, sales = some_clicks(rng, clicks), some_lines(rng, tickets)
    folder = write(tmp_path_factory.mktemp("tables"), clickstream, sales)
    for name, wanted in expected(clickstream, sales).items():
        got = rows_of(result(name, folder, batch_rows, workers=1, mode="inline"), name)
        assert got == wanted, name


@pytest.mark.parametrize("queue", ["hybrid", "partitioned"])
@pytest.mark.parametrize("scheduler", ["adaptive", "qst", "lip", "et", "ct"])
def test_every_queue_and_scheduler_gives_the_same(tmp_path: Path, queue: str, scheduler: str) -> None:
    rng = random.Random(5)
    clicks, sales = some_clicks(rng, 400), some_lines(rng, 100)
    folder = write(tmp_path, clicks, sales)
    for name, wanted in expected(clicks, sales).items():
        got = result(name, folder, 32, queue=queue, scheduler=scheduler, workers=3, mode="threads")
        assert rows_of(got, name) == wanted, name


def test_processes_give_the_same(tmp_path: Path) -> None:
    rng = random.Random(6)
    clicks, sales = some_clicks(rng, 300), some_lines(rng, 100)
    folder = write(tmp_path, clicks, sales)
    wanted = expected(clicks, sales)
    for name in ("q1", "q2_sessions", "q3_views", "q4"):
        assert rows_of(result(name, folder, 50, workers=2, mode="processes"), name) == wanted[name], name


def click(seq: int, time: int, user: int | None = 1, item: int | None = 1, page: int | None = 2) -> Any:
    return (seq, 100, time, None, item, page, user)


def test_exactly_the_timeout_is_the_same_session(tmp_path: Path) -> None:
    folder = write(tmp_path, [click(0, 5), click(1, 15), click(2, 26), click(3, 36)], [])
    assert [row[3] for row in rows_of(result("q2_sessions", folder), "q2_sessions")] == [0, 0, 1, 1]
    assert rows_of(result("q4_carts", folder), "q4_carts") == [(1, 0, 2, 1), (1, 1, 2, 3)]
    write(tmp_path, [click(0, 5), click(1, 15)], [], PARAMS | {"session_timeout_s": 0})
    assert [row[3] for row in rows_of(result("q2_sessions", folder), "q2_sessions")] == [0, 1]


def test_columns_that_are_null_throughout(tmp_path: Path) -> None:
    folder = write(tmp_path, [click(0, 5, None, None, None), click(1, 6, None, None, None)], [])
    table = pq.read_table(folder / "web_clickstreams.parquet")
    for name in ("wcs_user_sk", "wcs_item_sk", "wcs_web_page_sk", "wcs_sales_sk"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.nulls(2))  # a type of its own
    pq.write_table(table, folder / "web_clickstreams.parquet")
    for name in ("q2_sessions", "q2_pairs", "q2", "q3_views", "q3", "q4_carts"):
        assert result(name, folder).num_rows == 0
    assert rows_of(result("q4", folder), "q4") == [(None, 0, None)]


def test_sums_beyond_64_bits_are_exact(tmp_path: Path) -> None:
    much = 2**62
    lines = [(seq, 102 + seq, 10, seq, 1, much + seq) for seq in range(4)]
    folder = write(tmp_path, [], lines)
    got = result("q15_all", folder)
    assert got.schema.field("sxy").type == pa.decimal128(38, 0)
    row = got.to_pylist()[0]
    assert int(row["sy"]) == 4 * much + 6 and int(row["sxy"]) == sum((102 + x) * (much + x) for x in range(4))
    # The cents grow by 1 a day, which floats of that size cannot tell from no growth.
    assert row["slope"] == 0.01
    assert result("q15", folder).num_rows == 0


def test_a_file_in_another_order_is_sorted_first(tmp_path: Path) -> None:
    rng = random.Random(8)
    clicks = some_clicks(rng, 50)
    mixed = list(clicks)
    rng.shuffle(mixed)
    folder = write(tmp_path, mixed, [])
    assert rows_of(result("q2_sessions", folder, 8), "q2_sessions") == expected(clicks, [])["q2_sessions"]


def test_rows_with_one_number_are_refused(tmp_path: Path) -> None:
    for clicks in ([click(1, 1), click(1, 2)], [click(0, 0), click(5, 2), click(0, 1)]):
        folder = write(tmp_path, clicks, [])
        with pytest.raises(SchemaError, match=r"web_clickstreams\.parquet has seq \d twice"):
            result("q2_sessions", folder, 1)
    with pytest.raises(SchemaError, match="has seq 3 after 4; sort it by seq"):
        list(tpcxbb.in_order([pa.record_batch({"seq": [4]}), pa.record_batch({"seq": [3]})], "x"))


@pytest.mark.parametrize("piece", [1, 2, 65_536])
def test_a_ticket_whose_lines_are_apart_is_refused(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of seq, whatever the order in the file; only of the query that gathers tickets."""
    monkeypatch.setattr(tables, "_PIECE", piece)
    lines = [(seq, 100, 10, ticket, 1, 5) for seq, ticket in enumerate([7, 7, -3, 8, 8])]
    folder = write(tmp_path, [], lines[::-1])
    assert tpcxbb.check(tpcxbb.find("q1"), folder) == 5
    lines.append((9, 100, 10, -3, 2, 5))
    said = "the rows of ss_ticket_number -3 are not adjacent in the order of seq"
    for order in (lines, lines[::-1]):
        write(tmp_path, [], order)
        for name in ("q1", "q1_pairs"):
            with pytest.raises(SchemaError, match=said):
                tpcxbb.check(tpcxbb.find(name), folder)
        assert tpcxbb.check(tpcxbb.find("q15"), folder) == 6


def test_bad_tables_are_named(tmp_path: Path) -> None:
    def spoilt(name: str, change: Any) -> Path:
        folder = write(tmp_path, [click(0, 0)], [(0, 103, 10, 1, 1, 5)])
        file = folder / f"{name}.parquet"
        pq.write_table(change(pq.read_table(file)), file)
        return folder

    def column(name: str, values: Any) -> Any:
        return lambda table: table.set_column(table.schema.get_field_index(name), name, values)

    def run(query: str, folder: Path) -> None:
        result(query, folder)

    with pytest.raises(SchemaError, match=r"web_clickstreams\.parquet has no column 'wcs_user_sk'; it has seq"):
        run("q2", spoilt("web_clickstreams", lambda table: table.drop_columns(["wcs_user_sk"])))
    with pytest.raises(SchemaError, match=r"column 'wcs_item_sk' is string, expected int64"):
        run("q2", spoilt("web_clickstreams", column("wcs_item_sk", pa.array(["one"]))))
    with pytest.raises(SchemaError, match=r"web_clickstreams\.parquet has a null in column 'wcs_click_time_sk'"):
        run("q2", spoilt("web_clickstreams", column("wcs_click_time_sk", pa.array([None], pa.int64()))))
    with pytest.raises(SchemaError, match=r"item\.parquet has i_item_sk 1 twice"):
        run("q1", spoilt("item", lambda table: pa.concat_tables([table, table])))
    with pytest.raises(SchemaError, match=r"web_page\.parquet.*'wp_type' is int64, expected string"):
        run("q4", spoilt("web_page", column("wp_type", pa.array([1, 2, 3, 4]))))
    folder = write(tmp_path, [], [])
    (folder / "item.parquet").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*item\.parquet: .*--input is the folder"):
        run("q1", folder)
    (folder / "store_sales.parquet").write_bytes(b"no parquet, only text")
    write_back = write(tmp_path / "other", [], [])
    (write_back / "store_sales.parquet").write_bytes(b"no parquet, only text")
    with pytest.raises(ConfigError, match=r"store_sales\.parquet is not a Parquet file"):
        run("q1", write_back)
    # Narrower whole numbers fit.
    folder = write(tmp_path, [click(0, 0)], [])
    pq.write_table(
        pq.read_table(folder / "web_clickstreams.parquet").cast(
            pa.schema([(name, pa.int32()) for name in pq.read_schema(folder / "web_clickstreams.parquet").names])
        ),
        folder / "web_clickstreams.parquet",
    )
    assert result("q2_sessions", folder).num_rows == 1


def test_the_page_of_the_input_has_all_of_it(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "tpcxbb.md").read_text(encoding="utf-8")
    for table in (CLICKS, SALES, ITEM, PAGE):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{table.name}.parquet` |"))
        assert set(re.findall(r"`(\w+)`", row.split("|")[2])) - {"order", "dynamic"} == set(table.schema.names)
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert json.loads(example).keys() == PARAMS.keys()
    folder = write(tmp_path / "shop", [], [], json.loads(example))
    for query in tpcxbb.QUERIES.values():
        assert tpcxbb.check(query, folder) == 0
        tpcxbb.pipeline(query, folder)


def test_params_are_read_and_checked(tmp_path: Path) -> None:
    folder = write(tmp_path, [], [])

    def build(query: str, text: str) -> None:
        (folder / "params.json").write_text(text)
        tpcxbb.pipeline(tpcxbb.find(query), folder)

    for query, text, says in [
        ("q2", "[", "is not JSON"),
        ("q2", "[]", "holds a list"),
        ("q2", "{}", "says nothing about session_timeout_s"),
        (
            "q2",
            json.dumps(PARAMS | {"session_timeout_s": -1}),
            "session_timeout_s is -1; expected a whole number of at",
        ),
        ("q2", json.dumps(PARAMS | {"q2_item": "7"}), "q2_item is '7'"),
        ("q1", json.dumps(PARAMS | {"q1_stores": 10}), "q1_stores is 10; expected a list"),
        ("q1", json.dumps(PARAMS | {"q1_categories": [1, True]}), "q1_categories is"),
        ("q3", json.dumps(PARAMS | {"q3_views": 1.5}), "q3_views is 1.5"),
    ]:
        with pytest.raises(ConfigError, match=says):
            build(query, text)
    build("q15", json.dumps({name: value for name, value in PARAMS.items() if name.startswith("q15")}))
    (folder / "params.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*params\.json"):
        tpcxbb.load_params(folder)
    with pytest.raises(ConfigError, match=r"query 'q2_session' is unknown \(did you mean q2_sessions\?\); the queries"):
        tpcxbb.find("q2_session")
    with pytest.raises(ConfigError, match="query 'xyz' is unknown; the queries are q1_pairs, q1, q2_sessions"):
        tpcxbb.find("xyz")


def test_closing_early_stops_the_reading(tmp_path: Path) -> None:
    folder = write(tmp_path, some_clicks(random.Random(5), 1), [])
    rows = 300_000
    [one] = pq.read_table(folder / "web_clickstreams.parquet").to_pylist()
    numbers = np.arange(rows)
    own = {"seq": numbers, "wcs_item_sk": numbers % 100, "wcs_user_sk": numbers % 500}
    clicks = {name: own[name] if name in own else pa.repeat(value, rows) for name, value in one.items()}
    pq.write_table(pa.table(clicks), folder / "web_clickstreams.parquet")
    read: list[int] = []
    out = tpcxbb.run_local(tpcxbb.find("q2_sessions"), folder, batch_rows=1_000, step=read.append, mode="inline")
    assert next(out).num_rows > 0
    out.close()
    assert 0 < read[-1] < rows


@pytest.mark.parametrize("name", ["tables", "steps", "queries", "hosts"])
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"penstock.workloads.tpcxbb.{name}")).failed == 0
