"""Two hosts, as far as the kernel is concerned: network namespaces joined by a pair of virtual Ethernet devices."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock import _native

SECRET = bytes(range(32))
TEXT = "known to whoever reads it"
NEAR, FAR = "10.213.77.1", "10.213.77.2"

#: A process of a run: says where it listens, is told where all listen, and shows what it got.
PROCESS = """
import json, sys
from penstock import _mesh
from penstock.dataflow import run_here

host, process, text = sys.argv[1], int(sys.argv[2]), sys.argv[3]
key = bytes.fromhex(sys.stdin.readline())
listener = _mesh.listen(host)
print(listener.address, flush=True)
addresses = json.loads(sys.stdin.readline())

def program(worker):
    with worker.dataflow("words") as scope:
        handle, stream = scope.input()
        seen = stream.broadcast().collect()
    handle.send([text] * 500)
    return seen

with listener.connect(process, addresses, key, timeout=30.0) as seats:
    seen = run_here(seats, program)
print(json.dumps([word for _, block in seen for word in block]), flush=True)
"""

#: Passes one connection on and keeps what went over it.
RELAY = """
import pathlib, select, socket, sys

with socket.create_server((sys.argv[1], 0)) as server:
    print(":".join(map(str, server.getsockname())), flush=True)
    host, port = sys.stdin.readline().rsplit(":", 1)
    near, _ = server.accept()
far = socket.create_connection((host, int(port)))
kept = {near: bytearray(), far: bytearray()}
other = {near: far, far: near}
open_ = {near, far}
while open_:
    for end in select.select(list(open_), [], [])[0]:
        data = end.recv(65536)
        kept[end] += data
        if data:
            other[end].sendall(data)
        else:
            open_.discard(end)
            try:
                other[end].shutdown(socket.SHUT_WR)
            except OSError:
                pass
pathlib.Path(sys.argv[2]).write_bytes(kept[near])
pathlib.Path(sys.argv[3]).write_bytes(kept[far])
"""

#: An engine's driver with two members that join it: rows go to the second one and come from there, each by way of an
#: address that it is told.
DRIVER = """
import json, sys
import cloudpickle, pyarrow as pa
import penstock as pk
from penstock import _native

text, secret = sys.argv[2], bytes(range(32))
registry = _native.Registry(sys.argv[1], 0, secret)
print(registry.address, flush=True)
events, addresses = [], {}

def answer(call):
    while not (found := [event for event in events if event["event"] == "reply" and event["call"] == call]):
        events.extend(registry.poll(1.0))
    reply = json.loads(found[0]["body"])
    assert "error" not in reply, reply
    return reply

def ask(member, attachment=None, **body):
    return registry.send(member, json.dumps({"query": "q", **body}), attachment)

while len(addresses) < 2:
    for event in registry.poll(1.0):
        if event["event"] == "joined":
            addresses[event["member"]] = json.loads(event["info"])["address"]
near, far = sorted(addresses, key=addresses.get)
flow = pk.Flow("k string").key_by("k").agg(n=pk.count(), emit="update")
plan, calls = flow.to_plan()
stamp = {"generation": 1, "membership": 0}
layout = "4:" + ",".join(str(bin_ % 2) for bin_ in range(16))
layouts = {told["name"]: layout for told in _native.plan_check(plan)["operators"]}
peers = [{"id": member, "address": addresses[member]} for member in (near, far)]
start = {"stamp": stamp, "members": [near, far], "threads": 1, "bits": 4, "layouts": layouts}
start |= {"epoch": 0, "watermark": None, "fresh": True}
started = [
    ask(member, cloudpickle.dumps(calls), plan=json.loads(plan), peers=peers, ask={"Start": {**start, "rank": rank}})
    for rank, member in enumerate((near, far))
]
assert all(answer(call)["ok"] for call in started)
print(addresses[far], flush=True)
keys = {role: _native.key_of(secret, role, "q 0") for role in ("feed", "drain")}
with _native.Feed(sys.stdin.readline().strip(), keys["feed"], "q", 0, 0, 1, flow.input_schema, member=far) as feed:
    feed.push(pa.record_batch({"k": [f"{text} {number % 40}" for number in range(4000)]}))
    fed = {"partition": 0, "attempt": 1, "rows": feed.finish()["rows"], "rows_before": 0}
release = {"stamp": stamp, "epoch": 0, "watermark": None, "clock_ms": 0, "finish": False}
sent = [ask(member, ask={"Release": {**release, "feeds": feeds}}) for member, feeds in ((near, []), (far, [fed]))]
pieces = [[number for number, *_ in answer(call)["answer"]["Released"]["pieces"]] for call in sent]
assert all(pieces) and len(pieces[1]) == 1, "rows of both went over the mesh"
rows = []
for member, number in [*((near, number) for number in pieces[0]), (far, pieces[1][0])]:
    where = sys.stdin.readline().strip() if member == far else addresses[member]
    drain = _native.Drain(where, keys["drain"], "q", 0, number, member=member)
    rows += [row for batch in drain for row in pa.record_batch(batch).to_pylist()]
assert sorted((row["k"], row["n"]) for row in rows) == sorted((f"{text} {key}", 100) for key in range(40))
print("all came", flush=True)
registry.close()
"""

#: A resident that joins a registry and serves until that ends.
MEMBER = """
import sys
from penstock import _native

slot = sys.argv[2] if len(sys.argv) > 2 else "3"
key = bytes.fromhex(sys.stdin.readline())
try:
    with _native.Member(sys.argv[1], key, f'{{"slot": {slot}}}') as member:
        print(member.address, flush=True)
        print(*member.run(), flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@dataclass
class Hosts:
    """Names of two network namespaces, with an address each."""

    near: str
    far: str

    @contextlib.contextmanager
    def start(self, name: str, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = ["ip", "netns", "exec", name, sys.executable, "-c", program, *arguments]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


def _lacking(why: str) -> None:
    """Where nobody has said that they are there, a machine may lack namespaces."""
    if os.environ.get("PENSTOCK_NEED_NAMESPACES") == "1":
        pytest.fail(f"PENSTOCK_NEED_NAMESPACES=1, and {why}; run it with CAP_NET_ADMIN and iproute2")
    pytest.skip(why)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if sys.platform != "linux":
        _lacking("network namespaces are Linux's")
    made = Hosts(*(f"penstock-{os.getpid()}-{end}" for end in ("a", "b")))
    near, far = f"pnska{os.getpid() % 100_000}", f"pnskb{os.getpid() % 100_000}"
    try:
        for name in (made.near, made.far):
            _ip("netns", "add", name)
        _ip("link", "add", near, "netns", made.near, "type", "veth", "peer", "name", far, "netns", made.far)
        for name, device, address in ((made.near, near, NEAR), (made.far, far, FAR)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for one in ("lo", device):
                _ip("-n", name, "link", "set", one, "up")
    except (OSError, subprocess.SubprocessError) as error:
        _remove(made)
        why = getattr(error, "stderr", "") or str(error)
        _lacking(f"no network namespaces can be made here: {why.strip()}")
    yield made
    _remove(made)


def _remove(hosts: Hosts) -> None:
    for name in (hosts.near, hosts.far):
        with contextlib.suppress(OSError):  # there may be no such program
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _records(stream: bytes) -> list[int]:
    """The types of the TLS records that a stream consists of; fails where it is anything else."""
    kinds = []
    while stream:
        assert len(stream) >= 5 and stream[0] in (20, 21, 22, 23) and stream[1] == 3, stream[:8].hex()
        length = int.from_bytes(stream[3:5], "big")
        assert len(stream) >= 5 + length <= 5 + (16 << 10) + 256
        kinds.append(stream[0])
        stream = stream[5 + length :]
    return kinds


def _is_encrypted(path: Path, least: int) -> None:
    """What went over a connection, so many bytes at least, is TLS, and nobody can read it."""
    seen = path.read_bytes()
    assert len(seen) > least
    assert TEXT.encode() not in seen and b"pnsk" not in seen and b"penstock" not in seen
    kinds = _records(seen)
    assert kinds[0] == 22 and set(kinds[3:]) == {23}, "a handshake, then records of hidden content only"


def test_a_mesh_between_two_hosts_is_encrypted(hosts: Hosts, tmp_path: Path) -> None:
    key = _native.key_of(SECRET, "mesh", "").hex()
    there, back = tmp_path / "there", tmp_path / "back"
    with (
        hosts.start(hosts.near, PROCESS, NEAR, "0", TEXT) as first,
        hosts.start(hosts.far, PROCESS, FAR, "1", TEXT) as second,
        hosts.start(hosts.near, RELAY, NEAR, str(there), str(back)) as relay,
    ):
        for process in (first, second):
            _tell(process, key)
        addresses = [_hear(first), _hear(second)]
        assert addresses[0].startswith(NEAR) and addresses[1].startswith(FAR)
        between = _hear(relay)
        _tell(relay, addresses[1])
        # The first one dials the second, through the relay.
        _tell(first, json.dumps([addresses[0], between]))
        _tell(second, json.dumps(addresses))
        for process in (first, second):
            assert json.loads(_hear(process)) == [TEXT] * 1000
            assert process.wait(30) == 0
        assert relay.wait(30) == 0
    for seen in (there, back):
        _is_encrypted(seen, 2_000)


def test_an_engine_feeds_meshes_and_drains_a_member_on_another_host(hosts: Hosts, tmp_path: Path) -> None:
    seen = {name: tmp_path / name for name in ("fed", "to feed", "asked", "drained")}
    with hosts.start(hosts.near, DRIVER, NEAR, TEXT) as driver, contextlib.ExitStack() as others:
        address = _hear(driver)
        for name, slot in ((hosts.near, "3"), (hosts.far, "4")):
            member = others.enter_context(hosts.start(name, MEMBER, address, slot))
            _tell(member, _native.key_of(SECRET, "member", slot).hex())
            assert _hear(member).startswith(NEAR if name == hosts.near else FAR)
        far = _hear(driver)
        assert far.startswith(FAR)
        relays = []
        for there, back in (("fed", "to feed"), ("asked", "drained")):
            relay = others.enter_context(hosts.start(hosts.near, RELAY, NEAR, str(seen[there]), str(seen[back])))
            between = _hear(relay)
            _tell(relay, far)
            _tell(driver, between)
            relays.append(relay)
        assert _hear(driver) == "all came"
        assert driver.wait(30) == 0
        assert [relay.wait(30) for relay in relays] == [0, 0]
    for path in seen.values():
        # A drain says nothing but who it is.
        _is_encrypted(path, 500)


def test_a_member_on_another_host_joins_encrypted_or_not_at_all(hosts: Hosts) -> None:
    registry = """
import sys, time
from penstock import _native

with _native.Registry(sys.argv[1], 0, bytes(range(32))) as registry:
    print(registry.address, flush=True)
    for _ in sys.stdin:
        registry.poll(0.05)
        print(len(registry.members()), *registry.metrics().items(), flush=True)
"""
    with hosts.start(hosts.near, registry, NEAR) as driver:
        address = _hear(driver)
        with hosts.start(hosts.far, MEMBER, address) as member:
            _tell(member, _native.key_of(SECRET, "member", "3").hex())
            assert _hear(member).startswith(FAR)
        with hosts.start(hosts.far, MEMBER, address) as stranger:
            _tell(stranger, _native.key_of(SECRET[::-1], "member", "3").hex())
            assert _hear(stranger).startswith("AuthenticationError handshake: certificate")
        plain = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)\n"
        plain += "s.sendall(bytes.fromhex(sys.argv[3])); print(s.makefile('rb').read().hex(), flush=True)"
        hello = b"pnsk\x02\x01" + (35).to_bytes(2, "little") + b"\x01" + bytes(range(32)) + b"\0\0"
        host, _, port = address.rpartition(":")
        with hosts.start(hosts.far, plain, host, port, hello.hex()) as dialler:
            assert bytes.fromhex(_hear(dialler)) == b"pnsk\x02\x04\0\0", "TLS is due, and no challenge"
        seen = ""
        while "('refused_plain', 1)" not in seen or "('refused_secret', 1)" not in seen:
            _tell(driver, "")
            seen = _hear(driver)
            assert seen, "the registry has ended"
        assert "('accepted', 1)" in seen
