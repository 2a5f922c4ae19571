"""Concurrent clients of the web page, with valid and adversarial requests.

``python -m benchmarks load`` sends thousands of requests from many clients, the tests send a few.
"""

import io
import json
import random
import re
import struct
import threading
import time
import uuid
import zlib
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
from PIL import Image

SECONDS = 180.0
LEAKS = re.compile(rb"Traceback \(most recent|File \"[^\"]+\.py\"|/root/|/home/|site-packages")
STOLEN = (
    "/gradio_api/file=/etc/passwd",
    "/gradio_api/file=/tmp/../etc/passwd",
    "/gradio_api/file=/tmp/%2e%2e/etc/passwd",
    "/gradio_api/file=http://127.0.0.1:1/x",
    "/gradio_api/proxy=http://127.0.0.1:1/x",
    "/file=/etc/passwd",
    "/file/etc/passwd",
    "/static/../../../../../etc/passwd",
    "/gradio_api/vibe-code",
    "/monitoring",
    "/pwa_icon/99999",
)


def photograph(number: int) -> bytes:
    """A PNG of two halves whose color identifies the client."""
    pixels = np.full((48, 64, 3), (number * 37) % 200, np.uint8)
    pixels[:, 32:] = (220, (number * 91) % 250, 20)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def bomb(side: int) -> bytes:
    """A small PNG that decompresses to side × side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(b"\0" * (3 * side + 1)) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@dataclass
class Tally:
    """Outcomes of all clients."""

    kinds: Counter = field(default_factory=Counter)
    answers: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)
    slowest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, answer: str, seconds: float, wrong: str | None = None) -> None:
        with self.lock:
            self.kinds[kind] += 1
            self.answers[f"{kind}: {answer}"] += 1
            self.slowest = max(self.slowest, seconds)
            if wrong:
                self.wrong.append(f"{kind}: {wrong}")


class Client:
    """One visitor."""

    def __init__(self, address: str, number: int, tally: Tally) -> None:
        self.host = address.removeprefix("http://").rstrip("/")
        self.number, self.tally = number, tally
        self.answers: list[bytes] = []
        self.functions = self._functions()

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict | None = None) -> tuple[int, bytes]:
        """Send a request and read the response."""
        connection = HTTPConnection(self.host, timeout=SECONDS)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            self.answers.append(answer.read())
            return answer.status, self.answers[-1]
        finally:
            connection.close()

    def _functions(self) -> dict[str, dict]:
        _, page = self.ask("GET", "/")
        status, config = self.ask("GET", "/config")
        assert status == 200 and b"matbackprop" in page
        return {one["api_name"] or str(one["id"]): one for one in json.loads(config)["dependencies"]}

    def upload(self, content: bytes, name: str = "photo.png") -> tuple[int, bytes]:
        """Send a file as the page does."""
        mark = uuid.uuid4().hex
        head = f'--{mark}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
        body = head + content + f"\r\n--{mark}--\r\n".encode()
        return self.ask("POST", "/gradio_api/upload", body, {"Content-Type": f"multipart/form-data; boundary={mark}"})

    def call(self, name: str, data: list, session: str | None = None, **more: object) -> tuple[int, bytes]:
        """Join the queue with a call and read events until it is done."""
        session = session or uuid.uuid4().hex[:11]
        request = {"fn_index": self.functions[name]["id"], "data": data, "session_hash": session, "trigger_id": None}
        status, answer = self.ask(
            "POST", "/gradio_api/queue/join", json.dumps(request | more).encode(), {"Content-Type": "application/json"}
        )
        if status != 200:
            return status, answer
        return self.ask("GET", f"/gradio_api/queue/data?session_hash={session}")

    def drop(self, path: object, session: str | None = None) -> tuple[int, bytes]:
        """Request the analysis of the file at ``path``."""
        file = {"path": path, "orig_name": "photo.png", "meta": {"_type": "gradio.FileData"}}
        return self.call("add_photographs", [None, [file], "regions"], session)


def _waits(said: bytes) -> bool:
    """Whether the response says that the queue is full."""
    return b"queue is full" in said.lower()


def good(client: Client, draw: random.Random) -> str | None:
    """Upload a photograph, request its analysis, and compare the returned picture."""
    content = photograph(client.number)
    status, answer = client.upload(content, f"own-{client.number}.png")
    if status in (429, 503, 507):
        return None
    status, said = client.drop(json.loads(answer)[0])
    if status != 200 or b'"success": false' in said.replace(b'"success":false', b'"success": false'):
        return None if _waits(said) else f"{status} {said[-300:]!r}"
    others = [name for name in re.findall(rb"own-(\d+)\.png", said) if int(name) != client.number]
    if others:
        return f"sees the photograph of {others[0]!r}"
    paths = re.findall(rb"/gradio_api/file=(/[\w/.-]+\.png)", said)
    if not paths:
        return f"no photograph in the answer: {said[-300:]!r}"
    status, picture = client.ask("GET", "/gradio_api/file=" + paths[0].decode())
    pixels = np.asarray(Image.open(io.BytesIO(picture)))
    return None if status == 200 and pixels[0, 0, 0] == (client.number * 37) % 200 else "another photograph came back"


def not_a_picture(client: Client, draw: random.Random) -> str | None:
    """Upload bytes that are not an image; expect a one-sentence error."""
    _, answer = client.upload(draw.randbytes(draw.randrange(1, 5000)), draw.choice(("a.png", "a.jpg", "a.exe")))
    _, said = client.drop(json.loads(answer)[0])
    return None if b"not an image" in said or b"damaged" in said or _waits(said) else f"{said[-300:]!r}"


def picture_bomb(client: Client, draw: random.Random) -> str | None:
    """Upload a decompression bomb; expect that it is not decompressed."""
    _, answer = client.upload(BOMB, "bomb.png")
    _, said = client.drop(json.loads(answer)[0])
    return None if b"million are decoded" in said or _waits(said) else f"{said[-300:]!r}"


def huge_upload(client: Client, draw: random.Random) -> str | None:
    """Upload more than the limit."""
    try:
        status, _ = client.upload(b"\0" * (51 << 20), "huge.png")
    except OSError:  # the server closes the connection
        return None
    return None if status in (413, 400, 507) else f"status {status}"


def foreign_path(client: Client, draw: random.Random) -> str | None:
    """Request files of the server, for analysis or download."""
    if draw.random() < 0.5:
        path = draw.choice(("/etc/passwd", "/tmp/../etc/passwd", "../../etc/passwd"))
        status, said = client.drop(path)
        return "a file of the machine" if b"root:" in said else None
    status, said = client.ask("GET", draw.choice(STOLEN))
    return "a file of the machine" if b"root:" in said else None if status >= 300 else f"status {status}"


def foreign_name(client: Client, draw: random.Random) -> str | None:
    """Upload under a name that points outside the folder."""
    name = draw.choice(("../../../evil.png", "/etc/cron.d/evil", "..\\..\\evil.png", "a" * 5000 + ".png", "\x00.png"))
    client.upload(photograph(client.number), name)
    return "written outside" if Path("/etc/cron.d/evil").exists() else None


def nonsense(client: Client, draw: random.Random) -> str | None:
    """Send a malformed request."""
    body = draw.choice((b"", b"[" * 100_000, b"{}", b"null", draw.randbytes(300), b'{"data": ' + b"1" * (2 << 20)))
    status, said = client.ask("POST", "/gradio_api/queue/join", body, {"Content-Type": "application/json"})
    return None if status >= 400 else f"status {status}: {said[:200]!r}"


KINDS = {
    good: 4,
    not_a_picture: 3,
    picture_bomb: 1,
    huge_upload: 1,
    foreign_path: 5,
    foreign_name: 2,
    nonsense: 3,
}
BOMB = bomb(9_000)


def visit(address: str, number: int, requests: int, tally: Tally) -> None:
    """Send the requests of one client; its number is the seed."""
    draw = random.Random(number)
    client = Client(address, number, tally)
    for _ in range(requests):
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        started, client.answers = time.monotonic(), []
        try:
            wrong = kind(client, draw)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        leak = next((m for content in client.answers if (m := LEAKS.search(content))), None)
        if leak and not wrong:
            wrong = f"leaks details of the server: {leak.string[max(leak.start() - 80, 0) : leak.end() + 80]!r}"
        tally.add(kind.__name__, "right" if wrong is None else "wrong", time.monotonic() - started, wrong)


def run_clients(address: str, clients: int, requests: int) -> Tally:
    """Run all clients concurrently."""
    tally = Tally()
    each = -(-requests // clients)
    workers = [threading.Thread(target=visit, args=(address, n, each, tally)) for n in range(clients)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return tally
