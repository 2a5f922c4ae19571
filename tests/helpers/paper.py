"""The paper's notation for tests that follow it: operators on matrices, derivatives by differences, decompositions in
one smooth gauge."""

import torch


def matrix(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spd(n, seed=0):
    x = matrix(n, n, seed=seed)
    return x @ x.mT + torch.eye(n, dtype=torch.float64)


def sym(a):
    """A_sym."""
    return 0.5 * (a + a.mT)


def diag_part(a):
    """A_diag: A on the main diagonal, zero elsewhere, also for a rectangular A."""
    return a * torch.eye(*a.shape, dtype=a.dtype)


def colon(a, b):
    """A : B."""
    return (a * b).sum()


def variation(function, x, dx, step=1e-4):
    """d f(x; dx) by a five-point difference; its error is about 1e-11 for a smooth f of size one."""

    def at(t):
        value = function(x + t * step * dx)
        return value if isinstance(value, tuple) else (value,)

    out = tuple(
        (8 * (p - q) - (pp - qq)) / (12 * step) for p, q, pp, qq in zip(at(1), at(-1), at(2), at(-2), strict=True)
    )
    return out if len(out) > 1 else out[0]


def error(a, b):
    """Largest difference of two matrices."""
    return float((a - b).detach().abs().max())


def full_svd(x):
    """U (m×m), Σ (m×n), V (n×n) of the paper, for any gauge."""
    u, s, vh = torch.linalg.svd(x, full_matrices=True)
    sigma = torch.zeros_like(x)
    sigma[range(len(s)), range(len(s))] = s
    return u, sigma, vh.mT


def svd_near(u0, v0):
    """The SVD as a smooth function near a point: signs follow U₀, V₀, and U₂ keeps U₂ᵀdU₂ = 0."""
    n = v0.shape[0]

    def function(x):
        u, sigma, v = full_svd(x)
        signs = torch.sign((v0 * v).sum(0))
        u1, v = u[:, :n] * signs, v * signs
        outside = u0[:, n:] - u1 @ (u1.mT @ u0[:, n:])
        left, _, right = torch.linalg.svd(outside, full_matrices=False)
        return torch.cat([u1, left @ right], 1), sigma, v

    return function


def eig_near(u0):
    """The eigendecomposition (U, Σ) as a smooth function near a point: signs follow U₀."""

    def function(x):
        values, u = torch.linalg.eigh(sym(x))
        return u * torch.sign((u0 * u).sum(0)), torch.diag(values)

    return function


def inverse_gaps(values):
    """The matrix with 1/(vᵢ − vⱼ) off the diagonal and 0 on it: K for σ², K̃ for σ."""
    gap = values.unsqueeze(1) - values.unsqueeze(0)
    return torch.where(torch.eye(len(values), dtype=torch.bool), 0.0, 1 / gap)
