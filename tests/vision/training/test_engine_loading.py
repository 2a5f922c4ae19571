"""Batches: the order depends on seed and epoch only, processes share it, and reading can start at any batch."""

import itertools

import pytest
import torch

from matbackprop.errors import DataError
from matbackprop.vision.training.loading import EpochLoader, ItemSource, generator_for


def source(n):
    return ItemSource(n, lambda index, epoch: torch.tensor([index, epoch]))


def indices(batches):
    return [b[:, 0].tolist() for b in batches]


def test_epochs_differ_and_seeds_repeat():
    one, two = EpochLoader(source(20), 4, seed=1), EpochLoader(source(20), 4, seed=1)
    first, second = indices(one.read(0)), indices(one.read(1))
    assert first != second
    assert sorted(itertools.chain(*first)) == list(range(20))
    assert [first, second] == [indices(two.read(0)), indices(two.read(1))]
    assert first != indices(EpochLoader(source(20), 4, seed=2).read(0))
    assert [{*b[:, 1].tolist()} for epoch in range(2) for b in EpochLoader(source(4), 4).read(epoch)] == [{0}, {1}]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("epoch,batch", [(0, 0), (0, 3), (2, 1), (1, 5)])
def test_reading_from_any_batch_on(epoch, batch, threads):
    whole = indices(EpochLoader(source(20), 4, seed=3).read(epoch))
    loader, state = EpochLoader(source(20), 4, seed=3, threads=threads), torch.get_rng_state()
    assert indices(loader.read(epoch, batch)) == whole[batch:]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("n", [16, 17, 23])
def test_two_processes_get_the_items_of_one_with_the_doubled_batch(n):
    single = indices(EpochLoader(source(n), 8, seed=5).read(0))
    parts = []
    for rank in range(2):
        loader = EpochLoader(source(n), 4, seed=5)
        loader.share(rank, 2)
        assert len(loader) == len(single)
        parts.append(indices(loader.read(0)))
    assert [a + b for a, b in zip(*parts, strict=True)] == single


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("n,world", [(7, 1), (7, 2), (8, 2), (9, 4), (11, 2), (3, 3), (41, 3)])
def test_evaluation_uses_each_item_once_in_equally_many_batches(n, world, size):
    seen, lengths = [], set()
    for rank in range(world):
        loader = EpochLoader(source(n), size, shuffle=False)
        loader.share(rank, world)
        batches = indices(loader.read(0))
        assert len(batches) == len(loader)
        assert all(1 <= len(batch) <= size for batch in batches)
        lengths.add(len(batches))
        seen += itertools.chain(*batches)
    assert sorted(seen) == list(range(n))
    assert size == 1 or len(lengths) == 1


def test_too_few_items():
    with pytest.raises(DataError, match="2 items cannot be shared by 3 processes"):
        EpochLoader(source(2), 4, shuffle=False).share(0, 3)
    with pytest.raises(DataError, match="empty"):
        EpochLoader(source(0), 1)


def test_fewer_items_than_a_batch_are_repeated_to_fill_it():
    loader = EpochLoader(source(3), 8)
    (batch,) = indices(loader.read(0))
    assert len(loader) == 1
    assert sorted(batch.count(i) for i in range(3)) == [2, 3, 3]


def test_threads_propagate_errors_and_stop_early():
    def item(index, epoch):
        if index == 13:
            raise DataError("bad file")
        return torch.tensor([index])

    with pytest.raises(DataError, match="bad file"):
        list(EpochLoader(ItemSource(30, item), 4, shuffle=False, threads=2).read(0))
    for _ in EpochLoader(source(400), 1, threads=2).read(0):
        break


def test_keyed_generators_differ_in_every_key():
    draws = {torch.rand(1, generator=generator_for(*k)).item() for k in itertools.product(range(4), repeat=3)}
    assert len(draws) == 64
