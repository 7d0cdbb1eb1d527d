"""What is public is in a package's ``__all__``; everything else has an underscore."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest

import penstock as pk

#: Programs of the package: nobody imports from them.
PROGRAMS = {"cli", "demo", "workloads"}
#: Modules that are named by what is public in them, beside a package's names.
MODULES = {"penstock.spark": {"batch", "engine", "gang", "graph", "ordered", "sources", "state"}}
PACKAGES = ["penstock", *(f"penstock.{n}" for n in ("dataflow", "graph", "ordered", "report", "spark"))]


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_not_public_has_an_underscore(name: str) -> None:
    package = importlib.import_module(name)
    found = {module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")}
    assert found <= set(package.__all__) | MODULES.get(name, set()) | (PROGRAMS if name == "penstock" else set())


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_public_is_there_and_told(name: str) -> None:
    package = importlib.import_module(name)
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        thing = getattr(package, public)
        assert not public.startswith("_") or public == "__version__"
        if isinstance(thing, (type, types.FunctionType)):
            assert thing.__doc__, public


@pytest.mark.parametrize(
    "name", ["penstock", "penstock.errors", "penstock.handles", "penstock.spark", "penstock.state"]
)
def test_nothing_else_is_shown(name: str) -> None:
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)


def test_what_calls_return_can_be_named() -> None:
    import pyarrow as pa

    flow = pk.Flow("k bigint").key_by("k").agg(n=pk.count())
    with flow.run(pa.table({"k": [1, 1, 2]}), workers=2) as run:
        assert isinstance(run, pk.handles.LocalResults)
        assert isinstance(run.autobalance(dry_run=True), pk.handles.Autobalance)
    with flow.start(workers=2) as session:
        assert isinstance(session, pk.handles.LocalSession)
        done = session.migrate(moves={0: 1})
        assert isinstance(done, pk.handles.Migration) and isinstance(done.wait(60), pk.handles.MigrationReport)
    for name in pk.handles.__all__:
        assert getattr(pk.handles, name).__name__ == name and getattr(pk.handles, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Handle'"):
        pk.handles.Handle  # noqa: B018


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("avg", "mean"),
        ("collect_list", "Flow.stateful_map"),
        ("lit", "Flow.map_batches"),
        ("median", "approx_quantile"),
    ],
)
def test_functions_of_spark_say_what_does_their_work(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"use {instead}"):
        getattr(pk, name)


def test_every_error_has_the_base_that_is_promised() -> None:
    found = [getattr(pk.errors, name) for name in pk.errors.__all__ if name != "from_failure"]
    assert all(issubclass(error, pk.PenstockError) for error in found) and pk.errors.JavaNotFound in found


def test_errors_of_a_call_name_the_method_as_it_is_written() -> None:
    flow: Any = pk.Flow("k bigint")
    for call, says in (
        (lambda: flow.collect(), r"^Flow\.collect\(\) missing 1 required positional argument: 'source'"),
        (lambda: flow.key_by("k").stateful_map(print), r"^Flow\.stateful_map\(\) missing 1 required keyword-only"),
        (lambda: flow.map_in_arrow(iter([])), r"^Flow\.map_in_arrow\(\) takes 1 positional argument but 2 were given"),
        (lambda: flow.explain("text", 1), r"^Flow\.explain\(\) takes from 1 to 2"),
    ):
        with pytest.raises(TypeError, match=says):
            call()
    for name in ("collect", "agg", "map_batches", "join", "explain"):
        method = getattr(pk.Flow, name)
        assert method.__qualname__ == f"Flow.{name}" and pickle.loads(pickle.dumps(method)) is method


def test_what_users_name_is_reachable() -> None:
    assert pk.report.Timeline and issubclass(pk.LateRows, UserWarning) and pk.GroupState.__doc__


def test_what_needs_spark_says_so_without_it() -> None:
    """Who only looks, as help and star imports do, is not stopped by it."""
    text = """
        import importlib.abc, inspect, sys
        class Blocks(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("pyspark", "pandas", "numpy"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Blocks())
        import importlib.util
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "pyspark" else found(name, package)
        from penstock import *
        from penstock.spark import *
        import penstock as pk
        import pyarrow as pa
        assert not hasattr(pk, "Engine") and hasattr(pk, "Flow")
        assert "Engine" not in dict(inspect.getmembers(pk)) and "Flow" in dict(inspect.getmembers(pk))
        for holder, name in ((pk, "Engine"), (pk.spark, "Engine"), (pk.spark, "engines")):
            try:
                getattr(holder, name)
            except AttributeError as error:
                assert "needs Spark, which is not installed here: pip install 'pyspark>=" in str(error), error
            else:
                raise AssertionError(name)
        assert not hasattr(pk.spark, "Engine") and "run" in dict(inspect.getmembers(pk.spark))
        flow = pk.Flow("user string").key_by("user").apply_in_pandas_with_state(
            lambda key, frames, state: frames, "user string", "seen bigint", "update", "NoTimeout"
        )
        try:
            flow.collect(pa.table({"user": ["ann"]}))
        except pk.errors.ConfigError as error:
            said = "apply_in_pandas_with_state needs numpy, which is not installed here: pip install 'pyspark>="
            assert str(error).startswith(said) and "'pandas>=" in str(error), error
        else:
            raise AssertionError("apply_in_pandas_with_state")
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(text)], check=True, timeout=100)


def test_a_stub_of_pyspark_is_no_reason_to_fail() -> None:
    """`find_spec` refuses a module that does not say where it comes from."""
    text = """
        import sys, types
        sys.modules["pyspark"] = types.ModuleType("pyspark")
        import penstock, penstock.spark
        assert "Engine" in dir(penstock) and "Engine" in dir(penstock.spark)
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(text)], check=True, timeout=100)
