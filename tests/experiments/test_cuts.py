"""Border strengths with spectral distances, trained through the eigenvectors."""

import numpy as np
import torch

from experiments.cuts import Borders, border_logits, spectral_distances, train_weights


def borders(seed: int = 0, count: int = 6) -> Borders:
    """All pairs of a few regions, with random strengths."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.combinations(torch.arange(count))
    strengths = 0.05 + 0.4 * torch.rand(len(edges), generator=generator, dtype=torch.float64)
    return Borders(count, edges, torch.ones_like(strengths), strengths, (strengths > 0.25).double())


def test_gradients_pass_through_the_eigenvectors():
    one = borders()

    def distances(sigma, strengths):
        return spectral_distances(one._replace(strengths=strengths), sigma)

    sigma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(distances, (sigma, one.strengths.clone().requires_grad_()))


def test_distances_agree_with_the_definition():
    one = borders(1)
    weight = np.zeros((one.regions, one.regions))
    weight[tuple(one.edges.T.numpy())] = np.exp(-one.strengths.numpy() / 0.3)
    weight += weight.T
    # With all eigenvectors, the squared distance is a quadratic form of the pseudo-inverse of the Laplacian.
    root = np.sqrt(weight.sum(1))
    inverse = np.linalg.pinv(np.eye(one.regions) - weight / root / root[:, None]) / root / root[:, None]
    i, j = one.edges.T.numpy()
    expected = np.sqrt(inverse[i, i] + inverse[j, j] - 2 * inverse[i, j])
    found = spectral_distances(one, torch.tensor(0.3, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_training_lowers_the_loss_and_has_two_weights_without_cuts():
    images = [borders(seed) for seed in range(3)]

    def loss(weights):
        logits = [border_logits(one, weights) for one in images]
        pairs = zip(logits, images, strict=True)
        return sum(torch.nn.functional.binary_cross_entropy_with_logits(z, one.agreement) for z, one in pairs)

    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    start = loss({"offset": zero - 2, "contour": one})
    with_cuts, without = train_weights(images, spectral=True), train_weights(images, spectral=False)
    assert loss(with_cuts) < loss(without) < start
    assert without.keys() == {"offset", "contour"}
