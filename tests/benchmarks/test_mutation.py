"""The tool of mutation testing: what it changes, and which tests it chooses."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("mutation", Path(__file__).parents[2] / "benchmarks" / "mutation.py")
mutation = sys.modules["mutation"] = importlib.util.module_from_spec(SPEC)  # dataclasses look there
SPEC.loader.exec_module(mutation)

MUTANT = {"before": "1", "after": "2", "start": 0, "end": 1}


def test_every_mutant_is_a_program_that_differs_from_the_file():
    file = "functional/_triangle.py"
    source = (mutation.ROOT / mutation.PACKAGE / file).read_bytes()
    actual = list(mutation.mutants(file))
    assert len(actual) > 20
    for mutant in actual:
        changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant


def test_a_mutant_meets_the_tests_of_its_line_or_of_its_function_where_it_is_a_default():
    tests = mutation.Tests(
        {
            "tests": ["a", "b", "c"],
            "seconds": [1.0, 1.0, 1.0],
            "lines": {"f.py": {"1": [-1], "2": [-1], "3": [0, 1], "4": [1], "7": [-1, 0], "8": [-1, 0], "9": [2]}},
        }
    )

    def of(first, last, function):
        return tests.of(mutation.Mutant(file="f.py", line=first, last=last, function=function, **MUTANT))

    assert of(3, 4, (2, 6)) == {0, 1}
    assert of(2, 2, (2, 6)) == {0, 1}
    assert of(1, 1, None) == {0, 1, 2}
    assert of(5, 5, (2, 6)) == set()
    assert of(8, 8, (7, 8)) == {0, 1, 2}


def test_quick_tests_of_different_functions_come_first_and_budgets_cut():
    tests = mutation.Tests({"tests": ["x[1]", "x[2]", "y"], "seconds": [3.0, 1.0, 2.0], "lines": {}})
    assert [tests.names[i] for i in tests.ordered([0, 1, 2])] == ["x[2]", "y", "x[1]"]
    assert list(tests.slices([0, 1, 2], 3.0, 10.0)) == [(["x[2]", "y"], 3.0), (["x[1]"], 3.0)]


def test_the_watcher_tells_the_lines_of_import_and_of_each_test(tmp_path):
    """In a process of its own: a trace function would take the place of that of coverage."""
    (tmp_path / "part.py").write_text("def double(x):\n    if x:\n        return 2 * x\n    return 0\n")
    script = f"""
import json, sys
sys.path[:0] = [{str(tmp_path)!r}, {str(mutation.ROOT / "benchmarks")!r}]
from pathlib import Path
from mutation import Watcher
watcher = Watcher(Path({str(tmp_path)!r}), ["part.py"])
import part
watcher.pytest_collection_finish()
for number in (0, 3):
    watcher.pytest_runtest_logstart(str(number))
    part.double(number)
    watcher.pytest_runtest_logfinish(str(number))
print(json.dumps(watcher.lines))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == {"": {"part.py": [1]}, "0": {"part.py": [2, 4]}, "3": {"part.py": [2, 3]}}


def test_a_mutant_is_noticed_by_the_test_that_fails_and_survives_without_one(monkeypatch, tmp_path):
    mutant = mutation.Mutant(file="part.py", line=1, last=1, function=None, **MUTANT)
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    for folder in (tmp_path / mutation.PACKAGE, tmp_path / "copy" / "matbackprop"):
        folder.mkdir(parents=True)
        (folder / "part.py").write_text("1\n")
    seen = []

    def run(folder, arguments, seconds):
        seen.append((folder / "matbackprop" / "part.py").read_text())
        return {
            "failed": ["b"] if "b" in arguments else [],
            "seconds": {name: 1.0 for name in arguments if name != "-x"},
        }

    monkeypatch.setattr(mutation, "run", run)
    assert mutation.noticed_by(mutant, [(["a"], 1.0), (["b"], 1.0)], tmp_path / "copy") == "b"
    assert mutation.noticed_by(mutant, [(["a"], 1.0)], tmp_path / "copy") is None
    assert seen == ["2\n"] * 3
    assert (tmp_path / "copy" / "matbackprop" / "part.py").read_text() == "1\n"
