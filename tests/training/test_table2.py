"""The second table's command: rows, resuming, the table, its intervals, and the qualitative figure."""

import dataclasses
import json

import numpy as np
import pytest

from matbackprop.errors import ConfigurationError
from matbackprop.spectral import MERGE_KS
from matbackprop.training import table2
from matbackprop.training.ncuts_config import PRESETS, ImageDataConfig
from matbackprop.training.table2 import GROUPS, ROWS, main, open_jobs, result_path
from matbackprop.training.table_config import Table2Config


def small(folder, **changes):
    data = ImageDataConfig(made=6, cache=folder / "cache", superpixels=40, limit=3, workers=1)
    options = {"rows": ("lab-merging", "ncuts-alexnet-relu5", "deepncuts-alexnet-relu5"), "stage": "train"}
    options |= {"epochs": 1, "weights": "none", "seeds": (0, 1), "workers": 1, "shown": 2, "accelerator": "cpu"}
    return Table2Config(out=folder / "out", runs=folder / "runs", data=data, **(options | changes))


def test_every_row_of_the_paper_is_there():
    for name in ("alexnet-relu5", "vgg16-relu4", "vgg16-relu5"):
        assert {f"ncuts-{name}", f"deepncuts-{name}", f"span-{name}", f"soft-{name}"} <= set(ROWS)
        assert ROWS[f"deepncuts-{name}"].against == ROWS[f"span-{name}"].against == f"ncuts-{name}"
        assert (ROWS[f"deepncuts-{name}"].space, ROWS[f"span-{name}"].space) == (None, "soft")
        assert PRESETS[GROUPS[f"deepncuts-{name}"].preset].train.objective == "j2"
    assert all(g.preset in PRESETS for g in GROUPS.values() if g.preset)
    assert all(r.against in ROWS for r in ROWS.values() if r.against)


def test_unknown_rows_are_named():
    with pytest.raises(ConfigurationError, match="there is no row 'resnet'"):
        table2.chosen_groups(Table2Config(rows=("resnet",)))


def test_the_whole_command_on_made_images(tmp_path, monkeypatch, capsys):
    config = small(tmp_path)
    assert len(open_jobs(config)) == 6
    main(config)
    assert open_jobs(config) == []
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    rows = ["lab-merging", "ncuts-alexnet-relu5", "deepncuts-alexnet-relu5", "span-alexnet-relu5"]
    assert list(table["rows"]) == rows
    deep = table["rows"]["deepncuts-alexnet-relu5"]
    assert deep["seeds"] == [0, 1] and 0 < deep["scores"]["paper_best"]["mean"] <= 1
    one = [json.loads(result_path(config, "deepncuts-alexnet-relu5", s).read_text()) for s in (0, 1)]
    other = [json.loads(result_path(config, "ncuts-alexnet-relu5", s).read_text()) for s in (0, 1)]
    means = [np.mean([r["scores"]["paper_best"] for r in rows]) for rows in (one, other)]
    assert deep["difference"]["best"]["difference"] == pytest.approx(means[0] - means[1])
    means = [np.mean([r["scores"]["paper_average"] for r in rows]) for rows in (one, other)]
    gain = deep["difference"]["average"]
    assert gain["difference"] == pytest.approx(means[0] - means[1])
    assert set(one[0]["per_image"]) == {"000000", "000001", "000002"} or len(one[0]["per_image"]) == 3
    text = (tmp_path / "out" / "table.md").read_text()
    assert f"| {gain['difference']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] |" in text
    assert "DeepNCuts (AlexNet ReLU-5)" in text and text.strip() in capsys.readouterr().out
    assert (tmp_path / "runs" / "pictures" / "segmentations.png").exists()
    assert not list((tmp_path / "out").rglob("*.npz"))  # nothing that shows the data set's pictures
    assert (tmp_path / "runs" / "deepncuts-alexnet-relu5" / "seed0" / "model" / "config.json").exists()

    def fail(*arguments):
        raise AssertionError("a finished run was done again")

    monkeypatch.setattr(table2, "run_job", fail)
    main(config)
    trained = [("deepncuts-alexnet-relu5", 0), ("deepncuts-alexnet-relu5", 1)]
    assert open_jobs(small(tmp_path, epochs=2)) == trained  # what was trained for one epoch does not count
    with monkeypatch.context() as changed:
        changed.setattr(table2, "default_ks", lambda method: (2, 3) if method == "cluster" else MERGE_KS)
        assert sorted(open_jobs(config)) == sorted([*trained, ("ncuts-alexnet-relu5", 0), ("ncuts-alexnet-relu5", 1)])
        assert table2.read_results(config, "ncuts-alexnet-relu5") == []
    with monkeypatch.context() as changed:
        changed.setattr(table2, "_LAB_SETTINGS", {"cost": 1, "width": 2})
        assert open_jobs(config) == [("lab", 0), ("lab", 1)]
    path = result_path(config, "deepncuts-alexnet-relu5", 0)
    stored = path.read_text()
    for name, value, counts in (("a field of once", 7, True), ("rate", 7.0, False)):
        changed_result = json.loads(stored)
        changed_result["config"]["train"][name] = value
        path.write_text(json.dumps(changed_result))
        assert open_jobs(config) == ([] if counts else trained[:1])
    path.write_text(stored)
    result_path(config, "lab-merging", 1).unlink()
    assert open_jobs(config) == [("lab", 1)]


def test_seeds_with_and_without_boundaries_stand_in_one_table(tmp_path):
    for seed, boundary in ((0, True), (1, False)):
        main(small(tmp_path, rows=("lab-merging",), seeds=(seed,), boundary=boundary))
    scores = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]["lab-merging"]["scores"]
    assert len(scores["paper_best"]["each"]) == 2 and "boundary_ods" not in scores


def test_nothing_is_started_that_would_not_end_in_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(table2.time, "monotonic", lambda: now[0])
    done = []

    def job(config, key, seed, workers):
        done.append((key, seed))
        now[0] += {"long": 50.0, "short": 2.0}[key]

    monkeypatch.setattr(table2.time, "perf_counter", lambda: now[0])
    config = small(tmp_path)
    jobs = [("long", 0), ("short", 0), ("long", 1), ("short", 1)]
    assert table2.run_all(config, job, jobs, table2.Clock(115.0)) and done == jobs
    done.clear()
    now[0] = 0.0
    # After 52 s the second long one, taken to last 60 s, would end too late; the short one behind it would not.
    assert not table2.run_all(config, job, jobs, table2.Clock(111.0))
    assert done == [("long", 0), ("short", 0), ("short", 1)]
    assert table2.run_all(config, job, [("short", 0)], table2.Clock())


def test_merging_and_its_speed_and_curves(tmp_path):
    config = small(tmp_path, rows=("lab-merging",), seeds=(0,), stage="timing")
    main(config)
    speed = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert speed["lab-merging"]["training"] is None and speed["lab-merging"]["testing"] > 0
    main(small(tmp_path, rows=("soft-alexnet-relu5",), seeds=(0,), stage="curves"))
    lines = (tmp_path / "out" / "curves" / "soft-alexnet-relu5.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    assert {"train/objective", "val/objective", "val/best", "val/average", "layer/rank"} <= names


def test_baselines_stand_in_the_same_table(tmp_path, monkeypatch):
    monkeypatch.setattr(table2, "BASELINES", {k: table2.BASELINES[k] for k in ("one_region", "fixed_grids")})
    config = small(tmp_path, stage="baselines")
    main(config)
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert set(table["rows"]) == {"one_region", "fixed_grids", "humans"}
    assert table["rows"]["one_region"]["scores"]["paper_best"] < table["rows"]["humans"]["scores"]["paper_best"]
    assert "Fixed grids" in (tmp_path / "out" / "table.md").read_text()


def test_cross_validation_scores_every_training_image_once(tmp_path):
    rows = ("ncuts-alexnet-relu5", "deepncuts-alexnet-relu5")
    config = small(tmp_path, rows=rows, images="folds", seeds=(0, 1, 2, 3, 4))
    config.data.limit = None
    main(config)
    results = [json.loads(result_path(config, "deepncuts-alexnet-relu5", fold).read_text()) for fold in range(5)]
    scored = [name for result in results for name in result["per_image"]]
    assert len(scored) == len(set(scored)) == 6
    assert [r["config"]["data"]["fold"] for r in results] == [0, 1, 2, 3, 4]
    deep = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]["deepncuts-alexnet-relu5"]
    others = [json.loads(result_path(config, "ncuts-alexnet-relu5", fold).read_text()) for fold in range(5)]
    gains = [
        r["per_image"][n][0] - o["per_image"][n][0]
        for r, o in zip(results, others, strict=True)
        for n in r["per_image"]
    ]
    assert deep["difference"]["best"]["difference"] == pytest.approx(np.mean(gains))
    assert "each scored by a network that was trained without it" in (tmp_path / "out" / "table.md").read_text()
    with pytest.raises(ConfigurationError, match="one a fold"):
        main(dataclasses.replace(config, seeds=(5,)))
