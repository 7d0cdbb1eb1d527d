"""What the tests share: how Hypothesis searches, where the data is, and one Spark session."""

from __future__ import annotations

import os
import shutil
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
def tpcxbb_data() -> Path:
    return data_folder("tpcxbb")


@pytest.fixture(scope="session")
def text_data() -> Path:
    return data_folder("text")


class Sessions:
    """One Spark session at a time, of the kind that was asked for last; the JVM stays."""

    def __init__(self) -> None:
        self.session: Any = None
        self.master = ""

    def get(self, master: str) -> Any:
        pytest.importorskip("pyspark")
        from penstock.spark.java import JavaNotFound, ensure_java

        if self.session is not None and self.master == master and self.session.sparkContext._jsc is not None:
            return self.session
        self.stop()
        try:
            ensure_java()
        except JavaNotFound as error:
            pytest.skip(str(error).splitlines()[0])
        os.environ["PYSPARK_PYTHON"] = sys.executable
        from pyspark.sql import SparkSession

        self.master = master
        self.session = (
            SparkSession.builder.master(master)
            .appName("penstock tests")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "3")
            .config("spark.sql.session.timeZone", "America/New_York")
            .config("spark.driver.memory", "1g")
            .config("spark.executor.memory", "512m")
            .config("spark.log.level", "ERROR")
            .getOrCreate()
        )
        self.session.sparkContext.setLogLevel("ERROR")
        return self.session

    def stop(self) -> None:
        if self.session is None:
            return
        application, home = self.session.sparkContext.applicationId, Path(find_spark_home())
        self.session.stop()
        self.session = None
        # The worker of a local cluster keeps the logs of its executors below Spark's home.
        shutil.rmtree(home / "work" / application, ignore_errors=True)


def find_spark_home() -> str:
    from pyspark.find_spark_home import _find_spark_home

    return str(_find_spark_home())


@pytest.fixture(scope="session")
def sessions() -> Iterator[Sessions]:
    held = Sessions()
    yield held
    held.stop()


@pytest.fixture(scope="module")
def spark(sessions: Sessions) -> Any:
    """A classic session on two threads of this machine; a failed task is tried again three times."""
    return sessions.get("local[2,4]")


@pytest.fixture(scope="module")
def cluster(sessions: Sessions) -> Any:
    """A classic session on two executors of two slots each, in processes of their own."""
    return sessions.get("local-cluster[2,2,1024]")
