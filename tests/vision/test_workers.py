"""Worker processes: unaffected by Ctrl-C, terminated with their parent, clear errors if they die."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from matbackprop.errors import WorkerError
from matbackprop.vision.workers import Workers, parallel_map

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs POSIX signals")


def send(signum, pid):
    """Send a signal from a process that is not the worker's parent."""
    subprocess.run(["sh", "-c", f"kill -{int(signum)} {pid}"], check=True)


def end_by(signum):
    os.kill(os.getpid(), signum)


def test_interrupts_do_not_reach_workers_while_they_start_or_run():
    with Workers(2) as pool:
        first = pool.submit(os.getpid)
        (worker,) = multiprocessing.active_children()
        for _ in range(2):
            for signum in (signal.SIGINT, signal.SIGHUP):
                send(signum, worker.pid)
            assert first.result() == worker.pid
            assert pool.submit(os.getpid).result() == worker.pid


def test_a_worker_that_dies_raises_its_reason():
    with pytest.raises(WorkerError, match=r"SIGKILL.*fewer workers"), Workers(2) as pool:
        pool.submit(end_by, signal.SIGKILL).result(timeout=60)
    with pytest.raises(WorkerError, match="killed by SIGTERM"), Workers(2) as pool:
        pool.submit(end_by, signal.SIGTERM).result(timeout=60)


@pytest.mark.slow
def test_a_worker_that_crashes_or_exits_raises_its_reason():
    with pytest.raises(WorkerError, match=r"SIGSEGV.*data check"):
        list(parallel_map(end_by, [signal.SIGSEGV] * 3, workers=2))
    with pytest.raises(WorkerError, match="exited with code 3"):
        list(parallel_map(os._exit, [3, 3], workers=2))


def test_an_exception_ends_pending_and_running_calls():
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError), Workers(2) as pool:
        waiting = [pool.submit(time.sleep, 60) for _ in range(50)]
        raise ZeroDivisionError
    while not all(future.done() for future in waiting):
        time.sleep(0.01)
    assert time.monotonic() - started < 50


@pytest.mark.parametrize("count", [0, 2])
def test_a_map_keeps_the_order_and_submits_few_items_ahead(count):
    taken = []

    def items():
        for i in range(100):
            taken.append(i)
            yield -i

    with Workers(count) as pool:
        results = pool.map(abs, items())
        assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert len(taken) < 50
        assert list(results) == list(range(5, 100))


def test_workers_end_with_a_killed_parent():
    program = (
        "import os, time; from matbackprop.vision.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    pool = Workers(2); print(pool.submit(os.getpid).result(), flush=True); pool.submit(time.sleep, 600)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert int(parent.stdout.readline()) != parent.pid
    parent.kill()
    parent.communicate(timeout=30)  # returns when the worker, the last holder of its standard output, is gone
