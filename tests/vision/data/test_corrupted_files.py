"""A few corrupted files for every reader; ``python -m benchmarks corrupted_files`` tests thousands."""

import sys

import pytest

pytest.importorskip("resource", reason="needs fork and limits on memory")

from helpers.corrupted_files import GOOD, READERS, attack, run_in_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", READERS)
def test_a_corrupted_file_is_read_or_rejected_in_one_line(name):
    for number in range(3):
        result = attack(name, number)
        assert result.verdict in GOOD, result


@pytest.mark.parametrize("name", ["COCO annotations", "segmentations", "segmenter"])
def test_valid_files_are_read(name, tmp_path):
    READERS[name].make(tmp_path)
    for call in READERS[name].calls:
        outcome = run_in_child(call, tmp_path)
        assert outcome.code == 0, outcome.said
