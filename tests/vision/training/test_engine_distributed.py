"""Two processes with gloo train like one with the doubled batch; metrics are reduced over both."""

import os
import signal
import sys

import pytest
import torch

from helpers.tiny_run import assert_equal_tensors, at_step, last_checkpoint, tiny_config, train
from helpers.two_processes import run_two
from matbackprop.vision.training.run_folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


DISTRIBUTED = {"devices": "2"}


@pytest.mark.parametrize(("items", "held_out"), [(24, 7), (27, 3)])
def test_loss_curve_equals_that_of_one_process_with_the_doubled_batch(tmp_path, items, held_out):
    common = {"dropout": 0.0, "items": items, "held_out": held_out, "max_epochs": 2}
    one, module = train(tiny_config(tmp_path / "one", batch=8, **common))
    assert run_two(tiny_config(tmp_path / "two", batch=4, **common, **DISTRIBUTED)) == [0, 0]
    two = RunFolder(tmp_path / "two")
    for name in ("train/loss", "train/twice", "val/loss", "train/gradient_norm", "train/learning_rate"):
        curves = [[(m["step"], m[name]) for m in run.read_metrics() if name in m] for run in (one, two)]
        assert len(curves[0]) == len(curves[1]) >= 2
        assert [s for s, _ in curves[0]] == [s for s, _ in curves[1]]
        assert [v for _, v in curves[1]] == pytest.approx([v for _, v in curves[0]], rel=1e-10)
    last = last_checkpoint(two)["state_dict"]
    for key, value in module.state_dict().items():
        torch.testing.assert_close(last[key], value, rtol=1e-10, atol=1e-12)
    assert two.read_summary()["processes"] == 2


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("act", "codes", "saved"),
    [
        (lambda rank: os._exit(9), [9, 9], 4),
        # a signal to one of them stops both after the next second step
        (lambda rank: os.kill(os.getpid(), signal.SIGTERM) if rank else None, [143, 143], 6),
    ],
    ids=["crash", "signal"],
)
def test_two_processes_resume_exactly(tmp_path, act, codes, saved):
    options = {"max_epochs": 2, "checkpoint_every_steps": 2, "guard_every": 2, "items": 64}
    options |= DISTRIBUTED
    assert run_two(tiny_config(tmp_path / "whole", **options)) == [0, 0]
    assert run_two(tiny_config(tmp_path / "parts", **options), lambda rank: at_step(5, lambda: act(rank))) == codes
    assert last_checkpoint(RunFolder(tmp_path / "parts"))["global_step"] == saved
    assert run_two(tiny_config(tmp_path / "parts", resume=True, **options)) == [0, 0]
    ends = [last_checkpoint(RunFolder(tmp_path / name)) for name in ("whole", "parts")]
    assert ends[0]["global_step"] == ends[1]["global_step"]
    assert_equal_tensors(ends[0]["state_dict"], ends[1]["state_dict"])
