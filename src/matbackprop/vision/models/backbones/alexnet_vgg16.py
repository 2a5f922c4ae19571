"""AlexNet and VGG-16, with the state dict keys of torchvision (``features.0.weight``)."""

from __future__ import annotations

from torch import nn

from matbackprop.vision.models.backbones.base import LayerStack


class AlexNet(LayerStack):
    """AlexNet in the variant of torchvision, without local response normalization and groups."""

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


class VGG16(LayerStack):
    """VGG-16 (configuration D)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        taps: dict[str, int] = {}
        width = 3
        for block, (depth, filters) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], start=1):
            for i in range(1, depth + 1):
                layers += [nn.Conv2d(width, filters, 3, padding=1), nn.ReLU()]
                taps[f"relu{block}_{i}"] = len(layers) - 1
                width = filters
            layers.append(nn.MaxPool2d(2, 2))
            taps[f"pool{block}"] = len(layers) - 1
        super().__init__(nn.Sequential(*layers), taps)
