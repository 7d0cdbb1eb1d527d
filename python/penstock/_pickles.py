"""Functions of users as bytes, with the names of their files: cloudpickle leaves those out from 3.1.3 on."""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

__all__ = ["Pickler", "dumps"]

#: What cloudpickle writes in place of a file.
_NO_FILE = "<dynamic-code>"


def _code(code: CodeType) -> Any:
    make, arguments, *rest = cloudpickle.Pickler.dispatch_table[CodeType](code)
    named = (code.co_filename if type(one) is str and one == _NO_FILE else one for one in arguments)
    return (make, tuple(named), *rest)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """See `dumps`."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: Any, protocol: int | None = None) -> bytes:
    """Pickle by value what cannot be imported elsewhere, as cloudpickle does; raises what that raises.

    Examples
    --------
    >>> import pickle
    >>> pickle.loads(dumps(lambda x: x + 1))(1)
    2
    """
    with io.BytesIO() as file:
        Pickler(file, protocol).dump(value)
        return file.getvalue()
