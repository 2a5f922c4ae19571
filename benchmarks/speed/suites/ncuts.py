"""The normalized-cut objectives, forward and backward: a batch of feature grids, and one image at full size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.suites.entry import Entry, Scale
from matbackprop.functional._normalized_cut import normalized_cut_j1, normalized_cut_j2
from matbackprop.functional._normalized_cut_soft import normalized_cut_soft

_LARGEST_DENSE = 2000  # maximum number of rows for m×m projectors


def _dense_j2(f: Tensor, labels: Tensor, *, num_labels: int) -> Tensor:
    """J₂ by its definition, with m×m projectors and autograd through the pseudoinverse."""
    e = torch.nn.functional.one_hot(labels, num_labels).to(f.dtype)
    p = f @ torch.linalg.pinv(f)
    q = e @ torch.linalg.pinv(e)
    return 0.5 * (p - q).square().sum((-2, -1))


def _build(
    objective: Callable[..., Tensor], f: Tensor, labels: Tensor, k: int, device: torch.device
) -> Callable[[], Any]:
    x, y = f.to(device).requires_grad_(), labels.to(device)
    return lambda: torch.autograd.grad(objective(x, y, num_labels=k).sum(), x)


def ncuts(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """J₂, soft and J₁ for 32 grids of 600 cells with 5 to 40 regions, and for one 481×321 image; float32, d = 20."""
    d = 4 if scale == "quick" else 20
    for batch, m in ((2, 40),) if scale == "quick" else ((32, 600), (1, 481 * 321)):
        generator = torch.Generator().manual_seed(m)
        most = min(40, m // 2)
        counts = torch.randint(min(5, most), most + 1, (batch, 1), generator=generator)
        labels = (torch.rand(batch, m, generator=generator) * counts).long()
        f = torch.rand(batch, m, d, generator=generator)
        methods: dict[str, Callable[..., Tensor]] = {
            "matbackprop, J₂": normalized_cut_j2,
            "matbackprop, soft": normalized_cut_soft,
            "matbackprop, J₁": normalized_cut_j1,
        }
        if m <= _LARGEST_DENSE:
            methods["J₂ by m×m projectors + autograd"] = _dense_j2
        for method, objective in methods.items():
            case = f"{batch} image{'s' if batch > 1 else ''} of {m} cells, d = {d}"
            yield Entry(case, method, partial(_build, objective, f, labels, most))
