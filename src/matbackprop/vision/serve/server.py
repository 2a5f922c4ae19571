"""Web server of the page: uvicorn with limits on hosts, request sizes and files."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

from matbackprop.errors import ConfigurationError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_REQUEST = 200 << 20  #: Maximum size of a request in bytes, including files.
MAX_KEPT = 1 << 30  #: Maximum total size of stored and incoming files in bytes.
AGE = 600  #: Seconds after which files are removed.
MAX_CONNECTIONS = 256  #: Maximum number of open connections.
FULL = "The page stores too many files. Try again in ten minutes."


class Limits:
    """ASGI middleware that rejects other hosts and sites, large requests, and uploads if storage is full.

    An empty tuple of hosts accepts all hosts.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], folder: Path, hosts: tuple[str, ...] = LOOPBACK) -> None:
        self.app, self.folder, self.hosts = app, folder, hosts
        self.receiving = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        size = int(headers.get("content-length", "0"))
        refusal = self._header_refusal(headers, size)
        if refusal is None and size:
            kept = await asyncio.to_thread(remove_old, self.folder)
            refusal = (507, FULL) if kept + self.receiving + size > MAX_KEPT else None
        if refusal is not None:
            status, text = refusal
            await PlainTextResponse(text, status, {"connection": "close"})(scope, receive, send)
            return
        self.receiving += size
        try:
            await self.app(scope, receive, send)
        finally:
            self.receiving -= size

    def _header_refusal(self, headers: Headers, size: int) -> tuple[int, str] | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts and urlsplit(f"//{host}").hostname not in self.hosts:
            return 403, "This address is not served."
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "Requests from other sites are refused."
        if "transfer-encoding" in headers:
            return 411, "Requests need a Content-Length header."
        return (413, f"A request has at most {MAX_REQUEST >> 20} MB.") if size > MAX_REQUEST else None


def remove_old(folder: Path) -> int:
    """Remove files and folders older than :data:`AGE`, except ``samples``. Return the remaining size in bytes."""
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


def listen(host: str, port: int) -> socket.socket:
    """Open the socket of the page, so that its address is available before models are loaded.

    Raises:
        ConfigurationError: the port is in use, or the host is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigurationError(
            f"The page cannot listen on {host}, port {port}: {reason}. Choose another --host or --port (0: any)."
        ) from error


class Server:
    """Server of an ASGI application on a listening socket, in a thread. ``folder`` contains the files of the page."""

    def __init__(self, app: Any, sock: socket.socket, folder: Path, hosts: tuple[str, ...] = LOOPBACK) -> None:
        self.folder = folder
        config = uvicorn.Config(
            Limits(app, folder, hosts), ws="none", limit_concurrency=MAX_CONNECTIONS, log_level="critical",
            access_log=False, server_header=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]}, daemon=True)

    def start(self) -> None:
        """Start the server and wait until it accepts requests."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.05)

    def wait(self) -> None:
        """Remove old files every minute until the server stops."""
        while self._thread.is_alive():
            self._thread.join(min(60, AGE / 4))
            remove_old(self.folder)

    def close(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join(10)
