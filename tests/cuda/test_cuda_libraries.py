"""Finding CUDA libraries, and clear errors if there are none."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from matbackprop.cuda import compiler, cusolver, jacobi
from matbackprop.errors import SolverError


def test_without_cuda_nothing_is_found(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert compiler.load_library.__wrapped__("cusolver") is None


def test_the_library_shipped_with_torch_is_opened(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcusolver.so.12").touch()
    (tmp_path / "torch").mkdir()
    opened = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(compiler.sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: opened.append(path) or "library")
    assert compiler.load_library.__wrapped__("cusolver") == "library"
    assert opened == [str(folder / "libcusolver.so.12")]


def test_a_library_that_does_not_open_is_skipped(monkeypatch):
    def refuse(path):
        raise OSError(path)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert compiler.load_library.__wrapped__("nvrtc") is None


def test_compiling_without_nvrtc_raises(monkeypatch):
    monkeypatch.setattr(compiler, "load_library", lambda name: None)
    with pytest.raises(SolverError, match="NVRTC"):
        compiler.compile_cubin("", "sm_90", {})
    assert compiler._found.__wrapped__() is False


def test_a_library_without_the_routine_is_not_used(monkeypatch):
    monkeypatch.setattr(cusolver, "load_library", lambda name: object())
    assert cusolver._library.__wrapped__() is None


@pytest.mark.parametrize("n", range(1, jacobi.MAX_ORDER + 1))
def test_every_order_fits_into_a_block(n):
    sizes = jacobi.Sizes(n)
    half = sizes.players // 2
    assert sizes.threads % 32 == 0 and sizes.threads <= 768
    assert sizes.threads >= n and sizes.threads > 32 + 32 * (-(-half * (half - 1) // 2 // 32)) - 1
    assert sizes.solver_threads <= sizes.threads <= sizes.vectors  # scratch of one number per thread
    assert sizes.shared_bytes(8) <= 160 * 1024  # limit of a block on an A100


def test_magma_is_not_chosen_for_matrices_on_cuda(monkeypatch):
    chosen = []

    def preferred(backend=None):
        if backend is not None:
            chosen.append(backend)
        return "default"

    monkeypatch.setattr(torch.backends.cuda, "preferred_linalg_library", preferred)
    with cusolver.without_magma(torch.ones(1)):
        assert chosen == []
    with pytest.raises(ValueError, match="inside"), cusolver.without_magma(SimpleNamespace(is_cuda=True)):
        assert chosen == ["cusolver"]
        raise ValueError("inside")
    assert chosen == ["cusolver", "default"]
