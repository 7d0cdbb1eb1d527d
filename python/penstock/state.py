"""What a checkpoint holds: manifests, operators, keys and values, as tables. Read only.

Owns: how a checkpoint is found, which of its manifests answers for a batch, what is said where there is none, and how
values of Python functions are shown. What files mean is decided in the native module, which has the operators read
their own state; the files are described in ``docs/checkpoint-format.md``.

Unpickling runs code that whoever wrote the file has chosen. So keys and values of functions are read by an unpickler
that makes builtin types and those of the standard library's dates, decimals and collections only, unless
``unpickle=True`` says that the writer is trusted. What cannot be read is named, and all else is there.

Examples
--------
>>> import penstock as pk
>>> pk.state.read("/no/such/folder")  # doctest: +ELLIPSIS
Traceback (most recent call last):
penstock.errors.ConfigError: /no/such/folder: there is no state of penstock in this folder, ...
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from penstock._options import yes_or_no
from penstock._storage import OWN_FOLDER, Storage, below, open_storage, shown
from penstock.errors import ConfigError, StateError, StorageError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["manifests", "operators", "read"]

_MANIFEST = re.compile(r"manifest-(\d{20})(-finished)?-(\d{20})-[0-9a-f]{16}")
_CLAIM = re.compile(r"claim-\d{20}")
#: Later times have no year of four digits: the end of input is one.
_LATEST_US = 253_402_300_799_999_999


def read(
    checkpoint: str | os.PathLike[str],
    operator: str | None = None,
    batch: int | None = None,
    *,
    limit: int | None = None,
    unpickle: bool = False,
) -> pa.Table:
    """Keys and values of an operator's state at the end of a batch.

    Parameters
    ----------
    checkpoint : str or path
        Spark's checkpoint location of the query, or the folder given as ``checkpoint=``; a path or URL.
    operator : str, optional
        Name of one, see `operators`, or its kind where one has it. Default the only one.
    batch : int, optional
        Default the newest.
    limit : int, optional
        At most so many rows, of any keys. Default all.
    unpickle : bool
        Whether values of a Python function may be made by whatever code their pickles name. Only where you trust who
        wrote the checkpoint. Default False: values of builtin types are shown, others are told by their size.

    Returns
    -------
    pyarrow.Table
        One row per key: the columns of the key, then what the step computes, as it would say it if its input ended now.
        Behind ``window_start`` and ``window_end`` there is one row per key and open window. A ``top`` has its rows. Of
        a Python function: ``value`` (text of a ``stateful_map``'s state, where that has timers or expires of a tuple:
        the state, when it was last used, timers; a struct of a group's, and ``timeout_ms``), ``bytes`` of its pickle,
        ``readable``, and ``problem``, which names what could not be read and why.

    Raises
    ------
    ConfigError
        When there is no such checkpoint, batch or operator; it names those that there are.
    StorageError
        When a file is missing, damaged or of a newer release; it names the file.
    StateError
        When the state is not what its manifest says.

    Notes
    -----
    Reads the files of one manifest and holds the result in memory. A query that runs at the same time may delete what
    is read: then a file is missing, and reading again helps.
    """
    import pyarrow as pa

    _check_limit(limit)
    yes_or_no(unpickle, "unpickle")
    found = _open(checkpoint)
    manifest = found.manifest(batch)
    schema, blocks = _rows(found, manifest, found.operator(manifest, operator), unpickle)
    taken: list[pa.RecordBatch] = []
    left = limit
    for block in blocks:
        taken.append(block if left is None else block.slice(0, left))
        if left is not None:
            left -= taken[-1].num_rows
            if not left:
                break
    return pa.Table.from_batches(taken, schema)


def manifests(checkpoint: str | os.PathLike[str]) -> pa.Table:
    """What a checkpoint could be restored from.

    Parameters
    ----------
    checkpoint : str or path
        As of `read`.

    Returns
    -------
    pyarrow.Table
        One row per manifest, by batch: ``name``, ``batch``, ``finished`` (the final epoch has run), ``serves`` (it is
        the one that counts for its batch), ``claim``, ``generation``, ``watermark`` (null before there is one and at
        the end of input), ``clock`` (processing time), ``late_rows``, ``files`` and their ``bytes``, ``plan``
        (operators with state), ``problem`` (why it cannot be read; null where it can).

    Raises
    ------
    ConfigError
        When there is no such checkpoint.
    """
    import pyarrow as pa

    found = _open(checkpoint)
    rows = []
    for name in sorted({*found.manifests, *found.damaged}):
        match = _MANIFEST.fullmatch(name)
        assert match
        row: dict[str, Any] = {"name": name, "batch": int(match[1]), "finished": bool(match[2])}
        row |= {"serves": found.serving.get(int(match[1])) == name, "problem": found.damaged.get(name)}
        if name in found.manifests:
            told = found.manifests[name]
            # Older releases leave that of the flow out where it is the least of those of its sources.
            least = min((at for at in told["watermarks"] if at is not None), default=None)
            watermark = told.get("watermark", least)
            row |= {key: told[key] for key in ("claim", "generation", "late_rows")}
            row |= {
                "watermark": watermark if watermark is not None and abs(watermark) <= _LATEST_US else None,
                "clock": told["clock_ms"],
                "files": len(told["files"]),
                "bytes": sum(file["length"] for file in told["files"]),
                "plan": "; ".join(f"{one['name']}: {one['types']}" for one in told["plan"]["operators"]),
            }
        rows.append(row)
    utc = "UTC"
    fields: list[tuple[str, pa.DataType]] = [
        ("name", pa.string()),
        ("batch", pa.int64()),
        ("finished", pa.bool_()),
        ("serves", pa.bool_()),
        ("claim", pa.int64()),
        ("generation", pa.int64()),
        ("watermark", pa.timestamp("us", utc)),
        ("clock", pa.timestamp("ms", utc)),
        ("late_rows", pa.int64()),
        ("files", pa.int64()),
        ("bytes", pa.int64()),
        ("plan", pa.string()),
        ("problem", pa.string()),
    ]
    return pa.Table.from_pylist(rows, pa.schema(fields))


def operators(checkpoint: str | os.PathLike[str], batch: int | None = None) -> pa.Table:
    """Which steps of a flow have state in a batch.

    Parameters
    ----------
    checkpoint, batch
        As of `read`.

    Returns
    -------
    pyarrow.Table
        One row per operator, in the order of the flow: ``name``, ``kind``, ``types`` of keys and values, ``version``,
        ``segments`` in the files, and their ``bytes``.

    Raises
    ------
    ConfigError, StorageError
        As of `read`.
    """
    import pyarrow as pa

    found = _open(checkpoint)
    manifest = found.manifest(batch)
    sizes: dict[str, list[int]] = {}
    for _, name, _, _, _, size in found.files(manifest).segments():
        sizes.setdefault(name, []).append(size)
    rows = [
        {key: told[key] for key in ("name", "kind", "types", "version")}
        | {"segments": len(sizes.get(told["name"], ())), "bytes": sum(sizes.get(told["name"], ()))}
        for told in manifest["plan"]["operators"]
    ]
    text, number = pa.string(), pa.int64()
    fields = [("name", text), ("kind", text), ("types", text), ("version", number), ("segments", number)]
    return pa.Table.from_pylist(rows, pa.schema([*fields, ("bytes", number)]))


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint that was found: its manifests by name, which of them serves a batch, and which cannot be read."""

    storage: Storage
    names: tuple[str, ...]
    sizes: Mapping[str, int]
    manifests: Mapping[str, Any]
    serving: Mapping[int, str]
    damaged: Mapping[str, str]

    @property
    def where(self) -> str:
        """Where it is, for people."""
        return shown(self.storage.url)

    def manifest(self, batch: int | None) -> Mapping[str, Any]:
        """That of a batch."""
        batches: dict[int, list[str]] = {}
        for name in sorted(self.names):
            match = _MANIFEST.fullmatch(name)
            assert match
            batches.setdefault(int(match[1]), []).append(name)
        if batch is None:
            batch = max(batches)
        if isinstance(batch, bool) or not isinstance(batch, int) or batch not in batches:
            there = ", ".join(map(str, sorted(batches)))
            raise ConfigError(f"{self.where}: there is no state of batch {batch!r}, only of {there}")
        if batch in self.serving:
            found: Mapping[str, Any] = self.manifests[self.serving[batch]]
            return found
        bad = next((name for name in batches[batch] if name in self.damaged), None)
        if bad is None:
            raise _gone(self.storage, batches[batch][0])
        others = ", ".join(map(str, sorted(self.serving))) or "none"
        raise StorageError(
            f"{self.where}: file {bad} {self.damaged[bad]}: put back the file; batches that can be read: {others}"
        )

    def operator(self, manifest: Mapping[str, Any], wanted: str | None) -> Mapping[str, Any]:
        """An operator of a manifest by its name, or by its kind where one has it."""
        all_: Sequence[Mapping[str, Any]] = manifest["plan"]["operators"]
        names = ", ".join(repr(one["name"]) for one in all_)
        if not all_:
            raise ConfigError(f"{self.where}: the flow has no operator with state")
        if wanted is None:
            if len(all_) > 1:
                raise ConfigError(f"{self.where}: several operators have state, say which one: {names}")
            return all_[0]
        found = [one for one in all_ if one["name"] == wanted] or [one for one in all_ if one["kind"] == wanted]
        if len(found) != 1:
            raise ConfigError(f"{self.where}: there is no operator {wanted!r}, only {names}")
        return found[0]

    def files(self, manifest: Mapping[str, Any]) -> Any:
        """The data files of a manifest, opened."""
        from penstock import _native

        opened = []
        for file in manifest["files"]:
            name, length = file["name"], file["length"]
            size = self.sizes.get(name)
            if size is None:
                raise StorageError(
                    f"{self.where}: file {name} of batch {manifest['batch']} is missing: put it back, or look at"
                    " another batch; if the query runs, it may have deleted it just now, then try again"
                )
            if size != length:
                raise StorageError(
                    f"{self.where}: file {name} has {size:,} bytes where its manifest says {length:,}: put it back"
                )
            opened.append((name, length, file["checksum"], partial(_read, self.storage, name)))
        return _native.CheckpointFiles(opened)


def _read(storage: Storage, name: str, offset: int = 0, length: int | None = None) -> bytes:
    try:
        return storage.read(name, offset, length)
    except FileNotFoundError as error:
        raise _gone(storage, name) from error
    except OSError as error:
        raise _unread(storage, f": file {name}", error) from error


def _unread(storage: Storage, what: str, error: OSError) -> StorageError:
    return StorageError(f"{shown(storage.url)}{what} cannot be read: {shown(storage.url, str(error))}")


def _gone(storage: Storage, name: str) -> StorageError:
    return StorageError(f"{shown(storage.url)}: file {name} was deleted while it was read: try again")


def _manifest(storage: Storage, name: str) -> bytes | None:
    """A manifest's content; None where the engine beside has let it go since it was listed."""
    try:
        return storage.read(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unread(storage, f": file {name}", error) from error


def _open(checkpoint: str | os.PathLike[str]) -> _Checkpoint:
    """Find a checkpoint, in the folder or in ours in it, and read its manifests."""
    from penstock import _native

    given = os.fspath(checkpoint)
    if not isinstance(given, str) or not given:
        told = shown(os.fsdecode(given), repr(checkpoint))
        raise ConfigError(f"checkpoint={told}: give the path or URL of a checkpoint")
    url = given if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", given) else os.path.abspath(given)
    claims = False
    for place in (below(url, OWN_FOLDER), url):
        storage = open_storage(place)
        try:
            sizes = dict(storage.list())
        except NotADirectoryError:
            continue
        except OSError as error:
            raise _unread(storage, "", error) from error
        names = tuple(name for name in sizes if _MANIFEST.fullmatch(name))
        claims = claims or any(_CLAIM.fullmatch(name) for name in sizes)
        if names:
            found = [(name, content) for name in names if (content := _manifest(storage, name)) is not None]
            told = json.loads(_native.checkpoint_manifests(found))
            serving = {int(batch): name for batch, name in told["serving"].items()}
            return _Checkpoint(storage, names, sizes, told["manifests"], serving, told["damaged"])
    if claims:
        raise ConfigError(f"{shown(given)}: an engine has claimed this checkpoint, but has not committed a batch yet")
    raise ConfigError(
        f"{shown(given)}: there is no state of penstock in this folder, nor in {OWN_FOLDER} in it: name the checkpoint"
        " location of a query that has committed a batch"
    )


def _check_limit(limit: int | None) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"limit={limit!r}: give a number of rows, 1 or more, or None for all")


def _rows(
    found: _Checkpoint, manifest: Mapping[str, Any], operator: Mapping[str, Any], unpickle: bool
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Columns and rows of an operator, range by range."""
    import pyarrow as pa

    from penstock import _native

    name, columns = operator["name"], operator.get("columns", "")
    if not columns:
        raise StateError(f"{found.where}: the manifest does not say what columns operator {name!r} has")
    schema, keys, is_values = _native.checkpoint_columns(columns)
    files = found.files(manifest)

    def blocks() -> Iterator[pa.RecordBatch]:
        for prefix, length in files.ranges(name):
            for block in files.rows(name, columns, prefix, length):
                yield pa.record_batch(block)

    if not is_values:
        return pa.schema(schema), blocks()
    values = _Values(pa.schema(keys), json.loads(columns).get("state"), unpickle)
    return values.schema, map(values.table, blocks())


class _Values:
    """Keys and values of a Python function as columns."""

    def __init__(self, keys: pa.Schema, state: str | None, unpickle: bool) -> None:
        import pyarrow as pa

        self._load = pickle.loads if unpickle else _load_plain
        self._keys, self._state = keys, None
        # Keys may be called like what stands beside them.
        value, timeout, size, readable, problem = (
            _free(name, keys.names) for name in ("value", "timeout_ms", "bytes", "readable", "problem")
        )
        fields = [field.with_nullable(True).remove_metadata() for field in keys]
        if state is None:
            fields.append(pa.field(value, pa.string()))
        else:
            self._state = pa.struct(list(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(state)))))
            fields += [pa.field(value, self._state), pa.field(timeout, pa.int64())]
        fields += [pa.field(size, pa.int64()), pa.field(readable, pa.bool_()), pa.field(problem, pa.string())]
        self.schema = pa.schema(fields)

    def table(self, block: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a block of pickled keys and values."""
        import pyarrow as pa

        rows = [self._row(*pair) for pair in zip(block[0].to_pylist(), block[1].to_pylist(), strict=True)]
        columns = zip(*rows, strict=True) if rows else [()] * len(self.schema)
        return pa.record_batch(
            [pa.array(column, field.type) for column, field in zip(columns, self.schema, strict=True)],
            schema=self.schema,
        )

    def _row(self, name: bytes, body: bytes) -> list[Any]:
        import pyarrow as pa

        problems = []
        key: Sequence[Any] = [None] * len(self._keys)
        try:
            loaded = self._load(name)
            loaded = loaded if isinstance(loaded, tuple) else (loaded,)
            if len(loaded) != len(self._keys):
                raise ValueError(f"it has {len(loaded)} columns")
            for item, kind in zip(loaded, self._keys.types, strict=True):
                pa.scalar(item, kind)
            key = loaded
        except Exception as error:
            problems.append(f"the key of bytes {name[:40]!r} cannot be read: {_told(error)}")
        value: list[Any] = [None] if self._state is None else [None, None]
        try:
            state = self._load(body)
            if self._state is None:
                value = [repr(state)]
            else:
                fields, timeout = state
                names = [field.name for field in self._state]
                told = None if fields is None else dict(zip(names, fields, strict=True))
                pa.scalar(told, self._state)
                value = [told, timeout]
        except Exception as error:
            problems.append(f"its value cannot be read: {_told(error)}")
        return [*key, *value, len(body), not problems, "; ".join(problems) or None]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"


def _free(name: str, taken: Iterable[str]) -> str:
    """A name that no column has."""
    taken = set(taken)
    while name in taken:
        name = f"{name}_"
    return name


class _Refused(pickle.UnpicklingError):
    """A pickle names something that need not be harmless."""


#: What pickles may name without trust: calling any of these with anything runs no code of the pickle's.
_PLAIN = {
    "builtins": {"complex", "frozenset", "set"},
    "collections": {"Counter", "OrderedDict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "uuid": {"SafeUUID", "UUID"},
    "zoneinfo": {"ZoneInfo"},
}


def _zone_maker(of: Any, name: Any) -> Any:
    """`getattr` as far as time zones are pickled by it: timestamps of rows have one."""
    if of is not ZoneInfo or name != "_unpickle":
        raise _Refused("it is made by builtins.getattr, which runs code: unpickle=True if you trust who wrote it")
    return ZoneInfo._unpickle  # type: ignore[attr-defined]


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if (module, name) == ("builtins", "getattr"):
            return _zone_maker
        raise _Refused(f"it is made by {module}.{name}, which runs code: unpickle=True if you trust who wrote it")


def _load_plain(data: bytes) -> Any:
    return _Plain(io.BytesIO(data)).load()
