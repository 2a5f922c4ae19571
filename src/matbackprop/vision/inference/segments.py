"""Result of segmenting a photograph, and its computation from contours. Worker processes do not import torch."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import ConfigurationError, ShapeError, needs
from matbackprop.vision.files import counted
from matbackprop.vision.inference import export
from matbackprop.vision.inference.drawing import draw_boundaries, paint_labels
from matbackprop.vision.segmentation import Hierarchy, contour_map, merge_contours, refine_labels, watershed_regions

T = TypeVar("T")

GRADIENT_WIDTH = 2.0  #: Standard deviation in pixels of the Gaussian derivatives that replace a network.
GRADIENT_SCALE = 8.0  #: Color gradient, in Lab units per pixel, with contour strength 1 − 1/e.
GRADIENT_THRESHOLD = 0.38  #: Default threshold without a network.


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """Segmentations of one photograph. Label maps are computed on demand."""

    pixels: NDArray[np.uint8]  #: (h, w, 3) RGB bytes of the photograph
    ks: tuple[int, ...]  #: numbers of regions or clusters in exports
    network: bool  #: whether a network computed the contours or features
    seconds: float  #: wall time
    threshold: float = 0.5  #: contour strength at which the hierarchy is cut by default
    #: (h', w') contour strength in [0, 1], at the reduced size; None after clustering
    contours: NDArray[np.float16] | None = None
    #: (h', w') watershed regions, the leaves of the hierarchy; None after clustering
    regions: NDArray[np.int32] | None = None
    hierarchy: Hierarchy | None = None  #: tree of merges over the regions; None after clustering
    #: number of clusters → (h', w') label map; None for a hierarchy
    clusterings: Mapping[int, NDArray[np.int32]] | None = None
    name: str = "picture.png"  #: file name of the photograph
    path: Path | None = None  #: file of the photograph, for references in exports; None if it was not read from a file
    note: str = ""  #: description of a value conversion, such as rescaling 16 bits; empty for no conversion
    names: tuple[str, ...] = ()  #: region names of a user-defined segmentation, included in exports; empty for none

    def __repr__(self) -> str:
        height, width = self.size
        return f"Segments({self.name!r}, {width}×{height} pixels, {counted(self.count(), 'region')})"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the photograph."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def k(self) -> int:
        """Number of regions at the threshold; after clustering, the middle entry of ``ks``."""
        if self.hierarchy is not None:
            return self.hierarchy.regions_at(self.threshold)
        return self.ks[len(self.ks) // 2]

    def at(self, height: float) -> Segments:
        """Return a copy with another threshold in [0, 1]."""
        if not 0 <= height <= 1:
            raise ConfigurationError(f"The threshold must be from 0 to 1, got {height}.")
        return replace(self, threshold=height)

    def labels(self, k: int | None = None) -> NDArray[np.int32]:
        """Return a label map (h, w), numbered from 0, with borders at the resolution of the photograph.

        Args:
            k: number of regions, limited to the number of leaves of the hierarchy; after clustering, one of ``ks``.
                None for the default, :attr:`k`.

        Raises:
            ConfigurationError: k is not positive, or is not in ``ks`` after clustering.
        """
        if self.hierarchy is not None:
            return self.hierarchy.levels([self.k if k is None else k])[0][self._fine]
        return refine_labels(self.small_labels(k), self.pixels)

    def small_labels(self, k: int | None = None) -> NDArray[np.int32]:
        """Return the label map at the reduced size (h', w')."""
        k = self.k if k is None else k
        if self.hierarchy is not None and self.regions is not None:
            return self.hierarchy.levels([k])[0][self.regions]
        assert self.clusterings is not None
        if k not in self.clusterings:
            raise ConfigurationError(f"{k} clusters were not computed. Choose one of {', '.join(map(str, self.ks))}.")
        return self.clusterings[k]

    @cached_property
    def _fine(self) -> NDArray[np.int32]:
        assert self.regions is not None
        return refine_labels(self.regions, self.pixels, self.contours)

    def ucm(self) -> NDArray[np.float64]:
        """Return the ultrametric contour map (2h' + 1, 2w' + 1) of the hierarchy.

        Raises:
            ConfigurationError: the model computed clusters instead of a hierarchy.
        """
        if self.hierarchy is None or self.regions is None:
            raise ConfigurationError("Clusters have no contour map. Segment with a contour network instead.")
        return contour_map(self.regions, self.hierarchy)

    def with_regions(self, small: NDArray[np.int32], names: Sequence[str] = ()) -> Segments:
        """Return a copy with a user-defined segmentation (h', w'), numbered from 0, and optional region names.

        The name of an unnamed region is ``""``.
        """
        k = int(small.max()) + 1
        if names and len(names) != k:
            raise ShapeError(f"{len(names)} names were given for {k} regions. Pass one per region, or none.")
        gone = dict.fromkeys(("contours", "regions", "hierarchy"))
        return replace(self, ks=(k,), clusterings={k: small}, names=tuple(names), **gone)  # type: ignore[arg-type]

    def count(self, k: int | None = None) -> int:
        """Return the number of regions of :meth:`labels`."""
        if self.hierarchy is not None:
            return min(self.k if k is None else k, self.hierarchy.count)
        return int(self.small_labels(k).max()) + 1

    def outlined(self, k: int | None = None) -> NDArray[np.uint8]:
        """Return the photograph with borders, which are wide enough to be visible at screen size."""
        return draw_boundaries(self.pixels, self.labels(k), width=max(1, round(max(self.size) / 600)))

    def painted(self, k: int | None = None) -> NDArray[np.uint8]:
        """Return an image with each region in a different hue."""
        return paint_labels(self.labels(k))

    def show(self, k: int | None = None) -> None:
        """Show borders and regions side by side, in a window or a notebook."""
        import matplotlib.pyplot as plt

        plt.figure(figsize=(12, 6 * self.size[0] / self.size[1] + 0.5), layout="constrained")
        plt.imshow(np.hstack([self.outlined(k), self.painted(k)]))
        plt.axis("off")
        plt.title(f"{self.name}: {self.count(k)} regions")
        plt.show()

    def _repr_png_(self) -> bytes:
        from PIL import Image

        picture, file = Image.fromarray(self.outlined()), io.BytesIO()
        picture.thumbnail((800, 800))
        picture.save(file, "PNG")
        return file.getvalue()

    to_coco = export.to_coco
    to_labelme = export.to_labelme
    to_svg = export.to_svg
    save = export.save


def gradient_contours(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Compute contours 1 − exp(−g/s) of an image (h, w, 3) from the magnitude g of its Lab color gradient."""
    with needs("segmentation needs scikit-image", "'matbackprop[train]'"):
        from scipy.ndimage import gaussian_filter
        from skimage.color import rgb2lab
    lab = rgb2lab(image).astype(np.float32)
    slopes = [gaussian_filter(lab[..., c], GRADIENT_WIDTH, order=order) for c in range(3) for order in ((0, 1), (1, 0))]
    return 1 - np.exp(-np.sqrt(np.sum(np.square(slopes), 0)) / GRADIENT_SCALE)


def divide(contours: NDArray[np.float32], *, seconds: float, **fields: Any) -> Segments:
    """Build the hierarchy of an image from its contours.

    Args:
        contours: (h', w') strengths in [0, 1].
        seconds: time that the contours took.
        fields: further attributes of :class:`Segments`.
    """
    started = time.perf_counter()
    regions = watershed_regions(contours)
    tree = merge_contours(regions, contours)
    seconds += time.perf_counter() - started
    return Segments(contours=contours.astype(np.float16), regions=regions, hierarchy=tree, seconds=seconds, **fields)


def divide_and_finish(finish: Callable[[Segments, str], T], stem: str, /, **fields: Any) -> T:
    """Call ``finish`` with the result of :func:`divide` and a name."""
    return finish(divide(**fields), stem)
