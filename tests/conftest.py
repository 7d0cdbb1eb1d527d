"""What the tests share: how Hypothesis searches, where the data is, one Spark session, their order and its cost.

Tests marked ``long`` repeat for minutes what others show in seconds, each with a process and a JVM of its own; they run
with ``--long`` (`make test-long`). Tests that want the same kind of Spark session stand together, also those of modules
that want two kinds, since changing it costs seconds. In parallel (``-n 2 --dist loadgroup --no-loadscope-reorder``, as
`make test` does) a process takes all tests of a session, then the next that nobody has: longest first, so that all end
together. A third one would fill the fifth of two cores that they leave, and save nothing: 956 s instead of 945. At the
end stands what each group of tests took, beside what it may.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.nodeid import coerce_node_id
from hypothesis import settings

import data_support
import interrupt_support
import spark_classes

#: Seconds that a group of tests may take on two cores, by the first of these that a test's path contains. Two processes
#: share the sum: 16 minutes of the 30 that `make test` has, without tests/real, which it leaves out.
BUDGETS = {
    "tests/spark/": 880.0,
    "tests/fault/": 260.0,
    "tests/surface/": 140.0,
    "tests/real/": 1500.0,
    "tests/": 600.0,
}

#: Fixtures that are shared sessions, the one with the longest tests first.
SESSIONS = ("cluster", "spark", "wide")

# A shell's background jobs ignore interrupts, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The benches' program as `cargo test` builds it anyway: no figure is kept.
os.environ.setdefault("PENSTOCK_BENCH_PROFILE", "dev")

# No deadline: the first example imports, and the machine may be busy. The same examples each time, unless
# HYPOTHESIS_PROFILE asks for fresh ones, as `make test-long` does, or for many; see `examples`.
settings.register_profile("default", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("fresh", deadline=None, print_blob=True, max_examples=300)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run what repeats for minutes")
    parser.addoption("--real", action="store_true", help="also run what needs Kafka, PostgreSQL, Delta and S3")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        interrupt_support.THINNED = 1


def module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def session_of(item: pytest.Item) -> str | None:
    names = getattr(item, "fixturenames", ())
    return next((fixture for fixture in SESSIONS if fixture in names), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if item.get_closest_marker("real") and not config.getoption("--real")]
    left += [item for item in items if item.get_closest_marker("long") and not config.getoption("--long")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    shared: dict[str, set[str]] = {}
    starts = set()
    for item in items:
        shared.setdefault(module_of(item), set()).update(filter(None, [session_of(item)]))
        if item.get_closest_marker("spark"):
            starts.add(module_of(item))

    def group_of(item: pytest.Item) -> str:
        # What needs no session stays with others of its module.
        return session_of(item) or min(shared[module_of(item)], key=SESSIONS.index, default=module_of(item))

    def place_of(item: pytest.Item) -> int:
        group = group_of(item)
        # Modules that start a JVM of their own take longer than those that need none.
        return SESSIONS.index(group) if group in SESSIONS else len(SESSIONS) + (group not in starts)

    groups = {item: group_of(item) for item in items}
    items.sort(key=place_of)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # The scheduler takes what follows an @ for the group. pytest-xdist 3.8 writes it where pytest 9.2 never looks:
        # all tests would be dealt out one by one, to two processes with all sessions and engines each.
        for item, group in groups.items():
            item._id = coerce_node_id(f"{item.nodeid}@{group}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    spent: dict[str, list[float]] = {group: [] for group in BUDGETS}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[next(group for group in BUDGETS if report.nodeid.startswith(group))].append(report.duration)
    terminalreporter.section("seconds by group of tests")
    for group, budget in BUDGETS.items():
        total = sum(spent[group])
        over = "  OVER" if total > budget else ""
        terminalreporter.write_line(f"{total:6.0f} of {budget:4.0f}  {group}{over}")


@pytest.fixture(scope="session", autouse=True)
def quick_jvms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spark's defaults for sessions that tests start in processes of their own."""
    file = tmp_path_factory.mktemp("spark") / "defaults.conf"
    options = spark_classes.options()
    file.write_text("".join(f"spark.{who}.defaultJavaOptions {options}\n" for who in ("driver", "executor")))
    with pytest.MonkeyPatch.context() as patch:
        # SPARK_CONF_DIR would be on the class path: a JVM maps no archive that was made with another one.
        patch.setenv("PYSPARK_SUBMIT_ARGS", f"--properties-file {file} pyspark-shell")
        yield


@pytest.fixture
def all_awaited() -> Iterator[None]:
    """A test that leaves no coroutine that was never awaited; what others have left to be collected is not of it."""
    gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
        gc.collect()
    left = [str(warning.message) for warning in told if "never awaited" in str(warning.message)]
    assert left == []


def real_data() -> Path:
    """Where data sets are that are not made here: $PENSTOCK_DATA, or beside the repository."""
    root = os.environ.get("PENSTOCK_DATA")
    return Path(root) if root else Path(__file__).resolve().parents[2] / "shared" / "data"


def data_folder(name: str) -> Path:
    """Folder of a real data set; a skip where it is absent, of what can be compared with nothing else."""
    folder = real_data() / name
    if not folder.is_dir():
        pytest.skip(f"no data in {folder}; PENSTOCK_DATA names the folder that holds {name}/")
    return folder


def pytest_report_header(config: pytest.Config) -> str:
    made = [name for name in data_support.MAKERS if not (real_data() / name).is_dir()]
    return f"data sets: {real_data()}" + (f"; made, since they are not there: {', '.join(made)}" if made else "")


def data_or_made(name: str, factory: pytest.TempPathFactory) -> Path:
    """Folder of a data set, the real one where it is there."""
    folder = real_data() / name
    if not folder.is_dir():
        folder = factory.mktemp(name)
        data_support.MAKERS[name](folder)
    return folder


@pytest.fixture(scope="session")
def nexmark_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data_or_made("nexmark", tmp_path_factory)


@pytest.fixture(scope="session")
def tpcxbb_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data_or_made("tpcxbb", tmp_path_factory)


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data_or_made("text", tmp_path_factory)


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data_or_made("graphs", tmp_path_factory)


@pytest.fixture(scope="session")
def figures(graphs: Path) -> Mapping[str, data_support.Graph]:
    """Of each graph how large it is and how many cliques it has: published, or counted by sets."""
    if graphs == real_data() / "graphs":
        return data_support.PUBLISHED
    return {name: data_support.figures(graphs / f"{name}.txt.gz") for name in data_support.PUBLISHED}


class Sessions:
    """One Spark session at a time, of the kind that was asked for last; the JVM stays."""

    def __init__(self) -> None:
        self.session: Any = None
        self.kind: tuple[str, dict[str, str]] = ("", {})

    def get(self, master: str, settings: Mapping[str, str] | None = None) -> Any:
        pytest.importorskip("pyspark")
        from penstock.errors import JavaNotFound
        from penstock.spark._session.java import ensure_java

        kind = (master, dict(settings or {}))
        if self.session is not None and self.kind == kind and self.session.sparkContext._jsc is not None:
            return self.session
        self.stop()
        try:
            ensure_java()
        except JavaNotFound as error:
            pytest.skip(str(error).splitlines()[0])
        os.environ["PYSPARK_PYTHON"] = sys.executable
        from pyspark.sql import SparkSession

        self.kind = kind
        self.session = (
            SparkSession.builder.config(map=kind[1])
            .master(master)
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
def wide(sessions: Sessions) -> Any:
    """A classic session on six threads of this machine; a failed task is not tried again."""
    return sessions.get("local[6]")


@pytest.fixture(scope="module")
def cluster(sessions: Sessions) -> Any:
    """A classic session on two executors of two slots each, in processes of their own."""
    return sessions.get("local-cluster[2,2,1024]")
