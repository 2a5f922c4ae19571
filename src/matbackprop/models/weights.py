"""Pretrained weights of the backbones: from a local file, from the data folder, from the cache, or downloaded.

Only safetensors files are read, except for torchvision's official ``.pth`` files right after a download whose checksum
fits; those are read with ``weights_only=True`` and kept as safetensors. Nothing read here can execute code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from matbackprop.errors import DataError, MissingExtraError, WeightsError
from matbackprop.files import atomic_write, shorten
from matbackprop.models.backbones import BACKBONES, BackboneEntry
from matbackprop.models.backbones.base import Backbone

__all__ = [
    "check_weights",
    "find_weights",
    "in_eight_bits",
    "load_backbone_weights",
    "load_weights_into",
    "read_weights",
]


_SCALE = ".scale"
"""Ends the names of the scales of weights in 8 bits."""


def in_eight_bits(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with large ones in 8 bits, one scale per output channel under their name with ``.scale``, the rest as
    float16; :func:`read_weights` undoes it to half a step.

    Example:
        >>> small = in_eight_bits({"w": torch.ones(64, 64), "b": torch.ones(64)})
        >>> {name: (value.dtype, tuple(value.shape)) for name, value in small.items()}
        {'w': (torch.int8, (64, 64)), 'w.scale': (torch.float32, (64,)), 'b': (torch.float16, (64,))}
    """
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.is_floating_point() and value.ndim > 1 and value.numel() >= 4096:
            scale = (value.float().flatten(1).abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            out[name] = (value.float() / scale.view(-1, *[1] * (value.ndim - 1))).round().to(torch.int8)
            out[name + _SCALE] = scale
        else:
            out[name] = value.half() if value.is_floating_point() else value
    return out


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file as float32 (float16, bfloat16 and 8 bits with scales are widened).

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
        raise WeightsError(f"{path} is damaged: {shorten(str(error), 200)}.") from error
    for name in [k for k in state if k.endswith(_SCALE) and k.removesuffix(_SCALE) in state]:
        scale, value = state.pop(name), state[name.removesuffix(_SCALE)]
        if value.dtype != torch.int8 or scale.shape != value.shape[:1]:
            raise WeightsError(f"{path} is damaged: {name} does not fit the weights that it scales.")
        state[name.removesuffix(_SCALE)] = value.float() * scale.float().view(-1, *[1] * (value.ndim - 1))
    return {k: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in state.items()}


def check_weights(module: nn.Module, state: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Refuse weights that do not fit a module, which may be on the device "meta".

    Weights of layers that backbones in ``module`` were built without, behind their last maps, are passed over.

    Args:
        module: where to.
        state: what.
        origin: where it is from, for messages.

    Returns:
        The weights that the module has.

    Raises:
        WeightsError: keys are missing, too many, or of other shapes; the message names them.
    """
    own = module.state_dict()
    spare = {
        f"{at}.{k}" if at else k for at, m in module.named_modules() if isinstance(m, Backbone) for k in m.left_out
    }
    state = {k: v for k, v in state.items() if k not in spare}
    missing = [k for k in own if k not in state]
    surplus = [k for k in state if k not in own]
    shapes = [
        f"{k} {tuple(state[k].shape)} instead of {tuple(own[k].shape)}"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    kinds = [k for k in own if k in state and state[k].is_floating_point() != own[k].is_floating_point()]
    problems = [
        f"{what}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for what, names in (
            ("missing", missing),
            ("not in the model", surplus),
            ("other shapes", shapes),
            ("other kinds of numbers", kinds),
        )
        if names
    ]
    if problems:
        raise WeightsError(
            f"the weights of {origin} belong to another architecture than {type(module).__name__}: "
            f"{'; '.join(problems)}."
        )
    return state


def load_weights_into(module: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Copy ``state`` into ``module``, both with the same keys and shapes (see :func:`check_weights`).

    Args:
        module: where to.
        state: what.
        origin: where it is from, for messages.

    Raises:
        WeightsError: they do not fit, or are not finite. Nothing is changed then.
    """
    state = check_weights(module, state, origin)
    bad = [k for k, v in state.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]
    if bad:
        raise WeightsError(f"the weights of {origin} are not finite: {', '.join(bad[:4])}.")
    module.load_state_dict(state)


def load_backbone_weights(backbone: nn.Module, name: str, weights: str | Path = "imagenet") -> Path | None:
    """Load starting weights into a backbone.

    Args:
        backbone: from :func:`~matbackprop.models.backbones.build_backbone`; it may have been cut behind its last map.
        name: its name.
        weights: ``"none"`` changes nothing; ``"imagenet"`` takes the file that :func:`find_weights` gives, or what
            its library publishes; otherwise a safetensors file with the keys of the backbone, where those of a
            classifier are passed over.

    Returns:
        The file that was read; None for none, and for a backbone that has no weights.

    Raises:
        WeightsError: no file, a damaged one, or one of another architecture.
    """
    if str(weights) == "none" or not any(True for _ in backbone.parameters()):
        return None
    publish = getattr(backbone, "load_published", None)
    if str(weights) == "imagenet" and publish is not None:
        publish()
        return None
    path = find_weights(name) if str(weights) == "imagenet" else Path(weights)
    own = backbone.state_dict()
    state = {k.removeprefix(getattr(backbone, "prefix", "")): v for k, v in read_weights(path).items()}
    state = {k: v for k, v in state.items() if k in own or not k.startswith("classifier.")}
    # How many batches the means of batch normalisation were taken over is published by some and used by none.
    state |= {k: v for k, v in own.items() if k.endswith("num_batches_tracked") and k not in state}
    load_weights_into(backbone, state, str(path))
    return path


def find_weights(name: str) -> Path:
    """The file of a backbone's published weights.

    It is looked for in ``weights`` of ``$MATBACKPROP_DATA``, then in the cache, then downloaded from its official
    address.

    Raises:
        WeightsError: it is not there and cannot be downloaded.
    """
    from matbackprop.data.cache import default_cache_folder

    if name not in BACKBONES or not BACKBONES[name].file:
        known = [n for n, entry in BACKBONES.items() if entry.file]
        raise WeightsError(f"there are no published weights of {name!r}; there are of {', '.join(known)}.")
    entry = BACKBONES[name]
    cached = default_cache_folder() / "weights" / f"{name}.safetensors"
    root = os.environ.get("MATBACKPROP_DATA")
    for path in [*([Path(root) / "weights" / entry.file] if root else []), cached]:
        if path.is_file():
            return path
    if not entry.url:
        raise WeightsError(
            f"the weights of {name} are not here: put {entry.file} into the folder weights of $MATBACKPROP_DATA, or "
            f"name a safetensors file, or start from random weights (none)."
        )
    return download_weights(name, cached)


def download_weights(name: str, target: Path, entry: BackboneEntry | None = None) -> Path:
    """Download torchvision's weights, check them, and keep them as safetensors.

    Args:
        name: ``"alexnet"`` or ``"vgg16"``.
        target: the safetensors file to write.
        entry: another address, for a mirror.

    Raises:
        WeightsError: there is no network, or the file is damaged; the message says how to do it by hand.
    """
    from safetensors.torch import save

    from matbackprop.data.download import download

    entry = entry or BACKBONES[name]
    downloaded = target.with_name(entry.url.rsplit("/", 1)[-1])
    try:
        download(entry.url, downloaded, sha256=entry.sha256)
    except DataError as error:
        raise WeightsError(
            f"the weights of {name} are not here and cannot be downloaded: {error} By hand: fetch {entry.url} on "
            f"another machine, put it at {downloaded}, and try again; or give a .safetensors file with its keys."
        ) from error
    try:
        state = torch.load(downloaded, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and runtime errors alike: the file holds more than tensors, or is damaged
        raise WeightsError(f"{downloaded} cannot be read as weights: {error}") from error
    atomic_write(target, save({k: v.contiguous() for k, v in state.items()}))
    downloaded.unlink()
    return target
