"""The one base of all autograd Functions: what is saved, forward mode, vmap, double backward, autocast off.

A subclass is four static methods about one operation:

    forward(*inputs) → outputs
    save(inputs, outputs) → the tensors and constants that its derivatives need    (all inputs by default)
    adjoint(saved, needed, *gradients of the outputs) → gradients of the first inputs
    tangent(saved, *directions of the inputs) → directions of the outputs          (optional: forward mode)

and is called with :func:`apply`. A gradient or direction that is absent is None. Everything that a derivative of the
derivative depends on is an input or an output; a factor that was computed and is saved must be an output, or double
backward takes it for a constant. ``adjoint`` and ``tangent`` are differentiated again by what they call: plain
operations, or other Functions where a closed form exists at ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop._torch import (
    apply_directly,
    differentiated_again,
    forward_mode_active,
    jvp_nesting,
    keep_signature,
    outside_old_graphs,
    transforms_active,
)
from matbackprop.errors import OrderError
from matbackprop.numerics import autocast_off

__all__ = ["Operation", "apply", "product"]


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NARROWER = {wide: narrow for narrow, wide in _WIDER.items()}


def _converted(values: Sequence[Any], to: dict[torch.dtype, torch.dtype]) -> tuple[Any, ...]:
    return tuple(v.to(to.get(v.dtype, v.dtype)) if isinstance(v, Tensor) else v for v in values)


def _derivative(
    formula: Any, widen: bool, saved: Sequence[Any], given: Sequence[Any], *between: Any
) -> tuple[Any, ...]:
    """A formula without autocast; in float64 where it may be differentiated again.

    The derivatives of its plain operations run whenever somebody asks for them, autocast on or off. Autocast leaves
    float64 alone.
    """
    first = next(v for v in given if v is not None)
    widen = widen and first.dtype in _WIDER and differentiated_again()
    if widen:
        saved, given = _converted(saved, _WIDER), _converted(given, _WIDER)
    with autocast_off(first.device.type):
        out = formula(saved, *between, *given)
    out = out if isinstance(out, tuple) else (out,)
    return _converted(out, _NARROWER) if widen else out


class Operation(Function):
    """Base of all Functions; see the module."""

    generate_vmap_rule = True
    forward_twice: ClassVar[str] = ""
    """Name to refuse forward mode inside forward mode by, where ``tangent`` is made of plain operations."""
    widen: ClassVar[bool] = True
    """Whether derivatives that may be differentiated again run in float64; a user's function may not take it."""
    adjoint: ClassVar[Callable[..., Any]]
    """``adjoint(saved, needed, *gradients)``: gradients of the first inputs, one or a tuple, where ``needed``."""
    _with_tangent: ClassVar[type[Function]]

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Any) -> Sequence[Any]:
        """What the derivatives need, tensors, None or constants: the inputs unless a subclass says otherwise."""
        return inputs

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "jvp" in vars(cls):  # the class made below
            return
        keep_signature(cls.forward)
        adjoint = cls.adjoint  # every operation has one

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            saved = cls.save(inputs, output)
            ctx.set_materialize_grads(False)
            ctx.constants = [None if isinstance(v, Tensor) else v for v in saved]
            ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in saved])

        def restore(ctx: Any) -> list[Any]:
            return [c if v is None else v for v, c in zip(ctx.saved_tensors, ctx.constants, strict=True)]

        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad
            if all(g is None for g in gradients):
                return (None,) * len(needed)
            out = _derivative(adjoint, cls.widen, restore(ctx), gradients, needed)
            return (*out, *(None,) * (len(needed) - len(out)))

        cls.setup_context = staticmethod(setup_context)  # type: ignore[method-assign,assignment]
        cls.backward = staticmethod(backward)  # type: ignore[method-assign]
        cls._with_tangent = cls
        if not hasattr(cls, "tangent"):
            return

        class WithTangent(cls):  # type: ignore[misc,valid-type]
            """With forward mode: torch.compile refuses a Function that has a jvp, so that only this one has."""

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                setup_context(ctx, inputs, output)
                ctx.save_for_forward(*[v if isinstance(v, Tensor) else None for v in cls.save(inputs, output)])

            @staticmethod
            def jvp(ctx: Any, *directions: Tensor | None) -> Any:
                if cls.forward_twice and jvp_nesting() > 1:
                    raise OrderError(
                        f"{cls.forward_twice} was asked for forward mode twice over, which torch does not carry "
                        f"through custom functions; use torch.func.hessian (forward over reverse) or jacrev for the "
                        f"inner derivative."
                    )
                out = _derivative(cls.tangent, cls.widen, restore(ctx), directions)  # type: ignore[attr-defined]
                return out if len(out) > 1 else out[0]

        WithTangent.__name__ = WithTangent.__qualname__ = cls.__name__ + "WithTangent"
        cls._with_tangent = WithTangent


@outside_old_graphs
def apply(operation: type[Operation], *inputs: Any) -> Any:
    """Call an operation so that every transformation that is active works on it."""
    if torch.compiler.is_compiling():
        return operation.apply(*inputs)
    kind = operation._with_tangent if forward_mode_active() else operation
    return kind.apply(*inputs) if transforms_active() else apply_directly(kind, *inputs)


class _Product(Operation):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (a, b), (g,) = saved, gradients
        return product(g, b.mH) if needed[0] else None, product(a.mH, g) if needed[1] else None

    @staticmethod
    def tangent(saved: Sequence[Any], da: Tensor | None, db: Tensor | None) -> Tensor:
        a, b = saved
        if da is None:
            return product(a, torch.zeros_like(b) if db is None else db)
        return product(da, b) if db is None else product(da, b) + product(a, db)


def product(a: Tensor, b: Tensor) -> Tensor:
    """A @ B of batches of the same shape, for use outside of an operation: autocast does not reach its derivatives.

    Autocast leaves float64 alone, so that only float32 needs it.
    """
    return apply(_Product, a, b) if a.dtype == torch.float32 else a @ b
