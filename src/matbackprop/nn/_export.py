"""Export of second-order pooling to formats without eigendecompositions, such as ONNX."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError
from matbackprop.nn._operator import Operator
from matbackprop.nn._second_order_pool import SecondOrderPool
from matbackprop.numerics import eye_like

# Iterations of successive square roots. Each step multiplies small eigenvalues by 9/4; near 1 convergence is quadratic.
# The counts suffice for eigenvalues from 1e-10.
_ROOTS = (40, 26, 18, 14, 12, 10, 9, 9)
_TERMS = 20
_POWERS = {"sqrt": 0.5, "inv_sqrt": -0.5, "inverse": -1.0, "log": None}


def for_export(model: nn.Module) -> nn.Module:
    """Copy a model and replace its second-order layers by matrix products, for ``torch.onnx.export``.

    ONNX has no eigendecomposition. The matrix functions of :class:`SecondOrderPool`, :class:`SecondOrderPool2d`,
    :class:`SecondOrderHead` and :func:`replace_pool` are computed in float64 by Newton–Schulz square roots and a series
    for the logarithm. Results agree to rounding if ε is at least 1e-10 times the norm of the pooled matrix.

    Args:
        model: any module. Supported matrix functions are ``"log"``, ``"sqrt"``, ``"inv_sqrt"``, ``"inverse"`` and
            ``"power"``.

    Returns:
        A copy in evaluation mode, for inference only. Trained ε and exponents are constants.

    Raises:
        ConfigurationError: the model contains an unsupported matrix function or another operator of this package.

    Example:
        >>> import torch
        >>> from matbackprop.nn import SecondOrderHead, for_export
        >>> head = SecondOrderHead(8, 3, reduce=4).eval()
        >>> x = torch.rand(2, 8, 5, 5)
        >>> program = torch.export.export(for_export(head), (x,))
        >>> torch.allclose(program.module()(x), head(x), atol=1e-5)
        True

    Reference:
        Higham, Functions of Matrices, 2008, chapters 6 and 11.
    """
    model = copy.deepcopy(model).eval()
    for name, layer in model.named_modules():
        if isinstance(layer, SecondOrderPool):
            layer.call = _Products(layer)  # type: ignore[method-assign]
        elif isinstance(layer, Operator):
            raise ConfigurationError(
                f"Layer {name!r} ({type(layer).__name__}) cannot be exported. Export the layers before it and apply it "
                f"to their output."
            )
    return model


class _Products:
    """g(Fᵀ diag(w) F + εI) with the options of a layer."""

    def __init__(self, layer: SecondOrderPool) -> None:
        self.eps = layer.eps if layer.log_eps is None else float(layer.log_eps.detach().exp())
        self.center = layer.center
        exponent: Any = layer.exponent
        if layer.function != "power" and layer.function not in _POWERS:
            raise ConfigurationError(
                f"The function {layer.function!r} cannot be exported. Use 'power', {', '.join(map(repr, _POWERS))}."
            )
        self.power = float(exponent) if layer.function == "power" else _POWERS[str(layer.function)]

    def __call__(self, f: Tensor, weight: Tensor | None = None, **_: Any) -> Tensor:
        x = f.double()
        if weight is None:
            weight = torch.ones_like(x[..., 0])
        if weight.ndim == x.ndim:  # several regions share one map
            x = x.unsqueeze(-3)
        w = weight.double().unsqueeze(-1)
        if self.center:
            x = x - (w * x).sum(-2, keepdim=True) / w.sum(-2, keepdim=True)
        a = (w * x).mT @ x
        a = a + self.eps * eye_like(a)
        return (_logarithm(a) if self.power is None else _power(a, self.power)).to(f.dtype)


def _roots(y: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Y^½ and Y^−½ of symmetric matrices with eigenvalues in (0, 1], by the coupled Newton–Schulz iteration."""
    identity = eye_like(y)
    z = identity.expand_as(y)
    for _ in range(steps):
        t = 1.5 * identity - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    return y, z


def _scaled(a: Tensor) -> tuple[Tensor, Tensor]:
    scale = a.square().sum((-2, -1), keepdim=True).sqrt()
    return a / scale, scale


def _logarithm(a: Tensor) -> Tensor:
    """log A = log s·I + 2⁸ log (A/s)^(1/2⁸), s the norm of A."""
    b, scale = _scaled(a)
    for steps in _ROOTS:
        b, _ = _roots(b, steps)
    identity = eye_like(a)
    rest = identity - b
    total = rest / _TERMS
    for n in range(_TERMS - 1, 0, -1):  # −log(I − X) = X + X²/2 + …, from the last term on
        total = rest @ (identity / n + total)
    return scale.log() * identity - 2 ** len(_ROOTS) * total


def _power(a: Tensor, power: float) -> Tensor:
    """A square root or its inverse, or exp(p log A) by scaling and squaring."""
    if abs(power) == 0.5:
        b, scale = _scaled(a)
        root, inverse = _roots(b, _ROOTS[0])
        return root * scale.sqrt() if power > 0 else inverse / scale.sqrt()
    identity = eye_like(a)
    x = _logarithm(a) * (power / 2**8)
    total = identity + x / 12
    for n in range(11, 0, -1):
        total = identity + x @ total / n
    for _ in range(8):
        total = total @ total
    return total
