"""Segment photographs by contours, watershed and a hierarchy of merges."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.checks import check_ks
from matbackprop.errors import ConfigurationError, ShapeError, needs
from matbackprop.vision.data.pictures import Picture, find_pictures, picture_of, read_frames, read_picture
from matbackprop.vision.devices import choose_device
from matbackprop.vision.inference import export
from matbackprop.vision.inference.drawing import draw_boundaries, paint_labels
from matbackprop.vision.inference.loading import BOX, Segmenter, load_segmenter
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.segmentation import (
    CLUSTER_KS,
    LEVELS,
    Hierarchy,
    contour_map,
    merge_contours,
    refine_labels,
    watershed_regions,
)

WORKING_SIDE = 512
"""Maximum length of the longer side in pixels; larger photographs are reduced."""
GRADIENT_WIDTH = 2.0
"""Standard deviation in pixels of the Gaussian derivatives that replace a network."""
GRADIENT_SCALE = 8.0
"""Color gradient, in Lab units per pixel, with contour strength 1 − 1/e."""
GRADIENT_THRESHOLD = 0.38
"""Default threshold without a network."""
_MAX_CLUSTERS = 1000  # K-means compares every pixel with every cluster


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """Segmentations of one photograph. Label maps are computed on demand.

    Attributes:
        pixels: (h, w, 3) RGB bytes of the photograph.
        ks: numbers of regions or clusters in exports.
        network: whether a network computed the contours or features.
        seconds: wall time.
        threshold: contour strength at which the hierarchy is cut by default.
        contours: (h', w') contour strength in [0, 1], at the reduced size; None after clustering.
        regions: (h', w') watershed regions, the leaves of the hierarchy; None after clustering.
        hierarchy: tree of merges over the regions; None after clustering.
        clusterings: number of clusters → (h', w') label map; None for a hierarchy.
        name: file name of the photograph.
        path: file of the photograph, for references in exports; None if it was not read from a file.
        note: description of a value conversion, such as rescaling 16 bits; empty for no conversion.
        names: region names of a user-defined segmentation, included in exports; empty for none.
    """

    pixels: NDArray[np.uint8]
    ks: tuple[int, ...]
    network: bool
    seconds: float
    threshold: float = 0.5
    contours: NDArray[np.float16] | None = None
    regions: NDArray[np.int32] | None = None
    hierarchy: Hierarchy | None = None
    clusterings: Mapping[int, NDArray[np.int32]] | None = None
    name: str = "picture.png"
    path: Path | None = None
    note: str = ""
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        (height, width), count = self.size, self.count()
        return f"Segments({self.name!r}, {width}×{height} pixels, {count} region{'' if count == 1 else 's'})"

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


def segment(
    x: Any,
    model: Segmenter | str | Path | None = BOX,
    ks: Sequence[int] | None = None,
    *,
    side: int = WORKING_SIDE,
    scales: Sequence[float] = (1.0,),
    mirror: bool = False,
    seed: int = 0,
    device: str = "auto",
) -> Any:
    """Segment one or several images.

    A contour network computes a hierarchy of regions, which is cut at a fixed contour strength. A network trained with
    normalized cuts (``matbackprop train ncuts``) computes clusterings, as in the paper.

    Args:
        x: a file, a Pillow image, or an array or tensor (h, w), (h, w, 3) or (3, h, w), uint8 or in [0, 1]; or a
            folder, a pattern such as ``"holiday/*.jpg"``, or a list of any of these.
        model: a trained network or its name (see :func:`load_segmenter`). Default: the network in the package. None
            uses image gradients as contours.
        ks: numbers of regions or clusters in exports; None for eight default values.
        side: maximum length of the longer side. Larger images are reduced to it, and their borders are then refined.
        scales: image scales over which contours are averaged. ``(0.75, 1, 1.4)`` is more accurate and about three times
            slower.
        mirror: also average over the mirror image, which takes twice the time of the network.
        seed: seed of K-means.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Returns:
        :class:`Segments`, or a list of them if ``x`` is a folder, a pattern or a list.

    Raises:
        DataError: a file cannot be read.
        ShapeError: the shape of an array is not that of an image.
        ConfigurationError: the device is not available, or an option is out of range.

    Example:
        >>> image = np.zeros((40, 60, 3), np.uint8)
        >>> image[:, 30:] = 200
        >>> result = segment(image, model=None)
        >>> result.k, result.labels(2)[0, [0, 25, 35, 59]].tolist()
        (2, [0, 0, 1, 1])
    """
    choose_device(device)  # validates the name, also without a network
    if isinstance(model, (str, Path)):
        model = load_segmenter(model, device)
    options: dict[str, Any] = {"side": side, "scales": scales, "mirror": mirror, "seed": seed}
    if isinstance(x, (str, Path)):
        paths = find_pictures([x])
        if paths != [Path(x)]:
            return [segment_photograph(path, model, ks, **options) for path in paths]
    elif isinstance(x, (list, tuple)):
        return [segment(one, model, ks, **options) for one in x]
    return segment_photograph(x, model, ks, **options)


def segment_frames(
    path: str | Path,
    model: Segmenter | str | Path | None = BOX,
    ks: Sequence[int] | None = None,
    *,
    every: int = 1,
    device: str = "auto",
    **options: Any,
) -> Iterator[Segments]:
    """Segment the frames of a GIF, an animated WebP or PNG, a multi-page TIFF, or a video.

    Frames are segmented independently, so region numbers are not consistent between frames.

    Args:
        path: the file; videos need PyAV (``pip install 'matbackprop[video]'``).
        model, ks, device: as in :func:`segment`.
        every: segment every n-th frame; 1 for all frames.
        options: ``side``, ``scales``, ``mirror`` and ``seed``, as in :func:`segment`.

    Yields:
        :class:`Segments`, named after the file and the frame number, from 0.

    Raises:
        DataError: the file cannot be read. The complete frames of a truncated file are yielded first.
    """
    if isinstance(model, (str, Path)):
        model = load_segmenter(model, device)
    for number, picture in read_frames(path, every=every):
        segments = segment_photograph(picture.pixels, model, ks, **options)
        yield replace(segments, name=f"{Path(path).stem}-{number:05d}.png", note=picture.note)


def segment_photograph(
    x: Any,
    model: Segmenter | None = None,
    ks: Sequence[int] | None = None,
    *,
    side: int = WORKING_SIDE,
    scales: Sequence[float] = (1.0,),
    mirror: bool = False,
    seed: int = 0,
) -> Segments:
    """Segment one image with a loaded model; see :func:`segment`."""
    started = time.perf_counter()
    ks = check_options(model, ks, side, scales, mirror)
    photo = prepare(x, side)
    if isinstance(model, DeepNCuts):
        device = next(model.parameters()).device
        maps = model.cluster(photo.small.to(device).unsqueeze(0), ks, seed=seed).labels[0].to(torch.int32)
        clusterings = dict(zip(ks, maps.cpu().numpy(), strict=True))
        seconds = time.perf_counter() - started
        return Segments(photo.pixels, ks, True, seconds, clusterings=clusterings, **photo.origin)
    contours = None if model is None else network_contours(model, photo.small.unsqueeze(0), scales, mirror)[0]
    return divide(photo, contours, threshold_of(model), ks, time.perf_counter() - started)


class Prepared(NamedTuple):
    """Image and its copy (3, h', w') at the reduced size."""

    pixels: NDArray[np.uint8]
    small: Tensor
    origin: dict[str, Any]
    """``name``, ``path`` and ``note`` of :class:`Segments`."""


def prepare(x: Any, side: int) -> Prepared:
    """Read an image and reduce it to a longer side of at most ``side`` pixels."""
    picture, name = read_input(x)
    path = Path(x) if isinstance(x, (str, Path)) else None
    origin = {"name": name, "path": path, "note": picture.note}
    return Prepared(picture.pixels, shrink(picture.pixels, side), origin)


def check_options(
    model: Segmenter | None,
    ks: Sequence[int] | None,
    side: int,
    scales: Sequence[float] = (1.0,),
    mirror: bool = False,
) -> tuple[int, ...]:
    """Check the options of :func:`segment` and return the numbers of regions."""
    if side < 2:
        raise ConfigurationError(f"side must be at least 2 pixels, got {side}.")
    if not scales or not all(0.25 <= scale <= 4 for scale in scales):
        raise ConfigurationError(f"scales must be one or several numbers from 0.25 to 4, got {tuple(scales)}.")
    if (mirror or tuple(scales) != (1.0,)) and not isinstance(model, ContourNet):
        raise ConfigurationError("scales and mirror need a contour network. Omit them, or choose another model.")
    clusters = isinstance(model, DeepNCuts)
    numbers = tuple((CLUSTER_KS if clusters else LEVELS) if ks is None else check_ks(ks))
    if clusters and max(numbers) > _MAX_CLUSTERS:
        raise ConfigurationError(f"{max(numbers)} clusters are too many. Use at most {_MAX_CLUSTERS}.")
    return numbers


def threshold_of(model: ContourNet | None) -> float:
    """Return the default threshold of a contour network, or of image gradients."""
    return GRADIENT_THRESHOLD if model is None else model.config.threshold


@torch.no_grad()
def network_contours(
    model: ContourNet, images: Tensor, scales: Sequence[float] = (1.0,), mirror: bool = False
) -> NDArray[np.float32]:
    """Compute contours (b, h, w) of uint8 images (b, 3, h, w), averaged over scales and, optionally, mirror images."""
    images = images.to(next(model.parameters()).device).float() / 255
    size = images.shape[-2:]
    total = images.new_zeros(len(images), *size)
    for scale in scales:
        shape = [max(1, round(n * scale)) for n in size]
        scaled = nnf.interpolate(images, size=shape, mode="bicubic", align_corners=False).clamp(0, 1)
        maps = model.contours(scaled)
        if mirror:
            maps = (maps + model.contours(scaled.flip(-1)).flip(-1)) / 2
        total += nnf.interpolate(maps[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
    return (total / len(scales)).clamp(max=1).cpu().numpy()


def gradient_contours(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Compute contours 1 − exp(−g/s) of an image (h, w, 3) from the magnitude g of its Lab color gradient."""
    with needs("segmentation needs scikit-image", "'matbackprop[train]'"):
        from scipy.ndimage import gaussian_filter
        from skimage.color import rgb2lab
    lab = rgb2lab(image).astype(np.float32)
    slopes = [gaussian_filter(lab[..., c], GRADIENT_WIDTH, order=order) for c in range(3) for order in ((0, 1), (1, 0))]
    return 1 - np.exp(-np.sqrt(np.sum(np.square(slopes), 0)) / GRADIENT_SCALE)


def divide(
    photo: Prepared, contours: NDArray[np.float32] | None, threshold: float, ks: tuple[int, ...], seconds: float
) -> Segments:
    """Build the hierarchy of an image from contours or, if None, its gradients. ``seconds`` is the time so far."""
    started, network = time.perf_counter(), contours is not None
    if contours is None:
        contours = gradient_contours(photo.small.permute(1, 2, 0).numpy())
    regions = watershed_regions(contours)
    tree = merge_contours(regions, contours)
    seconds += time.perf_counter() - started
    strengths = contours.astype(np.float16)
    return Segments(photo.pixels, ks, network, seconds, threshold, strengths, regions, tree, **photo.origin)


def read_input(x: Any) -> tuple[Picture, str]:
    """Read an image and return it with its file name.

    Args:
        x: a file, a Pillow image, or an array or tensor: (h, w), or with 1, 3 or 4 channels first or last. If the
            layout is ambiguous, it is channels first for tensors and channels last for arrays.
    """
    from PIL import Image

    if isinstance(x, (str, Path)):
        return read_picture(x), Path(x).name
    if isinstance(x, Image.Image):
        return picture_of(x.copy()), Path(str(getattr(x, "filename", "") or "picture.png")).name
    if isinstance(x, Tensor):
        tensor = x.detach().cpu()
        array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        ends = (0, -1)
    else:
        array, ends = np.asarray(x), (-1, 0)
    if array.ndim == 3:
        channels = next((end for end in ends if array.shape[end] in (1, 3, 4)), None)
        array = array[None] if channels is None else np.moveaxis(array, channels, -1)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ShapeError(
            f"An image must be (h, w), (h, w, c) or (c, h, w) with at least one pixel and c = 1, 3 or 4, got "
            f"{tuple(np.shape(x))}. Pass several images as a list."
        )
    if np.issubdtype(array.dtype, np.floating) and array.min() >= 0 and array.max() <= 1:  # NaN is neither
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise ShapeError(
            f"An image must be uint8 or floating point in [0, 1], got {array.dtype} from {array.min()} to "
            f"{array.max()}. For values from 0 to 255, use x.astype('uint8')."
        )
    squeezed = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    return picture_of(Image.fromarray(np.ascontiguousarray(squeezed))), "picture.png"


def shrink(pixels: NDArray[np.uint8], side: int) -> Tensor:
    """Reduce an image (h, w, 3) to a longer side of at most ``side`` and return it as uint8 (3, h, w)."""
    image = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    height, width = image.shape[-2:]
    if max(height, width) <= side:
        return image
    ratio = side / max(height, width)
    size = max(1, round(height * ratio)), max(1, round(width * ratio))
    return nnf.interpolate(image.unsqueeze(0), size=size, mode="bilinear", antialias=True)[0]
