"""AlexNet's convolutions in torchvision's layout, with its keys (``features.N.weight``)."""

from __future__ import annotations

from torch import nn

from matbackprop.models.backbones.base import LayerStack


class AlexNet(LayerStack):
    """AlexNet (torchvision's variant: no local response normalisation, no groups)."""

    def __init__(self) -> None:
        features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
        )
        super().__init__(features, {"relu1": 1, "relu2": 4, "relu3": 7, "relu4": 9, "relu5": 11, "pool5": 12})
