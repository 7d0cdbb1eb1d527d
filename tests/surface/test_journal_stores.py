"""What an engine tells of the steps of its protocol, which are given here by hand."""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import pytest

from penstock.spark._engine.journal import Journal

STAMP = {"generation": 1 << 32, "membership": 0}
DATA = f"data-{1 << 32:020}-{7:020}-"


def made() -> Journal:
    def known(number: int) -> Any:
        return types.SimpleNamespace(slot=number - 1, executor="host/1", pid=40 + number, dismissed=False)

    return Journal("e", {"q": "query", "r": "other"}.get, known)


def call(ticket: int, member: int, query: str = "q", **request: Any) -> dict[str, Any]:
    return {"Call": {"ticket": ticket, "member": member, "query": query, "request": request}}


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", "") == event]


def count(kept: Journal, name: str) -> float:
    return sum(sample.value for sample in kept.counters.samples() if sample.name == name)


def failed(ticket: int, kind: str, message: str = "no route to the store") -> dict[str, Any]:
    return {"Answer": {"ticket": ticket, "answer": {"Err": {"kind": kind, "message": message}}}}


def test_a_member_whose_store_fails_is_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    kept = made()
    kept.step("Begin", [call(1, 2, Write={"stamp": STAMP, "epoch": 7})])
    kept.step(failed(1, "Store"), [])
    [line] = lines(caplog, "storage failed")
    assert (line.query, line.member, line.resident, line.pid) == ("query", 2, 1, 42)
    assert line.levelname == "WARNING" and line.reason == "no route to the store"
    assert count(kept, "penstock_storage_errors_total") == 1
    # What is not the store's is told elsewhere.
    kept.step("Begin", [call(2, 2, Write={"stamp": STAMP, "epoch": 7}), call(3, 2, Release=release(0))])
    for ticket, kind in ((2, "State"), (3, "Store"), (9, "Store")):
        kept.step(failed(ticket, kind), [])
    assert len(lines(caplog, "storage failed")) == 1 and count(kept, "penstock_storage_errors_total") == 1


def test_files_that_are_not_merged_are_told_whatever_it_was(caplog: pytest.LogCaptureFixture) -> None:
    kept = made()
    for ticket, kind in enumerate(["Damaged", "Internal", "Store", "Stale", "Echo", "State"], 1):
        kept.step("Begin", [call(ticket, 2, Merge={"stamp": STAMP, "files": [{"name": "data-1"}]})])
        kept.step(failed(ticket, kind), [])
    told = lines(caplog, "storage failed")
    assert [(line.member, line.reason) for line in told] == [(2, "no route to the store")] * 3
    assert count(kept, "penstock_storage_errors_total") == 3


@pytest.mark.parametrize(
    ("kind", "message", "said"),
    [
        ("User", "fold[1] f: ValueError\n  row: k=S3CRET", "files are not merged: a function raised"),
        ("Data", "agg[1]: k = S3CRET", "files are not merged: their data is refused"),
        ("Internal", "the state of key 'S3CRET' cannot be pickled", "the state of key ..."),
    ],
)
def test_files_that_are_not_merged_are_told_without_their_keys(
    caplog: pytest.LogCaptureFixture, kind: str, message: str, said: str
) -> None:
    kept = made()
    kept.step("Begin", [call(1, 2, Merge={"stamp": STAMP, "files": [{"name": "data-1"}]})])
    kept.step(failed(1, kind, message), [])
    assert [line.reason for line in lines(caplog, "storage failed")] == [said] and "S3CRET" not in caplog.text


def test_what_nobody_waits_for_counts_each_time_and_is_told_ever_more_rarely(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that lets nobody delete: at each batch."""
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    kept, error = made(), OSError("AccessDenied")
    times = []
    for _ in range(2_000):
        caplog.clear()
        kept.aside("q", "deletes", error)
        kept.aside("q", "notes", None)  # it lets everybody write
        times += [now - 1_000 for _ in lines(caplog, "storage failed")]
        now += 1
    assert times == [0, 30, 60, 120, 240, 480, 960, 1560]
    assert count(kept, "penstock_storage_errors_total") == 2_000
    kept.aside("q", "deletes", None)
    caplog.clear()
    kept.aside("q", "deletes", error)
    kept.aside("q", "notes", error)
    told = lines(caplog, "storage failed")
    assert [(line.levelname, line.query) for line in told] == [("WARNING", "query")] * 2
    assert [line.reason for line in told] == [
        "files that nobody needs cannot be deleted: AccessDenied",
        "a note of what the sink gets cannot be written: AccessDenied",
    ]
    # One that is dropped has no series any more.
    kept.aside("dropped", "deletes", error)
    assert count(kept, "penstock_storage_errors_total") == 2_002


def test_a_query_that_is_dropped_meanwhile_has_no_series_any_more() -> None:
    names, droppers = {"q": "query"}, []

    def drop() -> None:
        names.clear()
        kept.forget("q", "query")

    def name_of(query: str) -> str | None:
        name = names.get(query)
        if not droppers:
            droppers.append(threading.Thread(target=drop))
            droppers[0].start()
            droppers[0].join(0.2)
        return name

    kept = Journal("e", name_of, lambda number: pytest.fail("no member is known"))
    kept.aside("q", "deletes", OSError("AccessDenied"))
    droppers[0].join(60)
    assert [sample.labels for sample in kept.counters.samples() if sample.labels.get("query") == "query"] == []


def test_a_store_that_does_not_answer_is_told_with_its_file_and_who_waits_ever_more_rarely(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    kept = made()
    files = [{"name": f"data-{number}"} for number in range(5)]
    claim = {"number": 3}
    kept.step(
        "Begin",
        [
            call(1, 1, Write={"stamp": STAMP, "epoch": 7}),
            call(2, 2, Load={"stamp": STAMP, "claim": claim, "ranges": {}, "files": files}),
            call(3, 2, "r", Merge={"stamp": STAMP, "files": files[:2]}),
            {"WriteManifest": {"ticket": 4, "query": "r", "manifest": {"batch": 7}}},
            {"CreateClaim": {"ticket": 5, "query": "r", "claim": claim}},
            {"ReadClaims": {"ticket": 6, "query": "r"}},
            {"ReadCheckpoint": {"ticket": 7, "query": "r"}},
            call(8, 2, Release=release(0)),
        ],
    )
    now += 29
    kept.waits()
    assert lines(caplog, "storage waits") == []
    now += 1
    kept.waits()
    found = lines(caplog, "storage waits")
    assert [getattr(line, "member", None) for line in found] == [1, 2, 2, None, None, None, None]
    assert [line.query for line in found] == ["query"] * 2 + ["other"] * 5
    assert [line.reason.removeprefix("the store does not answer: ") for line in found] == [
        f"{DATA}... to be written",
        f"claim-{3:020}, ..., data-4 to be read",
        "data-0, data-1 to be merged",
        f"manifest-{7:020}-... to be written",
        f"claim-{3:020} to be written",
        "the list of its files",
        "the list of its files, its claims and manifests",
    ]
    assert all(line.seconds == 30 and line.levelname == "WARNING" for line in found)
    # What has been answered, whose call or member is gone, and whose query is dropped is waited for no more.
    kept.step({"Stored": {"ticket": 6, "outcome": {"Ok": {"NewestClaim": {"number": 3, "nonce": None}}}}}, [])
    kept.step({"MemberLost": {"member": 1, "reason": "killed"}}, [])
    kept.step("Begin", [{"Fail": {"query": "r", "epoch": 7, "error": "Closed"}}])
    times = []
    for _ in range(4_000):
        now += 1
        caplog.clear()
        kept.waits()
        times += [(line.seconds, line.member) for line in lines(caplog, "storage waits")]
    assert [when for when, member in times if member == 2][::2] == [
        60,
        120,
        240,
        480,
        960,
        1560,
        2160,
        2760,
        3360,
        3960,
    ]
    assert {member for _, member in times} == {2}
    kept.step("Begin", [{"Dropped": {"query": "q", "outcome": {"Ok": None}}}])
    kept.step("Begin", [{"Dropped": {"query": "r", "outcome": {"Ok": None}}}])
    assert kept._asked == {}


def release(clock_ms: int) -> dict[str, Any]:
    return {"stamp": STAMP, "epoch": 7, "clock_ms": clock_ms}


def test_a_clock_that_has_gone_back_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = made()
    ahead = 4_102_444_800_000  # the year 2100
    for asked, runs in (
        (ahead, ahead),
        (ahead - 60_000, ahead),
        (1_700_000_000_000, ahead),
        (1_700_000_060_000, ahead),
    ):
        kept.step({"Batch": {"query": "q", "epoch": 7, "clock_ms": asked, "committed": 6}}, [])
        kept.step("Begin", [call(1, member, Release=release(runs)) for member in (1, 2)])
    [line] = lines(caplog, "clock behind")
    assert line.levelname == "WARNING" and line.batch == 7 and line.seconds == (ahead - 1_700_000_000_000) / 1e3
    assert "Spark's time of the batch is 2023-11-14 22:13:20+00:00" in line.reason
    assert (
        "that of the last one was 2100-01-01 00:00:00+00:00" in line.reason and "Set the driver's clock" in line.reason
    )
    # Again when it was right in between.
    for asked in (ahead + 1, 1_700_000_000_000):
        kept.step({"Finish": {"query": "q", "clock_ms": asked, "committed": 6}}, [])
        kept.step("Begin", [call(2, 1, Release=release(ahead + 1))])
    assert len(lines(caplog, "clock behind")) == 2
