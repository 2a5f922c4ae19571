"""Long runs that must not leak memory, files, threads or processes.

``python -m benchmarks long_runs`` runs them at full length, the tests run a short version.
"""

import ctypes
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import matbackprop
from helpers.tiny_run import TinyData, tiny_config
from matbackprop.nn import SecondOrderPool
from matbackprop.vision.inference import load_segmenter, segment_photograph
from matbackprop.vision.training.engine import System, fit, seed_all

SAMPLES = 40  # measurements in a long run


def footprint(folder: Path) -> dict[str, int]:
    """Resources of this process: memory in bytes, open files, threads, child processes, and files in ``folder``.

    Free memory is returned to the system first, so that the reserves of the allocator do not count.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
    return {
        "python_blocks": sys.getallocatedblocks(),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children),
        "temporary_files": sum(1 for _ in folder.rglob("*")),
    }


class Steady:
    """Measures the process at intervals and reports growth in the second half, when every cache is full.

    Memory fluctuates with the allocator, so a line is fitted to it: its rise and the standard error.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.every, self.folder, self.done = max(count // SAMPLES, 1), folder, 0
        self.seen: list[dict[str, int]] = []

    def tick(self) -> None:
        self.done += 1
        if self.done % self.every == 0:
            self.seen.append(footprint(self.folder))

    def summary(self) -> dict[str, object]:
        half = self.seen[len(self.seen) // 2 :]
        return {
            "megabytes": [round(one["bytes"] / 2**20, 1) for one in self.seen],
            "megabytes_in_second_half": rise([one["bytes"] / 2**20 for one in half]),
            "python_blocks_in_second_half": rise([one["python_blocks"] for one in half]),
            "grew": {
                name: half[-1][name] - half[0][name] for name in half[0] if name not in ("bytes", "python_blocks")
            },
        }


def rise(numbers: Sequence[float]) -> dict[str, float]:
    """How far the line through some numbers rises from the first to the last, the standard error of that, and the
    upper end of its 95 % interval."""
    place = np.linspace(-0.5, 0.5, len(numbers))
    slope = float(place @ numbers / (place @ place))
    rest = np.asarray(numbers) - np.mean(numbers) - slope * place
    error = float(np.sqrt(rest @ rest / max(len(numbers) - 2, 1) / (place @ place)))
    return {"amount": round(slope, 2), "standard_error": round(error, 2), "at_most": round(slope + 2 * error, 2)}


class PoolingModule(System):
    """Second-order pooling and a normalized cut on trainable features."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.features, self.pool, self.out = nn.Linear(6, 5), SecondOrderPool(), nn.Linear(25, 1)
        self.double()
        self.steady: Steady | None = None

    def loss(self, batch):
        x, y = batch
        f = torch.relu(self.features(x[:, None] * torch.arange(1.0, 9.0, dtype=x.dtype)[:, None])) + 0.1
        labels = torch.arange(8).div(4, rounding_mode="floor").expand(len(x), 8)
        cut = matbackprop.normalized_cut_soft(f, labels).mean()
        return (self.out(self.pool(f).flatten(1)).squeeze(-1) - y).square().mean() + cut

    def training_step(self, batch):
        if self.steady is not None:
            self.steady.tick()
        return self.loss(batch)

    def validation_step(self, batch):
        self.record("val/loss", self.loss(batch), len(batch[1]))

    def optimizers(self, steps):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9), None


def train_long(steps: int, folder: Path) -> dict[str, object]:
    """Train for ``steps`` steps with validations and checkpoints, and measure the process."""
    epochs = max(steps // 100, 2)
    options = {"log_every": 20, "checkpoint_every_steps": max(steps // 10, 1), "validate_every": max(epochs // 10, 1)}
    config = replace(tiny_config(folder / "run", max_epochs=epochs, **options), items=4 * (steps // epochs))
    seed_all(0)
    module = PoolingModule(config)
    module.steady = Steady(steps, _temporary(folder))
    fit(config, module, TinyData(config), name="pooling")
    assert module.steady.done == steps
    return {"steps": steps} | module.steady.summary()


def segment_long(photographs: int, folder: Path, sizes: tuple[int, int] = (40, 120)) -> dict[str, object]:
    """Segment synthetic photographs of random or equal sizes with the network in the package, and measure the process.

    The same photographs are repeated and the process is measured after each round, so that sizes do not affect the
    measurements.
    """
    model, steady = load_segmenter(device="cpu"), Steady(photographs, _temporary(folder))
    for number in range(photographs):
        draw = np.random.default_rng(number % steady.every)
        height, width = draw.integers(*sizes, 2, endpoint=True)
        picture = draw.integers(0, 60, (height, width, 3), np.uint8)
        picture[:, width // 3 :] += 120
        assert segment_photograph(picture, model, (2, 4)).labels(2).shape == (height, width)
        steady.tick()
    return {
        "photographs": photographs,
        "in_a_round": steady.every,
        "size": f"{sizes[0]} to {sizes[1]} pixels per side",
    } | steady.summary()


def _temporary(folder: Path) -> Path:
    place = folder / "tmp"
    place.mkdir(exist_ok=True)
    tempfile.tempdir = str(place)
    return place
