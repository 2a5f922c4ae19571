"""Loaders of batches in a seeded order.

The order of an epoch and the augmentation of an item depend only on (seed, epoch, index), so resumed and distributed
runs use the same batches as an uninterrupted run in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from matbackprop.errors import DataError
from matbackprop.vision.workers import read_ahead

_AHEAD = 2  # batches that each thread reads ahead


class BatchSource(Protocol):
    """Source of an :class:`EpochLoader`: ``fetch`` returns the batch of the items ``indices``, int64 (n,)."""

    def __len__(self) -> int: ...
    def fetch(self, indices: Tensor, epoch: int) -> Any: ...


def generator_for(*keys: int) -> torch.Generator:
    """Return a generator seeded by ``keys``, for example ``(seed, epoch, index)`` for augmentation."""
    word = np.random.SeedSequence([int(k) & 0xFFFFFFFFFFFFFFFF for k in keys]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(word) & 0x7FFFFFFFFFFFFFFF)


class ItemSource:
    """:class:`BatchSource` that stacks the tensors, numbers, dicts or tuples returned by ``item(index, epoch)``."""

    def __init__(self, length: int, item: Callable[[int, int], Any]) -> None:
        self.length, self.item = length, item

    def __len__(self) -> int:
        return self.length

    def fetch(self, indices: Tensor, epoch: int) -> Any:
        return torch.utils.data.default_collate([self.item(int(i), epoch) for i in indices])


class EpochLoader:
    """Loader of batches in an order that depends only on the seed and the epoch.

    With W processes, process r reads the r-th part of each batch of W·batch_size items. In training (``shuffle``), an
    incomplete last batch is dropped, and items are repeated if there are too few for one batch. In evaluation, every
    item is used once. ``threads`` read ahead, to page-locked memory if CUDA is available.

    Example:
        >>> source = ItemSource(4, lambda index, epoch: torch.tensor(index))
        >>> [batch.tolist() for batch in EpochLoader(source, 2, shuffle=False).read(0)]
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        source: BatchSource,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        threads: int = 0,
    ) -> None:
        if len(source) == 0:
            raise DataError("The data source is empty. Check the data folder and the split.")
        self.source, self.batch_size, self.seed, self.shuffle = source, batch_size, seed, shuffle
        self.threads = threads
        self.rank, self.world = 0, 1

    def share(self, rank: int, world: int) -> EpochLoader:
        """Restrict the loader to part ``rank`` of ``world`` of every batch, and return it."""
        if not self.shuffle and len(self.source) < world:
            raise DataError(f"{len(self.source)} items cannot be shared by {world} processes. Use fewer processes.")
        self.rank, self.world = rank, world
        return self

    def __len__(self) -> int:
        return len(self.batches(0))

    def order(self, epoch: int) -> Tensor:
        """Return the order of the indices of an epoch for all processes, int64 (n,)."""
        n = len(self.source)
        generator = generator_for(self.seed, epoch, 0x0EDE)
        return torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)

    def batches(self, epoch: int) -> list[Tensor]:
        """Return the batches of indices of an epoch for this process."""
        order = self.order(epoch)
        size = self.batch_size * self.world
        whole, rest = divmod(len(order), size)
        if not rest or (self.shuffle and whole):
            order = order[: whole * size]
        elif self.shuffle:
            order = order.repeat(-(-size // len(order)))[:size]
        elif self.world > 1:
            # Every process has the same number of batches, and no item is repeated.
            mine = order[self.rank :: self.world]
            return list(mine.tensor_split(min(whole + 1, len(mine))))
        return [part[self.rank * self.batch_size :][: self.batch_size] for part in order.split(size)]

    def read(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch for this process, beginning with batch ``start``."""
        batches = self.batches(epoch)[start:]
        if not self.threads:
            yield from (self._fetch(indices, epoch) for indices in batches)
            return
        pool = ThreadPoolExecutor(self.threads)
        try:
            yield from read_ahead(lambda i: pool.submit(self._fetch, i, epoch), batches, _AHEAD * self.threads + 1)
        finally:
            pool.shutdown(cancel_futures=True)

    def _fetch(self, indices: Tensor, epoch: int) -> Any:
        batch = self.source.fetch(indices, epoch)
        pin = self.threads and torch.cuda.is_available()
        return apply_to_collection(batch, Tensor, Tensor.pin_memory) if pin else batch
