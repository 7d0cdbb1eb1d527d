"""cargo test for the workspace, as many of its programs at once as there are cores.

Usage: ``python scripts/test_rust.py`` (or ``make test-rust``). Cargo builds all test programs and would run one after
the other, though many of them keep one core busy; here the next one starts when one ends, large ones first. Each says
in a line what it took, and one that fails is told as a whole. Then come the examples of the documentation, as cargo
runs them. All of them run, whatever fails.

By default each property has the same 128 cases each time: ``PROPTEST_RNG_SEED`` names others, ``PROPTEST_CASES`` how
many; `make test-long` has thousands of new ones. The binding crate has no tests of its own: it is tested through
Python. Only the standard library is used here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

CARGO = ["cargo", "test", "--workspace", "--locked"]
#: Seconds that building and running may take on two cores; over them it is said, and nothing fails.
BUDGETS = {"programs built": 330, "programs run": 300, "examples of the documentation": 60}
#: Seconds that one program may take: one that hangs is told with what it wrote, which names the test.
LIMIT_S = float(os.environ.get("PENSTOCK_TEST_LIMIT_S", "1200"))
#: Seconds without an end after which it is said what runs.
PATIENCE_S = 60.0
#: Results of a program, as its harness tells them.
_RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)


class Program(NamedTuple):
    """A test program: what it is called, its file, and where its package is."""

    name: str
    file: str
    package: Path


class Outcome(NamedTuple):
    """What became of a program: its exit status, all that it wrote, and how long it took in seconds."""

    status: int
    output: str
    seconds: float


def build() -> list[Program]:
    """Build all test programs; ends this process where that fails."""
    command = [*CARGO, "--no-run", "--message-format=json-render-diagnostics"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(run.returncode)
    programs = []
    for line in run.stdout.splitlines():
        told = json.loads(line)
        if told["reason"] != "compiler-artifact" or not told["profile"]["test"] or not told["executable"]:
            continue
        package = Path(told["manifest_path"]).parent
        source = Path(told["target"]["src_path"]).relative_to(package)
        programs.append(Program(f"{package.relative_to(Path.cwd())}/{source}", told["executable"], package))
    # A large program tends to have many tests: what takes long is not left for the end.
    return sorted(programs, key=lambda program: Path(program.file).stat().st_size, reverse=True)


def run(program: Program) -> Outcome:
    """Run one, as cargo does: in the folder of its package."""
    began = time.monotonic()
    environment = os.environ | {"CARGO_MANIFEST_DIR": str(program.package)}
    with tempfile.TemporaryFile() as said:
        running = subprocess.Popen(
            [program.file],
            cwd=program.package,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            status, more = running.wait(LIMIT_S), ""
        except subprocess.TimeoutExpired:
            status = 124
            more = f"\n{program.name} has not ended after {LIMIT_S:.0f} s: what stands above has no result\n"
        finally:
            running.kill()
            running.wait()
        said.seek(0)
        output = said.read().decode("utf-8", "replace") + more
    return Outcome(status, output, time.monotonic() - began)


def tell(program: Program, outcome: Outcome) -> int:
    """Print what became of a program, and return how many of its tests passed."""
    results = [tuple(map(int, found)) for found in _RESULT.findall(outcome.output)]
    passed = sum(found[0] for found in results)
    ignored = sum(found[2] for found in results)
    if outcome.status:
        print(f"\n{outcome.output}\n")
    verdict = f"FAILED with exit status {outcome.status}" if outcome.status else f"{passed} passed"
    print(f"{program.name}: {verdict}{f', {ignored} ignored' if ignored else ''}, {outcome.seconds:.1f} s", flush=True)
    return passed


def main() -> int:
    os.chdir(Path(__file__).resolve().parent.parent)
    seed = os.environ.setdefault("PROPTEST_RNG_SEED", "20")
    cases = os.environ.setdefault("PROPTEST_CASES", "128")
    print(f"properties: PROPTEST_RNG_SEED={seed} PROPTEST_CASES={cases}", flush=True)
    began = time.monotonic()
    programs = build()
    took = {"programs built": time.monotonic() - began}
    print(f"{len(programs)} programs built, {took['programs built']:.0f} s", flush=True)

    began, passed, failed = time.monotonic(), 0, []
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        running = {pool.submit(run, program): program for program in programs}
        left = set(running)
        while left:
            ended, left = wait(left, timeout=PATIENCE_S, return_when=FIRST_COMPLETED)
            if not ended:
                names = sorted(running[one].name for one in left if one.running())
                print(f"still running after {time.monotonic() - began:.0f} s: {', '.join(names)}", flush=True)
            for done in ended:
                program, outcome = running[done], done.result()
                passed += tell(program, outcome)
                if outcome.status:
                    failed.append(program.name)
    finally:
        pool.shutdown(cancel_futures=True)
    took["programs run"] = time.monotonic() - began
    print(f"{passed} tests passed, {took['programs run']:.0f} s", flush=True)

    began = time.monotonic()
    if subprocess.run([*CARGO, "--quiet", "--no-fail-fast", "--doc"]).returncode:
        failed.append("examples of the documentation")
    took["examples of the documentation"] = time.monotonic() - began
    for group, budget in BUDGETS.items():
        print(f"{took[group]:6.0f} of {budget:4.0f}  {group}{'  OVER' if took[group] > budget else ''}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
