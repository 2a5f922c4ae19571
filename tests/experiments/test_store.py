"""Results that know what made them: what their fingerprint sees, and what it does not."""

import json
import os

import pytest

from experiments.table import Job, Store, data_digest, fingerprint, settings, weights_digest
from matbackprop.errors import DataError
from matbackprop.vision.training.config import NCUTS_PRESETS as NCUTS
from matbackprop.vision.training.config import O2P_PRESETS as O2P

JOB = Job("alexnet", "seed", 3)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "data"
    labels = ("groundTruth/train/a_1.png", "annotations/instances_val.json")
    for name in ("images/train/a.jpg", "images/val/b.jpg", *labels):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def digest(root, *splits):
    data_digest.cache_clear()
    return data_digest(root, splits or ("train", "val"))


def test_a_result_is_found_only_by_what_made_it(store):
    store.write(JOB, {"data": "one", "device": "cuda"}, {"error": 39.5})
    assert store.read(JOB, {"device": "cuda", "data": "one"})["error"] == 39.5
    assert store.read(JOB, {"data": "another", "device": "cuda"}) is None
    assert store.read(Job("alexnet", "seed", 4), {"data": "one", "device": "cuda"}) is None


def test_results_made_otherwise_are_kept_and_told_apart(store):
    for rate in (0.1, 0.2):
        store.write(JOB, {"configuration": {"rate": rate}}, {"error": rate})
    assert [store.read(JOB, {"configuration": {"rate": rate}})["error"] for rate in (0.1, 0.2)] == [0.1, 0.2]
    assert store.made_otherwise(JOB, {"configuration": {"rate": 0.1}}) == [{"configuration.rate": (0.2, 0.1)}]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"provenance": {"data": "another"}}'])
def test_a_file_that_is_not_what_its_folder_says_is_refused(store, content):
    store.write(JOB, {"data": "one"}, {})
    (store.path(JOB, {"data": "one"}) / "result.json").write_text(content)
    with pytest.raises(DataError, match=r"result\.json .*remove"):
        Store(store.folder).read(JOB, {"data": "one"})


def test_a_result_holds_its_provenance(store):
    provenance = {"data": "one", "configuration": {"seeds": (1, 2)}}
    store.write(JOB, provenance, {"error": 1.0})
    stored = json.loads((store.path(JOB, provenance) / "result.json").read_text())
    assert fingerprint(stored["provenance"]) == fingerprint(provenance) == store.path(JOB, provenance).name[-16:]


def test_the_data_is_known_by_its_files(data):
    before = digest(data)
    assert digest(data) == before
    (data / "images/train/Thumbs.db").write_bytes(b"left by a file browser")
    (data / "images/test").mkdir()
    (data / "images/test/c.jpg").write_bytes(b"not asked for")
    assert digest(data) == before


@pytest.mark.parametrize(("name", "content"), [
    ("groundTruth/train/a_1.png", b"groundTruth/train/a_2.png"),  # another map of the same size
    ("annotations/instances_val.json", b"annotations/instances_VAL.json"),
    ("images/train/a.jpg", b"larger than it was before"),
    ("images/val/new.jpg", b"one more"),
])  # fmt: skip
def test_other_data_is_told_apart(data, name, content):
    before = digest(data)
    (data / name).write_bytes(content)
    assert digest(data) != before


def test_a_folder_without_data_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no picture or annotation of train"):
        digest(tmp_path, "train")


def test_weights_are_known_by_their_contents(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(DataError, match="no weights at"):
        weights_digest("alexnet", str(path))
    path.write_bytes(b"one")
    one = weights_digest("alexnet", str(path))
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))  # however coarse the file system's clock is
    assert len({one, weights_digest("alexnet", str(path)), weights_digest("alexnet", "none")}) == 3


@pytest.mark.parametrize("preset", [O2P["paper"], NCUTS["paper"]], ids=["o2p", "ncuts"])
def test_settings_say_what_was_done_and_not_where(preset):
    actual = settings(preset)
    assert {"seed", "max_epochs", "precision"} <= actual["engine"].keys()
    assert not actual["engine"].keys() & {"run", "accelerator", "progress", "log_every"}
    assert {"split", "batch_size", "made"} <= actual["data"].keys() and not actual["data"].keys() & {"root", "cache"}
    assert actual["model"]["weights"] == "imagenet"
