"""The files that the engine's protocol reads and writes itself: claims and manifests, and what it deletes.

Owns: one folder for each query whose state is durable, and the threads that wait for its store. What is in the files,
which of them serve and which may go is decided by the protocol; data files are written by members.

Invariants: nothing here holds up the executor: each thing asked of a store has a thread of its own, which ends with
it, and how it ended comes back as an event, also when the store hangs and nobody waits any more; what no batch waits
for (notes, and what is deleted) is told by name, too. Nothing is deleted any more once a checkpoint is read again, or
the engine has closed: what has a name that was to go may have been put back. A claim is made by
`Storage.create` alone; one that is there already is ours when it carries our nonce: the answer of an earlier try was
lost.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any

from penstock._storage import Storage, shown
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.spark._engine.executor import Executor

__all__ = ["Checkpoints"]

log = logging.getLogger(__name__)

#: How long the registry of another engine may take to answer, seconds.
_ANSWER_S = 3.0
#: How long a checkpoint is read on though a file of it could not be read, seconds.
_PATIENCE_S = 5.0
#: What a resolver says that has not found out whether there is such a name.
_NOT_RESOLVED = {socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_MEMORY, socket.EAI_SYSTEM}
_OF_BATCH = re.compile(r"(manifest|shown)-(\d+)-")


class Checkpoints:
    """The checkpoints of one engine's queries.

    Parameters
    ----------
    executor : Executor
        Of the engine; must not have started.
    storage : callable
        The folder of a query.
    registry : str
        Address of the engine's registry.
    nonce : int
        Tells the engine apart; in each of its claims.
    told : callable, optional
        ``told(query, what, error)``: how it ended that files were to be deleted, or a note written, for which nobody
        waits; None where it was done. Must not raise.
    takeover : bool
        Whether the engine takes checkpoints over: it need not know whether another one serves them.
    """

    def __init__(
        self,
        executor: Executor,
        storage: Callable[[str], Storage],
        registry: str,
        nonce: int,
        told: Callable[[str, str, Exception | None], None] = lambda query, what, error: None,
        takeover: bool = False,
    ) -> None:
        self._executor = executor
        self._storage = storage
        self._registry = registry
        self._nonce = nonce
        self._told = told
        self._takeover = takeover
        self._lock = threading.Lock()
        #: Query -> what deletes its files: set to end it, and set when it has ended.
        self._deleting: dict[str, tuple[threading.Event, threading.Event]] = {}
        executor.perform(
            ReadCheckpoint=self._asks("reads", self._read),
            CreateClaim=self._asks("claims", self._claim),
            ReadClaims=self._asks("claims", self._newest),
            WriteManifest=self._asks("writes", self._write),
            WriteShown=self._asks("notes", self._note),
            Delete=self._asks("deletes", self._delete),
        )

    def _asks(
        self, what: str, work: Callable[[Storage, Mapping[str, Any]], Any]
    ) -> Callable[[Mapping[str, Any]], None]:
        """An effect that does some work with a store in a thread of its own."""

        def begin(facts: Mapping[str, Any]) -> None:
            storage = self._storage(facts["query"])
            name = f"penstock-checkpoint-{what}"
            if what == "deletes":
                # Here, so that whoever reads behind it finds it.
                deletion = threading.Event(), threading.Event()
                facts = {**facts, "deletion": deletion}
                with self._lock:
                    self._deleting[facts["query"]] = deletion
            try:
                threading.Thread(target=self._do, args=(what, work, storage, facts), name=name, daemon=True).start()
            except RuntimeError as error:
                # The system gives none at the moment: as if the store had not been there.
                self._done(what, storage, facts, {"Err": {"Unavailable": f"{shown(storage.url)}: {error}"}}, error)

        return begin

    def _do(
        self,
        what: str,
        work: Callable[[Storage, Mapping[str, Any]], Any],
        storage: Storage,
        facts: Mapping[str, Any],
    ) -> None:
        failed: Exception | None = None
        try:
            outcome: Any = {"Ok": work(storage, facts)}
        except Exception as error:
            # Whatever a store raises may pass; the protocol tries again, and says in the end what it was.
            text = shown(storage.url, str(error))
            failed = error if text == str(error) else OSError(text)
            outcome = {"Err": {"Unavailable": f"{shown(storage.url)}: {text}"}}
            if not isinstance(error, OSError):
                log.info("checkpoint %s: %s", shown(storage.url), text, exc_info=failed is error)
        self._done(what, storage, facts, outcome, failed)

    def _done(
        self, what: str, storage: Storage, facts: Mapping[str, Any], outcome: Any, failed: Exception | None
    ) -> None:
        if what == "deletes":
            with self._lock:
                if self._deleting.get(facts["query"]) is facts["deletion"]:
                    del self._deleting[facts["query"]]
            facts["deletion"][1].set()
        if what in ("notes", "deletes"):
            self._told(facts["query"], what, failed)
        if "ticket" in facts:
            try:
                self._executor.post({"Stored": {"ticket": facts["ticket"], "outcome": outcome}})
            except EngineError as error:
                log.debug("nobody hears how a checkpoint was used: %s", error)

    # In a thread of each

    def _read(self, storage: Storage, facts: Mapping[str, Any]) -> Any:
        from penstock import _native

        with self._lock:
            ending, ended = self._deleting.get(facts["query"], (None, None))
        if ending is not None and ended is not None:
            ending.set()
            ended.wait()
        files: list[tuple[str, int, bytes | None]] = []
        failed: Exception | None = None
        patience = time.monotonic() + _PATIENCE_S
        entries = storage.list()
        wanted = _wanted((entry.name for entry in entries), facts["since"], facts["known"])
        for entry in entries:
            content: bytes | None = None
            if entry.name in wanted:
                try:
                    content = storage.read(entry.name)
                except FileNotFoundError:
                    continue  # it went since
                except Exception as error:
                    # One of many; the next try need not stumble over the rest, unless that takes long.
                    failed = failed or error
                    if time.monotonic() > patience:
                        break
            files.append((entry.name, entry.size, content))
        if failed is not None:
            raise failed
        contents = json.loads(_native.checkpoint_contents(files, False))
        newest = max(contents["claims"], key=lambda claim: claim[0], default=None)
        contents["held"] = newest is not None and "Ok" in newest[1] and self._is_held(newest[1]["Ok"])
        return {"Contents": contents}

    def _is_held(self, claim: Mapping[str, Any]) -> bool:
        """Whether another engine serves under a claim now. Where that cannot be told it does for who takes over."""
        from penstock import _native

        registry = claim["registry"]
        if claim["nonce"] == self._nonce or registry in ("", self._registry):
            return False
        try:
            return _native.registry_answers(registry, claim["nonce"], _ANSWER_S)
        except PenstockError as error:
            if isinstance(error, ConfigError) and _is_nobody(registry):
                return False
            if self._takeover:
                return True
            raise OSError(
                f"whether the engine of claim {claim['number']} still serves it cannot be told: {error} (where it does"
                " not, pk.Engine(..., takeover=True) goes on all the same)"
            ) from error

    def _claim(self, storage: Storage, facts: Mapping[str, Any]) -> Any:
        from penstock import _native

        name, content = _native.checkpoint_file("claim", json.dumps(facts["claim"]))
        if storage.create(name, content):
            return {"Claimed": True}
        found = storage.read(name)
        [[_, claim]] = json.loads(_native.checkpoint_contents([(name, 0, found)], False))["claims"]
        if "Ok" not in claim:
            # As the store shows what is not whole: a try of ours that broke off, or another's that is being written.
            raise OSError(f"{name} is no whole claim: writing it has broken off (start the query again)")
        return {"Claimed": found == content}

    def _newest(self, storage: Storage, facts: Mapping[str, Any]) -> Any:
        from penstock import _native

        listing: list[tuple[str, int, bytes | None]] = [(entry.name, entry.size, None) for entry in storage.list()]
        claims = json.loads(_native.checkpoint_contents(listing, False))["claims"]
        number, nonce = max((number for number, _ in claims), default=0), None
        if number and number == facts["claim"]:
            # Two engines may have made it: at one moment, or from a copy that was put back. Who wrote last has it.
            name = f"claim-{number:020}"
            [[_, claim]] = json.loads(_native.checkpoint_contents([(name, 0, storage.read(name))], False))["claims"]
            if "Ok" not in claim:
                raise OSError(f"{name} is being written")
            nonce = claim["Ok"]["nonce"]
        return {"NewestClaim": {"number": number, "nonce": nonce}}

    def _write(self, storage: Storage, facts: Mapping[str, Any]) -> Any:
        from penstock import _native

        name, content = _native.checkpoint_file("manifest", json.dumps(facts["manifest"]))
        storage.write(name, [content])
        return "Written"

    def _note(self, storage: Storage, facts: Mapping[str, Any]) -> None:
        from penstock import _native

        name, content = _native.checkpoint_file("shown", json.dumps(facts["shown"]))
        storage.write(name, [content])

    def _delete(self, storage: Storage, facts: Mapping[str, Any]) -> Any:
        ending, _ = facts["deletion"]
        storage.delete(takewhile(lambda _: not (ending.is_set() or self._executor.closed), facts["names"]))
        return "Deleted"


def _is_nobody(registry: str) -> bool:
    """Whether the host of a registry has a name that there is not, as that of a pod that is gone."""
    host, _, port = registry.rpartition(":")
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        return error.errno not in _NOT_RESOLVED
    except UnicodeError:
        return True  # no name at all
    return False


def _wanted(names: Iterable[str], since: int, known: Iterable[str]) -> set[str]:
    """Names of the files whose content is wanted: claims, and manifests and notes as the protocol asks for them."""
    from penstock import _native

    wanted, older = set(), {}
    newest = -1
    for name in filter(_native.checkpoint_reads, names):
        found = _OF_BATCH.match(name)
        if not found or int(found[2]) >= since:
            wanted.add(name)
        elif found[1] == "manifest":
            older[name] = int(found[2])
        if found and found[1] == "manifest":
            newest = max(newest, int(found[2]))
    # It says whose the checkpoint is.
    wanted.update(name for name, batch in older.items() if batch == newest)
    return wanted.difference(known)
