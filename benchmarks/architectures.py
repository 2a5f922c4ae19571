"""Apply `replace_pool` to classifiers of timm, torchvision and transformers, with random weights.

    python -m benchmarks architectures --output benchmarks/results/architectures.md

The table lists the pooled layer of each model, the tokens that are not pooled, and six properties.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError
from matbackprop.nn import replace_pool
from matbackprop.vision.report.tables import Table

TIMM = (
    "resnet18", "resnext50_32x4d", "seresnet50", "regnety_002", "densenet121", "vgg11_bn", "efficientnet_b0",
    "mobilenetv3_small_050", "mobilenetv4_conv_small", "ghostnet_050", "repvgg_a0", "dla34", "convnext_atto",
    "convnextv2_atto", "poolformer_s12", "inception_next_tiny", "fastvit_t8", "mobilevit_xxs", "coatnet_0_224",
    "maxvit_tiny_tf_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "hiera_tiny_224", "levit_128s",
    "coat_tiny", "pvt_v2_b0", "efficientformer_l1", "xcit_nano_12_p16_224", "cait_xxs24_224", "mixer_s32_224",
    "vit_tiny_patch16_224", "vit_betwixt_patch16_reg4_gap_256", "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224", "beit_base_patch16_224",
)  # fmt: skip
TORCHVISION = (
    "resnet18",
    "densenet121",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "swin_t",
    "vit_b_16",
)
_VIT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
SMALL: dict[str, dict[str, Any]] = {
    "ConvNext": _STAGES,
    "ResNet": _STAGES,
    "Swin": {"embed_dim": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    **dict.fromkeys(["ViT", "Dinov2", "Dinov2WithRegisters"], _VIT),
}
STATEMENTS = {
    "same": "the start is bitwise the old model",
    "trains": "all new parameters receive gradients",
    "weights": "old weights load under their names, new ones round-trip",
    "alone": "with second order alone and its last layer zero, logits are constant",
    "reset": "a new classifier (reset_classifier) can be set, and second order still reaches it",
    "copy": "a deep copy has the same outputs",
}


@dataclass
class Config:
    """Options of the table."""

    names: tuple[str, ...] = ()  #: Models such as timm:resnet18; all by default.
    output: Path | None = None  #: Markdown file to write.


def names() -> list[str]:
    """All models of the table."""
    sources = {"timm": TIMM, "torchvision": TORCHVISION, "transformers": SMALL}
    return [f"{source}:{name}" for source, models in sources.items() for name in models]


def build(full: str) -> tuple[nn.Module, Tensor]:
    """A model with random weights, and an image for it."""
    source, _, name = full.partition(":")
    torch.manual_seed(0)
    package: Any = importlib.import_module(source)
    if source == "timm":
        model = package.create_model(name, pretrained=False, num_classes=10)
        size = model.default_cfg["input_size"][-1]
    elif source == "torchvision":
        model, size = package.models.get_model(name, weights=None), 224
    else:
        config = getattr(package, f"{name}Config")(num_labels=10, **SMALL[name])
        model, size = getattr(package, f"{name}ForImageClassification")(config), 224
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and not bool(layer.weight.any()):
            nn.init.ones_(layer.weight)  # LeViT starts at zero: all locations of the last map are equal
    return model.eval(), torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """The class scores in the output of a model."""
    out = model(x)
    out = getattr(out, "logits", out)
    return out[0] if isinstance(out, tuple) else out


def second_order(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that `replace_pool` added."""
    return {name: p for name, p in model.named_parameters() if ".second_order." in name}


def step(model: nn.Module, new: dict[str, nn.Parameter], x: Tensor) -> bool:
    """One step of normalized gradient descent; whether all new parameters received a gradient."""
    model.zero_grad()
    nn.functional.cross_entropy(logits(model, x), torch.tensor([1, 2])).backward()
    received = all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in new.values())
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(1e-3 * p.grad / p.grad.norm().clamp_min(1e-12))
    model.train().eval()  # LeViT caches tensors of the graph in evaluation mode
    return received


def examine(full: str) -> dict[str, str]:
    """One row of the table."""
    plain, x = build(full)
    with torch.no_grad():
        before = logits(plain, x)
    model = copy.deepcopy(plain)
    try:
        replace_pool(model, x, reduce=8)
    except ConfigurationError as error:
        return {"model": full, "layer": "refused: " + str(error).split(". ")[0]}
    new = second_order(model)
    layer = next(iter(new)).partition(".second_order.")[0]
    hook: Any = list(model.get_submodule(layer)._forward_hooks.values())[-1]
    with torch.no_grad():
        same = torch.equal(logits(model, x), before)
    for _ in range(3):  # layers that start at zero pass on a gradient after one step
        trains = step(model, new, x)
    with torch.no_grad():
        changed = logits(model, x)
        again = replace_pool(copy.deepcopy(plain), x, reduce=8)
        left = again.load_state_dict(plain.state_dict(), strict=False)
        weights = set(left.missing_keys) == set(new) and not left.unexpected_keys
        again.load_state_dict(model.state_dict())
        weights = weights and torch.equal(logits(again, x), changed)
        copied = torch.equal(logits(copy.deepcopy(model), x), changed)
        only = replace_pool(copy.deepcopy(plain), x, first_order=False, reduce=8)
        for p in second_order(only).values():
            nn.init.zeros_(p)
        constant = logits(only, x)
        alone = torch.allclose(constant[0], constant[1], rtol=1e-4, atol=1e-5)
    held = {"same": same, "trains": trains, "weights": weights, "alone": alone, "copy": copied}
    if hasattr(model, "reset_classifier"):
        cast(Any, model).reset_classifier(7)
        step(model, new, x)
        held["reset"] = step(model, new, x) and logits(model, x).shape == (2, 7)
    row = {"model": full, "layer": f"`{layer}`", "prefix": str(hook.prefix)}
    return row | {name: ("yes" if held[name] else "**no**") if name in held else "–" for name in STATEMENTS}


def table(rows: list[dict[str, str]]) -> str:
    """The rows in Markdown."""
    columns = ["model", "layer", "prefix", *STATEMENTS]
    note = "\n".join(f"- {name}: {text}" for name, text in STATEMENTS.items())
    return Table(columns, [[row.get(column) for column in columns] for row in rows], note=note).markdown() + "\n"


def main(config: Config) -> dict[str, Any]:
    """Print the rows and write the table."""
    rows = []
    for name in config.names or names():
        rows.append(examine(name))
        print(" | ".join(rows[-1].values()), flush=True)
    if config.output is not None:
        config.output.write_text("# Architectures that replace_pool changes\n\n" + table(rows))
    refused = sum(row["layer"].startswith("refused") for row in rows)
    wrong = sum("**no**" in row.values() for row in rows)
    summary = f"{len(rows)} models: {len(rows) - refused - wrong} right, {refused} refused, {wrong} wrong"
    return {"summary": summary, "rows": rows, "exit_code": int(wrong > 0)}
