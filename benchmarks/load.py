"""Load test of the web page with many concurrent visitors: ``python -m benchmarks load``.

Clients of ``matbackprop serve`` upload photographs, other files, decompression bombs and huge files, and request paths
and names of other visitors. No response may contain details of the machine or other visitors' photographs.
The summary is ``benchmarks/results/load.json``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.program import RESULTS, finish, provenance

MEGABYTES = 8  # allowed rise of the line fitted to the memory of the second half


class Watch:
    """Records the memory of a process in megabytes and the number of files in a folder every two seconds."""

    def __init__(self, pid: int, folder: str) -> None:
        self.pid, self.folder, self.ended = pid, folder, threading.Event()
        self.memory: list[int] = []
        self.files: list[int] = []
        self.thread = threading.Thread(target=self.record)

    def record(self) -> None:
        while not self.ended.wait(2.0):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            self.memory.append(pages * os.sysconf("SC_PAGE_SIZE") >> 20)
            self.files.append(sum(len(names) for _, _, names in os.walk(self.folder)))

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


@dataclass
class Config:
    """Load-test the web page. Exits with 0 if no response was wrong."""

    clients: int = 16  #: Concurrent clients.
    requests: int = 2_000  #: Total number of visits.
    output: Path = RESULTS / "load.json"  #: Summary file.


def main(config: Config) -> dict[str, Any]:
    """Start the page, run the clients and write the summary."""
    from helpers.long_runs import rise
    from helpers.page_load import SECONDS, run_clients

    with tempfile.TemporaryDirectory() as place:
        server = subprocess.Popen(
            [sys.executable, "-m", "matbackprop", "serve", "--model", "none", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": place, "PYTHONUNBUFFERED": "1"},
        )
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.:]+", line)))
        log: list[str] = []
        threading.Thread(target=lambda: log.extend(server.stdout or ()), daemon=True).start()
        started = time.perf_counter()
        with Watch(server.pid, place) as watch:
            tally = run_clients(address, config.clients, config.requests)
        seconds = time.perf_counter() - started
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
        left = [path.name for path in Path(place).rglob("*") if not path.name.startswith("torchinductor")]
    memory = watch.memory
    grown = rise(memory[len(memory) // 2 :])
    kept = not tally.wrong and grown["at_most"] < MEGABYTES and not left and address.startswith("http://127.0.0.1:")
    summary = {
        "command": f"python -m benchmarks load --clients {config.clients} --requests {config.requests}",
        "promise": f"every answer right within {SECONDS:g} s and without a trace of the machine or of others; memory "
        f"rises by less than {MEGABYTES} MB in the second half; no file is left",
        "kept": kept,
        "requests": sum(tally.kinds.values()),
        "answers": dict(sorted(tally.answers.items())),
        "wrong": tally.wrong[:20],
        "slowest_seconds": round(tally.slowest, 2),
        "seconds": round(seconds),
        "megabytes": memory[:: max(len(memory) // 20, 1)],
        "megabytes_in_second_half": grown,
        "most_files": max(watch.files),
        "files_left": left,
        "exit_code": code,
        "tracebacks_in_log": sum("Traceback" in line for line in log),
        **provenance(),
    }
    if summary["tracebacks_in_log"]:
        print("".join(log[-200:]))
    return finish(config.output, summary, f"{dict(tally.answers)}", good=kept)
