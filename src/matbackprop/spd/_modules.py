"""Layers of SPD networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.functional._matrix_function import matrix_exp
from matbackprop.functional._polar import polar
from matbackprop.nn._operator import Operator
from matbackprop.numerics import symmetrize
from matbackprop.spd._geometry import distance, geodesic
from matbackprop.spd._layers import batch_norm, bimap, check_eps, check_threshold, log_eig, re_eig
from matbackprop.spd._mean import mean


class BiMap(nn.Module):
    """Bilinear map with trainable orthonormal columns; see :func:`~matbackprop.spd.bimap`.

    W is the orthonormal polar factor of the parameter ``raw``. It stays on the Stiefel manifold with any optimizer.

    Args:
        n: order of the inputs.
        k: order of the outputs, at most n.
        generator: random generator of the initialization.

    Shape:
        ``(*batch, n, n)`` to ``(*batch, k, k)``.

    Example:
        >>> import torch
        >>> from matbackprop.spd import BiMap
        >>> BiMap(5, 3)(torch.eye(5)).diagonal().round(decimals=4)
        tensor([1., 1., 1.], grad_fn=<RoundBackward1>)
    """

    def __init__(self, n: int, k: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not 1 <= k <= n:
            raise ConfigurationError(f"k must be in 1 … {n}, got {k}. A larger output would be singular.")
        self.n, self.k = n, k
        self.raw = nn.Parameter(polar(torch.randn(n, k, generator=generator)).Q)

    @property
    def weight(self) -> Tensor:
        """W ``(n, k)`` with orthonormal columns."""
        return polar(self.raw).Q

    def forward(self, x: Tensor) -> Tensor:
        return bimap(x, self.weight.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.n}, {self.k}"


class ReEig(Operator, of=re_eig, data=["x"], checks=[check_threshold]):
    """Rectified eigenvalues; see :func:`~matbackprop.spd.re_eig`.

    Example:
        >>> import torch
        >>> from matbackprop.spd import ReEig
        >>> ReEig(0.5)(torch.diag(torch.tensor([0.0, 2.0]))).diagonal()
        tensor([0.5000, 2.0000])
    """


class LogEig(Operator, of=log_eig, data=["x"]):
    """Vectorized logarithm; see :func:`~matbackprop.spd.log_eig`.

    Example:
        >>> import torch
        >>> from matbackprop.spd import LogEig
        >>> LogEig()(torch.eye(2))
        tensor([0., 0., 0.])
    """


class BatchNorm(Operator, of=batch_norm, data=["x", "mean", "variance", "bias", "scale"], checks=[check_eps]):
    """Batch normalization of positive definite matrices; see :func:`~matbackprop.spd.batch_norm`.

    In training mode it uses and differentiates the affine-invariant mean and variance of the batch, and updates the
    running statistics, the mean along a geodesic. In evaluation mode it uses the running statistics.

    Args:
        n: order of the matrices.
        momentum: weight of the newest batch in the running statistics.
        dispersion: whether to normalize the variance too.
        affine: whether to train the mean of the result, as the exponential of a symmetric matrix, and its scale.
        eps: ε > 0, added to the variance.
        check, precision: as in the function.

    Shape:
        ``(*batch, n, n)`` to the same shape. All batch dimensions count as samples.

    Example:
        >>> import torch
        >>> from matbackprop.spd import BatchNorm
        >>> x = torch.randn(8, 3, 10, generator=torch.Generator().manual_seed(0))
        >>> BatchNorm(3)(x @ x.mT).shape
        torch.Size([8, 3, 3])
    """

    def __init__(
        self,
        n: int,
        *,
        momentum: float = 0.1,
        dispersion: bool = True,
        affine: bool = True,
        eps: float = 1e-5,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        super().__init__(eps=eps, check=check, precision=precision)
        if not 0 <= momentum <= 1:
            raise ConfigurationError(f"momentum must be in [0, 1], got {momentum}.")
        self.n, self.momentum, self.dispersion, self.affine = n, momentum, dispersion, affine
        self.log_bias = nn.Parameter(torch.zeros(n, n)) if affine else None
        self.scale = nn.Parameter(torch.ones(())) if affine and dispersion else None
        self.running_mean: Tensor
        self.running_variance: Tensor
        self.register_buffer("running_mean", torch.eye(n))
        self.register_buffer("running_variance", torch.ones(()))

    @torch.no_grad()
    def _update(self, middle: Tensor, spread: Tensor) -> None:
        moved = geodesic(self.running_mean.to(middle.dtype), middle, self.momentum, check=False)
        self.running_mean.copy_(moved)
        self.running_variance.lerp_(spread.to(self.running_variance.dtype), self.momentum)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 3 or x.shape[-2:] != (self.n, self.n):
            raise ShapeError(f"x must be (*batch, {self.n}, {self.n}), got shape {tuple(x.shape)}.")
        if self.training:
            samples = x.reshape(-1, self.n, self.n)
            middle = mean(samples, check=self.check, precision=self.precision)
            spread = distance(middle, samples, squared=True, check=False, precision=self.precision).mean()
            self._update(middle.detach(), spread.detach())
        else:
            middle, spread = self.running_mean.to(x.dtype), self.running_variance.to(x.dtype)
        bias = None
        if self.log_bias is not None:
            bias = matrix_exp(symmetrize(self.log_bias), precision=self.precision).to(x.dtype)
        scale = 1.0 if self.scale is None else self.scale
        return self.call(x, middle, variance=spread if self.dispersion else None, bias=bias, scale=scale)
