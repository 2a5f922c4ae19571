"""Joint training of contours and normalized cuts, compared with training on contours alone.

The finest feature map of a contour network, reduced to cells of eight pixels, is also trained by the soft
normalized-cut objective or by J₂ with the segmentation of one annotator. The gradient of the objective passes through
its projector into the backbone. The objective is used in training only: contours, watershed and hierarchy are those of
the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as nnf

from experiments import runs
from experiments.bsds500 import hierarchy_of
from experiments.runs import Experiment, ImagesConfig
from matbackprop import normalized_cut_j2, normalized_cut_soft
from matbackprop.vision.configuration import merge
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.inference.segmenting import network_contours
from matbackprop.vision.metrics import ImageScores, contour_counts, score_image, summarize
from matbackprop.vision.metrics.evaluation import boundary_scores
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.training.config import RECIPES, ContoursConfig
from matbackprop.vision.training.contours import ContoursData, ContoursModule, augment
from matbackprop.vision.training.engine import fit
from matbackprop.vision.training.loading import generator_for
from matbackprop.vision.training.start import load_start

CELL = 8  #: Side in pixels of the cells that are cut.
WEIGHT = 0.1  #: Weight of the objective relative to the loss of the contours; not tuned.
OBJECTIVES = {"contours": None, "soft": normalized_cut_soft, "j2": normalized_cut_j2}
LEVELS = np.arange(2, 100, 3) / 100  #: Heights at which hierarchies are cut.
#: Column of the table → name of the measure.
COLUMNS = {
    "contours F ODS": "contours_ods", "contours OIS": "contours_ois", "regions F ODS": "boundary_ods",
    "regions OIS": "boundary_ois", "covering ODS": "covering_ods", "covering OIS": "covering_ois",
    "covering best": "covering_best", "VI ODS": "vi_ods",
}  # fmt: skip


@dataclass
class Config(ImagesConfig):
    """Train contour networks with and without a normalized-cut objective, and score them."""

    out: Path = Path("results/joint")  #: Folder of results.jsonl and table.md. Finished runs are not repeated.
    rows: tuple[str, ...] = ("contours", "soft")  #: Objectives next to the contours: contours for none, soft, j2.
    preset: str = "efficientnet-lite2"  #: Preset of the recipe contours.
    epochs: int = 16  #: Epochs of every training.
    seeds: tuple[int, ...] = (0, 1, 2)  #: Seeds of each row.
    images: str = "val"  #: Split that is scored.


class JointData(ContoursData):
    """Crops with the segmentation of one annotator, another one in every epoch."""

    def __init__(self, config: ContoursConfig) -> None:
        super().__init__(config)
        data = BSDS(self.folder, "train")
        samples = (data[i] for i in range(len(self.training)))
        self.people = [[labels.to(torch.uint8) for labels in sample.segmentations] for sample in samples]

    def item(self, index: int, epoch: int) -> Any:
        """Return a crop and the labels of its cells."""
        people = self.people[index]
        labels = self.training[index]._replace(target=people[epoch % len(people)])
        cut = augment(labels, self.config, generator_for(self.seed, epoch, index)).target
        return super().item(index, epoch), (255 * cut[CELL // 2 :: CELL, CELL // 2 :: CELL]).round().long()


class JointModule(ContoursModule):
    """Contour network whose finest features are also trained by an objective."""

    def __init__(self, config: ContoursConfig, model: ContourNet, objective: Any) -> None:
        super().__init__(config, model)
        self.objective = objective
        self.features: Tensor
        self.model.smooth[0].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features = output

    def training_step(self, batch: Any) -> Tensor:
        crops, labels = batch
        loss = super().training_step(crops)
        if self.objective is None:
            return loss
        cells = nnf.adaptive_avg_pool2d(self.features, labels.shape[-2:]).flatten(2).mT
        cut = self.objective(cells, labels.flatten(1)).mean()
        self.record("train/cut", cut)
        return loss + WEIGHT * cut


def score(task: tuple[str, Any, list[Any]]) -> tuple[ImageScores, NDArray[np.int64]]:
    """Scores of the hierarchy of one image, and boundary counts of its contours."""
    name, contours, people = task
    regions, tree = hierarchy_of(contours)
    maps = tree.levels([tree.regions_at(height) for height in LEVELS])[:, regions]
    counts = contour_counts(contours, people, thresholds=len(LEVELS))
    return score_image(name, list(maps), people, boundary=True), counts


class Joint(Experiment):
    """The table of joint training; see the module."""

    def train(self) -> None:
        """Train and score every row and seed that is missing."""
        config, root = self.config, self.config.root
        fixed = {"data": runs.data_hash(root, tuple(sorted({"train", config.images}))), "device": config.device}
        for seed in config.seeds:
            for row in config.chosen(OBJECTIVES):
                recipe = self.recipe(root, row, seed)
                configuration = {"training": runs.settings(recipe), "row": row, "weight": WEIGHT, "cell": CELL,
                                 "images": config.images, "levels": len(LEVELS)}  # fmt: skip
                weights = runs.weights_hash(recipe.model.backbone, recipe.model.weights)
                provenance = {**fixed, "weights": weights, "configuration": configuration}
                self.results.run(row, "seed", seed, provenance, partial(self.run, row, recipe, root))

    def recipe(self, root: Path, row: str, seed: int) -> ContoursConfig:
        """The training configuration of a row and a seed."""
        engine = self.config.engine(f"{row}-seed{seed}", seed, max_epochs=self.config.epochs, progress=True)
        data = {"root": str(root), "generate": 0, "split": "final", "batch_size": 4, "limit": self.config.data.limit}
        fields = {"engine": engine, "data": data, **self.config.overrides()}
        return merge(RECIPES["contours"].preset(self.config.preset), fields)

    def run(self, row: str, recipe: ContoursConfig, root: Path) -> dict[str, Any]:
        """Train a row and score its averaged network."""
        torch.manual_seed(recipe.engine.seed)
        model = ContourNet(recipe.model)
        load_start(model, recipe.model.backbone, recipe.model.weights)
        module = JointModule(recipe, model, OBJECTIVES[row])
        fit(recipe, module, JointData(recipe), name=row)
        model = module.average.module.eval()  # type: ignore[assignment]
        tasks = [
            (one.id, network_contours(model, one.image[None])[0], [labels.numpy() for labels in one.segmentations])
            for one in self.config.limited(BSDS(root, self.config.images))
        ]
        with self.config.pool() as pool:
            scores, counts = zip(*pool.map(score, tasks), strict=True)
        contours = boundary_scores(counts)
        return {
            "images": len(scores),
            "scores": summarize(scores)
            | {name.replace("boundary", "contours"): value for name, value in contours.items()},
            "covering": [round(float(one.covering.mean(1).max()), 5) for one in scores],
        }

    def summarize(self) -> None:
        """Write the mean over seeds, with paired intervals against contours alone."""
        done = self.results.require({row: each for row in OBJECTIVES if (each := self.results.runs(row))})
        first = next(iter(done.values()))
        note = (
            f"{first[0]['metrics']['images']} images of {self.config.images}; mean ± deviation over "
            f"{len(first)} seeds. Difference: covering of the best level of an image against the row "
            "contours, with its 95 % interval."
        )
        title = "Joint training with normalized cuts"
        table = runs.contour_table(done, COLUMNS, title=title, note=note)
        self.results.write_table(table, runs=[run for all_runs in done.values() for run in all_runs])


main = Joint.main
