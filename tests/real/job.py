"""The driver of a scenario: a topic of bids into the engine into a table. It is killed and started again.

Reads commands on standard input, a line each, and answers on standard output with a line of JSON each: ``rescale N``
(answered when it is done), ``finish`` (take all that the topic has, stop). Ends by itself when its input ends.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

import penstock as pk

SCHEMA = "auction bigint, price bigint"
FLOW = pk.Flow(SCHEMA).key_by("auction").agg(n=pk.count(), total=pk.sum("price"))


def tell(what: str, **facts: Any) -> None:
    print(json.dumps({"told": what, **facts}), flush=True)


def to_postgres(place: dict[str, Any]) -> Any:
    """Executors write a staging table; one transaction then takes it over, once for each batch."""
    import pg8000.native

    url = f"jdbc:postgresql://{place['host']}:{place['port']}/{place['database']}"

    def sink(df: Any, batch_id: int) -> None:
        staging = f"staging_{batch_id}_{secrets.token_hex(4)}"
        options = {"user": place["user"], "driver": "org.postgresql.Driver"}
        df.write.jdbc(url, staging, mode="overwrite", properties=options)
        with pg8000.native.Connection(**place) as base:
            base.run("BEGIN")
            base.run("DELETE FROM batches WHERE batch = :batch", batch=batch_id)
            base.run(f"INSERT INTO batches SELECT :batch, count(*) FROM {staging}", batch=batch_id)
            base.run(
                f"INSERT INTO bids SELECT auction, n, total, :batch FROM {staging} ON CONFLICT (auction) DO UPDATE"
                " SET (n, total, batch) = (excluded.n, excluded.total, excluded.batch)"
                " WHERE bids.batch <= excluded.batch",
                batch=batch_id,
            )
            base.run(f"DROP TABLE {staging}")
            base.run("COMMIT")

    return sink


def to_delta(path: str, query: Any) -> Any:
    """Rows of each batch, appended once: Delta knows the last batch of the query."""

    def sink(df: Any, batch_id: int) -> None:
        from pyspark.sql.functions import lit

        (
            df.withColumn("batch", lit(batch_id).cast("bigint"))
            .write.format("delta")
            .mode("append")
            .option("txnAppId", f"{query()}/bids/rows")
            .option("txnVersion", str(batch_id))
            .save(path)
        )

    return sink


def main() -> None:
    options = json.loads(sys.argv[1])
    from pyspark.sql import SparkSession

    folder = Path(options["folder"])
    jars = ":".join(f"{folder}/*" for folder in options["jars"])
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    builder = (
        SparkSession.builder.master("local-cluster[2,3,1024]")
        .appName("penstock real")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.executor.memory", "768m")
        .config("spark.driver.extraClassPath", jars)
        .config("spark.executor.extraClassPath", jars)
        .config("spark.driver.extraJavaOptions", quick)
        .config("spark.executor.extraJavaOptions", quick)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.databricks.delta.snapshotPartitions", "2")
        .config("spark.log.level", "WARN")
    )
    for name, value in options.get("conf", {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    engine = pk.Engine(spark, workers=options["workers"], bits=5, name="real", tls=options.get("tls", "auto"))
    with engine:
        query: Any = None
        if options["sink"] == "postgres":
            sink = to_postgres(options["postgres"])
        else:
            sink = to_delta(options["delta"], lambda: function.query_id)
        place = {} if options.get("state") is None else {"checkpoint": options["state"]}
        function = engine.foreach_batch(FLOW, sink, **place)
        stream = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", options["kafka"])
            .option("subscribe", options["topic"])
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", options["records"])
            .load()
            .selectExpr("explode(split(cast(value AS string), ';')) AS bid")
            .selectExpr("split(bid, ',') AS words")
            .selectExpr("cast(words[0] AS bigint) AS auction", "cast(words[1] AS bigint) AS price")
        )
        query = stream.writeStream.option("checkpointLocation", options["checkpoint"]).foreachBatch(function).start()
        gateway = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
        tell("started", python=os.getpid(), jvm=gateway, app=spark.sparkContext.applicationId)
        ended = threading.Event()

        def members() -> None:
            """What serves, whenever it changes."""
            before: Any = None
            while not ended.is_set():
                now = [[member.pid, member.address] for member in engine.members() if member.lost is None]
                if now != before:
                    tell("members", members=now)
                    before = now
                if not query.isActive:
                    tell("ended", error=str(function.error or query.exception()))
                    return
                time.sleep(0.05)

        threading.Thread(target=members, daemon=True).start()

        def resize(workers: int) -> None:
            try:
                tell("rescaled", workers=engine.rescale(workers).wait(120))
            except Exception as error:
                tell("rescaled", error=f"{type(error).__name__}: {error}")

        for line in sys.stdin:
            command, *words = line.split()
            if command == "rescale":
                threading.Thread(target=resize, args=(int(words[0]),), daemon=True).start()
            elif command == "finish":
                query.processAllAvailable()
                ended.set()
                query.stop()
                tell("finished")
                break
    spark.stop()


if __name__ == "__main__":
    main()
