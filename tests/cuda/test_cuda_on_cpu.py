"""The emulation of CUDA honors the grid and the size of shared memory of a launch."""

from typing import ClassVar

import pytest
import torch

from helpers import cuda_on_cpu

KERNELS = """
extern __shared__ double shared_memory[];
__global__ void visit(int* counts) { ++counts[(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x]; }
__global__ void fill(int count) { for (int i = 0; i < count; ++i) shared_memory[i] = i; }
"""


class SOURCE:
    """Stands for a Source."""

    constants: ClassVar = {}
    text = staticmethod(lambda: KERNELS)


@pytest.fixture(scope="module")
def kernels():
    return cuda_on_cpu.compiled(SOURCE)


@pytest.mark.parametrize("grid", [(5,), (3, 2), (2, 3, 4)])
def test_every_block_of_the_grid_runs_once(kernels, grid):
    counts = torch.zeros(24, dtype=torch.int32)
    kernels.launch("visit", grid, 1, 0, (counts.data_ptr(),))
    size = torch.Size(grid).numel()
    assert (counts[:size] == 1).all() and (counts[size:] == 0).all()


def test_writing_beyond_shared_memory_fails(kernels):
    kernels.launch("fill", (1,), 1, 8 * 10, (10,))
    with pytest.raises(AssertionError, match="fill wrote beyond its 72 bytes"):
        kernels.launch("fill", (1,), 1, 8 * 9, (10,))
