"""Steps as CUDA graphs: where batches are small, launching kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GraphedModule"]


class _Call(nn.Module):
    """The module once more, because what is captured takes the place of a module's ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)


class GraphedModule:
    """Forward and backward of a module in training, captured once for all shapes of its input and then replayed.

    Parameters may change but must stay where they are, as optimisers and checkpoints leave them. What comes out is
    overwritten by the next call with these shapes, and so are the gradients: they cannot be summed over several calls.

    Args:
        module: of tensors that returns a tensor, on a CUDA device and in training mode.
        samples: inputs of each kind of shapes. They are run a few times, which draws from the device's random numbers.
    """

    def __init__(self, module: nn.Module, samples: Sequence[tuple[Tensor, ...]]) -> None:
        # Capturing happens on a stream of its own; gradients belong to the one that training runs on.
        self._owners = [p.expand_as(p).grad_fn for p in module.parameters() if p.requires_grad]
        self._graphs: dict[tuple[torch.Size, ...], Any] = {
            _shapes(sample): torch.cuda.make_graphed_callables(_Call(module), sample, allow_unused_input=True)
            for sample in samples
        }

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The output for inputs of captured shapes."""
        out: Tensor = self._graphs[_shapes(inputs)](*inputs)
        return out


def _shapes(inputs: Sequence[Tensor]) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in inputs)
