"""``matbackprop reproduce table1`` and ``table2``: the paper's tables."""

from __future__ import annotations

from matbackprop.training.table_config import Table1Config, Table2Config

__all__ = ["Table1Config", "Table2Config", "table1", "table2"]


def table1(config: Table1Config) -> None:
    """Region classification."""
    from matbackprop.training.table1 import main

    main(config)


def table2(config: Table2Config) -> None:
    """Full-image segmentation."""
    from matbackprop.training.table2 import main

    main(config)
