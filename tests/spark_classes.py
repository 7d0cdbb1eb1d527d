"""An archive of the classes that Spark loads, for the JVMs that tests start.

Each of them reads, verifies and links the same ten thousand classes, which is half of what it does until its first
result. ``python tests/spark_classes.py`` has one JVM start Spark, run a bit of all that tests do, and leave what it
loaded in a file that later ones map (class-data sharing). `make test` calls it, once for a Java and a Spark; without
the file tests say the same and take longer. A JVM that cannot use it goes on without it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark

from penstock.errors import JavaNotFound
from penstock.spark._session.java import find_java

_FOLDER = Path(__file__).resolve().parents[1] / "target" / "spark-classes"
#: JVMs that live for seconds spend most of them on compiling well what runs once.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def archive() -> Path | None:
    """Where the archive of this Java and this Spark stands, or would; without a Java nowhere."""
    try:
        java = find_java()
    except JavaNotFound:
        return None
    home = str(java.home.resolve()).strip(os.sep).replace(os.sep, "-")
    return _FOLDER / f"{home}-spark-{pyspark.__version__}.jsa"


def options() -> str:
    """What the JVMs of tests are started with; they map the archive where there is one."""
    file = archive()
    if file is None or not file.is_file():
        return QUICK_JVM
    return f"{QUICK_JVM} -XX:SharedArchiveFile={file} -Xlog:cds*=off"


def make(file: Path) -> None:
    """Start Spark, use it, and keep the classes that it loaded."""
    from penstock.spark._session.session import private_session

    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=file.parent) as folder:
        place, made = Path(folder), Path(folder, file.name)
        dump = f"{QUICK_JVM} -XX:ArchiveClassesAtExit={made} -Xlog:cds*=off"
        with private_session(place, "classes", 2, {"spark.driver.extraJavaOptions": dump}) as spark:
            _use(spark, place)
            # It writes the archive when it ends, which takes longer on a busy machine than the session would wait.
            gateway = spark.sparkContext._gateway
            spark.stop()
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait()
        if made.is_file():
            made.replace(file)


def _use(spark: Any, place: Path) -> None:
    """A bit of all that tests do with Spark."""

    def same(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    rows = spark.range(1_000).selectExpr("id % 7 AS k", "id AS v", "cast(id AS string) AS s")
    rows.write.parquet(f"{place}/rows")
    counted = rows.groupBy("k").count()
    assert len(counted.orderBy("k").collect()) == 7
    assert rows.join(counted, "k").mapInArrow(same, "k bigint, v bigint, s string, n bigint").count() == 1_000
    stream = spark.readStream.schema(rows.schema).parquet(f"{place}/rows")
    writer = stream.mapInArrow(same, rows.schema).writeStream.option("checkpointLocation", f"{place}/checkpoint")
    writer.foreachBatch(lambda df, _: df.count()).trigger(availableNow=True).start().awaitTermination()


def main() -> int:
    """Make the archive where it is missing; without a Java there is nothing to make."""
    file = archive()
    if file is None:
        print("no Java, no archive")
    elif file.is_file():
        print(f"{file} is there")
    else:
        make(file)
        print(f"{file}: {file.stat().st_size >> 20} MiB" if file.is_file() else "this Java makes no archives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
