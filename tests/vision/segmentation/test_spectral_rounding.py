"""Yu–Shi discretisation and pivoted QR."""

import pytest
import scipy.linalg
import torch

from matbackprop.errors import ShapeError
from matbackprop.vision.segmentation import KMeansRounding, ncut_embedding, pivoted_qr_rotation, yu_shi_rotation
from matbackprop.vision.segmentation.clustering import leading_pivots


def separated(k=4, m=60, noise=0.02, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(m) % k
    f = torch.nn.functional.one_hot(labels).double() + noise * torch.rand(
        m, k, generator=generator, dtype=torch.float64
    )
    return ncut_embedding(f, k), labels


@pytest.mark.parametrize("rotate", [pivoted_qr_rotation, yu_shi_rotation])
def test_separated_groups_are_found(rotate):
    embedding, labels = separated()
    rotation = rotate(embedding.points)
    actual = (embedding.points @ rotation).argmax(-1)
    assert torch.stack([actual, labels]).unique(dim=1).shape[1] == 4
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(4, dtype=torch.float64))


def test_pivots_are_those_of_lapack():
    v = torch.randn(30, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = scipy.linalg.qr(v.T.numpy(), pivoting=True, mode="economic")[2][:5]
    assert leading_pivots(v).tolist() == expected.tolist()


def test_batches_are_independent():
    first, second = separated(seed=1)[0].points, separated(seed=2)[0].points
    both = yu_shi_rotation(torch.stack([first, second]))
    torch.testing.assert_close(both[1], yu_shi_rotation(second))


@pytest.mark.parametrize("rotate", [pivoted_qr_rotation, yu_shi_rotation])
def test_zeros_are_finite_and_emptiness_is_refused(rotate):
    assert torch.isfinite(rotate(torch.zeros(5, 2))).all()
    with pytest.raises(ShapeError):
        rotate(torch.zeros(0, 2))


def test_clusters_far_from_the_origin_are_those_at_it():
    """Scores are taken around the mean point: where the points lie as a whole is not seen."""
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    labels = torch.arange(60) % 3
    noise = torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = corners[labels] + 0.1 * noise + torch.tensor([300.0, -40.0], dtype=torch.float64)
    (scores,) = KMeansRounding().scores(points, points, torch.ones(60, dtype=torch.float64), [3], False)
    actual = scores.argmax(-1)
    assert actual.unique().numel() == torch.stack([actual, labels]).unique(dim=1).shape[1] == 3
