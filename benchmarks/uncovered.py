"""Name what no test runs: ``python benchmarks/uncovered.py``, after ``make coverage``.

Reads ``build/coverage.json`` and writes ``benchmarks/results/coverage.json``: the share of lines that tests run, and
the functions with lines that they do not, each with their number and the reason. A function with more than three such
lines and no reason in `REASONS` makes the command fail, and so does a share below 95 %.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WANTED = 95
FEW = 3
SINGLE = "single lines: refusals and rare cases"
GPU = "needs a GPU, where its tests run"
CHILD = "runs in processes of its own, which are not measured"
EXTRA = "needs a package that was not installed"
REASONS = {  # of a folder, of a file, or of a function of it
    "bench": "peers that are not installed, and a GPU",
    "cuda": GPU,
    "functional/_ties.py": GPU,
    "functional/_labels.py": GPU,
    "solvers/eigh.py": GPU,
    "spectral/segment.py": GPU,
    "spectral/superpixels.py": GPU,
    "training/graphs.py": GPU,
    "training/ncuts.py": GPU,
    "cli/serve.py": CHILD,
    "workers.py": CHILD,
    "signals.py": CHILD,
    "training/engine.py": CHILD,
    "serve/guard.py": CHILD,
    "models/weights.py:PretrainedMixin.push_to_hub": CHILD,
    "reproduce/table.py:reproduce": CHILD,
    "data/pictures.py:_video_frames": EXTRA,
    "models/backbones/modules.py": EXTRA,
    "functional/_topk.py:_SparseProduct.tangent": "forward mode of sparse matrices, which torch cannot make",
    "cli/doctor.py:_data": "without NumPy",
}


def functions(path: Path, lines: list[int]) -> Counter[str]:
    """How many of the lines each function has, the innermost that holds one; ``module`` for the others."""
    spans = []

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{name}.{child.name}".lstrip(".")
                spans.append((child.lineno, child.end_lineno or child.lineno, inner))
                visit(child, inner)
            else:
                visit(child, name)

    visit(ast.parse(path.read_text()), "")
    return Counter(max((s for s in spans if s[0] <= n <= s[1]), default=(0, 0, "module"))[2] for n in lines)


def summary(measured: dict) -> dict:
    """The share of lines, and what is not run with its reason."""
    rest = []
    for file, found in sorted(measured["files"].items()):
        for name, count in sorted(functions(ROOT / file, found["missing_lines"]).items()):
            short = file.removeprefix("src/matbackprop/")
            keys = (f"{short}:{name}", short, short.split("/")[0])
            why = next((REASONS[key] for key in keys if key in REASONS), SINGLE if count <= FEW else None)
            rest.append({"file": short, "function": name, "lines": count, "why": why})
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    totals = measured["totals"]
    return {
        "command": "make coverage && python benchmarks/uncovered.py",
        "revision": git.stdout.strip(),
        "python": platform.python_version(),
        "lines": totals["num_statements"],
        "run by tests": totals["covered_lines"],
        "percent": round(totals["percent_covered"], 2),
        "by reason": dict(
            Counter(
                {why: sum(r["lines"] for r in rest if r["why"] == why) for why in {r["why"] for r in rest}}
            ).most_common()
        ),
        "rest": rest,
    }


def main() -> int:
    """Write the summary; the exit code says whether enough is run, and the rest has reasons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=ROOT / "build" / "coverage.json")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "coverage.json")
    options = parser.parse_args()
    result = summary(json.loads(options.measured.read_text()))
    options.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    unknown = [f"{r['file']}:{r['function']} ({r['lines']})" for r in result["rest"] if r["why"] is None]
    print(f"{result['percent']} % of {result['lines']} lines. Without a reason: {', '.join(unknown) or 'none'}")
    return int(result["percent"] < WANTED or bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
