"""Segmenting sets of files gives the maps of single images, in any process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from matbackprop.errors import DataError
from matbackprop.vision.inference import image_sets
from matbackprop.vision.inference.image_sets import segment_files
from matbackprop.vision.inference.segmenting import segment_photograph
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.workers import Workers


def picture(h, w, seed):
    tiles = torch.rand(1, 3, 6, 8, generator=torch.Generator().manual_seed(seed))
    image = torch.nn.functional.interpolate(tiles, size=(h, w), mode="bicubic").clamp(0, 1)[0]
    return (image * 255).byte()


def keep(segments, stem):
    """Reduce a result for comparison; a module-level function, so that it can be pickled."""
    return stem, segments.name, segments.network, segments.labels(3), segments.hierarchy.heights


@pytest.fixture
def files(tmp_path):
    jobs = []
    for n, (h, w) in enumerate([(48, 64), (64, 48), (48, 64), (200, 300), (48, 64), (64, 48), (48, 64), (48, 64)]):
        path = tmp_path / f"{n}.png"
        Image.fromarray(picture(h, w, n).permute(1, 2, 0).numpy()).save(path)
        jobs.append((path, f"stem{n}"))
    (tmp_path / "bad.png").write_text("no picture")
    jobs.insert(3, (tmp_path / "bad.png", "bad"))
    return jobs


def contour_network():
    torch.manual_seed(0)
    return ContourNet(backbone="alexnet", taps=("relu1", "relu5"), zoom=1.0, width=12, stem=6).eval()


@pytest.mark.parametrize("model", [None, contour_network()], ids=["none", "contours"])
def test_files_are_segmented_like_single_images_and_bad_ones_are_reported(files, model):
    results = dict(segment_files(files, model, keep, side=100))
    compare(results, files, model)


@pytest.mark.slow
def test_batches_and_processes_give_the_maps_of_single_images(files):
    model = contour_network()
    with Workers(2).start(image_sets.MODULES) as pool:
        results = dict(segment_files(files, model, keep, side=100, pool=pool, batch_size=3))
    compare(results, files, model)


def test_worker_processes_do_not_import_torch():
    program = f"import importlib, sys; [importlib.import_module(name) for name in {image_sets.MODULES}]"
    subprocess.run([sys.executable, "-c", f"{program}; assert 'torch' not in sys.modules"], check=True)


def compare(results, files, model):
    assert len(results) == 9
    for path, stem in files:
        if stem == "bad":
            assert isinstance(results[path], DataError)
            continue
        expected = segment_photograph(path, model, side=100)
        actual = results[path]
        assert actual[:3] == (stem, path.name, model is not None)
        np.testing.assert_allclose(actual[4], expected.hierarchy.heights, atol=1e-5)
        assert (actual[3] == expected.labels(3)).mean() > 0.95  # batches may round differently


def test_files_are_segmented_at_several_scales_and_mirrored_like_single_images(files):
    model, options = contour_network(), {"side": 100, "scales": (0.5, 1.0), "mirror": True}
    path, *_ = files[0]
    results = dict(segment_files(files[:3], model, keep, **options))
    expected = segment_photograph(path, model, **options)
    np.testing.assert_allclose(results[path][4], expected.hierarchy.heights, atol=1e-5)


def test_few_pictures_are_in_memory_and_closing_early_keeps_results(files):
    started = []

    def count(segments, stem):
        started.append(stem)
        return stem

    results = segment_files(files * 4, None, count, side=100)
    first = next(results)
    results.close()
    assert first[1] == "stem0" and len(started) <= 20
    assert isinstance(first[0], Path)
