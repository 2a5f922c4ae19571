"""Classifying regions of one image, from Python and from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import matbackprop
from matbackprop.cli import main
from matbackprop.errors import DataError, ShapeError
from matbackprop.vision.data.coco import coco_files, decode_mask, read_coco
from matbackprop.vision.data.coco_regions import RegionSource, cache_regions, place_batch
from matbackprop.vision.data.shapes import write_shapes_coco
from matbackprop.vision.inference import classify_regions, load_classifier, loading
from matbackprop.vision.models.deep_o2p import RegionClassifier

NAMES = ["a", "b", "c"]
MODEL = {"head": "o2p", "canvas": 227, "taps": ("relu5",), "reduce": 4, "support": "mask", "names": NAMES}
MODEL |= {"background": "mask"}


@pytest.fixture(scope="module")
def model():
    return build(**MODEL)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes_coco(tmp_path_factory.mktemp("shapes") / "coco", train=3, val=1, seed=1)


def picture(path):
    return np.asarray(Image.open(path).convert("RGB"))


def build(**options):
    torch.manual_seed(0)
    model = RegionClassifier(3, **options)
    torch.nn.init.normal_(model.classifier.weight)
    return model.eval()


@pytest.mark.parametrize(
    ("options", "cropped", "placed"),
    [
        (MODEL, {"side": 200}, (227, "mask")),
        (
            {"head": "fc", "average": True, "canvas": 99, "side": 90, "background": "keep", "margin": 0.3},
            {"side": 90, "margin": 0.3},
            (99, "keep"),
        ),
        ({"head": "o2p", "canvas": 67, "reduce": 4, "side": 50}, {"side": 50}, (67, "keep")),
    ],
    ids=["default", "margin", "size"],
)
def test_predictions_equal_those_of_the_training_pipeline(shapes, tmp_path, options, cropped, placed):
    model = build(**options)
    files = coco_files(shapes, "train")
    regions = cache_regions(*files, tmp_path, **cropped)
    source = RegionSource(regions, np.arange(len(regions)))
    batch = place_batch(source.fetch(torch.arange(len(regions)), 0), *placed)
    with torch.no_grad():
        expected = model(batch.image, batch.mask).softmax(-1)
    model.save_pretrained(tmp_path / "model")
    for one in (model, load_classifier(tmp_path / "model", "cpu")):
        got = []
        for entry in read_coco(*files).images:
            masks = [decode_mask(r.segmentation, entry.height, entry.width) for r in entry.regions]
            got.append(classify_regions(one, picture(entry.path), [r.box for r in entry.regions], masks))
        torch.testing.assert_close(torch.cat(got), expected, rtol=1e-4, atol=1e-5)


def test_the_whole_image_is_one_region_by_default(model):
    image = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    whole = classify_regions(model, image)
    assert whole.shape == (1, 3) and whole.sum() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(whole, classify_regions(model, image, [(0, 0, 60, 40)]))
    torch.testing.assert_close(whole, classify_regions(model, image, masks=[np.ones((40, 60))]))
    assert classify_regions(model, image, []).shape == (0, 3)


def test_regions_that_cannot_be_classified_are_reported(model):
    image = np.zeros((40, 60, 3), np.uint8)
    with pytest.raises(DataError, match="Region 1 is empty or outside the image of 60×40"):
        classify_regions(model, image, [(0, 0, 5, 5), (100, 0, 5, 5)])
    with pytest.raises(DataError, match="Region 0 is empty"):
        classify_regions(model, image, masks=[np.zeros((40, 60))])
    with pytest.raises(ShapeError, match="2 boxes and 1 masks"):
        classify_regions(model, image, [(0, 0, 5, 5)] * 2, [None])
    with pytest.raises(ShapeError, match="mask 0 must have the shape"):
        classify_regions(model, image, masks=[np.ones((4, 6))])


def test_one_line_names_the_regions_of_a_picture_file(model, shapes, tmp_path):
    model.save_pretrained(tmp_path / "model")
    path = sorted((shapes / "images" / "train").iterdir())[0]
    (answer,) = matbackprop.classify(path, [(0, 0, 20, 20)], model=str(tmp_path / "model"), device="cpu")
    expected = classify_regions(model, picture(path), [(0, 0, 20, 20)])[0]
    assert answer == pytest.approx(dict(zip(NAMES, expected.tolist(), strict=True)), abs=1e-5)
    assert next(iter(answer)) == NAMES[int(expected.argmax())]


def test_regions_as_labels_boxes_masks_or_segments(model):
    photo = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    labels = np.full((40, 60), -1)
    labels[:20, :30], labels[20:, 30:] = 0, 4
    masks = [labels == 0, labels == 4]
    expected = classify_regions(model, photo, masks=masks)
    for regions in (labels, torch.from_numpy(labels), masks, np.stack(masks), [m.astype(float) for m in masks]):
        got = matbackprop.classify(photo, regions, model=model)
        assert [list(one) for one in got] == [[NAMES[i] for i in row.argsort(descending=True)] for row in expected]
        np.testing.assert_allclose([one[NAMES[0]] for one in got], expected[:, 0], rtol=1e-6)
    assert len(matbackprop.classify(photo, masks[0], model=model)) == 1
    segments = matbackprop.segment(photo, None)
    assert len(matbackprop.classify(photo, segments, model=model)) == segments.labels().max() + 1
    assert matbackprop.classify(photo, [], model=model) == []


@pytest.mark.parametrize("regions", [np.zeros(3), [(0, 0, 5)], "everything", [np.ones((40, 60)), (0, 0, 5, 5)], 7])
def test_invalid_regions_are_rejected(model, regions):
    with pytest.raises(ShapeError, match="regions must be a result of segment"):
        matbackprop.classify(np.zeros((40, 60, 3), np.uint8), regions, model=model)
    with pytest.raises(ShapeError, match="Pass a classifier as model="):
        matbackprop.classify(np.zeros((40, 60, 3), np.uint8), model)


def run(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(["classify", *map(str, words)])
    return stop.value.code, capsys.readouterr()


def test_the_command_line_names_boxes_masks_and_annotated_regions(model, shapes, tmp_path, capsys):
    model.save_pretrained(tmp_path / "run" / "model")
    path = sorted((shapes / "images" / "train").iterdir())[0]
    height, width = picture(path).shape[:2]
    code, said = run(capsys, path, "--model", tmp_path / "run", "--boxes", "0,0,20,20", "5,5,30,30", "--json")
    actual = json.loads(said.out)["images"][0]["regions"]
    assert code == 0 and len(actual) == 2
    expected = classify_regions(model, picture(path), [(0, 0, 20, 20), (5, 5, 30, 30)])
    for entry, row in zip(actual, expected, strict=True):
        assert entry["classes"][0]["name"] == NAMES[int(row.argmax())]
        assert entry["classes"][0]["probability"] == pytest.approx(float(row.max()), abs=1e-3)
    mask = np.zeros((height, width), np.uint8)
    mask[:20] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    code, said = run(capsys, path, "--model", tmp_path / "run", "--masks", tmp_path / "mask.png", "--top", "1")
    assert code == 0 and said.out.startswith(f"{path}, region 0: ")
    annotations = shapes / "annotations" / "instances_train.json"
    code, said = run(capsys, path, "--model", tmp_path / "run", "--regions", annotations)
    assert code == 0 and "(annotated: " in said.out


def test_folders_are_classified_and_bad_pictures_skipped(model, shapes, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for path in sorted((shapes / "images" / "train").iterdir())[:2]:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "no.png").write_bytes(b"no picture")
    code, said = run(capsys, folder, "--model", tmp_path / "model", "--json")
    document = json.loads(said.out)
    assert code == 1 and len(document["images"]) == 2 and "no.png is not an image" in said.err
    assert [len(image["regions"]) for image in document["images"]] == [1, 1]
    annotations = shapes / "annotations" / "instances_train.json"
    (folder / "no.png").unlink()
    code, said = run(capsys, folder, "--model", tmp_path / "model", "--regions", annotations)
    assert code == 0 and said.out.count("(annotated: ") >= 2
    code, said = run(capsys, folder, "--model", tmp_path / "model", "--boxes", "0,0,9,9")
    assert code == 2 and "need a single image" in said.err


@pytest.mark.parametrize(("picture_of", "name"), [("chelsea", "cat"), ("astronaut", "person")])
def test_the_classifier_in_the_package_classifies_a_photograph(picture_of, name):
    photograph = getattr(pytest.importorskip("skimage.data"), picture_of)()
    (region,) = matbackprop.classify(photograph)
    assert len(region) == 80 and next(iter(region)) == name
    assert sum(region.values()) == pytest.approx(1, abs=1e-5)


def test_the_classifier_in_the_package_is_small_and_has_a_card():
    folder = Path(loading.__file__).parent / "box" / "classifier"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 7e6
    card = (folder / "README.md").read_text()
    assert "matbackprop train o2p --preset lite2" in card and "24.67 %" in card and "license: apache-2.0" in card
    model = load_classifier()
    assert model.names[0] == "person" and model.config.two_views and model.config.head == "both"
