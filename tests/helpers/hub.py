"""A local server with the part of the Hugging Face hub's protocol that sharing a model needs."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "a" * 40


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        repo = self.server.repos.get("/".join(path.removeprefix("/api/models").strip("/").split("/")[:2]))
        if repo is None:
            return self._send(b"", 404, X_Error_Code="RepoNotFound")
        if "/tree/" in path:
            entries = [{"type": "file", "path": n, "size": len(c), "oid": REVISION} for n, c in repo.items()]
            return self._json(entries)
        if path.startswith("/api/models/"):
            return self._json({"id": "x", "sha": REVISION, "siblings": [{"rfilename": name} for name in repo]})
        content = repo.get(path.rsplit("/", 1)[-1])
        if content is None:
            return self._send(b"", 404, X_Error_Code="EntryNotFound")
        etag = hashlib.sha256(content).hexdigest()
        return self._send(content, ETag=f'"{etag}"', X_Repo_Commit=REVISION)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'owner'}/{asked['name']}"
            self.server.repos.setdefault(name, {})
            return self._json({"url": f"{self.server.address}/{name}"})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            return self._json(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        if "/commit/" in self.path:
            name = "/".join(self.path.removeprefix("/api/models/").split("/")[:2])
            repo = self.server.repos[name]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repo[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.address}/{name}/commit/{REVISION}"
            return self._json({"commitUrl": url, "commitOid": REVISION})
        return self._json({"errors": [], "warnings": []})  # of the card's head


class Hub(ThreadingHTTPServer):
    """Repositories, name → file → content."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub during a ``with`` statement."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
