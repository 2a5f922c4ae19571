"""Merging superpixels by colour, texture and contrast: what can be segmented without a network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import MissingExtraError
from matbackprop.models.deep_ncuts import Merging, merge_superpixels
from matbackprop.spectral import (
    MERGE_KS,
    MergeCost,
    border_mean,
    region_graph,
    region_means,
    slic_superpixels,
)

COST = MergeCost(region=1.0, boundary=2.0, area=0.8, contact=0.5)
"""Exponents of the price. They, the weight and the width were best of a few on the training images of BSDS300."""
SUPERPIXELS = 600
"""About how many superpixels merging starts from."""
TEXTURE = 2.0
"""Weight of the deviations of colours in a region against their means."""
WIDTH = 3.0
"""Standard deviation, in pixels, of the Gaussian whose derivatives measure contrast."""


def merge_by_colour(
    image: NDArray[np.uint8],
    ks: Sequence[int] = MERGE_KS,
    *,
    superpixels: ArrayLike | int = SUPERPIXELS,
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
    try:
        from scipy.ndimage import gaussian_filter
        from skimage.color import rgb2lab
    except ImportError as error:
        raise MissingExtraError("merging by colour needs scikit-image: pip install 'matbackprop[train]'") from error
    regions = slic_superpixels(image, superpixels) if isinstance(superpixels, int) else np.asarray(superpixels)
    lab = rgb2lab(image)
    means = region_means(regions, lab)
    deviations = np.sqrt(np.maximum(region_means(regions, lab**2) - means**2, 0))
    slopes = [gaussian_filter(lab[..., c], WIDTH, order=order) for c in range(3) for order in ((0, 1), (1, 0))]
    contrast = border_mean(regions, region_graph(regions), np.sqrt(np.sum(np.square(slopes), 0)))
    return merge_superpixels(regions, np.concatenate([means, TEXTURE * deviations], 1), contrast, ks, cost=COST)
