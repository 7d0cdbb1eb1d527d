"""Files of a checkpoint: whole or not there, one of several creators wins, and URLs as Spark writes them."""

from __future__ import annotations

import doctest
import errno
import os
import pickle
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pyarrow.fs import LocalFileSystem, S3FileSystem, SubTreeFileSystem

from engine_support import NoThreads
from penstock import _storage
from penstock._storage import Entry, Storage, below, open_storage, with_settings
from penstock.errors import ConfigError


def without_links(patch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    """As on a mount of gcsfuse, CIFS or a volume of Databricks."""

    def link(*paths: Any) -> None:
        if os.path.lexists(paths[1]):  # the kernel looks first
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        raise OSError(number, os.strerror(number))

    patch.setattr(os, "link", link)


@pytest.fixture(params=["folder", "folder without links", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    if request.param == "folder without links":
        without_links(monkeypatch)
    if request.param != "objects":
        return open_storage(str(tmp_path / "deep" / "down"))
    return objects(tmp_path, "deep/down")


def objects(path: Path, base: str = ".") -> Storage:
    """What an object store does, on files: pyarrow's own twin of one."""
    return _storage._Objects("s3://x", SubTreeFileSystem(str(path), LocalFileSystem()), base)


def test_what_was_written_is_read_whole_and_in_parts(storage: Storage) -> None:
    assert storage.list() == []
    with pytest.raises(FileNotFoundError):
        storage.read("a")
    assert storage.write("a", [b"one", memoryview(b"two"), bytearray(b"three")]) == 11
    assert storage.write("b", []) == 0
    assert storage.read("a") == b"onetwothree"
    assert storage.read("a", 3, 3) == b"two" and storage.read("a", 6) == b"three"
    assert storage.read("a", 9, 100) == b"ee" and storage.read("a", 50, 1) == b""
    assert storage.list() == [Entry("a", 11), Entry("b", 0)]
    storage.delete(["a", "never there", "b"])
    assert storage.list() == []


def test_an_object_that_is_read_in_parts_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open one is a request; and an open one that cannot be read any more is opened again."""
    monkeypatch.setattr(_storage, "_OPEN_FILES", 2)
    opened: list[str] = []
    local = LocalFileSystem()

    class Counting:
        def open_input_file(self, path: str) -> Any:
            opened.append(path.rpartition("/")[2])
            return local.open_input_file(path)

    storage = _storage._Objects("s3://x", cast(Any, Counting()), str(tmp_path))
    for name in "abc":
        (tmp_path / name).write_bytes(b"0123456789")
    assert [storage.read("a", at, 3) for at in (0, 3)] == [b"012", b"345"]
    assert opened == ["a"]
    assert [storage.read("a", at, 3) for at in (9, 20)] == [b"9", b""]
    assert opened == ["a"] * 3, "what ends too early may have been put back since"
    assert storage.read("a") == b"0123456789" and opened == ["a"] * 4, "whole ones are read once"
    assert [storage.read(name, 1, 1) for name in "bcab"] == [b"1"] * 4
    assert opened[4:] == ["b", "c", "a", "b"], "no more than two stay open"
    storage._files["b"][0].close()
    with pytest.raises(ValueError, match="closed"):
        storage.read("b", 1, 1)
    assert storage.read("b", 2, 1) == b"2"

    class Broken:
        def read_at(self, length: int, offset: int) -> bytes:
            raise OSError("the connection was reset")

    storage._files["b"] = Broken(), 10
    assert storage.read("b", 3, 2) == b"34" and storage.read("b", 5, 1) == b"5"
    assert opened[8:] == ["b", "b"]
    (tmp_path / "a").unlink()
    storage._files.clear()
    with pytest.raises(FileNotFoundError):
        storage.read("a", 0, 1)


def test_an_object_that_was_put_back_is_read_whole(tmp_path: Path) -> None:
    """A copy that was too short when it was opened, and is there again."""
    storage = objects(tmp_path)
    (tmp_path / "a").write_bytes(b"0123456789")
    assert storage.read("a", 0, 20) == b"0123456789"
    (tmp_path / "a").unlink()
    (tmp_path / "a").write_bytes(b"0123456789abcdefghij")
    assert storage.read("a", 5, 10) == b"56789abcde"


@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_what_cannot_go_keeps_nothing_else(tmp_path: Path, kind: str) -> None:
    storage = open_storage(str(tmp_path)) if kind == "folder" else objects(tmp_path)
    (tmp_path / "manifest-1").mkdir()
    (tmp_path / "manifest-1" / "stays").touch()
    others = ["manifest-2", "manifest-3", *(f"data-{number}" for number in range(40))]
    for name in others:
        storage.write(name, [b"x"])
    with pytest.raises(OSError, match="manifest-1"):
        storage.delete(["manifest-1", *others, "never there"])
    assert [path.name for path in tmp_path.iterdir()] == ["manifest-1"]


def test_what_goes_goes_without_threads_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = objects(tmp_path)
    names = [f"data-{number}" for number in range(40)]
    for name in names:
        storage.write(name, [b"x"])
    threads = NoThreads(monkeypatch, "penstock-delete")
    storage.delete(names)
    assert threads.asked == ["penstock-delete"] and not list(tmp_path.iterdir())


def test_kinds_go_one_after_the_other_and_names_are_drawn_as_they_go(tmp_path: Path) -> None:
    """So that no manifest names what is gone, and whoever draws may end it."""
    local = LocalFileSystem()
    left: list[int] = []

    class Watching:
        """Sees what manifests are there when other files go."""

        def delete_file(self, path: str) -> None:
            if "/data-" in path:
                left.append(len(list(tmp_path.glob("manifest-*"))))
            local.delete_file(path)

    storage = _storage._Objects("s3://x", cast(Any, Watching()), str(tmp_path))
    names = [f"{kind}-{number}" for kind in ("manifest", "data") for number in range(30)]
    for name in names:
        (tmp_path / name).touch()
    storage.delete(iter(names[:45]))
    assert left == [0] * 15
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[45:])

    def fails() -> Iterator[str]:
        yield names[45]
        raise KeyError("no more names")

    with pytest.raises(KeyError, match="no more names"):
        storage.delete(fails())
    assert not (tmp_path / names[45]).exists()


def test_the_second_creator_of_a_name_is_told(storage: Storage) -> None:
    assert storage.create("claim-1", b"mine")
    assert not storage.create("claim-1", b"yours")
    assert storage.read("claim-1") == b"mine" and storage.list() == [Entry("claim-1", 4)]


def test_a_write_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))

    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the machine is full")

    with pytest.raises(RuntimeError, match="full"):
        storage.write("a", pieces())
    assert storage.list() == []


def test_what_has_no_name_that_is_text_is_somebody_elses(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "new" / "below"))
    storage.write("a", [b"1"])
    with open(os.fsencode(tmp_path) + b"/new/below/\xe9t\xe9", "wb"):
        pass
    assert [entry.name for entry in storage.list()] == ["a"]


def test_what_a_writer_that_died_leaves_begins_with_a_dot(tmp_path: Path) -> None:
    script = f"""
import os
from penstock._storage import open_storage
def pieces():
    yield b"half"
    os._exit(3)
open_storage({str(tmp_path)!r}).write("data-1-2-x", pieces())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 3
    [left] = open_storage(str(tmp_path)).list()
    assert left.name.startswith(".data-1-2-x.")


def test_a_store_that_shows_files_from_when_they_are_opened_shows_none_that_is_not_whole(tmp_path: Path) -> None:
    """HDFS does, as the file system here: what was begun has a name of its own there, and is renamed."""
    storage = _storage._Objects("hdfs://x", SubTreeFileSystem(str(tmp_path), LocalFileSystem()), ".")
    begun: list[list[str]] = []

    def pieces(breaks_off: bool) -> Iterator[bytes]:
        yield b"one"
        begun.append([entry.name for entry in storage.list()])
        if breaks_off:
            raise OSError("the cable is out")
        yield b"two"

    assert storage.write("data-1-2-x", pieces(False)) == 6
    with pytest.raises(OSError, match="the cable is out"):
        storage.write("data-1-2-y", pieces(True))
    [[first], [second, whole]] = begun
    assert whole == "data-1-2-x" and first.startswith(".data-1-2-x.") and second.startswith(".data-1-2-y.")
    assert storage.create("claim-1", b"mine") and not storage.create("claim-1", b"yours")
    assert storage.list() == [Entry("claim-1", 4), Entry("data-1-2-x", 6)], "nothing is left behind"
    assert storage.read("data-1-2-x") == b"onetwo" and storage.read("claim-1") == b"mine"


@pytest.mark.parametrize("number", sorted({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}))
def test_a_mount_without_links_has_files_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    without_links(monkeypatch, number)
    one, other = open_storage(str(tmp_path)), open_storage(str(tmp_path))
    assert one.create("claim-1", memoryview(b"mine"))
    # The one that comes second may find the name free, and taken a moment later.
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    assert not other.create("claim-1", b"yours")
    assert one.list() == [Entry("claim-1", 4)] and other.read("claim-1") == b"mine"


def test_what_has_nothing_to_do_with_links_is_no_reason_to_go_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch, errno.EIO)
    storage = open_storage(str(tmp_path))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        storage.create("claim-1", b"mine")
    assert storage.list() == []


def folders_fail(patch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """A mount on which a call fails where it is of a folder."""
    real = getattr(os, call)

    def failing(what: Any, *rest: Any, **named: Any) -> Any:
        told = os.fstat(what) if isinstance(what, int) else os.stat(what) if os.path.exists(what) else None
        if told is not None and stat.S_ISDIR(told.st_mode):
            raise OSError(number, os.strerror(number))
        return real(what, *rest, **named)

    patch.setattr(os, call, failing)


@pytest.mark.parametrize(
    ("call", "number"),
    [("fsync", number) for number in sorted({errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})]
    + [("open", number) for number in (errno.EACCES, errno.EISDIR, errno.EPERM)],
)
def test_a_mount_that_does_not_sync_folders_keeps_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    folders_fail(monkeypatch, call, number)
    storage = open_storage(str(tmp_path))
    assert storage.write("data-1", [b"mine"]) == 4
    assert storage.create("claim-1", b"mine") and not storage.create("claim-1", b"yours")
    assert storage.list() == [Entry("claim-1", 4), Entry("data-1", 4)]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_disk_that_fails_to_sync_a_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    folders_fail(monkeypatch, call, number)
    storage = open_storage(str(tmp_path))
    for ask in (lambda: storage.write("data-1", [b"mine"]), lambda: storage.create("claim-1", b"mine")):
        with pytest.raises(OSError, match=os.strerror(number)):
            ask()


@pytest.mark.parametrize("written", [0, 2, 4])
def test_a_file_under_its_own_name_that_breaks_off_is_out_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """Unless all of it is there, or it is another writer's: behind some mounts two may begin."""
    fill = _storage._fill

    def breaks_off(content: bytes) -> None:
        def filled(file: Any, pieces: Any) -> int:
            if Path(file.name).name.startswith("."):
                return fill(file, pieces)
            with file:
                file.write(content)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(_storage, "_fill", filled)

    without_links(monkeypatch)
    storage = open_storage(str(tmp_path))
    breaks_off(b"mine"[:written])
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        storage.create("claim-1", b"mine")
    assert storage.list() == ([Entry("claim-1", 4)] if written == 4 else [])
    breaks_off(b"yours")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        storage.create("claim-2", b"mine")
    assert storage.read("claim-2") == b"yours"
    monkeypatch.setattr(_storage, "_fill", fill)
    assert storage.create("claim-1", b"mine") == (written < 4)
    assert storage.read("claim-1") == b"mine"


@pytest.mark.parametrize("links", [True, False])
def test_of_many_creators_one_is_first(tmp_path: Path, links: bool) -> None:
    script = f"""
import errno, os, sys
from penstock._storage import open_storage
def link(*paths):
    raise OSError(errno.ENOSYS, "no links")
if not {links}:
    os.link = link
storage = open_storage({str(tmp_path)!r})
print("ready", flush=True)
sys.stdin.readline()
print(sum(storage.create(f"claim-{{n}}", sys.argv[1].encode()) for n in range(50)))
"""
    creators = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(who)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for who in range(4)
    ]
    try:
        for creator in creators:
            assert creator.stdout is not None and creator.stdout.readline() == "ready\n"
        made = [int(creator.communicate("go\n", timeout=60)[0]) for creator in creators]
    finally:
        for creator in creators:
            creator.kill()
    assert sum(made) == 50
    storage = open_storage(str(tmp_path))
    owners = [int(storage.read(entry.name)) for entry in storage.list()]
    assert [owners.count(who) for who in range(4)] == made


@pytest.mark.parametrize("url", ["{}", "file:{}", "file://{}", "file://localhost{}", "FILE:{}"])
def test_paths_are_written_in_several_ways(url: str, tmp_path: Path) -> None:
    url = url.format(tmp_path)
    copy = pickle.loads(pickle.dumps(open_storage(url)))
    assert copy.url == url
    copy.write("a", [b"1"])
    assert (tmp_path / "a").read_bytes() == b"1"


def test_volumes_are_folders() -> None:
    for url in ("dbfs:/Volumes/main/x", "DBFS:/Volumes/main/x"):
        assert str(open_storage(url)._path) == "/Volumes/main/x"  # type: ignore[attr-defined]
        assert _storage.place(url) == _storage.place("/Volumes/main/x/")


def test_object_stores_are_called_as_pyarrow_calls_them() -> None:
    storage = open_storage("s3a://bucket/some/folder?region=eu-west-1")
    assert storage._path("a") == "bucket/some/folder/a"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["my jobs", "job#1", "früh", "a[1]", "50%25", "k=v&w"])
def test_folders_of_object_stores_have_any_name(name: str) -> None:
    url = with_settings(below(f"s3a://b/{name}/q", "_penstock"), {"fs.s3a.endpoint.region": "eu-west-1"}.get)
    assert url == f"s3a://b/{name}/q/_penstock?region=eu-west-1"
    there = name.replace("%25", "%")
    assert open_storage(url)._path("a") == f"b/{there}/q/_penstock/a"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("s3a://b/check/", "s3a://b/check/x"),
        ("S3A://b/check/?region=eu-west-1", "S3A://b/check/x?region=eu-west-1"),
        ("file:/what?/check", "file:/what?/check/x"),
        ("/what?", "/what?/x"),
    ],
)
def test_a_folder_is_below_another_before_what_the_store_is_told(url: str, folder: str) -> None:
    assert below(url, "x") == folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"endpoint": "s3.amazonaws.com"}, ""),
        (
            {"endpoint": "s3.eu-central-1.amazonaws.com"},
            "?endpoint_override=s3.eu-central-1.amazonaws.com&scheme=https&region=eu-central-1",
        ),
        (
            {"endpoint": "https://bucket.vpce-1a-2b.s3.us-west-2.vpce.amazonaws.com/"},
            "?endpoint_override=bucket.vpce-1a-2b.s3.us-west-2.vpce.amazonaws.com&scheme=https&region=us-west-2",
        ),
        (
            {"endpoint": "s3.dualstack.us-east-2.amazonaws.com", "endpoint.region": "eu-west-1"},
            "?endpoint_override=s3.dualstack.us-east-2.amazonaws.com&scheme=https&region=eu-west-1",
        ),
        ({"endpoint": "http://127.0.0.1:9000/"}, "?endpoint_override=127.0.0.1%3A9000&scheme=http"),
        ({"endpoint": "minio", "connection.ssl.enabled": "false"}, "?endpoint_override=minio&scheme=http"),
        ({"endpoint": "minio", "connection.ssl.enabled": "true"}, "?endpoint_override=minio&scheme=https"),
        ({"endpoint.region": "eu-west-1", "access.key": "AK", "secret.key": "SK"}, "?region=eu-west-1"),
        ({"endpoint": "http://one", "bucket.b.endpoint": "https://two"}, "?endpoint_override=two&scheme=https"),
        ({"bucket.other.endpoint": "https://two"}, ""),
    ],
)
def test_s3_is_where_hadoop_says(settings: dict[str, str], said: str) -> None:
    hadoop = {f"fs.s3a.{name}": value for name, value in settings.items()}
    url = with_settings("s3a://b/check/_penstock", hadoop.get)
    assert url == f"s3a://b/check/_penstock{said}"
    if said:  # else pyarrow asks Amazon where the bucket is
        assert open_storage(url)._path("a") == "b/check/_penstock/a"  # type: ignore[attr-defined]
    assert with_settings("file:/b", hadoop.get) == "file:/b" and with_settings("/b", hadoop.get) == "/b"
    given = "s3://b/x?region=us-east-1"
    assert with_settings(given, hadoop.get) == given


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("relative/path", "absolute path"),
        ("file:x", "absolute path"),
        ("ftp://host/x", "no store 'ftp' here, only file, abfs"),
        ("dbfs:/mnt/x", "under dbfs:/Volumes"),
        ("s3://", "names no folder"),
        ("file://tmp/check", "names a host, .* is written file:///tmp/check, with three slashes"),
        ("/tmp/\udcff", "bytes that are no text"),
        ("/tmp/a\0b", "a null"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        open_storage(url)
    assert repr(url) in str(refused.value)


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("s3://KEY:SECRET@bucket/x", "s3://...@bucket/x"),
        ("s3a://KEY@bucket/a@b", "s3a://...@bucket/a@b"),
        ("s3://KEY:SEC%2FRET@bucket/x?region=eu-west-1", "s3://...@bucket/x?region=eu-west-1"),
        ("s3://KEY:SEC/RET@bucket/x", "s3://...@bucket/x"),
        ("s3://KEY:SEC?RET@bucket/x", "s3://...@bucket/x"),
        # No ports: those are of hosts, not of buckets.
        ("s3://KEY:/SECRET@bucket/x", "s3://...@bucket/x"),
        ("S3A://KEY:12/SECRET@bucket/x", "S3A://...@bucket/x"),
        ("s3n://KEY:12/SECRET@bucket/x", "s3n://...@bucket/x"),
        ("gs://KEY:/SECRET@bucket/x", "gs://...@bucket/x"),
        ("ftp://host:/a@b", "ftp://host:/a@b"),
        ("ftp://me:SECRET@host/x", "ftp://...@host/x"),
        ("abfss://box:SECRET@account.net/x?client_secret=S&sig=T&tenant_id=1", None),
        ("abfss://box@account.net/x", "abfss://box@account.net/x"),
        ("hdfs://me@host:9000/a@b", "hdfs://me@host:9000/a@b"),
        ("hdfs://host:9000/a@b", "hdfs://host:9000/a@b"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("file:///tmp/a@b?key=c", "file:///tmp/a@b?key=c"),
        ("file:/me@corp/home", "file:/me@corp/home"),
        ("/tmp/a:b@c?key=d", "/tmp/a:b@c?key=d"),
    ],
)
def test_a_url_is_shown_without_what_lets_somebody_in(url: str, seen: str | None) -> None:
    seen = seen or "abfss://box:...@account.net/x?client_secret=...&sig=...&tenant_id=1"
    assert _storage.shown(url) == seen
    assert _storage.shown(url, f"no such thing: {url!r}, at all") == f"no such thing: {seen!r}, at all"
    if "SEC?" not in url:
        assert _storage.shown(below(url, "more")) == below(seen, "more")


def test_a_folder_is_the_same_whoever_opens_it() -> None:
    place = _storage.place
    assert place("s3://ONE:SECRET@bucket/x") == place("s3a://OTHER:WORD@bucket/x/") == place("s3://bucket/x")
    assert place("abfs://box:SECRET@host/x") == place("abfs://box@host/x") != place("abfs://other@host/x")
    assert place("/tmp/...@x") != place("/tmp/x")
    assert place("file:/me@corp/x") == place("FILE:///me@corp/x") == "/me@corp/x"


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SECRET@",
        "s3://KEY:SEC/RET@bucket/x",
        "ftp://KEY:SECRET@host/x",
        # Slips, and what is pasted.
        " s3://KEY:SECRET@bucket/x",
        '"s3://KEY:SECRET@bucket/x"',
        "s3//KEY:SECRET@bucket/x",
        "file://KEY:SECRET@bucket/x",
        "https://account.blob.core.windows.net/c/x?sv=1&sig=SECRET/_penstock",
        "wasbs://c@a/x?sas_token=SECRET",
    ],
)
def test_a_store_that_cannot_be_opened_is_told_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\.\.\.") as refused:
        open_storage(url)
    told = "".join(traceback.format_exception(refused.value))
    assert "KEY" not in told and "SEC" not in told and "RET" not in told


@pytest.mark.parametrize(
    "ask",
    [
        lambda storage: storage.list(),
        lambda storage: storage.read("a"),
        lambda storage: storage.read("a", 0, 1),
        lambda storage: storage.write("a", [b"x"]),
        lambda storage: storage.create("a", b"x"),
        lambda storage: storage.delete(["a"]),
    ],
    ids=["list", "read", "part", "write", "create", "delete"],
)
def test_what_an_object_store_raises_has_no_credentials(ask: Callable[[Any], Any]) -> None:
    """Azure's names what it was asked with, escaped its own way, also where that is not of the URL."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            def broken(*args: Any, **named: Any) -> Any:
                try:
                    raise OSError(13, "at WORD=")
                except OSError:
                    text = "GET https://a.net/box/x?sv=1&sig=WORD%3D&se=2 403, by https://a.net/?sig=OTHER'"
                    raise OSError(text)  # noqa: B904

            return broken

    storage = _storage._Objects("abfss://box@a.net/x?sas=1&sig=WORD=", cast(Any, Broken()), "box/x")
    with pytest.raises(OSError, match="403") as raised:
        ask(storage)
    assert str(raised.value) == "GET https://a.net/box/x?sv=1&sig=...&se=2 403, by https://a.net/?sig=...'"
    told = "".join(traceback.format_exception(raised.value))
    assert "at WORD" not in told.replace('OSError(13, "at WORD=")', "")


def test_a_url_opens_what_it_names_with_what_it_carries() -> None:
    storage = open_storage("s3://KEY:SECRET@bucket/x?region=eu-west-1")
    assert storage.url == "s3://KEY:SECRET@bucket/x?region=eu-west-1"
    assert pickle.loads(pickle.dumps(storage)).url == storage.url
    assert storage._system.equals(S3FileSystem(access_key="KEY", secret_key="SECRET", region="eu-west-1"))  # type: ignore[attr-defined]
    # Settings of a bucket are found by its name.
    found = with_settings("s3a://KEY:SECRET@bucket/x", {"fs.s3a.bucket.bucket.endpoint.region": "eu-west-1"}.get)
    assert found == "s3a://KEY:SECRET@bucket/x?region=eu-west-1"


def test_examples_run() -> None:
    assert doctest.testmod(_storage).failed == 0
