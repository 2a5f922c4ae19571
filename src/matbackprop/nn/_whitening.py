"""Whitening with running statistics: batch normalization that also decorrelates channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matbackprop.checks import check_floating
from matbackprop.errors import ConfigurationError, DtypeError, ShapeError
from matbackprop.functional._ties import Ties, check_ties
from matbackprop.functional._whiten import Method, check_method, covariance_of, normalized_weights, whiten
from matbackprop.nn._operator import Operator
from matbackprop.numerics import compute_dtype


class Whitening(Operator, of=whiten, data=["x", "weight", "mean", "covariance"], checks=[check_method]):
    """Decorrelated batch normalization; see :func:`~matbackprop.whiten`.

    A replacement for ``torch.nn.BatchNorm1d`` … ``BatchNorm3d`` that normalizes groups of channels jointly. In training
    mode it uses and differentiates the statistics of the batch, and updates the running mean and unbiased covariance.
    In evaluation mode it uses the running statistics.

    Args:
        num_features: number of channels C.
        groups: number of groups of consecutive channels that are whitened jointly. C groups are batch normalization.
        momentum: weight of the newest batch in the running statistics; None for the mean over all batches.
        affine: whether to train a factor and an offset per channel.
        track_running_stats: whether to keep running statistics. If False, evaluation mode also uses batch statistics.
        method, eps, ties, check, precision: as in the function.
        dtype: dtype of the parameters and statistics; must be complex for complex input.

    Shape:
        ``(N, C, *)`` to the same shape.

    Example:
        >>> import torch
        >>> from matbackprop.nn import Whitening
        >>> layer = Whitening(16, groups=4)
        >>> x = torch.randn(8, 16, 5, 5, generator=torch.Generator().manual_seed(0))
        >>> layer(x).shape, layer.eval()(x).shape
        (torch.Size([8, 16, 5, 5]), torch.Size([8, 16, 5, 5]))

    Reference:
        Huang, Yang, Lang, Deng, Decorrelated batch normalization, CVPR 2018.
    """

    def __init__(
        self,
        num_features: int,
        *,
        groups: int = 1,
        method: Method = "zca",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        ties: Ties = "raise",
        check: bool | None = None,
        precision: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(method=method, eps=eps, ties=ties, check=check, precision=precision)
        check_ties(ties, None, 1.0)
        if num_features < 1 or groups < 1 or num_features % groups:
            raise ConfigurationError(f"groups must divide the {num_features} channels into equal parts, got {groups}.")
        if momentum is not None and not 0 <= momentum <= 1:
            raise ConfigurationError(f"momentum must be in [0, 1] or be None, got {momentum}.")
        self.num_features, self.groups, self.momentum = num_features, groups, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        ones = torch.ones(num_features, dtype=dtype)
        check_floating(ones, "a tensor of this dtype", or_complex=True)
        self.complex = ones.is_complex()
        self.weight = nn.Parameter(ones.clone()) if affine else None
        self.bias = nn.Parameter(0 * ones) if affine else None
        self.running_mean: Tensor
        self.running_covariance: Tensor
        self.num_batches_tracked: Tensor
        size = num_features // groups
        kept = track_running_stats
        self.register_buffer("running_mean", torch.zeros(groups, size, dtype=dtype) if kept else None)
        self.register_buffer("running_covariance", torch.eye(size, dtype=dtype).repeat(groups, 1, 1) if kept else None)
        self.register_buffer("num_batches_tracked", torch.tensor(0) if kept else None)

    @torch.no_grad()
    def _update(self, rows: Tensor) -> None:
        """Update the running statistics with rows ``(groups, m, C/groups)``."""
        m = rows.shape[-2]
        x = rows.to(compute_dtype(self.precision, rows.dtype))
        mean = x.mean(-2)
        covariance = covariance_of(x, normalized_weights(x, None), mean) * (m / (m - 1))
        self.num_batches_tracked += 1
        fraction = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.to(torch.float64)
        for running, new in ((self.running_mean, mean), (self.running_covariance, covariance)):
            running += fraction * (new.to(running.dtype) - running)

    def forward(self, x: Tensor) -> Tensor:
        check_floating(x, "x", or_complex=True)
        if x.is_complex() != self.complex:
            raise DtypeError(
                f"x is {x.dtype}, but the layer is for {'complex' if self.complex else 'real'} input. Construct with "
                f"dtype={'torch.complex64' if x.is_complex() else 'torch.float32'}."
            )
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise ShapeError(f"x must be (N, {self.num_features}, *), got shape {tuple(x.shape)}.")
        channels = x.movedim(1, -1)
        rows = channels.reshape(-1, self.groups, self.num_features // self.groups).movedim(1, 0)
        batch = self.training or not self.track_running_stats
        if batch and rows.shape[-2] < 2:
            raise ShapeError(
                f"Batch statistics need more than one value per channel, got shape {tuple(x.shape)}. Use a larger "
                f"batch, or call eval() to use running statistics."
            )
        known = {} if batch else {"mean": self.running_mean, "covariance": self.running_covariance}
        y = self.call(rows, **known)
        if self.training and self.track_running_stats:
            self._update(rows)
        y = y.movedim(0, 1).reshape(channels.shape)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.to(y.dtype) + self.bias.to(y.dtype)
        return y.movedim(-1, 1)
