"""Caches: written once and whole, damage found."""

import json
from pathlib import Path

import numpy as np
import pytest

from matbackprop.errors import DataError
from matbackprop.vision.data.cache import cache_key, open_cache, write_cache


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "regions-abc"
    rows = np.arange(60, dtype=np.uint8).reshape(10, 2, 3)
    write_cache(path, {"rows": [rows[:4], rows[4:]], "labels": np.arange(10)}, {"side": 2})
    return path


def test_chunks_are_joined_and_mapped(path):
    cache = open_cache(path)
    assert isinstance(cache.arrays["rows"], np.memmap)
    np.testing.assert_array_equal(cache.arrays["rows"], np.arange(60, dtype=np.uint8).reshape(10, 2, 3))
    assert cache.arrays["labels"].dtype == np.int64
    assert cache.meta == {"side": 2}
    with pytest.raises(ValueError, match="read-only"):
        cache.arrays["rows"][0] = 1


def test_later_arrays_and_meta_may_depend_on_earlier_ones(tmp_path):
    kept = []

    def pixels():
        for i in range(3):
            kept.append(i)
            yield np.full((1, 2), i)

    write_cache(tmp_path / "c", {"pixels": pixels(), "kept": (np.array(kept) for _ in [0])}, {"kept": kept})
    cache = open_cache(tmp_path / "c")
    assert cache.arrays["kept"].tolist() == [0, 1, 2]
    assert cache.meta == {"kept": [0, 1, 2]}


def test_empty_arrays(tmp_path):
    write_cache(tmp_path / "c", {"x": np.empty((0, 4), np.float32)}, {})
    assert open_cache(tmp_path / "c").arrays["x"].shape == (0, 4)


def test_missing_and_short_files_are_found_at_once(path):
    file = path / "rows.npy"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"rows\.npy is damaged or missing.*Remove the folder"):
        open_cache(path)
    file.unlink()
    with pytest.raises(DataError, match=r"rows\.npy is damaged or missing: no such file"):
        open_cache(path)


def test_other_formats_and_no_cache(path, tmp_path):
    with pytest.raises(DataError, match="is not a cache"):
        open_cache(tmp_path / "nothing")
    meta = path / "meta.json"
    meta.write_text(json.dumps({"format": 2, "sha256": {}, "meta": {}}))
    with pytest.raises(DataError, match="another version"):
        open_cache(path)
    meta.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        open_cache(path)


def test_a_failed_write_leaves_nothing(tmp_path):
    def broken():
        yield np.zeros((1, 2))
        raise DataError("bad image")

    with pytest.raises(DataError, match="bad image"):
        write_cache(tmp_path / "c", {"x": broken()}, {})
    assert not list(tmp_path.iterdir())


def test_a_second_writer_keeps_the_first_result(path):
    write_cache(path, {"rows": np.zeros(3)}, {"side": 7})
    assert open_cache(path).meta == {"side": 2}


def test_keys_do_not_depend_on_the_order_and_do_on_every_value():
    base = {"side": 200, "crop": True, "path": "x"}
    assert cache_key(base) == cache_key(dict(reversed(base.items())))
    assert len({cache_key(base | {k: 1}) for k in base} | {cache_key(base)}) == 4


def test_pickled_objects_are_never_loaded(path):
    np.save(path / "labels.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"labels\.npy is damaged"):
        open_cache(path)


def test_an_array_is_never_read_from_another_folder(path):
    content = json.loads((path / "meta.json").read_text())
    content["arrays"] = ["rows", "../secret"]
    (path / "meta.json").write_text(json.dumps(content))
    (path / "labels.npy").rename(path.parent / "secret.npy")
    with pytest.raises(DataError, match="no such file"):
        open_cache(path)


@pytest.mark.parametrize("text", ["[]", "7", "null", "\udcff", "[" * 100_000, '{"meta": {}}', '{"arrays": []}'])
def test_other_json_is_refused(path, text):
    (path / "meta.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=r"is damaged"):
        open_cache(path)


def test_configuration_hash_depends_on_values_and_not_on_types():
    plain = cache_key({"folder": "a/b", "side": 200, "scales": [1.0, 0.5]})
    assert cache_key({"folder": Path("a/b"), "side": np.int64(200), "scales": np.array([1.0, 0.5])}) == plain
    with pytest.raises(DataError, match="cannot contain set"):
        cache_key({"side": {200}})
