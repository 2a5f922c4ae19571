"""BSDS500 by the usual protocol: contours and regions of its test images, compared with published numbers.

A recipe is trained on ``train`` and ``val`` (300 images). For every image of ``test``, the network
writes a soft contour map (PNG, 16 bits) and an ultrametric contour map (``ucm2``), as by default,
averaged over mirror images, and also averaged over scales. The evaluator scores these maps. Test
images are scored once per final model. Use
``--images val`` for choices, which trains on ``train`` and scores ``val``. ``--model box`` scores a
saved network instead.

The command also draws precision and recall of boundaries. A gallery of images from the worst to the
best covering is written to the folder of unpublished files, because it shows images of the data set.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.io import savemat

from experiments import runs
from experiments.baselines import HUMANS, run_baseline
from experiments.runs import Experiment, ImagesConfig, Measured, Run
from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.configuration import merge
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.data.label_files import index_label_files, read_contour_map, read_label_maps
from matbackprop.vision.data.pictures import find_pictures, read_picture
from matbackprop.vision.inference.drawing import draw_boundaries
from matbackprop.vision.inference.loading import load_segmenter, model_folder
from matbackprop.vision.inference.segmenting import network_contours, threshold_of
from matbackprop.vision.metrics import (
    ImageScores,
    boundary_curve,
    contour_counts,
    paired_bootstrap,
    region_scores,
    score_image,
    summarize,
)
from matbackprop.vision.metrics.evaluation import boundary_scores
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.weights import WEIGHTS
from matbackprop.vision.report.figures import lines, segmentation_grid
from matbackprop.vision.report.tables import Table
from matbackprop.vision.segmentation import Hierarchy, contour_map, merge_contours, watershed_regions
from matbackprop.vision.training.config import RECIPES
from matbackprop.vision.training.engine import run_recipe


@dataclass
class Config(ImagesConfig):
    """Train on BSDS500, write contours and hierarchies of its test images, and score them."""

    #: Folder of results.jsonl, table.md and figures. Finished runs are not repeated.
    out: Path = Path("results/bsds500")
    rows: tuple[str, ...] = ("tiny-vit",)  #: Presets of the recipe contours to train.
    #: Saved contour networks, one per seed, to score instead of training: box, folders or run folders.
    model: tuple[str, ...] = ()
    #: test: train on train and val, score test. val: train on train, score val.
    images: Literal["test", "val"] = "test"
    seeds: tuple[int, ...] = (0, 1, 2)  #: Seeds of each row.
    #: Averaged contours: default (none), single (with the mirror image), multi (also over image sizes).
    parts: tuple[Literal["default", "single", "multi"], ...] = ("default", "single", "multi")
    levels: int = 99  #: Thresholds at which contours and hierarchies are cut.

    @property
    def split(self) -> str:
        """The training images."""
        return "train+val" if self.images == "test" else "final"


#: Part of the runs → averaged contours.
PARTS = {"default": "one size", "single": "one size, mirror image", "multi": "three sizes, mirror image"}
SCALES = {"default": (1.0,), "single": (1.0,), "multi": (0.75, 1.0, 1.4)}  #: Part of the runs → image sizes.
SAVED = "saved"  #: Row of a saved network.
FIXED = range(2, 41)  #: Fixed numbers of regions that the default segmentation is compared with.
#: Column of the table → name of the measure.
COLUMNS = {
    "contours F ODS": "contours_ods",
    "OIS": "contours_ois",
    "AP": "contours_ap",
    "regions F ODS": "boundary_ods",
    "regions OIS": "boundary_ois",
    "covering ODS": "covering_ods",
    "covering OIS": "covering_ois",
    "covering best": "covering_best",
    "PRI ODS": "pri_ods",
    "PRI OIS": "pri_ois",
    "VI ODS": "vi_ods",
    "VI OIS": "vi_ois",
    "F objects ODS": "objects_ods",
    "one map, best": "one_best",
    "one map, average": "one_average",
    "of 8, best": "eight_best",
    "of 8, average": "eight_average",
    "default view": "covering_default_view",
}


#: Published numbers on the 200 test images after training on train and val, with their source.
PUBLISHED = {
    "gPb-owt-ucm": (
        "Arbelaez, Maire, Fowlkes, Malik, PAMI 2011; objects: Pont-Tuset, Marques, CVPR 2013",
        {"covering_ods": 0.59, "covering_ois": 0.65, "covering_best": 0.74, "boundary_ods": 0.726,
         "boundary_ois": 0.760, "objects_ods": 0.348},
    ),
    "PMI": (
        "Isola, Zoran, Krishnan, Adelson, ECCV 2014",
        {"covering_ods": 0.61, "covering_ois": 0.66, "covering_best": 0.76},
    ),
    "MCG": (
        "Pont-Tuset, Arbelaez, Barron, Marques, Malik, PAMI 2017",
        {"covering_ods": 0.61, "covering_ois": 0.66, "boundary_ods": 0.747, "objects_ods": 0.380},
    ),
    "Hierarchical merge trees": (
        "Liu, Seyedhosseini, Tasdizen, TIP 2016", {"covering_ods": 0.63, "covering_ois": 0.68}
    ),
    "LEP": ("Zhao, BMVC 2015", {"objects_ods": 0.417}),
    "COB": (
        "Maninis, Pont-Tuset, Arbelaez, Van Gool, PAMI 2018",
        {"boundary_ods": 0.795, "boundary_ois": 0.820, "objects_ods": 0.419},
    ),
    "People": ("Arbelaez, Maire, Fowlkes, Malik, PAMI 2011", {"contours_ods": 0.803}),
}  # fmt: skip


class Bsds500(Experiment):
    """The table of BSDS500; see the module."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chosen = {SAVED: None} if config.model else config.chosen(RECIPES["contours"].presets)

    # ---------------------------------------------------------------------------------------------------------- runs

    def train(self) -> None:
        """Train every row and seed, export and score; then score people."""
        for seed in range(len(self.config.model)) if self.config.model else self.config.seeds:
            for row in self.chosen:
                network = cache(lambda row=row, seed=seed: self.model(row, seed))  # trained if a part is missing
                for part in self.config.parts:
                    work = partial(self.score, row, seed, part, network)
                    self.results.run(row, part, seed, self.provenance(row, seed, part), work)
        data = BSDS(self.config.root, self.config.images)
        provenance = {"configuration": {"method": HUMANS}, "data": self.data_hash(), "weights": "none", "device": "cpu"}
        with self.config.pool() as pool:
            self.results.run(HUMANS, "baseline", 0, provenance, lambda: run_baseline(HUMANS, data, pool))

    def work(self, row: str, seed: int) -> Path:
        """The run folder of a training."""
        return runs.WORK / self.config.out.name / f"{row}-seed{seed}"

    def recipe(self, row: str, seed: int) -> Any:
        """The training configuration of a row and a seed."""
        config = self.config
        precision = {} if config.device == "cuda" else {"precision": "32"}
        engine = config.engine(self.work(row, seed).name, seed, progress=True, **precision)
        data = {"root": str(config.root), "generate": 0, "split": config.split, "limit": config.data.limit}
        return merge(RECIPES["contours"].preset(row), {"engine": engine, "data": data, **config.overrides()})

    def data_hash(self) -> str:
        """Hash of the training and the scored images."""
        return runs.data_hash(self.config.data.folder(), tuple(sorted({"train", "val", self.config.images})))

    def provenance(self, row: str, seed: int, part: str) -> dict[str, Any]:
        """Configuration, data, starting weights and device of a run."""
        config = self.config
        configuration: dict[str, Any] = {"images": config.images, "scales": SCALES[part], "levels": config.levels}
        if part == "default":
            configuration["mirror"] = False  # recorded for this part only, so that published hashes stay valid
        if config.model:
            weights = runs.file_hash(model_folder(config.model[seed]) / WEIGHTS)
        else:
            recipe = self.recipe(row, seed)
            configuration["training"] = runs.settings(recipe)
            weights = runs.weights_hash(recipe.model.backbone, recipe.model.weights)
        data = self.data_hash()
        return {"configuration": configuration, "data": data, "weights": weights, "device": config.device}

    def model(self, row: str, seed: int) -> ContourNet:
        """Train, export, and load the exported network; or load the saved one."""
        if self.config.model:
            saved = load_segmenter(self.config.model[seed], self.config.device)
            if not isinstance(saved, ContourNet):
                message = "is not a contour network. Pass one of 'train contours'."
                raise ConfigurationError(f"{self.config.model[seed]} {message}")
            return saved.eval()
        run = run_recipe(RECIPES["contours"], self.recipe(row, seed), preset=row)
        return ContourNet.from_pretrained(run.path / "model").eval().to(self.config.device)

    def score(self, row: str, seed: int, part: str, network: Any) -> dict[str, Any]:
        """Write contours and hierarchies of all images, and score those with human maps."""
        config, root = self.config, self.config.root
        images = find_pictures([root / "images" / config.images])[: config.data.limit]
        truth = index_label_files(root / "groundTruth" / config.images, names=[path.stem for path in images])
        if not truth:
            raise DataError(f"{root} has no human map of {config.images}. Add them to groundTruth/{config.images}.")
        folder, model = self.work(row, seed) / f"{config.images}-{part}", network()
        for kind in ("contours", "ucm2"):
            shutil.rmtree(folder / kind, ignore_errors=True)
            (folder / kind).mkdir(parents=True)
        for path in images:
            image = torch.from_numpy(read_picture(path).pixels.transpose(2, 0, 1).copy())
            contours = network_contours(model, image[None], SCALES[part], part != "default")[0]
            Image.fromarray(np.round(65535 * contours).astype(np.uint16)).save(folder / "contours" / f"{path.stem}.png")
        tasks = [(path.stem, folder, truth.get(path.stem, [])) for path in images]
        with config.pool() as pool:
            threshold = threshold_of(model)
            scored = pool.map(partial(_score, levels=config.levels, threshold=threshold), tasks)
            scores, counts, views = zip(*filter(None, scored), strict=True)
        curve = boundary_curve(counts)
        contour_scores = {name.replace("boundary", "contours"): v for name, v in boundary_scores(counts).items()}
        summary = summarize(scores) | contour_scores
        default, fixed = np.array([v[0] for v in views]), np.array([v[1:] for v in views])
        best = int(fixed.mean(0).argmax())
        self.gallery(folder, [path for path in images if path.stem in truth], default, threshold)
        return {
            "images": len(images),
            "scored": len(scores),
            "scores": summary | one_map(scores) | {"covering_default_view": float(default.mean())},
            "default_view": {"threshold": threshold, "best_fixed_regions": best + FIXED[0],
                             "covering_of_fixed": float(fixed[:, best].mean()),
                             **paired_bootstrap(default, fixed[:, best])._asdict()},
            "curve": {k: [round(v, 5) for v in values] for k, values in curve.items() if k != "ods"},
            "per_image": {s.id: [round(s.paper_best, 6), round(s.paper_average, 6), round(float(v), 6)]
                          for s, v in zip(scores, default, strict=True)},
        }  # fmt: skip

    def gallery(self, folder: Path, images: Sequence[Path], covering: NDArray[np.float64], threshold: float) -> None:
        """Draw the default segmentation of images from the worst to the best covering."""
        quantiles = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
        order, rows, names = np.argsort(covering), [], []
        for quantile in quantiles:
            index = order[round(quantile * (len(order) - 1))]
            contours = read_contour_map(folder / "contours" / f"{images[index].stem}.png")
            regions, tree = hierarchy_of(contours)
            labels = tree.levels([tree.regions_at(threshold)])[0][regions]
            pixels = read_picture(images[index]).pixels
            gray = np.repeat(np.round(255 * contours).astype(np.uint8)[..., None], 3, -1)
            rows.append([pixels, gray, draw_boundaries(pixels, labels)])
            names.append(f"{covering[index]:.2f}")
        segmentation_grid(["image", "contours", "default segmentation"], rows, folder / "gallery.png")
        runs.log.info("%s: covering %s", folder / "gallery.png", ", ".join(names))

    # ------------------------------------------------------------------------------------------------------- summary

    def summarize(self) -> None:
        """Write the scores and the published ones."""
        config = self.config
        body: list[list[Any]] = [
            [name, "200 of test", "", "", *(scores.get(n) for n in COLUMNS.values()), source]
            for name, (source, scores) in PUBLISHED.items()
        ]
        used: list[Run] = []
        for row in self.chosen:
            for part, averaged in PARTS.items():
                if not (done := self.results.runs(row, part)):
                    continue
                used += done
                first, metrics = done[0]["provenance"]["configuration"], done[0]["metrics"]
                each = [run["metrics"]["scores"] for run in done]
                cells = [Measured.of([s[n] for s in each]) if n in each[0] else None for n in COLUMNS.values()]
                images = f"{metrics['scored']} of {first['images']}"
                source = f"this program, seeds: {len(done)}"
                method = f"contours, {', '.join(config.model) or row}"
                body.append([method, images, first["levels"], averaged, *cells, source])
            curves = {
                PARTS[part]: done[0]["metrics"]["curve"] for part in PARTS if (done := self.results.runs(row, part))
            }
            if curves:
                target = config.out / "figures" / f"{row}-{config.images}.png"
                points = {name: (curve["recall"], curve["precision"]) for name, curve in curves.items()}
                lines(points, target, xlabel="recall of contours", ylabel="precision")
        self.results.require(used)
        for run in self.results.runs(HUMANS, "baseline"):
            people = {f"one_{n}": run["metrics"]["scores"][f"paper_{n}"] for n in ("best", "average")}
            cells = [people.get(n) for n in COLUMNS.values()]
            body.append(["People, leave one out", f"{len(run['metrics']['per_image'])} of {config.images}", 1, "",
                         *cells, "this program"])  # fmt: skip
        trained = "" if config.model else f"trained on {'train' if config.split == 'final' else 'train and val'}, "
        note = (
            f"Rows of this program: {trained}mean ± deviation over seeds; contours: soft maps thinned by "
            "non-maximum suppression; regions: the hierarchy (ucm2). One map: best and average covering of the "
            "segmentation at one threshold for all images (that of covering ODS), as people are scored; of 8: the best "
            "of eight evenly spaced thresholds per image. Published numbers: after training on train and val."
        )
        columns = ["method", "images", "levels", "scales", *COLUMNS, "source"]
        formats = dict.fromkeys(COLUMNS, ".3f")
        self.results.write_table(Table(columns, body, title="BSDS500", note=note, formats=formats), runs=used)


def hierarchy_of(contours: NDArray[np.float32]) -> tuple[NDArray[np.int32], Hierarchy]:
    """The regions of the watershed, and the tree of their merges."""
    regions = watershed_regions(contours)
    return regions, merge_contours(regions, contours)


def covering_at(scores: Sequence[ImageScores], level: int) -> float:
    """Covering of one level for all images, pooled over human maps."""
    return float(np.concatenate([score.covering[level] for score in scores]).mean())


def one_map(scores: Sequence[ImageScores]) -> dict[str, float]:
    """The paper's best and average covering of one segmentation per image, and of the best of eight.

    The one segmentation is at the threshold of covering ODS; the eight are evenly spaced.
    """
    levels = len(scores[0].covering)
    ods = max(range(levels), key=lambda level: covering_at(scores, level))
    eight = np.unique(np.round(np.linspace(0, levels - 1, 10)[1:-1]).astype(int))
    out = {}
    for name, chosen in (("one", [ods]), ("eight", eight)):
        covering = [score.covering[chosen] for score in scores]
        out[f"{name}_best"] = float(np.mean([c.max() for c in covering]))
        out[f"{name}_average"] = float(np.mean([c.mean(1).max() for c in covering]))
    return out


def _score(
    task: tuple[str, Path, list[Path]], levels: int, threshold: float
) -> tuple[ImageScores, NDArray[np.int64], list[float]] | None:
    """Write a hierarchy; return its scores, boundary counts of its contours, and the covering of one map.

    The map is that of the default threshold or of a fixed number of regions; coverings are averaged over annotators.
    None for an image without human maps.
    """
    name, folder, truth = task
    contours = read_contour_map(folder / "contours" / f"{name}.png")
    regions, tree = hierarchy_of(contours)
    hierarchy = folder / "ucm2" / f"{name}.mat"
    savemat(hierarchy, {"ucm2": contour_map(regions, tree)}, do_compression=True)
    if not truth:
        return None
    people = [labels for path in truth for labels in read_label_maps(path)]
    maps = read_label_maps(hierarchy, thresholds=levels)
    counts = contour_counts(contours, people, thresholds=levels)
    views = tree.levels([tree.regions_at(threshold), *FIXED])[:, regions]
    covering = region_scores(list(views), people).covering.mean(1).tolist()
    return score_image(name, maps, people, boundary=True, objects=True), counts, covering


main = Bsds500.main
