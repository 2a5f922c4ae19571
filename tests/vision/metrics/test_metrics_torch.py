"""The torchmetrics classes: two processes, pickling, reset, forward, and errors."""

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from helpers.two_processes import free_port
from matbackprop.errors import ShapeError
from matbackprop.vision.metrics import (
    BoundaryFMeasure,
    ObjectsAndParts,
    RandIndex,
    SegmentationCovering,
    VariationOfInformation,
    evaluate_segmentations,
)

CLASSES = (SegmentationCovering, RandIndex, VariationOfInformation, BoundaryFMeasure, ObjectsAndParts)


def images(count=5):
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        truth = torch.randint(0, 4, (2 + index % 3, 6, 8), generator=generator)
        segmentations = torch.randint(0, 5, (3, 6, 8), generator=generator)
        yield (
            f"{index}",
            segmentations.repeat_interleave(5, 1).repeat_interleave(5, 2),
            truth.repeat_interleave(5, 1).repeat_interleave(5, 2),
        )


def expected():
    segmentations, truth = {}, {}
    for name, maps, human in images():
        segmentations[name], truth[name] = list(maps), list(human)
    return evaluate_segmentations(segmentations, truth, boundary=True, objects=True)


def gather(metrics):
    return {name: value.item() for metric in metrics for name, value in metric.compute().items()}


def test_classes_equal_the_functions():
    metrics = [kind() for kind in CLASSES]
    for _, maps, human in images():
        for metric in metrics:
            metric.update(maps, human)
    assert gather(metrics) == pytest.approx(expected(), abs=1e-12)


def _process(rank, folder, port):  # not a file store, on which torch 2.6 may hang at exit
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    metrics = [kind() for kind in CLASSES]
    for index, (_, maps, human) in enumerate(images()):
        if index % 2 == rank:  # three images here, two there
            for metric in metrics:
                metric.update(maps, human)
    torch.save(gather(metrics), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    mp.spawn(_process, args=(str(tmp_path), free_port()), nprocs=2)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(expected(), abs=1e-12)


@pytest.mark.parametrize("kind", CLASSES)
def test_pickle_keeps_the_state_and_reset_clears_it(kind):
    (_, maps, human), (_, more, humans) = list(images(2))
    metric = kind()
    metric.update(maps, human)
    copy = pickle.loads(pickle.dumps(metric))
    for one in (metric, copy):
        one.update(more, humans)
    assert copy.compute() == metric.compute()
    copy.reset()
    copy.update(maps, human)
    alone = kind()(maps, human)  # forward returns the value of the batch
    assert copy.compute() == alone


def test_another_number_of_segmentations_is_rejected():
    (_, maps, human), *_ = images(1)
    metric = RandIndex()
    metric.update(maps, human)
    with pytest.raises(ShapeError, match="This image has 2 segmentations"):
        metric.update(maps[:2], human)
    with pytest.raises(ShapeError, match="Resize one of them"):
        metric.update(np.zeros((3, 4, 4), int), human)
