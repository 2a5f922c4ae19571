"""What a suite is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Scale = Literal["quick", "full"]


@dataclass(frozen=True)
class Entry:
    """One method on one case.

    Attributes:
        case: what is computed.
        method: who computes it.
        build: makes, for a device, the call that is measured. It raises MissingPeer where the method is not installed.
        kind: ``time`` for a call that is timed, ``error`` for one that returns a relative error.
        parameters: numbers of the case, for plots.
        note: what a reader has to know.
    """

    case: str
    method: str
    build: Callable[[torch.device], Callable[[], Any]]
    kind: Literal["time", "error"] = "time"
    parameters: Mapping[str, float | str] = field(default_factory=dict)
    note: str = ""


Suite = Callable[[torch.device, Scale], Iterator[Entry]]
