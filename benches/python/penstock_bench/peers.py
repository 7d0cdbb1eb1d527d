"""Spark's own ways to keep Python state per key, written as their documentation has it; `penstock bench` compares.

Owns: one computation, the running mean per key, for ``applyInPandasWithState``, ``transformWithState`` and
``transformWithStateInPandas``. Each input row gives one row: key, how many there were so far, their mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]
    from pyspark.sql import DataFrame

__all__ = ["OUTPUT", "PEERS", "STATE", "lacking", "running_means"]

#: Columns that come out, and those of the state.
OUTPUT, STATE = "k bigint, n bigint, mean double", "n bigint, total bigint"


def running_means(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """The function for ``applyInPandasWithState``."""
    import pandas as pd

    n, total = state.get if state.exists else (0, 0)
    for frame in frames:
        counts, means = [], []
        for value in frame["v"].tolist():
            n += 1
            total += value
            counts.append(n)
            means.append(total / n)
        yield pd.DataFrame({"k": key[0], "n": counts, "mean": means})
    state.update((n, total))


def _apply_in_pandas(frame: DataFrame) -> DataFrame:
    return frame.groupBy("k").applyInPandasWithState(running_means, OUTPUT, STATE, "append", "NoTimeout")


def _transform_in_pandas(frame: DataFrame) -> DataFrame:
    import pandas as pd
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class RunningMeans(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.state = handle.getValueState("state", STATE)

        def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
            n, total = self.state.get() if self.state.exists() else (0, 0)
            for frame in rows:
                counts, means = [], []
                for value in frame["v"].tolist():
                    n += 1
                    total += value
                    counts.append(n)
                    means.append(total / n)
                yield pd.DataFrame({"k": key[0], "n": counts, "mean": means})
            self.state.update((n, total))

        def close(self) -> None:
            pass

    return frame.groupBy("k").transformWithStateInPandas(RunningMeans(), OUTPUT, "Append", "None")


def _transform(frame: DataFrame) -> DataFrame:
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class RunningMeans(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.state = handle.getValueState("state", STATE)

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            n, total = self.state.get() if self.state.exists() else (0, 0)
            for row in rows:
                n += 1
                total += row["v"]
                yield Row(k=key[0], n=n, mean=total / n)
            self.state.update((n, total))

        def close(self) -> None:
            pass

    return frame.groupBy("k").transformWithState(RunningMeans(), OUTPUT, "Append", "None")


#: By the method of Spark's grouped data.
PEERS = {
    "applyInPandasWithState": _apply_in_pandas,
    "transformWithState": _transform,
    "transformWithStateInPandas": _transform_in_pandas,
}


def lacking(name: str) -> str | None:
    """Why a peer cannot run here; None where it can."""
    import importlib.util

    from pyspark.sql import GroupedData

    if not hasattr(GroupedData, name):
        return "this Spark does not have it"
    if name.startswith("transform"):
        try:
            found = importlib.util.find_spec("google.protobuf")
        except ModuleNotFoundError:
            found = None
        if found is None:
            return "it needs protobuf: pip install protobuf"
    return None
