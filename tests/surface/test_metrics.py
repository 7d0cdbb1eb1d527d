"""The port of an engine's figures and their format, without Spark."""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_support import refuses, wait_for
from metrics_support import parse
from penstock.errors import ConfigError
from penstock.report._timeline import per_worker
from penstock.spark._engine import record, scrape
from penstock.spark._engine.journal import FIELDS, tell
from penstock.spark._engine.metrics import CONTENT_TYPE, FAMILIES, Counters, Family, Sample, page
from penstock.spark._engine.record import Recorder
from penstock.spark._engine.scrape import Scrape, parse_address


@given(st.text(), st.text(), st.floats(0, allow_nan=False))
def test_labels_of_any_text_come_back(engine: str, query: str, value: float) -> None:
    text = page(engine, [Sample("penstock_rows_total", {"query": query}, value)])
    assert text.encode()
    [(name, labels, read)] = parse(text)[1]
    plain = {label: one.encode("utf-8", "replace").decode() for label, one in (("engine", engine), ("query", query))}
    assert (name, labels) == ("penstock_rows_total", plain) and read == value


@given(st.lists(st.floats(0, 1e4), min_size=1))
def test_a_histogram_adds_up(values: list[float]) -> None:
    counters = Counters()
    for value in values:
        counters.observe("penstock_batch_seconds", "q", value=value)
    kinds, samples = parse(page("e", counters.samples()))
    assert kinds == {"penstock_batch_seconds": "histogram"}
    buckets = [(float(labels["le"]), count) for name, labels, count in samples if name.endswith("_bucket")]
    assert buckets == [(bound, sum(value <= bound for value in values)) for bound, _ in buckets]
    assert buckets[-1] == (float("inf"), len(values))
    told = {name: value for name, labels, value in samples if "le" not in labels}
    assert told["penstock_batch_seconds_count"] == len(values)
    assert told["penstock_batch_seconds_sum"] == pytest.approx(sum(values))


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_names_are_as_prometheus_wants_them(name: str, family: Family) -> None:
    assert re.fullmatch(r"penstock_[a-z_]+", name)
    assert name.endswith("_total") == (family.kind == "counter")
    assert family.help.endswith(".") and "\n" not in family.help
    assert not set(family.labels) & {"engine", "le"}
    units = [unit for unit in ("seconds", "bytes") if f"_{unit}" in name]
    assert all(name.removesuffix("_total").endswith(unit) for unit in units), "the unit ends the name"


def test_a_query_that_is_dropped_is_told_of_no_more() -> None:
    counters = Counters()
    for query in ("a", "b"):
        counters.add("penstock_batches_total", query, "committed")
        counters.observe("penstock_batch_seconds", query, value=1.0)
    counters.add("penstock_rescales_total", "a")
    counters.forget("a")
    left = {(sample.name, sample.labels.get("query"), sample.labels.get("outcome")) for sample in counters.samples()}
    assert ("penstock_batches_total", "b", "committed") in left and ("penstock_rescales_total", None, "a") in left
    assert not [one for one in left if one[1] == "a"]


@pytest.mark.parametrize(
    "wrong", ["", "9464", ":9464", "host:", "host:x", "host:65536", "a b:1", "::1:80", 9464, b"h:1"]
)
def test_an_address_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"metrics={wrong!r} must be")):
        parse_address(wrong)


@pytest.fixture
def served() -> Iterator[Scrape]:
    one = Scrape("127.0.0.1", 0, "test", lambda: page("e", [Sample("penstock_workers", {}, 2)]))
    yield one
    one.close()


def ask(address: str, path: str = "/metrics", method: str = "GET") -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path)
    response = connection.getresponse()
    return response, response.read()


def test_metrics_are_answered_and_nothing_else(served: Scrape) -> None:
    response, body = ask(served.address)
    assert response.status == 200 and response.getheader("Content-Type") == CONTENT_TYPE
    assert parse(body.decode())[1] == [("penstock_workers", {"engine": "e"}, 2.0)]
    head, nothing = ask(served.address, method="HEAD")
    assert head.status == 200 and nothing == b"" and head.getheader("Content-Length") == str(len(body))
    assert ask(served.address, "/metrics?name=x")[0].status == 200
    assert ask(served.address, "/")[0].status == 404
    assert ask(served.address, method="POST")[0].status == 501
    assert [one.name for one in threading.enumerate() if one.name.startswith("penstock-metrics")]
    served.close()
    assert refuses(served.address)
    assert not [one.name for one in threading.enumerate() if one.name.startswith("penstock-metrics")]


def test_who_says_nothing_is_cut_and_crowds_nobody_out(served: Scrape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_PATIENCE_S", 0.5)
    host, _, port = served.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(3 * scrape._MOST)]
    for one in silent:
        one.settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert one.recv(1) == b"", "closed, without an answer"
        one.close()
    wait_for(lambda: not served._server._since)
    monkeypatch.setattr(scrape, "_PATIENCE_S", 60.0)
    assert ask(served.address)[0].status == 200


def test_who_asks_is_answered_though_others_say_nothing(served: Scrape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_PATIENCE_S", 600.0)
    host, _, port = served.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(scrape._MOST)]
    wait_for(lambda: len(served._server._since) == scrape._MOST)
    assert [ask(served.address)[0].status for _ in range(3)] == [200, 200, 200]
    for one in silent:
        one.close()


def test_a_page_that_cannot_be_made_is_said_and_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text() -> str:
        raise KeyError("S3CRET")

    def told() -> list[logging.LogRecord]:
        return [line for line in caplog.records if (line.name, line.levelno) == (scrape.__name__, logging.ERROR)]

    one = Scrape("127.0.0.1", 0, "test", text)
    try:
        for _ in range(3):
            response, body = ask(one.address)
            assert (response.status, body) == (500, b"the figures cannot be told: KeyError, see the log\n")
        [record] = told()
        assert record.getMessage() == "the page of metrics cannot be made" and record.exc_info
        monkeypatch.setattr(scrape, "_AGAIN_S", 0.0)
        ask(one.address)
        assert len(told()) == 2
    finally:
        one.close()


def test_a_drop_by_drop_request_is_cut(served: Scrape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_PATIENCE_S", 0.5)
    host, _, port = served.address.rpartition(":")
    with socket.create_connection((host, int(port))) as slow:
        began = time.monotonic()
        with pytest.raises(OSError, match=r".*"):
            while time.monotonic() - began < 60:
                slow.sendall(b"G")
                slow.settimeout(0.05)
                try:
                    if slow.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    continue


def test_two_cannot_serve_one_port(served: Scrape) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 127\.0\.0\.1"):
        Scrape(*parse_address(served.address), "other", lambda: "")


def test_a_line_has_its_fields_as_attributes_and_as_text(caplog: pytest.LogCaptureFixture) -> None:
    to = logging.getLogger("penstock.test")
    with caplog.at_level(logging.INFO, "penstock"):
        tell(to, logging.INFO, "batch committed", query='my "q"\n', batch=3, seconds=0.5, reason=None, member="x" * 999)
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith('batch committed query="my \\"q\\"\\n" batch=3 seconds=0.500 member=x') and "\n" not in text
    assert len(text) < 600
    assert record.event == "batch committed" and record.batch == 3 and record.query == 'my "q"\n'  # type: ignore[attr-defined]
    assert not hasattr(record, "reason")
    plain = logging.LogRecord("", 0, "", 0, "", None, None)
    assert not [name for name in FIELDS if hasattr(plain, name) or name in ("message", "asctime", "taskName")]


def test_processes_are_told_without_a_query() -> None:
    """From the time that they serve; of a second attempt beside one that serves nothing."""
    there: list[Any] = []
    hub: Any = SimpleNamespace(listen=lambda **_: None, members=lambda: there)
    recorder = Recorder(hub, "record", {}.get)
    assert recorder.samples() == []
    for number, slot in ((3, 1), (4, 0), (5, 1)):
        member = SimpleNamespace(id=number, slot=slot, process={}, lost=None)
        there.append(member)
        process = {"rss_bytes": number * 100, "staging": {"memory_bytes": 7, "disk_bytes": 0}, "refused_connections": 2}
        body = {"process": process, "queries": {}}
        recorder._take(SimpleNamespace(lost=None, failure=None, member=member, body=body))  # type: ignore[arg-type]
    there.append(SimpleNamespace(id=6, slot=2, process={}))
    told = {(one.name, *one.labels.values()): one.value for one in recorder.samples()}
    assert told == {
        ("penstock_member_memory_bytes", "0"): 400,
        ("penstock_member_memory_bytes", "1"): 300,
        **{("penstock_staged_bytes", slot): 7 for slot in "01"},
        **{("penstock_staged_disk_bytes", slot): 0 for slot in "01"},
        ("penstock_member_refused_connections_total", "0", "4"): 2,
        ("penstock_member_refused_connections_total", "1", "3"): 2,
    }


def test_an_answer_that_was_long_under_way_takes_nothing_back() -> None:
    recorder = Recorder(SimpleNamespace(listen=lambda **_: None), "record", {"q": "query"}.get)  # type: ignore[arg-type]
    member = SimpleNamespace(id=1, slot=0, executor="0", pid=1, process={}, lost=None)

    def told(generation: int, rows: int) -> int:
        figures = {"worker": 0, "bins": [4], "keys": rows, "state_bytes": 0, "rows": rows, "late_rows": 0, "epochs": 1}
        group = {"workers": [figures], "slices": [], "moves": []}
        body = {"queries": {"q": {"generation": generation, "group": group}}}
        recorder._take(SimpleNamespace(lost=None, failure=None, member=member, body=body))  # type: ignore[arg-type]
        [row] = recorder.latest()
        return int(row["rows"])

    assert [told(1, 10), told(2, 3), told(1, 10), told(2, 5)] == [10, 13, 13, 15]


def test_samples_reach_back_to_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of many workers were of the last hour, beside slices of many."""
    monkeypatch.setattr(record, "_SAMPLES", 200)
    monkeypatch.setattr(record, "_MOVES", 3)
    now = 0.0
    monkeypatch.setattr(record, "time", SimpleNamespace(time=lambda: now))
    recorder = Recorder(SimpleNamespace(listen=lambda **_: None), "record", {"q": "query"}.get)  # type: ignore[arg-type]
    members = [SimpleNamespace(id=one, slot=one, executor="0", pid=1, process={}, lost=None) for one in range(4)]
    for moment in range(1_000):
        now = 0.25 * moment
        for member in members:
            counts = {"keys": 1, "state_bytes": 1, "rows": moment, "late_rows": 0, "epochs": 1}
            move = {"op": 0, "worker": 1, "bin": moment, "what": "state", "bytes": 7, "at_ns": 5, "routed_rows": 9}
            group = {"workers": [{"worker": member.id, "bins": [4], **counts}], "slices": [], "moves": [move]}
            body = {"queries": {"q": {"generation": 1, "group": group}}}
            recorder._take(SimpleNamespace(lost=None, failure=None, member=member, body=body))  # type: ignore[arg-type]
    lanes = per_worker(recorder.timeline({}).workers)
    assert 100 <= sum(map(len, lanes.values())) <= 200 and len(lanes) == 4
    for lane in lanes.values():
        assert (lane[0].rows, lane[-1].rows) == (0, 999)
        gaps = [after.at - before.at for before, after in pairwise(lane)]
        assert max(gaps) < 250 / 4, "no part of the run is left out"
    # The log of moves is as it was told.
    told = {"query": "query", "op": 0, "worker": 1, "bin": 999, "what": "state", "bytes": 7, "at": 5, "routed_rows": 9}
    assert recorder.moves() == [told] * 3


def test_figures_of_workers_that_are_gone_are_not_told_as_present() -> None:
    hears: dict[str, Any] = {}
    hub: Any = SimpleNamespace(listen=lambda **them: hears.update(them), members=list)
    recorder = Recorder(hub, "record", {"q": "query", "p": "other"}.get)
    members = [
        SimpleNamespace(id=number, slot=number % 2, executor="0", pid=number, process={}, lost=None)
        for number in range(2)
    ]

    def tell(member: int, of: str | None = None, generation: int = 1, **rows: int) -> None:
        queries = {}
        for query, count in rows.items():
            counts = {"keys": count, "state_bytes": 9, "rows": count, "late_rows": 1, "epochs": 1}
            group = {"workers": [{"worker": member % 2, "bins": [4], **counts}], "slices": [], "moves": []}
            queries[query] = {"generation": generation, "group": group}
        body = {"queries": queries}
        call: Any = SimpleNamespace(lost=None, failure=None, member=members[member], body=body)
        recorder._take(call, of)

    def told() -> dict[tuple[str, int], tuple[int, int]]:
        rows = {(row["query"], row["worker"]): (row["member"], row["rows"]) for row in recorder.latest()}
        keys = [one for one in recorder.samples() if one.name == "penstock_keys"]
        assert [(one.labels["query"], one.labels["worker"]) for one in keys] == [(q, str(w)) for q, w in rows]
        return rows

    for member in (0, 1):
        tell(member, q=10, p=20)
    assert len(told()) == 4
    # Who is asked of one query tells of that alone.
    tell(0, "q", q=11)
    assert told()["other", 0] == (0, 20) and told()["query", 0] == (0, 11)
    # One that is finished is not in an answer any more, or there without workers.
    tell(0, "q")
    tell(1, p=20)
    assert told() == {("other", 0): (0, 20), ("other", 1): (1, 20)}
    # A member that has died is gone at once, also where its last answer is taken in behind that.
    members[1].lost = "its connection ended"
    hears["lost"](members[1])
    assert told() == {("other", 0): (0, 20)}
    tell(1, p=21)
    assert told() == {("other", 0): (0, 20)}
    # The one that takes its place counts on.
    members[1] = SimpleNamespace(id=3, slot=1, executor="0", pid=3, process={}, lost=None)
    tell(0, generation=2, p=1)
    tell(1, generation=2, p=2)
    assert told() == {("other", 0): (0, 21), ("other", 1): (3, 23)}
    assert [row["late_rows"] for row in recorder.latest()] == [2, 2]


class Walking(Recorder):
    """Finds what a member told of last by a walk over all workers."""

    @property  # type: ignore[override]
    def _told(self) -> dict[int, set[tuple[str, int]]]:
        told: dict[int, set[tuple[str, int]]] = {}
        for key, entry in self._latest.items():
            told.setdefault(entry["member"], set()).add(key)
        return told

    @_told.setter
    def _told(self, told: Any) -> None: ...

    def _unsay(self, key: tuple[str, int], member: int) -> None: ...


def body_of(workers: Iterable[int], *queries: str, generation: int = 1, rows: int = 1) -> dict[str, Any]:
    """What a member answers that has these workers in each of some queries."""
    counts = {"bins": [4], "keys": 1, "state_bytes": 9, "rows": rows, "late_rows": 0, "epochs": 1}
    group = {"workers": [{"worker": worker, **counts} for worker in workers], "slices": [], "moves": []}
    return {"queries": {query: {"generation": generation, "group": group} for query in queries}}


#: What happens to one of three slots: its member answers with some workers in some queries, perhaps of a later
#: generation, or for one query alone; is lost, and answers still; another one comes. Or a query is forgotten.
answers = st.tuples(
    st.just("answer"), st.integers(0, 2), st.sets(st.integers(0, 3)), st.sets(st.sampled_from("pq")), st.booleans()
)
told_of = st.one_of(
    answers,
    answers,
    st.tuples(st.sampled_from(["lost", "comes"]), st.integers(0, 2)),
    st.tuples(st.just("forget"), st.sampled_from("pq")),
    st.tuples(st.just("of"), st.integers(0, 2), st.sets(st.integers(0, 3)), st.sampled_from("pq")),
)


@given(st.lists(told_of, max_size=40))
def test_what_members_told_is_as_a_walk_over_all_workers_finds_it(steps: list[tuple[Any, ...]]) -> None:
    hub: Any = SimpleNamespace(listen=lambda **_: None, members=list)
    both = [kind(hub, "record", {"p": "p", "q": "q"}.get) for kind in (Recorder, Walking)]
    members: list[Any] = []

    def comes(number: int, slot: int) -> Any:
        return SimpleNamespace(id=number, slot=slot, executor="0", pid=number, process={}, lost=None)

    members = [comes(slot, slot) for slot in range(3)]
    generation = 1
    for at, (what, *about) in enumerate(steps):
        if what == "forget":
            for one in both:
                one.forget(about[0])
            continue
        member = members[about[0]]
        if what == "comes":
            members[about[0]] = comes(10 + at, about[0])
        elif what == "lost":
            member.lost = "its connection ended"
            for one in both:
                one._lost(member)
        else:
            generation += what == "answer" and about[3]
            body = body_of(about[1], *about[2], generation=generation, rows=at)
            for one in both:
                call: Any = SimpleNamespace(lost=None, failure=None, member=member, body=body)
                one._take(call, about[2] if what == "of" else None)
        fast, naive = both
        assert fast._told == naive._told and fast._ended == naive._ended
        shown = [[{**row, "at": 0} for row in one.latest()] for one in both]
        assert shown[0] == shown[1]


def test_an_answer_of_a_member_is_taken_in_by_a_look_at_its_own_workers() -> None:
    """A walk over those of all took the members squared, several times a second."""
    looks = 0

    class Latest(dict[Any, Any]):
        def get(self, *about: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().get(*about)

        def items(self) -> Any:
            nonlocal looks
            looks += len(self)
            return super().items()

        def __iter__(self) -> Any:
            nonlocal looks
            looks += len(self)
            return super().__iter__()

    recorder = Recorder(SimpleNamespace(listen=lambda **_: None), "record", {"q": "q"}.get)  # type: ignore[arg-type]
    recorder._latest = Latest()
    for number in range(300):
        member = SimpleNamespace(id=number, slot=number, executor="0", pid=1, process={}, lost=None)
        before = looks
        for _ in range(2):
            body = body_of([number], "q")
            recorder._take(SimpleNamespace(lost=None, failure=None, member=member, body=body))  # type: ignore[arg-type]
        recorder._lost(member)  # type: ignore[arg-type]
        assert looks - before == 2


def test_what_is_kept_of_members_does_not_grow_with_those_that_came_and_went() -> None:
    recorder = Recorder(SimpleNamespace(listen=lambda **_: None), "record", {"q": "q"}.get)  # type: ignore[arg-type]
    for number in range(100):
        member = SimpleNamespace(id=number, slot=number % 2, executor="0", pid=1, process={}, lost=None)
        call: Any = SimpleNamespace(lost=None, failure=None, member=member, body=body_of([number % 2], "q"))
        recorder._take(call)
        recorder._lost(member)  # type: ignore[arg-type]
    assert recorder._told == {98: {("q", 0)}, 99: {("q", 1)}} and len(recorder._latest) == 2
    recorder.forget("q")
    assert recorder._told == recorder._latest == {} and recorder._ended == set()


def test_workers_of_a_query_that_is_busy_are_there_still() -> None:
    """Its next generation loads functions, say. They were gone until it told again."""
    hub: Any = SimpleNamespace(listen=lambda **_: None, members=list)
    recorder = Recorder(hub, "record", {"q": "query", "p": "other"}.get)
    member = SimpleNamespace(id=1, slot=0, executor="0", pid=1, process={}, lost=None)

    def told(**queries: dict[str, Any]) -> dict[str, int]:
        call: Any = SimpleNamespace(lost=None, failure=None, member=member, body={"queries": queries})
        recorder._take(call)
        keys = [one.labels["query"] for one in recorder.samples() if one.name == "penstock_keys"]
        rows = {str(row["query"]): int(row["rows"]) for row in recorder.latest()}
        assert keys == sorted(rows)
        return rows

    def of(rows: int) -> dict[str, Any]:
        counts = {"keys": rows, "state_bytes": 9, "rows": rows, "late_rows": 0, "epochs": 1}
        group = {"workers": [{"worker": 0, "bins": [4], **counts}], "slices": [], "moves": []}
        return {"generation": 1, "group": group}

    busy = {"busy": True}
    assert told(q=of(10), p=of(20)) == {"query": 10, "other": 20}
    assert told(q=busy, p=of(21)) == {"query": 10, "other": 21}
    assert told(q=busy) == {"query": 10}
    # One whose workers have ended has none, whatever keeps it busy then.
    assert told(p=busy) == told(q=busy, p=busy) == {}
    assert told(q=of(11), p=busy) == {"query": 11}


def test_a_generation_that_ended_and_the_next_in_one_answer_are_one_sample() -> None:
    """With the state of the one and the rows of both: two samples of one moment were added up."""
    recorder = Recorder(SimpleNamespace(listen=lambda **_: None), "record", {"q": "query"}.get)  # type: ignore[arg-type]
    member = SimpleNamespace(id=1, slot=0, executor="0", pid=1, process={}, lost=None)

    def of(generation: int, rows: int) -> dict[str, Any]:
        counts = {"keys": rows, "state_bytes": 100, "rows": rows, "late_rows": 0, "epochs": 1}
        group = {"workers": [{"worker": 0, "bins": [4], **counts}], "slices": [], "moves": []}
        return {"generation": generation, "group": group}

    for told in ({"ended": [of(1, 10)], **of(2, 3)}, {"ended": [of(2, 5)]}):
        body = {"queries": {"q": told}}
        recorder._take(SimpleNamespace(lost=None, failure=None, member=member, body=body))  # type: ignore[arg-type]
    samples = recorder.timeline({}).workers
    assert [(one.bins, one.keys, one.state_bytes, one.rows) for one in samples] == [(4, 3, 100, 13), (4, 5, 100, 15)]
    assert [one.state_bytes for one in per_worker(samples)[0]] == [100, 100]
