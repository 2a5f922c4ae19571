"""Every example draws its figure and returns the values that its text states."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


def _load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_test_for_every_example():
    tested = {
        "deep_cca",
        "degenerate_gradients",
        "fine_tune_with_second_order",
        "learn_a_partition",
        "mean_of_ellipses",
        "segment_photographs",
        "texture_descriptors",
        "whitening_loss",
    }
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_deep_cca(tmp_path):
    usual, ours, linear = _load("deep_cca").main(tmp_path / "figure.png", steps=50)
    assert len(usual) == 1 and np.isnan(usual[0])
    assert len(ours) == 50 and ours[-1] > 1.05 * linear > ours[0]
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_whitening_loss(tmp_path):
    ours, plain = _load("whitening_loss").main(tmp_path / "figure.png", steps=100)
    assert ours[0] < 0.3 and ours[-1] > 0.9 and max(plain) < 0.3  # chance is 1/6
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_degenerate_gradients(tmp_path):
    by_eigh, ours = _load("degenerate_gradients").main(tmp_path / "figure.png")
    assert by_eigh > 1e-2 and ours < 1e-13
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_fine_tune_with_second_order(tmp_path, monkeypatch):
    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path))
    errors = _load("fine_tune_with_second_order").main(tmp_path / "figure.png", generate=64)
    systems = ("first order", "second order", "both")
    assert list(errors) == [f"{name}, {system}" for name in ("ResNet", "ViT") for system in systems]
    assert errors["ResNet, first order"] < 60  # chance is above 80
    assert errors["ResNet, both"] < 60 and errors["ViT, both"] < 75
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_learn_a_partition(tmp_path):
    before, after = _load("learn_a_partition").main(tmp_path / "figure.png", steps=40)
    assert after < 0.6 * before
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_mean_of_ellipses(tmp_path):
    straight, curved = _load("mean_of_ellipses").main(tmp_path / "figure.png")
    ends = [torch.linalg.det(torch.diag(torch.tensor([4.0, 0.15]))).item()] * 2
    assert curved == pytest.approx((ends[0] * ends[1]) ** 0.5, rel=0.05)  # the rotation is accurate to two digits
    assert straight > 3 * curved


def test_texture_descriptors(tmp_path):
    assert _load("texture_descriptors").main(tmp_path / "figure.png") > 0.95


@pytest.mark.slow
def test_segment_photographs(tmp_path):
    _load("segment_photographs").main(tmp_path / "figure.jpg")
    with Image.open(tmp_path / "figure.jpg") as picture:
        above, below = (np.asarray(picture.crop((0, top, picture.width, top + 230))) for top in (0, 236))
    # Each region has one color: far fewer neighboring pixels differ than in the photographs.
    changes = [(np.abs(np.diff(half.astype(int), axis=1)).max(-1) > 20).mean() for half in (above, below)]
    assert 0.01 < changes[1] < 0.7 * changes[0]
