"""Base class of all autograd Functions: saved state, forward mode, vmap, double backward, autocast off.

A subclass has four static methods and is called with :func:`apply`:

    forward(*inputs) → outputs
    save(inputs, outputs) → a NamedTuple, possibly nested, of tensors and constants (default: the inputs)
    adjoint(saved, needed, *gradients of the outputs) → gradients of the first inputs
    tangent(saved, *directions of the inputs) → directions of the outputs          (optional: forward mode)

An absent gradient or direction is None. A second derivative treats a saved tensor that is neither an input nor an
output as a constant. It differentiates ``adjoint`` and ``tangent`` through the operations that they call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop._torch import (
    apply_eagerly,
    differentiated_again,
    jvp_nesting,
    keep_signature,
    outside_old_graphs,
    transformed,
)
from matbackprop.errors import OrderError
from matbackprop.numerics import autocast_off

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NARROWER = {wide: narrow for narrow, wide in _WIDER.items()}


def _mapped(function: Callable[[Any], Any], values: Sequence[Any]) -> Any:
    """Apply a function to every leaf of nested tuples and named tuples."""
    items = [_mapped(function, v) if isinstance(v, tuple) else function(v) for v in values]
    return type(values)(*items) if hasattr(values, "_fields") else tuple(items)


def _converted(values: Sequence[Any], to: dict[torch.dtype, torch.dtype]) -> Any:
    return _mapped(lambda v: v.to(to.get(v.dtype, v.dtype)) if isinstance(v, Tensor) else v, values)


def _split(saved: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of a saved state, and the state with each tensor replaced by an ellipsis."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return ...
        return value

    state = _mapped(take, saved)
    return tensors, state


def _derivative(
    formula: Any, widen: bool, saved: Sequence[Any], given: Sequence[Any], *between: Any
) -> tuple[Any, ...]:
    """Run a formula without autocast, and in float64 if it may be differentiated again."""
    first = next(v for v in given if v is not None)
    widen = widen and first.dtype in _WIDER and differentiated_again()
    if widen:
        saved, given = _converted(saved, _WIDER), _converted(given, _WIDER)
    with autocast_off(first.device.type):
        out = formula(saved, *between, *given)
    out = out if isinstance(out, tuple) else (out,)
    return _converted(out, _NARROWER) if widen else out


class Operation(Function):
    """Base class of all autograd Functions; see the module docstring."""

    generate_vmap_rule = True
    forward_twice: ClassVar[str] = ""
    """Operator name in the error for nested forward mode, if ``tangent`` does not support it."""
    widen: ClassVar[bool] = True
    """Whether to run derivatives in float64 if they may be differentiated again."""
    adjoint: ClassVar[Callable[..., Any]]
    with_tangent: ClassVar[type[Function]]

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Any) -> Sequence[Any]:
        return inputs

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "jvp" in vars(cls):  # the variant with forward mode
            return
        keep_signature(cls.forward)
        adjoint = cls.adjoint  # every operation has one

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            tensors, ctx.state = _split(cls.save(inputs, output))
            ctx.save_for_backward(*tensors)

        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad
            if all(g is None for g in gradients):
                return (None,) * len(needed)
            out = _derivative(adjoint, cls.widen, _restored(ctx), gradients, needed)
            return (*out, *(None,) * (len(needed) - len(out)))

        cls.setup_context = staticmethod(setup_context)  # type: ignore[method-assign,assignment]
        cls.backward = staticmethod(backward)  # type: ignore[method-assign]
        cls.with_tangent = _with_tangent(cls) if hasattr(cls, "tangent") else cls


def _restored(ctx: Any) -> Any:
    tensors = iter(ctx.saved_tensors)
    return _mapped(lambda v: next(tensors) if v is ... else v, ctx.state)


def _with_tangent(operation: Any) -> type[Function]:
    """The variant with forward mode. It is separate because torch.compile rejects Functions with a jvp."""

    class WithTangent(operation):  # type: ignore[misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            operation.setup_context(ctx, inputs, output)
            ctx.save_for_forward(*_split(operation.save(inputs, output))[0])

        @staticmethod
        def jvp(ctx: Any, *directions: Tensor | None) -> Any:
            if operation.forward_twice and jvp_nesting() > 1:
                raise OrderError(
                    f"Forward mode over forward mode is not supported through {operation.forward_twice}. Use "
                    f"torch.func.hessian (forward over reverse), or jacrev for the inner derivative."
                )
            out = _derivative(operation.tangent, operation.widen, _restored(ctx), directions)
            return out if len(out) > 1 else out[0]

    WithTangent.__name__ = WithTangent.__qualname__ = operation.__name__ + "WithTangent"
    return WithTangent


@outside_old_graphs
def apply(operation: type[Operation], *inputs: Any) -> Any:
    """Call an operation under all active transformations."""
    if torch.compiler.is_compiling():
        if transformed():  # torch.compile loses tangents and second derivatives of Functions there
            return torch.compiler.disable(apply)(operation, *inputs)  # a graph break
        return operation.apply(*inputs)
    return apply_eagerly(operation, operation.with_tangent, *inputs)


class _Product(Operation):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def adjoint(saved: tuple[Tensor, Tensor], needed: Sequence[bool], g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = saved
        return product(g, b.mH) if needed[0] else None, product(a.mH, g) if needed[1] else None

    @staticmethod
    def tangent(saved: tuple[Tensor, Tensor], da: Tensor | None, db: Tensor | None) -> Tensor:
        a, b = saved
        if da is None:
            return product(a, torch.zeros_like(b) if db is None else db)
        return product(da, b) if db is None else product(da, b) + product(a, db)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return A @ B for equal batch shapes, with derivatives that ignore autocast."""
    return apply(_Product, a, b) if a.dtype == torch.float32 else a @ b


class _WithDerivatives(Operation):
    @staticmethod
    def forward(formula: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def adjoint(saved: Sequence[Tensor], needed: Sequence[bool], g: Tensor) -> tuple[Tensor, None]:
        return g, None

    @staticmethod
    def tangent(saved: Sequence[Tensor], d_formula: Tensor | None, d_value: Tensor | None) -> Tensor:
        return torch.zeros_like(d_value) if d_formula is None else d_formula.clone()  # type: ignore[arg-type]


def with_derivatives_of(formula: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` with the derivatives of ``formula``, an equal but less accurate expression."""
    return apply(_WithDerivatives, formula, value)
