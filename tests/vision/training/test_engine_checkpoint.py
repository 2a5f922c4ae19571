"""Checkpoints: whole or not at all, damage recognised, nothing executed."""

import os
import pickle
import random

import numpy as np
import pytest
import torch

from helpers.tiny_run import tiny_config, train
from matbackprop.errors import CheckpointError
from matbackprop.vision.training import run_folder
from matbackprop.vision.training.run_folder import (
    latest_checkpoint,
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)

CONTENT = {"w": torch.arange(1000.0), "list": [1, 2.5, "x", None, True], "nested": {"t": (1, torch.ones(2))}, 3: b"b"}


def test_round_trip_and_plain_torch_load(tmp_path):
    path = tmp_path / "a.ckpt"
    save_checkpoint(CONTENT, path)
    for actual in (load_checkpoint(path), torch.load(path, weights_only=True)):
        assert torch.equal(actual["w"], CONTENT["w"])
        assert actual["list"] == CONTENT["list"]
        assert actual["nested"]["t"][0] == 1 and actual[3] == b"b"
    assert list(tmp_path.iterdir()) == [path]


def test_any_changed_or_missing_byte_is_recognised(tmp_path):
    path = tmp_path / "a.ckpt"
    save_checkpoint(CONTENT, path)
    good = path.read_bytes()
    draw = random.Random(0)
    for position in [0, len(good) - 1, len(good) - 84, *(draw.randrange(len(good)) for _ in range(40))]:
        bad = bytearray(good)
        bad[position] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path)
    for length in [0, 10, 200, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(path)
    path.write_bytes(good + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path)


def test_the_one_before_is_used_and_announced(tmp_path, caplog):
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    assert latest_checkpoint(tmp_path) is None
    save_checkpoint({"step": 1}, last, keep=previous)
    assert not previous.exists()
    save_checkpoint({"step": 2}, last, keep=previous)
    assert latest_checkpoint(tmp_path) == last
    assert not caplog.messages
    last.write_bytes(last.read_bytes()[:-5])
    assert load_checkpoint(latest_checkpoint(tmp_path)) == {"step": 1}
    assert "damaged" in caplog.messages[0] and "previous.ckpt" in caplog.messages[1]
    previous.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"all checkpoints .* are damaged \(last.ckpt, previous.ckpt\)"):
        latest_checkpoint(tmp_path)


def test_a_crash_between_keeping_and_replacing_leaves_nothing_behind(tmp_path):
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    save_checkpoint({"step": 1}, last)
    os.link(last, previous)  # as after a crash: both names of one file
    save_checkpoint({"step": 2}, last, keep=previous)
    assert load_checkpoint(previous) == {"step": 1} and load_checkpoint(last) == {"step": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "previous.ckpt"]


def test_objects_that_would_execute_are_refused_in_writing_and_reading(tmp_path):
    class Thing:
        pass

    path = tmp_path / "a.ckpt"
    with pytest.raises(CheckpointError, match=r"checkpoint.callbacks\[0\] is a .*Thing"):
        save_checkpoint({"callbacks": [Thing()]}, path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "evil.ckpt").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "evil.ckpt")


class _MakesAFolder:
    """What unpickling it would execute."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_right_checksum_does_not_make_a_pickle_run(tmp_path):
    path, made = tmp_path / "evil.ckpt", tmp_path / "made"
    with path.open("wb") as file:
        hashing = run_folder._HashingFile(file)
        torch.save({"step": _MakesAFolder(made)}, hashing)
        hashing.finish()
    run_folder.verify_checkpoint(path)
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        load_checkpoint(path)
    assert not made.exists()


def test_numpy_values_become_plain(tmp_path):
    save_checkpoint({"a": np.float64(2.0), "b": np.arange(3), "c": np.bool_(True)}, tmp_path / "a.ckpt")
    actual = load_checkpoint(tmp_path / "a.ckpt")
    assert actual["a"] == 2.0 and actual["b"].tolist() == [0, 1, 2] and actual["c"] is True


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    save_checkpoint({"step": 1}, path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint({"step": 2}, path)
    assert load_checkpoint(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_random_states(tmp_path):
    state = random_state()
    first = random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    save_checkpoint({"random": state}, tmp_path / "a.ckpt")
    set_random_state(load_checkpoint(tmp_path / "a.ckpt")["random"])
    second = random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])


def test_a_damaged_checkpoint_costs_only_the_steps_after_the_one_before(tmp_path, caplog):
    whole, module = train(tiny_config(tmp_path / "whole", checkpoint_every_steps=4))
    last = whole.checkpoints / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1])
    before = load_checkpoint(whole.checkpoints / "previous.ckpt")["global_step"]
    assert before == 16
    _, again = train(tiny_config(tmp_path / "whole", checkpoint_every_steps=4, resume=True))
    assert "damaged" in caplog.text and "previous.ckpt" in caplog.text
    for key, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])


def test_a_checkpoint_that_holds_no_state_or_is_a_folder_is_refused(tmp_path):
    save_checkpoint([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match="holds a list, not the state of a training"):
        load_checkpoint(tmp_path / "list.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load_checkpoint(tmp_path / "folder.ckpt")
