"""What the page shows of an analysed photograph, as plain arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from matbackprop.errors import DataError
from matbackprop.inference import Segments
from matbackprop.inference.drawing import WHITE, draw_boundaries, paint_labels
from matbackprop.inference.editing import split_region, unite_region
from matbackprop.inference.export import Format
from matbackprop.report.figures import spectrum

__all__ = ["MAX_REGIONS", "Analysis", "counted", "fit_photograph", "sample_photographs"]

MAX_REGIONS = 40
MAX_SIDE = 800
MAX_PAST = 100
"""Steps that can be undone."""

Picture = NDArray[np.uint8]


def fit_photograph(pixels: Picture, longest: int = MAX_SIDE) -> Picture:
    """Bring a photograph (h, w, 3) to a longest side of at most ``longest`` pixels.

    Raises:
        DataError: it is too small to segment.

    Example:
        >>> fit_photograph(np.zeros((300, 1280, 3), np.uint8)).shape
        (188, 800, 3)
    """
    height, width = pixels.shape[:2]
    if min(height, width) < 16:
        raise DataError(f"The photograph has {width}×{height} pixels; each side needs 16 or more.")
    scale = longest / max(height, width)
    if scale >= 1:
        return pixels
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def sample_photographs(folder: Path) -> list[Path]:
    """Write scikit-image's own sample photographs to ``folder`` and return their paths."""
    import skimage.data

    paths = []
    for name in ("coffee", "chelsea", "astronaut", "rocket"):
        path = folder / f"{name}.jpg"
        if not path.exists():
            Image.fromarray(fit_photograph(getattr(skimage.data, name)())).save(path, quality=92)
        paths.append(path)
    return paths


@dataclass(frozen=True, eq=False)
class Analysis:
    """A photograph's segmentations, the space that its cells lie in, and what a visitor has done.

    Attributes:
        segments: the segmentations.
        coordinates: (n, gh, gw) leading spectral coordinates on the features' grid.
        eigenvalues: (e,) their eigenvalues, descending.
        past: partitions from first to last, of which the last one is shown: (S,) regions of the superpixels, or label
            maps after clustering.
    """

    segments: Segments
    coordinates: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]
    past: tuple[NDArray[np.int32], ...] = ()

    @property
    def photograph(self) -> Picture:
        """(h, w, 3) bytes."""
        return self.segments.pixels

    @property
    def shown(self) -> Segments:
        """The photograph with the partition that is shown."""
        return self.segments.with_regions(self._map(self.past[-1]))

    @property
    def can_edit(self) -> bool:
        """Whether regions can be divided and united: along a tree of merges."""
        return self.segments.hierarchy is not None

    def _map(self, partition: NDArray[np.int32]) -> NDArray[np.int32]:
        superpixels = self.segments.superpixels
        return partition if superpixels is None else partition[superpixels]

    def _then(self, partition: NDArray[np.int32]) -> Analysis:
        return replace(self, past=(*self.past[-MAX_PAST:], partition))

    def level(self, k: int) -> Analysis:
        """Show ``k`` regions; after clustering, the nearest number of clusters that there is."""
        tree = self.segments.hierarchy
        if tree is not None:
            return self._then(tree.levels([k])[0].astype(np.int32))
        nearest = min(self.segments.ks, key=lambda known: (abs(known - k), known))
        return self._then(self.segments.small_labels(nearest))

    def edited(self, x: int, y: int, action: str) -> Analysis:
        """Divide (``"split"``) or unite (``"merge"``) the region under a pixel of the photograph."""
        tree, superpixels = self.segments.hierarchy, self.segments.superpixels
        if tree is None or superpixels is None:
            return self
        height, width = self.segments.size
        under = superpixels[y * superpixels.shape[0] // height, x * superpixels.shape[1] // width]
        change = {"split": split_region, "merge": unite_region}[action]
        return self._then(change(tree, self.past[-1], int(self.past[-1][under])))

    def undone(self) -> Analysis:
        """Go back by one step."""
        return replace(self, past=self.past[:-1]) if len(self.past) > 1 else self

    def outlined(self) -> Picture:
        """The photograph with the borders of the regions."""
        return self.shown.outlined()

    def painted(self) -> Picture:
        """Every region in its mean colour."""
        return paint_labels(self.shown.labels(), self.photograph)

    def mask(self, x: int, y: int) -> NDArray[np.bool_]:
        """The region under a pixel."""
        labels = self.shown.labels()
        return labels == labels[y, x]

    def levels(self) -> list[tuple[Picture, str]]:
        """Overview from coarse to fine: mean colours with borders, and the number of regions."""
        out = []
        for k in self.segments.ks:
            labels = self.segments.labels(k)
            picture = draw_boundaries(paint_labels(labels, self.photograph), labels, colour=WHITE)
            out.append((picture, counted(self.segments.count(k))))
        return out

    def export(self, folder: Path, formats: Sequence[Format]) -> Path:
        """Write files and return their archive, named after the photograph.

        Label maps, masks and polygons are those of what is shown; the levels (npz) and the contour map (ucm2, after
        merging only) are those of the whole hierarchy.
        """
        stem = Path(self.segments.name).stem
        whole = [f for f in formats if f == "npz" or (f == "ucm2" and self.can_edit)]
        one = [f for f in formats if f not in ("npz", "ucm2")]
        files = [
            path
            for segments, some in ((self.segments, whole), (self.shown, one))
            if some
            for path in segments.save(folder / stem, formats=some).values()
        ]
        with zipfile.ZipFile(folder / f"{stem}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                archive.write(path, path.name)
        return folder / f"{stem}.zip"

    def eigenvectors(self) -> list[tuple[Picture, str]]:
        """The leading coordinates as pictures: orange above, blue below the middle."""
        out = []
        size = (self.photograph.shape[1], self.photograph.shape[0])
        for i, values in enumerate(self.coordinates):
            low, high = np.percentile(values, [1, 99])
            flat = high - low <= 1e-6 * np.abs(values).max()  # the first one of normalized cuts is constant
            unit = np.full(values.shape, 0.5) if flat else np.clip((values - low) / (high - low), 0, 1)
            picture = Image.fromarray(_diverging(unit)).resize(size, Image.Resampling.BICUBIC)
            out.append((np.asarray(picture), f"{i + 1}: eigenvalue {self.eigenvalues[i]:.3f}"))
        return out

    def spectrum(self) -> Picture:
        """The eigenvalues as a figure."""
        fig = spectrum({"eigenvalues": self.eigenvalues}, title="Spectrum of the features")
        fig.canvas.draw()
        return np.asarray(fig.canvas.buffer_rgba(), dtype=np.uint8)[..., :3].copy()  # type: ignore[attr-defined]


def counted(count: int) -> str:
    """``"1 region"``, ``"8 regions"``."""
    return f"{count} region{'' if count == 1 else 's'}"


def _diverging(unit: NDArray[np.float64]) -> Picture:
    """Map [0, 1] to blue – light grey – orange."""
    blue, middle, orange = np.array([[26, 84, 166], [242, 242, 240], [217, 102, 18]])
    t = 2 * unit[..., None] - 1
    side = np.where(t < 0, blue, orange)
    return (middle + np.abs(t) * (side - middle)).round().astype(np.uint8)
