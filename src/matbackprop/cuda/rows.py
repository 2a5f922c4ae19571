"""What the kernels share that stream the columns of matrices with few rows through shared memory (``rows.cu``)."""

from __future__ import annotations

from matbackprop.cuda import jacobi
from matbackprop.cuda.compiler import Source

CHUNK = 64  # columns that a block keeps in shared memory
ROWS = Source("rows.cu", CHUNK=CHUNK)


def tile(rows: int) -> int:
    """Numbers of a tile of columns."""
    return CHUNK * (jacobi.Sizes(rows).players + 2)
