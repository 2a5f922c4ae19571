"""The appendix: properties of the inner product A:B = tr(AᵀB)."""

import torch

from helpers.paper import colon, diag_part, matrix, sym

A, B, C = matrix(4, 3), matrix(4, 5, seed=1), matrix(5, 3, seed=2)
P, Q, R = matrix(4, 4, seed=3), matrix(4, 4, seed=4), matrix(4, 4, seed=5)


def close(a, b):
    return abs(a - b) < 1e-12


def test_identities_of_the_colon_product():
    other = matrix(4, 3, seed=6)
    assert close(colon(A, other), torch.trace(A.mT @ other))
    assert close(colon(A, other), colon(A.mT, other.mT))
    assert close(colon(A, other), colon(other, A))
    assert close(colon(A, B @ C), colon(B.mT @ A, C))
    assert close(colon(A, B @ C), colon(A @ C.mT, B))
    assert close(colon(A, diag_part(other)), colon(diag_part(A), other))
    assert close(colon(P, sym(Q)), colon(sym(P), Q))
    assert close(colon(P, Q * R), colon(Q * P, R))
    assert close(colon(torch.cat([P, Q], 1), torch.cat([Q, R], 1)), colon(P, Q) + colon(Q, R))
    x = matrix(4, seed=7)
    assert close(colon(P, torch.diag(Q @ x)), colon(torch.outer(P.diagonal(), x), Q))
