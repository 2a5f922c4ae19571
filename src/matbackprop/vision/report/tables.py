"""Tables for the terminal and Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, SupportsFloat

Cell = str | SupportsFloat | None


def format_number(value: float, spec: str = "") -> str:
    """Format a number by ``spec``, if given, or with four significant digits.

    Example:
        >>> [format_number(v) for v in (3, 0.123456, 1234.5678, 2.5e-8, float("nan"))]
        ['3', '0.1235', '1235', '2.5e-08', 'NaN']
        >>> format_number(0.734, ".2f")
        '0.73'
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if spec:
        return format(value, spec)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


@dataclass
class Table:
    """Table with named columns. Cells are text, numbers, or ``None`` if empty.

    ``formats`` maps columns to the format of their numbers, such as ``".1f"``. The best number of a column in ``best``
    is bold. ``title`` and ``note`` are lines above and below.

    Example:
        >>> table = Table(["model", "error"], [["AlexNet", 25.3], ["DeepO2P-FC", 25.2]], best={"error": "min"})
        >>> print(table.markdown())
        | model | error |
        | --- | ---: |
        | AlexNet | 25.3 |
        | DeepO2P-FC | **25.2** |
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    best: Mapping[str, Literal["min", "max"]] = field(default_factory=dict)

    def _columns(self) -> list[tuple[Cell, ...]]:
        return list(zip(*self.rows, strict=True)) or [()] * len(self.columns)

    def _right_aligned(self) -> list[bool]:
        return [
            any(_number(cell) is not None for cell in column) and not any(isinstance(cell, str) for cell in column)
            for column in self._columns()
        ]

    def _texts(self, escape: Callable[[str], str], bold: str) -> list[tuple[str, ...]]:
        """Return the escaped texts of all rows. ``bold`` is a template for the best numbers, such as ``**{}**``."""
        columns = []
        for name, cells in zip(self.columns, self._columns(), strict=True):
            known = [number for cell in cells if (number := _number(cell)) is not None and not math.isnan(number)]
            best = {"min": min, "max": max}[self.best[name]](known) if known and name in self.best else math.nan
            texts = ((escape(_text(cell, self.formats.get(name, ""))), _number(cell) == best) for cell in cells)
            columns.append([bold.format(text) if is_best else text for text, is_best in texts])
        return list(zip(*columns, strict=True))

    def markdown(self) -> str:
        """Return the table in Markdown, with the title in bold above and the note below."""
        head = [_escape_pipes(name) for name in self.columns]
        rule = ["---:" if right else "---" for right in self._right_aligned()]
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [f"| {' | '.join(cells)} |" for cells in (head, rule, *self._texts(_escape_pipes, "**{}**"))]
        return "\n".join([*lines, "", self.note] if self.note else lines)

    def show(self) -> None:
        """Print the table to the terminal."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable

        title, note = self.title or None, self.note or None
        table = RichTable(box=box.SIMPLE_HEAD, title=title, caption=note, title_justify="left")
        for name, right in zip(self.columns, self._right_aligned(), strict=True):
            table.add_column(escape(name), justify="right" if right else "left")
        for cells in self._texts(escape, "[bold]{}[/bold]"):
            table.add_row(*cells)
        Console().print(table)


def _number(cell: Cell) -> float | None:
    return None if cell is None or isinstance(cell, (str, bool)) else float(cell)


def _text(cell: Cell, spec: str) -> str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return format_number(cell, spec) if isinstance(cell, (int, float)) else format(cell, spec)


def _escape_pipes(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
