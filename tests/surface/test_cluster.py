"""`_native.Registry`, `Member`, `Feed`, `Drain`: a driver here, members in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from forked import in_child

import penstock as pk
from penstock import _mesh, _native, errors

SECRET = bytes(range(32))
PATIENCE = 60.0

MEMBER = """
import sys
from penstock import _native
member = _native.Member(sys.argv[1], bytes.fromhex(sys.stdin.readline()), '{"role": "test"}')
print(member.id, member.address, flush=True)
print(*member.run(), flush=True)
"""

#: With a key of its slot alone, and so many seconds that nothing waits longer than.
PATIENT = """
import sys, time
from penstock import _native
from penstock.errors import PenstockError
key, silence = bytes.fromhex(sys.argv[2]), float(sys.argv[3])
until = time.monotonic() + 60
while True:
    try:
        member = _native.Member(sys.argv[1], key, '{"slot": 3}', silence, 1 << 20, [])
        break
    except PenstockError:
        # It is as impatient when it joins, which is not what is looked at.
        if time.monotonic() > until:
            raise
print(member.address, flush=True)
member.run()
"""


class Driver:
    """A registry, the members it started, and what they said."""

    def __init__(self) -> None:
        self.registry = _native.Registry("127.0.0.1", 0, SECRET)
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.addresses: dict[int, str] = {}
        self.events: list[dict[str, Any]] = []

    def member(self) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, self.registry.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(SECRET.hex() + "\n")
        process.stdin.flush()
        name, address = process.stdout.readline().split()
        joined = self.until(lambda event: event["event"] == "joined" and event["member"] == int(name))
        assert json.loads(joined["info"]) == {"role": "test", "address": address}
        self.processes[int(name)] = process
        self.addresses[int(name)] = address
        return int(name)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for event in self.events:
                if wanted(event):
                    self.events.remove(event)
                    return event
            self.events += self.registry.poll(1.0)
        raise AssertionError(f"nothing came; there are {self.events}")

    def ask(self, member: int, attachment: bytes | None = None, /, **body: Any) -> dict[str, Any]:
        return self.answer(self.registry.send(member, json.dumps(body), attachment))

    def answer(self, call: int) -> dict[str, Any]:
        event = self.until(lambda event: event["event"] == "reply" and event["call"] == call)
        reply: dict[str, Any] = json.loads(event["body"])
        if "error" in reply:
            raise errors.from_failure(reply["error"], event["attachment"])
        return reply

    def start(
        self,
        flow: pk.Flow,
        members: list[int],
        generation: int = 1,
        epoch: int = 0,
        fresh: bool = True,
        plan: dict[str, Any] | None = None,
        checkpoint: Path | None = None,
        bits: int = 4,
    ) -> None:
        text, calls = flow.to_plan()
        layout = f"{bits}:" + ",".join(str(bin_ % len(members)) for bin_ in range(1 << bits))
        start = {
            "stamp": {"generation": generation, "membership": 0},
            "members": members,
            "threads": 1,
            "bits": bits,
            "layouts": {told["name"]: layout for told in _native.plan_check(text)["operators"]},
            "epoch": epoch,
            "watermark": None,
            "fresh": fresh,
        }
        frame = {
            "query": "q",
            "plan": json.loads(text) if plan is None else plan,
            "peers": [{"id": member, "address": self.addresses[member]} for member in members],
        }
        if checkpoint is not None:
            frame["checkpoint"] = str(checkpoint)
        calls_ = [
            self.registry.send(
                member, json.dumps({**frame, "ask": {"Start": {**start, "rank": rank}}}), cloudpickle.dumps(calls)
            )
            for rank, member in enumerate(members)
        ]
        for call in calls_:
            assert self.answer(call)["ok"] is True

    def write(self, members: list[int], epoch: int, generation: int = 1) -> list[dict[str, Any]]:
        write = {"stamp": {"generation": generation, "membership": 0}, "epoch": epoch}
        answers = [self.ask(member, query="q", ask={"Write": write}) for member in members]
        return [file for answer in answers for file in answer["answer"]["Written"]]

    def load(
        self, flow: pk.Flow, member: int, files: list[dict[str, Any]], checkpoint: Path, generation: int, bits: int
    ) -> dict[str, Any]:
        text, calls = flow.to_plan()
        ranges = {
            told["name"]: [[bin_, bits] for bin_ in range(1 << bits)] for told in _native.plan_check(text)["operators"]
        }
        # What the driver makes before it asks for anything.
        claim = {"number": 1, "nonce": 7, "registry": "", "from": None}
        if Path(checkpoint).is_dir():
            (Path(checkpoint) / "claim-00000000000000000001").write_bytes(
                _native.checkpoint_file("claim", json.dumps(claim))[1]
            )
        stamp = {"generation": generation, "membership": 0}
        load = {"stamp": stamp, "claim": claim, "ranges": ranges, "files": files}
        frame = {"query": "q", "plan": json.loads(text), "checkpoint": str(checkpoint), "ask": {"Load": load}}
        return self.ask(member, cloudpickle.dumps(calls), **frame)

    def feed(
        self, member: int, epoch: int, partition: int, *batches: pa.RecordBatch, attempt: int = 7
    ) -> dict[str, Any]:
        where = self.addresses[member]
        with _native.Feed(where, SECRET, "q", epoch, partition, attempt, batches[0].schema) as feed:
            for batch in batches:
                feed.push(batch)
            receipt = feed.finish()
        assert receipt["member"] == member
        return {"partition": partition, "attempt": attempt, "rows": receipt["rows"], "rows_before": 0}

    def release(
        self, feeds: dict[int, list[dict[str, Any]]], epoch: int, generation: int = 1, finish: bool = False
    ) -> list[dict[str, Any]]:
        release = {
            "stamp": {"generation": generation, "membership": 0},
            "epoch": epoch,
            "watermark": None,
            "clock_ms": 0,
            "finish": finish,
        }
        sent = [
            self.registry.send(member, json.dumps({"query": "q", "ask": {"Release": {**release, "feeds": fed}}}))
            for member, fed in feeds.items()
        ]
        rows = []
        for member, call in zip(feeds, sent, strict=True):
            for number, *_ in self.answer(call)["answer"]["Released"]["pieces"]:
                drain = _native.Drain(self.addresses[member], SECRET, "q", epoch, number)
                rows += [row for batch in drain for row in pa.record_batch(batch).to_pylist()]
        return rows

    def close(self) -> None:
        self.registry.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def ks(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array(values, pa.int64())})


def counting() -> pk.Flow:
    return pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="update")


def summing() -> pk.Flow:
    def step(total: Any, k: int) -> Any:
        if k < 0:
            raise LookupError(f"no {k}")
        return (total or 0) + 1, (k, (total or 0) + 1)

    return pk.Flow("k bigint").key_by("k").stateful_map(step, schema="k bigint, n bigint")


def listing() -> pk.Flow:
    class Seen:
        def __init__(self) -> None:
            self.rows: list[int] = []

    def step(seen: Any, k: int) -> Any:
        seen = seen or Seen()
        seen.rows.append(k)
        return seen, (k, len(seen.rows))

    return pk.Flow("k bigint").key_by("k").stateful_map(step, schema="k bigint, n bigint")


@pytest.mark.parametrize("flow", [counting, summing, listing], ids=["native", "python", "objects"])
def test_another_member_goes_on_with_what_two_have_written(driver: Driver, flow: Any, tmp_path: Path) -> None:
    folder = tmp_path / "made when it is needed"
    two = [driver.member(), driver.member()]
    driver.start(flow(), two, checkpoint=folder)
    files = []
    for epoch in range(2):
        keys = ks(*range(40 if epoch == 0 else 20))
        driver.release({two[0]: [driver.feed(two[0], epoch, 0, keys)], two[1]: []}, epoch)
        files += driver.write(two, epoch)
    assert len({file["name"] for file in files}) == 4
    for file in files:
        content = (folder / file["name"]).read_bytes()
        assert (len(content), zlib.crc32(content)) == (file["length"], file["checksum"])
    merge = {"stamp": {"generation": 1, "membership": 0}, "files": files}
    merged = driver.ask(two[1], query="q", checkpoint=str(folder), ask={"Merge": merge})["answer"]["Written"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(file["name"] for file in [*files, *merged])
    for bits, given in ((4, files), (2, merged)):
        one = driver.member()
        assert driver.load(flow(), one, given, folder, 2, bits)["answer"] == "Done"
        driver.start(flow(), [one], generation=2, epoch=2, fresh=False, checkpoint=folder, bits=bits)
        rows = driver.release({one: [driver.feed(one, 2, 0, ks(*range(40)))]}, 2, generation=2)
        assert {row["k"]: row["n"] for row in rows} == {k: 3 if k < 20 else 2 for k in range(40)}
        assert len(driver.write([one], 2, generation=2)) == 1


def test_what_is_wrong_with_a_checkpoint_is_told_apart(driver: Driver, tmp_path: Path) -> None:
    member = driver.member()
    driver.start(summing(), [member], checkpoint=tmp_path)
    driver.release({member: [driver.feed(member, 0, 0, ks(1, 2))]}, 0)
    [file] = driver.write([member], 0)
    stop = {"stamp": {"generation": 2, "membership": 0}, "epoch": 1}
    driver.ask(member, query="q", ask={"Stop": stop})

    def refused(folder: Any, *files: dict[str, Any]) -> errors.PenstockError:
        with pytest.raises(errors.PenstockError) as caught:
            driver.load(summing(), member, list(files), folder, 2, 4)
        return caught.value

    whole = (tmp_path / file["name"]).read_bytes()
    for content in (whole[:-1], whole + b"x", whole.replace(b"penstock", b"penstalk")):
        (tmp_path / file["name"]).write_bytes(content)
        error = refused(tmp_path, file)
        assert (error.kind, error.why) == ("damaged", "Damaged"), content
        assert error.message.startswith(file["name"] + " ")
    gone = refused(tmp_path, {**file, "name": "data-gone"})
    assert gone.kind == "damaged" and gone.message.startswith("data-gone is not in the checkpoint")
    (tmp_path / "no folder").write_bytes(b"")
    error = refused(tmp_path / "no folder", file)
    assert (error.kind, error.why) == ("store", "Store") and "NotADirectoryError" in error.message
    error = refused("relative", file)
    assert error.why == "Data" and "'relative' is not an absolute path" in error.message
    (tmp_path / file["name"]).write_bytes(whole)
    assert driver.load(summing(), member, [file], tmp_path, 2, 4)["answer"] == "Done"


def test_a_write_that_the_store_refuses_leaves_nothing(driver: Driver, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.write_bytes(b"in the way")
    member = driver.member()
    driver.start(summing(), [member], checkpoint=folder)
    driver.release({member: [driver.feed(member, 0, 0, ks(*range(100)))]}, 0)
    with pytest.raises(errors.PenstockError, match="cannot be written") as caught:
        driver.write([member], 0)
    assert caught.value.kind == "store"
    folder.unlink()
    [file] = driver.write([member], 0)
    assert [path.name for path in folder.iterdir()] == [file["name"]]


def test_receipts_tell_what_the_rows_say(driver: Driver) -> None:
    """Whatever the batches, their order and the partitions: their hashes add up to the same."""
    flow = pk.Flow("k bigint, v double, s string, l array<bigint>").key_by("k").agg(n=pk.count(), emit="update")
    member = driver.member()
    driver.start(flow, [member])
    rows = [
        {"k": k % 7 if k % 5 else None, "v": k / 3, "s": "x" * (k % 20) if k % 3 else None, "l": [k] * (k % 3)}
        for k in range(1_000)
    ]
    partitions = itertools.count()

    def content(pieces: list[list[dict[str, Any]]], hash: bool = True) -> int:
        """Sum of the receipts, as the protocol makes it."""
        sum_ = 0
        for piece in pieces:
            where, partition = driver.addresses[member], next(partitions)
            with _native.Feed(where, SECRET, "q", 0, partition, 1, flow.input_schema, hash=hash) as feed:
                for at in range(0, len(piece), 97):
                    feed.push(pa.RecordBatch.from_pylist(piece[at : at + 97], schema=flow.input_schema))
                told = feed.finish()["hash"]
            assert -(1 << 63) <= told < 1 << 63
            sum_ += told
        return sum_ % (1 << 64)

    whole = content([rows])
    shuffled = random.Random(5).sample(rows, len(rows))
    assert content([shuffled[:1], shuffled[1:600], shuffled[600:]]) == whole != 0
    assert content([rows], hash=False) == 0
    for name, value in (("k", 8), ("v", -0.0), ("s", ""), ("l", None)):
        changed = [*rows[:-1], rows[-1] | {name: value}]
        assert content([changed]) != whole, name
    assert content([rows[:-1]]) != whole
    assert content([[*rows, rows[0], rows[0]]]) not in (whole, content([[*rows, rows[0]]]))


@pytest.mark.parametrize("flow", [counting, summing], ids=["native", "python"])
def test_two_members_count_and_state_moves_between_them(driver: Driver, flow: Any) -> None:
    first, second = driver.member(), driver.member()
    driver.start(flow(), [first, second])
    feeds = {first: [driver.feed(first, 0, 0, ks(*range(40)))], second: [driver.feed(second, 0, 1, ks(*range(20)))]}
    feeds[second][0]["rows_before"] = 40
    rows = driver.release(feeds, 0)
    last = {row["k"]: max(r["n"] for r in rows if r["k"] == row["k"]) for row in rows}
    assert last == {k: 2 if k < 20 else 1 for k in range(40)}
    steps = [[[[bin_, 4], 1] for bin_ in range(0, 16, 2)]]
    migrate = {"stamp": {"generation": 1, "membership": 0}, "handle": 5, "steps": steps}
    moved = driver.ask(first, query="q", ask={"Migrate": migrate})
    done = moved["answer"]["Migrated"]
    assert [epoch for epoch, _ in done["times"]] == [1] and done["refused"] is None
    assert moved["report"]["moved"] == 8 and moved["report"]["bytes"] > 0
    rows = driver.release({first: [driver.feed(first, 1, 0, ks(*range(40)))], second: []}, 1)
    assert {row["k"]: row["n"] for row in rows} == {k: 3 if k < 20 else 2 for k in range(40)}
    stats = driver.ask(second, do="stats", query="q")
    assert stats["ok"] and driver.ask(first, do="stop")["ok"]
    process = driver.processes[first]
    assert process.stdout is not None and process.stdout.readline().split()[0] == "stopped"
    driver.until(lambda event: event["event"] == "lost" and event["member"] == first)


def test_an_exception_in_a_member_arrives_whole_and_the_epoch_can_be_done_again(driver: Driver) -> None:
    member = driver.member()
    driver.start(summing(), [member])
    driver.release({member: [driver.feed(member, 0, 0, ks(1, 2))]}, 0)
    with pytest.raises(errors.UserFunctionError, match="no -5") as caught:
        driver.release({member: [driver.feed(member, 1, 0, ks(1, -5, 2))]}, 1)
    error = caught.value
    assert isinstance(error.__cause__, LookupError) and error.row == {"k": -5}
    assert Path(error.file).samefile(__file__) and "step" in error.step
    stop = {"stamp": {"generation": 2, "membership": 0}, "epoch": 1}
    inventory = driver.ask(member, query="q", ask={"Stop": stop})["answer"]["Inventory"]
    assert [len(ranges) for ranges in inventory.values()] == [16]
    driver.start(summing(), [member], generation=2, epoch=1, fresh=False)
    with pytest.raises(errors.EngineError, match="here already"):
        driver.feed(member, 1, 0, ks(1, 2))  # what was staged stays until it is discarded
    rows = driver.release({member: [driver.feed(member, 1, 0, ks(1, 2), attempt=8)]}, 1, generation=2)
    assert sorted(row.items() for row in rows) == sorted({"k": k, "n": 2}.items() for k in (1, 2))


def test_a_registry_listens_at_an_ipv6_address_as_spark_writes_it() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    with _native.Registry("[::1]", 0, SECRET, "[::1]") as registry:
        assert registry.address.startswith("[::1]:")
        member = _native.Member(registry.address, SECRET, '{"role": "test"}')
        assert member.address.startswith("[::1]:")


@pytest.mark.parametrize("silence", [0.5, 1.0, 2.0, 60.0])
def test_a_member_lives_however_short_its_patience_with_who_says_nothing(silence: float) -> None:
    """It ends a connection itself after so long: that is no sign of its death."""
    pytest.importorskip("pyspark")
    from penstock.spark._engine.feeds import lives

    with _native.Registry("127.0.0.1", 0, SECRET) as registry:
        key = _native.key_of(SECRET, "member", "3", False)
        member = subprocess.Popen(
            [sys.executable, "-c", PATIENT, registry.address, key.hex(), str(silence)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert member.stdout is not None
            address = member.stdout.readline().strip()
            assert address, "it has not joined"
            assert [lives(address, silence) for _ in range(3)] == [True] * 3
        finally:
            member.kill()
            member.wait()
        assert not lives(address, silence)


def test_a_member_without_the_secret_is_refused_and_counted(driver: Driver) -> None:
    with pytest.raises(errors.AuthenticationError):
        _native.Member(driver.registry.address, bytes(reversed(SECRET)))
    with socket.create_connection(driver.registry.address.rsplit(":", 1)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(1000):
                pass
    # Who has the wrong secret knows it before the registry does, which counts when its thread gets there.
    deadline = time.monotonic() + 60
    while (metrics := driver.registry.metrics())["refused"] < 2:
        assert time.monotonic() < deadline, metrics
        time.sleep(0.005)
    assert metrics["accepted"] == 0 and driver.registry.members() == []
    member = driver.member()
    with pytest.raises(errors.AuthenticationError):
        _native.Feed(driver.addresses[member], bytes(reversed(SECRET)), "q", 0, 0, 0, ks().schema)


def test_a_key_is_of_one_task(driver: Driver) -> None:
    member = driver.member()
    where, schema = driver.addresses[member], ks().schema
    driver.start(counting(), [member])
    feed = _native.key_of(SECRET, "feed", "q 0")
    before = driver.registry.metrics()
    # Neither the bytes that a task got, nor the same with another role written over them, open anything else.
    with pytest.raises(errors.AuthenticationError, match="no key for Member"):
        _native.Member(driver.registry.address, feed)
    with pytest.raises(errors.AuthenticationError, match="q 1"):
        _native.Feed(where, feed, "q", 1, 0, 0, schema)
    with pytest.raises(errors.AuthenticationError, match="no key for Drain"):
        _native.Drain(where, feed, "q", 0, 0)
    assert driver.registry.metrics() == before
    forged = feed.replace(b"\x02\x01\x01", b"\x02\x01\x00", 1).replace(b"\x03q 0", b"\x00")
    with pytest.raises(errors.AuthenticationError, match=r"did not prove|no key"):
        _native.Member(driver.registry.address, forged)
    slot = _native.key_of(SECRET, "member", "3")
    with pytest.raises(errors.AuthenticationError, match="no key for Member"):
        _native.Member(driver.registry.address, slot, '{"slot": 4}')
    with _native.Feed(where, feed, "q", 0, 5, 0, schema) as honest:
        honest.push(ks(1))
        assert honest.finish()["rows"] == 1
    for bad in (b"", b"short", feed[:-1]):
        with pytest.raises(errors.ConfigError, match="no key"):
            _native.Feed(where, bad, "q", 0, 0, 0, schema)
    with pytest.raises(ValueError, match="role"):
        _native.key_of(SECRET, "driver", "")


class _Bomb:
    """Tells by a file that it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def _frame(kind: int, body: bytes, attachment: bytes) -> bytes:
    payload = struct.pack("<QI", 1, len(body)) + body + attachment
    head = b"PF\x01" + bytes([kind]) + struct.pack("<I", len(payload))
    return head + struct.pack("<I", zlib.crc32(head + payload)) + payload


def test_nothing_is_unpickled_before_its_sender_is_known(driver: Driver, tmp_path: Path) -> None:
    seen = tmp_path / "unpickled"
    bomb = pickle.dumps(_Bomb(seen))
    pickle.loads(bomb)
    assert seen.exists(), "it does tell"
    seen.unlink()
    member = driver.member()
    driver.start(counting(), [member])
    start = b'{"query": "q", "plan": {}, "ask": "Drop"}'
    failure = b'{"error": {"kind": "user_function", "message": "m"}}'
    frames = [_frame(kind, body, bomb) for kind in range(1, 10) for body in (start, failure)]
    fabric = bomb.rjust(4096, b"\0")
    listener = _mesh.listen()
    for address in (driver.registry.address, driver.addresses[member], listener.address):
        for said in (*frames, bomb, fabric, b"\x16\x03\x01" + bomb):
            # The other side may hang up before all is said: a broken pipe, a reset, or a socket no longer connected.
            with socket.create_connection(address.rsplit(":", 1)) as raw, contextlib.suppress(OSError):
                raw.settimeout(20)
                raw.sendall(said)
                raw.shutdown(socket.SHUT_WR)
    listener.close()
    # Nor from one that listens where an engine should be, and does not know the key.
    with socket.create_server(("127.0.0.1", 0)) as fake:
        where = ":".join(map(str, fake.getsockname()))

        def lie() -> None:
            for _ in range(3):
                raw, _ = fake.accept()
                with raw, contextlib.suppress(ConnectionError):
                    raw.sendall(b"pnsk\x02\x02" + struct.pack("<H", 64) + bytes(64) + b"".join(frames))
                    while raw.recv(1 << 16):
                        pass

        thread = threading.Thread(target=lie)
        thread.start()
        for dial in (
            lambda: _native.Member(where, SECRET),
            lambda: _native.Feed(where, SECRET, "q", 0, 0, 0, ks().schema),
            lambda: _native.Drain(where, SECRET, "q", 0, 0),
        ):
            with pytest.raises(errors.AuthenticationError):
                dial()
        thread.join(60)
    assert [row["n"] for row in driver.release({member: [driver.feed(member, 0, 0, ks(1, 1))]}, 0)] == [2]
    assert not seen.exists()


def test_requests_that_cannot_be_served(driver: Driver) -> None:
    member = driver.member()
    with pytest.raises(errors.EngineError, match="not connected"):
        driver.registry.send(999, "{}")
    with pytest.raises(errors.EngineError) as caught:
        _native.Feed(driver.addresses[member], SECRET, "nobody", 0, 0, 0, ks().schema)
    assert caught.value.kind == "unknown_query"
    with pytest.raises(errors.EngineError) as caught:
        _native.Drain(driver.addresses[member], SECRET, "nobody", 0, 0)
    assert caught.value.kind == "unknown_query"
    with pytest.raises(ValueError, match="beside"):
        _native.Drain(driver.addresses[member], SECRET, "q", 0, 0, "everything")
    with pytest.raises(errors.PlanError):
        driver.start(counting(), [member], plan={"version": 1})


def test_dismissed_interrupted_and_killed_members(driver: Driver) -> None:
    dismissed, interrupted, killed = driver.member(), driver.member(), driver.member()
    driver.registry.dismiss(dismissed, "not needed")
    process = driver.processes[dismissed]
    assert process.stdout is not None and process.stdout.readline().strip() == "dismissed not needed"
    os.kill(driver.processes[interrupted].pid, signal.SIGINT)
    assert driver.processes[interrupted].wait(PATIENCE) != 0, "KeyboardInterrupt"
    os.kill(driver.processes[killed].pid, signal.SIGKILL)
    for member in (dismissed, interrupted, killed):
        driver.until(lambda event, member=member: event["event"] == "lost" and event["member"] == member)
    assert driver.registry.members() == []


def test_members_end_with_the_registry(driver: Driver) -> None:
    member = driver.member()
    driver.registry.close()
    process = driver.processes[member]
    assert process.stdout is not None and process.stdout.readline().split()[0] == "registry_lost"


def test_bad_arguments() -> None:
    for secret in (b"", b"short", bytes(32), bytes(33)):
        with pytest.raises(errors.ConfigError, match="secret"):
            _native.Registry("127.0.0.1", 0, secret)
    with pytest.raises(errors.ConfigError, match="advertise"):
        _native.Registry("0.0.0.0", 0, SECRET)
    with pytest.raises(ValueError, match="info"):
        _native.Member("127.0.0.1:1", SECRET, "{")
    with pytest.raises(errors.ProtocolError):
        _native.Member("127.0.0.1:1", SECRET)
    with pytest.raises(OverflowError):
        _native.Registry("127.0.0.1", 1 << 16, SECRET)


def test_registry_pickling_and_fork(driver: Driver) -> None:
    with pytest.raises(TypeError, match="Registry is a handle and cannot be pickled"):
        pickle.dumps(driver.registry)

    def work() -> None:
        with pytest.raises(errors.ForkError):
            driver.registry.poll(0.0)
        del driver.registry

    in_child(work)
    assert driver.member() == 1, "the parent's registry still works"


def test_poll_gives_up_in_time(driver: Driver) -> None:
    begun = time.monotonic()
    assert driver.registry.poll(0.05) == []
    assert time.monotonic() - begun >= 0.05
