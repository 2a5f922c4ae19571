"""State of a segmented photograph: height in the hierarchy, edits, views and exports."""

from __future__ import annotations

import base64
import io
import time
import zipfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.files import counted
from matbackprop.vision.inference import segment_photograph
from matbackprop.vision.inference.export import Format
from matbackprop.vision.inference.segmenting import Segments
from matbackprop.vision.segmentation import Hierarchy, split_region, unite_region

MAX_SIDE = 800  #: Longest side of a photograph on the page.
MAX_PAST = 100  #: Number of undo steps.
VIEWS = ("regions", "contours", "heights")

Pixels = NDArray[np.uint8]


def fit_photograph(pixels: Pixels) -> Pixels:
    """Reduce a photograph (h, w, 3) to a longest side of at most :data:`MAX_SIDE` pixels."""
    height, width = pixels.shape[:2]
    if min(height, width) < 16:
        raise DataError(f"The photograph has {width}×{height} pixels. Each side needs 16 or more.")
    image = Image.fromarray(pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(image)


def sample_photographs(folder: Path) -> list[Path]:
    """Write the sample photographs of scikit-image to a folder and return their paths."""
    import skimage.data

    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.jpg" for name in ("coffee", "chelsea", "astronaut", "rocket")]
    for path in paths:
        if not path.exists():
            Image.fromarray(fit_photograph(getattr(skimage.data, path.stem)())).save(path, quality=92)
    return paths


class Edit(NamedTuple):
    """Edit that separates a set of leaves from the others ("split"), merges it ("merge"), or does both ("name")."""

    action: str
    leaves: NDArray[np.bool_]
    name: str = ""


@dataclass(frozen=True, eq=False)
class Analysis:
    """Segmented photograph. Merges up to ``height`` are applied, then the edits, at every height.

    ``past`` are earlier values of ``edits``, for undo.
    """

    segments: Segments
    height: float
    edits: tuple[Edit, ...] = ()
    past: tuple[tuple[Edit, ...], ...] = ()

    @property
    def tree(self) -> Hierarchy:
        """Hierarchy of the segmentation."""
        assert self.segments.hierarchy is not None
        return self.segments.hierarchy

    @cached_property
    def leaves(self) -> NDArray[np.int32]:
        """Label map (h, w) of the leaves at the size of the photograph."""
        return self.segments.labels(self.tree.count)

    @cached_property
    def partition(self) -> NDArray[np.int32]:
        """Region (S,) of each leaf at the current height, with edits."""
        labels = self.tree.levels([self.tree.regions_at(self.height)])[0].astype(np.int64)
        for action, leaves, _ in self.edits:
            if action == "split":
                labels = 2 * labels + leaves
            elif action == "name" or len(np.unique(labels[leaves])) > 1:
                labels[leaves] = labels.max() + 1
            labels = np.unique(labels, return_inverse=True)[1]
        return labels.astype(np.int32)

    @property
    def names(self) -> list[str]:
        """Region names, ``""`` for none. Editing a region removes its name."""
        names = [""] * self.count
        for action, leaves, name in self.edits:
            region = self.partition[leaves.argmax()]
            if action == "name" and np.array_equal(self.partition == region, leaves):
                names[region] = name
        return names

    @property
    def count(self) -> int:
        """Number of regions."""
        return int(self.partition.max()) + 1

    def at(self, height: float) -> Analysis:
        """Return a copy at another height, with the same edits."""
        return replace(self, height=height)

    def region(self, x: int, y: int) -> int:
        """Return the index of the region at a pixel of the photograph."""
        height, width = self.leaves.shape
        return int(self.partition[self.leaves[min(max(y, 0), height - 1), min(max(x, 0), width - 1)]])

    def mask(self, x: int, y: int) -> NDArray[np.bool_]:
        """Return the mask (h, w) of the region at a pixel."""
        return self.partition[self.leaves] == self.region(x, y)

    def edited(self, x: int, y: int, action: str) -> Analysis:
        """Return a copy with the region at a pixel split (``"split"``) or merged with others (``"merge"``)."""
        region = self.region(x, y)
        after = {"split": split_region, "merge": unite_region}[action](self.tree, self.partition, region)
        if after.max() == self.partition.max():
            return self
        parts = np.unique(after[self.partition == region])
        return self._changed([Edit(action, after == part) for part in parts])

    def named(self, x: int, y: int, name: str) -> Analysis:
        """Return a copy with a name for the region at a pixel. An empty name removes the current name."""
        return self._changed([Edit("name", self.partition == self.region(x, y), name.strip()[:80])])

    def _changed(self, edits: list[Edit]) -> Analysis:
        return replace(self, edits=(*self.edits, *edits)[-2 * MAX_PAST :], past=(*self.past[-MAX_PAST:], self.edits))

    def undone(self) -> Analysis:
        """Return a copy without the last edit."""
        return replace(self, edits=self.past[-1], past=self.past[:-1]) if self.past else self

    def stage(self, photo: str, view: str = "regions") -> dict[str, Any]:
        """Return the input of ``stage.js`` for the URL of the photograph and one of :data:`VIEWS`.

        Regions are run-length encoded (label, length, …) in row-major order. The page ignores outdated responses.
        """
        flat = self.partition[self.leaves].ravel()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1])
        lengths = np.diff(starts, append=flat.size)
        if view == "contours":
            photo = self._ink(self.segments.contours)
        elif view == "heights":
            borders = self.segments.ucm()
            photo = self._ink(np.maximum(borders[1::2, 2::2], borders[2::2, 1::2]))
        return {
            "photo": photo,
            "alt": f"{self.segments.name} divided into {counted(self.count, 'region')}",
            "width": self.leaves.shape[1],
            "height": self.leaves.shape[0],
            "runs": np.stack([flat[starts], lengths], 1).ravel().tolist(),
            "names": self.names,
            "view": view,
            "time": time.monotonic(),
        }

    def _ink(self, strength: Any) -> str:
        """Return a map (h', w') in [0, 1] as the data URL of an image in which high values are dark."""
        bytes_ = (255 * (1 - np.clip(strength, 0, 1))).round().astype(np.uint8)
        height, width = self.leaves.shape
        file = io.BytesIO()
        Image.fromarray(bytes_).resize((width, height), Image.Resampling.BILINEAR).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    def export(self, folder: Path, kind: Format) -> Path:
        """Write a file, or an archive of several files, and return its path.

        npz and ucm2 contain the whole hierarchy; other formats contain the current regions.
        """
        shown = self.segments
        if kind not in ("npz", "ucm2"):
            shown = shown.with_regions(self.partition[shown.regions], self.names if any(self.names) else ())
        files = list(shown.save(folder, formats=[kind]).values())
        if len(files) == 1:
            return files[0]
        path = folder / f"{Path(self.segments.name).stem}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                archive.write(file, file.name)
        return path


def analyze(photograph: Pixels, model: Any = None, name: str = "picture.png") -> Analysis:
    """Segment a photograph (h, w, 3) with a contour network, or image gradients if ``model`` is None.

    The initial height is the default threshold of the model.

    Example:
        >>> image = np.zeros((64, 96, 3), np.uint8); image[:, 48:] = 200
        >>> analyze(image).count
        2
    """
    segments = replace(segment_photograph(photograph, model), name=name)
    if segments.hierarchy is None:
        raise ConfigurationError("The model has no hierarchy of regions. Choose a contour network.")
    return Analysis(segments, segments.threshold)
