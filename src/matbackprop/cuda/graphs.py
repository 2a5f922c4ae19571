"""Record sequences of small kernels as CUDA graphs and replay them, because launches cost more than the kernels."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

_KEPT = 6  # graphs cached per thread, each with its memory
_thread = threading.local()

Chain = Callable[..., tuple[Tensor, ...]]


class _Recorded:
    def __init__(self, chain: Chain, inputs: Sequence[Tensor]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False), torch.no_grad():  # the memory is rewritten in any mode
            self.inputs = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.outputs = chain(*self.inputs)

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for copy, given in zip(self.inputs, inputs, strict=True):
            copy.copy_(given)
        self.graph.replay()
        return tuple(x.clone() for x in self.outputs)


def replayed(name: Hashable, chain: Chain, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Call ``chain(*inputs)`` on CUDA tensors, replayed from a recording from the second call with the same shapes on.

    Args:
        name: key of the chain, which includes all its arguments that are not tensors.
        chain: a function of tensors alone that neither synchronizes nor copies from the host.
        inputs: its arguments; they are copied.

    Returns:
        The results of the chain, in new memory, without a gradient. Recording, in the second call, synchronizes once.
        If the caller is recording a graph, or recording failed, the chain is called.
    """
    if torch.cuda.is_current_stream_capturing():
        return chain(*inputs)
    recorded: OrderedDict[Any, _Recorded | Literal["not yet", "impossible"]] = _thread.__dict__.setdefault(
        "recorded", OrderedDict()
    )
    with torch.cuda.device(inputs[0].device):
        stream = torch.cuda.current_stream().cuda_stream
        key = (name, inputs[0].get_device(), stream, tuple((tuple(x.shape), x.dtype) for x in inputs))
        if key not in recorded:  # the first call allocates, which recording does not allow
            recorded[key] = "not yet"
            while len(recorded) > _KEPT:
                recorded.popitem(last=False)
            return chain(*inputs)
        recorded.move_to_end(key)
        graph = recorded[key]
        if graph == "not yet":
            try:
                graph = recorded[key] = _Recorded(chain, inputs)
            except RuntimeError:  # other work on the device prevents recording
                graph = recorded[key] = "impossible"
                # The generator is still in recording mode, in which dropout would fail.
                random = torch.cuda.default_generators[inputs[0].get_device()]
                random.graphsafe_set_state(random.clone_state())
        return chain(*inputs) if isinstance(graph, str) else graph(inputs)
