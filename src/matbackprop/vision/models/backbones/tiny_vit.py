"""TinyViT, the image encoder of MobileSAM, with the state dict keys of MobileSAM."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.vision.models.backbones.base import StagedBackbone, TapInfo, fold, start_randomly

WIDTHS, DEPTHS, STRIDES = (64, 128, 160, 320), (2, 2, 6, 2), (4, 8, 16, 16)
HEADS, WINDOWS = (2, 4, 5, 10), (7, 7, 14, 7)
NECK = 256


class _Convolution(nn.Module):
    """Convolution fused with batch normalization, whose statistics are fixed."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.c = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return nnf.conv2d(x, *fold(self.c, self.bn), self.c.stride, self.c.padding, groups=self.c.groups)  # type: ignore[arg-type]


class _Inverted(nn.Module):
    """Block of the first stage: expansion, depthwise convolution and projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = _Convolution(width, 4 * width)
        self.conv2 = _Convolution(4 * width, 4 * width, 3, groups=4 * width)
        self.conv3 = _Convolution(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return nnf.gelu(x + self.conv3(nnf.gelu(self.conv2(nnf.gelu(self.conv1(x))))))


class _Merging(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _Convolution(inputs, outputs)
        self.conv2 = _Convolution(outputs, outputs, 3, stride, groups=outputs)
        self.conv3 = _Convolution(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(nnf.gelu(self.conv2(nnf.gelu(self.conv1(x)))))


class _Attention(nn.Module):
    """Attention within windows, with a trainable bias for each relative position."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.attention_biases = nn.Parameter(torch.zeros(heads, window * window))
        # Computed by NumPy, because arithmetic on the meta device imports the torch compiler.
        distance = np.abs(np.subtract.outer(np.arange(window), np.arange(window)))
        index = window * distance[:, None, :, None] + distance[None, :, None, :]  # rows, columns
        self.register_buffer("index", torch.from_numpy(index.reshape(window * window, -1)), persistent=False)
        self.index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention to a map (b, c, h, w). Incomplete windows are padded with zeros."""
        b, c, h, w = x.shape
        k = self.window
        x = nnf.pad(x, (0, -w % k, 0, -h % k))
        rows, columns = x.shape[-2] // k, x.shape[-1] // k
        cells = x.view(b, c, rows, k, columns, k).permute(0, 2, 4, 3, 5, 1).reshape(-1, k * k, c)
        q, key, v = self.qkv(self.norm(cells)).view(len(cells), k * k, self.heads, -1).transpose(1, 2).chunk(3, -1)
        biases = self.attention_biases[None, :, self.index]  # in four dimensions, for the fast kernels
        mixed = nnf.scaled_dot_product_attention(q, key, v, attn_mask=biases)
        cells = self.proj(mixed.transpose(1, 2).reshape(len(cells), k * k, c))
        x = cells.view(b, rows, columns, k, k, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, rows * k, columns * k)
        return x[..., :h, :w]


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nnf.gelu(self.fc1(self.norm(x.movedim(1, -1))))).movedim(-1, 1)


class _Block(nn.Module):
    """Block of the later stages: attention, depthwise convolution, two fully connected layers."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.attn = _Attention(width, heads, window)
        self.mlp = _Mlp(width)
        self.local_conv = _Convolution(width, width, 3, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.local_conv(x + self.attn(x))
        return x + self.mlp(x)


class _Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        width = WIDTHS[number]
        self.blocks = nn.Sequential(
            *(
                _Block(width, HEADS[number], WINDOWS[number]) if number else _Inverted(width)
                for _ in range(DEPTHS[number])
            )
        )
        if number + 1 < len(WIDTHS):
            self.downsample = _Merging(width, WIDTHS[number + 1], STRIDES[number + 1] // STRIDES[number])


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(_Convolution(3, 32, 3, 2), nn.GELU(), _Convolution(32, WIDTHS[0], 3, 2))


class _Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return nnf.layer_norm(x.movedim(1, -1), self.weight.shape, self.weight, self.bias, 1e-6).movedim(-1, 1)


class TinyViT(StagedBackbone):
    """Image encoder of MobileSAM, with maps ``layer0`` to ``layer3`` and ``neck``, the input of the SAM decoder.

    It was trained on images of 1024 pixels and accepts any size.

    References:
        Wu et al. TinyViT: fast pretraining distillation for small vision transformers. ECCV 2022.
        Zhang et al. Faster segment anything: towards lightweight SAM for mobile applications. 2023.
    """

    prefix = "image_encoder."

    def __init__(self) -> None:
        places = {f"layer{i}": TapInfo(w, s, 0.0, s) for i, (w, s) in enumerate(zip(WIDTHS, STRIDES, strict=True))}
        super().__init__({**places, "neck": TapInfo(NECK, STRIDES[-1], 0.0, STRIDES[-1])})
        self.patch_embed = _Embedding()
        self.layers = nn.ModuleList(_Layer(number) for number in range(len(WIDTHS)))
        self.neck = nn.Sequential(
            nn.Conv2d(WIDTHS[-1], NECK, 1, bias=False),
            _Norm(NECK),
            nn.Conv2d(NECK, NECK, 3, padding=1, bias=False),
            _Norm(NECK),
        )
        start_randomly(self)

    def remove_after(self, tap: str) -> None:
        if tap == "neck":
            return
        del self.neck
        last = int(tap.removeprefix("layer"))
        del self.layers[last + 1 :]
        if last + 1 < len(WIDTHS):
            del self.layers[last].downsample

    def stage(self, tap: str, x: Tensor) -> Tensor:
        if tap == "neck":
            return self.neck(x)
        number = int(tap.removeprefix("layer"))
        before = self.layers[number - 1].downsample if number else self.patch_embed.seq
        return self.layers[number].blocks(before(x))  # type: ignore[operator, union-attr]
