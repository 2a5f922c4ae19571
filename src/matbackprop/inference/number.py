"""How many regions people would draw in a photograph, and how far that number can be trusted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from matbackprop.spectral import Hierarchy

__all__ = ["Number", "suggest_number"]

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
