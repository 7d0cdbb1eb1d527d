"""The port at which an engine tells its figures.

Owns: the listener, its thread, and the connections that ask. Anybody who reaches the port may read: it tells names of
queries and how much passes, never rows, so it is off unless asked for, and best bound to a loopback or pod address.

Invariants: no connection takes more than `_PATIENCE_S`, and there are `_MOST` at most; a further one ends the oldest.
Nothing here is waited for by anybody else. After `close` nothing listens. A page that cannot be made is status 500, and
told.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from penstock.errors import ConfigError
from penstock.spark._engine.metrics import CONTENT_TYPE

__all__ = ["Scrape", "parse_address"]

log = logging.getLogger(__name__)

#: Seconds that one connection has.
_PATIENCE_S = 5.0
#: Connections at once: a scraper has one.
_MOST = 16
#: Seconds between two looks for a connection where there is no room for one, as where no file may be opened any more.
_PAUSE_S = 0.1
#: Seconds between two times that a page which cannot be made is told.
_AGAIN_S = 60.0
_PLAIN = "text/plain; charset=utf-8"


def parse_address(given: object) -> tuple[str, int]:
    """Host and port of ``metrics=``.

    Raises
    ------
    ConfigError
        For anything but "host:port".

    Examples
    --------
    >>> parse_address("127.0.0.1:9464"), parse_address("[::1]:0")
    (('127.0.0.1', 9464), ('::1', 0))
    """
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    plain = host and (bracketed or ":" not in host) and not any(one.isspace() for one in host)
    if not plain or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ConfigError(f'metrics={given!r} must be "host:port", such as "127.0.0.1:9464"; port 0 takes any')
    return host, int(port)


class Scrape:
    """A listener that answers ``GET /metrics``.

    Parameters
    ----------
    host, port : str, int
        Where; port 0 takes any.
    name : str
        Names the thread.
    text : callable
        Makes the page; called in a thread of each connection.

    Raises
    ------
    ConfigError
        When it cannot listen there.
    """

    def __init__(self, host: str, port: int, name: str, text: Callable[[], str]) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self._server = _Server(found[0][0], found[0][4][:2], text)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"metrics: cannot listen at {host}:{port}: {error}; name an address of this host and a free port, or 0"
                " for any"
            ) from error
        bound = self._server.server_address[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        self._thread = threading.Thread(target=self._run, name=f"penstock-metrics-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the listener, its thread and all connections."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut(0.0)
        self._thread.join(5)

    def _run(self) -> None:
        self._server.serve_forever(0.1)


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    request_queue_size = _MOST
    #: A port that another program serves is not to be shared with it; one that has just been closed is free.
    allow_reuse_address = True

    def __init__(self, family: Any, address: Any, text: Callable[[], str]) -> None:
        self.address_family = family
        self.text = text
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}
        self._told: float | None = None
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Without the base's look-up of this host's name, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            # What says nothing is the oldest, since a scraper's is over within milliseconds.
            oldest = next(iter(self._since)) if len(self._since) >= _MOST else None
            if oldest is not None:
                del self._since[oldest]
            self._since[request] = time.monotonic()
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return True

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)  # it is asked again at once
            raise

    def page(self) -> tuple[int, str, bytes]:
        """Status, type and text of the answer."""
        try:
            return 200, CONTENT_TYPE, self.text().encode()
        except Exception as error:
            now = time.monotonic()
            with self._lock:
                tells = self._told is None or now - self._told >= _AGAIN_S
                self._told = now if tells else self._told
            if tells:
                log.exception("the page of metrics cannot be made")
            return 500, _PLAIN, f"the figures cannot be told: {type(error).__name__}, see the log\n".encode()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.cut(_PATIENCE_S)

    def cut(self, patience: float) -> None:
        """End connections that are older, in seconds."""
        with self._lock:
            old = [one for one, since in self._since.items() if time.monotonic() - since >= patience]
        for one in old:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape from %s broke off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    server_version, sys_version = "penstock", ""
    server: _Server

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        if self.path.partition("?")[0] != "/metrics":
            status, kind, body = 404, _PLAIN, b"only /metrics is here\n"
        else:
            status, kind, body = self.server.page()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.address_string(), *args)
