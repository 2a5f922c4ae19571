"""Second-order pooling C = g(Fᵀ diag(w) F + εI) without a null-space basis, a singular vector or a division by a gap.

F is m×d with rows scaled by √w. For m < d the thin dual form works on K = FFᵀ = U diag(s) Uᵀ: with Y = UᵀF and
λ = s + ε,

    C = g(ε)I + Yᵀ diag(g[λᵢ, ε]) Y,    F·L = U(diag(g[λᵢ, ε]) Y G + (g[λᵢ, λⱼ, ε] ∘ (Y G Yᵀ)) Y),

where L is the derivative of g at A = FᵀF + εI in the direction G, so that ∂L/∂F = 2 F·L. Otherwise the primal form
works on FᵀF = V diag(s) Vᵀ with Z = FV: C = V diag(g(λ)) Vᵀ and F·L = Z(Γ∘(VᵀGV))Vᵀ. In both, s is taken again as the
squared norms of the rows of Y (columns of Z): a small eigenvalue of a Gram matrix is only known to rounding of the
largest, its squared norm far better. Where the spectrum is wide the vectors are refined too (`gram_eigh`); on the CPU
the primal form of a narrow spectrum does with the solver's eigenvalues, and with F and V for Z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from matbackprop.cuda import pool as pool_kernels
from matbackprop.divided_differences import SpectralFunction, resolve_function
from matbackprop.errors import ConfigurationError, DomainError
from matbackprop.functional._function import Operation, apply, differentiated_again, forward_mode_active
from matbackprop.functional._spectrum import Spectrum, frechet, second_frechet, spectral
from matbackprop.functional.eigh import eigh
from matbackprop.functional.matrix_function import FunctionLike, check_domain, parameter_tensor
from matbackprop.functional.svd import svd
from matbackprop.numerics import (
    autocast_off,
    check_finite,
    check_matrix,
    check_weight,
    check_weight_values,
    compute_dtype,
    symmetrize,
    values_checkable,
    wants_check,
)
from matbackprop.solvers import batched_eigh
from matbackprop.solvers.gram import gram_eigh

__all__ = ["second_order_pool"]

Method = Literal["fused", "svd", "eig"]


def _column(p: Tensor | None, extra: int) -> Tensor | None:
    """Give a value per matrix, or None, ``extra`` trailing dimensions so that it broadcasts over a table."""
    return None if p is None else p.reshape(p.shape + (1,) * extra)


def _scaled_identity(value: Tensor, d: int) -> Tensor:
    return torch.diag_embed(value.unsqueeze(-1).expand(*value.shape, d))


def _free_to_look(*tensors: Tensor) -> bool:
    return all(t.is_cpu and values_checkable(t) for t in tensors)


def _narrow(s: Tensor) -> bool:
    """Whether ascending s_max/s_min < 1e3 everywhere and may be looked at: the solver's own s has 12 digits then."""
    if s.dtype != torch.float64 or s.numel() == 0 or not _free_to_look(s):
        return False
    # Numbers, not tensors: for one small matrix the kernels of a comparison would cost more than its products.
    ends = zip(s.select(-1, 0).reshape(-1).tolist(), s.select(-1, -1).reshape(-1).tolist(), strict=True)
    return all(low > 1e-3 * high for low, high in ends)


def _thin_forward(
    f: Tensor, eps: Tensor, p: Tensor | None, function: SpectralFunction, fine: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """C, s, U, Y of the thin dual form for F ``(*batch, m, d)`` and ε ``(*batch,)``."""
    s, u, y = gram_eigh(f, eps, fine)
    shift = eps.unsqueeze(-1)
    slope = torch.where(s > 0, function.first(s + shift, shift, _column(p, 1)), 0)
    c = (y * slope.unsqueeze(-1)).mT @ y
    c.diagonal(dim1=-2, dim2=-1).add_(function.value(eps, p).unsqueeze(-1))
    return c, s, u, y


def _thin_backward(
    g: Tensor, eps: Tensor, p: Tensor | None, s: Tensor, u: Tensor, y: Tensor, function: SpectralFunction
) -> Tensor:
    """2 F·L for the symmetric part of G, whose factor ½ cancels against the 2.

    g[λᵢ, λⱼ, ε] is the quotient over the widest gap, max(sᵢ, sⱼ). What cancels in it when both are far below ε is
    multiplied by √(sᵢsⱼ) in Y G Yᵀ, so that its rounding error stays that of the first term.
    """
    lam, shift = s + eps.unsqueeze(-1), eps.unsqueeze(-1)
    slope = torch.where(s > 0, function.first(lam, shift, _column(p, 1)), 0)
    rows, columns = s.unsqueeze(-1), s.unsqueeze(-2)
    gamma = function.first(lam.unsqueeze(-1), lam.unsqueeze(-2), _column(p, 2))
    nearer = torch.where(rows < columns, slope.unsqueeze(-1), slope.unsqueeze(-2))
    widest = torch.maximum(rows, columns)
    second = torch.where(widest > 0, (gamma - nearer) / widest, 0)
    yg = y @ g + y @ g.mT
    return u @ (slope.unsqueeze(-1) * yg + (second * (yg @ y.mT)) @ y)


def _primal_forward(
    f: Tensor, eps: Tensor, p: Tensor | None, function: SpectralFunction, fine: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """C, s, V, Z of the primal form for F ``(*batch, m, d)`` and ε ``(*batch,)``; Z is empty where s is narrow."""
    s, v = batched_eigh(f.mT @ f)
    if _narrow(s):
        z = f.new_empty(0)
    else:
        s, v, y = gram_eigh(f.mT, eps, fine, v)
        z = y.mT
    values = function.value(s + eps.unsqueeze(-1), _column(p, 1))
    return (v * values.unsqueeze(-2)) @ v.mT, s, v, z


def _primal_backward(
    g: Tensor, f: Tensor, eps: Tensor, p: Tensor | None, s: Tensor, v: Tensor, z: Tensor, function: SpectralFunction
) -> Tensor:
    """2 F·L for the symmetric part of G, whose factor ½ cancels against the 2."""
    lam = s + eps.unsqueeze(-1)
    gamma = function.first(lam.unsqueeze(-1), lam.unsqueeze(-2), _column(p, 2))
    h = v.mT @ g @ v
    h = h + h.mT
    if z.ndim < f.ndim:  # a narrow spectrum: no direction is absent
        return f @ (v @ (gamma * h) @ v.mT)
    return z @ ((gamma.masked_fill((s == 0).unsqueeze(-1), 0) * h) @ v.mT)


def _directional_trace(
    g: Tensor,
    eps: Tensor,
    p: Tensor | None,
    s: Tensor,
    basis: Tensor,
    y: Tensor,
    function: SpectralFunction,
    thin: bool,
) -> Tensor:
    """tr L = ⟨G, g'(A)⟩, the gradient of ε."""
    lam = s + eps.unsqueeze(-1)
    slopes = function.first(lam, lam, _column(p, 1))
    if not thin:
        return (slopes * ((basis.mT @ g) * basis.mT).sum(-1)).sum(-1)
    at_eps = function.first(eps, eps, p)
    rise = (slopes - at_eps.unsqueeze(-1)) / s.clamp_min(torch.finfo(s.dtype).tiny)
    return at_eps * g.diagonal(dim1=-2, dim2=-1).sum(-1) + (rise * ((y @ g) * y).sum(-1)).sum(-1)


def _pairing(
    g: Tensor,
    eps: Tensor,
    p: Tensor | None,
    s: Tensor,
    basis: Tensor,
    y: Tensor,
    function: SpectralFunction,
    thin: bool,
) -> Tensor:
    """⟨G, g(A)⟩; with ∂g/∂p for g the gradient of the exponent."""
    if not thin:
        values = function.value(s + eps.unsqueeze(-1), _column(p, 1))
        return (values * ((basis.mT @ g) * basis.mT).sum(-1)).sum(-1)
    shift = eps.unsqueeze(-1)
    slope = function.first(s + shift, shift, _column(p, 1))
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)
    return function.value(eps, p) * trace + (slope * ((y @ g) * y).sum(-1)).sum(-1)


def _weight_gradient(
    g: Tensor,
    f: Tensor,
    eps: Tensor,
    p: Tensor | None,
    s: Tensor,
    basis: Tensor,
    y: Tensor,
    function: SpectralFunction,
    thin: bool,
) -> Tensor:
    """fᵢ L fᵢᵀ for each row of the unweighted F, also where the weight is zero and fᵢ leaves the span of the others."""
    lam = s + eps.unsqueeze(-1)
    gamma = function.first(lam.unsqueeze(-1), lam.unsqueeze(-2), _column(p, 2))
    if not thin:
        fv = f @ basis
        return (fv @ (gamma * (basis.mT @ g @ basis)) * fv).sum(-1)
    v = _orthonormal_rows(s, y)  # on their complement A acts as ε
    inside = f @ v.mT
    outside = f - inside @ v
    vg = 0.5 * (v @ g + v @ g.mT)
    shift = eps.unsqueeze(-1)
    slope = function.first(lam, shift, _column(p, 1))
    total = (inside @ (gamma * (vg @ v.mT)) * inside).sum(-1)
    total = total + 2 * (inside * slope.unsqueeze(-2) * (outside @ vg.mT)).sum(-1)
    return total + function.first(shift, shift, _column(p, 1)) * (outside @ g * outside).sum(-1)


def _decompose(f: Tensor, w: Tensor | None, eps: Tensor, fine: bool) -> tuple[Tensor, Spectrum]:
    """A = Fᵀ diag(w) F + εI as a differentiable matrix, and its spectrum."""
    a = symmetrize(f.mT @ _weighted(f, w)) + _scaled_identity(eps, f.shape[-1])
    f, eps = f.detach(), eps.detach()
    if w is not None:
        f = f * w.detach().sqrt().unsqueeze(-1)
    if f.shape[-2] >= f.shape[-1]:
        s, v, _ = gram_eigh(f.mT, eps, fine)
        return a, Spectrum(s + eps.unsqueeze(-1), v)
    s, _, y = gram_eigh(f, eps, fine)
    return a, Spectrum(s + eps.unsqueeze(-1), _orthonormal_rows(s, y).mT, eps)


def _orthonormal_rows(s: Tensor, y: Tensor) -> Tensor:
    """Rows of Y over their norms, each cleared of what rounding left of larger ones; zero where s is zero."""
    v = y * torch.where(s > 0, s, torch.inf).rsqrt().unsqueeze(-1)
    return v - ((v @ v.mT) * (s.unsqueeze(-1) < s.unsqueeze(-2))) @ v


def _weighted(f: Tensor, w: Tensor | None) -> Tensor:
    return f if w is None else f * w.unsqueeze(-1)


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


class _Pool(Operation):
    """C and the factors that its gradient needs; every derivative is taken in F, w, ε and p, never in the factors."""

    @staticmethod
    def forward(
        f: Tensor, w: Tensor | None, eps: Tensor, p: Tensor | None, function: SpectralFunction, thin: bool, fine: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scaled = f if w is None else f * w.sqrt().unsqueeze(-1)
        return (_thin_forward if thin else _primal_forward)(scaled, eps, p, function, fine)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Sequence[Any]:
        return *inputs[:4], *outputs[1:], *inputs[4:]

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        wanted = frozenset(i for i in range(4) if needed[i])
        grads = pool_gradient(gradients[0], *saved, wanted)
        return tuple(grad if i in wanted else None for i, grad in enumerate(grads))


def _gram_variation(f: Tensor, w: Tensor | None, df: Tensor | None, dw: Tensor | None, deps: Tensor | None) -> Tensor:
    """dA of A = Fᵀ diag(w) F + εI."""
    d = f.shape[-1]
    total = torch.zeros((*f.shape[:-2], d, d), dtype=f.dtype, device=f.device)
    if df is not None:
        total = total + 2 * symmetrize(_weighted(f, w).mT @ df)
    if dw is not None:
        total = total + f.mT @ (f * dw.unsqueeze(-1))
    if deps is not None:
        total = total + _scaled_identity(deps, d)
    return total


def _first_order(
    g: Tensor,
    f: Tensor,
    w: Tensor | None,
    eps: Tensor,
    p: Tensor | None,
    s: Tensor,
    basis: Tensor,
    y: Tensor,
    function: SpectralFunction,
    thin: bool,
    fine: bool,
    needed: frozenset[int],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of F, w, ε and p, numbered 0 to 3, that are needed."""
    for_f = for_w = for_eps = for_p = None
    if 0 in needed:
        root = None if w is None else w.sqrt().unsqueeze(-1)
        if thin:
            for_f = _thin_backward(g, eps, p, s, basis, y, function)
        else:
            for_f = _primal_backward(g, f if root is None else f * root, eps, p, s, basis, y, function)
        if root is not None:
            for_f = for_f * root
    if 1 in needed:
        for_w = _weight_gradient(g, f, eps, p, s, basis, y, function, thin)
    if 2 in needed:
        for_eps = _directional_trace(g, eps, p, s, basis, y, function, thin)
    if 3 in needed:
        for_p = _pairing(g, eps, p, s, basis, y, function.in_parameter(), thin)
    return for_f, for_w, for_eps, for_p


class _PoolGradient(Operation):
    """Gradients of F, w, ε and p, numbered 0 to 3, as a Function; one that is not needed comes back as an empty tensor.

    With M the derivative of g at A in the direction G they are 2 diag(w) F M, the rows' fᵢMfᵢᵀ, tr M and ⟨G,
    ∂g/∂p(A)⟩. Their own derivatives are those of g at the d×d matrix A, through second divided differences.
    """

    @staticmethod
    def forward(g: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return tuple(g.new_empty((0,)) if grad is None else grad for grad in _first_order(g, *others))

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Sequence[Any]:
        function, _, fine, wanted = inputs[8:]
        return *inputs[:5], function, fine, wanted

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        g, f, w, eps, p, function, fine, wanted = saved
        on_f, on_w, on_eps, on_p = (c if i in wanted else None for i, c in enumerate(gradients))
        g = symmetrize(g)
        a, spectrum = _decompose(f, w, eps, fine)
        # ⟨cotangents, gradients⟩ = ⟨N, M⟩ + on_p ⟨G, ∂g/∂p(A)⟩ with N the variation of A in the directions of the
        # cotangents.
        n = _gram_variation(f, w, on_f, on_w, on_eps)
        m = frechet(a, g, spectrum, function, p)
        on_g = frechet(a, n, spectrum, function, p, on_p)
        on_a = second_frechet(a, g, n, spectrum, function, p)
        grad_p = None
        if p is not None:
            in_p = function.in_parameter()
            along_p = frechet(a, g, spectrum, in_p, p)
            grad_p = (n * along_p).sum((-2, -1))
            if on_p is not None:
                on_a = on_a + on_p[..., None, None] * along_p
                grad_p = grad_p + on_p * (g * spectral(a, spectrum, in_p.in_parameter(), p)).sum((-2, -1))
        fa, fm = f @ on_a, f @ m
        grad_f = 2 * _weighted(fa, w)
        grad_w = _row_products(fa, f)
        if on_f is not None:
            grad_f = grad_f + 2 * _weighted(on_f @ m, w)
            grad_w = grad_w + 2 * _row_products(fm, on_f)
        if on_w is not None:
            grad_f = grad_f + 2 * fm * on_w.unsqueeze(-1)
        grad_eps = on_a.diagonal(dim1=-2, dim2=-1).sum(-1)
        return on_g, grad_f, None if w is None else grad_w, grad_eps, grad_p


def pool_gradient(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients of F, w, ε and p; see `_PoolGradient`."""
    if not differentiated_again():
        return _first_order(*arguments)
    return apply(_PoolGradient, *arguments)


def _prepare_weight(weight: Tensor, f: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give F a region dimension where the weight has one, and the weight the dtype of the computation."""
    check_weight(weight, f, regions=True)
    if weight.ndim == f.ndim:
        f = f.unsqueeze(-3).expand(*weight.shape, f.shape[-1])
    return f, weight.to(dtype)


def _center(f: Tensor, w: Tensor | None) -> Tensor:
    """F minus its (weighted) mean row; a region without weight has mean 0."""
    if f.shape[-2] == 0:
        return f
    if w is None:
        return f - f.mean(-2, keepdim=True)
    total = w.sum(-1, keepdim=True)
    share = w / torch.where(total == 0, 1, total)
    return f - share.unsqueeze(-2) @ f


def check_method(method: str) -> None:
    """Raise unless ``method`` is one of `Method`."""
    if method not in get_args(Method):
        raise ConfigurationError(f'method must be "fused", "svd" or "eig", got {method!r}.')


def second_order_pool(
    f: Tensor,
    *,
    eps: float | Tensor = 1e-3,
    function: FunctionLike = "log",
    exponent: float | Tensor | None = None,
    weight: Tensor | None = None,
    center: bool = False,
    method: Method = "fused",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Pool the rows of a feature map into a function of their second moments.

    .. math:: C = g(F^\top \operatorname{diag}(w) F + \varepsilon I)

    Args:
        f: features ``(*batch, m, d)``, one row a location.
        eps: ε > 0, a number or a tensor broadcastable to the batch (and regions) that receives a gradient.
        function: g, as in `matrix_function`.
        exponent: the exponent of ``function="power"``; a tensor learns.
        weight: mask or soft weights ≥ 0, boolean or floating point, used as given: ``(*batch, m)``, or ``(*batch, r,
            m)`` for r regions that share one feature map.
        center: subtract the (weighted) mean row first, so that C is a function of the covariance; no m×m matrix is
            made.
        method: ``"fused"`` for the thin dual (m < d) or primal form with divided differences. ``"svd"`` and ``"eig"``
            are the paper's DeepO2P-SVD and DeepO2P-EIG, for comparison: they drop tied pairs and lose what the ties
            carry.
        check: whether values are checked. None checks on the CPU only, so that no GPU is waited for; True checks
            everywhere; False never.
        precision: dtype to compute in, float64 unless given; the result has the dtype of ``f``.

    Returns:
        ``(*batch, d, d)``, or ``(*batch, r, d, d)`` with regions; symmetric.

    Raises:
        ShapeError, DtypeError: ``f`` or ``weight`` has the wrong shape, dtype or device.
        NonFiniteError: ``f`` or ``weight`` holds NaN or Inf.
        DomainError: ε is negative or not finite, a weight is negative, or an eigenvalue is outside the domain of g (ε =
            0 with log).

    Gradient:
        For F, weight, ε and the exponent, two orders. The first order in F is 2 diag(w) F L(G) with L the derivative
        of g; it is exact for repeated eigenvalues, dead channels, duplicate rows and weights of zero, and exactly
        zero at F = 0. Directions at the level of rounding, σ ≤ max(m, d) u σ_max, count as absent. The second order
        goes through second divided differences, exact at ties too; for m < d its terms cancel by up to λ_max/ε. Forward
        mode, vmap and fullgraph compilation are supported.

    Example:
        >>> import torch, matbackprop
        >>> f = torch.rand(2, 36, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        >>> c = matbackprop.second_order_pool(f)
        >>> c.shape
        torch.Size([2, 64, 64])
        >>> c.square().mean().backward()
        >>> bool(f.grad.isfinite().all())
        True

    Reference:
        Ionescu, Vantzos, Sminchisescu, "Matrix Backpropagation for Deep Networks with Structured Layers", section 4
        and Corollary "DeepO2P".
    """
    check_matrix(f, "f")
    check_method(method)
    fn, p = resolve_function(function, exponent)
    if not isinstance(eps, Tensor) and (not 0 <= eps < math.inf or (eps == 0 and fn.domain in ("positive", "nonzero"))):
        sign = ">=" if fn.domain in ("nonnegative", "real") else ">"
        raise DomainError(f"{fn.name} needs eps {sign} 0 and finite, got {eps}.")
    looked_at = wants_check(check, f)
    own_kernels = weight is None and not center and method == "fused" and precision in (None, torch.float64)
    if own_kernels and not looked_at and pool_kernels.applies(f, eps, fn):
        shift = parameter_tensor(eps, "eps", f.shape[:-2], f.new_empty((), dtype=torch.float64))
        fixed = shift if isinstance(eps, Tensor) and shift is not None else eps
        return pool_kernels.pool(f, fixed, fn, lambda x: _thin_pool(x, fixed, fn))
    with autocast_off(f.device.type):
        x = f.to(compute_dtype(f.dtype, precision))
        w = None
        if weight is not None:
            x, w = _prepare_weight(weight, x, x.dtype)
        shift = parameter_tensor(eps, "eps", x.shape[:-2], x)
        assert shift is not None
        power = parameter_tensor(p, "exponent", x.shape[:-2], x)
        if looked_at and all(wants_check(check, t) for t in (weight, eps) if isinstance(t, Tensor)):
            _check_values(f, weight, eps, fn)
            if isinstance(p, Tensor):
                check_finite(p, "exponent")
        if center:
            x = _center(x, w)
        if method != "fused":
            return _reference_pool(x, w, shift, power, fn, method).to(f.dtype)
        fine = f.dtype == x.dtype == torch.float64
        if forward_mode_active():  # the variation of C is that of g at the d×d matrix A
            a, spectrum = _decompose(x, w, shift, fine)
            return spectral(a, spectrum, fn, power).to(f.dtype)
        out, *_ = apply(_Pool, x, w, shift, power, fn, x.shape[-2] < x.shape[-1], fine)
        return out.to(f.dtype)


def _thin_pool(f: Tensor, eps: float | Tensor, function: SpectralFunction) -> Tensor:
    """The thin dual form without kernels of our own, differentiable twice."""
    with autocast_off(f.device.type):
        x = f.to(torch.float64)
        shift = parameter_tensor(eps, "eps", x.shape[:-2], x)
        out, *_ = apply(_Pool, x, None, shift, None, function, True, f.dtype == torch.float64)
        return out.to(f.dtype)


def _check_values(f: Tensor, weight: Tensor | None, eps: float | Tensor, function: SpectralFunction) -> None:
    check_finite(f, "f")
    if weight is not None:
        check_weight_values(weight)
    if isinstance(eps, Tensor):
        check_finite(eps, "eps")
        if bool((eps < 0).any()):
            raise DomainError(f"eps must not be negative, its smallest entry is {float(eps.min()):.3g}.")
        check_domain(eps.detach(), function, "eps", "Pass eps > 0.")


def _reference_pool(
    f: Tensor, w: Tensor | None, eps: Tensor, p: Tensor | None, function: SpectralFunction, method: Method
) -> Tensor:
    """The paper's two routes, differentiated through the factors of a decomposition layer that drops tied pairs.

    In the SVD route a weight of zero receives the gradient zero: √w has none there.
    """
    d = f.shape[-1]
    if method == "eig":
        q, v = eigh(
            symmetrize(f.mT @ _weighted(f, w)) + _scaled_identity(eps, d), ties="drop", check=False, precision=f.dtype
        )
    else:
        if w is not None:
            f = _weighted(f, torch.where(w > 0, w.clamp_min(torch.finfo(w.dtype).tiny).sqrt(), 0))
        _, sigma, vh = svd(f, full_matrices=f.shape[-2] < d, ties="drop", check=False, precision=f.dtype)
        q = torch.nn.functional.pad(sigma.square(), (0, d - sigma.shape[-1])) + eps.unsqueeze(-1)
        v = vh.mT
    return (v * function.value(q, _column(p, 1)).unsqueeze(-2)) @ v.mT
