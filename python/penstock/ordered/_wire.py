"""Messages between this process and a worker process.

A message is a pickle (protocol 5) over a stream socket. What is large leaves the pickle and goes through shared memory:
record batches as an Arrow stream (but for types that not every process has), and every other buffer that knows how to
(numpy arrays). The memory is an anonymous file whose descriptor travels with the message; the receiver maps it
privately and reads in place, without a copy. What was received holds memory, and no descriptor: results that are kept
may be many more than files that may be open. Where no file may be opened for it, what is large goes along over the
socket.

Invariant: a message that cannot be had for want of a descriptor is read to its end, so that the next one can be.

Trust: both ends of the socket belong to one user, who started the other one and whose functions run there.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import errno
import io
import itertools
import mmap
import os
import pickle
import socket
import struct
import sys
import weakref
from collections.abc import Mapping
from typing import Any

__all__ = ["Ended", "NoFile", "dumps", "loads", "receive", "send"]

#: Length of the pickle, number of buffers, bytes of shared memory: 0 where they follow the pickle.
_HEAD = struct.Struct("<QIQ")
_PLACE = struct.Struct("<QQ")
#: From how many bytes on a buffer goes through shared memory.
LARGE = 32 << 10
#: From how many bytes on the pickle itself does.
BODY = 256 << 10

#: A process has only so many mappings (65,530 on most hosts), and others need some: from this many on they are copied.
_MOST_MAPPED = 16_384
#: Numbers of the mappings that are held.
_held: set[int] = set()
_serials = itertools.count()

_memfd = getattr(os, "memfd_create", None)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Ended(ConnectionError):
    """The other side is gone."""


class NoFile(OSError):
    """A message cannot be had, since no more files may be open here."""


def _load_batch(body: Any) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()


def _has_own_type(kind: Any, arrow: Any) -> bool:
    """Whether there is a type in it that somebody has registered in this process, and maybe in no other."""
    if isinstance(kind, arrow.BaseExtensionType):
        return not kind.extension_name.startswith("arrow.") or _has_own_type(kind.storage_type, arrow)
    if isinstance(kind, arrow.DictionaryType):
        return _has_own_type(kind.value_type, arrow)
    return any(_has_own_type(kind.field(place).type, arrow) for place in range(kind.num_fields))


def _reduce_batch(batch: Any) -> Any:
    import pyarrow as pa

    if any(_has_own_type(kind, pa) for kind in batch.schema.types):
        # A stream of Arrow has only the name of such a type; pickled, a slice has the buffers of the whole.
        if batch.get_total_buffer_size() > 2 * batch.nbytes + 4_096:
            with contextlib.suppress(pa.ArrowException):
                batch = batch.take(pa.array(range(batch.num_rows), pa.int64()))
        return batch.__reduce__()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return (_load_batch, (pickle.PickleBuffer(sink.getvalue()),))


def dumps(value: Any, buffers: list[Any] | None = None, known: Mapping[type, str] | None = None) -> bytes:
    """Pickle a value; functions of ``__main__`` by value, and classes that are not among those `known` over there.

    Large buffers go to `buffers`, if given.
    """

    def aside(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # not in one piece: it stays
        if buffers is None or raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    out = io.BytesIO()
    pickler = pickle.Pickler(out, 5, buffer_callback=aside)
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        # It stands in place of that of all.
        pickler.dispatch_table = copyreg.dispatch_table | {arrow.RecordBatch: _reduce_batch}
    body = b""
    with contextlib.suppress(Exception):
        pickler.dump(value)
        body = out.getvalue()
    if body and b"__main__" not in body:  # by name, which the other side does not know
        return body
    from penstock.ordered import _dynamic

    if buffers is not None:
        buffers.clear()
    return _dynamic.dumps(value, known or {})


def loads(body: Any, buffers: list[Any] | None = None) -> Any:
    """What `dumps` pickled."""
    return pickle.loads(body, buffers=buffers or ())


def send(sock: socket.socket, body: bytes, buffers: list[Any]) -> None:
    """Send a message that `dumps` made."""
    handle = _memory() if buffers or len(body) >= BODY else None
    if handle is None:
        places = b"".join(_PLACE.pack(0, buffer.nbytes) for buffer in buffers)
        sock.sendall(_HEAD.pack(len(body), len(buffers), 0) + places + body)
        for buffer in buffers:
            sock.sendall(memoryview(buffer).cast("B"))
        return
    try:
        _send_in_memory(sock, body, buffers, handle)
    finally:
        os.close(handle)


def _memory() -> int | None:
    """A file for what is large; None where there is no such thing, or no more files may be open: then it goes along."""
    if _memfd is None:
        return None
    try:
        return int(_memfd("penstock-ordered", getattr(os, "MFD_CLOEXEC", 1)))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _send_in_memory(sock: socket.socket, body: bytes, buffers: list[Any], handle: int) -> None:
    places, size = [], 0
    parts = [*buffers, body] if len(body) >= BODY else list(buffers)
    for part in parts:
        length = len(part) if isinstance(part, bytes) else part.nbytes
        places.append((size, length))
        size += (length + 63) & ~63
    os.ftruncate(handle, size)
    for part, (offset, _) in zip(parts, places, strict=True):
        view = memoryview(part).cast("B") if not isinstance(part, bytes) else memoryview(part)
        while view:
            done = os.pwrite(handle, view, offset)
            view, offset = view[done:], offset + done
    in_memory = len(body) >= BODY
    head = _HEAD.pack(0 if in_memory else len(body), len(places), size)
    # The descriptor goes with the first byte.
    sent = socket.send_fds(sock, [head], [handle])
    rest = head[sent:] + b"".join(_PLACE.pack(*place) for place in places) + (b"" if in_memory else body)
    sock.sendall(rest)


def _mapped(handle: int, size: int) -> memoryview:
    """The memory behind a descriptor until the last view of it is gone. `mmap.mmap` would hold a descriptor as long.

    A copy of it, where there are many such views or no more can be had.
    """
    if len(_held) >= _MOST_MAPPED:
        return _copied(handle, size)
    # Private, so that an array made of it can be written to, as one that was pickled.
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, handle, 0)
    if address == ctypes.c_void_p(-1).value:
        return _copied(handle, size)
    memory = (ctypes.c_char * size).from_address(address)
    serial = next(_serials)
    _held.add(serial)
    # Not at the end of the interpreter, when others may read it yet.
    weakref.finalize(memory, _unmap, address, size, serial).atexit = False
    return memoryview(memory).cast("B")


def _unmap(address: int, size: int, serial: int) -> None:
    _libc.munmap(address, size)
    _held.discard(serial)


def _copied(handle: int, size: int) -> memoryview:
    view, at = memoryview(bytearray(size)), 0
    while at < size:
        got = os.preadv(handle, [view[at:]], at)
        if not got:
            raise Ended(f"shared memory ends after {at} of {size} bytes")
        at += got
    return view


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise Ended("the other process is gone")
        view = view[got:]
    return data


def receive(sock: socket.socket) -> tuple[Any, list[Any]]:
    """The next message: a pickle and its buffers, for `loads`.

    Raises
    ------
    Ended
        At the end of the socket.
    TimeoutError
        When the socket has a timeout and nothing came.
    NoFile
        When its shared memory cannot be had. The next message can be.
    """
    handle = -1
    try:
        if _memfd is None:
            head = bytes(_exactly(sock, _HEAD.size))
        else:
            head, handles, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
            handle = handles[0] if handles else -1
            if not head:
                raise Ended("the other process is gone")
            if len(head) < _HEAD.size:
                head += bytes(_exactly(sock, _HEAD.size - len(head)))
        length, count, size = _HEAD.unpack(head)
        if not count:
            return _exactly(sock, length), []
        places = list(_PLACE.iter_unpack(_exactly(sock, count * _PLACE.size)))
        body = _exactly(sock, length)
        if not size:
            return body, [memoryview(_exactly(sock, bytes_)) for _, bytes_ in places]
        if handle < 0:  # the system had none to give, and let it go
            raise NoFile(
                errno.EMFILE, "no file may be opened for a large message; raise the limit, or keep fewer files open"
            )
        memory = _mapped(handle, size)
        parts = [memory[offset : offset + bytes_] for offset, bytes_ in places]
        return (body if length else parts.pop()), parts
    except ConnectionError as error:
        raise error if isinstance(error, Ended) else Ended(str(error)) from error
    finally:
        if handle >= 0:
            os.close(handle)
