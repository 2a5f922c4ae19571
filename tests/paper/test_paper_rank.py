"""Lemma 2, close projectors have equal ranks, and its corollary for J₂."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.paper import matrix
from matbackprop import normalized_cut_j2, projector, rank_report


def low_rank(m, r, seed):
    return matrix(m, r, seed=seed) @ matrix(r, m, seed=seed + 1000)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 500), st.floats(0, 1))
def test_lemma_2(r, s, seed, mix):
    """If ‖Π_A − Π_B‖₂ < 1 the ranks are equal; so with different ranks the distance is at least 1."""
    a = low_rank(6, r, seed)
    b = (1 - mix) * a + mix * low_rank(6, s, seed + 1) if r == s else low_rank(6, s, seed + 1)
    pa, pb = projector(a), projector(b)
    distance = torch.linalg.matrix_norm(pa - pb, 2)
    ranks = [int(p.trace().round()) for p in (pa, pb)]
    if distance < 1 - 1e-9:
        assert ranks[0] == ranks[1]
    if ranks[0] != ranks[1]:
        assert distance > 1 - 1e-9


def test_the_vector_of_the_proof():
    """rank A > rank B: a v in the range of A that is orthogonal to the range of B."""
    pa, pb = projector(low_rank(6, 3, 0)), projector(low_rank(6, 2, 5))
    values, vectors = torch.linalg.eigh(pa - pb)
    v = vectors[:, -1]
    assert abs(values[-1] - 1) < 1e-10
    assert (pa @ v - v).norm() < 1e-7
    assert (pb @ v).norm() < 1e-7


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.just(0.0) | st.floats(1e-3, 0.6), st.integers(0, 500))
def test_corollary_j2_below_one_half_means_equal_ranks(d, k, noise, seed):
    labels = torch.arange(15) % k
    e = torch.nn.functional.one_hot(labels).double()
    f = e @ matrix(k, d, seed=seed) + noise * matrix(15, d, seed=seed + 1)
    report, rank = rank_report(f, labels), int(projector(f).trace().round())
    value = report.j2
    assert report.rank == rank
    assert report.certified == (value < 0.5 - 1e-9)
    if report.certified:
        assert rank == k
    assert value >= abs(rank - k) / 2 - 1e-9


def test_erratum_17_equal_ranks_are_not_equal_spans():
    """Printed: J₂ < 1/2 means that the spans are perfectly aligned. It means that their dimensions are equal."""
    labels = torch.arange(15) % 3
    f = torch.nn.functional.one_hot(labels).double() + 0.03 * matrix(15, 3)
    report = rank_report(f, labels)
    assert 1e-3 < report.j2 < 0.1
    assert report.certified
    assert report.rank == report.regions == 3
    assert report.alignment > 1e-4  # zero for equal spans


def test_the_rank_term_of_j2_has_no_gradient():
    """J₂ ≥ |rank − k|/2: a superfluous direction adds ½, whatever its size, until it is exactly zero."""
    labels = torch.arange(15) % 3
    e = torch.nn.functional.one_hot(labels).double()
    useless = matrix(15, 1)
    useless = useless - e @ torch.linalg.lstsq(e, useless).solution
    for size in (1.0, 1e-3):
        assert abs(normalized_cut_j2(torch.cat([e, size * useless], 1), labels) - 0.5) < 1e-9
    assert normalized_cut_j2(torch.cat([e, 0 * useless], 1), labels).abs() < 1e-12
