"""From a photograph to what the page shows: the segmenter of ``matbackprop segment``, and the space it works in."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.vision.inference import segment_photograph
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.segmentation import Embedding, ncut_embedding, rgb_to_lab, soft_embedding
from matbackprop.vision.serve.views import Analysis, Pixels

_COORDINATES = 8


def colour_features(photograph: Pixels, *, stride: int = 8, anchors: int = 8, scale: float = 0.25) -> Tensor:
    """Non-negative features of colour and place, for looking at a photograph without a network.

    Each cell is compared with ``anchors`` × ``anchors`` cells spread over the image, f = exp(−‖p − a‖²/(2·scale²)),
    where p holds the mean Lab colour, its largest entry scaled to 2, and the place, the shorter side scaled to 1.

    Args:
        photograph: (h, w, 3) bytes.
        stride: pixels of a cell.
        anchors: rows and columns of the cells compared with.
        scale: how far a similarity reaches.

    Returns:
        (h/stride, w/stride, anchors²) in [0, 1].

    Example:
        >>> import numpy as np
        >>> colour_features(np.zeros((64, 96, 3), np.uint8)).shape
        torch.Size([8, 12, 64])
    """
    image = torch.from_numpy(photograph.copy()).movedim(-1, 0).float() / 255
    grid = (max(1, round(image.shape[-2] / stride)), max(1, round(image.shape[-1] / stride)))
    lab = nnf.adaptive_avg_pool2d(rgb_to_lab(image.unsqueeze(0)), grid)[0].movedim(0, -1)
    lab = lab / lab.abs().amax().clamp_min(1e-6) * 2
    axes = [torch.arange(n) / min(grid) for n in grid]
    points = torch.cat([lab, torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)], -1)
    rows, columns = ((torch.arange(anchors) + 0.5) / anchors * n for n in grid)
    chosen = points[rows.long()][:, columns.long()].flatten(0, 1)
    squared = torch.cdist(points.flatten(0, 1), chosen).square()
    return torch.exp(-squared / (2 * scale**2)).view(*grid, -1)


class Segmenter:
    """What ``matbackprop segment`` does, as the page needs it.

    Args:
        model: a trained network; None merges superpixels by colour.
        seed: of K-means.

    Example:
        >>> import numpy as np
        >>> picture = np.zeros((64, 96, 3), np.uint8); picture[:, 48:] = 200
        >>> analysis = Segmenter()(picture, "merge")
        >>> [analysis.level(k).shown.count() for k in (2, 3)]
        [2, 3]
    """

    def __init__(self, model: DeepNCuts | None = None, *, seed: int = 0) -> None:
        self.model = model
        self.seed = seed

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods there are, the default first: clustering needs a network."""
        return ("merge",) if self.model is None else ("merge", "cluster")

    @property
    def about(self) -> str:
        """A line for the page."""
        if self.model is None:
            return "Without a network: superpixels are merged by colour and contrast alone."
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        return f"A trained DeepNCuts model with {size:.1f} million parameters."

    def __call__(self, photograph: Pixels, method: str, name: str = "picture.png") -> Analysis:
        """Segment a photograph (h, w, 3) and look at the space that its cells lie in; show the suggested number."""
        segments = replace(segment_photograph(photograph, self.model, method=method, seed=self.seed), name=name)
        embedding, grid = self._embed(photograph)
        points = embedding.points[:, :_COORDINATES].T.reshape(-1, *grid)
        eigenvalues = embedding.eigenvalues.double().cpu().numpy()
        return Analysis(segments, points.double().cpu().numpy(), eigenvalues).level(segments.k)

    @torch.no_grad()
    def _embed(self, photograph: Pixels) -> tuple[Embedding, tuple[int, int]]:
        if self.model is None:
            f = colour_features(photograph)
        else:
            device = next(self.model.parameters()).device
            image = torch.from_numpy(photograph.copy()).movedim(-1, 0).to(device)
            f = self.model(image.unsqueeze(0)).features[0].float()
        rows, grid = f.flatten(0, 1), (f.shape[0], f.shape[1])
        if self.model is not None and self.model.space == "soft":
            return soft_embedding(rows, ridge=self.model.ridge), grid
        lam = None if self.model is None else self.model.lam
        return ncut_embedding(rows, min(rows.shape[-1], 24), lam=lam), grid
