"""SLIC's kernel compiled for the CPU finds scikit-image's superpixels; so does the device."""

import numpy as np
import pytest
import torch
from skimage.color import rgb2lab
from skimage.data import astronaut, coffee
from skimage.filters import gaussian
from skimage.segmentation import slic

from helpers import cuda_on_cpu
from matbackprop.vision.segmentation import rgb_to_lab, slic_superpixels, superpixels

LAUNCHER = """
extern "C" void launch_slic_assign(int blocks, int threads, const double* colours, const double* centres,
                                   const int* windows, long long* labels, int images, int height, int width, int count,
                                   double weight) {
    for (int block = 0; block < blocks; block++)
        for (int thread = 0; thread < threads; thread++) {
            blockIdx.x = block, threadIdx.x = thread, blockDim.x = threads;
            slic_assign(colours, centres, windows, labels, images, height, width, count, weight);
        }
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return cuda_on_cpu.Kernels(
        cuda_on_cpu.build(tmp_path_factory.mktemp("slic"), superpixels.SOURCE, LAUNCHER, shared=True)
    )


def pictures():
    generator = np.random.default_rng(0)
    smooth = gaussian(generator.random((90, 130, 3)), 3, channel_axis=-1)
    return {
        "astronaut": astronaut()[:321, 20:501],
        "coffee": coffee()[:300, 100:301],
        "random": (255 * (smooth - smooth.min()) / np.ptp(smooth)).astype(np.uint8),
        "floating point": smooth,
        "noise": generator.integers(0, 256, (60, 80, 3)).astype(np.uint8),
        "one colour": np.full((64, 48, 3), 77, np.uint8),
        "wide": astronaut()[100:112, :400],
    }


def tensor(picture):
    return torch.from_numpy(np.ascontiguousarray(picture)).movedim(-1, 0).unsqueeze(0)


def test_lab_against_scikit_image():
    x = torch.rand(3, 50, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = rgb2lab(x.permute(1, 2, 0).numpy())
    np.testing.assert_allclose(rgb_to_lab(x).permute(1, 2, 0).numpy(), expected, atol=1e-11)


@pytest.mark.parametrize("count", [40, 200])
@pytest.mark.parametrize("name", pictures())
def test_the_kernel_finds_the_superpixels_of_scikit_image(kernels, name, count):
    picture = pictures()[name]
    assigned = superpixels.assign_superpixels(tensor(picture), count, kernels=kernels)[0].numpy()
    options = {"n_segments": count, "compactness": 8.0, "sigma": 0.7, "start_label": 0, "channel_axis": -1}
    np.testing.assert_array_equal(assigned, slic(picture, enforce_connectivity=False, **options))
    actual = superpixels.connect_superpixels(assigned, picture, count)
    np.testing.assert_array_equal(actual, slic_superpixels(picture, count))


def test_a_batch_is_its_images_one_by_one(kernels):
    crops = [astronaut()[:90, :120], astronaut()[100:190, 200:320], coffee()[:90, :120]]
    batch = torch.cat([tensor(crop) for crop in crops])
    together = superpixels.assign_superpixels(batch, 60, kernels=kernels)
    for crop, actual in zip(crops, together, strict=True):
        assert torch.equal(actual, superpixels.assign_superpixels(tensor(crop), 60, kernels=kernels)[0])


def test_what_the_device_is_not_used_for():
    assert not superpixels.works_on(torch.zeros(3, 200, 200), 100)  # the CPU has scikit-image
    picture = astronaut()[:60, :80]
    np.testing.assert_array_equal(superpixels.slic_of(tensor(picture)[0], 30), slic_superpixels(picture, 30))


@pytest.mark.cuda
@pytest.mark.parametrize("count", [40, 200])
@pytest.mark.parametrize("name", pictures())
def test_the_device_finds_the_superpixels_of_scikit_image(name, count):
    picture = pictures()[name]
    image = tensor(picture)[0].cuda()
    assert superpixels.works_on(image, count)
    actual = superpixels.slic_of(image, count)
    expected = slic_superpixels(picture, count)
    assert np.mean(actual != expected) < 1e-3  # pixels as near to two centres as rounding can tell
    np.testing.assert_array_equal(actual, superpixels.slic_of(image, count))


@pytest.mark.cuda
def test_tiny_images_on_the_device():
    image = torch.zeros(3, 3, 50, dtype=torch.uint8, device="cuda")
    assert not superpixels.works_on(image, 20)
    np.testing.assert_array_equal(superpixels.slic_of(image, 20), slic_superpixels(np.zeros((3, 50, 3), np.uint8), 20))
