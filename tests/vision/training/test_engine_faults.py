"""One of each kind of fault; ``python -m benchmarks faults`` repeats them with other seeds."""

import sys

import pytest

pytest.importorskip("resource", reason="needs fork, SIGKILL and limits on files")

from helpers.training_faults import FAULTS, inject

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FAULTS)
def test_training_survives(name, tmp_path):
    inject(name, tmp_path, seed=0)
