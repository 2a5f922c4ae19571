"""Synthetic images: reproducible, consistent, and readable by the loaders."""

import numpy as np
import torch
from scipy import ndimage

from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.data.check import check_dataset
from matbackprop.vision.data.shapes import (
    CLASSES,
    draw_regions,
    draw_segmentation,
    write_shapes_bsds,
    write_shapes_coco,
)


def test_images_depend_on_seed_and_index_only():
    image = draw_regions(2, seed=1).image
    assert torch.equal(image, draw_regions(2, seed=1).image)
    assert not torch.equal(image, draw_regions(1, seed=1).image)
    assert not torch.equal(image, draw_regions(2, seed=2).image)


def test_regions_are_consistent():
    seen = set()
    for sample in map(draw_regions, range(30)):
        assert sample.image.dtype == torch.uint8
        assert 1 <= len(sample.labels) == len(sample.masks) <= 4
        assert (sample.masks.sum(0) <= 1).all() and all(mask.sum() >= 24 for mask in sample.masks)
        seen |= set(sample.labels.tolist())
    assert seen == set(range(len(CLASSES)))


def test_label_maps_are_connected_and_annotators_differ():
    counts = []
    for sample in map(draw_segmentation, range(6)):
        counts.append([int(m.max()) + 1 for m in sample.segmentations])
        for labels in sample.segmentations:
            assert torch.equal(labels.unique(), torch.arange(int(labels.max()) + 1))
            for label in labels.unique():
                assert ndimage.label((labels == label).numpy(), np.ones((3, 3)))[1] == 1
    assert any(len(set(c)) > 1 for c in counts)


def test_the_coco_layout_is_right(tmp_path):
    folder = write_shapes_coco(tmp_path / "coco", train=6, val=2, seed=3)
    result = check_dataset(folder)
    assert not result.problems
    assert result.counts["train images"] == 6 and result.counts["val images"] == 2
    from pycocotools.coco import COCO

    coco = COCO(folder / "annotations" / "instances_train.json")
    sample = draw_regions(0, seed=6)
    annotations = coco.loadAnns(coco.getAnnIds(imgIds=1))
    assert len(annotations) == len(sample.labels)
    mask = sample.masks[0].numpy()
    np.testing.assert_array_equal(coco.annToMask(annotations[0]), mask)
    x, y, w, h = map(int, annotations[0]["bbox"])
    assert mask[y : y + h, x : x + w].sum() == mask.sum()
    assert mask[:, x].any() and mask[:, x + w - 1].any() and mask[y].any() and mask[y + h - 1].any()
    assert CLASSES[int(sample.labels[0])] == coco.loadCats(annotations[0]["category_id"])[0]["name"]


def test_the_bsds_layout_is_right(tmp_path):
    folder = write_shapes_bsds(tmp_path / "bsds", train=3, val=2, seed=1)
    result = check_dataset(folder)
    assert not result.problems
    assert result.counts["train segmentations"] == 9
    data = BSDS(folder, "train")
    sample, made = data[1], draw_segmentation(1, seed=2)
    assert len(sample.segmentations) == 3
    for one, two in zip(sample.segmentations, made.segmentations, strict=True):
        assert torch.equal(one, two)
    assert (sample.image.float() - made.image.float()).abs().mean() < 3  # JPEG
