"""Entries of a suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Scale = Literal["quick", "full"]


@dataclass(frozen=True)
class Entry:
    """One method on one case.

    ``build`` returns the call to measure on a device; it raises MissingPeer if the method is not installed. A call of
    kind ``error`` returns a relative error. ``parameters`` are for plots, ``note`` is for readers.
    """

    case: str
    method: str
    build: Callable[[torch.device], Callable[[], Any]]
    kind: Literal["time", "error"] = "time"
    parameters: Mapping[str, float | str] = field(default_factory=dict)
    note: str = ""


Suite = Callable[[torch.device, Scale], Iterator[Entry]]


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call as a CUDA graph after three calls on another stream, and return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
