"""The benches: shape of a result, direction of a ratio, names, the record and its page."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from penstock._extras import how_to_install
from penstock.cli import main
from penstock.errors import ConfigError, EngineError
from penstock_bench import command, core, machine, record, targets
from penstock_bench.catalogue import BENCHES, find
from penstock_bench.measure import Line, Options, Paired, compare, line
from penstock_bench.pictures import PICTURES, svg
from penstock_bench.show import table

#: Begins a program that uses the benches, as `penstock bench` does.
_IMPORTABLE = f"import sys; sys.path.append({str(core.CHECKOUT / 'benches' / 'python')!r})\n"
KEYS = ["name", "case", "unit", "ours", "peer", "ratio", "ours_range", "peer_range", "conditions"]


def made(name: str = "frontier", case: str = "live=1 vs x", ratio: float = 2.0, **conditions: Any) -> Line:
    return line(name, case, "ns", "lower", Paired([1.0] * 3, [ratio] * 3, 1.0, 0.0), Options(), conditions)


def check(found: Line, name: str) -> None:
    """What every reader of a result relies on."""
    assert list(found) == KEYS
    assert found["name"] == name and " vs " in found["case"] and found["unit"]
    for side in ("ours", "peer"):
        low, high = found[f"{side}_range"]
        assert 0 < low <= found[side] <= high
    conditions = found["conditions"]
    lower = conditions["better"] == "lower"
    ratio = found["peer"] / found["ours"] if lower else found["ours"] / found["peer"]
    assert math.isclose(found["ratio"], ratio, rel_tol=1e-9)
    assert conditions["versions"]["penstock"] and conditions["cores"] >= 1 and conditions["repeats"] >= 1
    assert conditions["profile"] in ("release", "setup", "dev") and isinstance(conditions["quick"], bool)
    assert {"cpu", "load", "foreign_cpu", "own_cpu", "stolen_cpu", "pinned", "at", "commit"} <= set(conditions)
    assert isinstance(conditions["noisy"], bool) and conditions["pairs_again"] >= 0


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Line]:
    assert main(["bench", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    found = [json.loads(text) for text in captured.out.splitlines()]
    assert found, captured.err
    for one in found:
        check(one, arguments[0])
    return found


def test_above_one_is_better_for_times_and_for_rates() -> None:
    paired = Paired([1.0, 2.0, 9.0], [8.0, 5.0, 6.0])
    time_line = line("b", "c", "s", "lower", paired, Options(), {})
    rate_line = line("b", "c", "M/s", "higher", paired, Options(), {})
    assert (time_line["ours"], time_line["peer"], time_line["ratio"]) == (2.0, 6.0, 3.0)
    assert rate_line["ratio"] == 2.0 / 6.0
    assert time_line["ours_range"] == [1.0, 9.0] and time_line["conditions"]["paired_ratio_range"] == [6 / 9, 8.0]


def test_own_conditions_and_versions_stand_beside_the_common_ones() -> None:
    found = made(rows=7, versions={"spark": "4"})["conditions"]
    assert found["rows"] == 7 and found["versions"]["spark"] == "4" and found["versions"]["pyarrow"]


def test_both_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return 1.0

    paired = compare(0.0, lambda: side("o"), lambda: side("p"))
    assert len(paired.ours) == len(paired.peer) == 3
    assert "".join(order) == "opoppoop"
    order.clear()
    compare(0.0, lambda: side("o"), lambda: side("p"), warm=0, least=1)
    assert "".join(order) == "op"


def test_the_budget_ends_the_repeats() -> None:
    assert Options(seconds=6).budget(3, quick=1, full=2) == 2
    assert Options(quick=True).budget(4, quick=20, full=90) == 5
    assert Options().budget(0, quick=20, full=90) == 90

    def spin() -> float:
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        return 1.0

    paired = compare(0.2, spin, spin)
    assert 3 <= len(paired.ours) <= 50


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell")
def test_work_of_children_is_own_work() -> None:
    """Half a second of work in a child counts as ours while it runs, and after it has ended."""
    program = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    before = machine._tree_seconds()
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        running = machine._tree_seconds()
        child.stdin.close()
        child.wait()
        after = machine._tree_seconds()
    assert before is not None and running is not None and after is not None
    assert running - before > 0.2 and after >= running - 0.05


def test_pinning_ends_with_the_bench() -> None:
    before = machine.cores()
    with machine.pinned(1) as cpus:
        assert len(cpus) == machine.cores() == 1
    assert machine.cores() == before


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench"], ["bench", "--list"]):
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [text.split()[0] for text in lines] == [bench.name for bench in BENCHES]
    assert main(["bench", "--json"]) == 0
    assert [json.loads(text)["name"] for text in capsys.readouterr().out.splitlines()] == [b.name for b in BENCHES]
    assert len({bench.name for bench in BENCHES}) == len(BENCHES)


def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for arguments, says in [
        (["fronter"], "'fronter' is no bench (did you mean frontier?); there are keyed-count, frontier,"),
        (["xyzzy"], "'xyzzy' is no bench; there are"),
        (["frontier", "--seconds", "0"], "--seconds 0"),
        (["frontier", "--seconds", "nan"], "--seconds nan"),
        (["frontier", "--seconds", "many"], "--seconds"),
        (["frontier", "--all"], "name one bench, or run all"),
        (["frontier", "--again"], "--again goes with --all"),
        (["frontier", "--record", str(tmp_path / "none" / "deeper")], "does not exist; make it first"),
        (["frontier", "--record", str(tmp_path / "file")], "is no folder; name one"),
        (["--all"], "--all needs --record FOLDER"),
        (["--record", str(tmp_path)], "--record: of which bench? Give its name, or --all"),
        (
            ["--quick", "--seconds", "9", "--cores", "1", "--full"],
            "--quick and --full and --seconds and --cores: of which",
        ),
        (["--fewer"], "--fewer: of which bench?"),
        (["frontier", "--fewer"], "--fewer goes with --record"),
        (["frontier", "barrier"], "barrier"),
    ]:
        assert main(["bench", *arguments]) == 2, arguments
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("penstock: ") and captured.err.count("\n") == 1
        assert says in captured.err, arguments


def test_without_a_checkout_it_says_where_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.cli.bench._FOLDER", tmp_path / "none")
    for arguments in ([], ["frontier", "--json"], ["--help"]):
        assert main(["bench", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and "git clone https" in captured.err


def test_help_is_that_of_the_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "--record" in capsys.readouterr().out


def test_without_cargo_a_missing_program_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path))
    monkeypatch.setattr(core.shutil, "which", lambda name: None)
    assert main(["bench", "frontier", "--json"]) == 1
    assert "cargo is not on PATH; get Rust" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_every_bench_of_the_program_is_in_the_catalogue() -> None:
    told = subprocess.run([core.program(print), "--list"], capture_output=True, text=True, check=True).stdout
    assert {text.split("\t")[0] for text in told.splitlines()} <= {b.name for b in BENCHES if b.kind == "core"} | {
        "cliques"
    }


def test_what_is_told_on_the_way_is_written_as_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    command._emit([], as_json=False)(made(ratio=1234.5))
    assert capsys.readouterr().err == "penstock bench: live=1 vs x: 1,234x\n"


@pytest.mark.timeout(600)
def test_a_bench_of_the_core(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path = tmp_path / "results"
    found = measured(capsys, "frontier", "--quick", "--seconds", "0.2", "--record", str(tmp_path))
    assert all(one["conditions"]["quick"] and one["conditions"]["versions"]["timely"] for one in found)
    assert record.read(tmp_path, "frontier") == found
    assert found[0]["case"] in (tmp_path / "README.md").read_text()
    assert main(["bench", "frontier", "--quick", "--seconds", "0.1"]) == 0
    captured = capsys.readouterr()
    assert "ratio" in captured.out and captured.err.count("penstock bench: ") == len(found)


@pytest.mark.timeout(600)
def test_interrupt_ends_the_program() -> None:
    core.program(print)
    command = [sys.executable, "-m", "penstock.cli", "bench", "frontier", "--seconds", "300", "--json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as child:
        deadline = time.monotonic() + 60
        while not (programs := _children(child.pid, "penstock-bench")):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 130 and errors.endswith("penstock: interrupted\n")
    assert not any(Path(f"/proc/{number}").exists() for number in programs)


def test_an_interrupt_while_the_program_starts_leaves_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(core.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core._lines(["sleep", "600"], print, os.environ)
    try:
        assert started[0].poll() is not None
    finally:
        started[0].kill()


#: A bench that has started a process, beside which it ends on an interrupt, or does not.
_BENCH = """
import signal, subprocess, sys
beside = subprocess.Popen(["sleep", "600"])
print(beside.pid, file=open(sys.argv[1], "w"), flush=True)
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    print("ready", file=open(sys.argv[1] + ".ready", "w"), flush=True)
    beside.wait()
finally:
    beside.kill()
"""


def _in_fake_child(monkeypatch: pytest.MonkeyPatch, noted: Path, kind: str) -> Any:
    """`_in_child` of a bench that is that program."""
    from penstock_bench import runner

    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> subprocess.Popen[str]:
        return popen([sys.executable, "-c", _BENCH, str(noted), kind], **options)

    monkeypatch.setattr(runner.subprocess, "Popen", started)
    return runner


def _wait_until(over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not over():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_over(number: int) -> bool:
    """Whether a process has ended, reaped or not: what reaps the processes of others may take its time."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_asks_a_run_of_all_to_end_ends_its_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """And what that has started, which is in no session of ours."""
    runner = _in_fake_child(monkeypatch, tmp_path / "pid", "hears")
    monkeypatch.setattr(core, "program", lambda tell: Path("penstock-bench"))
    monkeypatch.setattr(runner, "_about", lambda: {"commit": None})

    def ask() -> None:
        _wait_until((tmp_path / "pid.ready").exists)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        asking.start()
        with pytest.raises(KeyboardInterrupt):
            runner.run_all(tmp_path, Options(), False, print, print)
        asking.join()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    beside = int((tmp_path / "pid").read_text())
    _wait_until(lambda: _is_over(beside))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_of_all_that_is_ended_says_by_which_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    pytest.importorskip("pyspark")
    from penstock_bench import runner

    if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_DFL:
        pytest.skip(f"{number.name} is not as a command finds it here")
    monkeypatch.setattr(runner, "_run_all", lambda *_: signal.raise_signal(number))
    assert main(["bench", "--all", "--quick", "--record", str(tmp_path)]) == 128 + number


@pytest.mark.parametrize(
    ("number", "heard"),
    [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGHUP, True)],
)
def test_what_asks_to_end_while_a_bench_starts_leaves_no_bench(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, heard: bool
) -> None:
    """Also where nobody hears Ctrl-C, as in the background of a shell."""
    from penstock_bench import runner

    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def asked(command: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(popen(["sleep", "600"], **options))
        signal.raise_signal(number)
        return started[0]

    monkeypatch.setattr(runner.subprocess, "Popen", asked)
    before = signal.getsignal(signal.SIGINT)
    if not heard:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As a command finds them: who runs this may have them ignored.
    rest = {} if number == signal.SIGINT else {number: signal.signal(number, signal.SIG_DFL)}
    try:
        with pytest.raises(KeyboardInterrupt), runner._interrupted_by_all():
            runner._in_child(find("frontier"), Options())
        assert started[0].poll() is not None
    finally:
        signal.signal(signal.SIGINT, before)
        for one, handler in rest.items():
            signal.signal(one, handler)
        started[0].kill()
        started[0].wait()


def test_a_bench_that_takes_too_long_and_does_not_hear_is_killed_with_all_of_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = _in_fake_child(monkeypatch, tmp_path / "pid", "deaf")
    monkeypatch.setattr(runner, "LIMIT_S", 20.0)
    monkeypatch.setattr(runner, "ENDING_S", 0.5)
    with pytest.raises(EngineError, match="did not end within 20 s"):
        runner._in_child(find("frontier"), Options())
    beside = int((tmp_path / "pid").read_text())
    _wait_until(lambda: _is_over(beside))


def _children(parent: int, name: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if name in text.partition(")")[0] and int(text.rpartition(")")[2].split()[1]) == parent:
            found.append(int(path.parent.name))
    return found


def test_targets_are_judged_by_all_that_they_cover() -> None:
    names = {bench.name for bench in BENCHES}
    assert all(target.bench is None or target.bench in names for target in targets.TARGETS)
    goal = targets.Target("w", 2.0, "frontier", r"live=\d+")
    good, bad, other = made(ratio=2.0), made(case="live=9 vs x", ratio=1.9), made(case="width=4 vs x", ratio=1.0)
    assert goal.verdict([good, other]) == "met"
    assert goal.verdict([good, bad]) == "missed"
    assert goal.verdict([other]) == goal.verdict([]) == "not measured"
    assert targets.Target("w", 1.0).verdict([good]) == "not measured"
    idle = targets.Target("w", 2.0, "frontier", of="idle", most=True)
    assert [idle.verdict([made(idle=value)]) for value in (1.9, 2.1)] == ["met", "missed"]
    assert idle.verdict([made()]) == "not measured"
    assert targets.Target("w", 2.0, "frontier", of="ours").verdict([good]) == "missed"
    assert [verdict for _, verdict in targets.judge(made(ratio=0.9))] == ["missed"]


def test_a_quick_run_judges_no_target_and_replaces_no_whole_one(tmp_path: Path) -> None:
    goal = targets.Target("w", 2.0, "frontier", r"live=\d+")
    assert goal.verdict([made(ratio=3.0, quick=True)]) == goal.verdict([made(ratio=1.0, quick=True)]) == "not measured"
    record.write(tmp_path, "frontier", [made(ratio=1.0, quick=True)])
    record.write(tmp_path, "frontier", [made(ratio=3.0)])
    with pytest.raises(ConfigError, match="whole run, which a quick one does not replace"):
        record.write(tmp_path, "frontier", [made(ratio=1.0, quick=True)])
    assert record.read(tmp_path, "frontier")[0]["ratio"] == 3.0
    assert main(["bench", "frontier", "--quick", "--record", str(tmp_path)]) == 1


def test_a_target_beside_the_best_of_some_peers_needs_them_all() -> None:
    goal = targets.Target("w", 2.0, "frontier", " vs ", beside=("Spark", "Flink"))
    spark, flink = made(case="q1 vs Spark", ratio=3.0), made(case="q1 vs Flink", ratio=2.0)
    assert goal.verdict([spark, flink]) == "met"
    assert goal.verdict([spark]) == goal.verdict([]) == "not measured"
    assert goal.verdict([made(case="q1 vs Spark", ratio=1.0)]) == "missed", "whoever else there is"


def test_the_page_says_which_verdicts_come_of_a_machine_that_was_not_quiet(tmp_path: Path) -> None:
    record.write(
        tmp_path, "frontier", [made(ratio=3.0, noisy=True), made(case="live=4096 vs y", ratio=300.0, noisy=False)]
    )
    page = (tmp_path / "README.md").read_text()
    assert "| 3x | **met** (noisy) |" in page and "| 300x | **met** |" in page


def test_figures_of_a_module_of_other_code_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_bench import runner

    monkeypatch.setattr(runner, "_module_is_of_this_code", lambda: False)
    monkeypatch.setattr(runner, "_about", lambda: {"commit": "c0ffee"})
    bench = next(bench for bench in BENCHES if bench.kind == "python")
    found: list[Line] = []
    told: list[str] = []
    module = SimpleNamespace(run=lambda options, emit, tell: emit(made(bench.name)))
    monkeypatch.setattr(runner.importlib, "import_module", lambda name: module)
    runner.run(bench, Options(), found.append, told.append)
    assert found[0]["conditions"]["commit"] == "c0ffee-other-module" and "make release" in told[0]
    assert not runner._same(found[0], "c0ffee", Options())


def test_the_page_shows_losses_and_what_is_missing(tmp_path: Path) -> None:
    record.write(tmp_path, "frontier", [made(ratio=0.5, rows=1), made(case="live=4096 vs a|b", ratio=300.0, rows=2)])
    page = (tmp_path / "README.md").read_text()
    assert "| live=1 vs x | ns | 1 (1) | 0.5 (0.5) | **0.5x** (0.5x) | 3 | >= 1x: missed |" in page
    assert "live=4096 vs a\\|b" in page and ">= 200x: met" in page
    [missing] = [line for line in page.splitlines() if line.startswith("Not recorded here: ")]
    assert missing.count(",") == len(BENCHES) - 2 and "barrier" in missing and "frontier" not in missing
    assert "| frontier move in order, 1 live time | frontier | >= 1x | 0.5x | **missed** |" in page
    assert "- live=1 vs x: rows 1" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "frontier.jsonl"]


def _migration(unit: str, ours: float, **conditions: Any) -> Line:
    told = {"strategy": "fluid", "rest_p999_ms": 0.5, "of_allowed": 0.02}
    found = line("migration", "tcp fluid vs x", unit, "lower", Paired([ours], [40.0]), Options(), told | conditions)
    return dict(found)


def test_a_migration_that_is_not_above_rest_has_no_ratio(tmp_path: Path) -> None:
    """The page and the table say so; a line without a ratio that gives no reason is damaged."""
    nothing = {"no_ratio": "not above rest", "paired_ratio": None, "paired_ratio_range": None}
    quiet = _migration("ms at most", 1.5, **nothing) | {"ratio": None}
    record.write(tmp_path, "migration", [quiet, _migration("ms at most", 5.0)])
    assert record.read(tmp_path, "migration") == json.loads(json.dumps([quiet, _migration("ms at most", 5.0)]))
    page = (tmp_path / "README.md").read_text()
    assert "| 1.5 (1.5) | 40 (40) | **not above rest** | 1 |" in page and "**8x** (8x)" in page
    assert table("migration", [quiet]).columns[4]._cells[0].plain == "not above rest"  # type: ignore[union-attr]
    bare = dict(quiet["conditions"])
    del bare["no_ratio"]
    (tmp_path / "migration.jsonl").write_text(json.dumps(quiet | {"conditions": bare}))
    with pytest.raises(ConfigError, match="does not hold results"):
        record.read(tmp_path, "migration")


def _drawn(name: str) -> list[Line]:
    """Lines as the bench of a curve gives them."""
    two = [(workers, kind) for workers in (1, 2) for kind in ("fixed", "adaptive")]
    if name == "faucet-sensitivity":
        asked = [("B", 4, 10), ("B", 4, 1000), ("N", 1, 1000), ("N", 8, 1000), ("adaptive", 4, 1024), ("none", 0, 0)]
        return [
            made(
                name,
                f"w{w} N={n} B={b} vs x",
                1 + n,
                sweep=s,
                workers=w,
                batches=n,
                batch_size=b,
                peak_mib=2.5,
                edges=9,
            )
            for w in (1, 2)
            for s, n, b in asked
        ]
    if name == "faucet-memory":
        facts = [{"size": size, "edges": edges} for size in (1, 3, 4) for edges in (100, 900)]
        return [made(name, "m vs free", 30.0, workers=w, bounds=kind, **f) for w, kind in two for f in facts]
    if name == "migration":
        curves = {"series": [[0.0, 0.2, 0.3], [0.25, 0.2, 9.0]], "restart_series": [[0.0, 0.2, 0.3], [0.25, 0.4, 90.0]]}
        times = {"duration_s": 0.01, "restart_duration_s": 0.4}
        sizes = [(100, 256, 0.5), (100, 512, 0.5), (100, 64, 0.5), (900, 64, 0.5), (100, 64, 0.25), (100, 64, 0.75)]
        return [
            made(name, f"{t} {s} vs x", 30.0, strategy=s, transport=t, keys=k, bins=b, offered=o, **curves, **times)
            for t in ("threads", "tcp")
            for k, b, o in sizes
            for s in ("all-at-once", "fluid")
        ]
    if name == "join":
        steps = {step: [0.4, 0.6] for step in ("admitted_ms", "built_ms", "bootstrap_ms", "first_record_ms")}
        curves = {"series": [[0.0, 0.2, 0.3], [0.1, 0.2, 9.0]], "events": [["join", 0.05], ["leave", 0.1]]}
        curves["live_counts"] = [[0.0, 12.0], [0.1, 14.0]]
        return [
            made(name, f"{t} {load} vs x", 3.0, part="course", transport=t, load=load, **curves, **steps)
            for t in ("threads", "tcp")
            for load in ("calm", "saturated")
        ]
    if name == "nexmark":
        peers = [("timely", 1), ("timely", 2), ("bytewax", 1), ("Pathway", 2)]
        facts = [{"query": query, "beside": peer, "workers": w} for query in ("q1", "q5_beam") for peer, w in peers]
        return [made(name, f"w{f['workers']} {f['query']} vs {f['beside']}", 12.0, **f) for f in facts]
    ratios = {"time_ratio_min": 0.9, "time_ratio_mean": 1.1, "time_ratio_max": 1.3}
    return [made(name, "o vs free", 0.9, size=3, workers=w, bounds=kind, **ratios) for w, kind in two]


@pytest.mark.parametrize("name", PICTURES)
def test_a_curve_is_drawn_beside_the_page_from_its_lines(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    lines = _drawn(name)
    record.write(tmp_path, name, lines)
    picture = (tmp_path / f"{name}.svg").read_text()
    assert f"]({name}.svg)" in (tmp_path / "README.md").read_text()
    assert picture.startswith("<?xml") and ("threads" in picture or name in ("migration", "join"))
    record.write(tmp_path, "frontier", [made()])
    assert f"]({name}.svg)" in (tmp_path / "README.md").read_text(), "the record of another bench leaves it"
    for less in ([*lines, made(name)], []):
        record.write(tmp_path, name, lines, fewer=True)
        record.write(tmp_path, name, less, fewer=True)
        assert record.read(tmp_path, name) == less, "lines that lack what a picture shows are recorded all the same"
        assert not (tmp_path / f"{name}.svg").exists() and "svg" not in (tmp_path / "README.md").read_text()


def test_equal_lines_are_drawn_equally() -> None:
    pytest.importorskip("matplotlib")
    lines = _drawn("faucet-overhead")
    assert svg("faucet-overhead", lines) == svg("faucet-overhead", json.loads(json.dumps(lines)))
    assert svg("faucet-overhead", lines) != svg("faucet-overhead", lines[1:])


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    record.write(tmp_path, "faucet-memory", _drawn("faucet-memory"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "faucet-memory.jsonl"]
    assert "svg" not in (tmp_path / "README.md").read_text()


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    for text in ("no json", "{}", '{"conditions": 1, "ratio": 2}', '{"conditions": {}, "ratio": 0}'):
        (tmp_path / "frontier.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"frontier\.jsonl does not hold results"):
            record.read(tmp_path, "frontier")
    assert record.read(tmp_path, "barrier") == []


def test_the_page_does_not_say_what_was_not_measured(tmp_path: Path) -> None:
    unknown = line("frontier", "live=1 vs x", "ns", "lower", Paired([1.0], [2.0]), Options(), {})
    for lines, said in (([unknown], "; CPUs of others: not measured."), ([unknown, made()], "used at most 0.00 CPUs.")):
        record.write(tmp_path, "frontier", lines)
        assert said in (tmp_path / "README.md").read_text()


def test_the_table_says_when_the_machine_was_not_quiet() -> None:
    assert table("frontier", [made()]).caption is None
    noisy = line("b", "c vs d", "s", "lower", Paired([1.0], [2.0], 1.0, 0.7), Options(), {})
    assert "others used up to 0.70 CPUs" in str(table("b", [noisy]).caption)


def test_the_table_says_what_the_host_took() -> None:
    noisy = line("b", "c vs d", "s", "lower", Paired([1.0], [2.0], 1.0, 0.0, 0.4), Options(), {})
    assert noisy["conditions"]["stolen_cpu"] == 0.4 and noisy["conditions"]["noisy"]
    assert "the host of this machine took up to 0.40" in str(table("b", [noisy]).caption)


def test_time_that_the_host_took_is_told_from_what_others_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = min(os.sched_getaffinity(0))
    beside = max(os.sched_getaffinity(0)) + 1

    def write(user: int, stolen: int) -> None:
        # user nice system idle iowait irq softirq steal guest guest_nice
        lines = [f"cpu{at} {user} 0 0 1000 0 0 0 {stolen} 0 0", f"cpu{beside} 9{user} 0 0 0 0 0 0 9{stolen} 0 0"]
        (tmp_path / "stat").write_text("\n".join(["cpu 1 1 1 1", *lines, "intr 5"]))

    now = iter([100.0, 102.0])
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine, "_tree_seconds", lambda: 7.0)
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(now)))
    write(500, 100)
    meter = machine.Meter()
    assert machine.stolen() == 100 / machine._TICKS
    write(500 + machine._TICKS, 100 + machine._TICKS // 2)
    assert meter.stop() == machine.Usage(0.0, 0.5, 0.25)
    (tmp_path / "stat").unlink()
    assert machine.stolen() is None


class _Host:
    """Takes CPU from some pairs. Each takes a second of a clock that only it moves, and gives its number from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, taken: Callable[[int], float]) -> None:
        self.now, self.lost, self.pair, self.turns = 0.0, 0.0, 0, 0
        self.taken = taken
        monkeypatch.setattr("penstock_bench.measure.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(machine, "stolen", lambda: self.lost)
        monkeypatch.setattr(machine, "Meter", lambda: self)

    def side(self) -> float:
        self.now += 0.5
        self.turns += 1
        if self.turns % 2 == 0:
            self.lost += self.taken(self.pair)
            self.pair += 1
        return float((self.turns - 1) // 2 + 1)

    def stop(self) -> machine.Usage:
        return machine.Usage(1.0, 0.0, self.lost / self.now)


def test_a_pair_from_which_the_host_took_time_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _Host(monkeypatch, lambda pair: 0.2 if pair in (1, 2, 5) else 0.04)
    found = compare(7.0, host.side, host.side, warm=0, least=4)
    assert found.ours == found.peer == [1.0, 4.0, 5.0, 7.0]
    assert (found.again, found.disturbed, found.noisy) == (3, False, False)
    told = line("b", "c vs d", "s", "lower", found, Options(), {})["conditions"]
    assert (told["pairs_again"], told["noisy"], told["repeats"]) == (3, False, 4)
    assert told["stolen_cpu"] == found.stolen_cpu > machine.NOISY


def test_a_host_that_always_takes_time_ends_no_bench_and_marks_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _Host(monkeypatch, lambda pair: 0.2)
    found = compare(5.0, host.side, host.side, warm=0, least=3)
    assert (found.ours, found.again, host.pair) == ([1.0, 2.0, 3.0], 5, 5)
    assert found.disturbed and found.noisy
    late = compare(100.0, host.side, host.side, warm=0, least=3, left=lambda: 0.0)
    assert len(late.ours) == 1 and late.noisy, "one turn, as a bench that is out of time does it"


def test_find() -> None:
    assert find("barrier").kind == "core"
    with pytest.raises(ConfigError, match="did you mean barrier"):
        find("barriers")


def test_a_run_of_all_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Benches that fail are told and not recorded; the next run measures only them."""
    from penstock_bench import runner

    asked: list[str] = []
    broken = {"barrier"}
    commit = "c0ffee"

    def fake(bench: Any, options: Options) -> list[Line]:
        asked.append(bench.name)
        if bench.name in broken:
            raise runner.EngineError(f"{bench.name} failed")
        return [made(bench.name, commit=commit, quick=options.quick, budget_s=options.seconds)]

    monkeypatch.setattr(runner, "_in_child", fake)
    monkeypatch.setattr(runner, "_about", lambda: {"commit": commit})
    monkeypatch.setattr(core, "program", lambda tell: Path("penstock-bench"))
    arguments = ["bench", "--all", "--record", str(tmp_path), "--json"]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert asked == [bench.name for bench in BENCHES] and captured.out.count("\n") == len(BENCHES) - 1
    assert "failed: barrier" in captured.err and not (tmp_path / "barrier.jsonl").exists()
    asked.clear()
    broken.clear()
    assert main(arguments) == 0
    assert asked == ["barrier"] and capsys.readouterr().out.count("\n") == len(BENCHES)
    asked.clear()
    assert main([*arguments, "--quick"]) == 1
    assert not asked and "holds a whole run, which a quick one does not replace" in capsys.readouterr().err
    tmp_path = tmp_path / "quick"
    arguments = ["bench", "--all", "--record", str(tmp_path), "--json"]
    assert main([*arguments, "--quick"]) == 0
    assert len(asked) == len(BENCHES)
    asked.clear()
    assert main([*arguments, "--quick"]) == 0
    assert not asked
    assert main([*arguments, "--quick", "--again"]) == 0
    assert len(asked) == len(BENCHES)
    assert os.listdir(tmp_path).count("README.md") == 1
    asked.clear()
    assert main([*arguments, "--quick", "--seconds", "1"]) == 0
    assert len(asked) == len(BENCHES), "another budget is another result"
    asked.clear()
    monkeypatch.setattr(runner._native, "profile", lambda: "other")
    assert main([*arguments, "--quick", "--seconds", "1"]) == 0
    assert len(asked) == len(BENCHES), "another build is another result"
    commit = "c0ffee-changed"
    for _ in range(2):
        asked.clear()
        assert main([*arguments, "--quick", "--seconds", "1"]) == 0
        assert len(asked) == len(BENCHES), "changes may be others by now"


def test_lines_of_the_program_are_compared_with_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module may be of another profile."""
    from penstock_bench import runner

    monkeypatch.setattr(runner._native, "profile", lambda: "setup")
    monkeypatch.delenv(core.PROFILE, raising=False)
    told = {"commit": "c0ffee", "quick": False, "budget_s": None, "versions": {"rustc": "1"}, "profile": "release"}
    assert runner._same({"conditions": told}, "c0ffee", Options())
    monkeypatch.setenv(core.PROFILE, "setup")
    assert not runner._same({"conditions": told}, "c0ffee", Options())
    assert runner._same({"conditions": told | {"profile": "setup", "versions": {}}}, "c0ffee", Options())


def test_only_a_dev_build_is_told_to_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock import _native

    for profile, told in (("release", False), ("setup", False), ("dev", True)):
        monkeypatch.setattr(_native, "profile", lambda profile=profile: profile)
        command._warn_of_dev_build()
        assert ("run make setup" in capsys.readouterr().err) == told


@pytest.mark.timeout(600)
def test_the_same_count_from_python_and_from_rust() -> None:
    from penstock_bench import keyed_count_python

    found: list[Line] = []
    keyed_count_python.run(Options(quick=True, seconds=0.1), found.append, print, keys=1 << 8, rows=1 << 14)
    assert [one["case"].split(" keys")[0] for one in found] == [
        f"w{workers} rows={rows}" for rows in (1024, 8192, 65536) for workers in (1, 2)
    ]
    assert all(one["ratio"] > 0 and one["conditions"]["input_rows"] == 1 << 14 for one in found)
    assert sum(bool(targets.judge(one)) for one in found) == 4


@pytest.mark.timeout(600)
def test_a_side_that_ends_is_told() -> None:
    with (
        pytest.raises(EngineError, match="--side ended with exit status 1"),
        core.side([str(core.program(print)), "--side"], {"plan": "nothing"}) as run,
    ):
        run()


def test_both_sides_see_the_same_keys() -> None:
    """The first numbers of splitmix64 from 7, by whole columns."""
    from penstock_bench import keyed_count_python as bench

    state, expected = 7, []
    for _ in range(100):
        state = (state + 0x9E37_79B9_7F4A_7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB % 2**64
        expected.append((z ^ (z >> 31)) % 1024)
    assert bench._numbers(100, 1024).to_pylist() == expected


def test_a_dict_and_a_flow_keep_the_same_means(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_bench import python_dict

    found: list[Line] = []
    options = Options(quick=True, seconds=0.1)
    python_dict.beside_dict("python-state", 50, 100, 0.1, options, found.append)
    assert found[0]["conditions"]["rows"] == 100 and "vs dict loop" in found[0]["case"]
    monkeypatch.setattr(python_dict, "_loop", lambda blocks, schema: schema.empty_table().to_batches())
    with pytest.raises(EngineError, match="the figures are void"):
        python_dict.beside_dict("python-state", 50, 100, 0.1, options, found.append)


def test_bytewax_and_a_flow_keep_the_same_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that answers as it should, and one that does not."""
    from penstock_bench import apart, python_dict

    found: list[Line] = []
    wrong = 0

    @contextlib.contextmanager
    def side(where: apart.Found, folder: Path, query: str, params: dict[str, int]) -> Iterator[Any]:
        assert (where, query, params) == (bytewax, "mean", {})
        rows = pa.ipc.open_file(folder / "rows.arrow").read_all()
        count, total = apart.answer(list(python_dict._loop(rows.to_batches(), schema)))
        yield lambda: (0.01, (count, total + wrong))

    schema = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("mean", pa.float64())])
    monkeypatch.setattr(apart, "side", side)
    bytewax = apart.Found(apart.BYTEWAX, "python", "0.1")
    options = Options(quick=True, seconds=0.1)
    python_dict.beside_bytewax(bytewax, 50, 100, 0.1, options, found.append)
    assert found[0]["peer"] == pytest.approx(10_000) and "vs bytewax" in found[0]["case"]
    wrong = 1
    with pytest.raises(EngineError, match="bytewax gives other rows"):
        python_dict.beside_bytewax(bytewax, 50, 100, 0.1, options, found.append)


def test_a_peer_that_is_not_done_in_time_bounds_the_ratio() -> None:
    from penstock_bench import python_state

    def side(*rates: float, bound: float | None = None) -> python_state._Side:
        return python_state._Side(None, None, list(rates), bound)  # type: ignore[arg-type]

    found: list[Line] = []
    told: list[str] = []
    rest = ((1.0, 0.0), Options(), {"batch_rows": 1000}, found.append, told.append)
    ours = side(5000.0, 6000.0)
    python_state._tell_of("stateful_map", ours, "transformWithState", side(bound=10.0), 1000, *rest)
    assert found[0]["peer"] == 100.0 and found[0]["ratio"] == 50.0
    assert "no batch done in 10 s" in found[0]["case"] and found[0]["conditions"]["peer_unfinished"] is True
    python_state._tell_of("stateful_map", ours, "transformWithState", side(50.0), 1000, *rest)
    assert found[1]["ratio"] == 100.0 and "peer_unfinished" not in found[1]["conditions"]
    python_state._tell_of("stateful_map", ours, "transformWithState", side(), 1000, *rest)
    assert len(found) == 2 and told == ["stateful_map beside transformWithState: no time was left for it"]


def test_a_round_goes_the_other_way_than_the_one_before() -> None:
    """The first of a round finds other things done than the last: ours is not always first."""
    from penstock_bench import python_state

    order: list[str] = []

    def side(name: str) -> Any:
        def give(file: Path, limit: float) -> float:
            order.append(name)
            return 1.0

        return python_state._Side(SimpleNamespace(give=give), None)  # type: ignore[arg-type]

    sides = {name: side(name) for name in (python_state.OURS, "b", "c")}
    files: Any = SimpleNamespace(make=lambda keys, rows: Path("file"))
    python_state._rounds(sides, files, 10, Options(seconds=0.0), lambda text: None)
    assert order == [python_state.OURS, "b", "c", "c", "b", python_state.OURS]


def test_sides_that_ran_one_after_the_other_make_no_pairs(tmp_path: Path) -> None:
    case = "pause 1 to 2 workers, keys=9 vs Spark offline repartition"
    parts = ("rescale", case, "s", "lower", Paired([1.0, 2.0], [8.0, 9.0]), Options(), {})
    now = line(*parts, in_turn=False)  # type: ignore[arg-type]
    assert now["conditions"]["paired_ratio_range"] is None and now["ratio"] == 8.5 / 1.5
    for recorded in (now, line(*parts)):  # type: ignore[arg-type]
        record.write(tmp_path, "rescale", [recorded])
        page = (tmp_path / "README.md").read_text()
        assert "| **5.67x** | 2 |" in page and "sides one after the other" in page


@pytest.mark.timeout(300)
def test_an_ordered_map_beside_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_bench import ordered_map

    found: list[Line] = []
    with machine.pinned():
        ordered_map.run(Options(quick=True, seconds=0.1), found.append, print, costs=[100], seconds=0.02)
    peers = [one["case"].partition(" vs ")[2].partition(",")[0] for one in found]
    kinds = 5 if importlib.util.find_spec("joblib") else 4
    assert peers[:4] == peers[kinds : kinds + 4]
    assert peers[:4] == ["serial map", "Pool.imap", "thread executor", "process executor"]
    assert all("by hand" in one["case"] for one in found if "Pool" in one["case"])
    assert all(one["ratio"] > 0 and one["conditions"]["items"] >= 8 for one in found)
    if Path("/proc/stat").exists():
        assert all(one["conditions"]["foreign_cpu"] is not None for one in found)
    assert all(one["conditions"]["mode"] in ("inline", "threads", "processes") for one in found)
    assert sum(bool(targets.judge(one)) for one in found) == 2
    monkeypatch.setattr(ordered_map, "_ours", lambda more: lambda work, items: iter([0]))
    with pytest.raises(EngineError, match="ours gave other results than the builtin map; the figures are void"):
        ordered_map.run(Options(quick=True, seconds=0.1), found.append, print, costs=[100], seconds=0.02)


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_counts_on_spark_at_a_tiny_size() -> None:
    """In a process of their own: a bench owns the JVM that it starts."""
    found = _on_spark(
        """
    map_in_arrow.run(options, emit, tell, rows=2_000)
"""
    )
    assert [one["name"] for one in found] == ["map-in-arrow"] * 2
    for one in found:
        assert one["ratio"] > 0 and one["conditions"]["versions"]["spark"] and one["conditions"]["versions"]["java"]


@pytest.mark.spark
@pytest.mark.long  # the others are as these, beside more of Spark's own ways
@pytest.mark.timeout(400)
def test_the_other_benches_on_spark_at_a_tiny_size() -> None:
    found = _on_spark(
        """
    snapshot.run(options, emit, tell, keys=500)
    foreach_batch_count.run(options, emit, tell, keys=500, sinks=("noop", "parquet"))
    options = Options(seconds=0.1)
    python_state.run(options, emit, tell, keys=100, local={10: 100}, peers=("applyInPandasWithState",))
    nexmark.run(options, emit, tell, events=2_000, parts=["spark"])
"""
    )
    snapshots, counted, written, found, streamed = found[:4], found[4:9], found[9:11], found[11:-4], found[-4:]
    _snapshots(snapshots)
    _counts_in_foreach_batch(counted, "noop")
    _counts_in_foreach_batch(written, "parquet")
    workers = machine.cores()
    assert [one["case"] for one in streamed] == [
        f"python w{workers} {query} vs Spark Structured Streaming" for query in ("q1", "q2", "q3", "q8_tumble")
    ]
    assert all(one["conditions"]["rows_out"] > 0 and targets.judge(one) for one in streamed)
    assert [one["name"] for one in found] == ["foreach-batch-python-state"] * len(found)
    peers = [one["case"].partition(" vs ")[2] for one in found[1:]]
    assert peers == ["applyInPandasWithState"] * 2
    for one in snapshots + counted + written + found[1:] + streamed:
        assert one["ratio"] > 0 and one["conditions"]["versions"]["spark"] and one["conditions"]["versions"]["java"]


@pytest.mark.spark
@pytest.mark.long  # sessions of Spark's own way beside ours: what they measure has tests of its own
@pytest.mark.timeout(400)
def test_recovery_and_rescale_at_a_tiny_size() -> None:
    found = _on_spark(
        """
    recovery.run(options, emit, tell, keys=2_000)
    rescale.run(options, emit, tell, keys=2_000, rows=4_000)
"""
    )
    assert [one["name"] for one in found] == ["recovery"] * 2 + ["rescale"] * 2
    killed, restarted, pause, rate = (one["conditions"] for one in found)
    assert "beyond_s" in killed and 0 < restarted["ready_s"] < found[1]["ours"]
    assert 0 <= pause["gap_s"][0] <= pause["gap_s"][1] and rate["peer_gain"] > 0


def _on_spark(runs: str) -> list[dict[str, Any]]:
    """What benches emit; the JVMs that they start are gone afterwards."""
    program = f"""
import contextlib, json
from penstock_bench import foreach_batch_count, machine, map_in_arrow, nexmark, python_state
from penstock_bench import recovery, rescale, snapshot, streams
from penstock_bench.measure import Options
options = Options(quick=True, seconds=0.1)
def emit(line): print(json.dumps(line), flush=True)
def tell(text): pass
start = streams.session
@contextlib.contextmanager
def session(name, tell, *, residents=0):
    # One start of Spark for all: a folder of its own is what a bench has to find.
    folder = place / name
    folder.mkdir()
    yield spark, folder
streams.session = session
with machine.pinned(), start("tiny", tell, residents=2) as (spark, place):
{runs}"""
    before = _children(os.getpid(), "java")  # the session that other tests share
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTABLE + program], capture_output=True, text=True, check=False, timeout=380
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert _children(os.getpid(), "java") == before
    return [json.loads(text) for text in done.stdout.splitlines()]


def _counts_in_foreach_batch(found: list[dict[str, Any]], sink: str) -> None:
    """Spark's stores beside one of the sinks; each batch by its parts."""
    assert {one["name"] for one in found} == {"foreach-batch-count"}
    identity = "identity mapInArrow"
    names = ["RocksDB", "RocksDB with a changelog", "default store"] if sink == "noop" else []
    stores = [f"Spark groupBy.count, {name}" for name in names]
    cases = [*((500, store) for store in stores), (500, identity), (250, identity)]
    assert [one["case"].partition(" rows=")[2] for one in found] == [f"{n} {sink} vs {peer}" for n, peer in cases]
    for one in found:
        told = one["conditions"]
        assert told["durable_snapshots"] is True and told["peer_durable_snapshots"] is (identity not in one["case"])
        ours, peer = told["parts_s"], told["peer_parts_s"]
        assert list(ours) == ["trigger", "feed", "run", "serve", "files", "commit"]
        assert list(peer) == ["trigger", "run", "commit"]
        assert min(*ours.values(), *peer.values()) > 0
        seconds = one["ours"] if one["unit"] == "s" else told["batch_rows"] / one["ours"]
        assert 0.5 < sum(ours.values()) / seconds < 2, "medians of the whole"


def _snapshots(found: list[dict[str, Any]]) -> None:
    """Each case by its parts; a file of few keys is smaller than one of all."""
    assert [one["case"] for one in found] == [
        "keys=500 dirty=5 rows=5 durable vs in memory only",
        "keys=500 dirty=5 rows=500 durable vs in memory only",
        "keys=500 dirty=500 rows=500 durable vs in memory only",
        "keys=500 incremental, dirty=5 vs full",
    ]
    for one in found[:3]:
        told = one["conditions"]
        assert list(told["parts_s"]) == ["trigger", "feed", "run", "serve", "files", "commit"]
        assert list(told["peer_parts_s"]) == list(told["parts_s"])
        assert 0 < told["files_share"] < 1 and told["written_bytes"] > 0
    assert found[3]["unit"] == "bytes" and 1 < found[3]["ratio"] < 100


def _soaked(grow: str = "", more: float = 0.0) -> Any:
    """What a soak of 40 samples would have noted, of which one curve grows by so much."""
    from penstock_bench import soak

    run = soak.Run(seconds=80.0, batches=80, rows=80_000)
    for at in range(40):
        figures = {name: 100.0 + (at % 3) + (more * at / 40 if name == grow else 0.0) for name in soak.LIMITS}
        run.samples.append(soak.Sample(2.0 * at, figures))
    run.actions.append(soak.Action(10.0, "member", 1.5))
    return run


def test_a_soak_is_flat_or_names_what_rises() -> None:
    from penstock_bench import soak

    assert soak.judge(_soaked()) == []
    assert soak.judge(soak.Run.from_json(_soaked().to_json())) == []
    for name, limit in soak.LIMITS.items():
        # Half of the growth is between the quarters.
        [told] = soak.judge(_soaked(name, 4 * limit.more + 8 * limit.share * 100 + 50))
        assert told.startswith(f"{name} rises: "), told
    lacking = _soaked()
    for sample in lacking.samples[30:]:
        sample.figures.pop("member memory")
    assert soak.judge(lacking) == ["member memory was not noted in both quarters"]


def test_a_soak_without_its_samples_or_with_a_wrong_batch_is_not_flat() -> None:
    """Quarters are of the run, however long somebody looked."""
    from penstock_bench import soak

    half = _soaked("member memory", 1e12)
    del half.samples[20:]
    gap, *others = soak.judge(half)
    assert gap == "there is no sample for 42 s, from 38 s on"
    assert others == [f"{name} was not noted in both quarters" for name in soak.LIMITS]
    wrong = _soaked()
    wrong.wrong, wrong.missed = "batch 7 is wrong", [(4.2, "OSError: gone"), (6.2, "OSError: gone")]
    told = ["batch 7 is wrong", "2 samples could not be taken, the first after 4 s: OSError: gone"]
    assert soak.judge(wrong) == told == soak.judge(soak.Run.from_json(wrong.to_json()))


def test_who_takes_samples_goes_on_after_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_bench import soak

    monkeypatch.setattr(soak, "SAMPLE_S", 0.01)
    run, asked = soak.Run(), threading.Event()

    def members() -> list[int]:
        if not asked.is_set():
            asked.set()
            raise RuntimeError("the engine is busy")
        return []

    sampler = soak._Sampler(run, time.monotonic(), Path("/nowhere"), Path("/nowhere"), members, None)
    monkeypatch.setattr(sampler, "figures", lambda: {"member memory": float(len(members()))})
    sampler.start()
    deadline = time.monotonic() + 60
    while not run.samples and time.monotonic() < deadline:
        time.sleep(0.01)
    sampler.ended.set()
    sampler.join(60)
    assert run.samples and [why for _, why in run.missed] == ["RuntimeError: the engine is busy"]


@pytest.mark.parametrize("raised", [None, TimeoutError("no end of it"), EngineError("lost"), KeyboardInterrupt()])
def test_a_soak_that_breaks_off_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException | None
) -> None:
    """However it ends; and a batch that nobody looks at any more counts as well."""
    from penstock_bench import soak

    def go(run: soak._Soak) -> soak.Run:
        run.run = _soaked()
        if raised is not None:
            raise raised
        run.run.wrong = "batch 80 is wrong: 3 rows"
        return run.run

    monkeypatch.setattr(soak._Soak, "go", go)
    drawn = raised is None and soak.importable()  # which takes long
    monkeypatch.setattr(soak, "importable", lambda: drawn)
    assert soak.main(["--out", str(tmp_path)]) == 1
    assert len(json.loads((tmp_path / "soak.json").read_text())["samples"]) == 40
    assert (tmp_path / "soak.svg").exists() == drawn
    said = capsys.readouterr().out
    told = "batch 80 is wrong: 3 rows" if raised is None else f"{type(raised).__name__}: {raised}"
    assert said.count(f"soak: {told}\n") == 1 and "soak: NOT FLAT; " in said


def test_a_soak_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    from penstock.report._style import svg_text
    from penstock_bench import soak

    text = svg_text(soak.draw(_soaked("local files", 1e6)))
    assert "local files rises" in text and "member memory" in text and "1 minutes, 80 batches" in text
    assert svg_text(soak.draw(_soaked())) == svg_text(soak.draw(_soaked()))


@pytest.mark.spark
@pytest.mark.long  # what it does has tests of its own; this is that it works
@pytest.mark.timeout(300)
def test_a_soak_of_a_minute(tmp_path: Path) -> None:
    from penstock_bench import soak

    command = [sys.executable, "-c", _IMPORTABLE + "from penstock_bench import soak; raise SystemExit(soak.main())"]
    given = ["--minutes", "1.2", "--period", "15", "--out", str(tmp_path)]
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False, timeout=280)
    kept = json.loads((tmp_path / "soak.json").read_text())
    assert len(kept["actions"]) >= 2 and kept["batches"] > 10, done.stdout + done.stderr[-3000:]
    assert {action["what"] for action in kept["actions"]} >= {"member", "rescale"}
    assert kept["wrong"] is None and kept["missed"] == [], done.stdout + done.stderr[-3000:]
    # A minute is too short to tell what is flat; whatever is found is what its status says.
    rises = soak.judge(soak.Run.from_json((tmp_path / "soak.json").read_text()))
    assert done.returncode == int(bool(rises)), (rises, done.stdout + done.stderr[-3000:])
    assert f"soak: {'NOT FLAT' if rises else 'flat'}; " in done.stdout


def test_generated_graphs_are_those_of_the_core() -> None:
    """The number of distinct edges that the core's twin has, and what becomes of shared files that are not there."""
    from penstock_bench import cliques

    edges = cliques._rmat(14, 200_000)
    assert edges.group_by(["src", "dst"]).aggregate([]).num_rows == 198_472
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_DATA", "/nowhere")
        assert cliques._unpacked(Path("unused"), told.append) == {}
    assert len(told) == len(cliques.FILES) and "PENSTOCK_DATA names the folder" in told[0]
    full = cliques._graphs(Options(), {}, None)
    assert set(full) >= set(cliques._graphs(Options(quick=True), {}, None)) and "wiki-Vote" not in full


@pytest.mark.spark
@pytest.mark.long  # one more JVM; cliques as Spark jobs have tests of their own
@pytest.mark.timeout(400)
def test_cliques_as_spark_jobs_beside_self_joins() -> None:
    """At a tiny size; and a peer that does not end is cancelled and bounds the ratio."""
    program = """
import json
from penstock_bench import cliques, machine
from penstock_bench.measure import Options
options = Options(quick=True, seconds=0.1)
def emit(line): print(json.dumps(line), flush=True)
told = []
with machine.pinned(), cliques._session(options, told.append) as (spark, folder, frames):
    assert not frames and "GraphFrames is not measured" in told[0]
    graphs = {"small": (cliques._rmat(7, 900), (3, 4))}
    cliques._beside_spark(spark, folder, frames, graphs, 0.1, options, emit, told.append)
    endless = lambda: spark.range(10**15).selectExpr("sum(id % 7)").collect()
    assert not cliques._case(spark, "a vs endless", 0.1, 1.0, lambda: 0.5, endless, options, {}, emit, told.append)
    def failing(): raise ValueError("a peer")
    try:
        cliques._within(spark, 60.0, failing)
    except ValueError:
        print(json.dumps("raised"))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_GRAPHFRAMES"}
    command = [sys.executable, "-c", _IMPORTABLE + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    *found, last, raised = [json.loads(text) for text in done.stdout.splitlines()]
    assert [one["case"] for one in found] == [
        f"Spark job count size={size} small vs Spark SQL self-joins" for size in (3, 4)
    ]
    assert all(one["ratio"] > 0 and one["conditions"]["cliques"] > 0 for one in found)
    assert last["peer"] == 1.0 and last["ratio"] == 2.0 and last["conditions"]["peer_unfinished"] is True
    assert last["case"] == "a vs endless (not done in 1 s)" and raised == "raised"


@pytest.mark.timeout(600)
def test_nexmark_beside_timely_at_a_tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query that has a twin gives the same rows on both sides, which the program checks."""
    from penstock_bench import nexmark

    found: list[Line] = []
    monkeypatch.setattr(nexmark, "EPOCH_MS", 100)
    nexmark.run(Options(quick=True, seconds=0.1), found.append, print, events=4_000, parts=["core"])
    cases = [f"w{workers} {query} vs timely 0.31" for query in nexmark.QUERIES for workers in nexmark.WORKERS]
    assert [one["case"] for one in found] == cases
    assert all(one["ratio"] > 0 and one["conditions"]["events"] == 4_000 for one in found)
    assert all(one["conditions"]["rows_out"] > 0 for one in found)
    judged = [one["case"] for one in found if targets.judge(one)]
    assert judged == [case for case in cases if case.split()[1][:2] in ("q3", "q4", "q5", "q8")]


@pytest.mark.timeout(600)
def test_a_plan_without_twins_is_refused() -> None:
    """A step of pandas has none in Rust."""
    from penstock_bench import nexmark

    with pytest.raises(EngineError, match="--nexmark failed with exit status 1"):
        nexmark.run(Options(quick=True, seconds=0.1), print, print, events=100, parts=["core"], queries=["q6"])


def test_answers_of_nexmark_are_told_apart_by_their_rows() -> None:
    """As the program and the peers count them: by number and a sum that the order does not change."""
    from penstock_bench import apart

    rows = pa.record_batch({"k": [1, -2, 3], "name": ["a", "", "Ada"]})
    count, total = apart.answer([rows])
    assert (count, total) == (3, 0x80CD_4369_0130_8476)
    assert apart.answer([rows.slice(2), rows.slice(0, 2)]) == (count, total)
    assert apart.answer([rows.slice(1)]) != apart.answer([rows.slice(0, 2)])


def test_without_a_peer_the_bench_says_what_to_do_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line for each: no such folder, a folder without the package, no Java, nothing that names a folder."""
    from penstock_bench import apart, nexmark

    def told() -> list[str]:
        said: list[str] = []
        parts = ["bytewax", "pathway", "pyflink"]
        nexmark.run(Options(quick=True, seconds=0.1), print, said.append, events=100, parts=parts)
        return said

    java, script = tmp_path / "bin" / "java", tmp_path / "bin" / "python"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv(apart.PEERS, str(tmp_path))
    said = told()
    assert [text.split(":")[0] for text in said] == ["without bytewax", "without Pathway", "without PyFlink"]
    assert f"{apart.PEERS} names {tmp_path}, which is no virtual environment" in said[0] and "Java 17" in said[2]
    java.parent.mkdir()
    for program in (java, script):
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    said = told()
    assert len(said) == 3 and all(apart.PEERS in text for text in said)
    assert ["requirements/peers" in text and (core.CHECKOUT / text.split()[6]).is_file() for text in said] == [True] * 3
    monkeypatch.delenv(apart.PEERS)
    monkeypatch.setattr(apart, "_version", lambda python, package: "7" if package == "pathway" else None)
    found = apart.find(apart.PATHWAY, print)
    assert found == apart.Found(apart.PATHWAY, sys.executable, "7")


def test_without_spark_the_bench_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_bench import nexmark

    said: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    nexmark.run(Options(quick=True, seconds=0.1), print, said.append, events=100, parts=["spark"])
    assert said == [f"without Spark: {how_to_install('spark')}"]


@pytest.mark.timeout(120)
def test_nexmark_beside_peers_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that answer as they should, from the files that theirs are, and one that does not."""
    from penstock_bench import apart, nexmark

    found: list[Line] = []
    monkeypatch.setattr(apart, "find", lambda peer, tell: apart.Found(peer, "python", "7"))
    wrong = 0

    class Side:
        def __init__(self, command: list[str], told: dict[str, Any]) -> None:
            folder, program = Path(told["folder"]), Path(command[1])
            assert command[0] == "python" and program.is_file()
            # What the floor is measured on is there as rows of text alone.
            files = list(folder.glob("*.arrow")) or list(folder.parent.glob("*.arrow"))
            tables = {path.stem: pa.ipc.open_file(path).read_all() for path in files}
            first = {"on_pathway.py": '"number","name","city","state","date_time"', "on_flink.py": "1000,"}
            if program.name in first:
                assert told["workers"] == machine.cores()
                assert (folder / "person.csv").read_text().startswith(first[program.name])
            self.ours = nexmark._ours(nexmark._in_memory(tables), told["query"], 2)

        def __enter__(self) -> Callable[[], dict[str, Any]]:
            def ask() -> dict[str, Any]:
                seconds, (rows, total) = self.ours()
                return {"seconds": seconds, "rows": rows + wrong, "sum": total}

            return ask

        def __exit__(self, *of: object) -> None:
            pass

    monkeypatch.setattr(core, "side", Side)
    options = Options(seconds=0.1)
    nexmark.run(options, found.append, print, events=2_000, parts=["bytewax", "pathway", "pyflink"])
    cores = machine.cores()
    sides = [("w1", "bytewax"), (f"w{cores}", "Pathway"), (f"w{cores}", "PyFlink")]
    assert [one["case"] for one in found] == [
        f"python {workers} {query} vs {peer}" for workers, peer in sides for query in nexmark.FROM_PYTHON
    ]
    packages = {"bytewax": "bytewax", "Pathway": "pathway", "PyFlink": "apache-flink"}
    for one in found:
        conditions = one["conditions"]
        assert targets.judge(one) and conditions["rows_out"] > 0 and 0 < conditions["rows_read"] <= 2_000
        assert ("peer_floor_s" in conditions) == (conditions["beside"] != "bytewax")
        assert conditions["versions"][packages[conditions["beside"]]] == "7" and conditions["query"] in one["case"]
    wrong = 1
    for part in ("bytewax", "pathway"):
        with pytest.raises(EngineError, match="the two sides give different rows"):
            nexmark.run(options, found.append, print, events=2_000, parts=[part], queries=["q1"])


def test_programs_of_peers_count_rows_as_the_bench_does() -> None:
    from penstock_bench import apart

    rows = pa.record_batch({"k": [1, -2, 3], "x": [0.5, -1.0, 2.0], "name": ["a", "", "Ada"]})
    told = f"import sys; sys.path.insert(0, {str(core.CHECKOUT / 'benches' / 'peers')!r}); import apart; print("
    told += f"*apart.answer({[tuple(row.values()) for row in rows.to_pylist()]!r}))"
    out = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    assert tuple(map(int, out.split())) == apart.answer([rows])


def _read_of(folder: Path, name: str, case: str, **conditions: Any) -> Line:
    """A recorded line as it is read."""
    line = {"name": name, "case": case, "ratio": 2.0, "conditions": conditions}
    (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    [told] = record.read(folder, name)
    return told


@pytest.mark.parametrize(
    ("name", "case", "since"),
    [
        ("reorder", "item=1 µs vs oneTBB parallel_pipeline", {"tokens_a_thread": 16}),
        ("cliques", "Spark job count size=3 R-MAT 2^14 vs Spark SQL self-joins", {"at": "2026-12-01T00:00:00+00:00"}),
        ("keyed-count", "w2 keys=2^20 changes vs timely 0.31 fast hash", {"peer_epochs_under_way": 3}),
        ("join", "tcp calm: from the wish to the first record vs the start of three anew", {"until": "a record"}),
    ],
)
def test_a_peer_that_was_held_up_by_how_it_was_measured_has_no_ratio(
    tmp_path: Path, name: str, case: str, since: dict[str, Any]
) -> None:
    old = {"at": "2026-11-21T19:03:04+00:00"}
    held_up = _read_of(tmp_path, name, case, **old)
    assert held_up["ratio"] is None and "anew" in held_up["conditions"]["no_ratio"]
    told = _read_of(tmp_path, name, case, **old | since)
    assert told["ratio"] == 2.0 and "no_ratio" not in told["conditions"]
    assert _read_of(tmp_path, name, "w1 keys=2^20 changes vs timely 0.31 fast hash", **old)["ratio"] == 2.0


@pytest.mark.parametrize(
    ("name", "case", "since"),
    [
        ("nexmark", "python w2 q1 vs Spark Structured Streaming", {"durable": False, "peer_durable": True}),
        ("nexmark", "python w2 q1 vs PyFlink", {"floor_s": 0.1, "peer_floor_s": 0.2}),
        (
            "faucet-memory",
            "4-cliques w1 2^17 vertices N=4 B=1000 vs timely 0.31.0 fed in rounds",
            {"at": "2026-12-01T00:00:00+00:00"},
        ),
        ("foreach-batch-count", "keys=9 rows=9 noop vs Spark groupBy.count, RocksDB", {"peer_changelog": False}),
    ],
)
def test_what_else_is_wrong_with_an_older_line_is_a_note_beside_its_ratio(
    tmp_path: Path, name: str, case: str, since: dict[str, Any]
) -> None:
    old = {"at": "2026-11-21T19:03:04+00:00"}
    noted = _read_of(tmp_path, name, case, **old)
    assert noted["ratio"] == 2.0
    if "Spark Structured" in case:
        assert (noted["conditions"]["durable"], noted["conditions"]["peer_durable"]) == (False, True)
    whole = made(name, case, note=noted["conditions"]["note"])
    page = record.page({name: [whole, made(name, "x vs y")]})
    assert "| **2x** [1] (2x) |" in page and "| **2x** (2x) |" in page
    [note] = [text for text in page.splitlines() if text.startswith("[1] ")]
    assert note.endswith(f"{whole['conditions']['note'][1:]}.")
    assert "note" not in _read_of(tmp_path, name, case, **old | since)["conditions"]


def test_the_loop_by_hand_is_told_to_run_on_one_core(tmp_path: Path) -> None:
    assert _read_of(tmp_path, "cliques", "w2 rows size=3 g vs hand loop")["conditions"]["peer_workers"] == 1
    beside = _read_of(tmp_path, "cliques", "w2 rows size=3 g vs timely 0.31 GenericJoin")
    assert "peer_workers" not in beside["conditions"]


def test_pairs_of_different_work_are_judged_by_the_pairs(tmp_path: Path) -> None:
    """The medians over several lengths of blocks are of different ones on either side."""
    case = "w2 steady epochs of 1,792 to 2,304 records, instructions: joinable vs fixed"
    told = _read_of(tmp_path, "join", case, ratio_of="medians", paired_ratio=0.991)
    assert (told["ratio"], told["conditions"]["ratio_of"], told["conditions"]["repeats"]) == (0.991, "pairs", 1)
    page = record.page({"join": [made("join", case, ratio_of="pairs")]})
    assert f"- {case}: ratio the median of the pairs" in page


def _page_of(folder: Path) -> str:
    pictures = {name for name in PICTURES if (folder / f"{name}.svg").is_file()}
    return record.page({bench.name: record.read(folder, bench.name) for bench in BENCHES}, pictures)


@pytest.mark.parametrize("folder", ["benches/results", "benches/results/sixteen-cores"])
def test_the_recorded_pages_are_what_the_lines_say(folder: str) -> None:
    """`record.write_page` makes them anew where the code tells lines in another way."""
    recorded = core.CHECKOUT / folder
    assert (recorded / "README.md").read_text(encoding="utf-8") == _page_of(recorded)


def test_a_section_says_which_lines_are_of_which_run() -> None:
    one = {"commit": "aaa", "pinned": [0, 1], "rows": 7}
    lines = [
        made(case="live=1 vs x", at="2026-11-21T10:00:00+00:00", **one),
        made(case="live=2 vs x", at="2026-11-21T10:59:00+00:00", **one),
    ]
    page = record.page({"frontier": lines})
    assert "| case | unit |" in page and "build of commit aaa; 2026-11-21T10:00:00+00:00;" in page
    lines += [
        made(case="live=3 vs x", at="2026-11-21T13:00:00+00:00", **one),
        made(case="live=4 vs x", at="2026-11-21T10:30:00+00:00", **one | {"commit": "bbb-changed", "pinned": []}),
        made(case="live=5 vs x", at="2026-11-21T10:31:00+00:00", commit="aaa-other-module", rows=7),
        made(case="live=6 vs x", at="2026-11-21T11:01:00+00:00", **one),
    ]
    page = record.page({"frontier": lines})
    runs = [text.split(" | ")[1] for text in page.splitlines() if text.startswith("| live=")]
    assert runs == ["1", "1", "2", "3", "4", "1"]
    told = [text for text in page.splitlines() if text.startswith("Run ")]
    assert [text.split(":")[0] for text in told] == [
        f"Run {number}, {n} cases" for number, n in enumerate((3, 1, 1, 1), 1)
    ]
    assert "commit aaa; 2026-11-21T10:00:00" in told[0] and "commit aaa; 2026-11-21T13:00:00" in told[1]
    assert "commit bbb **with changes**;" in told[2] and "(not pinned);" in told[2]
    assert "commit aaa, the native module **of other code**;" in told[3] and "pinned to them is not recorded" in told[3]
    assert "All cases: rows 7." in page


def test_cases_of_one_name_are_told_apart() -> None:
    lines = [made("cliques", "w1 rows vs x", edges=edges) for edges in (928_490, 855_333)]
    lines += [made("cliques", "w2 rows vs x", edges=5), made("cliques", "w3 vs x"), made("cliques", "w3 vs x")]
    page = record.page({"cliques": lines})
    assert [text.split(" | ")[0][2:] for text in page.splitlines() if text.startswith("| w")] == [
        "w1 rows vs x (edges 928,490)",
        "w1 rows vs x (edges 855,333)",
        "w2 rows vs x",
        "w3 vs x (1 of 2)",
        "w3 vs x (2 of 2)",
    ]
    assert "- w1 rows vs x (edges 855,333): edges 855333" in page


def test_a_run_with_fewer_cases_does_not_replace_a_fuller_one_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is kept beside; cases whose names hold what a run finds are the same cases."""
    found = ("a vs x", "a vs x", "b vs Pool.imap, chunk 8 by hand", "c vs timely 0.31")
    named = "spreading (qst) vs one at a time (lip)", "spreading (ct) vs one at a time (et)"
    record.write(tmp_path, "schedulers", [made("schedulers", named[0]), made("schedulers", "e (no batch done in 9 s)")])
    record.write(tmp_path, "schedulers", [made("schedulers", named[1]), made("schedulers", "e")])
    (tmp_path / "schedulers.jsonl").unlink()
    full = [made(case=case) for case in found]
    record.write(tmp_path, "frontier", full)
    before = (tmp_path / "frontier.jsonl").read_text()
    again = [made(case=case) for case in ("b vs Pool.imap, chunk 64 by hand", "a vs x", "c vs timely 0.32.1", "d vs x")]
    with pytest.raises(
        ConfigError, match=r"holds cases that this run has not \(a vs x\): .* frontier\.jsonl\.fewer; .*--fewer"
    ):
        record.write(tmp_path, "frontier", again)
    assert (tmp_path / "frontier.jsonl").read_text() == before
    assert [json.loads(text)["case"] for text in (tmp_path / "frontier.jsonl.fewer").read_text().splitlines()] == [
        one["case"] for one in again
    ]
    with pytest.raises(ConfigError, match=r"\(a vs x; a vs x; b vs .*; c vs timely 0\.31\)"):
        record.write(tmp_path, "frontier", [])
    monkeypatch.setattr("penstock_bench.runner.run", lambda bench, options, emit, tell: emit(made(case="a vs x")))
    arguments = ["bench", "frontier", "--json", "--record", str(tmp_path)]
    assert main(arguments) == 1
    assert "cases that this run has not" in capsys.readouterr().err
    assert main([*arguments, "--fewer"]) == 0
    assert [one["case"] for one in record.read(tmp_path, "frontier")] == ["a vs x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "frontier.jsonl"]
    record.write(tmp_path, "barrier", [made("barrier", "a vs x", quick=True), made("barrier", "b vs x", quick=True)])
    record.write(tmp_path, "barrier", [made("barrier", "c vs x")])
    assert len(record.read(tmp_path, "barrier")) == 1, "of a quick run no case is missed"


def test_a_run_of_all_takes_the_recorded_budgets_and_loses_no_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock_bench import runner

    record.write(tmp_path, "frontier", [made(budget_s=None), made(case="live=2 vs x", budget_s=120.0)])
    record.write(tmp_path, "barrier", [made("barrier", quick=True, budget_s=7.0)])
    record.write(
        tmp_path, "sequencer", [made("sequencer", case, budget_s=90.0) for case in ("live=1 vs x", "gone vs x")]
    )
    record.write(tmp_path, "recovery", [made("recovery"), made("recovery", "larger", full=True)])
    asked: dict[str, float | None] = {}
    larger: list[str] = []

    def fake(bench: Any, options: Options) -> list[Line]:
        asked[bench.name] = options.seconds
        cases = {"frontier": ["live=1 vs x", "live=2 vs x"]}.get(bench.name, ["live=1 vs x"])
        told: dict[str, Any] = {"commit": "c0ffee", "quick": options.quick, "budget_s": options.seconds}
        if options.full:
            larger.append(bench.name)
            cases, told = [*cases, "larger"], told | {"full": True}
        return [made(bench.name, case, **told) for case in cases]

    monkeypatch.setattr(runner, "_in_child", fake)
    monkeypatch.setattr(runner, "_about", lambda: {"commit": "c0ffee"})
    monkeypatch.setattr(core, "program", lambda tell: Path("penstock-bench"))
    arguments = ["bench", "--all", "--record", str(tmp_path), "--json"]
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert {name: budget for name, budget in asked.items() if budget} == {"sequencer": 90.0}, "usual ones may be more"
    assert larger == ["recovery"]
    assert len(asked) == len(BENCHES) and "(gone vs x)" in errors and "failed: sequencer;" in errors
    asked.clear()
    assert main([*arguments, "--fewer"]) == 0
    assert asked == {"sequencer": 90.0}, "the others are recorded"
    asked.clear()
    assert main([*arguments, "--seconds", "5"]) == 0
    assert set(asked.values()) == {5.0}


def test_the_folder_that_cargo_builds_in_is_relative_to_where_cargo_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(core.shutil, "which", lambda name: None)
    monkeypatch.setenv(core.PROFILE, "setup")
    for told, folder in (("made", core.CHECKOUT / "made"), (str(tmp_path / "a"), tmp_path / "a"), ("", None)):
        monkeypatch.setenv("CARGO_TARGET_DIR", told)
        monkeypatch.setattr(core, "_modified", lambda path: math.inf)
        with pytest.raises(ConfigError) as caught:
            core.program(print)
        program = (folder or core.CHECKOUT / "target") / "setup" / core.NAME
        assert str(caught.value).startswith(f"{program} is missing")


def _pathway(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(core.CHECKOUT / "benches" / "peers"))
    spec = importlib.util.spec_from_file_location("on_pathway", core.CHECKOUT / "benches/peers/on_pathway.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Table:
    """Notes which of its columns a query of Pathway names; what is made of it is nobody's."""

    def __init__(self, seen: set[str] | None = None) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._seen is not None and name not in ("select", "filter", "join", "groupby", "with_columns"):
            self._seen.add(name)
        return _Table(self._seen if name in ("filter", "with_columns") else None)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, names: list[str]) -> Any:
        if self._seen is not None:
            self._seen.update(names)
        return _Table()

    def _made(self, *_: Any) -> Any:
        return _Table()

    __mod__ = __floordiv__ = __mul__ = __sub__ = __add__ = __and__ = __or__ = __ge__ = __le__ = __lt__ = _made
    __eq__ = _made
    __hash__ = None  # type: ignore[assignment]


def test_pathway_reads_the_columns_that_the_flow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that its queries name are among them, but for the one that has another name in the files."""
    from penstock.workloads import nexmark as flows
    from penstock_bench import nexmark

    module = _pathway(monkeypatch)
    schemas: list[dict[str, type]] = []
    csv = SimpleNamespace(read=lambda path, schema, mode: (path.stem, schema))
    pathway = SimpleNamespace(
        reducers=_Table(),
        Table=_Table(),
        io=SimpleNamespace(csv=csv),
        schema_from_types=lambda **columns: columns,
    )
    monkeypatch.setitem(sys.modules, "pathway", pathway)
    for name in nexmark.FROM_PYTHON:
        sources = flows.flow(name, nexmark.PARAMS).sources
        told = nexmark.PARAMS.get(name, {}) | {"columns": nexmark._columns(name), "folder": "f"}
        assert told["columns"] == {source: list(schema.names) for source, schema in sources.items()}
        seen: dict[str, set[str]] = {}

        def read(table: str, told: Any = told, seen: Any = seen) -> Any:
            stem, schema = module.read(told, table)
            assert stem == table and set(schema.values()) <= {str, int}
            assert list(schema) == [module._OWN.get(column, column) for column in told["columns"][table]]
            schemas.append(schema)
            seen[table] = set()
            return _Table(seen[table])

        module.QUERIES[name.split("_")[0]](read, told)
        for of, columns in seen.items():
            assert columns <= {module._OWN.get(column, column) for column in told["columns"][of]} | {"start"}, name
    assert any(len(schema) == 2 for schema in schemas)


def test_a_bench_on_spark_tells_the_settings_that_it_makes() -> None:
    from penstock_bench import foreach_batch_count, streams

    told = streams.told_settings(cores=2)
    assert told["spark.sql.shuffle.partitions"] == "2" and told["spark.sql.adaptive.enabled"] == "false"
    assert {"spark.sql.streaming.noDataMicroBatches.enabled", "spark.sql.streaming.pollingDelay"} <= set(told)
    assert "spark.driver.memory" in told and not any("/" in value for value in told.values())
    assert "settings\nare its defaults" not in str(foreach_batch_count.__doc__)
