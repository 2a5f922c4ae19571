"""A training step of region classifiers: AlexNet with fully connected layers, second-order pooling, and both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.suites.entry import Entry, Scale, captured
from matbackprop.vision.models.config import Head
from matbackprop.vision.models.deep_o2p import RegionClassifier

Way = Callable[[nn.Module, Tensor, Tensor], Callable[[], Any]]
_HEADS: dict[str, Head] = {"AlexNet": "fc", "DeepO2P": "o2p", "DeepO2P-FC": "o2p_fc"}


def _eager(model: nn.Module, images: Tensor, targets: Tensor) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()

    return step


def _graphed(model: nn.Module, images: Tensor, targets: Tensor) -> Callable[[], Any]:
    """The whole step recorded as a CUDA graph."""
    return captured(_eager(model, images, targets))


def _compiled(model: nn.Module, images: Tensor, targets: Tensor) -> Callable[[], Any]:
    model.compile(fullgraph=True)
    return _eager(model, images, targets)


def _build(head: Head, way: Way, batch: int, canvas: int, hidden: int, device: torch.device) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = RegionClassifier(80, head=head, canvas=canvas, hidden=hidden).to(device)
    images = torch.rand(batch, 3, canvas, canvas, device=device)
    return way(model, images, torch.randint(0, 80, (batch,), device=device))


def training_step(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """Forward, backward and SGD with momentum; on CUDA also recorded as a CUDA graph, and compiled in one graph."""
    batch = 2 if scale == "quick" else 100 if device.type == "cuda" else 8
    canvas, hidden = (99, 32) if scale == "quick" else (227, 4096)
    case = f"training step, batch {batch}"
    ways: dict[str, Way] = {"": _eager}
    if device.type == "cuda":
        ways[", CUDA graph"] = _graphed
        ways[", compiled"] = _compiled
    for suffix, way in ways.items():
        for name, head in _HEADS.items():
            if way is _compiled and head != "o2p":
                continue
            yield Entry(case, f"{name}{suffix}", partial(_build, head, way, batch, canvas, hidden))
