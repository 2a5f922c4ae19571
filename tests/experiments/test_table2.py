"""The second table: rows, resuming, what counts as finished, intervals, speeds and the qualitative figure."""

import dataclasses
import json
import logging
import shutil

import numpy as np
import pytest

from experiments import table2
from experiments.config import Table2Config
from experiments.table import Job
from experiments.table2 import GROUP_OF, GROUPS, ROWS, Table2
from matbackprop.errors import ConfigurationError
from matbackprop.vision.segmentation import MERGE_KS
from matbackprop.vision.training.config import NCUTS_PRESETS, ImageDataConfig

PLAIN, DEEP, SPAN = "ncuts-alexnet-relu5", "deepncuts-alexnet-relu5", "span-alexnet-relu5"


@pytest.fixture(scope="module", autouse=True)
def few_clusterings():
    """Two numbers of clusters instead of eight: K-means takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table2, "default_ks", lambda method: (2, 3) if method == "cluster" else MERGE_KS)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def small(folder, cache, **changes):
    data = ImageDataConfig(made=6, cache=cache, superpixels=40, limit=3, workers=1)
    options = {"rows": ("lab-merging", PLAIN, DEEP, SPAN), "stage": "train"}
    options |= {"epochs": 1, "weights": "none", "seeds": (0, 1), "workers": 1, "shown": 2, "accelerator": "cpu"}
    return Table2Config(out=folder / "out", data=data, **(options | changes))


@pytest.fixture(scope="module")
def done(tmp_path_factory, cache):
    """The command, done once, and what it printed."""
    config = small(tmp_path_factory.mktemp("done"), cache)
    assert len(Table2(config).ready()) == 6
    Table2(config).main()
    return config


def result(config, key, seed):
    return Table2(config).result(Job(GROUP_OF[key].key, "seed", seed))["rows"][key]


def read_table(config):
    return json.loads((config.out / "table.json").read_text())["rows"]


def test_every_row_of_the_paper_is_there():
    for name in ("alexnet-relu5", "vgg16-relu4", "vgg16-relu5"):
        assert {f"ncuts-{name}", f"deepncuts-{name}", f"span-{name}", f"soft-{name}"} <= set(ROWS)
        assert ROWS[f"deepncuts-{name}"].against == ROWS[f"span-{name}"].against == f"ncuts-{name}"
        assert (ROWS[f"deepncuts-{name}"].space, ROWS[f"span-{name}"].space) == (None, "soft")
        assert NCUTS_PRESETS[GROUPS[f"deepncuts-{name}"].preset].train.objective == "j2"
    assert all(g.preset in NCUTS_PRESETS for g in GROUPS.values() if g.preset)
    assert all(r.against in ROWS for r in ROWS.values() if r.against)


def test_unknown_rows_are_named():
    with pytest.raises(ConfigurationError, match="there is no row 'resnet'"):
        Table2(Table2Config(rows=("resnet",)))


@pytest.mark.parametrize(("name", "value"), [("jitter", 0.5), ("batch_size", 2), ("split", "final")])
def test_options_of_the_data_that_would_change_nothing_are_refused(tmp_path, cache, name, value):
    config = small(tmp_path, cache)
    setattr(config.data, name, value)
    with pytest.raises(ConfigurationError, match=f"--data.{name.replace('_', '-')} is each row's own"):
        Table2(config)


def test_the_table_of_a_whole_command(done):
    table = read_table(done)
    assert list(table) == ["lab-merging", PLAIN, DEEP, SPAN]
    deep = table[DEEP]
    assert deep["seeds"] == [0, 1] and 0 < deep["scores"]["paper_best"]["mean"] <= 1
    for name in ("best", "average"):
        means = [np.mean([result(done, key, s)["scores"][f"paper_{name}"] for s in (0, 1)]) for key in (DEEP, PLAIN)]
        assert deep["difference"][name]["difference"] == pytest.approx(means[0] - means[1])
    assert len(result(done, DEEP, 0)["per_image"]) == 3
    text, gain = (done.out / "table.md").read_text(), deep["difference"]["average"]
    assert f"| {gain['difference']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] |" in text
    assert "DeepNCuts (AlexNet ReLU-5)" in text
    assert (done.out / "pictures" / "segmentations.png").exists()
    [run] = (done.out / "runs" / DEEP).glob("seed0-*")
    assert run.name.endswith(deep["fingerprints"][0])
    assert (run / "model" / "config.json").exists() and (run / "metrics.jsonl").exists()


def test_what_is_finished_is_not_done_again(done, monkeypatch):
    monkeypatch.setattr(Table2, "run", None)  # would fail if it were called
    Table2(done).main()


@pytest.fixture
def imagenet(tmp_path, monkeypatch):
    """Files in the place of ImageNet's weights."""
    (tmp_path / "weights").mkdir()
    for name in ("alexnet", "vgg16"):
        (tmp_path / "weights" / f"{name}_features_fp16.safetensors").write_bytes(name.encode())
    monkeypatch.setenv("MATBACKPROP_DATA", str(tmp_path))


def _ready(config, **changes):
    return {job.key for job in Table2(dataclasses.replace(config, **changes)).ready()}


def test_results_made_under_other_settings_do_not_count(done, imagenet, monkeypatch):
    assert _ready(done) == set()
    assert _ready(done, epochs=2) == {DEEP}
    assert _ready(done, weights=None) == {PLAIN, DEEP}  # ImageNet's weights
    everything = {"lab", PLAIN, DEEP}
    assert _ready(done, images="tuning") == everything
    assert _ready(done, boundary=True) == everything
    for changes in ({"made": 8}, {"limit": 2}, {"superpixels": 50}):
        assert _ready(done, data=dataclasses.replace(done.data, **changes)) == everything
    with monkeypatch.context() as changed:
        changed.setattr(table2, "default_ks", lambda method: (2, 4) if method == "cluster" else MERGE_KS)
        assert _ready(done) == {PLAIN, DEEP}
        assert not Table2(done).line(ROWS[PLAIN]).results
    with monkeypatch.context() as changed:
        changed.setattr(table2, "COLOUR_SETTINGS", {"width": 4.0})
        assert _ready(done) == {"lab"}
    with monkeypatch.context() as changed:
        changed.setattr(table2, "measure_digest", lambda boundary: "another measure")
        assert _ready(done) == everything


def test_untrained_rows_of_made_up_images_and_random_weights_are_not_those_of_imagenet(tmp_path, cache, imagenet):
    config = small(tmp_path, cache, rows=(PLAIN,), seeds=(0,))
    config.data = dataclasses.replace(config.data, made=2, limit=None)
    Table2(config).main()
    assert _ready(config) == set()
    assert _ready(config, weights=None) == {PLAIN}
    other = dataclasses.replace(config.data, made=4)
    assert _ready(config, data=other) == {PLAIN}


def test_seeds_with_and_without_boundaries_stand_in_different_tables(tmp_path, cache):
    for seeds, boundary in (((0,), True), ((0, 1), False)):
        config = small(tmp_path, cache, rows=("lab-merging",), seeds=seeds, boundary=boundary)
        Table2(config).main()
        scores = read_table(config)["lab-merging"]["scores"]
        assert len(scores["paper_best"]["each"]) == len(seeds) and ("boundary_ods" in scores) == boundary


def test_speeds_of_one_table_come_from_one_run(tmp_path, cache, monkeypatch):
    timed = []

    def time(self, job):
        timed.append(job.key)
        return {row.key: {"training": 5.0, "testing": 7.0} for row in GROUPS[job.key].rows}

    monkeypatch.setattr(Table2, "time", time)
    Table2(small(tmp_path, cache, rows=("lab-merging",), stage="timing")).main()
    both = small(tmp_path, cache, rows=("lab-merging", PLAIN), stage="timing")
    Table2(both).main()
    assert timed == ["lab", "lab", PLAIN]  # what another run measured is measured again
    Table2(both).main()
    assert len(timed) == 3
    speed = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert set(speed["rows"]) == {"lab-merging", PLAIN} and speed["machine"]["device"]
    assert Table2(both).speed(PLAIN, Job(PLAIN, "timing"))["testing"] == 7.0
    other = dataclasses.replace(both, data=dataclasses.replace(both.data, superpixels=50))
    assert Table2(other).speed(PLAIN, Job(PLAIN, "timing")) == {}


def test_speeds_and_the_curves_of_a_training(tmp_path, cache):
    Table2(small(tmp_path, cache, rows=("lab-merging",), seeds=(0,), stage="timing")).main()
    speed = json.loads((tmp_path / "out" / "speed.json").read_text())["rows"]
    assert speed["lab-merging"]["training"] is None and speed["lab-merging"]["testing"] > 0
    timed = Table2(small(tmp_path, cache, rows=(DEEP,), seeds=(0,), stage="timing")).time(Job(DEEP, "timing"))
    assert timed.keys() == {DEEP, SPAN} and all(one["training"] > 0 and one["testing"] > 0 for one in timed.values())
    table = Table2(small(tmp_path, cache, rows=("soft-alexnet-relu5",), seeds=(0,), stage="curves"))
    table.prepare()
    [job] = table.ready()
    table.run(job)
    lines = (table.place(job) / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    assert {"train/objective", "val/objective", "val/best", "val/average", "layer/rank"} <= names


def test_baselines_stand_in_the_same_table(tmp_path, cache):
    rows = ("one_region", "fixed_grids", "humans")
    config = small(tmp_path, cache, rows=rows, stage="baselines")
    Table2(config).main()
    table = read_table(config)
    assert tuple(table) == rows
    assert table["one_region"]["scores"]["paper_best"]["mean"] < table["humans"]["scores"]["paper_best"]["mean"]
    assert "Fixed grids" in (tmp_path / "out" / "table.md").read_text()
    assert _ready(config) == set()
    assert _ready(config, data=dataclasses.replace(config.data, made=8)) == set(rows)


def test_rows_of_another_device_are_named(done, tmp_path):
    shutil.copytree(done.out, tmp_path / "out")
    config = dataclasses.replace(done, out=tmp_path / "out", accelerator="gpu")
    table = Table2(config)
    assert table.device == "cuda" and len(table.ready()) == 6
    assert {entry["device"] for entry in table.summarize()["rows"].values()} == {"cpu"}
    assert "on a GPU" not in (config.out / "table.md").read_text()
    job = Job("lab", "seed", 0)
    table.store.write(job, table.provenance(job, "cuda"), Table2(done).result(job))
    table.summarize()
    text = (config.out / "table.md").read_text()
    assert "Computed on a CPU, the others on a GPU: NCuts (AlexNet ReLU-5)" in text


def test_cross_validation_scores_every_training_image_once(tmp_path, cache):
    rows = (PLAIN, DEEP)
    config = small(tmp_path, cache, rows=rows, images="folds", seeds=(0, 1, 2, 3, 4))
    config.data.limit = None
    Table2(config).main()
    deep, plain = ([result(config, key, fold)["per_image"] for fold in range(5)] for key in (DEEP, PLAIN))
    scored = [name for one in deep for name in one]
    assert len(scored) == len(set(scored)) == 6
    folds = [Table2(config).run_config(Job(DEEP, "seed", fold), "cpu").data.fold for fold in range(5)]
    assert folds == [0, 1, 2, 3, 4]
    gains = [one[n]["paper_best"] - other[n]["paper_best"] for one, other in zip(deep, plain, strict=True) for n in one]
    assert read_table(config)[DEEP]["difference"]["best"]["difference"] == pytest.approx(np.mean(gains))
    assert "each scored by a network that was trained without it" in (tmp_path / "out" / "table.md").read_text()
    with pytest.raises(ConfigurationError, match="one per fold"):
        Table2(dataclasses.replace(config, seeds=(5,)))


def test_a_command_leaves_the_log_as_it_was(done, monkeypatch):
    log = logging.getLogger("matbackprop")
    monkeypatch.setattr(log, "handlers", [])
    level = log.level
    Table2(done).main()
    assert (log.level, log.handlers) == (level, [])
