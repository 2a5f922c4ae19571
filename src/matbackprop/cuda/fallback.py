"""Choose between a kernel and its fallback in torch operations.

A kernel reads raw memory. It does not support tensors without memory (batched by vmap, fake, subclasses), tensors on
another device, or derivatives that the kernel does not implement. :func:`kernels_may_take` decides;
:class:`Pair` holds a kernel and its fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop._torch import forward_mode_active, transforms_active
from matbackprop.checks import is_plain
from matbackprop.cuda import compiler


def device_takes(device: torch.device, capability: tuple[int, int] = (1, 0)) -> bool:
    """Return whether kernels run on a device: CUDA with this compute capability, a compiler, and not turned off."""
    return device.type == "cuda" and compiler.available() and compiler.capability(device) >= capability


def kernels_may_take(*tensors: Tensor, capability: tuple[int, int] = (1, 0)) -> bool:
    """Return whether kernels support these tensors: plain, real, not empty, on one device that runs kernels."""
    device = tensors[0].device
    return (
        device.type == "cuda"
        and all(t.device == device and t.numel() > 0 and not t.is_complex() for t in tensors)
        and is_plain(*tensors)
        and not forward_mode_active()
        and device_takes(device, capability)
    )


class Pair(NamedTuple):
    """A function of features F by kernels, and its fallback."""

    forward: Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]  # the value, and the tensors that gradient needs
    gradient: Callable[..., Tensor]  # maps (G, F, *those tensors) to dL/dF, G being the gradient of the value
    general: Callable[[Tensor], Tensor]  # the value in torch operations, differentiable under any transformation


class _Paired(Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, pair: Pair) -> Tensor:
        value, factors = pair.forward(f)
        ctx.pair = pair
        ctx.save_for_backward(f, *factors)
        return value

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None]:
        f, *factors = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            return torch.autograd.grad(ctx.pair.general(f), f, g, create_graph=True)[0], None
        if kernels_may_take(f, g):
            return ctx.pair.gradient(g.contiguous(), f, *factors), None
        with torch.enable_grad():  # a batch of gradients
            x = f.detach().requires_grad_()
            return torch.autograd.grad(ctx.pair.general(x), x, g)[0], None


def call_pair(f: Tensor, pair: Pair) -> Tensor:
    """Call the kernels of a pair on F, for which :func:`kernels_may_take` holds.

    Inside a ``torch.func`` transformation of another tensor, in which F is a constant, the fallback runs, because such
    transformations need another kind of Function.
    """
    return pair.general(f) if transforms_active() else _Paired.apply(f, pair)
