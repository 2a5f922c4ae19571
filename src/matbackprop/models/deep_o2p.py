"""Region classifiers on AlexNet or VGG-16: fully connected layers, second-order pooling, or both.

==========  ==================================================================================================
``fc``      AlexNet's own head: the map, two fully connected layers, a classifier
``o2p``     DeepO2P: C = g(FᵀF + εI) of the map's features F, its triangle, a linear classifier
``o2p_fc``  DeepO2P-FC: the same with AlexNet's two fully connected layers before the classifier
``both``    the triangle beside the output of the fully connected layers, one classifier on both
==========  ==================================================================================================

Several maps may be pooled; their triangles are put side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.models.backbone import build_backbone, grid_geometry
from matbackprop.models.choices import Function, Head, Standardize, Support
from matbackprop.models.pretrained import PretrainedMixin
from matbackprop.nn import SecondOrderPool
from matbackprop.solvers import batched_eigh


def mask_to_grid(mask: Tensor, grid: tuple[int, int], start: float, stride: int) -> Tensor:
    """Carry masks to a feature grid by area: the share of each cell's square that lies inside the mask.

    Args:
        mask: (b, h, w) in [0, 1].
        grid: rows and columns of the feature map.
        start: pixel coordinate of the first cell's centre (see :func:`grid_geometry`).
        stride: side of a cell's square in pixels.

    Returns:
        (b, *grid) in [0, 1]; what lies outside the image counts as outside the mask.

    Example:
        >>> mask = torch.zeros(1, 8, 8); mask[:, :4, :2] = 1
        >>> mask_to_grid(mask, (2, 2), 1.5, 4)[0].tolist()
        [[0.5, 0.0], [0.0, 0.0]]
    """
    before = int(start - (stride - 1) / 2)
    after = [before + stride * n - size for n, size in zip(grid, mask.shape[-2:], strict=True)]
    # Negative padding cuts pixels off, positive padding adds empty ones.
    padded = nnf.pad(mask, (-before, after[1], -before, after[0]))
    return nnf.avg_pool2d(padded.unsqueeze(1), stride).squeeze(1)


class SecondOrderVector(nn.Module):
    """Feature map → second-order pooled, vectorised and standardised descriptor.

    With the features F (m×d) of the map's m cells, scaled by s, and weights w: C = g(s²·Fᵀdiag(w)F + εI), the upper
    triangle of C with off-diagonal entries times √2, minus a fixed mean, divided by a fixed deviation. Mean and
    deviation are measured once, before training, by :meth:`calibrate`.

    Args:
        channels: channels of the map.
        function: ``"log"``, ``"sqrt"``, or ``"power"`` with the exponent ``power``.
        power: the exponent.
        learn_power: let the exponent learn.
        eps: ε.
        learn_eps: let ε learn.
        feature_scale: s.
        reduce: channels after a projection (a 1×1 convolution) before the pooling; None leaves it out. It starts on the
            leading principal directions of the features, measured by :meth:`calibrate`.
        support: pool over ``"all"`` cells, inside the ``"mask"``, or give both descriptors one after the other.
        center: subtract the (weighted) mean feature: pool covariance instead of second moment.
        standardize: ``"scalar"`` one mean and one deviation for all entries, ``"entry"`` one mean for each entry and
            one deviation, ``"none"``.
        unit_norm: divide the triangle by its own norm before it is standardised.
        vector_scale: factor on the standardised descriptor; the rate of the layer behind it scales with its square.
        precision: what the layer computes in.
    """

    def __init__(
        self,
        channels: int,
        *,
        function: Function = "log",
        power: float = 0.5,
        learn_power: bool = False,
        eps: float = 1e-3,
        learn_eps: bool = False,
        feature_scale: float = 0.01,
        reduce: int | None = None,
        support: Support = "all",
        center: bool = False,
        standardize: Standardize = "entry",
        unit_norm: bool = False,
        vector_scale: float = 1.0,
        precision: Literal["float64", "float32"] = "float64",
    ) -> None:
        super().__init__()
        if function not in ("log", "sqrt", "power"):
            raise ConfigurationError(f"unknown pooling function {function!r}; choose log, sqrt or power.")
        if support not in ("all", "mask", "mask+all"):
            raise ConfigurationError(f"unknown support {support!r}; choose all, mask or mask+all.")
        if learn_power and function != "power":
            raise ConfigurationError(f"learn_power needs function='power', got {function!r}.")
        self.support = support
        self.standardize = standardize
        self.unit_norm = unit_norm
        self.vector_scale = vector_scale
        self.feature_scale = feature_scale
        self.reduce: nn.Conv2d | None = None
        if reduce is not None:
            if not 0 < reduce <= channels:
                raise ConfigurationError(
                    f"a map of {channels} channels can be reduced to 1 to {channels}, got {reduce}."
                )
            self.reduce = nn.Conv2d(channels, reduce, 1, bias=False)
            nn.init.orthogonal_(self.reduce.weight)
        self.width = reduce or channels
        self.layer = SecondOrderPool(
            eps=eps,
            function=function,
            exponent=power if function == "power" else None,
            learn_eps=learn_eps,
            learn_exponent=learn_power,
            center=center,
            vectorize=True,
            check=False,
            precision={"float64": torch.float64, "float32": torch.float32}[precision],
        )
        self.regions = 2 if support == "mask+all" else 1
        entries = self.regions * self.width * (self.width + 1) // 2
        self.out_features = entries
        self.mean: Tensor
        self.deviation: Tensor
        self.calibrated: Tensor
        self.register_buffer("mean", torch.zeros(entries if standardize == "entry" else 1))
        self.register_buffer("deviation", torch.ones(1))
        self.register_buffer("calibrated", torch.tensor(standardize == "none" and reduce is None))

    @property
    def eps(self) -> float:
        """ε as it is now."""
        return self.layer.eps if self.layer.log_eps is None else float(self.layer.log_eps.detach().exp())

    @property
    def power(self) -> float | None:
        """The exponent as it is now; None for other functions."""
        return None if self.layer.exponent is None else float(torch.as_tensor(self.layer.exponent).detach())

    def weights(self, mask: Tensor | None) -> Tensor | None:
        """Weights of the cells from the grid mask (b, h, w): (b, m) or (b, 2, m), with mean 1 over the cells."""
        if self.support == "all":
            return None
        if mask is None:
            raise ShapeError(
                f"support={self.support!r} pools inside the region and needs its mask, which was not given."
            )
        flat = mask.flatten(1).float()
        total = flat.mean(-1, keepdim=True)
        inside = torch.where(total > 1e-6, flat / total.clamp_min(1e-6), torch.ones_like(flat))
        if self.support == "mask":
            return inside
        return torch.stack([inside, torch.ones_like(inside)], 1)

    def features(self, maps: Tensor) -> Tensor:
        """The features F (b, m, d) that are pooled, of a map (b, c, h, w): reduced, scaled, in float32 at least."""
        if self.reduce is not None:
            maps = self.reduce(maps)
        return maps.flatten(2).mT.to(torch.promote_types(maps.dtype, torch.float32)) * self.feature_scale

    def raw(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """The vectorised triangle before it is standardised, (b, out_features)."""
        triangle = self.layer(self.features(features), self.weights(mask))
        return (nnf.normalize(triangle, dim=-1) if self.unit_norm else triangle).flatten(1)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Descriptor (b, out_features) of a map (b, c, h, w), with the mask on its grid (b, h, w) where it is used."""
        vector = self.raw(features, mask)
        return (vector - self.mean) * (self.vector_scale / self.deviation)

    @torch.no_grad()
    def calibrate(self, maps: list[Tensor], masks: list[Tensor | None]) -> None:
        """Start the projection and measure mean and deviation on maps (b, c, h, w) with grid masks (b, h, w)."""
        if self.reduce is not None:
            moments = [torch.einsum("bchw,bdhw->cd", m.double(), m.double()) for m in maps]
            _, directions = batched_eigh(torch.stack(moments).sum(0))
            self.reduce.weight.copy_(directions.flip(-1)[:, : self.width].mT[..., None, None])
        if self.standardize != "none":
            vectors = torch.cat([self.raw(m, k) for m, k in zip(maps, masks, strict=True)]).double()
            mean = vectors.mean(0) if self.standardize == "entry" else vectors.mean().view(1)
            self.mean.copy_(mean)
            self.deviation.copy_((vectors - mean).square().mean().sqrt().clamp_min(1e-12).view(1))
        self.calibrated.fill_(True)


def _grid(maps: Tensor) -> tuple[int, int]:
    return maps.shape[-2], maps.shape[-1]


def fully_connected(inputs: int, hidden: int, *, dropout: float = 0.5, input_dropout: float = 0.0) -> nn.Sequential:
    """AlexNet's two fully connected layers with ReLU, without the classifier.

    Args:
        inputs: width of the input.
        hidden: width of both layers (4096 in AlexNet).
        dropout: share dropped after the first and after the second layer.
        input_dropout: share dropped before the first layer.
    """
    layers = nn.Sequential(
        nn.Dropout(input_dropout),
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return layers


class RegionClassifier(PretrainedMixin, nn.Module):
    """A network that names the object in a region.

    Args:
        classes: number of classes.
        backbone: ``"alexnet"`` or ``"vgg16"``.
        head: ``"fc"``, ``"o2p"``, ``"o2p_fc"`` or ``"both"``, see the module's table.
        tap: the map that the second-order layer pools: ``"pool5"`` (6×6 in AlexNet), ``"relu5"`` (13×13), …
        further_taps: maps that are pooled besides; their descriptors are put beside the first.
        further_width: channels that they are projected to, if they have more.
        canvas: side of the input image.
        hidden: width of the fully connected layers.
        dropout: share dropped after each fully connected layer.
        input_dropout: share dropped before the first fully connected layer.
        vector_dropout: share dropped of the pooled descriptor.
        names: names of the classes, kept for those who use the trained model.
        background: how training treated the background, kept likewise.
        side: longest side of a region on the canvas in training, kept likewise.
        pooling: arguments of :class:`SecondOrderVector`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = RegionClassifier(5, head="o2p", canvas=67, reduce=8)
        >>> model(torch.rand(2, 3, 67, 67)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        classes: int,
        *,
        backbone: str = "alexnet",
        head: Head = "o2p",
        tap: str = "pool5",
        further_taps: Sequence[str] = (),
        further_width: int = 96,
        canvas: int = 227,
        hidden: int = 4096,
        dropout: float = 0.5,
        input_dropout: float = 0.0,
        vector_dropout: float = 0.0,
        names: list[str] | None = None,
        background: Literal["keep", "mask"] = "keep",
        side: int = 200,
        **pooling: Any,
    ) -> None:
        super().__init__()
        if head not in ("fc", "o2p", "o2p_fc", "both"):
            raise ConfigurationError(f"unknown head {head!r}; choose fc, o2p, o2p_fc or both.")
        if names is not None and len(names) != classes:
            raise ConfigurationError(f"{len(names)} names were given for {classes} classes.")
        self.hparams_dict = {
            "classes": classes,
            "backbone": backbone,
            "head": head,
            "tap": tap,
            "further_taps": list(further_taps),
            "further_width": further_width,
            "canvas": canvas,
            "hidden": hidden,
            "dropout": dropout,
            "input_dropout": input_dropout,
            "vector_dropout": vector_dropout,
            "names": names,
            "background": background,
            "side": side,
            **pooling,
        }
        self.head = head
        self.tap = tap
        self.canvas = canvas
        self.names = names
        self.background = background
        self.side = min(side, canvas)
        pooled = () if head == "fc" else (tap, *further_taps)
        self.backbone = build_backbone(backbone).up_to([*pooled, *(["pool5"] if head in ("fc", "both") else [])])
        if len({tap, *further_taps}) <= len(further_taps):
            raise ConfigurationError(f"each map is pooled once, got {', '.join((tap, *further_taps))}.")
        with torch.device("meta"):
            probe = build_backbone(backbone)(torch.empty(1, 3, canvas, canvas), ["pool5"])[0]
        self.pooling: SecondOrderVector | None = None
        self.further = nn.ModuleDict()
        self.first: nn.Module | None = None
        self.vector_dropout = nn.Dropout(vector_dropout)
        width = 0
        if head != "fc":
            self.pooling = SecondOrderVector(self.backbone.channels[tap], **pooling)
            for other in further_taps:
                channels = self.backbone.channels[other]
                reduced = further_width if further_width < channels else None
                self.further[other] = SecondOrderVector(channels, **{**pooling, "reduce": reduced})
            width = sum(one.out_features for one in self.poolings().values())
        elif pooling or further_taps:
            given = [*pooling, *(["further_taps"] if further_taps else [])]
            raise ConfigurationError(f"head 'fc' does not pool and takes no {', '.join(given)}.")
        if head != "o2p":
            inputs = width if head == "o2p_fc" else probe[0].numel()
            self.first = fully_connected(inputs, hidden, dropout=dropout, input_dropout=input_dropout)
            width = width + hidden if head == "both" else hidden
        self.classifier = nn.Linear(width, classes)
        # A descriptor of 32,896 entries of size one would otherwise begin with scores of size two.
        nn.init.normal_(self.classifier.weight, std=0.01 if head in ("fc", "o2p_fc") else 0.001)
        nn.init.zeros_(self.classifier.bias)

    def poolings(self) -> dict[str, SecondOrderVector]:
        """The second-order layers, by the name of the map that each pools."""
        found = {} if self.pooling is None else {self.tap: self.pooling}
        return found | {tap: one for tap, one in self.further.items() if isinstance(one, SecondOrderVector)}

    def maps(self, image: Tensor) -> dict[str, Tensor]:
        """The maps (b, c, h, w) that are pooled and, where fully connected layers see it, ``pool5``."""
        wanted = [*self.poolings(), *(["pool5"] if self.head in ("fc", "both") else [])]
        wanted = list(dict.fromkeys(wanted))
        return dict(zip(wanted, self.backbone(image, wanted), strict=True))

    def grid_mask(self, mask: Tensor | None, tap: str, grid: tuple[int, int]) -> Tensor | None:
        """The pixel mask (b, canvas, canvas) carried to the grid of a map; None where pooling does not look at it."""
        if mask is None or self.pooling is None or self.pooling.support == "all":
            return None
        return mask_to_grid(mask.float(), grid, *grid_geometry(self.backbone, tap))

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores of the classes.

        Args:
            image: normalised images (b, 3, canvas, canvas).
            mask: share of each pixel inside the region (b, canvas, canvas); needed for pooling inside the mask.

        Returns:
            (b, classes), before the softmax.
        """
        maps = self.maps(image)
        parts = []
        for tap, pooling in self.poolings().items():
            vector = pooling(maps[tap], self.grid_mask(mask, tap, _grid(maps[tap])))
            parts.append(self.vector_dropout(vector.to(maps[tap].dtype)))
        if self.head in ("fc", "both"):
            assert self.first is not None
            parts.append(self.first(maps["pool5"].flatten(1)))
        joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if self.head == "o2p_fc":
            assert self.first is not None
            joined = self.first(joined)
        return self.classifier(joined)

    @torch.no_grad()
    def calibrate(self, batches: list[tuple[Tensor, Tensor | None]]) -> None:
        """Start what is measured, once, on the first batches (images, masks) of the training data.

        These are the descriptors' means and deviations, and the projections of maps that are reduced.
        """
        waiting = {tap: one for tap, one in self.poolings().items() if not bool(one.calibrated)}
        if not waiting:
            return
        seen = [self.maps(image) for image, _ in batches]
        for tap, pooling in waiting.items():
            maps = [found[tap] for found in seen]
            masks = [self.grid_mask(mask, tap, _grid(m)) for (_, mask), m in zip(batches, maps, strict=True)]
            pooling.calibrate(maps, masks)

    def parameter_groups(self, rate: float, backbone_factor: float, decay: float) -> list[dict[str, Any]]:
        """Optimiser groups: the backbone at ``rate · backbone_factor``, the head at ``rate``, scalars without decay."""
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
