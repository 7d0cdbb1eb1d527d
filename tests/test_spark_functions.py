"""Functions of the user on their way to Spark's Python workers, without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import venv
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pytest

import penstock as pk
from penstock import ordered
from penstock.errors import ConfigError
from penstock.spark._tasks import functions
from penstock.spark._tasks.partitions import dump_calls, load_calls

LOCK = threading.Lock()


def test_a_stateful_stream_says_how_it_starts() -> None:
    pytest.importorskip("pyspark")
    stream = pk.spark.StatefulStream(SimpleNamespace(writeStream=None), pk.Flow("k bigint"))
    with pytest.raises(AttributeError, match=r"no attribute 'writeStream': start it on an engine, \.start\(engine,"):
        stream.writeStream  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        stream.nothing  # noqa: B018
    with pytest.raises(ConfigError, match=r"engine is a object: .* pk\.Engine\(spark, workers=2\) as engine"):
        stream.foreach_batch(object(), print)  # type: ignore[arg-type]


def test_functions_travel_by_value() -> None:
    factor = 3
    assert functions.load(functions.dump(lambda x: x * factor, "it"), "it")(2) == 6


def test_what_cannot_travel_is_named_where_it_is_given() -> None:
    lock = LOCK
    with pytest.raises(ConfigError, match=r"^the function of ordered cannot be sent to Spark's .*lock"):
        pk.spark.ordered(lambda batch: (lock, batch), "id bigint")
    with pytest.raises(ConfigError, match=r"^the function of ordered_partitions cannot be sent to Spark's"):
        pk.spark.ordered_partitions(ordered.Pipeline([ordered.map(lambda x: (lock, x))]))
    flow = pk.Flow("id bigint").map_batches(lambda batch: batch).map_batches(lambda batch: (lock, batch)[1])
    with pytest.raises(ConfigError, match=r"map_batches.*: the function cannot be sent to Spark's Python workers"):
        flow.map_in_arrow()


def test_a_function_of_a_flow_says_which_call_it_is_for() -> None:
    pandas = pytest.importorskip("pandas")
    function = pk.Flow("id bigint").map_batches(lambda batch: batch).map_in_arrow()
    with pytest.raises(ConfigError, match=r"got a DataFrame, not a pyarrow\.RecordBatch: it is for .*mapInArrow$"):
        next(function(iter([pandas.DataFrame({"id": [1]})])))


async def fetched(x: int) -> int:
    return x


def test_coroutine_functions_are_refused_where_they_are_given() -> None:
    with pytest.raises(ConfigError, match=r"^ordered: fetched is a coroutine function, and nobody awaits"):
        pk.spark.ordered(fetched, "id bigint")
    with pytest.raises(ConfigError, match=r"^ordered_partitions: fetched is a coroutine function"):
        pk.spark.ordered_partitions(fetched)


def test_the_step_that_cannot_travel_is_named() -> None:
    calls = [{"step": "step 1", "func": abs}, {"step": "step 2", "func": lambda: LOCK}]
    assert load_calls(dump_calls(calls[:1])) == calls[:1]
    with pytest.raises(ConfigError, match=r"^step 2: the function cannot be sent"):
        dump_calls([calls[0], {"step": "step 2", "func": [LOCK]}])
    with pytest.raises(ConfigError, match=r"^a function of the flow cannot be sent"):
        dump_calls([calls[0] | {"notes": LOCK}])


def test_a_module_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_at_the_driver")
    exec("def program(worker):\n    return worker", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pickled = functions.dump(module.program, "the program of the gang")
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ConfigError, match="comes from the module 'only_at_the_driver', which Spark's Python") as caught:
        functions.load(pickled, "the program of the gang")
    assert "register_pickle_by_value(only_at_the_driver)" in str(caught.value)
    assert "addPyFile, install" in str(caught.value)
    # A resident process finds no files that come while it runs.
    with pytest.raises(ConfigError, match=r"^a function of the flow comes from .* 'only_at_the_driver'") as caught:
        functions.load_at_member(pickled)
    assert "addPyFile before the engine starts, install it on the executors" in str(caught.value)
    assert "register_pickle_by_value(only_at_the_driver)" in str(caught.value)
    assert functions.load_at_member(functions.dump([len], "it")) == [len]


def test_files_of_installed_packages_are_not_the_users() -> None:
    for module in (os, subprocess, pa, pytest, pk, functions):
        assert not functions._is_users(module.__file__), module
    assert functions._is_users(__file__)


def test_a_program_below_the_prefix_of_python_is_the_users(tmp_path: Path) -> None:
    """As in /usr/local/app of an image whose Python is in /usr/local, or beside the packages of an environment."""
    venv.create(tmp_path, symlinks=True)
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "steps.py").write_text("def twice(x):\n    return 2 * x\n")
    script = """
import pathlib, sys
import steps
from penstock.spark._tasks import functions
pickled = functions.dump([steps.twice], "it")
before = functions.sources(pickled)
pathlib.Path(steps.__file__).write_text("def twice(x):\\n    return 2 * x + 1\\n")
print(sorted(before), before != functions.sources(pickled), steps.__file__.startswith(sys.prefix))
"""
    ours = [str(Path(pk.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    done = subprocess.run(
        [tmp_path / "bin" / "python", "-c", script],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(folder), *ours])},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['steps'] True True\n", done.stdout + done.stderr
