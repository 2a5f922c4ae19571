"""Choose between a kernel and its fallback in torch operations.

A kernel reads raw memory. It does not support tensors without memory (batched by vmap, fake, subclasses), tensors on
another device, or derivatives that the kernel does not implement. :func:`kernels_may_take` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop._torch import forward_mode_active, is_plain, transformed
from matbackprop.cuda import compiler


def kernels_may_take(*tensors: Tensor, capability: tuple[int, int] = (1, 0)) -> bool:
    """Return whether kernels support these tensors: plain, real, not empty, on one CUDA device of this capability."""
    device = tensors[0].device
    return (
        device.type == "cuda"
        and all(t.device == device and t.numel() > 0 and not t.is_complex() for t in tensors)
        and is_plain(*tensors)
        and not forward_mode_active()
        and compiler.available()
        and compiler.capability(device) >= capability
    )


class _Job(Protocol):
    """A function of features F by kernels and its fallback, as a NamedTuple of the other arguments.

    The value is a tensor or a pair.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def forward(self, f: Tensor) -> tuple[Any, tuple[Tensor, ...]]: ...  # the value, and factors for the gradient
    def gradient(self, *args: Any, **kwargs: Any) -> Tensor: ...  # dL/dF for dL/d(value), F and the factors
    def general(self, f: Tensor) -> Any: ...  # the value in torch operations, differentiable in every mode


class _ByKernels(Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, job: _Job) -> Any:
        value, factors = job.forward(f)
        ctx.job, ctx.factors = job, len(factors)
        # Tensors of the job are saved, so that autograd detects in-place changes.
        ctx.save_for_backward(f, *factors, *(t for t in job if isinstance(t, Tensor)))
        return value

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, None]:
        f, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            return torch.autograd.grad(ctx.job.general(f), f, g, create_graph=True)[0], None
        if kernels_may_take(f, *g):
            return ctx.job.gradient(*(x.contiguous() for x in g), f, *saved[: ctx.factors]), None
        with torch.enable_grad():  # a batch of gradients
            x = f.detach().requires_grad_()
            return torch.autograd.grad(ctx.job.general(x), x, g)[0], None


def call_kernels(f: Tensor, job: _Job) -> Any:
    """Run a job on F, for which :func:`kernels_may_take` holds; half precision is converted to float32.

    Inside a ``torch.func`` transformation of another tensor, in which F is a constant, the fallback runs, because such
    transformations need another kind of Function.
    """
    f = (f.float() if f.dtype in (torch.float16, torch.bfloat16) else f).contiguous()
    return job.general(f) if transformed() else _ByKernels.apply(f, job)
