"""Features, labels and the table of normalized-cut objectives that the tests of every property run over."""

import torch

from matbackprop import (
    affinity,
    normalized_affinity,
    normalized_cut_j1,
    normalized_cut_j2,
    normalized_cut_soft,
    projector,
)

# The objectives as the paper defines them, F → W → (M, Ω) → (Π_M, Π_Ω) → J, with m×m matrices, of one image without
# ignored rows.


def _psi(labels, dtype):
    """Π_Ψ, the projector on the indicators of the regions."""
    e = torch.nn.functional.one_hot(torch.unique(labels, return_inverse=True)[1]).to(dtype)
    return (e / e.sum(0)) @ e.mT


def normalized_cut_j1_dense(f, labels, lam=None, rank_tol=1e-9):
    """J₁ = ½‖Π_M − Π_Ω‖² through the dense layers."""
    m, omega = normalized_affinity(affinity(f, lam), labels)
    return 0.5 * (projector(m, rank_tol=rank_tol) - projector(omega, rank_tol=rank_tol)).square().sum()


def normalized_cut_j2_dense(f, labels, rank_tol=1e-9):
    """J₂ = ½‖Π_W − Π_Ψ‖² through the dense layers."""
    return 0.5 * (projector(affinity(f), rank_tol=rank_tol) - _psi(labels, f.dtype)).square().sum()


def normalized_cut_soft_dense(f, labels, ridge=0.3):
    """½‖Π_λ − Π_Ψ‖² with Π_λ = F(FᵀF + (λ/d)I)⁻¹Fᵀ of features scaled to unit trace."""
    f = f / f.square().sum().sqrt()
    eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    soft = f @ torch.linalg.solve(f.mT @ f + (ridge / f.shape[-1]) * eye, f.mT)
    return 0.5 * (soft - _psi(labels, f.dtype)).square().sum()


def features(*shape, seed=0, dtype=torch.float64, device="cpu"):
    """Non-negative features, sparse as after a ReLU but with no empty row."""
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(*shape, generator=generator, dtype=torch.float64).relu()
    f = f + 0.05 * torch.rand(*shape, generator=generator, dtype=torch.float64)
    return f.to(dtype).to(device)


def regions(*shape, k=4, ignored=0.0, seed=0, device="cpu"):
    """Labels in which every region occurs; a fraction of the rows is −1."""
    generator = torch.Generator().manual_seed(seed + 100)
    labels = torch.randint(k, shape, generator=generator)
    labels[..., :k] = torch.arange(k)
    hide = torch.rand(shape, generator=generator) < ignored
    hide[..., :k] = False
    return labels.masked_fill(hide, -1).to(device)


def lambda_matrix(d, seed=0, device="cpu"):
    """A well-conditioned, non-negative, non-symmetric Λ."""
    generator = torch.Generator().manual_seed(seed + 200)
    return (torch.eye(d, dtype=torch.float64) + 0.5 * torch.rand(d, d, generator=generator, dtype=torch.float64)).to(
        device
    )


# name → (thin form, dense form); both take (f, labels, **keywords of the thin form).
OBJECTIVES = {
    "j1": (normalized_cut_j1, normalized_cut_j1_dense),
    "j2": (normalized_cut_j2, normalized_cut_j2_dense),
    "soft": (normalized_cut_soft, normalized_cut_soft_dense),
}


def dense_value(name, f, labels, weight=None, **keywords):
    """The dense objective of one image: ignored rows are taken out and weighted rows repeated."""
    kept = labels >= 0
    f, labels = f[kept], labels[kept]
    if weight is not None:
        times = weight[kept].long()
        f, labels = f.repeat_interleave(times, 0), labels.repeat_interleave(times)
    return OBJECTIVES[name][1](f, labels, **keywords)
