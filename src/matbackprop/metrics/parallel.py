"""Several processes for work that splits by image."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from matbackprop.processes import WorkerPool

__all__ = ["parallel_map"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(function: Callable[[Item], Result], items: Sequence[Item], workers: int = 0) -> Iterator[Result]:
    """Apply a function to every item in order, here or in several fresh processes of one thread each.

    Args:
        function: picklable where ``workers`` > 1.
        items: picklable likewise.
        workers: number of processes; 0 and 1 stay in this one.

    Yields:
        Results in the order of the items. Closing the iterator cancels what has not begun.

    Example:
        >>> list(parallel_map(abs, [-2, 1]))
        [2, 1]
    """
    if workers < 2 or len(items) < 2:
        yield from map(function, items)
        return
    with WorkerPool(min(workers, len(items))) as pool:
        yield from pool.map(function, items)
