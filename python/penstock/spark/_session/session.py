"""A local Spark session that leaves nothing behind.

Every file that Spark writes lies under a folder of the caller's, the session listens on loopback only, and
its JVM has ended when the session is left. For programs that own their process, such as the command line; a
library takes the session that it is given.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.spark._tasks.failures import outliving

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["private_session"]


@contextlib.contextmanager
def private_session(
    folder: Path, name: str, slots: int, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Start a local session, and end it with its JVM afterwards.

    Parameters
    ----------
    folder : Path
        An existing folder for Spark's files and its log, ``spark.log``; the caller removes it.
    name : str
        Application name.
    slots : int
        Tasks that run at once.
    settings : mapping of str to str, optional
        More settings; they win over the ones made here.

    Yields
    ------
    pyspark.sql.SparkSession
        Classic.

    Raises
    ------
    JavaNotFound
        When there is no Java for Spark.
    RuntimeError
        When this process has a Spark context already.

    Notes
    -----
    Starting takes about five seconds. What Spark and its JVM write to standard error goes to the log; when
    starting fails, its end goes to standard error.
    """
    from penstock.spark._session.java import ensure_java, own_python

    ensure_java()
    own_python()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None or SparkContext._gateway is not None:
        raise RuntimeError("this process has a Spark context already; a private session needs its own")
    chosen = {
        "spark.master": f"local[{slots}]",
        "spark.app.name": name,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.local.dir": str(folder / "spark"),
        # Paths are of this machine, whatever Hadoop's configuration says here.
        "spark.hadoop.fs.defaultFS": "file:///",
        "spark.eventLog.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.extraJavaOptions": (
            f'-XX:-UsePerfData "-Djava.io.tmpdir={folder}" "-Dderby.system.home={folder}"'
        ),
    } | dict(settings or {})
    builder = SparkSession.builder
    for key, value in chosen.items():
        builder = builder.config(key, value)
    with _quiet_start(folder / "spark.log"), _environment("SPARK_LAUNCHER_OPTS", "-XX:-UsePerfData"):
        spark = builder.getOrCreate()
    gateway = SparkContext._gateway
    try:
        yield spark
    except Exception as error:
        if (told := outliving(error)) is error:
            raise
        raise told from None
    finally:
        with contextlib.suppress(Exception):
            spark.stop()
        _end_jvm(gateway)
        SparkContext._gateway = SparkContext._jvm = None


@contextlib.contextmanager
def _quiet_start(log: Path) -> Iterator[None]:
    """Send what Spark and its JVM write to standard error into a file, so that it does not cut up the view.

    The JVM inherits the descriptor and keeps it; this process has its own back afterwards. When the start
    fails, the file's end goes to standard error.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    except BaseException:
        os.write(kept, log.read_bytes()[-4000:])
        raise
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _environment(name: str, addition: str) -> Iterator[None]:
    """Add words to an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = f"{before} {addition}" if before else addition
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _end_jvm(gateway: Any) -> None:
    """End the gateway's JVM, which otherwise lives as long as this process, and wait for it."""
    with contextlib.suppress(Exception):
        gateway.shutdown()
    process = getattr(gateway, "proc", None)
    if process is None:
        return
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(20)
    except Exception:
        process.kill()
        process.wait()
