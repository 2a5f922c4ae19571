"""Second-order pooling of maps, as a head, and added to a model by replace_pool."""

import copy
import pickle

import pytest
import torch
from torch import nn

import matbackprop as mb
from matbackprop._torch import WHOLE_GRAPHS
from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.nn import SecondOrderHead, SecondOrderPool2d, replace_pool


class Residual(nn.Module):
    """As torchvision's ResNet: squeeze and excitation inside, an average and a classifier at the end."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, stride=2)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 12, 1), nn.Sigmoid())
        self.last = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x).relu()
        x = self.last(x * self.squeeze(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Tokens(nn.Module):
    """As a vision transformer: a class token, a last norm, and a classifier of the class token."""

    def __init__(self, with_class=True):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16)) if with_class else None
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.block(x))
        return self.head(x.mean(1) if self.cls_token is None else x[:, 0])


class FunctionalAverage(nn.Module):
    """As ConvNeXt of transformers: the average is no layer."""

    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2), nn.Sequential(nn.GELU(), nn.Conv2d(12, 12, 1)))
        self.layernorm = nn.LayerNorm(12)
        self.classifier = nn.Linear(12, 5)

    def forward(self, x):
        return self.classifier(self.layernorm(self.stages(x).mean((-2, -1))))


class ChannelsLast(nn.Module):
    """As Swin: maps (b, h, w, c), and residual branches of which none is pooled."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 8, stride=8)
        self.branch, self.drop_path = nn.Linear(12, 12), nn.Dropout(0.1)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x).permute(0, 2, 3, 1)
        x = self.norm(x + self.drop_path(self.branch(x)))
        return self.head(x.mean((1, 2)))


class Registers(Tokens):
    """Four more tokens at the front, as register tokens."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 5, 16))


MODELS = {
    "maps": Residual,
    "class token": Tokens,
    "mean of tokens": lambda: Tokens(False),
    "functional average": FunctionalAverage,
    "channels last": ChannelsLast,
    "registers": Registers,
}
LAYERS = {
    "maps": ("last", 0),
    "class token": ("norm", 1),
    "mean of tokens": ("norm", 0),
    "functional average": ("stages.1.1", 0),
    "channels last": ("norm", 0),
    "registers": ("norm", 5),
}


def added(model):
    return {name: p for name, p in model.named_parameters() if ".second_order." in name}


@pytest.fixture
def image():
    return torch.randn(2, 3, 33, 41, generator=torch.Generator().manual_seed(0))


def test_maps_are_pooled_as_rows_independently_of_their_size():
    x = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(SecondOrderPool2d(average=False)(x), mb.second_order_pool(x.flatten(2).mT))
    pool = SecondOrderPool2d(vectorize=True)
    torch.testing.assert_close(pool(x.repeat(1, 1, 2, 3)), pool(x))
    mask = torch.zeros(2, 5, 7)
    mask[:, :, :4] = 1
    torch.testing.assert_close(pool(x, mask), pool(x[..., :4]))
    with pytest.raises(ShapeError, match="rows"):
        pool(x.flatten(2))
    with pytest.raises(ShapeError, match="mask"):
        pool(x, mask[:, 1:])


def test_a_head_depends_on_second_order_only():
    torch.manual_seed(0)
    head = SecondOrderHead(6, 3, reduce=4).eval()
    x = torch.randn(2, 6, 5, 7)
    torch.testing.assert_close(head(x), head(x.flatten(2).mT))
    torch.testing.assert_close(head(x + torch.randn(2, 6, 1, 1)), head(x), rtol=1e-4, atol=1e-5)  # centered
    torch.testing.assert_close(head(-x), head(x))
    dropping = SecondOrderHead(6, 3, reduce=4, channel_dropout=0.5)
    assert not torch.equal(dropping(x), dropping(x))
    with pytest.raises(ConfigurationError, match="positive"):
        SecondOrderHead(6, 0)
    with pytest.raises(ShapeError, match=r"maps \(b, 6, h, w\) or tokens \(b, n, 6\)"):
        head(torch.randn(2, 5, 5, 7))
    with pytest.raises(ShapeError, match="got"):
        head(torch.randn(2, 6, 5))
    full = SecondOrderHead(6, 3, reduce=None)
    assert full(x).shape == (2, 3) and full.classifier.in_features == 21


def test_options_are_shown():
    assert repr(SecondOrderPool2d()) == "SecondOrderPool2d()"
    assert repr(SecondOrderPool2d(average=False, eps=0.1)) == "SecondOrderPool2d(average=False, eps=0.1)"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_does_not_change_at_first_and_then_trains_second_order(name, image):
    torch.manual_seed(0)
    plain = MODELS[name]().eval()
    model = copy.deepcopy(plain)
    assert replace_pool(model, image, reduce=4) is model
    assert torch.equal(model(image), plain(image))
    new = added(model)
    assert len(new) == len(list(model.parameters())) - len(list(plain.parameters())) == 5
    place, prefix = LAYERS[name]
    assert {n.partition(".second_order.")[0] for n in new} == {place}
    (hook,) = model.get_submodule(place)._forward_hooks.values()
    assert hook.prefix == prefix
    optimizer = torch.optim.SGD(new.values(), lr=0.1)
    for _ in range(2):  # the first step changes the last layer, which is zero, the second all others
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image), torch.tensor([1, 2])).backward()
        optimizer.step()
    assert all(p.grad.abs().sum() > 0 for p in new.values())
    again = replace_pool(MODELS[name](), image, reduce=4).eval()
    left = again.load_state_dict(plain.state_dict(), strict=False)  # old weights keep their names
    assert set(left.missing_keys) == set(new) and not left.unexpected_keys
    again.load_state_dict(model.state_dict())
    for other in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(image), model(image))
    if WHOLE_GRAPHS:
        exported = torch.export.export(model, (image,)).module()
        torch.testing.assert_close(exported(image), model(image))


@pytest.mark.parametrize("name", MODELS)
def test_second_order_alone_determines_the_logits(name, image):
    torch.manual_seed(0)
    model = replace_pool(MODELS[name](), image, first_order=False, reduce=4).eval()
    assert not torch.allclose(*model(image))
    for p in added(model).values():
        nn.init.zeros_(p)
    torch.testing.assert_close(*model(image))


def test_a_replaced_model_compiles(image):
    torch.manual_seed(0)
    model = replace_pool(Tokens().eval(), image, reduce=4)
    nn.init.normal_(model.norm.second_order.classifier.weight)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=WHOLE_GRAPHS)(image), model(image))


class Inner(nn.Module):
    """A nonlinear function between the last layer and the average: the layer is not found, and can be named."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.classifier = nn.Linear(6, 2)

    def forward(self, x):
        return self.classifier(self.features(x).relu().mean((-2, -1)))


def test_a_layer_that_is_not_found_can_be_named(image):
    with pytest.raises(ConfigurationError, match=r"Pass its name as at= .*features\.1"):
        replace_pool(Inner(), image)
    model = replace_pool(Inner(), image, at="features", reduce=4)
    assert all(name.startswith("features.1.second_order.") for name in added(model))
    with pytest.raises(ConfigurationError, match="no layer 'feature'"):
        replace_pool(Inner(), image, at="feature")
    with pytest.raises(ConfigurationError, match="more than one location"):
        replace_pool(Inner(), image, at="classifier")
    with pytest.raises(ConfigurationError, match="already has second-order pooling"):
        replace_pool(model, image)


def test_a_model_without_maps_is_rejected(image):
    with pytest.raises(ConfigurationError, match="SecondOrderHead"):
        replace_pool(nn.Sequential(nn.Flatten(), nn.Linear(3 * 33 * 41, 2)), image)


def test_unknown_prefix_tokens_are_rejected():
    class Unfolded(Tokens):
        def forward(self, x):
            tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
            return self.head(self.norm(tokens)[:, 0])

    rows = torch.randn(2, 9, 16)
    with pytest.raises(ConfigurationError, match="Pass prefix="):
        replace_pool(Unfolded(), rows)
    replace_pool(Unfolded(), rows, prefix=1, reduce=4)
