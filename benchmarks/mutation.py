"""Change key lines of the package one at a time, and see whether a test notices: ``python benchmarks/mutation.py``.

A mutant is one changed expression: an operator, a comparison, a sign, a constant, a transpose, a minimum for a maximum,
a condition, or a line left out. The tests that belong to its file run against a copy of the package that holds it. A
mutant that no test notices is a survivor; ``benchmarks/mutation_judgements.json`` says of each whether it is equivalent
(no input shows it) or what was done. The sample is drawn by ``--seed``; the summary goes to
``benchmarks/results/mutation.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/matbackprop"
# The tests of each file, short ones: names of test files, and after | the rows or names to choose (pytest -k).
TESTS = {
    "functional/_affinity.py": "affinity hostile_matrices | affinity or cut_value",
    "functional/_eigh.py": "paper_eig operator_ties operator_gradcheck hostile_matrices | eig",
    "functional/_svd.py": "paper_svd operator_ties operator_gradcheck hostile_matrices | svd",
    "functional/_ties.py": "operator_ties deferred_complaints",
    "functional/_generalized_eigh.py": "generalized_eigh operator_gradcheck | generalized",
    "functional/_linear_solve.py": "linear_solve hostile_matrices | linear_solve or crf or conjugate",
    "functional/_low_rank.py": "operator_gradcheck operator_degenerate hostile_matrices | low_rank",
    "functional/_matrix_clamp.py": "matrix_clamp hostile_matrices | clamp",
    "functional/_matrix_function.py": "paper_matrix_functions operator_errors hostile_matrices | matrix",
    "functional/_moments.py": "operator_weights operator_gradcheck hostile_matrices | pool or weight",
    "functional/_second_order_pool.py": "operator_weights operator_errors operator_gradcheck hostile_matrices | pool",
    "functional/_normalized_cut.py": "normalized_cut_values normalized_cut_bad_input hostile_matrices | cut",
    "functional/_spans.py": "normalized_cut_values operator_gradcheck hostile_matrices | cut",
    "functional/_labels.py": "normalized_cut_values normalized_cut_bad_input",
    "functional/_polar.py": "polar",
    "functional/_procrustes.py": "polar hostile_matrices | procrustes or rotation",
    "functional/_projector.py": "projector hostile_matrices | projector",
    "functional/_spectral_embedding.py": "spectral_embedding",
    "functional/_spectrum.py": "operator_gradcheck hostile_matrices | matrix or pool_thin or low_rank",
    "functional/_triangle.py": "operator_gradcheck operator_laws hostile_matrices | vectorize or triangle",
    "functional/_rank_report.py": "rank_report",
    "functional/_inverse_root.py": "operator_gradcheck hostile_matrices | inverse_root",
    "functional/_whiten.py": "whiten",
    "divided_differences.py": "divided_differences hostile_matrices | divided or matrix",
    "checks.py": "operator_errors operator_scale",
    "numerics.py": "projector rank_report hostile_matrices | projector or sqrt or cut or rank",
    "solvers/gram.py": "solvers_gram",
    "solvers/svd.py": "solvers_svd",
    "solvers/eigh.py": "solvers_eigh",
    "metrics/bootstrap.py": "metrics_bootstrap",
    "metrics/boundaries.py": "metrics_boundaries",
    "metrics/evaluation.py": "metrics_evaluation",
    "metrics/objects_parts.py": "metrics_objects_parts",
    "metrics/regions.py": "metrics_regions",
    "spectral/components.py": "spectral_components",
    "spectral/hierarchy.py": "spectral_hierarchy spectral_contour_map",
    "spectral/clustering.py": "spectral_kmeans spectral_rounding",
    "spectral/segment.py": "spectral_points spectral_segment",
    "spectral/superpixels.py": "spectral_slic spectral_segment",
    "training/run_folder.py": "engine_checkpoint engine_run_folder | not costs_only",
}


def selection(file: str) -> list[str]:
    """The arguments of pytest for a file."""
    names, _, chosen = TESTS[file].partition(" | ")
    paths = [str(next((ROOT / "tests").rglob(f"test_{name}.py"))) for name in names.split()]
    return [*paths, "-k", chosen] if chosen else paths


_OTHER = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_PAIRS = (("max", "min"), ("amax", "amin"), ("maximum", "minimum"), ("any", "all"))
_SWAPPED = dict(_PAIRS) | {b: a for a, b in _PAIRS}
_DROPPED = {"mT", "mH", "T"}


@dataclass(frozen=True)
class Mutant:
    """One changed expression: where, and what it was and became."""

    file: str
    line: int
    before: str
    after: str
    start: int
    end: int


class _Mutations(ast.NodeVisitor):
    """Collects what may be changed; texts of errors, annotations, decorators, imports and docstrings stay."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.AST, str]] = []

    def visit_Raise(self, node: ast.Raise) -> None:
        self.found.append((node, "pass"))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.found.append((node, "pass"))
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.found.append((node, str(not node.value)))
        elif isinstance(node.value, (int, float)):
            self.found.append(
                (node, repr(node.value + 1 if isinstance(node.value, int) else node.value * 2 + (node.value == 0)))
            )

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if other := _OTHER.get(type(node.op)):
            self.found.append((node, f"({ast.unparse(ast.BinOp(node.left, other(), node.right))})"))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.found.append((node, f"({ast.unparse(ast.BoolOp(_OTHER[type(node.op)](), node.values))})"))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and (other := _OTHER.get(type(node.ops[0]))):
            self.found.append((node, f"({ast.unparse(ast.Compare(node.left, [other()], node.comparators))})"))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
            self.found.append((node, f"({ast.unparse(node.operand)})"))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _DROPPED:
            self.found.append((node, ast.unparse(node.value)))
        elif node.attr in _SWAPPED:
            self.found.append((node, f"{ast.unparse(node.value)}.{_SWAPPED[node.attr]}"))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _SWAPPED:
            self.found.append((node.func, _SWAPPED[node.func.id]))
        self.generic_visit(node)


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of one file of the package."""
    source = (ROOT / PACKAGE / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    visitor = _Mutations()
    visitor.visit(ast.parse(source))
    for node, after in visitor.found:
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        yield Mutant(file, node.lineno, source[start:end].decode(), after, start, end)


def passes(file: str, folder: Path, seconds: int) -> bool:
    """Whether the tests of a file pass, in time, with the copy of the package in ``folder``."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        sys.path.insert(0, str(folder))
        os.chdir(ROOT)
        import pytest

        code = 2
        try:
            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not cuda"]
            code = int(pytest.main([*options, *selection(file)]))
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code == 5:
                raise RuntimeError(f"no test was selected for {file}: {TESTS[file]}")
            return code == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def survives(mutant: Mutant, folder: Path, seconds: int) -> bool:
    """Whether no test notices the mutant."""
    target = folder / "matbackprop" / mutant.file
    source = (ROOT / PACKAGE / mutant.file).read_bytes()
    target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    try:
        return passes(mutant.file, folder, seconds)
    finally:
        target.write_bytes(source)


def main() -> int:
    """Try a sample of mutants and write the summary; the exit code says whether every survivor has been judged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=300, help="size of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TESTS, help="these files only")
    parser.add_argument("--seconds", type=int, default=180, help="limit for the tests of one mutant")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "mutation.json")
    options = parser.parse_args()
    files = options.only or list(TESTS)
    everything = [m for file in files for m in mutants(file)]
    sample = random.Random(options.seed).sample(everything, min(options.mutants, len(everything)))
    judgements = json.loads((ROOT / "benchmarks" / "mutation_judgements.json").read_text())
    sys.path.insert(0, str(ROOT / "tests"))
    import mpmath  # noqa: F401 (what all tests import, once for all children)
    import numpy  # noqa: F401
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    started, survivors, tried = time.perf_counter(), [], {file: [0, 0] for file in files}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / PACKAGE, folder / "matbackprop", ignore=shutil.ignore_patterns("__pycache__"))
        for number, mutant in enumerate(sample, 1):
            if not tried[mutant.file][0] and not passes(mutant.file, folder, options.seconds):
                raise RuntimeError(f"the tests of {mutant.file} fail without any mutant: {TESTS[mutant.file]}")
            noticed = not survives(mutant, folder, options.seconds)
            tried[mutant.file][0] += 1
            tried[mutant.file][1] += noticed
            if not noticed:
                line = (ROOT / PACKAGE / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
                key = f"{mutant.file}: {mutant.before} -> {mutant.after} in {line}"
                survivors.append({**asdict(mutant), "key": key, "judgement": judgements.get(key, "not judged")})
            print(f"\r{number} of {len(sample)}, {len(survivors)} survive", end="", file=sys.stderr)
            options.output.write_text(
                json.dumps(summary(options, len(everything), tried, survivors, started), indent=2) + "\n"
            )
    noticed = sum(n for _, n in tried.values())
    print(f"\n{noticed} of {len(sample)} noticed: {options.output}")
    return int(any(s["judgement"] == "not judged" for s in survivors))


def summary(
    options: argparse.Namespace, possible: int, tried: dict[str, list[int]], survivors: list[dict], started: float
) -> dict:
    """What has been tried so far."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "command": f"python benchmarks/mutation.py --mutants {options.mutants} --seed {options.seed}",
        "revision": revision.stdout.strip(),
        "possible": possible,
        "tried": sum(t for t, _ in tried.values()),
        "noticed": sum(n for _, n in tried.values()),
        "seconds": round(time.perf_counter() - started),
        "files": {file: {"tried": t, "noticed": n} for file, (t, n) in tried.items() if t},
        "survivors": survivors,
    }


if __name__ == "__main__":
    sys.exit(main())
