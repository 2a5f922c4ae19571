"""Change key lines of the package one at a time, and see whether a test notices: ``python benchmarks/mutation.py``.

A mutant is one changed expression: an operator, a comparison, a sign, a constant, a transpose, a minimum for a maximum,
a condition, or a line left out. First the tests run once without any mutant, which tells the tests that run each line
(kept in ``build/mutation_lines.json``; ``--lines`` measures again, as it must when the package or its tests have
changed). A mutant then meets the tests of its line, quick and different ones first, in a copy of the package that holds
it, until one fails or they have taken ``--seconds``. One that none of them notices is a survivor;
``benchmarks/mutation_judgements.json`` says of each whether it is equivalent (no input shows it) or what was done. The
sample is drawn by ``--seed``; a run that was interrupted resumes. The summary goes to
``benchmarks/results/mutation.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/matbackprop"
FILES = ("functional/*.py", "solvers/*.py", "metrics/*.py", "spectral/*.py", "divided_differences.py", "checks.py")
FILES += ("numerics.py", "training/run_folder.py")
TESTS = ("functional", "solvers", "paper", "nn", "spd", "metrics", "spectral")
TESTS += ("training/test_engine_checkpoint.py", "training/test_engine_run_folder.py")
CHOSEN = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not cuda and not data")
SLOW = ("operator_compile", "operator_accuracy", "hostile_matrices")  # a compiler, and many digits
LINES = ROOT / "build" / "mutation_lines.json"


def files() -> list[str]:
    """The files that are changed, relative to the package."""
    package = ROOT / PACKAGE
    found = (path.relative_to(package).as_posix() for pattern in FILES for path in sorted(package.glob(pattern)))
    return [file for file in found if not file.endswith("__init__.py")]


class Watcher:
    """A pytest plugin: which tests fail, and if asked the lines of the files that each test runs, and its seconds."""

    def __init__(self, package: Path, watched: Iterable[str]) -> None:
        self.failed: list[str] = []
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[str, list[int]]] = {}  # of each test, and of import under ""
        self._names = {str(package / file): file for file in watched}
        self._begin()

    def _begin(self) -> None:
        self._seen: dict[str, set[int]] = {path: set() for path in self._names}
        if self._names:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def _end(self, test: str) -> None:
        self.lines[test] = {self._names[path]: sorted(lines) for path, lines in self._seen.items() if lines}

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        lines = self._seen.get(frame.f_code.co_filename)
        if lines is None:
            return None

        def local(frame: Any, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return local

        return local

    def pytest_collection_finish(self) -> None:
        self._end("")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begin()
        self.seconds[nodeid] = time.perf_counter()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = time.perf_counter() - self.seconds[nodeid]
        self._end(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run(folder: Path, arguments: Iterable[str], seconds: float, watched: Iterable[str] = ()) -> dict:
    """What a `Watcher` sees of tests in a child process, with the copy of the package in ``folder``."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            _in_child(folder, arguments, watched, answer)
        finally:
            os._exit(1)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return json.loads(answer.read_text()) if answer.exists() else {"failed": ["the interpreter crashed"]}
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"failed": ["no end in time"]}


def _in_child(folder: Path, arguments: Iterable[str], watched: Iterable[str], answer: Path) -> None:
    os.setsid()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    os.chdir(ROOT)
    import pytest

    watcher = Watcher(folder / "matbackprop", watched)
    code = int(pytest.main([*CHOSEN, *arguments], plugins=[watcher]))
    if code not in (0, 1, 5):  # as where the changed package cannot be imported
        watcher.failed.append(f"pytest ended with {code}")
    seen = {"failed": watcher.failed, "seconds": watcher.seconds, "lines": watcher.lines}
    answer.write_text(json.dumps(seen))


_folder = Path()  # of each worker: its own copy of the package


def _prepare_worker() -> None:
    global _folder
    _folder = Path(tempfile.mkdtemp(prefix=f"worker{os.getpid()}_"))
    shutil.copytree(ROOT / PACKAGE, _folder / "matbackprop", ignore=shutil.ignore_patterns("__pycache__"))


@contextmanager
def workers(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Forked processes that have imported what most tests do, but not the package, each with a copy of it."""
    import mpmath  # noqa: F401
    import pytest  # noqa: F401
    import scipy.linalg  # noqa: F401
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tempfile.tempdir = name
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _prepare_worker) as pool:
            yield pool
        tempfile.tempdir = None


def _measure_file(path: str) -> dict:
    return run(_folder, [path], 900, files())


def measure(processes: int) -> dict:
    """Run the tests once, each file apart: which of them run each line, and how long each takes. Some may fail."""
    left_out = {f"test_{name}.py" for name in SLOW}
    paths = [ROOT / "tests" / name for name in TESTS]
    chosen = chain.from_iterable([p] if p.is_file() else sorted(p.glob("test_*.py")) for p in paths)
    names, seconds, failed = [], [], []
    lines: dict[str, dict[int, list[int]]] = {file: defaultdict(list) for file in files()}
    with workers(processes) as pool:
        for seen in pool.map(_measure_file, [str(path) for path in chosen if path.name not in left_out]):
            failed += seen["failed"]
            for test, found in seen.get("lines", {}).items():
                if test in seen["failed"]:
                    continue
                number = len(names) if test else -1  # −1 stands for the time of import
                if test:
                    names.append(test)
                    seconds.append(seen["seconds"][test])
                for file, numbers in found.items():
                    for line in numbers:
                        lines[file][line].append(number)
    return {"tests": names, "seconds": seconds, "failed": failed, "lines": lines}


class Tests:
    """The tests that run a line, from what `measure` found."""

    def __init__(self, measured: dict) -> None:
        self.names, self.seconds = measured["tests"], measured["seconds"]
        self.lines = {file: {int(n): set(t) for n, t in found.items()} for file, found in measured["lines"].items()}

    def of(self, mutant: Mutant) -> set[int]:
        """The tests of a mutant: those of its lines; where it runs at import, as a default does, of its function's.

        Where these run at import as well, as those of a function that makes a table do, the tests of its file.
        """
        found = self.lines.get(mutant.file, {})

        def within(first: int, last: int) -> set[int]:
            return set().union(*(found.get(n, set()) for n in range(first, last + 1)))

        own = within(mutant.line, mutant.last)
        if -1 not in own:
            return own
        first, last = mutant.function or (1, 0)
        called = set().union(*(found[n] for n in range(first, last + 1) if -1 not in found.get(n, {-1})))
        return called or within(1, max(found)) - {-1}

    def ordered(self, chosen: Iterable[int]) -> list[int]:
        """One test of each function in turn, the quickest of each first."""
        groups = defaultdict(list)
        for test in sorted(chosen, key=lambda i: self.seconds[i]):
            groups[self.names[test].split("[")[0]].append(test)
        return [test for test in chain.from_iterable(zip_longest(*groups.values())) if test is not None]

    def slices(self, chosen: Iterable[int], *budgets: float) -> Iterator[tuple[list[str], float]]:
        """The tests in order, cut where they take so many seconds: node ids, and what they took."""
        rest = self.ordered(chosen)
        for budget in budgets:
            taken, total = [], 0.0
            while rest and (not taken or total + self.seconds[rest[0]] <= budget):
                total += self.seconds[rest[0]]
                taken.append(self.names[rest.pop(0)])
            if taken:
                yield taken, total


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
    last: int
    function: tuple[int, int] | None


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
    tree, visitor = ast.parse(source), _Mutations()
    visitor.visit(tree)
    spans = [(n.lineno, n.end_lineno or n.lineno) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for node, after in visitor.found:
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        around = [span for span in spans if span[0] <= node.lineno <= span[1]]
        yield Mutant(
            file,
            node.lineno,
            source[start:end].decode(),
            after,
            start,
            end,
            node.end_lineno,
            max(around, default=None),
        )


def noticed_by(mutant: Mutant, slices: Iterable[tuple[list[str], float]], folder: Path) -> str | None:
    """The first test that notices the mutant, if one does."""
    target = folder / "matbackprop" / mutant.file
    source = (ROOT / PACKAGE / mutant.file).read_bytes()
    target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    try:
        for names, taken in slices:
            seen = run(folder, ["-x", *names], 60 + 10 * taken)
            if seen["failed"]:
                return seen["failed"][0]
            if len(seen["seconds"]) < len(names):
                raise RuntimeError(f"tests were not found: {set(names) - set(seen['seconds'])}")
        return None
    finally:
        target.write_bytes(source)


def processor() -> str:
    """The name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def record(mutant: Mutant, count: int, slices: list[tuple[list[str], float]]) -> dict:
    """What became of one mutant, of as many tests that run its line, some of them in slices with their seconds."""
    line = (ROOT / PACKAGE / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
    key = f"{mutant.file}: {mutant.before} -> {mutant.after} in {line}"
    by = noticed_by(mutant, slices, _folder)
    verdict = "not run" if not count else "survives" if by is None else "noticed"
    return {**asdict(mutant), "key": key, "tests": count, "verdict": verdict, "by": by}


def main() -> int:
    """Try a sample of mutants and write the summary; the exit code says whether every survivor has been judged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=300, help="size of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=files(), help="these files only")
    parser.add_argument("--seconds", type=float, default=20, help="time that the tests of one mutant took unchanged")
    parser.add_argument("--lines", action="store_true", help="measure again which tests run which lines, and end")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--revision", help="of the package, where git cannot tell it")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "mutation.json")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.lines or not LINES.exists():
        LINES.parent.mkdir(exist_ok=True)
        measured = measure(options.processes)
        LINES.write_text(json.dumps(measured))
        print(f"{len(measured['tests'])} tests, and {len(measured['failed'])} that fail: {measured['failed'][:5]}")
        if options.lines:
            return 0
    started = time.perf_counter()
    tests = Tests(json.loads(LINES.read_text()))
    everything = [m for file in options.only or files() for m in mutants(file)]
    sample = random.Random(options.seed).sample(everything, min(options.mutants, len(everything)))
    progress = LINES.with_name(f"mutation_{options.seed}.jsonl")
    rows = [json.loads(line) for line in progress.read_text().splitlines()] if progress.exists() else []
    done = {(row["file"], row["start"], row["after"]): row for row in rows}
    left = [m for m in sample if (m.file, m.start, m.after) not in done]
    with progress.open("a") as log, workers(options.processes) as pool:
        tasks = []
        for mutant in left:  # a fifth of the time first, and the rest if nothing has failed
            chosen = tests.of(mutant)
            slices = list(tests.slices(chosen, 0.2 * options.seconds, 0.8 * options.seconds))
            tasks.append(pool.submit(record, mutant, len(chosen), slices))
        for number, task in enumerate(as_completed(tasks), 1):
            row = task.result()
            done[row["file"], row["start"], row["after"]] = row
            log.write(json.dumps(row, ensure_ascii=False) + "\n")
            log.flush()
            print(f"\r{number} of {len(left)}", end="", file=sys.stderr)
    seconds = round(time.perf_counter() - started) if len(left) == len(sample) else None
    result = summary(options, everything, [done[m.file, m.start, m.after] for m in sample], seconds)
    options.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(f"\n{result['noticed']} of {len(sample)} noticed: {options.output}")
    return int(any(s["judgement"] == "not judged" for s in (*result["survivors"], *result["not run"])))


def summary(options: argparse.Namespace, everything: list[Mutant], rows: list[dict], seconds: int | None) -> dict:
    """Counts by file, and every survivor with its judgement."""
    judgements = json.loads((ROOT / "benchmarks" / "mutation_judgements.json").read_text())
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)

    def count(verdict: str, file: str | None = None) -> int:
        return sum(row["verdict"] == verdict and file in (None, row["file"]) for row in rows)

    tried = sorted({row["file"] for row in rows})
    return {
        "command": f"python benchmarks/mutation.py --mutants {options.mutants} --seed {options.seed}",
        "revision": options.revision or git.stdout.strip(),
        "processor": processor(),
        "seconds": seconds,  # of a run that was not interrupted
        "possible": len(everything),
        "tried": len(rows),
        "noticed": count("noticed"),
        "survive": count("survives"),
        "run by no test": count("not run"),
        "files": {file: {v: n for v in ("noticed", "survives", "not run") if (n := count(v, file))} for file in tried},
        "survivors": [
            {k: row[k] for k in ("file", "line", "tests", "key")}
            | {"judgement": judgements.get(row["key"], "not judged")}
            for row in rows
            if row["verdict"] == "survives"
        ],
        "not run": [
            {"key": key, "judgement": judgements.get(key, "not judged")}
            for key in sorted(row["key"] for row in rows if row["verdict"] == "not run")
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
