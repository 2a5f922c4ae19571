"""Runs of a table: several at a time, within a time limit, each once, and what a failure does."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from experiments import table
from experiments.table import Clock, Job, run_jobs


@dataclass
class Files:
    """Runs that write a file each; the second part waits for the first."""

    folder: Path
    keys: tuple[str, ...] = ("a", "b", "c")
    broken: str = ""
    forgetful: bool = False
    done: list[Job] = field(default_factory=list)

    def ready(self):
        first = [job for job in (Job(key, "trial") for key in self.keys) if not self._path(job).exists()]
        second = [Job(key, "seed") for key in self.keys if self._path(Job(key, "trial")).exists()]
        return first + [job for job in second if not self._path(job).exists()]

    def run(self, job):
        if job.key == self.broken:
            raise ValueError("broken")
        self.done.append(job)
        if not self.forgetful:
            self._path(job).write_text(str(os.getpid()))
        return "a line"

    def _path(self, job):
        return self.folder / f"{job.key}-{job.part}"


def test_every_run_is_done_once_and_after_what_it_waits_for(tmp_path):
    runs = Files(tmp_path)
    run_jobs(runs)
    assert sorted(runs.done, key=str) == sorted({*runs.done}, key=str) and len(runs.done) == 6
    assert all(runs.done.index(Job(key, "trial")) < runs.done.index(Job(key, "seed")) for key in runs.keys)
    run_jobs(runs)
    assert len(runs.done) == 6


@pytest.mark.slow
def test_processes_do_what_one_process_does_and_a_failure_does_not_stop_the_others(tmp_path, caplog):
    runs = Files(tmp_path, broken="b")
    with pytest.raises(RuntimeError, match="1 of 5 runs failed, the first: b trial 0:") as caught:
        run_jobs(runs, jobs=2)
    assert "ValueError: broken" in str(caught.value)
    assert runs.ready() == [Job("b", "trial")]  # its seed waits for it
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}


@dataclass
class Endless:
    """Two runs that never end, and a third one that ends when they have begun."""

    folder: Path

    def ready(self):
        if self._begun():
            raise KeyboardInterrupt
        return [Job("a", "seed"), Job("b", "seed"), Job("third", "seed")]

    def run(self, job):
        if job.key != "third":
            (self.folder / job.key).write_text(str(os.getpid()))
            time.sleep(600)
        while not self._begun():
            time.sleep(0.01)
        return ""

    def _begun(self):
        return len([path for path in self.folder.iterdir() if path.read_text()]) == 2


@pytest.mark.slow
def test_an_interrupted_command_ends_its_runs_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_jobs(Endless(tmp_path), jobs=3)
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


NESTED = """
from experiments.table import run_jobs, shared_workers
from experiments.table import Job

class Nested:
    done = 0
    def ready(self):
        Nested.done += 1
        return [Job("a", "seed", i) for i in range(3)] if Nested.done == 1 else []
    def run(self, job):
        return str(list(shared_workers(2).map(abs, [-2, job.number])))

if __name__ == "__main__":
    run_jobs(Nested(), jobs=2)
    print("done")
"""


@pytest.mark.slow
def test_runs_may_have_processes_of_their_own(tmp_path):
    (tmp_path / "nested.py").write_text(NESTED)
    program = [sys.executable, str(tmp_path / "nested.py")]
    assert subprocess.run(program, capture_output=True, text=True, timeout=300, check=True).stdout == "done\n"


def test_a_failure_ends_the_work_of_one_process_at_once(tmp_path):
    runs = Files(tmp_path, broken="a")
    with pytest.raises(ValueError, match="broken"):
        run_jobs(runs)
    assert runs.done == []


def test_a_run_whose_result_is_not_recognised_is_not_repeated(tmp_path):
    runs = Files(tmp_path, forgetful=True)
    with pytest.raises(RuntimeError, match="a trial 0 has ended, but its result is not the one"):
        run_jobs(runs)
    assert len(runs.done) == 3


def test_nothing_is_started_that_would_not_end_in_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(table.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(table.time, "perf_counter", lambda: now[0])
    done = []

    class Timed:
        left = [Job(key, "seed", seed) for seed in (0, 1) for key in ("long", "short")]

        def ready(self):
            return [job for job in self.left if job not in done]

        def run(self, job):
            done.append(job)
            now[0] += {"long": 50.0, "short": 2.0}[job.key]
            return ""

    run_jobs(Timed(), clock=Clock(115.0))
    assert done == Timed.left
    done.clear()
    now[0] = 0.0
    # After 52 s the second long one, taken to last 60 s, would end too late; the short one behind it would not.
    run_jobs(Timed(), clock=Clock(111.0))
    assert [(job.key, job.number) for job in done] == [("long", 0), ("short", 0), ("short", 1)]
