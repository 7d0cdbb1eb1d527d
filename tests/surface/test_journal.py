"""Log lines of an engine, from the steps of its protocol, without Spark."""

from __future__ import annotations

import doctest
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from penstock._functions.calls import user_error
from penstock.errors import EngineError, SchemaError, StateError, UserFunctionError
from penstock.spark._engine import journal as journal_module
from penstock.spark._engine.journal import FIELDS, Journal


@dataclass
class Known:
    slot: int
    executor: str = "host/1"
    pid: int = 17


#: What a line is asked for here.
SHOWN = ("query", "generation", "members", "batch", "bins", "steps", "workers", "member", "claim", "reason")
OF_Q = {"query": "people's", "generation": 5, "members": 2, "batch": 3}


@pytest.fixture
def journal() -> Iterator[Journal]:
    """Of an engine whose query q has two members and is in its batch 3."""
    journal = Journal("e", {"q": "people's"}.get, lambda number: Known(number - 1))
    for member in (1, 2):
        journal.step({"MemberUp": {"member": member, "slot": member - 1}}, [])
    journal.batch_begun("q", 3)
    start = {"rank": 0, "stamp": {"generation": 5}, "members": [1, 2], "threads": 2, "epoch": 3}
    journal.step("Begin", [{"Call": {"query": "q", "request": {"Start": start}}}])
    yield journal


@pytest.fixture
def lines(journal: Journal, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "penstock")
    return caplog


def told(lines: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Event and fields of each line since the last call."""
    found = []
    for record in lines.records:
        assert {name for name in vars(record) if name in FIELDS} >= {"event", "engine"}
        fields = {name: vars(record)[name] for name in SHOWN if name in vars(record)}
        found.append({"event": vars(record)["event"], **fields})
    lines.clear()
    return found


@pytest.mark.parametrize(
    ("wish", "kind"),
    [
        ("Even", "migration"),
        ({"To": [0, 1]}, "migration"),
        ({"Moves": [[[0, 4], 1]]}, "migration"),
        ({"Recut": {"Split": {"ranges": [[0, 4]], "by": 2}}}, "split"),
        ({"Recut": {"Merge": {"ranges": [[0, 4]]}}}, "merge"),
    ],
)
def test_what_moves_is_told_by_its_kind(
    journal: Journal, lines: pytest.LogCaptureFixture, wish: Any, kind: str
) -> None:
    asked = [{"query": "q", "handle": handle, "wish": wish} for handle in (7, 8)]
    journal.step({"Migrate": {"moves": asked}}, [{"Moving": {"handle": 7, "ranges": 4}}])
    journal.step("Begin", [{"Moved": {"handle": 7, "outcome": {"Ok": 2}}}])
    journal.step("Begin", [{"Moved": {"handle": 8, "outcome": {"Err": "Closed"}, "text": "it closes"}}])
    assert told(lines) == [
        {"event": f"{kind} begun", **OF_Q, "bins": 4},
        {"event": f"{kind} done", **OF_Q, "bins": 4, "steps": 2},
        {"event": f"{kind} failed", **OF_Q, "reason": "it closes"},
    ]


@pytest.mark.parametrize("kind", ["migration", "split"])
def test_what_a_function_cut_off_is_told_without_its_rows(
    journal: Journal, lines: pytest.LogCaptureFixture, kind: str
) -> None:
    why = "map[1] f: ValueError: no S3CRET (job.py:3)\n  row: k=S3CRET"
    text = f"the migration was cut off: {why}"
    wish = "Even" if kind == "migration" else {"Recut": {"Split": {"ranges": [[0, 4]], "by": 2}}}
    moving = {"Moving": {"handle": 7, "ranges": 4}}
    journal.step({"Migrate": {"moves": [{"query": "q", "handle": 7, "wish": wish}]}}, [moving])
    journal.step("Begin", [{"Moved": {"handle": 7, "outcome": {"Err": {"CutOff": why}}, "text": text}}])
    journal.unbalanced(EngineError(f"query q: {text}; engine.owners() says where its bins are"))
    journal.unbalanced(FAILED)
    assert "S3CRET" not in lines.text
    assert told(lines)[1:] == [
        {"event": f"{kind} failed", **OF_Q, "bins": 4, "reason": "cut off: its batch broke off"},
        {"event": "balance failed", "members": 2, "reason": "EngineError: query q: cut off: its batch broke off"},
        {
            "event": "balance failed",
            "members": 2,
            "reason": f"UserFunctionError: stateful_map[1] f: ValueError ({__file__}:{FAILED.line})",
        },
    ]


def test_examples_run() -> None:
    assert doctest.testmod(journal_module).failed == 0


def test_lines_of_members_and_of_the_engine_say_how_many_serve(
    journal: Journal, lines: pytest.LogCaptureFixture
) -> None:
    spare = {"Dismiss": {"member": 4, "why": "Spare"}}
    journal.step({"Rescale": {"handle": 1, "workers": 3, "free": 4}}, [])
    journal.step({"MemberUp": {"member": 3, "slot": 2}}, [])
    journal.step({"MemberUp": {"member": 4, "slot": 2}}, [spare])
    journal.step("Begin", [{"Rescaled": {"handle": 1, "outcome": {"Ok": 3}, "moved": 6}}])
    journal.step({"Leaving": {"member": 1}}, [])
    journal.step({"MemberLost": {"member": 1, "reason": "died"}}, [])
    journal.step({"MemberUp": {"member": 5, "slot": 0}}, [])
    journal.step("Begin", [{"Rescaled": {"handle": 2, "outcome": {"Err": "NoSlots"}, "text": "none", "moved": 0}}])
    assert told(lines) == [
        {"event": "rescale begun", "members": 2, "workers": 3},
        {"event": "member joined", "members": 3, "member": 3},
        {"event": "member sent away", "members": 3, "member": 4, "reason": "Spare"},
        {"event": "rescale done", "members": 3, "bins": 6, "workers": 3},
        {"event": "member leaves", "members": 3, "member": 1, "reason": "Spark decommissions its executor"},
        {"event": "member lost", "members": 2, "member": 1, "reason": "died"},
        {"event": "member replaced", "members": 3, "member": 5},
        {"event": "rescale failed", "members": 3, "reason": "none"},
    ]


def lost_and_replaced(journal: Journal) -> tuple[float, ...]:
    counted = {sample.name: sample.value for sample in journal.counters.samples()}
    return tuple(counted[f"penstock_members_{what}_total"] for what in ("lost", "replaced"))


def test_a_place_that_is_given_up_waits_for_nobody(journal: Journal, lines: pytest.LogCaptureFixture) -> None:
    """A member is killed, and a rescale gives its place up before there is another; or it was to go anyway."""
    start, retire = {"StartResident": {"slot": 1}}, {"RetireResident": {"slot": 1}}
    journal.step({"MemberLost": {"member": 2, "reason": "died"}}, [start])
    assert lost_and_replaced(journal) == (1, 0)
    journal.step({"Rescale": {"handle": 1, "workers": 1, "free": 4}}, [retire])
    assert lost_and_replaced(journal) == (1, 1)
    # Who comes to that slot later is in nobody's place.
    journal.step({"Rescale": {"handle": 2, "workers": 2, "free": 4}}, [start])
    journal.step({"MemberUp": {"member": 2, "slot": 1}}, [])
    journal.step({"Rescale": {"handle": 3, "workers": 1, "free": 4}}, [])
    journal.step({"MemberLost": {"member": 2, "reason": "died"}}, [retire])
    assert lost_and_replaced(journal) == (2, 2)
    assert [one["event"] for one in told(lines)] == [
        "member lost", "rescale begun", "rescale begun", "member joined", "rescale begun", "member lost",
    ]  # fmt: skip


def test_who_dies_before_it_serves_is_replaced_too(journal: Journal) -> None:
    for member in (2, 2):
        journal.step({"MemberLost": {"member": member, "reason": "died"}}, [])
    journal.step({"MemberUp": {"member": 4, "slot": 1}}, [])
    assert lost_and_replaced(journal) == (2, 2)


@pytest.mark.parametrize("first", [False, True])
def test_who_is_lost_while_its_executor_goes_is_replaced_in_another_slot(
    journal: Journal, lines: pytest.LogCaptureFixture, first: bool
) -> None:
    """Before there is somebody in its place, or after."""
    comes: Any = {"MemberUp": {"member": 3, "slot": 2}}
    journal.step({"Leaving": {"member": 2}}, [{"StartResident": {"slot": 2}}])
    if first:
        journal.step(comes, [])
    journal.step({"MemberLost": {"member": 2, "reason": "died"}}, [{"RetireResident": {"slot": 1}}])
    assert lost_and_replaced(journal) == (1, int(first))
    if not first:
        journal.step(comes, [])
    assert lost_and_replaced(journal) == (1, 1)
    events = ["member leaves", "member joined", "member lost", "member replaced"]
    replaced = {"event": "member replaced", "members": 2, "member": 3}
    said = told(lines)
    assert [one["event"] for one in said] == [one for one in events if first or one != "member joined"]
    assert said[-1] == replaced
    # One more whose executor goes, and in whose place nobody is wanted in the end.
    journal.step({"Leaving": {"member": 3}}, [{"StartResident": {"slot": 1}}])
    journal.step({"Rescale": {"handle": 1, "workers": 1, "free": 4}}, [{"RetireResident": {"slot": 1}}])
    journal.step({"MemberLost": {"member": 3, "reason": "died"}}, [{"RetireResident": {"slot": 2}}])
    assert lost_and_replaced(journal) == (2, 2)


def test_what_storage_says_has_the_batch(journal: Journal, lines: pytest.LogCaptureFixture) -> None:
    claim, manifest = {"number": 9}, {"batch": 2, "claim": 9, "files": [1, 2]}
    asks = [
        {"CreateClaim": {"ticket": 1, "query": "q", "claim": claim}},
        {"CreateClaim": {"ticket": 2, "query": "q", "claim": claim}},
        {"ReadClaims": {"ticket": 3, "query": "q"}},
        {"WriteManifest": {"ticket": 4, "query": "q", "manifest": manifest}},
        {"WriteManifest": {"ticket": 5, "query": "q", "manifest": manifest}},
    ]
    outcomes = [
        {"Ok": {"Claimed": True}},
        {"Ok": {"Claimed": False}},
        {"Err": {"Unavailable": "x"}},
        {"Ok": "Written"},
        {"Err": {"Unavailable": "y"}},
    ]
    journal.step("Begin", asks)
    for ticket, outcome in enumerate(outcomes, 1):
        journal.step({"Stored": {"ticket": ticket, "outcome": outcome}}, [])
    assert told(lines) == [
        {"event": "claim made", **OF_Q, "claim": 9},
        {"event": "claim refused", **OF_Q, "claim": 9},
        {"event": "storage failed", **OF_Q, "reason": "x"},
        {"event": "manifest written", **OF_Q, "batch": 2, "claim": 9},
        {"event": "storage failed", **OF_Q, "batch": 2, "claim": 9, "reason": "y"},
    ]


def test_what_autobalance_does_has_fields(journal: Journal, lines: pytest.LogCaptureFixture) -> None:
    facts = {"bins": 3, "workers": None, "skew": 1.6, "expected": 1.1, "splits": "0/2", "merges": None, "reason": "r"}
    journal.balanced("q", False, **facts)
    journal.balanced("q", True, **facts)
    journal.unbalanced(ValueError("no"))
    assert "skew=1.600 expected=1.100 splits=0/2 reason=r" in lines.text
    assert told(lines) == [
        {"event": "balanced", **OF_Q, "bins": 3, "reason": "r"},
        {"event": "balance advised", **OF_Q, "bins": 3, "reason": "r"},
        {"event": "balance failed", "members": 2, "reason": "ValueError: no"},
    ]


def test_what_nobody_takes_or_keeps_is_a_warning(journal: Journal, lines: pytest.LogCaptureFixture) -> None:
    journal.late("q", 3, 17)
    journal.in_memory("a new one")
    assert [record.levelname for record in lines.records] == ["WARNING"] * 2
    assert "batch=3 rows=17" in lines.text
    reason = "no checkpointLocation: its state lives only as long as this engine and its workers"
    assert told(lines) == [
        {"event": "rows late", **OF_Q},
        {"event": "state in memory", "query": "a new one", "reason": reason},
    ]


#: Of a function that has quoted a value, with the row that it failed at.
FAILED = user_error("stateful_map[1] f", lambda: 0, ValueError("no S3CRET"), {"v": "S3CRET"}, ("S3CRET",), ["k"])
FAILED.__cause__ = ValueError("no S3CRET")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FAILED, f"stateful_map[1] f: ValueError ({__file__}:{FAILED.line})"),
        (UserFunctionError("map[1] f: the function returned 'S3CRET'", step="map[1] f"), "map[1] f"),
        (SchemaError("join[1]: two with the key k = S3CRET", key="k = S3CRET"), "join[1]: two with the key ..."),
        (SchemaError("window[1]: event time 9100 is too far", value=9100), "window[1]: event time ... is too far"),
        (
            SchemaError("agg[1]: the sum in column 's' of k = \"S3CRET\" overflows int64; make"),
            "agg[1]: the sum in column 's' of ... overflows int64; make",
        ),
        (SchemaError("agg[1]: the sum in column 's' overflows"), "agg[1]: the sum in column 's' overflows"),
        (StateError("the state of key 'S3CRET' cannot be pickled"), "the state of key ..."),
        (ValueError("what a sink says"), "what a sink says"),
    ],
)
def test_why_a_batch_failed_is_told_without_its_rows(
    journal: Journal, lines: pytest.LogCaptureFixture, error: Exception, said: str
) -> None:
    before = str(error)
    journal.batch_failed("q", 3, 0.1, error, stopped=False)
    assert "S3CRET" not in lines.text and "9100" not in lines.text
    [line] = told(lines)
    assert line["event"] == "batch failed" and str(error) == before
    assert line["reason"] == f"{type(error).__name__}: {said}"


def test_a_query_that_is_dropped_is_forgotten(journal: Journal, lines: pytest.LogCaptureFixture) -> None:
    journal.forget("q", "people's")
    journal.batch_begun("q", 0)
    assert told(lines) == [{"event": "batch begun", "query": "people's", "batch": 0}]


def test_a_query_that_is_refused_before_it_is_one_has_no_series_of_its_own(
    journal: Journal, lines: pytest.LogCaptureFixture
) -> None:
    """Each start of a query without a name has an id of its own, and no series of it would ever go."""
    before = len(list(journal.counters.samples()))
    for number in range(100):
        journal.batch_failed(f"id {number}", 0, 0.1, ValueError("no"), stopped=False)
    journal.batch_failed("id 100", 0, 0.1, ValueError("no"), stopped=False, name="mine")
    found = [one for one in journal.counters.samples() if one.name == "penstock_batches_total"]
    failed = {one.labels["query"]: one.value for one in found if one.labels["outcome"] == "failed"}
    assert (failed[""], failed["mine"]) == (100, 1)
    assert len(list(journal.counters.samples())) < before + 10
    assert [line["query"] for line in told(lines)][-2:] == ["id 99", "mine"]


def test_refused_connections_are_told_ever_more_rarely(
    journal: Journal, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A health check of a load balancer made a line a second, for as long as the engine lived."""
    now, count = 1_000.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journal.examined(0)
    told_at: list[tuple[float, int]] = []
    for _ in range(4 * 3_600):
        now, count = now + 1.0, count + 2
        journal.refused(partial(dict, accepted=9, refused_secret=count, refused_slow=0))
        told_at += [(now - 1_000, vars(record)["connections"]) for record in lines.records]
        lines.clear()
    times = [at for at, _ in told_at]
    assert times[:5] == [1, 31, 61, 121, 241] and len(times) < 35
    assert sum(connections for _, connections in told_at) > 0.9 * count
    # Who comes after a long silence is told at once.
    now += 3_000
    journal.refused(lambda: {"refused_secret": count})
    now += 1
    journal.refused(lambda: {"refused_secret": count + 1})
    assert [vars(record)["connections"] for record in lines.records][-1] == 1


@pytest.mark.parametrize("name", ["e\udc80", "a\u202eb", "a\u2066b"])
def test_a_line_can_be_written_whatever_people_called_it(name: str) -> None:
    text = str(journal_module._Line({"event": "batch failed", "query": name}))
    assert text.encode() and json.loads(text.partition("query=")[2]) == name and not set(name[1:2]) & set(text)
