"""Synthetic images: reproducible, consistent, and readable by the loaders."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from matbackprop.errors import ConfigurationError
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.data.check import check_dataset
from matbackprop.vision.data.shapes import (
    CLASSES,
    ShapesRegions,
    ShapesSegmentation,
    write_shapes_bsds,
    write_shapes_coco,
)


def test_images_depend_on_seed_and_index_only():
    one, two = ShapesRegions(8, seed=1), ShapesRegions(3, seed=1)
    assert torch.equal(one[2].image, two[2].image)
    assert not torch.equal(one[2].image, one[1].image)
    assert not torch.equal(one[2].image, ShapesRegions(8, seed=2)[2].image)


def test_regions_are_consistent():
    data = ShapesRegions(30)
    seen = set()
    for sample in (data[i] for i in range(len(data))):
        assert sample.image.dtype == torch.uint8
        assert 1 <= len(sample.labels) == len(sample.masks) == len(sample.boxes) <= 4
        assert (sample.masks.sum(0) <= 1).all()
        for mask, (x, y, w, h) in zip(sample.masks, sample.boxes.int().tolist(), strict=True):
            assert mask.sum() >= 24
            assert mask[y : y + h, x : x + w].sum() == mask.sum()
            assert mask[:, x].any() and mask[:, x + w - 1].any() and mask[y].any() and mask[y + h - 1].any()
        seen |= set(sample.labels.tolist())
    assert seen == set(range(len(CLASSES)))


def test_label_maps_are_connected_and_annotators_differ():
    data = ShapesSegmentation(6)
    counts = []
    for sample in (data[i] for i in range(len(data))):
        counts.append([int(m.max()) + 1 for m in sample.segmentations])
        for labels in sample.segmentations:
            assert torch.equal(labels.unique(), torch.arange(int(labels.max()) + 1))
            for label in labels.unique():
                assert ndimage.label((labels == label).numpy(), np.ones((3, 3)))[1] == 1
    assert any(len(set(c)) > 1 for c in counts)


@pytest.mark.parametrize("kind", [ShapesRegions, ShapesSegmentation])
def test_bounds(kind):
    with pytest.raises(IndexError):
        kind(2)[2]
    with pytest.raises(ConfigurationError):
        kind(0)
    with pytest.raises(ConfigurationError):
        kind(1, size=(8, 64))


def test_the_coco_layout_is_right(tmp_path):
    folder = write_shapes_coco(tmp_path / "coco", train=6, val=2, seed=3)
    result = check_dataset(folder)
    assert result.good, result.problems
    assert result.counts["train images"] == 6 and result.counts["val images"] == 2
    from pycocotools.coco import COCO

    coco = COCO(folder / "annotations" / "instances_train.json")
    sample = ShapesRegions(6, seed=6)[0]
    annotations = coco.loadAnns(coco.getAnnIds(imgIds=1))
    assert len(annotations) == len(sample.labels)
    np.testing.assert_array_equal(coco.annToMask(annotations[0]), sample.masks[0].numpy())
    assert CLASSES[int(sample.labels[0])] == coco.loadCats(annotations[0]["category_id"])[0]["name"]


def test_the_bsds_layout_is_right(tmp_path):
    folder = write_shapes_bsds(tmp_path / "bsds", train=3, val=2, seed=1)
    result = check_dataset(folder)
    assert result.good, result.problems
    assert result.counts["train segmentations"] == 9
    data = BSDS(folder, "train")
    sample, made = data[1], ShapesSegmentation(3, seed=2)[1]
    assert len(sample.segmentations) == 3
    for one, two in zip(sample.segmentations, made.segmentations, strict=True):
        assert torch.equal(one, two)
    assert (sample.image.float() - made.image.float()).abs().mean() < 3  # JPEG
