"""Devices, processors and the rank of a process."""

import pytest

from matbackprop.vision.distributed import is_first_process


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
def test_the_first_process_is_found_from_the_environment(environment, first, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() is first
