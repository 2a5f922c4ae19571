"""The private interfaces of torch that the package uses; tested with torch 2.11 to 2.15."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad

WHOLE_GRAPHS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
"""Whether torch.compile traces the operators into one graph. With torch 2.6 gradients in such a graph are wrong."""


def outside_old_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude the function from the graphs of older versions of torch.compile."""
    return function if WHOLE_GRAPHS else torch.compiler.disable(function)


# --- tensors ---


def _tracing() -> bool:
    """Whether torch.compile or ``make_fx``, which ``torch.func.linearize`` uses, records operations."""
    recorder = torch._C._TorchDispatchModeKey.PROXY
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(recorder) is not None


def _is_wrapped(a: Tensor) -> bool:
    """Whether ``a`` wraps another tensor: inside vmap, grad or jvp, or in batched gradients."""
    level = torch._C._functorch.maybe_get_level(a)
    if level == -1:
        return torch._C._functorch.is_legacy_batchedtensor(a)
    return level > -1 or _is_wrapped(torch._C._functorch.get_unwrapped(a))


def _layers(a: Tensor) -> Iterator[Tensor]:
    """``a`` and all tensors that it wraps, inside transformations of ``torch.func`` or after they have ended."""
    yield a
    while torch._C._functorch.maybe_get_level(a) != -1:
        a = torch._C._functorch.get_unwrapped(a)
        yield a


def values_checkable(a: Tensor) -> bool:
    """Whether values can be read: not while tracing, under transformations, or for meta and fake tensors."""
    return not (
        _tracing()
        or a.is_meta
        or type(a).__torch_dispatch__ is not Tensor.__torch_dispatch__  # fake, distributed and other tensors
        or _is_wrapped(a)
    )


def is_plain(*tensors: Tensor) -> bool:
    """Whether all tensors are ordinary ones, which have memory: not traced, transformed, fake, or of a subclass."""
    if _tracing():
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter) and not (t.is_meta or _is_wrapped(t)) for t in tensors)


def is_batched(a: Tensor) -> bool:
    return any(torch._C._functorch.is_batchedtensor(t) for t in _layers(a))


def is_differentiated(a: Tensor) -> bool:
    """Whether ``a``, or a tensor that it wraps, requires a gradient or is a dual number of forward mode."""
    if torch.compiler.is_compiling():
        return a.requires_grad
    dual = forward_mode_active()
    return any(t.requires_grad or (dual and forward_ad.unpack_dual(t).tangent is not None) for t in _layers(a))


# --- modes ---


def transforms_active() -> bool:
    """Whether a transformation of ``torch.func`` is being applied."""
    return torch._C._are_functorch_transforms_active()


def transformed() -> bool:
    """Whether a transformation of ``torch.func`` or a level of dual numbers is active."""
    return transforms_active() or forward_ad._current_level >= 0


def outside_transforms() -> AbstractContextManager[Any]:
    """Exclude operations on constants from all transformations of ``torch.func``."""
    return torch._C._DisableFuncTorch()


def reverse_mode_only() -> bool:
    """Whether only reverse mode is active: no compiler, transformation of ``torch.func`` or dual numbers."""
    return not (torch.compiler.is_compiling() or transformed())


def forward_mode_active() -> bool:
    """Whether inputs may be dual numbers: inside ``torch.func.jvp`` or a dual level, and not compiling."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def jvp_nesting() -> int:
    return eager_transforms.JVP_NESTING


def forward_mode_differentiated(*tensors: Tensor | None) -> bool:
    """Whether tangents are differentiated again: nested forward mode, or tensors that require a gradient."""
    if not forward_mode_active():
        return False
    return jvp_nesting() > 1 or any(x.requires_grad for t in tensors if t is not None for x in _layers(t))


def differentiated_again() -> bool:
    """Whether a derivative may be differentiated again; not in an ordinary training step or a compiled graph."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or forward_ad._current_level >= 0)


# --- calls ---


def keep_signature(function: Any) -> None:
    """Store the signature on a Function's forward, which ``Function.apply`` inspects in every call."""
    function.__signature__ = inspect.signature(function)


def apply_eagerly(function: type[Function], with_tangent: type[Function], *arguments: Any) -> Any:
    """``Function.apply``, of the variant with forward mode if that is active.

    Outside of transformations the signature is not inspected, which costs more than a small layer. Inspection fills in
    default arguments, which no Function here has.
    """
    if torch.compiler.is_compiling():  # this frame alone, after a graph break: run it eagerly
        raise NotImplementedError("torch.compile cannot trace this call.")
    kind = with_tangent if forward_ad._current_level >= 0 else function
    if torch._C._are_functorch_transforms_active():
        return kind.apply(*arguments)
    # Like Function.apply, unwrap tensors that torch.func.vjp has left behind.
    return super(Function, kind).apply(*unwrap_dead_wrappers(arguments))  # type: ignore[misc]


def current_device() -> int:
    """Return the index of the current CUDA device, without checks that cost more than a launch."""
    return torch._C._cuda_getDevice()


def current_raw_stream(device: int) -> int:
    """Return the driver handle of a device's current CUDA stream."""
    return torch._C._cuda_getCurrentRawStream(device)
