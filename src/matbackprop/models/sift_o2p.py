"""SIFT-O2P: log-covariance pooling of dense SIFT with a linear classifier, the hand-made baseline.

The descriptors do not learn, so they are computed once (:meth:`SiftO2P.describe`) and only the classifier is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError, MissingExtraError
from matbackprop.functional import second_order_pool, vectorize_symmetric
from matbackprop.models.backbone import IMAGENET_MEAN, IMAGENET_STD
from matbackprop.models.deep_o2p import mask_to_grid
from matbackprop.models.pretrained import PretrainedMixin

CELLS = 4
ANGLES = 8
LUMA = (0.299, 0.587, 0.114)


class SiftO2P(PretrainedMixin, nn.Module):
    """Dense SIFT at several scales, second-order pooling inside the region, a linear classifier.

    With the descriptors F (m×128) of all positions and scales and weights w, the share of each position inside the
    mask, scaled to Σw = 1: v = triangle(log(Fᵀdiag(w)F + εI)), off-diagonal entries times √2.

    Args:
        classes: number of classes.
        bin_sizes: side of one of the 4×4 cells of a descriptor in pixels, one for each scale.
        stride: distance of neighbouring positions in pixels.
        function: ``"log"`` or ``"sqrt"``.
        eps: ε.
        support: pool inside the ``"mask"`` or over ``"all"`` of the canvas.
        canvas: side of the input image.
        names: names of the classes, kept for those who use the trained model.
        background: how training treated the background, kept likewise.
        side: longest side of a region on the canvas in training, kept likewise.

    Reference:
        Carreira, Caseiro, Batista, Sminchisescu. Semantic segmentation with second-order pooling. ECCV 2012.
    """

    def __init__(
        self,
        classes: int,
        *,
        bin_sizes: Sequence[int] = (4, 6, 8),
        stride: int = 4,
        function: Literal["log", "sqrt"] = "log",
        eps: float = 1e-3,
        support: Literal["all", "mask"] = "mask",
        canvas: int = 227,
        names: list[str] | None = None,
        background: Literal["keep", "mask"] = "keep",
        side: int = 200,
    ) -> None:
        super().__init__()
        if not bin_sizes:
            raise ConfigurationError("bin_sizes is empty; dense SIFT needs at least one scale, for example (4, 6, 8).")
        self.hparams_dict: dict[str, Any] = {
            "classes": classes,
            "bin_sizes": list(bin_sizes),
            "stride": stride,
            "function": function,
            "eps": eps,
            "support": support,
            "canvas": canvas,
            "names": names,
            "background": background,
            "side": side,
        }
        self.bin_sizes = tuple(bin_sizes)
        self.stride = stride
        self.function = function
        self.eps = eps
        self.support = support
        self.canvas = canvas
        self.names = names
        self.background = background
        self.side = min(side, canvas)
        width = ANGLES * CELLS**2
        self.out_features = width * (width + 1) // 2
        self.mean: Tensor
        self.deviation: Tensor
        self.calibrated: Tensor
        self.register_buffer("mean", torch.zeros(self.out_features))
        self.register_buffer("deviation", torch.ones(1))
        self.register_buffer("calibrated", torch.tensor(False))
        self.classifier = nn.Linear(self.out_features, classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    @torch.no_grad()
    def describe(self, image: Tensor, mask: Tensor) -> Tensor:
        """Pool the dense SIFT of normalised images.

        Args:
            image: (b, 3, canvas, canvas), normalised for the ImageNet networks.
            mask: share of each pixel inside the region, (b, canvas, canvas).

        Returns:
            (b, 8256).

        Raises:
            MissingExtraError: kornia is not installed.
        """
        try:
            from kornia.feature import DenseSIFTDescriptor
        except ImportError as error:
            raise MissingExtraError("dense SIFT needs kornia: pip install 'matbackprop[sift]'.") from error
        colour = image.float() * image.new_tensor(IMAGENET_STD).float().view(3, 1, 1)
        colour = colour + image.new_tensor(IMAGENET_MEAN).float().view(3, 1, 1)
        grey = (colour * colour.new_tensor(LUMA).view(3, 1, 1)).sum(1, keepdim=True)
        descriptors, weights = [], []
        for size in self.bin_sizes:
            sift = DenseSIFTDescriptor(
                num_ang_bins=ANGLES,
                num_spatial_bins=CELLS,
                spatial_bin_size=size,
                stride=self.stride,
                padding=0,
            ).to(grey.device)
            found = sift(grey)
            centre = (CELLS - 1) * size / 2 - (0.5 if size % 2 == 0 else 0.0)
            grid = (found.shape[-2], found.shape[-1])
            descriptors.append(found.flatten(2).mT)
            weights.append(mask_to_grid(mask.float(), grid, centre, self.stride).flatten(1))
        weight = torch.cat(weights, 1)
        if self.support == "all":
            weight = torch.ones_like(weight)
        total = weight.sum(-1, keepdim=True)
        weight = torch.where(total > 1e-6, weight / total.clamp_min(1e-6), 1.0 / weight.shape[-1])
        pooled = second_order_pool(
            torch.cat(descriptors, 1), eps=self.eps, function=self.function, weight=weight, check=False
        )
        return vectorize_symmetric(pooled)

    @torch.no_grad()
    def calibrate(self, vectors: Tensor) -> None:
        """Measure one mean for each entry and one deviation from descriptors (n, 8256)."""
        vectors = vectors.double()
        mean = vectors.mean(0)
        self.mean.copy_(mean)
        self.deviation.copy_((vectors - mean).square().mean().sqrt().clamp_min(1e-12).view(1))
        self.calibrated.fill_(True)

    def classify(self, vector: Tensor) -> Tensor:
        """Scores (b, classes) of descriptors (b, 8256)."""
        return self.classifier((vector.float() - self.mean) / self.deviation)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        """Scores (b, classes) of normalised images (b, 3, canvas, canvas) with masks (b, canvas, canvas)."""
        return self.classify(self.describe(image, mask))

    def parameter_groups(self, rate: float, backbone_factor: float, decay: float) -> list[dict[str, Any]]:
        """The optimiser's one group, the classifier at ``rate``; there is no backbone for ``backbone_factor``."""
        return [{"params": list(self.classifier.parameters()), "lr": rate, "weight_decay": decay, "name": "head"}]
