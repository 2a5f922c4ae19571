"""Networks as CUDA graphs: where batches are small, launching kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GraphedNetwork"]


class _Call(nn.Module):
    """The network once more, because what is captured takes the place of a module's ``forward``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class GraphedNetwork:
    """Forward and backward of a network in training, captured once for each shape of its input and then replayed.

    Parameters may change but must stay where they are, as optimisers and checkpoints leave them. An output is
    overwritten by the next one of its shape.

    Args:
        network: a module of one tensor that returns a tensor, on a CUDA device and in training mode.
        samples: an input of each shape. They are run a few times, which draws from the device's random numbers.
    """

    def __init__(self, network: nn.Module, samples: Sequence[Tensor]) -> None:
        self._graphs: dict[torch.Size, Any] = {
            sample.shape: torch.cuda.make_graphed_callables(_Call(network), (sample,), allow_unused_input=True)
            for sample in samples
        }

    def __contains__(self, x: Tensor) -> bool:
        """Whether the shape of ``x`` has been captured."""
        return x.shape in self._graphs

    def __call__(self, x: Tensor) -> Tensor:
        """The output for an input of a captured shape."""
        out: Tensor = self._graphs[x.shape](x)
        return out
