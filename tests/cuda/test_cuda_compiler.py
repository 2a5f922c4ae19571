"""Sources with headers, compiled kernels on disk, and the switch that turns kernels off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import matbackprop.cuda
from matbackprop.cuda import (
    compiler,
    cusolver,
    jacobi,
    matrix_function,
    pool,
    svd,
    tridiagonal,
)
from matbackprop.cuda.compiler import FUNCTIONS
from matbackprop.solvers import route

FOLDER = Path(compiler.__file__).parent
SOURCES = {
    "jacobi": (jacobi.SOURCE, {"REAL_IS_DOUBLE": 0}),
    "separate": (jacobi.SEPARATE, {}),
    "pool, thin": (pool.SOURCES[True], {"FUNCTION": 0, "IN": "float", "OUT": "float"}),
    "pool, primal": (pool.SOURCES[False], {"FUNCTION": 1, "IN": "float", "OUT": "double"}),
    "pool, weights": (pool.PREPARE, {"IN": "float", "WEIGHT": "bool"}),
    "matrix function": (matrix_function.SOURCE, {"FUNCTION": 4, "IN": "float"}),
    "svd": (svd.SOURCE, {"IN": "float"}),
    "tiny": (svd.TINY, {"K": 3, "L": 4, "IN": "float"}),
    "tridiagonal": (tridiagonal.SOURCE, {"CLUSTER": 2, "REDUCE_THREADS": 512}),
}


@pytest.fixture
def nvrtc(monkeypatch):
    """NVRTC in the nvidia packages next to torch, which may be built for the CPU."""
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "any")
    library = compiler.load_library.__wrapped__("nvrtc")
    if library is None:
        pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc-cu12)")
    monkeypatch.setattr(compiler, "load_library", {"nvrtc": library}.get)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", SOURCES)
def test_sources_compile_for_the_device(nvrtc, name):
    source, choices = SOURCES[name]
    assert compiler.compile_cubin(source.text(), "sm_90", source.constants | choices)


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_matrix_function_compiles(nvrtc, number):
    source = matrix_function.SOURCE
    choices = {"IN": "float", "FUNCTION": number}
    assert compiler.compile_cubin(source.text(), "sm_90", source.constants | choices)


def test_every_file_belongs_to_a_source_and_is_included_once():
    used = set()
    for source, _ in SOURCES.values():
        text = source.text()
        assert '#include "' not in text
        used |= {file.name for file in FOLDER.glob("*.cu*") if file.read_text().split("\n", 1)[0] in text}
        assert text.count("shared_memory[];") <= 1
    assert {file.name for file in FOLDER.glob("*.cuh")} <= used


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Sources that were compiled, by a compiler that returns them reversed."""
    texts = []

    def compile_cubin(text, architecture, defines):
        texts.append(text)
        return f"{architecture} {defines} {text}".encode() * 3

    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "13.0")
    return texts


def test_kernels_are_compiled_once_for_source_definitions_architecture_and_compiler(compiled, monkeypatch, tmp_path):
    first = compiler.cached_cubin("a", "sm_90", {"X": 1})
    assert compiler.cached_cubin("a", "sm_90", {"X": 1}) == first
    assert compiled == ["a"]
    compiler.cached_cubin("b", "sm_90", {"X": 1})
    compiler.cached_cubin("a", "sm_80", {"X": 1})
    compiler.cached_cubin("a", "sm_90", {"X": 2})
    monkeypatch.setattr(compiler, "compiler_version", lambda: "13.1")
    compiler.cached_cubin("a", "sm_90", {"X": 1})
    assert len(compiled) == 5
    files = list((tmp_path / "kernels").iterdir())
    assert len(files) == 5 and all(file.suffix == ".cubin" for file in files)


@pytest.mark.parametrize("corrupt", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"?" + b[41:]])
def test_a_corrupted_file_is_recompiled(compiled, tmp_path, corrupt):
    first = compiler.cached_cubin("a", "sm_90", {})
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(corrupt(file.read_bytes()))
    assert compiler.cached_cubin("a", "sm_90", {}) == first
    assert compiler.cached_cubin("a", "sm_90", {}) == first
    assert compiled == ["a", "a"]


def test_an_unwritable_folder_is_not_used(compiled, monkeypatch, tmp_path):
    (tmp_path / "kernels").write_text("a file in the way")
    for _ in range(2):
        assert compiler.cached_cubin("a", "sm_90", {})
    assert compiled == ["a", "a"]


def test_one_switch_turns_all_kernels_off(monkeypatch):
    monkeypatch.setattr(compiler, "_found", lambda: True)
    monkeypatch.setattr(compiler, "capability", lambda device: (9, 0))
    monkeypatch.setattr(cusolver, "_library", lambda: object())
    device = torch.device("cuda", 0)
    assert compiler.available() and route(device, torch.float32, 12, 10) == "jacobi"
    with matbackprop.cuda.kernels(enabled=False):
        assert not compiler.available()
        for n in (12, 200, 2000):
            assert route(device, torch.float32, n, 10) == "torch"
        with matbackprop.cuda.kernels(enabled=True):
            assert compiler.available()
        assert not compiler.available()
    assert compiler.available()


@pytest.mark.parametrize(("value", "enabled"), [("0", "False"), ("1", "True"), (None, "True")])
def test_the_environment_turns_kernels_off(value, enabled):
    environment = {k: v for k, v in os.environ.items() if k != "MATBACKPROP_KERNELS"}
    environment |= {} if value is None else {"MATBACKPROP_KERNELS": value}
    program = "import importlib.util, sys\nspec = importlib.util.spec_from_file_location('c', sys.argv[1])\n"
    program += "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
    program += "print(module.kernels_enabled())"
    command = [sys.executable, "-c", program, matbackprop.cuda.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == enabled
