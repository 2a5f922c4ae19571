"""Second-order pooling in networks as they are: maps, heads, and beside a model's own average or tokens."""

import pytest
import torch
from torch import nn

import matbackprop as mb
from matbackprop._torch import WHOLE_GRAPHS
from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.nn import SecondOrderHead, SecondOrderPool2d, replace_pool


class Residual(nn.Module):
    """In the manner of torchvision's ResNet: squeeze and excitation inside, an average and a classifier at the end."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, stride=2)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 12, 1), nn.Sigmoid())
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x).relu()
        x = x * self.squeeze(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Tokens(nn.Module):
    """In the manner of a vision transformer: a class token, a last norm, and a classifier of the class token."""

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


MODELS = {"maps": Residual, "class token": Tokens, "mean of tokens": lambda: Tokens(False)}


@pytest.fixture
def image():
    return torch.randn(2, 3, 33, 41, generator=torch.Generator().manual_seed(0))


def test_maps_are_pooled_as_their_rows_and_their_size_does_not_matter():
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


def test_a_head_sees_second_order_only():
    torch.manual_seed(0)
    head = SecondOrderHead(6, 3, reduce=4).eval()
    x = torch.randn(2, 6, 5, 7)
    torch.testing.assert_close(head(x), head(x.flatten(2).mT))
    torch.testing.assert_close(head(x + torch.randn(2, 6, 1, 1)), head(x), rtol=1e-4, atol=1e-5)  # centred
    torch.testing.assert_close(head(-x), head(x))
    dropping = SecondOrderHead(6, 3, reduce=4, channel_dropout=0.5)
    assert not torch.equal(dropping(x), dropping(x))
    with pytest.raises(ConfigurationError, match="positive"):
        SecondOrderHead(6, 0)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_at_first_what_it_was_and_then_learns_from_second_order(name, image):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    before, size = model(image), len(list(model.parameters()))
    assert replace_pool(model, image, reduce=4) is model
    torch.testing.assert_close(model(image), before)
    new = [p for n, p in model.named_parameters() if ".head." in n]
    assert len(new) == len(list(model.parameters())) - size == 5
    optimizer = torch.optim.SGD([{"params": new, "lr": 0.1}])
    for _ in range(2):  # the first step moves the last layer from zero, the second all others
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image), torch.tensor([1, 2])).backward()
        optimizer.step()
    assert all(p.grad.abs().sum() > 0 for p in new)
    again = replace_pool(MODELS[name](), image, reduce=4).eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(image), model(image))
    if WHOLE_GRAPHS:
        exported = torch.export.export(model, (image,)).module()
        torch.testing.assert_close(exported(image), model(image))


@pytest.mark.parametrize("name", MODELS)
def test_second_order_alone_sees_no_mean(name, image):
    torch.manual_seed(0)
    model = replace_pool(MODELS[name](), image, first_order=False, reduce=4).eval()
    place = model.avgpool if name == "maps" else model.norm
    inputs = []
    hook = place.head.register_forward_hook(lambda module, arguments, output: inputs.append((arguments[0], output)))
    value = model(image)
    hook.remove()
    (pooled, second), classifier = inputs[0], model.fc if name == "maps" else model.head
    torch.testing.assert_close(value, classifier(second))
    tokens = 12 if name == "maps" else 20  # of the map's channels; 4·5 patches, without the class token
    assert pooled.shape[1] == tokens


def test_the_last_average_is_the_place_and_compiles(image):
    torch.manual_seed(0)
    model = replace_pool(Residual().eval(), image, reduce=4)
    assert isinstance(model.squeeze[0], nn.AdaptiveAvgPool2d) and hasattr(model.avgpool, "head")
    nn.init.normal_(model.avgpool.head.classifier.weight)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=WHOLE_GRAPHS)(image), model(image))


def test_a_flattening_of_what_is_averaged_is_not_the_place(image):
    body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1))
    model = replace_pool(nn.Sequential(body, nn.Sequential(nn.Flatten(), nn.Linear(6, 2))), image, reduce=4)
    assert hasattr(model[0][1], "head") and isinstance(model[1][0], nn.Flatten)


def test_a_model_without_a_place_is_told(image):
    with pytest.raises(ConfigurationError, match="SecondOrderHead"):
        replace_pool(nn.Sequential(nn.Flatten(), nn.Linear(3 * 33 * 41, 2)), image)
