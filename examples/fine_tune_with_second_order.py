"""Fine-tune a trained ResNet and ViT with second-order pooling.

Both networks are first trained to classify regions: the ResNet averages its last map, the ViT uses its class token.
Three copies of each are then trained for a few more epochs: unchanged (first order), with second-order pooling instead
(``replace_pool(…, first_order=False)``), and with both (``replace_pool``). Networks are initialized randomly. The
figure shows errors on the validation regions.

    python examples/fine_tune_with_second_order.py [output.png]

By default the regions are synthetic shapes and the networks are small, which takes half a minute on
a CPU. With a GPU and a folder ``coco`` in ``$MATBACKPROP_DATA``, the example uses COCO regions, a
ResNet-18 and a ViT of six blocks.
"""

import copy
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.nn import replace_pool
from matbackprop.vision.data.coco_regions import FetchedRegions, RegionSource, place_batch
from matbackprop.vision.report.figures import figure, finish, styled
from matbackprop.vision.training.config import RegionDataConfig
from matbackprop.vision.training.regions import region_sets

SYSTEMS = ("first order", "second order", "both")


class Block(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nnf.relu(self.body(x) + self.skip(x))


def resnet(width: int, depth: int, classes: int) -> nn.Module:
    """A residual network of four stages with ``depth`` blocks each; 64 and 2 give a ResNet-18."""
    start = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = [
        Block(widths[s] if i == 0 else widths[s + 1], widths[s + 1], 2 if i == 0 and s else 1)
        for s in range(4)
        for i in range(depth)
    ]
    return nn.Sequential(*start, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class ViT(nn.Module):
    """Vision transformer with a class token."""

    def __init__(self, width: int, depth: int, classes: int, side: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        layers = [
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.1, nnf.gelu, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.blocks, self.norm = nn.Sequential(*layers), nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.classifier(self.norm(self.blocks(tokens))[:, 0])


class RegionSet:
    """Training and validation regions."""

    def __init__(self, data: RegionDataConfig, shrink: int, device: torch.device) -> None:
        self.data, self.device, self.shrink = data, device, shrink
        parts = region_sets(data)
        self.classes, self.side = len(parts[0].classes), data.canvas // shrink
        self.train, self.validation = (
            RegionSource(part, np.arange(len(part)), jitter=jitter, flip=jitter > 0)
            for part, jitter in zip(parts, (data.jitter, 0), strict=True)
        )

    def batches(self, source: RegionSource, epoch: int, order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pictures (b, 3, side, side) and classes (b,) of an epoch."""
        for indices in order.split(self.data.batch_size):
            fetched = FetchedRegions(*(tensor.to(self.device) for tensor in source.fetch(indices, epoch)))
            batch = place_batch(fetched, self.data.canvas, self.data.background)
            yield nnf.avg_pool2d(batch.image, self.shrink).contiguous(), batch.target


def train(model: nn.Module, regions: RegionSet, epochs: int, rate: float) -> float:
    """Train a network and return its error on the validation regions, in percent."""
    device = regions.device
    torch.manual_seed(0)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    steps = epochs * math.ceil(len(regions.train) / regions.data.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for epoch in range(epochs):
        model.train()
        for image, target in regions.batches(regions.train, epoch, torch.randperm(len(regions.train))):
            with half:
                scores = model(image)
            loss = nnf.cross_entropy(scores.float(), target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()
    wrong = 0
    with torch.no_grad(), half:
        for image, target in regions.batches(regions.validation, 0, torch.arange(len(regions.validation))):
            wrong += int((model(image).argmax(-1) != target).sum())
    return 100 * wrong / len(regions.validation)


def changed(model: nn.Module, system: str, side: int, reduce: int, device: torch.device) -> nn.Module:
    """Return a copy of a trained network for one of the three systems."""
    model = copy.deepcopy(model).eval()
    if system == "first order":
        return model
    example = torch.zeros(2, 3, side, side, device=device)
    return replace_pool(model, example, first_order=system == "both", reduce=reduce, channel_dropout=0.1)


def main(output: Path, *, generate: int = 96) -> dict[str, float]:
    """Train both networks, draw the figure, and return the error of each network and system."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    coco = device.type == "cuda" and (Path(os.environ.get("MATBACKPROP_DATA", "/nowhere")) / "coco").is_dir()
    if coco:
        data = RegionDataConfig(side=224, canvas=224, margin=0.2, background="keep", jitter=20, batch_size=128)
        regions, first, more, width, depth, reduce = RegionSet(data, 2, device), 15, 5, 64, 2, 128
    else:
        data = RegionDataConfig(generate=generate, side=32, canvas=32, jitter=2, batch_size=16)
        regions, first, more, width, depth, reduce = RegionSet(data, 1, device), 6, 3, 8, 1, 16
    errors = {}
    for name, rate in (("ResNet", 2e-3), ("ViT", 1e-3)):
        torch.manual_seed(0)
        network = resnet(width, depth, regions.classes)
        if name == "ViT":
            network = ViT(4 * width, 6 if coco else 2, regions.classes, regions.side, patch=8)
        print(f"{name}: {train(network, regions, first, rate):.2f} % after {first} epochs")
        for system in SYSTEMS:
            error = train(changed(network, system, regions.side, reduce, device), regions, more, rate / 4)
            errors[f"{name}, {system}"] = error
            print(f"  {system}: {error:.2f} % after {more} more", flush=True)
    draw(errors, output)
    return errors


@styled
def draw(errors: dict[str, float], output: Path) -> None:
    """Draw the error of each network and system."""
    fig, (ax,) = figure(width=8, height=0.36 * len(errors) + 1.3)
    ax.plot(list(errors.values()), range(len(errors)), "o")
    ax.set_yticks(range(len(errors)), list(errors))
    ax.invert_yaxis()
    ax.set_xlabel("error (%)")
    finish(fig, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("fine_tune_with_second_order.png"))
