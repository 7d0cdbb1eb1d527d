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
    namespace = {"spark": spark, "folder": folder}
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
    assert "divide: ZeroDivisionError" in done.stdout
    assert done.stdout.rstrip().endswith("-- end")


def test_every_make_target_it_names_exists() -> None:
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"`?make ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
