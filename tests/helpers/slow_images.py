"""Images that record each read, for tests of long preparations."""

import time
from pathlib import Path

import torch

from matbackprop.vision.data.bsds import BSDSSample


class TracedImages:
    """Small images with one map; reading one writes a file named by its index."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.ids = Path(folder), [f"{i:03}" for i in range(count)]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        (self.folder / self.ids[index]).touch()
        time.sleep(0.02)
        maps = [torch.arange(24)[None].expand(16, 24) // 12]
        return BSDSSample(self.ids[index], torch.randint(256, (3, 16, 24), dtype=torch.uint8), maps)

    def read(self):
        """Return how many images were read."""
        return len(list(self.folder.iterdir()))
