"""Figures show the data."""

import numpy as np
from PIL import Image

from matbackprop.vision.report import figures


def _rows(n=12):
    steps = [{"step": i, "epoch": 0, "time": 10.0 + i, "train/loss": 1 / (1 + i), "val/loss": None} for i in range(n)]
    last = {"step": n, "epoch": 1, "time": 99.0, "val/loss": 0.25, "layer/rank": 7, "note": "text", "flag": True}
    return [*steps, last]


def test_curves_contain_the_points_of_each_name():
    fig = figures.curves(_rows())
    loss, rank = (ax for ax in fig.axes if ax.get_visible())
    drawn = {line.get_label(): line.get_xydata() for line in loss.lines}
    np.testing.assert_allclose(drawn["train"][:, 1], [1 / (1 + i) for i in range(12)])
    np.testing.assert_allclose(drawn["val"], [[12, 0.25]])
    assert (loss.get_title(loc="left"), rank.get_title(loc="left")) == ("loss", "layer rank")


def test_curves_have_a_logarithmic_axis_only_for_a_wide_positive_range():
    wide = [{"step": i, "layer/eigen_max": 10.0**i} for i in range(5)]
    crossing = [{"step": i, "layer/eigen_min": 10.0**i - 5} for i in range(5)]
    assert figures.curves(wide).axes[0].get_yscale() == "log"
    assert figures.curves(crossing).axes[0].get_yscale() == "linear"


def test_long_curves_have_a_running_mean():
    rows = [{"step": i, "train/loss": float(i)} for i in range(500)]
    faint, smooth = figures.curves(rows).axes[0].lines
    np.testing.assert_allclose(smooth.get_ydata()[10:-10], faint.get_ydata()[10:-10])


def test_confusion_matrix_shows_fractions_of_rows_and_accepts_an_empty_class():
    fig = figures.confusion_matrix([[3, 1], [0, 0]], ["a", "b"])
    np.testing.assert_allclose(fig.axes[0].images[0].get_array(), [[0.75, 0.25], [0, 0]])


def test_regions_have_the_colors_of_the_regions_that_they_overlap():
    truth = np.repeat([[0, 1, 2]], 6, 0).repeat(4, 1)
    actual = np.choose(truth, [7, 3, 5])
    actual[:, 0] = 9  # a region that is not in the ground truth
    matched = figures.match_labels(actual, truth)
    np.testing.assert_array_equal(matched[:, 1:], truth[:, 1:])
    assert set(matched[:, 0]) == {3}
    fig = figures.segmentation_grid(["ours", "human"], [[actual, truth]])
    ours, human = (ax.images[0].get_array() for ax in fig.axes)
    np.testing.assert_array_equal(ours[3, [2, 6, 10]], human[3, [2, 6, 10]])
    assert (ours[3, 0] != human[3, 0]).any()


def test_the_segmentation_grid_has_a_title_for_each_column(tmp_path):
    photo, labels = np.full((12, 16, 3), 0.5), np.repeat([[0, 1]], 12, 0).repeat(8, 1)
    columns = ["Image", "NCuts", "DeepNCuts", "Human"]
    tall = np.full((24, 16, 3), 0.5)
    fig = figures.segmentation_grid(columns, [[photo, labels, labels, None], [tall] * 4], tmp_path / "grid.png")
    assert [ax.get_title() for ax in fig.axes if ax.get_title()] == columns
    with Image.open(tmp_path / "grid.png") as file:
        assert file.width > 1000 and file.height > file.width / 2


def test_mathematical_signs_have_a_glyph(tmp_path):
    figures.lines({"‖Π_λ − Π_Ψ‖², J₂, Fᵀ, ½, ∂": ([1, 2], [1, 2])}, tmp_path / "signs.png")
    assert (tmp_path / "signs.png").exists()  # a missing glyph is a warning, and warnings are errors here


def test_order_of_panels():
    row = {"train/gradient_norm": 1, "train/steps_per_second": 2, "layer/rank": 3, "val/error": 4, "train/loss": 5}
    assert list(figures.curve_panels([row])) == ["loss", "error", "gradient norm", "layer rank", "steps per second"]
