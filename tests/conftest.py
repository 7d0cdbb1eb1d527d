"""What the tests share: how Hypothesis searches, where the data is, and one Spark session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No deadline: the first example imports, and the machine may be busy. HYPOTHESIS_PROFILE=long searches more.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def data_folder(name: str) -> Path:
    """Folder of a data set: below $PENSTOCK_DATA, or beside the repository; a skip where it is absent."""
    root = os.environ.get("PENSTOCK_DATA")
    base = Path(root) if root else Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = base / name
    if not folder.is_dir():
        pytest.skip(f"no data in {folder}; PENSTOCK_DATA names the folder that holds nexmark/ and text/")
    return folder


@pytest.fixture(scope="session")
def nexmark_data() -> Path:
    return data_folder("nexmark")


@pytest.fixture(scope="session")
def text_data() -> Path:
    return data_folder("text")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A classic session on two threads of this machine; a failed task is tried again three times."""
    pytest.importorskip("pyspark")
    from penstock.spark.java import JavaNotFound, ensure_java

    try:
        ensure_java()
    except JavaNotFound as error:
        pytest.skip(str(error).splitlines()[0])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2,4]")
        .appName("penstock tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "3")
        .config("spark.sql.session.timeZone", "America/New_York")
        .config("spark.driver.memory", "1g")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
