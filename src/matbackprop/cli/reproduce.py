"""``matbackprop reproduce table1`` and ``table2``: the paper's tables."""

from __future__ import annotations

from matbackprop.reproduce.config import Table1Config, Table2Config

__all__ = ["Table1Config", "Table2Config", "table1", "table2"]


def table1(config: Table1Config) -> None:
    """Region classification."""
    from matbackprop.reproduce.table1 import Table1

    Table1(config).main()


def table2(config: Table2Config) -> None:
    """Full-image segmentation."""
    from matbackprop.reproduce.table2 import Table2

    Table2(config).main()
