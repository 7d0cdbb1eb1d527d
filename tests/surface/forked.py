"""Running a piece of a test in a forked child."""

from __future__ import annotations

import os
from typing import Any


def in_child(work: Any) -> None:
    """Runs `work` in a forked child and fails with what it raised there."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
            os.write(writer, b"ok")
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        outcome = pipe.read().decode()
    os.waitpid(child, 0)
    assert outcome == "ok", outcome
