"""The tool that names what no test runs."""

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("uncovered", Path(__file__).parents[2] / "benchmarks" / "uncovered.py")
uncovered = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(uncovered)


def test_lines_belong_to_the_innermost_function(tmp_path):
    path = tmp_path / "part.py"
    path.write_text("x = 1\nclass A:\n    def f(self):\n        def g():\n            return 1\n        return g\n")
    assert uncovered.functions(path, [1, 5, 6]) == {"module": 1, "A.f.g": 1, "A.f": 1}


def test_every_reason_is_of_a_file_or_folder_that_there_is():
    for key in uncovered.REASONS:
        assert (uncovered.ROOT / "src" / "matbackprop" / key.split(":")[0]).exists(), key
