"""Second-order classification head."""

from __future__ import annotations

from torch import Tensor, nn

from matbackprop.divided_differences import FunctionLike
from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.nn._second_order_pool import SecondOrderPool


class SecondOrderHead(nn.Module):
    """Second-order classifier of feature maps or tokens.

    It consists of a projection, the covariance, a matrix function, vectorization, layer normalization and a linear
    layer.

    Args:
        channels: number of input channels c.
        outputs: number of outputs, such as classes.
        reduce: number of channels d after the projection; None for no projection. The descriptor has d(d + 1)/2
            entries.
        function: matrix function of the covariance, as in :func:`~matbackprop.matrix_function`.
        exponent: exponent of ``"power"``.
        eps: ε, added to the eigenvalues of the covariance.
        channel_dropout: probability of dropping each of the d channels before pooling in training, as in DropCov.

    Shape:
        Maps ``(b, c, height, width)`` or tokens ``(b, n, c)`` to ``(b, outputs)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import SecondOrderHead
        >>> head = SecondOrderHead(96, 10, reduce=32)
        >>> head(torch.randn(2, 96, 7, 7)).shape, head(torch.randn(2, 49, 96)).shape
        (torch.Size([2, 10]), torch.Size([2, 10]))

    Reference:
        Li, Xie, Wang, Gao, Towards faster training of global covariance pooling networks, CVPR 2018; Wang et al.,
        DropCov, NeurIPS 2022.
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        *,
        reduce: int | None = 64,
        function: FunctionLike = "sqrt",
        exponent: float | None = None,
        eps: float = 1e-3,
        channel_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        d = channels if reduce is None else reduce
        if min(channels, outputs, d) < 1:
            raise ConfigurationError(f"channels, outputs and reduce must be positive, got {channels}, {outputs}, {d}.")
        self.channels = channels
        self.reduction = nn.Identity() if reduce is None else nn.Linear(channels, d, bias=False)
        self.dropout = nn.Dropout1d(channel_dropout)
        self.pool = SecondOrderPool(eps=eps, function=function, exponent=exponent, center=True, vectorize=True)
        self.normalize = nn.LayerNorm(d * (d + 1) // 2)
        self.classifier = nn.Linear(d * (d + 1) // 2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (3, 4) or x.shape[1 if x.ndim == 4 else 2] != self.channels:
            c = self.channels
            raise ShapeError(f"SecondOrderHead takes maps (b, {c}, h, w) or tokens (b, n, {c}), got {tuple(x.shape)}.")
        rows = self.reduction(x.flatten(2).mT if x.ndim == 4 else x)
        rows = self.dropout(rows.mT).mT * max(rows.shape[1], 1) ** -0.5
        return self.classifier(self.normalize(self.pool(rows)))
