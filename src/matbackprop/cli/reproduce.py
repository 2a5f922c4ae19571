"""``matbackprop reproduce table1``, ``table2`` and ``bsds500``: the paper's tables, and the protocol of others."""

from __future__ import annotations

from matbackprop.reproduce.config import Bsds500Config, Table1Config, Table2Config

__all__ = ["Bsds500Config", "Table1Config", "Table2Config", "bsds500", "table1", "table2"]


def table1(config: Table1Config) -> None:
    """Region classification."""
    from matbackprop.reproduce.table1 import Table1

    Table1(config).main()


def table2(config: Table2Config) -> None:
    """Full-image segmentation."""
    from matbackprop.reproduce.table2 import Table2

    Table2(config).main()


def bsds500(config: Bsds500Config) -> None:
    """Segmentation of BSDS500, as others report it."""
    from matbackprop.reproduce.bsds500 import Bsds500

    Bsds500(config).main()
