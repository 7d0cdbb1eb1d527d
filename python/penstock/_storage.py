"""Files of a checkpoint, wherever it is: on a disk that all processes see, or in an object store.

Owns: how files are written so that nobody ever reads a part of one, how one of two writers of the same name is told
that it came second, what a URL of Spark's is called here, and how one is shown: without the credentials that it may
carry. What the files say is not known here.

Invariants: a file that has its name is whole, but for those of `create` on a mount without links, and for empty ones of
Azure; a name is written once and its content never changes; what a writer that died has left behind begins with a dot.

On a file system a file is written beside its place, synced and renamed; `create` links it instead, which fails where
there is one. Some mounts have no links (gcsfuse, CIFS, volumes of Databricks): there `create` makes the file under its
own name, where there is none. Who looks meanwhile sees a part, so its content has to tell that it is none: claims have
a checksum. Object stores show a file when it is closed, so nothing is to be renamed; `create` looks first there. HDFS
shows it from when it is opened, so there it is renamed as well. Azure shows an empty one until then, and few of its
accounts rename: a writer that dies leaves that, and whoever reads it has to take it for one that was never written. On
those and behind such a mount two writers at one moment may both believe that they were first: whoever needs more looks
again.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol
from urllib.parse import quote, unquote

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

__all__ = ["OWN_FOLDER", "Entry", "Storage", "below", "open_storage", "place", "shown", "with_settings"]

#: Our folder in a checkpoint location of Spark's.
OWN_FOLDER = "_penstock"

#: Files of an object store that stay open: more than a manifest has, which is merged beyond 64. They hold no socket.
_OPEN_FILES = 256

#: Objects that are deleted at one time.
_AT_ONCE = 8

#: Bytes that can be written.
Piece = bytes | bytearray | memoryview

#: What Spark and Hadoop call a store, and what pyarrow calls it.
_SCHEMES = {
    "s3a": "s3",
    "s3n": "s3",
    "s3": "s3",
    "gs": "gs",
    "gcs": "gs",
    "abfs": "abfs",
    "abfss": "abfss",
    "hdfs": "hdfs",
}


#: What a mount says that has no links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

#: What a mount says that has no fsync of folders, or does not open them: CIFS, several of FUSE. What it keeps of its
#: names it keeps by itself.
_NO_FOLDERS = _NO_LINKS | {errno.EINVAL, errno.EBADF, errno.EACCES, errno.EISDIR}

#: What stands in URLs as it is, and in paths of Hadoop's, which has one that is escaped already for what it means.
_PLAIN = "/:@!$&'()*+,;=~%"
#: A host of Amazon's that says where it is.
_AMAZON = re.compile(
    r"(?:^|\.)s3(?:-fips)?[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d)\.(?:vpce\.)?amazonaws\.com(?:\.cn)?(?:[:/]|$)"
)


#: What stands before the host of a URL; with a slash that should have been escaped where no port is. Buckets have none.
_USER = re.compile(
    r"\A((?:((?i:s3[an]?|gs|gcs))|[A-Za-z][A-Za-z0-9+.-]*):/*)"
    r"(?:([^/?#]*)|([^/?#:@]*:(?(2)|(?!\d*(?:[/?#]|\Z))).*))@",
    re.DOTALL,
)
#: What a store is told behind ``?`` that lets somebody in, by its name.
_SAID = re.compile(r"([?&][^=&]*(?:secret|token|password|key|sig)[^=&]*=)([^&]+)", re.IGNORECASE)
#: The same in a text.
_TOLD = re.compile(r"([?&][^=&\s]*(?:secret|token|password|key|sig)[^=&\s]*=)[^&\s'\"<>]+", re.IGNORECASE)
#: Stores in whose URLs a name before the host lets nobody in: it is of a container, or of a user.
_NAMED = ("abfs", "abfss", "wasb", "wasbs", "hdfs")
#: What is shown in place of what lets somebody in.
_HIDDEN = "..."


class Entry(NamedTuple):
    """A file: its name in the folder, and bytes."""

    name: str
    size: int


class Storage(Protocol):
    """One folder of files, without folders in it.

    All methods raise OSError when the store does not do what it should, which may pass; FileNotFoundError where a file
    is not there.

    Attributes
    ----------
    url : str
        Where it is, as it was given: people see what `shown` makes of it.
    """

    url: str

    def list(self) -> list[Entry]:
        """All files, also what writers that died have left; none where there is no folder."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`, to its end or `length` of them; fewer where it ends before."""

    def write(self, name: str, pieces: Iterable[Piece]) -> int:
        """Write a whole file, and its folder where that is missing; returns bytes. It is durable then."""

    def create(self, name: str, data: Piece) -> bool:
        """Write a file where there is none of that name; whether it did. Of several at one moment more than one may."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no error.

        Of the same kind (what stands before the first ``-``) several at a time, kinds one after the other. One that
        cannot go keeps no other; the error of the first such is raised when all have been tried.
        """


def open_storage(url: str) -> Storage:
    """The folder that a URL or path names; it need not be there yet.

    Parameters
    ----------
    url : str
        A path, or a URL of ``file:``, ``s3:``/``s3a:``, ``gs:``, ``abfs:``/``abfss:``, ``hdfs:`` or ``dbfs:/Volumes``.

    Raises
    ------
    ConfigError
        When nothing here can read such a URL, or its store cannot be reached with what is configured.

    Examples
    --------
    >>> open_storage("file:/tmp/checkpoint").url
    'file:/tmp/checkpoint'
    """
    scheme, named = _scheme(url), shown(url)
    if "\0" in url or url != url.encode("utf-8", "replace").decode():
        raise ConfigError(
            f"{_slipped(url)!r} names no folder that all processes find: a null, or bytes that are no text"
        )
    if not scheme or scheme == "file":
        host, path = _of_file(url)
        if host and host != "localhost":
            raise ConfigError(
                f"{_slipped(url)!r} names a host, and files are of each machine: a path is written"
                f" {_slipped(f'file:///{host}{path}')}, with three slashes"
            )
        if not os.path.isabs(path):
            raise ConfigError(
                f"{_slipped(url)!r} is not an absolute path: every process has to find the same folder there"
            )
        return _Folder(url, Path(path))
    if scheme == "dbfs":
        path = re.sub(r"^dbfs:/*", "/", url, flags=re.IGNORECASE)
        if not path.startswith("/Volumes/"):
            raise ConfigError(f"{named!r}: of dbfs only volumes are mounted as folders, under dbfs:/Volumes")
        return _Folder(url, Path(path))
    if scheme not in _SCHEMES:
        known = ", ".join(["file", *sorted(_SCHEMES), "dbfs"])
        named = _SAID.sub(rf"\1{_HIDDEN}", named)
        raise ConfigError(f"{named!r}: there is no store {scheme!r} here, only {known}")
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    try:
        # Paths of Hadoop's are not escaped, what pyarrow takes is.
        where, mark, said = url[len(scheme) :].partition("?")
        host, path = re.fullmatch(r"(:(?://[^/]*)?)(.*)", where, re.DOTALL).groups()  # type: ignore[union-attr]
        system, base = FileSystem.from_uri(f"{_SCHEMES[scheme]}{host}{quote(path, safe=_PLAIN)}{mark}{said}")
    except (OSError, ArrowException) as error:
        text = shown(url, str(error))
        # A trace shows the cause as well, and who hears of it asks for its kind.
        cause = error if text == str(error) else type(error)(text)
        raise ConfigError(f"{named!r} cannot be opened: {text}") from cause
    if not base.strip("/"):
        raise ConfigError(f"{named!r} names no folder in the store")
    return _Objects(url, system, base)


def _scheme(url: str) -> str:
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", url)
    return match[1].lower() if match else ""


def _of_file(url: str) -> tuple[str, str]:
    """Host and path of a path, or of a URL of ``file:``."""
    host, path = re.fullmatch(r"(?:(?i:file):(?://([^/]*))?)?(.*)", url, re.DOTALL).groups()  # type: ignore[union-attr]
    return host or "", path


def _slipped(url: str) -> str:
    """What is opened nowhere, as people may see it: a slip in a URL hides where in it the secrets are."""
    plain = re.sub(r"\S*:\S*@", f"{_HIDDEN}@", url)
    return _SAID.sub(rf"\1{_HIDDEN}", plain)


def shown(url: str, text: str | None = None) -> str:
    """A URL as people may see it, or a text about it: without what lets somebody into the store.

    Examples
    --------
    >>> print(shown("s3://KEY:SECRET@bucket/x"), shown("abfss://box:SECRET@account.dfs.core.windows.net/x?sig=SECRET"))
    s3://...@bucket/x abfss://box:...@account.dfs.core.windows.net/x?sig=...
    >>> shown("s3://KEY:SECRET@bucket/x", "no such URI: 's3://KEY:SECRET@bucket/x'")
    "no such URI: 's3://...@bucket/x'"
    """
    if _scheme(url) == "file":
        return url if text is None else text
    secrets: list[str] = []

    def user(found: re.Match[str]) -> str:
        held = found[4] if found[3] is None else found[3]
        name, mark, word = held.partition(":")
        if found[1].partition(":")[0].lower() in _NAMED:
            secrets.append(word)
            return f"{found[1]}{name}{mark}{_HIDDEN if mark else ''}@"
        secrets.extend((held, word))
        return f"{found[1]}{_HIDDEN}@"

    def said(found: re.Match[str]) -> str:
        secrets.append(found[2])
        return f"{found[1]}{_HIDDEN}"

    plain = _USER.sub(user, url)
    if plain.partition(":")[0].lower() in _SCHEMES:
        plain = _SAID.sub(said, plain)
    if text is None:
        return plain
    text = text.replace(url, plain)
    # As they were written, as they are meant, as others write them, and what is taken for a path where a slash is.
    held = {*secrets, *map(unquote, secrets), *(quote(unquote(one), safe="") for one in secrets)}
    held |= {part for one in held if len(part := one.partition("/")[2]) > 3}
    for secret in sorted(filter(None, held), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    # Stores name what they were asked with, wherever they have it from.
    return _TOLD.sub(rf"\1{_HIDDEN}", text) if url.partition(":")[0].lower() in _SCHEMES else text


def place(url: str) -> str:
    """The folder that a URL names, in one spelling, whoever opens it.

    Examples
    --------
    >>> place("file:///tmp/check/") == place("/tmp//check"), place("s3a://KEY:SECRET@bucket/x/?region=eu-west-1")
    (True, 's3://bucket/x')
    """
    if (named := shown(url)) != url:
        url = named.replace(f":{_HIDDEN}@", "@", 1).replace(f"{_HIDDEN}@", "", 1)
    scheme = _scheme(url)
    if not scheme or scheme == "file":
        return os.path.normpath(_of_file(url)[1])
    if scheme == "dbfs":
        return os.path.normpath(re.sub(r"^dbfs:/*", "/", url, flags=re.IGNORECASE))
    base = url.partition("?")[0][len(scheme) + 1 :]
    store, _, path = base.lstrip("/").partition("/")
    return f"{_SCHEMES.get(scheme, scheme)}://{store}/{path.strip('/')}".rstrip("/")


def below(url: str, name: str) -> str:
    """URL of a folder in another; what a store is told behind ``?`` stays there.

    Examples
    --------
    >>> below("s3://bucket/check?region=eu-west-1", "_penstock")
    's3://bucket/check/_penstock?region=eu-west-1'
    """
    base, mark, said = url, "", ""
    if url.partition(":")[0].lower() in _SCHEMES:
        base, mark, said = url.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{said}"


def with_settings(url: str, setting: Callable[[str], str | None]) -> str:
    """A URL of S3 with what Hadoop's settings say of where the store is; any other URL as it is.

    Parameters
    ----------
    url : str
        As for `open_storage`. What stands behind its ``?`` already, stays.
    setting : callable
        Of the name of a setting its value, or None: ``fs.s3a.endpoint``, ``fs.s3a.endpoint.region`` and
        ``fs.s3a.connection.ssl.enabled``, those of the bucket (``fs.s3a.bucket.NAME.endpoint``) before those of all.

    Notes
    -----
    Credentials are not taken: URLs stand in messages. pyarrow finds them as Amazon's own programs do, in the
    environment (``AWS_ACCESS_KEY_ID``, ...), a profile or the role of the machine, at the driver and at every executor.

    Examples
    --------
    >>> with_settings("s3a://bucket/x", {"fs.s3a.endpoint": "http://minio:9000"}.get)
    's3a://bucket/x?endpoint_override=minio%3A9000&scheme=http'
    """
    root, mark, _ = url.partition("?")
    scheme, _, path = root.partition("://")
    if _SCHEMES.get(scheme.lower()) != "s3" or mark:
        return url
    bucket = path.partition("/")[0].rpartition("@")[2]

    def value(name: str) -> str:
        own = setting(f"fs.s3a.bucket.{bucket}.{name}")
        return ((own or setting(f"fs.s3a.{name}")) or "").strip()

    said = {}
    endpoint = value("endpoint")
    scheme, _, host = endpoint.rpartition("://")
    # The central one of Amazon is what pyarrow takes anyway, by region.
    if host and host != "s3.amazonaws.com":
        said["endpoint_override"] = host.rstrip("/")
        plain = value("connection.ssl.enabled").lower() == "false"
        said["scheme"] = scheme or ("http" if plain else "https")
    # Where an endpoint is given pyarrow does not look where the bucket is; Hadoop reads the region from the host.
    named = _AMAZON.search(host)
    if region := value("endpoint.region") or (named[1] if named else ""):
        said["region"] = region
    text = "&".join(f"{name}={quote(word, safe='')}" for name, word in said.items())
    return f"{url}?{text}" if text else url


def _masked(method: Callable[..., Any]) -> Any:
    """A method of a store, which raises what it raises without the store's credentials."""

    @wraps(method)
    def run(self: Storage, *args: Any, **named: Any) -> Any:
        try:
            return method(self, *args, **named)
        except Exception as error:
            raised: BaseException | None = error
            while raised is not None:
                raised.args = tuple(shown(self.url, one) if isinstance(one, str) else one for one in raised.args)
                if isinstance(raised, OSError) and isinstance(raised.strerror, str):
                    raised.strerror = shown(self.url, raised.strerror)
                raised = raised.__cause__ or raised.__context__
            raise

    return run


def _hidden(name: str) -> str:
    """A name of our own beside one."""
    return f".{name}.{secrets.token_hex(8)}"


def _fill(file: BinaryIO, pieces: Iterable[Piece]) -> int:
    """Write, sync and close a file; returns bytes."""
    with file:
        size = sum(file.write(piece) for piece in pieces)
        file.flush()
        os.fsync(file.fileno())
    return size


def _sync_folder(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # The file itself is whole and durable by now. Disks that fail or are full say something else.
        if error.errno not in _NO_FOLDERS:
            raise


def _each(act: Callable[[str], None], names: Iterable[str], at_once: int) -> None:
    """Do it for each name, as `Storage.delete` says; names are drawn as they are needed."""
    errors: list[Exception] = []

    def one(name: str) -> None:
        try:
            act(name)
        except Exception as error:
            errors.append(error)

    def together(names: Iterable[str]) -> None:
        """Few at a time, and each only when one before it has ended."""
        drawn, left = iter(names), threading.Lock()

        def draw() -> None:
            while True:
                try:
                    with left:
                        name = next(drawn)
                except StopIteration:
                    return
                except Exception as error:
                    errors.append(error)
                    return
                one(name)

        threads = []
        for _ in range(at_once - 1):
            thread = threading.Thread(target=draw, name="penstock-delete", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break  # the system gives no more: it takes longer
            threads.append(thread)
        draw()
        for thread in threads:
            thread.join()

    for _, kind in groupby(names, lambda name: name.partition("-")[0]):
        together(kind)
    if errors:
        raise errors[0]


class _Folder:
    """A folder of a file system."""

    def __init__(self, url: str, path: Path) -> None:
        self.url, self._path = url, path

    def __reduce__(self) -> Any:
        return open_storage, (self.url,)

    def list(self) -> list[Entry]:
        found = []
        with suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                # It went since; or it is none of ours, whose names are texts.
                with suppress(FileNotFoundError, UnicodeEncodeError):
                    entry.name.encode()
                    if entry.is_file():
                        found.append(Entry(entry.name, entry.stat().st_size))
        return sorted(found)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        with open(self._path / name, "rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def write(self, name: str, pieces: Iterable[Piece]) -> int:
        hidden, size = self._beside(name, pieces)
        os.replace(hidden, self._path / name)
        self._sync()
        return size

    def create(self, name: str, data: Piece) -> bool:
        hidden, _ = self._beside(name, [data])
        try:
            os.link(hidden, self._path / name)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not self._create_in_place(self._path / name, bytes(data)):
                return False
        finally:
            hidden.unlink()
        self._sync()
        return True

    def delete(self, names: Iterable[str]) -> None:
        _each(lambda name: (self._path / name).unlink(missing_ok=True), names, 1)

    def _beside(self, name: str, pieces: Iterable[Piece]) -> tuple[Path, int]:
        """Write and sync a file under another name."""
        hidden = self._path / _hidden(name)
        # The folder is made only where it is missing: that is once.
        try:
            file = open(hidden, "xb")  # noqa: SIM115
        except FileNotFoundError:
            made = [one for one in (self._path, *self._path.parents) if not one.exists()]
            self._path.mkdir(parents=True, exist_ok=True)
            for one in made:
                _sync_folder(one.parent)
            file = open(hidden, "xb")  # noqa: SIM115
        try:
            size = _fill(file, pieces)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        return hidden, size

    def _create_in_place(self, path: Path, data: bytes) -> bool:
        """Write a file under its own name where there is none; whether it did. Readers may see a part of it."""
        try:
            file = open(path, "xb")  # noqa: SIM115
        except FileExistsError:
            return False
        try:
            _fill(file, [data])
        except BaseException:
            # A part of ours would be in the way of the next try. What is whole, or another writer's, stays.
            with suppress(OSError):
                found = path.read_bytes()
                if found != data and data.startswith(found):
                    path.unlink()
            raise
        return True

    def _sync(self) -> None:
        """The names in the folder outlive the machine, where its file system can see to that."""
        _sync_folder(self._path)


class _Objects:
    """A folder of an object store, by pyarrow.

    To open a file there is a request, which tells its size. So files of which parts are read stay open for the next
    part, since their content never changes; one that cannot be read any more, or ends too early, is opened again, once.

    Invariant: what is raised has no credentials, which the texts of stores may have.
    """

    def __init__(self, url: str, system: FileSystem, base: str) -> None:
        self.url, self._system, self._base = url, system, base.rstrip("/")
        self._renames = url.partition(":")[0].lower() == "hdfs"
        self._lock = threading.Lock()
        #: Name -> an open file and its size; those that were read last.
        self._files: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def __reduce__(self) -> Any:
        return open_storage, (self.url,)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    @_masked
    def list(self) -> list[Entry]:
        from pyarrow.fs import FileSelector

        found = self._system.get_file_info(FileSelector(self._base, allow_not_found=True))
        return sorted(Entry(info.base_name, info.size) for info in found if info.is_file)

    @_masked
    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if length is None:
            with self._system.open_input_file(self._path(name)) as file:
                return bytes(file.read_at(max(0, file.size() - offset), offset))
        with self._lock:
            known = self._files.pop(name, None)
        if known is not None:
            # One that was put back is longer than what was opened.
            with suppress(OSError):
                found = self._part(name, known, offset, length)
                if len(found) == length:
                    return found
        file = self._system.open_input_file(self._path(name))
        return self._part(name, (file, file.size()), offset, length)

    def _part(self, name: str, opened: tuple[Any, int], offset: int, length: int) -> bytes:
        """Some bytes of an open file, which stays open if that works. Two that read it at once have one each."""
        file, size = opened
        found = bytes(file.read_at(max(0, min(size - offset, length)), offset))
        with self._lock:
            self._files[name] = opened
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return found

    @_masked
    def write(self, name: str, pieces: Iterable[Piece]) -> int:
        size, begun = 0, _hidden(name) if self._renames else name
        stream = self._open(begun)
        try:
            for piece in pieces:
                stream.write(piece)
                size += memoryview(piece).nbytes
            stream.close()
            if begun != name:
                self._system.move(self._path(begun), self._path(name))
        except BaseException:
            # Arrow shows a part, too, once its stream is closed, which the stream does by itself when it goes.
            with suppress(Exception):
                stream.close()
            with suppress(Exception):
                self._system.delete_file(self._path(begun))
            raise
        return size

    def _open(self, name: str) -> Any:
        try:
            return self._system.open_output_stream(self._path(name))
        except FileNotFoundError:
            self._system.create_dir(self._base, recursive=True)
            return self._system.open_output_stream(self._path(name))

    @_masked
    def create(self, name: str, data: Piece) -> bool:
        [info] = self._system.get_file_info([self._path(name)])
        if info.is_file:
            return False
        if self._renames:
            self.write(name, [data])
            return True
        # Not deleted whatever happens: it may be somebody else's by then.
        with self._open(name) as stream:
            stream.write(data)
        return True

    @_masked
    def delete(self, names: Iterable[str]) -> None:
        def one(name: str) -> None:
            with suppress(FileNotFoundError):
                self._system.delete_file(self._path(name))

        # To delete one takes up to three requests, one after the other.
        _each(one, names, _AT_ONCE)
