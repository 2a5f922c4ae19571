"""Pretrained weights of the backbones: from a local file, from the data folder, from the cache, or downloaded.

Only safetensors files are read, except for torchvision's official ``.pth`` files right after a download whose checksum
fits; those are read with ``weights_only=True`` and kept as safetensors. Nothing read here can execute code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from matbackprop.errors import DataError, MissingExtraError, WeightsError
from matbackprop.models.backbone import Backbone

__all__ = ["OFFICIAL", "OfficialWeights", "load_backbone_weights", "load_weights_into", "read_weights"]


@dataclass(frozen=True)
class OfficialWeights:
    """Where torchvision keeps a network's weights. The file name ends with the first digits of its SHA-256."""

    url: str
    sha256: str
    """First eight digits of the checksum, as in the official name."""


OFFICIAL = {
    "alexnet": OfficialWeights("https://download.pytorch.org/models/alexnet-owt-7be5be79.pth", "7be5be79"),
    "vgg16": OfficialWeights("https://download.pytorch.org/models/vgg16-397923af.pth", "397923af"),
}


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file as float32 (float16 and bfloat16 are widened).

    Raises:
        WeightsError: the file is missing, damaged, or of another kind.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(
            f"{path} is no .safetensors file. Other formats can execute code when they are read; convert it with "
            "safetensors.torch.save_file(state_dict, 'weights.safetensors')."
        )
    if not path.is_file():
        raise WeightsError(f"there is no file of weights {path}.")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise MissingExtraError("reading weights needs safetensors: pip install 'matbackprop[train]'.") from None
    try:
        state = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged: {error}.") from error
    return {k: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in state.items()}


def load_weights_into(module: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Copy ``state`` into ``module``, both with the same keys and shapes.

    Weights of layers that a backbone would have after the last map that the model takes are passed over.

    Raises:
        WeightsError: keys are missing, too many, or of other shapes; the message names them. Nothing is changed then.
    """
    own = module.state_dict()
    state = {k: v for k, v in state.items() if k in own or not _after_last_tap(module, k)}
    missing = [k for k in own if k not in state]
    surplus = [k for k in state if k not in own]
    shapes = [
        f"{k} {tuple(state[k].shape)} instead of {tuple(own[k].shape)}"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    problems = [
        f"{what}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for what, names in (("missing", missing), ("not in the model", surplus), ("other shapes", shapes))
        if names
    ]
    if problems:
        raise WeightsError(
            f"the weights of {origin} belong to another architecture than {type(module).__name__}: "
            f"{'; '.join(problems)}."
        )
    bad = [k for k, v in state.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]
    if bad:
        raise WeightsError(f"the weights of {origin} are not finite: {', '.join(bad[:4])}.")
    module.load_state_dict(dict(state))


def _after_last_tap(module: nn.Module, key: str) -> bool:
    """Whether a key names a layer that a backbone in ``module`` was built without."""
    for prefix, part in module.named_modules():
        place = f"{prefix}.features." if prefix else "features."
        if isinstance(part, Backbone) and key.startswith(place):
            number = key.removeprefix(place).split(".")[0]
            return number.isdigit() and len(part.features) <= int(number) < part.whole
    return False


def load_backbone_weights(backbone: nn.Module, name: str, source: str | Path | None = None) -> Path:
    """Load ImageNet weights into a backbone.

    Args:
        backbone: from :func:`matbackprop.models.backbone.build_backbone`.
        name: ``"alexnet"`` or ``"vgg16"``.
        source: a safetensors file with torchvision's keys (``features.N.weight``; those of the classifier are passed
            over). None looks for ``<name>_features_fp16.safetensors`` in ``weights`` of ``$MATBACKPROP_DATA``, then in
            the cache, then downloads torchvision's official file.

    Returns:
        The file that was read.

    Raises:
        WeightsError: no file, a damaged one, or one of another architecture.
    """
    path = Path(source) if source is not None else find_weights(name)
    state = {k: v for k, v in read_weights(path).items() if not k.startswith("classifier.")}
    load_weights_into(backbone, state, str(path))
    return path


def find_weights(name: str) -> Path:
    """Return the local file of a backbone's weights, downloaded if need be."""
    from matbackprop.data.cache import default_cache_folder

    if name not in OFFICIAL:
        raise WeightsError(f"there are no official weights of {name!r}; there are of {', '.join(OFFICIAL)}.")
    cached = default_cache_folder() / "weights" / f"{name}.safetensors"
    candidates = [cached]
    root = os.environ.get("MATBACKPROP_DATA")
    if root:
        candidates.insert(0, Path(root) / "weights" / f"{name}_features_fp16.safetensors")
    for path in candidates:
        if path.is_file():
            return path
    return download_weights(name, cached)


def download_weights(name: str, target: Path, official: OfficialWeights | None = None) -> Path:
    """Download torchvision's weights, check them, and keep them as safetensors.

    Args:
        name: ``"alexnet"`` or ``"vgg16"``.
        target: the safetensors file to write.
        official: another address, for a mirror.

    Raises:
        WeightsError: there is no network, or the file is damaged; the message says how to do it by hand.
    """
    from safetensors.torch import save_file

    from matbackprop.data.download import download

    official = official or OFFICIAL[name]
    downloaded = target.with_name(official.url.rsplit("/", 1)[-1])
    try:
        download(official.url, downloaded, sha256=official.sha256)
    except DataError as error:
        raise WeightsError(
            f"the weights of {name} are not here and cannot be downloaded: {error} By hand: fetch {official.url} on "
            f"another machine, put it at {downloaded}, and try again; or give a .safetensors file with its keys."
        ) from error
    try:
        state = torch.load(downloaded, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and runtime errors alike: the file holds more than tensors, or is damaged
        raise WeightsError(f"{downloaded} cannot be read as weights: {error}") from error
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    save_file({k: v.contiguous() for k, v in state.items()}, str(temporary))
    temporary.replace(target)
    downloaded.unlink()
    return target
