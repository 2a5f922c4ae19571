"""The measures as torchmetrics classes.

``update(segmentations, ground_truth)`` takes the ``t`` segmentations and the ``g`` human maps of one image, lists of
integer maps ``(h, w)`` or one tensor ``(t, h, w)``. Each image has one row of a ``cat`` state, because ODS needs all
images of all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from matbackprop.errors import ShapeError, needs
from matbackprop.vision.metrics.boundaries import TOLERANCE, boundary_counts
from matbackprop.vision.metrics.evaluation import boundary_average_precision, boundary_over_scales, over_scales
from matbackprop.vision.metrics.objects_parts import objects_and_parts, objects_over_scales
from matbackprop.vision.metrics.regions import region_scores

with needs("the metric classes need torchmetrics", "'matbackprop[metrics]'"):
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat

Maps = Sequence[Any]


class _PerImage(Metric):
    """A metric with one row per image; subclasses compute rows and named scores."""

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    rows: list[Tensor] | Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def update(self, segmentations: Maps | Tensor, ground_truth: Maps | Tensor) -> None:
        """Score one image.

        Args:
            segmentations: ``t`` label maps ``(h, w)``, the same number for every image.
            ground_truth: human label maps ``(h, w)``.

        Raises:
            ShapeError: the maps differ in size, or images in the number of segmentations.
        """
        row = torch.from_numpy(self._row(list(segmentations), list(ground_truth))).to(self.device)[None]
        rows = cast(list[Tensor], self.rows)
        if rows and rows[0].shape[1:] != row.shape[1:]:
            raise ShapeError(
                f"This image has {len(segmentations)} segmentations, unlike the images before. Give the same number "
                "for all images."
            )
        rows.append(row)

    def compute(self) -> dict[str, Tensor]:
        """Named scores over all images so far, float64 scalars."""
        scores = self._scores(dim_zero_cat(self.rows).cpu().numpy())
        return {name: torch.tensor(value, dtype=torch.float64, device=self.device) for name, value in scores.items()}

    def _row(self, segmentations: Maps, ground_truth: Maps) -> NDArray[Any]:
        raise NotImplementedError

    def _scores(self, rows: NDArray[Any]) -> dict[str, float]:
        raise NotImplementedError


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

    def _row(self, segmentations: Maps, ground_truth: Maps) -> NDArray[np.float64]:
        scores = region_scores(segmentations, ground_truth)
        covering = scores.covering
        alone = [len(ground_truth), scores.best_covering.sum(), covering.max(), covering.mean(1).max()]
        return np.concatenate([alone, covering.sum(1)])

    def _scores(self, rows: NDArray[np.float64]) -> dict[str, float]:
        annotators, best, paper_best, paper_average = rows[:, :4].mean(0)
        pooled = (*over_scales(rows[:, 4:]), best)
        scores = {f"covering_{name}": v / annotators for name, v in zip(("ods", "ois", "best"), pooled, strict=True)}
        return scores | {"paper_best": paper_best, "paper_average": paper_average}


class RandIndex(_PerImage):
    """Probabilistic Rand index, the mean over annotators: ``pri_ods`` and ``pri_ois``.

    Example:
        >>> import torch
        >>> metric = RandIndex()
        >>> metric.update([torch.tensor([[0, 0, 1, 1]])], [torch.tensor([[0, 0, 0, 1]])])
        >>> metric.compute()["pri_ods"]
        tensor(0.5000, dtype=torch.float64)
    """

    def _row(self, segmentations: Maps, ground_truth: Maps) -> NDArray[np.float64]:
        return region_scores(segmentations, ground_truth).rand_index.mean(1)

    def _scores(self, rows: NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(("pri_ods", "pri_ois"), over_scales(rows), strict=True))


class VariationOfInformation(_PerImage):
    """Variation of information in bits, the mean over annotators: ``vi_ods`` and ``vi_ois``.

    Example:
        >>> import torch
        >>> metric = VariationOfInformation()
        >>> metric.update([torch.tensor([[0, 0, 1, 1]])], [torch.tensor([[0, 1, 0, 1]])])
        >>> metric.compute()["vi_ods"]
        tensor(2., dtype=torch.float64)
    """

    higher_is_better = False

    def _row(self, segmentations: Maps, ground_truth: Maps) -> NDArray[np.float64]:
        return region_scores(segmentations, ground_truth).variation_of_information.mean(1)

    def _scores(self, rows: NDArray[np.float64]) -> dict[str, float]:
        ods, ois = over_scales(-rows)
        return {"vi_ods": -ods, "vi_ois": -ois}


class BoundaryFMeasure(_PerImage):
    """F-measure of matched boundaries, ``boundary_ods`` and ``boundary_ois``, and average precision ``boundary_ap``.

    Args:
        tolerance: the largest distance of matched pixels as a fraction of the image diagonal.
        options: of ``torchmetrics.Metric``.

    Example:
        >>> import torch
        >>> half = torch.arange(40).expand(30, 40) > 20
        >>> metric = BoundaryFMeasure()
        >>> metric.update([half], [half])
        >>> metric.compute()["boundary_ods"]
        tensor(1., dtype=torch.float64)
    """

    def __init__(self, *, tolerance: float = TOLERANCE, **options: Any) -> None:
        super().__init__(**options)
        self.tolerance = tolerance

    def _row(self, segmentations: Maps, ground_truth: Maps) -> NDArray[np.int64]:
        return boundary_counts(segmentations, ground_truth, self.tolerance)

    def _scores(self, rows: NDArray[np.int64]) -> dict[str, float]:
        ods, ois = boundary_over_scales(rows)
        return {"boundary_ods": ods, "boundary_ois": ois, "boundary_ap": boundary_average_precision(rows)}


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

    def _row(self, segmentations: Maps, ground_truth: Maps) -> NDArray[np.float64]:
        return objects_and_parts(segmentations, ground_truth)

    def _scores(self, rows: NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(("objects_ods", "objects_ois"), objects_over_scales(list(rows)), strict=True))
