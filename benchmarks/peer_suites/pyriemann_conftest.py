"""The fixtures of pyRiemann's tests, which its source distribution lacks."""

import numpy as np
import pytest
import torch
from pyriemann.datasets import make_masks, make_matrices


def to_backend(x, backend):
    return torch.from_numpy(np.asarray(x)) if backend == "torch" else np.asarray(x)


def to_numpy(x):
    return x.resolve_conj().detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


class approx:
    """pytest.approx for NumPy arrays and tensors."""

    def __init__(self, expected, *args, **kwargs):
        self.inner = pytest.approx(
            to_numpy(expected) if isinstance(expected, torch.Tensor) else expected, *args, **kwargs
        )

    def __eq__(self, other):
        return (to_numpy(other) if isinstance(other, torch.Tensor) else other) == self.inner

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]


def assert_array_equal(x, y):
    np.testing.assert_array_equal(to_numpy(x), to_numpy(y))


def assert_array_almost_equal(x, y, decimal=6):
    np.testing.assert_array_almost_equal(to_numpy(x), to_numpy(y), decimal=decimal)


@pytest.fixture(params=["numpy", "torch"])
def backend(request):
    return request.param


@pytest.fixture
def rndstate():
    return np.random.RandomState(1234)


@pytest.fixture
def get_mats(rndstate, backend):
    return lambda count, n, kind: to_backend(make_matrices(count, n, kind, rndstate), backend)


@pytest.fixture
def get_mats_params(rndstate, backend):
    def make(count, n, kind):
        made = make_matrices(count, n, kind, rndstate, return_params=True, eigvecs_same=True)
        return tuple(to_backend(x, backend) for x in made)

    return make


@pytest.fixture
def get_weights(rndstate, backend):
    return lambda count: to_backend(1 + rndstate.rand(count), backend)


@pytest.fixture
def get_masks(rndstate, backend):
    def make(count, n):
        return [to_backend(mask, backend) for mask in make_masks(count, n, n // 2, rndstate)]

    return make
