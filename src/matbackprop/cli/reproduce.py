"""``matbackprop reproduce table1``, ``table2``, ``backbones`` and ``bsds500``: the paper's tables, and beyond."""

from __future__ import annotations

from matbackprop.reproduce.config import BackbonesConfig, Bsds500Config, Table1Config, Table2Config

__all__ = [
    "BackbonesConfig",
    "Bsds500Config",
    "Table1Config",
    "Table2Config",
    "backbones",
    "bsds500",
    "table1",
    "table2",
]


def table1(config: Table1Config) -> None:
    """Region classification."""
    from matbackprop.reproduce.table1 import Table1

    Table1(config).main()


def table2(config: Table2Config) -> None:
    """Full-image segmentation."""
    from matbackprop.reproduce.table2 import Table2

    Table2(config).main()


def backbones(config: BackbonesConfig) -> None:
    """Region classification on several backbones."""
    from matbackprop.reproduce.backbones import Backbones

    Backbones(config).main()


def bsds500(config: Bsds500Config) -> None:
    """Segmentation of BSDS500, as others report it."""
    from matbackprop.reproduce.bsds500 import Bsds500

    Bsds500(config).main()
