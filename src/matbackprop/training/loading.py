"""Batches in a seeded order that can go on from any batch, on any number of processes.

The order of an epoch and the augmentation of an item depend on (seed, epoch, index) only, never on the number of
workers, on processes, or on what was drawn before. That makes resumed and distributed runs repeat a single one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from matbackprop.errors import ConfigurationError, DataError

__all__ = ["BatchSource", "EpochLoader", "ItemSource", "generator_for"]


class BatchSource(Protocol):
    """What an :class:`EpochLoader` reads from."""

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def fetch(self, indices: Tensor, epoch: int) -> Any:
        """Return the batch of the items ``indices`` (int64, shape (n,)) as they look in ``epoch``."""
        ...


def generator_for(*keys: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a generator whose numbers depend on all ``keys`` and on nothing else.

    Use it for augmentation: ``generator_for(seed, epoch, index)``.

    Example:
        >>> torch.rand(1, generator=generator_for(0, 3, 7)) == torch.rand(1, generator=generator_for(0, 3, 7))
        tensor([True])
    """
    word = np.random.SeedSequence([int(k) & 0xFFFFFFFFFFFFFFFF for k in keys]).generate_state(1, np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(word) & 0x7FFFFFFFFFFFFFFF)


class ItemSource:
    """A :class:`BatchSource` over a function of one item.

    Args:
        length: number of items.
        item: called as ``item(index, epoch)``; returns a tensor, a number, or a dict or tuple of them.
        collate: list of items → batch; torch's default stacks tensors.
    """

    def __init__(
        self, length: int, item: Callable[[int, int], Any], collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self.length = length
        self.item = item
        self.collate = collate or torch.utils.data.default_collate

    def __len__(self) -> int:
        return self.length

    def fetch(self, indices: Tensor, epoch: int) -> Any:
        return self.collate([self.item(int(i), epoch) for i in indices])


class _Keys(Dataset):
    """Lets a torch DataLoader call ``fetch`` in its worker processes: one item is one batch."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source

    def __getitem__(self, key: tuple[int, Tensor]) -> Any:
        epoch, indices = key
        return self.source.fetch(indices, epoch)


class EpochLoader:
    """An iterable of batches for Lightning.

    With W processes a step's batch has W·batch_size items: process r takes the r-th part of it, so that two processes
    see together what one with the doubled batch sees.

    Args:
        source: where batches come from.
        batch_size: items a process and step.
        seed: decides the order.
        shuffle: a new order every epoch; otherwise 0, 1, 2, …
        drop_last: leave out the last items where they do not fill a batch on every process. Without it and with
            ``shuffle`` they are filled up from the epoch's beginning; without ``shuffle`` (evaluation) all items are
            spread over the processes, and none is seen twice.
        weights: draw items with replacement in proportion to these instead of taking each once.
        workers: worker processes; 0 reads in ``threads`` threads of this process, which suits memory-mapped arrays.
        threads: reading threads where ``workers`` is 0; 0 reads in the calling thread.
        prefetch: batches read ahead, for each worker or thread.
        pin_memory: copy batches to page-locked memory, from where a GPU takes them faster.

    Example:
        >>> source = ItemSource(4, lambda index, epoch: torch.tensor(index))
        >>> [batch.tolist() for batch in EpochLoader(source, 2, shuffle=False)]
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        source: BatchSource,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool | None = None,
        weights: Sequence[float] | Tensor | None = None,
        workers: int = 0,
        threads: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}; it must be at least 1.")
        if len(source) == 0:
            raise DataError("there is nothing to load: the data source is empty.")
        self.source = source
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float64)
        if self.weights is not None and self.weights.shape != (len(source),):
            raise ConfigurationError(f"{tuple(self.weights.shape)} weights for {len(source)} items.")
        self.workers = workers
        self.threads = threads
        self.prefetch = max(1, prefetch)
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.rank, self.world = 0, 1
        self._drop_last = drop_last
        self.epoch, self.batch = 0, 0
        self._then: Callable[[], None] | None = None

    # ---------------------------------------------------------------------------------------------------------- order

    def share(self, rank: int, world: int) -> None:
        """Take the ``rank``-th of ``world`` parts of every batch (the engine calls it)."""
        if not self.shuffle and len(self.source) < world:
            raise DataError(f"{len(self.source)} items cannot be shared by {world} processes; use fewer processes.")
        self.rank, self.world = rank, world

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out; by default in training, where one batch at least is whole."""
        if self._drop_last is not None:
            return self._drop_last
        return self.shuffle and len(self.source) >= self.batch_size * self.world

    def __len__(self) -> int:
        whole, rest = divmod(len(self.source), self.batch_size * self.world)
        if self.drop_last or not rest:
            return whole
        if self.shuffle or self.batch_size > 1:
            return whole + 1
        return whole + (self.rank < rest)

    def order(self, epoch: int) -> Tensor:
        """Return the indices of an epoch in their order, int64 (n,), before they are shared."""
        n = len(self.source)
        generator = generator_for(self.seed, epoch, 0x0EDE)
        if self.weights is not None:
            return torch.multinomial(self.weights, n, replacement=True, generator=generator)
        return torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)

    def batches(self, epoch: int) -> list[Tensor]:
        """Return this process's batches of indices of an epoch."""
        order = self.order(epoch)
        size = self.batch_size * self.world
        whole, rest = divmod(len(order), size)
        if self.drop_last or not rest:
            order = order[: whole * size]
        elif self.shuffle:
            order = torch.cat([order, order.repeat(-(-size // len(order)))])[: (whole + 1) * size]
        elif self.world > 1:
            # Every process gets the same number of batches, some of them smaller, and no item twice.
            mine = order[self.rank :: self.world]
            return list(mine.tensor_split(min(whole + 1, len(mine))))
        return [part[self.rank * self.batch_size :][: self.batch_size] for part in order.split(size)]

    # ------------------------------------------------------------------------------------------------------- position

    def seek(self, epoch: int, batch: int, then: Callable[[], None] | None = None) -> None:
        """Let the next iteration start at a batch of an epoch; ``then`` is called just before its first batch."""
        self.epoch, self.batch, self._then = epoch, batch, then

    def state_dict(self) -> dict[str, int]:
        """Return the position (Lightning's protocol of loaders that can be resumed)."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position."""
        self.seek(state["epoch"], state["batch"])

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing is read, and no position taken, before the first batch is asked for.
        epoch, start = self.epoch, self.batch
        keys = [(epoch, indices) for indices in self.batches(epoch)[start:]]
        if self._then is not None:
            then, self._then = self._then, None
            then()
        end = start + len(keys)
        for done, batch in enumerate(self._read(keys), start=start + 1):
            # Set before the batch leaves: nobody needs to ask for one more to move on to the next epoch.
            self.epoch, self.batch = (epoch, done) if done < end else (epoch + 1, 0)
            yield batch

    # -------------------------------------------------------------------------------------------------------- reading

    def _read(self, keys: list[tuple[int, Tensor]]) -> Iterator[Any]:
        if self.workers:
            yield from DataLoader(
                _Keys(self.source),
                batch_size=None,
                sampler=keys,  # type: ignore[arg-type]
                num_workers=self.workers,
                prefetch_factor=self.prefetch,
                pin_memory=self.pin_memory,
                generator=torch.Generator(),  # the global generator stays untouched
            )
        elif self.threads:
            yield from self._read_in_threads(keys)
        else:
            for epoch, indices in keys:
                yield self._pinned(self.source.fetch(indices, epoch))

    def _pinned(self, batch: Any) -> Any:
        return torch.utils.data._utils.pin_memory.pin_memory(batch) if self.pin_memory else batch

    def _read_in_threads(self, keys: list[tuple[int, Tensor]]) -> Iterator[Any]:
        """Read ahead in threads; batches come out in order."""
        stop = threading.Event()
        slots: list[queue.Queue[Any]] = [queue.Queue(self.prefetch) for _ in range(self.threads)]

        def work(number: int) -> None:
            for epoch, indices in keys[number :: self.threads]:
                try:
                    result: Any = (True, self._pinned(self.source.fetch(indices, epoch)))
                except BaseException as error:
                    result = (False, error)
                while not stop.is_set():
                    try:
                        slots[number].put(result, timeout=0.1)
                        break
                    except queue.Full:
                        continue
                if stop.is_set() or not result[0]:
                    return

        pool = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(self.threads)]
        for thread in pool:
            thread.start()
        try:
            for i in range(len(keys)):
                good, value = slots[i % self.threads].get()
                if not good:
                    raise value
                yield value
        finally:
            stop.set()
            for thread in pool:
                thread.join()
