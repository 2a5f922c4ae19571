"""Inverse roots of positive semidefinite matrices with damping, as preconditioners need them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matbackprop.checks import check_finite, check_matrix, check_range, check_symmetric, parameter_tensor, wants_check
from matbackprop.divided_differences import announcing_overflow, named_function, resolve_function
from matbackprop.errors import DomainError
from matbackprop.functional._eigh import eigh
from matbackprop.functional._matrix_function import round_to_domain
from matbackprop.functional._spectrum import Spectrum, spectral
from matbackprop.numerics import autocast_off, compute_dtype, real_dtype, symmetrize
from matbackprop.solvers import batched_eigh

__all__ = ["check_damping", "check_positive", "check_root", "inverse_root", "inverse_root_in"]


def check_root(p: float) -> None:
    """Raise unless ``p`` is a positive number."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not (math.isfinite(p) and p > 0):
        raise DomainError(f"p must be a positive number, as 4 for the inverse fourth root; got {p!r}.")


def check_damping(eps: float) -> None:
    """Raise unless ``eps`` is a finite number ≥ 0."""
    if not (math.isfinite(eps) and eps >= 0):
        raise DomainError(f"eps must be a finite number ≥ 0, got {eps}.")


def inverse_root(
    a: Tensor,
    p: float,
    *,
    eps: float = 0.0,
    relative: bool = False,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Inverse root of damped positive semidefinite matrices, :math:`(A + \varepsilon I)^{-1/p}`.

    .. math:: U \operatorname{diag}\bigl((\lambda + \varepsilon)^{-1/p}\bigr) U^\top, \qquad
        A = U \operatorname{diag}(\lambda) U^\top

    Shampoo preconditions a gradient of two dimensions by the inverse fourth roots of two such matrices.

    Args:
        a: symmetric or Hermitian positive semidefinite matrices ``(*batch, n, n)``; that part of them is used.
        p: the root, any number > 0: 2 and 4 are usual.
        eps: ε ≥ 0, added to the eigenvalues.
        relative: multiply ε by the largest eigenvalue of each matrix, so that no condition number exceeds 1 + 1/ε.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``, symmetric, in the dtype of ``a``.

    Raises:
        ShapeError, DtypeError: ``a`` is not a batch of square floating-point matrices.
        NonFiniteError, SymmetryError: ``a`` holds NaN or Inf, or is not symmetric.
        DomainError: λ + ε is not positive, p is not positive, ε is negative, or the largest entry of ``a`` is near the
            ends of floating point.

    Gradient:
        That of `matrix_power` with the exponent −1/p: two orders, exact at repeated eigenvalues. With ``relative`` that
        of the largest eigenvalue is part of it, which where it is repeated is that of the vector chosen. Eigenvalues
        that are negative by rounding alone, of the dtype of ``a``, count as zero.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.inverse_root(torch.diag(torch.tensor([0.0, 15.0])), 4, eps=1.0).diagonal()
        tensor([1.0000, 0.5000])

    Reference:
        Gupta, Koren, Singer, Shampoo: preconditioned stochastic tensor optimization, ICML 2018.
    """
    check_matrix(a, "a", square=True, or_complex=True)
    check_root(p)
    check_damping(eps)
    with autocast_off(a.device.type):
        return inverse_root_in(compute_dtype(precision, a.dtype), a, p, eps, relative, check).to(a.dtype)


def inverse_root_in(
    dtype: torch.dtype,
    a: Tensor,
    p: float,
    eps: float,
    relative: bool = False,
    check: bool | None = None,
    name: str = "a",
) -> Tensor:
    """`inverse_root` in the dtype of the computation; what counts as rounding is still decided by the dtype of A."""
    wanted = wants_check(check, a)
    if wanted:
        check_finite(a, name)
        check_range(a, real_dtype(dtype), name)
        check_symmetric(a, name)
    n = a.shape[-1]
    x = symmetrize(a.to(dtype))
    shift = torch.full(x.shape[:-2], eps, dtype=real_dtype(x.dtype), device=x.device)
    if relative and eps and n:  # λ_max takes part in the gradient
        values, vectors = eigh(x, precision=real_dtype(x.dtype), check=False)
    else:
        values, vectors = batched_eigh(x.detach())
    if relative and n:
        shift = shift * values[..., -1]
    values = round_to_domain(values.detach(), named_function("sqrt"), a.dtype) + shift.detach().unsqueeze(-1)
    if wanted:
        check_positive(values, eps, name)
    function, exponent = resolve_function("power", -1.0 / p)
    damped = x + torch.diag_embed(shift.unsqueeze(-1).expand(x.shape[:-1])).to(x.dtype)
    parameter = parameter_tensor(exponent, "p", x.shape[:-2], x)
    if wanted:
        function = announcing_overflow(function)
    return spectral(damped, Spectrum(values, vectors.detach()), function, parameter)


def check_positive(values: Tensor, eps: float, name: str) -> None:
    """Raise unless all damped eigenvalues are positive."""
    bad = (values <= 0).any(-1)
    if bool(bad.any()):
        raise DomainError(
            f"{name} needs positive eigenvalues; {int(bad.sum())} of {bad.numel()} matrices have one down to "
            f"{float(values.min()):.3g} after damping by eps={eps}. Pass a larger eps, and look for a matrix that is "
            f"not positive semidefinite."
        )
