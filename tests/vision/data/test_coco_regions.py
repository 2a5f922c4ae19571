"""Regions from COCO files: reading, skipped entries, and placement on the canvas."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from matbackprop.errors import DataError
from matbackprop.vision.data import coco_regions as cr
from matbackprop.vision.data.coco import coco_files, decode_mask, read_coco, region_window
from matbackprop.vision.models.backbones.base import normalize
from matbackprop.vision.training.config import RegionDataConfig
from matbackprop.vision.training.regions import region_sets

HEIGHT, WIDTH = 40, 60


def pixels_of(seed):
    return np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def rectangle(x, y, w, h):
    return [[x, y, x + w, y, x + w, y + h, x, y + h]]


def run_lengths(mask):
    code = coco_mask.encode(np.asfortranarray(mask))
    return {"size": code["size"], "counts": code["counts"].decode()}


def uncompressed(mask):
    flat = mask.flatten(order="F")
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *changes, len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": ([0, *counts] if flat[0] else counts)}


def annotation(number, image, category, box, segmentation, **more):
    area = box[2] * box[3] if box else 0
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": box,
        "area": area,
        "iscrowd": 0,
        "segmentation": segmentation,
    } | more


@pytest.fixture
def coco(tmp_path):
    """A folder in COCO's layout with three images; write(annotations, …) writes the annotation file."""
    root = tmp_path / "coco"
    for split in ("train", "val"):
        (root / "images" / split).mkdir(parents=True)
        for i in range(1, 4):
            Image.fromarray(pixels_of(i)).save(root / "images" / split / f"{i}.png")
    (root / "annotations").mkdir()

    def write(annotations, split="train", categories=((3, "cat"), (7, "dog"), (9, "owl"))):
        content = {
            "images": [{"id": i, "file_name": f"{i}.png", "height": HEIGHT, "width": WIDTH} for i in range(1, 4)],
            "categories": [{"id": i, "name": n} for i, n in categories],
            "annotations": annotations,
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
        return coco_files(root, split)

    write.root = root
    return write


def test_files_are_found_in_the_official_layout_too(tmp_path):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_val2017.json").write_text("{}")
    (tmp_path / "val2017").mkdir()
    assert coco_files(tmp_path, "val") == (
        tmp_path / "annotations" / "instances_val2017.json",
        tmp_path / "val2017",
    )
    with pytest.raises(DataError, match=r"instances_train\.json"):
        coco_files(tmp_path, "train")


def test_all_three_kinds_of_masks_decode_alike():
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[5:15, 10:30] = 1
    for code in (rectangle(10, 5, 20, 10), run_lengths(mask), uncompressed(mask)):
        np.testing.assert_array_equal(decode_mask(code, HEIGHT, WIDTH), mask)
    assert not decode_mask([[1, 1, 2, 2]], HEIGHT, WIDTH).any()  # two points enclose nothing


def test_unusable_regions_are_skipped(coco, tmp_path):
    good = rectangle(5, 5, 10, 20)
    files = coco(
        [
            annotation(1, 1, 3, [5, 5, 10, 20], good),
            annotation(2, 1, 7, [0, 0, 40, 30], rectangle(0, 0, 40, 30), iscrowd=1),
            annotation(3, 2, 99, [5, 5, 10, 20], good),  # unknown category
            annotation(4, 2, 7, [5, 5, 10, 20], []),  # no mask
            annotation(5, 2, 7, [100, 100, 10, 20], good),  # outside
            annotation(6, 3, 7, [30, 30, 5, 5], good),  # disjoint box and mask
            annotation(8, 77, 7, [0, 0, 20, 20], good),  # no such image
            annotation(9, 3, 7, [50, 30, 30, 30], rectangle(50, 30, 9, 9)),  # reaches out of the image: clipped
        ]
    )
    regions = cr.cache_regions(*files, tmp_path / "cache", side=20)
    assert regions.annotation_ids.tolist() == [1, 9]
    assert regions.labels.tolist() == [0, 1]
    assert regions.sizes.tolist() == [[20, 10], [20, 20]]  # the second one is clipped to 10×10 pixels
    assert read_coco(*files).skipped == {"crowd": 1, "empty mask": 1}


def test_missing_and_corrupt_images_raise(coco, tmp_path):
    files = coco([annotation(i, i, 3, [5, 5, 10, 20], rectangle(5, 5, 10, 20)) for i in (1, 2)])
    (files[1] / "3.png").unlink()  # has no region
    assert len(cr.cache_regions(*files, tmp_path / "cache", side=20)) == 2
    (files[1] / "1.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"1\.png is not an image"):
        cr.cache_regions(*files, tmp_path / "cache", side=21)
    (files[1] / "2.png").unlink()
    with pytest.raises(DataError, match=r"1 images cannot be used: .*2\.png: is missing"):
        cr.cache_regions(*files, tmp_path / "cache", side=22)


def test_an_image_of_another_size_than_the_annotations_say_is_reported(coco, tmp_path):
    files = coco([annotation(1, 1, 3, [5, 5, 10, 20], rectangle(5, 5, 10, 20))])
    Image.fromarray(pixels_of(1)[:30]).save(files[1] / "1.png")
    with pytest.raises(DataError, match=r"1\.png has 30×60 pixels, but the annotations specify 40×60"):
        cr.cache_regions(*files, tmp_path / "cache", side=20)
    assert not list((tmp_path / "cache").glob("regions-*"))  # no half-written file


def test_files_without_usable_regions_and_with_ambiguous_categories_are_rejected(coco, tmp_path):
    with pytest.raises(DataError, match="has no usable region"):
        cr.cache_regions(*coco([]), tmp_path / "cache", side=20)
    with pytest.raises(DataError, match="category 3 is listed twice"):
        read_coco(*coco([], categories=[(3, "cat"), (3, "dog")]))


def test_category_lists_that_differ_are_reported(coco, tmp_path):
    one = [annotation(1, 1, 3, [5, 5, 10, 20], rectangle(5, 5, 10, 20))]
    coco(one)
    coco(one, "val", categories=[(3, "cat"), (7, "hound"), (9, "owl")])
    with pytest.raises(DataError, match=r'val\.json have different categories, for example \[7, "dog"\]'):
        region_sets(RegionDataConfig(root=coco.root, cache=tmp_path / "cache", side=20))


def test_the_cache_is_reused_and_rebuilt_for_other_settings(coco, tmp_path, monkeypatch):
    files = coco([annotation(1, 1, 3, [5, 5, 10, 20], rectangle(5, 5, 10, 20))])
    first = cr.cache_regions(*files, tmp_path / "cache", side=20)
    monkeypatch.setattr(cr, "_crop_all", None)  # would fail if it were called
    again = cr.cache_regions(*files, tmp_path / "cache", side=20)
    np.testing.assert_array_equal(first.pixels, again.pixels)
    for other in ({"side": 24}, {"side": 20, "margin": 0.5}):
        with pytest.raises(TypeError):
            cr.cache_regions(*files, tmp_path / "cache", **other)


def test_a_crop_keeps_colors_proportions_and_the_mask_by_area():
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    image[10:20, 20:40] = (10, 200, 30)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[10:20, 20:30] = 1
    crop = cr.crop_region(image, mask, region_window(mask, (20, 10, 20, 10)), side=40)
    assert crop.shape == (20, 40, 4)
    assert (crop[..., :3] == (10, 200, 30)).all()
    assert (crop[:, :18, 3] == 255).all() and (crop[:, 22:, 3] == 0).all()
    assert crop[..., 3].mean() == pytest.approx(255 / 2, rel=0.02)
    own_box = cr.crop_region(image, mask, region_window(mask, None), side=40)
    assert own_box.shape == (40, 40, 4) and (own_box[..., 3] == 255).all()
    assert region_window(mask * 0, None) is None and region_window(mask, (-30, 10, 20, 10)) is None
    assert region_window(mask, (-3.5, -2.0, 30, 20)) == (slice(0, 18), slice(0, 27))  # clipped at 0, not wrapped around


def test_a_margin_is_clipped_at_the_image():
    image = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[2:12, 20:40] = 1
    crop = cr.crop_region(image, mask, region_window(mask, None), side=30, margin=0.25)
    np.testing.assert_array_equal(crop[..., :3], image[0:17, 15:45])  # 5 pixels more, of which 3 lie outside
    np.testing.assert_array_equal(crop[..., 3], 255 * mask[0:17, 15:45])


def reference_placement(region, canvas, placement, background):
    """Place one region with NumPy; the image before normalization is NaN outside the region."""
    height, width = region.shape[:2]
    down, right, flip = placement
    source = region[:, ::-1] if flip else region
    image = np.full((canvas, canvas, 3), np.nan, np.float32)
    mask = np.zeros((canvas, canvas), np.float32)
    for y in range(height):
        for x in range(width):
            to = (canvas - height) // 2 + down + y, (canvas - width) // 2 + right + x
            if 0 <= to[0] < canvas and 0 <= to[1] < canvas:
                image[to] = source[y, x, :3] / 255
                mask[to] = source[y, x, 3] / 255
    seen = normalize(torch.from_numpy(image).permute(2, 0, 1)).nan_to_num(0.0)
    weight = {"keep": 1.0, "mask": torch.from_numpy(mask)}
    return seen * weight[background], mask


@pytest.mark.parametrize("background", ["keep", "mask"])
def test_placement_equals_the_one_done_by_hand(background):
    draw = np.random.default_rng(0)
    sizes = np.array([[20, 13], [7, 20], [20, 20]])
    store = np.zeros((3, 20, 20, 4), np.uint8)
    for i, (h, w) in enumerate(sizes):
        store[i, :h, :w] = draw.integers(0, 256, (h, w, 4))
    placement = np.array([[2, -1, 0], [-3, 3, 1], [6, 6, 1]])  # the last one is cut off at the border
    image, mask = cr.place_regions(
        torch.from_numpy(store),
        torch.from_numpy(sizes),
        torch.from_numpy(placement),
        canvas=27,
        background=background,
    )
    for i, (h, w) in enumerate(sizes):
        expected, expected_mask = reference_placement(store[i, :h, :w], 27, placement[i], background)
        torch.testing.assert_close(image[i], expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(mask[i], torch.from_numpy(expected_mask))
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_placements_depend_on_seed_and_epoch_only():
    one = cr.draw_placements(500, seed=1, epoch=2, jitter=4, flip=True)
    np.testing.assert_array_equal(one, cr.draw_placements(500, seed=1, epoch=2, jitter=4, flip=True))
    assert (one != cr.draw_placements(500, seed=1, epoch=3, jitter=4, flip=True)).any()
    assert one[:, :2].min() == -4 and one[:, :2].max() == 4 and set(one[:, 2]) == {0, 1}
    assert not cr.draw_placements(50, seed=1, epoch=2, jitter=4, flip=False)[:, 2].any()


@pytest.fixture
def regions(coco, tmp_path):
    actual = [annotation(i, 1 + i % 3, (3, 7)[i % 2], [i, 5, 10, 20], rectangle(i, 5, 8, 8)) for i in range(12)]
    return cr.cache_regions(*coco(actual), tmp_path / "cache", side=20)


def test_batches_contain_the_regions_of_their_items(regions):
    source = cr.RegionSource(regions, np.arange(2, 12), seed=3, jitter=2, flip=True)
    batch = source.fetch(torch.tensor([7, 0, 3]), 5)
    assert batch.regions.tolist() == [9, 2, 5]
    assert batch.target.tolist() == regions.labels[[9, 2, 5]].tolist()
    np.testing.assert_array_equal(batch.pixels, regions.pixels[[9, 2, 5]])
    placed = cr.place_batch(batch, 27, "keep")
    expected = cr.place_regions(batch.pixels, batch.sizes, batch.placement, canvas=27)
    torch.testing.assert_close(tuple(placed[2:]), expected)
    still = cr.RegionSource(regions, np.arange(12))
    assert not any(still.fetch(torch.arange(12), epoch).placement.any() for epoch in (0, 1))


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pixels.bin", shorten),
        ("table.npy", shorten),
        ("meta.json", shorten),
        *((name, lambda path: path.unlink()) for name in ("pixels.bin", "table.npy", "meta.json")),
        *(
            ("meta.json", lambda path, text=text: path.write_text(text))
            for text in ("[]", '{"side": 3}', "[" * 100_000)
        ),
        ("table.npy", lambda path: np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)),
    ],
)
def test_a_corrupt_cache_is_one_clear_error(regions, name, change):
    assert isinstance(regions.pixels, np.memmap) and not regions.pixels.flags.writeable
    change(regions.path / name)
    with pytest.raises(DataError, match=r"is damaged .*Remove the folder"):
        cr.Regions(regions.path)


@pytest.mark.data
def test_region_counts_of_the_development_set(data_root):
    for split, count, images in (("train", 18951, 2712), ("val", 4535, 659)):
        index = read_coco(*coco_files(data_root / "coco", split))
        assert sum(len(i.regions) for i in index.images) == count
        assert sum(bool(i.regions) for i in index.images) == images
        assert len(index.categories) == 80 and not index.problems and not index.skipped
