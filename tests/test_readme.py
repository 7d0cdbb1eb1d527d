"""Every Python example of the README runs as it stands, in order, in one namespace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"

_PROGRAM = """
import re, sys
from pathlib import Path
from penstock.spark._session.session import private_session

readme, folder = Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2]
blocks = re.findall(r"^```python\\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
assert len(blocks) >= 6, len(blocks)
with private_session(Path(folder), "README", slots=4, settings={"spark.sql.shuffle.partitions": "2"}) as spark:
    namespace = {"folder": folder}  # its own lines get this session
    for number, block in enumerate(blocks):
        print(f"-- block {number}", flush=True)
        exec(compile(block, f"README.md block {number}", "exec"), namespace)
print("-- end")
"""


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_the_examples_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(README), str(tmp_path)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "'auction': 8" in done.stdout, "the sliding windows"
    assert "key_by: column 'auktion' does not exist here; there are auction, price" in done.stdout
    divided = r"stateful_map\[1\] divide: ZeroDivisionError: .* \(.*:2\)\n  row: k=2, v=0\n"
    assert len(re.findall(divided, done.stdout)) == 2, "here and in a task of Spark"
    assert done.stdout.rstrip().endswith("-- end")


def test_messages_stand_there_as_they_are() -> None:
    shown = re.sub(r"\n +#  ", "\n", README.read_text(encoding="utf-8"))
    assert "divide: ZeroDivisionError: ... (job.py:2)\n row: k=2, v=0\n" in shown


def test_java_and_the_interpreter_are_looked_for_before_a_session() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    making = [block for block in blocks if "SparkSession.builder" in block or 'master("local' in block]
    assert len(making) == 3
    for block in making:
        assert 0 <= block.find("pk.spark.ensure_java()") < block.find('master("local')
    first = next(block for block in blocks if re.search(r"(?<!pk\.)\bspark\.", block))
    assert first is making[0], "nobody is to guess where spark comes from"


def test_what_newcomers_looked_for_in_vain_is_there() -> None:
    readme = README.read_text(encoding="utf-8")
    for named in (
        "engine.start()",
        "engine.close()",
        "help(pk.Flow)",
        "import pyarrow.compute as pc",
        "docs/tpcxbb.md",
    ):
        assert named in readme, named
    assert "run.autobalance(processes=(1, 4))" in readme and "engine.autobalance(workers=(1, 4))" in readme
    for page in set(re.findall(r"\]\((docs/[\w.-]+)\)", readme)):
        assert README.with_name("docs").parent.joinpath(page).is_file(), page


def test_every_make_target_it_names_exists() -> None:
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"`?make ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
