"""A short ``python -m benchmarks long_runs``: resources do not grow, and threads and processes agree."""

import sys
import tempfile

import pytest

from helpers.concurrency import call_in_processes, call_in_threads
from helpers.long_runs import segment_long, train_long

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and fork")


@pytest.mark.slow
@pytest.mark.parametrize(("work", "count"), [(train_long, 200), (segment_long, 20)])
def test_resources_do_not_grow(work, count, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    result = work(count, tmp_path)
    assert result["megabytes_in_second_half"]["amount"] < 64
    assert max(result["grew"].values()) <= 0, result


def test_eight_threads_agree_with_one():
    assert call_in_threads(8, 3)["wrong"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_agree_with_this_one(method):
    assert call_in_processes(method, 1)["wrong"] == 0
