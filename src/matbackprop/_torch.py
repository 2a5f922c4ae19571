"""Every private interface of torch that the package leans on, one function each; seen to work in torch 2.11, 2.13."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

WHOLE_GRAPHS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
"""Whether torch.compile makes one graph of a network with our operations in it.

That of torch 2.6 mistakes what a Function has saved and returns wrong gradients, without a word.
"""


def outside_old_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which an older torch.compile leaves out of its graphs and calls as it is."""
    return function if WHOLE_GRAPHS else torch.compiler.disable(function)


def transforms_active() -> bool:
    """Whether a transformation of ``torch.func`` is being applied."""
    return torch._C._are_functorch_transforms_active()


def transformed_in_graph() -> bool:
    """Whether torch.compile is tracing inside a transformation of ``torch.func`` or with dual numbers."""
    return transforms_active() or forward_ad._current_level >= 0


def is_wrapped(a: Tensor) -> bool:
    """Whether ``a`` stands for another tensor: inside vmap, grad or jvp, or among batched gradients."""
    return torch._C._functorch.maybe_get_level(a) > -1 or torch._C._functorch.is_legacy_batchedtensor(a)


def receives_gradient(a: Tensor) -> bool:
    """Whether ``a`` requires a gradient, or a tensor that it stands for does."""
    while not a.requires_grad:
        if torch._C._functorch.maybe_get_level(a) < 0:
            return False
        a = torch._C._functorch.get_unwrapped(a)
    return True


def is_batched(a: Tensor) -> bool:
    """Whether ``a`` stands for a batch inside vmap."""
    return torch._C._functorch.is_batchedtensor(a)


def dispatch_mode_active() -> bool:
    """Whether something intercepts every operation, as fake tensors and profilers do."""
    return _get_current_dispatch_mode() is not None


def forward_mode_active() -> bool:
    """Whether inputs may be dual numbers: inside ``torch.func.jvp`` or a dual level, and not compiling."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def differentiated_again() -> bool:
    """Whether what a derivative computes may be differentiated in its turn.

    Where it may not (an ordinary training step, a compiled graph), a formula can run bare instead of inside a Function.
    """
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or forward_ad._current_level >= 0)


def is_differentiated(a: Tensor) -> bool:
    """Whether ``a``, or a tensor that it wraps, requires a gradient or is a dual number of forward mode."""
    if torch.compiler.is_compiling():
        return a.requires_grad
    while not (a.requires_grad or (forward_mode_active() and forward_ad.unpack_dual(a).tangent is not None)):
        if torch._C._functorch.maybe_get_level(a) < 0:
            return False
        a = torch._C._functorch.get_unwrapped(a)
    return True


def reverse_mode_only() -> bool:
    """Whether nothing but reverse mode may follow operations: no compiler, transformation of torch.func or dual."""
    return not (torch.compiler.is_compiling() or transforms_active() or forward_ad._current_level >= 0)


def jvp_nesting() -> int:
    """How many calls of ``torch.func.jvp`` are nested here."""
    return eager_transforms.JVP_NESTING


def keep_signature(function: Any) -> None:
    """Store the signature on a Function's forward, which ``Function.apply`` would work out again at every call."""
    function.__signature__ = inspect.signature(function)


def apply_directly(function: type[Function], *arguments: Any) -> Any:
    """``function.apply`` without the inspection of its signature, which costs more than a small layer.

    Inspection fills in default arguments, which no Function here has. Not for use inside a transformation.
    """
    # What torch.func.vjp leaves behind stands for tensors of the graph outside of it; Function.apply unwraps it, too.
    return super(Function, function).apply(*unwrap_dead_wrappers(arguments))  # type: ignore[misc]


def scaled(tensors: list[Tensor], factor: Tensor) -> tuple[Tensor, ...]:
    """All tensors times a scalar, in one launch."""
    return tuple(torch._foreach_mul(tensors, factor))


def current_device() -> int:
    """Index of the current CUDA device, without the checks that cost more than a launch."""
    return torch._C._cuda_getDevice()


def current_raw_stream(device: int) -> int:
    """The current CUDA stream of a device as the driver knows it."""
    return torch._C._cuda_getCurrentRawStream(device)
