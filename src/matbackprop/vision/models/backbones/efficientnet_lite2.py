"""EfficientNet-Lite2, with the state dict keys of efficientnet-lite-pytorch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.vision.models.backbones.base import StagedBackbone, TapInfo, fold, start_randomly

# Blocks, kernel size, stride of the first block, expansion and channels of each stage.
STAGES = [(1, 3, 1, 1, 16), (3, 3, 2, 6, 24), (3, 5, 2, 6, 48), (4, 3, 2, 6, 88), (4, 5, 1, 6, 120), (5, 5, 2, 6, 208),
          (1, 3, 1, 6, 352)]  # fmt: skip
STEM, HEAD = 32, 1280


class _Convolution(nn.Conv2d):
    """Convolution fused with batch normalization, whose statistics are fixed.

    All image sizes are padded as TensorFlow pads even sizes, so that cell positions do not depend on the image size.
    """

    def forward(self, x: Tensor, norm: nn.BatchNorm2d) -> Tensor:  # type: ignore[override]
        weight, bias = fold(self, norm)
        kernel, stride = self.kernel_size[0], self.stride[0]
        before = (kernel - stride) // 2
        if stride == 1:  # symmetric
            return nnf.conv2d(x, weight, bias, padding=before, groups=self.groups)
        after = [(-(-n // stride) - 1) * stride + kernel - n - before for n in x.shape[-2:]]
        x = nnf.pad(x, (before, after[1], before, after[0]))
        return nnf.conv2d(x, weight, bias, stride, groups=self.groups)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _Block(nn.Module):
    """Expansion, depthwise convolution and projection, with a residual connection if the shape is kept."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expands, self.keeps = expansion > 1, stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv = _Convolution(inputs, width, 1, bias=False)
            self._bn0 = _norm(width)
        self._depthwise_conv = _Convolution(width, width, kernel, stride, groups=width, bias=False)
        self._bn1 = _norm(width)
        self._project_conv = _Convolution(width, outputs, 1, bias=False)
        self._bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = nnf.relu6(self._expand_conv(x, self._bn0)) if self.expands else x
        inner = nnf.relu6(self._depthwise_conv(inner, self._bn1))
        inner = self._project_conv(inner, self._bn2)
        return x + inner if self.keeps else inner


class EfficientNetLite2(StagedBackbone):
    """EfficientNet-Lite2: ``stem``, the outputs of its stages ``stage1`` to ``stage7``, and ``head``.

    Reference:
        Tan, Le. EfficientNet: rethinking model scaling for convolutional neural networks. ICML 2019. The Lite variants
        use ReLU6 and no squeeze-and-excitation.
    """

    mean, std = (127 / 255,) * 3, (128 / 255,) * 3

    def __init__(self) -> None:
        places = {"stem": TapInfo(STEM, 2, 1.0, 2)}
        blocks: list[_Block] = []
        self._ends = {"stem": 0}
        width, stride, offset = STEM, 2, 1.0
        for number, (depth, kernel, step, expansion, channels) in enumerate(STAGES, start=1):
            for i in range(depth):
                blocks.append(_Block(width, channels, kernel, step if i == 0 else 1, expansion))
                width = channels
            offset += stride * (step - 1)  # if the stride is 2, windows start at the first cell of a pair
            stride *= step
            self._ends[f"stage{number}"] = len(blocks)
            places[f"stage{number}"] = TapInfo(channels, stride, offset, stride)
        super().__init__({**places, "head": TapInfo(HEAD, stride, offset, stride)})
        self._conv_stem = _Convolution(3, STEM, 3, 2, bias=False)
        self._bn0 = _norm(STEM)
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = _Convolution(width, HEAD, 1, bias=False)
        self._bn1 = _norm(HEAD)
        start_randomly(self)

    def remove_after(self, tap: str) -> None:
        if tap != "head":
            del self._conv_head, self._bn1
            del self._blocks[self._ends[tap] :]

    def stage(self, tap: str, x: Tensor) -> Tensor:
        if tap == "stem":
            return nnf.relu6(self._conv_stem(x, self._bn0))
        if tap == "head":
            return nnf.relu6(self._conv_head(x, self._bn1))
        before = self._ends[self.taps[self.taps.index(tap) - 1]]
        for number in range(before, self._ends[tap]):
            x = self._blocks[number](x)
        return x
