"""One copy of a file per host, however many executors Spark has there.

Spark brings a file to every executor. The first to ask for it here leaves a symbolic link to its own copy at a
meeting place of the host, named by the digest of the content; every later one replaces its own copy by a hard link to
that file. So all tasks of a host map the same pages, and the disk holds them once.

Invariants: what is met is never trusted by its name: the caller opens it (checksum, structure) before it is taken. A
file comes to its place by one atomic step, link or rename. A meeting place belongs to this user alone. Nothing is
kept alive there: the file is gone with the last executor that has it, and a link that leads nowhere is removed by
whoever comes next.

Departure: one copy per host, where Spark leaves one per executor.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from penstock.errors import StorageError

__all__ = ["meeting_place", "opened"]

T = TypeVar("T")

#: Folders that Spark makes for one executor or application; what lies above them is the host's.
_OF_SPARK = re.compile(r"(spark|executor|blockmgr|userFiles)-.*|[0-9a-f]{2}")


def meeting_place(folder: str) -> Path | None:
    """Tell the folder where executors of this host meet, given one of Spark's local directories; make it when needed.

    Returns
    -------
    Path or None
        None where there can be none: not writable, or not this user's alone.
    """
    root = Path(folder)
    while _OF_SPARK.fullmatch(root.name):
        root = root.parent
    user = os.getuid()
    for base in dict.fromkeys([root, Path(tempfile.gettempdir())]):
        place = base / f"penstock-graphs-{user}"
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
            found = place.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077:
                return place
    return None


def opened(own: Path, digest: str, place: Path | None, open: Callable[[Path], T]) -> T:
    """Open the host's copy of a file.

    Parameters
    ----------
    own : Path
        This executor's copy, whole. It becomes a link to the host's copy where there is one.
    digest : str
        Of the content.
    place : Path, optional
        Where executors meet; None: this executor's copy is opened.
    open : callable
        Opens and validates a file; raises `StorageError` or `OSError` for a damaged one.
    """
    if place is None:
        return open(own)
    meeting = place / f"{digest}.graph"
    try:
        for _ in range(8):
            try:
                meeting.symlink_to(own)
                _sweep(place)
                return open(own)
            except FileExistsError:
                pass
            target = Path(os.readlink(meeting))
            if target == own:
                return open(own)
            try:
                shared = _taken(target, own, open)
            except (StorageError, FileNotFoundError):
                # Damaged, or its executor is gone: this copy is the host's from here on, unless another one is by now.
                with _alone(place):
                    if Path(os.readlink(meeting)) == target:
                        _replace(meeting, lambda name: name.symlink_to(own))
                continue
            return shared
    except OSError:
        pass  # no links here, or another file system: its own copy serves
    return open(own)


def _taken(target: Path, own: Path, open: Callable[[Path], T]) -> T:
    """Make `own` a link to the other executor's file, once that has proved to be what it says."""
    found, mine = target.lstat(), own.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size != mine.st_size:
        raise StorageError(f"{target} is not what its name says")
    if os.path.samestat(found, mine):
        return open(own)
    shared = open(target)
    _replace(own, lambda name: os.link(target, name))
    return shared


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """While nobody else of this host puts a link in the place of another one."""
    import fcntl  # not everywhere, nor are meeting places

    handle = os.open(place / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put what `make` makes under another name in the place of `path`, in one step."""
    name = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        name.unlink()
    try:
        make(name)
        name.replace(path)
    finally:
        # Renaming a link to the file that is there already does nothing.
        with contextlib.suppress(FileNotFoundError):
            name.unlink()


def _sweep(place: Path) -> None:
    """Remove links that lead nowhere: their executors have ended."""
    for link in place.glob("*.graph"):
        with contextlib.suppress(OSError):
            if link.is_symlink() and not link.exists():
                link.unlink()
