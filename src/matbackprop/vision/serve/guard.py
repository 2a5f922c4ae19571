"""What stands between the page and whoever asks: every request passes through :class:`Guard` before Gradio sees it.

Gradio answers far more than this page needs, names files by where they lie, and takes whoever knows a session for its
owner. The guard lets through what the page uses, and nothing that another site lets a visitor's browser send; it calls
its folder by another name, keeps each session to the browser that began it, and limits time, sizes and files on disk.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from matbackprop.errors import DataError
from matbackprop.vision.files import parse_json

ALIAS = "/matbackprop-files"
"""What the folder of uploads and results is called outside."""
MAX_SECONDS = 120.0
"""Seconds that a request may take; streams of events may take ten times as long."""
MAX_BODY = 1 << 20
"""Bytes of a request that is not an upload."""
MAX_KEPT = 1 << 30
"""Bytes of all uploads and results on disk; further uploads wait until older ones are gone."""
AGE = 3600
"""Seconds after which what the page shows, and results, are removed."""
UPLOAD_AGE = 600
"""Seconds after which uploads are removed; what is shown of them has been copied, reduced."""

FULL = "The page holds too many files for now. Try again later."

_MAX_SESSIONS = 10_000
_COOKIE = "matbackprop-visitor"
_FILE = "/gradio_api/file="
_READ = re.compile(
    r"/|/(config|info|theme\.css|favicon\.ico|manifest\.json|robots\.txt)/?|/(assets|static|svelte)/[\w./+@=~-]+"
    r"|/gradio_api/(startup-events|app_id|info|queue/data|upload_progress|heartbeat/[\w-]+)/?"
    rf"|{_FILE}{ALIAS}/.+"
)
_WRITE = re.compile(r"/gradio_api/(queue/join|upload|reset|cancel)/?")
_STREAMS = ("/gradio_api/queue/data", "/gradio_api/upload_progress", "/gradio_api/heartbeat/")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _Refused(Exception):
    """A request that is not let through: its status and one sentence."""


class Guard:
    """An ASGI application around the page's.

    Args:
        app: the page's application.
        folder: of its uploads and results; what lies directly in it stays, folders in it are removed when they are old.
        forget: called with a session when its stream of events has ended.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        folder: Path,
        forget: Callable[[str], None] = lambda session: None,
    ) -> None:
        self.app = app
        self.folder = folder
        self.forget = forget
        self.owners: OrderedDict[str, str] = OrderedDict()  # session → the visitor who began it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page uses no WebSocket
            return
        outward = _Outward(send, str(self.folder))
        path = scope["path"]
        seconds = None if "/heartbeat/" in path else MAX_SECONDS * (10 if path.startswith(_STREAMS) else 1)
        try:
            visitor = _visitor(scope)
            if visitor is None:
                visitor = outward.new_visitor = secrets.token_urlsafe(24)
            await asyncio.wait_for(self._let_through(scope, receive, outward, visitor), seconds)
        except _Refused as refused:
            await outward.refuse(*refused.args)
        except TimeoutError:
            await outward.refuse(503, f"This took longer than {seconds:g} seconds and was given up.")
        except Exception:  # Gradio has told the server's log; a visitor learns nothing about the machine
            await outward.refuse(500, "Something went wrong on the server.")

    async def _let_through(self, scope: Scope, receive: Receive, send: Send, visitor: str) -> None:
        path, method = scope["path"], scope["method"]
        if not (_READ if method in ("GET", "HEAD") else _WRITE).fullmatch(path) or ".." in path:
            raise _Refused(404, "There is nothing here.")
        if method == "POST" and (b"sec-fetch-site", b"cross-site") in scope["headers"]:
            raise _Refused(403, "Only the page itself may ask for this.")
        query = parse_qs(scope["query_string"].decode("latin-1"))
        sessions = set(query.get("session_hash", []))
        if "/heartbeat/" in path:
            sessions.add(path.rstrip("/").rsplit("/", 1)[-1])
        if path.startswith(_FILE):
            inside = str(self.folder) + path[len(_FILE + ALIAS) :]
            scope = dict(scope) | {"path": _FILE + inside, "raw_path": (_FILE + inside).encode()}
        elif method == "POST" and path.startswith("/gradio_api/upload"):
            if not await asyncio.to_thread(make_room, self.folder):
                raise _Refused(507, FULL)
        elif method == "POST":
            body = await _body(receive)
            sessions |= set(_sessions(body))
            receive = _replay(body.replace(ALIAS.encode(), str(self.folder).encode()), receive)
        for session in sessions:
            if self.owners.setdefault(session, visitor) != visitor:
                raise _Refused(403, "This session belongs to somebody else. Load the page again.")
            self.owners.move_to_end(session)
        while len(self.owners) > _MAX_SESSIONS:
            self.owners.popitem(last=False)
        await self.app(scope, receive, send)
        if path.startswith("/gradio_api/queue/data"):
            for session in sessions:
                self.forget(session)


def make_room(folder: Path) -> bool:
    """Remove what is old, and say whether there is room for another file."""
    kept, now = 0, time.time()
    with os.scandir(folder) as entries:
        folders = [one for one in entries if one.is_dir(follow_symlinks=False)]
    for one in folders:
        try:
            files = [os.stat(os.path.join(place, name)) for place, _, names in os.walk(one) for name in names]
            age = now - max((file.st_mtime for file in files), default=one.stat().st_mtime)
            if age > (UPLOAD_AGE if len(one.name) == 64 else AGE):  # Gradio calls uploads by their SHA-256
                shutil.rmtree(one, ignore_errors=True)
            else:
                kept += sum(file.st_size for file in files)
        except OSError:  # another request has removed it
            continue
    return kept < MAX_KEPT


class _Outward:
    """Sends an answer in which the folder has its other name."""

    def __init__(self, send: Send, folder: str) -> None:
        self.send, self.folder = send, folder.encode()
        self.new_visitor: str | None = None
        self.started = False
        self._start: Message | None = None  # held back until the length of the text is known
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = [(k, v) for k, v in message["headers"] if k.lower() != b"server"]
            if self.new_visitor is not None:
                cookie = f"{_COOKIE}={self.new_visitor}; Path=/; HttpOnly; SameSite=Strict"
                headers.append((b"set-cookie", cookie.encode()))
            kind = dict(headers).get(b"content-type", b"")
            self._text = kind.startswith((b"text/", b"application/json"))
            message = {**message, "headers": headers}
            if self._text and not kind.startswith(b"text/event-stream"):
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._text:
            body = message.get("body", b"")
            if self._start is not None:
                self._held += body
                if message.get("more_body"):
                    return
                body, start, self._start = self._held, self._start, None
                body = body.replace(self.folder, ALIAS.encode())
                lengths = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
                await self.send({**start, "headers": [*lengths, (b"content-length", str(len(body)).encode())]})
            message = {**message, "body": body.replace(self.folder, ALIAS.encode())}
        await self.send(message)

    async def refuse(self, status: int, sentence: str) -> None:
        """Answer with a sentence, where no answer has begun."""
        if self.started and self._start is None:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        self._start, self._held = None, b""
        body = sentence.encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _visitor(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"cookie":
            try:
                cookie = SimpleCookie(value.decode("latin-1")).get(_COOKIE)
            except CookieError:
                continue
            if cookie is not None and re.fullmatch(r"[\w-]{32}", cookie.value):
                return cookie.value
    return None


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise _Refused(413, f"A request has at most {MAX_BODY} bytes.")
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, then whatever comes after it."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(parts, None) or await receive()

    return again


def _sessions(body: bytes) -> Iterator[str]:
    """The sessions that a request is for; every file that it names must lie in the page's folder."""
    try:
        content = parse_json(body, "the request", object) if body else {}
    except DataError:
        raise _Refused(400, "This is not a request of the page.") from None
    stack = [content]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            path = one.get("path")
            if path is not None and not (isinstance(path, str) and path.startswith(f"{ALIAS}/") and ".." not in path):
                raise _Refused(403, "Only files that were uploaded here can be used.")
            if isinstance(session := one.get("session_hash"), str):
                yield session
            stack += one.values()
        elif isinstance(one, list):
            stack += one
