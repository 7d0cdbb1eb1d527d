"""``bounded`` takes the same in flows and in dataflow streams, and refuses it with the same words."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import penstock as pk
from penstock import _bounds
from penstock.errors import ConfigError


def in_a_flow(**options: Any) -> None:
    pk.Flow("n bigint").bounded(lambda part: part, **options)


def in_a_stream(**options: Any) -> None:
    def program(worker: pk.dataflow.Worker) -> Exception | None:
        with worker.dataflow() as scope:
            numbers, stream = scope.input()
            try:
                stream.bounded(lambda items: items, **options)
            except ConfigError as error:
                return error
        numbers.close()
        return None

    (refused,) = pk.execute(program, workers=1)
    if refused is not None:
        raise refused


HOSTS = [in_a_flow, in_a_stream]


def test_names_order_and_defaults_are_the_same() -> None:
    flow = list(inspect.signature(pk.Flow.bounded).parameters.values())
    stream = list(inspect.signature(pk.dataflow.Stream.bounded).parameters.values())
    told = [[(p.name, p.kind, p.default) for p in found[: len(flow)]] for found in (flow, stream)]
    assert told[0] == told[1]
    # Of a stream there is more to say.
    assert [p.name for p in stream[len(flow) :]] == ["expand", "name"]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"batches": 2}, {"batches": 2, "batch_size": 3}, {"memory": "512m"}, {"memory": 1 << 30, "batch_size": 9}],
)
def test_the_same_is_taken(host: Callable[..., None], options: dict[str, Any]) -> None:
    host(**options, on_failure="skip")


@pytest.mark.parametrize(
    "options",
    [
        {"batches": 0},
        {"batches": 1 << 33},
        {"batch_size": True},
        {"batch_size": 2.0},
        {"batches": 1 << 30, "batch_size": 1 << 30},
        {"batches": 1, "batch_size": 1, "memory": "1g"},
        {"memory": "half"},
        {"memory": 0},
        {"on_failure": "continue"},
    ],
)
def test_the_same_is_refused_with_the_same_words(options: dict[str, Any]) -> None:
    words = []
    for host in HOSTS:
        with pytest.raises(ConfigError, match=next(iter(options))) as caught:
            host(**options)
        words.append(str(caught.value))
    assert words[0] == words[1] and words[0].startswith("bounded ")


def test_examples_run() -> None:
    assert doctest.testmod(_bounds).failed == 0
