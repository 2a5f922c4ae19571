"""The comparison of enlarged and refined borders."""

from PIL import Image

from experiments.refinement import Config, main


def test_refined_borders_are_nearer_to_the_true_ones(tmp_path):
    document = main(Config(out=tmp_path / "refinement.png", size=(900, 1200), model="none"))
    assert document["refined"] < 0.8 * document["enlarged"]
    width, height = Image.open(tmp_path / "refinement.png").size
    assert width > 2 * height - 1
