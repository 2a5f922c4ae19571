"""Checkpoints: atomic, checked for damage, and read without executing code."""

import os
import pickle
import random

import numpy as np
import pytest
import torch

from helpers.tiny_run import tiny_config, train
from matbackprop.errors import CheckpointError
from matbackprop.vision.training.checkpoint import load_checkpoint, random_state, save_checkpoint, set_random_state

CONTENT = {"w": torch.arange(1000.0), "list": [1, 2.5, "x", None, True], "nested": {"t": (1, torch.ones(2))}, 3: b"b"}


def same_content(actual):
    return (
        torch.equal(actual["w"], CONTENT["w"])
        and actual["list"] == CONTENT["list"]
        and actual["nested"]["t"][0] == 1
        and torch.equal(actual["nested"]["t"][1], torch.ones(2))
        and actual[3] == b"b"
    )


def test_round_trip_and_plain_torch_load(tmp_path):
    path = tmp_path / "a.ckpt"
    save_checkpoint(CONTENT, path)
    assert same_content(load_checkpoint(path)) and same_content(torch.load(path, weights_only=True))
    assert list(tmp_path.iterdir()) == [path]


def test_changed_bytes_are_detected_or_harmless_and_missing_ones_detected(tmp_path):
    path = tmp_path / "a.ckpt"
    save_checkpoint(CONTENT, path)
    good, draw, found = path.read_bytes(), random.Random(0), 0
    for position in [0, len(good) - 1, *(draw.randrange(len(good)) for _ in range(200))]:
        bad = bytearray(good)
        bad[position] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        try:
            assert same_content(load_checkpoint(path)), position  # padding, dates
        except CheckpointError as error:
            assert "damaged" in str(error)
            found += 1
    assert found > 100
    for length in [0, 10, 200, len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path)


class _MakesAFolder:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_objects_that_would_execute_are_rejected_in_writing_and_reading(tmp_path):
    path, made = tmp_path / "evil.ckpt", tmp_path / "made"
    with pytest.raises(CheckpointError, match=r"contains .*mkdir. Reading it would execute code"):
        save_checkpoint({"callbacks": [_MakesAFolder(made)]}, path)
    assert not list(tmp_path.iterdir())
    path.write_bytes(pickle.dumps(_MakesAFolder(made)))
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    torch.save({"step": _MakesAFolder(made)}, path)  # an intact archive
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        load_checkpoint(path)
    assert not made.exists()


def test_random_states_are_restored(tmp_path):
    state = random_state()
    first = random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    save_checkpoint({"random": state}, tmp_path / "a.ckpt")
    set_random_state(load_checkpoint(tmp_path / "a.ckpt")["random"])
    second = random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])


def test_a_file_without_a_state_and_a_folder_are_rejected(tmp_path):
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match="contains a list, not the state of a training"):
        load_checkpoint(tmp_path / "list.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        load_checkpoint(tmp_path / "folder.ckpt")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "missing.ckpt")


@pytest.mark.parametrize(
    ("field", "value"),
    [("best_score", "0.5"), ("global_step", 2.0), ("processes", 3), ("optimizer", {}), ("schedule", 3), ("epoch", -1)],
)
def test_a_state_of_wrong_types_is_one_clear_error(tmp_path, field, value):
    run, _ = train(tiny_config(tmp_path / "run", max_epochs=1))
    state = load_checkpoint(run.checkpoints / "last.ckpt")
    save_checkpoint(state | {field: value}, run.checkpoints / "last.ckpt")
    with pytest.raises(CheckpointError, match="does not contain the state of this training"):
        train(tiny_config(tmp_path / "run", max_epochs=2, resume=True))
