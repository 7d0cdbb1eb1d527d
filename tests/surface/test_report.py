"""The report: quantiles against a naive twin, the JSON form, the picture, a page that fetches nothing."""

from __future__ import annotations

import html
import html.parser
import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import errors
from penstock._durations import duration_text
from penstock.cli import main
from penstock.report import Change, Check, Epoch, Migration, Slice, Timeline, WorkerSample, page
from penstock.report._html import save_page
from penstock.report._timeline import joined, per_worker, quantiles, size_text, thinned

T0 = 1_700_000_000.0


def sample() -> Timeline:
    """Ten seconds, two workers, one migration in which slices are a hundred times slower."""
    timeline = Timeline(title="a <run> & more", conditions={"cores": "2", "<b>": "&"})
    for index in range(100):
        at = T0 + index / 10
        moving = 40 <= index < 60
        timeline.slices.append(Slice(at, 100_000_000 if moving else 1_000_000, 10))
        for worker in (0, 1):
            timeline.workers.append(WorkerSample(at, worker, 128, index, index * 64, index * 5, "q"))
    for index in range(5):
        timeline.epochs.append(Epoch(index, T0 + 2 * index, 0.5, 200, "q"))
    timeline.migrations.append(Migration(T0 + 3.9, T0 + 6.0, "batched", 64, 4096, 4, "q"))
    return timeline


def changed() -> Timeline:
    """The same, with a worker that dies and one that comes."""
    timeline = sample()
    timeline.changes += [
        Change(T0 + 7.0, T0 + 8.2, "lost", 2, 2),
        Change(T0 + 8.6, T0 + 9.0, "rescale", 2, 3, 170),
    ]
    return timeline


def long(epochs: int, workers: int = 4) -> Timeline:
    """A run of an epoch a second, as long as it takes; the one in the middle takes half a minute."""
    timeline = Timeline(title="long")
    timeline.epochs += [Epoch(at, T0 + at, 0.4, 100, "q", 0.1, 0.1, 0.1, 0.1, 0.3) for at in range(epochs)]
    timeline.epochs[epochs // 2] = replace(timeline.epochs[epochs // 2], seconds=30.0, run_s=29.7)
    timeline.slices += [Slice(T0 + at + 0.25, 1_000_000 + at, 100) for at in range(epochs)]
    # Each at a moment of its own.
    timeline.workers += [
        WorkerSample(T0 + at + worker / workers, worker, 1, 1, 100, 25 * at)
        for at in range(epochs)
        for worker in range(workers)
    ]
    return timeline


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 9)), min_size=1, max_size=40),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
)
def test_quantiles_are_those_of_the_repeated_values(pairs: list[tuple[int, int]], shares: list[float]) -> None:
    repeated = sorted(value for value, weight in pairs for _ in range(weight))
    expected = []
    for share in shares:
        needed = next(n for n in range(1, len(repeated) + 1) if n >= share * len(repeated))
        expected.append(repeated[needed - 1])
    assert quantiles(pairs, shares) == expected


def test_quantiles_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing"):
        quantiles([], [0.5])


def test_an_empty_slice_is_seen() -> None:
    assert quantiles([(7, 0)], [0.5]) == [7]


def test_latency_separates_resting_from_migrating() -> None:
    latency = sample().latency_ns((0.5, 1.0))
    assert latency == {"resting": [1_000_000, 1_000_000], "migrating": [100_000_000, 100_000_000], "changing": []}
    timeline = sample()
    timeline.migrations.clear()
    assert timeline.latency_ns()["migrating"] == []


def test_workers_that_come_and_go_are_neither_resting_nor_migrating() -> None:
    timeline = sample()
    timeline.changes.append(Change(T0 + 4.1, T0 + 8.2, "lost", 2, 2))
    latency = timeline.latency_ns((0.0, 1.0))
    assert latency["changing"] == [1_000_000, 100_000_000]
    assert timeline.epoch_seconds("q") == {"resting": [0.5, 0.5], "migrating": [], "changing": [0.5, 0.5, 0.5]}
    timeline.epochs.append(Epoch(9, T0 + 8.1, 3.0, 10, "other"))
    hit = timeline.hit(timeline.changes[0])
    assert hit is not None and hit.epoch == 9
    # Who waits for a batch waits for Spark's share of it, too.
    timeline.epochs.append(Epoch(10, T0 + 8.1, 1.0, 10, "other", spark_s=2.5))
    hit = timeline.hit(timeline.changes[0])
    assert hit is not None and hit.epoch == 10
    assert f">{duration_text(3.5)}</td></tr>" in page(timeline)
    assert timeline.hit(Change(T0 + 20, T0 + 21, "lost", 2, 2)) is None


#: Times that meet one another, also in single moments.
times = st.integers(0, 12).map(float)
spans = st.lists(st.tuples(times, times), max_size=8)


@given(spans, spans, spans)
def test_what_went_on_meanwhile_is_found_as_by_a_look_at_everything(
    slices: list[tuple[float, float]], moves: list[tuple[float, float]], changes: list[tuple[float, float]]
) -> None:
    """That look took a minute for a run of some hours with a migration now and then."""
    timeline = Timeline()
    timeline.slices += [Slice(T0 + max(one), round(abs(one[1] - one[0]) * 1e9), 1) for one in slices]
    timeline.epochs += [Epoch(0, T0 + min(one), abs(one[1] - one[0]), 1, "q") for one in slices]
    # An end before its begin is what a clock makes that is set back.
    timeline.migrations += [Migration(T0 + begin, T0 + end, "fluid", 1, 1, 1) for begin, end in moves]
    timeline.changes += [Change(T0 + begin, T0 + end, "lost", 2, 2) for begin, end in changes]
    expected: dict[str, list[float]] = {"resting": [], "migrating": [], "changing": []}
    for one in slices:
        begin, end = min(one), max(one)
        kinds = (("changing", changes), ("migrating", moves))
        found = [kind for kind, all_ in kinds if any(since < end and begin < until for since, until in all_)]
        expected[[*found, "resting"][0]].append(end - begin)
    assert timeline.epoch_seconds("q") == expected
    latency = timeline.latency_ns((1.0,))
    assert latency == {name: [round(max(own) * 1e9)] if own else [] for name, own in expected.items()}
    for window in timeline.windows(2.0):
        begin, end = window.started - T0, window.started - T0 + 2.0
        assert window.migrating == any(since < end and begin < until for since, until in moves)


def test_thinned_samples_are_those_of_fewer_moments_and_of_all_queries() -> None:
    def at(moment: float, worker: int, query: str) -> WorkerSample:
        return WorkerSample(moment, worker, 4, 1, 10, 100, query)

    # Two queries of one member, one of which begins later; workers of others are told of at other moments.
    samples = [
        at(moment + delay, worker, query)
        for moment in range(100)
        for worker, delay, queries in ((0, 0.0, "ab"), (1, 0.1, "ab"), (2, 0.2, "c"))
        for query in queries
        if query != "b" or moment > 30
    ]
    found = thinned(samples)
    assert found == [one for one in samples if one in found] and found[0] == samples[0]
    assert 0.45 * len(samples) < len(found) < 0.55 * len(samples)
    for worker, own in per_worker(found).items():
        alone = 10 if worker == 2 else 20
        assert all(one.state_bytes == alone for one in own if one.at > 31), "queries stay together"
        assert max(after.at - before.at for before, after in pairwise(own)) < 4
    # A query on two members of one worker's number is not left out for another one.
    both = [at(moment + 0.5 * (query == "b"), 0, query) for moment in range(100) for query in "ab"]
    assert Counter(one.query for one in thinned(both)).most_common()[-1][1] >= 45
    assert thinned([]) == [] and thinned(samples[:1] * 3) == samples[:1] * 3


def test_windows_cover_every_slice_once_and_know_the_migration() -> None:
    timeline = sample()
    windows = timeline.windows(0.5)
    assert sum(window.rows for window in windows) == sum(s.rows for s in timeline.slices)
    assert max(w.max_ns for w in windows if not w.migrating) == 1_000_000
    assert max(w.p50_ns for w in windows if w.migrating) == 100_000_000
    assert Timeline().windows() == []


def test_workers_add_up_over_queries_at_equal_moments() -> None:
    both = [WorkerSample(T0, 0, 1, 2, 3, 4, query) for query in "ab"] + [WorkerSample(T0, 1, 9, 9, 9, 9)]
    summed = per_worker(both)
    assert [(s.bins, s.keys, s.state_bytes, s.rows) for s in summed[0]] == [(2, 4, 6, 8)]
    assert len(summed[1]) == 1
    again = WorkerSample(T0, 0, 5, 5, 5, 5, "b")
    assert [(s.bins, s.rows) for s in per_worker([*both, again])[0]] == [(6, 9)], "the later of a query replaces"


def test_rows_of_a_query_that_begins_again_are_not_counted_twice() -> None:
    samples = [WorkerSample(T0 + at, 0, 1, 1, 1, 10 * (at + 1), "a") for at in range(4)]
    samples += [WorkerSample(T0 + at, 0, 1, 1, 1, 100 + at, "b") for at in (0, 3)]
    assert [s.rows for s in per_worker(samples)[0]] == [110, 120, 130, 143]


def test_one_move_of_two_queries_is_one_migration_in_the_picture() -> None:
    moves = [
        Migration(T0 + 5, T0 + 6, "batched", 8, 80, 4, "a"),
        Migration(T0 + 1, T0 + 2, "all-at-once", 1, 10, 1, "a"),
        Migration(T0 + 1.5, T0 + 3, "all-at-once", 2, 20, 2, "b"),
        Migration(T0 + 5.5, T0 + 7, "all-at-once", 4, 40, 1, "b"),
        Migration(T0 + 7.4, T0 + 8, "all-at-once", 5, 50, 1, "a"),
        Migration(T0 + 8.4, T0 + 9, "all-at-once", 6, 60, 1, "a"),
    ]
    assert joined(moves) == [
        Migration(T0 + 1, T0 + 3, "all-at-once", 3, 30, 2, "a, b"),
        Migration(T0 + 5, T0 + 6, "batched", 8, 80, 4, "a"),
        Migration(T0 + 5.5, T0 + 8, "all-at-once", 9, 90, 1, "b, a"),
        Migration(T0 + 8.4, T0 + 9, "all-at-once", 6, 60, 1, "a"),
    ]


def test_the_epochs_of_however_many_queries_are_in_the_picture() -> None:
    queries = [f"q{number:02}" for number in range(12)]
    run = Timeline(epochs=[Epoch(at, T0 + at, 0.5, 10, query) for at in range(3) for query in queries])
    assert [query for query in queries if f"epoch of {query}" not in page(run)] == []


def test_a_part_of_a_run_begins_at_its_moment() -> None:
    timeline = sample()
    begin = timeline.span[0]
    assert timeline.since(begin) == timeline and timeline.since(timeline.span[1] + 1).span == (0.0, 0.0)
    late = timeline.since(begin + 3)
    assert late.epochs == [e for e in timeline.epochs if e.started >= begin + 3] != timeline.epochs
    assert 0 < len(late.slices) < len(timeline.slices) and late.span[0] >= begin + 3


def test_json_keeps_everything() -> None:
    timeline = changed()
    assert Timeline.from_json(timeline.to_json()) == timeline
    # Those of earlier releases have no changes.
    older = json.loads(timeline.to_json())
    del older["changes"]
    assert Timeline.from_json(json.dumps(older)) == sample()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 2}', '{"format": 1, "title": "x", "epochs": [{}]}']
)
def test_what_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="timeline"):
        Timeline.from_json(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "1"}, "timeline of format '1'; this release reads 1"),
        ({"format": True}, "timeline of format True; this release reads 1"),
        ({"title": 5}, "not a timeline: 'title' is 5, not text"),
        ({"title": None}, "not a timeline: 'title' is None, not text"),
        ({"conditions": [["a", 1]]}, "not a timeline: 'conditions' is .*, not an object"),
        ({"epochs": "abc"}, "not a timeline: 'epochs' is 'abc', not a list"),
        ({"workers": {}}, "not a timeline: 'workers' is {}, not a list"),
        ({"epochs": [7]}, r"not a timeline: epochs\[0\] is 7, not an object"),
        ({"slices": [{"latency_ns": 10**400}]}, r"latency_ns of a Slice is 1000.*, not int of 64 bits \(slices\[1\]\)"),
        ({"slices": [{"rows": 1 << 63}]}, "rows of a Slice is 9223372036854775808, not int of 64 bits"),
        ({"slices": [{"ended": 10**400}]}, "ended of a Slice is 1000.*, not a finite number"),
        ({"slices": [{"ended": "now"}]}, "ended of a Slice is 'now', not a finite number"),
        ({"slices": [{"more": 1}]}, "more of a Slice is unknown"),
        ({"slices": [{"rows": ...}]}, "rows of a Slice is missing"),
        ({"checks": [{"what": "w", "passed": 1, "detail": ""}]}, "passed of a Check is 1, not true or false"),
        (
            {"slices": [{"ended": 0}]},
            r"from 0 to 1700000000, in seconds since 1970, it is over ten years; one of these moments is wrong",
        ),
        ({"slices": [{"latency_ns": 1 << 62}]}, "from -2.*, it is over ten years"),
        ({"slices": [{"ended": -1e20}]}, r"ended of a Slice is -1e\+20, not seconds since 1970 until the year 9999"),
        ({"slices": [{"ended": 253402300800}]}, "ended of a Slice is 253402300800, not seconds since 1970"),
        (
            {"epochs": [{"epoch": 1, "started": T0, "seconds": 1e300, "rows": 1}]},
            r"seconds of a Epoch is 1e\+300, over",
        ),
        ({"title": "a\ud800"}, r"'title' is 'a\\ud800', which UTF-8 cannot hold"),
        ({"conditions": {"\udc00": "b"}}, r"'conditions' has '\\udc00': 'b', which UTF-8 cannot hold"),
        ({"checks": [{"what": "\ud800", "passed": True, "detail": ""}]}, r"what of a Check is '\\ud800', which UTF-8"),
    ],
)
def test_a_damaged_timeline_is_refused_with_the_field(changes: dict[str, Any], says: str) -> None:
    good = {"ended": T0, "latency_ns": 1, "rows": 1}
    document = json.loads(Timeline().to_json()) | changes
    if "slices" in changes:
        damaged = {name: value for name, value in (good | changes["slices"][0]).items() if value is not ...}
        document["slices"] = [good, damaged]
    with pytest.raises(ValueError, match=says) as caught:
        Timeline.from_json(json.dumps(document))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        # Of rates a point a second was made, since 1970.
        ({"workers": [WorkerSample(at, 0, 1, 1, 1, 1) for at in (0.0, T0)]}, "it is over ten years"),
        ({"epochs": [Epoch(0, -1e20, 1.0, 1)]}, "started of a Epoch is -1e+20"),
        ({"title": "a\ud800"}, "'title' is 'a\\ud800'"),
    ],
)
def test_a_report_of_a_damaged_timeline_is_one_line(
    changes: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "timeline.json"
    kept.write_text(replace(Timeline(), **changes).to_json())
    assert main(["report", str(kept)]) == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


def test_units() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 3_400_000, 5e9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "3.4 MB",
        "5 GB",
    ]
    # Never an exponent, also where three digits round up.
    assert [size_text(n) for n in (999, 999_400, 999_600, 999.6e6, 1.25e12)] == [
        "999 B",
        "999 kB",
        "1 MB",
        "1 GB",
        "1,250 GB",
    ]


class _Page(html.parser.HTMLParser):
    """Collects what a browser would fetch, checks that tags close, and keeps the text."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in {"script", "link", "iframe", "object"}:
            self.fetched.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "xlink:href"} and not str(value).startswith(("#", "data:")):
                self.fetched.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    run = changed()
    run.checks = [Check("counts", True, "10 = 10"), Check("<hot>", False, "a & b")]
    assert Timeline.from_json(run.to_json()).checks == run.since(0.0).checks == run.checks
    save_page(run, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    parsed = _Page()
    parsed.feed(text)
    parsed.close()
    assert parsed.open == []
    assert parsed.fetched == []
    assert not re.search(r"url\((?!#)|@import", text)
    shown = " ".join(parsed.text)
    for expected in (
        "a <run> & more",
        "counts: holds.",
        "<hot>: FAILS.",
        "to another worker while rows",
        "batched",
        "64 bins",
        "Workers that died: 1; the batch that was hit took 500 ms.",
        "The number of workers went from 2 to 3.",
        "from 2 to 3 workers",
    ):
        assert expected in shown


@pytest.mark.parametrize("name", ["price in $ and US$", r"a $\foo{$ b"])
def test_dollars_in_names_are_dollars(name: str) -> None:
    """They are mathematics to matplotlib, or an error."""
    from penstock.report._plot import latency_png, latency_svg

    run = changed()
    run.title = name
    run.epochs = [replace(epoch, query=name, feed_s=0.1) for epoch in run.epochs]
    run.migrations = [replace(move, query=name, strategy=name) for move in run.migrations]
    assert name in page(run)
    # Above the picture, in the label of a migration, at an axis and in a legend.
    shown = re.findall(r">([^<>]*)</text>", latency_svg(run))
    assert {name, f"a batch of {name}", f"epoch of {name}"} <= set(shown) and shown.count(name) == 2
    assert latency_png(run).startswith(b"\x89PNG")


def test_a_page_of_what_is_no_timeline_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"made of a Timeline, .*not of 'timeline\.json'"):
        page("timeline.json")  # type: ignore[arg-type]


def test_the_page_of_nothing_is_a_page() -> None:
    assert "penstock run" in page(Timeline())


def test_without_matplotlib_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    text = page(sample())
    assert "<svg" not in text
    assert "matplotlib is not installed (pip install &#x27;matplotlib&gt;=" in text


@pytest.mark.parametrize("where", ["penstock.report._plot.draw", "penstock.report._style.encode"])
def test_a_matplotlib_that_fails_costs_the_picture_alone(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import penstock.report._plot

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to <initialise>\nthe backend")

    monkeypatch.setattr(penstock.report._plot, where.rpartition(".")[2], fails)
    why = "matplotlib fails here: RuntimeError: Failed to <initialise> the backend"
    text = page(sample())
    assert "<svg" not in text and f"No picture: {html.escape(why)}." in text and "64" in text
    kept, made = tmp_path / "timeline.json", tmp_path / "report.html"
    kept.write_text(sample().to_json())
    assert main(["report", str(kept)]) == 0
    assert capsys.readouterr() == (f"wrote {made}\n", f"penstock: no picture in {made}: {why}\n")
    assert made.read_text() == text
    picture = tmp_path / "run.png"
    assert main(["report", str(kept), "--picture", str(picture)]) == 1
    assert capsys.readouterr().err == f"penstock: --picture {picture}: {why}\n"
    assert sorted(tmp_path.iterdir()) == [made, kept]


def test_a_backend_that_is_none_costs_the_picture_alone() -> None:
    work = (
        "import sys\n"
        "from penstock.report import Timeline, page\n"
        "sys.exit('No picture: matplotlib fails here: ValueError: ' not in page(Timeline()))\n"
    )
    environment = os.environ | {"MPLBACKEND": "nope"}
    assert subprocess.run([sys.executable, "-c", work], env=environment, timeout=60).returncode == 0


def test_the_picture_is_a_png_of_the_whole_run() -> None:
    from penstock.report._plot import draw, latency_png

    figure = draw(sample())
    latency = figure.axes[0]
    assert latency.get_yscale() == "log"
    assert [text.get_text().splitlines()[0] for text in latency.texts] == ["batched"]
    assert figure.axes[-1].get_xlim()[1] == pytest.approx(9.9, abs=0.2)
    named = [text.get_text().splitlines() for text in draw(changed()).axes[0].texts]
    assert named == [
        ["batched", "64 bins, 4.1 kB", "2.1 s, 4 steps"],
        ["a worker died", "replaced in 1.2 s", "batch hit: 500 ms"],
        ["2 → 3 workers", "170 bins", "400 ms"],
    ]
    content = latency_png(sample())
    assert content.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert height > 600
    assert latency_png(Timeline()).startswith(b"\x89PNG")


def test_the_json_form_is_one_object_with_a_version() -> None:
    assert json.loads(sample().to_json())["format"] == 1


def test_rates_are_right_though_workers_are_sampled_at_different_moments() -> None:
    from penstock.report._plot import draw

    timeline = Timeline()
    for index in range(40):
        for worker in (0, 1):
            at = T0 + index / 4 + worker * 0.001
            timeline.workers.append(WorkerSample(at, worker, 1, 1, 1, index * 250 * (worker + 1)))
    rows = draw(timeline).axes[1]
    assert rows.get_ylim()[1] == pytest.approx(3000, rel=0.1)
    # What workers had counted before a part of a run begins is no rate of it.
    part = draw(timeline.since(T0 + 5.0005)).axes[1]
    assert part.get_ylim()[1] == pytest.approx(3000, rel=0.1)


def test_rows_per_second_of_two_queries_say_so() -> None:
    """The same rows count in each of them."""
    from penstock.report._plot import draw

    run = sample()
    assert ">rows per second<" in page(run) and draw(run).axes[1].get_ylabel() == "rows/s"
    run.epochs += [replace(epoch, query="other") for epoch in run.epochs]
    run.workers += [replace(one, query="other") for one in run.workers]
    assert ">input rows of 2 queries<" in page(run) and ">rows per second of 2 queries<" in page(run)
    assert draw(run).axes[1].get_ylabel() == "rows/s\nof 2 queries"


def test_no_worker_is_gone_between_its_own_samples() -> None:
    """Those of a long run lie apart further than a worker may be silent that was asked four times a second."""
    from penstock.report._plot import draw

    samples = [
        WorkerSample(T0 + at / 4 + worker / 16, worker, 1, 1, 100, at)
        for at in range(6_000)
        for worker in range(4)
        # One is dead for five minutes.
        if worker != 3 or not 2_400 <= at < 3_600
    ]
    run = Timeline(workers=thinned(thinned(thinned(samples))))
    assert len(run.workers) == pytest.approx(len(samples) / 8, rel=0.05)
    for part in (run, run.since(T0 + 1_000)):
        top = draw(part).axes[-1].collections[3].get_paths()[0].vertices
        begin, end = part.span[0] - T0, part.span[1] - T0
        while_dead, alive = set(), set()
        for x, height in ((x + begin, y) for x, y in top.tolist()):
            if 610 < x < 890:
                while_dead.add(height)
            elif begin + 10 < x < end and not 590 <= x <= 910:
                alive.add(height)
        # The upper edge of what the last one holds, and the lower one.
        assert alive == {400.0, 300.0} and while_dead == ({300.0} if part is run else set())


def test_a_page_is_as_large_as_what_can_be_seen() -> None:
    """It had each epoch, window of a quarter of a second and sample of a run: 15 MB of an hour and a half."""
    from penstock.report._plot import draw

    run = long(12_000)
    run.migrations = [Migration(T0 + 10 * at, T0 + 10 * at + 1 + at / 1e4, "fluid", 1, 1, 1) for at in range(1_200)]
    text = page(run)
    assert len(text) < 3_000_000
    assert "<h2>Epochs, the 1,000 longest of 12,000</h2>" in text and "<summary>1,000 epochs</summary>" in text
    # The long one among them, in order of time.
    told = text[text.index("<h2>Epochs") :]
    assert told.count("<tr>") == 1_001 and f">{duration_text(30.3)}<" in told
    at = [int(epoch) for epoch in re.findall(r'<td class="t">q</td><td>(\d+)</td>', told)]
    assert at == sorted(at) and 6_000 in at
    assert "<h2>Migrations, the 1,000 longest of 1,200</h2>" in text
    # And in the picture, which says what it leaves out.
    parts, latency, *_ = draw(run).axes
    assert parts.get_ylabel() == "a batch of q,\nlongest per 12 s" and parts.get_ylim()[1] > 30
    lines = {line.get_label(): line for line in latency.lines}
    assert "p99 of slices per 12 s" in lines
    assert max(lines["epoch of q, longest per 12 s"].get_ydata()) == 30_000
    assert all(len(line.get_xdata()) <= 1_010 for line in lines.values())


def test_of_many_migrations_some_are_named_and_all_are_seen() -> None:
    """Labels stood above each other without end, and edges of the marks hid what the panels show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from penstock.report._plot import draw

    heights = []
    for count in (2, 1_000):
        run = long(600)
        run.migrations = [Migration(T0 + 0.6 * at, T0 + 0.6 * at + 0.01, "fluid", 1, 1, 1) for at in range(count)]
        run.changes = [Change(T0 + 300, T0 + 302, "lost", 4, 4)]
        figure = draw(run)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        axes = figure.axes[0]
        boxes = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
        assert not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[:index])
        named = [text.get_text().splitlines()[0] for text in axes.texts]
        assert named.count("a worker died") == 1
        heights.append(axes.get_window_extent().height)
        if count == 2:
            assert len(named) == 3
        else:
            assert 20 < len(named) < 100 and named[-1] == f"and {count + 1 - (len(named) - 1):,} more without a label"
            # Bands of their colour, from the first to the last, in each panel; the worker that died keeps its edges.
            for panel in figure.axes:
                bands = [patch.get_extents().transformed(panel.transData.inverted()) for patch in panel.patches]
                assert len(bands) < 310 and min(band.x0 for band in bands) == pytest.approx(0, abs=1)
                assert {300.0, 302.0} <= {line.get_xdata()[0] for line in panel.lines}
    assert heights[1] > 0.9 * heights[0], "labels leave panels their height"
