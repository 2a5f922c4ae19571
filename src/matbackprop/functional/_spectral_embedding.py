"""Leading eigenvectors of the normalized affinity, from a small eigenproblem."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.checks import check_matrix, check_result, check_weight, nan_where, prepare, valid_weight
from matbackprop.errors import DomainError
from matbackprop.functional._affinity import degrees, negative_degrees
from matbackprop.functional._eigh import positive_phase
from matbackprop.functional._row_eigh import row_eigh
from matbackprop.functional._ties import Ties, check_ties
from matbackprop.numerics import autocast_off, gram_tolerance, is_double
from matbackprop.refinement import ill_determined


def spectral_embedding(
    f: Tensor,
    k: int,
    *,
    weight: Tensor | None = None,
    rank_tol: float | torch.dtype | None = None,
    ties: Ties = "raise",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Leading eigenpairs of the normalized affinity of W = FFᵀ, in O(md²).

    .. math::
        M = D^{-1/2}FF^\top D^{-1/2},\quad B = F^\top D^{-1}F = V\beta V^\top,\quad U = D^{-1/2}FV\beta^{-1/2}

    U has orthonormal columns and MU = Uβ. The first eigenvalue is 1, with the eigenvector D^{1/2}1.

    Args:
        f: features ``(*batch, m, d)`` with nonnegative degrees FFᵀ1. Rows of degree zero are zero in U.
        k: number of eigenpairs, at most min(m, d).
        weight: multiplicity of each row ``(*batch, m)``; 0 ignores the row. U has one row for all repetitions of a row,
            and Uᵀ diag(weight) U = I.
        rank_tol: relative rank tolerance of F, or the dtype of its precision, as in `projector`. Eigenvalues below it,
            and their eigenvectors, are returned as zero.
        ties: treatment of equal eigenvalues in the gradient of eigenvectors, as in :func:`~matbackprop.eigh`.
        check, precision: as in `matrix_function`.

    Returns:
        Descending eigenvalues ``(*batch, k)``, eigenvectors ``(*batch, m, k)`` in columns and degrees ``(*batch, m)``,
        in the dtype of ``f``. Signs are chosen such that the largest entry of each column of V is positive.

    Raises:
        DomainError: ``k`` is out of range, or a degree or weight is negative.
        TieError: see ``ties``.

    Gradient:
        With respect to F and weights. If m > d or weights are given, second derivatives of eigenvectors have a relative
        error of about uβ₁/βᵢ, with u the unit roundoff. For eigenvectors at ties, see `eigh`. For a loss of the span of
        all d vectors, use `projector` of D^(−½)F, which is exact at ties.

    Example:
        >>> import torch, matbackprop
        >>> f = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])  # two separate groups
        >>> values, vectors, degrees = matbackprop.spectral_embedding(f, 2)
        >>> values, degrees
        (tensor([1., 1.]), tensor([3., 6., 1.]))

    Reference:
        Ionescu et al. (2015), section 5; Bach and Jordan, Learning spectral clustering, with application to speech
        separation, JMLR 7 (2006).
    """
    check_matrix(f, "f")
    m, d = f.shape[-2:]
    if not isinstance(k, int) or not 1 <= k <= min(m, d):
        raise DomainError(
            f"k must be an integer in 1 … {min(m, d)} for features of shape {tuple(f.shape)} (the rank of M), got {k}. "
            f"Use more feature channels for more eigenvectors."
        )
    check_ties(ties, None, 1.0)
    if weight is not None:
        check_weight(weight, f)
    with autocast_off(f.device.type):
        x, check_values, *_ = prepare(f, "f", check, precision, sizes="products", or_complex=False, others=(weight,))
        w = torch.ones_like(x[..., 0]) if weight is None else valid_weight(weight, x.dtype, check_values)
        degree = degrees(x, w)
        bad = negative_degrees(degree, check_values, w)
        positive = (degree > 0).unsqueeze(-1)
        # divided, because the derivative of degree ** −½ underflows for large features
        scaled = x * positive / torch.where(positive, degree.unsqueeze(-1), 1).sqrt()
        tol = gram_tolerance(f.dtype, x.dtype, d, rank_tol)

        def lost(values: Tensor) -> Tensor:
            return ill_determined(values[..., -k:], is_double(f.dtype), tol=tol)

        small = weight is None and m <= d
        if small:  # U as eigenvectors of M, because FVβ^(−½) loses digits of second derivatives
            values, rows, vectors = row_eigh(scaled.mT, None, lost, ties=ties, check=check)
            rows = rows * positive
        else:
            counts = None if weight is None else w
            values, vectors, rows = row_eigh(scaled, counts, lost, ties=ties, check=check)
        values, vectors, rows = (t[..., -k:].flip(-1) for t in (values, vectors, rows))
        kept = values > tol * values[..., :1]
        down = kept if small else torch.where(kept, values, 1).rsqrt() * kept
        embedding = rows * (positive_phase(vectors) * down.unsqueeze(-2))
        degree = degree.to(f.dtype)
        if check_values:
            check_result(degree, "A degree", "Scale the features.")
        values, embedding = nan_where(bad, values * kept), nan_where(bad, embedding)
        return values.to(f.dtype), embedding.to(f.dtype), degree
