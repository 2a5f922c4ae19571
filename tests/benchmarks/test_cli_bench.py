"""The command ``python -m benchmarks speed``."""

import pytest
import torch

from benchmarks.__main__ import COMMANDS
from benchmarks.speed.cli import Config, measure_alone
from benchmarks.speed.measure import load_results
from matbackprop.cli import run
from matbackprop.errors import ConfigurationError


@pytest.mark.slow
def test_measures_prints_and_writes(tmp_path, capsys):
    arguments = ["ncuts", "--quick", "--device", "cpu", "--seconds", "0.01", "--output", str(tmp_path)]
    assert run("speed", arguments, COMMANDS) == 0
    (path,) = tmp_path.glob("*.json")
    text = capsys.readouterr().out
    assert "matbackprop, J₂" in text and text.rstrip().endswith(str(path))
    assert {r.suite for r in load_results(path).records} == {"ncuts"}


@pytest.mark.slow
def test_measures_a_subset_for_a_limited_time(tmp_path):
    options = ["decompositions", "--quick", "--device", "cpu", "--seconds", "0.01", "--output", str(tmp_path)]
    assert run("speed", [*options, "--limit", "0"], COMMANDS) == 0
    (path,) = tmp_path.glob("*.json")
    assert load_results(path).records == []
    assert run("speed", [*options, "--cases", "eigh.*forward$"], COMMANDS) == 0
    cases = {r.case for r in load_results(path).records}
    assert cases == {"eigh, float32, 2×3×3, forward", "eigh, float64, 2×3×3, forward"}


@pytest.mark.slow
def test_a_suite_in_a_separate_process():
    results = measure_alone(
        Config(quick=True, seconds=0.01, revision="abc", threads=1), "inverse-root", torch.device("cpu")
    )
    assert results.revision == "abc" and results.machine["threads"] == 1
    assert {r.suite for r in results.records} == {"inverse-root"} and any(r.status == "ok" for r in results.records)


def test_unknown_suites_and_devices():
    with pytest.raises(ConfigurationError, match="Suites: pooling"):
        run("speed", ["poling"], COMMANDS)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="CUDA is not available"):
            run("speed", ["pooling", "--device", "cuda"], COMMANDS)
