"""Regions in the formats of other programs hold the same pixels."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy.ndimage import label

from matbackprop.errors import ConfigurationError
from matbackprop.vision.data.label_files import read_label_maps
from matbackprop.vision.inference import segment
from matbackprop.vision.inference.export import FORMATS, merge_coco, outlines


def filled(loops, shape):
    """Pixels inside closed outlines by the even-odd rule: count the edges to the left of a pixel's middle."""
    crossings = np.zeros(shape, dtype=int)
    for loop in loops:
        for (x0, y0), (x1, y1) in zip(loop, np.roll(loop, -1, 0), strict=True):
            assert (x0 == x1) != (y0 == y1)
            if x0 == x1:
                crossings[min(y0, y1) : max(y0, y1), x0:] += 1
    return crossings % 2 == 1


def signed_area(loop):
    x, y = np.asarray(loop, dtype=float).T
    return 0.5 * (x @ np.roll(y, -1) - y @ np.roll(x, -1))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (7, 5), (16, 23)])
def test_outlines_enclose_exactly_their_region(shape, seed):
    labels = np.random.default_rng(seed).integers(0, 3, shape)
    labels = np.unique(labels, return_inverse=True)[1].reshape(shape)
    for region, loops in enumerate(outlines(labels)):
        mask = labels == region
        np.testing.assert_array_equal(filled(loops, shape), mask)
        areas = [signed_area(loop) for loop in loops]
        assert sum(areas) == mask.sum()
        assert sum(area > 0 for area in areas) == label(mask)[1]  # one clockwise loop per 4-connected part


def test_a_ring_has_an_outline_and_a_hole():
    labels = np.ones((5, 6), int)
    labels[1:4, 1:5] = 0
    outer, hole = sorted(outlines(labels)[1], key=signed_area, reverse=True)
    assert outer.tolist() == [[0, 0], [6, 0], [6, 5], [0, 5]]
    assert signed_area(hole) == -12 and len(hole) == 4


@pytest.fixture(scope="module")
def result():
    rng = np.random.default_rng(0)
    picture = np.zeros((60, 90, 3), np.uint8)
    picture[:, 45:] = (220, 120, 30)
    picture[20:40, 10:30] = (20, 60, 200)
    return segment((picture + rng.integers(0, 9, picture.shape)).astype(np.uint8), side=45)


def test_coco_holds_exact_masks_boxes_and_areas(result):
    coco = pytest.importorskip("pycocotools.mask")
    labels, document = result.labels(5), json.loads(json.dumps(result.to_coco(5)))
    assert document["images"] == [{"id": 1, "file_name": "picture.png", "width": 90, "height": 60}]
    assert len(document["annotations"]) == 5
    for region, annotation in enumerate(document["annotations"]):
        code = annotation["segmentation"]
        np.testing.assert_array_equal(coco.decode(code), labels == region)
        assert annotation["area"] == (labels == region).sum()
        assert annotation["bbox"] == coco.toBbox(code).tolist()


def test_a_region_over_whole_columns_has_its_whole_box():
    picture = np.zeros((20, 30, 3), np.uint8)
    picture[:, 15:] = 255
    left, right = segment(picture, model=None).to_coco(2)["annotations"]
    assert left["bbox"][1::2] == right["bbox"][1::2] == [0, 20]
    assert left["bbox"][2] + right["bbox"][2] == 30


def test_labelme_polygons_painted_in_order_give_the_regions(result):
    document = json.loads(json.dumps(result.to_labelme(4)))
    assert (document["imageHeight"], document["imageWidth"], document["imagePath"]) == (60, 90, "picture.png")
    canvas = Image.new("L", (90, 60), 255)
    for shape in document["shapes"]:
        assert shape["shape_type"] == "polygon"
        points = [(x - 0.5, y - 0.5) for x, y in shape["points"]]
        ImageDraw.Draw(canvas).polygon(points, fill=shape["group_id"] - 1)
    assert (np.asarray(canvas) == result.labels(4)).mean() > 0.97  # Pillow also paints some pixels on the border


def test_svg_has_a_path_per_region_in_its_mean_color(result):
    root = ElementTree.fromstring(result.to_svg(3))
    assert root.get("viewBox") == "0 0 90 60" and len(root) == 3
    labels = result.labels(3)
    for region, path in enumerate(root):
        mean = result.pixels[labels == region].mean(0)
        fill = [int(path.get("fill")[i : i + 2], 16) for i in (1, 3, 5)]
        np.testing.assert_allclose(fill, mean, atol=0.51)
        loops = [
            np.array([[round(float(v)) for v in point.split(",")] for point in part.rstrip("Z").split("L")])
            for part in path.get("d").split("M")[1:]
        ]
        np.testing.assert_array_equal(filled(loops, (60, 90)), labels == region)


def test_every_format_is_written_and_the_tree_restores_the_levels(result, tmp_path):
    paths = result.save(tmp_path / "out", 3, formats=FORMATS, stem="photo")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in paths.values())
    ends = {p.name.removeprefix("photo") for p in paths.values()}
    assert ends == {".png", "-colors.png", "-overlay.png", "-contours.png", ".npz", "-coco.json", ".json", ".svg",
                    "-ucm2.mat"}  # fmt: skip
    strengths = np.asarray(Image.open(paths["contours"])) / 255
    np.testing.assert_allclose(strengths, result.contours.astype(float), atol=0.003)
    saved = np.load(paths["levels"])
    tree = type(result.hierarchy)(len(saved["merges"]) + 1, saved["merges"], saved["heights"])
    small = tree.levels([6])[0][saved["regions"]]
    np.testing.assert_array_equal(small, result.small_labels(6))
    maps = read_label_maps(paths["levels"])  # as the evaluator reads it
    assert len(maps) == len(result.ks) and maps[0].shape == (60, 90)
    contours = read_label_maps(paths["ucm2"], thresholds=9)
    assert [len(np.unique(m)) for m in contours] == [tree.regions_at(height) for height in np.arange(1, 10) / 10]
    assert len(np.unique(contours[-1] + 2 * result.small_labels(2))) == 2
    with pytest.raises(ConfigurationError, match="no contour map"):
        dataclasses.replace(result, hierarchy=None).save(tmp_path, formats=("ucm2",))
    with pytest.raises(ConfigurationError, match="have no contours"):
        dataclasses.replace(result, contours=None).save(tmp_path, formats=("contours",))
    with pytest.raises(ConfigurationError, match=r"Unknown format gif\. Formats: png"):
        result.save(tmp_path, formats=("gif",))


def test_notebooks_show_a_small_picture(result):
    import io

    picture = Image.open(io.BytesIO(result._repr_png_()))
    assert picture.format == "PNG" and picture.size == (90, 60)


def test_show_draws_both_pictures(result, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("agg")
    result.show(3)
    (picture,) = plt.gca().images
    assert picture.get_array().shape == (60, 180, 3) and "3 regions" in plt.gca().get_title()
    plt.close("all")


def test_many_regions_are_written(tmp_path, result):
    many = np.arange(300 * 300, dtype=np.int32).reshape(300, 300)
    noise = dataclasses.replace(result, pixels=np.zeros((300, 300, 3), np.uint8)).with_regions(many)
    (path,) = noise.save(tmp_path, formats=["npz"]).values()
    np.testing.assert_array_equal(np.load(path)["labels"][0], noise.labels())
    with pytest.raises(ConfigurationError, match="90000 regions do not fit into a 16-bit PNG file"):
        noise.save(tmp_path, formats=["png"])


def test_labelme_files_reference_the_picture(tmp_path):
    (tmp_path / "photos").mkdir()
    path = tmp_path / "photos" / "a.png"
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(path)
    (file,) = segment(path, None).save(tmp_path / "out" / "deep", formats=["labelme"]).values()
    target = json.loads(file.read_text())["imagePath"]
    assert target == "../../photos/a.png" and (file.parent / target).resolve() == path.resolve()


def test_coco_files_of_a_folder_are_joined(tmp_path, result):
    names = ["sky"] * result.count()
    files = [
        one.with_regions(one.small_labels(), names if i else ()).save(tmp_path, formats=["coco"], stem=str(i))["coco"]
        for i, one in enumerate([result, result])
    ]
    joined = merge_coco(files)
    count = result.count()
    assert [image["id"] for image in joined["images"]] == [1, 2] and len(joined["annotations"]) == 2 * count
    assert [c["name"] for c in joined["categories"]] == ["region", "sky"]
    assert {a["category_id"] for a in joined["annotations"] if a["image_id"] == 2} == {2}
    assert len({a["id"] for a in joined["annotations"]}) == 2 * count
