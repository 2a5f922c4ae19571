"""Read and write models as ``config.json`` and ``model.safetensors``. Reading does not execute code."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from matbackprop.errors import WeightsError, needs
from matbackprop.vision.files import atomic_write, check_file, read_json, shorten, show

_SCALE = ".scale"  #: Suffix of the scales of 8-bit weights.


def in_eight_bits(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize large weights to 8 bits with one scale per output channel (``NAME.scale``), and others to float16.

    :func:`read_weights` restores them with an error of at most half a quantization step.
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
    """Read a safetensors file. Float16, bfloat16 and 8-bit weights are converted to float32."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(
            f"{path} is not a .safetensors file. Other formats can execute code when they are read; convert it with "
            "safetensors.torch.save_file(state_dict, 'weights.safetensors')."
        )
    check_file(path, WeightsError)
    with needs("reading weights needs safetensors", "'matbackprop[train]'"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    try:
        state = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged: {shorten(str(error), 200)}. Restore or download the file.") from error
    for name in [k for k in state if k.endswith(_SCALE) and k.removesuffix(_SCALE) in state]:
        scale, value = state.pop(name), state[name.removesuffix(_SCALE)]
        if value.dtype != torch.int8 or scale.shape != value.shape[:1]:
            raise WeightsError(f"{path} is damaged: {name} does not match the weights that it scales.")
        state[name.removesuffix(_SCALE)] = value.float() * scale.float().view(-1, *[1] * (value.ndim - 1))
    return {k: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in state.items()}


def check_weights(module: nn.Module, state: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Raise WeightsError unless the keys and shapes of weights match a module, which may be on the device ``meta``.

    Weights of removed layers are dropped.
    """
    expected = module.state_dict()
    removed = {f"{at}.{k}" if at else k for at, m in module.named_modules() for k in getattr(m, "left_out", ())}
    state = {k: v for k, v in state.items() if k not in removed}
    pairs = {k: (state[k], v) for k, v in expected.items() if k in state}
    problems = {
        "missing": [k for k in expected if k not in state],
        "not in the model": [k for k in state if k not in expected],
        "other shapes": [
            f"{k} {tuple(a.shape)} instead of {tuple(b.shape)}" for k, (a, b) in pairs.items() if a.shape != b.shape
        ],
        "other types": [k for k, (a, b) in pairs.items() if a.is_floating_point() != b.is_floating_point()],
    }
    texts = [
        f"{problem}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for problem, names in problems.items()
        if names
    ]
    if texts:
        raise WeightsError(
            f"The weights of {origin} do not match {type(module).__name__}: {'; '.join(texts)}. Use weights of the "
            "same architecture."
        )
    return state


def load_weights_into(module: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Copy ``state`` into ``module`` after :func:`check_weights`, or raise WeightsError and change nothing."""
    state = check_weights(module, state, origin)
    bad = [k for k, v in state.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]
    if bad:
        raise WeightsError(f"The weights of {origin} are not finite: {', '.join(bad[:4])}. Use another file.")
    module.load_state_dict(state)


M = TypeVar("M", bound="PretrainedMixin")

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


class PretrainedMixin:
    """Mixin that adds :meth:`save_pretrained` and :meth:`from_pretrained` to an ``nn.Module``.

    Unlike with the mixin of ``huggingface_hub``, mismatched weights, unknown arguments and pickled files are errors.
    The class must store the arguments of its constructor in ``self.hparams_dict``.

    Example:
        >>> import tempfile
        >>> class Model(PretrainedMixin, nn.Module):
        ...     def __init__(self, width=2):
        ...         super().__init__()
        ...         self.hparams_dict = {"width": width}
        ...         self.layer = nn.Linear(width, 1)
        >>> model, folder = Model(width=3), tempfile.mkdtemp()
        >>> _ = model.save_pretrained(folder)
        >>> bool((Model.from_pretrained(folder).layer.weight == model.layer.weight).all())
        True
    """

    hparams_dict: dict[str, Any]

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
        """Write the model to a folder and return it.

        Args:
            folder: created if needed.
            dtype: dtype of floating-point weights in the file; None for no conversion. ``torch.int8`` quantizes large
                weights (see :func:`in_eight_bits`).
        """
        from safetensors.torch import save

        assert isinstance(self, nn.Module)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"library": "matbackprop", "class": type(self).__name__, "arguments": self.hparams_dict}
        state = {k: v.detach().cpu() for k, v in self.state_dict().items()}
        if dtype == torch.int8:
            state = in_eight_bits(state)
        elif dtype is not None:
            state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
        atomic_write(folder / WEIGHTS, save({k: v.contiguous().clone() for k, v in state.items()}, {"format": "pt"}))
        atomic_write(folder / CARD, model_card(type(self).__name__, self.hparams_dict))
        atomic_write(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        return folder

    @classmethod
    def from_pretrained(cls: type[M], source: str | Path) -> M:
        """Load a model from a folder written by :meth:`save_pretrained`, or ``"owner/name"`` on the Hugging Face hub.

        Raises:
            WeightsError: the folder does not exist, or contains another class or architecture.
        """
        from matbackprop.vision.models.backbones import check_published

        folder = fetch_pretrained(source)
        config, origin = pretrained_config(folder), f"{folder / WEIGHTS}, with the arguments of {CONFIG},"
        if config.get("class") != cls.__name__:
            raise WeightsError(f"{folder} contains a {config.get('class')}, not a {cls.__name__}. Choose another.")
        try:
            _check_arguments(cls, config["arguments"])
            check_published(config["arguments"].get("backbone", "alexnet"))
            with torch.device("meta"), _NoRandomNumbers():  # avoid excessive allocation
                sketch = cls(**config["arguments"])
            assert isinstance(sketch, nn.Module)
            state = read_weights(folder / WEIGHTS)
            check_weights(sketch, state, origin)
            model = cls(**config["arguments"])
        except WeightsError:
            raise
        except Exception as error:  # constructors raise many exception types
            reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise WeightsError(f"{folder / CONFIG} does not match {cls.__name__}: {reason[:500]}") from error
        assert isinstance(model, nn.Module)
        load_weights_into(model, state, origin)
        return model.eval()


class _NoRandomNumbers(TorchFunctionMode):
    """Skip normal initialization, which imports the torch compiler on the meta device and takes over a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.normal_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _check_arguments(cls: type, arguments: dict[str, Any]) -> None:
    """Raise ValueError unless arguments have the annotated types and ranges."""
    from pydantic import TypeAdapter, ValidationError

    hints = typing.get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    for name, value in arguments.items():
        try:
            TypeAdapter(hints.get(name, Any)).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name} is {show(value)}. {error.errors()[0]['msg']}.") from None


def pretrained_config(folder: str | Path) -> dict[str, Any]:
    """Return the ``config.json`` of a saved model, or raise WeightsError."""
    path = Path(folder) / CONFIG
    if not path.exists():
        raise WeightsError(f"{folder} contains no saved model: {CONFIG} is missing. Choose another folder.")
    config = read_json(path, error=WeightsError)
    if not isinstance(config.get("class"), str) or not isinstance(config.get("arguments"), dict):
        raise WeightsError(f"{path} is not the configuration of a saved model. It needs 'class' and 'arguments'.")
    return config


def model_card(kind: str, arguments: Mapping[str, Any]) -> str:
    """Return the model card (README.md) of a saved model."""
    use = "classify" if kind == "RegionClassifier" else "segment"
    rows = "\n".join(f"| {name} | `{json.dumps(value, ensure_ascii=False)}` |" for name, value in arguments.items())
    return f"""---
library_name: matbackprop
tags: [pytorch, matbackprop]
---

# {kind}

Use this folder, or its name on the hub, with matbackprop:

```python
import matbackprop

matbackprop.{use}("photo.jpg", model="owner/name")
```

## Arguments

| name | value |
| --- | --- |
{rows}
"""


def fetch_pretrained(source: str | Path) -> Path:
    """Return the folder of a saved model. If ``source`` is not a folder, download it from the hub."""
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, Path) or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise WeightsError(f"The folder {source} does not exist. Pass a saved model, or owner/name on the hub.")
    with needs(f"{source} is not a folder, and downloading it needs huggingface_hub", "huggingface_hub"):
        import huggingface_hub
    try:
        return Path(huggingface_hub.snapshot_download(str(source), allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:
        raise WeightsError(
            f"The folder {source} does not exist, and it cannot be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {error})"
        ) from error
