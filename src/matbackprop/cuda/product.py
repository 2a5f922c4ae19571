"""What the kernels that multiply on the double-precision tensor cores share (``product.cu``)."""

from __future__ import annotations

import torch

from matbackprop.cuda.compiler import Source

TILE, PRODUCT_THREADS = 64, 256  # edge of a tile of a product; threads that compute it
LDT, DEPTH = 68, 16  # leading dimension of operands, with which no bank is asked twice; their rows in one step
TENSOR_CORES = (8, 0)  # the first compute capability that has them for double precision
TYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "float", torch.bfloat16: "float"}
PRODUCT = Source("product.cu", TILE=TILE, PRODUCT_THREADS=PRODUCT_THREADS, LDT=LDT, DEPTH=DEPTH)
