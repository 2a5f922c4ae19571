"""Every kind of file of label maps: round trips, the documented formats, and damage."""

import numpy as np
import pytest
from PIL import Image
from scipy.io import loadmat, savemat

from matbackprop.errors import DataError
from matbackprop.vision.data import label_files, pictures
from matbackprop.vision.data.label_files import (
    index_label_files,
    read_label_maps,
    ucm_to_segmentations,
)

LABELS = np.array([[1, 1, 2, 2], [1, 3, 3, 2], [4, 4, 3, 2]], dtype=np.uint16)


def cells(maps):
    array = np.empty((1, len(maps)), dtype=object)
    for index, labels in enumerate(maps):
        array[0, index] = labels
    return array


def write_ground_truth(path, maps):
    savemat(path, {"groundTruth": cells([{"Segmentation": m, "Boundaries": (m > 1).astype(np.uint8)} for m in maps])})


def test_mat_segmentations_and_human_maps(tmp_path):
    savemat(tmp_path / "a.mat", {"segs": cells([LABELS, LABELS + 1])})
    write_ground_truth(tmp_path / "b.mat", [LABELS, LABELS[::-1]])
    for name, second in (("a", LABELS + 1), ("b", LABELS[::-1])):
        maps = read_label_maps(tmp_path / f"{name}.mat")
        np.testing.assert_array_equal(maps[0], LABELS)
        np.testing.assert_array_equal(maps[1], second)
        assert len(maps) == 2


def test_mat_with_plain_arrays(tmp_path):
    savemat(tmp_path / "a.mat", {"labels": LABELS, "note": "text", "number": 3, "real": LABELS / 7})
    maps = read_label_maps(tmp_path / "a.mat")
    assert len(maps) == 1
    np.testing.assert_array_equal(maps[0], LABELS)
    savemat(tmp_path / "b.mat", {"segs": LABELS.astype(float)})
    np.testing.assert_array_equal(read_label_maps(tmp_path / "b.mat")[0], LABELS)


def doubled_contours():
    """Three pixels in a row, a strong contour between the first two and a weak one between the last."""
    ucm = np.zeros((3, 7))
    ucm[:, 2], ucm[:, 4] = 0.8, 0.3
    return ucm


def test_contour_map_is_cut_at_thresholds(tmp_path):
    fine, middle, coarse = ucm_to_segmentations(doubled_contours(), 3)  # at .25, .5, .75
    assert [len(np.unique(labels)) for labels in (fine, middle, coarse)] == [3, 2, 2]
    assert middle.shape == (1, 3) and middle[0, 1] == middle[0, 2] != middle[0, 0]
    savemat(tmp_path / "a.mat", {"ucm2": doubled_contours()})
    assert len(read_label_maps(tmp_path / "a.mat")) == 99
    assert len(read_label_maps(tmp_path / "a.mat", thresholds=8)) == 8
    for wrong in (np.zeros((4, 6)), np.zeros((5, 7), complex)):
        with pytest.raises(DataError, match="double size"):
            ucm_to_segmentations(wrong)


@pytest.mark.parametrize(
    ("mode", "dtype"), [("L", np.uint8), ("I;16", np.uint16), ("P", np.uint8), ("RGB", np.uint8), ("RGBA", np.uint8)]
)
def test_png_of_every_depth(tmp_path, mode, dtype):
    labels = LABELS.astype(dtype)
    if mode == "I;16":
        labels = labels * 1000
        Image.fromarray(labels).save(tmp_path / "a.png")
    elif mode == "P":
        picture = Image.frombytes("P", (4, 3), labels.tobytes())
        picture.putpalette([200 - i % 7 for i in range(768)])  # colors that do not distinguish the labels
        picture.save(tmp_path / "a.png")
    elif mode == "L":
        Image.fromarray(labels).save(tmp_path / "a.png")
    else:
        colors = np.random.default_rng(0).permutation(256)[: 4 * len(mode)].reshape(4, len(mode)).astype(np.uint8)
        Image.fromarray(colors[labels - 1]).save(tmp_path / "a.png")
    (actual,) = read_label_maps(tmp_path / "a.png")
    # The same partition: labels correspond one to one.
    pairs = {tuple(pair) for pair in np.stack([LABELS.ravel(), actual.ravel()], 1).tolist()}
    assert len(pairs) == 4 and len({b for _, b in pairs}) == 4
    if mode == "I;16":
        np.testing.assert_array_equal(actual, labels)


def test_npz_and_npy(tmp_path):
    np.savez(tmp_path / "a.npz", *[LABELS + i for i in range(11)])
    maps = read_label_maps(tmp_path / "a.npz")
    assert [int(labels[0, 0]) for labels in maps] == list(range(1, 12))  # arr_10 comes last, not second
    np.save(tmp_path / "b.npy", np.stack([LABELS, LABELS + 5]))
    assert len(read_label_maps(tmp_path / "b.npy")) == 2


def test_corrupt_and_wrong_files(tmp_path):
    for name in ("a.mat", "a.png", "a.npz", "a.npy"):
        (tmp_path / name).write_bytes(b"MATLAB 5.0 nonsense \x00\x01\x02" * 20)
        with pytest.raises(DataError, match=name):
            read_label_maps(tmp_path / name)
    savemat(tmp_path / "cut.mat", {"segs": cells([LABELS])}, do_compression=True)
    whole = (tmp_path / "cut.mat").read_bytes()
    (tmp_path / "cut.mat").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"cut\.mat cannot be read"):
        read_label_maps(tmp_path / "cut.mat")
    savemat(tmp_path / "empty.mat", {"x": "text"})
    with pytest.raises(DataError, match="contains no label map"):
        read_label_maps(tmp_path / "empty.mat")
    savemat(tmp_path / "real.mat", {"segs": LABELS / 7})
    with pytest.raises(DataError, match="not integers"):
        read_label_maps(tmp_path / "real.mat")
    savemat(tmp_path / "ucm.mat", {"ucm2": np.zeros((0, 5))})
    with pytest.raises(DataError, match=r"ucm\.mat: A contour map .*got float64 \(0, 5\)"):
        read_label_maps(tmp_path / "ucm.mat")
    header = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    (tmp_path / "hdf.mat").write_bytes(header.ljust(512, b"\x00") + b"\x89HDF\r\n\x1a\n")
    with pytest.raises(DataError, match="-v7"):
        read_label_maps(tmp_path / "hdf.mat")
    np.save(tmp_path / "pickle.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"pickle\.npy cannot be read"):
        read_label_maps(tmp_path / "pickle.npy")
    Image.fromarray(LABELS.astype(np.uint8)).save(tmp_path / "photo.jpg")
    (tmp_path / "photo.jpg").rename(tmp_path / "photo.png")
    with pytest.raises(DataError, match="is a JPEG file"):
        read_label_maps(tmp_path / "photo.png")
    with pytest.raises(DataError, match="not a file of label maps"):
        read_label_maps(tmp_path / "photo.gif")
    with pytest.raises(DataError, match="does not exist"):
        read_label_maps(tmp_path / "nobody.png")


def test_decompression_bombs_are_not_decompressed(tmp_path, monkeypatch):
    monkeypatch.setattr(label_files, "MAX_BYTES", 100_000)
    monkeypatch.setattr(label_files, "MAX_MAP_PIXELS", 100_000)
    monkeypatch.setattr(pictures, "MAX_PIXELS", 100_000)
    monkeypatch.setattr(label_files, "MAX_LABELS", 40_000)
    many, fine = np.zeros((1000, 200), np.uint16), np.zeros((100, 200), np.uint16)
    savemat(tmp_path / "many.mat", {"labels": many}, do_compression=True)
    savemat(tmp_path / "fine.mat", {"labels": fine}, do_compression=True)
    np.savez_compressed(tmp_path / "many.npz", many)
    np.savez_compressed(tmp_path / "fine.npz", fine)
    Image.fromarray(many).save(tmp_path / "many.png")
    assert (tmp_path / "many.mat").stat().st_size < 2000
    np.save(tmp_path / "many.npy", many)
    np.save(tmp_path / "fine.npy", fine)
    for kind in ("mat", "npz", "npy", "png"):
        with pytest.raises(DataError, match=rf"many\.{kind} .*(decompresses to more than|has .*pixels|has .*bytes)"):
            read_label_maps(tmp_path / f"many.{kind}")
    for kind in ("mat", "npz", "npy"):
        assert read_label_maps(tmp_path / f"fine.{kind}")[0].shape == (100, 200)


def test_too_many_maps_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(label_files, "MAX_LABELS", 50)
    stack, cell = np.zeros((3, 4, 5), np.uint8), np.empty((1, 3), object)
    cell[:] = [[{"Segmentation": labels} for labels in stack]]
    np.save(tmp_path / "stack.npy", stack)
    np.savez(tmp_path / "stack.npz", *stack)
    savemat(tmp_path / "stack.mat", {"groundTruth": cell})
    savemat(tmp_path / "loose.mat", dict(zip("abc", stack, strict=True)))
    savemat(tmp_path / "contours.mat", {"ucm2": np.zeros((9, 11))})
    for name in ("stack.npy", "stack.npz", "stack.mat", "loose.mat"):
        with pytest.raises(DataError, match=rf"{name} contains 3 maps with 60 labels. At most 50"):
            read_label_maps(tmp_path / name)
    with pytest.raises(DataError, match=r"contours\.mat: 3 thresholds give .* Use fewer thresholds"):
        read_label_maps(tmp_path / "contours.mat", thresholds=3)
    assert len(read_label_maps(tmp_path / "contours.mat", thresholds=2)) == 2


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_index_groups_files_by_image(tmp_path):
    touch(
        tmp_path, "a_1.png", "a_2.png", "a_10.png", "b.png", "u1/c.png", "u2/c.png", "d_001.png", "e_1.mat", "notes.txt"
    )
    actual = index_label_files(tmp_path)
    assert {name: [path.name for path in paths] for name, paths in actual.items()} == {
        "a": ["a_1.png", "a_2.png", "a_10.png"],
        "b": ["b.png"],
        "c": ["c.png", "c.png"],
        "d_001": ["d_001.png"],
        "e_1": ["e_1.mat"],
    }
    assert "a_1" in index_label_files(tmp_path, numbered=False)
    assert "a_2" in index_label_files(tmp_path, names={"a_2", "a"})


def test_index_rejects_two_kinds_and_no_folder(tmp_path):
    touch(tmp_path, "a.png", "a.mat")
    with pytest.raises(DataError, match=r"a has label maps of several kinds \(\.mat, \.png\)"):
        index_label_files(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        index_label_files(tmp_path / "nowhere")


def test_corrupt_mat_files_are_rejected(tmp_path):
    """SciPy's reader crashes on some of these files unless types and lengths are checked first."""
    write_ground_truth(tmp_path / "a.mat", [LABELS, LABELS])
    savemat(tmp_path / "b.mat", {"labels": LABELS}, do_compression=True)
    draw = np.random.default_rng(0)
    outcomes = set()
    for name in ("a.mat", "b.mat"):
        whole = (tmp_path / name).read_bytes()
        for _ in range(400):
            changed = bytearray(whole)
            for place in draw.integers(100, len(whole), draw.integers(1, 6)):
                changed[place] = draw.integers(256)
            (tmp_path / "c.mat").write_bytes(bytes(changed[: draw.integers(64, 2 * len(whole))]))
            try:
                outcomes.add(len(read_label_maps(tmp_path / "c.mat")) > 0)
            except DataError:
                outcomes.add("refused")
    assert outcomes == {True, "refused"}


@pytest.mark.data
def test_files_of_the_benchmark_are_read_as_by_scipy(data_root):
    for path in sorted((data_root / "BSDS500" / "data" / "groundTruth" / "val").glob("*.mat"))[:5]:
        cell = loadmat(path)["groundTruth"].ravel()
        for ours, theirs in zip(read_label_maps(path), cell, strict=True):
            np.testing.assert_array_equal(ours, theirs["Segmentation"][0, 0])
