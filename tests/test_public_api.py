"""The public names and the modules that importing them loads."""

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import matbackprop
from matbackprop import nn
from matbackprop._torch import WHOLE_GRAPHS

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
DOCUMENTED = set(re.findall(r"auto(?:function|class):: matbackprop\.(\w+)", (REFERENCE / "functional.md").read_text()))
PUBLIC = set(matbackprop.__all__) - {"nn", "__version__"}
FUNCTIONS = {name for name in PUBLIC if inspect.isfunction(getattr(matbackprop, name))}
MODULES = {name for name in vars(nn) if not name.startswith("_")}


# Packages of the extras, which the core must not import.
HEAVY = {
    "gradio",
    "kornia",
    "lightning_fabric",
    "matplotlib",
    "pandas",
    "PIL",
    "pycocotools",
    "rich",
    "safetensors",
    "scipy",
    "skimage",
    "sklearn",
    "tensorboard",
    "torchmetrics",
    "torchvision",
    "triton",
    "tyro",
}


def test_every_public_name_is_in_the_reference_and_nothing_else_is():
    assert DOCUMENTED | {"SpectralFunction"} == PUBLIC  # documented with its module


def test_modules_have_the_options_of_their_functions():
    of_module = {
        "learn",
        "learn_eps",
        "learn_exponent",
        "vectorize",
        "objective",
        "reduction",
        "lambda_features",
        "maps",
    }
    stems = {"EIG": "eigh", "SVD": "svd", "NormalizedCutLoss": "normalized_cut_soft"}
    others = {
        "MatrixPower": {"exponent"},
        "NormalizedCutLoss": {"rank_tol", "ignore_index", "class_weight", "balanced"},
    }
    for name in MODULES - {
        "SecondOrderHead",
        "SecondOrderPool2d",
        "for_export",
        "replace_pool",
        "Whitening",
    }:  # composed of other modules
        stem = stems.get(name) or re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()
        taken = set(inspect.signature(getattr(nn, name)).parameters) - of_module - others.get(name, set())
        assert taken <= set(inspect.signature(getattr(matbackprop, stem)).parameters), name


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_options_are_keyword_only(name):
    function = getattr(matbackprop, name)
    positional = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    assert 1 <= len(positional) <= 4, positional
    common = [p for p in inspect.signature(function).parameters if p in ("check", "precision")]
    assert common == sorted(common), "check comes before precision"
    for word in ("Args:", "Returns:", ">>>"):
        assert word in function.__doc__, f"{name} has no {word}"


SIGNATURES = {
    "eigh": ["a"],
    "svd": ["a", "full_matrices"],
    "matrix_function": ["a", "function"],
    "matrix_log": ["a"],
    "matrix_power": ["a", "p"],
    "second_order_pool": ["f"],
    "projector": ["a"],
    "affinity": ["f", "lam"],
    "normalized_affinity": ["w"],
    "normalized_cut_value": ["w", "labels"],
    "normalized_cut_j1": ["f", "labels"],
    "normalized_cut_j2": ["f", "labels"],
    "normalized_cut_soft": ["f", "labels"],
    "spectral_embedding": ["f", "k"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_of_arguments(name):
    parameters = list(inspect.signature(getattr(matbackprop, name)).parameters)
    assert parameters[: len(SIGNATURES[name])] == SIGNATURES[name]


@pytest.mark.skipif(not WHOLE_GRAPHS, reason="older versions of torch import the compiler")
def test_importing_needs_torch_and_nothing_else_heavy():
    program = (
        "import sys, torch; before = set(sys.modules); import matbackprop; matbackprop.nn.SecondOrderPool();"
        "print('\\n'.join(sorted(set(sys.modules) - before)))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "matbackprop" in loaded
    assert not {name.split(".")[0] for name in loaded} & HEAVY
    packages = {name.split(".")[1] for name in loaded if name.startswith("matbackprop.")}
    assert not packages & {"vision", "cli"}


def loaded_by(program):
    """Run a program in a new process and return the names in sys.modules."""
    program += "; import sys; print('\\nloaded:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.rsplit("loaded:", 1)[1].split())


COMMAND_LINE = "import matbackprop.cli as c; c.sys.exit = print; c.main(['{}'])"


@pytest.mark.parametrize(
    "program",
    [
        "import matbackprop; matbackprop.__version__; matbackprop.errors.ShapeError",
        *(COMMAND_LINE.format(word) for word in ("--help", "--version", "train")),
    ],
)
def test_imports_are_lazy(program):
    loaded = loaded_by(program)
    assert "matbackprop" in loaded
    assert not loaded & (HEAVY | {"torch", "numpy"})


def test_names_are_found_on_first_use():
    program = (
        "import matbackprop; from matbackprop import *; assert svd is matbackprop.svd is matbackprop.functional.svd;"
        "assert 'svd' in vars(matbackprop); nn.SecondOrderPool(); matbackprop.solvers.batched_eigh"
    )
    assert "torch" in loaded_by(program)
    assert {*matbackprop.__all__, "errors", "functional", "segment", "classify"} <= set(dir(matbackprop))
    assert pickle.loads(pickle.dumps(matbackprop.matrix_log)) is matbackprop.matrix_log
    with pytest.raises(AttributeError, match="module 'matbackprop' has no attribute 'matrix_lgo'"):
        matbackprop.matrix_lgo  # noqa: B018


def test_first_use_within_a_compiled_function():
    program = (
        "import torch, matbackprop; f = torch.compile(lambda a: matbackprop.matrix_log(a), backend='eager', "
        f"fullgraph={WHOLE_GRAPHS}); a = 2 * torch.eye(3); "
        "torch.testing.assert_close(f(a), 0.6931471805599453 * torch.eye(3))"
    )
    loaded_by(program)


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert matbackprop.__version__ == version("matbackprop")
