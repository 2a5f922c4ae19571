"""Best approximation of a given rank."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.checks import nan_where, prepare, raise_or_nan
from matbackprop.divided_differences import KEEP_LARGE, without_derivatives
from matbackprop.errors import DomainError, TieError
from matbackprop.functional._function import with_derivatives_of
from matbackprop.functional._spectrum import Spectrum, spectral
from matbackprop.numerics import autocast_off, gap_tolerance, is_double
from matbackprop.solvers import batched_svd


def check_rank(rank: int) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise DomainError(f"rank must be an integer ≥ 0, got {rank!r}.")


def low_rank(a: Tensor, rank: int, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Best approximation of a given rank, :math:`A_k = \sum_{i \le k} \sigma_i u_i v_i^\top`.

    .. math:: A_k = \operatorname*{argmin}_{\operatorname{rank} X \le k} \|A - X\|_F

    Args:
        a: matrices ``(*batch, m, n)``, real or complex.
        rank: k ≥ 0. The result is A if k ≥ min(m, n).
        check, precision: as in `matrix_function`.

    Returns:
        A_k ``(*batch, m, n)`` in the dtype of ``a``.

    Raises:
        DomainError: ``rank`` is negative.
        TieError: σ_k = σ_{k+1}, and the approximation is not unique.

    Gradient:
        Divides by σᵢ ± σⱼ only for singular values on different sides of the cut. It is exact at repeated and at zero
        singular values on one side. First and second order, forward mode and vmap. At a matrix of rank less than k the
        derivative does not exist, and backward raises DomainError.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.low_rank(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2).diagonal()
        tensor([3., 2., 0.])

    Reference:
        Eckart and Young (1936).
    """
    check_rank(rank)
    x, check_values, *_ = prepare(a, "a", check, precision, sizes="sums")
    m, n = a.shape[-2:]
    if rank >= min(m, n):
        return a.clone()
    with autocast_off(a.device.type):
        u, s, vh = batched_svd(x.detach(), fine=is_double(a.dtype))
        s = torch.where(s <= gap_tolerance(s.dtype, s.shape[-1]) * s[..., :1], 0, s)  # rounding errors
        cut, function = s[..., rank], KEEP_LARGE
        short = s[..., rank - 1] == 0 if rank else None
        if check_values and short is not None and bool(short.any()):
            refusal = f"The derivative at a matrix of rank less than {rank} does not exist. Use a smaller rank."
            function = without_derivatives(KEEP_LARGE, refusal)
        v = vh.mH
        vectors = torch.cat([torch.cat([u, u], -1), torch.cat([v, -v], -1)], -2) * 0.5**0.5
        spectrum = Spectrum(torch.cat([s, -s], -1), vectors, torch.zeros_like(cut))
        top = torch.nn.functional.pad(x, (m, 0))
        whole = torch.cat([top, torch.nn.functional.pad(x.mH, (0, n))], -2)
        out = spectral(whole, spectrum, function, cut)[..., :m, m:]
        if short is not None:
            out = with_derivatives_of(nan_where(short, out), out)
            tied = (s[..., rank - 1] - cut <= gap_tolerance(s.dtype, s.shape[-1]) * s[..., 0]) & (cut > 0)
            fault = f"have equal singular values on both sides of rank {rank}. Choose another rank."
            out = raise_or_nan(tied, out, check_values, TieError, fault)
        return out.to(a.dtype)
