"""CUDA kernels, their launchers, and the switch that turns them off.

Every kernel has a fallback in torch's own operations. To use the fallbacks alone, for example to find out whether a
kernel causes a problem, set the environment variable ``MATBACKPROP_KERNELS=0`` before the program starts, or use
:func:`kernels`. ``matbackprop doctor`` compares each kernel with its fallback.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["kernels", "kernels_enabled"]

_enabled = os.environ.get("MATBACKPROP_KERNELS", "1") != "0"


def kernels_enabled() -> bool:
    """Whether the package's own CUDA kernels may be used."""
    return _enabled


@contextlib.contextmanager
def kernels(enabled: bool) -> Iterator[None]:
    """Turn the package's own CUDA kernels on or off.

    The setting holds for the whole process, because autograd runs backward passes in other threads.

    Args:
        enabled: False to compute with torch's operations alone.

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
