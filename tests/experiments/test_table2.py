"""The second table: rows, resuming, intervals, speeds and cross-validation."""

import dataclasses

import numpy as np
import pytest

from experiments import baselines, table2
from experiments.runs import Images
from experiments.table2 import ROWS, Config, Table2
from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.training.config import NCUTS_PRESETS

PLAIN, DEEP, SPAN = "ncuts-alexnet-relu5", "deepncuts-alexnet-relu5", "span-alexnet-relu5"


@pytest.fixture(scope="module", autouse=True)
def few_clusterings():
    """Two numbers of clusters instead of eight: K-means takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        segment = table2.segment_images
        patch.setattr(table2, "segment_images", lambda *images, **more: segment(*images, **more, ks=(2, 3)))
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def small(folder, cache, **changes):
    options = {"rows": (PLAIN, DEEP, SPAN), "weights": "none", "seeds": (0, 1), "workers": 1, "accelerator": "cpu"}
    options["override"] = ("engine.max_epochs=1", "data.threads=1")
    return Config(out=folder / "out", data=Images(generate=6, cache=cache, limit=3), **(options | changes))


@pytest.fixture(scope="module")
def done(tmp_path_factory, cache):
    """The command, run once."""
    folder = tmp_path_factory.mktemp("done")
    config = small(folder, cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        table2.main(config)
    return config


def test_every_row_of_the_paper_is_present():
    for name in ("alexnet-relu5", "vgg16-relu4", "vgg16-relu5"):
        assert {f"ncuts-{name}", f"deepncuts-{name}", f"span-{name}", f"soft-{name}"} <= set(ROWS)
        assert ROWS[f"deepncuts-{name}"].against == ROWS[f"span-{name}"].against == f"ncuts-{name}"
        assert (ROWS[f"deepncuts-{name}"].space, ROWS[f"span-{name}"].space) == (None, "soft")
        assert NCUTS_PRESETS[ROWS[f"deepncuts-{name}"].preset].train.objective == "j2"
    assert all(row.preset in NCUTS_PRESETS for row in ROWS.values() if row.preset)
    assert all(row.against in ROWS for row in ROWS.values() if row.against)
    assert {*baselines.BASELINES, baselines.HUMANS} <= set(ROWS)


def test_bad_options_are_reported(tmp_path):
    with pytest.raises(ConfigurationError, match="one per fold"):
        Config(images="folds", seeds=(5,))
    with pytest.raises(DataError, match="no finished run"):
        Table2(Config(out=tmp_path)).summarize()


def test_the_table_of_a_whole_command(done):
    table = Table2(done)
    runs = {key: table.finished(key) for key in done.rows}
    assert {key: len(one) for key, one in runs.items()} == dict.fromkeys(done.rows, 2)
    assert all(len(run["metrics"]["per_image"]) == 3 for one in runs.values() for run in one)
    text = (done.out / "table.md").read_text()
    for i, name in enumerate(("best", "average")):
        means = [np.mean([run["metrics"]["scores"][f"paper_{name}"] for run in runs[key]]) for key in (DEEP, PLAIN)]
        gain = table._gains(ROWS[DEEP], runs[DEEP])[i]
        assert float(gain.split()[0]) == pytest.approx(means[0] - means[1], abs=6e-4) and f"| {gain} |" in text
    assert "DeepNCuts (AlexNet ReLU-5)" in text and "Speeds: one run" in text and "Runs come from" in text
    assert runs[DEEP][0]["metrics"]["training"] > 0 and runs[PLAIN][0]["metrics"]["testing"] > 0
    assert (done.out / "figures" / f"{DEEP}.png").is_file()


def test_finished_runs_are_not_repeated(done, monkeypatch):
    monkeypatch.setattr(Table2, "model", lambda *arguments: 1 / 0)
    table2.main(done)


def test_a_group_is_trained_once_and_only_for_missing_rows(tmp_path, cache, monkeypatch):
    trained = []
    monkeypatch.setattr(Table2, "model", lambda self, preset, *rest: trained.append(preset) or (None, {}))
    scores = {"scores": {"paper_best": 0.5, "paper_average": 0.4}, "per_image": {}}
    monkeypatch.setattr(Table2, "score", lambda self, row, model, training, seed: dict(scores))
    config = small(tmp_path, cache, rows=(DEEP, SPAN), seeds=(0,))
    Table2(config).train()
    assert trained == ["paper-alexnet-relu5"]
    Table2(dataclasses.replace(config, seeds=(0, 1))).train()
    assert len(trained) == 2
    for changes in ({"override": ("engine.max_epochs=2", "data.threads=1")}, {"boundary": True}):
        Table2(dataclasses.replace(config, **changes)).train()
    Table2(dataclasses.replace(config, data=dataclasses.replace(config.data, limit=2))).train()
    assert len(trained) == 5
    Table2(dataclasses.replace(config, override=("engine.max_epochs=1", "data.threads=2"))).train()
    assert len(trained) == 5  # the number of processes changes no number


def test_baselines_are_rows_of_the_same_table(tmp_path, cache):
    rows = ("one_region", "fixed_grids", "humans")
    config = baselines.Config(
        out=tmp_path / "out", data=Images(generate=6, cache=cache, limit=3), rows=rows, workers=1, accelerator="cpu"
    )
    metrics = {"scores": {"paper_best": 0.5, "paper_average": 0.4}, "per_image": {}}
    Table2(config).results.run(PLAIN, "seed", 0, {"device": "cpu"}, lambda: metrics)
    baselines.main(config)
    best = {key: Table2(config).finished(key)[0]["metrics"]["scores"]["paper_best"] for key in rows}
    assert best["one_region"] < best["humans"]
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| Fixed grids |" in text and "| Humans, leave one out |" in text and "| NCuts (AlexNet ReLU-5) |" in text
    with pytest.raises(ConfigurationError, match="Unknown row"):
        baselines.main(baselines.Config(rows=(PLAIN,)))


def test_cross_validation_scores_every_training_image_once(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small(tmp_path, cache, rows=(PLAIN,), images="folds", seeds=(0, 1, 2, 3, 4))
    config.data.limit = None
    table2.main(config)
    scored = [name for run in Table2(config).finished(PLAIN) for name in run["metrics"]["per_image"]]
    assert len(scored) == len(set(scored)) == 6
    recipes = [Table2(config).recipe("paper-alexnet-relu5", fold) for fold in range(5)]
    assert [(r.data.split, r.data.fold) for r in recipes] == [("tuning", fold) for fold in range(5)]
    assert "each scored by a network that was trained without it" in (config.out / "table.md").read_text()
