"""CUDA kernels, their launchers, and the switch that turns them off.

Every kernel has a fallback in torch operations. To use only the fallbacks, for example to find out whether a kernel
causes a problem, set the environment variable ``MATBACKPROP_KERNELS=0`` before the program starts, or use
:func:`kernels`. ``matbackprop doctor`` compares each kernel with its fallback.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["kernels", "kernels_enabled"]

_enabled = os.environ.get("MATBACKPROP_KERNELS", "1") != "0"


def kernels_enabled() -> bool:
    """Return whether the CUDA kernels of the package may be used."""
    return _enabled


@contextlib.contextmanager
def kernels(enabled: bool) -> Iterator[None]:
    """Turn the CUDA kernels of the package on or off.

    The setting applies to the whole process, because autograd runs backward passes in other threads.

    Args:
        enabled: False to use only torch operations.

    Example:
        >>> import matbackprop.cuda
        >>> with matbackprop.cuda.kernels(enabled=False):
        ...     matbackprop.cuda.kernels_enabled()
        False
    """
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before
