"""The loss of normalized cuts: trained Λ, maps, class weights, balance and annotators."""

import pytest
import torch

from helpers.cuts import features, regions
from matbackprop.errors import ConfigurationError, LabelError, ShapeError
from matbackprop.nn import NormalizedCutLoss

F, L = features(3, 12, 4), regions(3, 12)
C = F[..., 1] + 0.1


def test_lambda_is_trained():
    module = NormalizedCutLoss("j1", lambda_features=4)
    assert list(module.state_dict()) == ["lam"]
    before = module(F.float(), L)
    before.backward()
    with torch.no_grad():
        module.lam -= 0.1 * module.lam.grad / module.lam.grad.norm()
    assert module(F.float(), L) < before


@pytest.mark.parametrize(
    "keywords",
    [
        {"objective": "j3"},
        {"reduction": "median"},
        {"objective": "j2", "lambda_features": 4},
        {"objective": "soft", "rank_tol": 1e-3},
    ],
)
def test_contradictory_arguments(keywords):
    with pytest.raises(ConfigurationError):
        NormalizedCutLoss(**keywords)


def test_a_small_network_trains_on_a_segmentation():
    torch.manual_seed(0)
    colors = torch.tensor([[1.0, 0.1, 0.1], [0.1, 1.0, 0.2], [0.2, 0.2, 1.0]])
    labels = torch.arange(90).reshape(1, 90) % 3
    pixels = colors[labels] + 0.15 * torch.randn(1, 90, 3)
    network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5), torch.nn.ReLU())
    loss, optimizer = NormalizedCutLoss("soft"), torch.optim.Adam(network.parameters(), 0.03)
    first = loss(network(pixels), labels).item()
    for _ in range(150):
        optimizer.zero_grad()
        value = loss(network(pixels), labels)
        value.backward()
        optimizer.step()
    assert value.item() < 0.5 * first


MAPS = F.mT.reshape(3, 4, 3, 4)  # (b, c, h, w)
GRID = L.reshape(3, 3, 4)


@pytest.mark.parametrize("objective", ["j1", "j2", "soft"])
def test_maps_equal_rows(objective):
    expected = NormalizedCutLoss(objective)(F, L)
    loss = NormalizedCutLoss(objective, maps=True)
    torch.testing.assert_close(loss(MAPS, GRID), expected)
    larger = GRID.repeat_interleave(5, 1).repeat_interleave(3, 2)
    torch.testing.assert_close(loss(MAPS, larger), expected)
    several = torch.stack([larger, larger.flip(0)], 1)
    both = NormalizedCutLoss(objective)(F, torch.stack([L, L.flip(0)], 1))
    torch.testing.assert_close(loss(MAPS, several), both)


def test_label_of_a_cell_is_that_at_its_center():
    labels = torch.arange(6 * 10).reshape(1, 6, 10) % 5
    nearest = torch.nn.functional.interpolate(labels[None].float(), size=(4, 3), mode="nearest-exact")[0].long()
    f = features(1, 12, 4)
    torch.testing.assert_close(
        NormalizedCutLoss("soft", maps=True)(f.mT.reshape(1, 4, 4, 3), labels),
        NormalizedCutLoss("soft")(f, nearest.flatten(1)),
    )


OBJECTIVES = ["j1", "j2", "soft"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_class_weights_equal_repeated_rows(objective):
    f, labels = features(1, 7, 4), torch.tensor([[0, 2, 1, 1, 2, 0, -1]])
    weights = torch.tensor([1.0, 3.0, 2.0])
    often = torch.tensor([1, 2, 3, 3, 2, 1, 1])
    expected = NormalizedCutLoss(objective)(f.repeat_interleave(often, 1), labels.repeat_interleave(often, 1))
    loss = NormalizedCutLoss(objective, class_weight=weights)
    torch.testing.assert_close(loss(f, labels), expected)
    doubled = loss(f, labels, weight=torch.full((1, 7), 2.0, dtype=f.dtype))
    torch.testing.assert_close(doubled, expected)  # all rows twice change nothing
    assert "class_weight" in loss.state_dict()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_balanced_regions_have_equal_weight(objective):
    f, labels = features(2, 7, 4), torch.tensor([[0, 0, 0, 1, 1, 2, -1], [1, 1, 1, 1, 1, 1, 0]])
    expected = []
    for x, y, often in zip(f, labels, ([2, 2, 2, 3, 3, 6, 1], [1, 1, 1, 1, 1, 1, 6]), strict=True):
        often = torch.tensor(often)
        expected.append(NormalizedCutLoss(objective)(x.repeat_interleave(often, 0), y.repeat_interleave(often, 0)))
    actual = NormalizedCutLoss(objective, balanced=True, reduction="none")(f, labels)
    torch.testing.assert_close(actual, torch.stack(expected))
    assert not torch.allclose(actual, NormalizedCutLoss(objective, reduction="none")(f, labels), rtol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_annotators_are_balanced_separately_and_empty_ones_ignored(objective):
    f = features(2, 6, 4)
    one, two = (
        torch.tensor([[0, 0, 0, 1, 1, 2], [1, 1, 0, 0, 0, 0]]),
        torch.tensor([[0, 1, 1, 1, 1, -1], [2, 2, 1, 1, 0, 0]]),
    )
    loss = NormalizedCutLoss(objective, balanced=True, class_weight=torch.tensor([1.0, 2.0, 0.5]), reduction="none")
    expected = (loss(f, one) + loss(f, two)) / 2
    torch.testing.assert_close(loss(f, torch.stack([one, two], 1)), expected)
    torch.testing.assert_close(loss(f, torch.stack([torch.full_like(one, -1), one, two], 1)), expected)
    maps = NormalizedCutLoss(objective, maps=True, balanced=True, ignore_index=255)
    labels = torch.stack([one, two], 1).reshape(2, 2, 2, 3)
    void = labels.masked_fill(labels == -1, 255)
    plain = NormalizedCutLoss(objective, balanced=True)(f, torch.stack([one, two], 1))
    torch.testing.assert_close(maps(f.mT.reshape(2, 4, 2, 3), void), plain)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_gradient_of_balanced_and_weighted_losses(objective):
    labels = torch.tensor([[[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, -1]]])
    loss = NormalizedCutLoss(objective, balanced=True, class_weight=torch.tensor([1.0, 2.0, 0.5]))
    f = features(1, 6, 3).clone().requires_grad_()
    torch.autograd.gradcheck(lambda x: loss(x, labels), f)


def test_invalid_weights_are_rejected():
    with pytest.raises(ConfigurationError, match="one nonnegative number per class"):
        NormalizedCutLoss(class_weight=torch.ones(2, 2))
    with pytest.raises(ConfigurationError, match="one nonnegative number per class"):
        NormalizedCutLoss(class_weight=torch.tensor([1.0, -1.0]))
    with pytest.raises(LabelError, match="class_weight has 2 classes, but a label is 3"):
        NormalizedCutLoss(class_weight=torch.ones(2))(features(1, 4, 2), torch.tensor([[0, 0, 1, 3]]))
    with pytest.raises(ConfigurationError, match="Remove offsets"):
        NormalizedCutLoss(balanced=True)(features(1, 4, 2)[0], torch.tensor([0, 0, 1, 1]), offsets=[0, 2, 4])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_ignored_labels_are_not_a_region(dtype):
    void = torch.zeros(3, 12, dtype=torch.bool)
    void[:, ::5] = True
    marked = L.clamp(min=0).masked_fill(void, 255).to(dtype)
    left_out = L.clamp(min=0).masked_fill(void, -1)
    for objective in ("j1", "j2", "soft"):
        loss = NormalizedCutLoss(objective, ignore_index=255)
        torch.testing.assert_close(loss(F, marked), NormalizedCutLoss(objective)(F, left_out))
    assert "ignore_index=255" in repr(loss)


def test_maps_are_weighted_and_bad_ones_rejected():
    weight = C.reshape(3, 3, 4)
    loss = NormalizedCutLoss("soft", maps=True)
    torch.testing.assert_close(loss(MAPS, GRID, weight=weight), NormalizedCutLoss("soft")(F, L, weight=C))
    with pytest.raises(ShapeError, match=r"maps need features \(b, c, h, w\)"):
        loss(F, L)
    with pytest.raises(ConfigurationError, match="offsets"):
        loss(MAPS, GRID, offsets=[0, 12])
