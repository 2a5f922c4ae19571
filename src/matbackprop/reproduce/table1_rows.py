"""The rows of the paper's first table, and rows beyond it: models, and the settings that tuning chooses from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["REFERENCES", "ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: as the table prints it.
        key: as folders and options write it.
        kind: which rows it shares epochs and the number of seeds with.
        paper: the paper's error in percent, or None for a row that the paper does not have.
        model: fields of the configuration that make the row what it is, by dotted name.
        trials: settings to choose from, most promising first.
        group: rows of one group compete: only the one with the smallest error in tuning is trained to the end.
    """

    name: str
    key: str
    kind: Literal["fine", "scratch", "sift"]
    paper: float | None
    model: dict[str, Any]
    trials: list[dict[str, Any]]
    group: str | None = None


def _rates(*pairs: tuple[float, float], **more: Any) -> list[dict[str, Any]]:
    """Settings with rates of the head and shares of them for the backbone."""
    return [{"optimizer.rate": rate, "optimizer.backbone_factor": factor, **more} for rate, factor in pairs]


_SCRATCH = {"model.weights": "none"}
_FC = {"model.head": "fc"}
_O2P = {"model.head": "o2p", "model.function": "log"}
_O2P_FC = {"model.head": "o2p_fc", "model.function": "log"}
_SQRT_FC = {"model.head": "o2p_fc", "model.function": "sqrt"}
_SIFT = {"model.head": "sift", "model.support": "mask", "optimizer.decay": 1e-3}
_BOTH = {"model.head": "both", "model.function": "log", "model.vector_scale": 0.3}
_BOTH_S = {**_BOTH, **_SCRATCH, "model.vector_scale": 0.1}
_NARROW = {"model.reduce": 96}
_MAPS = {**_NARROW, "model.taps": ["pool5", "relu2", "relu3", "relu4"]}
_HALF = {"model.vector_dropout": 0.5}
_MOST = {"model.vector_dropout": 0.8}
_LOUD = {"model.feature_scale": 0.1}  # features of random filters are small


def _scale(value: float) -> dict[str, Any]:
    return {**_MOST, "model.vector_scale": value}


# fmt: off
ROWS = [
    Row("SIFT-O2P", "sift", "sift", 36.4, _SIFT,
        _rates((1e-3, 1.0), (3e-4, 1.0), (3e-3, 1.0), (1e-4, 1.0))),
    Row("AlexNet", "alexnet", "fine", 25.3, _FC,
        _rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), (0.005, 0.2))),
    Row("AlexNet (S)", "alexnet-s", "scratch", 27.2, {**_FC, **_SCRATCH},
        _rates((0.01, 1.0), (0.02, 1.0), (0.005, 1.0), (0.02, 0.5))),
    Row("DeepO2P", "o2p", "fine", 28.6, _O2P,
        [*_rates((1e-3, 0.3), (1e-3, 1.0), (3e-4, 1.0)), *_rates((1e-3, 0.3), **_HALF)]),
    Row("DeepO2P (S)", "o2p-s", "scratch", 32.4, {**_O2P, **_SCRATCH},
        [*_rates((1e-3, 10.0), (1e-3, 3.0), (3e-4, 10.0)), *_rates((1e-3, 10.0), **_LOUD)]),
    Row("DeepO2P-FC", "o2p-fc", "fine", 25.2, _O2P_FC,
        _rates((0.01, 0.1), (0.01, 0.03), (0.003, 0.1), (0.003, 0.3))),
    Row("DeepO2P-FC (S)", "o2p-fc-s", "scratch", 28.9, {**_O2P_FC, **_SCRATCH},
        [*_rates((0.01, 1.0), (0.003, 3.0), (0.003, 1.0)), *_rates((0.01, 1.0), **_LOUD)]),
    # Beyond the paper: of each group the best in tuning is trained to the end. The plain DeepO2P knows its training
    # regions by heart (loss 0.1 after 12 epochs, 0.25 after 20 from scratch), so these drop half of the descriptor or
    # more.
    Row("DeepO2P, dropout", "o2p-drop", "fine", None, _O2P,
        [*_rates((1e-3, 1.0), **_HALF), *_rates((1e-3, 1.0), (1e-3, 0.3), (3e-3, 0.3), **_MOST)], "fine"),
    Row("DeepO2P-FC, square root", "sqrt-fc", "fine", None, _SQRT_FC,
        _rates((0.01, 0.1), (0.01, 0.03), (0.003, 0.1), (0.02, 0.1)), "fine"),
    Row("first and second order, log at 6×6", "both-log", "fine", None, _BOTH,
        [*_rates((0.01, 0.1), **_HALF), *_rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), **_MOST)], "fine"),
    Row("DeepO2P on 96 channels", "o2p-narrow", "fine", None, {**_O2P, **_NARROW},
        [*_rates((1e-3, 1.0), (3e-3, 0.3), **_MOST), *_rates((1e-3, 1.0), (3e-3, 0.3), **_HALF)], "fine"),
    Row("DeepO2P on four maps", "o2p-maps", "fine", None, {**_O2P, **_MAPS},
        [*_rates((1e-3, 1.0), (1e-3, 0.3), (3e-3, 0.3), **_MOST), *_rates((1e-3, 1.0), **_HALF)], "fine"),
    Row("first and second order on four maps", "both-maps", "fine", None, {**_BOTH, **_MAPS},
        [*_rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), **_MOST), *_rates((0.01, 0.1), **_scale(0.6))], "fine"),
    Row("DeepO2P, dropout (S)", "o2p-drop-s", "scratch", None, {**_O2P, **_SCRATCH},
        [*_rates((3e-4, 10.0), **_HALF), *_rates((3e-4, 10.0), (3e-4, 30.0), (1e-3, 3.0), **_MOST)], "scratch"),
    Row("first and second order on four maps (S)", "both-maps-s", "scratch", None, {**_BOTH_S, **_MAPS},
        [*_rates((0.02, 1.0), (0.01, 1.0), (0.02, 0.5), **_MOST), *_rates((0.01, 1.0), **_scale(0.2))], "scratch"),
    Row("first and second order, log at 6×6 (S)", "both-log-s", "scratch", None, _BOTH_S,
        [*_rates((0.02, 0.5), **_HALF), *_rates((0.02, 0.5), (0.01, 1.0), **_MOST),
         *_rates((0.02, 0.5), **_scale(0.3))], "scratch"),
]
# fmt: on

REFERENCES = {"fine": "alexnet", "scratch": "alexnet-s", "sift": "alexnet"}
"""The row that each kind is compared with."""
