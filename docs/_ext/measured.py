"""Generate the benchmark pages in docs/_generated from benchmarks/results."""

import json
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent


def build(app):
    """Write the tables and plots of all machines, and the table of adversarial matrices."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.adversarial_matrices import table
    from benchmarks.speed.page import write_page

    results, generated = ROOT / "benchmarks" / "results", DOCS / "_generated"
    write_page(results, generated / "benchmarks.md", link="_generated/benchmarks", figures=generated / "benchmarks")
    summary = json.loads((results / "adversarial_matrices.json").read_text(encoding="utf-8"))
    (generated / "adversarial_matrices.md").write_text(table(summary), encoding="utf-8")


def setup(app):
    app.connect("builder-inited", build)
    return {"parallel_read_safe": True}
