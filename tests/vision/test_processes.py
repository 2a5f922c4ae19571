"""Worker processes: deaf to signals that are not their parent's, and gone when it is."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from matbackprop.errors import WorkerError
from matbackprop.vision.processes import Workers, is_first_process, parallel_map, processors, signals_held

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="needs sigtimedwait")


def send(signum, pid):
    """Send a signal from a process that is not the worker's parent."""
    subprocess.run(["sh", "-c", f"kill -{int(signum)} {pid}"], check=True)


def test_signals_of_others_change_nothing_and_the_parents_end_a_worker():
    others = set(multiprocessing.active_children())
    with pytest.raises(WorkerError, match="ended from outside"), Workers(2) as pool:
        first = pool.submit(os.getpid)
        (worker,) = set(multiprocessing.active_children()) - others
        for _ in range(2):  # while it starts, and when it is up
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                send(signum, worker.pid)
            assert first.result() == worker.pid
            assert pool.submit(os.getpid).result() == worker.pid
        second = pool.submit(time.sleep, 60)
        worker.terminate()
        second.result(timeout=30)


def end_by(signum):
    os.kill(os.getpid(), signum)


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_work_with_its_reason():
    with pytest.raises(WorkerError, match=r"SIGKILL .*memory runs out"), Workers(2) as pool:
        pool.submit(end_by, signal.SIGKILL).result(timeout=60)
    with pytest.raises(WorkerError, match=r"SIGSEGV .*data check"):
        list(parallel_map(end_by, [signal.SIGSEGV] * 3, workers=2))


@pytest.mark.slow
def test_an_exception_drops_what_has_not_begun():
    with pytest.raises(ZeroDivisionError), Workers(2) as pool:
        waiting = [pool.submit(time.sleep, 0.1) for _ in range(50)]
        raise ZeroDivisionError
    assert sum(future.cancelled() for future in waiting) > 40


@pytest.mark.parametrize("count", [0, 2])
def test_a_map_keeps_the_order_and_begins_only_a_few_items_ahead(count):
    taken = []

    def items():
        for i in range(100):
            taken.append(i)
            yield -i

    with Workers(count) as pool:
        results = pool.map(abs, items(), chunk=3)
        assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert len(taken) < 50
        assert list(results) == list(range(5, 100))


def test_workers_do_not_outlive_a_killed_parent():
    program = (
        "import os, time; from matbackprop.vision.processes import is_first_process, Workers\n"
        "if __name__ == '__main__':\n"
        "    pool = Workers(2); print(pool.submit(os.getpid).result(), flush=True); pool.submit(time.sleep, 600)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert int(parent.stdout.readline()) != parent.pid
    parent.kill()
    parent.communicate(timeout=30)  # returns when the last holder of its standard output, the worker, is gone


def test_signals_are_held_only_meanwhile():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals_held():
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        ({"NODE_RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"SLURM_PROCID": "3", "SLURM_JOB_NAME": "train"}, False),
        ({"SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"}, True),
    ],
)
def test_the_first_process_knows_itself(environment, first, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() is first


def test_processors_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert processors() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS and Windows have none
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors() == 1
