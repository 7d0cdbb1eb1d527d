"""How much memory a member may use for rows that wait, and where the rest goes.

Owns: the limits that hold for a Python worker of an executor, the default of
``staging_memory`` as a share of them, and the local directories of the executor.

Design: the least limit counts. A worker beside a JVM has what its container leaves: the overhead that Spark asks for
(`spark.executor.memoryOverhead`), or the container's limit without the heap.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock._sizes import parse_bytes
from penstock.errors import ConfigError

__all__ = ["Hints", "limit_bytes", "local_folders", "staging_bytes"]

_MIB = 1 << 20
#: The default of ``staging_memory`` is this share of the limit, within bounds.
_SHARE, _LEAST, _MOST = 8, 16 * _MIB, 1024 * _MIB
#: What Spark adds to an executor's memory where nothing is said.
_OVERHEAD_FACTOR, _OVERHEAD_LEAST = 0.1, 384 * _MIB


@dataclass(frozen=True)
class Hints:
    """What the driver knows of an executor's memory.

    Attributes
    ----------
    heap : int
        Bytes that its JVM may take.
    overhead : int or None
        Bytes beside the JVM in its container; None where there is no container.
    folders : tuple of str
        ``spark.local.dir`` as the driver knows it.
    """

    heap: int = 1024 * _MIB
    overhead: int | None = None
    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, setting: Callable[[str], str | None], master: str) -> Hints:
        """Read Spark's settings.

        Examples
        --------
        >>> conf = {"spark.executor.memory": "8g"}
        >>> Hints.of(conf.get, "yarn").overhead == int(0.1 * (8 << 30))
        True
        """
        local = master.partition("[")[0] == "local"
        heap = _size(setting("spark.driver.memory" if local else "spark.executor.memory"), 1024 * _MIB)
        folders = tuple(part for part in (setting("spark.local.dir") or "").split(",") if part)
        if not master.startswith(("yarn", "k8s")):
            return cls(heap, None, folders)
        factor = setting("spark.executor.memoryOverheadFactor") or setting("spark.kubernetes.memoryOverheadFactor")
        try:
            share = float(factor) if factor else _OVERHEAD_FACTOR
        except ValueError:
            share = _OVERHEAD_FACTOR
        implied = max(int(share * heap), _size(setting("spark.executor.minMemoryOverhead"), _OVERHEAD_LEAST))
        return cls(heap, _size(setting("spark.executor.memoryOverhead"), implied), folders)


def _size(text: str | None, default: int) -> int:
    """A size in Spark's settings, where a bare number counts MiB."""
    if text is None:
        return default
    try:
        return parse_bytes(text, "", _MIB)
    except ConfigError:
        return default


def limit_bytes(hints: Hints) -> tuple[int, str]:
    """The least limit on this process, and what sets it."""
    found = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, "half of the machine's memory")]
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            found.append((soft, "spark.executor.pyspark.memory"))
    except (ImportError, OSError, ValueError):
        pass
    if hints.overhead is not None:
        found.append((hints.overhead, "spark.executor.memoryOverhead"))
    group = _group_limit()
    if group is not None:
        # Where the heap takes all of it, it is not in this container, or the settings are wrong: be careful.
        found.append((group - hints.heap if group > hints.heap else group // 4, "the container's memory limit"))
    return min(found)


def _group_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The memory limit of this process's control group, either version; None where there is none."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    files = [root / "memory" / "memory.limit_in_bytes", root / "memory.max"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.strip("/")
        if not controllers:
            parts = Path(inside).parts
            files += [root.joinpath(*parts[:depth], "memory.max") for depth in range(1, len(parts) + 1)]
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / inside / "memory.limit_in_bytes")
    limits = []
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        # Version 1 says "no limit" with a number near 2**63.
        if text.isdigit() and int(text) < 1 << 60:
            limits.append(int(text))
    return min(limits, default=None)


def staging_bytes(hints: Hints) -> int:
    """The default of ``staging_memory``: an eighth of the limit, from 16 MiB to 1 GiB.

    Examples
    --------
    >>> staging_bytes(Hints(overhead=512 << 20)) <= 64 << 20
    True
    """
    limit, _ = limit_bytes(hints)
    return max(_LEAST, min(_MOST, limit // _SHARE))


def local_folders(hints: Hints, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The local directories of this executor.

    Spark tells its Python workers where its own blocks are. Else what its cluster manager or the setting says, and the
    system's temporary directory at last.

    Examples
    --------
    >>> local_folders(Hints(folders=("/a",)), {"SPARK_LOCAL_DIRS": "/disk1,/disk2"})
    ['/disk1', '/disk2']
    >>> local_folders(Hints(folders=("/a",)), {})
    ['/a']
    """
    for name in ("SPARK_LOCAL_DIRS", "SPARK_EXECUTOR_DIRS", "LOCAL_DIRS"):
        value = environment.get(name, "")
        separator = os.pathsep if name == "SPARK_EXECUTOR_DIRS" else ","
        folders = [part.strip() for part in value.split(separator) if part.strip()]
        if folders:
            return folders
    return list(hints.folders) or [tempfile.gettempdir()]
