"""The comparison of kernels with their fallbacks detects errors."""

from pathlib import Path

import torch

from matbackprop import kernel_check
from matbackprop.cuda import kernels_enabled
from matbackprop.kernel_check import CASES, Case, compare_kernels


def test_every_case_runs_and_agrees_with_itself_on_the_cpu():
    comparisons = compare_kernels("cpu")
    assert len(comparisons) == len(CASES)
    for one in comparisons:
        assert one.right and one.error == 0, one


def test_every_source_has_a_case():
    folder = Path(kernel_check.__file__).parent / "cuda"
    sources = {file.name for file in folder.glob("*.cu")}
    assert sources == {case.source for case in CASES}


def wrong_value(x):
    return x * (1.001 if kernels_enabled() else 1)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1.001 if kernels_enabled() else 1)


def failing(x):
    if kernels_enabled():
        raise RuntimeError("the kernel failed")
    return x


def test_wrong_values_wrong_gradients_nan_and_failures_are_detected():
    functions = (wrong_value, WrongGradient.apply, lambda x: x * (torch.nan if kernels_enabled() else 1), failing)
    comparisons = compare_kernels("cpu", [Case("x.cu", function, (2, 3)) for function in functions])
    assert not any(one.right for one in comparisons)
    assert comparisons[-1].message == "the kernel failed"
