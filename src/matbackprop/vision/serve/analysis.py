"""Segment photographs for the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from matbackprop.errors import ConfigurationError
from matbackprop.vision.inference import segment_photograph
from matbackprop.vision.serve.views import Analysis, Pixels


def analyze(photograph: Pixels, model: Any = None, name: str = "picture.png") -> Analysis:
    """Segment a photograph (h, w, 3) and show its regions at the model's default height.

    Args:
        photograph: (h, w, 3) bytes.
        model: a trained network; None uses only colors.
        name: file name of the photograph.

    Raises:
        ConfigurationError: the model returns clusters without a hierarchy.

    Example:
        >>> import numpy as np
        >>> picture = np.zeros((64, 96, 3), np.uint8); picture[:, 48:] = 200
        >>> analyze(picture).count
        2
    """
    segments = replace(segment_photograph(photograph, model), name=name)
    if segments.hierarchy is None or segments.regions is None:
        raise ConfigurationError("This model has no hierarchy of regions. Choose a contour network.")
    return Analysis(segments, segments.regions, segments.hierarchy, segments.threshold)
