"""The BSDS data set: layouts, splits, grids by area, bad data."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from matbackprop.errors import DataError
from matbackprop.vision.data.bsds import BSDS, labels_to_grid, tuning_split
from matbackprop.vision.data.check import check_dataset

SIZE = (12, 16)


def picture(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*SIZE, 3), dtype=np.uint8)


def quarters(offset=1):
    y, x = np.indices(SIZE)
    return (2 * (y >= 6) + (x >= 8) + offset).astype(np.uint16)


def write_mat(path, maps):
    cells = np.empty((1, len(maps)), dtype=object)
    for index, labels in enumerate(maps):
        cells[0, index] = {"Segmentation": labels, "Boundaries": np.zeros(SIZE, np.uint8)}
    savemat(path, {"groundTruth": cells})


@pytest.fixture
def bsds500(tmp_path):
    for split, names in {"train": ["100", "20", "3"], "val": ["7"], "test": ["8"]}.items():
        for kind in ("images", "groundTruth"):
            (tmp_path / "data" / kind / split).mkdir(parents=True)
        for name in names:
            Image.fromarray(picture(int(name))).save(tmp_path / f"data/images/{split}/{name}.png")
            write_mat(tmp_path / f"data/groundTruth/{split}/{name}.mat", [quarters(), quarters(40)])
    return tmp_path


def test_bsds500_layout_and_splits(bsds500):
    assert BSDS(bsds500, "train").ids == ["100", "20", "3"]
    assert BSDS(bsds500 / "data", "train").ids == ["100", "20", "3"]
    assert BSDS(bsds500, "val").ids == ["7"]
    assert BSDS(bsds500, "test").ids == ["8"]
    sample = BSDS(bsds500, "train")[1]
    assert sample.id == "20" and sample.image.dtype == torch.uint8
    np.testing.assert_array_equal(sample.image.permute(1, 2, 0), picture(20))
    for labels in sample.segmentations:  # labels from 0
        assert labels.dtype == torch.int64
        np.testing.assert_array_equal(labels, quarters(0))


def test_ids_choose_and_order(bsds500):
    assert [sample.id for sample in BSDS(bsds500, "train", ids=["3", "100"])] == ["3", "100"]
    with pytest.raises(DataError, match=r"\(999\) are not among the 3 images of split 'train'"):
        BSDS(bsds500, "train", ids=["999"])


def test_user_images_with_label_pictures(tmp_path):
    for kind in ("images", "groundTruth"):
        (tmp_path / kind / "mine").mkdir(parents=True)
    for name in ("pond", "shot_1"):
        Image.fromarray(picture()).save(tmp_path / f"images/mine/{name}.jpg")
    for file in ("pond_1", "pond_2", "shot_1"):  # shot_1 is an image of that name, not the first map of "shot"
        Image.fromarray(quarters().astype(np.uint8)).save(tmp_path / f"groundTruth/mine/{file}.png")
    data = BSDS(tmp_path, "mine")
    assert [len(sample.segmentations) for sample in data] == [2, 1]
    result = check_dataset(tmp_path)
    assert not result.problems and result.counts == {"mine images": 2, "mine segmentations": 3}


def test_missing_ground_truth_is_reported(bsds500):
    (bsds500 / "data/groundTruth/train/20.mat").unlink()
    with pytest.raises(DataError, match=r"20\.png: has no human map 20\.png, 20_1\.png or 20\.mat in"):
        BSDS(bsds500, "train")
    assert BSDS(bsds500, "train", ids=["3"]).ids == ["3"]
    Image.fromarray(picture()).save(bsds500 / "data/images/train/3.jpg")
    with pytest.raises(DataError, match="has the same name as"):
        BSDS(bsds500, "train", ids=["3"])


def test_corrupt_files_are_reported(bsds500):
    path = bsds500 / "data/images/train/20.png"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"20\.png cannot be read"):
        BSDS(bsds500, "train")[1]
    (bsds500 / "data/groundTruth/train/3.mat").write_bytes(b"nonsense" * 40)
    with pytest.raises(DataError, match=r"3\.mat cannot be read"):
        BSDS(bsds500, "train")[2]
    write_mat(bsds500 / "data/groundTruth/train/100.mat", [quarters(), quarters().T])
    message = r"100\.mat: human map 2 has size 16×12, but the image has size 12×16"
    with pytest.raises(DataError, match=message):
        BSDS(bsds500, "train")[0]


def test_missing_folders(tmp_path, bsds500):
    with pytest.raises(DataError, match="no folder 'images'"):
        BSDS(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match=r"'validation' was not found: .* Available: test, train, val"):
        BSDS(bsds500, "validation")
    for path in (bsds500 / "data/images/val").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="contains no image"):
        BSDS(bsds500, "val")


@pytest.mark.data
def test_the_real_data_set(data_root):
    train, test = BSDS(data_root / "BSDS500", "train"), BSDS(data_root, "val")
    assert len(train) == 200 and len(test) == 100 and not set(train.ids) & set(test.ids)
    rest, held = tuning_split(train.ids)
    assert len(rest) == 160 and len(held) == 40
    sample = test[0]
    assert sorted(sample.image.shape[1:]) == [321, 481] and 4 <= len(sample.segmentations) <= 9
    assert all(labels.shape == sample.image.shape[1:] and labels.min() == 0 for labels in sample.segmentations)


def grid_by_loops(labels, grid):
    """Area of each label in each cell from the overlaps of intervals, smallest label on a tie."""
    height, width = labels.shape
    result = np.empty(grid, int)
    for i, j in np.ndindex(*grid):
        area = {}
        for y, x in np.ndindex(height, width):
            rows = min((i + 1) * height, (y + 1) * grid[0]) - max(i * height, y * grid[0])
            columns = min((j + 1) * width, (x + 1) * grid[1]) - max(j * width, x * grid[1])
            if rows > 0 and columns > 0:
                area[labels[y, x]] = area.get(labels[y, x], 0) + rows * columns
        result[i, j] = min(area, key=lambda label: (-area[label], label))
    return result


@pytest.mark.parametrize("grid", [(1, 1), (3, 4), (5, 2), (7, 9), (11, 20)])
def test_grid_is_the_majority_by_area(grid):
    labels = np.random.default_rng(sum(grid)).integers(-1, 3, (7, 9))
    np.testing.assert_array_equal(labels_to_grid(torch.tensor(labels), grid), grid_by_loops(labels, grid))


def test_tuning_split():
    rest, held = tuning_split([str(i) for i in range(20)])
    assert held == ["0", "13", "18", "5"] and len(rest) == 16 and not set(rest) & set(held)
    folds = [tuning_split([str(i) for i in range(20)], fold)[1] for fold in range(5)]
    assert folds[0] == held and sorted(name for fold in folds for name in fold) == sorted(rest + held)
