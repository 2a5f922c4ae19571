"""Felzenszwalb and Huttenlocher's graph-based segmentation, from scikit-image."""

import torch
from torch import Tensor

from matbackprop.errors import MissingExtraError
from matbackprop.reproduce.baselines.simple import check_image

__all__ = ["felzenszwalb"]


def felzenszwalb(
    image: Tensor,
    *,
    scales: tuple[float, ...] = (50, 100, 200, 400, 800, 1600, 3200, 6400),
    sigma: float = 0.8,
    smallest: float = 1.0,
) -> list[Tensor]:
    """Segment by joining pixels over weak edges, at several scales.

    Args:
        image: uint8 ``(3, h, w)``.
        scales: larger ones prefer larger regions; one segmentation each.
        sigma: width of the Gaussian that smooths the image first.
        smallest: smallest region in pixels as a multiple of the scale.

    Returns:
        One map for each scale, int64 ``(h, w)``.

    Raises:
        MissingExtraError: scikit-image is not installed.

    Reference: Felzenszwalb, Huttenlocher, "Efficient graph-based image segmentation", IJCV 2004.
    """
    try:
        from skimage.segmentation import felzenszwalb as segment
    except ImportError as error:
        raise MissingExtraError("felzenszwalb needs scikit-image: pip install 'matbackprop[train]'") from error
    check_image(image)
    array = image.permute(1, 2, 0).numpy()
    maps = [segment(array, scale=scale, sigma=sigma, min_size=max(1, round(smallest * scale))) for scale in scales]
    return [torch.from_numpy(labels).long() for labels in maps]
