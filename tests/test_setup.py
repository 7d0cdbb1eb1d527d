"""What `make setup` says while it waits."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tomllib


def script(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_script", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return script("setup")


def told(setup: ModuleType, capsys: pytest.CaptureFixture[str], progress: Any) -> str:
    progress.tell()
    return capsys.readouterr().out.rsplit("  ", 1)[1].strip()


def test_it_says_which_packages_are_left(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup.Progress("install the pinned packages")
    assert told(setup, capsys, progress) == "install the pinned packages"
    for line in ("Resolved 60 packages in 1.33s", "Downloading pyspark (434.9MiB)", "Downloading numpy (16.1MiB)"):
        progress.hear(line)
    progress.hear(" Downloaded numpy")
    assert told(setup, capsys, progress) == "1 of 2 large packages fetched, left pyspark (434.9MiB)"
    progress.hear(" Downloaded pyspark")
    progress.hear("Prepared 60 packages in 20.1s")
    assert told(setup, capsys, progress) == "all packages fetched, now installed"
    assert progress.spoken == ["Resolved 60 packages in 1.33s"]


@pytest.mark.parametrize("given", [None, "/elsewhere"])
def test_make_says_where_cargo_builds(given: str | None) -> None:
    """Also where cargo's configuration names another folder: make looks for what it built."""
    root = Path(__file__).resolve().parents[1]
    ours = ("CARGO_TARGET_DIR", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {} if given is None else {"CARGO_TARGET_DIR": given}
    done = subprocess.run(
        ["make", "--no-print-directory", "-f", "Makefile", "-f", "-", "show"],
        input="show:\n\t@echo $$CARGO_TARGET_DIR\n",
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"{given or root / 'target'}\n"), done.stderr


def test_it_says_how_many_crates_are_left(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup.Progress("build the native module")
    progress.hear("   Compiling penstock-plan v0.1.0")
    progress.hear("    Building [=====>      ] 97/172: arrow-array, penstock-dataflow")
    assert told(setup, capsys, progress) == "97 of 172 crates built, now arrow-array, penstock-dataflow"


def test_a_release_build_stays_as_long_as_it_is_up_to_date(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`make run` behind `make release` built it again as a setup build."""
    monkeypatch.setattr(setup, "STAMPS", tmp_path)
    monkeypatch.setattr("sys.argv", ["setup.py"])
    assert setup.arguments().profile is None and setup.usual_profile("c0ffee") == "setup"
    for stamp, profile in (("release c0ffee", "release"), ("release older", "setup"), ("setup c0ffee", "setup")):
        (tmp_path / "native").write_text(stamp)
        assert setup.usual_profile("c0ffee") == profile


def test_our_builds_are_locked_and_those_of_a_source_distribution_are_not() -> None:
    """It has fewer members than Cargo.lock knows of, so pip could not build it."""
    root = Path(__file__).resolve().parents[1]
    assert "locked" not in tomllib.loads((root / "pyproject.toml").read_text())["tool"]["maturin"]
    files = [root / "Makefile", root / "scripts" / "setup.py", *(root / ".github" / "workflows").glob("*.yml")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    builds = [line for line in lines if re.search(r"maturin\W+(build|develop)\b", line)]
    assert len(builds) == 4 and all("--locked" in line for line in builds), builds


def test_a_checkout_that_was_copied_or_moved_is_set_up_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its environment has the paths of where it was: it would run the code of the other checkout."""
    link = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "penstock.pth"
    link.parent.mkdir(parents=True)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    assert setup.belongs_here(), "nothing is installed yet"
    for place, here in ((tmp_path, True), (tmp_path / "before", False)):
        link.write_text(f"{place / 'python'}\n")
        assert setup.belongs_here() is here
    assert not setup.venv_works()
    # The stamp came with it: the step is due, and does not keep what is there.
    monkeypatch.setattr(setup, "STAMPS", tmp_path / ".venv" / ".setup")
    step = setup.Step(1, "environment", "venv", "(3, 12)", setup.venv_works, setup.make_venv)
    setup.STAMPS.mkdir()
    (setup.STAMPS / "venv").write_text(step.wanted)
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(setup, "subprocess", SimpleNamespace(run=run))
    assert step.run() and asked == [[sys.executable, "-m", "venv", "--clear", str(setup.VENV)]]


def test_a_program_of_tests_that_hangs_is_told_with_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rust = script("test_rust")
    monkeypatch.setattr(rust, "LIMIT_S", 10.0)
    hangs = tmp_path / "hangs"
    # A shell has told it long before the limit, which a whole Python may not have.
    hangs.write_text("#!/bin/sh\necho 'test one has been running'\nexec sleep 600\n")
    hangs.chmod(0o755)
    outcome = rust.run(rust.Program("a/tests.rs", str(hangs), tmp_path))
    assert outcome.status == 124 and outcome.seconds < 60
    assert rust.tell(rust.Program("a/tests.rs", str(hangs), tmp_path), outcome) == 0
    said = capsys.readouterr().out
    assert "test one has been running" in said and "has not ended after 10 s" in said and "FAILED" in said


def test_what_still_runs_is_named_when_nothing_has_ended_for_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rust = script("test_rust")
    told = tmp_path / "told"
    waits = tmp_path / "waits"
    waits.write_text(f"#!/bin/sh\nuntil [ -e {told} ]; do sleep 0.1; done\n")
    waits.chmod(0o755)
    said: list[str] = []

    def hear(line: str, **_: Any) -> None:
        said.append(line)
        if "still running" in line:
            told.touch()

    monkeypatch.chdir(tmp_path)
    for name in ("PROPTEST_RNG_SEED", "PROPTEST_CASES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(rust, "build", lambda: [rust.Program("a/tests.rs", str(waits), tmp_path)])
    monkeypatch.setattr(rust, "print", hear, raising=False)
    monkeypatch.setattr(rust, "LIMIT_S", 60.0)
    monkeypatch.setattr(rust, "PATIENCE_S", 0.2)
    monkeypatch.setattr(rust.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))  # the documentation
    assert rust.main() == 0
    assert any(re.fullmatch(r"still running after \d+ s: a/tests\.rs", line) for line in said), said


def test_a_python_that_is_not_served_is_told_which_are(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind the newest nothing has wheels: uv began to compile numpy and pandas."""
    monkeypatch.setattr(setup, "arguments", lambda: pytest.fail("it goes on"))
    for version in ((3, 10, 13), (3, 15, 0)):
        shown = ".".join(map(str, version))
        monkeypatch.setattr(
            setup, "sys", SimpleNamespace(version_info=(*version, "final", 0), version=f"{shown} (main)", stderr=None)
        )
        with pytest.raises(SystemExit):
            setup.main()
        said = capsys.readouterr()
        assert f"Python {shown} runs this; the pinned development packages need 3.11 to 3.14." in said.out + said.err


def test_an_old_python_can_read_what_tells_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.8, where Popen has no parameter, ended with a TypeError."""
    monkeypatch.delattr(subprocess.Popen, "__class_getitem__")
    assert script("setup").OLDEST_PYTHON == (3, 11)


@pytest.mark.parametrize("name", ["python3.6", "python9"])
def test_make_names_a_python_that_is_not_served(tmp_path: Path, name: str) -> None:
    """The oldest cannot even read scripts/setup.py, and one that is not there can say nothing."""
    python, said = tmp_path / name, "not found"
    if name == "python3.6":
        said = "Python 3.6.15"
        python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {said} && exit\nexit 1\n')
        python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "--no-print-directory", "setup", f"PYTHON={python}"],
        cwd=Path(__file__).resolve().parents[1],
        env=environment | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    told = done.stderr.splitlines()[0]
    assert told.startswith(f"setup: PYTHON={python} (") and said in told and "is not Python 3.11 to 3.14" in told


def test_a_checkout_that_cannot_be_written_is_told(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *_: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup.os, "open", refuse)
    with pytest.raises(SystemExit):
        setup.only_one()
    assert f"cannot be written: Permission denied: {tmp_path}/target/.setup.lock" in capsys.readouterr().err


@pytest.mark.parametrize("has_uv", [True, False])
def test_real_parts_are_installed_without_uv_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_uv: bool) -> None:
    """`make setup` leaves it out where it cannot be had."""
    real = script("real_parts")
    uv, env = tmp_path / ".venv" / "bin" / "uv", tmp_path / "target" / "real" / "env"
    for folder in (uv.parent, env / "lib" / "python3.12" / "site-packages"):
        folder.mkdir(parents=True)
    if has_uv:
        uv.touch()
    (tmp_path / "real.txt").write_text("moto==5\n")
    monkeypatch.setattr(real, "ROOT", tmp_path)
    monkeypatch.setattr(real, "TARGET", env.parent)
    monkeypatch.setattr(real, "REQUIREMENTS", tmp_path / "real.txt")
    asked: list[list[str]] = []
    monkeypatch.setattr(real, "run", asked.append)
    real.environment()
    assert {command[0] for command in asked} == {str(uv) if has_uv else sys.executable}
    made, filled = asked
    assert "venv" in made and str(env) in made
    assert str(env / "bin" / "python") in filled and filled[-2:] == ["-r", str(tmp_path / "real.txt")]
    asked.clear()
    real.environment()
    assert not asked, "it is there"


def test_a_wheel_names_no_folder_of_who_built_it(tmp_path: Path) -> None:
    wheel = script("check_wheel")

    def found(*, to_publish: bool, **files: bytes) -> list[str]:
        names = {"native": "penstock/_native.abi3.so", "bill": "penstock-0.1.0.dist-info/sboms/python.cyclonedx.json"}
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
            for name, content in files.items():
                archive.writestr(names[name], content)
            result: list[str] = wheel.builders_folders(archive, to_publish)
        return result

    clean = b"\0crates/index.crates.io-1/arrow-1/src/lib.rs\0/rustc/1/library/core/src/lib.rs"
    named = b"\0/home/ann/.cargo/registry/src/index.crates.io-1/arrow-1/src/lib.rs\0"
    assert found(to_publish=True, native=clean, bill=b'{"bom-ref": "pkg:cargo/arrow@1"}') == []
    assert found(to_publish=True, native=named) == ["penstock/_native.abi3.so"]
    assert found(to_publish=False, native=named) == []  # as who develops has it
    assert len(found(to_publish=False, bill=b'{"bom-ref": "path+file:///home/ann/penstock#0.1.0"}')) == 1
    told = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())
    assert told["tool"]["maturin"]["sbom"] == {"rust": False}
