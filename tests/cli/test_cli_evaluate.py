"""``matbackprop evaluate segmentations``: numbers, formats, options, and messages for bad folders."""

import csv
import json

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from matbackprop.cli import main

SHAPE = (20, 30)


def stripes(count, shape=SHAPE):
    return np.broadcast_to(np.arange(shape[1]) * count // shape[1], shape).astype(np.uint8)


def run(capsys, *words, command="segmentations"):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", command, *map(str, words)])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def as_json(capsys, *words, **command):
    code, out, err = run(capsys, *words, "--json", **command)
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def folders(tmp_path):
    segs, truth = tmp_path / "segs", tmp_path / "truth"
    segs.mkdir()
    truth.mkdir()
    for name in ("a", "b"):
        np.savez(segs / f"{name}.npz", np.stack([stripes(k) for k in (1, 2, 3)]))
        for person in (1, 2):
            Image.fromarray(stripes(person + 1)).save(truth / f"{name}_{person}.png")
    return segs, truth


def test_scores_equal_hand_computed_ones(capsys, folders):
    document = as_json(capsys, folders[0], "--ground-truth", folders[1])
    scores = document["scores"]
    assert scores["paper_best"] == 1 and scores["covering_best"] == 1
    # Two stripes of 15 columns cover three of 10 with IoU 2/3, 5/20 and 2/3; three cover two with 2/3 each.
    expected = (1 + (2 / 3 + 1 / 4 + 2 / 3) / 3) / 2
    assert scores["covering_ods"] == pytest.approx(max(expected, (1 + 2 / 3) / 2))
    assert scores["covering_ois"] == pytest.approx(scores["paper_average"]) == scores["covering_ods"]
    assert scores["boundary_ods"] > 0.7
    assert [row["id"] for row in document["per_image"]] == ["a", "b"]
    curve = document["boundary_curve"]
    assert len(curve["precision"]) == len(curve["recall"]) == 3
    assert curve["ods"]["f"] == scores["boundary_ods"] and 1 <= curve["ods"]["level"] <= 3
    assert "boundary_curve" not in as_json(capsys, folders[0], "--ground-truth", folders[1], "--no-boundary")


def test_table_and_csv(capsys, folders, tmp_path):
    code, out, _ = run(capsys, folders[0], "--ground-truth", folders[1], "--csv", tmp_path / "new/scores.csv")
    assert code == 0
    for text in ("2 images, 3 segmentations each, 4 human maps", "covering", "Rand index", "variation", "boundary"):
        assert text in out
    with (tmp_path / "new/scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["a", "b"] and float(rows[0]["paper_best"]) == 1


def test_different_numbers_print_no_ods(capsys, folders):
    np.savez(folders[0] / "b.npz", stripes(2))
    document = as_json(capsys, folders[0], "--ground-truth", folders[1])
    assert document["segmentations"] is None and document["scores"]["covering_ods"] is None
    code, out, _ = run(capsys, folders[0], "--ground-truth", folders[1], "--no-boundary")
    assert code == 0 and "same number" in out and "boundary" not in out


def test_contour_maps_that_segment_writes_belong_to_their_pictures(capsys, tmp_path):
    for folder in ("photos", "truth"):
        (tmp_path / folder).mkdir()
    Image.fromarray(np.repeat(120 * stripes(2, (48, 64))[..., None], 3, 2)).save(tmp_path / "photos" / "a.png")
    Image.fromarray(stripes(2, (48, 64))).save(tmp_path / "truth" / "a.png")
    with pytest.raises(SystemExit, match="0"):
        words = ("--model", "none", "--format", "ucm2", "--out", tmp_path / "segs")
        main(["segment", str(tmp_path / "photos"), *map(str, words), "--quiet"])
    assert [path.name for path in (tmp_path / "segs").glob("*.mat")] == ["a-ucm2.mat"]
    document = as_json(capsys, tmp_path / "segs", "--ground-truth", tmp_path / "truth", "--thresholds", 4)
    assert document["scores"]["paper_best"] > 0.95


@pytest.mark.slow
def test_two_workers_give_the_same_scores(capsys, folders):
    words = (folders[0], "--ground-truth", folders[1])
    assert as_json(capsys, *words, "--workers", 2) == as_json(capsys, *words, "--workers", 1)


def unlink(folder, pattern):
    for path in folder.glob(pattern):
        path.unlink()


def corrupt(folder):
    for path in folder.iterdir():
        path.write_bytes(b"nonsense")


@pytest.mark.parametrize(
    ("change", "code", "texts"),
    [
        (lambda segs, truth: unlink(truth, "b_*"), 2, ["1 of 2 images have no human map: b"]),
        (lambda segs, truth: unlink(segs, "b.npz"), 0, ["no segmentation of 1 image with human maps"]),
        (
            lambda segs, truth: np.savez(segs / "a.npz", stripes(2).T),
            2,
            ["a: segmentation 1 has size 30×20", "Transpose"],
        ),
        (lambda segs, truth: corrupt(segs), 2, ["2 of 2 images", "a.npz cannot be read", "b.npz cannot be read"]),
        (lambda segs, truth: ("--tolerance", "3"), 2, ["tolerance"]),
    ],
    ids=["missing truth", "unused truth", "transposed", "unreadable", "option"],
)
def test_bad_folders_are_reported(capsys, folders, change, code, texts):
    options = change(*folders) or ()
    actual, out, err = run(capsys, folders[0], "--ground-truth", folders[1], *options)
    assert actual == code and (code == 0 or not out) and all(text in err for text in texts), err


def test_empty_and_absent_folders(capsys, folders, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, err = run(capsys, tmp_path / "empty", "--ground-truth", folders[1])
    assert code == 2 and "contains no label map" in err and ".mat" in err
    code, _, err = run(capsys, folders[0], "--ground-truth", tmp_path / "nowhere")
    assert code == 2 and "is not a folder" in err


def test_the_same_numbered_names_on_both_sides(capsys, tmp_path):
    for folder in ("segs", "truth"):
        (tmp_path / folder).mkdir()
        for number in (1, 2):
            Image.fromarray(stripes(number)).save(tmp_path / folder / f"shot_{number}.png")
    words = (tmp_path / "segs", "--ground-truth", tmp_path / "truth")
    code, _, err = run(capsys, *words)
    assert code == 2 and "--numbered" in err
    assert as_json(capsys, *words, "--numbered", "no")["images"] == 2
    assert as_json(capsys, *words, "--numbered", "yes")["images"] == 1


@pytest.fixture
def contours(tmp_path):
    """Soft vertical contours of two strengths as PNG, NPY and MAT, and human boundaries."""
    shape = (60, 90)
    truth, maps = tmp_path / "human", tmp_path / "contours"
    truth.mkdir()
    maps.mkdir()
    soft = np.zeros(shape, np.float32)
    for column, strength in ((29, 0.9), (75, 0.4)):
        away = np.abs(np.arange(shape[1]) - column)
        soft = np.maximum(soft, np.clip(strength - 0.2 * away, 0, 1))
    for name in ("a", "b", "c", "d"):
        Image.fromarray(stripes(3, shape)).save(truth / f"{name}.png")
    Image.fromarray(np.round(255 * soft).astype(np.uint8)).save(maps / "a.png")
    Image.fromarray(np.round(65535 * soft).astype(np.uint16)).save(maps / "b.png")
    np.save(maps / "c.npy", soft)
    savemat(maps / "d.mat", {"strength": soft})
    return maps, truth


def test_soft_contours_of_all_formats_have_equal_scores(capsys, contours):
    document = as_json(capsys, contours[0], "--ground-truth", contours[1], "--thresholds", 19, command="contours")
    values = [row["boundary_f"] for row in document["per_image"]]
    assert [row["id"] for row in document["per_image"]] == ["a", "b", "c", "d"]
    assert values == pytest.approx([values[0]] * 4, abs=1e-3)
    ods, curve = document["ods"], document["curve"]
    # At high thresholds only the true contour at column 29 is left, one of the two that people drew.
    assert ods["threshold"] >= 0.35 and ods["precision"] == pytest.approx(1)
    assert 0.4 < ods["recall"] <= 0.5
    assert ods["f"] == document["scores"]["boundary_ods"] == pytest.approx(max(curve["f"]))
    assert curve["threshold"] == [i / 20 for i in range(1, 20)] and len(curve["precision"]) == 19
    code, out, _ = run(capsys, contours[0], "--ground-truth", contours[1], "--thresholds", 4, command="contours")
    assert code == 0 and "Boundary F-measure: 4 images, 4 thresholds" in out and "precision" in out


def test_bad_contour_maps_are_reported(capsys, contours):
    for name, content, expected in (
        ("c.npy", np.full((60, 90), 7.5), r"c.npy has strengths outside [0, 1]"),
        ("c.npy", np.zeros((60, 90, 3)), "(60, 90, 3)"),
        ("c.npy", np.zeros((90, 60)), "c: the boundary map has size 90×60"),
    ):
        np.save(contours[0] / name, content)
        code, _, err = run(capsys, contours[0], "--ground-truth", contours[1], command="contours")
        assert code == 2 and expected in err, err
    (contours[0] / "a.png").write_bytes(b"nonsense")
    code, _, err = run(capsys, contours[0], "--ground-truth", contours[1], command="contours")
    assert code == 2 and "2 of 4 images cannot be scored" in err and "a.png" in err and "c: the boundary map" in err
    (contours[1] / "c.png").unlink()
    code, _, err = run(capsys, contours[0], "--ground-truth", contours[1], command="contours")
    assert code == 2 and "1 of 4 images have no human map: c" in err
