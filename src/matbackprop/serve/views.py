"""What the page shows of an analysed photograph, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from matbackprop.errors import DataError
from matbackprop.report.figures import draw_boundaries, paint_labels, spectrum
from matbackprop.spectral import MERGE_KS

__all__ = ["MAX_REGIONS", "Analysis", "fit_photograph", "sample_photographs"]

MAX_REGIONS = 40
MAX_SIDE = 640

Picture = NDArray[np.uint8]


def fit_photograph(image: NDArray[np.uint8] | None, longest: int = MAX_SIDE) -> Picture:
    """Bring a photograph to RGB bytes with a longest side of at most ``longest`` pixels.

    Raises:
        DataError: there is none, or it is too small to segment.

    Example:
        >>> fit_photograph(np.zeros((300, 1280), np.uint8)).shape
        (150, 640, 3)
    """
    if image is None:
        raise DataError("There is no photograph yet: drop one on the left, or choose a sample below it.")
    photograph = Image.fromarray(np.asarray(image, dtype=np.uint8)).convert("RGB")
    if min(photograph.size) < 16:
        raise DataError(f"The photograph has {photograph.width}×{photograph.height} pixels; 16 a side are needed.")
    if max(photograph.size) > longest:
        scale = longest / max(photograph.size)
        size = (max(1, round(photograph.width * scale)), max(1, round(photograph.height * scale)))
        photograph = photograph.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(photograph, dtype=np.uint8)


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


def _bytes(picture: NDArray[np.float64]) -> Picture:
    return np.asarray((255 * picture).round(), dtype=np.uint8)


@dataclass(frozen=True)
class Analysis:
    """A photograph with its segmentations and the space that they were found in.

    Attributes:
        photograph: (h, w, 3) bytes.
        maps: number of regions (or clusters) → (h, w) label map.
        coordinates: (n, gh, gw) leading spectral coordinates on the features' grid.
        eigenvalues: (e,) their eigenvalues, descending.
    """

    photograph: Picture
    maps: Mapping[int, NDArray[np.int64]]
    coordinates: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]

    def labels(self, k: int) -> NDArray[np.int64]:
        """The map for ``k`` regions, or the nearest number there is."""
        nearest = min(self.maps, key=lambda known: (abs(known - k), known))
        return self.maps[nearest]

    def outlined(self, k: int) -> Picture:
        """The photograph with the borders of the regions."""
        return _bytes(draw_boundaries(self.photograph, self.labels(k)))

    def painted(self, k: int) -> Picture:
        """Every region in its mean colour."""
        return _bytes(paint_labels(self.labels(k), self.photograph))

    def numbered(self, k: int) -> Picture:
        """Every region in a hue of its own."""
        return _bytes(paint_labels(self.labels(k)))

    def levels(self) -> list[tuple[Picture, str]]:
        """Overview from coarse to fine: mean colours with borders, and the number of regions."""
        out = []
        hierarchy = set(MERGE_KS) <= self.maps.keys()  # it holds every number; clusterings are few
        for k in MERGE_KS if hierarchy else self.maps:
            labels = self.maps[k]
            picture = draw_boundaries(paint_labels(labels, self.photograph), labels, colour=(1.0, 1.0, 1.0))
            out.append((_bytes(picture), f"{len(np.unique(labels))} regions"))
        return out

    def eigenvectors(self) -> list[tuple[Picture, str]]:
        """The leading coordinates as pictures: orange above, blue below the middle."""
        out = []
        size = (self.photograph.shape[1], self.photograph.shape[0])
        for i, values in enumerate(self.coordinates):
            low, high = np.percentile(values, [1, 99])
            flat = high - low <= 1e-6 * np.abs(values).max()  # the first one of normalized cuts is constant
            unit = np.full(values.shape, 0.5) if flat else np.clip((values - low) / (high - low), 0, 1)
            picture = Image.fromarray(_bytes(_diverging(unit))).resize(size, Image.Resampling.BICUBIC)
            out.append((np.asarray(picture), f"{i + 1}: eigenvalue {self.eigenvalues[i]:.3f}"))
        return out

    def spectrum(self) -> Picture:
        """The eigenvalues as a figure."""
        fig = spectrum({"eigenvalues": self.eigenvalues}, title="Spectrum of the features")
        fig.canvas.draw()
        return np.asarray(fig.canvas.buffer_rgba(), dtype=np.uint8)[..., :3].copy()  # type: ignore[attr-defined]

    def mask(self, k: int, x: int, y: int) -> NDArray[np.bool_]:
        """The region under a pixel."""
        labels = self.labels(k)
        return labels == labels[y, x]

    def save_labels(self, k: int, path: Path) -> Path:
        """Write the label map as a 16-bit PNG, labels from 1."""
        values = np.unique(self.labels(k), return_inverse=True)[1].reshape(self.photograph.shape[:2]) + 1
        Image.fromarray(values.astype(np.uint16)).save(path)
        return path


def _diverging(unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Map [0, 1] to blue – light grey – orange."""
    blue, middle, orange = np.array([[0.10, 0.33, 0.65], [0.95, 0.95, 0.94], [0.85, 0.40, 0.07]])
    t = 2 * unit[..., None] - 1
    side = np.where(t < 0, blue, orange)
    return np.asarray(middle + np.abs(t) * (side - middle))
