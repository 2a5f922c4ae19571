"""What the page shows of an analysed photograph, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from matbackprop.errors import DataError
from matbackprop.inference import Segments
from matbackprop.inference.drawing import WHITE, draw_boundaries, paint_labels
from matbackprop.report.figures import spectrum

__all__ = ["MAX_REGIONS", "Analysis", "counted", "fit_photograph", "sample_photographs"]

MAX_REGIONS = 40
MAX_SIDE = 640

Picture = NDArray[np.uint8]


def fit_photograph(pixels: Picture, longest: int = MAX_SIDE) -> Picture:
    """Bring a photograph (h, w, 3) to a longest side of at most ``longest`` pixels.

    Raises:
        DataError: it is too small to segment.

    Example:
        >>> fit_photograph(np.zeros((300, 1280, 3), np.uint8)).shape
        (150, 640, 3)
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


@dataclass(frozen=True)
class Analysis:
    """A photograph's segmentations and the space that its cells lie in.

    Attributes:
        segments: the segmentations.
        coordinates: (n, gh, gw) leading spectral coordinates on the features' grid.
        eigenvalues: (e,) their eigenvalues, descending.
    """

    segments: Segments
    coordinates: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]

    @property
    def photograph(self) -> Picture:
        """(h, w, 3) bytes."""
        return self.segments.pixels

    def labels(self, k: int) -> NDArray[np.int32]:
        """The map for ``k`` regions; after clustering, that of the nearest number of clusters."""
        if self.segments.hierarchy is None:
            k = min(self.segments.ks, key=lambda known: (abs(known - k), known))
        return self.segments.labels(k)

    def outlined(self, k: int) -> Picture:
        """The photograph with the borders of the regions."""
        return draw_boundaries(self.photograph, self.labels(k))

    def painted(self, k: int) -> Picture:
        """Every region in its mean colour."""
        return paint_labels(self.labels(k), self.photograph)

    def levels(self) -> list[tuple[Picture, str]]:
        """Overview from coarse to fine: mean colours with borders, and the number of regions."""
        out = []
        for k in self.segments.ks:
            labels = self.labels(k)
            picture = draw_boundaries(paint_labels(labels, self.photograph), labels, colour=WHITE)
            out.append((picture, counted(labels)))
        return out

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

    def mask(self, k: int, x: int, y: int) -> NDArray[np.bool_]:
        """The region under a pixel."""
        labels = self.labels(k)
        return labels == labels[y, x]

    def save_labels(self, k: int, path: Path) -> Path:
        """Write the label map as a 16-bit PNG, labels from 1."""
        Image.fromarray((self.labels(k) + 1).astype(np.uint16)).save(path)
        return path


def counted(labels: NDArray[np.int32]) -> str:
    """``"1 region"``, ``"8 regions"``: how many a map numbered from 0 holds."""
    count = int(labels.max()) + 1
    return f"{count} region{'' if count == 1 else 's'}"


def _diverging(unit: NDArray[np.float64]) -> Picture:
    """Map [0, 1] to blue – light grey – orange."""
    blue, middle, orange = np.array([[26, 84, 166], [242, 242, 240], [217, 102, 18]])
    t = 2 * unit[..., None] - 1
    side = np.where(t < 0, blue, orange)
    return (middle + np.abs(t) * (side - middle)).round().astype(np.uint8)
