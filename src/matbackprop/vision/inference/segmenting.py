"""Segment photographs by contours, watershed and a hierarchy of merges."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.data.pictures import Picture, find_pictures, picture_of, read_picture
from matbackprop.vision.devices import choose_device
from matbackprop.vision.inference.loading import BOX, load_segmenter
from matbackprop.vision.inference.segments import GRADIENT_THRESHOLD, Segments, divide, gradient_contours
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.segmentation.hierarchy import LEVELS, check_ks

if TYPE_CHECKING:
    from matbackprop.vision.inference.loading import Segmenter

WORKING_SIDE = 512  #: Maximum length of the longer side in pixels; larger photographs are reduced.
_MAX_CLUSTERS = 1000  # K-means compares every pixel with every cluster


def segment(
    x: Any,
    model: Segmenter | str | Path | None = BOX,
    ks: Sequence[int] | None = None,
    *,
    side: int = WORKING_SIDE,
    scales: Sequence[float] = (1.0,),
    mirror: bool = False,
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
    options: dict[str, Any] = {"side": side, "scales": scales, "mirror": mirror}
    if isinstance(x, (str, Path)):
        paths = find_pictures([x])
        if paths != [Path(x)]:
            return [segment_photograph(path, model, ks, **options) for path in paths]
    elif isinstance(x, (list, tuple)):
        return [segment(one, model, ks, **options) for one in x]
    return segment_photograph(x, model, ks, **options)


def segment_photograph(
    x: Any,
    model: Segmenter | None = None,
    ks: Sequence[int] | None = None,
    *,
    side: int = WORKING_SIDE,
    scales: Sequence[float] = (1.0,),
    mirror: bool = False,
) -> Segments:
    """Segment one image with a loaded model; see :func:`segment`."""
    started = time.perf_counter()
    ks = check_options(model, ks, side, scales, mirror)
    photo = prepare(x, side)
    if not isinstance(model, ContourNet | None):
        labels = model.cluster(as_batch([photo]).to(next(model.parameters()).device), ks).labels[0]
        clusterings = dict(zip(ks, labels.to(torch.int32).cpu().numpy(), strict=True))
        seconds = time.perf_counter() - started
        return Segments(photo.pixels, ks, True, seconds, clusterings=clusterings, **photo.origin)
    if model is None:
        contours = gradient_contours(photo.small)
    else:
        contours = network_contours(model, as_batch([photo]), scales, mirror)[0]
    fields = {"pixels": photo.pixels, "ks": ks, "network": model is not None, "threshold": threshold_of(model)}
    return divide(contours, seconds=time.perf_counter() - started, **fields, **photo.origin)


class Prepared(NamedTuple):
    """Image (h, w, 3) and its copy (h', w', 3) at the reduced size."""

    pixels: NDArray[np.uint8]
    small: NDArray[np.uint8]
    origin: dict[str, Any]  #: ``name``, ``path`` and ``note`` of :class:`Segments`.


def prepare(x: Any, side: int) -> Prepared:
    """Read an image and reduce it to a longer side of at most ``side`` pixels."""
    picture, name = read_input(x)
    path = Path(x) if isinstance(x, (str, Path)) else None
    origin = {"name": name, "path": path, "note": picture.note}
    return Prepared(picture.pixels, shrink(picture.pixels, side).permute(1, 2, 0).numpy(), origin)


def as_batch(photos: Sequence[Prepared]) -> Tensor:
    """Return the reduced images, all of one size, as uint8 (b, 3, h', w')."""
    return torch.from_numpy(np.stack([photo.small for photo in photos])).permute(0, 3, 1, 2)


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
    if isinstance(model, ContourNet | None):
        return LEVELS if ks is None else tuple(check_ks(ks))
    from matbackprop.vision.segmentation import CLUSTER_KS

    numbers = CLUSTER_KS if ks is None else tuple(check_ks(ks))
    if max(numbers) > _MAX_CLUSTERS:
        raise ConfigurationError(f"{max(numbers)} clusters are too many. Use at most {_MAX_CLUSTERS}.")
    return numbers


def threshold_of(model: ContourNet | None) -> float:
    """Return the default threshold of a contour network, or of image gradients."""
    return GRADIENT_THRESHOLD if model is None else model.config.threshold


@torch.inference_mode()
def network_contours(
    model: ContourNet, images: Tensor, scales: Sequence[float] = (1.0,), mirror: bool = False
) -> NDArray[np.float32]:
    """Compute contours (b, h, w) of uint8 images (b, 3, h, w), averaged over scales and, optionally, mirror images."""
    images = images.to(next(model.parameters()).device).float() / 255
    size = images.shape[-2:]
    total = images.new_zeros(len(images), *size)
    for scale in scales:
        shape = [max(1, round(n * scale)) for n in size]
        scaled = images
        if scale != 1:
            scaled = nnf.interpolate(images, size=shape, mode="bicubic", align_corners=False).clamp(0, 1)
        maps = model.contours(scaled)
        if mirror:
            maps = (maps + model.contours(scaled.flip(-1)).flip(-1)) / 2
        total += nnf.interpolate(maps[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
    return (total / len(scales)).clamp(max=1).cpu().numpy()


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
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    height, width = image.shape[-2:]
    if max(height, width) <= side:
        return image
    ratio = side / max(height, width)
    size = max(1, round(height * ratio)), max(1, round(width * ratio))
    return nnf.interpolate(image.unsqueeze(0), size=size, mode="bilinear", antialias=True)[0]
