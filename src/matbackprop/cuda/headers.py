"""Constants that the launchers share with the CUDA headers (``*.cuh``)."""

from __future__ import annotations

import torch

from matbackprop.refinement import NOISE, OVERLAP, SAFE_RATIO, SEPARATED

TYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "float", torch.bfloat16: "float"}

MAX_WARPS = 24  # per block of the Jacobi solver, so that each thread has 80 registers
TILE, PRODUCT_THREADS = 64, 256  # edge of a tile of a product; threads that compute it
LDT, DEPTH = 68, 16  # leading dimension of operands, which avoids bank conflicts; their rows in one step
TENSOR_CORES = (8, 0)  # the first compute capability that has them for double precision
CHUNK = 64  # columns that a block keeps in shared memory

POOL_FUNCTIONS = {"log": 0, "sqrt": 1, "inv_sqrt": 2, "inverse": 3}
FUNCTIONS = POOL_FUNCTIONS | {"exp": 4}
FUNCTION_NUMBERS = {name.upper(): number for name, number in FUNCTIONS.items()}

CONSTANTS: dict[str, str | int | float] = {
    **FUNCTION_NUMBERS,
    "MAX_THREADS": 32 * MAX_WARPS,
    "TILE": TILE,
    "PRODUCT_THREADS": PRODUCT_THREADS,
    "LDT": LDT,
    "DEPTH": DEPTH,
    "CHUNK": CHUNK,
    "SAFE_RATIO": SAFE_RATIO,
    "SEPARATED": SEPARATED,
    "OVERLAP": OVERLAP[False],
    "NOISE": NOISE,
}


def tile(rows: int) -> int:
    """Return the size of CHUNK columns of a matrix in the layout of ``rows.cuh``."""
    return CHUNK * (rows + rows % 2 + 2)
