"""The comparison of enlarged and refined borders."""

import numpy as np
from PIL import Image

from experiments.refinement import Config, generate_photograph, main


def test_refined_borders_are_nearer_to_the_true_ones(tmp_path):
    document = main(Config(out=tmp_path / "refinement.png", size=(900, 1200), model="none"))
    assert document["refined"] < 0.8 * document["enlarged"]
    width, height = Image.open(tmp_path / "refinement.png").size
    assert width > 2 * height - 1


def test_the_photograph_is_reproducible_and_has_four_regions():
    one, truth = generate_photograph((90, 120))
    other, _ = generate_photograph((90, 120))
    assert np.array_equal(one, other) and np.array_equal(np.unique(truth), [0, 1, 2, 3])
