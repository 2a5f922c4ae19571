"""Features, labels and the table of normalized-cut objectives that the tests of every property run over."""

import torch

from matbackprop import normalized_cut_j1, normalized_cut_j2, normalized_cut_soft
from matbackprop.functional._normalized_cut_dense import (
    normalized_cut_j1_dense,
    normalized_cut_j2_dense,
    normalized_cut_soft_dense,
)


def features(*shape, seed=0, dtype=torch.float64, device="cpu"):
    """Non-negative features, sparse as after a ReLU but with no empty row."""
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(*shape, generator=generator, dtype=torch.float64).relu()
    f = f + 0.05 * torch.rand(*shape, generator=generator, dtype=torch.float64)
    return f.to(dtype).to(device)


def regions(*shape, k=4, ignored=0.0, seed=0, device="cpu"):
    """Labels in which every region occurs; a share of the rows is −1."""
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
