"""LAPACK on the CPU with the batch spread over threads.

torch.linalg.eigh solves the matrices of a batch one after the other and lets LAPACK use the threads inside each,
which for matrices of these sizes costs more than it gives. Here each thread takes whole matrices.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from matbackprop.numerics import real_dtype

_CHUNKS_A_THREAD = 2  # a little slack when one thread is interrupted
_MIN_WORK = 5e5  # batch·n³ under which handing out the work costs more than it saves, measured on 2 and 16 cores
_MAX_ORDER = 200  # above some 250 LAPACK starts threads of its own in each of ours, and both get slower


def worth_it(n: int, batch: int) -> bool:
    """Whether a batch is large enough to be spread over the threads torch may use."""
    return torch.get_num_threads() > 1 and batch > 1 and n <= _MAX_ORDER and batch * float(n) ** 3 >= _MIN_WORK


@functools.lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    # The process is part of the key because threads do not survive a fork.
    return ThreadPoolExecutor(
        threads, thread_name_prefix="matbackprop-eigh", initializer=torch.set_num_threads, initargs=(1,)
    )


def solve(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of (batch, n, n) CPU matrices."""
    threads = torch.get_num_threads()
    values = torch.empty(a.shape[:-1], dtype=real_dtype(a.dtype))
    vectors = torch.empty_like(a, memory_format=torch.contiguous_format).mT  # LAPACK's own layout

    inference = torch.is_inference_mode_enabled()  # a mode of the calling thread only; the workers have to enter it

    def work(start: int, stop: int) -> None:
        with torch.no_grad(), torch.inference_mode(inference):
            torch.linalg.eigh(a[start:stop], out=(values[start:stop], vectors[start:stop]))

    batch = a.shape[0]
    step = -(-batch // (threads * _CHUNKS_A_THREAD))
    pool = _pool(threads, os.getpid())
    futures = [pool.submit(work, start, min(start + step, batch)) for start in range(0, batch, step)]
    for future in futures:
        future.result()
    return values, vectors
