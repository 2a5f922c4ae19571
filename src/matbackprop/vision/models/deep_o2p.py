"""Region classifiers with fully connected layers, second-order pooling, or both.

==========  ==================================================================================================
``fc``      the head of AlexNet: the map, two fully connected layers, a classifier
``o2p``     DeepO2P: C = g(FᵀF + εI) of the map's features F, its triangle, a linear classifier
``o2p_fc``  DeepO2P-FC: the same with AlexNet's two fully connected layers before the classifier
``both``    triangle and output of the fully connected layers, concatenated, and a classifier
==========  ==================================================================================================

With ``average``, the heads ``fc`` and ``both`` average the cells of the last map (first-order pooling) instead of
applying fully connected layers to it.

The triangles of several maps are concatenated. Maps with the same number of channels, such as the scales of dense SIFT,
can also be pooled together: the tap ``"bins4+bins6+bins8"`` pools the cells of all three maps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.nn import SecondOrderPool
from matbackprop.solvers import batched_eigh
from matbackprop.vision.configuration import Background, Pixels
from matbackprop.vision.models.backbones import build_backbone
from matbackprop.vision.models.config import RegionModelConfig
from matbackprop.vision.models.weights import PretrainedMixin


def mask_to_grid(mask: Tensor, grid: tuple[int, int], start: float, stride: int) -> Tensor:
    """Average masks (b, h, w) over the cells of a feature grid (b, *grid). Outside the image, the mask is 0.

    ``start`` is the center of the first cell (:attr:`~matbackprop.vision.models.backbones.base.TapInfo.offset`) and
    ``stride`` the side of a cell, in pixels.

    Example:
        >>> mask = torch.zeros(1, 8, 8); mask[:, :4, :2] = 1
        >>> mask_to_grid(mask, (2, 2), 1.5, 4)[0].tolist()
        [[0.5, 0.0], [0.0, 0.0]]
    """
    before = int(start - (stride - 1) / 2)
    after = [before + stride * n - size for n, size in zip(grid, mask.shape[-2:], strict=True)]
    # Negative padding crops.
    padded = nnf.pad(mask, (-before, after[1], -before, after[0]))
    return nnf.avg_pool2d(padded.unsqueeze(1), stride).squeeze(1)


class Descriptor(nn.Module, ABC):
    """Base class of layers that convert a feature map to a vector of ``entries`` numbers per support.

    The vector is standardized by the mean of each entry and one deviation, which are measured before training.
    """

    def __init__(self, entries: int, support: str) -> None:
        super().__init__()
        self.support = support
        self.out_features = (2 if support == "mask+all" else 1) * entries
        self.mean: Tensor
        self.deviation: Tensor
        self.calibrated: Tensor
        self.register_buffer("mean", torch.zeros(self.out_features))
        self.register_buffer("deviation", torch.ones(1))
        self.register_buffer("calibrated", torch.tensor(False))

    def weights(self, mask: Tensor | None) -> Tensor | None:
        """Return cell weights (b, m) or (b, 2, m) with mean 1 from the grid mask (b, h, w)."""
        if self.support == "all":
            return None
        if mask is None:
            raise ShapeError(f"support={self.support!r} pools inside the region. Pass its mask.")
        flat = mask.flatten(1).float()
        total = flat.mean(-1, keepdim=True)
        inside = torch.where(total > 1e-6, flat / total.clamp_min(1e-6), torch.ones_like(flat))
        return inside if self.support == "mask" else torch.stack([inside, torch.ones_like(inside)], 1)

    @abstractmethod
    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the vector (b, out_features) of a map (b, c, h, w); ``mask`` (b, h, w) is on its grid."""

    def standardized(self, vector: Tensor) -> Tensor:
        """Standardize a vector."""
        return (vector - self.mean) / self.deviation

    @torch.no_grad()
    def measure(self, vectors: Tensor) -> None:
        """Measure the mean and deviation of vectors (n, out_features)."""
        vectors = vectors.double()
        self.mean.copy_(vectors.mean(0))
        self.deviation.copy_((vectors - vectors.mean(0)).square().mean().sqrt().clamp_min(1e-12).view(1))
        self.calibrated.fill_(True)


class FirstOrderVector(Descriptor):
    """First-order pooling: the average of a feature map over the support."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the average of the cells (b, out_features)."""
        cells = features.flatten(2).to(torch.promote_types(features.dtype, torch.float32))
        weights = self.weights(mask)
        if weights is None:
            return cells.mean(-1)
        # len() would fix the batch size in an exported graph.
        weights = weights.view(cells.shape[0], -1, cells.shape[-1])
        return torch.einsum("bcm,bsm->bsc", cells, weights).flatten(1) / cells.shape[-1]


class SecondOrderVector(Descriptor):
    """Second-order pooling: the upper triangle of C = g(s²·Fᵀdiag(w)F + εI), with off-diagonal entries times √2.

    F (m×d) are the features of the m cells of the map, s is a scale, and w are the weights of the cells. If ``reduce``
    is set, the map is first projected by a 1×1 convolution, initialized with the leading principal directions of the
    features (:meth:`project`). ``changes`` override fields of ``config``.
    """

    def __init__(self, channels: int, config: RegionModelConfig | None = None, **changes: Any) -> None:
        config = replace(config or RegionModelConfig(), **changes)
        width = config.reduce or channels
        super().__init__(width * (width + 1) // 2, config.support)
        self.config, self.width = config, width
        self.reduce: nn.Conv2d | None = None
        if config.reduce is not None:
            if config.reduce > channels:
                raise ConfigurationError(f"reduce is {config.reduce}. Use 1 … {channels}, the channels of the map.")
            self.reduce = nn.Conv2d(channels, config.reduce, 1, bias=False)
            nn.init.orthogonal_(self.reduce.weight)
        self.layer = SecondOrderPool(
            eps=config.eps,
            function=config.function,
            exponent=config.power if config.function == "power" else None,
            learn_exponent=config.learn_power,
            vectorize=True,
            check=False,
            precision=torch.float64,
        )

    @property
    def power(self) -> float | None:
        """Current exponent; None for other functions."""
        return None if self.layer.exponent is None else float(torch.as_tensor(self.layer.exponent).detach())

    def features(self, maps: Tensor) -> Tensor:
        """Return the features F (b, m, d) of a map (b, c, h, w): projected, scaled, at least float32."""
        if self.reduce is not None:
            maps = self.reduce(maps)
        return maps.flatten(2).mT.to(torch.promote_types(maps.dtype, torch.float32)) * self.config.feature_scale

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the vectorized triangle (b, out_features)."""
        return self.layer(self.features(features), self.weights(mask)).flatten(1)

    def standardized(self, vector: Tensor) -> Tensor:
        """Standardize a vector and multiply it by ``vector_scale``."""
        return (vector - self.mean) * (self.config.vector_scale / self.deviation)

    @torch.no_grad()
    def project(self, maps: Iterable[Tensor]) -> None:
        """Initialize the projection with the leading principal directions of maps (b, c, h, w)."""
        if self.reduce is not None:
            moments = [torch.einsum("bchw,bdhw->cd", m.double(), m.double()) for m in maps]
            _, directions = batched_eigh(torch.stack(moments).sum(0))
            self.reduce.weight.copy_(directions.flip(-1)[:, : self.width].mT[..., None, None])


class RegionClassifier(PretrainedMixin, nn.Module):
    """Classifier of image regions. All arguments are saved with the model.

    Args:
        classes: number of classes, with optional ``names``.
        config: configuration of the network; ``changes`` override its fields.
        canvas: side of the input image.
        background, side, margin: treatment of regions in training; see
            :class:`~matbackprop.vision.training.config.RegionDataConfig`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = RegionClassifier(5, head="o2p", canvas=67, reduce=8)
        >>> model(torch.rand(2, 3, 67, 67)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        classes: int,
        config: RegionModelConfig | None = None,
        *,
        canvas: Pixels = 227,
        names: Sequence[str] | None = None,
        background: Background = "mask",
        side: Pixels = 200,
        margin: Annotated[float, Field(ge=0, le=1 << 16)] = 0.0,
        **changes: Any,
    ) -> None:
        super().__init__()
        self.config = config = replace(config or RegionModelConfig(), **changes)
        if names is not None and len(names) != classes:
            raise ConfigurationError(f"names must have one entry per class, got {len(names)} for {classes} classes.")
        if config.two_views and background == "mask":
            raise ConfigurationError("two_views needs background 'keep'. With 'mask' both views are the same.")
        self.canvas, self.background, self.side, self.margin = canvas, background, min(side, canvas), margin
        self.names = None if names is None else list(names)
        presented = {"canvas": canvas, "background": background, "side": side, "margin": margin, "names": self.names}
        self.hparams_dict = {"classes": classes, **asdict(config), **presented}
        self._build_backbone()
        self._build_descriptors()
        self._build_classifier(classes)
        if config.frozen:
            for fixed in (self.backbone, *(one.reduce for one in self.poolings().values() if one.reduce is not None)):
                fixed.requires_grad_(False)

    def _build_backbone(self) -> None:
        config = self.config
        self.backbone = build_backbone(config.backbone)
        self.last = self.backbone.taps[-1]  # input of the fully connected layers or of the average
        self.taps = () if config.head == "fc" else config.taps or (self.last,)  # maps that are pooled
        self.used_maps = [part for tap in self.taps for part in tap.split("+")]
        self.used_maps += [self.last] if config.head in ("fc", "both") and self.last not in self.used_maps else []
        needed = max(self.backbone.info(tap).reach for tap in self.used_maps)
        if self.canvas < needed:
            try:
                self._whole_maps(self.used_maps)  # padding may be sufficient
            except RuntimeError as error:
                raise ConfigurationError(
                    f"canvas {self.canvas} is too small for {', '.join(self.used_maps)} of {config.backbone}. "
                    f"Use at least {needed} pixels."
                ) from error
        if config.train_from is not None:
            self.backbone.freeze(config.train_from)
        self.backbone.cut(self.used_maps)

    def _whole_maps(self, taps: Sequence[str]) -> dict[str, Tensor]:
        """Return the maps of the whole backbone on the device ``meta``."""
        with torch.device("meta"):
            return build_backbone(self.config.backbone)(torch.empty(1, 3, self.canvas, self.canvas), taps)

    def _build_descriptors(self) -> None:
        config = self.config
        self.pooled = nn.ModuleList()
        self.first: nn.Module = nn.Identity()  # fully connected layers, if the head has them
        self.average: FirstOrderVector | None = None
        self.vector_dropout = nn.Dropout(config.vector_dropout)
        self.average_dropout = nn.Dropout(config.input_dropout)
        for number, tap in enumerate(self.taps):
            channels = self._channels(tap)
            rest = config.reduce_rest if config.reduce_rest < channels else None
            self.pooled.append(SecondOrderVector(channels, config, reduce=config.reduce if number == 0 else rest))
        if config.average:
            self.average = FirstOrderVector(self._channels(self.last), config.support)

    def _build_classifier(self, classes: int) -> None:
        config, width = self.config, sum(one.out_features for one in self.descriptors())
        if config.head != "o2p" and self.average is None:
            inputs = width
            if config.head != "o2p_fc":
                inputs = self._whole_maps([self.last])[self.last][0].numel() * (2 if config.two_views else 1)
            self.first = self._fully_connected(inputs)
            width = width + config.hidden if config.head == "both" else config.hidden
        self.classifier = nn.Linear(width, classes)
        # Small initial scores for descriptors of up to 32,896 entries.
        nn.init.normal_(self.classifier.weight, std=0.01 if config.head in ("fc", "o2p_fc") else 0.001)
        nn.init.zeros_(self.classifier.bias)

    def _fully_connected(self, inputs: int) -> nn.Sequential:
        hidden, dropout = self.config.hidden, self.config.dropout
        one, two = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        for layer in (one, two):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        parts = (one, nn.ReLU(), nn.Dropout(dropout), two, nn.ReLU(), nn.Dropout(dropout))
        return nn.Sequential(nn.Dropout(self.config.input_dropout), *parts)

    def _channels(self, tap: str) -> int:
        channels = {self.backbone.info(part).channels for part in tap.split("+")}
        if len(channels) > 1:
            raise ConfigurationError(f"The maps of {tap!r} have different numbers of channels. Pool them separately.")
        return channels.pop() * (2 if self.config.two_views else 1)

    @property
    def trains_features(self) -> bool:
        """Whether a layer before the standardization of descriptors is trainable."""
        fixed = [self.backbone, *self.poolings().values()]
        return self._connects_map or any(p.requires_grad for module in fixed for p in module.parameters())

    @property
    def _connects_map(self) -> bool:
        """Whether fully connected layers are applied to the last map."""
        return self.config.head in ("fc", "both") and self.average is None

    def poolings(self) -> dict[str, SecondOrderVector]:
        """Return the second-order layers by the name of their map."""
        return dict(zip(self.taps, self.pooled, strict=True))  # type: ignore[arg-type]

    def descriptors(self) -> list[Descriptor]:
        """Return all descriptors: the second-order layers, then the average."""
        return [*self.poolings().values(), *([] if self.average is None else [self.average])]

    def maps(self, image: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the maps (b, c, h, w) used by the head. The channels of two views are concatenated."""
        if not self.config.two_views:
            return self.backbone(image, self.used_maps)
        if mask is None:
            raise ShapeError("two_views needs the regions' masks. Pass mask.")
        views = self.backbone(torch.cat([image, image * mask.unsqueeze(1)]), self.used_maps)
        return {tap: both.unflatten(0, (2, -1)).movedim(0, 1).flatten(1, 2) for tap, both in views.items()}

    def cells(self, maps: Mapping[str, Tensor], mask: Tensor | None, tap: str) -> tuple[Tensor, Tensor | None]:
        """Return the map ``tap``, and the pixel mask (b, canvas, canvas) resampled to its grid, or None if unused.

        The cells of several maps are concatenated to (b, c, cells, 1).
        """
        parts = tap.split("+")
        masks: list[Tensor] = []
        if mask is not None and self.config.support != "all":
            for part in parts:
                info = self.backbone.info(part)
                grid = (maps[part].shape[-2], maps[part].shape[-1])
                masks.append(mask_to_grid(mask.float(), grid, info.offset, info.stride))
        if len(parts) == 1:
            return maps[tap], masks[0] if masks else None
        joined = torch.cat([maps[part].flatten(2) for part in parts], -1).unsqueeze(-1)
        return joined, torch.cat([m.flatten(1) for m in masks], -1).unsqueeze(-1) if masks else None

    def describe(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the input (b, n) of :meth:`classify`: descriptors before standardization, and the last map if used."""
        maps = self.maps(image, mask)
        inputs = zip([*self.taps, self.last], self.descriptors(), strict=False)
        parts = [one(*self.cells(maps, mask, tap)) for tap, one in inputs]
        if self._connects_map:
            parts.append(maps[self.last].flatten(1))
        return torch.cat(parts, -1)

    def _split(self, described: Tensor) -> list[Tensor]:
        widths = [one.out_features for one in self.descriptors()]
        rest = described.shape[-1] - sum(widths)
        return list(described.split([*widths, rest] if self._connects_map else widths, -1))

    def classify(self, described: Tensor) -> Tensor:
        """Return the class scores (b, classes) from the result of :meth:`describe`."""
        dtype = self.classifier.weight.dtype
        parts = self._split(described)
        drops = [self.vector_dropout] * len(self.pooled) + [self.average_dropout]
        for i, one in enumerate(self.descriptors()):
            parts[i] = drops[i](one.standardized(parts[i]).to(dtype))
        if self._connects_map:
            parts[-1] = self.first(parts[-1].to(dtype))
        joined = torch.cat(parts, 1)
        return self.classifier(self.first(joined) if self.config.head == "o2p_fc" else joined)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the class scores (b, classes) before the softmax.

        Args:
            image: normalized images (b, 3, canvas, canvas).
            mask: fraction of each pixel inside the region (b, canvas, canvas), for pooling inside the mask.
        """
        return self.classify(self.describe(image, mask))

    @torch.no_grad()
    def calibrate(self, batches: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Initialize projections and measure the statistics of descriptors on batches of images and masks."""
        if all(bool(one.calibrated) for one in self.descriptors()):
            return
        for tap, pooling in self.poolings().items():
            pooling.project(self.cells(self.maps(*batch), None, tap)[0] for batch in batches)
        vectors = self._split(torch.cat([self.describe(*batch) for batch in batches]))
        for one, part in zip(self.descriptors(), vectors, strict=False):
            one.measure(part)

    def parameter_groups(self, rate: float, backbone_factor: float, decay: float) -> list[dict[str, Any]]:
        """Return parameter groups: backbone (``rate · backbone_factor``), head (``rate``), scalars without decay."""
        scalars = [p for p in self.parameters() if p.ndim == 0 and p.requires_grad]
        backbone = [p for p in self.backbone.parameters() if p.requires_grad]
        known = {id(p) for p in scalars + backbone}
        head = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        groups = [
            {"params": backbone, "lr": rate * backbone_factor, "weight_decay": decay, "name": "backbone"},
            {"params": head, "lr": rate, "weight_decay": decay, "name": "head"},
            {"params": scalars, "lr": rate, "weight_decay": 0.0, "name": "scalars"},
        ]
        return [g for g in groups if g["params"]]
