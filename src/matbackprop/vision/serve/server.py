"""The web server of the page: uvicorn with limits on connections, request sizes and files."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from matbackprop.errors import ConfigurationError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_REQUEST = 200 << 20
"""Bytes of one request with all its files."""
MAX_KEPT = 1 << 30
"""Bytes of all files of the page, including those that are being received."""
AGE = 600
"""Seconds after which files are removed."""
MAX_SECONDS = 120.0
"""Seconds for sending a request and processing it."""
HEADER_SECONDS = 10.0
"""Seconds for sending the headers of a request."""
MAX_CONNECTIONS = 256
"""Open connections; beyond this, the one that has waited longest for its headers is closed."""
_TOO_LARGE = f"A request has at most {MAX_REQUEST >> 20} MB."
FULL = "The page holds too many files. Try again in ten minutes."

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _Refused(Exception):
    """Status and text of an answer."""


class Limits:
    """ASGI middleware: checks Host and Origin, and limits the size and the time of requests.

    Args:
        app: the application.
        folder: its files, which together with the requests being received have at most :data:`MAX_KEPT` bytes.
        hosts: accepted host names; empty accepts all.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], folder: Path, hosts: tuple[str, ...] = LOOPBACK) -> None:
        self.app, self.folder, self.hosts = app, folder, hosts
        self.receiving = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        received, started, refused = 0, False, None

        async def counted_receive() -> Message:
            nonlocal received, refused
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            self.receiving += size
            if received > MAX_REQUEST:
                refused = _Refused(413, _TOO_LARGE)
            elif self.receiving + kept > MAX_KEPT:
                refused = _Refused(507, FULL)
            return message if refused is None else {"type": "http.disconnect"}

        async def watched_send(message: Message) -> None:
            nonlocal started
            if refused is None:
                started = True
                await send(message)

        try:
            self._check_headers(scope)
            if scope["method"] in ("GET", "HEAD"):  # streams of events take long
                await self.app(scope, receive, watched_send)
                return
            kept = await asyncio.to_thread(remove_old, self.folder)
            async with asyncio.timeout(MAX_SECONDS):
                await self.app(scope, counted_receive, watched_send)
        except _Refused as error:
            refused = error
        except TimeoutError:
            refused = _Refused(408, f"A request takes at most {MAX_SECONDS:g} seconds.")
        except Exception:  # Gradio logs its errors; visitors get no details
            refused = refused or _Refused(500, "The server failed.")
        finally:
            self.receiving -= received
            if refused is not None and not started:
                await _answer(send, *refused.args)

    def _check_headers(self, scope: Message) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", [])}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if scope["type"] != "http" or (self.hosts and urlsplit(f"//{host}").hostname not in self.hosts):
            raise _Refused(403, "This address is not served.")
        if origin is not None and urlsplit(origin).netloc != host:
            raise _Refused(403, "Requests from other sites are refused.")
        if int(headers.get(b"content-length", "0")) > MAX_REQUEST:
            raise _Refused(413, _TOO_LARGE)


async def _answer(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def remove_old(folder: Path) -> int:
    """Remove files and folders older than :data:`AGE`, except ``samples``; return the bytes of the others."""
    kept, now = 0, time.time()
    for entry in os.scandir(folder):
        if entry.name == "samples":
            continue
        try:
            paths = [os.path.join(place, name) for place, _, names in os.walk(entry) for name in names] or [entry.path]
            files = [os.lstat(path) for path in paths]
            if now - max(file.st_mtime for file in files) > AGE:
                shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
            else:
                kept += sum(file.st_size for file in files)
        except OSError:  # removed meanwhile
            continue
    return kept


class _Connection(H11Protocol):
    """A connection that is closed if headers take longer than :data:`HEADER_SECONDS`."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_SECONDS, transport.abort)
        waiting = [c for c in self.connections if isinstance(c, _Connection) and c._deadline is not None]
        if len(self.connections) > MAX_CONNECTIONS and waiting:
            oldest = min(waiting, key=lambda c: c._deadline.when() if c._deadline else 0.0)
            self.connections.discard(oldest)
            oldest._stop_waiting()
            oldest.transport.abort()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        complete = self.cycle is not None and not self.cycle.response_complete
        if complete:
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)


def listen(host: str, port: int) -> socket.socket:
    """Open the socket of the page, so that its address is known before anything is loaded.

    Raises:
        ConfigurationError: the port is in use, or the host is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"The page cannot listen on {host}, port {port}: {reason}. Choose another --host or --port (0: any)."
        ) from error


class Server:
    """Serves an application in a thread.

    Args:
        app: an ASGI application.
        sock: the listening socket.
        folder: the files of the page, of which old ones are removed every minute.
        hosts: accepted host names; empty accepts all.
    """

    def __init__(self, app: Any, sock: socket.socket, folder: Path, hosts: tuple[str, ...] = LOOPBACK) -> None:
        self.folder = folder
        config = uvicorn.Config(
            Limits(app, folder, hosts), http=_Connection, ws="none", backlog=64, log_level="error", access_log=False,
            server_header=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]}, daemon=True)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start and wait until requests are answered."""
        self._thread.start()
        threading.Thread(target=self._clean, daemon=True).start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.05)

    def _clean(self) -> None:
        while not self._stopped.wait(min(60, AGE / 4)):
            remove_old(self.folder)

    def wait(self) -> None:
        """Block until the server ends."""
        self._thread.join()

    def close(self) -> None:
        """Stop the server."""
        self._stopped.set()
        self._server.should_exit = True
        self._thread.join(10)
