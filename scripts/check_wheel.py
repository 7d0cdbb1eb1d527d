"""Check the wheel as a user gets it: its content, and that it works away from the checkout.

Usage: ``python scripts/check_wheel.py [--to-publish] WHEEL``. One to publish names no folder of who built it in its
native module either, which costs a build of its own (`make wheel`). The wheel is unpacked into a temporary directory
that stands before everything else on the path, and a fresh interpreter runs a flow with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROGRAM = """
import sys
import penstock
assert penstock.__file__.startswith(sys.argv[1]), penstock.__file__
assert "pyspark" not in sys.modules, "importing penstock imported pyspark"
import threading
assert threading.active_count() == 1, "importing penstock started a thread"
import pyarrow as pa
import penstock as pk
table = pa.table({"word": ["a", "b", "a"]})
flow = pk.Flow(table.schema).key_by("word").agg(n=pk.count())
counts = {}
for batch in flow.run(table.to_reader(), workers=2):
    counts.update(zip(*(column.to_pylist() for column in batch.columns)))
assert counts == {"a": 2, "b": 1}, counts
from penstock.cli import main
assert main(["bench"]) == 2, "an installed package has no benches, and says so"
print("penstock", penstock.__version__, "works from its wheel")
"""


#: The folder in which cargo keeps the sources of crates, by a whole path.
CRATES = re.compile(rb"/[\x21-\x7e]*/registry/src/")


def builders_folders(archive: zipfile.ZipFile, to_publish: bool) -> list[str]:
    """Files that name a folder of who built the wheel."""
    found = []
    for name in archive.namelist():
        content = archive.read(name)
        bill = "/sboms/" in name and b"file://" in content
        native = to_publish and name.startswith("penstock/_native.") and not name.endswith(".pyi")
        if bill or (native and CRATES.search(content)):
            found.append(name)
    return found


def main(wheel: str, to_publish: bool) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        native = [name for name in names if name.startswith("penstock/_native.") and ".so" in name]
        assert native or any(name.endswith(".pyd") for name in names), "no native module in the wheel"
        assert "penstock/py.typed" in names, "no py.typed in the wheel"
        assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")], names
        assert not [name for name in names if name.startswith(("penstock_bench", "penstock/bench", "benches"))], (
            "benches in the wheel: they are of a checkout only"
        )
        assert not (told := builders_folders(archive, to_publish)), f"folders of who built it stand in {told}"
        for text in ("LICENSE", "THIRD-PARTY-NOTICES"):
            assert any(name.endswith(f"licenses/{text}") for name in names), f"no {text} in the wheel"
        with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as directory:
            archive.extractall(directory)
            path = os.path.realpath(directory)
            environment = dict(os.environ) | {"PYTHONPATH": path}
            subprocess.run([sys.executable, "-c", PROGRAM, path], env=environment, cwd=path, check=True)
    print(f"{Path(wheel).name}: {len(names)} files, {Path(wheel).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[-1], "--to-publish" in sys.argv[1:-1])
