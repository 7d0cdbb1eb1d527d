"""Functions of the user on their way to Spark's Python workers and there.

Owns: the two ways in which that fails, in words (``what`` names the function in them: "the function of ordered"), and
which source files functions are taken from that travel by name.
"""

from __future__ import annotations

import hashlib
import os
import pickletools
import site
import sys
import sysconfig
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

from penstock.errors import ConfigError

__all__ = ["dump", "load", "load_at_member", "sources"]

#: Where Python's library, installed packages and this package are. Not all that `sysconfig` names: its scripts, headers
#: and data are below the prefix of Python, where programs of users may be, too.
_FOLDERS = {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    os.path.dirname(str(sys.modules[__name__.partition(".")[0]].__file__)),
}


def dump(value: Any, what: str) -> bytes:
    """Pickle functions, those of ``__main__`` and lambdas by value.

    Raises
    ------
    ConfigError
        When they refer to something that does not pickle.
    """
    from penstock import _pickles

    try:
        return _pickles.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to Spark's Python workers: {error}; make what it refers to inside it, where it runs"
        ) from error


def load(pickled: bytes, what: str, when: str = "") -> Any:
    """Restore what `dump` pickled, in a Python worker; `when` is until when files can be shipped to it.

    Raises
    ------
    ConfigError
        When it comes from a module that the worker cannot import.
    """
    import cloudpickle

    try:
        return cloudpickle.loads(pickled)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} comes from the module {error.name!r}, which Spark's Python workers cannot import; ship it with"
            f" spark.sparkContext.addPyFile{when}, install it on the executors, or call"
            f" cloudpickle.register_pickle_by_value({error.name}) before"
        ) from error


def load_at_member(pickled: bytes) -> Any:
    """Restore the functions of a flow in a resident process, which finds no files that are shipped once it runs.

    The native member calls it. Raises what `load` raises.
    """
    return load(pickled, "a function of the flow", " before the engine starts")


def sources(pickled: bytes) -> dict[str, str]:
    """Marks of the source files of the user's modules that pickled functions need, by module.

    What is pickled by name is what the worker has imported, however the file has changed since: equal bytes may
    then be another function. The modules are those that the bytes name and those whose functions and classes they use;
    not the standard library nor installed packages.
    """
    marks: dict[str, str] = {}
    waiting = [sys.modules[name] for name in set(_words(pickled)) if name in sys.modules]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        path = getattr(module, "__file__", None)
        if id(module) in seen or not isinstance(module, ModuleType) or module is sys.modules.get("__main__"):
            continue
        seen.add(id(module))
        if not _is_users(path):
            continue
        try:
            with open(path, "rb") as file:
                marks[module.__name__] = hashlib.sha256(file.read()).hexdigest()
        except OSError:
            continue  # in an archive, say: it does not change under us
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType):
                waiting.append(value)
            elif isinstance(value, (type, FunctionType)) and value.__module__ in sys.modules:
                waiting.append(sys.modules[value.__module__])
    return marks


def _words(pickled: bytes) -> Iterator[str]:
    """The texts in pickled bytes that may name a module; not those that say what a value is of."""
    memo: dict[int, str | None] = {}
    before: str | None = None
    last: str | None = None
    for opcode, value, _ in pickletools.genops(pickled):
        if opcode.name == "MEMOIZE":
            memo[len(memo)] = last
            continue
        if opcode.name in ("FRAME", "PROTO"):
            continue
        before, last = last, None
        if opcode.name in ("BINGET", "LONG_BINGET"):
            last = memo.get(int(value or 0))
        elif isinstance(value, str):
            last = value
        if last is not None and before not in ("__module__", "__name__", "__package__"):
            yield last
            parent = last.rpartition(".")[0]
            if parent:
                yield parent


def _is_users(path: Any) -> TypeGuard[str]:
    """Whether a file is part of a program, not of Python, of an installed package or of this one."""
    if not isinstance(path, str) or not path.endswith(".py"):
        return False
    return not any(path.startswith(folder + os.sep) for folder in _FOLDERS)
