"""The steps of a `Pipeline`, as their user writes them: what to do, and nothing that runs.

A step is a frozen value that pickles with cloudpickle; `penstock.ordered._operators` says how it is done.

Items are whatever the input gives: plain objects, or Arrow record batches. What each step does to them is defined for
one item after the other, so results never depend on how a run cuts its input into chunks; where a function receives
more than one item at a time (`map_batches` over plain items) it must treat each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock._coroutines import require_plain
from penstock._options import whole, yes_or_no
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock._flow import Flow

__all__ = [
    "Step",
    "batches",
    "describe",
    "filter",
    "flat_map",
    "flow",
    "map",
    "map_batches",
    "partitioned",
    "rows",
    "stateful",
]

#: How many queues the keys of a partitioned step share. More balance better under skew, fewer cost less.
PARTITIONS = 64


@dataclass(frozen=True)
class Step:
    """One step of a pipeline; made by the functions of this module.

    Attributes
    ----------
    kind : str
        Which function made it.
    name : str
        What it is called in errors and statistics.
    call : callable or None
        The user's function.
    options : tuple of (str, object)
        What else it was given.
    """

    kind: str
    name: str
    call: Callable[..., Any] | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str) -> Any:
        """Value of one option."""
        return dict(self.options)[name]

    def __repr__(self) -> str:
        return f"<step {self.name}>"


def describe(f: Any) -> str:
    """What to call a function in messages.

    Examples
    --------
    >>> describe(len), describe(lambda x: x)
    ('len', '<lambda>')
    """
    found = getattr(f, "__qualname__", None) or getattr(getattr(f, "func", None), "__qualname__", None)
    return str(found or type(f).__qualname__).rpartition("<locals>.")[2]


def _step(kind: str, f: Any, name: str | None, **options: Any) -> Step:
    if not callable(f):
        raise ConfigError(f"{kind}({f!r}): the first argument must be a function")
    _awaited(f, kind)
    _text(name, kind)
    return Step(kind, f"{kind} {name or describe(f)}", f, tuple(options.items()))


def _text(name: object, kind: str) -> None:
    if name is not None and not (isinstance(name, str) and name):
        raise ConfigError(f"{kind}: name must be text, got {name!r}")


def _awaited(f: Any, what: str) -> None:
    require_plain(f, what, ", with mode='threads' and as many workers as may wait at a time")


def map(f: Callable[[Any], Any], *, name: str | None = None) -> Step:
    """One output per item: ``f(item)``.

    Examples
    --------
    >>> from penstock import ordered
    >>> list(ordered.Pipeline([ordered.map(str.upper)]).run("abc"))
    ['A', 'B', 'C']
    """
    return _step("map", f, name)


def flat_map(f: Callable[[Any], Iterable[Any] | None], *, name: str | None = None) -> Step:
    """Any number of outputs per item: all of the iterable ``f(item)``; None for none.

    When the iterable raises, what it gave before comes out first.

    Examples
    --------
    >>> from penstock import ordered
    >>> list(ordered.Pipeline([ordered.flat_map(range)]).run([1, 0, 3]))
    [0, 0, 1, 2]
    """
    return _step("flat_map", f, name)


def filter(predicate: Callable[[Any], Any], *, name: str | None = None) -> Step:
    """Only the items for which ``predicate(item)`` is true.

    Examples
    --------
    >>> from penstock import ordered
    >>> list(ordered.Pipeline([ordered.filter(str.isdigit)]).run("a1b2"))
    ['1', '2']
    """
    return _step("filter", predicate, name)


def map_batches(f: Callable[[Any], Any], *, same_length: bool = False, name: str | None = None) -> Step:
    """Call a function per record batch, or per list of neighbouring plain items.

    Parameters
    ----------
    f : callable
        For a record batch: returns a RecordBatch, a Table, an iterable of them, or None for no rows. For plain
        items: receives a list of some neighbouring ones (how many is up to the run) and returns a sequence of as
        many results; each must depend on its item alone.
    same_length : bool, default False
        Whether a batch that comes back must have as many rows as the one given.
    name : str, optional
        What errors and statistics call it; default the name of the function.

    Notes
    -----
    What is not of the right type or length is a `UserFunctionError`. When a call over plain items fails, the error
    takes the place of all of them.

    Examples
    --------
    >>> from penstock import ordered
    >>> list(ordered.Pipeline([ordered.map_batches(lambda xs: [x + 1 for x in xs])]).run([1, 2, 3]))
    [2, 3, 4]
    """
    return _step("map_batches", f, name, same_length=yes_or_no(same_length, "map_batches same_length"))


def partitioned(
    step: Callable[[Any, Any], tuple[Any, Iterable[Any] | None]],
    *,
    key: Callable[[Any], Any] | str | Sequence[str],
    initial: Any = None,
    finish: Callable[[Any, Any], Iterable[Any] | None] | None = None,
    columns: Sequence[str] | None = None,
    batches: bool = False,
    schema: Any = None,
    partitions: int = PARTITIONS,
    name: str | None = None,
) -> Step:
    """State per key: items of one key are handled in order, those of other keys at the same time.

    Parameters
    ----------
    step : callable
        ``step(state, item) -> (state, outputs)``; `outputs` is an iterable, or None for none. A returned state of
        None forgets the key. When it raises, the state of that key is the one from before; what the step has
        changed of it in place stays.
    key : callable, str or sequence of str
        ``key(item)``, hashable; or one column name (then keys are its values) or several (tuples) of items that are
        record batches.
    initial : object
        State of a new key: what this returns when it can be called, else a copy of it. Default None.
    finish : callable, optional
        ``finish(key, state) -> outputs`` for each key that has a state, at the end of the input, in the order in
        which the keys first appeared.
    columns : sequence of str, optional
        With column keys: what a row holds, default all columns. Rows are tuples.
    batches : bool, default False
        With column keys: call `step` once per batch and key, with the rows of that key as a record batch. The
        keys of a batch come in the order in which they first appear in it.
    schema : pyarrow.Schema or str, optional
        Outputs are tuples (or dicts) and leave as record batches of this schema.
    partitions : int, default 64
        How many queues the keys share.
    name : str, optional
        What errors and statistics call it.

    Notes
    -----
    `key` runs in this process. In worker processes the states of the keys at hand travel with each call; they are
    pickled, and kept as bytes between calls.

    Examples
    --------
    >>> from penstock import ordered
    >>> def running(total, word):
    ...     total += 1
    ...     return total, [(word, total)]
    >>> count = ordered.partitioned(running, key=lambda word: word, initial=0)
    >>> list(ordered.Pipeline([count]).run(["a", "b", "a"]))
    [('a', 1), ('b', 1), ('a', 2)]
    """
    parts = whole(partitions, 1, 65_536)
    if parts is None:
        raise ConfigError(f"partitioned: partitions must be a number from 1 to 65536, got {partitions!r}")
    by: Any = key
    if isinstance(key, str):
        by = key
    elif not callable(key):
        by = tuple(key) if isinstance(key, (list, tuple)) else ()
        if not by or not all(isinstance(column, str) for column in by):
            raise ConfigError(f"partitioned: key must be a function, a column name or several, got {key!r}")
    yes_or_no(batches, "partitioned batches")
    if callable(by) and (columns is not None or batches):
        raise ConfigError("partitioned: columns= and batches= need keys that are columns, such as key='user'")
    if batches and columns is not None:
        raise ConfigError("partitioned: with batches=True the step receives all columns; leave columns= away")
    names: tuple[Any, ...] = tuple(columns) if isinstance(columns, Sequence) and not isinstance(columns, str) else ()
    if columns is not None and (not names or not all(isinstance(column, str) for column in names)):
        raise ConfigError(
            f"partitioned: columns must be a list of names, one at least, got {columns!r}; leave it away for all"
        )
    _optional(finish, "partitioned: finish")
    _awaited(by, "partitioned: key")
    _awaited(initial, "partitioned: initial")
    return _step(
        "partitioned",
        step,
        name,
        key=by,
        initial=initial,
        finish=finish,
        columns=None if columns is None else names,
        batches=batches,
        schema=_schema(schema, "partitioned schema"),
        partitions=parts,
    )


def stateful(
    step: Callable[[Any, Any], tuple[Any, Iterable[Any] | None]],
    *,
    initial: Any = None,
    finish: Callable[[Any], Iterable[Any] | None] | None = None,
    name: str | None = None,
) -> Step:
    """One state for all items: they are handled one after the other, in order.

    Parameters
    ----------
    step : callable
        ``step(state, item) -> (state, outputs)``; `outputs` is an iterable, or None for none. When it raises, the
        state is the one from before; what the step has changed of it in place stays.
    initial : object
        The first state: what this returns when it can be called, else a copy of it.
    finish : callable, optional
        ``finish(state) -> outputs`` at the end of the input.
    name : str, optional
        What errors and statistics call it.

    Examples
    --------
    >>> from penstock import ordered
    >>> def changed(last, item):
    ...     return item, [item] if item != last else None
    >>> list(ordered.Pipeline([ordered.stateful(changed)]).run("aabba"))
    ['a', 'b', 'a']
    """
    _optional(finish, "stateful: finish")
    _awaited(initial, "stateful: initial")
    return _step("stateful", step, name, initial=initial, finish=finish)


def flow(flow: Flow, *, name: str | None = None) -> Step:
    """A native operator: a whole `penstock.Flow` over items that are record batches.

    A flow without keys works on many batches at once. One with keys sees all batches in order, like `stateful`; what
    is still open at the end of the input comes out then. Unlike there, an error in it loses its state: each later batch
    is an `OrderedError` then, and the end of the input is one, that names the item and has that error as its cause.

    Examples
    --------
    >>> import penstock as pk, pyarrow as pa
    >>> from penstock import ordered
    >>> counts = pk.Flow("k bigint").key_by("k").agg(n=pk.count(), emit="final")
    >>> batch = pa.record_batch({"k": [1, 2, 1]})
    >>> sorted(row["n"] for out in ordered.Pipeline([ordered.flow(counts)]).run([batch]) for row in out.to_pylist())
    [1, 2]
    """
    from penstock._flow import Flow

    if not isinstance(flow, Flow):
        raise ConfigError(f"flow({flow!r}): needs a penstock.Flow")
    _text(name, "flow")
    return Step("flow", f"flow {name or ', '.join(flow.columns)}", None, (("flow", flow), ("keyed", flow.keyed)))


def rows(*columns: str) -> Step:
    """Record batches in, one tuple per row out: of these columns, or of all.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from penstock import ordered
    >>> batch = pa.record_batch({"a": [1, 2], "b": ["x", "y"]})
    >>> list(ordered.Pipeline([ordered.rows("b", "a")]).run([batch]))
    [('x', 1), ('y', 2)]
    """
    if not all(isinstance(column, str) for column in columns):
        raise ConfigError(f"rows{columns!r}: needs names of columns")
    return Step("rows", "rows", None, (("columns", columns),))


def batches(schema: Any) -> Step:
    """Tuples or dicts in, record batches of `schema` out: neighbouring rows come in one batch.

    How many rows a batch has is up to the run; the rows and their order are not. A row that does not fit is an error in
    its own place: a dict with other columns, a null where the schema says NOT NULL, a fraction for a whole number.

    Examples
    --------
    >>> from penstock import ordered
    >>> out = ordered.Pipeline([ordered.batches("n bigint")]).run([(1,), (2,)])
    >>> [row for batch in out for row in batch.to_pylist()]
    [{'n': 1}, {'n': 2}]
    """
    if schema is None:
        raise ConfigError("batches: needs a schema")
    return Step("batches", "batches", None, (("schema", _schema(schema, "batches schema")),))


def _schema(schema: Any, what: str) -> Any:
    if schema is None:
        return None
    from penstock._schema import to_arrow

    return to_arrow(schema, what)


def _optional(f: Any, what: str) -> None:
    if f is not None and not callable(f):
        raise ConfigError(f"{what} must be a function, got {f!r}")
    _awaited(f, what)
