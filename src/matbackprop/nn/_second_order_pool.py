"""Second-order pooling of rows and of feature maps."""

from __future__ import annotations

import inspect
import math
from typing import Any, get_args

import torch
from torch import Tensor, nn

from matbackprop.checks import check_option
from matbackprop.divided_differences import FunctionLike, resolve_function
from matbackprop.errors import ConfigurationError, DomainError, ShapeError
from matbackprop.functional._second_order_pool import Method, second_order_pool
from matbackprop.functional._triangle import vectorize_symmetric
from matbackprop.nn._operator import Operator


class SecondOrderPool(Operator, of=second_order_pool, data=["f", "weight", "params"], checks=[resolve_function]):
    """Pool a feature map into a function of its second moments; see :func:`~matbackprop.second_order_pool`.

    Args:
        eps: ε > 0, or its initial value if trained. The parameter is log ε, which keeps ε positive.
        exponent: exponent of ``"power"``, or its initial value if trained.
        learn_eps, learn_exponent: whether ε and the exponent are parameters.
        vectorize: return vectors ``(*batch, d(d+1)/2)``, as in :func:`~matbackprop.vectorize_symmetric`.
        function, center, method, check, precision: as in the function.

    Shape:
        ``(m, d)`` or ``(b, m, d)`` to ``(d, d)`` or ``(b, d, d)``. With a weight ``(b, r, m)``, to ``(b, r, d, d)``.
        For feature maps ``(b, d, height, width)``, pass ``f.flatten(2).mT`` or use :class:`SecondOrderPool2d`.

    Raises:
        ShapeError: more than one batch dimension. For other errors see :func:`~matbackprop.second_order_pool`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import SecondOrderPool
        >>> pool = SecondOrderPool(learn_eps=True, vectorize=True)
        >>> out = pool(torch.rand(2, 36, 8, generator=torch.Generator().manual_seed(0)))
        >>> out.shape
        torch.Size([2, 36])
        >>> out.sum().backward()
        >>> bool(pool.log_eps.grad.isfinite())
        True
    """

    eps: float

    def __init__(
        self,
        *,
        eps: float = 1e-3,
        function: FunctionLike = "log",
        exponent: float | None = None,
        learn_eps: bool = False,
        learn_exponent: bool = False,
        center: bool = False,
        method: Method = "fused",
        vectorize: bool = False,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        check_option(method, get_args(Method), "method")
        if learn_exponent and (function != "power" or exponent is None):
            raise ConfigurationError('learn_exponent=True requires function="power" and an initial value exponent=.')
        if learn_eps and not eps > 0:
            raise DomainError(f"The initial value of a trained eps must be positive, got {eps}.")
        super().__init__(
            eps=eps,
            function=function,
            exponent=nn.Parameter(torch.tensor(float(exponent or 0))) if learn_exponent else exponent,
            center=center,
            method=method,
            check=check,
            precision=precision,
        )
        self.learn_eps, self.learn_exponent, self.vectorize = learn_eps, learn_exponent, vectorize
        self.log_eps = nn.Parameter(torch.tensor(math.log(eps))) if learn_eps else None

    def forward(self, f: Tensor, weight: Tensor | None = None) -> Tensor:
        if f.ndim > 3:  # for a feature map, image rows would be pooled
            raise ShapeError(
                f"SecondOrderPool takes rows (m, d) or (b, m, d), one per location, got shape {tuple(f.shape)}. For a "
                f"feature map (b, channels, height, width) pass f.flatten(2).mT; for more batch dimensions call "
                f"matbackprop.second_order_pool."
            )
        more = {} if self.log_eps is None else {"eps": self.log_eps.exp()}
        pooled = self.call(f, weight=weight, **more)
        return vectorize_symmetric(pooled) if self.vectorize else pooled


class SecondOrderPool2d(SecondOrderPool):
    """Second-order pooling of feature maps; see :class:`SecondOrderPool`.

    Args:
        average: divide by the number of locations, or by the sum of the mask. The result is then independent of the
            image size.
        **options: those of :class:`SecondOrderPool`.

    Shape:
        ``(b, c, height, width)``, optionally with a mask ``(b, height, width)``, to ``(b, c, c)``, or ``(b, c(c+1)/2)``
        with ``vectorize=True``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import SecondOrderPool2d
        >>> SecondOrderPool2d(vectorize=True)(torch.ones(2, 4, 7, 7)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, average: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.average = average

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim != 4 or (mask is not None and mask.shape != (x.shape[0], *x.shape[2:])):
            raise ShapeError(
                f"SecondOrderPool2d takes (b, c, height, width) and a mask (b, height, width), got {tuple(x.shape)}"
                f"{'' if mask is None else f' and {tuple(mask.shape)}'}. For rows (b, m, d) use SecondOrderPool."
            )
        rows, weight = x.flatten(2).mT, None
        if mask is not None:
            weight = mask.flatten(1).to(x.dtype)
            if self.average:
                total = weight.sum(-1, keepdim=True)
                weight = weight / torch.where(total == 0, 1, total)
        elif self.average:
            rows = rows * max(rows.shape[1], 1) ** -0.5
        return super().forward(rows, weight)


SecondOrderPool2d.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("average", inspect.Parameter.KEYWORD_ONLY, default=True),
        *inspect.signature(SecondOrderPool).parameters.values(),
    ]
)
