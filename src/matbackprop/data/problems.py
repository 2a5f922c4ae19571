"""What is wrong with a data set: readers collect it, training reports it, ``data check`` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Problem(NamedTuple):
    """A bad file, or a bad entry of a file.

    Attributes:
        path: the file.
        reason: what is wrong with it, and with which entry.
        kind: a few words under which problems of one kind are counted.
    """

    path: Path
    reason: str
    kind: str = "bad file"

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def first_problems(problems: Sequence[Problem], count: int = 5) -> str:
    """The first few problems in one line, and how many more there are."""
    more = f"; and {len(problems) - count} more" if len(problems) > count else ""
    return "; ".join(map(str, problems[:count])) + more
