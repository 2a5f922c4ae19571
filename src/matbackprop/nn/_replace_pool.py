"""Insert second-order pooling into a pretrained classifier."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError
from matbackprop.nn._second_order_head import SecondOrderHead

_CANDIDATES = 6  # layers that replace_pool tries, from the last


class _Branch(NamedTuple):
    """Forward hook that adds second-order features to each location of a layer's output."""

    channels: int
    prefix: int
    first_order: bool

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        y = output.movedim(self.channels, -1)
        rows = y.flatten(1, -2)[:, self.prefix :]
        second = cast(nn.Module, layer.second_order)(rows)[(slice(None), *(None,) * (y.ndim - 2))]
        return (y + second if self.first_order else second.expand_as(y)).movedim(-1, self.channels)


def replace_pool(
    model: nn.Module,
    example: Tensor,
    *,
    at: str | None = None,
    first_order: bool = True,
    prefix: int | None = None,
    **options: Any,
) -> nn.Module:
    """Add second-order features to the pooled features of a pretrained classifier.

    A forward hook on the last feature layer adds the output of a :class:`SecondOrderHead`, with as many outputs as
    channels, to each location. The existing pooling, an average or a class token, passes it to the classifier. The last
    linear layer of the head is initialized to zero, which leaves the outputs of the model unchanged. Existing layers
    and weights keep their names. The new parameters are in the submodule ``second_order`` of the layer. To train only
    them, freeze the model before this call.

    The feature layer is the last layer with spatial output, a map ``(b, c, h, w)`` or ``(b, h, w, c)`` or tokens, for
    which adding a vector to all locations adds it to the pooled features. This is verified by running the model.

    Args:
        model: model from torchvision, timm, transformers or any other source; modified in place.
        example: input of the model whose last map has more than one location.
        at: name of the layer; found automatically by default.
        first_order: whether to keep the pooled features. If False, second-order features replace them.
        prefix: number of leading tokens that are not pooled, such as class, distillation and register tokens. By
            default the number of tokens minus the number of cells of the map from which they were computed.
        **options: of :class:`SecondOrderHead`: ``reduce``, ``function``, ``exponent``, ``eps``, ``channel_dropout``.

    Returns:
        The model. Its new parameters are ``[p for n, p in model.named_parameters() if ".second_order." in n]``.

    Raises:
        ConfigurationError: no feature layer was found, ``at`` is invalid, or the number of prefix tokens is unknown.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from matbackprop.nn import replace_pool
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
        >>> x = torch.randn(2, 3, 32, 32)
        >>> before = model(x)
        >>> torch.equal(replace_pool(model, x, reduce=8)(x), before)
        True
    """
    if used := [name for name, m in model.named_modules() if name.endswith(".second_order")]:
        raise ConfigurationError(f"The model already has second-order pooling: {used[0]}. Start from a fresh model.")
    trace = _Trace.of(model, example)
    name, channels = _find_layer(model, example, trace) if at is None else _named_layer(model, example, trace, at)
    features = trace.outputs[name]
    if prefix is None:
        prefix = _prefix_tokens(model, trace, features) if features.ndim == 3 and channels == -1 else 0
    width = features.shape[channels]
    head = SecondOrderHead(width, width, **options).to(features)
    if first_order:
        nn.init.zeros_(head.classifier.weight)
        nn.init.zeros_(head.classifier.bias)
    layer = model.get_submodule(name)
    layer.add_module("second_order", head)
    hook: Any = _Branch(channels, prefix, first_order)
    layer.register_forward_hook(hook)
    return model


class _Trace(NamedTuple):
    """One run of a model."""

    outputs: dict[str, Tensor]  # outputs with locations, by layer in call order, of layers that are called once
    pooled: dict[tuple[str, int], Tensor]  # later inputs without locations, by layer name and position
    cells: list[int]  # numbers of cells of all maps (b, c, h, w)

    @classmethod
    def of(cls, model: nn.Module, example: Tensor, shift: tuple[str, Tensor] | None = None) -> _Trace:
        """Run the model in evaluation mode, with a tensor added to the output of one layer if given."""
        outputs: dict[str, Tensor] = {}
        pooled: dict[tuple[str, int], Tensor] = {}
        cells: list[int] = []
        calls: Counter[str] = Counter()

        def before(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            for position, x in enumerate(inputs):
                if isinstance(x, Tensor) and x.ndim >= 2 and x.numel() == len(x) * max(x.shape[1:]):
                    pooled[name, position] = x.detach().flatten(1)

        def after(name: str, layer: nn.Module, inputs: tuple[Any, ...], y: Any) -> Any:
            calls[name] += 1
            if not isinstance(y, Tensor) or not y.is_floating_point() or y.ndim not in (3, 4):
                return None
            if y.ndim == 4:
                cells.append(y.shape[2:].numel())
            if min(y.shape[1:-1].numel(), y.shape[2:].numel()) > 1:
                outputs.pop(name, None)
                outputs[name] = y.detach()
                pooled.clear()
            return y + shift[1] if shift is not None and shift[0] == name else None

        hooks = []
        for name, layer in model.named_modules():
            if name:
                hooks.append(layer.register_forward_pre_hook(functools.partial(before, name)))
                hooks.append(layer.register_forward_hook(functools.partial(after, name)))
        training = model.training
        try:
            with torch.no_grad():
                model.eval()(example)
        finally:
            model.train(training)
            for hook in hooks:
                hook.remove()
        containers = {n for n, m in model.named_modules() if isinstance(m, nn.Sequential | nn.ModuleList)}
        once = {name: y for name, y in outputs.items() if calls[name] == 1 and name not in containers}
        return cls(once, pooled, cells)


def _channels_of(model: nn.Module, example: Tensor, trace: _Trace, name: str) -> int | None:
    """Find the dimension of a layer's output along which an added vector appears in the pooled features."""
    y = trace.outputs[name]
    for channels in (1, -1) if y.ndim == 4 else (-1, 1):
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(y.shape[channels], generator=generator).to(y) * y.abs().mean().clamp_min(1e-3)
        shape = [1] * y.ndim
        shape[channels] = -1
        moved = _Trace.of(model, example, (name, vector.view(shape)))
        for key, z in trace.pooled.items():
            if key in moved.pooled and z.shape[1] % len(vector) == 0:
                change = moved.pooled[key] - z - vector.repeat(z.shape[1] // len(vector))
                if bool(change.abs().max() < 1e-2 * vector.abs().max()):
                    return channels
    return None


def _find_layer(model: nn.Module, example: Tensor, trace: _Trace) -> tuple[str, int]:
    for name in list(trace.outputs)[: -_CANDIDATES - 1 : -1]:
        if (channels := _channels_of(model, example, trace, name)) is not None:
            return name, channels
    last = ", ".join(list(trace.outputs)[-3:]) or "none"
    raise ConfigurationError(
        "No layer was found whose output is pooled for the classifier. Pass its name as at= (the last layers with maps "
        f"or tokens: {last}), pass a larger example if the last map has one location, or replace the classifier by "
        f"matbackprop.nn.SecondOrderHead."
    )


def _named_layer(model: nn.Module, example: Tensor, trace: _Trace, at: str) -> tuple[str, int]:
    try:
        layer = model.get_submodule(at)
    except AttributeError as error:
        raise ConfigurationError(f"The model has no layer {at!r}. Choose one of model.named_modules().") from error
    while isinstance(layer, nn.Sequential) and len(layer):  # a child of it would be called in the sequence
        last, layer = list(layer.named_children())[-1]
        at = f"{at}.{last}"
    if at not in trace.outputs:
        raise ConfigurationError(
            f"Layer {at!r} must be called once and return a map (b, c, h, w) or tokens (b, n, c) with more than one "
            f"location. Layers that do: {', '.join(list(trace.outputs)[-5:])}."
        )
    channels = _channels_of(model, example, trace, at)
    if channels is None:
        channels = 1 if trace.outputs[at].ndim == 4 else -1
    return at, channels


def _prefix_tokens(model: nn.Module, trace: _Trace, tokens: Tensor) -> int:
    """Return the number of tokens minus the number of cells of a map."""
    n = tokens.shape[1]
    if fits := [c for c in trace.cells if n / 2 < c <= n]:
        return n - max(fits)
    if any("cls_token" in name or "class_token" in name for name, _ in model.named_parameters()):
        raise ConfigurationError(
            f"The number of class and register tokens among {n} is unknown. Pass prefix=, such as prefix=1."
        )
    return 0
