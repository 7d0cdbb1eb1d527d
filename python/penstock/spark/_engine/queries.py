"""The queries of an engine: which there are, which one is meant, and who hears what the protocol says.

Invariant: a query id has one `Query` from its first batch until it is dropped, and its state is of one flow,
whose functions may be edited from one run to the next.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

from penstock._storage import Storage, place, shown
from penstock.errors import EngineError
from penstock.spark._engine.executor import Executor
from penstock.spark._engine.program import Program
from penstock.spark._engine.query import Query, Setup
from penstock.spark._engine.stream import Stream
from penstock.spark._tasks.failures import Failure

__all__ = ["Queries"]


class Queries:
    """All queries of an engine that have had a batch. Any thread may ask.

    Parameters
    ----------
    engine : str
        What the engine is called, for messages.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._held: dict[str, Query] = {}
        self._names: dict[str, str] = {}
        #: Marks of the modules that workers may have imported, see `Program.sources`: they keep them, whichever query
        #: they did so for, and whether it is there or not.
        self._modules: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._held)

    def all(self) -> list[Query]:
        """In the order of their first batches."""
        with self._lock:
            return list(self._held.values())

    def get(self, query_id: str) -> Query | None:
        """The query of an id, if it has had a batch."""
        with self._lock:
            return self._held.get(query_id)

    def kept_at(self, url: str, but: Query | None = None) -> Query | None:
        """The query, other than `but`, whose state is at a place."""
        held = [one for one in list(self._held.values()) if one is not but]
        return next((one for one in held if _place(one.checkpoint) == place(url)), None)

    def calling(self) -> str | None:
        """The id of the query in whose call the calling thread is: its sink asks, or a call of it waits."""
        return next((one.id for one in self.all() if one.calls_here), None)

    def name_of(self, query_id: str) -> str | None:
        """What people call the query of an id."""
        return self._names.get(query_id)

    def label(self, query_id: str, name: str) -> str:
        """What people call a query that has had no batch, and is to be called so."""
        taken = {query.name for query in list(self._held.values())}
        return name if name not in taken else f"{name} ({query_id})"

    def find(self, query: Any) -> Query:
        """The query that somebody means: a stream, an id, a name, or None where there is but one.

        Raises
        ------
        EngineError
            When there is none, or None means several.
        """
        known = self.all()
        told = ", ".join(one.called for one in known) or "none"
        if query is None:
            if len(known) != 1:
                raise EngineError(f"engine {self._engine} has {len(known)} queries: say which, {told}")
            return known[0]
        wanted = query if isinstance(query, str) else str(getattr(query, "id", query))
        for found in known:
            if found.id == wanted:
                return found
        for found in known:
            if found.name == wanted:
                return found
        raise EngineError(f"engine {self._engine} has had no batch of a query {wanted}; it knows {told}")

    def of(
        self, setup: Setup, program: Program, query_id: str, name: str, stream: Stream, storage: Storage | None
    ) -> Query:
        """The query of an id; made at its first batch.

        Raises
        ------
        EngineError
            When it has state of another flow or at another place, or another query has its state there, or its
            functions are of a module whose source has changed since workers imported it.
        """
        url = None if storage is None else storage.url
        with self._lock:
            self.refuse_edits(program, query_id, name)
            found = self._held.get(query_id)
            if found is not None:
                if _place(found.checkpoint) != _place(url):
                    raise EngineError(
                        f"the state of Spark query {query_id} ({found.name}) is at {_shown(found.checkpoint)} in engine"
                        f" {self._engine}, not at {_shown(url)}: drop the query, then start it again",
                        query=query_id,
                    )
                if found.checkpoint != url:
                    # Workers write by what their generation began with; a new life of the query begins with these.
                    raise EngineError(
                        f"the state of Spark query {query_id} ({found.name}) is at {_shown(url)} by other credentials"
                        f" in engine {self._engine}: drop the query, then start it again",
                        query=query_id,
                    )
                misfit = None if storage is not None else program.misfit(found.program)
                if misfit is not None:
                    raise EngineError(
                        f"Spark query {query_id} ({found.name}) has state of another flow in engine {self._engine}:"
                        f" {misfit}. Start a new query (a new checkpoint) for the changed flow, and a query for each"
                        " flow",
                        query=query_id,
                    )
                self._modules |= program.sources
                return found
            other = None if url is None else self.kept_at(url)
            if other is not None:
                raise EngineError(
                    f"the state of query {other.called} is at {_shown(url)}: give query {query_id} a"
                    " checkpoint of its own",
                    query=query_id,
                )
            label = self.label(query_id, name)
            made = Query(setup, program, query_id, label, stream, storage)
            self._held[query_id] = made
            self._names[query_id] = label
            self._modules |= program.sources
            return made

    def refuse_edits(self, program: Program, query_id: str, name: str) -> None:
        """Raise an EngineError where workers have a module of a program's already whose source has changed since."""
        marks = program.sources
        changed = next((one for one in sorted(marks) if self._modules.get(one, marks[one]) != marks[one]), None)
        if changed is not None:
            raise EngineError(
                f"the source of module {changed}, which Spark query {query_id} ({name}) uses, has changed, and the"
                f" workers of engine {self._engine} may keep what they have imported: call"
                f" cloudpickle.register_pickle_by_value({changed}) before, or start a new engine",
                query=query_id,
            )

    def forget(self, query: Query) -> None:
        """A query is dropped: what is started with its id from now on is another one."""
        with self._lock:
            if self._held.get(query.id) is query:
                del self._held[query.id], self._names[query.id]

    # In the threads of the executor and the hub

    def attach(self, executor: Executor) -> None:
        """Hear what the protocol has for those who wait for a call; before the executor starts."""
        for effect in ("Feed", "Sink", "Complete", "Fail", "Dropped"):
            executor.perform(**{effect: functools.partial(self._tell, effect)})
        executor.when_broken(self._break)

    def program(self, query_id: str) -> Program:
        """What a query runs."""
        return self._held[query_id].program

    def programs(self) -> dict[str, Program]:
        """What those queries run whose state is not gone for good, by id."""
        return {query.id: query.program for query in self.all() if not query.reusable}

    def checkpoint(self, query_id: str) -> str | None:
        """Where the state of a query is durable."""
        return self._held[query_id].checkpoint

    def storage(self, query_id: str) -> Storage:
        """The folder of a query whose state is durable."""
        storage = self._held[query_id].storage
        assert storage is not None, "the protocol was told that its state is not durable"
        return storage

    def hear(self, query_id: str, failure: Failure) -> None:
        """A member could not do what it was asked about a query."""
        query = self.get(query_id)
        if query is not None:
            query.hear(failure)

    def _tell(self, effect: str, facts: Mapping[str, Any]) -> None:
        query = self.get(facts["query"])
        if query is not None:
            query.tell(effect, facts)

    def _break(self, error: EngineError) -> None:
        for query in self.all():
            query.fail(error)


def _place(url: str | None) -> str | None:
    return None if url is None else place(url)


def _shown(url: str | None) -> str | None:
    return None if url is None else shown(url)
