"""Training steps as CUDA graphs, for small batches whose kernels take longer to launch than to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from matbackprop._torch import scaled

_WARM_UP = 3


class _Graph:
    """Value and gradient of a loss for one input shape, captured as a graph."""

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter], sample: Sequence[Tensor]) -> None:
        self.inputs = [x.clone() for x in sample]
        # New leaves on the same memory: the module's belong to the stream of the training.
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._compute(module, leaves)
        here.wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.value, gradients = self._compute(module, leaves)
        # Parameters that the loss does not depend on get no gradient.
        self.parameters = [p for p, g in zip(parameters.values(), gradients, strict=True) if g is not None]
        self.gradients = [g for g in gradients if g is not None]

    def _compute(self, module: nn.Module, leaves: dict[str, Tensor]) -> tuple[Tensor, Sequence[Tensor | None]]:
        value = functional_call(module, leaves, tuple(self.inputs))
        return value.detach(), torch.autograd.grad(value, tuple(leaves.values()), allow_unused=True)


class _Replay(torch.autograd.Function):
    """A replay computes value and gradient; the backward pass scales the gradient."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, *parameters: Tensor) -> Tensor:
        ctx.graph = graph
        graph.graph.replay()
        return graph.value.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, *scaled(ctx.graph.gradients, g)


class GraphedLoss:
    """A loss of a module in training, captured with its gradient once for each shape of its first input.

    Parameters must keep their memory, as with in-place updates. Call backward before the next call.

    Args:
        module: of tensors that returns a scalar, on a CUDA device and in training mode.
        samples: inputs of each shape. They are run a few times, which advances the device's random generator.
    """

    def __init__(self, module: nn.Module, samples: Sequence[tuple[Tensor, ...]]) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._graphs = {sample[0].shape: _Graph(module, parameters, sample) for sample in samples}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the loss of inputs with the shapes of a sample."""
        graph = self._graphs[inputs[0].shape]
        for static, x in zip(graph.inputs, inputs, strict=True):
            static.copy_(x, non_blocking=True)
        out: Tensor = _Replay.apply(graph, *graph.parameters)
        return out
