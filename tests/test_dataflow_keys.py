"""Where items of a dataflow go: keys, their hashes, and what has none."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as pk
from examples_support import examples
from penstock import _native, errors
from penstock.dataflow import Worker


@settings(max_examples=examples(30))
@given(number=st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)))
def test_equal_keys_meet(number: Any) -> None:
    exact = Fraction(number)
    forms = [number, exact, (number,)[0]]
    if exact.denominator == 1:
        forms += [int(exact), Decimal(int(exact))]
    if isinstance(number, float):
        forms.append(Decimal(number))
    assert len(set(forms)) == 1, "they are one key of a dict"
    assert len(set(_worker_of(forms))) == 1
    assert len(set(_worker_of([("x", form) for form in forms]))) == 1


def test_equal_times_of_day_meet_whatever_their_zones() -> None:
    ahead = timezone(timedelta(hours=1))
    same = [time(12, tzinfo=timezone.utc), time(13, tzinfo=ahead)]
    assert len(set(same)) == 1 and len(set(_worker_of(same))) == 1


def test_equal_times_of_numpy_meet_whatever_their_units() -> None:
    np = pytest.importorskip("numpy")
    pd = pytest.importorskip("pandas")
    units = ["D", "h", "m", "s", "ms", "us", "ns"]
    day = datetime(1970, 1, 8)
    for same in (
        [*(np.datetime64("1970-01-08", unit) for unit in units), pd.Timestamp(day), day],
        [*(np.timedelta64(1, "W").astype(f"m8[{unit}]") for unit in units), pd.Timedelta(days=7), timedelta(7)],
        [np.datetime64("1970-01-08", "25s"), day],
        [np.datetime64("2000", "Y"), np.datetime64("2000-01", "M"), np.datetime64("2000-01-01", "s")],
        [np.timedelta64(2, "Y"), np.timedelta64(24, "M")],
        [pd.Timestamp(1_001), np.datetime64(1_001, "ns"), np.datetime64(1_001_000, "ps")],
        [pd.Timedelta(-1, "ns"), np.timedelta64(-1, "ns"), np.timedelta64(-1_000, "ps")],
        [np.datetime64(-(10**15), "ms"), np.datetime64(-(10**18), "us")],
    ):
        assert all(one == other for one, other in itertools.pairwise(same)), same
        assert len(set(_native.hash_keys(same))) == 1, same
    assert _native.hash_keys([np.datetime64("NaT")]) == _native.hash_keys([None])


def test_long_doubles_meet_what_they_equal() -> None:
    np = pytest.importorskip("numpy")
    long = np.longdouble
    for same in ([long("0.5"), 0.5], [long(3), 3], [long("inf"), float("inf")], [(long("-2.25"),), (-2.25,)]):
        assert len(set(same)) == 1 and len(set(_native.hash_keys(same))) == 1
    assert _native.hash_keys([long("nan"), frozenset({long("0.1")})])
    with pytest.raises(TypeError, match="a key of type clongdouble has no hash"):
        _native.hash_keys([np.clongdouble(1)])


def _worker_of(keys: list[Any], peers: int = 7) -> list[int]:
    def program(worker: Worker) -> list[Any]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            seen = stream.exchange(lambda pair: pair[1]).collect()
        if worker.index == 0:
            handle.send(list(enumerate(keys)))
        return seen

    homes = {}
    for worker, seen in enumerate(pk.execute(program, workers=peers)):
        homes.update({index: worker for _, block in seen for index, _ in block})
    return [homes[index] for index in range(len(keys))]


def test_the_worker_of_a_key_is_part_of_the_format() -> None:
    keys = [0, 1, -1, 2**63, 2**64 - 1, 10**30, "a", "é", "", b"a", None, 1.5, ("a", 1), (), date(2026, 1, 1)]
    keys += [datetime(2026, 1, 1, tzinfo=timezone.utc), Decimal("0.1"), frozenset({"a", "b"})]
    golden = _worker_of(keys)
    assert golden == GOLDEN
    same = [True, 1, 1.0, Decimal(1)]
    assert len(set(_worker_of(same))) == 1
    assert _worker_of(["\ud800"]) == _worker_of(["\ud800"])


GOLDEN = [2, 2, 0, 6, 0, 6, 4, 6, 0, 4, 2, 3, 4, 2, 5, 6, 3, 0]


_MOMENT = datetime(2026, 1, 2, 3, 4, 5, 6)
_BERLIN = datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=1)))
_UUID = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("keys", "column"),
    [
        *(([1, 5, None], pa.array([1, 5, None], kind)) for kind in (pa.int8(), pa.uint16(), pa.int32(), pa.int64())),
        ([2**63, 2**64 - 1], pa.array([2**63, 2**64 - 1], pa.uint64())),
        ([True, False, None], pa.array([True, False, None])),
        *((["a", "é", None], pa.array(["a", "é", None], kind)) for kind in (pa.string(), pa.large_string())),
        (["a", "é"], pa.array(["a", "é"], pa.string_view())),
        *(([b"ab", None], pa.array([b"ab", None], kind)) for kind in (pa.binary(), pa.binary(2), pa.binary_view())),
        ([_UUID], pa.array([_UUID.bytes], pa.binary(16))),
        ([date(2026, 1, 1)], pa.array([date(2026, 1, 1)], pa.date32())),
        ([_MOMENT], pa.array([_MOMENT], pa.timestamp("us"))),
        ([_BERLIN], pa.array([_BERLIN], pa.timestamp("us", "Europe/Berlin"))),
        ([timedelta(1, 2, 3)], pa.array([timedelta(1, 2, 3)], pa.duration("us"))),
    ],
)
def test_keys_in_lists_have_the_hashes_of_those_in_columns(keys: list[Any], column: Any) -> None:
    found = pa.record_batch(_native.hash_columns(pa.record_batch({"k": column}), ["k"]))
    assert _native.hash_keys(keys) == found.column(0).to_pylist()


@pytest.mark.parametrize("others", [[], ["n"]])
def test_keys_of_columns_meet_however_they_are_encoded(others: list[str]) -> None:
    keys = ["a", "b", "c", "d", None, "e", "e", "f"]
    plain = pa.array(keys)
    encoded = [plain, plain.dictionary_encode(), pc.run_end_encode(plain)]

    def program(worker: Worker) -> list[Any]:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            seen = stream.exchange(["k", *others]).collect()
        if worker.index == 0:
            for column in [*encoded, *([] if others else [pa.nulls(1)])]:
                handle.send(pa.record_batch({"k": column, "n": pa.array(range(len(column)))}))
        return seen

    homes: dict[Any, set[int]] = {}
    rows = 0
    for index, seen in enumerate(pk.execute(program, workers=3)):
        for _, batch in seen:
            rows += batch.num_rows
            for key, n in zip(batch["k"].to_pylist(), batch["n"].to_pylist(), strict=True):
                homes.setdefault((key, n) if others else key, set()).add(index)
    assert rows == (24 if others else 25)
    assert all(len(found) == 1 for found in homes.values()), homes
    assert len(set.union(*homes.values())) > 1


def test_a_key_function_that_raises_names_step_file_line_and_item() -> None:
    def key(item: int) -> float:
        return 1 / item  # the line

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.exchange(key)
        handle.send([1, 2, 0, 4])
        worker.step_while(lambda: True)

    with pytest.raises(errors.UserFunctionError, match=r"exchange key: ZeroDivisionError.*\n  item: 0") as caught:
        pk.execute(program, workers=2)
    assert caught.value.file == __file__
    assert caught.value.line == key.__code__.co_firstlineno + 1
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class _Unstable:
    pass


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("key", [_Unstable(), [1], {"a": 1}, (1, _Unstable())])
def test_a_key_without_a_stable_hash_is_refused(key: Any, workers: int) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.exchange(lambda item: key)
        handle.send([1])

    with pytest.raises(errors.UserFunctionError, match="has no hash that is the same in every process"):
        pk.execute(program, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_key_function_that_raises_is_named(workers: int) -> None:
    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.exchange(lambda item: 1 // item)
        handle.send([1, 0])

    with pytest.raises(errors.UserFunctionError, match="ZeroDivisionError") as caught:
        pk.execute(program, workers=workers)
    assert "item: 0" in str(caught.value)


@dataclasses.dataclass(repr=False)
class _Interrupted:
    part: int

    def __getattribute__(self, name: str) -> Any:
        if name == "part":
            raise KeyboardInterrupt
        return object.__getattribute__(self, name)


def test_an_interrupt_in_the_hash_of_a_key_is_no_error_of_the_key() -> None:
    key = object.__new__(_Interrupted)

    def program(worker: Worker) -> None:
        with worker.dataflow() as scope:
            handle, stream = scope.input()
            stream.exchange(lambda item: key)
        handle.send([1])

    with pytest.raises(errors.ProgramError, match="raised KeyboardInterrupt") as caught:
        pk.execute(program, workers=1)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


@dataclasses.dataclass
class _Peer:
    peer: Any = None


def test_a_key_without_an_end_is_refused() -> None:
    one = _Peer()
    one.peer = _Peer(one)
    deep: Any = 1
    for _ in range(100_000):
        deep = (deep,)
    for key in (one, deep):
        with pytest.raises(TypeError, match="nested more than 100 deep, or refers to itself"):
            _native.hash_keys([key])
    assert _native.hash_keys([_Peer(_Peer(((1,),)))]) == _native.hash_keys([_Peer(_Peer(((True,),)))])
    while isinstance(deep, tuple):  # not all of it at once, when it goes
        deep = deep[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_missing_column_and_a_key_of_the_wrong_kind_are_named(workers: int) -> None:
    def program(key: Any, block: Any) -> Any:
        def run(worker: Worker) -> None:
            with worker.dataflow() as scope:
                handle, stream = scope.input()
                stream.exchange(key)
            handle.send(block)

        return run

    with pytest.raises(errors.SchemaError, match=r'"x".*\["k"\]'):
        pk.execute(program("x", pa.record_batch({"k": [1]})), workers=workers)
    with pytest.raises(errors.BlockError, match="got a list"):
        pk.execute(program("x", [1]), workers=workers)
    with pytest.raises(errors.BlockError, match="RecordBatch: the key of such a block is the name of a column"):
        pk.execute(program(str, pa.record_batch({"k": [1]})), workers=workers)
    with pytest.raises(errors.ProgramError, match="a function or names of columns"):
        try:
            pk.execute(program([3], [1]), workers=1)
        except errors.BlockError as error:
            raise errors.ProgramError(error.message) from error
