"""The parts of the multiscale normalized cut against their definitions."""

import numpy as np
import pytest

from experiments.multiscale_ncut import (
    CONTOUR_FRACTION,
    LAYER_WEIGHTS,
    constrained_eigenvectors,
    edge_energy,
    intervening_contour,
    multiscale_graph,
)


@pytest.fixture(scope="module")
def graph():
    image = np.random.default_rng(0).random((3, 20, 25))
    image[:, :, 12:] += 2
    return multiscale_graph(image)


def test_edges_are_at_their_position():
    channel = np.zeros((20, 30))
    channel[:, 15:] = 1
    for scale in (1.0, 2.0):
        energy, phase = edge_energy(channel, scale)
        assert set(energy[10].argsort()[-2:]) == {14, 15}
        assert phase[10, 14] != phase[10, 15]  # the sign changes on the edge
        assert energy[10, 0] < 1e-9


def test_contour_counts_the_strongest_change_of_phase():
    energy = np.array([[0.1, 0.2, 0.8, 0.6, 0.3]])
    phase = np.array([[True, True, False, True, True]])
    start, end = np.array([[0, 0], [0, 0], [0, 3]]), np.array([[0, 4], [0, 1], [0, 4]])
    # The first line crosses edges of ½(.2 + .8) and ½(.8 + .6); the others cross none, however strong their pixels are.
    np.testing.assert_allclose(intervening_contour(energy, phase, start, end), [np.exp(-(0.7**2)), 1, 1])


def test_affinity_is_symmetric_and_stays_within_layers(graph):
    sizes = np.cumsum([0] + [height * width for height, width in graph.grids])
    assert graph.grids == [(20, 25), (7, 9), (3, 3)]
    dense = graph.affinity.toarray()
    np.testing.assert_allclose(dense, dense.T)
    assert (dense >= 0).all() and dense.shape == (sizes[-1],) * 2
    for layer, weight in enumerate(LAYER_WEIGHTS):
        block = dense[sizes[layer] : sizes[layer + 1], sizes[layer] : sizes[layer + 1]]
        np.testing.assert_allclose(np.diag(block), weight * (1 + CONTOUR_FRACTION))
        dense[sizes[layer] : sizes[layer + 1], sizes[layer] : sizes[layer + 1]] = 0
    assert not dense.any()


def test_constraint_is_the_mean_of_the_children(graph):
    fine = np.random.default_rng(1).random((20, 25))
    middle = np.array([[fine[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].mean() for j in range(9)] for i in range(7)])
    coarse = np.array([[middle[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].mean() for j in range(3)] for i in range(3)])
    vector = np.concatenate([fine.ravel(), middle.ravel(), coarse.ravel()])
    np.testing.assert_allclose(graph.constraint @ vector, 0, atol=1e-12)
    vector[-1] += 1
    assert np.abs(graph.constraint @ vector).max() == pytest.approx(1)


def test_eigenvectors_against_the_dense_reduced_problem(graph):
    """All vectors that satisfy the constraints are B x for free fine values x: BᵀWB x = λ BᵀDB x."""
    from scipy.linalg import eigh

    values, vectors = constrained_eigenvectors(graph, 5, tolerance=1e-10)
    fine = 20 * 25
    constraint = graph.constraint.toarray()
    basis = np.vstack([np.eye(fine), -np.linalg.solve(constraint[:, fine:], constraint[:, :fine])])
    affinity, degree = graph.affinity.toarray(), np.diag(graph.affinity.sum(1))
    expected = eigh(basis.T @ affinity @ basis, basis.T @ degree @ basis, eigvals_only=True)[::-1][:5]
    np.testing.assert_allclose(values, expected, atol=1e-8)
    np.testing.assert_allclose(constraint @ vectors, 0, atol=1e-8)
    assert values[0] == pytest.approx(1)  # the constant vector, which satisfies every constraint
    np.testing.assert_allclose(vectors[:, 0] / vectors[0, 0], 1, atol=1e-6)
