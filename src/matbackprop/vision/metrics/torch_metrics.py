"""Segmentation metrics as torchmetrics classes.

Each image is one row of a ``cat`` state, because ODS needs the scores of all images of all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from matbackprop.errors import ShapeError, needs
from matbackprop.vision.metrics.boundaries import TOLERANCE
from matbackprop.vision.metrics.evaluation import MEASURES, score_image

with needs("the metric classes need torchmetrics", "'matbackprop[metrics]'"):
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat

Maps = Sequence[Any]


class _PerImage(Metric):
    """Base class: a metric of ``MEASURES``, with one row per image."""

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    measure: ClassVar[str]
    tolerance: float = TOLERANCE
    rows: list[Tensor] | Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def update(self, segmentations: Maps | Tensor, ground_truth: Maps | Tensor) -> None:
        """Score one image.

        Args:
            segmentations: list of integer label maps ``(h, w)`` or tensor ``(t, h, w)``, with the same number of maps
                for every image.
            ground_truth: list of human label maps ``(h, w)`` or tensor ``(g, h, w)``.

        Raises:
            ShapeError: the maps differ in size, or the images differ in the number of segmentations.
        """
        options = {name: self.measure == name for name in ("boundary", "objects")}
        scores = score_image("", list(segmentations), list(ground_truth), tolerance=self.tolerance, **options)
        row = torch.from_numpy(MEASURES[self.measure][0](scores)).to(self.device)[None]
        rows = cast(list[Tensor], self.rows)
        if rows and rows[0].shape[1:] != row.shape[1:]:
            raise ShapeError(
                f"This image has {len(segmentations)} segmentations, unlike the images before. Pass the same "
                "number for all images."
            )
        rows.append(row)

    def compute(self) -> dict[str, Tensor]:
        """Compute the scores over all images so far, as float64 scalars."""
        scores = MEASURES[self.measure][1](dim_zero_cat(self.rows).cpu().numpy())
        return {name: torch.tensor(value, dtype=torch.float64, device=self.device) for name, value in scores.items()}


class SegmentationCovering(_PerImage):
    """Covering of human maps: ``covering_ods``, ``covering_ois``, ``covering_best``, ``paper_best``, ``paper_average``.

    Example:
        >>> import torch
        >>> metric = SegmentationCovering()
        >>> metric.update(torch.tensor([[[0, 0, 1, 1]], [[0, 0, 0, 0]]]), torch.tensor([[[0, 0, 0, 1]]]))
        >>> {name: round(value.item(), 4) for name, value in metric.compute().items()}["covering_ods"]
        0.625

    Reference: Arbelaez, Maire, Fowlkes, Malik, PAMI 2011, section 3.1.
    """

    measure = "covering"


class RandIndex(_PerImage):
    """Probabilistic Rand index, the mean over annotators: ``pri_ods`` and ``pri_ois``.

    Example:
        >>> import torch
        >>> metric = RandIndex()
        >>> metric.update([torch.tensor([[0, 0, 1, 1]])], [torch.tensor([[0, 0, 0, 1]])])
        >>> metric.compute()["pri_ods"]
        tensor(0.5000, dtype=torch.float64)
    """

    measure = "pri"


class VariationOfInformation(_PerImage):
    """Variation of information in bits, the mean over annotators: ``vi_ods`` and ``vi_ois``.

    Example:
        >>> import torch
        >>> metric = VariationOfInformation()
        >>> metric.update([torch.tensor([[0, 0, 1, 1]])], [torch.tensor([[0, 1, 0, 1]])])
        >>> metric.compute()["vi_ods"]
        tensor(2., dtype=torch.float64)
    """

    measure = "vi"
    higher_is_better = False


class BoundaryFMeasure(_PerImage):
    """F-measure of matched boundaries, ``boundary_ods`` and ``boundary_ois``, and average precision ``boundary_ap``.

    Args:
        tolerance: maximum distance between matched pixels, as a fraction of the image diagonal.
        options: options of ``torchmetrics.Metric``.

    Example:
        >>> import torch
        >>> half = torch.arange(40).expand(30, 40) > 20
        >>> metric = BoundaryFMeasure()
        >>> metric.update([half], [half])
        >>> metric.compute()["boundary_ods"]
        tensor(1., dtype=torch.float64)
    """

    measure = "boundary"

    def __init__(self, *, tolerance: float = TOLERANCE, **options: Any) -> None:
        super().__init__(**options)
        self.tolerance = tolerance


class ObjectsAndParts(_PerImage):
    """F-measure of objects and parts: ``objects_ods`` and ``objects_ois``.

    Example:
        >>> import torch
        >>> metric = ObjectsAndParts()
        >>> metric.update([torch.tensor([[0, 0, 1, 1]])], [torch.tensor([[0, 0, 0, 0]])])
        >>> round(metric.compute()["objects_ods"].item(), 4)
        0.1818

    Reference: Pont-Tuset, Marques, CVPR 2013.
    """

    measure = "objects"
