"""What a checkpoint holds: manifests, operators, keys and values, as tables. Read only.

Owns: how a checkpoint is found, which of its manifests answers for a batch, and what is said where there is none. What
files mean is decided in the native module, which has the operators read their own state; the files are described in
``docs/checkpoint-format.md``.

Unpickling runs code that whoever wrote the file has chosen. So keys and values of functions are read by an unpickler
that makes builtin types and those of the standard library's dates, decimals and collections only, and changes none of
them (`_values`), unless ``unpickle=True`` says that the writer is trusted. What cannot be read is named, and all else
is there.

Examples
--------
>>> import penstock as pk
>>> pk.state.read("/no/such/folder")  # doctest: +ELLIPSIS
Traceback (most recent call last):
penstock.errors.ConfigError: /no/such/folder: there is no state of penstock in this folder, ...
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

from penstock._options import whole, yes_or_no
from penstock._storage import OWN_FOLDER, Storage, below, open_storage, shown
from penstock._values import Values, most_text
from penstock.errors import ConfigError, StateError, StorageError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["manifests", "operators", "read"]


def __dir__() -> list[str]:
    return sorted(__all__)


_MANIFEST = re.compile(r"manifest-(\d{20})(-finished)?-(\d{20})-[0-9a-f]{16}")
_CLAIM = re.compile(r"claim-\d{20}")
#: Later times have no year of four digits: the end of input is one.
_LATEST_US = 253_402_300_799_999_999
#: What a column of whole numbers holds.
_MOST = (1 << 63) - 1
#: Rows are made by so many characters of text that they may have.
_PIECE_TEXT = 1 << 26


def read(
    checkpoint: str | os.PathLike[str],
    operator: str | None = None,
    batch: SupportsIndex | None = None,
    *,
    limit: SupportsIndex | None = None,
    unpickle: bool = False,
) -> pa.Table:
    """Keys and values of an operator's state at the end of a batch.

    Parameters
    ----------
    checkpoint : str or path
        Spark's checkpoint location of the query, or the folder given as ``checkpoint=``; a path or URL. A text that
        ends in ``/.`` names that folder alone, and not penstock's own in it.
    operator : str, optional
        Name of one, see `operators`, or its kind where one has it. Default the only one.
    batch : int, optional
        Default the newest that was written.
    limit : int, optional
        At most so many rows, of any keys. Default all.
    unpickle : bool
        Whether values of a Python function may be made by whatever code their pickles name. Only where you trust who
        wrote the checkpoint. Default False: values of builtin types are shown, others are told by their size.

    Returns
    -------
    pyarrow.Table
        One row per key: the columns of the key, then what the step computes, as it would say it if its input ended now.
        Behind ``window_start`` and ``window_end`` there is one row per key and open window. A ``top`` has its rows, a
        join those that it keeps: ``side`` ("left" or "right"), ``left``, ``right``. Of an `Aggregator` there is one row
        per key, whose ``value`` is a dict from the bounds of each open window (``()`` without windows) to its state. Of
        a Python function: ``value`` (text of a ``stateful_map``'s state, where that has timers or expires of a tuple:
        the state, when it was last used, timers, each a time, a number and a value, times in microseconds since 1970; a
        struct of a group's, and ``timeout_ms``), ``bytes`` of its pickle, ``readable``, and ``problem``, which names
        what could not be read and why. A text that is far longer than the pickle, since the value refers to its parts
        many times, is cut: ``readable`` is false then. Times in a group's state have no zone: they are what the clock
        of the function's ``timezone`` said, as the function sees them.

    Raises
    ------
    ConfigError
        When there is no such checkpoint, batch or operator; it names those that there are. When the folder has state,
        and penstock's own in it has that of another query; it names both.
    StorageError
        When a file is missing, damaged or of a newer release; it names the file.
    StateError
        When the state is not what its manifest says.

    Notes
    -----
    Reads the files of one manifest and holds the result in memory. A query that runs at the same time may delete what
    is read: then a file is missing, and reading again helps.
    """
    most = _checked_limit(limit)
    yes_or_no(unpickle, "unpickle")
    return _table(_open(checkpoint), operator, batch, most, unpickle)


def read_folder(storage: Storage, operator: str | None, batch: int) -> pa.Table:
    """The same of a folder that is known to be the query's: others in it are not looked at."""
    found = _listed(storage)
    if not found.names:
        raise _none(storage.url, found.claimed, "")
    return _table(found, operator, batch)


def _table(
    found: _Checkpoint,
    operator: str | None,
    batch: SupportsIndex | None,
    limit: int | None = None,
    unpickle: bool = False,
) -> pa.Table:
    import pyarrow as pa

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

    there = _open(checkpoint)
    found = there.read(there.names)
    rows = []
    for name in sorted({*found.told, *found.damaged}):
        match = _MANIFEST.fullmatch(name)
        assert match
        row: dict[str, Any] = {"name": name, "batch": int(match[1]), "finished": bool(match[2])}
        row |= {"serves": found.serving.get(int(match[1])) == name, "problem": found.damaged.get(name)}
        if name in found.told:
            told = found.told[name]
            # Older releases leave that of the flow out where it is the least of those of its sources.
            least = min((at for at in told["watermarks"] if at is not None), default=None)
            watermark = told.get("watermark", least)
            row |= {key: told[key] for key in ("claim", "generation", "late_rows")}
            row |= {
                "watermark": watermark if watermark is not None and abs(watermark) <= _LATEST_US else None,
                "clock": told["clock_ms"],
                "files": len(told["files"]),
                "bytes": min(sum(file["length"] for file in told["files"]), _MOST),
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


def operators(checkpoint: str | os.PathLike[str], batch: SupportsIndex | None = None) -> pa.Table:
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
class _Manifests:
    """What manifests say, by name; which of them serves a batch, and why others cannot be read.

    A batch that nothing serves, since a manifest of it is damaged, has the name of that in ``hidden``.
    """

    told: Mapping[str, Any]
    serving: Mapping[int, str]
    damaged: Mapping[str, str]
    hidden: Mapping[int, str]


@dataclass(frozen=True)
class _Checkpoint:
    """The files of a folder by name, with their sizes. There may be many manifests: those that are wanted are read."""

    storage: Storage
    sizes: Mapping[str, int]

    @property
    def where(self) -> str:
        """Where it is, for people."""
        return shown(self.storage.url)

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its manifests. A name with a number that nobody counts to is none, whatever it looks like."""
        from penstock import _native

        return tuple(name for name in self.sizes if _MANIFEST.fullmatch(name) and _native.checkpoint_reads(name))

    @property
    def claimed(self) -> bool:
        """Whether an engine has claimed it."""
        return any(_CLAIM.fullmatch(name) for name in self.sizes)

    def read(self, names: Iterable[str]) -> _Manifests:
        """What these manifests say, but for those that have gone since they were listed."""
        from penstock import _native

        files = [(name, content) for name in names if (content := _manifest(self.storage, name)) is not None]
        told = json.loads(_native.checkpoint_manifests(files))
        serving, hidden = ({int(batch): name for batch, name in told[key].items()} for key in ("serving", "hidden"))
        return _Manifests(told["manifests"], serving, told["damaged"], hidden)

    def manifest(self, batch: SupportsIndex | None) -> Mapping[str, Any]:
        """That of a batch."""
        batches: dict[int, list[str]] = {}
        for name in sorted(self.names):
            match = _MANIFEST.fullmatch(name)
            assert match
            batches.setdefault(int(match[1]), []).append(name)
        if batch is None:
            for number in sorted(batches, reverse=True):
                found = self.read(batches[number])
                # One that is empty was never written: its driver died, on a store that shows it from when it is opened.
                if number not in found.hidden or self.sizes[found.hidden[number]]:
                    break
        else:
            number = _number(batch)
            if number not in batches:
                there = ", ".join(map(str, sorted(batches)))
                raise ConfigError(f"{self.where}: there is no state of batch {number}, only of {there}")
            found = self.read(batches[number])
        if number in found.serving:
            told: Mapping[str, Any] = found.told[found.serving[number]]
            return told
        if number not in found.hidden:
            raise _gone(self.storage, batches[number][0])
        bad = found.hidden[number]
        others = ", ".join(map(str, sorted(self.read(self.names).serving))) or "none"
        raise StorageError(
            f"{self.where}: file {bad} {found.damaged[bad]}: put back the file; batches that can be read: {others}"
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


def _listed(storage: Storage) -> _Checkpoint:
    try:
        return _Checkpoint(storage, dict(storage.list()))
    except NotADirectoryError:
        return _Checkpoint(storage, {})
    except OSError as error:
        raise _unread(storage, "", error) from error


def _open(checkpoint: str | os.PathLike[str]) -> _Checkpoint:
    """Find a checkpoint, in the folder or in ours in it."""
    try:
        given = os.fspath(checkpoint)
    except TypeError:
        raise ConfigError(
            f"checkpoint is a {type(checkpoint).__name__}: give the path or URL of a checkpoint"
        ) from None
    if not isinstance(given, str) or not given:
        told = shown(os.fsdecode(given), repr(checkpoint))
        raise ConfigError(f"checkpoint={told}: give the path or URL of a checkpoint")
    url, alone = _url(given)
    inner = None if alone else _listed(open_storage(below(url, OWN_FOLDER)))
    try:
        outer = _listed(open_storage(url))
    except StorageError:
        # Who may see ours need not see what it is in.
        if inner is None or not inner.names:
            raise
        return inner
    if inner is not None and inner.names:
        if outer.names:
            own = shown(inner.storage.url)
            raise ConfigError(
                f"{shown(given)}: two queries have state here: say {own} for the one with this checkpoint location, or"
                f" {shown(below(url, '.'))} for the one whose state is in the folder itself, since it was given as"
                " checkpoint="
            )
        return inner
    if outer.names:
        return outer
    claimed = outer.claimed or (inner is not None and inner.claimed)
    raise _none(given, claimed, "" if alone else f", nor in {OWN_FOLDER} in it")


def _url(given: str) -> tuple[str, bool]:
    """Where a checkpoint is, and whether that folder alone is meant: ``/.`` says so."""
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", given)
    base, mark, said = given.partition("?") if is_url else (given, "", "")
    alone = base.endswith("/.")
    return (f"{base.removesuffix('/.')}{mark}{said}" if is_url else os.path.abspath(given)), alone


def _none(given: str, claimed: bool, nor: str) -> ConfigError:
    """That there is no checkpoint."""
    if claimed:
        return ConfigError(f"{shown(given)}: an engine has claimed this checkpoint, but has not committed a batch yet")
    return ConfigError(
        f"{shown(given)}: there is no state of penstock in this folder{nor}: name the checkpoint location of a query"
        " that has committed a batch"
    )


def _number(batch: SupportsIndex) -> int:
    """The number of a batch: an int, of numpy's as well."""
    number = whole(batch)
    if number is None:
        raise ConfigError(f"batch={batch!r}: the number of a batch is an int, or None for the newest")
    return number


def _checked_limit(limit: SupportsIndex | None) -> int | None:
    number = None if limit is None else whole(limit, 1)
    if limit is not None and number is None:
        raise ConfigError(f"limit={limit!r}: give a number of rows, 1 or more, or None for all")
    return number


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
    try:
        values = Values(pa.schema(keys), json.loads(columns).get("state"), unpickle)
    except (ValueError, TypeError, OSError, pa.ArrowException) as error:
        # The checksum holds all the same where somebody has written it by hand.
        raise StateError(
            f"{found.where}: the manifest does not say what operator {name!r} keeps of a group: {error}"
        ) from error
    return values.schema, (values.table(piece) for block in blocks() for piece in _pieces(block))


def _pieces(block: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A block of keys and values in pieces whose text, whatever it is, takes bounded memory."""
    import pyarrow.compute as pc

    begin, size = 0, 0
    for at, length in enumerate(pc.binary_length(block[1]).to_pylist()):
        size += most_text(length)
        if size >= _PIECE_TEXT or at == block.num_rows - 1:
            yield block.slice(begin, at + 1 - begin)
            begin, size = at + 1, 0
