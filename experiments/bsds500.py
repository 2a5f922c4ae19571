"""BSDS500 as others report it: contour maps of its test images, scored at 99 thresholds beside published numbers.

The network is trained on ``train`` and ``val`` (300 images). Every image of ``test`` becomes an ultrametric contour map
(``ucm2``) that the benchmark's own tools can read; images with people's maps are scored. ``--images val`` trains on
``train`` and segments ``val``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.io import savemat

from experiments.config import Bsds500Config
from experiments.table import Device, Job, data_digest, fingerprint, settings, weights_digest
from experiments.table2 import COLOUR_SETTINGS, SegmentationTable, measure_digest
from matbackprop.errors import DataError
from matbackprop.vision.data.bsds import BSDS, find_root
from matbackprop.vision.data.cache import default_cache_folder
from matbackprop.vision.data.label_files import index_label_files, read_label_maps
from matbackprop.vision.data.pictures import find_pictures, read_picture
from matbackprop.vision.files import atomic_folder
from matbackprop.vision.inference.segmenting import merge_by_colour
from matbackprop.vision.metrics.evaluation import ImageScores, score_image, summarize
from matbackprop.vision.models.deep_ncuts import DeepNCuts, Merging
from matbackprop.vision.report.tables import Measured, Table
from matbackprop.vision.segmentation import contour_map
from matbackprop.vision.training.config import NCutsConfig
from matbackprop.vision.training.ncuts import data_folder, open_images
from matbackprop.vision.training.run_folder import versions

COLOUR = "colour"
"""The row without a network."""

COLUMNS = {
    "covering ODS": "covering_ods",
    "covering OIS": "covering_ois",
    "covering best": "covering_best",
    "PRI ODS": "pri_ods",
    "PRI OIS": "pri_ois",
    "VI ODS": "vi_ods",
    "VI OIS": "vi_ois",
    "F boundary ODS": "boundary_ods",
    "F boundary OIS": "boundary_ois",
    "AP boundary": "boundary_ap",
    "F objects ODS": "objects_ods",
    "F objects OIS": "objects_ois",
}
"""Column of the table → name of the measure."""

PUBLISHED: dict[str, tuple[str, dict[str, float]]] = {
    "gPb-owt-ucm": (
        "Arbelaez, Maire, Fowlkes, Malik, PAMI 2011; objects: Pont-Tuset, Marques, CVPR 2013",
        {
            "covering_ods": 0.59,
            "covering_ois": 0.65,
            "covering_best": 0.74,
            "boundary_ods": 0.726,
            "objects_ods": 0.348,
            "objects_ois": 0.385,
        },
    ),
    "PMI": (
        "Isola, Zoran, Krishnan, Adelson, ECCV 2014",
        {"covering_ods": 0.61, "covering_ois": 0.66, "covering_best": 0.76},
    ),
    "MCG": (
        "Pont-Tuset, Arbelaez, Barron, Marques, Malik, PAMI 2017",
        {"covering_ods": 0.61, "covering_ois": 0.66, "boundary_ods": 0.747, "objects_ods": 0.380},
    ),
    "Hierarchical merge tree": ("Liu, Seyedhosseini, Tasdizen, TIP 2016", {"covering_ods": 0.63, "covering_ois": 0.68}),
    "LEP": ("Zhao, BMVC 2015", {"objects_ods": 0.417}),
    "COB": ("Maninis, Pont-Tuset, Arbelaez, Van Gool, PAMI 2018", {"boundary_ods": 0.795, "objects_ods": 0.419}),
}
"""Published results on the 200 test images: method → (source, measures)."""


class Bsds500(SegmentationTable):
    """The table of BSDS500; see the module."""

    config: Bsds500Config

    rows: ClassVar[dict[str, str]] = {
        COLOUR: "Merging by Lab colour and contrast (no network)",
        "hypercolumns": "Hypercolumns, merging (VGG-16, frozen)",
        "hypercolumns-tuned": "Hypercolumns, merging (VGG-16, tuned)",
        "hypercolumns-tiny-vit": "Hypercolumns, merging (MobileSAM's TinyViT, tuned)",
    }
    parts: ClassVar[dict[str, tuple[str, ...]]] = {"all": ("seed",), "train": ("seed",)}

    # ---------------------------------------------------------------------------------------------------------- runs

    @property
    def splits(self) -> tuple[str, ...]:
        """The parts of BSDS500 that are trained on."""
        return ("train", "val") if self.config.images == "test" else ("train",)

    def prepare(self) -> None:
        """Decode the training images and find their superpixels."""
        if networks := [key for key in self.chosen if key != COLOUR]:
            open_images(self._recipe(Job(networks[0], "seed"), self.device).data, "train")

    def jobs(self, part: str) -> Iterable[Job]:
        """One run for each row and seed; what is not trained needs no seed."""
        return [job for key in self.chosen for job in self.seeds(key)] if part == "seed" else []

    def seeds(self, key: str) -> list[Job]:
        """The runs of a row."""
        return [Job(key, "seed", seed) for seed in ((0,) if key == COLOUR else self.config.seeds)]

    def _recipe(self, job: Job, device: Device) -> NCutsConfig:
        recipe = self.recipe(job.key, device, seed=job.number, split="final")
        cache = self.config.data.cache or default_cache_folder()
        recipe.data.root = join_splits(data_folder(self.config.data), self.splits, cache)
        recipe.data.made = 0
        return recipe

    def provenance(self, job: Job, device: Device) -> dict[str, Any]:
        """Configuration, images, starting weights, device and measure of a run."""
        root, boundary, weights = data_folder(self.config.data), self.config.boundary, "none"
        configuration: dict[str, Any] = {"images": self.config.images, "limit": self.config.data.limit}
        splits: set[str] = {self.config.images}
        if job.key == COLOUR:
            configuration |= {"merging": COLOUR_SETTINGS, "superpixels": self.config.data.superpixels}
            device = "cpu"
        else:
            recipe = self._recipe(job, device)
            configuration |= {"training": settings(recipe), "splits": self.splits}
            splits |= {*self.splits}
            weights = weights_digest(recipe.model.resolved()["backbone"], recipe.model.weights)
        return {
            "configuration": configuration,
            "data": data_digest(root, tuple(sorted(splits))),
            "weights": weights,
            "device": device,
            "measure": {"boundary": boundary, "digest": measure_digest(boundary, objects=True)},
        }

    def run(self, job: Job) -> str:
        """Train, write the contour map of every image, and score those that people have segmented."""
        root = find_root(data_folder(self.config.data))
        images = find_pictures([root / "images" / self.config.images])[: self.config.data.limit]
        truth_folder = root / "groundTruth" / self.config.images
        truth = index_label_files(truth_folder, names=[p.stem for p in images]) if truth_folder.is_dir() else {}
        folder = self.place(job) / "ucm2"
        model, seconds = None, None
        if job.key != COLOUR:
            trained, seconds = self.train(self._recipe(job, self.device), job, trained_on="+".join(self.splits))
            model = self.on_device(trained).eval()
        folder.mkdir(parents=True, exist_ok=True)
        for path in images:
            merging = self._merge(model, read_picture(path).pixels)
            drawn = contour_map(merging.superpixels, merging.hierarchy)
            savemat(folder / f"{path.stem}.mat", {"ucm2": drawn}, do_compression=True)
        tasks = [(folder / f"{path.stem}.mat", truth[path.stem]) for path in images if path.stem in truth]
        scores = list(self.workers.map(partial(_score, boundary=self.config.boundary), tasks))
        result: dict[str, Any] = {
            "images": len(images),
            "scored": len(scores),
            "scores": summarize(scores) if scores else {},
            "per_image": {s.id: {k: v for k, v in s.row().items() if k != "id"} for s in scores},
            "training_seconds": seconds,
            "versions": versions(),
        }
        self.keep(job, result)
        if not scores:
            return f"{len(images)} contour maps in {folder}; there are no human maps to score them by"
        return f"covering ODS {result['scores']['covering_ods']:.4f} on {len(scores)} of {len(images)} images"

    def _merge(self, model: DeepNCuts | None, pixels: NDArray[np.uint8]) -> Merging:
        if model is None:
            return merge_by_colour(pixels, superpixels=self.config.data.superpixels)
        return model.merge(torch.from_numpy(pixels.transpose(2, 0, 1).copy()).to(self.device))

    # ------------------------------------------------------------------------------------------------------- summary

    def summarize(self) -> dict[str, Any]:
        """Write the scores beside published ones."""
        table: dict[str, Any] = {"images": self.config.images, "published": PUBLISHED, "rows": {}}
        body: list[list[Any]] = [
            [name, *(measures.get(n) for n in COLUMNS.values()), source]
            for name, (source, measures) in PUBLISHED.items()
        ]
        scored = set()
        for key, title in self.chosen.items():
            device, results = self.finished(self.seeds(key))
            each = [result["scores"] for result in results.values() if result["scores"]]
            if not results:
                continue
            scored |= {(result["scored"], result["images"]) for result in results.values()}
            table["rows"][key] = {
                "title": title,
                "device": device,
                "seeds": [job.number for job in results],
                "fingerprints": [fingerprint(result["provenance"]) for result in results.values()],
                "scores": {n: [scores[n] for scores in each] for n in (each[0] if each else {})},
            }
            cells = [Measured.of([s[n] for s in each]) if each and n in each[0] else None for n in COLUMNS.values()]
            body.append([title, *cells, "this program"])
        if not table["rows"]:
            raise DataError(f"there is no finished run in {self.store.folder}; train first.")
        counts = ", ".join(f"{number} of {total}" for number, total in sorted(scored))
        note = (
            "99 thresholds of a contour map per image, mean ± deviation over seeds. Trained on "
            f"{' and '.join(self.splits)}; {counts} images of {self.config.images} have human maps and were scored. "
            "Published numbers are for the 200 images of test after training on train and val."
        )
        columns, formats = ["method", *COLUMNS, "source"], dict.fromkeys(COLUMNS, ".3f")
        self.write_table(table, Table(columns, body, title="BSDS500", note=note, formats=formats))
        return table


def join_splits(root: Path, splits: tuple[str, ...], cache: Path) -> Path:
    """A folder in BSDS500's layout whose ``train`` holds the images and human maps of several splits.

    ``train`` alone is taken as it is; copies of several are kept in the cache.
    """
    if splits == ("train",):
        return root
    folder = cache / f"bsds-{'-'.join(splits)}-{data_digest(root, splits)}"
    if not folder.exists():
        with atomic_folder(folder) as scratch:
            for kind in ("images", "groundTruth"):
                (scratch / kind / "train").mkdir(parents=True)
            for data in (BSDS(root, split) for split in splits):
                for image, *maps in map(data.files, data.ids):
                    shutil.copy(image, scratch / "images" / "train")
                    for path in maps:
                        shutil.copy(path, scratch / "groundTruth" / "train")
    return folder


def _score(task: tuple[Path, list[Path]], boundary: bool) -> ImageScores:
    contours, truth = task
    people = [np.asarray(labels) for path in truth for labels in read_label_maps(path)]
    return score_image(contours.stem, read_label_maps(contours), people, boundary=boundary, objects=True)
