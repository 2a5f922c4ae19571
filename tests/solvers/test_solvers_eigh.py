"""The batched eigensolver: values, layouts, transformations, routes, and failures."""

import threading

import numpy as np
import pytest
import torch

from matbackprop._torch import WHOLE_GRAPHS
from matbackprop.cuda import compiler, cusolver, tridiagonal
from matbackprop.errors import DtypeError, ShapeError, SolverError
from matbackprop.solvers import batched_eigh, route
from matbackprop.solvers import eigh as solver
from matbackprop.solvers.eigh import _in_threads


def symmetric(*shape, dtype=torch.float64, device="cpu", seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x + x.mT).to(device, dtype)


def check(a, values, vectors):
    tol = 200 * torch.finfo(a.dtype).eps * max(a.shape[-1], 1)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    scale = a.abs().amax() if a.numel() else 1
    assert values.shape == a.shape[:-1] and vectors.shape == a.shape
    assert (values.diff(dim=-1) >= 0).all()
    assert ((vectors.mT @ vectors - eye).abs() <= tol).all()
    assert ((a @ vectors - vectors * values.unsqueeze(-2)).abs() <= tol * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 8, 8), (2, 3, 7, 7), (4, 36, 36), (2, 130, 130)])
def test_eigenpairs_are_accurate(shape, dtype, device):
    a = symmetric(*shape, dtype=dtype, device=device)
    values, vectors = batched_eigh(a)
    check(a, values, vectors)
    reference = np.linalg.eigvalsh(a.double().cpu().numpy())
    assert (
        np.abs(values.double().cpu().numpy() - reference).max() < 50 * torch.finfo(dtype).eps * np.abs(reference).max()
    )


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 3, 3), (3, 0, 0), (0, 0)])
def test_empty_batches_and_orders(shape, device):
    values, vectors = batched_eigh(torch.zeros(shape, device=device))
    assert values.shape == shape[:-1] and vectors.shape == shape


@pytest.mark.parametrize("n", [6, 100, 140])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reads_the_lower_triangle_only(n, dtype, device):
    a = symmetric(3, n, n, dtype=dtype, device=device)
    values, vectors = batched_eigh(a.tril() + torch.full_like(a, 7.0).triu(1))
    check(a, values, vectors)


def test_transposed_and_strided_input(device):
    a = symmetric(6, 9, 9, device=device)
    check(a[::2].mT, *batched_eigh(a[::2].mT))


def test_results_are_detached(device):
    a = symmetric(3, 4, 4, device=device).requires_grad_()
    assert not any(x.requires_grad for x in batched_eigh(a))


def test_results_are_reproducible(device):
    a = symmetric(20, 12, 12, device=device)
    first, second = batched_eigh(a), batched_eigh(a)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_meta():
    values, vectors = batched_eigh(torch.empty(3, 5, 5, device="meta"))
    assert values.shape == (3, 5) and vectors.shape == (3, 5, 5)


@pytest.mark.parametrize("in_dim", [0, 2])
def test_vmap(in_dim, device):
    a = symmetric(4, 6, 6, device=device).movedim(0, in_dim)
    values, _ = torch.vmap(batched_eigh, in_dims=in_dim)(a)
    torch.testing.assert_close(values, batched_eigh(a.movedim(in_dim, 0))[0])


def test_compiles_in_one_graph(device):
    def rebuild(a):
        values, vectors = batched_eigh(a * 2)
        return (vectors * values.unsqueeze(-2)) @ vectors.mT

    torch._dynamo.reset()
    a = symmetric(3, 6, 6, device=device)
    torch.testing.assert_close(torch.compile(rebuild, fullgraph=WHOLE_GRAPHS, backend="aot_eager")(a), 2 * a)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_agree_with_one_thread(threads):
    a = symmetric(37, 24, 24)
    plain = torch.linalg.eigh(a)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert route("cpu", a.dtype, 24, 37) == "lapack-threads"
        values, vectors = batched_eigh(a)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    check(a, values, vectors)
    torch.testing.assert_close(values, plain.eigenvalues)


def test_threads_from_several_callers():
    a = symmetric(40, 20, 20)
    before = torch.get_num_threads()
    actual = []
    try:
        torch.set_num_threads(2)
        callers = [threading.Thread(target=lambda: actual.append(_in_threads(a))) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(before)
    assert len(actual) == 4
    for values, vectors in actual:
        check(a, values, vectors)


def test_route_names(monkeypatch):
    assert route("cpu", torch.float64, n=36, batch=1) == "lapack"
    assert route(torch.device("cpu"), torch.float64, 4) == "lapack"
    assert route("meta", torch.float32, n=4, batch=2) == "torch"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert route("cpu", torch.float64, n=36, batch=100) == "lapack-threads"
    assert route("cpu", torch.float64, n=256, batch=100) == "lapack"
    monkeypatch.setattr(compiler, "available", lambda: True)
    monkeypatch.setattr(cusolver, "available", lambda: True)
    monkeypatch.setattr(compiler, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compiler, "shared_limit", lambda device: 227 * 1024)
    for dtype in (torch.float32, torch.float64):
        assert route("cuda", dtype, n=36, batch=100) == "jacobi"
        assert route("cuda", dtype, n=56, batch=100) == "jacobi"
        assert route("cuda", dtype, n=56, batch=5000) == "tridiagonal"
        assert route("cuda", dtype, n=169, batch=100) == "tridiagonal"
        assert route("cuda", dtype, n=tridiagonal.MAX_ORDER, batch=4) == "tridiagonal"
        assert route("cuda", dtype, n=tridiagonal.MAX_ORDER, batch=1) == "cusolver"
        assert route("cuda", dtype, n=768, batch=1) == "tridiagonal"
        assert route("cuda", dtype, n=1500, batch=4) == "cusolver"
        assert route("cuda", dtype, n=1500, batch=40) == "cusolver-batched"
    device = torch.device("cuda")
    assert solver._route(device, torch.float64, 1024, 1, capturing=True)[0] == "tridiagonal"
    with pytest.raises(SolverError, match=r"order 1500 cannot .* inside a CUDA graph"):
        solver._route(device, torch.float64, 1500, 1, capturing=True)
    monkeypatch.setattr(compiler, "shared_limit", lambda device: 163 * 1024)  # an A100's
    assert route("cuda", torch.float64, n=512) == "tridiagonal"
    assert route("cuda", torch.float64, n=1024, batch=20) == "cusolver-batched"
    monkeypatch.setattr(compiler, "capability", lambda device: (8, 9))  # no unit for float64 products
    assert route("cuda", torch.float64, n=169, batch=100) == "cusolver-batched"
    monkeypatch.setattr(compiler, "capability", lambda device: (9, 0))
    monkeypatch.setattr(compiler, "available", lambda: False)
    assert route("cuda", torch.float32, n=36, batch=100) == "cusolver-batched"
    assert route("cuda", torch.float64, n=169, batch=100) == "cusolver-batched"
    monkeypatch.setattr(cusolver, "available", lambda: False)
    assert route("cuda", torch.float32, n=36, batch=100) == "torch"
    assert route("cuda", torch.float32, n=0, batch=100) == "torch"


def test_bad_input():
    with pytest.raises(ShapeError, match="square"):
        batched_eigh(torch.zeros(3, 4))
    with pytest.raises(ShapeError, match="square"):
        batched_eigh(torch.zeros(3))
    with pytest.raises(DtypeError, match="float16"):
        batched_eigh(torch.zeros(3, 3, dtype=torch.float16))
    with pytest.raises(DtypeError, match="int64"):
        route("cpu", torch.int64, n=3, batch=1)


def test_a_failure_on_the_cpu_is_a_solver_error(monkeypatch):
    def fail(_):
        raise torch.linalg.LinAlgError("failed")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(SolverError, match=r"did not converge on 2 matrices of order 3"):
        batched_eigh(torch.ones(2, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gram_matrices_of_masked_features_are_solved_in_float32(dtype):
    """LAPACK's divide and conquer fails on about one in ten of these in float32, and on some processors in float64."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(100, 100, 64, dtype=dtype, generator=generator)
    f *= torch.rand(100, 100, 1, generator=generator) < 0.1
    a = f @ f.mH
    values, vectors = batched_eigh(a)
    assert values.dtype == torch.float32 and vectors.dtype == dtype
    eps = torch.finfo(torch.float32).eps * a.shape[-1] * a.abs().amax((-2, -1))
    exact = torch.linalg.svdvals(f.to(torch.complex128)).square().flip(-1)
    exact = torch.nn.functional.pad(exact, (100 - 64, 0))
    assert ((values - exact).abs().amax(-1) < eps).all()
    assert ((a @ vectors - vectors * values.unsqueeze(-2)).abs().amax((-2, -1)) < eps).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.complex128])
def test_lapack_failure_is_retried_in_another_basis_in_float64(monkeypatch, dtype):
    taken = []

    def fail(a, real=torch.linalg.eigh):
        taken.append(a)
        if len(taken) == 1:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return real(a)

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    a = torch.randn(2, 5, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    a = a + a.mH
    a[:, 1:3], a[:, :, 1:3] = 0, 0
    values, vectors = batched_eigh(a)
    assert taken[1].dtype == torch.promote_types(dtype, torch.float64) and (taken[1] != 0).all()
    assert values.dtype == a.abs().dtype and vectors.dtype == dtype
    eps = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(a @ vectors, vectors * values.unsqueeze(-2), rtol=0, atol=eps)
    torch.testing.assert_close(vectors.mH @ vectors, torch.eye(5, dtype=dtype).expand(2, 5, 5), rtol=0, atol=eps)
