"""Joint training of contours and normalized cuts."""

import pytest
import torch

from experiments import joint
from experiments.runs import Results
from matbackprop import normalized_cut_soft
from matbackprop.errors import DataError
from matbackprop.vision.configuration import merge
from matbackprop.vision.data.shapes import write_shapes_bsds
from matbackprop.vision.metrics.boundaries import boundary_map
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.training.config import CONTOURS_PRESETS


@pytest.fixture
def config(tmp_path):
    write_shapes_bsds(tmp_path, train=4, val=2)
    changes = {"data.root": str(tmp_path), "data.generate": 0, "data.split": "final", "data.batch_size": 1}
    return merge(CONTOURS_PRESETS["smoke"], changes)


def test_labels_follow_the_crops(config, monkeypatch):
    monkeypatch.setattr(joint, "CELL", 1)
    for crops, labels in joint.JointData(config).train_loader().read(0):
        border = torch.from_numpy(boundary_map(labels[0].numpy()))
        near = torch.nn.functional.max_pool2d((crops.target > 0).float(), 5, 1, 2)[0] > 0
        assert border.any() and near[border].float().mean() > 0.95


def test_the_objective_trains_the_features_of_the_network(config):
    batch = next(iter(joint.JointData(config).train_loader().read(0)))
    torch.manual_seed(0)
    module = joint.JointModule(config, ContourNet(config.model), normalized_cut_soft)
    with_cut, cut = module.training_step(batch), module.features
    module.objective = None
    torch.testing.assert_close(with_cut - module.training_step(batch), joint.WEIGHT * soft(cut, batch[1]))
    layer = module.model.smooth[0][0].weight
    assert torch.autograd.grad(soft(module.features, batch[1]), layer)[0].abs().max() > 0


def soft(features, labels):
    cells = torch.nn.functional.adaptive_avg_pool2d(features, labels.shape[-2:])
    return normalized_cut_soft(cells.flatten(2).mT, labels.flatten(1)).mean()


def test_finished_rows_are_compared_with_contours(tmp_path, capsys):
    config = joint.Config(out=tmp_path, rows=("soft",), summary=True)
    for row, covering in (("soft", [0.6, 0.7]), ("contours", [0.5, 0.6])):
        with pytest.raises(DataError, match="no finished run"):
            joint.main(config)
        metrics = {"images": 2, "covering": covering, "scores": dict.fromkeys(joint.COLUMNS.values(), 0.5)}
        Results(tmp_path).run(row, "seed", 0, {"row": row}, lambda metrics=metrics: metrics)
    joint.main(config)
    assert "+0.100 [+0.100, +0.100]" in (tmp_path / "table.md").read_text()
