"""DeepNCuts: a network whose feature maps are trained to span the human segmentations, and how it segments.

The paper's models put two Conv-ReLU pairs on one feature map of AlexNet or VGG-16. The extended model sums four maps of
VGG-16 (hypercolumns) with colour and position on a finer grid and may predict boundaries in one more channel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.models.backbones import build_backbone
from matbackprop.vision.models.backbones.base import Backbone, TapInfo, normalize
from matbackprop.vision.models.config import NCutsModelConfig
from matbackprop.vision.models.weights import PretrainedMixin
from matbackprop.vision.segmentation import (
    CLUSTER_KS,
    MERGE_KS,
    Hierarchy,
    KMeansRounding,
    MergeCost,
    NCutSpace,
    Segmentation,
    SoftSpace,
    merge_regions,
    region_graph,
    rgb_to_lab,
    segment_features,
    soft_embedding,
)
from matbackprop.vision.segmentation.segment import resample
from matbackprop.vision.segmentation.superpixels import slic_of


class FeatureMaps(NamedTuple):
    """What the network says about a batch of images, on its grid.

    Attributes:
        features: F (b, h, w, d); cell (i, j) is centred on its stride × stride block of pixels.
        hidden: the hypercolumns (b, c, h, w) that F is a linear function of, or None for other heads.
    """

    features: Tensor
    hidden: Tensor | None


class SuperpixelRows(NamedTuple):
    """What the network says about the superpixels of a batch of images.

    Attributes:
        features: rows of F (b, S, d).
        mass: (b, S) pixels that each row is the mean of; 0 for none.
        edges: (b, E) logits that a human would separate the two sides of an edge, or None.
    """

    features: Tensor
    mass: Tensor
    edges: Tensor | None


class RegionPoints(NamedTuple):
    """What merging compares the superpixels of a batch of images by.

    Attributes:
        points: (b, S, d) of :func:`~matbackprop.vision.segmentation.soft_embedding`, weighted by area.
        colours: (b, S, 3) mean Lab colours.
        strength: (b, E) probabilities that humans separate the two sides of an edge, or None.
    """

    points: Tensor
    colours: Tensor
    strength: Tensor | None


class Merging(NamedTuple):
    """A hierarchy over superpixels and its levels.

    Attributes:
        labels: (n, H, W) int64 label maps of the levels asked for.
        hierarchy: the tree of merges over the superpixels.
        superpixels: (H, W) int32 map.
    """

    labels: NDArray[np.int64]
    hierarchy: Hierarchy
    superpixels: NDArray[np.int32]


class _Geometry:
    """How many cells of a feature map cover an image, and which pixels they need."""

    def __init__(self, info: TapInfo) -> None:
        self.stride, self.reach = info.stride, info.reach
        self.shift = info.offset - (info.stride - 1) / 2
        """Pixels by which the first cell lies behind its block."""

    def cells(self, pixels: int) -> int:
        """Cells along a side of so many pixels."""
        return max(1, round(pixels / self.stride))

    def start(self, before: int) -> tuple[int, float]:
        """Which cell lies over the first block when ``before`` pixels were put in front: its number, and how much
        further on towards the next one. Less than a pixel counts as nothing."""
        place = (before - self.shift) / self.stride
        if abs(place - round(place)) * self.stride < 1:
            return max(0, round(place)), 0.0
        return math.floor(place), place - math.floor(place)

    def after(self, pixels: int, before: int) -> int:
        """Pixels to add behind so that every cell has its input."""
        first, part = self.start(before)
        last = first + self.cells(pixels) - (1 if part == 0 else 0)
        return max(0, self.reach + last * self.stride - pixels - before)

    def over_blocks(self, maps: Tensor, size: tuple[int, int], before: int) -> Tensor:
        """The cells (b, c, h, w) over the blocks of an image of ``size``; between cells, in proportion."""
        first, part = self.start(before)
        for dimension, pixels in zip((-2, -1), size, strict=True):
            cells = maps.narrow(dimension, first, self.cells(pixels))
            if part:
                cells = torch.lerp(cells, maps.narrow(dimension, first + 1, self.cells(pixels)), part)
            maps = cells
        return maps


class _PaperHead(nn.Module):
    """Conv-ReLU, dropout, Conv-ReLU: many filters for capacity, few outputs to bound the rank of W."""

    def __init__(self, width: int, hidden: int, channels: int, dropout: float, kernel: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, hidden, kernel, padding=kernel // 2)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Conv2d(hidden, channels, 1)
        for layer in (self.first, self.second):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def forward(self, maps: list[Tensor], image: Tensor, grid: tuple[int, int]) -> Tensor:
        return self.second(self.drop(torch.relu(self.first(maps[0]))))


class _HypercolumnHead(nn.Module):
    """Several feature maps, each with unit rows, projected and summed with colour and position on one grid.

    F is linear in the hidden map, so that means on superpixels may be taken before the last layer. The edge head looks
    at both sides of an edge and at the border between them.
    """

    def __init__(self, widths: Sequence[int], hidden: int, channels: int, dropout: float, boundary: bool) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Conv2d(width, hidden, 1, bias=False) for width in widths)
        self.place = nn.Conv2d(5, hidden, 1)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(hidden, channels)
        self.edge = None
        if boundary:
            self.edge = nn.Sequential(
                nn.Linear(2 * hidden, hidden // 2), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden // 2, 1)
            )
        # As one layer over all inputs side by side: with an initialisation of their own, the five inputs of colour and
        # position, which are not of unit length together, would drown the feature maps.
        bound = (sum(widths) + 5) ** -0.5
        for layer in [*self.projections, self.place]:
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, maps: list[Tensor], image: Tensor, grid: tuple[int, int]) -> Tensor:
        colour = nnf.interpolate(rgb_to_lab(image.float()), size=grid, mode="area") / 50
        ys = torch.linspace(-1, 1, grid[0], device=image.device).view(1, 1, -1, 1).expand(image.shape[0], 1, *grid)
        xs = torch.linspace(-1, 1, grid[1], device=image.device).view(1, 1, 1, -1).expand(image.shape[0], 1, *grid)
        total = self.place(torch.cat([colour, xs, ys], 1))
        for projection, one in zip(self.projections, maps, strict=True):
            # A projection is linear, so it may come before the resampling, where maps are small.
            total = total + resample(projection(nnf.normalize(one, dim=1, eps=1e-6)), grid)
        return torch.relu(total)


def pool_superpixels(maps: Tensor, superpixels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean of feature maps on superpixels.

    Args:
        maps: (b, c, h, w); brought to the superpixels' size bilinearly.
        superpixels: integer maps (b, H, W), negative outside of the image.
        count: number S of superpixels to return.

    Returns:
        The means (b, S, c), zero for superpixels without a pixel, and the numbers of pixels (b, S).

    Example:
        >>> ids = torch.tensor([[[0, 0, 1, -1]]])
        >>> pool_superpixels(torch.tensor([[[[1.0, 3.0, 5.0, 9.0]]]]), ids, 2)[0].flatten()
        tensor([2., 5.])
    """
    b, c = maps.shape[:2]
    rows = _enlarge(maps, superpixels).flatten(2).movedim(1, -1).reshape(-1, c)
    ids = superpixels.reshape(b, -1).long()
    target = torch.where(ids >= 0, ids, count) + torch.arange(b, device=ids.device).unsqueeze(-1) * (count + 1)
    sums, mass = _sum_rows(rows, target.reshape(-1), b * (count + 1))
    means = (sums / mass.clamp(min=1).unsqueeze(-1)).view(b, count + 1, c)
    return means[:, :count], mass.view(b, count + 1)[:, :count]


def pool_borders(maps: Tensor, superpixels: Tensor, edges: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean of feature maps along the border between two superpixels, over the pixels on both sides.

    Args:
        maps: (b, c, h, w); brought to the superpixels' size bilinearly.
        superpixels: integer maps (b, H, W), negative outside of the image.
        edges: pairs (b, E, 2) of superpixels, i < j; negative ones are padding.
        count: number S of superpixels.

    Returns:
        The means (b, E, c), zero for edges without a border at this size, and the numbers of pixels (b, E).
    """
    b, c = maps.shape[:2]
    number = edges.shape[1]
    device = superpixels.device
    images = torch.arange(b, device=device)
    code = torch.where(edges[..., 0] >= 0, edges[..., 0] * count + edges[..., 1], count * count)
    table = torch.full((b, count * count + 1), -1, device=device, dtype=torch.long)
    table.scatter_(1, code, torch.arange(number, device=device).expand(b, number))
    table[:, -1] = -1
    ids = superpixels.long()
    place = torch.arange(ids[0].numel(), device=device).view(1, *ids.shape[1:]) + (
        images.view(-1, 1, 1) * ids[0].numel()
    )
    cells, targets = [], []
    for dimension in (1, 2):
        n = ids.shape[dimension]
        if n < 2:
            continue
        first, second = ids.narrow(dimension, 0, n - 1), ids.narrow(dimension, 1, n - 1)
        where = ((first != second) & (first >= 0) & (second >= 0)).nonzero(as_tuple=True)
        i, j = first[where], second[where]
        edge = table[where[0], torch.minimum(i, j) * count + torch.maximum(i, j)]
        target = torch.where(edge >= 0, where[0] * number + edge, b * number)
        for part in (place.narrow(dimension, 0, n - 1), place.narrow(dimension, 1, n - 1)):
            cells.append(part[where])
            targets.append(target)
    rows = _enlarge(maps, superpixels).flatten(2).movedim(1, -1).reshape(-1, c)
    if not cells:
        return rows.new_zeros(b, number, c), rows.new_zeros(b, number)
    sums, mass = _sum_rows(rows[torch.cat(cells)], torch.cat(targets), b * number + 1)
    means = sums / mass.clamp(min=1).unsqueeze(-1)
    return means[:-1].view(b, number, c), mass[:-1].view(b, number)


def _enlarge(maps: Tensor, superpixels: Tensor) -> Tensor:
    size = (superpixels.shape[-2], superpixels.shape[-1])
    if maps.shape[-2:] == size:
        return maps
    return nnf.interpolate(maps, size=size, mode="bilinear", align_corners=False)


def _sum_rows(rows: Tensor, target: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sums (size, c) of rows (n, c) by target (n,), and their numbers (size,), in float32 at least."""
    rows = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    sums = rows.new_zeros(size, rows.shape[1]).index_add(0, target, rows)
    return sums, rows.new_zeros(size).index_add(0, target, rows.new_ones(len(target)))


def default_ks(method: str) -> tuple[int, ...]:
    """The numbers of regions (``"merge"``) or of clusters (``"cluster"``) of eight segmentations."""
    return MERGE_KS if method == "merge" else CLUSTER_KS


def merge_superpixels(
    superpixels: ArrayLike,
    points: ArrayLike,
    boundary: ArrayLike | None = None,
    ks: Sequence[int] = MERGE_KS,
    *,
    colours: ArrayLike | None = None,
    cost: MergeCost | None = None,
) -> Merging:
    """Merge the superpixels of one image into a hierarchy and read off its levels (CPU; safe in worker processes).

    Args:
        superpixels: (H, W) numbered from 0 without gaps.
        points: (S, e) spectral coordinates of the superpixels.
        boundary: (E,) strength of each edge of ``region_graph(superpixels)``; None for ones.
        ks: numbers of regions of the levels.
        colours: (S, 3) mean Lab colours of the superpixels; None leaves colour out.
        cost: exponents of the price.
    """
    regions = np.asarray(superpixels, dtype=np.int32)
    tree = merge_regions(points, region_graph(regions), boundary, colours=colours, cost=cost)
    return Merging(tree.levels(ks)[:, regions], tree, regions)


class DeepNCuts(PretrainedMixin, nn.Module):
    """Deep normalized cuts: image → F on a grid, W = FFᵀ or FΛFᵀ, and the segmentations that follow from it.

    Args:
        config: the network.
        network: a :class:`~matbackprop.vision.models.backbones.base.Backbone` of your own instead of the
            configuration's; such a model cannot be saved by name.
        superpixels: about how many superpixels merging starts from.
        changes: fields that differ from ``config``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = DeepNCuts.variant("alexnet-relu5").eval()
        >>> model(torch.rand(1, 3, 64, 96)).features.shape
        torch.Size([1, 4, 6, 20])

    References:
        C. Ionescu, O. Vantzos, C. Sminchisescu, Training deep networks with structured layers by matrix
        backpropagation, 2016, sections 5 and 6.2.
    """

    def __init__(
        self,
        config: NCutsModelConfig | None = None,
        *,
        network: Backbone | None = None,
        superpixels: int = 600,
        **changes: Any,
    ) -> None:
        super().__init__()
        if changes.get("merge_ridge", 0) is None:  # models saved before it had a value of its own
            changes["merge_ridge"] = changes.get("ridge", NCutsModelConfig.ridge)
        self.config = dataclasses.replace(config or NCutsModelConfig(), **changes)
        if not 1 <= superpixels <= 1 << 16:
            raise ConfigurationError(f"superpixels is {superpixels}. It must be from 1 to {1 << 16}.")
        full = self.config.resolved()
        self.backbone = build_backbone(full["backbone"]) if network is None else network
        self.taps = list(full["taps"] or self.backbone.taps[-1:])
        self.hparams_dict: dict[str, Any] = {**full, "taps": self.taps, "superpixels": superpixels}
        self.backbone.cut(self.taps)
        maps = [self.backbone.info(tap) for tap in self.taps]
        widths = [info.channels for info in maps]
        self.geometry = [_Geometry(info) for info in maps]
        self.stride: int = full["stride"] or min(info.stride for info in maps)
        self._enlarged = 1.0 if full["stride"] else self.config.zoom
        self.space, self.ridge, self.merge_ridge = self.config.space, self.config.ridge, self.config.merge_ridge
        self.cost, self.superpixels = MergeCost(*self.config.cost), superpixels
        head, hidden, channels, dropout = full["head"], full["hidden"], full["channels"], self.config.dropout
        self.head: nn.Module | None
        if head == "paper":
            self.head = _PaperHead(widths[0], hidden, channels, dropout, self.config.kernel)
        elif head == "hypercolumn":
            self.head = _HypercolumnHead(widths, hidden, channels, dropout, full["boundary"])
        else:
            self.head, channels = None, widths[0]
        self.channels = channels
        self.factor = nn.Parameter(torch.eye(channels)) if self.config.affinity == "lambda" else None
        self._learning = [p for p in self.backbone.parameters() if p.requires_grad]
        self.freeze_backbone(False)

    @classmethod
    def variant(cls, name: str, **changes: Any) -> DeepNCuts:
        """Build one of :data:`~matbackprop.vision.models.config.VARIANTS` by name, with changed fields."""
        return cls(variant=name, **changes)

    def freeze_backbone(self, frozen: bool = True) -> None:
        """Keep the backbone's weights, or let them learn; frozen, its activations are not kept for a backward pass."""
        self.frozen = frozen
        for parameter in self._learning:
            parameter.requires_grad_(not frozen)

    @property
    def lam(self) -> Tensor | None:
        """Λ = LLᵀ (d, d), or None where W = FFᵀ."""
        return None if self.factor is None else self.factor @ self.factor.mT

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """The grid of F for images of ``size`` pixels."""
        height, width = (max(1, round(side * self._enlarged / self.stride)) for side in size)
        return height, width

    def _head_output(self, image: Tensor) -> Tensor:
        """What the head says, (b, c, h, w): F, or the hidden map of hypercolumns."""
        if image.ndim != 4 or image.shape[1] != 3 or 0 in image.shape:
            raise ShapeError(f"images must be (b, 3, h, w) with at least one pixel, got {tuple(image.shape)}.")
        if image.dtype == torch.uint8:
            image = image.float() / 255
        seen = normalize(image)
        if self.config.zoom != 1:
            seen = nnf.interpolate(seen, scale_factor=self.config.zoom, mode="bilinear", align_corners=False)
        height, width = seen.shape[-2:]
        # Pixels in front, so that cells lie over their blocks, and behind, so that no block is without a cell.
        before = max(0, *(int(np.ceil(g.shift)) for g in self.geometry))
        below = max(g.after(height, before) for g in self.geometry)
        right = max(g.after(width, before) for g in self.geometry)
        if before or below or right:
            seen = nnf.pad(seen, (before, right, before, below), mode="replicate")
        if seen.is_cuda:
            seen = seen.contiguous(memory_format=self.backbone.memory_format)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            maps = self.backbone(seen, self.taps)
        places = zip(self.geometry, self.taps, strict=True)
        cropped = [g.over_blocks(maps[tap], (height, width), before) for g, tap in places]
        if self.head is None:
            return cropped[0]
        return self.head(cropped, image, self.grid((image.shape[-2], image.shape[-1])))

    def forward(self, image: Tensor) -> FeatureMaps:
        """Compute F on its grid.

        Args:
            image: RGB (b, 3, h, w), uint8 or floating point in [0, 1]; any size from one pixel on.

        Returns:
            :class:`FeatureMaps`. F is non-negative with the heads ``"paper"`` and ``"none"``, as W needs it.
        """
        out = self._head_output(image)
        if isinstance(self.head, _HypercolumnHead):
            return FeatureMaps(self.head.out(self.head.drop(out.movedim(1, -1))), out)
        return FeatureMaps(torch.relu(out).movedim(1, -1), None)

    def on_superpixels(
        self, image: Tensor, superpixels: Tensor, count: int, edges: Tensor | None = None
    ) -> SuperpixelRows:
        """Compute the rows of F as means on superpixels, and the strength of the edges between them.

        Args:
            image: RGB (b, 3, h, w), uint8 or floating point in [0, 1].
            superpixels: integer maps (b, H, W) of any size over the same view, negative outside of an image.
            count: number S of rows to return.
            edges: pairs (b, E, 2) of neighbouring superpixels, negative for padding; None for no edges.

        Returns:
            :class:`SuperpixelRows`.
        """
        out = self._head_output(image)
        if not isinstance(self.head, _HypercolumnHead):
            return SuperpixelRows(*pool_superpixels(torch.relu(out), superpixels, count), None)
        means, mass = pool_superpixels(out, superpixels, count)
        dropped = self.head.drop(means)
        features = self.head.out(dropped)
        if edges is None or self.head.edge is None:
            return SuperpixelRows(features, mass, None)
        border, length = pool_borders(out, superpixels, edges, count)
        width = means.shape[-1]
        sides = [dropped.gather(1, edges[..., k : k + 1].clamp(min=0).expand(-1, -1, width)) for k in (0, 1)]
        middle = torch.where(length.unsqueeze(-1) > 0, border, 0.5 * (sides[0] + sides[1]))
        logits = self.head.edge(torch.cat([self.head.drop(middle), (sides[0] - sides[1]).abs()], -1))
        return SuperpixelRows(features, mass, logits.squeeze(-1))

    @torch.no_grad()
    def cluster(
        self,
        image: Tensor,
        ks: Sequence[int] = CLUSTER_KS,
        *,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        space: str | None = None,
    ) -> Segmentation:
        """Segment images (b, 3, h, w) by clustering and splitting components, as the paper does.

        Args:
            image: a batch of images of one size.
            ks: numbers of clusters.
            seed: of K-means.
            size: of the label maps; None for the images' own.
            space: where to cluster, ``"ncut"`` or ``"soft"``; None for the model's own.

        Returns:
            :class:`~matbackprop.vision.segmentation.Segmentation` with labels (b, n, H, W).
        """
        size = (image.shape[-2], image.shape[-1]) if size is None else size
        features = self(image).features.float()
        where = NCutSpace(self.lam) if (space or self.space) == "ncut" else SoftSpace(self.ridge)
        return segment_features(features, ks, size=size, space=where, rounding=KMeansRounding(seed=seed))

    @torch.no_grad()
    def region_points(self, image: Tensor, superpixels: Tensor, edges: Tensor | None = None) -> RegionPoints:
        """Spectral coordinates and colours of superpixels and the strength of the edges between them, for merging.

        Args:
            image: (b, 3, h, w), uint8 or floating point in [0, 1].
            superpixels: (b, h, w) integer maps, negative outside of an image.
            edges: (b, E, 2) neighbouring superpixels, negative for padding.

        Returns:
            :class:`RegionPoints`; S is the largest number of superpixels in the batch.
        """
        count = int(superpixels.max()) + 1
        # Every other pixel is enough: no map is finer than stride 2.
        halved = superpixels[:, ::2, ::2] if min(superpixels.shape[-2:]) > 32 else superpixels
        rows = self.on_superpixels(image, halved, count, edges)
        share = rows.mass / rows.mass.sum(-1, keepdim=True).clamp(min=1)
        points = soft_embedding(rows.features.float(), ridge=self.merge_ridge, weights=share).points
        scaled = image.float() / 255 if image.dtype == torch.uint8 else image.float()
        colours, _ = pool_superpixels(rgb_to_lab(scaled), halved, count)
        return RegionPoints(points, colours, None if rows.edges is None else torch.sigmoid(rows.edges.float()))

    def merge(self, image: Tensor, ks: Sequence[int] = MERGE_KS, *, superpixels: ArrayLike | None = None) -> Merging:
        """Segment one image (3, h, w) by merging superpixels into a hierarchy.

        Args:
            image: uint8, or floating point in [0, 1].
            ks: numbers of regions of the levels.
            superpixels: (h, w) map numbered from 0; None for SLIC on the image.
        """
        if superpixels is None:
            superpixels = slic_of(image, self.superpixels)
        regions = np.asarray(superpixels, dtype=np.int32)
        ids = torch.from_numpy(regions).to(image.device)
        edges = torch.from_numpy(region_graph(regions).edges).to(image.device)
        seen = self.region_points(image.unsqueeze(0), ids.unsqueeze(0), edges.unsqueeze(0))
        points, colours = seen.points[0].cpu().numpy(), seen.colours[0].cpu().numpy()
        boundary = None if seen.strength is None else seen.strength[0].cpu().numpy()
        return merge_superpixels(regions, points, boundary, ks, colours=colours, cost=self.cost)
