"""What the engine's protocol reads of claims: from stores that let two engines make one of a number, and others."""

from __future__ import annotations

import errno
import logging
import os
import queue
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine_support import wait_for
from penstock._storage import Entry, Piece, open_storage
from penstock.spark._engine import checkpoints
from penstock.spark._engine.checkpoints import Checkpoints

QUERY = "q"


class Shared:
    """An object store: `create` looks first, and nothing holds up who looked at the same moment."""

    url = "mem://checkpoint"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        #: What `create` finds, whatever is there.
        self.looks_empty = False

    def list(self) -> list[Entry]:
        return [Entry(name, len(content)) for name, content in self.files.items()]

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.files[name][offset:][:length]

    def write(self, name: str, pieces: Iterable[Piece]) -> int:
        self.files[name] = b"".join(bytes(piece) for piece in pieces)
        return len(self.files[name])

    def create(self, name: str, data: Piece) -> bool:
        if name in self.files and not self.looks_empty:
            return False
        self.files[name] = bytes(data)
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.files.pop(name, None)


class Protocol:
    """Asks a checkpoint as the protocol does, and hears what comes back."""

    def __init__(self, storage: Any, nonce: int, takeover: bool = False) -> None:
        self.nonce, self.number, self.closed = nonce, 0, False
        self._effects: dict[str, Callable[[Mapping[str, Any]], None]] = {}
        self._heard: queue.Queue[Any] = queue.Queue()
        self.aside: queue.Queue[tuple[str, str, Exception | None]] = queue.Queue()
        executor: Any = self
        tell = lambda *told: self.aside.put(told)  # noqa: E731
        self.checkpoints = Checkpoints(executor, lambda _: storage, "localhost:1", nonce, tell, takeover)

    def perform(self, **effects: Callable[[Mapping[str, Any]], None]) -> None:
        self._effects.update(effects)

    def post(self, event: Any) -> None:
        self._heard.put(event)

    def order(self, effect: str, **facts: Any) -> None:
        self._effects[effect]({"ticket": 7, "query": QUERY, **facts})

    def hear(self) -> Any:
        told = self._heard.get(timeout=30)["Stored"]
        assert told["ticket"] == 7
        return told["outcome"]

    def ask(self, effect: str, **facts: Any) -> Any:
        self.order(effect, **facts)
        return self.hear()

    def ask_aside(self, effect: str, **facts: Any) -> tuple[str, str, Exception | None]:
        """Of what the protocol does not wait for."""
        self._effects[effect]({"query": QUERY, **facts})
        told = self.aside.get(timeout=30)
        assert self._heard.empty()
        return told

    def claim(self, number: int, registry: str = "localhost:1") -> Any:
        claim = {"number": number, "nonce": self.nonce, "registry": registry, "from": None}
        self.number = number
        return self.ask("CreateClaim", claim=claim)

    def newest(self) -> Any:
        return self.ask("ReadClaims", claim=self.number)


def newest(number: int, nonce: int | None) -> dict[str, Any]:
    return {"Ok": {"NewestClaim": {"number": number, "nonce": nonce}}}


def test_of_two_claims_made_at_once_the_last_one_counts() -> None:
    store = Shared()
    one, other = Protocol(store, 11), Protocol(store, 22)
    assert one.newest() == newest(0, None)
    assert one.claim(1) == {"Ok": {"Claimed": True}}
    assert one.newest() == newest(1, 11)
    assert other.newest() == newest(1, None), "it is another one's, whatever it says"
    assert other.claim(1) == {"Ok": {"Claimed": False}}
    store.looks_empty = True
    assert other.claim(1) == {"Ok": {"Claimed": True}}
    assert one.newest() == other.newest() == newest(1, 22)
    store.looks_empty = False
    assert one.claim(2) == {"Ok": {"Claimed": True}}
    assert (one.newest(), other.newest()) == (newest(2, 11), newest(2, None))


def test_how_it_ended_that_files_were_to_go_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """To who counts it: nobody else hears of it."""
    store = Shared()
    one = Protocol(store, 11)
    store.files["old"] = b""
    assert one.ask_aside("Delete", names=["old"]) == (QUERY, "deletes", None) and store.files == {}
    refused = OSError("AccessDenied")

    def delete(names: Iterable[str]) -> None:
        raise refused

    store.delete = delete  # type: ignore[method-assign]
    assert one.ask_aside("Delete", names=["old"]) == (QUERY, "deletes", refused)
    assert not caplog.records, "by whom it is told"
    _, what, error = one.ask_aside("WriteShown", shown={"query": QUERY, "batch": 3})
    assert what == "notes" and isinstance(error, ValueError), "a note that is none"


def test_nothing_is_deleted_once_the_checkpoint_is_read_again_or_the_engine_has_closed() -> None:
    """Files of these names may have been put back: the one that is being deleted is the last."""

    class Slow(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.begun, self.goes_on = threading.Event(), threading.Event()

        def delete(self, names: Iterable[str]) -> None:
            for name in names:
                self.begun.set()
                assert self.goes_on.wait(30)
                self.files.pop(name, None)

    for closes in (False, True):
        store = Slow()
        store.files = dict.fromkeys("abc", b"")
        one = Protocol(store, 11)
        one.order("Delete", names=["a", "b", "c"])
        assert store.begun.wait(30)
        if closes:
            one.closed = True
        else:
            one.order("ReadCheckpoint", since=0, known=[])
            wait_for(lambda one=one: one.checkpoints._deleting[QUERY][0].is_set(), what="it is told to end")  # type: ignore[misc]
        store.goes_on.set()
        assert one.hear() == {"Ok": "Deleted"} and one.aside.get(timeout=30) == (QUERY, "deletes", None)
        assert closes or "Contents" in one.hear()["Ok"]
        assert sorted(store.files) == ["b", "c"] and one.checkpoints._deleting == {}


def test_where_the_system_gives_no_thread_the_store_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine was over with all its state, at a limit that holds for a moment."""
    store = Shared()
    one = Protocol(store, 11)
    store.files["old"] = b""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: refuse())

        def refuse() -> None:
            raise RuntimeError("can't start new thread")

        none = {"Err": {"Unavailable": "mem://checkpoint: can't start new thread"}}
        assert one.claim(1) == one.newest() == none
        _, what, error = one.ask_aside("Delete", names=["old"])
        assert what == "deletes" and str(error) == "can't start new thread"
    assert store.files == {"old": b""} and one.checkpoints._deleting == {}
    assert one.ask_aside("Delete", names=["old"])[2] is None and one.claim(1) == {"Ok": {"Claimed": True}}


def test_of_many_manifests_those_are_read_that_are_asked_for() -> None:
    """There are many where many are kept, and where the store does not let any be deleted."""

    class Counting(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.read_: list[str] = []

        def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
            self.read_.append(name)
            return super().read(name, offset, length)

    def manifest(batch: int, generation: int = 1, end: str = "") -> str:
        return f"manifest-{batch:020}{end}-{generation:020}-{7:016x}"

    store = Counting()
    store.files = dict.fromkeys([manifest(batch) for batch in range(5_000)], b"x")
    store.files |= dict.fromkeys([manifest(4_999, 2), manifest(4_999, 2, "-finished"), f"data-{1:020}-{5:020}-a"], b"x")
    store.files |= dict.fromkeys([f"shown-{batch:020}-{1:020}-{7:016x}" for batch in range(5_001)], b"x")
    one = Protocol(store, 11)
    assert one.claim(1) == {"Ok": {"Claimed": True}}
    claim, note = f"claim-{1:020}", f"shown-{5_000:020}-{1:020}-{7:016x}"
    last = {manifest(4_999), manifest(4_999, 2), manifest(4_999, 2, "-finished")}
    for since, known, wanted in (
        (4_999, [], {claim, note, note.replace("5000", "4999"), *last}),
        (
            4_998,
            [manifest(4_998), manifest(4_999)],
            {claim, *last, note, *(note.replace("5000", n) for n in ("4999", "4998"))},
        ),
        (6_000, [], {claim, *last}),
    ):
        store.read_ = []
        contents = one.ask("ReadCheckpoint", since=since, known=known)["Ok"]["Contents"]
        assert sorted(store.read_) == sorted(wanted.difference(known))
        read = {name for name, _ in contents["manifests"]} | {name for name, _ in contents["shown"]}
        assert read == wanted.difference(known, {claim}) and len(read) + len(contents["unread"]) == 10_003
        assert [number for number, _ in contents["claims"]] == [1] and len(contents["files"]) == 1


def test_a_claim_of_which_the_store_shows_a_part_is_nobody_s() -> None:
    """As where writing it broke off, on stores that show files before they are whole."""
    store = Shared()
    one = Protocol(store, 11)
    assert one.claim(1) == {"Ok": {"Claimed": True}}
    [name] = store.files
    store.files[name] = store.files[name][:-3]
    [(kind, reason)] = one.claim(1)["Err"].items()
    assert kind == "Unavailable" and f"{name} is no whole claim" in reason


def test_what_a_store_refuses_is_told_without_its_credentials(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Shared):
        url = "s3://KEY:SECRET@bucket/x"

        def list(self) -> list[Entry]:
            raise ValueError("no route to KEY:SECRET@bucket")

        def delete(self, names: Iterable[str]) -> None:
            raise OSError(f"no route to {self.url}")

    caplog.set_level(logging.DEBUG, "penstock")
    one = Protocol(Broken(), 11)
    assert one.newest() == {"Err": {"Unavailable": "s3://...@bucket/x: no route to ...@bucket"}}
    _, _, error = one.ask_aside("Delete", names=["old"])
    assert str(error) == "no route to s3://...@bucket/x"
    assert "s3://...@bucket/x" in caplog.text and "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("registry", "resolver", "known"),
    [
        # The name of a pod goes with it.
        ("driver:seven", socket.EAI_NONAME, True),
        ("driver:seven", socket.EAI_AGAIN, False),
        # No network leads there.
        ("224.0.0.1:7", None, False),
    ],
)
def test_an_engine_that_cannot_be_asked_is_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch, registry: str, resolver: int | None, known: bool
) -> None:
    """Its name did not resolve for a moment, and it was shut out. No resolver is asked here but the one that is set."""

    def resolve(*_: Any) -> None:
        assert resolver is not None
        raise socket.gaierror(resolver, "as it says")

    monkeypatch.setattr(checkpoints, "_ANSWER_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    store = Shared()
    first, second, third = Protocol(store, 11), Protocol(store, 22), Protocol(store, 33, takeover=True)
    assert first.claim(1, registry) == {"Ok": {"Claimed": True}}
    answer, taken = (one.ask("ReadCheckpoint", since=0, known=[]) for one in (second, third))
    assert taken["Ok"]["Contents"]["held"] is not known, "it may write meanwhile"
    if known:
        assert answer["Ok"]["Contents"]["held"] is False
    else:
        reason = answer["Err"]["Unavailable"]
        assert "whether the engine of claim 1 still serves it cannot be told" in reason and "takeover=True" in reason


def test_a_claim_that_is_being_written_is_asked_for_again() -> None:
    store = Shared()
    one = Protocol(store, 11)
    assert one.claim(1) == {"Ok": {"Claimed": True}}
    [name] = store.files
    whole = store.files[name]
    store.files[name] = whole[: len(whole) // 2]
    [(kind, reason)] = one.newest()["Err"].items()
    assert kind == "Unavailable"
    assert name in reason
    store.files[name] = whole
    assert one.newest() == newest(1, 11)
    # One that somebody else has not written whole, or of a newer release, shuts this one out all the same.
    store.files[name.replace("1", "2")] = b""
    assert one.newest() == newest(2, None)


@pytest.mark.parametrize("claims", [0, 1, 3])
def test_where_one_comes_second_the_number_tells(tmp_path: Any, claims: int) -> None:
    one = Protocol(open_storage(str(tmp_path)), 11)
    for number in range(1, claims + 1):
        assert one.claim(number) == {"Ok": {"Claimed": True}}
    assert one.newest() == newest(claims, 11 if claims else None)
    two = Protocol(open_storage(str(tmp_path)), 22)
    assert two.newest() == newest(claims, None) and two.claim(claims + 1) == {"Ok": {"Claimed": True}}
    assert one.newest() == newest(claims + 1, None)


def test_of_a_folder_that_was_put_back_who_wrote_last_has_the_claim(tmp_path: Path) -> None:
    """A number that its first engine has made is given again where the copy ends before it."""
    folder, copy = tmp_path / "now", tmp_path / "copy"
    one, other = (Protocol(open_storage(str(folder)), nonce) for nonce in (11, 22))
    assert one.claim(1) == {"Ok": {"Claimed": True}}
    shutil.copytree(folder, copy)
    assert one.claim(2) == {"Ok": {"Claimed": True}}
    assert one.newest() == newest(2, 11)
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    assert other.claim(2) == {"Ok": {"Claimed": True}}
    assert one.newest() == other.newest() == newest(2, 22)


def test_a_file_whose_name_is_like_that_of_a_claim_is_none() -> None:
    """A copy made by hand, or by what keeps folders alike."""
    store = Shared()
    one = Protocol(store, 11)
    assert one.claim(2) == {"Ok": {"Claimed": True}}
    [name] = store.files
    for stray in (f"{name}.bak", f"{name}-old", "claim-old", "claim-3", "claim-"):
        store.files[stray] = b"x"
        assert one.newest() == newest(2, 11), stray


def test_on_a_mount_without_links_who_wrote_last_has_the_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store may be behind it, which lets both write."""

    def link(*paths: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", link)
    one, other = (Protocol(open_storage(str(tmp_path)), nonce) for nonce in (11, 22))
    assert one.claim(1) == {"Ok": {"Claimed": True}}
    assert one.claim(1) == {"Ok": {"Claimed": True}}, "the answer of the first try was lost"
    assert other.claim(1) == {"Ok": {"Claimed": False}}
    assert one.newest() == newest(1, 11)
    [claim] = tmp_path.iterdir()
    claim.rename(tmp_path / ".of-one")
    assert other.claim(1) == {"Ok": {"Claimed": True}}
    assert one.newest() == other.newest() == newest(1, 22)
    claim.write_bytes(claim.read_bytes()[:-1])
    assert one.newest() == {"Err": {"Unavailable": f"{tmp_path}: {claim.name} is being written"}}
