"""Second-order pooling for networks as they are: of maps and tokens, as a head, and beside a model's own average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.functional._matrix_function import FunctionLike
from matbackprop.nn._second_order_pool import SecondOrderPool

__all__ = ["SecondOrderHead", "SecondOrderPool2d", "replace_pool"]


class SecondOrderPool2d(SecondOrderPool):
    """:class:`SecondOrderPool` of the map of a convolution.

    Args:
        average: divide by the number of locations (or by the sum of the mask), so that the size of an image does not
            matter.
        **options: those of :class:`SecondOrderPool`.

    Shape:
        ``(b, c, height, width)``, and a mask ``(b, height, width)`` if need be, to ``(b, c, c)``, or ``(b, c(c+1)/2)``
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
        """Return C, or its upper triangle."""
        if x.ndim != 4 or (mask is not None and mask.shape != (x.shape[0], *x.shape[2:])):
            raise ShapeError(
                f"SecondOrderPool2d takes (b, c, height, width) and a mask (b, height, width), got {tuple(x.shape)}"
                f"{'' if mask is None else f' and {tuple(mask.shape)}'}; rows (b, m, d) are for SecondOrderPool."
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


class SecondOrderHead(nn.Module):
    """Reduction, covariance, matrix function, triangle, normalisation and a linear layer: a classifier by second order.

    Args:
        channels: c of the maps or tokens.
        outputs: numbers to give, such as classes.
        reduce: channels d that c is projected to first; the descriptor has d(d + 1)/2 numbers.
        function: g of the covariance, as in :func:`~matbackprop.matrix_function`; the square root by default.
        exponent: of ``"power"``.
        eps: ε of the covariance.
        channel_dropout: share of the d channels that is dropped before pooling in training, as in DropCov.

    Shape:
        Maps ``(b, c, height, width)`` or tokens ``(b, n, c)`` to ``(b, outputs)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import SecondOrderHead
        >>> _ = torch.manual_seed(0)
        >>> head = SecondOrderHead(96, 10, reduce=32)
        >>> head(torch.randn(2, 96, 7, 7)).shape, head(torch.randn(2, 49, 96)).shape
        (torch.Size([2, 10]), torch.Size([2, 10]))

    References:
        Li, Xie, Wang, Gao, Towards faster training of global covariance pooling networks, CVPR 2018; Wang et al.,
        DropCov, NeurIPS 2022.
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        *,
        reduce: int = 64,
        function: FunctionLike = "sqrt",
        exponent: float | None = None,
        eps: float = 1e-3,
        channel_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(channels, outputs, reduce) < 1:
            raise ConfigurationError(f"channels, outputs and reduce are positive, got {channels}, {outputs}, {reduce}.")
        self.reduction = nn.Linear(channels, reduce, bias=False)
        self.dropout = nn.Dropout1d(channel_dropout)
        self.pool = SecondOrderPool(eps=eps, function=function, exponent=exponent, center=True, vectorize=True)
        self.normalize = nn.LayerNorm(reduce * (reduce + 1) // 2)
        self.classifier = nn.Linear(reduce * (reduce + 1) // 2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs ``(b, outputs)``."""
        if x.ndim not in (3, 4):
            raise ShapeError(f"SecondOrderHead takes maps (b, c, h, w) or tokens (b, n, c), got {tuple(x.shape)}.")
        rows = self.reduction(x.flatten(2).mT if x.ndim == 4 else x)
        rows = self.dropout(rows.mT).mT * max(rows.shape[1], 1) ** -0.5
        return self.classifier(self.normalize(self.pool(rows)))


class _Beside(nn.Module):
    """A model's own layer, with what second order says of its input added to its output, or put in its place."""

    def __init__(self, own: nn.Module, head: SecondOrderHead, first_order: bool, prefix: int) -> None:
        super().__init__()
        self.own, self.head, self.first_order, self.prefix = own, head, first_order, prefix

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(x)
        if y.ndim == 3:  # tokens: added to each, it is added to the class token and to their mean alike
            second = self.head(y[:, self.prefix :]).unsqueeze(1)
        else:
            second = self.head(x).view(y.shape)
        return y + second if self.first_order else second.expand_as(y)


def replace_pool(
    model: nn.Module, example: Tensor, *, first_order: bool = True, prefix: int | None = None, **options: Any
) -> nn.Module:
    """Put second-order pooling where a classifier averages its last map or reads its tokens.

    The average of a convolutional network (the last ``AdaptiveAvgPool2d``, or a layer of timm's or one's own that
    brings a map to one cell), or the last tokens of a transformer, keep their place; beside them stands a
    :class:`SecondOrderHead` with as many outputs as there are channels, whose result is added. Its last layer starts at
    zero, so that the model is at first what it was. The classifier behind it stays.

    Args:
        model: from torchvision, timm, transformers, or your own; it is changed in place.
        example: an input, to see in what order its layers are called.
        first_order: keep the average (or tokens) beside the second order; otherwise put second order in its place.
        prefix: tokens at the front, such as the class token, that are not pooled; None for one where the model has a
            parameter ``cls_token`` and none elsewhere.
        **options: of :class:`SecondOrderHead`: ``reduce``, ``function``, ``exponent``, ``eps``, ``channel_dropout``.

    Returns:
        The model. ``[p for n, p in model.named_parameters() if ".head." in n]`` are the new parameters.

    Raises:
        ConfigurationError: the model neither averages a map nor has tokens.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from matbackprop.nn import replace_pool
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
        >>> x = torch.randn(2, 3, 32, 32)
        >>> before = model(x)
        >>> torch.equal(replace_pool(model, x, reduce=8)(x), before)
        True
    """
    place, channels = _find_place(model, example)
    head = SecondOrderHead(channels, channels, **options).to(example.device)
    if first_order:
        nn.init.zeros_(head.classifier.weight)
        nn.init.zeros_(head.classifier.bias)
    if prefix is None:
        prefix = int(any("cls_token" in name for name, _ in model.named_parameters()))
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, _Beside(model.get_submodule(place), head, first_order, prefix))
    return model


def _find_place(model: nn.Module, example: Tensor) -> tuple[str, int]:
    """Name and channels of the last layer that brings a map to one cell, or else of the last that gives tokens."""
    maps: list[tuple[str, int]] = []
    tokens: list[tuple[str, int]] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            x = inputs[0] if inputs else None
            if not (isinstance(x, Tensor) and isinstance(output, Tensor)):
                return
            one_cell = output.shape[:2] == x.shape[:2] and output.numel() == output.shape[0] * output.shape[1]
            if x.ndim == 4 and x.numel() > output.numel() and one_cell:
                maps.append((name, x.shape[1]))
            if output.ndim == 3 and not any(True for _ in module.children()):
                tokens.append((name, output.shape[-1]))

        return look

    hooks = [m.register_forward_hook(watch(name)) for name, m in model.named_modules() if name]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(example)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    for places in (maps, tokens):
        if places:
            return places[-1]
    raise ConfigurationError(
        "the model has no layer that averages a map to one cell, nor one that gives tokens (b, n, c); end it with "
        "matbackprop.nn.SecondOrderHead instead."
    )
