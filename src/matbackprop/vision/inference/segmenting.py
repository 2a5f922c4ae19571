"""Segmenting photographs of any size and kind, with a trained network or without any."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.checks import check_ks
from matbackprop.errors import ConfigurationError, ShapeError, needs
from matbackprop.vision.data.pictures import Picture, find_pictures, picture_of, read_frames, read_picture
from matbackprop.vision.inference import export
from matbackprop.vision.inference.drawing import draw_boundaries, paint_labels
from matbackprop.vision.inference.loading import BOX, load_segmenter
from matbackprop.vision.models.deep_ncuts import DeepNCuts, Merging, default_ks, merge_superpixels
from matbackprop.vision.segmentation import (
    MERGE_KS,
    Hierarchy,
    MergeCost,
    border_mean,
    region_graph,
    region_means,
    slic_superpixels,
)

_MAX_CLUSTERS = 1000  # of K-means, which compares every pixel with every cluster


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """The segmentations of one photograph, kept small: label maps are made when they are asked for.

    Attributes:
        pixels: (h, w, 3) the photograph, RGB bytes.
        ks: numbers of regions, or of clusters, of the segmentations that :meth:`levels` gives.
        k: about how many regions people would draw in the photograph; 1 where there is nothing to see.
        confidence: how often people's number is within a factor of two of such a k; see
            :class:`~matbackprop.vision.inference.segmenting.Number`.
        method: ``"merge"`` or ``"cluster"``.
        network: whether a network was used, or colour and contrast alone.
        seconds: wall time.
        superpixels: (h', w') the small regions that merging starts from, at the size that was segmented; None after
            clustering.
        hierarchy: the tree of merges over the superpixels; None after clustering.
        clusterings: number of clusters → (h', w') label map; None after merging.
        name: file name of the photograph.
        note: what was done to its values, such as rescaling 16 bits; empty for nothing.
        names: names of the regions of a segmentation of your own, which exports carry; empty for none.
    """

    pixels: NDArray[np.uint8]
    ks: tuple[int, ...]
    k: int
    confidence: float | None
    method: str
    network: bool
    seconds: float
    superpixels: NDArray[np.int32] | None = None
    hierarchy: Hierarchy | None = None
    clusterings: Mapping[int, NDArray[np.int32]] | None = None
    name: str = "picture.png"
    note: str = ""
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        height, width = self.size
        regions = "1 region" if self.k == 1 else f"{self.k} regions"
        return f"Segments({self.name!r}, {width}×{height} pixels, {regions} by {self.method})"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the photograph."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def labels(self, k: int | None = None) -> NDArray[np.int32]:
        """A label map (h, w), numbered from 0.

        Args:
            k: after merging, any number of regions (no more than there are superpixels). After clustering, one of
                ``ks``. None for the suggested number: after clustering, the map whose number of regions is nearest.

        Raises:
            ConfigurationError: k is not positive, or no number of clusters that was asked for.
        """
        small = self.small_labels(k)
        height, width = self.size
        if small.shape == (height, width):
            return small
        # The cell under the middle of each pixel.
        rows = ((np.arange(height) + 0.5) * small.shape[0] / height).astype(np.int64)
        columns = ((np.arange(width) + 0.5) * small.shape[1] / width).astype(np.int64)
        return small[rows][:, columns]

    def small_labels(self, k: int | None = None) -> NDArray[np.int32]:
        """The label map at the size (h', w') that was segmented."""
        if self.hierarchy is not None and self.superpixels is not None:
            return self.hierarchy.levels([self.k if k is None else k])[0].astype(np.int32)[self.superpixels]
        assert self.clusterings is not None
        if k is None:
            return min(self.clusterings.values(), key=lambda m: abs(np.log((m.max() + 1) / self.k)))
        if k not in self.clusterings:
            raise ConfigurationError(f"{k} clusters were not asked for; there are {', '.join(map(str, self.ks))}.")
        return self.clusterings[k]

    def with_regions(self, small: NDArray[np.int32], names: Sequence[str] = ()) -> Segments:
        """The same photograph with one segmentation of your own, (h', w') numbered from 0, and names of its regions.

        A region without a name has the name ``""``.
        """
        k = int(small.max()) + 1
        if names and len(names) != k:
            raise ShapeError(f"{len(names)} names were given for {k} regions; give one per region, or none.")
        only = {k: small}
        return replace(
            self, ks=(k,), k=k, confidence=None, superpixels=None, hierarchy=None, clusterings=only, names=tuple(names)
        )

    def count(self, k: int | None = None) -> int:
        """The number of regions of :meth:`labels`."""
        return int(self.small_labels(k).max()) + 1

    def outlined(self, k: int | None = None) -> NDArray[np.uint8]:
        """The photograph with the borders of the regions, wide enough to be seen when it fills a screen."""
        return draw_boundaries(self.pixels, self.labels(k), width=max(1, round(max(self.size) / 600)))

    def painted(self, k: int | None = None) -> NDArray[np.uint8]:
        """Every region in a hue of its own."""
        return paint_labels(self.labels(k))

    def show(self, k: int | None = None) -> None:
        """Open a window (or draw into the notebook) with the borders and the regions side by side."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2, figsize=(12, 12 / 2 * self.size[0] / self.size[1]), layout="constrained")
        for axis, picture in zip(axes, (self.outlined(k), self.painted(k)), strict=True):
            axis.imshow(picture)
            axis.set_axis_off()
        figure.suptitle(f"{self.name}: {self.count(k)} regions")
        plt.show()

    def _repr_png_(self) -> bytes:
        """The picture that notebooks show: the photograph with its borders, at most 800 pixels wide or high."""
        from PIL import Image

        picture, file = Image.fromarray(self.outlined()), io.BytesIO()
        picture.thumbnail((800, 800))
        picture.save(file, "PNG")
        return file.getvalue()

    def to_coco(self, k: int | None = None) -> dict[str, Any]:
        """The regions as a COCO data set of one image: exact masks, boxes and areas, one category per name."""
        return export.to_coco(self, k)

    def to_labelme(self, k: int | None = None) -> dict[str, Any]:
        """The regions as LabelMe's polygons, large ones first, because LabelMe knows no holes."""
        return export.to_labelme(self, k)

    def to_svg(self, k: int | None = None) -> str:
        """The regions as one SVG path each, in their mean colours."""
        return export.to_svg(self, k)

    def save(
        self,
        folder: str | Path = "segments",
        k: int | None = None,
        *,
        formats: Sequence[export.Format] = ("png", "npz"),
        stem: str | None = None,
    ) -> dict[str, Path]:
        """Write the segmentations.

        Args:
            folder: made if need be.
            k: number of regions in all files but the npz one; None for the suggested number.
            formats: ``"png"`` (label map of 16 bits, ``-colours``, and borders as ``-overlay``), ``"npz"`` (``labels``
                of all ``ks`` and, after merging, the tree: ``superpixels``, ``merges``, ``heights``), ``"coco"``,
                ``"labelme"``, ``"svg"``, and ``"ucm2"`` (after merging: the hierarchy as an ultrametric contour map, at
                the size that was segmented, in a .mat file that the Berkeley benchmark's tools read).
            stem: beginning of the names; None for that of the photograph.

        Returns:
            Kind of file → its path.
        """
        return export.save(self, folder, k, formats=formats, stem=stem)


def segment(
    x: Any,
    model: DeepNCuts | str | Path | None = BOX,
    ks: Sequence[int] | None = None,
    *,
    method: str = "merge",
    side: int = 480,
    seed: int = 0,
    device: str = "auto",
) -> Any:
    """Segment one picture or many.

    Args:
        x: a file, a Pillow image, an array or tensor of one picture, (h, w), (h, w, 3) or (3, h, w), bytes or numbers
            in [0, 1]; or a folder, a pattern such as ``"holiday/*.jpg"``, or a list of any of these.
        model: a trained network, or where to load one from (see :func:`load_segmenter`), by default the one that comes
            with the package; None merges superpixels by colour and contrast, without a network.
        ks: numbers of regions (``"merge"``) or of clusters (``"cluster"``); None for the eight of the method's default.
        method: ``"merge"`` for a nested hierarchy, ``"cluster"`` for K-means and connected components.
        side: larger pictures are segmented at this length of their longer side; borders are then as fine as that.
        seed: of K-means.
        device: where a model that is loaded computes: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Returns:
        :class:`Segments`; a list of them for a folder, a pattern or a list.

    Raises:
        DataError: a file cannot be read.
        ShapeError: an array is not a picture.
        ConfigurationError: clustering without a network, or an unknown method.

    Example:
        >>> picture = np.zeros((40, 60, 3), np.uint8)
        >>> picture[:, 30:] = 200
        >>> result = segment(picture, model=None)
        >>> result.k, result.labels(2)[0, [0, 29, 30, 59]].tolist()
        (2, [0, 0, 1, 1])
    """
    if isinstance(model, (str, Path)):
        model = load_segmenter(model, device)
    options: dict[str, Any] = {"method": method, "side": side, "seed": seed}
    if isinstance(x, (str, Path)):
        paths = find_pictures([x])
        if paths != [Path(x)]:
            return [segment_photograph(path, model, ks, **options) for path in paths]
    elif isinstance(x, (list, tuple)):
        return [segment(one, model, ks, **options) for one in x]
    return segment_photograph(x, model, ks, **options)


def segment_frames(
    path: str | Path,
    model: DeepNCuts | str | Path | None = BOX,
    ks: Sequence[int] | None = None,
    *,
    every: int = 1,
    device: str = "auto",
    **options: Any,
) -> Iterator[Segments]:
    """Segment the frames of a GIF, an animated WebP or PNG, a TIFF of several pages, or a video, one by one.

    Frames know nothing of each other: a region has another number in the next one.

    Args:
        path: the file; videos need PyAV (``pip install 'matbackprop[video]'``).
        model: as in :func:`segment`.
        ks: likewise.
        every: 1 for all frames, 2 for each second one, and so on.
        device: where a model that is loaded computes.
        options: ``method``, ``side`` and ``seed``, as in :func:`segment`.

    Yields:
        :class:`Segments`, named after the file and the number of the frame, from 0.

    Raises:
        DataError: the file cannot be read, or is cut short, after the frames before that.
    """
    if isinstance(model, (str, Path)):
        model = load_segmenter(model, device)
    for number, picture in read_frames(path, every=every):
        segments = segment_photograph(picture.pixels, model, ks, **options)
        yield replace(segments, name=f"{Path(path).stem}-{number:05d}.png", note=picture.note)


def segment_photograph(
    x: Any,
    model: DeepNCuts | None = None,
    ks: Sequence[int] | None = None,
    *,
    method: str = "merge",
    side: int = 480,
    seed: int = 0,
) -> Segments:
    """Segment one picture: :func:`segment` without lists and folders, with a model that is loaded."""
    started = time.perf_counter()
    if method not in ("merge", "cluster"):
        raise ConfigurationError(f"unknown method {method!r}; choose merge or cluster.")
    if method == "cluster" and model is None:
        raise ConfigurationError("clustering needs the features of a network; give a model, or choose merge.")
    if side < 2:
        raise ConfigurationError(f"side must be at least 2 pixels, got {side}.")
    ks = tuple(default_ks(method) if ks is None else check_ks(ks))
    if method == "cluster" and max(ks) > _MAX_CLUSTERS:
        raise ConfigurationError(f"at most {_MAX_CLUSTERS} clusters can be made, got {max(ks)}; choose merge for more.")
    picture, name = read_input(x)
    small = _shrink(torch.from_numpy(np.ascontiguousarray(picture.pixels.transpose(2, 0, 1))), side)
    merging = merge_by_colour(small.permute(1, 2, 0).numpy(), ks)
    k, confidence = suggest_number(merging.hierarchy)
    clusterings = None
    if model is not None:
        on_device = small.to(next(model.parameters()).device)
        if method == "cluster":
            maps = model.cluster(on_device.unsqueeze(0), ks, seed=seed).labels[0].to(torch.int32).cpu().numpy()
            clusterings = dict(zip(ks, maps, strict=True))
        else:
            same = merging.superpixels if model.superpixels == SUPERPIXELS else None
            merging = model.merge(on_device, ks, superpixels=same)
    parts: dict[str, Any] = {"superpixels": merging.superpixels, "hierarchy": merging.hierarchy}
    if clusterings is not None:
        parts = {"clusterings": clusterings}
    seconds = time.perf_counter() - started
    segments = Segments(picture.pixels, ks, k, confidence, method, model is not None, seconds, **parts)
    return replace(segments, name=name, note=picture.note)


def read_input(x: Any) -> tuple[Picture, str]:
    """One picture of any kind, and its file name.

    Args:
        x: a file, a Pillow image, or an array or tensor: (h, w), or with 1, 3 or 4 channels first or last. Where both
            ends could be channels, tensors have them first and arrays last.

    Raises:
        DataError: the file cannot be read.
        ShapeError: the array is not a picture, or holds neither bytes nor numbers in [0, 1].
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
            f"a picture is (h, w), (h, w, c) or (c, h, w) with at least one pixel and c = 1, 3 or 4, got "
            f"{tuple(np.shape(x))}. Give several pictures as a list."
        )
    if np.issubdtype(array.dtype, np.floating) and array.min() >= 0 and array.max() <= 1:  # NaN is neither
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise ShapeError(
            f"a picture holds uint8 or floating point in [0, 1]; got {array.dtype} from {array.min()} to {array.max()}."
            " Convert it first, for example by x.astype('uint8') for values from 0 to 255."
        )
    squeezed = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    return picture_of(Image.fromarray(np.ascontiguousarray(squeezed))), "picture.png"


def _shrink(image: Tensor, side: int) -> Tensor:
    """Bring the longer side of (3, h, w) bytes down to ``side``; smaller images stay as they are."""
    height, width = image.shape[-2:]
    if max(height, width) <= side:
        return image
    ratio = side / max(height, width)
    size = max(1, round(height * ratio)), max(1, round(width * ratio))
    return nnf.interpolate(image.unsqueeze(0), size=size, mode="bilinear", antialias=True)[0]


COST = MergeCost(region=1.0, boundary=2.0, area=0.8, contact=0.5)
"""Exponents of the price. They, the weight and the width were best of a few on the training images of BSDS300."""
SUPERPIXELS = 600
"""About how many superpixels merging starts from."""
TEXTURE = 2.0
"""Weight of the deviations of colours in a region against their means."""
WIDTH = 3.0
"""Standard deviation, in pixels, of the Gaussian whose derivatives measure contrast."""


def merge_by_colour(
    image: NDArray[np.uint8], ks: Sequence[int] = MERGE_KS, *, superpixels: ArrayLike | int = SUPERPIXELS
) -> Merging:
    """Segment an image (h, w, 3) by uniting neighbouring superpixels that look alike.

    Two regions are compared by the means and deviations of their Lab colours, by the contrast along their border, which
    is the length of the colour's gradient, by their size, and by how much of their outline they share.

    Args:
        image: RGB bytes.
        ks: numbers of regions of the levels.
        superpixels: (h, w) map numbered from 0, or about how many of SLIC's to start from.

    Example:
        >>> picture = np.zeros((40, 60, 3), np.uint8)
        >>> picture[:, 30:] = 200
        >>> merge_by_colour(picture, [2]).labels[0, 0, [0, 29, 30, 59]].tolist()
        [0, 0, 1, 1]
    """
    with needs("merging by colour needs scikit-image", "'matbackprop[train]'"):
        from scipy.ndimage import gaussian_filter
        from skimage.color import rgb2lab
    regions = slic_superpixels(image, superpixels) if isinstance(superpixels, int) else np.asarray(superpixels)
    lab = rgb2lab(image)
    means = region_means(regions, lab)
    deviations = np.sqrt(np.maximum(region_means(regions, lab**2) - means**2, 0))
    slopes = [gaussian_filter(lab[..., c], WIDTH, order=order) for c in range(3) for order in ((0, 1), (1, 0))]
    contrast = border_mean(regions, region_graph(regions), np.sqrt(np.sum(np.square(slopes), 0)))
    return merge_superpixels(regions, np.concatenate([means, TEXTURE * deviations], 1), contrast, ks, cost=COST)


STRONG = 10.0
"""Price of merging by colour above which two regions are different things. Chosen, with :data:`SPREAD`, on the 200
training images of BSDS500."""
SPREAD = 4.5
"""k = SPREAD·√n for n strongly different regions: within a factor of two of the median of people's numbers on 82.5 % of
the training images and 79 % of the 100 validation images, on which two versions of the rule were tried; always 16
regions: 76 % and 75 %."""
VISIBLE = 0.5
FAINT = 0.006
"""Prices below VISIBLE, or below this share of the dearest one, part nothing that anybody sees: at the suggested number
every training image is above both."""
FEW = 4
"""The smallest number suggested on the training images."""
CONFIDENCE = ((15, 0.87), (np.inf, 0.77))
"""Largest k → share of the training images (108 and 92 of them) on which k is within a factor of two."""


class Number(NamedTuple):
    """A number of regions.

    Attributes:
        k: about how many regions people would draw; 1 where there is nothing to see.
        confidence: how often the median of people's numbers was within a factor of two of such a k on the training
            images of BSDS500; None where none of them was like this picture: almost nothing in it differs.
    """

    k: int
    confidence: float | None


def suggest_number(hierarchy: Hierarchy) -> Number:
    """Suggest a number of regions from the prices of merging by colour (:func:`merge_by_colour`).

    Example:
        >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.0, 150.0]))
        >>> suggest_number(tree)  # two regions differ, the third not at all
        Number(k=2, confidence=None)
    """
    heights = hierarchy.heights[np.isfinite(hierarchy.heights)]
    faint = max(VISIBLE, FAINT * heights.max(initial=0.0))
    different, visible = (int((heights > price).sum()) + 1 for price in (STRONG, faint))
    k = min(round(SPREAD * different**0.5), visible)
    if k < FEW:
        return Number(k, None)
    return Number(k, next(share for largest, share in CONFIDENCE if k <= largest))


def split_region(hierarchy: Hierarchy, labels: NDArray[np.integer], region: int) -> NDArray[np.int32]:
    """Divide a region into the two parts that were merged last.

    Args:
        hierarchy: the tree over S superpixels.
        labels: (S,) the region of each superpixel.
        region: which one to divide; a single superpixel stays as it is.

    Returns:
        New labels (S,), numbered from 0.

    Example:
        >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
        >>> split_region(tree, np.array([0, 0, 0]), 0).tolist()
        [0, 0, 1]
    """
    members = labels == region
    inside = hierarchy.merges[members[hierarchy.merges].all(1)]
    parts = _components(hierarchy.count, inside)
    if len(np.unique(parts[members])) == 1 and len(inside):
        parts = _components(hierarchy.count, inside[:-1])
    out = np.where(members, int(labels.max()) + 1 + parts, labels)
    return np.unique(out, return_inverse=True)[1].astype(np.int32)


def unite_region(hierarchy: Hierarchy, labels: NDArray[np.integer], region: int) -> NDArray[np.int32]:
    """Unite a region with what the tree merges it with first.

    Args:
        hierarchy: the tree over S superpixels.
        labels: (S,) the region of each superpixel.
        region: which one to unite; the last region of all stays as it is.

    Returns:
        New labels (S,), numbered from 0.

    Example:
        >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
        >>> unite_region(tree, np.array([0, 1, 2]), 1).tolist()
        [0, 0, 1]
    """
    members = labels == region
    node = np.arange(hierarchy.count)
    for keep, gone in hierarchy.merges:
        node[node == node[gone]] = node[keep]
        merged = node == node[keep]
        if (merged & members).any() and (merged & ~members).any():
            out = np.where(np.isin(labels, labels[merged]), region, labels)
            return np.unique(out, return_inverse=True)[1].astype(np.int32)
    return labels.astype(np.int32)


def _components(count: int, pairs: NDArray[np.integer]) -> NDArray[np.int64]:
    """The part of each of ``count`` elements when pairs are joined in turn."""
    part = np.arange(count)
    for keep, gone in pairs:
        part[part == part[gone]] = part[keep]
    return part
