"""Label maps as pictures."""

import numpy as np
import pytest

from matbackprop.errors import LabelError, ShapeError
from matbackprop.vision.inference.drawing import draw_boundaries, paint_labels


def test_painted_regions_have_distinct_hues():
    labels = np.array([[0, 0, 5, -1]] * 6)
    painted = paint_labels(labels)
    np.testing.assert_array_equal(painted[:, 3], 0)
    np.testing.assert_array_equal(painted[:, 2], np.broadcast_to(paint_labels([[5]])[0], (6, 3)))
    hues = paint_labels(np.arange(30).reshape(5, 6)).reshape(-1, 3)
    gap = np.abs(hues[:, None].astype(int) - hues[None]).sum(-1)[~np.eye(30, dtype=bool)]
    assert gap.min() > 5


def test_pictures_are_accepted_channels_first_and_last():
    image = np.zeros((3, 4, 5), dtype=np.uint8)
    image[0] = 255
    out = draw_boundaries(image, np.zeros((4, 5), dtype=int))
    np.testing.assert_allclose(out, np.broadcast_to([255, 0, 0], (4, 5, 3)))


@pytest.mark.parametrize(
    ("labels", "error"), [(np.full((4, 5), 0.5), LabelError), (np.zeros((3, 3), dtype=int), ShapeError)]
)
def test_labels_that_do_not_fit_are_rejected(labels, error):
    with pytest.raises(error):
        draw_boundaries(np.zeros((4, 5, 3)), labels)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
def test_borders_have_the_given_width_and_are_centered(width):
    labels = np.repeat([[0, 1]], 20, 0).repeat(20, 1)
    drawn = draw_boundaries(np.zeros((20, 40, 3)), labels, width=width)[10].any(-1).nonzero()[0]
    assert len(drawn) == width and abs(drawn.mean() - 19.5) <= 0.5
